//! Everything that is known of one sandbox, apart and together (T8), with what it means in words.

use std::collections::BTreeSet;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use viv_core::TaskId;
use viv_core::exec::{ExecState, ExecStatus, OutputEvent};
use viv_core::hook::HookAction;
use viv_core::lifecycle::{Cause, Finding, HibernateStep, Phase, Sandbox, Status};
use viv_core::snapshot::{Snapshot, SnapshotKind, SnapshotState};
use viv_core::spec::Project;
use viv_provider::{InstanceRef, InstanceState, Observation, Whereabouts};
use viv_store::Lease;

use crate::breaker::destination;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::read::{View, Which, has_instance};
use crate::symptom::{DISK_FULL, Inside, Look, Output, is_said, symptoms};

/// Snapshots that are told one by one; the others are counted.
const SNAPSHOTS_TOLD: usize = 10;

/// The longest that somebody is looked at.
pub(crate) const SAMPLE_MAX: Duration = Duration::from_secs(10);

/// Looks in a sample.
const LOOKS: u32 = 5;

/// Commands whose last words are read: the newest, and those that run.
const OUTPUTS_READ: usize = 8;

/// How much of the end of an output is read.
const TAIL_BYTES: u64 = 8 << 10;

/// Everything that is known of one sandbox.
#[derive(Debug, Clone)]
pub struct Diagnosis {
    /// How it is.
    pub view: View,
    /// The task that is at work in it.
    pub task: Option<TaskId>,
    /// What the provider says right now; an error in words when it did not.
    pub provider: Result<Observation, String>,
    /// The latest state that was saved by itself, or gone back to.
    pub auto_saved: Option<Snapshot>,
    /// The snapshots that were asked for.
    pub kept: Kept,
    /// Its locks (L15).
    pub locks: Vec<Lease>,
    /// Where its parts are on the host.
    pub whereabouts: Option<Whereabouts>,
    /// When each client last looked.
    pub reads: Vec<(String, u64)>,
    /// What that means, and what helps.
    pub remarks: Vec<Remark>,
}

/// The snapshots of a sandbox that somebody asked for, and that are there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    /// The newest of them, newest first.
    pub newest: Vec<Snapshot>,
    /// How many there are.
    pub count: u64,
    /// What they hold beyond their images, as it was seen last; what they share is counted with each.
    pub size_bytes: u64,
}

/// One thing that is worth saying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    /// A stable word.
    pub code: &'static str,
    /// In words.
    pub what: String,
    /// What it was seen by.
    pub evidence: Vec<String>,
    /// A command that helps, as it can be run; whatever else there is to say is in words.
    pub helps: String,
}

impl Remark {
    pub(crate) fn of(code: &'static str, what: String, helps: String) -> Self {
        Self { code, what, evidence: Vec::new(), helps }
    }

    /// With what it was seen by.
    pub(crate) fn from(self, evidence: Vec<String>) -> Self {
        Self { evidence, ..self }
    }
}

impl Engine {
    /// Looks at everything. A read: it changes nothing but what is found changed (T9).
    pub async fn diagnose(&self, project: &Project, which: &Which) -> Result<Diagnosis, EngineError> {
        self.diagnose_over(project, which, Duration::ZERO).await
    }

