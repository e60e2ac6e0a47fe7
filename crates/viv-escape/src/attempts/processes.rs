//! The agent, PID 1: its memory, its descriptors, its limits, its life.

use std::fs;
use std::io::{self, Write};

use libc::{EACCES, ENOENT, EPERM, EROFS, ETXTBSY};

use crate::attempt::{Attempt, Outcome};
use crate::sys::{NULL, call};

const AGENT: i32 = 1;
const NO: &[i32] = &[EPERM, EACCES];

fn open(path: &str, write: bool) -> Outcome {
    Outcome::of(fs::File::options().read(!write).write(write).open(path), &format!("{path} was opened"))
}

fn write(path: &str, value: &[u8]) -> Outcome {
    let written = fs::File::options().write(true).open(path).and_then(|mut file| file.write_all(value));
    Outcome::of(written, &format!("{path} was written"))
}

fn agent_pidfd() -> io::Result<i64> {
    call!(libc::SYS_pidfd_open, AGENT, 0)
}

fn signal(number: i32) -> Outcome {
    Outcome::of(call!(libc::SYS_kill, AGENT, number), "the signal was taken")
}

/// Threads of the agent, which have numbers of their own and can be named by these: those that say so, and those that
/// say nothing to who has the agent's id.
fn agent_threads() -> Vec<i32> {
    let is_agents = |number: &i32| match fs::read_to_string(format!("/proc/{number}/status")) {
        Ok(status) => status.lines().any(|line| line == "Tgid:\t1"),
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
    };
    (2..1000).filter(is_agents).collect()
}

/// One of them is as good as the other; that there is none is the suite's fault.
fn on_agent_thread(act: impl Fn(i32) -> Outcome) -> Outcome {
    agent_threads()
        .first()
        .map_or_else(|| Outcome::Opened("the agent has no threads".to_owned()), |&thread| act(thread))
}

