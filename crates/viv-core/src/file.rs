//! Files in an instance, as data.

use serde::{Deserialize, Serialize};

/// What stands at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A named pipe, a socket or a device.
    Other,
}

/// What is known about a path without reading it. Links are not followed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStat {
    /// What it is.
    pub kind: FileKind,
    /// Size.
    pub size_bytes: u64,
    /// Permission bits, with set-id and sticky.
    pub mode: u32,
    /// Owner inside the sandbox.
    pub uid: u32,
    /// Group inside the sandbox.
    pub gid: u32,
    /// Last change of content, wall time.
    pub modified_at_ms: u64,
    /// Where a symbolic link points.
    #[serde(default)]
    pub link_target: Option<String>,
}

/// One line of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    /// Path below the listed directory.
    pub path: String,
    /// Whether the name was not UTF-8 and `path` shows it approximately.
    #[serde(default)]
    pub lossy: bool,
    /// What it is.
    pub stat: FileStat,
}

/// A listing. `complete` is false when a limit cut it short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirListing {
    /// The entries, by path.
    pub entries: Vec<DirEntry>,
    /// Whether these are all.
    pub complete: bool,
}

/// What happened to a watched path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WatchKind {
    /// It appeared.
    Created,
    /// Its content changed.
    Modified,
    /// Its owner, mode or times changed.
    Attributes,
    /// It is gone.
    Removed,
    /// It was moved away from this name.
    MovedFrom,
    /// It was moved to this name.
    MovedTo,
    /// Events were lost: look again.
    Overflow,
}

/// One change below a watched directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    /// What happened.
    pub kind: WatchKind,
    /// Path below the watched directory; empty for the directory itself.
    pub path: String,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// Limits on an archive that is unpacked (S4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveBounds {
    /// Most entries.
    pub entries_max: u64,
    /// Most bytes once unpacked.
    pub bytes_max: u64,
    /// Most bytes unpacked for each byte received (sparse entries can swell).
    pub ratio_max: u64,
}

impl Default for ArchiveBounds {
    /// A large source tree fits; a bomb does not.
    fn default() -> Self {
        Self { entries_max: 1_000_000, bytes_max: 16 << 30, ratio_max: 1_000 }
    }
}

/// What came of unpacking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpacked {
    /// Entries made.
    pub entries: u64,
    /// Bytes written to files.
    pub bytes: u64,
}
