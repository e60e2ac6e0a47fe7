//! From the commands' pipes and terminals to disk: one thread for all, there while anything runs.
//!
//! Readers of output never meet this thread: they read the files, and are
//! woken when there is more.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use viv_agent::output::{Log, RECORD_BYTES_MAX};
use viv_core::exec::Stream;

use crate::agent::{Agent, Wake, lock, spawn};
use crate::error::say;
use crate::exec::Execution;
use crate::exec::monitor::{MESSAGE_BYTES, Message};
use crate::sys::{self, Exit};

/// Most that is still taken from each pipe when a command has ended: the most
/// that a pipe can hold. Beyond it, what is written comes from the background.
const DRAIN_BYTES_MAX: usize = 1 << 20;

/// Events taken at once; more wait in the kernel.
const EVENTS_MAX: usize = 32;

/// Key of the pump's own wake-up.
const WAKE: u64 = u64::MAX;

/// Where an execution is heard.
pub(crate) struct Source {
    fd: Arc<OwnedFd>,
    kind: SourceKind,
}

#[derive(Clone, Copy)]
enum SourceKind {
    Output(Stream),
    /// The monitor, which reports the leader's exit.
    Link,
}

impl Source {
    pub(crate) fn output(stream: Stream, fd: Arc<OwnedFd>) -> Self {
        Self { fd, kind: SourceKind::Output(stream) }
    }

    pub(crate) fn link(fd: Arc<OwnedFd>) -> Self {
        Self { fd, kind: SourceKind::Link }
    }
}

/// An execution as the pump has it.
pub(crate) struct Entry {
    execution: Arc<Execution>,
    log: Log,
    /// `None` once it said all.
    sources: Vec<Option<Source>>,
    finished: bool,
    /// Whether output came after the end.
    late: bool,
}

impl Entry {
    pub(crate) fn new(execution: Arc<Execution>, log: Log, sources: Vec<Source>) -> Self {
        Self { execution, log, sources: sources.into_iter().map(Some).collect(), finished: false, late: false }
    }

    fn is_done(&self) -> bool {
        self.finished && self.sources.iter().all(Option::is_none)
    }
}

enum Command {
    Add(Box<Entry>),
    Finish(Arc<Execution>),
}

/// The pump, as others see it.
pub(crate) struct Pump {
    shared: Mutex<Shared>,
    wake: Wake,
}

#[derive(Default)]
struct Shared {
    commands: Vec<Command>,
    /// Executions that are about to be added.
    expected: usize,
    running: bool,
}

/// The promise of an execution to come; the thread stays for it.
pub(crate) struct Seat<'p> {
    pump: &'p Pump,
}

impl Seat<'_> {
    pub(crate) fn add(self, entry: Entry) {
        lock(&self.pump.shared).commands.push(Command::Add(Box::new(entry)));
        // Dropping wakes the pump.
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        lock(&self.pump.shared).expected -= 1;
        self.pump.wake.ring();
    }
}

impl Pump {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { shared: Mutex::default(), wake: Wake::new()? })
    }

    /// Makes sure that the thread runs, before a command does whose output it would have to take.
    pub(crate) fn prepare(&'static self, agent: &'static Agent) -> std::io::Result<Seat<'static>> {
        let mut shared = lock(&self.shared);
        if !shared.running {
            let mut work = Work::new(agent)?;
            spawn("pump", move || work.run())?;
            shared.running = true;
        }
        shared.expected += 1;
        Ok(Seat { pump: self })
    }

    /// An execution ended: keep what it wrote until now, then make its status final.
    /// One that was never added is left alone.
    pub(crate) fn finish(&self, execution: &Arc<Execution>) {
        lock(&self.shared).commands.push(Command::Finish(Arc::clone(execution)));
        self.wake.ring();
    }
}

/// What the thread has.
struct Work {
    agent: &'static Agent,
    epoll: OwnedFd,
    entries: BTreeMap<u64, Entry>,
    next_key: u64,
    buf: Vec<u8>,
}

/// What came of reading a source once.
enum Read {
    Some(usize),
    Dry,
    Ended,
}

impl Work {
    fn new(agent: &'static Agent) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &agent.pump.wake.0, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self { agent, epoll, entries: BTreeMap::new(), next_key: 0, buf: Vec::new() })
    }

