//! Subscriptions (O6): lines of the journal are sent to those who asked for them.
//!
//! ```text
//!   journal ──read──► letters (rows) ──one lane per sandbox──► POST ──► taken: the row goes
//!      ▲  place moves with them ▲                               │
//!      └──────── replay ────────┴── waits longer ◄── not taken ─┴──► dead, after so many tries or so long
//! ```
//!
//! Invariants:
//!
//! - A line becomes a row in the transaction in which the place moves past it, and a row goes only when it was taken: so
//!   each is sent at least once, whoever dies in between.
//! - Of the letters about one sandbox only the oldest is tried. Another sandbox's wait for nobody but a free place.
//! - One task per subscription owns its letters; what it has in memory is a copy of the rows, read anew after anything
//!   that somebody else changed.

mod command;
mod desk;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use viv_core::lifecycle::Actor;
use viv_core::subscription::{Letter, Patience, Subscription};
use viv_core::{SandboxId, WebhookId};
use viv_store::{Cursor, JournalFilter, JournalLine, LetterQuery, NewLine, Settled, SubscriptionQuery};

pub use command::{NewSubscription, SubscriptionChange};
use desk::Desk;

use crate::breaker::destination;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::gate::Gate;
use crate::hook::{Delivery, Undelivered, Webhooks};
use crate::metrics::family;

/// Letters of one subscription that wait at most; of what comes then, nothing is lost: it is read when there is room.
const WAITING_MAX: usize = 1_000;

/// Lines read at once.
const PAGE: usize = 100;

/// Lines that may be passed without being wanted before that is written down: what was passed is read again after a crash.
const PASSED_MAX: u64 = 1_000;

/// Letters of one subscription that are under way at once, so that one slow receiver leaves places to others.
const AT_ONCE: usize = 4;

/// How much longer than it may take a try is waited for: it may have to wait for a place.
const PLACE_WITHIN: Duration = Duration::from_secs(30);

/// How long to wait before a store that failed is asked again.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// A subscription with a letter that failed so often is said to fail.
const FAILING_ATTEMPTS: u32 = 3;

/// Who does what is done here by itself.
const ACTOR: &str = "webhooks";

/// Makes what is sent: the subscription, the id of the delivery, and the line.
pub type EventBody = Arc<dyn Fn(&Subscription, &str, JournalLine) -> Vec<u8> + Send + Sync>;

/// How lines are sent.
#[derive(Clone)]
pub struct SubscriptionConfig {
    /// Who makes requests: not those of hooks, whose places a slow receiver would take.
    pub send: Webhooks,
    /// What is sent.
    pub body: EventBody,
    /// How long is tried.
    pub patience: Patience,
    /// How long one try may take.
    pub within: Duration,
}

impl fmt::Debug for SubscriptionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubscriptionConfig").field("patience", &self.patience).finish_non_exhaustive()
    }
}

/// What is kept in memory of subscriptions: nothing that the store does not have.
#[derive(Debug, Default)]
pub(crate) struct Subscribed {
    keepers: Mutex<BTreeMap<WebhookId, Keeper>>,
}

#[derive(Debug)]
struct Keeper {
    task: AbortHandle,
    /// Rings when somebody else changed the row or its letters.
    bell: Arc<Notify>,
    /// Whether it fails, and since when the oldest letter waits.
    health: Arc<Mutex<Health>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Health {
    fails: bool,
    oldest_ms: Option<u64>,
}

impl Subscribed {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<WebhookId, Keeper>> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn end(&self) {
        for keeper in std::mem::take(&mut *self.lock()).into_values() {
            keeper.task.abort();
        }
    }

