//! A store in which calls fail, are slow, or find the disk full, and which keeps what was recorded for those who check.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::Instant;
use viv_core::exec::ExecState;
use viv_core::execution::Execution;
use viv_core::lifecycle::{Actor, Cause, Phase, Sandbox};
use viv_core::schedule::Schedule;
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::spec::{Name, Project};
use viv_core::task::Task;
use viv_core::{ExecutionId, FencingToken, SandboxId, ScheduleId, SnapshotId, TaskId};
use viv_provider::sim::SimProvider;
use viv_provider::{InstanceRef, InstanceState, Provider};
use viv_store::{
    ApiKey, Change, Cursor, Epoch, ExecutionListing, ExecutionQuery, Groups, Idempotency, JournalFilter, JournalLine,
    KeptBytes, Lease, LeaseKind, ListQuery, Listing, NewLine, Owner, PhaseCounts, Remembered, ScheduleListing,
    ScheduleQuery, SnapshotListing, SnapshotQuery, Store, StoreError, TaskListing, TaskOutput, TaskQuery,
};

use crate::at_once::at_once;
use crate::line::Line;
use crate::orders::{Moment, Orders, Turn};
use crate::plan::Trouble;
use crate::rng::Rng;
use crate::script::Way;

type Result<T> = std::result::Result<T, StoreError>;

/// Longest that a slow write takes.
const SLOW_MS_MAX: u64 = 3_000;

/// How late the answer to a chosen write is.
const LATE_ANSWER: Duration = Duration::from_millis(1_500);

/// More snapshots than any world has.
const MANY: usize = 10_000;

/// Whether it is one with which an instance ends by itself.
pub(crate) fn is_an_end(cause: &Cause) -> bool {
    match cause {
        Cause::OomKilled
        | Cause::DiskFull
        | Cause::Crashed
        | Cause::SupervisorLost
        | Cause::Rebooted
        | Cause::MemoryNotRestored => true,
        Cause::Requested
        | Cause::Made
        | Cause::Verified
        | Cause::ProbeFinding
        | Cause::Reappeared
        | Cause::Idle
        | Cause::MemoryShort
        | Cause::UserFreeze
        | Cause::UserHibernate
        | Cause::UserStop
        | Cause::UserDiscard
        | Cause::UserDelete
        | Cause::Rollback
        | Cause::Reset
        | Cause::Expired
        | Cause::Saved
        | Cause::SaveFailed
        | Cause::MemoryNotSaved
        | Cause::AbsenceObserved
        | Cause::AbsenceUnproven
        | Cause::KillFailed
        | Cause::ProviderLost
        | Cause::ProbeFailed
        | Cause::Unresponsive
        | Cause::CreateFailed
        | Cause::SpareBroken
        | Cause::Unhealthy
        | Cause::DeadlinePassed
        | Cause::ServiceEnded
        | Cause::ServiceFailed
        | Cause::HookFailed
        | Cause::Drained => false,
    }
}

