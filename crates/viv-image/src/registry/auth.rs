//! Proving who we are: Basic, or a token from the service that the registry names.
//!
//! ```text
//!   GET blob ──► 401 Bearer realm="https://auth…",service="…"
//!                  └─► GET realm?service=…&scope=repository:…:pull   (Basic, if we have credentials)
//!                        └─► token ──► GET blob, Bearer
//! ```

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::Deserialize;
use ureq::http::HeaderMap;
use ureq::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};

use super::RegistryError;
use super::credentials::basic;
use super::http::{Access, Session};
use crate::limits::TOKEN_BYTES_MAX;

/// How long a token lives if its service does not say; so the specification.
const TOKEN_LIFE_DEFAULT_SECONDS: u64 = 60;
/// A token is not used in its last moments.
const TOKEN_MARGIN: Duration = Duration::from_secs(10);
/// No token is believed to live longer; it is only asked for again.
const TOKEN_LIFE_MAX: Duration = Duration::from_secs(3600);
/// Tokens that are kept; one is for one repository, and the expired are thrown out first.
const TOKENS_MAX: usize = 1024;

/// What requests are authorized with, by registry, repository and access.
#[derive(Default)]
pub(super) struct Authorizations {
    known: Mutex<HashMap<Key, Known>>,
}

type Key = (String, String, Access);

struct Known {
    header: String,
    until: Option<Instant>,
}

impl Authorizations {
    pub(super) fn get(&self, session: &Session<'_>) -> Option<String> {
        let known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let found = known.get(&key(session))?;
        found.until.is_none_or(|until| Instant::now() < until).then(|| found.header.clone())
    }

    fn put(&self, session: &Session<'_>, found: Known) {
        let mut known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if known.len() >= TOKENS_MAX {
            let now = Instant::now();
            known.retain(|_, kept| kept.until.is_none_or(|until| now < until));
            if known.len() >= TOKENS_MAX {
                known.clear();
            }
        }
        known.insert(key(session), found);
    }

    /// Forgets what a registry does not accept any more.
    pub(super) fn forget(&self, session: &Session<'_>) {
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&key(session));
    }
}

fn key(session: &Session<'_>) -> Key {
    (session.endpoint.name.clone(), session.repository.to_owned(), session.access)
}

/// What a token service answers.
#[derive(Deserialize)]
struct Granted {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
    #[serde(default)]
    expires_in: Option<u64>,
}

impl Session<'_> {
    /// Answers the challenge of a registry.
    pub(super) fn authorize(&self, headers: &HeaderMap, what: &str) -> Result<(), RegistryError> {
        self.registry.authorizations.forget(self);
        let challenges: Vec<Challenge> = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(parse_challenges)
            .collect();
        let of = |scheme: &str| challenges.iter().find(|challenge| challenge.scheme.eq_ignore_ascii_case(scheme));
        let credential = self.registry.options.credentials.get(&self.endpoint.name);
        let found = match (of("bearer"), of("basic"), credential) {
            (Some(challenge), _, _) => self.fetch_token(challenge, what)?,
            (None, Some(_), Some(credential)) => Known { header: basic(credential), until: None },
            (None, Some(_), None) => return Err(self.denied(what)),
            (None, None, _) => return Err(self.bad("it asks for a kind of authorization that is not known")),
        };
        self.registry.authorizations.put(self, found);
        Ok(())
    }

    fn fetch_token(&self, challenge: &Challenge, what: &str) -> Result<Known, RegistryError> {
        let realm = challenge.get("realm").ok_or_else(|| self.bad("a challenge without a realm"))?;
        // The service may be anywhere, but not less protected than the registry is.
        let url = self.follow(&self.endpoint.url("/"), realm)?;
        if url.scheme_str() == Some("https") && !self.registry.has_certificates {
            return Err(RegistryError::NoCertificates { host: self.host() });
        }
        let actions = match self.access {
            Access::Pull => "pull",
            Access::Push => "pull,push",
        };
        let mut request = self
            .registry
            .agent
            .get(url)
            .config()
            .timeout_global(Some(self.registry.options.document_timeout))
            .build()
            .query("scope", format!("repository:{}:{actions}", self.repository));
        if let Some(service) = challenge.get("service") {
            request = request.query("service", service);
        }
        if let Some(credential) = self.registry.options.credentials.get(&self.endpoint.name) {
            request = request.header(AUTHORIZATION, basic(credential));
        }
        let asked = Instant::now();
        let response = request.call().map_err(|error| self.broken(error))?;
        if response.status().is_redirection() {
            return Err(self.bad("the token service redirects"));
        }
        if !response.status().is_success() {
            return Err(self.refused(response, what));
        }
        let bytes = self.read_body(response, TOKEN_BYTES_MAX)?;
        // What the parser would say might quote the token.
        let granted: Granted = serde_json::from_slice(&bytes).map_err(|_| self.bad("the token cannot be read"))?;
        let text = granted.token.or(granted.access_token).filter(|token| is_token(token));
        let text = text.ok_or_else(|| self.bad("there is no token in its answer"))?;
        let life = Duration::from_secs(granted.expires_in.unwrap_or(TOKEN_LIFE_DEFAULT_SECONDS)).min(TOKEN_LIFE_MAX);
        Ok(Known { header: format!("Bearer {text}"), until: Some(asked + life.saturating_sub(TOKEN_MARGIN)) })
    }
}

