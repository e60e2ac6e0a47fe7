//! Snapshots as files that come and go as streams.
//!
//! What is written or read lies in a file without a name, on the disk of the store: it goes with whoever holds it, so
//! nothing is left by a process that is killed.

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use tokio::io::AsyncWriteExt;
use viv_core::{OwnerMark, SandboxId, SnapshotId};
use viv_provider::{ByteReader, Capability, InstanceRef, Mutation, ProviderError, Snapshot};

use super::chores::Chore;
use super::save::store_failed;
use super::{LocalProvider, Result};
use crate::store::error::StoreError;

impl LocalProvider {
    pub(super) async fn export_to_stream(&self, snapshot: &SnapshotId) -> Result<ByteReader> {
        self.require(Capability::Transfer)?;
        let snapshot = snapshot.clone();
        let file = self.blocking(move |this| this.shared.store.export_nameless(&snapshot).map_err(told)).await?;
        Ok(Box::new(tokio::fs::File::from_std(file)))
    }

    pub(super) async fn import_from_stream(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        snapshot: &SnapshotId,
        mut file: ByteReader,
    ) -> Result<Snapshot> {
        self.require(Capability::Transfer)?;
        let (checked, of) = (mutation.clone(), sandbox.clone());
        self.blocking(move |this| this.fence(&of)?.admit_any_generation(&checked)).await?;
        let received = self.blocking(|this| this.shared.store.nameless().map_err(told)).await?;
        let kept = received.try_clone().map_err(store_failed)?;
        let mut to = tokio::fs::File::from_std(received);
        tokio::io::copy(&mut file, &mut to).await.map_err(store_failed)?;
        to.flush().await.map_err(store_failed)?;
        let (mutation, sandbox, owner, snapshot) = (mutation.clone(), sandbox.clone(), owner.clone(), snapshot.clone());
        self.blocking(move |this| {
            let from = PathBuf::from(format!("/proc/self/fd/{}", kept.as_raw_fd()));
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
            // Whoever has a newer token was here meanwhile: then this is not written any more.
            let mut fence = this.fence(&sandbox)?;
            fence.admit_any_generation(&mutation)?;
            let store = &this.shared.store;
            let (operation, host) = (&mutation.operation, &this.shared.host);
            let imported = store.import_snapshot(&from, &snapshot, &owner, operation, Some(&instance), host);
            this.later(Chore::Collect);
            imported.map_err(|error| without_place(told(error), &from.display().to_string()))
        })
        .await
    }
}

/// What the store says, as a provider says it.
fn told(error: StoreError) -> ProviderError {
    match error {
        StoreError::NotFound { what } => ProviderError::NotFound { what },
        StoreError::Conflict { what, .. } => ProviderError::Conflict { what },
        StoreError::Invalid { what, hint } => ProviderError::Invalid { what, hint: hint.to_owned() },
        other => ProviderError::Failed { what: in_words(&other) },
    }
}

/// An error with what is behind it.
fn in_words(error: &dyn std::error::Error) -> String {
    let behind = std::iter::successors(error.source(), |error| error.source());
    behind.fold(error.to_string(), |words, cause| format!("{words}: {cause}"))
}

/// Nobody but us knows the file by where it lies.
fn without_place(error: ProviderError, place: &str) -> ProviderError {
    let plain = |what: String| what.replace(place, "the file");
    match error {
        ProviderError::Invalid { what, hint } => ProviderError::Invalid { what: plain(what), hint },
        ProviderError::Failed { what } => ProviderError::Failed { what: plain(what) },
        other => other,
    }
}
