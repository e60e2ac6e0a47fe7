//! Sockets of kinds that reach into the kernel, and addresses that are not the sandbox's own.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::Duration;

use libc::{EACCES, ECONNREFUSED, EHOSTUNREACH, ENETUNREACH, EPERM, c_int};

use crate::attempt::{Attempt, Outcome, Setting};
use crate::sys::call;

const NO: &[i32] = &[EPERM, EACCES];
/// Nobody is there, or there is no way.
const NO_WAY: &[i32] = &[ENETUNREACH, EHOSTUNREACH, ECONNREFUSED, EPERM, EACCES];

/// Longer than a machine in the same room takes to answer.
const PATIENCE: Duration = Duration::from_secs(2);

fn socket(family: c_int, kind: c_int, protocol: c_int) -> Outcome {
    Outcome::of(call!(libc::SYS_socket, family, kind, protocol), "it has one")
}

fn netlink(protocol: c_int) -> Outcome {
    socket(libc::AF_NETLINK, libc::SOCK_RAW, protocol)
}

fn connect(address: &str) -> Outcome {
    let Ok(address) = address.parse::<SocketAddr>() else {
        return Outcome::Opened(format!("{address:?} is no address"));
    };
    match TcpStream::connect_timeout(&address, PATIENCE) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Outcome::Refused("nothing answers".to_owned()),
        result => Outcome::of(result, &format!("connected to {address}")),
    }
}

fn connect_to(setting: &Setting, name: &str) -> Outcome {
    match setting.get(name) {
        Ok(address) => connect(address),
        Err(outcome) => outcome,
    }
}

/// Where commands ask for something.
fn inside() -> io::Result<UnixAddr> {
    UnixAddr::from_abstract_name("vivarium-inside")
}

