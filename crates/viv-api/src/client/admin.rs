//! The journal, figures, keys and the daemon itself.

use ureq::http::Method;

use super::files::Download;
use super::http::Call;
use super::{Client, Events, Result};
use crate::alert::Alert;
use crate::bound::KeyId;
use crate::cleanup::{BeginCleanup, Cleanup};
use crate::daemon::{Doctor, Health, LogPage, Ready, Reconciler, Version};
use crate::event::EventPage;
use crate::header;
use crate::key::{CreateKey, CreatedKey, Key};
use crate::page::Page;
use crate::path::{self, fill};
use crate::query::{self, encode};
use crate::spare::SpareClass;
use crate::stats::Stats;

impl Client {
    /// Whether the process lives.
    pub fn health(&self) -> Result<Health> {
        self.http.ask(Call::get(path::HEALTH))
    }

    /// Whether it can do its work. That it cannot is an answer, not an error.
    pub fn ready(&self) -> Result<Ready> {
        let mut call = Call::get(path::READY);
        call.also = Some(503);
        self.http.ask(call)
    }

    /// What runs there.
    pub fn version(&self) -> Result<Version> {
        self.http.ask(Call::get(path::VERSION))
    }

    /// A copy of what is recorded, of one moment.
    pub fn backup(&self) -> Result<Download> {
        let response = self.http.send(Call::get(path::BACKUP).accept(header::BYTES).waits(None))?;
        Ok(Download::of(response))
    }

    /// One part of the journal.
    pub fn events(&self, query: &query::ListEvents) -> Result<EventPage> {
        self.http.ask(Call::get(path::EVENTS.to_owned() + &encode(query)))
    }

    /// The journal after an event (from the oldest that is kept when none is named), and then all that happens. How
    /// many at most is not looked at.
    pub fn follow_events(&self, query: query::ListEvents) -> Events<'_> {
        Events::new(self, query)
    }

    /// Figures.
    pub fn stats(&self, query: &query::StatsQuery) -> Result<Stats> {
        self.http.ask(Call::get(path::STATS.to_owned() + &encode(query)))
    }

    /// Figures, in Prometheus's text format.
    pub fn metrics(&self) -> Result<String> {
        self.http.ask_text(Call::get(path::METRICS).accept("text/plain"))
    }

    /// The built-in alerts, what fires first.
    pub fn alerts(&self) -> Result<Page<Alert>> {
        self.http.ask(Call::get(path::ALERTS))
    }

    /// Cleans up now, or says what that would do.
    pub fn clean_up(&self, request: &BeginCleanup) -> Result<Cleanup> {
        self.http.ask(Call::post(path::CLEANUP).json(request).waits(None))
    }

    /// Makes a key, and tells its secret this once.
    pub fn create_key(&self, request: &CreateKey) -> Result<CreatedKey> {
        self.http.ask(Call::post(path::KEYS).json(request))
    }

    /// One part of the list of keys.
    pub fn keys(&self, query: &query::PageQuery) -> Result<Page<Key>> {
        self.http.ask(Call::get(path::KEYS.to_owned() + &encode(query)))
    }

    /// Revokes a key.
    pub fn revoke_key(&self, key: &KeyId) -> Result<()> {
        self.http.tell(Call::new(Method::DELETE, fill(path::KEY, &[key.as_str()])))
    }

    /// One part of the daemon's log.
    pub fn logs(&self, query: &query::ListLogs) -> Result<LogPage> {
        self.http.ask(Call::get(path::LOGS.to_owned() + &encode(query)))
    }

    /// The reconcilers and how they stand.
    pub fn reconcilers(&self) -> Result<Page<Reconciler>> {
        self.http.ask(Call::get(path::RECONCILERS))
    }

    /// The classes of hot spares and how they stand.
    pub fn spares(&self) -> Result<Page<SpareClass>> {
        self.http.ask(Call::get(path::SPARES))
    }

    /// What the machine can and cannot do.
    pub fn doctor(&self) -> Result<Doctor> {
        self.http.ask(Call::get(path::DOCTOR))
    }
}
