//! Hot spares (L19): sandboxes that are made ahead, so that whoever asks for one like them need not wait.
//!
//! ```text
//!   classes ──► keeper: how many are there, how many should there be? ──► a record in the project of spares
//!                 ▲                                                          │ made and verified like any other
//!                 └────────────── bell ◄── claimed, broken, given up         ▼
//!   create ──► does it fit a class? ──► compare-and-set: the spare is the sandbox ──► claim, services, hook, probe
//!                     └ no, none there, or lost the race ──► an ordinary create
//! ```
//!
//! Invariants:
//!
//! - The record says all: a spare is one in the project of spares, and is claimed by being in another. What is kept here
//!   is which to try first, and may be lost.
//! - Who claims and who gives up compare-and-set the same record: one of them is first, so nothing is given to two, and
//!   nothing that is somebody's is given up.
//! - A spare counts for the limits of the machine (L18), and never stands in the way of anybody: who is refused for those
//!   limits waits until one is given up.

mod claim;
mod keeper;
mod size;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use viv_core::SandboxId;
use viv_core::lifecycle::{Desired, NewSandbox, Phase, PhaseName, Sandbox};
use viv_core::spec::{Invalid, Project, SandboxSpec};
use viv_store::ListQuery;

use crate::engine::{Engine, Inner};
use crate::error::EngineError;

pub(crate) use keeper::run;

/// Most spares of all classes together: more are a mistake in a file.
const SPARES_MAX: u32 = 1_000;

/// Sandboxes that are kept ready because many are asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpareClass {
    /// What it is called.
    pub name: String,
    /// What its instances are made of; nothing of what is given later is in it ([`SandboxSpec::of_instance`]).
    pub spec: SandboxSpec,
    /// At least this many are kept.
    pub min: u32,
    /// And at most.
    pub max: u32,
}

/// Which spares are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparesConfig {
    /// Of which kinds. Without any, there are none.
    pub classes: Vec<SpareClass>,
    /// How often they are looked at without being asked.
    pub period: Duration,
    /// As many are kept as were asked for in this time, within bounds.
    pub window: Duration,
    /// How old one may become before another takes its place: an image may have changed since.
    pub age_max: Duration,
    /// How old what is known of one may become before it is probed again.
    pub probe_every: Duration,
}

impl Default for SparesConfig {
    fn default() -> Self {
        Self {
            classes: Vec::new(),
            period: Duration::from_secs(10),
            window: Duration::from_secs(60),
            age_max: Duration::from_secs(3600),
            probe_every: Duration::from_secs(30),
        }
    }
}

impl SparesConfig {
    /// Refuses what cannot be kept.
    pub fn check(&self) -> Result<(), Invalid> {
        let wrong = |what: String, hint: &str| Err(Invalid { what, hint: hint.to_owned() });
        for (index, class) in self.classes.iter().enumerate() {
            class.spec.check()?;
            let name = &class.name;
            if class.spec.of_instance() != class.spec {
                return wrong(
                    format!("the spares {name} have an environment, ports, services or hooks"),
                    "those are given to a spare when it is claimed",
                );
            }
            if class.min > class.max || class.max == 0 {
                return wrong(
                    format!("of the spares {name}, at least {} and at most {} are wanted", class.min, class.max),
                    "the one is no more than the other, and there is at least one",
                );
            }
            if let Some(same) = self.classes[..index].iter().find(|other| other.spec == class.spec) {
                return wrong(format!("the spares {name} and {} are the same", same.name), "keep one of the two");
            }
        }
        let most: u32 = self.classes.iter().map(|class| class.max).fold(0, u32::saturating_add);
        if most > SPARES_MAX {
            return wrong(format!("{most} spares are too many"), "at most 1000 in all classes together");
        }
        Ok(())
    }

    /// The class of what is asked for.
    fn class_for(&self, new: &NewSandbox) -> Option<usize> {
        if self.classes.is_empty() || new.origin.is_some() {
            return None;
        }
        let made_of = new.spec.of_instance();
        self.classes.iter().position(|class| class.spec == made_of)
    }

    /// The class of a spare; none when it is not wanted any more.
    fn class_of(&self, spare: &Sandbox) -> Option<usize> {
        self.classes.iter().position(|class| class.spec == spare.spec)
    }
}

/// How a class stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpareStatus {
    /// Which.
    pub class: SpareClass,
    /// How many there should be now.
    pub target: u32,
    /// Which can be claimed, with when they were made.
    pub ready: Vec<(SandboxId, u64)>,
    /// How many are being made or verified.
    pub making: u64,
    /// How many were claimed since the daemon began.
    pub claimed: u64,
    /// How often one was asked for, and none was there.
    pub missed: u64,
    /// How many were given up because they were broken.
    pub broken: u64,
    /// Why no more are made for now.
    pub held: Option<String>,
}

/// What is kept in memory of a class.
#[derive(Debug, Default)]
struct Pool {
    /// Those that can be claimed, oldest first.
    ready: VecDeque<SandboxId>,
    /// When one was asked for lately; no more of them than there may be spares.
    asked_at_ms: VecDeque<u64>,
    claimed: u64,
    missed: u64,
    broken: u64,
    /// How many in a row did not come up.
    failures: u32,
    /// None is made before this.
    not_before_ms: u64,
}

