//! Whoever saves, merges, collects, removes or imports may be killed at any moment: nothing that was acknowledged is
//! lost, and the store checks clean (L10, J4).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::process::Stdio;
use std::time::{Duration, Instant};

use support::{Chance, Ground, fresh_bytes, mutation, stdout};
use viv_core::exec::ExecState;
use viv_core::{Generation, SandboxId, SnapshotId};
use viv_provider::{InstanceRef, InstanceSpec, PageRequest, Provider, SaveRequest};
use viv_sandbox::DriverKind;

/// Kills with each driver; `VIV_CRASHES` for more.
const CRASHES: u64 = 250;

/// Snapshots that are kept at a time.
const KEPT: usize = 4;

/// Every so often the content of every layer is read as well.
const DEEP_EVERY: u64 = 50;

/// What has come of it so far.
struct Story {
    ground: Ground,
    chance: Chance,
    /// Acknowledged snapshots, the newest last, each with how many files it holds.
    kept: Vec<(SnapshotId, u64)>,
    /// How long verbs take when nobody kills them.
    save_takes: Duration,
    killed: u64,
    finished: u64,
    /// Saves that were acknowledged although their process was killed afterwards.
    acknowledged: u64,
}

impl Story {
    /// Runs a verb and kills it at some moment; answers what it said before.
    fn run_and_kill(&mut self, verb: &[&str]) -> String {
        let mut child = self
            .ground
            .viv()
            .args(verb)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let patience = self.save_takes.as_micros() as u64;
        std::thread::sleep(Duration::from_micros(self.chance.below(patience)));
        // Kept such that about two in three are killed, at any moment of what they do.
        if child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
            self.killed += 1;
            self.save_takes = self.save_takes * 17 / 16;
        } else {
            self.finished += 1;
            self.save_takes = self.save_takes * 7 / 8;
        }
        let output = child.wait_with_output().unwrap();
        stdout(&output)
    }

    async fn run(&self, instance: &InstanceRef, script: &str) -> String {
        let (text, status) = self.ground.run(instance, 0, script).await;
        assert_eq!(status.state, ExecState::Exited { code: 0 }, "{script}: {text}");
        text.trim().to_owned()
    }

    /// A sandbox made from the newest snapshot, in which everything is that was acknowledged.
    async fn next_sandbox(&self) -> (InstanceRef, u64) {
        let sandbox = SandboxId::from_bytes(fresh_bytes());
        let (provider, owner) = (&self.ground.provider, &self.ground.owner);
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: Generation::FIRST };
        let spec = InstanceSpec::host(600_000);
        match self.kept.last() {
            None => {
                provider.create(&mutation(1, 0), &sandbox, owner, &spec).await.unwrap();
                (instance, 0)
            }
            Some((snapshot, files)) => {
                provider.restore(&mutation(1, 0), &sandbox, owner, &spec, snapshot).await.unwrap();
                // Each file holds its own number; one is overwritten and one is removed each time.
                let found = self.run(&instance, "cd /workspace; ls | wc -l; cat f* | sort -n | md5sum; cat last").await;
                let sum = self.run(&instance, &format!("seq 1 {files} | md5sum")).await;
                assert_eq!(found, format!("{}\n{sum}\n{files}", files + 1), "{snapshot} lost something");
                (instance, *files)
            }
        }
    }

    async fn save(&mut self, instance: &InstanceRef, live: bool, files: u64) {
        let name = instance.sandbox.to_string();
        let verb: Vec<&str> = if live { vec!["save", "--live", &name] } else { vec!["save", &name] };
        let said = self.run_and_kill(&verb);
        let acknowledged = if said.is_empty() {
            // It was not acknowledged, so it is done again, by somebody else.
            let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live, memory: false };
            self.ground.provider.save(&mutation(1, 0), &instance.sandbox, &request).await.unwrap().id
        } else {
            self.acknowledged += 1;
            said.parse().unwrap()
        };
        self.kept.push((acknowledged, files));
    }

    /// Removes old snapshots, by a process that is killed.
    async fn forget(&mut self) {
        while self.kept.len() > KEPT {
            let (id, _) = self.kept.remove(0);
            self.run_and_kill(&["drop", id.as_str()]);
            let seen = self.ground.provider.snapshot(&id).await;
            if let Ok(seen) = seen {
                let sandbox = seen.snapshot.source.sandbox;
                self.ground.provider.remove_snapshot(&mutation(1, 0), &sandbox, &id).await.unwrap();
            }
        }
    }

    /// Brings a snapshot in from a file, by a process that is killed.
    async fn import(&mut self) {
        let (newest, _) = self.kept.last().unwrap();
        let file = self.ground.data.join("exported.snap");
        self.ground.provider.export_snapshot(newest, &file).unwrap();
        let said = self.run_and_kill(&["import", file.to_str().unwrap()]);
        if let Ok(id) = said.parse::<SnapshotId>() {
            // It was acknowledged, so it is there, whole.
            let seen = self.ground.provider.snapshot(&id).await.unwrap();
            let sandbox = seen.snapshot.source.sandbox;
            self.ground.provider.remove_snapshot(&mutation(1, 0), &sandbox, &id).await.unwrap();
        }
    }

    async fn check(&self, deep: bool) {
        let checked = self.ground.provider.check_store(deep).unwrap();
        assert!(checked.is_clean(), "{checked:#?}");
        for (id, _) in &self.kept {
            self.ground.provider.snapshot(id).await.unwrap_or_else(|error| panic!("{id} is gone: {error}"));
        }
    }
}

