//! Entering a user namespace, without anybody noticing.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::thread::UnshareFlags;

use super::Standing;
use super::subordinate::{Helpers, User, mapping};
use crate::sys::clone::{Forked, close_all_but, die_with, exit_now, fork};

/// Why this process has one id only, if it entered and has.
static ONE_ID: OnceLock<String> = OnceLock::new();

/// How much of a helper's complaint is kept.
const COMPLAINT_BYTES_MAX: u64 = 512;

/// Why an ordinary user cannot have sandboxes here.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// The kernel's files cannot be read.
    #[error("cannot find out who I am")]
    Proc(#[source] io::Error),
    /// The kernel or its policy does not let users make namespaces.
    #[error("this machine does not let you make a user namespace ({step})\nhint: {hint}")]
    Refused {
        /// What was refused.
        step: &'static str,
        /// What may help.
        hint: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Makes this process root of a user namespace, with all ids that its user has. Whoever is root of anything stays as is.
///
/// Must be called from a process with one thread.
pub fn enter() -> Result<Standing, EnterError> {
    match Standing::of_this_process().map_err(EnterError::Proc)? {
        Standing::Ordinary => {}
        standing @ (Standing::Root | Standing::Mapped { .. }) => return Ok(standing),
    }
    let user = User::of_this_process();
    let refused = |step| move |source: io::Error| EnterError::Refused { step, hint: hint(), source };
    match more_ids(&user) {
        Ok(wanted) => {
            let helper = start_helper(&wanted).map_err(refused("starting a helper"))?;
            unshare().map_err(refused("making it"))?;
            if let Err(why) = helper.map() {
                let _ = ONE_ID.set(why);
                map_own(&user).map_err(refused("mapping your id"))?;
            }
        }
        Err(why) => {
            let _ = ONE_ID.set(why);
            unshare().map_err(refused("making it"))?;
            map_own(&user).map_err(refused("mapping your id"))?;
        }
    }
    // A policy may grant the namespace and nothing in it, which shows at the first mount.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)
        .map_err(io::Error::from)
        .map_err(refused("mounting in it"))?;
    Standing::of_this_process().map_err(EnterError::Proc)
}

/// Why this process has one id only; `None` when it has more, or did not enter by itself.
pub(crate) fn why_one_id() -> Option<&'static str> {
    ONE_ID.get().map(String::as_str)
}

/// What keeps users from namespaces, by the files in which distributions have it.
fn hint() -> &'static str {
    let says = |file: &str, value: &str| fs::read_to_string(file).is_ok_and(|text| text.trim() == value);
    if says("/proc/sys/user/max_user_namespaces", "0") {
        "user.max_user_namespaces is 0: have root set it to a few thousand with sysctl"
    } else if says("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        "have root run `sysctl kernel.unprivileged_userns_clone=1`"
    } else if says("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        "AppArmor keeps users from namespaces: have root write a profile for viv that allows `userns`, or run \
         `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
    } else {
        "a container or a security policy around this process may keep it from namespaces; run viv outside of it, or as root"
    }
}

/// What is to be mapped, and by whom; or why it stays at one id.
struct Wanted {
    helpers: Helpers,
    users: Vec<String>,
    groups: Vec<String>,
}

fn more_ids(user: &User) -> Result<Wanted, String> {
    let (users, groups) = (user.subordinate_users(), user.subordinate_groups());
    for (found, file) in [(&users, "/etc/subuid"), (&groups, "/etc/subgid")] {
        if found.is_empty() {
            return Err(format!("{file} gives {user} no ids"));
        }
    }
    let helpers = Helpers::find().ok_or("newuidmap and newgidmap are not installed (Debian: uidmap)")?;
    Ok(Wanted { helpers, users: mapping(user.uid, &users), groups: mapping(user.gid, &groups) })
}

/// A child that stays outside, and maps the ids of who went in.
struct Helper {
    child: Pid,
    go: io::PipeWriter,
    complaint: io::PipeReader,
}

fn start_helper(wanted: &Wanted) -> io::Result<Helper> {
    let (mut told, go) = io::pipe()?;
    let (complaint, mut complain) = io::pipe()?;
    let parent = rustix::process::getpid();
    match fork(None)? {
        Forked::Child => {
            close_all_but(&[told.as_fd(), complain.as_fd()]);
            // Without the word it ended before it went in.
            if !die_with(parent) || told.read(&mut [0]).ok() != Some(1) {
                exit_now(1);
            }
            let (helpers, pid) = (&wanted.helpers, parent.as_raw_nonzero().to_string());
            for (program, words) in [(&helpers.users, &wanted.users), (&helpers.groups, &wanted.groups)] {
                if let Err(why) = run(program, &pid, words) {
                    let _ = complain.write_all(why.as_bytes());
                    exit_now(1);
                }
            }
            exit_now(0)
        }
        Forked::Parent(child) => Ok(Helper { child, go, complaint }),
    }
}

fn run(program: &Path, pid: &str, words: &[String]) -> Result<(), String> {
    let mut command = Command::new(program);
    command.arg(pid).args(words).stdin(Stdio::null()).stdout(Stdio::null());
    let output = command.output().map_err(|error| format!("{} cannot be run: {error}", program.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{} failed ({}): {}", program.display(), output.status, said.trim()))
}

impl Helper {
    /// Has it map the ids, once this process is inside; otherwise why it did not.
    fn map(mut self) -> Result<(), String> {
        let told = self.go.write_all(b"!");
        let mut complaint = String::new();
        let _ = self.complaint.take(COMPLAINT_BYTES_MAX).read_to_string(&mut complaint);
        let ended = waitpid(Some(self.child), WaitOptions::empty());
        match (told, ended) {
            (Ok(()), Ok(Some((_, status)))) if status.exit_status() == Some(0) => Ok(()),
            _ if complaint.is_empty() => Err("the helper that maps ids ended without a word".to_owned()),
            _ => Err(complaint),
        }
    }
}

#[expect(unsafe_code, reason = "new namespaces for a process with one thread disturb nobody")]
fn unshare() -> io::Result<()> {
    // SAFETY: no descriptor table or memory is unshared, and the process has one thread; with more the kernel refuses.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) }?)
}

/// Maps the own id alone, which everyone may. Groups are then as they are for good.
fn map_own(user: &User) -> io::Result<()> {
    fs::write("/proc/self/setgroups", "deny")?;
    for (file, id) in [("/proc/self/uid_map", user.uid), ("/proc/self/gid_map", user.gid)] {
        match fs::write(file, format!("0 {id} 1")) {
            Ok(()) => {}
            // The helper came as far as this one.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) && !fs::read_to_string(file)?.is_empty() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
