//! Records as they are shown: the one place where the engine's words become the API's.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde::Serialize;
use serde_json::{Map, Value};
use viv_api::bound::{KeyId, LeaseName};
use viv_api::daemon::{Finding, Gate as ShownGate, Reconciler, Severity, Version};
use viv_api::diagnosis::{ClientRead, Diagnosis, HostView, LockShown, Locks, Transition};
use viv_api::event::Event;
use viv_api::execution::Execution;
use viv_api::key::{Key, Scope};
use viv_api::limits::{Limit, Limits};
use viv_api::provider::ExecutionContext;
use viv_api::sandbox::{
    Cause, Egress, Evidence, Hibernate, KeepAwake, Network, Observed, ObservedVia, ProviderState, Sandbox,
    SandboxPolicy, SandboxSpec, TimelineEntry,
};
use viv_api::service::{HookShown, ServiceShown};
use viv_core::exec::{ExecSpec, ExecStatus};
use viv_core::execution::Execution as Row;
use viv_core::lifecycle as core;
use viv_core::spec as core_spec;
use viv_core::{Generation, SandboxId, TaskId};
use viv_engine::{Gate, ReconcilerName, ReconcilerStatus, Remark, View};
use viv_provider::{ResourceLimits, UNLIMITED, Whereabouts};
use viv_store::{ApiKey, JournalLine, KeyScope, LeaseKind, NewLine};

use crate::state::ServerState;

