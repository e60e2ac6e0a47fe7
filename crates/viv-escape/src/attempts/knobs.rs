//! Files by which the kernel is looked into and turned: `/proc`, `/sys`, cgroups.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use libc::{EACCES, EINVAL, EIO, EPERM, EROFS};

use crate::attempt::{Attempt, Outcome};
use crate::sys::call;

/// A file on a read-only mount, or one that is not ours.
const NOT_WRITABLE: &[i32] = &[EACCES, EPERM, EROFS];

/// Writes what is there already, so that succeeding changes nothing.
fn write_same(path: &str) -> Outcome {
    let written = fs::File::options().write(true).open(path).and_then(|mut file| {
        let value = fs::read(path).unwrap_or_default();
        file.write_all(&value)
    });
    of_file(written, &format!("{path} was written"))
}

fn write(path: &str, value: &str) -> Outcome {
    let written = fs::File::options().write(true).open(path).and_then(|mut file| file.write_all(value.as_bytes()));
    of_file(written, &format!("{value:?} was written to {path}"))
}

/// No mask makes a file of the kernel's go away, so one that is not there was not there before.
fn of_file<T>(result: io::Result<T>, evidence: &str) -> Outcome {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Outcome::Missing("no such file".to_owned()),
        result => Outcome::of(result, evidence),
    }
}

/// A file that tells about the host may not be read, or is empty.
fn read_some(path: &str) -> Outcome {
    let mut some = [0; 64];
    match fs::File::open(path).and_then(|mut file| file.read(&mut some)) {
        Ok(0) => Outcome::Refused("it is empty".to_owned()),
        Ok(count) => Outcome::Opened(format!("{path}: {:?}", String::from_utf8_lossy(&some[..count]))),
        Err(error) => of_file::<()>(Err(error), ""),
    }
}

/// A folder that tells about the host may not be listed, or is empty.
fn list_some(path: &str) -> Outcome {
    match fs::read_dir(path) {
        Ok(entries) => {
            let finds: Vec<_> = entries.flatten().map(|entry| entry.path().display().to_string()).take(5).collect();
            Outcome::of_finds(&finds, "it is empty")
        }
        Err(error) => of_file::<()>(Err(error), ""),
    }
}

/// Every file below a folder that can be opened for writing.
fn writable_below(path: &Path, finds: &mut Vec<String>, seen: &mut usize) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        *seen += 1;
        if kind.is_dir() {
            writable_below(&entry.path(), finds, seen);
        } else if kind.is_file() && is_writable(&entry.path()) {
            finds.push(entry.path().display().to_string());
        }
    }
}

/// What is masked is the null device, which takes everything and does nothing.
fn is_writable(path: &Path) -> bool {
    let opened = fs::File::options().write(true).open(path);
    opened.and_then(|file| file.metadata()).is_ok_and(|found| found.is_file())
}

