//! What figures cost, and that they are what the records say: on simulated time (O4, O5, L18).
#![allow(missing_docs, reason = "tests")]
#![expect(clippy::float_cmp, reason = "figures are counts, and the same division gives the same ratio")]

mod place;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use place::{Place, by, paused, persistent, place_ticking, request};
use viv_chaos::Rng;
use viv_core::lifecycle::PhaseName;
use viv_core::limits::ResourceLimits;
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{ExecutionId, SandboxId, SnapshotId};
use viv_engine::metrics::family;
use viv_engine::{AlertConfig, CreateRequest, EngineConfig, NewSnapshot, Which};
use viv_provider::conformance::program::Program;
use viv_store::memory::Fault;
use viv_store::{Change, ListQuery, Quota, SnapshotQuery, Store, Sums, SumsMax, Weights};

const DAY: Duration = Duration::from_secs(86_400);

/// What nothing said counts as.
const UNSAID: Sums = Sums { cpu_millis: 1_000, memory_bytes: 1 << 20, disk_bytes: 1 << 21, processes: 64 };

fn judged(config: &mut EngineConfig) {
    config.alerts = Some(AlertConfig::default());
    let max = SumsMax {
        cpu_millis: Some(1 << 40),
        memory_bytes: Some(1 << 50),
        disk_bytes: Some(1 << 50),
        processes: Some(1 << 40),
    };
    let weights = Weights { unsaid: UNSAID, ..Weights::default() };
    config.quota = Quota { total_sums_max: max, project_sums_max: max, weights, ..Quota::of(10_000, 10_000) };
}

/// Nobody puts it to rest.
fn awake() -> CreateRequest {
    let policy = Policy { idle_ms: 86_400_000, hibernate_ms: 86_400_000, ..request().policy };
    CreateRequest { policy, ..request() }
}

impl Place {
    /// Makes so many at once, and waits until all are ready.
    async fn many(&self, count: usize) {
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..count {
            let engine = self.engine.clone();
            all.spawn(async move {
                let made = engine.create(awake()).await.unwrap().view.sandbox.id;
                engine.wait_ready(&made, Duration::from_secs(60)).await.unwrap();
            });
        }
        while let Some(one) = all.join_next().await {
            one.unwrap();
        }
    }

    /// Makes so many at once, and puts all to rest.
    async fn many_hibernated(&self, count: usize) {
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..count {
            let engine = self.engine.clone();
            all.spawn(async move {
                let policy = Policy { persistent: true, ..awake().policy };
                let made = engine.create(CreateRequest { policy, ..awake() }).await.unwrap().view.sandbox.id;
                engine.wait_ready(&made, Duration::from_secs(60)).await.unwrap();
                engine.hibernate(&made, by()).await.unwrap();
                let rests = engine.wait_settled(&made, Duration::from_secs(60)).await.unwrap().sandbox.phase;
                assert_eq!(rests.name(), PhaseName::Hibernated);
            });
        }
        while let Some(one) = all.join_next().await {
            one.unwrap();
        }
    }

    /// What was saved of it and is kept, the oldest first.
    async fn kept_of(&self, id: &SandboxId) -> Vec<SnapshotId> {
        let query = SnapshotQuery { sandbox: Some(id.clone()), limit: 100, ..SnapshotQuery::default() };
        self.store.snapshots(&query).await.unwrap().items.into_iter().rev().map(|row| row.id).collect()
    }

    /// Which calls the store gets in a time, and how often each.
    async fn calls_within(&self, time: Duration) -> BTreeMap<&'static str, u64> {
        let calls: Arc<Mutex<BTreeMap<&'static str, u64>>> = Arc::default();
        let counted = calls.clone();
        self.store.set_faults(Some(Box::new(move |call| {
            *counted.lock().unwrap().entry(call).or_default() += 1;
            None
        })));
        tokio::time::sleep(time).await;
        self.store.set_faults(None);
        calls.lock().unwrap().clone()
    }

    async fn stuck(&self, why: &str) -> f64 {
        let metrics = self.engine.gather().await.unwrap();
        let series = metrics.series(&family::STUCK);
        series.into_iter().find(|(labels, _)| labels == &[why]).map(|(_, value)| value).expect("it is told")
    }
}

