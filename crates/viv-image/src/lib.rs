//! OCI images: references, formats on disk, registries.
//!
//! ```text
//!   Reference ──► Registry::resolve ─┐                      ┌─► open_layer ──► tar stream, verified
//!                                    ├─► Image ─► blobs ────┤
//!   file, folder ──► Archive::image ─┘    (BlobDir, Archive) └─► (the caller unpacks)
//!
//!   tar stream ──► LayerWriter ──► OutgoingImage ──► Registry::push, write_layout, write_archive
//! ```
//!
//! Invariants:
//!
//! - Nothing that came from outside is used before its digest is checked: documents are checked whole, blobs before
//!   they get their name in a [`BlobDir`], layers once more while they are unpacked.
//! - Names in archives are keys, never paths. What is written goes into the folder that the caller names, under names
//!   made of digests.
//! - Everything that is read is bounded ([`limits`]); what is decompressed is bounded by the caller ([`Bounds`]).
//!
//! Deliberately absent: unpacking, overlays, stores of layers, sandboxes, the terminal and the environment. All calls
//! block; the threads are the caller's.

#![forbid(unsafe_code)]

mod archive;
mod blobs;
mod config;
mod decode;
mod digest;
mod document;
mod files;
mod image;
mod layer;
pub mod limits;
mod platform;
mod reference;
mod registry;
mod resolve;
mod write;

pub use archive::{Archive, ArchiveError, BlobReader, Kind, TarStream, detect, open_tar};
pub use blobs::{BlobDir, BlobError};
pub use config::ImageConfig;
pub use decode::{Bounds, Compression};
pub use digest::{Digest, DigestError};
pub use document::DocumentError;
pub use image::{Image, LayerDescriptor};
pub use layer::{LayerError, VerifiedLayer, open_layer};
pub use platform::Platform;
pub use reference::{Reference, ReferenceError};
#[doc(hidden)]
pub use registry::challenges;
pub use registry::{Credential, Credentials, CredentialsError, Options, Phase, Progress, Registry, RegistryError};
pub use write::{LayerWriter, OutgoingImage, WriteError, write_archive, write_layout};
