//! Before the first step: a turn, a sandbox, and what is brought into it.

use std::io::Cursor;
use std::time::Duration;

use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_core::lifecycle::{EntryKind, Phase, Sandbox, Status};
use viv_core::snapshot::SnapshotState;
use viv_core::task::{Came, GitSource, MakeSandbox, Task, TaskEvent};
use viv_core::{SandboxId, SnapshotId};
use viv_provider::{FileWrite, ProviderError};
use viv_store::SnapshotQuery;

use super::{TURN_EVERY, actor};
use crate::command::CreateRequest;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::Handle;
use crate::read::Which;

/// How long a sandbox may take to come up for a task.
const READY_WITHIN: Duration = Duration::from_secs(5 * 60);

/// How much of what a clone said is told when it fails.
const SAID_MAX: u64 = 1024;

/// Clones, unless it is there: into a place beside it first, so that what is there is whole.
const CLONE: &str = r#"set -e
[ -e "$2/.git" ] && exit 0
part="$2.viv-part"
rm -rf "$part"
mkdir -p "$(dirname "$2")"
git clone --quiet -- "$1" "$part"
[ -z "$3" ] || git -C "$part" checkout --quiet "$3" --
rmdir "$2" 2>/dev/null || true
mv -T "$part" "$2"
"#;

/// What does not go away by trying again.
enum Prepared {
    /// It can be used.
    Ready(Box<Handle>, Came),
    /// It cannot.
    Failed(String),
    /// The task is to end.
    Ending,
}

impl Engine {
    pub(super) async fn prepare_task(&self, task: Task) -> Result<(), EngineError> {
        let inner = &self.inner;
        // The semaphore is never closed.
        let _place = tokio::select! {
            biased;
            place = inner.tasks.places.acquire() => place.map_err(|_| EngineError::ShuttingDown)?,
            ended = self.until_ending(&task.id) => return ended,
        };
        let turn = inner.tasks.turn.notified();
        if task.state == viv_core::task::TaskState::Queued {
            let taken = if inner.is_draining() { Err(EngineError::Draining) } else { self.take_up(&task).await };
            match taken {
                Ok(()) => {}
                // Another one is at work there, or nothing new is begun for now.
                Err(EngineError::TaskBusy { .. } | EngineError::Draining) => {
                    tokio::select! {
                        biased;
                        () = turn => {}
                        () = tokio::time::sleep(TURN_EVERY) => {}
                        ended = self.until_ending(&task.id) => return ended,
                    }
                    return Ok(());
                }
                Err(other) => return Err(other),
            }
        }
        inner.reached("task.taken_up");
        let task = self.task(None, &task.id).await?;
        if task.ending.is_some() {
            return Ok(());
        }
        let failed = match self.enter_for(&task).await? {
            Prepared::Ready(handle, came) => {
                let task = if task.came.is_none() || task.generation != Some(handle.generation()) {
                    let event = TaskEvent::Entered { generation: handle.generation(), came };
                    self.apply_task(&task.id, &event).await?
                } else {
                    task.clone()
                };
                inner.reached("task.entered");
                tokio::select! {
                    biased;
                    ended = self.until_ending(&task.id) => return ended,
                    filled = self.fill(&task, &handle) => filled?,
                }
            }
            Prepared::Failed(what) => Some(what),
            Prepared::Ending => return Ok(()),
        };
        match failed {
            None => self.apply_task(&task.id, &TaskEvent::Prepared).await?,
            Some(what) => self.apply_task(&task.id, &TaskEvent::NotPrepared { what }).await?,
        };
        inner.reached("task.prepared");
        Ok(())
    }

    async fn take_up(&self, task: &Task) -> Result<(), EngineError> {
        self.apply_task(&task.id, &TaskEvent::TakenUp).await.map(drop)
    }

