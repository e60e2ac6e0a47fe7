//! Formats on disk: what we write is read, and what others write.

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use common::{files_in, image, layer, noise, tar_of};
use serde_json::json;
use viv_image::{
    Archive, ArchiveError, BlobDir, Bounds, Compression, Digest, Image, Kind, LayerError, OutgoingImage, Platform,
    WriteError, detect, open_layer, open_tar, write_archive, write_layout,
};

struct Setup {
    folder: tempfile::TempDir,
    blobs: BlobDir,
}

fn setup() -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let blobs = BlobDir::open(&folder.path().join("blobs")).unwrap();
    fs::create_dir(folder.path().join("scratch")).unwrap();
    Setup { folder, blobs }
}

impl Setup {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn open(&self, path: &Path) -> Result<Archive, ArchiveError> {
        let archive = Archive::open(path, &self.path("scratch"), Bounds::default());
        // Scratch files have no name: nothing is ever left.
        assert_eq!(files_in(&self.path("scratch")), Vec::<String>::new());
        archive
    }

    fn image(&self) -> OutgoingImage {
        let contents = [
            (Compression::Gzip, noise(1, 20_000)),
            (Compression::Zstd, noise(2, 20_000)),
            (Compression::None, noise(3, 20_000)),
        ];
        let mut image = image(&self.blobs, &contents, Some("localhost:5000/some/image:1"));
        // The same layer twice is allowed, and kept once.
        image.layers.push(image.layers[0].clone());
        image.config.diff_ids.push(image.layers[0].0.diff_id);
        image
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

fn verify(archive: &Archive, image: &Image) {
    for layer in &image.layers {
        open_layer(archive.layer(layer).unwrap(), layer, Bounds::default()).unwrap().finish().unwrap();
    }
}

fn packed(bytes: &[u8], compression: Compression) -> Vec<u8> {
    match compression {
        Compression::None => bytes.to_vec(),
        Compression::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Zstd => zstd::encode_all(bytes, 1).unwrap(),
    }
}

fn tar_with(files: &[(&str, &[u8])], links: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *content).unwrap();
    }
    for (name, target) in links {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        builder.append_link(&mut header, name, target).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn layouts_and_archives_are_read_as_they_were_written() {
    let setup = setup();
    let outgoing = setup.image();
    let layout = setup.path("layout");
    write_layout(&outgoing, &layout).unwrap();
    assert_eq!(detect(&layout).unwrap(), Kind::OciLayout);
    let mut archive = Vec::new();
    write_archive(&outgoing, &mut archive).unwrap();
    let mut again = Vec::new();
    write_archive(&outgoing, &mut again).unwrap();
    assert!(archive == again, "the same image makes the same archive");

    let mut paths = vec![layout];
    for (name, compression) in
        [("a.tar", Compression::None), ("a.tar.gz", Compression::Gzip), ("a.tar.zst", Compression::Zstd)]
    {
        let path = setup.write(name, &packed(&archive, compression));
        assert_eq!(detect(&path).unwrap(), Kind::OciArchive);
        paths.push(path);
    }
    for path in paths {
        let archive = setup.open(&path).unwrap();
        assert_eq!(archive.names(), ["localhost:5000/some/image:1"]);
        let image = archive.image(None, &Platform::host()).unwrap();
        assert_eq!(image.digest, outgoing.digest().unwrap());
        assert_eq!(image.config.env, outgoing.config.env);
        assert!(image.layers.iter().eq(outgoing.layers.iter().map(|(layer, _)| layer)));
        verify(&archive, &image);
        archive.image(Some("localhost:5000/some/image:1"), &Platform::host()).unwrap();
        archive.image(Some("1"), &Platform::host()).unwrap();
        assert!(matches!(archive.image(Some("other"), &Platform::host()), Err(ArchiveError::NoSuchName { .. })));
        assert!(matches!(archive.image(None, &Platform::linux("mips")), Err(ArchiveError::Document(_))));
    }
    assert!(matches!(write_layout(&outgoing, &setup.path("layout")), Err(WriteError::NotEmpty(_))));
}

#[test]
fn docker_reads_what_we_write_by_its_own_manifest() {
    let setup = setup();
    let outgoing = setup.image();
    let mut bytes = Vec::new();
    write_archive(&outgoing, &mut bytes).unwrap();
    // As a reader that knows only Docker's format: the same archive without what makes it a layout.
    let mut files = Vec::new();
    for entry in tar::Archive::new(&*bytes).entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_string_lossy().into_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        if !["oci-layout", "index.json"].contains(&name.as_str()) && !name.ends_with('/') {
            files.push((name, content));
        }
    }
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (name.as_str(), &**content)).collect();
    let path = setup.write("docker.tar", &tar_with(&files, &[]));
    assert_eq!(detect(&path).unwrap(), Kind::DockerArchive);
    let archive = setup.open(&path).unwrap();
    assert_eq!(archive.names(), ["localhost:5000/some/image:1"]);
    let image = archive.image(None, &Platform::host()).unwrap();
    assert_eq!(image.digest, outgoing.digest().unwrap());
    verify(&archive, &image);
}

