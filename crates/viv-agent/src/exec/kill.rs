//! Signals to many processes, and how to know that they are gone.
//!
//! Pids are only ever looked up: a signal goes to a descriptor that was
//! checked, after it was opened, to stand for the process that was meant.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use viv_core::ExecutionId;

use crate::agent::{Agent, lock};
use crate::error::say;
use crate::exec::cgroup;
use crate::sys;

/// How long a killed tree may take to be gone; a process in the middle of heavy I/O takes a while.
pub(crate) const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Between two looks at something that is ending.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A stat line holds a name of at most 64 bytes and some fifty numbers.
const STAT_BYTES_MAX: usize = 2048;

/// Longest description of a process's cgroups: a path for each of a dozen hierarchies.
const CGROUP_BYTES_MAX: usize = 64 << 10;

/// One process as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    pid: Pid,
    parent: i32,
    /// Tells a process from a later one with the same pid.
    started: u64,
    zombie: bool,
}

/// Signals everything in a cgroup.
pub(crate) fn signal_cgroup(dir: &OwnedFd, signal: i32) -> io::Result<()> {
    let opened: Vec<(Pid, OwnedFd)> = cgroup::pids(dir)?
        .into_iter()
        .filter_map(|pid| Some((pid, pidfd_open(pid, PidfdFlags::empty()).ok()?)))
        .collect();
    // Those that are still listed are the ones that were opened.
    let still = cgroup::pids(dir)?;
    for (pid, pidfd) in opened {
        if still.contains(&pid) {
            // It may end at any moment, and that is what is wanted.
            let _ = sys::send_signal(pidfd.as_fd(), signal);
        }
    }
    Ok(())
}

/// Every process here. Needs `/proc`.
fn processes() -> io::Result<Vec<Seen>> {
    let mut seen = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| Pid::from_raw(name.parse().ok()?)) else { continue };
        seen.extend(look(pid));
    }
    Ok(seen)
}

