//! Merging means what the kernel means: what overlayfs shows of a stack, it also
//! shows of the stack's merge, on whatever is below.

mod common;

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use common::{Place, assert_same, is_root};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rustix::fs::{CWD, FileType, Mode, XattrFlags, mknodat, setxattr};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use viv_layer::{Bounds, Form, Packer, copy, merge, merge_onto, unpack};

/// One entry of a random layer. Names are few, so that layers meet.
#[derive(Debug, Clone)]
enum Entry {
    File(u8),
    Link(u8),
    Whiteout,
    HardLinkTo(u8),
    Folder { opaque: bool, below: Vec<(u8, Entry)> },
}

fn entry() -> impl Strategy<Value = Entry> {
    let leaf = prop_oneof![
        3 => any::<u8>().prop_map(Entry::File),
        1 => any::<u8>().prop_map(Entry::Link),
        2 => Just(Entry::Whiteout),
        1 => (0..4_u8).prop_map(Entry::HardLinkTo),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        (prop::bool::weighted(0.25), prop::collection::vec((0..4_u8, inner), 0..4))
            .prop_map(|(opaque, below)| Entry::Folder { opaque, below })
    })
}

fn layer() -> impl Strategy<Value = Vec<(u8, Entry)>> {
    prop::collection::vec((0..4_u8, entry()), 0..6)
}

fn name(number: u8) -> &'static str {
    ["a", "b", "c", "d"][usize::from(number)]
}

fn make(folder: &Path, entries: &[(u8, Entry)], number: u32) {
    for (name_number, entry) in entries {
        let path = folder.join(name(*name_number));
        if path.symlink_metadata().is_ok() {
            continue;
        }
        match entry {
            Entry::File(content) => fs::write(&path, [*content]).unwrap(),
            Entry::Link(target) => std::os::unix::fs::symlink(format!("to-{target}"), &path).unwrap(),
            Entry::Whiteout => mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), 0).unwrap(),
            Entry::HardLinkTo(other) => {
                let other = folder.join(name(*other));
                if other.symlink_metadata().is_ok_and(|found| found.is_file()) {
                    fs::hard_link(other, &path).unwrap();
                }
            }
            Entry::Folder { opaque, below } => {
                fs::create_dir(&path).unwrap();
                make(&path, below, number);
                if *opaque {
                    setxattr(&path, "trusted.overlay.opaque", b"y", XattrFlags::empty()).unwrap();
                }
                std::os::unix::fs::chown(&path, Some(number), None).unwrap();
            }
        }
    }
}

/// Everything below a folder as the kernel shows it: kinds, owners and contents.
fn view(folder: &Path, prefix: &str, lines: &mut Vec<String>) {
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    for name in names {
        let path = folder.join(&name);
        // Overlayfs lists whiteouts of folders that it does not merge, but does not find them.
        let Ok(found) = path.symlink_metadata() else { continue };
        assert!(!found.file_type().is_char_device(), "a whiteout shows: {}", path.display());
        let line = format!("{prefix}{}", name.to_string_lossy());
        if found.is_dir() {
            lines.push(format!("{line}/ {}", found.uid()));
            view(&path, &format!("{line}/"), lines);
        } else if found.is_symlink() {
            lines.push(format!("{line} -> {}", fs::read_link(&path).unwrap().display()));
        } else {
            lines.push(format!("{line} {:?}", fs::read(&path).unwrap()));
        }
    }
}

/// Mounts a stack read-only, looks at it, and unmounts it.
fn shown(stack: &[&Path], mount_point: &Path) -> Vec<String> {
    let lower = stack.iter().map(|layer| layer.display().to_string()).collect::<Vec<_>>().join(":");
    let options = format!("lowerdir={lower},redirect_dir=off,index=off,metacopy=off");
    let options = CString::new(options).unwrap();
    mount("overlay", mount_point, "overlay", MountFlags::RDONLY, &*options).unwrap();
    let top = fs::metadata(mount_point).unwrap();
    let mut lines = vec![format!("/ {}", top.uid())];
    view(mount_point, "", &mut lines);
    unmount(mount_point, UnmountFlags::DETACH).unwrap();
    lines
}

