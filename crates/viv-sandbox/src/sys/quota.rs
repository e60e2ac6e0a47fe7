//! Project quota: what belongs to a *project* is counted together, and can be limited together. Numbers and layouts are
//! those of `linux/quota.h`, `linux/dqblk_xfs.h` and `linux/fs.h`.
//!
//! A file has the project of the folder that it is made in, if that folder hands its own on. The same calls do for
//! ext4 and xfs.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `PRJQUOTA`.
const OF_PROJECTS: u32 = 2;
/// `Q_GETQUOTA`, `Q_SETQUOTA`, `Q_XGETQSTATV`.
const GET_QUOTA: u32 = 0x0080_0007;
const SET_QUOTA: u32 = 0x0080_0008;
const GET_STATE: u32 = 0x5808;
/// `FS_QSTATV_VERSION1`.
const STATE_VERSION: i8 = 1;
/// `FS_QUOTA_PDQ_ACCT`, `FS_QUOTA_PDQ_ENFD`: projects are counted, and held to their limits.
const COUNTED: u16 = 1 << 4;
const ENFORCED: u16 = 1 << 5;
/// `QIF_BLIMITS`, `QIF_ILIMITS`.
const LIMITS: u32 = 1 | 4;
/// `QIF_DQBLKSIZE`: space is limited in these, whatever the filesystem's blocks are.
const BLOCK_BYTES: u64 = 1024;

/// `FS_IOC_FSGETXATTR`, `FS_IOC_FSSETXATTR`.
const GET_ATTRIBUTES: u64 = 0x801c_581f;
const SET_ATTRIBUTES: u64 = 0x401c_5820;
/// `FS_XFLAG_PROJINHERIT`.
const HANDS_ON: u32 = 0x200;

/// `struct if_dqblk`.
#[repr(C)]
#[derive(Default)]
struct Quota {
    space_limit: u64,
    space_soft_limit: u64,
    space_bytes: u64,
    inode_limit: u64,
    inode_soft_limit: u64,
    inodes: u64,
    space_grace: u64,
    inode_grace: u64,
    valid: u32,
}

/// `struct fs_quota_statv`.
#[repr(C)]
struct State {
    version: i8,
    pad: u8,
    flags: u16,
    rest: [u32; 39],
}

/// `struct fsxattr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    cow_extent_size: u32,
    pad: [u8; 8],
}

/// What a project has, and may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Charged {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
    /// None, where nothing is limited.
    pub(crate) limit: Option<Limit>,
}

/// How much a project may have. Neither can be nothing at all: the kernel takes that for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}

