//! What is in the way of saving a sandbox's memory, and which process holds it. Read from `/proc`: nobody inside notices.
//!
//! Those are the reasons that are known to make CRIU refuse. What is not found here can be in the way all the same; then
//! the dump says so, and the files are saved.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{DirEntryExt, FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{major, makedev, minor};
use viv_core::ExecutionId;
use viv_provider::{Obstacle, ObstacleEffect};

use super::criu::{GHOST_BYTES_MAX, WATCHED};
use super::sockets::{Sockets, inode_of};

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

/// Files that are looked at to find those that are watched. Where there are more, the dump tells.
const LOOKED_AT_MAX: usize = 50_000;

/// Filesystems of the kernel's own that files can be open on and no mount shows, by their numbers.
const OF_THE_KERNEL: [(u64, &str); 2] =
    [(0x1980_0202, "a queue of messages (mq_open)"), (0x5345_434d, "secret memory (memfd_secret)")];

/// What is the same for all processes of a sandbox.
struct Sandbox<'p> {
    proc: &'p Path,
    init: u32,
    sockets: Sockets,
    mounts: Mounts,
}

/// The mounts that those inside see.
#[derive(Default)]
struct Mounts {
    ids: BTreeSet<u64>,
    /// Kinds of filesystems by their devices.
    kinds: BTreeMap<u64, String>,
}

impl Mounts {
    fn parse(mountinfo: &str) -> Self {
        let mut mounts = Self::default();
        for line in mountinfo.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let [id, _, device, ..] = fields.as_slice() else { continue };
            mounts.ids.extend(id.parse::<u64>().ok());
            let kind = line.split_once(" - ").and_then(|(_, after)| after.split(' ').next());
            let device =
                device.split_once(':').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
            if let (Some(kind), Some((major, minor))) = (kind, device) {
                mounts.kinds.insert(makedev(major, minor), kind.to_owned());
            }
        }
        mounts
    }
}

impl<'p> Sandbox<'p> {
    fn look(proc: &'p Path, init: u32) -> Self {
        let at = proc.join(init.to_string());
        let mountinfo = fs::read_to_string(at.join("mountinfo")).unwrap_or_default();
        Self { proc, init, sockets: Sockets::look(&at), mounts: Mounts::parse(&mountinfo) }
    }
}

/// What was found, and what it means.
type Told = (ObstacleEffect, String);

fn prevents(what: impl Into<String>) -> Told {
    (ObstacleEffect::Prevents, what.into())
}

/// What the processes of a cgroup hold, all that are below it included. `init` is the sandbox's first process.
pub(crate) fn of_cgroup(cgroup: &Path, init: u32) -> io::Result<Vec<Obstacle>> {
    let mut pids = Vec::new();
    collect(cgroup, &mut pids)?;
    pids.sort_unstable();
    let sandbox = Sandbox::look(Path::new("/proc"), init);
    Ok(pids.into_iter().flat_map(|pid| of_process(&sandbox, pid)).collect())
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
fn of_process(sandbox: &Sandbox<'_>, pid: u32) -> Vec<Obstacle> {
    let (at, of_init) = (sandbox.proc.join(pid.to_string()), sandbox.proc.join(sandbox.init.to_string()));
    let Ok(status) = fs::read_to_string(at.join("status")) else { return Vec::new() };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).unwrap_or_default();
    let mut found = Vec::new();
    let other = |namespace: &str| {
        let link = |of: &Path| fs::read_link(of.join("ns").join(namespace)).ok();
        link(&at).zip(link(&of_init)).is_some_and(|(its, that)| its != that)
    };
    if other("pid") || other("pid_for_children") {
        found.push(prevents("a namespace of processes within the sandbox's own"));
    }
    if other("user") {
        found.push(prevents("a namespace of users within the sandbox's own"));
    }
    if field("TracerPid:") != "0" && !field("TracerPid:").is_empty() {
        found.push(prevents("a debugger holds it"));
    }
    if pid != sandbox.init {
        found.extend(descriptors(sandbox, &at, other("mnt")));
    }
    let command = command(&at, field("Name:"));
    let inside = field("NSpid:").split_ascii_whitespace().next_back().and_then(|pid| pid.parse().ok());
    let execution = execution(&at);
    found.sort();
    found.dedup();
    let obstacle = |(effect, what)| {
        let (command, execution) = (Some(command.clone()), execution.clone());
        Obstacle { effect, what, pid: inside, command, execution }
    };
    found.into_iter().map(obstacle).collect()
}

