//! One simulated world: a seed, and all that happens in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use viv_core::lifecycle::{Actor, Cause, Memory, Phase, PhaseName, Sandbox};
use viv_core::spec::Project;
use viv_core::task::TaskState;
use viv_core::{ExecutionId, FencingToken, Generation, OperationId, SandboxId, SnapshotId};
use viv_engine::{CleanupConfig, Clock, Engine, EngineConfig, Which};
use viv_provider::sim::{SimClock, SimProvider};
use viv_provider::{
    Image, InstanceRef, InstanceSpec, InstanceState, Mutation, Network, Provider, Recall, ResourceLimits,
};
use viv_store::{Cursor, ExecutionQuery, JournalFilter, MemoryStore, NewLine, Owner, Quota, SqliteStore, Store};

use crate::at_once::at_once;
use crate::clients::{Answer, PATIENCE};
use crate::faulty::{FaultyProvider, hashed};
use crate::invariants::{Changes, Found, Picture, Violation, checks, holds, rule};
use crate::line::Line;
use crate::panics;
use crate::plan::{Deed, Plan, StoreKind, Swarm, Trouble};
use crate::rng::Rng;
use crate::store::{FaultyStore, Recorded};

/// Some time in the past, so that times look like times.
const EPOCH_MS: u64 = 1_700_000_000_000;

/// How fine the simulated provider's time is.
pub(crate) const TICK_MS: u64 = 250;

/// Within this after faults have stopped, everything is at rest (P3): a phase may time out, be tried again, and time out.
const REST_WITHIN: Duration = Duration::from_secs(15 * 60);

/// Longer than any task may take: of those that wait, one at least is over by then.
const TASK_WITHIN: Duration = Duration::from_secs(10 * 60);

/// For this long nothing changes from then on.
const REST_FOR: Duration = Duration::from_secs(10 * 60);

/// How long the effects of a disturbance may last after it has ended.
const SETTLES: Duration = Duration::from_secs(60);

/// Lines of a timeline: the latest ones.
const TIMELINE_MAX: usize = 80;

/// And before those the first ones about what was broken.
const EARLY_MAX: usize = 20;

/// Ids of what has few lines in its life, so that each of them says something.
const BEGUN_ONCE: [&str; 4] = ["exe_", "snp_", "tsk_", "sch_"];

/// Most sandboxes that live at once in any world.
const LIVING_MAX: u64 = 6;

/// Files of each sandbox that are looked for after every step: the latest.
const FILES_CHECKED: usize = 4;

/// More executions than any world has.
const MANY: usize = 10_000;

/// How often a screen is brought up to date.
const LOOKS_EVERY: Duration = Duration::from_secs(20);

/// Several things go wrong in every world.
pub const FAULTS_MIN: u64 = 3;

/// Farthest that a clock is set back or forth.
const JUMP_MS_MAX: u64 = 90_000;

/// Which part of the memory that sandboxes share is left, and when it is short.
const ENOUGH_LEFT: f64 = 0.5;
const HARDLY_LEFT: f64 = 0.02;

/// What came of a world.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Things that happened.
    pub steps: u64,
    /// How often each of them; faults as often as they hit somebody.
    pub deeds: BTreeMap<Deed, u64>,
    /// What was come to, and how often: moves with their causes, lines of the journal, states of tasks, refusals.
    pub reached: BTreeMap<String, u64>,
    /// Single calls that went wrong.
    pub troubles: BTreeMap<Trouble, u64>,
    /// Times that one was seen ready.
    pub ready: u64,
    /// Changes of records, rows, schedules and leases.
    pub changes: u64,
    /// How often an invariant was looked at.
    pub checks: u64,
    /// Changes that were asked of the provider.
    pub mutations: u64,
    /// A hash of everything that was recorded, to compare runs.
    pub trace: u64,
}

impl Report {
    /// How much went wrong.
    pub fn faults(&self) -> u64 {
        let deeds = self.deeds.iter().filter(|(deed, _)| deed.is_fault()).map(|(_, count)| count);
        let troubles = self.troubles.iter().filter(|(trouble, _)| trouble.is_fault()).map(|(_, count)| count);
        deeds.chain(troubles).sum()
    }

    /// Two of them together; the hashes are of one world each.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        self.steps += other.steps;
        self.ready += other.ready;
        self.changes += other.changes;
        self.checks += other.checks;
        self.mutations += other.mutations;
        for (deed, count) in &other.deeds {
            *self.deeds.entry(*deed).or_default() += count;
        }
        for (trouble, count) in &other.troubles {
            *self.troubles.entry(*trouble).or_default() += count;
        }
        for (what, count) in &other.reached {
            *self.reached.entry(what.clone()).or_default() += count;
        }
        self
    }
}

