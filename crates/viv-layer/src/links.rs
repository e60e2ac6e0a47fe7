//! Which names are one inode.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::meta::Meta;

/// The inodes with several names that were met, each with what was noted at its
/// first name. Forgotten once all names were met: only what is waited for takes memory.
pub(crate) struct Links<T> {
    met: HashMap<(usize, (u64, u64)), (T, u64)>,
}

impl<T> Default for Links<T> {
    fn default() -> Self {
        Self { met: HashMap::new() }
    }
}

impl<T: Clone> Links<T> {
    /// What was noted at an earlier name of the same inode of the same layer; else notes this one.
    pub(crate) fn meet(&mut self, layer: usize, meta: &Meta, note: impl FnOnce() -> T) -> Option<T> {
        if !meta.is_linked() {
            return None;
        }
        match self.met.entry((layer, meta.inode)) {
            Entry::Vacant(entry) => {
                entry.insert((note(), meta.names - 1));
                None
            }
            Entry::Occupied(mut entry) => {
                let (noted, left) = entry.get_mut();
                *left -= 1;
                if *left == 0 { Some(entry.remove().0) } else { Some(noted.clone()) }
            }
        }
    }
}
