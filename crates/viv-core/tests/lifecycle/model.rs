//! Random lives: people ask, time passes, and a provider loses, repeats and delays what it was asked and what it
//! answers, while instances die, vanish and freeze. Beside the record runs a model that knows only what people were
//! promised; after every act the two are compared, and in the end the faults stop and everything has to come to rest.

use std::collections::BTreeSet;

use proptest::prelude::*;
use viv_core::lifecycle::{
    Accepted, Denial, Desired, Effect, EntryKind, Event, Evidence, Failure, FailureKind, Finding, Happened, MakeStep,
    Outcome, Phase, PhaseName, Sandbox, Seen, Stepped, Timings, outstanding,
};
use viv_core::{EndCause, Generation, OperationId};

use crate::explore::events;
use crate::laws;
use crate::provider::{Provider, State};
use crate::setup::{
    NOW_MS, created, delete, enter, evidence, incomplete, made_from, reset, rollback, seen, step_at, stop, target, user,
};

/// Something that happens in the world.
#[derive(Debug, Clone)]
enum Act {
    Enter(EntryKind),
    Stop,
    Delete,
    /// It is to go on from a snapshot that is there; what it is may be thrown away.
    Rollback(bool),
    /// It is to begin anew.
    Reset,
    /// Nobody used it for long enough.
    Idle {
        freezes: bool,
    },
    Freeze,
    Thaw,
    Hibernate,
    RetrySave,
    Discard,
    /// What is outstanding is performed, more or less.
    Perform(Fate),
    /// A request that was held up arrives.
    LateRequest(usize),
    /// An answer arrives late, or once more.
    LateAnswer(usize),
    /// What lives ends, or is frozen or thawed, from outside.
    Disturb(State),
    /// There is nothing any more, not even a trace.
    Vanish,
    /// The provider is asked how the current generation is.
    Look,
    /// Something is said about the generation before.
    LookBehind(Seen),
    /// A health check; what it says instead of what is.
    Health(Option<Finding>),
    Pass(u64),
    /// The time comes that the record waits for.
    Due,
    /// Its deadline comes.
    Deadline,
}

/// What becomes of a request and its answer.
#[derive(Debug, Clone)]
enum Fate {
    Answered,
    AnsweredTwice,
    AnswerLate,
    AnswerLost,
    /// Done, and nobody can tell.
    DoneUnknown,
    RequestLate,
    /// Not done at all.
    Fails(FailureKind),
    /// A probe says this instead.
    Says(Finding),
    /// A probe leaves something out.
    InPart(usize),
}

/// What people were promised.
#[derive(Debug, Default)]
struct Promised {
    /// It was deleted, or stopped and not persistent.
    gone: bool,
    /// A user stopped it, at this generation.
    held_at: Option<Generation>,
    /// It is to go back: a later generation than the first begins there, and none later than the second elsewhere.
    back: Option<(Generation, Generation)>,
    /// When bad findings were made since the current verification began.
    findings_ms: BTreeSet<u64>,
    operations: BTreeSet<OperationId>,
}

struct World {
    sandbox: Sandbox,
    now_ms: u64,
    provider: Provider,
    requests: Vec<(OperationId, Effect)>,
    answers: Vec<(OperationId, Outcome)>,
    promised: Promised,
}

