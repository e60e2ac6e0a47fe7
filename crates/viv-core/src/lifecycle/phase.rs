//! Where a sandbox is in its life: one enum, with what is being done in those phases that pass.

use serde::{Deserialize, Serialize};

use crate::id::{OperationId, SnapshotId};

/// What a transient phase is busy with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Under this id the effect is performed; repeated, it does its work once.
    pub operation: OperationId,
    /// Which try it is.
    pub attempt: u32,
    /// When the phase falls to what it falls to.
    pub deadline_at_ms: u64,
    /// Not before this; 0 is now.
    pub retry_at_ms: u64,
    /// Whether a deadline has passed in a phase that cannot be left for it.
    pub overdue: bool,
}

/// How far the making of an instance is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MakeStep {
    /// The last generation is fenced and its absence observed (L15).
    Clear,
    /// This generation is made.
    Make,
}

/// How far the making of an instance from what was saved is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResumeStep {
    /// What can still be saved of the last generation is sealed before it is replaced (T7).
    Seal,
    /// The last generation is fenced and its absence observed (L15).
    Clear,
    /// This generation is made.
    Make,
}

/// How far the verification is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerifyStep {
    /// What was a spare gets the lifetime of whom it was given to (L19).
    Claim,
    /// It gets its processors back.
    Thaw,
    /// Its services are started and waited for (L14).
    Services,
    /// The hook of this moment is performed (L14).
    Hook,
    /// It is probed along the path that users use (T2).
    Probe,
}

/// How far the freezing is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum FreezeStep {
    /// It is being frozen.
    Freeze {
        /// That.
        work: Work,
    },
    /// It was seen frozen.
    Done,
}

/// How far the hibernating is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HibernateStep {
    /// Processes end and the filesystem is sealed.
    Save,
    /// The instance is removed, and its absence observed.
    Clear,
}

/// Where a sandbox is in its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum Phase {
    /// An instance is made from the spec.
    Provisioning {
        /// How far.
        step: MakeStep,
        /// How many before it did not come up for this entry.
        rebuilds: u32,
        /// What is outstanding.
        work: Work,
    },
    /// There is an instance, and it has to show that it works.
    Verifying {
        /// How far.
        step: VerifyStep,
        /// Instances before this one that did not come up for this entry.
        rebuilds: u32,
        /// Bad findings so far that were not mere timeouts.
        findings: u32,
        /// When the first of them was.
        found_at_ms: u64,
        /// Whether it was ready before, in this generation.
        was_ready: bool,
        /// What is outstanding.
        work: Work,
    },
    /// It works.
    Ready,
    /// It keeps its memory and gets no processor.
    Frozen {
        /// How far.
        #[serde(flatten)]
        step: FreezeStep,
    },
    /// It is saved, and its instance removed.
    Hibernating {
        /// How far.
        step: HibernateStep,
        /// Whether a save failed: it is quiesced and kept (L10).
        save_failed: bool,
        /// What is outstanding.
        work: Work,
    },
    /// It is saved, and costs nothing.
    Hibernated {
        /// As what.
        snapshot: SnapshotId,
    },
    /// An instance is made from what was saved.
    Resuming {
        /// How far.
        step: ResumeStep,
        /// From what; while something is sealed, that.
        snapshot: SnapshotId,
        /// How many before it did not come up for this entry.
        rebuilds: u32,
        /// What is outstanding.
        work: Work,
    },
    /// Its instance is gone, or cannot be reached, and nobody asked for that.
    Lost,
    /// Attempts are exhausted. What may be left of the last one is cleared, then there is no work.
    Failed {
        /// What is outstanding.
        work: Option<Work>,
    },
    /// Nothing is to be left.
    Stopping {
        /// What is outstanding.
        work: Work,
    },
    /// Nothing is left: this was seen. Terminal.
    Stopped,
}

