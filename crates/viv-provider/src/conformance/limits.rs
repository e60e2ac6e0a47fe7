//! Limits: asked for, in force, and changed while it runs.

use super::keep::unmade;
use super::lab::{Answer, Lab, SOON_MS, assert_refused, assert_unsupported};
use super::program;
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::InstanceState;
use crate::limits::{MEMORY_BYTES_MIN, PROCESSES_MIN, ResourceLimits, UNLIMITED};

const MIB: u64 = 1 << 20;

/// One limit of each kind that is declared, none of which is in the way of a few commands.
fn asked(lab: &Lab) -> ResourceLimits {
    let all = ResourceLimits {
        cpu_millis: Some(800),
        cpu_weight: Some(50),
        cpu_burst_us: Some(40_000),
        memory_bytes: Some(256 * MIB),
        processes: Some(64),
        disk_bytes: Some(96 * MIB),
        io_read_bps: Some(512 * MIB),
        io_write_bps: Some(512 * MIB),
        open_files: Some(256),
    };
    all.only(|needed| lab.can(needed))
}

async fn limited<'l>(lab: &'l Lab, limits: &ResourceLimits) -> Subject<'l> {
    let mut spec = lab.spec();
    spec.limits = limits.clone();
    lab.subject_of(&spec).await
}

async fn change(subject: &Subject<'_>, change: &ResourceLimits) -> Result<ResourceLimits, ProviderError> {
    subject.lab.provider().set_limits(&subject.mutation(), &subject.sandbox, change).await
}

async fn in_force(subject: &Subject<'_>) -> ResourceLimits {
    subject.observe().await.limits.expect("limits in force")
}

fn processes(most: u64) -> ResourceLimits {
    ResourceLimits { processes: Some(most), ..ResourceLimits::default() }
}

/// Gives whether limits can be changed; otherwise that has to be refused.
async fn can_change(lab: &Lab) -> bool {
    if lab.can(Capability::LimitsLive) {
        return true;
    }
    let subject = lab.subject().await;
    assert_unsupported(change(&subject, &ResourceLimits::default()).await, Capability::LimitsLive);
    false
}

/// The same for the number of processes, which the cases change because it takes effect at once.
async fn can_change_processes(lab: &Lab) -> bool {
    if !can_change(lab).await {
        return false;
    }
    if lab.can(Capability::LimitProcesses) {
        return true;
    }
    let subject = lab.subject().await;
    assert_unsupported(change(&subject, &processes(64)).await, Capability::LimitProcesses);
    false
}

pub(super) async fn what_was_asked_for_shows(lab: &Lab) {
    let asked = asked(lab);
    let subject = limited(lab, &asked).await;
    let seen = in_force(&subject).await;
    assert_eq!(asked.or(&seen), seen, "what was asked for is in force");
    subject.assert_ready().await;
    // Commands get what was asked for too.
    if let Some(most) = asked.open_files {
        assert_eq!(subject.run_ok(&program::open_files()).await, format!("{most}\n"));
    }
}

pub(super) async fn no_limit_can_be_asked_for(lab: &Lab) {
    // To ask for none takes nothing, so every provider does it.
    let subject = limited(lab, &ResourceLimits::unlimited()).await;
    assert_eq!(in_force(&subject).await, ResourceLimits::default());
    subject.assert_ready().await;
}

