//! The router's namespace and pasta, held by a process of ours.
//!
//! ```text
//!   shim ──fork──► uplink: first process of a PID namespace, without any privilege
//!                    │       its network namespace is the router's
//!                    └──► pasta -f: in the machine's network namespace
//! ```
//!
//! The uplink dies with the shim (parent-death signal, and a pipe), and pasta
//! with the uplink, because that is what the kernel does to a PID namespace
//! whose first process ends. Nobody has to find pasta again, and the end of the
//! uplink is the proof of pasta's.
//!
//! Both run in a user namespace of their own that maps a single id which owns
//! nothing. So pasta is called in the same way by root and by an ordinary user:
//! as *root* of a namespace that may do nothing outside of it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, FileType, Gid, Mode, Uid};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, fsconfig_create, fsmount, fsopen,
    mount_change, move_mount,
};
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, getrlimit, pidfd_open, pidfd_send_signal,
    set_dumpable_behavior, set_parent_process_death_signal, setrlimit, waitpid,
};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use viv_provider::Egress;

use super::host::Host;
use super::inside::{enter, run_inside};
use super::netlink::{Hop, Mac, Netlink};
use super::policy::{Policy, Range, Verdict, with_translated};
use super::{
    INTERFACE, MTU_BYTES, NetworkError, PREFIX_V4, PREFIX_V6, ROUTER_V4, ROUTER_V6, SANDBOX_V4, SANDBOX_V6, UPLINK_V4,
    UPLINK_V6, at,
};
use crate::shim::complaint;
use crate::sys::clone::{Forked, close_all_but, exit_now, fork, fork_as_init};
use crate::sys::namespace::leave_for_new;
use crate::wait::readable_within;

/// Connections of one sandbox at a time, and what pasta needs for itself: each takes a descriptor, a port and buffers
/// of the machine.
const PASTA_FILES_MAX: u64 = 4096;

/// How much of what pasta says in its life is kept in the log.
const PASTA_LOG_BYTES_MAX: usize = 16 << 10;

/// How much of it is passed on when it fails at the start.
const COMPLAINT_BYTES_MAX: u64 = 1024;

/// How long the uplink may take to die.
const END_WITHIN: Duration = Duration::from_secs(2);

/// How long an uplink whose pasta failed may take to end, once something else failed for that.
const DYING_WITHIN: Duration = Duration::from_millis(500);

/// How often pasta's interface is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The Ethernet address that pasta answers from; there is nobody else on that link.
const UPLINK_MAC: Mac = [0x02, 0x76, 0x69, 0x76, 0x00, 0x01];
const UPLINK_MAC_TEXT: &str = "02:76:69:76:00:01";

/// Names of interfaces in the router's namespace.
const TO_SANDBOX: &str = "inner";
const TO_WORLD: &str = "outer";

/// Where names are asked for.
const NAMES_PORT: u16 = 53;

/// The kernel's own default.
const LOOPBACK_MTU_BYTES: u32 = 65_536;

/// Where the tun device is.
const TUN_FOLDER: &str = "/dev/net";

/// The way out of one sandbox. Dropping it ends the uplink.
#[derive(Debug)]
pub(crate) struct Uplink {
    pid: Pid,
    pidfd: OwnedFd,
    /// Its end tells the uplink that the shim is gone.
    _lifeline: PipeWriter,
    router: OwnedFd,
    host: Host,
    addresses: Netlink,
}

