//! One daemon owns a data folder, and another takes over when it is killed or hangs (J8).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::restart::{Daemon, Freezer, FreezerKind, House, all, create, settled};
use support::{eventually_within, is_alive};
use viv_api::bound::{LeaseName, TtlMs};
use viv_api::client::Client;
use viv_api::query::ListSandboxes;
use viv_api::sandbox::{CreateSandbox, Phase, Sandbox, Status, StopSandbox, TakeKeepAwake};

/// The rule's 3 s, and as much again and more for a loaded machine.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(3 + 7);

fn assert_takes_over(standby: &mut Daemon) {
    eventually_within(TAKEN_OVER_WITHIN, "the standby serves", || {
        assert!(standby.is_running(), "it ended: {}", standby.said());
        standby.serves()
    });
}

/// A third one is refused, and told who owns the folder.
fn assert_owned_by(house: &House, owner: &Daemon) {
    let mut third = house.spawn(&[], &[]);
    let status = third.wait();
    let said = third.said();
    assert!(!status.success(), "{said}");
    assert!(said.contains(&format!("(pid {} on ", owner.pid())) && said.contains("owns"), "{said}");
    assert!(said.contains("hint:") && said.contains("--standby"), "{said}");
}

fn clear_away(house: &House, client: &Client) {
    for sandbox in all(client) {
        client.sandbox(&sandbox.id).delete(None).unwrap();
        settled(client, &sandbox.id);
    }
    house.assert_nothing_left();
}

/// The same instance, found well by this daemon.
fn assert_kept(client: &Client, sandbox: &Sandbox) {
    let seen = client.sandbox(&sandbox.id).verify().unwrap();
    assert_eq!((seen.phase, seen.status, seen.generation), (Phase::Ready, Status::Ready, sandbox.generation));
}

#[test]
fn j8_a_second_daemon_refuses_and_says_who_owns_the_folder() {
    let house = House::new();
    let mut daemon = house.start();
    let sandbox = create(&daemon.client());
    assert_owned_by(&house, &daemon);
    assert!(daemon.is_running());
    assert_kept(&daemon.client(), &sandbox);
    clear_away(&house, &daemon.client());
}

#[test]
fn j8_a_standby_takes_over_from_one_that_was_killed() {
    let house = House::new();
    let mut owner = house.start();
    let sandbox = create(&owner.client());
    let mut standbys = [house.stand_by(), house.stand_by()];
    assert!(standbys.iter_mut().all(|standby| standby.is_running() && !standby.serves()));
    owner.kill();
    eventually_within(TAKEN_OVER_WITHIN, "a standby serves", || standbys.iter().any(Daemon::serves));
    standbys.sort_by_key(Daemon::serves);
    let [other, new] = &mut standbys;
    assert_kept(&new.client(), &sandbox);
    assert_owned_by(&house, new);
    // One at a time.
    assert!(!other.serves() && other.is_running());
    new.kill();
    assert_takes_over(other);
    assert_kept(&other.client(), &sandbox);
    clear_away(&house, &other.client());
}

/// The rule's bound, which begins when the heartbeat lapses: counted from the kill, and asked of the best of a few, since
/// a machine that is loaded may be late with anything.
#[test]
fn j8_a_standby_serves_within_three_seconds() {
    const RULE: Duration = Duration::from_secs(3);
    let house = House::new();
    let mut owner = house.start();
    let sandbox = create(&owner.client());
    let took = [(); 3].map(|()| {
        let mut standby = house.stand_by();
        let killed_at = Instant::now();
        owner.kill();
        assert_takes_over(&mut standby);
        let took = killed_at.elapsed();
        assert_kept(&standby.client(), &sandbox);
        owner = standby;
        took
    });
    assert!(took.iter().any(|took| *took < RULE), "{took:?}");
    clear_away(&house, &owner.client());
}

#[test]
fn j8_a_standby_kills_an_owner_that_hangs() {
    let house = House::new();
    let mut owner = house.start();
    let sandbox = create(&owner.client());
    let mut standby = house.stand_by();
    owner.signal(Signal::STOP);
    assert_takes_over(&mut standby);
    owner.assert_killed();
    assert_kept(&standby.client(), &sandbox);
    assert_owned_by(&house, &standby);
    clear_away(&house, &standby.client());
}

#[test]
fn j8_a_standby_kills_an_owner_that_is_frozen() {
    let Some(freezer) = Freezer::find(FreezerKind::LetsDie) else { return };
    let house = House::new();
    let mut owner = house.start();
    let sandbox = create(&owner.client());
    let mut standby = house.stand_by();
    freezer.freeze(&owner);
    assert_takes_over(&mut standby);
    owner.assert_killed();
    assert_kept(&standby.client(), &sandbox);
    clear_away(&house, &standby.client());
}

