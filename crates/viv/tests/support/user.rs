//! An ordinary user of this machine, for as long as a test takes, and without changing the machine.
//!
//! Root becomes one: in a mount namespace of its own, with files in the place
//! of `/etc/passwd` and the like. Whoever is an ordinary user already is taken
//! as is, with what this machine gives to that user.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use viv_sandbox::cgroup::Layout;

use super::base::SHELF;
use super::{VIV, eventually_quietly, fresh_bytes, hex};

/// High enough that no machine has given it to anybody.
const UID: u32 = 54_321;
const NAME: &str = "vivtest";

/// Ids for the user's sandboxes, as `adduser` gives them.
const SUBORDINATE: &str = "vivtest:1000000:65536\n";

/// The files that systemd gives to whom it delegates a cgroup; v1 has the first only.
const DELEGATED: [&str; 3] = ["cgroup.procs", "cgroup.threads", "cgroup.subtree_control"];

/// What systemd hands down to a user's scopes, and I/O, for which it has to be asked.
const HANDED_DOWN: [&str; 4] = ["+cpu", "+memory", "+pids", "+io"];

/// Sets up what the namespace shows, and becomes the user.
const BECOME: &str = r#"
    set -eu
    for name in passwd group subuid subgid; do mount --bind "$STAND_IN/etc/$name" "/etc/$name"; done
    mount --bind "$STAND_IN_VIV" "$STAND_IN/bin/viv"
    mount --bind "$STAND_IN_TEST" "$STAND_IN/bin/test"
    for procs in $STAND_IN_CGROUPS; do echo $$ > "$procs"; done
    if [ -n "$STAND_IN_JAIL" ]; then
        mount --rbind / "$STAND_IN/jail"
        exec chroot "$STAND_IN/jail" setpriv --reuid "$STAND_IN_UID" --regid "$STAND_IN_UID" --clear-groups -- "$@"
    fi
    exec setpriv --reuid "$STAND_IN_UID" --regid "$STAND_IN_UID" --clear-groups -- "$@"
"#;

/// The user.
pub struct User {
    folder: tempfile::TempDir,
    cgroups: Vec<PathBuf>,
    stand_in: bool,
    /// Below another root, where the kernel lets nobody make a user namespace.
    jailed: bool,
}

impl User {
    /// With ids for sandboxes.
    pub fn new() -> Self {
        Self::with_ids(SUBORDINATE)
    }

    /// With no other id than the own one. `None` for whoever is an ordinary user already, whose ids are what they are.
    pub fn with_one_id() -> Option<Self> {
        let user = Self::with_ids("");
        user.stand_in.then_some(user)
    }

    fn with_ids(subordinate: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("viv-user-").tempdir().unwrap();
        let stand_in = rustix::process::geteuid().is_root();
        let path = folder.path();
        for name in ["etc", "bin", "home", "home/tmp", "jail"] {
            fs::create_dir(path.join(name)).unwrap();
        }
        if stand_in {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
            let line = |file: &str, line: String| fs::read_to_string(file).unwrap() + &line;
            let passwd =
                line("/etc/passwd", format!("{NAME}:x:{UID}:{UID}::{}:/bin/sh\n", path.join("home").display()));
            let group = line("/etc/group", format!("{NAME}:x:{UID}:\n"));
            for (name, text) in
                [("passwd", &*passwd), ("group", &group), ("subuid", subordinate), ("subgid", subordinate)]
            {
                fs::write(path.join("etc").join(name), text).unwrap();
            }
            for name in ["viv", "test"] {
                fs::write(path.join("bin").join(name), "").unwrap();
            }
            for name in ["home", "home/tmp"] {
                chown(path.join(name), Some(UID), Some(UID)).unwrap();
            }
        }
        Self { folder, cgroups: Vec::new(), stand_in, jailed: false }
    }

    /// Not allowed to make user namespaces. `None` for whoever is an ordinary user already.
    pub fn without_namespaces() -> Option<Self> {
        let mut user = Self::new();
        user.jailed = true;
        user.stand_in.then_some(user)
    }

