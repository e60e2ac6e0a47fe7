//! Server-sent events, and the journal as a stream of them.

use super::http::Call;
use super::stream::{Lines, Patience};
use super::{Client, ClientError, Result};
use crate::bound::Sequence;
use crate::event::Event;
use crate::query::{ListEvents, encode};
use crate::{header, path};

/// The next event's data. Comments, which are signs of life, and events without data are passed over; so is what the
/// end of the answer cut off.
pub(super) fn next_data(lines: &mut Lines) -> Result<Option<String>> {
    let mut data: Option<String> = None;
    while let Some(line) = lines.next()? {
        if line.is_empty() {
            if data.is_some() {
                return Ok(data);
            }
        } else if let Some(more) = line.strip_prefix("data:") {
            let more = more.strip_prefix(' ').unwrap_or(more);
            match &mut data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(more);
                }
                None => data = Some(more.to_owned()),
            }
        }
    }
    Ok(None)
}

/// Events as they happen, each once and in order. A connection that breaks is made again after the last one that
/// arrived. An error is the last item.
pub struct Events<'a> {
    client: &'a Client,
    /// Which ones; where to begin is told by `after`.
    query: ListEvents,
    /// The last one that arrived.
    after: Option<u64>,
    lines: Option<Lines>,
    patience: Patience,
    over: bool,
}

impl<'a> Events<'a> {
    pub(super) fn new(client: &'a Client, query: ListEvents) -> Self {
        let after = query.after.map(Sequence::get);
        Self { client, query, after, lines: None, patience: Patience::default(), over: false }
    }

    fn connect(&self) -> Result<Lines> {
        let query = ListEvents { after: self.after.map(Sequence::nearest), limit: None, ..self.query.clone() };
        let mut call = Call::get(path::EVENTS.to_owned() + &encode(&query)).streams(header::EVENT_STREAM);
        call.last_event = self.after;
        let url = self.client.http.url(&call.path);
        Ok(Lines::new(url, self.client.http.send(call)?))
    }

    fn read(&mut self) -> Result<Event> {
        loop {
            match self.read_once() {
                // A server that repeats itself is not repeated.
                Ok(event) if self.after.is_some_and(|after| event.seq <= after) => {}
                Ok(event) => {
                    self.patience.renew();
                    self.after = Some(event.seq);
                    return Ok(event);
                }
                Err(error) => {
                    self.lines = None;
                    self.patience.bear("the stream of events", error)?;
                }
            }
        }
    }

    fn read_once(&mut self) -> Result<Event> {
        if self.lines.is_none() {
            self.lines = Some(self.connect()?);
        }
        let lines = self.lines.as_mut().expect("connected just now");
        let eof = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        let data = next_data(lines)?.ok_or_else(|| lines.broken(eof()))?;
        serde_json::from_str(&data).map_err(|error| ClientError::Unexpected {
            url: self.client.http.url(path::EVENTS),
            status: 200,
            found: error.to_string(),
        })
    }
}

impl Iterator for Events<'_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let event = self.read();
        self.over = event.is_err();
        Some(event)
    }
}
