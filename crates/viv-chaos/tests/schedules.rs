//! Schedules on simulated time (L17): a day of them, daemons that die at every point, and who is not to be woken.
#![allow(missing_docs, reason = "tests")]

mod daemons;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use daemons::{EPOCH_MS, MINUTE, Place, paused};
use viv_chaos::Rng;
use viv_core::exec::ExecSpec;
use viv_core::lifecycle::{Actor, EntryKind, Phase};
use viv_core::schedule::{MissedRuns, RunOutcome, Schedule, SkipReason};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{SandboxId, ScheduleId};
use viv_engine::{CreateRequest, EngineError, Failpoint, NewSchedule, Which};
use viv_provider::conformance::program::Program;
use viv_store::{Change, Cursor, JournalFilter, Store};

const RUNS: &str = "/workspace/runs";

impl Place {
    /// A persistent sandbox that was put to sleep by nobody in particular.
    async fn asleep(&self) -> SandboxId {
        let request = CreateRequest {
            project: Project::default(),
            name: Some("box".parse().unwrap()),
            spec: SandboxSpec::default(),
            policy: Policy { persistent: true, lifetime_ms: 3_600_000, idle_ms: 900_000, ..Policy::default_for(None) },
            labels: BTreeMap::new(),
            snapshot: None,
            by: Actor::part("test"),
            key: None,
        };
        let id = self.engine.create(request).await.unwrap().view.sandbox.id;
        self.engine.wait_ready(&id, MINUTE).await.unwrap();
        self.engine.stop(&id, Actor::part("test")).await.unwrap();
        let mut record = self.engine.wait_settled(&id, MINUTE).await.unwrap().sandbox;
        assert!(matches!(record.phase, Phase::Hibernated { .. }), "{record:?}");
        (record.held, record.held_by, record.version) = (false, None, record.version + 1);
        let change = Change {
            sandbox: record,
            lines: Vec::new(),
            idempotency: None,
            quota: None,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        self.store.commit(self.epoch, change).await.unwrap();
        id
    }

    async fn every_five(&self, sandbox: &SandboxId, program: Program, missed: MissedRuns) -> ScheduleId {
        let command = ExecSpec { argv: program.argv(), limit_ms: Some(3_600_000), ..ExecSpec::default() };
        let (cron, zone) = ("*/5 * * * *".to_owned(), "Europe/Berlin".to_owned());
        let new = NewSchedule { cron, zone, command, missed, enabled: true };
        self.engine.create_schedule(sandbox, new, Actor::part("test")).await.unwrap().id
    }

    async fn schedule(&self, id: &ScheduleId) -> Schedule {
        self.store.schedule(id).await.unwrap().expect("it is there")
    }

    async fn phase(&self, id: &SandboxId) -> Phase {
        self.store.get(id).await.unwrap().unwrap().phase
    }

    /// How often the command was really run: each run leaves a line in a file that is saved and restored.
    async fn ran(&self, id: &SandboxId) -> usize {
        self.engine.ensure(id, EntryKind::Ensure, Actor::part("test")).await.unwrap();
        self.engine.wait_ready(id, MINUTE).await.unwrap();
        let handle = self.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        match handle.file_stat(RUNS).await {
            Ok(stat) => stat.size_bytes as usize / 2,
            Err(_) => 0,
        }
    }
}

fn append() -> Program {
    Program::Append { path: RUNS.to_owned() }
}

#[test]
fn l17_a_day_of_runs_wakes_runs_and_goes_back_each_time() {
    paused(async {
        let place = Place::beginning(250, |_| {}).await;
        let id = place.asleep().await;
        let schedule = place.every_five(&id, append(), MissedRuns::Skip).await;
        let before = *place.store.tail().borrow();
        // Somebody looks at it all day long, which changes nothing (T9).
        let watching = place.engine.clone();
        let which = Which::Id(id.clone());
        let watcher = tokio::spawn(async move {
            loop {
                let _ = watching.get(&Project::default(), &which, "watcher").await;
                tokio::time::sleep(Duration::from_secs(7)).await;
            }
        });
        tokio::time::sleep(MINUTE * (24 * 60 + 2)).await;
        watcher.abort();
        let kept = place.schedule(&schedule).await;
        assert_eq!((kept.runs, kept.skipped), (288, 0), "{kept:?}");
        assert!(matches!(place.phase(&id).await, Phase::Hibernated { .. }));
        let lines = place.store.journal(before, &JournalFilter::default(), 1_000_000).await.unwrap();
        let moves = lines.iter().filter(|line| line.line.kind == "sandbox.moved").count();
        assert_eq!(moves, 288 * 5, "hibernated, resuming, verifying, ready, hibernating, and back");
        assert_eq!(place.ran(&id).await, 288);
    });
}

/// Every point between two things that are durable: whoever dies there, the next one neither loses nor repeats a run.
#[test]
fn l17_a_daemon_that_dies_at_any_point_neither_loses_nor_repeats_a_run() {
    let points = [
        "schedule.due",
        "schedule.entering",
        "schedule.entered",
        "schedule.starting",
        "schedule.started",
        "schedule.ended",
        "schedule.outcome",
        "schedule.back",
        "schedule.recorded",
    ];
    for point in points {
        paused(async {
            let reached = Arc::new(AtomicBool::new(false));
            let flag = reached.clone();
            let failpoint = Failpoint(Arc::new(move |now| {
                assert!(now != point || flag.swap(true, Ordering::SeqCst), "the daemon dies at {point}, as planned");
            }));
            let mut place = Place::beginning(250, |config| config.failpoint = Some(failpoint)).await;
            let id = place.asleep().await;
            let schedule = place.every_five(&id, append(), MissedRuns::Once).await;
            while !reached.load(Ordering::SeqCst) {
                assert!(place.engine.now_ms() < EPOCH_MS + 600_000, "{point} is never reached");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            place.followed(Duration::from_secs(20), |_| {}).await;
            // Two more are due after the one at which it died.
            tokio::time::sleep(MINUTE * 11).await;
            let kept = place.schedule(&schedule).await;
            assert!(kept.run.is_none(), "{point}: {kept:?}");
            assert_eq!((kept.runs, kept.skipped), (3, 0), "{point}: {kept:?}");
            assert_eq!(kept.last.as_ref().unwrap().outcome, RunOutcome::Exited { code: 0 }, "{point}");
            assert_eq!(place.ran(&id).await, 3, "{point}");
        });
    }
}

#[test]
fn l17_a_day_with_daemons_that_die_at_random() {
    for seed in 1..=3 {
        paused(async {
            let mut rng = Rng::new(seed);
            let mut place = Place::beginning(250, |_| {}).await;
            let id = place.asleep().await;
            let schedule = place.every_five(&id, append(), MissedRuns::Once).await;
            for _ in 0..60 {
                // Some of these are within the second in which everything happens.
                let ms = if rng.chance(50) {
                    300_000 - place.engine.now_ms() % 300_000 + rng.below(1_500)
                } else {
                    rng.below(400_000)
                };
                tokio::time::sleep(Duration::from_millis(ms)).await;
                place.followed(Duration::from_millis(rng.below(20_000)), |_| {}).await;
            }
            tokio::time::sleep(MINUTE * 6).await;
            let kept = place.schedule(&schedule).await;
            let lost = place.store.journal(Cursor(0), &JournalFilter::default(), 1_000_000).await.unwrap();
            let lost = lost.iter().filter(|line| line.line.data["result"]["outcome"] == "lost").count();
            let passed = (place.engine.now_ms() - EPOCH_MS) / 300_000;
            assert_eq!(kept.runs + kept.skipped, passed, "seed {seed}: every occurrence is accounted for: {kept:?}");
            assert_eq!(place.ran(&id).await as u64 + lost as u64, kept.runs, "seed {seed}: {kept:?}");
        });
    }
}

#[test]
fn l9_who_was_stopped_by_a_user_is_not_woken() {
    paused(async {
        let place = Place::beginning(250, |_| {}).await;
        let id = place.asleep().await;
        let schedule = place.every_five(&id, append(), MissedRuns::Skip).await;
        place.engine.stop(&id, Actor::part("user")).await.unwrap();
        tokio::time::sleep(MINUTE * 11).await;
        let kept = place.schedule(&schedule).await;
        assert_eq!((kept.runs, kept.skipped), (0, 2));
        assert_eq!(kept.last.unwrap().outcome, RunOutcome::Skipped { why: SkipReason::Held });
        assert!(matches!(place.phase(&id).await, Phase::Hibernated { .. }));
        // Somebody wants it again: from then on it is woken again.
        assert_eq!(place.ran(&id).await, 0);
        tokio::time::sleep(MINUTE * 5).await;
        assert_eq!(place.schedule(&schedule).await.runs, 1);
        // And after a delete nothing does, for ever.
        place.engine.delete(&id, Actor::part("user")).await.unwrap();
        assert!(place.store.schedule(&schedule).await.unwrap().is_none());
        tokio::time::sleep(MINUTE * 11).await;
        assert_eq!(place.phase(&id).await, Phase::Stopped);
        let new = NewSchedule {
            cron: "@daily".into(),
            zone: "UTC".into(),
            command: ExecSpec { argv: append().argv(), ..ExecSpec::default() },
            missed: MissedRuns::Skip,
            enabled: true,
        };
        let refused = place.engine.create_schedule(&id, new, Actor::part("user")).await;
        assert!(matches!(refused, Err(EngineError::Gone { .. })), "{refused:?}");
    });
}

#[test]
fn l17_who_was_used_by_somebody_else_stays_awake() {
    paused(async {
        let place = Place::beginning(250, |_| {}).await;
        let id = place.asleep().await;
        let schedule = place.every_five(&id, Program::Sleep { seconds: 30 }, MissedRuns::Skip).await;
        while place.phase(&id).await != Phase::Ready {
            assert!(place.engine.now_ms() < EPOCH_MS + 600_000, "it is never woken");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        let spec = ExecSpec { argv: append().argv(), ..ExecSpec::default() };
        handle.execute(&handle.new_execution(), &spec).await.unwrap();
        tokio::time::sleep(MINUTE).await;
        assert_eq!(place.schedule(&schedule).await.runs, 1);
        assert_eq!(place.phase(&id).await, Phase::Ready);
    });
}

#[test]
fn l17_a_run_that_is_still_going_keeps_the_next_from_beginning() {
    paused(async {
        let place = Place::beginning(250, |_| {}).await;
        let id = place.asleep().await;
        let schedule = place.every_five(&id, Program::Sleep { seconds: 12 * 60 }, MissedRuns::Skip).await;
        // Another one in the same sandbox, which ends first: it goes back only when both have ended.
        let other = place.every_five(&id, append(), MissedRuns::Skip).await;
        tokio::time::sleep(MINUTE * 16).await;
        let kept = place.schedule(&schedule).await;
        assert_eq!((kept.runs, kept.skipped, kept.run.is_some()), (0, 2, true), "{kept:?}");
        assert_eq!(place.schedule(&other).await.runs, 3);
        assert_eq!(place.phase(&id).await, Phase::Ready);
        tokio::time::sleep(MINUTE * 2).await;
        let kept = place.schedule(&schedule).await;
        assert_eq!((kept.runs, kept.skipped, kept.run.is_some()), (1, 2, false), "{kept:?}");
        assert!(matches!(place.phase(&id).await, Phase::Hibernated { .. }));
    });
}

#[test]
fn l17_what_was_missed_is_made_up_for_by_policy() {
    for (missed, runs, skipped) in [(MissedRuns::Skip, 0, 1), (MissedRuns::Once, 1, 0), (MissedRuns::All, 6, 0)] {
        paused(async {
            let mut place = Place::beginning(250, |_| {}).await;
            let id = place.asleep().await;
            let schedule = place.every_five(&id, append(), missed).await;
            place.followed(MINUTE * 32, |_| {}).await;
            tokio::time::sleep(MINUTE).await;
            let kept = place.schedule(&schedule).await;
            assert_eq!((kept.runs, kept.skipped), (runs, skipped), "{missed:?}: {kept:?}");
            assert_eq!(place.ran(&id).await as u64, runs);
        });
    }
}

#[test]
fn l17_run_now_runs_once_and_is_refused_while_it_runs() {
    paused(async {
        let place = Place::beginning(250, |_| {}).await;
        let id = place.asleep().await;
        let schedule = place.every_five(&id, append(), MissedRuns::Skip).await;
        place.engine.run_schedule(&schedule, Actor::part("user")).await.unwrap();
        let again = place.engine.run_schedule(&schedule, Actor::part("user")).await;
        assert!(matches!(again, Err(EngineError::ScheduleBusy { .. })), "{again:?}");
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(place.schedule(&schedule).await.runs, 1);
        assert!(matches!(place.phase(&id).await, Phase::Hibernated { .. }));
        assert_eq!(place.ran(&id).await, 1);
    });
}

/// A suspend that arrives during a resume waits for it: the two never cross.
#[test]
fn l21_a_drain_that_arrives_during_a_resume_waits_for_it() {
    paused(async {
        let mut place = Place::beginning(250, |_| {}).await;
        let id = place.asleep().await;
        let before = *place.store.tail().borrow();
        place.engine.ensure(&id, EntryKind::Ensure, Actor::part("user")).await.unwrap();
        assert!(matches!(place.phase(&id).await, Phase::Resuming { .. }));
        place.engine.drain(MINUTE, Actor::part("admin")).await.unwrap();
        // It holds over a daemon that dies, and nothing new is taken.
        place.followed(Duration::from_secs(1), |_| {}).await;
        let refused = place.engine.ensure(&id, EntryKind::Ensure, Actor::part("user")).await;
        assert!(matches!(refused, Err(EngineError::Draining)), "{refused:?}");
        tokio::time::sleep(MINUTE).await;
        let status = place.engine.drain_status().await.unwrap();
        assert!(status.is_drained(), "{status:?}");
        let lines = place.store.journal(before, &JournalFilter::default(), 1_000).await.unwrap();
        let moves: Vec<_> =
            lines.iter().filter_map(|line| line.line.to).map(viv_core::lifecycle::PhaseName::as_str).collect();
        assert_eq!(moves, ["resuming", "verifying", "ready", "hibernating", "hibernated"]);
        // What is due meanwhile is left out, and nobody was held by it.
        let schedule = place.every_five(&id, append(), MissedRuns::Skip).await;
        tokio::time::sleep(MINUTE * 5).await;
        let kept = place.schedule(&schedule).await;
        assert_eq!(kept.last.unwrap().outcome, RunOutcome::Skipped { why: SkipReason::Draining });
        place.engine.undrain(Actor::part("admin")).await.unwrap();
        tokio::time::sleep(MINUTE * 5).await;
        assert_eq!(place.schedule(&schedule).await.runs, 1);
    });
}
