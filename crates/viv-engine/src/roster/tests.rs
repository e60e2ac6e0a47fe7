use viv_core::lifecycle::{Actor, FreezeStep, Moment, NewSandbox, Timings, Work};
use viv_core::limits::{ResourceLimits, UNLIMITED};
use viv_core::spec::{Policy, SandboxSpec};

use super::*;

const STUCK_AFTER_MS: u64 = 600_000;

fn record(n: u8) -> Sandbox {
    let new = NewSandbox {
        id: SandboxId::from_bytes([n; 16]),
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy::default_for(None),
        labels: BTreeMap::new(),
        origin: None,
        by: Actor::part("test"),
    };
    Sandbox::create(new, Moment { now_ms: 0, timings: &Timings::default(), no_memory: None })
}

fn ready(n: u8) -> Sandbox {
    Sandbox { phase: Phase::Ready, ..record(n) }
}

fn weights() -> Weights {
    let sums = |each| Sums { cpu_millis: each, memory_bytes: each, disk_bytes: each, processes: each };
    Weights { unsaid: sums(7), unlimited: sums(u64::MAX) }
}

fn roster() -> Roster {
    Roster::new(weights(), Some(STUCK_AFTER_MS))
}

fn work(draw: &mut impl FnMut(u64) -> u64) -> Work {
    let operation = "op_1".parse().unwrap();
    Work { operation, attempt: 1, deadline_at_ms: draw(2_000), retry_at_ms: 0, overdue: draw(5) == 0 }
}

/// As it may be written next.
fn changed(before: &Sandbox, draw: &mut impl FnMut(u64) -> u64) -> Sandbox {
    let mut next = Sandbox { version: before.version + 1, ..before.clone() };
    next.phase = match draw(7) {
        0 => Phase::Stopping { work: work(draw) },
        1 => Phase::Frozen { step: FreezeStep::Freeze { work: work(draw) } },
        2 => Phase::Frozen { step: FreezeStep::Done },
        3 => Phase::Lost,
        4 => Phase::Stopped,
        5 => Phase::Failed { work: (draw(2) == 0).then(|| work(draw)) },
        _ => Phase::Ready,
    };
    next.cause.cause = [Cause::KillFailed, Cause::UserStop, Cause::DeadlinePassed][draw(3) as usize].clone();
    let projects = ["a", "b", "c"].map(|name| name.parse().unwrap());
    next.project = projects.into_iter().chain([Project::spares()]).nth(draw(4) as usize).unwrap();
    let limit = [None, Some(UNLIMITED), Some(u64::MAX - 1), Some(draw(100))][draw(4) as usize];
    next.spec.limits = ResourceLimits { memory_bytes: limit, disk_bytes: limit, ..ResourceLimits::default() };
    next.expires_at_ms = (draw(2) == 0).then(|| draw(2_000));
    next
}

/// The same from the records themselves: sums of all, the most of a project, and who is overdue.
fn recount(records: &BTreeMap<SandboxId, Sandbox>, now_ms: u64) -> (Sums, (u64, Sums), Wrong, BTreeSet<SandboxId>) {
    let (mut sums, mut projects) = (Sums::default(), BTreeMap::<Project, (u64, Sums)>::new());
    let (mut wrong, mut expired) = (Wrong::default(), BTreeSet::new());
    let add = |group: &mut Group, id: &SandboxId| {
        group.count += 1;
        group.named.push(id.clone());
    };
    for record in records.values().filter(|record| PhaseName::MAY_LIVE.contains(&record.phase.name())) {
        let one = Sums::of(&record.spec.limits, &weights());
        sums = sums.plus(&one);
        if !record.is_spare() {
            let (count, sums) = projects.entry(record.project.clone()).or_default();
            (*count, *sums) = (*count + 1, sums.plus(&one));
        }
        let is_over = matches!(record.phase, Phase::Lost | Phase::Failed { .. });
        if record.phase.work().is_some_and(|work| work.overdue || work.deadline_at_ms < now_ms) {
            add(&mut wrong.overdue, &record.id);
        } else if is_over && record.cause.cause == Cause::DeadlinePassed {
            add(&mut wrong.given_up, &record.id);
        }
        if matches!(record.phase, Phase::Stopping { .. }) && record.cause.cause == Cause::KillFailed {
            add(&mut wrong.kill_failed, &record.id);
        }
        if record.lives_until_ms().is_some_and(|at_ms| at_ms <= now_ms) {
            expired.insert(record.id.clone());
        }
    }
    let mut most = [0; 5];
    for (count, sums) in projects.into_values() {
        let [cpu, memory, disk, processes] = parts(&sums);
        for (most, used) in most.iter_mut().zip([count, cpu, memory, disk, processes]) {
            *most = used.max(*most);
        }
    }
    (sums, counted(most), wrong, expired)
}

