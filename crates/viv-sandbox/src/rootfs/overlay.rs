//! One overlay under an id mapping.
//!
//! Kernels from 6.15 on take layers by descriptor, attached anywhere or nowhere. To older ones they are named, while
//! they are attached (`attached`). The first is tried first, and what a kernel refused is not tried again.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use super::{IdRange, RootError, Step, attached};
use crate::linux;
use crate::store::driver::is_btrfs;
use crate::store::layer::{PARTS, WORK};
use crate::sys::btrfs::filesystem_name;
use crate::sys::creds::ActingAs;
use crate::sys::idmap::idmap_mount;

/// Mounts `lowers` (topmost first) under one part of a writable layer.
///
/// `stage` is on a filesystem of its own, and holds an empty folder.
pub(super) fn mount(
    stage: &Path,
    mapping: Option<&OwnedFd>,
    lowers: &[PathBuf],
    writable: &Path,
    part: &str,
    target: &Path,
    ids: IdRange,
) -> Result<(), RootError> {
    let (upper, work) = (Path::new(PARTS).join(part), Path::new(WORK).join(part));
    make_upper(&writable.join(&upper), lowers, ids).step(|| format!("make the writable layer of {part}"))?;
    fs::create_dir_all(writable.join(&work)).step(|| "make the overlay's work folder".to_owned())?;
    let paths = lowers;
    let lowers = lowers
        .iter()
        .map(|lower| layer_folder(lower, mapping, true).step(|| format!("map the ids of {}", lower.display())))
        .collect::<Result<Vec<_>, _>>()?;
    let layer = layer_folder(writable, mapping, false).step(|| format!("map the ids of {}", writable.display()))?;
    let below = |path: &Path| openat(&layer, path, FOLDER | OFlags::NOFOLLOW, Mode::empty());
    let upper = below(&upper).step(|| "open the writable layer".to_owned())?;
    let work = below(&work).step(|| "open the overlay's work folder".to_owned())?;
    let mut layers = Layers { lowers, upper: Some((upper, work)), numbers_repeat: false };
    if numbers_may_repeat(paths, writable).step(|| "look where its layers are".to_owned())? {
        layers.numbers_repeat = true;
        layers.lowers.push(apart(stage, mapping.is_some()).step(|| "open the stage".to_owned())?);
    }

    // The overlay keeps these credentials and makes its work folder with them.
    // An id that the mapping does not know could not own that folder, and the
    // overlay would come up read-only without a word.
    let acting = ActingAs::id(ids.base).step(|| "take the mapped root's id".to_owned())?;
    let flags = MountFlags::NODEV;
    let mounted = make(&layers, flags, || {
        let detached = layers.lowers.iter().chain([&layer]).filter(|_| mapping.is_some());
        attached::mount(&layers, &detached.collect::<Vec<_>>(), target, flags)
    });
    let mounted =
        mounted.and_then(|overlay| Ok(move_mount(&overlay, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?));
    drop(acting);
    mounted.map_err(|source: io::Error| {
        let step = match blocking_mount(mapping, paths) {
            Some(mount) => format!("show a part of what is mounted together: {} is mounted there", mount.display()),
            None => match mapping.and_then(|_| why_no_mapped_layers()) {
                Some(why) => format!("mount an overlay on {}: {why}", target.display()),
                None => format!("mount an overlay on {}", target.display()),
            },
        };
        RootError { step, source }
    })
}

/// The first kernel whose overlays take layers that show mapped ids.
const MAPPED_LAYERS_SINCE: (u32, u32) = (5, 19);

/// Why root cannot have sandboxes with this kernel, if it is too old. Ordinary users need no mapped layers.
pub(crate) fn why_no_mapped_layers() -> Option<String> {
    let (major, minor) = MAPPED_LAYERS_SINCE;
    // One whose version cannot be read is not taken for an old one.
    linux::version().is_some_and(|version| version < MAPPED_LAYERS_SINCE).then(|| {
        let release = linux::release();
        format!("Linux {release} has no overlays of layers under mapped ids; {major}.{minor} and newer have")
    })
}

/// What the kernel keeps an ordinary user from leaving out, and so from using what it is mounted on.
fn blocking_mount(mapping: Option<&OwnedFd>, lowers: &[PathBuf]) -> Option<PathBuf> {
    if mapping.is_some() { None } else { lowers.iter().find_map(|lower| mount_below(lower)) }
}

/// The first mount somewhere below a folder.
pub(crate) fn mount_below(folder: &Path) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    points.into_iter().find(|point| *point != folder && point.starts_with(folder)).map(Path::to_owned)
}

