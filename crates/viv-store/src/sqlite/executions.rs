//! Rows of executions, and what is kept of their outputs.

use rusqlite::{Connection, OptionalExtension, params};
use viv_core::execution::Execution;
use viv_core::lifecycle::Sandbox;
use viv_core::{ExecutionId, SandboxId};

use super::write::{int, json};
use super::{Result, read};
use crate::error::StoreError;
use crate::execution::{self, EXECUTIONS_KEPT_MAX, ExecutionListing, ExecutionQuery, KeptBytes};
use crate::page::Place;
use crate::rules::is_living;

/// Writes what was learnt; what is no news is left as it is.
pub(super) fn note(db: &Connection, rows: &[Execution]) -> Result<()> {
    let mut sandboxes: Vec<&SandboxId> = Vec::new();
    for news in rows {
        let sandbox = read::get(db, &news.sandbox)?;
        let known = get(db, &news.sandbox, &news.id)?;
        if let Some(row) = execution::learnt(known.as_ref(), news, sandbox.as_ref()) {
            write(db, &row)?;
            if !sandboxes.contains(&&news.sandbox) {
                sandboxes.push(&news.sandbox);
            }
        }
    }
    sandboxes.into_iter().try_for_each(|sandbox| prune(db, sandbox))
}

/// Writes a row by compare-and-set.
pub(super) fn put(db: &Connection, row: &Execution, queued_max: u64) -> Result<()> {
    let expected = execution::expected_version(row)?;
    let found = get(db, &row.sandbox, &row.id)?.map_or(0, |found| found.version);
    let fits = execution::fits(row, read::get(db, &row.sandbox)?.as_ref());
    if found != expected || !fits {
        return Err(StoreError::Conflict { sandbox: row.sandbox.clone(), expected, found });
    }
    if found == 0 && row.queued().is_some() {
        let count = "SELECT count(*) FROM executions INDEXED BY executions_queued WHERE queued = 1 AND sandbox = ?1";
        let used: u64 = db.prepare_cached(count)?.query_row([row.sandbox.as_str()], |row| row.get(0))?;
        execution::check_queued(used, queued_max)?;
    }
    write(db, row)?;
    prune(db, &row.sandbox)
}

fn write(db: &Connection, row: &Execution) -> Result<()> {
    let put = "INSERT OR REPLACE INTO executions VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    db.prepare_cached(put)?.execute(params![
        row.sandbox.as_str(),
        row.id.as_str(),
        row.project.as_str(),
        int(row.version),
        int(row.asked_at_ms),
        row.ended_at_ms().map(int),
        row.queued().is_some(),
        json(row)?,
    ])?;
    Ok(())
}

/// Forgets the oldest that ended, beyond what is kept of a sandbox.
fn prune(db: &Connection, sandbox: &SandboxId) -> Result<()> {
    let count = "SELECT count(*) FROM executions INDEXED BY executions_of_sandbox WHERE sandbox = ?1";
    let count: u64 = db.prepare_cached(count)?.query_row([sandbox.as_str()], |row| row.get(0))?;
    let surplus = count.saturating_sub(EXECUTIONS_KEPT_MAX);
    if surplus > 0 {
        let forget = "DELETE FROM executions WHERE sandbox = ?1 AND id IN (
                          SELECT id FROM executions INDEXED BY executions_of_sandbox
                          WHERE sandbox = ?1 AND ended_at IS NOT NULL ORDER BY asked_at, id LIMIT ?2)";
        db.prepare_cached(forget)?.execute(params![sandbox.as_str(), int(surplus)])?;
    }
    Ok(())
}

