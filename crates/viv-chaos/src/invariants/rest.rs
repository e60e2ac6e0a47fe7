//! What must hold when faults have stopped, and time has passed (P3).

use viv_core::exec::ExecState;
use viv_core::execution::{Execution, Stage};
use viv_core::lifecycle::{Cause, Desired, FreezeStep, Phase};
use viv_core::snapshot::SnapshotState;
use viv_core::task::{Task, TaskState};
use viv_provider::{InstanceRef, InstanceState, Provider};

use super::{Found, Picture, holds};
use crate::at_once::at_once;
use crate::store::FaultyStore;

/// Windows of idling that have passed by when everything rests: clients stopped more than ten minutes before.
const IDLES_WITHIN_MS: u64 = 5 * 60_000;

/// Looks for idling may be late by so much.
const IDLE_SLACK_MS: u64 = 60_000;

impl Picture {
    /// Everything is where it is wanted, and really so, unless there is no room for it.
    pub(crate) fn check_rest(&self, drained: bool, room: bool) -> Found {
        for record in self.records.values() {
            // It was wanted again on its way to sleep, and others have the room that it had: it is not forgotten (L18).
            let waits = !room && matches!(record.phase, Phase::Hibernated { .. }) && record.entry.is_some();
            let at_rest = matches!(
                (&record.desired, &record.phase),
                (Desired::Running | Desired::Hibernated, Phase::Lost | Phase::Failed { work: None })
                    | (Desired::Running, Phase::Ready | Phase::Frozen { step: FreezeStep::Done })
                    | (Desired::Hibernated, Phase::Hibernated { .. })
                    | (Desired::Gone, Phase::Stopped)
            );
            holds("comes-to-rest", at_rest || waits, || {
                format!("{} is wanted {:?} and is {:?} ({:?})", record.id, record.desired, record.phase, record.cause)
            })?;
            holds("no-entry-waits", record.entry.is_none() || waits, || {
                format!("{} is {:?}, and an entry waits: {:?}", record.id, record.phase, record.entry)
            })?;
            let state = self.instances.get(&record.id).map(|(_, state)| state);
            let real = match &record.phase {
                Phase::Ready => state == Some(&InstanceState::Running),
                Phase::Frozen { .. } => state == Some(&InstanceState::Frozen),
                _ => true,
            };
            holds("rest-is-real", real, || format!("{} is {:?}, and really {state:?}", record.id, record.phase))?;
            let there = matches!(state, Some(InstanceState::Running | InstanceState::Frozen));
            // A service of it does not come back: that is known to live, and is kept for who looks into it.
            let given_up = record.cause.cause == Cause::ServiceFailed && record.desired == Desired::Running;
            holds("lost-is-not-there", record.phase != Phase::Lost || !there || given_up, || {
                format!("{} is lost ({:?}), and really {state:?}", record.id, record.cause)
            })?;
        }
        for (id, (generation, _)) in &self.instances {
            holds("no-orphans", self.records.contains_key(id), || format!("{id}@{generation}"))?;
        }
        let stray = self.strays.iter().next();
        holds("no-orphans", stray.is_none(), || format!("{stray:?} was never collected"))?;
        // While nothing new is begun, a task waits for its turn.
        let waits = |task: &Task| drained && task.state == TaskState::Queued;
        let living = self.tasks.iter().find(|task| !task.state.is_final() && !waits(task));
        holds("tasks-come-to-rest", living.is_none(), || format!("{living:?}"))?;
        let running = self.schedules.iter().find(|schedule| schedule.run.is_some());
        holds("nothing-is-at-work", running.is_none(), || format!("{running:?} is under way"))?;
        let unready = self.rows.values().find(|row| row.state != SnapshotState::Ready);
        holds("comes-to-rest", unready.is_none(), || format!("{unready:?} at rest"))?;
        let recorded: std::collections::BTreeSet<_> = self.rows.keys().cloned().collect();
        holds("rows-are-what-is-there", recorded == self.saved, || {
            format!("rows {recorded:?} and what is there {:?} differ", self.saved)
        })
    }

