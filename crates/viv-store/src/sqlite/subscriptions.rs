//! Rows of subscriptions and letters.

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, params};
use viv_core::WebhookId;
use viv_core::spec::Project;
use viv_core::subscription::{Letter, Subscription};

use super::write::{append, int, json};
use super::{Result, SqliteStore, read};
use crate::error::StoreError;
use crate::journal::{Cursor, NewLine};
use crate::store::Epoch;
use crate::subscription::{
    self, LETTERS_DEAD_MAX, LetterQuery, Replay, Settled, Standing, SubscriptionListing, SubscriptionQuery,
    Subscriptions,
};

fn put(db: &Connection, row: &Subscription, from: Cursor, lines: &[NewLine], max: u64) -> Result<()> {
    let expected = subscription::expected_version(row)?;
    let version = "SELECT version FROM subscriptions WHERE id = ?1";
    let found: Option<u64> = db.prepare_cached(version)?.query_row([row.id.as_str()], |row| row.get(0)).optional()?;
    let found = found.unwrap_or(0);
    if found != expected {
        return Err(StoreError::SubscriptionConflict { subscription: row.id.clone(), expected, found });
    }
    if found == 0 {
        let used = db.prepare_cached("SELECT count(*) FROM subscriptions")?.query_row([], |row| row.get(0))?;
        subscription::check_count(used, max)?;
    }
    let put = "INSERT INTO subscriptions VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (id) DO UPDATE
               SET project = excluded.project, version = excluded.version, record = excluded.record";
    db.prepare_cached(put)?.execute(params![
        row.id.as_str(),
        row.project.as_ref().map(Project::as_str),
        int(row.version),
        int(from.0),
        json(row)?,
    ])?;
    append(db, lines)?;
    Ok(())
}

/// What is read of a row: its record, its place, and how many letters wait and are dead.
const STANDING: &str = "SELECT record, cursor,
    (SELECT count(*) FROM letters INDEXED BY letters_waiting WHERE subscription = s.id AND dead_at IS NULL),
    (SELECT count(*) FROM letters INDEXED BY letters_dead WHERE subscription = s.id AND dead_at IS NOT NULL)
    FROM subscriptions s";

type StandingRow = (String, u64, u64, u64);

fn standing_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<StandingRow> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
}

fn standing((record, cursor, waiting, dead): &StandingRow) -> Result<(Subscription, Standing)> {
    let row = read::parse("a subscription", record)?;
    Ok((row, Standing { cursor: Cursor(*cursor), waiting: *waiting, dead: *dead }))
}

fn get(db: &Connection, id: &WebhookId) -> Result<Option<(Subscription, Standing)>> {
    let text = format!("{STANDING} WHERE id = ?1");
    let found = db.prepare_cached(&text)?.query_row([id.as_str()], standing_row).optional()?;
    found.as_ref().map(standing).transpose()
}

fn list(db: &Connection, query: &SubscriptionQuery) -> Result<SubscriptionListing> {
    let after = query.after.as_ref().map_or("", WebhookId::as_str);
    let project = query.project.as_ref().map(Project::as_str);
    let text = format!("{STANDING} WHERE id > ?1 AND (?2 IS NULL OR project = ?2) ORDER BY id LIMIT ?3");
    let mut statement = db.prepare_cached(&text)?;
    // One more than is asked for tells whether there is more.
    let rows = statement.query_map(params![after, project, int(query.limit as u64 + 1)], standing_row)?;
    let rows: Vec<StandingRow> = rows.collect::<rusqlite::Result<_>>()?;
    let items = rows.iter().map(standing).collect::<Result<Vec<_>>>()?;
    Ok(subscription::page(items.into_iter(), query.limit))
}

fn remove(db: &Connection, id: &WebhookId, line: &NewLine) -> Result<bool> {
    let removed = db.prepare_cached("DELETE FROM subscriptions WHERE id = ?1")?.execute([id.as_str()])?;
    if removed > 0 {
        append(db, std::slice::from_ref(line))?;
    }
    Ok(removed > 0)
}

fn put_letters(db: &Connection, id: &WebhookId, (from, to): (Cursor, Cursor), letters: &[Letter]) -> Result<bool> {
    let moved = "UPDATE subscriptions SET cursor = ?3 WHERE id = ?1 AND cursor = ?2";
    if db.prepare_cached(moved)?.execute(params![id.as_str(), int(from.0), int(to.0)])? == 0 {
        return Ok(false);
    }
    let mut put = db.prepare_cached("INSERT OR REPLACE INTO letters VALUES (?1, ?2, ?3, ?4)")?;
    for letter in letters {
        put.execute(params![id.as_str(), int(letter.cursor), letter.dead_at_ms.map(int), json(letter)?])?;
    }
    Ok(true)
}

fn letters(db: &Connection, query: &LetterQuery) -> Result<Vec<Letter>> {
    let (index, dead) = if query.dead { ("letters_dead", "NOT NULL") } else { ("letters_waiting", "NULL") };
    let text = format!(
        "SELECT letter FROM letters INDEXED BY {index} WHERE subscription = ?1 AND cursor > ?2 AND dead_at IS {dead}
         ORDER BY cursor LIMIT ?3"
    );
    let mut statement = db.prepare_cached(&text)?;
    let place = params![query.of.as_str(), int(query.after.0), int(query.limit as u64)];
    let rows = statement.query_map(place, |row| row.get(0))?;
    let rows: Vec<String> = rows.collect::<rusqlite::Result<_>>()?;
    rows.iter().map(|letter| read::parse("a letter", letter)).collect()
}

