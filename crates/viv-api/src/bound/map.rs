//! Maps and lists with a length.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use viv_core::service::{ARGV_MAX, SERVICES_MAX};
use viv_core::spec::{PAIRS_MAX, PORTS_MAX};

use super::text::{Argument, CommandEnvValue, EnvName, EnvValue, EventKind, LabelKey, LabelValue, Word};
use super::{BoundError, Port};
use crate::service::Service;
use crate::task::{TaskEffect, TaskFile, TaskStep};

macro_rules! bounded {
    ($(#[doc = $doc:literal])+ $(#[derive($extra:ident)])? $name:ident($inner:ty, $text:literal), $what:literal, $min:expr, $max:expr, $schema:path) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        $(#[derive($extra)])?
        #[serde(try_from = $text, into = $text)]
        pub struct $name($inner);

        impl $name {
            /// The fewest.
            pub const MIN: usize = $min;
            /// The most.
            pub const MAX: usize = $max;

            /// Takes what is not too many.
            pub fn new(inner: $inner) -> Result<Self, BoundError> {
                let len = inner.len();
                if !(Self::MIN..=Self::MAX).contains(&len) {
                    return Err(BoundError::Count { what: $what, min: Self::MIN, max: Self::MAX, len });
                }
                Ok(Self(inner))
            }

            /// What it holds.
            pub fn get(&self) -> &$inner {
                &self.0
            }
        }

        impl TryFrom<$inner> for $name {
            type Error = BoundError;

            fn try_from(inner: $inner) -> Result<Self, BoundError> {
                Self::new(inner)
            }
        }

        impl From<$name> for $inner {
            fn from(bounded: $name) -> $inner {
                bounded.0
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                $schema(concat!($($doc),+), Self::MIN, Self::MAX)
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::ToSchema for $name {}
    };
}

bounded!(
    /// Free labels, by which sandboxes are found.
    #[derive(Default)]
    Labels(BTreeMap<LabelKey, LabelValue>, "BTreeMap<LabelKey, LabelValue>"),
    "labels", 0, PAIRS_MAX, crate::openapi::map::<LabelKey, LabelValue>
);
bounded!(
    /// Environment variables of a sandbox. Values are never told back (S6).
    #[derive(Default)]
    Env(BTreeMap<EnvName, EnvValue>, "BTreeMap<EnvName, EnvValue>"),
    "variables", 0, PAIRS_MAX, crate::openapi::map::<EnvName, EnvValue>
);
bounded!(
    /// Environment variables of one command. Values are never told back (S6).
    #[derive(Default)]
    CommandEnv(BTreeMap<EnvName, CommandEnvValue>, "BTreeMap<EnvName, CommandEnvValue>"),
    "variables", 0, 256, crate::openapi::map::<EnvName, CommandEnvValue>
);
bounded!(
    /// A program and its arguments. The program is looked up in `PATH` when it holds no slash.
    Argv(Vec<Argument>, "Vec<Argument>"),
    "words of a command", 1, 1_024, crate::openapi::list::<Argument>
);
bounded!(
    /// A program and its arguments, kept with a sandbox. The program is looked up in `PATH` when it holds no slash.
    Words(Vec<Word>, "Vec<Word>"),
    "words of a command", 1, ARGV_MAX, crate::openapi::list::<Word>
);
bounded!(
    /// Services, each with a name of its own.
    #[derive(Default)]
    Services(Vec<Service>, "Vec<Service>"),
    "services", 0, SERVICES_MAX, crate::openapi::list_of_named::<Service>
);
bounded!(
    /// TCP ports inside.
    #[derive(Default)]
    Ports(Vec<Port>, "Vec<Port>"),
    "ports", 0, PORTS_MAX, crate::openapi::list::<Port>
);

bounded!(
    /// Steps of a task, one after the other.
    #[derive(Default)]
    TaskSteps(Vec<TaskStep>, "Vec<TaskStep>"),
    "steps", 0, viv_core::task::STEPS_MAX, crate::openapi::list_of_named::<TaskStep>
);
bounded!(
    /// Kinds of events.
    #[derive(Default)]
    EventKinds(Vec<EventKind>, "Vec<EventKind>"),
    "kinds of events", 0, 32, crate::openapi::list::<EventKind>
);
bounded!(
    /// Files that come with a task.
    #[derive(Default)]
    TaskFiles(Vec<TaskFile>, "Vec<TaskFile>"),
    "files", 0, viv_core::task::FILES_MAX, crate::openapi::list_of_named::<TaskFile>
);
bounded!(
    /// Effects of a task, each with a name of its own.
    #[derive(Default)]
    TaskEffects(Vec<TaskEffect>, "Vec<TaskEffect>"),
    "effects", 0, viv_core::task::EFFECTS_MAX, crate::openapi::list_of_named::<TaskEffect>
);

impl Labels {
    /// As plain text, for whoever keeps or compares them.
    pub fn to_map(&self) -> BTreeMap<String, String> {
        self.0.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }
}

impl Env {
    /// As plain text, for whoever hands them on.
    pub fn to_map(&self) -> BTreeMap<String, String> {
        self.0.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }
}

impl CommandEnv {
    /// As plain text, for whoever hands them on.
    pub fn to_map(&self) -> BTreeMap<String, String> {
        self.0.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }
}

impl Argv {
    /// As plain text, for whoever runs it.
    pub fn to_vec(&self) -> Vec<String> {
        self.0.iter().map(Argument::to_string).collect()
    }
}

impl Words {
    /// As plain text, for whoever runs it.
    pub fn to_vec(&self) -> Vec<String> {
        self.0.iter().map(Word::to_string).collect()
    }
}

/// A label that is looked for, as `key=value`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LabelFilter {
    /// The key.
    pub key: LabelKey,
    /// The value it must have.
    pub value: LabelValue,
}

impl FromStr for LabelFilter {
    type Err = BoundError;

    fn from_str(text: &str) -> Result<Self, BoundError> {
        let wrong = BoundError::Shape { what: "a label", rule: "key=value" };
        let (key, value) = text.split_once('=').ok_or(wrong)?;
        Ok(Self { key: key.parse()?, value: value.parse()? })
    }
}

impl TryFrom<String> for LabelFilter {
    type Error = BoundError;

    fn try_from(text: String) -> Result<Self, BoundError> {
        text.parse()
    }
}

impl From<LabelFilter> for String {
    fn from(filter: LabelFilter) -> String {
        filter.to_string()
    }
}

impl fmt::Display for LabelFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.value)
    }
}

#[cfg(feature = "openapi")]
impl utoipa::PartialSchema for LabelFilter {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        let pattern = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}=[^\\u0000-\\u001f\\u007f-\\u009f]{0,256}$";
        crate::openapi::text(
            "A label that is looked for.",
            2,
            LabelKey::MAX + 1 + LabelValue::MAX,
            pattern,
            "team=search",
        )
    }
}

#[cfg(feature = "openapi")]
impl utoipa::ToSchema for LabelFilter {}