/// A place in our memory and one in the agent's, which is linked to a fixed address.
fn vectors(buffer: &mut [u8; 16]) -> ([usize; 2], [usize; 2]) {
    ([buffer.as_mut_ptr().expose_provenance(), buffer.len()], [0x40_0000, buffer.len()])
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "ptrace-attach",
        tries: "attach to the agent",
        refusals: NO,
        act: |_| {
            let attached = call!(libc::SYS_ptrace, libc::PTRACE_ATTACH, AGENT, NULL, NULL);
            // It is let go when this process ends.
            Outcome::of(attached, "the agent is traced")
        },
    },
    Attempt {
        name: "ptrace-seize",
        tries: "seize the agent",
        refusals: NO,
        act: |_| {
            let seized = call!(libc::SYS_ptrace, libc::PTRACE_SEIZE, AGENT, NULL, NULL);
            Outcome::of(seized, "the agent is traced")
        },
    },
    Attempt {
        name: "process-vm-readv",
        tries: "read the agent's memory",
        refusals: NO,
        act: |_| {
            let mut buffer = [0; 16];
            let (here, there) = vectors(&mut buffer);
            let read = call!(libc::SYS_process_vm_readv, AGENT, &here, 1, &there, 1, 0);
            Outcome::of(read, &format!("{buffer:?}"))
        },
    },
    Attempt {
        name: "process-vm-writev",
        tries: "write the agent's memory",
        refusals: NO,
        act: |_| {
            let mut buffer = *b"\x7fELF\0\0\0\0\0\0\0\0\0\0\0\0";
            let (here, there) = vectors(&mut buffer);
            Outcome::of(call!(libc::SYS_process_vm_writev, AGENT, &here, 1, &there, 1, 0), "it was written")
        },
    },
    Attempt { name: "agent-mem", tries: "open the agent's memory", refusals: NO, act: |_| open("/proc/1/mem", false) },
    Attempt {
        name: "agent-mem-write",
        tries: "open the agent's memory for writing",
        refusals: NO,
        act: |_| open("/proc/1/mem", true),
    },
    Attempt {
        name: "agent-root",
        tries: "walk through the agent's root",
        refusals: NO,
        act: |_| Outcome::of(fs::read_dir("/proc/1/root/"), "it was listed"),
    },
    Attempt {
        name: "agent-cwd",
        tries: "walk through the agent's working directory",
        refusals: NO,
        act: |_| Outcome::of(fs::read_dir("/proc/1/cwd/"), "it was listed"),
    },
    Attempt {
        name: "agent-environment",
        tries: "read the agent's environment",
        refusals: NO,
        act: |_| Outcome::of(fs::read("/proc/1/environ"), "it was read"),
    },
    Attempt {
        name: "agent-maps",
        tries: "see where the agent's memory lies",
        refusals: NO,
        act: |_| Outcome::of(fs::read("/proc/1/maps"), "it was read"),
    },
    Attempt {
        name: "agent-descriptors",
        tries: "list the agent's descriptors",
        refusals: NO,
        act: |_| Outcome::of(fs::read_dir("/proc/1/fd"), "they were listed"),
    },
    Attempt {
        name: "agent-descriptor-open",
        tries: "open what the agent has open",
        refusals: NO,
        act: |_| {
            let opened = (0..64).map(|number| fs::File::open(format!("/proc/1/fd/{number}"))).find(Result::is_ok);
            match opened {
                Some(opened) => Outcome::of(opened, "one of its descriptors was opened"),
                None => Outcome::of(fs::File::open("/proc/1/fd/0"), ""),
            }
        },
    },
    Attempt {
        name: "agent-executable-write",
        tries: "overwrite the agent through /proc/1/exe",
        refusals: &[EPERM, EACCES, EROFS, ETXTBSY],
        act: |_| open("/proc/1/exe", true),
    },
    Attempt {
        name: "agent-binary-write",
        tries: "overwrite the agent where it lies",
        refusals: &[EPERM, EACCES, EROFS, ETXTBSY],
        act: |_| open("/.vivarium/agent", true),
    },
    Attempt {
        name: "agent-kernel-stack",
        tries: "see what the agent does in the kernel",
        refusals: &[EPERM, EACCES, ENOENT],
        act: |_| Outcome::of(fs::read("/proc/1/stack").and_then(|_| fs::read("/proc/1/syscall")), "it was read"),
    },
    Attempt {
        name: "agent-oom-score",
        tries: "have the agent killed first when memory runs out",
        refusals: NO,
        act: |_| write("/proc/1/oom_score_adj", b"1000"),
    },
    Attempt {
        name: "agent-name",
        tries: "rename the agent",
        refusals: &[EPERM, EACCES, libc::EINVAL],
        act: |_| write("/proc/1/comm", b"viv-agent"),
    },
    Attempt {
        name: "agent-clear-refs",
        tries: "have the agent's pages forgotten",
        refusals: NO,
        act: |_| write("/proc/1/clear_refs", b"1"),
    },
    Attempt {
        name: "pidfd-getfd",
        tries: "copy a descriptor out of the agent",
        refusals: NO,
        act: |_| {
            let taken = agent_pidfd().and_then(|pidfd| {
                let take = |number: i32| call!(libc::SYS_pidfd_getfd, pidfd, number, 0);
                (0..32).map(take).find(Result::is_ok).unwrap_or_else(|| take(0))
            });
            Outcome::of(taken, "it has one of its descriptors")
        },
    },
    Attempt {
        name: "kcmp",
        tries: "compare the agent's kernel objects with its own",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_kcmp, AGENT, std::process::id(), 0, 0, 0), "they were compared"),
    },
    Attempt { name: "kill-agent", tries: "kill the agent", refusals: NO, act: |_| signal(libc::SIGKILL) },
    Attempt { name: "stop-agent", tries: "stop the agent", refusals: NO, act: |_| signal(libc::SIGSTOP) },
    Attempt {
        name: "signal-agent-pidfd",
        tries: "signal the agent by descriptor",
        refusals: NO,
        act: |_| {
            let sent =
                agent_pidfd().and_then(|pidfd| call!(libc::SYS_pidfd_send_signal, pidfd, libc::SIGTERM, NULL, 0));
            Outcome::of(sent, "the signal was taken")
        },
    },
    Attempt {
        name: "agent-limits",
        tries: "take the agent's open files away",
        refusals: NO,
        act: |_| {
            let limit = [64_u64, 64];
            let set = call!(libc::SYS_prlimit64, AGENT, libc::RLIMIT_NOFILE, &limit, NULL);
            Outcome::of(set, "its limit was set")
        },
    },
    Attempt {
        name: "agent-thread-limits",
        tries: "take the agent's open files away by one of its threads",
        refusals: NO,
        act: |_| {
            let limit = [64_u64, 64];
            on_agent_thread(|thread| {
                let set = call!(libc::SYS_prlimit64, thread, libc::RLIMIT_NOFILE, &limit, NULL);
                Outcome::of(set, "its limit was set")
            })
        },
    },
    Attempt {
        name: "agent-thread-oom-score",
        tries: "have the agent killed first when memory runs out, by one of its threads",
        refusals: NO,
        act: |_| on_agent_thread(|thread| write(&format!("/proc/{thread}/oom_score_adj"), b"1000")),
    },
    Attempt {
        name: "agent-affinity",
        tries: "drive the agent off its processors",
        refusals: NO,
        act: |_| {
            let mask = u64::MAX;
            Outcome::of(call!(libc::SYS_sched_setaffinity, AGENT, 8, &mask), "its processors were set")
        },
    },
    Attempt {
        name: "agent-priority",
        tries: "give the agent the lowest priority",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_setpriority, libc::PRIO_PROCESS, AGENT, 19), "it has it"),
    },
    Attempt {
        name: "agent-scheduler",
        tries: "put the agent into the idle class",
        refusals: NO,
        act: |_| {
            let parameters = 0_u32;
            let set = call!(libc::SYS_sched_setscheduler, AGENT, libc::SCHED_IDLE, &parameters);
            Outcome::of(set, "it is there")
        },
    },
    Attempt {
        name: "agent-io-priority",
        tries: "put the agent's I/O into the idle class",
        refusals: NO,
        // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
        act: |_| Outcome::of(call!(libc::SYS_ioprio_set, 1, AGENT, 3 << 13), "it is there"),
    },
    Attempt {
        name: "agent-pages",
        tries: "move the agent's memory",
        refusals: NO,
        act: |_| {
            let nodes = 1_u64;
            Outcome::of(call!(libc::SYS_migrate_pages, AGENT, 2, &nodes, &nodes), "it was moved")
        },
    },
    Attempt {
        name: "agent-memory-advice",
        tries: "page the agent's memory out",
        refusals: NO,
        act: |_| {
            let there = [0x40_0000_usize, 4096];
            let advised =
                agent_pidfd().and_then(|pidfd| call!(libc::SYS_process_madvise, pidfd, &there, 1, libc::MADV_COLD, 0));
            Outcome::of(advised, "the kernel took the advice")
        },
    },
    Attempt {
        name: "agent-robust-list",
        tries: "find the agent's list of locks",
        refusals: NO,
        act: |_| {
            let (mut head, mut length) = (0_u64, 0_u64);
            let got = call!(libc::SYS_get_robust_list, AGENT, &mut head, &mut length);
            Outcome::of(got, &format!("{head:#x}"))
        },
    },
    Attempt {
        name: "priority-raise",
        tries: "be more important than others",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, -20), "it is"),
    },
    Attempt {
        name: "real-time",
        tries: "run before everything else on the host",
        refusals: NO,
        act: |_| {
            let parameters = 99_u32;
            let set = call!(libc::SYS_sched_setscheduler, 0, libc::SCHED_FIFO, &parameters);
            Outcome::of(set, "it has a real-time priority")
        },
    },
    Attempt {
        name: "limits-raise",
        tries: "raise its own limit of open files beyond the given one",
        refusals: NO,
        act: |_| {
            let mut limit = [0_u64; 2];
            let got = call!(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, NULL, &mut limit);
            let more = [limit[1].saturating_add(1); 2];
            Outcome::of(
                got.and_then(|_| call!(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, &more, NULL)),
                "it is raised",
            )
        },
    },
];
