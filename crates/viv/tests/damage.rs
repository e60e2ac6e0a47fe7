//! What comes in may be hostile, and what is kept may rot: neither does harm, and both are told (S4, L10).
#![allow(missing_docs, clippy::similar_names, reason = "tests")]

#[path = "support/making.rs"]
mod making;
mod support;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use making::{Exported, FAILED, Said, Tar, files_below, good, gzip, header, oci_image, on_both, refused, said};
use serde_json::{Value, json};
use support::Ground;
use tar::EntryType;
use viv_image::BlobDir;
use viv_sandbox::{DriverKind, StoreConfig};

on_both!(
    s4_hostile_root_filesystems_are_refused_or_contained,
    s4_broken_images_are_refused,
    s4_damaged_exports_are_refused,
    s4_forged_headers_are_refused,
    s4_forged_layers_are_refused_or_contained,
    l10_a_check_finds_damage_and_nothing_is_made_from_it,
    l10_what_was_left_over_is_no_damage_and_goes,
);

/// Files outside of the store that nobody may touch.
struct Canary {
    folder: tempfile::TempDir,
}

impl Canary {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("secret"), "the host's").unwrap();
        Self { folder }
    }

    fn path(&self) -> String {
        self.folder.path().to_string_lossy().into_owned()
    }

    fn assert_unharmed(&self) {
        assert_eq!(files_below(self.folder.path()), [self.folder.path().join("secret")]);
        assert_eq!(fs::read_to_string(self.folder.path().join("secret")).unwrap(), "the host's");
        assert_eq!(rustix::fs::stat(self.folder.path().join("secret")).unwrap().st_nlink, 1);
    }
}

/// Puts something hostile into a tar.
type Make<'a> = &'a dyn Fn(&mut Tar);

/// Nothing came of an import: no image, no snapshot, no layer, nothing half built, nothing in the record.
fn assert_nothing_came_of_it(ground: &Ground, what: &str, layers: usize) {
    assert_eq!(ground.layers().len(), layers, "{what}");
    for folder in ["tmp", "trash"] {
        assert_eq!(fs::read_dir(ground.data.join("layers").join(folder)).unwrap().count(), 0, "{what}: {folder}");
    }
    let (code, found) = ground.checked(false);
    assert_eq!((code, &found["damage"], &found["leftovers"]), (Some(0), &json!([]), &json!([])), "{what}: {found:#}");
}

