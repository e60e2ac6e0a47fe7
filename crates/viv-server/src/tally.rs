//! Figures that nobody else keeps: totals from the journal, and what was asked of each sandbox since the daemon began.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use viv_api::resources::Operations;
use viv_core::SandboxId;
use viv_core::lifecycle::PhaseName;
use viv_core::spec::Project;
use viv_store::{Cursor, JournalFilter, NewLine, Store, StoreError};

/// Lines read from the journal at once.
const PAGE: usize = 1_000;

/// Most sandboxes whose figures are remembered; when there are more, some begin again.
const REMEMBERED_MAX: usize = 10_000;

/// How long an end may take to be in time (O2).
pub(crate) const STOP_MS_MAX: u64 = 30_000;

/// How long a cancellation may take to be in time: from asking until the end was seen (O2).
pub(crate) const CANCEL_MS_MAX: u64 = 5_000;

/// How the actor of a task's own doings begins.
const TASK: &str = "task:";

/// How many came and went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) created: u64,
    pub(crate) destroyed: u64,
    /// Ends that began, saves among them, and how many of them were well over.
    pub(crate) stops: u64,
    pub(crate) stopped: u64,
    pub(crate) lost: u64,
    pub(crate) failed: u64,
    /// Ends that took no longer than [`STOP_MS_MAX`].
    pub(crate) stopped_in_time: u64,
    /// New instances for what was lost or had failed, and how many of them came up.
    pub(crate) recreates: u64,
    pub(crate) recreated: u64,
    /// What was saved and was to run again, and how much of it did.
    pub(crate) resumes: u64,
    pub(crate) resumed: u64,
    /// What was cancelled while it ran, how much of it was seen to end within [`CANCEL_MS_MAX`], and how much had
    /// something to say after it was decided.
    pub(crate) cancels: u64,
    pub(crate) cancelled_in_time: u64,
    pub(crate) cancels_mistaken: u64,
    /// Commands and tasks whose end was seen, and how many of them had run out of time.
    pub(crate) ends: u64,
    pub(crate) timed_out: u64,
    /// Tasks that ended, how many of them for being silent, and how many of those were not.
    pub(crate) tasks: u64,
    pub(crate) inactive: u64,
    pub(crate) inactive_mistaken: u64,
}

impl Totals {
    /// Counts what is said of an end, in place of what was said before.
    fn judge(&mut self, decided: Decided, was: bool) {
        let counts = [(decided.inactive, &mut self.inactive_mistaken), (decided.cancelled, &mut self.cancels_mistaken)];
        for (counted, count) in counts {
            if counted {
                *count = *count - u64::from(was) + u64::from(decided.mistaken);
            }
        }
    }

    fn plus(self, other: &Self) -> Self {
        Self {
            created: self.created + other.created,
            destroyed: self.destroyed + other.destroyed,
            stops: self.stops + other.stops,
            stopped: self.stopped + other.stopped,
            lost: self.lost + other.lost,
            failed: self.failed + other.failed,
            stopped_in_time: self.stopped_in_time + other.stopped_in_time,
            recreates: self.recreates + other.recreates,
            recreated: self.recreated + other.recreated,
            resumes: self.resumes + other.resumes,
            resumed: self.resumed + other.resumed,
            cancels: self.cancels + other.cancels,
            cancelled_in_time: self.cancelled_in_time + other.cancelled_in_time,
            cancels_mistaken: self.cancels_mistaken + other.cancels_mistaken,
            ends: self.ends + other.ends,
            timed_out: self.timed_out + other.timed_out,
            tasks: self.tasks + other.tasks,
            inactive: self.inactive + other.inactive,
            inactive_mistaken: self.inactive_mistaken + other.inactive_mistaken,
        }
    }
}

/// The figures.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    read: tokio::sync::Mutex<Read>,
    asked: Mutex<HashMap<SandboxId, Asked>>,
}

