//! `viv`: the one binary.
//!
//! Architecture invariant: nothing here starts a thread or an async runtime
//! before the verb is known. `shim` and `oci-run` need a process with one thread.
#![forbid(unsafe_code)]

mod doctor;
mod image;
mod local;
mod place;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Exit code when viv itself failed, not the command that it ran.
const FAILED: u8 = 125;

#[derive(Parser)]
#[command(version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Sandboxes on this machine, without a daemon
    Local(local::Args),
    /// What sandboxes are made of
    Image(image::Args),
    /// What this machine can do, and why it cannot do the rest
    Doctor(doctor::Args),
    /// Hold one instance (started by the local provider, not by hand)
    #[command(hide = true)]
    Shim {
        /// The instance's folder
        folder: PathBuf,
    },
    /// Make and start a container with the embedded OCI runtime (started by a shim)
    #[command(hide = true)]
    OciRun {
        /// Where the runtime keeps its state
        #[arg(long)]
        root: PathBuf,
        /// The OCI bundle
        #[arg(long)]
        bundle: PathBuf,
        /// Where to leave the pid of the first process
        #[arg(long)]
        pid_file: PathBuf,
        /// The container's name
        id: String,
    },
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().verb {
        Verb::Shim { folder } => return viv_sandbox::shim::main(&folder),
        Verb::OciRun { root, bundle, pid_file, id } => {
            viv_sandbox::runtime::run_embedded(&root, &bundle, &pid_file, &id)
                .map(|()| ExitCode::SUCCESS)
                .map_err(anyhow::Error::new)
        }
        Verb::Local(args) => local::run(args),
        Verb::Image(args) => image::run(args),
        Verb::Doctor(args) => doctor::run(args),
    };
    outcome.unwrap_or_else(|error| {
        // A reader that went away, as in `viv … | head`, is not a failure.
        if error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        eprintln!("error: {error:#}");
        ExitCode::from(FAILED)
    })
}
