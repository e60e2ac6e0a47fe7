//! Services and hooks: what is asked for, and what is shown (L14).

use serde::{Deserialize, Serialize};
use viv_core::{ExecutionId, Generation};

use crate::bound::{
    BackoffMs, Env, HookMs, HookSecret, Path, Port, ReadyMs, Restarts, ServiceName, Signal, UserName, WebhookUrl, Words,
};

/// A long-running command. It is started after every making and resuming of an instance, and has to be ready before
/// the sandbox is. That it runs is not activity (L6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({
    "name": "web",
    "argv": ["python3", "-m", "http.server", "8080"],
    "ready": {"port": 8080}
})))]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// What it is called in the sandbox.
    pub name: ServiceName,
    /// Program and arguments; `["sh", "-c", LINE]` for a line of shell.
    pub argv: Words,
    /// Added to the sandbox's environment. Values are not told back (S6).
    #[serde(default)]
    pub env: Env,
    /// Where it starts; the sandbox's working directory when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Path>,
    /// As whom; root of the sandbox when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserName>,
    /// What shows that it is ready; having run for a second when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<ReadyWhen>,
    /// How long it may take to become ready; half a minute when absent. What takes longer is ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_within_ms: Option<ReadyMs>,
    /// What happens when it ends.
    #[serde(default)]
    pub restart: Restart,
    /// A signal after a resume, and a report that is waited for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nudge: Option<Nudge>,
}

/// What shows that a service is ready: exactly one of these. Its execution has to run, whatever it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ReadyWhen {
    /// This TCP port accepts.
    Port(Port),
    /// This command exits with 0. It is run again and again, so it should change nothing.
    Command(Words),
    /// It has been running for this long.
    RunsMs(ReadyMs),
}

/// What happens when a service ends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Restart {
    /// Whether it is started again.
    pub policy: RestartPolicy,
    /// How often in a row before it is given up; five times when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times_max: Option<Restarts>,
    /// The first wait, which doubles; half a second when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff_ms: Option<BackoffMs>,
}

/// Whether a service that ended is started again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum RestartPolicy {
    /// Never.
    Never,
    /// When it ended otherwise than with code 0.
    #[default]
    OnFailure,
    /// However it ended.
    Always,
}

/// A signal after a resume, sent again after 5 s, and a report that is waited for. What does not report in is ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Nudge {
    /// Which signal.
    pub signal: Signal,
    /// How long it has to report in; two minutes when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<ReadyMs>,
    /// How it reports in; by being ready when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reports: Option<ReadyWhen>,
    /// Whether it is nudged after a thaw too.
    #[serde(default)]
    pub on_thaw: bool,
}

/// What is done at moments of a sandbox's life.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Hooks {
    /// When an instance was made and its services are ready, before it is called ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_start: Option<Hook>,
    /// Before its processes are ended; 3 s at most, and it cannot hold up a stop (L8).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before_stop: Option<Hook>,
    /// When an instance was made from what was saved and its services are ready, before it is called ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_resume: Option<Hook>,
    /// As long before its hard deadline as it may take; it cannot hold that up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_timeout: Option<Hook>,
}

/// One hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"run": {"command": ["./set-up.sh"]}, "on_failure": "abort"})))]
#[serde(deny_unknown_fields)]
pub struct Hook {
    /// What is done.
    pub run: HookRun,
    /// How long it may take; 10 s when absent, before a stop 3 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<HookMs>,
    /// What it means when it fails.
    #[serde(default)]
    pub on_failure: OnFailure,
}

/// What a hook does: exactly one of these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HookRun {
    /// A command in the sandbox; its output is kept as that of an execution.
    Command(Words),
    /// A signed request.
    Webhook(Webhook),
}

/// A signed request: `Vivarium-Signature: t=SECONDS,v1=HEX`, the HMAC-SHA256 of `SECONDS.BODY`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Webhook {
    /// To whom. Addresses of private networks are refused unless the daemon is set up for them; redirects are not
    /// followed.
    pub url: WebhookUrl,
    /// With what it is signed. Never told back (S6).
    pub secret: HookSecret,
}

/// What it means when a hook fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// It is written down.
    #[default]
    Ignore,
    /// What it belongs to fails too; a stop and a deadline do not.
    Abort,
}

/// A service as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceShown {
    /// What it is called.
    pub name: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Whether it is started again when it ends.
    pub restart: RestartPolicy,
    /// Its latest execution, if it was started.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub execution: Option<ExecutionId>,
    /// The generation of that one.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub generation: Option<Generation>,
    /// The execution before it, whose work it carries on (X5).
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub after: Option<ExecutionId>,
    /// How often it was started again in a row.
    pub restarts: u32,
    /// When it was found ready.
    pub ready_at_ms: Option<u64>,
    /// How it ended, once it is given up, or that its sandbox is hibernated or stopped, so that nothing of it runs.
    pub ended: Option<String>,
}

/// A hook as it is shown: no secret, and of an address only whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HookShown {
    /// When it is performed.
    #[cfg_attr(feature = "openapi", schema(example = "after_start"))]
    pub point: String,
    /// The command, if it is one.
    pub argv: Option<Vec<String>>,
    /// Scheme and host of the webhook, if it is one.
    pub webhook: Option<String>,
    /// How long it may take.
    pub deadline_ms: u64,
    /// What it means when it fails.
    pub on_failure: OnFailure,
}
