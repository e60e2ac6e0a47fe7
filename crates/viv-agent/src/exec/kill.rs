//! Signals to many processes, and how to know that they are gone.
//!
//! Pids are only ever looked up: a signal goes to a descriptor that was
//! checked, after it was opened, to stand for the process that was meant. Where the
//! kernel has no such descriptors (gVisor), the check comes right before the signal.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use viv_core::ExecutionId;

use crate::agent::{Agent, lock, timeout};
use crate::error::say;
use crate::exec::cgroup;
use crate::exec::tag::Tag;
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

/// A process that is held on to, so that a signal goes to it or to nobody.
pub(crate) enum Held {
    Descriptor(OwnedFd),
    /// Without descriptors of processes: its pid, and when it started, if that could be seen.
    Number(Pid, Option<u64>),
}

impl Held {
    pub(crate) fn open(pid: Pid) -> rustix::io::Result<Self> {
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self::Descriptor(pidfd)),
            Err(Errno::NOSYS) => {
                let seen = look(pid).ok_or(Errno::SRCH)?;
                Ok(Self::Number(pid, Some(seen.started)))
            }
            Err(errno) if is_nobody(errno) => Err(Errno::SRCH),
            Err(errno) => Err(errno),
        }
    }

    /// A child that was not waited for yet, so that the pid is its own.
    pub(crate) fn of_child(pid: Pid, pidfd: Option<OwnedFd>) -> Self {
        pidfd.map_or_else(|| Self::Number(pid, look(pid).map(|seen| seen.started)), Self::Descriptor)
    }

    pub(crate) fn send(&self, signal: i32) -> io::Result<()> {
        match self {
            Self::Descriptor(pidfd) => sys::send_signal(pidfd.as_fd(), signal),
            // Pids come around only after thousands of others, so it is the one that was just looked at.
            Self::Number(pid, Some(started)) if look(*pid).is_some_and(|now| now.started == *started) => {
                sys::send_signal_by_number(*pid, signal)
            }
            Self::Number(..) => Err(Errno::SRCH.into()),
        }
    }
}

/// Signals everything in a cgroup.
pub(crate) fn signal_cgroup(dir: &OwnedFd, signal: i32) -> io::Result<()> {
    let opened: Vec<(Pid, Held)> =
        cgroup::pids(dir)?.into_iter().filter_map(|pid| Some((pid, Held::open(pid).ok()?))).collect();
    // Those that are still listed are the ones that were opened. There can be thousands, so no list is searched.
    let still: HashSet<Pid> = cgroup::pids(dir)?.into_iter().collect();
    for (pid, held) in opened {
        if still.contains(&pid) {
            // It may end at any moment, and that is what is wanted.
            let _ = held.send(signal);
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
        match stat_of(pid) {
            Ok(text) => seen.extend(parse_stat(pid, &text)),
            // Where processes are hidden from one another, one may be hidden from us too. What is not seen is not gone.
            Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied && !is_over(pid) => return Err(cause),
            Err(_) => {}
        }
    }
    Ok(seen)
}

/// Whether a process that cannot be looked at has ended, and nobody has waited for it yet: of those the kernel tells
/// least, since they have no memory left by which to know whose it was.
fn is_over(pid: Pid) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
            poll(&mut fds, Some(&timeout(Duration::ZERO))) == Ok(1)
        }
        Err(errno) => is_nobody(errno),
    }
}

/// Whether no process has this pid: it is free, or a thread's by now (which kernels before 6.15 call invalid).
fn is_nobody(errno: Errno) -> bool {
    matches!(errno, Errno::SRCH | Errno::NOENT | Errno::INVAL)
}

fn stat_of(pid: Pid) -> io::Result<String> {
    let file = std::fs::File::open(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
    cgroup::read_text(file.as_fd(), STAT_BYTES_MAX)
}

fn look(pid: Pid) -> Option<Seen> {
    parse_stat(pid, &stat_of(pid).ok()?)
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
    let Ok(held) = Held::open(process.pid) else { return };
    if look(process.pid).is_some_and(|now| now.started == process.started) {
        // It may end at any moment, and that is what is wanted.
        let _ = held.send(signal);
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

/// Signals everything that has a tag.
pub(crate) fn signal_tagged(tag: Tag, signal: i32) -> io::Result<()> {
    for process in tagged(&processes()?, tag) {
        signal_seen(&process, signal);
    }
    Ok(())
}

/// Whether anything lives that has a tag.
pub(crate) fn is_any_tagged(tag: Tag) -> io::Result<bool> {
    Ok(tagged(&processes()?, tag).iter().any(|process| !process.zombie))
}

/// Kills everything that has a tag, once; returns how much there was.
pub(crate) fn kill_tagged(tag: Tag) -> io::Result<usize> {
    stop_and_kill(|all| tagged(all, tag))
}

fn tagged(all: &[Seen], tag: Tag) -> Vec<Seen> {
    all.iter().filter(|process| tag.is_on(process.pid)).copied().collect()
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

    /// X3: whoever kills by looking must find who chose a name that is no text.
    #[test]
    fn a_name_of_any_bytes_hides_nobody() {
        use std::io::Read;
        let rename = r#"open F, ">", "/proc/self/comm"; print F "\xff\xfe) Z 1"; close F; $| = 1; print "x"; <STDIN>"#;
        let piped = std::process::Stdio::piped;
        let mut child =
            std::process::Command::new("perl").args(["-e", rename]).stdin(piped()).stdout(piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pid = Pid::from_child(&child);
        let seen = look(pid);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(seen.is_some_and(|seen| !seen.zombie), "{seen:?}");
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