impl Uplink {
    /// Starts one, with everything that is refused being refused; `None` when nobody is to be reached.
    ///
    /// `id` is whose the processes are to be. `log` is where pasta's words go.
    pub(crate) fn start(egress: &Egress, id: u32, log: &Path, until: Instant) -> Result<Option<Self>, NetworkError> {
        if *egress == Egress::None {
            return Ok(None);
        }
        // The watch comes before the look, so that no address comes in between unseen.
        let addresses = Netlink::watch_addresses().map_err(at("watching the machine's addresses"))?;
        let host = Host::look().map_err(at("looking at the machine's addresses"))?;
        let Some(policy) = Policy::compile(egress, &host.own, &host.resolvers) else { return Ok(None) };
        if !host.v4 && !host.v6 {
            return Err(NetworkError::NoRoute);
        }
        let words = File::options().append(true).create(true).open(log).map_err(at("opening the log"))?;
        let words_start = words.metadata().map_or(0, |found| found.len());
        let (ready, saying) = io::pipe().map_err(at("starting the uplink"))?;
        let (living, lifeline) = io::pipe().map_err(at("starting the uplink"))?;
        let pid = match fork_as_init().map_err(at("starting the uplink"))? {
            Forked::Child => hold(&host, id, words, saying, &living),
            Forked::Parent(pid) => pid,
        };
        drop((saying, living));
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from).map_err(at("holding the uplink"))?;
        // From here on it is ended by being dropped.
        let mut held = Held(Some((pid, pidfd)));
        let started = || {
            await_ready(ready, until)?;
            let router = File::open(format!("/proc/{}/ns/net", pid.as_raw_nonzero()));
            let router = OwnedFd::from(router.map_err(at("opening the router's namespace"))?);
            let pidfd = held.pidfd();
            run_inside("setting up the router", router.as_fd(), &[pidfd], until, || {
                set_up_router(&host, &policy, pidfd, until)
            })?;
            Ok(router)
        };
        match started() {
            Ok(router) => {
                let (pid, pidfd) = held.keep();
                Ok(Some(Self { pid, pidfd, _lifeline: lifeline, router, host, addresses }))
            }
            Err(error) => {
                // Its words are all in the log when it is gone.
                let gone = readable_within(held.pidfd(), DYING_WITHIN).unwrap_or(false);
                drop(held);
                let complaint = complaint(log, words_start);
                Err(if gone && !complaint.is_empty() { NetworkError::Pasta { complaint } } else { error })
            }
        }
    }

    /// Connects the network namespace of a process, which has none but loopback yet.
    pub(crate) fn connect(&self, init: Pid, until: Instant) -> Result<(), NetworkError> {
        let inside = File::open(format!("/proc/{}/ns/net", init.as_raw_nonzero()));
        let inside = inside.map_err(at("opening the sandbox's network namespace"))?;
        let (host, router) = (&self.host, self.router.as_fd());
        run_inside("connecting the sandbox", router, &[inside.as_fd()], until, || {
            let mut netlink = Netlink::open()?;
            netlink.add_pair(TO_SANDBOX, INTERFACE, inside.as_fd())?;
            let link = need_link(&mut netlink, TO_SANDBOX)?;
            netlink.bring_up(link, MTU_BYTES, host.v6)?;
            address(&mut netlink, link, host, ROUTER_V4, ROUTER_V6)?;
            // Its last word in the router's namespace.
            enter(inside.as_fd())?;
            let mut netlink = Netlink::open()?;
            let link = need_link(&mut netlink, INTERFACE)?;
            netlink.bring_up(link, MTU_BYTES, host.v6)?;
            address(&mut netlink, link, host, SANDBOX_V4, SANDBOX_V6)?;
            for (range, gateway) in defaults(host, ROUTER_V4, ROUTER_V6) {
                netlink.add_route(range, Hop::Via { gateway, link })?;
            }
            Ok(())
        })
    }

    /// Lets nothing pass between the sandbox and pasta any more, connections that are open included, or lets it again.
    pub(crate) fn set_forwarding(&self, on: bool, until: Instant) -> Result<(), NetworkError> {
        let v6 = self.host.v6;
        run_inside("switching the way out", self.router.as_fd(), &[], until, || {
            Netlink::open()?.refuse_from(TO_SANDBOX, !on, v6)
        })
    }

    /// What `/etc/resolv.conf` says inside.
    pub(crate) fn resolv_conf(&self) -> String {
        self.host.resolv_conf()
    }

    /// Readable when the uplink is gone, which it should not be.
    pub(crate) fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// Readable when addresses of the machine came or went.
    pub(crate) fn addresses(&self) -> BorrowedFd<'_> {
        self.addresses.as_fd()
    }

    /// Refuses addresses that the machine got since the last look.
    pub(crate) fn follow_addresses(&mut self, until: Instant) -> Result<(), NetworkError> {
        self.addresses.drain();
        let now = Host::look().map_err(at("looking at the machine's addresses"))?;
        let new: Vec<_> = now.own.into_iter().filter(|range| !self.host.own.contains(range)).collect();
        if new.is_empty() {
            return Ok(());
        }
        let v6 = self.host.v6;
        run_inside("refusing new addresses", self.router.as_fd(), &[], until, || {
            let mut netlink = Netlink::open()?;
            refuse(&mut netlink, new.iter().copied().flat_map(with_translated), v6)
        })?;
        // What went away stays refused: it may come back.
        self.host.own.extend(new);
        Ok(())
    }

    /// Ends it, and answers when it and pasta are gone.
    pub(crate) fn end(self) {
        drop(self);
    }
}

