//! All families there are: the one table from which text, documentation and alerts are made.

/// What kind of figure it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// It only grows, from 0 when the daemon begins.
    Counter,
    /// It is as it is now.
    Gauge,
    /// How many were up to each of these.
    Histogram(&'static [f64]),
}

impl Kind {
    /// Prometheus's word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }
}

/// Figures of one kind, told apart by labels.
#[derive(Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// By what its series are told apart.
    pub labels: &'static [&'static str],
    /// For people.
    pub help: &'static str,
}

/// Bounds of what is quick: a request, a commit.
const QUICK_S: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Bounds of what takes its time: an end, a phase. The targets of O2 are among them.
const LONG_S: &[f64] = &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21600.0];

macro_rules! families {
    ($($id:ident = $name:literal, $kind:expr, [$($label:literal),*], $help:literal;)*) => {
        $(#[doc = $help] pub static $id: Family =
            Family { name: $name, kind: $kind, labels: &[$($label),*], help: $help };)*
        /// All of them, in the order in which they are told.
        pub static ALL: &[&Family] = &[$(&$id),*];
    };
}

families! {
    BUILD = "viv_build_info", Kind::Gauge, ["version", "commit", "provider"], "Always 1; what runs is in the labels.";
    STARTED = "viv_started_timestamp_seconds", Kind::Gauge, [], "When this daemon began.";

    SANDBOXES = "viv_sandboxes", Kind::Gauge, ["phase"], "Sandboxes in each phase.";
    ACTIVE = "viv_sandboxes_active", Kind::Gauge, [], "Sandboxes that run or may run, without spares.";
    STUCK = "viv_sandboxes_stuck", Kind::Gauge, ["why"], "Sandboxes that do not go on: a phase past its deadline (`overdue`), given up at one in the last quarter of an hour, while nobody came for it (`given_up`), or ready without activity for longer than alerts allow (`no_progress`).";
    SAVE_FAILED = "viv_sandboxes_save_failed", Kind::Gauge, [], "Sandboxes that could not be saved, and wait quiesced with their files kept.";
    KILL_FAILED = "viv_sandboxes_kill_failed", Kind::Gauge, [], "Sandboxes that are to end and are still there.";

    CREATED = "viv_sandboxes_created_total", Kind::Counter, [], "Sandboxes that were made.";
    TRANSITIONS = "viv_transitions_total", Kind::Counter, ["from", "to", "cause"], "Changes of phase.";
    PHASE_SECONDS = "viv_phase_seconds", Kind::Histogram(LONG_S), ["phase"], "How long a phase lasted that was entered and left since the daemon began.";
    PROVISIONS = "viv_provisions_total", Kind::Counter, [], "Tries to bring a sandbox up that ended, well or not.";
    PROVISIONS_FAILED = "viv_provisions_failed_total", Kind::Counter, [], "Those that failed.";
    TERMINATIONS = "viv_terminations_asked_total", Kind::Counter, [], "Sandboxes that began to end, or to be saved.";
    TERMINATIONS_DONE = "viv_terminations_succeeded_total", Kind::Counter, [], "Those that did: saved, or their absence seen.";
    TERMINATIONS_FAILED = "viv_terminations_failed_total", Kind::Counter, [], "Those that did not when they should have: a kill or a save failed, or took too long. Each end counts once.";
    TERMINATION_SECONDS = "viv_termination_seconds", Kind::Histogram(LONG_S), [], "From the wish to end until it was saved, or its absence seen.";
    ENDS = "viv_ends_total", Kind::Counter, [], "Runs of sandboxes that were over: ended, saved or lost.";
    TIMEOUTS = "viv_timeouts_total", Kind::Counter, [], "Runs of sandboxes that were over because their hard deadline passed.";
    TIMEOUT_CLEANUPS = "viv_timeout_cleanups_asked_total", Kind::Counter, [], "Sandboxes whose hard deadline passed, and that were to be cleaned up.";
    TIMEOUT_CLEANUPS_DONE = "viv_timeout_cleanups_succeeded_total", Kind::Counter, [], "Those that were.";
    LOST = "viv_sandboxes_lost_total", Kind::Counter, [], "Sandboxes that were gone unasked.";
    CORRUPTED = "viv_sandboxes_corrupted_total", Kind::Counter, [], "Sandboxes that were lost or failed and not by anybody's wish: crashed, unresponsive, gone from the provider, broken for good.";
    IDLED = "viv_idled_total", Kind::Counter, [], "Sandboxes that were put to rest because nobody used them.";
    SAVES_FAILED = "viv_saves_failed_total", Kind::Counter, [], "Saves that failed.";
    OVERDUE = "viv_overdue_total", Kind::Counter, ["phase"], "Phases that took longer than they may.";

    TASKS_LIVING = "viv_tasks", Kind::Gauge, ["state"], "Tasks that are not over, by where they are.";
    TASKS_CREATED = "viv_tasks_created_total", Kind::Counter, [], "Tasks that were made.";
    TASKS_STARTED = "viv_tasks_started_total", Kind::Counter, [], "Tasks whose first command was started, counted again when they are continued.";
    TASK_STOP_SECONDS = "viv_task_stop_seconds", Kind::Histogram(QUICK_S), [], "From the wish to stop a task until it was over.";
    TASKS = "viv_tasks_ended_total", Kind::Counter, ["state"], "Tasks that were over, by how.";
    TASKS_ALL = "viv_tasks_over_total", Kind::Counter, [], "Tasks that were over.";
    TASKS_INACTIVE = "viv_tasks_inactive_total", Kind::Counter, [], "Tasks that were ended because they said nothing.";
    TASKS_TIMED_OUT = "viv_tasks_timed_out_total", Kind::Counter, [], "Tasks that were ended because they took too long.";

    PROBES = "viv_probes_total", Kind::Counter, ["check"], "Probes of sandboxes.";
    PROBE_FAILURES = "viv_probe_failures_total", Kind::Counter, ["check", "finding"], "Probes that were not well.";
    EXECUTIONS = "viv_executions_started_total", Kind::Counter, [], "Commands that were started through the API.";
    EXECUTIONS_QUEUED = "viv_executions_queued", Kind::Gauge, [], "Commands that wait to be started.";
    EXECUTIONS_ENDED = "viv_executions_ended_total", Kind::Counter, [], "Commands that ended, whoever started them.";
    EXECUTIONS_TIMED_OUT = "viv_executions_timed_out_total", Kind::Counter, [], "Commands that were ended because they took too long.";
    CANCELLATIONS = "viv_cancellations_total", Kind::Counter, ["outcome"], "Commands that were to be ended, and what came of that.";
    CANCELLATION_SECONDS = "viv_cancellation_seconds", Kind::Histogram(QUICK_S), [], "From the wish to end a command to its whole tree being gone.";

    SPARES = "viv_spares", Kind::Gauge, ["class", "state"], "Spares of each class: `ready`, `making`, and how many there should be (`target`).";
    SPARE_ASKS = "viv_spare_asks_total", Kind::Counter, ["class", "outcome"], "Creates that fit a class of spares, by whether one was there: `claimed` or `missed`.";

    ORPHANS = "viv_orphans", Kind::Gauge, [], "Instances of ours that no record wants, as of the last look.";
    ORPHANS_FOUND = "viv_orphans_found_total", Kind::Counter, [], "Instances of ours that no record wanted, and what else was left of ours on the machine, each counted once.";
    ORPHANS_COLLECTED = "viv_orphans_collected_total", Kind::Counter, [], "Those that were removed.";
    RECONCILER_RUNS = "viv_reconciler_runs_total", Kind::Counter, ["reconciler"], "Runs of a reconciler.";
    RECONCILER_FAILURES = "viv_reconciler_failures_total", Kind::Counter, ["reconciler"], "Runs that failed as a whole or in a part.";
    RECONCILER_SECONDS = "viv_reconciler_seconds", Kind::Histogram(QUICK_S), ["reconciler"], "How long a run took.";
    RECONCILER_LAST = "viv_reconciler_last_run_timestamp_seconds", Kind::Gauge, ["reconciler"], "When it last ran.";
    RECONCILERS_BAD = "viv_reconcilers_failing", Kind::Gauge, [], "Reconcilers whose last run failed, or that should have run long ago (J3).";

    QUOTA_LIMIT = "viv_quota_limit", Kind::Gauge, ["quota"], "What there may be; a quota that nobody set is not there.";
    QUOTA_USED = "viv_quota_used", Kind::Gauge, ["quota"], "What there is of it.";
    QUOTA_RATIO = "viv_quota_use_ratio", Kind::Gauge, ["quota"], "The one by the other; `project_…` is that of the project that has least left.";
    QUOTA_REFUSALS = "viv_quota_refusals_total", Kind::Counter, [], "Requests that were refused because a quota was used up.";

    GATES_OFF = "viv_gates_off", Kind::Gauge, [], "Gates that are off, or not on for everybody.";
    BREAKER_OPEN = "viv_breakers_open", Kind::Gauge, ["kind"], "Destinations that are left alone for a while because they fail.";
    BREAKER_OPENED = "viv_breaker_opened_total", Kind::Counter, [], "How often the provider was left alone.";
    WEBHOOKS = "viv_webhook_deliveries_total", Kind::Counter, ["outcome"], "Tries to deliver a webhook of a hook.";
    WEBHOOK_SUBSCRIPTIONS = "viv_webhook_subscriptions", Kind::Gauge, [], "Subscriptions to events.";
    WEBHOOKS_FAILING = "viv_webhook_subscriptions_failing", Kind::Gauge, [], "Subscriptions with an event that was tried three times or more and not taken.";
    WEBHOOK_EVENTS = "viv_webhook_event_deliveries_total", Kind::Counter, ["outcome"], "Tries to deliver an event to a subscription: `delivered`, `refused`, `down`, or `postponed` without asking.";
    WEBHOOK_EVENTS_WAITING = "viv_webhook_events_waiting", Kind::Gauge, [], "Events that are to be delivered.";
    WEBHOOK_OLDEST_SECONDS = "viv_webhook_events_oldest_seconds", Kind::Gauge, [], "For how long the oldest of them has waited.";
    WEBHOOK_EVENTS_DEAD = "viv_webhook_events_dead", Kind::Gauge, [], "Dead letters: events that are not tried any more.";
    WEBHOOK_EVENTS_DIED = "viv_webhook_events_died_total", Kind::Counter, [], "Events that became dead letters.";

    DRIVERS = "viv_drivers", Kind::Gauge, [], "Sandboxes that are being worked on.";
    WATCHED = "viv_watched_instances", Kind::Gauge, [], "Instances whose end is waited for.";
    ALARMS = "viv_alarms", Kind::Gauge, [], "Alarms that are set.";
    KNOWN = "viv_known_sandboxes", Kind::Gauge, [], "Sandboxes of which something is kept in memory.";
    COMMIT_SECONDS = "viv_store_commit_seconds", Kind::Histogram(QUICK_S), [], "How long a change took to be durable.";
    STORE_GROUPS = "viv_store_groups_total", Kind::Counter, [], "Transactions of the store.";
    STORE_GROUPED = "viv_store_grouped_writes_total", Kind::Counter, [], "Writes in them: several that wait are one transaction.";
    GROUP_LAST = "viv_store_group_size", Kind::Gauge, ["which"], "Writes in the last transaction (`last`), and in the greatest so far (`max`).";
    JOURNAL_LINES = "viv_journal_lines_total", Kind::Counter, ["kind"], "Lines of the journal.";

    HTTP_REQUESTS = "viv_http_requests_total", Kind::Counter, ["method", "route", "code"], "Requests, by the template of their path.";
    HTTP_SECONDS = "viv_http_request_seconds", Kind::Histogram(QUICK_S), ["method"], "How long it took until the answer began.";
    HTTP_IN_FLIGHT = "viv_http_requests_in_flight", Kind::Gauge, [], "Requests that wait for the beginning of their answer.";
    FOLLOWERS = "viv_event_followers", Kind::Gauge, [], "Clients that follow the journal.";

    SPANS_SENT = "viv_trace_spans_sent_total", Kind::Counter, [], "Spans that the receiver of traces took; not there where nothing is traced.";
    SPANS_DROPPED = "viv_trace_spans_dropped_total", Kind::Counter, [], "Spans that were dropped, because the receiver was down, slow, or refused them.";

    ALERTS = "viv_alerts", Kind::Gauge, ["alert", "severity", "state"], "Built-in alerts that are pending or firing.";
    ALERTS_FIRED = "viv_alerts_fired_total", Kind::Counter, ["alert"], "How often a built-in alert began to fire.";
    SERIES_DROPPED = "viv_metrics_dropped_total", Kind::Counter, [], "Changes of series that were too many to be kept.";
}

/// A page that tells them all: `docs/metrics.md` is made of it.
pub fn table() -> String {
    let mut text = String::from("| name | kind | labels | what |\n|---|---|---|---|\n");
    for family in ALL {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let row =
            format!("| `{}` | {} | {} | {} |\n", family.name, family.kind.as_str(), labels.join(", "), family.help);
        text.push_str(&row);
    }
    text
}
