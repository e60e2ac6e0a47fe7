//! Which page of a dump was where: CRIU's `pagemap-*.img`, one for each process and each piece of shared memory.
//!
//! ```text
//!   pagemap-7.img        pages of number 1: 3 from 0x1000 on, 2 from 0x9000 on, …
//!   pages-1.img          0x1000 │ 0x2000 │ 0x3000 │ 0x9000 │ 0xa000 │ …
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use super::frames::{FRAMES, Packed};
use super::wire::{Value, bad, fields, messages};

/// The unit of dumps, and of what is compared.
pub(super) const PAGE_BYTES: u64 = 4096;

/// Largest list that is read, of more entries than a process may have mappings.
const IMAGE_BYTES_MAX: u64 = 16 << 20;

const NAME: &str = "pagemap-";
const OF_SHARED: &str = "shmem-";
const ENDING: &str = ".img";

/// The numbers of the fields: of the first message, which names the pages, and of the others.
const PAGES_ID: u64 = 1;
const ADDRESS: u64 = 1;
const COUNT_BEFORE: u64 = 2;
const IN_PARENT: u64 = 3;
const FLAGS: u64 = 4;
const COUNT: u64 = 5;

/// What flags say: that pages are in another dump, and that they are in this one.
const FLAG_PARENT: u64 = 1;
const FLAG_PRESENT: u64 = 4;

/// Whose pages they are. Shared memory has another number after every restore, and is known by its place among others.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Process(u64),
    Shared(usize),
}

/// Pages in a row, in memory and in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// In pages.
    pub(super) address: u64,
    /// In pages.
    pub(super) at: u64,
    pub(super) count: u64,
}

/// Where the pages of one owner are.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PageMap {
    /// The file that has them.
    pub(super) pages: String,
    /// By address, without overlap.
    pub(super) rows: Vec<Row>,
}

impl PageMap {
    pub(super) fn count(&self) -> u64 {
        self.rows.last().map_or(0, |row| row.at + row.count)
    }
}

/// All of a dump. What is not understood is left out.
pub(super) fn read_all(images: &Path) -> io::Result<BTreeMap<Owner, PageMap>> {
    let (mut found, mut shared) = (BTreeMap::new(), BTreeMap::new());
    for entry in fs::read_dir(images)? {
        let name = entry?.file_name();
        let Some(name) = name.to_str() else { continue };
        let plain = name.strip_suffix(FRAMES).unwrap_or(name);
        let Some(of) = plain.strip_prefix(NAME).and_then(|name| name.strip_suffix(ENDING)) else { continue };
        let Ok(map) = read(&images.join(plain)).and_then(|image| parse(&image)) else { continue };
        match of.strip_prefix(OF_SHARED) {
            Some(number) => drop(number.parse::<u64>().map(|number| shared.insert(number, map))),
            None => drop(of.parse().map(|pid| found.insert(Owner::Process(pid), map))),
        }
    }
    found.extend(shared.into_values().enumerate().map(|(nth, map)| (Owner::Shared(nth), map)));
    Ok(found)
}

/// An image, packed or not.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let too_large = || bad("an image is too large");
    match fs::metadata(path) {
        Ok(found) if found.len() > IMAGE_BYTES_MAX => Err(too_large()),
        Ok(_) => fs::read(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let packed = Packed::open(path)?;
            if packed.bytes() > IMAGE_BYTES_MAX {
                return Err(too_large());
            }
            let mut image = vec![0; packed.bytes() as usize];
            packed.reader().read(0, &mut image)?;
            Ok(image)
        }
        Err(error) => Err(error),
    }
}