/// The names of the phases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "they are those of Phase")]
pub enum PhaseName {
    Provisioning,
    Verifying,
    Ready,
    Frozen,
    Hibernating,
    Hibernated,
    Resuming,
    Lost,
    Failed,
    Stopping,
    Stopped,
}

impl PhaseName {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Provisioning,
        Self::Verifying,
        Self::Ready,
        Self::Frozen,
        Self::Hibernating,
        Self::Hibernated,
        Self::Resuming,
        Self::Lost,
        Self::Failed,
        Self::Stopping,
        Self::Stopped,
    ];

    /// Those in which an instance may live, or its absence was not proven: they count for quotas (L18).
    pub const MAY_LIVE: [Self; 9] = [
        Self::Provisioning,
        Self::Verifying,
        Self::Ready,
        Self::Frozen,
        Self::Hibernating,
        Self::Resuming,
        Self::Lost,
        Self::Failed,
        Self::Stopping,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Provisioning => "provisioning",
            Self::Verifying => "verifying",
            Self::Ready => "ready",
            Self::Frozen => "frozen",
            Self::Hibernating => "hibernating",
            Self::Hibernated => "hibernated",
            Self::Resuming => "resuming",
            Self::Lost => "lost",
            Self::Failed => "failed",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        }
    }

    /// The one with this word.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|name| name.as_str() == word)
    }
}

impl Phase {
    /// Its name.
    pub fn name(&self) -> PhaseName {
        match self {
            Self::Provisioning { .. } => PhaseName::Provisioning,
            Self::Verifying { .. } => PhaseName::Verifying,
            Self::Ready => PhaseName::Ready,
            Self::Frozen { .. } => PhaseName::Frozen,
            Self::Hibernating { .. } => PhaseName::Hibernating,
            Self::Hibernated { .. } => PhaseName::Hibernated,
            Self::Resuming { .. } => PhaseName::Resuming,
            Self::Lost => PhaseName::Lost,
            Self::Failed { .. } => PhaseName::Failed,
            Self::Stopping { .. } => PhaseName::Stopping,
            Self::Stopped => PhaseName::Stopped,
        }
    }

    /// What it is busy with.
    pub fn work(&self) -> Option<&Work> {
        match self {
            Self::Provisioning { work, .. }
            | Self::Verifying { work, .. }
            | Self::Frozen { step: FreezeStep::Freeze { work } }
            | Self::Hibernating { work, .. }
            | Self::Resuming { work, .. }
            | Self::Stopping { work } => Some(work),
            Self::Failed { work } => work.as_ref(),
            Self::Ready
            | Self::Frozen { step: FreezeStep::Done }
            | Self::Hibernated { .. }
            | Self::Lost
            | Self::Stopped => None,
        }
    }

    /// Whether commands run in it that may ask for something: services and hooks do in verification already.
    pub fn is_heard(&self) -> bool {
        match self {
            Self::Verifying { .. } | Self::Ready => true,
            Self::Frozen { .. }
            | Self::Lost
            | Self::Provisioning { .. }
            | Self::Hibernating { .. }
            | Self::Hibernated { .. }
            | Self::Resuming { .. }
            | Self::Failed { .. }
            | Self::Stopping { .. }
            | Self::Stopped => false,
        }
    }

    /// What it is busy with, to be changed.
    pub(in crate::lifecycle) fn work_mut(&mut self) -> Option<&mut Work> {
        match self {
            Self::Provisioning { work, .. }
            | Self::Verifying { work, .. }
            | Self::Frozen { step: FreezeStep::Freeze { work } }
            | Self::Hibernating { work, .. }
            | Self::Resuming { work, .. }
            | Self::Stopping { work } => Some(work),
            Self::Failed { work } => work.as_mut(),
            Self::Ready
            | Self::Frozen { step: FreezeStep::Done }
            | Self::Hibernated { .. }
            | Self::Lost
            | Self::Stopped => None,
        }
    }
}
