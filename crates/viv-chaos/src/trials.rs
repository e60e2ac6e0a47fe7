//! One scenario for each gate: what it protects holds with it, and is found broken without it (P2).

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use viv_core::exec::{ExecSpec, ExecState};
use viv_core::lifecycle::{Actor, EntryKind, Phase, PhaseName, Sandbox, Status};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::task::{EffectRule, MakeSandbox, NewTask, Task, TaskLimits, TaskState};
use viv_core::{EndCause, FencingToken, Generation, OperationId, SandboxId};
use viv_engine::{
    Clock, CreateRequest, CreateTask, Engine, EngineConfig, EngineError, Gate, GateSetting, Gates, Which,
};
use viv_provider::conformance::program::Program;
use viv_provider::sim::{SimClock, SimProvider};
use viv_provider::{
    DeadlineChange, Image, InstanceRef, InstanceSpec, InstanceState, Mutation, Network, Provider, Recall,
    ResourceLimits,
};
use viv_store::{MemoryStore, Owner, Quota, Store};

use crate::faulty::{Damage, FaultyProvider};
use crate::rng::Rng;

const EPOCH_MS: u64 = 1_700_000_000_000;
const TICK_MS: u64 = 50;
const LONG: Duration = Duration::from_secs(120);

/// What is broken, in words.
type Broken = Result<(), String>;
type Running = Pin<Box<dyn Future<Output = Broken>>>;

/// A scenario for a gate.
#[derive(Clone, Copy)]
pub struct Trial {
    /// The gate.
    pub gate: Gate,
    /// The rule that it protects.
    pub rule: &'static str,
    /// What happens, and has to come out.
    pub says: &'static str,
    run: fn(Gates) -> Running,
}

impl std::fmt::Debug for Trial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trial").field("gate", &self.gate).finish_non_exhaustive()
    }
}

macro_rules! trials {
    ($($gate:ident $rule:literal $run:ident $says:literal;)*) => {
        /// One for each gate.
        pub const TRIALS: &[Trial] =
            &[$(Trial { gate: Gate::$gate, rule: $rule, says: $says, run: |gates| Box::pin($run(gates)) },)*];
    };
}

trials! {
    ProbeBeforeUse "T4" probe_before_use "a daemon is followed by another while a root is lost: who comes with a handle is not let in";
    GenerationCheck "T5" generation_check "a sandbox was replaced: a handle of the first generation is refused";
    EvidenceAges "T3" evidence_ages "nobody looked for a minute: it is not shown as ready on that";
    PushedEnds "T3" pushed_ends "an instance ends: two seconds later it is not shown as ready";
    OrphanGrace "J1" orphan_grace "an instance without a record is listed three times in five seconds: it stays";
    TwoListings "J1" two_listings "without a grace, an instance without a record is listed once: it stays";
    Breaker "J7" breaker "nobody answers for a minute, eight clients ask on: they are answered without asking";
    Quota "L18" quota "two may live: the third is refused";
    FreshExpiry "T6" fresh_expiry "a deadline was moved, and the record does not know: it runs on past the old one";
    ActivityFilter "L6" activity_filter "a screen shows it every second: it goes to rest all the same";
    EntryOnlyResume "L4" entry_only_resume "it is hibernated: who comes with a handle is refused, and it stays so";
    ProviderTruth "T1" provider_truth "what is frozen has ended, and nobody heard: it is not shown as frozen after a comparison";
    DurableStop "K2" durable_stop "a task is stopped, and the daemon dies: the next one stops it";
    PushedCancellation "K3" pushed_cancellation "a task is stopped in a long step: it is over within five seconds";
    InactivityLimit "K4" inactivity_limit "a step is silent for longer than it may be: it is ended";
    AuthoritativeTimeout "K4" authoritative_timeout "a task took too long: nothing of it runs when it is over";
    EffectsGate "K5" effects_gate "a task asks for an effect that it did not declare: it is refused";
}

