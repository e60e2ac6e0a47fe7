//! What was shared comes back byte for byte, from whoever has it.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tempfile::TempDir;

use super::super::pack;
use super::*;

/// Pages of one process: what is at which address, by a number. Nothing is at 0.
type Memory = BTreeMap<u64, u16>;

/// Random, so that nobody packs it smaller.
fn page(number: u16) -> Vec<u8> {
    let mut page = vec![0; PAGE_BYTES as usize];
    let mut seed = u64::from(number);
    for word in page.chunks_mut(8) {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(u64::from(number));
        word.copy_from_slice(&(seed ^ seed >> 29).to_le_bytes());
    }
    page
}

fn content(memory: &Memory) -> Vec<u8> {
    memory.values().flat_map(|number| page(*number)).collect()
}

/// Dumps the memory of somebody.
fn add(images: &Path, owner: &str, pages: u64, memory: &Memory) {
    let mut rows: Vec<(u64, u64)> = Vec::new();
    for address in memory.keys() {
        match rows.last_mut() {
            Some((first, count)) if *first + *count == *address => *count += 1,
            Some(_) | None => rows.push((*address, 1)),
        }
    }
    fs::write(images.join(format!("pagemap-{owner}.img")), pagemap::image_of(pages, &rows)).unwrap();
    fs::write(images.join(format!("pages-{pages}.img")), content(memory)).unwrap();
}

/// Dumps, each in a folder of its own.
struct Dumps(TempDir);

