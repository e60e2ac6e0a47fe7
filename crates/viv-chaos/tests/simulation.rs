//! A few hundred seeds, each a world of its own (P1, P3). More of them: `make sim SEEDS=20000`.
#![allow(missing_docs, reason = "tests")]

use viv_chaos::{Plan, Report, Violation, run};
use viv_engine::{Gate, GateSetting, Gates};

/// How many worlds there are when nothing is said.
const SEEDS: u64 = 200;

fn plan(seed: u64) -> Plan {
    // A third of the worlds have no faults but damage and crashes: there the sharp bounds are checked.
    let faults_percent = match seed % 3 {
        0 => 0,
        1 => 6,
        _ => 20,
    };
    Plan { seed, steps: 200, faults_percent, gates: Gates::default() }
}

#[test]
fn p1_what_must_hold_holds_in_every_world() {
    let seeds: u64 = std::env::var("VIV_SIM_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(SEEDS);
    let first: u64 = std::env::var("VIV_SIM_FIRST").ok().and_then(|first| first.parse().ok()).unwrap_or(0);
    let workers = std::thread::available_parallelism().map_or(2, usize::from) as u64;
    let (violations, sum) = std::thread::scope(|scope| {
        let running: Vec<_> = (0..workers)
            .map(|worker| {
                scope.spawn(move || {
                    let mut violations: Vec<Violation> = Vec::new();
                    let mut sum = Report::default();
                    for seed in (first..first + seeds).filter(|seed| seed % workers == worker) {
                        match run(&plan(seed)) {
                            Ok(report) => {
                                sum.created += report.created;
                                sum.ready += report.ready;
                                sum.crashes += report.crashes;
                                sum.damaged += report.damaged;
                                sum.mutations += report.mutations;
                            }
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
            sum.created += part.created;
            sum.ready += part.ready;
            sum.crashes += part.crashes;
            sum.damaged += part.damaged;
            sum.mutations += part.mutations;
        }
        (violations, sum)
    });
    println!("{seeds} worlds: {sum:?}");
    for violation in violations.iter().take(20) {
        println!("{violation}");
    }
    assert!(violations.is_empty(), "{} of {seeds} worlds went wrong; the first: {}", violations.len(), violations[0]);
    // Worlds in which nothing happens show nothing.
    assert!(sum.ready > seeds && sum.crashes > seeds && sum.damaged > seeds, "{sum:?}");
}

#[test]
fn p1_a_seed_replays_exactly() {
    for seed in [1, 2, 3] {
        assert_eq!(run(&plan(seed)), run(&plan(seed)));
    }
}

/// A check that cannot fail shows nothing: with its protection switched off, each of these is found to be broken (P2).
#[test]
fn p2_without_its_gate_a_rule_is_found_broken() {
    let cases = [(Gate::GenerationCheck, "T5"), (Gate::EvidenceAges, "T2")];
    for (gate, rule) in cases {
        let gates = Gates::default();
        gates.replace([(gate, GateSetting { percent: 0, ..GateSetting::default() })].into());
        let found = (0..100).find_map(|seed| run(&Plan { gates: gates.clone(), ..plan(seed) }).err());
        let found = found.unwrap_or_else(|| panic!("without {} nothing is found", gate.name()));
        assert_eq!(found.rule, rule, "{found}");
    }
}