/// What is in the way among its open files. Who has mounts of his own has files that are known there alone.
fn descriptors(sandbox: &Sandbox<'_>, process: &Path, own_mounts: bool) -> Vec<Told> {
    let Ok(entries) = fs::read_dir(process.join("fd")) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(name) = fs::read_link(&path) else { continue };
        let name = name.to_string_lossy();
        let info = fs::read_to_string(process.join("fdinfo").join(entry.file_name())).unwrap_or_default();
        if let Some(inode) = inode_of(&name) {
            found.extend(of_socket(&sandbox.sockets, &path, inode));
        } else if name == "anon_inode:inotify" {
            found.extend(of_watches(sandbox, &info).map(prevents));
        } else {
            let mounts = (!own_mounts).then_some(&sandbox.mounts);
            found.extend(of_descriptor(&path, &name, &info, mounts).map(prevents));
        }
    }
    found
}

fn of_socket(sockets: &Sockets, path: &Path, inode: u64) -> Option<Told> {
    let mut protocol = [0_u8; 32];
    let length = rustix::fs::getxattr(path, "system.sockprotoname", &mut protocol).ok()?;
    let protocol = String::from_utf8_lossy(&protocol[..length]).trim_end_matches('\0').to_owned();
    let kept = KEPT_SOCKETS.iter().any(|family| protocol.starts_with(family)) || protocol.starts_with("RAW");
    if !kept {
        return Some(prevents(format!("a socket of the kind {protocol}")));
    }
    if sockets.is_unread(inode) {
        return Some(prevents("a netlink socket with an answer that nobody has read"));
    }
    if sockets.is_unaccepted(inode) {
        return Some(prevents("connections that it has not accepted yet"));
    }
    let port = sockets.port_of_outside(inode)?;
    Some((ObstacleEffect::Closed, format!("a connection from outside, to port {port}")))
}

/// What is watched by names that CRIU does not find: the overlay tells it inodes alone, and those of processes go.
fn of_watches(sandbox: &Sandbox<'_>, info: &str) -> Option<String> {
    let hex = |line: &str, name: &str| {
        let value = line.split(' ').find_map(|field| field.strip_prefix(name))?;
        u64::from_str_radix(value, 16).ok()
    };
    let mut sought = BTreeSet::new();
    for line in info.lines().filter(|line| line.starts_with("inotify ")) {
        let Some((inode, device)) = hex(line, "ino:").zip(hex(line, "sdev:")) else { continue };
        // As the kernel has it: twenty bits for the minor.
        let device = makedev((device >> 20) as u32, (device & 0xf_ffff) as u32);
        match sandbox.mounts.kinds.get(&device).map(String::as_str) {
            Some("proc") => return Some("a watch (inotify) of a file in /proc".to_owned()),
            Some("overlay") => drop(sought.insert(inode)),
            Some(_) | None => {}
        }
    }
    let root = sandbox.proc.join(sandbox.init.to_string()).join("root");
    let mut left = LOOKED_AT_MAX;
    for folder in WATCHED {
        let folder = root.join(folder.trim_start_matches('/'));
        if sought.is_empty() {
            return None;
        }
        if let Ok(found) = fs::symlink_metadata(&folder) {
            sought.remove(&found.ino());
        }
        find(&folder, &mut sought, &mut left);
    }
    let missing = !sought.is_empty() && left > 0;
    missing.then(|| format!("a watch (inotify) of a file elsewhere than in {}", WATCHED.join(", ")))
}

