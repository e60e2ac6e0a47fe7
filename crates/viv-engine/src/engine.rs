//! The engine itself, and the one way by which it changes a record.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use viv_core::SandboxId;
use viv_core::lifecycle::{Accepted, Event, Happened, Phase, PhaseName, Sandbox, Stepped, outstanding, step};
use viv_core::planted::{Planted, is_planted};
use viv_provider::{Capability, Provider};
use viv_store::{Change, Epoch, Lease, Quota, Store, StoreError};

use crate::aim::Aim;
use crate::alert::Alerts;
use crate::breaker::{Breaker, BreakerStatus, Outside};
use crate::cleanup::Cleanups;
use crate::clock::Clock;
use crate::config::EngineConfig;
use crate::deeds::Deeds;
use crate::driver::Drivers;
use crate::error::{EngineError, denied};
use crate::execution::Executions;
use crate::gate::Gate;
use crate::inside::Ears;
use crate::journal;
use crate::knowledge::Knowledge;
use crate::listen::Listeners;
use crate::memory::MemoryKnown;
use crate::metrics::{Feed, Metrics, family};
use crate::reconcile::{Health, Reconcilers};
use crate::roster::Roster;
use crate::schedule::Schedules;
use crate::snapshot::Savers;
use crate::spare::Spares;
use crate::subscription::Subscribed;
use crate::task::Tasks;
use crate::timer::Timer;
use crate::token::Removers;
use crate::watch::Watches;

/// How often a change is tried again because somebody else changed the record first.
pub(crate) const RACES_MAX: usize = 64;

/// The hard deadline is the shim's; we look a moment later, in case its word was lost.
const EXPIRY_SLACK_MS: u64 = 2_000;

/// And again this much later, while it is still ending.
const EXPIRY_AGAIN_MS: u64 = 1_000;

/// What may be idle and did not answer is asked again after this.
const IDLE_AGAIN_MS: u64 = 30_000;

/// How long a store that failed is left alone before what it may have written is looked at.
pub(crate) const STORE_PAUSE_MS: u64 = 500;

/// Drives sandboxes from what is recorded to what is wanted. Clones are the same engine.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

/// Where 16 random bytes come from.
pub(crate) type Draw = Box<dyn Fn() -> [u8; 16] + Send + Sync>;

pub(crate) struct Inner {
    pub(crate) config: EngineConfig,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) epoch: Epoch,
    pub(crate) clock: Clock,
    pub(crate) draw: Draw,
    pub(crate) timer: Timer,
    pub(crate) roster: Roster,
    pub(crate) knowledge: Knowledge,
    pub(crate) breaker: Breaker,
    pub(crate) outside: Outside,
    pub(crate) drivers: Drivers,
    pub(crate) watches: Watches,
    pub(crate) listeners: Listeners,
    pub(crate) ears: Ears,
    pub(crate) health: Health,
    pub(crate) reconcilers: Reconcilers,
    pub(crate) metrics: Metrics,
    /// How far the journal was counted.
    pub(crate) feed: tokio::sync::Mutex<Feed>,
    pub(crate) alerts: Alerts,
    pub(crate) cleanups: Cleanups,
    /// Held while somebody sets alarms and watches of one, so that the latest is the last.
    attending: Mutex<()>,
    /// Whether the provider can freeze; else the ladder of idling has one rung less.
    pub(crate) freezes: bool,
    /// Whether the provider can save memory.
    pub(crate) memory: MemoryKnown,
    pub(crate) schedules: Schedules,
    pub(crate) tasks: Tasks,
    pub(crate) executions: Executions,
    pub(crate) subscribed: Subscribed,
    /// Whether no new work is taken; the store has it too.
    pub(crate) draining: std::sync::atomic::AtomicBool,
    /// Held while that changes, so that the two are the same.
    pub(crate) draining_changes: tokio::sync::Mutex<()>,
    /// How many were let in and have not written down yet what they want.
    pub(crate) entering: std::sync::atomic::AtomicUsize,
    pub(crate) savers: Savers,
    pub(crate) spares: Spares,
    pub(crate) removers: Removers,
    pub(crate) deeds: Deeds,
    pub(crate) askers: crate::trace::Askers,
    /// Who waits for a sandbox to change.
    waiting: Mutex<HashMap<SandboxId, Arc<Notify>>>,
    /// True once the daemon ends.
    ending: watch::Sender<bool>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("provider", &self.inner.provider.name()).finish_non_exhaustive()
    }
}

