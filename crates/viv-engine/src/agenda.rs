//! What is due when: one time for each sandbox at most, read only as far as it is due.

use std::collections::{BTreeSet, HashMap};

use viv_core::SandboxId;

/// Sandboxes by the time at which something is due of them.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    queue: BTreeSet<(u64, SandboxId)>,
    by_id: HashMap<SandboxId, u64>,
}

impl Agenda {
    /// Sets the time of a sandbox, in place of the one it had.
    pub(crate) fn set(&mut self, sandbox: &SandboxId, at_ms: Option<u64>) {
        if let Some(before) = self.by_id.remove(sandbox) {
            self.queue.remove(&(before, sandbox.clone()));
        }
        if let Some(at_ms) = at_ms {
            self.queue.insert((at_ms, sandbox.clone()));
            self.by_id.insert(sandbox.clone(), at_ms);
        }
    }

    /// Whether something is due of a sandbox, now or later.
    pub(crate) fn has(&self, sandbox: &SandboxId) -> bool {
        self.by_id.contains_key(sandbox)
    }

    /// The soonest time of all.
    pub(crate) fn first_ms(&self) -> Option<u64> {
        self.queue.first().map(|(at_ms, _)| *at_ms)
    }

    /// Takes out the soonest, if it is due.
    pub(crate) fn take_due(&mut self, now_ms: u64) -> Option<SandboxId> {
        if self.first_ms()? > now_ms {
            return None;
        }
        let (_, sandbox) = self.queue.pop_first()?;
        self.by_id.remove(&sandbox);
        Some(sandbox)
    }

    /// All that are due, soonest first.
    pub(crate) fn due(&self, now_ms: u64) -> Vec<SandboxId> {
        self.queue.iter().take_while(|(at_ms, _)| *at_ms <= now_ms).map(|(_, sandbox)| sandbox.clone()).collect()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }
}
