//! Time zones.

use std::fmt;

use jiff::tz::TimeZone;

/// There is no such time zone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no time zone {name:?}: give one of the IANA database, like UTC or Europe/Berlin")]
pub struct UnknownZone {
    /// What was given, the beginning of it.
    pub name: String,
}

/// A time zone of the IANA database.
#[derive(Clone, PartialEq, Eq)]
pub struct Zone(pub(crate) TimeZone);

impl Zone {
    /// UTC.
    pub const UTC: Self = Self(TimeZone::UTC);

    /// The one with this name.
    pub fn named(name: &str) -> Result<Self, UnknownZone> {
        TimeZone::get(name).map(Self).map_err(|_| UnknownZone { name: name.chars().take(64).collect() })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.0.iana_name().unwrap_or("UTC")
    }
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
