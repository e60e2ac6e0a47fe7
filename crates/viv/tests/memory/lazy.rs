//! Memory that is brought while it is used already: all of it is right, and when it cannot be brought any more, nobody
//! reads anything else (L13, T10, L20).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use viv_core::{EndCause, ExecutionId, SnapshotId};
use viv_provider::{
    Capability, InstanceRef, InstanceSpec, InstanceState, Mutation, Observation, Provider, ProviderError,
};

use super::{LIFETIME, destroy, ground_with, python, restore, save, until_more, written};
use crate::support::criu::criu;
use crate::support::lazy::{
    MUCH_MIB, SETTING, SOME_MIB, Slowed, Told, holder, servers, until_all_wait_for_pages, until_ended, wrote,
};
use crate::support::{Ground, SOON, Sandbox, eventually, mutation};

/// A ground whose CRIU notes in a file when it is to be lazy, after which it does this.
fn noted_ground(criu: &Path, then: &str) -> (Ground, tempfile::TempDir, PathBuf) {
    let notes = tempfile::tempdir().unwrap();
    let note = notes.path().join("lazily");
    let instead = format!("case \" $* \" in *' --lazy-pages '*) echo x >> {}; {then} ;; esac", note.display());
    let (ground, folder) = ground_with(criu, &instead);
    // Both go with the test.
    let _kept = notes.keep();
    (ground, folder, note)
}

fn times(note: &Path) -> usize {
    fs::read_to_string(note).map_or(0, |text| text.lines().count())
}

async fn hold(sandbox: &Sandbox<'_>, mib: u32) -> ExecutionId {
    sandbox.start_spec(&python(&holder(mib))).await
}

fn folder(ground: &Ground, instance: &InstanceRef) -> PathBuf {
    ground.data.join("instances").join(instance.sandbox.as_str())
}

/// Whether it was brought while nothing ran, after all: its shim says so.
fn was_brought_at_once(ground: &Ground, instance: &InstanceRef) -> bool {
    fs::read_to_string(folder(ground, instance).join("shim.log")).unwrap().contains("its memory is brought at once")
}

fn assert_restored(seen: &Observation, before: &InstanceRef) {
    assert_eq!(seen.lacks.get(&Capability::SaveMemory), None);
    assert_eq!((&seen.state, seen.instance.generation.0), (&InstanceState::Running, before.generation.0 + 1));
}

/// It looks at all of its memory twice more, and finds it as it was.
async fn assert_whole(ground: &Ground, instance: &InstanceRef, execution: &ExecutionId) {
    let mut text = written(ground, instance, execution).await;
    for _ in 0..2 {
        text = until_more(ground, instance, execution, text.len()).await;
    }
    assert!(text.lines().all(|line| line.ends_with(" whole")), "{text}");
}

