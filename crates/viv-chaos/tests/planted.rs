//! Bugs that somebody could make, planted one at a time: the worlds that are run every day catch each (P1).
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use viv_chaos::{BUGS, Bug, INVARIANTS, Plan, Violation, When, run, shrink};
use viv_core::planted::{Planted, plant};

/// The worlds of the quick slice, and as many again for what is rare.
const SEEDS: u64 = 300;

/// The first world that catches it.
fn caught(bug: &Bug) -> Option<Violation> {
    let looked_at = |name: &&str| INVARIANTS.iter().find(|known| known.name == *name).map(|known| known.when);
    // What breaks on the way is not waited for to the end.
    let rests = bug.breaks.iter().any(|name| looked_at(name) == Some(When::Rest));
    plant(Some(bug.planted));
    let found = (0..SEEDS).find_map(|seed| run(&Plan { rests, ..Plan::of(seed) }).err());
    plant(None);
    found
}

#[test]
fn p1_each_planted_bug_is_caught() {
    let all: BTreeSet<Planted> = BUGS.iter().map(|bug| bug.planted).collect();
    assert_eq!(all.len(), BUGS.len(), "each is there once");
    assert_eq!(all, Planted::ALL.iter().copied().collect(), "and none is left out");
    assert!(BUGS.len() >= 20);
    let known: BTreeSet<&str> = INVARIANTS.iter().map(|invariant| invariant.name).collect();
    assert!(BUGS.iter().flat_map(|bug| bug.breaks).all(|name| known.contains(name)));
    let only = std::env::var("VIV_PLANTED").ok();
    let next = AtomicUsize::new(0);
    let missed: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            let mut missed = Vec::new();
            while let Some(bug) = BUGS.get(next.fetch_add(1, Ordering::Relaxed)) {
                if only.as_ref().is_some_and(|only| *only != format!("{:?}", bug.planted)) {
                    continue;
                }
                let began = std::time::Instant::now();
                let found = caught(bug);
                let told = found.as_ref().map(ToString::to_string).unwrap_or_default();
                println!("{:?} after {:?}: {told}", bug.planted, began.elapsed());
                match found {
                    Some(found) if bug.breaks.contains(&found.name) => {}
                    Some(found) => missed.push(format!("{:?} is found as {found}", bug.planted)),
                    None => missed.push(format!("{:?} is not found", bug.planted)),
                }
            }
            missed
        };
        let workers = [scope.spawn(work), scope.spawn(work)];
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// What is told of a violation is smaller than where it was found, and the same.
#[test]
fn p1_a_violation_is_made_smaller_and_told_as_a_timeline() {
    let bug = BUGS.iter().find(|bug| bug.planted == Planted::PolicyReset).unwrap();
    let found = caught(bug).unwrap();
    let before = Plan { rests: false, ..Plan::of(found.seed) };
    plant(Some(bug.planted));
    let (plan, smaller) = shrink(&before, found.clone());
    let again = run(&plan).unwrap_err();
    plant(None);
    println!("{found}\n{smaller}\nwithout {:?}:\n{}", plan.without, smaller.timeline.join("\n"));
    assert_eq!((smaller.name, smaller.seed), (found.name, found.seed));
    assert!(smaller.step <= found.step && plan.steps <= before.steps, "{smaller}");
    assert!(!plan.without.deeds.is_empty(), "something is not needed for it");
    assert!(smaller.timeline.iter().any(|line| line.contains("step ")), "{:?}", smaller.timeline);
    assert!(smaller.timeline.iter().any(|line| line.contains("sbx_")), "it tells of who it is about");
    assert_eq!(again, smaller, "and it replays");
}

/// What ships has none of them: without the feature the answer is a constant.
#[test]
fn p1_nothing_is_planted_unless_somebody_does() {
    for bug in Planted::ALL {
        assert!(!viv_core::planted::is_planted(*bug), "{bug:?}");
    }
}
