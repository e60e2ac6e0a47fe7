//! Archives that mean harm. Whatever they say, nothing outside of the target
//! changes, nothing panics, and nothing takes memory or disk without bound.

mod common;

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::PathBuf;

use common::{Place, is_root};
use viv_layer::corpus::Size;
use viv_layer::{Bound, Bounds, Form, Packer, UnpackError, Unpacked, lines, unpack};

/// A header, with only its name, type, size and link set: the rest is up to the test.
fn header(kind: u8, name: &[u8], size: &[u8], link: &[u8]) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name);
    block[100..107].copy_from_slice(b"0000644");
    block[124..124 + size.len()].copy_from_slice(size);
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(block)
}

fn seal(mut block: Vec<u8>) -> Vec<u8> {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

fn entry(kind: u8, name: &str, link: &str) -> Vec<u8> {
    header(kind, name.as_bytes(), b"", link.as_bytes())
}

fn file(name: &str, content: &[u8]) -> Vec<u8> {
    typed(b'0', name, content)
}

fn typed(kind: u8, name: &str, content: &[u8]) -> Vec<u8> {
    let mut bytes = header(kind, name.as_bytes(), format!("{:011o}", content.len()).as_bytes(), b"");
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut content = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest + 1..rest + 10).find(|length| *length == rest + length.to_string().len()).unwrap();
        content.extend_from_slice(format!("{length} {key}=").as_bytes());
        content.extend_from_slice(value);
        content.push(b'\n');
    }
    typed(b'x', "PaxHeaders/x", &content)
}

/// A target with a bystander beside it that nothing may touch.
struct World {
    place: Place,
    before: Vec<String>,
}

impl World {
    fn new() -> Self {
        Self::at(Place::new())
    }

    fn at(place: Place) -> Self {
        place.folder("to");
        let canary = place.folder("canary");
        fs::write(canary.join("file"), "untouched").unwrap();
        fs::create_dir(canary.join("folder")).unwrap();
        let before = lines(&canary).unwrap();
        Self { place, before }
    }

    fn to(&self, name: &str) -> PathBuf {
        self.place.path("to").join(name)
    }

