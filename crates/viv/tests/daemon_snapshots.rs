//! Snapshots on a real daemon: made of what runs, gone back to, forked, kept in use, lost to no crash, and as files.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::Path as HostPath;

use support::daemon::{Daemon, PATIENCE};
use support::eventually_within;
use support::held::{Held, Hold};
use viv_api::ErrorCode;
use viv_api::bound::{ForkCount, IdleMs, LifetimeMs, Path, SnapshotsAgeMs, SnapshotsMax, WaitMs};
use viv_api::client::ClientError;
use viv_api::query::{ImportSnapshot, ListSandboxes, ReadFile, WriteFile};
use viv_api::sandbox::{
    CreatePolicy, CreateSandbox, EnsureSandbox, ExtendSandbox, Hibernate, Phase, RestSandbox, Sandbox, Status,
    StopSandbox,
};
use viv_api::snapshot::{
    CreateSnapshot, Fork, ResetSandbox, RollbackSandbox, Snapshot, SnapshotIntegrity, SnapshotKind, SnapshotState,
};
use viv_core::{SandboxId, SnapshotId};

const FILE: &str = "/workspace/file";

/// Long enough for everything, with all tests at once.
fn long() -> WaitMs {
    WaitMs::new(PATIENCE.as_millis() as u64).unwrap()
}

fn path(text: &str) -> Path {
    Path::new(text).unwrap()
}

fn named(name: &str) -> CreateSandbox {
    CreateSandbox { name: Some(name.parse().unwrap()), wait_ms: Some(long()), ..CreateSandbox::default() }
}

fn write(daemon: &Daemon, id: &SandboxId, text: &str) {
    let query = WriteFile { path: path(FILE), mode: None, user: None, generation: None };
    daemon.sandbox(id).write_file(&query, &mut text.as_bytes()).unwrap();
}

fn read_at(daemon: &Daemon, id: &SandboxId, at: &str) -> Result<String, ClientError> {
    let query = ReadFile { path: path(at), offset: None, length: None, generation: None };
    let mut text = String::new();
    daemon.sandbox(id).read_file(&query)?.read_to_string(&mut text).expect("text");
    Ok(text)
}

fn read(daemon: &Daemon, id: &SandboxId) -> String {
    read_at(daemon, id, FILE).unwrap()
}

fn snapshot(daemon: &Daemon, id: &SandboxId) -> Snapshot {
    let made = daemon.sandbox(id).make_snapshot(&CreateSnapshot::default(), None).unwrap();
    assert_eq!(made.state, SnapshotState::Ready, "{made:#?}");
    made
}

fn rows(daemon: &Daemon) -> Vec<Snapshot> {
    daemon.client().snapshots_all().collect::<Result<_, _>>().unwrap()
}

fn back_to(snapshot: &SnapshotId, discard: bool) -> RollbackSandbox {
    RollbackSandbox { snapshot: snapshot.as_str().parse().unwrap(), discard, wait_ms: Some(long()) }
}

fn code(error: &ClientError) -> ErrorCode {
    error.code().unwrap_or_else(|| panic!("{error}"))
}

/// How many layers are sealed.
fn sealed(daemon: &Daemon) -> usize {
    let folder = daemon.provider_folder().join("layers/sealed");
    let names = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().file_name());
    // The lock is no layer.
    names.filter(|name| !name.to_string_lossy().starts_with('.')).count()
}

