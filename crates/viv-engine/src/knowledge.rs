//! What was seen lately of living sandboxes: a cache that is never the truth (T1), and dies with the daemon.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use viv_core::lifecycle::{Evidence, Observed, Phase, Sandbox};
use viv_core::spec::Project;
use viv_core::{FencingToken, Generation, SandboxId};

/// What was seen of one generation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    /// The version of the record that was attended to last.
    version: u64,
    /// Whose it is, for what is switched by project.
    project: Option<Project>,
    /// What commands of a generation have to be told (L19).
    env_to_tell: Option<(Generation, BTreeMap<String, String>)>,
    generation: Option<Generation>,
    evidence: Option<Evidence>,
    /// Whether it was probed, and not only heard of.
    is_probed: bool,
    observed: Option<Observed>,
    token: Option<FencingToken>,
    /// When it was last written down that it is used.
    active_at_ms: u64,
    /// When it was last used, and by how many it is now.
    used_at_ms: u64,
    users: u32,
    stops: u64,
    last_reads: HashMap<String, u64>,
    /// What those inside asked for.
    requests: u64,
    /// Held by who looks whether it is idle until it rests, and shared by who starts what is no use of it.
    resting: Arc<RwLock<()>>,
    /// It did not answer when it was looked for: until when it is left alone, and for how long the next time.
    quiet: Option<(u64, u64)>,
}

/// What commands have to be told that their instance was not made with (L19).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToTell {
    /// This environment.
    Env(BTreeMap<String, String>),
    /// Nothing: their instance was made with it.
    Nothing,
    /// Nothing is known of the sandbox; its record says.
    Unknown,
}

/// How long what is lost and silent is left alone by those who were not asked; it doubles up to the second one.
const QUIET_MS: (u64, u64) = (30_000, 300_000);

/// Most clients whose last read is remembered of a sandbox.
const READERS_MAX: usize = 32;

/// Most that are remembered to be over, so that who comes late does not begin anew: more than can be on their way.
const OVER_MAX: usize = 256;

/// Whether its instance was seen to be gone, which the record knows best: what was seen before that is over.
fn has_nothing(sandbox: &Sandbox) -> bool {
    matches!(sandbox.phase, Phase::Hibernated { .. } | Phase::Stopped)
}

/// What was seen of all of them. Only [`Knowledge::attend`] begins to know one, and nothing is known of what is over. What
/// was at rest when the daemon began is known from the moment on that somebody has to do with it.
#[derive(Debug, Default)]
pub(crate) struct Knowledge {
    known: Mutex<HashMap<SandboxId, Known>>,
    over: Mutex<VecDeque<SandboxId>>,
}

impl Knowledge {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The record is so now. Whether this is the latest of it: two who committed one after the other may come here in
    /// another order.
    pub(crate) fn attend(&self, sandbox: &Sandbox) -> bool {
        let mut known = self.lock();
        if !known.contains_key(&sandbox.id) {
            let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
            if over.contains(&sandbox.id) {
                return false;
            }
        }
        let known = known.entry(sandbox.id.clone()).or_default();
        let latest = known.version <= sandbox.version;
        known.version = known.version.max(sandbox.version);
        if latest {
            // What was a spare is somebody's.
            known.project = Some(sandbox.project.clone());
            known.env_to_tell = sandbox.env_to_tell(sandbox.generation).map(|env| (sandbox.generation, env.clone()));
        }
        latest
    }

    /// Somebody has to do with one that was at rest when this daemon began, and that nobody told of since.
    pub(crate) fn meet(&self, sandbox: &Sandbox) {
        if !sandbox.is_over() && !self.knows(&sandbox.id) {
            self.attend(sandbox);
        }
    }

    /// Whether it is known.
    pub(crate) fn knows(&self, sandbox: &SandboxId) -> bool {
        self.lock().contains_key(sandbox)
    }

    /// The version of its record that was attended to last.
    pub(crate) fn version(&self, sandbox: &SandboxId) -> Option<u64> {
        self.lock().get(sandbox).map(|known| known.version)
    }

    /// Whose it is, if it is known.
    pub(crate) fn project(&self, sandbox: &SandboxId) -> Option<Project> {
        self.lock().get(sandbox).and_then(|known| known.project.clone())
    }

    /// What commands of this generation have to be told.
    pub(crate) fn env_to_tell(&self, sandbox: &SandboxId, generation: Generation) -> ToTell {
        let known = self.lock();
        let Some(known) = known.get(sandbox) else { return ToTell::Unknown };
        match known.env_to_tell.as_ref().filter(|(of, _)| *of == generation) {
            Some((_, env)) => ToTell::Env(env.clone()),
            None => ToTell::Nothing,
        }
    }

    /// Of this generation; what was known of an earlier one is forgotten, what is about an earlier one is not taken.
    fn of<T>(&self, sandbox: &SandboxId, generation: Generation, change: impl FnOnce(&mut Known) -> T) -> Option<T> {
        let mut known = self.lock();
        let known = known.get_mut(sandbox)?;
        if known.generation.is_some_and(|newer| newer > generation) {
            return None;
        }
        if known.generation != Some(generation) {
            known.generation = Some(generation);
            known.evidence = None;
            known.is_probed = false;
            known.observed = None;
        }
        Some(change(known))
    }

