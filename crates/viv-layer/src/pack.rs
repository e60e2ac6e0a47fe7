//! A layer as a tar stream.
//!
//! Entries come in the order of the walk, with nothing in them that depends on
//! when or where they are packed: the same layer gives the same bytes. What a
//! header cannot hold goes into PAX records, extended attributes as
//! `SCHILY.xattr.…`, and files with holes into GNU's format 1.0 for them, which
//! GNU tar, libarchive, Go and Python read too.

use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, fstat, openat, readlinkat};
use rustix::io::Errno;

use crate::extents::{Extents, FILE, read_at};
use crate::faults::{at, invalid};
use crate::links::Links;
use crate::meta::{Kind, Meta};
use crate::survey::{Survey, Surveyor};
use crate::tar::write::{Head, pad};
use crate::tar::{BLOCK_BYTES, EXTENTS_MAX, RECORDS_BYTES_MAX, pax};
use crate::trail::FOLDER;
use crate::walk::{Place, Step, Walk};
use crate::xattr::{Attributes, Holder};

/// How much of a file is read at once.
const PIECE_BYTES: usize = 256 * 1024;

/// Ours at the top of a sandbox's tree: where the agent lives. It belongs to no image.
const HOME: &[u8] = b".vivarium";

pub(crate) const WHITEOUT_PREFIX: &[u8] = b".wh.";
pub(crate) const OPAQUE_MARK: &[u8] = b".wh..wh..opq";

/// How a layer's marks are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Overlay's own marks as they are: exact, and for us to read again.
    Native,
    /// An OCI layer: `.wh.NAME` for whiteouts, `.wh..wh..opq` in opaque folders.
    /// Sockets and `.vivarium` at the top are left out.
    Oci,
}

/// Writes a tar stream.
#[derive(Debug)]
pub struct Packer<W: Write> {
    out: W,
    form: Form,
}

impl<W: Write> Packer<W> {
    /// Starts an archive.
    pub fn new(out: W, form: Form) -> Self {
        Self { out, form }
    }

    /// Adds a file that is on no disk.
    pub fn file(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        let mut head = Head::plain(b'0', name.as_bytes(), 0o644);
        head.stored_bytes = content.len() as u64;
        head.write(&mut self.out)?;
        self.out.write_all(content)?;
        pad(&mut self.out, content.len() as u64)
    }

    /// Adds a layer below a folder of the archive, or at its top if that is empty.
    /// The survey is of what was packed.
    pub fn tree(&mut self, prefix: &str, folder: &Path) -> io::Result<Survey> {
        let mut prefix = prefix.trim_matches('/').as_bytes().to_vec();
        if !prefix.is_empty() {
            prefix.push(b'/');
        }
        let tree = Tree {
            packer: self,
            prefix,
            walk: Walk::new(&[folder])?,
            surveyor: Surveyor::new(),
            links: Links::default(),
            buffer: vec![0; PIECE_BYTES],
        };
        tree.run()
    }

    /// Ends the archive, and gives back where it went.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[0; 2 * BLOCK_BYTES])?;
        self.out.flush()?;
        Ok(self.out)
    }
}

struct Tree<'p, W: Write> {
    packer: &'p mut Packer<W>,
    prefix: Vec<u8>,
    walk: Walk,
    surveyor: Surveyor,
    links: Links<(Place, CString)>,
    buffer: Vec<u8>,
}

