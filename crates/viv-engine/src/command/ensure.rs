//! Ensure (L3): joins what is ready, waits for what is in transition, recreates what is lost or failed.

use std::sync::Arc;

use viv_core::lifecycle::{Actor, EntryKind, Event, Phase, Status};

use crate::aim::Aim;
use crate::engine::{Applied, Engine, Inner};
use crate::error::EngineError;
use crate::gate::Gate;
use crate::read::View;

impl Engine {
    /// Records that somebody wants it to run, and answers at once: see [`Engine::wait_ready`].
    pub async fn ensure(&self, aim: impl Into<Aim>, kind: EntryKind, by: Actor) -> Result<View, EngineError> {
        let (inner, aim) = (&self.inner, aim.into());
        let sandbox = aim.sandbox();
        let entering = inner.begin_entry()?;
        let record = inner.enter(&aim, kind, by).await?.sandbox();
        drop(entering);
        inner.reached("ensure.committed");
        inner.active(&record.id).await?;
        let view = inner.view(record);
        // What it joins has to be known to work, not only recorded so, and not only by the daemon before this one (T4).
        let gated = inner.config.gates.is_on(Gate::ProbeBeforeUse, &view.sandbox.project, sandbox);
        let is_known = if gated { inner.is_seen_well(&view) } else { view.status == Status::Ready };
        if view.sandbox.phase != Phase::Ready || is_known {
            return Ok(view);
        }
        let view = self.verify(sandbox).await?;
        // What was found unwell is being verified, and who waits waits for that. What could not be probed is not joined.
        if gated && view.sandbox.phase == Phase::Ready && !inner.is_seen_well(&view) {
            return Err(view.unfit());
        }
        Ok(view)
    }
}

impl Inner {
    /// An entry. What is lost is looked for first: who was silent may be there, and then it is kept (T7).
    pub(crate) async fn enter(self: &Arc<Self>, aim: &Aim, kind: EntryKind, by: Actor) -> Result<Applied, EngineError> {
        let sandbox = aim.sandbox();
        let stops = self.knowledge.stops(sandbox);
        self.look_for_lost(sandbox).await?;
        // Looking takes its time: a stop that came meanwhile is the later word (L8).
        if self.knowledge.stops(sandbox) != stops {
            return Err(EngineError::Held { sandbox: sandbox.clone() });
        }
        self.ask(aim, &Event::Enter { kind, by }).await
    }
}
