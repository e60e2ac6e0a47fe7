//! What of a lane is left on the machine when all of its sandboxes are deleted: nothing may be (L20).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use viv_api::client::Client;
use viv_api::query::{ListAllExecutions, ListSandboxes, ListTasks};
use viv_api::reconcile::Reconcile;

use super::lane::Lane;

/// How long taking apart may go on in the background.
const SOON: Duration = Duration::from_secs(60);

/// Rows that say that something is still there, what an audit finds, and what a living daemon has not yet taken apart.
pub(super) fn while_it_serves(lane: &Lane, client: &Client) -> Vec<String> {
    until_none(|| {
        let mut left = folders(lane);
        match client.reconcile(&Reconcile { dry_run: true }) {
            Ok(found) if found.complete => {
                left.extend(found.items.iter().map(|item| format!("{} {}: {}", item.kind, item.what, item.why)));
            }
            Ok(_) => left.push("the listing of the provider is not complete".to_owned()),
            Err(error) => left.push(format!("the audit failed: {error}")),
        }
        let living = ListSandboxes { all: true, ..ListSandboxes::default() };
        for sandbox in client.list_all(living) {
            match sandbox {
                Ok(sandbox) if sandbox.deleted => {}
                Ok(sandbox) => left.push(format!("sandbox {} is {}", sandbox.id, sandbox.status)),
                Err(error) => left.push(format!("sandboxes cannot be listed: {error}")),
            }
        }
        for task in client.tasks_all(ListTasks::default()).flatten().filter(|task| !task.state.is_final()) {
            left.push(format!("task {} is {:?}", task.id, task.state));
        }
        for execution in client.executions_all(ListAllExecutions::default()).flatten() {
            if !execution.state.is_final() {
                left.push(format!("execution {} is {:?}", execution.id, execution.state));
            }
        }
        left
    })
}

/// Processes, cgroups, mounts in any namespace, loop devices, sockets and folders, when its daemon has ended.
pub(super) fn on_the_machine(lane: &Lane) -> Vec<String> {
    until_none(|| {
        let data = lane.data.to_string_lossy().into_owned();
        let mut left = Vec::new();
        for pid in pids().filter(|pid| *pid != std::process::id()) {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            if command.contains(&data) || cgroups.contains(&lane.cgroup_prefix) {
                left.push(format!("process {pid}: {command}"));
            }
        }
        let cgroups = viv_sandbox::cgroup::Layout::detect().ok();
        for mount in cgroups.iter().flat_map(viv_sandbox::cgroup::Layout::mounts) {
            let ours = mount.join(&lane.cgroup_prefix);
            if ours.exists() {
                left.push(format!("cgroup {}", ours.display()));
            }
        }
        for file in ["/proc/self/mountinfo", "/proc/net/unix"] {
            let text = fs::read_to_string(file).unwrap_or_default();
            left.extend(text.lines().filter(|line| line.contains(&data)).map(|line| format!("{file}: {line}")));
        }
        for device in entries(Path::new("/sys/block")) {
            let backing = fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default();
            if backing.contains(&data) {
                left.push(format!("loop device {}: {}", device.display(), backing.trim()));
            }
        }
        left.extend(in_namespaces(&data));
        left.extend(folders(lane));
        left
    })
}

/// Mounts of this folder in namespaces of others: what holds one that a sandbox had is found by that, also when nothing
/// else tells whose it was. Numbers of namespaces are given again at once, so they are not compared; one that nobody is in
/// lives by a mount of its file alone, which is among these or our own. Links are only ever made in namespaces of sandboxes
/// and of their routers, and go with these.
fn in_namespaces(data: &str) -> Vec<String> {
    let mut seen: BTreeSet<PathBuf> = fs::read_link("/proc/self/ns/mnt").into_iter().collect();
    let mut left = Vec::new();
    for pid in pids() {
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/mnt")) else { continue };
        if !seen.insert(namespace.clone()) {
            continue;
        }
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
        let ours = mounts.lines().filter(|line| line.contains(data));
        left.extend(ours.map(|line| format!("namespace {} of process {pid}: {line}", namespace.display())));
    }
    left
}

fn folders(lane: &Lane) -> Vec<String> {
    let sandboxes = lane.data.join("sandboxes");
    let all = ["instances", "trash", "layers/active", "layers/tmp", "layers/trash"];
    let found = all.iter().flat_map(|name| entries(&sandboxes.join(name))).filter(|path| !path.ends_with(".lock"));
    found.map(|path| format!("folder {}", path.display())).collect()
}

fn until_none(look: impl Fn() -> Vec<String>) -> Vec<String> {
    let until = Instant::now() + SOON;
    loop {
        let left = look();
        if left.is_empty() || Instant::now() >= until {
            return left;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn pids() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn l20_a_namespace_that_holds_a_mount_is_left() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("passed over: only root makes a namespace with a mount");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().to_string_lossy().into_owned();
        assert_eq!(in_namespaces(&data), Vec::<String>::new());
        let script = format!("mount -t tmpfs none {data} && echo mounted && exec sleep 600");
        let mut holds =
            Command::new("unshare").args(["-m", "sh", "-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(holds.stdout.take().unwrap()).read_line(&mut said).unwrap();
        let left = in_namespaces(&data);
        holds.kill().unwrap();
        holds.wait().unwrap();
        assert_eq!(said, "mounted\n");
        assert!(left.len() == 1 && left[0].contains(&format!("of process {}", holds.id())), "{left:?}");
        assert_eq!(in_namespaces(&data), Vec::<String>::new(), "it goes with who held it");
    }
}
