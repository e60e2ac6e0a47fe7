//! Memory beside files: who can save it here, and what is done with it.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use viv_agent::proto::SOCKET;
use viv_core::{EndCause, SandboxId, SnapshotId};
use viv_provider::{Capability, Egress, Ended, InstanceRef, Mutation, Obstacle, ObstacleEffect, ProviderError};

use super::chores::Chore;
use super::create::Origin;
use super::save::{save_failed, store_failed};
use super::{KeepMemory, LocalProvider, Result, shim_client, unavailable};
use crate::checkpoint::criu::{DUMP_LOG, RESTORE_LOG};
use crate::checkpoint::mounts::{self, parts_of};
use crate::checkpoint::share::Earlier;
use crate::checkpoint::{Manifest, MemoryDir, NOT_SAVED, lazy, obstacles, pack, probe};
use crate::durable;
use crate::ids::IdPool;
use crate::layout::{InstanceDir, InstanceRecord, MemoryPlan};
use crate::lock::lock_file;
use crate::process;
use crate::rootfs::{IdRange, Writable};
use crate::runtime::{Kernel, PATH};
use crate::shim::proto::{ShimReply, ShimRequest};
use crate::store::snapshot::SnapshotFile;
use crate::wait::readable_within;

/// How long a probe may take before it is given up: its own limits, and a little. What it finds out about pages has a limit
/// of its own in that: nobody who can save memory is taken for one who cannot because that hangs.
const PROBE_WITHIN: Duration = Duration::from_secs(30 + probe::LAZY_WITHIN.as_secs());

/// What does not work is tried again after this, when somebody asks: a machine may have been busy, and somebody may have
/// installed a better one. What is found out without trying, that there is none or another one, is looked at as often though
/// nobody asks.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// While nobody asks, what does not work is tried ever more rarely, up to this: each time costs tenths of a second.
const TRY_AGAIN_AFTER_MAX: Duration = Duration::from_secs(600);

/// Longest reason that is passed on.
const REASON_BYTES_MAX: u64 = 1024;

/// Why the memory of some is not saved.
const NO_NETWORK: &str = "its network cannot be kept: only the memory of sandboxes without one is saved";
const NO_DISK: &str = "its disk is a filesystem in a file, which is another device afterwards: programs that remember the \
     numbers of their files, like SQLite, would not write to them any more";

/// How to have one.
const REMEDY: &str = "`scripts/prepare criu` fetches a CRIU that leaves the system as it is; VIV_CRIU names one";

/// How to have memory brought back while it is used.
const ALLOW: &str = "`sysctl vm.unprivileged_userfaultfd=1` allows it, and lets every user of the machine hold the kernel up in \
     the middle of a copy";

/// A CRIU that works here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Criu {
    /// Where it is.
    pub path: PathBuf,
    /// What it says of itself.
    pub version: String,
    /// Why it cannot bring memory back while it is used already; nothing where it can, and does.
    pub not_lazy: Option<String>,
}

impl std::fmt::Display for Criu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CRIU {}, {}; {}", self.version, self.path.display(), self.limits())
    }
}

impl Criu {
    /// What it does not do here, for those who wonder.
    pub fn limits(&self) -> String {
        let least_mib = lazy::BYTES_MIN >> 20;
        let restored = match &self.not_lazy {
            None => format!("of {least_mib} MiB and more brought back while it is used already"),
            Some(why) => format!("all of it brought back before it is used ({why})"),
        };
        format!("of sandboxes without a network; {restored}")
    }
}

/// What the last look for one showed.
#[derive(Default)]
pub(super) struct Cache {
    known: Mutex<Option<Tried>>,
    /// Held while one is tried, so that many who ask at once try once. Who wants what is known waits for nobody.
    trying: Mutex<()>,
}

#[derive(Debug, Clone)]
struct Tried {
    at: Instant,
    setting: Setting,
    /// The programs that there were, as they were.
    programs: Vec<Program>,
    outcome: std::result::Result<Criu, String>,
    /// How often in a row it did not work.
    failures: u32,
}

/// A program, and what tells it from another one that has its name later.
type Program = (PathBuf, Option<Identity>);

