//! A filesystem in memory: paths to nodes, and what changed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::Poll;

use viv_core::file::{FileKind, FileStat, WatchKind};

use crate::error::ProviderError;

/// Links that are followed in one path before it counts as a loop, as on Linux.
const LINKS_MAX: usize = 40;

/// Changes that are remembered for watchers; who is further behind hears of an overflow.
const CHANGES_KEPT_MAX: usize = 4_096;

type Result<T> = std::result::Result<T, ProviderError>;

/// What stands at a path.
#[derive(Debug, Clone)]
pub(super) enum Body {
    /// A regular file. Shared between trees, so that snapshots cost nothing; never within one.
    File(Arc<Vec<u8>>),
    /// A directory.
    Dir,
    /// A symbolic link and where it points.
    Link(String),
}

/// A body with its attributes.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) body: Body,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) modified_at_ms: u64,
}

impl Node {
    pub(super) fn file(content: Vec<u8>, mode: u32, now_ms: u64) -> Self {
        Self::new(Body::File(Arc::new(content)), mode, now_ms)
    }

    pub(super) fn dir(mode: u32, now_ms: u64) -> Self {
        Self::new(Body::Dir, mode, now_ms)
    }

    pub(super) fn link(target: &str, now_ms: u64) -> Self {
        Self::new(Body::Link(target.to_owned()), 0o777, now_ms)
    }

    fn new(body: Body, mode: u32, now_ms: u64) -> Self {
        Self { body, mode, uid: 0, gid: 0, modified_at_ms: now_ms }
    }

    pub(super) fn is_dir(&self) -> bool {
        matches!(self.body, Body::Dir)
    }

    fn bytes(&self) -> u64 {
        match &self.body {
            Body::File(content) => content.len() as u64,
            Body::Link(target) => target.len() as u64,
            Body::Dir => 0,
        }
    }

    /// Bytes that are nowhere else.
    fn own_bytes(&self) -> u64 {
        match &self.body {
            Body::File(content) if Arc::strong_count(content) > 1 => 0,
            Body::File(_) | Body::Link(_) | Body::Dir => self.bytes(),
        }
    }

    pub(super) fn stat(&self) -> FileStat {
        let (kind, link_target) = match &self.body {
            Body::File(_) => (FileKind::File, None),
            Body::Dir => (FileKind::Dir, None),
            Body::Link(target) => (FileKind::Symlink, Some(target.clone())),
        };
        FileStat {
            kind,
            size_bytes: self.bytes(),
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            modified_at_ms: self.modified_at_ms,
            link_target,
        }
    }
}

/// One change, for watchers.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) kind: WatchKind,
    pub(super) path: String,
    pub(super) is_dir: bool,
}

/// A filesystem. Keys are absolute, resolved and without a trailing slash, except the root.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    nodes: BTreeMap<String, Node>,
    bytes: u64,
    bytes_max: Option<u64>,
    changes: VecDeque<Change>,
    /// Changes so far, kept or not: the number of the next one.
    changed: u64,
}

impl Tree {
    /// A root directory and nothing else.
    pub(super) fn new(now_ms: u64, bytes_max: Option<u64>) -> Self {
        let nodes = BTreeMap::from([("/".to_owned(), Node::dir(0o755, now_ms))]);
        Self { nodes, bytes: 0, bytes_max, changes: VecDeque::new(), changed: 0 }
    }

    /// The same content for another instance, which has its own bound and watchers.
    pub(super) fn copied(&self, bytes_max: Option<u64>) -> Self {
        let Self { nodes, bytes, .. } = self;
        Self { nodes: nodes.clone(), bytes: *bytes, bytes_max, changes: VecDeque::new(), changed: 0 }
    }

    /// Bytes in files and links.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Those of them that no other tree holds: what is free when this one is gone.
    pub(super) fn own_bytes(&self) -> u64 {
        self.nodes.values().map(Node::own_bytes).sum()
    }

