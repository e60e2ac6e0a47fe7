//! Ids and capabilities.

use std::fs;
use std::io;
use std::process::Command;

use libc::{EACCES, EINVAL, ENOTSUP, EPERM};
use serde_json::{Value, json};

use crate::attempt::{Attempt, Outcome};
use crate::sys::{NULL, call};

/// The id of the agent, which no workload has.
const KEEPER: u32 = 65_535;

const NO: &[i32] = &[EPERM, EACCES];

/// Where there is one id only, others are not even known to the kernel.
const NOT_HIM: &[i32] = &[EPERM, EINVAL];

/// The argument by which this program only tells who it is: see [`who`].
pub(crate) const WHO: &str = "--who";

/// Who this process is, and what it may.
pub(crate) fn who() -> Value {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(|line| line.split_ascii_whitespace().collect::<Vec<_>>().join(" "))
    };
    json!({ "uid": field("Uid"), "gid": field("Gid"), "capabilities": field("CapEff"), "permitted": field("CapPrm") })
}

/// What a program is that is owned by somebody else and says that it runs as him.
fn run_set_id(path: &str) -> Outcome {
    let told =
        Command::new(path).arg(WHO).output().and_then(|output| Ok(serde_json::from_slice::<Value>(&output.stdout)?));
    match told {
        // A filter that kills, a program that does not start: the suite's own fault, unless the kernel says so.
        Err(error) if error.raw_os_error().is_none() => Outcome::Opened(format!("{path} did not run: {error}")),
        Err(error) => Outcome::Error(error),
        Ok(told) if told == who() => Outcome::Refused("it is who it was".to_owned()),
        Ok(told) => Outcome::Opened(told.to_string()),
    }
}

/// A user id that this process does not have.
fn become_user(uid: u32) -> Outcome {
    Outcome::of(call!(libc::SYS_setresuid, uid, uid, uid), &format!("it is user {uid}"))
}

fn become_group(gid: u32) -> Outcome {
    Outcome::of(call!(libc::SYS_setresgid, gid, gid, gid), &format!("it is in group {gid}"))
}

/// Root becomes another user, and another user root.
fn other_id() -> io::Result<u32> {
    Ok(if call!(libc::SYS_getuid)? == 0 { 1000 } else { 0 })
}