fn s4_hostile_root_filesystems_are_refused_or_contained(ground: Ground) {
    let (folder, canary) = (tempfile::tempdir().unwrap(), Canary::new());
    let out = canary.path();
    let secret = format!("{out}/secret");
    let up = format!("../../../../../../../../../..{out}");
    let file = folder.path().join("image.tar");
    let refusals: [(&str, Make<'_>, &str); 14] = [
        ("a path upwards", &|tar| _ = tar.file("../x", "x"), "leads upwards"),
        ("a path down and up", &|tar| _ = tar.file("a/../../x", "x"), "leads upwards"),
        ("a path up from the root", &|tar| _ = tar.file("/../x", "x"), "leads upwards"),
        ("a folder upwards", &|tar| _ = tar.folder("../x/"), "leads upwards"),
        ("through a link out", &|tar| _ = tar.link("out", &out).file("out/x", "x"), "leads through a link"),
        ("through a link up", &|tar| _ = tar.link("out", &up).file("out/x", "x"), "leads through a link"),
        ("through two links", &|tar| _ = tar.link("a", "b").link("b", &out).file("a/x", "x"), "leads through a link"),
        (
            "through a link to proc",
            &|tar| _ = tar.link("p", "/proc/self/root").file("p/x", "x"),
            "leads through a link",
        ),
        ("a hard link out", &|tar| _ = tar.hard_link("hard", &secret), "hard"),
        ("a hard link up", &|tar| _ = tar.hard_link("hard", &format!("{up}/secret")), "hard"),
        ("a hard link through a link", &|tar| _ = tar.link("out", &out).hard_link("hard", "out/secret"), "hard"),
        ("a whiteout by hand", &|tar| _ = tar.device(EntryType::Char, "w", (0, 0)), "is the device 0/0"),
        ("a whiteout of dots", &|tar| _ = tar.file("a/.wh...", ""), "hides nothing"),
        ("a file in a file", &|tar| _ = tar.file("a", "").file("a/b", ""), "is no folder"),
    ];
    for (what, make, why) in refusals {
        let mut tar = Tar::new();
        make(tar.file("first", "x"));
        let error = refused(ground.image("import").arg(tar.write(&file)));
        assert!(error.contains(why), "{what}: {error}");
        canary.assert_unharmed();
        assert_nothing_came_of_it(&ground, what, 0);
    }

    // The rest is what it says, inside.
    let mut tar = Tar::with_shell();
    tar.file("/absolute", "inside\n").link("link", &secret).file("link", "a file now\n").link("out", &secret);
    tar.hard_link("hard", "/absolute").file("twice", "first\n").file("twice", "second\n");
    tar.folder("was/").file("was/in", "").file("was", "a file\n").file("is", "").folder("is/").file("is/in", "");
    tar.device(EntryType::Char, "memory", (1, 1)).device(EntryType::Block, "disk", (7, 0));
    tar.device(EntryType::Char, "zero", (1, 5)).device(EntryType::Fifo, "pipe", (0, 0));
    tar.entry(EntryType::Regular, "set", "", 0o6755, b"");
    good(ground.image("import").arg(tar.write(&file)).args(["--name", "odd"]));
    canary.assert_unharmed();
    let look = "cat /absolute /link /twice /was /hard; ls /is; cat /out 2>/dev/null || echo no such file
                for device in memory disk zero; do test -e /$device && head -c 1 /$device 2>/dev/null || echo no $device; done
                echo x > /out; stat -c '%a %h' /set /absolute; test -p /pipe && echo pipe";
    let seen = "inside\na file now\nsecond\na file\ninside\nin\nno such file\nno memory\nno disk\nno zero\n\
                6755 1\n644 2\npipe";
    assert_eq!(ground.sh_in("odd", look), seen);
    canary.assert_unharmed();
    good(ground.image("rm").arg("odd"));
    ground.finish();
}

/// Zeros that do not take their time to be compressed: one gzip member again and again.
fn zeros(path: &Path, head: &[u8], bytes: u64) {
    const PIECE_BYTES: u64 = 4 << 20;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(&vec![0; PIECE_BYTES as usize]).unwrap();
    let piece = encoder.finish().unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&gzip(head)).unwrap();
    for _ in 0..bytes / PIECE_BYTES {
        file.write_all(&piece).unwrap();
    }
}

#[test]
fn s4_bombs_are_refused_on_plain() {
    bombs_are_refused(Ground::new());
}

#[test]
fn s4_bombs_are_refused_on_btrfs() {
    bombs_are_refused(Ground::with(|config| {
        config.store = StoreConfig { driver: Some(DriverKind::Btrfs), pool_bytes: Some(256 << 20) };
    }));
}

fn bombs_are_refused(ground: Ground) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bomb.tar");
    let large = |bytes: u64| {
        let mut header = header(EntryType::Regular, "large", "", 0o644, bytes);
        header.set_cksum();
        header.as_bytes().to_vec()
    };
    let import = |what: &str, within: Duration| {
        let started = Instant::now();
        let error = refused(ground.image("import").arg(&file).args(["--name", "bomb"]));
        assert!(started.elapsed() < within, "{what} took {:?}", started.elapsed());
        assert_nothing_came_of_it(&ground, what, 0);
        error
    };
    zeros(&file, &large(10 << 30), 10 << 30);
    let error = import("a bomb of zeros", Duration::from_secs(10));
    assert!(error.contains("decompresses to more than") || error.contains("bytes in its files"), "{error}");

    // One that is not compressed at all: a file that ends beyond what there is room for, with a hole for its content.
    let promised: u64 = if ground.provider.driver() == DriverKind::Btrfs { 2 << 30 } else { 100 << 30 };
    let mut sparse = File::create(&file).unwrap();
    sparse.write_all(&large(promised)).unwrap();
    sparse.set_len(promised + 2048).unwrap();
    let error = import("a large file", Duration::from_secs(10));
    assert!(error.contains("bytes in its files"), "{error}");

    // Many small ones fill the pool only so far.
    if ground.provider.driver() == DriverKind::Btrfs {
        let sparse = File::create(&file).unwrap();
        for number in 0..48_u64 {
            let mut header = header(EntryType::Regular, &format!("f{number}"), "", 0o644, 8 << 20);
            header.set_cksum();
            sparse.write_all_at(header.as_bytes(), number * ((8 << 20) + 512)).unwrap();
        }
        sparse.set_len(48 * ((8 << 20) + 512) + 1024).unwrap();
        let error = import("many files", Duration::from_secs(30));
        assert!(error.contains("bytes in its files") || error.contains("No space left on device"), "{error}");
    }
    ground.finish();
}

