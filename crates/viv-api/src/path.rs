//! Every path of the API. Parameters stand in braces, as `OpenAPI` and axum both write them.

/// Whether the process lives; asks nothing else.
pub const HEALTH: &str = "/health";
/// Whether it can do its work.
pub const READY: &str = "/ready";
/// What runs here.
pub const VERSION: &str = "/v1/version";
/// The `OpenAPI` document.
pub const OPENAPI: &str = "/v1/openapi.json";

/// Sandboxes: make, list.
pub const SANDBOXES: &str = "/v1/sandboxes";
/// One sandbox: get, delete.
pub const SANDBOX: &str = "/v1/sandboxes/{sandbox}";
/// All that is known about it.
pub const DIAGNOSIS: &str = "/v1/sandboxes/{sandbox}/diagnosis";
/// Make it run.
pub const ENSURE: &str = "/v1/sandboxes/{sandbox}/ensure";
/// Move its hard deadline.
pub const EXTEND: &str = "/v1/sandboxes/{sandbox}/extend";
/// Make it stand still, with its memory.
pub const FREEZE: &str = "/v1/sandboxes/{sandbox}/freeze";
/// Let it go on.
pub const THAW: &str = "/v1/sandboxes/{sandbox}/thaw";
/// Save it; whatever may wake it still does.
pub const HIBERNATE: &str = "/v1/sandboxes/{sandbox}/hibernate";
/// Stop it.
pub const STOP: &str = "/v1/sandboxes/{sandbox}/stop";
/// Go on from a snapshot.
pub const ROLLBACK: &str = "/v1/sandboxes/{sandbox}/rollback";
/// More like it.
pub const FORK: &str = "/v1/sandboxes/{sandbox}/fork";
/// Begin anew.
pub const RESET: &str = "/v1/sandboxes/{sandbox}/reset";
/// Its snapshots: make, list.
pub const SANDBOX_SNAPSHOTS: &str = "/v1/sandboxes/{sandbox}/snapshots";
/// What happened to it.
pub const TIMELINE: &str = "/v1/sandboxes/{sandbox}/timeline";
/// The ends of its logs.
pub const SANDBOX_LOGS: &str = "/v1/sandboxes/{sandbox}/logs";
/// What it uses.
pub const RESOURCES: &str = "/v1/sandboxes/{sandbox}/resources";
/// What is in the way of saving its memory.
pub const CHECKPOINT: &str = "/v1/sandboxes/{sandbox}/checkpoint";
/// Say that it is in use.
pub const ACTIVITY: &str = "/v1/sandboxes/{sandbox}/activity";
/// Keep it from idling.
pub const KEEP_AWAKE: &str = "/v1/sandboxes/{sandbox}/keep-awake/{lease}";
/// What it may use.
pub const LIMITS: &str = "/v1/sandboxes/{sandbox}/limits";

/// Executions: start, list.
pub const EXECUTIONS: &str = "/v1/sandboxes/{sandbox}/executions";
/// Executions of all sandboxes.
pub const ALL_EXECUTIONS: &str = "/v1/executions";
/// One execution.
pub const EXECUTION: &str = "/v1/sandboxes/{sandbox}/executions/{execution}";
/// What it wrote.
pub const OUTPUT: &str = "/v1/sandboxes/{sandbox}/executions/{execution}/output";
/// What it is to read.
pub const INPUT: &str = "/v1/sandboxes/{sandbox}/executions/{execution}/input";
/// There is no more to read.
pub const INPUT_CLOSE: &str = "/v1/sandboxes/{sandbox}/executions/{execution}/input/close";
/// Another size of its terminal.
pub const RESIZE: &str = "/v1/sandboxes/{sandbox}/executions/{execution}/resize";
/// A signal to its first process.
pub const SIGNAL: &str = "/v1/sandboxes/{sandbox}/executions/{execution}/signal";
/// The end of its whole tree.
pub const CANCEL: &str = "/v1/sandboxes/{sandbox}/executions/{execution}/cancel";

/// One file: read, write, remove.
pub const FILES: &str = "/v1/sandboxes/{sandbox}/files";
/// A directory's entries.
pub const FILES_LIST: &str = "/v1/sandboxes/{sandbox}/files/list";
/// What stands at a path.
pub const FILES_STAT: &str = "/v1/sandboxes/{sandbox}/files/stat";
/// Move a path.
pub const FILES_MOVE: &str = "/v1/sandboxes/{sandbox}/files/move";
/// Make a directory.
pub const FILES_MKDIR: &str = "/v1/sandboxes/{sandbox}/files/mkdir";
/// Changes below a directory, as they happen.
pub const FILES_WATCH: &str = "/v1/sandboxes/{sandbox}/files/watch";
/// Many files at once, as a tar archive.
pub const ARCHIVE: &str = "/v1/sandboxes/{sandbox}/archive";

