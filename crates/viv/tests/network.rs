//! Whom those inside reach (S2), in a network made for it: a machine, and a world beyond it.
//!
//! ```text
//!   sandboxes ── machine 198.51.100.2, 2001:db8:1::2 ──veth── world 203.0.113.5, 2001:db8:2::5, 169.254.169.254
//! ```
//!
//! Every test runs itself again in network, PID and mount namespaces of its own.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use support::daemon::Daemon;
use support::user::User;
use support::{Ground, Sandbox, VIV, eventually, fresh_bytes, is_alive, is_in_namespace, kill, mutation, pids};
use viv_api::bound::{TaskRef, WaitMs};
use viv_api::sandbox::CreateSandbox;
use viv_api::task::{CreateTask, StopTask, TaskState};
use viv_core::SandboxId;
use viv_core::exec::ExecState;
use viv_provider::{Capability, Egress, Image, InstanceSpec, InstanceState, Network, Provider, ProviderError};
use viv_sandbox::Runtime;

const MACHINE: [&str; 2] = ["198.51.100.2", "2001:db8:1::2"];
const WORLD: [&str; 2] = ["203.0.113.5", "2001:db8:2::5"];
const METADATA: &str = "169.254.169.254";

/// Where servers listen; on the machine, this is the port of a control plane that listens to all.
const PORT: u16 = 7777;

/// What the machine's resolver answers for.
const NAME: &str = "somewhere.test";

/// The resolver's own place, as with systemd-resolved.
const RESOLVER: &str = "127.0.0.53";

const PREPARE: &str = "
    ip link set lo up
    ip link add up0 type veth peer name down0
    ip addr add 198.51.100.2/24 dev up0
    ip -6 addr add 2001:db8:1::2/64 dev up0 nodad
    ip link set up0 up
    resolv_conf=$(mktemp)
    chmod 644 $resolv_conf
    echo nameserver 127.0.0.53 > $resolv_conf
    mount --bind $resolv_conf /etc/resolv.conf
    rm $resolv_conf
";

const WORLD_LINK: [&str; 7] = [
    "ip link set lo up",
    "ip addr add 198.51.100.1/24 dev down0",
    "ip -6 addr add 2001:db8:1::1/64 dev down0 nodad",
    "ip link set down0 up",
    "ip addr add 203.0.113.5/32 dev lo",
    "ip addr add 169.254.169.254/32 dev lo",
    "ip -6 addr add 2001:db8:2::5/128 dev lo nodad",
];

/// Tries to reach a server from inside: says `GOT` and its greeting, or why there is none.
const REACH: &str = r#"
    use Socket qw(:all);
    my ($proto, $addr, $port, $dev) = @ARGV;
    my $type = $proto eq "tcp" ? SOCK_STREAM : SOCK_DGRAM;
    my ($err, $to) = getaddrinfo($addr, $port, { socktype => $type });
    if ($err) { print "NO NAME $err"; exit }
    $SIG{ALRM} = sub { print "SILENCE"; exit };
    alarm 3;
    socket(my $s, $to->{family}, $type, 0) or die "socket: $!";
    if ($dev) { setsockopt($s, SOL_SOCKET, 25, pack("Z*", $dev)) or die "device: $!" }
    connect($s, $to->{addr}) or do { print "REFUSED $!"; exit };
    if ($proto eq "udp") { defined send($s, "hello", 0) or do { print "REFUSED $!"; exit } }
    defined recv($s, my $got, 100, 0) or do { print "REFUSED $!"; exit };
    print "GOT $got";
"#;

/// A machine and a world, and the namespace of the world.
struct Lab {
    world: File,
}

impl Lab {
    /// `None` when the test has run in a lab by now; it fails if it did not pass there.
    fn enter(test: &str, prepare: &str) -> Option<Self> {
        if is_in_namespace() {
            return Some(Self::build());
        }
        let this = std::env::current_exe().unwrap();
        // The shell stays, to wait for orphans as the first process of a PID namespace has to.
        let script = format!("set -e\n{PREPARE}\n{prepare}\n\"$0\" --exact \"$1\" --nocapture\nexit 0");
        let output = Command::new("unshare")
            // Whatever a test leaves ends with it, so that nothing is left for the next one.
            .args(["--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"])
            .args(["/bin/sh", "-c", &script])
            .arg(this)
            .arg(test)
            .env("VIV_TEST_GROUND", "prepared")
            .output()
            .unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        None
    }

