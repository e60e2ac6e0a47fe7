//! A provider that loses, delays and repeats, and whose instances can be damaged: the one in memory in worlds, and any
//! other on a real daemon ([`FaultyProvider::around`]).

mod alone;
mod calls;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use viv_core::{EndCause, ExecutionId, FencingToken, Generation, SandboxId, SnapshotId};
use viv_provider::sim::SimProvider;
use viv_provider::{InstanceRef, Listed, Page, ProviderError, SnapshotSeen};

use crate::line::Line;
use crate::orders::{Moment, Orders, Turn};
use crate::plan::Trouble;
use crate::rng::Rng;
use crate::script::{Script, Way};

use alone::Alone;

type Result<T> = std::result::Result<T, ProviderError>;

/// What goes wrong with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It never arrives.
    Lost,
    /// It is done, and the answer is lost.
    Unanswered,
    /// It arrives twice.
    Twice,
    /// It is done later, whether the caller still waits or not.
    Late(Duration),
    /// It is done at once, and answered later.
    LateAnswer(Duration),
    /// Nobody is there.
    Unavailable,
    /// The whole daemon is killed, before or after it is done.
    Killed(Moment),
}

/// What is wrong with an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// Its agent answers nothing.
    Hangs,
    /// Its root filesystem is gone.
    Rootless,
    /// Asked about it, the provider says that it knows no such thing, and has it all the same.
    Denied,
    /// Asked about it, the provider says that it runs, even when it has ended or is frozen.
    Poses,
}

/// What can go wrong with a call.
const OF_CALLS: [Trouble; 6] =
    [Trouble::Lost, Trouble::Unanswered, Trouble::Twice, Trouble::Late, Trouble::LateAnswer, Trouble::Unavailable];

/// What can go wrong with one that has a stream in it, or opens one: that cannot be made again, or later.
const OF_STREAMS: [Trouble; 4] = [Trouble::Lost, Trouble::Unanswered, Trouble::LateAnswer, Trouble::Unavailable];

/// What can go wrong when nothing is said.
const TROUBLES: [Trouble; 9] = [
    Trouble::Lost,
    Trouble::Unanswered,
    Trouble::Twice,
    Trouble::Late,
    Trouble::LateAnswer,
    Trouble::Unavailable,
    Trouble::PartialListing,
    Trouble::UnheardEnd,
    Trouble::BrokenStream,
];

/// How many saves in a hundred take their time, in worlds where calls are answered late.
const SLOW_SAVES_PERCENT: u64 = 30;

/// How long that is at most.
const SLOW_SAVE_MS_MAX: u64 = 20_000;

/// How late the answer to a chosen call is: within what any call may take.
const LATE_ANSWER: Duration = Duration::from_millis(1_500);

/// Listings that are remembered, to be told again when they are stale.
const LISTINGS_KEPT: usize = 6;

/// The last of them.
#[derive(Debug)]
struct Kept<T> {
    pages: VecDeque<Page<T>>,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self { pages: VecDeque::new() }
    }
}

impl<T: Clone> Kept<T> {
    fn keep(&mut self, page: Page<T>) {
        self.pages.push_back(page);
        if self.pages.len() > LISTINGS_KEPT {
            self.pages.pop_front();
        }
    }

    /// What was listed so many listings ago, or at first.
    fn older(&self, age: usize) -> Option<Page<T>> {
        self.pages.get(self.pages.len().saturating_sub(1 + age)).cloned()
    }
}

#[derive(Debug)]
struct Chance {
    rng: Rng,
    percent: u64,
    troubles: Vec<Trouble>,
    counts: BTreeMap<Trouble, u64>,
    listings: Kept<Listed>,
    saves: Kept<SnapshotSeen>,
    /// The greatest token under which something of each sandbox was changed.
    tokens: BTreeMap<SandboxId, FencingToken>,
    /// Somebody with a lesser one came after that, and was let in.
    overtaken: Option<String>,
    /// When each instance was last probed, or was to be.
    probed: BTreeMap<InstanceRef, Instant>,
    /// When each sandbox was first in a listing that somebody got, and in how many it was.
    listed: BTreeMap<SandboxId, (Instant, u64)>,
    /// How late a late call is at most.
    late_ms_max: u64,
    /// In which generations a command was started.
    starts: BTreeMap<ExecutionId, BTreeSet<Generation>>,
    /// Somebody asked who was to be left alone.
    pestered: Option<String>,
    /// Whether every look goes through the breaker: where there are hooks, one before them does not.
    looks_count: bool,
    /// Snapshots that are damaged.
    damaged: BTreeSet<SnapshotId>,
    /// One of them was begun with all the same.
    begun_damaged: Option<String>,
}

