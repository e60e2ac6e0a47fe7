//! Many worlds, on all processors.

use std::fmt;
use std::ops::Range;

use crate::invariants::Violation;
use crate::plan::Plan;
use crate::world::{Report, run};

/// What came of many worlds.
#[derive(Debug, Clone, Default)]
pub struct Sweep {
    /// How many there were.
    pub worlds: u64,
    /// Of those in which everything held.
    pub sum: Report,
    /// One for each of the others.
    pub violations: Vec<Violation>,
    /// Fewest things that went wrong in one of those in which everything held, and its seed.
    pub fewest: Option<(u64, u64)>,
}

/// Runs the worlds of these seeds. Violations are told as they are found.
pub fn sweep(seeds: Range<u64>, workers: u64, found: impl Fn(&Violation) + Sync) -> Sweep {
    sweep_of(seeds, workers, Plan::mixed, found)
}

/// The same for worlds that are made otherwise.
pub fn sweep_of(
    seeds: Range<u64>,
    workers: u64,
    plan: impl Fn(u64) -> Plan + Sync,
    found: impl Fn(&Violation) + Sync,
) -> Sweep {
    let (workers, plan, found) = (workers.max(1), &plan, &found);
    let mut sweep = std::thread::scope(|scope| {
        let part = |worker: u64| {
            let seeds = seeds.clone().filter(move |seed| seed % workers == worker);
            move || {
                let mut part = Sweep::default();
                for seed in seeds {
                    part.worlds += 1;
                    match run(&plan(seed)) {
                        Ok(report) => {
                            part.had(Some((report.faults(), seed)));
                            part.sum = part.sum.and(&report);
                        }
                        Err(violation) => {
                            found(&violation);
                            part.violations.push(violation);
                        }
                    }
                }
                part
            }
        };
        let running: Vec<_> = (0..workers).map(|worker| scope.spawn(part(worker))).collect();
        let mut whole = Sweep::default();
        for worker in running {
            let part = worker.join().expect("panics of worlds are violations");
            whole.had(part.fewest);
            whole.worlds += part.worlds;
            whole.sum = whole.sum.and(&part.sum);
            whole.violations.extend(part.violations);
        }
        whole
    });
    sweep.violations.sort_by_key(|violation| violation.seed);
    sweep
}

impl Sweep {
    fn had(&mut self, faults: Option<(u64, u64)>) {
        self.fewest = self.fewest.into_iter().chain(faults).min();
    }
}

impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { steps, checks, deeds, troubles, .. } = &self.sum;
        let found = self.violations.len();
        let damage = deeds.iter().filter(|(deed, _)| deed.is_fault()).map(|(deed, count)| (deed.word(), count));
        let faults = damage.chain(troubles.iter().map(|(trouble, count)| (trouble.word(), count)));
        let faults: Vec<String> = faults.map(|(word, count)| format!("{word} {count}")).collect();
        let worlds = self.worlds;
        let fewest = self.fewest.map(|(fewest, _)| fewest).unwrap_or_default();
        let faults = faults.join(", ");
        write!(f, "{worlds} worlds, {steps} steps, faults: {faults} ({fewest} or more in each), ")?;
        write!(f, "{checks} checks, {found} violations")
    }
}
