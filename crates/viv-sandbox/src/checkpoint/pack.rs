//! Images small on disk: compressed by all processors, and without their empty pages.
//!
//! ```text
//!   images/pages-1.img          4 MiB │ 4 MiB │ …          as CRIU wrote it, until it is packed
//!   images/pages-1.img.zst      frame │ frame │ …          what `zstd -d` reads too
//!   images/pages-1.img.frames   how long each is           written before the other is put in place
//! ```
//!
//! Every frame stands alone, so that any number of threads pack and unpack. CRIU reads plain files, so what is restored is
//! unpacked first, with a hole for every empty page. What cannot be packed, because the disk is full for example, stays as
//! it is: that is no reason to lose a memory.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde::{Deserialize, Serialize};

use crate::durable;

/// How much is packed at a time: large enough to be packed well, small enough for many threads.
const FRAME_BYTES: usize = 4 << 20;

/// Smaller files are not worth it.
const BYTES_MIN: u64 = 64 << 10;

/// The quickest that there is: what is packed is read once, or never.
const LEVEL: i32 = 1;

/// Most threads. Disks are not quicker than these.
const THREADS_MAX: usize = 8;

/// Frames that are held in memory at a time, for each thread.
const AHEAD: usize = 4;

/// What is looked at for being empty.
const PAGE_BYTES: usize = 4096;

const PACKED: &str = ".zst";
const FRAMES: &str = ".frames";

/// Longest list of frames: of some terabytes.
const FRAMES_BYTES_MAX: u64 = 16 << 20;

/// A packed file.
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

fn with(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

/// Packs what is large among the files of a folder. Repeated, it goes on with what is left.
pub(crate) fn pack(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let ours = [PACKED, FRAMES].iter().any(|ending| path.to_string_lossy().ends_with(ending));
        if !ours && entry.file_type()?.is_file() && entry.metadata()?.len() >= BYTES_MIN {
            pack_file(&path).inspect_err(|_| {
                for ending in [PACKED, FRAMES] {
                    let _ = fs::remove_file(with(&path, ending));
                }
            })?;
        }
    }
    Ok(())
}

fn pack_file(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let count = usize::try_from(bytes.div_ceil(FRAME_BYTES as u64)).map_err(io::Error::other)?;
    let mut packed = File::create(with(path, PACKED))?;
    let mut frames = Vec::with_capacity(count);
    let at_once = threads() * AHEAD;
    for first in (0..count).step_by(at_once) {
        let some = first..count.min(first + at_once);
        let done: Vec<Mutex<Vec<u8>>> = some.clone().map(|_| Mutex::default()).collect();
        in_parallel(some.len(), |nth| {
            let start = (first + nth) as u64 * FRAME_BYTES as u64;
            let mut plain = vec![0; FRAME_BYTES.min((bytes - start) as usize)];
            file.read_exact_at(&mut plain, start)?;
            *done[nth].lock().expect("nobody panics with it") = zstd::bulk::compress(&plain, LEVEL)?;
            Ok(())
        })?;
        for frame in done {
            let frame = frame.into_inner().expect("nobody panics with it");
            packed.write_all(&frame)?;
            frames.push(frame.len() as u64);
        }
    }
    let frames = Frames { bytes, frame_bytes: FRAME_BYTES, packed_bytes: frames };
    durable::replace_json_within(&with(path, FRAMES), &frames, FRAMES_BYTES_MAX)?;
    // From here on that is it; it is durable together with everything else.
    fs::remove_file(path)
}

/// Has some threads do it for every number below this.
fn in_parallel(count: usize, work: impl Fn(usize) -> io::Result<()> + Sync) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            if nth >= count {
                return Ok(());
            }
            work(nth)?;
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

/// Puts every file of a folder into another one as it was before it was packed. Those that were not are linked.
pub(crate) fn unpack(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if text.ends_with(PACKED) || !entry.file_type()?.is_file() {
            continue;
        }
        if let Some(plain) = text.strip_suffix(FRAMES) {
            let source = from.join(plain);
            // One that is there was not packed after all.
            if !source.exists() {
                unpack_file(&source, &to.join(plain))?;
            }
        } else if fs::hard_link(entry.path(), to.join(&name)).is_err() {
            fs::copy(entry.path(), to.join(&name))?;
        }
    }
    Ok(())
}

