//! One simulated world: a seed, and all that happens in it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use viv_core::exec::ExecSpec;
use viv_core::lifecycle::{Actor, Desired, EVIDENCE_MS_MAX, EntryKind, Finding, FreezeStep, Phase, Sandbox, Status};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{EndCause, Generation, SandboxId};
use viv_engine::{Clock, CreateRequest, Engine, EngineConfig, EngineError, Gates, KeyedBy, Which};
use viv_provider::sim::{SimClock, SimProvider};
use viv_provider::{InstanceRef, InstanceState, PageRequest, Provider};
use viv_store::memory::Fault as StoreFault;
use viv_store::{ListQuery, MemoryStore, Owner, Store};

use crate::faulty::{Damage, FaultyProvider};
use crate::rng::Rng;

/// Some time in the past, so that times look like times.
const EPOCH_MS: u64 = 1_700_000_000_000;

/// How fine the simulated provider's time is.
const TICK_MS: u64 = 250;

/// Most sandboxes in a world: enough to get into each other's way.
pub(crate) const SANDBOXES_MAX: usize = 6;

/// Within this after faults have stopped, everything is at rest (P3): a phase may time out, be tried again, and time out.
const REST_WITHIN: Duration = Duration::from_secs(12 * 60);

/// For this long nothing changes from then on.
const REST_FOR: Duration = Duration::from_secs(10 * 60);

/// How a world is made.
#[derive(Debug, Clone)]
pub struct Plan {
    /// From this everything follows.
    pub seed: u64,
    /// How many things happen.
    pub steps: u64,
    /// How many calls in a hundred go wrong.
    pub faults_percent: u64,
    /// Which protections are on.
    pub gates: Gates,
}

/// What came of a world.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Sandboxes that were created.
    pub created: u64,
    /// Times that one was seen ready.
    pub ready: u64,
    /// Daemons that crashed.
    pub crashes: u64,
    /// Instances that were damaged.
    pub damaged: u64,
    /// Changes that were asked of the provider.
    pub mutations: u64,
    /// A hash of everything that was recorded, to compare runs.
    pub trace: u64,
}

/// What must not have been.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Where.
    pub seed: u64,
    /// When.
    pub step: u64,
    /// The rule.
    pub rule: &'static str,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {} step {}: {}: {}", self.seed, self.step, self.rule, self.what)
    }
}

/// Runs a world from its beginning to its rest.
pub fn run(plan: &Plan) -> Result<Report, Violation> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O").block_on(async { World::new(plan).await.live().await })
}

/// What a client knows of a sandbox because it was answered.
#[derive(Debug, Default)]
pub(crate) struct Promise {
    /// The highest generation that was shown.
    generation: Option<Generation>,
    /// What a client holds, and may have held for long.
    handle: Option<Generation>,
    /// A stop of what is not persistent, or a delete, was acknowledged in this generation.
    ended: Option<Generation>,
    deleted: bool,
    /// The body and key of its create.
    key: Option<String>,
    /// By which rules it lives (L16).
    policy: Option<Policy>,
    /// Whether somebody wanted it to run since it was last at rest (L4).
    pub(crate) entered: bool,
    /// Since when only its agent hangs, and in which generation: it is not replaced unasked (T7).
    pub(crate) hangs: Option<Generation>,
    /// Somebody asked for another instance by going back; it may come whenever what was under way has ended.
    pub(crate) goes_back: bool,
}

pub(crate) struct World<'p> {
    plan: &'p Plan,
    step: u64,
    pub(crate) rng: Rng,
    draws: Arc<Mutex<Rng>>,
    sim_clock: SimClock,
    clock: Clock,
    pub(crate) provider: FaultyProvider,
    pub(crate) store: MemoryStore,
    engine: Option<Engine>,
    daemons: u64,
    pub(crate) known: BTreeMap<SandboxId, Promise>,
    report: Report,
}

