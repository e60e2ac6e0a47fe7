//! What writes do, inside the writer's transaction. What is refused leaves nothing: its savepoint is rolled back.

use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;
use viv_core::lifecycle::{PhaseName, Sandbox};
use viv_core::spec::{Name, Project};
use viv_core::{FencingToken, SandboxId};

use super::{Result, read};
use crate::error::StoreError;
use crate::journal::{Cursor, NewLine};
use crate::record::{ApiKey, Change, Idempotency, Lease, LeaseKind, Owner, Quota};
use crate::rules::{Grant, expected_version, grant, is_living, may_live, shrunk};
use crate::store::Epoch;

/// As the file holds it. Nothing that is counted here comes near to the limit.
pub(super) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|error| StoreError::Corrupt { what: format!("it cannot be written: {error}") })
}

/// Refuses who was taken over. Nobody was ever given epoch 0.
pub(super) fn check_epoch(db: &Connection, epoch: Epoch) -> Result<()> {
    let latest: i64 = db.prepare_cached("SELECT epoch FROM ownership")?.query_row([], |row| row.get(0))?;
    if epoch.0 == 0 || latest != int(epoch.0) { Err(StoreError::Superseded) } else { Ok(()) }
}

pub(super) fn own(db: &Connection, owner: &Owner) -> Result<Epoch> {
    let next = "UPDATE ownership SET epoch = epoch + 1 RETURNING epoch";
    let epoch: u64 = db.prepare_cached(next)?.query_row([], |row| row.get(0))?;
    let owner = json(&Owner { epoch, ..owner.clone() })?;
    db.prepare_cached("UPDATE ownership SET owner = ?1")?.execute([owner])?;
    Ok(Epoch(epoch))
}

pub(super) fn commit(db: &Connection, change: &Change) -> Result<Cursor> {
    let Change { sandbox, lines, idempotency, quota, unused_since_ms, snapshots } = change;
    if let Some(key) = idempotency
        && let Some(known) = read::remembered(db, key)?
    {
        return Err(StoreError::Repeated(Box::new(known)));
    }
    let expected = expected_version(sandbox)?;
    let found = stored(db, &sandbox.id)?;
    let version = found.as_ref().map_or(0, |found| found.version);
    let used = found.as_ref().zip(*unused_since_ms).is_some_and(|(found, since_ms)| found.active_at_ms > since_ms);
    if version != expected || used {
        return Err(StoreError::Conflict { sandbox: sandbox.id.clone(), expected, found: version });
    }
    check_name(db, sandbox)?;
    if let Some(quota) = quota {
        check_quota(db, sandbox, *quota)?;
    }
    for row in snapshots {
        super::snapshots::put(db, row, &[])?;
    }
    put(db, sandbox, found.as_ref())?;
    super::executions::settle(db, sandbox)?;
    if sandbox.is_over() {
        db.prepare_cached("DELETE FROM leases WHERE sandbox = ?1")?.execute([sandbox.id.as_str()])?;
    }
    super::snapshots::put_uses(db, sandbox)?;
    if let Some(key) = idempotency {
        remember(db, key, sandbox)?;
    }
    append(db, lines)
}

pub(super) fn commit_all(db: &Connection, changes: &[Change]) -> Result<Cursor> {
    for change in changes {
        commit(db, change)?;
    }
    read::last_cursor(db)
}

/// What a commit has to know of the record that is there.
struct Stored {
    version: u64,
    active_at_ms: u64,
}

fn stored(db: &Connection, id: &SandboxId) -> Result<Option<Stored>> {
    let mut statement = db.prepare_cached("SELECT version, active_at FROM sandboxes WHERE id = ?1")?;
    let found =
        statement.query_row([id.as_str()], |row| Ok(Stored { version: row.get(0)?, active_at_ms: row.get(1)? }));
    Ok(found.optional()?)
}

fn check_name(db: &Connection, sandbox: &Sandbox) -> Result<()> {
    let Some(name) = sandbox.name.as_ref().filter(|_| is_living(sandbox)) else { return Ok(()) };
    match read::living(db, &sandbox.project, name)? {
        Some(by) if by != sandbox.id => Err(StoreError::NameTaken { by }),
        Some(_) | None => Ok(()),
    }
}

/// Counts the rows, in the transaction in which one is to be added (L18).
fn check_quota(db: &Connection, sandbox: &Sandbox, quota: Quota) -> Result<()> {
    if !may_live(sandbox) {
        return Ok(());
    }
    let total = "SELECT count(*) FROM sandboxes INDEXED BY sandboxes_may_live WHERE may_live = 1 AND id <> ?1";
    let total: u64 = db.prepare_cached(total)?.query_row([sandbox.id.as_str()], |row| row.get(0))?;
    let project = "SELECT count(*) FROM sandboxes INDEXED BY sandboxes_may_live
                   WHERE may_live = 1 AND project = ?2 AND id <> ?1";
    let ours = [sandbox.id.as_str(), sandbox.project.as_str()];
    let project: u64 = db.prepare_cached(project)?.query_row(ours, |row| row.get(0))?;
    quota.check(total, project)?;
    if !quota.has_sums() {
        return Ok(());
    }
    let others = read::claims(db, &sandbox.id)?;
    quota.check_sums(sandbox, others.iter().map(|(project, limits)| (project.as_str(), limits.clone())))
}

