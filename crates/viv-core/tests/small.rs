//! Small things that others rely on: words, what is declared, and what is learnt of executions.
#![allow(missing_docs, reason = "tests")]

use viv_core::capability::{Capabilities, Capability};
use viv_core::exec::{ExecSpec, ExecState, ExecStatus};
use viv_core::execution::{Execution, Place, Queued, START_UNKNOWN, Stage};
use viv_core::hook::{HookPoint, Secret};
use viv_core::inside::InsideVerb;
use viv_core::lifecycle::Actor;
use viv_core::limits::ResourceLimits;
use viv_core::schedule::{RunOutcome, SkipReason};
use viv_core::snapshot::SnapshotKind;
use viv_core::spec::{Name, Project};
use viv_core::task::{EffectOutcome, TaskCause, TaskState};
use viv_core::{EndCause, FencingToken, Generation, OwnerMark, SandboxId};

#[test]
fn what_is_declared_can_be_done_and_what_bounds_is_told_when_it_is_missing() {
    let none = Capabilities::default();
    assert_eq!(none.lacks().len(), 6);
    let some = none.with(Capability::LimitCpu).without(Capability::LimitDisk, "no quota here");
    assert!(some.can(Capability::LimitCpu) && !some.can(Capability::LimitDisk));
    let lacks = some.lacks();
    assert!(!lacks.contains_key(&Capability::LimitCpu));
    assert_eq!(lacks[&Capability::LimitDisk], "no quota here");
    assert_eq!(some.without(Capability::LimitCpu, "").lacks().len(), 6);
}

#[test]
fn a_limit_that_nobody_can_keep_is_named_and_left_out() {
    let asked = ResourceLimits { memory_bytes: Some(1 << 30), processes: Some(10), ..ResourceLimits::default() };
    assert_eq!(asked.first_missing(|_| true), None);
    let no_memory = |needed| needed != Capability::LimitMemory;
    assert_eq!(asked.first_missing(no_memory), Some(Capability::LimitMemory));
    assert_eq!(asked.only(no_memory), ResourceLimits { memory_bytes: None, ..asked.clone() });
    // To ask for no limit takes nothing.
    assert_ne!(ResourceLimits::unlimited(), ResourceLimits::default());
    assert_eq!(ResourceLimits::unlimited().first_missing(|_| false), None);
}

#[test]
fn words_are_those_of_the_wire() {
    for point in HookPoint::ALL {
        assert_eq!(serde_json::to_value(point).unwrap(), point.as_str());
        assert_eq!(point.to_string(), point.as_str());
    }
    for why in [SkipReason::Held, SkipReason::Overlap, SkipReason::Missed, SkipReason::Draining] {
        assert_eq!(serde_json::to_value(why).unwrap(), why.as_str());
    }
    for kind in [SnapshotKind::Auto, SnapshotKind::Manual, SnapshotKind::Fork, SnapshotKind::Imported] {
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
    }
    for cause in [EndCause::Destroyed, EndCause::Expired, EndCause::Saved, EndCause::OomKilled, EndCause::Rebooted] {
        assert_eq!(cause.to_string(), cause.code());
        assert_eq!(serde_json::to_value(&cause).unwrap()["cause"], cause.code());
    }
    assert_eq!(EndCause::Exited { code: 3 }.to_string(), "exited with code 3");
    assert_eq!((Generation(4).to_string(), FencingToken(5).to_string()), ("4".to_owned(), "5".to_owned()));
    assert_eq!("mine".parse::<OwnerMark>().unwrap().as_str(), "mine");
    let refused = "sbx_!".parse::<SandboxId>().unwrap_err();
    assert!(refused.to_string().contains("sbx_!"), "{refused}");
}

#[test]
fn k1_words_of_a_task_are_those_of_the_wire() {
    for state in TaskState::ALL {
        assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
    }
    let causes = [
        TaskCause::Done,
        TaskCause::Exited,
        TaskCause::Signalled,
        TaskCause::OomKilled,
        TaskCause::NotStarted,
        TaskCause::Cancelled,
        TaskCause::NotPrepared,
        TaskCause::UserStop,
        TaskCause::TotalLimit,
        TaskCause::StepTimeLimit,
        TaskCause::Inactivity,
        TaskCause::Reports,
        TaskCause::SandboxLost,
    ];
    for cause in causes {
        assert_eq!(serde_json::to_value(cause).unwrap(), cause.as_str());
    }
    let failed = EffectOutcome::Failed { what: "no".to_owned() };
    for outcome in [EffectOutcome::InFlight, EffectOutcome::Done, failed, EffectOutcome::Unknown] {
        assert_eq!(serde_json::to_value(&outcome).unwrap()["outcome"], outcome.as_str());
    }
}

