//! A store in one SQLite file.
//!
//! One thread writes, in groups ([`threads`]); others read, each from a snapshot of the latest commit (WAL). With
//! `synchronous=FULL` every commit is on disk before it is answered. What is in the file: `schema_*.sql`.
//!
//! Times and counts beyond 2^63 - 1 are found as if they were that; the record itself keeps what it says.

mod backup;
mod executions;
mod failure;
mod list;
mod read;
mod renew;
mod reserve;
mod schedules;
mod schema;
mod snapshots;
mod subscriptions;
mod tasks;
mod threads;
mod write;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::watch;
use viv_core::execution::Execution;
use viv_core::lifecycle::{Desired, Sandbox};
use viv_core::schedule::Schedule;
use viv_core::snapshot::Snapshot;
use viv_core::spec::{Name, Project};
use viv_core::task::Task;
use viv_core::{ExecutionId, FencingToken, SandboxId, ScheduleId, SnapshotId, TaskId};

use crate::error::StoreError;
use crate::execution::{ExecutionListing, ExecutionQuery, KeptBytes};
use crate::journal::{Cursor, JournalFilter, JournalLine, NewLine};
use crate::record::{
    ApiKey, Change, Groups, Idempotency, Lease, LeaseKind, ListQuery, Listing, Owner, PhaseCounts, Remembered,
    ScheduleListing, ScheduleQuery, SnapshotListing, SnapshotQuery,
};
use crate::store::{Epoch, Store};
use crate::task::{TaskListing, TaskOutput, TaskQuery};
use reserve::Reserve;
use threads::{Bounded, Grouped, Queue, Urgency};

type Result<T> = std::result::Result<T, StoreError>;

/// Calls that wait for a thread. Who comes when it is full waits outside, and is counted in [`ANSWER_MS_MAX`].
const QUEUE_MAX: usize = 1024;

/// Writes in one transaction: enough that the `fsync` is shared, few enough that none waits long for the others.
const GROUP_MAX: usize = 256;

/// Connections that read. Reads take well under a millisecond, so more of them would only share the cores.
const READERS: usize = 4;

/// What one call may take inside SQLite; all of ours take milliseconds.
const STATEMENT_MS_MAX: u64 = 10_000;

/// How long a call waits for its answer, its time in the queue included: a disk that hangs holds nobody for ever.
const ANSWER_MS_MAX: u64 = 30_000;

/// How long to wait for another process that has the file's lock: a standby taking over, somebody's `sqlite3`.
const BUSY_MS_MAX: u64 = 5_000;

/// Prepared statements of one connection: all of ours, and some shapes of listings.
const STATEMENTS_MAX: usize = 64;

/// The log beside the file is cut to this when it was emptied, in bytes.
const LOG_BYTES_MAX: i64 = 16 * 1024 * 1024;

/// A store in one SQLite file.
pub struct SqliteStore {
    path: PathBuf,
    writer: Queue,
    readers: Queue,
    tail: watch::Sender<Cursor>,
    groups: Arc<Grouped>,
    /// One copy at a time.
    backups: tokio::sync::Mutex<()>,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Opens a file, which is made if it is not there and brought up to date if it is older. It waits for the disk:
    /// call it before serving, or from a thread that may wait. Closing, by dropping it, waits too.
    ///
    /// It can be opened by several processes; only the one that called [`Store::own`] last can write.
    pub fn open(path: &Path) -> Result<Self> {
        make(path)?;
        let db = connect(path)?;
        let mode: String = db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
        if mode != "wal" {
            let what = format!("the filesystem of {} can hold no write-ahead log (mode is {mode})", path.display());
            return Err(StoreError::Unavailable { what });
        }
        schema::migrate(&db, schema::STEPS)?;
        let tail = watch::Sender::new(read::last_cursor(&db)?);
        let reader = |_| {
            let db = connect(path)?;
            db.pragma_update(None, "query_only", true)?;
            Bounded::new(db, STATEMENT_MS_MAX)
        };
        let readers = Queue::readers((0..READERS).map(reader).collect::<Result<_>>()?)?;
        let groups = Arc::<Grouped>::default();
        let bounded = Bounded::new(db, STATEMENT_MS_MAX)?;
        let writer = Queue::writer(bounded, tail.clone(), Reserve::of(path), groups.clone())?;
        Ok(Self { path: path.to_owned(), writer, readers, tail, groups, backups: tokio::sync::Mutex::new(()) })
    }

    /// Puts a copy in the place of a file whose locks a dead man holds: an owner that was killed and is not gone, since
    /// it is frozen. Only for that, before [`open`](Self::open): what a living one writes from now on is lost.
    pub fn renew(path: &Path) -> Result<()> {
        renew::renew(path)
    }