#[test]
fn o4_a_tick_costs_the_same_whether_a_hundred_live_or_a_thousand() {
    let calls = |count: usize| {
        let seen = Arc::new(Mutex::new(BTreeMap::new()));
        let told = seen.clone();
        paused(async move {
            let place = place_ticking(1_000, |config| {
                judged(config);
                // It compares everything, as it should (J1), and cleanup has its own time (J2).
                (config.periods.provider_sync, config.cleanup) = (DAY, None);
            })
            .await;
            place.many(count).await;
            tokio::time::sleep(Duration::from_secs(60)).await;
            *told.lock().unwrap() = place.calls_within(Duration::from_secs(300)).await;
        });
        seen.lock().unwrap().clone()
    };
    let few = calls(100);
    assert!(few.get("count").is_some_and(|times| *times >= 20), "figures were told: {few:?}");
    assert_eq!((few.get("list"), few.get("get")), (None, None), "no record was read");
    assert_eq!(few, calls(1_000));
}

const HOUR: Duration = Duration::from_secs(3_600);

/// All snapshots are compared as seldom as a daemon does.
fn hourly(config: &mut EngineConfig) {
    judged(config);
    (config.periods.provider_sync, config.cleanup) = (DAY, None);
    config.periods.snapshots_all = HOUR;
}

#[test]
fn o4_l11_minutes_cost_the_same_whether_a_hundred_snapshots_are_kept_or_a_thousand() {
    let calls = |count: usize| {
        let seen = Arc::new(Mutex::new((BTreeMap::new(), BTreeMap::new())));
        let told = seen.clone();
        paused(async move {
            let place = place_ticking(1_000, hourly).await;
            place.many_hibernated(count).await;
            // What is new is looked at until it is hashed.
            tokio::time::sleep(Duration::from_secs(900)).await;
            let minutes = place.calls_within(Duration::from_secs(300)).await;
            *told.lock().unwrap() = (minutes, place.calls_within(HOUR).await);
        });
        seen.lock().unwrap().clone()
    };
    let (few, hour) = calls(100);
    assert!(few.get("snapshots").is_some_and(|times| (4..=6).contains(times)), "what is not settled, only: {few:?}");
    assert_eq!((few.get("list"), few.get("get"), few.get("snapshot")), (None, None, None), "nothing else was read");
    assert!(hour.get("get").is_some_and(|times| *times >= 100), "all are compared within the hour: {hour:?}");
    let (many, hour) = calls(1_000);
    assert_eq!(few, many);
    assert!(hour.get("get").is_some_and(|times| *times >= 1_000), "all are compared within the hour: {hour:?}");
}

