//! A store without a file: for simulation, and for tests of what stands on one.
//!
//! It is deterministic: no thread, no clock, no input or output, and no call ever waits. Clones are handles to the same
//! data, as several processes would have; a daemon that is killed in a simulation drops its handle, the next one takes
//! another. [`MemoryStore::set_faults`] makes calls fail, before or after they had their effect.
//!
//! Architecture invariant: every write checks everything before it changes anything, so there is nothing to roll back.

mod executions;
mod read;
mod schedules;
mod snapshots;
mod subscriptions;
mod tasks;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::watch;
use viv_core::execution::Execution;
use viv_core::lifecycle::Sandbox;
use viv_core::planted::{Planted, is_planted};
use viv_core::schedule::Schedule;
use viv_core::snapshot::Snapshot;
use viv_core::spec::{Name, Project};
use viv_core::subscription::{Letter, Subscription};
use viv_core::task::Task;
use viv_core::{ExecutionId, FencingToken, SandboxId, ScheduleId, SnapshotId, TaskId, WebhookId};

use crate::error::StoreError;
use crate::execution::{ExecutionListing, ExecutionQuery, KeptBytes};
use crate::journal::{Cursor, JournalFilter, JournalLine, NewLine};
use crate::record::{
    ApiKey, Change, Idempotency, Lease, LeaseKind, ListQuery, Listing, Owner, PhaseCounts, Remembered, ScheduleListing,
    ScheduleQuery, SnapshotListing, SnapshotQuery,
};
use crate::store::{Epoch, Store};
use crate::task::{TaskListing, TaskOutput, TaskQuery};

type Result<T> = std::result::Result<T, StoreError>;

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Before it had an effect.
    Before,
    /// After it had its effect: only the answer is lost.
    After,
}

/// Decides which call fails, by the method's name: `commit`, `lease`, `get`, …
pub type Faults = Box<dyn FnMut(&'static str) -> Option<Fault> + Send>;

/// A store without a file.
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    faults: Mutex<Option<Faults>>,
    tail: watch::Sender<Cursor>,
    /// What [`Store::backup`] copied, by path.
    backups: Mutex<BTreeMap<PathBuf, State>>,
}

/// Everything that is known.
#[derive(Debug, Clone, Default)]
struct State {
    owner: Option<Owner>,
    epoch: u64,
    /// The greatest fencing token that was given.
    token: u64,
    /// With the latest activity inside.
    sandboxes: BTreeMap<SandboxId, Sandbox>,
    snapshots: BTreeMap<SnapshotId, Snapshot>,
    journal: BTreeMap<Cursor, NewLine>,
    /// Of the last line that was ever written.
    cursor: Cursor,
    leases: BTreeMap<(SandboxId, LeaseKind), Held>,
    /// By project, route and key.
    idempotency: BTreeMap<(Project, String, String), Remembered>,
    keys: BTreeMap<String, ApiKey>,
    meta: BTreeMap<String, String>,
    schedules: BTreeMap<ScheduleId, Schedule>,
    tasks: BTreeMap<TaskId, Task>,
    task_outputs: BTreeMap<(TaskId, ExecutionId), TaskOutput>,
    executions: BTreeMap<(SandboxId, ExecutionId), Execution>,
    outputs: BTreeMap<(SandboxId, ExecutionId), KeptBytes>,
    /// Each with its place in the journal.
    subscriptions: BTreeMap<WebhookId, (Subscription, Cursor)>,
    letters: BTreeMap<(WebhookId, Cursor), Letter>,
}

/// A lease, and under which ownership it was taken.
#[derive(Debug, Clone)]
struct Held {
    lease: Lease,
    epoch: u64,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// An empty one.
    pub fn new() -> Self {
        Self::of(State::default())
    }

    fn of(state: State) -> Self {
        let tail = watch::Sender::new(state.cursor);
        let shared =
            Shared { state: Mutex::new(state), faults: Mutex::new(None), tail, backups: Mutex::new(BTreeMap::new()) };
        Self { shared: Arc::new(shared) }
    }

    /// Leaves a lease behind, whatever it is on: for tests of who finds it.
    pub fn leave_lease(&self, lease: Lease) {
        let mut state = locked(&self.shared.state);
        let epoch = state.epoch;
        state.leases.insert((lease.sandbox.clone(), lease.kind), Held { lease, epoch });
    }

