//! What images and snapshots are made of: tars, small root filesystems, OCI images, exported snapshots. Also how the
//! tests on them talk to the binary.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses a part of this")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tar::EntryType;
use viv_image::{BlobDir, Compression, Digest, ImageConfig, LayerWriter, OutgoingImage, Platform};
use viv_layer::{Form, Packer};

use crate::support::{Ground, eventually_quietly};

/// Exit code of the binary when it refused or failed.
pub const FAILED: i32 = 125;

/// Runs a test on both drivers.
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            #[test]
            fn plain() {
                super::$name($crate::support::Ground::new());
            }

            #[test]
            fn btrfs() {
                super::$name($crate::support::Ground::on_btrfs());
            }
        }
    )+};
}
pub(crate) use on_both;

/// What a run of the binary came to.
#[derive(Debug)]
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

pub fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    Said { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// Runs it, and answers what it says when it succeeds.
pub fn good(command: &mut Command) -> String {
    let said = said(command);
    assert_eq!(said.code, Some(0), "{command:?}: {said:?}");
    said.out
}

/// Runs it, and answers what it complains about when it does.
pub fn refused(command: &mut Command) -> String {
    let said = said(command);
    assert_eq!(said.code, Some(FAILED), "{command:?}: {said:?}");
    assert!(said.err.contains("error: ") && !said.err.contains("panicked"), "{command:?}: {said:?}");
    said.err
}

impl Ground {
    pub fn image(&self, verb: &str) -> Command {
        let mut command = self.viv_image();
        command.arg(verb);
        command
    }

    /// Brings an image in; answers what it is called.
    pub fn import(&self, path: &Path, name: &str) -> String {
        good(self.image("import").arg(path).args(["--name", name]))
    }

    /// Runs a script in a new sandbox of an image.
    pub fn sh_in(&self, image: &str, script: &str) -> String {
        good(self.viv().args(["run", "--image", image, "--", "/bin/sh", "-c", script]))
    }

    /// A new sandbox of an image.
    pub fn sandbox_of(&self, image: &str) -> String {
        good(self.viv().args(["create", "--image", image]))
    }

    pub fn sh(&self, sandbox: &str, script: &str) -> String {
        good(self.viv().args(["exec", sandbox, "--", "/bin/sh", "-c", script]))
    }

    /// Saves a sandbox, and removes it.
    pub fn save_and_remove(&self, sandbox: &str) -> String {
        let snapshot = good(self.viv().args(["save", sandbox]));
        good(self.viv().args(["rm", sandbox]));
        snapshot
    }

    /// Runs a script in a sandbox made from a snapshot.
    pub fn sh_restored(&self, snapshot: &str, script: &str) -> String {
        let sandbox = good(self.viv().args(["restore", snapshot]));
        let text = self.sh(&sandbox, script);
        good(self.viv().args(["rm", &sandbox]));
        text
    }

    /// What a check finds.
    pub fn checked(&self, deep: bool) -> (Option<i32>, Value) {
        let said = said(self.image("check").arg("--json").args(deep.then_some("--deep")));
        (said.code, serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said:?}")))
    }

    /// Nothing is wrong with the store, and nothing is left over in it.
    pub fn assert_clean(&self) {
        let (code, found) = self.checked(true);
        assert_eq!((code, &found["damage"], &found["leftovers"]), (Some(0), &json!([]), &json!([])), "{found:#}");
    }

    /// Layers that are there.
    pub fn layers(&self) -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = fs::read_dir(self.data.join("layers/sealed"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_dir())
            .collect();
        found.sort();
        found
    }

    /// Collects until nothing but this many layers is left: whoever hashes what was saved last is waited for.
    pub fn collect_to(&self, layers: usize) {
        let reached = eventually_quietly(|| {
            good(&mut self.image("gc"));
            self.layers().len() == layers
        });
        assert!(reached, "not {layers} layers: {:?}", self.layers());
        for folder in ["tmp", "trash"] {
            let left = || fs::read_dir(self.data.join("layers").join(folder)).unwrap().count();
            // Whoever took it away first may still be taking it apart, or have ended before he was done.
            let gone = eventually_quietly(|| {
                good(&mut self.image("gc"));
                left() == 0
            });
            assert!(gone, "{folder}: {} are left", left());
        }
    }

    /// Nothing is left at all, and nothing is wrong.
    pub fn finish(self) {
        self.collect_to(0);
        self.assert_clean();
        self.assert_nothing_left();
        assert_eq!(files_below(&self.data.join("downloads")), Vec::<PathBuf>::new());
    }
}

/// All files in a folder and below.
pub fn files_below(folder: &Path) -> Vec<PathBuf> {
    let (mut files, mut pending) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                pending.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    files
}

/// A tar whose headers say whatever they are told to.
pub struct Tar(Vec<u8>);

impl Tar {
    pub fn new() -> Self {
        Self(Vec::new())
    }

    pub fn entry(&mut self, kind: EntryType, path: &str, link: &str, mode: u32, content: &[u8]) -> &mut Self {
        let mut header = header(kind, path, link, mode, content.len() as u64);
        header.set_cksum();
        self.raw(&header, content)
    }

    pub fn raw(&mut self, header: &tar::Header, content: &[u8]) -> &mut Self {
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn folder(&mut self, path: &str) -> &mut Self {
        self.entry(EntryType::Directory, path, "", 0o755, b"")
    }

    pub fn file(&mut self, path: &str, content: impl AsRef<[u8]>) -> &mut Self {
        self.entry(EntryType::Regular, path, "", 0o644, content.as_ref())
    }

    /// A file of somebody else's than root.
    pub fn file_of(&mut self, owner: u64, path: &str, content: &str) -> &mut Self {
        let mut header = header(EntryType::Regular, path, "", 0o644, content.len() as u64);
        header.set_uid(owner);
        header.set_gid(owner);
        header.set_cksum();
        self.raw(&header, content.as_bytes())
    }

    pub fn link(&mut self, path: &str, target: &str) -> &mut Self {
        self.entry(EntryType::Symlink, path, target, 0o777, b"")
    }

    pub fn hard_link(&mut self, path: &str, target: &str) -> &mut Self {
        self.entry(EntryType::Link, path, target, 0o644, b"")
    }

    pub fn device(&mut self, kind: EntryType, path: &str, (major, minor): (u32, u32)) -> &mut Self {
        let mut header = header(kind, path, "", 0o666, 0);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        header.set_cksum();
        self.raw(&header, b"")
    }

    pub fn bytes(&self) -> Vec<u8> {
        [&self.0[..], &[0; 1024]].concat()
    }

    pub fn write(&self, path: &Path) -> PathBuf {
        fs::write(path, self.bytes()).unwrap();
        path.to_owned()
    }

    /// A shell with what scripts of the tests call, copied from this machine with the libraries it needs.
    pub fn with_shell() -> Self {
        const TOOLS: [&str; 15] =
            ["sh", "cat", "ls", "stat", "touch", "env", "rm", "chmod", "id", "mkdir", "mv", "ln", "head", "cp", "find"];
        let mut tar = Self::new();
        tar.folder("bin/").folder("tmp/").folder("etc/").file("etc/passwd", "root:x:0:0::/:/bin/sh\n");
        let mut libraries = BTreeSet::new();
        for tool in TOOLS {
            let path =
                ["/usr/bin", "/bin"].iter().map(|folder| Path::new(folder).join(tool)).find(|path| path.exists());
            let path = path.unwrap_or_else(|| panic!("{tool} is needed to make an image of (Debian: coreutils, dash)"));
            tar.entry(EntryType::Regular, &format!("bin/{tool}"), "", 0o755, &fs::read(&path).unwrap());
            let listed = Command::new("ldd").arg(&path).output().expect("ldd is needed (Debian: libc-bin)");
            for word in String::from_utf8_lossy(&listed.stdout).split_whitespace().filter(|word| word.starts_with('/'))
            {
                libraries.insert(word.to_owned());
            }
        }
        for library in libraries {
            tar.entry(EntryType::Regular, &library[1..], "", 0o755, &fs::read(&library).unwrap());
        }
        tar
    }
}

/// A header, whose checksum is not set yet.
pub fn header(kind: EntryType, path: &str, link: &str, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_700_000_000);
    let fields = header.as_gnu_mut().unwrap();
    fields.name[..path.len()].copy_from_slice(path.as_bytes());
    fields.linkname[..link.len()].copy_from_slice(link.as_bytes());
    header
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An OCI image of layers given as tars, the bottom first.
pub fn oci_image(blobs: &BlobDir, layers: &[Vec<u8>], env: &[(&str, &str)], name: Option<&str>) -> OutgoingImage {
    let layers: Vec<_> = layers
        .iter()
        .map(|tar| {
            let mut writer = LayerWriter::new(blobs, Compression::None).unwrap();
            writer.write_all(tar).unwrap();
            writer.finish().unwrap()
        })
        .collect();
    let here = Platform::host();
    let config = ImageConfig {
        architecture: here.architecture,
        os: here.os,
        env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        diff_ids: layers.iter().map(|(layer, _)| layer.diff_id).collect(),
        ..ImageConfig::default()
    };
    OutgoingImage { config, layers, name: name.map(|name| name.parse().unwrap()) }
}

/// What `docker save` wrote before it wrote OCI archives.
pub fn docker_archive(layers: &[Vec<u8>], env: &[&str], name: &str) -> Tar {
    let diff_ids: Vec<_> = layers.iter().map(|layer| Digest::of(layer).to_string()).collect();
    let config = json!({
        "architecture": Platform::host().architecture, "os": "linux",
        "config": {"Env": env}, "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    // Layers are in folders, and the configuration in a file, with names of 64 digits.
    let paths: Vec<_> = (0..layers.len()).map(|index| format!("{index:064x}/layer.tar")).collect();
    let name_of_config = format!("{}.json", Digest::of(config.to_string().as_bytes()).hex());
    let mut tar = Tar::new();
    tar.file(&name_of_config, config.to_string());
    for (path, layer) in paths.iter().zip(layers) {
        tar.file(path, layer);
    }
    let manifest = json!([{"Config": name_of_config, "RepoTags": [name], "Layers": paths}]);
    tar.file("manifest.json", manifest.to_string());
    tar
}

/// An exported snapshot, taken apart in order to be written again with something wrong.
pub struct Exported {
    pub header: Value,
    pub folder: tempfile::TempDir,
}

impl Exported {
    pub fn open(path: &Path) -> Self {
        let mut tar = tar::Archive::new(zstd::Decoder::new(fs::File::open(path).unwrap()).unwrap());
        let mut text = String::new();
        tar.entries().unwrap().next().unwrap().unwrap().read_to_string(&mut text).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let again = zstd::Decoder::new(fs::File::open(path).unwrap()).unwrap();
        viv_layer::unpack(again, folder.path(), Form::Native, &viv_layer::Bounds::default()).unwrap();
        fs::remove_file(folder.path().join("snapshot.json")).unwrap();
        Self { header: serde_json::from_str(&text).unwrap(), folder }
    }

    pub fn layer(&self, index: usize) -> PathBuf {
        self.folder.path().join("layers").join(index.to_string())
    }

    /// Has the header tell the truth about a layer that was changed.
    pub fn describe(&mut self, index: usize) {
        let layer = self.layer(index);
        self.header["layers"][index]["survey"] = json!(viv_layer::survey(&layer).unwrap());
        self.header["layers"][index]["content"] = json!(viv_layer::content(&layer).unwrap());
    }

    pub fn write(&self, path: &Path) -> PathBuf {
        let encoder = zstd::Encoder::new(fs::File::create(path).unwrap(), 1).unwrap();
        let mut packer = Packer::new(encoder, Form::Native);
        packer.file("snapshot.json", self.header.to_string().as_bytes()).unwrap();
        // Together, so that `layers` itself can be something else than a folder.
        packer.tree("", self.folder.path()).unwrap();
        packer.finish().unwrap().finish().unwrap();
        path.to_owned()
    }
}
