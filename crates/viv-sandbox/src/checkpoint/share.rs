//! Dumps that share pages with an earlier one: what a fork, or whoever went on from a dump that stays, has in common with it.
//!
//! ```text
//!   earlier   images/pages-1.img.zst ◄─────────┐ one file with two names: it goes with the last
//!             images/pages-1.img.frames ◄────┐ │
//!   this one  images/base/pages-3.img.frames ┘ │
//!             images/base/pages-3.img.zst ─────┘
//!             images/pages-3.img.zst, .frames    the pages that are its own, packed
//!             images/pages-3.img.shared          which pages are the other's, and where they are there
//! ```
//!
//! Pages are compared with those that the same process had at the same address, by their bytes; where they are looked for
//! decides about nothing else. What is shared with is a file that was packed whole: whoever shares with one that shares
//! itself links to the same file, so nothing is ever more than one step away. Every frame's digest is kept, and compared
//! when it is put together again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use viv_layer::Digest;

use super::frames::{self, FRAME_BYTES, FRAMES, PACKED, Packed, in_parallel, with};
use super::pack::write_sparsely;
use super::pagemap::{self, PAGE_BYTES, PageMap, Row};
use super::wire::bad;
use crate::durable;

/// In a folder of images: what is shared with others, linked.
pub(super) const BASE: &str = "base";
pub(super) const SHARED: &str = ".shared";

/// Sharing pays when no more than this part of the pages is a dump's own. With more of them, and once the others have gone,
/// it would hold half as much again as it needs.
const OWN_PART_MAX: u64 = 2;

/// What is shared with may be so many times as large: it has to be kept for as long as any page of it is used.
const BASE_TIMES_MAX: u64 = 2;

/// Most runs of pages: so many are a list of some megabytes. Memory that is cut smaller is packed whole.
const RUNS_MAX: usize = 1 << 18;

/// Longest list of runs and digests: that many runs, and the digests of a hundred gigabytes.
const SHARED_BYTES_MAX: u64 = 16 << 20;

/// The dump that somebody went on from.
#[derive(Debug)]
pub(crate) struct Earlier {
    pub(crate) images: PathBuf,
    /// Whether it stays though whoever went on from it is saved again. Otherwise only what others link to is shared.
    pub(crate) stays: bool,
}

/// Pages in a row that are the other's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Run {
    page: u64,
    /// Where they are there.
    at: u64,
    count: u64,
}

impl Run {
    fn end(&self) -> u64 {
        self.page + self.count
    }
}

/// What is kept in the place of a file that shares pages.
#[derive(Debug, Serialize, Deserialize)]
struct Shared {
    /// How long it was.
    bytes: u64,
    /// Of its frames, as they were.
    digests: Vec<Digest>,
    /// In their order. All other pages are its own, packed one after the other.
    runs: Vec<Run>,
}

/// Where the pages of a file may be found.
#[derive(Debug)]
pub(super) struct Candidate {
    /// A file that was packed whole.
    packed: PathBuf,
    runs: Vec<Run>,
}

/// A file that is to be packed as what differs.
#[derive(Debug)]
pub(super) struct Difference {
    base: PathBuf,
    shared: Shared,
}

/// For files of a dump, by name: where their pages may be found in an earlier one. What is not understood is left out.
pub(super) fn candidates(images: &Path, earlier: &Earlier) -> io::Result<BTreeMap<String, Candidate>> {
    let before = pagemap::read_all(&earlier.images)?;
    let mut found = BTreeMap::new();
    for (owner, now) in pagemap::read_all(images)? {
        let Some(before) = before.get(&owner) else { continue };
        // One that was packed when this was done before is not there.
        let Ok(bytes) = fs::metadata(images.join(&now.pages)).map(|found| found.len()) else { continue };
        if now.count() * PAGE_BYTES != bytes {
            continue;
        }
        let Ok(Some((packed, rows))) = whole_rows(earlier, before) else { continue };
        let runs = meet(&now.rows, &rows);
        found.insert(now.pages, Candidate { packed, runs });
    }
    Ok(found)
}

/// The file of an earlier dump that was packed whole, and which addresses are where in it. None when nobody else keeps it.
fn whole_rows(earlier: &Earlier, map: &PageMap) -> io::Result<Option<(PathBuf, Vec<Row>)>> {
    let path = earlier.images.join(&map.pages);
    let (packed, rows) = match read(&path)? {
        Some((shared, _)) => {
            let rows = map.rows.iter().flat_map(|row| {
                within(&shared.runs, row.at..row.at + row.count).map(|run| Row {
                    address: row.address + (run.page - row.at),
                    at: run.at,
                    count: run.count,
                })
            });
            (base_of(&path), rows.collect())
        }
        None => (path, map.rows.clone()),
    };
    let links = fs::metadata(with(&packed, PACKED))?.nlink();
    Ok((earlier.stays || links > 1).then_some((packed, rows)))
}

