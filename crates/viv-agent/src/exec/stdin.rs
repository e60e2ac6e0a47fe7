//! Standard input of an execution.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use viv_agent::proto::{AgentError, Answer, ErrorCode, Fence};
use viv_core::ExecutionId;

use crate::agent::serve::Next;
use crate::agent::{Agent, lock, timeout};
use crate::conn::{Conn, Frame};
use crate::error::{error, invalid, refused};
use crate::exec::Execution;

/// How long a command may leave its input unread before the call is given up.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a terminal takes for the end of input.
pub(crate) const END_OF_TRANSMISSION: u8 = 4;

/// Our end of a command's input.
pub(crate) enum End {
    Pipe(OwnedFd),
    Terminal(Arc<OwnedFd>),
}

impl End {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Pipe(fd) => fd.as_fd(),
            Self::Terminal(fd) => fd.as_fd(),
        }
    }
}

/// The input of one execution.
#[derive(Default)]
pub(crate) struct Input {
    end: Mutex<Option<Arc<End>>>,
    /// Held while writing, so that two uploads do not interleave. Nobody but uploads waits for it.
    writing: Mutex<()>,
    taken: AtomicU64,
}

impl Input {
    pub(crate) fn open(&self, end: Option<End>) {
        *lock(&self.end) = end.map(Arc::new);
    }

    /// Lets go; the command reads end-of-file once the last writer let go too.
    pub(crate) fn close(&self) {
        *lock(&self.end) = None;
    }

    pub(crate) fn taken_bytes(&self) -> u64 {
        self.taken.load(Ordering::Acquire)
    }
}

/// Why writing stopped.
enum Stopped {
    /// The client is gone, and nobody waits for an answer.
    Client(io::Error),
    Refused(AgentError),
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Self {
        Self::Client(error)
    }
}

/// One upload: where it comes from, and whose it is.
struct Upload<'c> {
    agent: &'c Agent,
    conn: &'c Conn,
    fence: &'c Fence,
}

/// Takes an upload for a command's input. Bytes before the offset that was
/// reached already are skipped, so an upload can be repeated after a lost answer.
pub(crate) fn stdin(
    agent: &Agent,
    conn: &Conn,
    fence: &Fence,
    id: &ExecutionId,
    offset: u64,
    close: bool,
) -> io::Result<Next> {
    let uploaded = agent
        .fencing
        .check(fence)
        .and_then(|()| agent.executions.get(id))
        .map_err(Stopped::Refused)
        .and_then(|execution| take(&execution, &Upload { agent, conn, fence }, offset, close));
    match uploaded {
        Ok(taken_bytes) => {
            conn.reply(Ok(Answer::Stdin { taken_bytes }))?;
            Ok(Next::Request)
        }
        Err(Stopped::Refused(refusal)) => {
            conn.reply(Err(refusal))?;
            Ok(Next::Close)
        }
        Err(Stopped::Client(cause)) => Err(cause),
    }
}

fn take(execution: &Execution, upload: &Upload<'_>, offset: u64, close: bool) -> Result<u64, Stopped> {
    let input = &execution.input;
    let _turn = lock(&input.writing);
    let end = lock(&input.end).clone();
    let taken = input.taken_bytes();
    if offset > taken {
        let message = format!("input is at {taken}, not at {offset}");
        return Err(Stopped::Refused(AgentError { code: ErrorCode::Conflict, message, current: Some(taken) }));
    }
    let mut at = offset;
    let mut buf = Vec::new();
    loop {
        let length = match upload.conn.read_frame(&mut buf)? {
            Frame::Data(length) => length,
            Frame::End => break,
            Frame::Json => return Err(Stopped::Refused(invalid("input is sent as data"))),
        };
        let skip = (input.taken_bytes() - at).min(length as u64) as usize;
        if skip < length {
            let end = end.as_deref().ok_or_else(|| Stopped::Refused(no_input(execution)))?;
            write(input, end, upload, &buf[skip..length])?;
        }
        at += length as u64;
    }
    if close {
        if let Some(terminal @ End::Terminal(_)) = end.as_deref() {
            send(terminal, upload, &[END_OF_TRANSMISSION], |_| ())?;
        }
        upload.agent.fencing.still(upload.fence, || input.close()).map_err(Stopped::Refused)?;
    }
    Ok(input.taken_bytes())
}

fn no_input(execution: &Execution) -> AgentError {
    if execution.is_final() {
        error(ErrorCode::Conflict, "the execution has ended")
    } else {
        error(ErrorCode::Conflict, "it was started without input, or its input was closed")
    }
}

fn write(input: &Input, end: &End, upload: &Upload<'_>, data: &[u8]) -> Result<(), Stopped> {
    send(end, upload, data, |count| {
        input.taken.fetch_add(count as u64, Ordering::AcqRel);
    })
}

fn send(end: &End, upload: &Upload<'_>, mut data: &[u8], mut taken: impl FnMut(usize)) -> Result<(), Stopped> {
    let mut deadline = Instant::now() + PATIENCE;
    while !data.is_empty() {
        // Asked for each time, as an upload may take as long as its command likes. The write does not wait.
        let written = upload.agent.fencing.still(upload.fence, || rustix::io::write(end.fd(), data));
        match written.map_err(Stopped::Refused)? {
            Ok(count) => {
                taken(count);
                data = &data[count..];
                deadline = Instant::now() + PATIENCE;
            }
            Err(Errno::AGAIN) => wait_writable(end, upload.conn, deadline)?,
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::IO) => {
                return Err(Stopped::Refused(error(ErrorCode::Conflict, "the command closed its input")));
            }
            Err(errno) => return Err(Stopped::Refused(refused("input", errno))),
        }
    }
    Ok(())
}

fn wait_writable(end: &End, conn: &Conn, deadline: Instant) -> Result<(), Stopped> {
    let fd = end.fd();
    let left = deadline.saturating_duration_since(Instant::now());
    // Of the client, only its going away is waited for.
    let mut fds = [PollFd::new(&fd, PollFlags::OUT), PollFd::new(conn.stream(), PollFlags::empty())];
    match poll(&mut fds, Some(&timeout(left))) {
        Ok(0) => Err(Stopped::Refused(error(ErrorCode::Exhausted, "the command does not read its input"))),
        Ok(_) if fds[1].revents().intersects(PollFlags::HUP | PollFlags::ERR) => {
            Err(Stopped::Client(io::ErrorKind::ConnectionAborted.into()))
        }
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(Stopped::Client(errno.into())),
    }
}
