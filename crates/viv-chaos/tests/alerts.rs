//! Alerts that fire by what really happens, on simulated time: nobody sets a figure by hand (O5, J3).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use place::{Place, by, paused, persistent, place_ordered, place_ticking, request};
use viv_chaos::{Damage, Order, Orders, Trouble, Turn};
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::lifecycle::{EntryKind, PhaseName, Status};
use viv_core::spec::{Image, Network, Policy, Project, SandboxSpec};
use viv_core::subscription::Patience;
use viv_core::task::{MakeSandbox, NewTask, TaskLimits, TaskState};
use viv_core::{EndCause, FencingToken, Generation, OperationId, SandboxId};
use viv_engine::cleanup::{CleanupKind, CleanupOrder};
use viv_engine::{
    AlertConfig, AlertState, CleanupConfig, CreateRequest, CreateTask, Delivery, EngineConfig, EventBody,
    NewSubscription, ReconcilerName, SpareClass, SubscriptionConfig, Webhooks, Which,
};
use viv_provider::conformance::program::Program;
use viv_provider::{InstanceSpec, Mutation, Provider, Recall, ResourceLimits};
use viv_store::{Cursor, JournalFilter, ListQuery, Store};

/// Longer than a window, what is waited for in it, and what resolves.
const LATER: Duration = Duration::from_secs(1_800);

/// What ships.
fn judged(config: &mut EngineConfig) {
    (config.alerts, config.cleanup) = (Some(AlertConfig::default()), Some(CleanupConfig::default()));
}

/// Everything of these calls goes wrong so, until that is taken back.
fn order(orders: &Orders, call: &str, trouble: Trouble) {
    orders.give(Order { call: call.to_owned(), turn: Turn::Trouble(trouble), times: u32::MAX });
}

fn orders() -> Arc<Orders> {
    Arc::new(Orders::new(Duration::from_secs(86_400), || {}))
}

impl Place {
    fn fires(&self, name: &str) -> bool {
        let all = self.engine.alerts();
        let alert = all.iter().find(|alert| alert.rule.name == name).expect("it is judged");
        matches!(alert.state, AlertState::Firing { .. })
    }

