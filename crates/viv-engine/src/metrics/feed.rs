//! What the journal says, counted: each line once, in its order.

use std::collections::{HashMap, HashSet};

use viv_core::SandboxId;
use viv_core::lifecycle::{Cause, PhaseName};
use viv_store::{Cursor, JournalFilter, NewLine, Store, StoreError};

use super::{Metrics, family};

/// Lines read at once.
const PAGE: usize = 1_000;

/// Most sandboxes that are remembered, far above any quota; of more, some times are not measured.
const REMEMBERED_MAX: usize = 100_000;

/// How far the journal was read, and what has begun and is not over.
#[derive(Debug)]
pub(crate) struct Feed {
    until: Cursor,
    of: HashMap<SandboxId, Known>,
    /// Tasks that live: which run of them has begun, and since when somebody wants them stopped.
    tasks: HashMap<String, KnownTask>,
}

/// What is remembered of a task while it lives.
#[derive(Debug, Clone, Copy, Default)]
struct KnownTask {
    started_run: Option<u64>,
    stop_asked_ms: Option<u64>,
}

/// What is remembered of a sandbox while it lives.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// When the phase began that lasts.
    since_ms: Option<u64>,
    phase: Option<PhaseName>,
    /// When it was to end.
    ending_since_ms: Option<u64>,
    /// Whether that has begun, and is not over.
    is_ending: bool,
    /// Whether that was counted as failed.
    has_failed_to_end: bool,
    /// Whether its deadline passed, and it is being cleaned up.
    is_expired: bool,
}

/// Why a sandbox is lost or has failed without anybody's wish, and without a deadline that passed.
fn corrupted() -> HashSet<&'static str> {
    [
        Cause::Crashed,
        Cause::OomKilled,
        Cause::SupervisorLost,
        Cause::ProviderLost,
        Cause::ProbeFailed,
        Cause::Unresponsive,
        Cause::AbsenceUnproven,
    ]
    .iter()
    .map(Cause::code)
    .collect()
}

impl Feed {
    /// From here on: what was before this daemon is not its to count.
    pub(crate) fn after(until: Cursor) -> Self {
        Self { until, of: HashMap::new(), tasks: HashMap::new() }
    }

    /// Reads what was written since.
    pub(crate) async fn catch_up(&mut self, store: &dyn Store, metrics: &Metrics) -> Result<(), StoreError> {
        loop {
            let lines = store.journal(self.until, &JournalFilter::default(), PAGE).await?;
            let Some(last) = lines.last() else { return Ok(()) };
            self.until = last.cursor;
            for line in &lines {
                self.line(&line.line, metrics);
            }
            if lines.len() < PAGE {
                return Ok(());
            }
        }
    }

    /// When a task began, and how long it took to end it.
    fn task_line(&mut self, line: &NewLine, metrics: &Metrics) {
        let Some(id) = line.data.get("task").and_then(|value| value.as_str()) else { return };
        if self.tasks.len() >= REMEMBERED_MAX && !self.tasks.contains_key(id) {
            return;
        }
        let known = self.tasks.entry(id.to_owned()).or_default();
        match line.kind.as_str() {
            // Each step is started; the first one of a run counts.
            "task.started" => {
                let run = line.data.get("run").and_then(serde_json::Value::as_u64);
                if run != known.started_run {
                    known.started_run = run;
                    metrics.count(&family::TASKS_STARTED, &[]);
                }
            }
            "task.stop_requested" => {
                known.stop_asked_ms.get_or_insert(line.at_ms);
            }
            _ => {
                if let Some(asked_ms) = known.stop_asked_ms {
                    metrics.observe_ms(&family::TASK_STOP_SECONDS, &[], line.at_ms.saturating_sub(asked_ms));
                }
                self.tasks.remove(id);
            }
        }
    }