    fn build() -> Self {
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            leave_network();
            let tid = rustix::thread::gettid().as_raw_nonzero();
            tell.send(File::open(format!("/proc/self/task/{tid}/ns/net")).unwrap()).unwrap();
        });
        let world = told.recv().unwrap();
        let place = format!("/proc/{}/fd/{}", std::process::id(), world.as_raw_fd());
        run(&format!("ip link set down0 netns {place}"));
        for command in WORLD_LINK {
            run(&format!("nsenter --net={place} {command}"));
        }
        run("ip route add default via 198.51.100.1");
        run("ip -6 route add default via 2001:db8:1::1");
        let lab = Self { world };
        for address in [WORLD[0], WORLD[1], METADATA] {
            lab.serve(Where::World, address, "world");
        }
        // Of both families.
        lab.serve(Where::Machine, "::", "machine");
        resolve();
        lab
    }

    /// Greets whoever comes, by TCP and UDP.
    fn serve(&self, place: Where, address: &str, greeting: &'static str) {
        let address: IpAddr = address.parse().unwrap();
        let world = self.world.try_clone().unwrap();
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            if place == Where::World {
                move_into_link_name_space(world.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            }
            let udp = UdpSocket::bind((address, PORT)).unwrap();
            let tcp = TcpListener::bind((address, PORT)).unwrap();
            thread::spawn(move || {
                for mut stream in tcp.incoming().flatten() {
                    let _ = stream.write_all(greeting.as_bytes());
                }
            });
            tell.send(()).unwrap();
            let mut question = [0; 100];
            while let Ok((_, from)) = udp.recv_from(&mut question) {
                let _ = udp.send_to(greeting.as_bytes(), from);
            }
        });
        told.recv().unwrap();
    }

    /// Hears what is sent to a port of the world by UDP; answers when each came.
    fn hear(&self, port: u16) -> Arc<Mutex<Vec<u64>>> {
        let world = self.world.try_clone().unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (came, (tell, told)) = (heard.clone(), mpsc::channel());
        thread::spawn(move || {
            move_into_link_name_space(world.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            let udp = UdpSocket::bind((WORLD[0], port)).unwrap();
            tell.send(()).unwrap();
            let mut sent = [0; 100];
            while udp.recv_from(&mut sent).is_ok() {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
                came.lock().unwrap().push(now.as_millis() as u64);
            }
        });
        told.recv().unwrap();
        heard
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Machine,
    World,
}

#[expect(unsafe_code, reason = "a network namespace of its own for this thread")]
fn leave_network() {
    // SAFETY: only this thread's network changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
}

fn run(command: &str) {
    let words: Vec<_> = command.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The machine's resolver: it knows one name, and its IPv4 address.
fn resolve() {
    let socket = UdpSocket::bind((RESOLVER, 53)).unwrap();
    thread::spawn(move || {
        let mut query = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut query) {
            let query = &query[..length];
            let name: Vec<u8> =
                NAME.split('.').flat_map(|part| [&[part.len() as u8], part.as_bytes()].concat()).chain([0]).collect();
            let end = 12 + name.len() + 4;
            let is_known = query.get(12..12 + name.len()) == Some(&name[..]);
            let wants_v4 = query.get(12 + name.len()..end) == Some(&[0, 1, 0, 1]);
            // An answer: recursion available, and NXDOMAIN for what is not known.
            let mut answer = query[..2].to_vec();
            answer.extend([
                0x81,
                if is_known { 0x80 } else { 0x83 },
                0,
                1,
                0,
                u8::from(is_known && wants_v4),
                0,
                0,
                0,
                0,
            ]);
            answer.extend(query.get(12..end.min(length)).unwrap_or_default());
            if is_known && wants_v4 {
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 203, 0, 113, 5]);
            }
            let _ = socket.send_to(&answer, from);
        }
    });
}

fn connected() -> InstanceSpec {
    InstanceSpec { network: Network { egress: Egress::All }, ..InstanceSpec::host(600_000) }
}

/// What comes of trying to reach a server from inside.
async fn reach(sandbox: &Sandbox<'_>, proto: &str, address: &str, device: &str) -> String {
    let said = reach_all(sandbox, &[format!("{proto} {address} {PORT} {device}")]).await;
    said.into_iter().next().expect("an answer").1
}

