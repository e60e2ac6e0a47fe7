//! What btrfs can do with subvolumes. Numbers and layouts are those of `linux/btrfs.h`.

use std::ffi::CStr;
use std::fmt::Write;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

const MAGIC: u32 = 0x94;
const SUBVOL_CREATE: u64 = write_request(14, size_of::<VolArgs>());
const SNAP_DESTROY: u64 = write_request(15, size_of::<VolArgs>());
const TREE_SEARCH: u64 = write_request(17, size_of::<TreeSearch>()) | READ;
const INO_LOOKUP: u64 = write_request(18, size_of::<InoLookup>()) | READ;
const WAIT_SYNC: u64 = write_request(22, size_of::<u64>());
const SNAP_CREATE_V2: u64 = write_request(23, size_of::<VolArgs2>());
const START_SYNC: u64 = read_request(24, size_of::<u64>());
const SUBVOL_GETFLAGS: u64 = read_request(25, size_of::<u64>());
const SUBVOL_SETFLAGS: u64 = write_request(26, size_of::<u64>());
const FS_INFO: u64 = read_request(31, size_of::<FsInfo>());
const QUOTA_CTL: u64 = write_request(40, size_of::<QuotaCtl>()) | READ;
const QUOTA_RESCAN: u64 = write_request(44, size_of::<[u64; 8]>());
const QGROUP_LIMIT: u64 = read_request(43, size_of::<QgroupLimit>());

/// `BTRFS_SUBVOL_RDONLY`.
const READ_ONLY: u64 = 1 << 1;
/// `BTRFS_QUOTA_CTL_ENABLE`.
const QUOTA_ENABLE: u64 = 1;
/// `BTRFS_QGROUP_LIMIT_MAX_RFER`.
const LIMIT_REFERENCED: u64 = 1;
/// `BTRFS_FIRST_FREE_OBJECTID`: the root folder of every subvolume has this inode number.
pub(crate) const SUBVOLUME_INODE: u64 = 256;

const WRITE: u64 = 1 << 30;
const READ: u64 = 2 << 30;

const fn request(direction: u64, number: u64, size: usize) -> u64 {
    direction | ((size as u64) << 16) | ((MAGIC as u64) << 8) | number
}

const fn write_request(number: u64, size: usize) -> u64 {
    request(WRITE, number, size)
}

const fn read_request(number: u64, size: usize) -> u64 {
    request(READ, number, size)
}

#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct VolArgs2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

#[repr(C)]
struct InoLookup {
    treeid: u64,
    objectid: u64,
    name: [u8; 4080],
}

#[repr(C)]
struct TreeSearch {
    /// 0: the tree of the subvolume that is asked.
    tree: u64,
    min_objectid: u64,
    max_objectid: u64,
    min_offset: u64,
    max_offset: u64,
    min_transid: u64,
    max_transid: u64,
    min_type: u32,
    max_type: u32,
    items: u32,
    unused: u32,
    more_unused: [u64; 4],
    found: [u8; 3992],
}

#[repr(C)]
struct FsInfo {
    max_id: u64,
    num_devices: u64,
    fsid: [u8; 16],
    rest: [u8; 992],
}

#[repr(C)]
struct QuotaCtl {
    command: u64,
    status: u64,
}

#[repr(C)]
struct QgroupLimit {
    qgroup: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved_referenced: u64,
    reserved_exclusive: u64,
}