#[test]
fn l18_o4_what_is_kept_is_what_a_recount_finds_after_any_writes() {
    let mut state = 1_u64;
    let mut draw = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (roster, mut records) = (roster(), BTreeMap::new());
    for round in 0..2_000 {
        let n = u8::try_from(draw(9)).unwrap();
        let before = records.remove(&record(n).id).unwrap_or_else(|| record(n));
        let next = changed(&before, &mut draw);
        roster.attend(&next, None);
        // Who comes late with what was before changes nothing, unless it is over by now.
        if !next.is_over() {
            roster.attend(&before, None);
        }
        records.insert(next.id.clone(), next);
        let now_ms = draw(2_000);
        let expired: BTreeSet<SandboxId> = roster.expired(now_ms).into_iter().collect();
        let kept = (roster.sums(), roster.most_of_a_project(), roster.wrong(now_ms), expired);
        assert_eq!(kept, recount(&records, now_ms), "round {round}");
        assert_eq!(roster.unlike(&living(&records)), [], "round {round}");
    }
    for record in records.values() {
        roster.attend(&Sandbox { version: record.version + 1, phase: Phase::Stopped, ..record.clone() }, None);
    }
    let kept = roster.lock();
    let sizes = [kept.living.len(), kept.working.len(), kept.deadlines.len(), kept.unused.len(), kept.projects.len()];
    assert_eq!((sizes, kept.total), ([0; 5], Held::default()), "what is over is not remembered");
    assert!(kept.given_up.is_empty());
    assert!(kept.used.iter().all(BTreeSet::is_empty));
}

/// What `provider-sync` reads.
fn living(records: &BTreeMap<SandboxId, Sandbox>) -> BTreeMap<SandboxId, Sandbox> {
    let is_read = |record: &Sandbox| !matches!(record.phase.name(), PhaseName::Failed | PhaseName::Stopped);
    records.iter().filter(|(_, record)| is_read(record)).map(|(id, record)| (id.clone(), record.clone())).collect()
}

#[test]
fn j1_what_was_written_without_a_word_is_found_by_comparing() {
    let (roster, known, other) = (roster(), ready(1), ready(2));
    roster.attend(&known, None);
    let later = Sandbox { version: known.version + 1, ..known.clone() };
    let records = [&later, &other].map(|record| (record.id.clone(), record.clone())).into();
    assert_eq!(roster.unlike(&records), [later.id.clone(), other.id.clone()]);
    assert_eq!(roster.unlike(&BTreeMap::new()), [known.id], "and who is not there any more");
}

#[test]
fn o5_who_stalls_is_called_so_until_something_happens_and_is_read_once() {
    let (roster, sandbox) = (roster(), ready(1));
    let stalls_ms = long_at_ms(0, STUCK_AFTER_MS);
    roster.attend(&sandbox, None);
    assert!(roster.due_unused(stalls_ms - 1).is_empty());
    assert_eq!(roster.due_unused(stalls_ms), std::slice::from_ref(&sandbox.id));
    let since_ms = roster.look(&sandbox, None, stalls_ms).expect("it is asked too");
    roster.heard(&sandbox.id, since_ms, Heard::Nothing, stalls_ms);
    assert_eq!(roster.wrong(stalls_ms).stalled.named, std::slice::from_ref(&sandbox.id));
    assert!(roster.due_unused(stalls_ms + ASKED_EVERY_MS - 1).is_empty(), "nothing is due of it");
    roster.used(&sandbox.id, stalls_ms + 5);
    assert_eq!(roster.wrong(stalls_ms + 5), Wrong::default());
    assert!(roster.due_unused(stalls_ms + 5 + STUCK_AFTER_MS).is_empty(), "and begins anew");
    // Who comes late with a record of before that does not undo it.
    roster.attend(&Sandbox { version: 2, ..sandbox.clone() }, None);
    assert!(roster.due_unused(stalls_ms + 5 + STUCK_AFTER_MS).is_empty());
    roster.attend(&Sandbox { version: 3, phase: Phase::Lost, ..sandbox }, None);
    assert!(roster.due_unused(u64::MAX).is_empty());
}