/// Schedules of a sandbox: make, list.
pub const SANDBOX_SCHEDULES: &str = "/v1/sandboxes/{sandbox}/schedules";
/// All schedules: list.
pub const SCHEDULES: &str = "/v1/schedules";
/// One schedule: get, change, remove.
pub const SCHEDULE: &str = "/v1/schedules/{schedule}";
/// Run it now.
pub const SCHEDULE_RUN: &str = "/v1/schedules/{schedule}/run";
/// Webhooks: make, list.
pub const WEBHOOKS: &str = "/v1/webhooks";
/// One webhook: get, change, remove.
pub const WEBHOOK: &str = "/v1/webhooks/{webhook}";
/// Another secret.
pub const WEBHOOK_ROTATE: &str = "/v1/webhooks/{webhook}/rotate";
/// Send again.
pub const WEBHOOK_REPLAY: &str = "/v1/webhooks/{webhook}/replay";
/// Send a test.
pub const WEBHOOK_TEST: &str = "/v1/webhooks/{webhook}/test";
/// Its events that wait, or are dead.
pub const WEBHOOK_DELIVERIES: &str = "/v1/webhooks/{webhook}/deliveries";
/// Audit and reconciliation: look, and with `act` put right.
pub const RECONCILE: &str = "/v1/reconcile";
/// Tasks: run, list.
pub const TASKS: &str = "/v1/tasks";
/// One task.
pub const TASK: &str = "/v1/tasks/{task}";
/// Stop it.
pub const TASK_STOP: &str = "/v1/tasks/{task}/stop";
/// Go on with it.
pub const TASK_CONTINUE: &str = "/v1/tasks/{task}/continue";
/// What happened to it.
pub const TASK_TIMELINE: &str = "/v1/tasks/{task}/timeline";
/// Say that it should not have been ended.
pub const TASK_MARK: &str = "/v1/tasks/{task}/mark";
/// What a step of it wrote.
pub const TASK_LOGS: &str = "/v1/tasks/{task}/logs/{step}";
/// Drain: begin, look at, end.
pub const DRAIN: &str = "/v1/drain";
/// A copy of what is recorded.
pub const BACKUP: &str = "/v1/backup";

/// All snapshots: list, and read one from a file.
pub const SNAPSHOTS: &str = "/v1/snapshots";
/// One snapshot: get, delete.
pub const SNAPSHOT: &str = "/v1/snapshots/{snapshot}";
/// Sandboxes that begin with it.
pub const SNAPSHOT_FORK: &str = "/v1/snapshots/{snapshot}/fork";
/// It as one file.
pub const SNAPSHOT_EXPORT: &str = "/v1/snapshots/{snapshot}/export";

/// The journal: a page, or a stream.
pub const EVENTS: &str = "/v1/events";
/// Figures about all sandboxes.
pub const STATS: &str = "/v1/stats";
/// Keys: make, list.
pub const KEYS: &str = "/v1/keys";
/// One key: revoke.
pub const KEY: &str = "/v1/keys/{key}";
/// The daemon's own log.
pub const LOGS: &str = "/v1/logs";
/// The reconcilers and how they stand.
pub const RECONCILERS: &str = "/v1/reconcilers";
/// Hot spares: how they stand.
pub const SPARES: &str = "/v1/spares";
/// Clean up now.
pub const CLEANUP: &str = "/v1/cleanup";
/// Figures for Prometheus.
pub const METRICS: &str = "/metrics";
/// The built-in alerts.
pub const ALERTS: &str = "/v1/alerts";
/// What this machine can and cannot do.
pub const DOCTOR: &str = "/v1/doctor";

/// Puts values into the braces of a path, in their order, escaped.
///
/// A path with more braces than values, or fewer, is a mistake in the program: what is left over stays as it is and
/// answers 404.
pub fn fill(path: &str, values: &[&str]) -> String {
    let mut filled = String::with_capacity(path.len() + 32);
    let mut values = values.iter();
    for segment in path.split('/').skip(1) {
        filled.push('/');
        match segment.starts_with('{').then(|| values.next()).flatten() {
            Some(value) => filled.push_str(&escape(value)),
            None => filled.push_str(segment),
        }
    }
    filled
}

/// Percent-encodes everything that is not unreserved in a URL.
pub fn escape(text: &str) -> String {
    use std::fmt::Write as _;

    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_filled_in_order_and_escaped() {
        assert_eq!(fill(SIGNAL, &["box", "exe_1"]), "/v1/sandboxes/box/executions/exe_1/signal");
        assert_eq!(fill(SANDBOX, &["a/../b ü"]), "/v1/sandboxes/a%2F..%2Fb%20%C3%BC");
        assert_eq!(fill(HEALTH, &[]), "/health");
    }
}
