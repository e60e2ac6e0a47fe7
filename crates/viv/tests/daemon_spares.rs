//! Hot spares on real daemons (L19): different for everybody, never broken, and neither lost nor doubled by a crash.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Mutex;

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::restart::{House, settled};
use support::{eventually_within, kill};
use viv_api::bound::{Env, IdempotencyKey};
use viv_api::query::ListEvents;
use viv_api::sandbox::{CreateSandbox, Status};
use viv_api::spare::SpareClass;
use viv_core::{Generation, SandboxId};
use viv_provider::{InstanceRef, Provider};

/// Clients at once, and what each asks for: 40 in all, and 500 by 50 with `make claims`.
fn claims() -> (usize, usize) {
    let set = |name: &str| std::env::var(name).ok().map(|value| value.parse().unwrap());
    (set("VIV_CLAIM_CLIENTS").unwrap_or(8), set("VIV_CLAIM_EACH").unwrap_or(5))
}

fn daemon(min: u32, max: u32) -> Daemon {
    let house = House::with_config(&format!("[spares.classes.plain]\nmin = {min}\nmax = {max}"));
    let mut daemon = Daemon::in_house(house);
    daemon.run(&[]);
    daemon
}

fn spares(daemon: &Daemon) -> SpareClass {
    daemon.client().spares().unwrap().items.remove(0)
}

fn until_ready(daemon: &Daemon, count: usize) {
    eventually_within(PATIENCE, "spares are ready", || spares(daemon).ready.len() >= count);
}

/// A request with something of its own.
fn request(whose: &str) -> CreateSandbox {
    let env: Env = serde_json::from_value(serde_json::json!({ "WHOSE": whose })).unwrap();
    CreateSandbox { env, ..CreateSandbox::default() }
}

/// How the sandboxes of these were made, in the words of the journal: whether from a spare.
fn from_spares(daemon: &Daemon) -> Vec<(SandboxId, bool)> {
    let (mut query, mut found) = (ListEvents::default(), Vec::new());
    loop {
        let page = daemon.client().events(&query).unwrap();
        let created = page.items.into_iter().filter(|event| event.kind == "sandbox.created");
        found.extend(created.map(|event| (event.sandbox.unwrap(), event.data.get("spare").is_some())));
        if !page.more {
            return found;
        }
        query.after = Some(page.next_after.to_string().parse().unwrap());
    }
}

/// Nobody wants spares any more: nothing of them is left.
fn end(mut daemon: Daemon) {
    daemon.end();
    daemon.configure("");
    daemon.restart();
    eventually_within(PATIENCE, "the spares are given up", || daemon.instances().is_empty());
    daemon.end();
    daemon.assert_nothing_left();
}