    /// How many there may be.
    pub(super) fn bytes_max(&self) -> Option<u64> {
        self.bytes_max
    }

    /// What is there stays, also if it is more.
    pub(super) fn set_bytes_max(&mut self, bytes_max: Option<u64>) {
        self.bytes_max = bytes_max;
    }

    /// Where a path leads: dots and links resolved, the last link only if asked. Nothing leads above
    /// the root, and what is not there is taken as it is written.
    pub(super) fn resolve(&self, path: &str, follow_last: bool) -> Result<String> {
        if !path.starts_with('/') || path.contains('\0') {
            let what = format!("{path:?} is not an absolute path");
            return Err(ProviderError::Invalid { what, hint: "start it with a slash".to_owned() });
        }
        let mut todo: VecDeque<String> = components(path).map(str::to_owned).collect();
        let mut done: Vec<String> = Vec::new();
        let mut links = 0;
        while let Some(component) = todo.pop_front() {
            if component == ".." {
                done.pop();
                continue;
            }
            done.push(component);
            if todo.is_empty() && !follow_last {
                break;
            }
            let Some(Body::Link(target)) = self.nodes.get(&join(&done)).map(|node| &node.body) else { continue };
            links += 1;
            if links > LINKS_MAX {
                let what = format!("{path:?} leads through more than {LINKS_MAX} links");
                return Err(ProviderError::Invalid { what, hint: "look for a loop".to_owned() });
            }
            done.pop();
            if target.starts_with('/') {
                done.clear();
            }
            for component in components(target).rev() {
                todo.push_front(component.to_owned());
            }
        }
        Ok(join(&done))
    }