impl Tried {
    /// After how long it is worth another look, though nobody asks.
    fn again_after(&self) -> Duration {
        if self.programs.is_empty() {
            return TRY_AGAIN_AFTER;
        }
        TRY_AGAIN_AFTER.saturating_mul(1 << self.failures.saturating_sub(1).min(16)).min(TRY_AGAIN_AFTER_MAX)
    }
}

/// What the kernel is told about who may have a `userfaultfd`, as it stands there. Whoever changes it changes whether
/// restores can be lazy, so what was found out before is not known any more.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Setting(Option<String>);

impl Setting {
    const PATH: &str = "/proc/sys/vm/unprivileged_userfaultfd";

    fn now() -> Self {
        Self(fs::read_to_string(Self::PATH).ok())
    }

    /// Why restores are not lazy, with what would have them be if it is this setting, and what that costs.
    fn explain(&self, why: String) -> String {
        match self.0.as_deref().map(str::trim) {
            Some("0") => format!("{why}; {ALLOW}"),
            // It is allowed, or there is no such thing.
            Some(_) | None => why,
        }
    }
}

/// That one was shown to work, for as long as neither it nor the machine's run or its setting changes.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Shown {
    boot_id: String,
    path: PathBuf,
    file: Identity,
    version: String,
    not_lazy: Option<String>,
    #[serde(default)]
    setting: Setting,
}

/// The memory that an instance is to begin with.
#[derive(Debug, Clone)]
pub(super) struct Remembered {
    pub(super) plan: MemoryPlan,
    pub(super) agent: PathBuf,
}

/// What becomes of the memory of what an instance is made from.
#[derive(Debug, Clone)]
pub(super) enum Memory {
    /// There is none.
    None,
    Restored(Box<Remembered>),
    /// It begins with the files alone, for this reason.
    Left(String),
}

impl LocalProvider {
    /// The CRIU that saves memory here, or why there is none. What works was shown by trying, once since the machine
    /// started; blocks, the first time for some tenths of a second.
    pub fn criu(&self) -> std::result::Result<Criu, String> {
        if let Some(why) = self.why_never() {
            return Err(why);
        }
        let cache = &self.shared.criu;
        let _trying = cache.trying.lock().unwrap_or_else(PoisonError::into_inner);
        let (setting, programs) = (Setting::now(), self.criu_programs());
        let before = self.criu_tried();
        if let Some(known) = &before {
            let is_same = (&known.setting, &known.programs) == (&setting, &programs);
            if is_same && (known.outcome.is_ok() || known.at.elapsed() < TRY_AGAIN_AFTER) {
                return known.outcome.clone();
            }
        }
        let outcome = self.find_criu(&programs);
        let failures = match (&outcome, before) {
            (Ok(_), _) => 0,
            (Err(_), Some(before)) if before.programs == programs => before.failures.saturating_add(1),
            (Err(_), Some(_) | None) => 1,
        };
        let tried = Tried { at: Instant::now(), setting, programs, outcome: outcome.clone(), failures };
        *cache.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(tried);
        outcome
    }

    /// The same as of the last look, which blocks only if nobody has looked yet.
    pub(super) fn criu_known(&self) -> std::result::Result<Criu, String> {
        match self.why_never() {
            Some(why) => Err(why),
            None => self.criu_tried().map_or_else(|| self.criu(), |known| known.outcome),
        }
    }

    /// After how long it is worth another look, though nobody asks; nothing where none would do.
    pub(super) fn criu_again_after(&self) -> Option<Duration> {
        match self.why_never() {
            Some(_) => None,
            None => Some(self.criu_tried().map_or(TRY_AGAIN_AFTER, |known| known.again_after())),
        }
    }

