//! What must hold of everything that is written.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use viv_core::execution::{Execution, Stage};
use viv_core::lifecycle::{Actor, Cause, Desired, Finding, Memory, Phase, PhaseName, Sandbox};
use viv_core::schedule::Schedule;
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::{EndCause, ExecutionId, FencingToken, Generation, SandboxId, ScheduleId};
use viv_provider::{InstanceRef, InstanceState};
use viv_store::{Epoch, Lease, LeaseKind, NewLine};

use super::{Found, holds, task};
use crate::store::Recorded;
use crate::world::{named_by, somebody};

/// Findings before an instance is given up, and the time that they span (T7).
const FINDINGS_MIN: u32 = 3;
const FINDINGS_SPAN_MS: u64 = 10_000;

/// What was seen of earlier changes.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// How many were looked at.
    pub(crate) checked: u64,
    /// Whether times can be compared: no clock was set.
    clocks_agree: bool,
    made_at_ms: BTreeMap<(SandboxId, Generation), u64>,
    leases: BTreeMap<(SandboxId, LeaseKind), (FencingToken, Epoch)>,
    token_max: Option<FencingToken>,
    over: BTreeSet<SandboxId>,
    runs: BTreeMap<ScheduleId, BTreeSet<ExecutionId>>,
    /// Who named a generation, and had a line since.
    holders: HashSet<Actor>,
}

/// A record as it was and is.
struct Step<'c> {
    before: &'c Sandbox,
    after: &'c Sandbox,
    lines: &'c [NewLine],
    from: PhaseName,
    to: PhaseName,
}

impl Changes {
    pub(crate) fn new(clocks_agree: bool) -> Self {
        Self { clocks_agree, ..Self::default() }
    }

    pub(crate) fn check(&mut self, recorded: &Recorded) -> Found {
        self.checked += 1;
        match recorded {
            Recorded::Sandbox { before: None, after, .. } => begun(after),
            Recorded::Sandbox { before: Some(before), after, lines, .. } => self.changed(before, after, lines),
            Recorded::Row { before, after, users } => row(before.as_deref(), after.as_deref(), users),
            Recorded::Schedule { before, after, lines } => self.schedule(before.as_deref(), after.as_deref(), lines),
            Recorded::Over { instance, state, cause } => over(instance, state, cause),
            Recorded::Idle { instance, running } => {
                holds("at-work-is-not-idle", running.is_empty(), || format!("{instance} rests, and {running:?} runs"))
            }
            Recorded::Late { snapshot, sandbox } => {
                Err(("saved-while-it-was-there", format!("{snapshot} of {sandbox}, which was deleted, is ready")))
            }
            Recorded::Reset { sandbox, left } => {
                holds("reset-keeps-nothing", left.is_empty(), || format!("{sandbox} began anew, and there is {left:?}"))
            }
            Recorded::Task { before, after } => task::check(before.as_deref(), after),
            Recorded::Execution { before, after } => execution(before.as_deref(), after),
            Recorded::Token { token } => self.token(*token, "for nobody"),
            Recorded::Lease { lease, epoch } => self.lease(lease, *epoch),
            Recorded::Foreign { what } => Err(("owner-writes", format!("{what} by who does not own the store"))),
        }
    }

    fn changed(&mut self, before: &Sandbox, after: &Sandbox, lines: &[NewLine]) -> Found {
        let step = Step { before, after, lines, from: before.phase.name(), to: after.phase.name() };
        if after.is_over() {
            self.over.insert(after.id.clone());
        }
        if step.moved() && after.cause.cause == Cause::Made {
            self.made_at_ms.insert((after.id.clone(), after.generation), after.cause.at_ms);
        }
        step.counts()?;
        step.has_a_cause()?;
        step.makes()?;
        self.becomes_ready(&step)?;
        step.ends()?;
        step.is_held()?;
        step.is_given_up(self.clocks_agree)?;
        step.idles(self.clocks_agree)?;
        step.keeps()?;
        step.goes_back()?;
        self.is_aimed(&step)
    }

    /// The first line of who names a generation is that of what it asked for; what follows from that may be of later ones.
    fn is_aimed(&mut self, step: &Step<'_>) -> Found {
        for line in step.lines {
            let Some((_, named)) = named_by(&line.by).filter(|(of, _)| *of == step.after.id) else { continue };
            let first = self.holders.insert(line.by.clone());
            holds("verbs-reach-what-they-name", !first || step.before.generation == named, || {
                format!("{}: {} of {} changed {}", step.after.id, line.kind, line.by, step.before.generation)
            })?;
        }
        Ok(())
    }

