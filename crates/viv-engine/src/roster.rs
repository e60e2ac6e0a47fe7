//! Those that live, as their records last were: what every look would else have to read anew.
//!
//! ```text
//!   a record is committed, or looked at ──►┌────────┐──► sums for quotas, and the most of each in a project
//!                                          │ Roster │──► who is in transition, and is late or cannot go on, or was given up
//!   somebody uses it ─────────────────────►│        │──► whose hard deadline has passed
//!                                          └────────┘──► who was not used for long, when something of it is due
//! ```
//!
//! Invariants:
//!
//! - A look costs in proportion to what is in transition, due, or wrong; never to what lives.
//! - It is a cache (T1): quotas are checked against rows (L18), and whoever acts on a deadline, or calls somebody stuck,
//!   reads the record first. What it did not hear of is found by `provider-sync`, which reads all records anyway.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use viv_core::SandboxId;
use viv_core::lifecycle::{Cause, Phase, PhaseName, Sandbox};
use viv_core::spec::Project;
use viv_store::{Sums, Weights};

use crate::agenda::Agenda;

/// Sandboxes of a group that are told by id; the others are counted.
pub(crate) const NAMED_MAX: usize = 10;

/// How long what was given up at a deadline counts as stuck, if nobody comes for it: as far back as shares are measured, so
/// that who is told late still finds it named.
const GIVEN_UP_TOLD_MS: u64 = 900_000;

/// How late what is put to rest by itself may be before it counts as stuck.
const REST_LATE_MS: u64 = 60_000;

/// How soon after an answer who was not used for long is asked again what runs in it, at the soonest.
const ASKED_EVERY_MS: u64 = 60_000;

/// While the answer is the same that doubles, up to so many times it.
const ASKED_SELDOM: u64 = 15;

/// What is known of those that live.
#[derive(Debug)]
pub(crate) struct Roster {
    weights: Weights,
    /// What is not used for longer may be stuck; nothing where nobody is told.
    stuck_after_ms: Option<u64>,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    living: BTreeMap<SandboxId, Living>,
    /// All of them, spares too.
    total: Held,
    /// Without spares, which are of no project yet.
    projects: BTreeMap<Project, Held>,
    /// What each project has of each quota, in the order of [`Held::used`].
    used: [BTreeSet<(u64, Project)>; 5],
    working: BTreeMap<SandboxId, Working>,
    /// Since when those are over that ran into the deadline of a phase, and that nobody came for since.
    given_up: BTreeMap<SandboxId, u64>,
    deadlines: Agenda,
    /// When something is due of those that are ready and that nobody uses.
    unused: Agenda,
    stalled: BTreeSet<SandboxId>,
    silent: BTreeSet<SandboxId>,
}

#[derive(Debug)]
struct Living {
    version: u64,
    phase: PhaseName,
    project: Project,
    sums: Sums,
    unused: Option<Unused>,
}

/// What some have together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Held {
    count: u64,
    /// Wide enough that what is added can be taken off again, whatever limits they have.
    sums: [u128; 4],
}

impl Held {
    fn add(&mut self, sums: &Sums) {
        self.count += 1;
        for (held, part) in self.sums.iter_mut().zip(parts(sums)) {
            *held += u128::from(part);
        }
    }

    fn take_off(&mut self, sums: &Sums) {
        self.count -= 1;
        for (held, part) in self.sums.iter_mut().zip(parts(sums)) {
            *held -= u128::from(part);
        }
    }

    /// How many, and of what how much.
    fn used(&self) -> [u64; 5] {
        let [cpu, memory, disk, processes] = self.sums.map(|held| u64::try_from(held).unwrap_or(u64::MAX));
        [self.count, cpu, memory, disk, processes]
    }
}

fn parts(sums: &Sums) -> [u64; 4] {
    [sums.cpu_millis, sums.memory_bytes, sums.disk_bytes, sums.processes]
}

fn counted([count, cpu_millis, memory_bytes, disk_bytes, processes]: [u64; 5]) -> (u64, Sums) {
    (count, Sums { cpu_millis, memory_bytes, disk_bytes, processes })
}

/// What is in transition.
#[derive(Debug)]
struct Working {
    deadline_at_ms: u64,
    overdue: bool,
    save_failed: bool,
    kill_failed: bool,
}

impl Working {
    fn of(record: &Sandbox) -> Option<Self> {
        let work = record.phase.work()?;
        let in_end = matches!(record.phase, Phase::Stopping { .. });
        Some(Self {
            deadline_at_ms: work.deadline_at_ms,
            overdue: work.overdue,
            save_failed: matches!(record.phase, Phase::Hibernating { save_failed: true, .. }),
            kill_failed: in_end && record.cause.cause == Cause::KillFailed,
        })
    }
}

