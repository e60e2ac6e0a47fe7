//! What a layer says about an entry, apart from its name, content and extended attributes.

use rustix::fs::{FileType, Stat, major, minor};

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Folder,
    File,
    Link,
    /// Character device 0/0: the name is gone from below.
    Whiteout,
    Char,
    Block,
    Fifo,
    Socket,
}

impl Kind {
    /// One letter per kind, as listings and digests write it.
    pub(crate) fn letter(self) -> char {
        match self {
            Self::Folder => 'd',
            Self::File => 'f',
            Self::Link => 'l',
            Self::Whiteout => 'w',
            Self::Char => 'c',
            Self::Block => 'b',
            Self::Fifo => 'p',
            Self::Socket => 's',
        }
    }
}

/// A point in time: seconds since 1970, which may be negative, and nanoseconds after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Time {
    pub(crate) seconds: i64,
    pub(crate) nanos: u32,
}

#[derive(Debug, Clone)]
pub(crate) struct Meta {
    pub(crate) kind: Kind,
    /// The twelve permission bits.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) device: u64,
    pub(crate) mtime: Time,
    /// Device and inode: what tells hard links.
    pub(crate) inode: (u64, u64),
    pub(crate) names: u64,
}

impl Meta {
    #[allow(clippy::useless_conversion, reason = "the widths of these fields differ between architectures")]
    pub(crate) fn new(stat: &Stat) -> Self {
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Kind::Folder,
            FileType::Symlink => Kind::Link,
            FileType::CharacterDevice if stat.st_rdev == 0 => Kind::Whiteout,
            FileType::CharacterDevice => Kind::Char,
            FileType::BlockDevice => Kind::Block,
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::RegularFile | FileType::Unknown => Kind::File,
        };
        Self {
            kind,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            size: stat.st_size as u64,
            disk_bytes: stat.st_blocks as u64 * 512,
            device: stat.st_rdev,
            mtime: Time { seconds: stat.st_mtime, nanos: stat.st_mtime_nsec as u32 },
            inode: (stat.st_dev, stat.st_ino),
            names: u64::from(stat.st_nlink),
        }
    }

    /// Major and minor number of a device.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        (major(self.device), minor(self.device))
    }

    /// Whether it may have a second name. Folders have none, and whiteouts have
    /// nothing that could be shared: the kernel links all of them to one inode to spare inodes.
    pub(crate) fn is_linked(&self) -> bool {
        self.names > 1 && !matches!(self.kind, Kind::Folder | Kind::Whiteout)
    }
}