impl<'p> World<'p> {
    async fn new(plan: &'p Plan) -> Self {
        let sim_clock = SimClock::starting_at(EPOCH_MS);
        // The provider's time follows tokio's, in small steps, so that whoever waits for either sees one order.
        let ticking = sim_clock.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(TICK_MS)).await;
                ticking.advance(TICK_MS);
            }
        });
        let mut rng = Rng::new(plan.seed);
        let provider = FaultyProvider::new(SimProvider::new(sim_clock.clone()), rng.next_u64(), plan.faults_percent);
        let draws = Arc::new(Mutex::new(Rng::new(rng.next_u64())));
        let mut world = Self {
            plan,
            step: 0,
            rng,
            draws,
            sim_clock,
            clock: Clock::showing(EPOCH_MS),
            provider,
            store: MemoryStore::new(),
            engine: None,
            daemons: 0,
            known: BTreeMap::new(),
            report: Report::default(),
        };
        world.begin().await;
        world
    }

    /// A daemon begins: the first one, or one after a crash.
    async fn begin(&mut self) {
        self.daemons += 1;
        let owner = Owner {
            name: format!("daemon {}", self.daemons),
            boot_id: "simulated".to_owned(),
            pid: self.daemons as u32,
            start_ticks: 0,
            epoch: 0,
            since_ms: self.sim_clock.now_ms(),
        };
        let mut config = EngineConfig::new("sim".parse().expect("a mark"), owner.name.clone());
        config.gates = self.plan.gates.clone();
        // A store that fails keeps a daemon from beginning; then it is started again.
        let engine = loop {
            let Ok(epoch) = self.store.own(owner.clone()).await else { continue };
            let draws = self.draws.clone();
            let draw = move || draws.lock().unwrap_or_else(PoisonError::into_inner).bytes();
            let (store, provider) = (Arc::new(self.store.clone()), Arc::new(self.provider.clone()));
            if let Ok(engine) = Engine::start(config.clone(), store, provider, epoch, self.clock, draw).await {
                break engine;
            }
        };
        self.engine = Some(engine);
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("a daemon is always there")
    }

    async fn live(mut self) -> Result<Report, Violation> {
        self.store_faults(true);
        while self.step < self.plan.steps {
            self.step += 1;
            self.happen().await?;
            self.check().await?;
        }
        self.rest().await?;
        Ok(self.report)
    }

    /// Some writes of the store fail, before or after their effect.
    fn store_faults(&mut self, on: bool) {
        if !on {
            self.store.set_faults(None);
            return;
        }
        let mut rng = Rng::new(self.rng.next_u64());
        let percent = self.plan.faults_percent / 4;
        self.store.set_faults(Some(Box::new(move |_| {
            if !rng.chance(percent) {
                return None;
            }
            Some(if rng.chance(50) { StoreFault::Before } else { StoreFault::After })
        })));
    }

    pub(crate) fn violated(&self, rule: &'static str, what: impl Into<String>) -> Violation {
        Violation { seed: self.plan.seed, step: self.step, rule, what: what.into() }
    }

    fn someone(&mut self) -> Option<SandboxId> {
        let count = self.known.len() as u64;
        let at = self.rng.below(count) as usize;
        self.known.keys().nth(at).cloned()
    }

    async fn pass(&self, ms: u64) {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    /// One thing happens.
    async fn happen(&mut self) -> Result<(), Violation> {
        let what = self.rng.below(100);
        let someone = self.someone();
        match (what, someone) {
            (0..15, _) if self.known.len() < SANDBOXES_MAX => self.create().await?,
            (0..30, Some(id)) => self.ensure(&id).await?,
            (30..36, Some(id)) => self.stop(&id).await?,
            (36..40, Some(id)) => self.delete(&id).await?,
            (40..52, Some(id)) => self.read(&id).await?,
            (52..58, Some(id)) => self.execute(&id).await?,
            (58..61, Some(id)) => {
                let engine = self.engine().clone();
                if let Ok(handle) = engine.work_in(&Project::default(), &Which::Id(id), None).await {
                    let _ = engine.extend(&handle, viv_provider::DeadlineChange::AtLeastMs(600_000), &somebody()).await;
                }
            }
            (61..67, Some(id)) => self.crash_instance(&id),
            (67..72, Some(id)) => self.hang(&id).await,
            (72..75, Some(id)) => {
                self.report.damaged += 1;
                self.provider.damage(&id, Some(Damage::Rootless));
                self.known.entry(id).or_default().hangs = None;
            }
            (75..78, Some(id)) => self.provider.damage(&id, None),
            (78..81, _) => self.crash_daemon().await,
            (81..84, _) => self.engine().reconcile(),
            (84..87, Some(id)) => drop(self.engine().freeze(&id, somebody()).await),
            (87..88, Some(id)) => self.thaw(&id).await?,
            (88..90, Some(id)) => self.hibernate(&id).await?,
            (90..91, Some(id)) => drop(self.engine().retry_save(&id, somebody()).await),
            (91..92, Some(id)) => drop(self.engine().discard(&id, somebody()).await),
            (92..97, Some(id)) => self.snapshots(&id, what - 92).await,
            _ => {
                let ms = match self.rng.below(4) {
                    0 => self.rng.below(200),
                    1 => self.rng.below(5_000),
                    2 => self.rng.below(40_000),
                    _ => self.rng.below(120_000),
                };
                self.pass(ms).await;
            }
        }
        // Others get their turn before anybody looks.
        let ms = self.rng.below(400);
        self.pass(ms).await;
        Ok(())
    }

    async fn create(&mut self) -> Result<(), Violation> {
        let key = format!("key-{}", self.report.created);
        self.report.created += 1;
        let lifetime_ms = if self.rng.chance(30) { 60_000 + self.rng.below(120_000) } else { 3_600_000 };
        let persistent = self.rng.chance(30);
        // Those that idle at all do so soon enough to be seen, and are done with it when everything has to rest.
        let window_ms = |rng: &mut Rng| if rng.chance(50) { 5_000 + rng.below(80_000) } else { 24 * 3_600_000 };
        let (idle_ms, hibernate_ms) = (window_ms(&mut self.rng), window_ms(&mut self.rng));
        let policy = Policy { persistent, lifetime_ms, idle_ms, hibernate_ms, ..Policy::default_for(None) };
        let request = CreateRequest {
            project: Project::default(),
            name: None,
            spec: SandboxSpec::default(),
            policy: policy.clone(),
            labels: BTreeMap::new(),
            snapshot: None,
            by: somebody(),
            key: Some(KeyedBy { key: key.clone(), body_hash: [7; 32] }),
        };
        // A client that got no answer asks again with the same key, as clients do.
        let mut seen: Option<SandboxId> = None;
        for _ in 0..=self.rng.below(3) {
            match self.engine().create(request.clone()).await {
                Ok(created) => {
                    let id = created.view.sandbox.id.clone();
                    if seen.as_ref().is_some_and(|before| *before != id) {
                        return Err(self.violated("L1", format!("one key made {seen:?} and {id}")));
                    }
                    seen = Some(id.clone());
                    let promise = self.known.entry(id).or_default();
                    promise.key = Some(key.clone());
                    promise.policy = Some(policy.clone());
                    promise.entered = true;
                }
                Err(EngineError::Store(_)) => {}
                Err(other) => return Err(self.violated("S5", format!("a create was refused: {other}"))),
            }
        }
        Ok(())
    }

    async fn ensure(&mut self, id: &SandboxId) -> Result<(), Violation> {
        let engine = self.engine().clone();
        let asked = engine.ensure(id, EntryKind::Ensure, somebody()).await;
        let promise = self.known.entry(id.clone()).or_default();
        // Also when the answer was lost.
        promise.entered = true;
        if asked.is_ok() {
            // Somebody asked: what is lost may be made again.
            promise.hangs = None;
        }
        if asked.is_ok() && promise.ended.is_some() {
            let what = format!("{id} was stopped for good, and an ensure was taken");
            return Err(self.violated("L9", what));
        }
        if self.rng.chance(50)
            && asked.is_ok()
            && let Ok(view) = engine.wait_ready(id, Duration::from_secs(60)).await
            && view.sandbox.phase == Phase::Ready
        {
            self.report.ready += 1;
        }
        Ok(())
    }

    async fn thaw(&mut self, id: &SandboxId) -> Result<(), Violation> {
        let before = self.store.get(id).await.ok().flatten();
        let thawed = self.engine().thaw(id, somebody()).await;
        let promise = self.known.entry(id.clone()).or_default();
        promise.entered = true;
        if let (Ok(view), Some(before)) = (thawed, before) {
            promise.hangs = None;
            if view.sandbox.generation != before.generation {
                return Err(self.violated("T5", format!("{id}: a thaw made another generation")));
            }
        }
        Ok(())
    }

    async fn hibernate(&mut self, id: &SandboxId) -> Result<(), Violation> {
        let before = self.store.get(id).await.ok().flatten();
        let hibernated = self.engine().hibernate(id, somebody()).await;
        if let (Ok(view), Some(before)) = (hibernated, before) {
            if !view.sandbox.policy.persistent {
                return Err(self.violated("L2", format!("{id} is not persistent, and is to be saved")));
            }
            if view.sandbox.held && !before.held {
                return Err(self.violated("L9", format!("{id} is held, and nobody stopped it")));
            }
        }
        Ok(())
    }

    async fn stop(&mut self, id: &SandboxId) -> Result<(), Violation> {
        if let Ok(view) = self.engine().stop(id, somebody()).await {
            let promise = self.known.entry(id.clone()).or_default();
            if !view.sandbox.policy.persistent {
                promise.ended.get_or_insert(view.sandbox.generation);
            }
            if view.sandbox.desired == Desired::Running {
                return Err(self.violated("L8", format!("{id} was stopped and is wanted to run")));
            }
        }
        Ok(())
    }

    async fn delete(&mut self, id: &SandboxId) -> Result<(), Violation> {
        match self.engine().delete(id, somebody()).await {
            Ok(view) => {
                let promise = self.known.entry(id.clone()).or_default();
                promise.deleted = true;
                promise.ended.get_or_insert(view.sandbox.generation);
                Ok(())
            }
            Err(EngineError::Store(_)) => Ok(()),
            Err(other) => Err(self.violated("L20", format!("a delete of {id} was refused: {other}"))),
        }
    }

    /// What is read is checked as a client would.
    async fn read(&mut self, id: &SandboxId) -> Result<(), Violation> {
        let engine = self.engine().clone();
        let view = if self.rng.chance(30) {
            engine.verify(id).await
        } else {
            engine.get(&Project::default(), &Which::Id(id.clone()), "a client").await
        };
        let Ok(view) = view else { return Ok(()) };
        if view.status == Status::Ready {
            let age_ms = view.evidence.at_ms().map(|at_ms| view.now_ms.saturating_sub(at_ms));
            if view.evidence.finding() != Some(Finding::Ok) || age_ms.is_none_or(|age_ms| age_ms > EVIDENCE_MS_MAX) {
                return Err(self.violated("T2", format!("{id} is called ready on {:?}", view.evidence)));
            }
            let instance = InstanceRef { sandbox: id.clone(), generation: view.sandbox.generation };
            let truth = self.provider.truth().observe(&instance).await;
            // The end of an instance is pushed: a tick later nobody is told that it is ready.
            if let Ok(seen) = truth
                && let InstanceState::Ended(ended) = &seen.state
                && self.sim_clock.now_ms().saturating_sub(ended.at_ms) > 1_000 + 2 * TICK_MS
                && self.plan.faults_percent == 0
            {
                return Err(self.violated("T3", format!("{id} is called ready and has {}", seen.state)));
            }
        }
        Ok(())
    }

    async fn execute(&mut self, id: &SandboxId) -> Result<(), Violation> {
        let engine = self.engine().clone();
        // A handle may be generations behind: a client renews it now and then.
        let asked = self.known.get(id).and_then(|promise| promise.handle).filter(|_| self.rng.chance(70));
        match engine.work_in(&Project::default(), &Which::Id(id.clone()), asked).await {
            Ok(handle) => {
                if asked.is_some_and(|asked| asked != handle.generation()) {
                    return Err(self.violated("T5", format!("{id}: an old handle was given a new instance")));
                }
                self.known.entry(id.clone()).or_default().handle = Some(handle.generation());
                let argv = vec!["echo".to_owned(), "hello".to_owned()];
                let spec = ExecSpec { argv, ..ExecSpec::default() };
                let _ = handle.execute(&handle.new_execution(), &spec).await;
            }
            Err(EngineError::StaleHandle { asked, current, .. }) if asked > current => {
                return Err(self.violated("T5", format!("{id}: generation {asked} was shown, and is {current} now")));
            }
            Err(_) => {}
        }
        Ok(())
    }

    fn crash_instance(&mut self, id: &SandboxId) {
        let causes = [
            EndCause::OomKilled,
            EndCause::DiskFull { what: "all of it".to_owned() },
            EndCause::Signalled { signal: 9 },
            EndCause::SupervisorLost,
            EndCause::AgentLost,
            EndCause::Exited { code: 1 },
        ];
        let cause = causes[self.rng.below(causes.len() as u64) as usize].clone();
        self.known.entry(id.clone()).or_default().hangs = None;
        if self.provider.crash(id, cause) {
            self.report.damaged += 1;
        }
    }

    async fn hang(&mut self, id: &SandboxId) {
        let Ok(Some(record)) = self.store.get(id).await else { return };
        self.report.damaged += 1;
        self.provider.damage(id, Some(Damage::Hangs));
        if record.phase == Phase::Ready {
            self.known.entry(id.clone()).or_default().hangs = Some(record.generation);
        }
    }

    /// The daemon is killed where it is, and another one begins.
    async fn crash_daemon(&mut self) {
        self.report.crashes += 1;
        if let Some(engine) = self.engine.take() {
            engine.shut_down();
        }
        let ms = self.rng.below(20_000);
        self.pass(ms).await;
        self.begin().await;
    }

    /// What must hold now, whatever happened.
    async fn check(&mut self) -> Result<(), Violation> {
        for record in self.records().await {
            let Some(promise) = self.known.get_mut(&record.id) else {
                // Made by a create whose answer was lost, or forked; somebody wanted it all the same.
                self.known.insert(record.id.clone(), Promise { entered: true, ..Promise::default() });
                continue;
            };
            let before = promise.generation.replace(record.generation);
            let (ended, deleted) = (promise.ended, promise.deleted);
            let hangs = promise.hangs.filter(|_| !promise.goes_back);
            let (entered, policy) = (promise.entered, promise.policy.clone());
            let waits = record.entry.is_some() || record.phase.work().is_some();
            promise.entered = entered && waits;
            if before.is_some_and(|before| before < record.generation) && !entered {
                return Err(self.violated("L4", format!("{} was made again, and nobody wanted it", record.id)));
            }
            if policy.is_some_and(|policy| policy != record.policy) {
                return Err(self.violated("L16", format!("{} lives by {:?} now", record.id, record.policy)));
            }
            if before.is_some_and(|before| before > record.generation) {
                return Err(self.violated("T5", format!("{}: {before:?} became {}", record.id, record.generation)));
            }
            if ended.is_some_and(|ended| record.generation > ended)
                || (ended.is_some() && record.desired != Desired::Gone)
            {
                return Err(
                    self.violated("L9", format!("{} was stopped for good and is {:?}", record.id, record.phase))
                );
            }
            if deleted && !record.deleted {
                return Err(self.violated("L9", format!("{} was deleted and is not", record.id)));
            }
            if hangs.is_some_and(|generation| record.generation > generation) && record.entry.is_none() {
                let what = format!("{} only hung, and was replaced unasked", record.id);
                return Err(self.violated("T7", what));
            }
            self.check_absence(&record).await?;
        }
        Ok(())
    }

    /// What is recorded as gone is gone (L8, L20).
    async fn check_absence(&self, record: &Sandbox) -> Result<(), Violation> {
        let rule = match &record.phase {
            Phase::Stopped => "L8",
            Phase::Hibernated { .. } => "L10",
            Phase::Failed { work: None } => "J5",
            Phase::Provisioning { .. }
            | Phase::Verifying { .. }
            | Phase::Ready
            | Phase::Frozen { .. }
            | Phase::Hibernating { .. }
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { work: Some(_) }
            | Phase::Stopping { .. } => return Ok(()),
        };
        let there = self.instances().await;
        match there.get(&record.id) {
            Some(state) => Err(self.violated(rule, format!("{} is {:?} and there: {state}", record.id, record.phase))),
            None => Ok(()),
        }
    }

    pub(crate) async fn records(&self) -> Vec<Sandbox> {
        let query = ListQuery { deleted: true, limit: 1_000, ..ListQuery::default() };
        loop {
            if let Ok(listing) = self.store.list(&query).await {
                return listing.items;
            }
        }
    }

    /// What is really there.
    async fn instances(&self) -> BTreeMap<SandboxId, InstanceState> {
        let owner = self.engine().config().owner.clone();
        let mut there = BTreeMap::new();
        let mut page = PageRequest::default();
        loop {
            let listed = self.provider.truth().list(&owner, page).await.expect("the truth is always told");
            there.extend(listed.items.into_iter().map(|item| (item.instance.sandbox, item.state)));
            let Some(next) = listed.next else { return there };
            page = PageRequest { cursor: Some(next), limit: None };
        }
    }

    /// Faults stop: in bounded time everything is at rest, and stays so without anybody asking (P3).
    async fn rest(&mut self) -> Result<(), Violation> {
        self.store_faults(false);
        self.provider.heal();
        tokio::time::sleep(REST_WITHIN).await;
        self.check().await?;
        for record in self.records().await {
            let at_rest = matches!(
                (&record.desired, &record.phase),
                (Desired::Running | Desired::Hibernated, Phase::Lost | Phase::Failed { work: None })
                    | (Desired::Running, Phase::Ready | Phase::Frozen { step: FreezeStep::Done })
                    | (Desired::Hibernated, Phase::Hibernated { .. })
                    | (Desired::Gone, Phase::Stopped)
            );
            if !at_rest {
                let what = format!("{} is wanted {:?} and is {:?}", record.id, record.desired, record.phase);
                return Err(self.violated("P3", what));
            }
        }
        let there = self.instances().await;
        let recorded: BTreeMap<SandboxId, Sandbox> =
            self.records().await.into_iter().map(|record| (record.id.clone(), record)).collect();
        if let Some((orphan, _)) = there.iter().find(|(id, _)| !recorded.contains_key(*id)) {
            return Err(self.violated("J1", format!("{orphan} is there and nobody knows it")));
        }
        let stats = self.engine().stats(None).await.map_err(|error| self.violated("P3", error.to_string()))?;
        if stats.drivers != 0 {
            return Err(self.violated("P3", format!("{} drivers are at work and nothing is to be done", stats.drivers)));
        }
        self.check_snapshots().await?;
        self.report.mutations = self.provider.mutations();
        let cursor = *self.store.tail().borrow();
        // Instances end at their hard deadline in this time: what lives long enough to rest is what must not be touched.
        let ends = recorded.values().filter_map(|record| record.expires_at_ms);
        let idles = recorded.values().filter_map(|record| record.idle_at_ms(true));
        let soonest_ms = ends.chain(idles).min().unwrap_or(u64::MAX);
        let left_ms = soonest_ms.saturating_sub(self.sim_clock.now_ms() + 5_000);
        tokio::time::sleep(REST_FOR.min(Duration::from_millis(left_ms))).await;
        if self.provider.mutations() != self.report.mutations {
            return Err(self.violated("P3", "something was changed at rest"));
        }
        if *self.store.tail().borrow() != cursor {
            return Err(self.violated("P3", "something was recorded at rest"));
        }
        self.report.trace = self.trace().await;
        Ok(())
    }

    /// A hash of the whole journal: the same for the same seed.
    async fn trace(&self) -> u64 {
        let lines = self.store.journal(viv_store::Cursor(0), &viv_store::JournalFilter::default(), usize::MAX).await;
        let text = format!("{:?}", lines.unwrap_or_default());
        text.bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }
}

pub(crate) fn somebody() -> Actor {
    Actor::part("somebody")
}