impl Chance {
    /// A change was let in.
    fn took(&mut self, sandbox: &SandboxId, token: FencingToken) {
        let highest = self.tokens.entry(sandbox.clone()).or_insert(token);
        if token < *highest {
            self.overtaken = Some(format!("{sandbox} was changed under {token:?}, and before under {highest:?}"));
        }
        *highest = token.max(*highest);
    }
}

/// What a hash begins with.
pub(crate) const HASH_OF_NOTHING: u64 = 0xcbf2_9ce4_8422_2325;

/// One that goes on from another (FNV-1a): the same on every machine.
pub(crate) fn hashed(hash: u64, bytes: &[u8]) -> u64 {
    let with = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(hash, with)
}

/// How late a call is at most in a world.
const LATE_MS_MAX: u64 = 90_000;

/// A provider in which things go wrong. Clones share their state, but for the line.
#[derive(Debug, Clone)]
pub struct FaultyProvider<P = SimProvider> {
    inner: P,
    /// On a real daemon: what is ordered.
    orders: Option<Arc<Orders>>,
    line: Line,
    chance: Arc<Mutex<Chance>>,
    damage: Arc<Mutex<BTreeMap<SandboxId, Damage>>>,
    mutations: Arc<AtomicU64>,
    silent: Arc<AtomicBool>,
    down: Arc<AtomicBool>,
    /// What this daemon was refused.
    alone: Arc<Mutex<Alone>>,
    partial: Arc<AtomicBool>,
    unheard: Arc<AtomicU64>,
    /// How many calls were refused because it was down.
    turned_away: Arc<AtomicU64>,
    /// A hash of all calls, and of what came of them.
    calls: Arc<AtomicU64>,
    script: Arc<Mutex<Script>>,
}

impl FaultyProvider<SimProvider> {
    /// One around this, where this many calls in a hundred go wrong.
    pub fn new(inner: SimProvider, seed: u64, percent: u64) -> Self {
        Self::with_troubles(inner, seed, percent, TROUBLES.to_vec())
    }

    /// The same, where only these things go wrong.
    pub(crate) fn with_troubles(inner: SimProvider, seed: u64, percent: u64, troubles: Vec<Trouble>) -> Self {
        Self::made(inner, seed, percent, troubles, LATE_MS_MAX)
    }

    /// Ends what lives of a sandbox. It is not damaged any more, but who says that it runs still does.
    pub(crate) fn crash(&self, sandbox: &SandboxId, cause: EndCause) -> bool {
        lock(&self.damage).retain(|damaged, damage| damaged != sandbox || *damage == Damage::Poses);
        self.inner.crash(sandbox, cause)
    }

    /// A snapshot is not what was saved any more, and is not to be begun with.
    /// Whether there was one, and it was whole.
    pub(crate) fn damage_snapshot(&self, snapshot: &SnapshotId) -> bool {
        let was_there = self.inner.damage_snapshot(snapshot);
        lock(&self.chance).damaged.insert(snapshot.clone()) && was_there
    }
}

impl<P> FaultyProvider<P> {
    /// One around that of a real daemon: so many calls in a hundred go wrong, and those that are ordered.
    pub fn around(inner: P, seed: u64, percent: u64, orders: Arc<Orders>) -> Self {
        let troubles = Trouble::ALL.iter().copied().filter(|trouble| trouble.is_fault()).collect();
        let made = Self::made(inner, seed, percent, troubles, orders.late_ms_max());
        Self { orders: Some(orders), ..made }
    }

