//! A few hundred seeds, each a world of its own (P1, P3). More of them: `SEEDS=0..20000 make simulate`.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeSet;

use viv_chaos::{Deed, FAULTS_MIN, INVARIANTS, Plan, StoreKind, Trouble, run, shrink, sweep};

/// How many worlds there are when nothing is said.
const SEEDS: u64 = 300;

/// What worlds have to come to, all together: where they do not any more, something in them is gone unnoticed.
const REACHED: &[&str] = &[
    "a drain is complete",
    "a schedule ran",
    "a task is continued",
    "a task is effectunknown",
    "a task is failed",
    "a task is inactive",
    "a task is lost",
    "a task is stopped",
    "a task is stopped in commit",
    "a task is succeeded",
    "a task is timedout",
    "failed to provisioning (requested)",
    "failed to resuming (requested)",
    "forked with its memory",
    "frozen to hibernating (idle)",
    "frozen to hibernating (memory_short)",
    "frozen to lost (crashed)",
    "frozen to stopping (idle)",
    "frozen to verifying (requested)",
    "hibernated to provisioning (reset)",
    "hibernated to resuming (requested)",
    "hibernated to resuming (rollback)",
    "hibernating to hibernated (saved)",
    "lost to hibernating (user_stop)",
    "lost to provisioning (requested)",
    "lost to resuming (requested)",
    "lost to verifying (reappeared)",
    "provisioning to failed (deadline_passed)",
    "provisioning to lost (absence_unproven)",
    "ready to frozen (idle)",
    "ready to hibernating (expired)",
    "ready to hibernating (rollback)",
    "ready to lost (crashed)",
    "ready to lost (disk_full)",
    "ready to lost (memory_not_restored)",
    "ready to lost (oom_killed)",
    "ready to lost (supervisor_lost)",
    "ready to stopping (expired)",
    "ready to verifying (probe_finding)",
    "refused: damaged snapshot",
    "refused: drain",
    "refused: name",
    "refused: not running",
    "refused: old handle",
    "refused: quota",
    "refused: snapshot in use",
    "refused: verb on another generation",
    "restored with its memory",
    "resuming to failed (create_failed)",
    "resuming to hibernated (user_stop)",
    "sandbox.memory_not_restored",
    "sandbox.memory_not_saved",
    "sandbox.save_failed",
    "verifying to failed (service_failed)",
    "verifying to failed (unresponsive)",
    "verifying to provisioning (probe_failed)",
    "verifying to resuming (probe_failed)",
];

/// How many rules the specification has under each letter.
const RULES: [(char, u32); 9] =
    [('T', 10), ('L', 21), ('X', 6), ('J', 9), ('K', 7), ('O', 9), ('P', 8), ('S', 6), ('G', 4)];

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|number| number.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn p1_what_must_hold_holds_in_every_world() {
    let (first, seeds) = (number("VIV_SIM_FIRST", 0), number("VIV_SIM_SEEDS", SEEDS));
    let workers = std::thread::available_parallelism().map_or(2, usize::from) as u64;
    let found = sweep(first..first + seeds, workers, |violation| println!("{violation}"));
    if let Some(first) = found.violations.first() {
        let (plan, smaller) = shrink(&Plan::mixed(first.seed), first.clone());
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
        let missing: Vec<&&str> = REACHED.iter().filter(|what| !sum.reached.contains_key(**what)).collect();
        assert!(missing.is_empty(), "no world came to {missing:?}");
        for trouble in Trouble::ALL.iter().filter(|trouble| trouble.is_fault()) {
            assert!(sum.troubles.contains_key(trouble), "{trouble:?} never happened");
        }
    }
    let (fewest, seed) = found.fewest.unwrap();
    assert!(fewest >= FAULTS_MIN, "in the world of seed {seed} {fewest} things went wrong");
}

#[test]
fn p1_a_seed_replays_exactly() {
    let (first, seeds) = (number("VIV_SIM_FIRST", 0), number("VIV_SIM_REPLAYS", 12));
    for seed in first..first + seeds {
        // The hash is of the journal and of every call to the provider; the rest of the report is compared too.
        assert_eq!(run(&Plan::of(seed)), run(&Plan::of(seed)), "seed {seed}");
    }
}

#[test]
fn p1_invariants_have_names_and_rules() {
    let names: BTreeSet<&str> = INVARIANTS.iter().map(|invariant| invariant.name).collect();
    assert_eq!(names.len(), INVARIANTS.len(), "each has its own");
    assert!(INVARIANTS.len() >= 30);
    for invariant in INVARIANTS {
        let (letter, number) = invariant.rule.split_at(1);
        let known = RULES.iter().find(|(known, _)| letter.starts_with(*known)).map_or(0, |(_, rules)| *rules);
        let number: u32 = number.parse().unwrap();
        assert!((1..=known).contains(&number), "{} is of {}, which is no rule", invariant.name, invariant.rule);
    }
}

/// The store that ships comes to the same as the one in memory, call by call (P6), and its threads do not keep a world
/// from replaying.
#[test]
fn p1_worlds_over_sqlite_are_the_same() {
    let (first, seeds) = (number("VIV_SIM_FIRST", 0), number("VIV_SIM_SQLITE", 4));
    for seed in first..first + seeds {
        let in_memory = run(&Plan::of(seed));
        let in_file = run(&Plan { store: StoreKind::Sqlite, ..Plan::of(seed) });
        assert_eq!(in_file, in_memory, "seed {seed}");
    }
}