/// Somebody who was let in, until it is written down what is wanted.
pub(crate) struct Entering(Arc<Inner>);

impl Drop for Entering {
    fn drop(&mut self) {
        self.0.entering.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
    }
}

/// What came of an event.
#[derive(Debug)]
pub(crate) enum Applied {
    /// The record changed to this.
    Changed(Box<Sandbox>),
    /// It did not.
    Same(Box<Sandbox>),
}

impl Applied {
    pub(crate) fn sandbox(self) -> Sandbox {
        match self {
            Self::Changed(sandbox) | Self::Same(sandbox) => *sandbox,
        }
    }
}

impl Engine {
    /// Takes up what the store says is outstanding, adopts what lives, and starts to look after it.
    ///
    /// The caller owns the store under this epoch. Must be called in a tokio runtime.
    pub async fn start(
        mut config: EngineConfig,
        store: Arc<dyn Store>,
        provider: Arc<dyn Provider>,
        epoch: Epoch,
        clock: Clock,
        draw: impl Fn() -> [u8; 16] + Send + Sync + 'static,
    ) -> Result<Self, EngineError> {
        let capabilities = provider.look_again().await;
        let freezes = capabilities.can(Capability::Freeze);
        let memory = MemoryKnown::of(&capabilities);
        config.spares.check()?;
        let spares = Spares::of(&config.spares);
        let stuck_after_ms = config.alerts.as_ref().map(|alerts| alerts.stuck_after.as_millis() as u64);
        let roster = Roster::new(config.quota.weights, stuck_after_ms);
        let metrics = Metrics::default();
        let feed = Feed::after(*store.tail().borrow());
        config.inside = config.inside.filter(|_| capabilities.can(Capability::Requests));
        let engine = Self {
            inner: Arc::new(Inner {
                config,
                store,
                provider,
                epoch,
                clock,
                draw: Box::new(draw),
                timer: Timer::default(),
                roster,
                knowledge: Knowledge::default(),
                breaker: Breaker::default(),
                outside: Outside::default(),
                drivers: Drivers::default(),
                watches: Watches::default(),
                listeners: Listeners::default(),
                ears: Ears::default(),
                health: Health::default(),
                reconcilers: Reconcilers::telling(&metrics),
                metrics,
                feed: tokio::sync::Mutex::new(feed),
                alerts: Alerts::default(),
                cleanups: Cleanups::default(),
                attending: Mutex::default(),
                freezes,
                memory,
                schedules: Schedules::default(),
                tasks: Tasks::default(),
                executions: Executions::default(),
                subscribed: Subscribed::default(),
                draining: std::sync::atomic::AtomicBool::default(),
                draining_changes: tokio::sync::Mutex::default(),
                entering: std::sync::atomic::AtomicUsize::default(),
                savers: Savers::default(),
                spares,
                removers: Removers::default(),
                deeds: Deeds::default(),
                askers: crate::trace::Askers::default(),
                waiting: Mutex::default(),
                ending: watch::Sender::new(false),
            }),
        };
        crate::drain::take_up(&engine).await?;
        crate::alert::take_up(&engine.inner).await?;
        crate::adopt::adopt(&engine.inner).await?;
        engine.inner.spawn_timer();
        engine.inner.spawn_scribe();
        crate::reconcile::spawn(&engine.inner);
        crate::pressure::spawn(&engine.inner);
        crate::memory::spawn(&engine.inner);
        crate::schedule::spawn(&engine).await?;
        crate::task::spawn(&engine).await?;
        crate::execution::spawn(&engine).await?;
        crate::subscription::spawn(&engine).await?;
        Ok(engine)
    }

