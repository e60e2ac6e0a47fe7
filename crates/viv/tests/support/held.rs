//! Processes that are broken from outside, and daemons that are held at a point meanwhile.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use viv_api::diagnosis::HostView;

use super::daemon::PATIENCE;
use super::{eventually_within, is_alive};

/// A process that is signalled as itself: its number may be another's by then (J6).
pub struct Held {
    pub pid: u32,
    file: OwnedFd,
}

impl Held {
    pub fn of(pid: Option<u32>) -> Self {
        let pid = pid.expect("the diagnosis names it");
        let file = pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap();
        Self { pid, file }
    }

    /// Gone before we came is as good.
    pub fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.file, signal);
    }

    pub fn kill(&self) {
        self.signal(Signal::KILL);
        self.wait_gone();
    }

    /// Waits until it has stopped: the signal alone does not say so.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let stopped = || fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap().contains(") T ");
        eventually_within(PATIENCE, "it stops", stopped);
    }

    pub fn wait_gone(&self) {
        eventually_within(PATIENCE, "it is gone", || !is_alive(self.pid));
    }
}

/// Takes the root of a sandbox away, where its shim has it.
pub fn unmount_root(host: &HostView) {
    let (shim, root) = (host.shim_pid.unwrap().to_string(), host.root_mount.clone().unwrap());
    // The machine's own root is no sandbox's.
    assert!(PathBuf::from(&root).parent().is_some() && !root.starts_with("/proc"), "{root}");
    let done = Command::new("nsenter").args(["-t", &shim, "-m", "umount", "-l", &root]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// A listener inside, by somebody outside: what a service would be.
pub fn listen_inside(host: &HostView, port: u16) -> TcpListener {
    let namespace = File::open(format!("/proc/{}/ns/net", host.agent_pid.unwrap())).unwrap();
    // A thread of its own, which is not seen again: only what it opened stays.
    let listening = thread::spawn(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        TcpListener::bind(("127.0.0.1", port)).unwrap()
    });
    listening.join().unwrap()
}

/// A point at which a daemon is held until it is let go: see `VIV_FAILPOINT`.
pub struct Hold {
    point: &'static str,
    folder: tempfile::TempDir,
}

impl Hold {
    pub fn at(point: &'static str) -> Self {
        Self { point, folder: tempfile::Builder::new().prefix("viv-hold-").tempdir().unwrap() }
    }

    /// The value of `VIV_FAILPOINT`.
    pub fn variable(&self) -> String {
        format!("{}@{}", self.point, self.folder.path().display())
    }

    /// Whether the point was reached so many times; the last one waits there.
    pub fn is_reached(&self, count: u32) -> bool {
        self.folder.path().join(format!("{count}.reached")).exists()
    }

    /// Lets the one go on that reached it as this one.
    pub fn let_go(&self, count: u32) {
        fs::write(self.folder.path().join(format!("{count}.go")), "").unwrap();
    }

    /// From now on nobody is held.
    pub fn open(&self) {
        fs::write(self.folder.path().join("open"), "").unwrap();
    }
}
