//! What can go wrong for who asks the engine: a closed list.

use viv_core::lifecycle::{Caused, Denial, Finding, PhaseName};
use viv_core::spec::Invalid;
use viv_core::task::TaskDenial;
use viv_core::{Generation, SandboxId, ScheduleId, SnapshotId, TaskId, WebhookId};
use viv_provider::ProviderError;
use viv_store::{Lease, StoreError};

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// There is no such sandbox.
    #[error("there is no sandbox {which:?}")]
    NotFound {
        /// What was asked for.
        which: String,
    },
    /// There is no such schedule.
    #[error("there is no schedule {which}")]
    NoSchedule {
        /// What was asked for.
        which: ScheduleId,
    },
    /// There is no such subscription.
    #[error("there is no webhook {which}")]
    NoWebhook {
        /// What was asked for.
        which: WebhookId,
    },
    /// A run of it is under way.
    #[error("a run of {which} is under way")]
    ScheduleBusy {
        /// Which.
        which: ScheduleId,
    },
    /// There is no such task.
    #[error("there is no task {which}")]
    NoTask {
        /// What was asked for.
        which: TaskId,
    },
    /// A task cannot do that now.
    #[error("{task}: {}", denied_task(*.why))]
    TaskDenied {
        /// Which.
        task: TaskId,
        /// Why not.
        why: TaskDenial,
    },
    /// Another task is at work in the sandbox.
    #[error("{by} is at work in {sandbox}")]
    TaskBusy {
        /// Where.
        sandbox: SandboxId,
        /// Who.
        by: TaskId,
    },
    /// The daemon takes no new work (L21).
    #[error("the daemon is being drained and takes no new work")]
    Draining,
    /// It was deleted, or stopped and not persistent: nothing brings it back (L9).
    #[error("{sandbox} is gone: {}", .cause.cause.code())]
    Gone {
        /// Which.
        sandbox: SandboxId,
        /// Why.
        cause: Box<Caused>,
    },
    /// The call names a generation that is not the current one (T5).
    #[error("generation {asked} of {sandbox} is not the current one ({current})")]
    StaleHandle {
        /// Which.
        sandbox: SandboxId,
        /// What was asked for.
        asked: Generation,
        /// What there is.
        current: Generation,
        /// What happened since.
        cause: Box<Caused>,
    },
    /// It is not in a state in which this can be done.
    #[error("{sandbox} is not running: it is {}", .phase.as_str())]
    NotRunning {
        /// Which.
        sandbox: SandboxId,
        /// What it is instead.
        phase: PhaseName,
        /// Why.
        cause: Box<Caused>,
    },
    /// It said that it runs, and was looked at before its use: it does not answer (T4).
    #[error("{sandbox} does not answer: {what}")]
    Unfit {
        /// Which.
        sandbox: SandboxId,
        /// What was found.
        finding: Finding,
        /// In words.
        what: String,
    },
    /// A user stopped it, and only an explicit entry runs it again (L9).
    #[error("{sandbox} was stopped by a user")]
    Held {
        /// Which.
        sandbox: SandboxId,
    },
    /// The last generation could not be shown to be gone, so no new one is made (L15).
    #[error("it could not be shown that the last instance of {sandbox} is gone")]
    AbsenceUnproven {
        /// Which.
        sandbox: SandboxId,
        /// What stood in the way.
        what: String,
    },
    /// Attempts are exhausted (T10).
    #[error("{sandbox} could not be brought up: {what}")]
    NotReady {
        /// Which.
        sandbox: SandboxId,
        /// Where it ended.
        phase: PhaseName,
        /// In words.
        what: String,
    },
    /// The name belongs to another sandbox.
    #[error("the name {name:?} is taken by {by}")]
    NameTaken {
        /// Which.
        name: String,
        /// Who has it.
        by: SandboxId,
    },
    /// The idempotency key was used with another body (L1).
    #[error("the idempotency key was used before with another request, which made {made}")]
    IdempotencyMismatch {
        /// What that made.
        made: String,
    },
    /// A quota is exhausted (L18).
    #[error("{limit}: {used} of {max} are in use")]
    Quota {
        /// Which limit.
        limit: &'static str,
        /// How many there are.
        used: u64,
        /// How many there may be.
        max: u64,
    },
    /// There is no such snapshot, or it is not there yet or any more.
    #[error("there is no snapshot {which}")]
    NoSnapshot {
        /// What was asked for.
        which: SnapshotId,
    },
    /// A snapshot cannot be removed: others begin with it (L11).
    #[error("{snapshot} is in use")]
    SnapshotInUse {
        /// Which.
        snapshot: SnapshotId,
        /// By some of those who use it.
        by: Vec<SandboxId>,
    },
    /// A snapshot is not what was saved, so nothing begins with it (L10).
    #[error("{snapshot} is damaged")]
    SnapshotDamaged {
        /// Which.
        snapshot: SnapshotId,
    },
    /// A snapshot could not be made.
    #[error("{sandbox} could not be saved: {what}")]
    NotSaved {
        /// Of which sandbox.
        sandbox: SandboxId,
        /// Why.
        what: String,
    },
    /// Somebody else holds the lifecycle lock, or that of starting (L15).
    #[error("the {} lock of {} is held by {}", .0.kind.as_str(), .0.sandbox, .0.holder)]
    Locked(Box<Lease>),
    /// What it is, or how it stands, does not allow it.
    #[error("{sandbox} {what}")]
    Refused {
        /// Which.
        sandbox: SandboxId,
        /// Why not.
        what: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// The request makes no sense.
    #[error("{what}")]
    Invalid {
        /// What is wrong with it.
        what: String,
        /// What to do instead.
        hint: String,
    },
    /// The provider refused, failed or did not answer.
    #[error("the provider: {0}")]
    Provider(#[source] ProviderError),
    /// The provider failed so often that it is left alone for a moment (J7).
    #[error("{provider} failed {failures} times in a row and is tried again in {retry_ms} ms")]
    BreakerOpen {
        /// Who.
        provider: String,
        /// How often.
        failures: u32,
        /// When it is tried again.
        retry_ms: u64,
    },
    /// The store refused or failed.
    #[error("the store: {0}")]
    Store(#[source] StoreError),
    /// The daemon is ending.
    #[error("the daemon is shutting down")]
    ShuttingDown,
}

impl From<Invalid> for EngineError {
    fn from(Invalid { what, hint }: Invalid) -> Self {
        Self::Invalid { what, hint }
    }
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Quota { limit, used, max } => Self::Quota { limit, used, max },
            StoreError::Leased(lease) => Self::Locked(lease),
            StoreError::BadCursor => Self::Invalid {
                what: error.to_string(),
                hint: "a cursor is what the page before gave, unchanged".to_owned(),
            },
            StoreError::SnapshotInUse { snapshot, by } => Self::SnapshotInUse { snapshot, by },
            StoreError::Over { sandbox } => Self::NotFound { which: sandbox.to_string() },
            StoreError::SnapshotMissing { snapshot } => Self::NoSnapshot { which: snapshot },
            StoreError::TaskBusy { sandbox, by } => Self::TaskBusy { sandbox, by },
            StoreError::Conflict { .. }
            | StoreError::TaskConflict { .. }
            | StoreError::SnapshotConflict { .. }
            | StoreError::SubscriptionConflict { .. }
            | StoreError::NameTaken { .. }
            | StoreError::Repeated(_)
            | StoreError::Owned(_)
            | StoreError::Superseded
            | StoreError::Unavailable { .. }
            | StoreError::Corrupt { .. } => Self::Store(error),
        }
    }
}

