//! Memory that is brought page by page, while its processes run on already.
//!
//! ```text
//!   criu restore --lazy-pages ── (pid, userfaultfd)… ── finished ──► serve: who waits for a page gets it at once,
//!        lazy-pages.socket                                          and everything else is put there meanwhile
//! ```
//!
//! CRIU's own server (`criu lazy-pages`) does the same, but whoever ends it has all others read zeros: it alone holds the
//! descriptors, those of forks among them, which nobody else can have. This one shares its table of descriptors with
//! somebody who only holds it: see `shim/pages.rs`.
//!
//! Each page is put once. What is to come is known by address ([`Missing`]), and follows what the process does with its
//! mappings, in the order in which the kernel tells of it: as long as something is not read that was told, nothing is put.
//!
//! Who runs in the sandbox decides how often something is told, and what is kept of it is not the sandbox's memory: so what
//! is kept for forks has bounds ([`Bounds`]), above which nobody is heard until some of it is gone.

mod missing;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, IoSliceMut, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::sys::userfault::{Event, Put, Userfault};
use missing::{Missing, PAGE_BYTES, Piece};

/// Where CRIU looks for who serves pages, in its work folder.
pub(crate) const SOCKET: &str = "lazy-pages.socket";

/// What tells a restore to be lazy.
pub(crate) const OPTION: &str = "--lazy-pages";

/// With less than this, bringing all of it takes less than a tenth of a second, which nobody waits for.
pub(crate) const BYTES_MIN: u64 = 64 << 20;

/// What CRIU says instead of a pid when everything runs.
const FINISHED: i32 = 0x5253_5446;

/// How much is put at a time while nobody waits for a page: who comes meanwhile waits for as long as that takes.
const PUSH_BYTES: u64 = 256 << 10;

/// Longest time in which nobody of those whom CRIU restored gets a page, though not all have theirs: a disk that is slow
/// answers sooner. Pages of forks do not count: who forks for ever is not served for ever.
const STILL_WITHIN: Duration = Duration::from_secs(600);

/// Processes whose pages are brought at a time. More of them wait with their fork.
const SPACES_MAX: usize = 900;

/// Descriptors of each: its own, and its file of pages if it is no fork.
const DESCRIPTORS_EACH: u64 = 2;

/// Descriptors for everything else.
const DESCRIPTORS_BESIDE: u64 = 32;

/// What is known to be missing in forks, all of them together: some fifty bytes each, so a hundred MiB. Where everybody
/// would wait for somebody else, there may be twice as much.
const PIECES_MAX: usize = 2 << 20;

/// Events that are read of one process before others are looked at.
const EVENTS_AT_ONCE_MAX: usize = 64;

/// While a process changes what it has mapped, it is looked at again after this.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// How much memory there is in unpacked images.
pub(crate) fn bytes(images: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("pages-") {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes)
}

/// Serves the pages of one restore until the last one is there, or nobody is left who could want it. Fails when CRIU goes
/// before all runs, or `cancelled` has ended before CRIU came.
pub(crate) fn serve(listener: &UnixListener, cancelled: BorrowedFd<'_>, images: &Path) -> io::Result<()> {
    let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::from_borrowed_fd(cancelled, PollFlags::IN)];
    wait(&mut fds, None)?;
    if fds[0].revents().is_empty() {
        return Err(io::Error::other("CRIU did not come"));
    }
    let criu = listener.accept()?.0;
    let bounds = Bounds { spaces: spaces_max(raise_open_files()), pieces: PIECES_MAX };
    let (spaces, buffer) = (VecDeque::new(), vec![0; PUSH_BYTES as usize]);
    let mut server = Server { criu: Some(criu), spaces, buffer, bounds, went_at: Instant::now() };
    while server.criu.is_some() || !server.spaces.is_empty() {
        server.turn(images)?;
        if server.went_at.elapsed() > STILL_WITHIN {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no page could be brought for too long"));
        }
    }
    Ok(())
}

