//! From the provider's words to the API's and back, so that no other crate has to say how they correspond.

use viv_core::exec::{ExecSpec, ExecState, ExecStatus};
use viv_core::execution::{Execution as Row, Stage};
use viv_core::{Generation, SandboxId};
use viv_provider as provider;
use viv_provider::{InstanceState, ProviderError};

use crate::daemon::CapabilityShown;
use crate::error::{ApiError, ErrorCode, ErrorDetails};
use crate::execution::{Execution, ExecutionState};
use crate::resources::{Disk, OomKill, Usage};
use crate::sandbox::{ExtendSandbox, Observed, ObservedVia, ProviderState};

impl From<ExtendSandbox> for provider::DeadlineChange {
    fn from(change: ExtendSandbox) -> Self {
        match change {
            ExtendSandbox::AtLeastMs(ms) => Self::AtLeastMs(ms.get()),
            ExtendSandbox::ExactlyMs(ms) => Self::ExactlyMs(ms.get()),
        }
    }
}

impl From<&InstanceState> for ProviderState {
    fn from(state: &InstanceState) -> Self {
        match state {
            InstanceState::Creating => Self::Creating,
            InstanceState::Running => Self::Running,
            InstanceState::Frozen => Self::Frozen,
            InstanceState::Ending { .. } => Self::Ending,
            InstanceState::Ended(_) => Self::Ended,
            InstanceState::Absent => Self::Absent,
        }
    }
}

impl From<provider::ObservedVia> for ObservedVia {
    fn from(via: provider::ObservedVia) -> Self {
        match via {
            provider::ObservedVia::Supervisor => Self::Supervisor,
            provider::ObservedVia::Record => Self::Record,
            provider::ObservedVia::Api => Self::Api,
        }
    }
}

impl From<&provider::Observation> for Observed {
    fn from(seen: &provider::Observation) -> Self {
        let end_cause = match &seen.state {
            InstanceState::Ending { cause } => Some(cause.code().to_owned()),
            InstanceState::Ended(ended) => Some(ended.cause.code().to_owned()),
            InstanceState::Creating | InstanceState::Running | InstanceState::Frozen | InstanceState::Absent => None,
        };
        Self { provider_state: (&seen.state).into(), end_cause, via: seen.via.into(), at_ms: seen.observed_at_ms }
    }
}

impl From<provider::Usage> for Usage {
    /// What takes two looks, or is not counted by providers, is left for the caller to add.
    fn from(usage: provider::Usage) -> Self {
        let oom_last = usage.oom_last.map(|oom| OomKill {
            process: oom.process,
            pid: oom.pid,
            execution: oom.execution,
            at_ms: oom.at_ms,
        });
        Self {
            cpu_us: usage.cpu_us,
            memory_bytes: usage.memory_bytes,
            processes: usage.processes,
            oom_kills: usage.oom_kills,
            oom_last,
            ..Self::default()
        }
    }
}

impl From<provider::DiskUsage> for Disk {
    fn from(disk: provider::DiskUsage) -> Self {
        Self { own_bytes: disk.own_bytes, shared_bytes: disk.shared_bytes, limit_bytes: disk.limit_bytes }
    }
}

/// A capability as the API writes it.
pub fn capability_name(capability: provider::Capability) -> String {
    match serde_json::to_value(capability) {
        Ok(serde_json::Value::String(name)) => name,
        Ok(_) | Err(_) => unreachable!("capabilities are words"),
    }
}

/// What a provider declares, by name.
pub fn capabilities(declared: &provider::Capabilities) -> Vec<CapabilityShown> {
    let has = declared.has.iter().map(|&one| CapabilityShown { name: capability_name(one), has: true, reason: None });
    let missing = declared.missing.iter().map(|(&one, why)| CapabilityShown {
        name: capability_name(one),
        has: false,
        reason: Some(why.clone()),
    });
    let mut all: Vec<_> = has.chain(missing).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// What is known about an execution beside its status.
#[derive(Debug, Clone, Copy)]
pub struct ExecutionContext<'a> {
    /// In which sandbox.
    pub sandbox: &'a SandboxId,
    /// In which of its instances.
    pub generation: Generation,
    /// What was asked for; its environment is not shown.
    pub spec: &'a ExecSpec,
    /// Whether it is a service.
    pub detach: bool,
    /// Whether its sandbox is frozen.
    pub frozen: bool,
    /// What is recorded of it.
    pub row: Option<&'a Row>,
}

