//! The way out of a sandbox (S2).
//!
//! ```text
//!   sandbox's namespace        router's namespace                  the machine's namespace
//!   ───────────────────        ───────────────────────────────     ───────────────────────
//!   eth0 192.0.0.2 ──veth──►   192.0.0.1  routes = policy  tap ──► pasta: ordinary sockets
//!                                         unreachable: refused     of an unprivileged process
//! ```
//!
//! What may be reached is decided by routes of a namespace *between* the
//! sandbox and pasta. In the sandbox's own namespace they would decide nothing:
//! whoever binds a socket to an interface, which takes no privilege, is not
//! bound by routes that refuse. What is forwarded is.
//!
//! All sandboxes have the same addresses, since each is behind a router of its
//! own. On the machine there is one process of pasta's and one of ours for
//! each, and nothing else: no interface, no firewall rule, no forwarding.
//!
//! - [`policy`] says what is refused, `netlink` tells the kernel.
//! - [`uplink`] holds the router's namespace and pasta.
//! - [`probe`] shows whether all of it works here.

mod host;
mod inside;
mod netlink;
mod policy;
pub mod probe;
mod uplink;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub(crate) use uplink::Uplink;

/// What the interface is called inside.
const INTERFACE: &str = "eth0";

/// For the sandbox and its router: of the block set aside for the inner side of address translation (RFC 7335), so no
/// network that anybody wants to reach has them.
const SANDBOX_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 0, 2));
const ROUTER_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 0, 1));
const PREFIX_V4: u8 = 30;

/// Where names are asked for, and the next hop of the router: of the same block, and reached through the router.
const RESOLVER_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 0, 5));
const UPLINK_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 0, 6));

/// The same in a prefix of our own, drawn once by chance as RFC 4193 wants it.
const SANDBOX_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd4e, 0x9b1c, 0x7a52, 0, 0, 0, 0, 2));
const ROUTER_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd4e, 0x9b1c, 0x7a52, 0, 0, 0, 0, 1));
const PREFIX_V6: u8 = 64;
const RESOLVER_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd4e, 0x9b1c, 0x7a52, 1, 0, 0, 0, 5));
const UPLINK_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));

/// What a tap device takes at the most. Packets never leave the machine as such, so large ones only save work.
const MTU_BYTES: u32 = 65_520;

/// Why there is no way out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    #[error("{step} failed")]
    Step {
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("this machine has no default route, so there is nothing to connect to")]
    NoRoute,
    #[error("{step} failed: {what}")]
    Inside { step: &'static str, what: String },
    #[error("pasta ended: {complaint}")]
    Pasta { complaint: String },
    #[error("{step} took too long")]
    TimedOut { step: &'static str },
}

fn at(step: &'static str) -> impl FnOnce(io::Error) -> NetworkError {
    move |source| NetworkError::Step { step, source }
}