/// A JSON answer.
pub(crate) fn json(status: StatusCode, what: &impl Serialize) -> Response<Body> {
    let text = serde_json::to_vec(what).unwrap_or_default();
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// That it is so.
pub(crate) fn ok(what: &impl Serialize) -> Response<Body> {
    json(StatusCode::OK, what)
}

/// That it is so, and nothing more to say.
pub(crate) fn nothing() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

/// A sandbox, and the task that is at work in it. `provider` is through whom it was probed.
pub(crate) fn sandbox(view: View, task: Option<TaskId>, provider: &str) -> Sandbox {
    let View { sandbox: record, status: word, evidence, observed, now_ms } = view;
    let evidence = Evidence::shown(&evidence, &format!("provider:{provider}"));
    let observed = observed.and_then(|observed| shown_observed(&observed));
    let observed_at = evidence.latest_at_ms().max(observed.as_ref().map(|observed| observed.at_ms));
    let leases = record.keep_awake.iter().filter(|(_, lease)| lease.until_ms > now_ms);
    Sandbox {
        project: record.project.to_string(),
        name: record.name.as_ref().map(ToString::to_string),
        status: word.into(),
        desired: record.desired.into(),
        phase: record.phase.name().into(),
        generation: record.generation,
        cause: Some((&record.cause).into()),
        evidence,
        observed,
        observed_at,
        spec: spec(&record.spec),
        policy: SandboxPolicy {
            persistent: record.policy.persistent,
            lifetime_ms: record.policy.lifetime_ms,
            idle_ms: Some(record.policy.idle_ms),
            hibernate_ms: Some(record.policy.hibernate_ms),
            hibernate: match record.policy.hibernate {
                core_spec::Hibernate::Filesystem => Hibernate::Filesystem,
                core_spec::Hibernate::Memory => Hibernate::Memory,
            },
            snapshots_max: record.policy.snapshots_max,
            snapshots_age_ms: record.policy.snapshots_age_ms,
        },
        memory: record.memory.as_ref().map(Into::into),
        services: ServiceShown::all(&record),
        keep_awake: leases.filter_map(|(name, lease)| keep_awake(name, lease)).collect(),
        created_at_ms: record.created_at_ms,
        last_activity_at_ms: Some(record.active_at_ms),
        expires_at_ms: record.lives_until_ms(),
        task,
        executions_running: None,
        deleted: record.deleted,
        version: record.version,
        labels: record.labels,
        id: record.id,
    }
}

/// A lease.
pub(crate) fn keep_awake(name: &str, lease: &core::KeepAwake) -> Option<KeepAwake> {
    let reason = (!lease.reason.is_empty()).then(|| lease.reason.clone());
    Some(KeepAwake { lease: LeaseName::new(name).ok()?, reason, expires_at_ms: lease.until_ms })
}

/// What a provider said, which the record keeps in words: `ended (expired)`.
fn shown_observed(observed: &core::Observed) -> Option<Observed> {
    let (state, cause) = observed.state.split_once(" (").unwrap_or((&observed.state, ""));
    let provider_state = match state {
        "creating" => ProviderState::Creating,
        "running" => ProviderState::Running,
        "frozen" => ProviderState::Frozen,
        "ending" => ProviderState::Ending,
        "ended" => ProviderState::Ended,
        "absent" => ProviderState::Absent,
        _ => return None,
    };
    let via = match observed.via.as_str() {
        "supervisor" => ObservedVia::Supervisor,
        "record" => ObservedVia::Record,
        "api" => ObservedVia::Api,
        "pushed" => ObservedVia::Pushed,
        "listing" => ObservedVia::Listing,
        _ => return None,
    };
    let end_cause = cause.strip_suffix(')').map(str::to_owned);
    Some(Observed { provider_state, end_cause, via, at_ms: observed.at_ms })
}

/// What an image is called.
pub(crate) fn image(image: &core_spec::Image) -> String {
    match image {
        core_spec::Image::Host => viv_api::bound::ImageName::HOST.to_owned(),
        core_spec::Image::Directory { path } => path.clone(),
        core_spec::Image::Named { name } => name.clone(),
    }
}

fn spec(spec: &core_spec::SandboxSpec) -> SandboxSpec {
    SandboxSpec {
        image: image(&spec.image),
        workdir: spec.workdir.clone(),
        env_names: spec.env.keys().cloned().collect(),
        limits: limits(&spec.limits),
        network: Network {
            egress: match spec.network.egress {
                core_spec::Egress::None => Egress::None,
                core_spec::Egress::All => Egress::All,
            },
        },
        packages: spec.packages,
        ports: spec.ports.clone(),
        hooks: HookShown::all(&spec.hooks),
    }
}

/// Limits as they were asked for.
fn limits(limits: &ResourceLimits) -> Limits {
    macro_rules! shown {
        ($($field:ident: $type:ident),+ $(,)?) => {
            Limits { $($field: limits.$field.map(|value| match value {
                UNLIMITED => Limit::UNLIMITED,
                value => Limit::Number(viv_api::bound::$type::nearest(value)),
            }),)+ }
        };
    }
    shown! {
        cpu_millis: CpuMillis, cpu_weight: CpuWeight, cpu_burst_us: CpuBurstUs, memory_bytes: MemoryBytes,
        processes: Processes, disk_bytes: DiskBytes, io_read_bps: IoBps, io_write_bps: IoBps, open_files: OpenFiles,
    }
}

/// An execution.
pub(crate) fn execution(
    state: &ServerState,
    sandbox: &SandboxId,
    generation: Generation,
    status: &ExecStatus,
    frozen: bool,
    row: Option<&Row>,
) -> Execution {
    let asked = state.executions().asked(sandbox, &status.id);
    // What was asked of a daemon before this one is told by the row, or by who runs it.
    let kept = match row {
        Some(row) if !row.argv.is_empty() => ExecSpec {
            argv: row.argv.clone(),
            cwd: row.cwd.clone(),
            user: row.user.clone(),
            limit_ms: row.limit_ms,
            ..ExecSpec::default()
        },
        Some(_) | None => ExecSpec { argv: status.argv.clone(), ..ExecSpec::default() },
    };
    let spec = if asked.spec.argv.is_empty() { &kept } else { &asked.spec };
    let detach = asked.detach || row.is_some_and(|row| row.detached);
    let context = ExecutionContext { sandbox, generation, spec, detach, frozen, row };
    let shown = Execution::shown(status, context);
    let tty = shown.tty || row.is_some_and(|row| row.tty);
    // An end does not change any more, so it is told as it was learnt.
    let known = row.filter(|row| !row.is_open()).map(|row| row.learnt_at_ms);
    Execution { learnt_at_ms: Some(known.unwrap_or_else(|| state.engine().now_ms())), tty, ..shown }
}

/// An execution as it is recorded.
pub(crate) fn recorded(state: &ServerState, row: &Row) -> Execution {
    let asked = state.executions().asked(&row.sandbox, &row.id);
    let shown = Execution::recorded(row, false);
    if asked.spec.argv.is_empty() { shown } else { Execution { argv: asked.spec.argv.clone(), ..shown } }
}

/// What happened, for people.
fn happened(line: &JournalLine) -> String {
    let line = &line.line;
    if let Some(done) = done_inside(line) {
        return done;
    }
    let said = line.data.get("message").and_then(Value::as_str).unwrap_or_default();
    let what = match (line.from, line.to) {
        (Some(from), Some(to)) => format!("{} → {}", from.as_str(), to.as_str()),
        (_, _) => line.kind.rsplit('.').next().unwrap_or_default().replace('_', " "),
    };
    match (&line.cause, said) {
        (None, "") => what,
        (Some(cause), "") => format!("{what} ({cause})"),
        (None, said) => format!("{what}: {said}"),
        (Some(cause), said) => format!("{what} ({cause}): {said}"),
    }
}

/// What was done in a sandbox: a command, or a change of a file (O7).
fn done_inside(line: &NewLine) -> Option<String> {
    let word = |name: &str| line.data.get(name).and_then(Value::as_str).unwrap_or_default();
    let number = |name: &str| line.data.get(name).and_then(Value::as_u64);
    let execution = word("execution");
    Some(match line.kind.as_str() {
        "execution.started" => {
            let argv = line.data.get("argv").and_then(Value::as_array);
            let words: Vec<&str> = argv.into_iter().flatten().filter_map(Value::as_str).collect();
            format!("started {execution}: {}", words.join(" "))
        }
        "execution.ended" => {
            let how = line.cause.as_deref().unwrap_or_default().replace('_', " ");
            let code = line.data.get("code").and_then(Value::as_i64).map(|code| format!(" with {code}"));
            let after = number("ran_ms").map(|ms| format!(" after {ms} ms"));
            format!("{execution} {how}{}{}", code.unwrap_or_default(), after.unwrap_or_default())
        }
        "execution.cancel_asked" => {
            let how = line.cause.as_deref().unwrap_or_default().replace('_', " ");
            format!("cancelled {execution}: {how} after {} ms", number("took_ms").unwrap_or_default())
        }
        "execution.signalled" => format!("sent signal {} to {execution}", number("signal").unwrap_or_default()),
        "file.written" => format!("wrote {} ({} bytes)", word("path"), number("bytes").unwrap_or_default()),
        "file.moved" => format!("moved {} to {}", word("path"), word("to")),
        "file.removed" => format!("removed {}", word("path")),
        "file.folder_made" => format!("made the folder {}", word("path")),
        "file.unpacked" => {
            let (entries, bytes) = (number("entries").unwrap_or_default(), number("bytes").unwrap_or_default());
            format!("unpacked {entries} entries, {bytes} bytes, into {}", word("path"))
        }
        _ => return None,
    })
}

fn line_cause(line: &JournalLine) -> Option<Cause> {
    let code = line.line.cause.clone()?;
    let said = line.line.data.get("message").and_then(Value::as_str).map(str::to_owned);
    let message = said.unwrap_or_else(|| code.replace('_', " "));
    Some(Cause { code, message, at_ms: line.line.at_ms, by: line.line.by.who.clone() })
}

/// A line of the journal.
pub(crate) fn event(line: JournalLine) -> Event {
    let (message, cause) = (happened(&line), line_cause(&line));
    let seq = line.cursor.0;
    let line = line.line;
    let data = match line.data {
        Value::Object(data) => data.into_iter().filter(|(_, value)| !value.is_null()).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => Map::new(),
    };
    Event {
        seq,
        at_ms: line.at_ms,
        kind: line.kind,
        project: line.project.map(|project| project.to_string()),
        sandbox: line.sandbox,
        generation: line.generation,
        from: line.from.map(Into::into),
        to: line.to.map(Into::into),
        cause,
        by: line.by.who,
        address: line.by.from,
        message,
        data,
    }
}

/// A line of a sandbox's timeline. `took_ms` is how long the phase before lasted.
pub(crate) fn timeline(line: &JournalLine, took_ms: Option<u64>) -> TimelineEntry {
    TimelineEntry {
        seq: line.cursor.0,
        at_ms: line.line.at_ms,
        kind: line.line.kind.clone(),
        generation: line.line.generation,
        from: line.line.from.map(Into::into),
        to: line.line.to.map(Into::into),
        took_ms,
        cause: line_cause(line),
        by: line.line.by.who.clone(),
        message: happened(line),
    }
}

/// A key, without its secret. One of the installation is of no project, and works in the default one.
pub(crate) fn key(state: &ServerState, key: &ApiKey) -> Key {
    let (scope, project) = match &key.scope {
        KeyScope::Admin => (Scope::Admin, core_spec::Project::default()),
        KeyScope::Project { project } => (Scope::Project, project.clone()),
        KeyScope::ReadOnly { project } => (Scope::ReadOnly, project.clone()),
    };
    Key {
        id: KeyId::new(key.id.clone()).unwrap_or_else(|_| unreachable!("ids of keys are made here")),
        name: key.name.clone(),
        scope,
        project: project.to_string(),
        created_at_ms: key.created_at_ms,
        last_used_at_ms: state.keys().last_used_at_ms(&key.id),
        expires_at_ms: key.expires_at_ms,
        revoked_at_ms: key.revoked_at_ms,
    }
}

fn about(gate: Gate) -> &'static str {
    match gate {
        Gate::ProbeBeforeUse => "what was away or adopted is probed before its first use",
        Gate::GenerationCheck => "a call that names an old generation is refused",
        Gate::EvidenceAges => "evidence that is too old is not shown as ready",
        Gate::PushedEnds => "ends that are pushed are believed at once",
        Gate::OrphanGrace => "an instance without a record is left alone for a while",
        Gate::TwoListings => "and until two listings agree",
        Gate::Breaker => "a provider that fails again and again is left alone for a moment",
        Gate::FreshExpiry => "a hard deadline is asked for before anything follows from it",
        Gate::ActivityFilter => "only use keeps a sandbox from idling, and not being looked at",
        Gate::EntryOnlyResume => "only an entry brings back what rests",
        Gate::ProviderTruth => "what the provider says counts, whatever is recorded",
        Gate::DurableStop => "a stop of a task is written down before anything is done about it",
        Gate::PushedCancellation => "whoever works on a task hears of its end at once",
        Gate::InactivityLimit => "a task that is silent for too long ends",
        Gate::AuthoritativeTimeout => "a task whose time is over is terminated",
        Gate::EffectsGate => "effects of a task run only with a grant",
        Gate::Quota => "how many sandboxes there are and what they may use together is bounded",
    }
}

