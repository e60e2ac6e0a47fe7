//! `viv local`: the local provider by hand, without a daemon.
//!
//! For a first look, for scripts on one machine, and for looking under the
//! daemon's feet. It takes part in no lease: its token is always the lowest, so
//! a daemon that manages a sandbox keeps this out.

pub(crate) mod limits;
mod saved;
mod verbs;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use viv_core::{ExecutionId, FencingToken, Generation, OperationId, OwnerMark, SandboxId, SnapshotId};
use viv_provider::{Mutation, ProviderError};
use viv_sandbox::LocalProvider;

use crate::place::{OWNER, Place};
use crate::settings::Global;
use limits::LimitArgs;

/// How long a verb waits for the provider.
const BUDGET_MS: u64 = 30_000;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run a command in a new sandbox, and remove the sandbox afterwards
    Run {
        #[command(flatten)]
        new: NewArgs,
        /// Leave the sandbox, and say its name on standard error
        #[arg(long)]
        keep: bool,
        /// Program and arguments
        #[arg(required = true, trailing_var_arg = true)]
        command: Vec<String>,
    },
    /// Make a sandbox and say its name
    Create {
        #[command(flatten)]
        new: NewArgs,
    },
    /// Run a command in a sandbox
    Exec {
        /// Start it, say its name, and leave it running
        #[arg(long)]
        detach: bool,
        sandbox: SandboxId,
        /// Program and arguments
        #[arg(required = true, trailing_var_arg = true)]
        command: Vec<String>,
    },
    /// Show the output of a command, also of one that ended
    Logs {
        sandbox: SandboxId,
        execution: ExecutionId,
        /// Start at this byte
        #[arg(long, default_value_t = 0)]
        offset: u64,
        /// Go on until the command ends, and end with its exit code
        #[arg(long, short)]
        follow: bool,
    },
    /// List sandboxes
    Ls,
    /// Show a sandbox: its state, deadline, limits and use, and what it has to do without on this machine
    Inspect { sandbox: SandboxId },
    /// Move a sandbox's hard deadline away
    Extend {
        sandbox: SandboxId,
        /// Seconds from now
        seconds: u64,
    },
    /// Change limits of a sandbox while it runs, and show those in force
    Limit {
        sandbox: SandboxId,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// End a sandbox and save its files, or save those of a running one
    Save {
        sandbox: SandboxId,
        /// Let it run on
        #[arg(long)]
        live: bool,
        /// Save what runs in it too, to run on when it is restored; without CRIU, or when that fails, its files alone
        #[arg(long, conflicts_with = "live")]
        memory: bool,
    },
    /// List snapshots
    Snapshots,
    /// Make a sandbox from a snapshot and say its name
    Restore {
        snapshot: SnapshotId,
        #[command(flatten)]
        new: NewArgs,
    },
    /// Make a sandbox from a running one, which runs on
    Fork {
        sandbox: SandboxId,
        #[command(flatten)]
        new: NewArgs,
    },
    /// Have a sandbox be again what it was in a snapshot, under its name
    Rollback {
        sandbox: SandboxId,
        snapshot: SnapshotId,
        #[command(flatten)]
        new: NewArgs,
    },
    /// Remove snapshots, and what nothing else needs of them
    Drop {
        #[arg(required = true)]
        snapshots: Vec<SnapshotId>,
    },
    /// Write a snapshot to one file, for another machine
    Export { snapshot: SnapshotId, path: PathBuf },
    /// Read a snapshot that was exported, and say its name
    Import { path: PathBuf },
    /// Show what a sandbox has on disk
    Disk { sandbox: SandboxId },
    /// What sandboxes made by hand are made of; the same as `viv image`, which is for the daemon's
    Image(crate::image::ByHand),
    /// End sandboxes and remove every trace of them
    Rm {
        #[arg(required = true)]
        sandboxes: Vec<SandboxId>,
    },
}

#[derive(clap::Args)]
struct NewArgs {
    /// End the sandbox after this many seconds, whatever happens
    #[arg(long, default_value_t = 3600)]
    lifetime: u64,
    /// `host` for this machine's own userland, an image's name, or a folder that holds a root filesystem
    #[arg(long)]
    image: Option<String>,
    #[command(flatten)]
    limits: LimitArgs,
    /// Whom those inside may talk to
    #[arg(long, value_enum, default_value_t = EgressArg::None)]
    egress: EgressArg,
    /// Let commands of root install packages: change owners of files, and become other users
    #[arg(long)]
    packages: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum EgressArg {
    /// Nobody: there is only a loopback interface
    None,
    /// The internet; no private networks, and not this machine
    All,
}

/// Runs a verb on an async runtime of its own.
pub(crate) fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let provider = args.place.open(global.by_hand()?)?;
    let verb = match args.verb {
        Verb::Image(image) => return crate::image::run_by_hand(&provider, image, global.json),
        verb => verb,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = ByHand { provider, owner: OWNER.parse()?, json: global.json };
    runtime.block_on(local.run(verb)).map_err(with_hint)
}

struct ByHand {
    provider: LocalProvider,
    owner: OwnerMark,
    json: bool,
}

impl ByHand {
    /// The generation that a sandbox is at.
    async fn generation(&self, sandbox: &SandboxId) -> anyhow::Result<Generation> {
        let found = self.provider.generation(sandbox).await?;
        found.with_context(|| format!("there is no sandbox {sandbox}\nhint: `viv local ls` lists them"))
    }
}

fn mutation(generation: Generation) -> Mutation {
    let operation = OperationId::from_bytes(fresh_bytes());
    Mutation { operation, generation, token: FencingToken(0), budget_ms: BUDGET_MS }
}

/// Bytes for an id: the time in front, so that ids sort by age, and chance behind.
fn fresh_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .expect("the kernel gives random bytes");
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    bytes[..6].copy_from_slice(&now_ms.to_be_bytes()[2..]);
    bytes
}

/// What the library knows to say about an error is shown below it.
fn with_hint(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<ProviderError>() {
        Some(ProviderError::Invalid { hint, .. }) => anyhow::anyhow!("{error:#}\nhint: {hint}"),
        Some(ProviderError::NotFound { what }) if what.starts_with("image ") => {
            anyhow::anyhow!("{error:#}\nhint: `viv local image ls` lists images; a folder is named by its path")
        }
        Some(_) | None => crate::image::with_hint_by_hand(error),
    }
}
