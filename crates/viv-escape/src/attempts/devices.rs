//! Devices, terminals and descriptors.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use libc::{EACCES, EIO, ENOENT, ENOTTY, ENXIO, EPERM, EROFS, mode_t};

use crate::attempt::{Attempt, Outcome};
use crate::sys::{self, call};

/// The devices that there are, as major and minor number.
const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

/// What else lies in `/dev`: links to descriptors, and folders that are mounts of their own.
const OTHERS: [&str; 10] = ["fd", "stdin", "stdout", "stderr", "core", "pts", "ptmx", "shm", "mqueue", "console"];

/// Where an image may have brought devices; the first is for the suite's own.
const PLACES: [&str; 10] = ["/nodes", "/", "/etc", "/run", "/tmp", "/var", "/home", "/root", "/dev/shm", "/workspace"];

const NOT_THERE: &[i32] = &[EPERM, EACCES, ENOENT, EROFS, ENXIO];

fn make(kind: mode_t, major: u32, minor: u32) -> Outcome {
    let path = format!("/tmp/viv-escape-device-{}", std::process::id());
    let Ok(name) = std::ffi::CString::new(path.clone()) else { return Outcome::Missing("a name".to_owned()) };
    let made = call!(libc::SYS_mknodat, libc::AT_FDCWD, name.as_c_str(), kind | 0o666, libc::makedev(major, minor));
    let outcome = Outcome::of(made.and_then(|_| fs::File::open(&path)), "it was made and opened");
    let _ = fs::remove_file(path);
    outcome
}

fn open(path: &CStr) -> Outcome {
    let flags = libc::O_RDWR | libc::O_NONBLOCK;
    Outcome::of(call!(libc::SYS_openat, libc::AT_FDCWD, path, flags), "it was opened")
}