/// Runs something in a thread whose mounts nobody else sees.
#[expect(unsafe_code, reason = "unsharing is unsafe where it concerns descriptors, which it does not here")]
fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let run = || {
        // SAFETY: neither memory nor the descriptor table is unshared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

struct Stack {
    place: Place,
    layers: Vec<PathBuf>,
    base: PathBuf,
}

impl Stack {
    fn new(layers: &[Vec<(u8, Entry)>], base: &[(u8, Entry)]) -> Self {
        let place = Place::large();
        place.folder("mount");
        let mut paths = Vec::new();
        for (number, entries) in layers.iter().enumerate() {
            let path = place.folder(&format!("layer-{number}"));
            make(&path, entries, number as u32 + 1);
            std::os::unix::fs::chown(&path, Some(number as u32 + 1), None).unwrap();
            paths.push(path);
        }
        let base_path = place.folder("base");
        make(&base_path, base, 100);
        Self { place, layers: paths, base: base_path }
    }

    fn layers(&self) -> Vec<&Path> {
        self.layers.iter().map(PathBuf::as_path).collect()
    }

    fn shown(&self, layers: &[&Path]) -> Vec<String> {
        let mut stack = layers.to_vec();
        stack.push(&self.base);
        shown(&stack, &self.place.path("mount"))
    }
}

/// The whole stack, the stack with its upper part merged, and the merge as an OCI layer.
fn check(layers: &[Vec<(u8, Entry)>], base: &[(u8, Entry)]) {
    let stack = Stack::new(layers, base);
    let expected = stack.shown(&stack.layers());
    let merged = stack.place.path("merged");
    let survey = merge(&stack.layers(), &merged).unwrap().survey;
    assert!(survey.same_structure(&viv_layer::survey(&merged).unwrap()), "not what was written");
    assert_eq!(stack.shown(&[&merged]), expected, "merged at once");
    if let [upper @ .., lowest] = stack.layers().as_slice()
        && !upper.is_empty()
    {
        let part = stack.place.path("part");
        merge(upper, &part).unwrap();
        assert_eq!(stack.shown(&[&part, lowest]), expected, "merged in part");
        let rest = stack.place.path("rest");
        merge(&[&part, lowest], &rest).unwrap();
        assert_eq!(stack.shown(&[&rest]), expected, "merged in steps");
    }
    for (form, name) in [(Form::Oci, "image"), (Form::Native, "native")] {
        let mut packer = Packer::new(Vec::new(), form);
        packer.tree("", &merged).unwrap();
        let to = stack.place.folder(name);
        unpack(packer.finish().unwrap().as_slice(), &to, form, &Bounds::default()).unwrap();
        assert_eq!(stack.shown(&[&to]), expected, "as an archive");
        assert_same(&merged, &to);
    }
    let copied = stack.place.path("copied");
    copy(&merged, &copied).unwrap();
    assert_same(&merged, &copied);
}

#[test]
fn a_merge_shows_what_the_stack_shows() {
    if !is_root() {
        return;
    }
    apart(|| {
        let cases =
            ProptestConfig { cases: 100, max_shrink_iters: 300, failure_persistence: None, ..Default::default() };
        let stacks = (prop::collection::vec(layer(), 1..4), layer());
        let run = TestRunner::new(cases).run(&stacks, |(layers, base)| {
            check(&layers, &base);
            Ok(())
        });
        if let Err(failure) = run {
            panic!("{failure}");
        }
    });
}

fn folder(opaque: bool, below: Vec<(u8, Entry)>) -> Entry {
    Entry::Folder { opaque, below }
}

/// The cases that are easily wrong, by name.
#[test]
fn marks_that_still_hide_something_are_kept() {
    if !is_root() {
        return;
    }
    let file = || Entry::File(1);
    apart(|| {
        let base = vec![(0, folder(false, vec![(0, file()), (1, file())])), (1, file())];
        // A folder over a whiteout, over a file, and over an opaque folder: the base's must not show.
        for below in [Entry::Whiteout, file(), folder(true, vec![])] {
            check(&[vec![(0, folder(false, vec![(2, file())]))], vec![(0, below)]], &base);
        }
        // A whiteout over a folder, a whiteout inside, and one that has nothing to hide.
        check(&[vec![(0, Entry::Whiteout)], vec![(0, folder(false, vec![(2, file())]))]], &base);
        check(&[vec![(0, folder(false, vec![(0, Entry::Whiteout)]))], vec![]], &base);
        check(&[vec![(3, Entry::Whiteout)], vec![(3, file())]], &base);
        // A whiteout from below an opaque folder.
        check(&[vec![(0, folder(false, vec![]))], vec![(0, folder(true, vec![(1, Entry::Whiteout)]))]], &base);
    });
}

#[test]
fn hard_links_of_one_layer_stay_together() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let (upper, lower) = (place.folder("upper"), place.folder("lower"));
    fs::create_dir(upper.join("folder")).unwrap();
    fs::create_dir(lower.join("folder")).unwrap();
    for layer in [&upper, &lower] {
        fs::write(layer.join("first"), layer.as_os_str().as_encoded_bytes()).unwrap();
    }
    fs::hard_link(upper.join("first"), upper.join("folder/upper")).unwrap();
    for name in ["folder/lower-1", "folder/lower-2"] {
        fs::hard_link(lower.join("first"), lower.join(name)).unwrap();
    }
    let to = place.path("to");
    merge(&[&upper, &lower], &to).unwrap();
    let inode = |name: &str| fs::metadata(to.join(name)).unwrap().ino();
    assert_eq!(inode("first"), inode("folder/upper"));
    assert_eq!(inode("folder/lower-1"), inode("folder/lower-2"), "their first name is hidden");
    assert_ne!(inode("first"), inode("folder/lower-1"));
    assert_eq!(fs::read(to.join("folder/lower-1")).unwrap(), lower.as_os_str().as_encoded_bytes());
}

/// Overlayfs lists a folder that only one layer has as it is, whiteouts as names that nobody can open: they are left only
/// where there is something to hide them in.
#[test]
fn l10_incident_13_whiteouts_stay_only_in_folders_that_are_below() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let (upper, lower, below) = (place.folder("upper"), place.folder("lower"), place.folder("below"));
    for folder in ["there/deep", "new/deep", "file"] {
        for layer in [&upper, &lower] {
            fs::create_dir_all(layer.join(folder)).unwrap();
        }
        let whiteout = upper.join(folder).join("gone");
        mknodat(CWD, &whiteout, FileType::CharacterDevice, Mode::empty(), 0).unwrap();
        fs::write(lower.join(folder).join("gone"), "").unwrap();
    }
    fs::create_dir_all(below.join("there/deep")).unwrap();
    fs::write(below.join("file"), "").unwrap();
    let names = |folder: &Path| fs::read_dir(folder).unwrap().count();
    for (onto, kept) in [(true, [1, 0, 0]), (false, [1, 1, 1])] {
        let to = place.path(if onto { "onto" } else { "merged" });
        let layers: [&Path; 2] = [&upper, &lower];
        if onto { merge_onto(&layers, &below, &to) } else { merge(&layers, &to) }.unwrap();
        let found = ["there/deep", "new/deep", "file"].map(|folder| names(&to.join(folder)));
        assert_eq!(found, kept, "{to:?}");
    }
}
