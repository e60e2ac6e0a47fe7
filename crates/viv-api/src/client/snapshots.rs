//! Snapshots: made, listed, looked at, begun with, removed, and as files.

use std::io::Read;

use ureq::http::Method;
use viv_core::SnapshotId;

use super::files::Download;
use super::http::{Call, Content};
use super::sandbox::pages;
use super::{Change, Client, Result, SandboxHandle};
use crate::bound::IdempotencyKey;
use crate::header;
use crate::page::Page;
use crate::path::{self, fill};
use crate::query::{self, encode};
use crate::snapshot::{CreateSnapshot, Fork, Forked, ResetSandbox, RollbackSandbox, Snapshot};

impl Client {
    /// One part of the list of all snapshots.
    pub fn snapshots(&self, query: &query::ListSnapshots) -> Result<Page<Snapshot>> {
        self.http.ask(Call::get(path::SNAPSHOTS.to_owned() + &encode(query)))
    }

    /// All snapshots, part by part.
    pub fn snapshots_all(&self) -> impl Iterator<Item = Result<Snapshot>> + '_ {
        pages(None, |cursor| self.snapshots(&query::ListSnapshots { cursor, limit: None }))
    }

    /// A snapshot as it is now.
    pub fn snapshot(&self, snapshot: &SnapshotId) -> Result<Snapshot> {
        self.http.ask(Call::get(fill(path::SNAPSHOT, &[snapshot.as_str()])))
    }

    /// Removes a snapshot; one that is in use stays (L11).
    pub fn remove_snapshot(&self, snapshot: &SnapshotId) -> Result<()> {
        self.http.tell(Call::new(Method::DELETE, fill(path::SNAPSHOT, &[snapshot.as_str()])).waits(None))
    }

    /// Makes sandboxes that begin with a snapshot. With a key, asking again makes no others (L1).
    pub fn fork_snapshot(&self, snapshot: &SnapshotId, fork: &Fork, key: Option<&IdempotencyKey>) -> Result<Forked> {
        let path = fill(path::SNAPSHOT_FORK, &[snapshot.as_str()]);
        let mut call = Call::post(path).json(fork).waits(fork.wait_ms);
        call.idempotency_key = key;
        self.http.ask(call)
    }

    /// A snapshot as one file.
    pub fn export_snapshot(&self, snapshot: &SnapshotId) -> Result<Download> {
        let path = fill(path::SNAPSHOT_EXPORT, &[snapshot.as_str()]);
        let response = self.http.send(Call::get(path).accept(header::BYTES).waits(None))?;
        Ok(Download::of(response))
    }

    /// Reads a snapshot from a file.
    pub fn import_snapshot(&self, query: &query::ImportSnapshot, file: &mut dyn Read) -> Result<Snapshot> {
        let mut call = Call::post(path::SNAPSHOTS.to_owned() + &encode(query)).waits(None);
        call.body = Content::Reader(header::BYTES, file);
        self.http.ask(call)
    }
}

impl SandboxHandle<'_> {
    /// Makes a snapshot of it. With a key, asking again makes no second one (L1).
    pub fn make_snapshot(&self, request: &CreateSnapshot, key: Option<&IdempotencyKey>) -> Result<Snapshot> {
        let mut call = Call::post(self.path(path::SANDBOX_SNAPSHOTS)).json(request).waits(None);
        call.idempotency_key = key;
        self.client.http.ask(self.call(call))
    }

    /// One part of the list of its snapshots.
    pub fn snapshots(&self, query: &query::ListSnapshots) -> Result<Page<Snapshot>> {
        self.client.http.ask(self.call(Call::get(self.path(path::SANDBOX_SNAPSHOTS) + &encode(query))))
    }

    /// All its snapshots, part by part.
    pub fn snapshots_all(&self) -> impl Iterator<Item = Result<Snapshot>> + '_ {
        pages(None, |cursor| self.snapshots(&query::ListSnapshots { cursor, limit: None }))
    }

    /// Makes it go on from a snapshot (L11).
    pub fn rollback(&self, request: &RollbackSandbox) -> Result<Change> {
        self.client.change(self.call(Call::post(self.path(path::ROLLBACK)).json(request).waits(request.wait_ms)))
    }

    /// Makes sandboxes that begin where it is.
    pub fn fork(&self, request: &Fork, key: Option<&IdempotencyKey>) -> Result<Forked> {
        let mut call = Call::post(self.path(path::FORK)).json(request).waits(request.wait_ms);
        call.idempotency_key = key;
        self.client.http.ask(self.call(call))
    }

    /// Makes it begin anew (L12).
    pub fn reset(&self, request: &ResetSandbox) -> Result<Change> {
        self.client.change(self.call(Call::post(self.path(path::RESET)).json(request).waits(request.wait_ms)))
    }
}