    /// Waits until it fires, or does not.
    async fn until_fires(&self, name: &str, fires: bool, within: Duration) {
        for _ in 0..within.as_secs() {
            if self.fires(name) == fires {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!("{name} does not become so in {within:?}: {:#?}", self.engine.alerts());
    }

    /// What the journal says of it.
    async fn told_of(&self, name: &str) -> Vec<String> {
        let lines = self.store.journal(Cursor(0), &JournalFilter::default(), 100_000).await.unwrap();
        lines.into_iter().filter(|line| line.line.data["alert"] == name).map(|line| line.line.kind).collect()
    }
}

/// Nobody puts it to rest.
fn awake() -> CreateRequest {
    let policy = Policy { idle_ms: 86_400_000, hibernate_ms: 86_400_000, ..request().policy };
    CreateRequest { policy, ..request() }
}

#[test]
fn j3_a_reconciler_that_hangs_in_its_first_run_is_overdue_and_an_alert() {
    paused(async {
        let orders = orders();
        order(&orders, "retain", Trouble::SlowStore);
        let place = place_ordered(1_000, &orders, judged).await;
        let status =
            || place.engine.reconcilers().into_iter().find(|one| one.name == ReconcilerName::Retention).unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
        let period_ms = place.engine.config().periods.retention.as_millis() as u64;
        assert_eq!((status().runs, status().period_ms), (0, Some(period_ms)), "it is known before it ran");
        assert!(!status().is_overdue(place.engine.now_ms()));
        place.until_fires("cleanup_failing", true, Duration::from_millis(4 * period_ms)).await;
        assert!(status().is_overdue(place.engine.now_ms()) && status().runs == 0, "{:?}", status());
        assert_eq!(place.engine.reconcilers().iter().filter(|one| one.is_bad(place.engine.now_ms())).count(), 1);
    });
}

/// Cause 3 of the runbook, as it is named: nobody cleans up, nothing fails, and nothing says so but that it is late.
#[test]
fn j3_incident_39_a_cleanup_that_hangs_is_overdue_and_an_alert_and_is_done_by_hand() {
    paused(async {
        let orders = orders();
        let place = place_ordered(1_000, &orders, |config| {
            judged(config);
            // Nothing but a cleanup writes in this time.
            config.cleanup =
                Some(CleanupConfig { leftover_after: Duration::from_secs(90), ..CleanupConfig::default() });
        })
        .await;
        let status = || place.engine.reconcilers().into_iter().find(|one| one.name == ReconcilerName::Cleanup).unwrap();
        let (first, second) = (place.made(awake()).await, place.made(awake()).await);
        for id in [&first, &second] {
            assert!(place.provider.truth().crash(id, EndCause::Exited { code: 1 }));
            place.engine.verify(id).await.unwrap();
            assert_eq!(place.status(id).await, Status::Lost);
        }
        // The write with which it ends the first of them is never answered.
        orders.give(Order { call: "commit".to_owned(), turn: Turn::Trouble(Trouble::SlowStore), times: 1 });
        place.until_fires("cleanup_failing", true, LATER).await;
        assert_eq!(orders.carried_out(), 1, "that is why");
        let now_ms = place.engine.now_ms();
        assert!(status().is_overdue(now_ms) && status().error.is_none(), "{:?}", status());
        let bad = place.engine.reconcilers().into_iter().filter(|one| one.is_bad(now_ms)).map(|one| one.name);
        assert_eq!(bad.collect::<Vec<_>>(), [ReconcilerName::Cleanup], "and no other one");
        for id in [&first, &second] {
            assert_eq!(place.status(id).await, Status::Lost, "nobody cleans up");
        }
        // The remedy of the runbook, which does not wait for who hangs.
        let by_hand = CleanupOrder::by(&[CleanupKind::Leftovers]);
        let by_hand = place.engine.cleanup(&by_hand, by());
        let did = tokio::time::timeout(Duration::from_secs(60), by_hand).await.expect("it ends").unwrap();
        assert_eq!((did.found(), did.done()), (2, 2), "{did:?}");
        for id in [&first, &second] {
            place.engine.wait_settled(id, LATER).await.unwrap();
            assert_eq!(place.status(id).await, Status::Stopped);
        }
        // The next daemon begins it anew.
        let place = place.restart_with(judged).await;
        place.until_fires("cleanup_failing", false, LATER).await;
        tokio::time::sleep(LATER).await;
        let cleanup = place.engine.reconcilers().into_iter().find(|one| one.name == ReconcilerName::Cleanup).unwrap();
        assert!(cleanup.runs > 0 && !place.fires("cleanup_failing"), "{cleanup:?}");
    });
}

#[test]
fn j7_a_provider_that_answers_no_audit_fails_it_in_time_and_is_an_alert() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            judged(config);
            config.cleanup = Some(CleanupConfig { full_period: Duration::from_secs(300), ..CleanupConfig::default() });
        })
        .await;
        let full = || place.engine.reconcilers().into_iter().find(|one| one.name == ReconcilerName::Full).unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!((full().runs, full().error), (1, None));
        place.provider.set_audits_hang(true);
        place.until_fires("cleanup_failing", true, LATER).await;
        let error = full().error.expect("it says why");
        assert!(error.contains("an audit"), "{error}");
        place.provider.set_audits_hang(false);
        place.until_fires("cleanup_failing", false, LATER).await;
        assert_eq!(place.told_of("cleanup_failing").await, ["alert.firing", "alert.resolved"]);
    });
}

#[test]
fn o5_sandboxes_that_run_into_their_deadline_are_an_alert() {
    paused(async {
        let place = place_ticking(250, judged).await;
        for lifetime_ms in [60_000, 90_000, 3_600_000] {
            place.ready(lifetime_ms).await;
        }
        place.until_fires("sandbox_timeout_high", true, LATER).await;
        // What was long ago does not count.
        place.until_fires("sandbox_timeout_high", false, LATER).await;
        assert_eq!(place.told_of("sandbox_timeout_high").await, ["alert.firing", "alert.resolved"]);
    });
}