async fn storm(driver: DriverKind) {
    let crashes = std::env::var("VIV_CRASHES").ok().and_then(|text| text.parse().ok()).unwrap_or(CRASHES);
    let ground = Ground::in_memory(driver);
    let mut story = Story {
        ground,
        chance: Chance::from_env("VIV_CRASH_SEED"),
        kept: Vec::new(),
        save_takes: Duration::from_secs(3600),
        killed: 0,
        finished: 0,
        acknowledged: 0,
    };
    let mut round = 0;
    while story.killed < crashes {
        round += 1;
        let (instance, files) = story.next_sandbox().await;
        let files = files + 1;
        let script = format!(
            "cd /workspace; echo {files} > f{files}; echo {files} > last; head -c 300000 /dev/urandom > /usr/share/noise; rm -rf /var/tmp/*; mkdir -p /var/tmp/d{files}"
        );
        story.run(&instance, &script).await;
        if round == 1 {
            // In peace, to know how long it takes.
            let begun = Instant::now();
            let output = story.ground.viv().args(["save", "--live", instance.sandbox.as_str()]).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            story.save_takes = begun.elapsed();
            story.kept.push((stdout(&output).parse().unwrap(), files));
        } else {
            let live = story.chance.below(3) == 0;
            story.save(&instance, live, files).await;
        }
        story.ground.provider.destroy(&mutation(1, 0), &instance.sandbox).await.unwrap();
        story.forget().await;
        if story.chance.below(4) == 0 {
            // Hashing, merging and collecting.
            let mut child =
                story.ground.viv_image().arg("gc").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let patience = story.save_takes.as_micros() as u64;
            std::thread::sleep(Duration::from_micros(story.chance.below(patience)));
            story.killed += u64::from(child.try_wait().unwrap().is_none());
            let _ = child.kill();
            child.wait().unwrap();
        }
        if story.chance.below(4) == 0 {
            story.import().await;
        }
        story.check(round % DEEP_EVERY == 0).await;
    }
    story.check(true).await;
    eprintln!(
        "{driver}: {} killed, {} finished in {round} rounds; {} saves were acknowledged by who was then killed or not",
        story.killed, story.finished, story.acknowledged
    );

    // And in the end nothing is left.
    let provider = &story.ground.provider;
    for (id, _) in std::mem::take(&mut story.kept) {
        let sandbox = provider.snapshot(&id).await.unwrap().snapshot.source.sandbox;
        provider.remove_snapshot(&mutation(1, 0), &sandbox, &id).await.unwrap();
    }
    for owner in [story.ground.owner.clone(), "by-hand".parse().unwrap()] {
        // Saves that were finished without anybody hearing of it.
        loop {
            let page = provider.snapshots(&owner, PageRequest::default()).await.unwrap();
            assert!(!page.is_partial());
            if page.items.is_empty() {
                break;
            }
            for seen in page.items {
                let (id, sandbox) = (seen.snapshot.id, seen.snapshot.source.sandbox);
                provider.remove_snapshot(&mutation(1, 0), &sandbox, &id).await.unwrap();
            }
        }
    }
    story.ground.assert_nothing_left();
    story.ground.assert_no_layer_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l10_killed_at_any_moment_nothing_acknowledged_is_lost_on_plain() {
    storm(DriverKind::Plain).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l10_killed_at_any_moment_nothing_acknowledged_is_lost_on_btrfs() {
    storm(DriverKind::Btrfs).await;
}
