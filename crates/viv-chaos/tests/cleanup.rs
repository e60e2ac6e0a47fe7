//! Who cleans up, on simulated time: a provider whose listings fail, have a part only, or are as things were ten
//! listings ago; sandboxes that are unwell; and what the store holds and nobody needs (J1, J2, T7).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::sync::Arc;
use std::time::Duration;

use place::{LONG, Place, by, paused, persistent, place_ordered, place_ticking, place_with, request};
use viv_chaos::{Damage, Order, Orders, Trouble, Turn};
use viv_core::exec::ExecSpec;
use viv_core::lifecycle::{Cause, EntryKind, Phase, PhaseName, Status};
use viv_core::limits::ResourceLimits;
use viv_core::planted::{Planted, plant};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::task::{NewTask, TaskLimits};
use viv_core::{FencingToken, SandboxId};
use viv_engine::cleanup::{CleanupKind, CleanupOrder, CleanupOutcome};
use viv_engine::{CleanupConfig, CreateTask, EngineConfig, ReconcilerName, SpareClass, Which};
use viv_provider::conformance::program::Program;
use viv_provider::{FileWrite, InstanceRef, InstanceState, PageRequest, Provider};
use viv_store::{Cursor, JournalFilter, Lease, LeaseKind, ListQuery, Quota, Store, SumsMax};

/// How listings go wrong.
#[derive(Debug, Clone, Copy)]
enum Wrong {
    Fail,
    Part,
    Stale,
}

impl Wrong {
    fn begin(self, place: &Place) {
        match self {
            Self::Fail => place.provider.set_listings_fail(true),
            Self::Part => place.provider.set_partial(true),
            Self::Stale => place.provider.set_stale(10),
        }
    }

    fn end(place: &Place) {
        place.provider.set_listings_fail(false);
        place.provider.set_partial(false);
        place.provider.set_stale(0);
    }
}

/// As many as live at most while listings are wrong: when it is nearly so many, little is left of the quota.
const LIVING_MAX: u64 = 11;

/// Looks often, and leaves nothing alone that it takes for left, unwell or idle.
fn eager(config: &mut EngineConfig) {
    config.periods.provider_sync = Duration::from_secs(1);
    config.periods.orphan_grace = Duration::ZERO;
    config.cleanup = Some(CleanupConfig {
        period: Duration::from_secs(2),
        leftover_after: Duration::ZERO,
        unhealthy_after: Duration::ZERO,
        unhealthy_age: Duration::ZERO,
        // Nothing is so old, or idle for so long; what is called lost by mistake is neither.
        age_max: Some(A_DAY),
        emergency_idle: A_DAY,
        ..CleanupConfig::default()
    });
    config.quota = Quota::of(LIVING_MAX, LIVING_MAX);
}

/// Everybody who collects anything does so now.
async fn collect(place: &Place) {
    // That it cannot look is an answer too.
    let _ = place.engine.audit(true, by()).await;
    place.engine.cleanup(&CleanupOrder::by(&CleanupKind::ALL), by()).await.unwrap();
}

async fn lives(place: &Place, id: &SandboxId) -> bool {
    let record = place.record(id).await;
    let instance = InstanceRef { sandbox: id.clone(), generation: record.generation };
    place.provider.truth().observe(&instance).await.unwrap().state == InstanceState::Running
}