#[test]
fn o5_commands_that_take_too_long_are_an_alert() {
    paused(async {
        let place = place_ticking(250, judged).await;
        let id = place.made(awake()).await;
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id), None).await.unwrap();
        let run = async |seconds: u64, limit_ms: u64| {
            let argv = Program::Sleep { seconds }.argv();
            let spec = ExecSpec { argv, limit_ms: Some(limit_ms), ..ExecSpec::default() };
            let execution = handle.new_execution();
            handle.execute(&execution, &spec).await.unwrap();
            tokio::time::sleep(Duration::from_secs(2)).await;
            // Whoever looks hears of its end.
            let status = handle.execution(&execution).await.unwrap();
            assert_ne!(status.state, ExecState::Running, "{status:?}");
        };
        for _ in 0..30 {
            run(1, 60_000).await;
        }
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert!(!place.fires("executions_timeout_high"), "all of them ended in time");
        for _ in 0..2 {
            run(1_000, 1_000).await;
        }
        place.until_fires("executions_timeout_high", true, LATER).await;
        place.until_fires("executions_timeout_high", false, LATER).await;
        assert_eq!(place.told_of("executions_timeout_high").await, ["alert.firing", "alert.resolved"]);
    });
}

#[test]
fn o5_more_active_ones_than_there_should_be_are_an_alert_and_far_too_many_an_escalation() {
    paused(async {
        let place = place_ticking(1_000, judged).await;
        let mut made = Vec::new();
        for _ in 0..21 {
            made.push(place.made(awake()).await);
        }
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert!(!place.fires("sandbox_leak_detected"), "not before it lasts");
        place.until_fires("sandbox_leak_detected", true, LATER).await;
        for _ in 21..51 {
            made.push(place.made(awake()).await);
        }
        tokio::time::sleep(Duration::from_secs(900)).await;
        assert!(!place.fires("active_escalation"), "not before half an hour");
        place.until_fires("active_escalation", true, LATER).await;
        for id in made {
            place.delete(&id).await;
        }
        for name in ["sandbox_leak_detected", "active_escalation"] {
            place.until_fires(name, false, LATER).await;
        }
    });
}

#[test]
fn o5_spares_are_no_leak() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            judged(config);
            let class = SpareClass { name: "default".to_owned(), spec: SandboxSpec::default(), min: 25, max: 25 };
            config.spares.classes = vec![class];
        })
        .await;
        tokio::time::sleep(LATER).await;
        assert_eq!(place.engine.spares().await.unwrap()[0].ready.len(), 25);
        assert!(!place.fires("sandbox_leak_detected"), "{:#?}", place.engine.alerts());
    });
}

#[test]
fn o5_l8_what_cannot_be_ended_is_an_alert_until_it_is() {
    paused(async {
        let orders = orders();
        let place = place_ordered(250, &orders, judged).await;
        let id = place.made(request()).await;
        order(&orders, "destroy", Trouble::Unavailable);
        place.engine.stop(&id, by()).await.unwrap();
        place.until_fires("kill_failed", true, LATER).await;
        place.until_fires("stop_failures_high", true, LATER).await;
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Stopping, "it stays so (L8)");
        assert_eq!(named(&place, "kill_failed"), std::slice::from_ref(&id), "it is said whom to look at");
        let diagnosis = place.engine.diagnose(&Project::default(), &Which::Id(id.clone())).await.unwrap();
        assert!(diagnosis.remarks.iter().any(|remark| remark.code == "kill_failed"), "{:?}", diagnosis.remarks);
        orders.forget();
        place.engine.wait_settled(&id, LATER).await.unwrap();
        assert_eq!(place.status(&id).await, Status::Stopped);
        for name in ["kill_failed", "stop_failures_high"] {
            place.until_fires(name, false, LATER).await;
        }
    });
}

