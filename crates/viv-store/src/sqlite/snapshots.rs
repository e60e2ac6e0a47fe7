//! Rows of snapshots, and who begins with them.

use std::collections::BTreeSet;

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, params, params_from_iter};
use viv_core::lifecycle::Sandbox;
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::spec::Project;
use viv_core::{SandboxId, SnapshotId};

use super::read::parse;
use super::write::{append, int, json};
use super::{Result, read};
use crate::error::StoreError;
use crate::journal::{Cursor, NewLine};
use crate::page::Place;
use crate::record::{SnapshotListing, SnapshotQuery};
use crate::rules::{USERS_MAX, expected_row_version};

pub(super) fn put(db: &Connection, row: &Snapshot, lines: &[NewLine]) -> Result<Cursor> {
    let expected = expected_row_version(row)?;
    let version = "SELECT version FROM snapshots WHERE id = ?1";
    let found: Option<u64> = db.prepare_cached(version)?.query_row([row.id.as_str()], |row| row.get(0)).optional()?;
    if found.unwrap_or(0) != expected {
        return Err(StoreError::SnapshotConflict { snapshot: row.id.clone(), expected, found: found.unwrap_or(0) });
    }
    if row.state == SnapshotState::Removing {
        need_unused(db, &row.id)?;
    }
    let insert = "INSERT INTO snapshots (id, project, sandbox, settled, version, created_at, record)
                  VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
    let update = "UPDATE snapshots SET project = ?2, sandbox = ?3, settled = ?4, version = ?5, created_at = ?6,
                                       record = ?7
                  WHERE id = ?1";
    db.prepare_cached(if found.is_some() { update } else { insert })?.execute(params![
        row.id.as_str(),
        row.project.as_str(),
        row.sandbox.as_ref().map(SandboxId::as_str),
        row.state == SnapshotState::Ready,
        int(row.version),
        int(row.created_at_ms),
        json(row)?,
    ])?;
    append(db, lines)
}

pub(super) fn forget(db: &Connection, snapshot: &SnapshotId, lines: &[NewLine]) -> Result<Cursor> {
    need_unused(db, snapshot)?;
    match get(db, snapshot)? {
        None => return append(db, &[]),
        Some(row) if row.state == SnapshotState::Ready => {
            return Err(StoreError::SnapshotConflict { snapshot: row.id, expected: 0, found: row.version });
        }
        // Nothing was made under the keys that name it, so they are free again (L1).
        Some(Snapshot { state: SnapshotState::Saving, sandbox: Some(sandbox), .. }) => {
            let named = "DELETE FROM idempotency WHERE sandbox = ?1 AND instr(made, ?2) > 0";
            db.prepare_cached(named)?.execute([sandbox.as_str(), snapshot.as_str()])?;
        }
        Some(_) => {}
    }
    db.prepare_cached("DELETE FROM snapshots WHERE id = ?1")?.execute([snapshot.as_str()])?;
    append(db, lines)
}

fn need_unused(db: &Connection, snapshot: &SnapshotId) -> Result<()> {
    let by = users(db, snapshot, USERS_MAX)?;
    if by.is_empty() { Ok(()) } else { Err(StoreError::SnapshotInUse { snapshot: snapshot.clone(), by }) }
}

pub(super) fn users(db: &Connection, snapshot: &SnapshotId, limit: usize) -> Result<Vec<SandboxId>> {
    let users = "SELECT sandbox FROM snapshot_uses WHERE snapshot = ?1 ORDER BY sandbox LIMIT ?2";
    let mut statement = db.prepare_cached(users)?;
    let rows = statement.query_map(params![snapshot.as_str(), int(limit as u64)], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    rows.iter().map(|id| read::id(id)).collect()
}

pub(super) fn get(db: &Connection, snapshot: &SnapshotId) -> Result<Option<Snapshot>> {
    let mut statement = db.prepare_cached("SELECT record FROM snapshots WHERE id = ?1")?;
    let found: Option<String> = statement.query_row([snapshot.as_str()], |row| row.get(0)).optional()?;
    found.map(|record| parse("a snapshot", &record)).transpose()
}

/// Writes what a record begins with, unless that is there as it is. What is new has to be ready.
pub(super) fn put_uses(db: &Connection, sandbox: &Sandbox) -> Result<()> {
    let mut there = db.prepare_cached("SELECT snapshot FROM snapshot_uses WHERE sandbox = ?1")?;
    let there = there.query_map([sandbox.id.as_str()], |row| row.get(0))?;
    let there: BTreeSet<String> = there.collect::<rusqlite::Result<_>>()?;
    let wanted = sandbox.uses();
    for gone in there.iter().filter(|there| !wanted.iter().any(|wanted| wanted.as_str() == there.as_str())) {
        let delete = "DELETE FROM snapshot_uses WHERE snapshot = ?1 AND sandbox = ?2";
        db.prepare_cached(delete)?.execute([gone.as_str(), sandbox.id.as_str()])?;
    }
    for new in wanted.into_iter().filter(|wanted| !there.contains(wanted.as_str())) {
        if get(db, new)?.is_none_or(|row| row.state != SnapshotState::Ready) {
            return Err(StoreError::SnapshotMissing { snapshot: new.clone() });
        }
        let insert = "INSERT INTO snapshot_uses VALUES (?1, ?2)";
        db.prepare_cached(insert)?.execute([new.as_str(), sandbox.id.as_str()])?;
    }
    Ok(())
}

pub(super) fn list(db: &Connection, query: &SnapshotQuery) -> Result<SnapshotListing> {
    let after: Option<Place<SnapshotId>> = query.after.as_deref().map(Place::decode).transpose()?;
    let mut text = "SELECT record FROM snapshots INDEXED BY ".to_owned();
    let mut values: Vec<Value> = Vec::new();
    let of = |project: &Project| Value::Text(project.as_str().to_owned());
    // The narrowest leads; a sandbox has few, and few are unsettled.
    match (&query.sandbox, query.unsettled, &query.project) {
        (Some(sandbox), _, _) => {
            text.push_str("snapshots_of_sandbox WHERE sandbox = ?");
            values.push(Value::Text(sandbox.as_str().to_owned()));
        }
        (None, true, _) => text.push_str("snapshots_unsettled WHERE settled = 0"),
        (None, false, Some(project)) => {
            text.push_str("snapshots_in_project WHERE project = ?");
            values.push(of(project));
        }
        (None, false, None) => text.push_str("snapshots_listed WHERE 1 = 1"),
    }
    if let Some(project) = query.project.as_ref().filter(|_| query.sandbox.is_some() || query.unsettled) {
        text.push_str(" AND project = ?");
        values.push(of(project));
    }
    if query.sandbox.is_some() && query.unsettled {
        text.push_str(" AND settled = 0");
    }
    if let Some(after) = after {
        text.push_str(" AND (created_at, id) < (?, ?)");
        values.extend([int(after.created_at_ms).into(), Value::Text(after.id.to_string())]);
    }
    text.push_str(" ORDER BY created_at DESC, id DESC LIMIT ?");
    values.push(int(query.limit as u64).saturating_add(1).into());
    let mut statement = db.prepare_cached(&text)?;
    let rows = statement.query_map(params_from_iter(values), |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    let more = rows.len() > query.limit;
    let items: Vec<Snapshot> =
        rows.iter().take(query.limit).map(|row| parse("a snapshot", row)).collect::<Result<_>>()?;
    let next = items.last().filter(|_| more).map(|last| Place::of_snapshot(last).encode());
    Ok(SnapshotListing { items, next })
}
