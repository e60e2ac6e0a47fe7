//! An image into a registry: layers that it lacks, the configuration, then the manifest.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;

use ureq::http::header::LOCATION;
use ureq::http::{Method, StatusCode, Uri};

use super::http::{Access, Ask, Pace, Session, text};
use super::pull::CONTENT_DIGEST;
use super::retry::{Patience, retrying};
use super::{Phase, Progress, Registry, RegistryError};
use crate::digest::{Digest, HashingReader};
use crate::document::OCI_MANIFEST;
use crate::files::{Links, open_regular};
use crate::reference::Reference;
use crate::write::{OutgoingImage, WriteError};

type Callback<'a> = &'a dyn Fn(Progress) -> ControlFlow<()>;

/// What is pushed as a blob.
enum Source<'a> {
    File(&'a Path),
    Bytes(&'a [u8]),
}

struct Outgoing<'a> {
    digest: Digest,
    size: u64,
    source: Source<'a>,
}

impl Registry {
    /// Pushes an image to a tag, and answers the digest of its manifest. The manifest is sent last: the tag means
    /// the old image or the whole new one.
    pub fn push(
        &self,
        reference: &Reference,
        image: &OutgoingImage,
        progress: Callback<'_>,
    ) -> Result<Digest, RegistryError> {
        let (Some(tag), None) = (reference.tag(), reference.digest()) else {
            return Err(RegistryError::PushToDigest);
        };
        let documents = image.documents()?;
        let endpoint = self.endpoint(reference.registry());
        let session =
            Session { registry: self, endpoint: &endpoint, repository: reference.repository(), access: Access::Push };
        let mut pushed = Vec::new();
        for (layer, path) in &image.layers {
            if !pushed.contains(&layer.digest) {
                let source = Source::File(path);
                session.push_blob(&Outgoing { digest: layer.digest, size: layer.size, source }, progress)?;
                pushed.push(layer.digest);
            }
        }
        let config = Outgoing {
            digest: documents.config_digest,
            size: documents.config.len() as u64,
            source: Source::Bytes(&documents.config),
        };
        session.push_blob(&config, progress)?;
        retrying(&self.options, || session.push_manifest(tag, &documents.manifest, documents.manifest_digest))?;
        Ok(documents.manifest_digest)
    }
}

