//! Services and hooks, from the API's words to the core's and back.

use viv_core::hook::{self, HOOK_MS_DEFAULT, HookAction, HookPoint, Secret};
use viv_core::lifecycle::{Phase, Sandbox};
use viv_core::service::{
    self, NUDGE_WITHIN_MS_DEFAULT, READY_WITHIN_MS_DEFAULT, Readiness, RestartPolicy as CorePolicy, ServiceRun,
};

use crate::bound::{Path, ReadyMs, UserName};
use crate::service::{
    Hook, HookRun, HookShown, Hooks, OnFailure, ReadyWhen, Restart, RestartPolicy, Service, ServiceShown,
};

/// How long a service has to run when nothing else shows that it is ready.
const RUNS_MS_DEFAULT: u64 = 1_000;

impl From<&ReadyWhen> for Readiness {
    fn from(ready: &ReadyWhen) -> Self {
        match ready {
            ReadyWhen::Port(port) => Self::Port { port: port.get() as u16 },
            ReadyWhen::Command(argv) => Self::Command { argv: argv.to_vec() },
            ReadyWhen::RunsMs(ms) => Self::Runs { ms: ms.get() },
        }
    }
}

impl From<&Restart> for service::Restart {
    fn from(restart: &Restart) -> Self {
        let default = Self::default();
        Self {
            policy: match restart.policy {
                RestartPolicy::Never => CorePolicy::Never,
                RestartPolicy::OnFailure => CorePolicy::OnFailure,
                RestartPolicy::Always => CorePolicy::Always,
            },
            times_max: restart.times_max.map_or(default.times_max, |times| times.get() as u32),
            backoff_ms: restart.backoff_ms.map_or(default.backoff_ms, u64::from),
        }
    }
}

impl From<&Service> for service::ServiceSpec {
    fn from(asked: &Service) -> Self {
        Self {
            name: asked.name.as_str().parse().expect("both are DNS labels"),
            argv: asked.argv.to_vec(),
            env: asked.env.to_map(),
            cwd: asked.cwd.as_ref().map(Path::to_string),
            user: asked.user.as_ref().map(UserName::to_string),
            ready: asked.ready.as_ref().map_or(Readiness::Runs { ms: RUNS_MS_DEFAULT }, Readiness::from),
            ready_within_ms: asked.ready_within_ms.map_or(READY_WITHIN_MS_DEFAULT, ReadyMs::get),
            restart: (&asked.restart).into(),
            nudge: asked.nudge.as_ref().map(|nudge| service::Nudge {
                signal: nudge.signal.get() as i32,
                within_ms: nudge.within_ms.map_or(NUDGE_WITHIN_MS_DEFAULT, ReadyMs::get),
                reports: nudge.reports.as_ref().map(Readiness::from),
                on_thaw: nudge.on_thaw,
            }),
        }
    }
}

impl From<&Hooks> for hook::Hooks {
    fn from(hooks: &Hooks) -> Self {
        let all = [
            (HookPoint::AfterStart, &hooks.after_start),
            (HookPoint::BeforeStop, &hooks.before_stop),
            (HookPoint::AfterResume, &hooks.after_resume),
            (HookPoint::OnTimeout, &hooks.on_timeout),
        ];
        all.into_iter().filter_map(|(point, hook)| Some((point, core_hook(point, hook.as_ref()?)))).collect()
    }
}

fn core_hook(point: HookPoint, asked: &Hook) -> hook::Hook {
    hook::Hook {
        action: match &asked.run {
            HookRun::Command(argv) => HookAction::Command { argv: argv.to_vec() },
            HookRun::Webhook(webhook) => {
                HookAction::Webhook { url: webhook.url.to_string(), secret: Secret::new(webhook.secret.as_str()) }
            }
        },
        deadline_ms: asked.deadline_ms.map_or(HOOK_MS_DEFAULT.min(point.deadline_ms_max()), u64::from),
        on_failure: match asked.on_failure {
            OnFailure::Ignore => hook::OnFailure::Ignore,
            OnFailure::Abort => hook::OnFailure::Abort,
        },
    }
}

