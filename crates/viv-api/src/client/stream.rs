//! Lines of an answer that does not end, and when to give up on it.

use std::io::{self, BufRead as _, BufReader, Read as _};
use std::thread;
use std::time::Duration;

use ureq::http::Response;
use ureq::{Body, BodyReader};

use super::{ClientError, Result};

/// A line holds one chunk of output or one event; servers cut chunks far smaller.
const LINE_BYTES_MAX: u64 = 8 << 20;

/// How often a broken stream is taken up again without anything new arriving: with the pauses below about a minute,
/// which is longer than a daemon needs to start again.
const TRIES_MAX: u32 = 20;

/// The first pause; each is twice the one before.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(4);

/// Lines of one answer.
pub(super) struct Lines {
    url: String,
    reader: BufReader<BodyReader<'static>>,
}

impl Lines {
    pub(super) fn new(url: String, response: Response<Body>) -> Self {
        Self { url, reader: BufReader::new(response.into_body().into_reader()) }
    }

    /// The next line without its end. A line that does not end was cut off: it is no line, and so is nothing.
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        let mut line = Vec::new();
        let read = (&mut self.reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        read.map_err(|source| self.broken(source))?;
        match line.pop() {
            None => Ok(None),
            Some(b'\n') => {
                if line.last() == Some(&b'\r') {
                    line.pop();
                }
                let text = String::from_utf8(line).map_err(|_| io::Error::other("a line is no text"));
                text.map(Some).map_err(|source| self.broken(source))
            }
            Some(_) => {
                let long = line.len() as u64 + 1 >= LINE_BYTES_MAX;
                Err(self.broken(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    if long { "a line is too long" } else { "a line was cut off" },
                )))
            }
        }
    }

    pub(super) fn broken(&self, source: io::Error) -> ClientError {
        ClientError::Transport { url: self.url.clone(), source }
    }
}

/// Counts how often something was tried in vain, and pauses in between.
#[derive(Default)]
pub(super) struct Patience {
    tries: u32,
}

impl Patience {
    /// Something new arrived.
    pub(super) fn renew(&mut self) {
        self.tries = 0;
    }

    /// Pauses, if it is worth trying again after this.
    pub(super) fn bear(&mut self, what: &'static str, error: ClientError) -> Result<()> {
        if !error.passes() {
            return Err(error);
        }
        if self.tries >= TRIES_MAX {
            return Err(ClientError::Interrupted { what, last: Box::new(error) });
        }
        thread::sleep(PAUSE_MIN.saturating_mul(1 << self.tries.min(10)).min(PAUSE_MAX));
        self.tries += 1;
        Ok(())
    }
}
