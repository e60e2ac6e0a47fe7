//! What waiting for an end costs, looked at in a process of its own (T3).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Ground, SOON, eventually_quietly, kill};
use viv_core::EndCause;
use viv_provider::{Provider, ProviderError};

/// As many as one shim takes.
const WAITERS: usize = 64;

/// How often each thread of this process went to sleep so far: whoever looks again and again does so each time.
fn switches() -> BTreeMap<PathBuf, u64> {
    let of = |task: PathBuf| {
        let status = fs::read_to_string(task.join("status")).ok()?;
        let count =
            status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse().ok()?;
        Some((task, count))
    };
    fs::read_dir("/proc/self/task").unwrap().flatten().filter_map(|task| of(task.path())).collect()
}

fn sockets() -> usize {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

#[tokio::test]
async fn t3_waiting_is_a_connection_and_nothing_else() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let before = sockets();
    let wait = || {
        let (provider, instance) = (ground.provider.clone(), sandbox.instance());
        tokio::spawn(async move { provider.wait_end(&instance).await })
    };
    let waiting: Vec<_> = (0..WAITERS).map(|_| wait()).collect();
    let until = Instant::now() + SOON;
    while sockets() < before + WAITERS {
        assert!(Instant::now() < until, "not all wait");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // One too many hears so, and does not ask again.
    let refused = tokio::time::timeout(SOON, wait()).await.unwrap().unwrap();
    assert!(matches!(refused, Err(ProviderError::Exhausted { .. })), "{refused:?}");
    // Threads that did something before go when they had nothing to do for a while.
    assert!(eventually_quietly(|| threads() <= 4), "a thread each: {}", threads());
    assert_eq!(sockets() - before, WAITERS);

    let so_far = switches();
    tokio::time::sleep(Duration::from_secs(1)).await;
    // Threads that ended meanwhile are not there to be counted.
    let woken: u64 = switches().iter().map(|(task, count)| count - so_far.get(task).unwrap_or(&0)).sum();
    eprintln!("{WAITERS} waiting: as many sockets, {} threads, {woken} wake-ups in a second", threads());
    assert!(woken < WAITERS as u64, "{woken} wake-ups while nothing happened");

    kill(sandbox.agent_pid(), Signal::KILL);
    for waiter in waiting {
        let ended = tokio::time::timeout(SOON, waiter).await.unwrap().unwrap().unwrap();
        assert_eq!(ended.cause, EndCause::Signalled { signal: 9 });
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}