    /// Ends the engine and leaves every sandbox as it is: what is outstanding is carried on by the next one.
    pub fn shut_down(&self) {
        self.inner.ending.send_replace(true);
        self.inner.watches.end();
        self.inner.listeners.end();
        self.inner.ears.end();
        self.inner.drivers.end();
        self.inner.schedules.end();
        self.inner.tasks.end();
        self.inner.executions.end();
        self.inner.subscribed.end();
        self.inner.savers.end();
    }

    /// Answers when the engine has ended: it was shut down, or somebody took the store over.
    pub async fn ended(&self) {
        let mut ending = self.inner.ending();
        // An error would mean that the engine is gone, which holds its own sender.
        let _ = ending.wait_for(|ending| *ending).await;
    }

    /// How it stands with the provider, and with those outside who fail.
    pub fn breakers(&self) -> Vec<BreakerStatus> {
        let (inner, now_ms) = (&self.inner, self.inner.clock.now_ms());
        let provider = inner.breaker.status(inner.provider.name(), now_ms);
        std::iter::once(provider).chain(inner.outside.status(now_ms)).collect()
    }

    /// The clock by which times are shown.
    pub fn now_ms(&self) -> u64 {
        self.inner.clock.now_ms()
    }

    /// How it is set up.
    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }

    /// The provider, for what is not about a sandbox.
    pub fn provider(&self) -> &Arc<dyn Provider> {
        &self.inner.provider
    }

    /// The store, for what is not about a sandbox: keys, journal, owner.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// The ownership under which it writes.
    pub fn epoch(&self) -> Epoch {
        self.inner.epoch
    }
}

impl Inner {
    /// Somebody else works on these sandboxes now, and has killed us or believes so: then this engine ends (J8).
    pub(crate) fn heed(&self, error: &EngineError) {
        if matches!(error, EngineError::Store(StoreError::Superseded)) {
            self.ending.send_replace(true);
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        *self.ending.borrow()
    }

    pub(crate) fn ending(&self) -> watch::Receiver<bool> {
        self.ending.subscribe()
    }

    /// A point that crash tests may end the process at.
    pub(crate) fn reached(&self, point: &str) {
        if let Some(failpoint) = &self.config.failpoint {
            (failpoint.0)(point);
        }
    }

    /// Refuses new work while the daemon is being drained, or ends.
    pub(crate) fn check_open(&self) -> Result<(), EngineError> {
        if self.is_ending() {
            return Err(EngineError::ShuttingDown);
        }
        if self.is_draining() { Err(EngineError::Draining) } else { Ok(()) }
    }

    /// Lets somebody in who makes something run, unless the daemon is being drained, or ends. Until what this answers is
    /// dropped, nobody is told that it is drained: so whoever was let in before the wish is seen by it (L21).
    pub(crate) fn begin_entry(self: &Arc<Self>) -> Result<Entering, EngineError> {
        self.entering.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let entering = Entering(self.clone());
        self.check_open().map(|()| entering)
    }

    /// Whether no new work is taken (L21).
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(std::sync::atomic::Ordering::SeqCst)
    }

    pub(crate) async fn load(&self, sandbox: &SandboxId) -> Result<Sandbox, EngineError> {
        let found = self.store.get(sandbox).await?;
        let found = found.ok_or_else(|| EngineError::NotFound { which: sandbox.to_string() })?;
        self.knowledge.meet(&found);
        Ok(found)
    }

    /// What somebody asks for. Who finds it locked by somebody else is told by whom, and nothing is recorded (L15).
    pub(crate) async fn ask(self: &Arc<Self>, aim: &Aim, event: &Event) -> Result<Applied, EngineError> {
        self.check_locks(aim.sandbox()).await?;
        self.apply_to(aim, event).await
    }

    /// Refuses what would cross somebody else's work. A lease that has lapsed stands in nobody's way.
    async fn check_locks(&self, sandbox: &SandboxId) -> Result<(), EngineError> {
        let (held, now_ms) = (self.store.leases(sandbox).await?, self.clock.now_ms());
        let ours = |lease: &Lease| lease.holder == self.config.holder;
        if let Some(other) = held.iter().find(|lease| !ours(lease) && lease.expires_at_ms > now_ms) {
            return Err(EngineError::Locked(Box::new(other.clone())));
        }
        // What we held was somebody else's meanwhile: what we do from now on has a greater token than theirs.
        let held = |token| held.iter().any(|lease| ours(lease) && lease.token == token);
        if self.knowledge.token(sandbox).is_some_and(|token| !held(token)) {
            self.knowledge.forget_token(sandbox);
        }
        Ok(())
    }

