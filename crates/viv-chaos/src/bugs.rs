//! Which invariant catches which planted bug.

use viv_core::planted::Planted;

/// A bug, and what it breaks.
#[derive(Debug, Clone, Copy)]
pub struct Bug {
    /// Which.
    pub planted: Planted,
    /// One of these is found broken.
    pub breaks: &'static [&'static str],
}

macro_rules! bugs {
    ($($planted:ident: $($breaks:literal)*;)*) => {
        /// All of them.
        pub const BUGS: &[Bug] = &[$(Bug { planted: Planted::$planted, breaks: &[$($breaks),*] },)*];
    };
}

bugs! {
    NoTokenFence: "superseded-changes-nothing";
    BuriedIsMade: "stopped-is-absent" "hibernated-is-absent" "failed-leaves-nothing" "one-generation-lives";
    AbsenceUnseen: "stopped-is-absent" "hibernated-is-absent" "failed-leaves-nothing" "one-generation-lives" "reset-keeps-nothing";
    FailedListIsEmpty: "absence-is-seen";
    PartialListIsWhole: "absence-is-seen";
    NoOrphanGrace: "strays-have-grace";
    ProbeIsActivity: "unused-goes-to-rest" "stopped-is-the-end";
    IdleUnread: "at-work-is-not-idle" "idle-after-its-window" "kept-awake-is-not-idle";
    StoredExpiry: "expiry-is-fetched";
    ChainedResume: "entry-makes";
    ReadResumes: "reads-change-nothing";
    HeldForgotten: "held-until-asked";
    StopDroppedWhenBusy: "stop-is-taken";
    StopUnwritten: "durable-before-answer";
    EntryForgotten: "entry-is-answered";
    ReadyUnverified: "verified-before-ready";
    OneFindingKills: "three-findings";
    SilentIsReplaced: "timeouts-replace-nothing";
    ReplacedUnsealed: "acknowledged-work-stays";
    FailedSaveRunsOn: "saving-never-runs-on";
    PolicyReset: "policy-stays";
    NoGenerationCheck: "old-handles-are-refused" "verbs-reach-what-they-name";
    VerbUnaimed: "verbs-reach-what-they-name";
    MoveWithoutLine: "moves-have-causes";
    NoCompare: "version-counts";
    SupersededWrites: "owner-writes";
    TokenReused: "tokens-grow";
    LeaseOutlivesDelete: "gone-holds-no-lease";
    ScheduleOutlivesDelete: "schedules-of-the-living";
    QuotaUncounted: "quota-holds";
    KeyForgotten: "one-key-one-sandbox";
    GrantAfterStop: "no-grant-after-the-end";
    EffectTwice: "grants-are-declared";
    TaskEndsUnkilled: "over-tasks-run-nothing" "over-is-settled";
    StopOfTaskUnwritten: "stops-of-tasks-are-durable";
    DriverPanics: "nothing-panics";
    SnapshotAfterDelete: "saved-while-it-was-there";
    DamagedIsBegunWith: "damaged-is-not-begun-with";
    DamageUnread: "damaged-is-refused";
    RestIsJournaled: "nothing-is-recorded";
    RestIsTouched: "nothing-is-changed";
    SavedIsLeft: "drain-ends";
    SealKept: "any-path-same-state";
}
