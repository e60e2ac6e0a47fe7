//! Where there is no room, and what gives it some (O3). Commands say so, and where they cannot, since what they say has no
//! room either, it is seen.
//!
//! | what is full | what helps |
//! |---|---|
//! | its disk, up to its limit, which can be changed while it runs | twice the limit |
//! | the same, where a disk keeps its size | saved, it goes on with twice the limit |
//! | the same, and nothing of it would be saved | it is shown what takes the room |
//! | a place in memory (`/dev/shm`) | it is shown what takes the room |
//! | the machine's disk | the machine is looked at |

use viv_core::SandboxId;
use viv_core::lifecycle::Sandbox;
use viv_provider::{Capability, DiskUsage, FullPlace, InstanceRef};

use crate::diagnose::Remark;
use crate::engine::Inner;
use crate::symptom::{mib, twice};

/// What was seen of the room that a sandbox has.
#[derive(Debug, Clone, Default)]
pub(crate) struct Room {
    /// Where next to nothing more can be written.
    full: Vec<FullPlace>,
    /// What it has on disk.
    used: Option<DiskUsage>,
    /// Whether its limit of disk can be changed while it runs.
    changes_live: bool,
    /// Whether what it has is kept when it is stopped.
    persistent: bool,
    /// Where commands run, and write.
    workdir: String,
}

impl Inner {
    /// Looks where it is full; at what it has only if it is somewhere, or a command said so: that may take a while.
    pub(crate) async fn look_for_room(&self, record: &Sandbox, is_said: bool) -> Room {
        let (id, budget) = (&record.id, self.config.budgets.probe);
        let instance = InstanceRef { sandbox: id.clone(), generation: record.generation };
        let full = self.call(id, budget, self.provider.full_places(&instance)).await.unwrap_or_default();
        if full.is_empty() && !is_said {
            return Room::default();
        }
        Room {
            full,
            used: self.call(id, budget, self.provider.disk_usage(&instance)).await.ok(),
            workdir: record.spec.workdir.clone(),
            changes_live: self.provider.capabilities().can(Capability::LimitDiskLive),
            persistent: record.policy.persistent,
        }
    }
}

impl Room {
    /// A place in memory that is full, while the disk is not.
    fn memory_place(&self) -> Option<&FullPlace> {
        self.full.iter().find(|place| place.in_memory).filter(|_| self.full.iter().all(|place| place.in_memory))
    }

    /// What is full though no command says so.
    pub(crate) fn seen(&self, sandbox: &SandboxId, limit_bytes: Option<u64>) -> Option<Remark> {
        let place = self.full.first()?;
        let (why, helps) = self.remedy(sandbox, limit_bytes);
        let what = format!("nothing more can be written to {}; {why}", place.path);
        Some(Remark::of("disk_full", what, helps).from(self.evidence()))
    }

    /// The command that shows what takes the room where commands write.
    fn look_at(&self, sandbox: &SandboxId) -> String {
        // A name that a shell would read otherwise is left out.
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-".contains(letter);
        let workdir = if self.workdir.chars().all(is_plain) { self.workdir.as_str() } else { "" };
        let places: Vec<&str> = [workdir, "/tmp"].into_iter().filter(|place| !place.is_empty()).collect();
        format!("viv exec {sandbox} -- du -d 2 -m {}", places.join(" "))
    }

    /// What it was seen by.
    pub(crate) fn evidence(&self) -> Vec<String> {
        let full = self.full.iter().map(|place| {
            let kind = if place.in_memory { ", in memory" } else { "" };
            format!("{} is full: {} of {} are left{kind}", place.path, mib(place.free_bytes), mib(place.bytes))
        });
        let used = self.used.iter().map(|used| match used.limit_bytes {
            Some(limit) => format!("it has {} on disk of its own, and may have {}", mib(used.own_bytes), mib(limit)),
            None => format!("it has {} on disk of its own, and no limit", mib(used.own_bytes)),
        });
        full.chain(used).collect()
    }

    /// Why, and the command that helps.
    pub(crate) fn remedy(&self, sandbox: &SandboxId, limit_bytes: Option<u64>) -> (String, String) {
        if let Some(place) = self.memory_place() {
            let why = format!("{} is, which is in memory: what nobody needs there has to go", place.path);
            return (why, format!("viv exec {sandbox} -- du -d 2 -m {}", place.path));
        }
        match limit_bytes.filter(|bytes| *bytes > 0) {
            Some(bytes) if self.changes_live => {
                ("it may have more".to_owned(), format!("viv limits {sandbox} --disk {}", twice(bytes)))
            }
            Some(bytes) if self.persistent => {
                let why = "its disk keeps its size while it runs: what runs in it ends, its files are saved, and it \
                           goes on with more";
                (why.to_owned(), format!("viv limits {sandbox} --disk {} --restart", twice(bytes)))
            }
            Some(_) => {
                let why = "its disk keeps its size, and nothing of it is kept when it stops: make room in it, or make \
                           one that may have more";
                (why.to_owned(), self.look_at(sandbox))
            }
            None if self.full.is_empty() => ("there is room now".to_owned(), format!("viv exec {sandbox} -- df -m")),
            None => ("it has no limit: the disk of the machine is full".to_owned(), "viv doctor".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o3_what_helps_against_a_full_disk_is_what_can_be_done_there() {
        let place =
            |path: &str, in_memory| FullPlace { path: path.to_owned(), in_memory, bytes: 9 << 20, free_bytes: 0 };
        let (disk, shared) = (place("/", false), place("/dev/shm", true));
        let limit = Some(64 << 20);
        let id = SandboxId::from_bytes([1; 16]);
        // What is full, the limit, whether it can be changed while it runs, whether it is persistent.
        for (full, limit, changes_live, persistent, helps) in [
            (vec![disk.clone()], limit, true, false, format!("viv limits {id} --disk 128M")),
            (vec![disk.clone()], limit, false, true, format!("viv limits {id} --disk 128M --restart")),
            (vec![disk.clone()], limit, false, false, format!("viv exec {id} -- du -d 2 -m /workspace /tmp")),
            // Too much at once: it is not full, and would be.
            (Vec::new(), limit, true, true, format!("viv limits {id} --disk 128M")),
            (vec![shared.clone()], limit, true, true, format!("viv exec {id} -- du -d 2 -m /dev/shm")),
            (vec![shared, disk.clone()], limit, true, true, format!("viv limits {id} --disk 128M")),
            (vec![disk], None, true, true, "viv doctor".to_owned()),
            (Vec::new(), None, true, true, format!("viv exec {id} -- df -m")),
        ] {
            let room = Room { full, used: None, changes_live, persistent, workdir: "/workspace".to_owned() };
            assert_eq!(room.remedy(&id, limit).1, helps, "{room:?}");
            let seen = room.seen(&id, limit);
            assert_eq!(seen.map(|remark| remark.helps), (!room.full.is_empty()).then_some(helps), "{room:?}");
        }
    }
}