/// Something that was recorded.
#[derive(Debug, Clone)]
pub(crate) enum Recorded {
    /// A record, with the lines about it.
    Sandbox { before: Option<Box<Sandbox>>, after: Box<Sandbox>, lines: Vec<NewLine> },
    /// A row of a snapshot; without it, it was forgotten. And who began with it then.
    Row { before: Option<Box<Snapshot>>, after: Option<Box<Snapshot>>, users: Vec<SandboxId> },
    /// A schedule; without it, it was taken away.
    Schedule { before: Option<Box<Schedule>>, after: Option<Box<Schedule>>, lines: Vec<NewLine> },
    /// Its instance was said to be over for this, and really was so.
    Over { instance: InstanceRef, state: InstanceState, cause: Cause },
    /// It was put to rest for idling, while these ran in it.
    Idle { instance: InstanceRef, running: Vec<ExecutionId> },
    /// A row became ready of a sandbox that was deleted.
    Late { snapshot: SnapshotId, sandbox: SandboxId },
    /// It begins anew, and these of its snapshots are left that nobody begins with.
    Reset { sandbox: SandboxId, left: Vec<SnapshotId> },
    /// A task.
    Task { before: Option<Box<Task>>, after: Box<Task> },
    /// An execution.
    Execution { before: Option<Box<Execution>>, after: Box<Execution> },
    /// A token that nobody holds.
    Token { token: FencingToken },
    /// A lease.
    Lease { lease: Lease, epoch: Epoch },
    /// A write of somebody who does not own the store.
    Foreign { what: &'static str },
}

#[derive(Debug)]
struct Shared {
    rng: Rng,
    percent: u64,
    troubles: Vec<Trouble>,
    full_until: Option<Instant>,
    /// How many writes failed for that.
    refused: u64,
    epoch: u64,
    recorded: Vec<Recorded>,
    counts: BTreeMap<Trouble, u64>,
}

/// A store in which things go wrong. Clones share their state, but for the line.
#[derive(Clone)]
pub struct FaultyStore {
    /// Without faults.
    pub(crate) truth: Arc<dyn Store>,
    place: Place,
    line: Line,
    shared: Arc<Mutex<Shared>>,
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Well,
    Before,
    After,
    Slow(Duration),
    LateAnswer,
    Killed(Moment),
}

/// Whose store it is.
#[derive(Clone)]
enum Place {
    /// A world's, with what there really is: all that is written is kept for those who check, and what is asked is waited
    /// for at once ([`at_once`]).
    World(SimProvider),
    /// A real daemon's, with what is ordered.
    Daemon(Arc<Orders>),
}

impl FaultyStore {
    pub(crate) fn new(
        truth: Arc<dyn Store>,
        really: SimProvider,
        seed: u64,
        percent: u64,
        troubles: Vec<Trouble>,
    ) -> Self {
        Self::made(truth, Place::World(really), seed, percent, troubles)
    }

    /// One around that of a real daemon: so many calls in a hundred go wrong, and those that are ordered.
    pub fn around(inner: Arc<dyn Store>, seed: u64, percent: u64, orders: Arc<Orders>) -> Self {
        let troubles = vec![Trouble::StoreBefore, Trouble::StoreAfter, Trouble::SlowStore];
        Self::made(inner, Place::Daemon(orders), seed, percent, troubles)
    }

    fn made(truth: Arc<dyn Store>, place: Place, seed: u64, percent: u64, troubles: Vec<Trouble>) -> Self {
        let shared = Shared {
            rng: Rng::new(seed),
            percent,
            troubles,
            full_until: None,
            refused: 0,
            epoch: 0,
            recorded: Vec::new(),
            counts: BTreeMap::new(),
        };
        Self { truth, place, line: Line::new(), shared: Arc::new(Mutex::new(shared)) }
    }

