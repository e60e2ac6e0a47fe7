//! The same rules for Prometheus, and tests of them for `promtool`: `deploy/prometheus` is made of this.

use std::fmt::Write;

use super::{Measure, RULES, Rule};

const HEAD: &str =
    "# Made from the table in crates/viv-engine/src/alert/rule.rs: UPDATE=1 cargo test -p viv-engine deploy\n";

/// A file of rules.
pub fn rules() -> String {
    let mut text = format!("{HEAD}groups:\n  - name: vivarium\n    rules:\n");
    for rule in RULES {
        let _ = write!(
            text,
            "      - alert: {}\n        expr: {}\n        for: {}s\n        labels:\n          severity: {}\n        annotations:\n          summary: {}\n          command: {}\n",
            rule.name,
            rule.expr(),
            rule.for_s,
            rule.severity.as_str(),
            rule.what,
            rule.helps
        );
    }
    text
}

/// Tests of them: each fires in time when it holds, and does not when it does not.
pub fn tests() -> String {
    let mut text = format!("{HEAD}rule_files:\n  - viv.rules.yml\nevaluation_interval: 15s\ntests:\n");
    for rule in RULES {
        for holds in [true, false] {
            one(&mut text, rule, holds);
        }
    }
    text
}

fn one(text: &mut String, rule: &Rule, holds: bool) {
    let mut series = Vec::new();
    match rule.measure {
        Measure::Sum(family) | Measure::Max(family) => {
            let now = if holds { rule.above + 1.0 } else { 0.0 };
            series.push((family, format!("{now}x400")));
        }
        // Nothing for a while, then a jump every minute.
        Measure::Increase(family) => series.push((family, if holds { "0+1x400" } else { "0x400" }.to_owned())),
        Measure::Share { part, of } => {
            series.push((of, "0+10x400".to_owned()));
            series.push((part, if holds { "0+5x400" } else { "0x400" }.to_owned()));
        }
    }
    text.push_str("  - interval: 15s\n    input_series:\n");
    for (family, values) in series {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("{label}=\"x\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = write!(text, "      - series: '{}{labels}'\n        values: '{values}'\n", family.name);
    }
    let at_s = rule.for_s + 1_200;
    let _ = write!(text, "    alert_rule_test:\n      - eval_time: {at_s}s\n        alertname: {}\n", rule.name);
    if !holds {
        text.push_str("        exp_alerts: []\n");
        return;
    }
    let _ = write!(
        text,
        "        exp_alerts:\n          - exp_labels:\n              severity: {}\n            exp_annotations:\n              summary: {}\n              command: {}\n",
        rule.severity.as_str(),
        rule.what,
        rule.helps
    );
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use crate::metrics::family;

    /// Compares what is committed with what is made, or writes it.
    fn check(path: &str, made: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
        if std::env::var_os("UPDATE").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, made).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(found, made, "{} differs: UPDATE=1 cargo test -p viv-engine deploy", path.display());
    }

    /// A page of which one part is made.
    fn check_part(path: &str, made: &str) {
        let (begin, end) = ("<!-- made from the table -->\n", "<!-- to here -->\n");
        let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
        let text = std::fs::read_to_string(&whole).unwrap_or_else(|_| format!("{begin}{end}"));
        let (before, rest) = text.split_once(begin).expect("the page says where the table is");
        let (_, after) = rest.split_once(end).expect("and where it ends");
        check(path, &format!("{before}{begin}{made}{end}{after}"));
    }

    #[test]
    fn o5_the_rules_in_deploy_are_made_from_the_table() {
        check("deploy/prometheus/viv.rules.yml", &super::rules());
        check("deploy/prometheus/viv.rules.test.yml", &super::tests());
    }

    #[test]
    fn o4_o5_the_tables_in_the_docs_are_made_from_ours_for_deploy() {
        check_part("docs/metrics.md", &family::table());
        check_part("docs/alerts.md", &super::super::table());
    }
}
