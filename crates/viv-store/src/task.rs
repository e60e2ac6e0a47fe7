//! Rows of tasks, as they are asked for, and rules that every store applies in the same way.

use viv_core::task::{Task, TaskState};
use viv_core::{ExecutionId, SandboxId, TaskId};

use crate::error::StoreError;
use viv_core::spec::Project;

/// Which tasks to list: newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskQuery {
    /// Of this project.
    pub project: Option<Project>,
    /// Of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// In one of these states; in any, when there are none.
    pub states: Vec<TaskState>,
    /// After the one that was made then.
    pub after: Option<(u64, TaskId)>,
    /// At most this many.
    pub limit: usize,
}

/// A page of tasks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskListing {
    /// The tasks.
    pub items: Vec<Task>,
    /// Where to go on.
    pub next: Option<(u64, TaskId)>,
}

/// The end of what an execution of a task wrote, kept when its sandbox goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskOutput {
    /// Of which task.
    pub task: TaskId,
    /// Of which execution.
    pub execution: ExecutionId,
    /// Where the first byte stands in all of it.
    pub offset: u64,
    /// The bytes, both streams together.
    pub data: Vec<u8>,
}

/// What the stored version has to be for this row to be written.
pub(crate) fn expected_version(task: &Task) -> Result<u64, StoreError> {
    task.version.checked_sub(1).ok_or_else(|| StoreError::Corrupt {
        what: format!("{} was to be written with version 0; the first one is 1", task.id),
    })
}

/// A page of those that are left, which are in order.
pub(crate) fn page(rest: impl Iterator<Item = Task>, limit: usize) -> TaskListing {
    let mut rest = rest.peekable();
    let items: Vec<Task> = rest.by_ref().take(limit).collect();
    let next = items.last().filter(|_| rest.peek().is_some()).map(|last| (last.made_at_ms, last.id.clone()));
    TaskListing { items, next }
}
