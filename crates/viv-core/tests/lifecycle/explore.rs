//! Every record that can be reached, by breadth-first search.
//!
//! Records are made alike in what does not matter for what comes next: ids, counts and names are replaced, and times
//! are moved so that it is always the same moment, with a deadline either ahead or passed and findings either far
//! enough apart or not. What is left is finite, and all of it is visited.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::OnceLock;

use viv_core::hook::HookReport;
use viv_core::lifecycle::{
    Cause, Denial, EntryKind, Event, Evidence, Failure, FailureKind, Finding, FreezeStep, Happened, Ignored,
    KeptFrozen, Memory, Outcome, Phase, PhaseName, RestAt, ResumeStep, Sandbox, Seen, Stepped, Timings, Work,
};
use viv_core::service::ServiceFound;
use viv_core::{EndCause, Generation, SnapshotId};

use crate::laws;
use crate::setup::{
    NOW_MS, claimed, created, created_with_memory, created_with_service, delete, done, enter, evidence, incomplete,
    made, of_service, reset, rollback, seen, served, step_at, stop, user,
};

/// A deadline that is ahead.
const AHEAD_MS: u64 = 60_000;

/// Far more than there are; reached, the abstraction is not finite.
const RECORDS_MAX: usize = 50_000;

/// All that was found.
pub(crate) struct Explored {
    /// One record of each kind.
    pub(crate) records: Vec<Sandbox>,
    /// From which phase to which, by which events, for which causes.
    pub(crate) edges: BTreeMap<(PhaseName, PhaseName), BTreeSet<(&'static str, &'static str)>>,
    /// Whether a save that failed was seen to leave it where it is, by which events.
    pub(crate) saved_again: BTreeSet<&'static str>,
    /// Every answer to every event in every phase.
    pub(crate) answers: BTreeMap<(PhaseName, &'static str), BTreeSet<String>>,
}

/// Explores once for all tests.
pub(crate) fn explored() -> &'static Explored {
    static EXPLORED: OnceLock<Explored> = OnceLock::new();
    EXPLORED.get_or_init(explore)
}

fn explore() -> Explored {
    let mut found = Explored {
        records: Vec::new(),
        edges: BTreeMap::new(),
        saved_again: BTreeSet::new(),
        answers: BTreeMap::new(),
    };
    let mut known = BTreeSet::new();
    let mut ahead = VecDeque::new();
    for persistent in [false, true] {
        // What was made from a snapshot is in the model's lives.
        let first = alike(&created(persistent), NOW_MS);
        known.insert(key(&first));
        ahead.push_back(first);
    }
    for first in [created_with_service(true), created_with_memory(), claimed()] {
        let first = alike(&first, NOW_MS);
        known.insert(key(&first));
        ahead.push_back(first);
    }
    while let Some(sandbox) = ahead.pop_front() {
        assert!(known.len() < RECORDS_MAX, "the abstraction is not finite");
        for now_ms in moments(&sandbox) {
            for (word, event) in events(&sandbox, now_ms) {
                let answer = step_at(&sandbox, &event, now_ms);
                laws::check(&sandbox, &event, now_ms, &answer);
                note(&mut found, &sandbox, word, &answer);
                if let Stepped::Accepted(accepted) = answer {
                    let next = alike(&accepted.next, now_ms);
                    if known.insert(key(&next)) {
                        ahead.push_back(next);
                    }
                }
            }
        }
        found.records.push(sandbox);
    }
    found
}

fn key(sandbox: &Sandbox) -> String {
    serde_json::to_string(sandbox).expect("a record is JSON")
}

fn note(found: &mut Explored, before: &Sandbox, word: &'static str, answer: &Stepped) {
    let from = before.phase.name();
    found.answers.entry((from, word)).or_default().insert(answer_word(answer));
    let Stepped::Accepted(accepted) = answer else { return };
    let to = accepted.next.phase.name();
    if from != to {
        let by = (word, accepted.next.cause.cause.code());
        found.edges.entry((from, to)).or_default().insert(by);
    } else if let (Phase::Hibernating { save_failed: true, .. }, Happened::Retrying) =
        (&accepted.next.phase, accepted.happened)
    {
        found.saved_again.insert(word);
    }
}

/// An answer in a few words.
fn answer_word(answer: &Stepped) -> String {
    match answer {
        Stepped::Accepted(accepted) => match accepted.happened {
            Happened::Moved { to, .. } => format!("→ {}", to.as_str()),
            Happened::Wanted => "noted".to_owned(),
            Happened::Advanced => "goes on".to_owned(),
            Happened::Retrying => "tries again".to_owned(),
            Happened::Overdue => "overdue".to_owned(),
        },
        Stepped::Ignored(why) => match why {
            Ignored::StaleOperation | Ignored::StaleGeneration => "stale",
            Ignored::NothingNew => "nothing new",
            Ignored::NotDue => "not due",
            Ignored::NotIdle => "not idle",
            Ignored::Busy => "busy",
            Ignored::Misplaced => "misplaced",
        }
        .to_owned(),
        Stepped::Denied(why) => match why {
            Denial::Gone => "denied: gone",
            Denial::Held => "denied: held",
            Denial::NotNow => "denied: not now",
            Denial::Ephemeral => "denied: not persistent",
            Denial::NoFailedSave => "denied: no save has failed",
        }
        .to_owned(),
    }
}