/// Runs a world from its beginning to its rest.
pub fn run(plan: &Plan) -> Result<Report, Violation> {
    checks();
    let lived = panics::listening(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime without I/O").block_on(async { Box::pin(World::new(plan).await.live()).await })
    });
    // What panicked when the last step was checked already, or took the world with it, is found here.
    let heard = panics::heard();
    let lived = lived.unwrap_or_else(|| Ok(Report::default()));
    if lived.is_err() || heard.is_empty() {
        return lived;
    }
    let (seed, step, name, what) = (plan.seed, panics::came_to(), "nothing-panics", heard.join("; "));
    Err(Violation { seed, step, name, rule: rule(name), what, timeline: vec!["it did not come back".to_owned()] })
}

/// What clients know of a sandbox because they were answered.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// The highest generation that was shown.
    pub(crate) shown: Option<Generation>,
    /// What a client holds, and may have held for long.
    pub(crate) handle: Option<Generation>,
    /// A stop of what is not persistent, or a delete, was acknowledged.
    pub(crate) ended: bool,
    /// Files that were written.
    pub(crate) written: Vec<String>,
    /// Somebody wanted it to be as it was before, so they may be gone.
    pub(crate) went_back: bool,
    /// Something may wake it that no client waits for: a schedule, a task.
    pub(crate) wakes_itself: bool,
    /// The service of it that a client tried to kill.
    pub(crate) service_killed: Option<ExecutionId>,
}

pub(crate) struct World<'p> {
    pub(crate) plan: &'p Plan,
    pub(crate) swarm: Swarm,
    pub(crate) step: u64,
    pub(crate) rng: Rng,
    draws: Arc<Mutex<Rng>>,
    pub(crate) clock: Clock,
    pub(crate) provider: FaultyProvider,
    pub(crate) store: FaultyStore,
    engine: Option<Engine>,
    pub(crate) line: Line,
    daemons: u64,
    /// Since when the one that is there is.
    pub(crate) began: Instant,
    /// How many were asked something and have not answered yet.
    pub(crate) pending: Arc<AtomicU64>,
    /// Instances that nobody knows of: ours, and those of somebody else.
    pub(crate) strays: BTreeSet<SandboxId>,
    pub(crate) foreign: BTreeSet<SandboxId>,
    /// How long what has no record is left alone.
    grace: Duration,
    /// Where the store is, if that is in a file.
    _file: Option<StoreFile>,
    /// Daemons that were stopped, and go on at some time.
    away: Vec<(Instant, Line, Engine)>,
    /// Until when nobody promises anything about time.
    disturbed_until: Instant,
    /// The provider's time, and how far it was set forth.
    sim_clock: SimClock,
    set_forth_ms: u64,
    /// With which snapshot the next that is asked for begins.
    pub(crate) begins_with: Option<SnapshotId>,
    pub(crate) quota_max: Option<u64>,
    /// How many live at once: few are in each other's way, or in their own.
    pub(crate) living_max: usize,
    /// How long waits are, in tenths.
    pace: u64,
    pub(crate) known: BTreeMap<SandboxId, Known>,
    /// How many were asked for, for keys and names.
    pub(crate) asked: u64,
    /// Whether the daemon is drained, as far as clients were told.
    pub(crate) draining: Option<bool>,
    pub(crate) told_drained: bool,
    /// How often that was to change.
    pub(crate) drains: u64,
    /// What those were answered who did not wait.
    pub(crate) answers: Arc<Mutex<Vec<Answer>>>,
    changes: Changes,
    story: Vec<(u64, String)>,
    /// What is so for a while, and how much of it had been felt when it began: it counts when somebody feels it.
    lasting: BTreeMap<Deed, u64>,
    pub(crate) report: Report,
}

