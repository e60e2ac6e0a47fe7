//! The limits that commands inherit from the agent. They are only ever lowered.
//!
//! Memory, processes and processor time are the cgroup's to limit; these are what it does not know of.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::say;

/// To the kernel, a limit of one byte on core dumps means none at all: no file, and no program that
/// `core_pattern` names, which would run on the host and be fed by the sandbox. 0 stops only the file.
/// That it stays so is for the filter: see `core-limit` in the list of calls.
const CORE: Rlimit = Rlimit { current: Some(1), maximum: Some(1) };

/// No more than these, whatever the one who started the agent may.
const AT_MOST: [(Resource, u64); 4] = [
    // The kernel's own default: enough for secrets, not enough to keep a machine's memory from being swapped.
    (Resource::Memlock, 8 << 20),
    // Likewise its default. Message queues are kernel memory.
    (Resource::Msgqueue, 819_200),
    // No priority above the usual, and nothing real-time.
    (Resource::Nice, 0),
    (Resource::Rtprio, 0),
];

/// Lowers all of them, for this process and those that it starts.
pub(crate) fn lower() {
    if let Err(cause) = setrlimit(Resource::Core, CORE) {
        // Only if 0 was all that was left of it, and then there is at least no file.
        say(&format!("where core dumps go to a program, they still do: {cause}"));
    }
    for (resource, most) in AT_MOST {
        // Lowering is always allowed.
        let _ = setrlimit(resource, at_most(getrlimit(resource), most));
    }
}

fn at_most(found: Rlimit, most: u64) -> Rlimit {
    let lower = |limit: Option<u64>| Some(limit.map_or(most, |limit| limit.min(most)));
    Rlimit { current: lower(found.current), maximum: lower(found.maximum) }
}

/// The limit on open files as it was found; the agent raises its own to all it may.
pub(crate) fn raise_open_files() -> Rlimit {
    let found = getrlimit(Resource::Nofile);
    // Every execution and connection takes a few; without this the agent lives with less.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: found.maximum, maximum: found.maximum });
    found
}

/// What commands get of a limit that was found.
pub(crate) fn open_files(found: Rlimit, wanted: Option<u64>) -> Rlimit {
    match wanted {
        None => found,
        Some(wanted) => at_most(Rlimit { current: found.maximum, ..found }, wanted),
    }
}

/// As many processes as this disturb nobody, whatever they do.
const CROWD: u64 = 256;

/// One in so many of a crowd's processes is not for those that are there already.
const SPARED: u64 = 16;

/// How many processes commands may have of those that the sandbox's cgroup allows.
///
/// The cgroup refuses a fork at its very end, when all memory was copied, and this limit at its beginning. That is what
/// matters with a bomb of hundreds: the copying and its undoing change the kernel's lists of who has which file mapped,
/// one process at a time, and everybody else who starts a program from the same files stands in that line. It is
/// reached first, so that few get as far as the cgroup's; what is between the two is for commands that start later.
pub(crate) fn processes(allowed: Option<u64>) -> Option<Rlimit> {
    let allowed = allowed.filter(|&allowed| allowed > CROWD)?;
    Some(at_most(getrlimit(Resource::Nproc), allowed - allowed / SPARED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_only_lowered() {
        let limits = |current, maximum| Rlimit { current, maximum };
        assert_eq!(at_most(limits(None, None), 5), limits(Some(5), Some(5)));
        assert_eq!(at_most(limits(Some(3), Some(9)), 5), limits(Some(3), Some(5)));
        assert_eq!(at_most(limits(Some(0), Some(1)), 5), limits(Some(0), Some(1)));
    }
}
