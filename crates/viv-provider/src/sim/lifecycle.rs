//! Making, finding and destroying instances.

use std::collections::BTreeMap;

use viv_core::fence::Intent;
use viv_core::{EndCause, OwnerMark, SandboxId, SnapshotId};

use super::execution::Execution;
use super::fence::Admission;
use super::instance::Instance;
use super::state::State;
use super::tree::{Node, Tree};
use crate::Egress;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{
    Ended, InstanceRef, InstanceSpec, InstanceState, Mutation, Observation, ObservedVia, Page, PageRequest,
};
use crate::limits::ResourceLimits;

/// Most items of a page.
pub(super) const PAGE_ITEMS_MAX: usize = 100;

/// Where an instance says which one it is (T2).
pub(super) const IDENTITY: &str = "/.vivarium/identity.json";

/// Where Linux shows network interfaces.
const INTERFACES: &str = "/sys/class/net";

/// Directories that every image has, with their modes.
const IMAGE: [(&str, u32); 4] = [("/bin", 0o755), ("/etc", 0o755), ("/root", 0o700), ("/tmp", 0o1777)];

type Result<T> = std::result::Result<T, ProviderError>;

/// What a new instance starts with.
pub(super) struct Origin {
    pub(super) tree: Tree,
    pub(super) executions: Vec<Execution>,
    pub(super) parent: Option<SnapshotId>,
}

impl State {
    pub(super) fn create(
        &mut self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
    ) -> Result<Observation> {
        self.make(mutation, sandbox, owner, spec, |state| {
            let mut tree = Tree::new(state.now_ms, spec.limits.in_force().disk_bytes);
            for (path, mode) in IMAGE {
                tree.make_dirs(path, state.now_ms)?;
                tree.set_mode(path, mode);
            }
            Ok(Origin { tree, executions: Vec::new(), parent: None })
        })
    }

    /// The one way in which an instance comes to be. Nothing is changed before everything has been checked (J5).
    pub(super) fn make(
        &mut self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        origin: impl FnOnce(&Self) -> Result<Origin>,
    ) -> Result<Observation> {
        self.require_limits(&spec.limits)?;
        self.require_network(spec)?;
        let reference = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
        match self.fences.admit(sandbox, mutation, Intent::Make)? {
            Admission::Done => return Ok(self.observe(&reference)),
            Admission::Work => {}
        }
        check_spec(spec)?;
        let mut origin = origin(self)?;
        furnish(&mut origin.tree, &reference, spec, self.now_ms)?;
        let deadline_at_ms =
            self.capabilities.can(Capability::HardDeadline).then(|| self.now_ms.saturating_add(spec.lifetime_ms));
        let instance = Instance::new(reference.clone(), owner.clone(), spec.clone(), deadline_at_ms, origin);
        self.fences.made(sandbox, mutation);
        self.instances.insert(sandbox.clone(), instance);
        Ok(self.observe(&reference))
    }

    /// Refuses limits that are not declared.
    pub(super) fn require_limits(&self, limits: &ResourceLimits) -> Result<()> {
        limits.first_missing(|needed| self.capabilities.can(needed)).map_or(Ok(()), |missing| self.require(missing))
    }

    fn require_network(&self, spec: &InstanceSpec) -> Result<()> {
        match spec.network.egress {
            Egress::None => Ok(()),
            Egress::All => self.require(Capability::EgressAll),
        }
    }

    pub(super) fn observe(&self, instance: &InstanceRef) -> Observation {
        match self.instances.get(&instance.sandbox).filter(|found| found.reference == *instance) {
            Some(found) => {
                let seen = found.observe(self.now_ms, self.capabilities.can(Capability::Usage));
                Observation { lacks: self.capabilities.lacks(), ..seen }
            }
            None => Observation {
                instance: instance.clone(),
                state: InstanceState::Absent,
                deadline: None,
                usage: None,
                limits: None,
                lacks: BTreeMap::new(),
                observed_at_ms: self.now_ms,
                via: ObservedVia::Supervisor,
            },
        }
    }

    pub(super) fn list(&self, owner: &OwnerMark, page: &PageRequest) -> Result<Page> {
        let after: Option<SandboxId> = page.cursor.as_deref().map(str::parse).transpose()?;
        let limit = page.limit.unwrap_or(PAGE_ITEMS_MAX).clamp(1, PAGE_ITEMS_MAX);
        let items: Vec<_> = self
            .instances
            .iter()
            .filter(|(sandbox, instance)| instance.owner == *owner && Some(*sandbox) > after.as_ref())
            .take(limit + 1)
            .map(|(_, instance)| instance.listed())
            .collect();
        Ok(page_of(items, limit, |item| item.instance.sandbox.to_string()))
    }

    /// How an instance ended, or `None` while it lives.
    pub(super) fn end_of(&self, instance: &InstanceRef) -> Result<Option<Ended>> {
        if let Some(ended) = self.fences.tombstone(instance) {
            return Ok(Some(ended.clone()));
        }
        Ok(self.read(instance)?.ended().cloned())
    }

    pub(super) fn destroy(&mut self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        match self.fences.admit(sandbox, mutation, Intent::End)? {
            Admission::Done => return Ok(()),
            Admission::Work => {}
        }
        let ended = self.instances.remove(sandbox).and_then(|instance| instance.ended().cloned());
        let ended = ended.unwrap_or(Ended { cause: EndCause::Destroyed, at_ms: self.now_ms });
        self.fences.bury(sandbox, mutation, ended);
        Ok(())
    }
}

/// A page of items, one more than asked for of which is how it is known that there is more.
pub(super) fn page_of<T>(mut items: Vec<T>, limit: usize, cursor: impl FnOnce(&T) -> String) -> Page<T> {
    let has_more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| has_more).map(cursor);
    Page { items, next, unreadable: Vec::new() }
}

/// Refuses a spec that makes no sense.
fn check_spec(spec: &InstanceSpec) -> Result<()> {
    let invalid = |what: &str, hint: &str| Err(ProviderError::Invalid { what: what.to_owned(), hint: hint.to_owned() });
    if !spec.workdir.starts_with('/') {
        return invalid("the working directory is not absolute", "start it with a slash");
    }
    if spec.lifetime_ms == 0 {
        return invalid("the lifetime is over before it begins", "give it at least a millisecond");
    }
    if spec.env.keys().any(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return invalid("a variable's name is empty or holds `=`", "names and values are separate");
    }
    Ok(spec.limits.check()?)
}

/// Puts into a filesystem what every instance has.
fn furnish(tree: &mut Tree, reference: &InstanceRef, spec: &InstanceSpec, now_ms: u64) -> Result<()> {
    let workdir = tree.resolve(&spec.workdir, true)?;
    tree.make_dirs(&workdir, now_ms)?;
    // What is connected is no part of what was saved.
    if tree.get(INTERFACES).is_some() {
        tree.remove(INTERFACES)?;
    }
    let interfaces: &[&str] = match spec.network.egress {
        Egress::None => &["lo"],
        Egress::All => &["lo", "eth0"],
    };
    for name in interfaces {
        tree.make_dirs(&format!("{INTERFACES}/{name}"), now_ms)?;
    }
    tree.make_parents(IDENTITY, now_ms)?;
    tree.put(IDENTITY, Node::file(identity_file(reference).into_bytes(), 0o644, now_ms))
}

/// What the identity file of an instance holds.
pub(super) fn identity_file(InstanceRef { sandbox, generation }: &InstanceRef) -> String {
    // Ids are letters and digits, so nothing needs to be escaped.
    format!("{{\"sandbox\":\"{sandbox}\",\"generation\":{generation}}}")
}
