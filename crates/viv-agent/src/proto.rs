//! The messages between the outside and the agent.
//!
//! # Conversations
//!
//! The agent listens on [`SOCKET`]. A connection carries one conversation
//! after another. Each starts with a [`Request`] as a JSON frame and is
//! answered by a JSON frame holding a [`Reply`]. Some go on from there:
//!
//! ```text
//!   exec_attach   ◄ ok(Attached)  ◄ data(chunk)* and json(StreamEvent)*, up to StreamEvent::End
//!   exec_stdin    ► data* end     ◄ ok(Stdin)
//!   file_read     ◄ ok(Stat)      ◄ data* end      (or a Reply::Error in place of `end`)
//!   file_write    ► data* end     ◄ ok(Stat)
//!   archive_get   ◄ ok(Done)      ◄ data* end      (or a Reply::Error in place of `end`)
//!   archive_put   ► data* end     ◄ ok(Unpacked)
//!   file_watch    ◄ ok(Done)      ◄ json(WatchEvent)*          until the client goes
//!   dial          ◄ ok(Done)      ◄► raw bytes, no more frames, until both sides closed
//!   requests      ◄ ok(Done)      ◄ json(InsideRequest)*       until the client goes, or another one listens
//!   control       ◄ ok(Hello)     ► json(ControlMessage)*  ◄ json(AgentMessage)*
//! ```
//!
//! Everything else is one request and one reply. A request that uploads
//! (`►`) is answered with an error before all data was sent if it fails early;
//! the agent then closes the connection.
//!
//! # From inside
//!
//! Workloads do not reach [`SOCKET`]. They have one of their own ([`INSIDE_SOCKET`]), on which a connection carries one
//! [`InsideCall`] and its [`InsideReply`], in the same frames. What is called there is told to who sent `requests`, one
//! call at a time, and answered with `request_answer`.
//!
//! # Versions
//!
//! [`PROTOCOL`] grows only when an old peer could misunderstand a new one.
//! Additions do not need that: unknown fields are skipped, an unknown request
//! is answered [`ErrorCode::Unsupported`], and [`Hello::features`] says what an
//! agent knows. A daemon therefore works with every agent of its own protocol
//! number, older ones included. `tests/golden` keeps old conversations alive.

