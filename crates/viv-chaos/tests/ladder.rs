//! The ladder of idling on simulated time, without faults: what moves a sandbox, and what does not.
#![allow(missing_docs, reason = "tests")]

mod place;

use std::time::Duration;

use place::{Place, by, paused, persistent, place_ticking, place_with_memory, place_without_memory, request};
use viv_core::exec::ExecSpec;
use viv_core::lifecycle::{Actor, Cause, EntryKind, Memory, PhaseName, Status};
use viv_core::spec::{Hibernate, Policy, Project};
use viv_core::{Generation, SandboxId};
use viv_engine::{CleanupConfig, CreateRequest, ReconcilerName, Which};
use viv_provider::Capability;
use viv_store::{Cursor, JournalFilter, Store};

const HOUR_MS: u64 = 3_600_000;
const MINUTE: Duration = Duration::from_secs(60);

async fn place() -> Place {
    place_ticking(500, |_| {}).await
}

impl Place {
    /// One with both windows of the ladder at a quarter of an hour.
    async fn idling(&self, persistent: bool) -> SandboxId {
        let policy = Policy { persistent, lifetime_ms: HOUR_MS, hibernate_ms: 900_000, ..request().policy };
        self.made(CreateRequest { policy, ..request() }).await
    }

    /// Transitions so far.
    async fn moves(&self) -> usize {
        let lines = self.store.journal(Cursor(0), &JournalFilter::default(), usize::MAX).await.unwrap();
        lines.iter().filter(|line| line.line.kind == "sandbox.moved").count()
    }

    async fn start(&self, id: &SandboxId, argv: &[&str], detached: bool) {
        let handle = self.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        let spec = ExecSpec { argv, detached, ..ExecSpec::default() };
        handle.execute(&handle.new_execution(), &spec).await.unwrap();
    }
}

/// Nobody uses it: frozen after one window, saved or ended after two, and nothing moves before or after.
#[test]
fn l5_the_ladder_goes_down_by_itself_and_stays_down() {
    paused(async {
        let place = place().await;
        let (kept, passing) = (place.idling(true).await, place.idling(false).await);
        tokio::time::sleep(14 * MINUTE).await;
        assert_eq!((place.status(&kept).await, place.status(&passing).await), (Status::Unverified, Status::Unverified));
        tokio::time::sleep(2 * MINUTE).await;
        assert_eq!((place.status(&kept).await, place.status(&passing).await), (Status::Frozen, Status::Frozen));
        tokio::time::sleep(13 * MINUTE).await;
        assert_eq!((place.status(&kept).await, place.status(&passing).await), (Status::Frozen, Status::Frozen));
        tokio::time::sleep(2 * MINUTE).await;
        assert_eq!((place.status(&kept).await, place.status(&passing).await), (Status::Hibernated, Status::Stopped));
        let moves = place.moves().await;
        tokio::time::sleep(600 * MINUTE).await;
        assert_eq!(place.moves().await, moves);
        let idle = place.engine.reconcilers().into_iter().find(|status| status.name == ReconcilerName::Idle);
        assert_eq!(idle.map(|status| status.runs), Some(4), "two rungs each, and no look besides");
    });
}

/// What was used right before it was frozen, later than is written down, goes on down like any other (seed 5217).
#[test]
fn l5_who_is_frozen_right_after_it_was_used_is_saved_after_its_window() {
    paused(async {
        let place = place_ticking(100, |_| {}).await;
        let id = place.idling(true).await;
        tokio::time::sleep(MINUTE).await;
        place.start(&id, &["echo", "one"], false).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        place.start(&id, &["echo", "another"], false).await;
        place.engine.freeze(&id, by()).await.unwrap();
        tokio::time::sleep(14 * MINUTE).await;
        assert_eq!(place.status(&id).await, Status::Frozen);
        tokio::time::sleep(2 * MINUTE).await;
        assert_eq!(place.status(&id).await, Status::Hibernated);
    });
}

