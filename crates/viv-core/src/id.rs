//! Typed identifiers.
//!
//! An id is a short prefix and 1 to [`BODY_BYTES_MAX`] characters of
//! `[a-z0-9]`, so it is safe as a file name, a cgroup name, a DNS label and a
//! URL segment without escaping. New ids are made from 16 bytes handed in by
//! the caller (randomness is an argument here) as 26 characters of base 32.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest body of an id; with the prefix it stays under the 63 bytes of a DNS label.
pub const BODY_BYTES_MAX: usize = 48;

const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The prefix is not the one of this kind of id.
    #[error("{text:?} does not start with {expected:?}")]
    WrongPrefix {
        /// What was given.
        text: String,
        /// The prefix that this kind of id has.
        expected: &'static str,
    },
    /// The body is empty or longer than [`BODY_BYTES_MAX`].
    #[error("{text:?} has {len} characters after its prefix, allowed are 1 to {BODY_BYTES_MAX}")]
    WrongLength {
        /// What was given.
        text: String,
        /// Length of its body.
        len: usize,
    },
    /// A character outside `[a-z0-9]` (owner marks: also `-`).
    #[error("{text:?} contains {found:?}, which an id may not")]
    WrongCharacter {
        /// What was given.
        text: String,
        /// The first character that may not be there.
        found: char,
    },
}

/// Encodes 16 bytes as 26 characters that sort like the bytes do.
fn encode(bytes: [u8; 16]) -> String {
    let mut value = u128::from_be_bytes(bytes);
    let mut out = [0_u8; 26];
    for slot in out.iter_mut().rev() {
        *slot = ALPHABET[(value & 31) as usize];
        value >>= 5;
    }
    out.iter().map(|&b| char::from(b)).collect()
}

fn check(text: &str, prefix: &'static str, also: Option<char>) -> Result<(), IdError> {
    let Some(body) = text.strip_prefix(prefix) else {
        return Err(IdError::WrongPrefix { text: clip(text), expected: prefix });
    };
    if body.is_empty() || body.len() > BODY_BYTES_MAX {
        return Err(IdError::WrongLength { text: clip(text), len: body.len() });
    }
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || Some(c) == also;
    match body.chars().find(|&c| !allowed(c)) {
        Some(found) => Err(IdError::WrongCharacter { text: clip(text), found }),
        None => Ok(()),
    }
}

/// FNV-1a, the same on every machine.
fn hash(parts: &[&str]) -> [u8; 16] {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parts.iter().flat_map(|part| part.bytes());
    bytes.fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME)).to_be_bytes()
}

/// An error message must not carry an unbounded piece of bad input.
fn clip(text: &str) -> String {
    text.chars().take(64).collect()
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// What every id of this kind starts with.
            pub const PREFIX: &'static str = $prefix;

            /// Makes an id from bytes that the caller drew.
            pub fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(format!("{}{}", $prefix, encode(bytes)))
            }

            /// The id of what belongs to `of`: its letters and these few. Where both are too long for an id, a hash stands
            /// for the letters: cut off, they would be those of another one too.
            pub fn derived(of: &str, suffix: &str) -> Self {
                let letters = of.split_once('_').map_or(of, |(_, letters)| letters);
                let is_short = letters.len() + suffix.len() <= BODY_BYTES_MAX;
                let body = if is_short { letters.to_owned() } else { encode(hash(&[letters])) };
                format!("{}{body}{suffix}", $prefix).parse().expect("made of an id and few letters")
            }

            /// The id as text, prefix included.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                check(text, $prefix, None)?;
                Ok(Self(text.to_owned()))
            }
        }

        text_traits!($name);
    };
}

