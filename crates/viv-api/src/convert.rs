//! From the core's words to the API's and back, so that no other crate has to say how they correspond.

mod service;

use viv_core::lifecycle::{self, Caused};
use viv_core::limits::{ResourceLimits, UNLIMITED};
use viv_core::snapshot as core_snapshot;
use viv_core::spec;

use crate::bound::{ImageName, Path, ProjectName, SandboxName, SnapshotRef};
use crate::diagnosis::{Integrity, SnapshotShown};
use crate::error::{ApiError, ErrorCode};
use crate::limits::{Limit, Limits, LimitsInForce};
use crate::sandbox::{
    Cause, CreateSandbox, Desired, Egress, Evidence, Hibernate, Network, Phase, PortProbe, Probe, ProbeOutcome,
    ServiceProbe, Status,
};
use crate::snapshot::{Snapshot, SnapshotIntegrity, SnapshotKind, SnapshotState};

fn asked<T: Into<u64>>(limit: Option<Limit<T>>) -> Option<u64> {
    limit.map(|limit| limit.number().map_or(UNLIMITED, Into::into))
}

impl From<Limits> for ResourceLimits {
    fn from(limits: Limits) -> Self {
        Self {
            cpu_millis: asked(limits.cpu_millis),
            cpu_weight: asked(limits.cpu_weight),
            cpu_burst_us: asked(limits.cpu_burst_us),
            memory_bytes: asked(limits.memory_bytes),
            processes: asked(limits.processes),
            disk_bytes: asked(limits.disk_bytes),
            io_read_bps: asked(limits.io_read_bps),
            io_write_bps: asked(limits.io_write_bps),
            open_files: asked(limits.open_files),
        }
    }
}

impl From<&ResourceLimits> for LimitsInForce {
    fn from(limits: &ResourceLimits) -> Self {
        let limits = limits.in_force();
        Self {
            cpu_millis: limits.cpu_millis,
            cpu_weight: limits.cpu_weight,
            cpu_burst_us: limits.cpu_burst_us,
            memory_bytes: limits.memory_bytes,
            processes: limits.processes,
            disk_bytes: limits.disk_bytes,
            io_read_bps: limits.io_read_bps,
            io_write_bps: limits.io_write_bps,
            open_files: limits.open_files,
        }
    }
}

impl From<Network> for spec::Network {
    fn from(network: Network) -> Self {
        let egress = match network.egress {
            Egress::None => spec::Egress::None,
            Egress::All => spec::Egress::All,
        };
        Self { egress }
    }
}

impl From<&ImageName> for spec::Image {
    /// A directory of the host is not among them: whoever has a key need not have the host's files.
    fn from(image: &ImageName) -> Self {
        if image.is_host() { Self::Host } else { Self::Named { name: image.to_string() } }
    }
}

impl From<SandboxName> for spec::Name {
    fn from(name: SandboxName) -> Self {
        name.as_str().parse().expect("both are DNS labels")
    }
}

impl From<ProjectName> for spec::Project {
    fn from(name: ProjectName) -> Self {
        name.as_str().parse().expect("both are DNS labels")
    }
}

impl CreateSandbox {
    /// What its instances are to be made of.
    pub fn to_spec(&self) -> spec::SandboxSpec {
        let default = spec::SandboxSpec::default();
        spec::SandboxSpec {
            image: (&self.image).into(),
            limits: self.limits.clone().into(),
            network: self.network.clone().into(),
            env: self.env.to_map(),
            workdir: self.workdir.as_ref().map_or(default.workdir, Path::to_string),
            packages: self.packages,
            ports: self.ports.get().iter().map(|port| port.get() as u16).collect(),
            services: self.services.get().iter().map(Into::into).collect(),
            hooks: (&self.hooks).into(),
        }
    }

    /// By which rules it is to live: what was said, and otherwise what the core says (L2, L5).
    pub fn to_policy(&self) -> spec::Policy {
        let default = spec::Policy::default_for(self.name.clone().map(spec::Name::from).as_ref());
        spec::Policy {
            persistent: self.policy.persistent.unwrap_or(default.persistent),
            lifetime_ms: self.policy.lifetime_ms.map_or(default.lifetime_ms, u64::from),
            idle_ms: self.policy.idle_ms.map_or(default.idle_ms, u64::from),
            hibernate_ms: self.policy.hibernate_ms.map_or(default.hibernate_ms, u64::from),
            hibernate: match self.policy.hibernate {
                None => default.hibernate,
                Some(Hibernate::Filesystem) => spec::Hibernate::Filesystem,
                Some(Hibernate::Memory) => spec::Hibernate::Memory,
            },
            snapshots_max: self.policy.snapshots_max.map(|max| max.get() as u32),
            snapshots_age_ms: self.policy.snapshots_age_ms.map(u64::from),
        }
    }
}