#[test]
fn l19_claims_of_many_are_different_sandboxes_that_know_whose_they_are() {
    let (clients, each) = claims();
    let daemon = daemon(4, 8);
    until_ready(&daemon, 4);
    let identities = Mutex::new((BTreeSet::new(), BTreeSet::new(), BTreeSet::new(), BTreeSet::new()));
    // Whoever is gone gives its numbers to others, so these are of those that live.
    let mapped = Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for client in 0..clients {
            let (daemon, identities, mapped) = (&daemon, &identities, &mapped);
            scope.spawn(move || {
                for round in 0..each {
                    let whose = format!("client-{client}-{round}");
                    let made = daemon.create_from(&request(&whose));
                    let script = "hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/boot_id; \
                                  tr -s ' ' < /proc/self/uid_map | head -n 1; echo $WHOSE; \
                                  hostname > /workspace/mine; cat /workspace/*";
                    let (said, end) = run(&daemon.sandbox(&made.id), script);
                    assert_eq!(end.exit_code, Some(0), "{said}");
                    let said: Vec<&str> = said.lines().collect();
                    let [hostname, machine, boot, map, env, mine] = said[..] else { panic!("{said:?}") };
                    assert_eq!((env, mine), (whose.as_str(), hostname), "nobody was here before");
                    let mut all = identities.lock().unwrap();
                    assert!(all.0.insert(made.id.clone()), "{} was given to two", made.id);
                    assert!(all.1.insert(hostname.to_owned()) && all.2.insert(machine.to_owned()), "{said:?}");
                    assert!(all.3.insert(boot.to_owned()), "{said:?}");
                    drop(all);
                    let host = Command::new("head").args(["-n", "1", "/proc/self/uid_map"]).output().unwrap().stdout;
                    let host = String::from_utf8(host).unwrap();
                    assert_ne!(map.split_whitespace().nth(1), host.split_whitespace().nth(1), "its root is not ours");
                    assert!(mapped.lock().unwrap().insert(map.to_owned()), "two that live have the numbers {map}");
                    mapped.lock().unwrap().remove(map);
                    daemon.remove(&made.id);
                }
            });
        }
    });
    let ids = identities.into_inner().unwrap().0;
    let asked = clients * each;
    assert_eq!(ids.len(), asked);
    let created = from_spares(&daemon);
    let told: BTreeSet<SandboxId> = created.iter().map(|(id, _)| id.clone()).collect();
    assert_eq!((created.len(), told), (ids.len(), ids), "each once");
    let claimed = created.iter().filter(|(_, spare)| *spare).count() as u64;
    let status = spares(&daemon);
    let all = status.claimed_total + status.missed_total;
    assert_eq!((status.claimed_total, all), (claimed, asked as u64), "{status:?}");
    assert!(claimed >= 4, "{status:?}");
    println!(
        "{asked} claims by {clients} clients: {claimed} got a spare, {} were made; ids, hostnames, machine ids and boot ids {asked} of each",
        asked as u64 - claimed
    );
    let figures = daemon.viv().args(["spares", "--json"]).output().unwrap();
    let figures: SpareClass = serde_json::from_slice(&figures.stdout).unwrap();
    assert_eq!((figures.name.as_str(), figures.claimed_total), ("plain", claimed));
    assert!(
        daemon.client().list_all(viv_api::query::ListSandboxes::default()).next().is_none(),
        "spares are not listed"
    );
    end(daemon);
}

#[tokio::test]
async fn l19_a_spare_whose_agent_was_killed_is_never_handed_out_as_ready() {
    let daemon = daemon(1, 1);
    until_ready(&daemon, 1);
    let spare = spares(&daemon).ready[0].id.clone();
    let instance = InstanceRef { sandbox: spare.clone(), generation: Generation(1) };
    let agent = daemon.provider().whereabouts(&instance).await.unwrap().agent_pid.unwrap();
    kill(agent, Signal::KILL);
    // At once, before anybody can know: what is answered works, whichever it is.
    let made = daemon.create_from(&request("me"));
    assert!(made.id != spare || made.generation > Generation(1), "{made:#?}");
    let (said, ended) = run(&daemon.sandbox(&made.id), "echo $WHOSE");
    assert_eq!((said.as_str(), ended.exit_code), ("me\n", Some(0)));
    daemon.remove(&made.id);
    // And later: it is found out, and another one takes its place.
    until_ready(&daemon, 1);
    let spare = spares(&daemon).ready[0].id.clone();
    let instance = InstanceRef { sandbox: spare.clone(), generation: Generation(1) };
    kill(daemon.provider().whereabouts(&instance).await.unwrap().agent_pid.unwrap(), Signal::KILL);
    let is_another = || spares(&daemon).ready.first().is_some_and(|ready| ready.id != spare);
    eventually_within(PATIENCE, "another one takes its place", is_another);
    end(daemon);
}