/// Whether a terminal of its own takes this.
fn on_terminal(request: libc::c_ulong, argument: &CStr) -> Outcome {
    let opened = fs::File::options().read(true).write(true).open("/dev/ptmx");
    let result = opened.and_then(|master| {
        let unlocked = 0_u32;
        call!(libc::SYS_ioctl, master.as_raw_fd(), libc::TIOCSPTLCK, &unlocked)?;
        let slave = call!(libc::SYS_ioctl, master.as_raw_fd(), libc::TIOCGPTPEER, libc::O_RDWR | libc::O_NOCTTY)?;
        call!(libc::SYS_setsid)?;
        call!(libc::SYS_ioctl, slave, libc::TIOCSCTTY, 0)?;
        let answer = call!(libc::SYS_ioctl, slave, request, argument);
        // Closing it would hang up on this very process before it could tell.
        std::mem::forget(master);
        answer
    });
    Outcome::of(result, "the terminal took it")
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "device-set",
        tries: "find a device that is not one of the six",
        refusals: &[],
        act: |_| {
            let (mut finds, mut names) = (Vec::new(), BTreeSet::new());
            for entry in fs::read_dir("/dev").into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let Ok(found) = entry.metadata() else { continue };
                let is_device = found.file_type().is_char_device() || found.file_type().is_block_device();
                let number = (libc::major(found.rdev()), libc::minor(found.rdev()));
                let known = DEVICES.iter().any(|(known, major, minor)| *known == name && (*major, *minor) == number);
                if is_device && !known || !is_device && !OTHERS.contains(&name.as_str()) {
                    finds.push(format!("/dev/{name} {number:?}"));
                }
                names.insert(name);
            }
            // An empty folder would show nothing.
            finds.extend(
                DEVICES.iter().filter(|(name, ..)| !names.contains(*name)).map(|(name, ..)| format!("no {name}")),
            );
            Outcome::of_finds(&finds, "only those")
        },
    },
    Attempt {
        name: "device-elsewhere",
        tries: "open a device that lies outside of /dev",
        refusals: &[],
        act: |_| {
            let (mut finds, mut seen) = (Vec::new(), 0);
            for folder in PLACES {
                for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                    let special = |kind: fs::FileType| kind.is_char_device() || kind.is_block_device();
                    if entry.file_type().is_ok_and(special) {
                        seen += 1;
                        let opened = fs::File::open(entry.path()).is_ok();
                        finds.extend(opened.then(|| entry.path().display().to_string()));
                    }
                }
            }
            Outcome::of_finds(&finds, &format!("none of {seen} can be opened"))
        },
    },
    Attempt {
        name: "device-disk",
        tries: "make the host's first disk",
        refusals: &[EPERM, EACCES],
        act: |_| make(libc::S_IFBLK, 8, 0),
    },
    Attempt {
        name: "device-mem",
        tries: "make the device of the host's memory",
        refusals: &[EPERM, EACCES],
        act: |_| make(libc::S_IFCHR, 1, 1),
    },
    Attempt {
        name: "device-kmsg",
        tries: "make the device of the kernel's messages",
        refusals: &[EPERM, EACCES],
        act: |_| make(libc::S_IFCHR, 1, 11),
    },
    Attempt {
        name: "device-loop",
        tries: "make the device that makes disks of files",
        refusals: &[EPERM, EACCES],
        act: |_| make(libc::S_IFCHR, 10, 237),
    },
    Attempt {
        name: "device-null",
        tries: "make even a harmless device",
        refusals: &[EPERM, EACCES],
        act: |_| make(libc::S_IFCHR, 1, 3),
    },
    Attempt { name: "open-mem", tries: "open /dev/mem", refusals: NOT_THERE, act: |_| open(c"/dev/mem") },
    Attempt { name: "open-kmsg", tries: "open /dev/kmsg", refusals: NOT_THERE, act: |_| open(c"/dev/kmsg") },
    Attempt { name: "open-fuse", tries: "open /dev/fuse", refusals: NOT_THERE, act: |_| open(c"/dev/fuse") },
    Attempt { name: "open-kvm", tries: "open /dev/kvm", refusals: NOT_THERE, act: |_| open(c"/dev/kvm") },
    Attempt { name: "open-tun", tries: "open /dev/net/tun", refusals: NOT_THERE, act: |_| open(c"/dev/net/tun") },
    Attempt {
        name: "open-console",
        tries: "open the host's console",
        refusals: NOT_THERE,
        act: |_| open(c"/dev/console"),
    },
    Attempt {
        name: "open-loop-control",
        tries: "open /dev/loop-control",
        refusals: NOT_THERE,
        act: |_| open(c"/dev/loop-control"),
    },
    Attempt {
        name: "terminal-input",
        tries: "type into a terminal (TIOCSTI)",
        // The kernel itself refuses with an I/O error where that is turned off.
        refusals: &[EPERM, EACCES, EIO],
        act: |_| on_terminal(libc::TIOCSTI, c"x"),
    },
    Attempt {
        name: "terminal-input-high-bits",
        tries: "type into a terminal, with high bits that the kernel does not look at",
        refusals: &[EPERM, EACCES, EIO],
        act: |_| on_terminal(libc::TIOCSTI | (1 << 32), c"x"),
    },
    Attempt {
        name: "terminal-console",
        tries: "take the host's console (TIOCCONS)",
        refusals: &[EPERM, EACCES],
        act: |_| on_terminal(libc::TIOCCONS, c""),
    },
    Attempt {
        name: "terminal-paste",
        tries: "paste into a virtual terminal (TIOCLINUX)",
        refusals: &[EPERM, EACCES, ENOTTY],
        act: |_| on_terminal(0x541c, c"\x03"),
    },
    Attempt {
        name: "terminal-of-others",
        tries: "open the terminal that it was started on",
        refusals: &[],
        act: |setting| {
            // With pipes there must be none; the suite runs it with pipes.
            let opened = sys::in_child(|| {
                if fs::File::open("/dev/tty").is_ok() {
                    sys::exit(1);
                }
            });
            let shared = setting.descriptors.iter().any(|(_, target)| target.contains("tty") || target.contains("pts"));
            match opened {
                Ok(sys::End::Code(0)) if !shared => Outcome::Refused("there is none".to_owned()),
                _ => Outcome::Opened(format!("{:?}", setting.descriptors)),
            }
        },
    },
    Attempt {
        name: "descriptors",
        tries: "find a descriptor that it was not given",
        refusals: &[],
        act: |setting| {
            let given = |(number, target): &&(u32, String)| *number > 2 || !target.starts_with("pipe:");
            let finds: Vec<_> = setting
                .descriptors
                .iter()
                .filter(given)
                .map(|(number, target)| format!("{number}: {target}"))
                .collect();
            if setting.descriptors.len() < 3 {
                return Outcome::Opened(format!("its own cannot be seen: {:?}", setting.descriptors));
            }
            Outcome::of_finds(&finds, "three pipes")
        },
    },
];
