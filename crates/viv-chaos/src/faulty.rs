//! A provider that loses, delays and repeats, and whose instances can be damaged: the one in memory in worlds, and any
//! other on a real daemon ([`FaultyProvider::around`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use viv_core::exec::{ExecSpec, ExecStatus, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::{
    EndCause, ExecutionId, FencingToken, Generation, Identity, OwnerMark, RequestId, SandboxId, SnapshotId,
};
use viv_provider::sim::SimProvider;
use viv_provider::{
    ByteReader, Capabilities, Deadline, DeadlineChange, Dialled, DiskUsage, Ended, FileWrite, Finding, InstanceRef,
    InstanceSpec, LogPart, Mutation, Observation, Obstacle, OutputStream, Page, PageRequest, ProcessSeen, Provider,
    ProviderError, RequestStream, ResourceLimits, SaveRequest, Snapshot, SnapshotSeen, Swept, WatchStream, Whereabouts,
};

use crate::line::Line;
use crate::orders::{Moment, Orders, Turn};
use crate::plan::Trouble;
use crate::rng::Rng;

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
}

/// All that can go wrong with a call.
const TROUBLES: [Trouble; 7] = [
    Trouble::Lost,
    Trouble::Unanswered,
    Trouble::Twice,
    Trouble::Late,
    Trouble::Unavailable,
    Trouble::PartialListing,
    Trouble::UnheardEnd,
];

/// Listings that are remembered, to be told again when they are stale.
const LISTINGS_KEPT: usize = 6;

#[derive(Debug)]
struct Chance {
    rng: Rng,
    percent: u64,
    troubles: Vec<Trouble>,
    counts: BTreeMap<Trouble, u64>,
    listings: VecDeque<Page>,
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
    partial: Arc<AtomicBool>,
    stale: Arc<Mutex<Stale>>,
    unheard: Arc<AtomicU64>,
    script: Arc<Mutex<Script>>,
}

/// Listings as they were some listings ago, when a test asks for that.
#[derive(Debug, Default)]
struct Stale {
    fail: bool,
    by: usize,
    told: VecDeque<Page>,
}

/// Listings and ends that go wrong by their number, to try each of them and not only those that are drawn.
#[derive(Debug, Default)]
struct Script {
    listings: u64,
    ends: u64,
    /// Which listings are older, and by how many.
    stale: BTreeMap<u64, usize>,
    /// Which ends nobody hears of.
    unheard: BTreeSet<u64>,
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

