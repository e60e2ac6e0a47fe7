//! One life through every effect, again and again: each of its changes at provider and store goes wrong in each way, and
//! everything ends as if nothing had (P4).
//!
//! ```text
//!   a spare is made ─ claimed ─ probed ─ deleted
//!   create ─ services ─ hooks ─ probe ─ work ─ freeze ─ thaw ─ snapshot ─ stop (save, clear) ─ resume (restore)
//!          ─ fork ─ rollback ─ task ─ the fork is deleted
//!   create ─ work that goes on ─ limits ─ hibernate with its memory ─ resume with it ─ reset
//!   create ─ work ─ its root is lost ─ replaced, once what it has is sealed ─ rest
//! ```
//!
//! Whoever got no answer asks again, as clients do: under the same key, the same id, or after a look at what became of
//! it. A daemon that died is followed by another one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use viv_core::exec::ExecSpec;
use viv_core::hook::{Hook, HookAction, HookPoint, OnFailure};
use viv_core::lifecycle::{Effect, EntryKind, FreezeStep, Memory, Phase, ResumeStep, Sandbox, Status, outstanding};
use viv_core::service::{Readiness, Restart, ServiceSpec};
use viv_core::spec::{Hibernate, Policy, Project, SandboxSpec};
use viv_core::task::{EffectRule, NewTask, TaskLimits, TaskState};
use viv_core::{ExecutionId, SandboxId, SnapshotId, TaskId};
use viv_engine::{
    Clock, CreateRequest, CreateTask, Engine, EngineConfig, EngineError, ForkRequest, ForkedFrom, KeyedBy, NewSnapshot,
    RollbackRequest, SpareClass, SparesConfig, Which,
};
use viv_provider::conformance::program::Program;
use viv_provider::sim::{SimClock, SimProvider};
use viv_provider::{InstanceRef, InstanceState, PageRequest, Provider, ResourceLimits};
use viv_store::{Cursor, JournalFilter, MemoryStore, Owner, SnapshotQuery, Store, TaskQuery};

use crate::at_once::now;
use crate::faulty::{Damage, FaultyProvider};
use crate::line::Line;
use crate::rng::Rng;
use crate::script::{Calls, Point, Way};
use crate::store::FaultyStore;
use crate::world::somebody;

const EPOCH_MS: u64 = 1_700_000_000_000;
const TICK_MS: u64 = 500;

/// How long whoever asks waits for one answer.
const PATIENCE: Duration = Duration::from_secs(180);

/// Before asking again, and before a dead daemon is followed by another.
const PAUSE: Duration = Duration::from_secs(2);

/// How often something is asked for.
const TRIES: u32 = 60;

/// By then everything is at rest: what was left half done was found by who compares.
const SETTLED: Duration = Duration::from_secs(200);

/// For this long nothing changes then.
const REST: Duration = Duration::from_secs(70);

/// Grows by a line with every command that is really run.
const RUNS: &str = "/workspace/runs";

/// What became of a life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lived {
    /// What there is at its end.
    pub end: Vec<String>,
    /// The changes that its first daemon made.
    pub points: Vec<Point>,
}

/// Lives that life; one change goes otherwise, counted from 0. What could not be done is the error.
pub fn live(order: Option<(usize, Way)>) -> Result<Lived, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O").block_on(async {
        let mut life = Life::begin(order).await;
        let end = Box::pin(life.through_everything()).await?;
        Ok(Lived { end, points: life.points })
    })
}

struct Life {
    provider: FaultyProvider,
    store: FaultyStore,
    truth: MemoryStore,
    clock: Clock,
    calls: Arc<Calls>,
    /// Those that there were until everything was done.
    points: Vec<Point>,
    draws: Arc<Mutex<Rng>>,
    /// What was seen on the way, and belongs to the end.
    seen: Vec<String>,
    daemons: u32,
    line: Line,
    engine: Option<Engine>,
}