    /// Hands over a cgroup in each hierarchy that limits, as systemd would. `None` for whoever cannot.
    pub fn with_cgroups() -> Option<Self> {
        let mut user = Self::new();
        let layout = Layout::detect().unwrap();
        if !user.stand_in || layout.v2.is_none() {
            return None;
        }
        let name = format!("viv-test-{}", hex(&fresh_bytes()[8..]));
        for mount in layout.mounts().filter(|mount| !mount.ends_with("cpuset")) {
            // What is not handed down to it cannot be handed on. On hybrid layouts v2 has no controllers to hand down.
            for controller in HANDED_DOWN {
                let _ = fs::write(mount.join("cgroup.subtree_control"), controller);
            }
            let cgroup = mount.join(&name);
            fs::create_dir(&cgroup).unwrap();
            chown(&cgroup, Some(UID), Some(UID)).unwrap();
            for path in DELEGATED.map(|file| cgroup.join(file)).iter().filter(|path| path.exists()) {
                chown(path, Some(UID), Some(UID)).unwrap();
            }
            user.cgroups.push(cgroup);
        }
        Some(user)
    }

    pub fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    /// What is handed over is empty again.
    pub fn assert_no_cgroup_left(&self) {
        for cgroup in &self.cgroups {
            // Where those of the user went that were in it; systemd removes it with the whole.
            let is_left = |entry: &fs::DirEntry| entry.path().is_dir() && entry.file_name() != "viv-own";
            let below = || fs::read_dir(cgroup).unwrap().flatten().filter(is_left).count();
            assert!(eventually_quietly(|| below() == 0), "cgroups are left in {}", cgroup.display());
        }
    }

    /// A program in the user's place.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let folder = self.folder.path();
        let mut command = if self.stand_in {
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "slave", "sh", "-c", BECOME, "sh"]).arg(program.as_ref());
            let procs = self.cgroups.iter().map(|cgroup| cgroup.join("cgroup.procs").display().to_string());
            command
                .env("STAND_IN", folder)
                .env("STAND_IN_VIV", VIV)
                .env("STAND_IN_TEST", std::env::current_exe().unwrap())
                .env("STAND_IN_JAIL", if self.jailed { "yes" } else { "" })
                .env("STAND_IN_UID", UID.to_string())
                .env("STAND_IN_CGROUPS", procs.collect::<Vec<_>>().join(" "));
            command
        } else {
            Command::new(program.as_ref())
        };
        command
            .env("HOME", self.home())
            .env("TMPDIR", self.home().join("tmp"))
            .env("VIV_TEST_BINARY", self.viv_binary())
            .env(SHELF, self.home().join("bases"))
            .env_remove("XDG_DATA_HOME")
            .current_dir("/");
        command
    }

    fn viv_binary(&self) -> PathBuf {
        if self.stand_in { self.folder.path().join("bin/viv") } else { VIV.into() }
    }

    /// The binary as this user calls it.
    pub fn viv(&self) -> Command {
        self.command(self.viv_binary())
    }

    /// Runs `viv` and answers what it said, or fails.
    pub fn say(&self, arguments: &[&str]) -> String {
        let output = self.viv().args(arguments).output().unwrap();
        said(arguments, &output)
    }

    /// Runs an ignored test of this very binary, where the provider can be opened.
    pub fn run_inside(&self, test: &str, environment: &[(&str, &str)]) {
        let this = if self.stand_in { self.folder.path().join("bin/test") } else { std::env::current_exe().unwrap() };
        let mut command = self.viv();
        command.args(["unshare", "--"]).arg(this).args(["--ignored", "--exact", "--nocapture", test]);
        let output = command.envs(environment.iter().copied()).output().unwrap();
        let told = said(&[test], &output);
        assert!(told.contains("test result: ok. 1 passed"), "{test} did not run: {told}");
    }
}

impl Drop for User {
    fn drop(&mut self) {
        for cgroup in &self.cgroups {
            let gone = eventually_quietly(|| {
                // What a failed test left in them goes along.
                let _ = fs::write(cgroup.join("cgroup.kill"), "1");
                remove_below(cgroup);
                !cgroup.exists()
            });
            assert!(gone || std::thread::panicking(), "{} is left", cgroup.display());
        }
    }
}

fn remove_below(cgroup: &Path) {
    for entry in fs::read_dir(cgroup).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        remove_below(&entry.path());
    }
    let _ = fs::remove_dir(cgroup);
}

fn said(what: &[&str], output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{what:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}
