//! The kernel's interface for links, addresses and routes, as far as it is needed.
//!
//! A socket belongs to the network namespace that its maker was in.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with};

use super::policy::Range;

/// Longest message of the kernel; it sends dumps in pieces of no more than this.
const MESSAGE_BYTES_MAX: usize = 32 << 10;

/// Pieces of one dump. A machine with a full routing table has a million routes, hundreds in each piece.
const PIECES_MAX: usize = 100_000;

const HEADER_BYTES: usize = 16;
const ROUTE_BYTES: usize = 12;
const ALIGNMENT: usize = 4;

/// Of the kernel's headers, and not in libc.
const VETH_INFO_PEER: u16 = 1;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const ADDR_GEN_MODE_NONE: u8 = 1;
const RTNH_F_ONLINK: u32 = 4;

const FRA_DST: u16 = 1;
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_IP_PROTO: u16 = 22;
const FRA_DPORT_RANGE: u16 = 24;
const RULE_LOOKS_UP: u8 = 1;
const RULE_REFUSES: u8 = 7;

/// Ours: any table that the kernel has no use for, looked at before the usual ones.
const TABLE_FOR_PORT: u8 = 53;
const RULE_PRIORITY: u32 = 100;
/// Before that one, so that nothing passes.
const REFUSAL_PRIORITY: u32 = 10;

/// An Ethernet address.
pub(super) type Mac = [u8; 6];

/// A route as it is set.
#[derive(Debug, Clone, Copy)]
pub(super) enum Hop {
    /// To a neighbour on a link.
    Via { gateway: IpAddr, link: u32 },
    /// To nobody, and the sender is told.
    Unreachable,
}

/// A route of the machine, as far as it matters here.
#[derive(Debug, Clone, Copy)]
pub(super) struct FoundRoute {
    /// Where to.
    pub(super) range: Range,
    /// Whether what goes there is the machine's own.
    pub(super) is_local: bool,
    /// Whether it leads somewhere, rather than refusing.
    pub(super) is_unicast: bool,
}

