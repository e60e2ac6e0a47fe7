//! The journal: a page, or a stream from a cursor on. Figures are made from it too.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use viv_api::bound::{MomentMs, Sequence};
use viv_api::error::{ApiError, ErrorCode};
use viv_api::event::EventPage;
use viv_api::header::{EVENT_STREAM, LAST_EVENT_ID};
use viv_api::path;
use viv_api::query::{ListEvents, StatsQuery};
use viv_api::stats::{AgeBucket, ProjectUse, QuotaUse, Stats, Target};
use viv_core::lifecycle::PhaseName;
use viv_core::spec::Project;
use viv_engine::metrics::{Metrics, QuotaUsed, family};
use viv_store::{Cursor, JournalFilter, JournalSearch, ListQuery, PhaseCounts, Quota, Sums};

use super::page_limit;
use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::{Query, found};
use crate::refusal::{Answer, Refusal, invalid};
use crate::show;
use crate::state::ServerState;
use crate::stream::{Pieces, UntilEnd, comment, event, pieces};
use crate::tally::{CANCEL_MS_MAX, STOP_MS_MAX, Totals};

/// Lines read at once for a stream.
const PAGE: usize = 100;

/// Records read at once for figures.
const RECORDS: usize = 1_000;

/// Projects that are told with what they use.
const PROJECTS_MAX: usize = 100;

/// Ages that are told apart: a minute, ten, an hour, six, a day.
const AGES_MS: [u64; 5] = [60_000, 600_000, 3_600_000, 21_600_000, 86_400_000];

pub(super) fn tell(table: &mut impl Table) {
    let events_op = Op::new("journal", "listEvents", Need::Read, "What happened, as a page or a stream")
        .query::<ListEvents>()
        .gives::<EventPage>(200, "A page of it, or a stream if that is what is accepted.")
        .gives_stream("", EVENT_STREAM)
        .fails(&[ErrorCode::NotFound, ErrorCode::NotAcceptable]);
    table.on(Method::Get, path::EVENTS, list, events_op);
    let stats_op = Op::new("journal", "getStats", Need::Read, "Figures about all sandboxes")
        .query::<StatsQuery>()
        .gives::<Stats>(200, "The figures.");
    table.on(Method::Get, path::STATS, stats, stats_op);
}

/// What a reader wants to have.
enum Wanted {
    Page,
    Stream,
}

fn wanted(headers: &HeaderMap) -> Answer<Wanted> {
    let Some(accept) = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()) else {
        return Ok(Wanted::Page);
    };
    for one in accept.split(',') {
        match one.split(';').next().unwrap_or_default().trim() {
            "application/json" | "application/*" | "*/*" => return Ok(Wanted::Page),
            EVENT_STREAM | "text/*" => return Ok(Wanted::Stream),
            _ => {}
        }
    }
    let error = ApiError::new(ErrorCode::NotAcceptable, "events are told as application/json or text/event-stream");
    Err(Refusal(error.hint("send one of the two as Accept, or nothing")))
}

async fn list(
    State(state): State<ServerState>,
    caller: Caller,
    Query(query): Query<ListEvents>,
    headers: HeaderMap,
    until_end: UntilEnd,
) -> Answer {
    let wanted = wanted(&headers)?;
    let sandbox = match &query.sandbox {
        None => None,
        Some(named) => {
            let (project, which) = found(&state, &caller, named).await?;
            Some(state.engine().get(&project, &which, "events").await?.sandbox.id)
        }
    };
    let since_ms = query.since_ms.map(MomentMs::get);
    let filter = JournalFilter { project: caller.sees().cloned(), sandbox, since_ms };
    let search = JournalSearch {
        kind: query.kind.map(String::from),
        cause: query.cause.map(String::from),
        by: query.by.map(String::from),
        from: query.address.map(String::from),
        until_ms: query.until_ms.map(MomentMs::get),
    };
    // A browser that lost its connection says itself what it has seen.
    let seen = headers.get(LAST_EVENT_ID).map(|value| value.to_str().ok().and_then(|text| text.parse().ok()));
    let seen: Option<Sequence> = match seen {
        Some(None) => return Err(invalid("Last-Event-ID is no place in the journal", "send the id of the last event")),
        Some(seen) => seen,
        None => None,
    };
    let after = seen.or(query.after).map_or(0, Sequence::get);
    match wanted {
        Wanted::Page => page(&state, Cursor(after), &filter, &search, page_limit(query.limit)).await,
        Wanted::Stream => {
            let alive = (state.bounds().heartbeat, comment);
            let is_admin = caller.is_admin();
            Ok(pieces(EVENT_STREAM, alive, until_end, move |out| {
                follow(state, is_admin, Cursor(after), filter, search, out)
            }))
        }
    }
}

