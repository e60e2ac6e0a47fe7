//! How an execution's output is kept on disk.
//!
//! A directory per execution holds its status and the segments of its log:
//!
//! ```text
//!   exec/exe_…/status.json
//!              0000000000000000.log      named by the offset of their first byte
//!              0000000000080000.log
//!
//!   record: ┌────────┬────────────┬─────────┬─────────┐
//!           │ stream │ length u24 │ ms u64  │ payload │   big endian
//!           └────────┴────────────┴─────────┴─────────┘
//! ```
//!
//! The first segment is kept for ever, for how it began; the newest ones are
//! kept for how it ended; between them the oldest go first. What is missing
//! reads as [`Item::Cut`].
//!
//! Invariants: the bytes on disk, headers included, never exceed the bound. A
//! segment does not change once a later one exists. The writer never blocks
//! on readers: they read the files, and find a cut where they were too slow
//! (a segment that is being read stays on disk until its reader moves on).
//! Readers trust nothing: the tail may be torn, the content hostile, and no
//! length in a file decides an allocation.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Uid, fchown, fstat, openat, renameat, unlinkat};
use viv_core::exec::{ExecStatus, Stream};

use crate::frame::ChunkHeader;

/// Longest payload of a record, so that one fills the smallest segment; also
/// the most that is read from a command at once.
pub const RECORD_BYTES_MAX: usize = (64 << 10) - RECORD_HEADER_BYTES;

/// The smallest bound that is honoured; smaller ones count as this.
pub const BOUND_BYTES_MIN: u64 = 4 * SEGMENT_BYTES_MIN;

/// A segment is an eighth of the bound within these two: few files, and little lost when one goes.
const SEGMENT_BYTES_MIN: u64 = 64 << 10;
const SEGMENT_BYTES_MAX: u64 = 8 << 20;

const RECORD_HEADER_BYTES: usize = 12;

const STATUS: &str = "status.json";
const STATUS_NEW: &str = "status.json.new";

/// A status holds a few numbers and at most one sentence.
const STATUS_BYTES_MAX: u64 = 64 << 10;

struct Segment {
    start: u64,
    bytes: u64,
}

/// The writer.
pub struct Log {
    dir: OwnedFd,
    bytes_max: u64,
    segment_bytes: u64,
    /// All segments on disk, oldest first; the last one is open unless something was lost after it.
    segments: Vec<Segment>,
    current: Option<File>,
    offset: u64,
    disk_bytes: u64,
}

impl Log {
    /// Starts a log in an empty directory that exists.
    pub fn create(dir: &Path, bytes_max: u64) -> io::Result<Self> {
        let bytes_max = bytes_max.max(BOUND_BYTES_MIN);
        Self::with_segments(dir, bytes_max, (bytes_max / 8).clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX))
    }

    fn with_segments(dir: &Path, bytes_max: u64, segment_bytes: u64) -> io::Result<Self> {
        assert!(segment_bytes > RECORD_HEADER_BYTES as u64, "a segment holds at least one byte");
        assert!(bytes_max >= 3 * segment_bytes, "head, tail and the one being written");
        let dir = open_dir(dir)?;
        Ok(Self { dir, bytes_max, segment_bytes, segments: Vec::new(), current: None, offset: 0, disk_bytes: 0 })
    }

    /// The offset of the next byte: all that was ever appended, kept or not.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Appends. What cannot be written, because the disk is full for example,
    /// is lost and reads as a cut; that is why there is no error.
    pub fn append(&mut self, stream: Stream, at_ms: u64, data: &[u8]) {
        let payload_max = RECORD_BYTES_MAX.min(self.segment_bytes as usize - RECORD_HEADER_BYTES);
        for payload in data.chunks(payload_max) {
            if self.append_record(stream, at_ms, payload).is_err() {
                self.abandon_segment();
            }
            self.offset += payload.len() as u64;
        }
    }

    fn append_record(&mut self, stream: Stream, at_ms: u64, payload: &[u8]) -> io::Result<()> {
        let record_bytes = (RECORD_HEADER_BYTES + payload.len()) as u64;
        if self.current.is_some() && self.segments.last().is_some_and(|s| s.bytes + record_bytes > self.segment_bytes) {
            self.current = None;
        }
        while self.disk_bytes + record_bytes > self.bytes_max && self.drop_oldest()? {}
        if self.current.is_none() {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::APPEND | OFlags::CLOEXEC;
            let file = openat(&self.dir, segment_name(self.offset), flags, Mode::RUSR | Mode::WUSR)?;
            keep_as(&self.dir, &file)?;
            self.current = Some(file.into());
            self.segments.push(Segment { start: self.offset, bytes: 0 });
        }
        let (Some(file), Some(segment)) = (&mut self.current, self.segments.last_mut()) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let header = encode_record_header(stream, payload.len(), at_ms);
        let written = write_whole(file, &header, payload);
        if let Err(error) = written {
            // Half a record would hide everything after it.
            file.set_len(segment.bytes)?;
            return Err(error);
        }
        segment.bytes += record_bytes;
        self.disk_bytes += record_bytes;
        Ok(())
    }

    /// Removes the oldest segment that is neither the first nor the open one; false when there is none.
    fn drop_oldest(&mut self) -> io::Result<bool> {
        let open = usize::from(self.current.is_some());
        if self.segments.len() < 2 + open {
            return Ok(false);
        }
        let segment = &self.segments[1];
        match unlinkat(&self.dir, segment_name(segment.start), AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        self.disk_bytes -= self.segments.remove(1).bytes;
        Ok(true)
    }

    /// After a loss the offsets in a segment no longer follow from its name, so another one is begun.
    fn abandon_segment(&mut self) {
        if self.current.take().is_some()
            && let Some(segment) = self.segments.pop_if(|s| s.bytes == 0)
        {
            // Best effort: an empty segment costs an inode and reads as nothing.
            let _ = unlinkat(&self.dir, segment_name(segment.start), AtFlags::empty());
        }
    }
}