    /// The same, and looks at what goes on inside for so long: what changes says more than what is.
    pub async fn diagnose_over(
        &self,
        project: &Project,
        which: &Which,
        sample: Duration,
    ) -> Result<Diagnosis, EngineError> {
        let inner = &self.inner;
        let sandbox = inner.find(project, which).await?;
        let locks = inner.store.leases(&sandbox.id).await?;
        let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        let budget = inner.config.budgets.probe;
        let provider = inner.call(&sandbox.id, budget, inner.provider.observe(&instance)).await;
        let provider = provider.map_err(|error| crate::effect::in_words(&error));
        let whereabouts = if has_instance(&sandbox) {
            inner.call(&sandbox.id, budget, inner.provider.whereabouts(&instance)).await.ok()
        } else {
            None
        };
        let (auto_saved, kept) = inner.saved_states(&sandbox).await?;
        let reads = inner.knowledge.reads(&sandbox.id);
        let task = self.tasks_at_work(slice::from_ref(&sandbox.id)).await?.into_values().next();
        let view = inner.view(sandbox);
        let mut remarks = remarks(&view, whereabouts.as_ref(), provider.as_ref().ok());
        if view.sandbox.phase == Phase::Ready && !sample.is_zero() {
            let seen = inner.look_inside(&view.sandbox, sample.min(SAMPLE_MAX)).await;
            remarks.extend(seen.iter().flat_map(symptoms));
        }
        if inner.has_no_progress(&view.sandbox, view.now_ms) {
            remarks.push(stuck_without_progress(&view));
        }
        remarks.extend(inner.left_alone(&view.sandbox));
        Ok(Diagnosis { view, task, provider, auto_saved, kept, locks, whereabouts, reads, remarks })
    }
}

impl Inner {
    /// Whom its hooks go to and who is left alone for a while (J7).
    fn left_alone(&self, sandbox: &Sandbox) -> Vec<Remark> {
        let open = self.outside.status(self.clock.now_ms()).into_iter().filter(|breaker| breaker.open);
        let to = sandbox.spec.hooks.values().filter_map(|hook| match &hook.action {
            HookAction::Webhook { url, .. } => Some(destination(url)),
            HookAction::Command { .. } => None,
        });
        let to: BTreeSet<String> = to.collect();
        let about = open.filter(|breaker| to.contains(&breaker.destination)).map(|breaker| Remark {
            code: "webhook_left_alone",
            evidence: vec![format!("{} failures in a row", breaker.failures)],
            what: format!(
                "{} failed {} times in a row, and is asked again later",
                breaker.destination, breaker.failures
            ),
            helps: format!("viv timeline {}", sandbox.id),
        });
        about.collect()
    }

    /// What was saved of it: by itself, and because somebody asked.
    async fn saved_states(self: &Arc<Self>, sandbox: &Sandbox) -> Result<(Option<Snapshot>, Kept), EngineError> {
        let auto_saved = match &sandbox.saved {
            Some(saved) => {
                self.refresh_snapshot(saved).await;
                self.store.snapshot(saved).await?
            }
            None => None,
        };
        let mut newest = self.rows_of(&sandbox.id).await?;
        newest.retain(|row| row.kind == SnapshotKind::Manual && row.state == SnapshotState::Ready);
        let count = newest.len() as u64;
        let size_bytes = newest.iter().filter_map(|row| row.seen.as_ref()).map(|seen| seen.size_bytes).sum();
        newest.truncate(SNAPSHOTS_TOLD);
        Ok((auto_saved, Kept { newest, count, size_bytes }))
    }
}

