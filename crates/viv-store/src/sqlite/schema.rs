//! Making a file, and bringing an older one up to date. There is no way back: a newer file is refused.

use rusqlite::Connection;

use crate::error::StoreError;

/// Marks a file as ours, so that no other program's database is taken for one: "vivs".
const APPLICATION_ID: i32 = 0x7669_7673;

/// What leads from each version to the next; the first from an empty file.
pub(super) const STEPS: &[&str] = &[
    include_str!("schema_1.sql"),
    include_str!("schema_2.sql"),
    include_str!("schema_3.sql"),
    include_str!("schema_4.sql"),
    include_str!("schema_tasks.sql"),
    include_str!("schema_executions.sql"),
    include_str!("schema_webhooks.sql"),
];

/// Brings a file up to date, each step in one transaction with the number that tells that it was taken.
pub(super) fn migrate(db: &Connection, steps: &[&str]) -> Result<(), StoreError> {
    loop {
        // Somebody else may do the same at this moment: what was read before the lock is not trusted.
        db.execute_batch("BEGIN IMMEDIATE")?;
        let outcome = step(db, steps);
        let end = if outcome.is_ok() { "COMMIT" } else { "ROLLBACK" };
        let ended = db.execute_batch(end);
        if !outcome? {
            return Ok(ended?);
        }
        ended?;
    }
}

/// Takes the next step; `false` when there is none.
fn step(db: &Connection, steps: &[&str]) -> Result<bool, StoreError> {
    let version: i64 = db.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let application: i32 = db.pragma_query_value(None, "application_id", |row| row.get(0))?;
    let tables: i64 = db.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    let fresh = version == 0 && application == 0 && tables == 0;
    if !fresh && application != APPLICATION_ID {
        return Err(StoreError::Corrupt { what: "the file is a database of another program".to_owned() });
    }
    let newest = steps.len() as i64;
    if version > newest {
        let what = format!(
            "the file has version {version} and this program knows up to {newest}: \
             use the newer program that wrote it, or a backup from before"
        );
        return Err(StoreError::Corrupt { what });
    }
    let Some(statements) = usize::try_from(version).ok().and_then(|done| steps.get(done)) else {
        return Ok(false);
    };
    db.execute_batch(statements)?;
    db.pragma_update(None, "application_id", APPLICATION_ID)?;
    db.pragma_update(None, "user_version", version + 1)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(db: &Connection) -> i64 {
        db.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
    }

    #[test]
    fn each_step_is_taken_once_and_a_failed_one_leaves_nothing() {
        let db = Connection::open_in_memory().unwrap();
        migrate(&db, STEPS).unwrap();
        let first = version(&db);
        db.execute("INSERT INTO meta VALUES ('kept', 'yes')", []).unwrap();
        let bad: Vec<&str> = STEPS.iter().copied().chain(["CREATE TABLE more (a) STRICT; nonsense"]).collect();
        assert!(migrate(&db, &bad).is_err());
        assert_eq!(version(&db), first);
        let two = ["CREATE TABLE more (a TEXT) STRICT", "INSERT INTO more VALUES ('once')"];
        let good: Vec<&str> = STEPS.iter().copied().chain(two).collect();
        migrate(&db, &good).unwrap();
        migrate(&db, &good).unwrap();
        assert_eq!(version(&db), first + 2);
        let rows: i64 = db.query_row("SELECT count(*) FROM more, meta", [], |row| row.get(0)).unwrap();
        assert_eq!(rows, 1);
    }

    #[test]
    fn a_newer_file_is_refused_and_left_alone() {
        let db = Connection::open_in_memory().unwrap();
        migrate(&db, STEPS).unwrap();
        db.pragma_update(None, "user_version", 99).unwrap();
        let refused = migrate(&db, STEPS).unwrap_err();
        assert!(matches!(&refused, StoreError::Corrupt { what } if what.contains("99")), "{refused}");
        assert_eq!(version(&db), 99);
    }

    #[test]
    fn another_programs_file_is_refused_and_left_alone() {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch("CREATE TABLE songs (title TEXT)").unwrap();
        assert!(matches!(migrate(&db, STEPS), Err(StoreError::Corrupt { .. })));
        assert_eq!(version(&db), 0);
        let tables: i64 = db.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)).unwrap();
        assert_eq!(tables, 1);
    }
}
