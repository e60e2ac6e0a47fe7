//! The one word that people read: computed, never stored.

use serde::{Deserialize, Serialize};

use super::evidence::{Evidence, Finding};
use super::{Phase, Sandbox};

/// Evidence that is older proves nothing any more (T3).
pub const EVIDENCE_MS_MAX: u64 = 30_000;

/// How a sandbox is, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "all but those with a line are those of Phase")]
pub enum Status {
    Provisioning,
    Verifying,
    /// It works, and that was seen lately.
    Ready,
    /// It worked when it was last looked at, which is too long ago to say more.
    Unverified,
    Frozen,
    Hibernating,
    /// It could not be saved: its processes have ended, its files are kept, and it is tried again (L10).
    SaveFailed,
    Hibernated,
    Resuming,
    Lost,
    Failed,
    Stopping,
    Stopped,
}

impl Status {
    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Provisioning => "provisioning",
            Self::Verifying => "verifying",
            Self::Ready => "ready",
            Self::Unverified => "unverified",
            Self::Frozen => "frozen",
            Self::Hibernating => "hibernating",
            Self::SaveFailed => "save_failed",
            Self::Hibernated => "hibernated",
            Self::Resuming => "resuming",
            Self::Lost => "lost",
            Self::Failed => "failed",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        }
    }
}

/// How a sandbox is, from its record and the latest evidence about its current generation.
pub fn status(sandbox: &Sandbox, latest: &Evidence, now_ms: u64) -> Status {
    match &sandbox.phase {
        Phase::Provisioning { .. } => Status::Provisioning,
        Phase::Verifying { .. } => Status::Verifying,
        Phase::Ready => {
            let fresh = latest.age_ms(now_ms).is_some_and(|age_ms| age_ms <= EVIDENCE_MS_MAX);
            let well = latest.finding_for(&sandbox.spec) == Some(Finding::Ok);
            if fresh && well { Status::Ready } else { Status::Unverified }
        }
        Phase::Frozen { .. } => Status::Frozen,
        Phase::Hibernating { save_failed: true, .. } => Status::SaveFailed,
        Phase::Hibernating { save_failed: false, .. } => Status::Hibernating,
        Phase::Hibernated { .. } => Status::Hibernated,
        Phase::Resuming { .. } => Status::Resuming,
        Phase::Lost => Status::Lost,
        Phase::Failed { .. } => Status::Failed,
        Phase::Stopping { .. } => Status::Stopping,
        Phase::Stopped => Status::Stopped,
    }
}