/// Since when it is lost or has failed because it did not come up, or did not answer, in its time: at a deadline such
/// phases are left, so nobody would find it in them afterwards.
fn given_up_at_ms(record: &Sandbox) -> Option<u64> {
    let is_given_up = matches!(record.phase, Phase::Lost | Phase::Failed { .. });
    let is_late = matches!(
        record.cause.cause,
        Cause::DeadlinePassed | Cause::Unresponsive | Cause::AbsenceUnproven | Cause::SaveFailed
    );
    (is_given_up && is_late).then_some(record.phase_since_ms)
}

/// One that is ready, as far as nobody uses it.
#[derive(Debug)]
#[expect(clippy::struct_field_names, reason = "units are last in names, and all of these are times")]
struct Unused {
    since_ms: u64,
    /// When it counts as stuck, if nothing happens before.
    stalls_at_ms: Option<u64>,
    /// When it is asked what runs in it.
    ask_at_ms: u64,
    pause_ms: u64,
}

impl Unused {
    fn since(since_ms: u64, stuck_after_ms: u64) -> Self {
        let ask_at_ms = long_at_ms(since_ms, stuck_after_ms);
        Self { since_ms, stalls_at_ms: None, ask_at_ms, pause_ms: pause_ms(stuck_after_ms) }
    }
}

/// From when on it is longer than it may be.
pub(crate) fn long_at_ms(since_ms: u64, stuck_after_ms: u64) -> u64 {
    since_ms.saturating_add(stuck_after_ms).saturating_add(1)
}

fn pause_ms(stuck_after_ms: u64) -> u64 {
    stuck_after_ms.min(ASKED_EVERY_MS)
}

/// When one that runs without anybody doing anything, and with nothing that is going to put it to rest, has done so for
/// longer than is usual, if nothing happens to it. Who said that it is to stay awake, or declared what runs in it, does
/// not wonder.
pub(crate) fn stalls_at_ms(record: &Sandbox, idle_at_ms: Option<u64>, stuck_after_ms: u64) -> Option<u64> {
    if record.phase != Phase::Ready || !record.spec.services.is_empty() {
        return None;
    }
    let long_ms = long_at_ms(record.active_at_ms.max(record.phase_since_ms), stuck_after_ms);
    let awake_ms = record.keep_awake.values().map(|lease| lease.until_ms).max();
    let late_ms = idle_at_ms.map(|at_ms| long_at_ms(at_ms, REST_LATE_MS));
    [Some(long_ms), awake_ms, late_ms].into_iter().flatten().max()
}

/// Some sandboxes, of which a few are named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) count: u64,
    pub(crate) named: Vec<SandboxId>,
}

impl Group {
    fn of<'s>(sandboxes: impl Iterator<Item = &'s SandboxId>) -> Self {
        let mut group = Self::default();
        for sandbox in sandboxes {
            group.count += 1;
            if group.named.len() < NAMED_MAX {
                group.named.push(sandbox.clone());
            }
        }
        group
    }

    fn of_set(sandboxes: &BTreeSet<SandboxId>) -> Self {
        Self { count: sandboxes.len() as u64, named: sandboxes.iter().take(NAMED_MAX).cloned().collect() }
    }
}

/// What is wrong with those that live.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// In a phase that should have ended by now.
    pub(crate) overdue: Group,
    /// Given up at a deadline a while ago at most.
    pub(crate) given_up: Group,
    /// Ready for long, with nobody doing anything.
    pub(crate) stalled: Group,
    /// Ready for long, with a command in it that says nothing.
    pub(crate) silent: Group,
    pub(crate) save_failed: Group,
    pub(crate) kill_failed: Group,
}

/// What was answered by one that was asked what runs in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Something that says nothing for long.
    Silence,
    /// Something that would be silent for long at this time.
    Words {
        /// When.
        until_ms: u64,
    },
    /// Nothing that anybody would wait for.
    Nothing,
}

