//! From a record to a running instance, or to nothing.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, setpriority_process, waitpid};
use viv_agent::proto::{AgentConfig, BOOT_ID, CONFIG, Descriptor, EXECUTIONS, Identity, PROTOCOL, SOCKET, TRANSIENT};
use viv_core::exec::TRANSIENT_KEPT_MS;

use super::agent::ControlConnection;
use super::clients::Clients;
use super::complaint;
use super::deadline::DeadlineKeeper;
use super::first;
use super::guard::Guard;
use super::memory;
use super::pages::Pages;
use super::serve::{Init, Shim};
use super::tables;
use crate::bundle::{self, Staged};
use crate::cgroup::{InstanceCgroups, LimitError};
use crate::checkpoint::MemoryDir;
use crate::durable;
use crate::layout::{InstanceDir, InstanceRecord};
use crate::network::{NetworkError, Uplink};
use crate::rootfs::{self, Contents, RootError, Stage, Writable};
use crate::runtime::Kernel;
use crate::store::driver;
use crate::sys::clone::{Forked, die_with, exit_now, fork};
use crate::wait::readable_within;

/// The kernel's highest priority among those that share.
const NICENESS: i32 = -20;

/// How long what was begun may take to die when creating fails.
const UNDO_WITHIN: Duration = Duration::from_secs(5);

/// Runtimes are a few processes deep.
const CHILDREN_ROUNDS_MAX: usize = 16;