    /// From now on asks this, before every call through any handle, whether that fails. `None` ends it.
    pub fn set_faults(&self, faults: Option<Faults>) {
        *locked(&self.shared.faults) = faults;
    }

    /// Another store that holds what [`Store::backup`] copied to this path.
    pub fn restored(&self, from: &Path) -> Option<Self> {
        locked(&self.shared.backups).get(from).cloned().map(Self::of)
    }

    /// Performs one call: all of it, or none of it and an error.
    fn call<T>(&self, name: &'static str, work: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let fault = locked(&self.shared.faults).as_mut().and_then(|faults| faults(name));
        if fault == Some(Fault::Before) {
            return Err(injected(name));
        }
        let (answer, cursor) = {
            let mut state = locked(&self.shared.state);
            let answer = work(&mut state);
            (answer, state.cursor)
        };
        self.shared.tail.send_if_modified(|newest| {
            let grew = *newest < cursor;
            *newest = cursor.max(*newest);
            grew
        });
        match fault {
            Some(Fault::After) => Err(injected(name)),
            Some(Fault::Before) | None => answer,
        }
    }

    /// The same for a write, which needs the latest ownership.
    fn write<T>(&self, name: &'static str, epoch: Epoch, work: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        // Nobody was ever given epoch 0.
        let latest = |state: &State| (state.epoch == epoch.0 || is_planted(Planted::SupersededWrites)) && epoch.0 > 0;
        self.call(name, |state| if latest(state) { work(state) } else { Err(StoreError::Superseded) })
    }
}

/// A panic of one test's closure must not hide what another one finds.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn injected(name: &str) -> StoreError {
    StoreError::Unavailable { what: format!("injected into {name}") }
}

#[async_trait]
impl Store for MemoryStore {
    async fn own(&self, owner: Owner) -> Result<Epoch> {
        self.call("own", |state| Ok(state.own(owner)))
    }

    async fn owner(&self) -> Result<Option<Owner>> {
        self.call("owner", |state| Ok(state.owner.clone()))
    }

    async fn commit(&self, epoch: Epoch, change: Change) -> Result<Cursor> {
        self.write("commit", epoch, |state| state.commit(change))
    }

    async fn commit_all(&self, epoch: Epoch, changes: Vec<Change>) -> Result<Cursor> {
        self.write("commit_all", epoch, |state| state.commit_all(changes))
    }

    async fn put_snapshot(&self, epoch: Epoch, row: Snapshot, lines: Vec<NewLine>) -> Result<Cursor> {
        self.write("put_snapshot", epoch, |state| {
            state.check_row(&row)?;
            state.snapshots.insert(row.id.clone(), row);
            Ok(state.append(lines))
        })
    }

    async fn forget_snapshot(&self, epoch: Epoch, snapshot: &SnapshotId, lines: Vec<NewLine>) -> Result<Cursor> {
        self.write("forget_snapshot", epoch, |state| state.forget_snapshot(snapshot, lines))
    }

    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<Option<Snapshot>> {
        self.call("snapshot", |state| Ok(state.snapshots.get(snapshot).cloned()))
    }

    async fn snapshots(&self, query: &SnapshotQuery) -> Result<SnapshotListing> {
        self.call("snapshots", |state| state.list_snapshots(query))
    }

    async fn users(&self, snapshot: &SnapshotId, limit: usize) -> Result<Vec<SandboxId>> {
        self.call("users", |state| Ok(state.users(snapshot, limit)))
    }

    async fn append(&self, epoch: Epoch, lines: Vec<NewLine>) -> Result<Cursor> {
        self.write("append", epoch, |state| Ok(state.append(lines)))
    }

    async fn get(&self, sandbox: &SandboxId) -> Result<Option<Sandbox>> {
        self.call("get", |state| Ok(state.sandboxes.get(sandbox).cloned()))
    }

    async fn find(&self, project: &Project, name: &Name) -> Result<Option<Sandbox>> {
        self.call("find", |state| Ok(state.find(project, name)))
    }

    async fn list(&self, query: &ListQuery) -> Result<Listing> {
        self.call("list", |state| state.list(query))
    }

    async fn count(&self, project: Option<&Project>) -> Result<PhaseCounts> {
        self.call("count", |state| Ok(state.count(project)))
    }