/// Agent and host are programs of their own: what the one says the other has to hear.
#[test]
fn what_is_said_inside_is_heard_and_of_it_schedules_mean_something_outside_too() {
    for (word, verb, outside) in
        [("schedule", InsideVerb::Schedule, true), ("step", InsideVerb::Step, false), ("gate", InsideVerb::Gate, false)]
    {
        assert_eq!((verb.as_str(), InsideVerb::of(word), verb.is_outside()), (word, Some(verb), outside));
    }
    assert_eq!((InsideVerb::of("xyzzy"), InsideVerb::of("")), (None, None));
}

#[test]
fn what_is_no_name_is_told_and_not_all_of_it_when_it_is_long() {
    let refused = |text: &str| text.parse::<Name>().unwrap_err().to_string();
    assert_eq!(refused("A b"), r#""A b" is no name for a sandbox"#);
    assert_eq!(refused(&"x".repeat(9_000)), format!("{:?} is no name for a sandbox", "x".repeat(64)));
}

#[test]
fn s6_a_secret_is_told_to_who_signs_and_to_nobody_else() {
    let secret = Secret::new("hunter2");
    assert_eq!(secret.reveal(), "hunter2");
    assert_eq!(format!("{secret:?}"), "Secret(…)");
}

#[test]
fn l17_an_outcome_is_the_end_of_the_execution() {
    assert_eq!((RunOutcome::of(&ExecState::Running), RunOutcome::of(&ExecState::Suspended)), (None, None));
    let ends = [
        (ExecState::Exited { code: 2 }, "exited"),
        (ExecState::Signalled { signal: 9 }, "signalled"),
        (ExecState::OomKilled, "oom_killed"),
        (ExecState::TimedOut, "timed_out"),
        (ExecState::Cancelled, "cancelled"),
        (ExecState::Failed { what: "none".to_owned() }, "not_started"),
        (ExecState::Lost { cause: "gone".to_owned() }, "lost"),
    ];
    for (state, word) in ends {
        assert_eq!(RunOutcome::of(&state).unwrap().as_str(), word);
    }
}

fn started(state: ExecState, concluded: bool) -> Stage {
    let status = ExecStatus {
        id: "exe_1".parse().unwrap(),
        ended_at_ms: None,
        state,
        started_at_ms: 5,
        output_bytes: 0,
        stdin_bytes: 0,
        pid: Some(7),
        argv: vec!["true".to_owned()],
        detached: false,
    };
    Stage::Started { status, concluded }
}

fn row(generation: u64, stage: Stage) -> Execution {
    let place = Place {
        project: Project::default(),
        sandbox: SandboxId::from_bytes([1; 16]),
        generation: Generation(generation),
    };
    let spec = ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() };
    Execution::asked("exe_1".parse().unwrap(), place, &spec, Actor::part("me"), 5, stage)
}

fn waiting(starting_in: Option<Generation>) -> Stage {
    Stage::Queued(Queued { spec: Box::new(ExecSpec::default()), until_ms: 9, running_max: None, starting_in })
}