    fn criu_tried(&self) -> Option<Tried> {
        self.shared.criu.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The programs that may be one.
    fn criu_programs(&self) -> Vec<Program> {
        let candidates = match &self.shared.config.criu {
            Some(path) => vec![std::path::absolute(path).unwrap_or_else(|_| path.clone())],
            None => PATH.split(':').map(|folder| Path::new(folder).join("criu")).collect(),
        };
        let is_program = |path: &PathBuf| {
            fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        };
        candidates.into_iter().filter(is_program).map(|path| (path.clone(), identity(&path).ok())).collect()
    }

    /// Why no CRIU could do it for this provider.
    fn why_never(&self) -> Option<String> {
        if self.shared.config.keep_memory == KeepMemory::Off {
            return Some("it is switched off here".to_owned());
        }
        if matches!(self.shared.config.ids, IdPool::Shared(_)) {
            return Some("saving memory takes root: only root may look into every process of a sandbox".to_owned());
        }
        if self.shared.layout.v2.is_none() {
            return Some(format!("processes could not be placed again: {}", self.shared.layout.why_no_v2()));
        }
        match self.runtime() {
            Ok(found) if found.kernel != Kernel::Host => {
                Some("a kernel of its own keeps the memory of what runs in it".to_owned())
            }
            Ok(_) | Err(_) => None,
        }
    }

    fn find_criu(&self, programs: &[Program]) -> std::result::Result<Criu, String> {
        let mut failed = Vec::new();
        for (path, _) in programs {
            match self.tried_criu(path) {
                Ok(found) => return Ok(found),
                Err(why) => failed.push(why),
            }
        }
        let why = match (&self.shared.config.criu, failed.is_empty()) {
            (_, false) => failed.join("; "),
            (Some(path), true) => format!("there is no program {}", path.display()),
            (None, true) => "there is no CRIU".to_owned(),
        };
        Err(format!("{why}: {REMEDY}"))
    }

    /// One that works, by what was found before or by trying.
    fn tried_criu(&self, path: &PathBuf) -> std::result::Result<Criu, String> {
        let said = |error: io::Error| format!("{}: {error}", path.display());
        let (boot_id, file) = (process::boot_id().map_err(said)?, identity(path).map_err(said)?);
        let (setting, note) = (Setting::now(), self.shared.data.host().join("criu.json"));
        if let Ok(Some(shown)) = durable::read_json::<Shown>(&note)
            && (&shown.boot_id, &shown.path, &shown.file, &shown.setting) == (&boot_id, path, &file, &setting)
        {
            return Ok(Criu { path: path.clone(), version: shown.version, not_lazy: self.not_lazy(shown.not_lazy) });
        }
        let version = version(path).map_err(said)?;
        let not_lazy = self.try_criu(path);
        let not_lazy =
            not_lazy.map_err(|why| format!("CRIU {version} ({}) does not work here: {why}", path.display()))?;
        // Whoever cannot note it tries again.
        let (path, version, not_lazy) = (path.clone(), version.clone(), not_lazy.clone());
        let shown = Shown { boot_id, path, file, version, not_lazy, setting };
        let _ = durable::replace_json_unsynced(&note, &shown);
        Ok(Criu { path: shown.path, version: shown.version, not_lazy: self.not_lazy(shown.not_lazy) })
    }

    /// Why restores are not lazy, whatever CRIU and the kernel can.
    fn not_lazy(&self, why: Option<String>) -> Option<String> {
        match self.shared.config.keep_memory {
            KeepMemory::Lazy => why.map(|why| Setting::now().explain(why)),
            KeepMemory::Eager | KeepMemory::Off => Some("it is switched off here".to_owned()),
        }
    }

    /// Has it save and bring back a small process; answers with why it cannot be lazy.
    fn try_criu(&self, path: &Path) -> std::result::Result<Option<String>, String> {
        // A name that nobody has.
        let folder = self.shared.data.host().join(format!(".criu-probe-{}", crate::store::unique()));
        fs::create_dir(&folder).map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.shared.config.shim_exe);
        command.arg(probe::VERB).arg(path).arg(&folder);
        let outcome = hear(&mut command).map_err(|error| error.to_string());
        let _ = fs::remove_dir_all(&folder);
        match outcome? {
            (true, said) => Ok(Some(said).filter(|said| !said.is_empty())),
            (false, said) if said.is_empty() => Err("the probe ended without a word".to_owned()),
            (false, said) => Err(said),
        }
    }