    /// What happened to a sandbox, in whichever generation: events that are about one say so themselves.
    pub(crate) async fn apply(self: &Arc<Self>, sandbox: &SandboxId, event: &Event) -> Result<Applied, EngineError> {
        self.apply_to(&Aim::from(sandbox), event).await
    }

    /// The one way by which a record changes: load, step, compare-and-set with the journal's line, tell who waits.
    async fn apply_to(self: &Arc<Self>, aim: &Aim, event: &Event) -> Result<Applied, EngineError> {
        for _ in 0..RACES_MAX {
            let before = self.load(aim.sandbox()).await?;
            self.check_aim(aim, &before)?;
            let now = self.now();
            let Accepted { next, happened } = match step(&before, event, now.moment()) {
                Stepped::Accepted(accepted) => *accepted,
                Stepped::Ignored(_) => return Ok(Applied::Same(Box::new(before))),
                Stepped::Denied(why) => return Err(denied(&before, why)),
            };
            let line = journal::line(event, &before, &next, happened, now.ms);
            let quota = if makes_run(happened) { self.quota(&next) } else { None };
            // What was saved has its row from the moment on that the record refers to it (L11).
            let rows = self.saved_row(&next, event).await?;
            // Who puts it to rest because nobody uses it is refused by who used it since it was read (L6).
            let unused_since_ms = matches!(event, Event::Rest { .. } | Event::MakeRoom { .. });
            let unused_since_ms = unused_since_ms.then_some(before.active_at_ms);
            let lines = if is_planted(Planted::MoveWithoutLine) { Vec::new() } else { vec![line] };
            match self.commit(next, lines, quota, unused_since_ms, rows).await {
                Ok(next) => {
                    // What it can do without now may be of no use to anybody any more.
                    for freed in before.uses().difference(&next.uses()) {
                        self.reconcilers.strays.watch(freed);
                    }
                    self.freed_snapshots(&next).await;
                    if let (Phase::Verifying { was_ready: true, .. }, Phase::Ready) = (&before.phase, &next.phase) {
                        self.follow_what_is_open(&next);
                    }
                    return Ok(Applied::Changed(Box::new(next)));
                }
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => return Err(other),
            }
        }
        Err(too_fast(aim.sandbox()))
    }

    /// A change of the record that is no step: labels, leases. The closure is asked again after a race; `None` is none.
    pub(crate) async fn amend(
        self: &Arc<Self>,
        aim: impl Into<Aim>,
        change: impl FnMut(&mut Sandbox) -> Option<viv_store::NewLine>,
    ) -> Result<Sandbox, EngineError> {
        self.amend_within(aim, |_| None, change).await
    }

    /// The same for what may be too much: it is counted in the transaction (L18).
    pub(crate) async fn amend_within(
        self: &Arc<Self>,
        aim: impl Into<Aim>,
        quota: impl Fn(&Sandbox) -> Option<Quota>,
        mut change: impl FnMut(&mut Sandbox) -> Option<viv_store::NewLine>,
    ) -> Result<Sandbox, EngineError> {
        let aim = aim.into();
        for _ in 0..RACES_MAX {
            let mut next = self.load(aim.sandbox()).await?;
            self.check_aim(&aim, &next)?;
            let Some(line) = change(&mut next) else { return Ok(next) };
            next.version += 1;
            let quota = quota(&next);
            match self.commit(next, vec![line], quota, None, Vec::new()).await {
                Ok(next) => return Ok(next),
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => return Err(other),
            }
        }
        Err(too_fast(aim.sandbox()))
    }

    /// Whether a gate is on for this one. Of what nobody knows, it is off only when it is off for everybody.
    pub(crate) fn is_gated(&self, gate: Gate, sandbox: &SandboxId) -> bool {
        let gates = &self.config.gates;
        match self.knowledge.project(sandbox) {
            Some(project) => gates.is_on(gate, &project, sandbox),
            None => !gates.is_off_everywhere(gate),
        }
    }

