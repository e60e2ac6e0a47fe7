//! Files through the API.

use viv_core::file::{DirEntry, DirListing, FileStat};
use viv_core::{Identity, SandboxId};

use super::lifecycle::{IDENTITY, identity_file};
use super::state::State;
use super::tree::{Body, Node, conflict};
use crate::error::ProviderError;
use crate::instance::{InstanceRef, Mutation};
use crate::provider::FileWrite;

/// Entries of one listing; then it is not complete.
const LISTING_ENTRIES_MAX: usize = 100_000;

type Result<T> = std::result::Result<T, ProviderError>;

impl State {
    pub(super) fn file_read(
        &self,
        instance: &InstanceRef,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Vec<u8>> {
        let tree = &self.read_running(instance)?.tree;
        let path = tree.resolve(path, true)?;
        match &tree.need(&path)?.body {
            Body::File(content) => {
                let start = content.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
                let rest = &content[start..];
                let length = length.and_then(|length| usize::try_from(length).ok()).unwrap_or(usize::MAX);
                Ok(rest[..rest.len().min(length)].to_vec())
            }
            Body::Dir | Body::Link(_) => Err(conflict(&path, "is not a file")),
        }
    }

    pub(super) fn identity(&self, instance: &InstanceRef) -> Result<Identity> {
        let found = self.file_read(instance, IDENTITY, 0, None)?;
        if found != identity_file(instance).as_bytes() {
            let what = format!("the identity file says {:?}", String::from_utf8_lossy(&found));
            return Err(ProviderError::Failed { what });
        }
        Ok(Identity { sandbox: instance.sandbox.clone(), generation: instance.generation })
    }

    pub(super) fn file_write(
        &mut self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        file: &FileWrite,
        content: Vec<u8>,
    ) -> Result<FileStat> {
        self.change_once(mutation, sandbox, |instance, now_ms| {
            instance.need_running()?;
            let tree = &mut instance.tree;
            let path = tree.resolve(&file.path, true)?;
            let before = tree.get(&path).map(|node| node.mode);
            let mode = file.mode.or(before).unwrap_or(0o644) & 0o7777;
            tree.make_parents(&path, now_ms)?;
            let node = Node::file(content, mode, now_ms);
            let stat = node.stat();
            tree.put(&path, node)?;
            Ok(stat)
        })
    }

    pub(super) fn file_stat(&self, instance: &InstanceRef, path: &str) -> Result<FileStat> {
        let tree = &self.read_running(instance)?.tree;
        Ok(tree.need(&tree.resolve(path, false)?)?.stat())
    }

    pub(super) fn file_list(&self, instance: &InstanceRef, path: &str, depth: u32) -> Result<DirListing> {
        let tree = &self.read_running(instance)?.tree;
        let path = tree.resolve(path, true)?;
        if !tree.need(&path)?.is_dir() {
            return Err(conflict(&path, "is not a directory"));
        }
        if depth == 0 {
            let hint = "1 lists the directory itself".to_owned();
            return Err(ProviderError::Invalid { what: "a listing of no depth".to_owned(), hint });
        }
        let mut entries: Vec<_> = tree
            .below(&path)
            .filter(|(name, _)| name.matches('/').count() < depth as usize)
            .take(LISTING_ENTRIES_MAX + 1)
            .map(|(name, node)| DirEntry { path: name.to_owned(), lossy: false, stat: node.stat() })
            .collect();
        let complete = entries.len() <= LISTING_ENTRIES_MAX;
        entries.truncate(LISTING_ENTRIES_MAX);
        Ok(DirListing { entries, complete })
    }

    pub(super) fn file_mkdir(&mut self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.change_once(mutation, sandbox, |instance, now_ms| {
            instance.need_running()?;
            let path = instance.tree.resolve(path, true)?;
            instance.tree.make_dirs(&path, now_ms)
        })
    }

    pub(super) fn file_move(&mut self, mutation: &Mutation, sandbox: &SandboxId, from: &str, to: &str) -> Result<()> {
        self.change_once(mutation, sandbox, |instance, _| {
            instance.need_running()?;
            let (from, to) = (instance.tree.resolve(from, false)?, instance.tree.resolve(to, false)?);
            instance.tree.rename(&from, &to)
        })
    }

    pub(super) fn file_remove(&mut self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.change_once(mutation, sandbox, |instance, _| {
            instance.need_running()?;
            let path = instance.tree.resolve(path, false)?;
            instance.tree.remove(&path)
        })
    }
}
