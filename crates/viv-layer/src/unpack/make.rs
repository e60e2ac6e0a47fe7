//! Making one entry.

use std::ffi::{CStr, CString};
use std::io::{self, Read};
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Mode, ftruncate, linkat, makedev, openat, statat, symlinkat, unlinkat};
use rustix::io::Errno;

use crate::extents::write_at;
use crate::faults::shown;
use crate::meta::{Kind, Meta, Time};
use crate::pack::{Form, OPAQUE_MARK, WHITEOUT_PREFIX, travels};
use crate::remove::remove_at;
use crate::settle::{Look, make_file, make_node, make_whiteout, settle};
use crate::tar::read::{Member, Reader, Type};
use crate::trail::FOLDER;
use crate::unpack::ways::{make_folder, names};
use crate::unpack::{Bound, UnpackError, Unpacking};
use crate::xattr::{DEFAULT_ACL, Holder, Marks, OPAQUE, OPAQUE_VALUE, strip};

/// How much of a file is written at once.
pub(super) const PIECE_BYTES: usize = 256 * 1024;

/// What AUFS put into layers for itself.
const AUFS_PREFIX: &[u8] = b".wh..wh.";

/// What had a name before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    Folder,
    Whiteout,
    Other,
}

type Result<T> = std::result::Result<T, UnpackError>;

impl Unpacking {
    pub(super) fn take<R: Read>(&mut self, mut member: Member, reader: &mut Reader<R>) -> Result<()> {
        let path = std::mem::take(&mut member.path);
        let refuse = |why: &str| Err(refused(&path, why));
        let mut names = names(&path).map_err(|why| refused(&path, why))?;
        if names.len() > self.bounds.depth_max as usize {
            return Err(UnpackError::Bound { which: Bound::Depth, max: self.bounds.depth_max.into() });
        }
        let Some(name) = names.pop() else {
            // The top itself, as in "./".
            if member.kind != Type::Folder {
                return refuse("has no name");
            }
            self.ways.go(&[], &path, None)?;
            self.done.entries += 1;
            return self.dress_folder(None, member, &path);
        };
        if self.form == Form::Oci {
            if names.iter().chain([&name]).any(|name| is_aufs(name)) {
                return Ok(());
            }
            if names.iter().any(|name| name.to_bytes().starts_with(WHITEOUT_PREFIX)) {
                return refuse("is inside a whiteout");
            }
        }
        let folders = &mut self.folders;
        self.ways.go(&names, &path, Some(&mut |folder| folders.note(folder, Time::default(), None)))?;
        self.done.entries += 1;
        if self.form == Form::Oci
            && let Some(hidden) = name.to_bytes().strip_prefix(WHITEOUT_PREFIX)
        {
            if names.is_empty() && name.to_bytes() == OPAQUE_MARK {
                return refuse("hides all layers below, which overlayfs cannot");
            }
            return self.mark(&name, hidden, &path);
        }
        match member.kind {
            Type::File => self.file(&name, member, &path, reader),
            Type::Folder => self.folder(&name, member, &path),
            Type::HardLink => self.hard_link(&names, &name, &member, &path),
            Type::SymbolicLink | Type::Char | Type::Block | Type::Fifo | Type::Socket => {
                self.node(&name, member, &path)
            }
        }
    }

    /// An OCI mark. It is about the layers below: what this layer itself has of the name stays, whichever came first.
    fn mark(&mut self, name: &CStr, hidden: &[u8], path: &[u8]) -> Result<()> {
        let here = self.ways.here();
        let fault = |cause: io::Error| fault(path, cause);
        if name.to_bytes() == OPAQUE_MARK {
            return Holder::Open(here).set(OPAQUE, OPAQUE_VALUE).map_err(fault);
        }
        let hidden = CString::new(hidden).expect("it is part of a name without NUL");
        if matches!(hidden.to_bytes(), b"" | b"." | b"..") {
            return Err(refused(path, "hides nothing that could be"));
        }
        match self.before(&hidden).map_err(fault)? {
            Before::Nothing => make_whiteout(here, &hidden).map_err(fault),
            // A folder that was removed and made again: nothing of the old one shows.
            Before::Folder => {
                let folder = openat(here, &*hidden, FOLDER, Mode::empty()).map_err(|errno| fault(errno.into()))?;
                Holder::Open(folder.as_fd()).set(OPAQUE, OPAQUE_VALUE).map_err(fault)
            }
            Before::Whiteout | Before::Other => Ok(()),
        }
    }

