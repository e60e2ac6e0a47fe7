//! Both ways: records without an instance become lost, instances without a record are collected (J1).
//!
//! Only a complete listing says what is not there, and even then each absence is looked at by itself (T7). An instance
//! that carries our mark and has no record, or is of an older generation, is left alone until two listings agree and a
//! grace period has passed.
//!
//! One that is as it is recorded costs its share of a listing and of a page of records, and nothing else: neither a read
//! of its own nor a write.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use viv_core::lifecycle::{Actor, Event, Ignored, Observed, Phase, PhaseName, Sandbox, Seen, Stepped, step};
use viv_core::planted::{Planted, is_planted};
use viv_core::{FencingToken, OperationId, SandboxId};
use viv_provider::{InstanceRef, InstanceState, Listed, Mutation, PageRequest};
use viv_store::{ListQuery, NewLine};

use super::Report;
use crate::engine::{Applied, Inner};
use crate::error::EngineError;
use crate::gate::Gate;
use crate::metrics::family;
use crate::probe::is_silent;

/// How many records are read at a time.
const PAGE: usize = 500;

/// Instances without a record, or of an older generation than it.
///
/// Listings overlap: the period's, and one by hand. Two of them that began before the instance was ended agree about what
/// is not so any more, so one counts for a suspect only when it began after the one before it was compared (J1).
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// Listings that have begun.
    begun: AtomicU64,
    known: Mutex<BTreeMap<InstanceRef, Suspect>>,
}

/// One of them.
#[derive(Debug)]
struct Suspect {
    /// When it was first seen so.
    since_ms: u64,
    /// Listings that it was in, one after the other.
    listings: u32,
    /// The number of the first listing that can count next.
    next: u64,
}

impl Suspects {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<InstanceRef, Suspect>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A listing begins: its number.
    fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::SeqCst)
    }

    /// What this listing found, and nothing else, is suspected. Answers with how many are new, and since when and in how
    /// many listings each was seen.
    fn found(
        &self,
        listing: u64,
        unknown: &BTreeSet<InstanceRef>,
        now_ms: u64,
    ) -> (usize, Vec<(InstanceRef, u64, u32)>) {
        let mut known = self.lock();
        known.retain(|instance, _| unknown.contains(instance));
        let before = known.len();
        let next = self.begun.load(Ordering::SeqCst);
        for instance in unknown {
            match known.entry(instance.clone()) {
                Entry::Vacant(vacant) => {
                    vacant.insert(Suspect { since_ms: now_ms, listings: 1, next });
                }
                Entry::Occupied(mut occupied) if listing >= occupied.get().next => {
                    let suspect = occupied.get_mut();
                    (suspect.listings, suspect.next) = (suspect.listings.saturating_add(1), next);
                }
                Entry::Occupied(_) => {}
            }
        }
        let seen = known.iter().map(|(instance, suspect)| (instance.clone(), suspect.since_ms, suspect.listings));
        (known.len() - before, seen.collect())
    }
}

pub(crate) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let mut report = Report::default();
    // What is created meanwhile is not in the listing, and its record is not asked for: nothing follows from that.
    let listing = inner.reconcilers.suspects.begin();
    let listed = match list(inner).await {
        Err(_) if is_planted(Planted::FailedListIsEmpty) => Everything { items: Vec::new(), complete: true },
        listed => listed?,
    };
    let mut unknown = BTreeSet::new();
    let living = living(inner).await?;
    // Whoever wrote these and did not come to say so is made up for: a driver looks, and says how they are.
    for sandbox in inner.roster.unlike(&living) {
        inner.wake(&sandbox);
    }
    for item in &listed.items {
        let record = match living.get(&item.instance.sandbox) {
            Some(record) => Some(record.clone()),
            // What should not live is not in the pages, nor what nobody recorded.
            None => inner.store.get(&item.instance.sandbox).await?,
        };
        match record {
            record if is_left_over(record.as_ref(), &item.instance) => {
                unknown.insert(item.instance.clone());
            }
            Some(record) => known(inner, &record, item, &mut report).await?,
            None => {}
        }
    }
    collect(inner, listing, &unknown, &mut report).await?;
    if listed.complete {
        let there: HashSet<&SandboxId> = listed.items.iter().map(|item| &item.instance.sandbox).collect();
        missing(inner, &living, &there, &mut report).await?;
    }
    Ok(report)
}

/// Records that may have an instance, page by page. Read after the listing: what was made meanwhile is recorded, and
/// looked at by itself. What has failed is not among them: an instance of it is ended, on a record of that very moment.
async fn living(inner: &Arc<Inner>) -> Result<BTreeMap<SandboxId, Sandbox>, EngineError> {
    let phases = PhaseName::MAY_LIVE.into_iter().filter(|phase| *phase != PhaseName::Failed).collect();
    let mut query = ListQuery { phases, deleted: true, limit: PAGE, ..ListQuery::default() };
    let mut records = BTreeMap::new();
    loop {
        let page = inner.store.list(&query).await?;
        records.extend(page.items.into_iter().map(|record| (record.id.clone(), record)));
        let Some(next) = page.next else { return Ok(records) };
        query.after = Some(next);
    }
}

