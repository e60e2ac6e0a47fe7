//! A daemon to be measured.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use viv_api::client::{Client, Location};

/// How long a daemon may take to be there.
const WITHIN: Duration = Duration::from_secs(60);

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
    let child = command(data).envs(config.map(|config| ("VIV_CONFIG", config))).stderr(Stdio::null()).spawn().unwrap();
    wait_for(data, child.id());
    child
}

fn command(data: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_viv"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--data"]).arg(data);
    command.args(["--cgroup-prefix", &format!("viv-bench-{}", std::process::id())]);
    command
}

/// Starts one that waits for its turn, and answers when it does.
#[allow(dead_code, reason = "not every measurement needs it")]
pub(crate) fn stand_by(data: &Path) -> Child {
    let mut child = command(data).arg("--standby").stderr(Stdio::piped()).spawn().unwrap();
    let said = child.stderr.take().unwrap();
    let (sender, waits) = mpsc::channel();
    // Read to the end, so that it never waits for a reader.
    std::thread::spawn(move || {
        for line in BufReader::new(said).lines().map_while(Result::ok) {
            if line.contains("standing by") {
                let _ = sender.send(());
            }
        }
    });
    waits.recv_timeout(WITHIN).expect("it stands by");
    child
}

/// Waits until this very daemon answers.
pub(crate) fn wait_for(data: &Path, pid: u32) {
    let until = Instant::now() + WITHIN;
    let listens = || {
        let text = fs::read(data.join("daemon.json")).ok()?;
        let daemon: serde_json::Value = serde_json::from_slice(&text).ok()?;
        (daemon["pid"] == pid).then_some(())
    };
    while !(listens().is_some() && client_of(data).ready().is_ok()) {
        assert!(Instant::now() < until, "the daemon does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
}
