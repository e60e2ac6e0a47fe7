//! Builds the agent as a small static binary, so that it can be carried inside this one.
//!
//! A nested cargo with a target folder of its own: cargo has no stable way to
//! depend on another package's binary with other flags.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let target = env::var("TARGET").expect("cargo sets TARGET");
    // Asked for when it runs: a build folder that was copied would otherwise build the agent of where it came from.
    let workspace = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../..");
    let of_agent = ["src", "build.rs", "seccomp", "Cargo.toml"].map(|name| format!("crates/viv-agent/{name}"));
    for watched in of_agent.iter().map(String::as_str).chain(["crates/viv-core/src", "Cargo.lock"]) {
        println!("cargo::rerun-if-changed={}", workspace.join(watched).display());
    }

    let target_dir = out.join("agent-target");
    let status = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"))
        .current_dir(&workspace)
        .args(["build", "--package", "viv-agent", "--bin", "viv-agent", "--profile", "agent"])
        .args(["--target", &target])
        .arg("--target-dir")
        .arg(&target_dir)
        // Flags of the outer build (coverage, sanitizers) are not for PID 1 of a sandbox.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the agent does not build");

    let built = target_dir.join(&target).join("agent/viv-agent");
    fs::copy(&built, out.join("viv-agent")).expect("the agent was built");
}
