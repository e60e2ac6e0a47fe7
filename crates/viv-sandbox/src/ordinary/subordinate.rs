//! The ids that a user was given besides the own one, and who writes them into a namespace.

use std::fs;
use std::path::{Path, PathBuf};

/// Who a process is to the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// As the machine's own list of users has it; others are known by number only.
    pub(crate) name: Option<String>,
}

impl User {
    pub(crate) fn of_this_process() -> Self {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Self::with_id(uid, gid)
    }

    pub(crate) fn with_id(uid: u32, gid: u32) -> Self {
        let name = fs::read_to_string("/etc/passwd").ok().and_then(|text| name_of(&text, uid));
        Self { uid, gid, name }
    }

    /// The ids in `/etc/subuid`.
    pub(crate) fn subordinate_users(&self) -> Vec<Range> {
        self.subordinate("/etc/subuid")
    }

    /// The ids in `/etc/subgid`.
    pub(crate) fn subordinate_groups(&self) -> Vec<Range> {
        self.subordinate("/etc/subgid")
    }

    fn subordinate(&self, file: &str) -> Vec<Range> {
        fs::read_to_string(file).map(|text| ranges(&text, self)).unwrap_or_default()
    }
}

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "{}", self.uid),
        }
    }
}

fn name_of(passwd: &str, uid: u32) -> Option<String> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

/// Consecutive ids of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: u32,
    pub(crate) count: u32,
}

fn ranges(text: &str, user: &User) -> Vec<Range> {
    let number = user.uid.to_string();
    let range = |line: &str| {
        let mut fields = line.trim().split(':');
        let owner = fields.next()?;
        if owner != number && Some(owner) != user.name.as_deref() {
            return None;
        }
        let (start, count) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        (count > 0).then_some(Range { start, count })
    };
    text.lines().filter_map(range).collect()
}

/// How a namespace is mapped: the own id as 0, and then the others in their order.
pub(crate) fn mapping(own: u32, ranges: &[Range]) -> Vec<String> {
    let mut words = vec!["0".to_owned(), own.to_string(), "1".to_owned()];
    let mut next = 1_u32;
    for range in ranges {
        let count = range.count.min(u32::MAX - next);
        words.extend([next, range.start, count].map(|number| number.to_string()));
        next += count;
    }
    words
}

/// The set-user-id programs that may map more than one id.
#[derive(Debug, Clone)]
pub(crate) struct Helpers {
    pub(crate) users: PathBuf,
    pub(crate) groups: PathBuf,
}

impl Helpers {
    /// Looks for them where programs are.
    pub(crate) fn find() -> Option<Self> {
        Some(Self { users: program("newuidmap")?, groups: program("newgidmap")? })
    }
}

fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/bin", "/usr/local/bin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .filter(|folder| folder.is_absolute())
        .chain(usual)
        .map(|folder| folder.join(name))
        .find(|path| Path::is_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_by_name_and_by_number() {
        let passwd = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n";
        let ann = User { uid: 1000, gid: 1000, name: name_of(passwd, 1000) };
        assert_eq!(ann.name.as_deref(), Some("ann"));
        assert_eq!(name_of(passwd, 1001), None);
        let text = "bob:1:2\nann:100000:65536\n1000:300000:10\nann:nonsense\nann:5:0\n";
        let found = ranges(text, &ann);
        assert_eq!(found, [Range { start: 100_000, count: 65_536 }, Range { start: 300_000, count: 10 }]);
        let words = "0 1000 1 1 100000 65536 65537 300000 10";
        assert_eq!(mapping(1000, &found), words.split(' ').collect::<Vec<_>>());
    }
}
