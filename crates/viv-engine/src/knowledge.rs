//! What was seen lately of living sandboxes: a cache that is never the truth (T1), and dies with the daemon.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use viv_core::lifecycle::{Evidence, Observed, Sandbox};
use viv_core::{FencingToken, Generation, SandboxId};

/// What was seen of one generation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    generation: Option<Generation>,
    evidence: Option<Evidence>,
    observed: Option<Observed>,
    token: Option<FencingToken>,
    active_at_ms: u64,
    last_reads: HashMap<String, u64>,
}

/// Most clients whose last read is remembered of a sandbox.
const READERS_MAX: usize = 32;

/// What was seen of all of them.
#[derive(Debug, Default)]
pub(crate) struct Knowledge {
    known: Mutex<HashMap<SandboxId, Known>>,
}

impl Knowledge {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of this generation; what was known of an earlier one is forgotten, what is about an earlier one is not taken.
    fn of<T>(&self, sandbox: &SandboxId, generation: Generation, change: impl FnOnce(&mut Known) -> T) -> Option<T> {
        let mut known = self.lock();
        let known = known.entry(sandbox.clone()).or_default();
        if known.generation.is_some_and(|newer| newer > generation) {
            return None;
        }
        if known.generation != Some(generation) {
            known.generation = Some(generation);
            known.evidence = None;
            known.observed = None;
        }
        Some(change(known))
    }

    /// It was probed.
    pub(crate) fn probed(&self, sandbox: &SandboxId, generation: Generation, evidence: Evidence) {
        self.of(sandbox, generation, |known| known.evidence = Some(evidence));
    }

    /// The provider was heard.
    pub(crate) fn observed(&self, sandbox: &SandboxId, generation: Generation, observed: Observed) {
        self.of(sandbox, generation, |known| known.observed = Some(observed));
    }

    /// The latest evidence about the current generation. What the record has is of its last transition.
    pub(crate) fn evidence(&self, sandbox: &Sandbox) -> Evidence {
        let known = self.lock();
        let latest = known.get(&sandbox.id).filter(|known| known.generation == Some(sandbox.generation));
        match latest.and_then(|known| known.evidence.clone()) {
            Some(evidence) if evidence.at_ms() >= sandbox.evidence.at_ms() => evidence,
            _ => sandbox.evidence.clone(),
        }
    }

    /// Whether anything was probed since this daemon began (T4).
    pub(crate) fn has_probed(&self, sandbox: &Sandbox) -> bool {
        let known = self.lock();
        let latest = known.get(&sandbox.id).filter(|known| known.generation == Some(sandbox.generation));
        latest.is_some_and(|known| known.evidence.is_some())
    }

    /// Whether this daemon saw the end of the current generation, recorded or not.
    pub(crate) fn has_ended(&self, sandbox: &Sandbox) -> bool {
        let known = self.lock();
        let latest = known.get(&sandbox.id).filter(|known| known.generation == Some(sandbox.generation));
        latest.and_then(|known| known.observed.as_ref()).is_some_and(Observed::tells_of_an_end)
    }

    /// What the provider said last.
    pub(crate) fn last_observed(&self, sandbox: &Sandbox) -> Option<Observed> {
        let known = self.lock();
        let latest = known.get(&sandbox.id).filter(|known| known.generation == Some(sandbox.generation));
        latest.and_then(|known| known.observed.clone()).or_else(|| sandbox.observed.clone())
    }

    /// The token under which this daemon works on it.
    pub(crate) fn token(&self, sandbox: &SandboxId) -> Option<FencingToken> {
        self.lock().get(sandbox).and_then(|known| known.token)
    }

    pub(crate) fn set_token(&self, sandbox: &SandboxId, token: FencingToken) {
        let mut known = self.lock();
        let known = known.entry(sandbox.clone()).or_default();
        known.token = known.token.max(Some(token));
    }

    /// Somebody used it. Whether that is news worth writing down: at most once a second is.
    pub(crate) fn active(&self, sandbox: &SandboxId, now_ms: u64) -> bool {
        let mut known = self.lock();
        let known = known.entry(sandbox.clone()).or_default();
        let news = now_ms >= known.active_at_ms + 1_000;
        if news {
            known.active_at_ms = now_ms;
        }
        news
    }

    /// Somebody looked at it.
    pub(crate) fn read_by(&self, sandbox: &SandboxId, client: &str, now_ms: u64) {
        let mut known = self.lock();
        let reads = &mut known.entry(sandbox.clone()).or_default().last_reads;
        if reads.len() >= READERS_MAX && !reads.contains_key(client) {
            let oldest = reads.iter().min_by_key(|(_, at_ms)| **at_ms).map(|(client, _)| client.clone());
            oldest.and_then(|client| reads.remove(&client));
        }
        reads.insert(client.to_owned(), now_ms);
    }

    /// When each client last looked at it (T8).
    pub(crate) fn reads(&self, sandbox: &SandboxId) -> Vec<(String, u64)> {
        let known = self.lock();
        let mut reads: Vec<(String, u64)> =
            known.get(sandbox).map(|known| known.last_reads.clone().into_iter().collect()).unwrap_or_default();
        reads.sort();
        reads
    }

    /// Nothing will be asked of it any more.
    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        self.lock().remove(sandbox);
    }
}