fn settle(db: &Connection, id: &WebhookId, settled: &[Settled], lines: &[NewLine]) -> Result<()> {
    for one in settled {
        match one {
            Settled::Taken(cursor) => {
                let taken = "DELETE FROM letters WHERE subscription = ?1 AND cursor = ?2";
                db.prepare_cached(taken)?.execute(params![id.as_str(), int(cursor.0)])?;
            }
            Settled::Kept(letter) => update(db, id, letter)?,
        }
    }
    if settled.iter().any(|one| matches!(one, Settled::Kept(letter) if letter.dead_at_ms.is_some())) {
        let too_many = "DELETE FROM letters WHERE subscription = ?1 AND dead_at IS NOT NULL AND cursor <=
            (SELECT cursor FROM letters INDEXED BY letters_dead WHERE subscription = ?1 AND dead_at IS NOT NULL
             ORDER BY cursor DESC LIMIT 1 OFFSET ?2)";
        db.prepare_cached(too_many)?.execute(params![id.as_str(), int(LETTERS_DEAD_MAX)])?;
    }
    append(db, lines)?;
    Ok(())
}

/// Writes one that is there.
fn update(db: &Connection, id: &WebhookId, letter: &Letter) -> Result<()> {
    let kept = "UPDATE letters SET dead_at = ?3, letter = ?4 WHERE subscription = ?1 AND cursor = ?2";
    let dead_at = letter.dead_at_ms.map(int);
    db.prepare_cached(kept)?.execute(params![id.as_str(), int(letter.cursor), dead_at, json(letter)?])?;
    Ok(())
}

fn replay(db: &Connection, id: &WebhookId, what: Replay, now_ms: u64, line: &NewLine) -> Result<Option<u64>> {
    if !db.prepare_cached("SELECT 1 FROM subscriptions WHERE id = ?1")?.exists([id.as_str()])? {
        return Ok(None);
    }
    let again = match what {
        Replay::After(after) => {
            let place = params![id.as_str(), int(after.0)];
            db.prepare_cached("UPDATE subscriptions SET cursor = ?2 WHERE id = ?1")?.execute(place)?;
            let found_again = "DELETE FROM letters WHERE subscription = ?1 AND cursor > ?2 AND dead_at IS NULL";
            db.prepare_cached(found_again)?.execute(place)?;
            0
        }
        Replay::Dead | Replay::One(_) => {
            let after = if let Replay::One(cursor) = what { Cursor(cursor.0.saturating_sub(1)) } else { Cursor(0) };
            let limit = if matches!(what, Replay::One(_)) { 1 } else { LETTERS_DEAD_MAX as usize };
            let mut dead = letters(db, &LetterQuery { of: id.clone(), dead: true, after, limit })?;
            dead.retain(|letter| !matches!(what, Replay::One(cursor) if cursor.0 != letter.cursor));
            for letter in &dead {
                update(db, id, &Letter::new(letter.cursor, letter.sandbox.clone(), now_ms))?;
            }
            dead.len() as u64
        }
    };
    append(db, std::slice::from_ref(line))?;
    Ok(Some(again))
}

/// Forgets letters that died before a time: the lines they are about are forgotten too.
pub(super) fn retain(db: &Connection, before_ms: u64, limit: usize) -> Result<usize> {
    let forget = "DELETE FROM letters WHERE (subscription, cursor) IN
        (SELECT subscription, cursor FROM letters INDEXED BY letters_to_forget
         WHERE dead_at IS NOT NULL AND dead_at < ?1 ORDER BY dead_at LIMIT ?2)";
    Ok(db.prepare_cached(forget)?.execute(params![int(before_ms), int(limit as u64)])?)
}

#[async_trait]
impl Subscriptions for SqliteStore {
    async fn put_subscription(
        &self,
        epoch: Epoch,
        row: Subscription,
        from: Cursor,
        lines: Vec<NewLine>,
        max: u64,
    ) -> Result<()> {
        self.write(epoch, move |db| put(db, &row, from, &lines, max)).await
    }

    async fn subscription(&self, id: &WebhookId) -> Result<Option<(Subscription, Standing)>> {
        let id = id.clone();
        self.readers.call(move |db| get(db, &id)).await
    }

    async fn subscriptions(&self, query: &SubscriptionQuery) -> Result<SubscriptionListing> {
        let query = query.clone();
        self.readers.call(move |db| list(db, &query)).await
    }

    async fn remove_subscription(&self, epoch: Epoch, id: &WebhookId, line: NewLine) -> Result<bool> {
        let id = id.clone();
        self.write(epoch, move |db| remove(db, &id, &line)).await
    }

    async fn put_letters(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        between: (Cursor, Cursor),
        letters: Vec<Letter>,
    ) -> Result<bool> {
        let id = id.clone();
        self.write(epoch, move |db| put_letters(db, &id, between, &letters)).await
    }

    async fn letters(&self, query: &LetterQuery) -> Result<Vec<Letter>> {
        let query = query.clone();
        self.readers.call(move |db| letters(db, &query)).await
    }

    async fn settle_letters(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        settled: Vec<Settled>,
        lines: Vec<NewLine>,
    ) -> Result<()> {
        let id = id.clone();
        self.write(epoch, move |db| settle(db, &id, &settled, &lines)).await
    }

    async fn replay(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        what: Replay,
        now_ms: u64,
        line: NewLine,
    ) -> Result<Option<u64>> {
        let id = id.clone();
        self.write(epoch, move |db| replay(db, &id, what, now_ms, &line)).await
    }
}