/// A foreground command is activity for as long as it runs, and the window begins with its end; a service is not (L6).
#[test]
fn l6_what_runs_in_the_foreground_keeps_it_awake_and_a_service_does_not() {
    paused(async {
        let place = place().await;
        let (busy, serving) = (place.idling(true).await, place.idling(true).await);
        place.start(&busy, &["/bin/sleep", "2400"], false).await;
        place.start(&serving, &["/bin/sleep", "2400"], true).await;
        tokio::time::sleep(17 * MINUTE).await;
        assert_eq!(place.status(&serving).await, Status::Frozen);
        for minute in 17..54 {
            let status = place.status(&busy).await;
            assert!(matches!(status, Status::Ready | Status::Unverified), "{status:?} after {minute} minutes");
            tokio::time::sleep(MINUTE).await;
        }
        tokio::time::sleep(3 * MINUTE).await;
        assert_eq!(place.status(&busy).await, Status::Frozen, "a window after the command had ended");
    });
}

/// A lease holds every rung off until it ends, and is bounded (L7).
#[test]
fn l7_a_lease_keeps_it_awake_until_it_ends() {
    paused(async {
        let place = place().await;
        let id = place.idling(true).await;
        let hold = 40 * 60_000;
        place.engine.keep_awake(&id, "thinking", hold, "the model thinks", Actor::part("test")).await.unwrap();
        tokio::time::sleep(39 * MINUTE).await;
        assert!(matches!(place.status(&id).await, Status::Ready | Status::Unverified));
        tokio::time::sleep(2 * MINUTE).await;
        assert_eq!(place.status(&id).await, Status::Frozen);
    });
}

/// A day of status polls, a due idle timer, a client that reconnects, traffic and a schedule: every transition is
/// somebody's wish or the ladder's, and their number is bounded by the number of entries.
#[test]
fn l4_a_day_of_polls_timers_reconnects_traffic_and_schedules_does_not_loop() {
    paused(async {
        const MINUTES: u64 = 24 * 60;
        let place = place().await;
        let id = place.idling(true).await;
        let policy = place.record(&id).await.policy;
        let which = Which::Id(id.clone());
        let mut entries = 1;
        for minute in 1..=MINUTES {
            // A dashboard, twice a minute, now and then with a probe; and a listing of commands.
            for half in 0..2 {
                let _ = place.engine.get(&Project::default(), &which, "dashboard").await;
                if (minute + half) % 5 == 0 {
                    let _ = place.engine.verify(&id).await;
                }
                if let Ok(handle) = place.engine.look_into(&Project::default(), &which, None).await {
                    let _ = handle.executions().await;
                }
                tokio::time::sleep(MINUTE / 2).await;
            }
            // A client that lost its connection joins what is there, and wakes nothing.
            if minute % 7 == 0 {
                let _ = place.engine.work_in(&Project::default(), &which, None).await;
            }
            let kind = match minute {
                _ if minute % 360 == 0 => Some(EntryKind::Schedule),
                _ if minute % 120 == 60 => Some(EntryKind::Gateway),
                _ => None,
            };
            if let Some(kind) = kind {
                entries += 1;
                place.engine.ensure(&id, kind, Actor::part("somebody")).await.unwrap();
                place.engine.wait_ready(&id, MINUTE).await.unwrap();
                place.start(&id, &["/bin/sleep", "1"], false).await;
            }
        }
        tokio::time::sleep(40 * MINUTE).await;
        let record = place.record(&id).await;
        assert_eq!((record.policy, record.phase.name().as_str()), (policy, "hibernated"));
        // Each entry: resuming, verifying, ready, frozen, hibernating, hibernated.
        let moves = place.moves().await;
        assert_eq!(record.generation, Generation(entries), "one instance for each entry");
        assert!(moves <= 6 * entries as usize, "{moves} transitions for {entries} entries");
    });
}