    fn becomes_ready(&self, step: &Step<'_>) -> Found {
        let (after, id) = (step.after, &step.after.id);
        if !step.moved() || step.to != PhaseName::Ready {
            return Ok(());
        }
        holds("verified-before-ready", step.from == PhaseName::Verifying, || {
            format!("{id} became ready from {:?}", step.from)
        })?;
        let evidence = &after.evidence;
        holds("ready-on-evidence", evidence.finding_for(&after.spec) == Some(Finding::Ok), || {
            format!("{id} became ready on {evidence:?}")
        })?;
        let current = |check: &viv_core::lifecycle::ServiceCheck| {
            after.services.get(&check.service).is_some_and(|run| run.execution == check.execution)
        };
        holds("ready-on-evidence", evidence.services.iter().all(current), || {
            format!("{id} became ready on services that were started before: {:?}", evidence.services)
        })?;
        let made_at_ms = self.made_at_ms.get(&(id.clone(), after.generation)).copied().unwrap_or(0);
        holds("ready-on-evidence", !self.clocks_agree || evidence.at_ms() >= Some(made_at_ms), || {
            format!("{id} became ready on checks of before it was made: {:?} < {made_at_ms}", evidence.at_ms())
        })
    }

    fn lease(&mut self, lease: &Lease, epoch: Epoch) -> Found {
        holds("leases-of-the-living", !self.over.contains(&lease.sandbox), || format!("{lease:?}"))?;
        let key = (lease.sandbox.clone(), lease.kind);
        let last = self.leases.insert(key, (lease.token, epoch));
        if last == Some((lease.token, epoch)) {
            return Ok(());
        }
        self.token(lease.token, &format!("{lease:?}"))
    }

    fn token(&mut self, token: FencingToken, whose: &str) -> Found {
        holds("tokens-grow", Some(token) > self.token_max, || {
            format!("{token:?} was given, and {:?} before it: {whose}", self.token_max)
        })?;
        self.token_max = self.token_max.max(Some(token));
        Ok(())
    }

    fn schedule(&mut self, before: Option<&Schedule>, after: Option<&Schedule>, lines: &[NewLine]) -> Found {
        let Some(after) = after else { return Ok(()) };
        let id = &after.id;
        let run = after.run.as_ref();
        if let Some(run) = run
            && before.and_then(|before| before.run.as_ref()).is_none_or(|before| before.execution != run.execution)
        {
            let new = self.runs.entry(id.clone()).or_default().insert(run.execution.clone());
            holds("an-occurrence-once", new, || format!("{id} runs {} again", run.execution))?;
        }
        let Some(before) = before else { return Ok(()) };
        if let (Some(one), Some(other)) = (&before.run, run) {
            holds("one-run-at-a-time", one.execution == other.execution, || {
                format!("{id}: {} was under way, and {} is", one.execution, other.execution)
            })?;
            let moved = one.generation.is_some() && one.generation != other.generation;
            holds("a-run-in-one-generation", !moved, || {
                format!("{id}: {} was in {:?}, and is in {:?}", one.execution, one.generation, other.generation)
            })?;
        }
        let sum = |schedule: &Schedule| schedule.runs + schedule.skipped;
        let ended = before.run.is_some() && run.is_none();
        holds("one-run-at-a-time", sum(after) >= sum(before) + u64::from(ended), || {
            format!("{id}: a run went, and is counted nowhere")
        })?;
        let changed = lines.iter().any(|line| line.kind == "schedule.changed");
        let grows = after.next_at_ms.is_none() || after.next_at_ms >= before.next_at_ms;
        holds("an-occurrence-once", changed || grows, || {
            format!("{id} was due at {:?}, and is at {:?}", before.next_at_ms, after.next_at_ms)
        })
    }
}

