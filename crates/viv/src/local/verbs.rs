//! What each verb does.

use std::io::{self, Write};
use std::process::ExitCode;

use tokio::signal::unix::{Signal, SignalKind, signal};
use viv_core::exec::{ExecSpec, ExecState, OutputEvent, Stream};
use viv_core::{ExecutionId, Generation, SandboxId};
use viv_provider::{DeadlineChange, Egress, Image, InstanceRef, InstanceSpec, PageRequest, Provider};

use super::{ByHand, EgressArg, NewArgs, Verb, fresh_bytes, mutation};
use crate::text::say;

impl ByHand {
    pub(super) async fn run(&self, verb: Verb) -> anyhow::Result<ExitCode> {
        match verb {
            Verb::Run { new, keep, command } => self.run_once(new, keep, command).await,
            Verb::Create { new } => {
                let instance = self.create(new).await?;
                say(&instance.sandbox)
            }
            Verb::Exec { detach, sandbox, command } => {
                let generation = self.generation(&sandbox).await?;
                let instance = InstanceRef { sandbox, generation };
                let execution = self.start(&instance, command).await?;
                if detach { say(&execution) } else { self.show(&instance, &execution, 0, true).await }
            }
            Verb::Logs { sandbox, execution, offset, follow } => {
                let generation = self.generation(&sandbox).await?;
                self.show(&InstanceRef { sandbox, generation }, &execution, offset, follow).await
            }
            Verb::Ls => self.list(self.json).await,
            Verb::Extend { sandbox, seconds } => {
                let mutation = mutation(self.generation(&sandbox).await?);
                let change = DeadlineChange::AtLeastMs(seconds.saturating_mul(1000));
                let deadline = self.provider.extend(&mutation, &sandbox, change).await?;
                say(format_args!("ends in {} s", deadline.remaining_ms / 1000))
            }
            Verb::Inspect { sandbox } => self.inspect(sandbox, self.json).await,
            Verb::Limit { sandbox, limits } => self.limit(sandbox, limits, self.json).await,
            Verb::Save { sandbox, live, memory } => self.save(sandbox, live, memory).await,
            Verb::Snapshots => self.list_snapshots(self.json).await,
            Verb::Restore { snapshot, new } => self.restore(&snapshot, new).await,
            Verb::Fork { sandbox, new } => self.fork(sandbox, new).await,
            Verb::Rollback { sandbox, snapshot, new } => self.rollback(&sandbox, &snapshot, new).await,
            Verb::Drop { snapshots } => self.drop_snapshots(snapshots).await,
            Verb::Export { snapshot, path } => self.export(&snapshot, &path),
            Verb::Import { path } => self.import(&path),
            Verb::Disk { sandbox } => self.disk(sandbox, self.json).await,
            Verb::Image(_) => unreachable!("needs no runtime, and was done before"),
            Verb::Rm { sandboxes } => {
                for sandbox in sandboxes {
                    let generation = self.generation(&sandbox).await?;
                    self.provider.destroy(&mutation(generation), &sandbox).await?;
                    say(&sandbox)?;
                }
                Ok(ExitCode::SUCCESS)
            }
        }
    }

    async fn run_once(&self, new: NewArgs, keep: bool, command: Vec<String>) -> anyhow::Result<ExitCode> {
        // From here on an interrupt ends nothing by itself: what is being made is finished, and then removed.
        let mut interrupts = Interrupts::catch()?;
        let instance = self.create(new).await?;
        if keep {
            eprintln!("sandbox: {}", instance.sandbox);
        }
        let work = async {
            let execution = self.start(&instance, command).await?;
            if keep {
                eprintln!("execution: {execution}");
            }
            self.show(&instance, &execution, 0, true).await
        };
        // Whoever interrupts us does not want the sandbox any more, unless it was to be kept.
        let outcome = tokio::select! {
            outcome = work => outcome,
            () = interrupts.next() => Ok(ExitCode::from(INTERRUPTED)),
        };
        if !keep {
            self.provider.destroy(&mutation(instance.generation), &instance.sandbox).await?;
        }
        outcome
    }

