//! A command in a sandbox, as seen from here: its output shown, its input given, its end made an exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use viv_api::bound::{MomentMs, SandboxRef, SearchText, TailLines};
use viv_api::client::{Client, ExecutionHandle};
use viv_api::execution::{Execution, ExecutionState, OutputLine, OutputStream};

use super::interrupt::Interrupts;
use super::terminal::Raw;
use super::{Daemon, feed, print_json};
use crate::fail::{CANNOT_RUN, FAILED, NO_PROGRAM, NOT_THE_COMMAND, OK, SIGNAL_BASE, TIMEOUT, is_broken_pipe};

/// What the kernel kills with.
const KILL: u8 = 9;
/// What a cancel amounts to.
const TERMINATE: u8 = 15;

/// Where output begins that is shown.
pub(super) enum Begin {
    /// At this byte.
    Offset(u64),
    /// With the last so many lines.
    Tail(TailLines),
    /// Only lines with this in them, from this byte on.
    Search(SearchText, u64),
}

/// How to be with a command.
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
pub(super) struct How {
    /// Which output to show.
    pub(super) begin: Begin,
    /// Only what was written then or later.
    pub(super) since: Option<MomentMs>,
    /// Whether to go on until it ends.
    pub(super) follow: bool,
    /// Whether our input is its.
    pub(super) stdin: bool,
    /// Whether our terminal is its.
    pub(super) tty: bool,
    /// Whether it ends when nobody reads its output any more.
    pub(super) ours: bool,
}

/// Stays with a command until it ends, and answers with its exit code.
pub(super) fn stay(
    daemon: &Daemon,
    execution: &Execution,
    how: &How,
    interrupts: Option<&Interrupts>,
) -> anyhow::Result<u8> {
    let raw = if how.tty && how.stdin { Raw::enter()? } else { None };
    if let Some(interrupts) = interrupts {
        interrupts.runs(execution, how.tty);
    }
    if how.stdin && !execution.state.is_final() {
        feed::start(&daemon.client, execution);
    }
    let shown = show(daemon, execution, how);
    drop(raw);
    let ended = match shown {
        Err(error) if how.ours && is_broken_pipe(&error) => {
            // As a command in a pipe would be ended, whose reader goes away.
            cancel(&daemon.client, execution);
            return Err(error);
        }
        shown => shown?,
    };
    let (code, why) = exit_code(&ended);
    if let Some(why) = why {
        eprintln!("viv: {why}");
    }
    Ok(code)
}

/// The same, as the end of this program.
pub(super) fn exit(code: u8) -> ExitCode {
    ExitCode::from(code)
}

/// Itself, in whichever instance: its id is nobody else's, what waits may start in another one, and what was saved with
/// its memory goes on in the next (X5).
pub(super) fn of<'c>(client: &'c Client, execution: &Execution) -> ExecutionHandle<'c> {
    client.sandbox(SandboxRef::from(&execution.sandbox)).execution(execution.id.clone())
}

/// Ends a command; that it ended already is as good.
pub(super) fn cancel(client: &Client, execution: &Execution) {
    if let Err(error) = of(client, execution).cancel() {
        eprintln!("viv: {} could not be cancelled: {error}", execution.id);
    }
}

fn show(daemon: &Daemon, execution: &Execution, how: &How) -> anyhow::Result<Execution> {
    let handle = of(&daemon.client, execution);
    let output = match &how.begin {
        Begin::Offset(offset) if how.follow => handle.follow(*offset),
        Begin::Offset(offset) => handle.output(*offset),
        Begin::Tail(lines) => handle.tail(*lines, how.follow),
        Begin::Search(text, offset) => handle.search(text.clone(), *offset),
    };
    let output = match how.since {
        Some(moment) => output.since(moment),
        None => output,
    };
    for line in output {
        let line = line?;
        if daemon.json {
            print_json(&line)?;
        }
        match line {
            OutputLine::Chunk(chunk) if !daemon.json => {
                let data = chunk.data().unwrap_or_default();
                match chunk.stream {
                    OutputStream::Stdout => write_all(&mut io::stdout().lock(), &data)?,
                    OutputStream::Stderr => write_all(&mut io::stderr().lock(), &data)?,
                }
            }
            OutputLine::Cut(cut) if !daemon.json => {
                eprintln!("viv: {} bytes of output were not kept\r", cut.cut.to - cut.cut.from);
            }
            OutputLine::End(end) => return Ok(*end.end),
            OutputLine::Chunk(_) | OutputLine::Cut(_) | OutputLine::Alive(_) => {}
        }
    }
    anyhow::bail!("the output of {} ended without a word", execution.id)
}

