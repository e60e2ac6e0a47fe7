//! How long a create takes until the sandbox is ready, with and without a spare for it, in one run.
//!
//! `VIV_BENCH_CREATES` changes how many.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use viv_api::client::Client;
use viv_api::sandbox::{CreateSandbox, Status};

mod common;
#[path = "common/daemon.rs"]
mod daemon;

use common::median;
use daemon::{client_of, serve_with};

/// Four spares that are there when they are asked for.
const SPARES: &str = "[spares.classes.plain]\nmin = 4\nmax = 4\n";

fn main() {
    let creates = std::env::var("VIV_BENCH_CREATES").ok().and_then(|text| text.parse().ok()).unwrap_or(30);
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir().unwrap();
    let config = folder.path().join("config.toml");
    for (name, text) in [("without spares", ""), ("with a spare", SPARES)] {
        fs::write(&config, text).unwrap();
        let times = measured(&folder.path().join("data"), &config, creates, !text.is_empty());
        let worst = times.iter().max().copied().unwrap_or_default();
        println!(
            "create, ready: {name:<15} {:>8.1} ms (median of {creates}, worst {:.1})",
            ms(median(times)),
            ms(worst)
        );
    }
}

fn measured(data: &Path, config: &Path, creates: usize, from_spares: bool) -> Vec<Duration> {
    fs::create_dir_all(data).unwrap();
    let mut daemon = serve_with(data, Some(config));
    let client = client_of(data);
    let mut times = Vec::new();
    for _ in 0..creates {
        if from_spares {
            until_ready(&client);
        }
        let began = Instant::now();
        let made = client.create(&CreateSandbox::default(), None).unwrap().into_sandbox();
        times.push(began.elapsed());
        assert_eq!(made.status, Status::Ready);
        client.sandbox(made.id).delete(None).unwrap();
    }
    if from_spares {
        let class = client.spares().unwrap().items.remove(0);
        assert_eq!(class.claimed_total, creates as u64, "each got one: {class:?}");
    }
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    // The next daemon wants none, and clears away what is left.
    fs::write(config, "").unwrap();
    let mut daemon = serve_with(data, Some(config));
    let until = Instant::now() + Duration::from_secs(60);
    while client_of(data).stats(&viv_api::query::StatsQuery::default()).unwrap().spare > 0 {
        assert!(Instant::now() < until, "the spares are not given up");
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    times
}

/// Waits until all spares are there, and nothing else goes on.
fn until_ready(client: &Client) {
    let until = Instant::now() + Duration::from_secs(60);
    while client.spares().unwrap().items[0].ready.len() < 4 {
        assert!(Instant::now() < until, "no spares");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