    /// How many fail, and for how long the oldest letter of all has waited.
    fn health(&self, now_ms: u64) -> (u64, u64) {
        let (mut failing, mut waited_ms) = (0, 0);
        for keeper in self.lock().values() {
            let health = *keeper.health.lock().unwrap_or_else(PoisonError::into_inner);
            failing += u64::from(health.fails);
            waited_ms = waited_ms.max(health.oldest_ms.map_or(0, |oldest_ms| now_ms.saturating_sub(oldest_ms)));
        }
        (failing, waited_ms)
    }
}

/// Goes on with all that there are.
pub(crate) async fn spawn(engine: &Engine) -> Result<(), EngineError> {
    if engine.inner.config.subscriptions.is_none() {
        return Ok(());
    }
    for (row, _) in engine.inner.all_subscriptions().await? {
        engine.keep_subscription(&row.id);
    }
    Ok(())
}

impl Engine {
    /// Looks after one, or tells who does that it changed.
    fn keep_subscription(&self, id: &WebhookId) {
        let inner = &self.inner;
        let Some(config) = inner.config.subscriptions.clone().filter(|_| !inner.is_ending()) else { return };
        let mut keepers = inner.subscribed.lock();
        if let Some(keeper) = keepers.get(id).filter(|keeper| !keeper.task.is_finished()) {
            keeper.bell.notify_one();
            return;
        }
        let (bell, health) = (Arc::<Notify>::default(), Arc::<Mutex<Health>>::default());
        let work = Work { inner: inner.clone(), config, id: id.clone(), bell: bell.clone(), health: health.clone() };
        let task = tokio::spawn(work.keep()).abort_handle();
        keepers.insert(id.clone(), Keeper { task, bell, health });
    }
}

impl Inner {
    async fn all_subscriptions(&self) -> Result<Vec<(Subscription, viv_store::Standing)>, EngineError> {
        let mut query = SubscriptionQuery { limit: PAGE, ..SubscriptionQuery::default() };
        let mut all = Vec::new();
        loop {
            let page = self.store.subscriptions(&query).await?;
            all.extend(page.items);
            query.after = page.next;
            if query.after.is_none() {
                return Ok(all);
            }
        }
    }

    /// The figures about subscriptions, as they are now.
    pub(crate) async fn gather_subscriptions(&self) -> Result<(), EngineError> {
        if self.config.subscriptions.is_none() {
            return Ok(());
        }
        let all = self.all_subscriptions().await?;
        let (failing, waited_ms) = self.subscribed.health(self.clock.now_ms());
        let sum = |of: fn(&viv_store::Standing) -> u64| all.iter().map(|(_, standing)| of(standing)).sum::<u64>();
        #[expect(clippy::cast_precision_loss, reason = "figures for people")]
        for (family, count) in [
            (&family::WEBHOOK_SUBSCRIPTIONS, all.len() as u64),
            (&family::WEBHOOKS_FAILING, failing),
            (&family::WEBHOOK_EVENTS_WAITING, sum(|standing| standing.waiting)),
            (&family::WEBHOOK_EVENTS_DEAD, sum(|standing| standing.dead)),
            (&family::WEBHOOK_OLDEST_SECONDS, waited_ms / 1000),
        ] {
            self.metrics.set(family, &[], count as f64);
        }
        Ok(())
    }
}

/// Who looks after one subscription.
struct Work {
    inner: Arc<Inner>,
    config: SubscriptionConfig,
    id: WebhookId,
    bell: Arc<Notify>,
    health: Arc<Mutex<Health>>,
}

/// Why nobody looks after it as it was.
enum Left {
    /// It is gone, or the daemon ends.
    Over,
    /// Somebody changed it: it is read anew.
    Changed,
}

/// Where reading stands.
struct Place {
    /// What the row says.
    stored: Cursor,
    /// What was read.
    read: Cursor,
}

/// What came of one try.
enum Tried {
    Taken,
    /// Why not.
    Failed(String),
    /// Nobody was asked, and nobody is before this.
    Later(u64),
}

impl Work {
    async fn keep(self) {
        loop {
            match self.attend().await {
                Ok(Left::Over) => return,
                Ok(Left::Changed) => {}
                Err(error) => {
                    self.inner.heed(&error);
                    tracing::warn!(component = "webhooks", webhook = %self.id, %error, "goes on in a moment");
                    self.inner.pause(STORE_PAUSE).await;
                }
            }
            if self.inner.is_ending() {
                return;
            }
        }
    }

