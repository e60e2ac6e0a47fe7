//! Everything that a child needs, made before it exists: in the child nothing can be allocated.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::io::Read;
use std::os::fd::RawFd;

use rustix::process::{Gid, Rlimit, Uid};
use rustix::thread::CapabilitySet;
use viv_agent::proto::{AgentError, AgentLimits, BIN, HOME, LIMITS};
use viv_core::exec::ExecSpec;

use crate::agent::Agent;
use crate::error::{invalid, quoted};
use crate::exec::user::Account;
use crate::limits;
use crate::seccomp::{Confinement, Instruction};

/// Where programs are looked for when no environment says so.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Longest argument or variable: the kernel's own limit on one.
const TEXT_BYTES_MAX: usize = (128 << 10) - 1;

/// Arguments and environment together: half of what the kernel takes by default. Beyond it, it is a file that is wanted.
const TEXTS_BYTES_MAX: usize = 1 << 20;

/// Directories of a PATH that are looked into. The path of a program is made for each of them, in memory.
const PATH_DIRS_MAX: usize = 256;

/// Changed limits are a number or two.
const LIMITS_BYTES_MAX: u64 = 4096;

/// Longest name of a file, in every filesystem that matters.
const NAME_BYTES_MAX: usize = 255;

/// Strings as `execve` wants them.
pub(crate) struct Strings {
    /// Ends with a null pointer; the others point into `_owned`, whose heap blocks do not move.
    pointers: Vec<*const c_char>,
    _owned: Vec<CString>,
}

impl Strings {
    fn new(owned: Vec<CString>) -> Self {
        let pointers = owned.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect();
        Self { pointers, _owned: owned }
    }

    pub(crate) fn as_ptr(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}

/// What root keeps where packages may be installed, each in the sandbox's own user namespace:
///
/// - `CHOWN`: files of a package belong to whom it says.
/// - `DAC_OVERRIDE`, `FOWNER`, `FSETID`: and are written, and get their modes, also when they belong to others by then.
/// - `SETUID`, `SETGID`: package managers download, and scripts start programs, as other users.
const PACKAGES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID);

/// What the child will do.
pub(crate) struct Plan {
    /// Tried in order.
    pub(crate) programs: Vec<CString>,
    pub(crate) argv: Strings,
    pub(crate) envp: Strings,
    pub(crate) workdir: CString,
    pub(crate) uid: Uid,
    pub(crate) gid: Gid,
    pub(crate) groups: Vec<Gid>,
    /// Whether supplementary groups can be set at all.
    pub(crate) set_groups: bool,
    /// Whether there are capabilities to be dropped from the bounding set.
    pub(crate) drop_privileges: bool,
    /// What it keeps of them, for itself and what it runs.
    pub(crate) kept: CapabilitySet,
    /// The filter on top of the agent's. Without, nothing is given up either.
    pub(crate) filter: Option<&'static [Instruction]>,
    pub(crate) open_files: Rlimit,
    /// How many processes its user may have; `None` leaves that to the cgroup.
    pub(crate) processes: Option<Rlimit>,
    /// What becomes descriptors 0, 1 and 2.
    pub(crate) stdio: [RawFd; 3],
    /// Whether descriptor 0 is a terminal to be taken.
    pub(crate) terminal: bool,
    /// Where a failure is reported; closed by exec.
    pub(crate) report: RawFd,
    /// Waited for before anything is done, where somebody else has to be ready first.
    pub(crate) go: Option<RawFd>,
}

/// Why there is no plan.
pub(crate) enum NoPlan {
    /// The request makes no sense.
    Invalid(AgentError),
    /// It makes sense, but not here: a sentence for the caller.
    Failed(String),
}

impl Plan {
    /// Plans all but the descriptors.
    pub(crate) fn new(agent: &'static Agent, spec: &ExecSpec, account: &Account) -> Result<Self, NoPlan> {
        let argv = texts(&spec.argv, "an argument")?;
        let Some(program) = spec.argv.first().filter(|program| !program.is_empty()) else {
            return Err(NoPlan::Invalid(invalid("argv names no program")));
        };
        let env = environment(&agent.config.env, spec, account);
        if env.keys().any(|key| key.is_empty() || key.contains('=')) {
            return Err(NoPlan::Invalid(invalid("a variable's name is empty or holds '='")));
        }
        let lines: Vec<String> = env.iter().map(|(key, value)| format!("{key}={value}")).collect();
        bound(&spec.argv, &lines)?;
        let path = env.get("PATH").map_or(PATH, String::as_str);
        let workdir = spec.cwd.as_deref().unwrap_or(&agent.config.workdir);
        if !workdir.starts_with('/') {
            return Err(NoPlan::Invalid(invalid(format!("working directory {} is not absolute", quoted(workdir)))));
        }
        let limits = said_last(agent);
        let keeper_id = agent.config.keeper_id;
        let ids = [account.uid, account.gid].into_iter().chain(account.groups.iter().copied());
        if keeper_id != 0 && ids.into_iter().any(|id| id == keeper_id || id == u32::MAX) {
            return Err(NoPlan::Failed(format!("id {keeper_id} is reserved")));
        }
        if account.uid == u32::MAX || account.gid == u32::MAX {
            return Err(NoPlan::Failed("no such user".to_owned()));
        }
        Ok(Self {
            programs: texts(&candidates(program, path), "the program")?,
            argv: Strings::new(argv),
            envp: Strings::new(texts(&lines, "a variable")?),
            workdir: text(workdir, "the working directory")?,
            uid: Uid::from_raw(account.uid),
            gid: Gid::from_raw(account.gid),
            groups: account.groups.iter().map(|&gid| Gid::from_raw(gid)).collect(),
            set_groups: agent.origin.privileged && !agent.origin.groups_fixed,
            drop_privileges: agent.origin.privileged,
            kept: if agent.config.packages && account.uid == 0 { PACKAGES } else { CapabilitySet::empty() },
            filter: agent.confinement.as_ref().map(Confinement::workload),
            open_files: limits::open_files(agent.origin.open_files, limits.open_files),
            processes: limits::processes(limits.processes),
            stdio: [-1; 3],
            terminal: spec.tty.is_some(),
            report: -1,
            go: None,
        })
    }
}