fn viv(daemon: &Daemon, words: &[&str]) -> String {
    let out = daemon.viv().args(words).output().unwrap();
    assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn l11_going_back_is_a_new_generation_with_the_old_files_and_the_same_policy() {
    let daemon = Daemon::start();
    let sandbox = daemon.create_from(&named("box"));
    write(&daemon, &sandbox.id, "one");
    let first = snapshot(&daemon, &sandbox.id);
    assert!(first.size_bytes.is_some() && first.paused_ms.is_some(), "its cost is stated: {first:#?}");
    write(&daemon, &sandbox.id, "two");
    // By hand, as a user does it.
    let said = viv(&daemon, &["rollback", "box", first.id.as_str()]);
    assert!(said.contains("ready") && said.contains("generation 2"), "{said}");
    let now = daemon.sandbox(&sandbox.id).get().unwrap();
    assert_eq!((now.status, now.generation), (Status::Ready, sandbox.generation.next()));
    assert_eq!(now.policy, sandbox.policy, "L16");
    assert_eq!(read(&daemon, &sandbox.id), "one");
    // What it was is kept, and can be gone back to.
    let auto: Vec<Snapshot> = rows(&daemon).into_iter().filter(|row| row.kind == SnapshotKind::Auto).collect();
    assert_eq!(auto.len(), 1, "{auto:#?}");
    let back = daemon.sandbox(&sandbox.id).rollback(&back_to(&auto[0].id, true)).unwrap().into_sandbox();
    assert_eq!((back.status, back.generation.0), (Status::Ready, 3));
    assert_eq!(read(&daemon, &sandbox.id), "two");
    // A snapshot that is not there changes nothing.
    let nobody: SnapshotId = "snp_nobody".parse().unwrap();
    let refused = daemon.sandbox(&sandbox.id).rollback(&back_to(&nobody, true)).unwrap_err();
    assert_eq!(code(&refused), ErrorCode::NotFound);
    assert_eq!(daemon.sandbox(&sandbox.id).get().unwrap().generation.0, 3);
    let tree = viv(&daemon, &["snapshot", "tree", "box"]);
    assert!(tree.contains(first.id.as_str()) && tree.contains(auto[0].id.as_str()), "{tree}");
    daemon.remove(&sandbox.id);
    assert_eq!(rows(&daemon), []);
    daemon.assert_nothing_left();
}

#[test]
fn l11_incident_38_ten_forks_at_once_share_nothing_but_their_beginning_which_outlives_its_maker() {
    let daemon = Daemon::start();
    let sandbox = daemon.create();
    write(&daemon, &sandbox.id, "from the first");
    let request = Fork { count: Some(ForkCount::new(10).unwrap()), wait_ms: Some(long()), ..Fork::default() };
    let forked = daemon.sandbox(&sandbox.id).fork(&request, None).unwrap();
    let ids: BTreeSet<&SandboxId> = forked.sandboxes.iter().map(|fork| &fork.id).collect();
    assert_eq!(ids.len(), 10);
    for fork in &forked.sandboxes {
        let fork = daemon.wait_for(&fork.id, "it is ready", |fork| fork.status == Status::Ready);
        assert_eq!(read(&daemon, &fork.id), "from the first");
        let identity = read_at(&daemon, &fork.id, "/.vivarium/identity.json").unwrap();
        assert!(identity.contains(fork.id.as_str()), "{identity}");
        assert_eq!(fork.policy, sandbox.policy, "L16");
        write(&daemon, &fork.id, fork.id.as_str());
    }
    for fork in &forked.sandboxes {
        assert_eq!(read(&daemon, &fork.id), fork.id.as_str(), "what another one wrote is not seen");
    }
    assert_eq!(read(&daemon, &sandbox.id), "from the first");
    // What is in use stays, also when the sandbox that it is of goes (incident 38).
    let refused = daemon.client().remove_snapshot(&forked.snapshot).unwrap_err();
    assert_eq!(code(&refused), ErrorCode::SnapshotInUse);
    assert!(!daemon.client().snapshot(&forked.snapshot).unwrap().used_by.is_empty());
    daemon.remove(&sandbox.id);
    assert_eq!(daemon.client().snapshot(&forked.snapshot).unwrap().state, SnapshotState::Ready);
    // And goes with the last of them.
    for fork in &forked.sandboxes {
        daemon.remove(&fork.id);
    }
    eventually_within(PATIENCE, "nobody needs it any more", || rows(&daemon).is_empty());
    daemon.assert_nothing_left();
}

#[test]
fn l11_what_is_saved_already_is_kept_without_copying_and_old_ones_go() {
    let daemon = Daemon::start();
    let policy = CreatePolicy { snapshots_max: Some(SnapshotsMax::new(2).unwrap()), ..CreatePolicy::default() };
    let sandbox = daemon.create_from(&CreateSandbox { policy, ..named("box") });
    let mut made = Vec::new();
    for round in 0..3 {
        write(&daemon, &sandbox.id, &round.to_string());
        daemon.sandbox(&sandbox.id).stop(&StopSandbox { wait_ms: Some(long()), failed_save: None }).unwrap();
        let kept = snapshot(&daemon, &sandbox.id);
        assert_eq!(kept.kind, SnapshotKind::Manual);
        assert_eq!(snapshot(&daemon, &sandbox.id).id, kept.id, "nothing was changed since");
        made.push(kept.id);
        daemon.sandbox(&sandbox.id).ensure(&EnsureSandbox { wait_ms: Some(long()) }).unwrap();
        assert_eq!(read(&daemon, &sandbox.id), round.to_string());
    }
    daemon.sandbox(&sandbox.id).stop(&StopSandbox { wait_ms: Some(long()), failed_save: None }).unwrap();
    eventually_within(PATIENCE, "the oldest goes", || {
        let left: BTreeSet<SnapshotId> =
            rows(&daemon).into_iter().filter(|row| row.kind == SnapshotKind::Manual).map(|row| row.id).collect();
        left == made[1..].iter().cloned().collect()
    });
    let last = daemon.client().snapshot(&made[2]).unwrap();
    assert_eq!(last.parent.as_ref(), Some(&made[1]), "{last:#?}");
    eventually_within(PATIENCE, "its content is hashed", || {
        daemon.client().snapshot(&made[2]).unwrap().integrity == Some(SnapshotIntegrity::Verified)
    });
    daemon.remove(&sandbox.id);
    assert_eq!(rows(&daemon), []);
    daemon.assert_nothing_left();
}

#[test]
fn l11_a_delete_in_the_middle_of_a_save_leaves_no_row_and_no_layer() {
    let daemon = Daemon::start();
    for round in 0..6_u64 {
        let sandbox = daemon.create_from(&named("box"));
        let big = vec![round as u8; 24 << 20];
        let query = WriteFile { path: path("/workspace/big"), mode: None, user: None, generation: None };
        daemon.sandbox(&sandbox.id).write_file(&query, &mut big.as_slice()).unwrap();
        std::thread::scope(|scope| {
            let saving = scope.spawn(|| match round % 2 {
                0 => daemon.sandbox(&sandbox.id).make_snapshot(&CreateSnapshot::default(), None).map(drop),
                _ => daemon
                    .sandbox(&sandbox.id)
                    .stop(&StopSandbox { wait_ms: Some(long()), failed_save: None })
                    .map(drop),
            });
            // Not for luck: wherever it is by then, the end has to be the same.
            std::thread::sleep(std::time::Duration::from_millis(7 * round));
            daemon.remove(&sandbox.id);
            let _ = saving.join().unwrap();
        });
        eventually_within(PATIENCE, "no row", || rows(&daemon).is_empty());
    }
    eventually_within(PATIENCE, "no layer", || sealed(&daemon) == 0);
    daemon.assert_nothing_left();
}

/// A delete while the save of a stop is where `meanwhile` leaves it: nothing is left, whatever it had come to.
fn deleted_while_it_is_saved(daemon: &Daemon, hold: Option<&Hold>, meanwhile: impl Fn(&SandboxId)) {
    let sandbox = daemon.create_from(&named("box"));
    write(daemon, &sandbox.id, "never to be seen again");
    let handle = daemon.sandbox(&sandbox.id);
    let at_once = Some(WaitMs::new(0).unwrap());
    meanwhile(&sandbox.id);
    handle.stop(&StopSandbox { wait_ms: at_once, failed_save: None }).unwrap();
    match hold {
        Some(hold) => eventually_within(PATIENCE, "it is that far", || hold.is_reached(1)),
        None => assert_eq!(handle.get().unwrap().phase, Phase::Hibernating),
    }
    let asked = handle.delete(at_once).unwrap().into_sandbox();
    assert!(asked.deleted, "{asked:#?}");
    hold.inspect(|hold| hold.open());
    let over = daemon.wait_for(&sandbox.id, "it is gone", |now| now.status == Status::Stopped);
    assert_eq!(over.cause.unwrap().code, "user_delete");
    eventually_within(PATIENCE, "no row", || rows(daemon).is_empty());
    eventually_within(PATIENCE, "no layer", || sealed(daemon) == 0);
    for record in fs::read_dir(daemon.provider_folder().join("snapshots")).unwrap().map(|entry| entry.unwrap().path()) {
        let text = fs::read_to_string(&record).unwrap();
        assert!(!text.contains("\"kept\""), "{}: {text}", record.display());
    }
    daemon.assert_nothing_left();
    let refused = handle.ensure(&EnsureSandbox::default()).unwrap_err();
    assert_eq!(code(&refused), ErrorCode::Gone, "L9");
}

#[test]
fn l11_a_delete_at_each_step_of_a_save_leaves_no_row_and_no_layer() {
    for point in ["save.before", "save.after", "save.recorded"] {
        let hold = Hold::at(point);
        let mut daemon = Daemon::prepare(&["--layers", "plain"]);
        daemon.run(&[("VIV_FAILPOINT", &hold.variable())]);
        deleted_while_it_is_saved(&daemon, Some(&hold), |_| ());
    }
}

#[test]
fn l11_a_delete_while_the_shim_that_is_to_end_it_does_not_answer_leaves_no_row_and_no_layer() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    deleted_while_it_is_saved(&daemon, None, |id| Held::of(daemon.host(id).shim_pid).stop());
}

