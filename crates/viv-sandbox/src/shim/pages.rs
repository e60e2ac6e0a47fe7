//! Who brings the pages of a memory that is restored while it is used, and who sees to it that nobody reads zeros.
//!
//! ```text
//!   shim ── forks ──► holder ── forks, with one table of descriptors ──► server ── pages ──► processes
//!     ▲                 │ the server ends before its last page: kills the processes, who wait for it
//!     └── ends ─────────┘
//! ```
//!
//! The kernel gives zeros to those who wait for a page when the last descriptor of their `userfaultfd` is closed. So two
//! processes have each of them open, from the moment that the kernel makes it, those of forks too: they share one table.
//! Whichever of the two is killed, nothing is closed. When it is the server, the holder kills everything that could read
//! before it ends itself; when it is the holder, the server goes on, and the shim ends the instance. The death of the shim
//! changes nothing for either: what the guard kills wants no pages. Then they may be there after the instance, and after
//! the next one of its name began: so the holder kills what it opened, and nothing by name (T5).

use std::fs;
use std::io::{self, PipeWriter};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};
use viv_core::EndCause;

use super::serve::{Init, InitExit, Next, Shim};
use crate::cgroup::{InstanceCgroups, OpenedCgroup};
use crate::checkpoint::lazy;
use crate::layout::InstanceDir;
use crate::sys::clone::{Forked, close_all_but, exit_now, fork, fork_with_descriptors};
use crate::wait::readable_within;

/// How long one attempt to kill may take; there is another one after it.
const KILL_WITHIN: Duration = Duration::from_secs(5);

/// When nobody is left who wants a page, the holder ends within this.
const END_WITHIN: Duration = Duration::from_secs(2);

/// While that is waited for, those who ask are answered so often.
const ANSWER_EVERY: Duration = Duration::from_millis(50);

/// What the server leaves when it fails.
const WHY: &str = "pages-why";

/// Those who bring the pages, as the shim knows them.
pub(super) struct Pages {
    holder: Init,
    /// Open until CRIU is done: if it never came, nobody waits for it any more.
    restoring: Option<PipeWriter>,
}

impl Pages {
    /// Starts them, for a CRIU that is started in this process's folder.
    pub(super) fn start(dir: &InstanceDir, cgroups: &InstanceCgroups) -> io::Result<Self> {
        remove_if_there(&dir.path().join(lazy::SOCKET))?;
        remove_if_there(&dir.path().join(WHY))?;
        // A relative name: a socket's path has 108 bytes at the most.
        let listener = UnixListener::bind(lazy::SOCKET)?;
        let (restoring, pipe) = io::pipe()?;
        let cgroup = cgroups.open_to_kill()?;
        match fork(None)? {
            Forked::Child => {
                // None of the shim's connections, and not its lock.
                let mut keep = cgroup.descriptors();
                keep.extend([listener.as_fd(), restoring.as_fd()]);
                close_all_but(&keep);
                let _ = rustix::process::setsid();
                exit_now(i32::from(!hold(&listener, &restoring.into(), dir, &cgroup)));
            }
            Forked::Parent(pid) => {
                let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
                Ok(Self { holder: Init { pid, pidfd }, restoring: Some(pipe) })
            }
        }
    }

    /// CRIU is done, well or not.
    pub(super) fn restored(&mut self) {
        drop(self.restoring.take());
    }

    /// Readable when the last page was brought, or none is any more.
    pub(super) fn pidfd(&self) -> &OwnedFd {
        &self.holder.pidfd
    }

    /// Whether they end in time.
    fn end_within(&self, within: Duration) -> bool {
        matches!(readable_within(&self.holder.pidfd, within), Ok(true))
    }

    /// Why not all pages are there, once it is known.
    pub(super) fn outcome(&self, dir: &InstanceDir) -> Result<(), String> {
        match self.holder.wait(Duration::ZERO) {
            Ok(InitExit::Code(0)) => Ok(()),
            Ok(InitExit::Code(_)) => Err(fs::read_to_string(dir.path().join(WHY))
                .unwrap_or_else(|_| "whoever brought its pages ended without a word".to_owned())),
            Ok(InitExit::Signal(signal)) => Err(format!("who held its pages was killed (signal {signal})")),
            Err(error) => Err(format!("it is not known who holds its pages: {error}")),
        }
    }