impl World {
    fn new(persistent: bool, from_snapshot: bool) -> Self {
        let sandbox = if from_snapshot { made_from(persistent) } else { created(persistent) };
        let first = outstanding(&sandbox).expect("it is to be made").1.operation.clone();
        let promised = Promised { operations: [first].into(), ..Promised::default() };
        let (requests, answers) = (Vec::new(), Vec::new());
        let mut provider = Provider::default();
        provider.snapshots.insert(target());
        Self { sandbox, now_ms: NOW_MS, provider, requests, answers, promised }
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Enter(kind) => self.enter(*kind),
            Act::Stop => {
                self.hear(&stop());
                self.promised.gone |= !self.sandbox.policy.persistent;
                self.promised.held_at = Some(self.sandbox.generation);
            }
            Act::Delete => {
                self.hear(&delete());
                self.promised.gone = true;
            }
            Act::Rollback(discard) => self.go_back(&rollback(*discard)),
            Act::Reset => self.go_back(&reset()),
            Act::Idle { freezes } => {
                self.now_ms = self.now_ms.max(self.sandbox.idle_at_ms(*freezes).unwrap_or(0));
                self.hear(&Event::Idle { freezes: *freezes });
            }
            Act::Freeze => self.ask(&Event::Freeze { by: user() }),
            Act::Thaw => self.ask(&Event::Thaw { by: user() }),
            Act::Hibernate => self.ask(&Event::Hibernate { by: user() }),
            Act::RetrySave => self.ask(&Event::RetrySave { by: user() }),
            Act::Discard => self.ask(&Event::Discard { by: user() }),
            Act::Perform(fate) => self.perform(fate),
            Act::LateRequest(which) => {
                if !self.requests.is_empty() {
                    let (operation, effect) = self.requests.remove(which % self.requests.len());
                    let outcome = self.provider.perform(&effect, self.now_ms);
                    self.answers.push((operation, outcome));
                }
            }
            Act::LateAnswer(which) => {
                if !self.answers.is_empty() {
                    let (operation, outcome) = self.answers[which % self.answers.len()].clone();
                    self.answer(operation, outcome);
                }
            }
            Act::Disturb(to) => self.provider.disturb(to),
            Act::Vanish => self.provider.instances.clear(),
            Act::Look => self.look(),
            Act::LookBehind(sight) => {
                let mut behind = self.sandbox.clone();
                behind.generation.0 -= 1;
                let answer = self.hear(&seen(&behind, sight.clone(), self.now_ms));
                assert!(answer.is_none(), "what was seen of an old generation changed the record");
            }
            Act::Health(says) => self.health(*says),
            Act::Pass(ms) => self.now_ms += ms,
            Act::Due => self.due(),
            Act::Deadline => {
                if let Some(work) = self.sandbox.phase.work() {
                    self.now_ms = self.now_ms.max(work.deadline_at_ms);
                    self.hear(&Event::Due);
                }
            }
        }
        self.went_back();
        self.compare();
    }

    /// A verb that is refused where it makes no sense, and always once it is gone.
    fn ask(&mut self, event: &Event) {
        let answer = step_at(&self.sandbox, event, self.now_ms);
        assert_eq!(answer == Stepped::Denied(Denial::Gone), self.promised.gone, "{event:?} in {:?}", self.sandbox);
        self.hear(event);
    }

    fn enter(&mut self, kind: EntryKind) {
        let answer = step_at(&self.sandbox, &enter(kind), self.now_ms);
        let held = self.promised.held_at.is_some() && !kind.is_explicit();
        let denied = match answer {
            Stepped::Denied(why) => Some(why),
            Stepped::Accepted(_) | Stepped::Ignored(_) => None,
        };
        let expected = if self.promised.gone { Some(Denial::Gone) } else { held.then_some(Denial::Held) };
        assert_eq!(denied, expected, "{kind:?} in {:?}", self.sandbox);
        if denied.is_none() {
            self.promised.held_at = None;
        }
        self.hear(&enter(kind));
    }

    /// Both are entries, and as explicit as an entry can be.
    fn go_back(&mut self, event: &Event) {
        let denied = matches!(step_at(&self.sandbox, event, self.now_ms), Stepped::Denied(Denial::Gone));
        assert_eq!(denied, self.promised.gone, "{event:?} in {:?}", self.sandbox);
        let before = self.sandbox.clone();
        if !denied {
            self.promised.held_at = None;
        }
        self.hear(event);
        if !denied && matches!(event, Event::Rollback { .. }) {
            // What is about to be made from its image is, and goes back then.
            let clearing = matches!(before.phase, Phase::Provisioning { step: MakeStep::Clear, .. });
            let last = if clearing { before.generation.next() } else { before.generation };
            self.promised.back = Some((before.generation, last));
        }
        if !denied && matches!(event, Event::Reset { .. }) {
            self.promised.back = None;
            assert!(self.sandbox.saved.is_none(), "it begins anew: {:?}", self.sandbox);
        }
    }

    /// The one way by which the record changes.
    fn hear(&mut self, event: &Event) -> Option<Happened> {
        let answer = step_at(&self.sandbox, event, self.now_ms);
        laws::check(&self.sandbox, event, self.now_ms, &answer);
        let Stepped::Accepted(accepted) = answer else { return None };
        let Accepted { next, happened } = *accepted;
        self.judge(event, &next, happened);
        let last = self.sandbox.phase.work().map(|work| work.operation.clone());
        if let Some(work) = next.phase.work()
            && Some(&work.operation) != last.as_ref()
        {
            assert!(self.promised.operations.insert(work.operation.clone()), "{work:?} was used before");
        }
        self.sandbox = next;
        Some(happened)
    }

    /// Whether there was ground for a transition, by what really happened.
    fn judge(&mut self, event: &Event, next: &Sandbox, happened: Happened) {
        let Happened::Moved { from, to } = happened else { return };
        match (from, event) {
            (PhaseName::Verifying, Event::Done { outcome: Outcome::Probed(evidence), .. })
                if to == PhaseName::Ready =>
            {
                let at_ms = evidence.at_ms().expect("something was checked");
                assert!(self.provider.well.contains(&(next.generation, at_ms)), "ready, and it never was well");
            }
            (PhaseName::Verifying, Event::Done { outcome: Outcome::Probed(_), .. }) => {
                let made_ms = &self.promised.findings_ms;
                let (first, last) = (made_ms.first().expect("some"), made_ms.last().expect("some"));
                let Timings { findings_min, findings_span_ms, .. } = Timings::default();
                assert!(made_ms.len() >= findings_min as usize && last - first >= findings_span_ms, "{made_ms:?}");
            }
            (PhaseName::Lost, Event::Seen { seen: Seen::Running | Seen::Frozen, .. }) => {
                let kept = next.generation == self.sandbox.generation;
                let to_expected = match self.sandbox.desired {
                    Desired::Running => PhaseName::Verifying,
                    Desired::Hibernated | Desired::Gone => PhaseName::Hibernating,
                };
                assert!(kept && to == to_expected, "what came back is kept: {next:?}");
                if self.sandbox.entry.is_none() && to == PhaseName::Verifying {
                    self.promised.back = None;
                }
            }
            (_, _) => {}
        }
        if to == PhaseName::Verifying {
            self.promised.findings_ms.clear();
        }
        if to == PhaseName::Stopping && !matches!(event, Event::Stop { .. } | Event::Delete { .. }) {
            let expired = matches!(event, Event::Seen { seen: Seen::Ended(EndCause::Expired), .. });
            let idled = matches!(event, Event::Idle { .. });
            assert!((expired || idled) && !next.policy.persistent, "nobody stopped it: {event:?}");
            self.promised.gone = true;
        }
        if let Event::Probed { evidence, .. } = event {
            self.found(&evidence.clone());
        }
    }

    /// Whoever was promised that it goes back finds what he asked for, and nothing else before.
    fn went_back(&mut self) {
        let Some((asked, last)) = self.promised.back else { return };
        let from = match &self.sandbox.phase {
            Phase::Hibernated { snapshot } => Some(snapshot.clone()),
            Phase::Provisioning { .. }
            | Phase::Verifying { .. }
            | Phase::Ready
            | Phase::Frozen { .. }
            | Phase::Hibernating { .. }
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped => match outstanding(&self.sandbox).map(|(effect, _)| effect) {
                Some(Effect::Restore { generation, snapshot, memory: _ }) => {
                    (generation > last || (generation > asked && snapshot == target())).then_some(snapshot)
                }
                Some(Effect::Create { generation }) => {
                    assert!(generation <= last, "it was to go back, and begins anew: {:?}", self.sandbox);
                    None
                }
                Some(
                    Effect::Probe { .. }
                    | Effect::Serve { .. }
                    | Effect::Hook { .. }
                    | Effect::Freeze { .. }
                    | Effect::Claim { .. }
                    | Effect::Thaw { .. }
                    | Effect::Save { .. }
                    | Effect::Clear { .. },
                )
                | None => None,
            },
        };
        let Some(from) = from else { return };
        assert_eq!(from, target(), "it was to go back: {:?}", self.sandbox);
        self.promised.back = None;
    }

    /// Remembers when something bad was really found.
    fn found(&mut self, evidence: &Evidence) {
        if matches!(evidence.finding(), Some(Finding::Unhealthy | Finding::Gone)) {
            self.promised.findings_ms.extend(evidence.at_ms());
        }
    }

    fn answer(&mut self, operation: OperationId, outcome: Outcome) {
        let current = self.sandbox.phase.work().is_some_and(|work| work.operation == operation);
        if let Outcome::Probed(evidence) = &outcome
            && current
        {
            self.found(evidence);
        }
        let heard = self.hear(&Event::Done { operation, outcome });
        assert!(current || heard.is_none(), "the outcome of a stale operation changed the record");
    }

    fn perform(&mut self, fate: &Fate) {
        let Some((effect, work)) = outstanding(&self.sandbox) else { return };
        let operation = work.operation.clone();
        self.now_ms = self.now_ms.max(work.retry_at_ms);
        let failure = |kind| Outcome::Failed(Failure { kind, what: "as it goes".to_owned() });
        let probe = matches!(effect, Effect::Probe { .. });
        let outcome = match fate {
            Fate::RequestLate => return self.requests.push((operation, effect)),
            Fate::Fails(kind) => return self.answer(operation, failure(*kind)),
            Fate::Says(finding) if probe => Outcome::Probed(evidence(*finding, self.now_ms)),
            Fate::InPart(which) if probe => Outcome::Probed(incomplete(self.now_ms)[which % 3].clone()),
            Fate::Answered
            | Fate::AnsweredTwice
            | Fate::AnswerLate
            | Fate::AnswerLost
            | Fate::DoneUnknown
            | Fate::Says(_)
            | Fate::InPart(_) => self.provider.perform(&effect, self.now_ms),
        };
        match fate {
            Fate::AnswerLost => {}
            Fate::AnswerLate => self.answers.push((operation, outcome)),
            Fate::DoneUnknown => self.answer(operation, failure(FailureKind::Unknown)),
            Fate::AnsweredTwice => {
                self.answers.push((operation.clone(), outcome.clone()));
                self.answer(operation.clone(), outcome.clone());
                self.answer(operation, outcome);
            }
            Fate::Answered | Fate::Says(_) | Fate::InPart(_) | Fate::RequestLate | Fate::Fails(_) => {
                self.answer(operation, outcome);
            }
        }
    }

    fn look(&mut self) {
        let sight = self.provider.look(self.sandbox.generation);
        self.hear(&seen(&self.sandbox, sight, self.now_ms));
    }

    fn health(&mut self, says: Option<Finding>) {
        let generation = self.sandbox.generation;
        let found = self.provider.finding(generation, self.now_ms);
        let evidence = evidence(says.unwrap_or(found), self.now_ms);
        self.hear(&Event::Probed { generation, evidence });
    }

    fn due(&mut self) {
        if let Some(due_at_ms) = self.sandbox.due_at_ms() {
            self.now_ms = self.now_ms.max(due_at_ms);
            self.hear(&Event::Due);
        }
    }

    /// The record, the provider and what was promised, side by side.
    fn compare(&self) {
        let Self { sandbox, provider, promised, .. } = self;
        assert!(provider.instances.len() <= 1, "two at once: {provider:?}");
        assert!(provider.instances.keys().all(|made| *made <= sandbox.generation));
        let effect = outstanding(sandbox).map(|(effect, _)| effect);
        if let Some(Effect::Create { generation } | Effect::Restore { generation, .. }) = &effect {
            let before = (1..generation.0).map(Generation);
            assert!(before.clone().all(|old| provider.fenced.contains(&old)), "made before the last one was cleared");
        }
        match &sandbox.phase {
            Phase::Stopped => assert!(provider.instances.is_empty(), "stopped, and it is there: {provider:?}"),
            Phase::Hibernated { snapshot } => {
                assert!(provider.instances.is_empty() && provider.snapshots.contains(snapshot));
            }
            Phase::Provisioning { .. }
            | Phase::Verifying { .. }
            | Phase::Ready
            | Phase::Frozen { .. }
            | Phase::Hibernating { .. }
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopping { .. } => {}
        }
        if promised.gone {
            assert!(matches!(effect, None | Some(Effect::Clear { .. })), "it is to be gone, and there is {effect:?}");
            assert_eq!(sandbox.desired, Desired::Gone);
        }
        if let Some(generation) = promised.held_at {
            assert_eq!(sandbox.generation, generation, "it was stopped, and another one is made");
        }
    }

    /// The faults stop. Whatever was under way arrives, and within bounds everything rests where it was wanted.
    fn settle(&mut self) {
        const ROUNDS_MAX: usize = 300;
        for (operation, effect) in std::mem::take(&mut self.requests) {
            let outcome = self.provider.perform(&effect, self.now_ms);
            self.answer(operation, outcome);
            self.went_back();
            self.compare();
        }
        for _ in 0..ROUNDS_MAX {
            let overdue = self.sandbox.phase.work().is_some_and(|work| work.deadline_at_ms <= self.now_ms);
            if overdue {
                self.hear(&Event::Due);
            }
            if outstanding(&self.sandbox).is_some() {
                self.perform(&Fate::Answered);
                self.look();
            } else if self.sandbox.due_at_ms().is_some() {
                self.due();
            } else {
                let version = self.sandbox.version;
                self.look();
                if self.sandbox.version == version {
                    return self.at_rest();
                }
            }
            self.went_back();
            self.compare();
        }
        panic!("no rest: {:?}, {:?}", self.sandbox, self.provider);
    }

    fn at_rest(&self) {
        let Self { sandbox, provider, .. } = self;
        let here = match (sandbox.desired, sandbox.phase.name()) {
            (Desired::Gone, phase) => phase == PhaseName::Stopped,
            (Desired::Hibernated, PhaseName::Hibernated) => sandbox.entry.is_none(),
            (Desired::Running, PhaseName::Ready) => provider.look(sandbox.generation) == Seen::Running,
            (Desired::Running, PhaseName::Frozen) => provider.look(sandbox.generation) == Seen::Frozen,
            // Nobody waits, and nothing runs that should not.
            (Desired::Running | Desired::Hibernated, PhaseName::Lost | PhaseName::Failed) => {
                sandbox.entry.is_none() && !provider.lives()
            }
            (Desired::Running | Desired::Hibernated, _) => false,
        };
        assert!(here, "{sandbox:?} rests, beside {provider:?}");
        if matches!(sandbox.phase, Phase::Ready | Phase::Frozen { .. }) {
            assert!(self.promised.back.is_none() && sandbox.rollback.is_none(), "it never went back: {sandbox:?}");
        }
    }
}

