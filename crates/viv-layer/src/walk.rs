//! Walking a layer, or a stack of layers at once, in the one canonical order.
//!
//! The order is that of names as bytes, each folder before what is in it. What
//! is kept in memory is the names of the folders on the way down, never the tree.
//!
//! ```text
//!   step() ── Entry ──► look at name(); enter() if it is a folder
//!          └─ Exhausted ──► finish the folder; leave(), which is false at the top
//! ```

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, statat};
use rustix::io::Errno;

use crate::faults::at;
use crate::meta::{Kind, Meta};
use crate::trail::Trail;
use crate::xattr::{Attributes, Holder};

/// Folders of all layers that are open at a time: well below the usual limit of 1,024 descriptors per process.
const OPEN_MAX: usize = 128;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Everything,
    Folders,
}

/// The names in a folder, packed: one allocation, not one per name.
#[derive(Default)]
struct Names {
    bytes: Vec<u8>,
    starts: Vec<u32>,
}

impl Names {
    fn read(&mut self, folder: BorrowedFd<'_>, wanted: Wanted) -> io::Result<()> {
        for entry in Dir::read_from(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let folder = matches!(entry.file_type(), FileType::Directory | FileType::Unknown);
            if matches!(name.to_bytes(), b"." | b"..") || wanted == Wanted::Folders && !folder {
                continue;
            }
            let start = u32::try_from(self.bytes.len()).map_err(|_| io::Error::other("a folder has too many names"))?;
            self.starts.push(start);
            self.bytes.extend_from_slice(name.to_bytes_with_nul());
        }
        Ok(())
    }

    fn sort(&mut self) {
        let bytes = &self.bytes;
        self.starts.sort_unstable_by(|&a, &b| name(bytes, a).cmp(name(bytes, b)));
        self.starts.dedup_by(|a, b| name(bytes, *a) == name(bytes, *b));
    }
}

fn name(bytes: &[u8], start: u32) -> &CStr {
    CStr::from_bytes_until_nul(&bytes[start as usize..]).expect("every name is kept with its end")
}

struct Frame {
    names: Names,
    next: usize,
    /// The layers that have this folder, topmost first.
    members: Vec<usize>,
    /// Where in the path the names of this folder start.
    base: usize,
    place: Option<Place>,
}

/// A folder on record: see [`Walk::place`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place(u32);

pub(crate) enum Step {
    Entry,
    /// All names of the folder have been seen.
    Exhausted,
}

/// The topmost entry of a name.
pub(crate) struct Found {
    pub(crate) layer: usize,
    pub(crate) meta: Meta,
}

/// The folders that make up one folder of a stack.
pub(crate) struct Below {
    pub(crate) members: Vec<(usize, OwnedFd)>,
    /// Whether one of the layers hides whatever is below the stack.
    pub(crate) opaque: bool,
}

pub(crate) struct Walk {
    trails: Vec<Trail>,
    frames: Vec<Frame>,
    path: Vec<u8>,
    wanted: Wanted,
    /// Folders on record, each with the one above and its name. The first is the top.
    places: Vec<(Place, Box<CStr>)>,
}

impl Walk {
    /// Starts at the top of a stack of layers, topmost first.
    pub(crate) fn new(layers: &[&Path]) -> io::Result<Self> {
        Self::start(layers, Wanted::Everything)
    }

    /// Walks the folders of one layer only.
    pub(crate) fn folders(layer: &Path) -> io::Result<Self> {
        Self::start(&[layer], Wanted::Folders)
    }

    fn start(layers: &[&Path], wanted: Wanted) -> io::Result<Self> {
        let window = OPEN_MAX / layers.len().max(1);
        let open =
            |layer: &&Path| Trail::new(layer, window).map_err(|cause| at(layer.as_os_str().as_encoded_bytes(), cause));
        let trails = layers.iter().map(open).collect::<io::Result<Vec<_>>>()?;
        let places = vec![(Place(0), Box::default())];
        let mut walk = Self { trails, frames: Vec::new(), path: Vec::new(), wanted, places };
        walk.read((0..layers.len()).collect())?;
        walk.frames[0].place = Some(Place(0));
        Ok(walk)
    }

    fn read(&mut self, members: Vec<usize>) -> io::Result<()> {
        let mut names = Names::default();
        for &layer in &members {
            names.read(self.trails[layer].here(), self.wanted).map_err(|cause| at(&self.path, cause))?;
        }
        names.sort();
        let base = self.path.len();
        self.frames.push(Frame { names, next: 0, members, base, place: None });
        Ok(())
    }

    fn frame(&self) -> &Frame {
        self.frames.last().expect("a walk is over once the top is left")
    }

    pub(crate) fn step(&mut self) -> Step {
        let frame = self.frames.last_mut().expect("a walk is over once the top is left");
        self.path.truncate(frame.base);
        let Some(&start) = frame.names.starts.get(frame.next) else { return Step::Exhausted };
        frame.next += 1;
        self.path.extend_from_slice(name(&frame.names.bytes, start).to_bytes());
        Step::Entry
    }