impl Drop for Uplink {
    fn drop(&mut self) {
        end(self.pid, &self.pidfd);
    }
}

/// One that is being set up.
struct Held(Option<(Pid, OwnedFd)>);

impl Held {
    fn pidfd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("held until it is kept").1.as_fd()
    }

    fn keep(&mut self) -> (Pid, OwnedFd) {
        self.0.take().expect("kept once")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some((pid, pidfd)) = &self.0 {
            end(*pid, pidfd);
        }
    }
}

fn end(pid: Pid, pidfd: &OwnedFd) {
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
    // It ends after all that are in its PID namespace. Who cannot be killed now is not waited for for ever: there is
    // nothing that he could still do.
    if matches!(readable_within(pidfd, END_WITHIN), Ok(true)) {
        let _ = waitpid(Some(pid), WaitOptions::empty());
    } else {
        note!("the uplink does not end");
    }
}

fn await_ready(mut ready: PipeReader, until: Instant) -> Result<(), NetworkError> {
    let step = "starting the uplink";
    let left = until.saturating_duration_since(Instant::now());
    if !readable_within(&ready, left).map_err(at(step))? {
        return Err(NetworkError::TimedOut { step });
    }
    let mut what = String::new();
    ready.by_ref().take(COMPLAINT_BYTES_MAX).read_to_string(&mut what).map_err(at(step))?;
    if what == READY { Ok(()) } else { Err(NetworkError::Inside { step, what }) }
}

/// What the uplink says when its namespaces are there.
const READY: &str = "ready";

/// The uplink's life. What goes wrong before it is ready is said on `saying`, the rest in the log.
fn hold(host: &Host, id: u32, words: File, saying: PipeWriter, living: &PipeReader) -> ! {
    // None of the shim's connections, nor its lock.
    close_all_but(&[words.as_fd(), saying.as_fd(), living.as_fd()]);
    let _ = rustix::process::setsid();
    let mut saying = Some(saying);
    let outcome = become_router(host, id, &mut saying).and_then(|(pasta, stderr)| watch(&pasta, stderr, words, living));
    if let (Err(error), Some(mut saying)) = (outcome, saying) {
        let _ = saying.write_all(error.to_string().as_bytes());
    }
    exit_now(1)
}

/// Becomes nobody in particular, in a network namespace that forwards, with pasta beside it.
fn become_router(host: &Host, id: u32, saying: &mut Option<PipeWriter>) -> io::Result<(OwnedFd, PipeReader)> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    let limit = getrlimit(Resource::Nofile).maximum.map_or(PASTA_FILES_MAX, |most| most.min(PASTA_FILES_MAX));
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) })?;
    show_tun_device()?;
    take_id(id)?;
    own_user_namespace()?;

    // Who we are in the /proc that pasta looks at, which is not that of our PID namespace.
    let this = fs::read_link("/proc/self")?;
    let (stderr, complaining) = io::pipe()?;
    let (go, going) = io::pipe()?;
    let pasta = match fork(None)? {
        Forked::Child => {
            drop((stderr, going, saying.take()));
            run_pasta(host, &this, &complaining, go);
        }
        Forked::Parent(pid) => pidfd_open(pid, PidfdFlags::empty())?,
    };
    drop((complaining, go));
    leave_for_new(UnshareFlags::NEWNET)?;
    forward(host)?;
    // Pasta may look at who has nothing that it does not have; and there is nothing left to do that takes privilege.
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        },
    )?;
    // Changes of identity take both back, so they come last.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if let Some(mut saying) = saying.take() {
        saying.write_all(READY.as_bytes())?;
    }
    drop(going);
    Ok((pasta, stderr))
}

/// Where the machine keeps its tun device to root, shows a node of it that others may open, to this process alone. It
/// is the usual mode of that device: making interfaces takes privilege over a network namespace, not this file.
fn show_tun_device() -> io::Result<()> {
    let found = rustix::fs::stat(format!("{TUN_FOLDER}/tun").as_str())
        .map_err(|_| io::Error::other("there is no /dev/net/tun (hint: load the kernel module tun)"))?;
    if Mode::from_raw_mode(found.st_mode).contains(Mode::ROTH | Mode::WOTH) || cover_tun_device(found.st_rdev).is_ok() {
        return Ok(());
    }
    // Root of a user namespace may make no devices; whoever may open this one needs no other.
    match File::options().read(true).write(true).open(format!("{TUN_FOLDER}/tun")) {
        Ok(_) => Ok(()),
        Err(error) => Err(io::Error::other(format!("/dev/net/tun: {error} (hint: chmod 0666 /dev/net/tun)"))),
    }
}

