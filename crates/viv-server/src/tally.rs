//! Figures that nobody else keeps: totals from the journal, and what was asked of each sandbox since the daemon began.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use viv_api::resources::Operations;
use viv_core::SandboxId;
use viv_core::lifecycle::PhaseName;
use viv_core::spec::Project;
use viv_store::{Cursor, JournalFilter, Store, StoreError};

/// Lines read from the journal at once.
const PAGE: usize = 1_000;

/// Most sandboxes whose figures are remembered; when there are more, some begin again.
const REMEMBERED_MAX: usize = 10_000;

/// How many came and went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) created: u64,
    pub(crate) stopping: u64,
    pub(crate) destroyed: u64,
    pub(crate) lost: u64,
    pub(crate) failed: u64,
}

/// The figures.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    read: tokio::sync::Mutex<Read>,
    asked: Mutex<HashMap<SandboxId, Asked>>,
}

/// How far the journal was read, and what it said. It is read on demand, and each line once.
#[derive(Debug, Default)]
struct Read {
    until: Cursor,
    by_project: BTreeMap<Project, Totals>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Asked {
    operations: Operations,
    cpu: Option<(u64, u64)>,
}

impl Tally {
    /// Of a project, or of all.
    pub(crate) async fn totals(&self, store: &dyn Store, project: Option<&Project>) -> Result<Totals, StoreError> {
        let mut read = self.read.lock().await;
        loop {
            let lines = store.journal(read.until, &JournalFilter::default(), PAGE).await?;
            let Some(last) = lines.last() else { break };
            read.until = last.cursor;
            for line in &lines {
                let Some(project) = &line.line.project else { continue };
                let totals = read.by_project.entry(project.clone()).or_default();
                totals.created += u64::from(line.line.kind == "sandbox.created");
                match line.line.to.filter(|_| line.line.from.is_some()) {
                    Some(PhaseName::Stopping) => totals.stopping += 1,
                    Some(PhaseName::Stopped) => totals.destroyed += 1,
                    Some(PhaseName::Lost) => totals.lost += 1,
                    Some(PhaseName::Failed) => totals.failed += 1,
                    Some(
                        PhaseName::Provisioning
                        | PhaseName::Verifying
                        | PhaseName::Ready
                        | PhaseName::Frozen
                        | PhaseName::Hibernating
                        | PhaseName::Hibernated
                        | PhaseName::Resuming,
                    )
                    | None => {}
                }
            }
        }
        let of = read.by_project.iter().filter(|(of, _)| project.is_none_or(|project| project == *of));
        Ok(of.fold(Totals::default(), |sum, (_, one)| Totals {
            created: sum.created + one.created,
            stopping: sum.stopping + one.stopping,
            destroyed: sum.destroyed + one.destroyed,
            lost: sum.lost + one.lost,
            failed: sum.failed + one.failed,
        }))
    }

    fn of<T>(&self, sandbox: &SandboxId, change: impl FnOnce(&mut Asked) -> T) -> T {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.len() >= REMEMBERED_MAX && !asked.contains_key(sandbox) {
            let some = asked.keys().next().cloned();
            some.and_then(|some| asked.remove(&some));
        }
        change(asked.entry(sandbox.clone()).or_default())
    }

    /// A command was started in it.
    pub(crate) fn executed(&self, sandbox: &SandboxId) {
        self.of(sandbox, |asked| asked.operations.executions += 1);
    }

    /// Something was asked about its files.
    pub(crate) fn filed(&self, sandbox: &SandboxId) {
        self.of(sandbox, |asked| asked.operations.file_calls += 1);
    }

    /// What was asked of it.
    pub(crate) fn operations(&self, sandbox: &SandboxId) -> Operations {
        self.of(sandbox, |asked| asked.operations)
    }

    /// Processor use since the look before this one: 100 is one whole processor.
    pub(crate) fn cpu_percent(&self, sandbox: &SandboxId, cpu_us: u64, at_ms: u64) -> Option<f64> {
        let (cpu_before_us, before_ms) = self.of(sandbox, |asked| asked.cpu.replace((cpu_us, at_ms)))?;
        let (used_us, passed_ms) = (cpu_us.checked_sub(cpu_before_us)?, at_ms.checked_sub(before_ms)?);
        #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
        (passed_ms > 0).then(|| used_us as f64 / (passed_ms as f64 * 10.0))
    }
}
