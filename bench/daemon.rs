//! What the daemon costs when nothing happens, with 100,000 sandboxes in the record and 100 that live (half of the record
//! is hibernated, each with its snapshot, half is over): over two minutes, and with what comes more rarely than that, each
//! measured by itself, over an hour. How fast it answers then, how soon it shows that something was killed (T3), and how
//! long it takes to be back after a `kill -9`, by itself and by a standby, also when the owner only hangs (J8).
//!
//! `VIV_BENCH_RECORDS`, `VIV_BENCH_LIVE` and `VIV_BENCH_IDLE_S` change the numbers.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use viv_api::cleanup::BeginCleanup;
use viv_api::client::Client;
use viv_api::daemon::Reconciler;
use viv_api::diagnosis::HostView;
use viv_api::query::{ListSandboxes, StatsQuery};
use viv_api::reconcile::Reconcile;
use viv_api::sandbox::{CreateSandbox, Status};
use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, Desired, Moment, NewSandbox, Phase, Sandbox, Timings};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_sandbox::{LocalConfig, LocalProvider, Tidier, TidyTurn};
use viv_store::{Change, NewLine, Owner, SqliteStore, Store};

mod common;
#[path = "common/daemon.rs"]
mod daemon;
#[path = "common/rest.rs"]
mod rest;

use common::{fresh, median};
use daemon::{client_of, serve, stand_by, wait_for};
use rest::Pattern;

/// How long nothing happens: what runs every minute, or more often, does so at least twice. What runs more rarely is
/// measured by itself, see [`Rare`].
const IDLE_S: usize = 130;

/// The hour over which everything is summed up.
const HOUR_S: f64 = 3600.0;

/// What does not come in a quiet window of two minutes: what it costs once, in seconds of a core, and how often it comes
/// in an hour in which nothing happens.
struct Rare {
    what: &'static str,
    costs_s: f64,
    times: f64,
}

/// Comparing all snapshots takes no longer, on any machine.
const COMPARED_WITHIN: Duration = Duration::from_secs(600);

/// Repetitions of each timed read.
const ROUNDS: usize = 50;

/// The kernel counts processor time in hundredths of a second, on every machine that we know.
const TICKS_PER_SECOND: f64 = 100.0;

fn main() {
    let number =
        |name: &str, otherwise| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise);
    let (records, live) = (number("VIV_BENCH_RECORDS", 100_000), number("VIV_BENCH_LIVE", 100));
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir().unwrap();
    let pattern = rest::hibernated(folder.path());
    let began = Instant::now();
    fill(folder.path(), records, pattern);
    println!("{records} records, half of them hibernated, written in {:.1} s", began.elapsed().as_secs_f64());

    let began = Instant::now();
    let mut daemon = serve(folder.path());
    println!("first start, ready after            {:>8.1} ms", ms(began.elapsed()));
    let client = client_of(folder.path());
    let run = compared(&client, 0);
    println!("what a start compares               {:>8.1} s of a core", cpu_seconds(daemon.id()));
    println!(
        "of it, all snapshots, took          {:>8.1} s",
        ms(Duration::from_millis(run.took_ms.unwrap_or_default())) / 1000.0
    );
    let tidying = tidied(folder.path());
    let began = Instant::now();
    let (next, living) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while next.fetch_add(1, Ordering::Relaxed) < live {
                    let made = client.create(&CreateSandbox::default(), None).unwrap().into_sandbox();
                    living.lock().unwrap().push(made.id);
                }
            });
        }
    });
    println!("{live} sandboxes ready in {:.1} s, 8 at a time", began.elapsed().as_secs_f64());

    // Evidence grows old meanwhile, and nobody looks: that is what it costs to have them.
    let idle = Duration::from_secs(number("VIV_BENCH_IDLE_S", IDLE_S) as u64);
    let before = cpu_seconds(daemon.id());
    std::thread::sleep(idle);
    let used = cpu_seconds(daemon.id()) - before;
    println!(
        "processor when nothing happens      {:>8.2} % of a core (over {idle:?})",
        100.0 * used / idle.as_secs_f64()
    );
    println!("memory of the daemon                {:>8.1} MiB", rss_mib(daemon.id()));
    let living = living.into_inner().unwrap();
    over_an_hour(&client, &living, daemon.id(), used / idle.as_secs_f64(), tidying);

    let list = ListSandboxes::default();
    let page = repeated(|| drop(client.list(&list).unwrap()));
    println!("a page of `ps`                       {page:>8.2} ms");
    let get = {
        let id = client.list(&list).unwrap().items.remove(0).id;
        let handle = client.sandbox(id);
        repeated(|| drop(handle.get().unwrap()))
    };
    println!("one sandbox                          {get:>8.2} ms");
    let all = ListSandboxes { all: true, ..ListSandboxes::default() };
    println!("a page of all that are recorded      {:>8.2} ms", repeated(|| drop(client.list(&all).unwrap())));
    let labelled = ListSandboxes { label: vec!["team=bench".parse().unwrap()], ..all };
    println!("a page of those with a label         {:>8.2} ms", repeated(|| drop(client.list(&labelled).unwrap())));
    let stats = StatsQuery::default();
    println!("figures                              {:>8.2} ms", repeated(|| drop(client.stats(&stats).unwrap())));

    println!("agent killed, not ready after        {:>8.1} ms", seen_dead(&client, |host| host.agent_pid));
    println!("shim killed, not ready after         {:>8.1} ms", seen_dead(&client, |host| host.shim_pid));

    daemon.kill().unwrap();
    daemon.wait().unwrap();
    let began = Instant::now();
    let daemon = serve(folder.path());
    println!("after kill -9, ready again after     {:>8.1} ms", ms(began.elapsed()));
    let (daemon, took) = taken_over(folder.path(), daemon, Signal::KILL);
    println!("killed, a standby serves after       {:>8.1} ms", ms(took));
    let (mut daemon, took) = taken_over(folder.path(), daemon, Signal::STOP);
    println!("stopped, a standby serves after      {:>8.1} ms", ms(took));
    let client = client_of(folder.path());
    let began = Instant::now();
    client.list(&list).unwrap();
    println!("the first page then                  {:>8.2} ms", ms(began.elapsed()));

    // The newest are those that live.
    for sandbox in client.list_all(list).take(live).collect::<Result<Vec<_>, _>>().unwrap() {
        client.sandbox(sandbox.id).delete(None).unwrap();
    }
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}

