//! What is written into the journal about a change.

use serde_json::json;
use viv_core::lifecycle::{Event, Happened, Memory, Outcome, Phase, Sandbox};
use viv_store::NewLine;

/// The line about a change that `step` accepted; none for what nobody reads.
pub(crate) fn line(event: &Event, before: &Sandbox, after: &Sandbox, happened: Happened, now_ms: u64) -> NewLine {
    let (kind, from, to) = match happened {
        Happened::Moved { from, to } => ("sandbox.moved", Some(from), Some(to)),
        Happened::Wanted => (wanted(event), None, None),
        Happened::Advanced => (memory_kind(before, after).unwrap_or("sandbox.advanced"), None, None),
        // Somebody has to hear of it: it is quiesced, and kept, and goes no further by itself (L10).
        Happened::Retrying if has_failed_save(after) && !has_failed_save(before) => ("sandbox.save_failed", None, None),
        Happened::Retrying => ("sandbox.retrying", None, None),
        Happened::Overdue => ("sandbox.overdue", None, None),
    };
    let by = match event {
        Event::Enter { by, .. }
        | Event::Stop { by }
        | Event::Delete { by }
        | Event::Freeze { by }
        | Event::Thaw { by }
        | Event::Hibernate { by }
        | Event::RetrySave { by }
        | Event::Discard { by }
        | Event::Rollback { by, .. }
        | Event::Reset { by }
        | Event::MakeRoom { by }
        | Event::Rest { by, .. }
        | Event::Drain { by }
        | Event::Unhealthy { by } => by.clone(),
        Event::Idle { .. } | Event::Done { .. } | Event::Seen { .. } | Event::Probed { .. } | Event::Due => {
            after.cause.by.clone()
        }
    };
    let attempt = after.phase.work().map(|work| work.attempt);
    let mut data = json!({ "desired": after.desired, "message": after.cause.message, "attempt": attempt });
    if before.generation != after.generation {
        data["generation_before"] = json!(before.generation);
    }
    if before.services != after.services {
        // Which executions there are, and which they come after (X5).
        let runs = after.services.iter().map(|(service, run)| {
            json!({ "service": service, "execution": run.execution, "after": run.after, "restarts": run.restarts })
        });
        data["services"] = runs.collect();
    }
    if before.memory != after.memory {
        data["memory"] = json!(after.memory);
    }
    if let Event::Unhealthy { .. } = event {
        data["evidence"] = json!(before.evidence);
    }
    if let Event::Done { outcome: Outcome::Hooked(report), .. } = event {
        data["hook"] = json!(report);
    }
    if let Event::Rollback { snapshot, discard, .. } = event {
        data["snapshot"] = json!(snapshot);
        data["discard"] = json!(discard);
    }
    NewLine {
        at_ms: now_ms,
        project: Some(after.project.clone()),
        sandbox: Some(after.id.clone()),
        generation: Some(after.generation),
        kind: kind.to_owned(),
        from,
        to,
        cause: Some(after.cause.cause.code().to_owned()),
        by,
        data,
    }
}

/// What is said about memory that was given up (L13).
fn memory_kind(before: &Sandbox, after: &Sandbox) -> Option<&'static str> {
    if before.memory == after.memory {
        return None;
    }
    match after.memory.as_ref()? {
        Memory::NotSaved { .. } => Some("sandbox.memory_not_saved"),
        Memory::NotRestored { .. } => Some("sandbox.memory_not_restored"),
        Memory::Saving | Memory::Kept { .. } | Memory::Restored { .. } => None,
    }
}

/// The line about a new sandbox.
pub(crate) fn created(sandbox: &Sandbox, now_ms: u64) -> NewLine {
    NewLine {
        at_ms: now_ms,
        project: Some(sandbox.project.clone()),
        sandbox: Some(sandbox.id.clone()),
        generation: Some(sandbox.generation),
        kind: "sandbox.created".to_owned(),
        from: None,
        to: Some(sandbox.phase.name()),
        cause: Some(sandbox.cause.cause.code().to_owned()),
        by: sandbox.cause.by.clone(),
        // Environment and labels may hold what is nobody's business (S6).
        data: json!({ "name": sandbox.name, "image": sandbox.spec.image, "persistent": sandbox.policy.persistent }),
    }
}

/// The line about a spare that became the sandbox which somebody asked for (L19).
pub(crate) fn claimed(spare: &Sandbox, sandbox: &Sandbox, class: &str, now_ms: u64) -> NewLine {
    let mut line = created(sandbox, now_ms);
    line.from = Some(spare.phase.name());
    line.data["spare"] = json!({ "class": class, "made_at_ms": spare.created_at_ms });
    line
}

/// The line about a new spare.
pub(crate) fn spare_created(spare: &Sandbox, now_ms: u64) -> NewLine {
    NewLine { kind: "spare.created".to_owned(), ..created(spare, now_ms) }
}

fn wanted(event: &Event) -> &'static str {
    match event {
        Event::Enter { .. } => "sandbox.wanted",
        Event::Stop { .. } => "sandbox.stop_asked",
        Event::Delete { .. } => "sandbox.delete_asked",
        Event::Rollback { .. } => "sandbox.rollback_asked",
        Event::Reset { .. } => "sandbox.reset_asked",
        Event::Freeze { .. } => "sandbox.freeze_asked",
        Event::Thaw { .. } => "sandbox.thaw_asked",
        Event::Hibernate { .. } => "sandbox.hibernate_asked",
        Event::RetrySave { .. } => "sandbox.save_retry_asked",
        Event::Discard { .. } => "sandbox.discard_asked",
        Event::Idle { .. }
        | Event::MakeRoom { .. }
        | Event::Rest { .. }
        | Event::Drain { .. }
        | Event::Unhealthy { .. }
        | Event::Done { .. }
        | Event::Seen { .. }
        | Event::Probed { .. }
        | Event::Due => "sandbox.noted",
    }
}

fn has_failed_save(sandbox: &Sandbox) -> bool {
    matches!(sandbox.phase, Phase::Hibernating { save_failed: true, .. })
}

/// A line about something that is no step.
pub(crate) fn noted(
    sandbox: &Sandbox,
    kind: &str,
    by: viv_core::lifecycle::Actor,
    now_ms: u64,
    data: serde_json::Value,
) -> NewLine {
    NewLine {
        at_ms: now_ms,
        project: Some(sandbox.project.clone()),
        sandbox: Some(sandbox.id.clone()),
        generation: Some(sandbox.generation),
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: None,
        by,
        data,
    }
}
