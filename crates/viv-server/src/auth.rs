//! Keys (S3): random, kept as a hash, compared in constant time, scoped.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Response, header};
use axum::middleware::Next;
use axum::response::IntoResponse;
use subtle::ConstantTimeEq;
use viv_api::error::{ApiError, ErrorCode, ErrorDetails};
use viv_core::lifecycle::Actor;
use viv_core::spec::Project;
use viv_store::{ApiKey, Epoch, KeyScope, NewLine, Store, StoreError};

use crate::guard::Peer;
use crate::refusal::{Refusal, forbidden, internal};
use crate::state::ServerState;

/// What keys begin with, so that they are found where they should not be.
const PREFIX: &str = "viv_";

/// Bytes of randomness in a key.
const SECRET_BYTES: usize = 32;

/// Most keys that are good at once: each request is compared with all of them.
const KEYS_MAX: usize = 10_000;

/// Who may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Everybody, without a key.
    Nothing,
    /// Every key, in its project.
    Read,
    /// Keys that may change something, in their project.
    Change,
    /// Keys of the installation.
    Admin,
}

/// Whoever asks, known by a good key.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) key: Arc<ApiKey>,
    pub(crate) peer: Option<Peer>,
}

impl Caller {
    /// For the journal (O7).
    pub(crate) fn actor(&self) -> Actor {
        Actor { who: format!("key:{}", self.key.id), from: self.peer.map(|peer| peer.0.ip().to_string()) }
    }

    /// The one project that it sees; `None` is all.
    pub(crate) fn sees(&self) -> Option<&Project> {
        match &self.key.scope {
            KeyScope::Admin => None,
            KeyScope::Project { project } | KeyScope::ReadOnly { project } => Some(project),
        }
    }

    /// Where names are looked up and sandboxes are made.
    pub(crate) fn project(&self) -> Project {
        self.sees().cloned().unwrap_or_default()
    }

    pub(crate) fn is_admin(&self) -> bool {
        self.key.scope == KeyScope::Admin
    }
}

impl FromRequestParts<ServerState> for Caller {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &ServerState) -> Result<Self, Refusal> {
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(|| internal("a route that needs a key was reached without one"))
    }
}

/// A key that could not be made or revoked.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The store refused or failed.
    #[error("the store: {0}")]
    Store(#[source] StoreError),
    /// There is no randomness.
    #[error("there is no randomness: {0}")]
    Random(#[source] getrandom::Error),
    /// There are too many.
    #[error("{KEYS_MAX} keys are good already")]
    TooMany,
}

impl From<StoreError> for KeyError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// A key that was just made: this once with what to send.
#[derive(Clone)]
pub struct NewKey {
    /// The key.
    pub key: ApiKey,
    /// What to send. It is kept nowhere.
    pub secret: String,
}

impl std::fmt::Debug for NewKey {
    /// Without the secret: what is printed ends up in logs (S6).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewKey").field("id", &self.key.id).finish_non_exhaustive()
    }
}

/// The keys that are good, in memory; the store has all of them.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    good: RwLock<Vec<Arc<ApiKey>>>,
    /// Held over a change and the reading that follows it: an older list must not be read over a newer one.
    changing: tokio::sync::Mutex<()>,
    used: Mutex<std::collections::HashMap<String, u64>>,
}

impl Keys {
    /// Reads them again: at the start, and after every change. One process owns the store, so nobody else changes them.
    /// What has expired is of no use, and takes nobody's place.
    pub(crate) async fn refresh(&self, store: &dyn Store, now_ms: u64) -> Result<(), StoreError> {
        let is_good = |key: &ApiKey| key.revoked_at_ms.is_none() && !has_expired(key, now_ms);
        let good = store.keys().await?.into_iter().filter(is_good).map(Arc::new).collect();
        *self.good.write().unwrap_or_else(PoisonError::into_inner) = good;
        Ok(())
    }

    /// Makes one. The secret is only here and in the answer.
    pub(crate) async fn make(
        &self,
        (store, epoch): (&dyn Store, Epoch),
        (name, scope, lifetime_ms): (&str, KeyScope, Option<u64>),
        by: Actor,
        now_ms: u64,
    ) -> Result<NewKey, KeyError> {
        let (mut secret, mut id) = ([0; SECRET_BYTES], [0; 16]);
        getrandom::fill(&mut secret).and_then(|()| getrandom::fill(&mut id)).map_err(KeyError::Random)?;
        let good = |keys: &Self| {
            let good = keys.good.read().unwrap_or_else(PoisonError::into_inner);
            good.iter().filter(|key| !has_expired(key, now_ms)).count()
        };
        if good(self) >= KEYS_MAX {
            return Err(KeyError::TooMany);
        }
        let text: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let secret = format!("{PREFIX}{text}");
        let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let key = ApiKey {
            id: format!("key_{id}"),
            name: name.to_owned(),
            hash: *blake3::hash(secret.as_bytes()).as_bytes(),
            scope,
            created_at_ms: now_ms,
            expires_at_ms: lifetime_ms.map(|ms| now_ms.saturating_add(ms)),
            revoked_at_ms: None,
        };
        let _changing = self.changing.lock().await;
        store.put_key(epoch, key.clone(), line("key.created", &key, by, now_ms)).await?;
        self.refresh(store, now_ms).await?;
        Ok(NewKey { key, secret })
    }

