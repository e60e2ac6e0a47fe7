//! Cgroups of an instance, on pure v2 and on the hybrid layout, by detection.
//!
//! ```text
//!   v2:   <mount>/<prefix>/<sandbox>/            the agent; everything below it too
//!                            └── exe_…/          one per execution, made by the agent
//!   v1:   <each controller>/<prefix>/<sandbox>/  limits and figures, where v2 lacks the controllers
//! ```
//!
//! The v2 side is for freezing, killing and proving emptiness, so it is used
//! wherever a v2 hierarchy is mounted, with or without controllers. No
//! controller is enabled below the instance's cgroup, so the agent can live in
//! it beside its children, and its limits bind all of them.
//!
//! For ordinary users both are below what was delegated to them, if anything was.
//!
//! Nothing here is libcontainer's: it and `runc` find the folders made, and
//! put the container's first process into the v1 ones.

mod delegated;
mod device;
mod figures;
mod layout;
mod limits;
mod opened;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) use delegated::HOW as HOW_TO_DELEGATE;
pub use device::BlockDevice;
pub use layout::{Controller, Layout};
pub use limits::LimitError;
pub(crate) use opened::OpenedCgroup;

/// A folder that was there a moment ago can be gone: another instance's end removed the empty prefix.
const MAKE_TRIES_MAX: usize = 100;

/// How often emptiness is looked at: notifications of `cgroup.events` are rate-limited and come later.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// How long removing an empty v1 cgroup may be answered *busy*.
const REMOVE_WITHIN: Duration = Duration::from_secs(2);

/// The cgroups of one instance.
#[derive(Debug, Clone)]
pub struct InstanceCgroups {
    layout: Layout,
    /// Below each mount, without a leading slash.
    path: String,
}

impl InstanceCgroups {
    /// Names them; makes nothing.
    pub fn new(layout: Layout, path: String) -> Self {
        Self { layout, path }
    }

    /// Makes them. What is there already is taken over.
    pub fn make(&self) -> io::Result<()> {
        if let Some(mount) = &self.layout.v2 {
            self.make_one(mount)?;
            self.layout.enable_v2_controllers(&self.path);
        }
        for (mount, _) in &self.layout.v1 {
            self.make_one(mount)?;
            if mount.ends_with("cpuset") {
                Layout::seed_cpuset(mount, &self.path)?;
            }
        }
        Ok(())
    }

    fn make_one(&self, mount: &Path) -> io::Result<()> {
        let path = mount.join(&self.path);
        let mut result = Ok(());
        for _ in 0..MAKE_TRIES_MAX {
            result = fs::create_dir_all(&path);
            match &result {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Ok(()) | Err(_) => break,
            }
        }
        result
    }

    /// The path below each hierarchy, as OCI runtimes want it.
    pub fn runtime_path(&self) -> String {
        format!("/{}", self.path)
    }

    /// The layout that was found.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The v2 folder.
    pub fn v2(&self) -> Option<PathBuf> {
        self.layout.v2.as_ref().map(|mount| mount.join(&self.path))
    }

