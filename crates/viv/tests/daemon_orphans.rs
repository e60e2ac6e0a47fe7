//! Instances without a record are collected, and what is not ours is never touched (J1).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use support::restart::{Daemon, House, create, settled};
use support::{eventually, eventually_within, fresh_bytes, mutation};
use viv_api::client::Client;
use viv_api::daemon::Reconciler;
use viv_api::query::ListEvents;
use viv_api::sandbox::{Phase, Status};
use viv_core::{Generation, OwnerMark, SandboxId};
use viv_provider::{InstanceRef, InstanceSpec, InstanceState, Provider};

/// As it is configured below.
const GRACE: Duration = Duration::from_secs(3);

/// An instance that no daemon asked for, with this mark.
async fn stray(house: &House, mark: &OwnerMark) -> InstanceRef {
    let sandbox = SandboxId::from_bytes(fresh_bytes());
    let made = house.provider().create(&mutation(1, 1), &sandbox, mark, &InstanceSpec::host(600_000)).await.unwrap();
    assert_eq!(made.state, InstanceState::Running);
    InstanceRef { sandbox, generation: Generation(1) }
}

async fn state(house: &House, instance: &InstanceRef) -> InstanceState {
    house.provider().observe(instance).await.unwrap().state
}

fn reconciler(client: &Client, name: &str) -> Option<Reconciler> {
    client.reconcilers().unwrap().items.into_iter().find(|one| one.name == name)
}

fn provider_sync(client: &Client) -> Option<Reconciler> {
    reconciler(client, "provider-sync")
}

/// The sandboxes that the journal says were collected.
fn collected(client: &Client) -> Vec<SandboxId> {
    let mut query = ListEvents::default();
    let mut found = Vec::new();
    loop {
        let page = client.events(&query).unwrap();
        found.extend(page.items.into_iter().filter(|event| event.kind == "orphan.collected").filter_map(|e| e.sandbox));
        if !page.more {
            return found;
        }
        query.after = Some(page.next_after.to_string().parse().unwrap());
    }
}

async fn clear_away(house: &House, daemon: &Daemon, foreign: &InstanceRef) {
    for sandbox in support::restart::all(&daemon.client()) {
        daemon.client().sandbox(&sandbox.id).delete(None).unwrap();
        settled(&daemon.client(), &sandbox.id);
    }
    house.provider().destroy(&mutation(1, 1), &foreign.sandbox).await.unwrap();
    house.assert_nothing_left();
}

#[tokio::test]
async fn j1_an_orphan_is_collected_after_the_grace_and_what_is_not_ours_never() {
    let house = House::with_config("[reconcile]\nprovider_sync_s = 1\norphan_grace_s = 3");
    let daemon = house.start();
    let client = daemon.client();
    let ours = create(&client);
    let began = Instant::now();
    let orphan = stray(&house, &house.owner_mark().await).await;
    let foreign = stray(&house, &"somebody-else".parse().unwrap()).await;
    let mut gone = false;
    while !gone {
        gone = state(&house, &orphan).await == InstanceState::Absent;
        assert!(began.elapsed() < GRACE + support::SOON, "it was not collected: {}", daemon.said());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // It was not there before, so it was seen after: no sooner than the grace allows.
    assert!(began.elapsed() >= GRACE, "it was collected after {:?}", began.elapsed());
    eventually("it is journaled", || collected(&client) == [orphan.sandbox.clone()]);
    // Several listings later the others are as they were.
    let runs = provider_sync(&client).unwrap().runs_total;
    eventually("it looked again", || provider_sync(&client).unwrap().runs_total >= runs + 3);
    assert_eq!(state(&house, &foreign).await, InstanceState::Running);
    let seen = client.sandbox(&ours.id).verify().unwrap();
    assert_eq!((seen.phase, seen.status, seen.generation), (Phase::Ready, Status::Ready, ours.generation));
    assert_eq!(collected(&client), std::slice::from_ref(&orphan.sandbox));
    clear_away(&house, &daemon, &foreign).await;
}

/// What there is by the listing at the start, with none for an hour after it.
async fn survives_the_start(orphan_grace_s: u32) {
    let rest = format!("[reconcile]\nprovider_sync_s = 3600\norphan_grace_s = {orphan_grace_s}");
    let house = House::with_config(&rest);
    let mut daemon = house.start();
    let orphan = stray(&house, &house.owner_mark().await).await;
    let foreign = stray(&house, &"somebody-else".parse().unwrap()).await;
    daemon.kill();
    daemon = house.start();
    let client = daemon.client();
    // `full` lists too: what it sees is no second listing, however the two fall.
    for name in ["provider-sync", "full"] {
        eventually("it looked", || reconciler(&client, name).is_some_and(|one| one.runs_total > 0));
        let looked = reconciler(&client, name).unwrap();
        assert_eq!((looked.runs_total, looked.did, looked.failed), (1, 0, 0), "{name}");
        assert!(looked.found > 0, "{name}");
    }
    assert_eq!(state(&house, &orphan).await, InstanceState::Running);
    assert_eq!(collected(&client), []);

    daemon.kill();
    house.configure("[reconcile]\nprovider_sync_s = 1\norphan_grace_s = 0");
    daemon = house.start();
    let client = daemon.client();
    eventually_within(support::SOON, "it is collected", || collected(&client) == [orphan.sandbox.clone()]);
    assert_eq!(state(&house, &orphan).await, InstanceState::Absent);
    assert_eq!(state(&house, &foreign).await, InstanceState::Running);
    clear_away(&house, &daemon, &foreign).await;
}

#[tokio::test]
async fn j1_one_listing_is_not_enough_to_collect() {
    survives_the_start(0).await;
}

#[tokio::test]
async fn j1_what_has_no_record_is_left_alone_for_its_grace() {
    survives_the_start(3600).await;
}