/// What runs here.
pub(crate) fn version(state: &ServerState) -> Version {
    let (engine, build) = (state.engine(), state.build());
    let gate = |gate: Gate| {
        let setting = engine.config().gates.setting(gate);
        let others: Vec<String> = setting.others().map(|(project, _)| project.to_string()).collect();
        ShownGate {
            name: gate.name().to_owned(),
            on: setting.is_on_everywhere(),
            about: about(gate).to_owned(),
            set_by: setting.set_by.as_str().to_owned(),
            // Beside projects for which it is otherwise, `off` would say of all what is so of some.
            percent: ((1..100).contains(&setting.percent) || !others.is_empty()).then_some(setting.percent),
            except_projects: others,
        }
    };
    Version {
        version: build.version.clone(),
        commit: build.commit.clone(),
        api: "v1".to_owned(),
        provider: engine.provider().name().to_owned(),
        gates: Gate::ALL.into_iter().map(gate).collect(),
        started_at_ms: state.started_at_ms(),
    }
}

/// A reconciler. One that is far past its time is overdue (J3).
pub(crate) fn reconciler(status: &ReconcilerStatus, state: &ServerState) -> Reconciler {
    let periods = &state.engine().config().periods;
    let period = match status.name {
        ReconcilerName::ProviderSync => periods.provider_sync,
        ReconcilerName::Expiry => periods.expiry,
        ReconcilerName::Stuck => periods.stuck,
        ReconcilerName::Snapshots => periods.snapshots,
        ReconcilerName::Retention => periods.retention,
        ReconcilerName::Spares => state.engine().config().spares.period,
        // One runs when somebody reads, the other for an alarm, and neither at a time of its own.
        ReconcilerName::Health | ReconcilerName::Idle => std::time::Duration::ZERO,
        ReconcilerName::Cleanup => state.engine().config().cleanup.map(|cleanup| cleanup.period).unwrap_or_default(),
        ReconcilerName::Full => state.engine().config().cleanup.map(|cleanup| cleanup.full_period).unwrap_or_default(),
        ReconcilerName::Alerts => {
            state.engine().config().alerts.as_ref().map(|alerts| alerts.period).unwrap_or_default()
        }
    };
    let period_ms = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
    let now_ms = state.engine().now_ms();
    Reconciler {
        name: status.name.as_str().to_owned(),
        period_ms,
        runs_total: status.runs,
        last_run_at_ms: status.last_at_ms,
        took_ms: status.last_at_ms.map(|_| status.took_ms),
        found: status.found,
        did: status.did,
        failed: status.failed,
        last_error: status.error.clone(),
        next_run_at_ms: status.next_at_ms,
        overdue: status.is_overdue(now_ms),
    }
}

