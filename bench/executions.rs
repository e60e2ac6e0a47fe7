//! Commands through the daemon: how long one takes from asking to its end, how many a second there are, and how long it
//! takes from a cancel until the whole tree is gone, next to the bound of 1 s (X3: TERM, 500 ms, KILL); and from the stop of
//! a task until that is confirmed, next to the 5 s of K2.
//!
//! `VIV_BENCH_ROUNDS` changes the number of each.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use viv_api::bound::{TaskRef, WaitMs};
use viv_api::client::{Client, SandboxHandle};
use viv_api::execution::{Execution, ExecutionState, OutputLine, StartExecution};
use viv_api::sandbox::CreateSandbox;
use viv_api::task::{CreateTask, StopTask, TaskState};

mod common;
#[path = "common/daemon.rs"]
mod daemon;

use daemon::{client_of, serve};

/// How many clients at once for the number of commands a second.
const AT_ONCE: usize = 8;

/// A child in a session of its own that ignores TERM: only KILL ends it.
const STUBBORN: &str = "setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done' & echo up; wait";

fn main() {
    let rounds = std::env::var("VIV_BENCH_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(200);
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir().unwrap();
    let mut process = serve(folder.path());
    let client = client_of(folder.path());
    let id = client.create(&CreateSandbox::default(), None).unwrap().into_sandbox().id;
    let sandbox = client.sandbox(&id);
    run(&sandbox, "true");

    let times = (0..rounds).map(|_| timed(|| drop(run(&sandbox, "true")))).collect();
    print("a command, from asking to its end", times);
    let times = (0..rounds).map(|_| {
        let detached = StartExecution { detach: true, ..sh("true") };
        timed(|| drop(sandbox.start(&detached, None).unwrap()))
    });
    print("a detached one, until it is durable", times.collect());
    println!("commands a second, {AT_ONCE} at a time     {:>8.0}", a_second(&client, &id, rounds));

    let times = (0..rounds).map(|_| cancelled(&sandbox, "echo up; sleep 1000"));
    print("cancel to gone: it obeys", times.collect());
    let times = (0..rounds.min(100)).map(|_| cancelled(&sandbox, STUBBORN));
    let worst = print("cancel to gone: a child ignores TERM", times.collect());
    println!("the bound is 1 s: {}", if worst < Duration::from_secs(1) { "p99 holds" } else { "p99 DOES NOT HOLD" });

    let times = (0..rounds.min(50)).map(|_| stopped(&client, true)).collect();
    print("task stop to gone: it is kept", times);
    let times = (0..rounds.min(50)).map(|_| stopped(&client, false)).collect();
    let worst = print("task stop to gone, with its sandbox", times);
    println!("the bound is 5 s: {}", if worst < Duration::from_secs(5) { "p99 holds" } else { "p99 DOES NOT HOLD" });

    sandbox.delete(None).unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
}

fn sh(script: &str) -> StartExecution {
    StartExecution::of(["/bin/sh", "-c", script]).unwrap()
}

fn timed(work: impl FnOnce()) -> Duration {
    let began = Instant::now();
    work();
    began.elapsed()
}

fn run(sandbox: &SandboxHandle<'_>, script: &str) -> Execution {
    let started = sandbox.start(&sh(script), None).unwrap();
    for line in sandbox.execution(started.id).follow(0) {
        if let OutputLine::End(end) = line.unwrap() {
            return *end.end;
        }
    }
    panic!("an output without an end")
}

fn a_second(client: &Client, id: &viv_core::SandboxId, rounds: usize) -> f64 {
    let next = AtomicUsize::new(0);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let sandbox = client.sandbox(id);
                while next.fetch_add(1, Ordering::Relaxed) < 2 * rounds {
                    run(&sandbox, "true");
                }
            });
        }
    });
    f64::from(u32::try_from(2 * rounds).unwrap_or(u32::MAX)) / began.elapsed().as_secs_f64()
}

/// The answer comes when every process of it was seen to be gone.
fn cancelled(sandbox: &SandboxHandle<'_>, script: &str) -> Duration {
    let started = sandbox.start(&sh(script), None).unwrap();
    let handle = sandbox.execution(started.id);
    // It runs, and has said so.
    while handle.get().unwrap().output_bytes == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    timed(|| assert_eq!(handle.cancel().unwrap().state, ExecutionState::Cancelled))
}

/// From the request to the answer, which confirms that everything of it is gone (K2).
fn stopped(client: &Client, keep_alive: bool) -> Duration {
    let request = CreateTask { keep_alive, ..CreateTask::of(["/bin/sh", "-c", STUBBORN]).unwrap() };
    let task = client.run_task(&request, None).unwrap();
    let id = TaskRef::from(&task.id);
    // It runs, and has said so.
    while client.task(&id).unwrap().times.output_at_ms.is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let took = timed(|| {
        let task = client.stop_task(&id, &StopTask { wait_ms: Some(WaitMs::new(60_000).unwrap()) }).unwrap();
        assert_eq!(task.state, TaskState::Stopped, "{task:?}");
    });
    if keep_alive {
        client.sandbox(&task.sandbox).delete(None).unwrap();
    }
    took
}

fn print(what: &str, mut times: Vec<Duration>) -> Duration {
    times.sort();
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!("{what:<38} p50 {:>8.2} ms   p99 {:>8.2} ms", ms(at(50)), ms(at(99)));
    at(99)
}
