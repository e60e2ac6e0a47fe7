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
}
