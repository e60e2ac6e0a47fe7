//! Figures for Prometheus (O4): numerators and denominators, never ratios alone.
//!
//! ```text
//!   journal ──► feed ─────┐        each line is read once, when somebody asks or alerts are judged
//!   probes, calls, runs ──┼──► Metrics ──► text (scraped), alert::Window (judged)
//!   store, roster ────────┘        told as they are counted there
//! ```
//!
//! Invariants:
//!
//! - Every family is in [`family::ALL`], from which the documentation is made; nothing else can be counted.
//! - No label holds a sandbox, a project or anything else that a user chooses, and a family has at most
//!   [`SERIES_MAX`] series.
//! - Counting takes a lock for a moment and never waits.

pub mod family;
mod feed;
mod gauges;
mod text;
mod wrong;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use family::{Family, Kind};
pub(crate) use feed::Feed;
pub(crate) use gauges::Gathered;
pub use gauges::QuotaUsed;
pub(crate) use wrong::is_overdue;

/// Most series of a family. What would be one more is counted as dropped.
pub const SERIES_MAX: usize = 1_000;

/// All figures. Clones are the same.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<Mutex<Values>>);

type Values = BTreeMap<&'static str, BTreeMap<Vec<String>, Value>>;

#[derive(Debug, Clone, PartialEq)]
enum Value {
    Number(f64),
    Histogram { counts: Vec<u64>, sum: f64 },
}

impl Default for Metrics {
    fn default() -> Self {
        let mut values = Values::new();
        for family in family::ALL {
            let series = values.entry(family.name).or_default();
            // What has no labels is there from the beginning, so that its first increase is seen as one.
            if family.labels.is_empty() {
                series.insert(Vec::new(), Value::of(family.kind));
            }
        }
        Self(Arc::new(Mutex::new(values)))
    }
}

impl Value {
    fn of(kind: Kind) -> Self {
        match kind {
            Kind::Counter | Kind::Gauge => Self::Number(0.0),
            Kind::Histogram(bounds) => Self::Histogram { counts: vec![0; bounds.len() + 1], sum: 0.0 },
        }
    }
}

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Values> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, family: &'static Family, labels: &[&str], change: impl FnOnce(&mut Value)) {
        debug_assert_eq!(family.labels.len(), labels.len(), "{}", family.name);
        let mut values = self.lock();
        let series = values.entry(family.name).or_default();
        let labels: Vec<String> = labels.iter().map(|&label| label.to_owned()).collect();
        if series.len() >= SERIES_MAX && !series.contains_key(&labels) {
            let dropped = values.entry(family::SERIES_DROPPED.name).or_default().entry(Vec::new());
            if let Value::Number(number) = dropped.or_insert(Value::Number(0.0)) {
                *number += 1.0;
            }
            return;
        }
        change(series.entry(labels).or_insert_with(|| Value::of(family.kind)));
    }

    /// Counts one more.
    pub fn count(&self, family: &'static Family, labels: &[&str]) {
        self.add(family, labels, 1.0);
    }

    /// Counts several more.
    pub fn add(&self, family: &'static Family, labels: &[&str], more: f64) {
        self.change(family, labels, |value| match value {
            Value::Number(number) => *number += more,
            Value::Histogram { .. } => debug_assert!(false, "{} is a histogram", family.name),
        });
    }

    /// It is so many now.
    pub fn set(&self, family: &'static Family, labels: &[&str], number: f64) {
        self.change(family, labels, |value| *value = Value::Number(number));
    }

    /// Forgets all series of a gauge, before those that are there now are set.
    pub fn clear(&self, family: &'static Family) {
        if let Some(series) = self.lock().get_mut(family.name) {
            series.clear();
        }
    }

    /// It took so long, or was so many.
    pub fn observe(&self, family: &'static Family, labels: &[&str], seen: f64) {
        let Kind::Histogram(bounds) = family.kind else {
            debug_assert!(false, "{} is no histogram", family.name);
            return;
        };
        self.change(family, labels, |value| {
            if let Value::Histogram { counts, sum } = value {
                let at = bounds.iter().position(|bound| seen <= *bound).unwrap_or(bounds.len());
                counts[at] += 1;
                *sum += seen;
            }
        });
    }

    /// The same for a time in milliseconds, told in seconds.
    pub fn observe_ms(&self, family: &'static Family, labels: &[&str], ms: u64) {
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        self.observe(family, labels, ms as f64 / 1000.0);
    }

    /// The sum of all series of a family; of a histogram, how often it was observed.
    pub fn sum(&self, family: &'static Family) -> f64 {
        self.series(family).into_iter().map(|(_, number)| number).sum()
    }

    /// The greatest of all series; nothing is 0.
    pub fn max(&self, family: &'static Family) -> f64 {
        self.series(family).into_iter().map(|(_, number)| number).fold(0.0, f64::max)
    }

    /// All series with their numbers.
    pub fn series(&self, family: &'static Family) -> Vec<(Vec<String>, f64)> {
        let values = self.lock();
        let number = |value: &Value| match value {
            Value::Number(number) => *number,
            #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
            Value::Histogram { counts, .. } => counts.iter().sum::<u64>() as f64,
        };
        let series = values.get(family.name);
        series.into_iter().flatten().map(|(labels, value)| (labels.clone(), number(value))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o4_a_family_has_a_bound_and_what_is_beyond_is_counted() {
        let metrics = Metrics::default();
        for code in 0..SERIES_MAX + 5 {
            metrics.count(&family::HTTP_REQUESTS, &["GET", "/v1/stats", &code.to_string()]);
        }
        assert_eq!(metrics.series(&family::HTTP_REQUESTS).len(), SERIES_MAX);
        assert!((metrics.sum(&family::SERIES_DROPPED) - 5.0).abs() < f64::EPSILON);
        metrics.count(&family::HTTP_REQUESTS, &["GET", "/v1/stats", "7"]);
        assert!((metrics.sum(&family::SERIES_DROPPED) - 5.0).abs() < f64::EPSILON, "what is known is counted on");
    }

    #[test]
    fn o4_names_follow_the_conventions() {
        let mut names: Vec<&str> = family::ALL.iter().map(|family| family.name).collect();
        for family in family::ALL {
            assert!(family.name.starts_with("viv_"), "{}", family.name);
            assert!(!family.help.is_empty() && family.help.ends_with('.'), "{}", family.name);
            assert_eq!(matches!(family.kind, Kind::Counter), family.name.ends_with("_total"), "{}", family.name);
            for label in family.labels {
                assert!(!["sandbox", "project", "id", "name"].contains(label), "{}: {label}", family.name);
            }
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), family::ALL.len(), "a name is there twice");
    }
}