    /// The same for a daemon that reaches it by this line.
    pub(crate) fn by(&self, line: &Line) -> Self {
        Self { line: line.clone(), ..self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on nothing goes wrong.
    pub(crate) fn heal(&self) {
        let mut shared = self.lock();
        shared.percent = 0;
        shared.full_until = None;
    }

    /// From now on so many calls in a hundred go wrong.
    pub fn set_percent(&self, percent: u64) {
        self.lock().percent = percent;
    }

    /// No write succeeds for so long.
    pub(crate) fn fill(&self, how_long: Duration) {
        self.lock().full_until = Some(Instant::now() + how_long);
    }

    /// How many writes found the disk full.
    pub(crate) fn refused(&self) -> u64 {
        self.lock().refused
    }

    /// What was recorded since this was asked last.
    pub(crate) fn recorded(&self) -> Vec<Recorded> {
        std::mem::take(&mut self.lock().recorded)
    }

    /// How often what went wrong.
    pub(crate) fn counts(&self) -> BTreeMap<Trouble, u64> {
        self.lock().counts.clone()
    }

    /// Whether what is written is kept for those who check.
    fn keeps(&self) -> bool {
        matches!(self.place, Place::World(_))
    }

    /// What was asked for: nothing else of a world happens until then.
    async fn answered<T>(&self, call: impl Future<Output = T>) -> T {
        match self.place {
            Place::World(_) => at_once(call).await,
            Place::Daemon(_) => call.await,
        }
    }

    fn note(&self, recorded: Recorded) {
        if self.keeps() {
            self.lock().recorded.push(recorded);
        }
    }

    /// What is ordered for this write.
    fn ordered(&self, name: &'static str) -> Option<Fate> {
        const OF_WRITES: [Trouble; 3] = [Trouble::StoreBefore, Trouble::StoreAfter, Trouble::SlowStore];
        let Place::Daemon(orders) = &self.place else { return None };
        if let Some(moment) = orders.is_killed_at(name) {
            return Some(Fate::Killed(moment));
        }
        match orders.take(name, |turn| turn.is_among(&OF_WRITES))? {
            Turn::Trouble(Trouble::StoreBefore) => Some(Fate::Before),
            Turn::Trouble(Trouble::StoreAfter) => Some(Fate::After),
            Turn::Trouble(_) | Turn::Killed(_) => Some(Fate::Slow(orders.silence())),
        }
    }

    /// The daemon is dead: the real one, or one that nothing reaches any more, and that does nothing.
    async fn die(&self) {
        match &self.place {
            Place::Daemon(orders) => orders.die(),
            Place::World(_) => {
                self.line.cut();
                std::future::pending::<()>().await;
            }
        }
    }

    fn fate(&self, writes: bool) -> Fate {
        let mut shared = self.lock();
        let shared = &mut *shared;
        if writes && shared.full_until.is_some_and(|until| Instant::now() < until) {
            shared.refused += 1;
            return Fate::Before;
        }
        if shared.troubles.is_empty() || !shared.rng.chance(shared.percent) {
            return Fate::Well;
        }
        let trouble = shared.troubles[shared.rng.below(shared.troubles.len() as u64) as usize];
        let fate = match trouble {
            Trouble::StoreAfter if writes => Fate::After,
            Trouble::SlowStore if writes => Fate::Slow(Duration::from_millis(1 + shared.rng.below(SLOW_MS_MAX))),
            Trouble::StoreBefore => Fate::Before,
            _ => return Fate::Well,
        };
        *shared.counts.entry(trouble).or_default() += 1;
        fate
    }

    pub(crate) async fn read<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        self.line
            .call(async {
                match self.fate(false) {
                    Fate::Well | Fate::After | Fate::Slow(_) | Fate::LateAnswer | Fate::Killed(_) => {
                        self.answered(call).await
                    }
                    Fate::Before => Err(injected()),
                }
            })
            .await
    }

    pub(crate) async fn write<T>(
        &self,
        name: &'static str,
        epoch: Epoch,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.write_about(name, None, epoch, call).await
    }

    /// How a write goes that was chosen.
    fn chosen(&self, name: &'static str, about: Option<&SandboxId>) -> Option<Fate> {
        match self.line.way_of(name, true, about)? {
            Way::CrashBefore => Some(Fate::Killed(Moment::Before)),
            Way::CrashAfter => Some(Fate::Killed(Moment::After)),
            Way::Unanswered => Some(Fate::After),
            Way::AnsweredLate => Some(Fate::LateAnswer),
            Way::Twice => None,
        }
    }

    /// A write that is about one sandbox.
    async fn write_about<T>(
        &self,
        name: &'static str,
        about: Option<&SandboxId>,
        epoch: Epoch,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.line
            .call(async {
                let chosen = self.chosen(name, about).or_else(|| self.ordered(name));
                let fate = chosen.unwrap_or_else(|| self.fate(true));
                match fate {
                    Fate::Before => return Err(injected()),
                    Fate::Slow(by) => tokio::time::sleep(by).await,
                    Fate::Killed(Moment::Before) => self.die().await,
                    Fate::Well | Fate::After | Fate::LateAnswer | Fate::Killed(Moment::After) => {}
                }
                let answer = self.answered(call).await;
                if answer.is_ok() && epoch.0 != self.lock().epoch {
                    self.note(Recorded::Foreign { what: name });
                }
                match fate {
                    Fate::Killed(_) => {
                        self.die().await;
                        answer
                    }
                    Fate::LateAnswer => {
                        tokio::time::sleep(LATE_ANSWER).await;
                        answer
                    }
                    Fate::After => Err(injected()),
                    Fate::Well | Fate::Before | Fate::Slow(_) => answer,
                }
            })
            .await
    }

    /// What is written of these sandboxes and rows by a call, as it was before and is after. The store in memory never
    /// waits, so nobody comes between.
    async fn watched(&self, changes: &[Change], call: impl Future<Output = Result<Cursor>>) -> Result<Cursor> {
        let Place::World(really) = &self.place else { return call.await };
        let mut before = Vec::new();
        for change in changes {
            let mut rows = Vec::new();
            for row in &change.snapshots {
                rows.push(self.truth.snapshot(&row.id).await?.map(Box::new));
            }
            before.push((self.truth.get(&change.sandbox.id).await?.map(Box::new), rows));
        }
        let cursor = call.await?;
        for (change, (before, rows)) in changes.iter().zip(before) {
            let Some(after) = self.truth.get(&change.sandbox.id).await? else { continue };
            let moved = before.as_ref().is_some_and(|before| before.phase.name() != after.phase.name());
            let lived =
                before.as_ref().is_some_and(|before| matches!(before.phase, Phase::Ready | Phase::Frozen { .. }));
            let ended = lived && after.phase == Phase::Lost && is_an_end(&after.cause.cause);
            if moved && (ended || matches!(after.cause.cause, Cause::Expired | Cause::ProviderLost)) {
                let instance = InstanceRef { sandbox: after.id.clone(), generation: after.generation };
                let state = really.observe(&instance).await.map(|seen| seen.state);
                let (state, cause) = (state.unwrap_or(InstanceState::Absent), after.cause.cause.clone());
                self.note(Recorded::Over { instance, state, cause });
            }
            // The next one is begun: whoever asks for a rollback instead keeps what there is.
            let anew = before.as_ref().is_some_and(|it| it.resetting && it.generation < after.generation);
            if anew && !after.resetting && after.cause.cause == Cause::Reset {
                let query = SnapshotQuery { sandbox: Some(after.id.clone()), limit: MANY, ..SnapshotQuery::default() };
                let everybody = ListQuery { deleted: true, limit: MANY, ..ListQuery::default() };
                let everybody = self.truth.list(&everybody).await?.items;
                let mut left = Vec::new();
                for row in self.truth.snapshots(&query).await?.items {
                    // Whoever began with it may have gone since the others were removed.
                    let began = everybody.iter().any(|other| other.origin.as_ref() == Some(&row.id));
                    let used = began || !self.truth.users(&row.id, 1).await?.is_empty();
                    // So may a record that began with it, and does not any more, while its instance is still there.
                    let held = really.snapshot(&row.id).await.is_ok_and(|seen| !seen.used_by.is_empty());
                    let used = used || held;
                    if row.state == SnapshotState::Ready && !used {
                        left.push(row.id);
                    }
                }
                self.note(Recorded::Reset { sandbox: after.id.clone(), left });
            }
            let was_ready = before.as_ref().is_some_and(|before| before.phase == Phase::Ready);
            if moved && was_ready && after.cause.cause == Cause::Idle && after.cause.by == Actor::part("idle") {
                let instance = InstanceRef { sandbox: after.id.clone(), generation: after.generation };
                let all = really.executions(&instance).await.unwrap_or_default();
                let runs = all.into_iter().filter(|one| one.state == ExecState::Running && !one.detached);
                self.note(Recorded::Idle { instance, running: runs.map(|one| one.id).collect() });
            }
            self.note(Recorded::Sandbox { before, after: Box::new(after), lines: change.lines.clone() });
            for (row, before) in change.snapshots.iter().zip(rows) {
                let users = self.truth.users(&row.id, 1).await?;
                let new = before.as_ref().is_none_or(|before| before.state != SnapshotState::Ready);
                if new && row.state == SnapshotState::Ready && change.sandbox.deleted {
                    self.note(Recorded::Late { snapshot: row.id.clone(), sandbox: change.sandbox.id.clone() });
                }
                self.note(Recorded::Row { before, after: Some(Box::new(row.clone())), users });
            }
        }
        Ok(cursor)
    }

    /// The same for rows of executions.
    async fn watch_executions(
        &self,
        ids: &[(SandboxId, ExecutionId)],
        call: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let mut before = Vec::new();
        for (sandbox, execution) in ids {
            before.push(self.truth.execution(sandbox, execution).await?.map(Box::new));
        }
        call.await?;
        for ((sandbox, execution), before) in ids.iter().zip(before) {
            if let Some(after) = self.truth.execution(sandbox, execution).await?.map(Box::new)
                && before.as_ref() != Some(&after)
            {
                self.note(Recorded::Execution { before, after });
            }
        }
        Ok(())
    }
}

fn injected() -> StoreError {
    StoreError::Unavailable { what: "simulated".to_owned() }
}

#[async_trait]
impl Store for FaultyStore {
    fn groups(&self) -> Groups {
        self.truth.groups()
    }