/// Has as many descriptors as this process may: what a shim begins with is for a program that opens a few. Answers how many.
fn raise_open_files() -> Option<u64> {
    let most = getrlimit(Resource::Nofile).maximum;
    // Where it cannot be raised, there is room for fewer.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
    getrlimit(Resource::Nofile).current
}

/// For how many processes there are descriptors: the fork of one more is not heard, which is better than to hear of it and
/// have no room for its descriptor.
fn spaces_max(open_files: Option<u64>) -> usize {
    let Some(open_files) = open_files else { return SPACES_MAX };
    let spaces = open_files.saturating_sub(DESCRIPTORS_BESIDE) / DESCRIPTORS_EACH;
    usize::try_from(spaces).unwrap_or(SPACES_MAX).clamp(1, SPACES_MAX)
}

/// How long to wait for somebody to say something, while some wait for pages, or nobody does.
fn listen_for(all_run: bool, any_wanted: bool) -> Option<Timespec> {
    match (all_run, any_wanted) {
        // There are pages to be put meanwhile.
        (true, _) => Some(Timespec::default()),
        // What could not be put a moment ago can be soon, and nobody says when.
        (false, true) => Some(LOOK_EVERY),
        // As long as nobody may run, nobody asks for more than CRIU does, and what is to wait for pages is not set up yet.
        (false, false) => None,
    }
}

/// How much is kept at a time.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    spaces: usize,
    /// Of forks. Those whom CRIU restored have what is in their dump, which was the sandbox's own memory.
    pieces: usize,
}

impl Bounds {
    fn have_room(self, spaces: usize, pieces: usize) -> bool {
        spaces < self.spaces && pieces < self.pieces
    }
}

/// What comes next of a process.
enum Turn {
    Went,
    /// It changes what it has mapped.
    Waits,
    /// It is gone, or has all of its pages.
    Done,
}

struct Server {
    /// Until all runs.
    criu: Option<UnixStream>,
    spaces: VecDeque<Space>,
    buffer: Vec<u8>,
    bounds: Bounds,
    /// When somebody whom CRIU restored got a page last.
    went_at: Instant,
}

impl Server {
    fn turn(&mut self, images: &Path) -> io::Result<()> {
        let all_run = self.criu.is_none();
        let any_wanted = self.spaces.iter().any(|space| !space.wanted.is_empty());
        self.look(images, listen_for(all_run, any_wanted), self.bounds)?;
        let mut went = false;
        for _ in 0..self.spaces.len() {
            let Some(mut space) = self.spaces.pop_front() else { break };
            let turn = if space.wanted.is_empty() && (!all_run || went) {
                Turn::Waits
            } else {
                space.serve(&mut self.buffer, all_run)?
            };
            if !matches!(turn, Turn::Waits) {
                went = true;
                if !space.is_forked {
                    self.went_at = Instant::now();
                }
            }
            match turn {
                Turn::Went | Turn::Waits => self.spaces.push_back(space),
                Turn::Done => {}
            }
        }
        if !all_run {
            self.went_at = Instant::now();
        } else if !went && !self.spaces.is_empty() {
            // Everybody is in the middle of something that is told soon, or was told and not heard.
            let more = Bounds { pieces: 2 * self.bounds.pieces, ..self.bounds };
            if !more.have_room(self.spaces.len(), self.pieces()) {
                return Err(io::Error::other("too many processes are forked while its pages are brought"));
            }
            self.look(images, Some(LOOK_EVERY), more)?;
        }
        Ok(())
    }

    /// What is missing in forks. What they share until one of them gets something counts for each: it may be each one's own
    /// a moment later.
    fn pieces(&self) -> usize {
        self.spaces.iter().map(Space::forked_pieces).sum()
    }

