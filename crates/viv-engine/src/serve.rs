//! Services: started, waited for, nudged and asked how they are (L14, T2).
//!
//! An execution's id is made of sandbox, generation, service and start, all of which the record has. So whoever
//! performs this again, after a crash or because an answer was lost, finds what was started before.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_core::lifecycle::{Failure, FailureKind, Finding, Outcome, Sandbox, ServiceCheck, Work};
use viv_core::service::{NUDGE_AGAIN_MS, Nudge, Readiness, ServiceFound, ServiceReport, ServiceRun, ServiceSpec};
use viv_core::{ExecutionId, FencingToken, Generation, OperationId};
use viv_provider::{InstanceRef, Mutation, ProviderError};

use crate::effect::in_words;
use crate::engine::Inner;
use crate::error::EngineError;
use crate::probe::Bad;

/// How often a service is asked whether it is ready; it grows by half up to the second one.
const ASKED_EVERY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Why it is not known how a service is.
type Unknown = String;

impl Inner {
    /// Starts all services, and answers when each is ready or has ended. `None` when the instance was seen to have
    /// ended, which was applied.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        record: &Sandbox,
        generation: Generation,
        work: &Work,
    ) -> Result<Option<Outcome>, EngineError> {
        if self.look_at_instance(record, generation).await? {
            return Ok(None);
        }
        let token = self.token(&record.id).await?;
        // Dropped with this effect, and with it what waits; what was started runs on.
        let mut starts = JoinSet::new();
        for (index, service) in record.spec.services.iter().enumerate() {
            let Some(run) = record.services.get(&service.name) else { continue };
            let start = Start {
                inner: self.clone(),
                instance: InstanceRef { sandbox: record.id.clone(), generation },
                token,
                operation: format!("{}s{index}", work.operation),
                service: service.clone(),
                run: run.clone(),
            };
            starts.spawn(start.perform());
        }
        let mut reports = Vec::with_capacity(record.services.len());
        let mut unknown = None;
        while let Some(answer) = starts.join_next().await {
            match answer {
                Ok(Ok(report)) => reports.push(report),
                Ok(Err(why)) => unknown = Some(why),
                Err(ended) => unknown = Some(ended.to_string()),
            }
        }
        // What is known for certain is acted upon; what is not known is asked again (T7).
        let over = reports.iter().any(|report| report.found != ServiceFound::Ready);
        Ok(Some(match unknown {
            Some(what) if !over => Outcome::Failed(Failure { kind: FailureKind::Unknown, what }),
            Some(_) | None => Outcome::Served(reports),
        }))
    }

    /// Checks each service, one after another: each has its own deadline (T2).
    pub(crate) async fn probe_services(
        &self,
        record: &Sandbox,
        instance: &InstanceRef,
        token: FencingToken,
    ) -> Vec<ServiceCheck> {
        let mut checks = Vec::with_capacity(record.services.len());
        for service in &record.spec.services {
            let Some(run) = record.services.get(&service.name) else { continue };
            let probe = async {
                let status = self.provider.execution(instance, &run.execution).await?;
                if status.state.is_final() {
                    return Err(Bad::unhealthy(how_it_ended(&status.state).0));
                }
                self.is_ready(instance, token, service, &service.ready).await
            };
            let check = self.check(probe).await;
            checks.push(ServiceCheck { service: service.name.clone(), execution: run.execution.clone(), check });
        }
        checks
    }

    /// Asks once whether it is ready, along the path that users use.
    async fn is_ready(
        &self,
        instance: &InstanceRef,
        token: FencingToken,
        service: &ServiceSpec,
        readiness: &Readiness,
    ) -> Result<(), Bad> {
        match readiness {
            // That its execution runs was seen, and for how long is its start's matter.
            Readiness::Runs { .. } => Ok(()),
            Readiness::Port { port } => {
                let dialled = self.provider.dial(instance, *port).await.map(drop);
                dialled.map_err(|error| match Bad::from(error) {
                    bad if bad.finding == Finding::Timeout => bad,
                    bad => Bad { what: format!("port {port}: {}", bad.what), ..bad },
                })
            }
            Readiness::Command { argv } => {
                let spec = ExecSpec {
                    argv: argv.clone(),
                    env: service.env.clone(),
                    cwd: service.cwd.clone(),
                    user: service.user.clone(),
                    limit_ms: Some(self.config.budgets.probe.as_millis() as u64),
                    transient: true,
                    ..ExecSpec::default()
                };
                match self.run_to_its_end(instance, token, &spec).await? {
                    ExecState::Exited { code: 0 } => Ok(()),
                    ExecState::TimedOut => {
                        Err(Bad { finding: Finding::Timeout, what: "its readiness command took too long".to_owned() })
                    }
                    state => Err(Bad::unhealthy(format!("its readiness command {}", how_it_ended(&state).0))),
                }
            }
        }
    }

    /// Runs a transient command and tells how it ended.
    async fn run_to_its_end(
        &self,
        instance: &InstanceRef,
        token: FencingToken,
        spec: &ExecSpec,
    ) -> Result<ExecState, ProviderError> {
        let execution = ExecutionId::from_bytes((self.draw)());
        let mutation = self.mutation(OperationId::from_bytes((self.draw)()), instance.generation, token);
        self.execute(&mutation, &instance.sandbox, &execution, spec).await?;
        let mut output = self.provider.attach(instance, &execution, 0, true).await?;
        loop {
            match output.next().await? {
                Some(OutputEvent::Chunk { .. } | OutputEvent::Cut { .. }) => {}
                Some(OutputEvent::End(status)) => return Ok(status.state),
                None => return Ok(ExecState::Lost { cause: "its output ended without an end".to_owned() }),
            }
        }
    }

    pub(crate) fn mutation(&self, operation: OperationId, generation: Generation, token: FencingToken) -> Mutation {
        Mutation { operation, generation, token, budget_ms: self.config.budgets.call.as_millis() as u64 }
    }
}

