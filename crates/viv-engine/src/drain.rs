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
    if engine.inner.wish().await?.is_some() {
        engine.inner.draining.store(true, Ordering::SeqCst);
        tokio::spawn(drain(engine.clone()));
    }
    Ok(())
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
        inner.store.put_meta(inner.epoch, WISH, Some(&text), line).await?;
        if !inner.draining.swap(true, Ordering::SeqCst) {
            tokio::spawn(drain(self.clone()));
        }
        inner.reached("drain.committed");
        self.drain_status().await
    }

    /// Takes new work again. What was saved stays so until somebody wants it.
    pub async fn undrain(&self, by: Actor) -> Result<DrainStatus, EngineError> {
        let inner = &self.inner;
        if inner.wish().await?.is_some() {
            let line = line("daemon.undrained", by, inner.clock.now_ms(), json!({}));
            inner.store.put_meta(inner.epoch, WISH, None, line).await?;
        }
        inner.draining.store(false, Ordering::SeqCst);
        self.drain_status().await
    }

    /// How a drain stands, looked at now.
    pub async fn drain_status(&self) -> Result<DrainStatus, EngineError> {
        let inner = &self.inner;
        let Some(wish) = inner.wish().await? else { return Ok(DrainStatus::default()) };
        let mut left = inner.left().await?;
        left.truncate(LEFT_MAX);
        Ok(DrainStatus {
            draining: true,
            since_ms: Some(wish.since_ms),
            grace_until_ms: Some(wish.grace_until_ms),
            left: left.into_iter().map(|sandbox| sandbox.id).collect(),
            instances: inner.living_instances().await,
        })
    }
}

impl Inner {
    async fn wish(&self) -> Result<Option<Wish>, EngineError> {
        let text = self.store.meta(WISH).await?;
        // What cannot be read was meant all the same: nothing new is taken.
        let unread = || Wish { since_ms: 0, grace_until_ms: 0, by: Actor::part("drain") };
        Ok(text.map(|text| serde_json::from_str(&text).unwrap_or_else(|_| unread())))
    }

    /// Records that are not saved or finished. What is lost or failed has nothing that could be ended; whether the
    /// provider has it all the same is looked at apart.
    async fn left(&self) -> Result<Vec<Sandbox>, EngineError> {
        let phases = PhaseName::MAY_LIVE.into_iter().filter(|phase| *phase != PhaseName::Lost);
        let mut query = ListQuery { phases: phases.collect(), deleted: true, limit: PAGE, ..ListQuery::default() };
        let mut left = Vec::new();
        loop {
            let page = self.store.list(&query).await?;
            let busy = |sandbox: &Sandbox| !matches!(sandbox.phase, Phase::Failed { work: None });
            left.extend(page.items.into_iter().filter(busy));
            let Some(next) = page.next else { return Ok(left) };
            query.after = Some(next);
        }
    }

    /// Instances of ours that may run.
    async fn living_instances(&self) -> Option<u64> {
        let mut living = 0;
        let mut page = PageRequest::default();
        loop {
            let listed = tokio::time::timeout(self.config.budgets.call, self.provider.list(&self.config.owner, page));
            let listed = listed.await.ok()?.ok()?;
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

async fn drain(engine: Engine) {
    let inner = &engine.inner;
    let mut told = false;
    while inner.is_draining() && !inner.is_ending() {
        let looked = async {
            let Some(wish) = inner.wish().await? else { return Ok(None) };
            inner.drain_once(&wish).await.map(Some)
        };
        match looked.await {
            Ok(None) => return,
            Ok(Some(0)) if !told => {
                told = true;
                let data = json!({ "instances": inner.living_instances().await });
                let line = line("daemon.drained", Actor::part("drain"), inner.clock.now_ms(), data);
                if let Err(error) = inner.store.append(inner.epoch, vec![line]).await {
                    tracing::warn!(component = "drain", %error, "that it is drained could not be written down");
                }
            }
            Ok(Some(_)) => {}
            Err(error) => {
                inner.heed(&error);
                tracing::warn!(component = "drain", %error, "looks again in a moment");
            }
        }
        inner.pause(LOOK_EVERY).await;
    }
}
