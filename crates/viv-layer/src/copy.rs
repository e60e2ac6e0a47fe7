//! A layer from another, or from a stack of them.
//!
//! Both are one walk: a copy is the merge of a single layer that keeps all
//! marks. A merge looks each name up as overlayfs would, and writes what it
//! finds as a layer again:
//!
//! ```text
//!   topmost entry is …          becomes
//!   a whiteout                  a whiteout, unless the folder is opaque: then nothing is below to hide; nor is it
//!                               where it is known what is below, and that has no such folder
//!   neither that nor a folder   itself
//!   a folder                    the folders below it merged, down to the first that is opaque, or to the
//!                               first entry that is no folder; opaque if such a one was met
//! ```

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, copy_file_range, fstat, ftruncate, ioctl_ficlone, linkat, mkdirat,
    openat, openat2, readlinkat, symlinkat,
};
use rustix::io::Errno;

use crate::extents::{Extents, FILE, read_at, write_at};
use crate::faults::{at, invalid};
use crate::links::Links;
use crate::meta::{Kind, Meta};
use crate::settle::{Look, make_file, make_node, make_whiteout, settle};
use crate::survey::{Survey, Surveyor};
use crate::trail::{FOLDER, Trail};
use crate::walk::{Found, Place, Step, Walk};
use crate::xattr::{Attributes, Holder};

/// Folders of the target that are open at a time.
const TARGET_OPEN_MAX: usize = 64;

/// What is read and written at once where the kernel cannot copy by itself.
const PIECE_BYTES: usize = 256 * 1024;

/// The longest path the kernel takes at once, with its end: `PATH_MAX`.
const PATH_BYTES_MAX: usize = 4096;

/// What became of a copy or a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copied {
    /// What was written, as it was read: of a copy, the survey of its source at that time.
    pub survey: Survey,
    /// Bytes of files, holes included, that share their place on disk with the source.
    pub cloned_bytes: u64,
    /// Bytes that were copied.
    pub copied_bytes: u64,
}

/// Copies a layer, with everything that a survey sees and all contents, holes as holes.
///
/// The target is made, or is an empty folder. If this fails, what was made so far stays.
pub fn copy(from: &Path, to: &Path) -> io::Result<Copied> {
    Weaver::new(&[from], to, Marks::All)?.run()
}

/// Merges a stack of layers, topmost first, into one that means the same on whatever is below.
///
/// The target is made, or is an empty folder. If this fails, what was made so far stays.
pub fn merge(layers: &[&Path], to: &Path) -> io::Result<Copied> {
    if layers.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "there is nothing to merge"));
    }
    Weaver::new(layers, to, Marks::Needed)?.run()
}

/// The same for one that is to lie on this and nothing else: no whiteout is left in folders that are not there below.
/// Overlayfs lists such folders as they are, whiteouts as names that nobody can open.
pub fn merge_onto(layers: &[&Path], below: &Path, to: &Path) -> io::Result<Copied> {
    if layers.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "there is nothing to merge"));
    }
    let mut weaver = Weaver::new(layers, to, Marks::Needed)?;
    // The path is the caller's, and may lead through links: a mount that is attached nowhere has no other.
    let folder = FOLDER.difference(OFlags::NOFOLLOW);
    weaver.below = Some(
        openat(CWD, below, folder, Mode::empty()).map_err(|errno| at(below.as_os_str().as_encoded_bytes(), errno))?,
    );
    weaver.run()
}

/// Which whiteouts are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Marks {
    All,
    /// Those that may hide something.
    Needed,
}

/// A folder on the way down.
struct Opened {
    /// Opaque where the layers say otherwise, or nothing.
    sealed: bool,
    /// Whether nothing from below the stack shows through, here or further up.
    closed: bool,
}