/// Makes, ends and saves some under listings that are wrong, and sees in each round that all are as they should be.
fn assert_nothing_alive_is_collected(wrong: Wrong) {
    paused(async {
        let place = place_with(eager).await;
        let mut all = Vec::new();
        for _ in 0..4 {
            all.push(place.made(request()).await);
        }
        let back = place.made(persistent()).await;
        wrong.begin(&place);
        // Some come, some go, and one comes back as another generation, with collectors at work all the time.
        let mut gone = Vec::new();
        for round in 0..30 {
            if round % 3 == 0 {
                // Nobody waits for it to be made, so that it is looked for in the middle of that.
                let made = place.engine.create(request()).await.unwrap();
                collect(&place).await;
                let ready = place.engine.wait_ready(&made.view.sandbox.id, Duration::from_secs(20)).await;
                assert!(ready.is_ok(), "{wrong:?}, round {round}: what is made is taken away: {ready:?}");
                all.push(made.view.sandbox.id);
            }
            if round % 7 == 3 {
                let id = all.remove(0);
                place.delete(&id).await;
                gone.push(id);
            }
            if round == 12 {
                place.engine.hibernate(&back, by()).await.unwrap();
                place.engine.wait_settled(&back, Duration::from_secs(20)).await.unwrap();
                place.engine.ensure(&back, EntryKind::Ensure, by()).await.unwrap();
                place.engine.wait_ready(&back, Duration::from_secs(20)).await.unwrap();
            }
            collect(&place).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            for id in all.iter().chain([&back]) {
                let record = place.record(id).await;
                assert!(lives(&place, id).await, "{wrong:?}, round {round}: {id} is gone: {record:?}");
                let status = place.status(id).await;
                let is_up = matches!(status, Status::Ready | Status::Unverified);
                assert!(is_up, "{wrong:?}, round {round}: {id} is {status:?}: {record:?}");
                let generation = if id == &back && round >= 12 { 2 } else { 1 };
                assert_eq!(record.generation.0, generation, "{wrong:?}, round {round}");
            }
        }
        assert_eq!(place.record(&back).await.generation.0, 2);
        // And when listings are right again, what is there is what is recorded.
        Wrong::end(&place);
        tokio::time::sleep(Duration::from_secs(60)).await;
        for id in all.iter().chain([&back]) {
            assert!(lives(&place, id).await);
            assert!(matches!(place.status(id).await, Status::Ready | Status::Unverified), "{wrong:?}");
        }
        let there = place.provider.truth().list(&"sim".parse().unwrap(), PageRequest::default()).await.unwrap();
        assert_eq!(there.items.len(), all.len() + 1, "{wrong:?}: {gone:?} are gone");
        let lines = place.store.journal(Cursor(0), &JournalFilter::default(), 100_000).await.unwrap();
        let collected: Vec<_> = lines.iter().filter(|line| line.line.kind == "orphan.collected").collect();
        let of_living = |id: &Option<SandboxId>| id.as_ref().is_some_and(|id| all.contains(id));
        assert!(!collected.iter().any(|line| of_living(&line.line.sandbox)), "{wrong:?}: {collected:?}");
    });
}

#[test]
fn j1_nothing_alive_is_collected_by_listings_that_fail_are_partial_or_ten_steps_old() {
    for wrong in [Wrong::Fail, Wrong::Part, Wrong::Stale] {
        assert_nothing_alive_is_collected(wrong);
    }
}

/// The same can fail: with a daemon that believes such listings, it does.
#[test]
fn p1_a_daemon_that_believes_listings_that_fail_or_are_partial_is_caught() {
    for (bug, wrong) in [
        (Planted::FailedListIsEmpty, Wrong::Fail),
        (Planted::PartialListIsWhole, Wrong::Part),
        (Planted::PartialListIsWhole, Wrong::Stale),
    ] {
        plant(Some(bug));
        let looked = std::panic::catch_unwind(|| assert_nothing_alive_is_collected(wrong));
        plant(None);
        let said = looked.expect_err("it is caught");
        let said = said.downcast_ref::<String>().expect("it says what it saw");
        assert!(said.starts_with(&format!("{wrong:?}, round ")), "{bug:?}: {said}");
    }
}

/// What is unwell is ended after a minute if it is ten minutes old, and is looked at every five.
fn cleaning(config: &mut EngineConfig) {
    config.cleanup = Some(CleanupConfig::default());
}

/// Longer than what is unwell is left, and cleanups are apart.
const A_WHILE: Duration = Duration::from_secs(900);

