//! What goes wrong, one fault in a session.

use super::harm::Harm;

/// Where in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Create,
    Work,
    Rest,
    Resume,
    Task,
    Delete,
}

impl Step {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Work => "work",
            Self::Rest => "hibernate",
            Self::Resume => "resume",
            Self::Task => "task",
            Self::Delete => "delete",
        }
    }
}

/// How it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// The daemon is told that calls of this name go so.
    Order { call: &'static str, turn: &'static str, times: u32 },
    /// Processes and mounts of the sandbox are hurt.
    Harm(Harm),
    /// The agent is killed, and the daemon does not hear of it.
    Unheard,
    /// The daemon is killed, and the next one's clock shows so much more or less.
    Clock { ms: i64 },
    /// Somebody uses a handle of an older generation.
    StaleHandle,
    /// A command takes more memory than there is.
    OutOfMemory,
    /// And another one more disk.
    DiskFull,
    /// The daemon is killed, and another one started.
    DaemonKilled,
    /// The daemon stands still, and one that stood by takes over.
    DaemonReplaced,
}

impl How {
    /// By which rule nothing had to be recorded, where nothing was.
    pub(super) fn absorbed_by(self) -> &'static str {
        match self {
            Self::Order { call: "list", .. } => "no absence is concluded from it (T7)",
            Self::Order { .. } => "done once, by its operation id (L1)",
            Self::Harm(Harm::StopAgent) => "silence is no end (T7)",
            Self::Harm(Harm::KillInside) | Self::OutOfMemory | Self::DiskFull => "the end of one command (X4)",
            Self::Harm(_) | Self::Unheard => "what runs is looked at before it is used (T3)",
            Self::Clock { .. } | Self::DaemonKilled | Self::DaemonReplaced => "what is recorded is carried on (J8)",
            Self::StaleHandle => "an old generation is refused (generation_check)",
        }
    }
}

/// One fault, and where it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) at: Step,
    pub(super) how: How,
}

/// A kind of fault, with the places where it is tried, one session after the other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) word: &'static str,
    pub(super) faults: &'static [Fault],
}

const fn order(at: Step, call: &'static str, turn: &'static str, times: u32) -> Fault {
    Fault { at, how: How::Order { call, turn, times } }
}

const fn by(at: Step, how: How) -> Fault {
    Fault { at, how }
}

use Step::{Create, Delete, Rest, Resume, Task, Work};

