//! Manifests and indexes, of OCI and of Docker.
//!
//! Only what is needed is read, into structures of our own rather than those of `oci-spec`: Docker's documents are
//! read as well, an entry that we do not understand spoils an index only when it is chosen, and `null` is everywhere.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::decode::Compression;
use crate::digest::{Digest, shorten};
use crate::limits::{INDEX_DEPTH_MAX, INDEX_ENTRIES_MAX, LAYERS_MAX};
use crate::platform::Platform;

pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// What a registry is asked for.
pub(crate) const ACCEPT: [&str; 4] = [OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_LIST];

/// A document that is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// No JSON, or not of the expected form.
    #[error("the {what} cannot be read")]
    Json {
        /// Which document.
        what: &'static str,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// Longer than is read.
    #[error("the {what} is longer than {limit_bytes} bytes")]
    TooLong {
        /// Which document.
        what: &'static str,
        /// How long it may be.
        limit_bytes: u64,
    },
    /// More entries than are read.
    #[error("the {what} has more than {limit} entries")]
    TooMany {
        /// Which list.
        what: &'static str,
        /// How many it may have.
        limit: usize,
    },
    /// The content is not what its name says.
    #[error("the {what} should be {expected} and is {found}")]
    WrongDigest {
        /// Which document.
        what: &'static str,
        /// Its name.
        expected: Digest,
        /// Its content.
        found: Digest,
    },
    /// The length is not what the descriptor says.
    #[error("the {what} should have {expected_bytes} bytes and has {found_bytes}")]
    WrongSize {
        /// Which document.
        what: &'static str,
        /// In the descriptor.
        expected_bytes: u64,
        /// Found.
        found_bytes: u64,
    },
    /// A digest of another algorithm, or none at all.
    #[error("the {what} has a digest that is not understood")]
    Digest {
        /// Which descriptor.
        what: &'static str,
        /// Why.
        #[source]
        source: crate::DigestError,
    },
    /// A manifest and an index at once: readers would disagree on what it is.
    #[error("the document is neither clearly a manifest nor clearly an index")]
    Ambiguous,
    /// Docker's format of before 2016.
    #[error("the image has a manifest of Docker's first schema, which is no longer read")]
    FirstSchema,
    /// A chart, a signature, a model: not something with a root filesystem.
    #[error("this is no container image but {0:?}")]
    NotAnImage(String),
    /// Encrypted, or of a compression that we do not know.
    #[error("layers of type {0:?} are not supported")]
    LayerType(String),
    /// Layers that must be fetched from some URL are not followed.
    #[error("a layer is kept outside of the registry, at a URL, which is not followed")]
    ForeignLayer,
    /// The image is made for other machines.
    #[error("the image is not made for {wanted}, only for {available}")]
    Platform {
        /// Asked for.
        wanted: Platform,
        /// Offered.
        available: String,
    },
    /// The configuration counts other layers than the manifest.
    #[error("the manifest has {layers} layers and the configuration {diff_ids}")]
    LayerCount {
        /// In the manifest.
        layers: usize,
        /// In the configuration.
        diff_ids: usize,
    },
    /// An uncompressed layer whose two digests differ.
    #[error("layer {0} is not compressed, and yet is called {1} when decompressed")]
    PlainLayer(Digest, Digest),
    /// Indexes in indexes in indexes.
    #[error("indexes are nested deeper than {INDEX_DEPTH_MAX}")]
    Depth,
    /// A part of the configuration that no program could be started with.
    #[error("the configuration has a {0} with a NUL character")]
    Nul(&'static str),
}

/// What something is called, how long it is, and what it is.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) platform: Option<RawPlatform>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) annotations: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) urls: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct RawPlatform {
    #[serde(default)]
    pub(crate) os: String,
    #[serde(default)]
    pub(crate) architecture: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) variant: Option<String>,
}

impl Descriptor {
    pub(crate) fn digest(&self, what: &'static str) -> Result<Digest, DocumentError> {
        self.digest.parse().map_err(|source| DocumentError::Digest { what, source })
    }

