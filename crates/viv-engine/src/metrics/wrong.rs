//! What is wrong with those that live: read from the roster, and looked at closer where it is due.

use std::collections::BTreeMap;

use viv_core::SandboxId;
use viv_core::exec::ExecState;
use viv_core::lifecycle::Sandbox;
use viv_provider::InstanceRef;

use super::gauges::float;
use super::{Family, family};
use crate::engine::Inner;
use crate::error::EngineError;
use crate::roster::{Group, Heard, NAMED_MAX, long_at_ms, stalls_at_ms};

/// Sandboxes by the family that counts them: some of each.
pub(crate) type Whom = BTreeMap<&'static str, Vec<SandboxId>>;

impl Inner {
    /// Counts what is wrong, in proportion to what is in transition and to what is due.
    pub(super) async fn gather_wrong(&self) -> Result<Whom, EngineError> {
        self.look_at_unused().await?;
        let wrong = self.roster.wrong(self.clock.now_ms());
        let no_progress = wrong.stalled.count + wrong.silent.count;
        self.metrics.set(&family::STUCK, &["overdue"], float(wrong.overdue.count));
        self.metrics.set(&family::STUCK, &["given_up"], float(wrong.given_up.count));
        self.metrics.set(&family::STUCK, &["no_progress"], float(no_progress));
        self.metrics.set(&family::SAVE_FAILED, &[], float(wrong.save_failed.count));
        self.metrics.set(&family::KILL_FAILED, &[], float(wrong.kill_failed.count));
        let mut whom = Whom::new();
        name(&mut whom, &family::STUCK, &[&wrong.overdue, &wrong.given_up, &wrong.stalled, &wrong.silent]);
        name(&mut whom, &family::SAVE_FAILED, &[&wrong.save_failed]);
        name(&mut whom, &family::KILL_FAILED, &[&wrong.kill_failed]);
        Ok(whom)
    }

    /// Looks at those that nobody used for long, as far as something of them is due.
    async fn look_at_unused(&self) -> Result<(), EngineError> {
        for sandbox in self.roster.due_unused(self.clock.now_ms()) {
            let Some(record) = self.store.get(&sandbox).await? else { continue };
            let now_ms = self.clock.now_ms();
            if let Some(since_ms) = self.roster.look(&record, self.idle_at_ms(&record), now_ms) {
                let heard = self.what_runs(&record, now_ms).await;
                self.roster.heard(&sandbox, since_ms, heard, now_ms);
            }
        }
        Ok(())
    }

    /// Whether it runs for longer than is usual with nobody doing anything, and nothing is going to put it to rest.
    pub(crate) fn has_no_progress(&self, record: &Sandbox, now_ms: u64) -> bool {
        let Some(stuck_after_ms) = self.stuck_after_ms() else { return false };
        stalls_at_ms(record, self.idle_at_ms(record), stuck_after_ms).is_some_and(|at_ms| at_ms <= now_ms)
    }

    fn stuck_after_ms(&self) -> Option<u64> {
        self.config.alerts.as_ref().map(|alerts| alerts.stuck_after.as_millis() as u64)
    }

    /// Whether a command runs in it that nobody waits for by now, and that says nothing: it spins, or hangs.
    async fn what_runs(&self, record: &Sandbox, now_ms: u64) -> Heard {
        let Some(stuck_after_ms) = self.stuck_after_ms() else { return Heard::Nothing };
        let instance = InstanceRef { sandbox: record.id.clone(), generation: record.generation };
        let asked = self.call_agent(&record.id, self.config.budgets.probe, self.provider.executions(&instance)).await;
        let mut first_ms: Option<u64> = None;
        for one in asked.unwrap_or_default() {
            if one.state != ExecState::Running || one.detached {
                continue;
            }
            let mut silent_ms = long_at_ms(one.started_at_ms, stuck_after_ms);
            if silent_ms <= now_ms && one.output_bytes > 0 {
                let heard = self.last_words(&instance, &one).await;
                let last_ms = heard.and_then(|heard| heard.last_at_ms).unwrap_or(one.started_at_ms);
                silent_ms = long_at_ms(last_ms, stuck_after_ms);
            }
            first_ms = Some(first_ms.map_or(silent_ms, |first_ms| first_ms.min(silent_ms)));
        }
        match first_ms {
            Some(until_ms) if until_ms <= now_ms => Heard::Silence,
            Some(until_ms) => Heard::Words { until_ms },
            None => Heard::Nothing,
        }
    }
}

/// Names some of these groups, each sandbox once.
fn name(whom: &mut Whom, family: &'static Family, groups: &[&Group]) {
    let mut named: Vec<SandboxId> = Vec::new();
    for sandbox in groups.iter().flat_map(|group| &group.named) {
        if named.len() < NAMED_MAX && !named.contains(sandbox) {
            named.push(sandbox.clone());
        }
    }
    if !named.is_empty() {
        whom.insert(family.name, named);
    }
}

/// Whether a phase that should have ended by now has not.
pub(crate) fn is_overdue(record: &Sandbox, now_ms: u64) -> bool {
    record.phase.work().is_some_and(|work| work.overdue || work.deadline_at_ms < now_ms)
}
