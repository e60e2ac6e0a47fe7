//! Mounts: the old calls, the new ones, and changing the root.

use std::ffi::CStr;
use std::fs;
use std::io;

use libc::{EACCES, EINVAL, EPERM};

use crate::attempt::{Attempt, Outcome};
use crate::sys::{NULL, call};

/// Mounts on a folder of its own.
fn mount(source: &CStr, kind: &CStr, flags: u64, data: Option<&CStr>) -> Outcome {
    let folder = match own_folder() {
        Ok(folder) => folder,
        Err(error) => return Outcome::Error(error),
    };
    let result = match data {
        Some(data) => call!(libc::SYS_mount, source, folder.as_c_str(), kind, flags, data),
        None => call!(libc::SYS_mount, source, folder.as_c_str(), kind, flags, NULL),
    };
    Outcome::of(result, &format!("{} is mounted", kind.to_string_lossy()))
}

fn own_folder() -> io::Result<std::ffi::CString> {
    let path = format!("/tmp/viv-escape-{}", std::process::id());
    fs::create_dir_all(&path)?;
    Ok(std::ffi::CString::new(path)?)
}

fn remount(path: &CStr, flags: u64) -> Outcome {
    let result = call!(libc::SYS_mount, NULL, path, NULL, libc::MS_REMOUNT | libc::MS_BIND | flags, NULL);
    Outcome::of(result, &format!("{} was mounted anew", path.to_string_lossy()))
}

fn unmount(path: &CStr) -> Outcome {
    Outcome::of(call!(libc::SYS_umount2, path, libc::MNT_DETACH), &format!("{} is gone", path.to_string_lossy()))
}

/// `struct mount_attr` of the kernel, with nothing to change but the attributes.
fn mount_attr(set: u64, clear: u64) -> [u64; 4] {
    [set, clear, 0, 0]
}

