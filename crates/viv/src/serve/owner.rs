//! One daemon owns a data folder (J8).
//!
//! ```text
//!   owner.lock   flock of the owner, for as long as it lives
//!   owner.json   who that is: boot id, pid, start time, not a bare pid (J6)
//!   owner.beat   a count that the owner raises; who sees it stand still knows that the owner hangs
//! ```
//!
//! A second daemon refuses to start and says who owns it. A standby waits: the lock comes free when the owner dies, and
//! when the owner hangs instead, it is killed by its identity first. Should even that not end it (a frozen cgroup of the
//! first kind holds the dead, too), what it has locked is replaced: the lock here, and the store's file. It dies when it
//! thaws; until then the store's epoch keeps it from writing, and the fences from doing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use viv_sandbox::process::ProcessIdentity;

/// How often the owner shows that it lives.
const BEAT: Duration = Duration::from_millis(500);

/// A heart that stood still for this long has lapsed.
const LAPSE: Duration = Duration::from_secs(2);

/// How often a standby looks.
const LOOK: Duration = Duration::from_millis(100);

/// How long one waits for the killed to be gone.
const GONE_WITHIN: Duration = Duration::from_millis(800);

/// Who owns a data folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OwnerFile {
    /// For people.
    pub(super) name: String,
    /// The process.
    #[serde(flatten)]
    pub(super) process: ProcessIdentity,
}

/// Ownership of a data folder, for as long as this lives.
#[derive(Debug)]
pub(super) struct Ownership {
    pub(super) who: OwnerFile,
    /// The owner before was killed and is not gone: what it holds, it may hold for ever.
    pub(super) from_undead: bool,
    /// Free when we die.
    _lock: File,
}

impl Ownership {
    /// Takes a folder that nobody owns; with `standby`, waits until it can be had.
    pub(super) fn take(folder: &Path, standby: bool) -> anyhow::Result<Self> {
        let path = folder.join("owner.lock");
        let mut pulse = Pulse::new(folder.join("owner.beat"));
        let mut told = false;
        loop {
            // Opened each time: who took over from one that did not die put another file there.
            let lock = open(&path)?;
            if is_locked(&lock)? && is_named(&lock, &path)? {
                let who = announce(folder)?;
                return Self::begin(folder, who, lock, false);
            }
            drop(lock);
            let owner = read_owner(folder);
            let name = owner.as_ref().map_or_else(|| "another daemon".to_owned(), |owner| owner.name.clone());
            if !standby {
                bail!(
                    "{name} owns {}\nhint: use another --data folder, stop that daemon, or start this one with --standby",
                    folder.display()
                );
            }
            if !told {
                super::say(format_args!("standing by for {name}"));
                told = true;
            }
            if pulse.lapsed(owner.as_ref())? {
                super::say(format_args!("{name} has shown no life for {LAPSE:?}: taking over"));
                if let Some(owner) = owner
                    && !end(&owner.process)?.frees_its_lock()
                    && let Some((who, lock)) = replace_lock(folder, &owner)?
                {
                    super::say(format_args!("{name} was killed and is not gone (frozen?): going on without its lock"));
                    return Self::begin(folder, who, lock, true);
                }
                pulse = Pulse::new(folder.join("owner.beat"));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Whether nobody took over.
    pub(super) fn is_ours(&self, folder: &Path) -> bool {
        read_owner(folder).is_none_or(|owner| owner == self.who)
    }

    fn begin(folder: &Path, who: OwnerFile, lock: File, from_undead: bool) -> anyhow::Result<Self> {
        // A thread of its own: it shows that the process is scheduled, whatever its runtime is busy with.
        let (folder, own) = (folder.to_owned(), who.clone());
        std::thread::Builder::new().name("heartbeat".to_owned()).spawn(move || beat(&folder, &own))?;
        Ok(Self { who, from_undead, _lock: lock })
    }
}

/// Writes down that we are the owner.
fn announce(folder: &Path) -> anyhow::Result<OwnerFile> {
    let process = ProcessIdentity::own().context("cannot tell who I am")?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = format!("viv {} (pid {} on {host})", env!("CARGO_PKG_VERSION"), process.pid);
    let who = OwnerFile { name, process };
    write_whole(&folder.join("owner.json"), &serde_json::to_vec_pretty(&who)?)?;
    Ok(who)
}

/// Puts another lock in the place of one that cannot be had, and takes it. `None` when another standby was quicker.
///
/// Who has the heir's lock is alone here. It is the owner from when it wrote that down, and whoever comes then finds
/// either this lock held, or another owner than the one whom it waited for.
fn replace_lock(folder: &Path, dead: &OwnerFile) -> anyhow::Result<Option<(OwnerFile, File)>> {
    let heir = folder.join("owner.heir");
    let lock = open(&heir)?;
    if !is_locked(&lock)? || !is_named(&lock, &heir)? || read_owner(folder).as_ref() != Some(dead) {
        return Ok(None);
    }
    let who = announce(folder)?;
    fs::rename(&heir, folder.join("owner.lock")).context("cannot put another lock in place")?;
    Ok(Some((who, lock)))
}

/// Tries to lock a file. Whether it is ours now.
fn is_locked(file: &File) -> anyhow::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error).context("cannot lock the data folder"),
    }
}

