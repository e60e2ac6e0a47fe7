//! What a sandbox is to be: what its instances are made of, and by which policy it lives.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::hook::{Hooks, check_hooks};
use crate::limits::ResourceLimits;
use crate::service::{ServiceSpec, check_services};

/// A hard deadline when nothing is said (L5).
pub const LIFETIME_MS_DEFAULT: u64 = 60 * 60 * 1000;

/// Longest lifetime that can be asked for at once; it can be extended.
pub const LIFETIME_MS_MAX: u64 = 30 * 24 * 60 * 60 * 1000;

/// Time without activity after which a sandbox idles (L5).
pub const IDLE_MS_DEFAULT: u64 = 15 * 60 * 1000;

/// Time frozen after which what idles is saved, or, when it is not persistent, ends: as long again (L5).
pub const HIBERNATE_MS_DEFAULT: u64 = 15 * 60 * 1000;

/// Labels and variables are read by people; more of them are data and belong into a file.
pub const PAIRS_MAX: usize = 64;

/// Longest label, variable or path.
pub const TEXT_BYTES_MAX: usize = 4096;

/// A probe of each costs time before a sandbox is ready (T2).
pub const PORTS_MAX: usize = 16;

/// Why something that was asked for makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Invalid {
    /// What is wrong with it.
    pub what: String,
    /// What to do instead.
    pub hint: String,
}

impl Invalid {
    pub(crate) fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { what: what.into(), hint: hint.into() }
    }
}

/// What an instance is made of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Image {
    /// The provider's own userland: on a local machine, the machine's.
    #[default]
    Host,
    /// A directory that holds a root filesystem; it is only read.
    Directory {
        /// Absolute path.
        path: String,
    },
    /// Something that the provider knows by name.
    Named {
        /// The name.
        name: String,
    },
}

/// How an instance is connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// Whom those inside may talk to.
    pub egress: Egress,
}

/// Whom those inside may talk to (S2). Whatever is asked for, the machine itself, its neighbourhood's link-local
/// addresses and the addresses at which clouds hand out credentials are not among them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Egress {
    /// Nobody: there is only a loopback interface.
    #[default]
    None,
    /// The internet; no private networks.
    All,
}

/// What the instances of a sandbox are made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxSpec {
    /// What the first one is made of.
    pub image: Image,
    /// Limits; what is not said has the provider's default.
    pub limits: ResourceLimits,
    /// How they are connected.
    pub network: Network,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Where commands start; made if it is not there.
    pub workdir: String,
    /// Whether commands of root may install packages: change owners of files, and become other users.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub packages: bool,
    /// TCP ports that have to answer before it is called ready (T2).
    pub ports: Vec<u16>,
    /// Long-running commands that have to be ready before it is (T2).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceSpec>,
    /// What is done when it starts, stops, resumes or times out (L14).
    #[serde(skip_serializing_if = "Hooks::is_empty")]
    pub hooks: Hooks,
}

impl Default for SandboxSpec {
    fn default() -> Self {
        Self {
            image: Image::default(),
            limits: ResourceLimits::default(),
            network: Network::default(),
            env: BTreeMap::new(),
            workdir: "/workspace".to_owned(),
            packages: false,
            ports: Vec::new(),
            services: Vec::new(),
            hooks: Hooks::new(),
        }
    }
}

impl SandboxSpec {
    /// What of it an instance is made of. The rest is given to commands, started in it, or asked of it.
    #[must_use]
    pub fn of_instance(&self) -> Self {
        Self { env: BTreeMap::new(), ports: Vec::new(), services: Vec::new(), hooks: Hooks::new(), ..self.clone() }
    }

    /// Refuses what no provider could make.
    pub fn check(&self) -> Result<(), Invalid> {
        self.limits.check()?;
        check_pairs("environment variables", &self.env)?;
        if let Some(name) = self.env.keys().find(|name| name.contains('=')) {
            return Err(Invalid::new(
                format!("the variable {name:?} has a = in its name"),
                "write NAME and value apart",
            ));
        }
        if !self.workdir.starts_with('/') || self.workdir.contains('\0') || self.workdir.len() > TEXT_BYTES_MAX {
            return Err(Invalid::new("the working directory is no absolute path", "/workspace is the default"));
        }
        if self.ports.len() > PORTS_MAX || self.ports.contains(&0) {
            return Err(Invalid::new(
                format!("at most {PORTS_MAX} ports can be probed, and 0 is none"),
                "name the ports that have to answer before it is used",
            ));
        }
        check_services(&self.services)?;
        check_hooks(&self.hooks)
    }
}

/// Refuses labels and variables that are too many, too long or no text.
pub fn check_pairs(what: &str, pairs: &BTreeMap<String, String>) -> Result<(), Invalid> {
    let odd = |text: &str| text.contains('\0') || text.len() > TEXT_BYTES_MAX;
    if pairs.len() > PAIRS_MAX {
        return Err(Invalid::new(format!("{} {what} are too many", pairs.len()), format!("at most {PAIRS_MAX}")));
    }
    if pairs.iter().any(|(name, value)| name.is_empty() || odd(name) || odd(value)) {
        return Err(Invalid::new(
            format!("{what} need a name, hold no NUL, and are at most {TEXT_BYTES_MAX} bytes long"),
            "put data into a file inside instead",
        ));
    }
    Ok(())
}