/// How far the journal was read, and what it said. It is read on demand, and each line once.
#[derive(Debug, Default)]
struct Read {
    until: Cursor,
    by_project: BTreeMap<Project, Totals>,
    /// What has begun and is not over yet: as many as are on their way at a time.
    begun: HashMap<SandboxId, Begun>,
    /// Tasks that somebody stopped, and when.
    stopped_tasks: HashMap<String, u64>,
    /// Ends of tasks that somebody may call mistaken, and whether somebody does (O2).
    decided: HashMap<String, Decided>,
    /// Tasks that wrote on while they were ended, until their end is told.
    wrote_on: HashSet<String>,
}

/// An end of a task that was decided, and counted as what.
#[derive(Debug, Clone, Copy)]
struct Decided {
    inactive: bool,
    cancelled: bool,
    mistaken: bool,
}

/// What has begun with a sandbox, and is counted when it is over.
#[derive(Debug, Clone, Copy)]
enum Begun {
    /// Its end, at this time.
    Stop(u64),
    /// Another instance.
    Recreate,
    /// What was saved is to run again.
    Resume,
}

impl Read {
    /// Counts one line.
    fn line(&mut self, line: &NewLine) {
        // What nobody asked for counts from when somebody did (L19).
        let Some(project) = line.project.as_ref().filter(|project| !project.is_spares()) else { return };
        if line.kind == "sandbox.created" && line.from.is_some() {
            self.by_project.entry(project.clone()).or_default().created += 1;
        }
        if let (Some(sandbox), Some(from), Some(to)) = (&line.sandbox, line.from, line.to) {
            self.step(project, sandbox, line.at_ms, from, to);
            return;
        }
        let totals = self.by_project.entry(project.clone()).or_default();
        let word = |name: &str| line.data.get(name).and_then(Value::as_str).unwrap_or_default();
        let number = |name: &str| line.data.get(name).and_then(Value::as_u64).unwrap_or_default();
        match line.kind.as_str() {
            "sandbox.created" => totals.created += 1,
            "execution.ended" => {
                totals.ends += 1;
                totals.timed_out += u64::from(line.cause.as_deref() == Some("timed_out"));
            }
            // What a task ends of its own is counted with the task, and told in any order with its end: what wrote on
            // was not at its end.
            "execution.cancel_asked" if line.by.who.starts_with(TASK) => {
                let task = line.by.who[TASK.len()..].to_owned();
                if number("wrote_bytes") == 0 {
                    return;
                }
                match self.decided.get_mut(&task) {
                    Some(decided) => {
                        let was = std::mem::replace(&mut decided.mistaken, true);
                        totals.judge(*decided, was);
                    }
                    None if self.wrote_on.len() < REMEMBERED_MAX => drop(self.wrote_on.insert(task)),
                    None => {}
                }
            }
            // What had ended by itself was not cancelled; of what did not answer, nobody saw the end.
            "execution.cancel_asked" if matches!(line.cause.as_deref(), Some("cancelled" | "unanswered")) => {
                let seen = line.cause.as_deref() == Some("cancelled");
                totals.cancels += 1;
                totals.cancelled_in_time += u64::from(seen && number("took_ms") <= CANCEL_MS_MAX);
                totals.cancels_mistaken += u64::from(number("wrote_bytes") > 0);
            }
            "task.stop_requested" if self.stopped_tasks.len() < REMEMBERED_MAX => {
                self.stopped_tasks.entry(word("task").to_owned()).or_insert(line.at_ms);
            }
            "task.ended" => {
                let (state, mistaken) = (word("state"), self.wrote_on.remove(word("task")));
                let asked_ms = self.stopped_tasks.remove(word("task"));
                totals.ends += 1;
                totals.tasks += 1;
                totals.timed_out += u64::from(state == "timed_out");
                totals.inactive += u64::from(state == "inactive");
                let asked_ms = asked_ms.filter(|_| state == "stopped");
                if let Some(asked_ms) = asked_ms {
                    totals.cancels += 1;
                    totals.cancelled_in_time += u64::from(line.at_ms.saturating_sub(asked_ms) <= CANCEL_MS_MAX);
                }
                let decided = Decided { inactive: state == "inactive", cancelled: asked_ms.is_some(), mistaken };
                totals.judge(decided, false);
                if decided.inactive || decided.cancelled {
                    if self.decided.len() >= REMEMBERED_MAX {
                        let some = self.decided.keys().next().cloned();
                        some.and_then(|some| self.decided.remove(&some));
                    }
                    self.decided.insert(word("task").to_owned(), decided);
                }
            }
            // A later line, and the last one holds. An end that is not in the journal any more is not counted, nor is
            // what was said of it.
            "task.marked" => {
                if let Some(decided) = self.decided.get_mut(word("task")) {
                    let was = std::mem::replace(&mut decided.mistaken, line.data["mistaken"] == Value::Bool(true));
                    totals.judge(*decided, was);
                }
            }
            // What it ended as before is nobody's question any more.
            "task.continued" => {
                self.decided.remove(word("task"));
            }
            _ => {}
        }
    }

