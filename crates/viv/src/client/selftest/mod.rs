//! `viv selftest`: the control experiment. A sandbox goes through its whole life, and everything that is said about it
//! on the way is checked against what a command, a listing and the machine itself say.
//!
//! ```text
//!   round.rs     what is done, and what must be so then
//!   verbs.rs     how each thing is asked for, until it is done
//!   patient.rs   who asks: once, or again when the daemon went away meanwhile
//!   left.rs      what was there, and whether anything of it still is
//! ```
//!
//! It uses the API as any client does: nothing here knows more than a key allows.

mod left;
mod patient;
mod round;
mod verbs;

use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;
use viv_api::client::Client;

pub(crate) use self::patient::Patient;
use super::{print, print_json};
use crate::fail::{FAILED, Failure, OK};
use crate::settings::Global;
use crate::text::span;

/// Make a sandbox, take it through its whole life, and check everything on the way
///
/// Create, copy a file in, see it by a command and by a listing, freeze, thaw, snapshot, hibernate, resume, see the
/// file again, fork, roll back, delete, and prove that nothing is left. A line for each step with its time. Ends with 1
/// when something was not as it should be.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often
    #[arg(long, value_name = "N", default_value = "1")]
    rounds: NonZeroU32,
    /// The provider that is meant; refused when the daemon has another
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Ask again when the daemon goes away in the middle, up to two minutes a time
    #[arg(long)]
    patient: bool,
    /// Leave the sandboxes of a round that failed, to be looked at
    #[arg(long)]
    keep: bool,
}

/// One step, as it is told.
#[derive(Debug, Serialize)]
struct Told<'a> {
    round: u32,
    step: &'a str,
    ok: bool,
    took_ms: u64,
    /// What was seen, or what was wrong.
    message: &'a str,
}

/// All of it.
#[derive(Debug, Serialize)]
struct Verdict {
    ok: bool,
    rounds: u32,
    steps: u32,
    took_ms: u64,
}

/// Tells what happens as it happens.
struct Telling {
    json: bool,
    round: u32,
    steps: u32,
}

impl Telling {
    /// Does a step, tells how it went, and passes on what came of it.
    fn step<T>(&mut self, name: &str, step: impl FnOnce() -> anyhow::Result<(T, String)>) -> anyhow::Result<T> {
        let began = Instant::now();
        let done = step();
        let took = began.elapsed();
        self.steps += 1;
        let message = match &done {
            Ok((_, seen)) => seen.clone(),
            Err(error) => format!("{error:#}"),
        };
        self.tell(&Told { round: self.round, step: name, ok: done.is_ok(), took_ms: ms(took), message: &message })?;
        done.map(|(value, _)| value)
    }

    fn tell(&self, told: &Told<'_>) -> anyhow::Result<()> {
        if self.json {
            print_json(told)?;
            return Ok(());
        }
        let word = if told.ok { "ok" } else { "FAILED" };
        let line = format!("{:<16} {word:<7} {:>7}  {}", told.step, span(told.took_ms.max(1)), told.message);
        print(line.trim_end())?;
        Ok(())
    }
}

fn ms(time: Duration) -> u64 {
    time.as_millis() as u64
}

pub(super) fn run(args: &Args, global: &Global) -> anyhow::Result<ExitCode> {
    let patient = Patient::new(global, args.patient)?;
    check_provider(&patient, args.provider.as_deref())?;
    let began = Instant::now();
    let mut telling = Telling { json: global.json, round: 0, steps: 0 };
    let mut failed = None;
    for round in 1..=args.rounds.get() {
        telling.round = round;
        if !global.json && args.rounds.get() > 1 {
            print(&format!("round {round} of {}", args.rounds))?;
        }
        let mut round = round::Round::new(&patient)?;
        if let Err(error) = round.run(&mut telling) {
            round.leave(args.keep);
            failed = Some(error);
            break;
        }
    }
    let verdict =
        Verdict { ok: failed.is_none(), rounds: telling.round, steps: telling.steps, took_ms: ms(began.elapsed()) };
    if global.json {
        print_json(&verdict)?;
    }
    match failed {
        Some(error) if crate::fail::is_broken_pipe(&error) => Err(error),
        // It was told with its step; the code is what is left to say.
        Some(_) => Ok(ExitCode::from(FAILED)),
        None if global.json => Ok(ExitCode::from(OK)),
        None => print(&format!(
            "all is well: {} steps in {} {}, {}",
            verdict.steps,
            verdict.rounds,
            if verdict.rounds == 1 { "round" } else { "rounds" },
            span(verdict.took_ms),
        )),
    }
}

/// Refuses to test something else than was meant.
fn check_provider(patient: &Patient<'_>, wanted: Option<&str>) -> anyhow::Result<()> {
    let found = patient.ask(Client::version)?.provider;
    match wanted {
        Some(wanted) if wanted != found => {
            let message = format!("this daemon makes its sandboxes with the provider {found:?}, not with {wanted:?}");
            Err(Failure::usage(message).hint("leave --provider away, or name another daemon with --url").into())
        }
        Some(_) | None => Ok(()),
    }
}
