//! Texts with a shape.
//!
//! Patterns are written so that every regular expression engine reads them alike; the checks are written by hand, and
//! a test holds the two together.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use viv_core::SandboxId;
use viv_core::spec::TEXT_BYTES_MAX;

use super::BoundError;

macro_rules! text {
    ($(#[doc = $doc:literal])+ $name:ident, $what:literal, $min:expr, $max:expr, $pattern:expr, $rule:literal, $example:literal, $check:expr) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The fewest characters.
            pub const MIN: usize = $min;
            /// The most characters.
            pub const MAX: usize = $max;
            /// Its shape as a regular expression.
            pub const PATTERN: &'static str = $pattern;

            /// Takes a text that has the right shape.
            pub fn new(text: impl Into<String>) -> Result<Self, BoundError> {
                let text = text.into();
                let len = text.chars().count();
                let check: fn(&str) -> bool = $check;
                // Whoever gives a short name where an id is wanted is told what one looks like, and not how long it is.
                let min = Self::MIN;
                if len > 0 && len < min && !check(&text) {
                    return Err(BoundError::Shape { what: $what, rule: $rule });
                }
                if !(Self::MIN..=Self::MAX).contains(&len) {
                    return Err(BoundError::Length { what: $what, min: Self::MIN, max: Self::MAX, len });
                }
                if !check(&text) {
                    return Err(BoundError::Shape { what: $what, rule: $rule });
                }
                Ok(Self(text))
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = BoundError;

            fn try_from(text: String) -> Result<Self, BoundError> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(text: $name) -> String {
                text.0
            }
        }

        impl FromStr for $name {
            type Err = BoundError;

            fn from_str(text: &str) -> Result<Self, BoundError> {
                Self::new(text)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                crate::openapi::text(concat!($($doc),+), Self::MIN, Self::MAX, Self::PATTERN, $example)
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::ToSchema for $name {}
    };
}

/// Names are DNS labels, so that a sandbox can be a host name; none can be taken for an option or an id.
const LABEL_PATTERN: &str = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$";

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-') && !text.is_empty()
}

/// Letters and digits first, then also these.
fn is_word(text: &str, also: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphanumeric())
        && chars.all(|c| c.is_ascii_alphanumeric() || also.contains(c))
}

/// What is shown in lists and logs must not move the cursor there.
const PRINTABLE_PATTERN: &str = "^[^\\u0000-\\u001f\\u007f-\\u009f]*$";

fn is_printable(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

/// The kernel takes texts that end with a NUL.
const NO_NUL_PATTERN: &str = "^[^\\u0000]*$";

fn has_no_nul(text: &str) -> bool {
    !text.contains('\0')
}

/// What the kernel takes, without the NUL at the end.
const PATH_BYTES_MAX: usize = 4_095;

text!(
    /// A sandbox's name, unique in its project.
    SandboxName, "a name", 1, 63, LABEL_PATTERN,
    "small letters, digits and hyphens, without a hyphen at either end", "build-agent", is_label
);
text!(
    /// A project's name: sandboxes and keys belong to one, and see no other.
    ProjectName, "a project", 1, 63, LABEL_PATTERN,
    "small letters, digits and hyphens, without a hyphen at either end", "default", is_label
);
text!(
    /// A sandbox's id (`sbx_…`) or its name. Names have no underscore, so the two cannot be mixed up.
    SandboxRef, "a sandbox", 1, 63, "^(sbx_[a-z0-9]{1,48}|[a-z0-9]([a-z0-9-]*[a-z0-9])?)$",
    "an id (sbx_…) or a name of small letters, digits and hyphens", "build-agent",
    |text| text.parse::<SandboxId>().is_ok() || is_label(text)
);
text!(
    /// A snapshot's id.
    SnapshotRef, "a snapshot's id", 5, 52, "^snp_[a-z0-9]+$", "snp_ and then small letters and digits",
    "snp_01h2xcejqtf2nbrexx3vqjhp41", |text| text.parse::<viv_core::SnapshotId>().is_ok()
);
text!(
    /// A label's key.
    LabelKey, "a label's key", 1, 63, "^[A-Za-z0-9][A-Za-z0-9._/-]*$",
    "letters, digits, dots, slashes, hyphens and underscores, beginning with a letter or digit", "team",
    |text| is_word(text, "._/-")
);
text!(
    /// A label's value.
    LabelValue, "a label's value", 0, 256, PRINTABLE_PATTERN, "without control characters", "search", is_printable
);
text!(
    /// The name of an environment variable.
    EnvName, "the name of a variable", 1, 256, "^[!-<>-~]+$",
    "visible ASCII characters without an equals sign", "LANG",
    |text| text.chars().all(|c| c.is_ascii_graphic() && c != '=')
);
text!(
    /// The value of an environment variable of a sandbox; data belongs into a file.
    EnvValue, "the value of a variable", 0, TEXT_BYTES_MAX, NO_NUL_PATTERN, "without NUL, and at most 4096 bytes long", "C.UTF-8",
    |text| has_no_nul(text) && text.len() <= TEXT_BYTES_MAX
);
text!(
    /// The value of an environment variable of one command.
    CommandEnvValue, "the value of a variable", 0, 32_768, NO_NUL_PATTERN, "without NUL", "C.UTF-8", has_no_nul
);
text!(
    /// A program, or an argument of it. The kernel takes none longer than 128 KiB.
    Argument, "an argument", 0, 131_071, NO_NUL_PATTERN, "without NUL", "echo", has_no_nul
);
text!(
    /// What a service is called in its sandbox.
    ServiceName, "a service's name", 1, 63, LABEL_PATTERN,
    "small letters, digits and hyphens, without a hyphen at either end", "web", is_label
);
text!(
    /// A program, or an argument of it, that is kept with a sandbox; longer ones belong into a script.
    Word, "a word of a command", 0, TEXT_BYTES_MAX, NO_NUL_PATTERN, "without NUL, and at most 4096 bytes long", "serve",
    |text| has_no_nul(text) && text.len() <= TEXT_BYTES_MAX
);
text!(
    /// To whom a webhook goes: no user and no password in it.
    WebhookUrl, "a webhook's URL", 8, 2_048, "^https?://[!-?A-~]+$",
    "http:// or https:// and then visible ASCII characters without @", "https://example.com/hook",
    |text| {
        let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
        rest.is_some_and(|rest| !rest.is_empty() && rest.chars().all(|c| c.is_ascii_graphic() && c != '@'))
    }
);
text!(
    /// With what a webhook is signed. Never told back (S6).
    HookSecret, "a secret", 16, 1_024, "^[!-~]+$", "visible ASCII characters", "0123456789abcdef0123456789abcdef",
    |text| text.chars().all(|c| c.is_ascii_graphic())
);
text!(
    /// An absolute path inside the sandbox.
    Path, "a path", 1, PATH_BYTES_MAX, "^/[^\\u0000]*$", "absolute, without NUL, and at most 4095 bytes long", "/workspace/main.py",
    |text| text.starts_with('/') && has_no_nul(text) && text.len() <= PATH_BYTES_MAX
);
text!(
    /// Who runs a command or owns a file: `name`, `uid`, `name:group` or `uid:gid` as the sandbox knows them.
    UserName, "a user", 1, 65, "^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$",
    "a name or number, with a group after a colon if need be", "1000:1000",
    |text| {
        let part = |part: &str| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
        };
        let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
        part(user) && group.is_none_or(part)
    }
);
text!(
    /// Permission bits in octal.
    FileMode, "a mode", 3, 4, "^[0-7]+$", "three or four octal digits", "0644",
    |text| text.chars().all(|c| ('0'..='7').contains(&c))
);
text!(
    /// What a sandbox is made of: `host` for the machine's own userland, or the name of an image.
    ImageName, "an image", 1, 512, "^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$",
    "host, or a name or reference of letters, digits and . _ : / @ + -", "host",
    |text| is_word(text, "._:/@+-")
);
text!(
    /// The name of a keep-awake lease; taking it again under the same name renews it.
    LeaseName, "a lease's name", 1, 64, "^[A-Za-z0-9][A-Za-z0-9._-]*$",
    "letters, digits, dots, hyphens and underscores, beginning with a letter or digit", "harness-1",
    |text| is_word(text, "._-")
);
text!(
    /// A word about why, for people.
    Note, "a note", 0, 256, PRINTABLE_PATTERN, "without control characters", "waiting for the model", is_printable
);
text!(
    /// What lines are looked for with.
    SearchText, "a text to search for", 1, 256, PRINTABLE_PATTERN, "without control characters", "error",
    is_printable
);
text!(
    /// A part of the daemon, in its logs.
    ComponentName, "a component", 1, 64, "^[A-Za-z0-9][A-Za-z0-9._:-]*$",
    "letters, digits and . _ : -", "engine", |text| is_word(text, "._:-")
);
text!(
    /// The code of a cause: why something happened.
    CauseCode, "a cause", 1, 64, "^[a-z][a-z_]*$", "small letters and underscores", "expired",
    |text| text.starts_with(|c: char| c.is_ascii_lowercase()) && text.chars().all(|c| c.is_ascii_lowercase() || c == '_')
);
text!(
    /// Who did something: a key, a part of the daemon, or who asked from inside a sandbox.
    ActorName, "who did it", 1, 256, PRINTABLE_PATTERN, "without control characters", "key:key_01h2xcejqtf2nbrexx3vqjhp41",
    is_printable
);
text!(
    /// From which address somebody came, as it is told: without a port.
    FromAddress, "an address", 1, 64, PRINTABLE_PATTERN, "without control characters", "192.0.2.7",
    is_printable
);
text!(
    /// A kind of event, or how several of them begin.
    EventKind, "a kind of event", 1, 64, "^[a-z][a-z_]*(\\.[a-z][a-z_]*)*$",
    "small letters and underscores, in parts with a dot between", "execution", |text| {
        text.split('.').all(|part| {
            part.starts_with(|c: char| c.is_ascii_lowercase())
                && part.chars().all(|c| c.is_ascii_lowercase() || c == '_')
        })
    }
);
text!(
    /// A key's name, for people.
    KeyName, "a key's name", 1, 64, "^[A-Za-z0-9][A-Za-z0-9._@-]*$",
    "letters, digits, dots, hyphens, underscores and @, beginning with a letter or digit", "ci",
    |text| is_word(text, "._@-")
);
text!(
    /// A key's id; not the key itself.
    KeyId, "a key's id", 5, 52, "^key_[a-z0-9]+$", "key_ and then small letters and digits", "key_01h2xcejqtf2nbrexx3vqjhp41",
    |text| {
        let body = text.strip_prefix("key_").unwrap_or_default();
        !body.is_empty() && body.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
    }
);
text!(
    /// Where the next page begins: what the page before said, and nothing else.
    Cursor, "a cursor", 1, 256, "^[A-Za-z0-9_.=-]+$", "what the page before gave as next", "c2J4XzAx",
    |text| text.chars().all(|c| c.is_ascii_alphanumeric() || "_.=-".contains(c))
);
text!(
    /// When a schedule is due: minute, hour, day of month, month and day of week, or a word like `@daily`.
    CronText, "a cron expression", 1, 256, "^[!-~ ]+$", "visible ASCII characters and spaces", "*/15 9-17 * * mon-fri",
    |text| text.chars().all(|c| c.is_ascii_graphic() || c == ' ')
);
text!(
    /// A time zone of the IANA database.
    ZoneName, "a time zone", 1, 64, "^[A-Za-z0-9_+/-]+$", "letters, digits and _ + / -", "Europe/Berlin",
    |text| text.chars().all(|c| c.is_ascii_alphanumeric() || "_+/-".contains(c))
);
text!(
    /// A schedule's id.
    ScheduleRef, "a schedule's id", 5, 52, "^sch_[a-z0-9]+$", "sch_ and then small letters and digits",
    "sch_01h2xcejqtf2nbrexx3vqjhp41",
    |text| text.parse::<viv_core::ScheduleId>().is_ok()
);
text!(
    /// A webhook's id.
    WebhookRef, "a webhook's id", 5, 52, "^whk_[a-z0-9]+$", "whk_ and then small letters and digits",
    "whk_01h2xcejqtf2nbrexx3vqjhp41",
    |text| text.parse::<viv_core::WebhookId>().is_ok()
);
text!(
    /// A task's id.
    TaskRef, "a task's id", 5, 52, "^tsk_[a-z0-9]+$", "tsk_ and then small letters and digits",
    "tsk_01h2xcejqtf2nbrexx3vqjhp41",
    |text| text.parse::<viv_core::TaskId>().is_ok()
);
text!(
    /// The id of a grant: what the gate gave.
    GrantRef, "a grant", 5, 52, "^req_[a-z0-9]+$", "req_ and then small letters and digits",
    "req_01h2xcejqtf2nbrexx3vqjhp41",
    |text| text.parse::<viv_core::RequestId>().is_ok()
);
text!(
    /// What an effect of a task is called.
    EffectName, "an effect", 1, 63, "^[A-Za-z0-9][A-Za-z0-9._-]*$",
    "letters, digits, dots, hyphens and underscores, beginning with a letter or digit", "push",
    |text| is_word(text, "._-")
);
text!(
    /// An agent's own session.
    SessionText, "a session", 1, 256, PRINTABLE_PATTERN, "without control characters", "session-1", is_printable
);
text!(
    /// From where a repository is cloned, as seen from inside: a URL, a folder or a bundle.
    GitUrl, "a repository", 1, 2_048, "^[^\\u0000-\\u001f\\u007f-\\u009f-][^\\u0000-\\u001f\\u007f-\\u009f]*$",
    "without control characters, and does not begin with a hyphen", "https://example.com/repository.git",
    |text| is_printable(text) && !text.starts_with('-')
);
text!(
    /// What is checked out: a branch, a tag or a commit.
    GitReference, "a reference", 1, 256, "^[A-Za-z0-9][A-Za-z0-9._/+@-]*$",
    "letters, digits and . _ / + @ -, beginning with a letter or digit", "main",
    |text| is_word(text, "._/+@-")
);
text!(
    /// What is in a file that comes with a task; larger ones belong into an image, a snapshot or a repository.
    FileText, "a file's text", 0, 65_536, NO_NUL_PATTERN, "without NUL", "echo hello", has_no_nul
);
text!(
    /// Says that two requests are one. Kept for 24 hours and until the sandbox ended (L1).
    IdempotencyKey, "an idempotency key", 1, 255, "^[!-~]+$", "visible ASCII characters", "2c1e9f0a",
    |text| text.chars().all(|c| c.is_ascii_graphic())
);

/// What a [`SandboxRef`] turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    /// An id.
    Id(SandboxId),
    /// A name in the caller's project.
    Name(SandboxName),
}