/// Why there is no instance.
#[derive(Debug, thiserror::Error)]
pub(super) enum CreateError {
    #[error("{step} failed")]
    Step {
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the root filesystem could not be made")]
    Root(#[from] RootError),
    #[error("the sandbox could not be connected")]
    Network(#[from] NetworkError),
    #[error("a limit could not be set")]
    Limit(#[from] LimitError),
    #[error("the runtime failed ({status}): {complaint}")]
    Runtime { status: String, complaint: String },
    #[error("the runtime did not finish within {budget_ms} ms")]
    RuntimeTimedOut { budget_ms: u64 },
    #[error("the agent speaks protocol {found}, this shim {PROTOCOL}")]
    Protocol { found: u32 },
    #[error("its memory cannot be restored: {why}")]
    Memory { why: String },
    #[error("the agent serves {found:?}")]
    Identity { found: Box<Identity> },
}

pub(super) fn at(step: &'static str) -> impl FnOnce(io::Error) -> CreateError {
    move |source| CreateError::Step { step, source }
}

/// Makes the instance. When it fails, no process, cgroup or mount is left.
pub(super) fn create(
    dir: InstanceDir,
    record: InstanceRecord,
    cgroups: InstanceCgroups,
    guard: Guard,
    lock: File,
) -> Result<Shim, CreateError> {
    let mut init = None;
    match build(&dir, &record, &cgroups, &mut init) {
        Ok(parts) => Ok(Shim::new(dir, record, cgroups, guard, lock, parts)),
        Err(error) => {
            undo(&dir, &cgroups, init.as_ref(), &guard);
            guard.dismiss();
            Err(error)
        }
    }
}

/// What a running instance has.
pub(super) struct Parts {
    pub(super) listener: UnixListener,
    pub(super) init: Init,
    pub(super) control: ControlConnection,
    pub(super) deadline: DeadlineKeeper,
    pub(super) clients: Clients,
    pub(super) oom_kills: u64,
    pub(super) writable: PathBuf,
    pub(super) root: PathBuf,
    pub(super) uplink: Option<Uplink>,
    pub(super) pages: Option<Pages>,
}

fn build(
    dir: &InstanceDir,
    record: &InstanceRecord,
    cgroups: &InstanceCgroups,
    init: &mut Option<Init>,
) -> Result<Parts, CreateError> {
    let until = Instant::now() + Duration::from_millis(record.create_budget_ms);
    // Whoever connects from now on is answered as soon as the instance runs.
    durable::make_reserve(&dir.reserve()).map_err(at("reserving space"))?;
    let listener = UnixListener::bind("shim.sock").map_err(at("listening on shim.sock"))?;
    listener.set_nonblocking(true).map_err(at("listening on shim.sock"))?;
    let deadline =
        DeadlineKeeper::start(dir.deadline(), record.spec.lifetime_ms).map_err(at("setting the deadline"))?;

    make_cgroups(dir, record, cgroups)?;
    let identity = Identity { sandbox: record.sandbox().clone(), generation: record.generation() };
    let memory = record.memory.as_ref().map(|plan| (plan, MemoryDir::new(plan.folder.clone())));
    match &memory {
        Some((_, kept)) => memory::bring_run(dir, record, &identity, kept),
        None => prepare_run(dir, record, &identity),
    }
    .map_err(at("preparing the agent's folder"))?;
    let made =
        record.made.as_ref().ok_or(io::ErrorKind::InvalidData.into()).map_err(at("reading what it is made of"))?;
    // Before the stage is entered, whose mounts it is not to hold.
    let uplink = Uplink::start(&record.spec.network.egress, record.ids.keeper_on_host(), &dir.log(), until)?;
    let stage = Stage::enter(&made.plan.paths().chain([dir.path(), &record.agent]).collect::<Vec<_>>())?;
    // What somebody inside has put in the place of the working directory is his to live with.
    let contents = Contents {
        identity: &identity,
        workdir: &record.spec.workdir,
        needs_workdir: made.fresh,
        resolves_names: uplink.is_some(),
    };
    let root = rootfs::mount(&stage, &made.plan, record.ids, &contents)?;
    if let (Some(bytes), Writable::Folder(folder)) = (made.limit_bytes, &made.plan.writable) {
        // Only now, because a sandbox that is full has to start as well.
        driver::limit(folder, bytes).map_err(at("limiting the disk"))?;
    }
    let resolv_conf = match &uplink {
        Some(uplink) if root.resolves_names => {
            fs::write(dir.resolv_conf(), uplink.resolv_conf()).map_err(at("writing resolv.conf"))?;
            Some(stage.show(&dir.resolv_conf(), "resolv.conf")?)
        }
        Some(_) | None => None,
    };
    // Runtimes write one line of mapping by themselves, and an ordinary user's has two.
    let namespace = record.ids.is_identity().then(|| rootfs::user_namespace(record.ids)).transpose();
    let namespace = namespace.map_err(at("making a user namespace"))?;
    let staged = Staged {
        root: &root,
        run: &stage.show(&dir.run(), "run")?,
        agent: &stage.show(&record.agent, "agent")?,
        resolv_conf: resolv_conf.as_deref(),
        user_namespace: namespace.as_ref().map(AsFd::as_fd),
    };
    bundle::write(&dir.bundle(), record, &staged, cgroups).map_err(at("writing the bundle"))?;

    let (started, pages) = match &memory {
        Some((plan, kept)) => memory::restore(dir, record, cgroups, &staged, (kept, plan), until)?,
        None => (start_container(dir, record, cgroups, until)?, None),
    };
    *init = Some(started);
    let init = init.as_ref().expect("just started");
    if let Some(uplink) = &uplink {
        uplink.connect(init.pid, until)?;
    }
    let descriptors = descriptors(record, cgroups).map_err(at("opening the cgroup"))?;
    let oom_kills = cgroups.usage().oom_kills.unwrap_or(0);
    let socket = format!("run/{SOCKET}");
    let (mut control, hello) = ControlConnection::open(&socket, &descriptors, until, || Ok(!init.has_ended()?))
        .map_err(at("connecting to the agent"))?;
    if hello.protocol != PROTOCOL {
        return Err(CreateError::Protocol { found: hello.protocol });
    }
    let expected = memory.as_ref().map_or_else(
        || identity.clone(),
        |(plan, _)| Identity { sandbox: plan.of.sandbox.clone(), generation: plan.of.generation },
    );
    if hello.identity != expected {
        return Err(CreateError::Identity { found: Box::new(hello.identity) });
    }
    if memory.is_some() {
        memory::become_new(&mut control, record, &identity, until).map_err(at("greeting the restored agent"))?;
    }
    if record.kernel == Kernel::Host {
        prefer(init.pid);
    }
    if let Err(error) = tables::bound(init.pid) {
        // It can take watches from others then, as any user of the machine can.
        note!("watches are not bounded: {error}");
    }
    let init = init.try_clone().map_err(at("holding the agent"))?;
    let writable = match &made.plan.writable {
        Writable::Folder(folder) => folder.clone(),
        // Others see it through this process, whose mount namespace it is mounted in.
        Writable::Disk(_) => PathBuf::from(format!("/proc/{}/root{}", std::process::id(), root.writable.display())),
    };
    let root = root.root.clone();
    Ok(Parts {
        listener,
        init,
        control,
        deadline,
        clients: Clients::default(),
        oom_kills,
        writable,
        root,
        uplink,
        pages,
    })
}

/// What it is to run in.
pub(super) fn make_cgroups(
    dir: &InstanceDir,
    record: &InstanceRecord,
    cgroups: &InstanceCgroups,
) -> Result<(), CreateError> {
    cgroups.make().map_err(at("making cgroups"))?;
    if !cgroups.hidden_from_runtime() {
        cgroups.limit(&record.spec.limits, dir.path())?;
    }
    cgroups.delegate(record.ids.keeper_on_host()).map_err(at("handing the cgroup to the agent"))
}

/// What the agent gets with its control connection.
pub(super) fn descriptors(
    record: &InstanceRecord,
    cgroups: &InstanceCgroups,
) -> io::Result<Vec<(Descriptor, OwnedFd)>> {
    let mut descriptors = Vec::new();
    if record.kernel.takes_descriptors() {
        if let Some(cgroup) = cgroups.open_v2()? {
            descriptors.push((Descriptor::Cgroup, cgroup));
        }
        if let Some(events) = cgroups.oom_events_path().and_then(|path| File::open(path).ok()) {
            descriptors.push((Descriptor::OomEvents, events.into()));
        }
    }
    Ok(descriptors)
}

/// The agent is served before its commands, which go back to where everybody is: among thousands of them, it could
/// answer nobody. Where that is not allowed, it lives with its share.
fn prefer(agent: Pid) {
    let Ok(threads) = fs::read_dir(format!("/proc/{}/task", agent.as_raw_nonzero())) else { return };
    for thread in threads.flatten() {
        // A thread that starts meanwhile is started by one that was here, or has it from there.
        if let Some(thread) = thread.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?)) {
            let _ = setpriority_process(Some(thread), NICENESS);
        }
    }
}

/// What the agent is told before it starts.
pub(super) fn agent_config(record: &InstanceRecord, identity: &Identity) -> AgentConfig {
    AgentConfig {
        identity: identity.clone(),
        token: record.token,
        env: record.spec.env.clone(),
        workdir: record.spec.workdir.clone(),
        keeper_id: record.ids.keeper_inside(),
        output_bytes_max: AgentConfig::OUTPUT_BYTES_MAX,
        ended_executions_max: AgentConfig::ENDED_EXECUTIONS_MAX,
        transient_kept_ms: TRANSIENT_KEPT_MS,
        open_files: record.spec.limits.open_files,
        processes: record.spec.limits.processes,
        confine: record.hardening.is_on(),
        packages: record.spec.packages,
    }
}

/// The folder that is shared with the agent. Only the keeper may enter it.
fn prepare_run(dir: &InstanceDir, record: &InstanceRecord, identity: &Identity) -> io::Result<()> {
    let keeper = record.ids.keeper_on_host();
    let config = agent_config(record, identity);
    let run = dir.run();
    DirBuilder::new().mode(0o700).create(&run)?;
    for folder in [EXECUTIONS, TRANSIENT] {
        DirBuilder::new().mode(0o700).create(run.join(folder))?;
    }
    durable::replace_json_unsynced(&run.join(CONFIG), &config)?;
    draw_boot_id(&run)?;
    for path in [run.join(CONFIG), run.join(BOOT_ID), run.join(EXECUTIONS), run.join(TRANSIENT), run] {
        chown(path, Some(keeper), Some(keeper))?;
    }
    Ok(())
}

/// A boot id that nobody had.
pub(super) fn draw_boot_id(run: &Path) -> io::Result<()> {
    let path = run.join(BOOT_ID);
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed?,
    }
    // The kernel draws a new one each time.
    fs::write(&path, fs::read("/proc/sys/kernel/random/uuid")?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o444))
}

