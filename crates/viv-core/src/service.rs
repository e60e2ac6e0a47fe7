//! Services as data: long-running commands of a sandbox that have to be ready before it is (T2, L14).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::{ExecutionId, Generation, SandboxId};
use crate::spec::{Invalid, ServiceName, TEXT_BYTES_MAX, check_pairs};

/// Each is started, waited for and probed before a sandbox is ready.
pub const SERVICES_MAX: usize = 16;

/// Most words of a command; more is a script and belongs into a file.
pub const ARGV_MAX: usize = 256;

/// How long a service has to become ready when nothing is said.
pub const READY_WITHIN_MS_DEFAULT: u64 = 30_000;

/// The longest that can be waited for: whoever waits for the sandbox waits as long.
pub const READY_WITHIN_MS_MAX: u64 = 600_000;

/// How often a service that ended is started again when nothing is said.
pub const RESTARTS_DEFAULT: u32 = 5;

/// What is started more often than this in a row does not work.
pub const RESTARTS_MAX: u32 = 100;

/// The first wait before it is started again; it doubles.
pub const RESTART_BACKOFF_MS_DEFAULT: u64 = 500;

/// The longest such wait.
pub const RESTART_BACKOFF_MS_MAX: u64 = 60_000;

/// A service that was ready for this long has its restarts forgotten: what follows is another trouble.
pub const RESTARTS_FORGOTTEN_MS: u64 = 600_000;

/// How long a nudged service has to report in when nothing is said (L14).
pub const NUDGE_WITHIN_MS_DEFAULT: u64 = 120_000;

/// After this long without a report, the signal is sent once more (L14).
pub const NUDGE_AGAIN_MS: u64 = 5_000;

/// The highest signal's number on Linux.
const SIGNAL_MAX: i32 = 64;

/// A long-running command of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceSpec {
    /// What it is called in its sandbox.
    pub name: ServiceName,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Added to the sandbox's environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where it starts; the sandbox's working directory when absent.
    #[serde(default)]
    pub cwd: Option<String>,
    /// As whom; root of the sandbox when absent.
    #[serde(default)]
    pub user: Option<String>,
    /// What shows that it is ready.
    pub ready: Readiness,
    /// How long it may take from its start until then.
    pub ready_within_ms: u64,
    /// What happens when it ends.
    pub restart: Restart,
    /// What is done after a resume, so that it notices (L14).
    #[serde(default)]
    pub nudge: Option<Nudge>,
}

/// What shows that a service is ready. Whatever it is, its execution has to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Readiness {
    /// A TCP port accepts.
    Port {
        /// Which.
        port: u16,
    },
    /// A command exits with 0. It is run again and again, so it should change nothing.
    Command {
        /// Program and arguments.
        argv: Vec<String>,
    },
    /// It has been running for this long.
    Runs {
        /// How long.
        ms: u64,
    },
}

/// What happens when a service ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// Whether it is started again.
    pub policy: RestartPolicy,
    /// How often in a row, before it is given up.
    pub times_max: u32,
    /// The first wait; it doubles up to [`RESTART_BACKOFF_MS_MAX`].
    pub backoff_ms: u64,
}

impl Default for Restart {
    fn default() -> Self {
        Self { policy: RestartPolicy::OnFailure, times_max: RESTARTS_DEFAULT, backoff_ms: RESTART_BACKOFF_MS_DEFAULT }
    }
}

/// Whether a service that ended is started again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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

/// A signal after a resume, and a report that is waited for (L14).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nudge {
    /// Which signal; sent again after [`NUDGE_AGAIN_MS`].
    pub signal: i32,
    /// How long it has to report in, before its execution is ended.
    pub within_ms: u64,
    /// How it reports in; by being ready when absent.
    #[serde(default)]
    pub reports: Option<Readiness>,
    /// Whether it is nudged after a thaw too.
    #[serde(default)]
    pub on_thaw: bool,
}

impl ServiceSpec {
    /// How long one start of it may keep a verification busy.
    pub fn wait_ms(&self) -> u64 {
        self.ready_within_ms.saturating_add(self.nudge.as_ref().map_or(0, |nudge| nudge.within_ms))
    }

    /// How it reports in after a nudge.
    pub fn reports(&self) -> &Readiness {
        self.nudge.as_ref().and_then(|nudge| nudge.reports.as_ref()).unwrap_or(&self.ready)
    }

