//! What workloads ask of whoever keeps the sandbox: heard here, told outside, answered.
//!
//! ```text
//!   workload ──InsideCall──► main thread ──InsideRequest──► who sent `requests`
//!            ◄─InsideReply── whoever brought `request_answer` ◄──────┘
//! ```
//!
//! Invariants: no thread is kept for any of it; whoever listens has one request at a time; what a workload sends is
//! bounded in number, length and time, and means nothing here.

use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::SendFlags;
use serde::Serialize;
use viv_agent::frame::{self, HEADER_BYTES, Kind};
use viv_agent::proto::{
    ANSWER_BYTES_MAX, Answer, CALL_BYTES_MAX, ErrorCode, HOME, INSIDE_SOCKET, InsideCall, InsideReply, InsideRequest,
    NoAnswer,
};
use viv_core::RequestId;

use crate::agent::{Agent, Deadline, lock, timeout};
use crate::conn::Conn;
use crate::error::{Result, error, say};

/// Workloads that ask at once; the others wait until there is room.
const CALLS_MAX: usize = 16;

/// How long a workload may take to say what it wants.
const SAY_WITHIN_MS: u64 = 5_000;

/// Longest that one waits for an answer.
const WAIT_MS_MAX: u64 = 600_000;

/// How long a workload may take to read its answer. Whoever brings it waits so long.
const HEAR_WITHIN: Duration = Duration::from_secs(2);

/// How long nobody is accepted when that failed.
const EXHAUSTED_PAUSE_MS: u64 = 100;

/// Bytes read from a workload in one go.
const PIECE_BYTES: usize = 4096;

/// All that is asked from inside.
pub(crate) struct Inside {
    /// Absent where there could be none.
    socket: Option<UnixListener>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    listener: Option<Arc<UnixStream>>,
    /// Oldest first.
    calls: Vec<Call>,
    pause: Option<Deadline>,
}

/// One workload that asks.
struct Call {
    stream: Arc<UnixStream>,
    deadline: Deadline,
    stage: Stage,
}

enum Stage {
    /// What came so far.
    Saying(Vec<u8>),
    Asked {
        id: RequestId,
        body: String,
        told: Told,
    },
}

/// Who knows of it outside.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Nobody,
    /// Somebody who does not listen any more.
    Before,
    /// Who listens now.
    Now,
}

/// What a look at a workload's connection gave.
enum Looked {
    /// Nothing to be done about it.
    Stays,
    /// It said what it wants.
    Asks(InsideCall),
    /// It said something else.
    Wrong,
    /// It went away.
    Gone,
}

/// The socket for workloads. Without one they are told so by the kernel, and the sandbox works all the same.
pub(crate) fn listen(home: &Path) -> Option<UnixListener> {
    let bound = if home == Path::new(HOME) {
        SocketAddr::from_abstract_name(INSIDE_SOCKET).and_then(|address| UnixListener::bind_addr(&address))
    } else {
        let path = home.join(INSIDE_SOCKET);
        UnixListener::bind(&path).and_then(|listener| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
            Ok(listener)
        })
    };
    let ready = bound.and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    ready.inspect_err(|cause| say(&format!("commands cannot ask for anything: {cause}"))).ok()
}

impl Inside {
    pub(crate) fn new(socket: Option<UnixListener>) -> Self {
        Self { socket, state: Mutex::default() }
    }

    /// Somebody outside listens from now on. Nobody's thread has to stay for that.
    pub(crate) fn hear(&self, agent: &Agent, conn: &Conn) -> io::Result<()> {
        conn.reply(Ok(Answer::Done))?;
        let mut state = lock(&self.state);
        state.hush();
        state.listener = Some(Arc::clone(conn.stream()));
        drop(state);
        agent.wake.ring();
        Ok(())
    }

    /// Nobody listens any more.
    pub(crate) fn hush(&self) {
        lock(&self.state).hush();
    }