    /// Its sandbox, ready and probed.
    async fn enter_for(&self, task: &Task) -> Result<Prepared, EngineError> {
        let (sandbox, made) = match self.place_of(task).await {
            Ok(place) => place,
            Err(error) if is_passing(&error) => return Err(error),
            Err(error) => return Ok(Prepared::Failed(error.to_string())),
        };
        self.inner.reached("task.entering");
        let record = self.inner.load(&sandbox).await?;
        let was_ready = record.phase == Phase::Ready;
        // A user's stop is undone: this is somebody's explicit will (L9).
        match self.ensure(&sandbox, EntryKind::Task, actor(&task.id)).await {
            Ok(_) => {}
            // What was begun before a drain is seen to its end.
            Err(EngineError::Draining) if was_ready || made => {}
            Err(error) if is_passing(&error) => return Err(error),
            Err(error) => return Ok(Prepared::Failed(error.to_string())),
        }
        let waited = tokio::select! {
            biased;
            ended = self.until_ending(&task.id) => return ended.map(|()| Prepared::Ending),
            waited = self.wait_ready(&sandbox, READY_WITHIN) => waited,
        };
        match waited {
            Ok(view) if view.sandbox.phase == Phase::Ready => {}
            Ok(view) => return Ok(Prepared::Failed(format!("it is {} still", view.sandbox.phase.name().as_str()))),
            Err(error) if is_passing(&error) => return Err(error),
            Err(error) => return Ok(Prepared::Failed(error.to_string())),
        }
        // What was there may be broken all the same: it is probed before it is used again (K6).
        if was_ready && task.run > 1 && self.verify(&sandbox).await?.status != Status::Ready {
            self.inner.pause(super::STORE_PAUSE).await;
            return Ok(Prepared::Ending);
        }
        let handle = match self.work_in(&task.project, &Which::Id(sandbox.clone()), None).await {
            Ok(handle) => handle,
            Err(error) if is_passing(&error) => return Err(error),
            Err(error) => return Ok(Prepared::Failed(error.to_string())),
        };
        let same = task.generation == Some(handle.generation()) && task.sandbox == sandbox;
        let came = match (task.run, same) {
            // Entered before a crash.
            (_, true) if task.came.is_some() => task.came.unwrap_or(Came::Made),
            (1, _) if was_ready && !made => Came::Reused,
            (1, _) => Came::Made,
            (_, true) => Came::Reused,
            (_, false) => Came::Recreated,
        };
        Ok(Prepared::Ready(Box::new(handle), came))
    }

    /// Where it runs: a sandbox that is there, or one that is made for it. Whether it was made.
    async fn place_of(&self, task: &Task) -> Result<(SandboxId, bool), EngineError> {
        let inner = &self.inner;
        let found = inner.store.get(&task.sandbox).await?;
        if let Some(record) = found.as_ref().filter(|record| !record.is_over() && !record.deleted) {
            return Ok((record.id.clone(), false));
        }
        let make = match (&task.make, &found) {
            (Some(make), _) => make.clone(),
            // What was somebody else's is made again like it was, for who goes on; who begins needs it to be there.
            (None, Some(record)) if task.run > 1 => Box::new(like(record)),
            (None, Some(record)) => {
                let cause = Box::new(record.cause.clone());
                return Err(EngineError::Gone { sandbox: record.id.clone(), cause });
            }
            (None, None) => return Err(EngineError::NotFound { which: task.sandbox.to_string() }),
        };
        if let Some(name) = &make.name
            && let Some(other) = inner.store.find(&task.project, name).await?
            && !other.is_over()
            && !other.deleted
        {
            self.apply_task(&task.id, &TaskEvent::Moved { to: other.id.clone() }).await?;
            return Ok((other.id, false));
        }
        let id = if found.is_some() { task.next_sandbox() } else { task.sandbox.clone() };
        let snapshot = match &found {
            Some(record) => self.last_snapshot(record).await?.or_else(|| make.snapshot.clone()),
            None => make.snapshot.clone(),
        };
        let mut labels = make.labels.clone();
        labels.insert("task".to_owned(), task.id.to_string());
        let request = CreateRequest {
            project: task.project.clone(),
            name: make.name.clone(),
            spec: make.spec.clone(),
            policy: make.policy.clone(),
            labels,
            snapshot,
            by: actor(&task.id),
            key: None,
        };
        self.create_as(id.clone(), request).await?;
        if id != task.sandbox {
            self.apply_task(&task.id, &TaskEvent::Moved { to: id.clone() }).await?;
        }
        Ok((id, true))
    }

    /// The newest of what was saved of a sandbox that is gone.
    async fn last_snapshot(&self, record: &Sandbox) -> Result<Option<SnapshotId>, EngineError> {
        let query = SnapshotQuery { sandbox: Some(record.id.clone()), limit: 16, ..SnapshotQuery::default() };
        let rows = self.inner.store.snapshots(&query).await?.items;
        Ok(rows.into_iter().find(|row| row.state == SnapshotState::Ready).map(|row| row.id))
    }