impl<W: Write> Tree<'_, W> {
    fn run(mut self) -> io::Result<Survey> {
        let top = self.walk.folder();
        let meta = Meta::new(&fstat(top)?);
        let attributes = Attributes::list(Holder::Open(top))?;
        self.surveyor.top(&meta, &attributes)?;
        let path = if self.prefix.is_empty() { b"./".to_vec() } else { self.prefix.clone() };
        let mut head = head_of(b'5', &path, &meta);
        head.records = records(&attributes, self.packer.form)?;
        head.write(&mut self.packer.out)?;
        // A mark that the top is opaque is not written: overlayfs takes no notice of it there.
        loop {
            match self.walk.step() {
                Step::Entry => self.entry()?,
                Step::Exhausted => {
                    if !self.walk.leave()? {
                        return Ok(self.surveyor.finish());
                    }
                }
            }
        }
    }

    fn entry(&mut self) -> io::Result<()> {
        let name = self.walk.name().to_bytes();
        if self.packer.form == Form::Oci {
            if self.walk.depth() == 1 && name == HOME {
                return Ok(());
            }
            if name.starts_with(WHITEOUT_PREFIX) {
                return Err(invalid(self.walk.path(), "has a name that means something else in an OCI layer"));
            }
        }
        // What has gone since it was listed is as if it had gone before.
        let Some(found) = self.walk.find()? else { return Ok(()) };
        let packed = match found.meta.kind {
            Kind::Folder => self.folder(),
            Kind::File => self.file(),
            Kind::Socket if self.packer.form == Form::Oci => Ok(()),
            Kind::Link | Kind::Whiteout | Kind::Char | Kind::Block | Kind::Fifo | Kind::Socket => {
                self.node(&found.meta)
            }
        };
        match packed {
            Err(cause) if cause.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => Ok(()),
            packed => packed.map_err(|cause| at(self.walk.path(), cause)),
        }
    }

    fn path(&self) -> Vec<u8> {
        [&self.prefix, self.walk.path()].concat()
    }

    fn folder(&mut self) -> io::Result<()> {
        let folder = openat(self.walk.folder(), self.walk.name(), FOLDER, Mode::empty())?;
        let meta = Meta::new(&fstat(&folder)?);
        let attributes = Attributes::list(Holder::Open(folder.as_fd()))?;
        self.surveyor.entry((self.walk.depth(), self.walk.name(), 0), &meta, None, &attributes)?;
        let mut path = self.path();
        path.push(b'/');
        let mut head = head_of(b'5', &path, &meta);
        head.records = records(&attributes, self.packer.form)?;
        head.write(&mut self.packer.out)?;
        if self.packer.form == Form::Oci && attributes.is_opaque()? {
            path.extend_from_slice(OPAQUE_MARK);
            self.mark(&path)?;
        }
        drop(attributes);
        self.walk.enter(vec![(0, folder)])
    }

    /// An empty file whose name says something.
    fn mark(&mut self, path: &[u8]) -> io::Result<()> {
        Head::plain(b'0', path, 0o644).write(&mut self.packer.out)
    }

    fn file(&mut self) -> io::Result<()> {
        let file = openat(self.walk.folder(), self.walk.name(), FILE, Mode::empty())?;
        let meta = Meta::new(&fstat(&file)?);
        if meta.kind != Kind::File {
            return Err(io::Error::other("it became something else while it was read"));
        }
        let attributes = Attributes::list(Holder::Open(file.as_fd()))?;
        self.surveyor.entry((self.walk.depth(), self.walk.name(), 0), &meta, None, &attributes)?;
        if self.hard_link(&meta)? {
            return Ok(());
        }
        let records = records(&attributes, self.packer.form)?;
        let extents = extents(&file, meta.size)?;
        let path = self.path();
        let mut head = head_of(b'0', &path, &meta);
        head.records = records;
        head.stored_bytes = meta.size;
        if extents.as_slice() == [(0, meta.size)] || meta.size == 0 {
            head.write(&mut self.packer.out)?;
        } else {
            let map = map_bytes(&extents, meta.size);
            let data: u64 = extents.iter().map(|(start, end)| end - start).sum();
            head.stored_bytes = map + data;
            head.true_bytes = Some(meta.size);
            head.write(&mut self.packer.out)?;
            write_map(&mut self.packer.out, &extents, meta.size)?;
        }
        let stored = head.stored_bytes;
        for (mut start, end) in extents {
            while start < end {
                let piece = &mut self.buffer[..(end - start).min(PIECE_BYTES as u64) as usize];
                read_at(&file, piece, start)?;
                self.packer.out.write_all(piece)?;
                start += piece.len() as u64;
            }
        }
        pad(&mut self.packer.out, stored)
    }

    fn node(&mut self, meta: &Meta) -> io::Result<()> {
        let (folder, name) = (self.walk.folder(), self.walk.name());
        let target = match meta.kind {
            Kind::Link => readlinkat(folder, name, Vec::new())?,
            _ => CString::default(),
        };
        let attributes = Attributes::list(Holder::Named(folder, name))?;
        let mut extra = records(&attributes, self.packer.form)?;
        let seen = (meta.kind == Kind::Link).then_some(&*target);
        self.surveyor.entry((self.walk.depth(), name, 0), meta, seen, &attributes)?;
        if self.hard_link(meta)? {
            return Ok(());
        }
        let path = self.path();
        let kind = match meta.kind {
            Kind::Whiteout if self.packer.form == Form::Oci => {
                let split = path.len() - self.walk.name().to_bytes().len();
                return self.mark(&[&path[..split], WHITEOUT_PREFIX, &path[split..]].concat());
            }
            Kind::Whiteout => return Head::plain(b'3', &path, 0).write(&mut self.packer.out),
            Kind::Link => b'2',
            Kind::Char => b'3',
            Kind::Block => b'4',
            Kind::Fifo => b'6',
            Kind::Socket => {
                pax::push(&mut extra, pax::KIND, pax::SOCKET);
                b'0'
            }
            Kind::Folder | Kind::File => unreachable!("they have functions of their own"),
        };
        let mut head = head_of(kind, &path, meta);
        head.link = target.to_bytes();
        head.records = extra;
        if matches!(meta.kind, Kind::Char | Kind::Block) {
            head.device = meta.numbers();
        }
        head.write(&mut self.packer.out)
    }

    /// Writes another name of an earlier entry. False if it is the first.
    fn hard_link(&mut self, meta: &Meta) -> io::Result<bool> {
        if !meta.is_linked() {
            return Ok(false);
        }
        let own = (self.walk.place()?, self.walk.name_owned());
        let Some((place, first)) = self.links.meet(0, meta, || own) else { return Ok(false) };
        let target = [&self.prefix[..], &self.walk.path_of(place, &first)].concat();
        let path = self.path();
        let mut head = head_of(b'1', &path, meta);
        head.link = &target;
        head.write(&mut self.packer.out)?;
        Ok(true)
    }
}

