//! Looking closer at one sandbox: diagnosis, timeline, logs, resources. Reads: they change nothing (T9).

use std::time::Duration;

use axum::extract::State;
use viv_api::bound::{LogBytes, WaitMs};
use viv_api::diagnosis::Diagnosis;
use viv_api::error::ErrorCode;
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::{DiagnosisQuery, OfGeneration, PageQuery, SandboxLogQuery};
use viv_api::resources::{Operations, Resources};
use viv_api::sandbox::{LogSource, LogTail, SandboxLogs, TimelineEntry};
use viv_core::lifecycle::Phase;
use viv_engine::Which;
use viv_store::{Cursor, JournalFilter};

use super::page_limit;
use crate::api::{Method, Op, Table};
use crate::auth::Need;
use crate::extract::{Query, Target};
use crate::refusal::{Answer, invalid};
use crate::show;
use crate::state::ServerState;

/// How much of each log when nothing was said.
const LOG_BYTES_DEFAULT: u64 = 64 << 10;

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, summary| Op::new("looks", id, Need::Read, summary).of_sandbox();
    let diagnosis_op = op("getDiagnosis", "All that is known about a sandbox")
        .query::<DiagnosisQuery>()
        .gives::<Diagnosis>(200, "All of it.")
        .fails(&[ErrorCode::Timeout]);
    table.on(Method::Get, path::DIAGNOSIS, diagnosis, diagnosis_op);
    let timeline_op = op("getTimeline", "What happened to a sandbox, oldest first")
        .query::<PageQuery>()
        .cursor("^[0-9]{1,15}t[0-9]{1,15}$")
        .gives_page::<TimelineEntry>("A page of it.");
    table.on(Method::Get, path::TIMELINE, timeline, timeline_op);
    let logs_op = op("getSandboxLogs", "The ends of what its supervisor and its agent wrote")
        .query::<SandboxLogQuery>()
        .gives::<SandboxLogs>(200, "The ends of its logs.")
        .fails(&[ErrorCode::NotRunning, ErrorCode::Timeout]);
    table.on(Method::Get, path::SANDBOX_LOGS, logs, logs_op);
    let resources_op = op("getResources", "What a sandbox uses, and may use")
        .query::<OfGeneration>()
        .gives::<Resources>(200, "What it uses.")
        .fails(&[ErrorCode::NotRunning, ErrorCode::Timeout]);
    table.on(Method::Get, path::RESOURCES, resources, resources_op);
}

async fn diagnosis(State(state): State<ServerState>, target: Target, Query(query): Query<DiagnosisQuery>) -> Answer {
    let record = target.record(&state, query.generation).await?;
    let sample = Duration::from_millis(query.sample_ms.map_or(0, WaitMs::get));
    let found = state.engine().diagnose_over(&record.project, &Which::Id(record.id), sample).await?;
    Ok(show::ok(&show::diagnosis(&state, found, target.caller.is_admin())))
}

/// A cursor is the last line's place, and when the phase began that lasted then.
async fn timeline(State(state): State<ServerState>, target: Target, Query(query): Query<PageQuery>) -> Answer {
    let record = target.record(&state, None).await?;
    let (after, mut since_ms) = match &query.cursor {
        None => (0, None),
        Some(cursor) => {
            let parts = cursor.as_str().split_once('t');
            let parsed = parts.and_then(|(seq, at_ms)| Some((seq.parse().ok()?, at_ms.parse::<u64>().ok()?)));
            let (seq, at_ms) = parsed
                .ok_or_else(|| invalid("there is no page after that", "give what the page before gave as next"))?;
            (seq, (at_ms > 0).then_some(at_ms))
        }
    };
    let limit = page_limit(query.limit);
    let filter = JournalFilter { sandbox: Some(record.id), ..JournalFilter::default() };
    let mut lines = state.engine().events(Cursor(after), &filter, limit + 1).await?;
    let more = lines.len() > limit;
    lines.truncate(limit);
    let mut items = Vec::with_capacity(lines.len());
    for line in &lines {
        let moved = line.line.to.is_some();
        let took_ms = since_ms.filter(|_| moved).map(|since_ms| line.line.at_ms.saturating_sub(since_ms));
        if moved {
            since_ms = Some(line.line.at_ms);
        }
        items.push(show::timeline(line, took_ms));
    }
    let next = items.last().filter(|_| more).map(|last| format!("{}t{}", last.seq, since_ms.unwrap_or(0)));
    Ok(show::ok(&Page { items, next }))
}

async fn logs(State(state): State<ServerState>, target: Target, Query(query): Query<SandboxLogQuery>) -> Answer {
    let generation = target.generation(&state, query.generation).await?;
    let handle = state.engine().look_into(&target.project, &target.which, generation).await?;
    let bytes_max = query.bytes.map_or(LOG_BYTES_DEFAULT, LogBytes::get);
    let parts = handle.log_tail(bytes_max).await?;
    let logs = parts.into_iter().filter_map(|part| {
        let source = match part.name.as_str() {
            "shim" => LogSource::Shim,
            "agent" => LogSource::Agent,
            _ => LogSource::Console,
        };
        let wanted = query.source.is_none_or(|wanted| wanted == source);
        let text = if target.caller.is_admin() { part.text } else { state.private().without(&part.text) };
        wanted.then_some(LogTail { source, text })
    });
    let logs = logs.collect();
    Ok(show::ok(&SandboxLogs { sandbox: handle.sandbox().clone(), generation: handle.generation(), logs }))
}

async fn resources(State(state): State<ServerState>, target: Target, Query(query): Query<OfGeneration>) -> Answer {
    let record = target.record(&state, query.generation).await?;
    let seen = state.engine().resources(&record).await?;
    let at_ms = seen.at_ms;
    let usage = seen.usage.map(|usage| {
        let cpu_percent = usage.cpu_us.and_then(|cpu_us| state.tally().cpu_percent(&record.id, cpu_us, at_ms));
        viv_api::resources::Usage { cpu_percent, ..usage.into() }
    });
    Ok(show::ok(&Resources {
        generation: seen.instance.generation,
        observed_at_ms: at_ms,
        via: seen.via.into(),
        usage,
        // What rests has none in force; these are what it goes on with.
        limits: (&seen.limits.unwrap_or_else(|| record.spec.limits.in_force())).into(),
        disk: seen.disk.map(Into::into),
        running_since_at_ms: (record.phase == Phase::Ready).then_some(record.phase_since_ms),
        operations: Operations { agent_requests: seen.requests, ..state.tally().operations(&record.id) },
        lacks: seen
            .lacks
            .into_iter()
            .map(|(capability, why)| (viv_api::provider::capability_name(capability), why))
            .collect(),
        sandbox: record.id,
    }))
}