impl Dumps {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn images(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// As CRIU writes it.
    fn dump(&self, name: &str, pages: u64, memory: &Memory) -> PathBuf {
        let images = self.images(name);
        fs::create_dir(&images).unwrap();
        add(&images, "7", pages, memory);
        fs::write(images.join("core-7.img"), name).unwrap();
        images
    }

    /// Dumped and packed by one who went on from another dump.
    fn next(&self, name: &str, pages: u64, memory: &Memory, earlier: &str, stays: bool) -> PathBuf {
        let images = self.dump(name, pages, memory);
        pack::pack(&images, Some(&Earlier { images: self.images(earlier), stays })).unwrap();
        assert!(!images.join(format!("pages-{pages}.img")).exists() || content(memory).len() < 64 << 10);
        images
    }

    fn first(&self, name: &str, memory: &Memory) -> PathBuf {
        let images = self.dump(name, 1, memory);
        pack::pack(&images, None).unwrap();
        images
    }

    fn unpacked(&self, images: &Path, pages: u64) -> io::Result<Vec<u8>> {
        let to = tempfile::tempdir_in(self.0.path()).unwrap();
        pack::unpack(images, to.path())?;
        assert!(!to.path().join(BASE).exists());
        assert_eq!(fs::read(to.path().join("core-7.img")).unwrap(), fs::read(images.join("core-7.img")).unwrap());
        fs::read(to.path().join(format!("pages-{pages}.img")))
    }
}

fn shares(images: &Path) -> bool {
    let found =
        fs::read_dir(images).unwrap().flatten().any(|entry| entry.file_name().to_string_lossy().ends_with(SHARED));
    assert_eq!(found, images.join(BASE).exists(), "both or none");
    found
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

/// 2,500 pages, over three frames, in two rows.
fn large() -> Memory {
    (0..2_500).map(|nth| (nth + if nth < 1_000 { 16 } else { 4_096 }, nth as u16 + 1)).collect()
}

/// With every nth page another one.
fn changed(memory: &Memory, every: usize, by: u16) -> Memory {
    let change = |(nth, (address, number)): (usize, (&u64, &u16))| {
        (*address, if nth % every == 0 { *number + by } else { *number })
    };
    memory.iter().enumerate().map(change).collect()
}

fn disk_bytes(folder: &Path) -> u64 {
    viv_layer::survey(folder).unwrap().disk_bytes
}

#[test]
fn l13_forks_share_what_they_have_in_common_and_outlive_it() {
    let dumps = Dumps::new();
    let memory = large();
    let base = dumps.first("base", &memory);
    let whole_bytes = disk_bytes(&base);
    let mut forks = Vec::new();
    for (nth, name) in (1..).zip(["one", "two", "three"]) {
        // With new memory of its own, and without some of what there was.
        let mut now = changed(&memory, 10, 10_000 * nth);
        now.retain(|address, _| *address != 20);
        now.insert(9_000 + u64::from(nth), 7);
        let images = dumps.next(name, u64::from(nth) + 4, &now, "base", true);
        assert!(shares(&images));
        let own = disk_bytes(&images) - shared_bytes(&images);
        assert!(own < whole_bytes / 5, "{own} of {whole_bytes}");
        forks.push((images, u64::from(nth) + 4, now));
    }
    assert!(shared_bytes(&base) > whole_bytes * 9 / 10, "removing it would free next to nothing");
    let together = disk_bytes(dumps.0.path());
    assert!(together < whole_bytes * 2, "{together} of three and {whole_bytes}");
    fs::remove_dir_all(base).unwrap();
    for (images, pages, now) in &forks {
        assert!(dumps.unpacked(images, *pages).unwrap() == content(now));
    }
    // The last one who has it is the only one.
    for (images, ..) in &forks[1..] {
        fs::remove_dir_all(images).unwrap();
    }
    let (last, pages, now) = &forks[0];
    assert_eq!(shared_bytes(last), 0);
    assert!(dumps.unpacked(last, *pages).unwrap() == content(now));
}

#[test]
fn l13_what_goes_is_not_shared_with() {
    let dumps = Dumps::new();
    let memory = large();
    let first = dumps.first("first", &memory);
    let now = changed(&memory, 10, 10_000);
    let whole = dumps.next("second", 1, &now, "first", false);
    assert!(!shares(&whole), "nobody else has it");
    assert!(dumps.unpacked(&whole, 1).unwrap() == content(&now));
    let fork = dumps.next("fork", 1, &now, "first", true);
    assert!(shares(&fork));
    let third = dumps.next("third", 1, &now, "first", false);
    assert!(shares(&third), "somebody else has it");
    assert_eq!(inode(&third.join("base/pages-1.img.zst")), inode(&first.join("pages-1.img.zst")));
}

#[test]
fn l13_who_goes_on_from_a_difference_is_compared_with_what_that_is_of() {
    let dumps = Dumps::new();
    let memory = large();
    let root = dumps.first("root", &memory);
    let once = changed(&memory, 10, 10_000);
    dumps.next("once", 2, &once, "root", true);
    let twice = changed(&once, 15, 20_000);
    let images = dumps.next("twice", 3, &twice, "once", true);
    assert!(shares(&images));
    assert_eq!(inode(&images.join("base/pages-3.img.zst")), inode(&root.join("pages-1.img.zst")));
    fs::remove_dir_all(root).unwrap();
    fs::remove_dir_all(dumps.images("once")).unwrap();
    assert!(dumps.unpacked(&images, 3).unwrap() == content(&twice));
    // Nobody else has it any more: what comes next is whole again.
    let thrice = changed(&twice, 100, 30_000);
    let images = dumps.next("thrice", 4, &thrice, "twice", false);
    assert!(!shares(&images));
    assert!(dumps.unpacked(&images, 4).unwrap() == content(&thrice));
}

#[test]
fn l13_each_process_shares_with_what_has_it_whole() {
    let dumps = Dumps::new();
    let memory = large();
    let root = dumps.first("root", &memory);
    // Of the first one goes on with what there was, and another one is new, and so is shared memory.
    let fork = dumps.dump("fork", 1, &changed(&memory, 10, 10_000));
    let (other, third) = (changed(&memory, 1, 20_000), changed(&memory, 1, 30_000));
    add(&fork, "8", 2, &other);
    add(&fork, "shmem-500", 3, &third);
    pack::pack(&fork, Some(&Earlier { images: root.clone(), stays: true })).unwrap();
    let next = dumps.dump("next", 4, &changed(&memory, 10, 40_000));
    add(&next, "8", 5, &changed(&other, 10, 1));
    // It has another number each time.
    add(&next, "shmem-90210", 6, &changed(&third, 10, 1));
    pack::pack(&next, Some(&Earlier { images: fork.clone(), stays: true })).unwrap();
    for (file, whole) in
        [(4, root.join("pages-1.img.zst")), (5, fork.join("pages-2.img.zst")), (6, fork.join("pages-3.img.zst"))]
    {
        assert_eq!(inode(&next.join(format!("base/pages-{file}.img.zst"))), inode(&whole));
    }
    for folder in [&root, &fork] {
        fs::remove_dir_all(folder).unwrap();
    }
    assert!(dumps.unpacked(&next, 4).unwrap() == content(&changed(&memory, 10, 40_000)));
    assert!(dumps.unpacked(&next, 5).unwrap() == content(&changed(&other, 10, 1)));
    assert!(dumps.unpacked(&next, 6).unwrap() == content(&changed(&third, 10, 1)));
}

#[test]
fn l13_what_differs_by_more_than_half_is_packed_whole() {
    let dumps = Dumps::new();
    let memory = large();
    dumps.first("base", &memory);
    // Other content, other addresses, or hardly anything of what there was.
    let moved: Memory = memory.iter().map(|(address, number)| (address + 100_000, *number)).collect();
    let less: Memory = memory.iter().take(1_000).map(|(address, number)| (*address, *number)).collect();
    let half: Memory = changed(&memory, 2, 10_000);
    let more: Memory = changed(&half, 5, 20_000);
    for (name, now, wanted) in
        [("moved", moved, false), ("less", less, false), ("half", half, true), ("more", more, false)]
    {
        let images = dumps.next(name, 1, &now, "base", true);
        assert_eq!(shares(&images), wanted, "{name}");
        assert!(dumps.unpacked(&images, 1).unwrap() == content(&now), "{name}");
    }
}

#[test]
fn l13_damage_of_what_is_shared_is_told_to_all_who_share_it() {
    let dumps = Dumps::new();
    let memory = large();
    let base = dumps.first("base", &memory);
    let now = changed(&memory, 10, 10_000);
    let forks = ["one", "two"].map(|name| dumps.next(name, 1, &now, "base", true));
    let assert_told = |why: &str| {
        for images in &forks {
            let told = dumps.unpacked(images, 1).unwrap_err();
            assert!(told.to_string().contains(why), "{told}");
        }
    };
    // Another memory of the same size, well packed: only the digest tells.
    let other = dumps.first("other", &changed(&memory, 7, 30_000));
    for ending in ["zst", "frames"] {
        let name = format!("pages-1.img.{ending}");
        fs::write(base.join(&name), fs::read(other.join(&name)).unwrap()).unwrap();
    }
    assert_told("not what was dumped");
    let packed = base.join("pages-1.img.zst");
    fs::write(&packed, &fs::read(&packed).unwrap()[..100_000]).unwrap();
    assert_told("");
    // Nobody shares with what is damaged.
    let images = dumps.next("three", 1, &now, "base", true);
    assert!(!shares(&images));
    assert!(dumps.unpacked(&images, 1).unwrap() == content(&now));
}

#[test]
fn l13_a_torn_difference_is_told() {
    let dumps = Dumps::new();
    let memory = large();
    dumps.first("base", &memory);
    let images = dumps.next("fork", 1, &changed(&memory, 10, 10_000), "base", true);
    let assert_told_with = |name: &str, damage: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let path = images.join(name);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, damage(whole.clone())).unwrap();
        assert!(dumps.unpacked(&images, 1).is_err(), "{name}");
        fs::write(&path, whole).unwrap();
    };
    let shorter = |mut bytes: Vec<u8>| {
        bytes.pop();
        bytes
    };
    assert_told_with("pages-1.img.zst", &shorter);
    assert_told_with("pages-1.img.shared", &shorter);
    let table = |change: &dyn Fn(&mut Shared)| {
        let mut shared: Shared = serde_json::from_slice(&fs::read(images.join("pages-1.img.shared")).unwrap()).unwrap();
        change(&mut shared);
        let changed = serde_json::to_vec(&shared).unwrap();
        assert_told_with("pages-1.img.shared", &|_| changed.clone());
    };
    table(&|shared| shared.runs[3].at = u64::MAX);
    table(&|shared| shared.runs[3].at = 2_500);
    table(&|shared| shared.runs[3].at += 1);
    table(&|shared| shared.runs[3].page = 0);
    table(&|shared| shared.runs.last_mut().unwrap().count += 1);
    table(&|shared| shared.runs.truncate(3));
    table(&|shared| shared.digests.truncate(2));
    table(&|shared| shared.bytes += PAGE_BYTES);
    table(&|shared| shared.bytes = u64::MAX);
    assert!(dumps.unpacked(&images, 1).is_ok());
}