#[test]
fn l11_what_something_happened_to_is_tidied_in_the_next_minute_and_what_is_too_old_within_the_hour() {
    paused(async {
        let place = place_ticking(1_000, hourly).await;
        let policy =
            Policy { snapshots_max: Some(2), snapshots_age_ms: Some(1_800_000), persistent: true, ..awake().policy };
        let id = place.made(CreateRequest { policy, ..awake() }).await;
        // The comparison of the start is over.
        tokio::time::sleep(Duration::from_secs(150)).await;
        let mut made = Vec::new();
        for _ in 0..3 {
            let new = NewSnapshot { name: None, labels: BTreeMap::new(), by: by(), key: None };
            made.push(place.engine.make_snapshot(&id, new).await.unwrap().row.id);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        tokio::time::sleep(Duration::from_secs(61)).await;
        assert_eq!(place.kept_of(&id).await, made[1..], "one is too many");
        // Somebody wrote that it is to go, and did not live to do it.
        let row = place.store.snapshot(&made[1]).await.unwrap().unwrap();
        let removing = Snapshot { state: SnapshotState::Removing, version: row.version + 1, ..row };
        place.store.put_snapshot(place.engine.epoch(), removing, Vec::new()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(61)).await;
        assert_eq!(place.kept_of(&id).await, made[2..], "what was left in the middle is taken up");
        tokio::time::sleep(Duration::from_secs(1_900)).await;
        assert_eq!(place.kept_of(&id).await, made[2..], "nothing happened to it");
        place.engine.reconcile();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(place.kept_of(&id).await.is_empty(), "by hand, all are looked at");
    });
}

#[test]
fn l11_a_whole_comparison_that_failed_is_made_again_in_the_next_minute() {
    paused(async {
        let place = place_ticking(1_000, hourly).await;
        place.many_hibernated(1).await;
        tokio::time::sleep(Duration::from_secs(900)).await;
        place.store.set_faults(Some(Box::new(|call| (call == "snapshots").then_some(Fault::Before))));
        place.engine.reconcile();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let later = place.calls_within(Duration::from_secs(61)).await;
        assert!(later.contains_key("get"), "{later:?}");
        let then = place.calls_within(Duration::from_secs(300)).await;
        assert_eq!(then.get("get"), None, "{then:?}");
    });
}

#[test]
fn o5_one_that_nobody_uses_is_read_less_and_less() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            judged(config);
            (config.periods.provider_sync, config.cleanup) = (DAY, None);
        })
        .await;
        place.many(1).await;
        let first = place.calls_within(Duration::from_secs(3_600)).await;
        let later = place.calls_within(Duration::from_secs(3_600)).await;
        let reads = |calls: &BTreeMap<&str, u64>| calls.get("get").copied().unwrap_or_default();
        assert!((1..=8).contains(&reads(&first)) && (1..=4).contains(&reads(&later)), "{first:?} {later:?}");
    });
}

/// What the records say: of all, and the most of a project.
async fn recount(place: &Place) -> (Sums, BTreeMap<Project, (u64, Sums)>) {
    let query =
        ListQuery { phases: PhaseName::MAY_LIVE.to_vec(), deleted: true, limit: 10_000, ..ListQuery::default() };
    let (mut all, mut projects) = (Sums::default(), BTreeMap::<Project, (u64, Sums)>::new());
    for record in place.store.list(&query).await.unwrap().items {
        let one = Sums::of(&record.spec.limits, &place.engine.config().quota.weights);
        all = all.plus(&one);
        let (count, sums) = projects.entry(record.project.clone()).or_default();
        (*count, *sums) = (*count + 1, sums.plus(&one));
    }
    (all, projects)
}

#[expect(clippy::cast_precision_loss, reason = "figures")]
async fn assert_as_recorded(place: &Place) {
    let metrics = place.engine.gather().await.unwrap();
    let told = |family, name: &str| -> f64 {
        let series = metrics.series(family);
        series.into_iter().find(|(labels, _)| labels == &[name]).map(|(_, value)| value).expect("it is told")
    };
    let (all, projects) = recount(place).await;
    let used = [all.cpu_millis, all.memory_bytes, all.disk_bytes, all.processes];
    for (name, used) in ["cpu_millis", "memory_bytes", "disk_bytes", "processes"].into_iter().zip(used) {
        assert_eq!(told(&family::QUOTA_USED, name), used as f64, "{name}");
    }
    let quota = place.engine.config().quota;
    let most = |used: &dyn Fn(&(u64, Sums)) -> u64| projects.values().map(used).max().unwrap_or(0) as f64;
    let ratios = [
        ("project_sandboxes", most(&|one| one.0), quota.project_max),
        ("project_memory_bytes", most(&|one| one.1.memory_bytes), 1 << 50),
        ("project_processes", most(&|one| one.1.processes), 1 << 40),
    ];
    for (name, used, max) in ratios {
        assert_eq!(told(&family::QUOTA_RATIO, name), used / max as f64, "{name}");
    }
}

