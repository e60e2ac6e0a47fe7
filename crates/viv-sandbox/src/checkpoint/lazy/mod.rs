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

/// Longest time until the last page, for some hundred gigabytes. Whoever forks for ever gets no further.
const SERVE_WITHIN: Duration = Duration::from_secs(600);

/// Processes whose pages are brought at a time; each has a descriptor. More of them wait with their fork.
const SPACES_MAX: usize = 900;

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
    let until = Instant::now() + SERVE_WITHIN;
    let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::from_borrowed_fd(cancelled, PollFlags::IN)];
    wait(&mut fds, None)?;
    if fds[0].revents().is_empty() {
        return Err(io::Error::other("CRIU did not come"));
    }
    let criu = listener.accept()?.0;
    let mut server = Server { criu: Some(criu), spaces: VecDeque::new(), buffer: vec![0; PUSH_BYTES as usize] };
    while server.criu.is_some() || !server.spaces.is_empty() {
        if Instant::now() > until {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "its pages are not brought in time"));
        }
        server.turn(images)?;
    }
    Ok(())
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
}

impl Server {
    fn turn(&mut self, images: &Path) -> io::Result<()> {
        // As long as nobody may run, nobody asks for more than CRIU does, and what is to wait for pages is not set up yet.
        let all_run = self.criu.is_none();
        self.look(images, if all_run { Some(Timespec::default()) } else { None })?;
        let mut went = false;
        for _ in 0..self.spaces.len() {
            let Some(mut space) = self.spaces.pop_front() else { break };
            let turn = if space.wanted.is_empty() && (!all_run || went) {
                Turn::Waits
            } else {
                space.serve(&mut self.buffer, all_run)?
            };
            went |= matches!(turn, Turn::Went);
            match turn {
                Turn::Went | Turn::Waits => self.spaces.push_back(space),
                Turn::Done => went = true,
            }
        }
        if all_run && !went && !self.spaces.is_empty() {
            // Everybody is in the middle of something that is told soon.
            if self.spaces.len() >= SPACES_MAX {
                return Err(io::Error::other("too many processes are forked while its pages are brought"));
            }
            self.look(images, Some(LOOK_EVERY))?;
        }
        Ok(())
    }

    /// Reads what CRIU and the processes have to say.
    fn look(&mut self, images: &Path, within: Option<Timespec>) -> io::Result<()> {
        let listens = self.spaces.len() < SPACES_MAX;
        let heard: Vec<bool> = {
            let spaces = self.spaces.iter().filter(|_| listens).map(|space| PollFd::new(&space.faults, PollFlags::IN));
            let criu = self.criu.iter().map(|criu| PollFd::new(criu, PollFlags::IN));
            let mut fds: Vec<PollFd<'_>> = spaces.chain(criu).collect();
            wait(&mut fds, within)?;
            fds.iter().map(|fd| !fd.revents().is_empty()).collect()
        };
        let count = heard.len() - usize::from(self.criu.is_some());
        let mut forked = Vec::new();
        let spaces = self.spaces.len();
        for (space, _) in self.spaces.iter_mut().zip(&heard[..count]).filter(|(_, heard)| **heard) {
            if spaces + forked.len() < SPACES_MAX {
                space.hear(&mut forked)?;
            }
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
                let (file, wanted) = (Arc::new(file), VecDeque::new());
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
    missing: Missing,
    /// Pages that somebody waits for.
    wanted: VecDeque<u64>,
    /// It came by a fork, so that some of what its parent misses need not be mapped in it.
    is_forked: bool,
}

impl Space {
    fn hear(&mut self, forked: &mut Vec<Self>) -> io::Result<()> {
        for _ in 0..EVENTS_AT_ONCE_MAX {
            match self.faults.next()? {
                None => break,
                Some(Event::Fault(address)) => self.wanted.push_back(address & !(PAGE_BYTES - 1)),
                Some(Event::Moved { from, to, bytes }) => self.missing.shift(from, to, bytes),
                Some(Event::Dropped { start, end }) => drop(self.missing.take(start, end)),
                Some(Event::Fork(faults)) => {
                    let (file, missing) = (Arc::clone(&self.file), self.missing.clone());
                    forked.push(Self { faults, file, missing, wanted: VecDeque::new(), is_forked: true });
                    // Its descriptor counts.
                    break;
                }
            }
        }
        Ok(())
    }

    /// Puts what is waited for, or else, if it may run, some of what is missing.
    fn serve(&mut self, buffer: &mut [u8], all_run: bool) -> io::Result<Turn> {
        while let Some(&address) = self.wanted.front() {
            let taken = self.missing.take(address, address + PAGE_BYTES);
            let put = match taken.first() {
                Some(&piece) => self.copy(piece, buffer)?,
                // It was never written to, or is there by now.
                None => self.faults.zero(address, PAGE_BYTES)?,
            };
            if matches!(put, Put::Changing) {
                for piece in taken {
                    self.missing.put(piece);
                }
                return Ok(Turn::Waits);
            }
            if matches!(put, Put::Gone) {
                return Ok(Turn::Done);
            }
            self.wanted.pop_front();
            if !matches!(put, Put::Done(_)) {
                self.faults.wake(address, PAGE_BYTES);
            }
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
        drop(self.missing.take(piece.address, piece.address + done_bytes));
        Ok(Turn::Went)
    }

    fn copy(&self, piece: Piece, buffer: &mut [u8]) -> io::Result<Put> {
        let pages = &mut buffer[..piece.bytes as usize];
        self.file.read_exact_at(pages, piece.offset)?;
        self.faults.copy(piece.address, pages)
    }
}