#[test]
fn x1_an_end_stays_unless_it_was_only_concluded() {
    let lost = |cause: &str| ExecState::Lost { cause: cause.to_owned() };
    let (exited, failed) = (ExecState::Exited { code: 0 }, ExecState::Failed { what: "no".to_owned() });
    let (running, suspended) = (ExecState::Running, ExecState::Suspended);
    // What is known, whether it was concluded, and in which generation; what is told in the same way; whether it counts.
    let cases = [
        ((&running, false, 1), (&exited, false, 1), true),
        ((&running, false, 2), (&exited, false, 1), false),
        ((&running, false, 1), (&running, false, 2), true),
        ((&suspended, false, 1), (&lost("gone"), false, 1), false),
        ((&suspended, false, 1), (&lost("gone"), true, 1), true),
        ((&suspended, false, 1), (&exited, false, 1), true),
        ((&running, false, 1), (&lost("gone"), false, 1), true),
        ((&exited, false, 1), (&failed, false, 1), false),
        ((&exited, true, 1), (&failed, false, 1), true),
        ((&exited, true, 1), (&failed, true, 1), false),
        ((&failed, true, 1), (&exited, true, 1), true),
        ((&lost(START_UNKNOWN), true, 1), (&exited, true, 1), true),
        ((&lost(START_UNKNOWN), true, 1), (&lost("gone"), true, 1), true),
        ((&lost("gone"), true, 1), (&lost("other"), false, 1), false),
        ((&lost("gone"), true, 1), (&exited, false, 1), true),
        ((&lost("gone"), true, 1), (&exited, true, 1), false),
        ((&lost("gone"), true, 1), (&running, false, 1), false),
        ((&lost("gone"), true, 1), (&running, false, 2), true),
        ((&lost("gone"), false, 1), (&running, false, 2), false),
        ((&lost("gone"), true, 2), (&running, false, 1), false),
        ((&lost(START_UNKNOWN), true, 1), (&running, false, 1), true),
        ((&lost(START_UNKNOWN), false, 1), (&running, false, 1), false),
    ];
    for (number, (known, told, counts)) in cases.into_iter().enumerate() {
        let of = |(state, concluded, generation): (&ExecState, bool, u64)| {
            row(generation, started(state.clone(), concluded))
        };
        assert_eq!(of(known).learn(&of(told)).is_some(), counts, "case {number}: {known:?} is told {told:?}");
    }
    let begun = row(1, started(running.clone(), false));
    assert!(begun.learn(&row(1, waiting(None))).is_none(), "what was started does not wait");
    assert!(row(1, waiting(None)).learn(&begun).is_some());
}

#[test]
fn x1_what_is_learnt_is_the_newest_and_what_was_asked_is_kept() {
    let known = row(1, started(ExecState::Running, false));
    let found = Execution::found(
        Place { generation: Generation(2), project: Project::default(), sandbox: known.sandbox.clone() },
        ExecStatus { argv: vec!["other".to_owned()], ..known.status().unwrap().clone() },
        77,
    );
    assert!(known.is_asked() && !found.is_asked());
    let learnt = known.learn(&found).expect("it is of a later generation");
    assert_eq!((learnt.version, learnt.generation, learnt.learnt_at_ms), (2, Generation(2), 77));
    assert_eq!((learnt.asked_at_ms, &learnt.argv, &learnt.by), (5, &known.argv, &known.by));
    assert_eq!(learnt.stage, found.stage);
    let late = Execution { learnt_at_ms: 99, asked_at_ms: 4, ..found.clone() };
    let told = late.learn(&Execution { generation: Generation(2), ..known.clone() }).expect("who asked knows more");
    assert_eq!((told.asked_at_ms, told.learnt_at_ms, &told.by), (4, 99, &known.by));
    let silent = Execution { argv: Vec::new(), generation: Generation(2), ..known.clone() };
    assert_eq!(
        late.learn(&silent).expect("it counts").argv,
        ["other"],
        "what says nothing about it is not taken for it"
    );
    // Of two who know the same, the later one is believed.
    let moved = Execution { cwd: Some("/there".to_owned()), ..known.clone() };
    assert_eq!(known.learn(&moved).expect("it runs").cwd.as_deref(), Some("/there"));
    let unnamed = Execution { argv: Vec::new(), ..found.clone() };
    assert_eq!(unnamed.learn(&found).expect("it runs").argv, ["other"]);
}

#[test]
fn x1_what_waits_may_run_once_it_is_being_started() {
    let (queued, starting) = (row(1, waiting(None)), row(1, waiting(Some(Generation(1)))));
    assert!(queued.queued().is_some() && !queued.may_run() && starting.may_run());
    let begun = row(1, started(ExecState::Running, false));
    assert!(begun.queued().is_none() && begun.may_run() && begun.is_open());
    assert_eq!(begun.ended_at_ms(), None);
    let mut over = begun;
    over.end(ExecState::Exited { code: 0 }, 50, false);
    assert_eq!((over.ended_at_ms(), over.status().unwrap().pid, over.is_open()), (Some(50), None, false));
    assert_eq!(over.status().unwrap().ended_at_ms, Some(50), "its status says so by itself");
    // One that nobody told the time of ended when it was learnt.
    let untold = row(1, started(ExecState::Exited { code: 0 }, false));
    assert_eq!(untold.ended_at_ms(), Some(untold.learnt_at_ms));
}
