//! The edges of the design's table: each is there, and no other.

use std::collections::{BTreeMap, BTreeSet};

use viv_core::lifecycle::PhaseName::{self, *};
use viv_core::lifecycle::{Event, Happened, Outcome, Stepped};

use crate::explore::explored;
use crate::laws::is_settled;
use crate::setup::{NOW_MS, after, delete, done, step_at};

/// The table, as the design has it. A phase that is its own target is entered again.
const DESIGN: [(PhaseName, &[PhaseName]); 11] = [
    (Provisioning, &[Verifying, Failed, Lost, Stopping]),
    (Verifying, &[Ready, Provisioning, Resuming, Failed, Lost, Stopping]),
    (Ready, &[Verifying, Frozen, Hibernating, Stopping, Lost]),
    (Frozen, &[Verifying, Hibernating, Stopping, Lost]),
    (Hibernating, &[Hibernated, Hibernating, Stopping, Lost]),
    (Hibernated, &[Resuming, Stopping]),
    (Resuming, &[Verifying, Hibernated, Failed, Lost, Stopping]),
    (Lost, &[Verifying, Resuming, Provisioning, Stopping]),
    (Failed, &[Resuming, Provisioning, Stopping]),
    (Stopping, &[Stopped]),
    (Stopped, &[]),
];

/// What is more than the design's; `docs/lifecycle.md` says why.
pub(crate) const MORE: [(PhaseName, PhaseName); 11] = [
    (Verifying, Hibernating),
    (Lost, Hibernating),
    (Hibernating, Failed),
    // What is saved only for the room that it takes, and cannot be with its memory, stays what it was.
    (Hibernating, Frozen),
    (Hibernating, Verifying),
    // A reset begins anew from everywhere.
    (Ready, Provisioning),
    (Frozen, Provisioning),
    (Hibernating, Provisioning),
    (Hibernated, Provisioning),
    (Resuming, Provisioning),
    // What is to go back and did not come up begins there.
    (Provisioning, Resuming),
];

pub(crate) fn the_edges_are_those_of_the_design() {
    let mut table: BTreeSet<(PhaseName, PhaseName)> = MORE.into();
    table.extend(DESIGN.into_iter().flat_map(|(from, to)| to.iter().map(move |&to| (from, to))));
    let mut seen: BTreeSet<(PhaseName, PhaseName)> = explored().edges.keys().copied().collect();
    if !explored().saved_again.is_empty() {
        seen.insert((Hibernating, Hibernating));
    }
    let missing: Vec<_> = table.difference(&seen).collect();
    let unknown: Vec<_> = seen.difference(&table).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "not reached: {missing:?}, not in the table: {unknown:?}");
}

pub(crate) fn every_phase_is_reached_and_every_event_has_an_answer_in_it() {
    let words: BTreeSet<&str> = explored().answers.keys().map(|(_, word)| *word).collect();
    for phase in PhaseName::ALL {
        assert!(explored().answers.contains_key(&(phase, "due")), "{phase:?} is not reached");
        for word in &words {
            // Outcomes are had only where there is work.
            let answered = explored().answers.contains_key(&(phase, *word));
            assert!(answered || matches!(phase, Ready | Hibernated | Lost | Stopped), "{phase:?}, {word}");
        }
    }
}

pub(crate) fn l20_delete_ends_every_record_that_can_be_reached() {
    for sandbox in &explored().records {
        if sandbox.is_over() {
            continue;
        }
        let going = sandbox.phase.name() == Stopping;
        let over = if going { sandbox.clone() } else { after(sandbox, &delete(), NOW_MS) };
        let over = after(&over, &done(&over, Outcome::Cleared), NOW_MS);
        assert!(over.is_over() && over.due_at_ms().is_none(), "{sandbox:?}");
    }
}

/// Nobody answers anything any more, and only time passes: where it ends it either rests or says that it is overdue,
/// and goes on trying.
pub(crate) fn transient_phases_are_left_by_time_alone() {
    // Saved → resuming → failed, and from there overdue: no way is longer.
    const STEPS_MAX: usize = 6;
    for first in &explored().records {
        let (mut sandbox, mut steps) = (first.clone(), 0);
        while let Some(due_at_ms) = sandbox.due_at_ms() {
            let deadline_at_ms = sandbox.phase.work().map_or(due_at_ms, |work| work.deadline_at_ms.max(due_at_ms));
            let Stepped::Accepted(accepted) = step_at(&sandbox, &Event::Due, deadline_at_ms) else {
                panic!("nothing came of a deadline: {sandbox:?}")
            };
            sandbox = accepted.next;
            if accepted.happened == Happened::Overdue {
                assert!(sandbox.due_at_ms().is_some_and(|at_ms| at_ms > deadline_at_ms), "it is tried on");
                break;
            }
            steps += 1;
            assert!(steps <= STEPS_MAX, "{first:?} does not come to rest, now {sandbox:?}");
        }
        let overdue = sandbox.phase.work().is_some_and(|work| work.overdue);
        assert!(is_settled(&sandbox.phase) || overdue, "{first:?} ends as {sandbox:?}");
    }
}

pub(crate) fn records_of_every_kind_survive_json() {
    let mut kinds = BTreeMap::new();
    for sandbox in &explored().records {
        let text = serde_json::to_string(sandbox).expect("JSON");
        assert_eq!(&serde_json::from_str::<viv_core::lifecycle::Sandbox>(&text).expect("read again"), sandbox);
        *kinds.entry(sandbox.phase.name()).or_insert(0) += 1;
    }
    assert_eq!(kinds.len(), PhaseName::ALL.len(), "{kinds:?}");
}