/// A socket to the kernel.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        Self::open_for(0)
    }

    /// One that becomes readable when addresses come or go. What the kernel takes for its own are routes, which come a
    /// moment after the address that brings them, or without one.
    pub(super) fn watch_addresses() -> io::Result<Self> {
        let addresses = libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        Self::open_for((addresses | libc::RTMGRP_IPV4_ROUTE | libc::RTMGRP_IPV6_ROUTE) as u32)
    }

    fn open_for(groups: u32) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, groups))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Reads away what a watch has heard; what it was does not matter.
    pub(super) fn drain(&self) {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        // An overflow (ENOBUFS) is one of the things that may be read away.
        while !matches!(recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT), Err(rustix::io::Errno::AGAIN)) {}
    }

    /// The number of an interface; `None` when there is none of that name.
    pub(super) fn link(&mut self, name: &str) -> io::Result<Option<u32>> {
        let mut message = Message::new(libc::RTM_GETLINK, 0, &[0; 16]);
        message.text(libc::IFLA_IFNAME, name);
        match self.ask(message, |kind, body| (kind == libc::RTM_NEWLINK).then(|| number(body, 4))) {
            Ok(found) => Ok(found.into_iter().next()),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a pair of interfaces, the second one in another namespace.
    pub(super) fn add_pair(&mut self, name: &str, peer: &str, peer_namespace: BorrowedFd<'_>) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &[0; 16]);
        message.text(libc::IFLA_IFNAME, name);
        message.nest(libc::IFLA_LINKINFO, |info| {
            info.text(libc::IFLA_INFO_KIND, "veth");
            info.nest(libc::IFLA_INFO_DATA, |data| {
                data.nest(VETH_INFO_PEER, |other| {
                    other.raw(&[0; 16]);
                    other.text(libc::IFLA_IFNAME, peer);
                    other.bytes(libc::IFLA_NET_NS_FD, &peer_namespace.as_raw_fd().to_ne_bytes());
                });
            });
        });
        self.tell(message).map_err(|error| named("making a pair of interfaces", &error))
    }

    /// Brings an interface up, with addresses only as they are given to it.
    pub(super) fn bring_up(&mut self, link: u32, mtu: u32, with_v6: bool) -> io::Result<()> {
        let mut up = [0; 16];
        up[4..8].copy_from_slice(&link.to_ne_bytes());
        let mut message = Message::new(libc::RTM_SETLINK, 0, &up);
        message.bytes(libc::IFLA_MTU, &mtu.to_ne_bytes());
        if with_v6 {
            message.nest(libc::IFLA_AF_SPEC, |families| {
                families.nest(libc::AF_INET6 as u16, |v6| {
                    v6.bytes(IFLA_INET6_ADDR_GEN_MODE, &[ADDR_GEN_MODE_NONE]);
                });
            });
        }
        self.tell(message).map_err(|error| named("setting up an interface", &error))?;
        // Apart and after it, because coming up is what makes a link-local address.
        let flag = (libc::IFF_UP as u32).to_ne_bytes();
        up[8..12].copy_from_slice(&flag);
        up[12..16].copy_from_slice(&flag);
        let up = self.tell(Message::new(libc::RTM_SETLINK, 0, &up));
        up.map_err(|error| named("bringing an interface up", &error))
    }

    pub(super) fn add_address(&mut self, link: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
        let mut fixed = [0; 8];
        fixed[0] = family(address);
        fixed[1] = prefix;
        fixed[4..8].copy_from_slice(&link.to_ne_bytes());
        let mut message = Message::new(libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &fixed);
        message.bytes(libc::IFA_LOCAL, &octets(address));
        message.bytes(libc::IFA_ADDRESS, &octets(address));
        // Nobody else is on these links, so there is nothing to wait for.
        message.bytes(libc::IFA_FLAGS, &libc::IFA_F_NODAD.to_ne_bytes());
        self.tell(message).map_err(|error| named(&format!("adding {address}"), &error))
    }

    /// Says for ever what Ethernet address a neighbour has.
    pub(super) fn add_neighbour(&mut self, link: u32, address: IpAddr, mac: Mac) -> io::Result<()> {
        let mut fixed = [0; 12];
        fixed[0] = family(address);
        fixed[4..8].copy_from_slice(&link.to_ne_bytes());
        fixed[8..10].copy_from_slice(&libc::NUD_PERMANENT.to_ne_bytes());
        let mut message = Message::new(libc::RTM_NEWNEIGH, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, &fixed);
        message.bytes(libc::NDA_DST, &octets(address));
        message.bytes(libc::NDA_LLADDR, &mac);
        self.tell(message).map_err(|error| named(&format!("adding the neighbour {address}"), &error))
    }

    /// Adds a route for whatever goes there; one that is there already is fine.
    pub(super) fn add_route(&mut self, range: Range, hop: Hop) -> io::Result<()> {
        self.add_route_to(libc::RT_TABLE_MAIN, range, hop)
    }

    /// Adds a route for datagrams to one port there, before all others.
    pub(super) fn add_route_for_port(&mut self, address: IpAddr, port: u16, hop: Hop) -> io::Result<()> {
        let range = Range::of(address);
        let mut fixed = [0; ROUTE_BYTES];
        fixed[0] = family(address);
        fixed[1] = range.prefix;
        fixed[4] = TABLE_FOR_PORT;
        fixed[7] = RULE_LOOKS_UP;
        let mut message = Message::new(libc::RTM_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &fixed);
        message.bytes(FRA_DST, &octets(address));
        message.bytes(FRA_PRIORITY, &RULE_PRIORITY.to_ne_bytes());
        message.bytes(FRA_IP_PROTO, &[libc::IPPROTO_UDP as u8]);
        message.bytes(FRA_DPORT_RANGE, &[port.to_ne_bytes(), port.to_ne_bytes()].concat());
        self.tell(message).map_err(|error| named(&format!("adding a rule for {address}"), &error))?;
        self.add_route_to(TABLE_FOR_PORT, range, hop)
    }

    /// Refuses whatever comes from a link and is not for this namespace itself, or does not any more; what is so already
    /// is fine.
    pub(super) fn refuse_from(&mut self, link: &str, refused: bool, v6: bool) -> io::Result<()> {
        let families = if v6 { vec![libc::AF_INET, libc::AF_INET6] } else { vec![libc::AF_INET] };
        for family in families {
            let mut fixed = [0; ROUTE_BYTES];
            fixed[0] = family as u8;
            fixed[7] = RULE_REFUSES;
            let (kind, flags, fine) = if refused {
                (libc::RTM_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_EXCL, libc::EEXIST)
            } else {
                (libc::RTM_DELRULE, 0, libc::ENOENT)
            };
            let mut message = Message::new(kind, flags, &fixed);
            message.bytes(FRA_PRIORITY, &REFUSAL_PRIORITY.to_ne_bytes());
            message.text(FRA_IIFNAME, link);
            match self.tell(message) {
                Err(error) if error.raw_os_error() == Some(fine) => {}
                told => told.map_err(|error| named(&format!("changing what passes from {link}"), &error))?,
            }
        }
        Ok(())
    }

    fn add_route_to(&mut self, table: u8, range: Range, hop: Hop) -> io::Result<()> {
        let kind = match hop {
            Hop::Via { .. } => libc::RTN_UNICAST,
            Hop::Unreachable => libc::RTN_UNREACHABLE,
        };
        let mut fixed = [0; ROUTE_BYTES];
        fixed[0] = family(range.address);
        fixed[1] = range.prefix;
        fixed[4] = table;
        fixed[5] = libc::RTPROT_STATIC;
        fixed[6] = libc::RT_SCOPE_UNIVERSE;
        fixed[7] = kind;
        if matches!(hop, Hop::Via { .. }) {
            fixed[8..12].copy_from_slice(&RTNH_F_ONLINK.to_ne_bytes());
        }
        let mut message = Message::new(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &fixed);
        message.bytes(libc::RTA_DST, &octets(range.address));
        if let Hop::Via { gateway, link } = hop {
            message.bytes(libc::RTA_GATEWAY, &octets(gateway));
            message.bytes(libc::RTA_OIF, &link.to_ne_bytes());
        }
        match self.tell(message) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            told => {
                told.map_err(|error| named(&format!("adding a route to {}/{}", range.address, range.prefix), &error))
            }
        }
    }

    /// All routes of both families, those to the machine itself included.
    pub(super) fn routes(&mut self) -> io::Result<Vec<FoundRoute>> {
        let mut found = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let mut fixed = [0; ROUTE_BYTES];
            fixed[0] = family as u8;
            let message = Message::new(libc::RTM_GETROUTE, libc::NLM_F_DUMP, &fixed);
            found.extend(self.ask(message, |kind, body| {
                if kind != libc::RTM_NEWROUTE || body.len() < ROUTE_BYTES || i32::from(body[0]) != family {
                    return None;
                }
                let attributes = Attributes(&body[ROUTE_BYTES..]);
                let to = attributes.clone().find(|(kind, _)| *kind == libc::RTA_DST).map(|(_, value)| value);
                let range = Range { address: address(family, to)?, prefix: body[1] };
                let is_local = [libc::RTN_LOCAL, libc::RTN_ANYCAST, libc::RTN_BROADCAST].contains(&body[7]);
                Some(FoundRoute { range, is_local, is_unicast: body[7] == libc::RTN_UNICAST })
            })?);
        }
        Ok(found)
    }

    fn tell(&mut self, message: Message) -> io::Result<()> {
        self.ask(message, |_, _| None::<()>).map(|_| ())
    }

    /// Sends a message, and takes what it needs of each answer until the kernel is done.
    fn ask<T>(&mut self, message: Message, mut take: impl FnMut(u16, &[u8]) -> Option<T>) -> io::Result<Vec<T>> {
        self.sequence += 1;
        send(&self.socket, &message.finish(self.sequence), SendFlags::empty())?;
        let mut taken = Vec::new();
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        for _ in 0..PIECES_MAX {
            let (_, length) = recv(&self.socket, &mut buffer[..], RecvFlags::TRUNC)?;
            let mut rest = buffer.get(..length).ok_or_else(garbled)?;
            while rest.len() >= HEADER_BYTES {
                let length = number(rest, 0) as usize;
                let (kind, sequence) = (u16::from_ne_bytes([rest[4], rest[5]]), number(rest, 8));
                let body = rest.get(HEADER_BYTES..length).ok_or_else(garbled)?;
                rest = rest.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
                if sequence != self.sequence {
                    continue;
                }
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(taken),
                    // Zero says that it was done.
                    libc::NLMSG_ERROR if body.len() >= 4 => match number(body, 0).cast_signed() {
                        0 => return Ok(taken),
                        errno => return Err(io::Error::from_raw_os_error(-errno)),
                    },
                    _ => taken.extend(take(kind, body)),
                }
            }
        }
        Err(garbled())
    }
}

