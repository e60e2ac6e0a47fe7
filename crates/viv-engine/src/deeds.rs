//! What is done in sandboxes, for the journal: commands and files, by whom and from where (O7).
//!
//! ```text
//!   handle ──tell──► queue ──► scribe ──► the store, many lines in one commit
//! ```
//!
//! Nobody who runs a command waits for the disk: a line is handed over before the answer is given, and written in a
//! moment. It is lost only with a daemon that is killed within it, or whose store was taken over. A queue that is full
//! makes the next ones wait, and loses nothing. These lines are no activity, and change no record.
//!
//! The end of a command is written when it is first seen: by who reads its output, looks at it or cancels it, by the look
//! before idling, or when its instance is cleared. What nobody saw has ended with its instance, of which there are lines.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use viv_core::exec::{ExecState, ExecStatus, OutputEvent};
use viv_core::lifecycle::Actor;
use viv_core::spec::Project;
use viv_core::{EndCause, ExecutionId, SandboxId};
use viv_provider::{InstanceRef, OutputStream, ProviderError};
use viv_store::NewLine;

use crate::engine::{Engine, Inner};
use crate::error::EngineError;

/// Lines that wait to be written; with more, those who bring them wait.
const WAITING_MAX: usize = 4_096;

/// Lines that are written in one commit.
const GROUP: usize = 256;

/// How long the scribe waits before it asks a store again that failed.
const PAUSE: Duration = Duration::from_millis(500);

/// How long a daemon that ends waits for the last lines.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Most commands whose end is waited for; of the oldest beyond, no end is written.
const OPEN_MAX: usize = 10_000;

/// Most of a path that a line has.
const PATH_CHARS_MAX: usize = 512;

/// What was done, and by whom.
pub(crate) struct Deed<'d> {
    pub(crate) project: &'d Project,
    pub(crate) instance: &'d InstanceRef,
    pub(crate) by: &'d Actor,
    pub(crate) kind: &'static str,
    /// How it ended, where that has a word.
    pub(crate) cause: Option<&'static str>,
    pub(crate) data: Value,
}

#[derive(Debug)]
pub(crate) struct Deeds {
    lines: mpsc::Sender<NewLine>,
    taken: Mutex<Option<mpsc::Receiver<NewLine>>>,
    /// Handed over and not written.
    waiting: AtomicUsize,
    written: Notify,
    open: Mutex<Open>,
}

/// Commands that were started here and whose end was not seen.
#[derive(Debug, Default)]
struct Open {
    of: HashMap<ExecutionId, (Project, InstanceRef)>,
    order: VecDeque<ExecutionId>,
    /// The last ones whose end was, so that who repeats a request does not begin them anew.
    told: HashSet<ExecutionId>,
    told_order: VecDeque<ExecutionId>,
}

impl Default for Deeds {
    fn default() -> Self {
        let (lines, taken) = mpsc::channel(WAITING_MAX);
        let (taken, open) = (Mutex::new(Some(taken)), Mutex::default());
        Self { lines, taken, waiting: AtomicUsize::new(0), written: Notify::new(), open }
    }
}

impl Deeds {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It was started. Whether that is news: who repeats a request finds what the first one started.
    fn begin(&self, execution: &ExecutionId, project: &Project, instance: &InstanceRef) -> bool {
        let mut open = self.open();
        if open.of.contains_key(execution) || open.told.contains(execution) {
            return false;
        }
        while open.of.len() >= OPEN_MAX {
            let Some(oldest) = open.order.pop_front() else { break };
            open.of.remove(&oldest);
        }
        // Those that ended are left in the order until they are as many as the others may be.
        if open.order.len() >= 2 * OPEN_MAX {
            let Open { of, order, .. } = &mut *open;
            order.retain(|execution| of.contains_key(execution));
        }
        open.of.insert(execution.clone(), (project.clone(), instance.clone()));
        open.order.push_back(execution.clone());
        true
    }

    /// It ended. Whose it was, if that is news.
    fn end(&self, execution: &ExecutionId) -> Option<(Project, InstanceRef)> {
        let mut open = self.open();
        let whose = open.of.remove(execution)?;
        if open.told_order.len() >= OPEN_MAX {
            let oldest = open.told_order.pop_front();
            oldest.map(|oldest| open.told.remove(&oldest));
        }
        open.told.insert(execution.clone());
        open.told_order.push_back(execution.clone());
        Some(whose)
    }

