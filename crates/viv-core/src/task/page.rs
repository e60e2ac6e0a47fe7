//! What comes of every event in every state, compared with a page that is kept: a change of any answer is seen.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;

use super::tests::{after, ask, ended, exited, mark, request, running, stop, task};
use super::*;

/// When the events of the page happen: later than all that led there.
const NOW_MS: u64 = 77;

fn entered(came: Came) -> TaskEvent {
    TaskEvent::Entered { generation: Generation(2), came }
}

fn report(number: u8, steps: u64) -> TaskEvent {
    let (note, session) = (Some("half way".to_owned()), Some("s2".to_owned()));
    TaskEvent::Reported { request: request(number), steps, note, session }
}

fn limit(cause: TaskCause) -> TaskEvent {
    TaskEvent::LimitPassed { cause, message: "too much".to_owned() }
}

fn continued(keep_alive: bool) -> TaskEvent {
    let limits = TaskLimits { inactivity_ms: Some(5), total_ms: Some(6), reports_max: None };
    TaskEvent::Continued { steps: vec![ExecSpec::default(); 3], limits, keep_alive }
}

fn all(first: Task, events: &[TaskEvent]) -> Task {
    events.iter().fold(first, |task, event| after(&task, event))
}

/// Tasks to which things happen, by what led there.
fn tasks() -> Vec<(&'static str, Task)> {
    let preparing = after(&task(2), &TaskEvent::TakenUp);
    let filling = all(preparing.clone(), &[entered(Came::Made), TaskEvent::Starting { step: None }]);
    let moved = all(filling.clone(), &[TaskEvent::Started { execution: filling.execution_of(None) }]);
    let begun = all(moved.clone(), &[TaskEvent::PrepareEnded { ended: ExecState::Exited { code: 0 } }]);
    let runs = running(2);
    let started = after(&runs, &TaskEvent::Started { execution: runs.execution_of(Some(0)) });
    let told = all(started.clone(), &[TaskEvent::Output, report(1, 2)]);
    let committing = after(&told, &ask(1, "push"));
    let pushed = after(&committing, &ended(1));
    let noted = all(pushed.clone(), &[ask(2, "note"), ended(2)]);
    let failed = TaskEvent::EffectEnded { request: request(1), failed: Some("exit 1".to_owned()) };
    let unpushed = after(&committing, &failed);
    let stopped = after(&committing, &stop());
    let cut = after(&stopped, &TaskEvent::Cut);
    let killed = after(&cut, &TaskEvent::Killed { ended: Vec::new() });
    let last = all(pushed.clone(), &[exited(0, 0), TaskEvent::Starting { step: Some(1) }]);
    let done = after(&last, &exited(1, 0));
    let over = after(&done, &TaskEvent::Confirmed);
    let ended_over = after(&after(&told, &stop()), &TaskEvent::Confirmed);
    let marked = after(&ended_over, &mark(true, Some("it was well")));
    let not_kept = Task { keep_alive: false, ..over.clone() };
    let often = Task { run: RUNS_MAX, ..over.clone() };
    vec![
        ("queued", task(2)),
        ("queued, stopped", after(&task(2), &stop())),
        ("preparing", preparing.clone()),
        ("preparing, stopped", after(&preparing, &stop())),
        ("preparing, about to fill", filling),
        ("preparing, filling", moved),
        ("preparing, filled", begun),
        ("running, about to", runs),
        ("running", started.clone()),
        ("running, lost", after(&started, &TaskEvent::Gone { what: "gone".to_owned() })),
        ("running, told", told),
        ("committing", committing),
        ("pushed", pushed),
        ("pushed and noted", noted),
        ("not pushed", unpushed),
        ("committing, stopped", stopped),
        ("committing, stopped, cut", cut),
        ("committing, stopped, killed", killed.clone()),
        ("last step", last),
        ("done", done),
        ("succeeded", over),
        ("stopped", ended_over),
        ("stopped, by mistake", marked),
        ("effect unknown", after(&killed, &TaskEvent::Confirmed)),
        ("not kept", not_kept),
        ("run too often", often),
    ]
}

