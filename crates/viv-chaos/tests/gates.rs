//! Each gate, and each pair of gates, bears load: switched off, what it protects is found broken (P2).
#![allow(missing_docs, reason = "tests")]

mod page;
mod place;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use place::{paused, place_with};
use viv_chaos::{IN_WORLDS, INVARIANTS, Plan, TRIALS, Trial, Violation, When, off, run, trial};
use viv_engine::{AlertConfig, AlertState, Engine, Gate, Gates};

/// Worlds in which a violation has to be found.
const SEEDS: u64 = 150;

/// And in which one has to be found for a pair.
const PAIR_SEEDS: u64 = 600;

/// So many worlds are run with every gate on by another test.
const WELL: u64 = 300;

fn looked_at(name: &str) -> Option<When> {
    INVARIANTS.iter().find(|known| known.name == name).map(|known| known.when)
}

fn of(gate: Gate) -> &'static Trial {
    TRIALS.iter().find(|trial| trial.gate == gate).unwrap_or_else(|| panic!("{} has no trial", gate.name()))
}

#[test]
fn p2_with_all_gates_every_scenario_ends_well() {
    let tried: BTreeSet<Gate> = TRIALS.iter().map(|trial| trial.gate).collect();
    assert_eq!(tried, Gate::ALL.into_iter().collect(), "each gate has its own");
    for one in TRIALS {
        assert_eq!(trial(one, Gates::default()), Ok(()), "{}", one.gate.name());
    }
}

#[test]
fn p2_without_its_gate_every_scenario_is_broken() {
    for gate in Gate::ALL {
        assert!(trial(of(gate), off(&[gate])).is_err(), "without {} nothing is broken", gate.name());
    }
}

/// Two that are off do not make up for each other. The table of docs/proof.md says whose scenarios are broken then.
#[test]
fn p2_without_a_pair_of_gates_a_rule_of_one_of_them_is_broken() {
    let head = (1..=Gate::ALL.len()).map(|number| number.to_string()).collect::<Vec<_>>().join(" | ");
    let mut table = format!("| | gate | {head} |\n|---|---|{}\n", "---|".repeat(Gate::ALL.len()));
    let mut pairs = 0;
    for (at, one) in Gate::ALL.into_iter().enumerate() {
        write!(table, "| {} | `{}` |", at + 1, one.name()).unwrap();
        for other in Gate::ALL.into_iter().take(at) {
            pairs += 1;
            let both = [one, other];
            let word = match both.map(|gate| trial(of(gate), off(&both)).is_err()) {
                [true, true] => "both",
                [true, false] => "row",
                [false, true] => "column",
                [false, false] => panic!("without {} and {} nothing is broken", one.name(), other.name()),
            };
            write!(table, " {word} |").unwrap();
        }
        writeln!(table, "{}", " |".repeat(Gate::ALL.len() - at)).unwrap();
    }
    assert_eq!(pairs, 136);
    page::has("pairs", &table);
}

