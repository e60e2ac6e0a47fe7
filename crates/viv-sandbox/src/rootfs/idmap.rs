//! A user namespace, made for its mapping.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::UnshareFlags;

use super::IdRange;
use crate::sys::clone::{Forked, close_all_but, die_with, exit_now, fork};

/// Makes one. A short-lived child enters it, so that it can be opened.
pub(crate) fn user_namespace(ids: IdRange) -> io::Result<OwnedFd> {
    let (mut entered, entering) = io::pipe()?;
    let parent = rustix::process::getpid();
    let child = match fork(None)? {
        Forked::Child => {
            // It must not hold the shim's lock, pipe or socket, nor outlive the shim.
            close_all_but(&[entering.as_fd()]);
            if !die_with(parent) || enter().is_err() {
                exit_now(1);
            }
            // Closing it says that the namespace is there; the parent's kill is what ends the wait.
            drop(entering);
            loop {
                let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 60, tv_nsec: 0 });
            }
        }
        Forked::Parent(child) => child,
    };
    drop(entering);
    let opened = (|| {
        entered.read_to_end(&mut Vec::new())?;
        let folder = format!("/proc/{}", child.as_raw_nonzero());
        for file in ["uid_map", "gid_map"] {
            let lines = ids.mapping(file)?;
            let mapping: String =
                lines.iter().map(|(inside, host, size)| format!("{inside} {host} {size}\n")).collect();
            fs::write(format!("{folder}/{file}"), mapping)?;
        }
        File::open(format!("{folder}/ns/user")).map(OwnedFd::from)
    })();
    kill_process(child, Signal::KILL)?;
    waitpid(Some(child), WaitOptions::empty())?;
    opened
}

#[expect(unsafe_code, reason = "a new user namespace in a process with one thread disturbs nobody")]
fn enter() -> rustix::io::Result<()> {
    // SAFETY: no descriptor table or memory is unshared, and the process has one thread.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }
}
