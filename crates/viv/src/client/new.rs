//! What a new sandbox is to be: options that `create` and `run` share.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::ValueEnum;
use viv_api::bound::{
    BoundError, Env, EnvName, IdempotencyKey, IdleMs, ImageName, LabelFilter, Labels, LifetimeMs, Path, Port, Ports,
    SandboxName, Services, SnapshotRef, SnapshotsAgeMs, SnapshotsMax, WaitMs,
};
use viv_api::client::{Change, ClientError};
use viv_api::sandbox::{CreatePolicy, CreateSandbox, Egress, Hibernate, Network, Sandbox, Status};
use viv_api::service::Hooks;

use super::progress::Waiting;
use super::{Daemon, spec};
use crate::fail::{FAILED, Failure};
use crate::local::limits::LimitArgs;
use crate::text::{parse_span, span};

/// How long making a sandbox is waited for, unless it is said: far longer than it takes.
const WAIT_MS: u64 = 60_000;

#[derive(clap::Args)]
pub(super) struct NewArgs {
    /// Its name; a named sandbox is persistent unless said otherwise
    #[arg(long)]
    name: Option<SandboxName>,
    /// `host` for the machine's own userland, or an image's name [default: host]
    #[arg(long)]
    image: Option<ImageName>,
    /// A snapshot that it begins with, instead of with an image
    #[arg(long, value_name = "ID", conflicts_with = "image")]
    snapshot: Option<SnapshotRef>,
    /// A label; `agent` says which kind of agent uses it, and is shown in lists
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<LabelFilter>,
    /// Environment of every command in it: NAME=VALUE, or NAME for the value that it has here
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Where commands start; made if it is not there
    #[arg(long, value_name = "PATH")]
    workdir: Option<Path>,
    /// Whom those inside may talk to [default: none]
    #[arg(long, value_enum)]
    egress: Option<EgressArg>,
    /// Let commands of root install packages: change owners of files, and become other users
    #[arg(long)]
    packages: bool,
    /// A port that must answer before it is ready
    #[arg(long, value_name = "PORT")]
    port: Vec<Port>,
    /// A long-running command, run by a shell, that must be ready before the sandbox is
    #[arg(long, value_name = "NAME=COMMAND")]
    service: Vec<String>,
    /// What shows that a service is ready: a port that accepts, or a command that exits with 0
    #[arg(long, value_name = "NAME=PORT|COMMAND")]
    ready: Vec<String>,
    /// A file with the body of a create, as JSON, or as TOML if it is called so; options go over it
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Time to its hard deadline, such as 30m or 8h; an hour when not said
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    lifetime: Option<u64>,
    /// Time without activity after which it is frozen; 15 minutes when not said
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    idle: Option<u64>,
    /// Time frozen after which it is saved, or ends if it is not persistent; 15 minutes when not said
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    hibernate: Option<u64>,
    /// Save its memory too when it hibernates, where that can be: what runs goes on when it is resumed
    #[arg(long)]
    keep_memory: bool,
    /// How many snapshots that were asked for are kept of it; all when not said
    #[arg(long, value_name = "COUNT")]
    snapshots_max: Option<SnapshotsMax>,
    /// How long snapshots that were asked for are kept of it; for ever when not said
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    snapshots_age: Option<u64>,
    #[command(flatten)]
    limits: LimitArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum EgressArg {
    /// Nobody: there is only a loopback interface
    None,
    /// The internet; no private networks, and not the machine
    All,
}

impl NewArgs {
    /// As the API takes it.
    pub(super) fn request(self, persistent: Option<bool>, wait_ms: Option<u64>) -> anyhow::Result<CreateSandbox> {
        let labels: BTreeMap<_, _> = self.label.into_iter().map(|label| (label.key, label.value)).collect();
        let policy = CreatePolicy {
            persistent,
            lifetime_ms: self.lifetime.map(LifetimeMs::new).transpose().map_err(wrong_span)?,
            idle_ms: self.idle.map(IdleMs::new).transpose().map_err(wrong_span)?,
            hibernate_ms: self.hibernate.map(IdleMs::new).transpose().map_err(wrong_span)?,
            hibernate: self.keep_memory.then_some(Hibernate::Memory),
            snapshots_max: self.snapshots_max,
            snapshots_age_ms: self.snapshots_age.map(SnapshotsAgeMs::new).transpose().map_err(wrong_span)?,
        };
        let file = self.spec.as_deref().map(spec::read).transpose()?;
        // What is not said must not go over what a file says.
        let (image_said, egress_said) = (self.image.is_some(), self.egress.is_some());
        let request = CreateSandbox {
            name: self.name,
            image: self.image.unwrap_or_default(),
            snapshot: self.snapshot,
            labels: Labels::new(labels).map_err(wrong)?,
            env: Env::new(variables(&self.env)?).map_err(wrong)?,
            workdir: self.workdir,
            limits: self.limits.try_into().map_err(wrong)?,
            network: Network {
                egress: match self.egress {
                    None | Some(EgressArg::None) => Egress::None,
                    Some(EgressArg::All) => Egress::All,
                },
            },
            packages: self.packages,
            ports: Ports::new(self.port).map_err(wrong)?,
            services: Services::new(spec::services(&self.service, &self.ready)?).map_err(wrong)?,
            hooks: Hooks::default(),
            policy,
            wait_ms: wait_ms.map(WaitMs::new).transpose().map_err(wrong)?,
        };
        let mut request = match (file, &self.spec) {
            (Some(mut file), Some(path)) => {
                let fields = file.as_object_mut();
                let (image, egress) = fields
                    .map_or((None, None), |fields| (fields.get("image").cloned(), fields.get("network").cloned()));
                let mut all = spec::over(file, &request, path)?;
                // What is not said on the command line is as the file says it.
                if let (Some(image), false) = (image, image_said) {
                    all.image = serde_json::from_value(image)?;
                }
                if let (Some(network), false) = (egress, egress_said) {
                    all.network = serde_json::from_value(network)?;
                }
                all
            }
            (_, _) => request,
        };
        request.wait_ms = request.wait_ms.or(Some(WaitMs::new(WAIT_MS).map_err(wrong)?));
        Ok(request)
    }
}

/// What breaks a bound is a mistake on the command line.
#[expect(clippy::needless_pass_by_value, reason = "this is what map_err calls")]
pub(crate) fn wrong(error: BoundError) -> Failure {
    Failure::usage(error.to_string())
}

/// The same for a span of time, which is bounded in milliseconds and was written otherwise.
pub(crate) fn wrong_span(error: BoundError) -> Failure {
    let BoundError::Range { what, min, max } = error else { return wrong(error) };
    let what = what.strip_suffix(" in milliseconds").unwrap_or(what);
    Failure::usage(format!("{what} must be from {} to {}", span(min), span(max)))
        .hint("write it like 90s, 5m, 1h30m or 2d")
}

/// Variables: `NAME=VALUE`, or `NAME` for the value that it has here, which keeps it out of the list of processes.
pub(super) fn variables<V>(words: &[String]) -> Result<BTreeMap<EnvName, V>, Failure>
where
    V: TryFrom<String, Error = BoundError>,
{
    let mut all = BTreeMap::new();
    for word in words {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, value.to_owned()),
            None => (word.as_str(), here(word)?),
        };
        all.insert(EnvName::new(name).map_err(wrong)?, V::try_from(value).map_err(wrong)?);
    }
    Ok(all)
}

