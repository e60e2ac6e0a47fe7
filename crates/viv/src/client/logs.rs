//! `viv logs`

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::ValueEnum;
use viv_api::bound::{ComponentName, LogBytes, PageLimit, SandboxRef, SearchText, Sequence, TailLines};
use viv_api::client::SandboxHandle;
use viv_api::daemon::{LogLevel, LogLine};
use viv_api::query::{ListLogs, SandboxLogQuery};
use viv_api::sandbox::{LogSource, LogTail};

use super::table::{clean, clock};
use super::{Daemon, now_ms, print, print_json};
use crate::text::parse_span;

/// Between two looks for more.
const EVERY: Duration = Duration::from_millis(500);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name; with `--daemon` only lines about it
    #[arg(required_unless_present = "daemon")]
    sandbox: Option<SandboxRef>,
    /// The daemon's own log
    #[arg(long)]
    daemon: bool,
    /// Only this part of the daemon
    #[arg(long, requires = "daemon")]
    component: Option<ComponentName>,
    /// Only what is at least this important
    #[arg(long, value_enum, requires = "daemon")]
    level: Option<LevelArg>,
    /// Only this log of the sandbox
    #[arg(long, value_enum, conflicts_with = "daemon")]
    source: Option<SourceArg>,
    /// How much of the end of each log of a sandbox
    #[arg(long, default_value = "65536", conflicts_with = "daemon")]
    bytes: LogBytes,
    /// Only the last so many lines, of each log
    #[arg(long, value_name = "LINES")]
    tail: Option<TailLines>,
    /// Only lines with this in them
    #[arg(long, value_name = "TEXT")]
    search: Option<SearchText>,
    /// Only what the daemon said in the last so long: 30s, 10m, 2h
    #[arg(long, value_name = "SPAN", value_parser = parse_span, requires = "daemon")]
    since: Option<u64>,
    /// Go on with what comes
    #[arg(long, short)]
    follow: bool,
}

impl Args {
    fn is_searched(&self, line: &str) -> bool {
        self.search.as_ref().is_none_or(|text| line.contains(text.as_str()))
    }

    /// Of these, those that are asked for.
    fn last<T>(&self, lines: &mut Vec<T>) {
        let most = self.tail.map_or(usize::MAX, |lines| lines.get() as usize);
        lines.drain(..lines.len().saturating_sub(most));
    }

    /// Of a text, the lines that are asked for.
    fn part(&self, text: &str, is_first: bool) -> String {
        let mut lines: Vec<&str> = text.split_inclusive('\n').filter(|line| self.is_searched(line)).collect();
        if is_first {
            self.last(&mut lines);
        }
        lines.concat()
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum LevelArg {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
}

#[derive(Clone, Copy, ValueEnum)]
enum SourceArg {
    /// The supervisor beside it
    Shim,
    /// The agent in it
    Agent,
    /// Its console
    Console,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    match &args.sandbox {
        Some(sandbox) if !args.daemon => of_sandbox(args, &daemon.sandbox(sandbox), daemon),
        Some(_) | None => of_daemon(args, daemon),
    }
}

fn of_daemon(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut query = ListLogs {
        component: args.component.clone(),
        sandbox: args.sandbox.clone(),
        level: args.level.map(level),
        // What is looked for may be anywhere in what is kept.
        limit: (args.tail.is_some() || args.search.is_some() || args.since.is_some())
            .then(|| PageLimit::nearest(u64::MAX)),
        ..ListLogs::default()
    };
    let from_ms = args.since.map_or(0, |since_ms| now_ms().saturating_sub(since_ms));
    let mut is_first = true;
    loop {
        let mut page = daemon.client.logs(&query)?;
        page.items.retain(|line| line.at_ms >= from_ms && args.is_searched(&line_of(line)));
        if std::mem::take(&mut is_first) {
            args.last(&mut page.items);
        }
        for line in &page.items {
            if daemon.json {
                print_json(line)?;
            } else {
                print(&line_of(line))?;
            }
        }
        query.after = Some(Sequence::nearest(page.next_after));
        if !page.more {
            if !args.follow {
                return Ok(ExitCode::SUCCESS);
            }
            thread::sleep(EVERY);
        }
    }
}

fn line_of(line: &LogLine) -> String {
    let level = match line.level {
        LogLevel::Trace => "TRACE",
        LogLevel::Debug => "DEBUG",
        LogLevel::Info => "INFO",
        LogLevel::Warn => "WARN",
        LogLevel::Error => "ERROR",
    };
    let about = line.sandbox.as_ref().map_or_else(String::new, |sandbox| format!(" {sandbox}"));
    let fields: String = line.fields.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    clean(&format!("{} {level:<5} {}{about}: {}{fields}", clock(line.at_ms), line.component, line.message))
}

fn of_sandbox(args: &Args, handle: &SandboxHandle<'_>, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let source = args.source.map(|source| match source {
        SourceArg::Shim => LogSource::Shim,
        SourceArg::Agent => LogSource::Agent,
        SourceArg::Console => LogSource::Console,
    });
    let query = SandboxLogQuery { source, bytes: Some(args.bytes), generation: None };
    let first = handle.logs(&query)?;
    let mut shown = first.clone();
    for tail in &mut shown.logs {
        tail.text = args.part(&tail.text, true);
    }
    if daemon.json {
        print_json(&shown)?;
    } else {
        for tail in &shown.logs {
            say(tail, shown.logs.len() > 1)?;
        }
    }
    if !args.follow {
        return Ok(ExitCode::SUCCESS);
    }
    let mut seen = first;
    loop {
        thread::sleep(EVERY);
        // As much of the end as before: what is known begins it, or is not there any more.
        let mut now = handle.logs(&query)?;
        // Another generation begins its logs anew.
        let is_same = now.generation == seen.generation;
        let all = now.clone();
        for tail in &mut now.logs {
            let before = seen.logs.iter().find(|log| is_same && log.source == tail.source);
            let known = before.map_or(0, |before| known(&before.text, &tail.text));
            tail.text = args.part(&tail.text[known..], false);
        }
        now.logs.retain(|tail| !tail.text.is_empty());
        seen = all;
        if now.logs.is_empty() {
            continue;
        }
        if daemon.json {
            print_json(&now)?;
        } else {
            for tail in &now.logs {
                say(tail, false)?;
            }
        }
    }
}