fn write_all(to: &mut impl Write, data: &[u8]) -> io::Result<()> {
    to.write_all(data)?;
    to.flush()
}

/// The exit code in the way of shells, and why if it says too little.
pub(super) fn exit_code(ended: &Execution) -> (u8, Option<String>) {
    let message = || ended.message.clone();
    let signal = ended.signal.map_or(0, |signal| signal as u8);
    match ended.state {
        // Following was not asked for, and it goes on.
        ExecutionState::Queued | ExecutionState::Running | ExecutionState::Suspended => (OK, None),
        ExecutionState::Exited => (ended.exit_code.map_or(FAILED, |code| code as u8), None),
        ExecutionState::Signalled => (SIGNAL_BASE.wrapping_add(signal), None),
        ExecutionState::OomKilled => (SIGNAL_BASE + KILL, Some(with("it was killed for memory", message()))),
        ExecutionState::Failed => {
            let message = message().unwrap_or_else(|| "it could not be started".to_owned());
            (failed_code(&message), Some(message))
        }
        ExecutionState::Cancelled => (SIGNAL_BASE + TERMINATE, Some(with("it was cancelled", message()))),
        ExecutionState::TimedOut => {
            let why = "its time limit passed\nhint: --timeout gives it longer";
            (TIMEOUT, Some(why.to_owned()))
        }
        ExecutionState::Lost => (NOT_THE_COMMAND, Some(with("the sandbox ended under it", message()))),
    }
}

fn with(what: &str, more: Option<String>) -> String {
    more.map_or_else(|| what.to_owned(), |more| format!("{what}: {more}"))
}

/// A program that is not there is told from one that cannot be run by the words of whoever tried.
fn failed_code(message: &str) -> u8 {
    let lower = message.to_lowercase();
    let missing = ["no such program", "no such file", "not found"];
    if missing.iter().any(|words| lower.contains(words)) { NO_PROGRAM } else { CANNOT_RUN }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An execution that exited with 0.
    pub(in crate::client) fn execution() -> Execution {
        Execution {
            id: "exe_01h2xcejqtf2nbrexx3vqjhp41".parse().unwrap(),
            sandbox: "sbx_01h2xcejqtf2nbrexx3vqjhp41".parse().unwrap(),
            generation: viv_core::Generation(1),
            state: ExecutionState::Exited,
            exit_code: Some(0),
            signal: None,
            message: None,
            cause: Some("exit".to_owned()),
            argv: vec!["sh".to_owned(), "-c".to_owned(), "echo hi".to_owned()],
            cwd: None,
            user: None,
            tty: false,
            detach: false,
            limit_ms: None,
            by: None,
            asked_at_ms: None,
            queued_until_ms: None,
            learnt_at_ms: None,
            started_at_ms: Some(1_000),
            ended_at_ms: Some(3_500),
            output_bytes: 3,
            stdin_bytes: 0,
            pid: None,
        }
    }

    #[test]
    fn x6_each_end_has_an_exit_code_of_its_own() {
        let code = |state, exit_code, signal, message: Option<&str>| {
            let message = message.map(str::to_owned);
            super::exit_code(&Execution { state, exit_code, signal, message, ..execution() }).0
        };
        assert_eq!(code(ExecutionState::Exited, Some(3), None, None), 3);
        assert_eq!(code(ExecutionState::Signalled, None, Some(11), None), 139);
        assert_eq!(code(ExecutionState::OomKilled, None, None, None), 137);
        assert_eq!(code(ExecutionState::Cancelled, None, None, None), 143);
        assert_eq!(code(ExecutionState::TimedOut, None, None, None), 124);
        assert_eq!(code(ExecutionState::Lost, None, None, None), 125);
        assert_eq!(code(ExecutionState::Failed, None, None, Some("No such program: 'x'")), 127);
        assert_eq!(code(ExecutionState::Failed, None, None, Some("program 'x' may not be run")), 126);
    }
}