#[test]
fn l18_o4_figures_are_what_a_recount_finds_also_when_answers_of_the_store_are_lost() {
    paused(async {
        let place = place_ticking(1_000, judged).await;
        let mut writes = 0_u64;
        place.store.set_faults(Some(Box::new(move |call| {
            writes += u64::from(call == "commit");
            (call == "commit" && writes.is_multiple_of(5)).then_some(Fault::After)
        })));
        let (mut rng, mut made) = (Rng::new(7), Vec::new());
        for _ in 0..60 {
            let memory_bytes = rng.chance(50).then(|| 1 << (20 + rng.below(6)));
            let limits = ResourceLimits { memory_bytes, ..ResourceLimits::default() };
            let project: Project = ["default", "a", "b"][rng.below(3) as usize].parse().unwrap();
            let spec = SandboxSpec { limits, ..SandboxSpec::default() };
            // Some answers are lost: whatever came of it is on record.
            match (made.is_empty() || rng.chance(50), rng.below(4)) {
                (true, _) => {
                    let wanted =
                        CreateRequest { project, spec, ..if rng.chance(50) { persistent() } else { request() } };
                    let created = place.engine.create(wanted).await;
                    made.extend(created.ok().map(|created| created.view.sandbox.id));
                }
                (false, act) => {
                    let one = &made[rng.below(made.len() as u64) as usize];
                    let _ = match act {
                        0 => place.engine.freeze(one, by()).await.map(drop),
                        1 => place.engine.hibernate(one, by()).await.map(drop),
                        2 => place.engine.delete(one, by()).await.map(drop),
                        _ => place.engine.thaw(one, by()).await.map(drop),
                    };
                }
            }
            if rng.chance(20) {
                tokio::time::sleep(Duration::from_secs(150)).await;
                assert_as_recorded(&place).await;
            }
        }
        place.store.set_faults(None);
        for one in &made {
            let _ = place.engine.delete(one, by()).await;
        }
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_as_recorded(&place).await;
        place.engine.shut_down();
    });
}

#[test]
fn l18_j1_what_was_written_without_a_word_is_in_the_figures_after_the_next_comparison() {
    paused(async {
        let place = place_ticking(1_000, judged).await;
        place.many(3).await;
        let id = place.made(awake()).await;
        assert_as_recorded(&place).await;
        // Somebody wrote, and did not live to say so.
        let mut record = place.record(&id).await;
        record.version += 1;
        record.spec.limits.memory_bytes = Some(1 << 33);
        let change = Change {
            sandbox: record,
            lines: Vec::new(),
            idempotency: None,
            quota: None,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        place.store.commit(place.engine.epoch(), change).await.unwrap();
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert_as_recorded(&place).await;
    });
}

#[test]
fn o5_a_command_that_says_nothing_is_stuck_from_its_time_on_and_until_it_ends() {
    paused(async {
        let place = place_ticking(1_000, judged).await;
        let id = place.made(awake()).await;
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        let execution = ExecutionId::from_bytes([9; 16]);
        let silent = Program::Sleep { seconds: 86_000 }.spec();
        handle.execute(&execution, &silent).await.unwrap();
        drop(handle);
        tokio::time::sleep(Duration::from_secs(590)).await;
        assert_eq!(place.stuck("no_progress").await, 0.0, "not before its time");
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(place.stuck("no_progress").await, 1.0);
        tokio::time::sleep(Duration::from_secs(7_200)).await;
        assert_eq!(place.stuck("no_progress").await, 1.0, "it stays so");
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        handle.cancel(&execution).await.unwrap();
        drop(handle);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(place.stuck("no_progress").await, 0.0);
    });
}