    async fn own(&self, owner: Owner) -> Result<Epoch> {
        let taken_over = async {
            let epoch = self.truth.own(owner).await?;
            self.lock().epoch = epoch.0;
            Ok(epoch)
        };
        self.read(taken_over).await
    }

    async fn owner(&self) -> Result<Option<Owner>> {
        self.read(self.truth.owner()).await
    }

    async fn commit(&self, epoch: Epoch, change: Change) -> Result<Cursor> {
        let changes = [change.clone()];
        let committed = Box::pin(self.watched(&changes, self.truth.commit(epoch, change)));
        self.write_about("commit", Some(&changes[0].sandbox.id), epoch, committed).await
    }

    async fn commit_all(&self, epoch: Epoch, changes: Vec<Change>) -> Result<Cursor> {
        let all = changes.clone();
        let committed = Box::pin(self.watched(&all, self.truth.commit_all(epoch, changes)));
        self.write_about("commit_all", all.first().map(|change| &change.sandbox.id), epoch, committed).await
    }

    async fn put_snapshot(&self, epoch: Epoch, row: Snapshot, lines: Vec<NewLine>) -> Result<Cursor> {
        let put = async {
            let before = self.truth.snapshot(&row.id).await?.map(Box::new);
            let cursor = self.truth.put_snapshot(epoch, row.clone(), lines).await?;
            let users = if row.state == SnapshotState::Removing { self.truth.users(&row.id, 1).await? } else { vec![] };
            self.note(Recorded::Row { before, after: Some(Box::new(row)), users });
            Ok(cursor)
        };
        self.write("put_snapshot", epoch, put).await
    }

