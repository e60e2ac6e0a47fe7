//! The daemon itself: whether it is well, what it is, what it did.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use viv_api::alert::AlertState;
use viv_api::bound::Sequence;
use viv_api::daemon::{
    Doctor, Finding, Health, LogPage, Ready, ReadyCheck, Reconciler, Severity, TracesShown, Version,
};
use viv_api::error::ErrorCode;
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::ListLogs;
use viv_engine::{BreakerKind, BreakerStatus, Engine, ReconcilerName, ReconcilerStatus, TraceReceiver};

use super::page_limit;
use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::{Query, found};
use crate::log::LogFilter;
use crate::refusal::{Answer, forbidden};
use crate::show;
use crate::state::ServerState;

/// How long the store may take before it is not ready.
const STORE_WITHIN: Duration = Duration::from_secs(2);

pub(super) fn tell(table: &mut impl Table) {
    let open = |id, summary| Op::new("daemon", id, Need::Nothing, summary);
    table.on(
        Method::Get,
        path::HEALTH,
        health,
        open("getHealth", "Whether the process lives").gives::<Health>(200, "It does."),
    );
    let ready_op = open("getReady", "Whether it can do its work")
        .gives::<Ready>(200, "It can.")
        .gives::<Ready>(503, "It cannot, and why.");
    table.on(Method::Get, path::READY, ready, ready_op);
    let version_op = open("getVersion", "What runs here").gives::<Version>(200, "What runs here.");
    table.on(Method::Get, path::VERSION, version, version_op);
    let document_op = open("getOpenApi", "This document").gives_stream("This document.", "application/json");
    table.on(Method::Get, path::OPENAPI, document, document_op);
    let reconcilers_op = Op::new("daemon", "listReconcilers", Need::Admin, "The reconcilers and how they stand")
        .gives_page::<Reconciler>("All of them.");
    table.on(Method::Get, path::RECONCILERS, reconcilers, reconcilers_op);
    let doctor_op = Op::new("daemon", "getDoctor", Need::Read, "What this machine can and cannot do")
        .gives::<Doctor>(200, "What it can do, and what is wrong.");
    table.on(Method::Get, path::DOCTOR, doctor, doctor_op);
    let logs_op = Op::new("daemon", "listLogs", Need::Read, "The daemon's own log")
        .query::<ListLogs>()
        .gives::<LogPage>(200, "A part of it.")
        .fails(&[ErrorCode::NotFound]);
    table.on(Method::Get, path::LOGS, logs, logs_op);
}

async fn health() -> Answer {
    Ok(show::ok(&Health { status: "ok".to_owned() }))
}

async fn ready(State(state): State<ServerState>) -> Answer {
    let check = |name: &str, ok: bool, message: Option<String>| ReadyCheck { name: name.to_owned(), ok, message };
    let engine = state.engine();
    let store = match tokio::time::timeout(STORE_WITHIN, engine.store().owner()).await {
        Ok(Ok(owner)) => {
            let ours = owner.is_some_and(|owner| owner.epoch == engine.epoch().0);
            check("store", ours, (!ours).then(|| "another process owns it".to_owned()))
        }
        Ok(Err(error)) => {
            // Everybody may ask, and what went wrong names places on the host.
            tracing::warn!(component = "server", %error, "the store cannot be read");
            check("store", false, Some("it cannot be read".to_owned()))
        }
        Err(_) => check("store", false, Some("it does not answer".to_owned())),
    };
    // Whom webhooks go to is nobody's business here, and keeps nobody from working.
    let is_provider = |breaker: &BreakerStatus| breaker.open && breaker.kind == BreakerKind::Provider;
    let open: Vec<_> = engine.breakers().into_iter().filter(is_provider).collect();
    let message =
        open.first().map(|breaker| format!("{} failed {} times in a row", breaker.destination, breaker.failures));
    let checks = vec![store, check("provider", open.is_empty(), message)];
    let ready = checks.iter().all(|check| check.ok);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    Ok(show::json(status, &Ready { ready, checks }))
}

async fn version(State(state): State<ServerState>) -> Answer {
    Ok(show::ok(&show::version(&state)))
}

async fn document() -> Answer {
    Ok(show::ok(&crate::openapi::document()))
}

async fn reconcilers(State(state): State<ServerState>) -> Answer {
    Ok(show::ok(&Page::whole(all_reconcilers(&state))))
}