/// On btrfs, with so much room that it is not their size which ends it.
fn roomy_btrfs() -> Ground {
    Ground::with(|config| {
        config.store = StoreConfig { driver: Some(DriverKind::Btrfs), pool_bytes: Some(1536 << 20) };
    })
}

#[test]
fn s4_millions_of_entries_are_refused_on_plain() {
    millions_of_entries_are_refused(Ground::new());
}

#[test]
fn s4_millions_of_entries_are_refused_on_btrfs() {
    millions_of_entries_are_refused(roomy_btrfs());
}

/// Three million entries, more than any image has: refused by their number.
fn millions_of_entries_are_refused(ground: Ground) {
    const ENTRIES: usize = 3_000_000;
    const IN_MEMBER: usize = 10_000;
    let folder = tempfile::tempdir().unwrap();
    // Of the cheapest kind, so that it is the number that ends it: a binary that is not optimized takes ten times as long.
    let mut global = header(EntryType::XGlobalHeader, "global", "", 0o644, 0);
    global.set_cksum();
    let member = gzip(&global.as_bytes().repeat(IN_MEMBER));
    let path = folder.path().join("many.tar.gz");
    let mut file = File::create(&path).unwrap();
    let mut first = header(EntryType::Regular, "first", "", 0o644, 0);
    first.set_cksum();
    file.write_all(&gzip(first.as_bytes())).unwrap();
    for _ in 0..ENTRIES / IN_MEMBER {
        file.write_all(&member).unwrap();
    }
    let error = refused(ground.image("import").arg(&path));
    assert!(error.contains("more than 2000000 entries"), "{error}");
    assert_nothing_came_of_it(&ground, "millions of entries", 0);
    ground.finish();
}

/// The same with files that are really made, in folders of 10,000, until their number or the disk ends it. It takes
/// minutes, so `make millions` runs it.
fn millions_of_files(ground: Ground, is_expected: impl Fn(&str) -> bool) {
    const ENTRIES: usize = 2_100_000;
    const IN_FOLDER: usize = 10_000;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("many.tar.gz");
    let mut file = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
    for number in 0..ENTRIES {
        let (within, name) = (number / IN_FOLDER, number % IN_FOLDER);
        let mut entry = header(EntryType::Regular, &format!("many/{within}/{name}"), "", 0o644, 0);
        entry.set_cksum();
        file.write_all(entry.as_bytes()).unwrap();
    }
    file.finish().unwrap();
    let started = Instant::now();
    let error = refused(ground.image("import").arg(&path));
    println!("{}: refused after {:?}: {error}", ground.provider.driver(), started.elapsed());
    assert!(is_expected(&error), "{error}");
    assert_nothing_came_of_it(&ground, "millions of files", 0);
    // And it is of use to others.
    let mut tar = Tar::with_shell();
    tar.file("marker", "here\n");
    ground.import(&tar.write(&folder.path().join("tiny.tar")), "tiny");
    assert_eq!(ground.sh_in("tiny", "cat /marker"), "here");
    good(ground.image("rm").arg("tiny"));
    ground.finish();
}

#[test]
#[ignore = "takes minutes: make millions"]
fn millions_of_files_on_plain() {
    millions_of_files(Ground::new(), |error| error.contains("more than 2000000 entries"));
}

#[test]
#[ignore = "takes minutes: make millions"]
fn millions_of_files_on_btrfs() {
    // Whichever comes first there: so many files fill such a pool.
    let is_full = |error: &str| error.contains("No space left on device");
    millions_of_files(roomy_btrfs(), |error| error.contains("more than 2000000 entries") || is_full(error));
}

