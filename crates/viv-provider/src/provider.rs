//! The trait.

use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use viv_core::exec::{ExecSpec, ExecStatus, OutputEvent, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked, WatchEvent};
use viv_core::{ExecutionId, Identity, OwnerMark, RequestId, SandboxId, SnapshotId};

use crate::audit::{Finding, Swept};
use crate::capability::Capabilities;
use crate::error::ProviderError;
use crate::instance::{
    Deadline, DeadlineChange, DiskUsage, Ended, FullPlace, InstanceRef, InstanceSpec, LogPart, Mutation, Observation,
    Obstacle, Page, PageRequest, ProcessSeen, SaveRequest, Snapshot, SnapshotSeen, Whereabouts,
};
use crate::limits::ResourceLimits;

type Result<T> = std::result::Result<T, ProviderError>;

/// Bytes on their way out of, or into, an instance.
pub type ByteReader = Box<dyn AsyncRead + Send + Unpin>;

/// A connection to a port inside.
pub trait Dialled: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Dialled for T {}

/// The output of an execution, from an offset on.
#[async_trait]
pub trait OutputStream: Send {
    /// The next event; `None` after [`OutputEvent::End`].
    async fn next(&mut self) -> Result<Option<OutputEvent>>;
}

/// Changes below a directory. Dropping it ends the watch.
#[async_trait]
pub trait WatchStream: Send {
    /// The next change; `None` when the instance ended.
    async fn next(&mut self) -> Result<Option<WatchEvent>>;
}

/// What somebody inside asks of whoever keeps the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InsideRequest {
    /// No other request of this sandbox has it, and it sorts by time.
    pub id: RequestId,
    /// Whether it was told before, to somebody who did not answer it and may have done it.
    pub again: bool,
    /// What it is. A workload wrote it: it is nothing to be trusted.
    pub body: String,
}

/// What those inside ask for, one at a time: the next one comes when this one is answered, or nobody waits for it any
/// more. Dropping it leaves what was not answered to the next listener.
#[async_trait]
pub trait RequestStream: Send {
    /// The next request; `None` when the instance ended, or somebody else listens.
    async fn next(&mut self) -> Result<Option<InsideRequest>>;
}

/// How long the command of an exec probe may take (T2).
const PROBE_WITHIN_MS: u64 = 2_000;

/// An exec probe that runs this command: transient, with a limit, and no more output kept than it may have.
pub fn probe(argv: Vec<String>) -> ExecSpec {
    ExecSpec { argv, limit_ms: Some(PROBE_WITHIN_MS), transient: true, ..ExecSpec::default() }
}

/// What those answer who do not declare [`crate::Capability::Transfer`].
fn no_transfer() -> ProviderError {
    let why = "this provider does not offer it".to_owned();
    ProviderError::Unsupported { capability: crate::Capability::Transfer, why }
}

/// What those answer who do not declare [`crate::Capability::Requests`].
fn no_requests() -> ProviderError {
    let why = "this provider does not offer it".to_owned();
    ProviderError::Unsupported { capability: crate::Capability::Requests, why }
}

/// How to write a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileWrite {
    /// Absolute path; missing directories above it are made.
    pub path: String,
    /// Permission bits; those of a file that is replaced, or 0644, when absent.
    pub mode: Option<u32>,
    /// Who shall own it; root of the sandbox when absent.
    pub user: Option<String>,
}

/// Whoever runs sandboxes.
///
/// Rules for every implementation, checked by [`crate::conformance`]:
///
/// - A method that takes a [`Mutation`] refuses an older fencing token than
///   the highest seen for that sandbox ([`ProviderError::Fenced`]) and another
///   generation than the current one ([`ProviderError::StaleGeneration`]),
///   also after the instance was destroyed and made again. Only
///   [`Provider::remove_snapshot`] asks for no generation.
/// - Refusals come in this order: `Unsupported` (not declared), `Fenced`,
///   `StaleGeneration`, `Absent` (this generation was destroyed, or the
///   sandbox never was), `NotRunning` or `Expired`, and then what is wrong
///   with the request itself.
/// - Such a method is safe to repeat with the same operation id: the work is
///   done once and the answer is the same, also when doing it twice would have
///   failed (moving or removing a file, a signal to what has ended since).
/// - A method without one changes nothing, and is not activity (T9). With an
///   old generation it is refused as `StaleGeneration`, with one that was
///   destroyed as `Absent`; only [`Provider::observe`] answers both with
///   [`crate::InstanceState::Absent`].
/// - After an instance ended, and until it is destroyed, its state, cause,
///   executions and kept output are still told; anything that needs it alive
///   is refused as `NotRunning`.
/// - A create that fails leaves nothing (J5); a destroy that answers has seen
///   that nothing is left (L20).
#[async_trait]
pub trait Provider: Send + Sync {
    /// A short name for messages.
    fn name(&self) -> &str;