/// By which rules a sandbox lives. It survives every verb (L16).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Whether it is saved when it stops (L2). What is not leaves nothing.
    pub persistent: bool,
    /// The hard deadline of each instance, from when it is made (L5).
    pub lifetime_ms: u64,
    /// Time without activity after which it is frozen.
    pub idle_ms: u64,
    /// Time frozen after which it is saved, or, when it is not persistent, ends.
    #[serde(default = "hibernate_ms_default")]
    pub hibernate_ms: u64,
    /// What is saved of it.
    #[serde(default, skip_serializing_if = "Hibernate::is_filesystem")]
    pub hibernate: Hibernate,
    /// How many snapshots that were asked for are kept: the oldest go first (L11). All, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_max: Option<u32>,
    /// How long snapshots that were asked for are kept. For ever, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_age_ms: Option<u64>,
}

/// What is saved of a sandbox that hibernates (L13).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hibernate {
    /// Its files. What ran is lost, and services are started again.
    #[default]
    Filesystem,
    /// Its memory too, where the provider can: what ran goes on.
    Memory,
}

impl Hibernate {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it over so")]
    fn is_filesystem(&self) -> bool {
        *self == Self::Filesystem
    }
}

/// Of records that were written before there was a choice.
fn hibernate_ms_default() -> u64 {
    HIBERNATE_MS_DEFAULT
}

impl Policy {
    /// What holds when nothing is said: who has a name stays (L2).
    pub fn default_for(name: Option<&Name>) -> Self {
        Self {
            persistent: name.is_some(),
            lifetime_ms: LIFETIME_MS_DEFAULT,
            idle_ms: IDLE_MS_DEFAULT,
            hibernate_ms: HIBERNATE_MS_DEFAULT,
            hibernate: Hibernate::Filesystem,
            snapshots_max: None,
            snapshots_age_ms: None,
        }
    }

    /// Refuses what cannot be kept.
    pub fn check(&self) -> Result<(), Invalid> {
        if !(1_000..=LIFETIME_MS_MAX).contains(&self.lifetime_ms) {
            return Err(Invalid::new(
                format!("a lifetime is between a second and {LIFETIME_MS_MAX} ms"),
                "leave it out for an hour, and extend it when needed",
            ));
        }
        if self.idle_ms < 1_000 || self.hibernate_ms < 1_000 {
            return Err(Invalid::new("less than a second is no idling", "leave it out for 15 minutes"));
        }
        if self.snapshots_max == Some(0) || self.snapshots_age_ms.is_some_and(|age_ms| age_ms < 1_000) {
            return Err(Invalid::new(
                "at least one snapshot is kept, and for at least a second",
                "leave it out to keep all of them",
            ));
        }
        Ok(())
    }
}

macro_rules! word {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// It as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Invalid;

            fn from_str(text: &str) -> Result<Self, Invalid> {
                let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
                let fits = (1..=63).contains(&text.len()) && text.chars().all(allowed);
                if !fits || text.starts_with('-') || text.ends_with('-') {
                    let hint = "1 to 63 of a-z, 0-9 and -, and no - at either end";
                    return Err(Invalid::new(format!(concat!("{:?} is no name for ", $what), clip(text)), hint));
                }
                Ok(Self(text.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = Invalid;

            fn try_from(text: String) -> Result<Self, Invalid> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

/// An error message must not carry an unbounded piece of bad input.
fn clip(text: &str) -> String {
    text.chars().take(64).collect()
}

word!(
    /// What a sandbox is called in its project.
    Name,
    "a sandbox"
);
word!(
    /// Whose sandboxes belong together; nothing reaches from one project into another.
    Project,
    "a project"
);

word!(
    /// What a service is called in its sandbox.
    ServiceName,
    "a service"
);

impl Project {
    /// Whose spares are until somebody claims them (L19). Nobody can make anything in it.
    const SPARES: &'static str = "viv-spares";

    /// That one.
    pub fn spares() -> Self {
        Self(Self::SPARES.to_owned())
    }

    /// Whether it is that one.
    pub fn is_spares(&self) -> bool {
        self.0 == Self::SPARES
    }
}

impl Default for Project {
    /// The one that is there when none was made.
    fn default() -> Self {
        Self("default".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels() {
        for good in ["a", "a-b", "0", &"x".repeat(63)] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a b", "ä", "../x", &"x".repeat(64)] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }

    #[test]
    fn odd_specs_are_refused() {
        let good = SandboxSpec::default();
        assert_eq!(good.check(), Ok(()));
        let bad = [
            SandboxSpec { workdir: "here".to_owned(), ..good.clone() },
            SandboxSpec { ports: vec![0], ..good.clone() },
            SandboxSpec { env: [("A=B".to_owned(), String::new())].into(), ..good.clone() },
            SandboxSpec { env: [(String::new(), String::new())].into(), ..good },
        ];
        for spec in bad {
            assert!(spec.check().is_err(), "{spec:?}");
        }
    }
}
