//! What those inside do right now, for a diagnosis (O3): read from `/proc`, changing nothing.
//!
//! Pids come from the sandbox's own cgroups and are read at once; one that was given to somebody else meanwhile is not in
//! them any more when it is looked at again (J6).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use viv_provider::{InstanceRef, ProcessSeen};

use super::{LocalProvider, Result};

/// Processes that are told; of more, those with the lowest pids.
const PROCESSES_MAX: usize = 256;

/// Levels of cgroups below the sandbox's own: one for the agent, one for each command, and what it may make itself.
const DEPTH_MAX: usize = 4;

/// Bytes read of a file in `/proc`: a table of connections may be long.
const TEXT_BYTES_MAX: usize = 256 << 10;

/// What the kernel counts processor time in.
const US_PER_TICK: u64 = 10_000;

impl LocalProvider {
    pub(super) async fn see_processes(&self, instance: &InstanceRef) -> Result<Vec<ProcessSeen>> {
        let agent = self.find_parts(instance).await?.agent_pid;
        let instance = instance.clone();
        self.blocking(move |this| {
            let record = this.need_record(&instance)?;
            let cgroups = this.cgroups(&record);
            let listed = || {
                let mut pids = BTreeSet::new();
                cgroups.folders().for_each(|folder| pids_below(&folder, DEPTH_MAX, &mut pids));
                pids
            };
            let found = listed().into_iter().filter(|pid| Some(*pid) != agent).take(PROCESSES_MAX);
            let seen: Vec<(u32, ProcessSeen)> = found.filter_map(|pid| Some((pid, see(pid)?))).collect();
            let still = listed();
            Ok(seen.into_iter().filter(|(pid, _)| still.contains(pid)).map(|(_, process)| process).collect())
        })
        .await
    }
}

fn pids_below(folder: &Path, depth: usize, pids: &mut BTreeSet<u32>) {
    let listed = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    pids.extend(listed.lines().filter_map(|line| line.parse::<u32>().ok()));
    if depth == 0 || pids.len() >= PROCESSES_MAX {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            pids_below(&entry.path(), depth - 1, pids);
        }
    }
}

/// The beginning of a small file.
fn text(path: &str) -> Option<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.take(TEXT_BYTES_MAX as u64).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn see(pid: u32) -> Option<ProcessSeen> {
    let mut seen = parse_stat(&text(&format!("/proc/{pid}/stat"))?)?;
    let status = text(&format!("/proc/{pid}/status")).unwrap_or_default();
    let inside = status.lines().find_map(|line| line.strip_prefix("NSpid:")?.split_whitespace().last()?.parse().ok());
    seen.pid = inside.unwrap_or(pid);
    let waits_in = text(&format!("/proc/{pid}/wchan")).filter(|name| !name.is_empty() && name != "0");
    seen.waits_in = waits_in;
    if let Some((number, first)) = text(&format!("/proc/{pid}/syscall")).as_deref().and_then(parse_syscall) {
        let known = CALLS.iter().find(|(known, ..)| *known == number);
        seen.call = Some(known.map_or_else(|| format!("call {number}"), |(_, name, _)| (*name).to_owned()));
        if known.is_some_and(|(.., by_descriptor)| *by_descriptor) {
            seen.on = u32::try_from(first).ok().map(|descriptor| behind(pid, descriptor));
        }
    }
    Some(seen)
}

/// `PID (NAME) STATE …`; the name may hold anything, so what counts stands after the last parenthesis.
fn parse_stat(stat: &str) -> Option<ProcessSeen> {
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    let page_bytes = rustix::param::page_size() as u64;
    Some(ProcessSeen {
        name: name.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect(),
        state: fields.first()?.chars().next()?,
        cpu_us: (number(11)? + number(12)?) * US_PER_TICK,
        memory_bytes: number(21)?.saturating_mul(page_bytes),
        ..ProcessSeen::default()
    })
}

/// The number of the call and its first argument; nothing while it runs.
fn parse_syscall(line: &str) -> Option<(i64, u64)> {
    let mut words = line.split_whitespace();
    let number = words.next()?.parse().ok().filter(|number| *number >= 0)?;
    let first = words.next()?.strip_prefix("0x")?;
    Some((number, u64::from_str_radix(first, 16).ok()?))
}

/// What is behind a descriptor, in words.
fn behind(pid: u32, descriptor: u32) -> String {
    let link = fs::read_link(format!("/proc/{pid}/fd/{descriptor}"));
    let link = link.map(|link| link.to_string_lossy().into_owned()).unwrap_or_default();
    let what = if let Some(inode) = link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
        connection(pid, inode).unwrap_or_else(|| "a socket".to_owned())
    } else if link.starts_with("pipe:") {
        "a pipe".to_owned()
    } else if link.is_empty() {
        "which is closed".to_owned()
    } else {
        link.chars().filter(|letter| !letter.is_control()).take(200).collect()
    };
    format!("descriptor {descriptor}, {what}")
}

