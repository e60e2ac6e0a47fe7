//! What reads answer.

use std::fmt::Write as _;
use std::ops::Range;

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};
use serde::de::DeserializeOwned;
use viv_core::lifecycle::{PhaseName, Sandbox};
use viv_core::limits::ResourceLimits;
use viv_core::spec::{Name, Project};
use viv_core::{Generation, SandboxId};

use super::Result;
use super::write::int;
use crate::error::StoreError;
use crate::journal::{Cursor, JournalFilter, JournalLine, NewLine};
use crate::record::{ApiKey, Idempotency, Lease, Owner, PhaseCounts, Remembered};

pub(super) fn parse<T: DeserializeOwned>(what: &str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| StoreError::Corrupt { what: format!("{what}: {error}") })
}

/// A record with the time of its last activity.
pub(super) fn sandbox(record: &str, active_at_ms: u64) -> Result<Sandbox> {
    let sandbox: Sandbox = parse("a record", record)?;
    Ok(Sandbox { active_at_ms: active_at_ms.max(sandbox.active_at_ms), ..sandbox })
}

pub(super) fn id(text: &str) -> Result<SandboxId> {
    text.parse().map_err(|error| StoreError::Corrupt { what: format!("an id: {error}") })
}

fn phase(text: &str) -> Result<PhaseName> {
    PhaseName::parse(text).ok_or_else(|| StoreError::Corrupt { what: format!("there is no phase {text:?}") })
}

/// Where the journal stands, also when its last lines were forgotten.
pub(super) fn last_cursor(db: &Connection) -> Result<Cursor> {
    let last = "SELECT seq FROM sqlite_sequence WHERE name = 'journal'";
    let last: Option<u64> = db.prepare_cached(last)?.query_row([], |row| row.get(0)).optional()?;
    Ok(Cursor(last.unwrap_or(0)))
}

pub(super) fn owner(db: &Connection) -> Result<Option<Owner>> {
    let owner: Option<String> = db.prepare_cached("SELECT owner FROM ownership")?.query_row([], |row| row.get(0))?;
    owner.map(|owner| parse("the owner", &owner)).transpose()
}