/// Every kind.
pub(super) const KINDS: &[Kind] = &[
    Kind {
        word: "provider call lost",
        faults: &[
            order(Create, "create", "lost", 1),
            order(Rest, "save", "lost", 1),
            order(Resume, "restore", "lost", 1),
            order(Work, "execute", "lost", 1),
            order(Delete, "destroy", "lost", 1),
        ],
    },
    Kind {
        word: "provider call applied, not answered",
        faults: &[
            order(Create, "create", "unanswered", 1),
            order(Rest, "save", "unanswered", 1),
            order(Resume, "restore", "unanswered", 1),
            order(Work, "execute", "unanswered", 1),
            order(Delete, "destroy", "unanswered", 1),
        ],
    },
    Kind {
        word: "provider call arrives twice",
        faults: &[
            order(Rest, "save", "twice", 1),
            order(Create, "create", "twice", 1),
            order(Work, "execute", "twice", 1),
            order(Resume, "restore", "twice", 1),
            order(Delete, "destroy", "twice", 2),
        ],
    },
    Kind {
        word: "provider late",
        faults: &[
            order(Resume, "restore", "late", 1),
            order(Create, "create", "late", 1),
            order(Rest, "save", "late", 1),
            order(Work, "execute", "late", 1),
        ],
    },
    Kind {
        word: "provider unavailable",
        faults: &[
            order(Create, "create", "unavailable", 2),
            order(Resume, "restore", "unavailable", 2),
            order(Work, "execute", "unavailable", 2),
            order(Delete, "destroy", "unavailable", 2),
        ],
    },
    Kind {
        word: "save fails",
        faults: &[order(Rest, "save", "unavailable", 1), order(Rest, "save", "unavailable", 2)],
    },
    Kind { word: "listing partial", faults: &[order(Work, "list", "partial listing", 2)] },
    Kind {
        word: "listing stale",
        faults: &[order(Resume, "list", "stale listing", 3), order(Work, "list", "stale listing", 2)],
    },
    Kind { word: "listing fails", faults: &[order(Work, "list", "lost", 2), order(Work, "list", "unavailable", 2)] },
    Kind { word: "end of the sandbox not heard", faults: &[by(Work, How::Unheard)] },
    Kind {
        word: "store fails before it writes",
        faults: &[
            order(Create, "commit", "store before", 2),
            order(Rest, "commit", "store before", 2),
            order(Resume, "commit", "store before", 2),
            order(Task, "put_task", "store before", 2),
            order(Delete, "commit", "store before", 2),
        ],
    },
    Kind {
        word: "store fails after it wrote",
        faults: &[
            order(Rest, "commit", "store after", 2),
            order(Create, "commit", "store after", 2),
            order(Resume, "commit", "store after", 2),
            order(Task, "put_task", "store after", 2),
            order(Delete, "commit", "store after", 2),
        ],
    },
    Kind {
        word: "store slow",
        faults: &[
            order(Create, "commit", "slow store", 1),
            order(Rest, "commit", "slow store", 1),
            order(Resume, "commit", "slow store", 1),
        ],
    },
    Kind {
        word: "clock set forward",
        faults: &[by(Work, How::Clock { ms: 90_000 }), by(Task, How::Clock { ms: 90_000 })],
    },
    Kind {
        word: "clock set back",
        faults: &[by(Work, How::Clock { ms: -90_000 }), by(Task, How::Clock { ms: -90_000 })],
    },
    Kind { word: "stale handle", faults: &[by(Resume, How::StaleHandle)] },
    Kind {
        word: "agent killed",
        faults: &[by(Work, How::Harm(Harm::KillAgent)), by(Task, How::Harm(Harm::KillAgent))],
    },
    Kind {
        word: "agent stopped",
        faults: &[by(Work, How::Harm(Harm::StopAgent)), by(Task, How::Harm(Harm::StopAgent))],
    },
    Kind { word: "shim killed", faults: &[by(Work, How::Harm(Harm::KillShim)), by(Task, How::Harm(Harm::KillShim))] },
    Kind {
        word: "shim and guard killed",
        faults: &[by(Work, How::Harm(Harm::KillShimAndGuard)), by(Task, How::Harm(Harm::KillShimAndGuard))],
    },
    Kind {
        word: "command killed",
        faults: &[by(Work, How::Harm(Harm::KillInside)), by(Task, How::Harm(Harm::KillInside))],
    },
    Kind { word: "out of memory inside", faults: &[by(Work, How::OutOfMemory)] },
    Kind {
        word: "root unmounted",
        faults: &[by(Work, How::Harm(Harm::UnmountRoot)), by(Task, How::Harm(Harm::UnmountRoot))],
    },
    Kind { word: "disk full inside", faults: &[by(Work, How::DiskFull)] },
    Kind {
        word: "daemon killed",
        faults: &[
            by(Work, How::DaemonKilled),
            by(Task, How::DaemonKilled),
            by(Rest, How::DaemonKilled),
            by(Resume, How::DaemonKilled),
        ],
    },
    Kind {
        word: "daemon killed at a call",
        faults: &[
            order(Create, "create", "killed after", 1),
            order(Rest, "save", "killed before", 1),
            order(Resume, "restore", "killed after", 1),
            order(Task, "put_task", "killed after", 1),
            order(Delete, "destroy", "killed after", 1),
            order(Create, "commit", "killed after", 1),
            order(Rest, "save", "killed after", 1),
            order(Delete, "commit", "killed before", 1),
        ],
    },
    Kind {
        word: "daemon replaced by a standby",
        faults: &[by(Work, How::DaemonReplaced), by(Task, How::DaemonReplaced)],
    },
];

/// The kind and fault of a session: every kind once before any comes again, and then at its next place.
pub(super) fn of_session(number: u64, seed: u64) -> (&'static Kind, Fault) {
    let kinds = KINDS.len() as u64;
    let (round, at) = (number / kinds, number % kinds);
    let kind = &KINDS[((at + seed) % kinds) as usize];
    (kind, kind.faults[((round + seed) % kind.faults.len() as u64) as usize])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn p5_every_kind_is_used_before_any_comes_again() {
        for seed in [0, 1, 77] {
            let first: BTreeSet<&str> = (0..KINDS.len() as u64).map(|number| of_session(number, seed).0.word).collect();
            assert_eq!(first.len(), KINDS.len());
        }
        let all: usize = KINDS.iter().map(|kind| kind.faults.len()).sum();
        let most = KINDS.iter().map(|kind| kind.faults.len()).max().unwrap_or_default();
        let many = (0..(most * KINDS.len()) as u64).map(|number| format!("{:?}", of_session(number, 3)));
        let many: BTreeSet<String> = many.collect();
        assert_eq!(many.len(), all, "and every place");
    }
}
