//! Files as block devices. Numbers and layouts are those of `linux/loop.h`.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const CTL_GET_FREE: u64 = 0x4C82;
const CONFIGURE: u64 = 0x4C0A;
const GET_STATUS64: u64 = 0x4C05;

const READ_ONLY: u32 = 1;
const AUTOCLEAR: u32 = 4;

/// Blocks of the device; those of the filesystems on it.
const BLOCK_BYTES: u32 = 4096;

/// Others take devices at the same time; after as many lost races something else is wrong.
const TRIES: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const NO_INFO: Info = Info {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    sizelimit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; 64],
    crypt_name: [0; 64],
    encrypt_key: [0; 32],
    init: [0; 2],
};

/// A file as a device. The kernel takes the device away when nobody has it open or mounted any more.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    path: PathBuf,
    _device: File,
}

impl LoopDevice {
    /// Makes one.
    pub(crate) fn attach(file: &Path, read_only: bool) -> io::Result<Self> {
        let backing = File::options().read(true).write(!read_only).open(file)?;
        let control = File::options().read(true).write(true).open("/dev/loop-control")?;
        for _ in 0..TRIES {
            // SAFETY: this request takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), CTL_GET_FREE as libc::Ioctl) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = File::options().read(true).write(!read_only).open(&path)?;
            let flags = AUTOCLEAR | if read_only { READ_ONLY } else { 0 };
            let config = Config {
                fd: backing.as_raw_fd().cast_unsigned(),
                block_size: BLOCK_BYTES,
                info: Info { flags, ..NO_INFO },
                reserved: [0; 8],
            };
            // SAFETY: the kernel reads a `loop_config`, whose layout this is, and keeps no reference to it.
            let result = unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE as libc::Ioctl, &raw const config) };
            if result == 0 {
                return Ok(Self { path, _device: device });
            }
            match io::Error::last_os_error() {
                // Somebody else was faster.
                error if error.raw_os_error() == Some(libc::EBUSY) => {}
                error => return Err(error),
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "every loop device was taken by somebody else"))
    }

    /// The device that a file is attached to already, whoever did it and wherever it is mounted.
    pub(crate) fn find(file: &Path) -> io::Result<Option<Self>> {
        let wanted = fs::metadata(file)?;
        for entry in fs::read_dir("/sys/block")? {
            let name = entry?.file_name();
            let Some(name) = name.to_str().filter(|name| name.starts_with("loop")) else { continue };
            if !Path::new("/sys/block").join(name).join("loop/backing_file").exists() {
                continue;
            }
            let path = Path::new("/dev").join(name);
            let Ok(device) = File::open(&path) else { continue };
            if status(&device).is_ok_and(|info| info.device == wanted.dev() && info.inode == wanted.ino()) {
                return Ok(Some(Self { path, _device: device }));
            }
        }
        Ok(None)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn status(device: impl AsFd) -> io::Result<Info> {
    let mut info = NO_INFO;
    // SAFETY: the kernel writes a `loop_info64`, whose layout this is, and keeps no reference to it.
    let result = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), GET_STATUS64 as libc::Ioctl, &raw mut info) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(info) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_the_kernels_sizes() {
        assert_eq!((size_of::<Info>(), size_of::<Config>()), (232, 304));
    }
}