    /// Reads what CRIU and the processes have to say, as long as there is room for what follows of it.
    fn look(&mut self, images: &Path, within: Option<Timespec>, bounds: Bounds) -> io::Result<()> {
        let (spaces, mut pieces) = (self.spaces.len(), self.pieces());
        let listens = bounds.have_room(spaces, pieces);
        let heard: Vec<bool> = {
            let spaces = self.spaces.iter().filter(|_| listens).map(|space| PollFd::new(&space.faults, PollFlags::IN));
            let criu = self.criu.iter().map(|criu| PollFd::new(criu, PollFlags::IN));
            let mut fds: Vec<PollFd<'_>> = spaces.chain(criu).collect();
            wait(&mut fds, within)?;
            fds.iter().map(|fd| !fd.revents().is_empty()).collect()
        };
        let count = heard.len() - usize::from(self.criu.is_some());
        let mut forked: Vec<Space> = Vec::new();
        for (space, _) in self.spaces.iter_mut().zip(&heard[..count]).filter(|(_, heard)| **heard) {
            if bounds.have_room(spaces + forked.len(), pieces) {
                let before = space.forked_pieces();
                let child = space.hear()?;
                // What is cut in the middle is two.
                pieces += space.forked_pieces().saturating_sub(before) + child.as_ref().map_or(0, Space::forked_pieces);
                forked.extend(child);
            }
        }
        if !forked.is_empty() || !listens {
            // Nobody says that he is gone, and those who fork most have children that go at once.
            self.spaces.retain(|space| !space.is_gone());
        }
        self.spaces.extend(forked);
        if heard.get(count).is_some_and(|heard| *heard) {
            self.hear_criu(images)?;
        }
        Ok(())
    }

    fn hear_criu(&mut self, images: &Path) -> io::Result<()> {
        let Some(criu) = &mut self.criu else { return Ok(()) };
        let mut said = [0; 4];
        criu.read_exact(&mut said).map_err(|_| io::Error::other("CRIU went before all ran"))?;
        match i32::from_ne_bytes(said) {
            FINISHED => self.criu = None,
            // One that had ended: it has no memory.
            ..0 => {}
            pid => {
                let faults = Userfault::new(receive(criu)?);
                let (missing, file) = Missing::read(images, pid)?;
                let (file, missing, wanted) = (Arc::new(file), Arc::new(missing), VecDeque::new());
                self.spaces.push_back(Space { faults, file, missing, wanted, is_forked: false });
            }
        }
        Ok(())
    }
}

/// Waits for one of these. Signals in between do not matter.
fn wait(fds: &mut [PollFd<'_>], within: Option<Timespec>) -> io::Result<()> {
    loop {
        match poll(fds, within.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result.map(drop)?),
        }
    }
}

/// The descriptor that follows a pid.
fn receive(criu: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(criu, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message
            && let Some(fd) = fds.next()
        {
            return Ok(fd);
        }
    }
    Err(io::Error::other("CRIU hands over no descriptor"))
}

/// The memory of one process.
struct Space {
    faults: Userfault,
    file: Arc<File>,
    /// Shared with whom it was forked from, until something is put for either of them: most forks go before that.
    missing: Arc<Missing>,
    /// Pages that somebody waits for.
    wanted: VecDeque<u64>,
    /// It came by a fork, so that some of what its parent misses need not be mapped in it.
    is_forked: bool,
}

impl Space {
    /// Hears what happened to it, up to a fork: that child's descriptor counts.
    fn hear(&mut self) -> io::Result<Option<Self>> {
        for _ in 0..EVENTS_AT_ONCE_MAX {
            match self.faults.next()? {
                None => break,
                Some(Event::Fault(address)) => self.wanted.push_back(address & !(PAGE_BYTES - 1)),
                Some(Event::Moved { from, to, bytes }) => Arc::make_mut(&mut self.missing).shift(from, to, bytes),
                Some(Event::Dropped { start, end }) => self.take(start, end),
                // A child misses what its parent does now. What another thread changed before is told by now, and what it
                // changes later is told later; what it changes in the middle of the fork is told as the kernel comes to
                // it, which need not be the order in which the child got its mappings: see docs/checkpoint.md.
                Some(Event::Fork(faults)) => {
                    let (file, missing) = (Arc::clone(&self.file), Arc::clone(&self.missing));
                    return Ok(Some(Self { faults, file, missing, wanted: VecDeque::new(), is_forked: true }));
                }
            }
        }
        Ok(None)
    }

