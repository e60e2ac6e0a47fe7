//! From the clone to the exec.
//!
//! Everything in here runs in a copy of one thread of many: only
//! async-signal-safe calls, no allocation, no lock. What it needs is in the
//! [`Plan`]. The order matters:
//!
//! ```text
//!   session, descriptors ─► limits, keyring ─► bounding set (needs a capability)
//!   ─► groups, gid, uid (need capabilities) ─► no capabilities, no new privileges
//!   ─► seccomp ─► working directory, as the user ─► exec
//! ```
#![expect(unsafe_code, reason = "execve and descriptors by number; each block says why it is sound")]

use std::os::fd::BorrowedFd;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use rustix::process::{Resource, chdir, fchdir, setrlimit, setsid, umask};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::error::{quoted, words};
use crate::exec::plan::Plan;
use crate::sys;

/// Length of a report: the step and the errno.
pub(crate) const REPORT_BYTES: usize = 5;

/// Capabilities beyond the kernel's last one are refused with EINVAL, so this may be too high.
const CAPABILITIES_MAX: u32 = 63;

/// What can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Step {
    Session = 1,
    Stdio,
    Limits,
    Privileges,
    Groups,
    User,
    Seccomp,
    Workdir,
    Exec,
}

const STEPS: [Step; 9] = [
    Step::Session,
    Step::Stdio,
    Step::Limits,
    Step::Privileges,
    Step::Groups,
    Step::User,
    Step::Seccomp,
    Step::Workdir,
    Step::Exec,
];

/// Becomes the command, or reports why not and ends.
pub(crate) fn run(plan: &Plan) -> ! {
    let (step, errno) = become_command(plan);
    let [a, b, c, d] = errno.raw_os_error().to_ne_bytes();
    // SAFETY: the descriptor is open in this process, and nobody closes it before exec does.
    let report = unsafe { BorrowedFd::borrow_raw(plan.report) };
    // A pipe takes five bytes whole; if its reader is gone, nobody asks any more.
    let _ = rustix::io::write(report, &[step as u8, a, b, c, d]);
    sys::exit_now(127)
}

/// Returns only with what failed.
fn become_command(plan: &Plan) -> (Step, Errno) {
    match prepare(plan) {
        Ok(()) => (Step::Exec, exec(plan)),
        Err(failed) => failed,
    }
}

fn prepare(plan: &Plan) -> Result<(), (Step, Errno)> {
    if let Some(go) = plan.go {
        // SAFETY: the descriptor is open in this process.
        let go = unsafe { BorrowedFd::borrow_raw(go) };
        // One byte, or the end when nobody is there to say go.
        if rustix::io::read(go, &mut [0_u8; 1]) != Ok(1) {
            return Err((Step::Session, Errno::CANCELED));
        }
    }
    setsid().map_err(|errno| (Step::Session, errno))?;
    for (to, &from) in plan.stdio.iter().enumerate() {
        sys::replace_descriptor(from, to as i32).map_err(|cause| (Step::Stdio, errno_of(&cause)))?;
    }
    if plan.terminal {
        sys::take_terminal().map_err(|cause| (Step::Stdio, errno_of(&cause)))?;
    }
    sys::close_descriptors_but(plan.report).map_err(|cause| (Step::Stdio, errno_of(&cause)))?;
    setrlimit(Resource::Nofile, plan.open_files).map_err(|errno| (Step::Limits, errno))?;
    umask(Mode::from_raw_mode(0o022));
    sys::offer_to_oom_killer();
    // Before it becomes the user, so that no other command of that user can see it. It may fail: see there.
    let _ = sys::leave_session_keyring();
    // Until exec this is still a copy of the agent, not to be looked into by that user.
    sys::hide_memory().map_err(|cause| (Step::Privileges, errno_of(&cause)))?;
    become_user(plan)?;
    if let Some(processes) = plan.processes {
        // Not before the user is set: the kernel would hold it against a command that it is one more than those that
        // are there, and whoever looks at a bomb from inside has to get in.
        setrlimit(Resource::Nproc, processes).map_err(|errno| (Step::Limits, errno))?;
    }
    sys::hide_memory().map_err(|cause| (Step::Privileges, errno_of(&cause)))?;
    confine(plan).map_err(|errno| (Step::Seccomp, errno))?;
    enter_workdir(plan).map_err(|errno| (Step::Workdir, errno))?;
    // As late as can be: among a thousand others that spin, what comes before takes a thousand times as long afterwards.
    sys::be_nice_again();
    // Last, so that no signal reaches a half-made child.
    sys::reset_signals();
    Ok(())
}

fn become_user(plan: &Plan) -> Result<(), (Step, Errno)> {
    if plan.drop_privileges && plan.filter.is_some() {
        drop_bounding_set(plan.kept).map_err(|errno| (Step::Privileges, errno))?;
    }
    if plan.set_groups {
        rustix::thread::set_thread_groups(&plan.groups).map_err(|errno| (Step::Groups, errno))?;
    }
    // These set the ids for file access, too, whichever the clone was made with.
    rustix::thread::set_thread_res_gid(plan.gid, plan.gid, plan.gid).map_err(|errno| (Step::User, errno))?;
    rustix::thread::set_thread_res_uid(plan.uid, plan.uid, plan.uid).map_err(|errno| (Step::User, errno))?;
    if plan.filter.is_none() {
        return Ok(());
    }
    drop_all_but(plan.kept).map_err(|errno| (Step::Privileges, errno))
}