fn look(pid: Pid) -> Option<Seen> {
    let file = std::fs::File::open(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    parse_stat(pid, &cgroup::read_text(file.as_fd(), STAT_BYTES_MAX).ok()?)
}

fn parse_stat(pid: Pid, text: &str) -> Option<Seen> {
    // The name is in parentheses and may hold anything, parentheses too.
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
    let zombie = matches!(fields.next()?, "Z" | "X");
    let parent = fields.next()?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some(Seen { pid, parent, started, zombie })
}

/// Everything below the given processes, without themselves.
fn below(all: &[Seen], roots: &[i32]) -> Vec<Seen> {
    let mut children: BTreeMap<i32, Vec<Seen>> = BTreeMap::new();
    for process in all {
        children.entry(process.parent).or_default().push(*process);
    }
    let mut waiting = roots.to_vec();
    let mut found = Vec::new();
    while let Some(parent) = waiting.pop() {
        for process in children.remove(&parent).unwrap_or_default() {
            waiting.push(process.pid.as_raw_nonzero().get());
            found.push(process);
        }
    }
    found
}

fn signal_seen(process: &Seen, signal: i32) {
    let Ok(pidfd) = pidfd_open(process.pid, PidfdFlags::empty()) else { return };
    if look(process.pid).is_some_and(|now| now.started == process.started) {
        // It may end at any moment, and that is what is wanted.
        let _ = sys::send_signal(pidfd.as_fd(), signal);
    }
}

/// Signals everything below a process.
pub(crate) fn signal_below(root: Pid, signal: i32) -> io::Result<()> {
    for process in below(&processes()?, &[root.as_raw_nonzero().get()]) {
        signal_seen(&process, signal);
    }
    Ok(())
}

/// Stops everything that `find` finds until nothing new appears, then kills it all; returns how much there was.
///
/// What is stopped cannot start anything, so once nothing new appears this was all of it.
fn stop_and_kill(find: impl Fn(&[Seen]) -> Vec<Seen>) -> io::Result<usize> {
    let mut stopped: HashMap<Pid, Seen> = HashMap::new();
    let deadline = Instant::now() + KILL_PATIENCE;
    loop {
        let mut new = false;
        for process in find(&processes()?) {
            if !process.zombie && stopped.insert(process.pid, process) != Some(process) {
                signal_seen(&process, libc::SIGSTOP);
                new = true;
            }
        }
        if !new || Instant::now() > deadline {
            break;
        }
    }
    for process in stopped.values() {
        signal_seen(process, libc::SIGKILL);
    }
    Ok(stopped.len())
}

/// Kills everything below a process, once.
pub(crate) fn kill_below(root: Pid) -> io::Result<usize> {
    stop_and_kill(|all| below(all, &[root.as_raw_nonzero().get()]))
}

/// The cgroup of a process, as one path; the empty one where that cannot be known.
fn cgroup_of(pid: &str) -> String {
    let text = std::fs::File::open(format!("/proc/{pid}/cgroup"))
        .and_then(|file| cgroup::read_text(file.as_fd(), CGROUP_BYTES_MAX))
        .unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default().to_owned()
}

/// Whether a cgroup is one that an agent made for an execution, when the agent itself is in `ours`.
///
/// Only what the two do not share counts: an agent may run inside an execution of another one.
fn is_of_execution(theirs: &str, ours: &str) -> bool {
    let mut ours = ours.split('/');
    let mut apart = theirs.split('/').skip_while(|part| ours.next() == Some(part));
    apart.any(|part| part.starts_with(ExecutionId::PREFIX))
}

/// Kills what was orphaned to us and belongs to no execution that we watch over.
///
/// What is in the cgroup of an execution does belong to it, even if its leader is gone.
pub(crate) fn end_unowned(agent: &Agent) {
    let me = rustix::process::getpid().as_raw_nonzero().get();
    let ours = cgroup_of("self");
    let is_kept = |p: &Seen| is_of_execution(&cgroup_of(&p.pid.as_raw_nonzero().to_string()), &ours);
    let deadline = Instant::now() + KILL_PATIENCE;
    loop {
        let owned: Vec<Pid> = lock(&agent.executions.children).keys().copied().collect();
        let found = stop_and_kill(|all| {
            let is_unowned = |p: &&Seen| p.parent == me && !owned.contains(&p.pid) && !is_kept(p);
            let roots: Vec<Seen> = all.iter().filter(is_unowned).copied().collect();
            let pids: Vec<i32> = roots.iter().map(|p| p.pid.as_raw_nonzero().get()).collect();
            [roots, below(all, &pids)].concat()
        });
        match found {
            Ok(0) => return,
            Ok(_) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
            Ok(_) => return agent.control.report_unverifiable(agent, "processes that outlived their monitor"),
            Err(cause) => {
                say(&format!("cannot look for processes: {cause}"));
                return agent.control.report_unverifiable(agent, "processes that outlived their monitor");
            }
        }
    }
}

/// Where the agent is not PID 1: takes everything that it started along. Reaps, too.
pub(crate) fn end_all_descendants() {
    let me = rustix::process::getpid();
    let deadline = Instant::now() + KILL_PATIENCE;
    while kill_below(me).is_ok_and(|found| found > 0) && Instant::now() < deadline {
        while sys::reap_one().is_some() {}
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_are_parsed() {
        let pid = Pid::from_raw(7).unwrap();
        let line = "7 (a) b) Z 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 4711 22";
        let seen = parse_stat(pid, line).unwrap();
        assert_eq!((seen.parent, seen.started, seen.zombie), (3, 4711, true));
        assert_eq!(parse_stat(pid, "7 (a"), None);
    }

    #[test]
    fn cgroups_of_executions_are_told() {
        assert!(is_of_execution("/exe_1", "/"));
        assert!(is_of_execution("/s/exe_1/deeper", "/s"));
        assert!(is_of_execution("/s/exe_1", "/s/agent"));
        assert!(!is_of_execution("/s", "/s"));
        assert!(!is_of_execution("/", "/"));
        // The agent itself runs in an execution.
        assert!(!is_of_execution("/exe_1", "/exe_1"));
        assert!(is_of_execution("/exe_1/exe_2", "/exe_1"));
        assert!(!is_of_execution("", ""));
    }

    #[test]
    fn only_what_is_below_is_found() {
        let seen = |pid: i32, parent| Seen { pid: Pid::from_raw(pid).unwrap(), parent, started: 0, zombie: false };
        let all = [seen(1, 0), seen(2, 1), seen(3, 2), seen(4, 3), seen(5, 1), seen(6, 5)];
        let mut found: Vec<i32> = below(&all, &[2]).iter().map(|p| p.pid.as_raw_nonzero().get()).collect();
        found.sort_unstable();
        assert_eq!(found, [3, 4]);
    }
}
