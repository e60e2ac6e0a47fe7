//! The shim's end of the agent's control connection.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use viv_agent::frame::{HEADER_BYTES, Kind, decode_header, encode_header};
use viv_agent::proto::{AgentMessage, Answer, ControlMessage, Descriptor, Fence, Hello, Reply, Request};

/// The agent is up a few milliseconds after its process; looking costs microseconds.
const CONNECT_EVERY: Duration = Duration::from_millis(1);

/// Longest that a write to the agent's socket may block. Its messages are a few
/// bytes, so only an agent that has not read for thousands of them gets there.
const WRITE_WITHIN: Duration = Duration::from_millis(100);

/// The agent gives its connections five seconds to end.
const QUIESCE_WITHIN: Duration = Duration::from_secs(8);

/// The connection. While it is open, the agent lives.
pub(super) struct ControlConnection {
    stream: UnixStream,
    /// The other end, when that is ours: the agent is away, and what it is told it is not told.
    other: Option<UnixStream>,
    /// Bytes of a frame that has not come whole.
    pending: Vec<u8>,
}

/// What came over it.
pub(super) enum FromAgent {
    /// Nothing whole yet.
    Nothing,
    Message(AgentMessage),
    /// The agent closed it, or said something that it should not.
    Lost,
}

impl ControlConnection {
    /// Connects as soon as the agent listens. `alive` is asked in between.
    pub(super) fn open(
        socket: &str,
        descriptors: &[(Descriptor, OwnedFd)],
        until: Instant,
        alive: impl Fn() -> io::Result<bool>,
    ) -> io::Result<(Self, Hello)> {
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {}
                Err(error) => return Err(error),
            }
            if !alive()? {
                return Err(io::Error::other("the agent ended before it listened"));
            }
            if Instant::now() >= until {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the agent does not listen"));
            }
            std::thread::sleep(CONNECT_EVERY);
        };
        let left = until.saturating_duration_since(Instant::now()).max(CONNECT_EVERY);
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(WRITE_WITHIN))?;
        let mut connection = Self { stream, other: None, pending: Vec::new() };
        connection.send_request(descriptors)?;
        let hello = match connection.receive_reply()? {
            Reply::Ok(Answer::Hello(hello)) => hello,
            Reply::Ok(_) => return Err(io::Error::other("the agent answered something else")),
            Reply::Error(error) => return Err(io::Error::other(error)),
        };
        connection.stream.set_nonblocking(true)?;
        Ok((connection, hello))
    }

    /// For as long as the agent is allowed to be without us.
    pub(super) fn absent() -> io::Result<Self> {
        let (stream, other) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, other: Some(other), pending: Vec::new() })
    }

    pub(super) fn is_absent(&self) -> bool {
        self.other.is_some()
    }

    fn send_request(&mut self, descriptors: &[(Descriptor, OwnedFd)]) -> io::Result<()> {
        let request = Request::Control {
            descriptors: descriptors.iter().map(|(name, _)| *name).collect(),
            hears: vec![AgentMessage::OOM_KILLED.to_owned()],
        };
        let payload = serde_json::to_vec(&request)?;
        let header = encode_header(Kind::Json, payload.len());
        let fds: Vec<_> = descriptors.iter().map(|(_, fd)| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::other("too many descriptors"));
        }
        // A few dozen bytes into an empty buffer go in one piece.
        let sent = sendmsg(
            &self.stream,
            &[IoSlice::new(&header), IoSlice::new(&payload)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        if sent == header.len() + payload.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn receive_reply(&mut self) -> io::Result<Reply> {
        receive_reply(&mut self.stream)
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Says something, if the agent takes it. Never blocks for long.
    pub(super) fn tell(&mut self, message: &ControlMessage) -> io::Result<()> {
        let payload = serde_json::to_vec(message)?;
        let frame = [encode_header(Kind::Json, payload.len()).as_slice(), &payload].concat();
        self.stream.write_all(&frame)
    }

    /// Takes the next message of what has come.
    pub(super) fn receive(&mut self) -> FromAgent {
        loop {
            match self.next_pending() {
                FromAgent::Nothing => {}
                FromAgent::Message(message) => return FromAgent::Message(message),
                FromAgent::Lost => return FromAgent::Lost,
            }
            let mut buffer = [0; 512];
            match self.stream.read(&mut buffer) {
                Ok(0) => return FromAgent::Lost,
                Ok(length) => self.pending.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return FromAgent::Nothing,
                Err(_) => return FromAgent::Lost,
            }
        }
    }

    /// Whether a message has been read that was not taken.
    pub(super) fn has_pending(&self) -> bool {
        let Some((header, rest)) = self.pending.split_first_chunk::<HEADER_BYTES>() else { return false };
        decode_header(*header).is_ok_and(|(_, length)| rest.len() >= length)
    }

    fn next_pending(&mut self) -> FromAgent {
        let Some((header, rest)) = self.pending.split_first_chunk::<HEADER_BYTES>() else {
            return FromAgent::Nothing;
        };
        let Ok((Kind::Json, length)) = decode_header(*header) else {
            return FromAgent::Lost;
        };
        let Some(payload) = rest.get(..length) else {
            return FromAgent::Nothing;
        };
        match serde_json::from_slice(payload) {
            Ok(message) => {
                self.pending.drain(..HEADER_BYTES + length);
                FromAgent::Message(message)
            }
            Err(_) => FromAgent::Lost,
        }
    }
}

fn receive_reply(stream: &mut UnixStream) -> io::Result<Reply> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let (kind, length) = decode_header(header).map_err(io::Error::other)?;
    if kind != Kind::Json {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload)?;
    Ok(serde_json::from_slice(&payload)?)
}

/// Asks the agent something on a connection of its own, and waits for the answer: not for the loop.
fn ask(socket: &Path, request: &Request, within: Duration) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(within))?;
    stream.set_write_timeout(Some(within))?;
    let payload = serde_json::to_vec(request)?;
    stream.write_all(&[encode_header(Kind::Json, payload.len()).as_slice(), &payload].concat())?;
    match receive_reply(&mut stream)? {
        Reply::Ok(answer) => Ok(answer),
        Reply::Error(error) => Err(io::Error::other(error)),
    }
}

/// Has the agent close what cannot be dumped, and live on without us for a while.
pub(super) fn tell_to_quiesce(socket: &Path, fence: &Fence, window_ms: u64) -> io::Result<()> {
    let request = Request::Quiesce { fence: fence.clone(), window_ms };
    match ask(socket, &request, QUIESCE_WITHIN)? {
        Answer::Quiesced { .. } => Ok(()),
        _ => Err(io::Error::other("the agent answered something else")),
    }
}

/// Who the agent says that it is.
pub(super) fn say_hello(socket: &Path, within: Duration) -> io::Result<Hello> {
    match ask(socket, &Request::Hello, within)? {
        Answer::Hello(hello) => Ok(hello),
        _ => Err(io::Error::other("the agent answered something else")),
    }
}