    /// Counts one step of a sandbox's life.
    fn step(&mut self, project: &Project, sandbox: &SandboxId, at_ms: u64, from: PhaseName, to: PhaseName) {
        let totals = self.by_project.entry(project.clone()).or_default();
        let begun = self.begun.get(sandbox).copied();
        let mut over = true;
        match to {
            // What was to come up, and is stopped instead, is no success of that, and no failure. What is deleted while
            // it is saved ends once.
            PhaseName::Stopping | PhaseName::Hibernating => {
                if !matches!(begun, Some(Begun::Stop(_))) && self.begun.len() < REMEMBERED_MAX {
                    totals.stops += 1;
                    self.begun.insert(sandbox.clone(), Begun::Stop(at_ms));
                }
                over = false;
            }
            PhaseName::Stopped | PhaseName::Hibernated => {
                totals.destroyed += u64::from(to == PhaseName::Stopped);
                if let Some(Begun::Stop(since_ms)) = begun {
                    totals.stopped += 1;
                    totals.stopped_in_time += u64::from(at_ms.saturating_sub(since_ms) <= STOP_MS_MAX);
                }
            }
            PhaseName::Provisioning | PhaseName::Resuming => {
                // Its instance ended as it should: it goes back to a snapshot, or begins anew.
                if let Some(Begun::Stop(since_ms)) = begun {
                    totals.stopped += 1;
                    totals.stopped_in_time += u64::from(at_ms.saturating_sub(since_ms) <= STOP_MS_MAX);
                    self.begun.remove(sandbox);
                }
                let next = match from {
                    PhaseName::Lost | PhaseName::Failed => Some(Begun::Recreate),
                    PhaseName::Hibernated => Some(Begun::Resume),
                    PhaseName::Provisioning
                    | PhaseName::Verifying
                    | PhaseName::Ready
                    | PhaseName::Frozen
                    | PhaseName::Hibernating
                    | PhaseName::Resuming
                    | PhaseName::Stopping
                    | PhaseName::Stopped => None,
                };
                if let Some(next) = next.filter(|_| self.begun.len() < REMEMBERED_MAX) {
                    self.begun.insert(sandbox.clone(), next);
                }
                over = false;
            }
            PhaseName::Ready | PhaseName::Lost | PhaseName::Failed => {
                totals.lost += u64::from(to == PhaseName::Lost);
                totals.failed += u64::from(to == PhaseName::Failed);
                let came_up = u64::from(to == PhaseName::Ready);
                match begun {
                    Some(Begun::Recreate) => {
                        totals.recreates += 1;
                        totals.recreated += came_up;
                    }
                    Some(Begun::Resume) => {
                        totals.resumes += 1;
                        totals.resumed += came_up;
                    }
                    Some(Begun::Stop(_)) | None => {}
                }
            }
            PhaseName::Verifying | PhaseName::Frozen => over = false,
        }
        if over {
            self.begun.remove(sandbox);
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Asked {
    operations: Operations,
    cpu: Option<(u64, u64)>,
}

impl Tally {
    /// Of a project, or of all.
    pub(crate) async fn totals(&self, store: &dyn Store, project: Option<&Project>) -> Result<Totals, StoreError> {
        let mut read = self.read.lock().await;
        loop {
            let lines = store.journal(read.until, &JournalFilter::default(), PAGE).await?;
            let Some(last) = lines.last() else { break };
            read.until = last.cursor;
            for line in &lines {
                read.line(&line.line);
            }
        }
        let of = read.by_project.iter().filter(|(of, _)| project.is_none_or(|project| project == *of));
        Ok(of.fold(Totals::default(), |sum, (_, one)| sum.plus(one)))
    }

    fn of<T>(&self, sandbox: &SandboxId, change: impl FnOnce(&mut Asked) -> T) -> T {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.len() >= REMEMBERED_MAX && !asked.contains_key(sandbox) {
            let some = asked.keys().next().cloned();
            some.and_then(|some| asked.remove(&some));
        }
        change(asked.entry(sandbox.clone()).or_default())
    }

    /// A command was started in it.
    pub(crate) fn executed(&self, sandbox: &SandboxId) {
        self.of(sandbox, |asked| asked.operations.executions += 1);
    }

    /// Something was asked about its files.
    pub(crate) fn filed(&self, sandbox: &SandboxId) {
        self.of(sandbox, |asked| asked.operations.file_calls += 1);
    }

    /// What was asked of it.
    pub(crate) fn operations(&self, sandbox: &SandboxId) -> Operations {
        self.of(sandbox, |asked| asked.operations)
    }

    /// Processor use since the look before this one: 100 is one whole processor.
    pub(crate) fn cpu_percent(&self, sandbox: &SandboxId, cpu_us: u64, at_ms: u64) -> Option<f64> {
        let (cpu_before_us, before_ms) = self.of(sandbox, |asked| asked.cpu.replace((cpu_us, at_ms)))?;
        let (used_us, passed_ms) = (cpu_us.checked_sub(cpu_before_us)?, at_ms.checked_sub(before_ms)?);
        #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
        (passed_ms > 0).then(|| used_us as f64 / (passed_ms as f64 * 10.0))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use viv_core::lifecycle::Actor;

    use super::*;

    #[test]
    fn o2_ends_and_cancellations_are_counted() {
        let (mut read, project) = (Read::default(), Project::default());
        let mut by = |who: &str, at_ms: u64, kind: &str, cause: Option<&str>, data: Value| {
            read.line(&NewLine {
                at_ms,
                project: Some(project.clone()),
                sandbox: Some(SandboxId::from_bytes([1; 16])),
                generation: None,
                kind: kind.to_owned(),
                from: None,
                to: None,
                cause: cause.map(str::to_owned),
                by: Actor::part(who),
                data,
            });
        };
        // Of a task that wrote on while it was ended, whichever is told first.
        by("task:tsk_2", 1, "execution.cancel_asked", Some("cancelled"), json!({ "took_ms": 1, "wrote_bytes": 3 }));
        by("task:tsk_9", 1, "execution.cancel_asked", Some("cancelled"), json!({ "took_ms": 1, "wrote_bytes": 0 }));
        by("test", 1, "task.ended", None, json!({ "task": "tsk_8", "state": "inactive" }));
        by("task:tsk_8", 1, "execution.cancel_asked", Some("cancelled"), json!({ "took_ms": 1, "wrote_bytes": 3 }));
        let mut tell = |at_ms: u64, kind: &str, cause: Option<&str>, data: Value| by("test", at_ms, kind, cause, data);
        for cause in ["exited", "exited", "timed_out", "cancelled"] {
            tell(1, "execution.ended", Some(cause), json!({}));
        }
        let asked = "execution.cancel_asked";
        tell(1, asked, Some("cancelled"), json!({ "took_ms": 700, "wrote_bytes": 0 }));
        tell(1, asked, Some("cancelled"), json!({ "took_ms": 5_001, "wrote_bytes": 9 }));
        tell(1, asked, Some("unanswered"), json!({ "took_ms": 900 }));
        tell(1, asked, Some("exited"), json!({ "took_ms": 1, "wrote_bytes": 0 }));
        tell(10, "task.stop_requested", None, json!({ "task": "tsk_1" }));
        tell(20, "task.stop_requested", None, json!({ "task": "tsk_1" }));
        tell(5_011, "task.ended", None, json!({ "task": "tsk_1", "state": "stopped" }));
        tell(1, "task.ended", None, json!({ "task": "tsk_2", "state": "inactive" }));
        tell(1, "task.ended", None, json!({ "task": "tsk_3", "state": "timed_out" }));
        // What somebody says later holds, once, and can be taken back; of what nobody decided, nothing is counted.
        tell(6_000, "task.marked", None, json!({ "task": "tsk_1", "mistaken": true }));
        tell(6_001, "task.marked", None, json!({ "task": "tsk_1", "mistaken": true, "why": "again" }));
        tell(6_002, "task.marked", None, json!({ "task": "tsk_3", "mistaken": true }));
        tell(6_003, "task.marked", None, json!({ "task": "tsk_4", "mistaken": false }));
        tell(6_004, "task.ended", None, json!({ "task": "tsk_5", "state": "inactive" }));
        tell(6_005, "task.marked", None, json!({ "task": "tsk_5", "mistaken": true }));
        tell(6_006, "task.marked", None, json!({ "task": "tsk_2", "mistaken": false }));
        let totals = read.by_project[&project];
        assert_eq!((totals.ends, totals.timed_out), (9, 2));
        assert_eq!((totals.cancels, totals.cancelled_in_time, totals.cancels_mistaken), (4, 1, 2));
        assert_eq!((totals.tasks, totals.inactive, totals.inactive_mistaken), (5, 3, 2));
        assert!(read.stopped_tasks.is_empty() && read.wrote_on.is_empty());
    }

    #[test]
    fn o2_what_began_is_counted_when_it_is_over() {
        use PhaseName::{
            Failed, Hibernated, Hibernating, Lost, Provisioning, Ready, Resuming, Stopped, Stopping, Verifying,
        };
        let (mut read, project) = (Read::default(), Project::default());
        let mut live = |sandbox: u8, steps: &[(u64, PhaseName)]| {
            let id = SandboxId::from_bytes([sandbox; 16]);
            for two in steps.windows(2) {
                read.step(&project, &id, two[1].0, two[0].1, two[1].1);
            }
        };
        live(
            1,
            &[(0, Ready), (0, Lost), (1, Provisioning), (2, Verifying), (3, Provisioning), (4, Verifying), (5, Ready)],
        );
        live(2, &[(0, Ready), (0, Lost), (1, Provisioning), (2, Failed)]);
        live(3, &[(0, Hibernated), (1, Resuming), (2, Verifying), (3, Ready), (4, Stopping), (30_004, Stopped)]);
        live(4, &[(0, Hibernated), (1, Resuming), (2, Verifying), (3, Hibernating), (4, Hibernated)]);
        live(5, &[(0, Ready), (1, Stopping), (30_002, Stopped)]);
        live(6, &[(0, Ready), (1, Stopping)]);
        live(7, &[(0, Ready), (1, Hibernating), (30_002, Hibernated)]);
        live(8, &[(0, Ready), (1, Hibernating)]);
        live(9, &[(0, Ready), (1, Hibernating), (2, Stopping), (3, Stopped)]);
        live(10, &[(0, Ready), (1, Hibernating), (2, Resuming), (3, Verifying), (4, Ready)]);
        let totals = read.by_project[&project];
        assert_eq!((totals.recreates, totals.recreated), (2, 1));
        assert_eq!((totals.resumes, totals.resumed), (1, 1), "who changed their mind does not count");
        assert_eq!((totals.stops, totals.stopped, totals.stopped_in_time), (8, 6, 4), "saves are ends");
        assert_eq!(totals.destroyed, 3);
        assert_eq!((totals.lost, totals.failed), (2, 1));
        assert_eq!(read.begun.len(), 2, "only what is on its way is remembered");
    }
}
