//! The agent: PID 1 of a sandbox. It boots here; the rest is in the modules.
//!
//! Inside a sandbox it takes no arguments. `--home DIR --root DIR` runs it
//! elsewhere, for tests: `DIR/run` stands for [`viv_agent::proto::RUN_DIR`].
//! As a command inside, `--echo TEXT` writes the text: see [`viv_agent::proto::ECHO_VERB`]. Called `viv`, or with that
//! as its first argument, it is what workloads ask the control plane with: see [`viv`].

mod agent;
mod conn;
mod error;
mod exec;
mod files;
mod limits;
mod ports;
mod seccomp;
mod sys;
mod viv;

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::thread::CapabilitySet;
use viv_agent::proto::{AGENT_LOG, AgentConfig, BOOT_ID, CONFIG, ECHO_VERB, EXECUTIONS, HOME, SOCKET, TRANSIENT};

use agent::{Agent, Origin, Places, Wake};

/// A configuration is an environment and some numbers.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Where programs look for the id of this run of the machine.
const KERNELS_BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

fn main() {
    if let Some(code) = echo(std::env::args_os().skip(1)) {
        sys::exit_now(code);
    }
    if let Some(code) = viv::run(std::env::args_os()) {
        sys::exit_now(code);
    }
    if let Err(cause) = boot() {
        error::say(&format!("cannot start: {cause}"));
        sys::exit_now(1);
    }
}

/// As a command inside, which is all that an image without any program has: writes a text and a newline. `None` when that
/// was not asked for.
fn echo(mut arguments: impl Iterator<Item = OsString>) -> Option<i32> {
    if arguments.next()? != ECHO_VERB {
        return None;
    }
    let mut line = arguments.next().unwrap_or_default().into_vec();
    line.push(b'\n');
    // In one piece, and past the buffer, which would be written after this has to tell how it went.
    let written = rustix::io::write(rustix::stdio::stdout(), &line);
    Some(i32::from(written != Ok(line.len())))
}

fn boot() -> io::Result<()> {
    sys::hide_memory()?;
    sys::fill_stdio()?;
    sys::frugal_malloc();
    sys::block_signals()?;
    let (home, root) = arguments()?;
    let mut run = home.join("run");
    let config = read_config(&run.join(CONFIG))?;
    let is_init = rustix::process::getpid().as_raw_nonzero().get() == 1;
    let mut keeper = sys::Keeper::Absent;
    // Without an id of its own, what the kernel otherwise refuses for the ids' sake has to be kept in other ways.
    let shares_id = is_init && config.confine && config.keeper_id == 0;
    // Nor do ids keep anything from who may change the owner of every file.
    let is_guarded = shares_id || is_init && config.confine && config.packages;
    if is_init {
        if let Err(cause) = sys::loopback_up() {
            error::say(&format!("the loopback interface stays down: {cause}"));
        }
        match sys::cover(&run.join(BOOT_ID), Path::new(KERNELS_BOOT_ID)) {
            Ok(()) => {}
            // gVisor does not tell it.
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => error::say(&format!("the machine's boot id is seen: {cause}")),
        }
        if is_guarded {
            run = withdraw(&run)?;
        }
        if config.confine {
            sys::drop_capabilities(CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN)?;
        }
        keeper = if shares_id { sys::Keeper::Alike } else { sys::become_keeper(config.keeper_id)? };
        match keeper {
            sys::Keeper::Apart => sys::rely_on_id()?,
            sys::Keeper::Seen => keep_log(&run.join(AGENT_LOG), config.keeper_id)?,
            sys::Keeper::Absent | sys::Keeper::Alike => {}
        }
    } else {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    }
    // As the keeper, so that it is not even seen by workloads. Without keyrings there is nothing to leave.
    let _ = sys::leave_session_keyring();
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let places = Places {
        root: open(&root, directory, Mode::empty())?,
        home: open(&home, directory, Mode::empty()).ok(),
        run,
        is_init,
    };
    for folder in [EXECUTIONS, TRANSIENT] {
        std::fs::DirBuilder::new().recursive(true).create(places.run.join(folder))?;
    }
    let listener = listen(&places.run.join(SOCKET))?;
    let inside = agent::inside::listen(&home);
    let children = sys::child_signals()?;
    let origin = origin(keeper);
    // Before any thread is started: those inherit it.
    let confinement = seccomp::Confinement::enter(&config, is_guarded)?;
    let agent: &'static Agent = Box::leak(Box::new(Agent {
        fencing: agent::fence::Fencing::new(config.identity.generation, config.token),
        origin,
        confinement,
        connections: agent::connections::Connections::default(),
        control: agent::control::Control::new(is_init),
        reserve: agent::reserve::Reserve::default(),
        inside: agent::inside::Inside::new(inside),
        executions: exec::table::Executions::default(),
        pump: exec::pump::Pump::new()?,
        wake: Wake::new()?,
        identity: std::sync::Mutex::new(config.identity.clone()),
        config,
        places,
    }));
    agent::reserve::Reserve::start(agent)?;
    files::change::make_workdir(agent);
    agent::supervise::supervise(agent, &listener, &children)
}

fn arguments() -> io::Result<(PathBuf, PathBuf)> {
    let (mut home, mut root) = (PathBuf::from(HOME), PathBuf::from("/"));
    let mut arguments = std::env::args_os().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or_else(|| io::Error::other("an argument without value"))?;
        match argument.to_str() {
            Some("--home") => home = value.into(),
            Some("--root") => root = value.into(),
            _ => return Err(io::Error::other(format!("unknown argument {}", argument.display()))),
        }
    }
    Ok((home, root))
}

fn read_config(path: &Path) -> io::Result<AgentConfig> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(CONFIG_BYTES_MAX).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// gVisor says yes to it and does nothing. For PID 1, which gets every orphan, it changes nothing.
fn has_subreapers() -> bool {
    use rustix::process::{Pid, child_subreaper, set_child_subreaper};
    // The number does not matter, but for gVisor, which takes no other than 1.
    set_child_subreaper(Some(Pid::INIT)).is_ok() && child_subreaper().is_ok_and(|set| set.is_some())
}

/// Says what there is to say in a file of ours. The descriptors that we were given lead to the host's log,
/// which root inside could write to if he finds them.
fn keep_log(path: &Path, keeper_id: u32) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = open(path, flags, Mode::RUSR | Mode::WUSR)?;
    std::os::unix::fs::fchown(&file, Some(keeper_id), Some(keeper_id))?;
    sys::log_to(&file)
}

/// Takes a folder out of everybody's sight but ours: covers it, and answers a path that leads to what is below.
///
/// That path goes through a descriptor, so it is of use in this process only, and for no other one with the same id,
/// since our descriptors are hidden.
fn withdraw(folder: &Path) -> io::Result<PathBuf> {
    let below = open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    sys::cover_folder(folder).map_err(|cause| {
        io::Error::other(format!("the agent's folder cannot be kept from commands that could enter it: {cause}"))
    })?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", below.as_raw_fd()));
    // It is needed until the process ends.
    std::mem::forget(below);
    Ok(path)
}

fn origin(keeper: sys::Keeper) -> Origin {
    limits::lower();
    Origin {
        open_files: limits::raise_open_files(),
        privileged: rustix::thread::capabilities(None).is_ok_and(|held| !held.permitted.is_empty()),
        // The agent itself needs none. With the capability, only the user namespace can forbid it.
        groups_fixed: rustix::thread::set_thread_groups(&[]) == Err(rustix::io::Errno::PERM),
        keeper,
        has_subreapers: has_subreapers(),
    }
}
