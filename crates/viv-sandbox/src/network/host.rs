//! What is to be known about the machine: its own addresses, its ways out, its resolver.

use std::fs;
use std::io;
use std::net::IpAddr;

use super::netlink::Netlink;
use super::policy::Range;
use super::{RESOLVER_V4, RESOLVER_V6};

/// Most of the resolver's configuration that is looked at.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// The machine, as far as a sandbox's network depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Host {
    /// Whatever the machine takes for itself.
    pub(super) own: Vec<Range>,
    /// Whether there is a way out by IPv4, and by IPv6.
    pub(super) v4: bool,
    pub(super) v6: bool,
    /// Addresses inside at which a resolver of the machine's answers.
    pub(super) resolvers: Vec<IpAddr>,
}

impl Host {
    /// Looks at the machine, that is, at this process's network namespace.
    pub(super) fn look() -> io::Result<Self> {
        let routes = Netlink::open()?.routes()?;
        let leads_out = |v4: bool| {
            routes
                .iter()
                .any(|route| route.is_unicast && route.range.prefix == 0 && route.range.address.is_ipv4() == v4)
        };
        let (v4, v6) = (leads_out(true), leads_out(false));
        let mut own: Vec<_> = routes.iter().filter(|route| route.is_local).map(|route| route.range).collect();
        own.sort_unstable();
        own.dedup();
        let configured = fs::read_to_string(RESOLV_CONF).unwrap_or_default();
        Ok(Self { own, v4, v6, resolvers: resolvers(&configured, v4, v6) })
    }

    /// What `/etc/resolv.conf` says inside.
    pub(super) fn resolv_conf(&self) -> String {
        let servers: String = self.resolvers.iter().map(|address| format!("nameserver {address}\n")).collect();
        // Answers are forwarded in datagrams alone, so they should be large ones.
        if servers.is_empty() { servers } else { format!("{servers}options edns0\n") }
    }
}

/// One for each family of which the machine has a nameserver: queries are forwarded within their family.
fn resolvers(configured: &str, v4: bool, v6: bool) -> Vec<IpAddr> {
    let servers = configured.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        words.next().filter(|word| *word == "nameserver")?;
        words.next()?.parse::<IpAddr>().ok()
    });
    let servers: Vec<_> = servers.collect();
    let mut found = Vec::new();
    if v4 && servers.iter().any(IpAddr::is_ipv4) {
        found.push(RESOLVER_V4);
    }
    if v6 && servers.iter().any(IpAddr::is_ipv6) {
        found.push(RESOLVER_V6);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resolver_is_shown_for_each_family_that_has_one() {
        let both = "# a comment\nnameserver 127.0.0.53\nnameserver ::1\noptions edns0\n";
        assert_eq!(resolvers(both, true, true), [RESOLVER_V4, RESOLVER_V6]);
        assert_eq!(resolvers(both, true, false), [RESOLVER_V4]);
        assert!(resolvers("nameserver fe80::1%eth0\n", true, true).is_empty());
        assert!(resolvers("", true, true).is_empty());
    }

    #[test]
    fn the_machines_own_addresses_are_found() {
        let host = Host::look().unwrap();
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        assert!(host.own.contains(&Range::of(loopback)), "{host:?}");
    }
}