/// Mounts folders one above the other (topmost first), read-only, without mapping, attached nowhere.
pub(crate) fn mount_lowers(folders: &[PathBuf]) -> io::Result<OwnedFd> {
    let flags = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    make(&Layers::open(folders)?, flags, || attached::mount_lowers(folders, flags))
}

const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// What an overlay is made of, each opened as a place.
#[derive(Debug)]
pub(super) struct Layers {
    /// The topmost first.
    pub(super) lowers: Vec<OwnedFd>,
    /// Where what is written goes, and the work folder.
    pub(super) upper: Option<(OwnedFd, OwnedFd)>,
    /// Whether inodes in them may have the same numbers, so that folders are to be given others.
    pub(super) numbers_repeat: bool,
}

impl Layers {
    /// Opens folders to be put one above the other.
    pub(super) fn open(folders: &[PathBuf]) -> io::Result<Self> {
        let open = |folder| Ok(openat(CWD, folder, FOLDER | OFlags::NOFOLLOW, Mode::empty())?);
        Ok(Self { lowers: folders.iter().map(open).collect::<io::Result<_>>()?, upper: None, numbers_repeat: false })
    }
}

/// A layer must mean the same above anything else later, so folders are never kept as a reference to below. What a
/// foreign layer says of that kind is not followed.
pub(super) const NO_REDIRECTS: (&str, &str) = ("redirect_dir", "nofollow");

/// Has an overlay of several filesystems give its folders numbers of its own, and files the device of theirs.
pub(super) const OWN_NUMBERS: (&str, &str) = ("xino", "off");

/// Whether a layer below is in another subvolume of the btrfs that is written to, and not among those that the store
/// keeps apart by their numbers (`store::seed`): the machine's own folders, and layers from before it did.
fn numbers_may_repeat(lowers: &[PathBuf], writable: &Path) -> io::Result<bool> {
    if !is_btrfs(writable)? {
        return Ok(false);
    }
    // layers/active/<instance>
    let store = writable.ancestors().nth(2).unwrap_or(writable);
    let (ours, numbered) = (fs::metadata(writable)?.dev(), fs::metadata(store)?.dev());
    let name = filesystem_name(File::open(writable)?)?;
    for lower in lowers {
        let device = fs::metadata(lower)?.dev();
        let is_apart = device == ours || device == numbered && lower.starts_with(store);
        if !is_apart && is_btrfs(lower)? && filesystem_name(File::open(lower)?)? == name {
            return Ok(true);
        }
    }
    Ok(false)
}