fn cover_tun_device(device: rustix::fs::Dev) -> io::Result<()> {
    leave_for_new(UnshareFlags::NEWNS)?;
    // Nobody else sees it, and unmounts of the machine come through.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)?;
    let making = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&making)?;
    let made = fsmount(&making, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    rustix::fs::mknodat(&made, "tun", FileType::CharacterDevice, Mode::empty(), device)?;
    rustix::fs::chmodat(&made, "tun", Mode::from_raw_mode(0o666), rustix::fs::AtFlags::empty())?;
    move_mount(&made, "", CWD, TUN_FOLDER, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    Ok(())
}

/// Becomes an id that owns nothing of the machine's. An ordinary user who has no other stays who he is.
fn take_id(id: u32) -> io::Result<()> {
    // Kept until the next user namespace, which some machines allow to the privileged only.
    rustix::thread::set_keep_capabilities(true)?;
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    let taken = rustix::thread::set_thread_res_gid(gid, gid, gid)
        .and_then(|()| rustix::thread::set_thread_groups(&[]))
        .and_then(|()| rustix::thread::set_thread_res_uid(uid, uid, uid));
    match taken {
        Ok(()) => {}
        // Not mapped, or not permitted: there is only this one.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::PERM) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    let held = rustix::thread::capabilities(None)?;
    Ok(rustix::thread::set_capabilities(None, CapabilitySets { effective: held.permitted, ..held })?)
}

fn own_user_namespace() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    leave_for_new(UnshareFlags::NEWUSER)?;
    // The files below are ours only then.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
}

/// Has this namespace forward, and answer at once whoever is refused.
fn forward(host: &Host) -> io::Result<()> {
    if host.v4 {
        fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
        fs::write("/proc/sys/net/ipv4/icmp_ratelimit", "0")?;
    }
    if host.v6 {
        fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")?;
        fs::write("/proc/sys/net/ipv6/icmp/ratelimit", "0")?;
    }
    Ok(())
}

/// Becomes pasta once the namespace is there. It stays in the machine's network namespace.
fn run_pasta(host: &Host, router: &Path, stderr: &PipeWriter, mut go: PipeReader) -> ! {
    let told = go.read(&mut [0]);
    let Ok(stderr) = stderr.try_clone() else { exit_now(127) };
    if told.is_err() {
        exit_now(127);
    }
    let mut complaining = stderr.try_clone();
    let error = Command::new("pasta")
        .args(arguments(host, router))
        .env_clear()
        .env("PATH", crate::runtime::PATH)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .exec();
    if let Ok(complaining) = &mut complaining {
        let _ = match error.kind() {
            io::ErrorKind::NotFound => complaining.write_all(b"it is not installed (Debian's package is passt)\n"),
            _ => writeln!(complaining, "it cannot be started: {error}"),
        };
    }
    exit_now(127)
}

/// Everything that pasta does by itself is off: ports, ways to the machine's loopback, answers to who asks for addresses.
fn arguments(host: &Host, router: &Path) -> Vec<OsString> {
    let mut all: Vec<OsString> = ["--foreground", "--quiet", "--netns-only", "--no-netns-quit", "--netns"]
        .into_iter()
        .map(OsString::from)
        .collect();
    all.push(Path::new("/proc").join(router).join("ns/net").into());
    let mut more = |words: &[&str]| all.extend(words.iter().map(OsString::from));
    more(&["--ns-ifname", TO_WORLD, "--mac-addr", UPLINK_MAC_TEXT]);
    more(&["--tcp-ports", "none", "--udp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none"]);
    more(&["--no-map-gw", "--no-dhcp", "--no-dhcpv6", "--no-ndp", "--no-ra", "--no-icmp"]);
    if host.v4 {
        more(&["--address", &SANDBOX_V4.to_string(), "--netmask", &PREFIX_V4.to_string()]);
        more(&["--gateway", &UPLINK_V4.to_string()]);
    } else {
        more(&["--ipv6-only"]);
    }
    if host.v6 {
        more(&["--address", &SANDBOX_V6.to_string(), "--gateway", &UPLINK_V6.to_string()]);
    } else {
        more(&["--ipv4-only"]);
    }
    for resolver in &host.resolvers {
        more(&["--dns-forward", &resolver.to_string()]);
    }
    all
}

/// Waits for the end of the shim or of pasta, and passes on what pasta says, as far as there is room.
fn watch(pasta: &OwnedFd, mut stderr: PipeReader, mut words: File, living: &PipeReader) -> io::Result<()> {
    let mut left = PASTA_LOG_BYTES_MAX;
    let mut buffer = [0; 1024];
    let mut speaks = true;
    loop {
        let mut fds = vec![PollFd::new(living, PollFlags::IN), PollFd::new(pasta, PollFlags::IN)];
        if speaks {
            fds.push(PollFd::new(&stderr, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            return Ok(());
        }
        if ready.get(2) == Some(&true) {
            let count = stderr.read(&mut buffer)?;
            speaks = count > 0;
            let said = String::from_utf8_lossy(&buffer[..count]);
            // It complains of a missing system log before everything that it says.
            for line in said.lines().filter(|line| !line.ends_with("to syslog")) {
                if line.len() < left {
                    left -= line.len() + 1;
                    let _ = writeln!(words, "pasta: {line}");
                }
            }
        } else if ready[1] {
            // Nothing is left to be read.
            return Ok(());
        }
    }
}

/// In the router's namespace: waits for pasta's interface, and sets the routes that are the policy.
fn set_up_router(host: &Host, policy: &Policy, uplink: BorrowedFd<'_>, until: Instant) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    // Before the first address of its own, a namespace takes every gateway for an invalid one.
    let loopback = need_link(&mut netlink, "lo")?;
    netlink.bring_up(loopback, LOOPBACK_MTU_BYTES, false)?;
    let link = loop {
        if let Some(link) = netlink.link(TO_WORLD)? {
            break link;
        }
        if readable_within(uplink, LOOK_EVERY)? {
            return Err(io::Error::other("the uplink ended"));
        }
        if Instant::now() >= until {
            return Err(io::Error::other("pasta made no interface in time"));
        }
    };
    netlink.bring_up(link, MTU_BYTES, host.v6)?;
    let refused = policy.ranges.iter().filter(|(_, verdict)| *verdict == Verdict::Refuse);
    // First what is refused, so that there is no moment in which it is not.
    refuse(&mut netlink, refused.map(|(range, _)| *range), host.v6)?;
    for (gateway, is_there) in [(UPLINK_V4, host.v4), (UPLINK_V6, host.v6)] {
        if !is_there {
            continue;
        }
        netlink.add_neighbour(link, gateway, UPLINK_MAC)?;
        let passed = policy
            .ranges
            .iter()
            .filter(|(range, verdict)| *verdict == Verdict::Pass && range.address.is_ipv4() == gateway.is_ipv4());
        for (range, _) in passed {
            netlink.add_route(*range, Hop::Via { gateway, link })?;
        }
        for &resolver in policy.resolvers.iter().filter(|address| address.is_ipv4() == gateway.is_ipv4()) {
            netlink.add_route_for_port(resolver, NAMES_PORT, Hop::Via { gateway, link })?;
        }
    }
    Ok(())
}

fn refuse(netlink: &mut Netlink, ranges: impl Iterator<Item = Range>, v6: bool) -> io::Result<()> {
    for range in ranges.filter(|range| v6 || range.address.is_ipv4()) {
        netlink.add_route(range, Hop::Unreachable)?;
    }
    Ok(())
}

fn address(netlink: &mut Netlink, link: u32, host: &Host, v4: IpAddr, v6: IpAddr) -> io::Result<()> {
    if host.v4 {
        netlink.add_address(link, v4, PREFIX_V4)?;
    }
    if host.v6 {
        netlink.add_address(link, v6, PREFIX_V6)?;
    }
    Ok(())
}

fn defaults(host: &Host, v4: IpAddr, v6: IpAddr) -> impl Iterator<Item = (Range, IpAddr)> {
    use super::policy::{ALL_V4, ALL_V6};
    let both = [(host.v4, ALL_V4, v4), (host.v6, ALL_V6, v6)];
    both.into_iter().filter(|(is_there, ..)| *is_there).map(|(_, range, gateway)| (range, gateway))
}

fn need_link(netlink: &mut Netlink, name: &str) -> io::Result<u32> {
    netlink.link(name)?.ok_or_else(|| io::Error::other(format!("there is no interface {name}")))
}
