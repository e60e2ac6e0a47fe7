//! Extended attributes: which of them belong to a layer, and reaching them without opening anything.
//!
//! Root's overlays keep their marks in `trusted.overlay.`; those that an
//! ordinary user mounts in a user namespace keep them in `user.overlay.`, and
//! what somebody inside calls so gets one more `overlay.` in its name. All of
//! this crate but [`Holder`] speaks of root's names, so that archives and
//! digests are the same whoever wrote the layer.

use std::borrow::Cow;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use rustix::buffer::spare_capacity;
use rustix::fs::{
    XattrFlags, fgetxattr, flistxattr, flistxattr_query, fremovexattr, fsetxattr, lgetxattr, llistxattr,
    llistxattr_query, lsetxattr,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub(crate) const OPAQUE: &CStr = c"trusted.overlay.opaque";
pub(crate) const OPAQUE_VALUE: &[u8] = b"y";
pub(crate) const DEFAULT_ACL: &CStr = c"system.posix_acl_default";

/// The kernel's own bounds: `XATTR_LIST_MAX` and `XATTR_SIZE_MAX`.
const LIST_BYTES_MAX: usize = 65_536;
pub(crate) const VALUE_BYTES_MAX: usize = 65_536;

/// Where the overlays that this process mounts keep their marks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Marks {
    /// In `trusted.overlay.`, as root of the machine.
    #[default]
    Trusted,
    /// In `user.overlay.`, as everybody else.
    User,
}

impl Marks {
    /// What the kernel allows to this process, by its user namespace.
    pub fn of_this_process() -> Self {
        static FOUND: OnceLock<Marks> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
            let whole = map.split_ascii_whitespace().eq(["0", "0", "4294967295"]);
            if whole { Self::Trusted } else { Self::User }
        })
    }

    /// What an attribute is called on disk.
    fn on_disk(self, name: &CStr) -> Cow<'_, CStr> {
        let bytes = name.to_bytes();
        match (self, bytes.strip_prefix(TRUSTED), bytes.strip_prefix(USER)) {
            (Self::User, Some(mark), _) => Cow::Owned(joined(&[USER, mark])),
            (Self::User, None, Some(data)) => Cow::Owned(joined(&[USER, ESCAPE, data])),
            (Self::User, None, None) | (Self::Trusted, ..) => Cow::Borrowed(name),
        }
    }

    /// What root would call an attribute.
    fn off_disk(self, name: &CStr) -> CString {
        match (self, name.to_bytes().strip_prefix(USER)) {
            (Self::User, Some(rest)) => match rest.strip_prefix(ESCAPE) {
                Some(data) => joined(&[USER, data]),
                None => joined(&[TRUSTED, rest]),
            },
            (Self::User, None) | (Self::Trusted, _) => name.to_owned(),
        }
    }
}

const TRUSTED: &[u8] = b"trusted.overlay.";
const USER: &[u8] = b"user.overlay.";
const ESCAPE: &[u8] = b"overlay.";

fn joined(parts: &[&[u8]]) -> CString {
    CString::new(parts.concat()).expect("parts of names have no NUL")
}

/// What has attributes: something open, or a name in an open folder. The latter
/// goes by `/proc`, which neither opens it nor follows it if it is a link.
#[derive(Clone, Copy)]
pub(crate) enum Holder<'a> {
    Open(BorrowedFd<'a>),
    Named(BorrowedFd<'a>, &'a CStr),
}

/// A path by which the kernel finds a name in an open folder.
pub(crate) fn proc_path(folder: BorrowedFd<'_>, name: &CStr) -> CString {
    let mut path = format!("/proc/self/fd/{}/", folder.as_raw_fd()).into_bytes();
    path.extend_from_slice(name.to_bytes());
    CString::new(path).expect("neither part holds a NUL")
}