fn write_whole(file: &mut File, header: &[u8], payload: &[u8]) -> io::Result<()> {
    let written = file.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)])?;
    if written < header.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    file.write_all(&payload[written - header.len()..])
}

fn segment_name(start: u64) -> String {
    format!("{start:016x}.log")
}

fn parse_segment_name(name: &[u8]) -> Option<u64> {
    let digits = name.strip_suffix(b".log")?;
    let plain = digits.len() == 16 && digits.iter().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(b));
    if !plain {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

fn encode_record_header(stream: Stream, length: usize, at_ms: u64) -> [u8; RECORD_HEADER_BYTES] {
    debug_assert!(length <= RECORD_BYTES_MAX, "a record that no reader takes");
    let mut out = [0; RECORD_HEADER_BYTES];
    out[..4].copy_from_slice(&(length as u32).to_be_bytes());
    out[0] = match stream {
        Stream::Stdout => 1,
        Stream::Stderr => 2,
    };
    out[4..].copy_from_slice(&at_ms.to_be_bytes());
    out
}

fn decode_record_header(header: [u8; RECORD_HEADER_BYTES]) -> Option<(Stream, usize, u64)> {
    let [stream, l2, l1, l0, at_ms @ ..] = header;
    let stream = match stream {
        1 => Stream::Stdout,
        2 => Stream::Stderr,
        _ => return None,
    };
    let length = u32::from_be_bytes([0, l2, l1, l0]) as usize;
    (1..=RECORD_BYTES_MAX).contains(&length).then_some((stream, length, u64::from_be_bytes(at_ms)))
}

fn open_dir(dir: &Path) -> io::Result<OwnedFd> {
    Ok(openat(CWD, dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

/// A file belongs to whom its directory belongs to, also where that is not who made it.
fn keep_as(dir: impl AsFd, file: impl AsFd) -> io::Result<()> {
    let (above, made) = (fstat(dir)?, fstat(&file)?);
    if (above.st_uid, above.st_gid) != (made.st_uid, made.st_gid) {
        fchown(file, Some(Uid::from_raw(above.st_uid)), Some(Gid::from_raw(above.st_gid)))?;
    }
    Ok(())
}

/// Opens a plain file of ours for reading, whatever somebody may have put in its place.
fn open_file(dir: &OwnedFd, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = openat(dir, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a regular file"));
    }
    Ok(fd.into())
}

/// What a reader finds, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Item<'b> {
    /// Bytes that were written.
    Chunk {
        /// Where, when, by whom.
        header: ChunkHeader,
        /// The bytes; they lie in the caller's buffer.
        data: &'b [u8],
    },
    /// The bytes from `from` up to `to` were not kept.
    Cut {
        /// First byte that is missing.
        from: u64,
        /// First byte that is there again.
        to: u64,
    },
}

struct Open {
    file: File,
    /// Offset in the output of the first byte in this segment.
    start: u64,
    /// Place in the file of the next record.
    place: u64,
    /// Offset in the output of the next record.
    offset: u64,
}

/// A place in a log, for reading on from there.
pub struct Reader {
    dir: OwnedFd,
    segment: Option<Open>,
    /// The offset of the next byte to yield.
    offset: u64,
}

enum Step {
    Chunk {
        stream: Stream,
        at_ms: u64,
        length: usize,
        skip: usize,
    },
    /// Nothing whole is there (yet).
    Nothing,
    /// The segment ends here.
    Broken,
}

impl Reader {
    /// Opens the log in `dir` at an offset.
    pub fn open(dir: &Path, offset: u64) -> io::Result<Self> {
        Ok(Self { dir: open_dir(dir)?, segment: None, offset })
    }

    /// The offset of the next byte to come.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next piece, or `None` at the present end; it can be called again when there may be more.
    ///
    /// `buf` is only space: at most [`RECORD_BYTES_MAX`] of it is used.
    pub fn next<'b>(&mut self, buf: &'b mut Vec<u8>) -> io::Result<Option<Item<'b>>> {
        loop {
            // Looked for first: what the old segment lacks once a newer one exists, it lacks for ever.
            let later = match self.read_record(buf)? {
                Step::Chunk { stream, at_ms, length, skip } => {
                    return Ok(Some(self.chunk(stream, at_ms, buf, length, skip)));
                }
                Step::Nothing | Step::Broken => self.following_segment()?,
            };
            let Some(start) = later else { return Ok(None) };
            if let Step::Chunk { stream, at_ms, length, skip } = self.read_record(buf)? {
                return Ok(Some(self.chunk(stream, at_ms, buf, length, skip)));
            }
            match open_file(&self.dir, &segment_name(start)) {
                Ok(file) => self.segment = Some(Open { file, start, place: 0, offset: start }),
                // Dropped in between: look again.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            }
            if start > self.offset {
                let from = std::mem::replace(&mut self.offset, start);
                return Ok(Some(Item::Cut { from, to: start }));
            }
        }
    }

    /// What lies between the last kept byte and the end of the output, once that end is known.
    pub fn finish(&mut self, output_bytes: u64) -> Option<Item<'static>> {
        (self.offset < output_bytes).then(|| {
            let from = std::mem::replace(&mut self.offset, output_bytes);
            Item::Cut { from, to: output_bytes }
        })
    }

    fn chunk<'b>(&mut self, stream: Stream, at_ms: u64, buf: &'b [u8], length: usize, skip: usize) -> Item<'b> {
        let header = ChunkHeader { stream, offset: self.offset, at_ms };
        let data = &buf[skip..length];
        self.offset = self.offset.saturating_add(data.len() as u64);
        Item::Chunk { header, data }
    }

    /// Reads the record that holds `self.offset` into `buf`.
    fn read_record(&mut self, buf: &mut Vec<u8>) -> io::Result<Step> {
        let Some(segment) = &mut self.segment else { return Ok(Step::Nothing) };
        loop {
            let mut header = [0; RECORD_HEADER_BYTES];
            if read_at(&segment.file, &mut header, segment.place)? < header.len() {
                return Ok(Step::Nothing);
            }
            let Some((stream, length, at_ms)) = decode_record_header(header) else { return Ok(Step::Broken) };
            // No output reaches the end of all offsets, so a segment that says so is none of ours.
            let Some(end) = segment.offset.checked_add(length as u64) else { return Ok(Step::Broken) };
            let payload_place = segment.place.saturating_add(RECORD_HEADER_BYTES as u64);
            if end > self.offset {
                buf.resize(buf.len().max(length), 0);
                if read_at(&segment.file, &mut buf[..length], payload_place)? < length {
                    return Ok(Step::Nothing);
                }
            }
            let skip = self.offset.saturating_sub(segment.offset).min(length as u64) as usize;
            segment.place = payload_place.saturating_add(length as u64);
            segment.offset = end;
            if skip < length {
                return Ok(Step::Chunk { stream, at_ms, length, skip });
            }
        }
    }

    /// Where to go on: at the start, the segment that holds the offset; later, the one after the open one.
    fn following_segment(&self) -> io::Result<Option<u64>> {
        let (mut holding, mut next) = (None, None);
        for entry in Dir::read_from(&self.dir)? {
            match parse_segment_name(entry?.file_name().to_bytes()) {
                Some(start) if start <= self.offset => holding = holding.max(Some(start)),
                Some(start) => next = Some(next.map_or(start, |n: u64| n.min(start))),
                None => {}
            }
        }
        Ok(match (&self.segment, holding) {
            (None, Some(start)) => Some(start),
            (Some(open), Some(start)) if start > open.start => Some(start),
            _ => next,
        })
    }
}