    /// The answer to a request, for the workload that waits for it.
    pub(crate) fn answer(&self, agent: &Agent, id: &RequestId, body: String) -> Result<Answer> {
        if body.len() > ANSWER_BYTES_MAX {
            return Err(error(ErrorCode::Invalid, format!("an answer has at most {ANSWER_BYTES_MAX} bytes")));
        }
        let mut state = lock(&self.state);
        let asked = |call: &Call| matches!(&call.stage, Stage::Asked { id: other, .. } if other == id);
        let Some(place) = state.calls.iter().position(asked) else {
            return Err(error(ErrorCode::NotFound, format!("nobody waits for an answer to {id}")));
        };
        let call = state.calls.remove(place);
        drop(state);
        // The next one can be told.
        agent.wake.ring();
        match finish(&call.stream, &InsideReply::Answer(body), HEAR_WITHIN) {
            Ok(()) => Ok(Answer::Done),
            Err(_) => Err(error(ErrorCode::NotFound, format!("whoever asked for {id} went away"))),
        }
    }

    /// Does what there is to do, and answers when to look again at the latest. For the main thread.
    pub(crate) fn attend(&self) -> Option<Duration> {
        let mut state = lock(&self.state);
        state.accept(self.socket.as_ref());
        state.look();
        state.tell();
        let pause = state.pause.as_mut().map(Deadline::left);
        state.calls.iter_mut().map(|call| call.deadline.left()).chain(pause).min()
    }

    /// What wakes the main thread for it: the socket while there is room, and who is connected.
    pub(crate) fn awaited(&self) -> (Option<&UnixListener>, Vec<(Arc<UnixStream>, PollFlags)>) {
        let state = lock(&self.state);
        let has_room = state.calls.len() < CALLS_MAX && state.pause.is_none();
        let calls = state.calls.iter().map(|call| (Arc::clone(&call.stream), PollFlags::IN));
        let listener = state.listener.iter().map(|listener| (Arc::clone(listener), PollFlags::RDHUP));
        (self.socket.as_ref().filter(|_| has_room), calls.chain(listener).collect())
    }
}

impl State {
    fn hush(&mut self) {
        if let Some(listener) = self.listener.take() {
            // It may have gone by itself.
            let _ = listener.shutdown(std::net::Shutdown::Both);
        }
        for call in &mut self.calls {
            if let Stage::Asked { told: told @ Told::Now, .. } = &mut call.stage {
                *told = Told::Before;
            }
        }
    }

    fn accept(&mut self, socket: Option<&UnixListener>) {
        let Some(socket) = socket else { return };
        if self.pause.as_mut().is_some_and(|pause| !pause.left().is_zero()) {
            return;
        }
        self.pause = None;
        while self.calls.len() < CALLS_MAX {
            match socket.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    let deadline = Deadline::after(SAY_WITHIN_MS);
                    self.calls.push(Call { stream: Arc::new(stream), deadline, stage: Stage::Saying(Vec::new()) });
                }
                Ok(_) => {}
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return,
                // It stays ready all the while, so without a pause nothing else would be done.
                Err(_) => {
                    self.pause = Some(Deadline::after(EXHAUSTED_PAUSE_MS));
                    return;
                }
            }
        }
    }

    /// Takes what workloads say, and lets those go who went or waited long enough.
    fn look(&mut self) {
        self.calls.retain_mut(|call| {
            let no_answer = match call.look() {
                Looked::Stays if !call.deadline.left().is_zero() => return true,
                Looked::Asks(asks) => {
                    call.deadline = Deadline::after(asks.wait_ms.clamp(1, WAIT_MS_MAX));
                    call.stage = Stage::Asked { id: new_id(), body: asks.body, told: Told::Nobody };
                    return true;
                }
                Looked::Gone => return false,
                Looked::Wrong => NoAnswer::Invalid,
                Looked::Stays => match call.stage {
                    Stage::Saying(_) => NoAnswer::Invalid,
                    Stage::Asked { told: Told::Nobody, .. } => NoAnswer::Nobody,
                    Stage::Asked { told: Told::Before | Told::Now, .. } => NoAnswer::Unknown,
                },
            };
            // A socket that nothing was written to has room for this.
            let _ = finish(&call.stream, &InsideReply::None(no_answer), Duration::ZERO);
            false
        });
    }

    /// Tells who listens of the oldest that he does not know, if he has none.
    fn tell(&mut self) {
        let Some(listener) = self.listener.clone() else { return };
        if has_gone(&listener) {
            self.hush();
            return;
        }
        let asked = self.calls.iter_mut().filter_map(|call| match &mut call.stage {
            Stage::Asked { id, body, told } => Some((id, body, told)),
            Stage::Saying(_) => None,
        });
        let asked: Vec<_> = asked.collect();
        if asked.iter().any(|(_, _, told)| **told == Told::Now) {
            return;
        }
        let Some((id, body, told)) = asked.into_iter().next() else { return };
        let request = InsideRequest { id: id.clone(), again: *told == Told::Before, body: body.clone() };
        *told = Told::Now;
        // Whoever does not read what he listens to is not there.
        if send_at_once(&listener, &request).is_err() {
            self.hush();
        }
    }
}

