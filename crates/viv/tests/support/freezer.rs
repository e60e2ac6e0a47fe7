//! Freezers, which not every machine has.

use std::fs;
use std::path::PathBuf;

use viv_sandbox::cgroup::Layout;

/// Where the freezer of the first kind of cgroups is mounted. Where there is none, the test is passed over.
#[track_caller]
pub fn first_kind() -> Option<PathBuf> {
    let found = Layout::detect().unwrap().v1.into_iter().find(|(_, controls)| controls.contains("freezer"));
    if found.is_none() {
        pass_over(has_first_kind(&fs::read_to_string("/proc/cgroups").unwrap_or_default()), "v1 freezer");
    }
    found.map(|(mount, _)| mount)
}

/// The same of cgroup v2, which has one wherever it is mounted.
#[track_caller]
pub fn second_kind() -> Option<PathBuf> {
    let found = Layout::detect().unwrap().v2;
    if found.is_none() {
        let kinds = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        pass_over(kinds.lines().any(|line| line.ends_with("\tcgroup2")), "cgroup v2");
    }
    found
}

/// Says that a test is passed over. In CI nobody reads that, so there it takes a kernel that really has none: one that is
/// only not mounted can be.
#[track_caller]
fn pass_over(kernel_has_it: bool, what: &str) {
    let is_ci = std::env::var_os("CI").is_some_and(|said| !said.is_empty());
    assert!(!(is_ci && kernel_has_it), "no {what} is mounted, and nothing is passed over in CI: the kernel has it");
    eprintln!("passed over: there is no {what} here");
}

/// Whether the kernel has a freezer of the first kind, by what it tells in `/proc/cgroups`.
fn has_first_kind(told: &str) -> bool {
    let words = told.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    words.into_iter().any(|words| words.first() == Some(&"freezer") && words.last() == Some(&"1"))
}
