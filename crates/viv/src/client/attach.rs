//! `viv attach`

use std::process::ExitCode;

use viv_api::bound::{MomentMs, SandboxRef, SearchText, TailLines};
use viv_core::ExecutionId;

use super::interrupt::{Interrupts, Policy};
use super::session::{self, Begin, How};
use super::{Daemon, now_ms};
use crate::text::parse_span;

/// Take up the output of a command again, also of one that ended
///
/// Ctrl-C leaves the command running.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// The command's id
    execution: ExecutionId,
    /// The first byte of output to show
    #[arg(long, default_value_t = 0, conflicts_with = "tail")]
    offset: u64,
    /// Begin with the last so many lines of what there is
    #[arg(long, value_name = "LINES")]
    tail: Option<TailLines>,
    /// Show only lines of what there is that have this in them, at most 1,000
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["tail", "interactive"])]
    search: Option<SearchText>,
    /// Only what was written in the last so long: 30s, 10m, 2h
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    since: Option<u64>,
    /// Pass standard input in, after what the command was given so far
    #[arg(long, short)]
    interactive: bool,
    /// Show what there is, and do not wait for more
    #[arg(long)]
    no_follow: bool,
}

/// The moment so long ago.
pub(super) fn ago(span_ms: u64) -> MomentMs {
    MomentMs::nearest(now_ms().saturating_sub(span_ms))
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let execution = daemon.sandbox(&args.sandbox).execution(args.execution.clone()).get()?;
    let tty = args.interactive && execution.tty;
    let begin = match (&args.tail, &args.search) {
        (Some(lines), _) => Begin::Tail(*lines),
        (None, Some(text)) => Begin::Search(text.clone(), args.offset),
        (None, None) => Begin::Offset(args.offset),
    };
    let follow = !args.no_follow && args.search.is_none();
    let since = args.since.map(ago);
    let how = How { begin, since, follow, stdin: args.interactive, tty, ours: false };
    let interrupts = Interrupts::catch(&daemon.client, Policy::Leave)?;
    session::stay(daemon, &execution, &how, Some(&interrupts)).map(session::exit)
}