    /// Nothing of it will be seen any more.
    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        let mut open = self.open();
        let Open { of, order, .. } = &mut *open;
        of.retain(|_, (_, instance)| instance.sandbox != *sandbox);
        order.retain(|execution| of.contains_key(execution));
    }
}

impl Engine {
    /// Answers when all that was done is written into the journal, or will not be: for the end of a daemon.
    pub async fn written(&self) {
        let deeds = &self.inner.deeds;
        let all = async {
            loop {
                let written = deeds.written.notified();
                if deeds.waiting.load(Ordering::SeqCst) == 0 {
                    return;
                }
                written.await;
            }
        };
        if tokio::time::timeout(LAST_LINES, all).await.is_err() {
            tracing::warn!(component = "journal", "the last lines about commands and files were not written");
        }
    }
}

impl Inner {
    /// Begins to write what is done.
    pub(crate) fn spawn_scribe(self: &Arc<Self>) {
        let taken = self.deeds.taken.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(lines) = taken {
            tokio::spawn(write(self.clone(), lines));
        }
    }

    /// Something was done: the line about it is written in a moment.
    pub(crate) async fn tell(&self, deed: Deed<'_>) {
        let Deed { project, instance, by, kind, cause, data } = deed;
        let line = NewLine {
            at_ms: self.clock.now_ms(),
            project: Some(project.clone()),
            sandbox: Some(instance.sandbox.clone()),
            generation: Some(instance.generation),
            kind: kind.to_owned(),
            from: None,
            to: None,
            cause: cause.map(str::to_owned),
            by: by.clone(),
            data,
        };
        self.deeds.waiting.fetch_add(1, Ordering::SeqCst);
        if self.deeds.lines.send(line).await.is_err() {
            self.done(1);
        }
    }

    fn done(&self, lines: usize) {
        self.deeds.waiting.fetch_sub(lines, Ordering::SeqCst);
        self.deeds.written.notify_waiters();
    }

    /// A command was started, or could not be, which is an end.
    pub(crate) async fn saw_start(&self, project: &Project, instance: &InstanceRef, by: &Actor, status: &ExecStatus) {
        if !self.deeds.begin(&status.id, project, instance) {
            return;
        }
        // What it was told to run, and never with what environment (S6).
        let data = json!({ "execution": status.id, "argv": status.argv, "detached": status.detached });
        self.tell(Deed { project, instance, by, kind: "execution.started", cause: None, data }).await;
        self.saw(status).await;
    }

    /// How a command stands was seen: its end is written once.
    pub(crate) async fn saw(&self, status: &ExecStatus) {
        // Why an instance ended is no end of what was saved with its memory: the record knows whether it goes on (X5).
        let is_saved = matches!(&status.state, ExecState::Lost { cause } if cause == EndCause::Saved.code());
        if !status.state.is_final() || is_saved {
            return;
        }
        let Some((project, instance)) = self.deeds.end(&status.id) else { return };
        let ran_ms = status.ended_at_ms.map(|ended_at_ms| ended_at_ms.saturating_sub(status.started_at_ms));
        let mut data = json!({
            "execution": status.id,
            "started_at_ms": status.started_at_ms,
            "ended_at_ms": status.ended_at_ms,
            "ran_ms": ran_ms,
            "output_bytes": status.output_bytes,
        });
        let (cause, more) = ended(&status.state);
        if let Some((name, value)) = more {
            data[name] = value;
        }
        let by = Actor::part("provider");
        let (project, instance) = (&project, &instance);
        self.tell(Deed { project, instance, by: &by, kind: "execution.ended", cause: Some(cause), data }).await;
    }
}

/// The word for an end, and what else there is to say.
pub(crate) fn ended(state: &ExecState) -> (&'static str, Option<(&'static str, Value)>) {
    match state {
        ExecState::Running => ("running", None),
        ExecState::Suspended => ("suspended", None),
        ExecState::Exited { code } => ("exited", Some(("code", json!(code)))),
        ExecState::Signalled { signal } => ("signalled", Some(("signal", json!(signal)))),
        ExecState::OomKilled => ("oom_killed", None),
        ExecState::Failed { what } => ("failed", Some(("message", json!(what)))),
        ExecState::Cancelled => ("cancelled", None),
        ExecState::TimedOut => ("timed_out", None),
        ExecState::Lost { cause } => ("lost", Some(("message", json!(cause)))),
    }
}