#[test]
fn j2_what_is_unwell_and_old_is_saved_or_ends_with_what_was_found() {
    for damage in [Damage::Hangs, Damage::Rootless] {
        paused(async {
            let place = place_ticking(250, cleaning).await;
            let mut policy = request().policy;
            // Nobody reads it, and nothing else puts it to rest.
            (policy.idle_ms, policy.hibernate_ms) = (86_400_000, 86_400_000);
            let brief = place.made(viv_engine::CreateRequest { policy: policy.clone(), ..request() }).await;
            policy.persistent = true;
            let kept = place.made(viv_engine::CreateRequest { policy, ..persistent() }).await;
            let handle = place.engine.work_in(&Project::default(), &Which::Id(kept.clone()), None).await.unwrap();
            handle.file_mkdir("/workspace/mine").await.unwrap();
            tokio::time::sleep(A_WHILE).await;
            for id in [&brief, &kept] {
                place.provider.damage(id, Some(damage));
            }
            tokio::time::sleep(A_WHILE).await;
            let ended = place.record(&brief).await;
            assert_eq!(ended.phase.name(), PhaseName::Stopped, "{damage:?}: {ended:?}");
            let saved = place.record(&kept).await;
            assert!(matches!(saved.phase, Phase::Hibernated { .. }), "{damage:?}: {saved:?}");
            for id in [&brief, &kept] {
                let lines = place.lines(id).await;
                let told = lines.iter().find(|line| line.line.cause.as_deref() == Some(Cause::Unhealthy.code()));
                let told = told.unwrap_or_else(|| panic!("{damage:?}: {lines:?}"));
                assert_eq!(told.line.by.who, by_cleanup(), "{told:?}");
                assert!(told.line.data["evidence"].is_object() && told.line.data["message"].is_string(), "{told:?}");
            }
            // Whoever wants it has its files.
            place.provider.damage(&kept, None);
            place.engine.ensure(&kept, EntryKind::Ensure, by()).await.unwrap();
            place.engine.wait_ready(&kept, Duration::from_secs(60)).await.unwrap();
            let handle = place.engine.work_in(&Project::default(), &Which::Id(kept.clone()), None).await.unwrap();
            handle.file_stat("/workspace/mine").await.unwrap();
        });
    }
}

fn by_cleanup() -> String {
    viv_core::lifecycle::Actor::part("cleanup").who
}

#[test]
fn j2_what_is_unwell_and_young_is_left_and_shown_and_what_comes_back_is_kept() {
    paused(async {
        let place = place_ticking(250, |config| {
            let cleanup = CleanupConfig { period: Duration::from_secs(30), ..CleanupConfig::default() };
            config.cleanup = Some(cleanup);
        })
        .await;
        let id = place.made(persistent()).await;
        place.provider.damage(&id, Some(Damage::Hangs));
        tokio::time::sleep(Duration::from_secs(300)).await;
        let record = place.record(&id).await;
        assert_eq!((&record.phase, &record.cause.cause), (&Phase::Lost, &Cause::Unresponsive), "{record:?}");
        assert_eq!(place.status(&id).await, Status::Lost);
        assert!(lives(&place, &id).await, "nothing was done to it");
        // Well again, and old by now: it is the same one.
        place.provider.damage(&id, None);
        tokio::time::sleep(Duration::from_secs(900)).await;
        let record = place.record(&id).await;
        assert_eq!((record.phase.name(), record.generation.0), (PhaseName::Ready, 1), "{record:?}");
    });
}

#[test]
fn j1_leases_on_what_is_over_are_found_and_given_back() {
    paused(async {
        let place = place_with(|_| {}).await;
        let living = place.made(request()).await;
        let over = place.made(request()).await;
        place.delete(&over).await;
        let never = SandboxId::from_bytes([9; 16]);
        for (number, sandbox) in [&over, &never].into_iter().enumerate() {
            let token = FencingToken(1_000 + number as u64);
            let (kind, holder) = (LeaseKind::Lifecycle, "a daemon of before".to_owned());
            let lease = Lease { sandbox: sandbox.clone(), kind, holder, since_ms: 1, expires_at_ms: u64::MAX, token };
            place.store.leave_lease(lease);
        }
        let held = place.store.leases(&living).await.unwrap();
        assert!(!held.is_empty());
        let locks = |report: viv_engine::AuditReport| {
            let locks = report.items.into_iter().filter(|item| item.kind == "lock");
            locks.map(|item| (item.sandbox.unwrap(), item.outcome.as_str().to_owned())).collect::<Vec<_>>()
        };
        let mut wanted = [over.clone(), never.clone()];
        wanted.sort();
        let each = |outcome: &str| wanted.clone().map(|id| (id, outcome.to_owned())).to_vec();
        assert_eq!(locks(place.engine.audit(false, by()).await.unwrap()), each("reported"));
        assert_eq!(locks(place.engine.audit(true, by()).await.unwrap()), each("done"));
        assert_eq!(locks(place.engine.audit(false, by()).await.unwrap()), []);
        assert_eq!(place.store.leases(&living).await.unwrap(), held, "nobody else's is touched");
    });
}