impl<'p> World<'p> {
    pub(crate) async fn new(plan: &'p Plan) -> Self {
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
        let swarm = Swarm::draw(plan, &mut rng);
        let troubles: Vec<Trouble> = Trouble::ALL.iter().copied().filter(|trouble| swarm.has(*trouble)).collect();
        let sim = SimProvider::new(sim_clock.clone());
        let percent = plan.faults_percent;
        let provider = FaultyProvider::with_troubles(sim.clone(), rng.next_u64(), percent, troubles.clone());
        provider.set_looks_count(!swarm.has(Trouble::Hooks));
        if swarm.has(Trouble::Memory) {
            sim.set_memory_left(Some(ENOUGH_LEFT));
        }
        let of_store = [Trouble::StoreBefore, Trouble::StoreAfter, Trouble::SlowStore];
        let of_store = troubles.into_iter().filter(|trouble| of_store.contains(trouble)).collect();
        let (truth, file): (Arc<dyn Store>, _) = match plan.store {
            StoreKind::Memory => (Arc::new(MemoryStore::new()), None),
            StoreKind::Sqlite => {
                let file = StoreFile::new(plan.seed);
                (Arc::new(SqliteStore::open(&file.0.join("db")).expect("a new file")), Some(file))
            }
        };
        let store = FaultyStore::new(truth, sim, rng.next_u64(), percent / 4, of_store);
        let grace = if swarm.has(Trouble::Hasty) { Duration::ZERO } else { Duration::from_secs(60) };
        let draws = Arc::new(Mutex::new(Rng::new(rng.next_u64())));
        let quota_max = swarm.has(Trouble::Quota).then(|| 2 + rng.below(4));
        let living_max = 1 + rng.below(LIVING_MAX) as usize;
        let pace = [1, 10, 30][rng.below(3) as usize];
        let clocks_agree = !swarm.has(Trouble::ClockJump);
        let mut world = Self {
            plan,
            swarm,
            step: 0,
            rng,
            draws,
            clock: Clock::showing(EPOCH_MS),
            provider,
            store,
            engine: None,
            line: Line::new(),
            daemons: 0,
            began: Instant::now(),
            pending: Arc::default(),
            strays: BTreeSet::new(),
            foreign: BTreeSet::new(),
            grace,
            _file: file,
            away: Vec::new(),
            disturbed_until: Instant::now(),
            sim_clock,
            set_forth_ms: 0,
            begins_with: None,
            quota_max,
            living_max,
            pace,
            known: BTreeMap::new(),
            asked: 0,
            draining: Some(false),
            told_drained: false,
            drains: 0,
            answers: Arc::default(),
            changes: Changes::new(clocks_agree),
            story: Vec::new(),
            lasting: BTreeMap::new(),
            report: Report::default(),
        };
        world.begin().await;
        world
    }

    /// A daemon begins: the first one, or one after another has ended.
    async fn begin(&mut self) {
        self.daemons += 1;
        if self.daemons > 1 && self.swarm.has(Trouble::ClockJump) && self.rng.chance(50) {
            let (by_ms, back) = (self.rng.below(JUMP_MS_MAX), self.rng.chance(50));
            let now_ms = self.clock.now_ms();
            self.clock = Clock::showing(if back { now_ms - by_ms } else { now_ms + by_ms });
            *self.report.troubles.entry(Trouble::ClockJump).or_default() += 1;
            self.tell(&format!("the clock is set {} by {by_ms} ms", if back { "back" } else { "forth" }));
        }
        let owner = Owner {
            name: format!("daemon {}", self.daemons),
            boot_id: "simulated".to_owned(),
            pid: self.daemons as u32,
            start_ticks: 0,
            epoch: 0,
            since_ms: self.clock.now_ms(),
        };
        let mut config = EngineConfig::new("sim".parse().expect("a mark"), owner.name.clone());
        config.gates = self.plan.gates.clone();
        config.periods.orphan_grace = self.grace;
        // Worlds are shorter than the hour in which a daemon compares all snapshots.
        config.periods.snapshots_all = config.periods.snapshots;
        config.inside = Some(crate::tasks::answers());
        if self.swarm.has(Trouble::Memory) {
            config.cleanup = Some(only_memory());
        }
        if let Some(max) = self.quota_max {
            config.quota = Quota::of(max, max);
        }
        // A store that fails keeps a daemon from beginning; then it is started again.
        let engine = loop {
            self.line = Line::new();
            self.began = Instant::now();
            let (store, provider) = (self.store.by(&self.line), self.provider.by(&self.line));
            if let Ok(epoch) = store.own(owner.clone()).await {
                let draws = self.draws.clone();
                let draw = move || draws.lock().unwrap_or_else(PoisonError::into_inner).bytes();
                let (store, provider) = (Arc::new(store), Arc::new(provider));
                if let Ok(engine) = Engine::start(config.clone(), store, provider, epoch, self.clock, draw).await {
                    break engine;
                }
            }
            self.line.cut();
            self.pass(500).await;
        };
        self.engine = Some(engine);
        // Of those before it nobody writes any more.
        self.pending = Arc::default();
        self.tell(&format!("daemon {} begins", self.daemons));
    }

    pub(crate) fn engine(&self) -> Engine {
        self.engine.clone().expect("a daemon is always there")
    }

    async fn live(mut self) -> Result<Report, Violation> {
        let lived = async {
            while self.step < self.plan.steps {
                self.step += 1;
                panics::at(self.step);
                self.happen().await?;
                self.check().await?;
            }
            if !self.plan.rests {
                return Ok(());
            }
            self.go_wrong().await?;
            Box::pin(self.rest()).await
        };
        if let Err((name, what)) = lived.await {
            return Err(self.violation(name, what).await);
        }
        self.report.steps = self.step;
        self.report.changes = self.changes.checked;
        self.report.checks = checks();
        for (trouble, count) in self.provider.counts().into_iter().chain(self.store.counts()) {
            *self.report.troubles.entry(trouble).or_default() += count;
        }
        Ok(self.report)
    }

    /// For the timeline.
    pub(crate) fn tell(&mut self, what: &str) {
        self.story.push((self.clock.now_ms(), format!("step {}: {what}", self.step)));
    }

