//! What a world is like. Each seed has its own: some things never happen in it, some happen often (swarm testing), so
//! that rare combinations come up which an even mixture would drown.

use std::collections::BTreeSet;

use viv_engine::Gates;

use crate::rng::Rng;

macro_rules! kinds {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $kind:ident = $word:literal $weight:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$of])* $kind,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$kind,)*];

            /// The word for it.
            pub fn word(self) -> &'static str {
                match self { $(Self::$kind => $word,)* }
            }

            /// How often it happens when nothing is said about it.
            pub(crate) fn weight(self) -> u64 {
                match self { $(Self::$kind => $weight,)* }
            }
        }
    };
}

kinds!(
    /// What is done in a world: by clients, to instances, to daemons.
    Deed {
        /// A new sandbox, asked for up to three times with one key.
        Create = "create" 12,
        /// A new sandbox from a snapshot.
        CreateFrom = "create from a snapshot" 2,
        /// Somebody wants it to run.
        Ensure = "ensure" 14,
        /// And what is frozen to go on.
        Thaw = "thaw" 2,
        /// And to stand still.
        Freeze = "freeze" 4,
        /// And to be saved.
        Hibernate = "hibernate" 3,
        /// And to be stopped.
        Stop = "stop" 6,
        /// A save that failed is tried again.
        RetrySave = "stop --retry" 2,
        /// Or given up.
        Discard = "stop --discard" 1,
        /// It is to be gone.
        Delete = "delete" 4,
        /// It is looked at.
        Read = "read" 8,
        /// It is looked at, and probed for that.
        Verify = "verify" 5,
        /// All are looked at.
        List = "list" 2,
        /// A short command, by a handle that may be old.
        Execute = "exec" 6,
        /// A command that wakes what sleeps.
        ExecuteWaking = "exec --wake" 3,
        /// A command that takes its time.
        Work = "exec, long" 2,
        /// A file is written.
        Write = "file write" 5,
        /// Its deadline is moved.
        Extend = "extend" 3,
        /// Its limits are changed.
        Limit = "limits" 2,
        /// It is kept from idling.
        KeepAwake = "keep-awake" 2,
        /// A snapshot is made of it.
        Snapshot = "snapshot" 4,
        /// A snapshot is removed.
        RemoveSnapshot = "snapshot rm" 2,
        /// It goes back to a snapshot.
        Rollback = "rollback" 2,
        /// Others begin where it is.
        Fork = "fork" 1,
        /// It begins anew.
        Reset = "reset" 1,
        /// Something is to run in it every minute or two.
        Schedule = "schedule" 2,
        /// And now.
        RunSchedule = "schedule run" 1,
        /// And not any more.
        RemoveSchedule = "schedule rm" 1,
        /// No new work is taken.
        Drain = "drain" 2,
        /// It is again.
        Undrain = "undrain" 4,
        /// A task runs in it, or in one of its own.
        Task = "task" 4,
        /// And is to stop.
        StopTask = "task stop" 4,
        /// And to go on.
        ContinueTask = "task continue" 2,
        /// Somebody has everything compared.
        Reconcile = "reconcile" 2,
        /// Time passes.
        Wait = "wait" 14,
        /// Its instance ends by itself.
        Crash = "an instance ends" 5,
        /// Its agent answers nothing.
        Hang = "an agent hangs" 4,
        /// Its root filesystem is gone.
        LoseRoot = "a root is lost" 3,
        /// Asked about it, the provider does not know it.
        Deny = "an instance is denied" 2,
        /// Asked about it, the provider says that it runs, whatever it does.
        Pose = "an instance is said to run" 2,
        /// It is whole again.
        Mend = "an instance is mended" 5,
        /// One of its services is killed.
        KillService = "a service is killed" 3,
        /// There is an instance of ours that nobody knows of, as after records were restored from a backup.
        Stray = "an instance without a record appears" 1,
        /// And one of somebody else's.
        Foreign = "an instance of somebody else's appears" 1,
        /// A snapshot is not what was saved any more.
        DamageSnapshot = "a snapshot is damaged" 1,
        /// What is saved for a while is so without its memory.
        RefuseDumps = "no memory can be saved" 2,
        /// The machine has hardly any left for a while.
        ShortMemory = "memory is short" 3,
        /// The provider's clock shows a later time from now on, in worlds where clocks jump.
        SetClock = "the provider's clock is set" 1,
        /// A daemon ends in order, and another one begins.
        Restart = "a daemon is restarted" 1,
        /// A daemon is killed where it is.
        Kill = "a daemon is killed" 2,
        /// A daemon is killed at one of its next calls, before or after that has its effect.
        KillAtCall = "a daemon is killed at a call" 3,
        /// A daemon is stopped, another one takes over, and the first goes on.
        Stall = "a daemon is away for a while" 1,
        /// No call reaches the provider.
        Partition = "the provider is cut off" 1,
        /// Every call is refused at once: nobody is there.
        Outage = "the provider is down" 2,
        /// No write of the store succeeds.
        FillDisk = "the disk is full" 1,
    }
);

