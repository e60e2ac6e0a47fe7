//! The cgroups that somebody without rights over all of them was handed.
//!
//! systemd hands a user's services and scopes with `Delegate=yes` their own
//! cgroup; whoever is started in one may make others below it. Without that
//! there are none at all, and the end of a PID namespace is what kills.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::{Controller, Layout};

/// Where the processes go that were in the cgroup we were handed: on v2 one that hands down controllers holds none.
const OWN: &str = "viv-own";

/// What is to be had of v1, where each controller is handed over by itself.
const V1: [&str; 5] = ["blkio", "cpu", "cpuacct", "memory", "pids"];

impl Layout {
    /// What this process was handed, by its own cgroups and its mounts.
    pub(super) fn delegated() -> io::Result<Self> {
        let (mounts, own) = (fs::read_to_string("/proc/self/mountinfo")?, fs::read_to_string("/proc/self/cgroup")?);
        let mut layout = Self::own_folders(&mounts, &own);
        layout.v2 = layout.v2.filter(|folder| is_ours(folder));
        layout.v1.retain(|(folder, controls)| controls.iter().any(|name| V1.contains(&&**name)) && is_ours(folder));
        Ok(layout)
    }

    /// The folder of this process in each hierarchy, whosever it is.
    fn own_folders(mountinfo: &str, own: &str) -> Self {
        let mut layout = Self { delegated: true, ..Self::default() };
        for mount in super::layout::mounts(mountinfo) {
            let path = own.lines().find_map(|line| {
                let (_, line) = line.split_once(':')?;
                let (names, path) = line.split_once(':')?;
                let names: BTreeSet<_> = names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
                (names == mount.controls).then_some(path)
            });
            let Some(below) = path.and_then(|path| Path::new(path).strip_prefix(&mount.root).ok()) else { continue };
            let mut folder = mount.at.join(below);
            // Moved there by one of us before.
            if folder.file_name().is_some_and(|name| name == OWN) {
                folder.pop();
            }
            if mount.is_v2() {
                layout.v2.get_or_insert(folder);
            } else if !layout.v1.iter().any(|(_, known)| *known == mount.controls) {
                layout.v1.push((folder, mount.controls));
            }
        }
        layout
    }

    /// Has the v2 cgroup that we were handed hand its controllers down, for which no process may be in it. What does not
    /// work is not there for limits, and [`Layout::why_not`] says so.
    pub(crate) fn settle(&self) {
        let Some(folder) = self.v2.as_ref().filter(|_| self.delegated) else { return };
        let wanted: Vec<_> = Controller::ALL.into_iter().filter(|controller| offers(folder, *controller)).collect();
        if wanted.iter().all(|controller| self.has(*controller)) {
            return;
        }
        let own = folder.join(OWN);
        let _ = fs::create_dir(&own);
        let _ = fs::write(own.join("cgroup.procs"), "0");
        for controller in wanted {
            let _ = fs::write(folder.join("cgroup.subtree_control"), format!("+{}", controller.name()));
        }
    }

    /// Why a controller is not to be had.
    pub fn why_not(&self, controller: Controller) -> String {
        let name = controller.name();
        match &self.v2 {
            _ if !self.delegated => format!("the {name} cgroup controller is not available"),
            Some(folder) if offers(folder, controller) => format!(
                "other processes are in the delegated cgroup {}: start viv in one of its own ({HOW})",
                folder.display()
            ),
            Some(_) => format!("the {name} controller is not delegated to you ({HOW})"),
            None => format!("no cgroup is delegated to you ({HOW})"),
        }
    }

    /// Why there is no v2 hierarchy to be had.
    pub fn why_no_v2(&self) -> String {
        if self.delegated {
            format!("no cgroup is delegated to you ({HOW})")
        } else {
            "no cgroup v2 hierarchy is mounted".to_owned()
        }
    }
}

/// How to be handed one.
pub(crate) const HOW: &str = "with systemd: `systemd-run --user --scope --property=Delegate=yes viv …`";

fn offers(folder: &Path, controller: Controller) -> bool {
    fs::read_to_string(folder.join("cgroup.controllers"))
        .is_ok_and(|names| names.split_ascii_whitespace().any(|name| name == controller.name()))
}

/// Whether cgroups can be made below one, and processes put there.
fn is_ours(folder: &Path) -> bool {
    let writable = |path: PathBuf| accessat(CWD, &path, Access::WRITE_OK, AtFlags::EACCESS).is_ok();
    writable(folder.to_owned()) && writable(folder.join("cgroup.procs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_folders_are_found_below_their_mounts() {
        let mounts = "31 30 0:27 / /cg/memory rw - cgroup cgroup rw,memory\n\
                      32 30 0:28 /outer /cg/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                      33 30 0:29 /other /cg/pids rw - cgroup cgroup rw,pids\n\
                      34 30 0:30 / /cg/unified rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let own = "4:pids:/mine\n3:cpu,cpuacct:/outer/mine\n2:memory:/mine/m\n0::/user.slice/run.scope/viv-own\n";
        let layout = Layout::own_folders(mounts, own);
        assert_eq!(layout.v2.as_deref(), Some(Path::new("/cg/unified/user.slice/run.scope")));
        assert_eq!(layout.v1_of(Controller::Memory), Some(Path::new("/cg/memory/mine/m")));
        assert_eq!(layout.v1_of(Controller::Cpu), Some(Path::new("/cg/cpu,cpuacct/mine")));
        assert_eq!(layout.v1_of(Controller::Pids), None, "it is mounted from elsewhere");
    }
}