    fn made(inner: P, seed: u64, percent: u64, troubles: Vec<Trouble>, late_ms_max: u64) -> Self {
        let chance = Chance {
            rng: Rng::new(seed),
            percent,
            troubles,
            counts: BTreeMap::new(),
            listings: Kept::default(),
            saves: Kept::default(),
            tokens: BTreeMap::new(),
            overtaken: None,
            probed: BTreeMap::new(),
            listed: BTreeMap::new(),
            late_ms_max,
            starts: BTreeMap::new(),
            pestered: None,
            looks_count: false,
            damaged: BTreeSet::new(),
            begun_damaged: None,
        };
        Self {
            inner,
            orders: None,
            line: Line::new(),
            chance: Arc::new(Mutex::new(chance)),
            damage: Arc::default(),
            mutations: Arc::default(),
            silent: Arc::default(),
            down: Arc::default(),
            alone: Arc::default(),
            partial: Arc::default(),
            unheard: Arc::default(),
            turned_away: Arc::default(),
            calls: Arc::new(AtomicU64::new(HASH_OF_NOTHING)),
            script: Arc::default(),
        }
    }

    /// Nobody ever answers: the caller has a deadline. On a real daemon that is not waited for in full.
    async fn timed_out<T>(&self, call: &'static str) -> Result<T> {
        match &self.orders {
            None => std::future::pending().await,
            Some(orders) => {
                tokio::time::sleep(orders.silence()).await;
                let after_ms = u64::try_from(orders.silence().as_millis()).unwrap_or(u64::MAX);
                Err(ProviderError::TimedOut { what: call, after_ms })
            }
        }
    }

    /// Whether what was seen is remembered, for those who check: a world has an end, and a daemon has none.
    fn keeps(&self) -> bool {
        self.orders.is_none()
    }

    /// The same for a daemon that reaches it by this line.
    pub(crate) fn by(&self, line: &Line) -> Self
    where
        P: Clone,
    {
        Self { line: line.clone(), alone: Arc::default(), ..self.clone() }
    }

    /// How often what went wrong.
    pub(crate) fn counts(&self) -> BTreeMap<Trouble, u64> {
        lock(&self.chance).counts.clone()
    }

    /// A command that was started in more than one generation.
    pub(crate) fn started_twice(&self) -> Option<ExecutionId> {
        let chance = lock(&self.chance);
        chance.starts.iter().find(|(_, generations)| generations.len() > 1).map(|(execution, _)| execution.clone())
    }

    /// A command is started in this generation.
    pub(crate) fn started(&self, execution: ExecutionId, generation: Generation) {
        lock(&self.chance).starts.entry(execution).or_default().insert(generation);
    }

    /// A change by somebody who was superseded.
    pub(crate) fn overtaken(&self) -> Option<String> {
        lock(&self.chance).overtaken.clone()
    }

    /// A call to who was to be left alone.
    pub(crate) fn pestered(&self) -> Option<String> {
        lock(&self.chance).pestered.clone()
    }

    /// Whether looks count among the calls after which a provider is left alone.
    pub(crate) fn set_looks_count(&self, count: bool) {
        lock(&self.chance).looks_count = count;
    }

    /// Whether a snapshot is damaged.
    pub(crate) fn is_damaged(&self, snapshot: &SnapshotId) -> bool {
        lock(&self.chance).damaged.contains(snapshot)
    }

    /// Something that was begun with a damaged snapshot.
    pub(crate) fn begun_damaged(&self) -> Option<String> {
        lock(&self.chance).begun_damaged.clone()
    }

    /// When it was last probed, or was to be.
    pub(crate) fn probed_at(&self, instance: &InstanceRef) -> Option<Instant> {
        lock(&self.chance).probed.get(instance).copied()
    }

    /// When it was first in a listing that somebody got, and in how many it was.
    pub(crate) fn listed(&self, sandbox: &SandboxId) -> Option<(Instant, u64)> {
        lock(&self.chance).listed.get(sandbox).copied()
    }

    /// How many calls went nowhere because nobody was there.
    pub fn unheard(&self) -> u64 {
        self.unheard.load(Ordering::SeqCst)
    }

    /// How many calls were refused because it was down.
    pub(crate) fn turned_away(&self) -> u64 {
        self.turned_away.load(Ordering::SeqCst)
    }

    /// A hash of all calls so far, of who they were about, and of what came of them.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    /// A call was made, or answered.
    fn traced(&self, name: &str, about: Option<&SandboxId>, what: &str) {
        if !self.keeps() {
            return;
        }
        let about = about.map(SandboxId::as_str).unwrap_or_default();
        let hash = [name, about, what].into_iter().fold(self.calls(), |hash, text| hashed(hash, text.as_bytes()));
        self.calls.store(hash, Ordering::SeqCst);
    }

    /// Whether no call arrives at all, as on a machine that is too busy for anything.
    pub fn set_silent(&self, silent: bool) {
        self.silent.store(silent, Ordering::SeqCst);
    }