    /// Writes, if this is the latest ownership.
    async fn write<T, F>(&self, epoch: Epoch, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnMut(&Connection) -> Result<T> + Send + 'static,
    {
        self.write_with(Urgency::Usual, epoch, work).await
    }

    async fn write_with<T, F>(&self, urgency: Urgency, epoch: Epoch, mut work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnMut(&Connection) -> Result<T> + Send + 'static,
    {
        let checked = move |db: &Connection| {
            write::check_epoch(db, epoch)?;
            work(db)
        };
        self.writer.call_with(urgency, checked).await
    }
}

/// What is to rest, or to be gone, is recorded on a full disk too: nobody runs on for want of room (L8).
fn urgency_of(change: &Change) -> Urgency {
    match change.sandbox.desired {
        Desired::Hibernated | Desired::Gone => Urgency::Ends,
        Desired::Running => Urgency::Usual,
    }
}

/// Makes the file, for nobody else to read: keys and everything that sandboxes are made of are in it.
///
/// One that is there is not opened here: closing it again would drop the locks that SQLite holds on it in this process.
fn make(path: &Path) -> Result<()> {
    let failed = |error: std::io::Error| failure::io("the file cannot be opened:", path, &error);
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => {
            file.sync_all().map_err(failed)?;
            return sync_folder(path);
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err(StoreError::Unavailable { what: format!("{} is no file", path.display()) });
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    }
    Ok(())
}

/// Makes sure that a name is on disk.
fn sync_folder(path: &Path) -> Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = File::open(parent).and_then(|folder| folder.sync_all());
    synced.map_err(|error| failure::io("the folder cannot be synced:", parent, &error))
}

fn connect(path: &Path) -> Result<Connection> {
    // No URI: a path with a ? in it is a path. No mutex: each connection stays with one thread.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let db = Connection::open_with_flags(path, flags)?;
    db.busy_timeout(Duration::from_millis(BUSY_MS_MAX))?;
    db.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
    db.pragma_update(None, "synchronous", "FULL")?;
    db.pragma_update(None, "foreign_keys", true)?;
    db.pragma_update(None, "journal_size_limit", LOG_BYTES_MAX)?;
    // What is in the file may be damaged; it must not make us run its functions.
    db.pragma_update(None, "trusted_schema", false)?;
    Ok(db)
}

#[async_trait]
impl Store for SqliteStore {
    async fn own(&self, owner: Owner) -> Result<Epoch> {
        self.writer.call(move |db| write::own(db, &owner)).await
    }

    async fn owner(&self) -> Result<Option<Owner>> {
        self.readers.call(read::owner).await
    }

    async fn commit(&self, epoch: Epoch, change: Change) -> Result<Cursor> {
        self.write_with(urgency_of(&change), epoch, move |db| write::commit(db, &change)).await
    }

    async fn commit_all(&self, epoch: Epoch, changes: Vec<Change>) -> Result<Cursor> {
        self.write(epoch, move |db| write::commit_all(db, &changes)).await
    }

    async fn put_snapshot(&self, epoch: Epoch, row: Snapshot, lines: Vec<NewLine>) -> Result<Cursor> {
        self.write(epoch, move |db| snapshots::put(db, &row, &lines)).await
    }

    async fn forget_snapshot(&self, epoch: Epoch, snapshot: &SnapshotId, lines: Vec<NewLine>) -> Result<Cursor> {
        let snapshot = snapshot.clone();
        self.write(epoch, move |db| snapshots::forget(db, &snapshot, &lines)).await
    }

    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<Option<Snapshot>> {
        let snapshot = snapshot.clone();
        self.readers.call(move |db| snapshots::get(db, &snapshot)).await
    }

    async fn snapshots(&self, query: &SnapshotQuery) -> Result<SnapshotListing> {
        let query = query.clone();
        self.readers.call(move |db| snapshots::list(db, &query)).await
    }

    async fn users(&self, snapshot: &SnapshotId, limit: usize) -> Result<Vec<SandboxId>> {
        let snapshot = snapshot.clone();
        self.readers.call(move |db| snapshots::users(db, &snapshot, limit)).await
    }

    async fn append(&self, epoch: Epoch, lines: Vec<NewLine>) -> Result<Cursor> {
        self.write(epoch, move |db| write::append(db, &lines)).await
    }

    async fn get(&self, sandbox: &SandboxId) -> Result<Option<Sandbox>> {
        let sandbox = sandbox.clone();
        self.readers.call(move |db| read::get(db, &sandbox)).await
    }