/// The record is so now, and what cannot run any more is said not to, in the same transaction (X5).
pub(super) fn settle(db: &Connection, sandbox: &Sandbox) -> Result<()> {
    let open = "SELECT record FROM executions INDEXED BY executions_open WHERE ended_at IS NULL AND sandbox = ?1";
    let mut statement = db.prepare_cached(open)?;
    let rows = statement.query_map([sandbox.id.as_str()], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    for row in rows {
        let mut row: Execution = read::parse("an execution", &row)?;
        if row.settle(sandbox) {
            row.version += 1;
            write(db, &row)?;
        }
    }
    Ok(())
}

pub(super) fn get(db: &Connection, sandbox: &SandboxId, id: &ExecutionId) -> Result<Option<Execution>> {
    let record = "SELECT record FROM executions WHERE sandbox = ?1 AND id = ?2";
    let mut statement = db.prepare_cached(record)?;
    let found: Option<String> = statement.query_row([sandbox.as_str(), id.as_str()], |row| row.get(0)).optional()?;
    found.map(|found| read::parse("an execution", &found)).transpose()
}

pub(super) fn list(db: &Connection, query: &ExecutionQuery) -> Result<ExecutionListing> {
    let after = query.after.as_deref().map(Place::<ExecutionId>::decode).transpose()?;
    let (at, id) = after.map_or((i64::MAX, String::new()), |after| (int(after.created_at_ms), after.id.to_string()));
    // Newest first, and of one moment the greatest id first.
    let before = if query.after.is_some() { "(asked_at, id) < (?1, ?2)" } else { "?1 >= 0 AND ?2 = ''" };
    let (from, scope, word) = match (&query.sandbox, &query.project) {
        (Some(sandbox), _) => ("executions", "AND sandbox = ?4", sandbox.as_str()),
        (None, Some(project)) => ("executions", "AND project = ?4", project.as_str()),
        (None, None) => ("executions", "AND ?4 = ''", ""),
    };
    let mut which = String::new();
    if query.open {
        which.push_str(" AND ended_at IS NULL");
    }
    if query.queued {
        which.push_str(" AND queued = 1");
    }
    let text =
        format!("SELECT record FROM {from} WHERE {before} {scope}{which} ORDER BY asked_at DESC, id DESC LIMIT ?3");
    let mut statement = db.prepare_cached(&text)?;
    let rows = statement.query_map(params![at, id, int(query.limit as u64 + 1), word], |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    let items = rows.iter().map(|record| read::parse("an execution", record)).collect::<Result<Vec<Execution>>>()?;
    // A sandbox has one project; who asks for another one's gets nothing.
    let ours = |found: &Execution| query.project.as_ref().is_none_or(|project| found.project == *project);
    Ok(execution::page(items.into_iter().filter(ours).collect(), query.limit))
}

pub(super) fn put_outputs(db: &Connection, sandbox: &SandboxId, outputs: &[KeptBytes], bytes_max: u64) -> Result<()> {
    if !read::get(db, sandbox)?.is_some_and(|sandbox| is_living(&sandbox)) {
        return Ok(());
    }
    for kept in outputs {
        db.prepare_cached("INSERT OR REPLACE INTO outputs VALUES (?1, ?2, ?3, ?4, ?5)")?.execute(params![
            sandbox.as_str(),
            kept.execution.as_str(),
            int(kept.kept_at_ms),
            int(kept.bytes.len() as u64),
            kept.bytes,
        ])?;
    }
    let all = "SELECT execution, bytes FROM outputs WHERE sandbox = ?1 ORDER BY kept_at DESC, execution DESC";
    let mut statement = db.prepare_cached(all)?;
    let rows = statement.query_map([sandbox.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let rows: Vec<(String, u64)> = rows.collect::<rusqlite::Result<_>>()?;
    let mut total = 0;
    for (execution, bytes) in rows {
        total += bytes;
        if total > bytes_max {
            let forget = "DELETE FROM outputs WHERE sandbox = ?1 AND execution = ?2";
            db.prepare_cached(forget)?.execute([sandbox.as_str(), &execution])?;
        }
    }
    Ok(())
}

pub(super) fn output(db: &Connection, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Option<Vec<u8>>> {
    let output = "SELECT output FROM outputs WHERE sandbox = ?1 AND execution = ?2";
    let mut statement = db.prepare_cached(output)?;
    Ok(statement.query_row([sandbox.as_str(), execution.as_str()], |row| row.get(0)).optional()?)
}

/// What is older than is kept; how many rows that were (J9).
pub(super) fn retain(db: &Connection, before_ms: u64, limit: usize) -> Result<usize> {
    let forget = [
        "DELETE FROM outputs WHERE (sandbox, execution) IN
            (SELECT sandbox, execution FROM outputs WHERE kept_at < ?1 ORDER BY kept_at LIMIT ?2)",
        "DELETE FROM executions WHERE (sandbox, id) IN
            (SELECT sandbox, id FROM executions INDEXED BY executions_ended
             WHERE ended_at IS NOT NULL AND ended_at < ?1 ORDER BY ended_at LIMIT ?2)",
    ];
    let mut left = limit;
    for statement in forget {
        left -= db.prepare_cached(statement)?.execute(params![int(before_ms), int(left as u64)])?;
    }
    Ok(limit - left)
}
