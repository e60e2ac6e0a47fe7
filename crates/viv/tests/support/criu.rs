//! The CRIU to test with, and ones that misbehave.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// That of `scripts/prepare criu`, or what `VIV_CRIU` names. What a kernel cannot do by CRIU's own words is passed over.
pub fn criu() -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/criu/bin/criu");
    let named = std::env::var_os("VIV_CRIU").filter(|named| !named.is_empty()).map(PathBuf::from);
    let Some(found) = named.or(tools.exists().then_some(tools)) else {
        eprintln!("passed over: there is no CRIU; `scripts/prepare criu` fetches one");
        return None;
    };
    let checked = Command::new(&found).arg("check").output().unwrap();
    if !checked.status.success() {
        eprintln!("passed over: {}", String::from_utf8_lossy(&checked.stderr));
        return None;
    }
    Some(fs::canonicalize(found).unwrap())
}

/// One that does something else first when it is told about a sandbox.
pub fn instead(folder: &Path, criu: &Path, instead: &str) -> PathBuf {
    let path = folder.join("criu");
    let text = format!("#!/bin/sh\ncase \" $* \" in *' --root '*) {instead} ;; esac\nexec {} \"$@\"\n", criu.display());
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}
