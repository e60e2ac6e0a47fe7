//! Registries that ask for proof, send elsewhere, break, or lie.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::server::{Answer, Request, Server};
use common::{client, files_in, image, noise, options, quiet, reference};
use serde_json::json;
use viv_image::{BlobDir, Compression, Credential, Digest, OutgoingImage, Platform, Registry, RegistryError};

/// An image's parts, as a registry would answer for them.
#[derive(Clone)]
struct Parts {
    manifest: Vec<u8>,
    config: Vec<u8>,
    layer: viv_image::LayerDescriptor,
    blob: Vec<u8>,
}

fn parts(folder: &std::path::Path) -> (Parts, OutgoingImage) {
    let blobs = BlobDir::open(folder).unwrap();
    let outgoing = image(&blobs, &[(Compression::None, noise(1, 400_000))], None);
    let layout = folder.join("layout");
    viv_image::write_layout(&outgoing, &layout).unwrap();
    let read = |digest: &str| std::fs::read(layout.join("blobs/sha256").join(&digest["sha256:".len()..])).unwrap();
    let manifest = read(&outgoing.digest().unwrap().to_string());
    let value: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let config = read(value["config"]["digest"].as_str().unwrap());
    let (layer, path) = outgoing.layers[0].clone();
    (Parts { manifest, config, layer, blob: std::fs::read(path).unwrap() }, outgoing)
}

impl Parts {
    fn answer(&self, request: &Request) -> Answer {
        let last = request.path.rsplit('/').next().unwrap();
        if request.path.contains("/manifests/") && (last == "1" || last == Digest::of(&self.manifest).to_string()) {
            Answer::ok(&*self.manifest)
        } else if last == Digest::of(&self.config).to_string() {
            Answer::ok(&*self.config)
        } else if last == self.layer.digest.to_string() {
            Answer::ok(&*self.blob)
        } else {
            Answer::of(404, "{}")
        }
    }
}

struct Setup {
    folder: tempfile::TempDir,
    parts: Parts,
    got: BlobDir,
}

fn setup() -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let (parts, _) = parts(folder.path());
    let got = BlobDir::open(&folder.path().join("got")).unwrap();
    Setup { folder, parts, got }
}

impl Setup {
    fn got(&self) -> Vec<String> {
        files_in(&self.folder.path().join("got/sha256"))
    }
}

fn with_credential(host: &str) -> Registry {
    let mut options = options();
    options.credentials.insert(host, Credential { username: "me".to_owned(), password: "secret".to_owned() });
    Registry::new(options).unwrap()
}

const BASIC: &str = "Basic bWU6c2VjcmV0";

#[test]
fn a_token_is_fetched_once_and_used() {
    let setup = setup();
    let tokens = Server::start(|request| {
        if request.header("authorization") != Some(BASIC) {
            return Answer::of(401, "{}");
        }
        Answer::ok(json!({"token": "t0ken", "expires_in": 300}).to_string())
    });
    let realm = format!("http://{}/token?x=y", tokens.host());
    let parts = setup.parts.clone();
    let server = Server::start(move |request| match request.header("authorization") {
        Some("Bearer t0ken") => parts.answer(request),
        _ => Answer::of(401, "{}").with(
            "www-authenticate",
            format!("Bearer realm=\"{realm}\",service=\"a registry\",scope=\"repository:evil:*\""),
        ),
    });
    let name = reference(server.host(), "a/b:1");
    let known = with_credential(&server.host());
    let image = known.resolve(&name, &Platform::host()).unwrap();
    known.fetch(&name, &image.layers[0], &setup.got, &quiet).unwrap();
    let asked = tokens.seen();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].path, "/token?x=y&scope=repository%3Aa%2Fb%3Apull&service=a%20registry");

    let error = client().resolve(&name, &Platform::host()).unwrap_err();
    assert!(matches!(error, RegistryError::Denied { anonymous: true, .. }), "{error:?}");
    assert!(error.hint().is_some());
}

#[test]
fn basic_proof_is_sent_when_asked_for_and_only_then() {
    let setup = setup();
    let parts = setup.parts.clone();
    let server = Server::start(move |request| match request.header("authorization") {
        Some(BASIC) => parts.answer(request),
        _ => Answer::of(401, "{}").with("www-authenticate", "Basic realm=\"x\""),
    });
    let name = reference(server.host(), "a/b:1");
    with_credential(&server.host()).resolve(&name, &Platform::host()).unwrap();
    assert_eq!(server.seen()[0].header("authorization"), None);
    let error = with_credential("other.example").resolve(&name, &Platform::host()).unwrap_err();
    assert!(matches!(error, RegistryError::Denied { anonymous: true, .. }), "{error:?}");
    assert!(!format!("{error:?}").contains("secret"));
}

