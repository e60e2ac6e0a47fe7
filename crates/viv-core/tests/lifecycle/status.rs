//! The one word that people read (T3).

use viv_core::lifecycle::{EVIDENCE_MS_MAX, Evidence, Finding, Phase, Sandbox, Status, status};

use crate::explore::explored;
use crate::setup::{NOW_MS, evidence, incomplete, of_service, ready};

fn of(latest: &Evidence, now_ms: u64) -> Status {
    status(&ready(false), latest, now_ms)
}

#[test]
fn t3_ready_needs_fresh_evidence() {
    let well = evidence(Finding::Ok, NOW_MS);
    assert_eq!(of(&well, NOW_MS), Status::Ready);
    assert_eq!(of(&well, NOW_MS + EVIDENCE_MS_MAX), Status::Ready);
    assert_eq!(of(&well, NOW_MS + EVIDENCE_MS_MAX + 1), Status::Unverified);
    assert_eq!(of(&Evidence::default(), NOW_MS), Status::Unverified);
}

#[test]
fn t3_evidence_is_as_old_as_its_oldest_check() {
    let mut mixed = evidence(Finding::Ok, NOW_MS);
    mixed.ports[0].check.at_ms = NOW_MS - EVIDENCE_MS_MAX - 1;
    assert_eq!(mixed.at_ms(), Some(NOW_MS - EVIDENCE_MS_MAX - 1));
    assert_eq!(of(&mixed, NOW_MS), Status::Unverified);
}

#[test]
fn t3_bad_evidence_is_not_ready_however_fresh() {
    for finding in [Finding::Unhealthy, Finding::Timeout, Finding::Gone] {
        let mut other = evidence(Finding::Ok, NOW_MS);
        other.ports[0].check.finding = finding;
        assert_eq!(of(&evidence(finding, NOW_MS), NOW_MS), Status::Unverified, "{finding:?}");
        assert_eq!(of(&other, NOW_MS), Status::Unverified, "{finding:?} of a port");
    }
}

#[test]
fn t2_what_was_not_looked_at_is_not_ready() {
    for part in incomplete(NOW_MS) {
        assert_eq!(of(&part, NOW_MS), Status::Unverified, "{part:?}");
    }
}

/// A clock that was set back does not make evidence young: how old it is cannot be told.
#[test]
fn t3_evidence_from_the_future_proves_nothing() {
    for ahead_ms in [1, 5, 3_600_000] {
        let ahead = evidence(Finding::Ok, NOW_MS + ahead_ms);
        assert_eq!((ahead.age_ms(NOW_MS), of(&ahead, NOW_MS)), (None, Status::Unverified));
    }
    let mut mixed = evidence(Finding::Ok, NOW_MS);
    mixed.ports[0].check.at_ms = NOW_MS + 1;
    assert_eq!(of(&mixed, NOW_MS), Status::Unverified, "one check of it is enough");
}

/// Good evidence makes nothing ready that is not: it may be from before.
pub(crate) fn t1_no_evidence_makes_another_phase_ready() {
    for sandbox in &explored().records {
        let Sandbox { phase, spec, .. } = sandbox;
        let services = spec.services.iter().map(|_| of_service(Finding::Ok, NOW_MS)).collect();
        let well = Evidence { services, ..evidence(Finding::Ok, NOW_MS) };
        let word = status(sandbox, &well, NOW_MS);
        assert_eq!(word == Status::Ready, *phase == Phase::Ready);
        let save_failed = matches!(phase, Phase::Hibernating { save_failed: true, .. });
        assert_eq!(word == Status::SaveFailed, save_failed);
        if *phase != Phase::Ready && !save_failed {
            assert_eq!(word.as_str(), phase.name().as_str());
        }
    }
}

#[test]
fn t7_the_worst_finding_counts() {
    let mut mixed = evidence(Finding::Timeout, NOW_MS);
    assert_eq!(mixed.finding(), Some(Finding::Timeout));
    mixed.ports[0].check.finding = Finding::Unhealthy;
    assert_eq!(mixed.finding(), Some(Finding::Unhealthy));
    mixed.filesystem.as_mut().expect("checked").finding = Finding::Gone;
    assert_eq!(mixed.finding(), Some(Finding::Gone));
}
