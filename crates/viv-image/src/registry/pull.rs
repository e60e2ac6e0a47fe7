//! From a reference to an image.

use ureq::http::Method;

use super::http::{Access, Ask, Pace, Session, text};
use super::retry::retrying;
use super::{Registry, RegistryError};
use crate::digest::Digest;
use crate::document::{ACCEPT, Blob, DocumentError, check_digest};
use crate::image::Image;
use crate::platform::Platform;
use crate::reference::Reference;
use crate::resolve::{Documents, Want, follow_document};

/// What a registry says the digest of its answer is.
pub(super) const CONTENT_DIGEST: &str = "docker-content-digest";

impl Registry {
    /// Finds the image that a reference means for a platform, and reads its documents.
    pub fn resolve(&self, reference: &Reference, platform: &Platform) -> Result<Image, RegistryError> {
        self.first_of(reference, |session| session.resolve(reference, platform))
    }

    /// Does something with the first of mirrors and registry that can. A mirror's failure, whatever it is, is the
    /// next one's turn; only the registry's own is told.
    pub(super) fn first_of<T>(
        &self,
        reference: &Reference,
        mut attempt: impl FnMut(&Session<'_>) -> Result<T, RegistryError>,
    ) -> Result<T, RegistryError> {
        let endpoints = self.pull_endpoints(reference.registry());
        let last = endpoints.len() - 1;
        for (index, endpoint) in endpoints.iter().enumerate() {
            let session =
                Session { registry: self, endpoint, repository: reference.repository(), access: Access::Pull };
            match attempt(&session) {
                Err(RegistryError::Cancelled) => return Err(RegistryError::Cancelled),
                Err(_) if index < last => {}
                result => return result,
            }
        }
        unreachable!("the registry itself is the last")
    }
}

/// A failure that does not know yet whose document it is about.
pub(super) enum PullError {
    Registry(RegistryError),
    Document(DocumentError),
}

impl From<DocumentError> for PullError {
    fn from(error: DocumentError) -> Self {
        Self::Document(error)
    }
}

impl Session<'_> {
    fn resolve(&self, reference: &Reference, platform: &Platform) -> Result<Image, RegistryError> {
        let document = |source| RegistryError::Document { host: self.host(), source };
        let selector = reference.selector();
        let (bytes, said) = self.document(&format!("manifests/{selector}"), Want::Manifest, &reference.to_string())?;
        let digest = Digest::of(&bytes);
        if let Some(wanted) = reference.digest() {
            check_digest(Want::Manifest.what(), &bytes, *wanted).map_err(document)?;
        }
        if said.is_some_and(|said| said != digest) {
            return Err(self.bad("the manifest is not what its header says"));
        }
        follow_document(self, digest, &bytes, platform).map_err(|error| match error {
            PullError::Registry(error) => error,
            PullError::Document(source) => document(source),
        })
    }

    /// Reads a document, and what the registry says its digest is.
    fn document(&self, path: &str, want: Want, what: &str) -> Result<(Vec<u8>, Option<Digest>), RegistryError> {
        let accept = match want {
            Want::Manifest => ACCEPT.join(", "),
            Want::Config => "*/*".to_owned(),
        };
        retrying(&self.registry.options, || {
            let response = self.ask(&Ask {
                method: Method::GET,
                url: self.url(path),
                headers: &[("accept", accept.clone())],
                pace: Pace::Whole,
                what,
            })?;
            if response.status() != ureq::http::StatusCode::OK {
                return Err(self.refused(response, what));
            }
            let said = text(response.headers(), CONTENT_DIGEST).and_then(|said| said.parse().ok());
            Ok((self.read_body(response, want.limit_bytes())?, said))
        })
    }
}

impl Documents for Session<'_> {
    type Error = PullError;

    fn read(&self, want: Want, blob: &Blob) -> Result<Vec<u8>, PullError> {
        let path = match want {
            Want::Manifest => format!("manifests/{}", blob.digest),
            Want::Config => format!("blobs/{}", blob.digest),
        };
        let what = format!("{}@{}", self.repository, blob.digest);
        let (bytes, _) = self.document(&path, want, &what).map_err(PullError::Registry)?;
        Ok(bytes)
    }
}