#[test]
fn j1_spares_that_nobody_keeps_are_found_and_given_up() {
    paused(async {
        let place = place_with(|config| {
            let class = SpareClass { name: "default".to_owned(), spec: SandboxSpec::default(), min: 2, max: 2 };
            config.spares.classes = vec![class];
        })
        .await;
        let spares = ListQuery {
            project: Some(Project::spares()),
            phases: vec![PhaseName::Ready],
            limit: 10,
            ..ListQuery::default()
        };
        while place.store.list(&spares).await.unwrap().items.len() < 2 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // The next daemon has no classes: what is found before its keeper looks.
        let place = place.restart().await;
        let of_spares = |report: viv_engine::AuditReport| {
            report.items.into_iter().filter(|item| item.kind == "spare").map(|item| item.outcome.as_str().to_owned())
        };
        let found: Vec<String> = of_spares(place.engine.audit(true, by()).await.unwrap()).collect();
        assert_eq!(found, ["done", "done"]);
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(of_spares(place.engine.audit(false, by()).await.unwrap()).count(), 0);
        let there = place.provider.truth().list(&"sim".parse().unwrap(), PageRequest::default()).await.unwrap();
        assert!(there.items.is_empty(), "{there:?}");
    });
}

#[test]
fn j2_everything_is_compared_at_the_start_and_every_hour_and_that_is_shown() {
    paused(async {
        let place = place_ticking(1_000, cleaning).await;
        let full = || place.engine.reconcilers().into_iter().find(|one| one.name == ReconcilerName::Full).unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!((full().runs, full().error), (1, None), "at the start");
        tokio::time::sleep(Duration::from_secs(3_500)).await;
        assert_eq!(full().runs, 1, "and not again before its hour");
        tokio::time::sleep(Duration::from_secs(3_700)).await;
        let status = full();
        assert!((2..=3).contains(&status.runs) && status.error.is_none(), "{status:?}");
        assert!(status.next_at_ms.is_some());
        let lines = place.store.journal(Cursor(0), &JournalFilter::default(), 100_000).await.unwrap();
        assert!(lines.iter().any(|line| line.line.kind == "reconcile.completed"));
    });
}

/// Nobody puts it to rest, and it may live for a day.
fn awake(persistent: bool) -> viv_engine::CreateRequest {
    let policy = request().policy;
    let policy = Policy { persistent, idle_ms: 86_400_000, hibernate_ms: 86_400_000, ..policy };
    viv_engine::CreateRequest { policy, ..request() }
}

#[test]
fn j2_what_is_past_its_age_goes_unless_a_task_is_at_work_in_it() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            let cleanup = CleanupConfig { age_max: Some(Duration::from_secs(3_600)), ..CleanupConfig::default() };
            config.cleanup = Some(cleanup);
        })
        .await;
        let (brief, kept) = (place.made(awake(false)).await, place.made(awake(true)).await);
        let works = place.made(awake(true)).await;
        let sleeps = Program::Sleep { seconds: 3 * 3_600 }.argv();
        let new = NewTask {
            id: place.engine.new_task_id(),
            project: Project::default(),
            sandbox: Some(works.clone()),
            make: None,
            files: Vec::new(),
            source: None,
            steps: vec![ExecSpec { argv: sleeps, ..ExecSpec::default() }],
            limits: TaskLimits { total_ms: None, inactivity_ms: None, ..TaskLimits::default() },
            effects: Vec::new(),
            credentials: std::collections::BTreeMap::new(),
            keep_alive: true,
            by: by(),
            body_hash: None,
        };
        let task = place.engine.create_task(CreateTask { new, keyed: false }).await.unwrap().task;
        tokio::time::sleep(Duration::from_secs(3_500)).await;
        for id in [&brief, &kept, &works] {
            assert_eq!(place.record(id).await.phase, Phase::Ready, "it is young");
        }
        // Old by now, and looked at every quarter of an hour.
        tokio::time::sleep(Duration::from_secs(1_300)).await;
        assert_eq!(place.record(&brief).await.phase.name(), PhaseName::Stopped);
        assert!(matches!(place.record(&kept).await.phase, Phase::Hibernated { .. }), "it is saved");
        let found =
            |lines: &[viv_store::JournalLine]| lines.iter().filter(|line| line.line.kind == "cleanup.item").count();
        assert_eq!((found(&place.lines(&brief).await), found(&place.lines(&kept).await)), (1, 1), "once each");
        assert_eq!(place.record(&works).await.phase, Phase::Ready);
        assert_eq!(found(&place.lines(&works).await), 0, "a task is at work in it, so it is not even found");
        // When that is over, it goes as well.
        place.engine.wait_task(&task.id, 3 * A_DAY, |task| task.state.is_final()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1_300)).await;
        assert!(
            matches!(place.record(&works).await.phase, Phase::Hibernated { .. }),
            "{:?}",
            place.record(&works).await
        );
    });
}