    /// Reads the row and its letters, and works on them until something changed that it did not do itself.
    async fn attend(&self) -> Result<Left, EngineError> {
        let inner = &self.inner;
        let mut ending = inner.ending();
        let Some((row, standing)) = inner.store.subscription(&self.id).await? else { return Ok(Left::Over) };
        let row = Arc::new(row);
        let mut desk = Desk::default();
        let mut query = LetterQuery { of: self.id.clone(), dead: false, after: Cursor(0), limit: PAGE };
        loop {
            let letters = inner.store.letters(&query).await?;
            query.after = letters.last().map_or(query.after, |last| Cursor(last.cursor));
            let is_last = letters.len() < PAGE;
            for letter in letters {
                desk.put(letter);
            }
            if is_last {
                break;
            }
        }
        self.tell(&desk, row.enabled);
        if !row.enabled {
            return Ok(tokio::select! {
                biased;
                _ = ending.wait_for(|ending| *ending) => Left::Over,
                () = self.bell.notified() => Left::Changed,
            });
        }
        let mut place = Place { stored: standing.cursor, read: standing.cursor };
        let mut tail = inner.store.tail();
        // Dropped with everything that is under way when this ends: those letters are sent once more.
        let mut flights = JoinSet::new();
        loop {
            if !self.fill(&row, &mut desk, &mut place, &mut tail).await? {
                return Ok(Left::Changed);
            }
            self.tell(&desk, true);
            while flights.len() < AT_ONCE
                && let Some(letter) = desk.take_due(inner.clock.now_ms())
            {
                flights.spawn(try_one(inner.clone(), self.config.clone(), row.clone(), letter));
            }
            let next_ms = desk.next_ms().filter(|_| flights.len() < AT_ONCE);
            let due = async {
                match next_ms {
                    Some(at_ms) => tokio::time::sleep_until(inner.clock.at(at_ms)).await,
                    None => std::future::pending().await,
                }
            };
            let landed = tokio::select! {
                biased;
                _ = ending.wait_for(|ending| *ending) => return Ok(Left::Over),
                () = self.bell.notified() => return Ok(Left::Changed),
                Some(landed) = flights.join_next() => landed,
                rang = tail.changed(), if desk.len() < WAITING_MAX => {
                    if rang.is_err() {
                        return Ok(Left::Over);
                    }
                    continue;
                }
                () = due => continue,
            };
            let mut all = vec![landed];
            all.extend(std::iter::from_fn(|| flights.try_join_next()));
            let Ok(all) = all.into_iter().collect::<Result<Vec<_>, _>>() else {
                tracing::error!(component = "webhooks", webhook = %self.id, "a try panicked, and is made again");
                inner.pause(STORE_PAUSE).await;
                return Ok(Left::Changed);
            };
            if all.iter().any(|(_, tried)| matches!(tried, Tried::Taken)) {
                inner.reached("webhook.taken");
            }
            self.settle(&row, &mut desk, all).await?;
        }
    }

