//! OCI layouts in folders and archives. Archives can be loaded by Docker as well.
//!
//! The same image makes the same bytes: entries are sorted, and have neither times nor owners.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use tar::{EntryType, Header};

use super::{OutgoingImage, WriteError};
use crate::digest::{Digest, HashingReader};
use crate::document::{OCI_INDEX, OCI_MANIFEST};
use crate::files::{Links, open_regular, sync_folder};

const MARK: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// Where the parts of a layout go.
trait Target {
    fn folder(&mut self, name: &str) -> io::Result<()>;
    fn file(&mut self, name: &str, size: u64, content: &mut dyn Read) -> io::Result<()>;
}

/// Writes a layout into a folder, which must be empty or not exist. It is on disk when this returns; `oci-layout`,
/// which makes it a layout, is written last.
pub fn write_layout(image: &OutgoingImage, folder: &Path) -> Result<(), WriteError> {
    let failed = |source| WriteError::Io { what: folder.display().to_string(), source };
    fs::create_dir_all(folder).map_err(failed)?;
    if fs::read_dir(folder).map_err(failed)?.next().is_some() {
        return Err(WriteError::NotEmpty(folder.to_owned()));
    }
    write(image, &mut Folder(folder.to_owned()))?;
    for part in ["blobs/sha256", "blobs", "."] {
        sync_folder(&folder.join(part)).map_err(failed)?;
    }
    Ok(())
}

/// Writes an archive that OCI tools and `docker load` read.
pub fn write_archive(image: &OutgoingImage, out: impl Write) -> Result<(), WriteError> {
    let mut builder = Tar(tar::Builder::new(out));
    write(image, &mut builder)?;
    let finished = builder.0.into_inner().and_then(|mut out| out.flush());
    finished.map_err(|source| WriteError::Io { what: "the archive's end".to_owned(), source })
}

fn write(image: &OutgoingImage, target: &mut impl Target) -> Result<(), WriteError> {
    let documents = image.documents()?;
    let failed = |what: &str| {
        let what = what.to_owned();
        move |source| WriteError::Io { what, source }
    };
    let small = |target: &mut dyn Target, name: &str, bytes: &[u8]| {
        target.file(name, bytes.len() as u64, &mut &*bytes).map_err(failed(name))
    };
    for name in ["blobs", "blobs/sha256"] {
        target.folder(name).map_err(failed(name))?;
    }
    // A layer may appear twice in an image, but its blob only once.
    let mut blobs: BTreeMap<Digest, Part> = BTreeMap::new();
    blobs.insert(documents.config_digest, Part::Bytes(&documents.config));
    blobs.insert(documents.manifest_digest, Part::Bytes(&documents.manifest));
    for (layer, path) in &image.layers {
        blobs.insert(layer.digest, Part::File(path, layer.size));
    }
    for (digest, part) in blobs {
        let name = blob_name(digest);
        match part {
            Part::Bytes(bytes) => small(target, &name, bytes)?,
            Part::File(path, size) => copy_layer(target, &name, path, digest, size)?,
        }
    }
    small(target, "index.json", &index_json(image, &documents.manifest, documents.manifest_digest))?;
    small(target, "manifest.json", &docker_json(image, documents.config_digest))?;
    small(target, "oci-layout", MARK)
}

enum Part<'a> {
    Bytes(&'a [u8]),
    File(&'a PathBuf, u64),
}

fn blob_name(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Copies a layer, and fails if its file is not what it is called.
fn copy_layer(target: &mut impl Target, name: &str, path: &Path, digest: Digest, size: u64) -> Result<(), WriteError> {
    let unreadable = |source| WriteError::Layer { path: path.to_owned(), source };
    let file = open_regular(path, Links::Follow).map_err(unreadable)?;
    let found_bytes = file.metadata().map_err(unreadable)?.len();
    if found_bytes != size {
        return Err(WriteError::WrongSize { digest, expected_bytes: size, found_bytes });
    }
    let mut content = HashingReader::new(file);
    target.file(name, size, &mut content).map_err(|source| WriteError::Io { what: name.to_owned(), source })?;
    let found = content.hasher().clone().finish();
    if found != digest {
        return Err(WriteError::WrongLayer { expected: digest, found });
    }
    Ok(())
}

fn index_json(image: &OutgoingImage, manifest: &[u8], digest: Digest) -> Vec<u8> {
    let mut entry = json!({
        "mediaType": OCI_MANIFEST,
        "digest": digest,
        "size": manifest.len(),
        "platform": image.config.platform(),
    });
    if let Some(name) = &image.name {
        // The standard's key takes a tag only, and Docker's and containerd's the whole name.
        let mut annotations = json!({"io.containerd.image.name": name.to_string()});
        if let Some(tag) = name.tag() {
            annotations["org.opencontainers.image.ref.name"] = json!(tag);
        }
        entry["annotations"] = annotations;
    }
    let index = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]});
    serde_json::to_vec(&index).expect("a JSON value is JSON")
}

fn docker_json(image: &OutgoingImage, config: Digest) -> Vec<u8> {
    let tags: Vec<String> =
        image.name.iter().filter(|name| name.digest().is_none()).map(crate::Reference::familiar).collect();
    let layers: Vec<String> = image.layers.iter().map(|(layer, _)| blob_name(layer.digest)).collect();
    let manifest = json!([{"Config": blob_name(config), "RepoTags": tags, "Layers": layers}]);
    serde_json::to_vec(&manifest).expect("a JSON value is JSON")
}

struct Folder(PathBuf);

impl Target for Folder {
    fn folder(&mut self, name: &str) -> io::Result<()> {
        fs::create_dir(self.0.join(name))
    }

    fn file(&mut self, name: &str, _size: u64, content: &mut dyn Read) -> io::Result<()> {
        let mut file = File::create_new(self.0.join(name))?;
        io::copy(content, &mut file)?;
        file.sync_all()
    }
}

struct Tar<W: Write>(tar::Builder<W>);

impl<W: Write> Target for Tar<W> {
    fn folder(&mut self, name: &str) -> io::Result<()> {
        let mut header = header(EntryType::Directory, 0o755, 0);
        self.0.append_data(&mut header, format!("{name}/"), io::empty())
    }

    fn file(&mut self, name: &str, size: u64, content: &mut dyn Read) -> io::Result<()> {
        let mut header = header(EntryType::Regular, 0o644, size);
        // A file that grew since would spoil all that follows.
        self.0.append_data(&mut header, name, content.take(size))
    }
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}
