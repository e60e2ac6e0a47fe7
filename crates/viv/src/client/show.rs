//! `viv show`

use std::fmt::Write as _;
use std::process::ExitCode;

use viv_api::bound::{GenerationNumber, SandboxRef};
use viv_api::daemon::{Finding, Severity};
use viv_api::diagnosis::{Diagnosis, LockShown};
use viv_api::sandbox::{Hibernate, MemoryShown, MemoryState, Probe, Sandbox};

use super::progress::Waiting;
use super::table::{Facts, ago, clean, until};
use super::{Daemon, now_ms, print, print_json};
use crate::text::span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// Probe it now; that is not activity
    #[arg(long)]
    verify: bool,
    /// All that is known: transition, locks, readers, where to look on the machine, and what it means
    #[arg(long)]
    diagnosis: bool,
    /// The generation that is meant; another one is refused
    #[arg(long, value_name = "N")]
    generation: Option<GenerationNumber>,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut handle = daemon.sandbox(&args.sandbox);
    if let Some(generation) = args.generation {
        handle = handle.at(generation.into());
    }
    let sandbox = if args.verify {
        let _waiting = Waiting::on("probing");
        Some(handle.verify()?)
    } else {
        None
    };
    if args.diagnosis {
        let diagnosis = handle.diagnosis()?;
        if daemon.json {
            return print_json(&lifted(&diagnosis)?);
        }
        return print(&diagnosed(&diagnosis, now_ms()));
    }
    let sandbox = match sandbox {
        Some(sandbox) => sandbox,
        None => handle.get()?,
    };
    daemon.answer(&sandbox, || shown(&sandbox, now_ms()))
}

/// A diagnosis with the sandbox's own fields beside its others, so that `show --json` has them where it always has.
fn lifted(diagnosis: &Diagnosis) -> anyhow::Result<serde_json::Value> {
    let mut all = serde_json::to_value(diagnosis)?;
    if let Some(fields) = all.as_object_mut()
        && let Some(serde_json::Value::Object(sandbox)) = fields.remove("sandbox")
    {
        fields.extend(sandbox);
    }
    Ok(all)
}

pub(super) fn shown(sandbox: &Sandbox, now_ms: u64) -> String {
    let mut facts = Facts::default();
    facts.add("id", sandbox.id.as_str());
    facts.maybe("name", sandbox.name.clone());
    facts.add("project", &*sandbox.project);
    facts.add("status", sandbox.status.as_str());
    facts.add("desired", sandbox.desired.as_str());
    facts.add("phase", format!("{}, generation {}", sandbox.phase, sandbox.generation));
    facts.maybe(
        "cause",
        sandbox.cause.as_ref().map(|cause| {
            let more = if cause.message.is_empty() { String::new() } else { format!(": {}", cause.message) };
            format!("{}, {}, by {}{more}", cause.code, ago(now_ms, cause.at_ms), cause.by)
        }),
    );
    evidence(sandbox, now_ms, &mut facts);
    facts.maybe(
        "observed",
        sandbox.observed.as_ref().map(|seen| {
            let end = seen.end_cause.as_ref().map_or_else(String::new, |cause| format!(" ({cause})"));
            format!("{}{end} by the {}, {}", word(&seen.provider_state), word(&seen.via), ago(now_ms, seen.at_ms))
        }),
    );
    let image = format!("{}, starts in {}", sandbox.spec.image, sandbox.spec.workdir);
    facts.add("image", image);
    facts.maybe("env", some(&sandbox.spec.env_names.join(" ")));
    facts.maybe(
        "labels",
        some(&sandbox.labels.iter().map(|(key, value)| format!("{key}={value}  ")).collect::<String>()),
    );
    facts.add("egress", word(&sandbox.spec.network.egress));
    facts.maybe("packages", sandbox.spec.packages.then(|| "root may change owners and become other users".to_owned()));
    let persistent = if sandbox.policy.persistent { "persistent" } else { "ephemeral" };
    let policy = &sandbox.policy;
    let idle = policy.idle_ms.map_or_else(String::new, |ms| format!(", frozen after {} unused", span(ms)));
    let then = if policy.persistent { "saved" } else { "ended" };
    let rest = policy.hibernate_ms.map_or_else(String::new, |ms| format!(", {then} after {} more", span(ms)));
    let with = if policy.hibernate == Hibernate::Memory { ", with its memory" } else { "" };
    facts.add("policy", format!("{persistent}, lives {}{idle}{rest}{with}", span(policy.lifetime_ms)));
    facts.maybe("memory", sandbox.memory.as_ref().map(memory));
    facts.add("created", ago(now_ms, sandbox.created_at_ms));
    facts.maybe("active", sandbox.last_activity_at_ms.map(|at_ms| ago(now_ms, at_ms)));
    facts.maybe("expires", sandbox.expires_at_ms.map(|at_ms| until(now_ms, at_ms)));
    facts.maybe("task", sandbox.task.as_ref().map(ToString::to_string));
    if let Some(running) = sandbox.executions_running {
        facts.add("executions", format!("{running} running"));
    }
    for lease in &sandbox.keep_awake {
        let reason = lease.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        let ends = until(now_ms, lease.expires_at_ms);
        facts.add("kept awake", format!("{}, ends {ends}{reason}", lease.lease));
    }
    facts.render()
}