fn put(db: &Connection, sandbox: &Sandbox, found: Option<&Stored>) -> Result<()> {
    // A touch since the record was read is not undone.
    let active_at_ms = sandbox.active_at_ms.max(found.map_or(0, |found| found.active_at_ms));
    let insert = "INSERT INTO sandboxes (id, project, name, phase, phase_since, deleted, may_live, version, created_at,
                                         due_at, active_at, shrunk, record)
                  VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, 0, ?12)";
    let update = "UPDATE sandboxes SET project = ?2, name = ?3, phase = ?4, phase_since = ?5, deleted = ?6,
                                       may_live = ?7, version = ?8, created_at = ?9, due_at = ?10, active_at = ?11,
                                       shrunk = 0, record = ?12
                  WHERE id = ?1";
    db.prepare_cached(if found.is_some() { update } else { insert })?.execute(params![
        sandbox.id.as_str(),
        sandbox.project.as_str(),
        sandbox.name.as_ref().map(Name::as_str),
        sandbox.phase.name().as_str(),
        int(sandbox.phase_since_ms),
        sandbox.deleted,
        may_live(sandbox),
        int(sandbox.version),
        int(sandbox.created_at_ms),
        sandbox.due_at_ms().map(int),
        int(active_at_ms),
        json(sandbox)?,
    ])?;
    put_labels(db, sandbox, found.is_none())
}

/// Writes the labels, unless they are there as they are.
fn put_labels(db: &Connection, sandbox: &Sandbox, new: bool) -> Result<()> {
    if !new {
        let there = "SELECT name, value, deleted, created_at FROM labels WHERE id = ?1 AND scope = ?2 ORDER BY name";
        let mut there = db.prepare_cached(there)?;
        let row = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
        let there = there.query_map([sandbox.id.as_str(), sandbox.project.as_str()], row)?;
        let there: Vec<(String, String, bool, i64)> = there.collect::<rusqlite::Result<_>>()?;
        let labels = sandbox.labels.iter();
        let wanted = labels.map(|(name, value)| (name, value, sandbox.deleted, int(sandbox.created_at_ms)));
        if wanted.eq(there.iter().map(|(name, value, deleted, at)| (name, value, *deleted, *at))) {
            return Ok(());
        }
        db.prepare_cached("DELETE FROM labels WHERE id = ?1")?.execute([sandbox.id.as_str()])?;
    }
    let mut insert = db.prepare_cached("INSERT INTO labels VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?;
    for (name, value) in &sandbox.labels {
        for scope in ["", sandbox.project.as_str()] {
            let created_at = int(sandbox.created_at_ms);
            insert.execute(params![scope, name, value, sandbox.deleted, created_at, sandbox.id.as_str()])?;
        }
    }
    Ok(())
}

fn remember(db: &Connection, key: &Idempotency, sandbox: &Sandbox) -> Result<()> {
    db.prepare_cached("INSERT INTO idempotency VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?.execute(params![
        key.project.as_str(),
        key.route,
        key.key,
        key.body_hash,
        sandbox.id.as_str(),
        int(key.at_ms),
        sandbox.is_over() || key.made.is_some(),
        key.made,
    ])?;
    Ok(())
}

pub(super) fn append(db: &Connection, lines: &[NewLine]) -> Result<Cursor> {
    let insert =
        "INSERT INTO journal (at, project, sandbox, generation, kind, from_phase, to_phase, cause, actor, data)
                  VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)";
    let mut insert = db.prepare_cached(insert)?;
    for line in lines {
        insert.execute(params![
            int(line.at_ms),
            line.project.as_ref().map(Project::as_str),
            line.sandbox.as_ref().map(SandboxId::as_str),
            line.generation.map(|generation| int(generation.0)),
            line.kind,
            line.from.map(PhaseName::as_str),
            line.to.map(PhaseName::as_str),
            line.cause,
            json(&line.by)?,
            json(&line.data)?,
        ])?;
    }
    read::last_cursor(db)
}

/// Takes or renews what is wanted; its token is given here.
pub(super) fn lease(db: &Connection, epoch: Epoch, wanted: &Lease) -> Result<Lease> {
    let living = "SELECT 1 FROM sandboxes WHERE id = ?1 AND phase <> 'stopped'";
    if !db.prepare_cached(living)?.exists([wanted.sandbox.as_str()])? {
        return Err(StoreError::Over { sandbox: wanted.sandbox.clone() });
    }
    let held = "SELECT lease, epoch FROM leases WHERE sandbox = ?1 AND kind = ?2";
    let place = params![wanted.sandbox.as_str(), wanted.kind.as_str()];
    let row = |row: &rusqlite::Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, u64>(1)?));
    let held = db.prepare_cached(held)?.query_row(place, row).optional()?;
    let held = held
        .map(|(held, taken_under)| Ok::<_, StoreError>((read::parse::<Lease>("a lease", &held)?, Epoch(taken_under))));
    let held = held.transpose()?;
    let lease = match grant(held.as_ref().map(|(held, under)| (held, *under)), epoch, wanted)? {
        Grant::Renewed(lease) => lease,
        Grant::Anew => Lease { token: draw_token(db)?, ..wanted.clone() },
    };
    db.prepare_cached("INSERT OR REPLACE INTO leases VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?.execute(params![
        lease.sandbox.as_str(),
        lease.kind.as_str(),
        int(epoch.0),
        int(lease.expires_at_ms),
        int(lease.token.0),
        json(&lease)?,
    ])?;
    Ok(lease)
}