    pub(crate) fn crash(&self, sandbox: &SandboxId, cause: EndCause) -> bool {
        lock(&self.damage).remove(sandbox);
        self.inner.crash(sandbox, cause)
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
            listings: VecDeque::new(),
            tokens: BTreeMap::new(),
            overtaken: None,
            probed: BTreeMap::new(),
            listed: BTreeMap::new(),
            late_ms_max,
            starts: BTreeMap::new(),
        };
        Self {
            inner,
            orders: None,
            line: Line::new(),
            chance: Arc::new(Mutex::new(chance)),
            damage: Arc::default(),
            mutations: Arc::default(),
            silent: Arc::default(),
            partial: Arc::default(),
            stale: Arc::default(),
            unheard: Arc::default(),
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

    /// The same for a daemon that reaches it by this line.
    pub(crate) fn by(&self, line: &Line) -> Self
    where
        P: Clone,
    {
        Self { line: line.clone(), ..self.clone() }
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

    /// A change by somebody who was superseded.
    pub(crate) fn overtaken(&self) -> Option<String> {
        lock(&self.chance).overtaken.clone()
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

    /// Whether no call arrives at all, as on a machine that is too busy for anything.
    pub fn set_silent(&self, silent: bool) {
        self.silent.store(silent, Ordering::SeqCst);
    }

    /// Whether every listing has a part only, and says so.
    pub fn set_partial(&self, partial: bool) {
        self.partial.store(partial, Ordering::SeqCst);
    }

    /// Whether every listing fails, and nothing else.
    pub fn set_listings_fail(&self, fail: bool) {
        lock(&self.stale).fail = fail;
    }

    /// From now on every listing is as it was so many listings ago; before there were so many, as at the first.
    pub fn set_stale(&self, by: usize) {
        let mut stale = lock(&self.stale);
        (stale.by, stale.told) = (by, VecDeque::new());
    }

    /// What a listing says that is to fail, or to be stale.
    fn as_it_was(&self, page: Page) -> Result<Page> {
        let mut stale = lock(&self.stale);
        if stale.fail {
            let source = std::io::Error::other("simulated");
            return Err(ProviderError::Unavailable { what: "a listing".to_owned(), source });
        }
        if stale.by == 0 {
            return Ok(page);
        }
        stale.told.push_back(page.clone());
        let surplus = stale.told.len().saturating_sub(stale.by + 1);
        stale.told.drain(..surplus);
        Ok(stale.told.front().cloned().unwrap_or(page))
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
        *lock(&self.script) = Script { stale, unheard, ..Script::default() };
    }

    /// How many listings and waits for an end there were since [`Self::misbehave`].
    pub fn counted(&self) -> (u64, u64) {
        let script = lock(&self.script);
        (script.listings, script.ends)
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

    fn fault(&self, call: &'static str) -> Option<Fault> {
        if self.silent.load(Ordering::SeqCst) {
            self.unheard.fetch_add(1, Ordering::SeqCst);
            return Some(Fault::Lost);
        }
        if let Some(moment) = self.orders.as_ref().and_then(|orders| orders.is_killed_at(call)) {
            return Some(Fault::Killed(moment));
        }
        match self.trouble(call, &TROUBLES[..5])? {
            Trouble::Lost => Some(Fault::Lost),
            Trouble::Unanswered => Some(Fault::Unanswered),
            Trouble::Twice => Some(Fault::Twice),
            Trouble::Late => {
                let mut chance = lock(&self.chance);
                let late_ms_max = chance.late_ms_max;
                Some(Fault::Late(Duration::from_millis(100 + chance.rng.below(late_ms_max))))
            }
            _ => Some(Fault::Unavailable),
        }
    }

    fn die(&self) {
        if let Some(orders) = &self.orders {
            orders.die();
        }
    }

    /// A call on its way. The closure makes it from clones, so that it can arrive late or twice.
    async fn through<T, F>(&self, name: &'static str, call: impl Fn(P) -> F) -> Result<T>
    where
        P: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.line.call(self.on_its_way(name, call)).await
    }

    async fn on_its_way<T, F>(&self, name: &'static str, call: impl Fn(P) -> F) -> Result<T>
    where
        P: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        match self.fault(name) {
            None => call(self.inner.clone()).await,
            Some(Fault::Lost) => self.timed_out(name).await,
            Some(Fault::Unanswered) => {
                let _ = call(self.inner.clone()).await;
                self.timed_out(name).await
            }
            Some(Fault::Killed(Moment::Before)) => {
                self.die();
                self.timed_out(name).await
            }
            Some(Fault::Killed(Moment::After)) => {
                let _ = call(self.inner.clone()).await;
                self.die();
                self.timed_out(name).await
            }
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
            Some(Fault::Unavailable) => {
                let source = std::io::Error::other("simulated");
                Err(ProviderError::Unavailable { what: "the provider".to_owned(), source })
            }
        }
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
        self.mutations.fetch_add(1, Ordering::SeqCst);
        self.through(name, |inner| {
            let (call, chance, sandbox) = (call(inner), self.chance.clone(), sandbox.clone());
            async move {
                let answer = call.await;
                if answer.is_ok() {
                    lock(&chance).took(&sandbox, token);
                }
                answer
            }
        })
        .await
    }

    /// By how many this listing is older than it should be.
    fn scripted_age(&self) -> Option<usize> {
        let mut script = lock(&self.script);
        script.listings += 1;
        script.stale.get(&(script.listings - 1)).copied()
    }

    fn is_scripted_unheard(&self) -> bool {
        let mut script = lock(&self.script);
        script.ends += 1;
        script.unheard.contains(&(script.ends - 1))
    }

    /// The agent is asked: what hangs never answers.
    async fn agent(&self, sandbox: &SandboxId) -> Result<()> {
        match self.damage_of(sandbox) {
            Some(Damage::Hangs) => std::future::pending().await,
            Some(Damage::Rootless | Damage::Denied) | None => Ok(()),
        }
    }

    /// A file is asked for: what has no root has none.
    async fn file(&self, sandbox: &SandboxId) -> Result<()> {
        self.agent(sandbox).await?;
        match self.damage_of(sandbox) {
            Some(Damage::Rootless) => Err(ProviderError::Failed { what: "the root is not mounted".to_owned() }),
            Some(Damage::Hangs | Damage::Denied) | None => Ok(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[async_trait]
impl<P: Provider + Clone + 'static> Provider for FaultyProvider<P> {
    fn name(&self) -> &str {
        if self.orders.is_some() { self.inner.name() } else { "faulty" }
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn create(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
    ) -> Result<Observation> {
        // A new instance has no damage; one that is there already keeps what it has.
        if matches!(
            self.inner.observe(&InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation }).await,
            Ok(Observation { state: viv_provider::InstanceState::Absent, .. })
        ) {
            lock(&self.damage).remove(sandbox);
        }
        let (mutation, sandbox, owner, spec) = (mutation.clone(), sandbox.clone(), owner.clone(), spec.clone());
        self.mutate("create", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, owner, spec) = (mutation.clone(), sandbox.clone(), owner.clone(), spec.clone());
            async move { inner.create(&mutation, &sandbox, &owner, &spec).await }
        })
        .await
    }

    async fn observe(&self, instance: &InstanceRef) -> Result<Observation> {
        if self.damage_of(&instance.sandbox) == Some(Damage::Denied) {
            return Err(ProviderError::NotFound { what: "a thing of that name".to_owned() });
        }
        let instance = instance.clone();
        self.through("observe", move |inner| {
            let instance = instance.clone();
            async move { inner.observe(&instance).await }
        })
        .await
    }

    async fn list(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page> {
        const LISTINGS: [Trouble; 4] =
            [Trouble::Lost, Trouble::Unavailable, Trouble::PartialListing, Trouble::StaleListing];
        let trouble =
            if self.silent.load(Ordering::SeqCst) { Some(Trouble::Lost) } else { self.trouble("list", &LISTINGS) };
        self.line
            .call(async {
                let is_first = page.cursor.is_none();
                let mut page = self.inner.list(owner, page).await?;
                if is_first && page.next.is_none() {
                    let mut chance = lock(&self.chance);
                    chance.listings.push_back(page.clone());
                    if chance.listings.len() > LISTINGS_KEPT {
                        chance.listings.pop_front();
                    }
                }
                page = self.as_it_was(page)?;
                let trouble = if self.partial.load(Ordering::SeqCst) { Some(Trouble::PartialListing) } else { trouble };
                if is_first && let Some(age) = self.scripted_age() {
                    let chance = lock(&self.chance);
                    let at = chance.listings.len().saturating_sub(1 + age);
                    return Ok(chance.listings.get(at).cloned().unwrap_or(page));
                }
                let listed = match trouble {
                    Some(Trouble::PartialListing) => {
                        page.items.truncate(page.items.len() / 2);
                        page.unreadable.push("simulated".to_owned());
                        Ok(page)
                    }
                    Some(Trouble::StaleListing) => {
                        let mut chance = lock(&self.chance);
                        let kept = chance.listings.len() as u64;
                        let at = chance.rng.below(kept) as usize;
                        Ok(chance.listings.get(at).cloned().unwrap_or(page))
                    }
                    Some(_) => self.timed_out("list").await,
                    None => Ok(page),
                }?;
                let (now, mut chance) = (Instant::now(), lock(&self.chance));
                for item in &listed.items {
                    chance.listed.entry(item.instance.sandbox.clone()).or_insert((now, 0)).1 += 1;
                }
                Ok(listed)
            })
            .await
    }

    async fn wait_end(&self, instance: &InstanceRef) -> Result<Ended> {
        if self.trouble("wait_end", &[Trouble::UnheardEnd]).is_some() || self.is_scripted_unheard() {
            return std::future::pending().await;
        }
        self.inner.wait_end(instance).await
    }

    async fn destroy(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.mutate("destroy", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            async move { inner.destroy(&mutation, &sandbox).await }
        })
        .await
    }

    async fn extend(&self, mutation: &Mutation, sandbox: &SandboxId, change: DeadlineChange) -> Result<Deadline> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.mutate("extend", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            async move { inner.extend(&mutation, &sandbox, change).await }
        })
        .await
    }

    async fn set_limits(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        change: &ResourceLimits,
    ) -> Result<ResourceLimits> {
        let (mutation, sandbox, change) = (mutation.clone(), sandbox.clone(), change.clone());
        self.mutate("set_limits", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, change) = (mutation.clone(), sandbox.clone(), change.clone());
            async move { inner.set_limits(&mutation, &sandbox, &change).await }
        })
        .await
    }

    async fn freeze(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.mutate("freeze", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            async move { inner.freeze(&mutation, &sandbox).await }
        })
        .await
    }