/// The limits of commands that start now: what they were changed to, or what they were when the agent was made.
fn said_last(agent: &Agent) -> AgentLimits {
    let mut text = Vec::new();
    let changed = std::fs::File::open(agent.places.run.join(LIMITS))
        .and_then(|file| file.take(LIMITS_BYTES_MAX).read_to_end(&mut text))
        .ok()
        .and_then(|_| serde_json::from_slice::<AgentLimits>(&text).ok());
    changed.unwrap_or(AgentLimits { open_files: agent.config.open_files, processes: agent.config.processes })
}

/// Refuses what the kernel would not take, before more is made of it.
fn bound(argv: &[String], env: &[String]) -> Result<(), NoPlan> {
    let refuse = |what: String| Err(NoPlan::Invalid(invalid(what)));
    let lengths = || argv.iter().chain(env).map(String::len);
    if lengths().any(|length| length > TEXT_BYTES_MAX) {
        return refuse(format!("an argument or variable is longer than {TEXT_BYTES_MAX} bytes"));
    }
    if lengths().sum::<usize>() > TEXTS_BYTES_MAX {
        return refuse(format!("arguments and environment are longer than {TEXTS_BYTES_MAX} bytes"));
    }
    Ok(())
}

fn text(text: &str, what: &str) -> Result<CString, NoPlan> {
    CString::new(text).map_err(|_| NoPlan::Invalid(invalid(format!("{what} holds a NUL"))))
}

fn texts(list: &[String], what: &str) -> Result<Vec<CString>, NoPlan> {
    list.iter().map(|item| text(item, what)).collect()
}

/// Defaults, then the instance's, then the execution's own.
fn environment(config: &BTreeMap<String, String>, spec: &ExecSpec, account: &Account) -> BTreeMap<String, String> {
    let name = account.name.clone().unwrap_or_else(|| account.uid.to_string());
    let mut env: BTreeMap<String, String> = [
        ("PATH", PATH.to_owned()),
        ("HOME", account.home.clone()),
        ("SHELL", account.shell.clone()),
        ("USER", name.clone()),
        ("LOGNAME", name),
        ("LANG", "C.UTF-8".to_owned()),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect();
    if spec.tty.is_some() {
        env.insert("TERM".to_owned(), "xterm-256color".to_owned());
    }
    for (key, value) in config {
        env.insert(key.clone(), value.clone());
    }
    // Last, so that it covers nothing that the image has.
    env.entry("PATH".to_owned()).and_modify(|path| *path = format!("{path}:{HOME}/{BIN}"));
    for (key, value) in &spec.env {
        env.insert(key.clone(), value.clone());
    }
    env
}

/// Where a program may be. One with a slash is taken as it is.
fn candidates(program: &str, path: &str) -> Vec<String> {
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    if program.len() > NAME_BYTES_MAX {
        return Vec::new();
    }
    path.split(':')
        .take(PATH_DIRS_MAX)
        .map(|dir| match dir {
            "" => format!("./{program}"),
            dir => format!("{dir}/{program}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_looked_for_like_execvp_does() {
        assert_eq!(candidates("ls", "/a::/b"), ["/a/ls", "./ls", "/b/ls"]);
        assert_eq!(candidates("./ls", "/a"), ["./ls"]);
    }

    #[test]
    fn no_request_makes_more_of_itself_than_it_is() {
        assert_eq!(candidates("ls", &":".repeat(1 << 20)).len(), PATH_DIRS_MAX);
        assert!(candidates(&"x".repeat(1 << 20), "/a:/b").is_empty());
        let is_refused = |argv: &[String], env: &[String]| matches!(bound(argv, env), Err(NoPlan::Invalid(_)));
        let long = || "x".repeat(TEXT_BYTES_MAX);
        assert!(!is_refused(&[long()], &[long()]));
        assert!(is_refused(&["x".to_owned(), long() + "x"], &[]));
        assert!(is_refused(&[], &[long() + "x"]));
        assert!(is_refused(&vec![long(); 5], &vec![long(); 5]));
    }

    #[test]
    fn the_execution_has_the_last_word_on_its_environment() {
        let account =
            Account { uid: 5, gid: 5, groups: vec![], name: None, home: "/h".to_owned(), shell: "/bin/sh".to_owned() };
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let config = BTreeMap::from([pair("A", "config"), pair("B", "config"), pair("HOME", "/elsewhere")]);
        let spec = ExecSpec { env: BTreeMap::from([pair("B", "spec")]), ..ExecSpec::default() };
        let env = environment(&config, &spec, &account);
        assert_eq!((env["A"].as_str(), env["B"].as_str(), env["HOME"].as_str()), ("config", "spec", "/elsewhere"));
        assert_eq!(env["USER"], "5");
        assert_eq!(env["PATH"], format!("{PATH}:/.vivarium/bin"));
        assert!(!env.contains_key("TERM"));
        let config = BTreeMap::from([pair("PATH", "/image")]);
        assert_eq!(environment(&config, &spec, &account)["PATH"], "/image:/.vivarium/bin");
        let spec = ExecSpec { env: BTreeMap::from([pair("PATH", "/mine")]), ..ExecSpec::default() };
        assert_eq!(environment(&config, &spec, &account)["PATH"], "/mine");
    }
}