/// What is said of an instance whose agent ended by itself or was killed.
const AGENT_ENDS: [&str; 5] = ["exited", "signalled", "oom_killed", "agent_lost", "crashed"];

/// What ended it, as a word.
fn cause(state: &ExecState) -> Option<String> {
    let word = match state {
        ExecState::Running | ExecState::Suspended => return None,
        ExecState::Exited { .. } => "exit",
        ExecState::Signalled { .. } => "signal",
        ExecState::OomKilled => "oom_kill",
        ExecState::Failed { .. } => "not_started",
        ExecState::Cancelled => "cancelled",
        ExecState::TimedOut => "time_limit",
        // The first process inside is the agent; the record calls that a crash.
        ExecState::Lost { cause } if AGENT_ENDS.contains(&cause.as_str()) => "agent_died",
        ExecState::Lost { cause } => cause,
    };
    Some(word.to_owned())
}

impl Execution {
    /// An execution as it stands.
    pub fn shown(status: &ExecStatus, context: ExecutionContext<'_>) -> Self {
        let ExecutionContext { sandbox, generation, spec, detach, frozen, row } = context;
        let (state, exit_code, signal, message) = match &status.state {
            ExecState::Running if frozen => (ExecutionState::Suspended, None, None, None),
            ExecState::Suspended => (ExecutionState::Suspended, None, None, None),
            ExecState::Running => (ExecutionState::Running, None, None, None),
            ExecState::Exited { code } => (ExecutionState::Exited, Some(*code), None, None),
            ExecState::Signalled { signal } => (ExecutionState::Signalled, None, Some(*signal), None),
            ExecState::OomKilled => (ExecutionState::OomKilled, None, None, None),
            ExecState::Failed { what } => (ExecutionState::Failed, None, None, Some(what.clone())),
            ExecState::Cancelled => (ExecutionState::Cancelled, None, None, None),
            ExecState::TimedOut => (ExecutionState::TimedOut, None, None, None),
            ExecState::Lost { cause } => (ExecutionState::Lost, None, None, Some(cause.clone())),
        };
        Self {
            id: status.id.clone(),
            sandbox: sandbox.clone(),
            generation,
            state,
            exit_code,
            signal,
            message,
            cause: cause(&status.state),
            argv: spec.argv.clone(),
            cwd: spec.cwd.clone(),
            user: spec.user.clone(),
            tty: spec.tty.is_some(),
            detach: detach || status.detached,
            limit_ms: spec.limit_ms,
            by: row.map(|row| row.by.who.clone()),
            asked_at_ms: row.map(|row| row.asked_at_ms),
            queued_until_ms: None,
            learnt_at_ms: row.map(|row| row.learnt_at_ms),
            started_at_ms: Some(status.started_at_ms),
            ended_at_ms: status.ended_at_ms,
            output_bytes: status.output_bytes,
            stdin_bytes: status.stdin_bytes,
            pid: status.pid,
        }
    }
}

impl Execution {
    /// An execution as it is recorded, where nobody who runs it is asked.
    pub fn recorded(row: &Row, frozen: bool) -> Self {
        let spec = ExecSpec {
            argv: row.argv.clone(),
            cwd: row.cwd.clone(),
            user: row.user.clone(),
            limit_ms: row.limit_ms,
            ..ExecSpec::default()
        };
        let context = ExecutionContext {
            sandbox: &row.sandbox,
            generation: row.generation,
            spec: &spec,
            detach: row.detached,
            frozen,
            row: Some(row),
        };
        let shown = match &row.stage {
            Stage::Started { status, .. } => Self::shown(status, context),
            Stage::Queued(queued) => {
                let status = ExecStatus {
                    id: row.id.clone(),
                    state: ExecState::Running,
                    started_at_ms: row.asked_at_ms,
                    ended_at_ms: None,
                    output_bytes: 0,
                    stdin_bytes: 0,
                    pid: None,
                    argv: row.argv.clone(),
                    detached: row.detached,
                };
                Self {
                    state: ExecutionState::Queued,
                    started_at_ms: None,
                    queued_until_ms: Some(queued.until_ms),
                    ..Self::shown(&status, context)
                }
            }
        };
        Self { tty: row.tty, ..shown }
    }
}

