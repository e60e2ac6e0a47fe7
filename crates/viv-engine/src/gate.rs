//! Protective gates: each has a name and a switch, on by default (O9).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use viv_core::SandboxId;
use viv_core::spec::Project;

/// One protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Gate {
    /// Whoever was away, adopted or lost is probed before its first use (T4).
    ProbeBeforeUse,
    /// A call that names an old generation is refused (T5).
    GenerationCheck,
    /// Evidence that is too old is not shown as ready (T3).
    EvidenceAges,
    /// Ends that are pushed are believed at once (T3).
    PushedEnds,
    /// An instance without a record is left alone for a while (J1).
    OrphanGrace,
    /// And until two listings agree (J1).
    TwoListings,
    /// A provider that fails again and again is left alone for a moment (J7).
    Breaker,
    /// The number of sandboxes is bounded (L18).
    Quota,
    /// A hard deadline is asked for before anything follows from it (T6).
    FreshExpiry,
    /// Only use keeps a sandbox from idling: looks, probes and services do not (L6).
    ActivityFilter,
    /// Only an entry brings back what rests; who comes with a handle joins what runs (L4).
    EntryOnlyResume,
    /// What the provider says of an instance counts, whatever is recorded (T1).
    ProviderTruth,
    /// A stop of a task is written down before anything is done about it (K2).
    DurableStop,
    /// Whoever works on a task hears of its end at once (K3).
    PushedCancellation,
    /// A task that is silent for too long ends (K4).
    InactivityLimit,
    /// A task whose time is over is terminated, and not only called so (K4).
    AuthoritativeTimeout,
    /// Effects of a task run only with a grant (K5).
    EffectsGate,
}

impl Gate {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::ProbeBeforeUse,
        Self::GenerationCheck,
        Self::EvidenceAges,
        Self::PushedEnds,
        Self::OrphanGrace,
        Self::TwoListings,
        Self::Breaker,
        Self::Quota,
        Self::FreshExpiry,
        Self::ActivityFilter,
        Self::EntryOnlyResume,
        Self::ProviderTruth,
        Self::DurableStop,
        Self::PushedCancellation,
        Self::InactivityLimit,
        Self::AuthoritativeTimeout,
        Self::EffectsGate,
    ];

    /// Its name in files and variables.
    pub fn name(self) -> &'static str {
        match self {
            Self::ProbeBeforeUse => "probe_before_use",
            Self::GenerationCheck => "generation_check",
            Self::EvidenceAges => "evidence_ages",
            Self::PushedEnds => "pushed_ends",
            Self::OrphanGrace => "orphan_grace",
            Self::TwoListings => "two_listings",
            Self::Breaker => "breaker",
            Self::Quota => "quota",
            Self::FreshExpiry => "fresh_expiry",
            Self::ActivityFilter => "activity_filter",
            Self::EntryOnlyResume => "entry_only_resume",
            Self::ProviderTruth => "provider_truth",
            Self::DurableStop => "durable_stop",
            Self::PushedCancellation => "pushed_cancellation",
            Self::InactivityLimit => "inactivity_limit",
            Self::AuthoritativeTimeout => "authoritative_timeout",
            Self::EffectsGate => "effects_gate",
        }
    }

    /// The one with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|gate| gate.name() == name)
    }
}

/// Where the switch of a gate was set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SetBy {
    /// Nowhere.
    #[default]
    Default,
    /// In the configuration file.
    File,
    /// In the environment.
    Environment,
}

impl SetBy {
    /// In a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Environment => "environment",
        }
    }
}

/// How a gate is switched.
#[derive(Debug, Clone)]
pub struct GateSetting {
    /// Of how many sandboxes in a hundred it is on.
    pub percent: u8,
    /// Projects for which it is otherwise.
    pub projects: BTreeMap<Project, u8>,
    /// Where that was said.
    pub set_by: SetBy,
}

impl Default for GateSetting {
    fn default() -> Self {
        Self { percent: 100, projects: BTreeMap::new(), set_by: SetBy::Default }
    }
}

impl GateSetting {
    /// Off for everybody.
    pub fn off() -> Self {
        Self { percent: 0, ..Self::default() }
    }

    /// Off for this project alone.
    pub fn off_for(project: Project) -> Self {
        Self { projects: [(project, 0)].into(), ..Self::default() }
    }

