//! From the names of an entry to the folder it goes into, and never out of the tree.
//!
//! Folders are opened one by one, each without following links. In an OCI layer
//! a link on the way is then resolved by the kernel with the top of the tree as
//! its root, so that neither `/` nor `..` lead out of it.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, fchmod, fchown, mkdirat, openat, openat2, statat, unlinkat};
use rustix::io::Errno;

use crate::faults::shown;
use crate::meta::{Kind, Meta};
use crate::pack::Form;
use crate::trail::{FOLDER, Trail};
use crate::unpack::UnpackError;
use crate::xattr::{Holder, OPAQUE, OPAQUE_VALUE};

/// Folders that are open at a time.
const OPEN_MAX: usize = 64;

/// The longest name, as the kernel has it.
const NAME_BYTES_MAX: usize = 255;

/// Is told the folders that are made because no entry had named them yet.
type Made<'a> = dyn FnMut(BorrowedFd<'_>) -> io::Result<()> + 'a;

pub(super) struct Ways {
    top: OwnedFd,
    form: Form,
    /// The way to the last folder; the next is often the same or near.
    trail: Trail,
    names: Vec<CString>,
    doubtful: bool,
}

impl Ways {
    pub(super) fn new(top: &Path, form: Form) -> io::Result<Self> {
        let trail = Trail::new(top, OPEN_MAX)?;
        let top = openat(trail.here(), c".", FOLDER, Mode::empty())?;
        Ok(Self { top, form, trail, names: Vec::new(), doubtful: false })
    }

    /// The last folder.
    pub(super) fn here(&self) -> BorrowedFd<'_> {
        self.trail.here()
    }

    /// Something was removed that, through links, may have been on the way here: the next is not to rely on it.
    pub(super) fn doubt(&mut self) {
        self.doubtful = true;
    }

    fn forget(&mut self) -> io::Result<()> {
        self.doubtful = false;
        self.names.clear();
        self.trail = Trail::start(openat(&self.top, c".", FOLDER, Mode::empty())?, OPEN_MAX)?;
        Ok(())
    }

    /// Goes to the folder that some names lead to, making what is missing if
    /// wanted: then `made` is told.
    pub(super) fn go(
        &mut self,
        names: &[CString],
        path: &[u8],
        mut made: Option<&mut Made<'_>>,
    ) -> Result<(), UnpackError> {
        let fault = |source: io::Error| UnpackError::Io { entry: shown(path), source };
        if self.doubtful {
            self.forget().map_err(fault)?;
        }
        let common = self.names.iter().zip(names).take_while(|(a, b)| a == b).count();
        while self.names.len() > common {
            self.names.pop();
            if self.trail.leave().is_err() {
                // Up from where a link led is another folder than the one of the link.
                self.forget().map_err(fault)?;
            }
        }
        for index in self.names.len()..names.len() {
            let folder = self.open(&names[..=index], path, &mut made)?;
            self.trail.enter(folder).map_err(fault)?;
            self.names.push(names[index].clone());
        }
        Ok(())
    }

    fn open(&self, names: &[CString], path: &[u8], made: &mut Option<&mut Made<'_>>) -> Result<OwnedFd, UnpackError> {
        let fault = |source: io::Error| UnpackError::Io { entry: shown(path), source };
        let refuse = |why: &str| UnpackError::Refused { entry: shown(path), why: why.into() };
        let name = names.last().expect("there is a name to open");
        match self.trail.open(name) {
            Ok(folder) => return Ok(folder),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
            Err(errno) => return Err(fault(errno.into())),
        }
        let kind = match statat(self.here(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(Meta::new(&stat).kind),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(fault(errno.into())),
        };
        match (kind, made) {
            (Some(Kind::Link), _) if self.form == Form::Oci => self.through_link(names).map_err(|errno| match errno {
                Errno::NOENT => refuse("leads through a link to nothing"),
                _ => refuse("leads through a link that cannot be followed"),
            }),
            (Some(Kind::Link), _) => Err(refuse("leads through a link")),
            // A whiteout says what is below the layer, a folder what is in it.
            (None | Some(Kind::Whiteout), Some(made)) => {
                let folder = make_folder(self.here(), name, kind == Some(Kind::Whiteout)).map_err(fault)?;
                made(folder.as_fd()).map_err(fault)?;
                Ok(folder)
            }
            (None | Some(Kind::Whiteout), None) => Err(refuse("leads through a folder that is not there")),
            (Some(_), _) => Err(refuse("leads through something that is no folder")),
        }
    }

    fn through_link(&self, names: &[CString]) -> rustix::io::Result<OwnedFd> {
        let path = names.iter().map(|name| name.to_bytes()).collect::<Vec<_>>().join(&b'/');
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let open = || openat2(&self.top, path.as_slice(), flags, Mode::empty(), resolve);
        let opened = (0..RACES_MAX).map(|_| open()).find(|opened| !matches!(opened, Err(Errno::AGAIN)));
        opened.unwrap_or(Err(Errno::AGAIN))
    }
}

/// How often a folder is looked for whose way leads through `..`: the kernel gives up when anybody on the whole machine
/// renames something at that moment. Such a moment is a microsecond long.
const RACES_MAX: usize = 10_000;

/// Makes a folder as one that nothing is said about, in the place of a whiteout or of nothing.
pub(super) fn make_folder(parent: BorrowedFd<'_>, name: &CStr, whiteout: bool) -> io::Result<OwnedFd> {
    if whiteout {
        unlinkat(parent, name, AtFlags::empty())?;
    }
    mkdirat(parent, name, Mode::RWXU)?;
    let folder = openat(parent, name, FOLDER, Mode::empty())?;
    // Whatever the folder above or our own mask would have it inherit.
    fchown(&folder, Some(rustix::fs::Uid::ROOT), Some(rustix::fs::Gid::ROOT))?;
    fchmod(&folder, Mode::from_raw_mode(0o755))?;
    if whiteout {
        // What the whiteout hid stays hidden: it is a new folder, not the one below.
        Holder::Open(folder.as_fd()).set(OPAQUE, OPAQUE_VALUE)?;
    }
    Ok(folder)
}

/// The names of a path below the top. None for a path that leads upwards or has a name that cannot be.
pub(super) fn names(path: &[u8]) -> Result<Vec<CString>, &'static str> {
    let mut names = Vec::new();
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => return Err("leads upwards"),
            name if name.len() > NAME_BYTES_MAX + crate::pack::WHITEOUT_PREFIX.len() => {
                return Err("has too long a name");
            }
            name => names.push(CString::new(name).map_err(|_| "has a name with a NUL")?),
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_below() {
        assert_eq!(names(b"./a//b/").unwrap(), [c"a".to_owned(), c"b".to_owned()]);
        assert_eq!(names(b"/a").unwrap(), [c"a".to_owned()]);
        assert!(names(b"").unwrap().is_empty());
        for bad in [&b"../a"[..], b"a/../b", b"a/..", b"..", b"a\0b", &[b'x'; 300]] {
            assert!(names(bad).is_err());
        }
    }
}
