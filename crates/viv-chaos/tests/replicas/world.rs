//! The world of the model: what is kept, who believes what, and what is on its way.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use viv_core::fence::{self, Fence, Intent, Late};
use viv_core::lifecycle::{
    Actor, Check, Desired, Effect, Event, Evidence, Failure, FailureKind, Finding, Moment, NewSandbox, Observed,
    Outcome, PhaseName, Sandbox, Seen, Stepped, Timings, outstanding, step,
};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{EndCause, FencingToken, Generation, OperationId, SandboxId};
use viv_store::{Epoch, Grant, Lease, LeaseKind, grant};

/// How much may happen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scope {
    pub(crate) replicas: usize,
    pub(crate) is_persistent: bool,
    /// How often a replica becomes the owner.
    pub(crate) takeovers: u64,
    /// How often users ask for something.
    pub(crate) wishes: u8,
    /// How often an instance ends by itself.
    pub(crate) deaths: u8,
    /// How often a call may arrive.
    pub(crate) arrivals: u8,
    pub(crate) generations: u64,
    pub(crate) operations: u64,
    pub(crate) attempts: u32,
}

impl Default for Scope {
    fn default() -> Self {
        Self {
            replicas: 2,
            is_persistent: false,
            takeovers: 2,
            wishes: 1,
            deaths: 0,
            arrivals: 1,
            generations: 2,
            operations: 4,
            attempts: 1,
        }
    }
}

/// A rule that is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The provider does not compare tokens.
    TokenCheck,
    /// The provider forgets what was destroyed.
    Tombstone,
    /// The store does not ask who owns it.
    EpochCheck,
    /// A lease of the owner before goes on under its token.
    NewToken,
    /// Silence is taken for absence (T7).
    ObservedAbsence,
}

impl Broken {
    pub(crate) const ALL: [Self; 5] =
        [Self::TokenCheck, Self::Tombstone, Self::EpochCheck, Self::NewToken, Self::ObservedAbsence];
}

/// What must never happen, and leaves no trace in what is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Wrong {
    /// At the provider, by one whose successor had been there.
    ChangedByTheLate,
    /// In the store, by one that did not own it.
    WrittenByTheLate,
    TokenRepeated,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    /// A replica takes the store over; the one before does not know.
    Own(usize),
    /// A replica does what the record says is outstanding: its call is on its way.
    Begin(usize),
    /// A replica waits no longer.
    GiveUp(usize),
    /// A call arrives.
    Arrive(Call),
    /// An answer arrives, and is recorded.
    Answered(Answer),
    /// A replica looks at the instance by itself.
    Look(usize),
    /// The deadline of the phase passes.
    Late(usize),
    Enter(usize),
    Stop(usize),
    Delete(usize),
    /// The instance ends by itself.
    Die,
}

/// An operation by its number: [`Sandbox::operations`] when it was named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Operation(u64);

impl Operation {
    fn of(record: &Sandbox) -> Option<Self> {
        let id = record.phase.work()?.operation.as_str();
        id.rsplit('x').next()?.parse().ok().map(Self)
    }

    /// The outcome of it as an event.
    fn done(self, of: &SandboxId, outcome: Outcome) -> Event {
        let body: String = of.as_str().trim_start_matches(SandboxId::PREFIX).chars().take(30).collect();
        let operation = format!("{}{body}x{}", OperationId::PREFIX, self.0).parse().expect("an id");
        Event::Done { operation, outcome }
    }
}

/// What is asked of the provider.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Call {
    from: usize,
    epoch: u64,
    operation: Operation,
    what: What,
    generation: Generation,
    token: FencingToken,
    /// How often it may still arrive.
    arrivals: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum What {
    Make,
    End,
    Save,
}