fn s4_broken_images_are_refused(ground: Ground) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("image.tar");
    let attempt = |what: &str, bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        let error = refused(ground.image("import").arg(&file).args(["--name", "broken"]));
        assert_nothing_came_of_it(&ground, what, 0);
        error
    };
    let mut tar = Tar::with_shell();
    tar.file("last", vec![7; 3000]);
    let whole = tar.bytes();
    for cut in [whole.len() - 3000, whole.len() / 2, 700, 100, 1] {
        attempt("a cut tar", &whole[..cut]);
    }
    let packed = gzip(&whole);
    for cut in [packed.len() - 4, packed.len() / 2, 12] {
        attempt("a cut gzip", &packed[..cut]);
    }
    let squeezed = zstd::encode_all(&*whole, 1).unwrap();
    attempt("a cut zstd", &squeezed[..squeezed.len() / 2]);
    attempt("nothing", b"");
    attempt("no tar", &b"this is no tar archive".repeat(100));
    let error = attempt("a compression that is not read", b"\xfd7zXZ\0and so on");
    assert!(error.contains("hint: decompress it first"), "{error}");
    let mut wrong = whole.clone();
    wrong[0] ^= 1;
    attempt("a wrong checksum", &wrong);
    let mut endless = header(EntryType::Regular, "x", "", 0o644, 0);
    endless.as_gnu_mut().unwrap().size = *b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff";
    endless.set_cksum();
    attempt("a file of more bytes than can be", Tar::new().raw(&endless, b"").bytes().as_slice());

    // Layers that are not what the manifest says.
    let blobs = BlobDir::open(&folder.path().join("blobs")).unwrap();
    let image = oci_image(&blobs, &[whole, Tar::new().file("upper", "x").bytes()], &[], None);
    let mut archive = Vec::new();
    viv_image::write_archive(&image, &mut archive).unwrap();
    let place = archive.windows(40).position(|window| window == [7; 40]).expect("the last file is in the archive");
    archive[place] = 8;
    let error = attempt("a layer with another digest", &archive);
    assert!(error.contains("has other content"), "{error}");
    archive[place] = 7;
    let mut lying = image.clone();
    lying.config.diff_ids.swap(0, 1);
    lying.layers[0].0.diff_id = lying.config.diff_ids[0];
    lying.layers[1].0.diff_id = lying.config.diff_ids[1];
    let mut swapped = Vec::new();
    viv_image::write_archive(&lying, &mut swapped).unwrap();
    let error = attempt("layers that decompress to others", &swapped);
    assert!(error.contains("when decompressed"), "{error}");
    let layout = folder.path().join("layout");
    viv_image::write_layout(&image, &layout).unwrap();
    let largest = files_below(&layout).into_iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let blob = File::options().write(true).open(&largest).unwrap();
    blob.write_all_at(&[8], 2000).unwrap();
    refused(ground.image("import").arg(&layout).args(["--name", "broken"]));
    assert_nothing_came_of_it(&ground, "a layout with another layer", 0);
    fs::remove_file(&largest).unwrap();
    symlink("/etc/passwd", &largest).unwrap();
    let error = refused(ground.image("import").arg(&layout).args(["--name", "broken"]));
    assert!(!error.contains("root:"), "{error}");
    assert_nothing_came_of_it(&ground, "a layout with a link for a layer", 0);

    fs::write(&file, &archive).unwrap();
    ground.import(&file, "whole");
    good(ground.image("rm").arg("whole"));
    ground.finish();
}

/// A snapshot of an image with one layer and one saved, exported; and that nothing of it is left here.
fn exported(ground: &Ground, folder: &Path) -> PathBuf {
    let mut tar = Tar::with_shell();
    tar.file("marker", "here\n");
    ground.import(&tar.write(&folder.join("tiny.tar")), "tiny");
    let sandbox = ground.sandbox_of("tiny");
    ground.sh(&sandbox, "echo saved > /saved; rm /marker");
    let snapshot = ground.save_and_remove(&sandbox);
    let file = folder.join("exported");
    good(ground.viv().args(["export", &snapshot]).arg(&file));
    good(ground.viv().args(["drop", &snapshot]));
    good(ground.image("rm").arg("tiny"));
    ground.collect_to(0);
    file
}

/// Writes exported snapshots with something wrong, and has them read.
struct Forger {
    ground: Ground,
    canary: Canary,
    folder: tempfile::TempDir,
    original: PathBuf,
    file: PathBuf,
}

