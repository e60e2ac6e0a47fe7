//! Listings: places first, from an index in their order; then the records of one page.
//!
//! - By name: the records that have it; there are few.
//! - By labels: those with the rarest of them, in order.
//! - Else: all of one phase are in order in an index, so a page is merged from one run for each phase.

use std::collections::BTreeSet;

use rusqlite::types::Value;
use rusqlite::{Connection, params_from_iter};
use viv_core::lifecycle::PhaseName;
use viv_core::spec::Project;

use super::write::int;
use super::{Result, read};
use crate::error::StoreError;
use crate::page::Place;
use crate::record::{ListQuery, Listing};

/// Labels are counted up to this to find the rarest: beyond it, all are common.
const COUNT_MAX: i64 = 1_000;

pub(super) fn list(db: &Connection, query: &ListQuery) -> Result<Listing> {
    let after = query.after.as_deref().map(Place::decode).transpose()?;
    let mut places = BTreeSet::new();
    for flag in if query.deleted { &[false, true][..] } else { &[false] } {
        if query.name.is_some() || !query.labels.is_empty() {
            places.extend(Run::filtered(db, query, after.as_ref(), *flag)?.places(db)?);
            continue;
        }
        let phases = if query.phases.is_empty() { &PhaseName::ALL[..] } else { &query.phases };
        for phase in phases {
            places.extend(Run::of_phase(query, after.as_ref(), *flag, *phase).places(db)?);
        }
    }
    let more = places.len() > query.limit;
    let page: Vec<Place> = places.into_iter().take(query.limit).collect();
    let next = page.last().filter(|_| more).map(Place::encode);
    let record = |place: &Place| {
        let gone = || StoreError::Corrupt { what: format!("{} is in an index and has no record", place.id) };
        read::get(db, &place.id)?.ok_or_else(gone)
    };
    Ok(Listing { items: page.iter().map(record).collect::<Result<_>>()?, next })
}

/// A statement that finds places in their order, one more than fit on the page.
struct Run {
    text: String,
    values: Vec<Value>,
}

impl Run {
    fn new(text: &str) -> Self {
        Self { text: text.to_owned(), values: Vec::new() }
    }

    /// Adds text, in which ? stands for the values.
    fn and(&mut self, text: &str, values: impl IntoIterator<Item = Value>) {
        self.text.push_str(text);
        self.values.extend(values);
    }

    /// Adds where to begin, the order and how many, all by the columns of this table.
    fn end(mut self, table: &str, after: Option<&Place>, limit: usize) -> Self {
        if let Some(after) = after {
            let values = [int(after.created_at_ms).into(), text(after.id.as_str())];
            self.and(&format!(" AND ({table}.created_at, {table}.id) < (?, ?)"), values);
        }
        let limit = int(limit as u64).saturating_add(1);
        self.and(&format!(" ORDER BY {table}.created_at DESC, {table}.id DESC LIMIT ?"), [limit.into()]);
        self
    }

    fn of_phase(query: &ListQuery, after: Option<&Place>, deleted: bool, phase: PhaseName) -> Self {
        let mut run = Self::new("SELECT s.created_at, s.id FROM sandboxes s INDEXED BY ");
        match &query.project {
            Some(project) => run.and("sandboxes_listed_in_project WHERE s.project = ? AND", [text(project.as_str())]),
            None => run.and("sandboxes_listed WHERE", []),
        }
        run.and(" s.deleted = ? AND s.phase = ?", [deleted.into(), text(phase.as_str())]);
        run.end("s", after, query.limit)
    }