    /// What it can do here, as of the last look.
    fn capabilities(&self) -> Capabilities;

    /// The same after another look at what may be otherwise by now: a program that was installed since, or did not work on a
    /// busy machine. It may take as long as trying takes, and holds up no thread of those who ask.
    async fn look_again(&self) -> Capabilities {
        self.capabilities()
    }

    /// After how long it is worth another look, though nobody asks; `None` where what it can do stays what it is.
    fn looks_again_after(&self) -> Option<Duration> {
        None
    }

    /// Makes an instance of `mutation.generation` and answers when it runs.
    ///
    /// The same operation again answers with the instance as it stands now.
    /// Another operation is a `Conflict` while any generation is there, alive
    /// or ended: destroy comes first. A generation that was destroyed, also
    /// one that never was made, is `StaleGeneration` for ever. A limit that is
    /// not declared is `Unsupported`; a spec that is `Invalid` changes nothing,
    /// so its generation stays free.
    async fn create(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
    ) -> Result<Observation>;

    /// Looks at an instance, without touching it.
    async fn observe(&self, instance: &InstanceRef) -> Result<Observation>;

    /// Lists what carries this mark, alive or ended and not yet destroyed:
    /// each instance once over all pages.
    async fn list(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page>;

    /// Answers when the instance has ended, at once if it has. A destroy does
    /// not lose the answer: the tombstone of the last generation keeps the
    /// cause. `Absent` when there never was one.
    async fn wait_end(&self, instance: &InstanceRef) -> Result<Ended>;

    /// Ends everything in the instance, proves it, and removes every trace but
    /// its snapshots, which others may have been made from (L11). Answers the
    /// same when there is nothing any more, or never was: also then the
    /// generation is fenced, so that a create on its way comes too late.
    async fn destroy(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()>;

    /// Moves the hard deadline: a compare-and-set at its arbiter, durable
    /// before it is answered, `Expired` once it has passed (L5).
    async fn extend(&self, mutation: &Mutation, sandbox: &SandboxId, change: DeadlineChange) -> Result<Deadline>;

    /// Changes limits of what lives, frozen or not, and answers with all that are
    /// in force then; durable before it is answered. What is not said stays.
    ///
    /// Fewer processes or a smaller disk than are in use end nothing: no more
    /// are given. Less memory than is in use, and cannot be given back, is a
    /// `Conflict`. A limit of open files is of commands that start from now on.
    /// What is `Invalid` together with what stays is refused as a whole.
    async fn set_limits(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        change: &ResourceLimits,
    ) -> Result<ResourceLimits>;

    /// Takes the processors away and keeps the memory. Freezing the frozen
    /// answers the same. The limits of executions stand still, the hard
    /// deadline does not. Executions and their output can still be read;
    /// whatever needs a process inside is `NotRunning`.
    async fn freeze(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()>;

    /// Gives the processors back; to what runs, it answers the same.
    async fn thaw(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()>;

    /// Saves the filesystem, and answers when it is on disk and was checked (L10).
    ///
    /// A live one is of one moment, as if the power had failed then without
    /// losing a write; what runs runs on, what is frozen stays so, and what
    /// ended is `NotRunning`. When it is not live, everything in the instance
    /// is ended first, also in a frozen one: it is `Ended` as saved from then
    /// on, with its executions `Lost`. One that ended by itself can still be
    /// saved so and keeps its cause, and what was saved so can be saved again.
    /// A save that fails keeps the filesystem for the next try.
    ///
    /// A used snapshot id is a `Conflict` for another operation; one that was
    /// removed is for every operation, also the one that saved it. Where
    /// neither is declared, memory is what is missed first.
    async fn save(&self, mutation: &Mutation, sandbox: &SandboxId, request: &SaveRequest) -> Result<Snapshot>;

    /// Looks at a snapshot; `NotFound` when there is none. Where no kind of
    /// save is declared, this and the next two are `Unsupported`, and
    /// [`crate::Capability::SaveStopped`] is what is missed.
    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<SnapshotSeen>;

    /// Lists the snapshots that carry this mark: each once over all pages.
    /// They outlive the instances that they are of.
    async fn snapshots(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page<SnapshotSeen>>;

    /// Removes a snapshot of this sandbox, and what nothing else needs of it.
    ///
    /// The token is checked at the sandbox's fence; the generation is not,
    /// since snapshots belong to none, and the sandbox need not have an
    /// instance. `Conflict` when it is another sandbox's, and while an instance
    /// that was made from it is there, alive or ended; the one that it is of
    /// is not in the way. Answers the same when it is gone, or never was: a
    /// save on its way comes too late. Snapshots that were made from it keep
    /// all that they hold, and its id as their parent.
    async fn remove_snapshot(&self, mutation: &Mutation, sandbox: &SandboxId, snapshot: &SnapshotId) -> Result<()>;

    /// A snapshot as one file, for another installation of the same provider:
    /// all of it is there before the first byte is given. `NotFound` without
    /// such a snapshot, `Failed` when it is damaged.
    async fn export_snapshot(&self, snapshot: &SnapshotId) -> Result<ByteReader> {
        let _ = snapshot;
        Err(no_transfer())
    }

    /// Reads a snapshot from such a file, under this id and as one of this
    /// sandbox, which need not have an instance. The token is checked at its
    /// fence, the generation is not. What was changed on its way, or is no such
    /// file, is `Invalid` or `Failed`, and leaves nothing. A used id, also one
    /// that was removed, is a `Conflict`.
    async fn import_snapshot(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        snapshot: &SnapshotId,
        file: ByteReader,
    ) -> Result<Snapshot> {
        let _ = (mutation, sandbox, owner, snapshot, file);
        Err(no_transfer())
    }

    /// What an instance has on disk, alive or ended. It may have to be counted, so it is not part of a look.
    async fn disk_usage(&self, instance: &InstanceRef) -> Result<DiskUsage>;

    /// Makes an instance of `mutation.generation` from a snapshot, whichever
    /// sandbox that is of; otherwise like [`Provider::create`]. The snapshot
    /// says what it is made of, so the spec's image is not looked at. With
    /// memory, executions run on under their ids; without, there are none.
    /// `NotFound` without such a snapshot, `Failed` when it is damaged.
    async fn restore(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        snapshot: &SnapshotId,
    ) -> Result<Observation>;

    /// Makes an instance of another sandbox from a living one, which runs on;
    /// otherwise like [`Provider::create`]. The mutation is the new sandbox's.
    /// It begins with the files of one moment and no executions. It counts as
    /// made from the snapshot that its source was made from, if any. A source
    /// that ended is `NotRunning`, one that is not there `Absent`.
    async fn fork(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        source: &InstanceRef,
    ) -> Result<Observation>;

    /// Starts a command. The id is the caller's, so a repeated call finds what
    /// the first one started, by whichever operation; with another spec it is a
    /// `Conflict`. A command that cannot start is an execution that `Failed`,
    /// not an error; an empty one is `Invalid`. A transient one is told of by
    /// its id alone and forgotten as [`ExecSpec::transient`] says, at the
    /// latest with its instance; its id is free from then on.
    async fn execute(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        spec: &ExecSpec,
    ) -> Result<ExecStatus>;

    /// A command that exists in every image of this provider, and writes
    /// exactly the nonce and a newline: what an exec probe runs (T2), along the
    /// path of every other command. The nonce is letters and digits.
    fn probe_spec(&self, nonce: &str) -> ExecSpec {
        probe(vec!["echo".to_owned(), nonce.to_owned()])
    }

    /// A command that exists in every image of this provider, asks for `body`
    /// ([`Provider::requests`]), and writes exactly the answer and a newline.
    fn ask_spec(&self, body: &str) -> ExecSpec {
        let argv = ["viv-ask", body].map(str::to_owned).to_vec();
        ExecSpec { argv, ..ExecSpec::default() }
    }

    /// Reads the instance's identity file from inside, along the path of every
    /// other read of a file (T2): an unmounted root or an agent that hangs
    /// shows here. `Failed` when what is there is no identity, or the root is
    /// not what was mounted.
    async fn identity(&self, instance: &InstanceRef) -> Result<Identity>;

    /// Where an operator finds what the instance consists of, alive or ended
    /// (T8). What cannot be told is left out.
    async fn whereabouts(&self, instance: &InstanceRef) -> Result<Whereabouts>;

    /// The processes of those inside, without whoever serves them, and what each does right now. Nothing where that
    /// cannot be told.
    async fn processes(&self, instance: &InstanceRef) -> Result<Vec<ProcessSeen>> {
        let _ = instance;
        Ok(Vec::new())
    }

    /// Where inside next to nothing more can be written right now. Nothing where that cannot be told.
    async fn full_places(&self, instance: &InstanceRef) -> Result<Vec<FullPlace>> {
        let _ = instance;
        Ok(Vec::new())
    }

    /// The last lines of what those who keep the instance wrote down, at most
    /// so many bytes of each, alive or ended. Whoever was silent is left out.
    async fn log_tail(&self, instance: &InstanceRef, bytes_max: u64) -> Result<Vec<LogPart>>;

    /// How an execution stands, also after the instance ended.
    async fn execution(&self, instance: &InstanceRef, execution: &ExecutionId) -> Result<ExecStatus>;

    /// All executions that are still known but the transient, oldest first.
    async fn executions(&self, instance: &InstanceRef) -> Result<Vec<ExecStatus>>;

    /// Reads output from an offset on; with `follow`, until the execution ends.
    ///
    /// The first event stands exactly at the offset, and there are no gaps:
    /// what was not kept is told as a cut. Of a long output, the beginning and
    /// the end are kept. An offset past the end hears only the end. A stream
    /// whose instance is destroyed meanwhile ends, or fails as `Absent`.
    async fn attach(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        follow: bool,
    ) -> Result<Box<dyn OutputStream>>;

    /// Gives input. `offset` is where the first byte stands in all input so
    /// far; bytes that were taken before are not taken again. Answers how many
    /// bytes were taken in all, which may be fewer than were given. A gap, a
    /// closed input and an execution that ended are a `Conflict`.
    async fn write_stdin(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        offset: u64,
        data: &[u8],
    ) -> Result<u64>;

    /// Closes the input; what is closed or has ended answers the same.
    async fn close_stdin(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<()>;

    /// Sends a signal to the execution's first process. `Conflict` when that
    /// has ended, `Invalid` when there is no such signal.
    async fn signal(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        signal: i32,
    ) -> Result<()>;

    /// Changes the size of its terminal; `Conflict` when it has none.
    async fn resize(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        size: TtySize,
    ) -> Result<()>;

    /// Ends its whole tree (TERM, grace, KILL) and answers when it is gone (X3).
    /// What had ended before keeps its outcome, and that is the answer.
    async fn cancel(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<ExecStatus>;

    /// Reads a part of a file; to its end without `length`, nothing past it.
    /// Links are followed. `NotFound` when there is none, `Conflict` when it is
    /// a directory. Here and below, a path that is not absolute is `Invalid`.
    async fn file_read(
        &self,
        instance: &InstanceRef,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<ByteReader>;

    /// Replaces a file as a whole, in one step. `Conflict` when a directory is
    /// there, or a file is in the way; `Exhausted` when there is no room, and
    /// then nothing of it takes any.
    async fn file_write(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        file: &FileWrite,
        content: ByteReader,
    ) -> Result<FileStat>;

    /// Looks at a path. A link is looked at itself.
    async fn file_stat(&self, instance: &InstanceRef, path: &str) -> Result<FileStat>;

    /// Lists a directory down to a depth; 1 is the directory itself, 0 is
    /// `Invalid`. Links are not followed. `Conflict` when it is not a directory.
    async fn file_list(&self, instance: &InstanceRef, path: &str, depth: u32) -> Result<DirListing>;

    /// Makes a directory and those above it; one that is there is fine, a file
    /// in the way is a `Conflict`.
    async fn file_mkdir(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()>;

    /// Moves a path, replacing what is there; a directory that is not empty is
    /// a `Conflict`.
    async fn file_move(&self, mutation: &Mutation, sandbox: &SandboxId, from: &str, to: &str) -> Result<()>;

    /// Removes a path with all below it. Links are removed, not followed.
    /// `NotFound` when there is none; the root is `Invalid`.
    async fn file_remove(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()>;

    /// Tells about changes below a directory: all that happen after this has answered.
    async fn file_watch(&self, instance: &InstanceRef, path: &str, recursive: bool) -> Result<Box<dyn WatchStream>>;

    /// A tar archive of a path: of a directory what is in it, named from there
    /// on, so that it can be put back at the same path; of anything else the
    /// one entry, by its last name.
    async fn archive_get(&self, instance: &InstanceRef, path: &str) -> Result<ByteReader>;

    /// Unpacks a tar archive into a directory, made if it is not there (S4).
    ///
    /// A bound that is passed is `Exhausted`. `Invalid` is an entry that is
    /// absolute, climbs, or goes through a symbolic link below the directory,
    /// a hard link to anywhere else, and what is no archive. Symbolic links
    /// are made as they are, since nothing is written through them; one that
    /// an entry replaces is replaced, not followed. What is refused may leave
    /// a part of itself in the directory, and nothing anywhere else.
    async fn archive_put(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        path: &str,
        bounds: ArchiveBounds,
        archive: ByteReader,
    ) -> Result<Unpacked>;

    /// Connects to a TCP port inside; `NotFound` when nobody listens.
    async fn dial(&self, instance: &InstanceRef, port: u16) -> Result<Box<dyn Dialled>>;

    /// Which part of the memory that sandboxes share is left, where that is known.
    fn memory_left(&self) -> Option<f64> {
        None
    }

    /// That the machine has next to no disk left for instances, in words for who runs it; `None` while there is room.
    fn short_of_room(&self) -> Option<String> {
        None
    }

    /// By what it saves memory, where it can and there is more to say: a program, its version, what that cannot do here. As of
    /// the last look, like [`Provider::capabilities`].
    fn saves_memory_by(&self) -> Option<String> {
        None
    }

    /// Looks for what was left here and belongs to nobody: of whatever was made, and by whom it was made, never of
    /// anybody else. What is being made or removed right now is not among it. Changes nothing.
    async fn audit(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    /// Clears away what [`Provider::audit`] found, after a look at each once more. Answers in the same order.
    async fn sweep(&self, findings: &[Finding]) -> Result<Vec<Swept>> {
        let _ = findings;
        Ok(Vec::new())
    }

    /// Cuts the way out of an instance, or connects it again. When it answers, nothing from inside reaches anybody
    /// outside any more, connections that were open too. What never had a way out answers the same, and so does what is
    /// as it is wanted already.
    async fn set_network(&self, mutation: &Mutation, sandbox: &SandboxId, connected: bool) -> Result<()> {
        let _ = (mutation, sandbox, connected);
        Ok(())
    }

    /// What is known to be in the way of saving the memory of an instance that lives, and who holds it. A look: nothing
    /// inside is touched, and what is found may be gone a moment later.
    async fn memory_obstacles(&self, instance: &InstanceRef) -> Result<Vec<Obstacle>> {
        let _ = instance;
        let why = self.capabilities().missing.remove(&crate::Capability::SaveMemory);
        let why = why.unwrap_or_else(|| "this provider does not offer it".to_owned());
        Err(ProviderError::Unsupported { capability: crate::Capability::SaveMemory, why })
    }

    /// Hears what those inside ask for, what was not answered first. There is
    /// one listener: whoever listened before hears no more.
    async fn requests(&self, instance: &InstanceRef) -> Result<Box<dyn RequestStream>> {
        let _ = instance;
        Err(no_requests())
    }

    /// Answers one of them. `NotFound` when nobody waits for it: it was never
    /// asked, was answered, or whoever asked has gone.
    async fn answer_request(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        request: &RequestId,
        answer: &str,
    ) -> Result<()> {
        let _ = (mutation, sandbox, request, answer);
        Err(no_requests())
    }
}