    /// Makes one of no use, for ever. One that is of no use already stays as it is; `None` when there is none.
    pub(crate) async fn revoke(
        &self,
        (store, epoch): (&dyn Store, Epoch),
        id: &str,
        by: Actor,
        now_ms: u64,
    ) -> Result<Option<ApiKey>, StoreError> {
        let _changing = self.changing.lock().await;
        let Some(mut key) = store.keys().await?.into_iter().find(|key| key.id == id) else { return Ok(None) };
        // Whatever fails from here on, it is not taken any more.
        self.good.write().unwrap_or_else(PoisonError::into_inner).retain(|good| good.id != id);
        if key.revoked_at_ms.is_none() {
            key.revoked_at_ms = Some(now_ms);
            store.put_key(epoch, key.clone(), line("key.revoked", &key, by, now_ms)).await?;
        }
        self.refresh(store, now_ms).await?;
        Ok(Some(key))
    }

    /// The key that this is the secret of, if it is good now. Takes as long for every secret.
    fn find(&self, secret: &str, now_ms: u64) -> Option<Arc<ApiKey>> {
        let hash = blake3::hash(secret.as_bytes());
        let good = self.good.read().unwrap_or_else(PoisonError::into_inner);
        let mut found = None;
        for key in good.iter() {
            if bool::from(key.hash.ct_eq(hash.as_bytes())) {
                found = Some(key.clone());
            }
        }
        let found = found.filter(|key| !has_expired(key, now_ms))?;
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.insert(found.id.clone(), now_ms);
        Some(found)
    }

    /// When it was last used, since this daemon began.
    pub(crate) fn last_used_at_ms(&self, id: &str) -> Option<u64> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).get(id).copied()
    }

    /// Whether a key is there that may do everything.
    pub(crate) fn has_admin(&self) -> bool {
        let good = self.good.read().unwrap_or_else(PoisonError::into_inner);
        good.iter().any(|key| key.scope == KeyScope::Admin && key.expires_at_ms.is_none())
    }
}

fn has_expired(key: &ApiKey, now_ms: u64) -> bool {
    key.expires_at_ms.is_some_and(|at_ms| at_ms <= now_ms)
}

fn line(kind: &str, key: &ApiKey, by: Actor, now_ms: u64) -> NewLine {
    let (scope, project) = match &key.scope {
        KeyScope::Admin => ("admin", None),
        KeyScope::Project { project } => ("project", Some(project.clone())),
        KeyScope::ReadOnly { project } => ("read_only", Some(project.clone())),
    };
    NewLine {
        at_ms: now_ms,
        project,
        sandbox: None,
        generation: None,
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: None,
        by,
        data: serde_json::json!({ "key": key.id, "name": key.name, "scope": scope }),
    }
}

/// Lets through who may.
pub(crate) async fn authenticate(
    State((state, need)): State<(ServerState, Need)>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    let caller = match admit(&state, need, &request) {
        Ok(Some(caller)) => caller,
        Ok(None) => return next.run(request).await,
        Err(refusal) => return refusal.into_response(),
    };
    let _room = match state.rooms().take(&caller, state.bounds()) {
        Ok(room) => room,
        Err(refusal) => return refusal.into_response(),
    };
    let is_admin = caller.is_admin();
    request.extensions_mut().insert(caller);
    let answer = next.run(request).await;
    if is_admin { answer } else { state.private().answer(answer).await }
}

fn admit(state: &ServerState, need: Need, request: &Request) -> Result<Option<Caller>, Refusal> {
    if need == Need::Nothing {
        return Ok(None);
    }
    let peer = request.extensions().get::<Peer>().copied();
    let Some(key) = bearer(request.headers()).and_then(|secret| state.keys().find(secret, state.engine().now_ms()))
    else {
        // Only what is wrong is counted, so nobody who has a good key is shut out by a neighbour who has not.
        if let Some(peer) = peer {
            state.wrong_keys().take(&peer.address()).map_err(|wait| too_many("wrong keys from this address", wait))?;
        }
        let error = ApiError::new(ErrorCode::Unauthenticated, "a key is needed, and there is none or not a good one");
        return Err(Refusal(error.hint("send Authorization: Bearer viv_…; viv key create makes one")));
    };
    state.key_rates().take(&key.id).map_err(|wait| too_many("requests with this key", wait))?;
    let caller = Caller { key, peer };
    match (need, &caller.key.scope) {
        (Need::Nothing | Need::Read, _)
        | (Need::Change, KeyScope::Admin | KeyScope::Project { .. })
        | (Need::Admin, KeyScope::Admin) => Ok(Some(caller)),
        (Need::Change, KeyScope::ReadOnly { .. }) => {
            Err(forbidden("this key may only look", "use one with the scope project"))
        }
        (Need::Admin, KeyScope::Project { .. } | KeyScope::ReadOnly { .. }) => {
            Err(forbidden("this takes a key of the installation", "use one with the scope admin"))
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, secret) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(secret.trim())
}

fn too_many(what: &str, wait: std::time::Duration) -> Refusal {
    let retry_after_ms = Some(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(1));
    let error = ApiError::new(ErrorCode::TooManyRequests, format!("too many {what}"));
    Refusal(
        error
            .hint("wait as the header Retry-After says")
            .details(ErrorDetails { retry_after_ms, ..Default::default() }),
    )
}
