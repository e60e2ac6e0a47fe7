//! Commands in a sandbox (SPEC part 3).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize};
use viv_core::exec::{ExecSpec, OutputEvent, Stream, TtySize};
use viv_core::{ExecutionId, Generation, SandboxId};

use crate::bound::{
    Argument, Argv, BoundError, CommandEnv, ExecutionMs, OutputBytes, Path, QueueMs, RunningMax, Signal, TerminalSide,
    UserName, number_or_word,
};

/// A command to run. Answered with 201 as soon as it started, or could not: that is a state, not an error.
///
/// With an `Idempotency-Key`, repeating the request starts it once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"argv": ["sh", "-c", "echo hello"], "limit_ms": 60_000})))]
#[serde(deny_unknown_fields)]
pub struct StartExecution {
    /// Program and arguments.
    pub argv: Argv,
    /// Added to the sandbox's own environment. Values are not told back (S6).
    #[serde(default)]
    pub env: CommandEnv,
    /// Where to start; the sandbox's working directory when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Path>,
    /// As whom; root of the sandbox when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserName>,
    /// Whether input will follow. Without it, the command reads end-of-file at once.
    #[serde(default)]
    pub stdin: bool,
    /// Run on a terminal of this size instead of pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<Terminal>,
    /// End it after this long: milliseconds, or `none` for services. Five minutes when absent (X1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<TimeLimit>,
    /// A service: that it runs is not activity (L6).
    #[serde(default)]
    pub detach: bool,
    /// Resume the sandbox if it is frozen or hibernated, instead of `not_running` (L4).
    #[serde(default)]
    pub wake: bool,
    /// Wait up to this long for the sandbox to be ready and for a place in it, instead of `not_running` while it is on
    /// its way there: the answer is `queued`, and durable. What is not started by then is `failed` (X1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<QueueMs>,
    /// Start it only when fewer than this many run in the foreground; without `queue_ms` this is not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_max: Option<RunningMax>,
    /// Keep at most this much of its output: the beginning and the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_bytes_max: Option<OutputBytes>,
}

impl StartExecution {
    /// A command with everything else by default.
    pub fn new(argv: Argv) -> Self {
        Self {
            argv,
            env: CommandEnv::default(),
            cwd: None,
            user: None,
            stdin: false,
            tty: None,
            limit_ms: None,
            detach: false,
            wake: false,
            queue_ms: None,
            running_max: None,
            output_bytes_max: None,
        }
    }

    /// A command of these words, with everything else by default.
    pub fn of<T: Into<String>>(words: impl IntoIterator<Item = T>) -> Result<Self, BoundError> {
        let words = words.into_iter().map(Argument::new).collect::<Result<Vec<_>, _>>()?;
        Argv::new(words).map(Self::new)
    }

    /// As a provider is told it. `default_limit_ms` is what holds when nothing was said.
    pub fn to_spec(&self, default_limit_ms: u64) -> ExecSpec {
        ExecSpec {
            argv: self.argv.to_vec(),
            env: self.env.to_map(),
            cwd: self.cwd.as_ref().map(Path::to_string),
            user: self.user.as_ref().map(UserName::to_string),
            stdin: self.stdin,
            tty: self.tty.map(TtySize::from),
            limit_ms: self.limit_ms.map_or(Some(default_limit_ms), TimeLimit::ms),
            output_bytes_max: self.output_bytes_max.map(OutputBytes::get),
            transient: false,
            detached: self.detach,
        }
    }
}

/// Milliseconds, or the word `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum TimeLimit {
    /// This long.
    Ms(ExecutionMs),
    /// No limit.
    Word(NoTimeLimit),
}

/// The word for no time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum NoTimeLimit {
    /// No limit.
    None,
}

impl<'de> Deserialize<'de> for TimeLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(number_or_word(deserializer, "none")?.map_or(Self::NONE, Self::Ms))
    }
}

impl TimeLimit {
    /// No limit.
    pub const NONE: Self = Self::Word(NoTimeLimit::None);

    /// The milliseconds, if there is a limit.
    pub fn ms(self) -> Option<u64> {
        match self {
            Self::Ms(ms) => Some(ms.get()),
            Self::Word(NoTimeLimit::None) => None,
        }
    }
}

/// Size of a terminal in characters. Also the body of a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"rows": 24, "cols": 80})))]
#[serde(deny_unknown_fields)]
pub struct Terminal {
    /// Lines.
    pub rows: TerminalSide,
    /// Characters in a line.
    pub cols: TerminalSide,
}

impl From<Terminal> for TtySize {
    fn from(terminal: Terminal) -> Self {
        Self { rows: terminal.rows.get() as u16, cols: terminal.cols.get() as u16 }
    }
}

impl From<TtySize> for Terminal {
    fn from(size: TtySize) -> Self {
        Self { rows: TerminalSide::nearest(size.rows.into()), cols: TerminalSide::nearest(size.cols.into()) }
    }
}

/// A signal to the execution's first process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"signal": 15})))]
#[serde(deny_unknown_fields)]
pub struct SendSignal {
    /// The signal's number.
    pub signal: Signal,
}

/// How much input was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct InputTaken {
    /// Bytes of input taken in all: the offset of the next one. It may be less than was given.
    pub stdin_bytes: u64,
}

