//! How much of what strangers made is read.

/// Longest manifest or index. Registries refuse larger ones too.
pub const MANIFEST_BYTES_MAX: u64 = 4 << 20;

/// Longest image configuration; real ones are a few KiB, mostly history.
pub const CONFIG_BYTES_MAX: u64 = 8 << 20;

/// Most layers of an image. Overlay mounts end far below, and Docker stops at 127.
pub const LAYERS_MAX: usize = 512;

/// Most entries of an index, or images of a Docker archive.
pub const INDEX_ENTRIES_MAX: usize = 1024;

/// An index may name an index (a multi-platform image in a layout); deeper nesting has no use.
pub const INDEX_DEPTH_MAX: usize = 4;

/// Most entries of an image archive: three for each layer of every image, and room.
pub const ARCHIVE_ENTRIES_MAX: u64 = 64 << 10;

/// Longest name of an archive's entry that is read; those of images have under 200 bytes.
pub const ARCHIVE_NAME_BYTES_MAX: u64 = 64 << 10;

/// Links that are followed inside a Docker archive, from one layer to another that is the same.
pub const ARCHIVE_LINKS_MAX: usize = 4;

/// Longest answer of a token service.
pub const TOKEN_BYTES_MAX: u64 = 256 << 10;

/// How much of a registry's error answer is read, to quote its message.
pub const ERROR_BYTES_MAX: u64 = 16 << 10;

/// Longest file of credentials or certificates.
pub const SETTINGS_BYTES_MAX: u64 = 4 << 20;

/// Redirects that are followed for one request: a registry, its storage, and room.
pub const REDIRECTS_MAX: usize = 5;

/// What is decompressed below this is not measured against [`crate::Bounds::ratio_max`]: small things shrink well.
pub const RATIO_FREE_BYTES: u64 = 64 << 20;