    pub(crate) fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(key).map(String::as_str)
    }

    fn platform(&self) -> Option<Platform> {
        let raw = self.platform.clone()?;
        Some(Platform { os: raw.os, architecture: raw.architecture, variant: raw.variant })
    }
}

/// A manifest, checked.
#[derive(Debug, Clone)]
pub(crate) struct Manifest {
    pub(crate) config: Blob,
    pub(crate) layers: Vec<(Blob, Compression)>,
}

/// Something that can be fetched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blob {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
}

/// Either of what a registry answers.
#[derive(Debug, Clone)]
pub(crate) enum Document {
    Manifest(Manifest),
    Index(Vec<Descriptor>),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
    #[serde(default)]
    fs_layers: Option<serde::de::IgnoredAny>,
}

/// Reads a manifest or an index. What it is is told by its fields; a type that says otherwise is refused, since
/// another reader might believe that one.
pub(crate) fn parse(bytes: &[u8]) -> Result<Document, DocumentError> {
    let raw: RawDocument =
        serde_json::from_slice(bytes).map_err(|source| DocumentError::Json { what: "manifest", source })?;
    let says = raw.media_type.as_deref();
    match (raw.manifests, raw.config, raw.layers) {
        _ if raw.fs_layers.is_some() => Err(DocumentError::FirstSchema),
        (Some(entries), None, None) if says.is_none_or(|says| [OCI_INDEX, DOCKER_LIST].contains(&says)) => {
            if entries.len() > INDEX_ENTRIES_MAX {
                return Err(DocumentError::TooMany { what: "index", limit: INDEX_ENTRIES_MAX });
            }
            Ok(Document::Index(entries))
        }
        (None, Some(config), Some(layers))
            if says.is_none_or(|says| [OCI_MANIFEST, DOCKER_MANIFEST].contains(&says)) =>
        {
            Ok(Document::Manifest(check_manifest(&config, &layers)?))
        }
        _ => Err(DocumentError::Ambiguous),
    }
}

fn check_manifest(config: &Descriptor, layers: &[Descriptor]) -> Result<Manifest, DocumentError> {
    if ![OCI_CONFIG, DOCKER_CONFIG].contains(&config.media_type.as_str()) {
        return Err(DocumentError::NotAnImage(shorten(&config.media_type)));
    }
    if layers.len() > LAYERS_MAX {
        return Err(DocumentError::TooMany { what: "list of layers", limit: LAYERS_MAX });
    }
    let layers = layers.iter().map(check_layer).collect::<Result<_, _>>()?;
    Ok(Manifest { config: Blob { digest: config.digest("configuration")?, size: config.size }, layers })
}

fn check_layer(layer: &Descriptor) -> Result<(Blob, Compression), DocumentError> {
    if layer.urls.as_ref().is_some_and(|urls| !urls.is_empty())
        || layer.media_type.contains("nondistributable")
        || layer.media_type.contains(".foreign.")
    {
        return Err(DocumentError::ForeignLayer);
    }
    let compression = Compression::of_media_type(&layer.media_type)
        .ok_or_else(|| DocumentError::LayerType(shorten(&layer.media_type)))?;
    Ok((Blob { digest: layer.digest("layer")?, size: layer.size }, compression))
}

/// The entry that suits a platform best; of equals, the first.
pub(crate) fn choose<'a>(
    entries: impl Iterator<Item = &'a Descriptor> + Clone,
    wanted: &Platform,
) -> Result<&'a Descriptor, DocumentError> {
    // Entries that say nothing come last, since what they are is seen only in their configuration.
    const SAYS_NOTHING: u32 = 1000;
    entries
        .clone()
        .filter_map(|entry| {
            let rank = entry.platform().map_or(Some(SAYS_NOTHING), |offered| wanted.suits(&offered))?;
            Some((rank, entry))
        })
        .min_by_key(|(rank, _)| *rank)
        .map(|(_, entry)| entry)
        .ok_or_else(|| {
            let available = entries.filter_map(Descriptor::platform);
            DocumentError::Platform { wanted: wanted.clone(), available: list(available) }
        })
}