    /// What stands at a resolved path.
    pub(super) fn get(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path)
    }

    /// The same, where something has to stand.
    pub(super) fn need(&self, path: &str) -> Result<&Node> {
        if let Some(node) = self.nodes.get(path) {
            return Ok(node);
        }
        self.check_parents(path)?;
        Err(ProviderError::NotFound { what: path.to_owned() })
    }

    /// A file is not a way.
    fn check_parents(&self, path: &str) -> Result<()> {
        for parent in parents(path) {
            match self.nodes.get(parent) {
                Some(node) if !node.is_dir() => return Err(conflict(parent, "is not a directory")),
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    /// All below a directory, with their paths below it.
    pub(super) fn below<'t>(&'t self, path: &str) -> impl Iterator<Item = (&'t str, &'t Node)> {
        let prefix = if path == "/" { "/".to_owned() } else { format!("{path}/") };
        self.nodes
            .range(prefix.clone()..)
            .take_while({
                let prefix = prefix.clone();
                move |(key, _)| key.starts_with(&prefix)
            })
            .filter_map(move |(key, node)| {
                let name = &key[prefix.len()..];
                (!name.is_empty()).then_some((name, node))
            })
    }

    /// Puts a node at a resolved path, replacing a file or a link; the directory above it has to be there.
    pub(super) fn put(&mut self, path: &str, node: Node) -> Result<()> {
        let before = self.nodes.get(path);
        if before.is_some_and(Node::is_dir) {
            return Err(conflict(path, "is a directory"));
        }
        let bytes = self.bytes - before.map_or(0, Node::bytes) + node.bytes();
        if let Some(limit) = self.bytes_max.filter(|limit| bytes > *limit) {
            let what = format!("{bytes} bytes of {limit} would be used");
            return Err(ProviderError::Exhausted { limit: "disk", what });
        }
        let is_dir = node.is_dir();
        let is_file = matches!(node.body, Body::File(_));
        let is_new = before.is_none();
        self.bytes = bytes;
        self.nodes.insert(path.to_owned(), node);
        if is_new {
            self.tell(WatchKind::Created, path, is_dir);
        }
        if is_file {
            self.tell(WatchKind::Modified, path, is_dir);
        }
        Ok(())
    }

    /// Makes a directory and those above it.
    pub(super) fn make_dirs(&mut self, path: &str, now_ms: u64) -> Result<()> {
        self.check_parents(path)?;
        if self.nodes.get(path).is_some_and(|node| !node.is_dir()) {
            return Err(conflict(path, "is not a directory"));
        }
        let way: Vec<String> = parents(path).map(str::to_owned).chain([path.to_owned()]).collect();
        for dir in way {
            if !self.nodes.contains_key(&dir) {
                self.put(&dir, Node::dir(0o755, now_ms))?;
            }
        }
        Ok(())
    }

    /// Makes the directories above a path.
    pub(super) fn make_parents(&mut self, path: &str, now_ms: u64) -> Result<()> {
        match parents(path).last().map(str::to_owned) {
            Some(parent) => self.make_dirs(&parent, now_ms),
            None => Ok(()),
        }
    }

    /// Changes the mode of what is there.
    pub(super) fn set_mode(&mut self, path: &str, mode: u32) {
        let Some(node) = self.nodes.get_mut(path) else { return };
        node.mode = mode;
        let is_dir = node.is_dir();
        self.tell(WatchKind::Attributes, path, is_dir);
    }

    /// Removes a path with all below it.
    pub(super) fn remove(&mut self, path: &str) -> Result<()> {
        let is_dir = self.need(path)?.is_dir();
        if path == "/" {
            let hint = "remove what is in it".to_owned();
            return Err(ProviderError::Invalid { what: "the root cannot be removed".to_owned(), hint });
        }
        let below: Vec<String> = self.below(path).map(|(name, _)| format!("{path}/{name}")).collect();
        for gone in below.iter().rev().map(String::as_str).chain([path]) {
            if let Some(node) = self.nodes.remove(gone) {
                self.bytes -= node.bytes();
            }
        }
        self.tell(WatchKind::Removed, path, is_dir);
        Ok(())
    }

    /// Moves a path with all below it.
    pub(super) fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        let node = self.need(from)?.clone();
        if from == to {
            return Ok(());
        }
        if from == "/" || to.starts_with(&format!("{from}/")) {
            let hint = "move it elsewhere".to_owned();
            return Err(ProviderError::Invalid { what: format!("{from} cannot be moved into itself"), hint });
        }
        if let Some(parent) = parents(to).last() {
            self.need(parent)?;
        }
        self.check_parents(to)?;
        if let Some(there) = self.nodes.get(to) {
            let is_full = self.below(to).next().is_some();
            if is_full || there.is_dir() != node.is_dir() {
                return Err(conflict(to, "is in the way"));
            }
        }
        let below: Vec<String> = self.below(from).map(|(name, _)| name.to_owned()).collect();
        for name in below {
            if let Some(child) = self.nodes.remove(&format!("{from}/{name}")) {
                self.nodes.insert(format!("{to}/{name}"), child);
            }
        }
        let is_dir = node.is_dir();
        self.nodes.remove(from);
        let replaced = self.nodes.insert(to.to_owned(), node);
        self.bytes -= replaced.map_or(0, |node| node.bytes());
        self.tell(WatchKind::MovedFrom, from, is_dir);
        self.tell(WatchKind::MovedTo, to, is_dir);
        Ok(())
    }

    fn tell(&mut self, kind: WatchKind, path: &str, is_dir: bool) {
        if self.changes.len() == CHANGES_KEPT_MAX {
            self.changes.pop_front();
        }
        self.changes.push_back(Change { kind, path: path.to_owned(), is_dir });
        self.changed += 1;
    }

    /// The number of the next change.
    pub(super) fn changed(&self) -> u64 {
        self.changed
    }

    /// The change with a number: pending when it is still to come, `None` when it is forgotten.
    pub(super) fn change(&self, number: u64) -> Poll<Option<&Change>> {
        let oldest = self.changed - self.changes.len() as u64;
        if number >= self.changed {
            return Poll::Pending;
        }
        Poll::Ready(number.checked_sub(oldest).and_then(|index| self.changes.get(index as usize)))
    }
}