const A_DAY: Duration = Duration::from_secs(86_400);

/// A cleanup that comes to what is past its deadline before anybody else asks the provider, which says that it has ended:
/// it was not idle (found by worlds, seeds 5530 and 7510).
#[test]
fn l5_what_is_past_its_deadline_is_ended_for_that_and_not_called_idle() {
    paused(async {
        let place = place_with(cleaning).await;
        let policy = Policy { lifetime_ms: 120_000, idle_ms: 86_400_000, ..persistent().policy };
        let id = place.made(viv_engine::CreateRequest { policy, ..persistent() }).await;
        let clean = async || place.engine.cleanup(&CleanupOrder::by(&[CleanupKind::Age]), by()).await.unwrap();
        place.provider.set_silent(true);
        // Missed by more than a minute, and nobody has looked whether it is well yet.
        tokio::time::sleep(Duration::from_secs(200)).await;
        let told = clean().await;
        assert!(matches!(told.items[0].outcome, CleanupOutcome::Failed(_)), "nobody answers: {told:?}");
        assert_eq!(place.record(&id).await.phase, Phase::Ready, "silence ends nothing (T7)");
        place.provider.set_silent(false);
        let told = clean().await;
        assert_eq!(told.items[0].outcome, CleanupOutcome::Done, "{told:?}");
        tokio::time::sleep(Duration::from_secs(60)).await;
        let lines = place.lines(&id).await;
        let has = |cause: Cause| lines.iter().any(|line| line.line.cause.as_deref() == Some(cause.code()));
        assert!(has(Cause::Expired) && !has(Cause::Idle), "{lines:?}");
    });
}

#[test]
fn j2_l19_spares_are_not_made_for_an_emergency_to_give_them_up() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            let class = SpareClass { name: "default".to_owned(), spec: SandboxSpec::default(), min: 10, max: 10 };
            (config.spares.classes, config.spares.age_max) = (vec![class], A_DAY);
            (config.cleanup, config.quota) = (Some(CleanupConfig::default()), Quota::of(10, 10));
        })
        .await;
        tokio::time::sleep(A_WHILE).await;
        assert_eq!(place.engine.spares().await.unwrap()[0].ready.len(), 8, "four fifths of ten");
        // Somebody takes some: they are not made again while so much is in use.
        for _ in 0..4 {
            place.made(awake(false)).await;
        }
        tokio::time::sleep(4 * A_WHILE).await;
        assert_eq!(place.engine.spares().await.unwrap()[0].ready.len(), 4);
        let lines = place.store.journal(Cursor(0), &JournalFilter::default(), 100_000).await.unwrap();
        let given_up: Vec<_> = lines.iter().filter(|line| line.line.kind == "spare.given_up").collect();
        assert!(given_up.is_empty(), "{given_up:?}");
    });
}

