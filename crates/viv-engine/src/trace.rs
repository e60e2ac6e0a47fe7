//! Spans of what is done, for whoever traces (O4).
//!
//! ```text
//!   request ──┬── provider …                 tracing's own: they end before it does
//!             ├╌╌ effect ──── provider …     follow it: by then the request may have been answered
//!             ├╌╌ task ──┬─── provider …
//!             │          └╌╌╌ effect …
//!             └╌╌ execution                  told when it is over, by its own times
//! ```
//!
//! Requests, effects, tasks and calls are spans of `tracing`, which are not even made while nobody listens. What goes on
//! after a request was answered follows it by [`Traces`], which the engine is handed: a span of `tracing` that has
//! children would not end before they do.
//!
//! Invariant: no span says what somebody wrote (S6): words of ours, ids and numbers, no arguments, environments, contents
//! or messages.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Empty, display};
use tracing::{Span, info_span};
use viv_core::exec::ExecState;
use viv_core::execution::Execution;
use viv_core::lifecycle::{Effect, Outcome, Sandbox};
use viv_core::task::{Task, TaskState};
use viv_core::{ExecutionId, SandboxId, TaskId};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;

/// The name of spans of effects.
const EFFECT: &str = "effect";

/// Most executions whose end is told as a span; of more at once, the later ones are not.
const EXECUTIONS_MAX: usize = 10_000;

/// A place in a trace, as the header `traceparent` of W3C has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// Which trace.
    pub trace: u128,
    /// Which span of it.
    pub span: u64,
    /// Whether whoever began it keeps it.
    pub sampled: bool,
}

/// It is no `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this is no traceparent")]
pub struct NotTraceParent;

/// So many small hexadecimal digits.
fn hex(text: &str, digits: usize) -> Result<&str, NotTraceParent> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() == digits && text.bytes().all(is_hex) { Ok(text) } else { Err(NotTraceParent) }
}

impl FromStr for TraceParent {
    type Err = NotTraceParent;

    fn from_str(text: &str) -> Result<Self, NotTraceParent> {
        let mut parts = text.split('-');
        let mut part = || parts.next().ok_or(NotTraceParent);
        let (version, trace, span, flags) = (hex(part()?, 2)?, hex(part()?, 32)?, hex(part()?, 16)?, hex(part()?, 2)?);
        // A later version may say more; what it says first means the same.
        if version == "ff" || (version == "00" && parts.next().is_some()) {
            return Err(NotTraceParent);
        }
        let trace = u128::from_str_radix(trace, 16).map_err(|_| NotTraceParent)?;
        let span = u64::from_str_radix(span, 16).map_err(|_| NotTraceParent)?;
        let flags = u8::from_str_radix(flags, 16).map_err(|_| NotTraceParent)?;
        if trace == 0 || span == 0 {
            return Err(NotTraceParent);
        }
        Ok(Self { trace, span, sampled: flags & 1 == 1 })
    }
}

/// A span that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// What it is of.
    pub name: &'static str,
    /// When that began.
    pub from_ms: u64,
    /// When it was over.
    pub to_ms: u64,
    /// Whether it ended as it should.
    pub is_well: bool,
    /// What is known of it.
    pub what: Vec<(&'static str, String)>,
}

/// What became of spans so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TraceCounts {
    /// Those that the receiver took.
    pub sent: u64,
    /// Those that nobody has.
    pub dropped: u64,
}

/// Where spans go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceReceiver {
    /// Its address.
    pub endpoint: String,
    /// Why it does not answer, if it does not.
    pub silent: Option<String>,
}

/// Who makes spans of what is done.
pub trait Traces: Send + Sync {
    /// Where a span stands; nothing when it is not one that is traced.
    fn place(&self, span: &Span) -> Option<TraceParent>;

    /// Puts a span below another one, which may be over, or somebody else's. Nobody has entered it yet.
    fn follow(&self, span: &Span, parent: &TraceParent);

    /// Takes a span that is over.
    fn tell(&self, told: Told, parent: Option<&TraceParent>);

    /// What became of them so far.
    fn counts(&self) -> TraceCounts;

    /// Asks whoever takes them. This may take seconds, and blocks.
    fn receiver(&self) -> TraceReceiver;
}

/// Who makes spans, as it is handed around.
#[derive(Clone)]
pub struct Tracing(pub Arc<dyn Traces>);

impl fmt::Debug for Tracing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tracing")
    }
}

/// What runs: who asked for it, and since when it does.
type Running = BTreeMap<(SandboxId, ExecutionId), (Option<TraceParent>, u64)>;