    /// What was broken, with what had happened to those that it is about.
    async fn violation(&self, name: &'static str, what: String) -> Violation {
        let lines = at_once(self.store.truth.journal(Cursor(0), &JournalFilter::default(), usize::MAX)).await;
        let mut timeline: Vec<(u64, String)> = self.story.clone();
        for line in lines.unwrap_or_default() {
            let line = line.line;
            let about = line.sandbox.as_ref().map(ToString::to_string).unwrap_or_default();
            if !what.contains("sbx_") || what.contains(&about) {
                let moved = line.to.map(|to| format!("{:?} → {to:?}", line.from)).unwrap_or_default();
                let (kind, cause, by) = (line.kind, line.cause.unwrap_or_default(), line.by);
                let generation = line.generation.map(|generation| generation.to_string()).unwrap_or_default();
                timeline.push((
                    line.at_ms,
                    format!("    {about}@{generation} {kind} {moved} {cause} by {by} {}", line.data),
                ));
            }
        }
        timeline.sort_by_key(|(at_ms, _)| *at_ms);
        let told = |(at_ms, what): (u64, String)| {
            let passed_ms = at_ms.saturating_sub(EPOCH_MS);
            format!("{:>6}.{:03} {what}", passed_ms / 1000, passed_ms % 1000)
        };
        // What it is about may have begun long before the end.
        let named: Vec<&str> =
            what.split_whitespace().filter(|word| BEGUN_ONCE.iter().any(|kind| word.starts_with(kind))).collect();
        let late = timeline.split_off(timeline.len().saturating_sub(TIMELINE_MAX));
        let early = timeline.into_iter().filter(|(_, line)| named.iter().any(|id| line.contains(id))).take(EARLY_MAX);
        let timeline = early.chain(late).map(told).collect();
        Violation { seed: self.plan.seed, step: self.step, name, rule: rule(name), what, timeline }
    }

    /// Those that wait for their turn have it one after the other, unless none are taken up.
    pub(crate) async fn until_tasks_are_over(&mut self) {
        let mut waiting = self.tasks_at_large().await;
        while waiting > 0 && self.draining == Some(false) {
            self.watched(TASK_WITHIN).await;
            let left = self.tasks_at_large().await;
            if left >= waiting {
                break;
            }
            waiting = left;
        }
    }