#[test]
fn j2_what_is_cleaned_up_by_hand_is_journaled_whatever_is_found_and_a_dry_run_too() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            cleaning(config);
            config.quota = Quota::of(100, 2);
        })
        .await;
        let told = async || {
            let lines = place.store.journal(Cursor(0), &JournalFilter::default(), 100_000).await.unwrap();
            let about = lines.into_iter().filter(|line| line.line.kind.starts_with("cleanup."));
            about.map(|line| (line.line.kind["cleanup.".len()..].to_owned(), line.line.data)).collect::<Vec<_>>()
        };
        let kinds =
            |told: &[(String, serde_json::Value)]| told.iter().map(|(kind, _)| kind.clone()).collect::<Vec<_>>();
        tokio::time::sleep(A_WHILE).await;
        assert_eq!(kinds(&told().await), [""; 0], "what runs by itself and finds nothing says nothing");
        let by_hand = CleanupOrder::by(&[CleanupKind::Leftovers, CleanupKind::Emergency]);
        place.engine.cleanup(&by_hand, by()).await.unwrap();
        assert_eq!(kinds(&told().await), ["started", "found", "completed"]);
        assert_eq!((&told().await[1].1["found"], &told().await[1].1["items"]), (&0.into(), &serde_json::json!([])));
        // Its project has no room, and the others have.
        let (first, second) = (place.made(awake(true)).await, place.made(awake(true)).await);
        tokio::time::sleep(Duration::from_secs(120)).await;
        let before = told().await.len();
        let would = place.engine.cleanup(&by_hand.clone().dry(), by()).await.unwrap();
        assert_eq!((would.found(), would.done()), (1, 0), "{would:?}");
        let all = told().await;
        assert_eq!(kinds(&all[before..]), ["started", "found", "item", "completed"]);
        let item = &all[before + 2].1;
        assert_eq!((&item["outcome"], &item["layer"]), (&"planned".into(), &"emergency".into()), "{item}");
        assert!(item["why"].as_str().unwrap().ends_with("2 of 2 sandboxes of its project are in use"), "{item}");
        assert_eq!(all[before].1["dry_run"], true);
        // And it was told before.
        let found = &all[before + 1].1;
        assert_eq!((&found["found"], &found["untold"]), (&1.into(), &0.into()), "{found}");
        let in_advance = &found["items"][0];
        assert_eq!(
            (&in_advance["sandbox"], &in_advance["why"]),
            (&would.items[0].sandbox.as_str().into(), &item["why"]),
            "{found}"
        );
        assert_eq!(
            (&in_advance["layer"], &in_advance["action"]),
            (&"emergency".into(), &"hibernate".into()),
            "{found}"
        );
        for id in [&first, &second] {
            assert_eq!(place.record(id).await.phase, Phase::Ready, "nothing was done");
        }
    });
}

fn emergency() -> CleanupOrder {
    CleanupOrder::by(&[CleanupKind::Emergency])
}

/// A command in the foreground that takes so long.
async fn run(place: &Place, id: &SandboxId, seconds: u64) {
    let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
    let argv = Program::Sleep { seconds }.argv();
    handle.execute(&handle.new_execution(), &ExecSpec { argv, ..ExecSpec::default() }).await.unwrap();
}

/// Incident: the one that was not used for longest was thinking, so it was tried every five minutes and no room was made.
#[test]
fn j2_l7_an_emergency_goes_on_to_who_is_idle_where_older_ones_are_kept_awake_or_at_work() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            cleaning(config);
            config.cleanup = Some(CleanupConfig { period: A_DAY, ..CleanupConfig::default() });
            // Four fifths of three are less than three, so one has to go.
            config.quota = Quota::of(3, 100);
        })
        .await;
        let mut all = Vec::new();
        for _ in 0..3 {
            all.push(place.made(awake(true)).await);
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
        let [thinks, works, idle] = <[SandboxId; 3]>::try_from(all).unwrap();
        run(&place, &works, 86_400).await;
        // As if both had been so for long: they were used before the third.
        place.engine.keep_awake(&thinks, "lease", 3_600_000, "thinking", by()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(300)).await;
        run(&place, &idle, 1).await;
        tokio::time::sleep(Duration::from_secs(300)).await;
        let order = async |all: &[&SandboxId]| {
            let mut times = Vec::new();
            for id in all {
                times.push(place.record(id).await.active_at_ms);
            }
            assert!(times.is_sorted(), "{times:?}");
        };
        order(&[&works, &idle]).await;
        order(&[&thinks, &idle]).await;

        let outcomes = |report: viv_engine::cleanup::CleanupReport| {
            report.items.into_iter().map(|item| (item.sandbox, item.outcome)).collect::<Vec<_>>()
        };
        let would = place.engine.cleanup(&emergency().dry(), by()).await.unwrap();
        let wanted = |last| vec![(works.clone(), CleanupOutcome::InUse), (idle.clone(), last)];
        assert_eq!(outcomes(would), wanted(CleanupOutcome::Planned), "it is told as it will be");
        for id in [&thinks, &works, &idle] {
            assert_eq!(place.record(id).await.phase, Phase::Ready, "nothing was done");
        }
        let did = place.engine.cleanup(&emergency(), by()).await.unwrap();
        assert_eq!(outcomes(did), wanted(CleanupOutcome::Done));
        place.engine.wait_settled(&idle, LONG).await.unwrap();
        assert_eq!(place.status(&idle).await, Status::Hibernated);
        for id in [&thinks, &works] {
            assert_eq!(place.record(id).await.phase, Phase::Ready);
        }
        let done = place.engine.cleanup(&emergency(), by()).await.unwrap();
        assert_eq!(done.found(), 0, "there is room: {done:?}");
    });
}