fn unpack_file(from: &Path, to: &Path) -> io::Result<()> {
    let known: Option<Frames> = durable::read_json_within(&with(from, FRAMES), FRAMES_BYTES_MAX)?;
    let Frames { bytes, frame_bytes, packed_bytes: frames } = known.ok_or(io::ErrorKind::NotFound)?;
    let bad = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
    let count = bytes.div_ceil((frame_bytes as u64).max(1));
    if frame_bytes > FRAME_BYTES || frames.len() as u64 != count {
        return Err(bad("it has another form"));
    }
    let mut starts = Vec::with_capacity(frames.len());
    let mut at = 0_u64;
    for length in &frames {
        // What does not shrink grows by little.
        if *length > 2 * FRAME_BYTES as u64 {
            return Err(bad("a frame is too long"));
        }
        starts.push(at);
        at += length;
    }
    let packed = File::open(with(from, PACKED))?;
    let plain = File::create_new(to)?;
    plain.set_len(bytes)?;
    in_parallel(frames.len(), |nth| {
        let mut frame = vec![0; frames[nth] as usize];
        packed.read_exact_at(&mut frame, starts[nth])?;
        let start = nth as u64 * frame_bytes as u64;
        let expected = frame_bytes.min((bytes - start) as usize);
        let content = zstd::bulk::decompress(&frame, expected)?;
        if content.len() != expected {
            return Err(bad("a frame holds less than it should"));
        }
        write_sparsely(&plain, &content, start)
    })
}

/// Writes what is not empty: the file has holes everywhere else.
fn write_sparsely(file: &File, content: &[u8], start: u64) -> io::Result<()> {
    const EMPTY: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
    let is_empty = |page: &[u8]| *page == EMPTY[..page.len()];
    let mut from = None;
    for (nth, page) in content.chunks(PAGE_BYTES).enumerate() {
        let at = nth * PAGE_BYTES;
        match (is_empty(page), from) {
            (true, Some(begun)) => {
                file.write_all_at(&content[begun..at], start + begun as u64)?;
                from = None;
            }
            (false, None) => from = Some(at),
            (true, None) | (false, Some(_)) => {}
        }
    }
    from.map_or(Ok(()), |begun| file.write_all_at(&content[begun..], start + begun as u64))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// Pages that are empty, alike, and alike nothing, with a crooked end.
    fn content(bytes: usize) -> Vec<u8> {
        let mut seed = 1_u64;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as u8
        };
        let mut content = vec![0; bytes];
        for (nth, page) in content.chunks_mut(PAGE_BYTES).enumerate() {
            match nth % 8 {
                0 => page.fill_with(&mut next),
                1 => page.fill(b'x'),
                _ => {}
            }
        }
        content
    }

    #[test]
    fn what_was_packed_is_unpacked_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&to).unwrap();
        let large = content(9 * FRAME_BYTES + 12_345);
        fs::write(from.join("pages-1.img"), &large).unwrap();
        fs::write(from.join("core-1.img"), b"little").unwrap();
        fs::write(from.join("pages-2.img"), vec![0; FRAME_BYTES]).unwrap();
        pack(&from).unwrap();
        pack(&from).unwrap();
        assert!(!from.join("pages-1.img").exists() && from.join("core-1.img").exists());
        let packed = fs::metadata(from.join("pages-1.img.zst")).unwrap().len();
        assert!(packed < large.len() as u64 / 6, "{packed}");
        unpack(&from, &to).unwrap();
        assert!(fs::read(to.join("pages-1.img")).unwrap() == large);
        assert_eq!(fs::read(to.join("core-1.img")).unwrap(), b"little");
        assert_eq!(fs::read(to.join("pages-2.img")).unwrap(), vec![0; FRAME_BYTES]);
        assert_eq!(fs::read_dir(&to).unwrap().count(), 3);
        let blocks = |name: &str| fs::metadata(to.join(name)).unwrap().blocks() * 512;
        assert!(blocks("pages-2.img") <= 4096 && blocks("pages-1.img") < large.len() as u64 / 2, "holes stay holes");
    }

    #[test]
    fn what_is_damaged_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        for made in [&from, &to] {
            fs::create_dir(made).unwrap();
        }
        fs::write(from.join("pages-1.img"), content(2 * FRAME_BYTES)).unwrap();
        pack(&from).unwrap();
        let packed = from.join("pages-1.img.zst");
        let whole = fs::read(&packed).unwrap();
        fs::write(&packed, &whole[..whole.len() - 1]).unwrap();
        assert!(unpack(&from, &to).is_err());
        fs::remove_file(to.join("pages-1.img")).unwrap();
        fs::write(from.join("pages-1.img.frames"), r#"{"bytes":8388608,"frame_bytes":4194304,"packed_bytes":[9]}"#)
            .unwrap();
        assert!(unpack(&from, &to).is_err());
    }
}
