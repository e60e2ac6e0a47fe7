//! A few hundred seeds, each a world of its own (P1, P3). More of them: `make sim SEEDS=20000`.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeSet;

use viv_chaos::{Deed, INVARIANTS, Plan, Report, Trouble, Violation, run, shrink};
use viv_engine::{Gate, GateSetting, Gates};

/// How many worlds there are when nothing is said.
const SEEDS: u64 = 150;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|number| number.parse().ok()).unwrap_or(otherwise)
}

/// Runs these worlds, on all processors.
fn worlds(first: u64, seeds: u64) -> (Vec<Violation>, Report) {
    let workers = std::thread::available_parallelism().map_or(2, usize::from) as u64;
    let workers = number("VIV_SIM_WORKERS", workers);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..workers)
            .map(|worker| {
                scope.spawn(move || {
                    let mut violations: Vec<Violation> = Vec::new();
                    let mut sum = Report::default();
                    for seed in (first..first + seeds).filter(|seed| seed % workers == worker) {
                        match run(&Plan::of(seed)) {
                            Ok(report) => sum = sum.and(&report),
                            Err(violation) => violations.push(violation),
                        }
                    }
                    (violations, sum)
                })
            })
            .collect();
        let mut violations = Vec::new();
        let mut sum = Report::default();
        for worker in running {
            let (more, part) = worker.join().expect("a world that panics is a bug");
            violations.extend(more);
            sum = sum.and(&part);
        }
        violations.sort_by_key(|violation| violation.seed);
        (violations, sum)
    })
}

#[test]
fn p1_what_must_hold_holds_in_every_world() {
    let (first, seeds) = (number("VIV_SIM_FIRST", 0), number("VIV_SIM_SEEDS", SEEDS));
    let (violations, sum) = worlds(first, seeds);
    for violation in violations.iter().take(30) {
        println!("{violation}");
    }
    if let Some(first) = violations.first() {
        let (plan, smaller) = shrink(&Plan::of(first.seed), first.clone());
        println!("\nmade smaller, without {:?}: {smaller}", plan.without);
        for line in &smaller.timeline {
            println!("{line}");
        }
    }
    let Report { steps, changes, .. } = sum;
    let troubles: Vec<String> = sum.troubles.iter().map(|(kind, count)| format!("{} {count}", kind.word())).collect();
    let found = violations.len();
    println!("{seeds} worlds, {steps} steps, {changes} changes, {found} violations; {}", troubles.join(", "));
    assert!(violations.is_empty(), "{found} of {seeds} worlds went wrong; the first: {}", violations[0]);
    // Worlds in which nothing happens show nothing.
    assert!(sum.ready > seeds, "{sum:?}");
    if seeds >= SEEDS {
        let missing: Vec<&Deed> = Deed::ALL.iter().filter(|deed| !sum.deeds.contains_key(deed)).collect();
        assert!(missing.is_empty(), "{missing:?} never happened");
        for trouble in [Trouble::Lost, Trouble::Late, Trouble::StaleListing, Trouble::StoreAfter, Trouble::UnheardEnd] {
            assert!(sum.troubles.contains_key(&trouble), "{trouble:?} never happened");
        }
    }
}

#[test]
fn p1_a_seed_replays_exactly() {
    for seed in [1, 2, 3, 4] {
        assert_eq!(run(&Plan::of(seed)), run(&Plan::of(seed)));
    }
}

#[test]
fn p1_invariants_have_names_and_rules() {
    let names: BTreeSet<&str> = INVARIANTS.iter().map(|invariant| invariant.name).collect();
    assert_eq!(names.len(), INVARIANTS.len(), "each has its own");
    assert!(INVARIANTS.len() >= 30);
}

/// A check that cannot fail shows nothing: with its protection switched off, each of these is found to be broken (P2).
#[test]
fn p2_without_its_gate_a_rule_is_found_broken() {
    let cases =
        [(Gate::GenerationCheck, "old-handles-are-refused"), (Gate::EvidenceAges, "ready-is-shown-on-evidence")];
    for (gate, name) in cases {
        let gates = Gates::default();
        gates.replace([(gate, GateSetting { percent: 0, ..GateSetting::default() })].into());
        let found = (0..100).find_map(|seed| run(&Plan { gates: gates.clone(), ..Plan::of(seed) }).err());
        let found = found.unwrap_or_else(|| panic!("without {} nothing is found", gate.name()));
        assert_eq!(found.name, name, "{found}");
    }
}