/// For what is lost whose instance ended so by itself.
pub(super) fn as_lost_for(end: &EndCause) -> Option<Cause> {
    match end {
        EndCause::OomKilled => Some(Cause::OomKilled),
        EndCause::DiskFull { .. } => Some(Cause::DiskFull),
        EndCause::SupervisorLost => Some(Cause::SupervisorLost),
        EndCause::Rebooted => Some(Cause::Rebooted),
        EndCause::MemoryLost { .. } => Some(Cause::MemoryNotRestored),
        EndCause::Exited { .. }
        | EndCause::Signalled { .. }
        | EndCause::AgentLost
        | EndCause::Unverifiable { .. }
        | EndCause::CreateFailed { .. } => Some(Cause::Crashed),
        EndCause::Expired | EndCause::Destroyed | EndCause::Saved => None,
    }
}

fn over(instance: &InstanceRef, state: &InstanceState, cause: &Cause) -> Found {
    let over = matches!(state, InstanceState::Ended(_) | InstanceState::Absent | InstanceState::Ending { .. });
    if let InstanceState::Ended(ended) = state
        && !matches!(cause, Cause::Expired | Cause::ProviderLost)
    {
        let really = as_lost_for(&ended.cause);
        return holds("ends-are-told-apart", really.as_ref() == Some(cause), || {
            format!("{instance} is lost ({}), and {state}", cause.code())
        });
    }
    let name = if *cause == Cause::Expired { "expiry-is-fetched" } else { "absence-is-seen" };
    holds(name, over, || format!("{instance} is over ({}), and is {state}", cause.code()))
}

fn execution(before: Option<&Execution>, after: &Execution) -> Found {
    let Some(before) = before else { return Ok(()) };
    let end = |row: &Execution| match &row.stage {
        Stage::Started { status, concluded: false } if status.state.is_final() => Some(status.state.clone()),
        Stage::Started { .. } | Stage::Queued(_) => None,
    };
    let told = end(before);
    holds("executions-end-once", told.is_none() || end(after) == told, || {
        format!("{} had ended as {told:?}, and is {:?}", after.id, after.stage)
    })?;
    let was_started = matches!(before.stage, Stage::Started { .. });
    holds("executions-go-one-way", !was_started || matches!(after.stage, Stage::Started { .. }), || {
        format!("{} was started, and is {:?}", after.id, after.stage)
    })
}

fn begun(after: &Sandbox) -> Found {
    let first = after.generation == Generation::FIRST && after.version == 1;
    let wanted = after.entry.is_some() && after.desired == Desired::Running && after.phase.work().is_some();
    holds("begins-with-intent", first && wanted, || format!("{} begins as {:?}", after.id, after.phase))
}

fn row(before: Option<&Snapshot>, after: Option<&Snapshot>, users: &[SandboxId]) -> Found {
    let goes = after.is_none_or(|row| row.state == SnapshotState::Removing);
    let id = after.or(before).map(|row| row.id.to_string()).unwrap_or_default();
    holds("in-use-stays", !goes || users.is_empty(), || format!("{id} is removed, and {users:?} begins with it"))?;
    let Some(after) = after else {
        let ready = before.is_some_and(|row| row.state == SnapshotState::Ready);
        return holds("snapshots-go-one-way", !ready, || format!("the row of {id} is forgotten, and was ready"));
    };
    let version = before.map_or(0, |row| row.version);
    let one_way = before.is_none_or(|row| row.state == SnapshotState::Saving || after.state != SnapshotState::Saving);
    holds("snapshots-go-one-way", one_way && after.version == version + 1, || {
        format!("{id} was {:?}, and is {:?}", before.map(|row| (row.version, row.state)), (after.version, after.state))
    })
}

