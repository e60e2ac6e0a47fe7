//! Names of images, with Docker's short forms.
//!
//! ```text
//!   [registry[:port]/]path[/path…][:tag][@sha256:…]
//!
//!   debian              docker.io/library/debian:latest
//!   me/tool:2           docker.io/me/tool:2
//!   localhost:5000/x    localhost:5000/x:latest
//! ```

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::digest::{Digest, shorten};

const DEFAULT_REGISTRY: &str = "docker.io";
const DEFAULT_TAG: &str = "latest";
/// Where Docker's own registry used to be; still written by some.
const LEGACY_REGISTRY: &str = "index.docker.io";
/// Limits of the distribution specification.
const NAME_LEN_MAX: usize = 255;
const TAG_LEN_MAX: usize = 128;

/// An image in a registry. Valid by construction, so that its parts can stand in a URL.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// A text that names no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{input:?} is no image name: {problem}")]
pub struct ReferenceError {
    input: String,
    problem: &'static str,
    hint: Option<&'static str>,
}

impl ReferenceError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        self.hint
    }
}

impl Reference {
    /// Host, and port if there is one: `docker.io`, `localhost:5000`.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Path in the registry: `library/debian`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Missing only when there is a digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The manifest that is meant, whatever the tag says by now.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// The same image, pinned to a manifest.
    #[must_use]
    pub fn with_digest(mut self, digest: Digest) -> Self {
        self.digest = Some(digest);
        self
    }

    /// As people write it: without the registry and the folder that Docker adds.
    pub fn familiar(&self) -> String {
        let full = self.to_string();
        let short = full.strip_prefix("docker.io/");
        let shortest = short.and_then(|short| short.strip_prefix("library/"));
        // A folder that looks like a registry would be taken for one.
        let means_this = |text: &&str| text.parse().is_ok_and(|parsed: Self| parsed == *self);
        [shortest, short].into_iter().flatten().find(means_this).unwrap_or(&full).to_owned()
    }

    /// What a manifest is asked for by: the digest, or the tag.
    pub(crate) fn selector(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => DEFAULT_TAG.to_owned(),
        }
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        parse(text).map_err(|(problem, hint)| ReferenceError { input: shorten(text), problem, hint })
    }
}

type Problem = (&'static str, Option<&'static str>);

fn parse(text: &str) -> Result<Reference, Problem> {
    if text.is_empty() {
        return Err(("it is empty", None));
    }
    if text.contains("://") {
        return Err(("it is a URL", Some("leave out the scheme: registry.example/path:tag")));
    }
    let (text, digest) = match text.split_once('@') {
        Some((name, digest)) => {
            let digest = digest.parse().map_err(|_| ("what follows @ is no sha256:<64 hex digits>", None))?;
            (name, Some(digest))
        }
        None => (text, None),
    };
    let path_start = text.rfind('/').map_or(0, |slash| slash + 1);
    let (name, tag) = match text[path_start..].find(':') {
        Some(colon) => (&text[..path_start + colon], Some(&text[path_start + colon + 1..])),
        None => (text, None),
    };
    if let Some(tag) = tag
        && !valid_tag(tag)
    {
        return Err((
            "the tag may have letters, digits, '_', '.' and '-', must not begin with the last two, and ends at 128",
            None,
        ));
    }
    let (registry, repository) = split_registry(name);
    if registry.len() + 1 + repository.len() > NAME_LEN_MAX {
        return Err(("the name is longer than 255 characters", None));
    }
    if !valid_registry(registry) {
        return Err(("the registry is no host name with an optional port", None));
    }
    let repository = match (registry, repository.contains('/')) {
        (DEFAULT_REGISTRY, false) => format!("library/{repository}"),
        _ => repository.to_owned(),
    };
    check_repository(&repository)?;
    let tag = match (tag, digest) {
        (Some(tag), _) => Some(tag.to_owned()),
        (None, Some(_)) => None,
        (None, None) => Some(DEFAULT_TAG.to_owned()),
    };
    Ok(Reference { registry: registry.to_owned(), repository, tag, digest })
}

/// Docker's rule: the first part is a host if it looks like one.
fn split_registry(name: &str) -> (&str, &str) {
    match name.split_once('/') {
        Some((first, rest)) if first.contains(['.', ':', '[']) || first == "localhost" => {
            (if first == LEGACY_REGISTRY { DEFAULT_REGISTRY } else { first }, rest)
        }
        _ => (DEFAULT_REGISTRY, name),
    }
}

fn valid_tag(tag: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    tag.len() <= TAG_LEN_MAX
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|byte| word(byte) || matches!(byte, b'.' | b'-'))
}

