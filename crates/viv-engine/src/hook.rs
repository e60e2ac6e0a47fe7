//! Hooks: a command in the sandbox, or a signed request to somebody outside (L14).
//!
//! | hook | performed | when it fails and must not |
//! |---|---|---|
//! | `after_start`, `after_resume` | in verification, once services are ready, before it is called ready | the sandbox is `failed` |
//! | `before_stop` | before processes are ended, for 3 s at most (L8) | it is written down: a stop is not held up |
//! | `on_timeout` | so long before the hard deadline as it may take | it is written down: a deadline is not held up |
//!
//! A command is an execution whose id follows from the operation, so a repeat finds the first one. A webhook may come
//! twice after a crash, with the same id of delivery.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_core::hook::{HOOK_TAIL_BYTES, Hook, HookAction, HookPoint, HookReport, Secret};
use viv_core::lifecycle::{Actor, Cause, Failure, FailureKind, HibernateStep, Outcome, Phase, Sandbox, Work};
use viv_core::{ExecutionId, Generation, OperationId, SandboxId};
use viv_provider::{Deadline, InstanceRef, InstanceState, ProviderError};

use crate::breaker::destination;
use crate::effect::in_words;
use crate::engine::Inner;
use crate::error::EngineError;
use crate::gate::Gate;
use crate::journal;
use crate::metrics::family;
use crate::serve::how_it_ended;

/// What is kept of a hook's whole output beside the sandbox.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;

/// How often a webhook is tried (J7).
const TRIES: u32 = 3;

/// How long one try may take (J7).
const TRY: Duration = Duration::from_secs(10);

/// The wait between tries; it doubles.
const TRY_AGAIN: Duration = Duration::from_millis(200);

/// How much our clock and that of who keeps a deadline may be apart, with the time that a look takes.
const CLOCKS_DIFFER_MS: u64 = 1_000;

/// How much later than its time limit the end of a command is heard.
const END_HEARD_MS: u64 = 2_000;

/// A request that somebody outside gets.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// To whom.
    pub url: String,
    /// With what it is signed.
    pub secret: Secret,
    /// With what else: one that is being replaced.
    pub also: Vec<Secret>,
    /// The same when it is repeated.
    pub id: String,
    /// When, in seconds.
    pub at_s: u64,
    /// What: JSON.
    pub body: Vec<u8>,
    /// How long one try may take.
    pub within: Duration,
}

/// Why a delivery failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undelivered {
    /// In words that hold no secret.
    pub why: String,
    /// Whether that is about the destination, which did not answer or said that it cannot now, and not about the request.
    pub is_down: bool,
}

/// What a delivery comes to: nothing, or why it failed.
pub type Delivered = Pin<Box<dyn Future<Output = Result<(), Undelivered>> + Send>>;

/// Makes requests: whoever knows HTTP is handed in.
#[derive(Clone)]
pub struct Webhooks(pub Arc<dyn Fn(Delivery) -> Delivered + Send + Sync>);

impl fmt::Debug for Webhooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Webhooks")
    }
}

impl Inner {
    /// The hook that a verification waits for. `None` when the instance was seen to have ended, which was applied.
    pub(crate) async fn hook_in_verification(
        self: &Arc<Self>,
        record: &Sandbox,
        generation: Generation,
        point: HookPoint,
        work: &Work,
    ) -> Result<Option<Outcome>, EngineError> {
        if self.look_at_instance(record, generation).await? {
            return Ok(None);
        }
        let Some(hook) = record.spec.hooks.get(&point) else {
            let what = "there is no such hook".to_owned();
            return Ok(Some(Outcome::Failed(Failure { kind: FailureKind::Refused, what })));
        };
        let began = (generation, work.operation.clone());
        Ok(Some(match self.perform_hook(record, hook, point, began).await {
            Ok(report) => Outcome::Hooked(report),
            Err(error) => Outcome::Failed(Failure { kind: FailureKind::Unknown, what: in_words(&error) }),
        }))
    }

