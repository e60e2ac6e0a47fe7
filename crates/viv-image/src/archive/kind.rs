//! What a file or folder is, told by its content.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::ops::ControlFlow;
use std::path::Path;

use super::ArchiveError;
use super::walk::{self, Entry, Forward, normal_name};
use crate::decode::{BoundedDecoder, Bounds, Compression, MAGIC_LEN, Magic, sniff};
use crate::files::{Links, open_regular};

/// Formats that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A folder with `oci-layout`, `index.json` and `blobs`.
    OciLayout,
    /// A tar of such a folder.
    OciArchive,
    /// What `docker save` wrote before version 25, and others still do.
    DockerArchive,
    /// A tar of a root filesystem: no image, just files.
    RootfsTar,
}

/// Tells what a path is. A rootfs is known by its first entries; a compressed image archive may be read to its end.
pub fn detect(path: &Path) -> Result<Kind, ArchiveError> {
    let read = |source| ArchiveError::Read { path: path.to_owned(), source };
    if std::fs::metadata(path).map_err(read)?.is_dir() {
        return if path.join("oci-layout").is_file() { Ok(Kind::OciLayout) } else { Err(ArchiveError::NotALayout) };
    }
    let file = open_regular(path, Links::Follow).map_err(read)?;
    match compression_of(&file)? {
        Compression::None => detect_tar(&mut BufReader::new(&file)),
        compression => detect_tar(&mut BoundedDecoder::new(&file, compression, Bounds::default())?),
    }
}

/// How a file is packed, and the file at its start again.
pub(super) fn compression_of(mut file: &File) -> Result<Compression, ArchiveError> {
    let mut start = [0; MAGIC_LEN];
    let mut filled = 0;
    while filled < MAGIC_LEN {
        match file.read(&mut start[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    file.rewind()?;
    match sniff(&start[..filled]) {
        Magic::Known(compression) => Ok(compression),
        Magic::Xz => Err(ArchiveError::Packed { format: "xz", command: "xz -d" }),
        Magic::Bzip2 => Err(ArchiveError::Packed { format: "bzip2", command: "bzip2 -d" }),
    }
}

fn detect_tar(source: &mut impl Forward) -> Result<Kind, ArchiveError> {
    let mut docker = false;
    let mut found = None;
    walk::walk(source, |_, entry| {
        match role(&entry) {
            Role::OciMark => found = Some(Kind::OciArchive),
            Role::DockerMark => docker = true,
            Role::OfAnImage => {}
            Role::Foreign => found = Some(Kind::RootfsTar),
        }
        if found.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    Ok(found.unwrap_or(if docker { Kind::DockerArchive } else { Kind::RootfsTar }))
}

/// What an entry says about the archive that it is in.
enum Role {
    OciMark,
    DockerMark,
    /// Seen in images of either kind.
    OfAnImage,
    /// Not seen in images: the archive is a rootfs.
    Foreign,
}

fn role(entry: &Entry) -> Role {
    let Some(name) = normal_name(&entry.name) else { return Role::Foreign };
    let top = name.split('/').next().unwrap_or_default();
    let stem = top.strip_suffix(".json").or_else(|| top.strip_suffix(".tar")).unwrap_or(top);
    let stem = stem.strip_suffix(".tar.gz").unwrap_or(stem);
    let stem = stem.strip_prefix("sha256:").unwrap_or(stem);
    match name.as_str() {
        "oci-layout" => Role::OciMark,
        "manifest.json" => Role::DockerMark,
        "" | "index.json" | "repositories" | "blobs" | "blobs/sha256" | "blobs/sha512" => Role::OfAnImage,
        name if name.starts_with("blobs/sha256/") || name.starts_with("blobs/sha512/") => Role::OfAnImage,
        _ if stem.len() == 64 && stem.bytes().all(|byte| byte.is_ascii_hexdigit()) => Role::OfAnImage,
        _ => Role::Foreign,
    }
}
