//! The trait.

use std::collections::BTreeMap;

use async_trait::async_trait;
use tokio::sync::watch;
use viv_core::execution::Execution;
use viv_core::lifecycle::Sandbox;
use viv_core::schedule::Schedule;
use viv_core::snapshot::Snapshot;
use viv_core::spec::{Name, Project};
use viv_core::task::Task;
use viv_core::{ExecutionId, FencingToken, SandboxId, ScheduleId, SnapshotId, TaskId};

use crate::error::StoreError;
use crate::execution::{ExecutionListing, ExecutionQuery, KeptBytes};
use crate::journal::{Cursor, JournalFilter, JournalLine, JournalPage, JournalSearch, NewLine};
use crate::record::{
    ApiKey, Change, Groups, Idempotency, Lease, LeaseKind, ListQuery, Listing, Owner, PhaseCounts, Remembered,
    ScheduleListing, ScheduleQuery, SnapshotListing, SnapshotQuery,
};
use crate::subscription::Subscriptions;
use crate::task::{TaskListing, TaskOutput, TaskQuery};

type Result<T> = std::result::Result<T, StoreError>;

/// Lines that are read at once for a page of what is looked for.
const LOOKED_AT_ONCE: usize = 200;

/// How often that is done for one page: a few milliseconds, after which whoever asked may ask on.
const LOOKED_TIMES_MAX: usize = 10;

/// Which ownership a write belongs to. A later one makes all writes of earlier ones fail as
/// [`StoreError::Superseded`], in the same transaction in which they would have been written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// Where Vivarium keeps what it knows.
///
/// Rules for every implementation, checked by the conformance suite:
///
/// - A call that answers `Ok` is durable; one that fails has changed nothing, but for `Unavailable`, which may have.
/// - Readers see what was acknowledged, at once, whoever wrote it.
/// - A write with an epoch that is not the latest is `Superseded`.
/// - Nothing is proportional to the number of records, except where it says so.
#[async_trait]
pub trait Store: Subscriptions + Send + Sync {
    /// Takes the store over, whoever owned it before. The caller has made sure that the previous owner is dead, or
    /// accepts that its writes fail from now on. Answers with the epoch for all writes.
    async fn own(&self, owner: Owner) -> Result<Epoch>;

    /// Who owns it.
    async fn owner(&self) -> Result<Option<Owner>>;

    /// Writes a record with its journal lines, by compare-and-set on its version, all or nothing.
    /// `Conflict` when the stored version is not one less. Checked in this order: `Superseded`, `Repeated`
    /// (idempotency key used before, whatever the body), `Conflict`, `NameTaken` (names of records that are neither
    /// deleted nor stopped, per project), `Quota`; then what is wrong with its snapshots, each written as by
    /// [`Store::put_snapshot`]; last `SnapshotMissing`, when the record begins with one (see [`Sandbox::uses`]) that it
    /// did not begin with before, and that is not ready. What is over gives its leases back in the same transaction.
    /// Answers where the journal stands then.
    async fn commit(&self, epoch: Epoch, change: Change) -> Result<Cursor>;

    /// Several commits as one, in their order: all of them, or none and the first error.
    async fn commit_all(&self, epoch: Epoch, changes: Vec<Change>) -> Result<Cursor>;

    /// Writes the row of a snapshot with its lines, by compare-and-set on its version: 1 is a new one.
    /// `SnapshotConflict` when the stored version is not one less, `SnapshotInUse` when it is to be removed and a
    /// record that is not over begins with it.
    async fn put_snapshot(&self, epoch: Epoch, row: Snapshot, lines: Vec<NewLine>) -> Result<Cursor>;

    /// Forgets the row of a snapshot that is being made or removed; one that is not there is forgotten, and then no
    /// line is written. `SnapshotInUse` when a record that is not over begins with it. With one that was being made, the
    /// keys go under which it was asked for (those of its sandbox whose `made` names it): nothing was made, so who
    /// repeats the request does it anew (L1).
    async fn forget_snapshot(&self, epoch: Epoch, snapshot: &SnapshotId, lines: Vec<NewLine>) -> Result<Cursor>;

    /// The row of a snapshot.
    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<Option<Snapshot>>;

    /// A page of snapshots, newest first, in proportion to the page.
    async fn snapshots(&self, query: &SnapshotQuery) -> Result<SnapshotListing>;

    /// Records that are not over and begin with this snapshot, at most this many.
    async fn users(&self, snapshot: &SnapshotId, limit: usize) -> Result<Vec<SandboxId>>;

    /// Writes lines that are about no change of a record.
    async fn append(&self, epoch: Epoch, lines: Vec<NewLine>) -> Result<Cursor>;

    /// A record.
    async fn get(&self, sandbox: &SandboxId) -> Result<Option<Sandbox>>;

    /// The record with this name that is neither stopped nor deleted; else the newest that had it.
    async fn find(&self, project: &Project, name: &Name) -> Result<Option<Sandbox>>;

