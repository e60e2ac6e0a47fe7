//! Writing entries.

use std::io::{self, Write};

use crate::faults::invalid;
use crate::meta::Time;
use crate::tar::header::Draft;
use crate::tar::{BLOCK_BYTES, PATH_BYTES_MAX, RECORDS_BYTES_MAX, padding, pax};

/// What is said about an entry before its content.
pub(crate) struct Head<'a> {
    pub(crate) kind: u8,
    pub(crate) path: &'a [u8],
    pub(crate) link: &'a [u8],
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Time,
    pub(crate) device: (u32, u32),
    /// What follows: of a file with holes, its map and its data.
    pub(crate) stored_bytes: u64,
    /// Of a file with holes, its size.
    pub(crate) true_bytes: Option<u64>,
    /// Further PAX records.
    pub(crate) records: Vec<u8>,
}

impl<'a> Head<'a> {
    /// Root's, from the epoch: what is made for the archive rather than found.
    pub(crate) fn plain(kind: u8, path: &'a [u8], mode: u32) -> Self {
        Self {
            kind,
            path,
            link: b"",
            mode,
            uid: 0,
            gid: 0,
            mtime: Time::default(),
            device: (0, 0),
            stored_bytes: 0,
            true_bytes: None,
            records: Vec::new(),
        }
    }

    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        if self.path.len() > PATH_BYTES_MAX || self.link.len() > PATH_BYTES_MAX {
            return Err(invalid(self.path, "has a longer path than an archive may hold"));
        }
        let mut draft = Draft::new(self.kind);
        let mut records = Vec::new();
        if let Some(true_bytes) = self.true_bytes {
            // Who does not know about holes finds map and data under a name of their own.
            pax::push(&mut records, b"GNU.sparse.major", b"1");
            pax::push(&mut records, b"GNU.sparse.minor", b"0");
            pax::push(&mut records, b"GNU.sparse.name", self.path);
            pax::push(&mut records, b"GNU.sparse.realsize", true_bytes.to_string().as_bytes());
            draft.path(b"GNUSparseFile.0/file");
        } else if !draft.path(self.path) {
            pax::push(&mut records, b"path", self.path);
        }
        if !draft.link(self.link) {
            pax::push(&mut records, b"linkpath", self.link);
        }
        if !draft.uid(self.uid) {
            pax::push(&mut records, b"uid", self.uid.to_string().as_bytes());
        }
        if !draft.gid(self.gid) {
            pax::push(&mut records, b"gid", self.gid.to_string().as_bytes());
        }
        if !draft.size(self.stored_bytes) {
            pax::push(&mut records, b"size", self.stored_bytes.to_string().as_bytes());
        }
        if !draft.mtime(self.mtime) {
            pax::push(&mut records, b"mtime", pax::write_time(self.mtime).as_bytes());
        }
        if !draft.device(self.device) {
            return Err(invalid(self.path, "has device numbers that no archive can hold"));
        }
        draft.mode(self.mode);
        records.extend_from_slice(&self.records);
        if records.len() > RECORDS_BYTES_MAX {
            return Err(invalid(self.path, "has more extended attributes than an archive may hold"));
        }
        if !records.is_empty() {
            let mut extra = Draft::new(b'x');
            extra.path(b"PaxHeaders/entry");
            extra.mode(0o644);
            extra.size(records.len() as u64);
            extra.mtime(Time::default());
            out.write_all(&extra.finish())?;
            out.write_all(&records)?;
            pad(out, records.len() as u64)?;
        }
        out.write_all(&draft.finish())
    }
}

/// Fills up the last block of some content.
pub(crate) fn pad(out: &mut impl Write, length: u64) -> io::Result<()> {
    out.write_all(&[0; BLOCK_BYTES][..padding(length) as usize])
}
