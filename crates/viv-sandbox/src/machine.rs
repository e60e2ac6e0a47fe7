//! What this machine gives to whoever runs sandboxes on it: found by looking and trying, with what it means and how
//! to have more.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;

use crate::cgroup::{Controller, HOW_TO_DELEGATE, Layout};
use crate::ordinary::{EnterError, Standing, User, own_id_outside, why_one_id};
use crate::rootfs::{IdRange, mount_below, mount_lowers, why_no_mapped_layers};
use crate::runtime::Runtime;
use crate::shim::chain;

/// How something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// As it should be.
    Ok,
    /// There, with less than there could be.
    Degraded,
    /// Not there.
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub what: &'static str,
    /// How it is.
    pub state: State,
    /// What that means for sandboxes.
    pub meaning: String,
    /// How to have more, where there is more to be had.
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(what: &'static str, meaning: impl Into<String>) -> Self {
        Self { what, state: State::Ok, meaning: meaning.into(), remedy: None }
    }

    fn less(what: &'static str, state: State, meaning: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { what, state, meaning: meaning.into(), remedy: Some(remedy.into()) }
    }
}

/// Looks around, once this process has entered its namespace or could not.
pub fn findings(entered: Result<Standing, &EnterError>) -> Vec<Finding> {
    match entered {
        Err(error) => vec![not_entered(error)],
        Ok(Standing::Root | Standing::Ordinary) => {
            vec![mapped_overlays(), cgroups(), filters(), core_dumps(), kernels(), virtual_machines()]
        }
        Ok(Standing::Mapped { ids }) => {
            let own = [entered_as(), subordinate_ids(ids), overlays(), cgroups(), filters(), core_dumps()];
            own.into_iter().chain([host_userland(), disk_limits()]).collect()
        }
    }
}

const USER_NAMESPACES: &str = "user namespaces";

fn not_entered(error: &EnterError) -> Finding {
    let remedy = match error {
        EnterError::Refused { hint, .. } => (*hint).to_owned(),
        EnterError::Proc(_) => "mount /proc".to_owned(),
    };
    let what = chain(error);
    let first = what.lines().next().unwrap_or_default().to_owned();
    Finding::less(USER_NAMESPACES, State::Missing, format!("no sandboxes for you: {first}"), remedy)
}

fn entered_as() -> Finding {
    Finding::ok(USER_NAMESPACES, format!("sandboxes run without root, in a namespace that is {}'s", user()))
}

fn user() -> User {
    // Groups play no part in what is said.
    User::with_id(own_id_outside().unwrap_or_default(), 0)
}

fn subordinate_ids(ids: u32) -> Finding {
    let what = "ids for sandboxes";
    if ids >= IdRange::COUNT {
        return Finding::ok(what, format!("{ids}: sandboxes have as many users as any machine"));
    }
    let user = user();
    let why = why_one_id().map(|why| format!(" ({why})")).unwrap_or_default();
    let meaning = if ids == 1 {
        format!(
            "one{why}: commands run as root inside, with your groups, and as nobody else; images with files of several owners cannot be \
             unpacked, and the agent has the same id as what it runs"
        )
    } else {
        format!("{ids}{why}: files and commands of users above {} inside are refused", ids - 1)
    };
    let remedy = format!(
        "install newuidmap (Debian: uidmap), and have root run \
         `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}` with numbers that nobody else has"
    );
    Finding::less(what, State::Degraded, meaning, remedy)
}

const OVERLAYS: &str = "overlay filesystems";

/// For root, whose sandboxes have other ids outside than inside.
fn mapped_overlays() -> Finding {
    match why_no_mapped_layers() {
        None => overlays(),
        Some(why) => Finding::less(
            OVERLAYS,
            State::Missing,
            format!("no sandboxes: {why}"),
            "a newer kernel, or run viv as an ordinary user, for whom nothing is mapped",
        ),
    }
}

fn overlays() -> Finding {
    let what = OVERLAYS;
    match try_overlay() {
        Ok(()) => Finding::ok(what, "roots are made of layers, copy-on-write"),
        Err(error) => Finding::less(
            what,
            State::Missing,
            format!("no sandboxes: an overlay cannot be mounted ({error})"),
            "a kernel of 5.11 or newer with overlayfs; in a container, one whose policy allows mounts",
        ),
    }
}

/// Mounts one over two folders of its own: below others something may be mounted, which users cannot leave out.
fn try_overlay() -> io::Result<()> {
    let place = std::env::temp_dir().join(format!("viv-doctor-{}", crate::store::unique()));
    let folders = [place.join("above"), place.join("below")];
    let tried = folders.iter().try_for_each(fs::create_dir_all).and_then(|()| mount_lowers(&folders));
    let _ = fs::remove_dir_all(&place);
    tried.map(drop)
}

