//! `kill -9` of the daemon anywhere changes nothing: the end state is that of a clean run (J4, P4).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::io::Read as _;

use rustix::process::Signal;
use support::restart::{House, all, create, settled, shim_pid};
use support::{eventually, fresh_bytes, hex, kill};
use viv_api::ErrorCode;
use viv_api::bound::{IdempotencyKey, Path};
use viv_api::client::Client;
use viv_api::execution::StartExecution;
use viv_api::query::ReadFile;
use viv_api::sandbox::{
    CreatePolicy, CreateSandbox, Desired, EnsureSandbox, Phase, RestSandbox, Sandbox, Status, StopSandbox,
};
use viv_core::SandboxId;

/// All that a crash must not change.
#[derive(Debug, PartialEq, Eq)]
struct End {
    phase: Phase,
    status: Status,
    desired: Desired,
    deleted: bool,
    generation: u64,
    cause: Option<String>,
    /// Generation and state of what the provider has.
    instances: Vec<(u64, String)>,
    /// Processes of sandboxes.
    processes: usize,
    /// Commands that ran in it: exit codes.
    executions: Vec<Option<i32>>,
    /// What one of them wrote, where it can be read.
    file: Option<String>,
    /// Records that are there and not deleted.
    records: usize,
}

impl End {
    async fn of(house: &House, client: &Client, sandbox: &SandboxId) -> Self {
        let seen = settled(client, sandbox);
        let instances = house.instances().await;
        let executions = match seen.phase {
            Phase::Ready => client.sandbox(sandbox).executions_all().map(|one| one.unwrap().exit_code).collect(),
            _ => Vec::new(),
        };
        let file = match seen.phase {
            Phase::Ready => content(client, sandbox),
            _ => None,
        };
        // Whoever was killed in the middle leaves a helper that ends by itself, and what ends is gone a moment later.
        let (mut processes, per_instance) = (0, 3);
        let wanted = instances.len() * per_instance;
        support::eventually_quietly(|| {
            processes = house.processes().len();
            processes == wanted
        });
        Self {
            phase: seen.phase,
            status: seen.status,
            desired: seen.desired,
            deleted: seen.deleted,
            generation: seen.generation.0,
            cause: seen.cause.map(|cause| cause.code),
            instances: instances.iter().map(|one| (one.instance.generation.0, one.state.to_string())).collect(),
            processes,
            executions,
            file,
            records: all(client).len(),
        }
    }
}

fn fresh_key() -> IdempotencyKey {
    IdempotencyKey::new(hex(&fresh_bytes())).unwrap()
}

/// What a command leaves in a sandbox.
const FILE: &str = "/workspace/kept";

fn content(client: &Client, sandbox: &SandboxId) -> Option<String> {
    let read = ReadFile { path: Path::new(FILE).unwrap(), offset: None, length: None, generation: None };
    let mut file = match client.sandbox(sandbox).read_file(&read) {
        Ok(file) => file,
        Err(error) if error.code() == Some(ErrorCode::NotFound) => return None,
        Err(error) => panic!("{error:?}"),
    };
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    Some(text)
}

/// A sandbox in which one command ran.
fn used(client: &Client) -> Sandbox {
    run_in(client, create(client))
}

/// One that is saved when it stops, in which one command ran.
fn kept(client: &Client) -> Sandbox {
    let policy = CreatePolicy { persistent: Some(true), ..CreatePolicy::default() };
    let made = client.create(&CreateSandbox { policy, ..CreateSandbox::default() }, None).unwrap().into_sandbox();
    assert_eq!((made.phase, made.status), (Phase::Ready, Status::Ready), "{made:?}");
    run_in(client, made)
}

fn run_in(client: &Client, sandbox: Sandbox) -> Sandbox {
    let script = format!("echo work > {FILE}; exit 3");
    let run = client.sandbox(&sandbox.id).start(&StartExecution::of(["sh", "-c", &script]).unwrap(), None).unwrap();
    let handle = client.sandbox(&sandbox.id).execution(run.id);
    eventually("it ran", || handle.get().unwrap().exit_code == Some(3));
    sandbox
}

/// A sandbox that is lost: its shim was killed.
fn lost(house: &House, client: &Client) -> Sandbox {
    let sandbox = used(client);
    kill(shim_pid(house, &sandbox.id), Signal::KILL);
    eventually("it is lost", || client.sandbox(&sandbox.id).get().unwrap().phase == Phase::Lost);
    sandbox
}

fn clear_away(house: &House, client: &Client, sandbox: &SandboxId) {
    client.sandbox(sandbox).delete(None).unwrap();
    assert_eq!(settled(client, sandbox).phase, Phase::Stopped);
    assert_eq!(all(client), []);
    house.assert_nothing_left();
}