    /// How many folders are above the entry.
    pub(crate) fn depth(&self) -> usize {
        self.frames.len()
    }

    /// The name of the entry.
    pub(crate) fn name(&self) -> &CStr {
        current(self.frame())
    }

    /// The path of the entry, or of the folder that is exhausted, below the top.
    pub(crate) fn path(&self) -> &[u8] {
        self.path.strip_suffix(b"/").unwrap_or(&self.path)
    }

    /// The folder of the topmost layer that has it: the one whose attributes count.
    pub(crate) fn folder(&self) -> BorrowedFd<'_> {
        self.trails[self.frame().members[0]].here()
    }

    /// The folder in one of its layers.
    pub(crate) fn folder_of(&self, layer: usize) -> BorrowedFd<'_> {
        self.trails[layer].here()
    }

    /// The topmost entry of the current name; none if it has gone since it was listed.
    pub(crate) fn find(&self) -> io::Result<Option<Found>> {
        self.find_from(0).map(|found| found.map(|(_, found)| found))
    }

    fn find_from(&self, member: usize) -> io::Result<Option<(usize, Found)>> {
        for (index, &layer) in self.frame().members.iter().enumerate().skip(member) {
            match statat(self.trails[layer].here(), self.name(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => return Ok(Some((index, Found { layer, meta: Meta::new(&stat) }))),
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(at(self.path(), errno)),
            }
        }
        Ok(None)
    }

    /// Opens what a folder is made of, as overlayfs would look it up: down to the
    /// first layer where it is opaque, or where the name is no folder.
    pub(crate) fn below(&self) -> io::Result<Below> {
        let mut below = Below { members: Vec::new(), opaque: false };
        let mut from = 0;
        while let Some((index, found)) = self.find_from(from)? {
            if found.meta.kind != Kind::Folder {
                below.opaque = !below.members.is_empty();
                break;
            }
            let fault = |cause: io::Error| at(self.path(), cause);
            match self.trails[found.layer].open(self.name()) {
                Ok(folder) => {
                    below.opaque = Attributes::list(Holder::Open(folder.as_fd())).map_err(fault)?.is_opaque()?;
                    below.members.push((found.layer, folder));
                }
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(fault(errno.into())),
            }
            if below.opaque {
                break;
            }
            from = index + 1;
        }
        Ok(below)
    }

    /// Goes down into the folder of the current name.
    pub(crate) fn enter(&mut self, members: Vec<(usize, OwnedFd)>) -> io::Result<()> {
        let mut layers = Vec::with_capacity(members.len());
        for (layer, folder) in members {
            self.trails[layer].enter(folder)?;
            layers.push(layer);
        }
        self.path.push(b'/');
        self.read(layers)
    }

    /// Goes up again, to the entry that was entered. False at the top: the walk is over.
    pub(crate) fn leave(&mut self) -> io::Result<bool> {
        let frame = self.frames.pop().expect("a walk is over once the top is left");
        if self.frames.is_empty() {
            return Ok(false);
        }
        for layer in frame.members {
            self.trails[layer].leave().map_err(|cause| at(&self.path, cause))?;
        }
        self.path.truncate(frame.base - 1);
        Ok(true)
    }

    /// Puts the current folder on record, so that it can be found again later.
    /// A path would do too, but paths have no bound and share most of their length.
    pub(crate) fn place(&mut self) -> io::Result<Place> {
        let known = self.frames.iter().rposition(|frame| frame.place.is_some()).expect("the top is on record");
        let mut place = self.frames[known].place.expect("this one is on record");
        for index in known + 1..self.frames.len() {
            let name = current(&self.frames[index - 1]).into();
            self.places.push((place, name));
            let number = u32::try_from(self.places.len() - 1).map_err(|_| io::Error::other("too many folders"))?;
            place = Place(number);
            self.frames[index].place = Some(place);
        }
        Ok(place)
    }

    /// The names that lead from the top to a folder on record.
    pub(crate) fn way(&self, mut place: Place) -> Vec<&CStr> {
        let mut way = Vec::new();
        while place != Place(0) {
            let (above, name) = &self.places[place.0 as usize];
            way.push(&**name);
            place = *above;
        }
        way.reverse();
        way
    }

    /// The path of an entry in a folder on record.
    pub(crate) fn path_of(&self, place: Place, name: &CStr) -> Vec<u8> {
        let mut names = self.way(place);
        names.push(name);
        names.iter().map(|name| name.to_bytes()).collect::<Vec<_>>().join(&b'/')
    }

    /// The name of the entry, to keep.
    pub(crate) fn name_owned(&self) -> CString {
        self.name().to_owned()
    }
}

fn current(frame: &Frame) -> &CStr {
    name(&frame.names.bytes, frame.names.starts[frame.next - 1])
}