fn events(task: &Task) -> Vec<(String, TaskEvent)> {
    let signalled = ExecState::Signalled { signal: 9 };
    let step = |step, ended: ExecState| TaskEvent::StepEnded { step, ended };
    let ungated = TaskEvent::Asked { request: request(9), effect: "deploy".to_owned(), gated: false };
    let failed = TaskEvent::EffectEnded { request: request(1), failed: Some("exit 7".to_owned()) };
    let of = |step| TaskEvent::Started { execution: task.execution_of(step) };
    let events = vec![
        ("taken up", TaskEvent::TakenUp),
        ("entered, made", entered(Came::Made)),
        ("entered, reused", entered(Came::Reused)),
        ("entered, recreated", entered(Came::Recreated)),
        ("moved", TaskEvent::Moved { to: SandboxId::from_bytes([9; 16]) }),
        ("starting to fill", TaskEvent::Starting { step: None }),
        ("starting 0", TaskEvent::Starting { step: Some(0) }),
        ("starting 1", TaskEvent::Starting { step: Some(1) }),
        ("started to fill", of(None)),
        ("started 0", of(Some(0))),
        ("started 1", of(Some(1))),
        ("filled", TaskEvent::PrepareEnded { ended: ExecState::Exited { code: 0 } }),
        ("prepared", TaskEvent::Prepared),
        ("output", TaskEvent::Output),
        ("reported 1", report(8, 1)),
        ("reported 2", report(8, 2)),
        ("reported again", report(1, 1)),
        ("asked again", ask(1, "push")),
        ("asked to push", ask(7, "push")),
        ("asked to note", ask(7, "note")),
        ("asked to deploy", ask(7, "deploy")),
        ("asked where there is no gate", ungated),
        ("effect ended", ended(1)),
        ("effect failed", failed),
        ("unknown effect ended", ended(6)),
        ("step 0 ended", exited(0, 0)),
        ("step 0 failed", exited(0, 3)),
        ("step 0 killed", step(0, signalled)),
        ("step 0 out of memory", step(0, ExecState::OomKilled)),
        ("step 0 timed out", step(0, ExecState::TimedOut)),
        ("step 0 cancelled", step(0, ExecState::Cancelled)),
        ("step 0 lost", step(0, ExecState::Lost { cause: "gone".to_owned() })),
        ("step 0 not begun", step(0, ExecState::Failed { what: "no such program".to_owned() })),
        ("step 0 runs", step(0, ExecState::Running)),
        ("step 1 ended", exited(1, 0)),
        ("stop", stop()),
        ("total limit", limit(TaskCause::TotalLimit)),
        ("inactivity", limit(TaskCause::Inactivity)),
        ("report limit", limit(TaskCause::Reports)),
        ("step limit", limit(TaskCause::StepTimeLimit)),
        ("not prepared", TaskEvent::NotPrepared { what: "no room".to_owned() }),
        ("gone", TaskEvent::Gone { what: "lost".to_owned() }),
        ("cut", TaskEvent::Cut),
        ("killed", TaskEvent::Killed { ended: Vec::new() }),
        ("confirmed", TaskEvent::Confirmed),
        ("continued", continued(true)),
        ("continued, not kept", continued(false)),
        ("marked", mark(true, None)),
        ("marked, with a word", mark(true, Some("no"))),
        ("mark taken back", mark(false, None)),
    ];
    events.into_iter().map(|(word, event)| (word.to_owned(), event)).collect()
}

/// What differs, by its place.
fn changes(before: &Value, after: &Value, place: &str, found: &mut Vec<String>) {
    match (before, after) {
        (before, after) if before == after => {}
        (Value::Object(before), Value::Object(after)) if before.keys().eq(after.keys()) => {
            for (name, was) in before {
                let place = if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
                changes(was, &after[name], &place, found);
            }
        }
        (Value::Array(before), Value::Array(after)) if before.len() <= after.len() => {
            for (at, is) in after.iter().enumerate() {
                changes(before.get(at).unwrap_or(&Value::Null), is, &format!("{place}[{at}]"), found);
            }
        }
        (_, after) => found.push(format!("{place}={after}")),
    }
}

fn page() -> String {
    let mut page = String::new();
    for (word, task) in tasks() {
        let before = serde_json::to_value(&task).unwrap();
        let (mut changed, mut denied, mut ignored) = (Vec::new(), BTreeMap::<_, Vec<String>>::new(), Vec::new());
        for (event, what) in events(&task) {
            match step(&task, &what, NOW_MS) {
                TaskStepped::Accepted(next) => {
                    assert_eq!(next.version, task.version + 1);
                    let next = Task { version: task.version, ..*next };
                    let mut found = Vec::new();
                    changes(&before, &serde_json::to_value(&next).unwrap(), "", &mut found);
                    changed.push(format!("  {event}: {} [{:?}]", found.join(" "), next.work()));
                }
                TaskStepped::Denied(why) => denied.entry(format!("{why:?}")).or_default().push(event),
                TaskStepped::Ignored => ignored.push(event),
            }
        }
        writeln!(page, "{word} [{:?}]", task.work()).unwrap();
        for line in changed {
            writeln!(page, "{line}").unwrap();
        }
        for (why, events) in denied {
            writeln!(page, "  {why}: {}", events.join(", ")).unwrap();
        }
        writeln!(page, "  as it was: {}\n", ignored.join(", ")).unwrap();
    }
    page
}

#[test]
fn k1_every_event_in_every_state_comes_to_what_the_page_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/task/steps.txt");
    let page = page();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = kept.lines().zip(page.lines()).find(|(kept, now)| kept != now);
    assert!(kept == page, "src/task/steps.txt says otherwise: {differs:#?}\nUPDATE=1 cargo test -p viv-core");
}
