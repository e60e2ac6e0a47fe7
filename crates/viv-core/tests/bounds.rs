//! What is too much is refused, and what is as much as may be is not.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeMap;

use viv_core::hook::{Hook, HookAction, HookPoint, OnFailure, Secret};
use viv_core::limits::ResourceLimits;
use viv_core::schedule::MAKE_UP_SPAN_MS;
use viv_core::service::{Nudge, Readiness, Restart, RestartPolicy, ServiceSpec};
use viv_core::span::parse_span;
use viv_core::spec::{Hibernate, LIFETIME_MS_MAX, PAIRS_MAX, PORTS_MAX, Policy, Project, SandboxSpec, TEXT_BYTES_MAX};
use viv_core::subscription::ROTATION_MS_DEFAULT;
use viv_core::task::TaskLimits;

fn policy() -> Policy {
    Policy::default_for(None)
}

fn spec() -> SandboxSpec {
    SandboxSpec::default()
}

#[test]
fn l5_times_of_a_policy_are_at_least_a_second() {
    for (least, less) in [
        (Policy { lifetime_ms: 1_000, ..policy() }, Policy { lifetime_ms: 999, ..policy() }),
        (Policy { idle_ms: 1_000, ..policy() }, Policy { idle_ms: 999, ..policy() }),
        (Policy { hibernate_ms: 1_000, ..policy() }, Policy { hibernate_ms: 999, ..policy() }),
        (Policy { snapshots_age_ms: Some(1_000), ..policy() }, Policy { snapshots_age_ms: Some(999), ..policy() }),
        (Policy { snapshots_max: Some(1), ..policy() }, Policy { snapshots_max: Some(0), ..policy() }),
        (Policy { lifetime_ms: LIFETIME_MS_MAX, ..policy() }, Policy { lifetime_ms: LIFETIME_MS_MAX + 1, ..policy() }),
    ] {
        assert!(least.check().is_ok(), "{least:?}");
        assert!(less.check().is_err(), "{less:?}");
    }
}

/// Pages, help and messages say these times in words.
#[test]
fn what_is_not_said_is_as_long_as_people_are_told() {
    let Policy { lifetime_ms, idle_ms, hibernate_ms, .. } = policy();
    let TaskLimits { inactivity_ms, total_ms, .. } = TaskLimits::default();
    for (ms, told) in [
        (Some(lifetime_ms), "1h"),
        (Some(LIFETIME_MS_MAX), "30d"),
        (Some(idle_ms), "15m"),
        (Some(hibernate_ms), "15m"),
        (inactivity_ms, "60s"),
        (total_ms, "5m"),
        (Some(MAKE_UP_SPAN_MS), "1d"),
        (Some(ROTATION_MS_DEFAULT), "24h"),
    ] {
        assert_eq!(ms, parse_span(told), "{told}");
    }
}

#[test]
fn limits_are_large_enough_to_live_with() {
    let none = ResourceLimits::default;
    for (least, less) in [
        (
            ResourceLimits { memory_bytes: Some(16_777_216), ..none() },
            ResourceLimits { memory_bytes: Some(16_777_215), ..none() },
        ),
        (
            ResourceLimits { io_read_bps: Some(1_048_576), ..none() },
            ResourceLimits { io_read_bps: Some(1_048_575), ..none() },
        ),
        (
            ResourceLimits { io_write_bps: Some(1_048_576), ..none() },
            ResourceLimits { io_write_bps: Some(1_048_575), ..none() },
        ),
    ] {
        assert!(least.check().is_ok(), "{least:?}");
        assert!(less.check().is_err(), "{less:?}");
    }
}

#[test]
fn what_a_policy_does_not_say_is_not_written_and_is_read_as_what_holds() {
    let written = serde_json::to_value(policy()).unwrap();
    assert!(written.get("hibernate").is_none(), "{written}");
    let memory = Policy { hibernate: Hibernate::Memory, ..policy() };
    assert_eq!(serde_json::to_value(&memory).unwrap()["hibernate"], "memory");
    let mut old = written;
    old.as_object_mut().unwrap().remove("hibernate_ms");
    assert_eq!(serde_json::from_value::<Policy>(old).unwrap(), policy());
}

/// A text that is as long as may be, and one that is longer.
fn long() -> [String; 2] {
    ["x".repeat(TEXT_BYTES_MAX), "x".repeat(TEXT_BYTES_MAX + 1)]
}

