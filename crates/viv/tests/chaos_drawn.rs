//! Chaos as a seed draws it, on the real daemon: nobody orders it, and whatever was acknowledged meanwhile is there when
//! it is over (P5).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::PATIENCE;
use support::restart::{Daemon, House, all};
use support::{eventually_within, fresh_bytes, hex};
use viv_api::bound::{IdempotencyKey, Path, WaitMs};
use viv_api::client::{Change, Client};
use viv_api::query::{ReadFile, WriteFile};
use viv_api::reconcile::Reconcile;
use viv_api::sandbox::{
    CreatePolicy, CreateSandbox, EnsureSandbox, FailedSave, Phase, RestSandbox, Sandbox, Status, StopSandbox,
};
use viv_core::SandboxId;

/// How many agents there are, each with a sandbox at a time.
const AGENTS: u64 = 3;

/// What has to be acknowledged to each before it is enough.
const FILES_MIN: usize = 6;

/// For so long at least; longer until there is enough to be lost, and somebody was hurt.
const AT_LEAST: Duration = Duration::from_secs(10);

/// And never longer.
const AT_MOST: Duration = Duration::from_secs(90);

/// Between two things that an agent does.
const PAUSE: Duration = Duration::from_millis(20);

/// What a daemon told one agent.
#[derive(Default)]
struct Told {
    /// Files that were written, of each sandbox.
    files: BTreeMap<SandboxId, BTreeMap<Path, Vec<u8>>>,
    /// Sandboxes that were deleted.
    deleted: Vec<SandboxId>,
}

#[expect(clippy::unnecessary_wraps, reason = "requests take it so")]
fn wait() -> Option<WaitMs> {
    Some(WaitMs::nearest(5_000))
}

fn key() -> IdempotencyKey {
    IdempotencyKey::new(hex(&fresh_bytes())).unwrap()
}

/// One thing after the other until it is enough, whatever is answered: what is refused or unknown is no promise.
fn agent(client: &Client, enough: impl Fn(&Told) -> bool) -> Told {
    let policy = CreatePolicy { persistent: Some(true), ..CreatePolicy::default() };
    let request = CreateSandbox { policy, wait_ms: wait(), ..CreateSandbox::default() };
    let (mut told, mut created, mut current) = (Told::default(), key(), None);
    let mut count = 0_u32;
    while !enough(&told) {
        thread::sleep(PAUSE);
        let Some(id) = current.clone() else {
            // Under the same key, it is the same sandbox however often it is asked for.
            if let Ok(made) = client.create(&request, Some(&created)) {
                let id = made.into_sandbox().id;
                told.files.insert(id.clone(), BTreeMap::new());
                (current, created) = (Some(id), key());
            }
            continue;
        };
        let sandbox = client.sandbox(&id);
        count += 1;
        match count % 10 {
            0..6 => {
                let path = Path::new(format!("/workspace/{count}")).unwrap();
                let content = format!("{count} in {id}").into_bytes();
                let write = WriteFile { path: path.clone(), mode: None, user: None, generation: None };
                if sandbox.write_file(&write, &mut &*content).is_ok() {
                    told.files.get_mut(&id).unwrap().insert(path, content);
                }
            }
            6 => drop(sandbox.hibernate(&RestSandbox { wait_ms: wait() })),
            9 if told.deleted.is_empty() && told.files[&id].len() >= FILES_MIN => {
                if let Ok(Change::Done(_)) = sandbox.delete(wait()) {
                    told.files.remove(&id);
                    told.deleted.push(id);
                    current = None;
                }
            }
            _ => drop(sandbox.ensure(&EnsureSandbox { wait_ms: wait() })),
        }
    }
    told
}

/// It runs, and was just probed.
fn well(client: &Client, id: &SandboxId) -> Sandbox {
    let mut last = None;
    eventually_within(3 * PATIENCE, "it is well again", || {
        let now = client.sandbox(id).get().unwrap();
        if now.status == Status::SaveFailed {
            let retry = StopSandbox { wait_ms: wait(), failed_save: Some(FailedSave::Retry) };
            drop(client.sandbox(id).stop(&retry));
        }
        drop(client.sandbox(id).ensure(&EnsureSandbox { wait_ms: wait() }));
        let now = client.sandbox(id).verify().ok();
        let is_well = now.as_ref().is_some_and(|now| now.status == Status::Ready);
        last = now;
        is_well
    });
    last.unwrap()
}

fn read(client: &Client, id: &SandboxId, path: &Path) -> Option<Vec<u8>> {
    let read = ReadFile { path: path.clone(), offset: None, length: None, generation: None };
    let mut content = Vec::new();
    client.sandbox(id).read_file(&read).ok()?.read_to_end(&mut content).ok()?;
    Some(content)
}

/// Whether a process of a sandbox was really hurt.
fn has_hurt(daemon: &Daemon) -> bool {
    daemon.said().lines().any(|line| line.contains("harm") && line.contains("Some(())"))
}

#[test]
fn p5_what_was_acknowledged_while_chaos_was_drawn_is_there_when_it_is_over() {
    let house = House::with_arguments(&["--layers", "plain", "--save-memory", "off"]);
    let seed = std::env::var("VIV_CHAOS_SEED").unwrap_or_else(|_| "1".to_owned());
    let mut daemon = house.spawn(&[&format!("--chaos={seed}")], &[]);
    daemon.wait_until_it_serves();
    let (client, began) = (daemon.client(), Instant::now());
    let told: Vec<Told> = thread::scope(|scope| {
        let agents: Vec<_> = (0..AGENTS)
            .map(|_| {
                scope.spawn(|| {
                    agent(&client, |told| {
                        let files: usize = told.files.values().map(BTreeMap::len).sum();
                        let enough = files >= FILES_MIN && began.elapsed() >= AT_LEAST && has_hurt(&daemon);
                        enough || began.elapsed() >= AT_MOST
                    })
                })
            })
            .collect();
        agents.into_iter().map(|agent| agent.join().unwrap()).collect()
    });
    assert!(daemon.is_running(), "{}", daemon.said());
    assert!(has_hurt(&daemon), "nobody was hurt: {}", daemon.said());
    assert!(told.iter().any(|told| told.files.values().any(|files| !files.is_empty())), "nothing was acknowledged");
    daemon.signal(Signal::TERM);
    daemon.wait();
    drop(daemon);

    // The next one is as any other.
    let daemon = house.start();
    let client = daemon.client();
    let (mut files, mut deleted) = (0, 0);
    for told in &told {
        for (id, written) in &told.files {
            let now = well(&client, id);
            for (path, content) in written {
                assert_eq!(read(&client, id, path).as_ref(), Some(content), "{path} of {now:?}");
                files += 1;
            }
        }
        for id in &told.deleted {
            let now = client.sandbox(id).get().unwrap();
            assert_eq!((now.deleted, now.phase), (true, Phase::Stopped), "{now:?}");
            deleted += 1;
        }
    }
    eprintln!("{files} files were acknowledged and are there, and {deleted} that were deleted are gone");
    for sandbox in all(&client) {
        client.sandbox(&sandbox.id).delete(wait()).unwrap();
    }
    eventually_within(PATIENCE, "nothing is left to do", || {
        let found = client.reconcile(&Reconcile { dry_run: true }).unwrap();
        found.complete && found.items.is_empty() && all(&client).is_empty()
    });
    // It takes apart in the background, so it is there meanwhile.
    house.assert_nothing_left();
    drop(daemon);
}