impl Life {
    async fn begin(order: Option<(usize, Way)>) -> Self {
        let sim_clock = SimClock::starting_at(EPOCH_MS);
        let ticking = sim_clock.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(TICK_MS)).await;
                ticking.advance(TICK_MS);
            }
        });
        let (sim, truth) = (SimProvider::new(sim_clock), MemoryStore::new());
        let records = truth.clone();
        let effect = move |sandbox: &SandboxId| {
            let record = now(records.get(sandbox)).ok().flatten()?;
            outstanding(&record).map(|(effect, _)| word(&record, &effect))
        };
        let calls = Arc::new(Calls::new(order, Box::new(effect)));
        let mut life = Self {
            provider: FaultyProvider::new(sim.clone(), 1, 0),
            store: FaultyStore::new(Arc::new(truth.clone()), sim, 1, 0, Vec::new()),
            truth,
            clock: Clock::showing(EPOCH_MS),
            line: Line::counting(calls.clone()),
            calls,
            points: Vec::new(),
            seen: Vec::new(),
            draws: Arc::new(Mutex::new(Rng::new(1))),
            daemons: 0,
            engine: None,
        };
        life.follow().await;
        life
    }

    /// A daemon begins, on a line that is there. One that dies meanwhile is followed too.
    async fn follow(&mut self) {
        loop {
            if self.line.is_cut() {
                tokio::time::sleep(PAUSE).await;
                self.line = Line::new();
            }
            self.daemons += 1;
            let name = format!("daemon {}", self.daemons);
            let owner = Owner {
                name: name.clone(),
                boot_id: "simulated".to_owned(),
                pid: self.daemons,
                start_ticks: 0,
                epoch: 0,
                since_ms: self.clock.now_ms(),
            };
            let mut config = EngineConfig::new("sim".parse().expect("a mark"), name);
            // Worlds are shorter than the hour in which a daemon compares all snapshots.
            config.periods.snapshots_all = config.periods.snapshots;
            config.inside = Some(crate::tasks::patient_answers());
            let class = SpareClass { name: "default".to_owned(), spec: SandboxSpec::default(), min: 1, max: 1 };
            config.spares = SparesConfig { classes: vec![class], ..SparesConfig::default() };
            let (store, provider) = (self.store.by(&self.line), self.provider.by(&self.line));
            let (draws, clock, line) = (self.draws.clone(), self.clock, self.line.clone());
            let starting = async move {
                let epoch = store.own(owner).await.ok()?;
                let draw = move || draws.lock().unwrap_or_else(PoisonError::into_inner).bytes();
                Engine::start(config, Arc::new(store), Arc::new(provider), epoch, clock, draw).await.ok()
            };
            tokio::select! {
                biased;
                () = line.has_been_cut() => {}
                engine = starting => match engine {
                    Some(engine) => {
                        self.engine = Some(engine);
                        return;
                    }
                    // Whoever starts daemons starts another.
                    None => self.line.cut(),
                },
            }
        }
    }

    /// Asks until it is answered well.
    async fn ask<T>(&mut self, what: &str, asked: impl AsyncFn(Engine) -> Result<T, EngineError>) -> Result<T, String> {
        let mut last = "nobody answered".to_owned();
        for _ in 0..TRIES {
            let engine = self.engine.clone().expect("a daemon is there");
            let line = self.line.clone();
            tokio::select! {
                biased;
                () = line.has_been_cut() => {}
                answer = asked(engine) => match answer {
                    Ok(answer) => return Ok(answer),
                    Err(error) => last = error.to_string(),
                },
                () = tokio::time::sleep(PATIENCE) => {}
            }
            self.pass(PAUSE).await;
        }
        Err(format!("{what}: {last}"))
    }

    /// Time passes, and a daemon that dies is followed.
    async fn pass(&mut self, how_long: Duration) {
        let until = tokio::time::Instant::now() + how_long;
        while tokio::time::Instant::now() < until {
            let line = self.line.clone();
            tokio::select! {
                biased;
                () = line.has_been_cut() => self.follow().await,
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    async fn record(&self, id: &SandboxId) -> Sandbox {
        self.truth.get(id).await.ok().flatten().expect("it was acknowledged")
    }

    async fn ready(&mut self, id: &SandboxId) -> Result<(), String> {
        self.ask("ready", async |engine| {
            engine.ensure(id, EntryKind::Ensure, somebody()).await?;
            let view = engine.wait_ready(id, PATIENCE / 2).await?;
            if view.status == Status::Ready { Ok(()) } else { Err(not_yet(id)) }
        })
        .await
    }

    /// Waits until it is so, for which nobody has to do anything.
    async fn until(&mut self, what: &str, id: &SandboxId, is_so: impl Fn(&Sandbox) -> bool) -> Result<(), String> {
        for _ in 0..TRIES * 4 {
            if is_so(&self.record(id).await) {
                return Ok(());
            }
            self.pass(PAUSE).await;
        }
        Err(format!("{what} is not so: {:?}", self.record(id).await))
    }

    async fn create(&mut self, key: &'static str, request: CreateRequest) -> Result<SandboxId, String> {
        let request = CreateRequest { key: Some(keyed(key)), ..request };
        self.ask("create", async |engine| Ok(engine.create(request.clone()).await?.view.sandbox.id)).await
    }

    async fn through_everything(&mut self) -> Result<Vec<String>, String> {
        self.ask("a spare", async |engine| {
            let ready = engine.spares().await?.first().is_some_and(|class| !class.ready.is_empty());
            if ready { Ok(()) } else { Err(EngineError::ShuttingDown) }
        })
        .await?;
        let lives = self.create("lives", request(rich(), true)).await?;
        self.ready(&lives).await?;
        let passing = self.create("passing", request(SandboxSpec::default(), false)).await?;
        self.ready(&passing).await?;
        self.work(&lives, 1).await?;
        self.freeze(&lives).await?;
        self.ready(&lives).await?;
        let snapshot = self.snapshot(&lives).await?;
        // What going back takes away.
        self.work(&lives, 2).await?;
        self.ask("stop", async |engine| engine.stop(&lives, somebody()).await).await?;
        self.until("hibernated", &lives, |record| matches!(record.phase, Phase::Hibernated { .. })).await?;
        self.ready(&lives).await?;
        let forked = self.fork(&lives).await?;
        self.ready(&forked).await?;
        self.roll_back(&lives, &snapshot).await?;
        self.ready(&lives).await?;
        self.task(&lives).await?;
        let remembers = self.remember().await?;
        let replaced = self.replace().await?;
        for id in [&passing, &forked] {
            self.ask("delete", async |engine| engine.delete(id, somebody()).await).await?;
            self.until("gone", id, |record| record.phase == Phase::Stopped).await?;
        }
        self.pass(SETTLED).await;
        self.points = self.calls.seen();
        // Somebody who goes on with it finds it as it was left.
        self.ready(&lives).await?;
        let mut end = self.end([&lives, &passing, &forked, &remembers, &replaced]).await;
        end.append(&mut self.seen);
        let (mutations, cursor) = (self.provider.mutations(), *self.truth.tail().borrow());
        self.pass(REST).await;
        let recorded = self.truth.journal(cursor, &JournalFilter::default(), 10).await.unwrap_or_default();
        end.push(format!("{} changes and {} lines at rest", self.provider.mutations() - mutations, recorded.len()));
        Ok(end)
    }

    /// One whose memory is saved with it, and in which something goes on; then it begins anew.
    async fn remember(&mut self) -> Result<SandboxId, String> {
        let mut asked = request(SandboxSpec::default(), true);
        asked.policy.hibernate = Hibernate::Memory;
        let id = self.create("remembers", asked).await?;
        self.ready(&id).await?;
        let execution = ExecutionId::from_bytes([3; 16]);
        let spec = ExecSpec { argv: Program::Sleep { seconds: 1_000_000 }.argv(), ..ExecSpec::default() };
        let which = Which::Id(id.clone());
        self.ask("work that goes on", async |engine| {
            let handle = engine.work_in(&Project::default(), &which, None).await?;
            handle.execute(&execution, &spec).await
        })
        .await?;
        let less = ResourceLimits { processes: Some(100), ..ResourceLimits::default() };
        self.ask("limits", async |engine| {
            let handle = engine.work_in(&Project::default(), &which, None).await?;
            engine.set_limits(&handle, &less, &somebody()).await
        })
        .await?;
        self.ask("hibernate", async |engine| engine.hibernate(&id, somebody()).await).await?;
        self.until("hibernated", &id, |record| matches!(record.phase, Phase::Hibernated { .. })).await?;
        self.ready(&id).await?;
        let record = self.record(&id).await;
        let instance = InstanceRef { sandbox: id.clone(), generation: record.generation };
        let really = self.provider.truth();
        let state = really.execution(&instance, &execution).await.map(|status| status.state);
        let limits = really.observe(&instance).await.map(|seen| seen.limits.and_then(|limits| limits.processes));
        let with_memory = matches!(record.memory, Some(Memory::Restored { .. }));
        self.seen.push(format!(
            "remembers: resumed, generation {}, with its memory {with_memory}, what went on is {state:?}, at most {limits:?} \
             processes",
            record.generation
        ));
        let (before, truth) = (record.generation, self.truth.clone());
        // Has no key: whoever got no answer looks whether it was taken.
        self.ask("reset", async |engine| {
            let record = truth.get(&id).await?.expect("it was acknowledged");
            match record.phase {
                _ if record.generation > before => Ok(()),
                Phase::Ready => engine.reset(&id, somebody()).await.map(drop),
                _ => Err(not_yet(&id)),
            }
        })
        .await?;
        self.until("another", &id, |record| record.generation > before).await?;
        self.ready(&id).await?;
        Ok(id)
    }

    /// One whose root is gone is replaced when it is asked for, and what was written is sealed first (T7).
    async fn replace(&mut self) -> Result<SandboxId, String> {
        let id = self.create("replaced", request(SandboxSpec::default(), true)).await?;
        self.ready(&id).await?;
        self.work(&id, 4).await?;
        self.provider.damage(&id, Some(Damage::Rootless));
        self.ask("a look", async |engine| engine.verify(&id).await.map(drop)).await?;
        self.until("lost", &id, |record| record.phase == Phase::Lost).await?;
        self.ready(&id).await?;
        Ok(id)
    }

    /// A freeze that nobody answers is given up, and it runs on: whoever wants it asks again.
    async fn freeze(&mut self, id: &SandboxId) -> Result<(), String> {
        self.ask("freeze", async |engine| {
            engine.freeze(id, somebody()).await?;
            let view = engine.wait_settled(id, PATIENCE / 2).await?;
            match view.sandbox.phase {
                Phase::Frozen { step: FreezeStep::Done } => Ok(()),
                _ => Err(not_yet(id)),
            }
        })
        .await
    }

    /// A command that leaves a trace each time that it is run.
    async fn work(&mut self, id: &SandboxId, number: u8) -> Result<(), String> {
        let (execution, spec) = (ExecutionId::from_bytes([number; 16]), appends());
        self.ask("work", async |engine| {
            let handle = engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await?;
            handle.execute(&execution, &spec).await
        })
        .await?;
        self.pass(PAUSE).await;
        Ok(())
    }

    async fn snapshot(&mut self, id: &SandboxId) -> Result<SnapshotId, String> {
        let new = || NewSnapshot { name: None, labels: BTreeMap::new(), by: somebody(), key: Some(keyed("snapshot")) };
        self.ask("snapshot", async |engine| Ok(engine.make_snapshot(id, new()).await?.row.id)).await
    }

    async fn fork(&mut self, id: &SandboxId) -> Result<SandboxId, String> {
        let request = ForkRequest {
            project: Project::default(),
            from: ForkedFrom::Sandbox(id.into()),
            count: 1,
            name: None,
            policy: None,
            labels: BTreeMap::new(),
            memory: false,
            by: somebody(),
            key: Some(keyed("fork")),
        };
        let forked = self.ask("fork", async |engine| engine.fork(request.clone()).await).await?;
        Ok(forked.views[0].sandbox.id.clone())
    }

    /// Has no key: whoever got no answer looks whether it was taken.
    async fn roll_back(&mut self, id: &SandboxId, snapshot: &SnapshotId) -> Result<(), String> {
        let (before, truth) = (self.record(id).await.generation, self.truth.clone());
        let request = RollbackRequest { snapshot: snapshot.clone(), discard: true, by: somebody() };
        self.ask("rollback", async |engine| {
            let record = truth.get(id).await?.expect("it was acknowledged");
            match record.phase {
                _ if record.generation > before => Ok(()),
                Phase::Ready => engine.rollback(id, request.clone()).await.map(drop),
                _ => Err(not_yet(id)),
            }
        })
        .await
    }

    async fn task(&mut self, id: &SandboxId) -> Result<(), String> {
        let new = NewTask {
            id: TaskId::from_bytes([2; 16]),
            project: Project::default(),
            sandbox: Some(id.clone()),
            make: None,
            files: Vec::new(),
            source: None,
            steps: vec![appends(), self.provider.ask_spec("push done")],
            limits: TaskLimits::default(),
            effects: vec![EffectRule { name: "push".to_owned(), repeatable: false }],
            credentials: BTreeMap::new(),
            keep_alive: true,
            by: somebody(),
            body_hash: Some("task".to_owned()),
        };
        self.ask("task", async |engine| {
            let made = engine.create_task(CreateTask { new: new.clone(), keyed: true }).await?;
            let over = engine.wait_task(&made.task.id, PATIENCE / 2, |task| task.state.is_final()).await?;
            if over.state.is_final() { Ok(()) } else { Err(not_yet(id)) }
        })
        .await
    }

    /// What there is, of everybody and of everything.
    async fn end(&self, all: [&SandboxId; 5]) -> Vec<String> {
        let mut end = Vec::new();
        let (really, filter) = (self.provider.truth(), JournalFilter::default());
        let lines = self.truth.journal(Cursor(0), &filter, usize::MAX).await.unwrap_or_default();
        for (who, id) in ["lives", "passing", "forked", "remembers", "replaced"].into_iter().zip(all) {
            let record = self.record(id).await;
            let instance = InstanceRef { sandbox: id.clone(), generation: record.generation };
            let seen = really.observe(&instance).await.map_or(InstanceState::Absent, |seen| seen.state);
            let runs = really.file_stat(&instance, RUNS).await.map_or(0, |stat| stat.size_bytes);
            let (phase, desired, generation) = (record.phase.name(), record.desired, record.generation);
            let leases = self.truth.leases(id).await.map_or(0, |leases| leases.len());
            let created = lines.iter().filter(|line| line.line.kind == "sandbox.created");
            let created = created.filter(|line| line.line.sandbox.as_ref() == Some(id)).count();
            end.push(format!(
                "{who}: {phase:?}, wanted {desired:?}, generation {generation}, really {seen}, deleted {}, \
                 {} services, {runs} bytes of runs, created {created} times, held by somebody {}",
                record.deleted,
                record.services.len(),
                leases > 0 && record.is_over(),
            ));
        }
        let owner = "sim".parse().expect("a mark");
        let listed = really.list(&owner, PageRequest::default()).await.map_or(0, |page| page.items.len());
        let saved = really.snapshots(&owner, PageRequest::default()).await.map_or(0, |page| page.items.len());
        let query = SnapshotQuery { limit: 1_000, ..SnapshotQuery::default() };
        let rows = self.truth.snapshots(&query).await.unwrap_or_default().items;
        let mut rows: Vec<String> = rows.iter().map(|row| format!("{:?} {:?}", row.kind, row.state)).collect();
        rows.sort();
        end.push(format!("{listed} instances, {saved} snapshots, rows of them {rows:?}"));
        let query = TaskQuery { limit: 1_000, ..TaskQuery::default() };
        for task in self.truth.tasks(&query).await.unwrap_or_default().items {
            let (state, run, started) = (task.state, task.run, task.executions.len());
            let well = state == TaskState::Succeeded;
            end.push(format!(
                "a task: {state:?} ({well}) in run {run} with {started} steps, {} grants",
                task.grants.len()
            ));
        }
        let count = |kind: &str| lines.iter().filter(|line| line.line.kind == kind).count();
        end.push(format!("{} snapshots made, {} tasks created", count("snapshot.made"), count("task.created")));
        end
    }
}

/// An effect as the table has it: with memory it is another one, and so is a save before a replacement.
fn word(record: &Sandbox, effect: &Effect) -> &'static str {
    match effect {
        Effect::Save { .. } if matches!(record.phase, Phase::Resuming { step: ResumeStep::Seal, .. }) => "seal",
        Effect::Save { memory: true, .. } => "save with memory",
        Effect::Restore { memory: true, .. } => "restore with memory",
        Effect::Create { .. }
        | Effect::Restore { .. }
        | Effect::Claim { .. }
        | Effect::Probe { .. }
        | Effect::Serve { .. }
        | Effect::Hook { .. }
        | Effect::Freeze { .. }
        | Effect::Thaw { .. }
        | Effect::Save { .. }
        | Effect::Clear { .. } => effect.code(),
    }
}

fn not_yet(id: &SandboxId) -> EngineError {
    EngineError::NotFound { which: id.to_string() }
}

fn keyed(key: &str) -> KeyedBy {
    KeyedBy { key: key.to_owned(), body_hash: [7; 32] }
}

fn appends() -> ExecSpec {
    ExecSpec { argv: Program::Append { path: RUNS.to_owned() }.argv(), ..ExecSpec::default() }
}

fn request(spec: SandboxSpec, persistent: bool) -> CreateRequest {
    let day_ms = 24 * 3_600_000;
    let policy =
        Policy { persistent, lifetime_ms: day_ms, idle_ms: day_ms, hibernate_ms: day_ms, ..Policy::default_for(None) };
    CreateRequest {
        project: Project::default(),
        name: None,
        spec,
        policy,
        labels: BTreeMap::new(),
        snapshot: None,
        by: somebody(),
        key: None,
    }
}

/// What has a service, and a hook at every point.
fn rich() -> SandboxSpec {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let mut spec = SandboxSpec::default();
    spec.services.push(ServiceSpec {
        name: "web".parse().expect("a name"),
        argv: words(&["/bin/sleep", "1000000"]),
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        ready: Readiness::Runs { ms: 0 },
        ready_within_ms: 20_000,
        restart: Restart::default(),
        nudge: None,
    });
    for point in HookPoint::ALL {
        let action = HookAction::Command { argv: words(&["echo", "done"]) };
        spec.hooks.insert(point, Hook { action, deadline_ms: 3_000, on_failure: OnFailure::Ignore });
    }
    spec
}