    /// Makes letters of what was written meanwhile. Whether the place was where it was thought to be.
    async fn fill(
        &self,
        row: &Subscription,
        desk: &mut Desk,
        place: &mut Place,
        tail: &mut watch::Receiver<Cursor>,
    ) -> Result<bool, EngineError> {
        let inner = &self.inner;
        let filter = JournalFilter { project: row.project.clone(), sandbox: row.sandbox.clone(), since_ms: None };
        let mut labels = HashMap::new();
        while desk.len() < WAITING_MAX {
            // Seen before reading, so that what is written between the two rings again.
            let newest = *tail.borrow_and_update();
            let lines = inner.store.journal(place.read, &filter, PAGE).await?;
            let is_last = lines.len() < PAGE;
            let (mut letters, now_ms) = (Vec::new(), inner.clock.now_ms());
            for line in lines {
                place.read = line.cursor;
                if self.wants(row, &line, &mut labels).await? {
                    letters.push(Letter::new(line.cursor.0, line.line.sandbox, now_ms));
                }
            }
            if is_last {
                // What was filtered away need not be read again.
                place.read = place.read.max(newest);
            }
            if !letters.is_empty() || place.read.0.saturating_sub(place.stored.0) > PASSED_MAX {
                let between = (place.stored, place.read);
                if !inner.store.put_letters(inner.epoch, &self.id, between, letters.clone()).await? {
                    return Ok(false);
                }
                inner.reached("webhook.queued");
                place.stored = place.read;
                for letter in letters {
                    desk.put(letter);
                }
            }
            if is_last {
                break;
            }
        }
        Ok(true)
    }

    async fn wants(
        &self,
        row: &Subscription,
        line: &JournalLine,
        labels: &mut HashMap<SandboxId, bool>,
    ) -> Result<bool, EngineError> {
        let about = line.line.sandbox.as_ref();
        if !row.wants(&line.line.kind, about) || row.labels.is_empty() {
            return Ok(row.wants(&line.line.kind, about));
        }
        let Some(sandbox) = about else { return Ok(false) };
        if let Some(known) = labels.get(sandbox) {
            return Ok(*known);
        }
        let wanted = self.inner.store.get(sandbox).await?.is_some_and(|record| row.wants_labels(&record.labels));
        labels.insert(sandbox.clone(), wanted);
        Ok(wanted)
    }

    /// Writes down what came of tries.
    async fn settle(&self, row: &Subscription, desk: &mut Desk, all: Vec<(Letter, Tried)>) -> Result<(), EngineError> {
        let (inner, now_ms) = (&self.inner, self.inner.clock.now_ms());
        let (mut settled, mut kept) = (Vec::new(), Vec::new());
        let mut dead: Option<(u64, Letter)> = None;
        for (letter, tried) in all {
            let after = match tried {
                Tried::Taken => {
                    settled.push(Settled::Taken(Cursor(letter.cursor)));
                    desk.done(&letter);
                    continue;
                }
                Tried::Failed(why) => letter.failed(why, now_ms, (inner.draw)()[0], &self.config.patience),
                Tried::Later(at_ms) => {
                    let is_over = now_ms.saturating_sub(letter.since_ms) >= self.config.patience.age_ms_max;
                    Letter { next_at_ms: at_ms, dead_at_ms: is_over.then_some(now_ms), ..letter.clone() }
                }
            };
            settled.push(Settled::Kept(after.clone()));
            if after.dead_at_ms.is_some() {
                dead = Some((dead.map_or(0, |(count, _)| count) + 1, after.clone()));
            }
            kept.push((letter, after));
        }
        let line = dead.as_ref().map(|(count, last)| dead_line(row, *count, last, now_ms));
        inner.store.settle_letters(inner.epoch, &self.id, settled, line.into_iter().collect()).await?;
        for (before, after) in kept {
            desk.done(&before);
            if after.dead_at_ms.is_none() {
                desk.put(after);
            }
        }
        if let Some((count, last)) = dead {
            #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
            inner.metrics.add(&family::WEBHOOK_EVENTS_DIED, &[], count as f64);
            let why = last.why.as_deref().unwrap_or_default();
            tracing::warn!(component = "webhooks", webhook = %self.id, count, why, "is not tried any more");
        }
        Ok(())
    }

