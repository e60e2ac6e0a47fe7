//! Filesystems for tests, mounted where nobody else sees them.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::store::disk::mount_device;
use crate::sys::loopback::LoopDevice;

/// xfs makes none that is smaller.
const BYTES: u64 = 320 << 20;

/// How a filesystem that counts projects is made, and the kind it is then.
pub(crate) const WITH_PROJECTS: [&[&str]; 2] = [
    &["mkfs.ext4", "-q", "-b", "4096", "-O", "quota,project", "-E", "quotatype=prjquota"],
    &["mkfs.xfs", "-q", "-s", "size=4096"],
];

/// One that lives as long as this.
#[derive(Debug)]
pub(crate) struct TestDisk {
    path: PathBuf,
    _mount: OwnedFd,
    _folder: tempfile::TempDir,
}

impl TestDisk {
    /// Makes and mounts one.
    pub(crate) fn mount(mkfs: &[&str], options: &[&str]) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("disk.img");
        File::create_new(&file)?.set_len(BYTES)?;
        let made = Command::new(mkfs[0]).args(&mkfs[1..]).arg(&file).output()?;
        assert!(made.status.success(), "{made:?}");
        let kind = mkfs[0].trim_start_matches("mkfs.");
        let mount = mount_device(&LoopDevice::attach(&file, false)?, kind, false, options)?;
        let path = Path::new("/proc/self/fd").join(mount.as_raw_fd().to_string());
        Ok(Self { path, _mount: mount, _folder: folder })
    }

    /// One that counts projects. A kernel that cannot is passed over, unless `VIV_TEST_QUOTA` says that it can.
    pub(crate) fn with_projects(mkfs: &[&str]) -> Option<Self> {
        match Self::mount(mkfs, &["prjquota"]) {
            Ok(disk) => Some(disk),
            Err(error) if std::env::var_os("VIV_TEST_QUOTA").is_none() => {
                eprintln!("PASSED OVER: {} with project quota: {error} (make quota runs this)", mkfs[0]);
                None
            }
            Err(error) => panic!("{mkfs:?}: {error}"),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// A small disk in memory, mounted on a folder for as long as this lives.
#[derive(Debug)]
pub(crate) struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None`, told on standard error, for who may not mount.
    pub(crate) fn mount(on: &Path) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("passed over: only root can mount a small disk");
            return None;
        }
        let options = Some(c"size=1m");
        rustix::mount::mount("viv-small", on, "tmpfs", rustix::mount::MountFlags::empty(), options).unwrap();
        Some(Self(on.to_owned()))
    }

    /// Takes all the room that is left.
    pub(crate) fn fill(&self) {
        let mut filler = File::create(self.0.join("filler")).unwrap();
        while filler.write_all(&[7; 4096]).is_ok() {}
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Waits until it is so, or fails.
pub(crate) fn eventually(mut so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !so() {
        assert!(Instant::now() < until, "not so after 20 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}
