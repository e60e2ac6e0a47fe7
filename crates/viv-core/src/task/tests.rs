use proptest::prelude::*;

use super::*;

pub(super) fn task(steps: usize) -> Task {
    let new = NewTask {
        id: TaskId::from_bytes([7; 16]),
        project: Project::default(),
        sandbox: None,
        make: None,
        files: Vec::new(),
        source: None,
        steps: vec![ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() }; steps],
        limits: TaskLimits { reports_max: Some(3), ..TaskLimits::default() },
        effects: vec![
            EffectRule { name: "push".to_owned(), repeatable: false },
            EffectRule { name: "note".to_owned(), repeatable: true },
        ],
        credentials: [("TOKEN".to_owned(), "secret".to_owned())].into(),
        keep_alive: true,
        by: Actor::part("test"),
        body_hash: None,
    };
    Task::new(new, 1)
}

pub(super) fn after(task: &Task, event: &TaskEvent) -> Task {
    match step(task, event, 10) {
        TaskStepped::Accepted(next) => *next,
        other => panic!("{event:?} of {:?}: {other:?}", task.state),
    }
}

fn denied(task: &Task, event: &TaskEvent) -> TaskDenial {
    match step(task, event, 10) {
        TaskStepped::Denied(why) => why,
        other => panic!("{event:?} of {:?}: {other:?}", task.state),
    }
}

pub(super) fn running(steps: usize) -> Task {
    let entered = TaskEvent::Entered { generation: Generation(1), came: Came::Made };
    let events = [TaskEvent::TakenUp, entered, TaskEvent::Prepared, TaskEvent::Starting { step: Some(0) }];
    events.iter().fold(task(steps), |task, event| after(&task, event))
}

pub(super) fn request(number: u8) -> RequestId {
    RequestId::from_bytes([number; 16])
}

pub(super) fn ask(number: u8, effect: &str) -> TaskEvent {
    TaskEvent::Asked { request: request(number), effect: effect.to_owned(), gated: true }
}

pub(super) fn ended(number: u8) -> TaskEvent {
    TaskEvent::EffectEnded { request: request(number), failed: None }
}

pub(super) fn exited(step: u32, code: i32) -> TaskEvent {
    TaskEvent::StepEnded { step, ended: ExecState::Exited { code } }
}

pub(super) fn stop() -> TaskEvent {
    TaskEvent::Stop { by: Actor::part("test") }
}

#[test]
fn k1_steps_are_run_one_after_the_other() {
    let first = running(2);
    assert_eq!((first.work(), first.step), (TaskWork::Run, 0));
    let second = after(&first, &exited(0, 0));
    assert_eq!((second.work(), second.step), (TaskWork::Run, 1));
    let second = after(&second, &TaskEvent::Starting { step: Some(1) });
    assert_ne!(second.executions[0].id, second.executions[1].id);
    let over = after(&after(&second, &exited(1, 0)), &TaskEvent::Confirmed);
    assert_eq!(over.state, TaskState::Succeeded);
    let failed = after(&after(&first, &exited(0, 3)), &TaskEvent::Confirmed);
    assert_eq!((failed.state, failed.ending.unwrap().cause), (TaskState::Failed, TaskCause::Exited));
}

#[test]
fn k5_after_a_stop_nothing_is_granted() {
    let stopped = after(&running(1), &stop());
    assert_eq!(denied(&stopped, &ask(1, "push")), TaskDenial::Ending);
    let over = after(&stopped, &TaskEvent::Confirmed);
    assert_eq!(over.state, TaskState::Stopped);
    assert_eq!(denied(&over, &ask(1, "push")), TaskDenial::Over);
}

#[test]
fn k2_after_a_stop_nothing_is_started() {
    let entered = TaskEvent::Entered { generation: Generation(1), came: Came::Made };
    let preparing = after(&after(&task(1), &TaskEvent::TakenUp), &entered);
    let between = after(&running(2), &exited(0, 0));
    for (task, step_to) in [(preparing, None), (between, Some(1))] {
        let starting = TaskEvent::Starting { step: step_to };
        assert_eq!(after(&task, &starting).executions.len(), task.executions.len() + 1);
        assert_eq!(step(&after(&task, &stop()), &starting, 10), TaskStepped::Ignored, "{starting:?}");
    }
}

