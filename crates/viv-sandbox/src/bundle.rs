//! The OCI bundle of an instance: a standard one, so that any OCI runtime can take it.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};
use viv_agent::proto::{HOME, RUN_DIR};

use crate::cgroup::{Controller, InstanceCgroups};
use crate::layout::InstanceRecord;
use crate::rootfs::MountedRoot;

/// What PID 1 may do inside. Workloads get none of these.
///
/// - `SETUID`, `SETGID`, `SETPCAP`: to become the workload's user and to give up the rest.
/// - `KILL`: to end any workload.
/// - `DAC_OVERRIDE`, `CHOWN`, `FOWNER`, `FSETID`: files of any user, through the API.
/// - `NET_ADMIN`: to bring up the loopback interface, dropped right after.
const AGENT_CAPABILITIES: [&str; 9] = [
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_KILL",
    "CAP_DAC_OVERRIDE",
    "CAP_CHOWN",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_NET_ADMIN",
];

/// Kernel files that tell about the host or change it.
const MASKED: [&str; 11] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/firmware",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Period of the processor quota. The kernel's own default.
const CPU_PERIOD_US: u64 = 100_000;

/// Where the host's things appear on the stage.
pub(crate) struct Staged<'a> {
    pub(crate) root: &'a MountedRoot,
    pub(crate) run: &'a Path,
    pub(crate) agent: &'a Path,
}

/// Writes the bundle.
pub(crate) fn write(
    folder: &Path,
    record: &InstanceRecord,
    staged: &Staged<'_>,
    cgroups: &InstanceCgroups,
) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let config = config(record, staged, cgroups);
    fs::write(folder.join("config.json"), serde_json::to_vec_pretty(&config)?)
}

fn config(record: &InstanceRecord, staged: &Staged<'_>, cgroups: &InstanceCgroups) -> Value {
    let mapping = json!([{ "containerID": 0, "hostID": record.ids.base, "size": record.ids.count }]);
    let namespaces = ["user", "pid", "mount", "network", "ipc", "uts", "cgroup"].map(|kind| json!({ "type": kind }));
    let mut config = json!({
        "ociVersion": "1.0.2",
        "hostname": hostname(record),
        "root": { "path": staged.root.root, "readonly": false },
        "process": {
            "terminal": false,
            "user": { "uid": 0, "gid": 0 },
            "args": [format!("{HOME}/agent")],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "noNewPrivileges": true,
            "capabilities": {
                "bounding": AGENT_CAPABILITIES,
                "effective": AGENT_CAPABILITIES,
                "permitted": AGENT_CAPABILITIES,
                "inheritable": [],
                "ambient": [],
            },
        },
        "mounts": mounts(staged),
        "linux": {
            "uidMappings": mapping,
            "gidMappings": mapping,
            "namespaces": namespaces,
            "maskedPaths": MASKED,
            "readonlyPaths": READ_ONLY,
        },
    });
    if !cgroups.layout().is_empty() {
        config["linux"]["cgroupsPath"] = json!(cgroups.runtime_path());
        config["linux"]["resources"] = resources(record, cgroups);
    }
    config
}

fn hostname(record: &InstanceRecord) -> String {
    record.sandbox().as_str().replace('_', "-")
}

fn mounts(staged: &Staged<'_>) -> Vec<Value> {
    let special = |at: &str, kind: &str, options: &[&str]| json!({ "destination": at, "type": kind, "source": kind, "options": options });
    let bind = |at: &Path, source: &Path, options: &[&str]| {
        let options: Vec<_> = ["bind", "nosuid", "nodev"].iter().chain(options).collect();
        json!({ "destination": at, "type": "bind", "source": source, "options": options })
    };
    let mut mounts: Vec<_> = staged.root.binds.iter().map(|(at, source)| bind(at, source, &[])).collect();
    mounts.extend([
        special("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        special("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        special("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
        special("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        special("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        special("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        special("/run", "tmpfs", &["nosuid", "nodev", "mode=755", "size=65536k"]),
        bind(Path::new(HOME), &staged.root.home, &["ro"]),
        bind(Path::new(RUN_DIR), staged.run, &["rw", "noexec"]),
        bind(&Path::new(HOME).join("agent"), staged.agent, &["ro"]),
    ]);
    mounts
}

/// Only limits whose controller is there; the provider refuses the others before it comes to this.
fn resources(record: &InstanceRecord, cgroups: &InstanceCgroups) -> Value {
    let limits = &record.spec.limits;
    let has = |controller| cgroups.layout().has(controller);
    // Devices are bound from the host and none can be made in a user namespace, so the device controller adds nothing;
    // runtimes want to be told.
    let mut resources = json!({ "devices": [{ "allow": false, "access": "rwm" }] });
    if let Some(millis) = limits.cpu_millis.filter(|_| has(Controller::Cpu)) {
        resources["cpu"] = json!({ "period": CPU_PERIOD_US, "quota": millis.saturating_mul(CPU_PERIOD_US) / 1000 });
    }
    if let Some(bytes) = limits.memory_bytes.filter(|_| has(Controller::Memory)) {
        resources["memory"] = json!({ "limit": bytes });
    }
    if let Some(count) = limits.processes.filter(|_| has(Controller::Pids)) {
        resources["pids"] = json!({ "limit": count });
    }
    resources
}
