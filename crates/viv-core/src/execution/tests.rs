use std::collections::BTreeMap;

use super::*;
use crate::lifecycle::{Moment, NewSandbox, Timings};
use crate::spec::{Policy, SandboxSpec};

fn sandbox() -> Sandbox {
    let new = NewSandbox {
        id: "sbx_1".parse().unwrap(),
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy::default_for(None),
        labels: BTreeMap::new(),
        origin: None,
        by: Actor::part("test"),
    };
    Sandbox {
        phase: Phase::Ready,
        ..Sandbox::create(new, Moment { now_ms: 1, timings: &Timings::default(), no_memory: None })
    }
}

fn status(state: ExecState) -> ExecStatus {
    ExecStatus {
        id: "exe_1".parse().unwrap(),
        state,
        started_at_ms: 5,
        ended_at_ms: None,
        output_bytes: 0,
        stdin_bytes: 0,
        pid: Some(7),
        argv: vec!["x".to_owned()],
        detached: false,
    }
}

fn row(sandbox: &Sandbox, state: ExecState) -> Execution {
    let started = Stage::Started { status: status(state), concluded: false };
    let spec = ExecSpec { argv: vec!["x".to_owned()], ..ExecSpec::default() };
    Execution::asked("exe_1".parse().unwrap(), sandbox.into(), &spec, Actor::part("me"), 5, started)
}

fn hibernated() -> Phase {
    Phase::Hibernated { snapshot: "snp_1".parse().unwrap() }
}

#[test]
fn x5_what_ran_in_an_instance_that_is_over_does_not_run() {
    let ready = sandbox();
    let settled = |record: &Sandbox| {
        let mut row = row(&ready, ExecState::Running);
        row.settle(record).then(|| row.status().unwrap().state.clone())
    };
    assert_eq!(settled(&ready), None);
    assert_eq!(settled(&Sandbox { phase: Phase::Lost, ..ready.clone() }), None, "it may come back as it was");
    let hibernated = Sandbox { phase: hibernated(), ..ready.clone() };
    assert_eq!(settled(&hibernated), Some(ExecState::Lost { cause: HIBERNATED.to_owned() }));
    let replaced = Sandbox { generation: ready.generation.next(), ..ready.clone() };
    assert!(matches!(settled(&replaced), Some(ExecState::Lost { .. })));
    let deleted = Sandbox { deleted: true, ..ready.clone() };
    assert!(matches!(settled(&deleted), Some(ExecState::Lost { .. })));
    let mut ended = row(&ready, ExecState::Exited { code: 3 });
    assert!(!ended.settle(&hibernated));
}

#[test]
fn x5_what_was_suspended_ends_when_another_instance_goes_without_its_memory() {
    let snapshot = || "snp_1".parse().unwrap();
    let ready = sandbox();
    let hibernated = |memory| Sandbox { phase: hibernated(), memory: Some(memory), ..ready.clone() };
    let kept = hibernated(Memory::Kept { snapshot: snapshot() });
    let mut saved = row(&ready, ExecState::Lost { cause: EndCause::Saved.code().to_owned() });
    let Stage::Started { status, .. } = &mut saved.stage else { panic!("it was started") };
    status.ended_at_ms = Some(9);
    let told = |row: &Execution| row.status().map(|status| (status.state.clone(), status.ended_at_ms)).unwrap();
    let suspended = saved.as_saved(&kept);
    assert_eq!(told(&suspended), (ExecState::Suspended, None));
    assert!(!suspended.clone().settle(&kept));
    assert_eq!(suspended.learn(&saved), None, "why its instance ended is no news");

    let restored = Memory::Restored { snapshot: snapshot() };
    let next = Sandbox { generation: ready.generation.next(), memory: Some(restored), ..ready.clone() };
    assert!(!suspended.clone().settle(&next), "it goes on there");
    let without = Memory::NotRestored { snapshot: snapshot(), why: "torn".to_owned() };
    let next = Sandbox { memory: Some(without), ..next };
    let mut lost = suspended.clone();
    assert!(lost.settle(&next));
    assert_eq!(lost.status().unwrap().state, ExecState::Lost { cause: MEMORY_NOT_RESTORED.to_owned() });

    let not_saved = hibernated(Memory::NotSaved { why: "no room".to_owned() });
    assert_eq!(told(&saved.as_saved(&not_saved)), (ExecState::Lost { cause: HIBERNATED.to_owned() }, Some(9)));
}

#[test]
fn x1_who_ran_it_knows_better_than_who_concluded() {
    let ready = sandbox();
    let mut concluded = row(&ready, ExecState::Running);
    assert!(concluded.settle(&Sandbox { phase: hibernated(), ..ready.clone() }));
    let told = concluded.learn(&row(&ready, ExecState::Exited { code: 0 })).unwrap();
    assert_eq!(told.status().unwrap().state, ExecState::Exited { code: 0 });
    assert_eq!(told.version, concluded.version + 1);
    // And then nothing changes it any more.
    for late in [ExecState::Running, ExecState::Cancelled, ExecState::Exited { code: 1 }] {
        assert_eq!(told.learn(&row(&ready, late)), None);
    }
}