fn ends() -> impl Strategy<Value = EndCause> {
    prop_oneof![
        Just(EndCause::OomKilled),
        Just(EndCause::DiskFull { what: "all of it".to_owned() }),
        Just(EndCause::MemoryLost { what: "its pages".to_owned() }),
        Just(EndCause::SupervisorLost),
        Just(EndCause::Rebooted),
        Just(EndCause::Exited { code: 1 }),
        Just(EndCause::Expired),
    ]
}

fn kinds() -> impl Strategy<Value = EntryKind> {
    use EntryKind::{Create, Ensure, Gateway, Schedule, Task};
    prop::sample::select(vec![Create, Ensure, Task, Gateway, Schedule])
}

fn findings() -> impl Strategy<Value = Finding> {
    prop::sample::select(vec![Finding::Unhealthy, Finding::Timeout, Finding::Gone])
}

fn fates() -> impl Strategy<Value = Fate> {
    use FailureKind::{Failed, Refused, Unknown};
    prop_oneof![
        8 => Just(Fate::Answered),
        1 => Just(Fate::AnsweredTwice),
        1 => Just(Fate::AnswerLate),
        1 => Just(Fate::AnswerLost),
        1 => Just(Fate::DoneUnknown),
        1 => Just(Fate::RequestLate),
        2 => prop::sample::select(vec![Failed, Refused, Unknown]).prop_map(Fate::Fails),
        3 => findings().prop_map(Fate::Says),
        1 => (0_usize..3).prop_map(Fate::InPart),
    ]
}

