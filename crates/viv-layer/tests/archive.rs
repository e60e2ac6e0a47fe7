//! What is packed is unpacked the same, by us and by GNU tar, and the other way round.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{Place, assert_same, is_root};
use viv_layer::corpus::Size;
use viv_layer::{Bounds, Form, Packer, Survey, Unpacked, copy, lines, survey, unpack};

fn pack(folder: &Path, form: Form) -> (Vec<u8>, Survey) {
    let mut packer = Packer::new(Vec::new(), form);
    let survey = packer.tree("", folder).unwrap();
    (packer.finish().unwrap(), survey)
}

fn unpack_all(archive: &[u8], to: &Path, form: Form) -> Unpacked {
    unpack(archive, to, form, &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {error:?}"))
}

fn tar(arguments: &[&str], at: &Path) -> String {
    let output = Command::new("tar").args(arguments).current_dir(at).env("LC_ALL", "C").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_native_form_is_exact() {
    if !is_root() {
        return;
    }
    let place = Place::large();
    let from = place.corpus("from", Size::Full);
    let (archive, seen) = pack(&from, Form::Native);
    assert!(seen.same_structure(&survey(&from).unwrap()));
    let to = place.folder("to");
    let unpacked = unpack_all(&archive, &to, Form::Native);
    assert_eq!(unpacked.entries, seen.entries + 1, "all entries, and the top");
    assert_same(&from, &to);
    assert!(survey(&to).unwrap().disk_bytes < seen.disk_bytes * 2, "holes were filled");
    assert!(pack(&to, Form::Native).0 == archive, "the same layer gives other bytes");
    // Once more over what is there.
    unpack_all(&archive, &to, Form::Native);
    assert_same(&from, &to);
}

#[test]
fn a_tree_and_files_share_an_archive() {
    let place = Place::new();
    let from = place.folder("from");
    fs::write(from.join("inside"), "x").unwrap();
    let mut packer = Packer::new(Vec::new(), Form::Native);
    packer.file("manifest.json", b"{}").unwrap();
    packer.tree("layers/0", &from).unwrap();
    packer.tree("layers/1/", &from).unwrap();
    let to = place.folder("to");
    unpack_all(&packer.finish().unwrap(), &to, Form::Native);
    assert_eq!(fs::read(to.join("manifest.json")).unwrap(), b"{}");
    assert_same(&from, &to.join("layers/0"));
    assert_same(&from, &to.join("layers/1"));
}

/// Sockets and `.vivarium` stay behind; the marks are written in another way and come back.
#[test]
fn the_oci_form_keeps_what_images_have() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let from = place.corpus("from", Size::Small);
    for name in ["nodes/socket", "links/a/socket", "links/b/socket"] {
        fs::remove_file(from.join(name)).unwrap();
    }
    let expected = place.path("expected");
    copy(&from, &expected).unwrap();
    let top = fs::metadata(&from).unwrap().modified().unwrap();
    fs::create_dir(from.join(".vivarium")).unwrap();
    fs::write(from.join(".vivarium/agent"), "ours").unwrap();
    fs::File::open(&from).unwrap().set_modified(top).unwrap();
    let (archive, seen) = pack(&from, Form::Oci);
    assert!(seen.same_structure(&survey(&expected).unwrap()));
    let to = place.folder("to");
    unpack_all(&archive, &to, Form::Oci);
    assert_same(&expected, &to);
    fs::write(place.path("oci.tar"), &archive).unwrap();
    let listed = tar(&["--list", "-f", "oci.tar"], &place.path(""));
    for name in ["./", "marks/opaque/.wh..wh..opq", "marks/clear/.wh.gone", "marks/.wh.gone-above"] {
        assert!(
            listed.lines().any(|line| line == name),
            "{name} is missing: {:?}",
            listed.lines().filter(|line| line.contains("marks")).collect::<Vec<_>>()
        );
    }
    assert!(!listed.contains("socket") && !listed.contains(".vivarium"));
    fs::write(from.join(".wh.pretender"), "").unwrap();
    assert!(Packer::new(std::io::sink(), Form::Oci).tree("", &from).is_err());
}

#[test]
fn gnu_tar_unpacks_what_we_pack() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let from = place.corpus("from", Size::Small);
    // GNU tar makes files of sockets, and has another form for access lists.
    for name in ["nodes/socket", "links/a/socket", "links/b/socket"] {
        fs::remove_file(from.join(name)).unwrap();
    }
    let (archive, _) = pack(&from, Form::Native);
    fs::write(place.path("ours.tar"), &archive).unwrap();
    let listed = tar(&["--list", "-v", "-f", "ours.tar"], &place.path(""));
    assert_eq!(listed.lines().count() as u64, survey(&from).unwrap().entries + 1);
    place.folder("to");
    let arguments =
        ["-x", "-p", "--same-owner", "--numeric-owner", "--xattrs", "--xattrs-include=*", "-f", "../ours.tar"];
    tar(&arguments, &place.path("to"));
    assert_same(&from, &place.path("to"));
    assert!(survey(&place.path("to")).unwrap().disk_bytes < 10 << 20, "GNU tar saw no holes");
}

