//! The same rules for Prometheus, and tests of them for `promtool`: `deploy/prometheus` is made of this.

use std::fmt::Write;

use super::{Measure, RULES, Rule};
use crate::metrics::{Family, family};

const HEAD: &str =
    "# Made from the table in crates/viv-engine/src/alert/rule.rs: UPDATE=1 cargo test -p viv-engine deploy\n";

/// How long what fires and does not hold any more goes on firing: as [`super::AlertConfig::resolve_after`] ships.
const KEEPS_S: u64 = 60;

/// How far apart samples are in tests.
const STEP_S: u64 = 15;

/// What no daemon can say of itself: that there is none, or that nobody reaches it. So it is in no table of the daemon.
mod down {
    use crate::metrics::family;

    pub(super) const NAME: &str = "daemon_down";
    pub(super) const FOR_S: u64 = 60;
    pub(super) const SUMMARY: &str = "no daemon tells its figures";
    pub(super) const COMMAND: &str = "viv version";

    pub(super) fn expr() -> String {
        format!("absent({})", family::BUILD.name)
    }
}

/// A file of rules.
pub fn rules() -> String {
    let mut text = format!("{HEAD}groups:\n  - name: vivarium\n    rules:\n");
    for rule in RULES {
        let _ = write!(
            text,
            "      - alert: {}\n        expr: {}\n        for: {}s\n        keep_firing_for: {KEEPS_S}s\n        labels:\n          severity: {}\n        annotations:\n          summary: {}\n          command: {}\n",
            rule.name,
            rule.expr(),
            rule.for_s,
            rule.severity.as_str(),
            rule.what,
            rule.helps
        );
    }
    let _ = write!(
        text,
        "      - alert: {}\n        expr: {}\n        for: {}s\n        labels:\n          severity: critical\n        annotations:\n          summary: {}\n          command: {}\n",
        down::NAME,
        down::expr(),
        down::FOR_S,
        down::SUMMARY,
        down::COMMAND
    );
    text
}

/// How a rule is tried.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    /// It holds: it is pending for its time, then fires.
    Holds,
    /// It is exactly as much as may be, or nothing happens where nothing may.
    JustNot,
    /// It held for long enough, and does not any more: it fires on for a while, and is then over.
    Passes,
}

/// Tests of them: each fires in time when it holds and not before, does not at its threshold, and goes on for a moment.
pub fn tests() -> String {
    let mut text = format!("{HEAD}rule_files:\n  - viv.rules.yml\nevaluation_interval: {STEP_S}s\ntests:\n");
    for rule in RULES {
        for case in [Case::Holds, Case::JustNot, Case::Passes] {
            one(&mut text, rule, case);
        }
    }
    death(&mut text);
    text
}

/// A daemon that tells its figures, is gone for a while, and comes back.
fn death(text: &mut String) {
    let (lives, gone) = (20, 2 * down::FOR_S / STEP_S + 40);
    let labels: Vec<String> = family::BUILD.labels.iter().map(|label| format!("{label}=\"x\"")).collect();
    let _ = write!(
        text,
        "  - interval: {STEP_S}s\n    input_series:\n      - series: '{}{{{}}}'\n        values: '1x{lives} stale _x{gone} 1x400'\n    alert_rule_test:\n",
        family::BUILD.name,
        labels.join(",")
    );
    let died_s = (lives + 1) * STEP_S;
    let back_s = died_s + (gone + 2) * STEP_S;
    for (at_s, fires) in [
        (died_s - STEP_S, false),
        (died_s + down::FOR_S - STEP_S, false),
        (died_s + 2 * down::FOR_S, true),
        (back_s + STEP_S, false),
    ] {
        let _ = write!(text, "      - eval_time: {at_s}s\n        alertname: {}\n", down::NAME);
        if !fires {
            text.push_str("        exp_alerts: []\n");
            continue;
        }
        let _ = write!(
            text,
            "        exp_alerts:\n          - exp_labels:\n              severity: critical\n            exp_annotations:\n              summary: {}\n              command: {}\n",
            down::SUMMARY,
            down::COMMAND
        );
    }
}

/// Samples until it fires, and some.
fn samples(rule: &Rule) -> u64 {
    rule.for_s / STEP_S + 4
}

/// What is measured in this case; nothing where the case says nothing about it.
fn series(rule: &Rule, case: Case) -> Option<Vec<(&'static Family, String)>> {
    let held = samples(rule);
    Some(match (rule.measure, case) {
        (Measure::Sum(family) | Measure::Max(family), Case::Holds) => {
            vec![(family, format!("{}x400", rule.above + 1.0))]
        }
        (Measure::Sum(family) | Measure::Max(family), Case::JustNot) => vec![(family, format!("{}x400", rule.above))],
        (Measure::Sum(family) | Measure::Max(family), Case::Passes) => {
            vec![(family, format!("{}x{held} 0x400", rule.above + 1.0))]
        }
        // Nothing for a while, then a jump every minute.
        (Measure::Increase(family), Case::Holds) => vec![(family, "0+1x400".to_owned())],
        (Measure::Increase(family), Case::JustNot) => vec![(family, "0x400".to_owned())],
        (Measure::Share { part, of }, Case::Holds) => {
            vec![(of, "0+10x400".to_owned()), (part, "0+5x400".to_owned())]
        }
        (Measure::Share { part, of }, Case::JustNot) => {
            vec![(of, "0+100x400".to_owned()), (part, format!("0+{}x400", (rule.above * 100.0).round()))]
        }
        // Their windows go on for longer than anybody wants to count.
        (Measure::Increase(_) | Measure::Share { .. }, Case::Passes) => return None,
    })
}

/// When it is looked at in this case, and whether it fires then.
fn looks(rule: &Rule, case: Case) -> Vec<(u64, bool)> {
    let late_s = rule.for_s + 1_200;
    match case {
        Case::Holds if rule.for_s > STEP_S => vec![(rule.for_s - STEP_S, false), (late_s, true)],
        Case::Holds => vec![(late_s, true)],
        Case::JustNot => vec![(late_s, false)],
        Case::Passes => {
            let last_s = samples(rule) * STEP_S;
            vec![(last_s, true), (last_s + KEEPS_S / 2, true), (last_s + 2 * KEEPS_S + STEP_S, false)]
        }
    }
}

fn one(text: &mut String, rule: &Rule, case: Case) {
    let Some(series) = series(rule, case) else { return };
    let _ = write!(text, "  - interval: {STEP_S}s\n    input_series:\n");
    for (family, values) in series {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("{label}=\"x\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = write!(text, "      - series: '{}{labels}'\n        values: '{values}'\n", family.name);
    }
    text.push_str("    alert_rule_test:\n");
    for (at_s, fires) in looks(rule, case) {
        let _ = write!(text, "      - eval_time: {at_s}s\n        alertname: {}\n", rule.name);
        if !fires {
            text.push_str("        exp_alerts: []\n");
            continue;
        }
        let _ = write!(
            text,
            "        exp_alerts:\n          - exp_labels:\n              severity: {}\n            exp_annotations:\n              summary: {}\n              command: {}\n",
            rule.severity.as_str(),
            rule.what,
            rule.helps
        );
    }
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