    /// What is to be done before its processes are ended, if it runs. It takes no longer than it may, and holds up
    /// nothing: what came of it is written down.
    pub(crate) async fn before_stop(self: &Arc<Self>, record: &Sandbox, generation: Generation, work: &Work) {
        let is_stopping = match &record.phase {
            Phase::Hibernating { step: HibernateStep::Save, .. } | Phase::Stopping { .. } => true,
            Phase::Hibernating { step: HibernateStep::Clear, .. }
            | Phase::Provisioning { .. }
            | Phase::Verifying { .. }
            | Phase::Ready
            | Phase::Frozen { .. }
            | Phase::Hibernated { .. }
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopped => false,
        };
        let Some(hook) = record.spec.hooks.get(&HookPoint::BeforeStop).filter(|_| is_stopping) else { return };
        // Its time counts from when the stop began, so that a stop that is tried again is not held up again.
        let until_ms = record.phase_since_ms.saturating_add(hook.deadline_ms);
        let left_ms = until_ms.saturating_sub(self.clock.now_ms());
        if left_ms == 0 || record.cause.cause == Cause::Expired {
            return;
        }
        let began = (generation, work.operation.clone());
        let performed = async {
            let instance = InstanceRef { sandbox: record.id.clone(), generation };
            let seen = self.provider.observe(&instance).await?;
            let can = match (&seen.state, &hook.action) {
                (InstanceState::Running, _) | (InstanceState::Frozen, HookAction::Webhook { .. }) => true,
                (InstanceState::Frozen, HookAction::Command { .. })
                | (
                    InstanceState::Creating
                    | InstanceState::Ending { .. }
                    | InstanceState::Ended(_)
                    | InstanceState::Absent,
                    _,
                ) => false,
            };
            if !can {
                return Ok(None);
            }
            self.perform_hook(record, hook, HookPoint::BeforeStop, began).await.map(Some)
        };
        let what = match tokio::time::timeout(Duration::from_millis(left_ms), performed).await {
            Ok(Ok(None)) => return,
            Ok(Ok(Some(report))) => return self.note_hook(&record.id, &report).await,
            Ok(Err(error)) => in_words(&error),
            Err(_) => format!("took longer than {} ms", hook.deadline_ms),
        };
        let execution = match &hook.action {
            HookAction::Command { .. } => Some(Hook::execution_of(&work.operation, HookPoint::BeforeStop)),
            HookAction::Webhook { .. } => None,
        };
        let (point, took_ms) = (HookPoint::BeforeStop, hook.deadline_ms);
        self.note_hook(&record.id, &HookReport { point, ok: false, what, execution, tail: String::new(), took_ms })
            .await;
    }

    /// What is done ahead of the hard deadline. Whether the record changed.
    pub(crate) async fn on_timeout(self: &Arc<Self>, record: &Sandbox) -> Result<bool, EngineError> {
        let (Some(hook), Some(expires_at_ms)) = (record.spec.hooks.get(&HookPoint::OnTimeout), record.expires_at_ms)
        else {
            return Ok(false);
        };
        // What is stored is for display: whoever keeps the deadline is asked (T6).
        let instance = InstanceRef { sandbox: record.id.clone(), generation: record.generation };
        let now_ms = self.clock.now_ms();
        let deadline = if self.is_gated(Gate::FreshExpiry, &record.id) {
            let seen = self.call(&record.id, self.config.budgets.call, self.provider.observe(&instance)).await;
            let Some(deadline) = seen.ok().and_then(|seen| seen.deadline) else { return Ok(false) };
            deadline
        } else {
            Deadline { remaining_ms: expires_at_ms.saturating_sub(now_ms), revision: 0 }
        };
        if deadline.remaining_ms > lead_ms(record, hook).saturating_add(CLOCKS_DIFFER_MS) {
            let moved_to_ms = now_ms.saturating_add(deadline.remaining_ms);
            let corrected = self.amend(&record.id, |record| {
                if record.expires_at_ms != Some(expires_at_ms) {
                    return None;
                }
                record.expires_at_ms = Some(moved_to_ms);
                let data = json!({ "expires_at_ms": moved_to_ms, "revision": deadline.revision });
                Some(journal::noted(record, "sandbox.deadline_seen", Actor::part("expiry"), now_ms, data))
            });
            corrected.await?;
            return Ok(true);
        }
        let began = (record.generation, warning_of(&record.id, expires_at_ms));
        let report = self.perform_hook(record, hook, HookPoint::OnTimeout, began).await.unwrap_or_else(|error| {
            let what = in_words(&error);
            let point = HookPoint::OnTimeout;
            HookReport { point, ok: false, what, execution: None, tail: String::new(), took_ms: 0 }
        });
        let at_ms = self.clock.now_ms();
        let noted = self.amend(&record.id, |record| {
            record.warned_of_ms = Some(expires_at_ms);
            let data = json!({ "hook": report, "message": message(&report) });
            Some(journal::noted(record, "sandbox.hook", Actor::part("engine"), at_ms, data))
        });
        noted.await?;
        Ok(true)
    }