/// What worlds find broken without each gate, and from which seed on they are looked at: the first at which it is found is
/// not far.
pub const IN_WORLDS: &[(Gate, u64, &[&str])] = &[
    (Gate::ProbeBeforeUse, 2, &["probed-before-use"]),
    (Gate::GenerationCheck, 1, &["old-handles-are-refused", "verbs-reach-what-they-name"]),
    (Gate::EvidenceAges, 1, &["ready-is-shown-on-evidence"]),
    (Gate::PushedEnds, 6, &["ends-are-shown"]),
    (Gate::OrphanGrace, 25, &["strays-have-grace"]),
    (Gate::TwoListings, 7, &["strays-have-grace"]),
    (Gate::Breaker, 4, &["left-alone"]),
    (Gate::Quota, 2, &["quota-holds"]),
    (Gate::FreshExpiry, 139, &["expiry-is-fetched"]),
    (Gate::ActivityFilter, 4, &["unused-goes-to-rest", "stopped-is-the-end"]),
    (Gate::EntryOnlyResume, 1, &["a-reconnect-joins", "old-handles-are-refused"]),
    (Gate::ProviderTruth, 676, &["rest-is-real", "lost-is-not-there"]),
    (Gate::DurableStop, 10, &["stops-of-tasks-are-durable"]),
    (Gate::PushedCancellation, 3, &["stops-of-tasks-are-soon"]),
    (Gate::InactivityLimit, 387, &["silent-tasks-end"]),
    (Gate::AuthoritativeTimeout, 1, &["over-tasks-run-nothing"]),
    (Gate::EffectsGate, 3, &["grants-are-declared"]),
];

/// Switches these off for everybody.
pub fn off(gates: &[Gate]) -> Gates {
    let all = Gates::default();
    let setting = GateSetting::off;
    all.replace(gates.iter().map(|gate| (*gate, setting())).collect());
    all
}

/// Runs the scenario of a gate, with these switches: what is broken, if anything.
pub fn trial(trial: &Trial, gates: Gates) -> Broken {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O").block_on((trial.run)(gates))
}

/// An engine without faults but those that a scenario asks for.
struct Yard {
    engine: Engine,
    provider: FaultyProvider,
    store: MemoryStore,
    clock: Clock,
    daemons: u32,
}