/// A path as a line has it: its beginning, if it is long.
pub(crate) fn told_path(path: &str) -> String {
    if path.chars().count() <= PATH_CHARS_MAX {
        return path.to_owned();
    }
    path.chars().take(PATH_CHARS_MAX).chain(['…']).collect()
}

/// Writes lines as they come, those that came meanwhile together.
async fn write(inner: Arc<Inner>, mut lines: mpsc::Receiver<NewLine>) {
    let (mut ending, mut group) = (inner.ending(), Vec::new());
    loop {
        tokio::select! {
            biased;
            taken = lines.recv_many(&mut group, GROUP) => if taken == 0 { return },
            _ = ending.wait_for(|ending| *ending) => {
                while let Ok(line) = lines.try_recv() {
                    group.push(line);
                }
                if group.is_empty() {
                    return;
                }
            }
        }
        while let Err(error) = inner.store.append(inner.epoch, group.clone()).await {
            let error = EngineError::from(error);
            inner.heed(&error);
            // Who took the store over has its own; what is left has nobody to write it.
            if inner.is_ending() {
                tracing::warn!(component = "journal", lines = group.len(), %error, "lines were not written");
                break;
            }
            inner.pause(PAUSE).await;
        }
        inner.done(group.len());
        group.clear();
    }
}

/// An output whose end is written when it passes.
pub(crate) struct Heard {
    pub(crate) engine: Engine,
    pub(crate) output: Box<dyn OutputStream>,
}

#[async_trait]
impl OutputStream for Heard {
    async fn next(&mut self) -> Result<Option<OutputEvent>, ProviderError> {
        let event = self.output.next().await?;
        if let Some(OutputEvent::End(status)) = &event {
            self.engine.inner.saw(status).await;
        }
        Ok(event)
    }
}

#[cfg(test)]
mod tests {
    use viv_core::Generation;

    use super::*;

    #[test]
    fn o7_an_end_is_told_once_and_what_is_over_is_forgotten() {
        let (deeds, project) = (Deeds::default(), Project::default());
        let instance = |at: u8| InstanceRef { sandbox: SandboxId::from_bytes([at; 16]), generation: Generation::FIRST };
        let id = |at: u8| ExecutionId::from_bytes([at; 16]);
        assert!(deeds.begin(&id(1), &project, &instance(1)) && !deeds.begin(&id(1), &project, &instance(1)));
        assert!(deeds.begin(&id(2), &project, &instance(2)));
        assert_eq!(deeds.end(&id(1)), Some((project, instance(1))));
        assert_eq!(deeds.end(&id(1)), None, "it was told");
        deeds.forget(&instance(2).sandbox);
        assert_eq!(deeds.end(&id(2)), None);
        assert!(deeds.open().of.is_empty());
    }

    #[test]
    fn o7_what_is_waited_for_is_bounded() {
        let (deeds, project) = (Deeds::default(), Project::default());
        let instance = InstanceRef { sandbox: SandboxId::from_bytes([1; 16]), generation: Generation::FIRST };
        let id = |at: usize| ExecutionId::from_bytes((at as u128).to_be_bytes());
        for at in 0..OPEN_MAX + 10 {
            assert!(deeds.begin(&id(at), &project, &instance));
        }
        assert_eq!(deeds.open().of.len(), OPEN_MAX);
        assert!(deeds.end(&id(9)).is_none() && deeds.end(&id(10)).is_some());
        for at in 0..5 * OPEN_MAX {
            deeds.begin(&id(at), &project, &instance);
            deeds.end(&id(at));
        }
        let open = deeds.open();
        assert!(open.order.len() <= 2 * OPEN_MAX && open.told.len() <= OPEN_MAX && open.told_order.len() <= OPEN_MAX);
        assert_eq!(told_path(&"ü".repeat(600)).chars().count(), PATH_CHARS_MAX + 1);
    }
}
