//! Who was killed for memory.
//!
//! The kernel counts kills for each cgroup and writes the victim's name to its
//! log. The log is looked at when the count has risen, and never otherwise:
//! when somebody asks how the instance is, or when the agent says that an
//! execution ended so. Where the log may not be read, the execution is all
//! that is known.

use viv_core::ExecutionId;
use viv_provider::OomKill;

use super::deadline::now_wall_ms;
use crate::sys::klog;

/// How much of the log is looked at. A kill's own lines are its last and a few hundred bytes long.
const LOG_BYTES_MAX: usize = 64 << 10;

/// Longest name that is passed on: the kernel keeps 15 bytes.
const NAME_CHARS_MAX: usize = 64;

/// What is known about kills so far.
#[derive(Debug, Default)]
pub(super) struct OomWatch {
    /// Kills that were looked at.
    seen: u64,
    last: Option<OomKill>,
}

impl OomWatch {
    pub(super) fn last(&self) -> Option<OomKill> {
        self.last.clone()
    }

    /// The kernel has counted this many in a cgroup.
    pub(super) fn counted(&mut self, count: u64, cgroup: &str) {
        let new = count.saturating_sub(self.seen);
        if new > 0 {
            let log = klog::tail(LOG_BYTES_MAX).unwrap_or_default();
            let process = victim(&String::from_utf8_lossy(&log), cgroup, new);
            self.last = Some(OomKill { process, pid: None, execution: None, at_ms: now_wall_ms() });
            self.seen = count;
        }
    }

    /// The agent says that an execution's first process was one of them.
    pub(super) fn told(&mut self, execution: ExecutionId, pid: Option<u32>) {
        // The count rose before the agent heard of the death, so there is one; another execution may be named already.
        match &mut self.last {
            Some(last) if last.execution.is_none() => {
                (last.execution, last.pid) = (Some(execution), pid);
            }
            Some(_) | None => {
                let at_ms = now_wall_ms();
                self.last = Some(OomKill { process: None, pid, execution: Some(execution), at_ms });
            }
        }
    }
}

/// The name of who was killed last in a cgroup; of several at once only if they have the same, since any may be meant.
///
/// The line is `oom-kill:constraint=…,task_memcg=/PATH,task=NAME,pid=N,uid=N`. A name is the process's own choice, and
/// may hold anything but a path of ours: it has 15 bytes.
fn victim(log: &str, cgroup: &str, several: u64) -> Option<String> {
    let marked = format!("/{cgroup},task=");
    let mut names = log.lines().rev().filter_map(|line| {
        let (before, after) = line.split_once(&marked)?;
        if !before.contains("oom-kill:constraint=") {
            return None;
        }
        let name = after.rsplit_once(",uid=")?.0.rsplit_once(",pid=")?.0;
        Some(name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect::<String>())
    });
    let last = names.next()?;
    names.take(usize::try_from(several - 1).unwrap_or(usize::MAX)).all(|name| name == last).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "<6>[12.5] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
         oom_memcg=/viv/sbx_1,task_memcg=/viv/sbx_1,task=one,pid=77,uid=536870912\n\
         <3>[12.6] Memory cgroup out of memory: Killed process 77 (one) total-vm:1kB\n\
         <6>[13.5] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
         oom_memcg=/a/viv/sbx_1,task_memcg=/a/viv/sbx_1,task=,pid=1,uid=0,pid=78,uid=536870912\n\
         <6>[14.5] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
         oom_memcg=/viv/sbx_2,task_memcg=/viv/sbx_2,task=other,pid=79,uid=536870912\n";

    #[test]
    fn the_last_victim_of_the_cgroup_is_named() {
        assert_eq!(victim(LOG, "viv/sbx_2", 1).as_deref(), Some("other"));
        assert_eq!(victim(LOG, "viv/sbx_1", 1).as_deref(), Some(",pid=1,uid=0"), "a name is no more than a name");
        assert_eq!(victim(LOG, "viv/sbx_1", 2), None, "either may be meant");
        assert_eq!(victim(LOG, "viv/sbx_3", 1), None);
        assert_eq!(victim("", "viv/sbx_1", 1), None);
        let twice = "oom-kill:constraint=C,task_memcg=/v/s,task=same,pid=1,uid=2\n".repeat(2);
        assert_eq!(victim(&twice, "v/s", 2).as_deref(), Some("same"));
    }

    #[test]
    fn what_the_agent_tells_goes_with_what_was_counted() {
        let mut watch = OomWatch::default();
        watch.counted(0, "no/such");
        assert_eq!(watch.last(), None);
        watch.counted(1, "no/such");
        let execution: ExecutionId = ExecutionId::from_bytes([7; 16]);
        watch.told(execution.clone(), Some(5));
        let last = watch.last().unwrap();
        assert_eq!((last.process, last.pid, last.execution), (None, Some(5), Some(execution)));
        watch.counted(1, "no/such");
        assert!(watch.last().unwrap().execution.is_some(), "it is not looked at twice");
        watch.counted(2, "no/such");
        assert_eq!(watch.last().unwrap().execution, None, "that was another");
    }
}