/// Who asked for what is going on. Nothing that is done follows from it.
#[derive(Debug, Default)]
pub(crate) struct Askers {
    /// For what is outstanding of a sandbox.
    sandboxes: Mutex<BTreeMap<SandboxId, TraceParent>>,
    /// For what runs; its end was not told yet.
    executions: Mutex<Running>,
}

impl Engine {
    /// Who makes spans, if anybody does.
    pub fn tracing(&self) -> Option<&dyn Traces> {
        self.inner.traces()
    }
}

impl Inner {
    fn traces(&self) -> Option<&dyn Traces> {
        self.config.traces.as_ref().map(|tracing| &*tracing.0)
    }

    /// Something is outstanding of this sandbox, and whoever runs this asked for it.
    pub(crate) fn asked_here(&self, sandbox: &SandboxId) {
        let Some(traces) = self.traces() else { return };
        let span = Span::current();
        // What an effect leads to was asked for by who asked for the effect.
        if span.metadata().is_none_or(|metadata| metadata.name() == EFFECT) {
            return;
        }
        if let Some(place) = traces.place(&span) {
            self.askers.sandboxes.lock().unwrap_or_else(PoisonError::into_inner).insert(sandbox.clone(), place);
        }
    }

    /// Nothing is outstanding any more.
    pub(crate) fn asked_no_more(&self, sandbox: &SandboxId) {
        if self.traces().is_some() {
            self.askers.sandboxes.lock().unwrap_or_else(PoisonError::into_inner).remove(sandbox);
        }
    }

    /// The span of an effect.
    pub(crate) fn effect_span(&self, record: &Sandbox, effect: &Effect) -> Span {
        let span = info_span!(
            parent: None,
            "effect",
            otel.name = format!("effect {}", effect.code()),
            viv.effect = effect.code(),
            viv.sandbox = %record.id,
            viv.generation = record.generation.0,
            viv.outcome = Empty,
            otel.status_code = Empty,
        );
        if let Some(traces) = self.traces() {
            let askers = self.askers.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(parent) = askers.get(&record.id) {
                traces.follow(&span, parent);
            }
        }
        span
    }

    /// The span of work on a task: its run, or what is left of it for this daemon.
    pub(crate) fn task_span(&self, task: &TaskId) -> Span {
        let span = info_span!(
            parent: None,
            "task",
            viv.task = %task,
            viv.sandbox = Empty,
            viv.task_run = Empty,
            viv.outcome = Empty,
            otel.status_code = Empty,
        );
        if let Some(traces) = self.traces()
            && let Some(parent) = traces.place(&Span::current())
        {
            traces.follow(&span, &parent);
        }
        span
    }

    /// An execution runs: its span is told when it is over.
    pub(crate) fn trace_execution(&self, row: &Execution) {
        let Some(traces) = self.traces() else { return };
        let Some(status) = row.status() else { return };
        let place = (row.sandbox.clone(), row.id.clone());
        let mut known = self.askers.executions.lock().unwrap_or_else(PoisonError::into_inner);
        // One that ended at once was never seen to run; who started it knows of it.
        if row.is_open() || (row.is_asked() && status.ended_at_ms.is_some_and(|at_ms| at_ms >= row.asked_at_ms)) {
            if known.len() < EXECUTIONS_MAX || known.contains_key(&place) {
                known.entry(place.clone()).or_insert_with(|| (traces.place(&Span::current()), status.started_at_ms));
            }
            if row.is_open() {
                return;
            }
        }
        let Some((parent, _)) = known.remove(&place) else { return };
        drop(known);
        traces.tell(execution(row, &status.state, row.ended_at_ms().unwrap_or(row.learnt_at_ms)), parent.as_ref());
    }

    /// Its instance is gone, and what ran in it with it: nobody tells how that ended any more.
    pub(crate) fn trace_ended_instance(&self, sandbox: &SandboxId) {
        let Some(traces) = self.traces() else { return };
        let mut known = self.askers.executions.lock().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<_> = known.keys().filter(|(of, _)| of == sandbox).cloned().collect();
        let gone: Vec<_> = gone.into_iter().filter_map(|place| Some((known.remove(&place)?, place))).collect();
        drop(known);
        let to_ms = self.clock.now_ms();
        for ((parent, from_ms), (sandbox, id)) in gone {
            let what = vec![
                ("viv.sandbox", sandbox.to_string()),
                ("viv.execution", id.to_string()),
                ("viv.outcome", "lost".to_owned()),
            ];
            let told = Told { name: "execution", from_ms, to_ms: to_ms.max(from_ms), is_well: false, what };
            traces.tell(told, parent.as_ref());
        }
    }