impl Step<'_> {
    fn moved(&self) -> bool {
        self.from != self.to
    }

    fn counts(&self) -> Found {
        let (before, after, id) = (self.before, self.after, &self.after.id);
        holds("version-counts", after.version == before.version + 1, || {
            format!("{id} was at {}, and is at {}", before.version, after.version)
        })?;
        let same = after.generation == before.generation;
        holds("generation-grows", same || after.generation == before.generation.next(), || {
            format!("{id}: generation {} became {}", before.generation, after.generation)
        })?;
        let kept = matches!(self.from, PhaseName::Frozen | PhaseName::Lost) && self.to == PhaseName::Verifying;
        holds("same-instance-same-generation", same || !kept, || {
            format!("{id}: {:?} became {:?} in another generation", self.from, self.to)
        })
    }

    fn has_a_cause(&self) -> Found {
        let (after, id) = (self.after, &self.after.id);
        let told = |line: &NewLine| {
            (line.from, line.to) == (Some(self.from), Some(self.to))
                && line.cause.as_deref() == Some(after.cause.cause.code())
                && line.at_ms == after.cause.at_ms
                && line.sandbox.as_ref() == Some(id)
        };
        holds("moves-have-causes", !self.moved() || self.lines.iter().any(told), || {
            format!("{id} went from {:?} to {:?} with {:?}", self.from, self.to, self.lines)
        })
    }

    fn makes(&self) -> Found {
        let (before, after, id) = (self.before, self.after, &self.after.id);
        holds("entry-makes", after.generation == before.generation || after.entry.is_some(), || {
            format!("{id} is made again as {}, and nobody wants it", after.generation)
        })?;
        let answered = matches!(
            self.to,
            PhaseName::Ready | PhaseName::Lost | PhaseName::Failed | PhaseName::Stopping | PhaseName::Stopped
        );
        let forgotten = before.entry.is_some() && after.entry.is_none();
        holds("entry-is-answered", !forgotten || answered || after.desired != Desired::Running, || {
            format!("{id}: {:?} was forgotten on the way from {:?} to {:?}", before.entry, self.from, self.to)
        })
    }

    fn ends(&self) -> Found {
        let (before, after, id) = (self.before, self.after, &self.after.id);
        let over = matches!(self.to, PhaseName::Stopping | PhaseName::Stopped);
        let stays = after.desired == Desired::Gone && over;
        holds("gone-for-ever", before.desired != Desired::Gone || stays, || {
            format!("{id} was to be gone, and is {:?}", after.phase)
        })?;
        holds("deleted-for-ever", after.deleted || !before.deleted, || format!("{id} is not deleted any more"))?;
        let same = Sandbox { version: before.version, deleted: before.deleted, ..after.clone() } == *before;
        holds("stopped-is-the-end", self.from != PhaseName::Stopped || same, || {
            format!("{id} is stopped, and became {after:?}")
        })?;
        let cleared = match self.to {
            PhaseName::Stopped => self.from == PhaseName::Stopping,
            PhaseName::Hibernated => {
                matches!(self.from, PhaseName::Hibernating | PhaseName::Resuming | PhaseName::Provisioning)
            }
            _ => true,
        };
        holds("absence-before-rest", !self.moved() || cleared, || {
            format!("{id} went from {:?} to {:?}", self.from, self.to)
        })?;
        let runs = matches!(self.to, PhaseName::Verifying | PhaseName::Ready | PhaseName::Frozen);
        holds("saving-never-runs-on", self.from != PhaseName::Hibernating || !runs || self.stays_frozen(), || {
            format!("{id} was being saved, and is {:?}", self.to)
        })?;
        let empty = after.entry.is_none() && after.expires_at_ms.is_none() && after.keep_awake.is_empty();
        holds("what-is-over-holds-nothing", self.to != PhaseName::Stopped || empty, || {
            format!("{id} is stopped, with {:?}, {:?}, {:?}", after.entry, after.expires_at_ms, after.keep_awake)
        })
    }

    /// It was to go to disk only for the room that it takes, and its memory could not: it was frozen all the time (L13).
    fn stays_frozen(&self) -> bool {
        let (before, after) = (self.before, self.after);
        let for_room = before.cause.cause == Cause::MemoryShort && before.memory == Some(Memory::Saving);
        let same = before.generation == after.generation;
        for_room && same && matches!(after.memory, Some(Memory::NotSaved { .. }))
    }

    fn is_held(&self) -> Found {
        let (before, after, id) = (self.before, self.after, &self.after.id);
        // A task that begins is somebody's will too.
        let is_user = |by: &Actor| *by == somebody() || named_by(by).is_some() || by.to_string().starts_with("task:");
        let by_user = self.lines.iter().any(|line| is_user(&line.by));
        holds("held-until-asked", !before.held || after.held || by_user, || {
            format!("{id} was stopped by a user, and is let go by {:?}", self.lines)
        })?;
        let stop = |line: &NewLine| line.kind == "sandbox.stop_asked" || line.cause.as_deref() == Some("user_stop");
        holds("held-by-a-stop", before.held || !after.held || self.lines.iter().any(stop), || {
            format!("{id} is held, and nobody stopped it: {:?}", self.lines)
        })?;
        holds("held-is-not-wanted", !after.held || after.desired != Desired::Running, || {
            format!("{id} was stopped by a user, and is wanted to run")
        })
    }

    fn is_given_up(&self, clocks_agree: bool) -> Found {
        let (after, id) = (self.after, &self.after.id);
        if !self.moved() {
            return Ok(());
        }
        let at_ms = after.cause.at_ms;
        if let (Phase::Verifying { findings, found_at_ms, .. }, Cause::ProbeFailed) =
            (&self.before.phase, &after.cause.cause)
        {
            let span_ms = at_ms.saturating_sub(*found_at_ms);
            let enough = findings + 1 >= FINDINGS_MIN && (span_ms >= FINDINGS_SPAN_MS || !clocks_agree);
            holds("three-findings", enough, || {
                format!("{id} is {:?} after {} findings in {span_ms} ms", self.to, findings + 1)
            })?;
        }
        let given_up = matches!(self.to, PhaseName::Lost | PhaseName::Failed);
        holds("timeouts-replace-nothing", after.cause.cause != Cause::Unresponsive || given_up, || {
            format!("{id} did not answer, and is {:?}", self.to)
        })?;
        let found = matches!(after.cause.cause, Cause::ProbeFailed | Cause::Unresponsive | Cause::ProbeFinding);
        let further = self.from == PhaseName::Ready && self.to != PhaseName::Verifying;
        holds("one-look-is-not-enough", !(found && further), || format!("{id} went from ready to {:?}", self.to))
    }

    fn idles(&self, clocks_agree: bool) -> Found {
        let (before, after, id) = (self.before, self.after, &self.after.id);
        let used = matches!(self.from, PhaseName::Ready | PhaseName::Frozen);
        let idled = self.moved() && used && after.cause.cause == Cause::Idle && after.cause.by == Actor::part("idle");
        if !idled || !clocks_agree {
            return Ok(());
        }
        let awake = before.keep_awake.iter().find(|(_, lease)| lease.until_ms > after.cause.at_ms);
        holds("kept-awake-is-not-idle", awake.is_none(), || {
            format!("{id} is put to rest at {}, and is kept awake by {awake:?}", after.cause.at_ms)
        })?;
        let due_ms = before.idle_at_ms(true);
        holds("idle-after-its-window", due_ms.is_some_and(|due_ms| due_ms <= after.cause.at_ms), || {
            format!("{id} is put to rest at {}, and is idle at {due_ms:?}", after.cause.at_ms)
        })
    }

    fn keeps(&self) -> Found {
        let (before, after, id) = (self.before, self.after, &self.after.id);
        if before.is_spare() && !after.is_spare() {
            // It was nobody's, and is made into what somebody asked for, once (L19).
            let claimed = self.from == PhaseName::Ready && after.claimed == Some(before.generation);
            let same = after.generation == before.generation && after.spec.of_instance() == before.spec;
            return holds("policy-stays", claimed && same, || format!("{before:?} became {after:?}"));
        }
        let limits = before.spec.limits.clone();
        let spec = viv_core::spec::SandboxSpec { limits, ..after.spec.clone() };
        let same = before.policy == after.policy
            && before.spec == spec
            && before.name == after.name
            && before.project == after.project
            && before.labels == after.labels
            && before.created_at_ms == after.created_at_ms;
        holds("policy-stays", same, || format!("{id} lives by {:?} now, and did by {:?}", after.policy, before.policy))
    }

    fn goes_back(&self) -> Found {
        let (before, after, id) = (self.before, self.after, &self.after.id);
        let Some(target) = before.rollback.as_ref().filter(|_| after.rollback.is_none()) else { return Ok(()) };
        // Somebody may have asked for another one at this moment, or to begin anew.
        let asked = self.lines.iter().find_map(|line| line.data.get("snapshot")?.as_str());
        let target = asked.unwrap_or(target.as_str());
        let goes_on = matches!(self.to, PhaseName::Resuming | PhaseName::Hibernated);
        let right = goes_on && after.made_from().is_some_and(|from| from.as_str() == target);
        // Seen to live on, and nobody waits any more: it is kept as it is.
        let kept = self.from == PhaseName::Lost && self.to == PhaseName::Verifying && before.entry.is_none();
        holds("goes-back-where-asked", right || kept || after.resetting, || {
            format!("{id} was to go back to {target}, and is {:?}, from {:?}", self.to, after.made_from())
        })
    }
}
