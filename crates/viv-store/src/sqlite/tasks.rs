//! Rows of tasks.

use std::collections::BTreeMap;

use rusqlite::{Connection, OptionalExtension, params};
use viv_core::task::Task;
use viv_core::{ExecutionId, SandboxId, TaskId};

use super::write::{append, int, json};
use super::{Result, read};
use crate::error::StoreError;
use crate::journal::NewLine;
use crate::task::{self, TaskListing, TaskOutput, TaskQuery};

pub(super) fn put(db: &Connection, row: &Task, lines: &[NewLine]) -> Result<()> {
    let expected = task::expected_version(row)?;
    let version = "SELECT version FROM tasks WHERE id = ?1";
    let found: Option<u64> = db.prepare_cached(version)?.query_row([row.id.as_str()], |row| row.get(0)).optional()?;
    let found = found.unwrap_or(0);
    if found != expected {
        return Err(StoreError::TaskConflict { task: row.id.clone(), expected, found });
    }
    if row.is_at_work()
        && let Some(by) = at_work(db, &row.sandbox)?.filter(|by| *by != row.id)
    {
        return Err(StoreError::TaskBusy { sandbox: row.sandbox.clone(), by });
    }
    let put = "INSERT INTO tasks VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
               ON CONFLICT (id) DO UPDATE SET sandbox = ?3, version = ?4, state = ?5, living = ?6, at_work = ?7,
                                              ended_at = ?9, record = ?10";
    db.prepare_cached(put)?.execute(params![
        row.id.as_str(),
        row.project.as_str(),
        row.sandbox.as_str(),
        int(row.version),
        row.state.as_str(),
        !row.state.is_final(),
        row.is_at_work(),
        int(row.made_at_ms),
        row.times.confirmed_at_ms.filter(|_| row.state.is_final()).map(int),
        json(row)?,
    ])?;
    append(db, lines)?;
    Ok(())
}

pub(super) fn get(db: &Connection, id: &TaskId) -> Result<Option<Task>> {
    let record = "SELECT record FROM tasks WHERE id = ?1";
    let found: Option<String> = db.prepare_cached(record)?.query_row([id.as_str()], |row| row.get(0)).optional()?;
    found.map(|found| read::parse("a task", &found)).transpose()
}

pub(super) fn list(db: &Connection, query: &TaskQuery) -> Result<TaskListing> {
    let (lead, and, word) = match (&query.sandbox, &query.project) {
        (Some(sandbox), _) => ("INDEXED BY tasks_sandbox", "AND sandbox = ?4", sandbox.as_str()),
        (None, Some(project)) => ("INDEXED BY tasks_project", "AND project = ?4", project.as_str()),
        (None, None) => ("INDEXED BY tasks_made", "AND ?4 = ''", ""),
    };
    let states: Vec<&str> = query.states.iter().map(|state| state.as_str()).collect();
    // Words of ours, of which there are twelve.
    let states = if states.is_empty() { String::new() } else { format!("AND state IN ('{}')", states.join("','")) };
    let (made_at, id) = query.after.as_ref().map_or((i64::MAX, ""), |(at_ms, id)| (int(*at_ms), id.as_str()));
    let text = format!(
        "SELECT record FROM tasks {lead} WHERE (made_at, id) < (?1, ?2) {and} {states}
         ORDER BY made_at DESC, id DESC LIMIT ?3"
    );
    let mut statement = db.prepare_cached(&text)?;
    // One more than is asked for tells whether there is more.
    let rows = statement.query_map(params![made_at, id, int(query.limit as u64 + 1), word], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    let items = rows.iter().map(|record| read::parse("a task", record)).collect::<Result<Vec<Task>>>()?;
    // A sandbox has one project; who asks for another one's gets nothing.
    let ours = |found: &Task| query.project.as_ref().is_none_or(|project| found.project == *project);
    Ok(task::page(items.into_iter().filter(ours), query.limit))
}

pub(super) fn living(db: &Connection) -> Result<Vec<TaskId>> {
    let living = "SELECT id FROM tasks INDEXED BY tasks_living WHERE living = 1 ORDER BY made_at, id";
    let mut statement = db.prepare_cached(living)?;
    let rows = statement.query_map([], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    rows.iter().map(|text| parse(text)).collect()
}

pub(super) fn all_at_work(db: &Connection, sandboxes: &[SandboxId]) -> Result<BTreeMap<SandboxId, TaskId>> {
    let mut found = BTreeMap::new();
    for sandbox in sandboxes {
        if let Some(task) = at_work(db, sandbox)? {
            found.insert(sandbox.clone(), task);
        }
    }
    Ok(found)
}

fn at_work(db: &Connection, sandbox: &SandboxId) -> Result<Option<TaskId>> {
    let at_work = "SELECT id FROM tasks INDEXED BY tasks_at_work WHERE at_work = 1 AND sandbox = ?1";
    let found: Option<String> =
        db.prepare_cached(at_work)?.query_row([sandbox.as_str()], |row| row.get(0)).optional()?;
    found.as_deref().map(parse).transpose()
}

fn parse(text: &str) -> Result<TaskId> {
    text.parse().map_err(|error| StoreError::Corrupt { what: format!("a task's id: {error}") })
}

pub(super) fn keep_output(db: &Connection, output: &TaskOutput) -> Result<()> {
    let TaskOutput { task, execution, offset, data } = output;
    if get(db, task)?.is_none() {
        return Ok(());
    }
    let put = "INSERT OR REPLACE INTO task_outputs VALUES (?1, ?2, ?3, ?4)";
    db.prepare_cached(put)?.execute(params![task.as_str(), execution.as_str(), int(*offset), data])?;
    Ok(())
}

pub(super) fn output(db: &Connection, task: &TaskId, execution: &ExecutionId) -> Result<Option<TaskOutput>> {
    let kept = "SELECT offset, data FROM task_outputs WHERE task = ?1 AND execution = ?2";
    let row = |row: &rusqlite::Row<'_>| {
        let (task, execution) = (task.clone(), execution.clone());
        Ok(TaskOutput { task, execution, offset: row.get(0)?, data: row.get(1)? })
    };
    Ok(db.prepare_cached(kept)?.query_row([task.as_str(), execution.as_str()], row).optional()?)
}

/// Forgets those that ended before a time and are not kept to go on with.
pub(super) fn retain(db: &Connection, before_ms: u64, limit: usize) -> Result<usize> {
    let forget = "DELETE FROM tasks WHERE id IN
        (SELECT id FROM tasks INDEXED BY tasks_ended WHERE ended_at IS NOT NULL AND ended_at < ?1
         ORDER BY ended_at LIMIT ?2)";
    Ok(db.prepare_cached(forget)?.execute(params![int(before_ms), int(limit as u64)])?)
}
