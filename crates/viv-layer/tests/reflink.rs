//! On a filesystem that can, a copy shares its data with the source.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use common::{Place, assert_same, is_root};
use viv_layer::corpus::{Size, corpus};
use viv_layer::{copy, survey};

/// Half a gigabyte of a file in `/tmp`, as a disk. Btrfs wants more than 100 MB.
const DISK_BYTES: u64 = 512 << 20;

fn run(command: &str, arguments: &[&str], path: &[&Path]) -> bool {
    let output = Command::new(command).args(arguments).args(path).output();
    output.is_ok_and(|output| output.status.success())
}

/// A mounted disk, gone at the end of the test.
struct Disk<'p>(&'p Path);

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        // Lazily, since a test that fails may leave files open; the place around it is removed next.
        assert!(run("umount", &["--lazy"], &[self.0]), "{} stays mounted", self.0.display());
    }
}

fn shares(make: &str, arguments: &[&str]) {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let (image, mount) = (place.path("image"), place.folder("mount"));
    File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    if !run(make, arguments, &[&image]) || !run("mount", &["-o", "loop"], &[&image, &mount]) {
        eprintln!("skipped: no {make} here, or no loop devices");
        return;
    }
    let _disk = Disk(&mount);
    let from = mount.join("from");
    fs::create_dir(&from).unwrap();
    corpus(&from, 3, Size::Small).unwrap();
    let large = File::create(from.join("large")).unwrap();
    large.write_all_at(&vec![b'x'; 8 << 20], 1 << 20).unwrap();
    large.sync_all().unwrap();
    let copied = copy(&from, &mount.join("to")).unwrap();
    assert_same(&from, &mount.join("to"));
    assert_eq!(copied.copied_bytes, 0, "something was not shared");
    assert_eq!(copied.cloned_bytes, copied.survey.apparent_bytes);
    // Changing one does not change the other.
    large.write_all_at(b"changed", 2 << 20).unwrap();
    let mut read = [0; 7];
    File::open(mount.join("to/large")).unwrap().read_exact_at(&mut read, 2 << 20).unwrap();
    assert_eq!(&read, b"xxxxxxx");
    // To another filesystem everything is copied, and nothing is lost.
    let elsewhere = place.path("elsewhere");
    let copied = copy(&mount.join("to"), &elsewhere).unwrap();
    assert_same(&mount.join("to"), &elsewhere);
    assert_eq!(copied.cloned_bytes, 0);
    assert!(copied.survey.same_structure(&survey(&elsewhere).unwrap()));
}

#[test]
fn btrfs_shares() {
    shares("mkfs.btrfs", &["-q"]);
}

#[test]
fn xfs_shares() {
    shares("mkfs.xfs", &["-q", "-m", "reflink=1"]);
}
