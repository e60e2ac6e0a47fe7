//! Calling CRIU.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::UnshareFlags;

use crate::runtime::PATH;
use crate::sys::namespace::leave_for_new;

/// Where CRIU keeps what it found out about the kernel, if that is in memory.
const RUN: &str = "/run";

/// The log of a dump or restore, in its work folder.
pub(crate) const DUMP_LOG: &str = "dump.log";
pub(crate) const RESTORE_LOG: &str = "restore.log";

/// How much of a log is looked at for what went wrong.
const LOG_BYTES_MAX: u64 = 8 << 20;

/// Files that are open and have no name any more are kept with the images, up to this size.
pub(crate) const GHOST_BYTES_MAX: u64 = 256 << 20;

/// Where what is watched (inotify) is looked for by its inode: the overlay of a sandbox's root tells CRIU nothing else.
pub(crate) const WATCHED: [&str; 6] = ["/workspace", "/tmp", "/home", "/root", "/srv", "/etc"];

/// What both verbs are told: the sandbox is dumped alone and frozen, so nobody needs to be kept from its sockets.
pub(crate) const COMMON: [&str; 5] =
    ["--manage-cgroups=ignore", "--file-locks", "--link-remap", "--tcp-established", "-v3"];

/// What a dump is told beside that.
pub(crate) fn to_dump(ending: &str) -> Vec<String> {
    let mut told =
        vec!["--network-lock=skip".to_owned(), ending.to_owned(), format!("--ghost-limit={GHOST_BYTES_MAX}")];
    told.extend(WATCHED.iter().flat_map(|folder| ["--irmap-scan-path".to_owned(), (*folder).to_owned()]));
    told
}

/// How a dump ends after which nothing runs on.
pub(crate) const STOPPED: &str = "--leave-stopped";

/// Has a dump be one after which processes run on: their cgroup is frozen before CRIU lets them go.
pub(crate) fn dump_live(call: &mut Call, cgroup: &Path) -> io::Result<()> {
    call.args(to_dump("--leave-running"));
    let freeze = cgroup.join("cgroup.freeze");
    let script = format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" != post-dump ] || echo 1 > '{}'\n", freeze.display());
    // In memory: the disk may be full, or nothing there may be run.
    let mut file = File::from(memfd_create("freeze", MemfdFlags::empty())?);
    file.write_all(script.as_bytes())?;
    // Nobody runs what somebody may still write to.
    let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    // CRIU closes it for those whom it runs, and not for itself, which this process becomes.
    let path = format!("/proc/{}/fd/{}", std::process::id(), call.give(file)?);
    call.args(["--action-script".to_owned(), path]);
    Ok(())
}

/// Goes on in new namespaces where nobody else sees what is mounted, with a `/run` in memory: elsewhere CRIU finds out
/// about the kernel at every step anew. Must be called from a process with one thread.
pub(crate) fn leave_for_own_run(namespaces: UnshareFlags) -> io::Result<()> {
    leave_for_new(UnshareFlags::NEWNS | namespaces)?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    if Path::new(RUN).is_dir() {
        mount("none", RUN, "tmpfs", MountFlags::NODEV | MountFlags::NOSUID, Some(c"mode=0700,size=1m"))?;
    }
    Ok(())
}

/// A call of CRIU, being put together.
pub(crate) struct Call {
    command: Command,
    /// Open until it is made.
    given: Vec<File>,
}

impl Call {
    pub(crate) fn new(criu: &Path, verb: &str) -> Self {
        let mut command = Command::new(criu);
        command.arg(verb).env_clear().env("PATH", PATH).stdin(Stdio::null());
        Self { command, given: Vec::new() }
    }

    pub(crate) fn args<A: Into<OsString>>(&mut self, arguments: impl IntoIterator<Item = A>) -> &mut Self {
        self.command.args(arguments.into_iter().map(Into::into));
        self
    }

    /// Names a file or folder by a descriptor, so that nothing that is mounted in the way hides it.
    pub(crate) fn file(&mut self, option: &str, file: File) -> io::Result<&mut Self> {
        let path = format!("/proc/self/fd/{}", self.give(file)?);
        Ok(self.args([option.to_owned(), path]))
    }

