//! `viv local`: the local provider by hand, without a daemon.
//!
//! For a first look, for scripts on one machine, and for looking under the
//! daemon's feet. It takes part in no lease: its token is always the lowest, so
//! a daemon that manages a sandbox keeps this out.

mod verbs;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Subcommand;
use viv_core::{ExecutionId, FencingToken, Generation, OperationId, OwnerMark, SandboxId};
use viv_provider::Mutation;
use viv_sandbox::{LocalConfig, LocalProvider, Runtime};

/// Whose sandboxes made by hand are.
const OWNER: &str = "by-hand";

/// How long a verb waits for the provider.
const BUDGET_MS: u64 = 30_000;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where sandboxes are kept
    #[arg(long, env = "VIV_DATA_DIR", default_value = "/var/lib/vivarium", global = true)]
    data: PathBuf,
    /// Name of our cgroup
    #[arg(long, env = "VIV_CGROUP_PREFIX", default_value = "vivarium", global = true, hide = true)]
    cgroup_prefix: String,
    /// OCI runtime binary to use instead of the embedded one, such as runc
    #[arg(long, env = "VIV_RUNTIME", global = true)]
    runtime: Option<PathBuf>,
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
    Ls {
        /// For programs: one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Move a sandbox's hard deadline away
    Extend {
        sandbox: SandboxId,
        /// Seconds from now
        seconds: u64,
    },
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
    /// A folder that holds a root filesystem, instead of this machine's own userland
    #[arg(long)]
    image: Option<String>,
    /// Limit of memory in MiB
    #[arg(long)]
    memory: Option<u64>,
    /// Limit of processes
    #[arg(long)]
    processes: Option<u64>,
    /// Limit of processors, such as 0.5
    #[arg(long)]
    cpus: Option<f64>,
}

/// Runs a verb on an async runtime of its own.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let this = std::env::current_exe().context("cannot find my own binary")?;
    let mut config = LocalConfig::new(args.data, this);
    config.cgroup_prefix = args.cgroup_prefix;
    if let Some(binary) = args.runtime {
        config.runtime = Runtime::Binary(binary);
    }
    let local = ByHand { provider: LocalProvider::open(config)?, owner: OWNER.parse()? };
    runtime.block_on(local.run(args.verb))
}

struct ByHand {
    provider: LocalProvider,
    owner: OwnerMark,
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
