//! What sandboxes had on this machine, as far as the diagnosis told and it can be seen from here, and what of it is
//! still there (L20). On another machine, or for a key that is not told, there is nothing to look at.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use viv_api::diagnosis::HostView;

/// How long taking apart may go on after a delete was answered.
const SOON: Duration = Duration::from_secs(20);

/// How often it is looked.
const PAUSE: Duration = Duration::from_millis(20);

/// What was there.
#[derive(Debug, Default)]
pub(super) struct Footprint {
    /// Processes with the time at which they began: a number may be another's by then (J6).
    processes: BTreeMap<u32, u64>,
    /// Cgroups, and folders of instances.
    folders: BTreeSet<PathBuf>,
}

impl Footprint {
    /// What there is of an instance now.
    pub(super) fn add(&mut self, host: &HostView) {
        let processes = host.shim_pid.into_iter().chain(host.agent_pid);
        self.processes.extend(processes.filter_map(|pid| Some((pid, began(pid)?))));
        let folders = host.cgroups.iter().chain(&host.folder).map(PathBuf::from);
        self.folders.extend(folders.filter(|folder| folder.exists()));
    }

    /// How much of it there is to look for.
    pub(super) fn len(&self) -> usize {
        self.processes.len() + self.folders.len()
    }

    /// What is still there after a while.
    pub(super) fn left(&self) -> Vec<String> {
        let until = Instant::now() + SOON;
        loop {
            let left = self.left_now();
            if left.is_empty() || Instant::now() >= until {
                return left;
            }
            thread::sleep(PAUSE);
        }
    }

    fn left_now(&self) -> Vec<String> {
        let processes = self.processes.iter().filter(|(pid, since)| began(**pid) == Some(**since));
        let mut left: Vec<String> = processes.map(|(pid, _)| format!("process {pid}")).collect();
        left.extend(self.folders.iter().filter(|folder| folder.exists()).map(|folder| folder.display().to_string()));
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let is_ours = |line: &&str| self.folders.iter().any(|folder| line.contains(&*folder.to_string_lossy()));
        left.extend(mounts.lines().filter(is_ours).map(|line| format!("mount {line}")));
        left
    }
}

/// When a process began, in the kernel's ticks, unless it has ended.
fn began(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // The state is field 3, the start is field 22.
    let started = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(started)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn l20_what_lives_is_found_and_what_is_gone_is_not() {
        let folder = std::env::temp_dir().join(format!("viv-left-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let host = HostView {
            shim_pid: Some(child.id()),
            agent_pid: None,
            root_mount: None,
            cgroups: Vec::new(),
            folder: Some(folder.to_string_lossy().into_owned()),
        };
        let mut footprint = Footprint::default();
        footprint.add(&host);
        assert_eq!((footprint.len(), footprint.left_now().len()), (2, 2));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(footprint.left_now(), [folder.display().to_string()]);
        fs::remove_dir(&folder).unwrap();
        assert!(footprint.left().is_empty());
    }
}