#[test]
fn k1_a_sandbox_is_held_by_who_has_begun_and_has_not_ended() {
    for state in TaskState::ALL {
        let one = Task { state, ..task(1) };
        assert_eq!(one.is_at_work(), state != TaskState::Queued && !state.is_final(), "{state:?}");
    }
}

#[test]
fn k6_each_sandbox_that_takes_the_place_of_the_last_is_another() {
    let preparing = after(&task(1), &TaskEvent::TakenUp);
    let moved = after(&preparing, &TaskEvent::Moved { to: preparing.next_sandbox() });
    assert_eq!(moved.sandbox, preparing.next_sandbox());
    let all = [&preparing.sandbox, &moved.sandbox, &moved.next_sandbox()];
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2], "{all:?}");
}

#[test]
fn k1_a_step_knows_its_task_and_begins_where_its_source_is() {
    let source = GitSource { url: "/repo".to_owned(), reference: None, path: "/src".to_owned() };
    let mut task = Task { source: Some(source), ..running(2) };
    task.steps[1].cwd = Some("/elsewhere".to_owned());
    let first = task.command(0).unwrap();
    assert_eq!((&first.argv, first.cwd.as_deref()), (&task.steps[0].argv, Some("/src")));
    let told = |name: &str| first.env.get(name).map(String::as_str);
    assert_eq!((told("VIV_TASK"), told("VIV_TASK_RUN")), (Some(task.id.as_str()), Some("1")));
    assert_eq!((told("VIV_TASK_SESSION"), told("TOKEN")), (None, None), "what is granted is not in it (K5)");
    assert_eq!(task.command(1).unwrap().cwd.as_deref(), Some("/elsewhere"));
    assert_eq!(task.command(2), None);
    task.session = Some("thread-7".to_owned());
    assert_eq!(task.command(0).unwrap().env.get("VIV_TASK_SESSION").map(String::as_str), Some("thread-7"));
}

#[test]
fn k5_a_stop_that_finds_an_effect_in_flight_says_so_and_waits_for_it() {
    let committing = after(&running(1), &ask(1, "push"));
    assert_eq!(committing.state, TaskState::Committing);
    let stopped = after(&committing, &stop());
    assert_eq!(stopped.stop.as_ref().unwrap().effect_in_flight.as_deref(), Some("push"));
    let done = after(&after(&stopped, &ended(1)), &TaskEvent::Confirmed);
    assert_eq!((done.state, &done.grants[0].outcome), (TaskState::Stopped, &EffectOutcome::Done));
    // Killed in between, nobody knows; and what is known once stays so.
    let killed = after(&stopped, &TaskEvent::Killed { ended: Vec::new() });
    assert_eq!(killed.grants[0].outcome, EffectOutcome::Unknown);
    assert_eq!(step(&killed, &ended(1), 11), TaskStepped::Ignored);
    assert_eq!(after(&killed, &TaskEvent::Confirmed).state, TaskState::EffectUnknown);
}

#[test]
fn k2_what_was_killed_is_told_with_how_it_ended() {
    let first = after(&running(2), &exited(0, 0));
    let second = after(&first, &TaskEvent::Starting { step: Some(1) });
    let ids: Vec<ExecutionId> = second.executions.iter().map(|one| one.id.clone()).collect();
    let by_signal = ExecState::Signalled { signal: 9 };
    let ended = ids.into_iter().zip([ExecState::Cancelled, by_signal.clone()]).collect();
    let killed = after(&after(&second, &stop()), &TaskEvent::Killed { ended });
    let told: Vec<_> = killed.executions.iter().map(|one| one.ended.clone()).collect();
    assert_eq!(told, [Some(ExecState::Exited { code: 0 }), Some(by_signal)], "what ended before stays so");
    let unseen = after(&after(&second, &stop()), &TaskEvent::Killed { ended: Vec::new() });
    assert_eq!(unseen.executions[1].ended, None);
}