/// Pages that have the same address in both.
fn meet(ours: &[Row], theirs: &[Row]) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut theirs = theirs.iter().peekable();
    for our in ours {
        let our_end = our.address + our.count;
        while let Some(their) = theirs.peek() {
            let their_end = their.address + their.count;
            let (from, to) = (our.address.max(their.address), our_end.min(their_end));
            if from < to {
                let (page, at) = (our.at + (from - our.address), their.at + (from - their.address));
                runs.push(Run { page, at, count: to - from });
            }
            if their_end > our_end {
                break;
            }
            theirs.next();
        }
    }
    runs
}

/// What is of these pages, in order.
fn within(runs: &[Run], pages: Range<u64>) -> impl Iterator<Item = Run> {
    let first = runs.partition_point(|run| run.end() <= pages.start);
    runs[first..].iter().take_while(move |run| run.page < pages.end).map(move |run| {
        let page = run.page.max(pages.start);
        Run { page, at: run.at + (page - run.page), count: run.end().min(pages.end) - page }
    })
}

/// What is in none of the runs, each with its place among all of those.
fn gaps(runs: &[Run], pages: u64) -> Vec<Run> {
    let (mut gaps, mut next, mut at) = (Vec::new(), 0, 0);
    let end = Run { page: pages, at: 0, count: 0 };
    for run in runs.iter().chain([&end]) {
        if run.page > next {
            let count = run.page - next;
            gaps.push(Run { page: next, at, count });
            at += count;
        }
        next = run.end();
    }
    gaps
}

fn pages_of(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.count).sum()
}

/// Compares a file with where its pages may be; none when sharing does not pay.
pub(super) fn compare(path: &Path, candidate: &Candidate) -> io::Result<Option<Difference>> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let pages = bytes / PAGE_BYTES;
    let base = Packed::open(&candidate.packed)?;
    let own_max = pages / OWN_PART_MAX;
    if base.bytes() / BASE_TIMES_MAX > bytes || pages - pages_of(&candidate.runs).min(pages) > own_max {
        return Ok(None);
    }
    let own = AtomicU64::new(0);
    let frames: Vec<Mutex<(Vec<Run>, Option<Digest>)>> = (0..frames::count(bytes)?).map(|_| Mutex::default()).collect();
    in_parallel(
        frames.len(),
        || (base.reader(), Vec::new()),
        |(reader, theirs), nth| {
            if own.load(Ordering::Relaxed) > own_max {
                return Ok(());
            }
            let (start, content) = read_frame(&file, bytes, nth)?;
            let mut same = Same::default();
            let first = start / PAGE_BYTES;
            for run in within(&candidate.runs, first..first + content.len() as u64 / PAGE_BYTES) {
                theirs.resize((run.count * PAGE_BYTES) as usize, 0);
                reader.read(run.at * PAGE_BYTES, theirs)?;
                let ours = &content[((run.page - first) * PAGE_BYTES) as usize..];
                let (ours, theirs) = (ours.chunks(PAGE_BYTES as usize), theirs.chunks(PAGE_BYTES as usize));
                for (nth, _) in (0_u64..).zip(ours.zip(theirs)).filter(|(_, (ours, theirs))| ours == theirs) {
                    same.push(Run { page: run.page + nth, at: run.at + nth, count: 1 });
                }
            }
            own.fetch_add(content.len() as u64 / PAGE_BYTES - pages_of(&same.0), Ordering::Relaxed);
            *frames[nth].lock().expect("nobody panics with it") = (same.0, Some(Digest::of(&content)));
            Ok(())
        },
    )?;
    let (mut all, mut digests) = (Same::default(), Vec::with_capacity(frames.len()));
    for frame in frames {
        let (runs, digest) = frame.into_inner().expect("nobody panics with it");
        for run in runs {
            all.push(run);
        }
        digests.extend(digest);
    }
    let Same(runs) = all;
    if own.into_inner() > own_max || runs.len() > RUNS_MAX {
        return Ok(None);
    }
    Ok(Some(Difference { base: candidate.packed.clone(), shared: Shared { bytes, digests, runs } }))
}

/// Runs that grow with what is next to them.
#[derive(Default)]
struct Same(Vec<Run>);

impl Same {
    fn push(&mut self, run: Run) {
        match self.0.last_mut() {
            Some(last) if (last.end(), last.at + last.count) == (run.page, run.at) => last.count += run.count,
            Some(_) | None => self.0.push(run),
        }
    }
}

fn read_frame(file: &File, bytes: u64, nth: usize) -> io::Result<(u64, Vec<u8>)> {
    let start = nth as u64 * FRAME_BYTES as u64;
    let mut content = vec![0; FRAME_BYTES.min((bytes - start) as usize)];
    file.read_exact_at(&mut content, start)?;
    Ok((start, content))
}

/// Where what a file shares is linked.
fn base_of(path: &Path) -> PathBuf {
    let folder = path.parent().expect("a file has a folder").join(BASE);
    folder.join(path.file_name().expect("a file has a name"))
}