    pub(crate) async fn pass(&self, ms: u64) {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    /// Somebody, and rather who is not gone.
    pub(crate) fn someone(&mut self) -> Option<SandboxId> {
        let gone_too = self.rng.chance(10);
        let some: Vec<&SandboxId> =
            self.known.iter().filter(|(_, known)| gone_too || !known.ended).map(|(id, _)| id).collect();
        let at = self.rng.below(some.len() as u64) as usize;
        some.get(at).map(|id| (*id).clone())
    }

    /// One thing happens.
    async fn happen(&mut self) -> Found {
        self.look_after_daemons().await;
        let deed = self.swarm.next(&mut self.rng);
        if !deed.is_fault() {
            self.did(deed);
        }
        match deed {
            Deed::Wait => {
                let ms = match self.rng.below(4) {
                    0 => self.rng.below(200),
                    1 => self.rng.below(5_000),
                    2 => self.rng.below(40_000),
                    _ => self.rng.below(120_000),
                };
                let ms = ms * self.pace / 10;
                self.tell(&format!("{ms} ms pass"));
                // Whoever starts daemons notices that one is dead.
                let line = self.line.clone();
                tokio::select! {
                    biased;
                    () = line.has_been_cut() => {}
                    () = self.pass(ms) => {}
                }
            }
            Deed::Restart | Deed::Kill | Deed::KillAtCall | Deed::Stall => self.end_daemon(deed).await,
            Deed::Partition | Deed::Outage | Deed::RefuseDumps | Deed::ShortMemory => self.endure(deed),
            Deed::SetClock => {
                let ms = self.rng.below(JUMP_MS_MAX);
                self.tell(&format!("{} forth by {ms} ms", deed.word()));
                self.set_forth_ms += ms;
                self.sim_clock.advance(ms);
                self.did(deed);
            }
            Deed::FillDisk => {
                let ms = 1_000 + self.rng.below(30_000);
                self.tell(&format!("the disk is full for {ms} ms"));
                self.lasts(deed);
                self.store.fill(Duration::from_millis(ms));
                self.disturb(ms);
            }
            Deed::Stray | Deed::Foreign => self.appear(deed).await,
            _ => self.act(deed).await?,
        }
        // Others get their turn before anybody looks.
        let ms = self.rng.below(400);
        self.pass(ms).await;
        let heard = std::mem::take(&mut *self.answers.lock().unwrap_or_else(PoisonError::into_inner));
        for answer in heard {
            self.hear(answer).await?;
        }
        if self.draining != Some(false) && !self.told_drained && self.rng.chance(20) {
            self.look_at_drain().await;
        }
        Ok(())
    }

    /// It was done, or what was done hit somebody.
    pub(crate) fn did(&mut self, deed: Deed) {
        *self.report.deeds.entry(deed).or_default() += 1;
    }

    /// This was come to.
    pub(crate) fn reached(&mut self, what: impl Into<String>) {
        *self.report.reached.entry(what.into()).or_default() += 1;
    }

    /// How much of this was felt so far.
    fn felt(&self, deed: Deed) -> u64 {
        let reached = |what: &str| self.report.reached.get(what).copied().unwrap_or(0);
        match deed {
            Deed::Partition => self.provider.unheard(),
            Deed::Outage => self.provider.turned_away(),
            Deed::FillDisk => self.store.refused(),
            Deed::RefuseDumps => reached("sandbox.memory_not_saved"),
            _ => reached("frozen to hibernating (memory_short)"),
        }
    }

    /// From now on this is so; it counts when somebody feels it.
    fn lasts(&mut self, deed: Deed) {
        self.lasting.insert(deed, self.felt(deed));
    }

    fn feel(&mut self) {
        let felt: Vec<Deed> =
            self.lasting.iter().filter(|(deed, before)| self.felt(**deed) > **before).map(|(deed, _)| *deed).collect();
        for deed in felt {
            self.lasting.remove(&deed);
            self.did(deed);
        }
    }

    /// How much went wrong so far.
    fn faults(&self) -> u64 {
        let calls = self.provider.counts().into_iter().chain(self.store.counts());
        let calls = calls.filter(|(trouble, _)| trouble.is_fault()).map(|(_, count)| count);
        self.report.faults() + calls.sum::<u64>()
    }

    /// What was drawn may have hit nobody, or too few: then daemons die until enough went wrong. They can always.
    async fn go_wrong(&mut self) -> Found {
        while self.faults() < FAULTS_MIN && !self.plan.without.deeds.contains(&Deed::Kill) {
            self.look_after_daemons().await;
            self.end_daemon(Deed::Kill).await;
            self.check().await?;
        }
        Ok(())
    }

    /// Something is so for a while.
    fn endure(&mut self, deed: Deed) {
        self.lasts(deed);
        let ms = 1_000 + self.rng.below(60_000);
        self.tell(&format!("{} for {ms} ms", deed.word()));
        let provider = self.provider.clone();
        let set = move |on: bool| match deed {
            Deed::Partition => provider.set_silent(on),
            Deed::Outage => provider.set_down(on),
            Deed::RefuseDumps => provider.truth().fail_dumps(on.then_some("simulated")),
            _ => provider.truth().set_memory_left(Some(if on { HARDLY_LEFT } else { ENOUGH_LEFT })),
        };
        set(true);
        if matches!(deed, Deed::Partition | Deed::Outage) {
            self.disturb(ms);
        }
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(ms)).await;
            set(false);
        });
    }

    fn disturb(&mut self, ms: u64) {
        self.disturbed_until = self.disturbed_until.max(Instant::now() + Duration::from_millis(ms) + SETTLES);
    }

    /// Whether time limits can be held to.
    pub(crate) fn is_calm(&self) -> bool {
        let calm = self.plan.faults_percent == 0 && !self.swarm.has(Trouble::ClockJump);
        calm && Instant::now() > self.disturbed_until && !self.line.is_cut()
    }

    /// Whoever was killed is followed by another one, and whoever was away goes on.
    async fn look_after_daemons(&mut self) {
        let (back, away) =
            std::mem::take(&mut self.away).into_iter().partition(|(until, _, _)| *until <= Instant::now());
        self.away = away;
        for (_, line, engine) in back {
            line.release();
            self.ask_who_was_away(engine);
        }
        if self.line.is_cut() {
            self.did(Deed::KillAtCall);
            self.tell("the daemon is dead");
            self.disturb(0);
            let ms = self.rng.below(20_000);
            self.pass(ms).await;
            self.begin().await;
        }
    }

    async fn end_daemon(&mut self, how: Deed) {
        self.tell(how.word());
        self.disturb(30_000);
        match how {
            // The next one begins when it is seen to be dead.
            Deed::KillAtCall => {
                let (calls, after) = (self.rng.below(40), self.rng.chance(50));
                self.line.cut_at(calls, after);
                return;
            }
            Deed::Kill => self.line.cut(),
            Deed::Stall => {
                self.line.hold();
                let until = Instant::now() + Duration::from_millis(self.rng.below(180_000));
                self.away.push((until, self.line.clone(), self.engine()));
            }
            _ => self.engine().shut_down(),
        }
        self.did(how);
        let ms = self.rng.below(20_000);
        self.pass(ms).await;
        self.begin().await;
    }

    pub(crate) async fn picture(&self) -> Picture {
        let owner = self.engine().config().owner.clone();
        let mut picture = at_once(Picture::take(self.store.truth.as_ref(), self.provider.truth(), &owner)).await;
        // They have no record, as it should be.
        picture.strays = self.strays.iter().filter(|id| picture.instances.remove(*id).is_some()).cloned().collect();
        picture
    }

    /// What must hold now, whatever happened.
    pub(crate) async fn check(&mut self) -> Found {
        for recorded in self.store.recorded() {
            self.changes.check(&recorded)?;
            self.check_room(&recorded)?;
            for what in came_to(&recorded) {
                self.reached(what);
            }
        }
        self.feel();
        let panics = panics::heard();
        holds("nothing-panics", panics.is_empty(), || panics.join("; "))?;
        let picture = self.picture().await;
        for id in picture.records.keys() {
            // Made by a create whose answer was lost, or forked.
            self.known.entry(id.clone()).or_default();
        }
        picture.check()?;
        let lost = self.known.keys().find(|id| !picture.records.contains_key(*id));
        holds("acknowledged-stays", lost.is_none(), || format!("{lost:?} has no record"))?;
        if let Some(max) = self.quota_max {
            picture.check_quota(max)?;
        }
        if self.is_calm() {
            picture.check_deadlines(self.clock.now_ms())?;
        }
        self.check_files(&picture).await?;
        self.check_tasks(&picture).await?;
        self.check_strays(&picture).await?;
        let overtaken = self.provider.overtaken();
        holds("superseded-changes-nothing", overtaken.is_none(), || overtaken.unwrap_or_default())?;
        let pestered = self.provider.pestered();
        holds("left-alone", pestered.is_none(), || pestered.unwrap_or_default())?;
        let begun = self.provider.begun_damaged();
        holds("damaged-is-not-begun-with", begun.is_none(), || begun.unwrap_or_default())?;
        let twice = self.provider.started_twice();
        holds("started-in-one-generation", twice.is_none(), || format!("{twice:?}"))?;
        if self.told_drained {
            let runs: Vec<_> = picture.living().collect();
            holds("drained-stays-drained", runs.is_empty(), || format!("{runs:?} runs"))?;
        }
        Ok(())
    }

    /// What was frozen, and was to go to disk for the room that it takes, does not lose its memory for that (L13).
    pub(crate) fn check_room(&self, recorded: &Recorded) -> Found {
        let Recorded::Sandbox { before: Some(before), after, .. } = recorded else { return Ok(()) };
        let for_room = before.cause.cause == Cause::MemoryShort && before.rests_for == Some(Cause::MemoryShort);
        let nobody_asked = !before.held && before.entry.is_none() && before.rollback.is_none();
        let saving = before.memory == Some(Memory::Saving) && before.phase.name() == PhaseName::Hibernating;
        if !(for_room && nobody_asked && saving && self.is_calm() && self.provider.damage_of(&after.id).is_none()) {
            return Ok(());
        }
        let lost = matches!(after.memory, Some(Memory::NotSaved { .. })) && after.phase.name() != PhaseName::Frozen;
        holds("room-keeps-memory", !lost, || {
            format!("{} was frozen, and is {:?} with {:?}", after.id, after.phase, after.memory)
        })
    }

    /// What was written is there.
    async fn check_files(&self, picture: &Picture) -> Found {
        for (id, known) in self.known.iter().filter(|(_, known)| !known.went_back) {
            let Some(record) = picture.records.get(id) else { continue };
            let runs = matches!(picture.instances.get(id), Some((_, InstanceState::Running)));
            if record.phase != Phase::Ready || !record.policy.persistent || !runs {
                continue;
            }
            let instance = InstanceRef { sandbox: id.clone(), generation: record.generation };
            for file in known.written.iter().rev().take(FILES_CHECKED) {
                let seen = self.provider.truth().file_stat(&instance, file).await;
                holds("acknowledged-work-stays", seen.is_ok(), || format!("{file} in {instance}: {seen:?}"))?;
            }
        }
        Ok(())
    }

    /// What is not ours stays, and what is ours and nobody's is collected no sooner than it may be (J1).
    async fn check_strays(&mut self, picture: &Picture) -> Found {
        for id in &self.foreign {
            let instance = InstanceRef { sandbox: id.clone(), generation: Generation::FIRST };
            let seen = self.provider.truth().observe(&instance).await;
            let lives = seen.as_ref().is_ok_and(|seen| seen.state == InstanceState::Running);
            holds("foreign-is-left-alone", lives, || format!("{seen:?}"))?;
        }
        let gone: Vec<SandboxId> = self.strays.iter().filter(|id| !picture.strays.contains(*id)).cloned().collect();
        for id in gone {
            self.strays.remove(&id);
            let listed = self.provider.listed(&id);
            let waited = listed.is_some_and(|(first, times)| times >= 2 && first.elapsed() >= self.grace);
            holds("strays-have-grace", waited, || {
                let ago = listed.map(|(first, times)| (first.elapsed(), times));
                format!("{id} is gone, and was first listed, and so often: {ago:?}")
            })?;
        }
        Ok(())
    }

    /// An instance that no record knows, of ours or of somebody else.
    async fn appear(&mut self, deed: Deed) {
        let (id, operation) = (SandboxId::from_bytes(self.rng.bytes()), OperationId::from_bytes(self.rng.bytes()));
        let ours = deed == Deed::Stray;
        self.tell(&format!("{}: {id}", deed.word()));
        let owner = if ours { self.engine().config().owner.clone() } else { "another".parse().expect("a mark") };
        let mutation = Mutation { operation, generation: Generation::FIRST, token: FencingToken(0), budget_ms: 10_000 };
        let spec = InstanceSpec {
            image: Image::default(),
            limits: ResourceLimits::default(),
            network: Network::default(),
            env: BTreeMap::new(),
            workdir: "/workspace".to_owned(),
            packages: false,
            labels: BTreeMap::new(),
            lifetime_ms: 365 * 24 * 3_600_000,
            recall: Recall::Never,
        };
        self.provider.truth().create(&mutation, &id, &owner, &spec).await.expect("a new instance");
        self.did(deed);
        if ours {
            self.strays.insert(id)
        } else {
            self.foreign.insert(id)
        };
    }

    /// Somebody has everything on a screen, and it is read again and again; nothing follows from that (T9).
    async fn watched(&mut self, how_long: Duration) {
        let until = Instant::now() + how_long;
        while Instant::now() < until {
            if self.plan.seed.is_multiple_of(2) {
                for id in self.known.keys() {
                    let _ = self.engine().get(&Project::default(), &Which::Id(id.clone()), "a screen").await;
                }
            }
            tokio::time::sleep_until(until.min(Instant::now() + LOOKS_EVERY)).await;
        }
    }

    /// Faults stop: in bounded time everything is at rest, and stays so without anybody asking (P3).
    async fn rest(&mut self) -> Found {
        self.tell("faults stop");
        self.store.heal();
        self.provider.heal();
        self.provider.set_silent(false);
        self.provider.set_down(false);
        self.provider.truth().fail_dumps(None);
        if self.swarm.has(Trouble::Memory) {
            self.provider.truth().set_memory_left(Some(ENOUGH_LEFT));
        }
        for (_, line, _) in &self.away {
            line.release();
        }
        self.line.stay();
        if self.line.is_cut() {
            self.did(Deed::KillAtCall);
            self.begin().await;
        }
        // What was asked for is answered by then, also by who did not wait.
        tokio::time::sleep(PATIENCE).await;
        self.end_schedules().await;
        self.watched(REST_WITHIN).await;
        self.until_tasks_are_over().await;
        self.check().await?;
        let picture = self.picture().await;
        let room = self.quota_max.is_none_or(|max| picture.count() < max);
        picture.check_rest(self.draining != Some(false), room)?;
        if !self.swarm.has(Trouble::ClockJump) {
            picture.check_idle(self.clock.now_ms())?;
        }
        let figures = self.engine().stats(None).await;
        let drivers =
            figures.map(|figures| figures.drivers).map_err(|error| ("nothing-is-at-work", error.to_string()))?;
        holds("nothing-is-at-work", drivers == 0, || format!("{drivers} drivers are at work"))?;
        picture.check_leftovers(&self.store).await?;
        picture.check_services(self.provider.truth()).await?;
        let open = ExecutionQuery { open: true, limit: MANY, ..ExecutionQuery::default() };
        let listed = self.engine().execution_rows(&open).await;
        let listed = listed.map_err(|error| ("listed-executions-run", error.to_string()))?.items;
        picture.check_executions(&listed, self.provider.truth()).await?;
        if self.draining == Some(true) {
            let status = self.engine().drain_status().await;
            let drained = status.as_ref().is_ok_and(viv_engine::DrainStatus::is_drained);
            let unreachable = picture.records.values().any(|record| record.phase == Phase::Lost);
            holds("drain-ends", drained || unreachable, || format!("{status:?}"))?;
        }
        self.report.mutations = self.provider.mutations();
        let cursor = *self.store.tail().borrow();
        // Instances end at their hard deadline in this time: what lives long enough to rest is what must not be touched.
        let ends = picture.records.values().filter_map(Sandbox::lives_until_ms);
        let idles = picture.records.values().filter_map(|record| record.idle_at_ms(true));
        let soonest_ms = ends.chain(idles).min().unwrap_or(u64::MAX);
        let left_ms = soonest_ms.saturating_sub(self.clock.now_ms() + 30_000 + self.set_forth_ms);
        self.watched(REST_FOR.min(Duration::from_millis(left_ms))).await;
        let mutations = self.provider.mutations() - self.report.mutations;
        holds("nothing-is-changed", mutations == 0, || format!("{mutations} changes were asked for"))?;
        let lines = at_once(self.store.truth.journal(cursor, &JournalFilter::default(), 5)).await.unwrap_or_default();
        holds("nothing-is-recorded", lines.is_empty(), || format!("{lines:?}"))?;
        self.report.trace = self.trace().await;
        Box::pin(self.go_straight()).await?;
        self.check().await
    }

    /// How many tasks are not over.
    async fn tasks_at_large(&self) -> usize {
        at_once(self.store.truth.living_tasks()).await.map_or(0, |living| living.len())
    }

    /// A hash of the whole journal, of all that was done, and of every call that the provider got with what came of it: the
    /// same for the same seed.
    async fn trace(&self) -> u64 {
        let lines = at_once(self.store.truth.journal(Cursor(0), &JournalFilter::default(), usize::MAX)).await;
        let text = format!("{:?}{:?}", lines.unwrap_or_default(), self.story);
        hashed(self.provider.calls(), text.as_bytes())
    }
}

