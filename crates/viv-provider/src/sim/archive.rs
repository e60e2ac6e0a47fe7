//! Tar archives of a filesystem in memory.

use std::io::{Cursor, Read};

use viv_core::SandboxId;
use viv_core::file::{ArchiveBounds, Unpacked};

use super::state::State;
use super::tree::{Body, Node, Tree};
use crate::error::ProviderError;
use crate::instance::{InstanceRef, Mutation};

type Result<T> = std::result::Result<T, ProviderError>;

impl State {
    pub(super) fn archive_get(&self, instance: &InstanceRef, path: &str) -> Result<Vec<u8>> {
        let tree = &self.read_running(instance)?.tree;
        let path = tree.resolve(path, true)?;
        let node = tree.need(&path)?;
        let failed = |error: std::io::Error| ProviderError::Failed { what: format!("packing {path}: {error}") };
        let mut builder = tar::Builder::new(Vec::new());
        if node.is_dir() {
            for (name, node) in tree.below(&path) {
                pack(&mut builder, name, node).map_err(failed)?;
            }
        } else {
            pack(&mut builder, path.rsplit('/').next().unwrap_or_default(), node).map_err(failed)?;
        }
        builder.into_inner().map_err(failed)
    }

    pub(super) fn archive_put(
        &mut self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        path: &str,
        bounds: ArchiveBounds,
        archive: &[u8],
    ) -> Result<Unpacked> {
        self.change_once(mutation, sandbox, |instance, now_ms| {
            instance.need_running()?;
            let root = instance.tree.resolve(path, true)?;
            instance.tree.make_dirs(&root, now_ms)?;
            Unpacking { tree: &mut instance.tree, root, now_ms, bounds, received: archive.len() as u64 }.run(archive)
        })
    }
}

fn pack(builder: &mut tar::Builder<Vec<u8>>, name: &str, node: &Node) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(node.mode);
    header.set_uid(node.uid.into());
    header.set_gid(node.gid.into());
    header.set_mtime(node.modified_at_ms / 1_000);
    header.set_size(0);
    match &node.body {
        Body::File(content) => {
            header.set_entry_type(tar::EntryType::Regular);
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, name, content.as_slice())
        }
        Body::Dir => {
            header.set_entry_type(tar::EntryType::Directory);
            builder.append_data(&mut header, format!("{name}/"), std::io::empty())
        }
        Body::Link(target) => {
            header.set_entry_type(tar::EntryType::Symlink);
            builder.append_link(&mut header, name, target)
        }
    }
}

/// An archive on its way into a directory.
struct Unpacking<'u> {
    tree: &'u mut Tree,
    root: String,
    now_ms: u64,
    bounds: ArchiveBounds,
    received: u64,
}

impl Unpacking<'_> {
    fn run(mut self, archive: &[u8]) -> Result<Unpacked> {
        let broken = |error: std::io::Error| invalid(format!("this is no tar archive: {error}"));
        let mut unpacked = Unpacked { entries: 0, bytes: 0 };
        let mut archive = tar::Archive::new(Cursor::new(archive));
        for entry in archive.entries().map_err(broken)? {
            let mut entry = entry.map_err(broken)?;
            unpacked.entries += 1;
            unpacked.bytes = unpacked.bytes.saturating_add(entry.size());
            self.check_bounds(unpacked)?;
            let Some(path) = self.place(&entry.path_bytes())? else { continue };
            let mode = entry.header().mode().map_err(broken)? & 0o7777;
            let target = entry.link_name_bytes().map(|name| text(&name)).transpose()?.unwrap_or_default();
            match entry.header().entry_type() {
                tar::EntryType::Directory => self.make_dir(&path, mode)?,
                tar::EntryType::Symlink => self.replace(&path, Node::link(&target, self.now_ms))?,
                tar::EntryType::Link => self.hard_link(&path, &target)?,
                kind if kind.is_file() || kind.is_gnu_sparse() => {
                    // No more than was checked above is read.
                    let mut content = Vec::new();
                    entry.read_to_end(&mut content).map_err(broken)?;
                    self.replace(&path, Node::file(content, mode, self.now_ms))?;
                }
                kind => return Err(invalid(format!("an entry of kind {kind:?}"))),
            }
        }
        Ok(unpacked)
    }

    fn check_bounds(&self, so_far: Unpacked) -> Result<()> {
        let ArchiveBounds { entries_max, bytes_max, ratio_max } = self.bounds;
        let swollen_bytes = self.received.saturating_mul(ratio_max);
        for (limit, use_, max) in [
            ("archive entries", so_far.entries, entries_max),
            ("archive bytes", so_far.bytes, bytes_max),
            ("archive ratio", so_far.bytes, swollen_bytes),
        ] {
            if use_ > max {
                return Err(ProviderError::Exhausted { limit, what: format!("more than {max}") });
            }
        }
        Ok(())
    }

    /// Where an entry goes; `None` for the directory itself.
    fn place(&self, name: &[u8]) -> Result<Option<String>> {
        let name = text(name)?;
        if name.starts_with('/') {
            return Err(invalid(format!("{name:?} is absolute")));
        }
        let mut path = self.root.trim_end_matches('/').to_owned();
        let mut is_below = false;
        for component in name.split('/').filter(|part| !part.is_empty() && *part != ".") {
            if component == ".." {
                return Err(invalid(format!("{name:?} climbs")));
            }
            if is_below && matches!(self.tree.get(&path).map(|node| &node.body), Some(Body::Link(_))) {
                return Err(invalid(format!("{name:?} goes through a link")));
            }
            path = format!("{path}/{component}");
            is_below = true;
        }
        Ok(is_below.then_some(path))
    }

    fn make_dir(&mut self, path: &str, mode: u32) -> Result<()> {
        if self.tree.get(path).is_some_and(|node| matches!(node.body, Body::Link(_))) {
            self.tree.remove(path)?;
        }
        self.tree.make_dirs(path, self.now_ms)?;
        self.tree.set_mode(path, mode);
        Ok(())
    }

    fn replace(&mut self, path: &str, node: Node) -> Result<()> {
        self.tree.make_parents(path, self.now_ms)?;
        self.tree.put(path, node)
    }

    /// A copy: two names of one file are not simulated.
    fn hard_link(&mut self, path: &str, target: &str) -> Result<()> {
        let source = self.place(target.as_bytes())?.and_then(|source| self.tree.get(&source)).cloned();
        match source {
            Some(Node { body: Body::File(content), mode, modified_at_ms, .. }) => {
                self.replace(path, Node::file(content.to_vec(), mode, modified_at_ms))
            }
            Some(_) | None => Err(invalid(format!("{target:?} is no file of the archive"))),
        }
    }
}

fn text(name: &[u8]) -> Result<String> {
    let text = std::str::from_utf8(name).map_err(|_| invalid("a name that is not UTF-8".to_owned()))?;
    Ok(text.to_owned())
}

fn invalid(what: String) -> ProviderError {
    ProviderError::Invalid { what, hint: "pack with relative names, below one directory".to_owned() }
}