/// The times that can make a difference to this record.
fn moments(sandbox: &Sandbox) -> BTreeSet<u64> {
    let mut moments: BTreeSet<u64> = [NOW_MS].into();
    if let Some(work) = sandbox.phase.work() {
        moments.extend([work.deadline_at_ms, work.deadline_at_ms + 1]);
    }
    if let Phase::Verifying { found_at_ms, findings: 1.., .. } = sandbox.phase {
        moments.insert(found_at_ms + Timings::default().findings_span_ms);
    }
    moments.extend(sandbox.kept_frozen.map(|kept| kept.until_ms));
    moments.extend([true, false].into_iter().filter_map(|freezes| sandbox.idle_at_ms(freezes)));
    moments.retain(|&now_ms| now_ms >= NOW_MS);
    moments
}

/// Everything that can happen.
pub(crate) fn events(sandbox: &Sandbox, now_ms: u64) -> Vec<(&'static str, Event)> {
    let mut events = vec![
        ("stop", stop()),
        ("delete", delete()),
        ("freeze", Event::Freeze { by: user() }),
        ("thaw", Event::Thaw { by: user() }),
        ("hibernate", Event::Hibernate { by: user() }),
        ("retry save", Event::RetrySave { by: user() }),
        ("discard", Event::Discard { by: user() }),
        ("idle", Event::Idle { freezes: true }),
        ("idle, cannot be frozen", Event::Idle { freezes: false }),
        ("memory is short", Event::MakeRoom { by: user() }),
        ("drain", Event::Drain { by: user() }),
        ("unwell for long", Event::Unhealthy { by: user() }),
        ("due", Event::Due),
    ];
    for (word, to) in [("back to frozen", RestAt::Frozen), ("back to hibernated", RestAt::Hibernated)] {
        // Nobody else used it since, or somebody did.
        for woken_at_ms in [sandbox.active_at_ms, 0] {
            events.push((word, Event::Rest { to, woken_at_ms, used_at_ms: 0, by: user() }));
        }
    }
    events.extend([("rollback", rollback(false)), ("rollback, discarding", rollback(true)), ("reset", reset())]);
    for kind in [EntryKind::Create, EntryKind::Ensure, EntryKind::Task, EntryKind::Gateway, EntryKind::Schedule] {
        let word = if kind.is_explicit() { "entry by will" } else { "entry by traffic" };
        events.push((word, enter(kind)));
    }
    for (word, outcome) in outcomes(sandbox, now_ms) {
        if sandbox.phase.work().is_some() {
            events.push((word, done(sandbox, outcome.clone())));
        }
        if now_ms == NOW_MS {
            let operation = "op_other".parse().expect("an id");
            events.push(("stale outcome", Event::Done { operation, outcome }));
        }
    }
    let sights = [
        ("seen running", Seen::Running),
        ("seen frozen", Seen::Frozen),
        ("seen expired", Seen::Ended(EndCause::Expired)),
        ("seen ended", Seen::Ended(EndCause::OomKilled)),
        ("seen ended", Seen::Ended(EndCause::DiskFull { what: "all of it".to_owned() })),
        ("seen ended", Seen::Ended(EndCause::MemoryLost { what: "its pages".to_owned() })),
        ("seen ended", Seen::Ended(EndCause::SupervisorLost)),
        ("seen ended", Seen::Ended(EndCause::Exited { code: 1 })),
        ("seen ended", Seen::Ended(EndCause::Rebooted)),
        ("seen ended", Seen::Ended(EndCause::Destroyed)),
        ("seen absent", Seen::Absent),
    ];
    for (word, sight) in sights {
        let event = seen(sandbox, sight, now_ms);
        if let (NOW_MS, Event::Seen { seen, observed, .. }) = (now_ms, event.clone()) {
            events.push(("stale sight", Event::Seen { generation: Generation(0), seen, observed }));
        }
        events.push((word, event));
    }
    for (word, evidence) in reports(sandbox, now_ms) {
        let word = match word {
            "probed well" => "health: well",
            "probed unhealthy" | "probed gone" => "health: bad",
            _ => "health: no answer",
        };
        events.push((word, Event::Probed { generation: sandbox.generation, evidence: evidence.clone() }));
        if now_ms == NOW_MS {
            events.push(("stale sight", Event::Probed { generation: Generation(0), evidence }));
        }
    }
    events
}