    async fn thaw(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.mutate("thaw", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            async move { inner.thaw(&mutation, &sandbox).await }
        })
        .await
    }

    async fn save(&self, mutation: &Mutation, sandbox: &SandboxId, request: &SaveRequest) -> Result<Snapshot> {
        let (mutation, sandbox, request) = (mutation.clone(), sandbox.clone(), request.clone());
        self.mutate("save", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, request) = (mutation.clone(), sandbox.clone(), request.clone());
            async move { inner.save(&mutation, &sandbox, &request).await }
        })
        .await
    }

    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<SnapshotSeen> {
        let snapshot = snapshot.clone();
        self.through("snapshot", move |inner| {
            let snapshot = snapshot.clone();
            async move { inner.snapshot(&snapshot).await }
        })
        .await
    }

    async fn snapshots(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page<SnapshotSeen>> {
        match self.trouble("snapshots", &[Trouble::Lost, Trouble::PartialListing]) {
            Some(Trouble::PartialListing) => {
                let mut page = self.inner.snapshots(owner, page).await?;
                page.items.truncate(page.items.len() / 2);
                page.unreadable.push("simulated".to_owned());
                Ok(page)
            }
            Some(_) => self.timed_out("snapshots").await,
            None => self.inner.snapshots(owner, page).await,
        }
    }

    async fn remove_snapshot(&self, mutation: &Mutation, sandbox: &SandboxId, snapshot: &SnapshotId) -> Result<()> {
        let (mutation, sandbox, snapshot) = (mutation.clone(), sandbox.clone(), snapshot.clone());
        self.mutate("remove_snapshot", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, snapshot) = (mutation.clone(), sandbox.clone(), snapshot.clone());
            async move { inner.remove_snapshot(&mutation, &sandbox, &snapshot).await }
        })
        .await
    }

    async fn disk_usage(&self, instance: &InstanceRef) -> Result<DiskUsage> {
        self.inner.disk_usage(instance).await
    }

    async fn restore(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        snapshot: &SnapshotId,
    ) -> Result<Observation> {
        lock(&self.damage).remove(sandbox);
        let all = (mutation.clone(), sandbox.clone(), owner.clone(), spec.clone(), snapshot.clone());
        self.mutate("restore", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, owner, spec, snapshot) = all.clone();
            async move { inner.restore(&mutation, &sandbox, &owner, &spec, &snapshot).await }
        })
        .await
    }

    async fn fork(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        source: &InstanceRef,
    ) -> Result<Observation> {
        self.mutations.fetch_add(1, Ordering::SeqCst);
        self.inner.fork(mutation, sandbox, owner, spec, source).await
    }

    async fn execute(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        spec: &ExecSpec,
    ) -> Result<ExecStatus> {
        if spec.transient {
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
            lock(&self.chance).probed.insert(instance, Instant::now());
        }
        self.agent(sandbox).await?;
        let all = (mutation.clone(), sandbox.clone(), execution.clone(), spec.clone());
        // Where there is no end to it, nothing is kept.
        let keeps = self.orders.is_none();
        self.through("execute", move |inner| {
            let (mutation, sandbox, execution, spec) = all.clone();
            let chance = self.chance.clone();
            async move {
                // What goes on with its memory, or was started before, is found and not started.
                let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
                let is_there = inner.execution(&instance, &execution).await.is_ok();
                let status = inner.execute(&mutation, &sandbox, &execution, &spec).await?;
                if keeps && !is_there {
                    lock(&chance).starts.entry(execution).or_default().insert(mutation.generation);
                }
                Ok(status)
            }
        })
        .await
    }

    fn probe_spec(&self, nonce: &str) -> ExecSpec {
        self.inner.probe_spec(nonce)
    }

    fn ask_spec(&self, body: &str) -> ExecSpec {
        self.inner.ask_spec(body)
    }

    async fn identity(&self, instance: &InstanceRef) -> Result<Identity> {
        self.file(&instance.sandbox).await?;
        self.inner.identity(instance).await
    }

    async fn whereabouts(&self, instance: &InstanceRef) -> Result<Whereabouts> {
        self.inner.whereabouts(instance).await
    }

    async fn memory_obstacles(&self, instance: &InstanceRef) -> Result<Vec<Obstacle>> {
        self.inner.memory_obstacles(instance).await
    }

    async fn log_tail(&self, instance: &InstanceRef, bytes_max: u64) -> Result<Vec<LogPart>> {
        self.inner.log_tail(instance, bytes_max).await
    }

    async fn execution(&self, instance: &InstanceRef, execution: &ExecutionId) -> Result<ExecStatus> {
        let (instance, execution) = (instance.clone(), execution.clone());
        self.through("execution", move |inner| {
            let (instance, execution) = (instance.clone(), execution.clone());
            async move { inner.execution(&instance, &execution).await }
        })
        .await
    }

    async fn executions(&self, instance: &InstanceRef) -> Result<Vec<ExecStatus>> {
        let instance = instance.clone();
        self.through("executions", move |inner| {
            let instance = instance.clone();
            async move { inner.executions(&instance).await }
        })
        .await
    }

    async fn attach(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        follow: bool,
    ) -> Result<Box<dyn OutputStream>> {
        self.agent(&instance.sandbox).await?;
        self.inner.attach(instance, execution, offset, follow).await
    }

    async fn write_stdin(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        offset: u64,
        data: &[u8],
    ) -> Result<u64> {
        self.agent(sandbox).await?;
        self.inner.write_stdin(mutation, sandbox, execution, offset, data).await
    }

    async fn close_stdin(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<()> {
        self.agent(sandbox).await?;
        self.inner.close_stdin(mutation, sandbox, execution).await
    }

    async fn signal(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        signal: i32,
    ) -> Result<()> {
        self.agent(sandbox).await?;
        self.line.call(self.inner.signal(mutation, sandbox, execution, signal)).await
    }

    async fn resize(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        size: TtySize,
    ) -> Result<()> {
        self.agent(sandbox).await?;
        self.inner.resize(mutation, sandbox, execution, size).await
    }

    async fn cancel(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<ExecStatus> {
        self.agent(sandbox).await?;
        self.line.call(self.inner.cancel(mutation, sandbox, execution)).await
    }

    async fn file_read(
        &self,
        instance: &InstanceRef,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<ByteReader> {
        self.file(&instance.sandbox).await?;
        self.inner.file_read(instance, path, offset, length).await
    }

    async fn file_write(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        file: &FileWrite,
        content: ByteReader,
    ) -> Result<FileStat> {
        self.file(sandbox).await?;
        self.inner.file_write(mutation, sandbox, file, content).await
    }

    async fn file_stat(&self, instance: &InstanceRef, path: &str) -> Result<FileStat> {
        self.file(&instance.sandbox).await?;
        self.inner.file_stat(instance, path).await
    }

    async fn file_list(&self, instance: &InstanceRef, path: &str, depth: u32) -> Result<DirListing> {
        self.file(&instance.sandbox).await?;
        self.inner.file_list(instance, path, depth).await
    }

    async fn file_mkdir(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.file(sandbox).await?;
        self.inner.file_mkdir(mutation, sandbox, path).await
    }

    async fn file_move(&self, mutation: &Mutation, sandbox: &SandboxId, from: &str, to: &str) -> Result<()> {
        self.file(sandbox).await?;
        self.inner.file_move(mutation, sandbox, from, to).await
    }

    async fn file_remove(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.file(sandbox).await?;
        self.inner.file_remove(mutation, sandbox, path).await
    }

    async fn file_watch(&self, instance: &InstanceRef, path: &str, recursive: bool) -> Result<Box<dyn WatchStream>> {
        self.file(&instance.sandbox).await?;
        self.inner.file_watch(instance, path, recursive).await
    }

    async fn archive_get(&self, instance: &InstanceRef, path: &str) -> Result<ByteReader> {
        self.file(&instance.sandbox).await?;
        self.inner.archive_get(instance, path).await
    }

    async fn archive_put(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        path: &str,
        bounds: ArchiveBounds,
        archive: ByteReader,
    ) -> Result<Unpacked> {
        self.file(sandbox).await?;
        self.inner.archive_put(mutation, sandbox, path, bounds, archive).await
    }

    async fn dial(&self, instance: &InstanceRef, port: u16) -> Result<Box<dyn Dialled>> {
        self.agent(&instance.sandbox).await?;
        self.inner.dial(instance, port).await
    }

    async fn requests(&self, instance: &InstanceRef) -> Result<Box<dyn RequestStream>> {
        self.agent(&instance.sandbox).await?;
        self.inner.requests(instance).await
    }

    async fn answer_request(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        request: &RequestId,
        answer: &str,
    ) -> Result<()> {
        self.agent(sandbox).await?;
        self.inner.answer_request(mutation, sandbox, request, answer).await
    }

    async fn export_snapshot(&self, snapshot: &SnapshotId) -> Result<ByteReader> {
        self.inner.export_snapshot(snapshot).await
    }

    async fn import_snapshot(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        snapshot: &SnapshotId,
        file: ByteReader,
    ) -> Result<Snapshot> {
        self.inner.import_snapshot(mutation, sandbox, owner, snapshot, file).await
    }

    async fn processes(&self, instance: &InstanceRef) -> Result<Vec<ProcessSeen>> {
        self.inner.processes(instance).await
    }

    async fn audit(&self) -> Result<Vec<Finding>> {
        self.inner.audit().await
    }

    async fn sweep(&self, findings: &[Finding]) -> Result<Vec<Swept>> {
        self.inner.sweep(findings).await
    }

    async fn set_network(&self, mutation: &Mutation, sandbox: &SandboxId, connected: bool) -> Result<()> {
        self.inner.set_network(mutation, sandbox, connected).await
    }
}