    async fn forget_snapshot(&self, epoch: Epoch, snapshot: &SnapshotId, lines: Vec<NewLine>) -> Result<Cursor> {
        let forgotten = async {
            let before = self.truth.snapshot(snapshot).await?.map(Box::new);
            let cursor = self.truth.forget_snapshot(epoch, snapshot, lines).await?;
            let users = self.truth.users(snapshot, 1).await?;
            if before.is_some() {
                self.note(Recorded::Row { before, after: None, users });
            }
            Ok(cursor)
        };
        self.write("forget_snapshot", epoch, forgotten).await
    }

    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<Option<Snapshot>> {
        self.read(self.truth.snapshot(snapshot)).await
    }

    async fn snapshots(&self, query: &SnapshotQuery) -> Result<SnapshotListing> {
        self.read(self.truth.snapshots(query)).await
    }

    async fn users(&self, snapshot: &SnapshotId, limit: usize) -> Result<Vec<SandboxId>> {
        self.read(self.truth.users(snapshot, limit)).await
    }

    async fn append(&self, epoch: Epoch, lines: Vec<NewLine>) -> Result<Cursor> {
        self.write("append", epoch, self.truth.append(epoch, lines)).await
    }

    async fn get(&self, sandbox: &SandboxId) -> Result<Option<Sandbox>> {
        self.read(self.truth.get(sandbox)).await
    }