    fn line(&mut self, line: &NewLine, metrics: &Metrics) {
        metrics.count(&family::JOURNAL_LINES, &[&line.kind]);
        match line.kind.as_str() {
            "sandbox.created" => metrics.count(&family::CREATED, &[]),
            "sandbox.save_failed" => metrics.count(&family::SAVES_FAILED, &[]),
            "orphan.collected" => metrics.count(&family::ORPHANS_COLLECTED, &[]),
            "execution.ended" => {
                metrics.count(&family::EXECUTIONS_ENDED, &[]);
                let is_late = line.cause.as_deref() == Some("timed_out");
                metrics.add(&family::EXECUTIONS_TIMED_OUT, &[], f64::from(u8::from(is_late)));
            }
            "task.created" => metrics.count(&family::TASKS_CREATED, &[]),
            "task.started" | "task.stop_requested" => self.task_line(line, metrics),
            "task.ended" => {
                task(line, metrics);
                self.task_line(line, metrics);
            }
            _ => {}
        }
        let Some(sandbox) = &line.sandbox else { return };
        if self.of.len() >= REMEMBERED_MAX && !self.of.contains_key(sandbox) {
            return;
        }
        let known = self.of.entry(sandbox.clone()).or_default();
        match (line.kind.as_str(), line.to) {
            ("sandbox.stop_asked" | "sandbox.delete_asked", _) => {
                known.ending_since_ms.get_or_insert(line.at_ms);
            }
            ("sandbox.overdue" | "sandbox.retrying" | "sandbox.save_failed", _) => known.late(line, metrics),
            (_, Some(to)) => known.moved(line, to, metrics),
            (_, None) => {}
        }
        if known.phase == Some(PhaseName::Stopped) || (known.phase.is_none() && known.ending_since_ms.is_none()) {
            self.of.remove(sandbox);
        }
    }
}

impl Known {
    fn moved(&mut self, line: &NewLine, to: PhaseName, metrics: &Metrics) {
        use PhaseName::{
            Failed, Frozen, Hibernated, Hibernating, Lost, Provisioning, Ready, Resuming, Stopped, Stopping, Verifying,
        };
        let cause = line.cause.as_deref().unwrap_or_default();
        if let Some(from) = line.from {
            metrics.count(&family::TRANSITIONS, &[from.as_str(), to.as_str(), cause]);
            if let (Some(since_ms), true) = (self.since_ms, self.phase == Some(from)) {
                metrics.observe_ms(&family::PHASE_SECONDS, &[from.as_str()], line.at_ms.saturating_sub(since_ms));
            }
        }
        let came_from = line.from.or(self.phase);
        let ran = matches!(came_from, Some(Verifying | Ready | Frozen));
        (self.phase, self.since_ms) = (Some(to), Some(line.at_ms));
        if cause == Cause::Idle.code() {
            metrics.count(&family::IDLED, &[]);
        }
        if cause == Cause::Expired.code() && !self.is_expired {
            self.is_expired = true;
            metrics.count(&family::TIMEOUTS, &[]);
            metrics.count(&family::TIMEOUT_CLEANUPS, &[]);
        }
        if ran && matches!(to, Stopping | Stopped | Hibernating | Hibernated | Lost) {
            metrics.count(&family::ENDS, &[]);
        }
        match to {
            Stopping | Hibernating => {
                self.ending_since_ms.get_or_insert(line.at_ms);
                // What is deleted while it is saved ends once.
                if !std::mem::replace(&mut self.is_ending, true) {
                    metrics.count(&family::TERMINATIONS, &[]);
                    self.has_failed_to_end = false;
                }
            }
            Stopped | Hibernated => {
                if std::mem::take(&mut self.is_ending) {
                    metrics.count(&family::TERMINATIONS_DONE, &[]);
                }
                if let Some(since_ms) = self.ending_since_ms.take() {
                    metrics.observe_ms(&family::TERMINATION_SECONDS, &[], line.at_ms.saturating_sub(since_ms));
                }
                if std::mem::take(&mut self.is_expired) {
                    metrics.count(&family::TIMEOUT_CLEANUPS_DONE, &[]);
                }
            }
            Ready | Lost | Failed => {
                metrics.add(&family::LOST, &[], f64::from(u8::from(to == Lost)));
                if to != Ready && corrupted().contains(cause) {
                    metrics.count(&family::CORRUPTED, &[]);
                }
                // What was probed again because of a finding was up before.
                if matches!(came_from, Some(Provisioning | Verifying | Resuming)) && to != Lost {
                    metrics.count(&family::PROVISIONS, &[]);
                    metrics.add(&family::PROVISIONS_FAILED, &[], f64::from(u8::from(to == Failed)));
                }
                self.is_ending = false;
                if to == Ready {
                    (self.is_expired, self.ending_since_ms) = (false, None);
                }
            }
            // Its instance ended as it should: it goes back to a snapshot, or begins anew.
            Provisioning | Resuming => {
                metrics.add(&family::TERMINATIONS_DONE, &[], f64::from(u8::from(std::mem::take(&mut self.is_ending))));
            }
            Verifying | Frozen => {}
        }
    }

