//! Live figures of an instance, read from whichever hierarchy has them.

use std::fs;
use std::path::PathBuf;

use viv_provider::Usage;

use super::{Controller, InstanceCgroups};

impl InstanceCgroups {
    /// What it uses now. What cannot be read is left out.
    pub fn usage(&self) -> Usage {
        Usage {
            cpu_us: self.cpu_us(),
            memory_bytes: self.number(Controller::Memory, "memory.usage_in_bytes", "memory.current"),
            processes: self.number(Controller::Pids, "pids.current", "pids.current"),
            oom_last: None,
            oom_kills: self.oom_events_path().and_then(|path| keyed(path, "oom_kill")),
        }
    }

    /// The file whose `oom_kill N` line counts.
    pub fn oom_events_path(&self) -> Option<PathBuf> {
        if let Some(folder) = self.v1_folder(Controller::Memory) {
            return Some(folder.join("memory.oom_control"));
        }
        self.v2().map(|folder| folder.join("memory.events")).filter(|path| path.exists())
    }

    fn cpu_us(&self) -> Option<u64> {
        // The v2 hierarchy counts processor time even without its controller.
        if let Some(used) = self.v2().and_then(|folder| keyed(folder.join("cpu.stat"), "usage_usec")) {
            return Some(used);
        }
        let folder = self.layout.v1.iter().find(|(_, controls)| controls.contains("cpuacct"))?.0.join(&self.path);
        Some(fs::read_to_string(folder.join("cpuacct.usage")).ok()?.trim().parse::<u64>().ok()? / 1000)
    }

    fn number(&self, controller: Controller, v1: &str, v2: &str) -> Option<u64> {
        let path = match self.v1_folder(controller) {
            Some(folder) => folder.join(v1),
            None => self.v2()?.join(v2),
        };
        fs::read_to_string(path).ok()?.trim().parse().ok()
    }

    pub(super) fn v1_folder(&self, controller: Controller) -> Option<PathBuf> {
        Some(self.layout.v1_of(controller)?.join(&self.path))
    }
}

/// The number behind a key in a file of `key number` lines.
fn keyed(path: PathBuf, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}