    fn run(&mut self) {
        self.buf.resize(RECORD_BYTES_MAX, 0);
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            if !self.obey() {
                return;
            }
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => self.agent.end_everything(&format!("epoll failed: {errno}")),
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => self.agent.pump.wake.clear(),
                    data => self.heard(data >> 2, (data & 3) as usize),
                }
            }
        }
    }

    /// Does what others asked for; false when there is nothing left to do and the thread may end.
    fn obey(&mut self) -> bool {
        loop {
            let mut shared = lock(&self.agent.pump.shared);
            let commands = std::mem::take(&mut shared.commands);
            if commands.is_empty() {
                shared.running = !self.entries.is_empty() || shared.expected > 0;
                return shared.running;
            }
            drop(shared);
            for command in commands {
                match command {
                    Command::Add(entry) => self.add(*entry),
                    Command::Finish(execution) => self.finish(&execution),
                }
            }
        }
    }

    fn add(&mut self, entry: Entry) {
        let key = self.next_key;
        self.next_key += 1;
        for (index, source) in entry.sources.iter().flatten().enumerate() {
            let data = epoll::EventData::new_u64(key << 2 | index as u64);
            if let Err(errno) = epoll::add(&self.epoll, &source.fd, data, epoll::EventFlags::IN) {
                say(&format!("output of {} is not heard: {errno}", entry.execution.id()));
            }
        }
        self.entries.insert(key, entry);
    }

    fn heard(&mut self, key: u64, index: usize) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        if let Read::Ended = read_source(self.agent, &self.epoll, entry, index, &mut self.buf) {
            self.retire(key);
        }
    }

    fn finish(&mut self, execution: &Arc<Execution>) {
        let Some((&key, entry)) = self.entries.iter_mut().find(|(_, e)| Arc::ptr_eq(&e.execution, execution)) else {
            return;
        };
        for index in 0..entry.sources.len() {
            let mut drained = 0;
            while drained < DRAIN_BYTES_MAX
                && let Read::Some(count) = read_source(self.agent, &self.epoll, entry, index, &mut self.buf)
            {
                drained += count;
            }
        }
        entry.finished = true;
        entry.late = false;
        execution.finalise(self.agent);
        self.retire(key);
    }

    /// Lets go of an execution that ended and of which nothing is heard any more.
    fn retire(&mut self, key: u64) {
        if self.entries.get(&key).is_some_and(Entry::is_done)
            && let Some(entry) = self.entries.remove(&key)
            && entry.late
        {
            entry.execution.keep_late_status();
        }
    }
}

/// Reads a source once, keeps what it said, and closes it at its end.
fn read_source(agent: &Agent, epoll: &OwnedFd, entry: &mut Entry, index: usize, buf: &mut [u8]) -> Read {
    let Some(Some(source)) = entry.sources.get(index) else { return Read::Dry };
    let kind = source.kind;
    let read = match rustix::io::read(&source.fd, &mut *buf) {
        Ok(0) => Read::Ended,
        Ok(count) => Read::Some(count),
        Err(Errno::AGAIN | Errno::INTR) => Read::Dry,
        // A terminal that nobody has open any more says EIO.
        Err(_) => Read::Ended,
    };
    match (&read, kind) {
        (Read::Some(count), SourceKind::Output(stream)) => {
            entry.log.append(stream, sys::wall_ms(), &buf[..*count]);
            entry.execution.written.store(entry.log.offset(), Ordering::Release);
            entry.execution.wake_followers();
            entry.late = true;
        }
        (Read::Some(_), SourceKind::Link) => {
            if let Some(Message::Exit(exit)) = buf.first_chunk::<MESSAGE_BYTES>().and_then(|m| Message::decode(*m)) {
                entry.execution.leader_exited(agent, exit);
            }
        }
        (Read::Ended, _) => {
            let _ = epoll::delete(epoll, &source.fd);
            entry.sources[index] = None;
            if matches!(kind, SourceKind::Link) {
                // If the exit was never reported, the monitor was killed, and the leader is about to be.
                entry.execution.leader_exited(agent, Exit::Signal(libc::SIGKILL));
            }
        }
        (Read::Dry, _) => {}
    }
    read
}
