//! The OCI bundle of an instance: a standard one, so that any OCI runtime can take it.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use serde_json::{Value, json};
use viv_agent::proto::{HOME, RUN_DIR};

use crate::cgroup::InstanceCgroups;
use crate::hardening::{EVERY_CAPABILITY, Hardening};
use crate::layout::InstanceRecord;
use crate::rootfs::{MountedRoot, RESOLV_CONF};
use crate::runtime::{Kernel, Runtime};

/// What PID 1 may do inside. Workloads get none of these.
///
/// - `SETUID`, `SETGID`, `SETPCAP`: to become the workload's user and to give up the rest.
/// - `KILL`: to end any workload.
/// - `DAC_OVERRIDE`, `CHOWN`, `FOWNER`, `FSETID`: files of any user, through the API.
/// - `NET_ADMIN`, `SYS_ADMIN`: to bring up the loopback interface and to cover the machine's boot id, dropped right
///   after, before anybody else is there.
const AGENT_CAPABILITIES: [&str; 10] = [
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_KILL",
    "CAP_DAC_OVERRIDE",
    "CAP_CHOWN",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_NET_ADMIN",
    "CAP_SYS_ADMIN",
];

/// What it may besides where ids do not keep commands from it: see processes that hide from their likes ([`HIDING`]), to
/// end them.
const GUARDED_CAPABILITIES: [&str; 1] = ["CAP_SYS_PTRACE"];

/// `/proc` shows nobody what is hidden. The agent is, and where ids do not keep commands from it that is what keeps them
/// from its files there, of which some can be written by the owner (`oom_score_adj`).
const HIDING: &str = "hidepid=1";

/// Kernel files that are empty inside: what runtimes agree on, and what else tells about the host and is of no use.
///
/// Only what is there is covered. Files are covered by `/dev/null`, folders by an empty, read-only one.
const MASKED: &[&str] = &[
    // The machine's hardware: what it is, and switches of it.
    "/proc/acpi",
    "/proc/asound",
    "/proc/scsi",
    "/proc/mtrr",
    "/sys/firmware",
    "/sys/dev/block",
    // Memory of the kernel and where things are in it. Most of these only root of the host may read, most of the time.
    "/proc/iomem",
    "/proc/ioports",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/modules",
    "/proc/pagetypeinfo",
    "/proc/slabinfo",
    "/proc/vmallocinfo",
    "/sys/kernel/notes",
    "/sys/kernel/vmcoreinfo",
    // How this very machine was built and started; a command line can hold secrets.
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/kmsg",
    // What others do, and when: enough to tell keystrokes, and to find neighbours.
    "/proc/interrupts",
    "/proc/key-users",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/locks",
    "/proc/sched_debug",
    "/proc/softirqs",
    "/proc/timer_list",
    "/proc/timer_stats",
    // Power readings tell secrets of other processes.
    "/sys/devices/virtual/powercap",
    // Policies of the host.
    "/sys/fs/selinux",
];

/// Kernel files that may be read: settings that programs look at. `/sys` as a whole is mounted like this.
const READ_ONLY: &[&str] = &[
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    // Writing makes the kernel watch, at everybody's cost.
    "/proc/pressure",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// Shared memory where no memory limit says what is much. Browsers and databases want more than the usual 64 MiB.
const SHARED_BYTES: u64 = 512 << 20;

/// The group of terminals, where there are as many groups.
const TTY_GROUP: u32 = 5;

/// Where the host's things appear on the stage.
pub(crate) struct Staged<'a> {
    pub(crate) root: &'a MountedRoot,
    pub(crate) run: &'a Path,
    pub(crate) agent: &'a Path,
    /// What names are resolved by, when there is a network.
    pub(crate) resolv_conf: Option<&'a Path>,
    /// One that is there already; otherwise the runtime makes it.
    pub(crate) user_namespace: Option<BorrowedFd<'a>>,
}

/// Writes the bundle.
pub(crate) fn write(
    folder: &Path,
    record: &InstanceRecord,
    staged: &Staged<'_>,
    cgroups: &InstanceCgroups,
) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let config = config(record, staged, cgroups)?;
    fs::write(folder.join("config.json"), serde_json::to_vec_pretty(&config)?)
}

