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
    let mut outside_hung_up = false;
    let mut inside_hung_up = false;
    loop {
        inward.pass(outside, inside)?;
        outward.pass(inside, outside)?;
        if inward.closed && outward.closed {
            return Ok(());
        }
        // Gone for good, not only done sending: what the other side still says has no reader.
        if outside_hung_up && inward.closed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let events = |incoming: &Flow, outgoing: &Flow| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, incoming.wants_to_read());
            flags.set(PollFlags::OUT, outgoing.wants_to_write());
            flags
        };
        let (outside_events, inside_events) = (events(&inward, &outward), events(&outward, &inward));
        // A side that hung up says so at every poll. Once that is known, it is
        // only asked when it could do something: otherwise this would spin.
        let asked = [!outside_hung_up || !outside_events.is_empty(), !inside_hung_up || !inside_events.is_empty()];
        let mut fds = Vec::with_capacity(2);
        fds.extend(asked[0].then(|| PollFd::new(outside, outside_events)));
        fds.extend(asked[1].then(|| PollFd::new(inside, inside_events)));
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        if fds.iter().any(|fd| fd.revents().contains(PollFlags::ERR)) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let mut hung_up = fds.iter().map(|fd| fd.revents().contains(PollFlags::HUP));
        outside_hung_up |= asked[0] && hung_up.next() == Some(true);
        inside_hung_up |= asked[1] && hung_up.next() == Some(true);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use rustix::time::{ClockId, clock_gettime};

    use super::*;

    /// How long the ends are left alone, and how much of it the relay may work.
    const IDLE: Duration = Duration::from_millis(600);
    const WORK_MAX: Duration = Duration::from_millis(200);

    /// A relay on a thread of its own, which returns the processor time that it took.
    fn start() -> (UnixStream, TcpStream, std::thread::JoinHandle<Duration>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let inside = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far_inside, _) = listener.accept().unwrap();
        let (far_outside, outside) = UnixStream::pair().unwrap();
        let relay = std::thread::spawn(move || {
            // It ends with an error where one side is gone, and that is no matter here.
            let _ = relay(&outside, &inside);
            Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
        });
        (far_outside, far_inside, relay)
    }

    /// Writes until nothing more is taken.
    fn fill(mut side: impl Write) {
        while side.write(&[7; 1 << 12]).is_ok() {}
    }

    #[test]
    fn a_listener_that_hung_up_does_not_keep_the_relay_busy() {
        let (mut outside, inside, relay) = start();
        outside.shutdown(Shutdown::Write).unwrap();
        inside.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        fill(&inside);
        drop(inside);
        std::thread::sleep(IDLE);
        let mut rest = Vec::new();
        outside.read_to_end(&mut rest).unwrap();
        assert!(rest.len() > BUFFER_BYTES);
        let work = relay.join().unwrap();
        assert!(work < WORK_MAX, "{work:?}");
    }

    #[test]
    fn a_client_that_hung_up_does_not_keep_the_relay_busy() {
        let (outside, mut inside, relay) = start();
        outside.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        fill(&outside);
        drop(outside);
        std::thread::sleep(IDLE);
        let mut rest = Vec::new();
        inside.read_to_end(&mut rest).unwrap();
        assert!(rest.len() > BUFFER_BYTES);
        let work = relay.join().unwrap();
        assert!(work < WORK_MAX, "{work:?}");
    }
}