#[test]
fn k6_what_is_not_said_of_limits_and_steps_is_as_it_was() {
    let before = TaskLimits { inactivity_ms: Some(1), total_ms: Some(2), reports_max: None };
    assert_eq!(SaidLimits::default().over(before), before);
    let said = SaidLimits { total_ms: Some(5), inactivity_ms: Some(0), reports_max: None };
    assert_eq!(said.over(before), TaskLimits { inactivity_ms: None, total_ms: Some(5), reports_max: None });
    let step = ExecSpec {
        argv: vec!["agent".to_owned()],
        env: [("A".to_owned(), "1".to_owned()), ("B".to_owned(), "2".to_owned())].into(),
        cwd: Some("/one".to_owned()),
        user: Some("one".to_owned()),
        limit_ms: Some(7),
        ..ExecSpec::default()
    };
    let same = std::slice::from_ref(&step);
    assert_eq!(StepChanges::default().of(same), same);
    let changes = StepChanges {
        env: [("B".to_owned(), "3".to_owned())].into(),
        cwd: Some("/two".to_owned()),
        user: Some("two".to_owned()),
        limit_ms: Some(0),
    };
    let env = [("A".to_owned(), "1".to_owned()), ("B".to_owned(), "3".to_owned())].into();
    let (cwd, user) = (changes.cwd.clone(), changes.user.clone());
    assert_eq!(changes.of(std::slice::from_ref(&step)), [ExecSpec { env, cwd, user, limit_ms: None, ..step }]);
}

#[test]
fn k5_an_effect_is_granted_once_unless_it_is_repeatable() {
    let run = running(1);
    assert_eq!(denied(&run, &ask(1, "deploy")), TaskDenial::Undeclared);
    let first = after(&run, &ask(1, "push"));
    assert_eq!(step(&first, &ask(1, "push"), 10), TaskStepped::Ignored, "heard again");
    assert_eq!(denied(&first, &ask(2, "note")), TaskDenial::Busy);
    let done = after(&first, &ended(1));
    assert_eq!(denied(&done, &ask(2, "push")), TaskDenial::DoneBefore);
    let noted = after(&after(&done, &ask(3, "note")), &ended(3));
    after(&noted, &ask(4, "note"));
    // What failed may be tried again, what is unknown not, in this run or another.
    let failed = TaskEvent::EffectEnded { request: request(1), failed: Some("exit 1".to_owned()) };
    after(&after(&first, &failed), &ask(5, "push"));
    let unknown = after(&after(&first, &exited(0, 0)), &TaskEvent::Confirmed);
    assert_eq!(unknown.state, TaskState::EffectUnknown);
    let again = TaskEvent::Continued { steps: run.steps.clone(), limits: run.limits, keep_alive: true };
    let again = after(&unknown, &again);
    let entered = TaskEvent::Entered { generation: Generation(1), came: Came::Reused };
    let again =
        [TaskEvent::TakenUp, entered, TaskEvent::Prepared].iter().fold(again, |task, event| after(&task, event));
    assert_eq!(denied(&again, &ask(6, "push")), TaskDenial::Unknown);
}

#[test]
fn k5_who_asks_again_after_a_stop_has_not_begun() {
    let granted = after(&after(&running(1), &ask(1, "push")), &stop());
    let told = after(&granted, &ask(1, "push"));
    assert!(matches!(told.grants[0].outcome, EffectOutcome::Failed { .. }));
    assert_eq!(after(&told, &TaskEvent::Confirmed).state, TaskState::Stopped);
}

#[test]
fn k4_too_many_reports_end_it() {
    let report = |number| TaskEvent::Reported { request: request(number), steps: 1, note: None, session: None };
    let mut task = running(1);
    for number in 0..3 {
        task = after(&task, &report(number));
        assert_eq!(step(&task, &report(number), 11), TaskStepped::Ignored, "heard again");
        assert_eq!(task.work(), TaskWork::Run);
    }
    let over = after(&after(&task, &report(3)), &TaskEvent::Confirmed);
    assert_eq!(over.state, TaskState::StepLimit);
}

