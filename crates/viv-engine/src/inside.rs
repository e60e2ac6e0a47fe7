//! One wait per sandbox that runs, for what those inside ask for.
//!
//! ```text
//!   Provider::requests ──► one at a time ──► whoever answers (config) ──► durable ──► Provider::answer_request
//!         ▲                                                                                  │
//!         └───────── what was not answered is heard again, by this daemon or the next ◄──────┘
//! ```
//!
//! Invariants:
//!
//! - What is asked was written by a workload: it says nothing about who asked. That is the sandbox whose instance it was
//!   heard from, and nothing else can be named.
//! - It is no use of the sandbox by anybody (L6), and wakes, resumes and extends nothing.
//! - One request of a sandbox is worked on at a time, a few a second, and a few of all sandboxes together: who asks
//!   without end waits, and nobody else does (J7).

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use viv_core::lifecycle::{Actor, Sandbox};
use viv_core::{Generation, OperationId, RequestId, SandboxId, ScheduleId};
use viv_provider::{InsideRequest, InstanceRef, Mutation, ProviderError};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;

/// How long to wait before listening again to who hung up; it doubles up to the second one.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// Between two requests of one sandbox.
const REST: Duration = Duration::from_millis(100);

/// Requests of all sandboxes that are worked on at once.
const PLACES: usize = 16;

/// What somebody inside a sandbox asks for.
#[derive(Debug, Clone)]
pub struct FromInside {
    /// From which sandbox, as its record stood when it was heard.
    pub sandbox: Sandbox,
    /// The same when it is heard again.
    pub request: RequestId,
    /// What it is: nothing to be trusted.
    pub body: String,
}

impl FromInside {
    /// Who asks.
    pub fn actor(&self) -> Actor {
        Actor::part(&format!("inside:{}", self.sandbox.id))
    }

    /// The schedule that this request makes: the same one when it is heard again, and never another sandbox's, whatever
    /// an agent calls its requests. It sorts by when it was asked for.
    pub fn schedule_id(&self) -> ScheduleId {
        let request = self.request.as_str().trim_start_matches(RequestId::PREFIX);
        let sandbox = self.sandbox.id.as_str().trim_start_matches(SandboxId::PREFIX);
        let body = format!("{}{:032x}", head(request), fnv128(&[sandbox, request]));
        format!("{}{body}", ScheduleId::PREFIX).parse().expect("letters and digits, and not too many")
    }
}

/// Ten characters of base 32 hold the time that a request begins with.
fn head(request: &str) -> String {
    request.chars().chain(std::iter::repeat('0')).take(10).collect()
}

/// FNV-1a. What goes in are ids of ours; a sandbox's own cannot be chosen.
fn fnv128(parts: &[&str]) -> u128 {
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

/// An answer that is being made.
pub type AnswerInside = Pin<Box<dyn Future<Output = String> + Send>>;

/// Answers those inside: whoever knows what they may say is handed in. What it answers is told only once it is durable,
/// and asked again under the same id it has to come to the same.
#[derive(Clone)]
pub struct Inside(pub Arc<dyn Fn(Engine, FromInside) -> AnswerInside + Send + Sync>);

impl fmt::Debug for Inside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inside")
    }
}

/// Who is listened to.
#[derive(Debug)]
pub(crate) struct Ears {
    listening: Mutex<BTreeMap<SandboxId, (Generation, AbortHandle)>>,
    places: Semaphore,
}

impl Default for Ears {
    fn default() -> Self {
        Self { listening: Mutex::default(), places: Semaphore::new(PLACES) }
    }
}

impl Ears {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SandboxId, (Generation, AbortHandle)>> {
        self.listening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It does not run.
    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        if let Some((_, task)) = self.lock().remove(sandbox) {
            task.abort();
        }
    }

    pub(crate) fn end(&self) {
        // In their order, so that a simulated world replays exactly.
        for (_, task) in std::mem::take(&mut *self.lock()).into_values() {
            task.abort();
        }
    }
}

impl Inner {
    /// Listens to those inside a sandbox that runs, unless somebody does already.
    pub(crate) fn hear_inside(self: &Arc<Self>, sandbox: &Sandbox) {
        let Some(answers) = self.config.inside.clone().filter(|_| !self.is_ending()) else { return };
        let mut listening = self.ears.lock();
        if let Some((generation, task)) = listening.get(&sandbox.id) {
            if *generation == sandbox.generation && !task.is_finished() {
                return;
            }
            task.abort();
        }
        let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        let engine = Engine { inner: self.clone() };
        let task = tokio::spawn(listen(engine, answers, instance)).abort_handle();
        listening.insert(sandbox.id.clone(), (sandbox.generation, task));
    }
}

