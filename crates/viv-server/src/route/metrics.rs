//! Figures for Prometheus, and the alerts that are judged from them (O4, O5). Figures name no sandbox, project or user, so
//! every key may read them; whom an alert is about is for keys of the installation.

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Response, header};
use viv_api::alert::{Alert, AlertState};
use viv_api::daemon::Severity;
use viv_api::page::Page;
use viv_api::path;
use viv_engine::alert;
use viv_engine::metrics::family;

use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;

/// The text format, as Prometheus names it.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) fn tell(table: &mut impl Table) {
    let metrics_op = Op::new("daemon", "getMetrics", Need::Read, "Figures for Prometheus")
        .gives_stream("The figures, in Prometheus's text format.", "text/plain");
    table.on(Method::Get, path::METRICS, metrics, metrics_op);
    let alerts_op = Op::new("daemon", "listAlerts", Need::Read, "The built-in alerts and how they stand")
        .gives_page::<Alert>("All of them, what fires first.");
    table.on(Method::Get, path::ALERTS, alerts, alerts_op);
}

async fn metrics(State(state): State<ServerState>) -> Answer {
    let engine = state.engine();
    let metrics = engine.gather().await?;
    let build = state.build();
    metrics.set(&family::BUILD, &[&build.version, &build.commit, engine.provider().name()], 1.0);
    #[expect(clippy::cast_precision_loss, reason = "a time for people")]
    metrics.set(&family::STARTED, &[], state.started_at_ms() as f64 / 1000.0);
    let busy = state.bounds().requests_max.saturating_sub(state.requests().available_permits());
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    metrics.set(&family::HTTP_IN_FLIGHT, &[], busy as f64);
    let mut response = Response::new(Body::from(metrics.text()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(TEXT));
    Ok(response)
}

async fn alerts(State(state): State<ServerState>, caller: Caller) -> Answer {
    Ok(show::ok(&Page::whole(shown(&state, &caller))))
}

/// All alerts, what fires first and the worst of it before the rest.
pub(super) fn shown(state: &ServerState, caller: &Caller) -> Vec<Alert> {
    let mut known = state.engine().alerts();
    if !caller.is_admin() {
        // It may be another project's.
        for alert in &mut known {
            alert.most = None;
        }
    }
    let mut all: Vec<Alert> = known.iter().map(one).collect();
    for alert in &mut all {
        if !caller.is_admin() {
            alert.sandboxes.clear();
        }
        // A command that can be run as it stands: about the first of whom it is.
        if let Some(first) = alert.sandboxes.first() {
            alert.command = alert.command.replace("SANDBOX", first.as_str());
        }
    }
    all.sort_by_key(|alert| (std::cmp::Reverse(alert.state), std::cmp::Reverse(alert.severity)));
    all
}

fn one(alert: &alert::Alert) -> Alert {
    let state = match alert.state {
        alert::AlertState::Inactive => AlertState::Inactive,
        alert::AlertState::Pending { .. } => AlertState::Pending,
        alert::AlertState::Firing { .. } => AlertState::Firing,
    };
    Alert {
        name: alert.rule.name.to_owned(),
        severity: match alert.rule.severity {
            alert::Severity::Warning => Severity::Warning,
            alert::Severity::Critical => Severity::Critical,
        },
        state,
        since_at_ms: alert.state.since_ms(),
        value: alert.value,
        above: alert.setting.above,
        for_ms: alert.setting.for_ms,
        message: if state == AlertState::Inactive { alert.rule.what.to_owned() } else { alert.words() },
        command: alert.rule.helps.to_owned(),
        sandboxes: alert.sandboxes.clone(),
    }
}