/// Without the right to mount, what is not a mount is not told from what is.
const NO: &[i32] = &[EPERM, EACCES];

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt { name: "mount-tmpfs", tries: "mount a tmpfs", refusals: NO, act: |_| mount(c"none", c"tmpfs", 0, None) },
    Attempt {
        name: "mount-bind",
        tries: "show a folder at a second place",
        refusals: NO,
        act: |_| mount(c"/etc", c"none", libc::MS_BIND, None),
    },
    Attempt {
        name: "mount-proc",
        tries: "mount a /proc without masks",
        refusals: NO,
        act: |_| mount(c"proc", c"proc", 0, None),
    },
    Attempt {
        name: "mount-sysfs",
        tries: "mount a /sys that can be written",
        refusals: NO,
        act: |_| mount(c"sysfs", c"sysfs", 0, None),
    },
    Attempt {
        name: "mount-overlay",
        tries: "mount an overlay",
        refusals: NO,
        act: |_| mount(c"overlay", c"overlay", 0, Some(c"lowerdir=/etc:/usr")),
    },
    Attempt {
        name: "mount-cgroup",
        tries: "mount the v1 cgroups, whose release agent runs on the host",
        refusals: NO,
        act: |_| mount(c"cgroup", c"cgroup", 0, Some(c"memory")),
    },
    Attempt {
        name: "mount-cgroup2",
        tries: "mount the v2 cgroups",
        refusals: NO,
        act: |_| mount(c"cgroup2", c"cgroup2", 0, None),
    },
    Attempt {
        name: "mount-mqueue",
        tries: "mount message queues",
        refusals: NO,
        act: |_| mount(c"mqueue", c"mqueue", 0, None),
    },
    Attempt {
        name: "mount-devpts",
        tries: "mount the host's terminals",
        refusals: NO,
        act: |_| mount(c"devpts", c"devpts", 0, None),
    },
    Attempt {
        name: "mount-binfmt",
        tries: "mount the register of interpreters",
        refusals: NO,
        act: |_| mount(c"binfmt_misc", c"binfmt_misc", 0, None),
    },
    Attempt {
        name: "mount-debugfs",
        tries: "mount debugfs",
        refusals: NO,
        act: |_| mount(c"debugfs", c"debugfs", 0, None),
    },
    Attempt {
        name: "mount-move",
        tries: "move /proc elsewhere",
        refusals: NO,
        act: |_| mount(c"/proc", c"none", libc::MS_MOVE, None),
    },
    Attempt {
        name: "mount-propagation",
        tries: "share its mounts with others",
        refusals: NO,
        act: |_| {
            let result = call!(libc::SYS_mount, NULL, c"/", NULL, libc::MS_SHARED | libc::MS_REC, NULL);
            Outcome::of(result, "mounts are shared")
        },
    },
    Attempt {
        name: "remount-proc-sys",
        tries: "make /proc/sys writable",
        refusals: NO,
        act: |_| remount(c"/proc/sys", 0),
    },
    Attempt { name: "remount-sys", tries: "make /sys writable", refusals: NO, act: |_| remount(c"/sys", 0) },
    Attempt {
        name: "remount-agent",
        tries: "make the agent's binary writable",
        refusals: NO,
        act: |_| remount(c"/.vivarium/agent", 0),
    },
    Attempt {
        name: "remount-dev",
        tries: "allow devices in shared memory",
        refusals: NO,
        act: |_| remount(c"/dev/shm", 0),
    },
    Attempt {
        name: "unmask",
        tries: "take the mask off a file of the kernel's",
        refusals: NO,
        act: |_| {
            let masked = [c"/proc/kcore", c"/proc/keys", c"/proc/interrupts", c"/proc/timer_list"];
            let there = |path: &&CStr| path.to_str().is_ok_and(|path| fs::exists(path).is_ok_and(|there| there));
            masked.into_iter().find(there).map_or_else(|| Outcome::Missing("none of them".to_owned()), unmount)
        },
    },
    Attempt {
        name: "unmask-sys",
        tries: "unmount /sys and see what is below",
        refusals: NO,
        act: |_| unmount(c"/sys"),
    },
    Attempt {
        name: "unmount-home",
        tries: "take the agent's folder away",
        refusals: NO,
        act: |_| unmount(c"/.vivarium"),
    },
    Attempt {
        name: "pivot-root",
        tries: "change the root",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_pivot_root, c"/tmp", c"/tmp"), "the root was changed"),
    },
    Attempt {
        name: "chroot",
        tries: "change its own root, and leave it through an open folder",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_chroot, c"/tmp"), "its root is /tmp"),
    },
    Attempt {
        name: "fsopen",
        tries: "begin a mount by fsopen",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_fsopen, c"tmpfs", 0), "it has a filesystem to configure"),
    },
    Attempt {
        name: "fspick",
        tries: "reconfigure a mounted filesystem by fspick",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_fspick, libc::AT_FDCWD, c"/sys", 0), "it has /sys to reconfigure"),
    },
    Attempt {
        name: "open-tree-clone",
        tries: "copy a mount by open_tree",
        refusals: NO,
        act: |_| {
            // OPEN_TREE_CLONE
            Outcome::of(call!(libc::SYS_open_tree, libc::AT_FDCWD, c"/", 1), "it has a copy of the root's mount")
        },
    },
    Attempt {
        name: "move-mount",
        tries: "move a mount by move_mount",
        refusals: NO,
        act: |_| {
            let result = call!(libc::SYS_move_mount, libc::AT_FDCWD, c"/proc", libc::AT_FDCWD, c"/tmp", 0);
            Outcome::of(result, "/proc was moved")
        },
    },
    Attempt {
        name: "mount-setattr",
        tries: "make the agent's binary writable by mount_setattr",
        refusals: NO,
        act: |_| {
            let attributes = mount_attr(0, libc::MOUNT_ATTR_RDONLY);
            let path = c"/.vivarium/agent";
            let size = size_of_val(&attributes);
            let result = call!(libc::SYS_mount_setattr, libc::AT_FDCWD, path, 0, &attributes, size);
            Outcome::of(result, "it is writable")
        },
    },
    Attempt {
        name: "idmap-mount",
        tries: "give a copy of a mount another mapping of ids",
        refusals: &[EPERM, EACCES, EINVAL],
        act: |_| {
            let Ok(namespace) = fs::File::open("/proc/self/ns/user") else {
                return Outcome::Refused("its own user namespace cannot be opened".to_owned());
            };
            let tree = match call!(libc::SYS_open_tree, libc::AT_FDCWD, c"/tmp", 1) {
                Ok(tree) => tree,
                Err(error) => return Outcome::Error(error),
            };
            let descriptor = std::os::fd::AsRawFd::as_raw_fd(&namespace);
            let attributes = [libc::MOUNT_ATTR_IDMAP, 0, 0, descriptor as u64];
            let size = size_of_val(&attributes);
            let flags = libc::AT_EMPTY_PATH;
            Outcome::of(call!(libc::SYS_mount_setattr, tree, c"", flags, &attributes, size), "it is mapped anew")
        },
    },
];
