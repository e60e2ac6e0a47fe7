use viv_core::lifecycle::{Actor, HibernateStep, KeepAwake, Moment, NewSandbox, Timings, Work};
use viv_core::limits::ResourceLimits;
use viv_core::spec::{Policy, SandboxSpec};
use viv_store::{Quota, SumsMax};

use super::*;

fn record(id: u8, persistent: bool, phase: Phase, active_at_ms: u64) -> Sandbox {
    let new = NewSandbox {
        id: SandboxId::from_bytes([id; 16]),
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy { persistent, ..Policy::default_for(None) },
        labels: std::collections::BTreeMap::new(),
        origin: None,
        by: Actor::part("test"),
    };
    let mut record = Sandbox::create(new, Moment { now_ms: 0, timings: &Timings::default(), no_memory: None });
    (record.phase, record.phase_since_ms, record.active_at_ms) = (phase, active_at_ms, active_at_ms);
    record
}

fn planned(kind: CleanupKind, records: &[Sandbox], max: u64, config: &CleanupConfig, now_ms: u64) -> Vec<u8> {
    planned_by(kind, records, Quota::of(max, max), &[], config, now_ms)
}

fn planned_by(
    kind: CleanupKind,
    records: &[Sandbox],
    quota: Quota,
    at_work: &[u8],
    config: &CleanupConfig,
    now_ms: u64,
) -> Vec<u8> {
    planned_after(&[kind], records, &[], quota, at_work, config, now_ms)
}

fn planned_after(
    kinds: &[CleanupKind],
    records: &[Sandbox],
    before: &[CleanupItem],
    quota: Quota,
    at_work: &[u8],
    config: &CleanupConfig,
    now_ms: u64,
) -> Vec<u8> {
    let known = Known {
        at_work: &at_work.iter().map(|id| SandboxId::from_bytes([*id; 16])).collect(),
        leaving: &BTreeSet::new(),
        tried: &BTreeSet::new(),
        quotas: &|in_project, count, sums| QuotaUsed::all(&quota, in_project, count, sums),
        sums_of: &|record| Sums::of(&record.spec.limits, &quota.weights),
        config,
        now_ms,
    };
    let found = plan_all(kinds, records, before, &known);
    let number = |item: &CleanupItem| (1..=255).find(|id| SandboxId::from_bytes([*id; 16]) == item.sandbox);
    found.iter().filter_map(number).collect()
}

/// One that was tried before, with what came of it.
fn tried(record: &Sandbox, outcome: CleanupOutcome) -> CleanupItem {
    CleanupItem {
        sandbox: record.id.clone(),
        project: record.project.clone(),
        kind: CleanupKind::Emergency,
        action: CleanupAction::Hibernate,
        why: String::new(),
        outcome,
    }
}

#[test]
fn j2_emergency_spares_who_is_idle_where_leftovers_make_room() {
    let config = CleanupConfig::default();
    let (now_ms, quota) = (3_600_000, Quota::of(5, 5));
    let records = [
        record(1, false, Phase::Lost, 0),
        record(2, false, Phase::Lost, 0),
        record(3, true, Phase::Ready, 10),
        record(4, true, Phase::Ready, 20),
        record(5, true, Phase::Ready, 30),
    ];
    let planned = |kinds: &[CleanupKind], before: &[CleanupItem]| {
        planned_after(kinds, &records, before, quota, &[], &config, now_ms)
    };
    assert_eq!(planned(&CleanupKind::ALL, &[]), [1, 2], "three of five are left");
    assert_eq!(planned(&[CleanupKind::Emergency], &[]), [3], "alone, it does not know of leftovers");
    // And where none of them could be made to go, somebody idle is.
    let stay = [&records[0], &records[1]].map(|record| tried(record, CleanupOutcome::Failed(String::new())));
    assert_eq!(planned(&[CleanupKind::Emergency], &stay), [3]);
}

