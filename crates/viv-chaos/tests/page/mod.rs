//! Tables of docs/proof.md, between their marks. `UPDATE=1` writes them.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Tests of one program write one after the other.
static WRITES: Mutex<()> = Mutex::new(());

/// What the page has there.
#[allow(dead_code, reason = "not every test reads what it wrote")]
pub(crate) fn read(name: &str) -> String {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/proof.md")).unwrap();
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->\n"));
    let (_, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("{begin} is missing"));
    rest.split_once(&end).unwrap_or_else(|| panic!("{end} is missing")).0.to_owned()
}

/// The page has a row that counts this to so much, or gets that number.
#[allow(dead_code, reason = "not every test counts")]
pub(crate) fn counts(what: &str, count: usize) {
    let _one = WRITES.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/proof.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let begin = format!("| {what} | ");
    let (before, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("{begin} is missing"));
    let (_, after) = rest.split_once(" |\n").unwrap();
    let digits = count.to_string();
    let thousands: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|three| std::str::from_utf8(three).unwrap()).collect();
    let wanted = format!("{before}{begin}{} |\n{after}", thousands.join(","));
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &wanted).unwrap();
        return;
    }
    assert!(page == wanted, "UPDATE=1 brings the count of {what} in docs/proof.md up to date: {count}");
}

/// The page has this table, or gets it.
#[allow(dead_code, reason = "not every test has a table")]
pub(crate) fn has(name: &str, table: &str) {
    let _one = WRITES.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/proof.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->\n"));
    let (before, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("{begin} is missing"));
    let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("{end} is missing"));
    let wanted = format!("{before}{begin}\n{table}\n{end}{after}");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &wanted).unwrap();
        return;
    }
    assert!(page == wanted, "UPDATE=1 brings {name} of docs/proof.md up to date");
}