    /// Whether every call is refused at once, because nobody is there.
    pub fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    /// Whether nobody answers who asks for what was left.
    pub fn set_audits_hang(&self, hang: bool) {
        lock(&self.script).set_audits_hang(hang);
    }

    /// Whether every listing has a part only, and says so.
    pub fn set_partial(&self, partial: bool) {
        self.partial.store(partial, Ordering::SeqCst);
    }

    /// Whether every listing fails, and nothing else.
    pub fn set_listings_fail(&self, fail: bool) {
        lock(&self.script).set_fail(fail);
    }

    /// From now on every listing is as it was so many listings ago; before there were so many, as at the first.
    pub fn set_stale(&self, by: usize) {
        lock(&self.script).set_stale(by);
    }

    /// From now on so many calls in a hundred go wrong.
    pub fn set_percent(&self, percent: u64) {
        lock(&self.chance).percent = percent;
    }

    /// The provider without its faults, to see what is really there.
    pub fn truth(&self) -> &P {
        &self.inner
    }

    /// These listings are older, by so many, and of these ends nobody hears; both are counted from 0.
    pub fn misbehave(&self, stale: BTreeMap<u64, usize>, unheard: BTreeSet<u64>) {
        *lock(&self.script) = Script::new(stale, unheard);
    }

    /// How many listings and waits for an end there were since [`Self::misbehave`].
    pub fn counted(&self) -> (u64, u64) {
        lock(&self.script).counts()
    }

    /// How many changes of instances were asked of it.
    pub fn mutations(&self) -> u64 {
        self.mutations.load(Ordering::SeqCst)
    }

    /// From now on nothing goes wrong, and everything is whole again.
    pub(crate) fn heal(&self) {
        lock(&self.chance).percent = 0;
        lock(&self.damage).clear();
    }

    /// Damages an instance, or makes it whole.
    pub fn damage(&self, sandbox: &SandboxId, damage: Option<Damage>) {
        match damage {
            Some(damage) => lock(&self.damage).insert(sandbox.clone(), damage),
            None => lock(&self.damage).remove(sandbox),
        };
    }

    pub(crate) fn damage_of(&self, sandbox: &SandboxId) -> Option<Damage> {
        lock(&self.damage).get(sandbox).copied()
    }

    /// What goes wrong with this call, of what can.
    fn trouble(&self, call: &'static str, of: &[Trouble]) -> Option<Trouble> {
        let ordered = self.orders.as_ref().and_then(|orders| orders.take(call, |turn| turn.is_among(of)));
        if let Some(Turn::Trouble(trouble)) = ordered {
            *lock(&self.chance).counts.entry(trouble).or_default() += 1;
            return Some(trouble);
        }
        let mut chance = lock(&self.chance);
        let chance = &mut *chance;
        if !chance.rng.chance(chance.percent) {
            return None;
        }
        let possible: Vec<Trouble> = chance.troubles.iter().copied().filter(|trouble| of.contains(trouble)).collect();
        if possible.is_empty() {
            return None;
        }
        let trouble = possible[chance.rng.below(possible.len() as u64) as usize];
        *chance.counts.entry(trouble).or_default() += 1;
        Some(trouble)
    }

    /// What goes wrong with this call, of these.
    fn fault(&self, call: &'static str, of: &[Trouble]) -> Option<Fault> {
        if self.is_silent() {
            return Some(Fault::Lost);
        }
        if self.is_down() {
            return Some(Fault::Unavailable);
        }
        if let Some(moment) = self.orders.as_ref().and_then(|orders| orders.is_killed_at(call)) {
            return Some(Fault::Killed(moment));
        }
        if call == "save" && self.takes_its_time() {
            let ms = 100 + lock(&self.chance).rng.below(SLOW_SAVE_MS_MAX);
            return Some(Fault::LateAnswer(Duration::from_millis(ms)));
        }
        let late = || {
            let mut chance = lock(&self.chance);
            let late_ms_max = chance.late_ms_max;
            Duration::from_millis(100 + chance.rng.below(late_ms_max))
        };
        match self.trouble(call, of)? {
            Trouble::Lost => Some(Fault::Lost),
            Trouble::Unanswered => Some(Fault::Unanswered),
            Trouble::Twice => Some(Fault::Twice),
            Trouble::Late => Some(Fault::Late(late())),
            Trouble::LateAnswer => Some(Fault::LateAnswer(late())),
            _ => Some(Fault::Unavailable),
        }
    }

