//! Crash points, one after the other (P4): every change of one life through every effect goes wrong in every way, and it
//! ends as if nothing had.
#![allow(missing_docs, reason = "tests")]

mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use viv_chaos::{Point, Way, live};

/// The effects that a record can name, as [`viv_core::lifecycle::Effect::code`] has them, the two that memory makes
/// others, and the save before a replacement.
const EFFECTS: [&str; 13] = [
    "claim",
    "clear",
    "create",
    "freeze",
    "hook",
    "probe",
    "restore",
    "restore with memory",
    "save",
    "save with memory",
    "seal",
    "serve",
    "thaw",
];

/// What went wrong how often, by the effect that was outstanding, which is what docs/proof.md shows.
fn table(points: &[Point]) -> String {
    let words: Vec<&str> = Way::ALL.iter().map(|way| way.word()).collect();
    let mut table = format!("| effect | its changes | {} |\n|---|---|{}\n", words.join(" | "), "---|".repeat(5));
    let mut by_effect: BTreeMap<&str, Vec<&Point>> = BTreeMap::new();
    for point in points {
        // What no record names: snapshots and forks, tasks, leases, lines.
        by_effect.entry(point.effect.unwrap_or("none outstanding")).or_default().push(point);
    }
    for (effect, points) in by_effect {
        let calls: BTreeSet<String> = points.iter().map(|point| format!("`{}`", point.call)).collect();
        write!(table, "| {effect} | {} |", calls.into_iter().collect::<Vec<_>>().join(", ")).unwrap();
        for way in Way::ALL {
            let count = points.iter().filter(|point| point.ways().any(|one| one == way)).count();
            write!(table, " {count} |").unwrap();
        }
        table.push('\n');
    }
    table
}

/// Whether it ended as it should. A spare whose claim is not answered is not waited for: whoever was to have it gets an
/// instance of its own, which is the next generation (L19).
fn is_same(end: &[String], wanted: &[String], point: &Point, way: Way) -> bool {
    if point.effect != Some("claim") || way != Way::Unanswered {
        return end == wanted;
    }
    let without_generation = |lines: &[String]| -> Vec<String> {
        let cut = |line: &String| match line.split_once(", generation ") {
            Some((before, after)) => format!("{before}{}", after.trim_start_matches(|c: char| c.is_ascii_digit())),
            None => line.clone(),
        };
        lines.iter().map(cut).collect()
    };
    without_generation(end) == without_generation(wanted)
}

#[test]
fn p4_whatever_goes_wrong_with_any_one_change_the_end_is_the_same() {
    let well = live(None).unwrap();
    println!("{:#?}\n{} changes", well.end, well.points.len());
    assert_eq!(live(None).unwrap(), well, "it replays");
    let effects: BTreeSet<&str> = well.points.iter().filter_map(|point| point.effect).collect();
    assert_eq!(effects, EFFECTS.into_iter().collect(), "every effect is among them");
    page::has("crash points", &table(&well.points));
    let only = std::env::var("VIV_POINT").ok().and_then(|number| number.parse().ok());
    let orders: Vec<(usize, Way)> = (0..well.points.len())
        .filter(|at| only.is_none_or(|only: usize| only == *at))
        .flat_map(|at| well.points[at].ways().map(move |way| (at, way)))
        .collect();
    let next = AtomicUsize::new(0);
    let broken: BTreeMap<(usize, Way), String> = std::thread::scope(|scope| {
        let work = || {
            let mut broken = Vec::new();
            while let Some(order) = orders.get(next.fetch_add(1, Ordering::Relaxed)) {
                let found = match live(Some(*order)) {
                    Ok(lived) if is_same(&lived.end, &well.end, &well.points[order.0], order.1) => continue,
                    Ok(lived) => {
                        let differs = lived.end.iter().zip(&well.end).filter(|(now, then)| now != then);
                        format!("{:#?}", differs.collect::<Vec<_>>())
                    }
                    Err(error) => error,
                };
                let found = format!("{:?}: {found}", well.points[order.0]);
                println!("{order:?} {found}");
                broken.push((*order, found));
            }
            broken
        };
        let workers = [scope.spawn(work), scope.spawn(work)];
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    println!("{} lives", orders.len());
    let told: Vec<String> = broken.iter().map(|(order, what)| format!("{order:?} {what}")).collect();
    assert!(broken.is_empty(), "{} of {}:\n{}", broken.len(), orders.len(), told.join("\n"));
}
