//! Archives and documents damaged at random: an answer or an error, no panic, and nothing outside of the scratch.

mod common;

use std::path::Path;

use common::{files_in, image, noise};
use proptest::prelude::*;
use serde_json::json;
use viv_image::{
    Archive, BlobDir, Bounds, Compression, Digest, ImageConfig, Platform, detect, open_layer, write_archive,
};

/// One change to some bytes.
#[derive(Debug, Clone)]
enum Damage {
    Flip { at: usize, bit: u8 },
    Cut { at: usize },
    Copy { from: usize, to: usize, len: usize },
    Zero { at: usize, len: usize },
    Text { at: usize, text: &'static str },
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<usize>();
    prop_oneof![
        4 => (at, 0..8u8).prop_map(|(at, bit)| Damage::Flip { at, bit }),
        1 => at.prop_map(|at| Damage::Cut { at }),
        2 => (at, at, 1..1024usize).prop_map(|(from, to, len)| Damage::Copy { from, to, len }),
        1 => (at, 1..1024usize).prop_map(|(at, len)| Damage::Zero { at, len }),
        2 => (at, prop::sample::select(vec!["null", "[[[", "{}", "../../x", "-1", "1e999", "\\u0000", "99999999999"]))
            .prop_map(|(at, text)| Damage::Text { at, text }),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.is_empty() {
        return;
    }
    let len = bytes.len();
    match *damage {
        Damage::Flip { at, bit } => bytes[at % len] ^= 1 << bit,
        Damage::Cut { at } => bytes.truncate(at % len),
        Damage::Copy { from, to, len: count } => {
            for offset in 0..count {
                bytes[(to % len + offset) % len] = bytes[(from % len + offset) % len];
            }
        }
        Damage::Zero { at, len: count } => {
            for offset in 0..count.min(len) {
                bytes[(at % len + offset) % len] = 0;
            }
        }
        Damage::Text { at, text } => {
            for (offset, byte) in text.bytes().enumerate() {
                bytes[(at % len + offset) % len] = byte;
            }
        }
    }
}

fn sample() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let blobs = BlobDir::open(folder.path()).unwrap();
    let contents =
        [(Compression::Gzip, noise(1, 500)), (Compression::Zstd, noise(2, 500)), (Compression::None, noise(3, 500))];
    let outgoing = image(&blobs, &contents, Some("some/image:1"));
    let mut bytes = Vec::new();
    write_archive(&outgoing, &mut bytes).unwrap();
    bytes
}

/// Everything that can be done with an archive.
fn exercise(path: &Path, scratch: &Path) {
    let _ = detect(path);
    let Ok(archive) = Archive::open(path, scratch, Bounds::default()) else { return };
    let mut names: Vec<Option<String>> = archive.names().into_iter().map(Some).collect();
    names.push(None);
    for name in names {
        let Ok(image) = archive.image(name.as_deref(), &Platform::host()) else { continue };
        for layer in &image.layers {
            if let Ok(raw) = archive.layer(layer) {
                let _ = open_layer(raw, layer, Bounds::default()).unwrap().finish();
            }
        }
    }
}

/// An archive whose documents are damaged but have the digests that they are called by.
fn with_documents(damages: &[(usize, Damage)]) -> Vec<u8> {
    let layer = common::tar_of("file", b"content");
    let spoiled = |document: usize, text: String| {
        let mut bytes = text.into_bytes();
        damages.iter().filter(|(which, _)| which % 4 == document).for_each(|(_, damage)| apply(&mut bytes, damage));
        bytes
    };
    let blob = |bytes: &[u8], media_type: &str| json!({"mediaType": media_type, "digest": Digest::of(bytes), "size": bytes.len()});
    let config = json!({"architecture": Platform::host().architecture, "os": "linux", "config": {"Env": ["A=b"]},
        "rootfs": {"type": "layers", "diff_ids": [Digest::of(&layer)]}});
    let config = spoiled(0, config.to_string());
    let manifest = json!({"schemaVersion": 2,
        "config": blob(&config, "application/vnd.oci.image.config.v1+json"),
        "layers": [blob(&layer, "application/vnd.oci.image.layer.v1.tar")]});
    let manifest = spoiled(1, manifest.to_string());
    let index =
        json!({"schemaVersion": 2, "manifests": [blob(&manifest, "application/vnd.oci.image.manifest.v1+json")]});
    let index = spoiled(2, index.to_string());
    let name = |bytes: &[u8]| format!("blobs/sha256/{}", Digest::of(bytes).hex());
    let docker = json!([{"Config": name(&config), "RepoTags": ["a:1"], "Layers": [name(&layer)]}]);
    let docker = spoiled(3, docker.to_string());
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        builder.append_data(&mut header, name, bytes).unwrap();
    };
    for bytes in [&layer, &config, &manifest] {
        add(&name(bytes), bytes);
    }
    if !damages.len().is_multiple_of(3) {
        add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#);
    }
    add("index.json", &index);
    add("manifest.json", &docker);
    builder.into_inner().unwrap()
}