use serde::{Deserialize, Serialize};
pub use viv_core::Identity;
use viv_core::exec::{ExecSpec, ExecStatus, TRANSIENT_KEPT_MS, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::{ExecutionId, FencingToken, Generation, OperationId, RequestId};

/// The version of these messages.
pub const PROTOCOL: u32 = 1;

/// Where everything of ours lives inside a sandbox.
pub const HOME: &str = "/.vivarium";

/// A directory shared with the host: socket, executions and their output. Only the agent can enter it.
pub const RUN_DIR: &str = "/.vivarium/run";

/// The agent's socket below [`RUN_DIR`].
pub const SOCKET: &str = "agent.sock";

/// The agent's configuration below [`RUN_DIR`], an [`AgentConfig`] as JSON.
pub const CONFIG: &str = "agent.json";

/// The instance's own boot id below [`RUN_DIR`]. Programs read it where the kernel shows its own.
pub const BOOT_ID: &str = "boot_id";

/// Limits that were changed since, below [`RUN_DIR`]: an [`AgentLimits`] as JSON, looked at before every command.
pub const LIMITS: &str = "limits.json";

/// Below [`RUN_DIR`] for as long as a dump of everybody inside is made: whoever was quiesced meanwhile accepts nobody until
/// it is gone, and everybody from then on, be it in another instance.
pub const DUMPING: &str = "dumping";

/// The executions below [`RUN_DIR`], a directory for each: see [`crate::output`].
pub const EXECUTIONS: &str = "exec";

/// The same for transient executions, which leave nothing: nobody but the agent looks into it.
pub const TRANSIENT: &str = "transient";

/// What the agent has to say, below [`RUN_DIR`], where its standard error cannot be kept from those inside.
pub const AGENT_LOG: &str = "agent.log";

/// What makes the agent's own program write its next argument and a newline, and end: a command that every sandbox has,
/// whatever its image holds.
pub const ECHO_VERB: &str = "--echo";

/// What makes it send its next argument to whoever keeps the sandbox, and write the answer: `--ask TEXT`.
pub const ASK_VERB: &str = "--ask";

/// What makes it the command `viv` of those inside, by whatever name it was called.
pub const VIV_VERB: &str = "viv";

/// The folder below [`HOME`] in which commands find it under that name; last in their `PATH`.
pub const BIN: &str = "bin";

/// The name of the socket for workloads: abstract, so it is in no filesystem and of this sandbox's network namespace
/// alone. An agent whose home is elsewhere has it there, under this name.
pub const INSIDE_SOCKET: &str = "vivarium-inside";

/// Longest [`InsideCall`] as JSON: a command with its arguments and environment.
pub const CALL_BYTES_MAX: usize = 64 << 10;

/// Longest answer to one.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;

/// The name of the ability to forget transient executions, in [`Hello::features`].
pub const TRANSIENT_FEATURE: &str = "transient_executions";

/// The agent's own program, as commands find it.
pub const AGENT: &str = "/.vivarium/agent";

/// The identity of the instance, an [`Identity`] as JSON: in the root
/// filesystem itself, so that reading it shows that the root is there (T2).
pub const IDENTITY: &str = "/.vivarium/identity.json";

/// What the supervisor tells the agent before it starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentConfig {
    /// Which instance this is.
    pub identity: Identity,
    /// The highest fencing token so far.
    pub token: FencingToken,
    /// Environment of every command.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// Where commands start.
    pub workdir: String,
    /// An id inside that no workload ever gets; it owns [`RUN_DIR`] and the
    /// cgroup. 0 where there is only one id, as in a mapping of a single user.
    pub keeper_id: u32,
    /// Bound of an execution's kept output when its spec names none.
    #[serde(default = "default_output_bytes_max")]
    pub output_bytes_max: u64,
    /// How many ended executions are remembered; the oldest are forgotten, output and all.
    #[serde(default = "default_ended_max")]
    pub ended_executions_max: usize,
    /// How long a transient execution that nobody read is remembered after its end.
    #[serde(default = "default_transient_kept_ms")]
    pub transient_kept_ms: u64,
    /// How many files a command may have open at once, as far as whoever started the agent may; `None` leaves the
    /// limit as it was found.
    #[serde(default)]
    pub open_files: Option<u64>,
    /// How many processes the sandbox may have; `None` where that is not bounded. The cgroup is what keeps it, the agent
    /// only sees to it that those who want more are refused before they cost anything.
    #[serde(default)]
    pub processes: Option<u64>,
    /// Whether workloads are confined: seccomp filters, no capabilities, no new privileges. Without, a sandbox is
    /// none: only for showing that these are what keeps it closed.
    #[serde(default = "default_confine")]
    pub confine: bool,
    /// Whether commands of root keep what package managers need: to change owners of files, to write to those of other
    /// users, and to become one. The agent is then kept from them as where there is one id.
    #[serde(default)]
    pub packages: bool,
}

impl AgentConfig {
    /// A long build's log fits; a thousand runaway commands do not fill a disk.
    pub const OUTPUT_BYTES_MAX: u64 = 64 << 20;

    /// A day's work of an agent.
    pub const ENDED_EXECUTIONS_MAX: usize = 512;
}

/// Limits of commands that start from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentLimits {
    /// Like [`AgentConfig::open_files`].
    #[serde(default)]
    pub open_files: Option<u64>,
    /// Like [`AgentConfig::processes`].
    #[serde(default)]
    pub processes: Option<u64>,
}

fn default_output_bytes_max() -> u64 {
    AgentConfig::OUTPUT_BYTES_MAX
}

fn default_confine() -> bool {
    true
}

fn default_transient_kept_ms() -> u64 {
    TRANSIENT_KEPT_MS
}

fn default_ended_max() -> usize {
    AgentConfig::ENDED_EXECUTIONS_MAX
}

