//! Against a real registry: Debian's `docker-registry`, on loopback.

mod common;

use std::cell::{Cell, RefCell};
use std::fs;
use std::ops::ControlFlow;

use common::proxy::Proxy;
use common::{DockerRegistry, client, files_in, image, noise, quiet, reference};
use viv_image::{BlobDir, Bounds, Compression, Digest, Phase, Platform, Progress, RegistryError, open_layer};

fn folder() -> (tempfile::TempDir, BlobDir) {
    let folder = tempfile::tempdir().unwrap();
    let blobs = BlobDir::open(folder.path()).unwrap();
    (folder, blobs)
}

#[test]
fn what_is_pushed_is_pulled() {
    let Some(registry) = DockerRegistry::start() else { return };
    let (_made, made) = folder();
    let contents = vec![
        (Compression::Gzip, noise(1, 200_000)),
        (Compression::Zstd, vec![7; 500_000]),
        (Compression::None, noise(2, 1000)),
    ];
    let outgoing = image(&made, &contents, None);
    let name = reference(registry.host(), "some/image:1");
    let client = client();
    let digest = client.push(&name, &outgoing, &quiet).unwrap();
    assert_eq!(digest, outgoing.digest().unwrap());

    let pulled = client.resolve(&name, &Platform::host()).unwrap();
    assert_eq!(pulled.digest, digest);
    assert_eq!(pulled.config.cmd, ["sh"]);
    let expected: Vec<_> = outgoing.layers.iter().map(|(layer, _)| layer.clone()).collect();
    assert_eq!(pulled.layers, expected);

    let (_got, got) = folder();
    for layer in &pulled.layers {
        let path = client.fetch(&name, layer, &got, &quiet).unwrap();
        open_layer(fs::File::open(path).unwrap(), layer, Bounds::default()).unwrap().finish().unwrap();
    }
    assert_eq!(got.digests().unwrap().len(), 3);

    // By digest, and a digest that is not there.
    let pinned = name.clone().with_digest(digest);
    assert_eq!(client.resolve(&pinned, &Platform::host()).unwrap().digest, digest);
    let other = name.clone().with_digest(Digest::of(b"other"));
    assert!(matches!(client.resolve(&other, &Platform::host()), Err(RegistryError::NotFound { .. })));
    let error = client.resolve(&name, &Platform::linux("s390x")).unwrap_err();
    assert!(matches!(error, RegistryError::Document { .. }), "{error:?}");
    assert!(matches!(client.push(&pinned, &outgoing, &quiet), Err(RegistryError::PushToDigest)));

    // A second push finds everything there.
    let phases = RefCell::new(Vec::new());
    let note = |progress: Progress| {
        phases.borrow_mut().push(progress.phase);
        ControlFlow::Continue(())
    };
    client.push(&reference(registry.host(), "some/image:2"), &outgoing, &note).unwrap();
    assert_eq!(phases.take(), [Phase::Present; 4]);
}

#[test]
fn what_is_there_is_not_fetched_again() {
    let Some(registry) = DockerRegistry::start() else { return };
    let proxy = Proxy::start(registry.port);
    let (_made, made) = folder();
    let shared = (Compression::Gzip, noise(3, 300_000));
    let one = image(&made, &[shared.clone(), (Compression::Gzip, noise(4, 5000))], None);
    let two = image(&made, &[shared, (Compression::Gzip, noise(5, 5000))], None);
    let client = client();
    let name_one = reference(registry.host(), "one:1");
    client.push(&name_one, &one, &quiet).unwrap();
    client.push(&reference(registry.host(), "two:1"), &two, &quiet).unwrap();

    let (_got, got) = folder();
    let through = reference(proxy.host(), "one:1");
    let fetch_all = |outgoing: &viv_image::OutgoingImage, path: &str| {
        for (layer, _) in &outgoing.layers {
            client.fetch(&reference(proxy.host(), path), layer, &got, &quiet).unwrap();
        }
        proxy.take_down()
    };
    assert!(fetch_all(&one, "one:1") > 300_000);
    assert_eq!(fetch_all(&one, "one:1"), 0);
    let second = fetch_all(&two, "two:1");
    assert!((5000..100_000).contains(&second), "{second}");

    // A blob that was damaged on our disk is fetched again.
    let (layer, _) = &one.layers[0];
    fs::write(got.path(&layer.digest), b"rot").unwrap();
    let path = client.fetch(&through, layer, &got, &quiet).unwrap();
    assert_eq!(fs::metadata(path).unwrap().len(), layer.size);
}