impl What {
    fn intent(self) -> Intent {
        match self {
            Self::Make => Intent::Make,
            Self::End => Intent::End,
            Self::Save => Intent::Change,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Answer {
    to: usize,
    operation: Operation,
    told: Told,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Told {
    Made,
    Cleared,
    Saved,
    Refused,
    Late,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Instance {
    pub(crate) generation: Generation,
    made_by: Operation,
    is_alive: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Replica {
    /// Under which ownership it believes to act.
    epoch: Option<u64>,
    token: Option<FencingToken>,
    waits_for: Option<Operation>,
}

/// A record, and the fingerprint of what would be written of it: worlds are many, and records few.
#[derive(Debug, Clone)]
struct Record {
    sandbox: Arc<Sandbox>,
    fingerprint: u64,
}

impl Record {
    fn new(sandbox: Sandbox) -> Self {
        let mut hasher = DefaultHasher::new();
        serde_json::to_vec(&sandbox).expect("a record").hash(&mut hasher);
        Self { sandbox: Arc::new(sandbox), fingerprint: hasher.finish() }
    }
}

impl PartialEq for Record {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

impl Eq for Record {}

impl Hash for Record {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.fingerprint.hash(state);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Held {
    token: FencingToken,
    holder: usize,
    epoch: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    record: Record,
    epoch: u64,
    last_token: FencingToken,
    lease: Option<Held>,
    fence: Option<Fence>,
    instance: Option<Instance>,
    replicas: Vec<Replica>,
    calls: BTreeSet<Call>,
    answers: BTreeSet<Answer>,
    wishes: u8,
    deaths: u8,
    arrivals: u8,
    /// The newest owner whose call was admitted.
    newest_there: u64,
    wrongs: BTreeSet<Wrong>,
    pub(crate) was_deleted: bool,
}

/// Later than every deadline that is set at nought.
const LATER_MS: u64 = 1_000_000_000;

fn user() -> Actor {
    Actor::part("user")
}

impl World {
    pub(crate) fn new(scope: &Scope) -> Self {
        let timings = Timings::default();
        let policy = Policy { persistent: scope.is_persistent, ..Policy::default_for(None) };
        let new = NewSandbox {
            id: SandboxId::from_bytes([1; 16]),
            project: Project::default(),
            name: None,
            spec: SandboxSpec::default(),
            policy,
            labels: std::collections::BTreeMap::new(),
            origin: None,
            by: user(),
        };
        let mut world = Self {
            record: Record::new(Sandbox::create(new, Moment { now_ms: 0, timings: &timings, no_memory: None })),
            epoch: 0,
            last_token: FencingToken(0),
            lease: None,
            fence: None,
            instance: None,
            replicas: vec![Replica::default(); scope.replicas],
            calls: BTreeSet::new(),
            answers: BTreeSet::new(),
            wishes: scope.wishes,
            deaths: scope.deaths,
            arrivals: scope.arrivals,
            newest_there: 0,
            wrongs: BTreeSet::new(),
            was_deleted: false,
        };
        world.own(0);
        world
    }

    pub(crate) fn record(&self) -> &Sandbox {
        &self.record.sandbox
    }

    pub(crate) fn instance(&self) -> Option<&Instance> {
        self.instance.as_ref()
    }

    pub(crate) fn went_wrong(&self, wrong: Wrong) -> bool {
        self.wrongs.contains(&wrong)
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.record().phase.name() == PhaseName::Ready
    }

    pub(crate) fn is_hibernated(&self) -> bool {
        self.record().phase.name() == PhaseName::Hibernated
    }

    pub(crate) fn is_wanted_gone(&self) -> bool {
        self.record().deleted && self.record().desired == Desired::Gone
    }

    pub(crate) fn is_within(&self, scope: &Scope) -> bool {
        let record = self.record();
        self.epoch <= scope.takeovers
            && record.generation.0 <= scope.generations
            && record.operations <= scope.operations
            && record.phase.work().is_none_or(|work| work.attempt <= scope.attempts)
    }

    pub(crate) fn actions(&self, scope: &Scope, actions: &mut Vec<Action>) {
        for (index, replica) in self.replicas.iter().enumerate() {
            // Who owns takes over from itself by a restart.
            if self.epoch < scope.takeovers {
                actions.push(Action::Own(index));
            }
            if replica.epoch.is_none() {
                continue;
            }
            if replica.waits_for.is_some() {
                actions.push(Action::GiveUp(index));
            } else if outstanding(self.record()).is_some() {
                actions.push(Action::Begin(index));
            }
            actions.push(Action::Late(index));
            actions.push(Action::Look(index));
            if self.wishes > 0 {
                actions.extend([Action::Enter(index), Action::Stop(index), Action::Delete(index)]);
            }
        }
        actions.extend(self.calls.iter().cloned().map(Action::Arrive));
        actions.extend(self.answers.iter().cloned().map(Action::Answered));
        if self.deaths > 0 && self.instance.as_ref().is_some_and(|instance| instance.is_alive) {
            actions.push(Action::Die);
        }
    }

    pub(crate) fn act(&mut self, action: &Action, broken: Option<Broken>) {
        match action {
            Action::Own(index) => self.own(*index),
            Action::Begin(index) => self.begin(*index, broken),
            Action::GiveUp(index) => self.give_up(*index, broken),
            Action::Arrive(call) => self.arrive(call, broken),
            Action::Answered(answer) => self.answered(answer, broken),
            Action::Look(index) => self.look(*index, broken),
            Action::Late(index) => self.apply(*index, &Event::Due, LATER_MS, broken),
            Action::Enter(index) => {
                self.wish(*index, &Event::Enter { kind: viv_core::lifecycle::EntryKind::Ensure, by: user() }, broken);
            }
            Action::Stop(index) => self.wish(*index, &Event::Stop { by: user() }, broken),
            Action::Delete(index) => self.wish(*index, &Event::Delete { by: user() }, broken),
            Action::Die => {
                self.deaths -= 1;
                if let Some(instance) = &mut self.instance {
                    instance.is_alive = false;
                }
            }
        }
        if broken.is_none() {
            self.forget_what_cannot_matter();
        }
    }

    /// Fences only grow: a call that is refused now always will be, and who waits for it might as well give up. An answer
    /// that nobody waits for reaches nobody.
    fn forget_what_cannot_matter(&mut self) {
        let (fence, replicas) = (self.fence, &self.replicas);
        self.calls.retain(|call| {
            let refused = fence::admit(fence.as_ref(), call.what.intent(), call.generation, call.token);
            let is_waited_for = replicas[call.from].waits_for == Some(call.operation);
            match refused {
                Ok(()) => true,
                Err(Late::Fenced { .. }) => false,
                // A save of what is not there yet.
                Err(Late::Absent) if fence.is_none_or(|fence| fence.last.is_none()) => true,
                Err(Late::Stale { asked, current }) if asked > current => true,
                Err(Late::Absent | Late::Stale { .. }) => is_waited_for,
            }
        });
        self.answers.retain(|answer| replicas[answer.to].waits_for == Some(answer.operation));
    }

    fn own(&mut self, index: usize) {
        self.epoch += 1;
        self.replicas[index] = Replica { epoch: Some(self.epoch), ..Replica::default() };
        // What is answered to one that was restarted reaches nobody.
        self.answers.retain(|answer| answer.to != index);
    }

    /// Whether a write of this replica is taken; who is refused knows that it owns no more.
    fn may_write(&mut self, index: usize, broken: Option<Broken>) -> bool {
        let Some(epoch) = self.replicas[index].epoch else { return false };
        if epoch == self.epoch {
            return true;
        }
        if broken == Some(Broken::EpochCheck) {
            self.wrongs.insert(Wrong::WrittenByTheLate);
            return true;
        }
        self.replicas[index] = Replica::default();
        false
    }

    fn wish(&mut self, index: usize, event: &Event, broken: Option<Broken>) {
        let before = self.record.clone();
        self.apply(index, event, 0, broken);
        if self.record != before {
            self.wishes -= 1;
            self.was_deleted |= matches!(event, Event::Delete { .. });
        }
    }

    /// One event through the lifecycle, and what comes of it recorded, if it may be.
    fn apply(&mut self, index: usize, event: &Event, now_ms: u64, broken: Option<Broken>) {
        let timings = Timings::default();
        let Stepped::Accepted(accepted) =
            step(self.record(), event, Moment { now_ms, timings: &timings, no_memory: None })
        else {
            return;
        };
        if !self.may_write(index, broken) {
            return;
        }
        let next = Sandbox { version: 1, ..accepted.next };
        self.record = Record::new(if now_ms == 0 { next } else { earlier(&next) });
        if self.record().is_over() {
            self.lease = None;
        }
    }

    /// The token under which a replica acts, as the engine finds it.
    fn token(&mut self, index: usize, broken: Option<Broken>) -> Option<FencingToken> {
        if let Some(token) = self.replicas[index].token {
            return Some(token);
        }
        if !self.may_write(index, broken) {
            return None;
        }
        let epoch = Epoch(self.replicas[index].epoch?);
        let lease = |holder: usize, token| Lease {
            sandbox: self.record.sandbox.id.clone(),
            kind: LeaseKind::Lifecycle,
            holder: holder.to_string(),
            since_ms: 0,
            expires_at_ms: 1,
            token,
        };
        let held = self.lease.as_ref().map(|held| (lease(held.holder, held.token), Epoch(held.epoch)));
        let wanted = lease(index, FencingToken(0));
        let token = match &held {
            Some((held, _)) if broken == Some(Broken::NewToken) => held.token,
            held => match grant(held.as_ref().map(|(held, epoch)| (held, *epoch)), epoch, &wanted).ok()? {
                Grant::Renewed(lease) => lease.token,
                Grant::Anew => FencingToken(self.last_token.0 + 1),
            },
        };
        let is_renewed = self.lease.as_ref().is_some_and(|held| held.holder == index && held.epoch == epoch.0);
        if token <= self.last_token && !is_renewed {
            self.wrongs.insert(Wrong::TokenRepeated);
        }
        self.last_token = self.last_token.max(token);
        self.lease = Some(Held { token, holder: index, epoch: epoch.0 });
        self.replicas[index].token = Some(token);
        Some(token)
    }

    fn begin(&mut self, index: usize, broken: Option<Broken>) {
        let Some((effect, work)) = outstanding(self.record()) else { return };
        let Some(operation) = Operation::of(self.record()) else { return };
        assert!(work.operation.as_str().ends_with(&format!("x{}", operation.0)), "{}", work.operation);
        let (what, generation) = match effect {
            Effect::Create { generation } | Effect::Restore { generation, .. } => (What::Make, generation),
            Effect::Clear { generation } => (What::End, generation),
            Effect::Save { generation, .. } => (What::Save, generation),
            Effect::Probe { generation } => return self.probe(index, generation, operation, broken),
            Effect::Claim { .. }
            | Effect::Serve { .. }
            | Effect::Hook { .. }
            | Effect::Freeze { .. }
            | Effect::Thaw { .. } => {
                unreachable!("it was no spare, has neither services nor hooks, and nobody freezes it")
            }
        };
        let Some(token) = self.token(index, broken) else { return };
        let epoch = self.replicas[index].epoch.expect("it has a token");
        self.replicas[index].waits_for = Some(operation);
        self.calls.insert(Call { from: index, epoch, operation, what, generation, token, arrivals: self.arrivals });
    }

    fn probe(&mut self, index: usize, generation: Generation, operation: Operation, broken: Option<Broken>) {
        match &self.instance {
            Some(instance) if instance.generation == generation && instance.is_alive => {
                let well = Some(Check { finding: Finding::Ok, at_ms: 0, took_ms: 0, message: None });
                let evidence = Evidence { exec: well.clone(), filesystem: well, ..Evidence::default() };
                let event = operation.done(&self.record().id, Outcome::Probed(evidence));
                self.apply(index, &event, 0, broken);
            }
            Some(_) | None => self.look(index, broken),
        }
    }

    fn look(&mut self, index: usize, broken: Option<Broken>) {
        let generation = self.record().generation;
        let seen = match &self.instance {
            Some(instance) if instance.generation != generation => return,
            Some(instance) if instance.is_alive => Seen::Running,
            Some(_) => Seen::Ended(EndCause::OomKilled),
            None => Seen::Absent,
        };
        let observed = Observed { state: format!("{seen:?}"), via: "model".to_owned(), at_ms: 0 };
        self.apply(index, &Event::Seen { generation, seen, observed }, 0, broken);
    }

    fn give_up(&mut self, index: usize, broken: Option<Broken>) {
        let Some(operation) = self.replicas[index].waits_for.take() else { return };
        let is_clearing = matches!(outstanding(self.record()), Some((Effect::Clear { .. }, _)));
        let outcome = if broken == Some(Broken::ObservedAbsence) && is_clearing {
            Outcome::Cleared
        } else {
            Outcome::Failed(Failure { kind: FailureKind::Unknown, what: "no answer".to_owned() })
        };
        let event = operation.done(&self.record().id, outcome);
        self.apply(index, &event, 0, broken);
    }

    fn answered(&mut self, answer: &Answer, broken: Option<Broken>) {
        self.answers.remove(answer);
        if self.replicas[answer.to].waits_for != Some(answer.operation) {
            return;
        }
        self.replicas[answer.to].waits_for = None;
        let failed = |kind| Outcome::Failed(Failure { kind, what: "refused".to_owned() });
        let outcome = match answer.told {
            Told::Made => Outcome::Made { remaining_ms: None },
            Told::Cleared => Outcome::Cleared,
            Told::Saved => Outcome::Saved,
            Told::Refused => failed(FailureKind::Failed),
            Told::Late => failed(FailureKind::Unknown),
        };
        let event = answer.operation.done(&self.record().id, outcome);
        self.apply(answer.to, &event, 0, broken);
    }

    fn arrive(&mut self, call: &Call, broken: Option<Broken>) {
        self.calls.remove(call);
        if call.arrivals > 1 {
            self.calls.insert(Call { arrivals: call.arrivals - 1, ..call.clone() });
        }
        let before = (self.instance.clone(), self.fence);
        let told = self.perform(call, broken);
        if (&self.instance, &self.fence) != (&before.0, &before.1) {
            if call.epoch < self.newest_there {
                self.wrongs.insert(Wrong::ChangedByTheLate);
            }
            self.newest_there = self.newest_there.max(call.epoch);
        }
        if self.replicas[call.from].waits_for == Some(call.operation) {
            self.answers.insert(Answer { to: call.from, operation: call.operation, told });
        }
    }

    fn perform(&mut self, call: &Call, broken: Option<Broken>) -> Told {
        let intent = call.what.intent();
        let mut fence = self.fence;
        if let Some(fence) = &mut fence {
            match broken {
                Some(Broken::TokenCheck) => fence.token = FencingToken(0),
                Some(Broken::Tombstone) if self.instance.is_none() => fence.last = None,
                Some(_) | None => {}
            }
        }
        match fence::admit(fence.as_ref(), intent, call.generation, call.token) {
            Ok(()) => {}
            Err(Late::Fenced { .. }) => {
                return Told::Late;
            }
            Err(Late::Stale { .. } | Late::Absent) => {
                return Told::Refused;
            }
        }
        match (call.what, &mut self.instance) {
            (What::Make, Some(there)) if there.generation == call.generation && there.made_by == call.operation => {
                Told::Made
            }
            (_, Some(there)) if there.generation != call.generation => Told::Refused,
            (What::Make, Some(_)) | (What::Save, None) => Told::Refused,
            (What::Make, None) => {
                self.instance = Some(Instance { generation: call.generation, made_by: call.operation, is_alive: true });
                self.fence = Some(Fence::made(call.generation, call.token));
                Told::Made
            }
            (What::End, _) => {
                self.instance = None;
                self.fence = Some(Fence::buried(self.fence.as_ref(), call.generation, call.token));
                Told::Cleared
            }
            (What::Save, Some(there)) => {
                there.is_alive = false;
                let last = self.fence.and_then(|fence| fence.last);
                self.fence = Some(Fence { token: call.token, last });
                Told::Saved
            }
        }
    }
}

/// The same record with its times counted from nought again: only what is to come counts, and it may come at any time.
fn earlier(sandbox: &Sandbox) -> Sandbox {
    let mut json = serde_json::to_value(sandbox).expect("a record");
    shift(&mut json);
    serde_json::from_value(json).expect("a record")
}

fn shift(json: &mut serde_json::Value) {
    match json {
        serde_json::Value::Number(number) => {
            if let Some(at_ms) = number.as_u64().filter(|&at_ms| at_ms >= LATER_MS) {
                *json = serde_json::json!(at_ms - LATER_MS);
            }
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(shift),
        serde_json::Value::Object(fields) => fields.values_mut().for_each(shift),
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::String(_) => {}
    }
}