pub(super) async fn a_change_shows_and_leaves_the_rest(lab: &Lab) {
    if !can_change(lab).await {
        return;
    }
    let subject = limited(lab, &asked(lab)).await;
    let before = in_force(&subject).await;
    // The disk is left out: what it lies on may keep its size for life.
    let new = ResourceLimits {
        cpu_millis: before.cpu_millis.map(|_| 900),
        cpu_weight: before.cpu_weight.map(|_| 200),
        cpu_burst_us: before.cpu_burst_us.map(|_| 90_000),
        memory_bytes: before.memory_bytes.map(|_| 300 * MIB),
        processes: before.processes.map(|_| 50),
        disk_bytes: None,
        io_read_bps: before.io_read_bps.map(|_| 400 * MIB),
        io_write_bps: before.io_write_bps.map(|_| 400 * MIB),
        open_files: before.open_files.map(|_| 300),
    };
    let mut expected = before;
    for one in singly(&new) {
        expected = one.or(&expected);
        assert_eq!(change(&subject, &one).await.must("set_limits"), expected, "after {one:?}");
        assert_eq!(in_force(&subject).await, expected, "after {one:?}");
    }
    subject.assert_ready().await;
    if let Some(most) = new.open_files {
        assert_eq!(subject.run_ok(&program::open_files()).await, format!("{most}\n"));
    }
}

/// Each limit by itself, in an order in which they make sense.
fn singly(limits: &ResourceLimits) -> Vec<ResourceLimits> {
    let none = ResourceLimits::default;
    [
        ResourceLimits { cpu_millis: limits.cpu_millis, ..none() },
        ResourceLimits { cpu_weight: limits.cpu_weight, ..none() },
        ResourceLimits { cpu_burst_us: limits.cpu_burst_us, ..none() },
        ResourceLimits { memory_bytes: limits.memory_bytes, ..none() },
        ResourceLimits { processes: limits.processes, ..none() },
        ResourceLimits { io_read_bps: limits.io_read_bps, ..none() },
        ResourceLimits { io_write_bps: limits.io_write_bps, ..none() },
        ResourceLimits { open_files: limits.open_files, ..none() },
    ]
    .into_iter()
    .filter(|one| *one != none())
    .collect()
}

pub(super) async fn a_change_by_nothing_changes_nothing(lab: &Lab) {
    if !can_change(lab).await {
        return;
    }
    let subject = limited(lab, &asked(lab)).await;
    let before = in_force(&subject).await;
    assert_eq!(change(&subject, &ResourceLimits::default()).await.must("set_limits"), before);
    assert_eq!(in_force(&subject).await, before);
}