    async fn find(&self, project: &Project, name: &Name) -> Result<Option<Sandbox>> {
        let (project, name) = (project.clone(), name.clone());
        self.readers.call(move |db| read::find(db, &project, &name)).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Listing> {
        let query = query.clone();
        self.readers.call(move |db| list::list(db, &query)).await
    }

    async fn count(&self, project: Option<&Project>) -> Result<PhaseCounts> {
        let project = project.cloned();
        self.readers.call(move |db| read::count(db, project.as_ref())).await
    }

    async fn due(
        &self,
        after: Option<&(u64, SandboxId)>,
        until_ms: u64,
        limit: usize,
    ) -> Result<Vec<(u64, SandboxId)>> {
        let after = after.cloned();
        self.readers.call(move |db| read::due(db, after.as_ref(), until_ms, limit)).await
    }

    async fn next_due_ms(&self) -> Result<Option<u64>> {
        self.readers.call(read::next_due_ms).await
    }

    async fn remembered(&self, key: &Idempotency) -> Result<Option<Remembered>> {
        let key = key.clone();
        self.readers.call(move |db| read::remembered(db, &key)).await
    }

    async fn journal(&self, after: Cursor, filter: &JournalFilter, limit: usize) -> Result<Vec<JournalLine>> {
        let filter = filter.clone();
        self.readers.call(move |db| read::journal(db, after, &filter, limit)).await
    }

    async fn journal_tail(
        &self,
        before: Option<Cursor>,
        filter: &JournalFilter,
        limit: usize,
    ) -> Result<Vec<JournalLine>> {
        let filter = filter.clone();
        self.readers.call(move |db| read::journal_tail(db, before, &filter, limit)).await
    }

    fn groups(&self) -> Groups {
        self.groups.told()
    }

    fn tail(&self) -> watch::Receiver<Cursor> {
        self.tail.subscribe()
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
        let wanted = Lease {
            sandbox: sandbox.clone(),
            kind,
            holder: holder.to_owned(),
            since_ms: now_ms,
            expires_at_ms: now_ms.saturating_add(ttl_ms),
            token: FencingToken(0),
        };
        // Whoever is to end something needs it first.
        let urgency = if kind == LeaseKind::Lifecycle { Urgency::Ends } else { Urgency::Usual };
        self.write_with(urgency, epoch, move |db| write::lease(db, epoch, &wanted)).await
    }

    async fn release(&self, epoch: Epoch, sandbox: &SandboxId, kind: LeaseKind, token: FencingToken) -> Result<()> {
        let sandbox = sandbox.clone();
        self.write(epoch, move |db| write::release(db, &sandbox, kind, token)).await
    }

    async fn draw_token(&self, epoch: Epoch) -> Result<FencingToken> {
        // What is removed makes room.
        self.write_with(Urgency::Ends, epoch, write::draw_token).await
    }

    async fn raise_token(&self, epoch: Epoch, seen: FencingToken) -> Result<()> {
        self.write(epoch, move |db| write::raise_token(db, seen)).await
    }

    async fn leases(&self, sandbox: &SandboxId) -> Result<Vec<Lease>> {
        let sandbox = sandbox.clone();
        self.readers.call(move |db| read::leases(db, &sandbox)).await
    }

    async fn stray_leases(&self, limit: usize) -> Result<Vec<Lease>> {
        self.readers.call(move |db| read::stray_leases(db, limit)).await
    }

    async fn touch(&self, epoch: Epoch, sandbox: &SandboxId, active_at_ms: u64) -> Result<()> {
        let sandbox = sandbox.clone();
        self.write(epoch, move |db| write::touch(db, &sandbox, active_at_ms)).await
    }

    async fn put_key(&self, epoch: Epoch, key: ApiKey, line: NewLine) -> Result<()> {
        self.write(epoch, move |db| write::put_key(db, &key, &line)).await
    }

    async fn keys(&self) -> Result<Vec<ApiKey>> {
        self.readers.call(read::keys).await
    }

    async fn meta(&self, name: &str) -> Result<Option<String>> {
        let name = name.to_owned();
        self.readers.call(move |db| read::meta(db, &name)).await
    }

    async fn set_meta_once(&self, epoch: Epoch, name: &str, value: &str) -> Result<String> {
        let (name, value) = (name.to_owned(), value.to_owned());
        self.write(epoch, move |db| write::set_meta_once(db, &name, &value)).await
    }

    async fn put_meta(&self, epoch: Epoch, name: &str, value: Option<&str>, line: NewLine) -> Result<()> {
        let (name, value) = (name.to_owned(), value.map(str::to_owned));
        self.write(epoch, move |db| write::put_meta(db, &name, value.as_deref(), &line)).await
    }

    async fn put_schedule(&self, epoch: Epoch, schedule: Schedule, lines: Vec<NewLine>, max: u64) -> Result<()> {
        self.write(epoch, move |db| schedules::put(db, &schedule, &lines, max)).await
    }

    async fn schedule(&self, id: &ScheduleId) -> Result<Option<Schedule>> {
        let id = id.clone();
        self.readers.call(move |db| schedules::get(db, &id)).await
    }

    async fn schedules(&self, query: &ScheduleQuery) -> Result<ScheduleListing> {
        let query = query.clone();
        self.readers.call(move |db| schedules::list(db, &query)).await
    }

    async fn due_schedules(&self, until_ms: u64, limit: usize) -> Result<Vec<ScheduleId>> {
        self.readers.call(move |db| schedules::due(db, until_ms, limit)).await
    }

    async fn next_schedule_ms(&self) -> Result<Option<u64>> {
        self.readers.call(schedules::next_ms).await
    }

    async fn running_schedules(&self) -> Result<Vec<ScheduleId>> {
        self.readers.call(schedules::running).await
    }

    async fn remove_schedule(&self, epoch: Epoch, id: &ScheduleId, line: NewLine) -> Result<bool> {
        let id = id.clone();
        self.write(epoch, move |db| schedules::remove(db, &id, &line)).await
    }

    async fn put_task(&self, epoch: Epoch, task: Task, lines: Vec<NewLine>) -> Result<()> {
        // What is to end is recorded on a full disk too (L8).
        let urgency = if task.ending.is_some() { Urgency::Ends } else { Urgency::Usual };
        self.write_with(urgency, epoch, move |db| tasks::put(db, &task, &lines)).await
    }

    async fn task(&self, id: &TaskId) -> Result<Option<Task>> {
        let id = id.clone();
        self.readers.call(move |db| tasks::get(db, &id)).await
    }

    async fn tasks(&self, query: &TaskQuery) -> Result<TaskListing> {
        let query = query.clone();
        self.readers.call(move |db| tasks::list(db, &query)).await
    }

    async fn living_tasks(&self) -> Result<Vec<TaskId>> {
        self.readers.call(tasks::living).await
    }

    async fn tasks_at_work(&self, sandboxes: &[SandboxId]) -> Result<BTreeMap<SandboxId, TaskId>> {
        let sandboxes = sandboxes.to_vec();
        self.readers.call(move |db| tasks::all_at_work(db, &sandboxes)).await
    }

    async fn keep_task_output(&self, epoch: Epoch, output: TaskOutput) -> Result<()> {
        self.write(epoch, move |db| tasks::keep_output(db, &output)).await
    }

    async fn task_output(&self, task: &TaskId, execution: &ExecutionId) -> Result<Option<TaskOutput>> {
        let (task, execution) = (task.clone(), execution.clone());
        self.readers.call(move |db| tasks::output(db, &task, &execution)).await
    }

    async fn note_executions(&self, epoch: Epoch, rows: Vec<Execution>) -> Result<()> {
        self.write(epoch, move |db| executions::note(db, &rows)).await
    }

    async fn put_execution(&self, epoch: Epoch, row: Execution, queued_max: u64) -> Result<()> {
        self.write(epoch, move |db| executions::put(db, &row, queued_max)).await
    }

    async fn execution(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Execution>> {
        let (sandbox, execution) = (sandbox.clone(), execution.clone());
        self.readers.call(move |db| executions::get(db, &sandbox, &execution)).await
    }

    async fn executions(&self, query: &ExecutionQuery) -> Result<ExecutionListing> {
        let query = query.clone();
        self.readers.call(move |db| executions::list(db, &query)).await
    }

    async fn put_outputs(
        &self,
        epoch: Epoch,
        sandbox: &SandboxId,
        outputs: Vec<KeptBytes>,
        bytes_max: u64,
    ) -> Result<()> {
        let sandbox = sandbox.clone();
        self.write(epoch, move |db| executions::put_outputs(db, &sandbox, &outputs, bytes_max)).await
    }

    async fn output(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Vec<u8>>> {
        let (sandbox, execution) = (sandbox.clone(), execution.clone());
        self.readers.call(move |db| executions::output(db, &sandbox, &execution)).await
    }

    async fn retain(&self, epoch: Epoch, before_ms: u64, limit: usize) -> Result<u64> {
        self.write(epoch, move |db| write::retain(db, before_ms, limit)).await
    }

    async fn backup(&self, to: &Path) -> Result<()> {
        let _one = self.backups.lock().await;
        backup::backup(&self.path, to).await
    }
}