impl Deed {
    /// Whether only every second world has it at all.
    fn is_rare(self) -> bool {
        matches!(
            self,
            Self::Pose | Self::DamageSnapshot | Self::RefuseDumps | Self::ShortMemory | Self::SetClock | Self::Outage
        )
    }

    /// Whether it is a wish that is written into the record, and nothing that goes to the instance by a handle.
    pub(crate) fn is_written(self) -> bool {
        let wishes = Self::Ensure..=Self::Delete;
        wishes.contains(&self)
            || matches!(self, Self::KeepAwake | Self::Snapshot | Self::Rollback | Self::Fork | Self::Reset)
    }

    /// Whether it is nobody's wish.
    pub fn is_fault(self) -> bool {
        self >= Self::Crash && self != Self::Mend
    }
}

kinds!(
    /// What goes wrong with single calls, and what sandboxes have that make life harder. The weight is in percent of
    /// the worlds.
    Trouble {
        /// A call never arrives.
        Lost = "lost" 60,
        /// A call is done, and its answer lost.
        Unanswered = "unanswered" 60,
        /// A call arrives twice.
        Twice = "twice" 60,
        /// A call is done later, whoever waits for it.
        Late = "late" 60,
        /// A call is done at once, and answered later.
        LateAnswer = "answered late" 60,
        /// Nobody is there.
        Unavailable = "unavailable" 60,
        /// A listing has a part only, and says so.
        PartialListing = "partial listing" 50,
        /// A listing is as it was some listings ago.
        StaleListing = "stale listing" 40,
        /// The end of an instance is not pushed.
        UnheardEnd = "unheard end" 30,
        /// A stream of what is asked inside breaks before the next question is heard.
        BrokenStream = "broken stream" 40,
        /// The store fails before its effect.
        StoreBefore = "store before" 50,
        /// The store fails after its effect.
        StoreAfter = "store after" 50,
        /// The store takes its time.
        SlowStore = "slow store" 40,
        /// The clock of the next daemon shows another time.
        ClockJump = "clock jump" 15,
        /// Sandboxes have services.
        Services = "services" 40,
        /// And hooks.
        Hooks = "hooks" 30,
        /// And names.
        Names = "names" 40,
        /// And lives of minutes.
        ShortLives = "short lives" 50,
        /// And windows of idling of seconds.
        Idling = "idling" 60,
        /// Few may run at once.
        Quota = "quota" 30,
        /// Clients do not wait for each other.
        Races = "races" 60,
        /// What has no record is collected when two listings agree, and not later.
        Hasty = "no orphan grace" 50,
        /// Memory is saved with the files of some.
        Memory = "memory" 40,
    }
);

impl Trouble {
    /// Whether something goes wrong; else it is how sandboxes and clients are.
    pub fn is_fault(self) -> bool {
        self <= Self::ClockJump
    }
}

/// How a world is made.
#[derive(Debug, Clone)]
pub struct Plan {
    /// From this everything follows.
    pub seed: u64,
    /// How many things happen.
    pub steps: u64,
    /// How many calls in a hundred go wrong.
    pub faults_percent: u64,
    /// Which protections are on.
    pub gates: Gates,
    /// What does not happen, to find out what is needed for a violation.
    pub without: Without,
    /// In what is recorded.
    pub store: StoreKind,
    /// Whether it comes to rest, and what holds then is looked at.
    pub rests: bool,
}

/// Which store a world has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreKind {
    /// That in memory.
    Memory,
    /// That in a SQLite file, with its threads: each call is waited for where it is made, so that a world replays.
    Sqlite,
}

