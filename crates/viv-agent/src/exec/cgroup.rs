//! A cgroup per execution: nothing that is started in it can leave it.
//!
//! The directory belongs to the keeper, an id that no workload gets, so every
//! change is made with the keeper's ids for file access, and never from the
//! main thread (see [`FileIds`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags, mkdirat, openat, unlinkat};
use rustix::process::Pid;

use crate::sys::FileIds;

/// Longest list of processes that is read: as many as there can be pids.
const PROCS_BYTES_MAX: usize = 32 << 20;

/// What came of removing a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// Only possible when nothing was in it.
    Removed,
    /// It was not there; that alone says nothing about processes.
    Absent,
    /// Something is in it, or the kernel has not noticed yet that nothing is.
    Busy,
}

/// The sandbox's own cgroup.
pub(crate) struct Cgroup {
    dir: OwnedFd,
    keeper_id: u32,
}

impl Cgroup {
    /// Takes the descriptor if executions can be kept below it.
    pub(crate) fn adopt(dir: OwnedFd, keeper_id: u32) -> io::Result<Self> {
        let cgroup = Self { dir, keeper_id };
        let name = "exe_probe";
        let made = cgroup.make(name).and_then(|dir| read_file(&dir, c"cgroup.events").map(drop));
        let removed = cgroup.remove(name);
        made?;
        match removed {
            Removal::Removed | Removal::Absent => Ok(cgroup),
            Removal::Busy => Err(io::Error::other("a cgroup made there cannot be removed")),
        }
    }

    /// Takes the ids under which things in here may be changed.
    pub(crate) fn as_keeper(&self) -> io::Result<FileIds> {
        FileIds::of_keeper(self.keeper_id)
    }

    /// Makes a cgroup and opens it.
    pub(crate) fn make(&self, name: &str) -> io::Result<OwnedFd> {
        let _ids = self.as_keeper()?;
        mkdirat(&self.dir, name, Mode::from_raw_mode(0o755))?;
        self.open(name)
    }

    pub(crate) fn open(&self, name: &str) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.dir, name, flags, Mode::empty())?)
    }

    /// Removes a cgroup.
    pub(crate) fn remove(&self, name: &str) -> Removal {
        match unlinkat(&self.dir, name, AtFlags::REMOVEDIR) {
            Ok(()) => Removal::Removed,
            Err(rustix::io::Errno::NOENT) => Removal::Absent,
            Err(_) => Removal::Busy,
        }
    }

    /// Kills everything in a cgroup at once; false where the kernel cannot (before 5.14) or nothing is there any more.
    pub(crate) fn kill(&self, dir: &OwnedFd) -> io::Result<bool> {
        let _ids = self.as_keeper()?;
        let file = match openat(dir, c"cgroup.kill", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV) => return Ok(false),
            file => file?,
        };
        order_kill(&file)
    }
}

/// Tells the kernel to kill what is in the cgroup of this file; false when that was removed since the file was opened.
fn order_kill(file: &OwnedFd) -> io::Result<bool> {
    match rustix::io::write(file, b"1") {
        Ok(_) => Ok(true),
        // Which of the two depends on how far the removal has come.
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether anything lives in a cgroup.
pub(crate) fn is_populated(dir: &OwnedFd) -> io::Result<bool> {
    let text = match read_file(dir, c"cgroup.events") {
        Err(cause) if is_removed(&cause) => return Ok(false),
        text => text?,
    };
    let line = text.lines().find_map(|line| line.strip_prefix("populated "));
    match line.map(str::trim) {
        Some("0") => Ok(false),
        Some("1") => Ok(true),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "cgroup.events says nothing of processes")),
    }
}

/// The processes in a cgroup, by their pids here.
pub(crate) fn pids(dir: &OwnedFd) -> io::Result<Vec<Pid>> {
    let text = match read_file(dir, c"cgroup.procs") {
        Err(cause) if is_removed(&cause) => return Ok(Vec::new()),
        text => text?,
    };
    // A process of another namespace reads as 0, and none of ours is there.
    Ok(text.lines().filter_map(|line| Pid::from_raw(line.trim().parse().ok()?)).collect())
}

/// Whether the cgroup is not there any more: the main thread removes the empty ones.
fn is_removed(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

fn read_file(dir: &OwnedFd, name: &std::ffi::CStr) -> io::Result<String> {
    let file = openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    read_text(file.as_fd(), PROCS_BYTES_MAX)
}

/// Reads a kernel file to its end. Names of processes stand in such files as they were chosen, in any bytes.
pub(crate) fn read_text(file: BorrowedFd<'_>, bytes_max: usize) -> io::Result<String> {
    let mut text = Vec::new();
    let mut buf = [0; 4096];
    while text.len() < bytes_max {
        match rustix::io::read(file, &mut buf) {
            Ok(0) => break,
            Ok(count) => text.extend_from_slice(&buf[..count]),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel answers in one of three ways, depending on how far the removal has come.
    const ROUNDS: usize = 1000;

    /// Where the v2 hierarchy is mounted.
    fn hierarchy() -> Option<String> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        let line = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
        line.split(' ').nth(4).map(str::to_owned)
    }

    #[test]
    fn a_cgroup_that_goes_away_while_it_is_killed_is_no_failure() {
        let Some(hierarchy) = hierarchy().filter(|_| rustix::process::geteuid().is_root()) else {
            return eprintln!("making cgroups takes root and a v2 hierarchy");
        };
        // The main thread removes the cgroup of a command that ended at any moment, also while another writes to it.
        let path = format!("{hierarchy}/viv-test-removed-{}", std::process::id());
        for _ in 0..ROUNDS {
            std::fs::create_dir(&path).unwrap();
            let file = std::fs::File::options().write(true).open(format!("{path}/cgroup.kill")).map(OwnedFd::from);
            let start = std::sync::Barrier::new(2);
            let (removed, ordered) = std::thread::scope(|scope| {
                let remover = scope.spawn(|| {
                    start.wait();
                    std::fs::remove_dir(&path)
                });
                start.wait();
                let ordered = order_kill(&file.unwrap());
                (remover.join().unwrap(), ordered)
            });
            removed.unwrap();
            ordered.unwrap();
        }
    }
}