impl Forger {
    fn new(ground: Ground) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (original, file) = (exported(&ground, folder.path()), folder.path().join("forged"));
        Self { ground, canary: Canary::new(), folder, original, file }
    }

    fn import(&self) -> Said {
        said(self.ground.viv().arg("import").arg(&self.file))
    }

    fn assert_nothing_came(&self, what: &str, told: &Said) {
        assert_eq!(told.code, Some(FAILED), "{what}: {told:?}");
        assert!(told.err.contains("error: ") && !told.err.contains("panicked"), "{what}: {told:?}");
        self.canary.assert_unharmed();
        // A layer that is what it says may have come in before another was found wrong; it goes with the next collection.
        good(&mut self.ground.image("gc"));
        assert_nothing_came_of_it(&self.ground, what, 0);
        assert_eq!(good(self.ground.viv().arg("snapshots")), "", "{what}");
    }

    /// Changes something, and shows that it is refused.
    fn forge(&self, what: &str, change: &dyn Fn(&mut Exported)) -> String {
        let mut forged = Exported::open(&self.original);
        change(&mut forged);
        forged.write(&self.file);
        let told = self.import();
        self.assert_nothing_came(what, &told);
        told.err
    }
}

fn s4_damaged_exports_are_refused(ground: Ground) {
    let forger = Forger::new(ground);
    let bytes = fs::read(&forger.original).unwrap();
    for place in [0, 5, 40, bytes.len() / 3, bytes.len() / 2, bytes.len() - 100, bytes.len() - 2] {
        let mut flipped = bytes.clone();
        flipped[place] ^= 0x10;
        fs::write(&forger.file, flipped).unwrap();
        forger.assert_nothing_came(&format!("byte {place} flipped"), &forger.import());
    }
    for cut in [0, 1, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&forger.file, &bytes[..cut]).unwrap();
        forger.assert_nothing_came(&format!("cut at {cut}"), &forger.import());
    }
    fs::write(&forger.file, [&bytes[..], &zstd::encode_all(&b"more"[..], 1).unwrap()].concat()).unwrap();
    forger.assert_nothing_came("more after the end", &forger.import());
    let told = said(forger.ground.viv().arg("import").arg(forger.folder.path().join("tiny.tar")));
    forger.assert_nothing_came("an image", &told);
    assert!(said(forger.ground.viv().args(["import", "/no/such/file"])).err.contains("/no/such/file"));
    forger.ground.finish();
}

fn s4_forged_headers_are_refused(ground: Ground) {
    let forger = Forger::new(ground);
    let error =
        forger.forge("another content", &|forged| fs::write(forged.layer(0).join("root/saved"), "forged").unwrap());
    assert!(error.contains("is not what the file says it is") && error.contains("hint: "), "{error}");
    forger.forge("swapped layers", &|forged| {
        let aside = forged.folder.path().join("layers/aside");
        fs::rename(forged.layer(0), &aside).unwrap();
        fs::rename(forged.layer(1), forged.layer(0)).unwrap();
        fs::rename(&aside, forged.layer(1)).unwrap();
    });
    forger.forge("swapped layers, described", &|forged| forged.header["layers"].as_array_mut().unwrap().reverse());
    forger.forge("a layer too few", &|forged| fs::remove_dir_all(forged.layer(1)).unwrap());
    forger.forge("a layer that is not described", &|forged| {
        _ = forged.header["layers"].as_array_mut().unwrap().remove(0);
    });
    forger.forge("only an image", &|forged| forged.header["layers"][0]["of_image"] = json!(true));
    forger.forge("no layers", &|forged| forged.header["layers"] = json!([]));
    forger.forge("an identity of another", &|forged| {
        forged.header["snapshot"]["source"]["sandbox"] = json!("sbx_00000000000000000000000000");
    });
    forger.forge("another version", &|forged| forged.header["version"] = json!(2));
    let error = forger.forge("another processor", &|forged| forged.header["architecture"] = json!("riscv64"));
    assert!(error.contains("riscv64") && error.contains("hint: "), "{error}");
    forger.forge("a header that is none", &|forged| forged.header = json!(["x"]));
    forger.forge("many layers", &|forged| {
        let layer = forged.header["layers"][0].clone();
        forged.header["layers"] = json!(vec![layer; 1000]);
    });
    forger.forge("an environment that cannot be", &|forged| forged.header["env"] = json!({"A": "b\0c"}));
    forger.ground.finish();
}