#[test]
fn x1_what_was_asked_is_kept_from_who_knows_it() {
    let ready = sandbox();
    let mut known = row(&ready, ExecState::Running);
    known.cwd = Some("/there".to_owned());
    let found = Execution::found((&ready).into(), status(ExecState::OomKilled), 9);
    let learnt = known.learn(&found).unwrap();
    assert_eq!((learnt.by, learnt.cwd.as_deref()), (Actor::part("me"), Some("/there")));
}

/// One that waits, or is being started.
fn queued(sandbox: &Sandbox, starting_in: Option<Generation>) -> Execution {
    let spec = ExecSpec { argv: vec!["x".to_owned()], ..ExecSpec::default() };
    let waits = Queued { spec: Box::new(spec.clone()), until_ms: 9, running_max: None, starting_in };
    let id = "exe_1".parse().unwrap();
    Execution::asked(id, sandbox.into(), &spec, Actor::part("me"), 5, Stage::Queued(waits))
}

#[test]
fn x1_what_waits_fails_with_its_sandbox_and_says_so() {
    let ready = sandbox();
    for gone in [Sandbox { deleted: true, ..ready.clone() }, Sandbox { phase: Phase::Stopped, ..ready.clone() }] {
        let mut waiting = queued(&ready, None);
        assert!(waiting.settle(&gone));
        let what = "the sandbox is gone: requested".to_owned();
        assert_eq!(waiting.status().unwrap().state, ExecState::Failed { what });
        assert_eq!(waiting.ended_at_ms(), Some(gone.phase_since_ms));
    }
}

#[test]
fn x5_what_is_lost_is_so_for_its_memory_or_for_what_became_of_its_sandbox() {
    let ready = sandbox();
    let without = Memory::NotRestored { snapshot: "snp_1".parse().unwrap(), why: "torn".to_owned() };
    for (state, memory, why) in [
        (ExecState::Running, None, "requested"),
        (ExecState::Running, Some(without), MEMORY_NOT_RESTORED),
        (ExecState::Suspended, None, MEMORY_NOT_RESTORED),
    ] {
        let mut row = row(&ready, state);
        assert!(row.settle(&Sandbox { generation: ready.generation.next(), memory, ..ready.clone() }));
        assert_eq!(row.status().unwrap().state, ExecState::Lost { cause: why.to_owned() });
    }
}

#[test]
fn x1_a_start_that_nobody_can_tell_of_is_not_made_again() {
    let ready = sandbox();
    let replaced = Sandbox { generation: ready.generation.next(), ..ready.clone() };
    assert!(!queued(&ready, None).settle(&replaced), "it waits for whichever comes");
    let mut starting = queued(&ready, Some(ready.generation));
    assert!(!starting.settle(&ready));
    assert!(starting.settle(&replaced));
    assert_eq!(starting.status().unwrap().state, ExecState::Lost { cause: START_UNKNOWN.to_owned() });
}

#[test]
fn x2_what_is_kept_says_where_it_was_cut() {
    let chunk = |offset: u64, length: usize| OutputEvent::Chunk {
        offset,
        stream: Stream::Stdout,
        at_ms: offset,
        data: vec![b'x'; length],
    };
    let all: Vec<OutputEvent> = (0..100).map(|at| chunk(at * 10, 10)).collect();
    let kept = KeptOutput::bounded(all.clone(), 30, 20);
    let cut = OutputEvent::Cut { from: 30, to: 980 };
    assert_eq!(kept.events, [&all[..3], &[cut], &all[98..]].concat());
    assert_eq!(KeptOutput::from_bytes(&kept.to_bytes()), Some(kept.clone()));
    assert_eq!(KeptOutput::bounded(all.clone(), 1_000, 0).events, all);
    let since: Vec<_> = kept.since(25).collect();
    assert_eq!(since[..2], [chunk_at(25, 5, 20), OutputEvent::Cut { from: 30, to: 980 }]);
    assert_eq!(kept.since(985).collect::<Vec<_>>(), [chunk_at(985, 5, 980), chunk(990, 10)]);
    assert_eq!(kept.since(980).next(), Some(chunk(980, 10)), "of the cut nothing is left");
    assert_eq!(kept.since(2_000).count(), 0);
    let long = [chunk(0, 10), chunk(10, 50)];
    assert_eq!(KeptOutput::bounded(long.clone(), 10, 20).events, long, "the last one is kept, however long it is");
    let bytes = kept.to_bytes();
    for torn in 1..bytes.len() {
        // Cut at the end of an event it is shorter; anywhere else it is refused.
        if let Some(part) = KeptOutput::from_bytes(&bytes[..torn]) {
            assert!(kept.events.starts_with(&part.events));
        }
    }
}

fn chunk_at(offset: u64, length: usize, at_ms: u64) -> OutputEvent {
    OutputEvent::Chunk { offset, stream: Stream::Stdout, at_ms, data: vec![b'x'; length] }
}