fn ioctl<T>(fd: impl AsFd, request: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: the request's number holds the size of `T`, which is the layout that the kernel reads and writes for it;
    // `argument` is borrowed for the call, and the kernel keeps no reference.
    let result = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as libc::Ioctl, std::ptr::from_mut(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn named<const N: usize>(name: &CStr) -> io::Result<[u8; N]> {
    let bytes = name.to_bytes_with_nul();
    let mut field = [0; N];
    field.get_mut(..bytes.len()).ok_or(io::ErrorKind::InvalidFilename)?.copy_from_slice(bytes);
    Ok(field)
}

/// Makes an empty subvolume.
pub(crate) fn create_subvolume(parent: impl AsFd, name: &CStr) -> io::Result<()> {
    ioctl(parent, SUBVOL_CREATE, &mut VolArgs { fd: 0, name: named(name)? })
}

/// Makes a subvolume that shares everything with another until one of them changes.
pub(crate) fn snapshot(source: impl AsFd, parent: impl AsFd, name: &CStr) -> io::Result<()> {
    let fd = i64::from(source.as_fd().as_raw_fd());
    ioctl(parent, SNAP_CREATE_V2, &mut VolArgs2 { fd, transid: 0, flags: 0, unused: [0; 4], name: named(name)? })
}

/// Removes a subvolume with all that is in it; the space is given back in the background.
pub(crate) fn destroy_subvolume(parent: impl AsFd, name: &CStr) -> io::Result<()> {
    ioctl(parent, SNAP_DESTROY, &mut VolArgs { fd: 0, name: named(name)? })
}

/// Makes a subvolume read-only.
pub(crate) fn set_read_only(subvolume: impl AsFd) -> io::Result<()> {
    let mut flags = 0_u64;
    ioctl(&subvolume, SUBVOL_GETFLAGS, &mut flags)?;
    if flags & READ_ONLY == 0 {
        flags |= READ_ONLY;
        ioctl(&subvolume, SUBVOL_SETFLAGS, &mut flags)?;
    }
    Ok(())
}

/// The number of the subvolume that a folder lies in.
pub(crate) fn subvolume_number(folder: impl AsFd) -> io::Result<u64> {
    let mut lookup = InoLookup { treeid: 0, objectid: SUBVOLUME_INODE, name: [0; 4080] };
    ioctl(folder, INO_LOOKUP, &mut lookup)?;
    Ok(lookup.treeid)
}

/// The highest inode number in the subvolume that a folder lies in. What is made there from now on has higher ones.
pub(crate) fn highest_inode(folder: impl AsFd) -> io::Result<u64> {
    /// `BTRFS_LAST_FREE_OBJECTID`: what is above is no inode.
    const LAST: u64 = 0_u64.wrapping_sub(256);
    let is_any_from = |first: u64| -> io::Result<bool> {
        let mut search = TreeSearch {
            tree: 0,
            min_objectid: first,
            max_objectid: LAST,
            min_offset: 0,
            max_offset: u64::MAX,
            min_transid: 0,
            max_transid: u64::MAX,
            min_type: 0,
            max_type: u32::MAX,
            items: 1,
            unused: 0,
            more_unused: [0; 4],
            found: [0; 3992],
        };
        ioctl(&folder, TREE_SEARCH, &mut search)?;
        Ok(search.items > 0)
    };
    // The kernel looks forwards only, so it is asked by halves.
    let (mut there, mut not_there) = (SUBVOLUME_INODE, LAST);
    while there + 1 < not_there {
        let middle = there + (not_there - there) / 2;
        if is_any_from(middle)? { there = middle } else { not_there = middle }
    }
    Ok(there)
}

/// The name of the filesystem, as `/sys/fs/btrfs` has it.
pub(crate) fn filesystem_name(folder: impl AsFd) -> io::Result<String> {
    let mut info = FsInfo { max_id: 0, num_devices: 0, fsid: [0; 16], rest: [0; 992] };
    ioctl(folder, FS_INFO, &mut info)?;
    let mut name = String::new();
    for (index, byte) in info.fsid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            name.push('-');
        }
        let _ = write!(name, "{byte:02x}");
    }
    Ok(name)
}

/// Room that was promised to content which is not written out yet. Nobody else gets it, and `statvfs` counts it as free
/// until it is written: up to half a minute later.
pub(crate) fn promised_bytes(folder: impl AsFd) -> io::Result<u64> {
    let data = Path::new("/sys/fs/btrfs").join(filesystem_name(folder)?).join("allocation/data");
    let read = |name: &str| {
        let text = fs::read_to_string(data.join(name))?;
        text.trim().parse::<u64>().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
    };
    // First it may be used, then it has its place, and only when it is there it counts as used.
    Ok(read("bytes_may_use")?.saturating_add(read("bytes_reserved")?))
}

/// Has what was removed so far be room again: it is with the next transaction, which is up to half a minute away.
/// Content that others have not written out yet is not waited for.
pub(crate) fn give_back_removed(folder: impl AsFd) -> io::Result<()> {
    let mut transaction = 0_u64;
    ioctl(&folder, START_SYNC, &mut transaction)?;
    ioctl(&folder, WAIT_SYNC, &mut transaction)
}

/// Turns quota groups on for a filesystem.
pub(crate) fn enable_quota(folder: impl AsFd) -> io::Result<()> {
    ioctl(folder, QUOTA_CTL, &mut QuotaCtl { command: QUOTA_ENABLE, status: 0 })
}

/// Counts anew what subvolumes refer to, in the background. One that is at it is fine.
pub(crate) fn recount(folder: impl AsFd) -> io::Result<()> {
    match ioctl(folder, QUOTA_RESCAN, &mut [0_u64; 8]) {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(()),
        result => result,
    }
}

/// Limits all that a subvolume refers to, shared or not. Without bytes, takes away the limit that a snapshot has from
/// what it is of.
pub(crate) fn limit_referenced(subvolume: impl AsFd, bytes: Option<u64>) -> io::Result<()> {
    // The kernel's word for no limit.
    const CLEAR: u64 = u64::MAX;
    let qgroup = subvolume_number(&subvolume)?;
    let mut limit = QgroupLimit {
        qgroup,
        flags: LIMIT_REFERENCED,
        max_referenced: bytes.unwrap_or(CLEAR),
        max_exclusive: 0,
        reserved_referenced: 0,
        reserved_exclusive: 0,
    };
    ioctl(subvolume, QGROUP_LIMIT, &mut limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_the_kernels_sizes() {
        assert_eq!((size_of::<VolArgs>(), size_of::<VolArgs2>(), size_of::<InoLookup>()), (4096, 4096, 4096));
        assert_eq!(size_of::<TreeSearch>(), 4096);
        assert_eq!((size_of::<FsInfo>(), size_of::<QuotaCtl>(), size_of::<QgroupLimit>()), (1024, 16, 48));
        assert_eq!(SUBVOL_CREATE, 0x5000_940e);
        assert_eq!(SNAP_CREATE_V2, 0x5000_9417);
        assert_eq!(QGROUP_LIMIT, 0x8030_942b);
    }
}