struct Weaver {
    walk: Walk,
    target: Trail,
    top: OwnedFd,
    folders: Vec<Opened>,
    marks: Marks,
    /// What the result is to lie on, if that is known.
    below: Option<OwnedFd>,
    surveyor: Surveyor,
    links: Links<(Place, CString)>,
    /// Where the last hard link led: the next often leads there too.
    near: Option<(Place, OwnedFd)>,
    /// Whether the filesystem may be able to share data between files. Once it cannot, it never will.
    clones: bool,
    /// The same for copying inside the kernel.
    ranges: bool,
    buffer: Vec<u8>,
    cloned_bytes: u64,
    copied_bytes: u64,
}

impl Weaver {
    fn new(layers: &[&Path], to: &Path, marks: Marks) -> io::Result<Self> {
        let walk = Walk::new(layers)?;
        match mkdirat(CWD, to, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(at(to.as_os_str().as_encoded_bytes(), errno)),
        }
        let target = Trail::new(to, TARGET_OPEN_MAX)?;
        for entry in Dir::read_from(target.here())? {
            if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
                return Err(at(to.as_os_str().as_encoded_bytes(), io::ErrorKind::DirectoryNotEmpty));
            }
        }
        Ok(Self {
            walk,
            top: openat(target.here(), c".", FOLDER, Mode::empty())?,
            target,
            folders: vec![Opened { sealed: false, closed: false }],
            marks,
            below: None,
            surveyor: Surveyor::new(),
            links: Links::default(),
            near: None,
            clones: true,
            ranges: true,
            buffer: Vec::new(),
            cloned_bytes: 0,
            copied_bytes: 0,
        })
    }

    fn run(mut self) -> io::Result<Copied> {
        let top = self.walk.folder();
        self.surveyor.top(&Meta::new(&fstat(top)?), &Attributes::list(Holder::Open(top))?)?;
        loop {
            match self.walk.step() {
                Step::Entry => self.entry()?,
                Step::Exhausted => {
                    self.finish_folder().map_err(|cause| at(self.walk.path(), cause))?;
                    self.folders.pop();
                    if !self.walk.leave()? {
                        break;
                    }
                    self.target.leave()?;
                }
            }
        }
        let (cloned_bytes, copied_bytes) = (self.cloned_bytes, self.copied_bytes);
        Ok(Copied { survey: self.surveyor.finish(), cloned_bytes, copied_bytes })
    }

    fn entry(&mut self) -> io::Result<()> {
        // What has gone since it was listed is as if it had gone before.
        let Some(found) = self.walk.find()? else { return Ok(()) };
        if found.meta.kind == Kind::Folder {
            return self.folder();
        }
        if found.meta.kind == Kind::Whiteout
            && self.marks == Marks::Needed
            && self.folders.last().is_some_and(|f| f.closed)
        {
            return Ok(());
        }
        match self.other(&found) {
            Err(cause) if cause.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => {
                // Was it the source that has gone, or the target?
                if self.walk.find()?.is_none() { Ok(()) } else { Err(at(self.walk.path(), cause)) }
            }
            result => result.map_err(|cause| at(self.walk.path(), cause)),
        }
    }

    fn folder(&mut self) -> io::Result<()> {
        let below = self.walk.below()?;
        let Some((layer, folder)) = below.members.first() else { return Ok(()) };
        let fault = |cause: io::Error| at(self.walk.path(), cause);
        let meta = Meta::new(&fstat(folder)?);
        let own = self.target.here();
        let top = fstat(&self.top)?;
        if meta.inode == (top.st_dev, top.st_ino) {
            return Err(invalid(self.walk.path(), "is where the copy goes"));
        }
        let mut attributes = Attributes::list(Holder::Open(folder.as_fd())).map_err(fault)?;
        let sealed = below.opaque && !attributes.is_opaque().map_err(fault)?;
        if sealed {
            attributes = attributes.seal();
        }
        self.surveyor.entry((self.walk.depth(), self.walk.name(), *layer), &meta, None, &attributes).map_err(fault)?;
        mkdirat(own, self.walk.name(), Mode::RWXU).map_err(|errno| fault(errno.into()))?;
        let made = self.target.open(self.walk.name()).map_err(|errno| fault(errno.into()))?;
        let closed = below.opaque
            || self.folders.last().is_some_and(|above| above.closed)
            || !self.may_be_below().map_err(fault)?;
        self.target.enter(made)?;
        self.folders.push(Opened { sealed, closed });
        self.walk.enter(below.members)
    }

    /// Whether what the result is to lie on may have this folder.
    fn may_be_below(&self) -> io::Result<bool> {
        let Some(below) = &self.below else { return Ok(true) };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        match openat2(below, self.walk.path(), FOLDER | OFlags::PATH, Mode::empty(), resolve) {
            // A path that is too long to be asked for may be there.
            Ok(_) | Err(Errno::NAMETOOLONG) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Gives a folder its attributes, now that nothing is made in it any more:
    /// its time would change, and its default access list would be inherited.
    fn finish_folder(&mut self) -> io::Result<()> {
        let source = self.walk.folder();
        let meta = Meta::new(&fstat(source)?);
        let mut attributes = Attributes::list(Holder::Open(source))?;
        if self.folders.last().is_some_and(|folder| folder.sealed) {
            attributes = attributes.seal();
        }
        dress(Holder::Open(self.target.here()), &meta, &attributes)
    }

    fn other(&mut self, found: &Found) -> io::Result<()> {
        let source = self.walk.folder_of(found.layer);
        let name = self.walk.name();
        let mut meta = found.meta.clone();
        let mut file = None;
        let mut target = None;
        match meta.kind {
            Kind::File => {
                let opened = openat(source, name, FILE, Mode::empty())?;
                meta = Meta::new(&fstat(&opened)?);
                if meta.kind != Kind::File {
                    return Err(io::Error::other("it became something else while it was read"));
                }
                file = Some(opened);
            }
            Kind::Link => target = Some(readlinkat(source, name, Vec::new())?),
            Kind::Folder | Kind::Whiteout | Kind::Char | Kind::Block | Kind::Fifo | Kind::Socket => {}
        }
        // Only what is open can be held on to while the walk goes on; the rest is listed again, and is rare.
        let open = file.as_ref().map(|file| Attributes::list(Holder::Open(file.as_fd()))).transpose()?;
        let named = if open.is_none() { Some(Attributes::list(Holder::Named(source, name))?) } else { None };
        let attributes = open.as_ref().or(named.as_ref()).expect("one of both was listed");
        self.surveyor.entry((self.walk.depth(), name, found.layer), &meta, target.as_deref(), attributes)?;
        if meta.is_linked() {
            let own = (self.walk.place()?, self.walk.name_owned());
            if let Some((place, first)) = self.links.meet(found.layer, &meta, || own) {
                return self.link(place, &first);
            }
        }
        let (name, here) = (self.walk.name(), self.target.here());
        match meta.kind {
            Kind::Whiteout => return make_whiteout(here, name),
            Kind::File => {
                let source = file.as_ref().expect("files were opened");
                let made = make_file(here, name)?;
                Data { clones: &mut self.clones, ranges: &mut self.ranges, buffer: &mut self.buffer }.copy(
                    source,
                    &made,
                    meta.size,
                    &mut self.cloned_bytes,
                    &mut self.copied_bytes,
                )?;
                return dress(Holder::Open(made.as_fd()), &meta, open.as_ref().expect("files are open"));
            }
            Kind::Link => symlinkat(target.as_deref().expect("links were read"), here, name)?,
            Kind::Char | Kind::Block | Kind::Fifo | Kind::Socket => make_node(here, name, meta.kind, meta.device)?,
            Kind::Folder => unreachable!("folders are entered"),
        }
        let attributes = Attributes::list(Holder::Named(self.walk.folder_of(found.layer), name))?;
        dress(Holder::Named(here, name), &meta, &attributes)
    }

    /// Makes the entry another name of one that was made before.
    fn link(&mut self, place: Place, first: &CStr) -> io::Result<()> {
        if self.near.as_ref().is_none_or(|(near, _)| *near != place) {
            let folder = open_way(self.top.as_fd(), &self.walk.way(place))?;
            self.near = Some((place, folder));
        }
        let (_, folder) = self.near.as_ref().expect("it was just set");
        Ok(linkat(folder, first, self.target.here(), self.walk.name(), AtFlags::empty())?)
    }
}

/// Opens a folder below another, in as few steps as the kernel's bound on paths allows.
fn open_way(top: BorrowedFd<'_>, way: &[&CStr]) -> io::Result<OwnedFd> {
    let mut folder = openat(top, c".", FOLDER, Mode::empty())?;
    let mut path = Vec::with_capacity(PATH_BYTES_MAX);
    for (index, name) in way.iter().enumerate() {
        path.extend_from_slice(name.to_bytes());
        let following = way.get(index + 1).map_or(0, |next| next.to_bytes().len());
        if following == 0 || path.len() + following + 2 > PATH_BYTES_MAX {
            let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
            folder = openat2(&folder, path.as_slice(), FOLDER | OFlags::CLOEXEC, Mode::empty(), resolve)?;
            path.clear();
        } else {
            path.push(b'/');
        }
    }
    Ok(folder)
}

fn dress(target: Holder<'_>, meta: &Meta, attributes: &Attributes<'_>) -> io::Result<()> {
    let look = Look { kind: meta.kind, mode: meta.mode, uid: meta.uid, gid: meta.gid, mtime: meta.mtime };
    settle(target, &look, |target| attributes.each(|name, value| target.set(name, value)))
}

/// Copying what is in a file by the best means there are.
struct Data<'w> {
    clones: &'w mut bool,
    ranges: &'w mut bool,
    buffer: &'w mut Vec<u8>,
}

