//! What a provider can do, declared rather than guessed.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// One thing that a provider may or may not be able to do.
///
/// Creating, observing, listing, executing with pipes, plain file access and
/// destroying are not here: whoever cannot do those is not a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Capability {
    /// Stop all processes and keep their memory.
    Freeze,
    /// Move the hard deadline.
    Extend,
    /// End an instance at its hard deadline without being asked again.
    HardDeadline,
    /// Save the filesystem with the processes ended.
    SaveStopped,
    /// Save the filesystem of a running instance, which runs on.
    SaveLive,
    /// Save memory along with the filesystem.
    SaveMemory,
    /// Write a snapshot to one file, and read it from one.
    Transfer,
    /// Make an instance from a snapshot.
    Restore,
    /// Make an instance from another one, which runs on.
    Fork,
    /// Run commands on a terminal.
    Tty,
    /// Tell about changes of files.
    FileWatch,
    /// Reach TCP ports inside.
    Ports,
    /// Carry requests of those inside, and the answers to them.
    Requests,
    /// Push the end of an instance instead of being asked.
    EndPushed,
    /// Limit the use of processors, and weigh it.
    LimitCpu,
    /// Let it go beyond that for a moment.
    LimitCpuBurst,
    /// Limit the use of memory.
    LimitMemory,
    /// Limit the number of processes.
    LimitProcesses,
    /// Limit the use of disk.
    LimitDisk,
    /// Reach the internet from inside, and nothing nearer.
    EgressAll,
    /// Limit how fast disks are read.
    LimitIoRead,
    /// Limit how fast disks are written.
    LimitIoWrite,
    /// Limit the number of open files of a process.
    LimitOpenFiles,
    /// Change the limits of what runs.
    LimitsLive,
    /// Change the limit of disk of what runs.
    LimitDiskLive,
    /// Report live figures, and what is on disk.
    Usage,
    /// Prove by a kernel object, not by looking around, that a process tree is gone.
    ProvenKill,
}

/// What a provider declares.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// What it can do.
    pub has: BTreeSet<Capability>,
    /// Why it cannot do the rest, for those where there is something to say.
    pub missing: BTreeMap<Capability, String>,
}

impl Capabilities {
    /// Whether it can do this.
    pub fn can(&self, capability: Capability) -> bool {
        self.has.contains(&capability)
    }

    /// What an instance is without here, and why: what keeps it in bounds, and what ends it for certain. Whoever looks
    /// at an instance is told, since nothing else would show it.
    pub fn lacks(&self) -> BTreeMap<Capability, String> {
        let lacking = Self::BOUNDS.into_iter().filter(|&bound| !self.can(bound));
        let why =
            |bound| self.missing.get(&bound).cloned().unwrap_or_else(|| "this provider does not offer it".to_owned());
        lacking.map(|bound| (bound, why(bound))).collect()
    }

    /// Those whose absence nobody notices until it hurts.
    const BOUNDS: [Capability; 6] = [
        Capability::HardDeadline,
        Capability::LimitCpu,
        Capability::LimitMemory,
        Capability::LimitProcesses,
        Capability::LimitDisk,
        Capability::ProvenKill,
    ];

    /// Declares one more.
    #[must_use]
    pub fn with(mut self, capability: Capability) -> Self {
        self.missing.remove(&capability);
        self.has.insert(capability);
        self
    }

    /// Declares one as missing, with the reason that users will read.
    #[must_use]
    pub fn without(mut self, capability: Capability, why: impl Into<String>) -> Self {
        self.has.remove(&capability);
        self.missing.insert(capability, why.into());
        self
    }
}
