//! Sandboxes: made, listed, looked at, changed.

use ureq::http::Method;
use viv_core::{ExecutionId, Generation};

use super::http::Call;
use super::{Change, Client, ExecutionHandle, Result};
use crate::bound::{Cursor, IdempotencyKey, LeaseName, SandboxRef, WaitMs};
use crate::checkpoint::CheckpointCheck;
use crate::diagnosis::Diagnosis;
use crate::limits::{Limits, LimitsInForce};
use crate::page::Page;
use crate::path::{self, fill};
use crate::query::{self, encode};
use crate::resources::Resources;
use crate::sandbox::{
    Activity, CreateSandbox, Deadline, EnsureSandbox, ExtendSandbox, KeepAwake, ReportActivity, RestSandbox, Sandbox,
    SandboxLogs, StopSandbox, TakeKeepAwake, TimelineEntry,
};

/// A status that says that it goes on by itself.
const ACCEPTED: u16 = 202;

impl Client {
    /// Makes a sandbox. With a key, asking again makes no second one (L1).
    pub fn create(&self, sandbox: &CreateSandbox, key: Option<&IdempotencyKey>) -> Result<Change> {
        let mut call = Call::post(path::SANDBOXES).json(sandbox).waits(sandbox.wait_ms);
        call.idempotency_key = key;
        self.change(call)
    }

    /// One part of the list of sandboxes.
    pub fn list(&self, query: &query::ListSandboxes) -> Result<Page<Sandbox>> {
        self.http.ask(Call::get(path::SANDBOXES.to_owned() + &encode(query)))
    }

    /// The list of sandboxes from there on, part by part.
    pub fn list_all(&self, query: query::ListSandboxes) -> impl Iterator<Item = Result<Sandbox>> + '_ {
        pages(query.cursor.clone(), move |cursor| self.list(&query::ListSandboxes { cursor, ..query.clone() }))
    }

    pub(super) fn change(&self, call: Call<'_>) -> Result<Change> {
        let (status, sandbox) = self.http.ask_with_status(call)?;
        let sandbox = Box::new(sandbox);
        Ok(if status == ACCEPTED { Change::Underway(sandbox) } else { Change::Done(sandbox) })
    }
}

/// Asks for one part after the other.
pub(super) fn pages<T>(
    first: Option<Cursor>,
    ask: impl Fn(Option<Cursor>) -> Result<Page<T>>,
) -> impl Iterator<Item = Result<T>> {
    let mut next = Some(first);
    let parts = std::iter::from_fn(move || {
        let page = ask(next.take()?);
        if let Ok(page) = &page {
            // A cursor that is none ends the list rather than beginning it again.
            next = page.next.as_deref().and_then(|cursor| Cursor::new(cursor).ok()).map(Some);
        }
        Some(page)
    });
    parts.flat_map(|page| match page {
        Ok(page) => page.items.into_iter().map(Ok).collect::<Vec<_>>(),
        Err(error) => vec![Err(error)],
    })
}

/// A handle on a sandbox, perhaps on one generation of it.
#[derive(Debug, Clone)]
pub struct SandboxHandle<'a> {
    pub(super) client: &'a Client,
    pub(super) sandbox: SandboxRef,
    pub(super) generation: Option<Generation>,
}

impl<'a> SandboxHandle<'a> {
    pub(super) fn new(client: &'a Client, sandbox: SandboxRef) -> Self {
        Self { client, sandbox, generation: None }
    }

    /// The same, about this generation only: once there is another, calls get `stale_handle` (T5).
    #[must_use]
    pub fn at(mut self, generation: Generation) -> Self {
        self.generation = Some(generation);
        self
    }

