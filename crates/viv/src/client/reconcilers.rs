//! The table of reconcilers in `viv doctor`.

use viv_api::daemon::Reconciler;

use super::now_ms;
use super::table::{NONE, Table, age};
use crate::text::span;

/// When each last ran, what it found and did, and when it runs next.
pub(crate) fn reconcilers(all: &[Reconciler]) -> String {
    shown(all, now_ms())
}

fn shown(all: &[Reconciler], now_ms: u64) -> String {
    let mut table =
        Table::new(&["RECONCILER", "RUNS", "LAST", "TOOK", "FOUND", "DID", "FAILED", "NEXT", "WHAT WENT WRONG"]);
    for one in all {
        let next = match one.next_run_at_ms {
            Some(_) if one.overdue => "OVERDUE".to_owned(),
            Some(at_ms) => format!("in {}", span(at_ms.saturating_sub(now_ms))),
            None => NONE.to_owned(),
        };
        table.row([
            one.name.clone(),
            one.runs_total.to_string(),
            age(now_ms, one.last_run_at_ms),
            one.took_ms.map_or_else(|| NONE.to_owned(), |took_ms| format!("{took_ms} ms")),
            one.found.to_string(),
            one.did.to_string(),
            one.failed.to_string(),
            next,
            one.last_error.clone().unwrap_or_else(|| NONE.to_owned()),
        ]);
    }
    table.leave_out_empty(&["WHAT WENT WRONG"]);
    table.render(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str) -> Reconciler {
        Reconciler {
            name: name.to_owned(),
            period_ms: 60_000,
            runs_total: 3,
            last_run_at_ms: Some(970_000),
            took_ms: Some(4),
            found: 2,
            did: 1,
            failed: 1,
            last_error: None,
            next_run_at_ms: Some(1_030_000),
            overdue: false,
        }
    }

    #[test]
    fn j3_each_says_when_it_ran_what_it_found_and_whether_it_is_late() {
        let mut all = [one("cleanup"), one("health"), one("full")];
        (all[1].next_run_at_ms, all[1].last_run_at_ms, all[1].took_ms) = (None, None, None);
        (all[2].overdue, all[2].next_run_at_ms) = (true, Some(1));
        let text = shown(&all, 1_000_000);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["RECONCILER", "RUNS", "LAST", "TOOK", "FOUND", "DID", "FAILED", "NEXT"], "{text}");
        assert_eq!(rows[1], ["cleanup", "3", "30s", "4", "ms", "2", "1", "1", "in", "30s"], "{text}");
        assert_eq!(rows[2], ["health", "3", "-", "-", "2", "1", "1", "-"], "{text}");
        assert_eq!(rows[3].last(), Some(&"OVERDUE"), "{text}");
        all[0].last_error = Some("the disk is full".to_owned());
        let text = shown(&all, 1_000_000);
        assert!(text.lines().nth(1).unwrap().ends_with("the disk is full"), "{text}");
    }
}
