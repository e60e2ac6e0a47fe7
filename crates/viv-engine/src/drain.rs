//! Drain (L21): no new work, every sandbox saved or finished, and that verified at the provider.
//!
//! The wish is a row, so the next daemon goes on with it. What is in a transition is waited for: a save never crosses a
//! resume. Who was drained is not held: anybody may have it again once the drain has ended.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, Event, Phase, PhaseName, Sandbox};
use viv_core::planted::{Planted, is_planted};
use viv_provider::{InstanceRef, InstanceState, PageRequest};
use viv_store::{ListQuery, NewLine};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;

/// Under which name the wish is kept.
const WISH: &str = "drain";

/// How often is looked who is left: only while a drain is under way.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How many records are read at a time.
const PAGE: usize = 500;

/// Most sandboxes that are told by id.
const LEFT_MAX: usize = 100;

/// What is kept of the wish.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Wish {
    since_ms: u64,
    grace_until_ms: u64,
    by: Actor,
}

/// How a drain stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DrainStatus {
    /// Whether no new work is taken.
    pub draining: bool,
    /// Since when.
    pub since_ms: Option<u64>,
    /// Until when executions in sandboxes that are not persistent may go on.
    pub grace_until_ms: Option<u64>,
    /// Sandboxes that are not saved or finished yet, the first of them.
    pub left: Vec<SandboxId>,
    /// Instances that the provider has and that may run; `None` when it could not be asked.
    pub instances: Option<u64>,
}

impl DrainStatus {
    /// Whether everything is saved or finished, and the provider was seen to have nothing that runs.
    pub fn is_drained(&self) -> bool {
        self.draining && self.left.is_empty() && self.instances == Some(0)
    }
}

/// Goes on with a drain that was asked for before this daemon began.
pub(crate) async fn take_up(engine: &Engine) -> Result<(), EngineError> {
    engine.follow_wish().await.map(drop)
}