/// What is said there to a request that only the daemon may make.
fn agents_answer() -> io::Result<String> {
    let mut stream = UnixStream::connect_addr(&inside()?)?;
    stream.set_read_timeout(Some(10 * PATIENCE))?;
    let hello = br#"{"op":"hello"}"#;
    stream.write_all(&[0, 0, 0, hello.len() as u8, 1])?;
    stream.write_all(hello)?;
    let mut said = Vec::new();
    stream.read_to_end(&mut said)?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// A message on the routing socket, which needs a capability whatever it says.
fn route_message(kind: u16) -> Outcome {
    let result = call!(libc::SYS_socket, libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE).and_then(|socket| {
        // nlmsghdr: length, kind, REQUEST | ACK | CREATE; then an empty body of the size that the kernel wants.
        let mut message = [0_u8; 48];
        message[0] = 48;
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[6..8].copy_from_slice(&0x405_u16.to_ne_bytes());
        call!(libc::SYS_sendto, socket, &message, 48, 0, 0, 0)?;
        let mut answer = [0_u8; 512];
        call!(libc::SYS_recvfrom, socket, &mut answer, 512, 0, 0, 0)?;
        let code = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
        if code < 0 { Err(io::Error::from_raw_os_error(-code)) } else { Ok(0) }
    });
    Outcome::of(result, "the kernel took it")
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "socket-packet",
        tries: "see every packet",
        refusals: NO,
        act: |_| socket(libc::AF_PACKET, libc::SOCK_RAW, 0x0300),
    },
    Attempt {
        name: "socket-packet-old",
        tries: "see every packet by the oldest kind of socket",
        refusals: NO,
        act: |_| socket(libc::AF_INET, 10, 0x0300),
    },
    Attempt {
        name: "socket-raw",
        tries: "send raw packets",
        refusals: NO,
        act: |_| socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
    },
    Attempt {
        name: "socket-raw-6",
        tries: "send raw IPv6 packets",
        refusals: NO,
        act: |_| socket(libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_ICMPV6),
    },
    Attempt {
        name: "netlink-audit",
        tries: "talk to the host's audit",
        refusals: NO,
        act: |_| netlink(libc::NETLINK_AUDIT),
    },
    Attempt {
        name: "netlink-netfilter",
        tries: "talk to the firewall",
        refusals: NO,
        act: |_| netlink(libc::NETLINK_NETFILTER),
    },
    Attempt {
        name: "netlink-uevent",
        tries: "hear of the host's devices",
        refusals: NO,
        act: |_| netlink(libc::NETLINK_KOBJECT_UEVENT),
    },
    Attempt {
        name: "netlink-generic",
        tries: "talk to whatever in the kernel speaks generic netlink",
        refusals: NO,
        act: |_| netlink(libc::NETLINK_GENERIC),
    },
    Attempt { name: "netlink-xfrm", tries: "talk to IPsec", refusals: NO, act: |_| netlink(libc::NETLINK_XFRM) },
    Attempt {
        name: "netlink-diag",
        tries: "list everybody's sockets",
        refusals: NO,
        act: |_| netlink(libc::NETLINK_SOCK_DIAG),
    },
    Attempt {
        name: "netlink-connector",
        tries: "hear of every process of the host",
        refusals: NO,
        act: |_| netlink(libc::NETLINK_CONNECTOR),
    },
    Attempt {
        name: "netlink-crypto",
        tries: "configure the kernel's ciphers",
        refusals: NO,
        act: |_| netlink(libc::NETLINK_CRYPTO),
    },
    Attempt {
        name: "socket-vsock",
        tries: "talk to the machine below this one",
        refusals: NO,
        act: |_| socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0),
    },
    Attempt {
        name: "socket-alg",
        tries: "use the kernel's ciphers",
        refusals: NO,
        act: |_| socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
    },
    Attempt {
        name: "socket-key",
        tries: "manage keys by AF_KEY",
        refusals: NO,
        act: |_| socket(libc::AF_KEY, libc::SOCK_RAW, 2),
    },
    Attempt {
        name: "socket-xdp",
        tries: "take packets before the network does",
        refusals: NO,
        act: |_| socket(libc::AF_XDP, libc::SOCK_RAW, 0),
    },
    Attempt {
        name: "socket-can",
        tries: "talk to a car",
        refusals: NO,
        act: |_| socket(libc::AF_CAN, libc::SOCK_RAW, 1),
    },
    Attempt {
        name: "socket-bluetooth",
        tries: "talk Bluetooth",
        refusals: NO,
        act: |_| socket(libc::AF_BLUETOOTH, libc::SOCK_RAW, 1),
    },
    Attempt {
        name: "socket-tipc",
        tries: "talk TIPC",
        refusals: NO,
        act: |_| socket(libc::AF_TIPC, libc::SOCK_RDM, 0),
    },
    Attempt {
        name: "socket-rds",
        tries: "talk RDS",
        refusals: NO,
        act: |_| socket(libc::AF_RDS, libc::SOCK_SEQPACKET, 0),
    },
    Attempt {
        name: "socket-nfc",
        tries: "talk NFC",
        refusals: NO,
        act: |_| socket(libc::AF_NFC, libc::SOCK_SEQPACKET, 0),
    },
    Attempt {
        name: "socket-llc",
        tries: "talk LLC",
        refusals: NO,
        act: |_| socket(libc::AF_LLC, libc::SOCK_STREAM, 0),
    },
    Attempt {
        name: "socket-x25",
        tries: "talk X.25, old enough to be forgotten by its maintainers",
        refusals: NO,
        act: |_| socket(libc::AF_X25, libc::SOCK_SEQPACKET, 0),
    },
    Attempt { name: "socket-smc", tries: "talk SMC", refusals: NO, act: |_| socket(43, libc::SOCK_STREAM, 0) },
    Attempt {
        name: "socket-mctp",
        tries: "talk to the board's management controller",
        refusals: NO,
        act: |_| socket(45, libc::SOCK_DGRAM, 0),
    },
    Attempt {
        name: "interface-new",
        tries: "make a network interface",
        refusals: NO,
        // RTM_NEWLINK
        act: |_| route_message(16),
    },
    Attempt {
        name: "route-new",
        tries: "add a route",
        refusals: NO,
        // RTM_NEWROUTE
        act: |_| route_message(24),
    },
    Attempt {
        name: "interface-down",
        tries: "take the loopback interface down",
        refusals: NO,
        act: |_| {
            // struct ifreq: name, flags (up, as they are: it takes the same right).
            let mut request = [0_u8; 40];
            request[..2].copy_from_slice(b"lo");
            request[16..18].copy_from_slice(&(libc::IFF_UP as u16 | libc::IFF_LOOPBACK as u16).to_ne_bytes());
            let set = call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_DGRAM, 0)
                .and_then(|socket| call!(libc::SYS_ioctl, socket, libc::SIOCSIFFLAGS, &request));
            Outcome::of(set, "its flags were set")
        },
    },
    Attempt {
        name: "metadata-address",
        tries: "ask the cloud for the machine's credentials",
        refusals: NO_WAY,
        act: |_| connect("169.254.169.254:80"),
    },
    Attempt {
        name: "metadata-address-6",
        tries: "ask the cloud for the machine's credentials, by IPv6",
        refusals: &[ENETUNREACH, EHOSTUNREACH, ECONNREFUSED, EPERM, EACCES, libc::EADDRNOTAVAIL],
        act: |_| connect("[fd00:ec2::254]:80"),
    },
    Attempt {
        name: "host-loopback",
        tries: "connect to what listens on the host's loopback",
        refusals: NO_WAY,
        act: |setting| connect_to(setting, "HOST_TCP"),
    },
    Attempt {
        name: "host-loopback-6",
        tries: "connect to what listens on the host's IPv6 loopback",
        refusals: &[ENETUNREACH, EHOSTUNREACH, ECONNREFUSED, EPERM, EACCES, libc::EADDRNOTAVAIL],
        act: |setting| match setting.get("HOST_TCP6") {
            Ok("none") => Outcome::Missing("the host has no IPv6".to_owned()),
            Ok(address) => connect(address),
            Err(outcome) => outcome,
        },
    },
    Attempt {
        name: "network-broadcast",
        tries: "send to whoever is on the network",
        refusals: NO_WAY,
        act: |_| {
            let sent = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
                socket.set_broadcast(true)?;
                socket.send_to(b"viv-escape", "255.255.255.255:9")
            });
            Outcome::of(sent, "it was sent")
        },
    },
    Attempt {
        name: "inside-socket-taken",
        tries: "take the name of the socket on which the agent hears commands",
        refusals: &[libc::EADDRINUSE],
        act: |_| Outcome::of(inside().and_then(|address| UnixListener::bind_addr(&address)), "it has it"),
    },
    Attempt {
        name: "inside-socket-agent",
        tries: "speak the agent's own protocol on the socket for commands",
        refusals: &[libc::ECONNRESET, libc::EPIPE],
        act: |_| match agents_answer() {
            Ok(said) if said.contains("identity") => Outcome::Opened(said),
            Ok(said) => Outcome::Refused(said),
            Err(error) => Outcome::of(Err::<(), _>(error), "it was answered"),
        },
    },
    Attempt {
        name: "host-abstract-socket",
        tries: "connect to a socket of the host's that is in no filesystem",
        refusals: &[ECONNREFUSED, EPERM, EACCES],
        act: |setting| match setting.get("HOST_ABSTRACT") {
            Ok(name) => {
                let address = std::os::unix::net::SocketAddr::from_abstract_name(name);
                Outcome::of(address.and_then(|address| UnixStream::connect_addr(&address)), "connected")
            }
            Err(outcome) => outcome,
        },
    },
];
