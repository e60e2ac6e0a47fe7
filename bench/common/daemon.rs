//! A daemon to be measured.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use viv_api::client::{Client, Location};

pub(crate) fn client_of(data: &Path) -> Client {
    let daemon: serde_json::Value = serde_json::from_slice(&fs::read(data.join("daemon.json")).unwrap()).unwrap();
    let key = fs::read_to_string(data.join("key")).unwrap();
    let url = daemon["url"].as_str().unwrap().to_owned();
    Client::locate(Location::new(url).key(key.trim().to_owned()).name("bench")).unwrap()
}

/// Starts a daemon, and answers when it does.
#[allow(dead_code, reason = "not every measurement needs it")]
pub(crate) fn serve(data: &Path) -> Child {
    serve_with(data, None)
}

/// The same, with a configuration.
pub(crate) fn serve_with(data: &Path, config: Option<&Path>) -> Child {
    let _ = fs::remove_file(data.join("daemon.json"));
    let child = Command::new(env!("CARGO_BIN_EXE_viv"))
        .envs(config.map(|config| ("VIV_CONFIG", config)))
        .args(["serve", "--listen", "127.0.0.1:0", "--data"])
        .arg(data)
        .args(["--cgroup-prefix", &format!("viv-bench-{}", std::process::id())])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !(data.join("daemon.json").exists() && client_of(data).ready().is_ok()) {
        assert!(Instant::now() < until, "the daemon does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}
