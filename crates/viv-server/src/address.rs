//! Ranges of addresses, as an operator writes them: `10.0.0.0/8`, `fd00::/8`, or one address.

use std::net::IpAddr;
use std::str::FromStr;

/// A range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    base: IpAddr,
    prefix: u32,
}

/// A text is no range of addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no range of addresses such as 10.0.0.0/8")]
pub struct NoRange(String);

/// As the newer kind, so that both are compared alike; one that is mapped is the one it stands for.
fn bits(address: IpAddr) -> (u128, bool) {
    match address.to_canonical() {
        IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, true),
        IpAddr::V6(address) => (address.to_bits(), false),
    }
}

impl AddressRange {
    /// Whether an address is in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        let ((base, base_v4), (wanted, wanted_v4)) = (bits(self.base), bits(address));
        let mask = u128::MAX.checked_shl(128 - self.prefix).unwrap_or(0);
        base_v4 == wanted_v4 && base & mask == wanted & mask
    }
}

impl FromStr for AddressRange {
    type Err = NoRange;

    fn from_str(text: &str) -> Result<Self, NoRange> {
        let wrong = || NoRange(text.chars().take(64).collect());
        let (base, prefix) = text.split_once('/').map_or((text, None), |(base, prefix)| (base, Some(prefix)));
        let base: IpAddr = base.parse().map_err(|_| wrong())?;
        let longest = if base.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(longest), str::parse).map_err(|_| wrong())?;
        if prefix > longest { Err(wrong()) } else { Ok(Self { base, prefix }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s2_a_range_holds_what_it_says_and_no_more() {
        for (range, inside, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
            ("127.0.0.1", "::ffff:127.0.0.1", "::1"),
            ("fd00::/8", "fdff::1", "fe80::1"),
            ("0.0.0.0/0", "8.8.8.8", "::1"),
            ("::/0", "2001::1", "8.8.8.8"),
        ] {
            let range: AddressRange = range.parse().unwrap();
            assert!(range.contains(inside.parse().unwrap()), "{range:?} {inside}");
            assert!(!range.contains(outside.parse().unwrap()), "{range:?} {outside}");
        }
        for wrong in ["", "10.0.0.0/33", "10.0.0.0/", "10.0.0/8", "example.com", "::/129", "1.2.3.4/-1"] {
            assert!(wrong.parse::<AddressRange>().is_err(), "{wrong}");
        }
    }
}
