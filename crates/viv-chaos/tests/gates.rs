//! Each gate, and each pair of gates, bears load: switched off, what it protects is found broken (P2).
#![allow(missing_docs, reason = "tests")]

mod page;
mod place;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use place::{paused, place_with};
use viv_chaos::{IN_WORLDS, INVARIANTS, Plan, TRIALS, Trial, When, off, run, trial};
use viv_engine::{AlertConfig, AlertState, Engine, Gate, Gates};

/// Worlds in which a violation has to be found.
const SEEDS: u64 = 150;

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
    let looked_at = |name: &str| INVARIANTS.iter().find(|known| known.name == name).map(|known| known.when);
    let only = std::env::var("VIV_GATE").ok();
    let mut missed = Vec::new();
    let asked = |gate: Gate| only.as_ref().is_none_or(|only| gate.name() == only);
    for (gate, first, names) in IN_WORLDS.iter().filter(|(gate, ..)| asked(*gate)) {
        let gates = off(&[*gate]);
        // What breaks on the way is not waited for to the end.
        let rests = names.iter().any(|name| looked_at(name) == Some(When::Rest));
        let seeds = *first..first + SEEDS;
        let found =
            seeds.into_iter().find_map(|seed| run(&Plan { rests, gates: gates.clone(), ..Plan::of(seed) }).err());
        let told = found.as_ref().map(ToString::to_string).unwrap_or_default();
        println!("{}: {told}", gate.name());
        if found.is_none_or(|found| !names.contains(&found.name)) {
            missed.push(format!("without {}: {told}", gate.name()));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
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