/// The connection that a socket is, by its inode.
fn connection(pid: u32, inode: &str) -> Option<String> {
    let table = text(&format!("/proc/{pid}/net/tcp"))?;
    table.lines().skip(1).find_map(|line| parse_connection(line, inode))
}

/// `sl local_address rem_address st tx_queue:rx_queue tr:tm retrnsmt uid timeout inode`
fn parse_connection(line: &str, inode: &str) -> Option<String> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    if fields.get(9) != Some(&inode) {
        return None;
    }
    let address = |field: &str| {
        let (host, port) = field.split_once(':')?;
        let host = std::net::Ipv4Addr::from(u32::from_str_radix(host, 16).ok()?.to_ne_bytes());
        Some(format!("{host}:{}", u16::from_str_radix(port, 16).ok()?))
    };
    let (local, remote) = (address(fields.get(1)?)?, address(fields.get(2)?)?);
    Some(match *fields.get(3)? {
        "01" => format!("a connection to {remote}"),
        "02" => format!("a connection to {remote} that is not answered"),
        "0A" => format!("a socket that listens on {local}"),
        _ => format!("a connection to {remote} that is being closed"),
    })
}

/// Calls in which one can wait for long, and whether their first argument is a descriptor.
const CALLS: &[(i64, &str, bool)] = &[
    (libc::SYS_read, "read", true),
    (libc::SYS_readv, "readv", true),
    (libc::SYS_pread64, "pread64", true),
    (libc::SYS_write, "write", true),
    (libc::SYS_writev, "writev", true),
    (libc::SYS_recvfrom, "recvfrom", true),
    (libc::SYS_recvmsg, "recvmsg", true),
    (libc::SYS_sendto, "sendto", true),
    (libc::SYS_sendmsg, "sendmsg", true),
    (libc::SYS_accept, "accept", true),
    (libc::SYS_accept4, "accept4", true),
    (libc::SYS_connect, "connect", true),
    (libc::SYS_flock, "flock", true),
    (libc::SYS_fcntl, "fcntl", true),
    (libc::SYS_fsync, "fsync", true),
    (libc::SYS_epoll_pwait, "epoll_pwait", true),
    (libc::SYS_ioctl, "ioctl", true),
    (libc::SYS_openat, "openat", false),
    (libc::SYS_ppoll, "ppoll", false),
    (libc::SYS_pselect6, "pselect6", false),
    (libc::SYS_futex, "futex", false),
    (libc::SYS_nanosleep, "nanosleep", false),
    (libc::SYS_clock_nanosleep, "clock_nanosleep", false),
    (libc::SYS_wait4, "wait4", false),
    (libc::SYS_waitid, "waitid", false),
    (libc::SYS_rt_sigsuspend, "rt_sigsuspend", false),
    (libc::SYS_rt_sigtimedwait, "rt_sigtimedwait", false),
    (libc::SYS_restart_syscall, "restart_syscall", false),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_epoll_wait, "epoll_wait", true),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_poll, "poll", false),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_select, "select", false),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, "open", false),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_pause, "pause", false),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o3_names_with_parentheses_and_control_characters_do_not_confuse() {
        let stat = "42 (a) R (\u{1b}b) S 1 42 42 0 -1 4194304 100 0 0 0 7 5 0 0 20 0 1 0 100 1000 50 0";
        let seen = parse_stat(stat).unwrap();
        assert_eq!((seen.name.as_str(), seen.state, seen.cpu_us), ("a) R (?b", 'S', 120_000));
        assert_eq!(seen.memory_bytes, 50 * rustix::param::page_size() as u64);
    }

    #[test]
    fn o3_who_runs_is_in_no_call() {
        assert_eq!(parse_syscall("running\n"), None);
        assert_eq!(parse_syscall("-1 0x7ffe 0x0\n"), None);
        assert_eq!(parse_syscall("45 0x3 0x7f 0x1 0x0 0x0 0x0 0x7ffc 0x7f11\n"), Some((45, 3)));
    }

    #[test]
    fn o3_a_connection_is_found_by_its_inode() {
        let line =
            "   1: 0100007F:A000 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  0 0 777 1 0 20 4 30 10 -1";
        assert_eq!(parse_connection(line, "777").as_deref(), Some("a connection to 127.0.0.1:8080"));
        assert_eq!(parse_connection(line, "77"), None);
    }

    #[test]
    fn o3_this_process_can_be_seen() {
        let seen = see(std::process::id()).unwrap();
        assert!(seen.memory_bytes > 0 && !seen.name.is_empty(), "{seen:?}");
    }
}
