//! The program that tries to get out, for the tests that put it inside.
#![allow(unreachable_pub, reason = "every test binary has its own copy of this")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The program, for whoever cannot build it: those who run as another user.
pub const PROGRAM: &str = "VIV_TEST_ESCAPE";

/// The program, linked statically, so that it runs in any root.
pub fn program() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(built) = std::env::var_os(PROGRAM) {
            return built.into();
        }
        let target_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("escape");
        let said = Command::new(env!("CARGO"))
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
            .args(["build", "--package", "viv-escape", "--locked", "--message-format", "json", "--quiet"])
            // With a target, the flags are not for build scripts and macros, which cannot be static.
            .args(["--target", &host_triple()])
            .arg("--target-dir")
            .arg(target_dir)
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&said.stdout);
        assert!(said.status.success(), "{text}{}", String::from_utf8_lossy(&said.stderr));
        let mut messages = text.lines().rev().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let built = messages.find_map(|message| Some(message["executable"].as_str()?.to_owned()));
        built.expect("cargo says what it built").into()
    })
}

fn host_triple() -> String {
    let said = Command::new("rustc").arg("-vV").output().unwrap();
    let text = String::from_utf8(said.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("host: ")).unwrap().to_owned()
}