#[test]
fn j2_emergency_goes_on_to_the_next_where_who_was_tried_stays() {
    let (config, quota) = (CleanupConfig::default(), Quota::of(5, 5));
    let records = [1, 2, 3, 4, 5].map(|id| record(id, true, Phase::Ready, u64::from(id)));
    let planned = |before: &[CleanupItem]| {
        planned_after(&[CleanupKind::Emergency], &records, before, quota, &[], &config, 120_000)
    };
    let first = |outcome| tried(&records[0], outcome);
    assert_eq!(planned(&[]), [1]);
    assert_eq!(planned(&[first(CleanupOutcome::Done)]), [0; 0], "there is room");
    assert_eq!(planned(&[first(CleanupOutcome::InUse)]), [2]);
    let all: Vec<CleanupItem> = records.iter().map(|record| tried(record, CleanupOutcome::InUse)).collect();
    assert_eq!(planned(&all), [0; 0], "everybody was tried");
}

#[test]
fn j2_l7_emergency_leaves_alone_who_is_kept_awake() {
    let (config, quota) = (CleanupConfig::default(), Quota::of(5, 5));
    let mut records = [1, 2, 3, 4, 5].map(|id| record(id, true, Phase::Ready, u64::from(id)));
    let until_ms = 200_000;
    records[0].keep_awake.insert("thinking".to_owned(), KeepAwake { reason: String::new(), until_ms });
    let planned = |now_ms| planned_by(CleanupKind::Emergency, &records, quota, &[], &config, now_ms);
    assert_eq!(planned(120_000), [2]);
    assert_eq!(planned(until_ms), [1], "its lease is over");
}

