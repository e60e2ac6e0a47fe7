//! The threads that talk to the file, so that the async runtime never waits for a disk.
//!
//! ```text
//!   calls ──► queue (bounded) ──► writer ──► BEGIN  [SAVEPOINT write RELEASE]…  COMMIT ──► answers
//!   calls ──► queue (bounded) ──► readers, each with a connection of its own
//! ```
//!
//! - What waits in the queue while a group is being committed becomes the next group: one `fsync` for all of it. No
//!   time is spent waiting for a group to fill.
//! - A write that is refused takes back only what it did itself. When SQLite gives up the whole transaction (disk
//!   full, failing, interrupted), each write of the group is tried once more in a transaction of its own, so that one
//!   that cannot succeed does not take the others with it.
//!   One that has something end gets the room that is kept for it ([`Reserve`]).
//! - Nobody is answered before the commit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot, watch};

use super::reserve::Reserve;
use super::{ANSWER_MS_MAX, GROUP_MAX, QUEUE_MAX, Result};
use crate::error::StoreError;
use crate::journal::Cursor;
use crate::record::Groups;

/// A connection that gives up a statement that takes too long.
pub(super) struct Bounded {
    db: Connection,
    clock: Arc<Clock>,
    limit_ms: u64,
}

/// How long the current work may take.
struct Clock {
    start: Instant,
    /// Milliseconds after `start`; 0 is no limit.
    until_ms: AtomicU64,
}

/// SQLite's instructions between two looks at the clock: well under a millisecond.
const OPS_BETWEEN_LOOKS: i32 = 10_000;

impl Bounded {
    pub(super) fn new(db: Connection, limit_ms: u64) -> Result<Self> {
        let clock = Arc::new(Clock { start: Instant::now(), until_ms: AtomicU64::new(0) });
        let looked_at = Arc::clone(&clock);
        let mut db = db;
        db.progress_handler(OPS_BETWEEN_LOOKS, Some(move || looked_at.is_over()))?;
        Ok(Self { db, clock, limit_ms })
    }

    fn run<T>(&self, work: impl FnOnce(&Connection) -> T) -> T {
        let now_ms = self.clock.start.elapsed().as_millis() as u64;
        self.clock.until_ms.store(now_ms + self.limit_ms, Ordering::Relaxed);
        let done = work(&self.db);
        self.clock.until_ms.store(0, Ordering::Relaxed);
        done
    }
}

impl Clock {
    fn is_over(&self) -> bool {
        let until_ms = self.until_ms.load(Ordering::Relaxed);
        until_ms > 0 && self.start.elapsed().as_millis() as u64 > until_ms
    }
}

/// One call on its way: it can be run more than once, and is answered once.
pub(super) trait Job: Send {
    /// Whether anybody still waits for it.
    fn is_wanted(&self) -> bool;
    /// Whether it may have what is kept for a full disk.
    fn is_urgent(&self) -> bool;
    /// Does the work and keeps the answer. `false` when the answer is an error.
    fn run(&mut self, db: &Connection) -> bool;
    /// Gives the answer.
    fn answer(self: Box<Self>);
    /// Gives another answer than that of the work.
    fn fail(self: Box<Self>, what: &str);
}

/// Which writes come first where there is no room for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Urgency {
    /// It waits for room.
    Usual,
    /// It has something end, or is needed for that: see [`Reserve`].
    Ends,
}

struct Call<T, F> {
    work: F,
    urgency: Urgency,
    answer: Option<Result<T>>,
    to: oneshot::Sender<Result<T>>,
}

impl<T: Send, F: FnMut(&Connection) -> Result<T> + Send> Job for Call<T, F> {
    fn is_wanted(&self) -> bool {
        !self.to.is_closed()
    }

    fn is_urgent(&self) -> bool {
        self.urgency == Urgency::Ends
    }

    fn run(&mut self, db: &Connection) -> bool {
        // The thread has to outlive a mistake in one call.
        let answer = catch_unwind(AssertUnwindSafe(|| (self.work)(db)))
            .unwrap_or_else(|_| Err(StoreError::Unavailable { what: "the store panicked".to_owned() }));
        let done = answer.is_ok();
        self.answer = Some(answer);
        done
    }

    fn answer(self: Box<Self>) {
        let answer = self.answer.unwrap_or_else(|| Err(StoreError::Unavailable { what: "it was not run".to_owned() }));
        // Whoever asked may have gone meanwhile.
        let _ = self.to.send(answer);
    }

    fn fail(self: Box<Self>, what: &str) {
        let _ = self.to.send(Err(StoreError::Unavailable { what: what.to_owned() }));
    }
}