/// So that not even a file with capabilities gives one back.
fn drop_bounding_set(kept: CapabilitySet) -> Result<(), Errno> {
    for capability in 0..=CAPABILITIES_MAX {
        let set = CapabilitySet::from_bits_retain(1 << capability);
        if kept.contains(set) {
            continue;
        }
        match rustix::thread::remove_capability_from_bounding_set(set) {
            Ok(()) => {}
            Err(Errno::INVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn drop_all_but(kept: CapabilitySet) -> Result<(), Errno> {
    match rustix::thread::clear_ambient_capability_set() {
        // A kernel that does not know of such a set (gVisor) has nothing in it.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(errno) => return Err(errno),
    }
    let none = CapabilitySet::empty();
    // Dropping is always allowed, so this works without any capability too.
    rustix::thread::set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: none })?;
    rustix::thread::set_no_new_privs(true)
}

/// Puts the workload's filter on top of the agent's ([`crate::seccomp`]): after everything that
/// needs more than a workload may, with `no_new_privs` set already, before
/// the first thing that depends on the workload's files.
fn confine(plan: &Plan) -> Result<(), Errno> {
    plan.filter.map_or(Ok(()), |filter| sys::install_filter(filter).map_err(|cause| errno_of(&cause)))
}

/// Not through links that only the kernel can follow, such as `/proc/self/fd/3`: they lead to
/// whatever some process has open, and past everything that keeps a path inside.
fn enter_workdir(plan: &Plan) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat2(CWD, plan.workdir.as_c_str(), flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
        // A kernel that is none of Linux's (gVisor). Nothing that such a link could lead to is open any more.
        Err(Errno::NOSYS) => chdir(plan.workdir.as_c_str()),
        dir => fchdir(dir?),
    }
}

/// Tries the candidates like `execvp` does: what is not there is passed over, what may not be run is remembered.
fn exec(plan: &Plan) -> Errno {
    let mut worst = Errno::NOENT;
    for program in &plan.programs {
        // SAFETY: all three are NUL-terminated, and the arrays end with a null pointer.
        unsafe { libc::execve(program.as_ptr(), plan.argv.as_ptr(), plan.envp.as_ptr()) };
        match errno_of(&std::io::Error::last_os_error()) {
            Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG => {}
            Errno::ACCESS => worst = Errno::ACCESS,
            errno => return errno,
        }
    }
    worst
}

fn errno_of(cause: &std::io::Error) -> Errno {
    Errno::from_raw_os_error(cause.raw_os_error().unwrap_or(libc::EIO))
}

/// A report as a sentence, in the parent.
pub(crate) fn explain(report: [u8; REPORT_BYTES], program: &str, workdir: &str, user: &str) -> String {
    let [step, errno @ ..] = report;
    let errno = Errno::from_raw_os_error(i32::from_ne_bytes(errno));
    let step = STEPS.into_iter().find(|known| *known as u8 == step);
    match (step, errno) {
        (Some(Step::Exec), Errno::NOENT) => format!("no such program: {}", quoted(program)),
        (Some(Step::Exec), Errno::ACCESS) => format!("program {} may not be run", quoted(program)),
        (Some(Step::Exec), Errno::TOOBIG) => "arguments and environment are too long".to_owned(),
        (Some(Step::Exec), _) => format!("program {} does not start: {}", quoted(program), words(errno)),
        (Some(Step::Workdir), Errno::NOENT) => format!("working directory {} does not exist", quoted(workdir)),
        (Some(Step::Workdir), Errno::NOTDIR) => format!("working directory {} is not a directory", quoted(workdir)),
        (Some(Step::Workdir), Errno::LOOP) => {
            format!("working directory {} leads through a link of the kernel's own, or too many", quoted(workdir))
        }
        (Some(Step::Workdir), _) => format!("working directory {}: {}", quoted(workdir), words(errno)),
        (Some(Step::User | Step::Groups), _) => format!("cannot become user {}: {}", quoted(user), words(errno)),
        (Some(step), _) => format!("{step:?} failed before the program: {}", words(errno)),
        (None, _) => "the child failed in an unknown way".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_become_sentences() {
        let report = |step: Step, errno: Errno| {
            let [a, b, c, d] = errno.raw_os_error().to_ne_bytes();
            explain([step as u8, a, b, c, d], "foo", "/x", "ann")
        };
        assert_eq!(report(Step::Exec, Errno::NOENT), "no such program: \"foo\"");
        assert_eq!(report(Step::Workdir, Errno::NOENT), "working directory \"/x\" does not exist");
        assert!(report(Step::Workdir, Errno::LOOP).contains("a link of the kernel's own"));
        assert_eq!(report(Step::User, Errno::PERM), "cannot become user \"ann\": operation not permitted");
        for (index, step) in STEPS.into_iter().enumerate() {
            assert_eq!(step as usize, index + 1);
        }
    }
}
