//! What must hold in every world: named, each with the rule that it comes from, in one table.
//!
//! ```text
//!   change    every record, row, schedule and lease, as it is written: before and after
//!   picture   all that is recorded beside all that is really there, after every step
//!   answer    what a client was told, when it is told
//!   rest      when faults have stopped, and time has passed
//! ```

mod change;
mod picture;
#[cfg(test)]
mod picture_tests;
mod rest;
mod task;
#[cfg(test)]
mod task_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world_tests;

use std::cell::Cell;
use std::fmt;

pub(crate) use change::Changes;
pub(crate) use picture::Picture;

/// When something is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// With everything that is written.
    Change,
    /// After every step.
    Step,
    /// When a client is answered.
    Answer,
    /// At the end, when faults have stopped.
    Rest,
}

impl When {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Change => "change",
            Self::Step => "step",
            Self::Answer => "answer",
            Self::Rest => "rest",
        }
    }
}

/// Something that must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Invariant {
    /// What it is called.
    pub name: &'static str,
    /// The rule of the specification.
    pub rule: &'static str,
    /// When it is looked at.
    pub when: When,
    /// What it says.
    pub says: &'static str,
}

/// What was found, by the name of what it breaks.
pub(crate) type Found = Result<(), (&'static str, String)>;

macro_rules! invariants {
    ($($name:literal $rule:literal $when:ident $says:literal;)*) => {
        /// All of them.
        pub const INVARIANTS: &[Invariant] =
            &[$(Invariant { name: $name, rule: $rule, when: When::$when, says: $says },)*];
    };
}

invariants! {
    "version-counts" "T1" Change "a record's version grows by one with every change of it";
    "begins-with-intent" "L1" Change "a new record is of the first generation, wanted, and has an entry";
    "generation-grows" "T5" Change "a generation stays or grows by one";
    "same-instance-same-generation" "T5" Change "a thaw, and being found again after being lost, keep the generation";
    "entry-makes" "L4" Change "a new generation is begun only for an entry";
    "entry-is-answered" "L3" Change "an entry goes only when it is answered, or somebody wants it at rest or gone";
    "verified-before-ready" "T2" Change "ready is entered only from verifying";
    "ready-on-evidence" "T2" Change "ready is entered only on checks that were all well, of this generation and these starts of its services";
    "moves-have-causes" "T10" Change "every transition has a line with its phases, its cause and its time";
    "absence-before-rest" "L8" Change "stopped is entered only from stopping, hibernated only from where its instance was cleared";
    "gone-for-ever" "L9" Change "what is wanted gone is never wanted otherwise, and never comes back";
    "deleted-for-ever" "L9" Change "what was deleted stays deleted";
    "stopped-is-the-end" "L9" Change "nothing happens to what is stopped but its deletion";
    "held-until-asked" "L9" Change "what a user stopped is let go only by a user";
    "held-by-a-stop" "L9" Change "only a user's stop holds anybody: after hibernating, whoever may wake it still does";
    "held-is-not-wanted" "L9" Change "what a user stopped is not wanted to run";
    "saving-never-runs-on" "L10" Change "what is being saved, or could not be, does not run on, but for what was frozen, and whose memory did not go to disk for room";
    "three-findings" "T7" Change "an instance is given up for what probes found only after three findings over ten seconds";
    "timeouts-replace-nothing" "T7" Change "what only does not answer is lost or failed, and not replaced";
    "one-look-is-not-enough" "T7" Change "a finding leads from ready to verifying, never further";
    "idle-after-its-window" "L5" Change "nobody is put to rest for idling before the window has passed since its last use";
    "kept-awake-is-not-idle" "L7" Change "nobody is put to rest for idling before what keeps it awake has run out";
    "reset-keeps-nothing" "L12" Change "when what was to begin anew does so, none of its snapshots is left but those that others begin with";
    "policy-stays" "L16" Change "policy, spec (but for limits), name, project and labels survive every verb";
    "goes-back-where-asked" "L11" Change "what goes back begins with the snapshot that was asked for";
    "what-is-over-holds-nothing" "L20" Change "what is stopped has no entry, no deadline and nothing that keeps it awake";
    "tokens-grow" "L15" Change "a lease is renewed under its token, or taken under one greater than all before; so is a token that nobody holds";
    "leases-of-the-living" "L20" Change "nobody takes a lease on what is stopped";
    "owner-writes" "J8" Change "only who owns the store writes to it";
    "in-use-stays" "L11" Change "a snapshot that somebody begins with is not removed";
    "snapshots-go-one-way" "L11" Change "a row goes from saving to ready to removing, and its version grows by one";
    "one-run-at-a-time" "L17" Change "a run of a schedule is accounted for before the next one begins";
    "an-occurrence-once" "L17" Change "each occurrence of a schedule becomes at most one run, and times only grow";
    "a-run-in-one-generation" "L17" Change "a run that was begun in one generation is not begun in another";
    "expiry-is-fetched" "T6" Change "nobody is called expired whose instance lives";
    "absence-is-seen" "T7" Change "nothing is called gone at its provider that lives";
    "ends-are-told-apart" "X6" Change "what is lost because it ended by itself is so for the cause with which it ended";
    "at-work-is-not-idle" "L6" Change "nobody is put to rest for idling while a command runs in the foreground";
    "saved-while-it-was-there" "L11" Change "a snapshot of what was deleted meanwhile never becomes ready";
    "executions-go-one-way" "X1" Change "what was started does not wait to be started any more";
    "executions-end-once" "X1" Change "an execution whose end was told has that end for ever";
    "tasks-count" "K1" Change "a task's version grows by one, and its steps are taken one after the other";
    "tasks-end-once" "K1" Change "a task that is over is changed only by being continued, which is another run";
    "tasks-end-as-told" "K1" Change "a task ends as it was to end, or as effect_unknown exactly when that is so";
    "an-end-is-kept" "K2" Change "what a task is to end as is not changed or withdrawn in that run";
    "nothing-begins-after-the-end" "K2" Change "a task that is to end starts nothing more";
    "no-grant-after-the-end" "K5" Change "a task that is to end is granted nothing more";
    "grants-are-declared" "K5" Change "an effect is granted if it was declared, and again only if it failed or is repeatable";
    "one-effect-at-a-time" "K5" Change "one effect at most is in flight";
    "outcomes-stay" "K5" Change "what an effect came to stays, and a grant is never forgotten";
    "over-is-settled" "K5" Change "a task that is over has no effect in flight";
    "intent-before-instance" "L1" Step "no instance is there without a record, or of a generation that no record has";
    "one-generation-lives" "L15" Step "nothing older than the record's generation lives";
    "superseded-changes-nothing" "L15" Step "who has a lesser token than somebody before changes nothing at the provider";
    "stopped-is-absent" "L8" Step "of what is stopped there is no instance";
    "hibernated-is-absent" "L10" Step "of what is hibernated there is no instance";
    "failed-leaves-nothing" "J5" Step "of what failed and was cleared there is no instance";
    "ready-snapshots-exist" "L10" Step "a snapshot whose row is ready is at the provider";
    "begins-with-what-is-there" "L11" Step "what a record begins with has a row that is ready";
    "schedules-of-the-living" "L20" Step "what is stopped has no schedules";
    "names-are-unique" "L2" Step "no two living sandboxes of a project have one name";
    "quota-holds" "L18" Step "no more may live, what is being ended and has no instance left out, than the quota allows";
    "acknowledged-stays" "L1" Step "what was acknowledged has a record for ever";
    "acknowledged-work-stays" "L10" Step "a file whose writing into a persistent sandbox was acknowledged is there whenever that is ready, unless somebody went back, began anew or discarded";
    "started-in-one-generation" "X1" Step "no command is started in two generations";
    "drained-stays-drained" "L21" Step "once a drain was told to be complete, nothing runs until it is taken back";
    "over-tasks-run-nothing" "K2" Step "nothing that a task started runs in a ready sandbox once it is over";
    "one-task-at-work" "K1" Step "one task at most is at work in a sandbox";
    "strays-have-grace" "J1" Step "what has no record is collected only after the grace, and two listings that have it";
    "foreign-is-left-alone" "J1" Step "what is not ours is never touched";
    "left-alone" "J7" Step "who refused five calls in a row, about three sandboxes or more, is asked nothing for five seconds";
    "damaged-is-not-begun-with" "L10" Step "nothing begins with a snapshot that is damaged";
    "room-keeps-memory" "L13" Step "what goes to disk only because memory is short goes with its memory, or stays frozen (worlds without faults)";
    "stuck-is-noticed" "J7" Step "a phase past its deadline is noticed within two minutes (worlds without faults)";
    "ends-at-its-deadline" "L5" Step "nothing lives two minutes past its hard deadline (worlds without faults)";
    "nothing-panics" "P1" Step "nothing panics, in any task of a daemon";
    "one-key-one-sandbox" "L1" Answer "a key with the same body makes one sandbox";
    "durable-before-answer" "L8" Answer "what is answered is recorded";
    "refusals-are-known" "S5" Answer "a create is refused only for quota, name, snapshot, drain or a store that fails";
    "ready-is-shown-on-evidence" "T3" Answer "ready is shown only on checks that were well within 30 s";
    "ends-are-shown" "T3" Answer "what has ended is not shown as ready a second later (worlds without faults)";
    "old-handles-are-refused" "T5" Answer "a handle of one generation is never given another";
    "verbs-reach-what-they-name" "T5" Change "a verb that names a generation changes that one, or nothing";
    "shown-generations-stay" "T5" Answer "a generation that was shown is never undone";
    "stop-is-taken" "L8" Answer "after an acknowledged stop it is not wanted to run";
    "ephemeral-is-not-saved" "L2" Answer "what is not persistent is not saved by hibernating";
    "nothing-enters-what-is-gone" "L9" Answer "no entry is taken into what was deleted, or stopped and not persistent";
    "delete-is-legal" "L20" Answer "a delete is refused in no phase";
    "reads-change-nothing" "T9" Answer "a read changes no record, no activity, and nothing at the provider";
    "draining-takes-nothing" "L21" Answer "while the daemon is drained, no create and no ensure is taken";
    "undrained-takes-work" "L21" Answer "a daemon that nobody drained, or that was undrained, takes new work";
    "probed-before-use" "T4" Answer "a handle is given by a daemon that has probed this generation";
    "a-reconnect-joins" "L4" Answer "who comes with a handle gets nothing that rests, unless somebody else woke it";
    "stops-of-tasks-are-durable" "K2" Answer "an acknowledged stop of a task is recorded, or it was over";
    "stops-of-tasks-are-soon" "K3" Step "a task that was stopped is over within a minute (worlds without faults)";
    "silent-tasks-end" "K4" Step "a step that says nothing runs for its window and 20 s at most (worlds without faults)";
    "tasks-end-in-time" "K4" Step "a task is over within a minute of the time that it may take in all (worlds without faults)";
    "damaged-is-refused" "L10" Answer "who asks for a damaged snapshot is told so (worlds without faults)";
    "forks-are-all-there" "L11" Answer "of an acknowledged fork all are there";
    "comes-to-rest" "P3" Rest "when faults stop, everything is where it is wanted, lost or failed, in bounded time";
    "no-entry-waits" "L3" Rest "no entry waits that nobody works on";
    "rest-is-real" "P3" Rest "what is ready runs, and what is frozen stands still, at the provider";
    "lost-is-not-there" "P3" Rest "what is lost does not live at the provider, unless a service of it was given up";
    "nothing-is-at-work" "P3" Rest "no driver is at work, and no run of a schedule is under way";
    "nothing-is-changed" "P3" Rest "at rest nothing is changed at the provider";
    "nothing-is-recorded" "P3" Rest "at rest nothing is recorded";
    "unused-goes-to-rest" "L6" Rest "what nobody used for its window rests, however often it was looked at";
    "tasks-come-to-rest" "P3" Rest "every task is over";
    "any-path-same-state" "P4" Rest "whatever happened to a sandbox, the same wishes lead it where they lead a new one";
    "no-orphans" "J1" Rest "no instance is without its record";
    "rows-are-what-is-there" "L11" Rest "rows of snapshots and what the provider has are the same";
    "deleted-leaves-no-rows" "L11" Rest "what was deleted has no snapshots but those that others begin with";
    "gone-holds-no-lease" "L20" Rest "nobody holds a lease on what is stopped";
    "services-run" "L14" Rest "every service of what is ready runs";
    "listed-executions-run" "X5" Rest "what is listed as running runs, in the instance that there is";
    "drain-ends" "L21" Rest "a drain comes to its end";
}

/// What must not have been.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// In which world.
    pub seed: u64,
    /// When.
    pub step: u64,
    /// What was broken.
    pub name: &'static str,
    /// Its rule.
    pub rule: &'static str,
    /// What was seen.
    pub what: String,
    /// What had happened before, the last of it last.
    pub timeline: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, step, name, rule, what, .. } = self;
        write!(f, "seed {seed} step {step}: {rule} {name}: {what}")
    }
}

/// The rule of what is called so.
pub(crate) fn rule(name: &str) -> &'static str {
    let invariant = INVARIANTS.iter().find(|invariant| invariant.name == name);
    invariant.unwrap_or_else(|| panic!("{name} is in no table")).rule
}

thread_local! {
    /// How often something was looked at. A world has one thread.
    static CHECKS: Cell<u64> = const { Cell::new(0) };
}

/// How often something was looked at since this was asked last.
pub(crate) fn checks() -> u64 {
    CHECKS.take()
}

/// Says what is broken unless this holds.
pub(crate) fn holds(name: &'static str, so: bool, what: impl FnOnce() -> String) -> Found {
    CHECKS.set(CHECKS.get() + 1);
    if so { Ok(()) } else { Err((name, what())) }
}