fn acts() -> impl Strategy<Value = Act> {
    let disturbed = prop_oneof![
        2 => ends().prop_map(State::Ended),
        1 => Just(State::Frozen),
        1 => Just(State::Running),
    ];
    let behind = prop_oneof![Just(Seen::Running), Just(Seen::Absent), ends().prop_map(Seen::Ended)];
    prop_oneof![
        24 => fates().prop_map(Act::Perform),
        5 => kinds().prop_map(Act::Enter),
        3 => Just(Act::Stop),
        1 => prop::bool::weighted(0.2).prop_map(|delete| if delete { Act::Delete } else { Act::Look }),
        3 => any::<bool>().prop_map(|freezes| Act::Idle { freezes }),
        2 => Just(Act::Freeze),
        2 => Just(Act::Thaw),
        2 => Just(Act::Hibernate),
        1 => Just(Act::RetrySave),
        1 => Just(Act::Discard),
        2 => any::<bool>().prop_map(Act::Rollback),
        1 => Just(Act::Reset),
        2 => any::<usize>().prop_map(Act::LateRequest),
        3 => any::<usize>().prop_map(Act::LateAnswer),
        2 => disturbed.prop_map(Act::Disturb),
        1 => Just(Act::Vanish),
        4 => Just(Act::Look),
        1 => behind.prop_map(Act::LookBehind),
        3 => prop::option::of(findings()).prop_map(Act::Health),
        3 => (0_u64..12_000).prop_map(Act::Pass),
        4 => Just(Act::Due),
        1 => Just(Act::Deadline),
    ]
}

