//! What a cleanup is to do about which records: pure.

use std::collections::BTreeSet;
use std::time::Duration;

use viv_core::SandboxId;
use viv_core::lifecycle::{Cause, Desired, Phase, PhaseName, Sandbox};
use viv_core::spec::Project;
use viv_store::Sums;

use super::{CleanupAction, CleanupConfig, CleanupItem, CleanupKind, CleanupOutcome};
use crate::metrics::QuotaUsed;

/// A hard deadline that passed this long ago was missed by who should have seen to it.
const MISSED_MS: u64 = 60_000;

/// What a plan is made from, beside the records.
pub(super) struct Known<'k> {
    /// In which a task is at work: neither their age nor that nothing runs in them at this moment ends them.
    pub(super) at_work: &'k BTreeSet<SandboxId>,
    /// Who goes already, by another layer or a plan before: an emergency needs nobody in their place.
    pub(super) leaving: &'k BTreeSet<SandboxId>,
    /// Who was tried and stays.
    pub(super) tried: &'k BTreeSet<SandboxId>,
    /// What is in use of the quotas of one project, or of all together, by so many of this size.
    pub(super) quotas: &'k dyn Fn(bool, u64, &Sums) -> Vec<QuotaUsed>,
    pub(super) sums_of: &'k dyn Fn(&Sandbox) -> Sums,
    pub(super) config: &'k CleanupConfig,
    pub(super) now_ms: u64,
}

impl Known<'_> {
    /// Whether there is nothing to find out about it any more.
    fn is_settled(&self, sandbox: &SandboxId) -> bool {
        self.leaving.contains(sandbox) || self.tried.contains(sandbox)
    }
}

/// Whether somebody said that it is to stay awake, by a lease that holds (L7).
pub(super) fn is_kept_awake(record: &Sandbox, now_ms: u64) -> bool {
    record.keep_awake.values().any(|lease| lease.until_ms > now_ms)
}

/// Whether its hard deadline was missed by who should have seen to it.
pub(super) fn is_past_deadline(record: &Sandbox, now_ms: u64) -> bool {
    record.expires_at_ms.is_some_and(|at_ms| now_ms > at_ms.saturating_add(MISSED_MS))
}

/// What is to be done about these records. Pure; in the order in which it is done.
fn plan(kind: CleanupKind, records: &[Sandbox], known: &Known<'_>) -> Vec<CleanupItem> {
    let (config, now_ms) = (known.config, known.now_ms);
    let old = |since_ms: u64, after: Duration| now_ms.saturating_sub(since_ms) >= after.as_millis() as u64;
    let item = |record: &Sandbox, why: String| CleanupItem {
        sandbox: record.id.clone(),
        project: record.project.clone(),
        kind,
        action: if record.policy.persistent { CleanupAction::Hibernate } else { CleanupAction::Stop },
        why,
        outcome: CleanupOutcome::Planned,
    };
    let is_up = |record: &&Sandbox| matches!(record.phase, Phase::Ready | Phase::Frozen { .. });
    // Spares have a keeper of their own, who sees to what is broken or old; in an emergency they are the first to go.
    let (spares, records): (Vec<&Sandbox>, Vec<&Sandbox>) = records.iter().partition(|record| record.is_spare());
    match kind {
        CleanupKind::Unhealthy => {
            let is_old = |record: &&Sandbox| {
                is_unwell(record)
                    && old(record.phase_since_ms, config.unhealthy_after)
                    && old(record.created_at_ms, config.unhealthy_age)
            };
            let why = |record: &Sandbox| {
                let found = record.evidence.complaint().or_else(|| record.cause.message.clone());
                let since_s = now_ms.saturating_sub(record.phase_since_ms) / 1000;
                format!("unwell for {since_s} s: {}", found.unwrap_or_else(|| "no answer".to_owned()))
            };
            records.into_iter().filter(is_old).map(|record| item(record, why(record))).collect()
        }
        CleanupKind::Leftovers => {
            let is_left = |record: &&Sandbox| {
                let is_over = matches!(record.phase, Phase::Lost | Phase::Failed { work: None });
                is_over && !record.policy.persistent && old(record.phase_since_ms, config.leftover_after)
            };
            let why = |record: &Sandbox| {
                let since_s = now_ms.saturating_sub(record.phase_since_ms) / 1000;
                format!("{} for {since_s} s, and not persistent", record.phase.name().as_str())
            };
            records.into_iter().filter(is_left).map(|record| item(record, why(record))).collect()
        }
        CleanupKind::Age => {
            let mut found = Vec::new();
            for record in records.into_iter().filter(is_up) {
                let age_s = now_ms.saturating_sub(record.created_at_ms) / 1000;
                let is_old = config.age_max.is_some_and(|max| old(record.created_at_ms, max));
                if is_past_deadline(record, now_ms) {
                    found.push(item(record, "its hard deadline has passed".to_owned()));
                } else if is_old && !known.at_work.contains(&record.id) {
                    found.push(item(record, format!("{age_s} s old")));
                }
            }
            found
        }
        CleanupKind::Emergency => {
            let is_asked = |record: &&Sandbox| is_up(record) && !known.is_settled(&record.id);
            let mut idle: Vec<&Sandbox> = records.iter().copied().filter(is_asked).collect();
            idle.retain(|record| old(record.active_at_ms.max(record.phase_since_ms), config.emergency_idle));
            idle.retain(|record| !known.at_work.contains(&record.id) && !is_kept_awake(record, now_ms));
            // Least harm first: nothing of what is saved is lost. Then who was not used for longest.
            idle.sort_by_key(|record| (!record.policy.persistent, record.active_at_ms));
            let all: Vec<&Sandbox> = spares.iter().chain(&records).copied().collect();
            let first: Vec<&Sandbox> = spares.iter().copied().filter(is_asked).chain(idle.iter().copied()).collect();
            let mut given: Vec<(&Sandbox, String)> = until_there_is_room(&all, &first, false, known);
            // Then project by project: what is free elsewhere is no use to it.
            let projects: BTreeSet<&Project> = records.iter().map(|record| &record.project).collect();
            for project in projects {
                let of = |record: &&&Sandbox| record.project == *project;
                let stay = |record: &&&Sandbox| of(record) && !given.iter().any(|(gone, _)| gone.id == record.id);
                let living: Vec<&Sandbox> = records.iter().filter(stay).copied().collect();
                let idle: Vec<&Sandbox> = idle.iter().filter(stay).copied().collect();
                let more = until_there_is_room(&living, &idle, true, known);
                given.extend(more);
            }
            given.into_iter().map(|(record, why)| item(record, why)).collect()
        }
    }
}