/// Goes with every change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    /// The same one again gets the answer of the first time.
    pub operation: OperationId,
    /// Must be the agent's own.
    pub generation: Generation,
    /// Must not be older than the highest seen.
    pub token: FencingToken,
}

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the fields say what they are, and Provider's documentation what they mean")]
pub enum Request {
    /// Who are you?
    Hello,
    /// Are you well? Answered without touching anything.
    Health,
    /// The supervisor's own connection. With it come, as `SCM_RIGHTS`, the
    /// descriptors that `descriptors` names, in that order. While the agent has
    /// had one and lost it, it ends itself and everything with it (L5).
    ///
    /// `hears` names what the supervisor understands beside [`AgentMessage::Unverifiable`].
    Control {
        descriptors: Vec<Descriptor>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        hears: Vec<String>,
    },
    /// End accepted connections, this one last and the control connection too,
    /// accept no new one for a moment, and live on without supervisor for
    /// `window_ms`, so that the processes can be checkpointed.
    Quiesce {
        fence: Fence,
        window_ms: u64,
    },

    ExecStart {
        fence: Fence,
        id: ExecutionId,
        spec: ExecSpec,
    },
    ExecStatus {
        id: ExecutionId,
    },
    ExecList,
    ExecAttach {
        id: ExecutionId,
        offset: u64,
        follow: bool,
    },
    ExecStdin {
        fence: Fence,
        id: ExecutionId,
        offset: u64,
        close: bool,
    },
    ExecSignal {
        fence: Fence,
        id: ExecutionId,
        signal: i32,
    },
    ExecResize {
        fence: Fence,
        id: ExecutionId,
        size: TtySize,
    },
    ExecCancel {
        fence: Fence,
        id: ExecutionId,
    },

    FileRead {
        path: String,
        offset: u64,
        length: Option<u64>,
    },
    FileWrite {
        fence: Fence,
        path: String,
        mode: Option<u32>,
        user: Option<String>,
    },
    FileStat {
        path: String,
    },
    FileList {
        path: String,
        depth: u32,
    },
    FileMkdir {
        fence: Fence,
        path: String,
    },
    FileMove {
        fence: Fence,
        from: String,
        to: String,
    },
    FileRemove {
        fence: Fence,
        path: String,
    },
    FileWatch {
        path: String,
        recursive: bool,
    },
    ArchiveGet {
        path: String,
    },
    ArchivePut {
        fence: Fence,
        path: String,
        bounds: ArchiveBounds,
    },

    /// Connect to a TCP port on loopback inside.
    Dial {
        port: u16,
    },

    /// Hear what those inside ask for, what was not answered yet first. Whoever listened before does not any more.
    Requests,
    /// The answer to one of them. `NotFound` when nobody waits for it.
    RequestAnswer {
        fence: Fence,
        id: RequestId,
        body: String,
    },
}

impl Request {
    /// What goes with a change; nothing goes with a question.
    pub fn fence(&self) -> Option<&Fence> {
        match self {
            Self::Hello
            | Self::Health
            | Self::Control { .. }
            | Self::ExecStatus { .. }
            | Self::ExecList
            | Self::ExecAttach { .. }
            | Self::FileRead { .. }
            | Self::FileStat { .. }
            | Self::FileList { .. }
            | Self::FileWatch { .. }
            | Self::ArchiveGet { .. }
            | Self::Dial { .. }
            | Self::Requests => None,
            Self::Quiesce { fence, .. }
            | Self::ExecStart { fence, .. }
            | Self::ExecStdin { fence, .. }
            | Self::ExecSignal { fence, .. }
            | Self::ExecResize { fence, .. }
            | Self::ExecCancel { fence, .. }
            | Self::FileWrite { fence, .. }
            | Self::FileMkdir { fence, .. }
            | Self::FileMove { fence, .. }
            | Self::FileRemove { fence, .. }
            | Self::ArchivePut { fence, .. }
            | Self::RequestAnswer { fence, .. } => Some(fence),
        }
    }
}