/// What a denial means for who asked.
pub(crate) fn denied(sandbox: &viv_core::lifecycle::Sandbox, denial: Denial) -> EngineError {
    match denial {
        Denial::Gone => EngineError::Gone { sandbox: sandbox.id.clone(), cause: Box::new(sandbox.cause.clone()) },
        Denial::Held => EngineError::Held { sandbox: sandbox.id.clone() },
        Denial::NotNow => EngineError::NotRunning {
            sandbox: sandbox.id.clone(),
            phase: sandbox.phase.name(),
            cause: Box::new(sandbox.cause.clone()),
        },
        Denial::Ephemeral => EngineError::Refused {
            sandbox: sandbox.id.clone(),
            what: "is not persistent, so there is nothing to save it in",
            hint: "viv stop ends it, viv freeze keeps it as it is; make it with a name, or --persistent, to have it saved",
        },
        Denial::NoFailedSave => EngineError::Refused {
            sandbox: sandbox.id.clone(),
            what: "has no save that failed",
            hint: "viv show says how it stands; viv stop saves and stops it",
        },
    }
}

/// In words.
fn denied_task(why: TaskDenial) -> &'static str {
    match why {
        TaskDenial::Over => "it is over",
        TaskDenial::NotOver => "it is not over yet",
        TaskDenial::Ending => "it is to end, and nothing begins any more",
        TaskDenial::NotRunning => "no step of it runs",
        TaskDenial::Undeclared => "this effect is not among those that it declared",
        TaskDenial::DoneBefore => "this effect was done, and is not repeatable",
        TaskDenial::Unknown => "whether this effect was done is not known, so it is not repeated",
        TaskDenial::Busy => "another effect is in flight",
        TaskDenial::TooMany => "there were as many as there may be",
        TaskDenial::NoGrant => "there is no such grant",
        TaskDenial::NotKept => "its sandbox was not kept, so there is nothing to go on with",
        TaskDenial::NotEnded => "it ended by itself, so there is nothing to be mistaken about",
    }
}
