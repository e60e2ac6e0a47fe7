//! `viv events`

use std::process::ExitCode;

use viv_api::bound::{EventKind, SandboxRef, Sequence};
use viv_api::event::Event;
use viv_api::query::ListEvents;

use super::table::{clean, clock};
use super::{Daemon, now_ms, print, print_json};
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only about this sandbox
    #[arg(long, value_name = "SANDBOX")]
    sandbox: Option<SandboxRef>,
    /// Only those of this kind, or that begin so: execution, file, sandbox.moved
    #[arg(long, value_name = "KIND")]
    kind: Option<EventKind>,
    /// Only those after this one; from the oldest that is kept when not said
    #[arg(long, value_name = "NUMBER")]
    after: Option<Sequence>,
    /// Only with this cause: expired, idle, crashed
    #[arg(long, value_name = "CAUSE")]
    cause: Option<String>,
    /// Only by this one: key:ID, or a part of the daemon
    #[arg(long, value_name = "WHO")]
    by: Option<String>,
    /// Only those of the last so long: 30s, 15m, 2h, 1d
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    since: Option<u64>,
    /// Go on with what happens; a connection that breaks is made again where it was
    #[arg(long, short)]
    follow: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let from_ms = args.since.map_or(0, |since_ms| now_ms().saturating_sub(since_ms));
    if args.follow {
        let events = daemon.client.follow_events(args.after.map(Sequence::get), args.sandbox.clone());
        for event in events.of_kind(args.kind.clone()) {
            let event = event?;
            if args.wants(&event, from_ms) {
                say(daemon, &event)?;
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut after = args.after;
    loop {
        let query = ListEvents { after, sandbox: args.sandbox.clone(), kind: args.kind.clone(), limit: None };
        let page = daemon.client.events(&query)?;
        for event in page.items.iter().filter(|event| args.wants(event, from_ms)) {
            say(daemon, event)?;
        }
        // A server that does not move on would keep us here for ever.
        if !page.more || after.is_some_and(|after| page.next_after <= after.get()) {
            return Ok(ExitCode::SUCCESS);
        }
        after = Some(Sequence::nearest(page.next_after));
    }
}

impl Args {
    /// Whether an event is one of those that were asked for.
    fn wants(&self, event: &Event, from_ms: u64) -> bool {
        let cause =
            self.cause.as_ref().is_none_or(|code| event.cause.as_ref().is_some_and(|cause| cause.code == *code));
        let by = self.by.as_ref().is_none_or(|by| event.by == *by || event.by.starts_with(&format!("{by} ")));
        cause && by && event.at_ms >= from_ms
    }
}

fn say(daemon: &Daemon, event: &Event) -> anyhow::Result<ExitCode> {
    if daemon.json { print_json(event) } else { print(&line(event)) }
}

fn line(event: &Event) -> String {
    let about = event.sandbox.as_ref().map_or_else(String::new, |sandbox| format!("  {sandbox}"));
    let phase = match (event.from, event.to) {
        (Some(from), Some(to)) => format!("  {from} -> {to}"),
        (None, Some(to)) => format!("  -> {to}"),
        (Some(_) | None, None) => String::new(),
    };
    // The message often says it already.
    let cause = event.cause.as_ref().filter(|cause| !event.message.contains(&cause.code));
    let cause = cause.map_or_else(String::new, |cause| format!(" ({})", cause.code));
    let message = if event.message.is_empty() { String::new() } else { format!(": {}", event.message) };
    clean(&format!("{}  {}{about}{phase}{cause}  by {}{message}", clock(event.at_ms), event.kind, event.by))
}
