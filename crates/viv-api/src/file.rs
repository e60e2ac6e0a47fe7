//! Files in a sandbox.

use serde::{Deserialize, Serialize};
use viv_core::file as core;

use crate::bound::{FileMode, Path};

/// What stands at a path. Links are not followed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileStat {
    /// What it is.
    pub kind: FileKind,
    /// Size.
    pub size_bytes: u64,
    /// Permission bits in octal.
    pub mode: FileMode,
    /// Owner inside the sandbox.
    pub uid: u32,
    /// Group inside the sandbox.
    pub gid: u32,
    /// Last change of content.
    pub modified_at_ms: u64,
    /// Where a symbolic link points.
    #[serde(default)]
    pub link_target: Option<String>,
}

/// What a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
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

/// One line of a directory's listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileEntry {
    /// Path below the listed directory.
    pub path: String,
    /// Whether the name is not UTF-8 and `path` shows it approximately.
    #[serde(default)]
    pub lossy: bool,
    /// What it is.
    pub stat: FileStat,
}

/// A directory's listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileListing {
    /// The entries, by path.
    pub entries: Vec<FileEntry>,
    /// Whether these are all; false when a limit cut it short.
    pub complete: bool,
}

/// Move a path, replacing what is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"from": "/workspace/a", "to": "/workspace/b"})))]
#[serde(deny_unknown_fields)]
pub struct MoveFile {
    /// What to move.
    pub from: Path,
    /// Where to.
    pub to: Path,
}

/// Make a directory and those above it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"path": "/workspace/src"})))]
#[serde(deny_unknown_fields)]
pub struct MakeDir {
    /// Which.
    pub path: Path,
}

/// What came of unpacking an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Unpacked {
    /// Entries made.
    pub entries: u64,
    /// Bytes written to files.
    pub bytes: u64,
}

/// One change below a watched directory: the data of a server-sent event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileChange {
    /// What happened.
    pub kind: FileChangeKind,
    /// Path below the watched directory; empty for the directory itself.
    pub path: String,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// What happened to a watched path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileChangeKind {
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

impl From<core::FileKind> for FileKind {
    fn from(kind: core::FileKind) -> Self {
        match kind {
            core::FileKind::File => Self::File,
            core::FileKind::Dir => Self::Dir,
            core::FileKind::Symlink => Self::Symlink,
            core::FileKind::Other => Self::Other,
        }
    }
}

impl From<core::FileStat> for FileStat {
    fn from(stat: core::FileStat) -> Self {
        Self {
            kind: stat.kind.into(),
            size_bytes: stat.size_bytes,
            mode: FileMode::from_bits(stat.mode),
            uid: stat.uid,
            gid: stat.gid,
            modified_at_ms: stat.modified_at_ms,
            link_target: stat.link_target,
        }
    }
}

impl From<core::DirListing> for FileListing {
    fn from(listing: core::DirListing) -> Self {
        let entry = |entry: core::DirEntry| FileEntry { path: entry.path, lossy: entry.lossy, stat: entry.stat.into() };
        Self { entries: listing.entries.into_iter().map(entry).collect(), complete: listing.complete }
    }
}

impl From<core::Unpacked> for Unpacked {
    fn from(unpacked: core::Unpacked) -> Self {
        Self { entries: unpacked.entries, bytes: unpacked.bytes }
    }
}

impl From<core::WatchKind> for FileChangeKind {
    fn from(kind: core::WatchKind) -> Self {
        match kind {
            core::WatchKind::Created => Self::Created,
            core::WatchKind::Modified => Self::Modified,
            core::WatchKind::Attributes => Self::Attributes,
            core::WatchKind::Removed => Self::Removed,
            core::WatchKind::MovedFrom => Self::MovedFrom,
            core::WatchKind::MovedTo => Self::MovedTo,
            core::WatchKind::Overflow => Self::Overflow,
        }
    }
}

impl From<core::WatchEvent> for FileChange {
    fn from(event: core::WatchEvent) -> Self {
        Self { kind: event.kind.into(), path: event.path, is_dir: event.is_dir }
    }
}