impl Holder<'_> {
    fn list(&self) -> io::Result<Vec<u8>> {
        let query = match self {
            Self::Open(file) => flistxattr_query(file),
            Self::Named(folder, name) => llistxattr_query(proc_path(*folder, name)),
        };
        match query {
            // Most entries have none: nothing to allocate for.
            Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
            Ok(_) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut list = Vec::with_capacity(LIST_BYTES_MAX);
        match self {
            Self::Open(file) => flistxattr(file, spare_capacity(&mut list)),
            Self::Named(folder, name) => llistxattr(proc_path(*folder, name), spare_capacity(&mut list)),
        }?;
        Ok(list)
    }

    /// The value of an attribute; none if it has gone.
    fn value(&self, name: &CStr) -> io::Result<Option<Vec<u8>>> {
        let name = &*Marks::of_this_process().on_disk(name);
        let mut value = Vec::with_capacity(VALUE_BYTES_MAX);
        let read = match self {
            Self::Open(file) => fgetxattr(file, name, spare_capacity(&mut value)),
            Self::Named(folder, entry) => lgetxattr(proc_path(*folder, entry), name, spare_capacity(&mut value)),
        };
        match read {
            Ok(_) => Ok(Some(value)),
            Err(Errno::NODATA) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(crate) fn set(&self, name: &CStr, value: &[u8]) -> io::Result<()> {
        let name = &*Marks::of_this_process().on_disk(name);
        match self {
            Self::Open(file) => fsetxattr(file, name, value, XattrFlags::empty()),
            Self::Named(folder, entry) => lsetxattr(proc_path(*folder, entry), name, value, XattrFlags::empty()),
        }?;
        Ok(())
    }
}

/// Takes those attributes from an open folder that an archive could have given it.
pub(crate) fn strip(folder: BorrowedFd<'_>, given: impl Fn(&[u8]) -> bool) -> io::Result<()> {
    for name in &Attributes::list(Holder::Open(folder))?.names {
        if given(name.to_bytes()) {
            fremovexattr(folder, &*Marks::of_this_process().on_disk(name))?;
        }
    }
    Ok(())
}

/// The attributes of an entry that belong to the layer, sorted by name.
///
/// Values are read one at a time: an entry may have thousands, each as long as the kernel allows.
pub(crate) struct Attributes<'a> {
    holder: Holder<'a>,
    names: Vec<CString>,
    /// Made opaque by a merge, whatever is on disk.
    sealed: bool,
}

impl<'a> Attributes<'a> {
    pub(crate) fn list(holder: Holder<'a>) -> io::Result<Self> {
        let list = holder.list()?;
        let mut names = Vec::new();
        for name in list.split_inclusive(|&byte| byte == 0) {
            let name = CStr::from_bytes_with_nul(name).map_err(io::Error::other)?;
            let name = Marks::of_this_process().off_disk(name);
            match class(name.to_bytes()) {
                Class::Ours => names.push(name),
                Class::Bookkeeping => {}
                Class::Elsewhere => {
                    let why = format!("{} says that part of it is in another layer", name.to_string_lossy());
                    return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                }
            }
        }
        names.sort_unstable();
        Ok(Self { holder, names, sealed: false })
    }

    /// The same, and opaque.
    pub(crate) fn seal(mut self) -> Self {
        if let Err(place) = self.names.binary_search_by(|name| (**name).cmp(OPAQUE)) {
            self.names.insert(place, OPAQUE.to_owned());
        }
        self.sealed = true;
        self
    }

    pub(crate) fn is_opaque(&self) -> io::Result<bool> {
        Ok(self.sealed
            || self.names.iter().any(|name| **name == *OPAQUE)
                && self.holder.value(OPAQUE)?.is_some_and(|value| value == OPAQUE_VALUE))
    }

    /// Shows each with its value.
    pub(crate) fn each(&self, mut show: impl FnMut(&CStr, &[u8]) -> io::Result<()>) -> io::Result<()> {
        for name in &self.names {
            if self.sealed && **name == *OPAQUE {
                show(name, OPAQUE_VALUE)?;
            } else if let Some(value) = self.holder.value(name)? {
                show(name, &value)?;
            }
        }
        Ok(())
    }
}

enum Class {
    /// Part of the layer.
    Ours,
    /// The host's, not the layer's: overlayfs' notes about a mount, labels of the host's policy, settings of a filesystem.
    Bookkeeping,
    /// A folder that was renamed, or a file without its content, in a way that only
    /// the very stack can resolve that it was written on. Nothing here could do it justice.
    Elsewhere,
}

fn class(name: &[u8]) -> Class {
    match name {
        b"trusted.overlay.opaque" => Class::Ours,
        b"trusted.overlay.redirect" | b"trusted.overlay.metacopy" => Class::Elsewhere,
        b"security.selinux" | b"security.ima" | b"security.evm" => Class::Bookkeeping,
        // Those of `user.overlay.` mean nothing to root's mounts: they are somebody's data inside.
        _ if name.starts_with(b"trusted.overlay.") => Class::Bookkeeping,
        _ => {
            let spaces: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];
            if spaces.iter().any(|space| name.starts_with(space)) { Class::Ours } else { Class::Bookkeeping }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_a_user_are_roots_by_another_name() {
        let both = [
            (c"user.overlay.opaque", c"trusted.overlay.opaque"),
            (c"user.overlay.origin", c"trusted.overlay.origin"),
            (c"user.overlay.overlay.opaque", c"user.overlay.opaque"),
            (c"user.overlay.overlay.overlay.x", c"user.overlay.overlay.x"),
            (c"user.mine", c"user.mine"),
            (c"security.capability", c"security.capability"),
        ];
        for (disk, neutral) in both {
            assert_eq!(&*Marks::User.off_disk(disk), neutral);
            assert_eq!(&*Marks::User.on_disk(neutral), disk);
            assert_eq!(&*Marks::Trusted.off_disk(disk), disk);
            assert_eq!(&*Marks::Trusted.on_disk(disk), disk);
        }
    }
}