impl SandboxRef {
    /// Tells an id from a name.
    pub fn named(&self) -> Named {
        match self.0.parse() {
            Ok(id) => Named::Id(id),
            Err(_) => Named::Name(SandboxName(self.0.clone())),
        }
    }
}

impl ScheduleRef {
    /// The id.
    pub fn id(&self) -> viv_core::ScheduleId {
        self.0.parse().expect("it was checked when it was made")
    }
}

impl WebhookRef {
    /// The id.
    pub fn id(&self) -> viv_core::WebhookId {
        self.0.parse().expect("it was checked when it was made")
    }
}

impl TaskRef {
    /// The id.
    pub fn id(&self) -> viv_core::TaskId {
        self.0.parse().expect("it was checked when it was made")
    }
}

impl From<&viv_core::TaskId> for TaskRef {
    fn from(id: &viv_core::TaskId) -> Self {
        Self(id.as_str().to_owned())
    }
}

impl GrantRef {
    /// The id.
    pub fn id(&self) -> viv_core::RequestId {
        self.0.parse().expect("it was checked when it was made")
    }
}

impl From<SandboxId> for SandboxRef {
    fn from(id: SandboxId) -> Self {
        Self(id.into())
    }
}

impl From<&SandboxId> for SandboxRef {
    fn from(id: &SandboxId) -> Self {
        Self(id.as_str().to_owned())
    }
}

impl From<SandboxName> for SandboxRef {
    fn from(name: SandboxName) -> Self {
        Self(name.0)
    }
}

impl Default for ImageName {
    fn default() -> Self {
        Self(Self::HOST.to_owned())
    }
}

impl ImageName {
    /// The machine's own userland.
    pub const HOST: &'static str = "host";

    /// Whether it is the machine's own userland.
    pub fn is_host(&self) -> bool {
        self.0 == Self::HOST
    }
}

impl FileMode {
    /// The bits.
    pub fn bits(&self) -> u32 {
        u32::from_str_radix(&self.0, 8).unwrap_or(0)
    }

    /// From bits; those above the permission, set-id and sticky bits are left out.
    pub fn from_bits(bits: u32) -> Self {
        Self(format!("{:04o}", bits & 0o7777))
    }
}