fn start_container(
    dir: &InstanceDir,
    record: &InstanceRecord,
    cgroups: &InstanceCgroups,
    until: Instant,
) -> Result<Init, CreateError> {
    let pid_file = dir.first_pid();
    let (state, id) = (dir.runtime(), record.sandbox().as_str());
    fs::create_dir_all(&state).map_err(at("making the runtime's folder"))?;
    let argv = record.runtime.command(record.kernel, &dir.bundle(), &state, id, &pid_file);

    // On the hybrid layout runtimes leave v2 alone, so the container is born
    // there. On pure v2 they move it themselves, and the helper stays outside
    // of the limits. Where they are told of no cgroups it is born in all of
    // them, and the limits come afterwards.
    let hidden = cgroups.hidden_from_runtime();
    let pure = cgroups.layout().v1.is_empty();
    let birthplace = if pure && !hidden { None } else { cgroups.open_v2().map_err(at("opening the cgroup"))? };
    let log = File::options().append(true).create(true).open(dir.log()).map_err(at("opening the log"))?;
    let log_start = log.metadata().map_or(0, |found| found.len());
    let parent = rustix::process::getpid();
    let helper = match fork(birthplace.as_ref().map(AsFd::as_fd)).map_err(at("starting the runtime"))? {
        Forked::Child => {
            // A helper without its shim makes containers that nobody holds.
            if !die_with(parent) {
                exit_now(1);
            }
            if hidden && let Err(error) = without_cgroups(cgroups) {
                note!("{}", super::chain(&error));
                exit_now(1);
            }
            let log = || log.try_clone().map_or_else(|_| Stdio::null(), Stdio::from);
            let error = Command::new(&argv[0]).args(&argv[1..]).stdin(Stdio::null()).stdout(log()).stderr(log()).exec();
            note!("{}: {error}", argv[0].display());
            exit_now(127);
        }
        Forked::Parent(helper) => helper,
    };
    let status = wait_until(helper, until).map_err(at("waiting for the runtime"))?;
    let Some(status) = status else {
        let _ = kill_process(helper, Signal::KILL);
        let _ = waitpid(Some(helper), WaitOptions::empty());
        return Err(CreateError::RuntimeTimedOut { budget_ms: record.create_budget_ms });
    };
    if status != 0 {
        let status = format!("wait status {status}");
        return Err(CreateError::Runtime { status, complaint: complaint(&dir.log(), log_start) });
    }
    let pid = fs::read_to_string(&pid_file).map_err(at("reading the container's pid"))?;
    let pid = pid.trim().parse().ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidData.into()).map_err(at("reading the container's pid"))?;
    if hidden {
        cgroups.limit(&record.spec.limits, dir.path())?;
    }
    // It is our child (we are the subreaper) and not waited for, so the pid is still its own.
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from).map_err(at("holding the agent"))?;
    first::record(dir, pid).map_err(at("writing down who the agent is"))?;
    Ok(Init { pid, pidfd })
}

