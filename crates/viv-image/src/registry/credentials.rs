//! Who we are, from a file as `docker login` writes it.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::files::{Links, open_regular, read_bounded};
use crate::limits::SETTINGS_BYTES_MAX;

/// A name and a password. Neither is printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// Who.
    pub username: String,
    /// The proof.
    pub password: String,
}

impl fmt::Debug for Credential {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Credential(…)")
    }
}

/// Credentials by registry.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    by_registry: BTreeMap<String, Credential>,
}

/// A file of credentials that cannot be used. What is in it is not told.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The file.
    #[error("{} cannot be read", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its form.
    #[error("{} is no docker config.json", path.display())]
    Format {
        /// Which.
        path: PathBuf,
    },
    /// One of its entries.
    #[error("the credentials for {registry:?} in {} are not understood", path.display())]
    Entry {
        /// Which file.
        path: PathBuf,
        /// Which entry.
        registry: String,
    },
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    auth: Option<String>,
    #[serde(default)]
    username: Option<String>,
    #[serde(default)]
    password: Option<String>,
}

impl Credentials {
    /// Reads the `auths` of a docker `config.json`. Helpers and stores, which are programs, are not run.
    pub fn from_docker_config(path: &Path) -> Result<Self, CredentialsError> {
        let failed = |source| CredentialsError::Read { path: path.to_owned(), source };
        let format = || CredentialsError::Format { path: path.to_owned() };
        let file = open_regular(path, Links::Follow).map_err(failed)?;
        let bytes = read_bounded(file, SETTINGS_BYTES_MAX).map_err(failed)?.ok_or_else(format)?;
        // The parser's own error may quote what it could not read.
        let file: File = serde_json::from_slice(&bytes).map_err(|_| format())?;
        let mut credentials = Self::default();
        for (registry, entry) in file.auths {
            let wrong = || CredentialsError::Entry { path: path.to_owned(), registry: registry.clone() };
            if let Some(credential) = entry.read().map_err(|()| wrong())? {
                credentials.insert(&registry, credential);
            }
        }
        Ok(credentials)
    }

    /// Adds those for a registry, in place of any before.
    pub fn insert(&mut self, registry: &str, credential: Credential) {
        self.by_registry.insert(normal(registry), credential);
    }

    pub(super) fn get(&self, registry: &str) -> Option<&Credential> {
        self.by_registry.get(&normal(registry))
    }
}

impl Entry {
    /// `None` for an entry without content, as is left where a store has the password.
    fn read(self) -> Result<Option<Credential>, ()> {
        match (self.auth, self.username, self.password) {
            (Some(auth), _, _) if !auth.is_empty() => {
                let decoded = STANDARD.decode(auth.trim()).map_err(drop)?;
                let text = String::from_utf8(decoded).map_err(drop)?;
                // Docker once padded with NUL.
                let (username, password) = text.trim_end_matches('\0').split_once(':').ok_or(())?;
                Ok(Some(Credential { username: username.to_owned(), password: password.to_owned() }))
            }
            (_, Some(username), Some(password)) => Ok(Some(Credential { username, password })),
            _ => Ok(None),
        }
    }
}

/// Registries stand there as hosts or as URLs, and Docker's own under names of its own.
fn normal(registry: &str) -> String {
    let host = registry.trim_start_matches("https://").trim_start_matches("http://");
    let host = host.split('/').next().unwrap_or_default();
    match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        host => host.to_ascii_lowercase(),
    }
}

/// The header for a name and a password.
pub(super) fn basic(credential: &Credential) -> String {
    format!("Basic {}", STANDARD.encode(format!("{}:{}", credential.username, credential.password)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Credentials, CredentialsError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        Credentials::from_docker_config(&path)
    }

    #[test]
    fn what_docker_login_writes_is_found_by_registry() {
        let credentials = read(
            r#"{"auths": {"https://index.docker.io/v1/": {"auth": "bWU6YTpi"}, "ghcr.io": {"auth": ""},
                "localhost:5000": {"username": "x", "password": "y"}}, "credsStore": "desktop"}"#,
        )
        .unwrap();
        let me = credentials.get("docker.io").unwrap();
        assert_eq!((me.username.as_str(), me.password.as_str()), ("me", "a:b"));
        assert_eq!(basic(me), "Basic bWU6YTpi");
        assert!(credentials.get("localhost:5000").is_some());
        assert!(credentials.get("ghcr.io").is_none());
        assert!(credentials.get("localhost").is_none());
        assert!(!format!("{credentials:?}").contains("a:b"));
    }

    #[test]
    fn errors_do_not_tell_secrets() {
        for text in [r#"{"auths": {"x": {"auth": "hunter2!"}}}"#, r#"{"auths": {"x": "hunter2"}}"#, "hunter2", "[1]"] {
            let error = read(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }
}