    /// Whether a save is done and answered only later, where that happens at all: it takes its time more often than other
    /// calls do, and what comes meanwhile matters.
    fn takes_its_time(&self) -> bool {
        let mut chance = lock(&self.chance);
        let happens = self.keeps() && chance.percent > 0 && chance.troubles.contains(&Trouble::LateAnswer);
        let slow = happens && chance.rng.chance(SLOW_SAVES_PERCENT);
        if slow {
            *chance.counts.entry(Trouble::LateAnswer).or_default() += 1;
        }
        slow
    }

    /// Whether this goes wrong here at all: what does not draws no number.
    fn can(&self, trouble: Trouble) -> bool {
        lock(&self.chance).troubles.contains(&trouble)
    }

    fn is_down(&self) -> bool {
        let down = self.down.load(Ordering::SeqCst);
        if down {
            self.turned_away.fetch_add(1, Ordering::SeqCst);
        }
        down
    }

    /// Whether nothing is heard from the provider at all.
    fn is_out_of_reach(&self) -> bool {
        self.down.load(Ordering::SeqCst) || self.silent.load(Ordering::SeqCst)
    }

    /// Whether no call arrives; then this one does not.
    fn is_silent(&self) -> bool {
        let silent = self.silent.load(Ordering::SeqCst);
        if silent {
            self.unheard.fetch_add(1, Ordering::SeqCst);
        }
        silent
    }

    /// How a change goes that was chosen.
    fn chosen(&self, call: &'static str, sandbox: &SandboxId) -> Option<Fault> {
        Some(match self.line.way_of(call, false, Some(sandbox))? {
            Way::CrashBefore => Fault::Killed(Moment::Before),
            Way::CrashAfter => Fault::Killed(Moment::After),
            Way::Unanswered => Fault::Unanswered,
            Way::Twice => Fault::Twice,
            Way::AnsweredLate => Fault::LateAnswer(LATE_ANSWER),
        })
    }

    /// The daemon is dead: the real one, or what its line can tell of it.
    fn die(&self) {
        match &self.orders {
            Some(orders) => orders.die(),
            None => self.line.cut(),
        }
    }

    /// A call on its way. The closure makes it from clones, so that it can arrive late or twice.
    async fn through<T, F>(&self, name: &'static str, call: impl Fn(P) -> F) -> Result<T>
    where
        P: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let going = async { self.on_its_way(name, self.fault(name, &OF_CALLS), call).await };
        self.line.call(self.heard(name, None, going)).await
    }

    /// One about a sandbox, which is admitted by itself.
    async fn through_about<T, F>(&self, name: &'static str, about: &SandboxId, call: impl Fn(P) -> F) -> Result<T>
    where
        P: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let going = async { self.on_its_way(name, self.fault(name, &OF_CALLS), call).await };
        self.line.call(self.heard(name, Some(about), going)).await
    }

    /// What a daemon hears, with what follows from that for the next one that it asks.
    async fn heard<T>(
        &self,
        name: &'static str,
        about: Option<&SandboxId>,
        going: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let whom = about;
        self.traced(name, whom, "asked");
        let about = about.filter(|_| self.keeps() && Alone::counts(name, lock(&self.chance).looks_count));
        if let Some(about) = about.filter(|_| !self.line.was_held())
            && let Some(what) = lock(&self.alone).asked(name, about, Instant::now())
        {
            lock(&self.chance).pestered.get_or_insert(what);
        }
        let answer = going.await;
        match &answer {
            Ok(_) => self.traced(name, whom, "done"),
            Err(error) => self.traced(name, whom, &error.to_string()),
        }
        match (&answer, about) {
            (Err(error), Some(about)) if error.is_transient() => lock(&self.alone).refused(about, Instant::now()),
            (Err(error), None) if error.is_transient() => {}
            (Ok(_) | Err(_), _) => lock(&self.alone).answered(),
        }
        answer
    }

    /// One that cannot be made again: it has a stream in it, or opens one.
    async fn through_once<T>(&self, name: &'static str, call: impl Future<Output = Result<T>>) -> Result<T> {
        let going = async { self.once(name, self.fault(name, &OF_STREAMS), call).await };
        self.line.call(self.heard(name, None, going)).await
    }

