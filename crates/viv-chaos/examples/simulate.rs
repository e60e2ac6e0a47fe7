//! Runs the worlds of some seeds, and tells what was found: `make simulate SEEDS=0..5000`, or `SEEDS=14` for one.
//!
//! `STORE=sqlite` has them record in the store that ships, in a file in memory. `OFF=durable_stop,quota` has them run
//! without these gates, and should find what they protect broken.
//!
//! `STEPS=40 FAULTS=0 WITHOUT='drain;task'` has them end sooner, with so many calls in a hundred going wrong, and without
//! what is named: a world that was made smaller is told as such a command, and run again by it.
//!
//! Ends with one line: worlds, steps, faults by kind, checks, violations. Fails when there were any. Of one world the hash
//! is told too, of all that was recorded and asked of the provider: the same seed and build have the same. `REACHED=1` tells
//! what worlds came to, and how often.

use std::process::ExitCode;

use viv_chaos::{Deed, Plan, StoreKind, Trouble, Without, off, run, shrink, sweep_of};
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
        Ok("sqlite") => Some(StoreKind::Sqlite),
        Ok("memory") => Some(StoreKind::Memory),
        Ok("" | "mixed") | Err(_) => None,
        Ok(other) => {
            eprintln!("there is no store {other}: memory, sqlite, or mixed");
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
    let told = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    let left_out = match without_these(&told("VIV_SIM_WITHOUT").unwrap_or_default()) {
        Ok(left_out) => left_out,
        Err(unknown) => {
            eprintln!(
                "nothing is called {unknown}: the words are those of docs/proof.md, with a semicolon between two"
            );
            return ExitCode::from(2);
        }
    };
    let (steps, percent) = (told("VIV_SIM_STEPS"), told("VIV_SIM_FAULTS"));
    let given = |text: &Option<String>, otherwise| text.as_deref().and_then(number).unwrap_or(otherwise);
    let plan = |seed| {
        let plan = Plan::mixed(seed);
        let store = store.unwrap_or(plan.store);
        let (steps, faults_percent) = (given(&steps, plan.steps), given(&percent, plan.faults_percent));
        Plan { store, gates: gates.clone(), steps, faults_percent, without: left_out.clone(), ..plan }
    };
    let one = (seeds.end == seeds.start + 1).then_some(seeds.start);
    let found = sweep_of(seeds, workers, plan, |violation| println!("{violation}"));
    if let Some(first) = found.violations.first() {
        let (plan, smaller) = shrink(&plan(first.seed), first.clone());
        println!("\n{smaller}");
        let (deeds, troubles) = (&plan.without.deeds, &plan.without.troubles);
        println!("also without {deeds:?} and {troubles:?}, {} % of calls going wrong:", plan.faults_percent);
        for line in &smaller.timeline {
            println!("{line}");
        }
        println!("again: {}", command(&plan, &named));
    }
    if told("VIV_SIM_REACHED").is_some() {
        for (what, count) in &found.sum.reached {
            println!("{count:>8} {what}");
        }
    }
    if let Some(seed) = one.filter(|_| found.violations.is_empty())
        && let Ok(report) = run(&plan(seed))
    {
        println!("seed {seed}: {:016x}", report.trace);
    }
    println!("{found}");
    if found.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What is left out, by its words.
fn without_these(words: &str) -> Result<Without, String> {
    let mut without = Without::default();
    for word in words.split(';').map(str::trim).filter(|word| !word.is_empty()) {
        let deed = Deed::ALL.iter().find(|deed| deed.word() == word);
        let trouble = Trouble::ALL.iter().find(|trouble| trouble.word() == word);
        without.deeds.extend(deed);
        without.troubles.extend(trouble);
        if deed.is_none() && trouble.is_none() {
            return Err(word.to_owned());
        }
    }
    Ok(without)
}

/// By which this world is run again.
fn command(plan: &Plan, off: &str) -> String {
    let deeds = plan.without.deeds.iter().map(|deed| deed.word());
    let words: Vec<&str> = deeds.chain(plan.without.troubles.iter().map(|trouble| trouble.word())).collect();
    let store = match plan.store {
        StoreKind::Memory => "memory",
        StoreKind::Sqlite => "sqlite",
    };
    // A quote in a word would end the shell's.
    let words = words.join(";").replace('\'', r"'\''");
    let (seed, steps, faults) = (plan.seed, plan.steps, plan.faults_percent);
    format!("SEEDS={seed} STEPS={steps} FAULTS={faults} STORE={store} OFF={off} WITHOUT='{words}' make simulate")
}