    /// Refuses where there is nobody who could do it.
    pub(super) async fn require_memory(&self) -> Result<Criu> {
        self.blocking(|this| {
            this.criu().map_err(|why| ProviderError::Unsupported { capability: Capability::SaveMemory, why })
        })
        .await
    }

    /// What is known to be in the way of saving the memory of an instance. Nobody inside notices the look.
    pub(super) async fn find_obstacles(&self, instance: &InstanceRef) -> Result<Vec<Obstacle>> {
        self.check_alive(instance).await?;
        let init = self.find_parts(instance).await?.agent_pid;
        let instance = instance.clone();
        self.blocking(move |this| {
            let record = this.need_record(&instance)?;
            let effect = ObstacleEffect::Prevents;
            let of_all = |what: String| Obstacle { effect, what, pid: None, command: None, execution: None };
            let mut found: Vec<Obstacle> = this.criu().err().into_iter().map(of_all).collect();
            found.extend(not_kept(&record).map(|why| of_all(why.to_owned())));
            let (Some(init), Some(cgroup)) = (init, this.cgroups(&record).v2()) else { return Ok(found) };
            let mountinfo = fs::read_to_string(format!("/proc/{init}/mountinfo")).map_err(unavailable(&cgroup))?;
            if let Err(why) = mounts::external(&mountinfo, &parts_of(&record)) {
                found.push(of_all(why));
            }
            found.extend(obstacles::of_cgroup(&cgroup, init).map_err(unavailable(&cgroup))?);
            Ok(found)
        })
        .await
    }

    /// Has the memory of a running instance saved beside it, and the instance ended; when it cannot be saved, it runs on.
    pub(super) async fn dump(&self, mutation: &Mutation, instance: &InstanceRef, id: &SnapshotId) -> Result<()> {
        let criu = self.require_memory().await?;
        let (asked, budget_ms, operation) = (instance.clone(), mutation.budget_ms, mutation.operation.clone());
        // One at a time; whoever comes second finds what the first one did.
        let to_do = self
            .blocking(move |this| {
                let dir = this.dir(&asked.sandbox);
                let memory = MemoryDir::new(dir.memory());
                let lock = lock_file(&dir.saving(), true, Duration::from_millis(budget_ms));
                let lock = match lock {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(this.why_absent(&asked)),
                    lock => lock.map_err(unavailable(&dir.saving()))?,
                };
                if memory.read_dump().is_ok() {
                    // Somebody asked before and did not hear the answer.
                    return Ok(None);
                }
                let record = this.need_record(&asked)?;
                if let Some(why) = not_kept(&record) {
                    let why = why.to_owned();
                    return Err(ProviderError::Unsupported { capability: Capability::SaveMemory, why });
                }
                let made = || {
                    let known = fs::read_to_string(memory.operation()).is_ok_and(|known| known == operation.as_str());
                    if known && memory.images().is_dir() {
                        // Somebody asked before and died since: the shim may be at it.
                        return Ok(());
                    }
                    remove_if_there(memory.path())?;
                    fs::create_dir_all(memory.images())?;
                    fs::write(memory.operation(), operation.as_str())
                };
                made().map_err(save_failed)?;
                Ok(Some(lock))
            })
            .await?;
        let Some(_lock) = to_do else { return Ok(()) };
        let dir = self.dir(&instance.sandbox);
        let (mutation, folder) = (mutation.clone(), dir.memory());
        let request = ShimRequest::Checkpoint { mutation, criu: criu.path, folder, live: false };
        let failed: ProviderError = match shim_client::ask(&dir, &request).await {
            Ok(ShimReply::Error(error)) => error.into(),
            Ok(_) => return Ok(()),
            Err(error) => return Err(self.why_unreachable(instance, error).await),
        };
        // What there is of it is of no use, and the files may need the room; what CRIU said stays.
        let (instance, id, why) = (instance.clone(), id.clone(), failed.to_string());
        let cleared = self.blocking(move |this| {
            let memory = MemoryDir::new(dir.memory());
            let removed = fs::remove_dir_all(memory.kept());
            this.note_not_saved(&memory, &instance, &id, &why);
            removed.map_err(save_failed)
        });
        let _ = cleared.await;
        Err(failed)
    }