#[test]
fn j2_an_emergency_goes_on_to_the_next_where_one_cannot_be_asked() {
    paused(async {
        let orders = Arc::new(Orders::new(Duration::from_millis(500), || {}));
        let place = place_ordered(1_000, &orders, |config| {
            config.cleanup = Some(CleanupConfig { period: A_DAY, ..CleanupConfig::default() });
            config.quota = Quota::of(2, 100);
        })
        .await;
        let silent = place.made(awake(true)).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        let idle = place.made(awake(true)).await;
        tokio::time::sleep(Duration::from_secs(300)).await;
        // Who is asked first does not say what runs in it.
        orders.give(Order { call: "executions".to_owned(), turn: Turn::Trouble(Trouble::Unavailable), times: 1 });
        let did = place.engine.cleanup(&emergency(), by()).await.unwrap();
        assert_eq!((did.found(), did.done(), did.failed()), (2, 1, 1), "{did:?}");
        assert_eq!((&did.items[0].sandbox, &did.items[1].sandbox), (&silent, &idle));
        place.engine.wait_settled(&idle, LONG).await.unwrap();
        assert_eq!(place.status(&idle).await, Status::Hibernated);
        assert!(lives(&place, &silent).await, "without an answer nothing is done to it (T7)");
        let lines = place.store.journal(Cursor(0), &JournalFilter::default(), 100_000).await.unwrap();
        let last = lines.iter().rfind(|line| line.line.kind == "cleanup.completed").unwrap();
        assert_eq!((&last.line.data["found"], &last.line.data["failed"]), (&2.into(), &1.into()), "{last:?}");
    });
}

#[test]
fn j2_an_age_that_is_named_by_hand_is_for_that_cleanup_alone() {
    paused(async {
        let place = place_ticking(1_000, cleaning).await;
        let (old, kept) = (place.made(awake(false)).await, place.made(awake(true)).await);
        let works = place.made(awake(false)).await;
        run(&place, &works, 86_400).await;
        tokio::time::sleep(Duration::from_secs(660)).await;
        let young = place.made(awake(false)).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        let age = CleanupOrder { age_max: Some(Duration::from_secs(600)), ..CleanupOrder::by(&[CleanupKind::Age]) };
        let did = place.engine.cleanup(&age, by()).await.unwrap();
        let found: std::collections::BTreeMap<_, _> =
            did.items.iter().map(|item| (item.sandbox.clone(), item.outcome.clone())).collect();
        let wanted = [(&old, CleanupOutcome::Done), (&kept, CleanupOutcome::Done), (&works, CleanupOutcome::InUse)];
        assert_eq!(found, wanted.map(|(id, outcome)| (id.clone(), outcome)).into());
        place.engine.wait_settled(&old, LONG).await.unwrap();
        place.engine.wait_settled(&kept, LONG).await.unwrap();
        assert_eq!((place.status(&old).await, place.status(&kept).await), (Status::Stopped, Status::Hibernated));
        assert_eq!(place.record(&young).await.phase, Phase::Ready);
        // By itself nothing is too old here.
        tokio::time::sleep(2 * A_WHILE).await;
        assert_eq!(place.record(&young).await.phase, Phase::Ready);
    });
}

/// What each may have, and how many there may be of that size.
const EACH_BYTES: u64 = 64 << 20;
const KEPT: u64 = 20;