/// One service on its way to be ready.
struct Start {
    inner: Arc<Inner>,
    instance: InstanceRef,
    token: FencingToken,
    operation: String,
    service: ServiceSpec,
    run: ServiceRun,
}

/// How a wait went.
enum Waited {
    Yes,
    Ended(ServiceFound),
    /// Until its time was up it said no, for this reason.
    Late(String),
    /// Nothing is known: it was not heard at the last.
    Silent(String),
}

impl Start {
    async fn perform(self) -> Result<ServiceReport, Unknown> {
        let found = self.found().await.map_err(|why| format!("service {}: {why}", self.service.name))?;
        Ok(ServiceReport {
            service: self.service.name.clone(),
            execution: self.run.execution.clone(),
            found,
            at_ms: self.inner.clock.now_ms(),
        })
    }

    async fn found(&self) -> Result<ServiceFound, Unknown> {
        let spec = ExecSpec {
            argv: self.service.argv.clone(),
            env: self.service.env.clone(),
            cwd: self.service.cwd.clone(),
            user: self.service.user.clone(),
            // It is not activity (L6).
            detached: true,
            ..ExecSpec::default()
        };
        let (inner, sandbox) = (&self.inner, &self.instance.sandbox);
        let mutation = self.mutation("e");
        let started = inner.execute(&mutation, sandbox, &self.run.execution, &spec);
        let status = inner.call(sandbox, inner.config.budgets.call, started).await.map_err(|error| in_words(&error))?;
        if status.state.is_final() {
            return Ok(ended(&status.state));
        }
        let nudge = self.service.nudge.as_ref().filter(|_| self.run.nudge);
        // What ran before is nudged at once; what is new gets to know its signals first.
        let runs_on = self.run.ready_at_ms.is_some();
        if let Some(nudge) = nudge.filter(|_| runs_on)
            && let Some(over) = self.nudge(nudge).await?
        {
            return Ok(over);
        }
        if let Some(over) = self.become_ready().await? {
            return Ok(over);
        }
        if let Some(nudge) = nudge.filter(|_| !runs_on)
            && let Some(over) = self.nudge(nudge).await?
        {
            return Ok(over);
        }
        Ok(ServiceFound::Ready)
    }

    /// Waits until it is ready. What it became instead, if it did not.
    async fn become_ready(&self) -> Result<Option<ServiceFound>, Unknown> {
        let until_ms = self.run.since_ms.saturating_add(self.service.ready_within_ms);
        // Who has to be seen running for so long is looked at for that long, however late the first look comes: a slow
        // provider is no fault of his.
        let until_ms = match &self.service.ready {
            Readiness::Runs { ms } => until_ms.max(self.inner.clock.now_ms().saturating_add(*ms)),
            Readiness::Port { .. } | Readiness::Command { .. } => until_ms,
        };
        match self.wait(&self.service.ready, until_ms, |_| None).await {
            Waited::Yes => Ok(None),
            Waited::Ended(found) => Ok(Some(found)),
            Waited::Silent(why) => Err(why),
            Waited::Late(why) => {
                let how = format!("was not ready within {} ms: {why}", self.service.ready_within_ms);
                self.end(how).await.map(Some)
            }
        }
    }

    /// Sends the signal, again after a while, and waits for it to report in. What it became instead, if it did not.
    async fn nudge(&self, nudge: &Nudge) -> Result<Option<ServiceFound>, Unknown> {
        let began_ms = self.inner.clock.now_ms();
        self.signal(nudge.signal, "n").await;
        let again_at_ms = began_ms.saturating_add(NUDGE_AGAIN_MS);
        let until_ms = began_ms.saturating_add(nudge.within_ms);
        let again = |now_ms: u64| (now_ms >= again_at_ms).then_some(nudge.signal);
        match self.wait(self.service.reports(), until_ms, again).await {
            Waited::Yes => Ok(None),
            Waited::Ended(found) => Ok(Some(found)),
            // Here a time limit is a promise, whatever the reason (L14).
            Waited::Late(why) | Waited::Silent(why) => {
                let how =
                    format!("did not report in within {} ms after signal {}: {why}", nudge.within_ms, nudge.signal);
                self.end(how).await.map(Some)
            }
        }
    }