impl Yard {
    async fn new(gates: Gates, set_up: impl FnOnce(&mut EngineConfig)) -> Self {
        let sim = SimClock::starting_at(EPOCH_MS);
        let ticking = sim.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(TICK_MS)).await;
                ticking.advance(TICK_MS);
            }
        });
        let (store, provider) = (MemoryStore::new(), FaultyProvider::new(SimProvider::new(sim), 1, 0));
        let clock = Clock::showing(EPOCH_MS);
        let engine = begin(1, &store, &provider, clock, gates, set_up).await;
        Self { engine, provider, store, clock, daemons: 1 }
    }

    /// Another daemon takes over what this one left.
    async fn followed(&mut self, gates: Gates) {
        self.engine.shut_down();
        self.daemons += 1;
        self.engine = begin(self.daemons, &self.store, &self.provider, self.clock, gates, |_| {}).await;
    }

    async fn made(&self, policy: Policy) -> SandboxId {
        let created = self.engine.create(request(policy)).await.expect("a sandbox");
        let id = created.view.sandbox.id;
        self.ready(&id).await;
        id
    }

    async fn ready(&self, id: &SandboxId) {
        let view = self.engine.wait_ready(id, LONG).await.expect("an answer");
        assert_eq!(view.sandbox.phase, Phase::Ready, "it comes up, whatever is switched off");
    }

    async fn record(&self, id: &SandboxId) -> Sandbox {
        self.store.get(id).await.expect("an answer").expect("a record")
    }

    async fn status(&self, id: &SandboxId) -> Status {
        let which = Which::Id(id.clone());
        self.engine.get(&Project::default(), &which, "somebody").await.expect("an answer").status
    }

    async fn settled(&self, id: &SandboxId) -> PhaseName {
        self.engine.wait_settled(id, LONG).await.expect("an answer").sandbox.phase.name()
    }

    async fn stray(&self) -> InstanceRef {
        let sandbox = SandboxId::from_bytes([9; 16]);
        let mutation = Mutation {
            operation: OperationId::from_bytes([9; 16]),
            generation: Generation::FIRST,
            token: FencingToken(0),
            budget_ms: 10_000,
        };
        let spec = InstanceSpec {
            image: Image::default(),
            limits: ResourceLimits::default(),
            network: Network::default(),
            env: BTreeMap::new(),
            workdir: "/workspace".to_owned(),
            packages: false,
            labels: BTreeMap::new(),
            lifetime_ms: 86_400_000,
            recall: Recall::Never,
        };
        let owner = &self.engine.config().owner;
        self.provider.truth().create(&mutation, &sandbox, owner, &spec).await.expect("an instance");
        InstanceRef { sandbox, generation: Generation::FIRST }
    }

    async fn lives(&self, instance: &InstanceRef) -> bool {
        let seen = self.provider.truth().observe(instance).await.expect("an answer");
        seen.state == InstanceState::Running
    }

    async fn task(&self, steps: Vec<ExecSpec>, limits: TaskLimits) -> Task {
        let policy = persistent();
        let make =
            MakeSandbox { name: None, spec: SandboxSpec::default(), policy, labels: BTreeMap::new(), snapshot: None };
        let new = NewTask {
            id: self.engine.new_task_id(),
            project: Project::default(),
            sandbox: None,
            make: Some(Box::new(make)),
            files: Vec::new(),
            source: None,
            steps,
            limits,
            effects: vec![EffectRule { name: "push".to_owned(), repeatable: false }],
            credentials: BTreeMap::new(),
            keep_alive: true,
            by: somebody(),
            body_hash: None,
        };
        let task = self.engine.create_task(CreateTask { new, keyed: false }).await.expect("a task").task;
        let runs = |task: &Task| task.times.started_at_ms.is_some() || task.state.is_final();
        self.engine.wait_task(&task.id, LONG, runs).await.expect("an answer")
    }

    async fn over(&self, task: &Task, within: Duration) -> Task {
        self.engine.wait_task(&task.id, within, |task| task.state.is_final()).await.expect("an answer")
    }

    /// How many of a task's executions run, really.
    async fn running(&self, task: &Task) -> usize {
        let mut running = 0;
        for execution in &task.executions {
            let instance = InstanceRef { sandbox: task.sandbox.clone(), generation: execution.generation };
            let seen = self.provider.truth().execution(&instance, &execution.id).await;
            running += usize::from(seen.is_ok_and(|seen| seen.state == ExecState::Running));
        }
        running
    }
}

async fn begin(
    number: u32,
    store: &MemoryStore,
    provider: &FaultyProvider,
    clock: Clock,
    gates: Gates,
    set_up: impl FnOnce(&mut EngineConfig),
) -> Engine {
    let name = format!("daemon {number}");
    let owner =
        Owner { name: name.clone(), boot_id: "b".into(), pid: number, start_ticks: 0, epoch: 0, since_ms: EPOCH_MS };
    let epoch = store.own(owner).await.expect("a store");
    let rng = Mutex::new(Rng::new(u64::from(number)));
    let mut config = EngineConfig::new("sim".parse().expect("a mark"), name);
    config.gates = gates;
    // Worlds are shorter than the hour in which a daemon compares all snapshots.
    config.periods.snapshots_all = config.periods.snapshots;
    config.inside = Some(crate::tasks::answers());
    set_up(&mut config);
    let draw = move || rng.lock().unwrap_or_else(PoisonError::into_inner).bytes();
    let (store, provider) = (Arc::new(store.clone()), Arc::new(provider.clone()));
    Engine::start(config, store, provider, epoch, clock, draw).await.expect("a daemon")
}

fn somebody() -> Actor {
    Actor::part("somebody")
}

