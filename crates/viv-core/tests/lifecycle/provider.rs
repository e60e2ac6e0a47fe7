//! A provider in a few lines: it does what it is told, remembers what was fenced, and can be made to misbehave.

use std::collections::{BTreeMap, BTreeSet};

use viv_core::lifecycle::{Effect, Failure, FailureKind, Finding, Outcome, Seen};
use viv_core::{EndCause, Generation, SnapshotId};

use crate::setup::{evidence, made};

/// How an instance is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    Frozen,
    Ended(EndCause),
}

#[derive(Debug, Default)]
pub(crate) struct Provider {
    /// What there is: of one generation at most, if the record is right.
    pub(crate) instances: BTreeMap<Generation, State>,
    /// What was cleared, and is refused for ever.
    pub(crate) fenced: BTreeSet<Generation>,
    pub(crate) snapshots: BTreeSet<SnapshotId>,
    made: BTreeSet<Generation>,
    /// Every time that everything was really well, for which generation.
    pub(crate) well: BTreeSet<(Generation, u64)>,
}

fn failed(kind: FailureKind, what: &str) -> Outcome {
    Outcome::Failed(Failure { kind, what: what.to_owned() })
}

impl Provider {
    /// Does it, and says what came of it.
    pub(crate) fn perform(&mut self, effect: &Effect, now_ms: u64) -> Outcome {
        match effect {
            Effect::Create { generation } => self.make(*generation),
            Effect::Restore { generation, snapshot, .. } => {
                assert!(self.snapshots.contains(snapshot), "resumed from what was never saved");
                self.make(*generation)
            }
            Effect::Probe { generation } => Outcome::Probed(evidence(self.finding(*generation, now_ms), now_ms)),
            // The sandboxes of the model have neither.
            Effect::Serve { .. } => Outcome::Served(Vec::new()),
            Effect::Hook { .. } => failed(FailureKind::Refused, "there is none"),
            Effect::Freeze { generation } => self.turn(*generation, State::Frozen, Outcome::Frozen),
            Effect::Claim { .. } => Outcome::Claimed { remaining_ms: None },
            Effect::Thaw { generation } => self.turn(*generation, State::Running, Outcome::Thawed),
            Effect::Save { generation, snapshot, .. } => {
                if self.snapshots.contains(snapshot) {
                    return Outcome::Saved;
                }
                let Some(state) = self.instances.get_mut(generation) else {
                    return failed(FailureKind::Failed, "there is none");
                };
                *state = State::Ended(EndCause::Saved);
                self.snapshots.insert(snapshot.clone());
                Outcome::Saved
            }
            Effect::Clear { generation } => {
                self.instances.remove(generation);
                self.fenced.insert(*generation);
                Outcome::Cleared
            }
        }
    }

    fn make(&mut self, generation: Generation) -> Outcome {
        if self.fenced.contains(&generation) {
            return failed(FailureKind::Refused, "fenced");
        }
        match self.instances.get(&generation) {
            Some(State::Running | State::Frozen) => made(),
            Some(State::Ended(_)) => failed(FailureKind::Failed, "it ended"),
            // Repeated, it does its work once.
            None if self.made.contains(&generation) => failed(FailureKind::Failed, "it is gone"),
            None => {
                self.made.insert(generation);
                self.instances.insert(generation, State::Running);
                made()
            }
        }
    }

    fn turn(&mut self, generation: Generation, to: State, outcome: Outcome) -> Outcome {
        match self.instances.get_mut(&generation) {
            Some(state @ (State::Running | State::Frozen)) => {
                *state = to;
                outcome
            }
            Some(State::Ended(_)) | None => failed(FailureKind::Failed, "there is nothing that lives"),
        }
    }

    /// What a probe finds.
    pub(crate) fn finding(&mut self, generation: Generation, now_ms: u64) -> Finding {
        match self.instances.get(&generation) {
            Some(State::Running) => {
                self.well.insert((generation, now_ms));
                Finding::Ok
            }
            Some(State::Frozen) => Finding::Timeout,
            Some(State::Ended(_)) | None => Finding::Gone,
        }
    }

    /// What a look shows.
    pub(crate) fn look(&self, generation: Generation) -> Seen {
        match self.instances.get(&generation) {
            Some(State::Running) => Seen::Running,
            Some(State::Frozen) => Seen::Frozen,
            Some(State::Ended(end)) => Seen::Ended(end.clone()),
            None => Seen::Absent,
        }
    }

    /// What lives is made so, from outside.
    pub(crate) fn disturb(&mut self, to: &State) {
        for state in self.instances.values_mut() {
            if matches!(state, State::Running | State::Frozen) {
                *state = to.clone();
            }
        }
    }

    pub(crate) fn lives(&self) -> bool {
        self.instances.values().any(|state| matches!(state, State::Running | State::Frozen))
    }
}
