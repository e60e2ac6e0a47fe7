//! Hooks as data: what is done at four moments of a sandbox's life (L14).

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::{ExecutionId, OperationId};
use crate::service::check_command;
use crate::spec::{Invalid, TEXT_BYTES_MAX};

/// How long a hook may take when nothing is said.
pub const HOOK_MS_DEFAULT: u64 = 10_000;

/// The longest that whoever waits for a sandbox can be made to wait for its hook.
pub const HOOK_MS_MAX: u64 = 600_000;

/// The longest for what is done before a stop: the user's processes end within 5 s of it, whatever the hook does (L8).
pub const BEFORE_STOP_MS_MAX: u64 = 3_000;

/// What is kept of a hook's output in the journal; all of it can be read from its execution.
pub const HOOK_TAIL_BYTES: usize = 1024;

/// When a hook is performed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookPoint {
    /// An instance was made from the spec, and its services are ready.
    AfterStart,
    /// It is about to be stopped, saved or deleted.
    BeforeStop,
    /// An instance was made from what was saved, and its services are ready.
    AfterResume,
    /// Its hard deadline is about to pass.
    OnTimeout,
}

impl HookPoint {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::AfterStart, Self::BeforeStop, Self::AfterResume, Self::OnTimeout];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AfterStart => "after_start",
            Self::BeforeStop => "before_stop",
            Self::AfterResume => "after_resume",
            Self::OnTimeout => "on_timeout",
        }
    }

    /// The longest that it may take.
    pub fn deadline_ms_max(self) -> u64 {
        match self {
            Self::BeforeStop => BEFORE_STOP_MS_MAX,
            Self::AfterStart | Self::AfterResume | Self::OnTimeout => HOOK_MS_MAX,
        }
    }
}

impl fmt::Display for HookPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The hooks of a sandbox: at most one for each moment.
pub type Hooks = BTreeMap<HookPoint, Hook>;

/// One hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// What is done.
    #[serde(flatten)]
    pub action: HookAction,
    /// How long it may take.
    pub deadline_ms: u64,
    /// What it means when it fails.
    pub on_failure: OnFailure,
}

/// What a hook does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum HookAction {
    /// A command in the sandbox.
    Command {
        /// Program and arguments.
        argv: Vec<String>,
    },
    /// A signed request to somebody outside.
    Webhook {
        /// To whom.
        url: String,
        /// With what it is signed.
        secret: Secret,
    },
}

/// What it means when a hook fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// It is written down.
    #[default]
    Ignore,
    /// What it belongs to fails too. A stop and a deadline cannot be held up: there it is written down.
    Abort,
}

/// A text that is stored and never shown (S6).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Keeps it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// For who signs with it, and nobody else.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Refuses hooks that nobody could perform.
pub(crate) fn check_hooks(hooks: &Hooks) -> Result<(), Invalid> {
    for (point, hook) in hooks {
        hook.check(*point).map_err(|wrong| Invalid::new(format!("the hook {point}: {}", wrong.what), wrong.hint))?;
    }
    Ok(())
}

impl Hook {
    fn check(&self, point: HookPoint) -> Result<(), Invalid> {
        let most_ms = point.deadline_ms_max();
        if !(1..=most_ms).contains(&self.deadline_ms) {
            return Err(Invalid::new(
                format!("its deadline is between 1 and {most_ms} ms"),
                "leave it out for the default",
            ));
        }
        match &self.action {
            HookAction::Command { argv } => check_command(argv),
            HookAction::Webhook { url, secret } => {
                let is_web = url.starts_with("https://") || url.starts_with("http://");
                if !is_web || url.len() > TEXT_BYTES_MAX || url.contains(|c: char| c.is_control() || c == ' ') {
                    return Err(Invalid::new("that is no URL of the web", "https://example.com/hook is one"));
                }
                if url.split_once("://").is_some_and(|(_, rest)| rest.split('/').next().unwrap_or("").contains('@')) {
                    return Err(Invalid::new(
                        "a URL with a password in it",
                        "the secret signs; leave the password out",
                    ));
                }
                if !(16..=TEXT_BYTES_MAX).contains(&secret.0.len()) {
                    return Err(Invalid::new(
                        "a secret of less than 16 characters signs nothing",
                        "`openssl rand -hex 32` makes one",
                    ));
                }
                Ok(())
            }
        }
    }

    /// The execution of a command hook that is performed under this operation.
    pub fn execution_of(operation: &OperationId, point: HookPoint) -> ExecutionId {
        let letter = match point {
            HookPoint::AfterStart => 'a',
            HookPoint::BeforeStop => 'b',
            HookPoint::AfterResume => 'r',
            HookPoint::OnTimeout => 't',
        };
        ExecutionId::derived(operation.as_str(), &format!("h{letter}"))
    }
}

/// What came of a hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookReport {
    /// Which.
    pub point: HookPoint,
    /// Whether it succeeded.
    pub ok: bool,
    /// In words: how it ended, what was answered.
    pub what: String,
    /// Its execution, whose output can be read, if it is a command that started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution: Option<ExecutionId>,
    /// The end of what it wrote.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tail: String,
    /// How long it took.
    pub took_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn webhook(url: &str, secret: &str) -> Hook {
        let action = HookAction::Webhook { url: url.to_owned(), secret: Secret::new(secret) };
        Hook { action, deadline_ms: 1_000, on_failure: OnFailure::Ignore }
    }

    #[test]
    fn s6_a_secret_is_not_shown_by_debugging() {
        let hook = webhook("https://example.com/", "0123456789abcdef");
        assert!(!format!("{hook:?}").contains("0123456789abcdef"));
        let text = serde_json::to_string(&hook).unwrap();
        assert_eq!(serde_json::from_str::<Hook>(&text).unwrap(), hook, "a record keeps it");
    }

    #[test]
    fn odd_hooks_are_refused() {
        let secret = "0123456789abcdef";
        let check = |point, hook: &Hook| check_hooks(&[(point, hook.clone())].into());
        let good = webhook("https://example.com/x", secret);
        assert_eq!(check(HookPoint::AfterStart, &good), Ok(()));
        let bad = [
            webhook("ftp://example.com/", secret),
            webhook("https://user:word@example.com/", secret),
            webhook("https://example.com/ x", secret),
            webhook("https://example.com/", "short"),
            Hook { deadline_ms: 0, ..good.clone() },
            Hook { deadline_ms: HOOK_MS_MAX + 1, ..good.clone() },
            Hook { action: HookAction::Command { argv: Vec::new() }, ..good.clone() },
        ];
        for hook in &bad {
            assert!(check(HookPoint::AfterResume, hook).is_err(), "{hook:?}");
        }
        let long = Hook { deadline_ms: BEFORE_STOP_MS_MAX + 1, ..good };
        assert!(check(HookPoint::BeforeStop, &long).is_err(), "a stop is not held up (L8)");
    }
}