    /// Whether it is on for everybody.
    pub fn is_on_everywhere(&self) -> bool {
        self.percent == 100 && self.projects.values().all(|percent| *percent == 100)
    }

    /// The projects for which it is not as for the others, and how.
    pub fn others(&self) -> impl Iterator<Item = (&Project, u8)> {
        let differs = move |(_, percent): &(&Project, &u8)| **percent != self.percent;
        self.projects.iter().filter(differs).map(|(project, percent)| (project, *percent))
    }

    /// Whether it is switched in the same way, wherever that was said.
    fn is_as(&self, other: &Self) -> bool {
        (self.percent, &self.projects) == (other.percent, &other.projects)
    }
}

/// `off`, `on for 20 %`, `on, for test off`.
impl fmt::Display for GateSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn word(percent: u8) -> Cow<'static, str> {
            match percent {
                0 => "off".into(),
                1..100 => format!("on for {percent} %").into(),
                100.. => "on".into(),
            }
        }
        f.write_str(&word(self.percent))?;
        self.others().try_for_each(|(project, percent)| write!(f, ", for {project} {}", word(percent)))
    }
}

/// All gates. Clones share their switches, so that a reload is seen by everybody at once.
#[derive(Debug, Clone, Default)]
pub struct Gates {
    settings: Arc<RwLock<BTreeMap<Gate, GateSetting>>>,
}

impl Gates {
    /// Whether it is on for this sandbox. The same sandbox always falls on the same side of a percentage.
    pub fn is_on(&self, gate: Gate, project: &Project, sandbox: &SandboxId) -> bool {
        let settings = self.settings.read().unwrap_or_else(PoisonError::into_inner);
        let Some(setting) = settings.get(&gate) else { return true };
        let percent = setting.projects.get(project).copied().unwrap_or(setting.percent);
        let bucket =
            sandbox.as_str().bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into())) % 100;
        bucket < u32::from(percent)
    }

    /// Whether it is on for everybody.
    pub fn is_on_everywhere(&self, gate: Gate) -> bool {
        self.setting(gate).is_on_everywhere()
    }

    /// Whether it is off for everybody. What protects all of them together is off only then.
    pub fn is_off_everywhere(&self, gate: Gate) -> bool {
        let setting = self.setting(gate);
        setting.percent == 0 && setting.projects.values().all(|percent| *percent == 0)
    }

    /// How it is switched.
    pub fn setting(&self, gate: Gate) -> GateSetting {
        let settings = self.settings.read().unwrap_or_else(PoisonError::into_inner);
        settings.get(&gate).cloned().unwrap_or_default()
    }

    /// Switches all of them: those that are not named are on. Answers with those that changed.
    pub fn replace(&self, settings: BTreeMap<Gate, GateSetting>) -> Vec<Gate> {
        let before: Vec<GateSetting> = Gate::ALL.into_iter().map(|gate| self.setting(gate)).collect();
        *self.settings.write().unwrap_or_else(PoisonError::into_inner) = settings;
        Gate::ALL
            .into_iter()
            .zip(before)
            .filter(|(gate, before)| !self.setting(*gate).is_as(before))
            .map(|(gate, _)| gate)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o9_what_is_switched_for_some_is_not_off_for_all() {
        let gates = Gates::default();
        let test: Project = "test".parse().unwrap();
        let but_test = GateSetting::off_for(test.clone());
        assert_eq!((but_test.to_string().as_str(), but_test.is_on_everywhere()), ("on, for test off", false));
        let elsewhere = GateSetting { set_by: SetBy::File, ..but_test.clone() };
        assert_eq!(gates.replace([(Gate::Breaker, but_test)].into()), [Gate::Breaker]);
        assert_eq!(gates.replace([(Gate::Breaker, elsewhere)].into()), [], "where it was said is no switch");
        assert!(!gates.is_on_everywhere(Gate::Breaker) && !gates.is_off_everywhere(Gate::Breaker));
        let sandbox = SandboxId::from_bytes([1; 16]);
        assert!(gates.is_on(Gate::Breaker, &Project::default(), &sandbox));
        assert!(!gates.is_on(Gate::Breaker, &test, &sandbox));
        gates.replace([(Gate::Breaker, GateSetting { percent: 0, ..GateSetting::off_for(test) })].into());
        assert!(gates.is_off_everywhere(Gate::Breaker));
        assert!(gates.is_on_everywhere(Gate::Quota));
    }
}