    /// Nobody is left who could read a page, and whoever does not see that by now never does.
    fn leave(self) {
        if !self.end_within(Duration::ZERO) {
            self.holder.kill();
        }
        let _ = waitpid(Some(self.holder.pid), WaitOptions::empty());
    }

    /// Nobody is left who could read a page: what was killed is waited for by now.
    pub(super) fn dismiss(mut self) {
        self.restored();
        let _ = self.end_within(END_WITHIN);
        self.leave();
    }
}

impl Shim {
    /// All pages are there, or will never be.
    pub(super) fn tend_pages(&mut self) -> Next {
        self.why_pages_lost().map_or(Next::Go, |what| Next::End(EndCause::MemoryLost { what }, None))
    }

    /// Why pages are lost, of an instance that has ended or is to end for that. Those who bring them end with it, if not
    /// before.
    pub(super) fn why_pages_lost(&mut self) -> Option<String> {
        let outcome = self.pages.as_ref().filter(|pages| pages.end_within(Duration::ZERO))?.outcome(&self.dir);
        self.pages = None;
        if outcome.is_ok() {
            self.remove_images();
        }
        outcome.err()
    }

    /// The agent is gone. While pages are brought that may be because they cannot be, and whoever holds them says so when
    /// nobody waits for one any more: that is a moment later, in which others are served.
    pub(super) fn agent_is_gone(&mut self) -> Next {
        if self.pages.as_ref().is_some_and(|pages| !pages.end_within(Duration::ZERO)) {
            let until = *self.pages_say_until.get_or_insert_with(|| Instant::now() + END_WITHIN);
            if Instant::now() < until {
                return Next::Go;
            }
        }
        Next::End(self.cause_of_agent_end(), None)
    }

    /// Nobody is left who could read a page.
    pub(super) fn leave_pages(&mut self, cause: &EndCause) {
        if let Some(pages) = self.pages.take() {
            let until = Instant::now() + END_WITHIN;
            while !pages.end_within(ANSWER_EVERY) && Instant::now() < until {
                self.answer_while_ending(cause);
            }
            pages.leave();
        }
        self.remove_images();
    }

    fn remove_images(&self) {
        let _ = fs::remove_dir_all(self.dir.unpacked());
        let _ = fs::remove_file(self.dir.path().join(lazy::SOCKET));
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Holds what the server has open. True when the last page was brought; otherwise nobody is left who could read one.
fn hold(listener: &UnixListener, restoring: &OwnedFd, dir: &InstanceDir, cgroup: &OpenedCgroup) -> bool {
    let why = match fork_with_descriptors() {
        Ok(Forked::Child) => {
            let served = lazy::serve(listener, restoring.as_fd(), &dir.unpacked());
            if let Err(error) = &served {
                let _ = fs::write(dir.path().join(WHY), format!("its pages cannot be brought: {error}"));
            }
            exit_now(i32::from(served.is_err()));
        }
        Ok(Forked::Parent(server)) => match ended(server) {
            Ok(InitExit::Code(0)) => return true,
            // It has said why.
            Ok(InitExit::Code(_)) => None,
            Ok(InitExit::Signal(signal)) => Some(format!("who brought its pages was killed (signal {signal})")),
            Err(error) => Some(format!("who brought its pages is lost: {error}")),
        },
        Err(error) => Some(format!("nobody brings its pages: {error}")),
    };
    // As long as anybody is left, who could read: there is nothing else that this process is for.
    while let Err(error) = cgroup.kill(KILL_WITHIN) {
        note!("not all processes ended that wait for pages: {error}");
    }
    if let Some(why) = why {
        let _ = fs::write(dir.path().join(WHY), why);
    }
    false
}

fn ended(server: Pid) -> io::Result<InitExit> {
    loop {
        match waitpid(Some(server), WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) | Ok(None) => {}
            Err(error) => return Err(error.into()),
            Ok(Some((_, status))) => {
                let signal = status.terminating_signal().unwrap_or(0);
                return Ok(status.exit_status().map_or(InitExit::Signal(signal), InitExit::Code));
            }
        }
    }
}