fn all_reconcilers(state: &ServerState) -> Vec<Reconciler> {
    state.engine().reconcilers().iter().map(|status| show::reconciler(status, state)).collect()
}

async fn doctor(State(state): State<ServerState>, caller: Caller) -> Answer {
    let engine = state.engine();
    let mut findings = Vec::new();
    for breaker in engine.breakers().into_iter().filter(|breaker| breaker.open) {
        let severity = match breaker.kind {
            BreakerKind::Provider => Severity::Critical,
            // To whom others send their webhooks is for those who run the host.
            BreakerKind::Webhook if !caller.is_admin() => continue,
            BreakerKind::Webhook => Severity::Warning,
        };
        findings.push(Finding {
            severity,
            code: "breaker_open".to_owned(),
            message: format!(
                "{} failed {} times in a row and is left alone for a moment",
                breaker.destination, breaker.failures
            ),
            evidence: Vec::new(),
            command: Some("viv logs --daemon".to_owned()),
        });
    }
    for alert in super::metrics::shown(&state, &caller).into_iter().filter(|alert| alert.state == AlertState::Firing) {
        findings.push(Finding {
            severity: alert.severity,
            code: format!("alert_{}", alert.name),
            message: alert.message,
            evidence: alert.sandboxes.iter().map(ToString::to_string).collect(),
            command: Some(alert.command),
        });
    }
    if let Some(left) = engine.provider().short_of_room() {
        findings.push(Finding {
            severity: Severity::Critical,
            code: "disk_full".to_owned(),
            message: format!(
                "the disk that sandboxes are on is full: {left}; remove what nobody needs (`viv rm`, `viv snapshot rm`, \
                 `viv image gc`), or what is not viv's"
            ),
            evidence: Vec::new(),
            command: Some("viv ps --all".to_owned()),
        });
    }
    for status in engine.reconcilers() {
        if let Some(message) = failing(&status, caller.is_admin()) {
            findings.push(Finding {
                severity: Severity::Warning,
                code: "reconciler_failing".to_owned(),
                message,
                evidence: Vec::new(),
                command: Some("viv logs --daemon --component reconcile".to_owned()),
            });
        }
        findings.extend(overdue(&status, engine.now_ms()));
    }
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let provider = engine.provider();
    let capabilities = viv_api::provider::capabilities(&engine.capabilities().await);
    // To whom they go is for those who run the host.
    let (traces, reconcilers) =
        if caller.is_admin() { (traces(engine.clone()).await, all_reconcilers(&state)) } else { (None, Vec::new()) };
    let saves_memory_by = provider.saves_memory_by();
    let provider = provider.name().to_owned();
    Ok(show::ok(&Doctor { provider, capabilities, findings, saves_memory_by, traces, reconcilers }))
}

/// What the last run of a reconciler could not do, as a whole or in a part. What went wrong names places on the host, which
/// are for those who run it. One without a time of its own runs for one sandbox, and what failed then is known of that.
fn failing(status: &ReconcilerStatus, is_admin: bool) -> Option<String> {
    let name = status.name.as_str();
    match &status.error {
        Some(error) if is_admin => Some(format!("{name} did not run through: {error}")),
        Some(_) => Some(format!("{name} did not run through")),
        None if status.failed > 0 && status.next_at_ms.is_some() => {
            Some(format!("{name} could not do {} of the {} that it found", status.failed, status.found))
        }
        None => None,
    }
}

/// A reconciler that is far past its time: it hangs, and says nothing in the log. What it does can be done by hand.
fn overdue(status: &ReconcilerStatus, now_ms: u64) -> Option<Finding> {
    let next_ms = status.next_at_ms.filter(|_| status.is_overdue(now_ms))?;
    let (name, late_s) = (status.name.as_str(), now_ms.saturating_sub(next_ms) / 1000);
    let command = match status.name {
        ReconcilerName::Cleanup => "viv cleanup",
        ReconcilerName::Full | ReconcilerName::ProviderSync => "viv reconcile",
        ReconcilerName::Expiry
        | ReconcilerName::Stuck
        | ReconcilerName::Health
        | ReconcilerName::Idle
        | ReconcilerName::Snapshots
        | ReconcilerName::Retention
        | ReconcilerName::Spares
        | ReconcilerName::Alerts => "viv logs --daemon --component reconcile",
    };
    let last = status.last_at_ms.map_or_else(
        || "it never ran to its end".to_owned(),
        |at_ms| format!("it last ended {} s ago", now_ms.saturating_sub(at_ms) / 1000),
    );
    Some(Finding {
        severity: Severity::Critical,
        code: "reconciler_overdue".to_owned(),
        message: format!("{name} should have run {late_s} s ago; a restart of the daemon begins it anew"),
        evidence: vec![last],
        command: Some(command.to_owned()),
    })
}

