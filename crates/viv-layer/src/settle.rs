//! Making entries, and giving them owner, attributes, permissions and time.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, chmod, chownat, fchmod, fchown,
    futimens, mknodat, openat, utimensat,
};
use rustix::io::Errno;

use crate::meta::{Kind, Time};
use crate::xattr::{Holder, Marks};

/// Owner, permissions and time of an entry to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Time,
}

impl Look {
    fn owner(&self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
    }

    /// A user namespace has only so many ids.
    fn not_owned(&self, errno: Errno) -> io::Error {
        if errno == Errno::INVAL && Marks::of_this_process() == Marks::User {
            let Self { uid, gid, .. } = self;
            let why = format!("it belongs to user {uid} and group {gid}, and you were not given that many ids");
            return io::Error::new(io::ErrorKind::InvalidInput, why);
        }
        errno.into()
    }
}

/// Gives an entry its attributes in the one order that keeps them all: a change
/// of owner clears set-id bits and capabilities, an access list may clear the
/// set-group bit, and the time is last because everything before counts as a change.
pub(crate) fn settle(
    holder: Holder<'_>,
    look: &Look,
    attributes: impl FnOnce(Holder<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let (uid, gid) = look.owner();
    let mode = Mode::from_raw_mode(look.mode);
    match holder {
        Holder::Open(file) => {
            fchown(file, uid, gid).map_err(|errno| look.not_owned(errno))?;
            attributes(holder)?;
            fchmod(file, mode)?;
            futimens(file, &times(look.mtime))?;
        }
        Holder::Named(folder, name) => {
            chownat(folder, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| look.not_owned(errno))?;
            attributes(holder)?;
            // A link has no permissions. Of the rest, the path of an `O_PATH` descriptor can only mean the entry itself.
            if look.kind != Kind::Link {
                let entry = openat(folder, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
                chmod(format!("/proc/self/fd/{}", entry.as_raw_fd()), mode)?;
            }
            utimensat(folder, name, &times(look.mtime), AtFlags::SYMLINK_NOFOLLOW)?;
        }
    }
    Ok(())
}

fn times(mtime: Time) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanos.into() },
    }
}

/// Sets the time of a folder, after all that is in it was made.
pub(crate) fn set_time(folder: impl AsFd, mtime: Time) -> io::Result<()> {
    Ok(futimens(folder, &times(mtime))?)
}

/// Makes a device, pipe or socket that nobody has opened yet.
pub(crate) fn make_node(folder: BorrowedFd<'_>, name: &CStr, kind: Kind, device: u64) -> io::Result<()> {
    let file_type = match kind {
        Kind::Char => FileType::CharacterDevice,
        Kind::Block => FileType::BlockDevice,
        Kind::Fifo => FileType::Fifo,
        Kind::Socket => FileType::Socket,
        Kind::Folder | Kind::File | Kind::Link | Kind::Whiteout => unreachable!("{kind:?} is no node"),
    };
    Ok(mknodat(folder, name, file_type, Mode::empty(), device)?)
}

/// Makes a whiteout, as the kernel does: without permissions, and without anything else.
pub(crate) fn make_whiteout(folder: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    Ok(mknodat(folder, name, FileType::CharacterDevice, Mode::empty(), 0)?)
}

/// Makes an empty file that only we may touch until it is settled.
pub(crate) fn make_file(folder: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?)
}
