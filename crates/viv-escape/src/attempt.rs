//! What an attempt is, and what can come of it.

use std::collections::BTreeMap;
use std::io;

/// One way out to try.
pub(crate) struct Attempt {
    /// Its name, for reports and for the list of those that open without hardening.
    pub(crate) name: &'static str,
    /// What it tries, as the end of the sentence "it tries to …".
    pub(crate) tries: &'static str,
    /// The errors that count as a refusal. Any other means that it came further than it should.
    pub(crate) refusals: &'static [i32],
    /// Tries it. What it does if it succeeds must do no harm to the host.
    pub(crate) act: fn(&Setting) -> Outcome,
}

/// What came of an attempt.
pub(crate) enum Outcome {
    /// The kernel said no.
    Error(io::Error),
    /// It was kept out in another way.
    Refused(String),
    /// It got through.
    Opened(String),
    /// The kernel does not have what it wanted.
    Missing(String),
}

impl Outcome {
    /// Success is an opening.
    pub(crate) fn of<T>(result: io::Result<T>, evidence: &str) -> Self {
        match result {
            Ok(_) => Self::Opened(evidence.to_owned()),
            Err(error) => Self::Error(error),
        }
    }

    /// An opening if anything is found.
    pub(crate) fn of_finds(finds: &[String], otherwise: &str) -> Self {
        if finds.is_empty() { Self::Refused(otherwise.to_owned()) } else { Self::Opened(finds.join(", ")) }
    }
}

/// What the suite has set up outside, by name; see [`Setting::get`].
pub(crate) struct Setting {
    /// The descriptors that this program was started with, and what they are.
    pub(crate) descriptors: Vec<(u32, String)>,
    pub(crate) values: BTreeMap<String, String>,
}

/// What stands before the name of every value in the environment.
pub(crate) const PREFIX: &str = "VIV_ESCAPE_";

impl Setting {
    pub(crate) fn read() -> Self {
        // All names first, so that the listing is closed when what they stand for is looked at.
        let names: Vec<_> = std::fs::read_dir("/proc/self/fd")
            .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect())
            .unwrap_or_default();
        let target = |name: &std::ffi::OsString| {
            let target = std::fs::read_link(std::path::Path::new("/proc/self/fd").join(name)).ok()?;
            Some((name.to_str()?.parse().ok()?, target.to_string_lossy().into_owned()))
        };
        let descriptors = names.iter().filter_map(target).collect();
        let values = std::env::vars().filter_map(|(name, value)| Some((name.strip_prefix(PREFIX)?.to_owned(), value)));
        Self { descriptors, values: values.collect() }
    }

    /// What was set up must have been: an attempt at nothing shows nothing.
    pub(crate) fn get(&self, name: &str) -> Result<&str, Outcome> {
        // Not an error of the kernel, and no refusal: it is reported as a failure of the suite.
        self.values.get(name).map(String::as_str).ok_or_else(|| Outcome::Opened(format!("{PREFIX}{name} is not set")))
    }

    pub(crate) fn number<T: std::str::FromStr>(&self, name: &str) -> Result<T, Outcome> {
        self.get(name)?.parse().map_err(|_| Outcome::Opened(format!("{PREFIX}{name} is not a number")))
    }
}
