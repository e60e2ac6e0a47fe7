//! Why an instance ended: a closed list, durable, kept after it is gone (T10, X6).

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why an instance ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum EndCause {
    /// It was destroyed by somebody who had the right to.
    Destroyed,
    /// Its hard deadline passed (L5).
    Expired,
    /// It was ended to be saved (L8).
    Saved,
    /// PID 1 ended by itself with a code.
    Exited {
        /// Its exit code.
        code: i32,
    },
    /// PID 1 was killed by a signal that was not ours.
    Signalled {
        /// The signal's number.
        signal: i32,
    },
    /// The kernel killed PID 1 for memory.
    OomKilled,
    /// The disk that it shares ran out, and it had taken most of what was left.
    DiskFull {
        /// What it had taken, and what was left.
        what: String,
    },
    /// An execution could not be shown to have ended, so everything was (X3).
    Unverifiable {
        /// What could not be shown.
        what: String,
    },
    /// Pages of its restored memory could not be brought any more, so nobody was left to miss them (L13).
    MemoryLost {
        /// Why not.
        what: String,
    },
    /// The agent stopped answering its supervisor and was ended with the rest.
    AgentLost,
    /// The supervisor died, and the instance with it.
    SupervisorLost,
    /// The machine was started anew, so no instance of before can live.
    Rebooted,
    /// It never came up.
    CreateFailed {
        /// The step that failed and why.
        what: String,
    },
}

impl EndCause {
    /// A stable word for logs, metrics and scripts.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Destroyed => "destroyed",
            Self::Expired => "expired",
            Self::Saved => "saved",
            Self::Exited { .. } => "exited",
            Self::Signalled { .. } => "signalled",
            Self::OomKilled => "oom_killed",
            Self::DiskFull { .. } => "disk_full",
            Self::Unverifiable { .. } => "unverifiable",
            Self::MemoryLost { .. } => "memory_lost",
            Self::AgentLost => "agent_lost",
            Self::SupervisorLost => "supervisor_lost",
            Self::Rebooted => "rebooted",
            Self::CreateFailed { .. } => "create_failed",
        }
    }
}

impl fmt::Display for EndCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited { code } => write!(f, "exited with code {code}"),
            Self::Signalled { signal } => write!(f, "killed by signal {signal}"),
            Self::Unverifiable { what } => write!(f, "ended because {what} could not be shown to have ended"),
            Self::DiskFull { what } => write!(f, "ended because the disk ran out: {what}"),
            Self::MemoryLost { what } => write!(f, "ended because its memory was lost: {what}"),
            Self::CreateFailed { what } => write!(f, "could not be created: {what}"),
            Self::Destroyed
            | Self::Expired
            | Self::Saved
            | Self::OomKilled
            | Self::AgentLost
            | Self::SupervisorLost
            | Self::Rebooted => f.write_str(self.code()),
        }
    }
}
