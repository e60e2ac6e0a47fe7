//! Cleanups by hand (J2).

use std::time::Duration;

use axum::extract::State;
use viv_api::cleanup::{BeginCleanup, Cleanup, CleanupItem, CleanupLayer};
use viv_api::path;
use viv_engine::cleanup::{self, CleanupKind, CleanupOrder, CleanupOutcome, CleanupReport};

use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::MaybeJson;
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

pub(super) fn tell(table: &mut impl Table) {
    let op = Op::new("daemon", "cleanUp", Need::Admin, "Clean up now, or say what that would do")
        .maybe_json::<BeginCleanup>()
        .gives::<Cleanup>(200, "What was found and done.");
    table.on(Method::Post, path::CLEANUP, clean_up, op);
}

async fn clean_up(
    State(state): State<ServerState>,
    caller: Caller,
    MaybeJson(asked): MaybeJson<BeginCleanup>,
) -> Answer {
    let order = ordered(&asked);
    let (engine, by) = (state.engine().clone(), caller.actor());
    let report = regardless(async move { engine.cleanup(&order, by).await }).await?;
    Ok(show::ok(&shown(report, asked.dry_run)))
}

/// The layers that run when nobody names any: they take nothing away that somebody could want.
const USUAL: [CleanupKind; 3] = [CleanupKind::Unhealthy, CleanupKind::Leftovers, CleanupKind::Age];

fn ordered(asked: &BeginCleanup) -> CleanupOrder {
    let mut kinds: Vec<CleanupKind> = asked.layers.iter().copied().map(kind).collect();
    if kinds.is_empty() {
        kinds.extend(USUAL);
    }
    kinds.extend(asked.age_max_ms.map(|_| CleanupKind::Age));
    kinds.extend(asked.emergency.then_some(CleanupKind::Emergency));
    let age_max = asked.age_max_ms.map(|ms| Duration::from_millis(ms.get()));
    CleanupOrder { kinds, dry_run: asked.dry_run, age_max }
}

fn kind(layer: CleanupLayer) -> CleanupKind {
    match layer {
        CleanupLayer::Unhealthy => CleanupKind::Unhealthy,
        CleanupLayer::Leftovers => CleanupKind::Leftovers,
        CleanupLayer::Age => CleanupKind::Age,
        CleanupLayer::Emergency => CleanupKind::Emergency,
    }
}

fn shown(report: CleanupReport, dry_run: bool) -> Cleanup {
    let (found, done, failed) = (report.found(), report.done(), report.failed());
    Cleanup { dry_run, found, done, failed, items: report.items.into_iter().map(one).collect() }
}

fn one(item: cleanup::CleanupItem) -> CleanupItem {
    let (outcome, message) = match item.outcome {
        CleanupOutcome::Planned => ("planned", None),
        CleanupOutcome::Done => ("done", None),
        CleanupOutcome::InUse => ("in_use", None),
        CleanupOutcome::Failed(why) => ("failed", Some(why)),
    };
    CleanupItem {
        sandbox: item.sandbox,
        layer: item.kind.as_str().to_owned(),
        action: item.action.as_str().to_owned(),
        why: item.why,
        outcome: outcome.to_owned(),
        message,
    }
}
