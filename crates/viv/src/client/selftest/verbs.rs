//! How each thing is asked for, until it is done. All of these can be repeated.

use std::io::Read as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use viv_api::bound::{
    IdempotencyKey, LabelFilter, Labels, ListDepth, Path, SandboxName, SandboxRef, SnapshotRef, WaitMs,
};
use viv_api::client::{Change, Client, ClientError, SandboxHandle};
use viv_api::diagnosis::Diagnosis;
use viv_api::execution::{Execution, ExecutionState, OutputLine, StartExecution, TimeLimit};
use viv_api::file::FileListing;
use viv_api::query::{ListSandboxes, ReadFile, WriteFile};
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, RestSandbox, Sandbox};
use viv_api::snapshot::{CreateSnapshot, Fork, Forked, RollbackSandbox, Snapshot, SnapshotState};
use viv_core::{ExecutionId, SandboxId, SnapshotId};

use super::patient::Patient;
use crate::client::new::{fresh_key, wrong};

/// How long one call waits for a change that takes time.
const WAIT_MS: u64 = 30_000;

/// How long a change may take in all before it is called stuck.
const CHANGE_MAX: Duration = Duration::from_secs(300);

/// More than any command here says.
const SAID_BYTES_MAX: usize = 1 << 20;

type Asked<T> = Result<T, ClientError>;

#[expect(clippy::unnecessary_wraps, reason = "requests take it so")]
fn wait() -> Option<WaitMs> {
    Some(WaitMs::nearest(WAIT_MS))
}

fn rest() -> RestSandbox {
    RestSandbox { wait_ms: wait() }
}