    /// Something takes longer than it may, or was tried in vain.
    fn late(&mut self, line: &NewLine, metrics: &Metrics) {
        let phase = self.phase.map_or("unknown", PhaseName::as_str);
        if line.kind == "sandbox.overdue" {
            metrics.count(&family::OVERDUE, &[phase]);
        }
        // A save that is tried again has not failed before it says so.
        let in_save = self.phase == Some(PhaseName::Hibernating) && line.kind != "sandbox.retrying";
        let in_end = self.phase == Some(PhaseName::Stopping) || line.cause.as_deref() == Some(Cause::KillFailed.code());
        if (in_end || in_save || line.kind == "sandbox.save_failed")
            && !std::mem::replace(&mut self.has_failed_to_end, true)
        {
            metrics.count(&family::TERMINATIONS_FAILED, &[]);
        }
    }
}

/// A task that was over. Its line says as what.
fn task(line: &NewLine, metrics: &Metrics) {
    const OVER: [&str; 8] =
        ["succeeded", "failed", "stopped", "timed_out", "inactive", "step_limit", "effect_unknown", "lost"];
    let said = line.data.get("state").and_then(|value| value.as_str());
    let Some(state) = said.and_then(|said| OVER.into_iter().find(|over| *over == said)) else { return };
    metrics.count(&family::TASKS, &[state]);
    metrics.count(&family::TASKS_ALL, &[]);
    match state {
        "inactive" => metrics.count(&family::TASKS_INACTIVE, &[]),
        "timed_out" => metrics.count(&family::TASKS_TIMED_OUT, &[]),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use viv_core::lifecycle::Actor;
    use viv_core::spec::Project;

    use super::*;

    fn line(sandbox: u8, at_ms: u64, kind: &str, step: Option<(PhaseName, PhaseName)>, cause: &Cause) -> NewLine {
        NewLine {
            at_ms,
            project: Some(Project::default()),
            sandbox: Some(SandboxId::from_bytes([sandbox; 16])),
            generation: None,
            kind: kind.to_owned(),
            from: step.map(|(from, _)| from),
            to: step.map(|(_, to)| to),
            cause: Some(cause.code().to_owned()),
            by: Actor::part("test"),
            data: serde_json::Value::Null,
        }
    }

    #[test]
    fn o4_what_began_and_what_came_of_it_are_counted_apart() {
        use PhaseName::{Failed, Hibernated, Hibernating, Lost, Provisioning, Ready, Stopped, Stopping, Verifying};
        let (metrics, mut feed) = (Metrics::default(), Feed::after(Cursor(0)));
        let mut live = |sandbox: u8, steps: &[(u64, PhaseName, Cause)]| {
            for two in steps.windows(2) {
                let (at_ms, to, cause) = (two[1].0, two[1].1, &two[1].2);
                feed.line(&line(sandbox, at_ms, "sandbox.moved", Some((two[0].1, to)), cause), &metrics);
            }
        };
        let begun = (0, Provisioning, Cause::Requested);
        live(1, &[begun.clone(), (5, Verifying, Cause::Made), (1_005, Ready, Cause::Verified)]);
        live(
            1,
            &[(0, Ready, Cause::Verified), (2_005, Stopping, Cause::Expired), (4_005, Stopped, Cause::AbsenceObserved)],
        );
        live(2, &[begun.clone(), (9, Failed, Cause::CreateFailed)]);
        live(3, &[begun, (5, Verifying, Cause::Made), (6, Ready, Cause::Verified), (7, Lost, Cause::Crashed)]);
        live(4, &[(0, Ready, Cause::Verified), (10, Stopping, Cause::UserStop)]);
        let saved = [(0, Ready, Cause::Verified), (10, Hibernating, Cause::UserStop), (20, Hibernated, Cause::Saved)];
        live(5, &saved);
        live(6, &saved[..2]);
        feed.line(&line(4, 11, "sandbox.retrying", None, &Cause::KillFailed), &metrics);
        feed.line(&line(4, 12, "sandbox.overdue", None, &Cause::KillFailed), &metrics);
        feed.line(&line(6, 11, "sandbox.retrying", None, &Cause::UserStop), &metrics);
        feed.line(&line(6, 12, "sandbox.save_failed", None, &Cause::UserStop), &metrics);
        let count = |family: &'static crate::metrics::Family| metrics.sum(family).round() as i64;
        assert_eq!((count(&family::PROVISIONS), count(&family::PROVISIONS_FAILED)), (3, 1));
        assert_eq!((count(&family::TERMINATIONS), count(&family::TERMINATIONS_DONE)), (4, 2), "saves are ends");
        assert_eq!(count(&family::TERMINATIONS_FAILED), 2, "each end counts once");
        assert_eq!((count(&family::ENDS), count(&family::TIMEOUTS)), (5, 1));
        assert_eq!((count(&family::TIMEOUT_CLEANUPS), count(&family::TIMEOUT_CLEANUPS_DONE)), (1, 1));
        assert_eq!((count(&family::LOST), count(&family::CORRUPTED)), (1, 1));
        let lasted = metrics.series(&family::PHASE_SECONDS);
        assert!(lasted.iter().any(|(labels, count)| labels == &["verifying"] && *count >= 2.0), "{lasted:?}");
        assert_eq!(feed.of.len(), 5, "what ended is forgotten");
    }

    #[test]
    fn o4_tasks_are_counted_when_they_are_made_begin_and_are_stopped() {
        let (metrics, mut feed) = (Metrics::default(), Feed::after(Cursor(0)));
        let mut tell = |at_ms: u64, kind: &str, cause: &Cause, data: serde_json::Value| {
            feed.line(&NewLine { data, ..line(1, at_ms, kind, None, cause) }, &metrics);
        };
        let of = |run: u64| serde_json::json!({ "task": "tsk_1", "run": run, "state": "stopped" });
        for (at_ms, kind, run) in [
            (0, "task.created", 1),
            (1, "task.started", 1),
            (2, "task.started", 1),
            (3, "task.stop_requested", 1),
            (5, "task.stop_requested", 1),
            (1_003, "task.ended", 1),
            (2_000, "task.started", 2),
            (3_000, "task.ended", 2),
        ] {
            tell(at_ms, kind, &Cause::Requested, of(run));
        }
        feed.line(
            &NewLine { cause: Some("timed_out".to_owned()), ..line(1, 9, "execution.ended", None, &Cause::Idle) },
            &metrics,
        );
        feed.line(
            &NewLine { cause: Some("exited".to_owned()), ..line(1, 10, "execution.ended", None, &Cause::Idle) },
            &metrics,
        );
        let count = |family: &'static crate::metrics::Family| metrics.sum(family).round() as i64;
        assert_eq!((count(&family::TASKS_CREATED), count(&family::TASKS_STARTED)), (1, 2), "each run begins once");
        assert_eq!(count(&family::TASK_STOP_SECONDS), 1, "the second run was not stopped");
        assert_eq!((count(&family::EXECUTIONS_TIMED_OUT), count(&family::EXECUTIONS_ENDED)), (1, 2));
        assert!(feed.tasks.is_empty());
    }

    #[test]
    fn o4_tasks_are_counted_by_how_they_were_over() {
        let metrics = Metrics::default();
        for (state, times) in [("running", 3), ("succeeded", 2), ("inactive", 1), ("timed_out", 1)] {
            for _ in 0..times {
                let mut line = line(1, 0, "task.ended", None, &Cause::Requested);
                line.data = serde_json::json!({ "state": state });
                task(&line, &metrics);
            }
        }
        let count = |family: &'static crate::metrics::Family| metrics.sum(family).round() as i64;
        assert_eq!(count(&family::TASKS_ALL), 4);
        assert_eq!((count(&family::TASKS_INACTIVE), count(&family::TASKS_TIMED_OUT)), (1, 1));
    }
}