fn transition(record: &core::Sandbox) -> Option<Transition> {
    let work = record.phase.work()?;
    // The phase is data with a step in it, and its words are those that are stored.
    let stored = serde_json::to_value(&record.phase).unwrap_or_default();
    let step = stored.get("step").and_then(Value::as_str);
    Some(Transition {
        phase: record.phase.name().into(),
        step: step.unwrap_or(record.phase.name().as_str()).to_owned(),
        attempt: work.attempt,
        attempts_max: None,
        since_at_ms: record.phase_since_ms,
        deadline_at_ms: Some(work.deadline_at_ms),
        operation: Some(work.operation.to_string()),
        next_attempt_at_ms: (work.retry_at_ms > 0).then_some(work.retry_at_ms),
        last_error: record.cause.message.clone().filter(|_| work.attempt > 1),
    })
}

fn host(whereabouts: Whereabouts) -> HostView {
    HostView {
        shim_pid: whereabouts.supervisor_pid,
        agent_pid: whereabouts.agent_pid,
        root_mount: whereabouts.root,
        cgroups: whereabouts.cgroups,
        folder: whereabouts.folder,
    }
}

/// Something worth saying about a sandbox.
fn finding(remark: Remark) -> Finding {
    let severity = match remark.code {
        "unverified" | "no_task" => Severity::Info,
        "lost" | "failed" | "save_failed" | "kill_failed" | "broken_mount" | "agent_dead" | "out_of_memory" => {
            Severity::Critical
        }
        _ => Severity::Warning,
    };
    Finding {
        severity,
        code: remark.code.to_owned(),
        message: remark.what,
        evidence: remark.evidence,
        command: Some(remark.helps),
    }
}