/// A message under construction.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: i32, fixed: &[u8]) -> Self {
        let flags = (flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend(fixed);
        Self(bytes)
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.nest(kind, |inner| inner.raw(value));
    }

    fn text(&mut self, kind: u16, text: &str) {
        self.bytes(kind, &[text.as_bytes(), &[0]].concat());
    }

    fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.0.extend([0; 4]);
        fill(self);
        let length = (self.0.len() - start) as u16;
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.0[start + 2..start + 4].copy_from_slice(&kind.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(ALIGNMENT), 0);
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

/// The attributes of a message, one after the other.
#[derive(Clone)]
struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::from(u16::from_ne_bytes([*self.0.first()?, *self.0.get(1)?]));
        let kind = u16::from_ne_bytes([*self.0.get(2)?, *self.0.get(3)?]);
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        Some((kind, value))
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |four| u32::from_ne_bytes(four.try_into().unwrap_or_default()))
}

fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// An address of a family; without one it is the family's zero, as in a default route.
fn address(family: i32, bytes: Option<&[u8]>) -> Option<IpAddr> {
    if family == libc::AF_INET {
        Some(IpAddr::from(<[u8; 4]>::try_from(bytes.unwrap_or(&[0; 4])).ok()?))
    } else {
        Some(IpAddr::from(<[u8; 16]>::try_from(bytes.unwrap_or(&[0; 16])).ok()?))
    }
}

/// The kernel says only what kind of thing went wrong.
fn named(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn garbled() -> io::Error {
    io::Error::other("the kernel's answer cannot be read")
}
