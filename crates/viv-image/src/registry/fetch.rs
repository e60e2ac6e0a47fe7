//! From a layer's descriptor to its blob in a folder.
//!
//! ```text
//!   complete? ─yes─► answer
//!      │no
//!   lock .part ─► ask for the rest ─► append, hash ─► whole? ─► digest right? ─► sync, rename
//!                   ▲                                   │no        │no
//!                   └──────── pause ◄───────────────────┘          └─► once more from the start, if it was resumed
//! ```
//!
//! A resumed download needs no `If-Range`: what is asked for is named by its digest, so it cannot have changed, and
//! whether the pieces fit is seen by the digest in the end. A server that ignores the range begins again.

use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::PathBuf;

use ureq::Body;
use ureq::http::header::{CONTENT_LENGTH, CONTENT_RANGE};
use ureq::http::{HeaderMap, Method, Response};

use super::http::{Ask, Pace, Session, text};
use super::retry::Patience;
use super::{Phase, Progress, Registry, RegistryError};
use crate::blobs::{BlobDir, Partial};
use crate::image::LayerDescriptor;
use crate::reference::Reference;

/// Pieces in which blobs are read; the caller is told after each.
const PIECE_BYTES: usize = 128 << 10;
/// An attempt that brings at least this much, or the end, was worth it: the count of attempts begins anew. A server
/// that gives a byte at a time does not keep us for ever.
const WORTH_BYTES: u64 = 1 << 20;

/// The caller's callback, with what stays the same.
struct Teller<'a> {
    layer: &'a LayerDescriptor,
    progress: &'a dyn Fn(Progress) -> ControlFlow<()>,
}

impl Teller<'_> {
    fn tell(&self, phase: Phase, done_bytes: u64) -> Result<(), RegistryError> {
        let (digest, total_bytes) = (self.layer.digest, self.layer.size);
        match (self.progress)(Progress { digest, phase, done_bytes, total_bytes }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(RegistryError::Cancelled),
        }
    }

    fn goes_on(&self, phase: Phase, done_bytes: u64) -> bool {
        self.tell(phase, done_bytes).is_ok()
    }
}

impl Registry {
    /// Fetches a layer's blob, unless it is there, and answers where it is. The callback hears of every piece, and
    /// can stop the transfer; what was fetched so far is kept for the next time.
    pub fn fetch(
        &self,
        reference: &Reference,
        layer: &LayerDescriptor,
        into: &BlobDir,
        progress: &dyn Fn(Progress) -> ControlFlow<()>,
    ) -> Result<PathBuf, RegistryError> {
        let limit_bytes = self.options.blob_bytes_max;
        if layer.size > limit_bytes {
            return Err(RegistryError::TooLarge { digest: layer.digest, size: layer.size, limit_bytes });
        }
        let teller = Teller { layer, progress };
        let present = |path| teller.tell(Phase::Present, layer.size).map(|()| path);
        if let Some(path) = into.get(&layer.digest, layer.size)? {
            return present(path);
        }
        let waiting = || teller.goes_on(Phase::Waiting, 0);
        let mut partial = into.begin(&layer.digest, self.options.lock_timeout, &waiting)?;
        // Who had the lock before may have fetched it.
        if let Some(path) = into.get(&layer.digest, layer.size)? {
            partial.discard()?;
            return present(path);
        }
        partial.take_up(layer.size)?;
        match self.first_of(reference, |session| session.download(layer, &mut partial, &teller)) {
            Ok(()) => {
                let path = partial.complete(into, &layer.digest)?;
                teller.tell(Phase::Done, layer.size)?;
                Ok(path)
            }
            Err(error) => {
                if partial.len() == 0 {
                    partial.discard()?;
                }
                Err(error)
            }
        }
    }
}

impl Session<'_> {
    /// Brings what is missing, and checks the whole.
    fn download(
        &self,
        layer: &LayerDescriptor,
        partial: &mut Partial,
        teller: &Teller<'_>,
    ) -> Result<(), RegistryError> {
        let mut patience = Patience::new(&self.registry.options);
        let mut in_pieces = partial.len() > 0;
        loop {
            let before = partial.len();
            if before < layer.size
                && let Err(error) = self.download_rest(layer, partial, teller)
            {
                if partial.len() >= before.saturating_add(WORTH_BYTES) {
                    patience.renew();
                }
                patience.wait(error, &|| teller.goes_on(Phase::Retrying, partial.len()))?;
                in_pieces |= partial.len() > 0;
                continue;
            }
            let found = partial.digest();
            if found == layer.digest {
                return Ok(());
            }
            partial.restart()?;
            if !in_pieces {
                return Err(RegistryError::WrongBlob { host: self.host(), expected: layer.digest, found });
            }
            // An earlier piece may have been damaged on this disk; all from one answer cannot.
            in_pieces = false;
        }
    }

    fn download_rest(
        &self,
        layer: &LayerDescriptor,
        partial: &mut Partial,
        teller: &Teller<'_>,
    ) -> Result<(), RegistryError> {
        let what = format!("{}@{}", self.repository, layer.digest);
        let mut response = self.ask_from(layer, partial.len(), &what)?;
        if response.status().as_u16() == 416 && partial.len() > 0 {
            partial.restart()?;
            response = self.ask_from(layer, 0, &what)?;
        }
        let from = match response.status().as_u16() {
            200 => 0,
            206 => range_start(response.headers()).ok_or_else(|| self.bad("a part that is not said which"))?,
            _ => return Err(self.refused(response, &what)),
        };
        if from == 0 && partial.len() > 0 {
            partial.restart()?;
        }
        if from != partial.len() {
            return Err(self.bad("another part than was asked for"));
        }
        let expected = layer.size - from;
        let promised = text(response.headers(), CONTENT_LENGTH.as_str()).and_then(|length| length.parse::<u64>().ok());
        if promised.is_some_and(|promised| promised != expected) {
            return Err(self.bad(&format!("a blob of {promised:?} bytes instead of {expected}")));
        }
        self.append(response, layer, partial, teller)
    }

    fn ask_from(&self, layer: &LayerDescriptor, from: u64, what: &str) -> Result<Response<Body>, RegistryError> {
        let range = [("range", format!("bytes={from}-"))];
        self.ask(&Ask {
            method: Method::GET,
            url: self.url(&format!("blobs/{}", layer.digest)),
            headers: if from > 0 { &range } else { &[] },
            pace: Pace::Stream,
            what,
        })
    }

    fn append(
        &self,
        response: Response<Body>,
        layer: &LayerDescriptor,
        partial: &mut Partial,
        teller: &Teller<'_>,
    ) -> Result<(), RegistryError> {
        let mut body = response.into_body().into_reader();
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            teller.tell(Phase::Fetching, partial.len())?;
            let count = match body.read(&mut piece) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.cut(error)),
            };
            if count == 0 {
                break;
            }
            if partial.len() + count as u64 > layer.size {
                partial.restart()?;
                return Err(self.bad(&format!("more than the {} bytes of the blob", layer.size)));
            }
            partial.append(&piece[..count])?;
        }
        if partial.len() < layer.size {
            return Err(self.cut(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(())
    }
}

/// Where a part begins: `bytes 100-199/200`.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    text(headers, CONTENT_RANGE.as_str())?.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}