    async fn due(
        &self,
        after: Option<&(u64, SandboxId)>,
        until_ms: u64,
        limit: usize,
    ) -> Result<Vec<(u64, SandboxId)>> {
        self.call("due", |state| Ok(state.due(after, until_ms, limit)))
    }

    async fn next_due_ms(&self) -> Result<Option<u64>> {
        self.call("next_due_ms", |state| Ok(state.sandboxes.values().filter_map(Sandbox::due_at_ms).min()))
    }

    async fn remembered(&self, key: &Idempotency) -> Result<Option<Remembered>> {
        self.call("remembered", |state| Ok(state.remembered(key)))
    }

    async fn journal(&self, after: Cursor, filter: &JournalFilter, limit: usize) -> Result<Vec<JournalLine>> {
        self.call("journal", |state| Ok(state.journal_after(after, filter, limit)))
    }

    async fn journal_tail(
        &self,
        before: Option<Cursor>,
        filter: &JournalFilter,
        limit: usize,
    ) -> Result<Vec<JournalLine>> {
        self.call("journal_tail", |state| Ok(state.journal_before(before, filter, limit)))
    }

    fn tail(&self) -> watch::Receiver<Cursor> {
        self.shared.tail.subscribe()
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
        self.write("lease", epoch, |state| state.lease(sandbox, kind, holder, now_ms, ttl_ms))
    }

    async fn release(&self, epoch: Epoch, sandbox: &SandboxId, kind: LeaseKind, token: FencingToken) -> Result<()> {
        self.write("release", epoch, |state| {
            state.release(sandbox, kind, token);
            Ok(())
        })
    }

    async fn draw_token(&self, epoch: Epoch) -> Result<FencingToken> {
        self.write("draw_token", epoch, |state| Ok(state.draw_token()))
    }

    async fn raise_token(&self, epoch: Epoch, seen: FencingToken) -> Result<()> {
        self.write("raise_token", epoch, |state| {
            state.token = state.token.max(seen.0);
            Ok(())
        })
    }

    async fn leases(&self, sandbox: &SandboxId) -> Result<Vec<Lease>> {
        self.call("leases", |state| Ok(state.leases_on(sandbox)))
    }

    async fn stray_leases(&self, limit: usize) -> Result<Vec<Lease>> {
        self.call("stray_leases", |state| Ok(state.stray_leases(limit)))
    }

    async fn touch(&self, epoch: Epoch, sandbox: &SandboxId, active_at_ms: u64) -> Result<()> {
        self.write("touch", epoch, |state| {
            state.touch(sandbox, active_at_ms);
            Ok(())
        })
    }

    async fn put_key(&self, epoch: Epoch, key: ApiKey, line: NewLine) -> Result<()> {
        self.write("put_key", epoch, |state| {
            state.keys.insert(key.id.clone(), key);
            state.append(vec![line]);
            Ok(())
        })
    }

    async fn keys(&self) -> Result<Vec<ApiKey>> {
        self.call("keys", |state| {
            let mut keys: Vec<ApiKey> = state.keys.values().cloned().collect();
            keys.sort_by(|a, b| (a.created_at_ms, &a.id).cmp(&(b.created_at_ms, &b.id)));
            Ok(keys)
        })
    }

    async fn meta(&self, name: &str) -> Result<Option<String>> {
        self.call("meta", |state| Ok(state.meta.get(name).cloned()))
    }

    async fn set_meta_once(&self, epoch: Epoch, name: &str, value: &str) -> Result<String> {
        self.write("set_meta_once", epoch, |state| {
            Ok(state.meta.entry(name.to_owned()).or_insert_with(|| value.to_owned()).clone())
        })
    }

    async fn put_meta(&self, epoch: Epoch, name: &str, value: Option<&str>, line: NewLine) -> Result<()> {
        self.write("put_meta", epoch, |state| {
            match value {
                Some(value) => state.meta.insert(name.to_owned(), value.to_owned()),
                None => state.meta.remove(name),
            };
            state.append(vec![line]);
            Ok(())
        })
    }

    async fn put_schedule(&self, epoch: Epoch, schedule: Schedule, lines: Vec<NewLine>, max: u64) -> Result<()> {
        self.write("put_schedule", epoch, |state| state.put_schedule(schedule, lines, max))
    }

    async fn schedule(&self, id: &ScheduleId) -> Result<Option<Schedule>> {
        self.call("schedule", |state| Ok(state.schedules.get(id).cloned()))
    }

