//! Copies are the same as their source, whatever is in it.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

use common::{Place, assert_same, is_root};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, mkdirat, openat};
use viv_layer::corpus::Size;
use viv_layer::{Form, Packer, content, copy, lines, merge, remove, survey};

#[test]
fn a_copy_is_the_same() {
    if !is_root() {
        return;
    }
    let place = Place::large();
    let from = place.corpus("from", Size::Full);
    let before = survey(&from).unwrap();
    let copied = copy(&from, &place.path("to")).unwrap();
    assert_same(&from, &place.path("to"));
    assert!(copied.survey.same_structure(&before));
    let after = survey(&place.path("to")).unwrap();
    assert!(after.disk_bytes < before.disk_bytes * 2, "holes were filled: {after:?}, {before:?}");
    assert!(before.entries > 10_000 && before.apparent_bytes > 1 << 40);
    for expected in ["trusted.overlay.opaque=y", "user.one=1", "security.capability=", "acl_default=", "acl_access="] {
        let copied = lines(&place.path("to")).unwrap();
        assert!(copied.iter().any(|line| line.contains(expected)), "{expected} is not even looked at");
    }
    let inherited = |line: &String| line.contains("heir/before") && line.contains("acl");
    assert!(!lines(&place.path("to")).unwrap().iter().any(inherited));
}

#[test]
fn a_single_layer_merged_is_itself() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let from = place.corpus("from", Size::Small);
    let merged = merge(&[&from], &place.path("to")).unwrap();
    assert_same(&from, &place.path("to"));
    assert!(merged.survey.same_structure(&survey(&from).unwrap()));
    // Hard links to the same layer twice: everything of the lower is hidden.
    merge(&[&from, &from], &place.path("twice")).unwrap();
    assert_same(&from, &place.path("twice"));
}

#[test]
fn a_corpus_depends_on_its_seed_alone() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    for (name, seed) in [("a", 1), ("b", 1), ("c", 2)] {
        viv_layer::corpus::corpus(&place.folder(name), seed, Size::Small).unwrap();
    }
    // Not the whole: folders that nothing dressed are as old as they are.
    let files = |name| {
        let mut lines = lines(&place.path(name)).unwrap();
        lines.retain(|line| line.starts_with("many/") && line.contains(" f "));
        lines
    };
    assert_eq!(files("a"), files("b"));
    assert_ne!(files("a"), files("c"));
}

#[test]
fn a_target_must_be_empty_and_elsewhere() {
    let place = Place::new();
    let from = place.folder("from");
    fs::write(from.join("file"), "x").unwrap();
    let full = place.folder("full");
    fs::write(full.join("other"), "y").unwrap();
    assert_eq!(copy(&from, &full).unwrap_err().kind(), std::io::ErrorKind::DirectoryNotEmpty);
    fs::create_dir(from.join("inside")).unwrap();
    let inside = copy(&from, &from.join("inside")).unwrap_err();
    assert!(inside.to_string().contains("is where the copy goes"), "{inside}");
    assert!(merge(&[], &place.path("none")).is_err());
    assert_eq!(copy(&place.path("missing"), &place.path("to")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn a_hole_and_its_zeros_have_one_content() {
    let place = Place::new();
    let (sparse, dense) = (place.folder("sparse"), place.folder("dense"));
    let mut bytes = vec![0; 1_000_000];
    bytes[300_000..300_010].fill(b'x');
    bytes[999_999] = b'y';
    fs::write(dense.join("file"), &bytes).unwrap();
    let file = File::create(sparse.join("file")).unwrap();
    file.set_len(1_000_000).unwrap();
    file.write_all_at(&[b'x'; 10], 300_000).unwrap();
    file.write_all_at(b"y", 999_999).unwrap();
    let level = |name: &str| {
        for path in [place.path(name).join("file"), place.path(name)] {
            File::open(path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        }
    };
    level("sparse");
    level("dense");
    assert_eq!(content(&sparse).unwrap(), content(&dense).unwrap());
    file.write_all_at(b"y", 999_998).unwrap();
    level("sparse");
    assert_ne!(content(&sparse).unwrap(), content(&dense).unwrap(), "content is not looked at");
    assert!(survey(&sparse).unwrap().same_structure(&survey(&dense).unwrap()), "content is looked at");
}

#[test]
fn every_attribute_counts() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let folder = place.folder("layer");
    let path = |name: &str| folder.join(name);
    fs::write(path("file"), "x").unwrap();
    fs::write(path("other"), "x").unwrap();
    std::os::unix::fs::symlink("a", path("link")).unwrap();
    let mut seen = vec![survey(&folder).unwrap()];
    let mut changed = |what: &str| {
        let now = survey(&folder).unwrap();
        assert!(!seen.iter().any(|before| before.same_structure(&now)), "{what} is not seen");
        seen.push(now);
    };
    File::open(path("file")).unwrap().set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(5, 1)).unwrap();
    changed("a time");
    File::open(path("file")).unwrap().set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(5, 2)).unwrap();
    changed("a nanosecond");
    fs::set_permissions(path("file"), std::os::unix::fs::PermissionsExt::from_mode(0o4644)).unwrap();
    changed("a mode");
    std::os::unix::fs::chown(path("file"), Some(5), None).unwrap();
    changed("an owner");
    let set = |name: &str, value: &[u8]| {
        rustix::fs::setxattr(path("file"), name, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    set("user.a", b"1");
    changed("an attribute");
    set("user.a", b"2");
    changed("its value");
    let before = survey(&folder).unwrap();
    set("trusted.overlay.origin", b"where it came from");
    assert!(before.same_structure(&survey(&folder).unwrap()), "bookkeeping is no part of a layer");
    set("trusted.overlay.opaque", b"y");
    changed("a mark");
    fs::remove_file(path("other")).unwrap();
    fs::hard_link(path("file"), path("other")).unwrap();
    changed("a hard link");
    assert_eq!(lines(&folder).unwrap().iter().filter(|line| line.ends_with("other = file")).count(), 1);
    set("trusted.overlay.redirect", b"elsewhere");
    assert!(survey(&folder).is_err() && copy(&folder, &place.path("to")).is_err());
}

/// 20,000 folders inside each other: longer than any path, deeper than any stack.
#[test]
fn deep_trees_are_handled_or_refused() {
    if !is_root() {
        return;
    }
    let place = Place::large();
    let top = place.folder("top");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut folder = openat(CWD, &top, flags, Mode::empty()).unwrap();
    fs::write(top.join("zz"), "shallow").unwrap();
    for level in 0..20_000 {
        mkdirat(&folder, "below", Mode::RWXU).unwrap();
        folder = openat(&folder, "below", flags, Mode::empty()).unwrap();
        if level % 1000 == 999 {
            linkat(CWD, top.join("zz"), &folder, "link", AtFlags::empty()).unwrap();
        }
    }
    let copied = copy(&top, &place.path("to")).unwrap();
    assert_eq!(copied.survey.entries, 20_021);
    assert!(copied.survey.same_structure(&survey(&top).unwrap()));
    assert!(survey(&place.path("to")).unwrap().same_structure(&copied.survey));
    assert_eq!(fs::metadata(place.path("to/zz")).unwrap().nlink(), 21);
    assert_eq!(content(&top).unwrap(), content(&place.path("to")).unwrap());
    assert!(lines(&top).unwrap_err().to_string().contains("too much"));
    let packed = Packer::new(std::io::sink(), Form::Native).tree("", &top).unwrap_err();
    assert!(packed.to_string().contains("longer path"), "{packed}");
    remove(&place.path("to")).unwrap();
    assert!(!place.path("to").exists());
}
