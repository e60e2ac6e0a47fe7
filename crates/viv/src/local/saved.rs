//! Saving, and what is made from it.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use viv_core::{Generation, OperationId, SandboxId, SnapshotId};
use viv_provider::{Capability, InstanceRef, Integrity, PageRequest, Provider, ProviderError, SaveRequest};

use super::verbs::spec;
use super::{ByHand, NewArgs, fresh_bytes, mutation};
use crate::text::{bytes, micros, say};

impl ByHand {
    pub(super) async fn save(&self, sandbox: SandboxId, live: bool, memory: bool) -> anyhow::Result<ExitCode> {
        let generation = self.generation(&sandbox).await?;
        let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live, memory };
        let saved = match self.provider.save(&mutation(generation), &sandbox, &request).await {
            Err(error) if memory => {
                eprintln!("its memory is not saved: {error}");
                let files = SaveRequest { memory: false, ..request };
                self.provider.save(&mutation(generation), &sandbox, &files).await?
            }
            saved => saved?,
        };
        let cost = saved.cost;
        eprintln!(
            "saved {} in {}: {} writing out, {} standing still, {} copied",
            bytes(saved.size_bytes),
            micros(cost.total_us),
            micros(cost.flush_us),
            micros(cost.paused_us),
            bytes(cost.copied_bytes)
        );
        let said = say(&saved.id);
        self.tidy();
        said
    }

    pub(super) async fn list_snapshots(&self, json: bool) -> anyhow::Result<ExitCode> {
        let mut cursor = None;
        let mut out = io::stdout().lock();
        loop {
            let page = self.provider.snapshots(&self.owner, PageRequest { cursor, limit: None }).await?;
            for seen in &page.items {
                if json {
                    writeln!(out, "{}", serde_json::to_string(seen)?)?;
                    continue;
                }
                let snapshot = &seen.snapshot;
                let integrity = match seen.integrity {
                    Integrity::Damaged => "DAMAGED",
                    Integrity::Pending | Integrity::Verified if seen.memory_damage.is_some() => "memory DAMAGED",
                    Integrity::Pending => "unhashed",
                    Integrity::Verified => "verified",
                };
                writeln!(
                    out,
                    "{}  of {}  {:>10}, {:>10} its own  {integrity}",
                    snapshot.id,
                    snapshot.source,
                    bytes(snapshot.size_bytes),
                    bytes(seen.own_bytes)
                )?;
            }
            for unreadable in &page.unreadable {
                eprintln!("not listed: {unreadable}");
            }
            cursor = page.next;
            if cursor.is_none() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }

    pub(super) async fn restore(&self, snapshot: &SnapshotId, new: NewArgs) -> anyhow::Result<ExitCode> {
        let sandbox = SandboxId::from_bytes(fresh_bytes());
        self.restore_as(&sandbox, Generation::FIRST, snapshot, new).await
    }

    async fn restore_as(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
        snapshot: &SnapshotId,
        new: NewArgs,
    ) -> anyhow::Result<ExitCode> {
        let (mutation, spec) = (mutation(generation), spec(new));
        let seen = self.provider.restore(&mutation, sandbox, &self.owner, &spec, snapshot).await?;
        if let Some(why) = seen.lacks.get(&Capability::SaveMemory) {
            eprintln!("{why}");
        }
        say(seen.instance.sandbox)
    }

    pub(super) async fn fork(&self, source: SandboxId, new: NewArgs) -> anyhow::Result<ExitCode> {
        let generation = self.generation(&source).await?;
        let source = InstanceRef { sandbox: source, generation };
        let (sandbox, mutation) = (SandboxId::from_bytes(fresh_bytes()), mutation(Generation::FIRST));
        let seen = self.provider.fork(&mutation, &sandbox, &self.owner, &spec(new), &source).await?;
        say(seen.instance.sandbox)
    }

    pub(super) async fn rollback(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        new: NewArgs,
    ) -> anyhow::Result<ExitCode> {
        // Looked for before anything is destroyed for it.
        let seen = self.provider.snapshot(snapshot).await?;
        anyhow::ensure!(seen.integrity != Integrity::Damaged, "{snapshot} is damaged; nothing was changed");
        let generation = self.generation(sandbox).await?;
        self.provider.destroy(&mutation(generation), sandbox).await?;
        self.restore_as(sandbox, Generation(generation.0 + 1), snapshot, new).await
    }

    pub(super) async fn drop_snapshots(&self, snapshots: Vec<SnapshotId>) -> anyhow::Result<ExitCode> {
        for id in snapshots {
            let sandbox = match self.provider.snapshot(&id).await {
                Ok(seen) => seen.snapshot.source.sandbox,
                // One whose record cannot be read is of nobody any more.
                Err(ProviderError::Unavailable { .. }) => SandboxId::from_bytes([0; 16]),
                Err(error) => return Err(error.into()),
            };
            self.provider.remove_snapshot(&mutation(Generation::FIRST), &sandbox, &id).await?;
            say(id)?;
        }
        self.tidy();
        Ok(ExitCode::SUCCESS)
    }

    /// A daemon does this in the background; by hand it is done when the answer has been given, and changes nothing
    /// about that.
    fn tidy(&self) {
        for failed in self.provider.tidy().failed {
            eprintln!("not tidied: {failed}");
        }
    }

    pub(super) fn export(&self, snapshot: &SnapshotId, path: &Path) -> anyhow::Result<ExitCode> {
        let exported = self.provider.export_snapshot(snapshot, path)?;
        eprintln!("{} layers, {}", exported.layers, bytes(exported.bytes));
        say(path.display())
    }

    pub(super) fn import(&self, path: &Path) -> anyhow::Result<ExitCode> {
        let id = SnapshotId::from_bytes(fresh_bytes());
        let operation = OperationId::from_bytes(fresh_bytes());
        let snapshot = self.provider.import_snapshot(path, &id, &self.owner, &operation)?;
        say(snapshot.id)
    }

    pub(super) async fn disk(&self, sandbox: SandboxId, json: bool) -> anyhow::Result<ExitCode> {
        let generation = self.generation(&sandbox).await?;
        let usage = self.provider.disk_usage(&InstanceRef { sandbox, generation }).await.context("cannot count")?;
        if json {
            return say(serde_json::to_string(&usage)?);
        }
        let limit = usage.limit_bytes.map_or("no limit".to_owned(), |limit| format!("limit {}", bytes(limit)));
        say(format_args!("{} its own, {} shared, {limit}", bytes(usage.own_bytes), bytes(usage.shared_bytes)))
    }
}
