//! Events are sent to who subscribed to them: none is lost, order is kept, and nobody inside is asked (O6).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::process::Output;

use serde_json::Value;
use support::daemon::{Daemon, PATIENCE};
use support::eventually_within;
use support::receiver::{Heard, Mood, Receiver};
use support::restart::House;
use viv_api::alert::AlertState;
use viv_api::event::Event;
use viv_api::execution::StartExecution;
use viv_api::query::ListEvents;
use viv_api::sandbox::{CreateSandbox, TakeKeepAwake};
use viv_core::SandboxId;

const QUICK: &str = "[webhooks]\ntimeout_ms = 1000\npause_ms = 100\npause_ms_max = 500\n";

fn house(more: &str) -> Daemon {
    Daemon::in_house(House::with_config(&format!("{QUICK}{more}")))
}

/// Calls the binary, which has to succeed.
fn viv(daemon: &Daemon, words: &[&str]) -> String {
    let Output { status, stdout, stderr } = daemon.viv().args(words).output().unwrap();
    assert!(status.success(), "{words:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// Makes a webhook: its id, and its secret.
fn subscribe(daemon: &Daemon, words: &[&str]) -> (String, String) {
    let made = viv(daemon, &[&["--json", "webhook", "add"], words].concat());
    let made: Value = serde_json::from_str(&made).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    (text(&made["webhook"]["id"]), text(&made["secret"]))
}

fn shown(daemon: &Daemon, webhook: &str) -> Value {
    serde_json::from_str(&viv(daemon, &["--json", "webhook", "show", webhook])).unwrap()
}

/// What stands in the journal about sandboxes.
fn journal(daemon: &Daemon) -> Vec<Event> {
    let (mut query, mut found) = (ListEvents::default(), Vec::new());
    loop {
        let page = daemon.client().events(&query).unwrap();
        found.extend(page.items.into_iter().filter(|event| event.kind.starts_with("sandbox.")));
        if !page.more {
            return found;
        }
        query.after = Some(page.next_after.to_string().parse().unwrap());
    }
}

/// A few lines about a sandbox.
fn stir(daemon: &Daemon, sandbox: &SandboxId, times: u32) {
    for at in 0..times {
        let lease = format!("lease-{at}").parse().unwrap();
        let request = TakeKeepAwake { ttl_ms: 60_000.try_into().unwrap(), reason: None };
        daemon.sandbox(sandbox).keep_awake(&lease, &request).unwrap();
        daemon.sandbox(sandbox).release(&lease).unwrap();
    }
}

fn seqs(heard: &[Heard]) -> BTreeSet<u64> {
    heard.iter().map(Heard::seq).collect()
}

/// Each event of a sandbox was first taken after all that came before it.
fn assert_in_order(taken: &[Heard]) {
    let mut last: BTreeMap<String, u64> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for heard in taken {
        let (seq, lane) = (heard.seq(), heard.json()["event"]["sandbox"].to_string());
        if seen.insert(seq) {
            let before = last.insert(lane.clone(), seq);
            assert!(before < Some(seq), "{lane}: {seq} after {before:?}");
        }
    }
}

#[test]
fn o6_an_outage_a_slow_receiver_redirects_and_crashes_lose_nothing_and_keep_the_order() {
    let mut daemon =
        house("attempts_max = 1000\n[hooks]\nprivate_ranges = [\"127.0.0.1\"]\n[gates]\nbreaker = false\n");
    daemon.run(&[]);
    let (receiver, elsewhere) = (Receiver::start(Mood::Down), Receiver::start(Mood::Up));
    let (webhook, secret) = subscribe(&daemon, &["--kind", "sandbox", &receiver.url()]);
    let (one, two) = (daemon.create().id, daemon.create().id);
    stir(&daemon, &one, 3);
    eventually_within(PATIENCE, "it is tried while nobody is there", || receiver.heard().len() > 3);
    assert!(shown(&daemon, &webhook)["waiting"].as_u64().unwrap() > 3);
    daemon.kill();

    // Killed between what was taken and what says so.
    daemon.run(&[("VIV_FAILPOINT", "webhook.taken:2")]);
    receiver.be(Mood::Up);
    daemon.wait();
    assert!(!receiver.taken().is_empty());

    receiver.be(Mood::Slow);
    daemon.restart();
    stir(&daemon, &two, 3);
    eventually_within(PATIENCE, "it waits for who is slow", || {
        receiver.heard().iter().any(|heard| heard.mood == Mood::Slow)
    });
    receiver.be(Mood::Redirects(elsewhere.url()));
    eventually_within(PATIENCE, "it is sent elsewhere", || {
        receiver.heard().iter().any(|heard| matches!(heard.mood, Mood::Redirects(_)))
    });
    receiver.be(Mood::Up);
    stir(&daemon, &one, 2);

    let wanted: BTreeSet<u64> = journal(&daemon).iter().map(|event| event.seq).collect();
    eventually_within(PATIENCE, "all of it comes", || wanted.is_subset(&seqs(&receiver.taken())));
    assert_in_order(&receiver.taken());
    assert!(elsewhere.heard().is_empty(), "redirects are not followed");
    let taken = receiver.taken();
    assert!(taken.len() > wanted.len(), "what was taken before the crash comes again");
    let mut bodies: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for heard in &taken {
        assert_eq!(heard.delivery, format!("{webhook}-{}", heard.seq()));
        let before = bodies.insert(heard.delivery.clone(), heard.body.clone());
        assert!(before.is_none_or(|before| before == heard.body), "a repetition is the same");
    }
    assert!(taken[0].is_signed_with(&secret) && !taken[0].is_signed_with("another"));
    eventually_within(PATIENCE, "nothing waits", || shown(&daemon, &webhook)["waiting"] == 0);
    assert_eq!(shown(&daemon, &webhook)["dead"], 0);
    let said = [viv(&daemon, &["webhook", "ls"]), viv(&daemon, &["events"]), daemon.said()].concat();
    assert!(!said.contains("hidden") && !said.contains(&secret), "S6: {said}");
}

#[test]
fn o6_one_sandbox_does_not_hold_up_another_and_what_is_dead_is_sent_again() {
    let mut daemon = house(
        "attempts_max = 3\n[hooks]\nprivate_ranges = [\"127.0.0.1\"]\n\
         [alerts]\nperiod_s = 1\nresolve_after_s = 1\n",
    );
    daemon.run(&[]);
    let labels = |team: &str| CreateSandbox {
        labels: serde_json::from_value(serde_json::json!({ "team": team })).unwrap(),
        ..CreateSandbox::default()
    };
    let (bad, good) = (daemon.create_from(&labels("a")).id, daemon.create_from(&labels("a")).id);
    let other = daemon.create_from(&labels("b")).id;
    let receiver = Receiver::start(Mood::Refuses(bad.to_string()));
    let (webhook, secret) = subscribe(&daemon, &["--kind", "sandbox", "--label", "team=a", &receiver.url()]);
    let from = journal(&daemon).last().unwrap().seq;
    stir(&daemon, &bad, 2);
    stir(&daemon, &other, 1);
    stir(&daemon, &good, 2);
    let of = |sandbox: &SandboxId| -> BTreeSet<u64> {
        let events = journal(&daemon);
        let about = events.iter().filter(|event| event.seq > from && event.sandbox.as_ref() == Some(sandbox));
        about.map(|event| event.seq).collect()
    };
    let (of_bad, of_good) = (of(&bad), of(&good));
    assert_eq!((of_bad.len(), of_good.len()), (4, 4));
    eventually_within(PATIENCE, "the other one's are taken", || of_good.is_subset(&seqs(&receiver.taken())));
    eventually_within(PATIENCE, "what is refused dies", || shown(&daemon, &webhook)["dead"] == 4);
    assert_eq!(seqs(&receiver.taken()), of_good, "and of neither label nor time that was not asked for");
    let dead = viv(&daemon, &["webhook", "dead", &webhook]);
    assert!(of_bad.iter().all(|seq| dead.contains(&seq.to_string())) && dead.contains("answered 422"), "{dead}");
    eventually_within(PATIENCE, "somebody is told", || {
        let alerts = daemon.client().alerts().unwrap().items;
        alerts.iter().any(|alert| alert.name == "webhook_dead_letters" && alert.state == AlertState::Firing)
    });
    let metrics = daemon.client().metrics().unwrap();
    for figure in ["viv_webhook_events_dead 4", "viv_webhook_events_died_total 4", "viv_webhook_subscriptions 1"] {
        assert!(metrics.contains(figure), "{figure}: {metrics}");
    }

    // Dead letters outlive the daemon, and come in order when they are sent again.
    daemon.kill();
    daemon.restart();
    receiver.be(Mood::Up);
    assert_eq!(viv(&daemon, &["webhook", "replay", &webhook]).trim(), "4 on their way");
    let wanted: BTreeSet<u64> = of_bad.union(&of_good).copied().collect();
    eventually_within(PATIENCE, "they are taken", || seqs(&receiver.taken()) == wanted);
    assert_in_order(&receiver.taken());

    // Another secret: for a while both are signed with. Everything is sent once more.
    let rotated: Value = serde_json::from_str(&viv(&daemon, &["--json", "webhook", "rotate", &webhook])).unwrap();
    let count = receiver.taken().len();
    viv(&daemon, &["webhook", "replay", &webhook, "--after", &from.to_string()]);
    eventually_within(PATIENCE, "all come again", || seqs(&receiver.taken()[count..]) == wanted);
    let last = receiver.taken().pop().unwrap();
    assert!(last.is_signed_with(&secret) && last.is_signed_with(rotated["secret"].as_str().unwrap()));
    viv(&daemon, &["webhook", "rm", &webhook]);
    assert_eq!(viv(&daemon, &["--json", "webhook", "ls"]), "");
}

#[test]
fn o6_what_resolves_to_this_machine_is_refused_and_nothing_is_lost() {
    let mut daemon = house("attempts_max = 2\n");
    daemon.run(&[]);
    let receiver = Receiver::start(Mood::Up);
    let port = receiver.address.port();
    let urls = [format!("http://localhost:{port}/"), format!("http://2130706433:{port}/"), receiver.url()];
    let webhooks: Vec<String> =
        urls.iter().map(|url| subscribe(&daemon, &["--kind", "sandbox.created", url]).0).collect();
    daemon.create();
    for webhook in &webhooks {
        eventually_within(PATIENCE, "it is not tried for ever", || shown(&daemon, webhook)["dead"] == 1);
        let dead = viv(&daemon, &["webhook", "dead", webhook]);
        assert!(dead.contains("private address"), "{dead}");
        let tried = daemon.viv().args(["webhook", "test", webhook]).output().unwrap();
        assert!(!tried.status.success() && String::from_utf8_lossy(&tried.stderr).contains("private address"));
    }
    assert!(receiver.heard().is_empty(), "nobody was asked");

    daemon.end();
    daemon.configure(&format!("{QUICK}[hooks]\nprivate_ranges = [\"127.0.0.0/8\", \"::1\"]\n"));
    daemon.restart();
    let allowed = webhooks.last().unwrap();
    viv(&daemon, &["webhook", "replay", allowed]);
    eventually_within(PATIENCE, "who is allowed is asked", || receiver.taken().len() == 1);
    assert_eq!(viv(&daemon, &["webhook", "test", allowed]).trim(), "taken");
}

#[test]
fn o5_an_alert_that_happens_is_sent_signed_once_firing_once_resolved_and_in_this_order() {
    let mut daemon = house(
        "attempts_max = 1000\n[hooks]\nprivate_ranges = [\"127.0.0.1\"]\n\
         [alerts]\nperiod_s = 1\nresolve_after_s = 1\nstuck_after_s = 2\nrules = { sandbox_stuck = { for_s = 0 } }\n",
    );
    daemon.run(&[]);
    let receiver = Receiver::start(Mood::Up);
    let (webhook, secret) = subscribe(&daemon, &["--all-projects", "--kind", "alert", &receiver.url()]);
    // It sleeps, and nobody does anything with it.
    let made = daemon.create().id;
    let sleep = StartExecution::of(["/bin/sleep", "1000"]).unwrap();
    daemon.sandbox(&made).start(&sleep, None).unwrap();
    eventually_within(PATIENCE, "it fires, and is heard", || !receiver.taken().is_empty());
    daemon.remove(&made);
    eventually_within(PATIENCE, "it is resolved, and is heard", || receiver.taken().len() >= 2);
    eventually_within(PATIENCE, "nothing waits", || shown(&daemon, &webhook)["waiting"] == 0);
    let taken = receiver.taken();
    let said: Vec<(Value, Value)> = taken
        .iter()
        .map(|heard| (heard.json()["event"]["kind"].clone(), heard.json()["event"]["data"]["alert"].clone()))
        .collect();
    let wanted = ["alert.firing", "alert.resolved"].map(|kind| (kind.into(), "sandbox_stuck".into()));
    assert_eq!(said, wanted, "each once, in order");
    assert!(taken.iter().all(|heard| heard.is_signed_with(&secret) && !heard.is_signed_with("another")));
    let firing = &taken[0].json()["event"];
    assert_eq!(firing["data"]["sandboxes"], serde_json::json!([made]), "{firing}");
    // What was sent is what stands in the journal.
    let lines = viv(&daemon, &["--json", "events", "--kind", "alert", "--by", "alerts", "--since", "10m"]);
    let seqs: Vec<u64> = lines.lines().map(|line| serde_json::from_str::<Event>(line).unwrap().seq).collect();
    assert_eq!(seqs, taken.iter().map(Heard::seq).collect::<Vec<_>>());
    assert_eq!(viv(&daemon, &["--json", "events", "--kind", "alert", "--by", "engine"]), "");
}

fn failing(daemon: &Daemon) -> AlertState {
    let all = daemon.client().alerts().unwrap().items;
    all.iter().find(|alert| alert.name == "webhooks_failing").expect("it is a rule").state
}

#[test]
fn o5_a_receiver_that_is_down_for_long_is_an_alert_and_when_it_is_back_none() {
    let mut daemon = house(
        "attempts_max = 1000\n[hooks]\nprivate_ranges = [\"127.0.0.1\"]\n\
         [alerts]\nperiod_s = 1\nresolve_after_s = 1\nrules = { webhooks_failing = { for_s = 2 } }\n",
    );
    daemon.run(&[]);
    let receiver = Receiver::start(Mood::Down);
    let (webhook, _) = subscribe(&daemon, &["--kind", "sandbox", &receiver.url()]);
    assert_eq!(failing(&daemon), AlertState::Inactive);
    let made = daemon.create().id;
    // It holds for a while before it fires, so that a restart of the receiver is none.
    eventually_within(PATIENCE, "it is looked at", || failing(&daemon) == AlertState::Pending);
    eventually_within(PATIENCE, "it fires", || failing(&daemon) == AlertState::Firing);
    let said = viv(&daemon, &["doctor"]);
    assert!(said.contains("alert_webhooks_failing") && said.contains("viv webhook ls"), "{said}");
    assert!(viv(&daemon, &["webhook", "ls"]).contains(&webhook));
    receiver.be(Mood::Up);
    eventually_within(PATIENCE, "it is resolved", || failing(&daemon) != AlertState::Firing);
    eventually_within(PATIENCE, "nothing waits", || shown(&daemon, &webhook)["waiting"] == 0);
    assert_in_order(&receiver.taken());
    let told = |daemon: &Daemon| {
        let lines = viv(daemon, &["--json", "events", "--kind", "alert"]);
        ["alert.firing", "alert.resolved"].map(|kind| lines.matches(&format!("\"{kind}\"")).count())
    };
    eventually_within(PATIENCE, "both are told, once", || told(&daemon) == [1, 1]);
    daemon.remove(&made);
}
