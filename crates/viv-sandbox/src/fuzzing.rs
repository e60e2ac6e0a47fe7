//! Parsers of what others write, for `viv-fuzz`, which is in no way a user of the rest.

use std::path::Path;

/// An exported snapshot, unpacked into this folder as an import does it: how many layers it says that it has, if it is taken.
pub fn exported_snapshot(file: &Path, place: &Path, bounds: &viv_layer::Bounds) -> Option<usize> {
    crate::store::transfer::taken_apart(file, place, bounds).ok()
}

/// A list of pages as CRIU writes it: address, place in the file and count of each row, if it is understood.
pub fn page_list(image: &[u8]) -> Option<Vec<(u64, u64, u64)>> {
    crate::checkpoint::pagemap::rows_of(image).ok()
}
