//! The daemon's log as `/v1/logs` tells it: the last lines, in memory.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use viv_api::daemon::{LogLevel, LogLine};
use viv_core::SandboxId;

/// Most lines that are kept: a few megabytes.
const LINES_MAX: usize = 10_000;

/// Longest text in a line; what is longer is cut.
const TEXT_BYTES_MAX: usize = 4_096;

/// The last lines of the daemon's log. Clones are the same. A layer for `tracing_subscriber`, which the binary installs.
#[derive(Debug, Clone, Default)]
pub struct LogRing {
    lines: Arc<Mutex<Lines>>,
}

#[derive(Debug, Default)]
struct Lines {
    next_seq: u64,
    kept: VecDeque<LogLine>,
}

/// Which lines to give.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogFilter {
    pub(crate) component: Option<String>,
    pub(crate) sandbox: Option<SandboxId>,
    pub(crate) level: Option<LogLevel>,
}

impl LogFilter {
    fn lets(&self, line: &LogLine) -> bool {
        self.component.as_ref().is_none_or(|component| {
            let rest = line.component.strip_prefix(component.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        }) && self.sandbox.as_ref().is_none_or(|sandbox| line.sandbox.as_ref() == Some(sandbox))
            && self.level.is_none_or(|level| line.level >= level)
    }
}

impl LogRing {
    /// Lines after one, oldest first, or the newest; where to go on; and whether there are more.
    pub(crate) fn read(&self, after: Option<u64>, filter: &LogFilter, limit: usize) -> (Vec<LogLine>, u64, bool) {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = lines.kept.iter().filter(|line| filter.lets(line));
        let Some(after) = after else {
            let mut found: Vec<_> = fits.rev().take(limit).cloned().collect();
            found.reverse();
            return (found, lines.next_seq, false);
        };
        let mut found: Vec<_> = fits.filter(|line| line.seq > after).take(limit + 1).cloned().collect();
        let more = found.len() > limit;
        found.truncate(limit);
        let end = if more { found.last().map_or(after, |line| line.seq) } else { after.max(lines.next_seq) };
        (found, end, more)
    }

    fn push(&self, mut line: LogLine) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.next_seq += 1;
        line.seq = lines.next_seq;
        if lines.kept.len() >= LINES_MAX {
            lines.kept.pop_front();
        }
        lines.kept.push_back(line);
    }
}

impl<S: Subscriber> Layer<S> for LogRing {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let meta = event.metadata();
        // What libraries say in passing is about nobody's sandbox.
        if !meta.target().starts_with("viv") && *meta.level() > Level::WARN {
            return;
        }
        let mut seen = Seen::default();
        event.record(&mut seen);
        let component = seen.take("component").unwrap_or_else(|| meta.target().trim_start_matches("viv_").to_owned());
        let sandbox = seen.take("sandbox").and_then(|text| text.parse().ok());
        let message = seen.take("message").unwrap_or_default();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let at_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let level = match *meta.level() {
            Level::TRACE => LogLevel::Trace,
            Level::DEBUG => LogLevel::Debug,
            Level::INFO => LogLevel::Info,
            Level::WARN => LogLevel::Warn,
            Level::ERROR => LogLevel::Error,
        };
        self.push(LogLine { seq: 0, at_ms, level, component, sandbox, message, fields: seen.fields });
    }
}

#[derive(Debug, Default)]
struct Seen {
    fields: Map<String, Value>,
}

impl Seen {
    fn take(&mut self, name: &str) -> Option<String> {
        match self.fields.remove(name)? {
            Value::String(text) => Some(text),
            other => Some(other.to_string()),
        }
    }

    fn put(&mut self, field: &Field, value: Value) {
        self.fields.insert(field.name().to_owned(), value);
    }
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let end = (0..=value.len().min(TEXT_BYTES_MAX)).rev().find(|&end| value.is_char_boundary(end)).unwrap_or(0);
        self.put(field, value[..end].into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn o1_lines_are_found_by_component_sandbox_and_level_and_are_bounded() {
        let ring = LogRing::default();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(ring.clone()), || {
            tracing::warn!(component = "driver", sandbox = "sbx_1", attempt = 3_u64, "again");
            tracing::info!(component = "keeper", "hello");
            for _ in 0..LINES_MAX {
                tracing::debug!("more");
            }
            tracing::info!(component = "keeper", text = "ü".repeat(TEXT_BYTES_MAX), "long");
            tracing::warn!(component = "driver", sandbox = "sbx_1", attempt = 4_u64, "again");
            tracing::info!(component = "watch", sandbox = "sbx_1", "ended");
            tracing::warn!(component = "driver", sandbox = "sbx_2", "another");
        });
        let all = |filter: &LogFilter| ring.read(Some(0), filter, usize::MAX - 1).0;
        assert_eq!(all(&LogFilter::default()).len(), LINES_MAX);
        let of = |component: &str| LogFilter { component: Some(component.to_owned()), ..LogFilter::default() };
        assert_eq!(all(&of("driver")).len(), 2, "the oldest went first");
        assert_eq!(all(&of("keeper")).len(), 1);
        assert_eq!(all(&of("server::log")).len(), LINES_MAX - 4);
        let about = |sandbox: &str| LogFilter { sandbox: Some(sandbox.parse().unwrap()), ..LogFilter::default() };
        let messages = |filter: &LogFilter| all(filter).into_iter().map(|line| line.message).collect::<Vec<_>>();
        assert_eq!(messages(&about("sbx_1")), ["again", "ended"], "of whichever component, and of no other sandbox");
        assert_eq!(messages(&about("sbx_2")), ["another"]);
        assert!(all(&about("sbx_3")).is_empty(), "nor what is about none");
        let both = LogFilter { component: Some("driver".to_owned()), ..about("sbx_1") };
        assert_eq!(messages(&both), ["again"]);
        let info = LogFilter { level: Some(LogLevel::Info), ..LogFilter::default() };
        let (found, end, more) = ring.read(Some(0), &info, 10);
        assert_eq!((found.len(), more), (4, false));
        assert!(found[0].fields["text"].as_str().unwrap().len() <= TEXT_BYTES_MAX);
        assert!(ring.read(Some(end), &LogFilter::default(), 10).0.is_empty());
        let (first, end, more) = ring.read(Some(0), &LogFilter::default(), 2);
        assert!(more && first.len() == 2 && first[1].seq == end);
    }
}
