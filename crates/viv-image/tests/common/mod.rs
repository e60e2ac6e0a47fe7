//! What the tests share: a small image, Debian's registry, and servers that misbehave on purpose.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test uses a part of this")]

pub mod proxy;
pub mod server;

use std::io::Write;
use std::net::TcpListener;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use viv_image::{
    BlobDir, Compression, ImageConfig, LayerDescriptor, LayerWriter, Options, OutgoingImage, Platform, Progress,
    Reference, Registry,
};

/// Bytes that do not compress, the same for the same seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    })
    .take(len)
    .collect()
}

/// A tar with one file.
pub fn tar_of(name: &str, content: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    builder.append_data(&mut header, name, content).unwrap();
    builder.into_inner().unwrap()
}

pub fn layer(blobs: &BlobDir, compression: Compression, tar: &[u8]) -> (LayerDescriptor, std::path::PathBuf) {
    let mut writer = LayerWriter::new(blobs, compression).unwrap();
    writer.write_all(tar).unwrap();
    writer.finish().unwrap()
}

/// An image for this machine, with a layer for each content.
pub fn image(blobs: &BlobDir, contents: &[(Compression, Vec<u8>)], name: Option<&str>) -> OutgoingImage {
    let layers: Vec<_> = contents
        .iter()
        .enumerate()
        .map(|(index, (compression, content))| layer(blobs, *compression, &tar_of(&format!("file{index}"), content)))
        .collect();
    let config = ImageConfig {
        architecture: Platform::host().architecture,
        os: "linux".to_owned(),
        env: vec![("PATH".to_owned(), "/bin".to_owned())],
        cmd: vec!["sh".to_owned()],
        diff_ids: layers.iter().map(|(layer, _)| layer.diff_id).collect(),
        ..ImageConfig::default()
    };
    OutgoingImage { config, layers, name: name.map(|name| name.parse().unwrap()) }
}

/// Options that do not wait long.
pub fn options() -> Options {
    Options {
        connect_timeout: Duration::from_secs(5),
        silence_timeout: Duration::from_secs(2),
        document_timeout: Duration::from_secs(5),
        retries: 3,
        backoff: Duration::from_millis(5),
        ..Options::default()
    }
}

pub fn client() -> Registry {
    Registry::new(options()).unwrap()
}

pub fn quiet(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

pub fn reference(host: impl std::fmt::Display, path: &str) -> Reference {
    format!("{host}/{path}").parse().unwrap()
}

pub fn files_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Debian's `docker-registry`, on a port and in a folder of its own.
pub struct DockerRegistry {
    child: Child,
    pub port: u16,
    pub folder: tempfile::TempDir,
}

impl DockerRegistry {
    /// `None`, with a message, where it is not installed.
    pub fn start() -> Option<Self> {
        Self::start_with("")
    }

    /// With more lines for the `http` section of its configuration.
    pub fn start_with(more_http: &str) -> Option<Self> {
        let binary =
            ["/usr/bin/docker-registry", "/usr/local/bin/registry"].into_iter().find(|path| Path::new(path).is_file());
        let Some(binary) = binary else {
            eprintln!("skipped: docker-registry is not installed");
            return None;
        };
        // Another process may take the port before the registry does: then it ends, and another is tried.
        for _ in 0..10 {
            let mut registry = Self::spawn(binary, more_http);
            if registry.answers() {
                return Some(registry);
            }
            let log = std::fs::read_to_string(registry.folder.path().join("log")).unwrap_or_default();
            assert!(log.contains("address already in use"), "the registry does not start: {log}");
        }
        panic!("no free port")
    }

    fn spawn(binary: &str, more_http: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = folder.path().join("config.yml");
        let storage = folder.path().join("storage");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\nhttp:\n  addr: 127.0.0.1:{port}\n{more_http}",
            storage.display()
        );
        std::fs::write(&config, text).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new(binary)
            .arg("serve")
            .arg(&config)
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, port, folder }
    }

    fn answers(&mut self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            if std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The file of a blob in its storage.
    pub fn blob_path(&self, digest: &viv_image::Digest) -> std::path::PathBuf {
        let hex = digest.hex();
        self.folder.path().join("storage/docker/registry/v2/blobs/sha256").join(&hex[..2]).join(&hex).join("data")
    }
}

impl Drop for DockerRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