#[test]
fn an_old_archive_of_docker_is_read() {
    let setup = setup();
    let (one, two) = (tar_of("etc/one", b"1"), tar_of("etc/two", b"2"));
    let config = json!({
        "architecture": Platform::host().architecture, "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [Digest::of(&one), Digest::of(&two), Digest::of(&one)]},
    })
    .to_string();
    let (a, b, c) = ("a".repeat(64), "b".repeat(64), "c".repeat(64));
    let config_name = format!("{}.json", Digest::of(config.as_bytes()).hex());
    let paths: Vec<String> = [&a, &b, &c].iter().map(|id| format!("{id}/layer.tar")).collect();
    let manifest = json!([{"Config": config_name, "RepoTags": ["debian:12", "me/x:1"], "Layers": paths}]).to_string();
    let two_packed = packed(&two, Compression::Gzip);
    let files: [(&str, &[u8]); 5] = [
        (&paths[0], &one),
        (&paths[1], &two_packed),
        (&config_name, config.as_bytes()),
        ("./manifest.json", manifest.as_bytes()),
        ("repositories", b"{}"),
    ];
    let target = format!("../{a}/layer.tar");
    let bytes = tar_with(&files, &[(&paths[2], &target)]);
    let path = setup.write("old.tar.gz", &packed(&bytes, Compression::Gzip));
    assert_eq!(detect(&path).unwrap(), Kind::DockerArchive);
    let archive = setup.open(&path).unwrap();
    assert_eq!(archive.names(), ["debian:12", "me/x:1"]);
    let image = archive.image(Some("docker.io/library/debian:12"), &Platform::host()).unwrap();
    assert_eq!(image.layers[0], image.layers[2]);
    assert_eq!(image.layers[1].compression, Compression::Gzip);
    verify(&archive, &image);

    // A link that leads out of the archive, or in a circle, leads nowhere.
    for target in ["../../../../etc/passwd", "/etc/passwd", "layer.tar"] {
        let path = setup.write("link.tar", &tar_with(&files, &[(&paths[2], target)]));
        assert!(matches!(setup.open(&path), Err(ArchiveError::Missing(_))), "{target}");
    }
}

#[test]
fn one_of_several_images_is_asked_for() {
    let setup = setup();
    let layout = setup.path("layout");
    write_layout(&setup.image(), &layout).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let entry = |name: &str, architecture: &str| {
        let mut entry = index["manifests"][0].clone();
        entry["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        entry["platform"]["architecture"] = json!(architecture);
        entry
    };
    let host = Platform::host();
    let write = |entries: &[serde_json::Value]| {
        fs::write(layout.join("index.json"), json!({"schemaVersion": 2, "manifests": entries}).to_string()).unwrap();
        setup.open(&layout).unwrap()
    };
    let archive = write(&[entry("a", &host.architecture), entry("b", &host.architecture)]);
    let error = archive.image(None, &host).unwrap_err();
    assert!(matches!(&error, ArchiveError::SeveralImages(names) if names == "a, b"), "{error:?}");
    assert!(error.hint().is_some());
    archive.image(Some("b"), &host).unwrap();
    let archive = write(&[entry("a", "s390x"), entry("a", &host.architecture)]);
    archive.image(None, &host).unwrap();
    let archive = write(&[]);
    assert!(matches!(archive.image(None, &host), Err(ArchiveError::NoImage)));
}

#[test]
fn a_rootfs_is_told_from_an_image() {
    let setup = setup();
    let rootfs = tar_with(&[("./bin/sh", b"x"), ("etc/passwd", b"root"), ("manifest.json", b"{}")], &[]);
    for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
        let path = setup.write("rootfs", &packed(&rootfs, compression));
        assert_eq!(detect(&path).unwrap(), Kind::RootfsTar);
        let mut stream = open_tar(&path, Bounds::default()).unwrap();
        let mut read = Vec::new();
        stream.by_ref().take(100).read_to_end(&mut read).unwrap();
        assert_eq!(read, rootfs[..100]);
        assert_eq!(stream.finish().unwrap(), Digest::of(&rootfs));
        if compression == Compression::None {
            continue;
        }
        // Cut short, it is no tar, whatever came before.
        let cut = packed(&rootfs, compression);
        let path = setup.write("cut", &cut[..cut.len() - 5]);
        assert!(open_tar(&path, Bounds::default()).unwrap().finish().is_err());
    }
    let no_image = setup.write("rootfs.tar", &rootfs);
    // It has a manifest.json, but not Docker's.
    assert!(matches!(setup.open(&no_image), Err(ArchiveError::Document(_))));
    let xz = setup.write("x.tar.xz", &[0xfd, b'7', b'z', b'X', b'Z', 0, 0, 4]);
    let error = detect(&xz).unwrap_err();
    assert_eq!(error.hint().unwrap(), "decompress it first, with xz -d");
    for nonsense in [&b""[..], b"x", &[1; 600], &noise(9, 5000)] {
        let path = setup.write("nonsense", nonsense);
        assert!(matches!(detect(&path), Err(ArchiveError::NotTar)), "{nonsense:?}");
        assert!(setup.open(&path).is_err());
    }
    assert!(matches!(detect(setup.folder.path()), Err(ArchiveError::NotALayout)));
    assert!(matches!(detect(Path::new("/dev/zero")), Err(ArchiveError::Read { .. })));
}