#[test]
fn o5_l10_saves_that_fail_are_failed_stops() {
    paused(async {
        let orders = orders();
        let place = place_ordered(250, &orders, judged).await;
        let id = place.made(persistent()).await;
        order(&orders, "save", Trouble::Unavailable);
        place.engine.hibernate(&id, by()).await.unwrap();
        place.until_fires("save_failed", true, LATER).await;
        place.until_fires("stop_failures_high", true, LATER).await;
        assert_eq!(named(&place, "save_failed"), std::slice::from_ref(&id), "it is said whom to look at");
        orders.forget();
        place.engine.retry_save(&id, by()).await.unwrap();
        place.engine.wait_settled(&id, LATER).await.unwrap();
        assert_eq!(place.status(&id).await, Status::Hibernated);
        for name in ["save_failed", "stop_failures_high"] {
            place.until_fires(name, false, LATER).await;
        }
    });
}

/// A task in a sandbox of its own, of one command that says nothing for so long.
fn silent_task(place: &Place, seconds: u64, limits: TaskLimits) -> NewTask {
    let make = MakeSandbox {
        name: None,
        spec: SandboxSpec::default(),
        policy: request().policy,
        labels: BTreeMap::new(),
        snapshot: None,
    };
    NewTask {
        id: place.engine.new_task_id(),
        project: Project::default(),
        sandbox: None,
        make: Some(Box::new(make)),
        files: Vec::new(),
        source: None,
        steps: vec![ExecSpec { argv: Program::Sleep { seconds }.argv(), ..ExecSpec::default() }],
        limits,
        effects: Vec::new(),
        credentials: BTreeMap::new(),
        keep_alive: false,
        by: by(),
        body_hash: None,
    }
}

/// Those that end so are an alert for a while.
async fn assert_tasks_fire(place: &Place, new: NewTask, ends: TaskState, name: &str) {
    let task = place.engine.create_task(CreateTask { new, keyed: false }).await.unwrap().task;
    let over = place.engine.wait_task(&task.id, LATER, |task| task.state.is_final()).await.unwrap();
    assert_eq!(over.state, ends);
    place.until_fires(name, true, LATER).await;
    place.until_fires(name, false, LATER).await;
}

#[test]
fn o5_tasks_that_say_nothing_are_an_alert() {
    paused(async {
        let place = place_ticking(250, judged).await;
        let new = silent_task(&place, 1_000, TaskLimits::default());
        assert_tasks_fire(&place, new, TaskState::Inactive, "inactivity_high").await;
        assert_eq!(place.told_of("tasks_timeout_high").await, [""; 0]);
    });
}

#[test]
fn o5_tasks_that_take_too_long_are_an_alert() {
    paused(async {
        let place = place_ticking(250, judged).await;
        let limits = TaskLimits { total_ms: Some(20_000), ..TaskLimits::default() };
        let new = silent_task(&place, 1_000, limits);
        assert_tasks_fire(&place, new, TaskState::TimedOut, "tasks_timeout_high").await;
        assert_eq!(place.told_of("inactivity_high").await, [""; 0]);
    });
}

#[test]
fn o5_j1_instances_that_no_record_wants_are_an_alert() {
    paused(async {
        let place = place_ticking(250, judged).await;
        let mutation = Mutation {
            operation: OperationId::from_bytes([9; 16]),
            generation: Generation::FIRST,
            token: FencingToken(0),
            budget_ms: 10_000,
        };
        let spec = InstanceSpec {
            image: Image::default(),
            limits: ResourceLimits::default(),
            network: Network::default(),
            env: BTreeMap::new(),
            workdir: "/workspace".to_owned(),
            packages: false,
            labels: BTreeMap::new(),
            lifetime_ms: 86_400_000,
            recall: Recall::Never,
        };
        let (owner, stray) = (place.engine.config().owner.clone(), SandboxId::from_bytes([9; 16]));
        place.provider.truth().create(&mutation, &stray, &owner, &spec).await.unwrap();
        place.until_fires("orphans_found", true, LATER).await;
        place.until_fires("orphans_found", false, LATER).await;
        let lines = place.lines(&stray).await;
        assert!(lines.iter().any(|line| line.line.kind == "orphan.collected"), "{lines:?}");
    });
}