impl Patient<'_> {
    /// Asks about a sandbox.
    fn about<T>(&self, id: &SandboxId, ask: impl Fn(SandboxHandle<'_>) -> Asked<T>) -> Asked<T> {
        self.ask(|client| ask(client.sandbox(SandboxRef::from(id))))
    }

    /// Asks for a change, again and again until it is done.
    fn change(&self, what: &str, ask: impl Fn(&Client) -> Asked<Change>) -> anyhow::Result<Sandbox> {
        let until = Instant::now() + CHANGE_MAX;
        loop {
            match self.ask(&ask)? {
                Change::Done(sandbox) => return Ok(*sandbox),
                Change::Underway(sandbox) if Instant::now() >= until => {
                    bail!("{what} takes longer than {CHANGE_MAX:?}: {} is {}", sandbox.id, sandbox.status)
                }
                Change::Underway(_) => {}
            }
        }
    }

    /// The same of a sandbox.
    fn change_of(
        &self,
        what: &str,
        id: &SandboxId,
        ask: impl Fn(SandboxHandle<'_>) -> Asked<Change>,
    ) -> anyhow::Result<Sandbox> {
        self.change(what, |client| ask(client.sandbox(SandboxRef::from(id))))
    }

    pub(crate) fn create(&self, request: &CreateSandbox) -> anyhow::Result<Sandbox> {
        let key = fresh_key()?;
        let request = CreateSandbox { wait_ms: wait(), ..request.clone() };
        self.change("creating", |client| client.create(&request, Some(&key)))
    }

    pub(crate) fn freeze(&self, id: &SandboxId) -> anyhow::Result<Sandbox> {
        self.change_of("freezing", id, |sandbox| sandbox.freeze(&rest()))
    }

    pub(crate) fn thaw(&self, id: &SandboxId) -> anyhow::Result<Sandbox> {
        self.change_of("thawing", id, |sandbox| sandbox.thaw(&rest()))
    }

    pub(crate) fn hibernate(&self, id: &SandboxId) -> anyhow::Result<Sandbox> {
        self.change_of("hibernating", id, |sandbox| sandbox.hibernate(&rest()))
    }

    pub(crate) fn resume(&self, id: &SandboxId) -> anyhow::Result<Sandbox> {
        self.change_of("resuming", id, |sandbox| sandbox.ensure(&EnsureSandbox { wait_ms: wait() }))
    }

    /// A snapshot with this name, of which there is one however often it is asked for.
    pub(crate) fn snapshot(&self, id: &SandboxId, name: &SandboxName) -> anyhow::Result<Snapshot> {
        let request = CreateSnapshot { name: Some(name.clone()), labels: Labels::default() };
        Ok(self.about(id, |sandbox| {
            let before = sandbox.snapshots_all().find(|one| match one {
                Ok(one) => one.name.as_deref() == Some(name.as_str()) && one.state == SnapshotState::Ready,
                Err(_) => true,
            });
            before.unwrap_or_else(|| sandbox.make_snapshot(&request, None))
        })?)
    }

    /// Those that are there of a sandbox that may be deleted.
    pub(crate) fn snapshots(&self, id: &SandboxId) -> Asked<Vec<Snapshot>> {
        self.about(id, |sandbox| sandbox.snapshots_all().collect())
    }

    pub(crate) fn rollback(&self, id: &SandboxId, snapshot: &SnapshotId) -> anyhow::Result<Sandbox> {
        let snapshot = SnapshotRef::new(snapshot.as_str()).map_err(wrong)?;
        let request = RollbackSandbox { snapshot, discard: false, wait_ms: wait() };
        self.change_of("rolling back", id, |sandbox| sandbox.rollback(&request))?;
        // A wait that was over too soon is taken up by an entry, which changes nothing about where it goes.
        self.resume(id)
    }

    /// One sandbox that begins with a snapshot and has this label, of which there is one however often it is asked for.
    pub(crate) fn fork(&self, snapshot: &SnapshotId, label: &LabelFilter) -> anyhow::Result<Sandbox> {
        let labels = Labels::new([(label.key.clone(), label.value.clone())].into()).map_err(wrong)?;
        let request = Fork { labels, wait_ms: wait(), ..Fork::default() };
        self.forked(label, |client| client.fork_snapshot(snapshot, &request, None))
    }

    /// The same of what runs, with its memory.
    pub(crate) fn fork_memory(&self, id: &SandboxId, label: &LabelFilter) -> anyhow::Result<Sandbox> {
        let labels = Labels::new([(label.key.clone(), label.value.clone())].into()).map_err(wrong)?;
        let request = Fork { labels, wait_ms: wait(), memory: true, ..Fork::default() };
        self.forked(label, |client| client.sandbox(SandboxRef::from(id)).fork(&request, None))
    }

    fn forked(&self, label: &LabelFilter, fork: impl Fn(&Client) -> Asked<Forked>) -> anyhow::Result<Sandbox> {
        let query = ListSandboxes { label: vec![label.clone()], ..ListSandboxes::default() };
        let forked = self.ask(|client| match client.list_all(query.clone()).next() {
            Some(before) => before.map(Some),
            None => fork(client).map(|made| made.sandboxes.into_iter().next()),
        })?;
        let forked = forked.context("a fork made nothing")?;
        self.resume(&forked.id)
    }

    /// Whether the daemon says that it can do this.
    pub(crate) fn can(&self, capability: &str) -> Asked<bool> {
        let doctor = self.ask(Client::doctor)?;
        Ok(doctor.capabilities.iter().any(|one| one.name == capability && one.has))
    }

    pub(crate) fn delete(&self, id: &SandboxId) -> anyhow::Result<Sandbox> {
        self.change_of("deleting", id, |sandbox| sandbox.delete(wait()))
    }

    /// As it is shown.
    pub(crate) fn get(&self, id: &SandboxId) -> Asked<Sandbox> {
        self.about(id, |sandbox| sandbox.get())
    }

    /// Probed now.
    pub(crate) fn verify(&self, id: &SandboxId) -> Asked<Sandbox> {
        self.about(id, |sandbox| sandbox.verify())
    }

    pub(crate) fn diagnosis(&self, id: &SandboxId) -> Asked<Diagnosis> {
        self.about(id, |sandbox| sandbox.diagnosis())
    }

    /// Those with a label that are not deleted.
    pub(crate) fn labelled(&self, label: &str) -> anyhow::Result<Vec<Sandbox>> {
        let query = ListSandboxes { all: true, label: vec![label.parse()?], ..ListSandboxes::default() };
        let all = self.ask(|client| client.list_all(query.clone()).collect::<Asked<Vec<_>>>())?;
        Ok(all.into_iter().filter(|sandbox| !sandbox.deleted).collect())
    }

    pub(crate) fn make_dir(&self, id: &SandboxId, path: &Path) -> Asked<()> {
        self.about(id, |sandbox| sandbox.make_dir(path))
    }

    pub(crate) fn write(&self, id: &SandboxId, path: &Path, content: &[u8]) -> Asked<()> {
        let write = WriteFile { path: path.clone(), mode: None, user: None, generation: None };
        self.about(id, |sandbox| sandbox.write_file(&write, &mut &*content).map(drop))
    }

    pub(crate) fn read(&self, id: &SandboxId, path: &Path) -> anyhow::Result<Vec<u8>> {
        let read = ReadFile { path: path.clone(), offset: None, length: None, generation: None };
        let mut content = Vec::new();
        let bytes = self.about(id, |sandbox| sandbox.read_file(&read))?;
        bytes.take(SAID_BYTES_MAX as u64).read_to_end(&mut content).context("the file broke off")?;
        Ok(content)
    }

    pub(crate) fn list(&self, id: &SandboxId, path: &Path) -> Asked<FileListing> {
        self.about(id, |sandbox| sandbox.list_files(path, ListDepth::new(1).ok()))
    }

    /// Runs a command to its end, which has to be a good one, and answers with what it said.
    pub(crate) fn run(&self, id: &SandboxId, argv: &[&str]) -> anyhow::Result<Vec<u8>> {
        let key = fresh_key()?;
        let command = StartExecution::of(argv.iter().copied())?;
        let Answered { end, said, is_cut } = self.about(id, |sandbox| follow(&sandbox, &command, &key))?;
        ensure!(end == (ExecutionState::Exited, Some(0)), "{argv:?} ended as {end:?}");
        // A full disk keeps outputs from being kept: what is missing was not said to be nothing.
        ensure!(!is_cut, "the output of {argv:?} was cut");
        Ok(said)
    }

    /// Starts a command that runs on, once, however often it is asked for.
    pub(crate) fn start(&self, id: &SandboxId, argv: &[&str]) -> anyhow::Result<ExecutionId> {
        let key = fresh_key()?;
        let mut command = StartExecution::of(argv.iter().copied())?;
        (command.detach, command.limit_ms) = (true, Some(TimeLimit::NONE));
        Ok(self.about(id, |sandbox| sandbox.start(&command, Some(&key)))?.id)
    }

    pub(crate) fn execution(&self, id: &SandboxId, execution: &ExecutionId) -> Asked<Execution> {
        self.about(id, |sandbox| sandbox.execution(execution.clone()).get())
    }

    /// What one has said so far.
    pub(crate) fn said(&self, id: &SandboxId, execution: &ExecutionId) -> anyhow::Result<String> {
        let said = self.about(id, |sandbox| {
            let mut said = Vec::new();
            for line in sandbox.execution(execution.clone()).output(0) {
                match line? {
                    OutputLine::Chunk(chunk) => said.extend(chunk.data().unwrap_or_default()),
                    OutputLine::Cut(_) | OutputLine::End(_) | OutputLine::Alive(_) => {}
                }
            }
            Ok(said)
        })?;
        String::from_utf8(said).context("it said something that is no text")
    }

    /// Whether a command is refused because it does not run.
    pub(crate) fn is_refused(&self, id: &SandboxId) -> anyhow::Result<bool> {
        let command = StartExecution::of(["true"])?;
        // Not patiently: that it is refused is what is wanted.
        match self.once(|client| client.sandbox(SandboxRef::from(id)).start(&command, None)) {
            Ok(_) => Ok(false),
            Err(error) if error.code() == Some(viv_api::ErrorCode::NotRunning) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }
}

/// What came of a command.
struct Answered {
    end: (ExecutionState, Option<i32>),
    said: Vec<u8>,
    /// Not all that it said was kept.
    is_cut: bool,
}

/// Started once, whoever asks how often, and read from its beginning.
fn follow(sandbox: &SandboxHandle<'_>, command: &StartExecution, key: &IdempotencyKey) -> Asked<Answered> {
    let started = sandbox.start(command, Some(key))?;
    let (mut said, mut end, mut is_cut) = (Vec::new(), (started.state, started.exit_code), false);
    for line in sandbox.execution(started.id).follow(0) {
        match line? {
            OutputLine::Chunk(chunk) if said.len() < SAID_BYTES_MAX => said.extend(chunk.data().unwrap_or_default()),
            OutputLine::End(ended) => end = (ended.end.state, ended.end.exit_code),
            OutputLine::Cut(_) => is_cut = true,
            OutputLine::Chunk(_) | OutputLine::Alive(_) => {}
        }
    }
    Ok(Answered { end, said, is_cut })
}