impl From<ProviderError> for ApiError {
    /// What a caller is told. Sources stay here: they name paths and sockets of the host, which belong in the log.
    fn from(error: ProviderError) -> Self {
        let message = error.to_string();
        let details = ErrorDetails::default();
        match error {
            ProviderError::Fenced { .. } => {
                Self::new(ErrorCode::LifecycleLocked, "somebody else took over this sandbox")
                    .hint("try again; whoever took over carries on")
            }
            ProviderError::StaleGeneration { asked, current } => {
                Self::stale_handle(asked, current, "the instance was replaced")
            }
            ProviderError::Absent => {
                Self::new(ErrorCode::NotRunning, "the sandbox has no instance").hint("viv ensure makes it run")
            }
            ProviderError::NotRunning { .. } => {
                Self::new(ErrorCode::NotRunning, message).hint("viv ensure makes it run")
            }
            ProviderError::Expired => Self::new(ErrorCode::Expired, "the sandbox has expired"),
            ProviderError::NotFound { what } => Self::not_found(what),
            ProviderError::Conflict { what } => Self::new(ErrorCode::Conflict, what),
            ProviderError::Invalid { what, hint } => Self::new(ErrorCode::InvalidRequest, what).hint(hint),
            ProviderError::Exhausted { limit, .. } => Self::new(ErrorCode::QuotaExceeded, message)
                .details(ErrorDetails { quota: Some(limit.to_owned()), ..details }),
            ProviderError::Unsupported { capability, why } => Self::new(ErrorCode::Unsupported, why)
                .hint("viv doctor says what this machine can do")
                .details(ErrorDetails { capability: Some(capability_name(capability)), ..details }),
            ProviderError::Outdated { .. } => {
                Self::new(ErrorCode::Conflict, message).hint("stop the sandbox and make it run again with viv ensure")
            }
            ProviderError::TimedOut { .. } => Self::new(ErrorCode::Timeout, message)
                .hint("it may or may not have happened: look with viv show --verify"),
            ProviderError::Unavailable { .. } => {
                Self::new(ErrorCode::ProviderUnavailable, "the provider cannot be reached")
                    .hint("viv doctor says what is wrong")
            }
            ProviderError::Failed { .. } => Self::new(ErrorCode::Conflict, message).hint("viv logs SANDBOX says more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use viv_provider::{Capabilities, Capability};

    use super::*;

    #[test]
    fn what_is_missing_says_why() {
        let declared = Capabilities::default().with(Capability::Tty).without(Capability::LimitDisk, "no quota here");
        let shown = capabilities(&declared);
        let names: Vec<_> = shown.iter().map(|one| (one.name.as_str(), one.has)).collect();
        assert_eq!(names, [("limit_disk", false), ("tty", true)]);
        assert_eq!(shown[0].reason.as_deref(), Some("no quota here"));
    }

    #[test]
    fn s6_an_unreachable_provider_does_not_tell_about_the_host() {
        let source = std::io::Error::other("/secret/place: connection refused");
        let error: ApiError = ProviderError::Unavailable { what: "/secret/place".to_owned(), source }.into();
        assert_eq!(error.code, ErrorCode::ProviderUnavailable);
        assert!(!serde_json::to_string(&error).unwrap().contains("secret"));
    }

    proptest! {
        #[test]
        fn x6_ends_are_told_apart(code: i32, frozen: bool) {
            let sandbox: SandboxId = "sbx_1".parse().unwrap();
            let spec = ExecSpec { argv: vec!["x".to_owned()], ..ExecSpec::default() };
            let context = ExecutionContext { sandbox: &sandbox, generation: Generation(3), spec: &spec, detach: false, frozen, row: None };
            let shown = |state: ExecState| Execution::shown(&ExecStatus {
                id: "exe_1".parse().unwrap(), state, started_at_ms: 1, ended_at_ms: None, output_bytes: 0,
                stdin_bytes: 0, pid: None, argv: Vec::new(), detached: false,
            }, context);
            prop_assert_eq!(shown(ExecState::Exited { code }).exit_code, Some(code));
            prop_assert_eq!(shown(ExecState::Signalled { signal: 9 }).state, ExecutionState::Signalled);
            prop_assert_eq!(shown(ExecState::OomKilled).state, ExecutionState::OomKilled);
            let running = if frozen { ExecutionState::Suspended } else { ExecutionState::Running };
            prop_assert_eq!(shown(ExecState::Running).state, running);
        }
    }
}
