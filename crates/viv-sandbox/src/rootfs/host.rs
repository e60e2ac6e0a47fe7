//! The machine's own userland as a root, without what is the machine's own business.
//!
//! `/usr` (and `/bin`, `/lib` … where they are not links into it) appear
//! copy-on-write. `/etc` holds only what programs need to run. Home folders,
//! `/root`, `/var`, `/opt`, `/srv` and the rest do not appear.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::{RootPlan, Tree};

/// What may be a link into `/usr` or a folder of its own.
const USERLAND: [&str; 8] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32"];

/// Of `/etc`: how libraries, interpreters and certificates are found. No names, keys or addresses of the machine.
const ETC: [&str; 24] = [
    "alternatives",
    "ca-certificates.conf",
    "bash.bashrc",
    "debian_version",
    "fonts",
    "gai.conf",
    "inputrc",
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

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n\
                      user:x:1000:1000:user:/home/user:/bin/sh\n\
                      nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
const GROUP: &str = "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n";
const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost\n";

/// Makes the skeleton anew below `images`, and answers what a root is made of.
pub(crate) fn plan(images: &Path) -> io::Result<RootPlan> {
    let skeleton = images.join(format!("host-{}", std::process::id()));
    if skeleton.exists() {
        fs::remove_dir_all(&skeleton)?;
    }
    let trees = build(&skeleton)?;
    // Roots that are mounted keep the skeleton they were made with, so it is never changed, only replaced.
    let kept = images.join(format!("host-{:016x}", fingerprint(&skeleton)?));
    match fs::rename(&skeleton, &kept) {
        Ok(()) => {}
        Err(_) if kept.is_dir() => fs::remove_dir_all(&skeleton)?,
        Err(error) => return Err(error),
    }
    Ok(RootPlan { lowers: vec![kept], trees })
}

fn build(skeleton: &Path) -> io::Result<Vec<Tree>> {
    for folder in ["dev", "etc", "home/user", "proc", "root", "run", "sys", "tmp", "var/tmp", "var/lib", "workspace"] {
        fs::create_dir_all(skeleton.join(folder))?;
    }
    for folder in ["tmp", "var/tmp"] {
        fs::set_permissions(skeleton.join(folder), fs::Permissions::from_mode(0o1777))?;
    }
    fs::set_permissions(skeleton.join("root"), fs::Permissions::from_mode(0o700))?;
    std::os::unix::fs::chown(skeleton.join("home/user"), Some(1000), Some(1000))?;

    let mut trees = Vec::new();
    for name in USERLAND {
        let host = Path::new("/").join(name);
        match fs::symlink_metadata(&host) {
            Ok(found) if found.is_symlink() => symlink(fs::read_link(&host)?, skeleton.join(name))?,
            Ok(found) if found.is_dir() => {
                fs::create_dir(skeleton.join(name))?;
                trees.push(Tree { at: host.clone(), lower: host });
            }
            Ok(_) | Err(_) => {}
        }
    }

    let etc = skeleton.join("etc");
    for name in ETC {
        copy(&Path::new("/etc").join(name), &etc.join(name))?;
    }
    for (name, content) in [("passwd", PASSWD), ("group", GROUP), ("hosts", HOSTS), ("resolv.conf", "")] {
        fs::write(etc.join(name), content)?;
    }
    Ok(trees)
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
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        Ok(())
    } else if found.is_file() {
        fs::copy(from, to).map(|_| ())
    } else {
        Ok(())
    }
}

/// Tells skeletons apart by names and content.
fn fingerprint(folder: &Path) -> io::Result<u64> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(below) = pending.pop() {
        let mut entries = fs::read_dir(folder.join(&below))?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = below.join(entry.file_name());
            path.hash(&mut hasher);
            let kind = entry.file_type()?;
            if kind.is_dir() {
                pending.push(path);
            } else if kind.is_symlink() {
                fs::read_link(entry.path())?.hash(&mut hasher);
            } else {
                fs::read(entry.path())?.hash(&mut hasher);
            }
        }
    }
    Ok(hasher.finish())
}
