//! Records that were written by an earlier build are read by this one, and are written as they were.
//!
//! When this fails after a change, records in people's databases are the ones that can not be read: add fields with a
//! default, or a migration, before `UPDATE=1`.

use std::collections::BTreeMap;

use viv_core::EndCause;
use viv_core::lifecycle::{
    EntryKind, Event, Failure, FailureKind, Finding, KeepAwake, Outcome, PhaseName, Sandbox, Seen,
};

use crate::setup::{NOW_MS, after, compare, created, done, enter, evidence, hibernated, made, read, ready, seen, stop};

const FILE: &str = "crates/viv-core/tests/lifecycle/records.json";

/// One or more of each phase, with as much in them as there can be.
fn records() -> BTreeMap<String, Sandbox> {
    let mut ready_one = ready(true);
    ready_one.keep_awake.insert("lease".to_owned(), KeepAwake { reason: "thinking".to_owned(), until_ms: NOW_MS + 1 });
    let verifying = after(
        &ready(true),
        &Event::Probed { generation: ready(true).generation, evidence: evidence(Finding::Unhealthy, NOW_MS) },
        NOW_MS,
    );
    let freezing = after(&ready(true), &Event::Idle { freezes: true }, NOW_MS + 900_000);
    let frozen = after(&freezing, &done(&freezing, Outcome::Frozen), NOW_MS + 900_000);
    let saving = after(&ready(true), &stop(), NOW_MS);
    let clearing = after(&saving, &done(&saving, Outcome::Saved), NOW_MS);
    let resuming = after(&hibernated(), &enter(EntryKind::Ensure), NOW_MS);
    let oom = seen(&ready(true), Seen::Ended(EndCause::OomKilled), NOW_MS);
    let lost = after(&ready(true), &oom, NOW_MS);
    let remaking = after(&lost, &enter(EntryKind::Task), NOW_MS);
    let refused = Failure { kind: FailureKind::Refused, what: "no such image".to_owned() };
    let failed = after(&created(false), &done(&created(false), Outcome::Failed(refused)), NOW_MS);
    let cleared = after(&failed, &done(&failed, Outcome::Cleared), NOW_MS);
    let stopping = after(&ready(false), &stop(), NOW_MS);
    let overdue = after(&stopping, &Event::Due, NOW_MS + 30_000);
    let stopped = after(&stopping, &done(&stopping, Outcome::Cleared), NOW_MS);
    let probing = after(&created(true), &done(&created(true), made()), NOW_MS);
    vec![
        ("provisioning", created(false)),
        ("provisioning, the last one first", remaking),
        ("verifying", probing),
        ("verifying after a finding", verifying),
        ("ready", ready_one),
        ("frozen, not yet", freezing),
        ("frozen", frozen),
        ("hibernating", saving),
        ("hibernating, saved", clearing),
        ("hibernated", hibernated()),
        ("resuming", resuming),
        ("lost", lost),
        ("failed", failed),
        ("failed, cleared", cleared),
        ("stopping", stopping),
        ("stopping, overdue", overdue),
        ("stopped", stopped),
    ]
    .into_iter()
    .map(|(what, sandbox)| (what.to_owned(), sandbox))
    .collect()
}

#[test]
fn records_are_written_as_they_were() {
    let text = serde_json::to_string_pretty(&records()).expect("JSON");
    compare(FILE, &(text + "\n"));
}

#[test]
fn records_that_were_written_are_read() {
    let known: BTreeMap<String, Sandbox> = serde_json::from_str(&read(FILE)).expect("they can be read");
    for phase in PhaseName::ALL {
        assert!(known.values().any(|sandbox| sandbox.phase.name() == phase), "none is {phase:?}");
    }
    assert_eq!(known, records());
}