fn memory(memory: &MemoryShown) -> String {
    let what = match memory.state {
        MemoryState::Saving => "is being saved",
        MemoryState::Kept => "is saved",
        MemoryState::Restored => "was restored",
        MemoryState::NotSaved => "was not saved",
        MemoryState::NotRestored => "was not restored",
    };
    let with = memory.snapshot.as_ref().map_or_else(String::new, |snapshot| format!(", with {snapshot}"));
    let why = memory.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    format!("{what}{with}{why}")
}

/// Nothing, where there is nothing to say.
fn some(text: &str) -> Option<String> {
    Some(text.trim_end().to_owned()).filter(|text| !text.is_empty())
}

fn evidence(sandbox: &Sandbox, now_ms: u64, facts: &mut Facts) {
    let line = |probe: Option<&Probe>| {
        probe.map_or_else(
            || "not probed".to_owned(),
            |probe| {
                let more = probe.message.as_ref().map_or_else(String::new, |message| format!(": {message}"));
                format!("{}, {}, took {}{more}", probe.outcome, ago(now_ms, probe.checked_at_ms), span(probe.took_ms))
            },
        )
    };
    facts.add("exec", line(sandbox.evidence.exec.as_ref()));
    facts.add("filesystem", line(sandbox.evidence.filesystem.as_ref()));
    for port in &sandbox.evidence.ports {
        facts.add(&format!("port {}", port.port), line(Some(&port.probe)));
    }
    for service in &sandbox.services {
        let probe = sandbox.evidence.services.iter().find(|probe| probe.service == service.name);
        let mut text = line(probe.map(|probe| &probe.probe));
        if let Some(execution) = &service.execution {
            text = format!("{text}, as {execution}");
        }
        if service.restarts > 0 {
            text = format!("{text}, started again {} times", service.restarts);
        }
        facts.add(&format!("service {}", service.name), text);
    }
}

/// A word of the API as it writes it.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn diagnosed(diagnosis: &Diagnosis, now_ms: u64) -> String {
    let mut text = shown(&diagnosis.sandbox, now_ms);
    let mut facts = Facts::default();
    if let Some(transition) = &diagnosis.transition {
        let of = transition.attempts_max.map_or_else(String::new, |max| format!(" of {max}"));
        let since = ago(now_ms, transition.since_at_ms);
        facts.add("transition", format!("{}, attempt {}{of}, since {since}", transition.step, transition.attempt));
        facts.maybe("falls back", transition.deadline_at_ms.map(|at_ms| until(now_ms, at_ms)));
        facts.maybe("tries again", transition.next_attempt_at_ms.map(|at_ms| until(now_ms, at_ms)));
        facts.maybe("operation", transition.operation.clone());
        facts.maybe("last error", transition.last_error.clone());
    }
    let saved = |snapshot: &viv_api::diagnosis::SnapshotShown| {
        let (at, integrity) = (ago(now_ms, snapshot.created_at_ms), word(&snapshot.integrity));
        let name = snapshot.name.as_ref().map_or_else(String::new, |name| format!(" ({name})"));
        format!("{}{name}, {at}, {}, {integrity}", snapshot.id, crate::text::bytes(snapshot.size_bytes))
    };
    facts.maybe("auto-saved", diagnosis.auto_saved.as_ref().map(saved));
    if diagnosis.snapshots_count > 0 {
        let bytes = crate::text::bytes(diagnosis.snapshots_bytes);
        facts.add("snapshots", format!("{}, {bytes} in all", diagnosis.snapshots_count));
    }
    for snapshot in &diagnosis.snapshots {
        facts.add("snapshot", saved(snapshot));
    }
    let lock = |lock: &LockShown| {
        let (since, ends) = (ago(now_ms, lock.since_at_ms), until(now_ms, lock.expires_at_ms));
        format!("{}, since {since}, ends {ends}, token {}", lock.holder, lock.token)
    };
    facts.maybe("lifecycle lock", diagnosis.locks.lifecycle.as_ref().map(lock));
    facts.maybe("start lock", diagnosis.locks.start.as_ref().map(lock));
    for read in &diagnosis.reads {
        facts.add("read by", format!("{}, {}", read.client, ago(now_ms, read.at_ms)));
    }
    if let Some(host) = &diagnosis.host {
        facts.maybe("shim", host.shim_pid.map(|pid| format!("pid {pid}")));
        facts.maybe("agent", host.agent_pid.map(|pid| format!("pid {pid}")));
        facts.maybe("root", host.root_mount.clone());
        for cgroup in &host.cgroups {
            facts.add("cgroup", &**cgroup);
        }
        facts.maybe("folder", host.folder.clone());
    }
    let version = &diagnosis.daemon;
    facts.add("daemon", format!("{} ({}), provider {}", version.version, version.commit, version.provider));
    let off: Vec<_> = version.gates.iter().filter(|gate| !gate.on).map(|gate| gate.name.clone()).collect();
    facts.maybe("gates off", some(&off.join(" ")));
    let _ = write!(text, "\n{}", facts.render());
    if !diagnosis.findings.is_empty() {
        text.push('\n');
    }
    text.extend(diagnosis.findings.iter().map(finding));
    text
}