fn s4_forged_layers_are_refused_or_contained(ground: Ground) {
    let forger = Forger::new(ground);
    // Parts and layers that are links to the host's folders, truthfully described.
    forger.forge("a part that is a link", &|forged| {
        symlink(forger.canary.path(), forged.layer(0).join("usr")).unwrap();
        forged.header["on_host"] = json!(true);
        forged.describe(0);
    });
    forger.forge("a root that is a link", &|forged| {
        fs::remove_dir_all(forged.layer(1).join("root")).unwrap();
        symlink("/", forged.layer(1).join("root")).unwrap();
        forged.describe(1);
    });
    forger.forge("a layer that is a link", &|forged| {
        fs::remove_dir_all(forged.layer(1)).unwrap();
        symlink(forger.canary.path(), forged.layer(1)).unwrap();
        forged.describe(1);
    });
    forger.forge("a part that is a file", &|forged| {
        fs::write(forged.layer(0).join("usr"), "x").unwrap();
        forged.header["on_host"] = json!(true);
        forged.describe(0);
    });
    forger.forge("a part that no root has", &|forged| {
        fs::create_dir(forged.layer(0).join("etc")).unwrap();
        forged.describe(0);
    });
    forger.forge("layers that lie elsewhere on this machine", &|forged| {
        let elsewhere = forger.folder.path().join("elsewhere");
        let _ = fs::remove_dir_all(&elsewhere);
        fs::rename(forged.folder.path().join("layers"), &elsewhere).unwrap();
        symlink(&elsewhere, forged.folder.path().join("layers")).unwrap();
    });
    assert!(forger.folder.path().join("elsewhere/0/root/saved").exists(), "an import took a folder of the machine's");
    forger.forge("a link in our own place", &|forged| {
        let home = forged.layer(0).join("root/.vivarium");
        fs::remove_dir_all(&home).unwrap();
        symlink(forger.canary.path(), &home).unwrap();
        forged.describe(0);
    });

    // What is only said is not believed, and what is allowed is contained.
    let mut forged = Exported::open(&forger.original);
    forged.header["snapshot"]["size_bytes"] = json!(u64::MAX);
    forged.header["snapshot"]["memory"] = json!(true);
    let root = forged.layer(0).join("root");
    symlink(forger.canary.path(), root.join("out")).unwrap();
    forged.describe(0);
    forged.write(&forger.file);
    let snapshot = good(forger.ground.viv().arg("import").arg(&forger.file));
    let listed: Value = serde_json::from_str(&good(forger.ground.viv().args(["snapshots", "--json"]))).unwrap();
    assert_eq!(listed["snapshot"]["memory"], json!(false), "{listed}");
    assert!(listed["snapshot"]["size_bytes"].as_u64().unwrap() < 64 << 20, "{listed}");
    assert_eq!(
        forger.ground.sh_restored(
            &snapshot,
            "cat /saved; ls /out/ 2>/dev/null || echo nowhere; ls /marker 2>/dev/null || echo gone"
        ),
        "saved\nnowhere\ngone"
    );
    forger.canary.assert_unharmed();
    good(forger.ground.viv().args(["drop", &snapshot]));
    forger.ground.finish();
}

/// Lets a test change what is sealed.
fn unseal(layer: &Path) {
    // What was brought in is a folder there, too: the root of a subvolume has this number.
    let is_subvolume = fs::metadata(layer).unwrap().ino() == 256;
    if is_subvolume && rustix::fs::statfs(layer).unwrap().f_type as i64 == 0x9123_683E {
        let done = Command::new("btrfs").args(["property", "set"]).arg(layer).args(["ro", "false"]).status();
        assert!(done.expect("btrfs is needed (Debian: btrfs-progs)").success());
    }
}

/// Flips a bit of a file, and leaves no trace of it in its times.
fn flip(path: &Path) {
    let times = fs::metadata(path).unwrap().modified().unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 2).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 2).unwrap();
    file.set_modified(times).unwrap();
}

struct Kept<'a> {
    ground: &'a Ground,
    snapshot: String,
    saved: PathBuf,
    of_image: PathBuf,
}