    /// It was probed.
    pub(crate) fn probed(&self, sandbox: &SandboxId, generation: Generation, evidence: Evidence) {
        self.of(sandbox, generation, |known| {
            known.evidence = Some(evidence);
            known.is_probed = true;
        });
    }

    /// Something was heard of it, which changes the evidence there is and is no probe.
    pub(crate) fn heard(&self, sandbox: &SandboxId, generation: Generation, evidence: Evidence) {
        self.of(sandbox, generation, |known| known.evidence = Some(evidence));
    }

    /// The provider was heard.
    pub(crate) fn observed(&self, sandbox: &SandboxId, generation: Generation, observed: Observed) {
        self.of(sandbox, generation, |known| known.observed = Some(observed));
    }

    /// Whether something that is lost and silent was asked so recently that it is left alone.
    pub(crate) fn is_quiet(&self, sandbox: &SandboxId, now_ms: u64) -> bool {
        let known = self.lock();
        known.get(sandbox).and_then(|known| known.quiet).is_some_and(|(until_ms, _)| now_ms < until_ms)
    }

    /// It was asked and was silent again, or it answered.
    pub(crate) fn set_quiet(&self, sandbox: &SandboxId, silent: bool, now_ms: u64) {
        let mut known = self.lock();
        let Some(known) = known.get_mut(sandbox) else { return };
        known.quiet = silent.then(|| {
            let pause_ms = known.quiet.map_or(QUIET_MS.0, |(_, pause_ms)| (pause_ms * 2).min(QUIET_MS.1));
            (now_ms.saturating_add(pause_ms), pause_ms)
        });
    }

    /// Something that is known of the current generation.
    fn about<T>(&self, sandbox: &Sandbox, what: impl FnOnce(&Known) -> Option<T>) -> Option<T> {
        let known = self.lock();
        known.get(&sandbox.id).filter(|known| known.generation == Some(sandbox.generation)).and_then(what)
    }

    /// The latest evidence about the current generation. What the record has is of its last transition; from the future
    /// it is of a daemon before this one, whose clock was set back since, and what was seen here is later (T3).
    pub(crate) fn evidence(&self, sandbox: &Sandbox, now_ms: u64) -> Evidence {
        let latest = self.about(sandbox, |known| known.evidence.clone());
        let is_later = |seen: &Evidence| {
            let recorded_ms = sandbox.evidence.at_ms();
            seen.at_ms() >= recorded_ms || recorded_ms > Some(now_ms)
        };
        match latest.filter(|_| !has_nothing(sandbox)) {
            Some(evidence) if is_later(&evidence) => evidence,
            Some(_) | None => sandbox.evidence.clone(),
        }
    }

    /// Whether it was probed since this daemon began (T4).
    pub(crate) fn has_probed(&self, sandbox: &Sandbox) -> bool {
        self.about(sandbox, |known| Some(known.is_probed)).unwrap_or(false)
    }

    /// Whether this daemon saw the end of the current generation, recorded or not.
    pub(crate) fn has_ended(&self, sandbox: &Sandbox) -> bool {
        self.about(sandbox, |known| known.observed.clone()).is_some_and(|observed| observed.tells_of_an_end())
    }

    /// What the provider said last.
    pub(crate) fn last_observed(&self, sandbox: &Sandbox) -> Option<Observed> {
        let latest = self.about(sandbox, |known| known.observed.clone());
        latest.filter(|_| !has_nothing(sandbox)).or_else(|| sandbox.observed.clone())
    }

    /// The token under which this daemon works on it.
    pub(crate) fn token(&self, sandbox: &SandboxId) -> Option<FencingToken> {
        self.lock().get(sandbox).and_then(|known| known.token)
    }

    pub(crate) fn set_token(&self, sandbox: &SandboxId, token: FencingToken) {
        if let Some(known) = self.lock().get_mut(sandbox) {
            known.token = known.token.max(Some(token));
        }
    }

    /// The token is of no use any more: the next one is another.
    pub(crate) fn forget_token(&self, sandbox: &SandboxId) {
        if let Some(known) = self.lock().get_mut(sandbox) {
            known.token = None;
        }
    }

    /// Somebody stopped it.
    pub(crate) fn stopped(&self, sandbox: &SandboxId) {
        if let Some(known) = self.lock().get_mut(sandbox) {
            known.stops = known.stops.wrapping_add(1);
        }
    }

    /// How often it was stopped: for who looks whether it was in between.
    pub(crate) fn stops(&self, sandbox: &SandboxId) -> u64 {
        self.lock().get(sandbox).map_or(0, |known| known.stops)
    }