    /// A page of records, newest first, in proportion to the page; with a name, or with labels and something else, to
    /// how many have that name, or the rarest of those labels.
    async fn list(&self, query: &ListQuery) -> Result<Listing>;

    /// How many records are in each phase.
    async fn count(&self, project: Option<&Project>) -> Result<PhaseCounts>;

    /// Sandboxes whose [`Sandbox::due_at_ms`] is not after this, soonest first, at most this many; on from the last one of
    /// a page before, if one is named.
    async fn due(&self, after: Option<&(u64, SandboxId)>, until_ms: u64, limit: usize)
    -> Result<Vec<(u64, SandboxId)>>;

    /// The soonest due time of all.
    async fn next_due_ms(&self) -> Result<Option<u64>>;

    /// What is known of an idempotency key.
    async fn remembered(&self, key: &Idempotency) -> Result<Option<Remembered>>;

    /// Lines after a cursor, oldest first, at most this many.
    async fn journal(&self, after: Cursor, filter: &JournalFilter, limit: usize) -> Result<Vec<JournalLine>>;

    /// The last lines before a cursor (or the end), newest first, at most this many.
    async fn journal_tail(
        &self,
        before: Option<Cursor>,
        filter: &JournalFilter,
        limit: usize,
    ) -> Result<Vec<JournalLine>>;

    /// Lines after a cursor that are looked for, oldest first, at most this many. So many are looked at and no more:
    /// the page may be short or empty though there are more, and says where to go on.
    async fn journal_page(
        &self,
        after: Cursor,
        filter: &JournalFilter,
        search: &JournalSearch,
        limit: usize,
    ) -> Result<JournalPage> {
        let part = if search.is_any() { limit } else { limit.max(LOOKED_AT_ONCE) };
        let mut page = JournalPage { until: after, ..JournalPage::default() };
        for _ in 0..LOOKED_TIMES_MAX {
            // One more than is looked at tells whether there are more.
            let lines = self.journal(page.until, filter, part.saturating_add(1)).await?;
            page.more = lines.len() > part;
            for line in lines.into_iter().take(part) {
                if page.lines.len() >= limit {
                    page.more = true;
                    return Ok(page);
                }
                page.until = line.cursor;
                if search.takes(&line.line) {
                    page.lines.push(line);
                }
            }
            if !page.more || page.lines.len() >= limit {
                break;
            }
        }
        Ok(page)
    }

    /// How writes were put together so far, where they are.
    fn groups(&self) -> Groups {
        Groups::default()
    }

    /// Rings with the newest cursor when lines were written through this store.
    fn tail(&self) -> watch::Receiver<Cursor>;

    /// Takes or renews a lease. Who holds it renews it under the same token; one that expired, or was held under an
    /// earlier epoch, is taken under a new token, greater than all before. Else `Leased`. On what is over, or has no
    /// record, nobody holds anything: `Over`, which is looked at in the transaction in which it would be taken (L20).
    async fn lease(
        &self,
        epoch: Epoch,
        sandbox: &SandboxId,
        kind: LeaseKind,
        holder: &str,
        now_ms: u64,
        ttl_ms: u64,
    ) -> Result<Lease>;

    /// Gives a lease back; one that somebody else has meanwhile is left alone.
    async fn release(&self, epoch: Epoch, sandbox: &SandboxId, kind: LeaseKind, token: FencingToken) -> Result<()>;

    /// A token that is greater than all before, and that nobody holds: for who removes what is left of somebody that is
    /// over, or was never recorded.
    async fn draw_token(&self, epoch: Epoch) -> Result<FencingToken>;

    /// Makes all tokens that are given from now on greater than this one, which a provider has seen: an owner whose
    /// records are from a backup gave it, and it is not known here any more.
    async fn raise_token(&self, epoch: Epoch, seen: FencingToken) -> Result<()>;

    /// The leases on a sandbox that were taken under the current epoch, expired ones too.
    async fn leases(&self, sandbox: &SandboxId) -> Result<Vec<Lease>>;

    /// Leases on what is over, or has no record, of whichever epoch: nobody holds those, so they should not be there (L20).
    /// In proportion to all leases; at most this many.
    async fn stray_leases(&self, limit: usize) -> Result<Vec<Lease>>;

    /// Writes when a sandbox was last active: no new version, no line; an earlier time than is known changes nothing,
    /// nor does a sandbox that is not known. A record that is committed later with an earlier time keeps this one.
    async fn touch(&self, epoch: Epoch, sandbox: &SandboxId, active_at_ms: u64) -> Result<()>;

    /// Keeps a key, in place of the one with its id, and writes the line about it.
    async fn put_key(&self, epoch: Epoch, key: ApiKey, line: NewLine) -> Result<()>;

    /// All keys, revoked ones too.
    async fn keys(&self) -> Result<Vec<ApiKey>>;

    /// A free value by name: installation id and the like.
    async fn meta(&self, name: &str) -> Result<Option<String>>;

