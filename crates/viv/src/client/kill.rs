//! `viv kill`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, Signal};
use viv_core::ExecutionId;

use super::Daemon;

/// Signals by name, in the way of `kill`.
const NAMES: &[(&str, u64)] = &[
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ABRT", 6),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("WINCH", 28),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// The command's id
    execution: ExecutionId,
    /// Which signal, by number or name. What it started lives on; `viv cancel` ends all of it
    #[arg(long, short, value_name = "SIGNAL", default_value = "TERM", value_parser = signal)]
    signal: Signal,
}

fn signal(text: &str) -> Result<Signal, String> {
    if let Ok(number) = text.parse() {
        return Signal::new(number).map_err(|error| error.to_string());
    }
    let upper = text.to_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let found = NAMES.iter().find(|(known, _)| *known == name);
    let (_, number) = found.ok_or_else(|| format!("there is no signal {text}; give its number"))?;
    Signal::new(*number).map_err(|error| error.to_string())
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    daemon.sandbox(&args.sandbox).execution(args.execution).signal(args.signal)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x4_signals_have_names_and_numbers() {
        for (text, number) in [("TERM", 15), ("sigkill", 9), ("10", 10), ("Usr2", 12)] {
            assert_eq!(signal(text).unwrap().get(), number);
        }
        for wrong in ["", "SIGNOTHING", "0", "99999"] {
            assert!(signal(wrong).is_err(), "{wrong}");
        }
    }
}
