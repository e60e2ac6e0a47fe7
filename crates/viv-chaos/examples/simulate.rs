//! Runs the worlds of some seeds, and tells what was found: `make simulate SEEDS=0..5000`, or `SEEDS=14` for one.
//!
//! `STORE=sqlite` has them record in the store that ships, in a file in memory. `OFF=durable_stop,quota` has them run
//! without these gates, and should find what they protect broken.
//!
//! Ends with one line: worlds, steps, faults by kind, checks, violations. Fails when there were any.

use std::process::ExitCode;

use viv_chaos::{Plan, StoreKind, off, shrink, sweep_of};
use viv_engine::Gate;

/// How many worlds there are when nothing is said.
const SEEDS: u64 = 5_000;

fn main() -> ExitCode {
    let asked = std::env::args().nth(1).unwrap_or_else(|| format!("0..{SEEDS}"));
    let number = |text: &str| text.parse::<u64>().ok();
    let seeds = match asked.split_once("..") {
        Some((first, end)) => number(first).zip(number(end)).map(|(first, end)| first..end),
        None => number(&asked).map(|seed| seed..seed + 1),
    };
    let Some(seeds) = seeds else {
        eprintln!("{asked} are no seeds: 0..5000, or one of them");
        return ExitCode::from(2);
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = std::env::var("VIV_SIM_WORKERS").ok().and_then(|text| number(&text)).unwrap_or(processors as u64);
    let store = match std::env::var("VIV_SIM_STORE").as_deref() {
        Ok("sqlite") => StoreKind::Sqlite,
        Ok("" | "memory") | Err(_) => StoreKind::Memory,
        Ok(other) => {
            eprintln!("there is no store {other}: memory, or sqlite");
            return ExitCode::from(2);
        }
    };
    let named = std::env::var("VIV_SIM_OFF").unwrap_or_default();
    let mut without = Vec::new();
    for name in named.split(',').filter(|name| !name.is_empty()) {
        let Some(gate) = Gate::named(name) else {
            let known = Gate::ALL.map(Gate::name).join(", ");
            eprintln!("there is no gate {name}: {known}");
            return ExitCode::from(2);
        };
        without.push(gate);
    }
    let gates = off(&without);
    let plan = |seed| Plan { store, gates: gates.clone(), ..Plan::of(seed) };
    let found = sweep_of(seeds, workers, plan, |violation| println!("{violation}"));
    if let Some(first) = found.violations.first() {
        let (plan, smaller) = shrink(&plan(first.seed), first.clone());
        println!("\n{smaller}");
        let (deeds, troubles) = (&plan.without.deeds, &plan.without.troubles);
        println!("also without {deeds:?} and {troubles:?}, {} % of calls going wrong:", plan.faults_percent);
        for line in &smaller.timeline {
            println!("{line}");
        }
    }
    println!("{found}");
    if found.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
