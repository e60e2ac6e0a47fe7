//! What machine an image is for, and which of several fits best.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An operating system and a processor, in the words of OCI (which are Go's).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v7` of `arm`; most have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// A platform of Linux.
    pub fn linux(architecture: &str) -> Self {
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }

    /// What this program was built for.
    pub fn host() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
            "loongarch64" => "loong64",
            same => same,
        };
        Self::linux(architecture)
    }

    /// How well something that is made for `offered` suits: lower is better, `None` not at all.
    ///
    /// An offer without a system or an architecture suits anywhere: tools that build from nothing leave them out.
    pub(crate) fn suits(&self, offered: &Self) -> Option<u32> {
        let same = |wanted: &str, offered: &str| offered.is_empty() || wanted == offered;
        if !same(&self.os, &offered.os) || !same(&self.architecture, &offered.architecture) {
            return None;
        }
        let wanted = normal_variant(self);
        let offered = normal_variant(offered);
        if wanted == offered {
            return Some(0);
        }
        match (version(wanted), version(offered)) {
            // Who asks for just `arm` does not know; the lowest is surest. Others without a variant are the first one.
            (None, Some(offered)) if wanted.is_none() && self.architecture == "arm" => Some(offered),
            (Some(_), None) if offered.is_none() => Some(100),
            (Some(wanted), Some(offered)) if offered < wanted => Some(wanted - offered),
            _ => None,
        }
    }
}

/// `v8` is what all of `arm64` has, and `v1` all of `amd64`.
fn normal_variant(platform: &Platform) -> Option<&str> {
    match (platform.architecture.as_str(), platform.variant.as_deref()) {
        ("arm64", Some("v8" | "8")) | ("amd64", Some("v1")) | (_, Some("")) => None,
        (_, variant) => variant,
    }
}

fn version(variant: Option<&str>) -> Option<u32> {
    variant?.strip_prefix('v')?.parse().ok().filter(|version| *version < 100)
}

impl fmt::Display for Platform {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(out, "/{variant}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(architecture: &str, variant: &str) -> Platform {
        Platform { variant: Some(variant.to_owned()), ..Platform::linux(architecture) }
    }

    #[test]
    fn the_same_suits_best_and_what_is_newer_not_at_all() {
        let v7 = of("arm", "v7");
        assert_eq!(v7.suits(&of("arm", "v7")), Some(0));
        assert_eq!(v7.suits(&of("arm", "v6")), Some(1));
        assert_eq!(v7.suits(&of("arm", "v8")), None);
        assert_eq!(v7.suits(&Platform::linux("arm")), Some(100));
        assert_eq!(Platform::linux("arm64").suits(&of("arm64", "v8")), Some(0));
        assert_eq!(Platform::linux("amd64").suits(&Platform::linux("arm64")), None);
        assert_eq!(Platform::linux("amd64").suits(&of("amd64", "v3")), None);
        assert!(Platform::linux("arm").suits(&of("arm", "v6")) < Platform::linux("arm").suits(&of("arm", "v7")));
        let windows = Platform { os: "windows".to_owned(), ..Platform::linux("amd64") };
        assert_eq!(Platform::linux("amd64").suits(&windows), None);
        let unknown = Platform { os: "unknown".to_owned(), ..Platform::linux("unknown") };
        assert_eq!(Platform::linux("amd64").suits(&unknown), None);
    }
}
