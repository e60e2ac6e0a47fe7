//! A violation made smaller: fewer steps, fewer kinds of things that happen, as long as it is the same one.

use crate::invariants::Violation;
use crate::plan::{Deed, Plan, Trouble};
use crate::world::run;

/// Finds a smaller world in which the same is broken, by leaving out one kind of thing after the other. Costs a world
/// for each.
pub fn shrink(plan: &Plan, found: Violation) -> (Plan, Violation) {
    let mut best = (Plan { steps: found.step.max(1), ..plan.clone() }, found);
    let candidate = Plan { faults_percent: 0, ..best.0.clone() };
    adopt(&mut best, candidate);
    for deed in Deed::ALL {
        let mut candidate = best.0.clone();
        candidate.without.deeds.insert(*deed);
        adopt(&mut best, candidate);
    }
    for trouble in Trouble::ALL {
        let mut candidate = best.0.clone();
        candidate.without.troubles.insert(*trouble);
        adopt(&mut best, candidate);
    }
    best
}

fn adopt(best: &mut (Plan, Violation), candidate: Plan) {
    // What breaks at rest may do so after fewer steps.
    if let Err(found) = run(&candidate)
        && found.name == best.1.name
        && found.step <= best.1.step
    {
        *best = (Plan { steps: found.step.max(1), ..candidate }, found);
    }
}