/// A file of its own.
fn own_file() -> io::Result<String> {
    let path = format!("/tmp/viv-escape-own-{}", std::process::id());
    fs::write(&path, "")?;
    Ok(path)
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "capabilities",
        tries: "find that it has a capability",
        refusals: &[],
        act: |_| {
            let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
            let held = |line: &&str| {
                line.starts_with("Cap") && line.split_ascii_whitespace().nth(1) != Some("0000000000000000")
            };
            let sets = status.lines().filter(|line| line.starts_with("Cap")).count();
            if sets < 5 {
                return Outcome::Opened("the kernel does not tell".to_owned());
            }
            let finds: Vec<_> = status.lines().filter(held).map(str::to_owned).collect();
            Outcome::of_finds(&finds, "it has none")
        },
    },
    Attempt {
        name: "capabilities-raise",
        tries: "give itself all capabilities",
        refusals: NO,
        act: |_| {
            let header = [0x2008_0522_u32, 0];
            let sets = [u32::MAX, u32::MAX, 0, 0x1ff, 0x1ff, 0];
            Outcome::of(call!(libc::SYS_capset, &header, &sets), "it has them")
        },
    },
    Attempt {
        name: "capabilities-ambient",
        tries: "keep a capability over exec",
        refusals: NO,
        act: |_| {
            // PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN
            Outcome::of(call!(libc::SYS_prctl, 47, 2, 21, 0, 0), "it keeps it")
        },
    },
    Attempt {
        name: "secure-bits",
        tries: "change how ids and capabilities go together",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_prctl, libc::PR_SET_SECUREBITS, 0x2f, 0, 0, 0), "it did"),
    },
    Attempt {
        name: "new-privileges",
        tries: "be able to gain privileges again",
        refusals: &[EINVAL, EPERM],
        act: |_| {
            if call!(libc::SYS_prctl, libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0).is_ok_and(|value| value == 0) {
                return Outcome::Opened("it is".to_owned());
            }
            Outcome::of(call!(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0), "it is")
        },
    },
    Attempt {
        name: "become-keeper",
        tries: "become the agent's user",
        refusals: NOT_HIM,
        act: |_| become_user(KEEPER),
    },
    Attempt {
        name: "become-other",
        tries: "become another user",
        refusals: NOT_HIM,
        act: |_| other_id().map_or_else(Outcome::Error, become_user),
    },
    Attempt {
        name: "become-unmapped",
        tries: "become a user that is not mapped",
        refusals: &[EINVAL, EPERM],
        act: |_| become_user(KEEPER + 1),
    },
    Attempt { name: "keeper-group", tries: "join the agent's group", refusals: NOT_HIM, act: |_| become_group(KEEPER) },
    Attempt {
        name: "other-group",
        tries: "join another group",
        refusals: NOT_HIM,
        act: |_| other_id().map_or_else(Outcome::Error, become_group),
    },
    Attempt {
        name: "more-groups",
        tries: "join more groups",
        refusals: NOT_HIM,
        act: |_| {
            let groups = [0_u32, 5, KEEPER];
            Outcome::of(call!(libc::SYS_setgroups, groups.len(), &groups), "it did")
        },
    },
    Attempt {
        name: "drop-groups",
        tries: "leave groups that keep it out of files",
        refusals: &[EPERM],
        act: |_| Outcome::of(call!(libc::SYS_setgroups, 0, NULL), "it did"),
    },
    Attempt {
        name: "keeper-files",
        tries: "take the agent's id for files only",
        // By the filter, where the ids themselves could be taken.
        refusals: &[EPERM],
        act: |_| {
            // These calls answer the value before and never fail.
            let _ = call!(libc::SYS_setfsuid, KEEPER);
            match call!(libc::SYS_setfsuid, KEEPER) {
                Ok(now) if now == i64::from(KEEPER) => Outcome::Opened("it has it".to_owned()),
                Ok(now) => Outcome::Refused(format!("it is still {now}")),
                Err(error) => Outcome::Error(error),
            }
        },
    },
    Attempt {
        name: "give-to-keeper",
        tries: "give a file to the agent's user",
        refusals: NOT_HIM,
        act: |_| {
            Outcome::of(own_file().and_then(|path| std::os::unix::fs::chown(path, Some(KEEPER), None)), "it has it")
        },
    },
    Attempt {
        name: "file-capabilities",
        tries: "give a program capabilities",
        refusals: &[EPERM, ENOTSUP],
        act: |_| {
            let given = own_file().and_then(|path| {
                let path = std::ffi::CString::new(path)?;
                // struct vfs_cap_data, version 2, effective: all of the first 32.
                let data = [0x0200_0001_u32, u32::MAX, 0, 0, 0];
                let name = c"security.capability";
                call!(libc::SYS_setxattr, path.as_c_str(), name, &data, size_of_val(&data), 0)
            });
            Outcome::of(given, "it has them")
        },
    },
    Attempt {
        name: "set-user-id",
        tries: "become the owner of a program that asks for it",
        refusals: &[],
        act: |setting| match setting.get("SET_ID_PROGRAM") {
            Ok(path) => run_set_id(path),
            Err(outcome) => outcome,
        },
    },
    Attempt {
        name: "trusted-attributes",
        tries: "change what the overlay keeps about its files",
        refusals: &[EPERM, ENOTSUP],
        act: |_| {
            let set = own_file().and_then(|path| {
                let path = std::ffi::CString::new(path)?;
                call!(libc::SYS_setxattr, path.as_c_str(), c"trusted.overlay.opaque", c"y", 1, 0)
            });
            Outcome::of(set, "it did")
        },
    },
    Attempt {
        name: "immutable-file",
        tries: "make a file that not even the host can remove",
        refusals: &[EPERM, EACCES, libc::ENOTTY, libc::EOPNOTSUPP],
        act: |_| {
            let made = own_file().and_then(fs::File::open).and_then(|file| {
                let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
                // FS_IOC_SETFLAGS, FS_IMMUTABLE_FL
                call!(libc::SYS_ioctl, descriptor, 0x4008_6602_i64, &0x10_u32)
            });
            Outcome::of(made, "it cannot be removed")
        },
    },
];