pub(crate) struct Everything {
    pub(crate) items: Vec<Listed>,
    pub(crate) complete: bool,
}

pub(crate) async fn list(inner: &Arc<Inner>) -> Result<Everything, EngineError> {
    let mut everything = Everything { items: Vec::new(), complete: true };
    let mut page = PageRequest::default();
    loop {
        let budget = inner.config.budgets.call;
        let listed = tokio::time::timeout(budget, inner.provider.list(&inner.config.owner, page)).await;
        let listed = listed.map_err(|_| viv_provider::ProviderError::TimedOut {
            what: "a listing",
            after_ms: budget.as_millis() as u64,
        });
        let listed = listed.and_then(|listed| listed).map_err(EngineError::Provider)?;
        everything.complete &= !listed.is_partial() || is_planted(Planted::PartialListIsWhole);
        everything.items.extend(listed.items);
        let Some(next) = listed.next else { return Ok(everything) };
        page = PageRequest { cursor: Some(next), limit: None };
    }
}

/// Whether nobody wants this instance: its sandbox has no record, or has gone on to another one. The step that does so
/// clears the last one first, so what is older is there because somebody was away, or the records are from a backup.
pub(crate) fn is_left_over(record: Option<&Sandbox>, instance: &InstanceRef) -> bool {
    record.is_none_or(|record| instance.generation < record.generation)
}

/// An instance whose sandbox is recorded.
async fn known(inner: &Arc<Inner>, record: &Sandbox, item: &Listed, report: &mut Report) -> Result<(), EngineError> {
    let over = match &record.phase {
        Phase::Stopped | Phase::Hibernated { .. } | Phase::Failed { work: None } => true,
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { work: Some(_) }
        | Phase::Stopping { .. } => false,
    };
    if over {
        // Its absence was observed, and here it is: it was made by who was away, and is ended again.
        report.found += 1;
        match destroy(inner, &item.instance).await {
            Ok(()) => report.did += 1,
            Err(_) => report.failed += 1,
        }
        return Ok(());
    }
    if item.instance.generation != record.generation || !inner.is_gated(Gate::ProviderTruth, &record.id) {
        return Ok(());
    }
    let seen = match &item.state {
        InstanceState::Creating | InstanceState::Ending { .. } | InstanceState::Absent => return Ok(()),
        InstanceState::Running => Seen::Running,
        InstanceState::Frozen => Seen::Frozen,
        InstanceState::Ended(ended) => Seen::Ended(ended.cause.clone()),
    };
    let observed = Observed { state: item.state.to_string(), via: "listing".to_owned(), at_ms: inner.clock.now_ms() };
    inner.knowledge.observed(&record.id, record.generation, observed.clone());
    if is_planted(Planted::RestIsJournaled) && record.phase == Phase::Ready {
        let (by, now_ms) = (Actor::part("provider-sync"), inner.clock.now_ms());
        let line = crate::journal::noted(record, "sandbox.compared", by, now_ms, serde_json::json!({}));
        inner.store.append(inner.epoch, vec![line]).await?;
    }
    if is_planted(Planted::RestIsTouched) && record.phase == Phase::Ready {
        let mutation = mutation(inner, &item.instance, inner.token(&record.id).await?, inner.config.budgets.call);
        let set = inner.provider.set_limits(&mutation, &record.id, &record.spec.limits);
        let _ = inner.call(&record.id, inner.config.budgets.call, set).await;
    }
    if is_silent(record, &seen) {
        let left_alone = inner.knowledge.is_quiet(&record.id, inner.clock.now_ms());
        if left_alone || !inner.answers_again(record).await? {
            return Ok(());
        }
    }
    let event = Event::Seen { generation: record.generation, seen, observed };
    // As it is recorded. Had the record changed since it was read, the next comparison would see that.
    if step(record, &event, inner.now().moment()) == Stepped::Ignored(Ignored::NothingNew) {
        return Ok(());
    }
    if let Applied::Changed(_) = inner.apply(&record.id, &event).await? {
        report.found += 1;
        report.did += 1;
    }
    Ok(())
}