    fn forked_pieces(&self) -> usize {
        if self.is_forked { self.missing.pieces() } else { 0 }
    }

    /// These are not missing any more.
    fn take(&mut self, start: u64, end: u64) {
        if self.missing.has_any(start, end) {
            drop(Arc::make_mut(&mut self.missing).take(start, end));
        }
    }

    /// Whether nobody is left. Asked by what is the answer to a fault below all that is missing: a page of zeros, if one was
    /// never there.
    fn is_gone(&self) -> bool {
        let below = self.missing.first(PAGE_BYTES).and_then(|piece| piece.address.checked_sub(PAGE_BYTES));
        below.is_some_and(|below| matches!(self.faults.zero(below, PAGE_BYTES), Ok(Put::Gone)))
    }

    /// Puts what is waited for, or else, if it may run, some of what is missing.
    fn serve(&mut self, buffer: &mut [u8], all_run: bool) -> io::Result<Turn> {
        while let Some(&address) = self.wanted.front() {
            let put = match self.missing.page(address) {
                Some(piece) => self.copy(piece, buffer)?,
                // It was never written to, or is there by now.
                None => self.faults.zero(address, PAGE_BYTES)?,
            };
            match put {
                Put::Changing => return Ok(Turn::Waits),
                Put::Gone => return Ok(Turn::Done),
                Put::Done(_) => {}
                Put::There | Put::NotMapped => self.faults.wake(address, PAGE_BYTES),
            }
            self.wanted.pop_front();
            self.take(address, address + PAGE_BYTES);
        }
        if !all_run {
            return Ok(Turn::Waits);
        }
        let Some(piece) = self.missing.first(PUSH_BYTES) else { return Ok(Turn::Done) };
        let mut put = self.copy(piece, buffer)?;
        if put == Put::NotMapped && piece.bytes > PAGE_BYTES {
            // In two mappings, which only one page never is.
            put = self.copy(Piece { bytes: PAGE_BYTES, ..piece }, buffer)?;
        }
        let done_bytes = match put {
            Put::Done(bytes) => bytes,
            Put::There => PAGE_BYTES,
            Put::NotMapped if self.is_forked => PAGE_BYTES,
            Put::NotMapped => return Err(io::Error::other(format!("nothing waits at {:#x}", piece.address))),
            Put::Changing => return Ok(Turn::Waits),
            Put::Gone => return Ok(Turn::Done),
        };
        self.take(piece.address, piece.address + done_bytes);
        Ok(Turn::Went)
    }