#[test]
fn p2_without_its_gate_a_world_finds_its_rule_broken() {
    let only = std::env::var("VIV_GATE").ok();
    let mut missed = Vec::new();
    // More of them, to find out where to begin when worlds have changed.
    let more = std::env::var("VIV_GATE_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS);
    let asked = |gate: Gate| only.as_ref().is_none_or(|only| gate.name() == only);
    assert!(Gate::ALL.iter().all(|gate| IN_WORLDS.iter().any(|(known, ..)| known == gate)), "each gate is asked for");
    for (gate, first, names) in IN_WORLDS.iter().filter(|(gate, ..)| asked(*gate)) {
        let gates = off(&[*gate]);
        // What breaks on the way is not waited for to the end.
        let rests = names.iter().any(|name| looked_at(name) == Some(When::Rest));
        let seeds = *first..first + more;
        let found =
            seeds.into_iter().find_map(|seed| run(&Plan { rests, gates: gates.clone(), ..Plan::of(seed) }).err());
        let told = found.as_ref().map(ToString::to_string).unwrap_or_default();
        println!("{}: {told}", gate.name());
        // The simulation says that all is well in the first worlds.
        let is_well = |seed| seed < WELL || is_well(seed);
        if found.is_none_or(|found| !names.contains(&found.name) || !is_well(found.seed)) {
            missed.push(format!("without {}: {told}", gate.name()));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// What a world finds broken with these off, if anything.
fn finds(seed: u64, both: [Gate; 2], rests: bool) -> Option<Violation> {
    run(&Plan { rests, gates: off(&both), ..Plan::of(seed) }).err()
}

/// Whether all is well in this world with every gate on.
fn is_well(seed: u64) -> bool {
    static WELL: Mutex<BTreeMap<u64, bool>> = Mutex::new(BTreeMap::new());
    let known = WELL.lock().unwrap().get(&seed).copied();
    known.unwrap_or_else(|| {
        let well = run(&Plan::of(seed)).is_ok();
        WELL.lock().unwrap().insert(seed, well);
        well
    })
}

/// The first world that finds something broken with these off, in which all is well with them.
fn first(both: [Gate; 2], likely: &BTreeMap<Gate, u64>) -> Violation {
    let likely = both.iter().filter_map(|gate| likely.get(gate).copied());
    let mut seeds = likely.chain(0..PAIR_SEEDS);
    let found = seeds.find_map(|seed| finds(seed, both, true).filter(|_| is_well(seed)));
    found.unwrap_or_else(|| panic!("without {} and {} no world finds anything", both[0].name(), both[1].name()))
}

/// The world that the page names for a pair, and what it finds there.
fn told(table: &str, both: [Gate; 2]) -> Result<(u64, &str), String> {
    let begins = format!("| `{}` | `{}` | ", both[0].name(), both[1].name());
    let told = table.lines().find_map(|line| line.strip_prefix(&begins)).ok_or(format!("{begins}is missing"))?;
    let (seed, name) = told.split_once(" | ").ok_or("no seed")?;
    Ok((seed.parse::<u64>().map_err(|error| error.to_string())?, name.trim_matches([' ', '|', '`'])))
}

/// The table of docs/proof.md names a world for each pair, and what it finds. Those worlds are run here, each as far as to
/// what it finds; `UPDATE=1` looks for them.
#[test]
fn p2_without_a_pair_of_gates_a_world_finds_a_rule_broken() {
    let pairs: Vec<[Gate; 2]> = Gate::ALL
        .into_iter()
        .enumerate()
        .flat_map(|(at, one)| Gate::ALL.into_iter().skip(at + 1).map(move |other| [one, other]))
        .collect();
    assert_eq!(pairs.len(), 136);
    let (workers, next) = (2, AtomicUsize::new(0));
    let in_turn = |look: &(dyn Fn([Gate; 2]) -> Result<String, String> + Sync)| -> Vec<String> {
        let done = Mutex::new(BTreeMap::new());
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    while let Some(both) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let came = look(*both).unwrap_or_else(|missed| panic!("{missed}"));
                        done.lock().unwrap().insert(*both, came);
                    }
                });
            }
        });
        done.into_inner().unwrap().into_values().collect()
    };
    let row = |both: [Gate; 2], seed: u64, name: &str| {
        format!("| `{}` | `{}` | {seed} | `{name}` |\n", both[0].name(), both[1].name())
    };
    let head = "| without | and without | seed | found as |\n|---|---|---|---|\n";
    if std::env::var_os("UPDATE").is_some() {
        let likely = || -> BTreeMap<Gate, u64> {
            let first_of = |(gate, first, _): &(Gate, u64, &[&str])| {
                let seeds = *first..first + SEEDS;
                let found = seeds.into_iter().find(|seed| finds(*seed, [*gate, *gate], true).is_some());
                found.map(|seed| (*gate, seed))
            };
            IN_WORLDS.iter().filter_map(first_of).collect()
        };
        let likely = std::sync::LazyLock::new(likely);
        let table = page::read("pairs in worlds");
        let rows = in_turn(&|both| {
            // Where the page says it still is found: the others are looked for.
            let found = told(&table, both).ok().and_then(|(seed, name)| {
                let rests = looked_at(name) == Some(When::Rest);
                finds(seed, both, rests).filter(|found| found.name == name)
            });
            let found = found.unwrap_or_else(|| first(both, &likely));
            Ok(row(both, found.seed, found.name))
        });
        page::has("pairs in worlds", &format!("{head}{}", rows.concat()));
        return;
    }
    let table = page::read("pairs in worlds");
    let rows = in_turn(&|both| {
        let (seed, name) = told(&table, both)?;
        let rests = looked_at(name) == Some(When::Rest);
        let (one, other) = (both[0].name(), both[1].name());
        let missed = || format!("without {one} and {other} nothing is found in the world of seed {seed}");
        let found = finds(seed, both, rests).filter(|_| seed < WELL || is_well(seed)).ok_or_else(missed)?;
        Ok(row(both, found.seed, found.name))
    });
    page::has("pairs in worlds", &format!("{head}{}", rows.concat()));
}

/// It is not forgotten that one is off.
#[test]
fn o9_a_gate_that_is_off_is_an_alert_until_it_is_on() {
    let fires = |engine: &Engine| {
        let all = engine.alerts();
        let alert = all.iter().find(|alert| alert.rule.name == "gate_off").unwrap();
        matches!(alert.state, AlertState::Firing { .. })
    };
    paused(async {
        let gates = off(&[Gate::ProviderTruth]);
        let switches = gates.clone();
        let place = place_with(|config| {
            config.gates = gates;
            config.alerts = Some(AlertConfig::default());
        })
        .await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(fires(&place.engine));
        assert_eq!(switches.replace(BTreeMap::new()), [Gate::ProviderTruth]);
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!fires(&place.engine));
    });
}
