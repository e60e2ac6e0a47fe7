//! Who a command runs as: `/etc/passwd` and `/etc/group`, read by our own code because a
//! sandbox's root may hold no library that could.

use std::io::Read;
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use crate::error::quoted;
use crate::files::resolve::open_in_root;

/// More than any real user database; the rest is not read.
const DATABASE_BYTES_MAX: u64 = 4 << 20;

/// The kernel's own limit is higher, and no command needs more.
const GROUPS_MAX: usize = 1024;

/// Whom a command runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
    pub(crate) name: Option<String>,
    pub(crate) home: String,
    pub(crate) shell: String,
}

/// The two files.
pub(crate) struct Database {
    passwd: String,
    group: String,
}

impl Database {
    /// Reads them; a missing one is empty.
    pub(crate) fn read(root: &OwnedFd) -> Self {
        Self { passwd: read_bounded(root, "/etc/passwd"), group: read_bounded(root, "/etc/group") }
    }

    /// Finds `name`, `uid`, `name:group` or `uid:gid`. The error is a sentence for the caller.
    pub(crate) fn find(&self, wanted: Option<&str>) -> Result<Account, String> {
        let wanted = wanted.unwrap_or("0");
        let (user, group) = match wanted.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (wanted, None),
        };
        let line = self.passwd_line(user);
        let mut account = match (line, user.parse::<u32>()) {
            (Some(account), _) => account,
            // A number needs no entry.
            (None, Ok(uid)) => Account {
                uid,
                gid: uid,
                groups: Vec::new(),
                name: None,
                home: if uid == 0 { "/root" } else { "/" }.to_owned(),
                shell: "/bin/sh".to_owned(),
            },
            (None, Err(_)) => return Err(format!("no such user: {}", quoted(user))),
        };
        match group {
            // As with other tools, naming a group means: only this one.
            Some(group) => account.gid = self.find_group(group)?,
            None => account.groups = account.name.as_deref().map_or_else(Vec::new, |name| self.groups_of(name)),
        }
        Ok(account)
    }

    fn passwd_line(&self, user: &str) -> Option<Account> {
        let uid = user.parse::<u32>().ok();
        entries(&self.passwd).find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let line_uid: u32 = fields.nth(1)?.parse().ok()?;
            if name != user && uid != Some(line_uid) {
                return None;
            }
            let gid = fields.next()?.parse().ok()?;
            let or = |field: Option<&str>, default: &str| match field {
                None | Some("") => default.to_owned(),
                Some(text) => text.to_owned(),
            };
            let home = or(fields.nth(1), "/");
            let shell = or(fields.next(), "/bin/sh");
            Some(Account { uid: line_uid, gid, groups: Vec::new(), name: Some(name.to_owned()), home, shell })
        })
    }

    fn find_group(&self, group: &str) -> Result<u32, String> {
        let line = self.group_lines().find(|(name, ..)| *name == group);
        match (line, group.parse()) {
            (Some((_, gid, _)), _) | (None, Ok(gid)) => Ok(gid),
            (None, Err(_)) => Err(format!("no such group: {}", quoted(group))),
        }
    }

    fn groups_of(&self, user: &str) -> Vec<u32> {
        let member = |(_, gid, members): (&str, u32, &str)| members.split(',').any(|name| name == user).then_some(gid);
        self.group_lines().filter_map(member).take(GROUPS_MAX).collect()
    }

    fn group_lines(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        entries(&self.group).filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            Some((name, fields.nth(1)?.parse().ok()?, fields.next().unwrap_or_default()))
        })
    }
}

/// The lines of a database. One with a NUL is none: no name, folder or program has one.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.contains('\0'))
}

/// Reads a file of the sandbox, which may be anything: only a plain file counts, and only its beginning.
fn read_bounded(root: &OwnedFd, path: &str) -> String {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let mut bytes = Vec::new();
    if let Ok(fd) = open_in_root(root, path, flags) {
        let file = std::fs::File::from(fd);
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            // What could be read until it failed still counts.
            let _ = file.take(DATABASE_BYTES_MAX).read_to_end(&mut bytes);
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn database() -> Database {
        Database {
            passwd: "root:x:0:0:root:/root:/bin/bash\nann:x:1000:100:Ann,,,:/home/ann:\nbroken:x\n".to_owned(),
            group: "root:x:0:\nusers:x:100:\nwheel:x:10:bob,ann\ndev:x:20:ann\n".to_owned(),
        }
    }

    #[test]
    fn users_are_found_in_every_form() {
        let database = database();
        let find = |wanted: &str| database.find(Some(wanted)).map(|a| (a.uid, a.gid, a.groups));
        assert_eq!(find("ann"), Ok((1000, 100, vec![10, 20])));
        assert_eq!(find("1000"), Ok((1000, 100, vec![10, 20])));
        assert_eq!(find("ann:wheel"), Ok((1000, 10, vec![])));
        assert_eq!(find("77:88"), Ok((77, 88, vec![])));
        assert_eq!(find("77"), Ok((77, 77, vec![])));
        assert_eq!(find("eve"), Err("no such user: \"eve\"".to_owned()));
        assert_eq!(find("ann:eve"), Err("no such group: \"eve\"".to_owned()));
        assert_eq!(find("broken"), Err("no such user: \"broken\"".to_owned()));
        let root = database.find(None).unwrap();
        assert_eq!(
            (root.home.as_str(), root.shell.as_str(), root.name.as_deref()),
            ("/root", "/bin/bash", Some("root"))
        );
        assert_eq!(database.find(Some("ann")).unwrap().shell, "/bin/sh");
    }

    #[test]
    fn a_line_with_a_nul_is_none() {
        let passwd = "root:x:0:0::/ro\0ot:/bin/sh\n\0:x:0:7::/:/bin/sh\nroot:x:0:5::/:/bin/sh\n".to_owned();
        let database = Database { passwd, group: "a\0:x:9:root\nb:x:10:root\n".to_owned() };
        let root = database.find(None).unwrap();
        assert_eq!((root.gid, root.groups), (5, vec![10]));
    }

    #[test]
    fn an_empty_root_has_a_root_user() {
        let empty = Database { passwd: String::new(), group: String::new() };
        let root = empty.find(None).unwrap();
        assert_eq!((root.uid, root.gid, root.home.as_str(), root.name), (0, 0, "/root", None));
    }

    proptest! {
        #[test]
        fn no_database_breaks_the_parser(passwd in "[a-z:0-9\\n]*", group in "[a-z:0-9,\\n]*", wanted in ".*") {
            let _ = Database { passwd, group }.find(Some(&wanted));
        }
    }
}