    /// Asks until it says yes, has ended, or the time is up. `signal` tells whether to send one more, once.
    async fn wait(&self, readiness: &Readiness, until_ms: u64, signal: impl Fn(u64) -> Option<i32>) -> Waited {
        let inner = &self.inner;
        let (mut pause, mut signalled) = (ASKED_EVERY.0, false);
        let began_ms = inner.clock.now_ms();
        loop {
            let asked = tokio::time::timeout(inner.config.budgets.probe, self.ask(readiness, began_ms)).await;
            let no = match asked {
                Ok(Ok(Waited::Yes)) => return Waited::Yes,
                Ok(Ok(Waited::Ended(found))) => return Waited::Ended(found),
                Ok(Ok(no)) => no,
                Ok(Err(bad)) if bad.finding == Finding::Timeout => Waited::Silent(bad.what),
                Ok(Err(bad)) => Waited::Late(bad.what),
                Err(_) => Waited::Silent("it did not answer".to_owned()),
            };
            let now_ms = inner.clock.now_ms();
            if now_ms >= until_ms {
                return no;
            }
            if let Some(signal) = signal(now_ms).filter(|_| !signalled) {
                signalled = true;
                self.signal(signal, "m").await;
            }
            tokio::time::sleep(pause.min(Duration::from_millis(until_ms - now_ms))).await;
            pause = (pause * 3 / 2).min(ASKED_EVERY.1);
        }
    }

    /// Asks once.
    async fn ask(&self, readiness: &Readiness, began_ms: u64) -> Result<Waited, Bad> {
        let inner = &self.inner;
        let status = inner.provider.execution(&self.instance, &self.run.execution).await?;
        if status.state.is_final() {
            return Ok(Waited::Ended(ended(&status.state)));
        }
        if let Readiness::Runs { ms } = readiness
            && self.run.ready_at_ms.is_none()
        {
            let runs_ms = inner.clock.now_ms().saturating_sub(began_ms);
            if runs_ms < *ms {
                return Ok(Waited::Late(format!("it has run for {runs_ms} ms")));
            }
        }
        inner.is_ready(&self.instance, self.token, &self.service, readiness).await?;
        Ok(Waited::Yes)
    }

    /// Ends it, for this reason.
    async fn end(&self, how: String) -> Result<ServiceFound, Unknown> {
        let (inner, sandbox) = (&self.inner, &self.instance.sandbox);
        let mutation = self.mutation("c");
        let cancelled = inner.provider.cancel(&mutation, sandbox, &self.run.execution);
        let ended = inner.call(sandbox, inner.config.budgets.call, cancelled).await;
        ended.map_err(|error| format!("{how}; and it could not be ended: {}", in_words(&error)))?;
        Ok(ServiceFound::Ended { how, failed: true })
    }

    /// A signal to what has ended is no trouble: its end is found by who asks next.
    async fn signal(&self, signal: i32, which: &str) {
        let (inner, sandbox) = (&self.inner, &self.instance.sandbox);
        let mutation = self.mutation(which);
        let sent = inner.provider.signal(&mutation, sandbox, &self.run.execution, signal);
        if let Err(error) = inner.call(sandbox, inner.config.budgets.call, sent).await {
            tracing::debug!(component = "serve", %sandbox, service = %self.service.name, %error, "was not nudged");
        }
    }

    /// Each call has an operation of its own, the same when it is repeated.
    fn mutation(&self, which: &str) -> Mutation {
        let text: String = format!("{}{which}", self.operation);
        let operation = text.parse().unwrap_or_else(|_| OperationId::from_bytes((self.inner.draw)()));
        self.inner.mutation(operation, self.instance.generation, self.token)
    }
}

fn ended(state: &ExecState) -> ServiceFound {
    let (how, failed) = how_it_ended(state);
    ServiceFound::Ended { how, failed }
}

/// How an execution ended, in words, and whether that is a failure.
pub(crate) fn how_it_ended(state: &ExecState) -> (String, bool) {
    let how = match state {
        ExecState::Running => "runs".to_owned(),
        ExecState::Suspended => "is suspended".to_owned(),
        ExecState::Exited { code } => format!("exited with code {code}"),
        ExecState::Signalled { signal } => format!("was killed by signal {signal}"),
        ExecState::OomKilled => "was killed for memory".to_owned(),
        ExecState::Failed { what } => format!("could not be started: {what}"),
        ExecState::Cancelled => "was cancelled".to_owned(),
        ExecState::TimedOut => "took too long".to_owned(),
        ExecState::Lost { cause } => format!("was lost with its instance: {cause}"),
    };
    (how, *state != ExecState::Exited { code: 0 })
}