    async fn once<T>(
        &self,
        name: &'static str,
        fault: Option<Fault>,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        match fault {
            None | Some(Fault::Twice | Fault::Late(_)) => call.await,
            Some(Fault::Lost) => self.timed_out(name).await,
            Some(Fault::Unanswered) => {
                let _ = call.await;
                self.timed_out(name).await
            }
            Some(Fault::LateAnswer(by)) => {
                let answer = call.await;
                tokio::time::sleep(by).await;
                answer
            }
            Some(Fault::Killed(Moment::Before)) => {
                self.die();
                self.timed_out(name).await
            }
            Some(Fault::Killed(Moment::After)) => {
                let _ = call.await;
                self.die();
                self.timed_out(name).await
            }
            Some(Fault::Unavailable) => Err(unavailable()),
        }
    }

    async fn on_its_way<T, F>(&self, name: &'static str, fault: Option<Fault>, call: impl Fn(P) -> F) -> Result<T>
    where
        P: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        match fault {
            Some(Fault::Twice) => {
                let _ = call(self.inner.clone()).await;
                call(self.inner.clone()).await
            }
            Some(Fault::Late(by)) => {
                let late = call(self.inner.clone());
                let arrives = tokio::spawn(async move {
                    tokio::time::sleep(by).await;
                    late.await
                });
                match arrives.await {
                    Ok(answer) => answer,
                    Err(_) => self.timed_out(name).await,
                }
            }
            other => self.once(name, other, call(self.inner.clone())).await,
        }
    }

    /// A change, which is counted.
    async fn change<T, F>(&self, name: &'static str, sandbox: &SandboxId, call: impl Fn(P) -> F) -> Result<T>
    where
        P: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.mutations.fetch_add(1, Ordering::SeqCst);
        self.change_uncounted(name, sandbox, call).await
    }

    /// One that says nothing about rest, such as a probe.
    async fn change_uncounted<T, F>(&self, name: &'static str, sandbox: &SandboxId, call: impl Fn(P) -> F) -> Result<T>
    where
        P: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let going = async {
            let fault = self.chosen(name, sandbox).or_else(|| self.fault(name, &OF_CALLS));
            self.on_its_way(name, fault, call).await
        };
        self.line.call(self.heard(name, Some(sandbox), going)).await
    }

    /// A change with a stream in it.
    async fn change_once<T>(
        &self,
        name: &'static str,
        sandbox: &SandboxId,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.mutations.fetch_add(1, Ordering::SeqCst);
        let going = async {
            let fault = self.chosen(name, sandbox).or_else(|| self.fault(name, &OF_STREAMS));
            self.once(name, fault, call).await
        };
        self.line.call(self.heard(name, Some(sandbox), going)).await
    }

    async fn mutate<T, F>(
        &self,
        name: &'static str,
        (sandbox, token): (SandboxId, FencingToken),
        call: impl Fn(P) -> F,
    ) -> Result<T>
    where
        P: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let keeps = self.keeps();
        self.change(name, &sandbox, |inner| {
            let (call, chance, sandbox) = (call(inner), self.chance.clone(), sandbox.clone());
            async move {
                let answer = call.await;
                if keeps && answer.is_ok() {
                    lock(&chance).took(&sandbox, token);
                }
                answer
            }
        })
        .await
    }

    /// The agent is asked: what hangs never answers.
    async fn agent(&self, sandbox: &SandboxId) -> Result<()> {
        match self.damage_of(sandbox) {
            Some(Damage::Hangs) => std::future::pending().await,
            Some(Damage::Rootless | Damage::Denied | Damage::Poses) | None => Ok(()),
        }
    }

    /// A file is asked for: what has no root has none.
    async fn file(&self, sandbox: &SandboxId) -> Result<()> {
        self.agent(sandbox).await?;
        match self.damage_of(sandbox) {
            Some(Damage::Rootless) if !self.is_out_of_reach() => {
                lock(&self.alone).answered();
                Err(ProviderError::Failed { what: "the root is not mounted".to_owned() })
            }
            Some(Damage::Hangs | Damage::Denied | Damage::Poses | Damage::Rootless) | None => Ok(()),
        }
    }
}

/// Nobody is there.
fn unavailable() -> ProviderError {
    let source = std::io::Error::other("simulated");
    ProviderError::Unavailable { what: "the provider".to_owned(), source }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
