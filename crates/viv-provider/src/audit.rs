//! What is left at a provider and belongs to nobody (J1).

use serde::{Deserialize, Serialize};
use viv_core::SandboxId;

/// What kind of thing was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// A folder of a sandbox that was never finished.
    HalfMade,
    /// A supervisor whose instance is not there, or whose agent is not.
    Supervisor,
    /// Processes of an instance that nobody supervises.
    Unsupervised,
    /// A mount in a folder of ours.
    Mount,
    /// A cgroup of a sandbox that has no instance.
    Cgroup,
    /// A layer that nothing refers to, or that was never finished.
    Layer,
    /// A socket that nobody listens on.
    Socket,
    /// A range of ids that is lent to a sandbox without an instance.
    Lease,
    /// What is remembered of a sandbox that has no instance. Whether anybody else remembers it is not known here.
    Fence,
}

impl FindingKind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::HalfMade,
        Self::Supervisor,
        Self::Unsupervised,
        Self::Mount,
        Self::Cgroup,
        Self::Layer,
        Self::Socket,
        Self::Lease,
        Self::Fence,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HalfMade => "half_made",
            Self::Supervisor => "supervisor",
            Self::Unsupervised => "unsupervised",
            Self::Mount => "mount",
            Self::Cgroup => "cgroup",
            Self::Layer => "layer",
            Self::Socket => "socket",
            Self::Lease => "lease",
            Self::Fence => "fence",
        }
    }
}

impl std::fmt::Display for FindingKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Something that was left.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    /// What kind of thing.
    pub kind: FindingKind,
    /// Which: a path, or a process.
    pub what: String,
    /// The sandbox that it was of, if that is known.
    pub sandbox: Option<SandboxId>,
    /// What shows that it belongs to nobody.
    pub why: String,
    /// When it was last changed, where that is known.
    pub changed_at_ms: Option<u64>,
}

/// What came of clearing something away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Swept {
    /// What it was.
    pub finding: Finding,
    /// Whether it is gone, or why not.
    pub outcome: SweptAs,
}

/// How it went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SweptAs {
    /// It is gone.
    Gone,
    /// It was looked at once more, and is left: somebody uses it, or it went by itself.
    NotLeftOver,
    /// It could not be cleared away.
    Failed(String),
}