impl From<&SnapshotRef> for viv_core::SnapshotId {
    fn from(snapshot: &SnapshotRef) -> Self {
        snapshot.as_str().parse().expect("it was parsed as one")
    }
}

macro_rules! same_words {
    ($($from:ty => $to:ident { $($variant:ident),+ $(,)? })+) => {$(
        impl From<$from> for $to {
            fn from(word: $from) -> Self {
                match word {
                    $(<$from>::$variant => Self::$variant),+
                }
            }
        }
    )+};
}

same_words! {
    lifecycle::Status => Status {
        Provisioning, Verifying, Ready, Unverified, Frozen, Hibernating, SaveFailed, Hibernated, Resuming, Lost, Failed,
        Stopping, Stopped,
    }
    lifecycle::PhaseName => Phase {
        Provisioning, Verifying, Ready, Frozen, Hibernating, Hibernated, Resuming, Lost, Failed, Stopping, Stopped,
    }
    core_snapshot::SnapshotKind => SnapshotKind { Auto, Manual, Fork, Imported }
    core_snapshot::SnapshotState => SnapshotState { Saving, Ready, Removing }
    core_snapshot::SnapshotIntegrity => SnapshotIntegrity { Pending, Verified, Damaged }
    core_snapshot::SnapshotIntegrity => Integrity { Pending, Verified, Damaged }
    lifecycle::Desired => Desired { Running, Hibernated, Gone }
    lifecycle::Finding => ProbeOutcome { Ok, Unhealthy, Timeout, Gone }
}

impl From<&Caused> for Cause {
    fn from(caused: &Caused) -> Self {
        let code = caused.cause.code();
        Self {
            code: code.to_owned(),
            message: caused.message.clone().unwrap_or_else(|| code.replace('_', " ")),
            at_ms: caused.at_ms,
            by: caused.by.to_string(),
        }
    }
}

impl From<core_snapshot::Snapshot> for Snapshot {
    fn from(row: core_snapshot::Snapshot) -> Self {
        let seen = row.seen.as_ref();
        Self {
            id: row.id,
            project: row.project.to_string(),
            sandbox: row.sandbox,
            generation: row.generation,
            parent: row.parent,
            kind: row.kind.into(),
            name: row.name.map(|name| name.to_string()),
            labels: row.labels,
            state: row.state.into(),
            created_at_ms: row.created_at_ms,
            by: row.by.to_string(),
            memory: row.memory.is_some(),
            size_bytes: seen.map(|seen| seen.size_bytes),
            own_bytes: seen.map(|seen| seen.own_bytes),
            integrity: seen.map(|seen| seen.integrity.into()),
            memory_damage: seen.and_then(|seen| seen.memory_damage.clone()),
            paused_ms: seen.map(|seen| seen.paused_us.div_ceil(1000)),
            took_ms: seen.map(|seen| seen.total_us.div_ceil(1000)),
            copied_bytes: seen.map(|seen| seen.copied_bytes),
            observed_at_ms: seen.map(|seen| seen.at_ms),
            used_by: Vec::new(),
        }
    }
}

impl From<core_snapshot::Snapshot> for SnapshotShown {
    fn from(row: core_snapshot::Snapshot) -> Self {
        let seen = row.seen.as_ref();
        Self {
            name: row.name.map(|name| name.to_string()),
            generation: row.generation,
            created_at_ms: row.created_at_ms,
            size_bytes: seen.map_or(0, |seen| seen.size_bytes),
            integrity: seen.map_or(Integrity::Pending, |seen| seen.integrity.into()),
            id: row.id,
        }
    }
}