    fn check(&self) -> Result<(), Invalid> {
        let of = |wrong: Invalid| Invalid::new(format!("the service {}: {}", self.name, wrong.what), wrong.hint);
        let within = |what: &str, ms: u64| {
            if (1..=READY_WITHIN_MS_MAX).contains(&ms) {
                return Ok(());
            }
            let what = format!("{what} is between 1 and {READY_WITHIN_MS_MAX} ms");
            Err(Invalid::new(what, "leave it out for the default"))
        };
        let checked = || {
            check_command(&self.argv)?;
            check_pairs("environment variables", &self.env)?;
            self.ready.check()?;
            within("the time to become ready", self.ready_within_ms)?;
            if self.restart.times_max > RESTARTS_MAX || self.restart.backoff_ms > RESTART_BACKOFF_MS_MAX {
                let what =
                    format!("at most {RESTARTS_MAX} restarts, {RESTART_BACKOFF_MS_MAX} ms after another at first");
                return Err(Invalid::new(what, "leave them out for the default"));
            }
            let Some(nudge) = &self.nudge else { return Ok(()) };
            if !(1..=SIGNAL_MAX).contains(&nudge.signal) {
                return Err(Invalid::new("there is no such signal to nudge with", "10 is SIGUSR1"));
            }
            within("the time to report in after a nudge", nudge.within_ms)?;
            nudge.reports.as_ref().map_or(Ok(()), Readiness::check)
        };
        checked().map_err(of)
    }
}

impl Readiness {
    fn check(&self) -> Result<(), Invalid> {
        match self {
            Self::Port { port: 0 } => Err(Invalid::new("0 is no port", "name the port that it listens on")),
            Self::Runs { ms } if *ms > READY_WITHIN_MS_MAX => {
                let what = format!("nobody waits longer than {READY_WITHIN_MS_MAX} ms to see that it runs");
                Err(Invalid::new(what, "a second is enough to see most mistakes"))
            }
            Self::Port { .. } | Self::Runs { .. } => Ok(()),
            Self::Command { argv } => check_command(argv),
        }
    }
}

/// Refuses commands that no kernel starts.
pub(crate) fn check_command(argv: &[String]) -> Result<(), Invalid> {
    if !(1..=ARGV_MAX).contains(&argv.len()) {
        let what = format!("a command has between 1 and {ARGV_MAX} words, and the first is its program");
        return Err(Invalid::new(what, "put longer ones into a script"));
    }
    if argv.iter().any(|word| word.contains('\0') || word.len() > TEXT_BYTES_MAX) {
        let what = format!("the words of a command hold no NUL and are at most {TEXT_BYTES_MAX} bytes long");
        return Err(Invalid::new(what, "put longer ones into a script"));
    }
    Ok(())
}

/// Refuses services that nobody could start, or tell apart.
pub(crate) fn check_services(services: &[ServiceSpec]) -> Result<(), Invalid> {
    if services.len() > SERVICES_MAX {
        return Err(Invalid::new(format!("at most {SERVICES_MAX} services"), "let one of them start the others"));
    }
    for (index, service) in services.iter().enumerate() {
        service.check()?;
        if services[..index].iter().any(|other| other.name == service.name) {
            let what = format!("there are two services with the name {}", service.name);
            return Err(Invalid::new(what, "names tell them apart"));
        }
    }
    Ok(())
}

/// The latest start of a service, as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceRun {
    /// In which generation.
    pub generation: Generation,
    /// The how-manieth start in it.
    pub start: u32,
    /// As which execution: made of the three, so that a repeated start finds the first one.
    pub execution: ExecutionId,
    /// The execution that it comes after, in this generation or the last (X5).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<ExecutionId>,
    /// How often it was started again in a row.
    #[serde(default)]
    pub restarts: u32,
    /// From when on the time counts in which it has to become ready.
    pub since_ms: u64,
    /// When it was found ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_at_ms: Option<u64>,
    /// Whether it is to be nudged.
    #[serde(default)]
    pub nudge: bool,
    /// How it ended, once it is given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

impl ServiceRun {
    /// The first start in a generation. `index` is the place of the service in the spec.
    pub fn first(sandbox: &SandboxId, generation: Generation, index: usize, after: Option<&Self>, now_ms: u64) -> Self {
        Self {
            generation,
            start: 1,
            execution: execution_of(sandbox, generation, index, 1),
            after: after.map(|run| run.execution.clone()),
            restarts: 0,
            since_ms: now_ms,
            ready_at_ms: None,
            nudge: false,
            ended: None,
        }
    }

