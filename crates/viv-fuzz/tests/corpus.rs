//! The corpus, on the compiler that everybody has: what a fuzzer found once is not found again.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use viv_fuzz::TARGETS;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

fn names(folder: &Path, end: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    entries.map(|name| name.trim_end_matches(end).to_owned()).collect()
}

#[test]
fn p6_every_kept_input_goes_well() {
    for (name, target) in TARGETS {
        let files = fs::read_dir(fuzz().join("corpus").join(name)).unwrap();
        let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(!files.is_empty(), "{name} has a corpus");
        for file in files {
            let data = fs::read(&file).unwrap();
            let went = std::panic::catch_unwind(|| target(&data));
            assert!(went.is_ok(), "{name}: {}", file.display());
        }
    }
}

#[test]
fn every_target_has_a_file_for_the_fuzzer_and_a_corpus() {
    let known: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names(&fuzz().join("fuzz_targets"), ".rs"), known);
    assert_eq!(names(&fuzz().join("corpus"), ""), known);
    // What is a target by its form is one of them, and is built by the fuzzer's manifest.
    let source = include_str!("../src/lib.rs");
    let written: BTreeSet<String> = source
        .lines()
        .filter_map(|line| line.strip_prefix("pub fn ")?.strip_suffix("(data: &[u8]) {"))
        .map(str::to_owned)
        .collect();
    assert_eq!(written, known);
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    for name in known {
        let (path, call) = (format!("path = \"fuzz_targets/{name}.rs\""), format!("viv_fuzz::{name}(data)"));
        assert!(manifest.contains(&format!("name = \"{name}\"\n{path}")), "{name} is built");
        let target = fs::read_to_string(fuzz().join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(target.contains(&call), "the target {name} calls {call}");
    }
}

/// What is kept reaches what it is about: a whole one is taken.
#[test]
fn a_whole_exported_snapshot_is_taken_apart() {
    let whole = fuzz().join("corpus/snapshot_file/whole_packed");
    let folder = tempfile::tempdir().unwrap();
    let bounds = viv_layer::Bounds::default();
    let taken = viv_sandbox::fuzzing::exported_snapshot(&whole, folder.path(), &bounds);
    // It says that it is of such a machine.
    assert_eq!(taken, cfg!(target_arch = "x86_64").then_some(1));
    let rows = viv_sandbox::fuzzing::page_list(&fs::read(fuzz().join("corpus/page_list/two_rows")).unwrap());
    assert_eq!(rows, Some(vec![(16, 0, 3), (100, 3, 2)]));
}