#[test]
fn o5_creates_that_fail_are_an_alert() {
    paused(async {
        let orders = orders();
        let place = place_ordered(250, &orders, judged).await;
        order(&orders, "create", Trouble::Unavailable);
        let id = place.engine.create(request()).await.unwrap().view.sandbox.id;
        place.engine.wait_settled(&id, LATER).await.unwrap();
        assert_eq!(place.status(&id).await, Status::Failed);
        place.until_fires("provisioning_failing", true, LATER).await;
        orders.forget();
        place.until_fires("provisioning_failing", false, LATER).await;
    });
}

/// The names of its sandboxes, as somebody is told them.
fn named(place: &Place, name: &str) -> Vec<SandboxId> {
    place.engine.alerts().into_iter().find(|alert| alert.rule.name == name).unwrap().sandboxes
}

#[test]
fn o5_a_provider_whose_creates_hang_is_an_alert_that_names_who_did_not_come_up() {
    paused(async {
        let orders = orders();
        let place = place_ordered(250, &orders, judged).await;
        order(&orders, "create", Trouble::Lost);
        let mut hung = Vec::new();
        for _ in 0..2 {
            hung.push(place.engine.create(request()).await.unwrap().view.sandbox.id);
        }
        hung.sort();
        place.until_fires("sandbox_stuck", true, LATER).await;
        place.until_fires("provisioning_failing", true, LATER).await;
        let mut told = named(&place, "sandbox_stuck");
        told.sort();
        assert_eq!(told, hung, "it is said whom to look at");
        // What the alerts begin with shows them: the diagnosis of each, and a list of those that failed.
        let helps = |name: &str| viv_engine::alert::RULES.iter().find(|rule| rule.name == name).unwrap().helps;
        let begin_with = (helps("sandbox_stuck"), helps("provisioning_failing"));
        assert_eq!(begin_with, ("viv doctor SANDBOX", "viv ps --status failed"));
        let query = ListQuery { phases: vec![PhaseName::Failed], limit: 10, ..ListQuery::default() };
        assert_eq!(place.engine.list(&query).await.unwrap().0.len(), hung.len());
        orders.forget();
        for id in &hung {
            let diagnosis = place.engine.diagnose(&Project::default(), &Which::Id(id.clone())).await.unwrap();
            let failed = diagnosis.remarks.into_iter().find(|remark| remark.code == "failed").expect("it says why");
            assert!(failed.what.contains("deadline_passed"), "{failed:?}");
            // And does what that proposes, now that they are made again.
            assert_eq!(failed.helps, format!("viv ensure {id}"));
            place.engine.ensure(id, EntryKind::Ensure, by()).await.unwrap();
            place.engine.wait_ready(id, LATER).await.unwrap();
        }
        // At once, and not when what was given up is long ago.
        place.until_fires("sandbox_stuck", false, Duration::from_secs(120)).await;
        assert_eq!(place.told_of("sandbox_stuck").await, ["alert.firing", "alert.resolved"]);
        place.until_fires("provisioning_failing", false, LATER).await;
    });
}

/// Neither its daemon nor anybody else comes for it: that is told for a while, and not for ever.
#[test]
fn o5_what_did_not_answer_in_its_time_is_an_alert_for_a_while() {
    paused(async {
        let place = place_ticking(250, |config| {
            judged(config);
            config.cleanup = None;
        })
        .await;
        let id = place.made(awake()).await;
        place.provider.damage(&id, Some(Damage::Hangs));
        place.engine.verify(&id).await.unwrap();
        place.until_fires("sandbox_stuck", true, LATER).await;
        assert_eq!(named(&place, "sandbox_stuck"), std::slice::from_ref(&id));
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Lost);
        place.until_fires("sandbox_stuck", false, LATER).await;
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Lost, "it is as it was");
        assert_eq!(place.told_of("sandbox_stuck").await, ["alert.firing", "alert.resolved"]);
    });
}

#[test]
fn o5_j7_a_provider_that_does_not_answer_is_an_alert() {
    paused(async {
        let place = place_ticking(250, judged).await;
        for _ in 0..4 {
            place.made(awake()).await;
        }
        place.provider.set_silent(true);
        for _ in 0..4 {
            place.engine.create(awake()).await.unwrap();
        }
        place.until_fires("breaker_open", true, LATER).await;
        place.provider.set_silent(false);
        place.until_fires("breaker_open", false, LATER).await;
    });
}