    /// What CRIU said of a dump that failed stays for a look beyond its instance, where memories that could not be restored
    /// do, and as one of the last few.
    fn note_not_saved(&self, memory: &MemoryDir, instance: &InstanceRef, id: &SnapshotId, why: &str) {
        let place = MemoryDir::new(self.shared.data.memory().join(format!("{id}{NOT_SAVED}")));
        let noted = || -> io::Result<()> {
            let said = fs::read(memory.path().join(DUMP_LOG))?;
            remove_if_there(place.path())?;
            fs::create_dir(place.path())?;
            fs::write(place.path().join(DUMP_LOG), said)?;
            durable::replace_json_unsynced(&place.instance(), instance)?;
            // Last: with it, it is known as what it is.
            fs::write(place.not_saved(), why)
        };
        // Whoever cannot note it has it in the journal, and in the instance's folder while that is there.
        if noted().is_ok() {
            self.later(Chore::Collect);
        }
    }

    /// What a shim is asked to dump a running instance, into a folder that is made for it.
    pub(super) fn prepare_live_dump(
        &self,
        mutation: &Mutation,
        record: &InstanceRecord,
        memory: &MemoryDir,
    ) -> Result<ShimRequest> {
        let unsupported = |why| ProviderError::Unsupported { capability: Capability::SaveMemory, why };
        let criu = self.criu().map_err(unsupported)?;
        if let Some(why) = not_kept(record) {
            return Err(unsupported(why.to_owned()));
        }
        let made = || {
            remove_if_there(memory.path())?;
            fs::create_dir_all(memory.images())
        };
        made().map_err(save_failed)?;
        let (mutation, folder) = (mutation.clone(), memory.path().to_owned());
        Ok(ShimRequest::Checkpoint { mutation, criu: criu.path, folder, live: true })
    }

    /// Makes what was dumped whole, once nothing runs any more; answers how large it is.
    pub(super) fn finish_stopped_memory(
        &self,
        dir: &InstanceDir,
        record: &InstanceRecord,
        id: &SnapshotId,
    ) -> Result<u64> {
        if let Ok(manifest) = self.memory_dir(id).read_manifest()
            && manifest.instance == record.instance
        {
            // It was put in place by somebody who did not come further.
            return Ok(manifest.bytes);
        }
        let memory = MemoryDir::new(dir.memory());
        let lost = || ProviderError::Failed { what: "its memory was not saved, and it has ended".to_owned() };
        memory.read_dump().map_err(|_| lost())?;
        keep_run(dir, &memory).map_err(save_failed)?;
        self.finish_memory(&memory, record, false)
    }

    /// Packs what was dumped, and says what it is; answers how large that is.
    pub(super) fn finish_memory(&self, memory: &MemoryDir, record: &InstanceRecord, runs_on: bool) -> Result<u64> {
        let finish = || -> io::Result<Manifest> {
            // What does not get smaller, for want of room for example, is kept as it is.
            let _ = pack::pack(&memory.images(), self.earlier(record, runs_on).as_ref());
            let version = self.criu().map_or_else(|_| "unknown".to_owned(), |criu| criu.version);
            let manifest = Manifest::of(memory, &record.instance, record.ids, &record.agent, &version)?;
            rustix::fs::syncfs(fs::File::open(memory.path())?)?;
            memory.write_manifest(&manifest)?;
            Ok(manifest)
        };
        finish().map(|manifest| manifest.bytes).map_err(save_failed)
    }

    /// The dump that an instance went on from, whose pages it may share. It is there for as long as the instance is.
    fn earlier(&self, record: &InstanceRecord, runs_on: bool) -> Option<Earlier> {
        let dir = MemoryDir::new(record.memory.as_ref()?.folder.clone());
        let id: SnapshotId = dir.path().file_name()?.to_str()?.parse().ok()?;
        // What cannot be told is not counted on: then only what others link to is shared.
        let stays = self.outlasts(record.sandbox(), &id, runs_on).unwrap_or(false);
        Some(Earlier { images: dir.images(), stays })
    }