fn persistent() -> Policy {
    let day_ms = 86_400_000;
    Policy { persistent: true, lifetime_ms: day_ms, idle_ms: day_ms, ..Policy::default_for(None) }
}

fn request(policy: Policy) -> CreateRequest {
    CreateRequest {
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy,
        labels: BTreeMap::new(),
        snapshot: None,
        by: somebody(),
        key: None,
    }
}

fn sleep(seconds: u64) -> ExecSpec {
    ExecSpec { argv: Program::Sleep { seconds }.argv(), ..ExecSpec::default() }
}

fn unlimited() -> TaskLimits {
    TaskLimits { inactivity_ms: None, total_ms: None, reports_max: None }
}

async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

fn must(so: bool, broken: impl Into<String>) -> Broken {
    if so { Ok(()) } else { Err(broken.into()) }
}

async fn probe_before_use(gates: Gates) -> Broken {
    let mut yard = Yard::new(gates.clone(), |_| {}).await;
    let id = yard.made(persistent()).await;
    yard.provider.damage(&id, Some(Damage::Rootless));
    yard.followed(gates).await;
    let handed = yard.engine.work_in(&Project::default(), &Which::Id(id), None).await;
    must(handed.is_err(), "a handle to what has no root was given")
}

async fn generation_check(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let id = yard.made(persistent()).await;
    let first = yard.record(&id).await.generation;
    yard.engine.stop(&id, somebody()).await.expect("a stop");
    yard.settled(&id).await;
    yard.engine.ensure(&id, EntryKind::Ensure, somebody()).await.expect("an entry");
    yard.ready(&id).await;
    let handed = yard.engine.work_in(&Project::default(), &Which::Id(id), Some(first)).await;
    must(handed.is_err(), format!("a handle of generation {first} was taken"))
}

async fn evidence_ages(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let id = yard.made(persistent()).await;
    pass(60).await;
    let status = yard.status(&id).await;
    must(status != Status::Ready, "it is shown as ready on what was seen a minute ago")
}

async fn pushed_ends(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let id = yard.made(persistent()).await;
    yard.provider.crash(&id, EndCause::OomKilled);
    pass(2).await;
    let status = yard.status(&id).await;
    must(status != Status::Ready, "it has ended, and is shown as ready")
}

async fn orphan_grace(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let stray = yard.stray().await;
    for _ in 0..3 {
        yard.engine.reconcile();
        pass(2).await;
    }
    must(yard.lives(&stray).await, "what was first listed seconds ago was collected")
}

async fn two_listings(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |config| config.periods.orphan_grace = Duration::ZERO).await;
    // Past the comparison that a daemon begins with.
    pass(5).await;
    let stray = yard.stray().await;
    yard.engine.reconcile();
    pass(2).await;
    must(yard.lives(&stray).await, "what was listed once was collected")
}

async fn breaker(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let mut records = Vec::new();
    for _ in 0..4 {
        let id = yard.made(persistent()).await;
        records.push(yard.record(&id).await);
    }
    yard.provider.set_silent(true);
    let before = yard.provider.unheard();
    for number in 0..8 {
        let (engine, record) = (yard.engine.clone(), records[number % records.len()].clone());
        tokio::spawn(async move {
            loop {
                let _ = engine.resources(&record).await;
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        });
    }
    pass(120).await;
    let asked = yard.provider.unheard() - before;
    must(asked <= ASKED_MAX, format!("{asked} calls went to who does not answer"))
}

/// Calls in two minutes to who does not answer: one try every time the breaker opens again, and those of its beginning.
const ASKED_MAX: u64 = 60;

async fn quota(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |config| config.quota = Quota::of(2, 2)).await;
    yard.made(persistent()).await;
    yard.made(persistent()).await;
    let third = yard.engine.create(request(persistent())).await;
    must(matches!(third, Err(EngineError::Quota { .. })), "a third one was taken")
}

