//! What a sandbox may use: asked for, changed, and shown.

use serde::{Deserialize, Deserializer, Serialize};

use crate::bound::{
    BoundError, CpuBurstUs, CpuMillis, CpuWeight, DiskBytes, IoBps, MemoryBytes, OpenFiles, Processes, number_or_word,
};

/// A number, or the word `unlimited`: no limit, said aloud.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum Limit<T> {
    /// This much.
    Number(T),
    /// No limit.
    Word(Unlimited),
}

/// The word for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Unlimited {
    /// None.
    Unlimited,
}

impl<'de, T: TryFrom<u64, Error = BoundError>> Deserialize<'de> for Limit<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(number_or_word(deserializer, "unlimited")?.map_or(Self::UNLIMITED, Self::Number))
    }
}

impl<T> Limit<T> {
    /// No limit.
    pub const UNLIMITED: Self = Self::Word(Unlimited::Unlimited);

    /// The number, if there is a limit.
    pub fn number(self) -> Option<T> {
        match self {
            Self::Number(number) => Some(number),
            Self::Word(Unlimited::Unlimited) => None,
        }
    }
}

/// Limits that are asked for. What is not said has the provider's default when a sandbox is made, and stays as it is
/// when limits are changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"cpu_millis": 500, "memory_bytes": 536_870_912})))]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Thousandths of one processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_millis: Option<Limit<CpuMillis>>,
    /// Share of the processors when there are not enough for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_weight: Option<Limit<CpuWeight>>,
    /// Processor time beyond the limit that may be used at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_burst_us: Option<Limit<CpuBurstUs>>,
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<Limit<MemoryBytes>>,
    /// Processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<Limit<Processes>>,
    /// Disk beyond the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<Limit<DiskBytes>>,
    /// Bytes per second read from disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_read_bps: Option<Limit<IoBps>>,
    /// Bytes per second written to disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_write_bps: Option<Limit<IoBps>>,
    /// Descriptors of one process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_files: Option<Limit<OpenFiles>>,
}

/// Limits in force. What has none is `null`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct LimitsInForce {
    /// Thousandths of one processor.
    pub cpu_millis: Option<u64>,
    /// Share of the processors when there are not enough for all.
    pub cpu_weight: Option<u64>,
    /// Processor time beyond the limit that may be used at once.
    pub cpu_burst_us: Option<u64>,
    /// Memory.
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    pub processes: Option<u64>,
    /// Disk beyond the image.
    pub disk_bytes: Option<u64>,
    /// Bytes per second read from disk.
    pub io_read_bps: Option<u64>,
    /// Bytes per second written to disk.
    pub io_write_bps: Option<u64>,
    /// Descriptors of one process.
    pub open_files: Option<u64>,
}