impl Call {
    fn look(&mut self) -> Looked {
        let mut piece = [0; PIECE_BYTES];
        loop {
            let count = match (&*self.stream).read(&mut piece) {
                Ok(0) => return Looked::Gone,
                Ok(count) => count,
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return Looked::Stays,
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Looked::Gone,
            };
            let Stage::Saying(said) = &mut self.stage else { return Looked::Wrong };
            said.extend_from_slice(&piece[..count]);
            match call_in(said) {
                Ok(None) => {}
                Ok(Some(call)) => return Looked::Asks(call),
                Err(()) => return Looked::Wrong,
            }
        }
    }
}

/// The call that these bytes are, once all of it is there.
fn call_in(said: &[u8]) -> std::result::Result<Option<InsideCall>, ()> {
    let Some((header, payload)) = said.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let length = match frame::decode_header(*header) {
        Ok((Kind::Json, length)) if length <= CALL_BYTES_MAX => length,
        Ok(_) | Err(_) => return Err(()),
    };
    match payload.len() {
        so_far if so_far < length => Ok(None),
        so_far if so_far == length => serde_json::from_slice(payload).map(Some).map_err(drop),
        _ => Err(()),
    }
}

/// An id that sorts by when it was made, and that nobody inside can foresee.
fn new_id() -> RequestId {
    let mut bytes = [0; 16];
    // Without random bytes it is still told apart by its time from those that wait.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    bytes[..6].copy_from_slice(&now_ms.to_be_bytes()[2..]);
    RequestId::from_bytes(bytes)
}

fn has_gone(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&timeout(Duration::ZERO))).is_ok() && !fds[0].revents().is_empty()
}

fn framed<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let payload = serde_json::to_vec(message)?;
    let mut bytes = frame::encode_header(Kind::Json, payload.len()).to_vec();
    bytes.extend_from_slice(&payload);
    Ok(bytes)
}

/// Sends without waiting, all or nothing that can be gone on with.
fn send_at_once<T: Serialize>(stream: &UnixStream, message: &T) -> io::Result<()> {
    let bytes = framed(message)?;
    let sent = rustix::net::send(stream, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

/// The last word to a workload.
fn finish(stream: &UnixStream, reply: &InsideReply, patience: Duration) -> io::Result<()> {
    let bytes = framed(reply)?;
    let deadline = Instant::now() + patience;
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        match rustix::net::send(stream, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => rest = &rest[count..],
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let left = deadline.saturating_duration_since(Instant::now());
                let mut fds = [PollFd::new(stream, PollFlags::OUT)];
                if left.is_zero() || poll(&mut fds, Some(&timeout(left))) == Ok(0) {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_whole_or_awaited_or_wrong() {
        let call = InsideCall { wait_ms: 5, body: "{}".to_owned() };
        let bytes = framed(&call).unwrap();
        for end in 0..bytes.len() {
            assert_eq!(call_in(&bytes[..end]), Ok(None), "{end}");
        }
        assert_eq!(call_in(&bytes), Ok(Some(call)));
        let more = [&bytes[..], b"x"].concat();
        let long = [&frame::encode_header(Kind::Json, CALL_BYTES_MAX + 1)[..], b"{"].concat();
        let other = framed(&serde_json::json!({ "wait_ms": 5, "body": "", "more": 1 })).unwrap();
        for wrong in [&more[..], &long, &other, b"GET / HTTP/1.1\r\n", &[0, 0, 0, 1, 2, 0]] {
            assert_eq!(call_in(wrong), Err(()), "{wrong:?}");
        }
    }
}
