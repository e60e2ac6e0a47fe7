//! Reads: they never resume, create, extend or count as activity (T9). What they find stale they only signal.

use std::collections::BTreeMap;
use std::sync::Arc;

use viv_core::lifecycle::{Actor, EntryKind, Evidence, Finding, Observed, Phase, PhaseName, Sandbox, Status, status};
use viv_core::planted::{Planted, is_planted};
use viv_core::spec::{Name, Project};
use viv_core::{Generation, SandboxId};
use viv_provider::{Capability, Deadline, DiskUsage, InstanceRef, ObservedVia, ResourceLimits, Usage};
use viv_store::{Cursor, JournalFilter, JournalLine, JournalPage, JournalSearch, ListQuery};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::gate::Gate;

/// What became ready while it was looked at, on a probe of before, is looked at once more.
const LOOKS_MAX: usize = 2;

/// Which sandbox is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// This one.
    Id(SandboxId),
    /// The one with this name.
    Name(Name),
}

/// A sandbox as it is shown: the record, and what was seen of it lately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// The record.
    pub sandbox: Sandbox,
    /// The one word, computed.
    pub status: Status,
    /// The latest evidence about its current generation.
    pub evidence: Evidence,
    /// What the provider said last.
    pub observed: Option<Observed>,
    /// When this was put together.
    pub now_ms: u64,
}

/// What an instance uses.
#[derive(Debug, Clone)]
pub struct Resources {
    /// Which.
    pub instance: InstanceRef,
    /// Live figures.
    pub usage: Option<Usage>,
    /// The limits in force.
    pub limits: Option<ResourceLimits>,
    /// What it has on disk.
    pub disk: Option<DiskUsage>,
    /// Its hard deadline, fetched (T6).
    pub deadline: Option<Deadline>,
    /// What it has to do without on this machine, and why.
    pub lacks: BTreeMap<Capability, String>,
    /// What those inside asked for since the daemon began: schedules, steps, effects (O2).
    pub requests: u64,
    /// Who was asked.
    pub via: ObservedVia,
    /// When.
    pub at_ms: u64,
}

/// How many there are, and how they fare (O2).
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Records in each phase.
    pub phases: BTreeMap<PhaseName, u64>,
    /// Drivers at work.
    pub drivers: usize,
    /// Instances whose end is waited for.
    pub watched: usize,
    /// Alarms that are set.
    pub alarms: usize,
    /// Sandboxes of which something is kept in memory.
    pub known: usize,
}

impl View {
    /// It is recorded as ready, and could not be seen to be.
    pub(crate) fn unfit(self) -> EngineError {
        let finding = self.evidence.finding().filter(|finding| *finding != Finding::Ok).unwrap_or(Finding::Timeout);
        let unmade = || format!("it is {}, and could not be probed", self.sandbox.phase.name().as_str());
        let what = self.evidence.complaint().unwrap_or_else(unmade);
        EngineError::Unfit { sandbox: self.sandbox.id, finding, what }
    }
}

impl Inner {
    /// Whether it was seen to be well since this daemon began. A check that could not be made or recorded is no evidence:
    /// it opens no door, and neither does what the daemon before this one found (T4).
    pub(crate) fn is_seen_well(&self, view: &View) -> bool {
        view.status == Status::Ready && self.knowledge.has_probed(&view.sandbox)
    }

    /// Shows a record with what was seen lately.
    pub(crate) fn view(&self, sandbox: Sandbox) -> View {
        let now_ms = self.clock.now_ms();
        let evidence = self.knowledge.evidence(&sandbox, now_ms);
        let observed = self.knowledge.last_observed(&sandbox);
        let mut status = status(&sandbox, &evidence, now_ms);
        if status == Status::Unverified && !self.config.gates.is_on(Gate::EvidenceAges, &sandbox.project, &sandbox.id) {
            status = Status::Ready;
        }
        // Its end may be known and not recorded yet: a store that cannot write makes nothing ready.
        if status == Status::Ready && self.knowledge.has_ended(&sandbox) {
            status = Status::Unverified;
        }
        View { sandbox, status, evidence, observed, now_ms }
    }

    /// A view for a reader: what is stale is signalled.
    fn shown(self: &Arc<Self>, sandbox: Sandbox) -> View {
        self.looked_at(&sandbox);
        let view = self.view(sandbox);
        if view.status == Status::Unverified {
            self.signal_health(&view.sandbox.id);
        }
        view
    }

    pub(crate) async fn find(&self, project: &Project, which: &Which) -> Result<Sandbox, EngineError> {
        let (found, name) = match which {
            Which::Id(id) => (self.store.get(id).await?, id.to_string()),
            Which::Name(name) => (self.store.find(project, name).await?, name.to_string()),
        };
        // Nothing reaches from one project into another, not even the knowledge that it is there.
        let found = found.filter(|found| found.project == *project && !found.is_spare());
        let found = found.ok_or(EngineError::NotFound { which: name })?;
        self.knowledge.meet(&found);
        Ok(found)
    }
}

