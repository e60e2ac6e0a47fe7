//! Our own folder inside, the agent's socket, and files of the host.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use libc::{EACCES, EBUSY, ENOENT, ENOTDIR, EPERM, EROFS, EXDEV};

use crate::attempt::{Attempt, Outcome, Setting};
use crate::sys::call;

const HOME: &str = "/.vivarium";
const NO: &[i32] = &[EPERM, EACCES, EROFS, EBUSY];
const NOT_THERE: &[i32] = &[ENOENT, EACCES, EPERM, ENOTDIR];

fn in_home<T>(act: impl FnOnce(&Path) -> io::Result<T>, evidence: &str) -> Outcome {
    Outcome::of(act(Path::new(HOME)), evidence)
}

/// Reads the file that the suite has put on the host, by a path that begins here.
fn read_of_host(setting: &Setting, before: &str) -> Outcome {
    match setting.get("HOST_FILE") {
        Ok(path) => match fs::read_to_string(format!("{before}{path}")) {
            Ok(text) => Outcome::Opened(text),
            Err(error) => Outcome::Error(error),
        },
        Err(outcome) => outcome,
    }
}

pub(crate) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "home-make",
        tries: "put a file into our folder",
        refusals: NO,
        act: |_| in_home(|home| fs::write(home.join("forged"), ""), "it is there"),
    },
    Attempt {
        name: "home-move",
        tries: "move our folder away",
        refusals: &[EPERM, EACCES, EROFS, EBUSY, EXDEV],
        act: |_| in_home(|home| fs::rename(home, "/elsewhere"), "it is elsewhere"),
    },
    Attempt {
        name: "home-mode",
        tries: "open our folder to everybody",
        refusals: NO,
        act: |_| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
            in_home(|home| fs::set_permissions(home, mode), "it is open")
        },
    },
    Attempt {
        name: "identity-remove",
        tries: "remove the identity",
        refusals: NO,
        act: |_| in_home(|home| fs::remove_file(home.join("identity.json")), "it is gone"),
    },
    Attempt {
        name: "identity-write",
        tries: "claim to be another sandbox",
        refusals: NO,
        act: |_| in_home(|home| fs::File::options().write(true).open(home.join("identity.json")), "it can be written"),
    },
    Attempt {
        name: "agent-replace",
        tries: "put another agent in the place of ours",
        refusals: &[EPERM, EACCES, EROFS, EBUSY, EXDEV],
        act: |_| in_home(|home| fs::rename("/proc/self/exe", home.join("agent")), "it was replaced"),
    },
    Attempt {
        name: "agent-remove",
        tries: "remove the agent",
        refusals: NO,
        act: |_| in_home(|home| fs::remove_file(home.join("agent")), "it is gone"),
    },
    Attempt {
        name: "run-list",
        tries: "look into the folder that is shared with the host",
        refusals: NO,
        act: |_| in_home(|home| fs::read_dir(home.join("run")), "it was listed"),
    },
    Attempt {
        name: "run-enter",
        tries: "go into the folder that is shared with the host",
        refusals: NO,
        act: |_| in_home(|home| std::env::set_current_dir(home.join("run")), "it is in there"),
    },
    Attempt {
        name: "agent-config",
        tries: "read what the agent was told",
        refusals: NO,
        act: |_| in_home(|home| fs::read(home.join("run/agent.json")), "it was read"),
    },
    Attempt {
        name: "agent-socket",
        tries: "command the agent",
        refusals: NO,
        act: |_| in_home(|home| UnixStream::connect(home.join("run/agent.sock")), "connected"),
    },
    Attempt {
        name: "agent-socket-replace",
        tries: "answer in the agent's place",
        refusals: NO,
        act: |_| {
            in_home(
                |home| {
                    let path = home.join("run/agent.sock");
                    fs::remove_file(&path)?;
                    UnixListener::bind(path)
                },
                "it listens",
            )
        },
    },
    Attempt {
        name: "output-of-others",
        tries: "read the kept output of executions",
        refusals: NO,
        act: |_| in_home(|home| fs::read_dir(home.join("run/exec")), "it was listed"),
    },
    Attempt {
        name: "output-forge",
        tries: "leave a link where the host reads output",
        refusals: NO,
        act: |_| in_home(|home| std::os::unix::fs::symlink("/etc/shadow", home.join("run/exec/forged")), "it is there"),
    },
    Attempt {
        name: "socket-by-name-only",
        tries: "reach the shim's socket by its path on the host",
        refusals: NOT_THERE,
        act: |setting| match setting.get("SHIM_SOCKET") {
            Ok(path) => Outcome::of(UnixStream::connect(path), "connected"),
            Err(outcome) => outcome,
        },
    },
    Attempt {
        name: "host-file",
        tries: "read a file of the host by its path",
        refusals: NOT_THERE,
        act: |setting| read_of_host(setting, ""),
    },
    Attempt {
        name: "host-file-above",
        tries: "read a file of the host above the root",
        refusals: NOT_THERE,
        act: |setting| read_of_host(setting, "/../../../../../../.."),
    },
    Attempt {
        name: "host-file-own-root",
        tries: "read a file of the host through its own root",
        refusals: NOT_THERE,
        act: |setting| read_of_host(setting, "/proc/self/root/.."),
    },
    Attempt {
        name: "host-file-agent-root",
        tries: "read a file of the host through the agent's root",
        refusals: NOT_THERE,
        act: |setting| read_of_host(setting, "/proc/1/root"),
    },
    Attempt {
        name: "host-file-agent-cwd",
        tries: "read a file of the host through the agent's working directory",
        refusals: NOT_THERE,
        act: |setting| read_of_host(setting, "/proc/1/cwd/.."),
    },
    Attempt {
        name: "host-shadow",
        tries: "read the host's passwords",
        refusals: NOT_THERE,
        act: |_| Outcome::of(fs::read("/etc/shadow"), "they were read"),
    },
    Attempt {
        name: "usr-for-the-host",
        tries: "write through to the host's programs",
        // Root may write to its own copy; what the suite checks is that the host's does not change.
        refusals: &[EPERM, EACCES, EROFS],
        act: |setting| match (setting.get("HOST_USR_FILE"), call!(libc::SYS_getuid)) {
            (Ok(path), Ok(0)) => match fs::write(path, "") {
                Ok(()) => Outcome::Refused("it wrote to a copy of its own, which the suite checks".to_owned()),
                Err(error) => Outcome::Error(error),
            },
            (Ok(path), _) => Outcome::of(fs::write(path, ""), "it was written"),
            (Err(outcome), _) => outcome,
        },
    },
];
