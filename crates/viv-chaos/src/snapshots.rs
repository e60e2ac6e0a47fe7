//! What clients do with snapshots, schedules and drains.

use std::collections::BTreeMap;
use std::time::Duration;

use viv_core::exec::ExecSpec;
use viv_core::schedule::MissedRuns;
use viv_core::snapshot::SnapshotState;
use viv_core::spec::Project;
use viv_core::{SandboxId, ScheduleId, SnapshotId};
use viv_engine::{Aim, ForkRequest, ForkedFrom, NewSchedule, NewSnapshot, RollbackRequest};
use viv_store::{ScheduleQuery, SnapshotQuery};

use crate::at_once::at_once;
use crate::clients::Told;
use crate::invariants::Found;
use crate::plan::{Deed, Trouble};
use crate::world::{World, holder, somebody};

/// More than any world has.
const MANY: usize = 10_000;

impl World<'_> {
    /// A snapshot that is there.
    pub(crate) async fn some_snapshot(&mut self) -> Option<SnapshotId> {
        let query = SnapshotQuery { limit: MANY, ..SnapshotQuery::default() };
        let rows = at_once(self.store.truth.snapshots(&query)).await.unwrap_or_default().items;
        let ready: Vec<_> = rows.into_iter().filter(|row| row.state == SnapshotState::Ready).collect();
        let at = self.rng.below(ready.len() as u64) as usize;
        ready.get(at).map(|row| row.id.clone())
    }

    /// Something is asked for; what comes of it comes while other things happen.
    pub(crate) async fn snapshots(&mut self, deed: Deed, id: &SandboxId) -> Found {
        let engine = self.engine();
        // Every second one is asked for by who holds it, perhaps for long.
        let held = self.known.get(id).and_then(|known| known.handle).filter(|_| self.step.is_multiple_of(2));
        let by = held.map_or_else(somebody, |held| holder(id, held, deed, self.step));
        let aim = Aim::at(id.clone(), held);
        match deed {
            Deed::Snapshot => {
                let new = NewSnapshot { name: None, labels: BTreeMap::new(), by, key: None };
                let asked = async move { engine.make_snapshot(aim, new).await.map(|_| Told::Done) };
                self.ask(deed, Some(id), asked).await?;
                // Somebody else does not know of it, and wants it gone.
                if self.rng.chance(15) { self.verb(Deed::Delete, id.clone()).await } else { Ok(()) }
            }
            Deed::Rollback => {
                let Some(snapshot) = self.some_snapshot().await else { return Ok(()) };
                self.begins_with = Some(snapshot.clone());
                let request = RollbackRequest { snapshot, discard: self.rng.chance(50), by };
                let asked = async move {
                    let view = engine.rollback(aim, request).await?;
                    Ok(Told::View(Box::new(view)))
                };
                self.ask(deed, Some(id), asked).await
            }
            _ => {
                if self.known.values().filter(|known| !known.ended).count() > self.living_max {
                    return Ok(());
                }
                let from = match self.some_snapshot().await.filter(|_| self.rng.chance(40)) {
                    Some(snapshot) => {
                        self.begins_with = Some(snapshot.clone());
                        ForkedFrom::Snapshot(snapshot)
                    }
                    None => ForkedFrom::Sandbox(aim),
                };
                // Every second one takes its memory along, where there is any.
                self.asked += 1;
                let memory = self.swarm.has(Trouble::Memory) && self.asked.is_multiple_of(2);
                let request = ForkRequest {
                    project: Project::default(),
                    from,
                    count: 2,
                    name: None,
                    policy: None,
                    labels: BTreeMap::new(),
                    memory,
                    by,
                    key: None,
                };
                let asked = async move {
                    let forked = engine.fork(request).await?;
                    Ok(Told::All(forked.views.into_iter().map(|view| view.sandbox.id).collect()))
                };
                self.ask(Deed::Fork, Some(id), asked).await
            }
        }
    }

    pub(crate) async fn remove_snapshot(&mut self) -> Found {
        let Some(snapshot) = self.some_snapshot().await else { return Ok(()) };
        let engine = self.engine();
        let asked = async move { engine.remove_snapshot(None, &snapshot, &somebody()).await.map(|()| Told::Done) };
        self.ask(Deed::RemoveSnapshot, None, asked).await
    }

    pub(crate) async fn schedule(&mut self, id: &SandboxId) -> Found {
        let words: &[&str] = match self.rng.below(3) {
            0 => &["/bin/sleep", "30"],
            1 => &["/bin/sleep", "90"],
            _ => &["echo", "hello"],
        };
        let argv = words.iter().map(|word| (*word).to_owned()).collect();
        let missed = match self.rng.below(3) {
            0 => MissedRuns::Skip,
            1 => MissedRuns::Once,
            _ => MissedRuns::All,
        };
        let new = NewSchedule {
            cron: if self.rng.chance(50) { "* * * * *" } else { "*/3 * * * *" }.to_owned(),
            zone: "UTC".to_owned(),
            command: ExecSpec { argv, limit_ms: Some(300_000), ..ExecSpec::default() },
            missed,
            enabled: true,
        };
        let (engine, sandbox) = (self.engine(), id.clone());
        let asked = async move { engine.create_schedule(&sandbox, new, somebody()).await.map(|_| Told::Done) };
        self.ask(Deed::Schedule, Some(id), asked).await
    }

    async fn all_schedules(&self) -> Vec<ScheduleId> {
        let query = ScheduleQuery { limit: MANY, ..ScheduleQuery::default() };
        let all = at_once(self.store.truth.schedules(&query)).await.unwrap_or_default().items;
        all.into_iter().map(|schedule| schedule.id).collect()
    }

    pub(crate) async fn schedules(&mut self, deed: Deed) -> Found {
        let all = self.all_schedules().await;
        let at = self.rng.below(all.len() as u64) as usize;
        let Some(schedule) = all.get(at).cloned() else { return Ok(()) };
        let engine = self.engine();
        let asked = async move {
            match deed {
                Deed::RunSchedule => engine.run_schedule(&schedule, somebody()).await?,
                _ => engine.remove_schedule(&schedule, somebody()).await?,
            };
            Ok(Told::Done)
        };
        self.ask(deed, None, asked).await
    }

    /// Nothing comes due any more.
    pub(crate) async fn end_schedules(&mut self) {
        for schedule in self.all_schedules().await {
            // It may have gone with its sandbox.
            let _ = self.engine().remove_schedule(&schedule, somebody()).await;
        }
    }

    /// Nobody else drains, so what is answered is so.
    pub(crate) async fn drain(&mut self, deed: Deed) -> Found {
        let (engine, undrains) = (self.engine(), deed == Deed::Undrain);
        if undrains && self.draining == Some(false) {
            return Ok(());
        }
        let grace = Duration::from_millis(self.rng.below(30_000));
        let asked = async move {
            if undrains { engine.undrain(somebody()).await } else { engine.drain(grace, somebody()).await }
        };
        self.tell(deed.word());
        (self.draining, self.told_drained) = (None, false);
        self.drains += 1;
        let line = self.line.clone();
        let status = tokio::select! {
            biased;
            status = asked => status,
            () = line.has_been_cut() => return Ok(()),
        };
        if status.is_ok() {
            self.draining = Some(!undrains);
        }
        Ok(())
    }

    /// Somebody asks how a drain stands: when it is under way, and when the answer to the last wish was lost.
    pub(crate) async fn look_at_drain(&mut self) {
        let engine = self.engine();
        let line = self.line.clone();
        let status = tokio::select! {
            biased;
            status = engine.drain_status() => status,
            () = line.has_been_cut() => return,
        };
        let Ok(status) = status else { return };
        if self.draining.is_none() {
            self.tell(&format!("is it draining? {}", status.draining));
            self.draining = Some(status.draining);
        }
        // What a provider lists that is not so any more cannot be told from what is.
        let told = self.draining == Some(true) && status.is_drained() && !self.swarm.has(Trouble::StaleListing);
        if told && !self.told_drained {
            self.tell("it is drained");
            self.told_drained = true;
            self.reached("a drain is complete");
        }
    }
}