    /// The limits under which it may run, unless it is exempt (O9).
    pub(crate) fn quota(&self, sandbox: &Sandbox) -> Option<Quota> {
        let counts = self.config.gates.is_on(Gate::Quota, &sandbox.project, &sandbox.id);
        (counts && !is_planted(Planted::QuotaUncounted)).then_some(self.config.quota)
    }

    pub(crate) async fn commit(
        self: &Arc<Self>,
        next: Sandbox,
        lines: Vec<viv_store::NewLine>,
        quota: Option<Quota>,
        unused_since_ms: Option<u64>,
        snapshots: Vec<viv_core::snapshot::Snapshot>,
    ) -> Result<Sandbox, EngineError> {
        self.commit_change(Change { sandbox: next, lines, idempotency: None, quota, unused_since_ms, snapshots }).await
    }

    pub(crate) async fn commit_change(self: &Arc<Self>, change: Change) -> Result<Sandbox, EngineError> {
        let next = change.sandbox.clone();
        let committed = Box::pin(self.write(change)).await;
        committed
            .inspect_err(|error| self.doubt(error, &next.id))
            .map_err(EngineError::from)
            .inspect_err(|error| self.heed(error))?;
        self.committed(&next);
        Ok(next)
    }

    /// What a store that failed may have written all the same is looked at, and carried on: else nobody would before its
    /// phase is called stuck. In a moment and not at once: what is found then is written too, and fails as long as the
    /// store does.
    pub(crate) fn doubt(&self, error: &StoreError, sandbox: &SandboxId) {
        if matches!(error, StoreError::Unavailable { .. }) {
            self.timer.doubt(sandbox, self.clock.now_ms().saturating_add(STORE_PAUSE_MS));
            // It may have been put to rest, and nobody was told what that freed.
            self.reconcilers.strays.look_later(sandbox);
        }
    }

    /// Writes a change. What is refused because spares take the room for it waits for them to make some (L19).
    pub(crate) async fn write(&self, change: Change) -> Result<(), StoreError> {
        let counts = change.quota.is_some() && !change.sandbox.is_spare() && self.spares.is_kept();
        let again = counts.then(|| change.clone());
        match (self.write_once(change).await, again) {
            (Err(refused @ StoreError::Quota { .. }), Some(again)) => {
                Box::pin(self.write_when_spares_yield(again, refused)).await
            }
            (written, _) => written,
        }
    }

    /// Writes a change, and measures that.
    pub(crate) async fn write_once(&self, change: Change) -> Result<(), StoreError> {
        let began = tokio::time::Instant::now();
        let committed = self.store.commit(self.epoch, change).await;
        self.metrics.observe(&family::COMMIT_SECONDS, &[], began.elapsed().as_secs_f64());
        if matches!(committed, Err(StoreError::Quota { .. })) {
            self.metrics.count(&family::QUOTA_REFUSALS, &[]);
        }
        committed.map(drop)
    }

    /// The record is so now: whoever has to do with it hears of it.
    pub(crate) fn committed(self: &Arc<Self>, sandbox: &Sandbox) {
        self.attend(sandbox);
        if sandbox.is_spare() {
            self.notice_spare(sandbox);
        }
        self.tell_waiting(&sandbox.id);
        self.learn_of_lost(sandbox);
        if outstanding(sandbox).is_some() || sandbox.due_at_ms().is_some() {
            self.asked_here(&sandbox.id);
            self.wake(&sandbox.id);
        }
    }

