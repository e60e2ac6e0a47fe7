//! Another sandbox on the same machine.

use std::ffi::CString;
use std::fs;
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use libc::{EACCES, ECONNREFUSED, ENOENT, EPERM, ESRCH};

use crate::attempt::{Attempt, Outcome, Setting};
use crate::sys::{NULL, call};

/// The neighbour's pid on the host.
fn with_pid(setting: &Setting, act: impl FnOnce(i32) -> Outcome) -> Outcome {
    match setting.number("NEIGHBOUR_PID") {
        Ok(pid) => act(pid),
        Err(outcome) => outcome,
    }
}

/// Its key of System V objects.
fn with_key(setting: &Setting, act: impl FnOnce(i32) -> Outcome) -> Outcome {
    match setting.number("NEIGHBOUR_KEY") {
        Ok(key) => act(key),
        Err(outcome) => outcome,
    }
}

/// The name that its files, sockets and queues have.
fn with_name(setting: &Setting, act: impl FnOnce(&str) -> Outcome) -> Outcome {
    match setting.get("NEIGHBOUR_NAME") {
        Ok(name) => act(name),
        Err(outcome) => outcome,
    }
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "neighbour-signal",
        tries: "signal a process of the neighbour's",
        refusals: &[ESRCH, EPERM],
        act: |setting| with_pid(setting, |pid| Outcome::of(call!(libc::SYS_kill, pid, 0), "it is there")),
    },
    Attempt {
        name: "neighbour-descriptor",
        tries: "get hold of a process of the neighbour's",
        refusals: &[ESRCH, EPERM],
        act: |setting| with_pid(setting, |pid| Outcome::of(call!(libc::SYS_pidfd_open, pid, 0), "it has it")),
    },
    Attempt {
        name: "neighbour-root",
        tries: "see the neighbour's files through its process",
        refusals: &[ENOENT, EACCES],
        act: |setting| {
            with_pid(setting, |pid| Outcome::of(fs::read_dir(format!("/proc/{pid}/root/")), "they were listed"))
        },
    },
    Attempt {
        name: "neighbour-trace",
        tries: "attach to a process of the neighbour's",
        refusals: &[ESRCH, EPERM],
        act: |setting| {
            with_pid(setting, |pid| {
                Outcome::of(call!(libc::SYS_ptrace, libc::PTRACE_SEIZE, pid, NULL, NULL), "it is traced")
            })
        },
    },
    Attempt {
        name: "processes-of-others",
        tries: "see processes that are not of this sandbox",
        refusals: &[],
        act: |setting| {
            with_name(setting, |name| {
                // The neighbour's process has the name among its arguments.
                let told = |entry: fs::DirEntry| {
                    let pid = entry.file_name().to_str()?.parse::<u32>().ok()?;
                    let line = fs::read(entry.path().join("cmdline")).ok()?;
                    let line = String::from_utf8_lossy(&line).into_owned();
                    (line.contains(name) || line.contains("viv\0shim")).then(|| format!("{pid}: {line}"))
                };
                let finds: Vec<_> = fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(told).collect();
                Outcome::of_finds(&finds, "none")
            })
        },
    },
    Attempt {
        name: "neighbour-file",
        tries: "find a file of the neighbour's",
        refusals: &[ENOENT],
        act: |setting| with_name(setting, |name| Outcome::of(fs::read(format!("/tmp/{name}")), "it was read")),
    },
    Attempt {
        name: "neighbour-shared-file",
        tries: "find a file of the neighbour's in shared memory",
        refusals: &[ENOENT],
        act: |setting| with_name(setting, |name| Outcome::of(fs::read(format!("/dev/shm/{name}")), "it was read")),
    },
    Attempt {
        name: "neighbour-port",
        tries: "connect to a port of the neighbour's",
        refusals: &[ECONNREFUSED],
        act: |setting| match setting.number::<u16>("NEIGHBOUR_PORT") {
            Ok(port) => Outcome::of(TcpStream::connect(("127.0.0.1", port)), "connected"),
            Err(outcome) => outcome,
        },
    },
    Attempt {
        name: "neighbour-abstract-socket",
        tries: "connect to a socket of the neighbour's that is in no filesystem",
        refusals: &[ECONNREFUSED],
        act: |setting| {
            with_name(setting, |name| {
                let connected = SocketAddr::from_abstract_name(name).and_then(|at| UnixStream::connect_addr(&at));
                Outcome::of(connected, "connected")
            })
        },
    },
    Attempt {
        name: "neighbour-shared-memory",
        tries: "attach the neighbour's System V memory",
        refusals: &[ENOENT],
        act: |setting| with_key(setting, |key| Outcome::of(call!(libc::SYS_shmget, key, 0, 0), "it is there")),
    },
    Attempt {
        name: "neighbour-semaphore",
        tries: "use the neighbour's System V semaphores",
        refusals: &[ENOENT],
        act: |setting| with_key(setting, |key| Outcome::of(call!(libc::SYS_semget, key, 0, 0), "they are there")),
    },
    Attempt {
        name: "neighbour-messages",
        tries: "read the neighbour's System V messages",
        refusals: &[ENOENT],
        act: |setting| with_key(setting, |key| Outcome::of(call!(libc::SYS_msgget, key, 0), "they are there")),
    },
    Attempt {
        name: "neighbour-queue",
        tries: "open the neighbour's POSIX queue",
        refusals: &[ENOENT],
        act: |setting| {
            with_name(setting, |name| {
                let Ok(name) = CString::new(name) else { return Outcome::Opened("a bad name".to_owned()) };
                Outcome::of(call!(libc::SYS_mq_open, name.as_c_str(), libc::O_RDONLY, 0, NULL), "it is open")
            })
        },
    },
];
