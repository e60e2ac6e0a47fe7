//! `viv`: the one binary.
//!
//! Architecture invariant: nothing here starts a thread or an async runtime
//! before the verb is known. `shim`, `oci-run` and the probes need a process with one thread.
#![forbid(unsafe_code)]

mod chaos;
mod client;
mod doctor;
mod fail;
mod image;
mod inside;
mod local;
mod mcp;
mod page;
mod place;
mod serve;
mod settings;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use settings::Global;

/// What it was built from, where that is known.
const COMMIT: &str = match option_env!("VIV_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

#[derive(Parser)]
#[command(name = "viv", version, about, max_term_width = 100, after_help = "`viv help exit-codes` lists exit codes.")]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(flatten)]
    Client(Box<client::Verb>),
    /// Run the daemon
    Serve(serve::Args),
    /// Sandboxes on this machine, without a daemon
    Local(local::Args),
    /// What sandboxes are made of
    Image(image::Args),
    /// What this machine can do, and why it cannot do the rest
    Doctor(doctor::Args),
    /// Serve sandboxes as tools of the Model Context Protocol, over standard input and output
    Mcp(mcp::Args),
    Chaos(chaos::Args),
    /// Write completions for a shell to standard output
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// What exit codes mean
    #[command(hide = true, long_about = fail::TABLE)]
    ExitCodes,
    /// Run a command as who owns the files of your sandboxes (for root: as ever)
    ///
    /// An ordinary user's sandboxes have files of ids that were given to that user, and cannot be looked at or removed
    /// without them.
    Unshare {
        /// Program and arguments; a shell when there are none
        #[arg(trailing_var_arg = true)]
        command: Vec<std::ffi::OsString>,
    },
    /// Hold one instance (started by the local provider, not by hand)
    #[command(hide = true)]
    Shim {
        /// The instance's folder
        folder: PathBuf,
    },
    /// Try whether sandboxes can be connected here (started by the local provider)
    #[command(hide = true)]
    NetProbe {
        /// Whose its processes are to be
        id: u32,
        /// Where what is said about it goes
        log: PathBuf,
    },
    /// Try whether a CRIU works here (started by the local provider)
    #[command(hide = true)]
    CriuProbe {
        /// Which one
        criu: PathBuf,
        /// An empty folder to try it in
        folder: PathBuf,
        /// Whether it has mounts of its own already
        #[arg(long)]
        entered: bool,
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
    inside::hand_over();
    let Cli { global, verb } = Cli::parse();
    let outcome = match verb {
        Verb::Client(verb) => return client::run(*verb, &global),
        Verb::Mcp(args) => return mcp::run(&args, &global),
        Verb::Shim { folder } => return viv_sandbox::shim::main(&folder),
        Verb::NetProbe { id, log } => return viv_sandbox::network::probe::main(id, &log),
        Verb::CriuProbe { criu, folder, entered } => {
            return viv_sandbox::checkpoint::probe::main(&criu, &folder, entered);
        }
        Verb::OciRun { root, bundle, pid_file, id } => {
            viv_sandbox::runtime::run_embedded(&root, &bundle, &pid_file, &id)
                .map(|()| ExitCode::SUCCESS)
                .map_err(anyhow::Error::new)
        }
        Verb::Serve(args) => entered().and_then(|()| serve::run(args, &global)),
        Verb::Local(args) => entered().and_then(|()| local::run(args, &global)),
        Verb::Image(args) => entered().and_then(|()| image::run(args, &global)),
        Verb::Chaos(args) => entered().and_then(|()| chaos::run(&args, &global)),
        Verb::Doctor(args) => doctor::run(args, &global),
        Verb::Completions { shell } => page::completions(shell),
        Verb::ExitCodes => text::say(fail::TABLE),
        Verb::Unshare { command } => entered().and_then(|()| unshare(command)),
    };
    outcome.unwrap_or_else(|error| ExitCode::from(fail::report(&error, fail::NOT_THE_COMMAND)))
}

/// Where an ordinary user is root: see `viv_sandbox::ordinary`.
fn entered() -> anyhow::Result<()> {
    place::enter()?;
    Ok(())
}

fn unshare(mut command: Vec<std::ffi::OsString>) -> anyhow::Result<ExitCode> {
    use anyhow::Context;
    use std::os::unix::process::CommandExt;
    if command.is_empty() {
        command.push(std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into()));
    }
    let program = command.remove(0);
    let error = std::process::Command::new(&program).args(command).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}
