//! Tasks.

use super::http::Call;
use super::sandbox::pages;
use super::{Client, Output, Result};
use crate::bound::{IdempotencyKey, TaskRef};
use crate::page::Page;
use crate::path::{self, fill};
use crate::query::{self, encode};
use crate::task::{ContinueTask, CreateTask, MarkTask, StopTask, Task, TaskTimeline};

impl Client {
    /// Runs a task. With a key, asking again runs no second one.
    pub fn run_task(&self, task: &CreateTask, key: Option<&IdempotencyKey>) -> Result<Task> {
        let mut call = Call::post(path::TASKS).json(task).waits(task.wait_ms);
        call.idempotency_key = key;
        self.http.ask(call)
    }

    /// One part of the list of tasks.
    pub fn tasks(&self, query: &query::ListTasks) -> Result<Page<Task>> {
        self.http.ask(Call::get(path::TASKS.to_owned() + &encode(query)))
    }

    /// The list of tasks from there on, part by part.
    pub fn tasks_all(&self, query: query::ListTasks) -> impl Iterator<Item = Result<Task>> + '_ {
        pages(query.cursor.clone(), move |cursor| self.tasks(&query::ListTasks { cursor, ..query.clone() }))
    }

    /// A task.
    pub fn task(&self, task: &TaskRef) -> Result<Task> {
        self.http.ask(Call::get(fill(path::TASK, &[task.as_str()])))
    }

    /// Stops a task. When it is answered with a final state, everything of it was seen to be gone.
    pub fn stop_task(&self, task: &TaskRef, request: &StopTask) -> Result<Task> {
        self.http.ask(Call::post(fill(path::TASK_STOP, &[task.as_str()])).json(request).waits(request.wait_ms))
    }

    /// Goes on with a task.
    pub fn continue_task(&self, task: &TaskRef, request: &ContinueTask) -> Result<Task> {
        self.http.ask(Call::post(fill(path::TASK_CONTINUE, &[task.as_str()])).json(request).waits(request.wait_ms))
    }

    /// Says that a task should not have been ended, or takes that back.
    pub fn mark_task(&self, task: &TaskRef, request: &MarkTask) -> Result<Task> {
        self.http.ask(Call::post(fill(path::TASK_MARK, &[task.as_str()])).json(request))
    }

    /// What happened to a task.
    pub fn task_timeline(&self, task: &TaskRef) -> Result<TaskTimeline> {
        self.http.ask(Call::get(fill(path::TASK_TIMELINE, &[task.as_str()])))
    }

    /// What a step wrote, from an offset on; until it ends, when it is followed.
    pub fn task_logs(&self, task: &TaskRef, step: u32, offset: u64, follow: bool) -> Output<'_> {
        Output::of(self, fill(path::TASK_LOGS, &[task.as_str(), &step.to_string()]), None, offset, follow)
    }
}