/// Platforms for people, without those of attestations.
fn list(platforms: impl Iterator<Item = Platform>) -> String {
    const SHOWN_MAX: usize = 16;
    let names: Vec<String> = platforms
        .filter(|platform| platform.os != "unknown")
        .take(SHOWN_MAX)
        .map(|platform| shorten(&platform.to_string()))
        .collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Checks a document against its name.
pub(crate) fn check_digest(what: &'static str, bytes: &[u8], expected: Digest) -> Result<(), DocumentError> {
    let found = Digest::of(bytes);
    if found == expected { Ok(()) } else { Err(DocumentError::WrongDigest { what, expected, found }) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse_value(value: &serde_json::Value) -> Result<Document, DocumentError> {
        parse(&serde_json::to_vec(value).unwrap())
    }

    fn blob(media_type: &str) -> serde_json::Value {
        json!({"mediaType": media_type, "digest": Digest::of(b"x").to_string(), "size": 1})
    }

    #[test]
    fn a_document_that_could_be_both_is_refused() {
        let layer = blob("application/vnd.oci.image.layer.v1.tar");
        let both = json!({"manifests": [], "config": blob(OCI_CONFIG), "layers": [layer]});
        assert!(matches!(parse_value(&both), Err(DocumentError::Ambiguous)));
        let says_otherwise = json!({"mediaType": OCI_INDEX, "config": blob(OCI_CONFIG), "layers": [layer]});
        assert!(matches!(parse_value(&says_otherwise), Err(DocumentError::Ambiguous)));
        let first = json!({"schemaVersion": 1, "fsLayers": [], "history": []});
        assert!(matches!(parse_value(&first), Err(DocumentError::FirstSchema)));
    }

    #[test]
    fn layers_elsewhere_and_unknown_ones_are_refused() {
        let manifest = |layer: serde_json::Value| json!({"config": blob(OCI_CONFIG), "layers": [layer]});
        let mut with_url = blob("application/vnd.oci.image.layer.v1.tar+gzip");
        with_url["urls"] = json!(["http://elsewhere/"]);
        assert!(matches!(parse_value(&manifest(with_url)), Err(DocumentError::ForeignLayer)));
        let foreign = blob("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip");
        assert!(matches!(parse_value(&manifest(foreign)), Err(DocumentError::ForeignLayer)));
        let encrypted = blob("application/vnd.oci.image.layer.v1.tar+gzip+encrypted");
        assert!(matches!(parse_value(&manifest(encrypted)), Err(DocumentError::LayerType(_))));
        let chart = json!({"config": blob("application/vnd.cncf.helm.config.v1+json"), "layers": []});
        assert!(matches!(parse_value(&chart), Err(DocumentError::NotAnImage(_))));
    }

    #[test]
    fn too_many_layers_and_entries_are_refused() {
        let layers = vec![blob("application/vnd.oci.image.layer.v1.tar"); LAYERS_MAX + 1];
        let manifest = json!({"config": blob(OCI_CONFIG), "layers": layers});
        assert!(matches!(parse_value(&manifest), Err(DocumentError::TooMany { .. })));
        let index = json!({"manifests": vec![blob(OCI_MANIFEST); INDEX_ENTRIES_MAX + 1]});
        assert!(matches!(parse_value(&index), Err(DocumentError::TooMany { .. })));
    }

    #[test]
    fn the_entry_for_the_machine_is_chosen_and_attestations_never() {
        let entry = |os: &str, architecture: &str| Descriptor {
            platform: Some(RawPlatform { os: os.to_owned(), architecture: architecture.to_owned(), variant: None }),
            digest: format!("{os}/{architecture}"),
            ..Descriptor::default()
        };
        let entries = [entry("unknown", "unknown"), entry("linux", "arm64"), entry("linux", "amd64")];
        assert_eq!(choose(entries.iter(), &Platform::linux("amd64")).unwrap().digest, "linux/amd64");
        let error = choose(entries.iter(), &Platform::linux("riscv64")).unwrap_err();
        assert_eq!(error.to_string(), "the image is not made for linux/riscv64, only for linux/arm64, linux/amd64");
    }
}
