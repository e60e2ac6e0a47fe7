//! How unpacking ends early.

use std::fmt;
use std::io;

/// Why an archive was not unpacked. What was made before stays.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// An entry that is not taken.
    #[error("{entry} {why}")]
    Refused {
        /// Its path, escaped and cut to a length for people.
        entry: String,
        /// The rest of the sentence.
        why: String,
    },
    /// The archive asks for more than is allowed.
    #[error("the archive has more than {max} {which}")]
    Bound {
        /// Of what.
        which: Bound,
        /// How much is allowed.
        max: u64,
    },
    /// The archive ends before its end mark.
    #[error("the archive is cut short")]
    Truncated,
    /// The bytes are no tar archive.
    #[error("this is not a tar archive: {why}")]
    NotAnArchive {
        /// What gave it away.
        why: &'static str,
    },
    /// The archive could not be read.
    #[error("the archive cannot be read")]
    Read {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An entry could not be made.
    #[error("{entry} cannot be made")]
    Io {
        /// Its path, escaped and cut to a length for people.
        entry: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What there may be too much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Entries, headers that are about all entries included.
    Entries,
    /// Bytes of data in files.
    Bytes,
    /// Bytes of one file, holes included.
    FileBytes,
    /// Folders above an entry.
    Depth,
    /// Bytes of PAX records of one entry.
    RecordBytes,
    /// Bytes of a path.
    PathBytes,
    /// Pieces of a file with holes.
    Extents,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Entries => "entries",
            Self::Bytes => "bytes in its files",
            Self::FileBytes => "bytes in one file",
            Self::Depth => "folders inside each other",
            Self::RecordBytes => "bytes of attributes for one entry",
            Self::PathBytes => "bytes in one path",
            Self::Extents => "pieces in one file",
        })
    }
}
