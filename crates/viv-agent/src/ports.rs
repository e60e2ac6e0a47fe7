//! A way to a TCP port on loopback.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use viv_agent::proto::{Answer, ErrorCode};

use crate::agent::serve::Next;
use crate::conn::Conn;
use crate::error::{Result, error, invalid};

/// On loopback a connection is made at once, unless the listener's queue is full.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// What is on its way in one direction.
const BUFFER_BYTES: usize = 32 << 10;

/// Connects, then copies both ways until both sides are done.
pub(crate) fn dial(conn: &Conn, port: u16) -> io::Result<Next> {
    let inside = match connect(port) {
        Ok(inside) => inside,
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            return Ok(Next::Request);
        }
    };
    conn.reply(Ok(Answer::Done))?;
    relay(conn.stream(), &inside)?;
    Ok(Next::Close)
}

fn connect(port: u16) -> Result<TcpStream> {
    if port == 0 {
        return Err(invalid("there is no port 0"));
    }
    let mut last = None;
    for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        match TcpStream::connect_timeout(&SocketAddr::new(address, port), CONNECT_PATIENCE) {
            Ok(stream) => return Ok(stream),
            // Nobody there, or no such protocol here: perhaps on the other one.
            Err(cause) => last = last.or(Some(cause)),
        }
    }
    match last {
        Some(cause) if cause.kind() != io::ErrorKind::ConnectionRefused => {
            Err(error(ErrorCode::Failed, format!("port {port}: {cause}")))
        }
        _ => Err(error(ErrorCode::NotFound, format!("nothing listens on port {port}"))),
    }
}

/// One direction.
struct Flow {
    buf: Vec<u8>,
    from: usize,
    to: usize,
    /// Nothing more comes in.
    ended: bool,
    /// And that was passed on.
    closed: bool,
}

impl Flow {
    fn new() -> Self {
        Self { buf: vec![0; BUFFER_BYTES], from: 0, to: 0, ended: false, closed: false }
    }

    fn wants_to_read(&self) -> bool {
        !self.ended && self.from == self.to
    }

    fn wants_to_write(&self) -> bool {
        self.from < self.to
    }

    /// Moves what can be moved without waiting.
    fn pass(&mut self, source: &impl Side, sink: &impl Side) -> io::Result<()> {
        loop {
            if self.wants_to_write() {
                match rustix::io::write(sink, &self.buf[self.from..self.to]) {
                    Ok(count) => self.from += count,
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            } else if self.wants_to_read() {
                match rustix::io::read(source, self.buf.as_mut_slice()) {
                    Ok(0) => self.ended = true,
                    Ok(count) => (self.from, self.to) = (0, count),
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            } else {
                if !self.closed {
                    sink.no_more();
                    self.closed = true;
                }
                return Ok(());
            }
        }
    }
}

/// A socket of either kind.
trait Side: rustix::fd::AsFd {
    /// Tells the other end that nothing more will come. It may be gone, which is the same.
    fn no_more(&self);
}

impl Side for UnixStream {
    fn no_more(&self) {
        let _ = self.shutdown(Shutdown::Write);
    }
}

impl Side for TcpStream {
    fn no_more(&self) {
        let _ = self.shutdown(Shutdown::Write);
    }
}

fn relay(outside: &UnixStream, inside: &TcpStream) -> io::Result<()> {
    outside.set_nonblocking(true)?;
    inside.set_nonblocking(true)?;
    let (mut inward, mut outward) = (Flow::new(), Flow::new());
    loop {
        inward.pass(outside, inside)?;
        outward.pass(inside, outside)?;
        if inward.closed && outward.closed {
            return Ok(());
        }
        let events = |incoming: &Flow, outgoing: &Flow| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, incoming.wants_to_read());
            flags.set(PollFlags::OUT, outgoing.wants_to_write());
            flags
        };
        let mut fds = [PollFd::new(outside, events(&inward, &outward)), PollFd::new(inside, events(&outward, &inward))];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Gone for good, not only done sending: what the other side still says has no reader.
        let gone = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::ERR);
        if fds.iter().any(gone) || (fds[0].revents().contains(PollFlags::HUP) && inward.closed) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
    }
}