pub(super) fn draw_token(db: &Connection) -> Result<FencingToken> {
    let next = "UPDATE ownership SET token = token + 1 RETURNING token";
    Ok(FencingToken(db.prepare_cached(next)?.query_row([], |row| row.get(0))?))
}

pub(super) fn raise_token(db: &Connection, seen: FencingToken) -> Result<()> {
    db.prepare_cached("UPDATE ownership SET token = max(token, ?1)")?.execute([int(seen.0)])?;
    Ok(())
}

pub(super) fn release(db: &Connection, sandbox: &SandboxId, kind: LeaseKind, token: FencingToken) -> Result<()> {
    let delete = "DELETE FROM leases WHERE sandbox = ?1 AND kind = ?2 AND token = ?3";
    db.prepare_cached(delete)?.execute(params![sandbox.as_str(), kind.as_str(), int(token.0)])?;
    Ok(())
}

pub(super) fn touch(db: &Connection, sandbox: &SandboxId, active_at_ms: u64) -> Result<()> {
    let later = "UPDATE sandboxes SET active_at = ?2 WHERE id = ?1 AND active_at < ?2";
    db.prepare_cached(later)?.execute(params![sandbox.as_str(), int(active_at_ms)])?;
    Ok(())
}

pub(super) fn put_key(db: &Connection, key: &ApiKey, line: &NewLine) -> Result<()> {
    let put = "INSERT OR REPLACE INTO keys VALUES (?1, ?2, ?3)";
    db.prepare_cached(put)?.execute(params![key.id, int(key.created_at_ms), json(key)?])?;
    append(db, std::slice::from_ref(line))?;
    Ok(())
}

pub(super) fn set_meta_once(db: &Connection, name: &str, value: &str) -> Result<String> {
    db.prepare_cached("INSERT OR IGNORE INTO meta VALUES (?1, ?2)")?.execute([name, value])?;
    Ok(read::meta(db, name)?.unwrap_or_else(|| value.to_owned()))
}

pub(super) fn put_meta(db: &Connection, name: &str, value: Option<&str>, line: &NewLine) -> Result<()> {
    match value {
        Some(value) => db.prepare_cached("INSERT OR REPLACE INTO meta VALUES (?1, ?2)")?.execute([name, value])?,
        None => db.prepare_cached("DELETE FROM meta WHERE name = ?1")?.execute([name])?,
    };
    append(db, std::slice::from_ref(line))?;
    Ok(())
}

pub(super) fn retain(db: &Connection, before_ms: u64, limit: usize) -> Result<u64> {
    let forget = [
        "DELETE FROM journal WHERE cursor IN (SELECT cursor FROM journal WHERE at < ?1 ORDER BY at LIMIT ?2)",
        "DELETE FROM idempotency WHERE (project, route, key) IN
            (SELECT project, route, key FROM idempotency WHERE over = 1 AND at < ?1 ORDER BY at LIMIT ?2)",
        "DELETE FROM leases WHERE (sandbox, kind) IN
            (SELECT sandbox, kind FROM leases WHERE expires_at < ?1 ORDER BY expires_at LIMIT ?2)",
    ];
    let before = int(before_ms);
    let mut left = limit;
    for statement in forget {
        left -= db.prepare_cached(statement)?.execute(params![before, int(left as u64)])?;
    }
    left -= super::tasks::retain(db, before_ms, left)?;
    left -= super::executions::retain(db, before_ms, left)?;
    left -= super::subscriptions::retain(db, before_ms, left)?;
    let old = "SELECT record, active_at FROM sandboxes INDEXED BY sandboxes_to_shrink
               WHERE phase = 'stopped' AND shrunk = 0 AND phase_since < ?1 ORDER BY phase_since LIMIT ?2";
    let mut old = db.prepare_cached(old)?;
    let old = old.query_map(params![before, int(left as u64)], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let old: Vec<(String, u64)> = old.collect::<rusqlite::Result<_>>()?;
    for (record, active_at_ms) in &old {
        let small = shrunk(&read::sandbox(record, *active_at_ms)?);
        let shrink = "UPDATE sandboxes SET shrunk = 1, record = ?2 WHERE id = ?1";
        db.prepare_cached(shrink)?.execute(params![small.id.as_str(), json(&small)?])?;
        db.prepare_cached("DELETE FROM labels WHERE id = ?1")?.execute([small.id.as_str()])?;
    }
    Ok((limit - left + old.len()) as u64)
}