/// What a change came to, in words that are the same for the same.
fn came_to(recorded: &Recorded) -> Vec<String> {
    match recorded {
        Recorded::Sandbox { before, after, lines } => {
            let word = |phase: PhaseName| format!("{phase:?}").to_lowercase();
            let line = |line: &NewLine| match (line.from, line.to) {
                (Some(from), Some(to)) => {
                    let cause = line.cause.as_deref().unwrap_or_default();
                    format!("{} to {} ({cause})", word(from), word(to))
                }
                (Some(_) | None, Some(_) | None) => line.kind.clone(),
            };
            let restored = |record: &Sandbox| matches!(record.memory, Some(Memory::Restored { .. }));
            let with_memory = restored(after) && !before.as_deref().is_some_and(restored);
            let forked = before.is_none() && matches!(after.memory, Some(Memory::Kept { .. }));
            let memory = with_memory.then_some("restored with its memory");
            let memory = memory.or(forked.then_some("forked with its memory"));
            lines.iter().map(line).chain(memory.map(str::to_owned)).collect()
        }
        Recorded::Task { before: Some(before), after } => {
            let asked = before.stop.is_none() && after.stop.is_some() && before.state == TaskState::Committing;
            let moved = before.state != after.state;
            let goes_on = after.run > before.run;
            [
                moved.then(|| format!("a task is {:?}", after.state).to_lowercase()),
                asked.then(|| "a task is stopped in commit".to_owned()),
                goes_on.then(|| "a task is continued".to_owned()),
            ]
            .into_iter()
            .flatten()
            .collect()
        }
        Recorded::Schedule { before: Some(before), after: Some(after), .. } => {
            let ran = after.runs > before.runs;
            ran.then(|| "a schedule ran".to_owned()).into_iter().collect()
        }
        Recorded::Row { .. }
        | Recorded::Schedule { .. }
        | Recorded::Over { .. }
        | Recorded::Idle { .. }
        | Recorded::Late { .. }
        | Recorded::Reset { .. }
        | Recorded::Task { before: None, .. }
        | Recorded::Execution { .. }
        | Recorded::Token { .. }
        | Recorded::Lease { .. }
        | Recorded::Foreign { .. } => Vec::new(),
    }
}

