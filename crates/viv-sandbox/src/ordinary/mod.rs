//! The provider for those who are not root: a user namespace of their own, in which they are.
//!
//! ```text
//!   host                       namespace of viv, of each shim            namespace of a sandbox
//!   uid 1000  ───────────────► 0                       ────────────────► 0
//!   uid 100000… (subuid) ────► 1…                      ────────────────► 1…
//!   everything else            nobody (65534): to look at, not to touch
//! ```
//!
//! A process enters by itself, before it has threads: it keeps its pid, its
//! terminal, its parent and what it has open, so nobody who started it notices.
//! In there it has all capabilities over what is mapped, and nearly everything
//! is done as root does it. Every process of one user makes a namespace of its
//! own with the same mapping: what they share is on disk, in sockets and in
//! ids, never in mounts.
//!
//! The ids of a sandbox are those of the namespace, one to one. So ids on disk
//! are ids inside without idmapped mounts, which the kernel grants only to root.

mod enter;
mod subordinate;

use std::fs;
use std::io;

pub(crate) use enter::why_one_id;
pub use enter::{EnterError, enter};
pub(crate) use subordinate::User;

/// What a process may do to ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Root of the machine: any id.
    Root,
    /// Root of a user namespace: the ids from 0 on that it has, and nothing about the rest.
    Mapped {
        /// How many, users and groups alike.
        ids: u32,
    },
    /// Neither. [`enter`] makes it root of a namespace.
    Ordinary,
}

impl Standing {
    /// Of this process, now.
    pub fn of_this_process() -> io::Result<Self> {
        let (users, groups) = (fs::read_to_string("/proc/self/uid_map")?, fs::read_to_string("/proc/self/gid_map")?);
        let standing = Self::from_maps(&users, &groups);
        Ok(if rustix::process::geteuid().is_root() { standing } else { Self::Ordinary })
    }

    /// Of one who is 0 in a namespace with these maps.
    fn from_maps(users: &str, groups: &str) -> Self {
        let (users, groups) = (Map::parse(users), Map::parse(groups));
        if users.is_whole() && groups.is_whole() {
            return Self::Root;
        }
        Self::Mapped { ids: users.without_gap().min(groups.without_gap()) }
    }
}

/// The id outside that 0 stands for: whose namespace it is.
pub(crate) fn own_id_outside() -> io::Result<u32> {
    let map = Map::parse(&fs::read_to_string("/proc/self/uid_map")?);
    map.0.iter().find(|line| line.inside == 0).map(|line| line.outside).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The map of a namespace below this one that has its first `count` ids, one to one, in pieces of first id and length.
/// The kernel takes no piece that spans two of ours.
pub(crate) fn one_to_one(file: &str, count: u32) -> io::Result<Vec<(u32, u32)>> {
    Ok(Map::parse(&fs::read_to_string(format!("/proc/self/{file}"))?).one_to_one(count))
}

/// A `uid_map` or `gid_map`.
struct Map(Vec<Line>);

struct Line {
    inside: u32,
    outside: u32,
    count: u32,
}

impl Map {
    fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let mut numbers = line.split_ascii_whitespace().map(str::parse);
            let mut next = || numbers.next()?.ok();
            Some(Line { inside: next()?, outside: next()?, count: next()? })
        };
        let mut lines: Vec<_> = text.lines().filter_map(line).collect();
        lines.sort_unstable_by_key(|line| line.inside);
        Self(lines)
    }

    fn is_whole(&self) -> bool {
        matches!(self.0.as_slice(), [Line { inside: 0, outside: 0, count: u32::MAX }])
    }

    fn one_to_one(&self, count: u32) -> Vec<(u32, u32)> {
        let lines = self.0.iter().filter(|line| line.inside < count);
        lines.map(|line| (line.inside, line.count.min(count - line.inside))).collect()
    }

    /// How many there are from 0 on.
    fn without_gap(&self) -> u32 {
        self.0.iter().fold(0, |next, line| if line.inside == next { next.saturating_add(line.count) } else { next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standing_is_read_from_maps() {
        let whole = "         0          0 4294967295\n";
        let many = "         0       1000          1\n         1     100000      65536\n";
        let one = "         0       1000          1\n";
        let gap = "0 1000 1\n5 100000 100\n";
        assert_eq!(Standing::from_maps(whole, whole), Standing::Root);
        assert_eq!(Standing::from_maps(many, many), Standing::Mapped { ids: 65_537 });
        assert_eq!(Standing::from_maps(many, one), Standing::Mapped { ids: 1 });
        assert_eq!(Standing::from_maps(gap, gap), Standing::Mapped { ids: 1 });
        // Root of a container that has all of its ids elsewhere.
        assert_eq!(Standing::from_maps("0 100000 65536\n", "0 100000 65536\n"), Standing::Mapped { ids: 65_536 });
        assert_eq!(Map::parse(many).one_to_one(65_536), [(0, 1), (1, 65_535)]);
        assert_eq!(Map::parse(one).one_to_one(1), [(0, 1)]);
    }
}