/// An empty folder on another filesystem, to be put below all others.
fn apart(stage: &Path, detached: bool) -> io::Result<OwnedFd> {
    let folder = stage.join("apart");
    fs::create_dir_all(&folder)?;
    if !detached {
        return Ok(openat(CWD, &folder, FOLDER | OFlags::NOFOLLOW, Mode::empty())?);
    }
    Ok(open_tree(CWD, &folder, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?)
}

/// Keeps the overlay's marks where an ordinary user may write them.
pub(super) const USER_MARKS: &str = "userxattr";

pub(super) fn marks_are_the_users() -> bool {
    viv_layer::Marks::of_this_process() == viv_layer::Marks::User
}

/// Set once this kernel did by name what it had not done by descriptor.
static BY_NAME: AtomicBool = AtomicBool::new(false);

/// Makes an overlay that is attached nowhere; `by_name` is how to on a kernel that does not take descriptors.
fn make(layers: &Layers, flags: MountFlags, by_name: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
    if BY_NAME.load(Ordering::Relaxed) {
        return by_name();
    }
    let refused = match by_descriptor(layers, flags) {
        Ok(overlay) => return Ok(overlay),
        Err(refused) => refused,
    };
    let named = by_name();
    BY_NAME.fetch_or(named.is_ok(), Ordering::Relaxed);
    named.map_err(|error| match refused {
        Refused::Descriptor => error,
        // Then the layers are what it did not like, and here it said why.
        Refused::Layers(why) => why,
    })
}

/// What the kernel did not take.
enum Refused {
    /// Any layer by descriptor: before 6.13, and up to 6.14 when it is opened as a place only.
    Descriptor,
    /// These layers. Some kernels take descriptors, but not of what is attached nowhere.
    Layers(io::Error),
}

impl From<Errno> for Refused {
    fn from(error: Errno) -> Self {
        Self::Layers(error.into())
    }
}

fn by_descriptor(layers: &Layers, flags: MountFlags) -> Result<OwnedFd, Refused> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let set = |key, layer: &OwnedFd| match fsconfig_set_fd(&context, key, layer) {
        Err(Errno::INVAL | Errno::BADF) => Err(Refused::Descriptor),
        result => Ok(result?),
    };
    for lower in &layers.lowers {
        set("lowerdir+", lower)?;
    }
    if let Some((upper, work)) = &layers.upper {
        set("upperdir", upper)?;
        set("workdir", work)?;
    }
    fsconfig_set_string(&context, NO_REDIRECTS.0, NO_REDIRECTS.1)?;
    if layers.numbers_repeat {
        fsconfig_set_string(&context, OWN_NUMBERS.0, OWN_NUMBERS.1)?;
    }
    if marks_are_the_users() {
        fsconfig_set_flag(&context, USER_MARKS)?;
    }
    fsconfig_create(&context).map_err(|error| Refused::Layers(with_log(&context, error)))?;
    // The attributes of a mount have the numbers of the flags.
    let attributes = MountAttrFlags::from_bits_retain(flags.bits());
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// The folder of what is written. It stands for the topmost folder below it, so it looks like that.
fn make_upper(upper: &Path, lowers: &[PathBuf], ids: IdRange) -> io::Result<()> {
    if upper.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(upper)?;
    if let Some(below) = lowers.first() {
        let below = fs::metadata(below)?;
        // The machine's own folders belong to nobody in a user's namespace, where the number for that is somebody.
        let owned = !ids.is_identity() || below.uid() != OVERFLOW_ID;
        if owned {
            std::os::unix::fs::chown(upper, Some(below.uid()), Some(below.gid()))?;
        }
        fs::set_permissions(upper, below.permissions())?;
    }
    Ok(())
}

/// The id under which a namespace shows ids that it does not have.
const OVERFLOW_ID: u32 = 65_534;

/// A folder that a root is made of, as its ids are to be seen.
fn layer_folder(folder: &Path, mapping: Option<&OwnedFd>, read_only: bool) -> io::Result<OwnedFd> {
    match mapping {
        Some(mapping) => idmapped(folder, mapping.as_fd(), read_only),
        None => Ok(openat(CWD, folder, FOLDER | OFlags::NOFOLLOW, Mode::empty())?),
    }
}

/// Filesystems learned it one by one; tmpfs, for one, with 6.3.
const NOT_MAPPABLE: &str = "its filesystem cannot show mapped ids with this kernel (hint: ext4, xfs and btrfs can)";

/// A private clone of a folder's mount that shows mapped ids.
fn idmapped(folder: &Path, mapping: BorrowedFd<'_>, read_only: bool) -> io::Result<OwnedFd> {
    // A link in the place of a layer would show what it leads to.
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    let mount = open_tree(CWD, folder, flags)?;
    idmap_mount(mount.as_fd(), mapping, read_only).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => io::Error::new(error.kind(), NOT_MAPPABLE),
        _ => error,
    })?;
    Ok(mount)
}

/// The kernel says why in the context's own log.
fn with_log(context: &OwnedFd, error: Errno) -> io::Error {
    let mut log = String::new();
    if let Ok(clone) = context.try_clone() {
        let mut file = File::from(clone);
        let mut buffer = [0; 512];
        while let Ok(length) = io::Read::read(&mut file, &mut buffer) {
            if length == 0 {
                break;
            }
            log.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    }
    io::Error::new(io::Error::from(error).kind(), format!("{error}: {}", log.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The older way costs a thread and a namespace, and has fewer layers.
    #[test]
    fn a_new_kernel_is_given_descriptors() {
        if linux::version() < Some((6, 15)) || !rustix::process::geteuid().is_root() {
            return eprintln!("PASSED OVER: it takes Linux 6.15 and root");
        }
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        mount_lowers(&folders.each_ref().map(|folder| folder.path().to_owned())).unwrap();
        assert!(!BY_NAME.load(Ordering::Relaxed));
    }
}
