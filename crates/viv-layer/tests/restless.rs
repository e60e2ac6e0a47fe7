//! Trees that change while they are read. What comes of it may be an error, but
//! never a panic, and never anything from outside the tree.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use common::Place;
use viv_layer::{Form, Packer, content, copy, merge, remove, survey};

/// How often each function looks at the tree.
const ROUNDS: usize = 25;

/// What is only in the folder beside, and must never show up.
const SECRET: &str = "the bystander's own words";

fn stir(folder: &Path, beside: &Path, round: usize) {
    let _ = fs::create_dir(folder.join("a"));
    let _ = fs::write(folder.join("a/file"), vec![b'x'; round * 7919 % 30_000]);
    let _ = fs::hard_link(folder.join("a/file"), folder.join("linked"));
    let _ = File::create(folder.join("growing")).and_then(|file| file.set_len((round as u64 * 7919) % (1 << 22)));
    let _ = fs::rename(folder.join("a"), folder.join("b"));
    // A link where a folder was, to what is not to be seen.
    let _ = symlink(beside, folder.join("a"));
    let _ = symlink(beside.join("secret"), folder.join("b/link"));
    let _ = fs::remove_file(folder.join("b/file"));
    let _ = symlink(beside.join("secret"), folder.join("b/file"));
    let _ = fs::remove_file(folder.join("linked"));
    let _ = fs::remove_file(folder.join("a"));
    let _ = fs::remove_dir_all(folder.join("b"));
}

fn holds_secret(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    entries.flatten().any(|entry| {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        kind.is_dir() && holds_secret(&path)
            || kind.is_file() && fs::read(&path).unwrap().windows(SECRET.len()).any(|text| text == SECRET.as_bytes())
    })
}

#[test]
fn a_tree_that_changes_meanwhile_gives_nothing_away() {
    let place = Place::large();
    let (folder, beside) = (place.folder("folder"), place.folder("beside"));
    fs::write(beside.join("secret"), SECRET).unwrap();
    fs::write(beside.join("file"), SECRET).unwrap();
    fs::write(folder.join("constant"), "here").unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !done.load(Ordering::Relaxed) {
                stir(&folder, &beside, round);
                round += 1;
            }
        });
        let mut succeeded = 0;
        for _ in 0..ROUNDS {
            let _ = (survey(&folder), content(&folder));
            let mut packer = Packer::new(Vec::new(), Form::Native);
            if packer.tree("", &folder).is_ok() {
                let archive = packer.finish().unwrap();
                assert!(!archive.windows(SECRET.len()).any(|text| text == SECRET.as_bytes()), "a link was followed");
                viv_layer::unpack(
                    archive.as_slice(),
                    &place.folder("unpacked"),
                    Form::Native,
                    &viv_layer::Bounds::default(),
                )
                .unwrap();
                remove(&place.path("unpacked")).unwrap();
                succeeded += 1;
            }
            let to = place.path("to");
            succeeded += usize::from(copy(&folder, &to).is_ok());
            assert!(!holds_secret(&to), "a link was followed");
            remove(&to).unwrap();
            let _ = merge(&[&folder, &folder], &to);
            assert!(!holds_secret(&to), "a link was followed");
            remove(&to).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        assert!(succeeded > 0, "nothing ever succeeded: this tests nothing");
    });
}
