//! The journal: append-only, one order for everybody (O7).

use serde::{Deserialize, Serialize};
use viv_core::lifecycle::{Actor, PhaseName};
use viv_core::spec::Project;
use viv_core::{Generation, SandboxId};

/// A place in the journal. Lines after it have a greater one; there may be gaps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cursor(pub u64);

/// A line to be written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewLine {
    /// When.
    pub at_ms: u64,
    /// In which project; `None` is of the installation.
    pub project: Option<Project>,
    /// About which sandbox.
    pub sandbox: Option<SandboxId>,
    /// About which of its generations.
    pub generation: Option<Generation>,
    /// A stable word: `sandbox.created`, `sandbox.moved`, `key.revoked`, …
    pub kind: String,
    /// The phase before, for a transition.
    pub from: Option<PhaseName>,
    /// The phase after, for a transition.
    pub to: Option<PhaseName>,
    /// The code of the cause.
    pub cause: Option<String>,
    /// Who.
    pub by: Actor,
    /// The rest. No secret is ever in here (S6).
    pub data: serde_json::Value,
}

/// A line of the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JournalLine {
    /// Where it stands.
    pub cursor: Cursor,
    /// What it says.
    #[serde(flatten)]
    pub line: NewLine,
}

/// Which lines to read. A store finds these without reading the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalFilter {
    /// Of this project only.
    pub project: Option<Project>,
    /// About this sandbox only.
    pub sandbox: Option<SandboxId>,
    /// Of then or later only. Clocks go back too, so an older line may stand after a newer one.
    pub since_ms: Option<u64>,
}

impl JournalFilter {
    /// Whether a line is one of these.
    pub fn takes(&self, line: &NewLine) -> bool {
        self.project.as_ref().is_none_or(|project| line.project.as_ref() == Some(project))
            && self.sandbox.as_ref().is_none_or(|sandbox| line.sandbox.as_ref() == Some(sandbox))
            && self.since_ms.is_none_or(|since_ms| line.at_ms >= since_ms)
    }
}

/// What is looked for in lines that are read: there is no index for it, which every write would pay for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalSearch {
    /// Of this kind: `sandbox.moved`, or all that begin so, as `execution`.
    pub kind: Option<String>,
    /// With the code of this cause.
    pub cause: Option<String>,
    /// By this one: what stands after a blank is about who it was, and need not be said.
    pub by: Option<String>,
    /// By somebody who came from this address.
    pub from: Option<String>,
    /// Of then or before only. Clocks go back too, so what is looked for may stand after what is too late.
    pub until_ms: Option<u64>,
}

impl JournalSearch {
    /// Whether a line is looked for.
    pub fn takes(&self, line: &NewLine) -> bool {
        let goes_on = |text: &str, beginning: &str, with: char| {
            text.strip_prefix(beginning).is_some_and(|rest| rest.is_empty() || rest.starts_with(with))
        };
        self.kind.as_ref().is_none_or(|kind| goes_on(&line.kind, kind, '.'))
            && self.cause.as_ref().is_none_or(|cause| line.cause.as_ref() == Some(cause))
            && self.by.as_ref().is_none_or(|by| goes_on(&line.by.who, by, ' '))
            && self.from.as_ref().is_none_or(|from| line.by.from.as_ref() == Some(from))
            && self.until_ms.is_none_or(|until_ms| line.at_ms <= until_ms)
    }

    /// Whether it takes every line.
    pub fn is_any(&self) -> bool {
        *self == Self::default()
    }
}

/// A page of lines that were looked for.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct JournalPage {
    /// The lines, oldest first.
    pub lines: Vec<JournalLine>,
    /// How far was looked: the next page begins after it, also when this one is empty.
    pub until: Cursor,
    /// Whether there are lines after that which nobody has looked at.
    pub more: bool,
}
