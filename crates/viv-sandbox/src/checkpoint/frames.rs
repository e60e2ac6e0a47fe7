//! Files packed in frames that stand alone, so that any number of threads pack and unpack.
//!
//! ```text
//!   name.zst        frame │ frame │ …          what `zstd -d` reads too
//!   name.frames     how long each is           written after the other
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde::{Deserialize, Serialize};

use super::wire::bad;
use crate::durable;

/// How much is packed at a time: large enough to be packed well, small enough for many threads.
pub(super) const FRAME_BYTES: usize = 4 << 20;

/// The quickest that there is: what is packed is read once, or never.
const LEVEL: i32 = 1;

/// Most threads. Disks are not quicker than these.
const THREADS_MAX: usize = 8;

/// Frames that are held in memory at a time, for each thread.
const AHEAD: usize = 4;

pub(super) const PACKED: &str = ".zst";
pub(super) const FRAMES: &str = ".frames";

/// Longest list of frames: of some terabytes.
const FRAMES_BYTES_MAX: u64 = 16 << 20;

/// How a packed file is cut.
#[derive(Debug, Serialize, Deserialize)]
struct Frames {
    /// As it was.
    bytes: u64,
    frame_bytes: usize,
    /// How long each frame is, packed.
    packed_bytes: Vec<u64>,
}

fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)
}

/// The name of what is kept in the place of a file.
pub(super) fn with(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

/// How many frames so many bytes are.
pub(super) fn count(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes.div_ceil(FRAME_BYTES as u64)).map_err(io::Error::other)
}

/// Packs so many bytes, as they are read, under the name of a file.
pub(super) fn write(path: &Path, bytes: u64, read: impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync) -> io::Result<()> {
    let count = count(bytes)?;
    let mut packed = File::create_new(with(path, PACKED))?;
    let mut frames = Vec::with_capacity(count);
    let at_once = threads() * AHEAD;
    for first in (0..count).step_by(at_once) {
        let some = first..count.min(first + at_once);
        let done: Vec<Mutex<Vec<u8>>> = some.clone().map(|_| Mutex::default()).collect();
        in_parallel(
            some.len(),
            || (),
            |(), nth| {
                let start = (first + nth) as u64 * FRAME_BYTES as u64;
                let mut plain = vec![0; FRAME_BYTES.min((bytes - start) as usize)];
                read(start, &mut plain)?;
                *done[nth].lock().expect("nobody panics with it") = zstd::bulk::compress(&plain, LEVEL)?;
                Ok(())
            },
        )?;
        for frame in done {
            let frame = frame.into_inner().expect("nobody panics with it");
            packed.write_all(&frame)?;
            frames.push(frame.len() as u64);
        }
    }
    let frames = Frames { bytes, frame_bytes: FRAME_BYTES, packed_bytes: frames };
    durable::replace_json_within(&with(path, FRAMES), &frames, FRAMES_BYTES_MAX)
}

/// Has some threads do it for every number below this, each with something of its own.
pub(super) fn in_parallel<T>(
    count: usize,
    own: impl Fn() -> T + Sync,
    work: impl Fn(&mut T, usize) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut own = own();
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            if nth >= count {
                return Ok(());
            }
            work(&mut own, nth)?;
        }
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads().min(count)).map(|_| scope.spawn(run)).collect();
        let mut outcome = run();
        for other in others {
            let theirs = other.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
            outcome = outcome.and(theirs);
        }
        outcome
    })
}

/// A packed file, open.
#[derive(Debug)]
pub(super) struct Packed {
    file: File,
    frames: Frames,
    /// Where each frame begins.
    starts: Vec<u64>,
}

impl Packed {
    /// What is kept in the place of this file.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let known: Option<Frames> = durable::read_json_within(&with(path, FRAMES), FRAMES_BYTES_MAX)?;
        let frames = known.ok_or(io::ErrorKind::NotFound)?;
        let of_this_size = (1..=FRAME_BYTES).contains(&frames.frame_bytes);
        if !of_this_size || frames.packed_bytes.len() as u64 != frames.bytes.div_ceil(frames.frame_bytes as u64) {
            return Err(bad("it has another form"));
        }
        let mut starts = Vec::with_capacity(frames.packed_bytes.len());
        let mut at = 0_u64;
        for length in &frames.packed_bytes {
            // What does not shrink grows by little.
            if *length > 2 * FRAME_BYTES as u64 {
                return Err(bad("a frame is too long"));
            }
            starts.push(at);
            at += length;
        }
        Ok(Self { file: File::open(with(path, PACKED))?, frames, starts })
    }

    /// How long it was.
    pub(super) fn bytes(&self) -> u64 {
        self.frames.bytes
    }

    /// How many frames it has.
    pub(super) fn count(&self) -> usize {
        self.starts.len()
    }

    /// A frame as it was, and where that is in the file.
    pub(super) fn frame(&self, nth: usize) -> io::Result<(u64, Vec<u8>)> {
        let mut frame = vec![0; self.frames.packed_bytes[nth] as usize];
        self.file.read_exact_at(&mut frame, self.starts[nth])?;
        let start = nth as u64 * self.frames.frame_bytes as u64;
        let expected = self.frames.frame_bytes.min((self.bytes() - start) as usize);
        let content = zstd::bulk::decompress(&frame, expected)?;
        if content.len() != expected {
            return Err(bad("a frame holds less than it should"));
        }
        Ok((start, content))
    }

    /// For one thread.
    pub(super) fn reader(&self) -> Reader<'_> {
        Reader { packed: self, held: None }
    }
}

/// Reads parts of a packed file that lie near each other: the last frame is held.
pub(super) struct Reader<'p> {
    packed: &'p Packed,
    held: Option<(usize, Vec<u8>)>,
}

impl Reader<'_> {
    pub(super) fn read(&mut self, at: u64, mut into: &mut [u8]) -> io::Result<()> {
        let frame_bytes = self.packed.frames.frame_bytes as u64;
        let mut at = at;
        while !into.is_empty() {
            let nth = usize::try_from(at / frame_bytes).map_err(io::Error::other)?;
            if nth >= self.packed.count() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let frame = match self.held.take() {
                Some((held, frame)) if held == nth => frame,
                Some(_) | None => self.packed.frame(nth)?.1,
            };
            let within = (at % frame_bytes) as usize;
            let some = frame.get(within..).filter(|some| !some.is_empty()).ok_or(io::ErrorKind::UnexpectedEof)?;
            let length = some.len().min(into.len());
            into[..length].copy_from_slice(&some[..length]);
            into = &mut into[length..];
            at += length as u64;
            self.held = Some((nth, frame));
        }
        Ok(())
    }
}