    /// Hands over a file, and answers its number.
    pub(crate) fn give(&mut self, file: File) -> io::Result<i32> {
        fcntl_setfd(&file, FdFlags::empty())?;
        let number = file.as_fd().as_raw_fd();
        self.given.push(file);
        Ok(number)
    }

    /// Becomes it. Comes back only if that fails.
    pub(crate) fn exec(mut self) -> io::Error {
        self.command.exec()
    }

    /// Makes it, and answers how it ended: 0 is well.
    pub(crate) fn run(mut self) -> io::Result<i32> {
        self.command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(self.command.status()?.into_raw())
    }
}

/// Why it failed, in a line: how it ended, as waiting for it tells, and what its log says.
pub(crate) fn why(status: i32, log: &Path) -> String {
    let mut text = Vec::new();
    let read = File::open(log).and_then(|file| file.take(LOG_BYTES_MAX).read_to_end(&mut text));
    let said = match read {
        Ok(_) => first_error(&String::from_utf8_lossy(&text)),
        Err(error) => format!("CRIU said nothing ({error})"),
    };
    match status & 0x7f {
        0 => said,
        signal => format!("CRIU was killed (signal {signal}); {said}"),
    }
}

/// What is said on the way when CRIU finds out what a kernel can do, or has, that it can do without.
const HARMLESS: [&str; 8] = [
    "RLIMIT_NOFILE",
    "tables",
    "execvp",
    "already assigned",
    "exited, status=",
    "Unable to create tun",
    "reported by netlink",
    "Unable to create a veth pair",
];

/// The first error is the cause; those that CRIU itself goes on after are none.
fn first_error(log: &str) -> String {
    let errors = log.lines().filter(|line| line.contains("Error (") || line.starts_with("Error:"));
    let error = errors.filter(|line| !HARMLESS.iter().any(|word| line.contains(word))).map(|line| {
        let said = line.split_once("): ").map_or(line, |(_, said)| said);
        said.trim().to_owned()
    });
    let error = error.into_iter().next().unwrap_or_else(|| "CRIU does not say why".to_owned());
    in_words(&error).map_or(error.clone(), |words| format!("{words} ({error})"))
}

/// What some errors mean for who ran something inside.
fn in_words(error: &str) -> Option<&'static str> {
    let known = [
        // Because the terminal's other side is the agent's, which CRIU takes for its owner.
        ("ctty inheritance", "a program has its terminal open as /dev/tty; `dash -i` does, `bash -i` does not"),
        ("No space left", "the disk is full"),
        ("Can't dump tmpfs content", "GNU tar is missing, or cannot keep files that are in memory"),
        ("nested", "a program made a namespace of processes within its own"),
    ];
    known.into_iter().find(|(sign, _)| error.contains(sign)).map(|(_, words)| words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_found_among_what_is_harmless() {
        let log = "(00.03) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self\n\
            Error (criu/util.c:642): execvp(\"iptables-restore\", ...) failed\n\
            (00.06) Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory\n\
            (00.09) Error (criu/libnetlink.c:54): -95 reported by netlink: Operation not supported\n\
            (00.09) Error (criu/net.c:4151): net: Unable to create a veth pair: -95\n\
            (00.04) Warn  (criu/x.c:1): careful\n\
            (00.042762) Error (criu/files-reg.c:1790): Can't lookup mount=43 for fd=1 path=/x\n\
            (00.043141) Error (criu/cr-dump.c:1975): Dumping FAILED.\n";
        assert_eq!(first_error(log), "Can't lookup mount=43 for fd=1 path=/x");
        assert_eq!(first_error(""), "CRIU does not say why");
        let tty = first_error("(00.1) Error (criu/tty.c:2101): tty: ctty inheritance detected sid/pgrp 23\n");
        assert!(tty.starts_with("a program has") && tty.ends_with("sid/pgrp 23)"), "{tty}");
    }

    #[test]
    fn who_was_killed_is_told_from_who_gave_up() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join(DUMP_LOG);
        std::fs::write(&log, "(00.04) Dumping pages\n").unwrap();
        assert_eq!(why(1 << 8, &log), "CRIU does not say why");
        // A core was written, which is a bit of its own.
        for status in [0x19, 0x19 | 0x80] {
            assert_eq!(why(status, &log), "CRIU was killed (signal 25); CRIU does not say why");
        }
        assert!(why(9, &folder.path().join("none")).starts_with("CRIU was killed (signal 9); CRIU said nothing"));
    }
}