/// Whether this is still the file of that name.
fn is_named(file: &File, path: &Path) -> anyhow::Result<bool> {
    let held = file.metadata().context("cannot look at a lock")?;
    match fs::metadata(path) {
        Ok(named) => Ok((held.dev(), held.ino()) == (named.dev(), named.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).context("cannot look at a lock"),
    }
}

/// Raises the count. Whoever was away for long enough to have been replaced ends at once.
fn beat(folder: &Path, own: &OwnerFile) {
    // Written in place and always as long: on a full disk, too.
    let file = open(&folder.join("owner.beat"));
    let mut last = Instant::now();
    for count in 0_u64.. {
        if let Ok(file) = &file {
            let _ = file.write_all_at(format!("{count:020}").as_bytes(), 0);
        }
        std::thread::sleep(BEAT);
        if last.elapsed() > LAPSE && read_owner(folder).is_some_and(|owner| owner.process != own.process) {
            super::say(format_args!(
                "error: somebody took over while this daemon was away; it ends, and its sandboxes live on"
            ));
            std::process::exit(1);
        }
        last = Instant::now();
    }
}

/// What a standby sees of the owner's heart, by the standby's own clock.
struct Pulse {
    path: PathBuf,
    /// Whose it is, and its count: another owner's heart has only begun to beat.
    seen: (Option<OwnerFile>, Option<String>),
    since: Instant,
}

impl Pulse {
    fn new(path: PathBuf) -> Self {
        Self { path, seen: (None, None), since: Instant::now() }
    }

    fn lapsed(&mut self, owner: Option<&OwnerFile>) -> anyhow::Result<bool> {
        let count = match fs::read_to_string(&self.path) {
            Ok(count) => Some(count),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error).context("cannot read the owner's heartbeat"),
        };
        let now = (owner.cloned(), count);
        if now != self.seen {
            self.seen = now;
            self.since = Instant::now();
        }
        Ok(self.since.elapsed() >= LAPSE)
    }
}

/// How the end of an owner went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It is gone, and its lock with it.
    Gone,
    /// It was gone before, so somebody else holds the lock: one who was killed, and whose heir died.
    WasGone,
    /// It was killed, and is there.
    Undead,
}

impl End {
    fn frees_its_lock(self) -> bool {
        match self {
            Self::Gone => true,
            Self::WasGone | Self::Undead => false,
        }
    }
}

/// Kills this very process.
fn end(process: &ProcessIdentity) -> anyhow::Result<End> {
    let Some(pidfd) = process.open()? else { return Ok(End::WasGone) };
    match pidfd_send_signal(&pidfd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => return Err(error).context("cannot kill the owner"),
    }
    Ok(if is_gone_within(&pidfd, GONE_WITHIN)? { End::Gone } else { End::Undead })
}

fn is_gone_within(pidfd: &OwnedFd, how_long: Duration) -> io::Result<bool> {
    let timeout = Timespec { tv_sec: how_long.as_secs().cast_signed(), tv_nsec: how_long.subsec_nanos().into() };
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&timeout))? > 0)
}

fn read_owner(folder: &Path) -> Option<OwnerFile> {
    let mut text = String::new();
    File::open(folder.join("owner.json")).ok()?.take(4096).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

fn open(path: &Path) -> anyhow::Result<File> {
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    opened.with_context(|| format!("cannot open {}", path.display()))
}

/// Writes a file so that readers see all of it or what was there before; only its owner may read it.
pub(super) fn write_whole(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let beside = path.with_extension("new");
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside);
    let mut file = file.with_context(failed)?;
    io::Write::write_all(&mut file, content).with_context(failed)?;
    file.sync_all().with_context(failed)?;
    fs::rename(&beside, path).with_context(failed)
}