/// An execution as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Execution {
    /// Its id.
    #[cfg_attr(feature = "openapi", schema(value_type = String, example = "exe_01h2xcejqtf2nbrexx3vqjhp41"))]
    pub id: ExecutionId,
    /// In which sandbox.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub sandbox: SandboxId,
    /// In which of its instances.
    #[cfg_attr(feature = "openapi", schema(value_type = u64))]
    pub generation: Generation,
    /// How it stands.
    pub state: ExecutionState,
    /// Its exit code, once it exited.
    pub exit_code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// Why it failed or was lost, for people.
    pub message: Option<String>,
    /// What ended it, as a word (X6): `exit`, `signal`, `oom_kill`, `not_started`, `cancelled`, `time_limit`; for one that
    /// was lost, why its instance ended (`agent_died`, `hibernated`, `expired`, …).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Where it started, if that was said.
    pub cwd: Option<String>,
    /// As whom, if that was said.
    pub user: Option<String>,
    /// Whether it runs on a terminal.
    pub tty: bool,
    /// Whether it is a service.
    pub detach: bool,
    /// Its time limit, if it has one.
    pub limit_ms: Option<u64>,
    /// Who asked for it; nothing when that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// When it was asked for, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_at_ms: Option<u64>,
    /// While it is queued: when it ends unless it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued_until_ms: Option<u64>,
    /// When this was learnt from who runs it. What is read from a living instance was learnt now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learnt_at_ms: Option<u64>,
    /// When it started.
    pub started_at_ms: Option<u64>,
    /// When it ended.
    pub ended_at_ms: Option<u64>,
    /// Bytes written so far, both streams together.
    pub output_bytes: u64,
    /// Bytes of input taken so far.
    pub stdin_bytes: u64,
    /// Its first process as seen inside, while it runs.
    pub pid: Option<u32>,
}

/// How an execution stands (X1, X6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExecutionState {
    /// It will start soon, or end with an error.
    Queued,
    /// It runs.
    Running,
    /// Its sandbox is frozen or saved with its memory.
    Suspended,
    /// It ended with a code.
    Exited,
    /// A signal ended it that was neither a cancel nor a time limit.
    Signalled,
    /// The kernel ended it for memory.
    OomKilled,
    /// It never started.
    Failed,
    /// It was cancelled, and its whole tree is gone.
    Cancelled,
    /// Its time limit passed, and its whole tree is gone.
    TimedOut,
    /// Its sandbox ended while it ran.
    Lost,
}

impl ExecutionState {
    /// Whether nothing will change any more.
    pub fn is_final(self) -> bool {
        match self {
            Self::Queued | Self::Running | Self::Suspended => false,
            Self::Exited
            | Self::Signalled
            | Self::OomKilled
            | Self::Failed
            | Self::Cancelled
            | Self::TimedOut
            | Self::Lost => true,
        }
    }
}

/// The first line of a start that is followed; its output comes after it, as lines of [`OutputLine`].
///
/// With its id a reader goes on where a connection broke (X2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecutionStarted {
    /// The execution as a start answers it that is not followed.
    pub started: Box<Execution>,
}

/// One line of an execution's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum OutputLine {
    /// Bytes that were written.
    Chunk(OutputChunk),
    /// Bytes that were not kept.
    Cut(OutputCut),
    /// The last line: it ended and all was said, or following was not asked for.
    End(OutputEnd),
    /// Nothing new; said from time to time so that a broken connection is noticed.
    Alive(OutputAlive),
}

/// Bytes that were written: as `text` where they are text, otherwise as `data_base64`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OutputChunk {
    /// Where the first byte stands in the whole output.
    pub offset: u64,
    /// Which stream.
    pub stream: OutputStream,
    /// When it was read from the command.
    pub at_ms: u64,
    /// The bytes, where they are UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The bytes, where they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_base64: Option<String>,
}

/// Bytes that were not kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OutputCut {
    /// Which.
    pub cut: Range,
}

/// A range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Range {
    /// The first byte of it.
    pub from: u64,
    /// The first byte after it.
    pub to: u64,
}

/// The end of an output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OutputEnd {
    /// The execution as it stands now.
    pub end: Box<Execution>,
}

/// A sign of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OutputAlive {
    /// When.
    pub alive_at_ms: u64,
}

/// Which of its two mouths a command spoke with. A terminal has only `stdout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output, or the terminal.
    Stdout,
    /// Standard error.
    Stderr,
}

impl From<Stream> for OutputStream {
    fn from(stream: Stream) -> Self {
        match stream {
            Stream::Stdout => Self::Stdout,
            Stream::Stderr => Self::Stderr,
        }
    }
}

impl OutputChunk {
    /// A chunk of these bytes, as text if they are.
    pub fn new(offset: u64, stream: OutputStream, at_ms: u64, data: Vec<u8>) -> Self {
        let (text, data_base64) = match String::from_utf8(data) {
            Ok(text) => (Some(text), None),
            Err(bytes) => (None, Some(STANDARD.encode(bytes.as_bytes()))),
        };
        Self { offset, stream, at_ms, text, data_base64 }
    }

    /// The bytes; nothing when the chunk is not one that a server of ours would send.
    pub fn data(&self) -> Option<Vec<u8>> {
        match (&self.text, &self.data_base64) {
            (Some(text), None) => Some(text.clone().into_bytes()),
            (None, Some(data)) => STANDARD.decode(data).ok(),
            (Some(_), Some(_)) | (None, None) => None,
        }
    }
}

impl OutputLine {
    /// As a provider told it. `end` makes an execution of the status that a provider knows.
    pub fn from_event(event: OutputEvent, end: impl FnOnce(viv_core::exec::ExecStatus) -> Execution) -> Self {
        match event {
            OutputEvent::Chunk { offset, stream, at_ms, data } => {
                Self::Chunk(OutputChunk::new(offset, stream.into(), at_ms, data))
            }
            OutputEvent::Cut { from, to } => Self::Cut(OutputCut { cut: Range { from, to } }),
            OutputEvent::End(status) => Self::End(OutputEnd { end: Box::new(end(status)) }),
        }
    }
}