/// The way to one kind of threads.
pub(super) struct Queue {
    jobs: Option<mpsc::Sender<Box<dyn Job>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Queue {
    /// The one thread that writes.
    pub(super) fn writer(
        db: Bounded,
        tail: watch::Sender<Cursor>,
        reserve: Reserve,
        groups: Arc<Grouped>,
    ) -> Result<Self> {
        let (jobs, queue) = mpsc::channel(QUEUE_MAX);
        let thread = spawn("viv-store-write", move || Writer { db, tail, reserve, groups }.serve(queue))?;
        Ok(Self { jobs: Some(jobs), threads: vec![thread] })
    }

    /// Threads that read.
    pub(super) fn readers(connections: Vec<Bounded>) -> Result<Self> {
        let (jobs, queue) = mpsc::channel(QUEUE_MAX);
        let queue = Arc::new(Mutex::new(queue));
        let start = |db: Bounded| {
            let queue = Arc::clone(&queue);
            spawn("viv-store-read", move || read(&db, &queue))
        };
        let threads = connections.into_iter().map(start).collect::<Result<_>>()?;
        Ok(Self { jobs: Some(jobs), threads })
    }

    /// Waits for room in the queue, for the work and for its answer, all together for a bounded time.
    pub(super) async fn call<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnMut(&Connection) -> Result<T> + Send + 'static,
    {
        self.call_with(Urgency::Usual, work).await
    }

    /// The same, with what is kept for a full disk if it is urgent.
    pub(super) async fn call_with<T, F>(&self, urgency: Urgency, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnMut(&Connection) -> Result<T> + Send + 'static,
    {
        let (to, answer) = oneshot::channel();
        let gone = || StoreError::Unavailable { what: "the store is closed".to_owned() };
        let whole = async {
            let job = Box::new(Call { work, urgency, answer: None, to });
            self.jobs.as_ref().ok_or_else(gone)?.send(job).await.map_err(|_| gone())?;
            answer.await.map_err(|_| gone())?
        };
        let late = |_| StoreError::Unavailable { what: format!("there was no answer within {ANSWER_MS_MAX} ms") };
        tokio::time::timeout(Duration::from_millis(ANSWER_MS_MAX), whole).await.map_err(late)?
    }
}

impl Drop for Queue {
    /// Ends the threads, so that whoever opens the file next finds it closed.
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    spawned.map_err(|error| StoreError::Unavailable { what: format!("there is no thread to be had: {error}") })
}

fn read(db: &Bounded, queue: &Mutex<mpsc::Receiver<Box<dyn Job>>>) {
    loop {
        // Whoever has the lock waits for a job; the others wait for the lock.
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).blocking_recv();
        let Some(mut job) = next else { return };
        if !job.is_wanted() {
            continue;
        }
        // One transaction, so that all statements of a call see the same moment.
        let begun = db.run(|db| {
            db.execute_batch("BEGIN")?;
            job.run(db);
            let ended = db.execute_batch("COMMIT");
            if !db.is_autocommit() {
                db.execute_batch("ROLLBACK")?;
            }
            ended
        });
        match begun {
            Ok(()) => job.answer(),
            Err(error) => job.fail(&error.to_string()),
        }
    }
}

struct Writer {
    db: Bounded,
    tail: watch::Sender<Cursor>,
    reserve: Reserve,
    groups: Arc<Grouped>,
}

/// How writes were put together so far.
#[derive(Default)]
pub(super) struct Grouped {
    count: AtomicU64,
    writes: AtomicU64,
    last: AtomicU64,
    max: AtomicU64,
}

impl Grouped {
    fn count(&self, writes: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.writes.fetch_add(writes, Ordering::Relaxed);
        self.last.store(writes, Ordering::Relaxed);
        self.max.fetch_max(writes, Ordering::Relaxed);
    }

    pub(super) fn told(&self) -> Groups {
        let read = |number: &AtomicU64| number.load(Ordering::Relaxed);
        Groups { count: read(&self.count), writes: read(&self.writes), last: read(&self.last), max: read(&self.max) }
    }
}

/// How a transaction ended.
enum Ended {
    /// All is on disk, and these are the calls.
    Committed(Vec<Box<dyn Job>>),
    /// Nothing of it is; it may help to try each on its own.
    GivenUp(Vec<Box<dyn Job>>, String),
    /// It could not even begin.
    NotBegun(Vec<Box<dyn Job>>, String),
}

impl Writer {
    fn serve(mut self, mut queue: mpsc::Receiver<Box<dyn Job>>) {
        let mut group = Vec::new();
        while queue.blocking_recv_many(&mut group, GROUP_MAX) > 0 {
            let group = std::mem::take(&mut group);
            self.groups.count(group.len() as u64);
            match self.transaction(group) {
                Ended::Committed(group) => {
                    self.answer(group);
                    self.reserve.keep();
                }
                Ended::GivenUp(group, _) => {
                    self.checkpoint();
                    self.one_by_one(group);
                }
                Ended::NotBegun(group, what) => fail(group, &what),
            }
        }
    }

