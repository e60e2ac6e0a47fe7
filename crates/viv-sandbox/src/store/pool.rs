//! A btrfs of our own in a file, for data folders on another filesystem.
//!
//! The file is allocated in full, and stays so: a pool that finds the disk
//! under it full would lose writes that it has acknowledged. It is mounted on
//! the folder of the layers, where shims find it; this is the one mount of
//! ours that is not in a shim's mount namespace. It stays while the machine
//! runs, and is made again by whoever opens the data folder after that.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{CWD, FallocateFlags, fallocate};
use rustix::mount::{MoveMountFlags, move_mount};

use super::disk::mount_device;
use super::driver::is_btrfs;
use crate::durable;
use crate::lock::lock_file;
use crate::sys::btrfs;
use crate::sys::loopback::LoopDevice;

const MKFS: &str = "mkfs.btrfs";

/// What a btrfs needs to have room for anything.
pub(crate) const BYTES_MIN: u64 = 256 << 20;

/// Without a size from the user: a quarter of what is free, and no more than this.
const BYTES_MAX: u64 = 64 << 30;

/// Making a filesystem takes seconds at most.
const LOCK_WITHIN: Duration = Duration::from_secs(60);

/// Makes the pool if there is none, and mounts it unless it is mounted.
pub(crate) fn mount(file: &Path, bytes: Option<u64>, on: &Path) -> io::Result<()> {
    let lock = file.with_extension("lock");
    // Two devices on one file would destroy it, so whoever looks for the device holds this.
    let _lock = lock_file(&lock, true, LOCK_WITHIN)?;
    fs::create_dir_all(on)?;
    if is_btrfs(on)? {
        return Ok(());
    }
    let is_new = !file.exists();
    if is_new {
        make(file, bytes)?;
    }
    let device = match LoopDevice::find(file)? {
        Some(device) => device,
        None => LoopDevice::attach(file, false)?,
    };
    // Space that was given back would not be ours any more when it is needed again.
    let mounted = mount_device(&device, "btrfs", false, &["nodiscard"])?;
    move_mount(&mounted, "", CWD, on, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    // The folder is ours alone, so nobody pays for quota groups who did not want them.
    btrfs::enable_quota(File::open(on)?)
}

fn make(file: &Path, bytes: Option<u64>) -> io::Result<()> {
    let folder = file.parent().ok_or(io::ErrorKind::InvalidFilename)?;
    let found = rustix::fs::statvfs(folder)?;
    let free = found.f_bavail * found.f_frsize;
    let bytes = bytes.unwrap_or((free / 4).min(BYTES_MAX)).max(BYTES_MIN);
    let beside = file.with_extension("new");
    if beside.exists() {
        fs::remove_file(&beside)?;
    }
    // Everything that sandboxes write is in it.
    let new = File::options().write(true).create_new(true).mode(0o600).open(&beside)?;
    let made = (|| {
        match fallocate(&new, FallocateFlags::empty(), 0, bytes) {
            // A filesystem that cannot promise space.
            Err(rustix::io::Errno::OPNOTSUPP) => new.set_len(bytes)?,
            result => result?,
        }
        let output = Command::new(MKFS)
            .args(["-q", "-f", "--nodiscard", "--metadata", "single", "--label", "vivarium"])
            .arg(&beside)
            .env("PATH", "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .output()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    io::Error::new(error.kind(), format!("{MKFS} is not installed (Debian: btrfs-progs)"))
                }
                _ => error,
            })?;
        if !output.status.success() {
            return Err(io::Error::other(format!("{MKFS}: {}", String::from_utf8_lossy(&output.stderr).trim())));
        }
        new.sync_all()?;
        durable::rename(&beside, file)
    })();
    if made.is_err() {
        let _ = fs::remove_file(&beside);
    }
    made
}