fn call<T>(on: impl AsFd, command: u32, project: u32, argument: &mut T) -> io::Result<()> {
    let command = (command << 8) | OF_PROJECTS;
    // SAFETY: `T` is the layout that the kernel reads and writes for this command, as each caller below has it;
    // `argument` is borrowed for the call, and the kernel keeps no reference.
    let result = unsafe {
        libc::syscall(libc::SYS_quotactl_fd, on.as_fd().as_raw_fd(), command, project, std::ptr::from_mut(argument))
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn ioctl(on: impl AsFd, request: u64, attributes: &mut Attributes) -> io::Result<()> {
    // SAFETY: the request's number holds the size of `Attributes`, which is the layout that the kernel reads and writes
    // for it; they are borrowed for the call, and the kernel keeps no reference.
    let result = unsafe { libc::ioctl(on.as_fd().as_raw_fd(), request as libc::Ioctl, std::ptr::from_mut(attributes)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether the filesystem of a folder counts projects and holds them to their limits right now. A kernel or filesystem
/// that knows nothing of this does not.
pub(crate) fn is_enforced(folder: impl AsFd) -> bool {
    let mut state = State { version: STATE_VERSION, pad: 0, flags: 0, rest: [0; 39] };
    call(folder, GET_STATE, 0, &mut state).is_ok() && state.flags & (COUNTED | ENFORCED) == COUNTED | ENFORCED
}

/// The project that a folder hands on to what is made in it.
pub(crate) fn handed_on(folder: impl AsFd) -> io::Result<Option<u32>> {
    let mut attributes = Attributes::default();
    ioctl(folder, GET_ATTRIBUTES, &mut attributes)?;
    Ok((attributes.flags & HANDS_ON != 0).then_some(attributes.project))
}

/// Gives an empty folder to a project, with all that will be made in it.
pub(crate) fn hand_on(folder: impl AsFd, project: u32) -> io::Result<()> {
    let mut attributes = Attributes::default();
    ioctl(&folder, GET_ATTRIBUTES, &mut attributes)?;
    attributes.flags |= HANDS_ON;
    attributes.project = project;
    ioctl(folder, SET_ATTRIBUTES, &mut attributes)
}

/// What is charged to a project of a folder's filesystem.
pub(crate) fn charged(on: impl AsFd, project: u32) -> io::Result<Charged> {
    let mut quota = Quota::default();
    match call(on, GET_QUOTA, project, &mut quota) {
        // How xfs says that there is nothing.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(Charged::default()),
        result => result?,
    }
    let limits = [quota.space_limit, quota.space_soft_limit, quota.inode_limit, quota.inode_soft_limit];
    let limit = limits.iter().any(|limit| *limit > 0);
    let limit =
        limit.then(|| Limit { bytes: quota.space_limit.saturating_mul(BLOCK_BYTES), inodes: quota.inode_limit });
    Ok(Charged { bytes: quota.space_bytes, inodes: quota.inodes, limit })
}

/// Limits a project of a folder's filesystem, or takes its limit away.
pub(crate) fn limit(on: impl AsFd, project: u32, limit: Option<Limit>) -> io::Result<()> {
    let (bytes, inodes) = match limit {
        Some(limit) if limit.bytes == 0 || limit.inodes == 0 => return Err(io::ErrorKind::InvalidInput.into()),
        Some(limit) => (limit.bytes, limit.inodes),
        None => (0, 0),
    };
    let mut quota =
        Quota { space_limit: bytes.div_ceil(BLOCK_BYTES), inode_limit: inodes, valid: LIMITS, ..Quota::default() };
    call(on, SET_QUOTA, project, &mut quota)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;
    use std::path::Path;

    use super::*;
    use crate::test_disk::{TestDisk, WITH_PROJECTS, eventually};

    #[test]
    fn arguments_have_the_kernels_sizes() {
        assert_eq!((size_of::<Quota>(), size_of::<State>(), size_of::<Attributes>()), (72, 160, 28));
    }

    #[test]
    fn a_filesystem_without_quota_is_told() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("mounting takes root");
        }
        let ordinary = TestDisk::mount(&["mkfs.ext4", "-q", "-b", "4096"], &[]).unwrap();
        for folder in [Path::new("/proc"), Path::new("/dev/shm"), ordinary.path()] {
            assert!(!is_enforced(File::open(folder).unwrap()), "{}", folder.display());
        }
        // One that counts, and refuses nobody, is not taken for one that limits.
        if TestDisk::with_projects(WITH_PROJECTS[0]).is_some() {
            let counting = TestDisk::mount(WITH_PROJECTS[0], &[]).unwrap();
            assert!(!is_enforced(File::open(counting.path()).unwrap()));
        }
    }

    fn write(path: &Path, bytes: usize) -> io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(&vec![7; bytes])?;
        file.sync_all()
    }

    #[test]
    fn a_project_is_counted_and_what_is_taken_away_leaves_nothing() {
        for mkfs in WITH_PROJECTS {
            let Some(disk) = TestDisk::with_projects(mkfs) else { continue };
            let on = || File::open(disk.path()).unwrap();
            assert!(is_enforced(on()), "{mkfs:?}");
            assert_eq!(handed_on(on()).unwrap(), None);
            assert_eq!(charged(on(), 77).unwrap(), Charged::default());

            let folder = disk.path().join("folder");
            fs::create_dir(&folder).unwrap();
            hand_on(File::open(&folder).unwrap(), 77).unwrap();
            assert_eq!(handed_on(File::open(&folder).unwrap()).unwrap(), Some(77));
            assert_eq!(charged(on(), 77).unwrap().inodes, 1);
            let most = Limit { bytes: 1 << 20, inodes: 10 };
            limit(on(), 77, Some(most)).unwrap();
            fs::create_dir(folder.join("below")).unwrap();
            write(&folder.join("below/file"), 500_000).unwrap();
            let found = charged(on(), 77).unwrap();
            assert_eq!((found.inodes, found.limit), (3, Some(most)));
            assert!((500_000..1 << 20).contains(&found.bytes), "{found:?}");
            // Nothing comes in from outside without being counted.
            write(&disk.path().join("outside"), 10).unwrap();
            let refused = fs::rename(disk.path().join("outside"), folder.join("inside"));
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EXDEV));
            // The folder itself can be moved, and stays what it is.
            fs::rename(&folder, disk.path().join("moved")).unwrap();
            fs::rename(disk.path().join("moved"), &folder).unwrap();

            limit(on(), 77, None).unwrap();
            fs::remove_dir_all(&folder).unwrap();
            rustix::fs::syncfs(on()).unwrap();
            eventually(|| charged(on(), 77).unwrap() == Charged::default());
            assert!(limit(on(), 77, Some(Limit { bytes: 0, inodes: 1 })).is_err(), "no limit, for the kernel");
        }
    }
}
