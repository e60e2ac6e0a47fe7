//! What all requests share.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::sync::{Mutex, MutexGuard, Semaphore};
use viv_core::lifecycle::Actor;
use viv_engine::Engine;
use viv_store::KeyScope;

use crate::auth::{KeyError, Keys, NewKey};
use crate::config::{Bounds, Build, ServerConfig};
use crate::executions::Executions;
use crate::log::LogRing;
use crate::private::Private;
use crate::rate::Buckets;
use crate::room::Rooms;
use crate::tally::Tally;

/// What all requests share. Clones are the same.
#[derive(Clone)]
pub struct ServerState {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    config: ServerConfig,
    started_at_ms: u64,
    keys: Keys,
    key_rates: Buckets<String>,
    wrong_keys: Buckets<IpAddr>,
    requests: Semaphore,
    rooms: Rooms,
    private: Private,
    executions: Executions,
    tally: Tally,
    logs: LogRing,
    copying: Mutex<()>,
}

impl ServerState {
    /// Reads the keys. The log ring is the one that the process writes to.
    pub async fn new(engine: Engine, config: ServerConfig, logs: LogRing) -> Result<Self, KeyError> {
        let keys = Keys::default();
        keys.refresh(engine.store().as_ref(), engine.now_ms()).await?;
        let inner = Inner {
            started_at_ms: engine.now_ms(),
            keys,
            key_rates: Buckets::new(config.bounds.key_rate),
            wrong_keys: Buckets::new(config.bounds.wrong_key_rate),
            requests: Semaphore::new(config.bounds.requests_max),
            rooms: Rooms::default(),
            private: Private::new(&config.private_places),
            executions: Executions::default(),
            tally: Tally::default(),
            logs,
            copying: Mutex::new(()),
            engine,
            config,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Makes a key; for who starts the daemon. Others ask the API.
    pub async fn make_key(&self, name: &str, scope: KeyScope, by: Actor) -> Result<NewKey, KeyError> {
        let engine = &self.inner.engine;
        let what = (name, scope, None);
        self.inner.keys.make((engine.store().as_ref(), engine.epoch()), what, by, engine.now_ms()).await
    }

    /// Makes the first key, unless there is one that may do everything.
    pub async fn first_key(&self, name: &str, by: Actor) -> Result<Option<NewKey>, KeyError> {
        if self.inner.keys.has_admin() {
            return Ok(None);
        }
        self.make_key(name, KeyScope::Admin, by).await.map(Some)
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    pub(crate) fn bounds(&self) -> &Bounds {
        &self.inner.config.bounds
    }

    pub(crate) fn build(&self) -> &Build {
        &self.inner.config.build
    }

    /// Where copies of the store are made.
    pub(crate) fn copies(&self) -> Option<&Path> {
        self.inner.config.copies.as_deref()
    }

    /// Makes copies one after the other.
    pub(crate) async fn one_copy(&self) -> MutexGuard<'_, ()> {
        self.inner.copying.lock().await
    }

    pub(crate) fn started_at_ms(&self) -> u64 {
        self.inner.started_at_ms
    }

    pub(crate) fn keys(&self) -> &Keys {
        &self.inner.keys
    }

    pub(crate) fn key_rates(&self) -> &Buckets<String> {
        &self.inner.key_rates
    }

    pub(crate) fn wrong_keys(&self) -> &Buckets<IpAddr> {
        &self.inner.wrong_keys
    }

    pub(crate) fn requests(&self) -> &Semaphore {
        &self.inner.requests
    }

    pub(crate) fn rooms(&self) -> &Rooms {
        &self.inner.rooms
    }

    pub(crate) fn private(&self) -> &Private {
        &self.inner.private
    }

    pub(crate) fn executions(&self) -> &Executions {
        &self.inner.executions
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.inner.tally
    }

    pub(crate) fn logs(&self) -> &LogRing {
        &self.inner.logs
    }
}

impl std::fmt::Debug for ServerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerState").field("engine", &self.inner.engine).finish_non_exhaustive()
    }
}
