//! The tables of docs/proof.md are those of the code. `UPDATE=1` writes them.
#![allow(missing_docs, reason = "tests")]

mod page;

use std::fmt::Write as _;

use viv_chaos::{BUGS, Deed, IN_WORLDS, INVARIANTS, TRIALS, Trouble};

fn invariants() -> String {
    let mut table = "| invariant | rule | looked at | what it says |\n|---|---|---|---|\n".to_owned();
    for invariant in INVARIANTS {
        let (name, rule, when) = (invariant.name, invariant.rule, invariant.when.word());
        writeln!(table, "| `{name}` | {rule} | {when} | {} |", invariant.says).unwrap();
    }
    table
}

fn happenings() -> String {
    let words = |deeds: Vec<&'static str>| deeds.join(", ");
    let clients = Deed::ALL.iter().filter(|deed| !deed.is_fault()).map(|deed| deed.word()).collect();
    let faults = Deed::ALL.iter().filter(|deed| deed.is_fault()).map(|deed| deed.word()).collect();
    let calls = Trouble::ALL.iter().filter(|trouble| trouble.is_fault()).map(|trouble| trouble.word()).collect();
    let traits = Trouble::ALL.iter().filter(|trouble| !trouble.is_fault()).map(|trouble| trouble.word()).collect();
    format!(
        "| what | which |\n|---|---|\n| done by clients | {} |\n| done to instances, daemons, store and provider | {} |\n\
         | that goes wrong with single calls, or with clocks | {} |\n| that some worlds have and others have not | {} |\n",
        words(clients),
        words(faults),
        words(calls),
        words(traits),
    )
}

fn gates() -> String {
    let mut table =
        "| gate | rule | what happens, and has to come out | found by worlds as |\n|---|---|---|---|\n".to_owned();
    for trial in TRIALS {
        let found = IN_WORLDS.iter().find(|(gate, ..)| *gate == trial.gate).map(|(.., names)| names.to_vec());
        let found: Vec<String> = found.unwrap_or_default().iter().map(|name| format!("`{name}`")).collect();
        writeln!(table, "| `{}` | {} | {} | {} |", trial.gate.name(), trial.rule, trial.says, found.join(", "))
            .unwrap();
    }
    table
}

fn planted() -> String {
    let mut table = "| bug | caught as |\n|---|---|\n".to_owned();
    for bug in BUGS {
        let names: Vec<String> = bug.breaks.iter().map(|name| format!("`{name}`")).collect();
        writeln!(table, "| {} | {} |", bug.planted.says(), names.join(", ")).unwrap();
    }
    table
}

#[test]
fn p1_the_page_has_the_tables_of_the_code() {
    page::has("happenings", &happenings());
    page::has("invariants", &invariants());
    page::has("gates", &gates());
    page::has("planted", &planted());
}