fn line(kind: &str, by: Actor, now_ms: u64, data: serde_json::Value) -> NewLine {
    NewLine {
        at_ms: now_ms,
        project: None,
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

impl Engine {
    /// Takes no new work from now on, and saves or finishes every sandbox. Answers when the wish is durable: see
    /// [`Engine::drain_status`]. Asked again, it changes how long is waited.
    pub async fn drain(&self, grace: Duration, by: Actor) -> Result<DrainStatus, EngineError> {
        let inner = &self.inner;
        let now_ms = inner.clock.now_ms();
        let before = inner.wish().await?;
        let grace_until_ms = now_ms.saturating_add(u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
        let since_ms = before.as_ref().map_or(now_ms, |wish| wish.since_ms);
        let wish = Wish { since_ms, grace_until_ms, by: by.clone() };
        let text = serde_json::to_string(&wish).unwrap_or_default();
        let line = line("daemon.drain_asked", by, now_ms, json!({ "grace_until_ms": grace_until_ms }));
        self.wish_for(Some(&text), line).await?;
        inner.reached("drain.committed");
        self.drain_status().await
    }

    /// Takes new work again. What was saved stays so until somebody wants it.
    pub async fn undrain(&self, by: Actor) -> Result<DrainStatus, EngineError> {
        let inner = &self.inner;
        if inner.is_draining() || inner.wish().await?.is_some() {
            let line = line("daemon.undrained", by, inner.clock.now_ms(), json!({}));
            self.wish_for(None, line).await?;
        }
        self.drain_status().await
    }

    /// Writes the wish down, and acts by it. When the answer is lost it may be written all the same: then what is stored
    /// counts, as soon as it can be read.
    async fn wish_for(&self, wish: Option<&str>, line: NewLine) -> Result<(), EngineError> {
        let inner = &self.inner;
        let changing = inner.draining_changes.lock().await;
        let written = inner.store.put_meta(inner.epoch, WISH, wish, line).await;
        let followed = self.follow_wish().await;
        drop(changing);
        if followed.is_err() {
            let engine = self.clone();
            tokio::spawn(async move {
                while !engine.inner.is_ending() {
                    engine.inner.pause(LOOK_EVERY).await;
                    let _changing = engine.inner.draining_changes.lock().await;
                    if engine.follow_wish().await.is_ok() {
                        return;
                    }
                }
            });
        }
        Ok(written?)
    }

    /// Takes work, or does not, as it is stored.
    async fn follow_wish(&self) -> Result<Option<Wish>, EngineError> {
        let wish = self.inner.wish().await?;
        let before = self.inner.draining.swap(wish.is_some(), Ordering::SeqCst);
        if let Some(wish) = wish.as_ref().filter(|_| !before) {
            tokio::spawn(drain(self.clone(), wish.since_ms));
        }
        Ok(wish)
    }

    /// How a drain stands, looked at now.
    pub async fn drain_status(&self) -> Result<DrainStatus, EngineError> {
        let inner = &self.inner;
        // What is told is what is done, also when the answer to the last wish was lost.
        let changing = inner.draining_changes.lock().await;
        let wish = self.follow_wish().await?;
        drop(changing);
        match wish {
            Some(wish) => inner.drain_stands(&wish).await,
            None => Ok(DrainStatus::default()),
        }
    }
}

impl Inner {
    async fn wish(&self) -> Result<Option<Wish>, EngineError> {
        let text = self.store.meta(WISH).await?;
        // What cannot be read was meant all the same: nothing new is taken.
        let unread = || Wish { since_ms: 0, grace_until_ms: 0, by: Actor::part("drain") };
        Ok(text.map(|text| serde_json::from_str(&text).unwrap_or_else(|_| unread())))
    }

    async fn drain_stands(&self, wish: &Wish) -> Result<DrainStatus, EngineError> {
        // Whoever was let in before the wish may not be among those who are left yet.
        let entering = self.entering.load(Ordering::SeqCst) > 0;
        let mut left = self.left().await?;
        left.truncate(LEFT_MAX);
        Ok(DrainStatus {
            draining: true,
            since_ms: Some(wish.since_ms),
            grace_until_ms: Some(wish.grace_until_ms),
            left: left.into_iter().map(|sandbox| sandbox.id).collect(),
            instances: if entering { None } else { self.living_instances().await },
        })
    }

    /// Records that are not saved or finished. What is lost or failed has nothing that could be ended; whether the
    /// provider has it all the same is looked at apart. Who is waited for comes up first, from wherever it is.
    async fn left(&self) -> Result<Vec<Sandbox>, EngineError> {
        let phases = PhaseName::MAY_LIVE.into_iter().chain([PhaseName::Hibernated]).collect();
        let mut query = ListQuery { phases, deleted: true, limit: PAGE, ..ListQuery::default() };
        let mut left = Vec::new();
        loop {
            let page = self.store.list(&query).await?;
            let busy = |sandbox: &Sandbox| match sandbox.phase {
                Phase::Failed { work: None } => false,
                Phase::Lost | Phase::Hibernated { .. } => sandbox.entry.is_some() || is_planted(Planted::SavedIsLeft),
                Phase::Provisioning { .. }
                | Phase::Verifying { .. }
                | Phase::Ready
                | Phase::Frozen { .. }
                | Phase::Hibernating { .. }
                | Phase::Resuming { .. }
                | Phase::Failed { work: Some(_) }
                | Phase::Stopping { .. }
                | Phase::Stopped => true,
            };
            left.extend(page.items.into_iter().filter(busy));
            let Some(next) = page.next else { return Ok(left) };
            query.after = Some(next);
        }
    }

    /// Instances of ours that may run; `None` when that is not known, which it is not from a part of a listing (T7).
    async fn living_instances(&self) -> Option<u64> {
        let mut living = 0;
        let mut page = PageRequest::default();
        loop {
            let listed = tokio::time::timeout(self.config.budgets.call, self.provider.list(&self.config.owner, page));
            let listed = listed.await.ok()?.ok().filter(|listed| !listed.is_partial())?;
            let runs = |state: &InstanceState| !matches!(state, InstanceState::Ended(_) | InstanceState::Absent);
            living += listed.items.iter().filter(|seen| runs(&seen.state)).count() as u64;
            let Some(next) = listed.next else { return Some(living) };
            page = PageRequest { cursor: Some(next), limit: None };
        }
    }

    /// Whether somebody still works in a sandbox that leaves nothing, as far as can be told.
    async fn works(&self, sandbox: &Sandbox) -> bool {
        let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        let executions = self.call(&sandbox.id, self.config.budgets.probe, self.provider.executions(&instance)).await;
        // Who does not answer gets the time that was promised.
        executions.map_or(true, |all| all.iter().any(|execution| !execution.state.is_final()))
    }

    /// Looks once at all who are left, and ends those whose time has come. How many there are.
    async fn drain_once(self: &std::sync::Arc<Self>, wish: &Wish) -> Result<usize, EngineError> {
        let left = self.left().await?;
        for sandbox in &left {
            let may_wait = !sandbox.policy.persistent && self.clock.now_ms() < wish.grace_until_ms;
            if sandbox.phase == Phase::Ready && may_wait && self.works(sandbox).await {
                continue;
            }
            match self.apply(&sandbox.id, &Event::Drain { by: wish.by.clone() }).await {
                Ok(_) | Err(EngineError::NotFound { .. } | EngineError::Gone { .. } | EngineError::Held { .. }) => {}
                Err(other) => return Err(other),
            }
            self.reached("drain.one");
        }
        Ok(left.len())
    }
}

/// Sees the wish of that time through. One that was taken back and made anew has its own.
async fn drain(engine: Engine, since_ms: u64) {
    let inner = &engine.inner;
    let mut told = false;
    while inner.is_draining() && !inner.is_ending() {
        let looked = async {
            let Some(wish) = inner.wish().await?.filter(|wish| wish.since_ms == since_ms) else { return Ok(None) };
            let left = inner.drain_once(&wish).await?;
            // Told when it was seen, and not before.
            if left == 0 && !told && inner.drain_stands(&wish).await?.is_drained() {
                let (now_ms, data) = (inner.clock.now_ms(), json!({ "instances": 0 }));
                inner
                    .store
                    .append(inner.epoch, vec![line("daemon.drained", Actor::part("drain"), now_ms, data)])
                    .await?;
                told = true;
            }
            Ok::<_, EngineError>(Some(()))
        };
        match looked.await {
            Ok(None) => return,
            Ok(Some(())) => {}
            Err(error) => {
                inner.heed(&error);
                tracing::warn!(component = "drain", %error, "looks again in a moment");
            }
        }
        inner.pause(LOOK_EVERY).await;
    }
}
