//! `viv spares`

use std::process::ExitCode;

use super::table::{NONE, Table, age};
use super::{Daemon, now_ms, print, print_json, width};

pub(super) fn run(daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let classes = daemon.client.spares()?.items;
    if daemon.json {
        for class in &classes {
            print_json(class)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if classes.is_empty() {
        eprintln!("no spares are kept; the daemon's configuration says which ([spares])");
        return Ok(ExitCode::SUCCESS);
    }
    let mut table =
        Table::new(&["CLASS", "IMAGE", "READY", "MAKING", "WANTED", "CLAIMED", "MISSED", "BROKEN", "OLDEST", "HELD"]);
    for class in &classes {
        let oldest = class.ready.iter().map(|spare| spare.made_at_ms).min();
        table.row([
            class.name.clone(),
            class.image.clone(),
            class.ready.len().to_string(),
            class.making.to_string(),
            format!("{} ({} to {})", class.target, class.min, class.max),
            class.claimed_total.to_string(),
            class.missed_total.to_string(),
            class.broken_total.to_string(),
            oldest.map_or_else(|| NONE.to_owned(), |at_ms| age(now_ms(), Some(at_ms))),
            class.held.clone().unwrap_or_else(|| NONE.to_owned()),
        ]);
    }
    print(&table.render(width()))
}
