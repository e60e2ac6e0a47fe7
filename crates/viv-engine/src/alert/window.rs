//! Samples of the figures that rules need, as far back as the longest window reaches.

use std::collections::{BTreeMap, VecDeque};

use super::{Measure, RULES};
use crate::metrics::{Family, Metrics};

/// Most samples that are kept, however often one is taken.
const SAMPLES_MAX: usize = 4_000;

/// The figures that rules need, at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    at_ms: u64,
    values: BTreeMap<&'static str, f64>,
}

impl Sample {
    /// As they are now.
    pub fn of(metrics: &Metrics, at_ms: u64) -> Self {
        let mut values = BTreeMap::new();
        for rule in RULES {
            for family in rule.measure.families() {
                let value = match rule.measure {
                    Measure::Max(_) => metrics.max(family),
                    Measure::Sum(_) | Measure::Increase(_) | Measure::Share { .. } => metrics.sum(family),
                };
                values.insert(family.name, value);
            }
        }
        Self { at_ms, values }
    }

    fn value(&self, family: &Family) -> f64 {
        self.values.get(family.name).copied().unwrap_or_default()
    }
}

/// Samples in the order of time.
#[derive(Debug, Default)]
pub struct Window {
    samples: VecDeque<Sample>,
}

impl Window {
    /// One more. What no rule looks back to is forgotten.
    pub fn push(&mut self, sample: Sample) {
        let reach_ms = RULES.iter().map(|rule| rule.window_s * 1000).max().unwrap_or_default().max(3_600_000);
        let edge_ms = sample.at_ms.saturating_sub(reach_ms);
        if self.samples.is_empty() {
            // Counters begin at 0 with the daemon: what was counted before the first look is growth too.
            self.samples.push_back(Sample { at_ms: sample.at_ms, values: BTreeMap::new() });
        }
        self.samples.push_back(sample);
        // The one before the edge says how it was at the edge.
        while self.samples.len() > SAMPLES_MAX || self.samples.get(1).is_some_and(|next| next.at_ms <= edge_ms) {
            self.samples.pop_front();
        }
    }

    /// As it was last.
    pub fn now(&self, family: &Family) -> f64 {
        self.samples.back().map_or(0.0, |sample| sample.value(family))
    }

    /// By how much it grew in the last so many milliseconds.
    pub fn increase(&self, family: &Family, window_ms: u64) -> f64 {
        let Some(last) = self.samples.back() else { return 0.0 };
        let edge_ms = last.at_ms.saturating_sub(window_ms);
        let mut before = self.samples.front();
        for sample in &self.samples {
            if sample.at_ms > edge_ms {
                break;
            }
            before = Some(sample);
        }
        before.map_or(0.0, |before| (last.value(family) - before.value(family)).max(0.0))
    }
}
