//! Prometheus's text format, version 0.0.4.

use std::fmt::Write;

use super::family::{self, Family, Kind};
use super::{Metrics, Value};

impl Metrics {
    /// All families with their series; one without any is named all the same.
    pub fn text(&self) -> String {
        let values = self.lock();
        let mut text = String::new();
        for family in family::ALL {
            let _ = writeln!(text, "# HELP {} {}", family.name, family.help);
            let _ = writeln!(text, "# TYPE {} {}", family.name, family.kind.as_str());
            for (labels, value) in values.get(family.name).into_iter().flatten() {
                one(&mut text, family, labels, value);
            }
        }
        text
    }
}

fn one(text: &mut String, family: &Family, labels: &[String], value: &Value) {
    let name = family.name;
    match (value, family.kind) {
        (Value::Histogram { counts, sum }, Kind::Histogram(bounds)) => {
            let mut so_far = 0;
            let ends = bounds.iter().map(ToString::to_string).chain(["+Inf".to_owned()]);
            for (count, end) in counts.iter().zip(ends) {
                so_far += count;
                let _ = writeln!(text, "{name}_bucket{} {so_far}", labelled(family, labels, Some(&end)));
            }
            let _ = writeln!(text, "{name}_sum{} {sum}", labelled(family, labels, None));
            let _ = writeln!(text, "{name}_count{} {so_far}", labelled(family, labels, None));
        }
        (Value::Number(number), _) => {
            let _ = writeln!(text, "{name}{} {number}", labelled(family, labels, None));
        }
        (Value::Histogram { .. }, Kind::Counter | Kind::Gauge) => {}
    }
}

fn labelled(family: &Family, labels: &[String], up_to: Option<&str>) -> String {
    let pairs = family.labels.iter().copied().zip(labels.iter().map(String::as_str));
    let pairs = pairs.chain(up_to.map(|bound| ("le", bound)));
    let pairs: Vec<String> = pairs.map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
    if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, family};

    #[test]
    fn o4_the_text_is_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.count(&family::TRANSITIONS, &["ready", "lost", "crashed"]);
        metrics.count(&family::TRANSITIONS, &["ready", "lost", "crashed"]);
        metrics.set(&family::BUILD, &["0.1", "a\"b\\c\nd", "sim"], 1.0);
        metrics.observe(&family::TERMINATION_SECONDS, &[], 0.2);
        metrics.observe(&family::TERMINATION_SECONDS, &[], 1e9);
        let text = metrics.text();
        for line in [
            "# TYPE viv_transitions_total counter",
            "viv_transitions_total{from=\"ready\",to=\"lost\",cause=\"crashed\"} 2",
            "viv_build_info{version=\"0.1\",commit=\"a\\\"b\\\\c\\nd\",provider=\"sim\"} 1",
            "viv_termination_seconds_bucket{le=\"0.1\"} 0",
            "viv_termination_seconds_bucket{le=\"0.25\"} 1",
            "viv_termination_seconds_bucket{le=\"21600\"} 1",
            "viv_termination_seconds_bucket{le=\"+Inf\"} 2",
            "viv_termination_seconds_count 2",
            "viv_sandboxes_created_total 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        for family in family::ALL {
            assert!(text.contains(&format!("# HELP {} ", family.name)), "{}", family.name);
        }
    }
}