#[test]
fn j7_texts_and_lists_of_a_spec_have_their_bounds() {
    let [most, more] = long();
    let of = |name: &str, value: &str| SandboxSpec { env: [(name.to_owned(), value.to_owned())].into(), ..spec() };
    let many =
        |count: usize| -> BTreeMap<String, String> { (0..count).map(|n| (n.to_string(), "v".to_owned())).collect() };
    let in_folder = |text: &str| SandboxSpec { workdir: format!("/{}", &text[1..]), ..spec() };
    for (good, bad) in [
        (of(&most, "v"), of(&more, "v")),
        (of("n", &most), of("n", &more)),
        (of("n", "v"), of("n", "v\0")),
        (of("n", ""), of("", "v")),
        (of("n", "a=b"), of("n=", "v")),
        (SandboxSpec { env: many(PAIRS_MAX), ..spec() }, SandboxSpec { env: many(PAIRS_MAX + 1), ..spec() }),
        (in_folder(&most), in_folder(&more)),
        (spec(), SandboxSpec { workdir: "workspace".to_owned(), ..spec() }),
        (spec(), SandboxSpec { workdir: "/work\0".to_owned(), ..spec() }),
        (
            SandboxSpec { ports: vec![80; PORTS_MAX], ..spec() },
            SandboxSpec { ports: vec![80; PORTS_MAX + 1], ..spec() },
        ),
        (SandboxSpec { ports: vec![1], ..spec() }, SandboxSpec { ports: vec![0], ..spec() }),
    ] {
        assert!(good.check().is_ok(), "{:?}", good.check());
        assert!(bad.check().is_err(), "{} bytes of {:.99?}", bad.workdir.len(), bad.env);
    }
}

fn service() -> ServiceSpec {
    ServiceSpec {
        name: "web".parse().unwrap(),
        argv: vec!["serve".to_owned()],
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        ready: Readiness::Port { port: 80 },
        ready_within_ms: 30_000,
        restart: Restart { policy: RestartPolicy::OnFailure, times_max: 1, backoff_ms: 500 },
        nudge: Some(Nudge { signal: 10, within_ms: 120_000, reports: None, on_thaw: true }),
    }
}

fn with(service: ServiceSpec) -> bool {
    SandboxSpec { services: vec![service], ..spec() }.check().is_ok()
}

#[test]
fn l14_services_have_their_bounds() {
    use viv_core::service::{READY_WITHIN_MS_MAX, RESTART_BACKOFF_MS_MAX, RESTARTS_MAX};
    let restart = |times_max, backoff_ms| ServiceSpec {
        restart: Restart { policy: RestartPolicy::Always, times_max, backoff_ms },
        ..service()
    };
    let runs = |ms| ServiceSpec { ready: Readiness::Runs { ms }, ..service() };
    let [most, more] = long();
    let says = |word: String| ServiceSpec { argv: vec!["x".to_owned(), word], ..service() };
    for (good, bad) in [
        (restart(RESTARTS_MAX, 1), restart(RESTARTS_MAX + 1, 1)),
        (restart(1, RESTART_BACKOFF_MS_MAX), restart(1, RESTART_BACKOFF_MS_MAX + 1)),
        (runs(READY_WITHIN_MS_MAX), runs(READY_WITHIN_MS_MAX + 1)),
        (runs(1), ServiceSpec { ready: Readiness::Port { port: 0 }, ..service() }),
        (ServiceSpec { ready_within_ms: 1, ..service() }, ServiceSpec { ready_within_ms: 0, ..service() }),
        (says(most), says(more)),
        (says("x".to_owned()), says("\0".to_owned())),
        (service(), ServiceSpec { argv: Vec::new(), ..service() }),
    ] {
        assert!(with(good.clone()), "{good:.300?}");
        assert!(!with(bad.clone()), "{bad:.300?}");
    }
    assert_eq!(service().wait_ms(), 150_000, "a start, and a nudge after it");
    assert_eq!(ServiceSpec { nudge: None, ..service() }.wait_ms(), 30_000);
}

#[test]
fn an_instance_is_made_of_what_is_not_started_or_given_later() {
    let whole = SandboxSpec {
        env: [("A".to_owned(), "b".to_owned())].into(),
        ports: vec![80],
        services: vec![service()],
        workdir: "/elsewhere".to_owned(),
        hooks: [(HookPoint::AfterStart, hook("https://example.com/"))].into(),
        ..spec()
    };
    assert_eq!(whole.of_instance(), SandboxSpec { workdir: "/elsewhere".to_owned(), ..spec() });
}

fn hook(url: &str) -> Hook {
    let secret = Secret::new("0123456789abcdef");
    Hook { action: HookAction::Webhook { url: url.to_owned(), secret }, deadline_ms: 1, on_failure: OnFailure::Abort }
}

#[test]
fn a_webhook_is_a_url_of_the_web_that_is_not_too_long() {
    let ok = |url: &str| SandboxSpec { hooks: [(HookPoint::OnTimeout, hook(url))].into(), ..spec() }.check().is_ok();
    let start = "https://example.com/";
    let of = |bytes: usize| format!("{start}{}", "x".repeat(bytes - start.len()));
    assert!(ok(start) && ok(&of(TEXT_BYTES_MAX)) && !ok(&of(TEXT_BYTES_MAX + 1)));
    assert!(!ok("ftp://example.com/") && !ok("https://a b/") && !ok("https://me:pass@example.com/"));
}

#[test]
fn the_project_of_spares_is_nobody_elses() {
    assert!(Project::spares().is_spares() && !Project::default().is_spares());
}

#[test]
fn seconds_are_read_with_their_unit_too() {
    assert_eq!((parse_span("5s"), parse_span("1m5s"), parse_span("s")), (Some(5_000), Some(65_000), None));
}
