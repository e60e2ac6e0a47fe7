//! Chaos as a seed draws it, on the real daemon: nobody orders it, and whatever was acknowledged meanwhile is there when
//! it is over (P5). A daemon that killed itself is followed by another.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::PATIENCE;
use support::restart::{House, all};
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

/// For so long at least; longer until there is enough to be lost, somebody was hurt, an old handle was used, and a daemon
/// has died.
const AT_LEAST: Duration = Duration::from_secs(10);

/// And never longer. Each thing comes up once in eight, every five seconds, unless the daemon dies before.
const AT_MOST: Duration = Duration::from_secs(180);

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
fn agent(serving: &Serving, enough: impl Fn(&Told) -> bool) -> Told {
    let policy = CreatePolicy { persistent: Some(true), ..CreatePolicy::default() };
    let request = CreateSandbox { policy, wait_ms: wait(), ..CreateSandbox::default() };
    let (mut told, mut created, mut current) = (Told::default(), key(), None);
    let mut count = 0_u32;
    while !enough(&told) {
        thread::sleep(PAUSE);
        let Some(client) = serving.client() else { continue };
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

/// Who serves just now.
#[derive(Default)]
struct Serving {
    client: Mutex<Option<Arc<Client>>>,
    /// How many killed themselves.
    deaths: AtomicU32,
}

impl Serving {
    fn client(&self) -> Option<Arc<Client>> {
        self.client.lock().unwrap().clone()
    }

    /// Starts another daemon whenever one has killed itself, and ends the last one in order.
    fn keep(&self, house: &House, argument: &str, is_over: &AtomicBool) {
        let mut daemon = house.spawn(&[argument], &[]);
        let mut known = None;
        while !is_over.load(Ordering::SeqCst) {
            thread::sleep(PAUSE);
            if !daemon.is_running() {
                daemon.assert_killed();
                self.deaths.fetch_add(1, Ordering::SeqCst);
                daemon = house.spawn(&[argument], &[]);
            }
            if known != Some(daemon.pid()) && daemon.serves() {
                *self.client.lock().unwrap() = Some(Arc::new(daemon.client()));
                known = Some(daemon.pid());
            }
        }
        daemon.signal(Signal::TERM);
        daemon.wait();
    }
}

/// Whether every kind of thing was done: to a sandbox, with an old handle, and to a daemon.
fn has_all(house: &House, serving: &Serving) -> bool {
    let said = house.said();
    let hurt = said.lines().any(|line| line.contains("harm") && line.contains("Some(())"));
    let refused = said.lines().any(|line| line.contains("an old handle was used") && line.contains("refused: "));
    hurt && refused && serving.deaths.load(Ordering::SeqCst) > 0
}

#[test]
fn p5_what_was_acknowledged_while_chaos_was_drawn_is_there_when_it_is_over() {
    let house = House::with_arguments(&["--layers", "plain", "--save-memory", "off"]);
    let seed = std::env::var("VIV_CHAOS_SEED").unwrap_or_else(|_| "1".to_owned());
    let (serving, began, is_over) = (Serving::default(), Instant::now(), AtomicBool::new(false));
    let told: Vec<Told> = thread::scope(|scope| {
        let keeper = scope.spawn(|| serving.keep(&house, &format!("--chaos={seed}"), &is_over));
        let agents: Vec<_> = (0..AGENTS)
            .map(|_| {
                scope.spawn(|| {
                    agent(&serving, |told| {
                        let files: usize = told.files.values().map(BTreeMap::len).sum();
                        let enough = files >= FILES_MIN && began.elapsed() >= AT_LEAST && has_all(&house, &serving);
                        enough || began.elapsed() >= AT_MOST
                    })
                })
            })
            .collect();
        let told = agents.into_iter().map(|agent| agent.join().unwrap()).collect();
        is_over.store(true, Ordering::SeqCst);
        keeper.join().unwrap();
        told
    });
    assert!(has_all(&house, &serving), "not everything happened: {}", house.said());
    assert!(!house.said().contains("LET IN"), "an old handle was let in: {}", house.said());
    assert!(told.iter().any(|told| told.files.values().any(|files| !files.is_empty())), "nothing was acknowledged");

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