/// Reads until `buf` is full or the file ends.
fn read_at(file: &File, buf: &mut [u8], place: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], place.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Keeps a status beside the log, whole or not at all.
pub fn write_status(dir: &Path, status: &ExecStatus) -> io::Result<()> {
    let dir = open_dir(dir)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(&dir, STATUS_NEW, flags, Mode::RUSR | Mode::WUSR)?);
    keep_as(&dir, &file)?;
    file.write_all(&serde_json::to_vec(status)?)?;
    Ok(renameat(&dir, STATUS_NEW, &dir, STATUS)?)
}

/// The status beside a log; `None` when there is no such execution.
pub fn read_status(dir: &Path) -> io::Result<Option<ExecStatus>> {
    let file = match open_dir(dir).and_then(|dir| open_file(&dir, STATUS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut text = Vec::new();
    file.take(STATUS_BYTES_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > STATUS_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a status that long is not ours"));
    }
    Ok(Some(serde_json::from_slice(&text)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes whose value tells their offset.
    fn pattern(from: u64, length: usize) -> Vec<u8> {
        (from..from + length as u64).map(|at| (at.wrapping_mul(31) ^ (at >> 8)) as u8).collect()
    }

    type Chunks = Vec<(u64, Vec<u8>)>;
    type Cuts = Vec<(u64, u64)>;

    fn read_all(dir: &Path, offset: u64) -> (Chunks, Cuts, u64) {
        let mut reader = Reader::open(dir, offset).unwrap();
        let (mut chunks, mut cuts, mut buf) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(item) = reader.next(&mut buf).unwrap() {
            match item {
                Item::Chunk { header, data } => chunks.push((header.offset, data.to_vec())),
                Item::Cut { from, to } => cuts.push((from, to)),
            }
        }
        (chunks, cuts, reader.offset())
    }

    fn disk_bytes(dir: &Path) -> u64 {
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn readers_get_the_kept_bytes_in_order(
            lengths in prop::collection::vec(1_usize..700, 0..60),
            segment_bytes in 13_u64..600,
            segments in 3_u64..8,
            offset in 0_u64..20_000,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let bound = segment_bytes * segments;
            let mut log = Log::with_segments(dir.path(), bound, segment_bytes).unwrap();
            for length in lengths {
                let data = pattern(log.offset(), length);
                log.append(Stream::Stdout, 7, &data);
                prop_assert!(disk_bytes(dir.path()) <= bound);
            }
            let (chunks, cuts, end) = read_all(dir.path(), offset);
            let total = log.offset();
            // Chunks and cuts cover everything from the offset on, once, in order.
            let mut pieces: Vec<(u64, u64)> = cuts.clone();
            for (at, data) in &chunks {
                prop_assert_eq!(data, &pattern(*at, data.len()));
                pieces.push((*at, at + data.len() as u64));
            }
            pieces.sort_unstable();
            let mut at = offset;
            for (from, to) in pieces {
                prop_assert_eq!(from, at);
                prop_assert!(to > from);
                at = to;
            }
            prop_assert_eq!(at, total.max(offset));
            prop_assert_eq!(end, total.max(offset));
            // Nothing is missing that is on disk, and the head always is.
            if offset == 0 && total > 0 {
                prop_assert_eq!(chunks[0].0, 0);
                prop_assert!(cuts.len() <= 1);
            }
        }

        #[test]
        fn no_content_breaks_the_reader(content: Vec<u8>, start in 0_u64..300, offset in 0_u64..400) {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(segment_name(start)), content).unwrap();
            read_all(dir.path(), offset);
        }

        #[test]
        fn no_offset_breaks_the_reader(
            starts in prop::collection::vec(prop_oneof![any::<u64>(), Just(u64::MAX), Just(u64::MAX - 3), 0..9_u64], 1..4),
            lengths in prop::collection::vec(1_usize..9, 0..4),
            offset in prop_oneof![any::<u64>(), Just(u64::MAX), Just(u64::MAX - 1), Just(0)],
        ) {
            let dir = tempfile::tempdir().unwrap();
            for start in starts {
                let records = lengths.iter().flat_map(|&length| {
                    [encode_record_header(Stream::Stdout, length, u64::MAX).to_vec(), vec![1; length]].concat()
                });
                std::fs::write(dir.path().join(segment_name(start)), records.collect::<Vec<_>>()).unwrap();
            }
            let (chunks, cuts, end) = read_all(dir.path(), offset);
            // Whatever was found lies between the offset and the end, in order.
            for (from, to) in cuts.into_iter().chain(chunks.iter().map(|(at, data)| (*at, *at + data.len() as u64))) {
                prop_assert!(offset <= from && from < to && to <= end);
            }
        }

        #[test]
        fn a_torn_tail_loses_only_the_tail(cut in 0_usize..40) {
            let dir = tempfile::tempdir().unwrap();
            let mut log = Log::create(dir.path(), 1 << 20).unwrap();
            log.append(Stream::Stdout, 1, b"one");
            log.append(Stream::Stderr, 2, b"two and more");
            let path = dir.path().join(segment_name(0));
            let whole = std::fs::read(&path).unwrap();
            std::fs::write(&path, &whole[..whole.len().saturating_sub(cut)]).unwrap();
            let (chunks, cuts, _) = read_all(dir.path(), 0);
            let expected: &[&[u8]] = match cut { 0 => &[b"one", b"two and more"], 1..=24 => &[b"one"], _ => &[] };
            prop_assert_eq!(chunks.iter().map(|(_, d)| d.as_slice()).collect::<Vec<_>>(), expected);
            prop_assert!(cuts.is_empty());
        }
    }

    #[test]
    fn a_reader_at_the_end_goes_on_later() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log::with_segments(dir.path(), 300, 40).unwrap();
        let mut reader = Reader::open(dir.path(), 0).unwrap();
        let mut buf = Vec::new();
        assert_eq!(reader.next(&mut buf).unwrap(), None);
        for round in 0..50_u64 {
            log.append(Stream::Stdout, round, &pattern(round * 5, 5));
            let Some(Item::Chunk { header, data }) = reader.next(&mut buf).unwrap() else { panic!("round {round}") };
            assert_eq!((header.offset, header.at_ms, data), (round * 5, round, pattern(round * 5, 5).as_slice()));
            assert_eq!(reader.next(&mut buf).unwrap(), None);
        }
    }

    #[test]
    fn what_could_not_be_written_is_a_cut() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log::create(dir.path(), 1 << 20).unwrap();
        log.append(Stream::Stdout, 1, b"before");
        // A directory in the way of the next segment stands in for a full disk.
        log.current = None;
        let obstacle = dir.path().join(segment_name(6));
        std::fs::create_dir(&obstacle).unwrap();
        log.append(Stream::Stdout, 2, b"lost");
        std::fs::remove_dir(&obstacle).unwrap();
        log.append(Stream::Stdout, 3, b"after");
        let (chunks, cuts, end) = read_all(dir.path(), 0);
        assert_eq!(chunks, [(0, b"before".to_vec()), (10, b"after".to_vec())]);
        assert_eq!((cuts, end), (vec![(6, 10)], 15));
        let mut reader = Reader::open(dir.path(), 15).unwrap();
        assert_eq!(reader.finish(20), Some(Item::Cut { from: 15, to: 20 }));
        assert_eq!(reader.finish(20), None);
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join(segment_name(0))).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join(STATUS)).unwrap();
        assert!(Reader::open(dir.path(), 0).unwrap().next(&mut Vec::new()).is_err());
        assert!(read_status(dir.path()).is_err());
        assert_eq!(read_status(&dir.path().join("absent")).unwrap(), None);
    }

    #[test]
    fn nothing_in_the_place_of_a_segment_is_waited_for() {
        let hostile: [fn(&Path); 3] = [
            |path| assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success()),
            |path| std::fs::create_dir(path).unwrap(),
            |path| std::os::unix::fs::symlink("gone", path).unwrap(),
        ];
        for make in hostile {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("000000000000000G.log"), "no segment").unwrap();
            std::fs::write(dir.path().join("00.log"), "no segment").unwrap();
            assert_eq!(read_all(dir.path(), 0), (vec![], vec![], 0));
            make(&dir.path().join(segment_name(0)));
            assert!(Reader::open(dir.path(), 0).unwrap().next(&mut Vec::new()).is_err());
            make(&dir.path().join(STATUS));
            assert!(read_status(dir.path()).is_err());
        }
        let dir = tempfile::tempdir().unwrap();
        let huge = File::create(dir.path().join(STATUS)).unwrap();
        huge.set_len(1 << 40).unwrap();
        assert!(read_status(dir.path()).is_err());
    }

    #[test]
    fn a_status_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let status = ExecStatus {
            id: "exe_a".parse().unwrap(),
            state: viv_core::exec::ExecState::Signalled { signal: 15 },
            started_at_ms: 1,
            ended_at_ms: Some(2),
            output_bytes: 3,
            stdin_bytes: 4,
            pid: None,
            argv: vec!["sh".to_owned()],
            detached: true,
        };
        write_status(dir.path(), &status).unwrap();
        assert_eq!(read_status(dir.path()).unwrap(), Some(status));
    }
}