    /// Whether a snapshot stays though a sandbox that went on from it is saved again. One that hibernates replaces what it
    /// hibernated with before, and whoever shared with that would be the only one to keep it. What a fork began with is
    /// another's, and is kept for as long as the fork may begin anew.
    fn outlasts(&self, sandbox: &SandboxId, id: &SnapshotId, runs_on: bool) -> io::Result<bool> {
        let store = &self.shared.store;
        let Some(SnapshotFile::Kept(kept)) = store.read_snapshot(id)? else { return Ok(false) };
        if runs_on || kept.snapshot.source.sandbox != *sandbox || self.shared.config.keeps_snapshots {
            return Ok(true);
        }
        // Those who were forked from it and are there keep it too.
        Ok(store.users_of(id)?.iter().any(|user| user.sandbox != *sandbox))
    }

    /// Puts it in place, unless it is.
    pub(super) fn put_memory(&self, memory: &MemoryDir, id: &SnapshotId) -> io::Result<()> {
        let place = self.memory_dir(id);
        if place.read_manifest().is_ok() {
            return Ok(());
        }
        durable::rename(memory.path(), place.path())
    }

    fn memory_dir(&self, id: &SnapshotId) -> MemoryDir {
        MemoryDir::new(self.shared.data.memory().join(id.as_str()))
    }

    /// What removing the memory of a snapshot would free.
    pub(super) fn own_memory_bytes(&self, id: &SnapshotId) -> u64 {
        self.memory_dir(id).own_bytes().unwrap_or(0)
    }

    /// What becomes of the memory of what an instance is to be made from. Reads all of it.
    pub(super) fn memory_for(&self, origin: &Origin, egress: &Egress) -> Result<Memory> {
        let Origin::Snapshot(id) = origin else { return Ok(Memory::None) };
        let top = match self.shared.store.read_snapshot(id).map_err(store_failed)? {
            Some(SnapshotFile::Kept(record)) if record.snapshot.memory => record.of.saved.into_iter().next(),
            Some(_) | None => return Ok(Memory::None),
        };
        // What was merged was sealed for no snapshot.
        if top.and_then(|layer| layer.snapshot()).is_none() {
            return Ok(Memory::Left("its layers were merged since, so that files have other numbers".to_owned()));
        }
        let dir = self.memory_dir(id);
        let restored = || -> std::result::Result<Remembered, String> {
            let criu = self.criu()?;
            let unreadable = |error: io::Error| format!("what is kept of it cannot be read ({error})");
            let manifest = dir.read_manifest().map_err(unreadable)?;
            if *egress != Egress::None {
                return Err("what was saved without a network cannot be given one".to_owned());
            }
            if let Some(why) = manifest.why_not(&dir).map_err(unreadable)? {
                return Err(why);
            }
            let agent = self.shared.data.agent().join(&manifest.agent);
            if !agent.is_file() {
                return Err(format!("the agent that it ran with is not there any more ({})", manifest.agent));
            }
            let (of, ids, lazy) = (manifest.instance, manifest.ids, criu.not_lazy.is_none());
            Ok(Remembered { plan: MemoryPlan { folder: dir.path().to_owned(), criu: criu.path, of, ids, lazy }, agent })
        };
        Ok(match restored() {
            Ok(remembered) => Memory::Restored(Box::new(remembered)),
            Err(why) => Memory::Left(why),
        })
    }

    /// Notes beside a memory why it was not restored, or was and did not work: so marked, it stays for a look when its
    /// snapshot goes, as one of the last few.
    pub(super) fn note_not_restored(&self, origin: &Origin, why: &str) {
        if let Origin::Snapshot(id) = origin {
            note_not_restored(&self.memory_dir(id), why);
        }
    }

    /// Takes a range of ids for a memory: the one that it was saved with, or any while somebody else has that.
    pub(super) fn take_remembered(&self, sandbox: &SandboxId, ids: IdRange) -> Result<Option<IdRange>> {
        let pool = &self.shared.ids;
        let taken = match pool.take_this(sandbox, ids) {
            Ok(true) => Ok(Some(ids)),
            Ok(false) => pool.take(sandbox),
            Err(error) => Err(error),
        };
        taken.map_err(unavailable(&self.shared.data.ids()))
    }
}