/// A descriptor that comes with [`Request::Control`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Descriptor {
    /// The sandbox's own v2 cgroup, a directory in which the keeper may make others.
    Cgroup,
    /// A file with an `oom_kill N` line, to tell an OOM kill from another.
    OomEvents,
}

/// The first frame of every answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It was done, or is about to be streamed.
    Ok(Answer),
    /// It was not.
    Error(AgentError),
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "named after the requests they answer")]
pub enum Answer {
    Hello(Hello),
    Health(Health),
    Done,
    Quiesced { connections_closed: u64 },
    Exec(ExecStatus),
    Execs(Vec<ExecStatus>),
    Attached(ExecStatus),
    Stdin { taken_bytes: u64 },
    Stat(FileStat),
    Listing(DirListing),
    Unpacked(Unpacked),
}

/// Who the agent is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Its [`PROTOCOL`].
    pub protocol: u32,
    /// Its version, for display.
    pub version: String,
    /// Names of the requests that it knows, and of further abilities.
    pub features: Vec<String>,
    /// Which instance it serves.
    pub identity: Identity,
}

/// How the agent is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Executions that run.
    pub running: u64,
    /// Executions that are remembered.
    pub known: u64,
    /// Connections that are open.
    pub connections: u64,
    /// How process trees are killed here: `cgroup` or `subreaper`.
    pub killing: String,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct AgentError {
    /// Which kind.
    pub code: ErrorCode,
    /// For the caller.
    pub message: String,
    /// With [`ErrorCode::Fenced`]: the highest token seen. With
    /// [`ErrorCode::StaleGeneration`]: the agent's own generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<u64>,
}

/// Kinds of error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the same words as in viv_provider::ProviderError")]
pub enum ErrorCode {
    Fenced,
    StaleGeneration,
    NotFound,
    Conflict,
    Invalid,
    Exhausted,
    Unsupported,
    Failed,
}

/// Between the chunks of an attached execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "see viv_core::exec::OutputEvent")]
pub enum StreamEvent {
    Cut { from: u64, to: u64 },
    End(ExecStatus),
}

/// What the supervisor says on the control connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlMessage {
    /// A newer token was seen; older ones are refused from now on.
    Token(FencingToken),
    /// Sent just before a thaw: the clocks of executions stood still this long (L13).
    Thawing {
        /// How long.
        frozen_ms: u64,
    },
    /// What was restored from memory serves another instance from now on: the one that it was restored as.
    Become {
        /// Which.
        identity: Identity,
        /// Older tokens are refused from now on.
        token: FencingToken,
    },
}

/// What the agent says on the control connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentMessage {
    /// This could not be shown to have ended: end everything (X3).
    Unverifiable {
        /// What it is.
        what: String,
    },
    /// The first process of an execution was killed for memory. Only to a supervisor that hears it.
    OomKilled {
        /// Whose.
        execution: ExecutionId,
        /// Its pid inside.
        pid: Option<u32>,
    },
}

impl AgentMessage {
    /// What a supervisor that hears of [`AgentMessage::OomKilled`] says.
    pub const OOM_KILLED: &str = "oom_killed";
}

/// What somebody inside asked for, as it is told outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InsideRequest {
    /// The agent's own; it sorts by time.
    pub id: RequestId,
    /// Whether somebody else was told of it before, and may have done it.
    pub again: bool,
    /// What it is: text that means nothing to the agent. Whatever it says, it was written by a workload.
    pub body: String,
}

/// What a workload sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InsideCall {
    /// How long it waits for the answer.
    pub wait_ms: u64,
    /// What it asks for.
    pub body: String,
}

/// What a workload gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InsideReply {
    /// What whoever listens outside said.
    Answer(String),
    /// Why there is no answer.
    None(NoAnswer),
}

/// Why a workload got no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoAnswer {
    /// Nobody listened in all that time, so nothing was done.
    Nobody,
    /// Somebody was told, and did not answer in time: whether it was done is not known.
    Unknown,
    /// It was no [`InsideCall`].
    Invalid,
}
