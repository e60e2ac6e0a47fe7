//! What reads answer.

use std::collections::BTreeMap;

use viv_core::SandboxId;
use viv_core::lifecycle::{PhaseName, Sandbox};
use viv_core::spec::{Name, Project};

use super::{Result, State};
use crate::journal::{Cursor, JournalFilter, JournalLine, NewLine};
use crate::page::Place;
use crate::record::{Idempotency, Lease, ListQuery, Listing, PhaseCounts, Remembered};
use crate::rules::is_living;

impl State {
    pub(super) fn find(&self, project: &Project, name: &Name) -> Option<Sandbox> {
        let named =
            self.sandboxes.values().filter(|found| found.project == *project && found.name.as_ref() == Some(name));
        named.min_by_key(|found| (!is_living(found), Place::of(found))).cloned()
    }

    pub(super) fn list(&self, query: &ListQuery) -> Result<Listing> {
        let after = query.after.as_deref().map(Place::decode).transpose()?;
        let wanted = |sandbox: &&Sandbox| {
            query.project.as_ref().is_none_or(|project| sandbox.project == *project)
                && (query.deleted || !sandbox.deleted)
                && (query.phases.is_empty() || query.phases.contains(&sandbox.phase.name()))
                && query.name.as_ref().is_none_or(|name| sandbox.name.as_ref() == Some(name))
                && query.labels.iter().all(|(name, value)| sandbox.labels.get(name) == Some(value))
        };
        let all = self.sandboxes.values().filter(wanted).map(|sandbox| (Place::of(sandbox), sandbox));
        let mut places: BTreeMap<Place, &Sandbox> = all.collect();
        if let Some(after) = after {
            places.retain(|place, _| *place > after);
        }
        let more = places.len() > query.limit;
        let items: Vec<Sandbox> = places.values().take(query.limit).copied().cloned().collect();
        let next = items.last().filter(|_| more).map(|last| Place::of(last).encode());
        Ok(Listing { items, next })
    }

    pub(super) fn count(&self, project: Option<&Project>) -> PhaseCounts {
        let mut counts: BTreeMap<PhaseName, u64> = BTreeMap::new();
        let ours = |found: &&Sandbox| !found.deleted && project.is_none_or(|project| found.project == *project);
        for sandbox in self.sandboxes.values().filter(ours) {
            *counts.entry(sandbox.phase.name()).or_default() += 1;
        }
        counts
    }

    pub(super) fn due(&self, after: Option<&(u64, SandboxId)>, until_ms: u64, limit: usize) -> Vec<(u64, SandboxId)> {
        let times = self.sandboxes.values().filter_map(|found| Some((found.due_at_ms()?, found.id.clone())));
        let is_asked_for = |found: &(u64, SandboxId)| found.0 <= until_ms && after.is_none_or(|after| found > after);
        let mut due: Vec<_> = times.filter(is_asked_for).collect();
        due.sort();
        due.truncate(limit);
        due
    }

    pub(super) fn remembered(&self, key: &Idempotency) -> Option<Remembered> {
        self.idempotency.get(&(key.project.clone(), key.route.clone(), key.key.clone())).cloned()
    }

    pub(super) fn journal_after(&self, after: Cursor, filter: &JournalFilter, limit: usize) -> Vec<JournalLine> {
        let lines = self.journal.range(Cursor(after.0.saturating_add(1))..);
        lines.filter(|(_, line)| filter.takes(line)).take(limit).map(whole).collect()
    }

    pub(super) fn journal_before(
        &self,
        before: Option<Cursor>,
        filter: &JournalFilter,
        limit: usize,
    ) -> Vec<JournalLine> {
        let lines = self.journal.range(..before.unwrap_or(Cursor(u64::MAX)));
        lines.rev().filter(|(_, line)| filter.takes(line)).take(limit).map(whole).collect()
    }

    pub(super) fn stray_leases(&self, limit: usize) -> Vec<Lease> {
        let is_stray = |lease: &&Lease| self.sandboxes.get(&lease.sandbox).is_none_or(Sandbox::is_over);
        self.leases.values().map(|held| &held.lease).filter(is_stray).take(limit).cloned().collect()
    }

    pub(super) fn leases_on(&self, sandbox: &SandboxId) -> Vec<Lease> {
        let ours = self.leases.iter().filter(|((on, _), held)| on == sandbox && held.epoch == self.epoch);
        ours.map(|(_, held)| held.lease.clone()).collect()
    }
}

fn whole((cursor, line): (&Cursor, &NewLine)) -> JournalLine {
    JournalLine { cursor: *cursor, line: line.clone() }
}
