//! What the diagnosis says of a sandbox that does not go on, and that what it proposes helps: on simulated time (O3).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::sync::Arc;
use std::time::Duration;

use place::{LONG, Place, by, paused, persistent, place, place_ordered, request};
use viv_chaos::{Damage, Order, Orders, Trouble, Turn};
use viv_core::lifecycle::{EntryKind, Status};
use viv_core::limits::ResourceLimits;
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{ExecutionId, SandboxId};
use viv_engine::{AlertConfig, CreateRequest, Remark, Which};
use viv_provider::conformance::program::Program;

const MINUTE: Duration = Duration::from_secs(60);

/// How long it is looked at what goes on inside.
const SAMPLE: Duration = Duration::from_secs(2);

/// Everything of these calls goes wrong so, until that is taken back.
fn order(orders: &Orders, call: &str, trouble: Trouble) {
    orders.give(Order { call: call.to_owned(), turn: Turn::Trouble(trouble), times: u32::MAX });
}

fn orders() -> Arc<Orders> {
    Arc::new(Orders::new(Duration::from_secs(86_400), || {}))
}

impl Place {
    async fn remarks(&self, id: &SandboxId) -> Vec<Remark> {
        let which = Which::Id(id.clone());
        self.engine.diagnose_over(&Project::default(), &which, SAMPLE).await.unwrap().remarks
    }

    /// The remark of this code, which has to be there.
    async fn said(&self, id: &SandboxId, code: &str) -> Remark {
        let remarks = self.remarks(id).await;
        let found = remarks.iter().find(|remark| remark.code == code);
        found.unwrap_or_else(|| panic!("{code} is not said: {remarks:#?}")).clone()
    }

    async fn is_said(&self, id: &SandboxId, code: &str) -> bool {
        self.remarks(id).await.iter().any(|remark| remark.code == code)
    }
}

/// Nobody puts it to rest.
fn awake() -> CreateRequest {
    let policy = Policy { idle_ms: 86_400_000, hibernate_ms: 86_400_000, ..request().policy };
    CreateRequest { policy, ..request() }
}

#[test]
fn o3_who_was_not_looked_at_for_long_is_unverified_until_he_is() {
    paused(async {
        let place = place().await;
        let id = place.made(awake()).await;
        assert!(!place.is_said(&id, "unverified").await);
        tokio::time::sleep(MINUTE).await;
        let told = place.said(&id, "unverified").await;
        assert!(told.what.starts_with("the last probe was ") && told.what.ends_with(" s ago"), "{told:?}");
        assert_eq!(told.helps, format!("viv show --verify {id}"));
        assert_eq!(place.engine.verify(&id).await.unwrap().status, Status::Ready);
        assert!(!place.is_said(&id, "unverified").await);
        let place = place.restart_earlier(60 * MINUTE).await;
        let told = place.said(&id, "unverified").await;
        assert_eq!(told.what, "the last probe was before the clock was set back");
    });
}

#[test]
fn o3_an_agent_that_hangs_gives_no_answer_until_it_goes_on() {
    paused(async {
        let place = place().await;
        let id = place.made(awake()).await;
        place.provider.damage(&id, Some(Damage::Hangs));
        assert_ne!(place.engine.verify(&id).await.unwrap().status, Status::Ready);
        let told = place.said(&id, "no_answer").await;
        assert!(told.what.contains("the agent hangs"), "{told:?}");
        assert!(told.evidence.iter().any(|seen| seen.starts_with("exec probe ")), "{told:?}");
        assert_eq!(told.helps, format!("viv show --verify {id}"));
        place.provider.damage(&id, None);
        place.engine.verify(&id).await.unwrap();
        place.engine.wait_ready(&id, LONG).await.unwrap();
        assert!(!place.is_said(&id, "no_answer").await);
    });
}

#[test]
fn o3_a_probe_that_gets_a_wrong_answer_is_told_with_it() {
    paused(async {
        let place = place().await;
        // Nobody listens there.
        let spec = SandboxSpec { ports: vec![8_000], ..SandboxSpec::default() };
        let id = place.engine.create(CreateRequest { spec, ..awake() }).await.unwrap().view.sandbox.id;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let told = place.said(&id, "unhealthy").await;
        assert!(told.what.starts_with("a probe got a wrong answer: port 8000: "), "{told:?}");
        assert_eq!(told.helps, format!("viv logs {id}"));
    });
}

#[test]
fn o3_who_cannot_be_made_has_failed_and_is_made_once_that_goes() {
    paused(async {
        let orders = orders();
        let place = place_ordered(250, &orders, |_| {}).await;
        order(&orders, "create", Trouble::Unavailable);
        let id = place.engine.create(awake()).await.unwrap().view.sandbox.id;
        place.engine.wait_settled(&id, 10 * MINUTE).await.unwrap();
        assert_eq!(place.status(&id).await, Status::Failed);
        let told = place.said(&id, "failed").await;
        assert!(told.what.starts_with("it could not be brought up: "), "{told:?}");
        assert_eq!(told.helps, format!("viv ensure {id}"));
        orders.forget();
        place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        place.engine.wait_ready(&id, LONG).await.unwrap();
        assert!(!place.is_said(&id, "failed").await);
    });
}

