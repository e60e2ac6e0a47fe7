//! The CRIU to test with, and ones that misbehave.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// When this says something, nothing is passed over: what is missing is a failure. `scripts/require-criu` knows where.
const REQUIRED: &str = "VIV_REQUIRE_CRIU";

/// That of `scripts/prepare criu`, or what `VIV_CRIU` names. What a kernel cannot do by CRIU's own words is passed over.
pub fn criu() -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/criu/bin/criu");
    let named = std::env::var_os("VIV_CRIU").filter(|named| !named.is_empty()).map(PathBuf::from);
    let Some(found) = named.or(tools.exists().then_some(tools)) else {
        pass_over("there is no CRIU; `scripts/prepare criu` fetches one");
        return None;
    };
    let checked = match Command::new(&found).arg("check").output() {
        Ok(checked) => checked,
        Err(error) => panic!("{}: {error}", found.display()),
    };
    if !checked.status.success() {
        pass_over(&format!("{}: {}", found.display(), String::from_utf8_lossy(&checked.stderr).trim()));
        return None;
    }
    Some(fs::canonicalize(found).unwrap())
}

/// Says why a test of memory is passed over, which only some may do in silence.
#[track_caller]
pub fn pass_over(why: &str) {
    let is_required = std::env::var_os(REQUIRED).is_some_and(|said| !said.is_empty());
    assert!(!is_required, "nothing is passed over where {REQUIRED} is set: {why}");
    eprintln!("passed over: {why}");
}

/// One that does something else first when it is told about a sandbox.
pub fn instead(folder: &Path, criu: &Path, instead: &str) -> PathBuf {
    let path = folder.join("criu");
    let text = format!("#!/bin/sh\ncase \" $* \" in *' --root '*) {instead} ;; esac\nexec {} \"$@\"\n", criu.display());
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}