/// Memory is all that is short, and an emergency goes on until a quarter of it is in use.
fn pressed(config: &mut EngineConfig) {
    let memory = SumsMax { memory_bytes: Some(KEPT * EACH_BYTES), ..SumsMax::default() };
    config.quota = Quota { total_sums_max: memory, ..Quota::of(1_000, 1_000) };
    config.cleanup = Some(CleanupConfig {
        // By hand, so that it is known when.
        period: A_DAY,
        full_period: A_DAY,
        emergency_above: 0.25,
        emergency_idle: Duration::ZERO,
        ..CleanupConfig::default()
    });
}

/// A file of a size of its own: what is another one's, or older, is of another.
async fn write(place: &Place, id: &SandboxId, bytes: usize) {
    let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
    let file = FileWrite { path: "/workspace/mine".to_owned(), ..FileWrite::default() };
    let words: &'static [u8] = vec![b'x'; bytes].leak();
    handle.file_write(&file, Box::new(words)).await.unwrap();
}

async fn phases(place: &Place, all: &[SandboxId], phase: PhaseName) -> usize {
    let mut count = 0;
    for id in all {
        count += usize::from(place.record(id).await.phase.name() == phase);
    }
    count
}

#[test]
fn j2_l10_an_emergency_in_which_saves_fail_and_the_daemon_dies_loses_no_persistent_file() {
    paused(async {
        // A write takes so long when that is ordered.
        let orders = Arc::new(Orders::new(Duration::from_millis(500), || {}));
        let place = place_ordered(50, &orders, pressed).await;
        let mut all = Vec::new();
        for number in 0..KEPT {
            let limits = ResourceLimits { memory_bytes: Some(EACH_BYTES), ..ResourceLimits::default() };
            let spec = SandboxSpec { limits, ..SandboxSpec::default() };
            let id = place.made(viv_engine::CreateRequest { spec, ..awake(true) }).await;
            write(&place, &id, 100 + number as usize).await;
            all.push(id);
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
        let would = place.engine.cleanup(&emergency().dry(), by()).await.unwrap();
        assert_eq!((would.found(), would.done()), (15, 0), "until a quarter is in use: {would:?}");
        let why = format!("{} of {} memory_bytes are in use", KEPT * EACH_BYTES, KEPT * EACH_BYTES);
        assert!(would.items[0].why.ends_with(&why), "{:?}", would.items[0]);
        assert_eq!(phases(&place, &all, PhaseName::Ready).await, all.len(), "nothing was done");

        // None can be saved, and in the middle of it the daemon dies.
        for (call, trouble) in [("save", Trouble::Unavailable), ("commit", Trouble::SlowStore)] {
            orders.give(Order { call: call.to_owned(), turn: Turn::Trouble(trouble), times: u32::MAX });
        }
        let engine = place.engine.clone();
        let cleaning = tokio::spawn(async move { engine.cleanup(&emergency(), by()).await.is_ok() });
        while phases(&place, &all, PhaseName::Hibernating).await < 5 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let place = place.restart_with(pressed).await;
        let _ = cleaning.await;
        let began = phases(&place, &all, PhaseName::Hibernating).await;
        assert!((5..15).contains(&began), "it was in the middle of it: {began}");
        tokio::time::sleep(Duration::from_secs(60)).await;
        let mut failed = 0;
        for id in &all {
            failed += usize::from(place.status(id).await == Status::SaveFailed);
            assert!(!place.record(id).await.is_over(), "nothing is given up for room");
        }
        assert_eq!(failed, began, "they wait with their files kept (L10)");

        // Saves go well again: what waits is saved by itself, and the rest is done again. Who asks more often than saves
        // take has no more ended than there has to be.
        orders.forget();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(phases(&place, &all, PhaseName::Hibernated).await, began);
        for _ in 0..3 {
            place.engine.cleanup(&emergency(), by()).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(phases(&place, &all, PhaseName::Hibernated).await, 15);
        assert_eq!(phases(&place, &all, PhaseName::Ready).await, 5);
        for (number, id) in all.iter().enumerate() {
            place.engine.ensure(id, EntryKind::Ensure, by()).await.unwrap();
            place.engine.wait_ready(id, Duration::from_secs(60)).await.unwrap();
            let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
            let seen = handle.file_stat("/workspace/mine").await.unwrap();
            assert_eq!(seen.size_bytes, 100 + number as u64, "the file of {id}");
        }
    });
}
