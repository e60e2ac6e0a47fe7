//! `viv events`

use std::process::ExitCode;

use viv_api::bound::{ActorName, CauseCode, EventKind, FromAddress, MomentMs, SandboxRef, Sequence};
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
    cause: Option<CauseCode>,
    /// Only by this one: key:ID, or a part of the daemon
    #[arg(long, value_name = "WHO")]
    by: Option<ActorName>,
    /// Only those by somebody who came from this address
    #[arg(long, value_name = "ADDRESS")]
    address: Option<FromAddress>,
    /// Only those of the last so long: 30s, 15m, 2h, 1d
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    since: Option<u64>,
    /// And not those of the last so long
    #[arg(long, value_name = "SPAN", value_parser = parse_span, conflicts_with = "follow")]
    until: Option<u64>,
    /// Go on with what happens; a connection that breaks is made again where it was
    #[arg(long, short)]
    follow: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let ago = |span_ms: u64| MomentMs::nearest(now_ms().saturating_sub(span_ms));
    let mut query = ListEvents {
        after: args.after,
        sandbox: args.sandbox.clone(),
        kind: args.kind.clone(),
        cause: args.cause.clone(),
        by: args.by.clone(),
        address: args.address.clone(),
        since_ms: args.since.map(ago),
        until_ms: args.until.map(ago),
        limit: None,
    };
    if args.follow {
        for event in daemon.client.follow_events(query) {
            say(daemon, &event?)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        let page = daemon.client.events(&query)?;
        for event in &page.items {
            say(daemon, event)?;
        }
        // A server that does not move on would keep us here for ever.
        if !page.more || page.next_after <= query.after.map_or(0, Sequence::get) {
            return Ok(ExitCode::SUCCESS);
        }
        query.after = Some(Sequence::nearest(page.next_after));
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
    let from = event.address.as_ref().map_or_else(String::new, |address| format!(" from {address}"));
    clean(&format!("{}  {}{about}{phase}{cause}  by {}{from}{message}", clock(event.at_ms), event.kind, event.by))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o7_who_came_by_network_is_told_with_the_address() {
        let event = |address: Option<&str>| -> Event {
            let told = serde_json::json!({
                "seq": 1, "at_ms": 0, "kind": "key.revoked", "by": "key:key_1", "address": address, "message": "it leaked",
            });
            serde_json::from_value(told).unwrap()
        };
        let with = line(&event(Some("192.0.2.7")));
        assert!(with.ends_with("key.revoked  by key:key_1 from 192.0.2.7: it leaked"), "{with}");
        let without = line(&event(None));
        assert!(without.ends_with("key.revoked  by key:key_1: it leaked"), "{without}");
    }
}
