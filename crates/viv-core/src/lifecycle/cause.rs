//! Why a sandbox is where it is (T10).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cause::EndCause;

/// Who caused something: a key and the address it was used from, or a part of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Actor {
    /// The key's id, or the part's name.
    pub who: String,
    /// From where, for those who came by network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

impl Actor {
    /// A part of the daemon.
    pub fn part(name: &str) -> Self {
        Self { who: name.to_owned(), from: None }
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.who)
    }
}

/// Why the last transition happened: a closed list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum Cause {
    /// Somebody asked for it to run.
    Requested,
    /// An instance was made.
    Made,
    /// Every probe was well.
    Verified,
    /// A probe found something, so it has to show again that it works.
    ProbeFinding,
    /// It was seen alive after it had been lost.
    Reappeared,
    /// Nobody used it.
    Idle,
    /// It was frozen, and the machine's memory got short.
    MemoryShort,
    /// A user froze it.
    UserFreeze,
    /// A user had it saved.
    UserHibernate,
    /// A user stopped it.
    UserStop,
    /// A user gave up what could not be saved.
    UserDiscard,
    /// A user deleted it.
    UserDelete,
    /// A user made it go on from a snapshot.
    Rollback,
    /// A user made it begin anew.
    Reset,
    /// Its hard deadline passed.
    Expired,
    /// It was saved.
    Saved,
    /// It could not be saved.
    SaveFailed,
    /// Its memory could not be saved, so it stays where that is.
    MemoryNotSaved,
    /// What was saved of its memory could not be restored, or did not work.
    MemoryNotRestored,
    /// It was seen to be gone, as intended.
    AbsenceObserved,
    /// It could not be shown that the last generation is gone.
    AbsenceUnproven,
    /// What was to be ended is still there.
    KillFailed,
    /// The kernel killed its first process for memory.
    OomKilled,
    /// The disk ran out, and it had taken most of what was left.
    DiskFull,
    /// Its first process ended or was killed.
    Crashed,
    /// Whoever watched over it died.
    SupervisorLost,
    /// The machine was started anew.
    Rebooted,
    /// The provider does not know it any more.
    ProviderLost,
    /// It was found unhealthy again and again (T7).
    ProbeFailed,
    /// It answers nothing, and nothing else is known.
    Unresponsive,
    /// It could not be made.
    CreateFailed,
    /// It was made ahead, and did not work when somebody claimed it.
    SpareBroken,
    /// It was not well for long, and is ended.
    Unhealthy,
    /// A phase did not end in time.
    DeadlinePassed,
    /// A service ended, and is started again.
    ServiceEnded,
    /// A service ended, or did not become ready, and is given up.
    ServiceFailed,
    /// A hook failed that must not.
    HookFailed,
    /// The daemon was drained.
    Drained,
}

impl Cause {
    /// A stable word for logs, metrics and scripts.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Requested => "requested",
            Self::Made => "made",
            Self::Verified => "verified",
            Self::ProbeFinding => "probe_finding",
            Self::Reappeared => "reappeared",
            Self::Idle => "idle",
            Self::MemoryShort => "memory_short",
            Self::UserFreeze => "user_freeze",
            Self::UserHibernate => "user_hibernate",
            Self::UserStop => "user_stop",
            Self::UserDiscard => "user_discard",
            Self::UserDelete => "user_delete",
            Self::Rollback => "rollback",
            Self::Reset => "reset",
            Self::Expired => "expired",
            Self::Saved => "saved",
            Self::SaveFailed => "save_failed",
            Self::MemoryNotSaved => "memory_not_saved",
            Self::MemoryNotRestored => "memory_not_restored",
            Self::AbsenceObserved => "absence_observed",
            Self::AbsenceUnproven => "absence_unproven",
            Self::KillFailed => "kill_failed",
            Self::OomKilled => "oom_killed",
            Self::DiskFull => "disk_full",
            Self::Crashed => "crashed",
            Self::SupervisorLost => "supervisor_lost",
            Self::Rebooted => "rebooted",
            Self::ProviderLost => "provider_lost",
            Self::ProbeFailed => "probe_failed",
            Self::Unresponsive => "unresponsive",
            Self::CreateFailed => "create_failed",
            Self::SpareBroken => "spare_broken",
            Self::Unhealthy => "unhealthy",
            Self::DeadlinePassed => "deadline_passed",
            Self::ServiceEnded => "service_ended",
            Self::ServiceFailed => "service_failed",
            Self::HookFailed => "hook_failed",
            Self::Drained => "drained",
        }
    }

    /// Why a sandbox is lost whose instance ended so, unasked.
    pub(super) fn of_end(end: &EndCause) -> Self {
        match end {
            EndCause::OomKilled => Self::OomKilled,
            EndCause::DiskFull { .. } => Self::DiskFull,
            EndCause::MemoryLost { .. } => Self::MemoryNotRestored,
            EndCause::Exited { .. }
            | EndCause::Signalled { .. }
            | EndCause::AgentLost
            | EndCause::Unverifiable { .. }
            | EndCause::CreateFailed { .. } => Self::Crashed,
            EndCause::SupervisorLost => Self::SupervisorLost,
            EndCause::Rebooted => Self::Rebooted,
            EndCause::Expired => Self::Expired,
            // Ended by somebody who had the right to, and not by us: by hand, or by who was here before.
            EndCause::Destroyed | EndCause::Saved => Self::ProviderLost,
        }
    }
}

/// A cause with its circumstances.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caused {
    /// Why.
    #[serde(flatten)]
    pub cause: Cause,
    /// Who.
    pub by: Actor,
    /// When.
    pub at_ms: u64,
    /// In words, where there is more to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