impl Roster {
    /// An empty one.
    pub(crate) fn new(weights: Weights, stuck_after_ms: Option<u64>) -> Self {
        Self { weights, stuck_after_ms, kept: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The record is so now. Who comes late with an older one changes nothing.
    pub(crate) fn attend(&self, record: &Sandbox, idle_at_ms: Option<u64>) {
        self.lock().attend(record, idle_at_ms, &self.weights, self.stuck_after_ms);
    }

    /// It is used.
    pub(crate) fn used(&self, sandbox: &SandboxId, at_ms: u64) {
        let Some(stuck_after_ms) = self.stuck_after_ms else { return };
        let mut kept = self.lock();
        let Some(unused) = kept.living.get_mut(sandbox).and_then(|living| living.unused.as_mut()) else { return };
        if unused.since_ms >= at_ms {
            return;
        }
        let stalls_at_ms = unused.stalls_at_ms.map(|stalls_ms| stalls_ms.max(long_at_ms(at_ms, stuck_after_ms)));
        *unused = Unused { stalls_at_ms, ..Unused::since(at_ms, stuck_after_ms) };
        kept.stalled.remove(sandbox);
        kept.silent.remove(sandbox);
        kept.plan(sandbox);
    }

    /// What all have together, spares too.
    pub(crate) fn sums(&self) -> Sums {
        counted(self.lock().total.used()).1
    }

    /// How many a project has, and what they have together: of each, what the project has that has most of it.
    pub(crate) fn most_of_a_project(&self) -> (u64, Sums) {
        let kept = self.lock();
        counted(kept.used.each_ref().map(|projects| projects.last().map_or(0, |(used, _)| *used)))
    }

    /// And which project that is, of each, in the order of [`QuotaUsed::all`](crate::metrics::QuotaUsed::all).
    pub(crate) fn whose_is_most(&self) -> [Option<Project>; 5] {
        let kept = self.lock();
        kept.used.each_ref().map(|projects| projects.last().map(|(_, project)| project.clone()))
    }

    /// What is wrong now, as far as it was looked at.
    pub(crate) fn wrong(&self, now_ms: u64) -> Wrong {
        let kept = self.lock();
        let group = |is_so: &dyn Fn(&Working) -> bool| {
            Group::of(kept.working.iter().filter(|(_, working)| is_so(working)).map(|(id, _)| id))
        };
        let is_overdue = |working: &Working| working.overdue || working.deadline_at_ms < now_ms;
        // What has failed and cannot be cleared away either is overdue, and counted once.
        let given_up = kept.given_up.iter().filter(|(id, since_ms)| {
            now_ms.saturating_sub(**since_ms) < GIVEN_UP_TOLD_MS && !kept.working.get(*id).is_some_and(is_overdue)
        });
        Wrong {
            overdue: group(&is_overdue),
            given_up: Group::of(given_up.map(|(id, _)| id)),
            stalled: Group::of_set(&kept.stalled),
            silent: Group::of_set(&kept.silent),
            save_failed: group(&|working| working.save_failed),
            kill_failed: group(&|working| working.kill_failed),
        }
    }

    /// Those whose hard deadline is not after this, soonest first.
    pub(crate) fn expired(&self, until_ms: u64) -> Vec<SandboxId> {
        self.lock().deadlines.due(until_ms)
    }

    /// Those that are ready and unused, and of which something is due, soonest first: their records are read.
    pub(crate) fn due_unused(&self, now_ms: u64) -> Vec<SandboxId> {
        self.lock().unused.due(now_ms)
    }

    /// The record of one of those, as it is. Since when it is unused, if it has to be asked now what runs in it: whoever
    /// comes beside this one does not ask too.
    pub(crate) fn look(&self, record: &Sandbox, idle_at_ms: Option<u64>, now_ms: u64) -> Option<u64> {
        let mut kept = self.lock();
        // What has ended since it was read does not begin anew.
        if !kept.living.contains_key(&record.id) {
            return None;
        }
        kept.attend(record, idle_at_ms, &self.weights, self.stuck_after_ms);
        let kept = &mut *kept;
        let unused = kept.living.get_mut(&record.id)?.unused.as_mut()?;
        if unused.stalls_at_ms.is_some_and(|at_ms| at_ms <= now_ms) {
            kept.stalled.insert(record.id.clone());
        }
        let asked = (unused.ask_at_ms <= now_ms).then_some(unused.since_ms);
        if asked.is_some() {
            unused.ask_at_ms = now_ms.saturating_add(pause_ms(self.stuck_after_ms.unwrap_or(ASKED_EVERY_MS)));
        }
        kept.plan(&record.id);
        asked
    }

    /// One that is unused since then was asked.
    pub(crate) fn heard(&self, sandbox: &SandboxId, since_ms: u64, heard: Heard, now_ms: u64) {
        let Some(soon_ms) = self.stuck_after_ms.map(pause_ms) else { return };
        let mut kept = self.lock();
        let kept = &mut *kept;
        let unused = kept.living.get_mut(sandbox).and_then(|living| living.unused.as_mut());
        let Some(unused) = unused.filter(|unused| unused.since_ms == since_ms) else { return };
        let is_silent = heard == Heard::Silence;
        let is_news = kept.silent.contains(sandbox) != is_silent;
        if is_silent {
            kept.silent.insert(sandbox.clone());
        } else {
            kept.silent.remove(sandbox);
        }
        if is_news {
            unused.pause_ms = soon_ms;
        }
        unused.ask_at_ms = match heard {
            Heard::Words { until_ms } => until_ms.max(now_ms.saturating_add(soon_ms)),
            Heard::Silence | Heard::Nothing => now_ms.saturating_add(unused.pause_ms),
        };
        unused.pause_ms = unused.pause_ms.saturating_mul(2).min(soon_ms.saturating_mul(ASKED_SELDOM));
        kept.plan(sandbox);
    }

    /// Something in it has ended: who was called silent is asked again, and not when its time comes.
    pub(crate) fn ended(&self, sandbox: &SandboxId, now_ms: u64) {
        let mut kept = self.lock();
        if !kept.silent.contains(sandbox) {
            return;
        }
        if let Some(unused) = kept.living.get_mut(sandbox).and_then(|living| living.unused.as_mut()) {
            unused.ask_at_ms = unused.ask_at_ms.min(now_ms);
            kept.plan(sandbox);
        }
    }

    /// Whom it knows otherwise than these records say, which are all that live but for those that have failed. Most of
    /// them change at this moment; a few may have changed without a word.
    pub(crate) fn unlike(&self, records: &BTreeMap<SandboxId, Sandbox>) -> Vec<SandboxId> {
        let kept = self.lock();
        let is_known =
            |record: &Sandbox| kept.living.get(&record.id).is_some_and(|known| known.version == record.version);
        let other = records.values().filter(|record| !is_known(record)).map(|record| &record.id);
        let gone =
            kept.living.iter().filter(|(id, known)| known.phase != PhaseName::Failed && !records.contains_key(id));
        other.chain(gone.map(|(id, _)| id)).cloned().collect()
    }
}

impl Kept {
    fn attend(&mut self, record: &Sandbox, idle_at_ms: Option<u64>, weights: &Weights, stuck_after_ms: Option<u64>) {
        let id = &record.id;
        if self.living.get(id).is_some_and(|known| known.version > record.version) {
            return;
        }
        let before = self.living.remove(id);
        if let Some(before) = &before {
            self.count(&before.project, |held| held.take_off(&before.sums));
        }
        self.working.remove(id);
        self.given_up.remove(id);
        self.stalled.remove(id);
        let phase = record.phase.name();
        if !PhaseName::MAY_LIVE.contains(&phase) {
            self.silent.remove(id);
            self.deadlines.set(id, None);
            self.unused.set(id, None);
            return;
        }
        let sums = Sums::of(&record.spec.limits, weights);
        self.count(&record.project, |held| held.add(&sums));
        self.working.extend(Working::of(record).map(|working| (id.clone(), working)));
        self.given_up.extend(given_up_at_ms(record).map(|since_ms| (id.clone(), since_ms)));
        self.deadlines.set(id, record.lives_until_ms());
        let is_ready = record.phase == Phase::Ready;
        let unused = stuck_after_ms.filter(|_| is_ready).map(|stuck_after_ms| {
            let since_ms = record.active_at_ms.max(record.phase_since_ms);
            let stalls_at_ms = stalls_at_ms(record, idle_at_ms, stuck_after_ms);
            let known = before.and_then(|before| before.unused).filter(|known| known.since_ms >= since_ms);
            if let Some(known) = known {
                // It was asked, or used, since this record was read.
                let soonest_ms = long_at_ms(known.since_ms, stuck_after_ms);
                return Unused { stalls_at_ms: stalls_at_ms.map(|at_ms| at_ms.max(soonest_ms)), ..known };
            }
            self.silent.remove(id);
            Unused { stalls_at_ms, ..Unused::since(since_ms, stuck_after_ms) }
        });
        if unused.is_none() {
            self.silent.remove(id);
        }
        let (version, project) = (record.version, record.project.clone());
        self.living.insert(id.clone(), Living { version, phase, project, sums, unused });
        self.plan(id);
    }

    /// Counts one in or out, in all and in its project.
    fn count(&mut self, project: &Project, change: impl Fn(&mut Held)) {
        change(&mut self.total);
        if project.is_spares() {
            return;
        }
        let held = self.projects.entry(project.clone()).or_default();
        let before = held.used();
        change(held);
        let after = held.used();
        let is_empty = held.count == 0;
        for ((ranks, before), after) in self.used.iter_mut().zip(before).zip(after) {
            ranks.remove(&(before, project.clone()));
            if !is_empty {
                ranks.insert((after, project.clone()));
            }
        }
        if is_empty {
            self.projects.remove(project);
        }
    }

    /// Sets when something is due of it: what is called stalled stays so until something happens to it.
    fn plan(&mut self, sandbox: &SandboxId) {
        let unused = self.living.get(sandbox).and_then(|living| living.unused.as_ref());
        let at_ms = unused.map(|unused| {
            let stalls_at_ms = unused.stalls_at_ms.filter(|_| !self.stalled.contains(sandbox));
            stalls_at_ms.map_or(unused.ask_at_ms, |at_ms| at_ms.min(unused.ask_at_ms))
        });
        self.unused.set(sandbox, at_ms);
    }
}

#[cfg(test)]
mod tests;