impl Kept<'_> {
    /// The check tells it, the snapshot shows it, and nothing is made from it.
    fn assert_damaged(&self, deep: bool, why: &str) {
        let (code, found) = self.ground.checked(deep);
        assert_eq!(code, Some(1), "{why}: {found:#}");
        assert!(
            found["damage"].as_array().unwrap().iter().any(|line| line.as_str().unwrap().contains(why)),
            "{found:#}"
        );
        let told = said(&mut self.ground.image("check"));
        assert_eq!(told.code, Some(1), "it stays damaged for one who looks less closely: {told:?}");
        assert!(told.out.contains("damaged: ") && told.out.contains("not clean: "), "{told:?}");
        let listed = good(self.ground.viv().arg("snapshots"));
        assert!(listed.contains("DAMAGED"), "{why}: {listed}");
        let error = refused(self.ground.viv().args(["restore", &self.snapshot]));
        assert!(error.contains("damaged") || error.contains("missing"), "{why}: {error}");
        let error = refused(self.ground.viv().args(["export", &self.snapshot, "/nowhere/at/all"]));
        assert!(
            error.contains("damaged") || error.contains("missing") || error.contains("cannot read the layers"),
            "{error}"
        );
        // Collecting keeps what is referred to, whatever its state.
        said(&mut self.ground.image("gc"));
    }

    fn assert_whole(&self) {
        let (code, found) = self.ground.checked(true);
        assert_eq!((code, &found["damage"]), (Some(0), &json!([])), "{found:#}");
        let listed = good(self.ground.viv().arg("snapshots"));
        assert!(listed.contains("verified"), "{listed}");
        assert_eq!(self.ground.sh_restored(&self.snapshot, "cat /saved /marker"), "saved\nhere");
    }
}

fn l10_a_check_finds_damage_and_nothing_is_made_from_it(ground: Ground) {
    let folder = tempfile::tempdir().unwrap();
    let mut tar = Tar::with_shell();
    tar.file("marker", "here\n");
    ground.import(&tar.write(&folder.path().join("tiny.tar")), "tiny");
    let of_image = ground.layers().remove(0);
    let sandbox = ground.sandbox_of("tiny");
    ground.sh(&sandbox, "echo saved > /saved; mkdir /more; echo more > /more/more");
    let snapshot = ground.save_and_remove(&sandbox);
    good(&mut ground.image("gc"));
    let saved = ground.layers().into_iter().find(|layer| *layer != of_image).unwrap();
    unseal(&saved);
    unseal(&of_image);
    let kept = Kept { ground: &ground, snapshot, saved, of_image };
    kept.assert_whole();

    // Content: only who reads it all can tell.
    let file = kept.saved.join("parts/root/saved");
    flip(&file);
    assert_eq!(ground.checked(false).0, Some(0));
    kept.assert_damaged(true, "the content of a file changed");
    let running = ground.sandbox_of("tiny");
    let error = refused(ground.viv().args(["rollback", &running, &kept.snapshot]));
    assert!(error.contains("damaged"), "{error}");
    assert_eq!(ground.sh(&running, "cat /marker"), "here", "what was there is there");
    good(ground.viv().args(["rm", &running]));
    flip(&file);
    kept.assert_whole();

    // A file that is gone. Put back with its time, and that of its folder, nothing is wrong any more.
    let (more, aside) = (kept.saved.join("parts/root/more"), folder.path().join("aside"));
    let (file, times) = (more.join("more"), fs::metadata(&more).unwrap().modified().unwrap());
    let file_times = fs::metadata(&file).unwrap().modified().unwrap();
    fs::copy(&file, &aside).unwrap();
    fs::remove_file(&file).unwrap();
    kept.assert_damaged(false, "names, sizes, modes or owners changed");
    fs::copy(&aside, &file).unwrap();
    File::options().write(true).open(&file).unwrap().set_modified(file_times).unwrap();
    File::open(&more).unwrap().set_modified(times).unwrap();
    kept.assert_whole();

    // The same in the image's layer: no snapshot above it is whole then, and no sandbox is made of the image.
    flip(&kept.of_image.join("parts/root/marker"));
    kept.assert_damaged(true, "the content of a file changed");
    let error = refused(ground.viv().args(["create", "--image", "tiny"]));
    assert!(error.contains("damaged"), "{error}");
    flip(&kept.of_image.join("parts/root/marker"));
    kept.assert_whole();

    // A layer's file, and a layer without its file.
    for layer in [&kept.saved, &kept.of_image] {
        let meta = layer.with_extension("json");
        fs::rename(&meta, &aside).unwrap_or_else(|_| {
            fs::copy(&meta, &aside).unwrap();
            fs::remove_file(&meta).unwrap();
        });
        kept.assert_damaged(false, "is missing");
        fs::copy(&aside, &meta).unwrap();
        kept.assert_whole();
        fs::write(&meta, "{").unwrap();
        let (code, found) = ground.checked(false);
        assert_eq!(code, Some(1), "{found:#}");
        let listed = good(ground.viv().arg("snapshots"));
        assert!(listed.contains("DAMAGED"), "{listed}");
        refused(ground.viv().args(["restore", &kept.snapshot]));
        fs::copy(&aside, &meta).unwrap();
        kept.assert_whole();
    }

    // A record that cannot be read might refer to anything: nothing is collected.
    let record = ground.data.join("snapshots").join(format!("{}.json", kept.snapshot));
    let text = fs::read(&record).unwrap();
    fs::write(&record, "{}").unwrap();
    let (code, found) = ground.checked(false);
    assert!(code == Some(1) && found["damage"].to_string().contains("its record cannot be read"), "{found:#}");
    refused(&mut ground.image("gc"));
    assert_eq!(ground.layers().len(), 2);
    fs::write(&record, text).unwrap();
    kept.assert_whole();

    // A layer that is gone for good. What stands on it can still be removed.
    fs::remove_dir_all(kept.saved.join("parts")).unwrap();
    kept.assert_damaged(false, "its content is missing");
    let snapshot = kept.snapshot.clone();
    good(ground.viv().args(["drop", &snapshot]));
    good(ground.image("rm").arg("tiny"));
    ground.finish();
}

