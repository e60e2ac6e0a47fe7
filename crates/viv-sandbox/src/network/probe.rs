//! `viv net-probe`: whether there can be a way out here, shown by making one.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::UnshareFlags;
use viv_provider::Egress;

use super::{NetworkError, Uplink, at};
use crate::shim::chain;
use crate::sys::clone::{Forked, die_with, exit_now, fork};
use crate::sys::namespace::leave_for_new;
use crate::wait::readable_within;

/// The verb of the binary that runs [`main`].
pub const VERB: &str = "net-probe";

/// How long it may take. Pasta is there after some hundredths of a second.
const WITHIN: Duration = Duration::from_secs(10);

/// Makes a way out and takes it away again. Must be called from a process with one thread; what fails is said on
/// standard output.
pub fn main(id: u32, log: &Path) -> ExitCode {
    match probe(id, log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn probe(id: u32, log: &Path) -> Result<(), NetworkError> {
    let until = Instant::now() + WITHIN;
    let Some(uplink) = Uplink::start(&Egress::All, id, log, until)? else { return Ok(()) };
    let sandbox = stand_in()?;
    let connected = uplink.connect(sandbox, until);
    let _ = kill_process(sandbox, Signal::KILL);
    let _ = waitpid(Some(sandbox), WaitOptions::empty());
    uplink.end();
    connected
}

/// A process in a network namespace of its own.
fn stand_in() -> Result<Pid, NetworkError> {
    let step = "making a network namespace";
    let (ready, saying) = std::io::pipe().map_err(at(step))?;
    let parent = rustix::process::getpid();
    let pid = match fork(None).map_err(at(step))? {
        Forked::Child => {
            drop(ready);
            if !die_with(parent) || leave_for_new(UnshareFlags::NEWNET).is_err() {
                exit_now(1);
            }
            drop(saying);
            loop {
                let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 60, tv_nsec: 0 });
            }
        }
        Forked::Parent(pid) => pid,
    };
    drop(saying);
    // Its end of the pipe is closed when it is there. One that failed is a namespace that cannot be opened.
    readable_within(&ready, WITHIN).map_err(at(step))?;
    Ok(pid)
}
