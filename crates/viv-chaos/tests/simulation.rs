//! A few hundred seeds, each a world of its own (P1, P3). More of them: `make sim SEEDS=20000`.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeSet;

use viv_chaos::{Deed, INVARIANTS, Plan, Trouble, run, shrink, sweep};
use viv_engine::{Gate, GateSetting, Gates};

/// How many worlds there are when nothing is said.
const SEEDS: u64 = 150;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|number| number.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn p1_what_must_hold_holds_in_every_world() {
    let (first, seeds) = (number("VIV_SIM_FIRST", 0), number("VIV_SIM_SEEDS", SEEDS));
    let workers = std::thread::available_parallelism().map_or(2, usize::from) as u64;
    let found = sweep(first..first + seeds, workers, |violation| println!("{violation}"));
    if let Some(first) = found.violations.first() {
        let (plan, smaller) = shrink(&Plan::of(first.seed), first.clone());
        println!("{smaller}\nalso without {:?}:\n{}", plan.without, smaller.timeline.join("\n"));
    }
    println!("{found}");
    assert!(found.violations.is_empty(), "the first: {}", found.violations[0]);
    // Worlds in which nothing happens show nothing.
    let sum = &found.sum;
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
    let (first, seeds) = (number("VIV_SIM_FIRST", 0), number("VIV_SIM_REPLAYS", 3));
    for seed in first..first + seeds {
        assert_eq!(run(&Plan::of(seed)), run(&Plan::of(seed)), "seed {seed}");
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
    let cases = [
        (Gate::GenerationCheck, "old-handles-are-refused"),
        (Gate::EvidenceAges, "ready-is-shown-on-evidence"),
        (Gate::Quota, "quota-holds"),
    ];
    for (gate, name) in cases {
        let gates = Gates::default();
        gates.replace([(gate, GateSetting { percent: 0, ..GateSetting::default() })].into());
        let found = (0..100).find_map(|seed| run(&Plan { gates: gates.clone(), ..Plan::of(seed) }).err());
        let found = found.unwrap_or_else(|| panic!("without {} nothing is found", gate.name()));
        assert_eq!(found.name, name, "{found}");
    }
}
