//! The tar format: ustar headers with PAX records, written and read.
//!
//! Written here rather than with a library, because what is read comes from
//! anywhere: no field is believed, and nothing is kept in memory that has no bound.

pub(crate) mod header;
pub(crate) mod pax;
pub(crate) mod read;
pub(crate) mod sparse;
pub(crate) mod write;

pub(crate) const BLOCK_BYTES: usize = 512;

/// The longest path in an archive. The kernel takes 4 KiB at once; a sandbox
/// can nest folders further, but each further one costs an archive its whole path again.
pub(crate) const PATH_BYTES_MAX: usize = 64 * 1024;

/// All PAX records of an entry: room for a path, a target and a few extended
/// attributes as long as the kernel allows (64 KiB each).
pub(crate) const RECORDS_BYTES_MAX: usize = 1 << 20;

/// Pieces of a file with holes: 16 bytes of memory each, and at the 4 KiB that
/// a piece has at least, 16 GiB of a file in the worst of patterns.
pub(crate) const EXTENTS_MAX: usize = 4 << 20;

/// A piece of a file: offset and length.
pub(crate) type Extent = (u64, u64);

/// How far content is padded.
pub(crate) fn padding(length: u64) -> u64 {
    length.next_multiple_of(BLOCK_BYTES as u64) - length
}
