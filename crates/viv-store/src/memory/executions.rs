//! Executions, and what is kept of their outputs.

use viv_core::execution::Execution;
use viv_core::lifecycle::Sandbox;
use viv_core::{ExecutionId, SandboxId};

use super::{Result, State};
use crate::error::StoreError;
use crate::execution::{self, EXECUTIONS_KEPT_MAX, ExecutionListing, ExecutionQuery, KeptBytes, place};
use crate::page::Place;
use crate::rules::is_living;

impl State {
    pub(super) fn note_executions(&mut self, rows: Vec<Execution>) {
        for news in rows {
            let known = self.executions.get(&(news.sandbox.clone(), news.id.clone()));
            if let Some(row) = execution::learnt(known, &news, self.sandboxes.get(&news.sandbox)) {
                self.write_execution(row);
            }
        }
    }

    pub(super) fn put_execution(&mut self, row: Execution, queued_max: u64) -> Result<()> {
        let expected = execution::expected_version(&row)?;
        let found = self.executions.get(&(row.sandbox.clone(), row.id.clone())).map_or(0, |found| found.version);
        let fits = execution::fits(&row, self.sandboxes.get(&row.sandbox));
        if found != expected || !fits {
            return Err(StoreError::Conflict { sandbox: row.sandbox, expected, found });
        }
        if found == 0 && row.queued().is_some() {
            let waits = |other: &&Execution| other.sandbox == row.sandbox && other.queued().is_some();
            execution::check_queued(self.executions.values().filter(waits).count() as u64, queued_max)?;
        }
        self.write_execution(row);
        Ok(())
    }

    fn write_execution(&mut self, row: Execution) {
        let sandbox = row.sandbox.clone();
        self.executions.insert((sandbox.clone(), row.id.clone()), row);
        let ours = || self.executions.values().filter(|row| row.sandbox == sandbox);
        let surplus = ours().count().saturating_sub(EXECUTIONS_KEPT_MAX as usize);
        if surplus > 0 {
            let mut ended: Vec<_> = ours().filter(|row| !row.is_open()).map(place).collect();
            ended.sort_by(|a, b| b.cmp(a));
            for place in ended.into_iter().take(surplus) {
                self.executions.remove(&(sandbox.clone(), place.id));
            }
        }
    }

    /// The record is so now, and what cannot run any more is said not to (X5).
    pub(super) fn settle_executions(&mut self, sandbox: &Sandbox) {
        for row in self.executions.values_mut().filter(|row| row.sandbox == sandbox.id) {
            if row.settle(sandbox) {
                row.version += 1;
            }
        }
        if !is_living(sandbox) {
            self.outputs.retain(|(of, _), _| *of != sandbox.id);
        }
    }

    pub(super) fn executions_like(&self, query: &ExecutionQuery) -> Result<ExecutionListing> {
        let after = query.after.as_deref().map(Place::<ExecutionId>::decode).transpose()?;
        let mut items: Vec<Execution> = self
            .executions
            .values()
            .filter(|row| {
                query.sandbox.as_ref().is_none_or(|sandbox| row.sandbox == *sandbox)
                    && query.project.as_ref().is_none_or(|project| row.project == *project)
                    && (!query.open || row.is_open())
                    && (!query.queued || row.queued().is_some())
                    && after.as_ref().is_none_or(|after| place(row) > *after)
            })
            .cloned()
            .collect();
        items.sort_by_key(place);
        Ok(execution::page(items, query.limit))
    }

    pub(super) fn put_outputs(&mut self, sandbox: &SandboxId, outputs: Vec<KeptBytes>, bytes_max: u64) {
        if !self.sandboxes.get(sandbox).is_some_and(is_living) {
            return;
        }
        for kept in outputs {
            self.outputs.insert((sandbox.clone(), kept.execution.clone()), kept);
        }
        let ours = self.outputs.values().zip(self.outputs.keys()).filter(|(_, (of, _))| of == sandbox);
        let mut ours: Vec<(u64, ExecutionId, u64)> =
            ours.map(|(kept, _)| (kept.kept_at_ms, kept.execution.clone(), kept.bytes.len() as u64)).collect();
        ours.sort_by(|a, b| b.cmp(a));
        let mut total = 0;
        for (_, execution, bytes) in ours {
            total += bytes;
            if total > bytes_max {
                self.outputs.remove(&(sandbox.clone(), execution));
            }
        }
    }

    /// What is older than is kept; how many rows that were (J9).
    pub(super) fn retain_executions(&mut self, before_ms: u64, limit: usize) -> usize {
        let old = self.outputs.iter().filter(|(_, kept)| kept.kept_at_ms < before_ms);
        let old: Vec<_> = old.map(|(place, _)| place.clone()).take(limit).collect();
        for place in &old {
            self.outputs.remove(place);
        }
        let ended = self.executions.iter().filter(|(_, row)| row.ended_at_ms().is_some_and(|at_ms| at_ms < before_ms));
        let ended: Vec<_> = ended.map(|(place, _)| place.clone()).take(limit - old.len()).collect();
        for place in &ended {
            self.executions.remove(place);
        }
        old.len() + ended.len()
    }
}
