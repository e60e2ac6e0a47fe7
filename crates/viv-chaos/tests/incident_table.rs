//! The page that says which failures of others are staged by which tests, made from the names of the tests.
#![allow(missing_docs, reason = "tests")]

mod page;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const HEAD: &str = "\
# Failures of others, staged

Each row is a failure that happened in another system, and the tests here that carry its number in their names.

<!-- generated from the names of tests: UPDATE=1 cargo test -p viv-chaos --test incident_table -->
";

/// What went wrong elsewhere.
const INCIDENTS: [(u32, &str); 40] = [
    (1, "a resumed sandbox says idle, and neither commands nor files work in it"),
    (2, "stuck while starting, and cannot be deleted"),
    (3, "put to rest in spite of activity that was not written down yet"),
    (4, "the process inside was killed for memory; said to be started for minutes, without a reason"),
    (5, "the state that a client shows never changes"),
    (6, "what runs outlives a restart of its manager, and nobody owns it"),
    (7, "only one sweeper knows the deadline, and it stopped"),
    (8, "machines, sockets and rules are left over"),
    (9, "a resume of one team removed another team's sandbox"),
    (10, "the slow clean-up of a paused sandbox removed the resumed one"),
    (11, "an extension raced the end of the time"),
    (12, "traffic was led into a sandbox that was being paused"),
    (13, "files are lost from the second pause and resume on"),
    (14, "connecting reset the policy"),
    (15, "a timeout or kill hit the first process only"),
    (16, "taking up the output of a command again fails after two minutes"),
    (17, "an extension raced a timer in memory, and no sweep found what was left"),
    (18, "said to run while nothing inside answers"),
    (19, "one claim got two spares"),
    (20, "not found under the wrong name was taken for deleted"),
    (21, "ready after its machine was emptied"),
    (22, "an extension brought back what had expired"),
    (23, "a resume was answered and did nothing"),
    (24, "pausing for ever"),
    (25, "what was paused was ended by a sweep for the idle"),
    (26, "a create that failed left something running"),
    (27, "a stray request brought back what was destroyed"),
    (28, "an error although all is well"),
    (29, "a crash in the clean-up lost the record and kept the rest"),
    (30, "a sweep for orphans destroyed a create in flight"),
    (31, "a pause was answered, and a restore in flight undid it"),
    (32, "replaced while ready, without a word"),
    (33, "called terminated although the kill had failed"),
    (34, "the client of a command was killed, and not the command"),
    (35, "a restart between the last status and the release of a lease"),
    (36, "what lived was read as an orphan"),
    (37, "reading the status resumed it"),
    (38, "deleting one deleted the snapshot that others were made from"),
    (39, "the clean-up did not run, and nobody knew"),
    (40, "a stop was kept in memory: another process could not stop it, and the push happened"),
];

/// Those that nothing here can show, and why: none so far.
const CANNOT_BE_STAGED: [(u32, &str); 0] = [];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The number in the name of a test: `t3_incident_18_a_killed_agent…`.
fn number(test: &str) -> Option<u32> {
    let digits: String = test.split_once("incident_")?.1.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Tests by the number of their incident.
fn staged(root: &Path) -> BTreeMap<u32, Vec<(String, String)>> {
    let mut files = Vec::new();
    for crate_folder in fs::read_dir(root.join("crates")).unwrap() {
        for part in ["src", "tests"] {
            let folder = crate_folder.as_ref().unwrap().path().join(part);
            if folder.is_dir() {
                sources(&folder, &mut files);
            }
        }
    }
    files.sort();
    let mut staged: BTreeMap<u32, Vec<(String, String)>> = BTreeMap::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for line in text.lines().filter_map(|line| line.trim_start().split_once("fn ")) {
            let name: String = line.1.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            if let Some(number) = number(&name) {
                let file = file.strip_prefix(root).unwrap().display().to_string();
                staged.entry(number).or_default().push((name, file));
            }
        }
    }
    staged
}

/// Files by how many tests of them stage it: what docs/proof.md has.
fn files(tests: &[(String, String)]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, file) in tests {
        *counts.entry(file).or_default() += 1;
    }
    let files: Vec<String> = counts.iter().map(|(file, count)| format!("`{file}` ({count})")).collect();
    files.join("<br>")
}

#[test]
fn the_page_of_incidents_names_the_tests_that_there_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let staged = staged(&root);
    let mut page = format!("{HEAD}\n| # | what happened | staged by |\n|---|---|---|\n");
    let mut table = "| # | what happened | staged in |\n|---|---|---|\n".to_owned();
    for (number, what) in INCIDENTS {
        let cannot = CANNOT_BE_STAGED.iter().find(|(known, _)| *known == number);
        let tests = match (staged.get(&number), cannot) {
            (Some(tests), None) => {
                let tests: Vec<String> = tests.iter().map(|(name, file)| format!("`{name}` ({file})")).collect();
                tests.join("<br>")
            }
            (None, Some((_, why))) => format!("cannot be staged: {why}"),
            (Some(_), Some(_)) => panic!("{number} is staged after all"),
            (None, None) => panic!("no test has incident_{number}_ in its name: {what}"),
        };
        writeln!(page, "| {number} | {what} | {tests} |").unwrap();
        let place = staged.get(&number).map_or(tests, |tests| files(tests));
        writeln!(table, "| {number} | {what} | {place} |").unwrap();
    }
    page::has("incidents", &table);
    assert!(staged.keys().all(|number| INCIDENTS.iter().any(|(known, _)| known == number)), "{:?}", staged.keys());
    let file = root.join("docs/incidents.md");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&file, &page).unwrap();
    }
    let kept = fs::read_to_string(&file).unwrap_or_default();
    assert!(kept == page, "docs/incidents.md is out of date: UPDATE=1 cargo test -p viv-chaos --test incident_table");
}
