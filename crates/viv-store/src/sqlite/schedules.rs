//! Rows of schedules.

use rusqlite::{Connection, OptionalExtension, params};
use viv_core::ScheduleId;
use viv_core::schedule::Schedule;

use super::write::{append, int, json};
use super::{Result, read};
use crate::error::StoreError;
use crate::journal::NewLine;
use crate::record::{ScheduleListing, ScheduleQuery};
use crate::rules::{self, is_living};

pub(super) fn put(db: &Connection, schedule: &Schedule, lines: &[NewLine], max: u64) -> Result<()> {
    let expected = rules::expected_schedule_version(schedule)?;
    let version = "SELECT version FROM schedules WHERE id = ?1";
    let found: Option<u64> =
        db.prepare_cached(version)?.query_row([schedule.id.as_str()], |row| row.get(0)).optional()?;
    let found = found.unwrap_or(0);
    let living = read::get(db, &schedule.sandbox)?.is_some_and(|sandbox| is_living(&sandbox));
    if found != expected || !living {
        return Err(StoreError::Conflict { sandbox: schedule.sandbox.clone(), expected, found });
    }
    if found == 0 {
        let count = "SELECT count(*) FROM schedules INDEXED BY schedules_sandbox WHERE sandbox = ?1";
        let used: u64 = db.prepare_cached(count)?.query_row([schedule.sandbox.as_str()], |row| row.get(0))?;
        rules::check_schedules(used, max)?;
    }
    db.prepare_cached("INSERT OR REPLACE INTO schedules VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)")?.execute(params![
        schedule.id.as_str(),
        schedule.project.as_str(),
        schedule.sandbox.as_str(),
        int(schedule.version),
        schedule.due_at_ms().map(int),
        schedule.run.is_some(),
        json(schedule)?,
    ])?;
    append(db, lines)?;
    Ok(())
}

pub(super) fn get(db: &Connection, id: &ScheduleId) -> Result<Option<Schedule>> {
    let record = "SELECT record FROM schedules WHERE id = ?1";
    let found: Option<String> = db.prepare_cached(record)?.query_row([id.as_str()], |row| row.get(0)).optional()?;
    found.map(|found| read::parse("a schedule", &found)).transpose()
}

pub(super) fn list(db: &Connection, query: &ScheduleQuery) -> Result<ScheduleListing> {
    let (lead, and, word) = match (&query.sandbox, &query.project) {
        (Some(sandbox), _) => ("INDEXED BY schedules_sandbox", "AND sandbox = ?3", sandbox.as_str()),
        (None, Some(project)) => ("INDEXED BY schedules_project", "AND project = ?3", project.as_str()),
        (None, None) => ("", "AND ?3 = ''", ""),
    };
    let after = query.after.as_ref().map_or("", ScheduleId::as_str);
    let text = format!("SELECT record FROM schedules {lead} WHERE id > ?1 {and} ORDER BY id LIMIT ?2");
    let mut statement = db.prepare_cached(&text)?;
    // One more than is asked for tells whether there is more.
    let rows = statement.query_map(params![after, int(query.limit as u64 + 1), word], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    let items = rows.iter().map(|record| read::parse("a schedule", record)).collect::<Result<Vec<Schedule>>>()?;
    // A sandbox has one project; who asks for another one's gets nothing.
    let ours = |found: &Schedule| query.project.as_ref().is_none_or(|project| found.project == *project);
    Ok(rules::schedule_page(items.into_iter().filter(ours), query.limit))
}

pub(super) fn due(db: &Connection, until_ms: u64, limit: usize) -> Result<Vec<ScheduleId>> {
    let due = "SELECT id FROM schedules INDEXED BY schedules_due
               WHERE due_at IS NOT NULL AND due_at <= ?1 ORDER BY due_at, id LIMIT ?2";
    let mut statement = db.prepare_cached(due)?;
    let rows = statement.query_map([int(until_ms), int(limit as u64)], |row| row.get(0))?;
    ids(rows.collect::<rusqlite::Result<_>>()?)
}

pub(super) fn next_ms(db: &Connection) -> Result<Option<u64>> {
    let next = "SELECT due_at FROM schedules INDEXED BY schedules_due
                WHERE due_at IS NOT NULL ORDER BY due_at LIMIT 1";
    Ok(db.prepare_cached(next)?.query_row([], |row| row.get(0)).optional()?)
}

pub(super) fn running(db: &Connection) -> Result<Vec<ScheduleId>> {
    let running = "SELECT id FROM schedules INDEXED BY schedules_running WHERE running = 1 ORDER BY id";
    let mut statement = db.prepare_cached(running)?;
    let rows = statement.query_map([], |row| row.get(0))?;
    ids(rows.collect::<rusqlite::Result<_>>()?)
}

fn ids(texts: Vec<String>) -> Result<Vec<ScheduleId>> {
    let parse =
        |text: String| text.parse().map_err(|error| StoreError::Corrupt { what: format!("a schedule's id: {error}") });
    texts.into_iter().map(parse).collect()
}

pub(super) fn remove(db: &Connection, id: &ScheduleId, line: &NewLine) -> Result<bool> {
    let removed = db.prepare_cached("DELETE FROM schedules WHERE id = ?1")?.execute([id.as_str()])?;
    if removed > 0 {
        append(db, std::slice::from_ref(line))?;
    }
    Ok(removed > 0)
}