    /// Writes down what came of a hook that holds up nothing. Where that cannot be written, it is said.
    async fn note_hook(self: &Arc<Self>, sandbox: &SandboxId, report: &HookReport) {
        let now_ms = self.clock.now_ms();
        let noted = self.amend(sandbox, |record| {
            let data = json!({ "hook": report, "message": message(report) });
            Some(journal::noted(record, "sandbox.hook", Actor::part("engine"), now_ms, data))
        });
        if let Err(error) = noted.await {
            tracing::warn!(component = "hook", %sandbox, %error, hook = %report.point, "could not be written down");
        }
    }

    /// Performs a hook to its end, or to its deadline.
    async fn perform_hook(
        &self,
        record: &Sandbox,
        hook: &Hook,
        point: HookPoint,
        (generation, operation): (Generation, OperationId),
    ) -> Result<HookReport, ProviderError> {
        let began_ms = self.clock.now_ms();
        let mut report = match &hook.action {
            HookAction::Command { argv } => {
                let execution = Hook::execution_of(&operation, point);
                let instance = InstanceRef { sandbox: record.id.clone(), generation };
                self.run_hook(&instance, execution, argv, hook.deadline_ms, point).await?
            }
            HookAction::Webhook { url, secret } => {
                let body = json!({
                    "hook": point,
                    "sandbox": record.id,
                    "project": record.project,
                    "name": record.name,
                    "generation": generation,
                    "at_ms": began_ms,
                });
                let delivery = Delivery {
                    url: url.clone(),
                    secret: secret.clone(),
                    also: Vec::new(),
                    id: format!("{operation}-{point}"),
                    at_s: began_ms / 1000,
                    body: body.to_string().into_bytes(),
                    within: TRY.min(Duration::from_millis(hook.deadline_ms)),
                };
                self.deliver(&record.id, delivery, Duration::from_millis(hook.deadline_ms), point).await
            }
        };
        report.took_ms = self.clock.now_ms().saturating_sub(began_ms);
        Ok(report)
    }

    async fn run_hook(
        &self,
        instance: &InstanceRef,
        execution: ExecutionId,
        argv: &[String],
        deadline_ms: u64,
        point: HookPoint,
    ) -> Result<HookReport, ProviderError> {
        let token = self.token(&instance.sandbox).await.map_err(|error| ProviderError::Unavailable {
            what: "the store".to_owned(),
            source: std::io::Error::other(error.to_string()),
        })?;
        let operation = OperationId::from_bytes((self.draw)());
        let mutation = self.mutation(operation, instance.generation, token);
        let spec = ExecSpec {
            argv: argv.to_vec(),
            limit_ms: Some(deadline_ms),
            output_bytes_max: Some(OUTPUT_BYTES_MAX),
            // It is ours, and nobody's activity (L6).
            detached: true,
            ..ExecSpec::default()
        };
        let budget = self.config.budgets.call;
        let started = self.execute(&mutation, &instance.sandbox, &execution, &spec);
        self.call(&instance.sandbox, budget, started).await?;
        let mut tail = Vec::new();
        let to_its_end = async {
            let mut output = self.provider.attach(instance, &execution, 0, true).await?;
            loop {
                match output.next().await? {
                    Some(OutputEvent::Chunk { data, .. }) => {
                        tail.extend(data);
                        let more = tail.len().saturating_sub(HOOK_TAIL_BYTES);
                        tail.drain(..more);
                    }
                    Some(OutputEvent::Cut { .. }) => {}
                    Some(OutputEvent::End(status)) => return Ok::<_, ProviderError>(status.state),
                    None => return Ok(ExecState::Lost { cause: "its output ended without an end".to_owned() }),
                }
            }
        };
        let within = Duration::from_millis(deadline_ms.saturating_add(END_HEARD_MS));
        let state = match tokio::time::timeout(within, to_its_end).await {
            Ok(state) => state?,
            Err(_) => ExecState::TimedOut,
        };
        let what = match &state {
            ExecState::TimedOut => format!("took longer than {deadline_ms} ms"),
            state => how_it_ended(state).0,
        };
        let tail = String::from_utf8_lossy(&tail).into_owned();
        let ok = state == ExecState::Exited { code: 0 };
        Ok(HookReport { point, ok, what, execution: Some(execution), tail, took_ms: 0 })
    }

