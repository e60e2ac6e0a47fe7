//! Query parameters. A parameter that nobody knows is refused, like a field.
//!
//! Servers parse these with something that reads `label=a&label=b` as a list (`serde_html_form`); [`encode`] is the
//! other direction.

use serde::{Deserialize, Serialize};

use crate::bound::{
    ActorName, CauseCode, ComponentName, Cursor, EventKind, FileMode, FromAddress, GenerationNumber, LabelFilter,
    ListDepth, LogBytes, MomentMs, Offset, PageLimit, Path, SandboxName, SandboxRef, SearchText, Sequence, TailLines,
    UserName, WaitMs,
};
use crate::daemon::LogLevel;
use crate::execution::ExecutionState;
use crate::path::escape;
use crate::sandbox::{LogSource, Status};
use crate::task::TaskState;

macro_rules! queries {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
        #[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
    )+};
}

queries! {
    /// Which sandboxes to list. Newest first.
    #[derive(Default)]
    ListSandboxes {
        /// Where to go on: what the page before gave as `next`.
        cursor: Option<Cursor>,
        /// How many at most; 100 when absent.
        limit: Option<PageLimit>,
        /// Only those with this label, as `key=value`; repeat it for more, all of which must be there.
        #[serde(default)]
        label: Vec<LabelFilter>,
        /// Only those with this status.
        status: Option<Status>,
        /// Only the one with this name.
        name: Option<SandboxName>,
        /// Also those that stopped for good; they are left out unless this or `status=stopped` is said.
        #[serde(default)]
        all: bool,
    }
    /// Which tasks to list. Newest first.
    #[derive(Default)]
    ListTasks {
        /// Where to go on: what the page before gave as `next`.
        cursor: Option<Cursor>,
        /// How many at most; 100 when absent.
        limit: Option<PageLimit>,
        /// Only those in this state; repeat it for more, any of which will do.
        #[serde(default)]
        state: Vec<TaskState>,
        /// Only those of this sandbox.
        sandbox: Option<SandboxRef>,
    }
    /// Which events of a webhook to list. Oldest first.
    #[derive(Default)]
    ListDeliveries {
        /// Where to go on: what the page before gave as `next`.
        cursor: Option<Cursor>,
        /// How many at most; 100 when absent.
        limit: Option<PageLimit>,
        /// Those that are dead, instead of those that wait.
        #[serde(default)]
        dead: bool,
    }
    /// How to look at a sandbox.
    #[derive(Default)]
    GetSandbox {
        /// Probe it now. That is not activity (T3).
        #[serde(default)]
        verify: bool,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which generation is meant.
    #[derive(Default)]
    OfGeneration {
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// How to look at what goes on in a sandbox.
    #[derive(Default)]
    DiagnosisQuery {
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
        /// How long to look at what goes on inside, 10 s at most; not at all when absent.
        sample_ms: Option<WaitMs>,
    }
    /// How to delete a sandbox.
    #[derive(Default)]
    DeleteSandbox {
        /// How long to wait until nothing is left: 0 does not wait, nothing is the server's default.
        wait_ms: Option<WaitMs>,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which part of a list to give.
    #[derive(Default)]
    PageQuery {
        /// Where to go on: what the page before gave as `next`.
        cursor: Option<Cursor>,
        /// How many at most; 100 when absent.
        limit: Option<PageLimit>,
    }
    /// Which snapshots to list. Newest first.
    #[derive(Default)]
    ListSnapshots {
        /// Where to go on: what the page before gave as `next`.
        cursor: Option<Cursor>,
        /// How many at most; 100 when absent.
        limit: Option<PageLimit>,
    }
    /// How to read a snapshot from a file.
    #[derive(Default)]
    ImportSnapshot {
        /// What it is called, for people.
        name: Option<SandboxName>,
    }
    /// Which logs of a sandbox to give.
    #[derive(Default)]
    SandboxLogQuery {
        /// Only this one.
        source: Option<LogSource>,
        /// How much of the end of each; 64 KiB when absent.
        bytes: Option<LogBytes>,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which executions to list. Oldest first.
    #[derive(Default)]
    ListExecutions {
        /// Where to go on: what the page before gave as `next`.
        cursor: Option<Cursor>,
        /// How many at most; 100 when absent.
        limit: Option<PageLimit>,
        /// Only those in this state.
        state: Option<ExecutionState>,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which executions of all sandboxes to list. Newest first.
    #[derive(Default)]
    ListAllExecutions {
        /// Where to go on: what the page before gave as `next`.
        cursor: Option<Cursor>,
        /// How many at most; 100 when absent. With a state there may be fewer, and more after them.
        limit: Option<PageLimit>,
        /// Only those in this state.
        state: Option<ExecutionState>,
    }
    /// How a start is answered.
    #[derive(Default)]
    StartQuery {
        /// Go on with its output until it ends: the answer is `application/x-ndjson` then, and its first line says what
        /// was started. Whoever goes away ends nothing.
        #[serde(default)]
        follow: bool,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which part of an output to read.
    #[derive(Default)]
    OutputQuery {
        /// From here on; from the beginning when absent.
        offset: Option<Offset>,
        /// Go on until the execution ends.
        #[serde(default)]
        follow: bool,
        /// Begin with so many lines of what there is, of the last MiB; `offset` is not looked at then.
        tail: Option<TailLines>,
        /// Only lines with this in them, of what there is: the first 1,000. `follow` and `tail` are not looked at then.
        search: Option<SearchText>,
        /// Only what was written then or later.
        since_ms: Option<MomentMs>,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Where input stands.
    InputQuery {
        /// Where the first byte stands in all input; bytes that were taken before are not taken again.
        offset: Offset,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which part of a file to read.
    ReadFile {
        /// The file.
        path: Path,
        /// From here on; from the beginning when absent.
        offset: Option<Offset>,
        /// This much; to the end when absent.
        length: Option<Offset>,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which file to write, and how. It is replaced as a whole, in one step; directories above it are made.
    WriteFile {
        /// The file.
        path: Path,
        /// Permission bits; those of the file that is replaced, or 0644, when absent.
        mode: Option<FileMode>,
        /// Who shall own it; root of the sandbox when absent.
        user: Option<UserName>,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which path is meant.
    PathQuery {
        /// The path.
        path: Path,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which directory to list.
    ListFiles {
        /// The directory.
        path: Path,
        /// How deep; 1 when absent.
        depth: Option<ListDepth>,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which directory to watch.
    WatchFiles {
        /// The directory.
        path: Path,
        /// Also what is below it.
        #[serde(default)]
        recursive: bool,
        /// The generation that is meant; another one is answered with 410 `stale_handle`.
        generation: Option<GenerationNumber>,
    }
    /// Which events to give: a page, or with `Accept: text/event-stream` all that follow.
    #[derive(Default)]
    ListEvents {
        /// Only those after this one; from the oldest that is kept when absent.
        after: Option<Sequence>,
        /// Only those about this sandbox.
        sandbox: Option<SandboxRef>,
        /// Only those of this kind: `sandbox.moved`, or all that begin so, as `execution` or `file`. With this, `cause`,
        /// `by`, `address` or `until_ms` a page may be short or empty though there are more: go on after `next_after`
        /// while `more` is said.
        kind: Option<EventKind>,
        /// Only those with this cause: `expired`, `idle`, `crashed`.
        cause: Option<CauseCode>,
        /// Only those by this one: `key:ID`, or a part of the daemon.
        by: Option<ActorName>,
        /// Only those by somebody who came from this address, as it is told in `address`.
        address: Option<FromAddress>,
        /// Only those of then or later.
        since_ms: Option<MomentMs>,
        /// Only those of then or before.
        until_ms: Option<MomentMs>,
        /// How many at most in a page; 100 when absent. A stream has no end.
        limit: Option<PageLimit>,
    }
    /// Which figures to give.
    #[derive(Default)]
    StatsQuery {
        /// Also how the targets are met.
        #[serde(default)]
        slo: bool,
    }
    /// Which lines of the daemon's log to give.
    #[derive(Default)]
    ListLogs {
        /// Only those of this component.
        component: Option<ComponentName>,
        /// Only those about this sandbox.
        sandbox: Option<SandboxRef>,
        /// Only those that are at least this important.
        level: Option<LogLevel>,
        /// Only those after this one; the newest when absent.
        after: Option<Sequence>,
        /// How many at most; 100 when absent.
        limit: Option<PageLimit>,
    }
}

/// Writes a query as text, with its `?`; nothing when it asks for nothing.
pub fn encode(query: &impl Serialize) -> String {
    let mut pairs = Vec::new();
    if let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(query) {
        for (name, value) in fields {
            push(&mut pairs, &name, value);
        }
    }
    if pairs.is_empty() { String::new() } else { format!("?{}", pairs.join("&")) }
}

fn push(pairs: &mut Vec<String>, name: &str, value: serde_json::Value) {
    match value {
        // What is not said and what is not wanted is the same in all queries.
        serde_json::Value::Null | serde_json::Value::Bool(false) => {}
        serde_json::Value::Bool(true) => pairs.push(format!("{name}=true")),
        serde_json::Value::Number(number) => pairs.push(format!("{name}={number}")),
        serde_json::Value::String(text) => pairs.push(format!("{name}={}", escape(&text))),
        serde_json::Value::Array(values) => values.into_iter().for_each(|value| push(pairs, name, value)),
        serde_json::Value::Object(_) => unreachable!("queries are flat"),
    }
}
