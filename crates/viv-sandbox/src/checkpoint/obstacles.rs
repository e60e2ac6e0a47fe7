//! What is in the way of saving a sandbox's memory, and which process holds it. Read from `/proc`: nobody inside notices.
//!
//! Those are the reasons that are known to make CRIU refuse. What is not found here can be in the way all the same; then
//! the dump says so, and the files are saved.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{major, minor};
use viv_core::ExecutionId;
use viv_provider::Obstacle;

use super::criu::GHOST_BYTES_MAX;

/// Longest command that is told.
const COMMAND_CHARS_MAX: usize = 120;

/// What CRIU keeps of the descriptors that have no file: the word in brackets.
const KEPT_ANONYMOUS: [&str; 8] =
    ["eventfd", "eventpoll", "signalfd", "inotify", "fanotify", "timerfd", "pidfd", "bpf-map"];

/// Families of sockets that CRIU keeps, as the kernel calls their protocols.
const KEPT_SOCKETS: [&str; 5] = ["UNIX", "TCP", "UDP", "NETLINK", "PACKET"];

/// Numbers of devices that are in every sandbox: null, zero, full, random, urandom; the multiplexer of terminals.
const KEPT_DEVICES: [(u32, u32); 6] = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 2)];

/// Terminals of `devpts`.
const TERMINALS: std::ops::RangeInclusive<u32> = 136..=143;

/// The terminal of whoever opens it.
const OWN_TERMINAL: (u32, u32) = (5, 0);

/// What the processes of a cgroup hold, all that are below it included. `init` is the sandbox's first process.
pub(crate) fn of_cgroup(cgroup: &Path, init: u32) -> io::Result<Vec<Obstacle>> {
    let mut pids = Vec::new();
    collect(cgroup, &mut pids)?;
    pids.sort_unstable();
    Ok(pids.into_iter().flat_map(|pid| of_process(Path::new("/proc"), init, pid)).collect())
}

fn collect(cgroup: &Path, pids: &mut Vec<u32>) -> io::Result<()> {
    let text = fs::read_to_string(cgroup.join("cgroup.procs"))?;
    pids.extend(text.lines().filter_map(|line| line.trim().parse::<u32>().ok()));
    for entry in fs::read_dir(cgroup)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            // One that ends meanwhile holds nothing any more.
            let _ = collect(&entry.path(), pids);
        }
    }
    Ok(())
}

/// What one process holds; nothing when it is gone.
fn of_process(proc: &Path, init: u32, pid: u32) -> Vec<Obstacle> {
    let (at, of_init) = (proc.join(pid.to_string()), proc.join(init.to_string()));
    let Ok(status) = fs::read_to_string(at.join("status")) else { return Vec::new() };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).unwrap_or_default();
    let mut found = Vec::new();
    let other = |namespace: &str| {
        let link = |of: &Path| fs::read_link(of.join("ns").join(namespace)).ok();
        link(&at).zip(link(&of_init)).is_some_and(|(its, that)| its != that)
    };
    if other("pid") || other("pid_for_children") {
        found.push("a namespace of processes within the sandbox's own".to_owned());
    }
    if other("user") {
        found.push("a namespace of users within the sandbox's own".to_owned());
    }
    if field("TracerPid:") != "0" && !field("TracerPid:").is_empty() {
        found.push("a debugger holds it".to_owned());
    }
    if pid != init {
        found.extend(descriptors(&at));
    }
    let command = command(&at, field("Name:"));
    let inside = field("NSpid:").split_ascii_whitespace().next_back().and_then(|pid| pid.parse().ok());
    let execution = execution(&at);
    found.sort();
    found.dedup();
    let obstacle = |what| Obstacle { what, pid: inside, command: Some(command.clone()), execution: execution.clone() };
    found.into_iter().map(obstacle).collect()
}

/// What is in the way among its open files.
fn descriptors(process: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(process.join("fd")) else { return Vec::new() };
    entries.flatten().filter_map(|entry| of_descriptor(&entry.path())).collect()
}

fn of_descriptor(path: &Path) -> Option<String> {
    let name = fs::read_link(path).ok()?;
    let name = name.to_string_lossy();
    if let Some(word) = name.strip_prefix("anon_inode:") {
        let word = word.trim_matches(['[', ']']);
        return (!KEPT_ANONYMOUS.contains(&word)).then(|| match word {
            "io_uring" => "an io_uring".to_owned(),
            other => format!("a descriptor of the kind {other}"),
        });
    }
    if name.starts_with("socket:") {
        let mut protocol = [0_u8; 32];
        let length = rustix::fs::getxattr(path, "system.sockprotoname", &mut protocol).ok()?;
        let protocol = String::from_utf8_lossy(&protocol[..length]).trim_end_matches('\0').to_owned();
        let kept = KEPT_SOCKETS.iter().any(|family| protocol.starts_with(family)) || protocol.starts_with("RAW");
        return (!kept).then(|| format!("a socket of the kind {protocol}"));
    }
    let file = fs::metadata(path).ok()?;
    if file.file_type().is_char_device() || file.file_type().is_block_device() {
        let device = (major(file.rdev()), minor(file.rdev()));
        if device == OWN_TERMINAL {
            return Some("its terminal, open as /dev/tty".to_owned());
        }
        let kept = KEPT_DEVICES.contains(&device) || TERMINALS.contains(&device.0);
        return (!kept).then(|| format!("the device {name} ({}:{})", device.0, device.1));
    }
    // Memory that has a descriptor is dumped as memory, whatever its size.
    let is_memory = name.starts_with("/memfd:");
    let is_large_ghost = file.is_file() && !is_memory && file.nlink() == 0 && file.len() > GHOST_BYTES_MAX;
    is_large_ghost.then(|| format!("a file without a name of {} MiB", file.len() >> 20))
}

fn command(process: &Path, name: &str) -> String {
    let line = fs::read(process.join("cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).trim_end_matches('\0').replace('\0', " ");
    let line = if line.is_empty() { name.to_owned() } else { line };
    line.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(COMMAND_CHARS_MAX).collect()
}

/// Its execution, which its cgroup is called after.
fn execution(process: &Path) -> Option<ExecutionId> {
    let text = fs::read_to_string(process.join("cgroup")).ok()?;
    let names = text.lines().flat_map(|line| line.split('/'));
    names.filter(|name| name.starts_with(ExecutionId::PREFIX)).find_map(|name| name.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_open_is_told_apart() {
        let own = std::process::id();
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let null = fs::File::open("/dev/null").unwrap();
        assert_eq!(of_process(Path::new("/proc"), own, own), []);
        let path = |file: &dyn std::os::fd::AsRawFd| format!("/proc/self/fd/{}", file.as_raw_fd());
        assert_eq!(of_descriptor(Path::new(&path(&socket))), None);
        assert_eq!(of_descriptor(Path::new(&path(&null))), None);
        if let Ok(other) = fs::File::open("/dev/kmsg") {
            assert!(of_descriptor(Path::new(&path(&other))).unwrap().contains("/dev/kmsg"));
        }
        let ghost = tempfile::tempfile().unwrap();
        ghost.set_len(GHOST_BYTES_MAX).unwrap();
        assert_eq!(of_descriptor(Path::new(&path(&ghost))), None);
        ghost.set_len(GHOST_BYTES_MAX + 1).unwrap();
        assert_eq!(of_descriptor(Path::new(&path(&ghost))).unwrap(), "a file without a name of 256 MiB");
    }

    #[test]
    fn who_is_gone_holds_nothing() {
        assert_eq!(of_process(Path::new("/proc"), std::process::id(), u32::MAX), []);
    }
}