/// Does what is rare once each, and prints what it costs; then all that is periodic, summed up over an hour, of which
/// `quiet` is the part of a core that goes all the time.
fn over_an_hour(client: &Client, living: &[SandboxId], daemon: u32, quiet: f64, (everything, trash): (f64, f64)) {
    let costs_s = |work: &dyn Fn()| {
        let before = cpu_seconds(daemon);
        work();
        cpu_seconds(daemon) - before
    };
    let runs = snapshots(client).runs_total;
    let compares = costs_s(&|| {
        client.reconcile(&Reconcile::default()).unwrap();
        compared(client, runs);
    });
    // A probe of each that lives: every five minutes, since nobody looks at it otherwise, and besides every quarter of an
    // hour what runs in it is asked for.
    let probes = costs_s(&|| {
        for id in living {
            let handle = client.sandbox(id.clone());
            // So many at once are more than a key may ask for, and waiting costs nothing.
            while let Err(error) = handle.verify() {
                assert!(error.to_string().contains("too many requests"), "{error}");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    });
    let cleans = costs_s(&|| drop(client.clean_up(&BeginCleanup::default()).unwrap()));
    let forgets = Duration::from_millis(reconciler(client, "retention").took_ms.unwrap_or_default()).as_secs_f64();
    let rare = [
        Rare { what: "comparing everything, every hour", costs_s: compares, times: 1.0 },
        Rare { what: "cleaning up, every 5 min", costs_s: cleans, times: 12.0 },
        Rare { what: "probing all that live, every 5 min", costs_s: probes, times: 12.0 },
        Rare { what: "asking what runs in them, 15 min", costs_s: probes, times: 4.0 },
        Rare { what: "tidying the whole store, an hour", costs_s: everything, times: 1.0 },
        Rare { what: "tidying trash, every 5 min", costs_s: trash, times: 11.0 },
        // Nobody can ask for it: as long as it took at most, as if it had computed all the time.
        Rare { what: "forgetting what is old, every hour", costs_s: forgets, times: 1.0 },
    ];
    for Rare { what, costs_s, .. } in &rare {
        println!("{what:<35} {costs_s:>8.2} s of a core");
    }
    let sum_s = quiet * HOUR_S + rare.iter().map(|rare| rare.costs_s * rare.times).sum::<f64>();
    println!("all that is periodic, over an hour  {:>8.2} % of a core ({sum_s:.1} s)", 100.0 * sum_s / HOUR_S);
}

/// Kills a part of a sandbox from outside, and looks until it is not called ready.
fn seen_dead(client: &Client, part: impl Fn(&HostView) -> Option<u32>) -> f64 {
    let made = client.create(&CreateSandbox::default(), None).unwrap().into_sandbox();
    let handle = client.sandbox(made.id);
    let host = handle.diagnosis().unwrap().host.expect("an admin is told");
    send(part(&host).expect("it runs"), Signal::KILL);
    let began = Instant::now();
    while handle.get().unwrap().status == Status::Ready {
        assert!(began.elapsed() < Duration::from_secs(60), "it is called ready on and on");
    }
    let took = began.elapsed();
    handle.delete(None).unwrap();
    ms(took)
}

/// The owner gets this signal while another one stands by: that one, and when it served.
fn taken_over(data: &Path, mut owner: Child, signal: Signal) -> (Child, Duration) {
    let heir = stand_by(data);
    let began = Instant::now();
    send(owner.id(), signal);
    wait_for(data, heir.id());
    let took = began.elapsed();
    // One that only hung was killed by who took over.
    let _ = owner.kill();
    owner.wait().unwrap();
    (heir, took)
}

fn send(pid: u32, signal: Signal) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

fn reconciler(client: &Client, name: &str) -> Reconciler {
    let all = client.reconcilers().unwrap().items;
    all.into_iter().find(|one| one.name == name).expect("it is told")
}

fn snapshots(client: &Client) -> Reconciler {
    reconciler(client, "snapshots")
}

/// Waits until the reconciler of snapshots ran once more than so often: what it came to.
fn compared(client: &Client, runs: u64) -> Reconciler {
    let until = Instant::now() + COMPARED_WITHIN;
    loop {
        let run = snapshots(client);
        // One that failed is made again in the next minute.
        if run.runs_total > runs && run.last_error.is_none() && run.failed == 0 {
            return run;
        }
        assert!(Instant::now() < until, "snapshots are not compared: {run:?}");
        std::thread::sleep(Duration::from_millis(250));
    }
}

/// Tidies the store as the daemon does, once as when something came or went, and then as every five minutes while nothing
/// does: seconds of a processor.
fn tidied(data: &Path) -> (f64, f64) {
    let config = LocalConfig::new(data.join("sandboxes"), env!("CARGO_BIN_EXE_viv").into());
    let provider = LocalProvider::open(config).unwrap();
    let mut tidier = Tidier::new(provider, Duration::from_secs(3600));
    let mut turn = || {
        let before = cpu_seconds(std::process::id());
        let turn = tidier.turn();
        (turn, cpu_seconds(std::process::id()) - before)
    };
    let until = Instant::now() + COMPARED_WITHIN;
    let everything_s = loop {
        let (TidyTurn::Everything(done), everything_s) = turn() else { panic!("nothing is known at first") };
        assert!(done.failed.is_empty(), "{:?}", done.failed);
        if let Some(collected) = done.collected {
            assert_eq!(collected.layers, 0, "all of it is referred to");
            break everything_s;
        }
        // The daemon is at it.
        assert!(Instant::now() < until, "it does not come to rest: {done:?}");
    };
    // What it hashed is a change.
    loop {
        match turn() {
            (TidyTurn::Trash, trash_s) => return (everything_s, trash_s),
            (TidyTurn::Everything(done), _) => assert!(Instant::now() < until, "it does not come to rest: {done:?}"),
        }
    }
}

/// Records of sandboxes that are over, or hibernated, in turn, as a long life leaves them.
fn fill(data: &Path, records: usize, pattern: Pattern) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = Arc::new(SqliteStore::open(&data.join("viv.db")).unwrap());
        let (data, pattern): (Arc<Path>, _) = (data.into(), Arc::new(pattern));
        let owner =
            Owner { name: "bench".to_owned(), boot_id: String::new(), pid: 0, start_ticks: 0, epoch: 0, since_ms: 0 };
        let epoch = store.own(owner).await.unwrap();
        let writers = (0..100).map(|writer| {
            let (store, data, pattern) = (store.clone(), data.clone(), pattern.clone());
            tokio::spawn(async move {
                for (at, _) in (writer..records).step_by(100).enumerate() {
                    let mut change = over();
                    if at % 2 == 0 {
                        let (record, row) = pattern.copy(&data, &change.sandbox);
                        (change.sandbox, change.snapshots) = (record, vec![row]);
                    }
                    store.commit(epoch, change).await.unwrap();
                }
            })
        });
        for writer in writers.collect::<Vec<_>>() {
            writer.await.unwrap();
        }
    });
}

