use proptest::prelude::*;

use super::*;

const MINUTE_MS: u64 = 60_000;

/// Every five minutes.
#[expect(clippy::unnecessary_wraps, reason = "others end")]
fn fives(after_ms: u64) -> Option<u64> {
    Some((after_ms / (5 * MINUTE_MS) + 1) * 5 * MINUTE_MS)
}

fn schedule(missed: MissedRuns) -> Schedule {
    Schedule {
        id: ScheduleId::from_bytes([7; 16]),
        project: Project::default(),
        sandbox: SandboxId::from_bytes([1; 16]),
        version: 1,
        cron: "*/5 * * * *".to_owned(),
        zone: "UTC".to_owned(),
        command: ExecSpec::default(),
        missed,
        enabled: true,
        made_by: Actor::part("test"),
        made_at_ms: 0,
        next_at_ms: Some(5 * MINUTE_MS),
        waiting: Vec::new(),
        run: None,
        last: None,
        runs: 0,
        skipped: 0,
    }
}

#[test]
fn l17_what_is_on_time_is_run_once() {
    let mut schedule = schedule(MissedRuns::All);
    assert!(schedule.come_due(5 * MINUTE_MS + 30_000, &fives).is_empty());
    let run = schedule.run.clone().unwrap();
    assert_eq!((run.at_ms, run.reason), (5 * MINUTE_MS, RunReason::Due));
    assert_eq!(schedule.next_at_ms, Some(10 * MINUTE_MS));
    assert!(schedule.come_due(9 * MINUTE_MS, &fives).is_empty());
    // Still going when the next is due.
    let left = schedule.come_due(10 * MINUTE_MS, &fives);
    assert_eq!(left, [Left { at_ms: 10 * MINUTE_MS, count: 1, why: SkipReason::Overlap }]);
    assert_eq!(schedule.run.as_ref(), Some(&run));
    schedule.finish(RunOutcome::Exited { code: 0 }, 11 * MINUTE_MS);
    assert_eq!((schedule.runs, schedule.skipped, schedule.run.is_none()), (1, 1, true));
    assert_eq!(schedule.last.as_ref().unwrap().at_ms, 5 * MINUTE_MS);
}

#[test]
fn l17_missed_ones_by_policy() {
    let now_ms = 33 * MINUTE_MS;
    let after = |missed, now_ms| {
        let mut schedule = schedule(missed);
        let left = schedule.come_due(now_ms, &fives);
        let run = schedule.run.as_ref().map(|run| (run.at_ms / MINUTE_MS, run.reason));
        (run, schedule.waiting.iter().map(|at_ms| at_ms / MINUTE_MS).collect::<Vec<_>>(), left.len())
    };
    assert_eq!(after(MissedRuns::Skip, now_ms), (None, vec![], 1));
    assert_eq!(after(MissedRuns::Once, now_ms), (Some((5, RunReason::MadeUp)), vec![], 0));
    assert_eq!(after(MissedRuns::All, now_ms), (Some((5, RunReason::MadeUp)), vec![10, 15, 20, 25, 30], 0));
    // One is on time beside them.
    let now_ms = 30 * MINUTE_MS + 1;
    assert_eq!(after(MissedRuns::Skip, now_ms), (Some((30, RunReason::Due)), vec![], 1));
    assert_eq!(after(MissedRuns::Once, now_ms), (Some((30, RunReason::Due)), vec![], 1));
    assert_eq!(after(MissedRuns::All, now_ms), (Some((5, RunReason::MadeUp)), vec![10, 15, 20, 25, 30], 0));
}

#[test]
fn l17_an_occurrence_is_late_by_the_millisecond() {
    let due_ms = 5 * MINUTE_MS;
    for missed in [MissedRuns::Skip, MissedRuns::Once, MissedRuns::All] {
        let after = |late_ms| {
            let mut schedule = schedule(missed);
            let left = schedule.come_due(due_ms + late_ms, &fives);
            assert!(schedule.waiting.is_empty(), "{missed:?}");
            (schedule.run.map(|run| (run.at_ms, run.reason)), left)
        };
        assert_eq!(after(LATE_MS), (Some((due_ms, RunReason::Due)), vec![]), "{missed:?}");
        let expected = match missed {
            MissedRuns::Skip => (None, vec![Left { at_ms: due_ms, count: 1, why: SkipReason::Missed }]),
            MissedRuns::Once | MissedRuns::All => (Some((due_ms, RunReason::MadeUp)), vec![]),
        };
        assert_eq!(after(LATE_MS + 1), expected, "{missed:?}");
    }
    // One was missed, and the next is just on time: each of them is there once.
    let mut both = schedule(MissedRuns::All);
    assert!(both.come_due(2 * due_ms + LATE_MS, &fives).is_empty());
    assert_eq!((both.run.map(|run| run.at_ms), both.waiting), (Some(due_ms), vec![2 * due_ms]));
}

