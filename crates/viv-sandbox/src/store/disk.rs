//! A filesystem in a sparse file: how `plain` gives a sandbox a disk that ends.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
};

use crate::ordinary::Standing;
use crate::sys::loopback::LoopDevice;

/// Makes filesystems; every Debian has it.
const MKFS: &str = "mkfs.ext4";

/// Smaller ones have no room for their own book-keeping.
pub(crate) const BYTES_MIN: u64 = 8 << 20;

/// More inodes than usual: sandboxes hold many small files.
pub(crate) const BYTES_PER_INODE: u64 = 8192;

/// How long the last one to have a disk may take to be gone.
const ALONE_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// File name of a disk in its layer's folder.
pub(crate) const FILE: &str = "disk.img";

/// Why there can be none on this machine.
pub(crate) fn why_not() -> Option<String> {
    if !Standing::of_this_process().is_ok_and(|standing| standing == Standing::Root) {
        return Some("a filesystem for each sandbox takes root of the machine".to_owned());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("there are no loop devices (/dev/loop-control)".to_owned());
    }
    let paths = ["/usr/sbin", "/sbin", "/usr/bin", "/usr/local/sbin"];
    if !paths.iter().any(|folder| Path::new(folder).join(MKFS).exists()) {
        return Some(format!("{MKFS} is not installed (Debian: e2fsprogs)"));
    }
    None
}

/// Makes an empty one of this size. It takes as much space as is written to it.
pub(crate) fn make(file: &Path, bytes: u64) -> io::Result<()> {
    File::create_new(file)?.set_len(bytes)?;
    let output = Command::new(MKFS)
        // No space that only root may use.
        .args([
            "-q",
            "-F",
            "-m",
            "0",
            "-b",
            "4096",
            "-i",
            &BYTES_PER_INODE.to_string(),
            "-E",
            "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
        ])
        .arg(file)
        .env("PATH", "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!("{MKFS} failed: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// One that is mounted where nobody sees it, for as long as this lives.
#[derive(Debug)]
pub(crate) struct MountedDisk {
    mount: OwnedFd,
}

impl MountedDisk {
    /// Mounts one that nobody writes to any more. Any number may do so.
    pub(crate) fn mount_sealed(file: &Path) -> io::Result<Self> {
        Self::mount(file, true)
    }

    /// Mounts one that is an instance's. Whoever had it before is waited for: a filesystem that two devices show at a
    /// time is lost, and the mounts of a process that was killed go a moment after it.
    pub(crate) fn mount_alone(file: &Path, read_only: bool) -> io::Result<Self> {
        let until = Instant::now() + ALONE_WITHIN;
        while LoopDevice::find(file)?.is_some() {
            if Instant::now() >= until {
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, "its disk is still mounted by somebody"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Self::mount(file, read_only)
    }

    fn mount(file: &Path, read_only: bool) -> io::Result<Self> {
        let device = LoopDevice::attach(file, read_only)?;
        // What is removed inside gives its space back outside.
        let flags: &[&str] = if read_only { &[] } else { &["discard"] };
        let mount = mount_device(&device, "ext4", read_only, flags)?;
        Ok(Self { mount })
    }

    /// A path to what is in it, for this process.
    pub(crate) fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.mount.as_raw_fd().to_string())
    }

    /// Writes everything out.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(self.path())?)?)
    }

    pub(crate) fn mount_fd(&self) -> &OwnedFd {
        &self.mount
    }
}

/// Mounts a device, detached.
pub(crate) fn mount_device(
    device: &LoopDevice,
    filesystem: &str,
    read_only: bool,
    flags: &[&str],
) -> io::Result<OwnedFd> {
    let context = fsopen(filesystem, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", device.path())?;
    for flag in flags.iter().chain(read_only.then_some(&"ro")) {
        fsconfig_set_flag(&context, *flag)?;
    }
    fsconfig_create(&context)?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOATIME;
    if read_only {
        attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}