    /// Tries a few times, within the hook's deadline. A destination that failed too often is not asked for a while (J7).
    async fn deliver(&self, of: &SandboxId, delivery: Delivery, within: Duration, point: HookPoint) -> HookReport {
        let report =
            |ok, what: String| HookReport { point, ok, what, execution: None, tail: String::new(), took_ms: 0 };
        let Some(webhooks) = &self.config.webhooks else {
            return report(false, "this daemon makes no requests to anybody outside".to_owned());
        };
        let to = destination(&delivery.url);
        let mut last = "it was not answered in time".to_owned();
        let tries = async {
            let mut pause = TRY_AGAIN;
            for attempt in 1..=TRIES {
                if self.is_gated(Gate::Breaker, of)
                    && let Err(open) = self.outside.admit(&to, self.clock.now_ms())
                {
                    last = format!("{to} failed {} times in a row, and is asked again later", open.failures);
                    return false;
                }
                let silent = || Undelivered { why: "did not answer in time".to_owned(), is_down: true };
                let tried = tokio::time::timeout(delivery.within, (webhooks.0)(delivery.clone())).await;
                match tried.unwrap_or_else(|_| Err(silent())) {
                    Ok(()) => {
                        self.metrics.count(&family::WEBHOOKS, &["delivered"]);
                        self.outside.answered(&to);
                        return true;
                    }
                    Err(Undelivered { why, is_down }) => {
                        self.metrics.count(&family::WEBHOOKS, &[if is_down { "down" } else { "refused" }]);
                        if is_down {
                            self.outside.failed(&to, self.clock.now_ms());
                        } else {
                            self.outside.answered(&to);
                        }
                        last = why;
                    }
                }
                if attempt < TRIES {
                    // Differs from one delivery to the next, so that many do not come at once.
                    let jitter = u64::from((self.draw)()[0]);
                    tokio::time::sleep(pause + Duration::from_millis(jitter)).await;
                    pause *= 2;
                }
            }
            false
        };
        match tokio::time::timeout(within, tries).await {
            Ok(true) => report(true, "was delivered".to_owned()),
            Ok(false) | Err(_) => report(false, last),
        }
    }
}

/// When the hook for the hard deadline is to be performed, if it was not.
pub(crate) fn timeout_hook_at_ms(sandbox: &Sandbox) -> Option<u64> {
    let is_there = match &sandbox.phase {
        Phase::Ready | Phase::Frozen { .. } => true,
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => false,
    };
    let hook = sandbox.spec.hooks.get(&HookPoint::OnTimeout).filter(|_| is_there)?;
    let expires_at_ms = sandbox.expires_at_ms.filter(|&at_ms| sandbox.warned_of_ms != Some(at_ms))?;
    Some(expires_at_ms.saturating_sub(lead_ms(sandbox, hook)))
}

/// How long before the deadline: as long as it may take, and not longer than half of a short life.
fn lead_ms(sandbox: &Sandbox, hook: &Hook) -> u64 {
    hook.deadline_ms.min(sandbox.policy.lifetime_ms / 2)
}

/// Under which operation it is performed ahead of this deadline.
fn warning_of(sandbox: &SandboxId, expires_at_ms: u64) -> OperationId {
    OperationId::derived(sandbox.as_str(), &format!("t{expires_at_ms}"))
}

fn message(report: &HookReport) -> String {
    format!("hook {}: {}", report.point, report.what)
}