/// One that is over.
fn over() -> Change {
    let timings = Timings::default();
    // Recent ones, or retention would be what is measured.
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let now_ms = u64::try_from(since.as_millis()).unwrap();
    let new = NewSandbox {
        id: SandboxId::from_bytes(fresh()),
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy::default_for(None),
        labels: [("team".to_owned(), "bench".to_owned())].into(),
        origin: None,
        by: Actor::part("bench"),
    };
    let mut sandbox = Sandbox::create(new, Moment { now_ms, timings: &timings, no_memory: None });
    (sandbox.phase, sandbox.desired) = (Phase::Stopped, Desired::Gone);
    // Nobody waits for it.
    sandbox.entry = None;
    let line = NewLine {
        at_ms: now_ms,
        project: Some(sandbox.project.clone()),
        sandbox: Some(sandbox.id.clone()),
        generation: Some(sandbox.generation),
        kind: "sandbox.created".to_owned(),
        from: None,
        to: None,
        cause: None,
        by: Actor::part("bench"),
        data: serde_json::Value::Null,
    };
    let (lines, snapshots) = (vec![line], Vec::new());
    Change { sandbox, lines, idempotency: None, quota: None, unused_since_ms: None, snapshots }
}

fn repeated(mut work: impl FnMut()) -> f64 {
    let times = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            work();
            began.elapsed()
        })
        .collect();
    ms(median(times))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Processor time of a process so far.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
    fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap()).sum::<f64>() / TICKS_PER_SECOND
}

fn rss_mib(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
}
