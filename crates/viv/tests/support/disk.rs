//! Filesystems of other kinds than the machine's own.

use std::path::PathBuf;
use std::process::Command;

use rustix::mount::{UnmountFlags, unmount};

/// One that is mounted for as long as this lives.
pub struct Disk {
    folder: tempfile::TempDir,
}

impl Disk {
    /// Makes one, and mounts it with these options. What `mount` complains about is the caller's to judge.
    pub fn make(mkfs: &[&str], options: &str, mib: u64) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("viv-disk-").tempdir().unwrap();
        let (file, on) = (folder.path().join("disk.img"), folder.path().join("on"));
        std::fs::File::create(&file).unwrap().set_len(mib << 20).unwrap();
        let made = Command::new(mkfs[0]).args(&mkfs[1..]).arg(&file).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        std::fs::create_dir(&on).unwrap();
        let mounted = Command::new("mount").args(["-o", options]).arg(&file).arg(&on).output().unwrap();
        if mounted.status.success() {
            Ok(Self { folder })
        } else {
            Err(String::from_utf8_lossy(&mounted.stderr).trim().to_owned())
        }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("on")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}
