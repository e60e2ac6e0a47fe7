//! Whole numbers with a range.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, de};
use viv_core::Generation;
use viv_core::hook::HOOK_MS_MAX;
use viv_core::service::{READY_WITHIN_MS_MAX, RESTART_BACKOFF_MS_MAX, RESTARTS_MAX};
use viv_core::spec::LIFETIME_MS_MAX;

use super::{BoundError, DAY_MS, NUMBER_MAX};

/// Reads a whole number, also one that is written `5.0`: to JSON and its schemas that is the same number.
struct Whole {
    min: u64,
    max: u64,
}

impl de::Visitor<'_> for Whole {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number from {} to {}", self.min, self.max)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
        Ok(number)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<u64, E> {
        u64::try_from(number).map_err(|_| E::invalid_value(de::Unexpected::Signed(number), &self))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<u64, E> {
        whole(number).ok_or_else(|| E::invalid_value(de::Unexpected::Float(number), &self))
    }
}

/// Reads a number, or a word that stands for none.
pub(crate) fn number_or_word<'de, D, T>(deserializer: D, word: &'static str) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<u64, Error = BoundError>,
{
    deserializer.deserialize_any(NumberOrWord(word))?.map(T::try_from).transpose().map_err(de::Error::custom)
}

struct NumberOrWord(&'static str);

impl de::Visitor<'_> for NumberOrWord {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number or the word {}", self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Option<u64>, E> {
        if text == self.0 { Ok(None) } else { Err(E::invalid_value(de::Unexpected::Str(text), &self)) }
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Option<u64>, E> {
        Ok(Some(number))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Option<u64>, E> {
        whole(number).map(Some).ok_or_else(|| E::invalid_value(de::Unexpected::Float(number), &self))
    }
}

/// Above 2^53 there are no parts to tell a whole number by.
fn whole(number: f64) -> Option<u64> {
    /// [`NUMBER_MAX`], exactly.
    const MAX: f64 = 9_007_199_254_740_991.0;
    (number.fract() == 0.0 && (0.0..=MAX).contains(&number)).then_some(number as u64)
}

macro_rules! number {
    ($(#[doc = $doc:literal])+ $name:ident, $what:literal, $min:expr, $max:expr) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(into = "u64")]
        pub struct $name(u64);

        impl $name {
            /// The smallest.
            pub const MIN: u64 = $min;
            /// The largest.
            pub const MAX: u64 = $max;

            /// Takes a number that is in range.
            pub const fn new(value: u64) -> Result<Self, BoundError> {
                let nearest = Self::nearest(value);
                if nearest.0 != value {
                    return Err(BoundError::Range { what: $what, min: Self::MIN, max: Self::MAX });
                }
                Ok(nearest)
            }

            /// The nearest number that is in range.
            pub const fn nearest(value: u64) -> Self {
                if value > Self::MAX {
                    Self(Self::MAX)
                } else if value > Self::MIN {
                    Self(value)
                } else {
                    Self(Self::MIN)
                }
            }

            /// The number.
            pub const fn get(self) -> u64 {
                self.0
            }
        }

        impl TryFrom<u64> for $name {
            type Error = BoundError;

            fn try_from(value: u64) -> Result<Self, BoundError> {
                Self::new(value)
            }
        }

        impl From<$name> for u64 {
            fn from(number: $name) -> u64 {
                number.0
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let number = deserializer.deserialize_u64(Whole { min: Self::MIN, max: Self::MAX })?;
                Self::new(number).map_err(de::Error::custom)
            }
        }

        impl FromStr for $name {
            type Err = BoundError;

            fn from_str(text: &str) -> Result<Self, BoundError> {
                let wrong = BoundError::Range { what: $what, min: Self::MIN, max: Self::MAX };
                text.parse().map_err(|_| wrong).and_then(Self::new)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                crate::openapi::number(concat!($($doc),+), Self::MIN, Self::MAX)
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::ToSchema for $name {}
    };
}

number!(
    /// How long to wait for a change to be done; 0 answers at once with 202. A connection that waits longer than this
    /// is better off asking again.
    WaitMs, "a time to wait in milliseconds", 0, 600_000
);
number!(
    /// How long a sandbox may live before its hard deadline: at most 30 days, and it can be extended.
    LifetimeMs, "a lifetime in milliseconds", 1_000, LIFETIME_MS_MAX
);
number!(
    /// How long a sandbox may go unused.
    IdleMs, "an idle time in milliseconds", 1_000, 30 * DAY_MS
);
number!(
    /// How long a keep-awake lease holds; it is taken again for longer (L7).
    TtlMs, "a time to live in milliseconds", 1_000, 3_600_000
);
number!(
    /// How long a command may wait to be started.
    QueueMs, "a time to wait in the queue in milliseconds", 1, DAY_MS
);
number!(
    /// How many commands may run in the foreground for another one to be started.
    RunningMax, "a number of commands", 1, 1_024
);
number!(
    /// How many lines of the end of an output.
    TailLines, "a number of lines", 1, 10_000
);
number!(
    /// How long a command may run.
    ExecutionMs, "a time limit in milliseconds", 1, 30 * DAY_MS
);
number!(
    /// How long a task may take, or be silent; 0 is for ever.
    TaskMs, "a task's limit in milliseconds", 0, 30 * DAY_MS
);
number!(
    /// How many steps an agent may report; 0 is without end.
    ReportsMax, "a number of steps", 0, 1_000_000_000
);
number!(
    /// How many steps an agent reports at once.
    ReportedSteps, "a number of steps", 0, 1_000_000
);
number!(
    /// Which run of a task.
    RunNumber, "a run", 1, viv_core::task::RUNS_MAX as u64
);
number!(
    /// Which step of a task: the first one is 0.
    StepNumber, "a step", 0, viv_core::task::STEPS_MAX as u64 - 1
);
number!(
    /// A moment, in milliseconds since 1970.
    MomentMs, "a moment in milliseconds", 0, NUMBER_MAX
);
number!(
    /// How long a key is good for.
    KeyLifetimeMs, "a key's lifetime in milliseconds", 60_000, 3_650 * DAY_MS
);
number!(
    /// How long two secrets of a webhook are good beside each other, in milliseconds.
    SecretOverlapMs, "an overlap in milliseconds", 0, 30 * DAY_MS
);
number!(
    /// How many sandboxes a fork makes.
    ForkCount, "a number of forks", 1, viv_core::snapshot::FORKS_MAX as u64
);
number!(
    /// How many snapshots that were asked for are kept of a sandbox.
    SnapshotsMax, "a number of snapshots", 1, viv_core::snapshot::SNAPSHOTS_MAX as u64
);
number!(
    /// How long snapshots that were asked for are kept.
    SnapshotsAgeMs, "an age in milliseconds", 1_000, 3_650 * DAY_MS
);
number!(
    /// How old a sandbox may be in one cleanup.
    CleanupAgeMs, "an age in milliseconds", 1, 3_650 * DAY_MS
);
number!(
    /// How many items a page has at most.
    PageLimit, "a page's limit", 1, 1_000
);
number!(
    /// How deep to list: 1 is the directory itself.
    ListDepth, "a depth", 1, 64
);
number!(
    /// A position in a stream of bytes.
    Offset, "an offset", 0, NUMBER_MAX
);
number!(
    /// A position in the journal; 0 is before its beginning.
    Sequence, "a position in the journal", 0, NUMBER_MAX
);
number!(
    /// Counts the instances of one sandbox; it only grows (T5).
    GenerationNumber, "a generation", 1, NUMBER_MAX
);
number!(
    /// How much of an output is kept.
    OutputBytes, "an amount of output in bytes", 1_024, 1 << 30
);
number!(
    /// How much of a log's end to give.
    LogBytes, "an amount of log in bytes", 1, 1 << 20
);
number!(
    /// A TCP port.
    Port, "a port", 1, 65_535
);
number!(
    /// Rows or columns of a terminal.
    TerminalSide, "a terminal's side in characters", 1, 10_000
);
number!(
    /// A signal's number on Linux.
    Signal, "a signal's number", 1, 64
);
number!(
    /// How long a service may take to become ready, to report in, or to be seen running.
    ReadyMs, "a time to become ready in milliseconds", 1, READY_WITHIN_MS_MAX
);
number!(
    /// How often a service is started again in a row.
    Restarts, "a number of restarts", 0, RESTARTS_MAX as u64
);
number!(
    /// The first wait before a service is started again.
    BackoffMs, "a wait in milliseconds", 0, RESTART_BACKOFF_MS_MAX
);
number!(
    /// How long a hook may take.
    HookMs, "a hook's deadline in milliseconds", 1, HOOK_MS_MAX
);
number!(
    /// Thousandths of one processor.
    CpuMillis, "a processor limit in thousandths", 10, 1_000_000
);
number!(
    /// Share of the processors when there are not enough for all, against 100 of who says nothing.
    CpuWeight, "a processor weight", 1, 10_000
);
number!(
    /// Processor time beyond the limit that may be used at once, if it was left unused before.
    CpuBurstUs, "a burst in microseconds", 1, 100_000_000
);
number!(
    /// Memory, files in memory included.
    MemoryBytes, "a memory limit in bytes", 16 << 20, NUMBER_MAX
);
number!(
    /// Processes and threads.
    Processes, "a limit of processes", 8, NUMBER_MAX
);
number!(
    /// Disk beyond the image.
    DiskBytes, "a disk limit in bytes", 1, NUMBER_MAX
);
number!(
    /// Bytes per second.
    IoBps, "a limit of bytes per second", 1 << 20, NUMBER_MAX
);
number!(
    /// Descriptors of one process.
    OpenFiles, "a limit of open files", 16, NUMBER_MAX
);

impl From<GenerationNumber> for Generation {
    fn from(number: GenerationNumber) -> Self {
        Self(number.get())
    }
}