impl Session<'_> {
    fn push_blob(&self, blob: &Outgoing<'_>, progress: Callback<'_>) -> Result<(), RegistryError> {
        let tell = |phase, done_bytes| {
            let (digest, total_bytes) = (blob.digest, blob.size);
            progress(Progress { digest, phase, done_bytes, total_bytes }).is_continue()
        };
        if retrying(&self.registry.options, || self.has(blob.digest))? {
            return if tell(Phase::Present, blob.size) { Ok(()) } else { Err(RegistryError::Cancelled) };
        }
        let mut patience = Patience::new(&self.registry.options);
        let mut denied = false;
        loop {
            match self.upload(blob, &tell) {
                Ok(()) => break,
                // A token may end between the request for a place and the upload: once, a new one is asked for.
                Err(RegistryError::Denied { .. }) if !denied => {
                    denied = true;
                    self.registry.authorizations.forget(self);
                }
                Err(error) => patience.wait(error, &|| tell(Phase::Retrying, 0))?,
            }
        }
        if tell(Phase::Done, blob.size) { Ok(()) } else { Err(RegistryError::Cancelled) }
    }

    fn has(&self, digest: Digest) -> Result<bool, RegistryError> {
        let what = format!("{}@{digest}", self.repository);
        let url = self.url(&format!("blobs/{digest}"));
        let response = self.ask(&Ask { method: Method::HEAD, url, headers: &[], pace: Pace::Whole, what: &what })?;
        match response.status() {
            StatusCode::OK => Ok(true),
            StatusCode::NOT_FOUND => Ok(false),
            _ => Err(self.refused(response, &what)),
        }
    }

    /// One attempt: a place to send to, and all of the blob there.
    fn upload(&self, blob: &Outgoing<'_>, tell: &dyn Fn(Phase, u64) -> bool) -> Result<(), RegistryError> {
        let what = format!("{}@{}", self.repository, blob.digest);
        let start = self.url("blobs/uploads/");
        let headers = [("content-length", "0".to_owned())];
        let ask = Ask { method: Method::POST, url: start.clone(), headers: &headers, pace: Pace::Whole, what: &what };
        let response = self.ask(&ask)?;
        if response.status() != StatusCode::ACCEPTED {
            return Err(self.refused(response, &what));
        }
        let place = text(response.headers(), LOCATION.as_str()).ok_or_else(|| self.bad("no place to send to"))?;
        let place =
            with_digest(&self.follow(&start, place)?, blob.digest).ok_or_else(|| self.bad("a place that is no URL"))?;
        drop(response);
        let cancelled = Cell::new(false);
        let mut body = Counted { inner: HashingReader::new(blob.open()?), tell, cancelled: &cancelled };
        let headers = [("content-type", "application/octet-stream".to_owned())];
        let sent = self.send(&Method::PUT, &place, &headers, (blob.size, &mut body));
        if cancelled.get() {
            return Err(RegistryError::Cancelled);
        }
        let response = sent?;
        if !response.status().is_success() {
            return Err(self.refused(response, &what));
        }
        let found = body.inner.hasher().clone().finish();
        if found != blob.digest {
            return Err(WriteError::WrongLayer { expected: blob.digest, found }.into());
        }
        Ok(())
    }

    fn push_manifest(&self, tag: &str, manifest: &[u8], digest: Digest) -> Result<(), RegistryError> {
        let what = format!("{}:{tag}", self.repository);
        let url = self.url(&format!("manifests/{tag}"));
        let headers = [("content-type", OCI_MANIFEST.to_owned())];
        let length = manifest.len() as u64;
        let mut response = self.send(&Method::PUT, &url, &headers, (length, &mut &*manifest))?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.authorize(response.headers(), &what)?;
            response = self.send(&Method::PUT, &url, &headers, (length, &mut &*manifest))?;
        }
        if !response.status().is_success() {
            return Err(self.refused(response, &what));
        }
        let said = text(response.headers(), CONTENT_DIGEST).and_then(|said| said.parse::<Digest>().ok());
        if said.is_some_and(|said| said != digest) {
            return Err(self.bad("it keeps another manifest than was sent"));
        }
        Ok(())
    }
}

/// The place of an upload with the digest that ends it.
fn with_digest(place: &Uri, digest: Digest) -> Option<Uri> {
    let joint = if place.query().is_some() { '&' } else { '?' };
    format!("{place}{joint}digest=sha256%3A{}", digest.hex()).parse().ok()
}

impl Outgoing<'_> {
    fn open(&self) -> Result<Opened<'_>, RegistryError> {
        match self.source {
            Source::Bytes(bytes) => Ok(Opened::Bytes(bytes)),
            Source::File(path) => {
                let failed = |source| WriteError::Layer { path: path.to_owned(), source };
                let file = open_regular(path, Links::Follow).map_err(failed)?;
                let found_bytes = file.metadata().map_err(failed)?.len();
                if found_bytes != self.size {
                    let (digest, expected_bytes) = (self.digest, self.size);
                    return Err(WriteError::WrongSize { digest, expected_bytes, found_bytes }.into());
                }
                Ok(Opened::File(file.take(self.size)))
            }
        }
    }
}

enum Opened<'a> {
    File(io::Take<File>),
    Bytes(&'a [u8]),
}

impl Read for Opened<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(buffer),
            Self::Bytes(bytes) => bytes.read(buffer),
        }
    }
}

/// Tells how much was read to be sent.
struct Counted<'a, R> {
    inner: HashingReader<R>,
    tell: &'a dyn Fn(Phase, u64) -> bool,
    cancelled: &'a Cell<bool>,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !(self.tell)(Phase::Pushing, self.inner.hasher().count()) {
            self.cancelled.set(true);
            return Err(io::Error::other("cancelled"));
        }
        self.inner.read(buffer)
    }
}