#[derive(Debug, Default)]
struct State {
    pools: Vec<Pool>,
    /// Spares that are not over.
    living: BTreeSet<SandboxId>,
    /// Those that are being probed.
    checking: BTreeSet<SandboxId>,
    /// How many wait for room.
    waiting: usize,
    /// None is made before this, because there was no room.
    held_until_ms: u64,
}

/// What is kept in memory of spares: nothing that the records do not have.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    state: Mutex<State>,
    /// Rings when one is over.
    freed: Notify,
}

impl Spares {
    /// For these classes.
    pub(crate) fn of(config: &SparesConfig) -> Self {
        let pools = config.classes.iter().map(|_| Pool::default()).collect();
        Self { state: Mutex::new(State { pools, ..State::default() }), freed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is anything to keep: a class, or what another daemon left.
    pub(crate) fn is_kept(&self) -> bool {
        let state = self.lock();
        !state.pools.is_empty() || !state.living.is_empty()
    }
}

impl State {
    /// This one can be claimed; or it cannot any more.
    fn offer(&mut self, class: Option<usize>, spare: &SandboxId, can_be: bool) {
        for (index, pool) in self.pools.iter_mut().enumerate() {
            let has = pool.ready.iter().any(|other| other == spare);
            match (has, can_be && class == Some(index)) {
                (false, true) => pool.ready.push_back(spare.clone()),
                (true, false) => pool.ready.retain(|other| other != spare),
                (true, true) | (false, false) => {}
            }
        }
    }
}

/// Whether it can be given to somebody as far as its record says.
fn is_ready(spare: &Sandbox) -> bool {
    spare.phase == Phase::Ready && spare.desired == Desired::Running && !spare.deleted
}

impl Inner {
    /// The record of a spare is so now.
    pub(crate) fn notice_spare(self: &Arc<Self>, spare: &Sandbox) {
        let class = self.config.spares.class_of(spare);
        // One that another daemon left is probed first.
        let can_be = is_ready(spare) && self.knowledge.has_probed(spare) && !self.knowledge.has_ended(spare);
        let mut state = self.spares.lock();
        state.offer(class, &spare.id, can_be);
        if spare.is_over() {
            state.living.remove(&spare.id);
            drop(state);
            self.spares.freed.notify_waiters();
        } else {
            state.living.insert(spare.id.clone());
            if let Some(pool) = class.filter(|_| can_be).and_then(|class| state.pools.get_mut(class)) {
                pool.failures = 0;
            }
            drop(state);
        }
        if self.spares.is_kept() {
            self.reconcilers.look_at_spares();
        }
    }

    /// All spares that are not over, oldest first.
    async fn spare_records(&self) -> Result<Vec<Sandbox>, EngineError> {
        let mut query = ListQuery {
            project: Some(Project::spares()),
            phases: PhaseName::MAY_LIVE.to_vec(),
            deleted: true,
            limit: SPARES_MAX as usize,
            ..ListQuery::default()
        };
        let mut records = Vec::new();
        loop {
            let page = self.store.list(&query).await?;
            records.extend(page.items);
            let Some(next) = page.next else { break };
            query.after = Some(next);
        }
        records.sort_by(|one, other| (one.created_at_ms, &one.id).cmp(&(other.created_at_ms, &other.id)));
        Ok(records)
    }
}

impl Engine {
    /// How the spares stand, class by class.
    pub async fn spares(&self) -> Result<Vec<SpareStatus>, EngineError> {
        self.inner.spare_statuses().await
    }
}

impl Inner {
    pub(crate) async fn spare_statuses(&self) -> Result<Vec<SpareStatus>, EngineError> {
        let inner = self;
        let records = inner.spare_records().await?;
        let now_ms = inner.clock.now_ms();
        let by_id: BTreeMap<&SandboxId, &Sandbox> = records.iter().map(|record| (&record.id, record)).collect();
        let state = inner.spares.lock();
        let one = |(index, class): (usize, &SpareClass)| {
            let pool = &state.pools[index];
            let ready: Vec<(SandboxId, u64)> = pool
                .ready
                .iter()
                .filter_map(|id| by_id.get(id).map(|record| (id.clone(), record.created_at_ms)))
                .collect();
            let alive = |record: &&Sandbox| {
                record.desired == Desired::Running && inner.config.spares.class_of(record) == Some(index)
            };
            let held = if inner.is_draining() {
                Some("the daemon is drained".to_owned())
            } else if state.waiting > 0 || now_ms < state.held_until_ms {
                Some("there is no room".to_owned())
            } else if now_ms < pool.not_before_ms {
                Some(format!("{} in a row did not come up", pool.failures))
            } else {
                None
            };
            SpareStatus {
                class: class.clone(),
                target: inner.spare_target(pool, class, now_ms),
                making: (records.iter().filter(alive).count() as u64).saturating_sub(ready.len() as u64),
                ready,
                claimed: pool.claimed,
                missed: pool.missed,
                broken: pool.broken,
                held,
            }
        };
        Ok(inner.config.spares.classes.iter().enumerate().map(one).collect())
    }
}