fn cgroups() -> Finding {
    let what = "cgroups";
    let layout = match Layout::detect() {
        Ok(layout) => layout,
        Err(error) => {
            return Finding::less(what, State::Missing, format!("cannot be looked for ({error})"), "mount /proc");
        }
    };
    layout.settle();
    let remedy = if layout.delegated {
        HOW_TO_DELEGATE
    } else {
        "mount a cgroup2 filesystem, with its controllers, and start anew"
    };
    let missing: Vec<_> = Controller::ALL.into_iter().filter(|controller| !layout.has(*controller)).collect();
    let names = missing.iter().map(|controller| controller.name()).collect::<Vec<_>>().join(", ");
    match (&layout.v2, missing.as_slice()) {
        (None, _) => {
            let meaning = "none to be had: no limits, no freezing, no saving or forking of what runs; commands are ended \
                           by looking for their processes, sandboxes with their PID namespace";
            Finding::less(what, State::Missing, meaning, remedy)
        }
        (Some(_), []) => Finding::ok(what, "limits, figures, freezing and killing for certain"),
        (Some(_), [_, ..]) => {
            let meaning = format!("freezing and killing for certain, but no limits by {names}");
            Finding::less(what, State::Degraded, meaning, remedy)
        }
    }
}

fn filters() -> Finding {
    let what = "system call filters";
    let known = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if ["errno", "allow", "kill_process"].iter().all(|action| known.split_whitespace().any(|word| word == *action)) {
        return Finding::ok(what, "every command runs under an allowlist");
    }
    let meaning = "no sandboxes: this kernel takes no seccomp filters, and no command is run without";
    Finding::less(what, State::Missing, meaning, "a kernel of 4.14 or newer with seccomp filters")
}

fn core_dumps() -> Finding {
    // Where it cannot be read, there is nobody to whom cores could be handed.
    core_dumps_by(fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default().trim())
}

/// The limit that keeps cores from files and from programs says nothing of sockets, and a process can do no more.
fn core_dumps_by(pattern: &str) -> Finding {
    let what = "core dumps";
    if !pattern.starts_with('@') {
        return Finding::ok(what, "crashes inside leave no core and run no program of this machine");
    }
    let meaning = format!(
        "this kernel hands the core of a crash inside to whoever listens on {pattern}, and nothing keeps it from that"
    );
    let remedy = "a program (`|…`) or a file in /proc/sys/kernel/core_pattern instead of a socket";
    Finding::less(what, State::Degraded, meaning, remedy)
}

fn kernels() -> Finding {
    let what = "kernels for sandboxes";
    match Runtime::Binary("runsc".into()).find() {
        Ok(found) => Finding::ok(
            what,
            format!(
                "{} gives each sandbox one of its own (`--runtime runsc`), for tenants who mean harm",
                found.version
            ),
        ),
        Err(error) => Finding::less(
            what,
            State::Degraded,
            format!("all sandboxes share this machine's, which is no boundary against hostile tenants ({error})"),
            "install gVisor (Debian's package is runsc) and name it with `--runtime runsc`",
        ),
    }
}

fn virtual_machines() -> Finding {
    let what = "virtual machines";
    match fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Finding::ok(what, "/dev/kvm is there, for OCI runtimes that make one for each sandbox"),
        Err(error) => Finding::less(
            what,
            State::Missing,
            format!("no OCI runtime can make one for each sandbox: /dev/kvm: {error}"),
            "hardware virtualization, in a virtual machine nested, and the module kvm",
        ),
    }
}

fn host_userland() -> Finding {
    let what = "this machine's own programs";
    if let Some(mount) = mount_below(Path::new("/usr")) {
        return Finding::less(
            what,
            State::Missing,
            format!(
                "the image `host` cannot be had: {} is mounted there, which the kernel keeps together",
                mount.display()
            ),
            "use an image (`viv image pull`)",
        );
    }
    Finding::less(
        what,
        State::Degraded,
        "the image `host` runs them, and nothing below /usr can be changed: they belong to root, who is nobody here",
        "use an image, whose files are all yours (`viv image pull`)",
    )
}

fn disk_limits() -> Finding {
    Finding::less(
        "disk limits",
        State::Missing,
        "a sandbox may fill your disk or your quota: neither filesystems in files nor btrfs quota groups are for users",
        "run viv as root",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_for_cores_is_told() {
        for pattern in ["", "core", "/var/core/%p", "|/usr/lib/handler %P"] {
            assert_eq!(core_dumps_by(pattern).state, State::Ok, "{pattern}");
        }
        let told = core_dumps_by("@/run/cores.socket");
        assert!(told.state == State::Degraded && told.meaning.contains("@/run/cores.socket"), "{told:?}");
    }
}