/// The same for several layers, in their order, after what is done or was tried before: who goes by one is not needed by
/// the next, and one is enough, whoever found it first.
pub(super) fn plan_all(
    kinds: &[CleanupKind],
    records: &[Sandbox],
    before: &[CleanupItem],
    known: &Known<'_>,
) -> Vec<CleanupItem> {
    let (room, none): (Vec<&CleanupItem>, Vec<&CleanupItem>) =
        before.iter().partition(|item| item.outcome.makes_room());
    let ids = |items: Vec<&CleanupItem>| items.into_iter().map(|item| item.sandbox.clone()).collect::<BTreeSet<_>>();
    let (mut leaving, tried) = (ids(room), ids(none));
    let mut items: Vec<CleanupItem> = Vec::new();
    for kind in kinds {
        let found = plan(*kind, records, &Known { leaving: &leaving, tried: &tried, ..*known });
        for new in found {
            if !tried.contains(&new.sandbox) && leaving.insert(new.sandbox.clone()) {
                items.push(new);
            }
        }
    }
    items
}

/// Which of the first have to go until no quota is tight, in their order, and why: those of one project, or of all.
fn until_there_is_room<'r>(
    all: &[&'r Sandbox],
    first: &[&'r Sandbox],
    in_project: bool,
    known: &Known<'_>,
) -> Vec<(&'r Sandbox, String)> {
    let goes = |record: &Sandbox| is_leaving(record) || known.leaving.contains(&record.id);
    let stays = |record: &&&Sandbox| PhaseName::MAY_LIVE.contains(&record.phase.name()) && !goes(record);
    let living = all.iter().filter(stays);
    let (mut count, mut sums) =
        living.fold((0_u64, Sums::default()), |(count, sums), record| (count + 1, sums.plus(&(known.sums_of)(record))));
    let mut found = Vec::new();
    for record in first {
        let quotas = (known.quotas)(in_project, count, &sums);
        let Some(tight) = quotas.into_iter().find(|quota| is_tight(quota, known.config.emergency_above)) else { break };
        let of_whom = if in_project { " of its project" } else { "" };
        let used = format!("{} of {} {}{of_whom} are in use", tight.used, tight.max.unwrap_or_default(), tight.name);
        let idle_s = known.now_ms.saturating_sub(record.active_at_ms) / 1000;
        let why = if record.is_spare() {
            format!("a spare, and {used}")
        } else {
            format!("not used for {idle_s} s, and {used}")
        };
        found.push((*record, why));
        count = count.saturating_sub(1);
        sums = minus(&sums, &(known.sums_of)(record));
    }
    found
}

/// Whether it is on its way out, and in time: the room that it takes is as good as made, or every look until it is gone
/// would have others make way for it.
fn is_leaving(record: &Sandbox) -> bool {
    match &record.phase {
        Phase::Hibernating { save_failed, work, .. } => !save_failed && !work.overdue,
        Phase::Stopping { work } => !work.overdue,
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopped => false,
    }
}

/// Whether it is lost because it was found unwell, or did not answer: something of it may run. Nobody waits for it.
pub(super) fn is_unwell(record: &Sandbox) -> bool {
    record.phase == Phase::Lost
        && matches!(record.cause.cause, Cause::ProbeFailed | Cause::Unresponsive)
        && record.desired == Desired::Running
        && record.entry.is_none()
}

#[expect(clippy::cast_precision_loss, reason = "a part of something")]
pub(crate) fn is_tight(quota: &QuotaUsed, above: f64) -> bool {
    quota.max.is_some_and(|max| quota.used as f64 > max as f64 * above)
}

fn minus(all: &Sums, one: &Sums) -> Sums {
    Sums {
        cpu_millis: all.cpu_millis.saturating_sub(one.cpu_millis),
        memory_bytes: all.memory_bytes.saturating_sub(one.memory_bytes),
        disk_bytes: all.disk_bytes.saturating_sub(one.disk_bytes),
        processes: all.processes.saturating_sub(one.processes),
    }
}

#[cfg(test)]
mod tests;