fn assert_all_brought(ground: &Ground, instance: &InstanceRef) {
    let folder = folder(ground, instance);
    eventually("all of it was brought", || {
        !folder.join("unpacked").exists() && !folder.join("lazy-pages.socket").exists() && servers(&folder).is_none()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_what_is_brought_while_it_runs_is_all_there() {
    let Some(criu) = criu() else { return };
    let _told = Told::allowed();
    let (ground, _folder, note) = noted_ground(&criu, ":");
    assert_eq!(ground.provider.criu().unwrap().not_lazy, None);
    let sandbox = ground.create(LIFETIME).await;
    let small = sandbox.instance();
    let holder = hold(&sandbox, SOME_MIB).await;
    until_more(&ground, &small, &holder, 0).await;
    let mut instance = small;
    for round in 1..=2 {
        let snapshot = save(&ground, &instance).await.unwrap();
        destroy(&ground, &instance).await;
        let seen = restore(&ground, &instance, &snapshot.id).await;
        assert_restored(&seen, &instance);
        instance = seen.instance;
        assert!(times(&note) == round && !was_brought_at_once(&ground, &instance), "it was brought lazily");
        assert_whole(&ground, &instance, &holder).await;
        assert_all_brought(&ground, &instance);
    }
    destroy(&ground, &instance).await;
    // What is little is brought at once.
    let sandbox = ground.create(LIFETIME).await;
    let holder = hold(&sandbox, 1).await;
    until_more(&ground, &sandbox.instance(), &holder, 0).await;
    let snapshot = save(&ground, &sandbox.instance()).await.unwrap();
    destroy(&ground, &sandbox.instance()).await;
    let seen = restore(&ground, &sandbox.instance(), &snapshot.id).await;
    assert_restored(&seen, &sandbox.instance());
    assert_whole(&ground, &seen.instance, &holder).await;
    assert_eq!(times(&note), 2);
    destroy(&ground, &seen.instance).await;
    ground.assert_nothing_left();
}

/// One that was restored, while its pages are still being brought.
struct Middle {
    instance: InstanceRef,
    snapshot: SnapshotId,
    holder_of_memory: ExecutionId,
    slowed: Slowed,
    /// Those who hold its pages: the one who watches, and the one who brings them.
    watcher: Pid,
    server: Pid,
}

impl Middle {
    async fn of(ground: &Ground) -> Self {
        Self::of_one(ground, &holder(MUCH_MIB)).await
    }

    async fn of_one(ground: &Ground, program: &str) -> Self {
        let sandbox = ground.create(LIFETIME).await;
        let holder_of_memory = sandbox.start_spec(&python(program)).await;
        until_more(ground, &sandbox.instance(), &holder_of_memory, 0).await;
        let snapshot = save(ground, &sandbox.instance()).await.unwrap().id;
        destroy(ground, &sandbox.instance()).await;
        let slowed = Slowed::of(folder(ground, &sandbox.instance()));
        let seen = restore(ground, &sandbox.instance(), &snapshot).await;
        assert_restored(&seen, &sandbox.instance());
        let instance = seen.instance;
        let (watcher, server) = servers(&folder(ground, &instance)).expect("its pages are being brought");
        Self { instance, snapshot, holder_of_memory, slowed, watcher, server }
    }

    /// Those inside have all the time that it takes them to read something that was not saved, and do not.
    fn assert_nobody_reads_on(&self, ground: &Ground) {
        let folder = folder(ground, &self.instance);
        assert!(!folder.join("exit.json").exists(), "nobody was ended");
        until_all_wait_for_pages(&ground.cgroups(), &folder, &self.holder_of_memory);
        assert!(!folder.join("exit.json").exists(), "nobody was ended");
    }

    fn shim(&self, ground: &Ground) -> Pid {
        let text = fs::read(folder(ground, &self.instance).join("shim.json")).unwrap();
        let shim: serde_json::Value = serde_json::from_slice(&text).unwrap();
        Pid::from_raw(shim["shim"]["pid"].as_i64().unwrap() as i32).unwrap()
    }
}

async fn ended(ground: &Ground, instance: &InstanceRef) -> EndCause {
    let until = Instant::now() + SOON;
    loop {
        match ground.provider.observe(instance).await.unwrap().state {
            InstanceState::Ended(ended) => return ended.cause,
            state => assert!(Instant::now() < until, "{state:?}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Its pages cannot be brought any more: it ends for that reason, and nobody has read anything else.
async fn assert_lost(ground: &Ground, instance: &InstanceRef, why: &str) {
    let cause = ended(ground, instance).await;
    assert!(matches!(&cause, EndCause::MemoryLost { what } if what.contains(why)), "{cause:?}");
    let folder = folder(ground, instance);
    assert!(wrote(&folder.join("run"), " whole") && !wrote(&folder.join("run"), "BROKEN"));
    assert!(!folder.join("unpacked").exists());
    eventually("nobody holds pages any more", || servers(&folder).is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn t10_a_server_of_pages_that_is_killed_ends_the_instance_and_nobody_reads_zeros() {
    let Some(criu) = criu() else { return };
    let _told = Told::allowed();
    let (ground, _folder, note) = noted_ground(&criu, ":");
    let mut middle = Middle::of(&ground).await;
    assert_eq!(times(&note), 1);
    middle.slowed.stop();
    // Who would end it stands still, until those inside have shown what they read.
    kill_process(middle.watcher, Signal::STOP).unwrap();
    kill_process(middle.server, Signal::KILL).unwrap();
    until_ended(middle.server);
    middle.assert_nobody_reads_on(&ground);
    kill_process(middle.watcher, Signal::CONT).unwrap();
    assert_lost(&ground, &middle.instance, "killed (signal 9)").await;
    destroy(&ground, &middle.instance).await;
    // What was dumped is as good as before.
    let again = restore(&ground, &middle.instance, &middle.snapshot).await;
    assert_restored(&again, &middle.instance);
    assert_whole(&ground, &again.instance, &middle.holder_of_memory).await;
    destroy(&ground, &again.instance).await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn t10_whoever_holds_pages_and_is_killed_ends_the_instance_and_nobody_reads_zeros() {
    let Some(criu) = criu() else { return };
    let _told = Told::allowed();
    let (ground, _folder, _) = noted_ground(&criu, ":");
    let mut middle = Middle::of(&ground).await;
    middle.slowed.stop();
    let shim = middle.shim(&ground);
    kill_process(shim, Signal::STOP).unwrap();
    kill_process(middle.watcher, Signal::KILL).unwrap();
    until_ended(middle.watcher);
    middle.assert_nobody_reads_on(&ground);
    kill_process(shim, Signal::CONT).unwrap();
    ended(&ground, &middle.instance).await;
    let _ = kill_process(middle.server, Signal::CONT);
    assert_lost(&ground, &middle.instance, "who held its pages was killed").await;
    destroy(&ground, &middle.instance).await;
    // A shim that is killed takes everything with it, as ever.
    let middle = Middle::of(&ground).await;
    let folder = folder(&ground, &middle.instance);
    kill_process(middle.shim(&ground), Signal::KILL).unwrap();
    let cause = ended(&ground, &middle.instance).await;
    assert_eq!(cause, EndCause::SupervisorLost);
    assert!(wrote(&folder.join("run"), " whole") && !wrote(&folder.join("run"), "BROKEN"));
    drop(middle.slowed);
    let _ = kill_process(middle.server, Signal::CONT);
    eventually("nobody holds pages any more", || servers(&folder).is_none());
    destroy(&ground, &middle.instance).await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_what_is_saved_while_its_pages_are_brought_is_saved_whole() {
    let Some(criu) = criu() else { return };
    let told = Told::allowed();
    let (ground, _folder, note) = noted_ground(&criu, ":");
    let middle = Middle::of(&ground).await;
    // It can be frozen meanwhile, and goes on.
    let mutation = || mutation(middle.instance.generation.0, 1);
    ground.provider.freeze(&mutation(), &middle.instance.sandbox).await.unwrap();
    assert!(servers(&folder(&ground, &middle.instance)).is_some());
    ground.provider.thaw(&mutation(), &middle.instance.sandbox).await.unwrap();
    assert!(servers(&folder(&ground, &middle.instance)).is_some(), "it is still in the middle");
    let saved = save(&ground, &middle.instance).await.unwrap();
    assert!(saved.memory, "{saved:?}");
    destroy(&ground, &middle.instance).await;
    drop(middle.slowed);
    // Without being lazy, so that nothing of before can help.
    told.tell("0");
    let seen = restore(&ground, &middle.instance, &saved.id).await;
    assert_restored(&seen, &middle.instance);
    assert_eq!(times(&note), 1);
    assert_whole(&ground, &seen.instance, &middle.holder_of_memory).await;
    destroy(&ground, &seen.instance).await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_what_cannot_be_brought_while_it_runs_is_brought_at_once() {
    let Some(criu) = criu() else { return };
    let told = Told::allowed();
    // It is found out that it can be, and then it cannot: CRIU fails, or the kernel has it fail.
    let refused = format!("echo 0 > {SETTING}");
    for then in ["exit 1", &refused] {
        told.tell("1");
        let (ground, _folder, note) = noted_ground(&criu, then);
        assert_eq!(ground.provider.criu().unwrap().not_lazy, None);
        let sandbox = ground.create(LIFETIME).await;
        let holder = hold(&sandbox, SOME_MIB).await;
        until_more(&ground, &sandbox.instance(), &holder, 0).await;
        let snapshot = save(&ground, &sandbox.instance()).await.unwrap();
        destroy(&ground, &sandbox.instance()).await;
        let seen = restore(&ground, &sandbox.instance(), &snapshot.id).await;
        assert_restored(&seen, &sandbox.instance());
        assert!(times(&note) == 1 && was_brought_at_once(&ground, &seen.instance), "it was tried");
        assert_whole(&ground, &seen.instance, &holder).await;
        assert_all_brought(&ground, &seen.instance);
        destroy(&ground, &seen.instance).await;
        ground.assert_nothing_left();
    }
    // The kernel is asked again when it was told something else.
    let (ground, _folder, _) = noted_ground(&criu, ":");
    assert!(ground.provider.criu().unwrap().not_lazy.unwrap().contains("userfaultfd"));
    told.tell("1");
    assert_eq!(ground.provider.criu().unwrap().not_lazy, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_what_waits_for_its_pages_to_be_saved_is_as_it_was_until_then() {
    let Some(criu) = criu() else { return };
    let _told = Told::allowed();
    let (ground, _folder, _) = noted_ground(&criu, ":");
    for is_frozen in [false, true] {
        let middle = Middle::of(&ground).await;
        let (instance, folder) = (&middle.instance, folder(&ground, &middle.instance));
        let mutation = || mutation(instance.generation.0, 1);
        if is_frozen {
            ground.provider.freeze(&mutation(), &instance.sandbox).await.unwrap();
        }
        let stands_still = || {
            let found = ground
                .cgroups()
                .into_iter()
                .find_map(|all| fs::read_to_string(all.join(instance.sandbox.as_str()).join("cgroup.events")).ok());
            found.is_some_and(|events| events.contains("frozen 1"))
        };
        let look = async {
            // It is asked for what it is anyway, until that is refused: then the save has come.
            let until = Instant::now() + SOON;
            loop {
                let (mutation, sandbox) = (mutation(), &instance.sandbox);
                let asked = if is_frozen {
                    ground.provider.freeze(&mutation, sandbox).await
                } else {
                    ground.provider.thaw(&mutation, sandbox).await
                };
                match asked {
                    Err(ProviderError::Conflict { what }) if what.contains("memory is being saved") => break,
                    Ok(()) => assert!(Instant::now() < until, "nobody saves it"),
                    Err(error) => panic!("{error}"),
                }
            }
            let said = if is_frozen { None } else { Some(ground.run(instance, 1, "echo well").await.0) };
            let is_as_it_was = stands_still() == is_frozen && !folder.join("dumping").exists();
            assert!(servers(&folder).is_some(), "its pages are still being brought");
            assert!(is_as_it_was, "frozen: {is_frozen}");
            assert!(said.is_none_or(|said| said == "well\n"));
            drop(middle.slowed);
            let _ = kill_process(middle.server, Signal::CONT);
        };
        let (saved, ()) = tokio::join!(save(&ground, instance), look);
        let saved = saved.unwrap();
        assert!(saved.memory, "{saved:?}");
        destroy(&ground, instance).await;
        let seen = restore(&ground, instance, &saved.id).await;
        assert_restored(&seen, instance);
        assert_whole(&ground, &seen.instance, &middle.holder_of_memory).await;
        destroy(&ground, &seen.instance).await;
    }
    ground.assert_nothing_left();
}

/// One that hangs when it is to be lazy, for any reason, works otherwise as well as ever.
#[tokio::test(flavor = "multi_thread")]
async fn l13_a_criu_that_hangs_when_it_is_lazy_is_used_all_the_same() {
    let Some(criu) = criu() else { return };
    let _told = Told::allowed();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("criu");
    let hangs = format!(
        "#!/bin/sh\ncase \" $* \" in *' --lazy-pages '*) exec sleep 100000 ;; esac\nexec {} \"$@\"\n",
        criu.display()
    );
    fs::write(&path, hangs).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let ground = Ground::with(|config| config.criu = Some(path));
    let not_lazy = ground.provider.criu().unwrap().not_lazy.unwrap();
    assert!(not_lazy.contains("takes longer"), "{not_lazy}");
    // It was found to be lazy, and hangs in the middle of a restore: there is time left for the other way.
    let (ground, _folder, note) = noted_ground(&criu, "exec sleep 100000");
    assert_eq!(ground.provider.criu().unwrap().not_lazy, None);
    let sandbox = ground.create(LIFETIME).await;
    let before = sandbox.instance();
    let holder = hold(&sandbox, SOME_MIB).await;
    until_more(&ground, &before, &holder, 0).await;
    let snapshot = save(&ground, &before).await.unwrap();
    destroy(&ground, &before).await;
    let mutation = Mutation { budget_ms: 80_000, ..mutation(before.generation.0 + 1, 1) };
    let spec = InstanceSpec::host(LIFETIME.as_millis() as u64);
    let seen = ground.provider.restore(&mutation, &before.sandbox, &ground.owner, &spec, &snapshot.id).await.unwrap();
    assert_restored(&seen, &before);
    assert_eq!(times(&note), 1, "it was tried");
    assert_whole(&ground, &seen.instance, &holder).await;
    destroy(&ground, &seen.instance).await;
    ground.assert_nothing_left();
}