macro_rules! text_traits {
    ($name:ident) => {
        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// A durable identity; its instances come and go.
    SandboxId, "sbx_"
);
id!(
    /// One command in one instance.
    ExecutionId, "exe_"
);

impl ExecutionId {
    /// What this one is called in a sandbox that was forked together with its memory: the same for all who ask, and
    /// another one in each.
    #[must_use]
    pub fn copied_into(&self, sandbox: &SandboxId) -> Self {
        // What writes a copy's name outside and inside need not agree on more than this.
        Self::from_bytes(hash(&[sandbox.as_str(), self.as_str()]))
    }
}

id!(
    /// One intended change. Repeating a call with the same operation id does the work once.
    OperationId, "op_"
);
id!(
    /// A saved filesystem, with memory where the provider can.
    SnapshotId, "snp_"
);
id!(
    /// A schedule of a sandbox.
    ScheduleId, "sch_"
);
id!(
    /// A task.
    TaskId, "tsk_"
);
id!(
    /// A subscription to the journal.
    WebhookId, "whk_"
);
id!(
    /// One thing that somebody inside a sandbox asked for.
    RequestId, "req_"
);

/// Says whose a sandbox is: one installation of Vivarium, one test.
///
/// Everything that a provider makes carries its owner's mark, and nobody
/// touches what carries another.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OwnerMark(String);

impl OwnerMark {
    /// The mark as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for OwnerMark {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        check(text, "", Some('-'))?;
        Ok(Self(text.to_owned()))
    }
}

text_traits!(OwnerMark);

/// Counts the instances of one sandbox; it only grows (T5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    /// The generation of a sandbox's first instance.
    pub const FIRST: Self = Self(1);

    /// The generation that follows.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Grows with every change of the lease on a sandbox; the highest one seen wins (L15).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FencingToken(pub u64);

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The longest that is hung on any id: a service of the last generations.
    const SUFFIX: &str = "g9999999s15n4294967295";

    proptest! {
        #[test]
        fn what_belongs_to_two_has_two_ids(a in "[a-z0-9]{1,48}", b in "[a-z0-9]{1,48}", cut in 0..=SUFFIX.len()) {
            let of = |letters: &str| ExecutionId::derived(&format!("sbx_{letters}"), &SUFFIX[cut..]);
            prop_assert_eq!(of(&a) == of(&b), a == b);
            // Ids that differ at their very end do too.
            let (one, other) = (format!("{}1", &a[1..]), format!("{}2", &a[1..]));
            prop_assert_ne!(of(&one), of(&other));
        }
    }

    #[test]
    fn copies_have_ids_of_their_own() {
        let execution = ExecutionId::from_bytes([7; 16]);
        let sandboxes = [[1; 16], [2; 16]].map(SandboxId::from_bytes);
        let copies = sandboxes.each_ref().map(|sandbox| execution.copied_into(sandbox));
        assert!(copies[0] != copies[1] && copies.iter().all(|copy| *copy != execution));
        assert_eq!(copies[0], execution.copied_into(&sandboxes[0]));
        assert_ne!(copies[0], ExecutionId::from_bytes([8; 16]).copied_into(&sandboxes[0]));
        // Written into memories that are kept: it stays as it is.
        assert_eq!(copies[0].as_str(), "exe_2v7rtbmbfeydnfs1a183pyj6p4");
    }

    #[test]
    fn bad_ids_are_told_apart() {
        assert!(matches!("exe_1".parse::<SandboxId>(), Err(IdError::WrongPrefix { .. })));
        assert!(matches!("sbx_".parse::<SandboxId>(), Err(IdError::WrongLength { len: 0, .. })));
        assert!(matches!("sbx_a/b".parse::<SandboxId>(), Err(IdError::WrongCharacter { found: '/', .. })));
        assert!(matches!("sbx_..".parse::<SandboxId>(), Err(IdError::WrongCharacter { found: '.', .. })));
        assert!(matches!("a b".parse::<OwnerMark>(), Err(IdError::WrongCharacter { found: ' ', .. })));
    }

    proptest! {
        #[test]
        fn made_ids_parse_and_sort_like_their_bytes(a: [u8; 16], b: [u8; 16]) {
            let (x, y) = (SandboxId::from_bytes(a), SandboxId::from_bytes(b));
            prop_assert_eq!(&x.as_str().parse::<SandboxId>().unwrap(), &x);
            prop_assert_eq!(a.cmp(&b), x.cmp(&y));
        }

        #[test]
        fn no_text_breaks_the_parser(text in ".*") {
            if let Ok(id) = text.parse::<ExecutionId>() {
                prop_assert_eq!(id.as_str(), text);
            }
        }
    }

    #[test]
    fn a_bad_id_does_not_deserialise() {
        assert!(serde_json::from_str::<SandboxId>("\"sbx_../../etc\"").is_err());
    }
}