    fn unpack_raw(&self, archive: impl Read, form: Form, bounds: &Bounds) -> Result<Unpacked, UnpackError> {
        let result = unpack(archive, &self.place.path("to"), form, bounds);
        assert_eq!(lines(&self.place.path("canary")).unwrap(), self.before, "the canary changed");
        assert_eq!(fs::read(self.place.path("canary/file")).unwrap(), b"untouched");
        let mut beside: Vec<_> =
            fs::read_dir(self.place.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        beside.sort();
        assert_eq!(beside, ["canary", "to"], "something was made beside the target");
        result
    }

    fn unpack(&self, form: Form, parts: &[Vec<u8>]) -> Result<Unpacked, UnpackError> {
        let mut archive = parts.concat();
        archive.resize(archive.len() + 1024, 0);
        self.unpack_raw(archive.as_slice(), form, &Bounds::default())
    }

    #[track_caller]
    fn refuses(&self, form: Form, parts: &[Vec<u8>], why: &str) {
        match self.unpack(form, parts) {
            Err(UnpackError::Refused { why: said, .. }) if said.contains(why) => {}
            other => panic!("expected {why:?}, not {other:?}"),
        }
    }
}

const FORMS: [Form; 2] = [Form::Native, Form::Oci];

#[test]
fn names_do_not_lead_out() {
    for form in FORMS {
        let world = World::new();
        for name in ["../canary/file", "a/../../canary/file", "..", "a/..", "/../canary/file"] {
            world.refuses(form, &[file(name, b"x")], "leads upwards");
            world.refuses(form, &[pax(&[("path", name.as_bytes())]), file("innocent", b"x")], "leads upwards");
            world.refuses(
                form,
                &[typed(b'L', "././@LongLink", name.as_bytes()), file("innocent", b"x")],
                "leads upwards",
            );
        }
        world.refuses(form, &[pax(&[("path", b"a\0b")]), file("innocent", b"x")], "NUL");
        world.refuses(form, &[file("", b"x")], "no name");
        world.refuses(form, &[file("./", b"x")], "no name");
        let canary = world.place.path("canary/file").display().to_string();
        world.unpack(form, &[file(&canary, b"inside")]).unwrap();
        assert_eq!(fs::read(world.to(canary.trim_start_matches('/'))).unwrap(), b"inside", "absolute names are below");
    }
}

#[test]
fn nothing_is_written_through_links() {
    if !is_root() {
        return;
    }
    for target in ["../canary", "..", "/", "../../../../../../../../tmp"] {
        let world = World::new();
        let canary = world.place.path("canary").display().to_string();
        for (target, name) in [(target, "link/file"), (canary.as_str(), "link/file"), (target, "link/canary/file")] {
            let parts = [entry(b'2', "link", target), file(name, b"overwritten")];
            world.refuses(Form::Native, &parts, "leads through a link");
            // Inside the layer's own root, a target may be found or not; outside it is never looked for.
            let _ = world.unpack(Form::Oci, &parts);
            let _ = world.unpack(
                Form::Oci,
                &[entry(b'2', "link", target), entry(b'5', "link/made", ""), entry(b'1', "l", "link/file")],
            );
        }
    }
    // A link on the way is resolved inside the layer.
    let world = World::new();
    let parts =
        [entry(b'5', "lib", ""), entry(b'2', "up/lib64", "/../../lib"), file("up/lib64/x", b"1"), file("lib/y", b"2")];
    world.unpack(Form::Oci, &parts).unwrap();
    assert_eq!(fs::read(world.to("lib/x")).unwrap(), b"1");
    world.refuses(Form::Oci, &[entry(b'2', "loop", "loop"), file("loop/x", b"")], "cannot be followed");
    world.refuses(Form::Oci, &[entry(b'2', "void", "nowhere"), file("void/x", b"")], "link to nothing");
    world.refuses(Form::Oci, &[file("lib/y/z", b"")], "no folder");
}

#[test]
fn the_last_name_is_replaced_and_not_followed() {
    if !is_root() {
        return;
    }
    for form in FORMS {
        let world = World::new();
        let canary = world.place.path("canary/file").display().to_string();
        let folder = world.place.path("canary/folder").display().to_string();
        let link = || entry(b'2', "name", &canary);
        world.unpack(form, &[link(), file("name", b"new")]).unwrap();
        assert_eq!(fs::read(world.to("name")).unwrap(), b"new");
        world.unpack(form, &[entry(b'2', "name", &folder), entry(b'5', "name", ""), file("name/x", b"1")]).unwrap();
        assert!(world.to("name").symlink_metadata().unwrap().is_dir());
        // A folder over a folder keeps what is in it; a file over a folder does not.
        world.unpack(form, &[entry(b'5', "name", "")]).unwrap();
        assert!(world.to("name/x").exists());
        world.unpack(form, &[file("name", b"file")]).unwrap();
        assert_eq!(fs::read(world.to("name")).unwrap(), b"file");
        // The folder that was just written to becomes a link, and back.
        let swap =
            [entry(b'5', "d", ""), file("d/a", b""), entry(b'2', "d", &folder), entry(b'5', "d", ""), file("d/b", b"")];
        world.unpack(form, &swap).unwrap();
        assert!(world.to("d/b").exists() && !world.to("d/a").exists());
        let swap = [entry(b'5', "e", ""), file("e/a", b""), entry(b'2', "e", &folder), file("e/b", b"")];
        assert!(world.unpack(form, &swap).is_err());
        world.unpack(form, &[entry(b'6', "name", ""), entry(b'2', "name", "/dev/null"), file("name", b"x")]).unwrap();
    }
}

#[test]
fn hard_links_stay_inside() {
    if !is_root() {
        return;
    }
    for form in FORMS {
        let world = World::new();
        let canary = world.place.path("canary/file").display().to_string();
        world.refuses(form, &[entry(b'1', "l", "../canary/file")], "links to a place outside");
        assert!(world.unpack(form, &[entry(b'1', "l", &canary)]).is_err());
        world.refuses(form, &[entry(b'1', "l", "missing")], "not there");
        world.refuses(form, &[entry(b'1', "l", "")], "links to nothing");
        world.refuses(form, &[entry(b'5', "d", ""), entry(b'1', "l", "d")], "only one name");
        world.refuses(form, &[file("p/q", b""), entry(b'1', "p", "p/q")], "replaces what it links to");
        // A link to a symbolic link is that link, and not what it points to.
        let parts = [entry(b'2', "s", &canary), entry(b'1', "h", "s"), file("h", b"new")];
        world.unpack(form, &parts).unwrap();
        assert!(world.to("s").is_symlink() && world.to("h").is_file());
        // To itself, and over another.
        world
            .unpack(form, &[file("f", b"1"), entry(b'1', "f", "f"), file("g", b"2"), entry(b'1', "g", "./f")])
            .unwrap();
        assert_eq!(world.to("f").metadata().unwrap().ino(), world.to("g").metadata().unwrap().ino());
        assert_eq!(fs::read(world.to("g")).unwrap(), b"1");
    }
    let world = World::new();
    world.refuses(
        Form::Native,
        &[entry(b'2', "link", "../canary"), entry(b'1', "l", "link/file")],
        "leads through a link",
    );
}

#[test]
fn what_cannot_be_is_refused() {
    if !is_root() {
        return;
    }
    for form in FORMS {
        let world = World::new();
        for kind in *b"MVDNAXIs~8" {
            world.refuses(form, &[entry(kind, "odd", "")], "type that is not known");
        }
        world.refuses(form, &[typed(b'5', "d", b"content")], "though it is no file");
        world.refuses(form, &[entry(b'2', "l", "")], "links to nothing");
        world.refuses(
            form,
            &[file(&"n".repeat(100), b""), pax(&[("path", &[b'n'; 300])]), file("x", b"")],
            "too long a name",
        );
        world.refuses(form, &[header(b'0', b"f", b"-0000000001", b"")], "size that cannot be");
        world.refuses(form, &[header(b'0', b"f", &[0xff; 12], b"")], "size that cannot be");
        for (key, value) in [
            ("size", "-1"),
            ("size", "99999999999999999999"),
            ("uid", "4294967295"),
            ("mtime", "x"),
            ("VIVARIUM.kind", "door"),
        ] {
            world.refuses(form, &[pax(&[(key, value.as_bytes())]), file("f", b"")], "records that cannot be read");
        }
        world.refuses(form, &[typed(b'x', "x", b"99 path=a\n"), file("f", b"")], "records that cannot be read");
        assert!(matches!(world.unpack(form, &[pax(&[]), pax(&[])]), Err(UnpackError::NotAnArchive { .. })));
        assert!(matches!(world.unpack(form, &[vec![7; 512]]), Err(UnpackError::NotAnArchive { .. })));
        // What is said about everything is passed over.
        world.unpack(form, &[typed(b'g', "g", b"14 path=../evil\n"), file("fine", b"")]).unwrap();
        assert!(world.to("fine").exists());
    }
}

#[test]
fn sparse_maps_must_be_possible() {
    for form in FORMS {
        let world = World::new();
        let sparse = |records: &[(&str, &[u8])], content: &[u8]| [pax(records), file("f", content)];
        for map in ["0,5,3,5", "5,5,0,5", "95,10", "0,9", "18446744073709551615,10"] {
            let records: [(&str, &[u8]); 2] = [("GNU.sparse.size", b"100"), ("GNU.sparse.map", map.as_bytes())];
            assert!(
                matches!(world.unpack(form, &sparse(&records, &[1; 10])), Err(UnpackError::Refused { .. })),
                "{map}"
            );
        }
        let one: &[(&str, &[u8])] =
            &[("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0"), ("GNU.sparse.realsize", b"100")];
        for map in ["1\n95\n10\n", "x\n", "99999999999\n", "", "2\n0\n5\n3\n5\n"] {
            let mut content = map.as_bytes().to_vec();
            content.resize(512, 0);
            content.extend_from_slice(&[1; 10]);
            assert!(matches!(world.unpack(form, &sparse(one, &content)), Err(UnpackError::Refused { .. })), "{map:?}");
        }
        world.refuses(
            form,
            &sparse(&[("GNU.sparse.major", b"2"), ("GNU.sparse.minor", b"0"), ("GNU.sparse.size", b"1")], b""),
            "not known",
        );
        world.refuses(form, &sparse(&[("GNU.sparse.map", b"0,0")], b""), "no size");
        let records: [(&str, &[u8]); 2] = [("GNU.sparse.size", b"99999999999999"), ("GNU.sparse.map", b"")];
        let huge = world.unpack(form, &sparse(&records, b""));
        assert!(matches!(huge, Err(UnpackError::Bound { which: Bound::FileBytes, .. })), "{huge:?}");
        // Old GNU: more than the header holds, and then lies.
        let mut block = header(b'S', b"old", b"00000000012", b"");
        block[257..265].copy_from_slice(b"ustar  \0");
        block[386..410].copy_from_slice(b"0000000006200000000012\0\0");
        block[483..494].copy_from_slice(b"00000000074");
        assert!(matches!(world.unpack(form, &[seal(block)]), Err(UnpackError::Refused { .. })));
    }
}

#[test]
fn bombs_are_bounded() {
    let world = World::new();
    let bound = |archive: Vec<u8>, bounds: &Bounds| match world.unpack_raw(archive.as_slice(), Form::Native, bounds) {
        Err(UnpackError::Bound { which, .. }) => which,
        other => panic!("not bounded: {other:?}"),
    };
    let small = Bounds { entries_max: 5, bytes_max: 1000, depth_max: 10, ..Bounds::default() };
    assert_eq!(bound((0..6).flat_map(|n| file(&format!("f{n}"), b"")).collect(), &small), Bound::Entries);
    assert_eq!(bound((0..6).flat_map(|_| typed(b'g', "g", b"")).collect(), &small), Bound::Entries);
    assert_eq!(bound([file("a", &[1; 600]), file("b", &[1; 600])].concat(), &small), Bound::Bytes);
    assert!(!world.to("b").exists(), "it was refused before it was written");
    assert_eq!(bound(header(b'0', b"f", b"77777777777", b""), &small), Bound::Bytes);
    assert_eq!(bound(file(&"d/".repeat(11), b""), &small), Bound::Depth);
    assert_eq!(bound(header(b'x', b"x", b"07777777777", b""), &small), Bound::RecordBytes);
    assert_eq!(bound(header(b'L', b"L", b"07777777777", b""), &small), Bound::PathBytes);
    assert_eq!(bound(header(b'K', b"K", b"\x80\0\0\0\0\xff\xff\xff\xff\xff\xff\xff", b""), &small), Bound::PathBytes);
    // An endless stream of one header that promises more than memory holds.
    let endless = header(b'x', b"x", b"00003777777", b"");
    let stream = endless.as_slice().chain(io::repeat(b'0'));
    assert!(world.unpack_raw(stream, Form::Native, &small).is_err());
}

#[test]
fn attributes_are_chosen() {
    if !is_root() {
        return;
    }
    let given = |key: &str, value: &[u8]| [pax(&[(&format!("SCHILY.xattr.{key}"), value)]), entry(b'5', "d", "")];
    for (key, value, native, oci) in [
        ("user.mine", &b"1"[..], true, true),
        ("trusted.overlay.opaque", b"y", true, false),
        ("trusted.overlay.opaque", b"x", false, false),
        ("trusted.overlay.redirect", b"/etc", false, false),
        ("user.overlay.redirect", b"/etc", true, false),
        ("security.selinux", b"s", false, false),
        ("trusted.other", b"1", false, false),
        ("bad", b"1", false, false),
    ] {
        let world = World::new();
        assert_eq!(world.unpack(Form::Native, &given(key, value)).is_ok(), native, "{key}");
        let world = World::new();
        world.unpack(Form::Oci, &given(key, value)).unwrap();
        let set = lines(&world.place.path("to")).unwrap().iter().any(|line| line.contains(&format!(" {key}=")));
        assert_eq!(set, oci, "{key}");
    }
}

#[test]
fn oci_marks_mean_what_they_say() {
    if !is_root() {
        return;
    }
    let world = World::new();
    let opaque = |name: &str| {
        let mut value = [0; 8];
        rustix::fs::getxattr(world.to(name), "trusted.overlay.opaque", &mut value)
            .is_ok_and(|count| value[..count] == *b"y")
    };
    let is_whiteout =
        |name: &str| world.to(name).symlink_metadata().is_ok_and(|found| found.file_type().is_char_device());
    let parts = [
        file("gone/.wh.x", b""),
        file("both-1", b"1"),
        file(".wh.both-1", b""),
        file(".wh.both-2", b""),
        file("both-2", b"2"),
        entry(b'5', "again-1", ""),
        file(".wh.again-1", b""),
        file(".wh.again-2", b""),
        entry(b'5', "again-2", ""),
        file(".wh.again-3", b""),
        file("again-3/inside", b""),
        file("clean/.wh..wh..opq", b""),
        file(".wh..wh.plnk/1", b"aufs"),
        file(".wh..wh.aufs", b"aufs"),
    ];
    world.unpack(Form::Oci, &parts).unwrap();
    assert!(is_whiteout("gone/x"));
    assert!(world.to("both-1").is_file() && world.to("both-2").is_file(), "what the layer has wins");
    assert!(
        opaque("again-1") && opaque("again-2") && opaque("again-3"),
        "a folder that was made again shows nothing old"
    );
    assert!(opaque("clean") && !opaque("gone"));
    assert!(!lines(&world.place.path("to")).unwrap().iter().any(|line| line.contains("wh.")));
    for name in [".wh.", ".wh..", ".wh...", "d/.wh..."] {
        world.refuses(Form::Oci, &[file(name, b"")], "hides nothing");
    }
    world.refuses(Form::Oci, &[file(".wh.d/x", b"")], "inside a whiteout");
    world.refuses(Form::Oci, &[file(".wh..wh..opq", b"")], "hides all layers");
    let mut device = entry(b'3', "device", "");
    device[329..345].copy_from_slice(b"0000000\x000000000\0");
    world.refuses(Form::Oci, &[seal(device.clone())], "0/0");
    world.unpack(Form::Native, &[seal(device.clone())]).unwrap();
    assert!(is_whiteout("device"));
    world.refuses(Form::Native, &[entry(b'1', "l", "device")], "only one name");
    device[329..345].copy_from_slice(b"0000001\x000000003\0");
    world.unpack(Form::Oci, &[seal(device)]).unwrap();
}

fn small_archive() -> Vec<u8> {
    let place = Place::new();
    let from = place.folder("from");
    fs::create_dir(from.join("folder")).unwrap();
    fs::write(from.join("folder/file"), "some content").unwrap();
    fs::hard_link(from.join("folder/file"), from.join("linked")).unwrap();
    symlink("../canary", from.join("link")).unwrap();
    fs::write(from.join("n".repeat(200)), "long").unwrap();
    fs::File::create(from.join("sparse")).unwrap().set_len(100_000).unwrap();
    rustix::fs::setxattr(from.join("linked"), "user.a", b"1", rustix::fs::XattrFlags::empty()).unwrap();
    let mut packer = Packer::new(Vec::new(), Form::Native);
    packer.tree("", &from).unwrap();
    packer.finish().unwrap()
}

#[test]
fn a_cut_archive_is_told() {
    let archive = small_archive();
    let world = World::new();
    world.unpack_raw(archive.as_slice(), Form::Native, &Bounds::default()).unwrap();
    for cut in (0..archive.len() - 512).step_by(512).chain([1, 511, 513, archive.len() - 513]) {
        let result = world.unpack_raw(&archive[..cut], Form::Native, &Bounds::default());
        // One block of the two that mark the end is enough: nothing can be missing then.
        assert!(matches!(result, Err(UnpackError::Truncated)), "{cut}: {result:?}");
    }
}

/// Bytes are changed at random, and headers made valid again so that the changes are read.
#[test]
fn a_damaged_archive_does_no_harm() {
    let archive = small_archive();
    let world = World::at(Place::large());
    let to = world.place.path("to");
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut roll = |sides: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % sides as u64) as usize
    };
    let bounds = Bounds { bytes_max: 1 << 20, file_bytes_max: 1 << 30, ..Bounds::default() };
    let mut unpacked = 0;
    for round in 0..20_000 {
        let mut damaged = archive.clone();
        for _ in 0..=roll(4) {
            let spot = roll(damaged.len());
            damaged[spot] = match roll(4) {
                0 => 0,
                1 => b"0123456789/.\n= wh"[roll(17)],
                2 => damaged[roll(damaged.len())],
                _ => roll(256) as u8,
            };
        }
        for block in damaged.chunks_mut(512).filter(|block| block[257..].starts_with(b"ustar")) {
            block.copy_from_slice(&seal(block.to_vec()));
        }
        let form = FORMS[round % 2];
        unpacked += usize::from(unpack(damaged.as_slice(), &to, form, &bounds).is_ok());
        if round % 1000 == 999 {
            // An empty archive, for the look at what is beside.
            world.unpack(form, &[]).unwrap();
            viv_layer::remove(&to).unwrap();
            fs::create_dir(&to).unwrap();
        }
    }
    assert!(unpacked > 100 && unpacked < 19_900, "{unpacked} went through: this tests nothing");
}

#[test]
fn a_reader_that_fails_is_told_apart() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the line is cut"))
        }
    }
    let world = World::new();
    let archive = small_archive();
    let result = world.unpack_raw(archive[..1024].chain(Broken), Form::Native, &Bounds::default());
    assert!(matches!(result, Err(UnpackError::Read { .. })), "{result:?}");
    let missing = unpack(archive.as_slice(), &world.place.path("missing"), Form::Native, &Bounds::default());
    assert!(matches!(missing, Err(UnpackError::Io { .. })));
}

/// Gives little at a time, as a network does.
struct Drip<'a>(&'a [u8]);
impl Read for Drip<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = buffer.len().min(1 + self.0.len() % 97);
        self.0.read(&mut buffer[..count])
    }
}

#[test]
fn a_corpus_survives_small_pieces() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let from = place.corpus("from", Size::Small);
    let mut packer = Packer::new(Vec::new(), Form::Native);
    packer.tree("", &from).unwrap();
    let archive = packer.finish().unwrap();
    let to = place.folder("to");
    unpack(Drip(&archive), &to, Form::Native, &Bounds::default()).unwrap();
    common::assert_same(&from, &to);
}