/// Where traces go, and whether that answers, which is asked of it now.
async fn traces(engine: Engine) -> Option<TracesShown> {
    engine.tracing()?;
    let asked = tokio::task::spawn_blocking(move || {
        let traces = engine.tracing()?;
        Some((traces.receiver(), traces.counts()))
    });
    let (receiver, counts) = asked.await.ok()??;
    let TraceReceiver { endpoint, silent } = receiver;
    Some(TracesShown { endpoint, silent, sent: counts.sent, dropped: counts.dropped })
}

async fn logs(State(state): State<ServerState>, caller: Caller, Query(query): Query<ListLogs>) -> Answer {
    let sandbox = match &query.sandbox {
        Some(named) => {
            let (project, which) = found(&state, &caller, named).await?;
            Some(state.engine().get(&project, &which, "logs").await?.sandbox.id)
        }
        None if caller.is_admin() => None,
        None => {
            let hint = "name a sandbox, or use a key with the scope admin";
            return Err(forbidden("the whole log is for keys of the installation", hint));
        }
    };
    let component = query.component.map(|component| component.to_string());
    let filter = LogFilter { component, sandbox, level: query.level };
    let after = query.after.map(Sequence::get);
    let (items, next_after, more) = state.logs().read(after, &filter, page_limit(query.limit));
    Ok(show::ok(&LogPage { items, next_after, more }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> ReconcilerStatus {
        ReconcilerStatus {
            name: ReconcilerName::Cleanup,
            runs: 1,
            last_at_ms: Some(1),
            took_ms: 0,
            found: 3,
            did: 3,
            failed: 0,
            error: None,
            next_at_ms: Some(2),
            period_ms: Some(1),
        }
    }

    #[test]
    fn j3_a_reconciler_that_hangs_is_named_with_what_does_its_work() {
        let late = ReconcilerStatus {
            last_at_ms: Some(100_000),
            next_at_ms: Some(400_000),
            period_ms: Some(300_000),
            ..status()
        };
        assert_eq!(overdue(&late, 1_000_000), None, "two periods late is not far past its time");
        let found = overdue(&late, 1_001_000).expect("more is");
        assert_eq!((found.code.as_str(), found.severity), ("reconciler_overdue", Severity::Critical));
        assert!(found.message.starts_with("cleanup should have run 601 s ago"), "{found:?}");
        assert_eq!(found.evidence, ["it last ended 901 s ago"]);
        assert_eq!(found.command.as_deref(), Some("viv cleanup"));
        let first = ReconcilerStatus { name: ReconcilerName::Full, runs: 0, last_at_ms: None, ..late.clone() };
        let found = overdue(&first, 1_001_000).expect("also in its first run");
        assert_eq!(found.evidence, ["it never ran to its end"]);
        assert_eq!(found.command.as_deref(), Some("viv reconcile"));
        let for_one = ReconcilerStatus { name: ReconcilerName::Health, next_at_ms: None, period_ms: None, ..late };
        assert_eq!(overdue(&for_one, u64::MAX), None);
    }

    #[test]
    fn j3_a_reconciler_that_could_not_do_a_part_is_named() {
        let well = status();
        assert_eq!(failing(&well, true), None);
        let in_part = ReconcilerStatus { did: 1, failed: 2, ..well.clone() };
        assert_eq!(failing(&in_part, false).as_deref(), Some("cleanup could not do 2 of the 3 that it found"));
        assert!(in_part.is_bad(1), "and that is what the alert is about");
        let for_one = ReconcilerStatus { name: ReconcilerName::Health, next_at_ms: None, ..in_part };
        assert_eq!(failing(&for_one, true), None);
        let as_a_whole = ReconcilerStatus { error: Some("/srv is full".to_owned()), ..well };
        assert_eq!(failing(&as_a_whole, true).as_deref(), Some("cleanup did not run through: /srv is full"));
        assert_eq!(failing(&as_a_whole, false).as_deref(), Some("cleanup did not run through"));
    }
}
