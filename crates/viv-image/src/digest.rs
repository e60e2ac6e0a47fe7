//! SHA-256 digests, and streams that are hashed as they are read.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const PREFIX: &str = "sha256:";
const HEX_LEN: usize = 64;

/// The name of some bytes: `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

/// A text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// Registries know others, but nobody uses them for images.
    #[error("digest {0:?} is not of the form sha256:<hex>")]
    Algorithm(String),
    /// Too short, too long, or other characters.
    #[error("digest {0:?} does not have 64 lower-case hexadecimal digits")]
    Hex(String),
}

impl Digest {
    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digits without the algorithm: fit for a file's name.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let hex = text.strip_prefix(PREFIX).ok_or_else(|| DigestError::Algorithm(shorten(text)))?;
        let wrong = || DigestError::Hex(shorten(text));
        if hex.len() != HEX_LEN || !hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[index * 2..index * 2 + 2], 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{PREFIX}{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// As much of a foreign text as an error message should hold.
pub(crate) fn shorten(text: &str) -> String {
    const CHARS_MAX: usize = 120;
    if text.chars().count() <= CHARS_MAX {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(CHARS_MAX).collect();
    short.push('…');
    short
}

/// Hashes and counts.
#[derive(Default, Clone)]
pub(crate) struct Hasher {
    sha: Sha256,
    count: u64,
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.sha.update(bytes);
        self.count += bytes.len() as u64;
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn finish(self) -> Digest {
        Digest(self.sha.finalize().into())
    }
}

/// Hashes what is read through it.
pub(crate) struct HashingReader<R> {
    inner: R,
    hasher: Hasher,
}

impl<R: Read> HashingReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, hasher: Hasher::default() }
    }

    pub(crate) fn hasher(&self) -> &Hasher {
        &self.hasher
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn a_digest_reads_as_it_is_written() {
        assert_eq!(Digest::of(b"").to_string(), EMPTY);
        assert_eq!(EMPTY.parse::<Digest>().unwrap(), Digest::of(b""));
        let json = serde_json::to_string(&Digest::of(b"")).unwrap();
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), Digest::of(b""));
    }

    #[test]
    fn what_could_be_a_path_or_another_spelling_is_no_digest() {
        for text in [
            "",
            "sha256:",
            "sha256:../../etc/passwd",
            "sha512:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "sha256:E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B855",
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 ",
            "sha256:äää0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b8",
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
