//! Executions as they are asked for and listed, and the rules that hold for their rows in every store.

use viv_core::execution::Execution;
use viv_core::lifecycle::Sandbox;
use viv_core::spec::Project;
use viv_core::{ExecutionId, SandboxId};

use crate::error::StoreError;
use crate::page::Place;

/// Most rows that are kept of a sandbox beside those that are open: the oldest are forgotten.
pub const EXECUTIONS_KEPT_MAX: u64 = 1_000;

/// Which executions to list: newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecutionQuery {
    /// Of this project.
    pub project: Option<Project>,
    /// Of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Only those that have not ended.
    pub open: bool,
    /// Only those that wait to be started.
    pub queued: bool,
    /// After this one, which the page before gave as `next`; anything else is [`StoreError::BadCursor`].
    pub after: Option<String>,
    /// At most this many.
    pub limit: usize,
}

impl ExecutionQuery {
    /// The word for how many may wait in a sandbox, in [`StoreError::Quota`].
    pub const QUEUED_LIMIT: &'static str = "queued_executions_per_sandbox";
}

/// A page of executions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecutionListing {
    /// The rows.
    pub items: Vec<Execution>,
    /// Where to go on.
    pub next: Option<String>,
}

/// What is kept of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptBytes {
    /// Of which execution.
    pub execution: ExecutionId,
    /// Since when.
    pub kept_at_ms: u64,
    /// The output, as [`viv_core::execution::KeptOutput`] has it.
    pub bytes: Vec<u8>,
}

/// What is written when this is told: nothing when it is no news, or is of no sandbox.
pub(crate) fn learnt(known: Option<&Execution>, news: &Execution, sandbox: Option<&Sandbox>) -> Option<Execution> {
    let sandbox = sandbox?;
    let news = news.as_saved(sandbox);
    let mut row = match known {
        None => Execution { version: 1, ..news },
        Some(known) => known.learn(&news)?,
    };
    row.settle(sandbox);
    (known != Some(&row)).then_some(row)
}

/// Whether the record lets it be written so: what would be settled at once is late.
pub(crate) fn fits(row: &Execution, sandbox: Option<&Sandbox>) -> bool {
    sandbox.is_some_and(|sandbox| crate::rules::is_living(sandbox) && !row.clone().settle(sandbox))
}

/// What the stored version has to be for this row to be written.
pub(crate) fn expected_version(row: &Execution) -> Result<u64, StoreError> {
    row.version.checked_sub(1).ok_or_else(|| StoreError::Corrupt {
        what: format!("{} was to be written with version 0; the first one is 1", row.id),
    })
}

/// Refuses one more that waits.
pub(crate) fn check_queued(used: u64, max: u64) -> Result<(), StoreError> {
    if used >= max { Err(StoreError::Quota { limit: ExecutionQuery::QUEUED_LIMIT, used, max }) } else { Ok(()) }
}

/// The place of a row in a listing.
pub(crate) fn place(row: &Execution) -> Place<ExecutionId> {
    Place { created_at_ms: row.asked_at_ms, id: row.id.clone() }
}

/// A page of those that are left, which are in order; one more than the limit tells that there are more.
pub(crate) fn page(mut items: Vec<Execution>, limit: usize) -> ExecutionListing {
    let more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| more).map(|last| place(last).encode());
    ExecutionListing { items, next }
}