    fn filtered(db: &Connection, query: &ListQuery, after: Option<&Place>, deleted: bool) -> Result<Self> {
        let scope = query.project.as_ref().map_or("", Project::as_str);
        let mut labels: Vec<(&String, &String)> = query.labels.iter().collect();
        let mut run = Self::new("SELECT s.created_at, s.id FROM ");
        let table = if let Some(name) = &query.name {
            run.and(
                "sandboxes s INDEXED BY sandboxes_name WHERE s.name = ? AND s.deleted = ?",
                [text(name.as_str()), deleted.into()],
            );
            "s"
        } else {
            let rarest = labels.remove(rarest(db, scope, deleted, &labels)?);
            run.and(
                "labels l CROSS JOIN sandboxes s ON s.id = l.id
                 WHERE l.scope = ? AND l.name = ? AND l.value = ? AND l.deleted = ?",
                [text(scope), text(rarest.0), text(rarest.1), deleted.into()],
            );
            "l"
        };
        if let Some(project) = &query.project {
            run.and(" AND s.project = ?", [text(project.as_str())]);
        }
        if !query.phases.is_empty() {
            let words = vec!["?"; query.phases.len()].join(", ");
            run.and(&format!(" AND s.phase IN ({words})"), query.phases.iter().map(|phase| text(phase.as_str())));
        }
        for (name, value) in labels {
            run.and(
                " AND EXISTS (SELECT 1 FROM labels o WHERE o.scope = ? AND o.name = ? AND o.value = ?
                              AND o.deleted = s.deleted AND o.created_at = s.created_at AND o.id = s.id)",
                [text(scope), text(name), text(value)],
            );
        }
        Ok(run.end(table, after, query.limit))
    }

    fn places(self, db: &Connection) -> Result<Vec<Place>> {
        let mut statement = db.prepare_cached(&self.text)?;
        let mut rows = statement.query(params_from_iter(self.values))?;
        let mut places = Vec::new();
        while let Some(row) = rows.next()? {
            let id: String = row.get(1)?;
            let id = id.parse().map_err(|error| StoreError::Corrupt { what: format!("an id: {error}") })?;
            places.push(Place { created_at_ms: row.get(0)?, id });
        }
        Ok(places)
    }
}

/// Which label fewest have, as far as it is counted.
fn rarest(db: &Connection, scope: &str, deleted: bool, labels: &[(&String, &String)]) -> Result<usize> {
    if labels.len() == 1 {
        return Ok(0);
    }
    let count = "SELECT count(*) FROM (SELECT 1 FROM labels
                 WHERE scope = ?1 AND name = ?2 AND value = ?3 AND deleted = ?4 LIMIT ?5)";
    let mut statement = db.prepare_cached(count)?;
    let mut counts = Vec::with_capacity(labels.len());
    for (name, value) in labels {
        let n: i64 = statement.query_row((scope, name, value, deleted, COUNT_MAX), |row| row.get(0))?;
        counts.push(n);
    }
    Ok(counts.iter().enumerate().min_by_key(|(_, n)| **n).map_or(0, |(at, _)| at))
}

fn text(word: &str) -> Value {
    Value::Text(word.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::schema;

    /// How SQLite would go about it.
    fn plan(db: &Connection, run: Run) -> String {
        let mut statement = db.prepare(&format!("EXPLAIN QUERY PLAN {}", run.text)).unwrap();
        let rows = statement.query_map(params_from_iter(run.values), |row| row.get::<_, String>(3)).unwrap();
        rows.collect::<rusqlite::Result<Vec<_>>>().unwrap().join("; ")
    }

    #[test]
    fn a_page_is_read_in_order_from_an_index_alone() {
        let db = Connection::open_in_memory().unwrap();
        schema::migrate(&db, schema::STEPS).unwrap();
        let label = |name: &str| (name.to_owned(), "v".to_owned());
        for project in [None, Some("p".parse().unwrap())] {
            for after in [None, Some(Place { created_at_ms: 1, id: "sbx_1".parse().unwrap() })] {
                let query = ListQuery { project: project.clone(), limit: 5, ..ListQuery::default() };
                let by_phase = plan(&db, Run::of_phase(&query, after.as_ref(), false, PhaseName::Ready));
                assert!(by_phase.contains("USING COVERING INDEX"), "{by_phase}");
                let labels = [label("a"), label("b")].into();
                let phases = vec![PhaseName::Ready, PhaseName::Lost];
                let query = ListQuery { labels, phases, ..query };
                let by_label = plan(&db, Run::filtered(&db, &query, after.as_ref(), false).unwrap());
                for plan in [by_phase, by_label] {
                    assert!(!plan.contains("SCAN") && !plan.contains("TEMP B-TREE"), "{plan}");
                    let begins = after.is_none() || plan.contains("(created_at,id)<(?,?)");
                    assert!(begins, "a page begins where the last one ended: {plan}");
                }
            }
        }
    }
}
