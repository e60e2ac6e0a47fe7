//! Tries to get out of the sandbox that it runs in, in every way that it knows.
//!
//! ```text
//!   viv-escape [--only name,name …] [--list]
//!   {"name":"mount-tmpfs","tries":"mount a tmpfs","outcome":"refused","detail":"…"}
//! ```
//!
//! A line per attempt: `refused`, `opened` with what shows it, or `missing`
//! where the kernel does not have the thing at all. An error that is not among
//! those expected counts as opened: something was asked of the kernel that
//! should not even have been heard.
//!
//! Every attempt runs in a process of its own, is harmless when it succeeds, and
//! is ended when it hangs. What the suite outside has set up for it comes in
//! the environment: see [`attempt::Setting`].
//!
//! Linked statically, so that it runs in any root filesystem.

mod attempt;
mod attempts;
mod sys;

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::process::ExitCode;

use attempt::{Attempt, Outcome, Setting};
use serde_json::{Value, json};

/// No attempt waits for anything, so this is a hang.
const ATTEMPT_SECONDS: u32 = 20;

/// Errors by which the kernel says that it does not have something.
const MISSING: [i32; 5] =
    [libc::ENOSYS, libc::EAFNOSUPPORT, libc::EPROTONOSUPPORT, libc::ESOCKTNOSUPPORT, libc::ENODEV];

fn main() -> ExitCode {
    // Before anything is opened here.
    let setting = Setting::read();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let chosen: Vec<&Attempt> = match arguments[..] {
        [] => attempts::all().collect(),
        ["--list"] => {
            for attempt in attempts::all() {
                println!("{:<28} {}", attempt.name, attempt.tries);
            }
            return ExitCode::SUCCESS;
        }
        ["--only", names] => {
            let names: Vec<&str> = names.split(',').collect();
            if let Some(unknown) = names.iter().find(|name| attempts::all().all(|attempt| attempt.name != **name)) {
                eprintln!("there is no attempt {unknown:?}; --list tells those that there are");
                return ExitCode::from(2);
            }
            attempts::all().filter(|attempt| names.contains(&attempt.name)).collect()
        }
        [attempts::privileges::WHO] => {
            println!("{}", attempts::privileges::who());
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("usage: viv-escape [--only NAME,NAME … | --list]");
            return ExitCode::from(2);
        }
    };
    for attempt in chosen {
        let (outcome, detail) = carry_out(attempt, &setting).unwrap_or_else(|error| ("opened", error.to_string()));
        let line = json!({ "name": attempt.name, "tries": attempt.tries, "outcome": outcome, "detail": detail });
        // Whoever does not listen any more does not want to hear the rest.
        if writeln!(io::stdout(), "{line}").is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// The outcome in a word, and what shows it.
fn carry_out(attempt: &Attempt, setting: &Setting) -> io::Result<(&'static str, String)> {
    let (mut reader, mut writer) = io::pipe()?;
    let reader_fd = reader.as_raw_fd();
    let end = sys::in_child(|| {
        // A copy that the child holds would be a descriptor that nobody gave it.
        let _ = sys::call!(libc::SYS_close, reader_fd);
        sys::alarm(ATTEMPT_SECONDS);
        let (outcome, detail) = judge(attempt, (attempt.act)(setting));
        // A few hundred bytes fit into a pipe that nobody reads yet.
        let detail: String = detail.chars().take(1000).collect();
        let _ = writer.write_all(json!([outcome, detail]).to_string().as_bytes());
    })?;
    drop(writer);
    let mut said = String::new();
    reader.read_to_string(&mut said)?;
    let said: Value = serde_json::from_str(&said).unwrap_or_default();
    let outcomes = ["refused", "opened", "missing"];
    let outcome = outcomes.into_iter().find(|word| said[0] == *word);
    Ok(match (outcome, said[1].as_str()) {
        (Some(outcome), Some(detail)) => (outcome, detail.to_owned()),
        _ => match end {
            // What a filter does that kills.
            sys::End::Signal { number: libc::SIGSYS, .. } => ("refused", "killed for trying".to_owned()),
            end => ("opened", format!("the attempt ended without a word: {end:?}")),
        },
    })
}

fn judge(attempt: &Attempt, outcome: Outcome) -> (&'static str, String) {
    match outcome {
        Outcome::Refused(why) => ("refused", why),
        Outcome::Opened(evidence) => ("opened", evidence),
        Outcome::Missing(what) => ("missing", what),
        Outcome::Error(error) => match error.raw_os_error() {
            Some(errno) if attempt.refusals.contains(&errno) => ("refused", error.to_string()),
            Some(errno) if MISSING.contains(&errno) => ("missing", error.to_string()),
            _ => ("opened", format!("not refused as expected: {error}")),
        },
    }
}
