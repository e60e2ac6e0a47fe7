//! Services and hooks inside a verification: what is started, started again, or given up (L14, T2).
//!
//! ```text
//!   made, or a finding ──► services ──► hook ──► probe ──► ready
//!                            │  ▲
//!                    (ended) └──┘ in bounds, else: lost if it worked before, else failed
//! ```

use super::draft::Draft;
use super::{Happened, Ignored, Stepped};
use crate::hook::{HookPoint, HookReport, OnFailure};
use crate::lifecycle::cause::{Actor, Cause};
use crate::lifecycle::evidence::{Check, Finding, ServiceCheck};
use crate::lifecycle::phase::{Phase, VerifyStep, Work};
use crate::service::{
    RESTART_BACKOFF_MS_MAX, RESTARTS_FORGOTTEN_MS, RestartPolicy, ServiceFound, ServiceReport, ServiceRun, ServiceSpec,
};

/// A service that comes and goes is not asked more often than this.
const LOOKED_AT_AGAIN_MS: u64 = 500;

impl Draft<'_> {
    /// A new instance is there: its services are to be started, and the hook of this moment performed.
    pub(super) fn begin_services(&mut self, made_from: HookPoint) {
        let is_resumed = made_from == HookPoint::AfterResume;
        let (id, generation, now_ms) = (self.next.id.clone(), self.next.generation, self.at.now_ms);
        let mut runs = std::collections::BTreeMap::new();
        for (index, service) in self.next.spec.services.iter().enumerate() {
            let before = self.next.services.get(&service.name);
            let mut run = ServiceRun::first(&id, generation, index, before, now_ms);
            run.nudge = is_resumed && service.nudge.is_some();
            runs.insert(service.name.clone(), run);
        }
        self.next.services = runs;
        self.next.hook = self.next.spec.hooks.contains_key(&made_from).then_some(made_from);
    }

    /// The instance began with memory: its services run on as the executions that they were, and those that asked for it
    /// are nudged.
    pub(super) fn services_go_on(&mut self) {
        let before = std::mem::take(&mut self.next.services);
        self.begin_services(HookPoint::AfterResume);
        let generation = self.next.generation;
        for (name, run) in before {
            if let Some(new) = self.next.services.get_mut(&name).filter(|_| run.ended.is_none()) {
                *new = ServiceRun { generation, nudge: new.nudge, ..run };
            }
        }
    }

    /// What a verification begins with once the instance runs.
    pub(super) fn first_check(&self) -> VerifyStep {
        match (self.next.spec.services.is_empty(), self.next.hook) {
            (false, _) => VerifyStep::Services,
            (true, Some(_)) => VerifyStep::Hook,
            (true, None) => VerifyStep::Probe,
        }
    }

    /// How long a verification may take, services and hooks included.
    pub(super) fn verify_limit_ms(&self) -> u64 {
        let services_ms = self.next.spec.services.iter().map(ServiceSpec::wait_ms).max().unwrap_or(0);
        let hook = self.next.hook.and_then(|point| self.next.spec.hooks.get(&point));
        let waits_ms = services_ms.saturating_add(hook.map_or(0, |hook| hook.deadline_ms));
        self.at.timings.verify_ms.saturating_add(waits_ms)
    }

    /// From now on services have their time to become ready.
    pub(super) fn services_count_from(&mut self, at_ms: u64) {
        for run in self.next.services.values_mut() {
            run.since_ms = at_ms;
        }
    }

    /// It got its processors back: those that asked for it are nudged.
    pub(super) fn nudge_after_thaw(&mut self) {
        for service in &self.next.spec.services {
            if service.nudge.as_ref().is_some_and(|nudge| nudge.on_thaw)
                && let Some(run) = self.next.services.get_mut(&service.name)
            {
                run.nudge = true;
            }
        }
    }

    /// What was given up for a service gets another chance: somebody wants it to run, and its instance may still live.
    pub(super) fn serve_anew(mut self, by: &Actor) -> Stepped {
        let (id, now_ms) = (self.next.id.clone(), self.at.now_ms);
        for (index, service) in self.next.spec.services.iter().enumerate() {
            if let Some(run) = self.next.services.get_mut(&service.name) {
                *run = if run.ended.is_some() { run.again(&id, index, 0, now_ms) } else { run.clone() };
                run.restarts = 0;
            }
        }
        let again = super::draft::Verify { step: VerifyStep::Probe, rebuilds: 0, findings: 0, was_ready: true };
        self.verifying(again, Cause::Requested, by, None)
    }

    /// A service that was ready is not: it is looked at again in a moment, in what is left of the time.
    pub(super) fn back_to_services(self, complaint: String) -> Stepped {
        let at_ms = self.at.now_ms.saturating_add(LOOKED_AT_AGAIN_MS);
        let mut stepped = self.go_on(VerifyStep::Services);
        if let Stepped::Accepted(accepted) = &mut stepped {
            accepted.next.cause.message = Some(complaint);
            if let Some(work) = accepted.next.phase.work_mut() {
                work.retry_at_ms = at_ms;
            }
        }
        stepped
    }

    /// The next step of a verification, in what is left of its time.
    pub(super) fn go_on(mut self, to: VerifyStep) -> Stepped {
        let operation = self.next.next_operation();
        if let Phase::Verifying { step, work, .. } = &mut self.next.phase {
            *step = to;
            *work = Work { operation, attempt: 1, retry_at_ms: 0, ..work.clone() };
        }
        self.is(Happened::Advanced)
    }
}