    fn copy(&self, piece: Piece, buffer: &mut [u8]) -> io::Result<Put> {
        let pages = &mut buffer[..piece.bytes as usize];
        self.file.read_exact_at(pages, piece.offset)?;
        self.faults.copy(piece.address, pages)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixDatagram;

    use super::*;

    const FORK: u8 = 0x13;
    const UNMAP: u8 = 0x16;

    /// Tells what the kernel would.
    struct Kernel(UnixDatagram);

    impl Kernel {
        fn tell(&self, event: u8, numbers: [u64; 2]) {
            let mut message = [0; 32];
            message[0] = event;
            message[8..16].copy_from_slice(&numbers[0].to_ne_bytes());
            message[16..24].copy_from_slice(&numbers[1].to_ne_bytes());
            self.0.send(&message).unwrap();
        }

        /// Answers with who tells of the child.
        fn fork(&self) -> Self {
            let (child, faults) = told();
            self.tell(FORK, [faults.into_raw_fd().cast_unsigned().into(), 0]);
            child
        }
    }

    fn told() -> (Kernel, OwnedFd) {
        let (kernel, told) = UnixDatagram::pair().unwrap();
        told.set_nonblocking(true).unwrap();
        (Kernel(kernel), told.into())
    }

    /// One whom CRIU restored, with so many pages missing that are no neighbours.
    fn server(bounds: Bounds, pieces: u64) -> (Server, Kernel) {
        let mut missing = Missing::default();
        missing.put_all((0..pieces).map(|n| Piece {
            address: (2 * n + 1) * PAGE_BYTES,
            bytes: PAGE_BYTES,
            offset: n * PAGE_BYTES,
        }));
        let (kernel, faults) = told();
        let file = Arc::new(File::open("/dev/null").unwrap());
        let (faults, missing, wanted) = (Userfault::new(faults), Arc::new(missing), VecDeque::new());
        let spaces = VecDeque::from([Space { faults, file, missing, wanted, is_forked: false }]);
        (Server { criu: None, spaces, buffer: Vec::new(), bounds, went_at: Instant::now() }, kernel)
    }

    fn look(server: &mut Server) -> usize {
        server.look(Path::new("/"), Some(Timespec::default()), server.bounds).unwrap();
        server.spaces.len()
    }

    #[test]
    fn s1_forks_take_no_more_than_they_may_of_what_is_not_the_sandboxes_memory() {
        let (mut server, parent) = server(Bounds { spaces: 100, pieces: 25 }, 10);
        let _children: Vec<_> = (0..6).map(|_| parent.fork()).collect();
        assert_eq!([(); 6].map(|()| look(&mut server)), [2, 3, 4, 4, 4, 4], "three have more than they may together");
        assert_eq!(Arc::strong_count(&server.spaces[0].missing), 4, "it is one until it is another one's own");
        // When one has what it misses, there is room for the next.
        server.spaces.pop_back();
        assert_eq!([(); 2].map(|()| look(&mut server)), [4, 4]);
    }

    #[test]
    fn s1_what_is_cut_in_many_pieces_counts_too() {
        let (mut server, parent) = server(Bounds { spaces: 100, pieces: 25 }, 10);
        let child = parent.fork();
        assert_eq!(look(&mut server), 2);
        // It misses one more long piece, which is cut in the middle again and again.
        let long = Piece { address: 1 << 30, bytes: 100 * PAGE_BYTES, offset: 0 };
        Arc::make_mut(&mut server.spaces[1].missing).put_all([long]);
        for cut in 0..20 {
            let start = long.address + (2 * cut + 1) * PAGE_BYTES;
            child.tell(UNMAP, [start, start + PAGE_BYTES]);
        }
        look(&mut server);
        assert_eq!(server.pieces(), 31, "as many as are read at once");
        assert_eq!(server.spaces[0].missing.pieces(), 10, "its parent has what it had");
        let _more = parent.fork();
        assert_eq!(look(&mut server), 2);
    }

    #[test]
    fn forks_wait_as_long_as_there_is_no_room_for_them() {
        let (mut server, parent) = server(Bounds { spaces: 3, pieces: 1000 }, 10);
        let _children: Vec<_> = (0..4).map(|_| parent.fork()).collect();
        assert_eq!([(); 4].map(|()| look(&mut server)), [2, 3, 3, 3]);
    }

    #[test]
    fn there_are_descriptors_for_whoever_is_heard() {
        assert_eq!(spaces_max(None), SPACES_MAX);
        assert_eq!(spaces_max(Some(1 << 20)), SPACES_MAX);
        for limit in [256_u64, 1024, 4096] {
            let spaces = spaces_max(Some(limit)) as u64;
            assert!(
                spaces * DESCRIPTORS_EACH + DESCRIPTORS_BESIDE <= limit && spaces >= limit.min(1024) / 4,
                "{limit}"
            );
        }
        assert_eq!(spaces_max(Some(3)), 1, "it fails when it gets there");
    }

    #[test]
    fn what_could_not_be_put_is_tried_again_though_nobody_says_anything() {
        assert_eq!(listen_for(false, true), Some(LOOK_EVERY));
        assert_eq!(listen_for(false, false), None, "until CRIU says something");
        assert_eq!(listen_for(true, false), Some(Timespec::default()), "there is more to do");
    }
}