    /// The next start in the same generation.
    #[must_use]
    pub fn again(&self, sandbox: &SandboxId, index: usize, restarts: u32, since_ms: u64) -> Self {
        let start = self.start.saturating_add(1);
        Self {
            generation: self.generation,
            start,
            execution: execution_of(sandbox, self.generation, index, start),
            after: Some(self.execution.clone()),
            restarts,
            since_ms,
            ready_at_ms: None,
            nudge: false,
            ended: None,
        }
    }
}

/// The execution of this start of this service: the sandbox's own letters, and three counts.
fn execution_of(sandbox: &SandboxId, generation: Generation, index: usize, start: u32) -> ExecutionId {
    ExecutionId::derived(sandbox.as_str(), &format!("g{}s{index}n{start}", generation.0 % 10_000_000))
}

/// What was found of one service when all were started and waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceReport {
    /// Which.
    pub service: ServiceName,
    /// Which start of it.
    pub execution: ExecutionId,
    /// How it is.
    pub found: ServiceFound,
    /// When that was seen.
    pub at_ms: u64,
}

/// How a service was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceFound {
    /// It runs and is ready, and has reported in if it was nudged.
    Ready,
    /// It ended, or was ended because it was not ready in time.
    Ended {
        /// How, in words.
        how: String,
        /// Whether that counts as a failure: anything but code 0 does.
        failed: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web() -> ServiceSpec {
        ServiceSpec {
            name: "web".parse().unwrap(),
            argv: vec!["serve".to_owned()],
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            ready: Readiness::Port { port: 80 },
            ready_within_ms: READY_WITHIN_MS_DEFAULT,
            restart: Restart::default(),
            nudge: None,
        }
    }

    #[test]
    fn odd_services_are_refused() {
        assert_eq!(check_services(&[web()]), Ok(()));
        let nudge = Nudge { signal: 10, within_ms: 1, reports: None, on_thaw: false };
        let bad = [
            ServiceSpec { argv: Vec::new(), ..web() },
            ServiceSpec { argv: vec!["a\0".to_owned()], ..web() },
            ServiceSpec { ready: Readiness::Port { port: 0 }, ..web() },
            ServiceSpec { ready: Readiness::Command { argv: Vec::new() }, ..web() },
            ServiceSpec { ready_within_ms: READY_WITHIN_MS_MAX + 1, ..web() },
            ServiceSpec { restart: Restart { times_max: RESTARTS_MAX + 1, ..Restart::default() }, ..web() },
            ServiceSpec { nudge: Some(Nudge { signal: 0, ..nudge.clone() }), ..web() },
            ServiceSpec { nudge: Some(Nudge { within_ms: 0, ..nudge }), ..web() },
        ];
        for service in bad {
            assert!(check_services(std::slice::from_ref(&service)).is_err(), "{service:?}");
        }
        assert!(check_services(&[web(), web()]).is_err(), "names tell them apart");
        let many = |count: usize| -> Vec<ServiceSpec> {
            (0..count).map(|n| ServiceSpec { name: format!("web-{n}").parse().unwrap(), ..web() }).collect()
        };
        assert_eq!(check_services(&many(SERVICES_MAX)), Ok(()));
        for more in [1, 2] {
            assert!(check_services(&many(SERVICES_MAX + more)).is_err());
        }
    }

    #[test]
    fn x5_each_start_has_an_execution_of_its_own_that_names_the_one_before() {
        let sandbox = SandboxId::from_bytes([255; 16]);
        let first = ServiceRun::first(&sandbox, Generation(9_999_999), 15, None, 5);
        let again = first.again(&sandbox, 15, 1, 6);
        let next = ServiceRun::first(&sandbox, Generation(2), 15, Some(&again), 7);
        let all = [&first.execution, &again.execution, &next.execution];
        assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2], "{all:?}");
        assert_eq!((again.after.as_ref(), next.after.as_ref()), (Some(&first.execution), Some(&again.execution)));
        // The sandboxes that a task goes through have almost the same id; their services have nothing in common.
        let of_task = |count: u32| format!("sbx_01hf7ydc16hceve4wsae03nq00t{count}").parse().unwrap();
        let run = |count| ServiceRun::first(&of_task(count), Generation(1), 0, None, 5).execution;
        assert_ne!(run(0), run(1));
        // A repeat after a crash finds the first one.
        assert_eq!(ServiceRun::first(&sandbox, Generation(2), 15, Some(&again), 8).execution, next.execution);
    }
}
