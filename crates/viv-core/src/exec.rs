//! One command in an instance: what to run, how it stands, what it wrote (SPEC part 3).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::ExecutionId;

/// What to run, and how.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecSpec {
    /// Program and arguments. The program is looked up in the `PATH` of `env` when it holds no slash.
    pub argv: Vec<String>,
    /// Added to the instance's own environment.
    pub env: BTreeMap<String, String>,
    /// Where to start; the instance's working directory when absent.
    pub cwd: Option<String>,
    /// `name`, `uid`, `name:group` or `uid:gid`; root of the sandbox when absent.
    pub user: Option<String>,
    /// Whether input will follow. Without it, the command reads end-of-file at once.
    pub stdin: bool,
    /// Run on a terminal of this size instead of pipes.
    pub tty: Option<TtySize>,
    /// End it after this long (X1). `None` is for services.
    pub limit_ms: Option<u64>,
    /// Keep at most this much of its output; the agent's default when absent.
    pub output_bytes_max: Option<u64>,
    /// Leave nothing: it is in no listing, and once it has ended, its status and output are forgotten when they were
    /// read to their end, or [`TRANSIENT_KEPT_MS`] later. It runs like any other. For probes, which change nothing (T2).
    pub transient: bool,
    /// A service: that it runs is not activity (L6).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub detached: bool,
}

/// How long a transient execution that nobody read to its end is remembered after it.
pub const TRANSIENT_KEPT_MS: u64 = 30_000;

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TtySize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub cols: u16,
}

/// Which of its two mouths a command spoke with. A terminal has only one, `Stdout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Standard output, or the terminal.
    Stdout,
    /// Standard error.
    Stderr,
}

/// How an execution stands. All but `Running` and `Suspended` are final.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum ExecState {
    /// The command's first process lives.
    Running,
    /// It is saved with its memory, and goes on when that is restored (X5).
    Suspended,
    /// It ended with a code.
    Exited {
        /// The code.
        code: i32,
    },
    /// A signal ended it that was neither a cancel nor a time limit.
    Signalled {
        /// The signal's number.
        signal: i32,
    },
    /// The kernel ended it for memory.
    OomKilled,
    /// It never started: no such program, no such directory, no such user.
    Failed {
        /// What went wrong, for the caller.
        what: String,
    },
    /// It was cancelled, and its whole tree is gone.
    Cancelled,
    /// Its time limit passed, and its whole tree is gone.
    TimedOut,
    /// The instance ended while it ran.
    Lost {
        /// Why the instance ended.
        cause: String,
    },
}

impl ExecState {
    /// Whether nothing will change any more.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Running | Self::Suspended)
    }
}

/// An execution as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStatus {
    /// Which one.
    pub id: ExecutionId,
    /// How it stands.
    #[serde(flatten)]
    pub state: ExecState,
    /// Wall time of its start, for display.
    pub started_at_ms: u64,
    /// Wall time of its end, for display.
    #[serde(default)]
    pub ended_at_ms: Option<u64>,
    /// Bytes written so far, both streams together: the offset at which the next byte will stand.
    pub output_bytes: u64,
    /// Bytes of input taken so far.
    #[serde(default)]
    pub stdin_bytes: u64,
    /// Pid of its first process as seen inside the sandbox, while it runs.
    #[serde(default)]
    pub pid: Option<u32>,
    /// What it was told to run, as [`ExecSpec::told_argv`] has it; nothing from who does not keep it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub argv: Vec<String>,
    /// Whether it is a service.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detached: bool,
}

/// Most that is kept of a command with its status, as JSON: thousands of them fit into one answer.
const TOLD_ARGV_BYTES_MAX: usize = 512;

impl ExecSpec {
    /// The command as it is kept with its status, for people to know it again: its beginning, if it is long.
    pub fn told_argv(&self) -> Vec<String> {
        let mut room = TOLD_ARGV_BYTES_MAX;
        let mut told = Vec::new();
        for word in &self.argv {
            // Quotes and a comma.
            let Some(left) = room.checked_sub(3) else { return told };
            room = left;
            let mut kept = String::new();
            for letter in word.chars() {
                let bytes = match letter {
                    '"' | '\\' => 2,
                    letter if letter.is_control() => 6,
                    letter => letter.len_utf8(),
                };
                let Some(left) = room.checked_sub(bytes) else {
                    told.push(kept);
                    return told;
                };
                room = left;
                kept.push(letter);
            }
            told.push(kept);
        }
        told
    }
}

/// What an attached reader is told, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputEvent {
    /// Bytes that were written.
    Chunk {
        /// Where the first byte stands in the execution's whole output.
        offset: u64,
        /// Who wrote it.
        stream: Stream,
        /// When it was read from the command, wall time.
        at_ms: u64,
        /// The bytes.
        data: Vec<u8>,
    },
    /// The bytes from `from` up to `to` were not kept.
    Cut {
        /// First byte that is missing.
        from: u64,
        /// First byte that is there again.
        to: u64,
    },
    /// The last thing a reader hears: the execution ended and all was said, or following was not asked for.
    End(ExecStatus),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x2_a_command_is_told_by_its_beginning() {
        let spec = |argv: &[&str]| ExecSpec {
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            ..ExecSpec::default()
        };
        assert_eq!(spec(&["sh", "-c", "echo ü"]).told_argv(), ["sh", "-c", "echo ü"]);
        for long in ["x".repeat(9_000), "\u{1}\"\\ü".repeat(9_000)] {
            let told = spec(&["sh", "-c", &long, "more"]).told_argv();
            assert_eq!((told[0].as_str(), told.len()), ("sh", 3));
            assert!(long.starts_with(&told[2]) && !told[2].is_empty());
            let bytes = serde_json::to_string(&told).unwrap().len();
            assert!(bytes <= TOLD_ARGV_BYTES_MAX + 2, "{bytes}");
            assert!(bytes > TOLD_ARGV_BYTES_MAX - 6, "another letter would have had room in {bytes}");
        }
        assert!(spec(&vec![""; 9_000]).told_argv().len() < TOLD_ARGV_BYTES_MAX);
    }
}