impl ServiceShown {
    /// The services of a sandbox, in the order of its spec.
    pub fn all(sandbox: &Sandbox) -> Vec<Self> {
        // Nothing of it runs then, whatever the last run came to.
        let over = matches!(sandbox.phase, Phase::Hibernated { .. } | Phase::Stopped);
        let over = over.then(|| sandbox.phase.name().as_str().to_owned());
        let shown = |service: &service::ServiceSpec| {
            let run: Option<&ServiceRun> = sandbox.services.get(&service.name);
            Self {
                name: service.name.to_string(),
                argv: service.argv.clone(),
                restart: match service.restart.policy {
                    CorePolicy::Never => RestartPolicy::Never,
                    CorePolicy::OnFailure => RestartPolicy::OnFailure,
                    CorePolicy::Always => RestartPolicy::Always,
                },
                execution: run.map(|run| run.execution.clone()),
                generation: run.map(|run| run.generation),
                after: run.and_then(|run| run.after.clone()),
                restarts: run.map_or(0, |run| run.restarts),
                ready_at_ms: run.and_then(|run| run.ready_at_ms),
                ended: run.and_then(|run| run.ended.clone().or_else(|| over.clone())),
            }
        };
        sandbox.spec.services.iter().map(shown).collect()
    }
}

impl HookShown {
    /// The hooks of a sandbox.
    pub fn all(hooks: &hook::Hooks) -> Vec<Self> {
        let shown = |(point, hook): (&HookPoint, &hook::Hook)| {
            let (argv, webhook) = match &hook.action {
                HookAction::Command { argv } => (Some(argv.clone()), None),
                // Paths and queries of webhooks are often secrets themselves.
                HookAction::Webhook { url, .. } => {
                    (None, Some(url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/")))
                }
            };
            Self {
                point: point.to_string(),
                argv,
                webhook,
                deadline_ms: hook.deadline_ms,
                on_failure: match hook.on_failure {
                    hook::OnFailure::Ignore => OnFailure::Ignore,
                    hook::OnFailure::Abort => OnFailure::Abort,
                },
            }
        };
        hooks.iter().map(shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::sandbox::CreateSandbox;

    #[test]
    fn what_is_not_said_has_a_default_and_the_core_takes_it() {
        let asked: CreateSandbox = serde_json::from_value(json!({
            "services": [{"name": "web", "argv": ["serve"], "nudge": {"signal": 10}}],
            "hooks": {
                "before_stop": {"run": {"command": ["sync"]}},
                "after_start": {"run": {"webhook": {"url": "https://example.com/a?token=x", "secret": "s".repeat(16)}}},
            },
        }))
        .unwrap();
        let spec = asked.to_spec();
        assert_eq!(spec.check(), Ok(()));
        assert_eq!(spec.services[0].ready, Readiness::Runs { ms: 1_000 });
        assert_eq!(spec.services[0].nudge.as_ref().map(|nudge| nudge.within_ms), Some(120_000));
        let shown = HookShown::all(&spec.hooks);
        assert_eq!(shown[0].webhook.as_deref(), Some("https://example.com"), "S6");
        assert_eq!(shown[1].deadline_ms, 3_000, "a stop is not held up (L8)");
    }

    #[test]
    fn two_ways_at_once_are_refused() {
        let two = json!({"services": [{"name": "a", "argv": ["x"], "ready": {"port": 1, "runs_ms": 5}}]});
        assert!(crate::request::parse_value::<CreateSandbox>(&two).is_err());
        let none = json!({"hooks": {"after_start": {"run": {}}}});
        assert!(crate::request::parse_value::<CreateSandbox>(&none).is_err());
    }
}