/// Whether a text is a host with an optional port.
pub(crate) fn valid_registry(registry: &str) -> bool {
    let (host, port) = match registry.strip_prefix('[') {
        Some(rest) => {
            let Some((address, after)) = rest.split_once(']') else { return false };
            if address.parse::<std::net::Ipv6Addr>().is_err() {
                return false;
            }
            match after.strip_prefix(':') {
                Some(port) => (None, Some(port)),
                None if after.is_empty() => (None, None),
                None => return false,
            }
        }
        None => match registry.split_once(':') {
            Some((host, port)) => (Some(host), Some(port)),
            None => (Some(registry), None),
        },
    };
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    host.is_none_or(|host| host.split('.').all(label))
        && port.is_none_or(|port| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok())
}

fn check_repository(repository: &str) -> Result<(), Problem> {
    for part in repository.split('/') {
        if part.is_empty() {
            return Err(("a part of the path is empty", None));
        }
        if part.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(("the path has upper-case letters", Some("image names are lower-case")));
        }
        if !valid_part(part) {
            return Err(("the parts of the path may have a-z and 0-9, separated by '.', '_', '__' or dashes", None));
        }
    }
    let last = repository.rsplit('/').next().unwrap_or_default();
    if last.len() == 64 && last.bytes().all(|byte| byte.is_ascii_hexdigit()) && repository == format!("library/{last}")
    {
        return Err(("it looks like an image's id", Some("name@sha256:… names an image by its digest")));
    }
    Ok(())
}

fn valid_part(part: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if !part.bytes().next().is_some_and(word) || !part.bytes().last().is_some_and(word) {
        return false;
    }
    part.split(|char: char| char.is_ascii() && word(char as u8))
        .all(|separator| matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|byte| byte == b'-'))
}

impl fmt::Display for Reference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(out, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(out, "@{digest}")?;
        }
        Ok(())
    }
}

impl TryFrom<String> for Reference {
    type Error = ReferenceError;

    fn try_from(text: String) -> Result<Self, ReferenceError> {
        text.parse()
    }
}

impl From<Reference> for String {
    fn from(reference: Reference) -> Self {
        reference.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn short_names_mean_what_docker_means() {
        for (short, full) in [
            ("debian", "docker.io/library/debian:latest"),
            ("debian:12", "docker.io/library/debian:12"),
            ("me/tool", "docker.io/me/tool:latest"),
            ("localhost/x", "localhost/x:latest"),
            ("localhost:5000/x", "localhost:5000/x:latest"),
            ("localhost:5000/x/y:1.0", "localhost:5000/x/y:1.0"),
            ("ghcr.io/a/b__c", "ghcr.io/a/b__c:latest"),
            ("index.docker.io/library/debian", "docker.io/library/debian:latest"),
            ("docker.io/debian", "docker.io/library/debian:latest"),
            ("[::1]:5000/x", "[::1]:5000/x:latest"),
            ("a-b.c---d", "docker.io/library/a-b.c---d:latest"),
        ] {
            assert_eq!(short.parse::<Reference>().unwrap().to_string(), full, "{short}");
        }
        let pinned = format!("debian@{DIGEST}");
        assert_eq!(pinned.parse::<Reference>().unwrap().to_string(), format!("docker.io/library/debian@{DIGEST}"));
        let both: Reference = format!("debian:12@{DIGEST}").parse().unwrap();
        assert_eq!((both.tag(), both.selector()), (Some("12"), DIGEST.to_owned()));
    }

    #[test]
    fn familiar_names_are_short_and_mean_the_same() {
        let whole = ["docker.io/me.io/tool:1", "docker.io/localhost/tool:1"];
        for name in ["debian:12", "me/tool:latest", "localhost:5000/x:1", "library/a/b:1"].into_iter().chain(whole) {
            assert_eq!(name.parse::<Reference>().unwrap().familiar(), name);
        }
    }

    #[test]
    fn what_is_no_name_is_refused_with_a_reason() {
        for text in [
            "",
            "Debian",
            "https://docker.io/library/debian",
            "debian:",
            "debian:-x",
            "debian@sha256:abc",
            "a//b",
            "/a",
            "a/",
            "a/../b",
            "a/b..c",
            "a___b",
            "-a",
            "a.b:99999/x",
            "-a.b/x",
            "[::1/x",
            "a b",
            "a?b=c",
            "a%2fb",
            "débian",
            "x@y@z",
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        ] {
            assert!(text.parse::<Reference>().is_err(), "{text}");
        }
        assert!("Debian".parse::<Reference>().unwrap_err().hint().is_some());
        assert!("a".repeat(300).parse::<Reference>().is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_a_stable_reference_or_an_error(text in "[a-zA-Z0-9./:@_\\[\\]-]{0,40}|\\PC{0,30}") {
            if let Ok(reference) = text.parse::<Reference>() {
                let full = reference.to_string();
                prop_assert_eq!(full.parse::<Reference>().unwrap(), reference.clone());
                prop_assert_eq!(reference.familiar().parse::<Reference>().unwrap(), reference);
            }
        }
    }
}