/// Memory is short, and what is frozen cannot go to disk with its own: it stays what it is and is tried ever more rarely,
/// until it can.
#[test]
fn l13_what_cannot_go_to_disk_with_its_memory_stays_frozen_and_is_left_alone() {
    paused(async {
        let place = place_with_memory(0.05, |config| config.cleanup = Some(CleanupConfig::default())).await;
        let day_ms = 24 * HOUR_MS;
        let policy =
            Policy { hibernate: Hibernate::Memory, hibernate_ms: day_ms, lifetime_ms: day_ms, ..persistent().policy };
        let id = place.made(CreateRequest { policy, ..persistent() }).await;
        place.start(&id, &["/bin/sleep", "100000"], true).await;
        place.provider.truth().fail_dumps(Some("something that nobody foresaw"));
        place.engine.freeze(&id, by()).await.unwrap();
        tokio::time::sleep(58 * MINUTE).await;
        let lines = place.store.journal(Cursor(0), &JournalFilter::default(), usize::MAX).await.unwrap();
        let began = lines.iter().filter(|line| line.line.to == Some(PhaseName::Hibernating));
        let began: Vec<u64> = began.map(|line| line.line.at_ms).collect();
        // At once, and after five, ten, twenty minutes more.
        assert_eq!(began.len(), 4, "{began:?}");
        let stays = place.record(&id).await;
        assert_eq!((place.status(&id).await, &stays.cause.cause), (Status::Frozen, &Cause::MemoryNotSaved));
        assert!(stays.cause.message.as_ref().is_some_and(|why| why.contains("nobody foresaw")), "{:?}", stays.cause);
        assert_eq!((stays.generation, stays.lost_executions.len()), (Generation(1), 0), "nothing is lost");
        // Somebody uses it meanwhile, as if nothing had been.
        place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        place.engine.wait_ready(&id, MINUTE).await.unwrap();
        assert_eq!(place.record(&id).await.generation, Generation(1));
        place.engine.freeze(&id, by()).await.unwrap();
        // And once it can be saved, it is, with all that runs in it.
        place.provider.truth().fail_dumps(None);
        tokio::time::sleep(10 * MINUTE).await;
        let gone = place.record(&id).await;
        assert!(matches!(gone.memory, Some(Memory::Kept { .. })), "{gone:?}");
        assert_eq!(place.status(&id).await, Status::Hibernated);
    });
}

/// One look at a busy start is not the last word: what the daemon does is what it says, and both follow what there is.
#[test]
fn l13_whether_memory_is_saved_is_found_out_again_while_the_daemon_runs() {
    paused(async {
        let place = place_without_memory("the machine was busy", MINUTE).await;
        let policy = Policy { hibernate: Hibernate::Memory, ..persistent().policy };
        let id = place.made(CreateRequest { policy, ..persistent() }).await;
        let memory_of_next = async || {
            place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
            place.engine.wait_ready(&id, MINUTE).await.unwrap();
            place.start(&id, &["/bin/sleep", "100000"], true).await;
            place.engine.hibernate(&id, by()).await.unwrap();
            place.engine.wait_settled(&id, MINUTE).await.unwrap();
            place.record(&id).await.memory
        };
        let is_missing_for = |memory: Option<Memory>, reason: &str| match memory {
            Some(Memory::NotSaved { why }) => why.contains(reason),
            _ => false,
        };
        assert!(is_missing_for(memory_of_next().await, "the machine was busy"));
        // It works by now, and nobody asks: the daemon looks by itself.
        place.provider.truth().declare_no_memory(None);
        tokio::time::sleep(2 * MINUTE).await;
        assert!(matches!(memory_of_next().await, Some(Memory::Kept { .. })));
        // It is gone, and somebody is told so: what he was told is what happens, at once.
        place.provider.truth().declare_no_memory(Some("it was removed"));
        let told = place.engine.capabilities().await.missing.remove(&Capability::SaveMemory);
        assert_eq!(told.as_deref(), Some("it was removed"));
        assert!(is_missing_for(memory_of_next().await, "it was removed"));
        place.provider.truth().declare_no_memory(None);
        assert!(place.engine.capabilities().await.can(Capability::SaveMemory));
        assert!(matches!(memory_of_next().await, Some(Memory::Kept { .. })));
    });
}

/// Who asked for it to be saved has it saved, and be it without its memory.
#[test]
fn l13_what_somebody_asked_to_be_saved_is_whatever_becomes_of_its_memory() {
    paused(async {
        let place = place_with_memory(1.0, |_| {}).await;
        let policy = Policy { hibernate: Hibernate::Memory, ..persistent().policy };
        let id = place.made(CreateRequest { policy, ..persistent() }).await;
        place.provider.truth().fail_dumps(Some("something that nobody foresaw"));
        place.engine.freeze(&id, by()).await.unwrap();
        tokio::time::sleep(MINUTE).await;
        place.engine.hibernate(&id, by()).await.unwrap();
        tokio::time::sleep(MINUTE).await;
        let saved = place.record(&id).await;
        assert!(matches!(&saved.memory, Some(Memory::NotSaved { why }) if why.contains("nobody foresaw")), "{saved:?}");
        assert_eq!(place.status(&id).await, Status::Hibernated);
    });
}
