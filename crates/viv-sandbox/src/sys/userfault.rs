//! Faults of another process, as `userfaultfd(2)` tells of them: <linux/userfaultfd.h>.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_FORK: u8 = 0x13;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;

/// Requests of `ioctl(2)`, as `_IOWR` and `_IOR` make them of 0xAA, their number and the size of what they take.
const COPY: libc::c_ulong = 0xc028_aa03;
const ZEROPAGE: libc::c_ulong = 0xc020_aa04;
const WAKE: libc::c_ulong = 0x8010_aa02;

/// What happened in the process.
#[derive(Debug)]
pub(crate) enum Event {
    /// Somebody waits for what is at this address.
    Fault(u64),
    /// It forked. The child's faults are told here.
    Fork(Userfault),
    /// So much was moved from one address to another.
    Moved { from: u64, to: u64, bytes: u64 },
    /// Nothing is wanted from here to there any more.
    Dropped { start: u64, end: u64 },
}

/// What became of pages that were to be put somewhere.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// So many bytes are there now.
    Done(u64),
    /// Something is there already.
    There,
    /// The process is about to change what it has mapped, and there is an event to be read before.
    Changing,
    /// Nothing that waits for pages is mapped there, or not all of it in one piece.
    NotMapped,
    /// The process is gone.
    Gone,
}

/// One `struct uffd_msg`.
#[repr(C)]
#[derive(Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    /// What they are depends on the event.
    numbers: [u64; 3],
}

#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    bytes: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct ZeroPage {
    start: u64,
    bytes: u64,
    mode: u64,
    zeroed: i64,
}

#[repr(C)]
struct Range {
    start: u64,
    bytes: u64,
}

/// A descriptor of `userfaultfd(2)` that does not block. When the last one of its kind is closed, whoever waits goes on,
/// with pages of zeros.
#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Userfault {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// What happened next, if anything has.
    pub(crate) fn next(&self) -> io::Result<Option<Event>> {
        let mut message = Message::default();
        let (at, size) = ((&raw mut message).cast::<libc::c_void>(), size_of::<Message>());
        // SAFETY: a message of that size is written at the most, and every pattern of bits is one.
        let read = unsafe { libc::read(self.0.as_raw_fd(), at, size) };
        if read < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        if read as usize != size {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "half a message of userfaultfd"));
        }
        let [first, second, third] = message.numbers;
        Ok(Some(match message.event {
            EVENT_PAGEFAULT => Event::Fault(second),
            // SAFETY: the kernel opened it with this read, for us.
            EVENT_FORK => Event::Fork(Self(unsafe { OwnedFd::from_raw_fd((first & 0xffff_ffff) as i32) })),
            EVENT_REMAP => Event::Moved { from: first, to: second, bytes: third },
            EVENT_REMOVE | EVENT_UNMAP => Event::Dropped { start: first, end: second },
            other => return Err(io::Error::other(format!("an unknown event of userfaultfd: {other:#x}"))),
        }))
    }

    /// Puts whole pages where they are missing, and wakes who waits for them.
    pub(crate) fn copy(&self, to: u64, pages: &[u8]) -> io::Result<Put> {
        let bytes = pages.len() as u64;
        let mut copy = Copy { to, from: pages.as_ptr() as u64, bytes, mode: 0, copied: 0 };
        // SAFETY: the kernel reads `bytes` from `pages`, which is that long, and writes to the other process and `copied`.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), COPY, &raw mut copy) };
        became(result, bytes, copy.copied)
    }

    /// Puts a page of zeros somewhere, and wakes who waits for it.
    pub(crate) fn zero(&self, start: u64, bytes: u64) -> io::Result<Put> {
        let mut zero = ZeroPage { start, bytes, mode: 0, zeroed: 0 };
        // SAFETY: the kernel writes to the other process and `zeroed`.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), ZEROPAGE, &raw mut zero) };
        became(result, bytes, zero.zeroed)
    }

    /// Has whoever waits here look again.
    pub(crate) fn wake(&self, start: u64, bytes: u64) {
        let range = Range { start, bytes };
        // SAFETY: the kernel reads the range. Whoever is gone waits for nothing.
        unsafe { libc::ioctl(self.0.as_raw_fd(), WAKE, &raw const range) };
    }
}

fn became(result: i32, bytes: u64, done: i64) -> io::Result<Put> {
    if result == 0 {
        return Ok(Put::Done(bytes));
    }
    let error = io::Error::last_os_error();
    // Some of it, before something came in between.
    if done > 0 {
        return Ok(Put::Done(done.cast_unsigned()));
    }
    match Errno::from_io_error(&error) {
        Some(Errno::AGAIN) => Ok(Put::Changing),
        Some(Errno::EXIST) => Ok(Put::There),
        Some(Errno::NOENT) => Ok(Put::NotMapped),
        // The second one is what older kernels said.
        Some(Errno::SRCH | Errno::NOSPC) => Ok(Put::Gone),
        _ => Err(error),
    }
}
