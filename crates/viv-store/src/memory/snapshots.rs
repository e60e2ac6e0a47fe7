//! Rows of snapshots, and who begins with them.

use std::collections::BTreeMap;

use viv_core::lifecycle::Sandbox;
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::{SandboxId, SnapshotId};

use super::{Result, State};
use crate::error::StoreError;
use crate::journal::{Cursor, NewLine};
use crate::page::Place;
use crate::record::{Change, Remembered, SnapshotListing, SnapshotQuery};
use crate::rules::{USERS_MAX, expected_row_version};

impl State {
    /// All of them on a copy, which takes the place of what there is when none was refused.
    pub(super) fn commit_all(&mut self, changes: Vec<Change>) -> Result<Cursor> {
        let mut next = self.clone();
        for change in changes {
            next.commit(change)?;
        }
        *self = next;
        Ok(self.cursor)
    }

    /// Refuses a row that cannot be written.
    pub(super) fn check_row(&self, row: &Snapshot) -> Result<()> {
        let expected = expected_row_version(row)?;
        let found = self.snapshots.get(&row.id).map_or(0, |found| found.version);
        if found != expected {
            return Err(StoreError::SnapshotConflict { snapshot: row.id.clone(), expected, found });
        }
        if row.state == SnapshotState::Removing { self.need_unused(&row.id) } else { Ok(()) }
    }

    /// Refuses a record that begins with what is not ready, once these rows are written.
    pub(super) fn check_uses(&self, sandbox: &Sandbox, rows: &[Snapshot]) -> Result<()> {
        let before = self.sandboxes.get(&sandbox.id).map(Sandbox::uses).unwrap_or_default();
        for new in sandbox.uses().into_iter().filter(|wanted| !before.contains(wanted)) {
            let written = rows.iter().rev().find(|row| row.id == *new);
            let row = written.or_else(|| self.snapshots.get(new));
            if row.is_none_or(|row| row.state != SnapshotState::Ready) {
                return Err(StoreError::SnapshotMissing { snapshot: new.clone() });
            }
        }
        Ok(())
    }

    fn need_unused(&self, snapshot: &SnapshotId) -> Result<()> {
        let by = self.users(snapshot, USERS_MAX);
        if by.is_empty() { Ok(()) } else { Err(StoreError::SnapshotInUse { snapshot: snapshot.clone(), by }) }
    }

    pub(super) fn users(&self, snapshot: &SnapshotId, limit: usize) -> Vec<SandboxId> {
        let users = self.sandboxes.values().filter(|sandbox| sandbox.uses().contains(snapshot));
        users.take(limit).map(|sandbox| sandbox.id.clone()).collect()
    }

    pub(super) fn forget_snapshot(&mut self, snapshot: &SnapshotId, lines: Vec<NewLine>) -> Result<Cursor> {
        self.need_unused(snapshot)?;
        match self.snapshots.get(snapshot) {
            None => return Ok(self.cursor),
            Some(row) if row.state == SnapshotState::Ready => {
                return Err(StoreError::SnapshotConflict { snapshot: row.id.clone(), expected: 0, found: row.version });
            }
            // Nothing was made under the keys that name it, so they are free again (L1).
            Some(row) if row.state == SnapshotState::Saving => {
                let of = row.sandbox.clone();
                let names = |known: &Remembered| {
                    Some(&known.sandbox) == of.as_ref()
                        && known.made.as_ref().is_some_and(|made| made.contains(snapshot.as_str()))
                };
                self.idempotency.retain(|_, known| !names(known));
            }
            Some(_) => {}
        }
        self.snapshots.remove(snapshot);
        Ok(self.append(lines))
    }

    pub(super) fn list_snapshots(&self, query: &SnapshotQuery) -> Result<SnapshotListing> {
        let after: Option<Place<SnapshotId>> = query.after.as_deref().map(Place::decode).transpose()?;
        let wanted = |row: &&Snapshot| {
            query.project.as_ref().is_none_or(|project| row.project == *project)
                && query.sandbox.as_ref().is_none_or(|sandbox| row.sandbox.as_ref() == Some(sandbox))
                && (!query.unsettled || row.state != SnapshotState::Ready)
        };
        let all = self.snapshots.values().filter(wanted).map(|row| (Place::of_snapshot(row), row));
        let mut places: BTreeMap<Place<SnapshotId>, &Snapshot> = all.collect();
        if let Some(after) = after {
            places.retain(|place, _| *place > after);
        }
        let more = places.len() > query.limit;
        let items: Vec<Snapshot> = places.values().take(query.limit).copied().cloned().collect();
        let next = items.last().filter(|_| more).map(|last| Place::of_snapshot(last).encode());
        Ok(SnapshotListing { items, next })
    }
}