#[test]
fn the_sample_of_documents_is_good() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("archive");
    // Without a damage it is an archive of Docker's, with one that misses it is a layout.
    for damages in [&[][..], &[(3, Damage::Flip { at: 0, bit: 0 })]] {
        std::fs::write(&path, with_documents(damages)).unwrap();
        let archive = Archive::open(&path, folder.path(), Bounds::default()).unwrap();
        archive.image(None, &Platform::host()).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_archive_harms_nobody(
        damages in prop::collection::vec(damage(), 1..6),
        docker in any::<bool>(),
        squeezed in any::<bool>(),
    ) {
        use std::sync::OnceLock;
        static SAMPLE: OnceLock<Vec<u8>> = OnceLock::new();
        let mut bytes = SAMPLE.get_or_init(sample).clone();
        if docker {
            // Without its mark it is an archive of Docker's only. The same letters keep the header's checksum.
            let at = bytes.windows(10).rposition(|window| window == b"oci-layout").unwrap();
            bytes[at..at + 10].copy_from_slice(b"tuoyal-ico");
        }
        for damage in &damages {
            apply(&mut bytes, damage);
        }
        if squeezed {
            bytes = zstd::encode_all(&*bytes, 1).unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let scratch = folder.path().join("scratch");
        std::fs::create_dir(&scratch).unwrap();
        let path = folder.path().join("archive");
        std::fs::write(&path, &bytes).unwrap();
        exercise(&path, &scratch);
        prop_assert_eq!(files_in(folder.path()), ["archive", "scratch"]);
        prop_assert!(files_in(&scratch).is_empty());
    }

    #[test]
    fn damaged_documents_harm_nobody(damages in prop::collection::vec((0..4usize, damage()), 1..6)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("archive");
        std::fs::write(&path, with_documents(&damages)).unwrap();
        exercise(&path, folder.path());
        prop_assert_eq!(files_in(folder.path()), ["archive"]);
    }

    #[test]
    fn a_damaged_compressed_archive_harms_nobody(damages in prop::collection::vec(damage(), 1..4), gzip in any::<bool>()) {
        use std::sync::OnceLock;
        static SAMPLES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
        let samples = SAMPLES.get_or_init(|| {
            let plain = sample();
            let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::Write::write_all(&mut gz, &plain).unwrap();
            [gz.finish().unwrap(), zstd::encode_all(&*plain, 1).unwrap()]
        });
        let mut bytes = samples[usize::from(gzip)].clone();
        for damage in &damages {
            apply(&mut bytes, damage);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("archive");
        std::fs::write(&path, &bytes).unwrap();
        exercise(&path, folder.path());
        prop_assert_eq!(files_in(folder.path()), ["archive"]);
    }

    #[test]
    fn a_damaged_configuration_harms_nobody(damages in prop::collection::vec(damage(), 1..6)) {
        let mut bytes = br#"{"architecture":"amd64","os":"linux","config":{"Env":["A=b"],"Cmd":["x"],"ExposedPorts":{"1/tcp":{}}},
            "rootfs":{"type":"layers","diff_ids":["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]},
            "history":[{"empty_layer":true},{}]}"#.to_vec();
        for damage in &damages {
            apply(&mut bytes, damage);
        }
        if let Ok(mut config) = ImageConfig::from_json(&bytes) {
            prop_assert_eq!(&config.to_json(), &bytes);
            config.cmd.push("more".to_owned());
            let again = ImageConfig::from_json(&config.to_json()).unwrap();
            prop_assert_eq!(again.cmd, config.cmd);
            prop_assert_eq!(again.diff_ids, config.diff_ids);
        }
    }
}