    async fn find(&self, project: &Project, name: &Name) -> Result<Option<Sandbox>> {
        self.read(self.truth.find(project, name)).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Listing> {
        self.read(self.truth.list(query)).await
    }

    async fn count(&self, project: Option<&Project>) -> Result<PhaseCounts> {
        self.read(self.truth.count(project)).await
    }

    async fn due(
        &self,
        after: Option<&(u64, SandboxId)>,
        until_ms: u64,
        limit: usize,
    ) -> Result<Vec<(u64, SandboxId)>> {
        self.read(self.truth.due(after, until_ms, limit)).await
    }

    async fn next_due_ms(&self) -> Result<Option<u64>> {
        self.read(self.truth.next_due_ms()).await
    }

    async fn remembered(&self, key: &Idempotency) -> Result<Option<Remembered>> {
        self.read(self.truth.remembered(key)).await
    }

    async fn journal(&self, after: Cursor, filter: &JournalFilter, limit: usize) -> Result<Vec<JournalLine>> {
        self.read(self.truth.journal(after, filter, limit)).await
    }

    async fn journal_tail(
        &self,
        before: Option<Cursor>,
        filter: &JournalFilter,
        limit: usize,
    ) -> Result<Vec<JournalLine>> {
        self.read(self.truth.journal_tail(before, filter, limit)).await
    }

    fn tail(&self) -> watch::Receiver<Cursor> {
        self.truth.tail()
    }

    async fn lease(
        &self,
        epoch: Epoch,
        sandbox: &SandboxId,
        kind: LeaseKind,
        holder: &str,
        now_ms: u64,
        ttl_ms: u64,
    ) -> Result<Lease> {
        let leased = async {
            let lease = self.truth.lease(epoch, sandbox, kind, holder, now_ms, ttl_ms).await?;
            self.note(Recorded::Lease { lease: lease.clone(), epoch });
            Ok(lease)
        };
        self.write_about("lease", Some(sandbox), epoch, leased).await
    }

    async fn release(&self, epoch: Epoch, sandbox: &SandboxId, kind: LeaseKind, token: FencingToken) -> Result<()> {
        let released = self.truth.release(epoch, sandbox, kind, token);
        self.write_about("release", Some(sandbox), epoch, released).await
    }

    async fn draw_token(&self, epoch: Epoch) -> Result<FencingToken> {
        let drawn = async {
            let token = self.truth.draw_token(epoch).await?;
            self.note(Recorded::Token { token });
            Ok(token)
        };
        self.write("draw_token", epoch, drawn).await
    }

    async fn raise_token(&self, epoch: Epoch, seen: FencingToken) -> Result<()> {
        self.write("raise_token", epoch, self.truth.raise_token(epoch, seen)).await
    }

    async fn leases(&self, sandbox: &SandboxId) -> Result<Vec<Lease>> {
        self.read(self.truth.leases(sandbox)).await
    }

    async fn stray_leases(&self, limit: usize) -> Result<Vec<Lease>> {
        self.read(self.truth.stray_leases(limit)).await
    }

    async fn touch(&self, epoch: Epoch, sandbox: &SandboxId, active_at_ms: u64) -> Result<()> {
        let touched = self.truth.touch(epoch, sandbox, active_at_ms);
        self.write_about("touch", Some(sandbox), epoch, touched).await
    }

    async fn put_key(&self, epoch: Epoch, key: ApiKey, line: NewLine) -> Result<()> {
        self.write("put_key", epoch, self.truth.put_key(epoch, key, line)).await
    }

    async fn keys(&self) -> Result<Vec<ApiKey>> {
        self.read(self.truth.keys()).await
    }

    async fn meta(&self, name: &str) -> Result<Option<String>> {
        self.read(self.truth.meta(name)).await
    }

    async fn set_meta_once(&self, epoch: Epoch, name: &str, value: &str) -> Result<String> {
        self.write("set_meta_once", epoch, self.truth.set_meta_once(epoch, name, value)).await
    }

    async fn put_meta(&self, epoch: Epoch, name: &str, value: Option<&str>, line: NewLine) -> Result<()> {
        self.write("put_meta", epoch, self.truth.put_meta(epoch, name, value, line)).await
    }

    async fn put_schedule(&self, epoch: Epoch, schedule: Schedule, lines: Vec<NewLine>, max: u64) -> Result<()> {
        let put = async {
            let before = self.truth.schedule(&schedule.id).await?.map(Box::new);
            self.truth.put_schedule(epoch, schedule.clone(), lines.clone(), max).await?;
            self.note(Recorded::Schedule { before, after: Some(Box::new(schedule)), lines });
            Ok(())
        };
        self.write("put_schedule", epoch, put).await
    }

    async fn schedule(&self, id: &ScheduleId) -> Result<Option<Schedule>> {
        self.read(self.truth.schedule(id)).await
    }

    async fn schedules(&self, query: &ScheduleQuery) -> Result<ScheduleListing> {
        self.read(self.truth.schedules(query)).await
    }

    async fn due_schedules(&self, until_ms: u64, limit: usize) -> Result<Vec<ScheduleId>> {
        self.read(self.truth.due_schedules(until_ms, limit)).await
    }

    async fn next_schedule_ms(&self) -> Result<Option<u64>> {
        self.read(self.truth.next_schedule_ms()).await
    }

    async fn running_schedules(&self) -> Result<Vec<ScheduleId>> {
        self.read(self.truth.running_schedules()).await
    }

    async fn remove_schedule(&self, epoch: Epoch, id: &ScheduleId, line: NewLine) -> Result<bool> {
        let removed = async {
            let before = self.truth.schedule(id).await?.map(Box::new);
            let was_there = self.truth.remove_schedule(epoch, id, line.clone()).await?;
            if was_there {
                self.note(Recorded::Schedule { before, after: None, lines: vec![line] });
            }
            Ok(was_there)
        };
        self.write("remove_schedule", epoch, removed).await
    }

    async fn put_task(&self, epoch: Epoch, task: Task, lines: Vec<NewLine>) -> Result<()> {
        let put = async {
            let before = self.truth.task(&task.id).await?.map(Box::new);
            self.truth.put_task(epoch, task.clone(), lines).await?;
            self.note(Recorded::Task { before, after: Box::new(task) });
            Ok(())
        };
        self.write("put_task", epoch, put).await
    }

    async fn task(&self, id: &TaskId) -> Result<Option<Task>> {
        self.read(self.truth.task(id)).await
    }

    async fn tasks(&self, query: &TaskQuery) -> Result<TaskListing> {
        self.read(self.truth.tasks(query)).await
    }

    async fn living_tasks(&self) -> Result<Vec<TaskId>> {
        self.read(self.truth.living_tasks()).await
    }

    async fn tasks_at_work(&self, sandboxes: &[SandboxId]) -> Result<BTreeMap<SandboxId, TaskId>> {
        self.read(self.truth.tasks_at_work(sandboxes)).await
    }

    async fn keep_task_output(&self, epoch: Epoch, output: TaskOutput) -> Result<()> {
        self.write("keep_task_output", epoch, self.truth.keep_task_output(epoch, output)).await
    }

    async fn task_output(&self, task: &TaskId, execution: &ExecutionId) -> Result<Option<TaskOutput>> {
        self.read(self.truth.task_output(task, execution)).await
    }

    async fn note_executions(&self, epoch: Epoch, rows: Vec<Execution>) -> Result<()> {
        let ids: Vec<(SandboxId, ExecutionId)> = rows.iter().map(|row| (row.sandbox.clone(), row.id.clone())).collect();
        let noted = self.watch_executions(&ids, self.truth.note_executions(epoch, rows));
        self.write("note_executions", epoch, noted).await
    }

    async fn put_execution(&self, epoch: Epoch, row: Execution, queued_max: u64) -> Result<()> {
        let ids = [(row.sandbox.clone(), row.id.clone())];
        let put = self.watch_executions(&ids, self.truth.put_execution(epoch, row, queued_max));
        self.write("put_execution", epoch, put).await
    }

    async fn execution(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Execution>> {
        self.read(self.truth.execution(sandbox, execution)).await
    }

    async fn executions(&self, query: &ExecutionQuery) -> Result<ExecutionListing> {
        self.read(self.truth.executions(query)).await
    }

    async fn put_outputs(
        &self,
        epoch: Epoch,
        sandbox: &SandboxId,
        outputs: Vec<KeptBytes>,
        bytes_max: u64,
    ) -> Result<()> {
        self.write("put_outputs", epoch, self.truth.put_outputs(epoch, sandbox, outputs, bytes_max)).await
    }

    async fn output(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Vec<u8>>> {
        self.read(self.truth.output(sandbox, execution)).await
    }

    async fn retain(&self, epoch: Epoch, before_ms: u64, limit: usize) -> Result<u64> {
        self.write("retain", epoch, self.truth.retain(epoch, before_ms, limit)).await
    }

    async fn backup(&self, to: &Path) -> Result<()> {
        self.read(self.truth.backup(to)).await
    }
}