#[test]
fn layers_are_what_they_are_called_or_fail_at_the_end() {
    let setup = setup();
    let tar = tar_of("file", &noise(5, 300_000));
    for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
        let (good, path) = layer(&setup.blobs, compression, &tar);
        let bytes = fs::read(path).unwrap();
        let check = |bytes: &[u8], descriptor: &viv_image::LayerDescriptor| {
            open_layer(bytes, descriptor, Bounds::default()).unwrap().finish()
        };
        check(&bytes, &good).unwrap();
        let more = [&bytes[..], b"more"].concat();
        assert!(check(&more, &good).is_err());
        assert!(matches!(
            check(&bytes[..bytes.len() - 100], &good),
            Err(LayerError::Read { .. } | LayerError::WrongSize { .. })
        ));
        let other = viv_image::LayerDescriptor { digest: Digest::of(b"x"), ..good.clone() };
        assert!(matches!(check(&bytes, &other), Err(LayerError::WrongDigest { .. })));
        let other = viv_image::LayerDescriptor { diff_id: Digest::of(b"x"), ..good.clone() };
        assert!(matches!(check(&bytes, &other), Err(LayerError::WrongDiffId { .. })));
        let other = viv_image::LayerDescriptor { size: good.size - 1, ..good.clone() };
        assert!(check(&bytes, &other).is_err());
        for at in (0..bytes.len()).step_by(bytes.len() / 50) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(check(&damaged, &good).is_err(), "{compression:?} {at}");
        }
        // A tar reader that stops early has not verified anything, and one that fails stays failed.
        let mut damaged = bytes.clone();
        *damaged.last_mut().unwrap() ^= 1;
        let mut reader = open_layer(&*damaged, &good, Bounds::default()).unwrap();
        let mut sink = Vec::new();
        assert!(reader.read_to_end(&mut sink).is_err());
        assert!(reader.read(&mut [0; 10]).is_err());
        assert!(reader.finish().is_err());
    }
}

#[test]
fn bombs_do_not_go_off() {
    let setup = setup();
    let zeros = vec![0; 80 << 20];
    let bounds = Bounds { total_bytes_max: 10 << 20, ratio_max: 10_000 };
    for compression in [Compression::Gzip, Compression::Zstd] {
        let (bomb, path) = layer(&setup.blobs, compression, &zeros);
        let open = |bounds| open_layer(File::open(&path).unwrap(), &bomb, bounds).unwrap().finish();
        assert!(matches!(open(bounds), Err(LayerError::TooLarge { .. })));
        assert!(matches!(open(Bounds::default()), Err(LayerError::TooLarge { .. })));
        open(Bounds { ratio_max: u64::MAX, ..Bounds::default() }).unwrap();
        let error = Archive::open(&path, &setup.path("scratch"), bounds).err().unwrap();
        assert!(matches!(error, ArchiveError::TooLarge(_)), "{error:?}");
        assert!(matches!(open_tar(&path, bounds).unwrap().finish(), Err(ArchiveError::TooLarge(_))));
    }
}

#[test]
fn a_layout_does_not_lead_elsewhere() {
    let setup = setup();
    let layout = setup.path("layout");
    let outgoing = setup.image();
    write_layout(&outgoing, &layout).unwrap();
    let (first, _) = &outgoing.layers[0];
    let blob = layout.join("blobs/sha256").join(first.digest.hex());
    let outside = setup.write("outside", &fs::read(&blob).unwrap());
    fs::remove_file(&blob).unwrap();
    std::os::unix::fs::symlink(outside, &blob).unwrap();
    let archive = setup.open(&layout).unwrap();
    let image = archive.image(None, &Platform::host()).unwrap();
    assert!(matches!(archive.layer(&image.layers[0]), Err(ArchiveError::Read { .. })));
    fs::remove_file(&blob).unwrap();
    assert!(matches!(archive.layer(&image.layers[0]), Err(ArchiveError::Missing(_))));
}

#[test]
fn a_file_that_is_not_its_layer_is_not_written() {
    let setup = setup();
    let mut outgoing = setup.image();
    outgoing.layers[1].1 = outgoing.layers[2].1.clone();
    assert!(matches!(write_archive(&outgoing, std::io::sink()), Err(WriteError::WrongSize { .. })));
    outgoing.layers[1].1 = setup.write("wrong", &vec![1; outgoing.layers[1].0.size as usize]);
    assert!(matches!(write_archive(&outgoing, std::io::sink()), Err(WriteError::WrongLayer { .. })));
    let mut outgoing = setup.image();
    outgoing.layers.pop();
    assert!(matches!(outgoing.digest(), Err(WriteError::OtherLayers)));
}