#[test]
fn a_blob_that_rotted_in_the_registry_is_refused() {
    let Some(registry) = DockerRegistry::start() else { return };
    let (_made, made) = folder();
    let outgoing = image(&made, &[(Compression::Gzip, noise(6, 50_000))], None);
    let name = reference(registry.host(), "rotten:1");
    let client = client();
    client.push(&name, &outgoing, &quiet).unwrap();
    let (layer, _) = &outgoing.layers[0];
    let stored = registry.blob_path(&layer.digest);
    let mut bytes = fs::read(&stored).unwrap();
    bytes[20_000] ^= 1;
    fs::write(&stored, bytes).unwrap();

    let (_got, got) = folder();
    let error = client.fetch(&name, layer, &got, &quiet).unwrap_err();
    assert!(matches!(error, RegistryError::WrongBlob { .. }), "{error:?}");
    assert_eq!(files_in(got.path(&layer.digest).parent().unwrap()), Vec::<String>::new());
}

#[test]
fn a_download_that_breaks_is_carried_on() {
    let Some(registry) = DockerRegistry::start() else { return };
    let proxy = Proxy::start(registry.port);
    let (_made, made) = folder();
    let outgoing = image(&made, &[(Compression::None, noise(7, 3_000_000))], None);
    let client = client();
    client.push(&reference(registry.host(), "broken:1"), &outgoing, &quiet).unwrap();
    let (layer, _) = &outgoing.layers[0];
    let name = reference(proxy.host(), "broken:1");

    // Within one call.
    let (_got, got) = folder();
    let retries = Cell::new(0);
    let count = |progress: Progress| {
        retries.set(retries.get() + u32::from(progress.phase == Phase::Retrying && progress.done_bytes > 0));
        ControlFlow::Continue(())
    };
    proxy.cut(1_000_000, 2);
    client.fetch(&name, layer, &got, &count).unwrap();
    assert_eq!(proxy.cuts_left(), 0);
    assert!(retries.get() >= 2);
    let moved = proxy.take_down();
    // What the proxy had passed on when it cut may not all have been read.
    assert!((layer.size..layer.size + 600_000).contains(&moved), "{moved} bytes for {}", layer.size);

    // From one call, which was stopped, to the next.
    let (_again, again) = folder();
    let stop = |progress: Progress| {
        if progress.done_bytes > 1_500_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let error = client.fetch(&name, layer, &again, &stop).unwrap_err();
    assert!(matches!(error, RegistryError::Cancelled));
    let part = again.path(&layer.digest).with_extension("part");
    let kept = fs::metadata(&part).unwrap().len();
    assert!(kept > 1_500_000 && again.digests().unwrap().is_empty());
    let first = Cell::new(None);
    let note = |progress: Progress| {
        if progress.phase == Phase::Fetching && first.get().is_none() {
            first.set(Some(progress.done_bytes));
        }
        ControlFlow::Continue(())
    };
    client.fetch(&name, layer, &again, &note).unwrap();
    assert_eq!(first.get(), Some(kept));
    assert!(!part.exists());

    // A damaged beginning is noticed in the end, and all is fetched once more.
    again.remove(&layer.digest).unwrap();
    fs::write(&part, vec![0; 1_000_000]).unwrap();
    client.fetch(&name, layer, &again, &quiet).unwrap();
    assert!(again.get(&layer.digest, layer.size).unwrap().is_some());
}

#[test]
fn one_blob_is_fetched_by_one_at_a_time() {
    let Some(registry) = DockerRegistry::start() else { return };
    let proxy = Proxy::start(registry.port);
    let (_made, made) = folder();
    let outgoing = image(&made, &[(Compression::None, noise(8, 2_000_000))], None);
    let client = client();
    client.push(&reference(registry.host(), "race:1"), &outgoing, &quiet).unwrap();
    let (layer, _) = &outgoing.layers[0];
    let (_got, got) = folder();
    let name = reference(proxy.host(), "race:1");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| client.fetch(&name, layer, &got, &quiet).unwrap());
        }
    });
    let moved = proxy.take_down();
    assert!((layer.size..layer.size + 100_000).contains(&moved), "{moved}");
    assert_eq!(files_in(got.path(&layer.digest).parent().unwrap()), [layer.digest.hex()]);
}