/// Strikes out what is found below a folder, links not followed.
fn find(folder: &Path, sought: &mut BTreeSet<u64>, left: &mut usize) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if sought.is_empty() || *left == 0 {
            return;
        }
        *left -= 1;
        sought.remove(&entry.ino());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            find(&entry.path(), sought, left);
        }
    }
}

/// What is in the way of a descriptor with this name that is no socket; without mounts, of which of them it is is not
/// looked at.
fn of_descriptor(path: &Path, name: &str, info: &str, mounts: Option<&Mounts>) -> Option<String> {
    if let Some(word) = name.strip_prefix("anon_inode:") {
        let word = word.trim_matches(['[', ']']);
        return (!KEPT_ANONYMOUS.contains(&word)).then(|| match word {
            "io_uring" => "an io_uring".to_owned(),
            other => format!("a descriptor of the kind {other}"),
        });
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
    let is_plain = file.is_file() && !name.starts_with("/memfd:");
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    if is_plain && mounts.zip(mount).is_some_and(|(mounts, mount)| !mounts.ids.contains(&mount)) {
        let kind = rustix::fs::statfs(path).map_or(0, |found| found.f_type as u64);
        let known = OF_THE_KERNEL.iter().find(|(number, _)| *number == kind);
        return known.map(|(_, words)| (*words).to_owned());
    }
    let is_large_ghost = is_plain && file.nlink() == 0 && file.len() > GHOST_BYTES_MAX;
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

    fn told(file: &dyn std::os::fd::AsRawFd) -> Option<String> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = fs::read_link(&path).unwrap();
        of_descriptor(Path::new(&path), &name.to_string_lossy(), "", None)
    }

    #[test]
    fn what_is_open_is_told_apart() {
        let own = std::process::id();
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let null = fs::File::open("/dev/null").unwrap();
        let sandbox = Sandbox::look(Path::new("/proc"), own);
        assert_eq!(of_process(&sandbox, own), []);
        let path = |file: &dyn std::os::fd::AsRawFd| format!("/proc/self/fd/{}", file.as_raw_fd());
        assert_eq!(of_socket(&sandbox.sockets, Path::new(&path(&socket)), 0), None);
        assert_eq!(told(&null), None);
        if let Ok(other) = fs::File::open("/dev/kmsg") {
            assert!(told(&other).unwrap().contains("/dev/kmsg"));
        }
        let ghost = tempfile::tempfile().unwrap();
        ghost.set_len(GHOST_BYTES_MAX).unwrap();
        assert_eq!(told(&ghost), None);
        ghost.set_len(GHOST_BYTES_MAX + 1).unwrap();
        assert_eq!(told(&ghost).unwrap(), "a file without a name of 256 MiB");
    }

    #[test]
    fn what_is_watched_elsewhere_is_told() {
        let mountinfo = "102 75 0:40 / / rw - overlay none rw\n107 105 0:49 / /dev/shm rw - tmpfs tmpfs rw\n\
            108 102 0:46 / /proc rw - proc proc rw\n";
        let mut sandbox = Sandbox::look(Path::new("/no/such/folder"), 1);
        sandbox.mounts = Mounts::parse(mountinfo);
        let watch = |device: &str| format!("pos:\t0\ninotify wd:1 ino:a62161 sdev:{device} mask:100\n");
        assert!(of_watches(&sandbox, &watch("28")).unwrap().contains("elsewhere than in /workspace"));
        assert_eq!(of_watches(&sandbox, &watch("31")), None);
        assert!(of_watches(&sandbox, &watch("2e")).unwrap().contains("/proc"));
        assert_eq!(of_watches(&sandbox, "pos:\t0\n"), None);
    }

    #[test]
    fn who_is_gone_holds_nothing() {
        assert_eq!(of_process(&Sandbox::look(Path::new("/proc"), std::process::id()), u32::MAX), []);
    }
}