    /// What nobody used for its window is a rung further down, however often it was looked at: no client was there for
    /// longer than that.
    pub(crate) fn check_idle(&self, now_ms: u64) -> Found {
        for record in self.records.values() {
            let window_ms = match &record.phase {
                Phase::Ready => record.policy.idle_ms,
                Phase::Frozen { step: FreezeStep::Done } => record.policy.hibernate_ms,
                Phase::Frozen { step: FreezeStep::Freeze { .. } }
                | Phase::Provisioning { .. }
                | Phase::Verifying { .. }
                | Phase::Hibernating { .. }
                | Phase::Hibernated { .. }
                | Phase::Resuming { .. }
                | Phase::Lost
                | Phase::Failed { .. }
                | Phase::Stopping { .. }
                | Phase::Stopped => continue,
            };
            if window_ms > IDLES_WITHIN_MS || record.idle_at_ms(true).is_none() {
                continue;
            }
            let awake = record.keep_awake.values().any(|lease| lease.until_ms > now_ms);
            let fresh = record.phase_since_ms.saturating_add(window_ms + IDLE_SLACK_MS) > now_ms;
            holds("unused-goes-to-rest", awake || fresh, || {
                format!(
                    "{} has a window of {window_ms} ms, and is {:?}, last used at {}",
                    record.id, record.phase, record.active_at_ms
                )
            })?;
        }
        Ok(())
    }

    /// What was deleted has left nothing.
    pub(crate) async fn check_leftovers(&self, store: &FaultyStore) -> Found {
        for row in self.rows.values() {
            let Some(sandbox) = &row.sandbox else { continue };
            let deleted = self.records.get(sandbox).is_none_or(|record| record.deleted);
            let users = at_once(store.truth.users(&row.id, 1)).await.unwrap_or_default();
            holds("deleted-leaves-no-rows", !deleted || !users.is_empty(), || format!("{} of {sandbox}", row.id))?;
        }
        for record in self.records.values().filter(|record| record.is_over()) {
            let leases = at_once(store.truth.leases(&record.id)).await.unwrap_or_default();
            holds("gone-holds-no-lease", leases.is_empty(), || format!("{leases:?}"))?;
        }
        Ok(())
    }

    /// What is ready has its services.
    pub(crate) async fn check_services(&self, provider: &impl Provider) -> Found {
        for record in self.records.values().filter(|record| record.phase == Phase::Ready) {
            let instance = InstanceRef { sandbox: record.id.clone(), generation: record.generation };
            let runs = provider.executions(&instance).await.unwrap_or_default();
            for service in &record.spec.services {
                let run = record.services.get(&service.name);
                let status = run.and_then(|run| runs.iter().find(|status| status.id == run.execution));
                let well = status.is_some_and(|status| !status.state.is_final());
                holds("services-run", well, || format!("{}: {} is {status:?}, of {run:?}", record.id, service.name))?;
            }
        }
        Ok(())
    }

    /// What is listed as running runs (X5): the list was brought up to date when its instance went.
    pub(crate) async fn check_executions(&self, listed: &[Execution], provider: &impl Provider) -> Found {
        for row in listed {
            let Stage::Started { status, .. } = &row.stage else { continue };
            let Some(record) = self.records.get(&row.sandbox).filter(|_| status.state == ExecState::Running) else {
                continue;
            };
            let instance = InstanceRef { sandbox: record.id.clone(), generation: row.generation };
            let seen = provider.execution(&instance, &row.id).await.map(|seen| seen.state);
            let runs = matches!(seen, Ok(ExecState::Running | ExecState::Suspended));
            holds("listed-executions-run", runs && row.generation == record.generation, || {
                format!("{} of {instance} is listed as running, and is {seen:?} ({:?})", row.id, record.phase)
            })?;
        }
        Ok(())
    }
}