    async fn schedules(&self, query: &ScheduleQuery) -> Result<ScheduleListing> {
        self.call("schedules", |state| Ok(state.schedules_like(query)))
    }

    async fn due_schedules(&self, until_ms: u64, limit: usize) -> Result<Vec<ScheduleId>> {
        self.call("due_schedules", |state| Ok(state.due_schedules(until_ms, limit)))
    }

    async fn next_schedule_ms(&self) -> Result<Option<u64>> {
        self.call("next_schedule_ms", |state| Ok(state.schedules.values().filter_map(Schedule::due_at_ms).min()))
    }

    async fn running_schedules(&self) -> Result<Vec<ScheduleId>> {
        self.call("running_schedules", |state| {
            let running = state.schedules.values().filter(|schedule| schedule.run.is_some());
            Ok(running.map(|schedule| schedule.id.clone()).collect())
        })
    }

    async fn remove_schedule(&self, epoch: Epoch, id: &ScheduleId, line: NewLine) -> Result<bool> {
        self.write("remove_schedule", epoch, |state| Ok(state.remove_schedule(id, line)))
    }

    async fn put_task(&self, epoch: Epoch, task: Task, lines: Vec<NewLine>) -> Result<()> {
        self.write("put_task", epoch, |state| state.put_task(task, lines))
    }

    async fn task(&self, id: &TaskId) -> Result<Option<Task>> {
        self.call("task", |state| Ok(state.tasks.get(id).cloned()))
    }

    async fn tasks(&self, query: &TaskQuery) -> Result<TaskListing> {
        self.call("tasks", |state| Ok(state.tasks_like(query)))
    }

    async fn living_tasks(&self) -> Result<Vec<TaskId>> {
        self.call("living_tasks", |state| Ok(state.living_tasks()))
    }

    async fn tasks_at_work(&self, sandboxes: &[SandboxId]) -> Result<BTreeMap<SandboxId, TaskId>> {
        let at_work = |state: &mut State, id: &SandboxId| state.task_at_work(id).map(|task| (id.clone(), task));
        self.call("tasks_at_work", |state| Ok(sandboxes.iter().filter_map(|id| at_work(state, id)).collect()))
    }

    async fn keep_task_output(&self, epoch: Epoch, output: TaskOutput) -> Result<()> {
        self.write("keep_task_output", epoch, |state| {
            state.keep_task_output(output);
            Ok(())
        })
    }

    async fn task_output(&self, task: &TaskId, execution: &ExecutionId) -> Result<Option<TaskOutput>> {
        let place = (task.clone(), execution.clone());
        self.call("task_output", |state| Ok(state.task_outputs.get(&place).cloned()))
    }

    async fn note_executions(&self, epoch: Epoch, rows: Vec<Execution>) -> Result<()> {
        self.write("note_executions", epoch, |state| {
            state.note_executions(rows);
            Ok(())
        })
    }

    async fn put_execution(&self, epoch: Epoch, row: Execution, queued_max: u64) -> Result<()> {
        self.write("put_execution", epoch, |state| state.put_execution(row, queued_max))
    }

    async fn execution(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Execution>> {
        let place = (sandbox.clone(), execution.clone());
        self.call("execution", |state| Ok(state.executions.get(&place).cloned()))
    }

    async fn executions(&self, query: &ExecutionQuery) -> Result<ExecutionListing> {
        self.call("executions", |state| state.executions_like(query))
    }

    async fn put_outputs(
        &self,
        epoch: Epoch,
        sandbox: &SandboxId,
        outputs: Vec<KeptBytes>,
        bytes_max: u64,
    ) -> Result<()> {
        self.write("put_outputs", epoch, |state| {
            state.put_outputs(sandbox, outputs, bytes_max);
            Ok(())
        })
    }

    async fn output(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Vec<u8>>> {
        let place = (sandbox.clone(), execution.clone());
        self.call("output", |state| Ok(state.outputs.get(&place).map(|kept| kept.bytes.clone())))
    }

    async fn retain(&self, epoch: Epoch, before_ms: u64, limit: usize) -> Result<u64> {
        self.write("retain", epoch, |state| Ok(state.retain(before_ms, limit)))
    }

    async fn backup(&self, to: &Path) -> Result<()> {
        let copy = self.call("backup", |state| Ok(state.clone()))?;
        locked(&self.shared.backups).insert(to.to_owned(), copy);
        Ok(())
    }
}