#[test]
fn k6_a_session_is_kept_unless_the_sandbox_is_another() {
    let report = TaskEvent::Reported { request: request(1), steps: 0, note: None, session: Some("s1".to_owned()) };
    let over = after(&after(&after(&running(1), &report), &exited(0, 0)), &TaskEvent::Confirmed);
    let again = TaskEvent::Continued { steps: over.steps.clone(), limits: over.limits, keep_alive: false };
    let again = after(&after(&over, &again), &TaskEvent::TakenUp);
    assert_eq!(again.session.as_deref(), Some("s1"));
    assert_ne!(again.execution_of(Some(0)), over.execution_of(Some(0)));
    let entered = |came| TaskEvent::Entered { generation: Generation(2), came };
    assert_eq!(after(&again, &entered(Came::Reused)).session.as_deref(), Some("s1"));
    assert_eq!(after(&again, &entered(Came::Recreated)).session, None);
    assert!(!over.credentials.is_empty());
    let not_kept = after(&after(&again, &stop()), &TaskEvent::Confirmed);
    assert!(not_kept.credentials.is_empty());
    let more = TaskEvent::Continued { steps: over.steps.clone(), limits: over.limits, keep_alive: false };
    assert_eq!(denied(&not_kept, &more), TaskDenial::NotKept);
}

pub(super) fn mark(mistaken: bool, why: Option<&str>) -> TaskEvent {
    TaskEvent::Marked { by: Actor::part("user"), mistaken, why: why.map(str::to_owned) }
}

#[test]
fn o2_what_was_ended_can_be_marked_as_mistaken_and_that_be_taken_back() {
    let stopped = after(&running(1), &stop());
    assert_eq!(denied(&stopped, &mark(true, None)), TaskDenial::NotOver);
    let over = after(&stopped, &TaskEvent::Confirmed);
    assert_eq!(step(&over, &mark(false, None), 10), TaskStepped::Ignored);
    let marked = after(&over, &mark(true, Some("it was well")));
    assert_eq!((marked.state, marked.version), (over.state, over.version + 1));
    assert_eq!(marked.mark.as_ref().and_then(|mark| mark.why.as_deref()), Some("it was well"));
    for same in [mark(true, None), mark(true, Some("it was well"))] {
        assert_eq!(step(&marked, &same, 11), TaskStepped::Ignored, "said again");
    }
    let reason = after(&marked, &mark(true, Some("another")));
    assert_eq!(reason.mark.unwrap().why.as_deref(), Some("another"));
    assert_eq!(after(&marked, &mark(false, None)).mark, None);
    let again = TaskEvent::Continued { steps: over.steps.clone(), limits: over.limits, keep_alive: true };
    assert_eq!(after(&marked, &again).mark, None, "another run, another end");
    let done = after(&after(&running(1), &exited(0, 0)), &TaskEvent::Confirmed);
    assert_eq!(denied(&done, &mark(true, None)), TaskDenial::NotEnded);
}