/// Runs a verb to its end without a crash, then with one at each point: the end must be the same, with nothing left over.
async fn same_end_after_a_crash_at(
    points: &[&str],
    prepare: impl Fn(&House, &Client) -> SandboxId,
    verb: impl Fn(&Client, &SandboxId) -> bool,
) -> End {
    let house = House::new();
    let mut daemon = house.start();
    let sandbox = prepare(&house, &daemon.client());
    assert!(verb(&daemon.client(), &sandbox));
    let clean = End::of(&house, &daemon.client(), &sandbox).await;
    clear_away(&house, &daemon.client(), &sandbox);
    for point in points {
        eprintln!("{point}");
        let sandbox = prepare(&house, &daemon.client());
        daemon.kill();
        let mut dying = house.start_to_die(point);
        let answered = verb(&dying.client(), &sandbox);
        dying.assert_killed();
        // Once the outcome is recorded, the answer and the crash race; before that nobody is told anything.
        assert!(!answered || point.ends_with(".recorded"), "{point}: it was answered");
        daemon = house.start();
        assert_eq!(End::of(&house, &daemon.client(), &sandbox).await, clean, "{point}: {}", daemon.said());
        clear_away(&house, &daemon.client(), &sandbox);
    }
    clean
}

#[tokio::test]
async fn p4_a_crash_anywhere_in_a_create_ends_as_no_crash() {
    let house = House::new();
    let mut daemon = house.start();
    let ask = CreateSandbox::default();
    let made = daemon.client().create(&ask, Some(&fresh_key())).unwrap().into_sandbox();
    let clean = End::of(&house, &daemon.client(), &made.id).await;
    assert_eq!((clean.status, clean.generation, clean.records), (Status::Ready, 1, 1));
    assert_eq!(clean.instances, [(1, "running".to_owned())]);
    clear_away(&house, &daemon.client(), &made.id);
    for point in [
        "create.committed",
        "create.before",
        "create.after",
        "create.recorded",
        "probe.before",
        "probe.after",
        "probe.recorded",
    ] {
        eprintln!("{point}");
        daemon.kill();
        let mut dying = house.start_to_die(point);
        let key = fresh_key();
        let answer = dying.client().create(&ask, Some(&key));
        dying.assert_killed();
        daemon = house.start();
        let client = daemon.client();
        let [one] = &all(&client)[..] else { panic!("{point}: not one but {:?}", all(&client)) };
        // Ready once it is recorded so: the answer and the crash race then.
        assert!(answer.is_err() || point == "probe.recorded", "{point}: {answer:?}");
        assert_eq!(End::of(&house, &client, &one.id).await, clean, "{point}: {}", daemon.said());
        // Who asks again gets the same one (L1).
        assert_eq!(client.create(&ask, Some(&key)).unwrap().into_sandbox().id, one.id, "{point}");
        assert_eq!(End::of(&house, &client, &one.id).await, clean, "{point}: asked again");
        clear_away(&house, &client, &one.id);
    }
    daemon.kill();
}

#[tokio::test]
async fn p4_a_crash_anywhere_in_a_stop_ends_as_no_crash() {
    let points = ["stop.committed", "clear.before", "clear.after", "clear.recorded"];
    let end = same_end_after_a_crash_at(
        &points,
        |_, client| used(client).id,
        |client, sandbox| client.sandbox(sandbox).stop(&StopSandbox::default()).is_ok(),
    )
    .await;
    assert_eq!((end.status, end.desired, end.deleted, end.generation), (Status::Stopped, Desired::Gone, false, 1));
    assert_eq!((end.instances, end.processes), (vec![], 0));
}

#[tokio::test]
async fn p4_a_crash_anywhere_in_a_delete_ends_as_no_crash() {
    let points = ["delete.committed", "clear.before", "clear.after", "clear.recorded"];
    let end = same_end_after_a_crash_at(
        &points,
        |_, client| used(client).id,
        |client, sandbox| client.sandbox(sandbox).delete(None).is_ok(),
    )
    .await;
    assert_eq!((end.status, end.desired, end.deleted, end.generation), (Status::Stopped, Desired::Gone, true, 1));
    assert_eq!((end.instances, end.processes), (vec![], 0));
}

#[tokio::test]
async fn p4_a_crash_anywhere_in_an_ensure_of_a_lost_one_ends_as_no_crash() {
    let points = [
        "ensure.committed",
        "clear.before",
        "clear.after",
        "clear.recorded",
        "create.before",
        "create.after",
        "create.recorded",
        "probe.before",
        "probe.after",
        "probe.recorded",
    ];
    let end = same_end_after_a_crash_at(
        &points,
        |house, client| lost(house, client).id,
        |client, sandbox| client.sandbox(sandbox).ensure(&EnsureSandbox::default()).is_ok(),
    )
    .await;
    assert_eq!((end.status, end.generation, end.records), (Status::Ready, 2, 1));
    assert_eq!(end.instances, [(2, "running".to_owned())]);
}