    /// Sets one, unless it is there; answers with what is there then.
    async fn set_meta_once(&self, epoch: Epoch, name: &str, value: &str) -> Result<String>;

    /// Sets one, or takes it away, with the line about it.
    async fn put_meta(&self, epoch: Epoch, name: &str, value: Option<&str>, line: NewLine) -> Result<()>;

    /// Writes a schedule with the lines about it, by compare-and-set on its version, all or nothing. `Conflict` when the
    /// stored version is not one less, and when its sandbox is not there or is over: who is gone has no schedules, and
    /// those it had went with the commit that said so. `Quota` when a new one would be more than this many of its
    /// sandbox.
    async fn put_schedule(&self, epoch: Epoch, schedule: Schedule, lines: Vec<NewLine>, max: u64) -> Result<()>;

    /// A schedule.
    async fn schedule(&self, id: &ScheduleId) -> Result<Option<Schedule>>;

    /// A page of schedules.
    async fn schedules(&self, query: &ScheduleQuery) -> Result<ScheduleListing>;

    /// Those whose [`Schedule::due_at_ms`] is not after this, soonest first, at most this many.
    async fn due_schedules(&self, until_ms: u64, limit: usize) -> Result<Vec<ScheduleId>>;

    /// The soonest due time of all schedules.
    async fn next_schedule_ms(&self) -> Result<Option<u64>>;

    /// Those that have a run under way.
    async fn running_schedules(&self) -> Result<Vec<ScheduleId>>;

    /// Takes a schedule away with a line about it. Whether it was there; without it there is no line.
    async fn remove_schedule(&self, epoch: Epoch, id: &ScheduleId, line: NewLine) -> Result<bool>;

    /// Writes a task with the lines about it, by compare-and-set on its version, all or nothing. `TaskConflict` when the
    /// stored version is not one less, `TaskBusy` when it would be at work and another one of its sandbox is.
    async fn put_task(&self, epoch: Epoch, task: Task, lines: Vec<NewLine>) -> Result<()>;

    /// A task.
    async fn task(&self, id: &TaskId) -> Result<Option<Task>>;

    /// A page of tasks, newest first.
    async fn tasks(&self, query: &TaskQuery) -> Result<TaskListing>;

    /// Those that are not over, oldest first.
    async fn living_tasks(&self) -> Result<Vec<TaskId>>;

    /// Those that are at work in some sandboxes, of which each has one at most.
    async fn tasks_at_work(&self, sandboxes: &[SandboxId]) -> Result<BTreeMap<SandboxId, TaskId>>;

    /// Keeps the end of an output, in place of what was kept of it; of a task that is not there, nothing.
    async fn keep_task_output(&self, epoch: Epoch, output: TaskOutput) -> Result<()>;

    /// What was kept of one.
    async fn task_output(&self, task: &TaskId, execution: &ExecutionId) -> Result<Option<TaskOutput>>;

    /// Writes what was learnt about executions, all of it or none. What says less than what is known, and what is about no
    /// sandbox, is left out ([`Execution::learn`]); what cannot run any more by the record of its sandbox is written as
    /// ended ([`Execution::settle`]), as are those that are open in a commit that says so, in its transaction (X5). Of
    /// those that ended the latest [`EXECUTIONS_KEPT_MAX`](crate::EXECUTIONS_KEPT_MAX) of a sandbox are kept.
    async fn note_executions(&self, epoch: Epoch, rows: Vec<Execution>) -> Result<()>;

    /// Writes the row of an execution by compare-and-set on its version: 1 is a new one. `Conflict` when the stored version
    /// is not one less, when its sandbox is not there or is over, and when it cannot run there any more by that record.
    /// `Quota` when a new one that waits would be more than
    /// this many of its sandbox.
    async fn put_execution(&self, epoch: Epoch, row: Execution, queued_max: u64) -> Result<()>;

    /// The row of an execution.
    async fn execution(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Execution>>;

    /// A page of executions, newest first.
    async fn executions(&self, query: &ExecutionQuery) -> Result<ExecutionListing>;

    /// Keeps outputs of a sandbox that is not over; of all of its outputs the latest, up to so many bytes together. They go
    /// in the transaction that ends it.
    async fn put_outputs(
        &self,
        epoch: Epoch,
        sandbox: &SandboxId,
        outputs: Vec<KeptBytes>,
        bytes_max: u64,
    ) -> Result<()>;

    /// What is kept of an output.
    async fn output(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Vec<u8>>>;

    /// Retention (J9), a bounded piece of it: forgets journal lines before a time, idempotency keys of before a time
    /// whose sandbox is over, leases that expired, tasks and executions that ended and outputs that were kept before it,
    /// and shrinks tombstones of before a time to id, name, cause and time. Answers how many rows it touched; 0 when there
    /// is nothing left to do.
    async fn retain(&self, epoch: Epoch, before_ms: u64, limit: usize) -> Result<u64>;

    /// A consistent copy of everything, made while it is used. What was at that path is replaced when it is complete.
    async fn backup(&self, to: &std::path::Path) -> Result<()>;
}