fn any_event() -> impl Strategy<Value = TaskEvent> {
    let step = 0_u32..3;
    let state = prop_oneof![
        Just(ExecState::Running),
        (0..2).prop_map(|code| ExecState::Exited { code }),
        Just(ExecState::TimedOut),
        Just(ExecState::Cancelled),
        Just(ExecState::Lost { cause: "gone".to_owned() }),
    ];
    let came = prop_oneof![Just(Came::Made), Just(Came::Reused), Just(Came::Recreated)];
    let effect = prop_oneof![Just("push"), Just("note"), Just("other")];
    let limit = prop_oneof![Just(TaskCause::TotalLimit), Just(TaskCause::Inactivity)];
    prop_oneof![
        4 => Just(TaskEvent::TakenUp),
        4 => came.prop_map(|came| TaskEvent::Entered { generation: Generation(1), came }),
        1 => Just(TaskEvent::Moved { to: SandboxId::from_bytes([9; 16]) }),
        2 => proptest::option::of(step.clone()).prop_map(|step| TaskEvent::Starting { step }),
        4 => Just(TaskEvent::Prepared),
        1 => Just(TaskEvent::Output),
        1 => (0_u8..9).prop_map(|number| TaskEvent::Reported { request: request(number), steps: 1, note: None, session: Some("s".to_owned()) }),
        6 => (0_u8..4, effect).prop_map(|(number, effect)| ask(number, effect)),
        3 => (0_u8..4).prop_map(ended),
        3 => (step, state).prop_map(|(step, ended)| TaskEvent::StepEnded { step, ended }),
        2 => Just(stop()),
        1 => limit.prop_map(|cause| TaskEvent::LimitPassed { cause, message: String::new() }),
        1 => Just(TaskEvent::Gone { what: "gone".to_owned() }),
        1 => Just(TaskEvent::Killed { ended: Vec::new() }),
        2 => Just(TaskEvent::Confirmed),
        1 => Just(TaskEvent::Continued { steps: Vec::new(), limits: TaskLimits::default(), keep_alive: true }),
        1 => any::<bool>().prop_map(|mistaken| mark(mistaken, None)),
    ]
}

/// What a run must keep, told without the machine.
#[derive(Debug, Default)]
struct Model {
    is_over: bool,
    is_ending: bool,
    granted: Vec<RequestId>,
}

proptest! {
    #[test]
    fn k5_whatever_happens_the_promises_hold(events in proptest::collection::vec(any_event(), 0..60)) {
        let mut task = task(2);
        let mut model = Model::default();
        for (now_ms, event) in (10..).zip(&events) {
            let stepped = step(&task, event, now_ms);
            let TaskStepped::Accepted(next) = stepped else {
                // A stop is legal in every state, and refused in none.
                let refused = matches!(event, TaskEvent::Stop { .. }) && matches!(stepped, TaskStepped::Denied(_));
                prop_assert!(!refused);
                continue;
            };
            let next = *next;
            prop_assert_eq!(next.version, task.version + 1);
            if matches!(event, TaskEvent::Marked { .. }) {
                prop_assert!(model.is_over && task.was_ended());
                prop_assert_eq!(&Task { mark: task.mark.clone(), version: task.version, ..next.clone() }, &task);
            } else if matches!(event, TaskEvent::Continued { .. }) {
                prop_assert!(model.is_over && next.run == task.run + 1);
                model = Model::default();
            } else {
                prop_assert!(!model.is_over, "{:?} changed what was over", event);
                for grant in &next.grants[task.grants.len()..] {
                    prop_assert!(!model.is_ending, "{} was granted to what was to end", grant.effect);
                    model.granted.push(grant.request.clone());
                }
            }
            model.is_ending |= next.ending.is_some();
            prop_assert_eq!(model.is_ending, next.ending.is_some());
            if matches!(event, TaskEvent::Stop { .. }) {
                prop_assert!(next.ending.is_some() && next.stop.is_some());
            }
            // An outcome that was told stays.
            for (before, now) in task.grants.iter().zip(&next.grants) {
                prop_assert!(before.outcome == EffectOutcome::InFlight || before.outcome == now.outcome);
            }
            prop_assert!(next.grants.iter().filter(|grant| grant.outcome == EffectOutcome::InFlight).count() <= 1);
            prop_assert_eq!(next.in_flight().is_some(), next.state == TaskState::Committing);
            let is_done = |grant: &&Grant| grant.outcome == EffectOutcome::Done;
            let done = |name: &str| next.grants.iter().filter(is_done).filter(|grant| grant.effect == name).count();
            prop_assert!(done("push") <= 1 && done("other") == 0);
            if next.state.is_final() {
                model.is_over = true;
                prop_assert!(next.ending.is_some() && next.times.confirmed_at_ms.is_some());
                let unknown = next.grants.iter().any(|grant| grant.run == next.run && grant.outcome == EffectOutcome::Unknown);
                prop_assert_eq!(unknown, next.state == TaskState::EffectUnknown);
                prop_assert_eq!(next.work(), TaskWork::Nothing);
            }
            task = next;
        }
    }
}