fn reports(sandbox: &Sandbox, now_ms: u64) -> Vec<(&'static str, Evidence)> {
    let mut reports = vec![
        ("probed well", evidence(Finding::Ok, now_ms)),
        ("probed unhealthy", evidence(Finding::Unhealthy, now_ms)),
        ("probed gone", evidence(Finding::Gone, now_ms)),
        ("probe timed out", evidence(Finding::Timeout, now_ms)),
    ];
    reports.extend(incomplete(now_ms).map(|evidence| ("probed in part", evidence)));
    if !sandbox.spec.services.is_empty() {
        for (_, evidence) in &mut reports {
            evidence.services = vec![of_service(Finding::Ok, now_ms)];
        }
        reports.push(("probed in part", evidence(Finding::Ok, now_ms)));
    }
    let unwell = Evidence { services: vec![of_service(Finding::Unhealthy, now_ms)], ..evidence(Finding::Ok, now_ms) };
    reports.push(("probed: a service is unwell", unwell));
    reports
}

fn outcomes(sandbox: &Sandbox, now_ms: u64) -> Vec<(&'static str, Outcome)> {
    let failed = |kind| Outcome::Failed(Failure { kind, what: "no".to_owned() });
    let mut outcomes = vec![
        ("made", made()),
        ("cleared", Outcome::Cleared),
        ("frozen", Outcome::Frozen),
        ("thawed", Outcome::Thawed),
        ("claimed", Outcome::Claimed { remaining_ms: Some(1_000) }),
        ("saved", Outcome::Saved),
        ("memory not saved", Outcome::MemoryNotSaved { why: "no".to_owned(), frozen: false }),
        ("memory not saved, still frozen", Outcome::MemoryNotSaved { why: "no".to_owned(), frozen: true }),
        ("refused", failed(FailureKind::Refused)),
        ("failed", failed(FailureKind::Failed)),
        ("unknown", failed(FailureKind::Unknown)),
    ];
    outcomes.extend(reports(sandbox, now_ms).into_iter().map(|(word, evidence)| (word, Outcome::Probed(evidence))));
    let ended = |failed| ServiceFound::Ended { how: "exited".to_owned(), failed };
    outcomes.push(("services ready", served(sandbox, ServiceFound::Ready, now_ms)));
    outcomes.push(("a service failed", served(sandbox, ended(true), now_ms)));
    outcomes.push(("a service ended", served(sandbox, ended(false), now_ms)));
    outcomes.push(("services unknown", Outcome::Served(Vec::new())));
    for point in viv_core::hook::HookPoint::ALL {
        for (word, ok) in [("hook done", true), ("hook failed", false)] {
            let what = "as it goes".to_owned();
            let report = HookReport { point, ok, what, execution: None, tail: String::new(), took_ms: 1 };
            outcomes.push((word, Outcome::Hooked(report)));
        }
    }
    outcomes
}