pub(super) async fn a_change_repeated_changes_once(lab: &Lab) {
    if !can_change_processes(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let (provider, first) = (lab.provider(), subject.mutation());
    let set = provider.set_limits(&first, &subject.sandbox, &processes(60)).await.must("set_limits");
    let again = provider.set_limits(&first, &subject.sandbox, &processes(60)).await.must("set_limits, repeated");
    assert_eq!(again, set);
    // A repetition that arrives after somebody else's change does not undo that.
    change(&subject, &processes(70)).await.must("set_limits by another");
    provider.set_limits(&first, &subject.sandbox, &processes(60)).await.must("set_limits, repeated late");
    assert_eq!(in_force(&subject).await.processes, Some(70));
}

pub(super) async fn a_limit_can_be_lifted(lab: &Lab) {
    if !can_change(lab).await {
        return;
    }
    let asked = ResourceLimits { disk_bytes: None, ..asked(lab) };
    let subject = limited(lab, &asked).await;
    let disk_bytes = in_force(&subject).await.disk_bytes;
    let lifted = ResourceLimits { disk_bytes: None, ..ResourceLimits::unlimited() };
    let set = change(&subject, &lifted).await.must("set_limits");
    assert_eq!(set, ResourceLimits { disk_bytes, ..ResourceLimits::default() });
    assert_eq!(in_force(&subject).await, set);
    subject.assert_ready().await;
}

pub(super) async fn what_makes_no_sense_changes_nothing(lab: &Lab) {
    let none = ResourceLimits::default;
    let bad = [
        (Capability::LimitCpu, ResourceLimits { cpu_millis: Some(0), ..none() }),
        (Capability::LimitCpu, ResourceLimits { cpu_weight: Some(10_001), ..none() }),
        (Capability::LimitCpuBurst, ResourceLimits { cpu_burst_us: Some(1_000), ..none() }),
        (Capability::LimitMemory, ResourceLimits { memory_bytes: Some(MEMORY_BYTES_MIN - 1), ..none() }),
        (Capability::LimitProcesses, ResourceLimits { processes: Some(PROCESSES_MIN - 1), ..none() }),
        (Capability::LimitDisk, ResourceLimits { disk_bytes: Some(0), ..none() }),
        (Capability::LimitIoRead, ResourceLimits { io_read_bps: Some(1), ..none() }),
        (Capability::LimitIoWrite, ResourceLimits { io_write_bps: Some(1), ..none() }),
        (Capability::LimitOpenFiles, ResourceLimits { open_files: Some(1), ..none() }),
    ];
    let subject = limited(lab, &ResourceLimits::unlimited()).await;
    for (needed, limits) in bad.into_iter().filter(|(needed, _)| lab.can(*needed)) {
        let other = unmade(lab);
        let mut spec = lab.spec();
        spec.limits = limits.clone();
        let made = lab.provider().create(&other.mutation(), &other.sandbox, &lab.owner(), &spec).await;
        assert_refused!(made, ProviderError::Invalid { .. });
        assert_eq!(other.state().await, InstanceState::Absent, "{needed:?}");
        // The disk is left out: what it lies on may keep its size for life.
        if lab.can(Capability::LimitsLive) && needed != Capability::LimitDisk {
            // The one that makes sense is not taken either.
            let both = ResourceLimits { open_files: limits.open_files.or(Some(100)), ..limits };
            let refused = change(&subject, &both).await;
            if lab.can(Capability::LimitOpenFiles) {
                assert_refused!(refused, ProviderError::Invalid { .. });
            } else {
                assert_unsupported(refused, Capability::LimitOpenFiles);
            }
        }
    }
    assert_eq!(in_force(&subject).await, none());
    subject.assert_ready().await;
}

pub(super) async fn what_is_not_declared_is_refused(lab: &Lab) {
    if !can_change(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let before = in_force(&subject).await;
    let all = ResourceLimits { disk_bytes: Some(64 * MIB), ..asked(lab).or(&before) };
    for (needed, _) in all.needs().into_iter().filter(|(needed, _)| !lab.can(*needed)) {
        let one = undeclared(needed);
        assert_unsupported(change(&subject, &one).await, needed);
    }
    assert_eq!(in_force(&subject).await, before);
}

fn undeclared(needed: Capability) -> ResourceLimits {
    let mut one = ResourceLimits::default();
    match needed {
        Capability::LimitCpu => one.cpu_millis = Some(500),
        Capability::LimitCpuBurst => one.cpu_burst_us = Some(1_000),
        Capability::LimitMemory => one.memory_bytes = Some(256 * MIB),
        Capability::LimitProcesses => one.processes = Some(64),
        Capability::LimitDisk => one.disk_bytes = Some(64 * MIB),
        Capability::LimitIoRead => one.io_read_bps = Some(64 * MIB),
        Capability::LimitIoWrite => one.io_write_bps = Some(64 * MIB),
        Capability::LimitOpenFiles => one.open_files = Some(256),
        other => panic!("{other:?} is no limit"),
    }
    one
}

pub(super) async fn the_frozen_can_be_changed(lab: &Lab) {
    if !can_change_processes(lab).await {
        return;
    }
    let subject = lab.subject().await;
    if !lab.can(Capability::Freeze) {
        let frozen = lab.provider().freeze(&subject.mutation(), &subject.sandbox).await;
        return assert_unsupported(frozen, Capability::Freeze);
    }
    lab.provider().freeze(&subject.mutation(), &subject.sandbox).await.must("freeze");
    change(&subject, &processes(60)).await.must("set_limits of the frozen");
    assert_eq!(in_force(&subject).await.processes, Some(60));
    assert_eq!(subject.state().await, InstanceState::Frozen);
    lab.provider().thaw(&subject.mutation(), &subject.sandbox).await.must("thaw");
    subject.assert_ready().await;
}

pub(super) async fn the_ended_is_not_changed(lab: &Lab) {
    if !can_change(lab).await || !lab.can_expire().await {
        return;
    }
    let mut spec = lab.spec();
    spec.limits = asked(lab);
    spec.lifetime_ms = 1_500;
    let subject = lab.subject_of(&spec).await;
    let before = in_force(&subject).await;
    subject.until_ended(SOON_MS).await;
    let late = change(&subject, &ResourceLimits { cpu_millis: Some(UNLIMITED), ..ResourceLimits::default() }).await;
    assert_refused!(late, ProviderError::NotRunning { state: InstanceState::Ended(_) });
    assert_eq!(in_force(&subject).await, before, "what was in force is told after the end");
}

pub(super) async fn fewer_processes_hold_from_then_on(lab: &Lab) {
    if !can_change_processes(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let running = subject.start(&program::sleep()).await;
    change(&subject, &processes(PROCESSES_MIN)).await.must("set_limits");
    let mut refused = None;
    for _ in 0..PROCESSES_MIN {
        if let Err(error) = subject.execute(&lab.fresh_execution(), &program::sleep()).await {
            refused = Some(error);
            break;
        }
    }
    let Some(ProviderError::Exhausted { .. }) = refused else { panic!("{PROCESSES_MIN} more ended with {refused:?}") };
    // What ran runs, what is there answers, and what is given back can be used.
    assert!(!subject.status(&running).await.state.is_final());
    subject.cancel(&running).await;
    change(&subject, &processes(64)).await.must("set_limits");
    subject.assert_ready().await;
}

pub(super) async fn less_disk_holds_from_then_on(lab: &Lab) {
    if !can_change(lab).await {
        return;
    }
    let subject = limited(lab, &ResourceLimits { disk_bytes: Some(UNLIMITED), ..ResourceLimits::default() }).await;
    subject.fill("/workspace/before", 24 * MIB).await.must("file_write");
    let limits = ResourceLimits { disk_bytes: Some(64 * MIB), ..ResourceLimits::default() };
    match change(&subject, &limits).await {
        Ok(set) => assert_eq!(set.disk_bytes, limits.disk_bytes),
        // Where a disk keeps its size for life, that is said.
        Err(ProviderError::Unsupported { capability: Capability::LimitDisk | Capability::LimitDiskLive, .. }) => {
            assert!(!lab.can(Capability::LimitDiskLive), "it is declared");
            assert_eq!(in_force(&subject).await.disk_bytes, None);
            return subject.assert_ready().await;
        }
        Err(other) => panic!("set_limits failed: {other:?}"),
    }
    assert_refused!(subject.fill("/workspace/flood", 100 * MIB).await, ProviderError::Exhausted { .. });
    let more = ResourceLimits { disk_bytes: Some(UNLIMITED), ..ResourceLimits::default() };
    change(&subject, &more).await.must("set_limits");
    subject.fill("/workspace/flood", 100 * MIB).await.must("file_write without a limit");
}

pub(super) async fn less_memory_than_is_used_is_refused(lab: &Lab) {
    if !can_change(lab).await {
        return;
    }
    if !lab.can(Capability::LimitMemory) {
        let subject = lab.subject().await;
        let limits = ResourceLimits { memory_bytes: Some(64 * MIB), ..ResourceLimits::default() };
        return assert_unsupported(change(&subject, &limits).await, Capability::LimitMemory);
    }
    let subject = limited(lab, &ResourceLimits { memory_bytes: Some(256 * MIB), ..ResourceLimits::default() }).await;
    let before = in_force(&subject).await;
    // A file in memory, which nothing but its removal gives back.
    let held = subject.start(&program::hold_memory(48)).await;
    subject.until_written(&held, "held\n").await;
    let both = ResourceLimits { memory_bytes: Some(MEMORY_BYTES_MIN), ..ResourceLimits::default() };
    assert_refused!(change(&subject, &both).await, ProviderError::Conflict { .. });
    assert_eq!(in_force(&subject).await, before);
    assert!(!subject.status(&held).await.state.is_final(), "somebody was killed");
    subject.cancel(&held).await;
    subject.assert_ready().await;
}