fn config(record: &InstanceRecord, staged: &Staged<'_>, cgroups: &InstanceCgroups) -> io::Result<Value> {
    let mut namespaces =
        ["user", "pid", "mount", "network", "ipc", "uts", "cgroup"].map(|kind| json!({ "type": kind }));
    let (capabilities, masked, read_only): (Vec<&str>, &[&str], &[&str]) = match record.hardening {
        Hardening::On if is_guarded(record) => {
            ([&AGENT_CAPABILITIES[..], &GUARDED_CAPABILITIES].concat(), MASKED, READ_ONLY)
        }
        Hardening::On => (AGENT_CAPABILITIES.to_vec(), MASKED, READ_ONLY),
        Hardening::Off => (EVERY_CAPABILITY.to_vec(), &[], &[]),
    };
    let mut config = json!({
        "ociVersion": "1.0.2",
        "hostname": hostname(record),
        "root": { "path": staged.root.root, "readonly": false },
        "process": {
            "terminal": false,
            "user": { "uid": 0, "gid": 0 },
            "args": [format!("{HOME}/agent")],
            // With a home, no runtime looks for one in a file of the image, which may be anything: a pipe, or a terabyte.
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/"],
            "cwd": "/",
            "noNewPrivileges": record.hardening.is_on(),
            "capabilities": {
                "bounding": capabilities,
                "effective": capabilities,
                "permitted": capabilities,
                "inheritable": [],
                "ambient": [],
            },
        },
        "mounts": mounts(staged, record),
        "linux": {
            "maskedPaths": masked,
            "readonlyPaths": read_only,
        },
    });
    if let Some(fd) = &staged.user_namespace {
        namespaces[0]["path"] = json!(format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()));
    }
    config["linux"]["namespaces"] = json!(namespaces);
    for (key, file) in [("uidMappings", "uid_map"), ("gidMappings", "gid_map")] {
        let pieces = record.ids.mapping(file)?.into_iter();
        let pieces = pieces.map(|(id, host, size)| json!({ "containerID": id, "hostID": host, "size": size }));
        config["linux"][key] = pieces.collect();
    }
    // The embedded runtime would ask systemd for a cgroup if it had no path, and takes it well when it cannot make that
    // one; others must not be told a path that they cannot make.
    let named = record.runtime == Runtime::Embedded && cgroups.layout().delegated;
    if named || !cgroups.hidden_from_runtime() {
        config["linux"]["cgroupsPath"] = json!(cgroups.runtime_path());
    }
    if !cgroups.hidden_from_runtime() {
        config["linux"]["resources"] = resources();
    }
    Ok(config)
}

/// Whether ids do not keep commands from the agent: there is one only, which they share, or commands of root may take
/// what is not theirs.
fn is_guarded(record: &InstanceRecord) -> bool {
    record.ids.count == 1 || record.spec.packages
}

pub(crate) fn hostname(record: &InstanceRecord) -> String {
    record.sandbox().as_str().replace('_', "-")
}

fn mounts(staged: &Staged<'_>, record: &InstanceRecord) -> Vec<Value> {
    let memory_bytes = record.spec.limits.memory_bytes;
    let sys: &[&str] = match record.hardening {
        Hardening::On => &["nosuid", "noexec", "nodev", "ro"],
        Hardening::Off => &["nosuid", "noexec", "nodev"],
    };
    let special = |at: &str, kind: &str, options: &[&str]| json!({ "destination": at, "type": kind, "source": kind, "options": options });
    let bind = |at: &Path, source: &Path, options: &[&str]| {
        let options: Vec<_> = ["bind", "nosuid", "nodev"].iter().chain(options).collect();
        json!({ "destination": at, "type": "bind", "source": source, "options": options })
    };
    // It counts as memory of the sandbox, so half of that is no more than the kernel gives everybody.
    let shared = format!("size={}", memory_bytes.map_or(SHARED_BYTES, |bytes| bytes / 2));
    let mut terminals = vec!["nosuid", "noexec", "newinstance", "max=256", "ptmxmode=0666", "mode=0620"];
    if record.ids.count > TTY_GROUP {
        terminals.push("gid=5");
    }
    let mut proc = vec!["nosuid", "noexec", "nodev"];
    if is_guarded(record) && record.hardening.is_on() {
        proc.push(HIDING);
    }
    let mut mounts: Vec<_> = staged.root.binds.iter().map(|(at, source)| bind(at, source, &[])).collect();
    let tmp = staged.root.root.join("tmp");
    // gVisor puts memory over an empty `/tmp` unless it is told what goes there. Nobody inside runs yet, so what is
    // no link now stays none.
    if record.kernel == Kernel::Gvisor && fs::symlink_metadata(&tmp).is_ok_and(|found| found.is_dir()) {
        mounts.push(bind(Path::new("/tmp"), &tmp, &["rw"]));
    }
    mounts.extend([
        special("/proc", "proc", &proc),
        special("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        special("/dev/pts", "devpts", &terminals),
        special("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", &shared]),
        special("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        special("/sys", "sysfs", sys),
        special("/run", "tmpfs", &["nosuid", "nodev", "mode=755", "size=65536k"]),
        bind(Path::new(HOME), &staged.root.home, &["ro"]),
        bind(Path::new(RUN_DIR), staged.run, &["rw", "noexec"]),
        bind(&Path::new(HOME).join("agent"), staged.agent, &["ro"]),
    ]);
    mounts.extend(staged.resolv_conf.map(|source| bind(Path::new(RESOLV_CONF), source, &["ro", "noexec"])));
    mounts
}

/// Limits are not here: the shim sets them, also while it runs (`cgroup::limits`).
///
/// Devices are bound from the host and none can be made in a user namespace, so the device controller adds nothing;
/// runtimes want to be told.
fn resources() -> Value {
    json!({ "devices": [{ "allow": false, "access": "rwm" }] })
}
