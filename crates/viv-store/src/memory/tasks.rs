//! Tasks.

use viv_core::task::Task;
use viv_core::{SandboxId, TaskId};

use super::{Result, State};
use crate::error::StoreError;
use crate::journal::NewLine;
use crate::task::{self, TaskListing, TaskOutput, TaskQuery};

impl State {
    pub(super) fn put_task(&mut self, row: Task, lines: Vec<NewLine>) -> Result<()> {
        let expected = task::expected_version(&row)?;
        let found = self.tasks.get(&row.id).map_or(0, |found| found.version);
        if found != expected {
            return Err(StoreError::TaskConflict { task: row.id, expected, found });
        }
        if row.is_at_work()
            && let Some(by) = self.task_at_work(&row.sandbox).filter(|by| *by != row.id)
        {
            return Err(StoreError::TaskBusy { sandbox: row.sandbox, by });
        }
        self.tasks.insert(row.id.clone(), row);
        self.append(lines);
        Ok(())
    }

    pub(super) fn tasks_like(&self, query: &TaskQuery) -> TaskListing {
        let place = |found: &Task| (found.made_at_ms, found.id.clone());
        let wanted = |found: &&Task| {
            query.sandbox.as_ref().is_none_or(|sandbox| found.sandbox == *sandbox)
                && query.project.as_ref().is_none_or(|project| found.project == *project)
                && (query.states.is_empty() || query.states.contains(&found.state))
                && query.after.as_ref().is_none_or(|after| place(found) < *after)
        };
        let mut found: Vec<Task> = self.tasks.values().filter(wanted).cloned().collect();
        found.sort_by_key(|found| std::cmp::Reverse(place(found)));
        task::page(found.into_iter(), query.limit)
    }

    pub(super) fn living_tasks(&self) -> Vec<TaskId> {
        let mut living: Vec<&Task> = self.tasks.values().filter(|task| !task.state.is_final()).collect();
        living.sort_by_key(|task| (task.made_at_ms, task.id.clone()));
        living.into_iter().map(|task| task.id.clone()).collect()
    }

    pub(super) fn task_at_work(&self, sandbox: &SandboxId) -> Option<TaskId> {
        let at_work = |task: &&Task| task.sandbox == *sandbox && task.is_at_work();
        self.tasks.values().find(at_work).map(|task| task.id.clone())
    }

    pub(super) fn keep_task_output(&mut self, output: TaskOutput) {
        if self.tasks.contains_key(&output.task) {
            self.task_outputs.insert((output.task.clone(), output.execution.clone()), output);
        }
    }

    pub(super) fn retain_tasks(&mut self, before_ms: u64, limit: usize) -> usize {
        let over = |task: &&Task| task.state.is_final() && task.times.confirmed_at_ms.is_some_and(|at| at < before_ms);
        let mut old: Vec<&Task> = self.tasks.values().filter(over).collect();
        old.sort_by_key(|task| task.times.confirmed_at_ms);
        let old: Vec<TaskId> = old.into_iter().take(limit).map(|task| task.id.clone()).collect();
        for id in &old {
            self.tasks.remove(id);
            self.task_outputs.retain(|(task, _), _| task != id);
        }
        old.len()
    }
}