    fn tell(&self, desk: &Desk, enabled: bool) {
        let health = Health { fails: enabled && desk.attempts_max() >= FAILING_ATTEMPTS, oldest_ms: desk.oldest_ms() };
        *self.health.lock().unwrap_or_else(PoisonError::into_inner) = health;
    }
}

/// Sends a letter once.
async fn try_one(
    inner: Arc<Inner>,
    config: SubscriptionConfig,
    row: Arc<Subscription>,
    letter: Letter,
) -> (Letter, Tried) {
    let filter = JournalFilter { project: row.project.clone(), sandbox: row.sandbox.clone(), since_ms: None };
    let Ok(found) = inner.store.journal(Cursor(letter.cursor.saturating_sub(1)), &filter, 1).await else {
        let at_ms = inner.clock.now_ms().saturating_add(STORE_PAUSE.as_millis() as u64);
        return (letter, Tried::Later(at_ms));
    };
    let found = found.into_iter().next().filter(|line| line.cursor.0 == letter.cursor);
    let tried = match found {
        Some(line) => {
            let id = letter.id(&row.id);
            let body = (config.body)(&row, &id, line);
            inner.send(&config, &row, id, letter.sandbox.as_ref(), body).await
        }
        None => Tried::Failed("the journal has forgotten it".to_owned()),
    };
    (letter, tried)
}

impl Inner {
    /// One request. A destination that failed too often is not asked for a while (J7).
    async fn send(
        &self,
        config: &SubscriptionConfig,
        row: &Subscription,
        id: String,
        about: Option<&SandboxId>,
        body: Vec<u8>,
    ) -> Tried {
        let (to, now_ms) = (destination(&row.url), self.clock.now_ms());
        let gated = match about {
            Some(sandbox) => self.is_gated(Gate::Breaker, sandbox),
            None => !self.config.gates.is_off_everywhere(Gate::Breaker),
        };
        if gated && let Err(open) = self.outside.admit(&to, now_ms) {
            self.metrics.count(&family::WEBHOOK_EVENTS, &["postponed"]);
            return Tried::Later(now_ms.saturating_add(open.retry_ms));
        }
        let mut secrets = row.secrets(now_ms).into_iter();
        let Some(secret) = secrets.next() else { return Tried::Failed("it has no secret".to_owned()) };
        let (url, at_s, within) = (row.url.clone(), now_ms / 1000, config.within);
        let delivery = Delivery { url, secret, also: secrets.collect(), id, at_s, body, within };
        let silent = || Undelivered { why: "did not answer in time".to_owned(), is_down: true };
        let sent = tokio::time::timeout(within + PLACE_WITHIN, (config.send.0)(delivery)).await;
        match sent.unwrap_or_else(|_| Err(silent())) {
            Ok(()) => {
                self.metrics.count(&family::WEBHOOK_EVENTS, &["delivered"]);
                self.outside.answered(&to);
                Tried::Taken
            }
            Err(Undelivered { why, is_down }) => {
                self.metrics.count(&family::WEBHOOK_EVENTS, &[if is_down { "down" } else { "refused" }]);
                if is_down {
                    self.outside.failed(&to, self.clock.now_ms());
                } else {
                    self.outside.answered(&to);
                }
                Tried::Failed(why)
            }
        }
    }
}

/// A line about a subscription. Its URL is nobody's business (S6).
fn line(row: &Subscription, kind: &str, by: Actor, now_ms: u64, mut data: serde_json::Value) -> NewLine {
    data["webhook"] = json!(row.id);
    NewLine {
        at_ms: now_ms,
        project: row.project.clone(),
        sandbox: None,
        generation: None,
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: None,
        by,
        data,
    }
}

fn dead_line(row: &Subscription, count: u64, last: &Letter, now_ms: u64) -> NewLine {
    let why = last.why.as_deref().unwrap_or("too old");
    let message = format!("{count} events were not taken by {}: {why}", destination(&row.url));
    let data = json!({
        "count": count, "seq": last.cursor, "attempts": last.attempts, "why": why, "message": message,
    });
    line(row, "webhook.dead", Actor::part(ACTOR), now_ms, data)
}