pub(super) fn get(db: &Connection, id: &SandboxId) -> Result<Option<Sandbox>> {
    let mut statement = db.prepare_cached("SELECT record, active_at FROM sandboxes WHERE id = ?1")?;
    let found: Option<(String, u64)> =
        statement.query_row([id.as_str()], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    found.map(|(record, active_at_ms)| sandbox(&record, active_at_ms)).transpose()
}

/// Whose name it is.
pub(super) fn living(db: &Connection, project: &Project, name: &Name) -> Result<Option<SandboxId>> {
    let living = "SELECT id FROM sandboxes INDEXED BY sandboxes_living_name
                  WHERE project = ?1 AND name = ?2 AND name IS NOT NULL AND deleted = 0 AND phase <> 'stopped'";
    let found: Option<String> =
        db.prepare_cached(living)?.query_row([project.as_str(), name.as_str()], |row| row.get(0)).optional()?;
    found.map(|found| id(&found)).transpose()
}

pub(super) fn find(db: &Connection, project: &Project, name: &Name) -> Result<Option<Sandbox>> {
    if let Some(found) = living(db, project, name)? {
        return get(db, &found);
    }
    let newest = "SELECT id FROM sandboxes INDEXED BY sandboxes_name WHERE name = ?2 AND project = ?1
                  ORDER BY created_at DESC, id DESC LIMIT 1";
    let found: Option<String> =
        db.prepare_cached(newest)?.query_row([project.as_str(), name.as_str()], |row| row.get(0)).optional()?;
    found.map(|found| id(&found)).transpose()?.map_or(Ok(None), |found| get(db, &found))
}

pub(super) fn count(db: &Connection, project: Option<&Project>) -> Result<PhaseCounts> {
    let scope = project.map_or("", Project::as_str);
    let mut statement = db.prepare_cached("SELECT phase, n FROM counts WHERE scope = ?1 AND n > 0")?;
    let rows = statement.query_map([scope], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let rows: Vec<(String, u64)> = rows.collect::<rusqlite::Result<_>>()?;
    rows.into_iter().map(|(word, n)| Ok((phase(&word)?, n))).collect()
}

/// The limits of all that count for quotas but for this one, with their projects: in proportion to how many they are.
pub(super) fn claims(db: &Connection, but: &SandboxId) -> Result<Vec<(String, ResourceLimits)>> {
    let claims = "SELECT project, json_extract(record, '$.spec.limits') FROM sandboxes INDEXED BY sandboxes_may_live
                  WHERE may_live = 1 AND id <> ?1";
    let mut statement = db.prepare_cached(claims)?;
    let rows = statement.query_map([but.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let rows: Vec<(String, Option<String>)> = rows.collect::<rusqlite::Result<_>>()?;
    let limits =
        |text: Option<String>| text.map_or_else(|| Ok(ResourceLimits::default()), |text| parse("limits", &text));
    rows.into_iter().map(|(project, text)| Ok((project, limits(text)?))).collect()
}

pub(super) fn due(
    db: &Connection,
    after: Option<&(u64, SandboxId)>,
    until_ms: u64,
    limit: usize,
) -> Result<Vec<(u64, SandboxId)>> {
    let due = "SELECT due_at, id FROM sandboxes INDEXED BY sandboxes_due
               WHERE due_at IS NOT NULL AND (due_at, id) > (?1, ?2) AND due_at <= ?3 ORDER BY due_at, id LIMIT ?4";
    let mut statement = db.prepare_cached(due)?;
    // No time is before the first one, and no id is empty.
    let (after_ms, after) = after.map_or((-1, ""), |(at_ms, id)| (int(*at_ms), id.as_str()));
    let values = (after_ms, after, int(until_ms), int(limit as u64));
    let rows = statement.query_map(values, |row| Ok((row.get(0)?, row.get(1)?)))?;
    let rows: Vec<(u64, String)> = rows.collect::<rusqlite::Result<_>>()?;
    rows.into_iter().map(|(at_ms, found)| Ok((at_ms, id(&found)?))).collect()
}

pub(super) fn next_due_ms(db: &Connection) -> Result<Option<u64>> {
    let next = "SELECT due_at FROM sandboxes INDEXED BY sandboxes_due
                WHERE due_at IS NOT NULL ORDER BY due_at LIMIT 1";
    Ok(db.prepare_cached(next)?.query_row([], |row| row.get(0)).optional()?)
}

pub(super) fn remembered(db: &Connection, key: &Idempotency) -> Result<Option<Remembered>> {
    let known = "SELECT body_hash, sandbox, at, made FROM idempotency WHERE project = ?1 AND route = ?2 AND key = ?3";
    let mut statement = db.prepare_cached(known)?;
    let row = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
    let found: Option<([u8; 32], String, u64, Option<String>)> =
        statement.query_row([key.project.as_str(), &key.route, &key.key], row).optional()?;
    let Some((body_hash, sandbox, at_ms, made)) = found else { return Ok(None) };
    Ok(Some(Remembered { body_hash, sandbox: id(&sandbox)?, at_ms, made }))
}

pub(super) fn journal(
    db: &Connection,
    after: Cursor,
    filter: &JournalFilter,
    limit: usize,
) -> Result<Vec<JournalLine>> {
    lines(db, int(after.0).saturating_add(1)..i64::MAX, "ASC", filter, limit)
}

/// The first line of then or later, from a cursor on: from the index alone, and no further back in it than then.
const FIRST_SINCE: &str = "SELECT min(cursor) FROM journal INDEXED BY journal_at WHERE at >= ?1 AND cursor >= ?2";

/// Where lines begin, from a cursor on, that are of then or later; `None` when there are none. What is older is passed
/// over by the index on times, and not read.
fn first_since(db: &Connection, from: i64, filter: &JournalFilter) -> Result<Option<i64>> {
    let Some(since_ms) = filter.since_ms.map(int) else { return Ok(Some(from)) };
    // Whoever reads on is past what is older, mostly: one look, and not one at the whole index for each page.
    let at = "SELECT at FROM journal NOT INDEXED WHERE cursor >= ?1 ORDER BY cursor LIMIT 1";
    let at: Option<i64> = db.prepare_cached(at)?.query_row([from], |row| row.get(0)).optional()?;
    if at.is_none_or(|at| at >= since_ms) {
        return Ok(at.map(|_| from));
    }
    Ok(db.prepare_cached(FIRST_SINCE)?.query_row([since_ms, from], |row| row.get(0))?)
}

pub(super) fn journal_tail(
    db: &Connection,
    before: Option<Cursor>,
    filter: &JournalFilter,
    limit: usize,
) -> Result<Vec<JournalLine>> {
    lines(db, 0..before.map_or(i64::MAX, |before| int(before.0)), "DESC", filter, limit)
}

fn lines(
    db: &Connection,
    cursors: Range<i64>,
    order: &str,
    filter: &JournalFilter,
    limit: usize,
) -> Result<Vec<JournalLine>> {
    let Some(first) = first_since(db, cursors.start, filter)? else { return Ok(Vec::new()) };
    // The narrower of the two leads; a sandbox has few lines, a project may have nearly all.
    let lead = match (&filter.sandbox, &filter.project) {
        (Some(_), _) => "INDEXED BY journal_sandbox",
        (None, Some(_)) => "INDEXED BY journal_project",
        (None, None) => "NOT INDEXED",
    };
    let mut values: Vec<Value> = vec![first.into(), cursors.end.into(), int(limit as u64).into()];
    let mut and = String::new();
    let wanted = [
        ("sandbox =", filter.sandbox.as_ref().map(|sandbox| sandbox.as_str().to_owned().into())),
        ("project =", filter.project.as_ref().map(|project| project.as_str().to_owned().into())),
        ("at >=", filter.since_ms.map(|since_ms| int(since_ms).into())),
    ];
    for (column, value) in wanted {
        if let Some(value) = value {
            values.push(value);
            let _ = write!(and, " AND {column} ?{}", values.len());
        }
    }
    let text = format!(
        "SELECT cursor, at, project, sandbox, generation, kind, from_phase, to_phase, cause, actor, data
         FROM journal {lead} WHERE cursor >= ?1 AND cursor < ?2{and} ORDER BY cursor {order} LIMIT ?3"
    );
    let mut statement = db.prepare_cached(&text)?;
    let mut rows = statement.query(params_from_iter(values))?;
    let mut lines = Vec::new();
    while let Some(row) = rows.next()? {
        lines.push(line(row)?);
    }
    Ok(lines)
}

fn line(row: &Row<'_>) -> Result<JournalLine> {
    let word = |at: usize| Ok::<Option<String>, StoreError>(row.get(at)?);
    let project = word(2)?.map(|text| text.parse::<Project>()).transpose();
    let line = NewLine {
        at_ms: row.get(1)?,
        project: project.map_err(|error| StoreError::Corrupt { what: format!("a project: {error}") })?,
        sandbox: word(3)?.map(|text| id(&text)).transpose()?,
        generation: row.get::<_, Option<u64>>(4)?.map(Generation),
        kind: row.get(5)?,
        from: word(6)?.map(|text| phase(&text)).transpose()?,
        to: word(7)?.map(|text| phase(&text)).transpose()?,
        cause: row.get(8)?,
        by: parse("an actor", &row.get::<_, String>(9)?)?,
        data: parse("a line", &row.get::<_, String>(10)?)?,
    };
    Ok(JournalLine { cursor: Cursor(row.get(0)?), line })
}

pub(super) fn leases(db: &Connection, sandbox: &SandboxId) -> Result<Vec<Lease>> {
    let leases = "SELECT lease FROM leases WHERE sandbox = ?1 AND epoch = (SELECT epoch FROM ownership) ORDER BY kind";
    let mut statement = db.prepare_cached(leases)?;
    let rows = statement.query_map(params![sandbox.as_str()], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    rows.iter().map(|lease| parse("a lease", lease)).collect()
}

pub(super) fn stray_leases(db: &Connection, limit: usize) -> Result<Vec<Lease>> {
    let stray = "SELECT lease FROM leases LEFT JOIN sandboxes ON sandboxes.id = leases.sandbox
                 WHERE sandboxes.id IS NULL OR sandboxes.phase = 'stopped'
                 ORDER BY leases.sandbox, leases.kind LIMIT ?1";
    let mut statement = db.prepare_cached(stray)?;
    let rows = statement.query_map(params![i64::try_from(limit).unwrap_or(i64::MAX)], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    rows.iter().map(|lease| parse("a lease", lease)).collect()
}

pub(super) fn keys(db: &Connection) -> Result<Vec<ApiKey>> {
    let mut statement = db.prepare_cached("SELECT key FROM keys ORDER BY created_at, id")?;
    let rows = statement.query_map([], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    rows.iter().map(|key| parse("a key", key)).collect()
}

pub(super) fn meta(db: &Connection, name: &str) -> Result<Option<String>> {
    Ok(db.prepare_cached("SELECT value FROM meta WHERE name = ?1")?.query_row([name], |row| row.get(0)).optional()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::schema;

    #[test]
    fn o7_what_is_older_is_passed_over_by_the_index_on_times() {
        let db = Connection::open_in_memory().unwrap();
        schema::migrate(&db, schema::STEPS).unwrap();
        let mut statement = db.prepare(&format!("EXPLAIN QUERY PLAN {FIRST_SINCE}")).unwrap();
        let rows = statement.query_map([1, 1], |row| row.get::<_, String>(3)).unwrap();
        let plan = rows.collect::<rusqlite::Result<Vec<_>>>().unwrap().join("; ");
        assert!(plan.contains("SEARCH journal USING COVERING INDEX journal_at (at>?"), "{plan}");
    }
}
