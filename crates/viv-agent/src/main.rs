//! The agent: PID 1 of a sandbox. It boots here; the rest is in the modules.
//!
//! Inside a sandbox it takes no arguments. `--home DIR --root DIR` runs it
//! elsewhere, for tests: `DIR/run` stands for [`viv_agent::proto::RUN_DIR`].

mod agent;
mod conn;
mod error;
mod exec;
mod files;
mod ports;
mod sys;

use std::io::{self, Read};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use viv_agent::proto::{AgentConfig, CONFIG, EXECUTIONS, HOME, SOCKET};

use agent::{Agent, Origin, Places, Wake};

/// A configuration is an environment and some numbers.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

fn main() {
    if let Err(cause) = boot() {
        error::say(&format!("cannot start: {cause}"));
        sys::exit_now(1);
    }
}

fn boot() -> io::Result<()> {
    sys::hide_memory()?;
    sys::fill_stdio()?;
    sys::frugal_malloc();
    sys::block_signals()?;
    let (home, root) = arguments()?;
    let run = home.join("run");
    let config = read_config(&run.join(CONFIG))?;
    let is_init = rustix::process::getpid().as_raw_nonzero().get() == 1;
    if is_init {
        if let Err(cause) = sys::loopback_up() {
            error::say(&format!("the loopback interface stays down: {cause}"));
        }
        sys::drop_capabilities(CapabilitySet::NET_ADMIN)?;
        if sys::become_keeper(config.keeper_id)? {
            sys::rely_on_id()?;
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
    std::fs::DirBuilder::new().recursive(true).create(places.run.join(EXECUTIONS))?;
    let listener = listen(&places.run.join(SOCKET))?;
    let children = sys::child_signals()?;
    let agent: &'static Agent = Box::leak(Box::new(Agent {
        fencing: agent::fence::Fencing::new(config.identity.generation, config.token),
        origin: origin(),
        connections: agent::connections::Connections::default(),
        control: agent::control::Control::new(is_init),
        reserve: agent::reserve::Reserve::default(),
        executions: exec::table::Executions::default(),
        pump: exec::pump::Pump::new()?,
        wake: Wake::new()?,
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

fn origin() -> Origin {
    let open_files = getrlimit(Resource::Nofile);
    // Every execution and connection takes a few; without this the agent lives with less.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: open_files.maximum, maximum: open_files.maximum });
    Origin {
        open_files,
        privileged: rustix::thread::capabilities(None).is_ok_and(|held| !held.permitted.is_empty()),
        // The agent itself needs none. With the capability, only the user namespace can forbid it.
        groups_fixed: rustix::thread::set_thread_groups(&[]) == Err(rustix::io::Errno::PERM),
    }
}