/// Something else stands in the way.
pub(super) fn conflict(path: &str, why: &str) -> ProviderError {
    ProviderError::Conflict { what: format!("{path} {why}") }
}

fn components(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|component| !component.is_empty() && *component != ".")
}

fn join(components: &[String]) -> String {
    format!("/{}", components.join("/"))
}

/// The directories above a resolved path, from the root down.
fn parents(path: &str) -> impl Iterator<Item = &str> {
    let root = (path != "/").then_some("/");
    root.into_iter().chain(path.match_indices('/').skip(1).map(|(at, _)| &path[..at]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        let mut tree = Tree::new(0, None);
        tree.make_dirs("/a/b", 0).unwrap();
        tree.put("/a/file", Node::file(b"x".to_vec(), 0o644, 0)).unwrap();
        tree.put("/a/up", Node::link("../..", 0)).unwrap();
        tree.put("/a/loop", Node::link("loop", 0)).unwrap();
        tree.put("/to-b", Node::link("/a/b", 0)).unwrap();
        tree
    }

    #[test]
    fn nothing_leads_above_the_root() {
        let tree = tree();
        assert_eq!(tree.resolve("/../../a/./b/..", true).unwrap(), "/a");
        assert_eq!(tree.resolve("/a/up/to-b/x", true).unwrap(), "/a/b/x");
        assert_eq!(tree.resolve("/to-b", false).unwrap(), "/to-b");
        assert_eq!(tree.resolve("/to-b", true).unwrap(), "/a/b");
        assert!(matches!(tree.resolve("/a/loop", true), Err(ProviderError::Invalid { .. })));
        assert!(matches!(tree.resolve("a", true), Err(ProviderError::Invalid { .. })));
    }

    #[test]
    fn bytes_are_counted_through_every_change() {
        let mut tree = tree();
        let before = tree.bytes();
        tree.put("/n", Node::file(vec![0; 10], 0o644, 0)).unwrap();
        tree.put("/n", Node::file(vec![0; 4], 0o644, 0)).unwrap();
        assert_eq!(tree.bytes(), before + 4);
        tree.rename("/n", "/a/file").unwrap();
        assert_eq!(tree.bytes(), before + 3);
        tree.remove("/a").unwrap();
        assert_eq!(tree.bytes(), 4, "only the link to /a/b is left");
    }

    #[test]
    fn a_full_disk_takes_nothing() {
        let mut tree = Tree::new(0, Some(5));
        tree.put("/a", Node::file(vec![0; 5], 0o644, 0)).unwrap();
        assert!(matches!(tree.put("/b", Node::file(vec![0], 0o644, 0)), Err(ProviderError::Exhausted { .. })));
        tree.put("/a", Node::file(vec![0; 4], 0o644, 0)).unwrap();
    }

    #[test]
    fn what_is_copied_is_shared_until_it_changes() {
        let mut tree = Tree::new(0, None);
        tree.put("/a", Node::file(vec![0; 5], 0o644, 0)).unwrap();
        tree.put("/b", Node::file(vec![0; 3], 0o644, 0)).unwrap();
        assert_eq!(tree.own_bytes(), 8);
        let copy = tree.copied(None);
        assert_eq!((tree.own_bytes(), copy.own_bytes()), (0, 0));
        tree.put("/a", Node::file(vec![0; 7], 0o644, 0)).unwrap();
        assert_eq!((tree.own_bytes(), copy.own_bytes()), (7, 5));
        drop(copy);
        assert_eq!(tree.own_bytes(), tree.bytes());
    }

    #[test]
    fn parents_go_from_the_root_down() {
        assert_eq!(parents("/a/b/c").collect::<Vec<_>>(), ["/", "/a", "/a/b"]);
        assert_eq!(parents("/a").collect::<Vec<_>>(), ["/"]);
        assert_eq!(parents("/").count(), 0);
    }
}