fn l10_what_was_left_over_is_no_damage_and_goes(ground: Ground) {
    let folder = tempfile::tempdir().unwrap();
    let mut tar = Tar::with_shell();
    tar.file("marker", "here\n");
    let tar = tar.write(&folder.path().join("tiny.tar"));
    ground.import(&tar, "tiny");
    ground.assert_clean();
    let layers = ground.data.join("layers");
    fs::create_dir_all(layers.join("tmp/1.2.3/parts/root")).unwrap();
    fs::write(layers.join("tmp/1.2.3/parts/root/x"), "x").unwrap();
    fs::write(layers.join("tmp/file"), "x").unwrap();
    fs::create_dir_all(layers.join("sealed/never-a-layer/parts")).unwrap();
    fs::create_dir_all(layers.join("active/sbx_00000000000000000000000000.1/parts")).unwrap();
    // An image whose name went without anybody collecting.
    let mut other = Tar::new();
    ground.import(&other.file("x", "x").write(&folder.path().join("other.tar")), "other");
    fs::remove_file(ground.data.join("images/other.json")).unwrap();

    let told = said(&mut ground.image("check"));
    assert_eq!(told.code, Some(0), "{told:?}");
    assert!(told.out.contains("clean: 2 layers, 0 snapshots, 1 images") && !told.out.contains("damaged"), "{told:?}");
    for what in [
        "left over: tmp/1.2.3",
        "left over: tmp/file",
        "left over: sealed/never-a-layer: it never became a layer",
        "left over: active/sbx_00000000000000000000000000.1",
        "nothing refers to it",
    ] {
        assert!(told.out.contains(what), "{what}: {told:?}");
    }
    // Downloads that broke off are kept for a day, to be gone on with.
    let downloads = ground.data.join("downloads/sha256");
    fs::create_dir_all(&downloads).unwrap();
    let two_days_ago = std::time::SystemTime::now() - Duration::from_secs(2 * 24 * 3600);
    for (name, is_old) in [("a.part", true), ("b.part", false), ("", true)] {
        let path = downloads.join(format!("{}{name}", if name.is_empty() { "c".repeat(64) } else { "d".repeat(63) }));
        let file = File::create(path).unwrap();
        if is_old {
            file.set_modified(two_days_ago).unwrap();
        }
    }
    let told = good(&mut ground.image("gc"));
    assert_eq!(files_below(&downloads), [downloads.join(format!("{}b.part", "d".repeat(63)))]);
    fs::remove_dir_all(&downloads).unwrap();
    assert!(told.starts_with("1 layers (") && told.contains("and 4 leftovers removed"), "{told}");
    ground.assert_clean();
    assert_eq!(ground.sh_in("tiny", "cat /marker"), "here");
    good(ground.image("rm").arg("tiny"));
    ground.finish();
}