/// What GNU tar writes in all of its formats, with holes in each of its ways to write them.
#[test]
fn we_unpack_what_gnu_tar_packs() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let from = place.corpus("from", Size::Small);
    for name in ["nodes/socket", "links/a/socket", "links/b/socket", "links/b/fifo"] {
        fs::remove_file(from.join(name)).unwrap();
    }
    let whole_seconds = |name: &str| {
        let mut lines = lines(&place.path(name)).unwrap();
        for line in &mut lines {
            // Other formats than PAX have neither attributes nor fractions of seconds.
            let attributes = [" user.", " trusted.", " security.", " system."];
            let end = attributes.iter().filter_map(|name| line.find(name)).min().unwrap_or(line.len());
            line.truncate(end);
            if let Some(fraction) = line.find("s+") {
                line.replace_range(fraction..fraction + "s+123456789".len(), "");
            }
        }
        lines
    };
    let pax = ["--format=pax", "--pax-option=delete=atime,delete=ctime", "--xattrs", "--xattrs-include=*", "--acls"];
    let ways: [(&str, &[&str]); 5] = [
        ("pax", &pax),
        ("pax00", &["--sparse", "--sparse-version=0.0"]),
        ("pax01", &["--sparse", "--sparse-version=0.1"]),
        ("pax10", &["--sparse", "--sparse-version=1.0"]),
        ("gnu", &["--sparse", "--format=gnu"]),
    ];
    for (name, options) in ways {
        let mut arguments = vec!["-c", "--numeric-owner", "-f", "../theirs.tar"];
        arguments.extend(options);
        if name.starts_with("pax") && name != "pax" {
            arguments.extend(pax);
        }
        if name == "pax" {
            // Without --sparse it would write a terabyte.
            arguments.push("--exclude=./sparse");
        }
        arguments.push(".");
        tar(&arguments, &from);
        let to = place.folder(name);
        // What it has of access lists is its own; our own form is stricter.
        let archive = fs::File::open(place.path("theirs.tar")).unwrap();
        if let Err(error) = unpack(archive, &to, Form::Native, &Bounds::default()) {
            panic!("{name}: {error}");
        }
        let mut expected = whole_seconds("from");
        if name == "pax" {
            expected.retain(|line| !line.starts_with("sparse"));
        } else {
            let (theirs, ours) = (to.join("sparse"), from.join("sparse"));
            for file in ["pieces", "ends-with-data", "dense", "zeros"] {
                assert!(fs::read(theirs.join(file)).unwrap() == fs::read(ours.join(file)).unwrap(), "{name}: {file}");
            }
            assert!(survey(&to).unwrap().disk_bytes < 10 << 20, "{name}: holes were filled");
        }
        let unpacked = whole_seconds(name);
        let differing = unpacked.iter().zip(&expected).find(|(unpacked, expected)| unpacked != expected);
        assert!(unpacked == expected, "{name}: {differing:?}");
        if name == "pax10" {
            assert_same(&from, &to);
        }
    }
}