#[test]
fn l17_what_waits_is_due_when_nothing_is_under_way_and_not_at_all_once_it_is_switched_off() {
    let exited = RunOutcome::Exited { code: 0 };
    let mut schedule = schedule(MissedRuns::All);
    assert_eq!(schedule.due_at_ms(), Some(5 * MINUTE_MS));
    schedule.come_due(33 * MINUTE_MS, &fives);
    assert_eq!(schedule.due_at_ms(), Some(35 * MINUTE_MS), "one at a time");
    schedule.finish(exited.clone(), 33 * MINUTE_MS);
    assert_eq!(schedule.due_at_ms(), Some(0), "at once");
    schedule.enable(true, 33 * MINUTE_MS, &fives);
    assert_eq!((schedule.enabled, schedule.waiting.len()), (true, 5), "it was on, and nothing is forgotten for that");
    schedule.come_due(34 * MINUTE_MS, &fives);
    let under_way = schedule.run.clone();
    assert!(under_way.is_some());
    schedule.enable(false, 34 * MINUTE_MS, &fives);
    assert_eq!((schedule.enabled, &schedule.run), (false, &under_way), "what is under way goes on");
    schedule.finish(exited, 34 * MINUTE_MS);
    assert_eq!(schedule.due_at_ms(), None);
    assert!(schedule.come_due(90 * MINUTE_MS, &fives).is_empty() && schedule.run.is_none());
    // On again, it is due after now: nothing of the time between was missed.
    schedule.enable(true, 91 * MINUTE_MS, &fives);
    assert_eq!((schedule.enabled, schedule.due_at_ms()), (true, Some(95 * MINUTE_MS)));
}

#[test]
fn l17_who_asks_gets_a_run_of_its_own_unless_one_is_under_way() {
    let mut schedule = schedule(MissedRuns::Skip);
    assert!(schedule.ask(7_000));
    let run = schedule.run.clone().unwrap();
    assert_eq!((run.at_ms, run.reason, run.began_at_ms), (7_000, RunReason::Asked, 7_000));
    assert!(!schedule.ask(8_000));
    assert_eq!(schedule.run.as_ref(), Some(&run));
    // A user stopped the sandbox meanwhile: it is counted as what was left out, and had no execution.
    let skipped = RunOutcome::Skipped { why: SkipReason::Held };
    schedule.finish(skipped.clone(), 9_000);
    assert_eq!((schedule.runs, schedule.skipped, schedule.run.is_none()), (0, 1, true));
    let last = LastRun { at_ms: 7_000, execution: None, ended_at_ms: 9_000, outcome: skipped };
    assert_eq!(schedule.last, Some(last));
    assert!(schedule.ask(10_000));
}

#[test]
fn l17_making_up_is_bounded() {
    let mut schedule = schedule(MissedRuns::All);
    let now_ms = 30 * 24 * 60 * MINUTE_MS + 2 * MINUTE_MS;
    let left = schedule.come_due(now_ms, &fives);
    assert_eq!(1 + schedule.waiting.len(), MAKE_UP_MAX);
    let last_ms = *schedule.waiting.last().unwrap();
    assert_eq!(last_ms, now_ms - 2 * MINUTE_MS, "the latest of them");
    assert_eq!(left.len(), 1);
    // Those of the last day that are not made up for, and at least one before that.
    assert_eq!(left[0], Left { at_ms: 5 * MINUTE_MS, count: 288 - 24 + 1, why: SkipReason::Missed });
}

#[test]
fn an_occurrence_has_one_execution_and_what_is_asked_for_another() {
    let id = ScheduleId::from_bytes([0xff; 16]);
    let due = execution_of(&id, 1_700_000_000_000, RunReason::Due);
    assert_eq!(due, execution_of(&id, 1_700_000_000_000, RunReason::MadeUp));
    assert_ne!(due, execution_of(&id, 1_700_000_000_000, RunReason::Asked));
    assert_ne!(due, execution_of(&id, 1_700_000_060_000, RunReason::Due));
    assert_ne!(due, execution_of(&ScheduleId::from_bytes([0; 16]), 1_700_000_000_000, RunReason::Due));
    // Also of ids as long as they may be.
    execution_of(&format!("sch_{}", "z".repeat(48)).parse().unwrap(), u64::MAX, RunReason::Due);
}

proptest! {
    /// Whenever it is looked at and however long runs take: no occurrence is run twice, none from the future, and
    /// the next one is always to come.
    #[test]
    fn l17_no_occurrence_is_run_twice(
        policy in 0..3_u8,
        looks in prop::collection::vec((1_u64..40 * MINUTE_MS, any::<bool>()), 1..60),
    ) {
        let mut schedule = schedule([MissedRuns::Skip, MissedRuns::Once, MissedRuns::All][usize::from(policy)]);
        let (mut now_ms, mut ran) = (0, Vec::new());
        for (passed_ms, ends) in looks {
            now_ms += passed_ms;
            let before = schedule.run.clone();
            schedule.come_due(now_ms, &fives);
            prop_assert!(schedule.next_at_ms > Some(now_ms));
            prop_assert!(schedule.waiting.len() <= MAKE_UP_MAX + 1);
            if before.is_none() && let Some(run) = &schedule.run {
                prop_assert!(run.at_ms <= now_ms && run.at_ms % (5 * MINUTE_MS) == 0);
                ran.push(run.at_ms);
            }
            if ends {
                schedule.finish(RunOutcome::Exited { code: 0 }, now_ms);
            }
        }
        let all = ran.len();
        ran.sort_unstable();
        ran.dedup();
        prop_assert_eq!(ran.len(), all);
    }
}