/// The folder of a store in a file: in memory where that can be, and gone with the world.
struct StoreFile(std::path::PathBuf);

impl StoreFile {
    fn new(seed: u64) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let memory = std::path::Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = place.join(format!("viv-world-{}-{seed}-{count}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for a store");
        Self(folder)
    }
}

impl Drop for StoreFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Of all layers of cleanup only that for memory, which wants nobody's patience: worlds are shorter than what the others
/// wait for.
fn only_memory() -> CleanupConfig {
    let never = Duration::from_secs(365 * 24 * 3_600);
    CleanupConfig {
        period: never,
        age_period: never,
        full_period: never,
        leftover_after: never,
        unhealthy_after: never,
        unhealthy_age: never,
        emergency_above: 2.0,
        ..CleanupConfig::default()
    }
}

/// A client.
pub(crate) fn somebody() -> Actor {
    Actor::part("somebody")
}

/// How somebody who names a generation calls itself: no two requests are of one name.
const HOLDER: &str = "who holds generation";

/// Somebody who asks for something about this generation of a sandbox alone.
pub(crate) fn holder(of: &SandboxId, held: Generation, deed: Deed, step: u64) -> Actor {
    Actor::part(&format!("{HOLDER} {} of {of} and asks for {} at {step}", held.0, deed.word()))
}

/// What this one named, if it named something: of others that are made for it, it names nothing.
pub(crate) fn named_by(who: &Actor) -> Option<(SandboxId, Generation)> {
    let mut words = who.who.strip_prefix(HOLDER)?.split_ascii_whitespace();
    let (generation, of) = (words.next()?, words.nth(1)?);
    Some((of.parse().ok()?, Generation(generation.parse().ok()?)))
}
