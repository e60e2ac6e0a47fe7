//! Namespaces: new ones, in which the kernel gives all capabilities, and those of others.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;

use libc::{EACCES, EINVAL, ENOSYS, EPERM, c_int};

use crate::attempt::{Attempt, Outcome};
use crate::sys::{self, call};

fn unshare(flags: c_int, what: &str) -> Outcome {
    Outcome::of(call!(libc::SYS_unshare, flags), &format!("it has a new {what} namespace"))
}

fn clone(flags: c_int, what: &str) -> Outcome {
    let result = call!(libc::SYS_clone, flags | libc::SIGCHLD, sys::NULL, sys::NULL, sys::NULL, sys::NULL);
    born(result, what)
}

/// A child ends at once; its existence is what counts.
fn born(result: io::Result<i64>, what: &str) -> Outcome {
    match result {
        Ok(0) => sys::exit(0),
        result => Outcome::of(result, &format!("it has a child in a new {what} namespace")),
    }
}

/// Joins a namespace, if it can be opened.
fn join(path: &str, kind: c_int) -> Outcome {
    let joined = fs::File::open(path).and_then(|file| call!(libc::SYS_setns, file.as_raw_fd(), kind));
    Outcome::of(joined, &format!("it is in {path}"))
}

const NO: &[i32] = &[EPERM, EACCES];

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "unshare-user",
        tries: "make a user namespace and be root with all capabilities in it",
        refusals: NO,
        act: |_| unshare(libc::CLONE_NEWUSER, "user"),
    },
    Attempt {
        name: "unshare-mount",
        tries: "make a mount namespace",
        refusals: NO,
        act: |_| unshare(libc::CLONE_NEWNS, "mount"),
    },
    Attempt {
        name: "unshare-pid",
        tries: "make a PID namespace",
        refusals: NO,
        act: |_| unshare(libc::CLONE_NEWPID, "PID"),
    },
    Attempt {
        name: "unshare-net",
        tries: "make a network namespace",
        refusals: NO,
        act: |_| unshare(libc::CLONE_NEWNET, "network"),
    },
    Attempt {
        name: "unshare-ipc",
        tries: "make an IPC namespace",
        refusals: NO,
        act: |_| unshare(libc::CLONE_NEWIPC, "IPC"),
    },
    Attempt {
        name: "unshare-uts",
        tries: "make a UTS namespace",
        refusals: NO,
        act: |_| unshare(libc::CLONE_NEWUTS, "UTS"),
    },
    Attempt {
        name: "unshare-cgroup",
        tries: "make a cgroup namespace",
        refusals: NO,
        act: |_| unshare(libc::CLONE_NEWCGROUP, "cgroup"),
    },
    Attempt {
        name: "unshare-time",
        tries: "make a time namespace",
        refusals: NO,
        // CLONE_NEWTIME
        act: |_| unshare(0x80, "time"),
    },
    Attempt {
        name: "clone-user",
        tries: "have a child in a user namespace of its own",
        refusals: NO,
        act: |_| clone(libc::CLONE_NEWUSER, "user"),
    },
    Attempt {
        name: "clone-user-mount",
        tries: "have a child that is root over a mount namespace of its own",
        refusals: NO,
        act: |_| clone(libc::CLONE_NEWUSER | libc::CLONE_NEWNS, "user and mount"),
    },
    Attempt {
        name: "clone-net",
        tries: "have a child in a network namespace of its own",
        refusals: NO,
        act: |_| clone(libc::CLONE_NEWNET, "network"),
    },
    Attempt {
        name: "clone3-user",
        tries: "do the same by clone3, whose flags no filter can see",
        // Answered as if there were no such call, so that libraries take the older one.
        refusals: &[EPERM, ENOSYS],
        act: |_| {
            // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls.
            let arguments = [libc::CLONE_NEWUSER as u64, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0];
            born(call!(libc::SYS_clone3, &arguments, size_of_val(&arguments)), "user")
        },
    },
    Attempt {
        name: "setns-mount-of-agent",
        tries: "join the agent's mount namespace",
        refusals: NO,
        act: |_| join("/proc/1/ns/mnt", libc::CLONE_NEWNS),
    },
    Attempt {
        name: "setns-user-of-agent",
        tries: "join the agent's user namespace, with all capabilities",
        // Its own, which the kernel refuses as senseless where nothing refuses it before.
        refusals: &[EPERM, EACCES, EINVAL],
        act: |_| join("/proc/1/ns/user", libc::CLONE_NEWUSER),
    },
    Attempt {
        name: "setns-net",
        tries: "join a network namespace",
        refusals: NO,
        act: |_| join("/proc/self/ns/net", libc::CLONE_NEWNET),
    },
    Attempt {
        name: "setns-pidfd",
        tries: "join all namespaces of the agent at once",
        refusals: NO,
        act: |_| {
            let joined = call!(libc::SYS_pidfd_open, 1, 0)
                .and_then(|pidfd| call!(libc::SYS_setns, pidfd, libc::CLONE_NEWNS | libc::CLONE_NEWNET));
            Outcome::of(joined, "it is in the agent's namespaces")
        },
    },
    Attempt {
        name: "namespace-parent",
        tries: "get hold of the host's user namespace",
        refusals: NO,
        act: |_| {
            // NS_GET_PARENT
            let parent =
                fs::File::open("/proc/self/ns/user").and_then(|file| call!(libc::SYS_ioctl, file.as_raw_fd(), 0xb702));
            Outcome::of(parent, "it has a descriptor of it")
        },
    },
];