/// Instances that carry our mark and that nobody wants.
async fn collect(
    inner: &Arc<Inner>,
    listing: u64,
    unknown: &BTreeSet<InstanceRef>,
    report: &mut Report,
) -> Result<(), EngineError> {
    let now_ms = inner.clock.now_ms();
    let grace_ms = inner.config.periods.orphan_grace.as_millis() as u64;
    let (new, seen) = inner.reconcilers.suspects.found(listing, unknown, now_ms);
    for _ in 0..new {
        inner.metrics.count(&family::ORPHANS_FOUND, &[]);
    }
    let is_due = |(instance, since_ms, listings): &(InstanceRef, u64, u32)| {
        let off = |gate: Gate| !inner.is_gated(gate, &instance.sandbox);
        let waited = now_ms.saturating_sub(*since_ms) >= grace_ms || off(Gate::OrphanGrace);
        is_planted(Planted::NoOrphanGrace) || (waited && (*listings >= 2 || off(Gate::TwoListings)))
    };
    let due: Vec<InstanceRef> = seen.into_iter().filter(is_due).map(|(instance, ..)| instance).collect();
    report.found += unknown.len() as u64;
    for instance in due {
        // Looked at once more: intent comes before reality, so a create in flight has its record by now (L1).
        let record = inner.store.get(&instance.sandbox).await?;
        if !is_left_over(record.as_ref(), &instance) {
            continue;
        }
        match destroy(inner, &instance).await {
            Ok(()) => {
                report.did += 1;
                let line = NewLine {
                    at_ms: inner.clock.now_ms(),
                    project: record.map(|record| record.project),
                    sandbox: Some(instance.sandbox.clone()),
                    generation: Some(instance.generation),
                    kind: "orphan.collected".to_owned(),
                    from: None,
                    to: None,
                    cause: None,
                    by: Actor::part("provider-sync"),
                    data: serde_json::Value::Null,
                };
                inner.store.append(inner.epoch, vec![line]).await?;
            }
            Err(error) => {
                tracing::warn!(component = "reconcile", %instance, %error, "an orphan could not be collected");
                report.failed += 1;
            }
        }
    }
    Ok(())
}

fn mutation(inner: &Inner, instance: &InstanceRef, token: FencingToken, budget: Duration) -> Mutation {
    let operation = OperationId::from_bytes((inner.draw)());
    Mutation { operation, generation: instance.generation, token, budget_ms: budget.as_millis() as u64 }
}

async fn destroy(inner: &Arc<Inner>, instance: &InstanceRef) -> Result<(), EngineError> {
    let budget = inner.config.budgets.clear;
    let hold = inner.hold(&instance.sandbox).await?;
    let mutation = mutation(inner, instance, hold.token(), budget);
    let destroyed = inner.call(&instance.sandbox, budget, inner.provider.destroy(&mutation, &instance.sandbox)).await;
    drop(hold);
    destroyed.map_err(EngineError::Provider)
}

/// Records that should have an instance and were not listed: each is looked at by itself.
async fn missing(
    inner: &Arc<Inner>,
    living: &BTreeMap<SandboxId, Sandbox>,
    there: &HashSet<&SandboxId>,
    report: &mut Report,
) -> Result<(), EngineError> {
    for record in living.values().filter(|record| should_be_there(record) && !there.contains(&record.id)) {
        if is_planted(Planted::FailedListIsEmpty) || is_planted(Planted::PartialListIsWhole) {
            let observed = Observed::absent(inner.clock.now_ms());
            let event = Event::Seen { generation: record.generation, seen: Seen::Absent, observed };
            inner.apply(&record.id, &event).await?;
            continue;
        }
        if inner.look_at_instance(record, record.generation).await? {
            report.found += 1;
            report.did += 1;
        }
    }
    Ok(())
}

/// Whether there has to be an instance: nothing is under way that makes, ends or saves one.
fn should_be_there(record: &Sandbox) -> bool {
    match &record.phase {
        Phase::Verifying { .. } | Phase::Ready | Phase::Frozen { .. } => true,
        Phase::Provisioning { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => false,
    }
}

#[cfg(test)]
mod tests {
    use viv_core::Generation;

    use super::*;

    #[test]
    fn j1_listings_that_overlap_are_not_two_that_agree() {
        let suspects = Suspects::default();
        let instance = InstanceRef { sandbox: SandboxId::from_bytes([1; 16]), generation: Generation(1) };
        let (there, none) = ([instance.clone()].into(), BTreeSet::new());
        let (first, second) = (suspects.begin(), suspects.begin());
        assert_eq!(suspects.found(first, &there, 5), (1, vec![(instance.clone(), 5, 1)]));
        assert_eq!(suspects.found(second, &there, 6), (0, vec![(instance.clone(), 5, 1)]), "it began before that");
        let (third, fourth) = (suspects.begin(), suspects.begin());
        assert_eq!(suspects.found(fourth, &there, 7), (0, vec![(instance.clone(), 5, 2)]));
        assert_eq!(suspects.found(third, &there, 8), (0, vec![(instance.clone(), 5, 2)]));
        assert_eq!(suspects.found(suspects.begin(), &none, 9), (0, Vec::new()), "it is gone");
        assert_eq!(suspects.found(suspects.begin(), &there, 9), (1, vec![(instance, 9, 1)]), "and begins anew");
    }
}
