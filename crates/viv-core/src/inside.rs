//! What those inside a sandbox can say to the command `viv` there.

/// A verb of that command: the agent performs it, and the `viv` of the host hands it over when it came into a sandbox
/// with its userland.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InsideVerb {
    /// Schedules of the sandbox. The `viv` outside has the same word.
    Schedule,
    /// How far a task is.
    Step,
    /// An effect of a task.
    Gate,
}

impl InsideVerb {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Schedule, Self::Step, Self::Gate];

    /// As it is said.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Schedule => "schedule",
            Self::Step => "step",
            Self::Gate => "gate",
        }
    }

    /// The one that is said so.
    pub fn of(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| verb.as_str() == word)
    }

    /// Whether it means something outside too.
    pub fn is_outside(self) -> bool {
        match self {
            Self::Schedule => true,
            Self::Step | Self::Gate => false,
        }
    }
}