impl Data<'_> {
    fn copy(&mut self, from: &OwnedFd, to: &OwnedFd, size: u64, cloned: &mut u64, copied: &mut u64) -> io::Result<()> {
        if size == 0 {
            return Ok(());
        }
        if *self.clones {
            match ioctl_ficlone(to, from) {
                Ok(()) => {
                    *cloned += size;
                    // It may have grown or shrunk since it was looked at.
                    return Ok(ftruncate(to, size)?);
                }
                // This file cannot, for whatever reason; others may.
                Err(Errno::INVAL | Errno::TXTBSY) => {}
                Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::NOTTY | Errno::NOSYS | Errno::PERM) => *self.clones = false,
                Err(errno) => return Err(errno.into()),
            }
        }
        ftruncate(to, size)?;
        for extent in Extents::new(from, size) {
            let (start, end) = extent?;
            self.piece(from, to, start, end)?;
            *copied += end - start;
        }
        Ok(())
    }

    fn piece(&mut self, from: &OwnedFd, to: &OwnedFd, mut start: u64, end: u64) -> io::Result<()> {
        while *self.ranges && start < end {
            let (mut read, mut written) = (start, start);
            let length = usize::try_from(end - start).unwrap_or(usize::MAX);
            match copy_file_range(from, Some(&mut read), to, Some(&mut written), length) {
                // It shrank meanwhile; the rest stays a hole.
                Ok(0) => return Ok(()),
                Ok(count) => start += count as u64,
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::PERM) => *self.ranges = false,
                Err(errno) => return Err(errno.into()),
            }
        }
        if self.buffer.is_empty() {
            *self.buffer = vec![0; PIECE_BYTES];
        }
        while start < end {
            let piece = &mut self.buffer[..(end - start).min(PIECE_BYTES as u64) as usize];
            read_at(from, piece, start)?;
            write_at(to, piece, start)?;
            start += piece.len() as u64;
        }
        Ok(())
    }
}
