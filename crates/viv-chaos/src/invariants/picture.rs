//! What must hold of all that is recorded beside all that is really there.

use std::collections::{BTreeMap, BTreeSet};

use viv_core::lifecycle::{Phase, PhaseName, Sandbox};
use viv_core::schedule::Schedule;
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::task::Task;
use viv_core::{Generation, OwnerMark, SandboxId, SnapshotId};
use viv_provider::sim::SimProvider;
use viv_provider::{InstanceState, PageRequest, Provider};
use viv_store::{ListQuery, ScheduleQuery, SnapshotQuery, Store, TaskQuery};

use super::{Found, holds};

/// More than any world has.
const MANY: usize = 10_000;

/// How late a passed deadline may be noticed: a daemon may have to be started first.
const NOTICED_WITHIN_MS: u64 = 120_000;

/// All that is recorded, and all that is there.
#[derive(Debug)]
pub(crate) struct Picture {
    pub(crate) records: BTreeMap<SandboxId, Sandbox>,
    pub(crate) instances: BTreeMap<SandboxId, (Generation, InstanceState)>,
    pub(crate) rows: BTreeMap<SnapshotId, Snapshot>,
    pub(crate) saved: BTreeSet<SnapshotId>,
    pub(crate) schedules: Vec<Schedule>,
    pub(crate) tasks: Vec<Task>,
    /// Instances that no record is to have.
    pub(crate) strays: BTreeSet<SandboxId>,
}

impl Picture {
    /// Neither store nor provider fail here, or take time: this is the truth.
    pub(crate) async fn take(store: &dyn Store, provider: &SimProvider, owner: &OwnerMark) -> Self {
        let told = "the truth is always told";
        let all = ListQuery { deleted: true, limit: MANY, ..ListQuery::default() };
        let records = store.list(&all).await.expect(told).items;
        let rows = SnapshotQuery { limit: MANY, ..SnapshotQuery::default() };
        let rows = store.snapshots(&rows).await.expect(told).items;
        let schedules = ScheduleQuery { limit: MANY, ..ScheduleQuery::default() };
        let schedules = store.schedules(&schedules).await.expect(told).items;
        let tasks = TaskQuery { limit: MANY, ..TaskQuery::default() };
        let tasks = store.tasks(&tasks).await.expect(told).items;
        let mut instances = BTreeMap::new();
        let mut page = PageRequest::default();
        loop {
            let listed = provider.list(owner, page).await.expect(told);
            let found = listed.items.into_iter();
            instances.extend(found.map(|item| (item.instance.sandbox, (item.instance.generation, item.state))));
            let Some(next) = listed.next else { break };
            page = PageRequest { cursor: Some(next), limit: None };
        }
        let mut saved = BTreeSet::new();
        let mut page = PageRequest::default();
        loop {
            let listed = provider.snapshots(owner, page).await.expect(told);
            saved.extend(listed.items.into_iter().map(|seen| seen.snapshot.id));
            let Some(next) = listed.next else { break };
            page = PageRequest { cursor: Some(next), limit: None };
        }
        Self {
            records: records.into_iter().map(|record| (record.id.clone(), record)).collect(),
            instances,
            rows: rows.into_iter().map(|row| (row.id.clone(), row)).collect(),
            saved,
            schedules,
            tasks,
            strays: BTreeSet::new(),
        }
    }

    /// What runs, or may.
    pub(crate) fn living(&self) -> impl Iterator<Item = (&SandboxId, Generation)> {
        let lives = |state: &InstanceState| !matches!(state, InstanceState::Ended(_) | InstanceState::Absent);
        self.instances.iter().filter(move |(_, (_, state))| lives(state)).map(|(id, (generation, _))| (id, *generation))
    }

    pub(crate) fn check(&self) -> Found {
        self.instances_are_wanted()?;
        self.rest_is_absent()?;
        self.snapshots_are_there()?;
        for schedule in &self.schedules {
            let lives = self.records.get(&schedule.sandbox).is_some_and(|record| !record.is_over());
            holds("schedules-of-the-living", lives, || format!("{} of {}", schedule.id, schedule.sandbox))?;
        }
        let mut names = BTreeSet::new();
        for record in self.records.values().filter(|record| !record.is_over() && !record.deleted) {
            let Some(name) = &record.name else { continue };
            let new = names.insert((&record.project, name));
            holds("names-are-unique", new, || format!("{name} is {} and another one", record.id))?;
        }
        Ok(())
    }

    fn instances_are_wanted(&self) -> Found {
        for (id, (generation, state)) in &self.instances {
            let known = self.records.get(id).is_some_and(|record| *generation <= record.generation);
            holds("intent-before-instance", known, || format!("{id}@{generation} is {state}"))?;
        }
        for (id, generation) in self.living() {
            let Some(record) = self.records.get(id) else { continue };
            holds("one-generation-lives", generation == record.generation, || {
                format!("{id}@{generation} lives, and the record is at {}", record.generation)
            })?;
        }
        Ok(())
    }

    fn rest_is_absent(&self) -> Found {
        for (id, record) in &self.records {
            let name = match &record.phase {
                Phase::Stopped => "stopped-is-absent",
                Phase::Hibernated { .. } => "hibernated-is-absent",
                Phase::Failed { work: None } => "failed-leaves-nothing",
                _ => continue,
            };
            let there = self.instances.get(id);
            holds(name, there.is_none(), || format!("{id} is {:?}, and there: {there:?}", record.phase))?;
        }
        Ok(())
    }

    fn snapshots_are_there(&self) -> Found {
        for (id, row) in self.rows.iter().filter(|(_, row)| row.state == SnapshotState::Ready) {
            holds("ready-snapshots-exist", self.saved.contains(id), || format!("{row:?} is not at the provider"))?;
        }
        for record in self.records.values() {
            for used in record.uses() {
                let ready = self.rows.get(used).is_some_and(|row| row.state == SnapshotState::Ready);
                holds("begins-with-what-is-there", ready, || {
                    format!("{} begins with {used}, of which there is {:?}", record.id, self.rows.get(used))
                })?;
            }
        }
        Ok(())
    }

    /// How many may live.
    pub(crate) fn count(&self) -> u64 {
        // What was saved and is deleted is on its way out, and asks for no room.
        let counts = |record: &&Sandbox| {
            let name = record.phase.name();
            let is_leaving = name == PhaseName::Stopping && !self.instances.contains_key(&record.id);
            PhaseName::MAY_LIVE.contains(&name) && !is_leaving
        };
        self.records.values().filter(counts).count() as u64
    }

    /// That is bounded.
    pub(crate) fn check_quota(&self, max: u64) -> Found {
        let count = self.count();
        holds("quota-holds", count <= max, || format!("{count} may live, and {max} are allowed"))
    }

    /// What is overdue was noticed, and what has an end came to it.
    pub(crate) fn check_deadlines(&self, now_ms: u64) -> Found {
        for record in self.records.values() {
            let until_ms = record.lives_until_ms().filter(|_| self.instances.contains_key(&record.id));
            let lives_on = until_ms.is_some_and(|until_ms| now_ms >= until_ms.saturating_add(NOTICED_WITHIN_MS));
            holds("ends-at-its-deadline", !lives_on, || format!("{} was to end at {until_ms:?}", record.id))?;
            let Some(work) = record.phase.work() else { continue };
            holds("stuck-is-noticed", now_ms < work.deadline_at_ms.saturating_add(NOTICED_WITHIN_MS), || {
                format!("{} is {:?} at {now_ms}", record.id, record.phase)
            })?;
        }
        Ok(())
    }
}