/// Keeps the owner writing until it does not answer any more.
fn keep_writing(client: Client, sandbox: Sandbox) {
    let request = TakeKeepAwake { ttl_ms: TtlMs::nearest(60_000), reason: None };
    std::thread::spawn(move || {
        for count in 0_u64.. {
            let lease = LeaseName::new(format!("load-{}", count % 4)).unwrap();
            if client.sandbox(&sandbox.id).keep_awake(&lease, &request).is_err() {
                return;
            }
        }
    });
}

/// Freezes an owner that cannot be ended then, lets another take over and change things, and thaws it.
fn a_frozen_owner_does_no_harm(writing: bool) {
    let Some(freezer) = Freezer::find(FreezerKind::HoldsTheDead) else { return };
    let house = House::new();
    let mut owner = house.start();
    let (stopped, kept) = (create(&owner.client()), create(&owner.client()));
    if writing {
        for _ in 0..4 {
            keep_writing(owner.client(), kept.clone());
        }
        let before = owner.client().sandbox(&kept.id).get().unwrap().version;
        support::eventually("it writes", || owner.client().sandbox(&kept.id).get().unwrap().version > before + 20);
    }
    let mut standby = house.stand_by();
    freezer.freeze(&owner);
    assert_takes_over(&mut standby);
    assert!(is_alive(owner.pid()), "it was to be frozen, and is gone");
    let client = standby.client();
    client.sandbox(&stopped.id).stop(&StopSandbox::default()).unwrap();
    assert_eq!(settled(&client, &stopped.id).phase, Phase::Stopped);
    let new = create(&client);
    assert_kept(&client, &kept);

    freezer.thaw();
    owner.assert_killed();
    assert!(standby.is_running() && standby.serves(), "{}", standby.said());
    // Now nobody else holds a lock, so the new owner has to have its own.
    assert_owned_by(&house, &standby);
    assert_eq!(client.sandbox(&stopped.id).verify().unwrap().phase, Phase::Stopped);
    assert_kept(&client, &kept);
    assert_kept(&client, &new);
    // All of it is in the file, too.
    standby.kill();
    let again = house.start();
    let client = again.client();
    assert_eq!(client.sandbox(&stopped.id).get().unwrap().phase, Phase::Stopped);
    assert_kept(&client, &kept);
    assert_kept(&client, &new);
    assert_eq!(all(&client).len(), 3);
    clear_away(&house, &client);
}

#[test]
fn j8_a_frozen_owner_that_cannot_be_killed_is_replaced_and_does_no_harm_when_it_thaws() {
    a_frozen_owner_does_no_harm(false);
}

#[test]
fn j8_an_owner_that_was_frozen_while_it_wrote_holds_nobody() {
    a_frozen_owner_does_no_harm(true);
}

/// Keeps the owner making and ending sandboxes until it does not answer any more.
fn keep_making(client: Client) {
    std::thread::spawn(move || {
        while let Ok(made) = client.create(&CreateSandbox::default(), None) {
            if client.sandbox(&made.into_sandbox().id).delete(None).is_err() {
                return;
            }
        }
    });
}

#[test]
fn j8_an_owner_that_was_frozen_while_it_made_and_ended_sandboxes_holds_nobody() {
    let Some(freezer) = Freezer::find(FreezerKind::HoldsTheDead) else { return };
    let house = House::with_config("[reconcile]\ntidy_s = 1");
    let mut owner = house.start();
    let kept = create(&owner.client());
    for _ in 0..4 {
        keep_making(owner.client());
    }
    support::eventually("some were made", || all_that_were(&owner.client()) > 8);
    let mut standby = house.stand_by();
    freezer.freeze(&owner);
    assert_takes_over(&mut standby);
    let client = standby.client();
    assert_kept(&client, &kept);
    // Whatever the frozen one had locked, others can be made and ended.
    let made: Vec<Sandbox> = (0..8).map(|_| create(&client)).collect();
    for sandbox in &made[..4] {
        client.sandbox(&sandbox.id).stop(&StopSandbox::default()).unwrap();
        assert_eq!(settled(&client, &sandbox.id).phase, Phase::Stopped);
    }

    freezer.thaw();
    owner.assert_killed();
    assert!(standby.is_running() && standby.serves(), "{}", standby.said());
    assert_kept(&client, &kept);
    for sandbox in &made[4..] {
        assert_kept(&client, sandbox);
    }
    clear_away(&house, &client);
}

/// How many there ever were, deleted ones too.
fn all_that_were(client: &Client) -> usize {
    client.list_all(ListSandboxes { all: true, ..ListSandboxes::default() }).count()
}