fn head_of<'a>(kind: u8, path: &'a [u8], meta: &Meta) -> Head<'a> {
    let mut head = Head::plain(kind, path, meta.mode);
    (head.uid, head.gid, head.mtime) = (meta.uid, meta.gid, meta.mtime);
    head
}

/// The extended attributes as records.
fn records(attributes: &Attributes<'_>, form: Form) -> io::Result<Vec<u8>> {
    let mut records = Vec::new();
    attributes.each(|name, value| {
        let name = name.to_bytes();
        if form == Form::Oci && !travels(name) {
            return Ok(());
        }
        pax::push(&mut records, &[pax::XATTR, &pax::escape(name)].concat(), value);
        if records.len() > RECORDS_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                "it has more extended attributes than an archive may hold",
            ));
        }
        Ok(())
    })?;
    Ok(records)
}

/// Whether an extended attribute means something outside of this machine's overlays.
pub(crate) fn travels(name: &[u8]) -> bool {
    name == b"security.capability"
        || name.starts_with(b"system.posix_acl_")
        || name.starts_with(b"user.") && !name.starts_with(b"user.overlay.")
}

fn extents(file: &OwnedFd, size: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut extents = Vec::new();
    for extent in Extents::new(file, size) {
        if extents.len() == EXTENTS_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more holes than an archive may hold"));
        }
        extents.push(extent?);
    }
    Ok(extents)
}

/// The map at the start of a file with holes, as GNU tar writes it: the number of
/// pieces, then offset and length of each, in lines. A last, empty piece tells where the file ends.
fn map_lines(extents: &[(u64, u64)], size: u64) -> impl Iterator<Item = String> {
    let count = std::iter::once(format!("{}\n", extents.len() + 1));
    let pieces = extents.iter().map(|(start, end)| format!("{start}\n{}\n", end - start));
    count.chain(pieces).chain(std::iter::once(format!("{size}\n0\n")))
}

fn map_bytes(extents: &[(u64, u64)], size: u64) -> u64 {
    let length: usize = map_lines(extents, size).map(|line| line.len()).sum();
    length.next_multiple_of(BLOCK_BYTES) as u64
}

fn write_map(out: &mut impl Write, extents: &[(u64, u64)], size: u64) -> io::Result<()> {
    let mut length = 0;
    for line in map_lines(extents, size) {
        out.write_all(line.as_bytes())?;
        length += line.len();
    }
    pad(out, length as u64)
}
