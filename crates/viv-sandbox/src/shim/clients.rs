//! Connections to `shim.sock`: lines in, lines out, never waiting for anyone.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::proto::{LINE_BYTES_MAX, ShimError, ShimReply, ShimRequest};

/// A daemon keeps one open to hear of the end, and opens one for each call.
const CLIENTS_MAX: usize = 128;

/// Most that may wait for the end, so that there is room for those who ask.
const WAITING_MAX: usize = 64;

/// Longest that a client may have an instance stand still. Copying gigabytes takes seconds.
const HOLD_MAX: Duration = Duration::from_secs(300);

/// Who is connected.
#[derive(Default)]
pub(super) struct Clients {
    clients: Vec<Client>,
}

/// One connection.
pub(super) struct Client {
    stream: UnixStream,
    pending: Vec<u8>,
    /// Wants to hear of the end.
    waits: bool,
    /// Wants the instance to stand still, until when.
    holds_until: Option<Instant>,
    /// Waits for the memory to be saved.
    saves: bool,
    gone: bool,
}

impl Clients {
    /// Takes new connections, forgetting those that hung up when there are too many: while we were stopped, any number
    /// may have come and gone. One too many is told so. Whom others know by his place may have another one then.
    pub(super) fn accept_for_gone(&mut self, listener: &UnixListener) {
        self.accept_with(listener, Self::forget_hung_up);
    }

    /// Takes new connections. One too many is told so.
    pub(super) fn accept(&mut self, listener: &UnixListener) {
        self.accept_with(listener, |_| {});
    }

    fn accept_with(&mut self, listener: &UnixListener, make_room: impl Fn(&mut Self)) {
        while let Ok((stream, _)) = listener.accept() {
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.clients.len() >= CLIENTS_MAX {
                make_room(self);
            }
            let mut client =
                Client { stream, pending: Vec::new(), waits: false, holds_until: None, saves: false, gone: false };
            if self.clients.len() < CLIENTS_MAX {
                self.clients.push(client);
            } else {
                client.say(&ShimReply::Error(ShimError::Busy));
            }
        }
    }

    /// What they asked for, they do not wait for any more.
    fn forget_hung_up(&mut self) {
        self.clients.retain(|client| {
            let mut fds = [PollFd::new(&client.stream, PollFlags::empty())];
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            !matches!(poll(&mut fds, Some(&at_once)), Ok(1)) || !fds[0].revents().contains(PollFlags::HUP)
        });
    }

    /// Has a client hear of the end.
    pub(super) fn let_wait(&mut self, index: usize) {
        let waiting = self.clients.iter().filter(|client| client.waits).count();
        if let Some(client) = self.clients.get_mut(index) {
            if waiting < WAITING_MAX {
                client.waits = true;
            } else {
                client.say(&ShimReply::Error(ShimError::Busy));
                client.gone = true;
            }
        }
    }

    /// How long the instance may still have to stand still; `None` when nobody wants it to.
    pub(super) fn held_for(&mut self) -> Option<Duration> {
        let mut longest = None;
        for client in &mut self.clients {
            let Some(until) = client.holds_until else { continue };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // It is stopped or stuck. What it copied is worthless, and it hears that when it asks.
                client.holds_until = None;
            } else {
                longest = longest.max(Some(left));
            }
        }
        longest
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = &UnixStream> {
        self.clients.iter().map(|client| &client.stream)
    }

    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut Client> {
        self.clients.get_mut(index)
    }

    /// Who waits for the memory to be saved.
    pub(super) fn saving(&self) -> Option<usize> {
        self.clients.iter().position(|client| client.saves)
    }

    /// Forgets those that went.
    pub(super) fn prune(&mut self) {
        self.clients.retain(|client| !client.gone);
    }

    /// Tells everyone who waits.
    pub(super) fn tell_waiting(&mut self, reply: &ShimReply) {
        for client in self.clients.iter_mut().filter(|client| client.waits) {
            client.say(reply);
        }
    }
}

impl Client {
    /// Wants the instance to stand still for a while.
    pub(super) fn hold(&mut self, duration: Duration) {
        self.holds_until = Some(Instant::now() + duration.min(HOLD_MAX));
    }

    /// Waits for the memory to be saved, or no longer.
    pub(super) fn saves(&mut self, saves: bool) {
        self.saves = saves;
    }

    /// Wants it no longer; false when it did not stand still for this client all the time.
    pub(super) fn release(&mut self) -> bool {
        self.holds_until.take().is_some()
    }

    /// The next request, if one has come whole. A line that is none is answered here.
    pub(super) fn receive(&mut self) -> Option<ShimRequest> {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    self.gone = true;
                    break;
                }
                Ok(length) => self.pending.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.gone = true;
                    break;
                }
            }
            if self.pending.len() > LINE_BYTES_MAX {
                self.gone = true;
                return None;
            }
        }
        let end = self.pending.iter().position(|&byte| byte == b'\n')?;
        let line: Vec<u8> = self.pending.drain(..=end).collect();
        match serde_json::from_slice(&line) {
            Ok(request) => Some(request),
            Err(error) => {
                self.say(&ShimReply::Error(ShimError::Malformed { what: error.to_string() }));
                None
            }
        }
    }

    /// Answers. Who does not read his answers is let go.
    pub(super) fn say(&mut self, reply: &ShimReply) {
        let mut line = serde_json::to_vec(reply).unwrap_or_default();
        line.push(b'\n');
        if self.stream.write_all(&line).is_err() {
            self.gone = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;

    use super::*;

    #[test]
    fn j7_those_who_gave_up_take_nobodys_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut clients = Clients::default();
        let ask = |clients: &mut Clients| {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(b"{\"op\":\"status\"}\n").unwrap();
            clients.accept_for_gone(&listener);
            stream
        };
        // Each is taken before the next comes, since how many can wait to be is the machine's to say.
        for _ in 0..3 * CLIENTS_MAX {
            drop(ask(&mut clients));
        }
        let first = ask(&mut clients);
        assert!(clients.clients.len() <= CLIENTS_MAX);
        assert!(clients.clients.last().unwrap().stream.peer_addr().is_ok());
        // Nobody who is there is sent away for another.
        let there: Vec<_> = (1..CLIENTS_MAX).map(|_| ask(&mut clients)).collect();
        assert_eq!(clients.clients.len(), CLIENTS_MAX);
        let mut told = String::new();
        // One line, since after it comes a reset: what was asked is never read.
        io::BufReader::new(ask(&mut clients)).read_line(&mut told).unwrap();
        assert!(told.contains("busy"), "{told}");
        drop((first, there));
    }
}