#[tokio::test]
async fn p4_a_crash_anywhere_in_a_stop_of_a_persistent_one_ends_as_no_crash() {
    let points = [
        "stop.committed",
        "save.before",
        "save.after",
        "save.recorded",
        "clear.before",
        "clear.after",
        "clear.recorded",
    ];
    let end = same_end_after_a_crash_at(
        &points,
        |_, client| kept(client).id,
        |client, sandbox| client.sandbox(sandbox).stop(&StopSandbox::default()).is_ok(),
    )
    .await;
    assert_eq!((end.status, end.desired, end.generation), (Status::Hibernated, Desired::Hibernated, 1));
    assert_eq!((end.instances, end.processes), (vec![], 0));
}

#[tokio::test]
async fn p4_a_crash_anywhere_in_an_ensure_of_a_hibernated_one_ends_as_no_crash() {
    let points = [
        "ensure.committed",
        "restore.before",
        "restore.after",
        "restore.recorded",
        "probe.before",
        "probe.after",
        "probe.recorded",
    ];
    let end = same_end_after_a_crash_at(
        &points,
        |_, client| {
            let sandbox = kept(client).id;
            client.sandbox(&sandbox).stop(&StopSandbox::default()).unwrap();
            assert_eq!(settled(client, &sandbox).phase, Phase::Hibernated);
            sandbox
        },
        |client, sandbox| client.sandbox(sandbox).ensure(&EnsureSandbox::default()).is_ok(),
    )
    .await;
    assert_eq!((end.status, end.generation, end.records), (Status::Ready, 2, 1));
    assert_eq!((end.instances, end.file.as_deref()), (vec![(2, "running".to_owned())], Some("work\n")));
}

#[tokio::test]
async fn p4_a_crash_anywhere_in_a_freeze_ends_as_no_crash() {
    let points = ["rest.committed", "freeze.before", "freeze.after", "freeze.recorded"];
    let end = same_end_after_a_crash_at(
        &points,
        |_, client| used(client).id,
        |client, sandbox| client.sandbox(sandbox).freeze(&RestSandbox::default()).is_ok(),
    )
    .await;
    assert_eq!((end.status, end.generation, end.instances), (Status::Frozen, 1, vec![(1, "frozen".to_owned())]));
}

#[tokio::test]
async fn p4_a_crash_anywhere_in_a_thaw_ends_as_no_crash() {
    let points = [
        "ensure.committed",
        "thaw.before",
        "thaw.after",
        "thaw.recorded",
        "probe.before",
        "probe.after",
        "probe.recorded",
    ];
    let end = same_end_after_a_crash_at(
        &points,
        |_, client| {
            let sandbox = used(client).id;
            client.sandbox(&sandbox).freeze(&RestSandbox::default()).unwrap();
            assert_eq!(settled(client, &sandbox).phase, Phase::Frozen);
            sandbox
        },
        |client, sandbox| client.sandbox(sandbox).ensure(&EnsureSandbox::default()).is_ok(),
    )
    .await;
    assert_eq!((end.status, end.generation, end.executions), (Status::Ready, 1, vec![Some(3)]));
    assert_eq!((end.instances, end.file.as_deref()), (vec![(1, "running".to_owned())], Some("work\n")));
}

/// Daemons that each die at the next point, of what the one before had begun.
fn die_one_after_the_other(house: &House, points: &[&str]) {
    for point in points {
        eprintln!("{point}");
        // It dies of what it found, perhaps before it serves.
        house.spawn(&[], &[("VIV_FAILPOINT", point)]).assert_killed();
    }
}

#[tokio::test]
async fn p4_a_crash_at_every_step_of_the_same_life_ends_as_no_crash() {
    let house = House::new();
    let mut daemon = house.start_to_die("create.committed");
    let key = fresh_key();
    daemon.client().create(&CreateSandbox::default(), Some(&key)).unwrap_err();
    daemon.assert_killed();
    die_one_after_the_other(
        &house,
        &["create.before", "create.after", "create.recorded", "probe.before", "probe.after", "probe.recorded"],
    );
    daemon = house.start();
    let made = daemon.client().create(&CreateSandbox::default(), Some(&key)).unwrap().into_sandbox();
    let end = End::of(&house, &daemon.client(), &made.id).await;
    assert_eq!((end.status, end.generation, end.records, end.processes), (Status::Ready, 1, 1, 3));
    assert_eq!(end.instances, [(1, "running".to_owned())]);
    daemon.kill();

    daemon = house.start_to_die("stop.committed");
    daemon.client().sandbox(&made.id).stop(&StopSandbox::default()).unwrap_err();
    daemon.assert_killed();
    die_one_after_the_other(&house, &["clear.before", "clear.after", "clear.recorded"]);
    daemon = house.start();
    let end = End::of(&house, &daemon.client(), &made.id).await;
    assert_eq!((end.status, end.generation, end.records, end.processes), (Status::Stopped, 1, 1, 0));
    assert_eq!(end.instances, []);
    clear_away(&house, &daemon.client(), &made.id);
}