fn parse(image: &[u8]) -> io::Result<PageMap> {
    let mut pages = None;
    let mut rows: Vec<Row> = Vec::new();
    let mut at = 0_u64;
    messages(image, |message| {
        let mut known = [None; 6];
        fields(message, |field| {
            if let (Some(known), Value::Number(number)) = (known.get_mut(field.number as usize), field.value) {
                *known = Some(number);
            }
            Ok(())
        })?;
        let of = |number: u64| known[number as usize];
        if pages.is_none() {
            pages = Some(of(PAGES_ID).ok_or_else(|| bad("pages without a number"))?);
            return Ok(());
        }
        let is_elsewhere = of(IN_PARENT).is_some_and(|is| is != 0);
        let flags = of(FLAGS).unwrap_or(if is_elsewhere { FLAG_PARENT } else { FLAG_PRESENT });
        if is_elsewhere || flags & FLAG_PARENT != 0 {
            return Err(bad("pages of another dump"));
        }
        if flags & FLAG_PRESENT == 0 {
            return Ok(());
        }
        let address = of(ADDRESS).filter(|address| address % PAGE_BYTES == 0);
        let address = address.ok_or_else(|| bad("pages without an address"))? / PAGE_BYTES;
        let count = of(COUNT).or(of(COUNT_BEFORE)).ok_or_else(|| bad("pages without a count"))?;
        let is_in_order = rows.last().is_none_or(|row| row.address + row.count <= address);
        // More than there are addresses would be none of ours.
        if !is_in_order || count > u64::MAX / PAGE_BYTES - address {
            return Err(bad("pages that are not in their order"));
        }
        rows.push(Row { address, at, count });
        at += count;
        Ok(())
    })?;
    let pages = pages.ok_or_else(|| bad("an empty list of pages"))?;
    Ok(PageMap { pages: format!("pages-{pages}.img"), rows })
}

/// The rows of a list, each as address, place and count. For fuzzing.
pub(crate) fn rows_of(image: &[u8]) -> io::Result<Vec<(u64, u64, u64)>> {
    Ok(parse(image)?.rows.iter().map(|row| (row.address, row.at, row.count)).collect())
}

/// A list as CRIU writes it: `(address in pages, count)`.
#[cfg(test)]
pub(super) fn image_of(pages: u64, rows: &[(u64, u64)]) -> Vec<u8> {
    use super::wire::write_number;
    let mut image = b"magicsof".to_vec();
    let mut add = |fields: &[(u64, u64)]| {
        let mut message = Vec::new();
        for (number, value) in fields {
            write_number(&mut message, number << 3);
            write_number(&mut message, *value);
        }
        image.extend((message.len() as u32).to_le_bytes());
        image.extend(message);
    };
    add(&[(PAGES_ID, pages)]);
    for (address, count) in rows {
        add(&[(ADDRESS, address * PAGE_BYTES), (FLAGS, FLAG_PRESENT), (COUNT, *count)]);
    }
    image
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_found_by_whose_and_where_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, image: &[u8]| fs::write(folder.path().join(name), image).unwrap();
        write("pagemap-7.img", &image_of(1, &[(16, 3), (100, 2)]));
        write("pagemap-shmem-9000.img", &image_of(3, &[(0, 1)]));
        write("pagemap-shmem-12.img", &image_of(2, &[(5, 1)]));
        write("core-7.img", b"something else");
        write("pagemap-8.img", b"torn");
        let found = read_all(folder.path()).unwrap();
        assert_eq!(found.len(), 3);
        let rows = vec![Row { address: 16, at: 0, count: 3 }, Row { address: 100, at: 3, count: 2 }];
        let of_process = &found[&Owner::Process(7)];
        assert_eq!((&of_process.rows, of_process.pages.as_str(), of_process.count()), (&rows, "pages-1.img", 5));
        assert_eq!(found[&Owner::Shared(0)].pages, "pages-2.img");
        assert_eq!(found[&Owner::Shared(1)].pages, "pages-3.img");
    }

    #[test]
    fn lists_that_are_not_understood_are_refused() {
        assert!(parse(&image_of(1, &[(16, 3), (19, 1)])).is_ok());
        assert!(parse(&image_of(1, &[(16, 3), (18, 1)])).is_err(), "one page twice");
        assert!(parse(&image_of(1, &[(16, u64::MAX)])).is_err(), "more than there are");
        assert!(parse(b"magicsof").is_err(), "nothing at all");
        let whole = image_of(1, &[(16, 3)]);
        assert!(parse(&whole[..whole.len() - 1]).is_err(), "torn");
    }
}