    /// Brings files and source. Why it cannot be done, if so.
    async fn fill(&self, task: &Task, handle: &Handle) -> Result<Option<String>, EngineError> {
        for file in &task.files {
            // Whoever goes on has changed it, perhaps.
            if task.run > 1 && handle.file_stat(&file.path).await.is_ok() {
                continue;
            }
            let write = FileWrite { path: file.path.clone(), mode: file.mode, user: None };
            let content = Box::new(Cursor::new(file.content.clone().into_bytes()));
            match handle.file_write(&write, content).await {
                Ok(_) => {}
                Err(error) if is_passing(&error) => return Err(error),
                Err(error) => return Ok(Some(format!("{} cannot be written: {error}", file.path))),
            }
        }
        match &task.source {
            Some(source) => self.clone_source(task, handle, source).await,
            None => Ok(None),
        }
    }

    async fn clone_source(
        &self,
        task: &Task,
        handle: &Handle,
        source: &GitSource,
    ) -> Result<Option<String>, EngineError> {
        let task = self.apply_task(&task.id, &TaskEvent::Starting { step: None }).await?;
        let reference = source.reference.clone().unwrap_or_default();
        let argv = ["/bin/sh", "-c", CLONE, "viv-source", &source.url, &source.path, &reference];
        let spec = ExecSpec {
            argv: argv.map(str::to_owned).to_vec(),
            env: [("GIT_TERMINAL_PROMPT".to_owned(), "0".to_owned())].into(),
            cwd: Some("/".to_owned()),
            limit_ms: task.limits.total_ms,
            ..ExecSpec::default()
        };
        let id = task.execution_of(None);
        match handle.execute_unattended(&id, &spec).await {
            Ok(_) | Err(EngineError::Provider(ProviderError::Conflict { .. })) => {}
            Err(error) if is_passing(&error) => return Err(error),
            Err(error) => return Ok(Some(format!("the source cannot be cloned: {error}"))),
        }
        let mut output = handle.attach(&id, 0, true).await?;
        let mut said = Vec::new();
        let ended = loop {
            match output.next().await.map_err(EngineError::Provider)? {
                Some(OutputEvent::Chunk { data, .. }) => {
                    let room = SAID_MAX.saturating_sub(said.len() as u64) as usize;
                    said.extend(data.into_iter().take(room));
                }
                Some(OutputEvent::Cut { .. }) => {}
                Some(OutputEvent::End(status)) => break status.state,
                None => break handle.execution(&id).await?.state,
            }
        };
        self.apply_task(&task.id, &TaskEvent::PrepareEnded { ended: ended.clone() }).await?;
        Ok(match ended {
            ExecState::Exited { code: 0 } => None,
            other => {
                let said = String::from_utf8_lossy(&said).trim().to_owned();
                Some(format!("the source cannot be cloned ({}): {said}", ended_word(&other)))
            }
        })
    }
}

fn ended_word(state: &ExecState) -> String {
    match state {
        ExecState::Running | ExecState::Suspended => "it runs".to_owned(),
        ExecState::Exited { code } => format!("exit {code}"),
        ExecState::Signalled { signal } => format!("signal {signal}"),
        ExecState::OomKilled => "out of memory".to_owned(),
        ExecState::Failed { what } => what.clone(),
        ExecState::Cancelled => "cancelled".to_owned(),
        ExecState::TimedOut => "timed out".to_owned(),
        ExecState::Lost { cause } => cause.clone(),
    }
}

/// What passes: it is tried again, and the task's limits bound how long.
pub(super) fn is_passing(error: &EngineError) -> bool {
    match error {
        EngineError::ShuttingDown
        | EngineError::Store(_)
        | EngineError::Locked(_)
        | EngineError::BreakerOpen { .. } => true,
        EngineError::Provider(error) => error.is_transient(),
        _ => false,
    }
}

/// A sandbox that is made like one that was.
fn like(record: &Sandbox) -> MakeSandbox {
    MakeSandbox {
        name: record.name.clone(),
        spec: record.spec.clone(),
        policy: record.policy.clone(),
        labels: record.labels.clone(),
        snapshot: record.origin.clone(),
    }
}
