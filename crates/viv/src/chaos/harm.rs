//! What is done to the processes and mounts of a sandbox, from outside and for real.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use viv_api::diagnosis::HostView;

/// How long a process that is stopped stands still: longer than a probe waits.
const STANDS_STILL: Duration = Duration::from_secs(4);

/// Where a sandbox is on this machine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Parts {
    pub(crate) shim: Option<u32>,
    pub(crate) agent: Option<u32>,
    /// The root, in the shim's mounts.
    pub(crate) root: Option<String>,
    pub(crate) cgroups: Vec<String>,
}

impl From<HostView> for Parts {
    fn from(host: HostView) -> Self {
        Self { shim: host.shim_pid, agent: host.agent_pid, root: host.root_mount, cgroups: host.cgroups }
    }
}

/// One thing that is done to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Harm {
    KillAgent,
    StopAgent,
    KillShim,
    /// The shim and the guard beside it, at once: nobody records the end.
    KillShimAndGuard,
    /// The newest process inside that is not the agent.
    KillInside,
    UnmountRoot,
}

impl Harm {
    pub(crate) const ALL: [Self; 6] =
        [Self::KillAgent, Self::StopAgent, Self::KillShim, Self::KillShimAndGuard, Self::KillInside, Self::UnmountRoot];

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::KillAgent => "agent killed",
            Self::StopAgent => "agent stopped",
            Self::KillShim => "shim killed",
            Self::KillShimAndGuard => "shim and guard killed",
            Self::KillInside => "process inside killed",
            Self::UnmountRoot => "root unmounted",
        }
    }

    /// Does it; `None` when what it is about is not there.
    pub(crate) fn done_to(self, parts: &Parts) -> Option<()> {
        match self {
            Self::KillAgent => signal(parts.agent?, Signal::KILL),
            Self::StopAgent => {
                let agent = parts.agent?;
                signal(agent, Signal::STOP)?;
                thread::sleep(STANDS_STILL);
                // Whoever took it for lost has killed it meanwhile.
                let _ = signal(agent, Signal::CONT);
                Some(())
            }
            Self::KillShim => signal(parts.shim?, Signal::KILL),
            Self::KillShimAndGuard => {
                let shim = parts.shim?;
                let guards = children(shim).into_iter().filter(|pid| Some(*pid) != parts.agent && is_ours(*pid));
                let guards: Vec<u32> = guards.collect();
                // Held still first, so that neither sees the other die.
                signal(shim, Signal::STOP)?;
                for guard in &guards {
                    let _ = signal(*guard, Signal::KILL);
                }
                signal(shim, Signal::KILL)
            }
            Self::KillInside => {
                let mut inside = Vec::new();
                for cgroup in &parts.cgroups {
                    processes(Path::new(cgroup), &mut inside);
                }
                let newest = inside.into_iter().filter(|pid| Some(*pid) != parts.agent).max()?;
                signal(newest, Signal::KILL)
            }
            Self::UnmountRoot => {
                let (shim, root) = (parts.shim?.to_string(), parts.root.as_ref()?);
                // The machine's own root is no sandbox's.
                if PathBuf::from(root).parent().is_none() || root.starts_with("/proc") {
                    return None;
                }
                let done = Command::new("nsenter").args(["-t", &shim, "-m", "umount", "-l", root]).output().ok()?;
                done.status.success().then_some(())
            }
        }
    }
}

/// `None` when it is not there.
pub(crate) fn signal(pid: u32, signal: Signal) -> Option<()> {
    let pid = Pid::from_raw(pid.cast_signed())?;
    let file = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    pidfd_send_signal(&file, signal).ok()
}

/// Whether it runs this binary.
fn is_ours(pid: u32) -> bool {
    let own = fs::read_link("/proc/self/exe").ok();
    own.is_some() && fs::read_link(format!("/proc/{pid}/exe")).ok() == own
}

fn children(of: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// All that are in a cgroup or below it.
fn processes(cgroup: &Path, found: &mut Vec<u32>) {
    let text = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    found.extend(text.lines().filter_map(|pid| pid.parse::<u32>().ok()));
    for below in fs::read_dir(cgroup).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        processes(&below.path(), found);
    }
}