    /// On a full disk the log can be written anew from its beginning once it was put back into the file.
    fn checkpoint(&self) {
        let _ = self.db.db.execute_batch("PRAGMA wal_checkpoint(PASSIVE)");
    }

    fn answer(&self, group: Vec<Box<dyn Job>>) {
        // The tail rings before the answers: who was answered finds it where the answer says.
        match super::read::last_cursor(&self.db.db) {
            Ok(cursor) => {
                self.tail.send_if_modified(|newest| {
                    let grew = *newest < cursor;
                    *newest = cursor.max(*newest);
                    grew
                });
            }
            // What was committed is committed; followers hear of it with the next write.
            Err(error) => drop(error),
        }
        for job in group {
            job.answer();
        }
    }

    fn one_by_one(&mut self, group: Vec<Box<dyn Job>>) {
        let mut group = group.into_iter();
        while let Some(job) = group.next() {
            let mut ended = self.transaction(vec![job]);
            if let Ended::GivenUp(one, what) = ended {
                let is_urgent = one.iter().any(|job| job.is_urgent());
                ended =
                    if is_urgent && self.reserve.give() { self.transaction(one) } else { Ended::GivenUp(one, what) };
            }
            match ended {
                Ended::Committed(one) => self.answer(one),
                Ended::GivenUp(one, what) => fail(one, &what),
                Ended::NotBegun(one, what) => {
                    // Waiting for the lock again for each of them would take minutes.
                    fail(one, &what);
                    return fail(group.collect(), &what);
                }
            }
        }
    }

    fn transaction(&self, mut group: Vec<Box<dyn Job>>) -> Ended {
        let db = &self.db.db;
        if !db.is_autocommit() {
            // A rollback failed before; it is tried until it does not.
            let _ = db.execute_batch("ROLLBACK");
        }
        if let Err(error) = db.execute_batch("BEGIN IMMEDIATE") {
            return Ended::NotBegun(group, error.to_string());
        }
        // Whoever went while the lock was waited for is told nothing, so nothing is written either.
        for job in group.iter_mut().filter(|job| job.is_wanted()) {
            if let Err(error) = self.db.run(|db| savepoint(db, job.as_mut())) {
                let _ = db.execute_batch("ROLLBACK");
                return Ended::GivenUp(group, error.to_string());
            }
        }
        let Err(error) = db.execute_batch("COMMIT") else { return Ended::Committed(group) };
        if !db.is_autocommit() {
            // One that fails is tried again before the next transaction.
            let _ = db.execute_batch("ROLLBACK");
        }
        Ended::GivenUp(group, error.to_string())
    }
}

/// Runs one write of a transaction. An error here is one of the whole transaction.
fn savepoint(db: &Connection, job: &mut dyn Job) -> rusqlite::Result<()> {
    db.prepare_cached("SAVEPOINT one")?.execute([])?;
    let done = job.run(db);
    if db.is_autocommit() {
        // SQLite gave up the transaction, and all that was written in it.
        return Err(rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_ABORT_ROLLBACK),
            Some("the transaction was given up: the disk is full or failing, or it took too long".to_owned()),
        ));
    }
    if !done {
        db.prepare_cached("ROLLBACK TO one")?.execute([])?;
    }
    db.prepare_cached("RELEASE one")?.execute([])?;
    Ok(())
}

fn fail(group: Vec<Box<dyn Job>>, what: &str) {
    for job in group {
        job.fail(what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_that_takes_too_long_is_given_up_and_the_next_is_not() {
        let bounded = Bounded::new(Connection::open_in_memory().unwrap(), 20).unwrap();
        let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
        let ask = |db: &Connection, text| -> Result<i64> { Ok(db.query_row(text, [], |row| row.get(0))?) };
        let answer = bounded.run(|db| ask(db, endless));
        assert!(matches!(&answer, Err(StoreError::Unavailable { what }) if what.contains("longer")), "{answer:?}");
        assert_eq!(bounded.run(|db| ask(db, "SELECT 1")).unwrap(), 1);
    }
}
