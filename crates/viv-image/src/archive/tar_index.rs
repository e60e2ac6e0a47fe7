//! A tar whose files are found by name.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Seek};
use std::ops::ControlFlow;
use std::sync::Arc;

use super::walk::{Content, normal_name, walk};
use super::{ArchiveError, BlobReader};
use crate::document::DocumentError;
use crate::files::read_bounded;
use crate::limits::ARCHIVE_LINKS_MAX;

/// The files of a tar. Of two with one name the later counts, as for tar itself.
pub(super) struct TarIndex {
    file: Arc<File>,
    entries: HashMap<String, Content>,
}

impl TarIndex {
    pub(super) fn new(mut file: File) -> Result<Self, ArchiveError> {
        file.rewind()?;
        let length = file.metadata()?.len();
        let mut entries = HashMap::new();
        let mut cut = false;
        walk(&mut BufReader::new(&file), |_, entry| {
            if let Content::File { offset, size } = entry.content {
                cut |= offset.checked_add(size).is_none_or(|end| end > length);
            }
            if let Some(name) = normal_name(&entry.name) {
                entries.insert(name, entry.content);
            }
            if cut { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        if cut {
            return Err(ArchiveError::NotTar);
        }
        Ok(Self { file: Arc::new(file), entries })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// A file's content, through links inside the archive.
    pub(super) fn find(&self, name: &str) -> Option<BlobReader> {
        let mut name = normal_name(name)?;
        for _ in 0..=ARCHIVE_LINKS_MAX {
            match self.entries.get(&name)? {
                Content::File { offset, size } => {
                    return Some(BlobReader { file: self.file.clone(), position: *offset, end: offset + size });
                }
                Content::Link(target) => {
                    // Symbolic links count from where they lie, hard links from the top; Docker writes the former.
                    let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
                    let beside = normal_name(&format!("{folder}/{target}"));
                    name = match beside.filter(|name| self.entries.contains_key(name)) {
                        Some(name) => name,
                        None => normal_name(target)?,
                    };
                }
                Content::Other => return None,
            }
        }
        None
    }

    /// A small file.
    pub(super) fn read(&self, name: &str, what: &'static str, limit_bytes: u64) -> Result<Vec<u8>, ArchiveError> {
        let reader = self.find(name).ok_or_else(|| ArchiveError::Missing(crate::digest::shorten(name)))?;
        read_bounded(reader, limit_bytes)?.ok_or_else(|| DocumentError::TooLong { what, limit_bytes }.into())
    }
}