#[test]
fn proof_is_not_told_to_a_realm_that_is_less_protected() {
    for (realm, plain) in
        [("http://elsewhere.example/token", true), ("ftp://x/", false), ("http://me@127.0.0.1/", false)]
    {
        let challenge = format!("Bearer realm=\"{realm}\"");
        let server = Server::start(move |_| Answer::of(401, "{}").with("www-authenticate", &challenge));
        let name = reference(server.host(), "a/b:1");
        match with_credential(&server.host()).resolve(&name, &Platform::host()).unwrap_err() {
            RegistryError::Plain { .. } => assert!(plain, "{realm}"),
            RegistryError::BadAnswer { .. } => assert!(!plain, "{realm}"),
            error => panic!("{realm}: {error:?}"),
        }
        assert!(server.seen().iter().all(|request| request.header("authorization").is_none()));
    }
}

#[test]
fn redirects_lead_elsewhere_without_proof() {
    let setup = setup();
    let parts = setup.parts.clone();
    let storage = Server::start(move |request| parts.answer(request));
    let (parts, to) = (setup.parts.clone(), storage.host());
    let server = Server::start(move |request| {
        if request.header("authorization") != Some(BASIC) {
            return Answer::of(401, "{}").with("www-authenticate", "Basic realm=\"x\"");
        }
        if request.path.contains("/blobs/") {
            let last = request.path.rsplit('/').next().unwrap();
            return Answer::of(307, "").with("location", format!("http://{to}/bucket/{last}"));
        }
        parts.answer(request)
    });
    let name = reference(server.host(), "a/b:1");
    let client = with_credential(&server.host());
    let image = client.resolve(&name, &Platform::host()).unwrap();
    client.fetch(&name, &image.layers[0], &setup.got, &quiet).unwrap();
    let seen = storage.seen();
    assert_eq!(seen.len(), 2);
    assert!(seen.iter().all(|request| request.header("authorization").is_none()));
}

#[test]
fn redirects_end() {
    let server = Server::start(|request| Answer::of(302, "").with("location", format!("{}x", request.path)));
    let error = client().resolve(&reference(server.host(), "a:1"), &Platform::host()).unwrap_err();
    assert!(matches!(error, RegistryError::Redirects { .. }), "{error:?}");
    assert_eq!(server.seen().len(), viv_image::limits::REDIRECTS_MAX + 1);
    let server = Server::start(|_| Answer::of(302, "").with("location", "http://elsewhere.example/"));
    let error = client().resolve(&reference(server.host(), "a:1"), &Platform::host()).unwrap_err();
    assert!(matches!(error, RegistryError::Plain { .. }), "{error:?}");
}

#[test]
fn a_server_without_ranges_begins_again() {
    let setup = setup();
    let parts = setup.parts.clone();
    let times = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        let mut answer = parts.answer(request);
        if times.fetch_add(1, Ordering::SeqCst) == 0 {
            answer.cut_at = Some(100_000);
        }
        answer
    });
    let name = reference(server.host(), "a:1");
    let path = client().fetch(&name, &setup.parts.layer, &setup.got, &quiet).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), setup.parts.blob);
    let seen = server.seen();
    assert_eq!(seen.len(), 2);
    assert_eq!((seen[0].header("range"), seen[1].header("range").is_some()), (None, true));
}

#[test]
fn parts_that_were_not_asked_for_are_refused() {
    let setup = setup();
    let part = setup.got.path(&setup.parts.layer.digest).with_extension("part");
    let fetch = |answer: Answer| {
        std::fs::write(&part, &setup.parts.blob[..1000]).unwrap();
        let server = Server::start(move |_| answer.clone());
        client().fetch(&reference(server.host(), "a:1"), &setup.parts.layer, &setup.got, &quiet)
    };
    let rest = setup.parts.blob[2000..].to_vec();
    let wrong = fetch(Answer::of(206, rest.clone()).with("content-range", "bytes 2000-399999/400000"));
    assert!(matches!(wrong, Err(RegistryError::BadAnswer { .. })), "{wrong:?}");
    let unsaid = fetch(Answer::of(206, rest));
    assert!(matches!(unsaid, Err(RegistryError::BadAnswer { .. })), "{unsaid:?}");
    let short = fetch(Answer::ok("short"));
    assert!(matches!(short, Err(RegistryError::BadAnswer { .. })), "{short:?}");
    let long = fetch(Answer { endless: true, ..Answer::ok("") });
    assert!(matches!(long, Err(RegistryError::BadAnswer { .. })), "{long:?}");
    assert!(setup.got.digests().unwrap().is_empty());
}