#[test]
fn l19_a_daemon_that_dies_while_it_gives_a_spare_loses_and_doubles_nothing() {
    for point in ["create.claiming", "claim.before", "claim.after"] {
        let mut daemon = daemon(2, 2);
        until_ready(&daemon, 2);
        let before: BTreeSet<SandboxId> = spares(&daemon).ready.into_iter().map(|spare| spare.id).collect();
        daemon.end();
        daemon.run(&[("VIV_FAILPOINT", point)]);
        until_ready(&daemon, 2);
        let adopted: BTreeSet<SandboxId> = spares(&daemon).ready.into_iter().map(|spare| spare.id).collect();
        assert_eq!(adopted, before, "{point}: what one daemon made is there for the next");
        let key: IdempotencyKey = "one".parse().unwrap();
        daemon.client().create(&request("me"), Some(&key)).unwrap_err();
        daemon.wait();
        daemon.restart();
        let made = daemon.client().create(&request("me"), Some(&key)).unwrap().into_sandbox();
        assert_eq!(settled(daemon.client(), &made.id).status, Status::Ready, "{point}");
        let (said, ended) = run(&daemon.sandbox(&made.id), "echo $WHOSE");
        assert_eq!((said.as_str(), ended.exit_code), ("me\n", Some(0)), "{point}");
        assert_eq!(from_spares(&daemon).len(), 1, "{point}: once");
        until_ready(&daemon, 2);
        assert!(spares(&daemon).ready.iter().all(|spare| spare.id != made.id), "{point}");
        assert_eq!(daemon.instances().len(), 3, "{point}");
        daemon.remove(&made.id);
        end(daemon);
    }
}

/// Eight at once, each with a key: the daemon dies among their claims, and all of them ask again.
#[test]
fn l19_a_daemon_that_dies_among_claims_of_many_gives_each_who_asks_again_one_of_its_own() {
    const CLIENTS: usize = 8;
    for point in ["create.claiming:3", "claim.after:2"] {
        let mut daemon = daemon(4, 4);
        until_ready(&daemon, 4);
        daemon.end();
        daemon.run(&[("VIV_FAILPOINT", point)]);
        until_ready(&daemon, 4);
        let ask = |daemon: &Daemon, client: usize| {
            let key: IdempotencyKey = format!("key-{client}").parse().unwrap();
            daemon.client().create(&request(&format!("client-{client}")), Some(&key))
        };
        let first: Vec<Option<SandboxId>> = std::thread::scope(|scope| {
            let asking: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    let daemon = &daemon;
                    scope.spawn(move || ask(daemon, client).ok().map(|made| made.into_sandbox().id))
                })
                .collect();
            asking.into_iter().map(|asking| asking.join().unwrap()).collect()
        });
        assert!(first.iter().any(Option::is_none), "{point}: it died among them");
        daemon.wait();
        daemon.restart();
        let made: Vec<SandboxId> = std::thread::scope(|scope| {
            let asking: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    let daemon = &daemon;
                    scope.spawn(move || {
                        let id = ask(daemon, client).unwrap().into_sandbox().id;
                        assert_eq!(settled(daemon.client(), &id).status, Status::Ready, "{point}");
                        let (said, ended) = run(&daemon.sandbox(&id), "echo $WHOSE");
                        assert_eq!((said, ended.exit_code), (format!("client-{client}\n"), Some(0)), "{point}");
                        id
                    })
                })
                .collect();
            asking.into_iter().map(|asking| asking.join().unwrap()).collect()
        });
        for (before, after) in first.iter().zip(&made) {
            assert!(before.as_ref().is_none_or(|before| before == after), "{point}: what was answered is kept");
        }
        let ids: BTreeSet<&SandboxId> = made.iter().collect();
        assert_eq!(ids.len(), CLIENTS, "{point}: none twice");
        let created: BTreeSet<SandboxId> = from_spares(&daemon).into_iter().map(|(id, _)| id).collect();
        assert_eq!(
            (from_spares(&daemon).len(), created),
            (CLIENTS, made.iter().cloned().collect()),
            "{point}: each once"
        );
        until_ready(&daemon, 4);
        assert!(spares(&daemon).ready.iter().all(|spare| !ids.contains(&spare.id)), "{point}");
        assert_eq!(daemon.instances().len(), CLIENTS + 4, "{point}: nothing is lost");
        for id in &made {
            daemon.remove(id);
        }
        end(daemon);
    }
}