    /// Whoever waits for this one looks at it again.
    pub(crate) fn tell_waiting(&self, sandbox: &SandboxId) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bell) = waiting.get(sandbox) {
            bell.notify_waiters();
        }
    }

    /// Sets its alarm and watches its instance, as its phase wants it.
    pub(crate) fn attend(self: &Arc<Self>, sandbox: &Sandbox) {
        let _attending = self.attending.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.knowledge.attend(sandbox) {
            return;
        }
        let idle_at_ms = self.idle_at_ms(sandbox);
        self.roster.attend(sandbox, idle_at_ms);
        self.timer.set(&sandbox.id, alarm_ms(sandbox, idle_at_ms, self.clock.now_ms()));
        // In verification, services are asked.
        if sandbox.phase == Phase::Ready {
            self.listen(sandbox);
        } else {
            self.listeners.forget(&sandbox.id);
        }
        if sandbox.phase.is_heard() {
            self.hear_inside(sandbox);
        } else {
            self.ears.forget(&sandbox.id);
        }
        match &sandbox.phase {
            Phase::Verifying { .. } | Phase::Ready | Phase::Frozen { .. } => self.watch(sandbox),
            // It may come back, and may end: both are found by who looks for it.
            Phase::Lost
            | Phase::Provisioning { .. }
            | Phase::Hibernating { .. }
            | Phase::Hibernated { .. }
            | Phase::Resuming { .. }
            | Phase::Failed { .. }
            | Phase::Stopping { .. } => self.watches.forget(&sandbox.id),
            Phase::Stopped => {
                self.watches.forget(&sandbox.id);
                self.knowledge.forget(&sandbox.id);
                self.deeds.forget(&sandbox.id);
                self.trace_ended_instance(&sandbox.id);
            }
        }
    }

    /// Rings when this sandbox changes. Ask before looking, so that no change is missed between.
    pub(crate) fn bell(&self, sandbox: &SandboxId) -> Arc<Notify> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that nobody holds any more are of no use; looked at now and then, so it costs next to nothing.
        if waiting.len() >= 64 && waiting.len().is_power_of_two() {
            waiting.retain(|_, bell| Arc::strong_count(bell) > 1);
        }
        waiting.entry(sandbox.clone()).or_default().clone()
    }

    fn spawn_timer(self: &Arc<Self>) {
        let inner = self.clone();
        let mut ending = self.ending();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    biased;
                    _ = ending.changed() => return,
                    sandbox = inner.timer.next(&inner.clock) => inner.wake(&sandbox),
                }
            }
        });
    }

    /// Waits a moment, or until the daemon ends.
    pub(crate) async fn pause(&self, how_long: Duration) {
        let mut ending = self.ending();
        tokio::select! {
            biased;
            _ = ending.changed() => {}
            () = tokio::time::sleep(how_long) => {}
        }
    }
}

/// Whether something is to run that did not, so that there has to be room for it (L18). What is made again while
/// somebody waits for it has its room already.
fn makes_run(happened: Happened) -> bool {
    match happened {
        Happened::Moved {
            from: PhaseName::Hibernated | PhaseName::Lost | PhaseName::Failed,
            to: PhaseName::Provisioning | PhaseName::Resuming,
        } => true,
        Happened::Moved { .. } | Happened::Wanted | Happened::Advanced | Happened::Retrying | Happened::Overdue => {
            false
        }
    }
}

/// Somebody else changed the record every time.
pub(crate) fn too_fast(sandbox: &SandboxId) -> EngineError {
    EngineError::Store(StoreError::Unavailable { what: format!("{sandbox} changes faster than it can be read") })
}

/// When a sandbox has to be looked at without anybody asking.
fn alarm_ms(sandbox: &Sandbox, idle_at_ms: Option<u64>, now_ms: u64) -> Option<u64> {
    let expiry_ms = sandbox.lives_until_ms().map(|at_ms| {
        // One that has passed and is not settled yet is looked at again, and not without end.
        at_ms.saturating_add(EXPIRY_SLACK_MS).max(now_ms.saturating_add(EXPIRY_AGAIN_MS))
    });
    // Nor one that is idle by its record, and of which it could not be learnt whether something runs in it.
    let idle_ms = idle_at_ms.map(|at_ms| if at_ms > now_ms { at_ms } else { now_ms.saturating_add(IDLE_AGAIN_MS) });
    // One that is late because it could not be performed is tried again, and not without end.
    let hook_ms = crate::hook::timeout_hook_at_ms(sandbox);
    let hook_ms = hook_ms.map(|at_ms| if at_ms > now_ms { at_ms } else { now_ms.saturating_add(EXPIRY_AGAIN_MS) });
    [sandbox.due_at_ms(), expiry_ms, idle_ms, hook_ms].into_iter().flatten().min()
}