/// Enters the cgroups that the container is to have, and a view of the machine that has none.
fn without_cgroups(cgroups: &InstanceCgroups) -> Result<(), CreateError> {
    cgroups.join_v1().map_err(at("entering the cgroups"))?;
    if cgroups.layout().delegated {
        Stage::show_fixed_cgroup()?;
    } else {
        Stage::show_no_cgroups()?;
    }
    Ok(())
}

/// Waits for a child by its descriptor; `None` when it takes too long.
pub(super) fn wait_until(child: Pid, until: Instant) -> io::Result<Option<i32>> {
    let pidfd = pidfd_open(child, PidfdFlags::empty())?;
    let left = until.saturating_duration_since(Instant::now());
    if !readable_within(&pidfd, left)? {
        return Ok(None);
    }
    let (_, status) = waitpid(Some(child), WaitOptions::empty())?.ok_or(io::ErrorKind::NotFound)?;
    Ok(Some(status.as_raw()))
}

/// Ends what a runtime that failed left of itself, where no cgroup does: it is ours, since we are the subreaper.
fn end_children(guard: &Guard) {
    let list = format!("/proc/self/task/{}/children", std::process::id());
    // What those leave comes to us in the next round.
    for _ in 0..CHILDREN_ROUNDS_MAX {
        let children = fs::read_to_string(&list).unwrap_or_default();
        let children = children.split_ascii_whitespace().filter_map(|pid| pid.parse::<u32>().ok());
        let mut left = children.filter(|&pid| pid != guard.pid()).peekable();
        if left.peek().is_none() {
            return;
        }
        // Not waited for yet, so the pids are theirs.
        for pid in left.filter_map(|pid| Pid::from_raw(pid.cast_signed())) {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}

/// Ends what was begun. The mounts go with this process's namespace.
fn undo(dir: &InstanceDir, cgroups: &InstanceCgroups, init: Option<&Init>, guard: &Guard) {
    if let Some(init) = init {
        init.kill();
    }
    // Not called failed before nothing is left: until then it is being made, as far as anybody can tell.
    while let Err(error) = cgroups.kill(UNDO_WITHIN) {
        note!("undoing: processes are left: {error}");
    }
    if let Some(init) = init {
        let _ = init.wait(UNDO_WITHIN);
    }
    // A runtime that failed may have left one that nobody was told of.
    while let Err(error) = first::end(dir, UNDO_WITHIN) {
        note!("undoing: {error}");
    }
    end_children(guard);
    while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {}
    if let Err(error) = cgroups.remove() {
        note!("undoing: cgroups are left: {error}");
    }
}