/// A page. Of what is looked for it may be shorter than there are more, or empty: so much is read for it and no more.
async fn page(
    state: &ServerState,
    after: Cursor,
    filter: &JournalFilter,
    search: &JournalSearch,
    limit: usize,
) -> Answer {
    let found = state.engine().events_page(after, filter, search, limit).await?;
    let oldest = state.engine().events(Cursor(0), &JournalFilter::default(), 1).await?;
    let items = found.lines.into_iter().map(show::event).collect();
    let oldest_seq = oldest.first().map_or(0, |line| line.cursor.0);
    Ok(show::ok(&EventPage { items, next_after: found.until.0, more: found.more, oldest_seq }))
}

/// Somebody who follows, counted until this is dropped.
struct Follower(Metrics);

impl Follower {
    fn of(state: &ServerState) -> Self {
        let metrics = state.engine().metrics().clone();
        metrics.add(&family::FOLLOWERS, &[], 1.0);
        Self(metrics)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.add(&family::FOLLOWERS, &[], -1.0);
    }
}

/// Tells lines as they are written. It reads on only when the reader has taken what was read before, so a slow one
/// costs a page of lines; who takes nothing at all is let go by the connection.
async fn follow(
    state: ServerState,
    is_admin: bool,
    mut after: Cursor,
    filter: JournalFilter,
    search: JournalSearch,
    out: Pieces,
) {
    let _follower = Follower::of(&state);
    let store = state.engine().store();
    let mut tail = store.tail();
    if out.give(comment()).await.is_err() {
        return;
    }
    loop {
        // Seen before reading, so that what is written between the two rings again.
        let newest = *tail.borrow_and_update();
        loop {
            let lines = match store.journal(after, &filter, PAGE).await {
                Ok(lines) => lines,
                Err(error) => {
                    tracing::warn!(component = "server", %error, "a stream of events broke off");
                    return;
                }
            };
            let full = lines.len() == PAGE;
            for line in lines {
                after = line.cursor;
                if !search.takes(&line.line) {
                    continue;
                }
                let mut shown = show::event(line);
                if !is_admin {
                    state.private().event(&mut shown);
                }
                if out.give(event(Some(shown.seq), &shown.kind, &shown)).await.is_err() {
                    return;
                }
            }
            if !full {
                break;
            }
        }
        // What was filtered away need not be read again.
        after = after.max(newest);
        if tail.changed().await.is_err() {
            return;
        }
    }
}

