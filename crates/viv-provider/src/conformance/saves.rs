//! Saving, with everything ended or while it runs (L8, L10, L11).

use viv_core::exec::ExecState;
use viv_core::{EndCause, FencingToken, Generation, SnapshotId};

use super::keep::{
    can_copy, can_restore, can_save, can_turn, copy, live, look, restore, restored, save, seal, stopped, unmade,
};
use super::lab::{Answer, Lab, SOON_MS, TOKEN, assert_refused, assert_unsupported};
use super::program::{self, Program};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{DeadlineChange, InstanceSpec, InstanceState, Recall, SaveRequest};

/// Long enough to be written to, short enough to wait for.
const SHORT_LIFE_MS: u64 = 2_000;

/// The state of what a stopped save ended.
fn is_saved(state: &InstanceState) -> bool {
    matches!(state, InstanceState::Ended(ended) if ended.cause == EndCause::Saved)
}

#[track_caller]
fn assert_lost(state: &ExecState) {
    let lost = matches!(state, ExecState::Lost { cause } if cause.contains("saved"));
    assert!(lost, "an execution that was running when the instance was saved is {state:?}");
}

pub(super) async fn live_save_runs_on(lab: &Lab) {
    if !can_save(lab, Capability::SaveLive).await {
        return;
    }
    let subject = lab.subject().await;
    let execution = subject.start(&program::tick()).await;
    let asked = live(lab);
    let snapshot = save(&subject, &asked).await.must("save");
    assert_eq!((snapshot.id, snapshot.source, snapshot.memory), (asked.snapshot, subject.instance(), false));
    assert_eq!(subject.state().await, InstanceState::Running);
    let before = subject.status(&execution).await;
    assert_eq!(before.state, ExecState::Running);
    lab.until("progress", SOON_MS, async || {
        (subject.status(&execution).await.output_bytes > before.output_bytes).then_some(())
    })
    .await;
}

