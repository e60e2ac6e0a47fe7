//! What must hold of every change of a task (K1 to K5).

use viv_core::RequestId;
use viv_core::task::{EffectOutcome, Grant, Task, TaskEvent, TaskState, TaskStepped, step};

use super::{Found, holds};

pub(super) fn check(before: Option<&Task>, after: &Task) -> Found {
    let id = &after.id;
    let in_flight = after.grants.iter().filter(|grant| grant.outcome == EffectOutcome::InFlight).count();
    let over = after.state.is_final();
    holds("one-effect-at-a-time", in_flight <= 1, || format!("{id}: {:?}", after.grants))?;
    holds("over-is-settled", !over || in_flight == 0, || format!("{id} is over: {:?}", after.grants))?;
    would_be_granted(after)?;
    let Some(before) = before else {
        return holds("tasks-count", after.version == 1 && after.run == 1, || format!("{id} begins as {after:?}"));
    };
    holds("tasks-count", after.version == before.version + 1, || {
        format!("{id} was at {}, and is at {}", before.version, after.version)
    })?;
    if before.state.is_final() {
        let another = after.run == before.run + 1 && after.state == TaskState::Queued && after.ending.is_none();
        holds("tasks-end-once", another, || format!("{id} was {:?}, and is {:?}", before.state, after.state))?;
        return granted(before, after);
    }
    holds("tasks-end-once", after.run == before.run, || format!("{id} is in run {} before it was over", after.run))?;
    holds("tasks-count", (before.step..=before.step + 1).contains(&after.step), || {
        format!("{id} was at step {}, and is at {}", before.step, after.step)
    })?;
    if let Some(ending) = &before.ending {
        holds("an-end-is-kept", after.ending.as_ref() == Some(ending), || {
            format!("{id} was to end as {ending:?}, and is to end as {:?}", after.ending)
        })?;
        holds("nothing-begins-after-the-end", after.executions.len() <= before.executions.len(), || {
            format!("{id} is to end, and starts {:?}", after.executions.last())
        })?;
        holds("no-grant-after-the-end", after.grants.len() <= before.grants.len(), || {
            format!("{id} is to end, and is granted {:?}", after.grants.last())
        })?;
    }
    if over {
        let unknown = |grant: &Grant| grant.run == after.run && grant.outcome == EffectOutcome::Unknown;
        let unknown = after.grants.iter().any(unknown);
        let told = after.ending.as_ref().map(|ending| ending.outcome);
        let right = if unknown { after.state == TaskState::EffectUnknown } else { Some(after.state) == told };
        holds("tasks-end-as-told", right, || format!("{id} is {:?}, and was to end as {told:?}", after.state))?;
    }
    granted(before, after)
}

/// Somebody inside may ask at any moment until all of it is gone, and few do so between a stop and that: so the gate is
/// asked here, about each row of a task that is to end.
fn would_be_granted(task: &Task) -> Found {
    if task.ending.is_none() {
        return Ok(());
    }
    for rule in &task.effects {
        let request = RequestId::from_bytes([0xff; 16]);
        let asked = TaskEvent::Asked { request, effect: rule.name.clone(), gated: true };
        let granted = match step(task, &asked, task.ending.as_ref().map_or(0, |ending| ending.at_ms)) {
            TaskStepped::Accepted(next) => next.grants.len() > task.grants.len(),
            TaskStepped::Ignored | TaskStepped::Denied(_) => false,
        };
        holds("no-grant-after-the-end", !granted, || {
            format!("{} is to end, and who asks for {} is granted it", task.id, rule.name)
        })?;
    }
    Ok(())
}

fn granted(before: &Task, after: &Task) -> Found {
    let id = &after.id;
    for (at, old) in before.grants.iter().enumerate() {
        let now = after.grants.get(at);
        let kept = now.is_some_and(|now| now.request == old.request);
        let settled = old.outcome != EffectOutcome::InFlight;
        let same = now.is_some_and(|now| now.outcome == old.outcome);
        holds("outcomes-stay", kept && (!settled || same), || format!("{id}: {old:?} became {now:?}"))?;
    }
    for new in after.grants.iter().skip(before.grants.len()) {
        let rule = before.effects.iter().find(|rule| rule.name == new.effect);
        let again = before.grants.iter().filter(|grant| grant.effect == new.effect).any(|grant| match grant.outcome {
            EffectOutcome::Done => rule.is_none_or(|rule| !rule.repeatable),
            EffectOutcome::Unknown => true,
            EffectOutcome::Failed { .. } | EffectOutcome::InFlight => false,
        });
        holds("grants-are-declared", rule.is_some() && !again, || {
            format!("{id} is granted {}, of {:?} and after {:?}", new.effect, before.effects, before.grants)
        })?;
    }
    Ok(())
}
