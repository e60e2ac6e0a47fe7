//! Who may be reached, as ranges of addresses.
//!
//! A policy is compiled to routes of the router namespace, where the longest
//! match decides: what is refused is *unreachable*, the rest goes to the
//! uplink. `all` passes what is not refused. A list of what is allowed will be
//! the reverse (everything unreachable but the ranges on it); what is
//! [`ALWAYS`] refused has to be kept from being on it, and addresses that stand
//! behind allowed names join as single addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use viv_provider::Egress;

/// A range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Range {
    pub(super) address: IpAddr,
    pub(super) prefix: u8,
}

const fn v4([a, b, c, d]: [u8; 4], prefix: u8) -> Range {
    Range { address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
}

const fn v6(parts: [u16; 8], prefix: u8) -> Range {
    let mut bits = 0;
    let mut done = 0;
    while done < parts.len() {
        bits = bits << 16 | parts[done] as u128;
        done += 1;
    }
    Range { address: IpAddr::V6(Ipv6Addr::from_bits(bits)), prefix }
}

/// Everything of IPv4, and of IPv6.
pub(super) const ALL_V4: Range = v4([0; 4], 0);
pub(super) const ALL_V6: Range = v6([0; 8], 0);

/// Refused whatever is asked for (S2). The machine's own addresses join these.
pub(super) const ALWAYS: [Range; 16] = [
    // This network, loopback, multicast, reserved and broadcast.
    v4([0, 0, 0, 0], 8),
    v4([127, 0, 0, 0], 8),
    v4([224, 0, 0, 0], 4),
    v4([240, 0, 0, 0], 4),
    // Link-local: neighbours that nobody routes to, and the metadata address of most clouds.
    v4([169, 254, 0, 0], 16),
    // Protocol assignments: our own addresses, and Oracle's other metadata address.
    v4([192, 0, 0, 0], 24),
    // Metadata of Azure and of Alibaba.
    v4([168, 63, 129, 16], 32),
    v4([100, 100, 100, 200], 32),
    // Unspecified, loopback, and IPv4 in disguise.
    v6([0; 8], 64),
    // Link-local, its forerunner, multicast.
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
    v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10),
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),
    // Metadata of Amazon and of Google.
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128),
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128),
    // 6to4 and Teredo: tunnels to any IPv4 address.
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16),
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 32),
];

/// Not the internet: refused by `all`, and what a list may name.
const PRIVATE: [Range; 6] = [
    v4([10, 0, 0, 0], 8),
    v4([172, 16, 0, 0], 12),
    v4([192, 168, 0, 0], 16),
    v4([100, 64, 0, 0], 10),
    v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7),
    v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48),
];

/// A translator's prefix, behind which all of IPv4 may be, so what is refused there is refused here as well.
const TRANSLATED: Ipv6Addr = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0);
const TRANSLATED_PREFIX: u8 = 96;

/// What is done with what goes to a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Pass,
    Refuse,
}

/// Who may be reached. Of the ranges that an address is in, the smallest decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Policy {
    pub(super) ranges: Vec<(Range, Verdict)>,
    /// Where names may be asked for, and nothing else.
    pub(super) resolvers: Vec<IpAddr>,
}

impl Policy {
    /// `own` are the machine's addresses, `resolvers` those at which names are asked for. `None` where nobody is to be
    /// reached.
    pub(super) fn compile(egress: &Egress, own: &[Range], resolvers: &[IpAddr]) -> Option<Self> {
        match egress {
            Egress::None => None,
            Egress::All => {
                let mut ranges = vec![(ALL_V4, Verdict::Pass), (ALL_V6, Verdict::Pass)];
                let refused = ALWAYS.iter().chain(&PRIVATE).chain(own);
                ranges.extend(refused.flat_map(|&range| with_translated(range)).map(|range| (range, Verdict::Refuse)));
                Some(Self { ranges, resolvers: resolvers.to_vec() })
            }
        }
    }
}

impl Range {
    /// One address.
    pub(super) fn of(address: IpAddr) -> Self {
        Self { address, prefix: if address.is_ipv4() { 32 } else { 128 } }
    }
}

/// A range, and the same behind a translator.
pub(super) fn with_translated(range: Range) -> impl Iterator<Item = Range> {
    let translated = match range.address {
        IpAddr::V4(address) => {
            let address = Ipv6Addr::from_bits(TRANSLATED.to_bits() | u128::from(address.to_bits()));
            Some(Range { address: IpAddr::V6(address), prefix: TRANSLATED_PREFIX + range.prefix })
        }
        IpAddr::V6(_) => None,
    };
    std::iter::once(range).chain(translated)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(range: Range, address: IpAddr) -> bool {
        let bits = |address| match address {
            IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
            IpAddr::V6(address) => address.to_bits(),
        };
        let same = bits(range.address) ^ bits(address);
        range.address.is_ipv4() == address.is_ipv4() && same.leading_zeros() >= u32::from(range.prefix)
    }

    fn verdict(policy: &Policy, address: &str) -> Verdict {
        let address = address.parse().unwrap();
        let matching = policy.ranges.iter().filter(|(range, _)| contains(*range, address));
        matching.max_by_key(|(range, _)| range.prefix).unwrap().1
    }

    #[test]
    fn s2_none_has_no_policy_because_it_has_no_way_out() {
        assert_eq!(Policy::compile(&Egress::None, &[], &[]), None);
    }

    #[test]
    fn s2_all_is_the_internet_and_nothing_nearer() {
        let own = [Range::of("198.51.100.2".parse().unwrap()), Range::of("2001:db8::2".parse().unwrap())];
        let policy = Policy::compile(&Egress::All, &own, &[]).unwrap();
        for reached in ["1.1.1.1", "203.0.113.7", "198.51.100.3", "2606:4700::1", "64:ff9b::1.1.1.1"] {
            assert_eq!(verdict(&policy, reached), Verdict::Pass, "{reached}");
        }
        for refused in [
            "127.0.0.1",
            "0.0.0.0",
            "169.254.169.254",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "192.0.0.5",
            "10.1.2.3",
            "172.31.255.255",
            "192.168.0.1",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "198.51.100.2",
            "::",
            "::1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b::198.51.100.2",
            "2002:a9fe:a9fe::1",
            "2001:0:1::1",
            "fe80::1",
            "fd00:ec2::254",
            "fd12::1",
            "ff02::1",
            "2001:db8::2",
        ] {
            assert_eq!(verdict(&policy, refused), Verdict::Refuse, "{refused}");
        }
    }

    #[test]
    fn ranges_have_no_bits_beyond_their_prefix() {
        for range in ALWAYS.into_iter().chain(PRIVATE) {
            let bits = match range.address {
                IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
                IpAddr::V6(address) => address.to_bits(),
            };
            assert!(bits.trailing_zeros() >= 128 - u32::from(range.prefix) || bits == 0, "{range:?}");
        }
    }
}