fn remarks(view: &View, whereabouts: Option<&Whereabouts>, seen: Option<&Observation>) -> Vec<Remark> {
    let id = &view.sandbox.id;
    let mut remarks = Vec::new();
    let mut say = |code, what: String, helps: String| remarks.push(Remark::of(code, what, helps).from(known(view)));
    let message = view.sandbox.cause.message.clone().unwrap_or_default();
    if view.status == Status::Unverified {
        let age = match (view.evidence.at_ms(), view.evidence.age_ms(view.now_ms)) {
            (None, _) => "it was not probed since the daemon began".to_owned(),
            (Some(_), None) => "the last probe was before the clock was set back".to_owned(),
            (Some(_), Some(age_ms)) => format!("the last probe was {} s ago", age_ms / 1000),
        };
        say("unverified", age, format!("viv show --verify {id}"));
    }
    match view.evidence.finding() {
        Some(Finding::Unhealthy) => {
            let what = view.evidence.complaint().unwrap_or_default();
            let is_mount = view.evidence.filesystem.as_ref().is_some_and(|check| check.finding == Finding::Unhealthy);
            if is_mount {
                let what =
                    format!("its filesystem is not what it should be: {what}; once stopped, it can be made anew");
                say("broken_mount", what, format!("viv stop {id}"));
            } else {
                say("unhealthy", format!("a probe got a wrong answer: {what}"), format!("viv logs {id}"));
            }
        }
        Some(Finding::Timeout) => {
            let what =
                "a probe got no answer: the agent hangs, is stopped or frozen; if it stays so, stop it".to_owned();
            say("no_answer", what, format!("viv show --verify {id}"));
        }
        Some(Finding::Gone | Finding::Ok) | None => {}
    }
    // A supervisor that does not get to it has not told of the end: then nobody says how it is, and the process is gone.
    let may_run = seen.is_none_or(|seen| matches!(seen.state, InstanceState::Running));
    if may_run && whereabouts.is_some_and(|parts| parts.supervisor_pid.is_some() && parts.agent_pid.is_none()) {
        // Whoever wants it might still be told that it was well a moment ago.
        let (then, helps) = if view.sandbox.policy.persistent {
            ("stopped, its files are saved, and it goes on when somebody wants it", format!("viv stop {id}"))
        } else {
            ("once that was verified, whoever wants it gets a new instance", format!("viv show --verify {id}"))
        };
        say("agent_dead", format!("the agent inside is dead, and nobody told of it; {then}"), helps);
    }
    if crate::metrics::is_overdue(&view.sandbox, view.now_ms) {
        let what = format!("{} takes longer than it may: {message}", view.sandbox.phase.name().as_str());
        say("overdue", what, goes_on(&view.sandbox));
    }
    match &view.sandbox.phase {
        Phase::Lost => {
            let cause = view.sandbox.cause.cause.code();
            let what = format!(
                "its instance ended or cannot be reached: {cause} {message}; a new one is made when somebody wants it"
            );
            say("lost", what, format!("viv ensure {id}"));
        }
        Phase::Failed { .. } => {
            let what = format!("it could not be brought up: {} {message}", view.sandbox.cause.cause.code());
            say("failed", what, goes_on(&view.sandbox));
        }
        Phase::Hibernating { save_failed: true, .. } => {
            let what = format!(
                "it could not be saved, and waits with its files kept: {message}; make room and try again, or give up \
                 what was not saved with `viv stop --discard {id}`"
            );
            say("save_failed", what, format!("viv stop --retry {id}"));
        }
        Phase::Stopping { .. } if view.sandbox.cause.cause == Cause::KillFailed => {
            let what = format!("it was to end, and is still there: {message}; that is tried again and again");
            say("kill_failed", what, goes_on(&view.sandbox));
        }
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { save_failed: false, .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => {}
    }
    remarks
}

/// What brings it on from where it is late or over: each waits, and says whether that helped.
fn goes_on(record: &Sandbox) -> String {
    let id = &record.id;
    match &record.phase {
        // Not after its pause, but now.
        Phase::Hibernating { step: HibernateStep::Save, .. } => format!("viv stop --retry {id}"),
        // Nobody runs what is deleted, and that is asked for once more.
        Phase::Stopping { .. } if record.deleted => format!("viv rm {id}"),
        Phase::Hibernating { step: HibernateStep::Clear, .. } | Phase::Stopping { .. } => format!("viv stop {id}"),
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopped => format!("viv ensure {id}"),
    }
}

/// What is known of it anyway, as evidence.
fn known(view: &View) -> Vec<String> {
    let phase_s = view.now_ms.saturating_sub(view.sandbox.phase_since_ms) / 1000;
    let mut known = vec![format!("{} for {phase_s} s", view.sandbox.phase.name().as_str())];
    let checks = [("exec", &view.evidence.exec), ("filesystem", &view.evidence.filesystem)];
    for (name, check) in checks.iter().filter_map(|(name, check)| Some((name, check.as_ref()?))) {
        let age_s = view.now_ms.saturating_sub(check.at_ms) / 1000;
        let said = check.message.as_ref().map_or_else(String::new, |said| format!(": {said}"));
        known.push(format!("{name} probe {age_s} s ago{said}"));
    }
    known.extend(view.observed.iter().map(|seen| format!("the provider said {} ({})", seen.state, seen.via)));
    known
}

fn stuck_without_progress(view: &View) -> Remark {
    let idle_s = view.now_ms.saturating_sub(view.sandbox.active_at_ms) / 1000;
    let what = format!("it is ready, and nobody did anything with it for {idle_s} s");
    Remark::of("no_progress", what, format!("viv stop {}", view.sandbox.id)).from(known(view))
}

impl Inner {
    /// What goes on inside, looked at several times. Nothing when it cannot be looked at: others say why.
    async fn look_inside(&self, record: &Sandbox, sample: Duration) -> Option<Inside> {
        let (id, budget) = (&record.id, self.config.budgets.probe);
        let instance = InstanceRef { sandbox: id.clone(), generation: record.generation };
        let mut looks = Vec::new();
        let mut limits = None;
        for at in 0..LOOKS {
            if at > 0 {
                self.pause(sample / (LOOKS - 1)).await;
            }
            let seen = self.call(id, budget, self.provider.observe(&instance)).await.ok()?;
            // By the clock that was looked at with the figures.
            let mut look =
                Look { at_ms: self.clock.now_ms(), usage: seen.usage.unwrap_or_default(), ..Look::default() };
            limits = seen.limits;
            look.processes = self.call(id, budget, self.provider.processes(&instance)).await.unwrap_or_default();
            look.executions = self.call_agent(id, budget, self.provider.executions(&instance)).await.ok()?;
            // They are told in the order of their ids, which says nothing.
            look.executions.sort_by_key(|one| one.started_at_ms);
            looks.push(look);
        }
        let mut outputs = Vec::new();
        let executions = &looks.last()?.executions;
        let newest = executions.iter().rev().take(OUTPUTS_READ / 2);
        let running = executions.iter().filter(|one| one.state == ExecState::Running).take(OUTPUTS_READ / 2);
        let mut read = BTreeSet::new();
        for one in newest.chain(running) {
            if one.output_bytes > 0 && read.insert(one.id.clone()) {
                outputs.extend(self.last_words(&instance, one).await);
            }
        }
        let room = self.look_for_room(record, is_said(&outputs, DISK_FULL)).await;
        let (sandbox, limits) = (id.clone(), limits.unwrap_or_default());
        Some(Inside { sandbox, active_at_ms: record.active_at_ms, looks, limits, outputs, room })
    }

    /// The end of what a command wrote, and when it did.
    pub(crate) async fn last_words(&self, instance: &InstanceRef, one: &ExecStatus) -> Option<Output> {
        let offset = one.output_bytes.saturating_sub(TAIL_BYTES);
        let reading = async {
            let mut stream = self.provider.attach(instance, &one.id, offset, false).await?;
            let (mut tail, mut last_at_ms) = (Vec::new(), None);
            while let Some(event) = stream.next().await? {
                match event {
                    OutputEvent::Chunk { data, at_ms, .. } => {
                        tail.extend(data);
                        last_at_ms = Some(at_ms);
                    }
                    OutputEvent::Cut { .. } => {}
                    OutputEvent::End(_) => break,
                }
            }
            Ok((tail, last_at_ms))
        };
        let (tail, last_at_ms) = self.call_agent(&instance.sandbox, self.config.budgets.probe, reading).await.ok()?;
        let tail = String::from_utf8_lossy(&tail).into_owned();
        Some(Output { execution: one.id.clone(), last_at_ms, tail })
    }
}
