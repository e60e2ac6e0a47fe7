//! Whose rights the agent has: ids and capabilities.
//!
//! ```text
//!                  real, effective, saved     for file access        capabilities
//!   PID 1             the keeper (1)             root                  those it was given
//!   in a cgroup       the keeper                 the keeper            without those for files
//!   monitor           the keeper                 the keeper            none
//!   workload          the user's                 the user's            none
//! ```
//!
//! (1) Where there are no ids for file access alone (gVisor), its effective ids are root's.
//!
//! The kernel lets a process set the limits and the priority of every other one with
//! the same ids. As workloads may be root, the agent must be somebody else.
#![expect(unsafe_code, reason = "raw kernel calls; each block says why it is sound")]

use std::io;

use rustix::process::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Whether this is the keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// There is none, or there is no right to become it.
    Absent,
    /// There is none, and commands have the very id of this process. What ids do elsewhere is done otherwise.
    Alike,
    /// In everything but file access: others' ids open nothing of ours.
    Apart,
    /// Not in its effective ids, by which root inside sees in `/proc` what is open here.
    Seen,
}

/// Becomes the keeper in everything but file access, with all capabilities kept.
///
/// To be called before any thread is started and before a parent-death signal
/// is set, which it would clear. Nothing happens where there is no keeper or
/// no right to become it.
pub(crate) fn become_keeper(keeper_id: u32) -> io::Result<Keeper> {
    let held = rustix::thread::capabilities(None)?;
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
    if keeper_id == 0 || !held.effective.contains(needed) {
        return Ok(Keeper::Absent);
    }
    let (uid, gid) = (Uid::from_raw(keeper_id), Gid::from_raw(keeper_id));
    rustix::thread::set_keep_capabilities(true)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    rustix::thread::set_keep_capabilities(false)?;
    // Only the permitted ones were kept.
    rustix::thread::set_capabilities(None, held)?;
    set_file_ids(0, 0);
    if set_file_ids(0, 0) == (0, 0) {
        return Ok(Keeper::Apart);
    }
    // gVisor has no ids for file access alone: there the effective ones are root's. What others may do to us goes by
    // the real and the saved ones.
    rustix::thread::set_thread_res_gid(gid, Gid::ROOT, gid)?;
    rustix::thread::set_thread_res_uid(uid, Uid::ROOT, uid)?;
    rustix::thread::set_capabilities(None, held)?;
    Ok(Keeper::Seen)
}

/// Sets this thread's ids for file access, and puts them back when dropped.
///
/// Architecture invariant: the main thread never does this. It would clear its
/// parent-death signal.
pub(crate) struct FileIds {
    before: (u32, u32),
    /// Whether the process itself is the keeper.
    is_keeper: bool,
}

impl FileIds {
    /// Takes the keeper's id; nothing changes where there is no keeper.
    pub(crate) fn of_keeper(keeper_id: u32) -> io::Result<Self> {
        let is_keeper = keeper_id != 0 && rustix::process::geteuid().as_raw() == keeper_id;
        let ids = Self { before: set_file_ids(keeper_id, keeper_id), is_keeper };
        // These calls do not report failure; the value before, which they do report, must now be ours.
        if set_file_ids(keeper_id, keeper_id) != (keeper_id, keeper_id) {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        ids.rely_on_id();
        Ok(ids)
    }

    /// The kernel takes this change for one of the whole process, and hides it.
    fn rely_on_id(&self) {
        if self.is_keeper {
            // What is hidden is safe as well, and the call cannot fail with this argument.
            let _ = super::rely_on_id();
        }
    }
}

impl Drop for FileIds {
    fn drop(&mut self) {
        let (uid, gid) = self.before;
        set_file_ids(uid, gid);
        self.rely_on_id();
    }
}

/// Sets the ids for file access of this thread; returns the ones before. Async-signal-safe.
pub(crate) fn set_file_ids(uid: u32, gid: u32) -> (u32, u32) {
    // SAFETY: plain numbers; the raw calls change only the calling thread.
    unsafe {
        let gid = libc::syscall(libc::SYS_setfsgid, gid);
        let uid = libc::syscall(libc::SYS_setfsuid, uid);
        (uid as u32, gid as u32)
    }
}

/// Gives up capabilities for good, in this thread and in those that it starts.
pub(crate) fn drop_capabilities(gone: CapabilitySet) -> io::Result<()> {
    let held = rustix::thread::capabilities(None)?;
    if !held.permitted.intersects(gone) {
        return Ok(());
    }
    for capability in gone.iter() {
        // Only while SETPCAP is held; without it the workloads' own dropping fails loudly.
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) | Err(rustix::io::Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let sets = CapabilitySets {
        effective: held.effective - gone,
        permitted: held.permitted - gone,
        inheritable: held.inheritable - gone,
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}