/// Packs the pages that differ, and links the others.
pub(super) fn write(path: &Path, Difference { base, shared }: &Difference) -> io::Result<()> {
    let link = base_of(path);
    fs::create_dir_all(link.parent().expect("it is in a folder"))?;
    for ending in [PACKED, FRAMES] {
        fs::hard_link(with(base, ending), with(&link, ending))?;
    }
    let file = File::open(path)?;
    let gaps = gaps(&shared.runs, shared.bytes / PAGE_BYTES);
    frames::write(path, pages_of(&gaps) * PAGE_BYTES, |start, into| {
        let own = start / PAGE_BYTES..(start + into.len() as u64) / PAGE_BYTES;
        let first = gaps.partition_point(|gap| gap.at + gap.count <= own.start);
        let mut into = into;
        for gap in gaps[first..].iter().take_while(|gap| gap.at < own.end) {
            let from = gap.at.max(own.start);
            let count = (gap.at + gap.count).min(own.end) - from;
            let (some, rest) = into.split_at_mut((count * PAGE_BYTES) as usize);
            file.read_exact_at(some, (gap.page + from - gap.at) * PAGE_BYTES)?;
            into = rest;
        }
        Ok(())
    })?;
    durable::replace_json_within(&with(path, SHARED), shared, SHARED_BYTES_MAX)
}

/// Takes away what is linked for a file. Never written to: it is others' too.
pub(super) fn clear(path: &Path) {
    let link = base_of(path);
    for name in [with(path, SHARED), with(&link, PACKED), with(&link, FRAMES)] {
        let _ = fs::remove_file(name);
    }
    // With the last one in it.
    let _ = fs::remove_dir(link.parent().expect("it is in a folder"));
}

/// What is kept of a file that shares pages, and what it shares them with; none when it shares none.
fn read(path: &Path) -> io::Result<Option<(Shared, Packed)>> {
    let known: Option<Shared> = durable::read_json_within(&with(path, SHARED), SHARED_BYTES_MAX)?;
    let Some(shared) = known else { return Ok(None) };
    let base = Packed::open(&base_of(path))?;
    let (pages, base_pages) = (shared.bytes / PAGE_BYTES, base.bytes() / PAGE_BYTES);
    let mut next = 0;
    for run in &shared.runs {
        let is_within = |first: u64, pages: u64| first.checked_add(run.count).is_some_and(|end| end <= pages);
        if run.page < next || !is_within(run.page, pages) || !is_within(run.at, base_pages) {
            return Err(bad("it shares pages that are not there"));
        }
        next = run.end();
    }
    Ok(Some((shared, base)))
}

/// Puts a file together that shares pages; false when it shares none.
pub(super) fn unpack(path: &Path, to: &Path) -> io::Result<bool> {
    let Some((Shared { bytes, digests, runs }, base)) = read(path)? else { return Ok(false) };
    let (own, pages) = (Packed::open(path)?, bytes / PAGE_BYTES);
    let gaps = gaps(&runs, pages);
    let is_whole = bytes % PAGE_BYTES == 0 && pages_of(&gaps) * PAGE_BYTES == own.bytes();
    if !is_whole || digests.len() != frames::count(bytes)? {
        return Err(bad("it has another form"));
    }
    let plain = File::create_new(to)?;
    plain.set_len(bytes)?;
    in_parallel(
        digests.len(),
        || (own.reader(), base.reader()),
        |(own, base), nth| {
            let start = nth as u64 * FRAME_BYTES as u64;
            let mut content = vec![0; FRAME_BYTES.min((bytes - start) as usize)];
            let first = start / PAGE_BYTES;
            let pages = first..first + content.len() as u64 / PAGE_BYTES;
            for (runs, reader) in [(&gaps, own), (&runs, base)] {
                for run in within(runs, pages.clone()) {
                    let into = &mut content[((run.page - first) * PAGE_BYTES) as usize..];
                    reader.read(run.at * PAGE_BYTES, &mut into[..(run.count * PAGE_BYTES) as usize])?;
                }
            }
            if Digest::of(&content) != digests[nth] {
                return Err(bad("what is put together is not what was dumped"));
            }
            write_sparsely(&plain, &content, start)
        },
    )?;
    Ok(true)
}

/// What a folder of images has on disk that others have too.
pub(super) fn shared_bytes(images: &Path) -> u64 {
    let files = [images.to_owned(), images.join(BASE)].into_iter().filter_map(|folder| fs::read_dir(folder).ok());
    let files = files.flatten().flatten().filter_map(|entry| {
        let name = entry.file_name();
        let is_packed = [PACKED, FRAMES].iter().any(|ending| name.to_string_lossy().ends_with(ending));
        entry.metadata().ok().filter(|found| is_packed && found.is_file() && found.nlink() > 1)
    });
    files.map(|found| found.blocks() * 512).sum()
}

#[cfg(test)]
mod tests;
