//! Bugs that can be planted, one at a time, to see that they are caught (P1).
//!
//! Each has one place in the code where [`is_planted`] is asked. Without the feature `planted`, which only the tests of
//! `viv-chaos` have, the answer is a constant and nothing of it is in the program. With it, the answer is that of this
//! thread: a simulated world has one.

macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident = $says:literal,)*) => {
        /// A bug that somebody could make.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Planted {
            $(#[doc = $says] $bug,)*
        }

        impl Planted {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$bug,)*];

            /// What it does.
            pub fn says(self) -> &'static str {
                match self { $(Self::$bug => $says,)* }
            }
        }
    };
}

bugs! {
    NoTokenFence = "a provider takes changes from who was superseded",
    BuriedIsMade = "a provider makes a generation that was destroyed",
    AbsenceUnseen = "a destroy that failed, or was not answered, is taken for absence",
    FailedListIsEmpty = "a listing that failed is read as an empty one, and believed",
    PartialListIsWhole = "a partial listing is read as a whole one, and believed",
    NoOrphanGrace = "what has no record is collected when it is first seen",
    ProbeIsActivity = "a probe counts as use",
    IdleUnread = "an idle decision is carried out without reading activity again",
    StoredExpiry = "the stored copy of a deadline is taken for the deadline",
    ChainedResume = "what was saved is resumed, and nobody asked",
    ReadResumes = "a read of what sleeps wakes it",
    HeldForgotten = "a schedule wakes what a user stopped",
    StopDroppedWhenBusy = "a stop during a transition is dropped",
    StopUnwritten = "a stop is answered before it is recorded",
    EntryForgotten = "an entry that came during a save is forgotten",
    ReadyUnverified = "what was made is called ready before it was probed",
    OneFindingKills = "one bad finding is enough to give an instance up",
    SilentIsReplaced = "an instance that only does not answer is replaced",
    ReplacedUnsealed = "an instance is replaced before its files were saved",
    FailedSaveRunsOn = "a save that failed lets the sandbox run on",
    PolicyReset = "a resume sets the policy back to its default",
    NoGenerationCheck = "a handle of another generation is taken",
    VerbUnaimed = "a verb that names a generation is carried out on another one",
    MoveWithoutLine = "a transition is recorded without its line in the journal",
    NoCompare = "a record is written over one that was changed meanwhile",
    SupersededWrites = "a daemon that lost the store still writes to it",
    TokenReused = "a lease is taken under a token that was given before",
    LeaseOutlivesDelete = "the lease on what is over is kept",
    ScheduleOutlivesDelete = "the schedules of what is over are kept",
    QuotaUncounted = "a create is not counted",
    KeyForgotten = "the key of a create is not remembered",
    GrantAfterStop = "an effect is granted to a task that is to end",
    EffectTwice = "an effect that was done is granted again",
    TaskEndsUnkilled = "a task is called over while its processes run",
    StopOfTaskUnwritten = "a stop of a task is acknowledged and not recorded",
    DriverPanics = "who works on a sandbox that is saved panics",
    SnapshotAfterDelete = "a snapshot becomes ready after its sandbox was deleted",
    DamagedIsBegunWith = "a damaged snapshot is restored",
    DamageUnread = "a damaged snapshot is taken for a good one by who asks for it",
    RestIsJournaled = "every comparison writes a line for what is as it should be",
    RestIsTouched = "every comparison sets the limits of what is as it should be",
    SavedIsLeft = "a drain takes what is saved for what is left",
    SealKept = "what was sealed before a replacement is called sealed after it",
}

#[cfg(feature = "planted")]
thread_local! {
    static IN_THIS_THREAD: std::cell::Cell<Option<Planted>> = const { std::cell::Cell::new(None) };
}

/// Plants a bug in this thread, or takes it out.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<Planted>) {
    IN_THIS_THREAD.set(bug);
}

/// Whether this bug is planted here.
#[cfg(feature = "planted")]
#[must_use]
pub fn is_planted(bug: Planted) -> bool {
    IN_THIS_THREAD.get() == Some(bug)
}

/// Whether this bug is planted here: never.
#[cfg(not(feature = "planted"))]
#[inline]
#[must_use]
pub const fn is_planted(_: Planted) -> bool {
    false
}
