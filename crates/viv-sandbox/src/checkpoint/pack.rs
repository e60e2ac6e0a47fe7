//! Images small on disk: compressed by all processors, without their empty pages, and without what others have too.
//!
//! ```text
//!   images/pages-1.img          4 MiB │ 4 MiB │ …          as CRIU wrote it, until it is packed
//!   images/pages-1.img.zst      frame │ frame │ …          see [`frames`](super::frames)
//!   images/pages-1.img.frames   how long each is
//!   images/pages-1.img.shared   what is not in them        where an earlier dump has it: see [`share`](super::share)
//! ```
//!
//! CRIU reads plain files, so what is restored is unpacked first, with a hole for every empty page. What cannot be packed,
//! because the disk is full for example, stays as it is: that is no reason to lose a memory. A plain file that is there is
//! what counts, so whoever is killed while packing has lost nothing.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::frames::{self, FRAMES, PACKED, Packed, in_parallel, with};
use super::share::{self, Candidate, Earlier, SHARED};

/// Smaller files are not worth it.
const BYTES_MIN: u64 = 64 << 10;

/// What is looked at for being empty.
const PAGE_BYTES: usize = 4096;

/// Packs what is large among the files of a folder, without the pages that an earlier dump has too where that pays.
/// Repeated, it goes on with what is left.
pub(crate) fn pack(folder: &Path, earlier: Option<&Earlier>) -> io::Result<()> {
    // Whatever is in the way of sharing is not in the way of packing.
    let candidates = earlier.and_then(|earlier| share::candidates(folder, earlier).ok()).unwrap_or_default();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let ours = [PACKED, FRAMES, SHARED].iter().any(|ending| name.ends_with(ending));
        if !ours && entry.file_type()?.is_file() && entry.metadata()?.len() >= BYTES_MIN {
            pack_file(&path, candidates.get(&name)).inspect_err(|_| clear(&path))?;
        }
    }
    Ok(())
}

fn pack_file(path: &Path, candidate: Option<&Candidate>) -> io::Result<()> {
    // Of somebody who did not come further.
    clear(path);
    let difference = candidate.and_then(|candidate| share::compare(path, candidate).ok().flatten());
    let is_shared = difference.is_some_and(|difference| share::write(path, &difference).is_ok());
    if !is_shared {
        clear(path);
        let file = File::open(path)?;
        frames::write(path, file.metadata()?.len(), |start, into| file.read_exact_at(into, start))?;
    }
    // From here on that is it; it is durable together with everything else.
    fs::remove_file(path)
}

/// Takes away what was to be in the place of a file.
fn clear(path: &Path) {
    for ending in [PACKED, FRAMES] {
        let _ = fs::remove_file(with(path, ending));
    }
    share::clear(path);
}

/// Puts every file of a folder into another one as it was before it was packed. Those that were not are linked.
pub(crate) fn unpack(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if [PACKED, SHARED].iter().any(|ending| text.ends_with(ending)) || !entry.file_type()?.is_file() {
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
    if share::unpack(from, to)? {
        return Ok(());
    }
    let packed = Packed::open(from)?;
    let plain = File::create_new(to)?;
    plain.set_len(packed.bytes())?;
    in_parallel(
        packed.count(),
        || (),
        |(), nth| {
            let (start, content) = packed.frame(nth)?;
            write_sparsely(&plain, &content, start)
        },
    )
}

/// Writes what is not empty: the file has holes everywhere else.
pub(super) fn write_sparsely(file: &File, content: &[u8], start: u64) -> io::Result<()> {
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

    use super::super::frames::FRAME_BYTES;
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
        pack(&from, None).unwrap();
        pack(&from, None).unwrap();
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
        pack(&from, None).unwrap();
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