#[test]
fn o5_o6_who_subscribed_is_told_that_an_alert_fires_and_that_it_is_over() {
    paused(async {
        let got: Arc<Mutex<Vec<serde_json::Value>>> = Arc::default();
        let taken = got.clone();
        let send = Webhooks(Arc::new(move |delivery: Delivery| {
            taken.lock().unwrap().push(serde_json::from_slice(&delivery.body).unwrap());
            Box::pin(async { Ok(()) })
        }));
        let place = place_ticking(250, |config| {
            judged(config);
            let body: EventBody = Arc::new(|_, _, line| {
                serde_json::json!({ "kind": line.line.kind, "data": line.line.data }).to_string().into_bytes()
            });
            let (patience, within) = (Patience::default(), Duration::from_secs(10));
            config.subscriptions = Some(SubscriptionConfig { send, body, patience, within });
        })
        .await;
        let new = NewSubscription {
            project: None,
            url: "https://pager.example/alerts".to_owned(),
            note: None,
            kinds: vec!["alert.firing".to_owned(), "alert.resolved".to_owned()],
            sandbox: None,
            labels: BTreeMap::new(),
            after: None,
        };
        place.engine.create_subscription(new, by()).await.unwrap();
        place.ready(60_000).await;
        place.until_fires("sandbox_timeout_high", true, LATER).await;
        place.until_fires("sandbox_timeout_high", false, LATER).await;
        tokio::time::sleep(Duration::from_secs(30)).await;
        let got = got.lock().unwrap().clone();
        let kinds: Vec<&str> = got.iter().map(|event| event["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["alert.firing", "alert.resolved"], "{got:#?}");
        assert_eq!(got[0]["data"]["alert"], "sandbox_timeout_high");
        assert!(got[0]["data"]["helps"].as_str().is_some_and(|helps| helps.starts_with("viv ")), "{got:#?}");
    });
}

/// A daemon that ends while an alert fires leaves nobody with a page that is never taken back.
#[test]
fn o5_an_alert_that_fired_before_a_restart_is_resolved_by_the_next_daemon_or_goes_on_untold() {
    paused(async {
        let with_room_for = |max| {
            move |config: &mut EngineConfig| {
                judged(config);
                // Nobody makes room.
                config.cleanup = None;
                config.quota = viv_store::Quota::of(max, 1_000);
            }
        };
        let name = "quota_exhausted";
        let place = place_ticking(1_000, with_room_for(1)).await;
        place.made(awake()).await;
        place.until_fires(name, true, Duration::from_secs(60)).await;
        let since_ms = |place: &Place| {
            let all = place.engine.alerts();
            all.iter().find(|alert| alert.rule.name == name).and_then(|alert| alert.state.since_ms())
        };
        let first_ms = since_ms(&place);
        tokio::time::sleep(LATER).await;

        // It still holds: it goes on, and nobody is told twice.
        let place = place.restart_with(with_room_for(1)).await;
        assert!(place.fires(name), "it is known before the first look");
        tokio::time::sleep(LATER).await;
        assert!(place.fires(name));
        assert_eq!(since_ms(&place), first_ms, "since it began, not since the daemon did");
        assert_eq!(place.told_of(name).await, ["alert.firing"]);

        // What made it fire has gone while no daemon looked.
        let place = place.restart_with(with_room_for(10)).await;
        assert!(place.fires(name), "not before it is sure");
        place.until_fires(name, false, LATER).await;
        assert_eq!(place.told_of(name).await, ["alert.firing", "alert.resolved"]);
        // And the one after that knows it.
        let place = place.restart_with(with_room_for(10)).await;
        tokio::time::sleep(LATER).await;
        assert!(!place.fires(name));
        assert_eq!(place.told_of(name).await, ["alert.firing", "alert.resolved"]);
    });
}

#[test]
fn o5_an_alert_that_fired_and_is_not_judged_any_more_is_resolved() {
    paused(async {
        let name = "quota_exhausted";
        let full = |config: &mut EngineConfig| {
            judged(config);
            config.quota = viv_store::Quota::of(1, 1_000);
        };
        let place = place_ticking(1_000, full).await;
        place.made(awake()).await;
        place.until_fires(name, true, Duration::from_secs(60)).await;
        let place = place
            .restart_with(|config| {
                full(config);
                let rule = viv_engine::alert::RULES.iter().find(|rule| rule.name == name).unwrap();
                let off = viv_engine::alert::RuleSetting { enabled: false, ..rule.default_setting() };
                config.alerts.as_mut().unwrap().rules.insert(name.to_owned(), off);
            })
            .await;
        tokio::time::sleep(LATER).await;
        assert!(place.engine.alerts().iter().all(|alert| alert.rule.name != name), "it is not judged");
        assert_eq!(place.told_of(name).await, ["alert.firing", "alert.resolved"]);
    });
}

/// Where the line could not be written, nobody was told, and the next look does it; where only the answer was lost, it is
/// not done again.
#[test]
fn o5_an_alert_that_could_not_be_written_down_is_told_at_the_next_look() {
    paused(async {
        let orders = orders();
        let place = place_ordered(1_000, &orders, |config| {
            judged(config);
            config.quota = viv_store::Quota::of(1, 1_000);
        })
        .await;
        for trouble in [Trouble::StoreBefore, Trouble::StoreAfter] {
            orders.give(Order { call: "put_meta".to_owned(), turn: Turn::Trouble(trouble), times: 1 });
        }
        place.made(awake()).await;
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert_eq!(orders.carried_out(), 2);
        assert!(place.fires("quota_exhausted"));
        assert_eq!(place.told_of("quota_exhausted").await, ["alert.firing"], "once");
    });
}

#[test]
fn o5_l18_a_quota_that_is_used_up_is_named_with_what_there_is_and_whose_it_is() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            judged(config);
            config.quota = viv_store::Quota::of(4, 3);
        })
        .await;
        let said = async |place: &Place, kind: &str| {
            let lines = place.store.journal(Cursor(0), &JournalFilter::default(), 100_000).await.unwrap();
            let told =
                lines.into_iter().rfind(|line| line.line.kind == kind && line.line.data["alert"] == "quota_exhausted");
            let data = told.expect("it was told").line.data;
            (data["message"].as_str().unwrap().to_owned(), data["most"].clone())
        };
        let other: Project = "other".parse().unwrap();
        let mut made = Vec::new();
        for _ in 0..3 {
            made.push(place.made(CreateRequest { project: other.clone(), ..awake() }).await);
        }
        place.until_fires("quota_exhausted", true, Duration::from_secs(60)).await;
        let of_project = "sandboxes 3 of 3 of the project other";
        let message = format!("a quota is used up: {of_project}, 100.0 %, more than 99.9 %");
        assert_eq!(said(&place, "alert.firing").await, (message, of_project.into()));
        // All together are the tighter one, if there are as many of them as there may be.
        place.delete(&made[0]).await;
        place.until_fires("quota_exhausted", false, LATER).await;
        for _ in 0..2 {
            made.push(place.made(awake()).await);
        }
        place.until_fires("quota_exhausted", true, Duration::from_secs(60)).await;
        assert_eq!(said(&place, "alert.firing").await.1, "sandboxes 4 of 4");
        let alerts = place.engine.alerts();
        let words = alerts.iter().find(|alert| alert.rule.name == "quota_exhausted").unwrap().words();
        assert!(words.starts_with("a quota is used up: sandboxes 4 of 4, 100.0 %"), "{words}");
    });
}

#[test]
fn o5_l18_a_project_that_has_used_up_what_it_may_have_is_an_alert() {
    paused(async {
        let place = place_ticking(1_000, |config| {
            judged(config);
            config.quota = viv_store::Quota::of(1_000, 2);
        })
        .await;
        place.made(awake()).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!place.fires("quota_exhausted"));
        let second = place.made(awake()).await;
        place.until_fires("quota_exhausted", true, Duration::from_secs(60)).await;
        place.delete(&second).await;
        place.until_fires("quota_exhausted", false, LATER).await;
    });
}