    /// What became of spans, as figures.
    pub(crate) fn trace_counts(&self) -> Option<TraceCounts> {
        self.traces().map(Traces::counts)
    }
}

fn execution(row: &Execution, state: &ExecState, to_ms: u64) -> Told {
    let (outcome, code) = match state {
        ExecState::Running => ("running", None),
        ExecState::Suspended => ("suspended", None),
        ExecState::Exited { code } => ("exited", Some(*code)),
        ExecState::Signalled { signal } => ("signalled", Some(*signal)),
        ExecState::OomKilled => ("oom_killed", None),
        ExecState::Failed { .. } => ("failed", None),
        ExecState::Cancelled => ("cancelled", None),
        ExecState::TimedOut => ("timed_out", None),
        ExecState::Lost { .. } => ("lost", None),
    };
    let mut what = vec![
        ("viv.sandbox", row.sandbox.to_string()),
        ("viv.execution", row.id.to_string()),
        ("viv.generation", row.generation.0.to_string()),
        ("viv.outcome", outcome.to_owned()),
    ];
    if let Some(code) = code {
        what.push((if outcome == "exited" { "process.exit.code" } else { "viv.signal" }, code.to_string()));
    }
    let from_ms = row.status().map_or(row.asked_at_ms, |status| status.started_at_ms);
    let is_well = matches!(state, ExecState::Exited { code: 0 } | ExecState::Cancelled | ExecState::Suspended);
    Told { name: "execution", from_ms, to_ms: to_ms.max(from_ms), is_well, what }
}

/// An effect is over.
pub(crate) fn effect_ended(span: &Span, outcome: &Result<Option<Outcome>, EngineError>) {
    let (word, is_well) = match outcome {
        Ok(Some(Outcome::Failed(_))) => ("failed", false),
        Ok(Some(Outcome::MemoryNotSaved { .. })) => ("memory_not_saved", false),
        Ok(
            Some(
                Outcome::Made { .. }
                | Outcome::Cleared
                | Outcome::Probed(_)
                | Outcome::Served(_)
                | Outcome::Hooked(_)
                | Outcome::Frozen
                | Outcome::Thawed
                | Outcome::Claimed { .. }
                | Outcome::Saved,
            )
            | None,
        ) => ("done", true),
        Err(_) => ("unrecorded", false),
    };
    left(span, word, is_well);
}

/// An effect was left, because something else is wanted or its time has passed.
pub(crate) fn left(span: &Span, word: &'static str, is_well: bool) {
    span.record("viv.outcome", word);
    span.record("otel.status_code", if is_well { "OK" } else { "ERROR" });
}

/// A task changed, and whoever runs this may work on it. What is known of it is told once, when it is over: what is
/// recorded twice is there twice.
pub(crate) fn task_changed(task: &Task) {
    let span = Span::current();
    if !task.state.is_final() || span.metadata().is_none_or(|metadata| metadata.name() != "task") {
        return;
    }
    span.record("viv.sandbox", display(&task.sandbox));
    span.record("viv.task_run", task.run);
    let word = serde_json::to_value(task.state).ok();
    span.record("viv.outcome", word.as_ref().and_then(|word| word.as_str()).unwrap_or_default());
    // Who stops a task gets what was asked for.
    let is_well = matches!(task.state, TaskState::Succeeded | TaskState::Stopped);
    span.record("otel.status_code", if is_well { "OK" } else { "ERROR" });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o4_a_traceparent_is_read_as_w3c_has_it() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let read: TraceParent = text.parse().unwrap();
        assert_eq!(read.trace, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!((read.span, read.sampled), (0x00f0_67aa_0ba9_02b7, true));
        let unsampled = text.replace("-01", "-00").parse::<TraceParent>().unwrap();
        assert!(!unsampled.sampled);
        let later = text.replacen("00-", "cc-", 1) + "-what-is-later";
        assert_eq!(later.parse::<TraceParent>(), Ok(read));
    }

    #[test]
    fn o4_what_is_no_traceparent_is_none() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let bad = [
            String::new(),
            good.to_uppercase(),
            format!("{good}-more"),
            good.replacen("00-", "ff-", 1),
            good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            good.replace("00f067aa0ba902b7", &"0".repeat(16)),
            good.replace("4bf9", "+bf9"),
            good.replace('-', "_"),
            good[..54].to_owned(),
        ];
        for bad in bad {
            assert_eq!(bad.parse::<TraceParent>(), Err(NotTraceParent), "{bad}");
        }
    }
}
