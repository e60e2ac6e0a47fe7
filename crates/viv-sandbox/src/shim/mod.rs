//! `viv shim`: holds one instance.
//!
//! ```text
//!   start ── lock, detach, create ──► serve ──► end ── kill, prove, clean, record ──► exit
//!              │ fails                  ▲ │        ▲
//!              └── leave nothing        └─┘        └─ deadline · agent's death · destroy
//!                                     requests
//! ```
//!
//! It has one thread and one loop. It never ends before its instance has. When
//! it is killed, the kernel kills the agent (parent-death signal), the agent's
//! connection ends, and the guard kills, cleans and records what is left.
//!
//! Architecture invariant: nothing waits on the agent once the instance runs.
//! Deadline, status, freeze and destroy work with an agent that is stopped.

mod agent;
mod clients;
mod create;
mod deadline;
mod end;
pub(crate) mod first;
mod guard;
mod limits;
mod memory;
mod oom;
mod pages;
pub(crate) mod proto;
mod serve;
pub(crate) mod space;
mod tables;

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use viv_core::EndCause;
use viv_provider::Ended;

use crate::cgroup::{InstanceCgroups, Layout};
use crate::durable;
use crate::layout::InstanceDir;
use crate::process::ProcessIdentity;
use crate::sys::clone::{Forked, exit_now, fork, leave_session_keyring};
pub(crate) use deadline::{now_wall_ms, stored_deadline};
use guard::Guard;
use proto::Started;

/// The verb of the binary that runs [`main`].
pub const VERB: &str = "shim";

/// Runs a shim for the instance whose folder is given. Must be called from a process with one thread.
///
/// Standard output is told once how it went; standard error is the log.
pub fn main(folder: &Path) -> ExitCode {
    let outcome = start(folder);
    if let Err(what) = &outcome {
        tell(&Started::Failed { what: what.clone() });
        note!("{what}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn start(folder: &Path) -> Result<(), String> {
    let said = |what: &str, error: &dyn std::error::Error| format!("{what}: {}", chain(error));
    let folder = fs::canonicalize(folder).map_err(|error| said("the instance's folder is not there", &error))?;
    // Relative names from here on: a socket's path has 108 bytes at the most.
    std::env::set_current_dir(&folder).map_err(|error| said("the instance's folder cannot be entered", &error))?;
    let dir = InstanceDir::new(folder);
    let record = dir
        .read_record()
        .map_err(|error| said("record.json cannot be read", &error))?
        .ok_or("record.json is not there")?;
    let lock = take_lock(&dir).map_err(|error| said("this instance is not mine to hold", &error))?;

    // Whoever started us waits for this process, and must not wait for the instance.
    match fork(None).map_err(|error| said("cannot fork", &error))? {
        Forked::Parent(_) => exit_now(0),
        Forked::Child => {}
    }
    detach().map_err(|error| said("cannot detach", &error))?;
    let layout = record.cgroup_layout.clone().map_or_else(Layout::detect, Ok);
    let layout = layout.map_err(|error| said("cannot look for cgroups", &error))?;
    let cgroups = InstanceCgroups::new(layout, record.cgroup());
    let guard = Guard::start(&cgroups, &dir, &lock).map_err(|error| said("cannot start the guard", &error))?;
    record_identity(&dir, &guard).map_err(|error| said("cannot record who I am", &error))?;

    let shim = match create::create(dir.clone(), record, cgroups, guard, lock) {
        Ok(shim) => shim,
        Err(error) => {
            // The folder stays for whoever asked; if nobody is left, a look at it finds this.
            let cause = EndCause::CreateFailed { what: chain(&error) };
            let ended = Ended { cause, at_ms: now_wall_ms() };
            let _ = durable::replace_json_from_reserve(&dir.exit(), &ended, &dir.reserve());
            return Err(chain(&error));
        }
    };
    tell(&Started::Running);
    silence_stdout();
    shim.serve();
    Ok(())
}

/// Whom to kill when nobody answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ShimIdentity {
    pub(crate) shim: ProcessIdentity,
    pub(crate) guard: ProcessIdentity,
}

fn record_identity(dir: &InstanceDir, guard: &Guard) -> io::Result<()> {
    let identity = ShimIdentity { shim: ProcessIdentity::own()?, guard: ProcessIdentity::of(guard.pid())? };
    durable::replace_json_unsynced(&dir.identity(), &identity)
}

/// The lock of this instance comes as standard input, taken by whoever made
/// the folder: from the moment that the folder is there, somebody holds it.
fn take_lock(dir: &InstanceDir) -> io::Result<File> {
    let lock = File::from(rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?);
    let (given, expected) = (lock.metadata()?, fs::metadata(dir.lock())?);
    if (given.dev(), given.ino()) != (expected.dev(), expected.ino()) {
        return Err(io::Error::other("standard input is not shim.lock"));
    }
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok(lock)
}

fn detach() -> io::Result<()> {
    leave_session_keyring();
    rustix::process::setsid()?;
    // The container's first process becomes our child when the runtime's helper ends.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    Ok(())
}

/// The starter may be gone; that changes nothing.
fn tell(started: &Started) {
    let mut line = serde_json::to_vec(started).unwrap_or_default();
    line.push(b'\n');
    let _ = io::stdout().write_all(&line).and_then(|()| io::stdout().flush());
}

/// Closes the pipe to the starter, who reads to its end.
fn silence_stdout() {
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(null);
    }
}

/// How much of a program's complaint is passed on.
const COMPLAINT_BYTES_MAX: u64 = 2048;

/// What a program wrote to the log, from where it began.
pub(crate) fn complaint(log: &Path, start: u64) -> String {
    let mut text = Vec::new();
    let read = File::open(log).and_then(|mut file| {
        file.seek(SeekFrom::Start(start))?;
        file.take(COMPLAINT_BYTES_MAX).read_to_end(&mut text)
    });
    match read {
        Ok(_) => String::from_utf8_lossy(&text).trim().to_owned(),
        Err(error) => format!("(its log cannot be read: {error})"),
    }
}

/// An error with everything behind it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        next = error.source();
    }
    text
}