async fn stats(State(state): State<ServerState>, caller: Caller, Query(query): Query<StatsQuery>) -> Answer {
    let engine = state.engine();
    let project = caller.sees();
    let all = engine.stats(project).await?.phases;
    // Spares take room, and are nobody's sandboxes: only who sees all is told of them, and apart.
    let spares = if project.is_none() { engine.stats(Some(&Project::spares())).await?.phases } else { [].into() };
    let sum = |of: &PhaseCounts| PhaseName::MAY_LIVE.iter().filter_map(|phase| of.get(phase)).sum::<u64>();
    let spare = |phase: &PhaseName| spares.get(phase).copied().unwrap_or_default();
    let counted: PhaseCounts = all.iter().map(|(phase, count)| (*phase, count.saturating_sub(spare(phase)))).collect();
    let of = |phases: &[PhaseName]| phases.iter().filter_map(|phase| counted.get(phase)).sum::<u64>();
    let totals = state.tally().totals(engine.store().as_ref(), project).await?;
    let now_ms = engine.now_ms();
    let mut ages: Vec<AgeBucket> =
        AGES_MS.iter().map(|&ms| Some(ms)).chain([None]).map(|up_to_ms| AgeBucket { up_to_ms, count: 0 }).collect();
    let mut asked = ListQuery {
        project: project.cloned(),
        phases: PhaseName::MAY_LIVE.to_vec(),
        limit: RECORDS,
        ..ListQuery::default()
    };
    let quota = &engine.config().quota;
    let mut sums = Sums::default();
    let mut by_project: BTreeMap<Project, (u64, Sums)> = BTreeMap::new();
    // In proportion to those that live, which a quota bounds.
    loop {
        let listed = engine.store().list(&asked).await?;
        for record in &listed.items {
            let weighed = Sums::of(&record.spec.limits, &quota.weights);
            sums = sums.plus(&weighed);
            if record.is_spare() {
                continue;
            }
            let (count, of_project) = by_project.entry(record.project.clone()).or_default();
            (*count, *of_project) = (*count + 1, of_project.plus(&weighed));
            let age_ms = now_ms.saturating_sub(record.created_at_ms);
            let bucket = ages.iter_mut().find(|bucket| bucket.up_to_ms.is_none_or(|up_to_ms| age_ms <= up_to_ms));
            if let Some(bucket) = bucket {
                bucket.count += 1;
            }
        }
        asked.after = listed.next;
        if asked.after.is_none() {
            break;
        }
    }
    let slo = if query.slo { targets(&totals) } else { Vec::new() };
    Ok(show::ok(&Stats {
        at_ms: now_ms,
        active: of(&PhaseName::MAY_LIVE),
        provisioning: of(&[PhaseName::Provisioning, PhaseName::Verifying, PhaseName::Resuming]),
        terminating: of(&[PhaseName::Stopping, PhaseName::Hibernating]),
        hibernated: of(&[PhaseName::Hibernated]),
        spare: sum(&spares),
        by_status: counted.iter().map(|(phase, count)| (phase.as_str().to_owned(), *count)).collect(),
        created_total: totals.created,
        destroyed_total: totals.destroyed,
        lost_total: totals.lost,
        failed_total: totals.failed,
        quotas: QuotaUsed::all(quota, project.is_some(), sum(&all), &sums).iter().map(quota_use).collect(),
        projects: if project.is_none() { projects(quota, by_project) } else { Vec::new() },
        ages,
        slo,
    }))
}

/// Those with the most sandboxes.
fn projects(quota: &Quota, all: BTreeMap<Project, (u64, Sums)>) -> Vec<ProjectUse> {
    let mut all: Vec<_> = all.into_iter().collect();
    all.sort_by_key(|(_, (count, _))| std::cmp::Reverse(*count));
    let told = all.into_iter().take(PROJECTS_MAX).map(|(project, (count, sums))| ProjectUse {
        project: project.to_string(),
        quotas: QuotaUsed::all(quota, true, count, &sums).iter().map(quota_use).collect(),
    });
    told.collect()
}

fn quota_use(quota: &QuotaUsed) -> QuotaUse {
    QuotaUse { name: quota.name.to_owned(), used: quota.used, max: quota.max }
}

/// How the targets are met that can be counted from the journal (O2).
fn targets(totals: &Totals) -> Vec<Target> {
    let target = |name: &str, percent: u64, words: String, numerator: u64, denominator: u64| {
        let met = (denominator > 0).then(|| numerator * 100 > denominator * percent);
        Target { name: name.to_owned(), target: words, numerator, denominator, met }
    };
    let rare = |name: &str, percent: u64, numerator: u64, denominator: u64| {
        let met = (denominator > 0).then(|| numerator * 100 < denominator * percent);
        Target { name: name.to_owned(), target: format!("< {percent} %"), numerator, denominator, met }
    };
    let above = |percent: u64| format!("> {percent} %");
    let cancelled = format!("> 95 % within {} s", CANCEL_MS_MAX / 1000);
    let in_time = format!("> 95 % within {} s", STOP_MS_MAX / 1000);
    vec![
        target("stop_success", 95, above(95), totals.stopped, totals.stops),
        target("stop_time", 95, in_time, totals.stopped_in_time, totals.stopped),
        target("recreate_success", 95, above(95), totals.recreated, totals.recreates),
        target("resume_success", 90, above(90), totals.resumed, totals.resumes),
        target("cancel_time", 95, cancelled, totals.cancelled_in_time, totals.cancels),
        rare("cancel_mistaken", 1, totals.cancels_mistaken, totals.cancels),
        rare("timeout_rate", 2, totals.timed_out, totals.ends),
        rare("inactivity_rate", 5, totals.inactive, totals.tasks),
        rare("inactivity_mistaken", 2, totals.inactive_mistaken, totals.inactive),
    ]
}
