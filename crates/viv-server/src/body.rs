//! Bodies on their way in: bounded in size, in how long they may pause and, where they are kept as a whole, in how long
//! they may take.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use http_body_util::BodyExt;
use tokio_util::io::StreamReader;
use viv_api::error::{ApiError, ErrorCode, ErrorDetails};
use viv_provider::ByteReader;

use crate::config::Bounds;
use crate::refusal::{Answer, Refusal};

/// Why a body was cut off.
#[derive(Debug, Clone, Copy)]
enum Cut {
    TooLarge { max: u64 },
    Pauses { idle: Duration },
    TooSlow { within: Duration },
    Broken,
}

impl From<Cut> for Refusal {
    fn from(cut: Cut) -> Self {
        Self(match cut {
            Cut::TooLarge { max } => {
                let details = ErrorDetails { quota: Some("body".to_owned()), limit: Some(max), ..Default::default() };
                let error = ApiError::new(ErrorCode::PayloadTooLarge, format!("the body has more than {max} bytes"));
                error.hint("send less at once").details(details)
            }
            Cut::Pauses { idle } => {
                let message = format!("nothing more of the body came for {} s", idle.as_secs());
                ApiError::new(ErrorCode::RequestTimeout, message).hint("send it again, without pauses")
            }
            Cut::TooSlow { within } => {
                let message = format!("the body was not there after {} s", within.as_secs());
                ApiError::new(ErrorCode::RequestTimeout, message).hint("send it again, faster, or less at once")
            }
            Cut::Broken => ApiError::new(ErrorCode::InvalidRequest, "the body broke off").hint("send it again"),
        })
    }
}

/// Whether it says itself that it is too large.
fn announced(headers: &HeaderMap, max: u64) -> Result<(), Cut> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > max) { Err(Cut::TooLarge { max }) } else { Ok(()) }
}

fn pieces(body: Body, max: u64, idle: Duration) -> impl Stream<Item = Result<Bytes, Cut>> + Send {
    stream::try_unfold((body, 0_u64), move |(mut body, so_far)| async move {
        loop {
            let frame = tokio::time::timeout(idle, body.frame()).await.map_err(|_| Cut::Pauses { idle })?;
            let Some(frame) = frame.transpose().map_err(|_| Cut::Broken)? else { return Ok(None) };
            // Trailers are nothing to us.
            let Ok(bytes) = frame.into_data() else { continue };
            let so_far = so_far + bytes.len() as u64;
            if so_far > max {
                return Err(Cut::TooLarge { max });
            }
            return Ok(Some((bytes, (body, so_far))));
        }
    })
}

/// All of a small body.
pub(crate) async fn whole(body: Body, headers: &HeaderMap, max: usize, bounds: &Bounds) -> Answer<Vec<u8>> {
    announced(headers, max as u64)?;
    let within = bounds.body_within;
    let all = pieces(body, max as u64, bounds.body_idle).try_fold(Vec::new(), |mut all, piece| async move {
        all.extend_from_slice(&piece);
        Ok(all)
    });
    Ok(tokio::time::timeout(within, all).await.map_err(|_| Cut::TooSlow { within })??)
}

/// A body to be handed on as it comes.
pub(crate) struct Upload {
    cut: Arc<OnceLock<Cut>>,
}

impl Upload {
    /// The body, and what knows why it ended early.
    pub(crate) fn new(body: Body, headers: &HeaderMap, max: u64, idle: Duration) -> Answer<(Self, ByteReader)> {
        announced(headers, max)?;
        let cut = Arc::new(OnceLock::new());
        let told = cut.clone();
        let pieces = pieces(body, max, idle).map(move |piece| {
            piece.map_err(|cut| {
                let _ = told.set(cut);
                io::Error::other("the upload was cut off")
            })
        });
        Ok((Self { cut }, Box::new(StreamReader::new(pieces.boxed()))))
    }

    /// An answer, or why there is none: who was handed a body that was cut off can only say that it was.
    pub(crate) fn explain<T, E: Into<Refusal>>(&self, answer: Result<T, E>) -> Answer<T> {
        answer.map_err(|error| self.cut.get().map_or_else(|| error.into(), |&cut| cut.into()))
    }
}