/// The value that a variable has here.
fn here(name: &str) -> Result<String, Failure> {
    let missing = |_| {
        let message = format!("there is no variable {name} here that could be passed on");
        Failure::usage(message).hint("write --env NAME=VALUE")
    };
    std::env::var(name).map_err(missing)
}

/// Makes it.
pub(super) fn make(daemon: &Daemon, request: &CreateSandbox, key: Option<IdempotencyKey>) -> anyhow::Result<Change> {
    let _waiting = Waiting::on("making the sandbox");
    once(key, |key| daemon.client.create(request, Some(key)))
}

/// Asks for something to be made. A connection that breaks on the way makes no second one: the request carries a key.
pub(super) fn once<T>(
    key: Option<IdempotencyKey>,
    ask: impl Fn(&IdempotencyKey) -> Result<T, ClientError>,
) -> anyhow::Result<T> {
    let key = match key {
        Some(key) => key,
        None => fresh_key()?,
    };
    match ask(&key) {
        Err(ClientError::Transport { source, .. }) if source.kind() != std::io::ErrorKind::ConnectionRefused => {
            Ok(ask(&key)?)
        }
        made => Ok(made?),
    }
}

/// A key that nobody else uses.
pub(crate) fn fresh_key() -> anyhow::Result<IdempotencyKey> {
    let mut bytes = [0_u8; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(IdempotencyKey::new(format!("cli-{hex}")).map_err(wrong)?)
}

/// Refuses what will not become ready by waiting.
pub(super) fn check(sandbox: &Sandbox) -> anyhow::Result<()> {
    match sandbox.status {
        Status::Lost | Status::Failed | Status::Stopping | Status::Stopped => {
            let why = sandbox.cause.as_ref().map_or_else(String::new, |cause| format!(": {}", cause.message));
            let message = format!("{} is {}{why}", sandbox.id, sandbox.status);
            let hint = format!("`viv show {}` says more, `viv rm` removes it", sandbox.id);
            Err(Failure::new(FAILED, message).hint(hint).into())
        }
        Status::Provisioning
        | Status::Verifying
        | Status::Ready
        | Status::Unverified
        | Status::Frozen
        | Status::Hibernating
        | Status::SaveFailed
        | Status::Hibernated
        | Status::Resuming => Ok(()),
    }
}
