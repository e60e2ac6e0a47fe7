//! Freeze first, disk later (L13): what is frozen costs memory alone, and goes to disk with it when that gets short.
//!
//! ```text
//!   how much is left ──► short? ──► frozen, with its memory to be kept, longest first ──► saved by their drivers
//! ```
//!
//! A few at a time, and then another look: how much one of them gives back is known when it has. Whatever is not frozen, or
//! would lose what runs in it, is left to the other layers of cleanup. What could not be saved is frozen as before, and left
//! alone for a while.

use std::sync::Arc;

use serde_json::json;
use viv_core::lifecycle::{Actor, Event, FreezeStep, Phase, PhaseName, Sandbox};
use viv_core::spec::Hibernate;
use viv_provider::{InstanceRef, ObstacleEffect};
use viv_store::ListQuery;

use crate::engine::{Applied, Inner};
use crate::error::EngineError;
use crate::journal;

/// Dumps are made by the disk and a processor each.
const AT_ONCE: usize = 2;

/// Records looked at; those beyond are looked at when these are saved.
const LOOKED_AT_MAX: usize = 1_000;

/// Looks at the machine's memory from time to time, where a provider knows it.
pub(crate) fn spawn(inner: &Arc<Inner>) {
    let Some(config) = inner.config.cleanup else { return };
    if inner.provider.memory_left().is_none() {
        return;
    }
    let inner = inner.clone();
    tokio::spawn(async move {
        while !inner.is_ending() {
            if let Some(left) = inner.provider.memory_left().filter(|left| *left < config.memory_below)
                && let Err(error) = inner.move_to_disk(left).await
            {
                tracing::warn!(component = "pressure", %error, "what is frozen stays in memory");
            }
            inner.pause(config.memory_period).await;
        }
    });
}

/// Who may go next, the longest frozen first, and how many of them: what is being saved already counts among those at once.
fn next(records: &[Sandbox], now_ms: u64) -> (Vec<&Sandbox>, usize) {
    let saving = records.iter().filter(|record| record.phase.name() == PhaseName::Hibernating).count();
    let mut frozen: Vec<&Sandbox> = records
        .iter()
        .filter(|record| record.phase == Phase::Frozen { step: FreezeStep::Done })
        .filter(|record| record.policy.persistent && record.policy.hibernate == Hibernate::Memory)
        .filter(|record| record.kept_frozen.is_none_or(|kept| kept.until_ms <= now_ms))
        .collect();
    frozen.sort_by_key(|record| (record.phase_since_ms, record.id.clone()));
    (frozen, AT_ONCE.saturating_sub(saving))
}

impl Inner {
    async fn move_to_disk(self: &Arc<Self>, left: f64) -> Result<(), EngineError> {
        // Where memory is not saved, it would be lost.
        if self.no_memory().is_some() {
            return Ok(());
        }
        let phases = vec![PhaseName::Frozen, PhaseName::Hibernating];
        let listed = self.store.list(&ListQuery { phases, limit: LOOKED_AT_MAX, ..ListQuery::default() }).await?;
        let (frozen, mut room) = next(&listed.items, self.clock.now_ms());
        for record in frozen {
            if room == 0 {
                break;
            }
            if !self.can_go(record).await {
                continue;
            }
            // Who is used since is thawed, and so not there.
            let event = Event::MakeRoom { by: Actor::part("cleanup") };
            if let Applied::Changed(_) = self.apply(&record.id, &event).await? {
                let why = format!("{:.0} % of the machine's memory are left", left * 100.0);
                let data = json!({ "layer": "memory", "action": "hibernate", "why": why, "outcome": "done" });
                let line = journal::noted(record, "cleanup.item", Actor::part("cleanup"), self.clock.now_ms(), data);
                self.store.append(self.epoch, vec![line]).await?;
                room -= 1;
            }
        }
        Ok(())
    }

    /// Whether nothing is known to be in the way of saving its memory. Nobody asked for what is frozen to end, so what could
    /// not be dumped, and would be lost, stays where it is.
    async fn can_go(&self, record: &Sandbox) -> bool {
        let instance = InstanceRef { sandbox: record.id.clone(), generation: record.generation };
        let asked = self.call_agent(&record.id, self.config.budgets.call, self.provider.memory_obstacles(&instance));
        let why = match asked.await {
            Ok(found) => {
                let prevents = found.into_iter().filter(|one| one.effect == ObstacleEffect::Prevents);
                let prevents: Vec<String> = prevents.map(|one| one.what).collect();
                if prevents.is_empty() {
                    return true;
                }
                prevents.join(", ")
            }
            Err(error) => error.to_string(),
        };
        tracing::debug!(component = "pressure", sandbox = %record.id, why, "it stays frozen in memory");
        false
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use viv_core::lifecycle::{KeptFrozen, Moment, NewSandbox, Timings};
    use viv_core::spec::{Policy, Project, SandboxSpec};
    use viv_core::{SandboxId, SnapshotId};

    use super::*;

    fn frozen(number: u8, since_ms: u64) -> Sandbox {
        let timings = Timings::default();
        let at = Moment { now_ms: since_ms, timings: &timings, no_memory: None };
        let policy = Policy { persistent: true, hibernate: Hibernate::Memory, ..Policy::default_for(None) };
        let new = NewSandbox {
            id: SandboxId::from_bytes([number; 16]),
            project: Project::default(),
            name: None,
            spec: SandboxSpec::default(),
            policy,
            labels: BTreeMap::new(),
            origin: None,
            by: Actor::part("test"),
        };
        Sandbox { phase: Phase::Frozen { step: FreezeStep::Done }, ..Sandbox::create(new, at) }
    }

    #[test]
    fn l13_the_longest_frozen_goes_first_and_nobody_whose_memory_is_not_kept() {
        let mut records = vec![frozen(1, 30), frozen(2, 10), frozen(3, 20), frozen(4, 5)];
        records[3].policy.hibernate = Hibernate::Filesystem;
        let at = |records: &[Sandbox], now_ms| {
            next(records, now_ms).0.iter().map(|record| record.phase_since_ms).collect::<Vec<_>>()
        };
        let ids = |records: &[Sandbox]| at(records, 1_000);
        assert_eq!((ids(&records), next(&records, 1_000).1), (vec![10, 20, 30], AT_ONCE));
        // What could not be saved has its time.
        records[1].kept_frozen = Some(KeptFrozen { since_ms: 10, failures: 1, until_ms: 1_001 });
        assert_eq!((ids(&records), at(&records, 1_001)), (vec![20, 30], vec![10, 20, 30]));
        records[1].kept_frozen = None;
        let snapshot = SnapshotId::from_bytes([9; 16]);
        records[1].phase = Phase::Hibernated { snapshot };
        assert_eq!(ids(&records), [20, 30]);
        records[2].phase = Phase::Ready;
        assert_eq!(ids(&records), [30]);
    }
}
