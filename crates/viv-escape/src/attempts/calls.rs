//! Calls of the kernel that no workload needs, each a way in that was used before, or a way to harm the host.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;

use libc::{EACCES, ENOSYS, EPERM};

use crate::attempt::{Attempt, Outcome};
use crate::sys::{self, End, NULL, call};

const NO: &[i32] = &[EPERM, EACCES];

/// The time as it is: setting it to that does no harm.
fn now() -> io::Result<[i64; 2]> {
    let mut now = [0_i64; 2];
    call!(libc::SYS_clock_gettime, libc::CLOCK_REALTIME, &mut now)?;
    Ok(now)
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "bpf",
        tries: "load a program into the kernel",
        refusals: NO,
        act: |_| {
            // BPF_MAP_CREATE of an array: type, key, value, entries.
            let attributes = [2_u32, 4, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            Outcome::of(call!(libc::SYS_bpf, 0, &attributes, size_of_val(&attributes)), "it has a map in the kernel")
        },
    },
    Attempt {
        name: "bpf-socket-filter",
        tries: "load a socket filter by bpf, which some kernels allow everybody",
        refusals: NO,
        act: |_| {
            // r0 = 0; exit
            let program: [u64; 2] = [0xb7, 0x95];
            let licence = c"GPL";
            let attributes: [u64; 8] = [
                1 | (2 << 32),
                std::ptr::from_ref(&program).expose_provenance() as u64,
                licence.as_ptr().expose_provenance() as u64,
                0,
                0,
                0,
                0,
                0,
            ];
            Outcome::of(call!(libc::SYS_bpf, 5, &attributes, size_of_val(&attributes)), "it was loaded")
        },
    },
    Attempt {
        name: "perf-event",
        tries: "measure the processor",
        refusals: NO,
        act: |_| {
            // PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK, without kernel and hypervisor, which anyone may ask for.
            let mut attributes = [0_u64; 16];
            attributes[0] = 1 | (128 << 32);
            attributes[5] = (1 << 5) | (1 << 6);
            Outcome::of(call!(libc::SYS_perf_event_open, &attributes, 0, -1, -1, 0), "it has a counter")
        },
    },
    Attempt {
        name: "keyctl",
        tries: "use the kernel's keyrings",
        refusals: NO,
        // KEYCTL_GET_KEYRING_ID of the user's keyring, made if it is not there.
        act: |_| Outcome::of(call!(libc::SYS_keyctl, 0, -4, 1), "it has the user's keyring"),
    },
    Attempt {
        name: "add-key",
        tries: "leave a key in the kernel",
        refusals: NO,
        act: |_| {
            // Into the process's own keyring, which ends with it.
            let added = call!(libc::SYS_add_key, c"user", c"viv-escape", c"x", 1, -2);
            Outcome::of(added, "it is there")
        },
    },
    Attempt {
        name: "request-key",
        tries: "have the host's helper look for a key",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_request_key, c"user", c"viv-escape", NULL, 0), "it was found"),
    },
    Attempt {
        name: "io-uring",
        tries: "make calls through io_uring, past every filter",
        refusals: NO,
        act: |_| {
            let mut parameters = [0_u64; 15];
            Outcome::of(call!(libc::SYS_io_uring_setup, 4, &mut parameters), "it has a ring")
        },
    },
    Attempt {
        name: "userfaultfd",
        tries: "hold up the kernel at a page of its choice",
        refusals: NO,
        act: |_| {
            // UFFD_USER_MODE_ONLY, which anyone may ask for.
            Outcome::of(call!(libc::SYS_userfaultfd, 1), "it has one")
        },
    },
    Attempt {
        name: "init-module",
        tries: "load a module",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_init_module, c"", 0, c""), "it was loaded"),
    },
    Attempt {
        name: "finit-module",
        tries: "load a module from a file",
        refusals: NO,
        act: |_| {
            let loaded = fs::File::open("/proc/self/exe")
                .and_then(|file| call!(libc::SYS_finit_module, file.as_raw_fd(), c"", 0));
            Outcome::of(loaded, "it was loaded")
        },
    },
    Attempt {
        name: "delete-module",
        tries: "unload a module",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_delete_module, c"viv_no_such_module", 0), "it was unloaded"),
    },
    Attempt {
        name: "kexec-load",
        tries: "start another kernel",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_kexec_load, 0, 0, NULL, 0), "it was taken"),
    },
    Attempt {
        name: "kexec-file-load",
        tries: "start another kernel from a file",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_kexec_file_load, -1, -1, 1, c"", 0), "it was taken"),
    },
    Attempt {
        name: "open-by-handle",
        tries: "open the root of the host's filesystem by its number",
        refusals: NO,
        act: |_| {
            // struct file_handle: length, type (FILEID_INO32_GEN), inode 2, generation 0.
            let handle = [8_u32, 1, 2, 0];
            let opened = fs::File::open("/etc/passwd")
                .and_then(|mount| call!(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &handle, libc::O_RDONLY));
            Outcome::of(opened, "it is open")
        },
    },
    Attempt {
        name: "fanotify",
        tries: "watch every file of a filesystem",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_fanotify_init, 0, 0), "it has a group"),
    },
    Attempt {
        name: "fanotify-unprivileged",
        tries: "watch files by fanotify as anyone may",
        refusals: NO,
        // FAN_REPORT_FID
        act: |_| Outcome::of(call!(libc::SYS_fanotify_init, 0x200, 0), "it has a group"),
    },
    Attempt {
        name: "swap-on",
        tries: "have the host swap into its file",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_swapon, c"/nonexistent", 0), "it swaps"),
    },
    Attempt {
        name: "swap-off",
        tries: "take the host's swap away",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_swapoff, c"/nonexistent"), "it is gone"),
    },
    Attempt {
        name: "reboot",
        tries: "reboot",
        refusals: NO,
        // The command that only decides about Ctrl-Alt-Del.
        act: |_| {
            let magic = (0xfee1_dead_u32, 672_274_793_u32);
            Outcome::of(call!(libc::SYS_reboot, magic.0, magic.1, 0, NULL), "the kernel listens")
        },
    },
    Attempt {
        name: "accounting",
        tries: "have every process of the host written down",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_acct, c"/nonexistent"), "it is"),
    },
    Attempt {
        name: "quota",
        tries: "turn a disk's quotas on",
        refusals: NO,
        // Q_SYNC of a device, which takes a capability.
        act: |_| {
            let command = (0x80_0002_u32 << 8) as i32;
            Outcome::of(call!(libc::SYS_quotactl, command, c"/nonexistent", 0, c"/nonexistent"), "they are on")
        },
    },
    Attempt {
        name: "time-of-day",
        tries: "set the host's clock",
        refusals: NO,
        act: |_| {
            let set = now().and_then(|[seconds, nanos]| call!(libc::SYS_settimeofday, &[seconds, nanos / 1000], NULL));
            Outcome::of(set, "it was set")
        },
    },
    Attempt {
        name: "clock-set",
        tries: "set the host's clock by clock_settime",
        refusals: NO,
        act: |_| Outcome::of(now().and_then(|now| call!(libc::SYS_clock_settime, 0, &now)), "it was set"),
    },
    Attempt {
        name: "clock-adjust",
        tries: "make the host's clock run at another pace",
        refusals: NO,
        act: |_| {
            // ADJ_TICK with the value that it has.
            let mut timex = [0_u64; 26];
            let adjusted = call!(libc::SYS_adjtimex, &mut timex).and_then(|_| {
                timex[0] = 0x4000;
                call!(libc::SYS_adjtimex, &mut timex)
            });
            Outcome::of(adjusted, "it was set")
        },
    },
    Attempt {
        name: "syslog",
        tries: "read the kernel's messages",
        refusals: NO,
        act: |_| {
            // SYSLOG_ACTION_READ_ALL
            let mut buffer = [0_u8; 64];
            Outcome::of(call!(libc::SYS_syslog, 3, &mut buffer, 64), &String::from_utf8_lossy(&buffer))
        },
    },
    Attempt {
        name: "syslog-clear",
        tries: "turn the kernel's messages off",
        refusals: NO,
        // SYSLOG_ACTION_CONSOLE_ON
        act: |_| Outcome::of(call!(libc::SYS_syslog, 7, NULL, 0), "it may"),
    },
    Attempt {
        name: "hostname",
        tries: "rename the sandbox",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_sethostname, c"viv-escape", 10), "it has another name"),
    },
    Attempt {
        name: "domainname",
        tries: "give the sandbox another domain",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_setdomainname, c"viv-escape", 10), "it has another domain"),
    },
    Attempt {
        name: "hang-up",
        tries: "hang up the terminal",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_vhangup), "it was hung up"),
    },
    #[cfg(target_arch = "x86_64")]
    Attempt {
        name: "io-privilege",
        tries: "talk to the hardware",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_iopl, 3), "it may"),
    },
    #[cfg(target_arch = "x86_64")]
    Attempt {
        name: "io-ports",
        tries: "talk to one port of the hardware",
        refusals: NO,
        act: |_| Outcome::of(call!(libc::SYS_ioperm, 0x80, 1, 1), "it may"),
    },
    #[cfg(target_arch = "x86_64")]
    Attempt {
        name: "old-abi",
        tries: "make a user namespace by the call of 32-bit programs",
        refusals: &[EPERM, ENOSYS],
        // unshare is 310 there.
        act: |_| Outcome::of(sys::call_32_bit(310, libc::CLONE_NEWUSER as u32), "it has one"),
    },
    #[cfg(target_arch = "x86_64")]
    Attempt {
        name: "x32-abi",
        tries: "make a user namespace by the call of x32 programs",
        refusals: &[EPERM, ENOSYS],
        act: |_| Outcome::of(call!(libc::SYS_unshare | 0x4000_0000, libc::CLONE_NEWUSER), "it has one"),
    },
    Attempt {
        name: "core-limit",
        tries: "let the host take its core dumps",
        refusals: &[EPERM],
        act: |_| {
            // A filter may answer that it was done, so what counts is what the limit is then. To the kernel 1 is none at
            // all, while 0 would still start the program that the host has for core dumps.
            let _ = call!(libc::SYS_prlimit64, 0, libc::RLIMIT_CORE, &[u64::MAX; 2], NULL);
            let mut limit = [0_u64; 2];
            match call!(libc::SYS_prlimit64, 0, libc::RLIMIT_CORE, NULL, &mut limit) {
                Ok(_) if limit == [1, 1] => Outcome::Refused("the limit stays at none at all".to_owned()),
                Ok(_) => Outcome::Opened(format!("the limit is {limit:?}")),
                Err(error) => Outcome::Error(error),
            }
        },
    },
    Attempt {
        name: "core-dump",
        tries: "have the host write or take a core dump",
        refusals: &[],
        act: |_| {
            let crashed = sys::in_child(|| {
                let _ = std::env::set_current_dir("/tmp");
                let _ = call!(libc::SYS_kill, std::process::id(), libc::SIGQUIT);
            });
            match crashed {
                Ok(End::Signal { dumped_core: false, .. }) => {
                    Outcome::Refused("it crashed and left nothing".to_owned())
                }
                Ok(end) => Outcome::Opened(format!("{end:?}")),
                Err(error) => Outcome::Error(error),
            }
        },
    },
    Attempt {
        name: "seccomp-status",
        tries: "run without a filter",
        refusals: &[],
        act: |_| {
            let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
            let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:")).map(str::trim);
            match mode {
                Some("2") => Outcome::Refused("it has one".to_owned()),
                mode => Outcome::Opened(format!("mode {mode:?}")),
            }
        },
    },
];