/// The record as it would be if this moment were [`NOW_MS`], without what makes no difference.
fn alike(sandbox: &Sandbox, now_ms: u64) -> Sandbox {
    let mut next = sandbox.clone();
    let (timings, snapshot) = (Timings::default(), "snp_s".parse().expect("an id"));
    next.version = 1;
    next.operations = 1;
    next.claimed = (next.claimed == Some(next.generation)).then_some(Generation::FIRST);
    next.generation = Generation::FIRST;
    next.phase_since_ms = NOW_MS;
    next.created_at_ms = NOW_MS;
    next.active_at_ms = NOW_MS;
    next.expires_at_ms = None;
    next.evidence = Evidence::default();
    next.cause.by = user();
    next.cause.at_ms = NOW_MS;
    next.cause.message = None;
    // Only the tombstone, and what was discarded, keep the cause of the phase before.
    let discarded = next.phase.name() == PhaseName::Hibernating && next.cause.cause == Cause::UserDiscard;
    // And what is saved for the room alone may go back.
    let for_room = next.phase.name() == PhaseName::Hibernating && next.cause.cause == Cause::MemoryShort;
    if next.phase.name() != PhaseName::Stopping && !discarded && !for_room {
        // And what is lost for a service is not remade.
        let for_a_service = next.phase.name() == PhaseName::Lost && next.cause.cause == Cause::ServiceFailed;
        next.cause.cause = if for_a_service { Cause::ServiceFailed } else { Cause::Requested };
    }
    // Services and hooks are looked at only while there is an instance that could have them.
    let (has_services, has_hook) = match next.phase.name() {
        PhaseName::Verifying => (true, true),
        PhaseName::Ready | PhaseName::Frozen | PhaseName::Lost => (true, false),
        PhaseName::Provisioning
        | PhaseName::Hibernating
        | PhaseName::Hibernated
        | PhaseName::Resuming
        | PhaseName::Failed
        | PhaseName::Stopping
        | PhaseName::Stopped => (false, false),
    };
    next.hook = next.hook.filter(|_| has_hook);
    if !has_services {
        next.services.clear();
    }
    for run in next.services.values_mut() {
        run.nudge = false;
        run.generation = Generation::FIRST;
        run.start = 1;
        run.execution = "exe_s".parse().expect("an id");
        run.after = None;
        run.since_ms = NOW_MS;
        run.ready_at_ms = None;
    }
    // What was seen last is looked at only when it is lost.
    if next.phase.name() != PhaseName::Lost {
        next.observed = None;
    }
    next.saved = sandbox.saved.as_ref().map(|_| snapshot);
    next.rests_for = next.rests_for.filter(|_| for_room);
    if let Some(kept) = &mut next.kept_frozen {
        let until_ms = if kept.until_ms > now_ms { NOW_MS + AHEAD_MS } else { 0 };
        *kept = KeptFrozen { since_ms: NOW_MS, failures: kept.failures.min(1), until_ms };
    }
    next.sealed = sandbox.sealed.as_ref().map(|_| "snp_t".parse().expect("an id"));
    if let Some(entry) = &mut next.entry {
        entry.at_ms = NOW_MS;
        entry.kind = EntryKind::Ensure;
    }
    if let Some(observed) = &mut next.observed {
        observed.at_ms = NOW_MS;
    }
    next.memory = alike_memory(sandbox);
    let (saved, back) = (next.made_from(), next.rollback.clone());
    match &mut next.phase {
        Phase::Provisioning { work, .. } | Phase::Stopping { work } | Phase::Hibernating { work, .. } => {
            same_work(work, now_ms);
        }
        Phase::Frozen { step: FreezeStep::Freeze { work } } => same_work(work, now_ms),
        Phase::Verifying { findings, found_at_ms, work, .. } => {
            same_work(work, now_ms);
            let far_apart = now_ms >= *found_at_ms + timings.findings_span_ms;
            *findings = (*findings).min(timings.findings_min);
            *found_at_ms = if far_apart { NOW_MS - timings.findings_span_ms } else { NOW_MS };
            if *findings == 0 {
                *found_at_ms = NOW_MS;
            }
        }
        Phase::Resuming { step: ResumeStep::Seal, work, snapshot, .. } => {
            same_work(work, now_ms);
            *snapshot = "snp_t".parse().expect("an id");
        }
        Phase::Resuming { step: ResumeStep::Clear, work, snapshot, .. } => {
            same_work(work, now_ms);
            *snapshot = back.or(saved).expect("what is resumed was saved, or is gone back to");
        }
        Phase::Resuming { step: ResumeStep::Make, work, snapshot, .. } => {
            same_work(work, now_ms);
            *snapshot = saved.expect("what is resumed was saved");
        }
        Phase::Hibernated { snapshot } => *snapshot = saved.expect("what is hibernated was saved"),
        Phase::Failed { work } => {
            if let Some(work) = work {
                same_work(work, now_ms);
            }
        }
        Phase::Ready | Phase::Frozen { step: FreezeStep::Done } | Phase::Lost | Phase::Stopped => {}
    }
    next
}

/// What became of its memory, where that makes a difference.
fn alike_memory(sandbox: &Sandbox) -> Option<Memory> {
    let snapshot: SnapshotId = "snp_s".parse().expect("an id");
    match (sandbox.phase.name(), sandbox.memory.as_ref()?) {
        (PhaseName::Hibernating | PhaseName::Hibernated | PhaseName::Resuming | PhaseName::Verifying, memory) => {
            Some(match memory {
                Memory::Saving => Memory::Saving,
                Memory::Kept { snapshot: kept } if sandbox.saved.as_ref() == Some(kept) => Memory::Kept { snapshot },
                Memory::Kept { .. } => Memory::Kept { snapshot: "snp_old".parse().expect("an id") },
                Memory::Restored { .. } => Memory::Restored { snapshot },
                Memory::NotSaved { .. } => Memory::NotSaved { why: String::new() },
                Memory::NotRestored { .. } => Memory::NotRestored { snapshot, why: String::new() },
            })
        }
        (
            PhaseName::Provisioning
            | PhaseName::Ready
            | PhaseName::Frozen
            | PhaseName::Lost
            | PhaseName::Failed
            | PhaseName::Stopping
            | PhaseName::Stopped,
            _,
        ) => None,
    }
}

fn same_work(work: &mut Work, now_ms: u64) {
    work.operation = "op_x1".parse().expect("an id");
    work.attempt = 1;
    work.retry_at_ms = 0;
    work.deadline_at_ms = if work.deadline_at_ms > now_ms { NOW_MS + AHEAD_MS } else { NOW_MS };
}