impl Engine {
    /// A sandbox as it is.
    pub async fn get(&self, project: &Project, which: &Which, reader: &str) -> Result<View, EngineError> {
        let sandbox = self.inner.find(project, which).await?;
        if !sandbox.is_over() {
            self.inner.knowledge.read_by(&sandbox.id, reader, self.inner.clock.now_ms());
        }
        if is_planted(Planted::ReadResumes) && matches!(sandbox.phase, Phase::Hibernated { .. } | Phase::Frozen { .. })
        {
            self.ensure(&sandbox.id, EntryKind::Gateway, Actor::part("engine")).await.ok();
        }
        Ok(self.inner.shown(sandbox))
    }

    /// Looks and probes now, and then tells (T3). Not activity. A look that could not be made shows nothing: `ready` is
    /// what was probed since it was asked for, and not what somebody saw before.
    pub async fn verify(&self, sandbox: &SandboxId) -> Result<View, EngineError> {
        let inner = &self.inner;
        let asked_ms = inner.clock.now_ms();
        for _ in 0..LOOKS_MAX {
            inner.check_health(sandbox).await;
            let view = inner.view(inner.load(sandbox).await?);
            if view.status != Status::Ready || view.evidence.at_ms() >= Some(asked_ms) {
                return Ok(view);
            }
        }
        let view = inner.view(inner.load(sandbox).await?);
        let status = if view.status == Status::Ready { Status::Unverified } else { view.status };
        Ok(View { status, ..view })
    }

    /// A page of sandboxes, newest first.
    pub async fn list(&self, query: &ListQuery) -> Result<(Vec<View>, Option<String>), EngineError> {
        let listing = self.inner.store.list(query).await?;
        // What nobody asked for is nobody's to see here: see `Engine::spares`.
        let asked_for = listing.items.into_iter().filter(|sandbox| !sandbox.is_spare());
        Ok((asked_for.map(|sandbox| self.inner.shown(sandbox)).collect(), listing.next))
    }

    /// Lines of the journal after a cursor.
    pub async fn events(
        &self,
        after: Cursor,
        filter: &JournalFilter,
        limit: usize,
    ) -> Result<Vec<JournalLine>, EngineError> {
        Ok(self.inner.store.journal(after, filter, limit).await?)
    }

    /// Lines of the journal after a cursor that are looked for; a page may be short though there are more.
    pub async fn events_page(
        &self,
        after: Cursor,
        filter: &JournalFilter,
        search: &JournalSearch,
        limit: usize,
    ) -> Result<JournalPage, EngineError> {
        Ok(self.inner.store.journal_page(after, filter, search, limit).await?)
    }

    /// What an instance uses, alive or ended.
    pub async fn resources(&self, sandbox: &Sandbox) -> Result<Resources, EngineError> {
        let inner = &self.inner;
        let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        let budget = inner.config.budgets.call;
        let seen = inner.call(&sandbox.id, budget, inner.provider.observe(&instance)).await;
        let seen = seen.map_err(EngineError::Provider)?;
        let disk = inner.call(&sandbox.id, budget, inner.provider.disk_usage(&instance)).await.ok();
        Ok(Resources {
            instance,
            usage: seen.usage,
            limits: seen.limits,
            disk,
            deadline: seen.deadline,
            lacks: seen.lacks,
            requests: inner.knowledge.requests(&sandbox.id),
            via: seen.via,
            at_ms: inner.clock.now_ms(),
        })
    }

    /// How many there are.
    pub async fn stats(&self, project: Option<&Project>) -> Result<Stats, EngineError> {
        let inner = &self.inner;
        Ok(Stats {
            phases: inner.store.count(project).await?,
            drivers: inner.drivers.len(),
            watched: inner.watches.len(),
            alarms: inner.timer.len(),
            known: inner.knowledge.len(),
        })
    }
}

/// Refuses a generation that is not the current one (T5).
pub(crate) fn check_generation(sandbox: &Sandbox, asked: Option<Generation>) -> Result<(), EngineError> {
    match asked {
        Some(_) if is_planted(Planted::NoGenerationCheck) => Ok(()),
        Some(asked) if asked != sandbox.generation => Err(EngineError::StaleHandle {
            sandbox: sandbox.id.clone(),
            asked,
            current: sandbox.generation,
            cause: Box::new(sandbox.cause.clone()),
        }),
        Some(_) | None => Ok(()),
    }
}

/// Whether an instance may be there to be asked.
pub(crate) fn has_instance(sandbox: &Sandbox) -> bool {
    match &sandbox.phase {
        Phase::Verifying { .. } | Phase::Ready | Phase::Frozen { .. } | Phase::Lost | Phase::Hibernating { .. } => true,
        Phase::Provisioning { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => false,
    }
}