/// What an instance has that its memory is not saved with.
fn not_kept(record: &InstanceRecord) -> Option<&'static str> {
    let writable = record.made.as_ref().map(|made| &made.plan.writable);
    match (&record.spec.network.egress, writable) {
        (Egress::All, _) => Some(NO_NETWORK),
        (Egress::None, Some(Writable::Disk(_))) => Some(NO_DISK),
        (Egress::None, Some(Writable::Folder(_)) | None) => None,
    }
}

/// What is known of how an instance went on with its memory goes with that, for a look, before the instance is removed:
/// what CRIU said, and that its pages were lost, if so.
pub(super) fn part_with_memory(dir: &InstanceDir, plan: &MemoryPlan) {
    let memory = MemoryDir::new(plan.folder.clone());
    if memory.not_restored().exists() {
        return;
    }
    let kept = memory.path().join(RESTORE_LOG);
    // Whoever cannot keep it has what went wrong in the journal. One file with two names takes no time.
    let _ = fs::remove_file(&kept);
    let said = dir.path().join(RESTORE_LOG);
    let _ = fs::hard_link(&said, &kept).or_else(|_| fs::copy(&said, &kept).map(drop));
    if let Ok(Some(Ended { cause: EndCause::MemoryLost { what }, .. })) = durable::read_json(&dir.exit()) {
        note_not_restored(&memory, &what);
    }
}

/// Of several who went on from one memory, the first whom that did not serve is told of, with what CRIU said then.
fn note_not_restored(memory: &MemoryDir, why: &str) {
    if memory.path().is_dir() && !memory.not_restored().exists() {
        // Whoever cannot note it has it in the log and the journal.
        let _ = fs::write(memory.not_restored(), why);
    }
}

/// Keeps what the agent shares with the host, while nothing runs.
pub(super) fn keep_run(dir: &InstanceDir, memory: &MemoryDir) -> io::Result<()> {
    remove_if_there(&memory.run())?;
    viv_layer::copy(&dir.run(), &memory.run())?;
    // It is made again by whoever listens on it.
    let _ = fs::remove_file(memory.run().join(SOCKET));
    Ok(())
}

pub(super) fn remove_if_there(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Device, number, time and size.
type Identity = (u64, u64, i64, u64);

/// Tells a program from another one that has its name later.
fn identity(path: &Path) -> io::Result<Identity> {
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino(), found.mtime_nsec() + found.mtime() * 1_000_000_000, found.len()))
}

fn version(path: &Path) -> io::Result<String> {
    let (_, said) = hear(Command::new(path).arg("--version"))?;
    let version = said.lines().find_map(|line| line.strip_prefix("Version:")).map(str::trim);
    version.map(str::to_owned).ok_or_else(|| io::Error::other("it does not say its version"))
}

/// Runs a program of ours or CRIU: whether it went well, and what it says.
fn hear(command: &mut Command) -> io::Result<(bool, String)> {
    let mut child = command
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut stdout = child.stdout.take().expect("piped");
    // It says something, or ends and closes this.
    let answers = readable_within(&stdout, PROBE_WITHIN);
    if !matches!(answers, Ok(true)) {
        let _ = child.kill();
    }
    let mut said = Vec::new();
    let _ = stdout.by_ref().take(REASON_BYTES_MAX).read_to_end(&mut said);
    let status = child.wait()?;
    Ok((status.success(), String::from_utf8_lossy(&said).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_have_restores_be_lazy_is_told_with_what_it_costs() {
        let explained = |setting: Option<&str>| Setting(setting.map(str::to_owned)).explain("no".to_owned());
        let told = explained(Some("0\n"));
        assert!(
            told.starts_with("no; `sysctl vm.unprivileged_userfaultfd=1`") && told.contains("every user"),
            "{told}"
        );
        // Where that would change nothing, it is not said.
        assert_eq!(explained(Some("1\n")), "no");
        assert_eq!(explained(None), "no");
    }
}
