//! What is done in sandboxes is in the journal, once and without making anybody wait (O7).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::time::Duration;

use place::{Place, paused, place};
use viv_core::SandboxId;
use viv_core::exec::ExecSpec;
use viv_core::lifecycle::{Actor, FreezeStep, Phase, Sandbox};
use viv_core::spec::Project;
use viv_engine::{Handle, Which};
use viv_provider::conformance::program::Program;
use viv_store::Store;
use viv_store::memory::Fault;

async fn handle(place: &Place, id: &SandboxId) -> Handle {
    let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
    handle.used_by(Actor { who: "key:a".to_owned(), from: Some("192.0.2.1".to_owned()) })
}

fn spec(program: &Program) -> ExecSpec {
    ExecSpec { argv: program.argv(), ..ExecSpec::default() }
}

/// The kinds of lines about what was done inside, in their order.
async fn told(place: &Place, id: &SandboxId) -> Vec<String> {
    let inside = |kind: &str| kind.starts_with("execution.") || kind.starts_with("file.");
    place.lines(id).await.into_iter().map(|line| line.line.kind).filter(|kind| inside(kind)).collect()
}

#[test]
fn o7_an_end_is_told_once_however_often_it_is_seen() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        let handle = handle(&place, &id).await;
        let execution = handle.new_execution();
        for _ in 0..2 {
            handle.execute(&execution, &spec(&Program::Echo { text: "a".to_owned() })).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
        for _ in 0..3 {
            let mut output = handle.attach(&execution, 0, true).await.unwrap();
            while output.next().await.unwrap().is_some() {}
            handle.execution(&execution).await.unwrap();
            handle.executions().await.unwrap();
            handle.cancel(&execution).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let told = told(&place, &id).await;
        let count = |kind: &str| told.iter().filter(|one| *one == kind).count();
        assert_eq!((count("execution.started"), count("execution.ended")), (1, 1), "{told:?}");
        let lines = place.lines(&id).await;
        let started = lines.iter().find(|line| line.line.kind == "execution.started").unwrap();
        assert_eq!((started.line.by.who.as_str(), started.line.by.from.as_deref()), ("key:a", Some("192.0.2.1")));
    });
}

/// A detached command has nobody who reads its output to the end.
#[test]
fn o7_the_end_of_a_detached_command_is_told_though_nobody_asks() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        let handle = handle(&place, &id).await;
        let command = ExecSpec { detached: true, ..spec(&Program::Sleep { seconds: 3 }) };
        handle.execute(&handle.new_execution(), &command).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(told(&place, &id).await, ["execution.started", "execution.ended"]);
    });
}

#[test]
fn o7_nobody_waits_for_a_line_and_a_store_that_fails_gets_it_later() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        let handle = handle(&place, &id).await;
        // Whether it is used is written at most once a second, before it is used.
        handle.file_mkdir("/workspace/a").await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        place.store.set_faults(Some(Box::new(|call| (call == "append").then_some(Fault::Before))));
        handle.execute(&handle.new_execution(), &spec(&Program::Sleep { seconds: 3_600 })).await.unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(told(&place, &id).await, ["file.folder_made"]);
        place.store.set_faults(None);
        place.engine.written().await;
        assert_eq!(told(&place, &id).await, ["file.folder_made", "execution.started"]);
    });
}

#[test]
fn o7_lines_are_no_activity_and_there_are_none_at_rest() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        let handle = handle(&place, &id).await;
        handle.execute(&handle.new_execution(), &spec(&Program::Sleep { seconds: 60 })).await.unwrap();
        drop(handle);
        // It ends, idles and goes down the ladder as if nobody wrote anything; the look before that sees the end.
        let is_frozen = |record: &Sandbox| record.phase == Phase::Frozen { step: FreezeStep::Done };
        for _ in 0..200 {
            tokio::time::sleep(Duration::from_secs(10)).await;
            if is_frozen(&place.record(&id).await) {
                break;
            }
        }
        assert_eq!(told(&place, &id).await, ["execution.started", "execution.ended"]);
        let record = place.record(&id).await;
        assert!(is_frozen(&record), "{record:?}");
        assert!(record.phase_since_ms - record.active_at_ms >= record.policy.idle_ms, "{record:?}");
        let (lines, active_at_ms) = (place.lines(&id).await.len(), record.active_at_ms);
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!((place.lines(&id).await.len(), place.record(&id).await.active_at_ms), (lines, active_at_ms));
    });
}

#[test]
fn o7_the_last_lines_are_written_by_a_daemon_that_ends() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        let handle = handle(&place, &id).await;
        for name in ["a", "b", "c"] {
            handle.file_mkdir(&format!("/workspace/{name}")).await.unwrap();
        }
        place.engine.written().await;
        place.engine.shut_down();
        assert_eq!(told(&place, &id).await.len(), 3);
        assert!(place.store.get(&id).await.unwrap().is_some());
    });
}