#[test]
fn a_part_that_is_longer_than_the_blob_is_thrown_away() {
    let setup = setup();
    let part = setup.got.path(&setup.parts.layer.digest).with_extension("part");
    std::fs::write(&part, vec![0; setup.parts.blob.len() + 1]).unwrap();
    let parts = setup.parts.clone();
    let server = Server::start(move |request| parts.answer(request));
    client().fetch(&reference(server.host(), "a:1"), &setup.parts.layer, &setup.got, &quiet).unwrap();
    assert_eq!(server.seen()[0].header("range"), None);
    assert_eq!(setup.got(), [setup.parts.layer.digest.hex()]);
}

#[test]
fn silence_ends() {
    let setup = setup();
    let mut options = options();
    (options.silence_timeout, options.retries) = (Duration::from_millis(200), 1);
    let parts = setup.parts.clone();
    let server = Server::start(move |request| Answer { silence: Duration::from_secs(20), ..parts.answer(request) });
    let name = reference(server.host(), "a:1");
    let registry = Registry::new(options).unwrap();
    let started = Instant::now();
    let error = registry.fetch(&name, &setup.parts.layer, &setup.got, &quiet).unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }), "{error:?}");
    assert!(matches!(registry.resolve(&name, &Platform::host()), Err(RegistryError::Unreachable { .. })));
    assert!(started.elapsed() < Duration::from_secs(10));
    assert_eq!(server.seen().len(), 4);
    assert_eq!(setup.got(), Vec::<String>::new());
}

#[test]
fn passing_trouble_passes_and_lasting_trouble_is_told() {
    let setup = setup();
    let parts = setup.parts.clone();
    let times = AtomicUsize::new(0);
    let server = Server::start(move |request| match times.fetch_add(1, Ordering::SeqCst) {
        0 => Answer::of(503, "{}"),
        1 => Answer::of(429, "{}").with("retry-after", "0"),
        _ => parts.answer(request),
    });
    client().resolve(&reference(server.host(), "a:1"), &Platform::host()).unwrap();

    let server = Server::start(|_| Answer::of(500, json!({"errors": [{"message": "on\u{1b}fire"}]}).to_string()));
    let error = client().resolve(&reference(server.host(), "a:1"), &Platform::host()).unwrap_err();
    assert!(error.to_string().ends_with(": on fire"), "{error}");
    assert_eq!(server.seen().len(), 4);

    let server = Server::start(|_| Answer::of(400, "no json"));
    let error = client().resolve(&reference(server.host(), "a:1"), &Platform::host()).unwrap_err();
    assert!(matches!(error, RegistryError::Status { status: 400, .. }), "{error:?}");
    assert_eq!(server.seen().len(), 1);
}

#[test]
fn documents_that_lie_are_refused() {
    let setup = setup();
    let resolve = |answer: &dyn Fn(&Request, &Parts) -> Answer| {
        // The server's closure has to live longer than the test's; what it answers is made beforehand.
        let manifest = answer(&Request { path: "/v2/a/manifests/1".to_owned(), ..Request::default() }, &setup.parts);
        let path = format!("/v2/a/blobs/{}", Digest::of(&setup.parts.config));
        let config = answer(&Request { path, ..Request::default() }, &setup.parts);
        let server =
            Server::start(
                move |request| {
                    if request.path.contains("/manifests/") { manifest.clone() } else { config.clone() }
                },
            );
        client().resolve(&reference(server.host(), "a:1"), &Platform::host())
    };
    resolve(&|request, parts| parts.answer(request)).unwrap();
    let result = resolve(&|request, parts| parts.answer(request).with("docker-content-digest", Digest::of(b"other")));
    assert!(matches!(result, Err(RegistryError::BadAnswer { .. })), "{result:?}");
    let result = resolve(&|_, _| Answer { endless: true, ..Answer::ok("") });
    assert!(matches!(result, Err(RegistryError::BadAnswer { .. })), "{result:?}");
    let result = resolve(&|request, parts| {
        let mut answer = parts.answer(request);
        if request.path.contains("/blobs/") {
            answer.body[0] ^= 1;
        }
        answer
    });
    assert!(matches!(result, Err(RegistryError::Document { .. })), "{result:?}");
    for nonsense in ["", "{}", "[]", "null", "{\"manifests\": []}", "{\"config\": {}, \"layers\": 3}"] {
        let result = resolve(&|_, _| Answer::ok(nonsense));
        assert!(matches!(result, Err(RegistryError::Document { .. })), "{nonsense}: {result:?}");
    }
}

