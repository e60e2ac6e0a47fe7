//! Any path to the same wish ends in the same state: what lived through a world is taken along the straight path, beside
//! one that was just made like it, and the two are compared where the path stops.

use std::time::Duration;

use viv_core::SandboxId;
use viv_core::hook::HookAction;
use viv_core::lifecycle::{EntryKind, Finding, Memory, Phase, Sandbox};
use viv_core::spec::Project;
use viv_engine::{CreateRequest, EngineError};
use viv_provider::{InstanceRef, InstanceState, Provider};

use crate::at_once::at_once;
use crate::invariants::{Found, holds};
use crate::world::{World, somebody};

/// Longer than anything takes when nothing goes wrong.
const WITHIN: Duration = Duration::from_secs(120);

/// Who idles or expires sooner than this may do so on the way.
const LIVES_MS_MIN: u64 = 75_000;

/// Most that are compared in a world.
const COMPARED_MAX: usize = 3;

/// Where the path stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Ready,
    Frozen,
    ReadyAgain,
    Stopped,
    ReadyAfterThat,
    Deleted,
}

const PATH: [Stop; 6] =
    [Stop::Ready, Stop::Frozen, Stop::ReadyAgain, Stop::Stopped, Stop::ReadyAfterThat, Stop::Deleted];

impl World<'_> {
    /// Takes some of those that are left along the straight path.
    pub(crate) async fn go_straight(&mut self) -> Found {
        // There may be no room for another one.
        if self.quota_max.is_some() {
            return Ok(());
        }
        if self.draining != Some(false) {
            if self.engine().undrain(somebody()).await.is_err() {
                return Ok(());
            }
            // From here on work is taken, also what waited for that.
            (self.draining, self.told_drained) = (Some(false), false);
            // A task has a wish of its own for what it works in.
            self.until_tasks_are_over().await;
        }
        // What began with a damaged snapshot, or would, cannot come back.
        let whole = |record: &Sandbox| !record.uses().into_iter().any(|used| self.provider.is_damaged(used));
        // What was saved with its memory in the middle of a verification goes on with what that had come to: a service
        // that was ended for being late, say.
        let settled = |record: &Sandbox| {
            !matches!(record.memory, Some(Memory::Kept { .. }))
                || record.services.values().all(|run| run.ready_at_ms.is_some())
        };
        // A service that was killed is seen to have ended when its sandbox is looked at again: after a thaw, say.
        let served = |record: &Sandbox| {
            let killed = self.known.get(&record.id).and_then(|known| known.service_killed.as_ref());
            record.services.values().all(|run| Some(&run.execution) != killed)
        };
        let all = self.picture().await.records.into_values();
        let left: Vec<Sandbox> =
            all.filter(|record| is_comparable(record) && whole(record) && settled(record) && served(record)).collect();
        for record in left.into_iter().take(COMPARED_MAX) {
            let like = CreateRequest {
                project: Project::default(),
                name: None,
                spec: record.spec.clone(),
                policy: record.policy.clone(),
                labels: record.labels.clone(),
                snapshot: None,
                by: somebody(),
                key: None,
            };
            let new = self.engine().create(like).await.map_err(|error| ("any-path-same-state", error.to_string()))?;
            for stop in PATH {
                let at_rest = stop == Stop::ReadyAfterThat && !record.policy.persistent;
                if at_rest {
                    continue;
                }
                let straight = self.at_stop(&new.view.sandbox.id, stop).await;
                let other = self.at_stop(&record.id, stop).await;
                holds("any-path-same-state", straight == other, || {
                    format!("{} at {stop:?}:\n  {other}\na new one:\n  {straight}", record.id)
                })?;
            }
        }
        Ok(())
    }

    /// Where it is when its wish was carried out, in words that are the same for the same.
    async fn at_stop(&self, id: &SandboxId, stop: Stop) -> String {
        match self.wish(id, stop).await {
            Ok(()) => {}
            Err(error) => return format!("it could not be had: {error}").replace(id.as_str(), "it"),
        }
        let Ok(Some(record)) = at_once(self.store.truth.get(id)).await else { return "no record".to_owned() };
        let instance = InstanceRef { sandbox: id.clone(), generation: record.generation };
        let seen = self.provider.truth().observe(&instance).await.map(|seen| seen.state);
        let state = match &seen {
            Ok(InstanceState::Ended(_)) => "ended".to_owned(),
            Ok(state) => state.to_string(),
            Err(error) => error.to_string(),
        };
        // An execution of a client that runs on is no difference in the sandbox.
        let runs = self.provider.truth().executions(&instance).await.unwrap_or_default();
        let services: Vec<(&str, bool)> = record
            .services
            .iter()
            .map(|(name, run)| (name.as_str(), runs.iter().any(|one| one.id == run.execution && !one.state.is_final())))
            .collect();
        let leases = at_once(self.store.truth.leases(id)).await.unwrap_or_default().len();
        let well = record.evidence.finding_for(&record.spec) == Some(Finding::Ok);
        let saved = record.saved.is_some() && matches!(record.phase, Phase::Hibernated { .. });
        format!(
            "{:?} wanted {:?} for {} · held {} deleted {} entry {} rollback {} resetting {} sealed {} saved {saved} \
             hook {:?} deadline {} · {state}, well {well}, services {services:?}, leases {leases}",
            record.phase.name(),
            record.desired,
            record.cause.cause.code(),
            record.held,
            record.deleted,
            record.entry.is_some(),
            record.rollback.is_some(),
            record.resetting,
            record.sealed.is_some(),
            record.hook,
            record.expires_at_ms.is_some(),
        )
    }

    async fn wish(&self, id: &SandboxId, stop: Stop) -> Result<(), EngineError> {
        let engine = self.engine();
        match stop {
            Stop::Ready | Stop::ReadyAgain | Stop::ReadyAfterThat => {
                engine.ensure(id, EntryKind::Ensure, somebody()).await?;
                engine.wait_ready(id, WITHIN).await?;
            }
            Stop::Frozen => {
                engine.freeze(id, somebody()).await?;
                engine.wait_settled(id, WITHIN).await?;
            }
            Stop::Stopped => {
                engine.stop(id, somebody()).await?;
                engine.wait_settled(id, WITHIN).await?;
            }
            Stop::Deleted => {
                engine.delete(id, somebody()).await?;
                engine.wait_settled(id, WITHIN).await?;
            }
        }
        Ok(())
    }
}

/// Whether nothing but wishes moves it: neither its own time, nor a service or a hook that fails.
fn is_comparable(record: &Sandbox) -> bool {
    let policy = &record.policy;
    let lives = [policy.lifetime_ms, policy.idle_ms, policy.hibernate_ms].iter().all(|ms| *ms >= LIVES_MS_MIN);
    let lasts = |argv: &[String]| argv.last().is_none_or(|last| last.parse::<u64>().is_ok_and(|s| s >= 1_000_000));
    let services = record.spec.services.iter().all(|service| lasts(&service.argv));
    let hooks = record.spec.hooks.values().all(|hook| match &hook.action {
        HookAction::Command { argv } => argv.first().is_some_and(|word| word == "echo"),
        HookAction::Webhook { .. } => false,
    });
    !record.is_over() && !record.deleted && lives && services && hooks
}