/// A finding and what helps.
pub(crate) fn finding(finding: &Finding) -> String {
    let severity = match finding.severity {
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Critical => "critical",
    };
    let helps = finding.command.as_ref().map_or_else(String::new, |command| format!("  try: {}\n", clean(command)));
    let seen: String = finding.evidence.iter().map(|seen| format!("  seen: {}\n", clean(seen))).collect();
    format!("{severity}: {} ({})\n{seen}{helps}", clean(&finding.message), clean(&finding.code))
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A sandbox as it comes, seen at 100 s.
    pub(in crate::client) fn sandbox() -> Sandbox {
        let probe = json!({"outcome": "ok", "checked_at_ms": 95_000, "took_ms": 12, "message": null, "path": "p"});
        serde_json::from_value(json!({
            "id": "sbx_01h2xcejqtf2nbrexx3vqjhp41", "project": "default", "name": "box", "status": "ready",
            "desired": "running", "phase": "ready", "generation": 2,
            "cause": {"code": "verified", "message": "", "at_ms": 90_000, "by": "engine"},
            "evidence": {"exec": probe, "filesystem": probe, "ports": []},
            "observed": {"provider_state": "running", "end_cause": null, "via": "supervisor", "at_ms": 95_000},
            "observed_at": 95_000, "labels": {"agent": "coder", "team": "search"},
            "spec": {"image": "host", "workdir": "/workspace", "env_names": ["TOKEN"], "limits": {},
                     "network": {"egress": "none"}, "ports": []},
            "policy": {"persistent": true, "lifetime_ms": 3_600_000, "idle_ms": 900_000, "hibernate_ms": 900_000},
            "created_at_ms": 500, "last_activity_at_ms": 40_000, "expires_at_ms": 3_600_500, "version": 7
        }))
        .unwrap()
    }

    #[test]
    fn t8_what_is_wanted_what_is_and_what_was_checked_are_told_apart() {
        let text = shown(&sandbox(), 100_000);
        for line in [
            "status      ready\n",
            "desired     running\n",
            "phase       ready, generation 2\n",
            "cause       verified, 10s ago, by engine\n",
            "exec        ok, 5s ago, took 12ms\n",
            "observed    running by the supervisor, 5s ago\n",
            "policy      persistent, lives 1h, frozen after 15m unused, saved after 15m more\n",
            "active      1m ago\n",
            "expires     in 58m\n",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
    }

    #[test]
    fn a_diagnosis_has_the_fields_of_the_sandbox_where_show_has_them() {
        let diagnosis: Diagnosis = serde_json::from_value(json!({
            "sandbox": sandbox(), "at_ms": 1, "transition": null, "auto_saved": null,
            "snapshots": [{"id": "snp_1", "name": "before", "generation": 2, "created_at_ms": 40_000,
                           "size_bytes": 2_048, "integrity": "verified"}],
            "snapshots_count": 12, "snapshots_bytes": 30_720,
            "locks": {"lifecycle": {"holder": "daemon", "since_at_ms": 40_000, "expires_at_ms": 160_000, "token": 7},
                      "start": null},
            "reads": [],
            "daemon": {"version": "0.1.0", "commit": "c", "api": "v1", "provider": "local", "gates": [],
                       "started_at_ms": 1},
            "host": {"shim_pid": 12, "agent_pid": 13, "root_mount": "/r", "cgroups": ["/c"], "folder": "/f"},
            "findings": [{"severity": "warning", "code": "evidence_old", "message": "old",
                          "command": "viv show --verify box"}]
        }))
        .unwrap();
        let json = lifted(&diagnosis).unwrap();
        assert_eq!((&json["id"], &json["host"]["shim_pid"]), (&json!("sbx_01h2xcejqtf2nbrexx3vqjhp41"), &json!(12)));
        assert_eq!(json.get("sandbox"), None);
        let text = diagnosed(&diagnosis, 100_000);
        for line in [
            "shim            pid 12\n",
            "root            /r\n",
            "snapshots       12, 30.0 KiB in all\n",
            "snapshot        snp_1 (before), 1m ago, 2.0 KiB, verified\n",
            "lifecycle lock  daemon, since 1m ago, ends in 1m, token 7\n",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
        assert!(text.ends_with("warning: old (evidence_old)\n  try: viv show --verify box\n"), "{text}");
    }
}
