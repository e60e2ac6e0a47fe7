//! `viv exec`

use std::process::ExitCode;

use viv_api::bound::{
    Argument, Argv, CommandEnv, ExecutionMs, GenerationNumber, Path, QueueMs, RunningMax, SandboxRef, UserName,
};
use viv_api::execution::{StartExecution, TimeLimit};

use super::Daemon;
use super::interrupt::{Interrupts, Policy};
use super::new::{fresh_key, variables, wrong};
use super::session::{self, Begin, How};
use super::terminal;
use crate::text::parse_span;

/// How no time limit is said.
const NO_LIMIT: &str = "none";

/// A command and how it is to run.
#[derive(clap::Args)]
pub(super) struct CommandArgs {
    /// Where it starts; the sandbox's working directory when not said
    #[arg(long, value_name = "PATH")]
    cwd: Option<Path>,
    /// As whom; root of the sandbox when not said
    #[arg(long, short, value_name = "USER[:GROUP]")]
    user: Option<UserName>,
    /// End it after this long, or `none`; 5 minutes when not said, on a terminal no limit
    #[arg(long, value_name = "SPAN", value_parser = time_limit)]
    timeout: Option<TimeLimit>,
    /// Program and arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl CommandArgs {
    /// As the API takes it.
    pub(super) fn request(self, stdin: bool, tty: bool) -> anyhow::Result<StartExecution> {
        let words = self.command.into_iter().map(Argument::new).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
        let mut request = StartExecution::new(Argv::new(words).map_err(wrong)?);
        request.cwd = self.cwd;
        request.user = self.user;
        request.stdin = stdin;
        request.tty = tty.then(terminal::size);
        // Who sits at a terminal ends it herself.
        request.limit_ms = self.timeout.or(tty.then_some(TimeLimit::NONE));
        Ok(request)
    }
}

fn time_limit(text: &str) -> Result<TimeLimit, String> {
    if text == NO_LIMIT {
        return Ok(TimeLimit::NONE);
    }
    ExecutionMs::new(parse_span(text)?).map(TimeLimit::Ms).map_err(|error| error.to_string())
}

fn queue(text: &str) -> Result<QueueMs, String> {
    QueueMs::new(parse_span(text)?).map_err(|error| error.to_string())
}

/// Run a command in a sandbox
///
/// A connection that breaks is made again, and no output is lost or shown twice. Ctrl-C goes to the command; a second one
/// leaves it. When whoever reads the output goes away, the command is cancelled.
#[derive(clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own on the command line")]
pub(crate) struct Args {
    /// Pass standard input in
    #[arg(long, short, conflicts_with = "detach")]
    interactive: bool,
    /// Run on a terminal; this passes standard input in too
    #[arg(long, short, conflicts_with = "detach")]
    tty: bool,
    /// Start it, say its id, and leave it running: a service, whose running is not activity
    #[arg(long, short)]
    detach: bool,
    /// Added to the sandbox's environment: NAME=VALUE, or NAME for the value that it has here
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Resume the sandbox if it is frozen or hibernated
    #[arg(long)]
    wake: bool,
    /// Wait up to this long for the sandbox to be ready, and for a place in it
    #[arg(long, value_name = "SPAN", value_parser = queue, conflicts_with_all = ["interactive", "tty"])]
    queue: Option<QueueMs>,
    /// With --queue: start it only when fewer than this many run in the foreground
    #[arg(long, value_name = "N", requires = "queue")]
    running_max: Option<RunningMax>,
    /// The generation that is meant; another one is refused
    #[arg(long, value_name = "N")]
    generation: Option<GenerationNumber>,
    /// Id or name
    sandbox: SandboxRef,
    #[command(flatten)]
    command: CommandArgs,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let stdin = args.interactive || args.tty;
    let mut request = args.command.request(stdin, args.tty)?;
    request.env = CommandEnv::new(variables(&args.env)?).map_err(wrong)?;
    request.wake = args.wake;
    request.queue_ms = args.queue;
    request.running_max = args.running_max;
    request.detach = args.detach;
    // A service has no time limit unless one is named.
    if args.detach {
        request.limit_ms = request.limit_ms.or(Some(TimeLimit::NONE));
    }
    let mut handle = daemon.sandbox(&args.sandbox);
    if let Some(generation) = args.generation {
        handle = handle.at(generation.into());
    }
    if args.detach {
        let execution = handle.start(&request, Some(&fresh_key()?))?;
        return daemon.answer(&execution, || execution.id.to_string());
    }
    let interrupts = Interrupts::catch(&daemon.client, Policy::Pass)?;
    let execution = handle.start(&request, Some(&fresh_key()?))?;
    let how = How { begin: Begin::Offset(0), since: None, follow: true, stdin, tty: args.tty, ours: true };
    session::stay(daemon, &execution, &how, Some(&interrupts)).map(session::exit)
}
