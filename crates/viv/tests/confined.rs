//! What of the machine is seen inside, with each runtime: devices, kernel files, shared memory (S1).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use support::Ground;
use viv_core::exec::{ExecSpec, ExecState};
use viv_provider::{Image, InstanceSpec, UNLIMITED};
use viv_sandbox::Runtime;

fn runtimes() -> [Runtime; 2] {
    [Runtime::Embedded, Runtime::Binary("runc".into())]
}

#[tokio::test]
async fn s1_devices_are_a_fixed_set() {
    for runtime in runtimes() {
        let ground = Ground::with_runtime(runtime);
        let sandbox = ground.create(Duration::from_secs(600)).await;
        let (text, _) = sandbox.run("ls /dev").await;
        // Links and mounts, and the six that are harmless. `core` is a link that some runtimes make.
        let expected = "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero";
        assert_eq!(text.split_whitespace().filter(|&name| name != "core").collect::<Vec<_>>().join(" "), expected);
        let (text, _) =
            sandbox.run("find / -xdev \\( -type b -o -type c \\); find /dev -type b; find /dev/shm /run -type c").await;
        assert_eq!(text, "", "devices elsewhere");
        for attempt in ["mknod /tmp/d c 1 3", "mknod /tmp/d c 0 0", "mknod /dev/d b 8 0"] {
            let (text, status) = sandbox.run(&format!("{attempt} 2>&1")).await;
            assert!(text.contains("Operation not permitted"), "{attempt}: {text} {status:?}");
        }
        let (_, status) = sandbox.run("mknod /tmp/p p && test -p /tmp/p").await;
        assert_eq!(status.state, ExecState::Exited { code: 0 }, "pipes are no devices");
        sandbox.destroy().await;
        ground.assert_nothing_left();
    }
}

/// Opens what it is told to: nothing in an image of ours could.
const OPENER: &str = "#include <errno.h>\n#include <fcntl.h>\n#include <stdio.h>\n#include <string.h>\n\
    int main(int n, char **v) { for (int i = 1; i < n; i++) { int fd = open(v[i], O_RDONLY | O_NONBLOCK); \
    printf(\"%s %s\\n\", v[i], fd < 0 ? strerror(errno) : \"opened\"); } return 0; }";

#[tokio::test]
async fn s1_an_image_brings_no_device_along() {
    let image = tempfile::tempdir().unwrap();
    let source = image.path().join("open.c");
    std::fs::write(&source, OPENER).unwrap();
    let made = Command::new("gcc").arg("-static").arg(&source).arg("-o").arg(image.path().join("open")).status();
    assert!(made.unwrap().success());
    std::fs::create_dir(image.path().join("dev")).unwrap();
    let nodes = [("zero", FileType::CharacterDevice, 1, 5), ("dev/mem", FileType::CharacterDevice, 1, 1)];
    for (name, kind, major, minor) in nodes {
        let path = image.path().join(name);
        mknodat(CWD, &path, kind, Mode::from_raw_mode(0o666), makedev(major, minor)).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    }
    assert!(std::fs::File::open(image.path().join("zero")).is_ok(), "it proves nothing here");
    for runtime in runtimes() {
        let ground = Ground::with_runtime(runtime);
        let path = image.path().to_string_lossy().into_owned();
        let spec = InstanceSpec { image: Image::Directory { path }, ..InstanceSpec::host(600_000) };
        let sandbox = ground.create_from(spec).await;
        let argv = ["/open", "/zero", "/dev/mem", "/dev/zero"].map(str::to_owned).to_vec();
        let execution = sandbox.start_spec(&ExecSpec { argv, ..ExecSpec::default() }).await;
        let (text, _) = sandbox.output(&execution).await;
        assert_eq!(text, "/zero Permission denied\n/dev/mem No such file or directory\n/dev/zero opened\n");
        sandbox.destroy().await;
        ground.assert_nothing_left();
    }
}

#[tokio::test]
async fn s1_kernel_files_tell_nothing() {
    let empty = "/proc/acpi /proc/asound /proc/cmdline /proc/config.gz /proc/interrupts /proc/iomem /proc/ioports \
                 /proc/kallsyms /proc/kcore /proc/key-users /proc/keys /proc/kmsg /proc/kpagecgroup /proc/kpagecount \
                 /proc/kpageflags /proc/latency_stats /proc/locks /proc/modules /proc/mtrr /proc/pagetypeinfo \
                 /proc/sched_debug /proc/scsi /proc/slabinfo /proc/softirqs /proc/timer_list /proc/timer_stats \
                 /proc/vmallocinfo /sys/dev/block /sys/devices/virtual/powercap /sys/firmware /sys/fs/selinux \
                 /sys/kernel/notes /sys/kernel/vmcoreinfo";
    for runtime in runtimes() {
        let ground = Ground::with_runtime(runtime);
        let sandbox = ground.create(Duration::from_secs(600)).await;
        let script = format!(
            "for path in {empty}; do \
               if [ -d $path ]; then [ -z \"$(ls -A $path)\" ] || echo $path; touch $path/x 2> /dev/null && echo $path/x; \
               elif [ -e $path ]; then [ \"$(head -c 64 $path | wc -c)\" = 0 ] || echo $path; fi; done"
        );
        assert_eq!(sandbox.run(&script).await.0, "", "these say something");
        // What is there is read-only, whoever it belongs to; what is covered is `/dev/null`.
        let (text, _) = sandbox
            .run("find /sys /proc/sys /proc/bus /proc/irq /proc/fs /proc/pressure -writable -exec test ! -c {} \\; -print 2> /dev/null")
            .await;
        assert_eq!(text, "");
        let (text, _) =
            sandbox.run("(echo 1 > /proc/sys/vm/drop_caches) 2>&1; (echo h > /proc/sysrq-trigger) 2>&1").await;
        assert_eq!(text.lines().count(), 2, "both are refused: {text}");
        sandbox.destroy().await;
        ground.assert_nothing_left();
    }
}

#[tokio::test]
async fn shared_memory_is_half_of_the_memory() {
    let ground = Ground::new();
    for (limit, mib) in [(300 << 20, 150), (UNLIMITED, 512)] {
        let mut spec = InstanceSpec::host(600_000);
        spec.limits.memory_bytes = Some(limit);
        let sandbox = ground.create_from(spec).await;
        let (text, _) = sandbox.run("df -B 1M --output=size /dev/shm | tail -n 1").await;
        assert_eq!(text.trim(), mib.to_string());
        sandbox.destroy().await;
    }
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_filters_are_on_with_each_runtime() {
    for runtime in runtimes() {
        let ground = Ground::with_runtime(runtime);
        let sandbox = ground.create(Duration::from_secs(600)).await;
        let status = std::fs::read_to_string(format!("/proc/{}/status", sandbox.agent_pid())).unwrap();
        let (inside, _) = sandbox.run("cat /proc/self/status").await;
        for (who, text, filters) in [("the agent", status, 1), ("a command", inside, 2)] {
            assert!(text.contains(&format!("Seccomp:\t2\nSeccomp_filters:\t{filters}\n")), "{who}: {text}");
            assert!(text.contains("NoNewPrivs:\t1\n"), "{who}: {text}");
        }
        sandbox.destroy().await;
        ground.assert_nothing_left();
    }
}