/// All that is known about a sandbox. Where it is on the host is for those who run the host.
pub(crate) fn diagnosis(state: &ServerState, diagnosis: viv_engine::Diagnosis, is_admin: bool) -> Diagnosis {
    let viv_engine::Diagnosis { view, task, provider, auto_saved, kept, locks, whereabouts, reads, remarks } =
        diagnosis;
    let at_ms = view.now_ms;
    let transition = transition(&view.sandbox);
    let mut shown = sandbox(view, task, state.engine().provider().name());
    let mut findings: Vec<Finding> = remarks.into_iter().map(finding).collect();
    match provider {
        Ok(seen) => shown.observed = Some((&seen).into()),
        Err(message) => findings.push(Finding {
            severity: Severity::Warning,
            code: "provider_silent".to_owned(),
            // What went wrong names places on the host, which are for those who run it.
            message: if is_admin {
                format!("the provider did not say how it is: {message}")
            } else {
                "the provider did not say how it is".to_owned()
            },
            evidence: Vec::new(),
            command: Some("viv doctor".to_owned()),
        }),
    }
    shown.observed_at = shown.observed_at.max(shown.observed.as_ref().map(|observed| observed.at_ms));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let mut shown_locks = Locks::default();
    for lock in locks {
        let shown = Some(LockShown {
            holder: lock.holder,
            since_at_ms: lock.since_ms,
            expires_at_ms: lock.expires_at_ms,
            token: lock.token.0,
        });
        match lock.kind {
            LeaseKind::Lifecycle => shown_locks.lifecycle = shown,
            LeaseKind::Start => shown_locks.start = shown,
        }
    }
    Diagnosis {
        sandbox: shown,
        at_ms,
        transition,
        auto_saved: auto_saved.map(Into::into),
        snapshots: kept.newest.into_iter().map(Into::into).collect(),
        snapshots_count: kept.count,
        snapshots_bytes: kept.size_bytes,
        locks: shown_locks,
        reads: reads.into_iter().map(|(client, at_ms)| ClientRead { client, at_ms }).collect(),
        daemon: version(state),
        host: whereabouts.filter(|_| is_admin).map(host),
        findings,
    }
}
