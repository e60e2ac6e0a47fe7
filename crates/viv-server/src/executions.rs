//! What was asked of executions: a provider tells how one stands, and not what it was told to run.
//!
//! In memory and bounded. What is not known any more is shown with the beginning of its command, which is kept with its
//! status; that, its output and its end are the provider's and always there.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use viv_core::exec::ExecSpec;
use viv_core::{ExecutionId, SandboxId};

/// Most that are remembered; the oldest are forgotten.
const REMEMBERED_MAX: usize = 10_000;

/// Longest command that is remembered; of a longer one, the beginning.
const ARGV_BYTES_MAX: usize = 4_096;

/// What was asked for, without the environment, which is nobody's business (S6).
#[derive(Debug, Default)]
pub(crate) struct Asked {
    pub(crate) spec: ExecSpec,
    pub(crate) detach: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Executions {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    by_id: HashMap<(SandboxId, ExecutionId), Arc<Asked>>,
    order: VecDeque<(SandboxId, ExecutionId)>,
}

impl Executions {
    pub(crate) fn remember(&self, sandbox: &SandboxId, execution: &ExecutionId, spec: &ExecSpec, detach: bool) {
        let mut room = ARGV_BYTES_MAX;
        let mut fits = |word: &&String| {
            let fits = word.len() <= room;
            room = room.saturating_sub(word.len() + 1);
            fits
        };
        let argv = spec.argv.iter().take_while(&mut fits).cloned().collect();
        let spec = ExecSpec { argv, env: std::collections::BTreeMap::new(), ..spec.clone() };
        let id = (sandbox.clone(), execution.clone());
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.by_id.insert(id.clone(), Arc::new(Asked { spec, detach })).is_none() {
            known.order.push_back(id);
        }
        while known.order.len() > REMEMBERED_MAX {
            let oldest = known.order.pop_front();
            oldest.and_then(|oldest| known.by_id.remove(&oldest));
        }
    }

    pub(crate) fn asked(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Arc<Asked> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.by_id.get(&(sandbox.clone(), execution.clone())).cloned().unwrap_or_default()
    }
}