/// All services were started, and each is ready or has ended.
pub(super) fn served(mut draft: Draft<'_>, reports: &[ServiceReport]) -> Stepped {
    let services = draft.next.spec.services.clone();
    draft.next.evidence.services = checks(reports);
    let mut next_at_ms = None;
    let mut said = None;
    for (index, service) in services.iter().enumerate() {
        let Some(run) = draft.next.services.get(&service.name).cloned() else {
            return Stepped::Ignored(Ignored::Misplaced);
        };
        let report = reports.iter().find(|report| report.execution == run.execution);
        // What was not looked at is not well, and what is said about an earlier start says nothing.
        let Some(report) = report else { return draft.retry(format!("service {}: no answer", service.name)) };
        match &report.found {
            ServiceFound::Ready => {
                let now_ms = draft.at.now_ms;
                if let Some(run) = draft.next.services.get_mut(&service.name) {
                    run.ready_at_ms.get_or_insert(now_ms);
                    run.nudge = false;
                }
            }
            ServiceFound::Ended { how, failed } => match next_start(&draft, service, index, &run, *failed) {
                Some(again) => {
                    let restart = format!("restart {} of {}", again.restarts, service.restart.times_max);
                    said.get_or_insert(format!("service {}: {how}; {restart}", service.name));
                    next_at_ms = next_at_ms.max(Some(again.since_ms));
                    draft.next.services.insert(service.name.clone(), again);
                }
                None => return given_up(draft, service, how, reports),
            },
        }
    }
    let Some(next_at_ms) = next_at_ms else {
        let next = if draft.next.hook.is_some() { VerifyStep::Hook } else { VerifyStep::Probe };
        return draft.go_on(next);
    };
    start_again(draft, next_at_ms, said)
}

/// The start after this one, where the policy allows one.
fn next_start(
    draft: &Draft<'_>,
    service: &ServiceSpec,
    index: usize,
    run: &ServiceRun,
    failed: bool,
) -> Option<ServiceRun> {
    let now_ms = draft.at.now_ms;
    let is_wanted = match service.restart.policy {
        RestartPolicy::Never => false,
        RestartPolicy::OnFailure => failed,
        RestartPolicy::Always => true,
    };
    let served_ms = run.ready_at_ms.map_or(0, |at_ms| now_ms.saturating_sub(at_ms));
    let before = if served_ms >= RESTARTS_FORGOTTEN_MS { 0 } else { run.restarts };
    if !is_wanted || before >= service.restart.times_max {
        return None;
    }
    let doubled = service.restart.backoff_ms.saturating_mul(1 << before.min(16));
    let at_ms = now_ms.saturating_add(doubled.min(RESTART_BACKOFF_MS_MAX));
    Some(run.again(&draft.next.id, index, before + 1, at_ms))
}

/// Started again a little later, in a time of its own.
fn start_again(mut draft: Draft<'_>, next_at_ms: u64, said: Option<String>) -> Stepped {
    let limit_ms = draft.verify_limit_ms().saturating_add(next_at_ms.saturating_sub(draft.at.now_ms));
    let work = Work { retry_at_ms: next_at_ms, ..draft.next.work(draft.at, limit_ms) };
    let Phase::Verifying { rebuilds, findings, found_at_ms, was_ready, .. } = draft.next.phase else {
        return Stepped::Ignored(Ignored::Misplaced);
    };
    let step = VerifyStep::Services;
    let phase = Phase::Verifying { step, rebuilds, findings, found_at_ms, was_ready, work };
    draft.enter(phase, Cause::ServiceEnded, &Actor::part("engine"), said)
}

/// It does not come back. The instance itself is sound, so another one would fare no better: what worked before keeps
/// it, to be looked into and saved; what never did is given up.
fn given_up(mut draft: Draft<'_>, service: &ServiceSpec, how: &str, reports: &[ServiceReport]) -> Stepped {
    let Phase::Verifying { was_ready, .. } = draft.next.phase else {
        return Stepped::Ignored(Ignored::Misplaced);
    };
    let mut said = format!("service {}: {how}", service.name);
    for (name, run) in &mut draft.next.services {
        let report = reports.iter().find(|report| report.execution == run.execution);
        if let Some(ServiceFound::Ended { how, .. }) = report.map(|report| &report.found) {
            run.ended = Some(how.clone());
        }
        if *name == service.name && run.restarts > 0 {
            said = format!("{said}, after {} restarts", run.restarts);
        }
    }
    if was_ready {
        draft.lost(Cause::ServiceFailed, Some(said))
    } else {
        draft.failed(Cause::ServiceFailed, Some(said))
    }
}

/// What was seen of services, as evidence.
fn checks(reports: &[ServiceReport]) -> Vec<ServiceCheck> {
    let check = |report: &ServiceReport| {
        let (finding, message) = match &report.found {
            ServiceFound::Ready => (Finding::Ok, None),
            ServiceFound::Ended { how, .. } => (Finding::Unhealthy, Some(how.clone())),
        };
        let check = Check { finding, at_ms: report.at_ms, took_ms: 0, message };
        ServiceCheck { service: report.service.clone(), execution: report.execution.clone(), check }
    };
    reports.iter().map(check).collect()
}

/// The hook of this moment was performed.
pub(super) fn hooked(mut draft: Draft<'_>, report: &HookReport) -> Stepped {
    if draft.next.hook != Some(report.point) {
        return Stepped::Ignored(Ignored::Misplaced);
    }
    draft.next.hook = None;
    let policy = draft.next.spec.hooks.get(&report.point).map_or(OnFailure::Ignore, |hook| hook.on_failure);
    match (report.ok, policy) {
        (true, OnFailure::Ignore | OnFailure::Abort) | (false, OnFailure::Ignore) => draft.go_on(VerifyStep::Probe),
        (false, OnFailure::Abort) => {
            let said = format!("hook {}: {}", report.point, report.what);
            draft.failed(Cause::HookFailed, Some(said))
        }
    }
}
