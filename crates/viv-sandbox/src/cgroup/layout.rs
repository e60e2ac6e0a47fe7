//! Which cgroup hierarchies this machine has, and where.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::ordinary::Standing;

/// A controller that limits or figures need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Controller {
    /// Share of processors.
    Cpu,
    /// Memory.
    Memory,
    /// Number of processes.
    Pids,
    /// Speed of disks.
    Io,
}

impl Controller {
    pub(crate) const ALL: [Self; 4] = [Self::Cpu, Self::Memory, Self::Pids, Self::Io];

    /// Its name in the kernel's files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Io => "io",
        }
    }

    fn v1_name(self) -> &'static str {
        match self {
            Self::Cpu | Self::Memory | Self::Pids => self.name(),
            Self::Io => "blkio",
        }
    }
}

/// Where cgroups of ours can be made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Our folder in the v2 hierarchy: its root, or what was delegated to us.
    pub v2: Option<PathBuf>,
    /// The same in the v1 hierarchies, with the names of what each controls.
    pub v1: Vec<(PathBuf, BTreeSet<String>)>,
    /// Whether these were delegated: what they are made of is not ours to change, and runtimes are told of no cgroups.
    #[serde(default)]
    pub delegated: bool,
}

/// A hierarchy that is mounted.
pub(super) struct Mount {
    /// What of it.
    pub(super) root: PathBuf,
    pub(super) at: PathBuf,
    /// Nothing for v2.
    pub(super) controls: BTreeSet<String>,
}

impl Mount {
    pub(super) fn is_v2(&self) -> bool {
        self.controls.is_empty()
    }
}

/// All that are mounted.
pub(super) fn mounts(mountinfo: &str) -> impl Iterator<Item = Mount> {
    mountinfo.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let (root, at) = (before.next()?.into(), before.next()?.into());
        let mut after = after.split(' ');
        let (kind, options) = (after.next(), after.nth(1).unwrap_or_default());
        let controls = match kind {
            Some("cgroup2") => BTreeSet::new(),
            Some("cgroup") => options
                .split(',')
                .filter(|option| !matches!(*option, "rw" | "ro" | "xattr" | "clone_children" | "noprefix"))
                .filter(|option| !option.starts_with("release_agent="))
                .map(str::to_owned)
                .collect(),
            Some(_) | None => return None,
        };
        Some(Mount { root, at, controls })
    })
}

impl Layout {
    /// Looks at this process's mounts, and at what was delegated to it where it is not root of the machine.
    pub fn detect() -> io::Result<Self> {
        match Standing::of_this_process()? {
            Standing::Root => Ok(Self::from_mountinfo(&fs::read_to_string("/proc/self/mountinfo")?)),
            Standing::Mapped { .. } | Standing::Ordinary => Self::delegated(),
        }
    }

    /// The first mount of each hierarchy counts.
    fn from_mountinfo(mountinfo: &str) -> Self {
        let mut layout = Self::default();
        for mount in mounts(mountinfo) {
            if mount.is_v2() {
                layout.v2.get_or_insert(mount.at);
            } else if !layout.v1.iter().any(|(_, known)| *known == mount.controls) {
                layout.v1.push((mount.at, mount.controls));
            }
        }
        layout
    }

    /// Whether there is no hierarchy at all.
    pub fn is_empty(&self) -> bool {
        self.v2.is_none() && self.v1.is_empty()
    }

    /// All hierarchies.
    pub fn mounts(&self) -> impl Iterator<Item = &Path> {
        self.v2.iter().map(PathBuf::as_path).chain(self.v1.iter().map(|(mount, _)| mount.as_path()))
    }

    /// The v1 hierarchy that has a controller.
    pub fn v1_of(&self, controller: Controller) -> Option<&Path> {
        self.v1.iter().find(|(_, controls)| controls.contains(controller.v1_name())).map(|(mount, _)| mount.as_path())
    }

    /// Whether v2 has a controller.
    pub fn v2_has(&self, controller: Controller) -> bool {
        // Of the root all are handed down when they are needed; what is delegated hands down what it can at once.
        let file = if self.delegated { "cgroup.subtree_control" } else { "cgroup.controllers" };
        self.v2.as_ref().is_some_and(|mount| {
            fs::read_to_string(mount.join(file))
                .is_ok_and(|names| names.split_ascii_whitespace().any(|name| name == controller.name()))
        })
    }

    /// Whether a controller is to be had at all.
    pub fn has(&self, controller: Controller) -> bool {
        self.v1_of(controller).is_some() || self.v2_has(controller)
    }

    /// Hands the v2 controllers down to a cgroup. One that cannot be handed
    /// down is not there for the limits either, which then fail aloud.
    pub(super) fn enable_v2_controllers(&self, path: &str) {
        let Some(mount) = &self.v2 else { return };
        let mut above: Vec<_> = Path::new(path).ancestors().skip(1).collect();
        above.reverse();
        for folder in above {
            for controller in Controller::ALL.into_iter().filter(|&controller| self.v2_has(controller)) {
                let _ = fs::write(mount.join(folder).join("cgroup.subtree_control"), format!("+{}", controller.name()));
            }
        }
    }

    /// A v1 cpuset takes no process before it knows its processors and memory nodes.
    pub(super) fn seed_cpuset(mount: &Path, path: &str) -> io::Result<()> {
        let mut folders: Vec<_> = Path::new(path).ancestors().collect();
        folders.reverse();
        for file in ["cpuset.cpus", "cpuset.mems"] {
            for folder in folders.iter().filter(|folder| !folder.as_os_str().is_empty()) {
                let folder = mount.join(folder);
                if fs::read_to_string(folder.join(file))?.trim().is_empty() {
                    let above = folder.parent().expect("below the mount");
                    fs::write(folder.join(file), fs::read_to_string(above.join(file))?.trim())?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_and_pure_layouts_are_told_apart() {
        let hybrid = Layout::from_mountinfo(
            "30 20 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
             31 30 0:27 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
             32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
             33 30 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/x,name=systemd\n\
             34 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n\
             35 30 0:27 / /somewhere/else rw - cgroup cgroup rw,memory\n",
        );
        assert_eq!(hybrid.v2.as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(hybrid.v1.len(), 3);
        assert_eq!(hybrid.v1_of(Controller::Memory), Some(Path::new("/sys/fs/cgroup/memory")));
        assert_eq!(hybrid.v1_of(Controller::Cpu), Some(Path::new("/sys/fs/cgroup/cpu,cpuacct")));
        assert_eq!(hybrid.v1_of(Controller::Pids), None);

        let pure = Layout::from_mountinfo("30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
        assert_eq!(pure, Layout { v2: Some(PathBuf::from("/sys/fs/cgroup")), ..Layout::default() });
    }
}