/// The same for many at once, because silence takes its time. Each attempt with what came of it.
async fn reach_all(sandbox: &Sandbox<'_>, attempts: &[String]) -> Vec<(String, String)> {
    let each: String = attempts.iter().enumerate().map(|(number, words)| format!("try {number} {words} &\n")).collect();
    let script = format!("try() {{ n=$1; shift; echo \"$n:$(perl -e '{REACH}' \"$@\" 2>&1)\"; }}\n{each}wait");
    let (said, status) = sandbox.run(&script).await;
    assert_eq!(status.state, ExecState::Exited { code: 0 }, "{said}");
    let lines: Vec<_> = said.lines().filter_map(|line| line.split_once(':')).collect();
    assert_eq!(lines.len(), attempts.len(), "{said}");
    let answer = |(number, said): (&str, &str)| (attempts[number.parse::<usize>().unwrap()].clone(), said.to_owned());
    lines.into_iter().map(answer).collect()
}

/// Processes of pasta's, zombies apart. In a lab there are no others than ours.
fn pastas() -> Vec<u32> {
    let is_pasta = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("pas")) && is_alive(*pid)
    };
    pids().filter(is_pasta).collect()
}

async fn reaches_the_world(ground: &Ground) {
    let sandbox = ground.create_from(connected()).await;
    for proto in ["tcp", "udp"] {
        for address in [WORLD[0], WORLD[1], NAME] {
            assert_eq!(reach(&sandbox, proto, address, "").await, "GOT world", "{proto} {address}");
        }
    }
    assert_eq!(reach(&sandbox, "tcp", "no-such.test", "").await, "NO NAME Name or service not known");
    let (addresses, _) = sandbox.run("ip -o addr show dev eth0").await;
    assert!(addresses.contains("192.0.0.2") && MACHINE.iter().all(|own| !addresses.contains(own)), "{addresses}");
    sandbox.destroy().await;
    eventually("no pasta is left", || pastas().is_empty());
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn s2_all_reaches_the_world_by_name_and_address() {
    let Some(_lab) = Lab::enter("s2_all_reaches_the_world_by_name_and_address", "") else { return };
    reaches_the_world(&Ground::new()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s2_all_reaches_the_world_with_runc() {
    let Some(_lab) = Lab::enter("s2_all_reaches_the_world_with_runc", "") else { return };
    reaches_the_world(&Ground::with_runtime(Runtime::Binary("runc".into()))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn k2_the_way_out_is_cut_and_opened_again() {
    let Some(_lab) = Lab::enter("k2_the_way_out_is_cut_and_opened_again", "") else { return };
    let ground = Ground::new();
    let sandbox = ground.create_from(connected()).await;
    let provider = &ground.provider;
    for _ in 0..2 {
        assert_eq!(reach(&sandbox, "tcp", WORLD[0], "").await, "GOT world");
        assert_eq!(reach(&sandbox, "tcp", WORLD[1], "").await, "GOT world");
        for _ in 0..2 {
            provider.set_network(&mutation(1, 1), &sandbox.id, false).await.unwrap();
        }
        for (proto, address) in [("tcp", WORLD[0]), ("tcp", WORLD[1]), ("udp", WORLD[0]), ("tcp", NAME)] {
            let came = reach(&sandbox, proto, address, "").await;
            assert!(!came.starts_with("GOT"), "{proto} {address}: {came}");
        }
        provider.set_network(&mutation(1, 1), &sandbox.id, true).await.unwrap();
    }
    sandbox.destroy().await;
    // What has no way out is not asked for one.
    let alone = ground.create_from(InstanceSpec::host(600_000)).await;
    provider.set_network(&mutation(1, 1), &alone.id, false).await.unwrap();
    provider.set_network(&mutation(1, 1), &alone.id, true).await.unwrap();
    alone.destroy().await;
    ground.assert_nothing_left();
}

/// Sends without a pause, and cannot be asked to leave: after the cut it lives for as long as a TERM is waited for.
const SENDS: &str = r#"
    use Socket qw(:all);
    $SIG{TERM} = "IGNORE";
    socket(my $s, AF_INET, SOCK_DGRAM, 0) or die;
    my $to = pack_sockaddr_in(7778, inet_aton("203.0.113.5"));
    while (1) { send($s, "word", 0, $to); select(undef, undef, undef, 0.005) }
"#;

/// A daemon's clock and the machine's do not differ by more, and it is less than a TERM is waited for.
const CLOCKS_MS: u64 = 200;

#[test]
fn k2_a_stop_cuts_the_way_out_first_and_what_is_kept_has_it_again() {
    let test = "k2_a_stop_cuts_the_way_out_first_and_what_is_kept_has_it_again";
    let Some(lab) = Lab::enter(test, "") else { return };
    let heard = lab.hear(7778);
    let daemon = Daemon::start();
    let client = daemon.client();
    let network = viv_api::sandbox::Network { egress: viv_api::sandbox::Egress::All };
    let create = Some(Box::new(CreateSandbox { network, ..CreateSandbox::default() }));
    let task = CreateTask { create, keep_alive: true, ..CreateTask::of(["perl", "-e", SENDS]).unwrap() };
    let task = client.run_task(&task, None).unwrap();
    eventually("it is heard", || heard.lock().unwrap().len() > 10);
    let stop = StopTask { wait_ms: Some(WaitMs::new(60_000).unwrap()) };
    let stopped = client.stop_task(&TaskRef::from(&task.id), &stop).unwrap();
    assert_eq!(stopped.state, TaskState::Stopped, "{stopped:#?}");
    let (cut_at_ms, killed_at_ms) = (stopped.times.cut_at_ms.unwrap(), stopped.times.killed_at_ms.unwrap());
    let last_ms = *heard.lock().unwrap().last().unwrap();
    assert!(cut_at_ms <= killed_at_ms, "{stopped:#?}");
    assert!(last_ms <= cut_at_ms + CLOCKS_MS, "cut at {cut_at_ms}, killed at {killed_at_ms}, heard at {last_ms}");
    // The control: uncut it would have been heard longer than that.
    assert!(killed_at_ms > cut_at_ms + CLOCKS_MS, "{stopped:#?}");
    let script = format!("perl -e '{REACH}' tcp {} {PORT}", WORLD[0]);
    let (said, _) = support::daemon::run(&daemon.sandbox(&stopped.sandbox), &script);
    assert_eq!(said, "GOT world");
    daemon.remove(&stopped.sandbox);
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn s2_all_reaches_neither_the_machine_nor_what_is_near() {
    let Some(_lab) = Lab::enter("s2_all_reaches_neither_the_machine_nor_what_is_near", "") else { return };
    let ground = Ground::new();
    let sandbox = ground.create_from(connected()).await;
    // The control: the servers are there, for the machine.
    for address in MACHINE {
        let mut greeting = String::new();
        std::net::TcpStream::connect((address, PORT)).unwrap().read_to_string(&mut greeting).unwrap();
        assert_eq!(greeting, "machine");
    }
    let near = [
        // The machine and its control plane, also in disguise.
        MACHINE[0],
        MACHINE[1],
        "::ffff:198.51.100.2",
        "64:ff9b::c633:6402",
        // Its loopback, as far as that is not the sandbox's own; and whoever stands for it.
        "127.0.0.1",
        "127.0.0.53",
        "::1",
        "0.0.0.0",
        "192.0.0.1",
        "192.0.0.6",
        // The resolver, at another port than its own.
        "192.0.0.5",
        "fd4e:9b1c:7a52::1",
        // What clouds tell whoever asks.
        METADATA,
        "::ffff:169.254.169.254",
        "fd00:ec2::254",
        // Neighbours, and networks that are not the internet.
        "169.254.1.1",
        "fe80::1%eth0",
        "10.0.0.1",
        "192.168.1.1",
    ];
    for proto in ["tcp", "udp"] {
        for device in ["", "eth0"] {
            let attempts = near.map(|address| format!("{proto} {address} {PORT} {device}"));
            for (attempt, came) in reach_all(&sandbox, &attempts).await {
                assert!(came.starts_with("REFUSED") || came == "SILENCE", "{attempt}: {came}");
            }
        }
    }
    // Refused, not lost: whoever tries is told at once.
    for address in [MACHINE[0], METADATA, "10.0.0.1", "192.0.0.5"] {
        assert!(reach(&sandbox, "tcp", address, "eth0").await.starts_with("REFUSED No route"), "{address}");
    }
    // Another way in the same place is still there.
    assert_eq!(reach(&sandbox, "tcp", WORLD[0], "eth0").await, "GOT world");
    // Who may change nothing cannot make a way either.
    for change in
        ["ip route add 198.51.100.0/24 dev eth0", "ip link set eth0 down", "ip addr add 192.0.0.3/29 dev eth0"]
    {
        let (said, status) = sandbox.run(change).await;
        assert_ne!(status.state, ExecState::Exited { code: 0 }, "{change}: {said}");
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn s2_an_address_that_the_machine_gets_later_is_refused_too() {
    let Some(_lab) = Lab::enter("s2_an_address_that_the_machine_gets_later_is_refused_too", "") else { return };
    let ground = Ground::new();
    let sandbox = ground.create_from(connected()).await;
    run("ip addr add 203.0.113.99/32 dev up0");
    let mut came = String::new();
    for _ in 0..50 {
        came = reach(&sandbox, "tcp", "203.0.113.99", "").await;
        if came.starts_with("REFUSED No route") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(came.starts_with("REFUSED No route"), "{came}");
    assert_eq!(reach(&sandbox, "tcp", WORLD[0], "").await, "GOT world");
    sandbox.destroy().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s2_sandboxes_do_not_reach_each_other() {
    let Some(_lab) = Lab::enter("s2_sandboxes_do_not_reach_each_other", "") else { return };
    let ground = Ground::new();
    let (one, other) = (ground.create_from(connected()).await, ground.create_from(connected()).await);
    let listen = format!(
        "exec perl -MSocket=:all -e 'socket(my $s, AF_INET6, SOCK_STREAM, 0); \
         bind($s, pack_sockaddr_in6({PORT}, inet_pton(AF_INET6, \"::\"))) or die; listen($s, 5); $| = 1; \
         print \"listening\"; while (accept(my $c, $s)) {{ syswrite($c, \"neighbour\") }}'"
    );
    let server = other.start(&listen).await;
    let mut output = ground.provider.attach(&other.instance(), &server, 0, true).await.unwrap();
    output.next().await.unwrap().expect("it listens");
    // The control: it answers whoever is inside with it.
    assert_eq!(reach(&other, "tcp", "127.0.0.1", "").await, "GOT neighbour");
    for address in ["192.0.0.2", "fd4e:9b1c:7a52::2", "192.0.0.1", MACHINE[0], MACHINE[1]] {
        let came = reach(&one, "tcp", address, "").await;
        assert!(came.starts_with("REFUSED"), "{address}: {came}");
    }
    // The machine has no interface for them.
    let table = fs::read_to_string("/proc/self/net/dev").unwrap();
    let interfaces: Vec<_> = table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect();
    assert_eq!(interfaces, ["lo", "up0"]);
    for sandbox in [one, other] {
        assert_eq!(reach(&sandbox, "tcp", WORLD[0], "").await, "GOT world");
        sandbox.destroy().await;
    }
    eventually("no pasta is left", || pastas().is_empty());
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn s2_none_has_nothing() {
    let Some(_lab) = Lab::enter("s2_none_has_nothing", "") else { return };
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let (interfaces, _) = sandbox.run("ls /sys/class/net; cat /etc/resolv.conf; ip route").await;
    assert_eq!(interfaces, "lo\n");
    for address in WORLD.into_iter().chain(MACHINE).chain([METADATA]) {
        let came = reach(&sandbox, "tcp", address, "").await;
        assert!(came.starts_with("REFUSED"), "{address}: {came}");
    }
    assert_eq!(pastas(), [] as [u32; 0]);
    sandbox.destroy().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn l20_pasta_ends_with_its_sandbox_however_that_ends() {
    let Some(_lab) = Lab::enter("l20_pasta_ends_with_its_sandbox_however_that_ends", "") else { return };
    let ground = Ground::new();
    let gone = |what: &str| eventually(&format!("no pasta is left: {what}"), || pastas().is_empty());

    let sandbox = ground.create_from(connected()).await;
    ground.provider.freeze(&mutation(1, 1), &sandbox.id).await.unwrap();
    assert_eq!(pastas().len(), 1);
    sandbox.destroy().await;
    assert_eq!(pastas(), [] as [u32; 0], "destroyed means gone");

    let sandbox = ground.create_from(connected()).await;
    kill(sandbox.shim_pid(), Signal::KILL);
    gone("its shim was killed");
    sandbox.destroy().await;

    let sandbox = ground.create_from(connected()).await;
    let (shim, guard) = (sandbox.shim_pid(), sandbox.guard_pid());
    for pid in [shim, guard] {
        kill(pid, Signal::STOP);
    }
    for pid in [guard, shim] {
        kill(pid, Signal::KILL);
    }
    gone("its shim and guard were killed at once");
    sandbox.destroy().await;

    let sandbox = ground.create_from(connected()).await;
    kill(sandbox.agent_pid(), Signal::KILL);
    gone("its agent was killed");
    sandbox.destroy().await;

    let sandbox = ground.create_from(InstanceSpec { lifetime_ms: 1000, ..connected() }).await;
    gone("it expired");
    sandbox.destroy().await;

    let snapshot = viv_core::SnapshotId::from_bytes(fresh_bytes());
    let sandbox = ground.create_from(connected()).await;
    let request = viv_provider::SaveRequest { snapshot: snapshot.clone(), live: false, memory: false };
    ground.provider.save(&mutation(1, 1), &sandbox.id, &request).await.unwrap();
    assert_eq!(pastas(), [] as [u32; 0], "saved means ended");
    let restored = Sandbox { ground: &ground, id: SandboxId::from_bytes(fresh_bytes()) };
    let spec = connected();
    ground.provider.restore(&mutation(1, 1), &restored.id, &ground.owner, &spec, &snapshot).await.unwrap();
    assert_eq!(reach(&restored, "tcp", NAME, "").await, "GOT world", "restored means connected again");
    let fork = Sandbox { ground: &ground, id: SandboxId::from_bytes(fresh_bytes()) };
    let forked = ground.provider.fork(&mutation(1, 1), &fork.id, &ground.owner, &spec, &restored.instance()).await;
    forked.unwrap();
    assert_eq!(reach(&fork, "tcp", NAME, "").await, "GOT world");
    for sandbox in [sandbox, restored, fork] {
        sandbox.destroy().await;
    }
    gone("all were destroyed");
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_network_is_told_and_opens_nothing() {
    let Some(_lab) = Lab::enter("a_lost_network_is_told_and_opens_nothing", "") else { return };
    let ground = Ground::new();
    let sandbox = ground.create_from(connected()).await;
    for pid in pastas() {
        kill(pid, Signal::KILL);
    }
    let log = sandbox.folder().join("shim.log");
    eventually("the log tells", || fs::read_to_string(&log).is_ok_and(|text| text.contains("the network is lost")));
    assert_eq!(sandbox.state().await, InstanceState::Running);
    for address in [WORLD[0], MACHINE[0], METADATA] {
        let came = reach(&sandbox, "tcp", address, "").await;
        assert!(!came.contains("GOT"), "{address}: {came}");
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_declared_and_refused() {
    let hide = "mount --bind /dev/null \"$(command -v pasta)\"";
    let Some(_lab) = Lab::enter("what_is_missing_is_declared_and_refused", hide) else { return };
    let ground = Ground::new();
    let why = ground.provider.capabilities().missing.get(&Capability::EgressAll).cloned().expect("a reason");
    assert!(why.contains("pasta"), "{why}");
    let id = SandboxId::from_bytes(fresh_bytes());
    let refused = ground.provider.create(&mutation(1, 1), &id, &ground.owner, &connected()).await;
    assert!(
        matches!(&refused, Err(ProviderError::Unsupported { capability: Capability::EgressAll, .. })),
        "{refused:?}"
    );
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn s4_a_link_for_resolv_conf_leads_nowhere() {
    let Some(_lab) = Lab::enter("s4_a_link_for_resolv_conf_leads_nowhere", "") else { return };
    let ground = Ground::new();
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().join("resolv.conf");
    fs::write(&target, "outside").unwrap();
    let targets =
        [target.as_path(), Path::new("../../../../etc/shadow"), Path::new("/proc/self/fd"), Path::new("nowhere")];
    for (count, target) in targets.into_iter().enumerate() {
        let image = tempfile::tempdir().unwrap();
        fs::create_dir(image.path().join("etc")).unwrap();
        symlink(target, image.path().join("etc/resolv.conf")).unwrap();
        let path = image.path().to_string_lossy().into_owned();
        let sandbox = ground.create_from(InstanceSpec { image: Image::Directory { path }, ..connected() }).await;
        let mut inside = String::new();
        let mut reader = ground.provider.file_read(&sandbox.instance(), "/etc/resolv.conf", 0, None).await.unwrap();
        tokio::io::AsyncReadExt::read_to_string(&mut reader, &mut inside).await.unwrap();
        assert!(inside.starts_with("nameserver 192.0.0.5\n"), "{count}: {inside}");
        sandbox.destroy().await;
    }
    // An image without /etc gets one, and one that is no folder costs names alone.
    for is_file in [false, true] {
        let image = tempfile::tempdir().unwrap();
        if is_file {
            fs::write(image.path().join("etc"), "no folder").unwrap();
        }
        let path = image.path().to_string_lossy().into_owned();
        ground.create_from(InstanceSpec { image: Image::Directory { path }, ..connected() }).await.destroy().await;
    }
    assert_eq!(fs::read_to_string(&target).unwrap(), "outside");
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_create_leaves_no_pasta() {
    let Some(_lab) = Lab::enter("a_failing_create_leaves_no_pasta", "") else { return };
    let ground = Ground::new();
    // What is in its own place in the root makes the create fail after the way out was made.
    let image = tempfile::tempdir().unwrap();
    symlink("/tmp", image.path().join(".vivarium")).unwrap();
    let path = image.path().to_string_lossy().into_owned();
    let spec = InstanceSpec { image: Image::Directory { path }, ..connected() };
    let id = SandboxId::from_bytes(fresh_bytes());
    let failed = ground.provider.create(&mutation(1, 1), &id, &ground.owner, &spec).await;
    assert!(matches!(failed, Err(ProviderError::Failed { .. })), "{failed:?}");
    assert_eq!(pastas(), [] as [u32; 0]);
    // And one whose pasta fails says so in pasta's words.
    run("ip route del default");
    run("ip -6 route del default");
    let failed = ground.provider.create(&mutation(1, 1), &id, &ground.owner, &connected()).await;
    assert!(failed.as_ref().is_err_and(|error| error.to_string().contains("no default route")), "{failed:?}");
    ground.assert_nothing_left();
}

/// The tun device as most machines have it.
const OPEN_TUN: &str = "mount -t tmpfs none /dev/net\nmknod -m 666 /dev/net/tun c 10 200";

/// A sandbox of somebody who is not root: the same way out, and the same walls.
#[test]
fn s2_an_ordinary_user_reaches_the_world_and_nothing_near() {
    let test = "s2_an_ordinary_user_reaches_the_world_and_nothing_near";
    let Some(_lab) = Lab::enter(test, OPEN_TUN) else { return };
    let user = User::new();
    let port = PORT.to_string();
    let reach = |proto: &str, address: &str| {
        user.say(&["local", "run", "--egress", "all", "--", "perl", "-e", REACH, proto, address, &port])
    };
    for (proto, address) in [("tcp", WORLD[0]), ("tcp", WORLD[1]), ("udp", NAME)] {
        assert_eq!(reach(proto, address), "GOT world", "{proto} {address}");
    }
    for address in [MACHINE[0], MACHINE[1], METADATA, "192.0.0.1"] {
        let said = reach("tcp", address);
        assert!(!said.contains("GOT"), "{address} was reached: {said}");
    }
    assert!(user.say(&["doctor"]).contains("yes  egress all"));
    eventually("no pasta is left", || pastas().is_empty());
}

/// Root of a user namespace that maps one ordinary user: what a provider without root is.
#[test]
fn s2_an_ordinary_user_can_be_connected() {
    let Some(_lab) = Lab::enter("s2_an_ordinary_user_can_be_connected", OPEN_TUN) else { return };
    let folder = tempfile::tempdir().unwrap();
    // Neither the binary nor the log may be in a place of root's.
    let place = folder.path();
    fs::copy(VIV, place.join("viv")).unwrap();
    std::os::unix::fs::chown(place, Some(1000), Some(1000)).unwrap();
    let probe = || {
        Command::new("setpriv")
            .args(["--reuid", "1000", "--regid", "1000", "--clear-groups"])
            .args(["unshare", "--user", "--map-root-user"])
            .arg(place.join("viv"))
            .args(["net-probe", "65534"])
            .arg(place.join("log"))
            .output()
            .unwrap()
    };
    let probed = probe();
    assert!(probed.status.success(), "{}", String::from_utf8_lossy(&probed.stdout));
    eventually("no pasta is left", || pastas().is_empty());
    // What he may not open is named.
    run("chmod 600 /dev/net/tun");
    let probed = probe();
    let said = String::from_utf8_lossy(&probed.stdout).into_owned();
    assert!(!probed.status.success() && said.contains("/dev/net/tun"), "{said}");
}