/// Whether a text can stand in a header.
fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// One way to prove who we are.
#[derive(Debug, PartialEq, Eq)]
struct Challenge {
    scheme: String,
    parameters: Vec<(String, String)>,
}

impl Challenge {
    fn get(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// A header's challenges: schemes, each with its parameters. For fuzzing.
#[doc(hidden)]
pub fn challenges(header: &str) -> Vec<(String, Vec<(String, String)>)> {
    parse_challenges(header).into_iter().map(|challenge| (challenge.scheme, challenge.parameters)).collect()
}

/// `Bearer realm="…",service="…", Basic realm="…"`: a word that is not followed by `=` begins the next challenge.
fn parse_challenges(header: &str) -> Vec<Challenge> {
    let mut challenges: Vec<Challenge> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let word_len = rest.find([' ', '\t', ',', '=', '"']).unwrap_or(rest.len());
        if word_len == 0 {
            return challenges;
        }
        let (word, after) = rest.split_at(word_len);
        match (after.strip_prefix('='), challenges.last_mut()) {
            (Some(after), Some(challenge)) => {
                let (value, after) = parse_value(after);
                challenge.parameters.push((word.to_owned(), value));
                rest = after;
            }
            (Some(_), None) => return challenges,
            (None, _) => {
                challenges.push(Challenge { scheme: word.to_owned(), parameters: Vec::new() });
                rest = after;
            }
        }
    }
}

fn parse_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([' ', '\t', ',']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(chars.next().map(|(_, escaped)| escaped)),
            char => value.push(char),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        let all = parse_challenges(
            r#"Bearer realm="https://auth.example/token?a=b,c",service="registry",scope="repository:x:pull,push", Basic realm="x\"y""#,
        );
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].get("REALM"), Some("https://auth.example/token?a=b,c"));
        assert_eq!(all[0].get("scope"), Some("repository:x:pull,push"));
        assert_eq!((all[1].scheme.as_str(), all[1].get("realm")), ("Basic", Some("x\"y")));
        assert_eq!(parse_challenges("Basic").len(), 1);
        assert_eq!(parse_challenges("Bearer realm=https://x/y")[0].get("realm"), Some("https://x/y"));
    }

    proptest! {
        #[test]
        fn any_header_is_read_without_harm(header in "[a-z =\",\\\\]{0,60}|\\PC{0,60}") {
            let _ = parse_challenges(&header);
        }
    }

    #[test]
    fn a_token_stands_in_a_header() {
        assert!(is_token("abc.def-_=="));
        for text in ["", "a b", "a\r\nHost: x", "ä"] {
            assert!(!is_token(text), "{text}");
        }
    }
}