/// A sum that can be limited: its name, and a sandbox's limits and a quota of so much of it.
type Summed = (&'static str, fn(u64) -> ResourceLimits, fn(u64) -> SumsMax);

const SUMS: [Summed; 4] = [
    (
        "cpu_millis",
        |of| ResourceLimits { cpu_millis: Some(of), ..ResourceLimits::default() },
        |of| SumsMax { cpu_millis: Some(of), ..SumsMax::default() },
    ),
    (
        "memory_bytes",
        |of| ResourceLimits { memory_bytes: Some(of), ..ResourceLimits::default() },
        |of| SumsMax { memory_bytes: Some(of), ..SumsMax::default() },
    ),
    (
        "disk_bytes",
        |of| ResourceLimits { disk_bytes: Some(of), ..ResourceLimits::default() },
        |of| SumsMax { disk_bytes: Some(of), ..SumsMax::default() },
    ),
    (
        "processes",
        |of| ResourceLimits { processes: Some(of), ..ResourceLimits::default() },
        |of| SumsMax { processes: Some(of), ..SumsMax::default() },
    ),
];

#[test]
fn j2_emergency_takes_who_is_idle_by_least_harm_until_there_is_room() {
    let config = CleanupConfig::default();
    let records = [
        record(1, false, Phase::Ready, 10),
        record(2, true, Phase::Ready, 500),
        record(3, true, Phase::Ready, 20),
        record(4, false, Phase::Ready, 119_000),
        record(5, false, Phase::Lost, 0),
    ];
    assert_eq!(planned(CleanupKind::Emergency, &records, 5, &config, 120_000), [3], "to four of five");
    assert_eq!(planned(CleanupKind::Emergency, &records, 2, &config, 120_000), [3, 2, 1], "who was used is not idle");
    assert_eq!(planned(CleanupKind::Emergency, &records, 100, &config, 120_000), [0; 0], "there is room");
}

#[test]
fn j2_l18_emergency_makes_room_in_a_project_that_has_none_and_leaves_the_others_alone() {
    let config = CleanupConfig::default();
    let mut records = [1, 2, 3, 4, 5].map(|id| record(id, true, Phase::Ready, u64::from(id)));
    for other in &mut records[3..] {
        other.project = "other".parse().unwrap();
    }
    let emergency = CleanupKind::Emergency;
    assert_eq!(planned_by(emergency, &records, Quota::of(100, 3), &[], &config, 120_000), [1], "to two of three");
    assert_eq!(planned_by(emergency, &records, Quota::of(100, 3), &[1], &config, 120_000), [2], "a task is at work");
    assert_eq!(planned_by(emergency, &records, Quota::of(100, 100), &[], &config, 120_000), [0; 0]);
}

#[test]
fn j2_emergency_does_not_have_others_make_way_for_who_is_leaving() {
    let (config, emergency) = (CleanupConfig::default(), CleanupKind::Emergency);
    let work = |overdue| {
        let operation = "op_1".parse().unwrap();
        Work { operation, attempt: 1, deadline_at_ms: 0, retry_at_ms: 0, overdue }
    };
    let saving =
        |save_failed, overdue| Phase::Hibernating { step: HibernateStep::Save, save_failed, work: work(overdue) };
    let planned = |leaves: Phase| {
        let mut records = [1, 2, 3, 4, 5].map(|id| record(id, true, Phase::Ready, u64::from(id)));
        records[4].phase = leaves;
        planned(emergency, &records, 5, &config, 120_000)
    };
    assert_eq!(planned(Phase::Ready), [1]);
    for leaves in [saving(false, false), Phase::Stopping { work: work(false) }] {
        assert_eq!(planned(leaves), [0; 0], "four of five stay");
    }
    // Nobody knows when these are gone.
    for stays in [saving(true, false), saving(false, true), Phase::Stopping { work: work(true) }] {
        assert_eq!(planned(stays), [1]);
    }
}

#[test]
fn j2_l18_emergency_makes_room_in_each_sum_by_what_each_takes_of_it() {
    let (config, emergency) = (CleanupConfig::default(), CleanupKind::Emergency);
    for (name, limits, max) in SUMS {
        // By least harm these go as 3, 2, 1: who was used last, and is not saved, at last.
        let sized = [(1, false, 30, 40), (2, true, 20, 35), (3, true, 10, 15), (4, true, 119_000, 10)];
        let records = sized.map(|(id, persistent, active_at_ms, size)| {
            let mut record = record(id, persistent, Phase::Ready, active_at_ms);
            record.spec.limits = limits(size);
            record
        });
        let planned = |quota: Quota| planned_by(emergency, &records, quota, &[], &config, 120_000);
        let all = |of: u64| Quota { total_sums_max: max(of), ..Quota::of(100, 100) };
        assert_eq!(planned(all(125)), [0; 0], "{name}: 100 of 125 are four fifths, and not more");
        assert_eq!(planned(all(124)), [3], "{name}: 85 of 124 are left");
        assert_eq!(planned(all(106)), [3, 2], "{name}: 85 of 106 are still too much, and 50 are not");
        assert_eq!(planned(all(20)), [3, 2, 1], "{name}: who was used is not idle");
        let project = Quota { project_sums_max: max(106), ..Quota::of(100, 100) };
        assert_eq!(planned(project), [3, 2], "{name} of a project");
    }
}

#[test]
fn j2_leftovers_are_not_persistent_and_were_left_for_a_while() {
    let config = CleanupConfig::default();
    let records = [
        record(1, false, Phase::Lost, 0),
        record(2, true, Phase::Lost, 0),
        record(3, false, Phase::Failed { work: None }, 500_000),
        record(4, false, Phase::Ready, 0),
    ];
    assert_eq!(planned(CleanupKind::Leftovers, &records, 100, &config, 600_000), [1]);
    assert_eq!(planned(CleanupKind::Leftovers, &records, 100, &config, 1_100_000), [1, 3]);
}

#[test]
fn j2_age_is_a_deadline_that_was_missed_or_what_was_set() {
    let mut config = CleanupConfig::default();
    let mut records = [record(1, false, Phase::Ready, 0), record(2, true, Phase::Ready, 0)];
    records[0].expires_at_ms = Some(1_000);
    assert_eq!(planned(CleanupKind::Age, &records, 100, &config, 2_000), [0; 0], "who sees to it does");
    assert_eq!(planned(CleanupKind::Age, &records, 100, &config, 62_000), [1]);
    config.age_max = Some(Duration::from_secs(60));
    assert_eq!(planned(CleanupKind::Age, &records, 100, &config, 62_000), [1, 2]);
    let (age, quota) = (CleanupKind::Age, Quota::of(100, 100));
    let at_work = planned_by(age, &records, quota, &[1, 2], &config, 62_000);
    assert_eq!(at_work, [1], "a task keeps what is old, and no deadline");
}
