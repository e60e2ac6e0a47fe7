//! What the kernel does for those inside: two filters, made of the reviewed list in `seccomp/calls.txt`.
//!
//! ```text
//!   the agent's    allowlist: what workloads may, and the little more that the agent needs
//!   + workload's   takes that little away again; put on top for each execution
//! ```
//!
//! A command has both, so for it the two are one allowlist. The second is a few
//! instructions long, because the kernel reads a filter through whenever
//! it is installed, and that happens for each command. What is allowed
//! without a look at arguments costs nothing after that: the kernel remembers.
//!
//! ```text
//!   another ABI ─► killed      a number that is not listed ─► ENOSYS      listed ─► as it says there
//! ```

mod compile;
#[cfg(test)]
mod tests;

use std::io;

use viv_agent::proto::AgentConfig;

use crate::sys;

/// One instruction of a filter.
pub(crate) type Instruction = libc::sock_filter;

/// What becomes of a group's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Everybody may.
    Allow,
    /// The agent may; workloads get this errno.
    Agent(i32),
    /// Allowed elsewhere, but workloads that have the agent's own id get this errno.
    Shared(i32),
    /// Nobody may; everybody gets this errno, or 0 as if it were done.
    Answer(i32),
}

/// Calls with a common reason.
struct Group {
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests and for those who look at the tables"))]
    name: &'static str,
    kind: Kind,
    calls: &'static [Call],
}

/// A call, and which arguments it is about: all of the conditions hold.
struct Call {
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests and for those who look at the tables"))]
    name: &'static str,
    number: libc::c_long,
    rule: &'static [Condition],
}

/// A condition on an argument.
struct Condition {
    argument: u8,
    /// All 64 bits instead of the lower half.
    wide: bool,
    compare: Compare,
    value: u64,
}

enum Compare {
    Is,
    IsNot,
    Masked(u64),
}

/// The list.
#[expect(
    clippy::unnecessary_cast,
    clippy::unreadable_literal,
    reason = "generated; constants of the kernel have all types"
)]
const GROUPS: &[Group] = include!(concat!(env!("OUT_DIR"), "/calls.rs"));

/// What is put on each execution; the agent's own is on already.
pub(crate) struct Confinement {
    workload: Vec<Instruction>,
}

impl Confinement {
    /// Confines the calling thread and those that it will start, for good. To be called before there are others.
    ///
    /// `None` only if the configuration asks for that: where the kernel takes no filter, nothing is run.
    /// Where ids do not keep workloads from the agent (`is_guarded`), they may less.
    pub(crate) fn enter(config: &AgentConfig, is_guarded: bool) -> io::Result<Option<Self>> {
        if !config.confine {
            return Ok(None);
        }
        let filters = compile::filters(is_guarded, config.packages.then_some(config.keeper_id).filter(|&id| id != 0))?;
        let refused = |cause| {
            io::Error::other(format!("the kernel takes no seccomp filter, and nothing runs here without: {cause}"))
        };
        // Without it only the privileged may install one, and it is the wider promise anyway.
        rustix::thread::set_no_new_privs(true)?;
        sys::install_filter(&filters.agent).map_err(refused)?;
        let confinement = Self { workload: filters.workload };
        // The kernel has its own copy, and the making took more than all else that the agent keeps.
        drop(filters.agent);
        sys::return_memory();
        Ok(Some(confinement))
    }

    /// For [`sys::install_filter`] in a child.
    pub(crate) fn workload(&self) -> &[Instruction] {
        &self.workload
    }
}