#[test]
fn o5_who_was_given_up_at_a_deadline_is_named_for_a_while_or_until_somebody_comes_for_it() {
    let since_ms = 1_000;
    let over = |n: u8, phase: Phase, cause: Cause| {
        let mut record = Sandbox { phase, phase_since_ms: since_ms, ..record(n) };
        record.cause.cause = cause;
        record
    };
    let (roster, failed) = (roster(), Phase::Failed { work: None });
    for (n, phase, cause) in [
        (1, failed.clone(), Cause::DeadlinePassed),
        (2, Phase::Lost, Cause::Unresponsive),
        (3, Phase::Lost, Cause::AbsenceUnproven),
        // These ended at once, and not at a deadline.
        (4, failed, Cause::CreateFailed),
        (5, Phase::Lost, Cause::Crashed),
    ] {
        roster.attend(&over(n, phase, cause), None);
    }
    let named = |now_ms: u64| roster.wrong(now_ms).given_up.named;
    let [first, second, third] = [1, 2, 3].map(|n| record(n).id);
    assert_eq!(named(since_ms), [first.clone(), second.clone(), third.clone()]);
    roster.attend(&Sandbox { version: 2, ..record(1) }, None);
    assert_eq!(named(since_ms + GIVEN_UP_TOLD_MS - 1), [second.clone(), third.clone()], "the first is made again");
    roster.attend(&Sandbox { version: 2, phase: Phase::Stopped, ..record(2) }, None);
    assert_eq!(named(since_ms + GIVEN_UP_TOLD_MS - 1), [third]);
    assert!(named(since_ms + GIVEN_UP_TOLD_MS).is_empty(), "that was long ago");
}

#[test]
fn o5_who_is_asked_is_asked_less_and_less_while_the_answer_is_the_same() {
    let (roster, sandbox) = (roster(), ready(1));
    // It is put to rest in a day, so it is not stalled.
    let idle_at_ms = Some(86_400_000);
    roster.attend(&sandbox, idle_at_ms);
    let (mut asked, mut now_ms) = (Vec::new(), 0);
    while now_ms < 7_200_000 {
        if !roster.due_unused(now_ms).is_empty() {
            let since_ms = roster.look(&sandbox, idle_at_ms, now_ms).expect("nothing else is due");
            let heard = if now_ms < 5_400_000 { Heard::Nothing } else { Heard::Silence };
            roster.heard(&sandbox.id, since_ms, heard, now_ms);
            asked.push(now_ms / 60_000);
        }
        now_ms += 1_000;
    }
    assert_eq!(asked, [10, 11, 13, 17, 25, 40, 55, 70, 85, 100, 101, 103, 107, 115]);
    assert_eq!(roster.wrong(now_ms).silent.named, std::slice::from_ref(&sandbox.id));
    roster.ended(&sandbox.id, now_ms);
    let since_ms = roster.look(&sandbox, idle_at_ms, now_ms).expect("an end is news");
    // What speaks is asked when it could have been silent for long.
    let until_ms = now_ms + STUCK_AFTER_MS;
    roster.heard(&sandbox.id, since_ms, Heard::Words { until_ms }, now_ms);
    assert_eq!(roster.wrong(now_ms), Wrong::default());
    assert!(roster.due_unused(until_ms - 1).is_empty());
    assert_eq!(roster.due_unused(until_ms), [sandbox.id]);
}

#[test]
fn o5_what_has_ended_since_it_was_read_does_not_begin_anew() {
    let (roster, sandbox) = (roster(), ready(1));
    roster.attend(&sandbox, None);
    roster.attend(&Sandbox { version: 2, phase: Phase::Stopped, ..sandbox.clone() }, None);
    assert_eq!(roster.look(&sandbox, None, u64::MAX), None);
    assert_eq!((roster.sums(), roster.wrong(u64::MAX)), (Sums::default(), Wrong::default()));
}