#[test]
fn a_mirror_is_asked_first_and_its_failure_is_not_the_end() {
    let Some(registry) = DockerRegistry::start() else { return };
    let Some(mirror) = DockerRegistry::start() else { return };
    let (_made, made) = folder();
    let outgoing = image(&made, &[(Compression::Gzip, noise(9, 10_000))], None);
    let plain = client();
    plain.push(&reference(registry.host(), "x:1"), &outgoing, &quiet).unwrap();
    let mut options = common::options();
    options.mirrors.insert(registry.host(), vec![mirror.host()]);
    let mirrored = viv_image::Registry::new(options).unwrap();
    let name = reference(registry.host(), "x:1");
    // The mirror has nothing yet.
    let found = mirrored.resolve(&name, &Platform::host()).unwrap();
    assert_eq!(found.digest, outgoing.digest().unwrap());
    // Now it has another.
    let other = image(&made, &[(Compression::Gzip, noise(10, 10_000))], None);
    plain.push(&reference(mirror.host(), "x:1"), &other, &quiet).unwrap();
    assert_eq!(mirrored.resolve(&name, &Platform::host()).unwrap().digest, other.digest().unwrap());
    let (_got, got) = folder();
    mirrored.fetch(&name, &outgoing.layers[0].0, &got, &quiet).unwrap();
}

/// A certificate authority, and a server's certificate from it.
fn make_certificates(folder: &std::path::Path) -> bool {
    let openssl = |arguments: &str| {
        std::process::Command::new("openssl")
            .args(arguments.split_whitespace())
            .current_dir(folder)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
    openssl(&format!("req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=test-authority"))
        && openssl(&format!("req {key} -keyout server.key -out server.csr -subj /CN=localhost"))
        && fs::write(folder.join("ext"), "subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n").is_ok()
        && openssl(
            "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out server.pem",
        )
}

#[test]
fn an_encrypted_registry_is_trusted_by_its_authority_only() {
    let certificates = tempfile::tempdir().unwrap();
    if !make_certificates(certificates.path()) {
        eprintln!("skipped: openssl is not installed");
        return;
    }
    let at = |name: &str| certificates.path().join(name);
    let tls = format!("  tls: {{certificate: {}, key: {}}}\n", at("server.pem").display(), at("server.key").display());
    let Some(registry) = DockerRegistry::start_with(&tls) else { return };
    let host = format!("localhost:{}", registry.port);
    let (_made, made) = folder();
    let outgoing = image(&made, &[(Compression::Gzip, noise(11, 100_000))], None);
    let name = reference(&host, "x:1");
    let mut options = common::options();
    options.encrypted_loopback.insert(host);
    let stranger = viv_image::Registry::new(options.clone()).unwrap();
    let error = stranger.push(&name, &outgoing, &quiet).unwrap_err();
    assert!(matches!(error, RegistryError::Untrusted { .. } | RegistryError::NoCertificates { .. }), "{error:?}");
    options.extra_ca_file = Some(at("ca.pem"));
    let friend = viv_image::Registry::new(options.clone()).unwrap();
    friend.push(&name, &outgoing, &quiet).unwrap();
    let (_got, got) = folder();
    let pulled = friend.resolve(&name, &Platform::host()).unwrap();
    friend.fetch(&name, &pulled.layers[0], &got, &quiet).unwrap();
    // Without encryption the registry answers that it wants it, and no more.
    assert!(client().resolve(&name, &Platform::host()).is_err());
    options.extra_ca_file = Some(at("server.key"));
    assert!(matches!(viv_image::Registry::new(options), Err(RegistryError::Certificates { .. })));
}