async fn listen(engine: Engine, answers: Inside, instance: InstanceRef) {
    let inner = &engine.inner;
    let mut pause = PAUSE.0;
    while !inner.is_ending() {
        let began_at = tokio::time::Instant::now();
        match engine.hear(&answers, &instance).await {
            // It ended, does not run, or its agent is of before all this: whoever makes it run again listens again.
            Err(
                EngineError::NotFound { .. }
                | EngineError::Gone { .. }
                | EngineError::Provider(
                    ProviderError::Absent
                    | ProviderError::StaleGeneration { .. }
                    | ProviderError::NotRunning { .. }
                    | ProviderError::Unsupported { .. }
                    | ProviderError::Outdated { .. },
                ),
            ) => return,
            Err(error) => {
                inner.heed(&error);
                tracing::debug!(component = "inside", %instance, %error, "listens again");
            }
            Ok(()) => {}
        }
        if began_at.elapsed() > PAUSE.1 {
            pause = PAUSE.0;
        }
        inner.pause(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

impl Engine {
    /// Listens and answers until the stream ends.
    async fn hear(&self, answers: &Inside, instance: &InstanceRef) -> Result<(), EngineError> {
        let inner = &self.inner;
        let begun = inner.call_agent(&instance.sandbox, inner.config.budgets.call, inner.provider.requests(instance));
        let mut stream = begun.await.map_err(EngineError::Provider)?;
        while let Some(request) = stream.next().await.map_err(EngineError::Provider)? {
            inner.reached("inside.heard");
            let id = request.id.clone();
            let answer = self.answer(answers, instance, request).await?;
            inner.reached("inside.done");
            inner.knowledge.requested(&instance.sandbox);
            match self.give_answer(instance, &id, &answer).await {
                // Whoever asked did not wait for it.
                Ok(()) | Err(EngineError::Provider(ProviderError::NotFound { .. })) => {}
                Err(error) => return Err(error),
            }
            inner.reached("inside.answered");
            inner.pause(REST).await;
            if inner.is_ending() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// What is said to a request. An error is not an answer: it is asked again.
    async fn answer(
        &self,
        answers: &Inside,
        instance: &InstanceRef,
        request: InsideRequest,
    ) -> Result<String, EngineError> {
        let inner = &self.inner;
        // The semaphore is never closed.
        let _place = inner.ears.places.acquire().await.map_err(|_| EngineError::ShuttingDown)?;
        let sandbox = inner.load(&instance.sandbox).await?;
        if sandbox.generation != instance.generation {
            let (asked, current) = (instance.generation, sandbox.generation);
            return Err(EngineError::Provider(ProviderError::StaleGeneration { asked, current }));
        }
        let InsideRequest { id, again, body } = request;
        tracing::debug!(component = "inside", %instance, request = %id, again, bytes = body.len(), "is asked");
        let asked = FromInside { sandbox, request: id, body };
        // In a task of its own: what was begun is not left half done when somebody stops listening.
        let working = tokio::spawn((answers.0)(self.clone(), asked));
        match tokio::time::timeout(inner.config.budgets.call, working).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(EngineError::ShuttingDown),
            Err(_) => {
                let after_ms = inner.config.budgets.call.as_millis() as u64;
                Err(EngineError::Provider(ProviderError::TimedOut { what: "an answer to the inside", after_ms }))
            }
        }
    }

    async fn give_answer(&self, instance: &InstanceRef, id: &RequestId, answer: &str) -> Result<(), EngineError> {
        let inner = &self.inner;
        let mutation = Mutation {
            operation: OperationId::from_bytes((inner.draw)()),
            generation: instance.generation,
            token: inner.token(&instance.sandbox).await?,
            budget_ms: inner.config.budgets.call.as_millis() as u64,
        };
        let given = inner.provider.answer_request(&mutation, &instance.sandbox, id, answer);
        let given = inner.call_agent(&instance.sandbox, inner.config.budgets.call, given);
        given.await.map_err(EngineError::Provider)
    }

    /// Refuses what would change something while nothing new is begun: the daemon is drained, or the sandbox does not
    /// run any more.
    pub fn check_inside(&self, asked: &FromInside) -> Result<(), EngineError> {
        self.inner.check_open()?;
        if asked.sandbox.phase.is_heard() {
            return Ok(());
        }
        Err(EngineError::NotRunning {
            sandbox: asked.sandbox.id.clone(),
            phase: asked.sandbox.phase.name(),
            cause: Box::new(asked.sandbox.cause.clone()),
        })
    }
}