fn find_writable(path: &str) -> Outcome {
    let (mut finds, mut seen) = (Vec::new(), 0);
    writable_below(Path::new(path), &mut finds, &mut seen);
    if seen == 0 {
        return Outcome::Missing(format!("{path} is empty"));
    }
    finds.truncate(5);
    Outcome::of_finds(&finds, &format!("none of {seen} files"))
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "core-pattern",
        tries: "name the program that the host runs for a core dump",
        refusals: NOT_WRITABLE,
        act: |_| write_same("/proc/sys/kernel/core_pattern"),
    },
    Attempt {
        name: "modprobe-path",
        tries: "name the program that the host runs to load a module",
        refusals: NOT_WRITABLE,
        act: |_| write_same("/proc/sys/kernel/modprobe"),
    },
    Attempt {
        name: "sysctl-any",
        tries: "write any of the files below /proc/sys",
        refusals: &[],
        act: |_| find_writable("/proc/sys"),
    },
    Attempt {
        name: "sysctl-vm",
        tries: "change how the host hands out memory",
        refusals: NOT_WRITABLE,
        act: |_| write_same("/proc/sys/vm/overcommit_memory"),
    },
    Attempt {
        name: "sysctl-net",
        tries: "forward packets",
        refusals: NOT_WRITABLE,
        act: |_| write_same("/proc/sys/net/ipv4/ip_forward"),
    },
    Attempt {
        name: "sysctl-hostname",
        tries: "rename the machine through /proc/sys",
        refusals: NOT_WRITABLE,
        act: |_| write_same("/proc/sys/kernel/hostname"),
    },
    Attempt {
        name: "sysctl-user-namespaces",
        tries: "raise the number of user namespaces",
        refusals: NOT_WRITABLE,
        act: |_| write_same("/proc/sys/user/max_user_namespaces"),
    },
    Attempt {
        name: "binfmt-register",
        tries: "register an interpreter with the host",
        refusals: NOT_WRITABLE,
        act: |_| write("/proc/sys/fs/binfmt_misc/register", ":viv-escape:M::viv-escape::/nonexistent:"),
    },
    Attempt {
        name: "sysrq",
        tries: "press the host's magic key (for help)",
        refusals: NOT_WRITABLE,
        act: |_| write("/proc/sysrq-trigger", "h"),
    },
    Attempt {
        name: "kcore",
        tries: "read the host's memory",
        refusals: NOT_WRITABLE,
        act: |_| read_some("/proc/kcore"),
    },
    Attempt {
        name: "proc-keys",
        tries: "list the keys of the host",
        refusals: NOT_WRITABLE,
        act: |_| read_some("/proc/keys"),
    },
    Attempt {
        name: "timer-list",
        tries: "see what the host waits for",
        refusals: NOT_WRITABLE,
        act: |_| read_some("/proc/timer_list"),
    },
    Attempt {
        name: "interrupts",
        tries: "watch the host's interrupts, and with them its keyboard",
        refusals: NOT_WRITABLE,
        act: |_| read_some("/proc/interrupts"),
    },
    Attempt {
        name: "kernel-addresses",
        tries: "find out where the kernel lies",
        refusals: NOT_WRITABLE,
        act: |_| match fs::read_to_string("/proc/kallsyms") {
            Ok(text) => {
                let told = text.lines().find(|line| !line.starts_with("0000000000000000")).map(str::to_owned);
                Outcome::of_finds(told.as_slice(), "every address is zero")
            }
            Err(error) => Outcome::Error(error),
        },
    },
    Attempt {
        name: "slabinfo",
        tries: "see how the kernel lays out its memory",
        refusals: NOT_WRITABLE,
        act: |_| read_some("/proc/slabinfo"),
    },
    Attempt {
        name: "pagemap-counts",
        tries: "read who uses which page of the host's memory",
        refusals: NOT_WRITABLE,
        act: |_| read_some("/proc/kpagecount"),
    },
    Attempt {
        name: "acpi",
        tries: "list the host's power switches",
        refusals: NOT_WRITABLE,
        act: |_| list_some("/proc/acpi"),
    },
    Attempt { name: "scsi", tries: "list the host's disks", refusals: NOT_WRITABLE, act: |_| list_some("/proc/scsi") },
    Attempt {
        name: "firmware",
        tries: "list the host's firmware tables",
        refusals: NOT_WRITABLE,
        act: |_| list_some("/sys/firmware"),
    },
    Attempt {
        name: "sysfs-any",
        tries: "write any of the files below /sys",
        refusals: &[],
        act: |_| find_writable("/sys"),
    },
    Attempt {
        name: "sysfs-huge-pages",
        tries: "change the host's huge pages",
        refusals: NOT_WRITABLE,
        act: |_| write_same("/sys/kernel/mm/transparent_hugepage/enabled"),
    },
    Attempt {
        name: "sysfs-interface",
        tries: "change a network interface through /sys",
        refusals: NOT_WRITABLE,
        act: |_| write_same("/sys/class/net/lo/mtu"),
    },
    Attempt {
        name: "debugfs",
        tries: "look into the kernel through debugfs and tracefs",
        refusals: NOT_WRITABLE,
        act: |_| {
            let folders = ["/sys/kernel/debug", "/sys/kernel/tracing", "/sys/kernel/security", "/sys/fs/bpf"];
            folders
                .map(list_some)
                .into_iter()
                .find(|outcome| matches!(outcome, Outcome::Opened(_)))
                .unwrap_or_else(|| Outcome::Refused("they are empty, or not there".to_owned()))
        },
    },
    Attempt {
        name: "cgroup-files",
        tries: "write into any cgroup that can be seen",
        refusals: NOT_WRITABLE,
        act: |_| {
            let (mut finds, mut seen) = (Vec::new(), 0);
            writable_below(Path::new("/sys/fs/cgroup"), &mut finds, &mut seen);
            finds.truncate(5);
            Outcome::of_finds(&finds, &format!("none of {seen} files"))
        },
    },
    Attempt {
        name: "cgroup-names",
        tries: "learn where in the host's cgroups it is",
        refusals: &[],
        act: |_| {
            let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
            // In a namespace of its own the root is where it was made; an execution's own cgroup lies below that.
            let outside = |line: &&str| line.rsplit(':').next().is_some_and(|path| path.starts_with("/.."));
            let finds: Vec<_> = text.lines().filter(outside).map(str::to_owned).collect();
            Outcome::of_finds(&finds, "all paths begin at its own")
        },
    },
    Attempt {
        name: "oom-score-lower",
        tries: "be the last that the kernel kills for memory",
        refusals: &[EACCES, EPERM, EINVAL],
        act: |_| write("/proc/self/oom_score_adj", "-1000"),
    },
    Attempt {
        name: "uid-map",
        tries: "map ids of the host",
        refusals: &[EPERM, EACCES, EROFS, EIO],
        act: |_| write("/proc/self/uid_map", "0 0 1"),
    },
    Attempt {
        name: "gid-map",
        tries: "map groups of the host",
        refusals: &[EPERM, EACCES, EROFS, EIO],
        act: |_| write("/proc/self/gid_map", "0 0 1"),
    },
    Attempt {
        name: "project-id",
        tries: "give a file to another project, which quotas go by",
        refusals: &[EPERM, EACCES, EINVAL, libc::ENOTTY, libc::EOPNOTSUPP],
        act: |_| {
            // Anyone may map project ids; what counts is whether they can be used.
            let _ = fs::write("/proc/self/projid_map", "0 0 4294967295");
            let path = format!("/tmp/viv-escape-project-{}", std::process::id());
            let given = fs::write(&path, "").and_then(|()| fs::File::open(&path)).and_then(|file| {
                // FS_IOC_FSSETXATTR of struct fsxattr: flags, extent size, extents, project, copy-on-write extent size.
                let attributes = [0_u32, 0, 0, 77, 0, 0, 0];
                call!(libc::SYS_ioctl, file.as_raw_fd(), 0x401c_5820_i64, &attributes)
            });
            Outcome::of(given, "it has another project")
        },
    },
    Attempt {
        name: "pci-registers",
        tries: "write to the host's devices through /proc/bus",
        refusals: NOT_WRITABLE,
        act: |_| {
            let (mut finds, mut seen) = (Vec::new(), 0);
            for folder in ["/proc/bus", "/proc/irq", "/proc/fs"] {
                writable_below(Path::new(folder), &mut finds, &mut seen);
            }
            finds.truncate(5);
            Outcome::of_finds(&finds, &format!("none of {seen} files"))
        },
    },
    Attempt {
        name: "host-in-mountinfo",
        tries: "find a mount of the host's",
        refusals: &[],
        act: |_| match host_mounts() {
            Ok(finds) => Outcome::of_finds(&finds, "none"),
            Err(error) => Outcome::Error(error),
        },
    },
];

/// Mounts of filesystems with all of their files in them, which nothing inside should be.
fn host_mounts() -> io::Result<Vec<String>> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    let on_disk = ["ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat", "nfs", "9p", "virtiofs"];
    let is_whole = |line: &&str| {
        let Some((place, filesystem)) = line.split_once(" - ") else { return false };
        let kind = filesystem.split(' ').next().unwrap_or_default();
        on_disk.contains(&kind) && place.split(' ').nth(3) == Some("/")
    };
    Ok(text.lines().filter(is_whole).map(str::to_owned).collect())
}