/// What is left out of a world.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Without {
    /// These are not done.
    pub deeds: BTreeSet<Deed>,
    /// These do not go wrong.
    pub troubles: BTreeSet<Trouble>,
}

impl Plan {
    /// The world of this seed, as `make simulate` has it: 200 steps, and every third one without calls that go wrong, where
    /// bounds in time are checked.
    pub fn of(seed: u64) -> Self {
        let faults_percent = match seed % 3 {
            0 => 0,
            1 => 6,
            _ => 20,
        };
        let (gates, without) = (Gates::default(), Without::default());
        Self { seed, steps: 200, faults_percent, gates, without, store: StoreKind::Memory, rests: true }
    }

    /// The same over the store that ships, for one seed in 31: it takes ten times as long, and comes to the same journal.
    /// A number that is no multiple of 2 or 3, so that these have every rate of faults.
    pub fn mixed(seed: u64) -> Self {
        let store = if seed % 31 == 30 { StoreKind::Sqlite } else { StoreKind::Memory };
        Self { store, ..Self::of(seed) }
    }
}

/// Sets the numbers apart by which it is drawn whether a world has what is rare.
const RARE: u64 = 0x7261_7265;

/// What happens in a world, and how often.
#[derive(Debug, Clone)]
pub(crate) struct Swarm {
    deeds: Vec<(Deed, u64)>,
    troubles: BTreeSet<Trouble>,
}

impl Swarm {
    /// Drawn from a world's numbers. What is left out is drawn too, so that the rest stays as it is.
    pub(crate) fn draw(plan: &Plan, rng: &mut Rng) -> Self {
        let mut deeds = Vec::new();
        for deed in Deed::ALL {
            if deed.is_rare() {
                continue;
            }
            let always = matches!(deed, Deed::Create | Deed::Ensure | Deed::Wait | Deed::Mend | Deed::Undrain);
            let factor = match rng.below(10) {
                0..3 => 0,
                3..8 => 1,
                _ => 4,
            };
            let factor = if always { 1.max(factor) } else { factor };
            if factor > 0 && !plan.without.deeds.contains(deed) {
                deeds.push((*deed, deed.weight() * factor));
            }
        }
        let mut troubles = BTreeSet::new();
        for trouble in Trouble::ALL.iter().filter(|trouble| **trouble != Trouble::BrokenStream) {
            if rng.chance(trouble.weight()) && !plan.without.troubles.contains(trouble) {
                troubles.insert(*trouble);
            }
        }
        // By numbers of its own: half of the worlds have nothing of this, and are as they were before there was any of it.
        let mut own = Rng::new(plan.seed ^ RARE);
        let has_rare = own.chance(50);
        for deed in Deed::ALL.iter().filter(|deed| deed.is_rare()) {
            let factor = [0, 1, 1, 4][own.below(4) as usize];
            if has_rare && factor > 0 && !plan.without.deeds.contains(deed) {
                deeds.push((*deed, deed.weight() * factor));
            }
        }
        let breaks = own.chance(Trouble::BrokenStream.weight());
        if has_rare && breaks && !plan.without.troubles.contains(&Trouble::BrokenStream) {
            troubles.insert(Trouble::BrokenStream);
        }
        // What only some worlds can have.
        let can = |deed: Deed| match deed {
            Deed::RefuseDumps | Deed::ShortMemory => troubles.contains(&Trouble::Memory),
            Deed::SetClock => troubles.contains(&Trouble::ClockJump),
            // Where no call goes wrong, bounds in time are looked at, and these would leave little to look at.
            Deed::Outage | Deed::Pose => plan.faults_percent > 0,
            _ => true,
        };
        deeds.retain(|(deed, _)| can(*deed));
        Self { deeds, troubles }
    }

    pub(crate) fn has(&self, trouble: Trouble) -> bool {
        self.troubles.contains(&trouble)
    }

    /// What happens next.
    pub(crate) fn next(&self, rng: &mut Rng) -> Deed {
        let sum = self.deeds.iter().map(|(_, weight)| weight).sum();
        let mut at = rng.below(sum);
        for (deed, weight) in &self.deeds {
            if at < *weight {
                return *deed;
            }
            at -= weight;
        }
        Deed::Wait
    }
}
