//! Files that processes had open or mapped when they were saved, and whether they are what they were.
//!
//! CRIU opens them by name, and looks at their size and, of programs, at their build. Whoever goes on with a file that was
//! changed in between goes on with a memory that does not fit: half of a page cache is of one library, and half of
//! another. So each of them is noted, and has to be as long and of the same time when it is opened again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use viv_agent::proto::HOME;

use crate::rootfs::MountedRoot;

/// Most that are noted; nobody maps more, and CRIU looks at all of them.
const FILES_MAX: usize = 65_536;

/// What a name ends with whose file has none any more: CRIU keeps its content.
const DELETED: &str = " (deleted)";

/// Not in the filesystem that is saved: ours, or made anew with the sandbox.
const ELSEWHERE: [&str; 4] = [HOME, "/proc", "/sys", "/dev"];

/// A file as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Used {
    bytes: u64,
    changed_at_s: i64,
    changed_at_ns: i64,
}

impl Used {
    fn of(found: &fs::Metadata) -> Self {
        Self { bytes: found.len(), changed_at_s: found.mtime(), changed_at_ns: found.mtime_nsec() }
    }
}

/// What these processes have open or mapped, by name inside. They stand still.
pub(crate) fn used(pids: &[Pid]) -> BTreeMap<String, Used> {
    let mut found = BTreeMap::new();
    for pid in pids {
        for folder in ["fd", "map_files"] {
            let folder = format!("/proc/{}/{folder}", pid.as_raw_nonzero());
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                if found.len() < FILES_MAX
                    && let Some((name, used)) = look(&entry.path(), &found)
                {
                    found.insert(name, used);
                }
            }
        }
    }
    found
}

/// A link of `/proc` to a file that is to be noted, and was not.
fn look(link: &Path, known: &BTreeMap<String, Used>) -> Option<(String, Used)> {
    let name = fs::read_link(link).ok()?.into_os_string().into_string().ok()?;
    let is_elsewhere = ELSEWHERE.iter().any(|folder| Path::new(&name).starts_with(folder));
    if !name.starts_with('/') || name.ends_with(DELETED) || is_elsewhere || known.contains_key(&name) {
        return None;
    }
    let found = fs::metadata(link).ok()?;
    found.is_file().then(|| (name, Used::of(&found)))
}

/// Why what used these files cannot go on in this root.
pub(crate) fn why_not(files: &BTreeMap<String, Used>, root: &MountedRoot) -> io::Result<Option<String>> {
    let mut roots = BTreeMap::new();
    for (name, used) in files {
        let part = root.binds.iter().find(|(at, _)| Path::new(name).starts_with(at));
        let (folder, within) = part.map_or((&root.root, Path::new("/")), |(at, source)| (source, at.as_path()));
        let opened = match roots.get(folder) {
            Some(opened) => opened,
            None => roots.entry(folder.clone()).or_insert(open_folder(folder)?),
        };
        let relative = Path::new(name).strip_prefix(within).unwrap_or(Path::new(name));
        if let Some(why) = compare(opened, relative, used)? {
            return Ok(Some(format!("{name} was changed since: {why}")));
        }
    }
    Ok(None)
}

fn open_folder(folder: &PathBuf) -> io::Result<File> {
    Ok(openat(CWD, folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?.into())
}

fn compare(root: &File, relative: &Path, used: &Used) -> io::Result<Option<String>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Its name was the whole way to it, so there were no links on it.
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let found = match openat2(root, relative, flags, Mode::empty(), resolve) {
        Ok(file) => File::from(file).metadata()?,
        // It is in a filesystem that is made again with the processes, or is gone: CRIU knows which.
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        Err(Errno::LOOP) => return Ok(Some("there is a link on the way".to_owned())),
        Err(error) => return Err(error.into()),
    };
    let now = Used::of(&found);
    Ok(if !found.is_file() {
        Some("it is no file any more".to_owned())
    } else if now.bytes != used.bytes {
        Some(format!("it has {} bytes and had {}", now.bytes, used.bytes))
    } else if now != *used {
        Some("it was written to".to_owned())
    } else {
        None
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_is_open_is_noted_and_compared() {
        let folder = tempfile::tempdir().unwrap();
        let (root, part) = (folder.path().join("root"), folder.path().join("part"));
        for made in [&root, &part] {
            fs::create_dir(made).unwrap();
        }
        let root = MountedRoot {
            home: root.join("home"),
            binds: vec![(PathBuf::from("/usr"), part.clone())],
            writable: root.clone(),
            resolves_names: false,
            root,
        };
        let mut file = File::create(root.root.join("file")).unwrap();
        file.write_all(b"content").unwrap();
        let library = part.join("library");
        fs::write(&library, "code").unwrap();
        let own = rustix::process::getpid();
        let seen = used(&[own]);
        let name = fs::canonicalize(root.root.join("file")).unwrap();
        let noted = seen.get(name.to_str().unwrap()).expect("it is open").clone();
        assert!(seen.keys().any(|name| name.contains("viv_sandbox")), "this program is mapped: {:?}", seen.keys());
        let of_library = Used::of(&fs::metadata(&library).unwrap());
        let files = BTreeMap::from([("/file".to_owned(), noted), ("/usr/library".to_owned(), of_library)]);
        assert_eq!(why_not(&files, &root).unwrap(), None);
        let why = || why_not(&files, &root).unwrap().unwrap();
        // Shorter, of another time, replaced by something else.
        file.set_len(3).unwrap();
        assert_eq!(why(), "/file was changed since: it has 3 bytes and had 7");
        file.set_len(7).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(why(), "/file was changed since: it was written to");
        fs::remove_file(root.root.join("file")).unwrap();
        assert_eq!(why_not(&files, &root).unwrap(), None, "that is for CRIU to say");
        std::os::unix::fs::symlink("/etc/passwd", root.root.join("file")).unwrap();
        assert!(why().contains("/file was changed since"));
        fs::remove_file(root.root.join("file")).unwrap();
        fs::write(&library, "coda").unwrap();
        File::open(&library).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(why(), "/usr/library was changed since: it was written to");
    }
}