#[test]
fn o3_a_save_that_takes_longer_than_it_may_is_overdue_and_tried_again() {
    paused(async {
        let orders = orders();
        let place = place_ordered(250, &orders, |_| {}).await;
        let id = place.made(persistent()).await;
        order(&orders, "save", Trouble::Unavailable);
        place.engine.hibernate(&id, by()).await.unwrap();
        tokio::time::sleep(15 * MINUTE).await;
        let told = place.said(&id, "overdue").await;
        assert!(told.what.starts_with("hibernating takes longer than it may: "), "{told:?}");
        assert_eq!(told.helps, format!("viv stop --retry {id}"));
        assert_eq!(place.said(&id, "save_failed").await.helps, told.helps);
        orders.forget();
        place.engine.retry_save(&id, by()).await.unwrap();
        place.engine.wait_settled(&id, 5 * MINUTE).await.unwrap();
        assert_eq!(place.status(&id).await, Status::Hibernated);
        assert!(!place.is_said(&id, "overdue").await);
    });
}

#[test]
fn o3_an_end_that_takes_longer_than_it_may_is_overdue_and_asked_for_once_more() {
    paused(async {
        let orders = orders();
        let place = place_ordered(250, &orders, |_| {}).await;
        let (ended, deleted) = (place.made(awake()).await, place.made(awake()).await);
        order(&orders, "destroy", Trouble::Lost);
        place.engine.stop(&ended, by()).await.unwrap();
        place.engine.delete(&deleted, by()).await.unwrap();
        tokio::time::sleep(5 * MINUTE).await;
        for (id, helps) in [(&ended, "viv stop"), (&deleted, "viv rm")] {
            let told = place.said(id, "overdue").await;
            assert!(told.what.starts_with("stopping takes longer than it may: "), "{told:?}");
            assert_eq!(told.helps, format!("{helps} {id}"));
            assert_eq!(place.said(id, "kill_failed").await.helps, told.helps);
        }
        orders.forget();
        place.engine.stop(&ended, by()).await.unwrap();
        place.engine.delete(&deleted, by()).await.unwrap();
        for id in [&ended, &deleted] {
            place.engine.wait_settled(id, 5 * MINUTE).await.unwrap();
            assert_eq!(place.status(id).await, Status::Stopped);
            assert!(!place.is_said(id, "overdue").await);
        }
    });
}

#[test]
fn o3_who_should_have_been_put_to_rest_makes_no_progress_and_is_stopped() {
    paused(async {
        let orders = orders();
        let place = place_ordered(250, &orders, |config| config.alerts = Some(AlertConfig::default())).await;
        let id = place
            .made(CreateRequest {
                policy: Policy { idle_ms: 60_000, hibernate_ms: 60_000, ..request().policy },
                ..request()
            })
            .await;
        // It does not say whether something runs in it, so nobody puts it to rest (T7).
        order(&orders, "executions", Trouble::Unavailable);
        tokio::time::sleep(5 * MINUTE).await;
        assert!(!place.is_said(&id, "no_progress").await, "not before its time");
        tokio::time::sleep(10 * MINUTE).await;
        let told = place.said(&id, "no_progress").await;
        assert!(told.what.starts_with("it is ready, and nobody did anything with it for "), "{told:?}");
        assert_eq!(told.helps, format!("viv stop {id}"));
        place.engine.stop(&id, by()).await.unwrap();
        place.engine.wait_settled(&id, LONG).await.unwrap();
        assert_eq!(place.status(&id).await, Status::Stopped);
        assert!(!place.is_said(&id, "no_progress").await);
    });
}

#[test]
fn o3_who_is_of_no_use_to_anybody_is_told_and_stopped() {
    paused(async {
        let place = place().await;
        let id = place.made(awake()).await;
        assert!(!place.is_said(&id, "no_task").await, "it was just made");
        tokio::time::sleep(11 * MINUTE).await;
        let told = place.said(&id, "no_task").await;
        assert!(told.evidence.contains(&"no command runs".to_owned()), "{told:?}");
        assert_eq!(told.helps, format!("viv stop {id}"));
        place.engine.stop(&id, by()).await.unwrap();
        place.engine.wait_settled(&id, LONG).await.unwrap();
        assert!(!place.is_said(&id, "no_task").await);
    });
}

#[test]
fn o3_who_has_little_memory_left_is_told_and_given_more() {
    paused(async {
        let place = place().await;
        let limits = ResourceLimits { memory_bytes: Some(1 << 30), ..ResourceLimits::default() };
        let spec = SandboxSpec { limits, ..SandboxSpec::default() };
        let id = place.made(CreateRequest { spec, ..awake() }).await;
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        assert!(!place.is_said(&id, "memory_short").await);
        handle.execute(&ExecutionId::from_bytes([9; 16]), &Program::HoldMemory { mib: 960 }.spec()).await.unwrap();
        let told = place.said(&id, "memory_short").await;
        assert!(told.what.starts_with("little memory is left: 96") && told.what.ends_with(" of 1024 MiB"), "{told:?}");
        assert_eq!(told.helps, format!("viv limits {id} --memory 2048M"));
        let more = ResourceLimits { memory_bytes: Some(2 << 30), ..ResourceLimits::default() };
        place.engine.set_limits(&handle, &more, &by()).await.unwrap();
        assert!(!place.is_said(&id, "memory_short").await);
    });
}