    async fn create(&self, new: NewArgs) -> anyhow::Result<InstanceRef> {
        let spec = spec(new);
        let sandbox = SandboxId::from_bytes(fresh_bytes());
        let seen = self.provider.create(&mutation(Generation::FIRST), &sandbox, &self.owner, &spec).await?;
        Ok(seen.instance)
    }

    async fn start(&self, instance: &InstanceRef, argv: Vec<String>) -> anyhow::Result<ExecutionId> {
        let execution = ExecutionId::from_bytes(fresh_bytes());
        let spec = ExecSpec { argv, ..ExecSpec::default() };
        self.provider.execute(&mutation(instance.generation), &instance.sandbox, &execution, &spec).await?;
        Ok(execution)
    }

    /// Passes output on, and answers with the command's own exit code.
    async fn show(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        follow: bool,
    ) -> anyhow::Result<ExitCode> {
        let mut output = self.provider.attach(instance, execution, offset, follow).await?;
        while let Some(event) = output.next().await? {
            match event {
                OutputEvent::Chunk { stream: Stream::Stdout, data, .. } => io::stdout().write_all(&data)?,
                OutputEvent::Chunk { stream: Stream::Stderr, data, .. } => {
                    io::stdout().flush()?;
                    io::stderr().write_all(&data)?;
                }
                OutputEvent::Cut { from, to } => eprintln!("[{} bytes were not kept]", to - from),
                OutputEvent::End(status) => {
                    io::stdout().flush()?;
                    return Ok(ended(&status.state));
                }
            }
        }
        anyhow::bail!("the output of {execution} ended without a word")
    }

    async fn list(&self, json: bool) -> anyhow::Result<ExitCode> {
        let mut cursor = None;
        let mut out = io::stdout().lock();
        loop {
            let page = self.provider.list(&self.owner, PageRequest { cursor, limit: None }).await?;
            for item in &page.items {
                if json {
                    writeln!(out, "{}", serde_json::to_string(item)?)?;
                } else {
                    writeln!(out, "{}  {:>3}  {}", item.instance.sandbox, item.instance.generation, item.state)?;
                }
            }
            for unreadable in &page.unreadable {
                eprintln!("not listed: {unreadable}");
            }
            cursor = page.next;
            if cursor.is_none() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
}

/// Exit code after an interrupt, in the way of shells.
const INTERRUPTED: u8 = 130;

/// Requests to stop, remembered from the moment that they are caught.
struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    fn catch() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

pub(super) fn spec(new: NewArgs) -> InstanceSpec {
    let mut spec = InstanceSpec::host(new.lifetime.saturating_mul(1000));
    spec.image = match new.image {
        None => Image::Host,
        Some(name) if name == "host" => Image::Host,
        Some(path) if path.starts_with(['/', '.']) => {
            let absolute = std::path::absolute(&path).map_or(path, |path| path.to_string_lossy().into_owned());
            Image::Directory { path: absolute }
        }
        Some(name) => Image::Named { name },
    };
    spec.limits = new.limits.into();
    spec.network.egress = match new.egress {
        EgressArg::None => Egress::None,
        EgressArg::All => Egress::All,
    };
    spec.packages = new.packages;
    spec
}

/// The command's exit code, in the way of shells: 128 and the signal for a death by signal.
fn ended(state: &ExecState) -> ExitCode {
    let (code, why) = match state {
        ExecState::Running | ExecState::Suspended => (0, None),
        ExecState::Exited { code } => (*code as u8, None),
        ExecState::Signalled { signal } => (128_u8.wrapping_add(*signal as u8), None),
        ExecState::OomKilled => (137, Some("it was killed for memory".to_owned())),
        ExecState::Failed { what } => (127, Some(what.clone())),
        ExecState::Cancelled => (143, Some("it was cancelled".to_owned())),
        ExecState::TimedOut => (124, Some("its time limit passed".to_owned())),
        ExecState::Lost { cause } => (crate::fail::NOT_THE_COMMAND, Some(format!("the sandbox ended: {cause}"))),
    };
    if let Some(why) = why {
        eprintln!("viv: {why}");
    }
    ExitCode::from(code)
}