async fn fresh_expiry(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let id = yard.made(Policy { lifetime_ms: 30_000, ..persistent() }).await;
    // By who was away: the arbiter knows, and the record does not.
    let mutation = Mutation {
        operation: OperationId::from_bytes([8; 16]),
        generation: yard.record(&id).await.generation,
        token: yard.store.leases(&id).await.expect("an answer")[0].token,
        budget_ms: 10_000,
    };
    yard.provider.truth().extend(&mutation, &id, DeadlineChange::AtLeastMs(600_000)).await.expect("an extension");
    pass(60).await;
    let phase = yard.record(&id).await.phase.name();
    must(phase == PhaseName::Ready, format!("it has ten minutes left, and is {phase:?}"))
}

async fn activity_filter(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let id = yard.made(Policy { idle_ms: 30_000, hibernate_ms: 86_400_000, ..persistent() }).await;
    for _ in 0..90 {
        yard.status(&id).await;
        pass(1).await;
    }
    let phase = yard.record(&id).await.phase.name();
    must(phase == PhaseName::Frozen, format!("nobody used it for three windows, and it is {phase:?}"))
}

async fn entry_only_resume(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let id = yard.made(persistent()).await;
    yard.engine.hibernate(&id, somebody()).await.expect("a wish");
    yard.settled(&id).await;
    let handed = yard.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await;
    let phase = yard.record(&id).await.phase.name();
    must(handed.is_err() && phase == PhaseName::Hibernated, format!("nobody wanted it to run, and it is {phase:?}"))
}

async fn provider_truth(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    // Of no end anybody hears.
    yard.provider.misbehave(BTreeMap::new(), (0..100).collect());
    let id = yard.made(persistent()).await;
    yard.engine.freeze(&id, somebody()).await.expect("a wish");
    pass(5).await;
    assert_eq!(yard.record(&id).await.phase.name(), PhaseName::Frozen, "whatever is switched off");
    yard.provider.crash(&id, EndCause::SupervisorLost);
    yard.engine.reconcile();
    pass(90).await;
    let phase = yard.record(&id).await.phase.name();
    must(phase != PhaseName::Frozen, "it has ended, and is frozen by what is recorded")
}

async fn durable_stop(gates: Gates) -> Broken {
    let mut yard = Yard::new(gates.clone(), |_| {}).await;
    let task = yard.task(vec![sleep(60)], unlimited()).await;
    // It dies as it answers.
    let engine = yard.engine.clone();
    engine.shut_down();
    engine.stop_task(&task.id, somebody()).await.expect("a stop");
    yard.followed(gates).await;
    let over = yard.over(&task, LONG).await;
    must(over.state == TaskState::Stopped, format!("it was stopped, and is {:?}", over.state))
}

async fn pushed_cancellation(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let task = yard.task(vec![sleep(60)], unlimited()).await;
    yard.engine.stop_task(&task.id, somebody()).await.expect("a stop");
    let over = yard.over(&task, Duration::from_secs(5)).await;
    must(over.state.is_final(), format!("it was stopped, and is {:?} five seconds later", over.state))
}

async fn inactivity_limit(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let limits = TaskLimits { inactivity_ms: Some(20_000), ..unlimited() };
    let task = yard.task(vec![sleep(60)], limits).await;
    let over = yard.over(&task, LONG).await;
    must(over.state == TaskState::Inactive, format!("it was silent for a minute, and is {:?}", over.state))
}

async fn authoritative_timeout(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let limits = TaskLimits { total_ms: Some(20_000), ..unlimited() };
    let task = yard.task(vec![sleep(90)], limits).await;
    let over = yard.over(&task, Duration::from_secs(60)).await;
    let running = yard.running(&over).await;
    must(over.state == TaskState::TimedOut && running == 0, format!("it is {:?}, and {running} run", over.state))
}

async fn effects_gate(gates: Gates) -> Broken {
    let yard = Yard::new(gates, |_| {}).await;
    let task = yard.task(vec![yard.provider.ask_spec("deploy")], unlimited()).await;
    let over = yard.over(&task, LONG).await;
    must(over.grants.is_empty(), format!("{:?} was granted, and never declared", over.grants))
}