/// `PROPTEST_CASES` makes it more; what it finds belongs into `incidents`, not into a file of seeds.
fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn whatever_happens_what_was_promised_holds(
        persistent in prop::bool::weighted(0.7),
        from_snapshot in prop::bool::weighted(0.2),
        acts in prop::collection::vec(acts(), 1..150),
    ) {
        let mut world = World::new(persistent, from_snapshot);
        for act in &acts {
            world.act(act);
        }
        world.settle();
    }

    /// A clock that jumps, to either end of its range too, breaks no law and no arithmetic.
    #[test]
    fn a_clock_that_jumps_breaks_nothing(
        persistent: bool,
        acts in prop::collection::vec((any::<usize>(), times()), 1..60),
    ) {
        let mut sandbox = created(persistent);
        for (which, now_ms) in acts {
            let events = events(&sandbox, now_ms);
            let (_, event) = &events[which % events.len()];
            let answer = step_at(&sandbox, event, now_ms);
            laws::check(&sandbox, event, now_ms, &answer);
            if let Stepped::Accepted(accepted) = answer {
                sandbox = accepted.next;
            }
        }
    }
}

fn times() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(u64::MAX), (u64::MAX - 1_000_000)..u64::MAX, NOW_MS..NOW_MS + 1_000_000, any::<u64>(),]
}