    /// All of their folders, there or not.
    pub fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.layout.mounts().map(|mount| mount.join(&self.path))
    }

    /// Whether the v2 one is to stand still, by its own switch or by that of one above it.
    pub(crate) fn is_stopped(&self) -> bool {
        self.v2().is_some_and(|path| {
            fs::read_to_string(path.join("cgroup.freeze")).is_ok_and(|text| text.starts_with('1'))
                || events_say(&path, "frozen 1").unwrap_or(false)
        })
    }

    /// Whether the v1 freezer holds them, which nobody here ever asks it to.
    pub(crate) fn is_stopped_by_v1(&self) -> bool {
        self.v1_freezer().is_some_and(|switch| fs::read_to_string(switch).is_ok_and(|state| state.starts_with('F')))
    }

    /// The switch of the v1 freezer.
    fn v1_freezer(&self) -> Option<PathBuf> {
        let freezer = self.layout.v1.iter().find(|(_, controls)| controls.contains("freezer"));
        freezer.map(|(mount, _)| mount.join(&self.path).join("freezer.state"))
    }

    /// The v2 folder, opened.
    pub fn open_v2(&self) -> io::Result<Option<OwnedFd>> {
        self.v2().map(|path| File::open(path).map(OwnedFd::from)).transpose()
    }

    /// Puts this process into the v1 ones. Into v2 one is born.
    pub(crate) fn join_v1(&self) -> io::Result<()> {
        self.layout.v1.iter().try_for_each(|(mount, _)| fs::write(mount.join(&self.path).join("cgroup.procs"), "0"))
    }

    /// Whether the runtime is not to be told of them: there are none, or none whose place it could find.
    pub(crate) fn hidden_from_runtime(&self) -> bool {
        self.layout.is_empty() || self.layout.delegated
    }

    /// Lets `id` (and nobody else) make cgroups below this one and start
    /// processes in them. The files that set limits stay root's.
    pub fn delegate(&self, id: u32) -> io::Result<()> {
        if let Some(path) = self.v2() {
            std::os::unix::fs::chown(&path, Some(id), Some(id))?;
            std::os::unix::fs::chown(path.join("cgroup.procs"), Some(id), Some(id))?;
        }
        Ok(())
    }

    /// Takes the processors away, or gives them back, and waits until it holds.
    pub fn set_frozen(&self, frozen: bool, within: Duration) -> io::Result<()> {
        let path = self.v2().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        fs::write(path.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
        let wanted = if frozen { "frozen 1" } else { "frozen 0" };
        wait_for(within, || events_say(&path, wanted))
    }

    /// Sends SIGKILL to everything, and answers when nothing is left in it.
    pub fn kill(&self, within: Duration) -> io::Result<()> {
        if let Some(path) = self.v2() {
            match fs::write(path.join("cgroup.kill"), "1") {
                Ok(()) => {}
                // Removed already, or a kernel before 5.14: then the end of the PID namespace is what kills.
                Err(error) if gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        // What somebody froze with v1 dies only when it is thawed, unlike with v2. It has its signal by now.
        if self.is_stopped_by_v1()
            && let Some(switch) = self.v1_freezer()
        {
            match fs::write(switch, "THAWED") {
                Ok(()) => {}
                Err(error) if gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        wait_for(within, || self.is_empty())
    }

    /// Whether no process is left in any of them.
    pub fn is_empty(&self) -> io::Result<bool> {
        if let Some(path) = self.v2()
            && !events_say(&path, "populated 0")?
        {
            return Ok(false);
        }
        for (mount, _) in &self.layout.v1 {
            match fs::read_to_string(mount.join(&self.path).join("cgroup.procs")) {
                Ok(procs) if !procs.is_empty() => return Ok(false),
                Ok(_) => {}
                Err(error) if gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Removes them all, and the prefix when this was its last instance.
    pub fn remove(&self) -> io::Result<()> {
        for mount in self.layout.mounts() {
            let path = mount.join(&self.path);
            wait_for(REMOVE_WITHIN, || match remove_tree(&path) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
                Err(error) => Err(error),
            })?;
            for above in Path::new(&self.path).ancestors().skip(1) {
                if above.as_os_str().is_empty() || fs::remove_dir(mount.join(above)).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whether any of them is there.
    pub fn exist(&self) -> bool {
        self.layout.mounts().any(|mount| mount.join(&self.path).exists())
    }
}

/// Removes a cgroup and those below it, which hold no processes.
fn remove_tree(path: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if gone(&error) => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    match fs::remove_dir(path) {
        Err(error) if gone(&error) => Ok(()),
        result => result,
    }
}

fn events_say(path: &Path, wanted: &str) -> io::Result<bool> {
    match fs::read_to_string(path.join("cgroup.events")) {
        Ok(events) => Ok(events.lines().any(|line| line == wanted)),
        // A cgroup that was removed holds nothing and is not frozen.
        Err(error) if gone(&error) => Ok(wanted.ends_with('0')),
        Err(error) => Err(error),
    }
}

/// Not there, or removed while it was open.
fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

/// Looks until it is so. Blocks; the shim has nothing better to do, and others call it from a blocking thread.
fn wait_for(within: Duration, mut so: impl FnMut() -> io::Result<bool>) -> io::Result<()> {
    let until = Instant::now() + within;
    while !so()? {
        if Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
