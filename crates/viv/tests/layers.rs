//! What is saved is what there was: awkward files, many rounds, both drivers (L10, L11, incident 13).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use support::{Ground, eventually, fresh_bytes, mutation};
use viv_core::{Generation, OperationId, SandboxId, SnapshotId};
use viv_layer::Digest;
use viv_layer::corpus::{Size, corpus};
use viv_provider::{InstanceRef, InstanceSpec, InstanceState, Provider, SaveRequest};
use viv_sandbox::DriverKind;

/// Rounds of saving and restoring.
const CYCLES: u64 = 100;

/// Never more lower folders than this, whatever was saved how often: what is merged from, and a base.
const LOWERS_MAX: usize = 26;

fn first(sandbox: &SandboxId) -> InstanceRef {
    InstanceRef { sandbox: sandbox.clone(), generation: Generation::FIRST }
}

async fn save(ground: &Ground, instance: &InstanceRef, live: bool) -> SnapshotId {
    let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live, memory: false };
    let mutation = mutation(instance.generation.0, 1);
    ground.provider.save(&mutation, &instance.sandbox, &request).await.unwrap().id
}

async fn restore(ground: &Ground, snapshot: &SnapshotId) -> InstanceRef {
    let sandbox = SandboxId::from_bytes(fresh_bytes());
    let spec = InstanceSpec::host(600_000);
    ground.provider.restore(&mutation(1, 1), &sandbox, &ground.owner, &spec, snapshot).await.unwrap().instance
}

async fn destroy(ground: &Ground, instance: &InstanceRef) {
    ground.provider.destroy(&mutation(instance.generation.0, 1), &instance.sandbox).await.unwrap();
}

async fn forget(ground: &Ground, snapshot: &SnapshotId) {
    let sandbox = ground.provider.snapshot(snapshot).await.unwrap().snapshot.source.sandbox;
    ground.provider.remove_snapshot(&mutation(1, 1), &sandbox, snapshot).await.unwrap();
}

async fn run(ground: &Ground, instance: &InstanceRef, script: &str) -> String {
    ground.run(instance, 1, script).await.0.trim().to_owned()
}

/// The layers that a snapshot was saved in, the topmost first.
fn saved_layers(ground: &Ground, snapshot: &SnapshotId) -> Vec<PathBuf> {
    let file = ground.data.join("snapshots").join(format!("{snapshot}.json"));
    let record: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let layers = record["kept"]["of"]["saved"].as_array().unwrap();
    layers.iter().map(|id| ground.data.join("layers/sealed").join(id.as_str().unwrap())).collect()
}

/// An instance that has ended, with awkward files that somebody else has put into its layer: some of them no
/// unprivileged process could make.
async fn ended_with_corpus(ground: &Ground, seed: u64, size: Size) -> (InstanceRef, PathBuf) {
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let instance = first(&sandbox.id);
    support::kill(sandbox.shim_pid(), rustix::process::Signal::KILL);
    support::kill(sandbox.guard_pid(), rustix::process::Signal::KILL);
    support::kill(sandbox.agent_pid(), rustix::process::Signal::KILL);
    eventually("it has ended", || {
        tokio::task::block_in_place(|| {
            let state = tokio::runtime::Handle::current().block_on(sandbox.state());
            matches!(state, InstanceState::Ended(_))
        })
    });
    let folder = ground.data.join("layers/active").join(format!("{}.1/parts/root/corpus", sandbox.id));
    fs::create_dir(&folder).unwrap();
    corpus(&folder, seed, size).unwrap();
    (instance, folder)
}

fn lines(folder: &Path) -> Vec<String> {
    viv_layer::lines(folder).unwrap()
}

fn assert_same(expected: &[String], found: &[String], when: &str) {
    let missing: Vec<_> = expected.iter().filter(|line| found.binary_search(line).is_err()).take(5).collect();
    let strange: Vec<_> = found.iter().filter(|line| expected.binary_search(line).is_err()).take(5).collect();
    assert!(missing.is_empty() && strange.is_empty(), "{when}: missing {missing:#?}, not expected {strange:#?}");
}

/// What there is to be after merging. Where layers lie on each other, marks go that hide nothing: no image has the folder
/// of the corpus, and overlayfs would list them as names that nobody can open.
fn merged_expected(driver: DriverKind, expected: &[String], content: Digest, corpus: &Path) -> (Vec<String>, Digest) {
    if driver == DriverKind::Btrfs {
        return (expected.to_vec(), content);
    }
    let expected: Vec<String> = expected.iter().filter(|line| !line.ends_with(" w")).cloned().collect();
    let folder = tempfile::tempdir().unwrap();
    let (below, bare) = (folder.path().join("below"), folder.path().join("bare"));
    fs::create_dir(&below).unwrap();
    viv_layer::merge_onto(&[corpus.parent().unwrap()], &below, &bare).unwrap();
    let bare = bare.join("corpus");
    assert_same(&expected, &lines(&bare), "without marks");
    (expected, viv_layer::content(&bare).unwrap())
}