pub(super) async fn live_save_is_of_one_moment(lab: &Lab) {
    if !can_copy(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let (first, second) = ("/workspace/first", "/workspace/second");
    subject.start(&Program::Ledger { first: first.to_owned(), second: second.to_owned() }.spec()).await;
    lab.until("some lines", SOON_MS, async || {
        (subject.is_there(second).await && subject.read(second).await.len() > 10).then_some(())
    })
    .await;
    let snapshot = copy(&subject).await;
    let at_answer = subject.stat(first).await.must("file_stat").size_bytes;
    let other = restored(lab, &snapshot.id).await;
    let (ahead, behind) = (ledger(&other, first).await, ledger(&other, second).await);
    assert!(behind > 0, "what was there before the save is not in it");
    assert!(ahead == behind || ahead == behind + 1, "{ahead} lines in the first file, {behind} in the second");
    lab.until("progress of the source", SOON_MS, async || {
        (subject.stat(first).await.must("file_stat").size_bytes > at_answer).then_some(())
    })
    .await;
}

/// How many lines one of [`Program::Ledger`]'s files has, all of which have to be the right ones.
async fn ledger(subject: &Subject<'_>, path: &str) -> usize {
    let content = String::from_utf8(subject.read(path).await).expect("numbers");
    assert!(content.ends_with('\n'), "{path} ends within a line");
    for (number, line) in content.lines().enumerate() {
        assert!(line == number.to_string(), "line {number} of {path} is {line:?}");
    }
    content.lines().count()
}

pub(super) async fn live_save_of_the_ended_is_refused(lab: &Lab) {
    if !can_save(lab, Capability::SaveLive).await || !lab.can_expire().await {
        return;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    subject.until_ended(SOON_MS).await;
    let asked = live(lab);
    assert_refused!(save(&subject, &asked).await, ProviderError::NotRunning { state: InstanceState::Ended(_) });
    assert_refused!(look(lab, &asked.snapshot).await, ProviderError::NotFound { .. });
}

pub(super) async fn stopped_save_ends_the_instance(lab: &Lab) {
    if !can_save(lab, Capability::SaveStopped).await {
        return;
    }
    let subject = lab.subject().await;
    let (done, busy) = (subject.start(&program::echo("x")).await, subject.start(&program::tick()).await);
    subject.until_final(&done).await;
    subject.until_written(&busy, "0\n").await;
    let instance = subject.instance();
    // Whoever waits for the end hears of it.
    let wait = lab.drive("wait_end", SOON_MS, lab.provider().wait_end(&instance));
    let (ended, snapshot) = tokio::join!(wait, seal(&subject));
    assert_eq!(ended.must("wait_end").cause, EndCause::Saved);
    assert!(!snapshot.live);
    assert!(is_saved(&subject.state().await), "it is {}", subject.state().await);
    assert_eq!(subject.observe().await.deadline, None, "what ended has no deadline");
    let listed = lab.list_all(&lab.owner(), None).await;
    assert!(listed.len() == 1 && is_saved(&listed[0].state), "listed as {listed:?}");

    assert_eq!(subject.status(&done).await.state, ExecState::Exited { code: 0 });
    let heard = subject.hear(&busy, 0, true).await;
    assert!(heard.stdout_text().starts_with("0\n"), "its output is kept");
    assert_lost(&heard.status.state);

    subject.destroy().await;
    let after = lab.drive("wait_end", SOON_MS, lab.provider().wait_end(&instance)).await;
    assert_eq!(after.must("wait_end after destroy").cause, EndCause::Saved);
}

pub(super) async fn what_was_saved_takes_no_work(lab: &Lab) {
    if !can_save(lab, Capability::SaveStopped).await {
        return;
    }
    let subject = lab.subject().await;
    seal(&subject).await;
    let started = subject.execute(&lab.fresh_execution(), &program::echo("late")).await;
    assert_refused!(started, ProviderError::NotRunning { state } if is_saved(&state));
    assert_refused!(subject.mkdir("/workspace/late").await, ProviderError::NotRunning { .. });
    assert_refused!(subject.stat("/workspace").await, ProviderError::NotRunning { .. });
    let (provider, sandbox) = (lab.provider(), &subject.sandbox);
    if lab.can(Capability::Extend) {
        let extended = provider.extend(&subject.mutation(), sandbox, DeadlineChange::AtLeastMs(60_000)).await;
        assert_refused!(extended, ProviderError::NotRunning { .. });
    }
    if lab.can(Capability::Freeze) {
        assert_refused!(provider.freeze(&subject.mutation(), sandbox).await, ProviderError::NotRunning { .. });
        assert_refused!(provider.thaw(&subject.mutation(), sandbox).await, ProviderError::NotRunning { .. });
    }
    let again = provider.create(&subject.next().mutation(), &subject.sandbox, &lab.owner(), &lab.spec()).await;
    assert_refused!(again, ProviderError::Conflict { .. });
    assert!(is_saved(&subject.state().await));
}

pub(super) async fn what_was_saved_can_be_saved_again(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let subject = lab.subject().await;
    subject.write("/workspace/kept", b"kept").await;
    let (mutation, asked) = (subject.mutation(), stopped(lab));
    let saving = || lab.provider().save(&mutation, &subject.sandbox, &asked);
    let first = saving().await.must("save");
    let second = seal(&subject).await;
    // The first one's answer may have been lost; whoever asks again hears it, also after others.
    assert_eq!(saving().await.must("save, repeated"), first);
    assert_ne!(second.id, first.id);
    assert_eq!((&second.source, &second.parent), (&first.source, &first.parent));
    subject.destroy().await;
    for snapshot in [first, second] {
        assert_eq!(restored(lab, &snapshot.id).await.read("/workspace/kept").await, b"kept");
    }
}

pub(super) async fn an_ended_instance_can_still_be_saved(lab: &Lab) {
    if !can_turn(lab).await || !lab.can_expire().await {
        return;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    subject.write("/workspace/kept", b"kept").await;
    subject.until_ended(SOON_MS).await;
    let snapshot = seal(&subject).await;
    assert_eq!(subject.until_ended(SOON_MS).await.cause, EndCause::Expired, "it had ended by itself");
    subject.destroy().await;
    let next = subject.next();
    restore(&next, &snapshot.id).await.must("restore");
    assert_eq!(next.read("/workspace/kept").await, b"kept");
}

pub(super) async fn the_frozen_can_be_saved(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let subject = lab.subject().await;
    subject.write("/workspace/kept", b"kept").await;
    subject.start(&program::tick()).await;
    let frozen = lab.provider().freeze(&subject.mutation(), &subject.sandbox).await;
    if !lab.can(Capability::Freeze) {
        return assert_unsupported(frozen, Capability::Freeze);
    }
    frozen.must("freeze");
    let mut saved = Vec::new();
    if lab.can(Capability::SaveLive) {
        saved.push(copy(&subject).await);
        assert_eq!(subject.state().await, InstanceState::Frozen, "a live save thawed it");
    }
    saved.push(seal(&subject).await);
    assert!(is_saved(&subject.state().await));
    for snapshot in saved {
        assert_eq!(restored(lab, &snapshot.id).await.read("/workspace/kept").await, b"kept");
    }
}

pub(super) async fn memory_save_brings_executions_back(lab: &Lab) {
    if !can_save(lab, Capability::SaveMemory).await || !can_restore(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let execution = subject.start(&program::tick()).await;
    subject.until_written(&execution, "3\n").await;
    // Some can save it only with everything ended.
    let asked = SaveRequest { live: !lab.can(Capability::SaveStopped), memory: true, ..live(lab) };
    let snapshot = save(&subject, &asked).await.must("save");
    assert!(snapshot.memory);
    subject.destroy().await;
    let next = subject.next();
    restore(&next, &snapshot.id).await.must("restore");
    let before = next.status(&execution).await;
    assert_eq!(before.state, ExecState::Running);
    assert!(next.written(&execution).await.starts_with("0\n1\n2\n3\n"), "the output of before is there");
    lab.until("progress", SOON_MS, async || {
        (next.status(&execution).await.output_bytes > before.output_bytes).then_some(())
    })
    .await;
}

pub(super) async fn memory_is_recalled_only_if_wanted(lab: &Lab) {
    if !can_save(lab, Capability::SaveMemory).await || !can_restore(lab).await || !lab.can(Capability::SaveStopped) {
        return;
    }
    let subject = lab.subject().await;
    let execution = subject.start(&program::tick()).await;
    subject.until_written(&execution, "1\n").await;
    assert_eq!(lab.provider().memory_obstacles(&subject.instance()).await.must("memory_obstacles"), []);
    subject.write("/workspace/kept", b"kept").await;
    let remembered = save(&subject, &SaveRequest { memory: true, ..stopped(lab) }).await.must("save");
    subject.destroy().await;
    let recalled = |recall| InstanceSpec { recall, ..lab.spec() };
    let restore = async |next: &Subject<'_>, snapshot: &SnapshotId, recall| {
        let (provider, mutation) = (lab.provider(), next.mutation());
        provider.restore(&mutation, &next.sandbox, &lab.owner(), &recalled(recall), snapshot).await
    };
    // The files alone, and nothing of what ran.
    let plain = subject.next();
    restore(&plain, &remembered.id, Recall::Never).await.must("restore without memory");
    assert_eq!(plain.read("/workspace/kept").await, b"kept");
    let gone = lab.provider().execution(&plain.instance(), &execution).await;
    assert_refused!(gone, ProviderError::NotFound { .. });
    // What was saved without memory cannot be made with it, and nothing is made instead.
    let forgotten = save(&plain, &stopped(lab)).await.must("save without memory");
    plain.destroy().await;
    let next = plain.next();
    assert_refused!(restore(&next, &forgotten.id, Recall::Required).await, ProviderError::Failed { .. });
    assert_eq!(next.state().await, InstanceState::Absent);
    let next = next.next();
    restore(&next, &remembered.id, Recall::Required).await.must("restore with memory");
    assert_eq!(next.status(&execution).await.state, ExecState::Running);
}

pub(super) async fn memory_goes_to_others_as_copies(lab: &Lab) {
    if !can_save(lab, Capability::SaveMemory).await || !can_restore(lab).await || !lab.can(Capability::SaveLive) {
        return;
    }
    let subject = lab.subject().await;
    let execution = subject.start(&program::tick()).await;
    subject.until_written(&execution, "3\n").await;
    let asked = SaveRequest { memory: true, ..live(lab) };
    let snapshot = save(&subject, &asked).await.must("save of what runs on");
    assert!(snapshot.memory && snapshot.live);
    let mut all = vec![(subject, execution.clone())];
    for _ in 0..2 {
        let other = restored(lab, &asked.snapshot).await;
        let copy = execution.copied_into(&other.sandbox);
        let gone = lab.provider().execution(&other.instance(), &execution).await;
        assert_refused!(gone, ProviderError::NotFound { .. });
        assert!(other.written(&copy).await.starts_with("0\n1\n2\n3\n"), "the output of before is there");
        all.push((other, copy));
    }
    for (one, execution) in &all {
        let before = one.status(execution).await;
        assert_eq!(before.state, ExecState::Running);
        lab.until("progress", SOON_MS, async || {
            (one.status(execution).await.output_bytes > before.output_bytes).then_some(())
        })
        .await;
    }
}

pub(super) async fn save_repeated_saves_once(lab: &Lab) {
    if !can_copy(lab).await {
        return;
    }
    let subject = lab.subject().await;
    subject.write("/workspace/when", b"before").await;
    let (mutation, asked) = (subject.mutation(), live(lab));
    let first = lab.provider().save(&mutation, &subject.sandbox, &asked).await.must("save");
    subject.write("/workspace/when", b"after").await;
    let again = lab.provider().save(&mutation, &subject.sandbox, &asked).await.must("save, repeated");
    assert_eq!(again, first);
    let other = restored(lab, &asked.snapshot).await;
    assert_eq!(other.read("/workspace/when").await, b"before", "it was saved twice");
}

pub(super) async fn saves_at_once_under_one_id_make_one(lab: &Lab) {
    if !can_save(lab, Capability::SaveLive).await {
        return;
    }
    let subject = lab.subject().await;
    let (first, second, asked) = (subject.mutation(), subject.mutation(), live(lab));
    let (one, other) = tokio::join!(
        lab.provider().save(&first, &subject.sandbox, &asked),
        lab.provider().save(&second, &subject.sandbox, &asked),
    );
    let winner = match (one, other) {
        (Ok(_), Err(ProviderError::Conflict { .. })) => first,
        (Err(ProviderError::Conflict { .. }), Ok(_)) => second,
        both => panic!("exactly one has to win, the other to conflict: {both:?}"),
    };
    let (one, other) = tokio::join!(
        lab.provider().save(&winner, &subject.sandbox, &asked),
        lab.provider().save(&winner, &subject.sandbox, &asked),
    );
    assert_eq!(one.must("the winner's save, repeated"), other.must("the winner's save, repeated at once"));
    assert_eq!(lab.snapshots_all(&lab.owner(), None).await.len(), 1);
}

pub(super) async fn save_under_a_used_id_conflicts(lab: &Lab) {
    if !can_save(lab, Capability::SaveLive).await {
        return;
    }
    let subject = lab.subject().await;
    let asked = live(lab);
    let first = save(&subject, &asked).await.must("save");
    for other in [subject, lab.subject().await] {
        assert_refused!(save(&other, &asked).await, ProviderError::Conflict { .. });
        assert_eq!(look(lab, &asked.snapshot).await.must("snapshot").snapshot, first, "it was replaced");
    }
}

pub(super) async fn late_saves_are_refused_and_leave_nothing(lab: &Lab) {
    if !can_save(lab, Capability::SaveStopped).await {
        return;
    }
    let subject = Subject::new(lab, lab.fresh_sandbox(), Generation(2), TOKEN);
    subject.create(&lab.spec()).await;
    let asked = stopped(lab);
    let older = lab.mutation(subject.generation, FencingToken(TOKEN.0 - 1));
    let late = lab.provider().save(&older, &subject.sandbox, &asked).await;
    assert_refused!(late, ProviderError::Fenced { highest: TOKEN, .. });
    let stale = lab.mutation(Generation::FIRST, subject.token);
    let late = lab.provider().save(&stale, &subject.sandbox, &asked).await;
    assert_refused!(late, ProviderError::StaleGeneration { current, .. } if current == subject.generation);
    assert_eq!(subject.state().await, InstanceState::Running, "a refused save ended it");
    subject.destroy().await;
    assert_refused!(save(&subject, &asked).await, ProviderError::Absent);
    assert_refused!(save(&unmade(lab), &asked).await, ProviderError::Absent);
    assert!(lab.snapshots_all(&lab.owner(), None).await.is_empty());
}

pub(super) async fn a_destroy_in_the_middle_leaves_all_or_nothing(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let subject = lab.subject().await;
    subject.write("/workspace/kept", b"kept").await;
    let asked = stopped(lab);
    // Whichever comes first: what was acknowledged is there, and what was refused left nothing (L11).
    let (saved, ()) = tokio::join!(save(&subject, &asked), subject.destroy());
    assert_eq!(subject.state().await, InstanceState::Absent);
    if saved.is_ok() {
        assert_eq!(restored(lab, &asked.snapshot).await.read("/workspace/kept").await, b"kept");
    } else {
        assert_refused!(look(lab, &asked.snapshot).await, ProviderError::NotFound { .. });
        assert!(lab.snapshots_all(&lab.owner(), None).await.is_empty());
    }
}
