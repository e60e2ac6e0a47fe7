//! The container's first process, for those who do not hold it.
//!
//! The kernel calls it ended when its whole PID namespace is. Where there are
//! no cgroups, that is the only proof that nothing of an instance runs.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::durable;
use crate::layout::InstanceDir;
use crate::process::{ProcessIdentity, is_nobody};
use crate::wait::readable_within;

/// Writes down who it is. The caller has not waited for it, so the pid is its own.
pub(super) fn record(dir: &InstanceDir, pid: Pid) -> io::Result<()> {
    let identity = ProcessIdentity::of(pid.as_raw_nonzero().get().cast_unsigned())?;
    durable::replace_json_unsynced(&dir.first(), &identity)
}

/// Kills it and waits until it is gone; at once if it is gone already, or never was.
pub(crate) fn end(dir: &InstanceDir, within: Duration) -> io::Result<()> {
    let until = Instant::now() + within;
    loop {
        let (found, is_known) = find(dir)?;
        for pidfd in &found {
            match pidfd_send_signal(pidfd, Signal::KILL) {
                // One of another process of the same ordinary user may not be ours to kill. The death of its shim does
                // that, and all that is needed here is to see it.
                Ok(()) | Err(Errno::SRCH | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
        }
        for pidfd in &found {
            if !readable_within(pidfd, until.saturating_duration_since(Instant::now()))? {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "its first process does not end"));
            }
        }
        // What was looked for may have started another one meanwhile.
        if found.is_empty() || is_known {
            return Ok(());
        }
    }
}

/// Whether it is still there.
pub(crate) fn lives(dir: &InstanceDir) -> io::Result<bool> {
    for pidfd in find(dir)?.0 {
        if !readable_within(&pidfd, Duration::ZERO)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// It, and whether it was written down who it is.
///
/// If the shim was killed before it could write that, everything that has our folder among its mounts is found: the
/// runtime, and what it may have started, of which nobody was told.
fn find(dir: &InstanceDir) -> io::Result<(Vec<OwnedFd>, bool)> {
    if let Some(identity) = durable::read_json::<ProcessIdentity>(&dir.first())? {
        return Ok((identity.open()?.into_iter().collect(), true));
    }
    // Its own name, also of one that is held by a descriptor.
    let folder = match fs::canonicalize(dir.path()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), true)),
        folder => folder?,
    };
    let name = folder.file_name().unwrap_or_default();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let pid = entry?.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        // A shim that looks is among them itself.
        let Some(pid) = pid.filter(|pid| *pid != rustix::process::getpid() && has_mounted(*pid, name)) else {
            continue;
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // Still so, so that it was so when the descriptor was opened.
            Ok(pidfd) if has_mounted(pid, name) => found.push(pidfd),
            Ok(_) => {}
            Err(errno) if is_nobody(errno) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok((found, false))
}

/// Whether a process sees an instance's folder, or what is in it, as a mount. Nobody does but what belongs to the
/// instance: its mounts are private.
fn has_mounted(pid: Pid, name: &OsStr) -> bool {
    // Gone, or not ours to look at.
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", pid.as_raw_nonzero())).unwrap_or_default();
    let roots = mounts.lines().filter_map(|line| line.split(' ').nth(3));
    roots.map(Path::new).any(|root| root.iter().any(|part| part == name))
}
