//! What is bounded: numbers with a range, texts with a shape, maps and lists with a length.
//!
//! Each is a type of its own that cannot hold anything else, so whoever has one need not check it again. The bounds
//! are said once, here; the checks and the `OpenAPI` document are both made from them. Every bound is there because
//! something unbounded would let one request take memory, disk or time from all others (S5).

mod map;
mod number;
mod text;

pub(crate) use number::number_or_word;

pub use map::{
    Argv, CommandEnv, Env, EventKinds, LabelFilter, Labels, Ports, Services, TaskEffects, TaskFiles, TaskSteps, Words,
};
pub use number::{
    BackoffMs, CleanupAgeMs, CpuBurstUs, CpuMillis, CpuWeight, DiskBytes, ExecutionMs, ForkCount, GenerationNumber,
    HookMs, IdleMs, IoBps, KeyLifetimeMs, LifetimeMs, ListDepth, LogBytes, MemoryBytes, MomentMs, Offset, OpenFiles,
    OutputBytes, PageLimit, Port, Processes, QueueMs, ReadyMs, ReportedSteps, ReportsMax, Restarts, RunNumber,
    RunningMax, SecretOverlapMs, Sequence, Signal, SnapshotsAgeMs, SnapshotsMax, StepNumber, TailLines, TaskMs,
    TerminalSide, TtlMs, WaitMs,
};
pub use text::{
    ActorName, Argument, CauseCode, CommandEnvValue, ComponentName, CronText, Cursor, EffectName, EnvName, EnvValue,
    EventKind, FileMode, FileText, FromAddress, GitReference, GitUrl, GrantRef, HookSecret, IdempotencyKey, ImageName,
    KeyId, KeyName, LabelKey, LabelValue, LeaseName, Named, Note, Path, ProjectName, SandboxName, SandboxRef,
    ScheduleRef, SearchText, ServiceName, SessionText, SnapshotRef, TaskRef, UserName, WebhookRef, WebhookUrl, Word,
    ZoneName,
};

/// The largest whole number that every reader of JSON takes exactly (2^53 - 1).
pub const NUMBER_MAX: u64 = 9_007_199_254_740_991;

/// A day, for bounds that are days.
const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// Why something is not within its bounds. It names the rule and not the value, which may be long or secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BoundError {
    /// A number is too small or too large.
    #[error("{what} must be a whole number from {min} to {max}")]
    Range {
        /// The kind of number.
        what: &'static str,
        /// The smallest.
        min: u64,
        /// The largest.
        max: u64,
    },
    /// A text has the wrong length.
    #[error("{what} must have {min} to {max} characters, and has {len}")]
    Length {
        /// The kind of text.
        what: &'static str,
        /// The fewest characters.
        min: usize,
        /// The most characters.
        max: usize,
        /// How many there are.
        len: usize,
    },
    /// A text has the wrong shape.
    #[error("{what} must be {rule}")]
    Shape {
        /// The kind of text.
        what: &'static str,
        /// What it must be, in words.
        rule: &'static str,
    },
    /// There are too few or too many of something.
    #[error("there must be {min} to {max} {what}, and there are {len}")]
    Count {
        /// What there are too many of.
        what: &'static str,
        /// The fewest.
        min: usize,
        /// The most.
        max: usize,
        /// How many there are.
        len: usize,
    },
}

#[cfg(test)]
mod tests;
