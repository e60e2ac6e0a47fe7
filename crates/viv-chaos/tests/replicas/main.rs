//! Two and three replicas, a store, a provider and one sandbox, in every order in which things can happen (P7).
//!
//! What is explored is not a drawing of the code but the code: records change by `viv_core::lifecycle::step`, effects are
//! what `outstanding` names, leases are granted by `viv_store::grant`, and the provider admits by `viv_core::fence`. Calls
//! arrive at any time or never, and once more; answers come late or not at all; time passes whenever it can; replicas
//! take over while others believe that they own.

#[path = "../page/mod.rs"]
mod page;
mod world;

use stateright::{Checker, HasDiscoveries, Model, Property};
use world::{Action, Broken, Scope, World, Wrong};

/// What is explored: how many replicas, what goes wrong, and what is broken on purpose.
#[derive(Debug, Clone, Copy)]
struct Replicas {
    scope: Scope,
    broken: Option<Broken>,
}

impl Model for Replicas {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.scope)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        world.actions(&self.scope, actions);
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        next.act(&action, self.broken);
        (next != *world).then_some(next)
    }

    fn within_boundary(&self, world: &World) -> bool {
        world.is_within(&self.scope)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("L8: what is stopped has no instance", |_, world: &World| {
                !world.record().is_over() || world.instance().is_none()
            }),
            Property::always("L10: what is hibernated has no instance", |_, world: &World| {
                !world.is_hibernated() || world.instance().is_none()
            }),
            Property::always("L1: no instance without an intent", |_, world: &World| {
                world.instance().is_none_or(|instance| instance.generation <= world.record().generation)
            }),
            Property::always("L15: nothing older than the record's generation lives", |_, world: &World| {
                world.instance().is_none_or(|instance| instance.generation >= world.record().generation)
            }),
            Property::always(
                "L15: who was superseded changes nothing once the new owner was there",
                |_, world: &World| !world.went_wrong(Wrong::ChangedByTheLate),
            ),
            Property::always("L15: a token is greater than all before it", |_, world: &World| {
                !world.went_wrong(Wrong::TokenRepeated)
            }),
            Property::always("J8: only the owner writes", |_, world: &World| {
                !world.went_wrong(Wrong::WrittenByTheLate)
            }),
            Property::always("L9: what was deleted is wanted gone for ever", |_, world: &World| {
                !world.was_deleted || world.is_wanted_gone()
            }),
            Property::sometimes("it becomes ready", |_, world: &World| world.is_ready()),
            Property::sometimes("it is stopped", |_, world: &World| world.record().is_over()),
        ];
        if self.scope.operations > Scope::default().operations {
            properties.push(Property::sometimes("a second generation becomes ready", |_, world: &World| {
                world.is_ready() && world.record().generation.0 == 2
            }));
        }
        properties
    }
}

fn explore(replicas: Replicas) -> impl Checker<Replicas> {
    replicas.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join()
}

/// How many states there were; docs/proof.md tells of so many.
fn holds(scope: Scope) -> usize {
    let checker = explore(Replicas { scope, broken: None });
    checker.assert_properties();
    println!("{scope:?}: {} states", checker.unique_state_count());
    checker.unique_state_count()
}

#[test]
fn p7_two_replicas_never_make_two_of_one() {
    let states = holds(Scope { wishes: 2, ..Scope::default() });
    page::counts("two replicas, two wishes", states);
}

#[test]
fn p7_two_replicas_replace_what_died_once() {
    let states = holds(Scope { deaths: 1, operations: 6, ..Scope::default() });
    page::counts("two replicas, an instance dies and is replaced", states);
}

#[test]
fn p7_two_replicas_save_and_resume() {
    let states = holds(Scope { is_persistent: true, wishes: 2, operations: 6, ..Scope::default() });
    page::counts("two replicas, saved and resumed", states);
}

#[test]
fn p7_calls_that_arrive_twice_do_their_work_once() {
    let states = holds(Scope { arrivals: 2, ..Scope::default() });
    page::counts("two replicas, calls that arrive twice", states);
}

#[test]
fn p7_three_replicas_never_make_two_of_one() {
    let scope = Scope { replicas: 3, takeovers: 3, operations: 3, ..Scope::default() };
    page::counts("three replicas, two takeovers", holds(scope));
    if std::env::var_os("VIV_MODEL_WIDE").is_some() {
        page::counts("the same, one operation more (`make model`)", holds(Scope { operations: 4, ..scope }));
    }
}

/// A model in which nothing can go wrong shows nothing.
#[test]
fn p2_each_rule_that_is_left_out_is_missed() {
    for broken in Broken::ALL {
        let checker = explore(Replicas { scope: Scope::default(), broken: Some(broken) });
        let found: Vec<&str> = checker
            .discoveries()
            .keys()
            .copied()
            .filter(|name| checker.discovery_classification(name).to_string() == "counterexample")
            .collect();
        assert!(!found.is_empty(), "without {broken:?} everything still holds");
        println!("without {broken:?}: {found:?}");
    }
}