#[test]
fn l16_no_verb_changes_the_policy() {
    let mut daemon = Daemon::start_with(&["--layers", "plain"]);
    let policy = CreatePolicy {
        persistent: Some(true),
        lifetime_ms: Some(LifetimeMs::new(5_400_001).unwrap()),
        idle_ms: Some(IdleMs::new(1_200_001).unwrap()),
        hibernate_ms: Some(IdleMs::new(2_400_001).unwrap()),
        hibernate: Some(Hibernate::Memory),
        snapshots_max: Some(SnapshotsMax::new(7).unwrap()),
        snapshots_age_ms: Some(SnapshotsAgeMs::new(86_400_001).unwrap()),
    };
    let made = daemon.create_from(&CreateSandbox { policy, ..named("box") });
    let id = &made.id;
    assert_eq!((made.policy.lifetime_ms, made.policy.idle_ms), (5_400_001, Some(1_200_001)));
    let same = |daemon: &Daemon, what: &str| {
        let now = daemon.sandbox(id).get().unwrap();
        assert_eq!((now.status, &now.policy), (Status::Ready, &made.policy), "{what}");
    };
    let back = |daemon: &Daemon| drop(daemon.sandbox(id).ensure(&EnsureSandbox { wait_ms: Some(long()) }).unwrap());
    let rest = RestSandbox { wait_ms: Some(long()) };
    back(&daemon);
    same(&daemon, "connect");
    daemon.sandbox(id).extend(ExtendSandbox::AtLeastMs(LifetimeMs::new(9_000_000).unwrap())).unwrap();
    same(&daemon, "extend");
    daemon.sandbox(id).freeze(&rest).unwrap();
    daemon.sandbox(id).thaw(&rest).unwrap();
    same(&daemon, "freeze and thaw");
    daemon.sandbox(id).stop(&StopSandbox { wait_ms: Some(long()), failed_save: None }).unwrap();
    back(&daemon);
    same(&daemon, "stop and resume");
    daemon.sandbox(id).hibernate(&rest).unwrap();
    back(&daemon);
    same(&daemon, "hibernate and resume");
    let point = snapshot(&daemon, id);
    daemon.sandbox(id).rollback(&back_to(&point.id, false)).unwrap();
    same(&daemon, "rollback");
    let fork = Fork { wait_ms: Some(long()), ..Fork::default() };
    let forked = daemon.sandbox(id).fork(&fork, None).unwrap().sandboxes.remove(0);
    assert_eq!(forked.policy, made.policy, "of who was forked");
    same(&daemon, "fork");
    Held::of(daemon.host(id).agent_pid).kill();
    daemon.wait_for(id, "it is lost", |now| now.status == Status::Lost);
    back(&daemon);
    same(&daemon, "recovery");
    daemon.kill();
    daemon.restart();
    back(&daemon);
    same(&daemon, "another daemon");
    daemon.sandbox(id).reset(&ResetSandbox { wait_ms: Some(long()) }).unwrap();
    same(&daemon, "reset");
    for id in [id, &forked.id] {
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn l12_a_reset_begins_anew_under_the_same_name_and_keeps_what_others_need() {
    let daemon = Daemon::start();
    let sandbox = daemon.create_from(&named("box"));
    write(&daemon, &sandbox.id, "old");
    let (needed, of_nobody) = (snapshot(&daemon, &sandbox.id), snapshot(&daemon, &sandbox.id));
    let fork = Fork { wait_ms: Some(long()), ..Fork::default() };
    let other = daemon.client().fork_snapshot(&needed.id, &fork, None).unwrap().sandboxes.remove(0);
    let reset = daemon.sandbox(&sandbox.id).reset(&ResetSandbox { wait_ms: Some(long()) }).unwrap().into_sandbox();
    assert_eq!((reset.status, reset.name.as_deref(), reset.generation.0), (Status::Ready, Some("box"), 2));
    assert_eq!((&reset.policy, &reset.spec), (&sandbox.policy, &sandbox.spec));
    assert_eq!(code(&read_at(&daemon, &sandbox.id, FILE).unwrap_err()), ErrorCode::NotFound);
    let left: Vec<SnapshotId> = rows(&daemon).into_iter().map(|row| row.id).collect();
    assert_eq!(left, [needed.id], "{of_nobody:?} is gone");
    daemon.wait_for(&other.id, "it is ready", |other| other.status == Status::Ready);
    assert_eq!(read(&daemon, &other.id), "old");
    for id in [&sandbox.id, &other.id] {
        daemon.remove(id);
    }
    eventually_within(PATIENCE, "nobody needs it any more", || rows(&daemon).is_empty());
    daemon.assert_nothing_left();
}

/// What a crash must not change: content, generation, snapshots that are ready.
fn end(daemon: &Daemon, id: &SandboxId) -> (String, u64, usize, usize) {
    let settled = |sandbox: &Sandbox| sandbox.status == Status::Ready;
    let now = daemon.wait_for(id, "it is ready", settled);
    eventually_within(PATIENCE, "every snapshot is settled", || {
        rows(daemon).iter().all(|row| row.state == SnapshotState::Ready)
    });
    let all: Vec<Sandbox> = daemon.client().list_all(ListSandboxes::default()).collect::<Result<_, _>>().unwrap();
    for sandbox in &all {
        daemon.wait_for(&sandbox.id, "it is ready", settled);
    }
    (read(daemon, id), now.generation.0, rows(daemon).len(), all.len())
}

fn same_end_after_a_crash_at(points: &[&str], verb: impl Fn(&Daemon, &SandboxId, &SnapshotId)) {
    let mut clean = None;
    for point in std::iter::once(&"").chain(points) {
        eprintln!("{point}");
        let mut daemon = Daemon::start();
        let sandbox = daemon.create_from(&named("box"));
        write(&daemon, &sandbox.id, "one");
        let first = snapshot(&daemon, &sandbox.id);
        write(&daemon, &sandbox.id, "two");
        if point.is_empty() {
            verb(&daemon, &sandbox.id, &first.id);
        } else {
            daemon.end();
            daemon.run(&[("VIV_FAILPOINT", point)]);
            verb(&daemon, &sandbox.id, &first.id);
            daemon.wait();
            daemon.restart();
        }
        let end = end(&daemon, &sandbox.id);
        assert_eq!(*clean.get_or_insert_with(|| end.clone()), end, "{point}");
        for sandbox in daemon.client().list_all(ListSandboxes::default()) {
            daemon.remove(&sandbox.unwrap().id);
        }
        eventually_within(PATIENCE, "no row is left", || rows(&daemon).is_empty());
        daemon.assert_nothing_left();
    }
}

#[test]
fn p4_a_crash_anywhere_in_a_snapshot_ends_as_no_crash() {
    let points = ["snapshot.committed", "snapshot.before", "snapshot.after", "snapshot.recorded"];
    same_end_after_a_crash_at(&points, |daemon, id, _| {
        let _ = daemon.sandbox(id).make_snapshot(&CreateSnapshot::default(), None);
    });
}

#[test]
fn p4_a_crash_anywhere_in_a_rollback_ends_as_no_crash() {
    let points = ["rollback.committed", "save.after", "clear.before", "clear.recorded", "restore.after"];
    same_end_after_a_crash_at(&points, |daemon, id, snapshot| {
        let _ = daemon.sandbox(id).rollback(&back_to(snapshot, false));
    });
}

#[test]
fn p4_a_crash_anywhere_in_a_fork_ends_as_no_crash() {
    let points = ["snapshot.committed", "snapshot.after", "snapshot.recorded", "restore.before", "restore.after:2"];
    same_end_after_a_crash_at(&points, |daemon, id, _| {
        let request = Fork { count: Some(ForkCount::new(3).unwrap()), wait_ms: Some(long()), ..Fork::default() };
        let _ = daemon.sandbox(id).fork(&request, None);
    });
}

#[test]
fn l11_a_snapshot_as_a_file_is_the_same_in_another_installation() {
    let (here, there) = (Daemon::start(), Daemon::start());
    let sandbox = here.create_from(&named("box"));
    write(&here, &sandbox.id, "carried");
    let made = snapshot(&here, &sandbox.id);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("box.snapshot");
    let name = file.to_str().unwrap();
    assert_eq!(viv(&here, &["snapshot", "export", made.id.as_str(), name]).trim(), name);
    here.remove(&sandbox.id);
    assert_eq!(rows(&here), []);
    for daemon in [&here, &there] {
        let id = viv(daemon, &["snapshot", "import", name, "--name", "carried"]).trim().to_owned();
        let imported = daemon.client().snapshot(&id.parse().unwrap()).unwrap();
        assert_eq!((imported.kind, imported.sandbox.as_ref()), (SnapshotKind::Imported, None));
        let request = CreateSandbox { snapshot: Some(id.parse().unwrap()), ..named("again") };
        let again = daemon.create_from(&request);
        assert_eq!(read(daemon, &again.id), "carried");
        assert_eq!(code(&daemon.client().remove_snapshot(&imported.id).unwrap_err()), ErrorCode::SnapshotInUse);
        daemon.remove(&again.id);
        daemon.client().remove_snapshot(&imported.id).unwrap();
        assert_eq!(rows(daemon), []);
        refuses_what_is_none(daemon, &file);
        daemon.assert_nothing_left();
    }
}

/// What was changed on its way, cut off, or is something else, is refused and leaves nothing.
fn refuses_what_is_none(daemon: &Daemon, file: &HostPath) {
    let good = fs::read(file).unwrap();
    let mut changed = good.clone();
    let middle = changed.len() / 2;
    changed[middle] ^= 0x55;
    for bad in [&changed[..], &good[..good.len() / 2], b"no snapshot at all", b""] {
        let refused = daemon.client().import_snapshot(&ImportSnapshot::default(), &mut &bad[..]).unwrap_err();
        let code = code(&refused);
        assert!(matches!(code, ErrorCode::InvalidRequest | ErrorCode::Conflict), "{code:?}");
    }
    eventually_within(PATIENCE, "nothing is left of it", || rows(daemon).is_empty());
}