    /// Somebody begins to use it. Whether that is news worth writing down: so often it is, and no more.
    pub(crate) fn begin_use(&self, sandbox: &SandboxId, now_ms: u64, grain_ms: u64) -> bool {
        let mut known = self.lock();
        let Some(known) = known.get_mut(sandbox) else { return true };
        known.users = known.users.saturating_add(1);
        known.used_at_ms = known.used_at_ms.max(now_ms);
        let news = now_ms >= known.active_at_ms.saturating_add(grain_ms);
        if news {
            known.active_at_ms = now_ms;
        }
        news
    }

    /// And ends.
    pub(crate) fn end_use(&self, sandbox: &SandboxId, now_ms: u64) {
        // One that is over was forgotten, and is not remembered for this.
        if let Some(known) = self.lock().get_mut(sandbox) {
            known.users = known.users.saturating_sub(1);
            known.used_at_ms = known.used_at_ms.max(now_ms);
        }
    }

    /// When it was last used, by those who came to this daemon: now, if somebody is at it.
    pub(crate) fn used_at_ms(&self, sandbox: &SandboxId, now_ms: u64) -> Option<u64> {
        let known = self.lock();
        let known = known.get(sandbox)?;
        Some(if known.users > 0 { now_ms } else { known.used_at_ms })
    }

    /// For who begins something that is not written down as use: while this is held, nobody finds that it is idle.
    pub(crate) async fn keep_from_rest(&self, sandbox: &SandboxId) -> Option<OwnedRwLockReadGuard<()>> {
        let resting = self.lock().get(sandbox)?.resting.clone();
        Some(resting.read_owned().await)
    }

    /// For who looks whether it is idle, until it rests. `None` when something begins in it.
    pub(crate) fn looks_for_rest(&self, sandbox: &SandboxId) -> Option<OwnedRwLockWriteGuard<()>> {
        let resting = self.lock().get(sandbox).map(|known| known.resting.clone());
        resting.unwrap_or_default().try_write_owned().ok()
    }

    /// Somebody inside asked for something, and was answered.
    pub(crate) fn requested(&self, sandbox: &SandboxId) {
        if let Some(known) = self.lock().get_mut(sandbox) {
            known.requests = known.requests.saturating_add(1);
        }
    }

    /// How often somebody inside did, since this daemon began.
    pub(crate) fn requests(&self, sandbox: &SandboxId) -> u64 {
        self.lock().get(sandbox).map_or(0, |known| known.requests)
    }

    /// Somebody looked at it.
    pub(crate) fn read_by(&self, sandbox: &SandboxId, client: &str, now_ms: u64) {
        let mut known = self.lock();
        let Some(reads) = known.get_mut(sandbox).map(|known| &mut known.last_reads) else { return };
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
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        if over.len() >= OVER_MAX {
            over.pop_front();
        }
        over.push_back(sandbox.clone());
    }

    /// How many are known.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use viv_core::lifecycle::{Actor, Moment, NewSandbox, Timings};
    use viv_core::spec::{Policy, SandboxSpec};

    use super::*;

    fn record() -> Sandbox {
        let new = NewSandbox {
            id: SandboxId::from_bytes([1; 16]),
            project: Project::default(),
            name: None,
            spec: SandboxSpec::default(),
            policy: Policy { lifetime_ms: 1_000, idle_ms: 1_000, ..Policy::default_for(None) },
            labels: BTreeMap::new(),
            origin: None,
            by: Actor::part("test"),
        };
        Sandbox::create(new, Moment { now_ms: 0, timings: &Timings::default(), no_memory: None })
    }

    #[test]
    fn t1_who_comes_late_with_an_older_record_changes_nothing() {
        let knowledge = Knowledge::default();
        let (older, newer) = (record(), Sandbox { version: 2, ..record() });
        assert!(knowledge.attend(&newer) && knowledge.attend(&newer));
        assert!(!knowledge.attend(&older), "the alarm of the newer one stands");
        knowledge.forget(&newer.id);
        assert!(!knowledge.attend(&older), "what is over does not begin anew");
        let observed = Observed { state: "running".to_owned(), via: "record".to_owned(), at_ms: 1 };
        knowledge.observed(&older.id, older.generation, observed);
        knowledge.set_token(&older.id, FencingToken(1));
        knowledge.read_by(&older.id, "reader", 1);
        assert!(knowledge.begin_use(&older.id, 1, 1_000), "what is not known is written down");
        assert_eq!(knowledge.len(), 0);
    }

    #[test]
    fn t7_what_is_silent_is_asked_less_and_less() {
        let (knowledge, record) = (Knowledge::default(), record());
        knowledge.attend(&record);
        let (mut now_ms, mut asked) = (0, Vec::new());
        while now_ms < 3_600_000 {
            if !knowledge.is_quiet(&record.id, now_ms) {
                asked.push(now_ms);
                knowledge.set_quiet(&record.id, true, now_ms);
            }
            now_ms += 1_000;
        }
        assert!(asked.len() < 16, "{asked:?}");
        assert!(asked.windows(2).all(|two| two[1] - two[0] <= QUIET_MS.1), "and is never forgotten: {asked:?}");
        knowledge.set_quiet(&record.id, false, now_ms);
        assert!(!knowledge.is_quiet(&record.id, now_ms));
    }
}