#[test]
fn indexes_are_followed_but_not_for_ever() {
    let setup = setup();
    let index_of = |inner: &[u8]| {
        let entry = json!({"mediaType": "x", "digest": Digest::of(inner), "size": inner.len(),
            "platform": {"os": "linux", "architecture": Platform::host().architecture}});
        json!({"schemaVersion": 2, "manifests": [entry]}).to_string().into_bytes()
    };
    let mut documents = vec![setup.parts.manifest.clone()];
    for _ in 0..6 {
        documents.push(index_of(documents.last().unwrap()));
    }
    let all = documents.clone();
    let parts = setup.parts.clone();
    let server = Server::start(move |request| {
        let last = request.path.rsplit('/').next().unwrap();
        let found = all.iter().find(|document| Digest::of(document).to_string() == last);
        found.map_or_else(|| parts.answer(request), |document| Answer::ok(&**document))
    });
    let resolve = |depth: usize| {
        let name = reference(server.host(), "a:1").with_digest(Digest::of(&documents[depth]));
        client().resolve(&name, &Platform::host())
    };
    assert_eq!(resolve(1).unwrap().digest, Digest::of(&setup.parts.manifest));
    resolve(3).unwrap();
    assert!(matches!(resolve(5), Err(RegistryError::Document { .. })));
}

#[test]
fn what_is_too_large_is_not_begun() {
    let setup = setup();
    let server = Server::start(|_| Answer::of(404, ""));
    let mut options = options();
    options.blob_bytes_max = 1000;
    let error = Registry::new(options)
        .unwrap()
        .fetch(&reference(server.host(), "a:1"), &setup.parts.layer, &setup.got, &quiet)
        .unwrap_err();
    assert!(matches!(error, RegistryError::TooLarge { .. }));
    assert!(server.seen().is_empty());
}

#[test]
fn a_place_for_an_upload_elsewhere_gets_no_proof() {
    let folder = tempfile::tempdir().unwrap();
    let (_, outgoing) = parts(folder.path());
    let elsewhere = Server::start(|_| Answer::of(201, ""));
    let to = elsewhere.host();
    let server = Server::start(move |request| {
        if request.header("authorization") != Some(BASIC) {
            return Answer::of(401, "{}").with("www-authenticate", "Basic realm=\"x\"");
        }
        match request.method.as_str() {
            "HEAD" => Answer::of(404, ""),
            "POST" => Answer::of(202, "").with("location", format!("http://{to}/upload?state=1")),
            _ => Answer::of(201, ""),
        }
    });
    let name = reference(server.host(), "a:1");
    with_credential(&server.host()).push(&name, &outgoing, &quiet).unwrap();
    let seen = elsewhere.seen();
    assert_eq!(seen.len(), 2);
    assert!(seen.iter().all(|request| request.method == "PUT" && request.header("authorization").is_none()));
    assert!(seen[0].path.starts_with("/upload?state=1&digest=sha256%3A"), "{}", seen[0].path);
    assert_eq!(seen[0].header("content-length"), Some(outgoing.layers[0].0.size.to_string().as_str()));

    // A layer's file that is not what it is called is noticed.
    let mut wrong = outgoing.clone();
    let path = folder.path().join("wrong");
    std::fs::write(&path, vec![1; outgoing.layers[0].0.size as usize]).unwrap();
    wrong.layers[0].1 = path;
    let error = with_credential(&server.host()).push(&name, &wrong, &quiet).unwrap_err();
    assert!(matches!(error, RegistryError::Write(_)), "{error:?}");
}
