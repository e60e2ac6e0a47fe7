//! Audit and reconciliation by hand (J1, J2). For keys of the installation.

use axum::extract::State;
use viv_api::path;
use viv_api::reconcile::{Orphan, Reconcile, Reconciled};
use viv_engine::{AuditItem, AuditReport};

use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::MaybeJson;
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

pub(super) fn tell(table: &mut impl Table) {
    let op =
        Op::new("daemon", "reconcile", Need::Admin, "Find what belongs to nobody, or is missing, and put it right")
            .maybe_json::<Reconcile>()
            .gives::<Reconciled>(200, "What was found, and what became of it.");
    table.on(Method::Post, path::RECONCILE, reconcile, op);
}

async fn reconcile(State(state): State<ServerState>, caller: Caller, MaybeJson(body): MaybeJson<Reconcile>) -> Answer {
    let (engine, by) = (state.engine().clone(), caller.actor());
    let report = regardless(async move { engine.audit(!body.dry_run, by).await }).await?;
    Ok(show::ok(&shown(&report)))
}

fn shown(report: &AuditReport) -> Reconciled {
    let count = |outcome: &str| report.items.iter().filter(|item| item.outcome.as_str() == outcome).count() as u64;
    Reconciled {
        dry_run: !report.acted,
        began_at_ms: report.began_at_ms,
        ended_at_ms: report.ended_at_ms,
        complete: report.complete,
        found: report.items.len() as u64 + report.more,
        done: count("done"),
        left: count("left"),
        failed: count("failed"),
        items: report.items.iter().map(orphan).collect(),
    }
}

fn orphan(item: &AuditItem) -> Orphan {
    Orphan {
        kind: item.kind.clone(),
        what: item.what.clone(),
        sandbox: item.sandbox.as_ref().map(ToString::to_string),
        why: item.why.clone(),
        outcome: item.outcome.as_str().to_owned(),
        message: item.outcome.message().map(str::to_owned),
    }
}