    /// A handle on one of its executions.
    pub fn execution(&self, execution: ExecutionId) -> ExecutionHandle<'a> {
        ExecutionHandle { sandbox: self.clone(), execution }
    }

    pub(super) fn path(&self, path: &str) -> String {
        fill(path, &[self.sandbox.as_str()])
    }

    /// A request about this sandbox, and this generation if one is meant.
    pub(super) fn call<'b>(&self, mut call: Call<'b>) -> Call<'b> {
        call.generation = self.generation;
        call
    }

    /// The sandbox as it is shown.
    pub fn get(&self) -> Result<Sandbox> {
        self.client.http.ask(self.call(Call::get(self.path(path::SANDBOX))))
    }

    /// The sandbox, probed now. That is not activity (T3).
    pub fn verify(&self) -> Result<Sandbox> {
        let query = query::GetSandbox { verify: true, generation: None };
        self.client.http.ask(self.call(Call::get(self.path(path::SANDBOX) + &encode(&query))))
    }

    /// All that is known about it.
    pub fn diagnosis(&self) -> Result<Diagnosis> {
        self.client.http.ask(self.call(Call::get(self.path(path::DIAGNOSIS))))
    }

    /// The same, and looks for so long at what goes on inside.
    pub fn diagnosis_over(&self, sample_ms: u64) -> Result<Diagnosis> {
        let query = query::DiagnosisQuery { generation: None, sample_ms: Some(WaitMs::nearest(sample_ms)) };
        self.client.http.ask(self.call(Call::get(self.path(path::DIAGNOSIS) + &encode(&query)).waits(query.sample_ms)))
    }

    /// Makes it run (L3).
    pub fn ensure(&self, request: &EnsureSandbox) -> Result<Change> {
        self.client.change(self.call(Call::post(self.path(path::ENSURE)).json(request).waits(request.wait_ms)))
    }

    /// Moves its hard deadline.
    pub fn extend(&self, change: ExtendSandbox) -> Result<Deadline> {
        self.client.http.ask(self.call(Call::post(self.path(path::EXTEND)).json(&change)))
    }

    /// Makes it stand still, with its memory (L13).
    pub fn freeze(&self, request: &RestSandbox) -> Result<Change> {
        self.client.change(self.call(Call::post(self.path(path::FREEZE)).json(request).waits(request.wait_ms)))
    }

    /// Lets what stands still go on; ready when it was probed (T4).
    pub fn thaw(&self, request: &RestSandbox) -> Result<Change> {
        self.client.change(self.call(Call::post(self.path(path::THAW)).json(request).waits(request.wait_ms)))
    }

    /// Saves it. Unlike after a stop, whatever may wake it still does (L9).
    pub fn hibernate(&self, request: &RestSandbox) -> Result<Change> {
        self.client.change(self.call(Call::post(self.path(path::HIBERNATE)).json(request).waits(request.wait_ms)))
    }

    /// Stops it (L8).
    pub fn stop(&self, request: &StopSandbox) -> Result<Change> {
        self.client.change(self.call(Call::post(self.path(path::STOP)).json(request).waits(request.wait_ms)))
    }

    /// Deletes it, for ever (L20).
    pub fn delete(&self, wait_ms: Option<WaitMs>) -> Result<Change> {
        let query = query::DeleteSandbox { wait_ms, generation: None };
        let path = self.path(path::SANDBOX) + &encode(&query);
        self.client.change(self.call(Call::new(Method::DELETE, path).waits(wait_ms)))
    }

    /// One part of what happened to it.
    pub fn timeline(&self, query: &query::PageQuery) -> Result<Page<TimelineEntry>> {
        self.client.http.ask(self.call(Call::get(self.path(path::TIMELINE) + &encode(query))))
    }

    /// All that happened to it, part by part.
    pub fn timeline_all(&self) -> impl Iterator<Item = Result<TimelineEntry>> + '_ {
        pages(None, |cursor| self.timeline(&query::PageQuery { cursor, limit: None }))
    }

    /// The ends of its logs.
    pub fn logs(&self, query: &query::SandboxLogQuery) -> Result<SandboxLogs> {
        self.client.http.ask(self.call(Call::get(self.path(path::SANDBOX_LOGS) + &encode(query))))
    }

    /// What it uses, and may use.
    pub fn resources(&self) -> Result<Resources> {
        self.client.http.ask(self.call(Call::get(self.path(path::RESOURCES))))
    }

    /// What is in the way of saving its memory.
    pub fn check_checkpoint(&self) -> Result<CheckpointCheck> {
        self.client.http.ask(self.call(Call::get(self.path(path::CHECKPOINT))))
    }

    /// Changes what it may use; what is not said stays.
    pub fn set_limits(&self, limits: &Limits) -> Result<LimitsInForce> {
        self.client.http.ask(self.call(Call::new(Method::PUT, self.path(path::LIMITS)).json(limits)))
    }

    /// Says that it is in use (L6).
    pub fn activity(&self, report: &ReportActivity) -> Result<Activity> {
        self.client.http.ask(self.call(Call::post(self.path(path::ACTIVITY)).json(report)))
    }

    /// Keeps it from idling for a while (L7).
    pub fn keep_awake(&self, lease: &LeaseName, request: &TakeKeepAwake) -> Result<KeepAwake> {
        let path = fill(path::KEEP_AWAKE, &[self.sandbox.as_str(), lease.as_str()]);
        self.client.http.ask(self.call(Call::new(Method::PUT, path).json(request)))
    }

    /// Gives a keep-awake lease back.
    pub fn release(&self, lease: &LeaseName) -> Result<()> {
        let path = fill(path::KEEP_AWAKE, &[self.sandbox.as_str(), lease.as_str()]);
        self.client.http.tell(self.call(Call::new(Method::DELETE, path)))
    }
}