async fn awkward_files_survive(driver: DriverKind, size: Size) {
    let (ground, other) = (Ground::on(driver), Ground::on(driver));
    let (instance, folder) = ended_with_corpus(&ground, 7, size).await;
    let expected = lines(&folder);
    let content = viv_layer::content(&folder).unwrap();
    let in_layer = |layer: &Path| layer.join("parts/root/corpus");

    let saved = save(&ground, &instance, false).await;
    destroy(&ground, &instance).await;
    let [layer] = saved_layers(&ground, &saved).try_into().unwrap();
    assert_same(&expected, &lines(&in_layer(&layer)), "saved");

    // Restored, and copied while it runs, as a fork is.
    let restored = restore(&ground, &saved).await;
    let seen = run(&ground, &restored, "find /corpus -xdev 2>/dev/null | wc -l").await;
    assert!(seen.parse::<u64>().unwrap() > 200, "{seen}");
    run(&ground, &restored, "echo more > /workspace/more").await;
    let live = save(&ground, &restored, true).await;

    // To another machine and back.
    let file = ground.data.join("exported.snap");
    ground.provider.export_snapshot(&live, &file).unwrap();
    let operation = OperationId::from_bytes(fresh_bytes());
    let id = SnapshotId::from_bytes(fresh_bytes());
    other.provider.import_snapshot(&file, &id, &other.owner, &operation).unwrap();
    let imported = saved_layers(&other, &id);
    assert_eq!(imported.len(), saved_layers(&ground, &live).len());
    let with_corpus = imported.iter().map(|layer| in_layer(layer)).find(|folder| folder.exists()).unwrap();
    assert_same(&expected, &lines(&with_corpus), "exported and imported");
    assert_eq!(viv_layer::content(&with_corpus).unwrap(), content, "exported and imported");
    let there = restore(&other, &id).await;
    assert_eq!(run(&other, &there, "cat /workspace/more").await, "more");
    destroy(&other, &there).await;

    // Merged with what was saved above it.
    destroy(&ground, &restored).await;
    let mut newest = live;
    for round in 0..8 {
        let next = restore(&ground, &newest).await;
        run(&ground, &next, &format!("echo {round} > /workspace/r{round}; chmod 700 /workspace/more")).await;
        let saved = save(&ground, &next, false).await;
        destroy(&ground, &next).await;
        forget(&ground, &newest).await;
        newest = saved;
    }
    eventually("its layers are merged", || {
        ground.provider.tidy();
        saved_layers(&ground, &newest).len() < 8
    });
    let mut merged = saved_layers(&ground, &newest).into_iter().map(|layer| in_layer(&layer));
    let merged = merged.rfind(|folder| folder.exists()).unwrap();
    let (expected, content) = merged_expected(driver, &expected, content, &with_corpus);
    assert_same(&expected, &lines(&merged), "merged");
    assert_eq!(viv_layer::content(&merged).unwrap(), content, "merged");
    let last = restore(&ground, &newest).await;
    assert_eq!(
        run(&ground, &last, "cat /workspace/r*; stat -c %a /workspace/more").await,
        "0\n1\n2\n3\n4\n5\n6\n7\n700"
    );
    destroy(&ground, &last).await;

    assert!(ground.provider.check_store(true).unwrap().is_clean());
    forget(&ground, &newest).await;
    forget(&ground, &saved).await;
    forget(&other, &id).await;
    for ground in [&ground, &other] {
        ground.assert_nothing_left();
        ground.assert_no_layer_left();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l10_awkward_files_survive_on_plain() {
    awkward_files_survive(DriverKind::Plain, Size::Full).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l10_awkward_files_survive_on_btrfs() {
    awkward_files_survive(DriverKind::Btrfs, Size::Full).await;
}

/// Incident 13: files lost after the second pause and resume.
async fn many_rounds_lose_nothing(driver: DriverKind) {
    let ground = Ground::in_memory(driver);
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let mut instance = first(&sandbox.id);
    let mut previous: Option<SnapshotId> = None;
    for round in 0..CYCLES {
        let script = format!(
            "cd /workspace; echo {round} > kept{round}; echo {round} > changed; rm -f gone*; echo x > gone{round}; \
             mkdir -p tree/{round}/below; ln kept{round} tree/{round}/below/link; rm -rf tree/{}",
            round.wrapping_sub(3)
        );
        run(&ground, &instance, &script).await;
        let snapshot = save(&ground, &instance, false).await;
        let sandbox = instance.sandbox.clone();
        destroy(&ground, &instance).await;
        // Under the same id, as a sandbox that hibernates every time.
        let next = Generation(instance.generation.0 + 1);
        let (spec, token) = (InstanceSpec::host(600_000), mutation(next.0, 1));
        let seen = ground.provider.restore(&token, &sandbox, &ground.owner, &spec, &snapshot).await.unwrap();
        instance = seen.instance;
        if let Some(previous) = previous.replace(snapshot) {
            forget(&ground, &previous).await;
        }
        let lowers = lowers_of(&ground, &sandbox);
        assert!(lowers <= LOWERS_MAX, "{lowers} layers below after {round} rounds");
    }
    let found = run(
        &ground,
        &instance,
        "cd /workspace; cat $(ls | grep kept | sort -V) | md5sum; cat changed; ls -d gone* tree/*",
    )
    .await;
    let sum = run(&ground, &instance, &format!("seq 0 {} | md5sum", CYCLES - 1)).await;
    let last = CYCLES - 1;
    let expected = format!("{sum}\n{last}\ngone{last}\ntree/{}\ntree/{}\ntree/{last}", last - 2, last - 1);
    assert_eq!(found, expected);
    destroy(&ground, &instance).await;
    forget(&ground, &previous.unwrap()).await;
    ground.assert_nothing_left();
    ground.assert_no_layer_left();
}

fn lowers_of(ground: &Ground, sandbox: &SandboxId) -> usize {
    let file = ground.data.join("instances").join(sandbox.as_str()).join("record.json");
    let record: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let parts = record["made"]["plan"]["parts"].as_array().unwrap();
    parts.iter().map(|part| part["lowers"].as_array().unwrap().len()).max().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incident_13_many_rounds_lose_nothing_on_plain() {
    many_rounds_lose_nothing(DriverKind::Plain).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incident_13_many_rounds_lose_nothing_on_btrfs() {
    many_rounds_lose_nothing(DriverKind::Btrfs).await;
}