/// How much of a log is known from its end as it was seen before. What was seen moves towards the beginning as more is
/// written, until it is not shown any more; then all of it is new.
fn known(before: &str, now: &str) -> usize {
    let starts = before.char_indices().map(|(at, _)| &before[at..]);
    let lines =
        starts.enumerate().filter(|(at, rest)| *at == 0 || before.as_bytes()[before.len() - rest.len() - 1] == b'\n');
    lines.map(|(_, rest)| rest).find(|rest| now.starts_with(rest)).map_or(0, str::len)
}

fn say(tail: &LogTail, with_name: bool) -> anyhow::Result<()> {
    let name = match tail.source {
        LogSource::Shim => "shim",
        LogSource::Agent => "agent",
        LogSource::Console => "console",
    };
    if with_name {
        print(&format!("== {name}"))?;
    }
    for line in tail.text.lines() {
        print(&clean(line))?;
    }
    Ok(())
}

fn level(level: LevelArg) -> LogLevel {
    match level {
        LevelArg::Trace => LogLevel::Trace,
        LevelArg::Debug => LogLevel::Debug,
        LevelArg::Info => LogLevel::Info,
        LevelArg::Warn => LogLevel::Warn,
        LevelArg::Error => LogLevel::Error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o1_of_a_log_its_end_is_shown_or_what_is_looked_for() {
        let args = |tail: Option<u64>, search: Option<&str>| Args {
            sandbox: None,
            daemon: false,
            component: None,
            level: None,
            source: None,
            bytes: LogBytes::nearest(1),
            tail: tail.map(|lines| TailLines::new(lines).unwrap()),
            search: search.map(|text| SearchText::new(text).unwrap()),
            since: None,
            follow: false,
        };
        let text = "one\ntwo\nanother one\nhalf";
        assert_eq!(args(None, None).part(text, true), text);
        assert_eq!(args(Some(2), None).part(text, true), "another one\nhalf");
        assert_eq!(args(Some(2), None).part(text, false), text, "what comes later is all new");
        assert_eq!(args(None, Some("one")).part(text, true), "one\nanother one\n");
        assert_eq!(args(Some(1), Some("one")).part(text, true), "another one\n");
    }

    #[test]
    fn only_what_is_new_is_said() {
        assert_eq!(known("a\nb\n", "a\nb\nc\n"), 4);
        // The beginning is not shown any more.
        assert_eq!(known("a\nb\n", "b\nc\n"), 2);
        assert_eq!(known("a\nb\n", "x\ny\n"), 0);
        assert_eq!(known("", "x\n"), 0);
        assert_eq!(known("ä\nö\n", "ö\nü\n"), "ö\n".len());
    }
}