#[test]
fn l13_who_is_killed_while_packing_has_lost_nothing() {
    let dumps = Dumps::new();
    let memory = large();
    let base = dumps.first("base", &memory);
    let now = changed(&memory, 10, 10_000);
    let packed = fs::read(base.join("pages-1.img.zst")).unwrap();
    for (name, earlier) in [("alone", None), ("again", Some(Earlier { images: base.clone(), stays: true }))] {
        let images = dumps.next(name, 1, &now, "base", true);
        // All is written, and what CRIU wrote is still there.
        fs::write(images.join("pages-1.img"), content(&now)).unwrap();
        assert!(dumps.unpacked(&images, 1).unwrap() == content(&now));
        pack::pack(&images, earlier.as_ref()).unwrap();
        assert_eq!(shares(&images), earlier.is_some());
        assert!(dumps.unpacked(&images, 1).unwrap() == content(&now));
        assert!(fs::read(base.join("pages-1.img.zst")).unwrap() == packed, "what is linked is not written to");
    }
}

/// What may be at some addresses: nothing, and one of few contents.
fn memories() -> impl Strategy<Value = Vec<Option<u16>>> {
    prop::collection::vec(prop::option::weighted(0.9, 0_u16..50), 20..200)
}

fn memory_of(cells: &[Option<u16>]) -> Memory {
    (1_u64..).zip(cells).filter_map(|(address, cell)| cell.map(|number| (address, number))).collect()
}

