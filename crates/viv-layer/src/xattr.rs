//! Extended attributes: which of them belong to a layer, and reaching them without opening anything.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{
    XattrFlags, fgetxattr, flistxattr, flistxattr_query, fremovexattr, fsetxattr, lgetxattr, llistxattr,
    llistxattr_query, lsetxattr,
};
use rustix::io::Errno;

pub(crate) const OPAQUE: &CStr = c"trusted.overlay.opaque";
pub(crate) const OPAQUE_VALUE: &[u8] = b"y";
pub(crate) const DEFAULT_ACL: &CStr = c"system.posix_acl_default";

/// The kernel's own bounds: `XATTR_LIST_MAX` and `XATTR_SIZE_MAX`.
const LIST_BYTES_MAX: usize = 65_536;
pub(crate) const VALUE_BYTES_MAX: usize = 65_536;

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
            fremovexattr(folder, &**name)?;
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
            match class(name.to_bytes()) {
                Class::Ours => names.push(name.to_owned()),
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
        // Those of `user.overlay.` mean nothing to mounts of ours: they are somebody's data inside.
        _ if name.starts_with(b"trusted.overlay.") => Class::Bookkeeping,
        _ => {
            let spaces: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];
            if spaces.iter().any(|space| name.starts_with(space)) { Class::Ours } else { Class::Bookkeeping }
        }
    }
}
