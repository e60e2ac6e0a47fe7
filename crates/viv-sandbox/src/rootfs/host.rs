//! The machine's own userland as a root, without what is the machine's own business.
//!
//! `/usr` (and `/bin`, `/lib` … where they are not links into it) appear
//! copy-on-write. `/etc` holds only what programs need to run. Home folders,
//! `/root`, `/var`, `/opt`, `/srv` and the rest do not appear.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// What may be a link into `/usr` or a folder of its own.
const USERLAND: [&str; 8] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32"];

/// Of `/etc`: how libraries, interpreters and certificates are found. No names, keys or addresses of the machine.
const ETC: [&str; 27] = [
    "alternatives",
    "ca-certificates.conf",
    "bash.bashrc",
    "chromium.d",
    "debian_version",
    "fonts",
    "gai.conf",
    "inputrc",
    "java-17-openjdk",
    "java-21-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "profile",
    "protocols",
    "python3",
    "python3.11",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
];

/// The id of `user`, where there are as many ids.
const USER: u32 = 1000;

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n\
                      user:x:1000:1000:user:/home/user:/bin/sh\n\
                      nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
const GROUP: &str = "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n";
const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost\n";

/// Changes with what [`build`] puts into a skeleton, so that an older binary's is not taken for ours.
const VERSION: u64 = 2;

/// The machine's userland, ready to be put below a root.
#[derive(Debug, Clone)]
pub(crate) struct HostBase {
    /// What the root itself is made of.
    pub(crate) skeleton: PathBuf,
    /// Folders of the machine that appear in it, by their name.
    pub(crate) trees: Vec<&'static str>,
}

impl HostBase {
    /// For sandboxes with so many ids. The skeleton is made in `folder` unless one of the same content is there.
    pub(crate) fn open(folder: &Path, ids: u32) -> io::Result<Self> {
        // Roots that are mounted keep the skeleton they were made with, so it is never changed, only joined by a new
        // one.
        let skeleton = folder.join(format!("host-{:016x}", fingerprint(ids)?));
        if !skeleton.is_dir() {
            let lock = File::options().create(true).append(true).open(folder.join(".lock"))?;
            flock(&lock, FlockOperation::LockExclusive)?;
            // Under the lock, so whatever is there was left by a process that died.
            let building = folder.join(".building");
            if building.exists() {
                fs::remove_dir_all(&building)?;
            }
            build(&building, ids)?;
            match fs::rename(&building, &skeleton) {
                Ok(()) => {}
                Err(_) if skeleton.is_dir() => fs::remove_dir_all(&building)?,
                Err(error) => return Err(error),
            }
        }
        let trees = USERLAND.into_iter().filter(|name| is_real_folder(&Path::new("/").join(name))).collect();
        Ok(Self { skeleton, trees })
    }
}

fn is_real_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

fn build(skeleton: &Path, ids: u32) -> io::Result<()> {
    for folder in ["dev", "etc", "home/user", "proc", "root", "run", "sys", "tmp", "var/tmp", "var/lib", "workspace"] {
        fs::create_dir_all(skeleton.join(folder))?;
    }
    for folder in ["tmp", "var/tmp"] {
        fs::set_permissions(skeleton.join(folder), fs::Permissions::from_mode(0o1777))?;
    }
    fs::set_permissions(skeleton.join("root"), fs::Permissions::from_mode(0o700))?;
    if ids > USER {
        std::os::unix::fs::chown(skeleton.join("home/user"), Some(USER), Some(USER))?;
    }

    for name in USERLAND {
        let host = Path::new("/").join(name);
        if is_real_folder(&host) {
            fs::create_dir(skeleton.join(name))?;
        } else if let Ok(target) = fs::read_link(&host) {
            symlink(target, skeleton.join(name))?;
        }
    }

    let etc = skeleton.join("etc");
    for name in ETC {
        copy(&Path::new("/etc").join(name), &etc.join(name))?;
    }
    for (name, content) in [("passwd", PASSWD), ("group", GROUP), ("hosts", HOSTS), ("resolv.conf", "")] {
        fs::write(etc.join(name), content)?;
    }
    Ok(())
}

/// Copies a file, a link or a folder; what is not there, or is none of those, is left out.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let Ok(found) = fs::symlink_metadata(from) else { return Ok(()) };
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    if found.is_symlink() {
        symlink(fs::read_link(from)?, to)
    } else if found.is_dir() {
        fs::create_dir_all(to)?;
        let entries = match fs::read_dir(from) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        Ok(())
    } else if found.is_file() {
        match fs::copy(from, to) {
            // What an ordinary user may not read, a sandbox of his does not need.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            copied => copied.map(drop),
        }
    } else {
        Ok(())
    }
}

/// Tells apart what skeletons are made from, by names, sizes and times.
fn fingerprint(ids: u32) -> io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    (VERSION, env!("CARGO_PKG_VERSION"), ids > USER).hash(&mut hasher);
    for name in USERLAND {
        fs::read_link(Path::new("/").join(name)).ok().hash(&mut hasher);
    }
    let mut pending: Vec<_> = ETC.iter().map(|name| Path::new("/etc").join(name)).collect();
    while let Some(path) = pending.pop() {
        let Ok(found) = fs::symlink_metadata(&path) else { continue };
        (&path, found.len(), found.mtime(), found.mtime_nsec(), found.ctime_nsec()).hash(&mut hasher);
        if found.is_dir() {
            // One that may not be read is not copied either.
            let Ok(entries) = fs::read_dir(&path) else { continue };
            let mut below = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
            below.sort_unstable();
            pending.extend(below);
        }
    }
    Ok(hasher.finish())
}