impl Evidence {
    /// What was checked, along this path.
    pub fn shown(evidence: &lifecycle::Evidence, path: &str) -> Self {
        let probe = |check: &lifecycle::Check| Probe {
            outcome: check.finding.into(),
            checked_at_ms: check.at_ms,
            took_ms: check.took_ms,
            message: check.message.clone(),
            path: path.to_owned(),
        };
        Self {
            exec: evidence.exec.as_ref().map(probe),
            filesystem: evidence.filesystem.as_ref().map(probe),
            ports: evidence.ports.iter().map(|one| PortProbe { port: one.port, probe: probe(&one.check) }).collect(),
            services: evidence
                .services
                .iter()
                .map(|one| ServiceProbe { service: one.service.to_string(), probe: probe(&one.check) })
                .collect(),
        }
    }
}

impl From<spec::Invalid> for ApiError {
    fn from(invalid: spec::Invalid) -> Self {
        Self::new(ErrorCode::InvalidRequest, invalid.what).hint(invalid.hint)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::bound::{CpuMillis, CpuWeight, IoBps, MemoryBytes, OpenFiles, Processes};

    /// The core takes whatever the API takes, at the ends of all bounds too.
    #[test]
    fn s5_the_core_refuses_nothing_that_the_schema_allows() {
        let many = |count: usize, key: usize, value: usize| -> serde_json::Map<String, serde_json::Value> {
            (0..count).map(|n| (format!("{n:0key$}"), "v".repeat(value).into())).collect()
        };
        let asked: CreateSandbox = serde_json::from_value(json!({
            "name": "n".repeat(63),
            "labels": many(64, 63, 256),
            "env": many(64, 256, 4_096),
            "workdir": format!("/{}", "w".repeat(4_094)),
            "ports": (1..=16).collect::<Vec<u16>>(),
            "policy": {
                "lifetime_ms": 2_592_000_000_u64,
                "idle_ms": 2_592_000_000_u64,
                "hibernate_ms": 2_592_000_000_u64,
            },
        }))
        .unwrap();
        assert_eq!(asked.to_spec().check(), Ok(()));
        assert_eq!(asked.to_policy().check(), Ok(()));
        assert_eq!(spec::check_pairs("labels", &asked.labels.to_map()), Ok(()));
        let least = json!({"policy": {"lifetime_ms": 1_000, "idle_ms": 1_000, "hibernate_ms": 1_000}});
        assert_eq!(serde_json::from_value::<CreateSandbox>(least).unwrap().to_policy().check(), Ok(()));
    }

    #[test]
    fn l2_who_has_a_name_stays_unless_said_otherwise() {
        let persistent = |value| serde_json::from_value::<CreateSandbox>(value).unwrap().to_policy().persistent;
        assert!(persistent(json!({"name": "a"})));
        assert!(!persistent(json!({})));
        assert!(!persistent(json!({"name": "a", "policy": {"persistent": false}})));
        assert!(persistent(json!({"policy": {"persistent": true}})));
    }

    /// The bounds of the API are the core's: neither refuses what the other takes.
    #[test]
    fn limits_have_the_cores_bounds() {
        let check = |limits: ResourceLimits| limits.check().is_ok();
        macro_rules! ends {
            ($($type:ident => $field:ident),+ $(,)?) => {$(
                let at = |value| check(ResourceLimits { $field: Some(value), ..ResourceLimits::default() });
                assert!(at($type::MIN) && at($type::MAX), stringify!($field));
                assert!(!at($type::MIN - 1), stringify!($field));
            )+};
        }
        ends! {
            CpuMillis => cpu_millis, CpuWeight => cpu_weight, MemoryBytes => memory_bytes, Processes => processes,
            IoBps => io_read_bps, IoBps => io_write_bps, OpenFiles => open_files,
        }
        let over = |cpu_millis, cpu_weight| ResourceLimits { cpu_millis, cpu_weight, ..ResourceLimits::default() };
        assert!(!check(over(Some(CpuMillis::MAX + 1), None)));
        assert!(!check(over(None, Some(CpuWeight::MAX + 1))));
    }

    #[test]
    fn unlimited_is_said_aloud_and_shown_as_nothing() {
        let limits = Limits { memory_bytes: Some(Limit::UNLIMITED), ..Limits::default() };
        let asked = ResourceLimits::from(limits);
        assert_eq!(asked.memory_bytes, Some(UNLIMITED));
        assert_eq!(asked.processes, None);
        assert_eq!(LimitsInForce::from(&asked).memory_bytes, None);
    }
}