/// Some cells changed, for others.
fn edited(mut cells: Vec<Option<u16>>, edits: &[(prop::sample::Index, Option<u16>)]) -> Vec<Option<u16>> {
    for (index, cell) in edits {
        let at = index.index(cells.len());
        cells[at] = *cell;
    }
    cells
}

fn edits() -> impl Strategy<Value = Vec<(prop::sample::Index, Option<u16>)>> {
    prop::collection::vec((any::<prop::sample::Index>(), prop::option::weighted(0.8, 0_u16..60)), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn l13_any_pages_come_back_as_they_were(cells in memories(), first in edits(), second in edits(), stays: bool) {
        let dumps = Dumps::new();
        dumps.first("root", &memory_of(&cells));
        let once = edited(cells, &first);
        let fork = dumps.next("once", 2, &memory_of(&once), "root", true);
        let twice = edited(once.clone(), &second);
        let next = dumps.next("twice", 3, &memory_of(&twice), "once", stays);
        fs::remove_dir_all(dumps.images("root")).unwrap();
        prop_assert!(dumps.unpacked(&fork, 2).unwrap() == content(&memory_of(&once)));
        fs::remove_dir_all(fork).unwrap();
        prop_assert!(dumps.unpacked(&next, 3).unwrap() == content(&memory_of(&twice)));
    }
}