    fn before(&self, name: &CStr) -> io::Result<Before> {
        match statat(self.ways.here(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(match Meta::new(&stat).kind {
                Kind::Folder => Before::Folder,
                Kind::Whiteout => Before::Whiteout,
                _ => Before::Other,
            }),
            Err(Errno::NOENT) => Ok(Before::Nothing),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes room for an entry that is no folder.
    fn clear(&mut self, name: &CStr) -> io::Result<()> {
        match self.before(name)? {
            Before::Nothing => return Ok(()),
            Before::Folder => remove_at(self.ways.here(), name)?,
            Before::Whiteout | Before::Other => unlinkat(self.ways.here(), name, AtFlags::empty())?,
        }
        self.ways.doubt();
        Ok(())
    }

    fn file<R: Read>(&mut self, name: &CStr, member: Member, path: &[u8], reader: &mut Reader<R>) -> Result<()> {
        let fault = |cause: io::Error| fault(path, cause);
        let data: u64 = member.extents.iter().map(|(_, length)| length).sum();
        if member.true_bytes > self.bounds.file_bytes_max {
            return Err(UnpackError::Bound { which: Bound::FileBytes, max: self.bounds.file_bytes_max });
        }
        // Refused before anything of it is written.
        if data > self.bounds.bytes_max.saturating_sub(self.done.bytes) {
            return Err(UnpackError::Bound { which: Bound::Bytes, max: self.bounds.bytes_max });
        }
        let attributes = self.attributes(member.attributes, path)?;
        self.clear(name).map_err(fault)?;
        let file = make_file(self.ways.here(), name).map_err(fault)?;
        for (mut offset, length) in member.extents {
            let end = offset + length;
            while offset < end {
                let want = (end - offset).min(PIECE_BYTES as u64) as usize;
                let count = reader.content(&mut self.buffer[..want])?;
                write_at(&file, &self.buffer[..count], offset).map_err(fault)?;
                offset += count as u64;
                self.done.bytes += count as u64;
            }
        }
        if data != member.true_bytes {
            ftruncate(&file, member.true_bytes).map_err(|errno| fault(errno.into()))?;
        }
        let look = Look { kind: Kind::File, mode: member.mode, uid: member.uid, gid: member.gid, mtime: member.mtime };
        settle(Holder::Open(file.as_fd()), &look, |file| set_all(file, &attributes)).map_err(fault)
    }

    fn folder(&mut self, name: &CStr, member: Member, path: &[u8]) -> Result<()> {
        let fault = |cause: io::Error| fault(path, cause);
        let before = self.before(name).map_err(fault)?;
        match before {
            Before::Folder => {}
            Before::Nothing | Before::Whiteout => {
                make_folder(self.ways.here(), name, before == Before::Whiteout && self.form == Form::Oci)
                    .map_err(fault)?;
            }
            Before::Other => {
                self.clear(name).map_err(fault)?;
                make_folder(self.ways.here(), name, false).map_err(fault)?;
            }
        }
        self.dress_folder(Some(name), member, path)
    }

    /// Gives a folder here, or the one that this is, what an entry says about it.
    fn dress_folder(&mut self, name: Option<&CStr>, member: Member, path: &[u8]) -> Result<()> {
        let fault = |cause: io::Error| fault(path, cause);
        let mut attributes = self.attributes(member.attributes, path)?;
        let default_acl = attributes.iter().position(|(name, _)| **name == *DEFAULT_ACL);
        let default_acl = default_acl.map(|place| attributes.swap_remove(place).1);
        let open = openat(self.ways.here(), name.unwrap_or(c"."), FOLDER, Mode::empty());
        let folder = open.map_err(|errno| fault(errno.into()))?;
        // What an earlier entry gave it. A default access list would also be inherited by what is still to come.
        strip(folder.as_fd(), travels).map_err(fault)?;
        let look =
            Look { kind: Kind::Folder, mode: member.mode, uid: member.uid, gid: member.gid, mtime: member.mtime };
        settle(Holder::Open(folder.as_fd()), &look, |folder| set_all(folder, &attributes)).map_err(fault)?;
        self.folders.note(folder.as_fd(), member.mtime, default_acl).map_err(fault)
    }

    fn hard_link(&mut self, parents: &[CString], name: &CStr, member: &Member, path: &[u8]) -> Result<()> {
        let refuse = |why: &str| Err(refused(path, why));
        let fault = |cause: io::Error| fault(path, cause);
        let mut target = names(&member.link).map_err(|_| refused(path, "links to a place outside"))?;
        let Some(first) = target.pop() else { return refuse("links to nothing") };
        self.ways.go(&target, path, None)?;
        let folder = openat(self.ways.here(), c".", FOLDER, Mode::empty()).map_err(|errno| fault(errno.into()))?;
        let found = match statat(&folder, &*first, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Meta::new(&stat),
            Err(Errno::NOENT) if self.left_out.has(folder.as_fd(), &first).map_err(fault)? => {
                self.ways.go(parents, path, None)?;
                return self.leave_out(name).map_err(fault);
            }
            Err(Errno::NOENT) => return refuse("links to something that is not there"),
            Err(errno) => return Err(fault(errno.into())),
        };
        if matches!(found.kind, Kind::Folder | Kind::Whiteout) {
            return refuse("links to something that can have only one name");
        }
        self.ways.go(parents, path, None)?;
        match statat(self.ways.here(), name, AtFlags::SYMLINK_NOFOLLOW) {
            // It is that already; making room would remove it.
            Ok(stat) if Meta::new(&stat).inode == found.inode => return Ok(()),
            _ => self.clear(name).map_err(fault)?,
        }
        match linkat(folder, &*first, self.ways.here(), name, AtFlags::empty()) {
            Ok(()) => Ok(()),
            Err(Errno::NOENT) => refuse("replaces what it links to"),
            Err(errno) => Err(fault(errno.into())),
        }
    }

    fn node(&mut self, name: &CStr, member: Member, path: &[u8]) -> Result<()> {
        let fault = |cause: io::Error| fault(path, cause);
        let kind = match member.kind {
            Type::SymbolicLink => Kind::Link,
            Type::Char if member.device == (0, 0) => Kind::Whiteout,
            Type::Char => Kind::Char,
            Type::Block => Kind::Block,
            Type::Fifo => Kind::Fifo,
            Type::Socket if self.form == Form::Native => Kind::Socket,
            Type::Socket => return Err(refused(path, "is a socket, which no OCI layer has")),
            Type::File | Type::Folder | Type::HardLink => unreachable!("they have functions of their own"),
        };
        if kind == Kind::Whiteout && self.form == Form::Oci {
            return Err(refused(path, "is the device 0/0, which would hide what is below"));
        }
        if kind == Kind::Link && member.link.is_empty() {
            return Err(refused(path, "links to nothing"));
        }
        let attributes = self.attributes(member.attributes, path)?;
        if matches!(kind, Kind::Char | Kind::Block) && self.form == Form::Oci && Marks::of_this_process() == Marks::User
        {
            // The kernel lets no user make devices, and none of a layer's can be opened in a sandbox anyway.
            return self.leave_out(name).map_err(fault);
        }
        self.clear(name).map_err(fault)?;
        let here = self.ways.here();
        match kind {
            Kind::Whiteout => return make_whiteout(here, name).map_err(fault),
            Kind::Link => symlinkat(member.link.as_slice(), here, name).map_err(|errno| fault(errno.into()))?,
            _ => make_node(here, name, kind, makedev(member.device.0, member.device.1)).map_err(fault)?,
        }
        let look = Look { kind, mode: member.mode, uid: member.uid, gid: member.gid, mtime: member.mtime };
        settle(Holder::Named(here, name), &look, |node| set_all(node, &attributes)).map_err(fault)
    }

    /// Has a device become nothing: also what this layer had by that name before.
    fn leave_out(&mut self, name: &CStr) -> io::Result<()> {
        self.clear(name)?;
        self.left_out.note(self.ways.here(), name)
    }

    /// Those extended attributes that are taken. From an OCI layer the others are
    /// left out, as they are between machines; among our own there are no others.
    fn attributes(&self, all: Vec<(CString, Vec<u8>)>, path: &[u8]) -> Result<Vec<(CString, Vec<u8>)>> {
        let mut taken = Vec::with_capacity(all.len());
        for (name, value) in all {
            let native = match name.to_bytes() {
                b"trusted.overlay.opaque" => value == OPAQUE_VALUE,
                name => name.starts_with(b"user.overlay."),
            };
            if travels(name.to_bytes()) || native && self.form == Form::Native {
                taken.push((name, value));
            } else if self.form == Form::Native {
                let why = format!("has an extended attribute that is not taken: {}", shown(name.to_bytes()));
                return Err(refused(path, &why));
            }
        }
        Ok(taken)
    }
}

fn is_aufs(name: &CStr) -> bool {
    name.to_bytes().starts_with(AUFS_PREFIX) && name.to_bytes() != OPAQUE_MARK
}

fn set_all(holder: Holder<'_>, attributes: &[(CString, Vec<u8>)]) -> io::Result<()> {
    attributes.iter().try_for_each(|(name, value)| holder.set(name, value))
}

fn refused(path: &[u8], why: &str) -> UnpackError {
    UnpackError::Refused { entry: shown(path), why: why.into() }
}

fn fault(path: &[u8], source: io::Error) -> UnpackError {
    UnpackError::Io { entry: shown(path), source }
}
