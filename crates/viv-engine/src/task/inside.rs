//! What the agent of a task asks for: a step reported, an effect begun and ended (K4, K5).

use std::collections::BTreeMap;

use viv_core::task::{EffectOutcome, Task, TaskDenial, TaskEvent};
use viv_core::{RequestId, TaskId};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::gate::Gate;
use crate::inside::FromInside;

/// An effect that may begin.
#[derive(Debug, Clone)]
pub struct Granted {
    /// The grant.
    pub grant: RequestId,
    /// What its command alone is handed.
    pub credentials: BTreeMap<String, String>,
}

/// The effect that is meant when nobody says which.
fn only_effect(task: &Task) -> Result<&str, EngineError> {
    match task.effects.as_slice() {
        [] => Err(EngineError::TaskDenied { task: task.id.clone(), why: TaskDenial::Undeclared }),
        [only] => Ok(&only.name),
        several => {
            let names: Vec<&str> = several.iter().map(|rule| rule.name.as_str()).collect();
            Err(EngineError::Invalid {
                what: format!("this task declared several effects: {}", names.join(", ")),
                hint: "viv gate --effect says which".to_owned(),
            })
        }
    }
}

impl Engine {
    /// The task that is meant, if it runs in the sandbox that asks: others are none.
    async fn task_inside(&self, asked: &FromInside, id: &TaskId, run: u32) -> Result<Task, EngineError> {
        let task = self.task(Some(&asked.sandbox.project), id).await?;
        if task.sandbox != asked.sandbox.id || task.run != run {
            return Err(EngineError::NoTask { which: id.clone() });
        }
        Ok(task)
    }

    /// The agent says how far it is.
    pub async fn report_inside(
        &self,
        asked: &FromInside,
        (id, run): (&TaskId, u32),
        steps: u64,
        (note, session): (Option<String>, Option<String>),
    ) -> Result<Task, EngineError> {
        self.task_inside(asked, id, run).await?;
        let request = asked.request.clone();
        self.apply_task(id, &TaskEvent::Reported { request, steps, note, session }).await
    }

    /// The gate: whether an effect may begin; the only one that the task declared, when nobody says which. Asked again
    /// under the same id, it is the same grant.
    pub async fn gate_inside(
        &self,
        asked: &FromInside,
        (id, run): (&TaskId, u32),
        effect: Option<&str>,
    ) -> Result<Granted, EngineError> {
        let task = self.task_inside(asked, id, run).await?;
        let effect = match effect {
            Some(effect) => effect,
            None => only_effect(&task)?,
        };
        let gated = self.task_gate(Gate::EffectsGate, &task);
        let event = TaskEvent::Asked { request: asked.request.clone(), effect: effect.to_owned(), gated };
        let task = self.apply_task(id, &event).await?;
        self.inner.reached("task.granted");
        let granted = task.grants.iter().find(|grant| grant.request == asked.request);
        match granted.map(|grant| &grant.outcome) {
            Some(EffectOutcome::InFlight) => {
                Ok(Granted { grant: asked.request.clone(), credentials: task.credentials.clone() })
            }
            Some(EffectOutcome::Done | EffectOutcome::Failed { .. } | EffectOutcome::Unknown) | None => {
                Err(EngineError::TaskDenied { task: id.clone(), why: TaskDenial::Ending })
            }
        }
    }

    /// An effect has ended.
    pub async fn effect_ended_inside(
        &self,
        asked: &FromInside,
        (id, run): (&TaskId, u32),
        grant: &RequestId,
        failed: Option<String>,
    ) -> Result<Task, EngineError> {
        self.task_inside(asked, id, run).await?;
        let task = self.apply_task(id, &TaskEvent::EffectEnded { request: grant.clone(), failed }).await?;
        self.inner.reached("task.effect_ended");
        Ok(task)
    }
}
