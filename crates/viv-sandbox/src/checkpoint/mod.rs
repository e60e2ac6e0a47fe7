//! Memory of sandboxes on disk, by CRIU (L13, X5).
//!
//! ```text
//!   save      agent: quiesce ─► criu dump, all stopped ─► who is in which cgroup ─► end ─► filesystem sealed
//!   restore   root and mounts ─► criu restore ─► placed into cgroups ─► control connection ─► become the new instance
//! ```
//!
//! What is kept of a snapshot's memory lies in a folder of its own:
//!
//! ```text
//!   <data>/memory/<snapshot>/
//!     manifest.json      what it is, of which machine, and a digest of the rest
//!     not-restored       why it was not, if that was tried; CRIU's restore.log beside it
//!     damaged            what a close look found wrong with what is kept
//!     kept/images/       what CRIU wrote, packed: see [`pack`], and [`share`] for what others have too
//!     kept/run/          what the agent shares with the host: output of executions among it
//!     kept/dump.json     what the shim knows about the processes: see [`Dump`]
//!
//!   <data>/memory/<snapshot>.not-saved/
//!     dump.log           what CRIU said of a dump that failed
//!     not-saved          why it did
//!     instance.json      of which instance
//! ```
//!
//! Memory and filesystem are of one instant: nothing runs between the dump and
//! the end. Whatever goes wrong, the filesystem of that instant is there
//! without the memory, and what was dumped stays for a look.

pub(crate) mod criu;
pub(crate) mod files;
mod frames;
pub(crate) mod lazy;
pub(crate) mod mounts;
pub(crate) mod obstacles;
pub(crate) mod pack;
pub(crate) mod pagemap;
pub mod probe;
pub(crate) mod renumber;
pub(crate) mod share;
mod sockets;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use viv_layer::Digest;
use viv_provider::InstanceRef;

use crate::durable;
use crate::rootfs::IdRange;
pub(crate) use mounts::External;

/// The form of what is kept: packed whole, or sharing pages with another one, which who knows only the first would take for
/// the whole. Images of another form are not looked at.
const VERSION: u32 = 2;
const VERSION_SHARING: u32 = 3;

/// What the name of a snapshot is followed by where CRIU's word is kept of a dump that failed.
pub(crate) const NOT_SAVED: &str = ".not-saved";

/// What damage is, in words.
const DAMAGED: &str = "what is on disk is not what was dumped";

/// Longest list of who is in which cgroup, and of what is open: some tens of bytes for each process, a name for each file.
const DUMP_BYTES_MAX: u64 = 16 << 20;

/// The parts of a memory's folder.
#[derive(Debug, Clone)]
pub(crate) struct MemoryDir(PathBuf);

impl MemoryDir {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn kept(&self) -> PathBuf {
        self.0.join("kept")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.kept().join("images")
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.kept().join("run")
    }

    /// What removing it would free of what it holds: others may have some of it too.
    pub(crate) fn own_bytes(&self) -> io::Result<u64> {
        Ok(self.read_manifest()?.bytes.saturating_sub(share::shared_bytes(&self.images())))
    }

    fn dump(&self) -> PathBuf {
        self.kept().join("dump.json")
    }

    fn manifest(&self) -> PathBuf {
        self.0.join("manifest.json")
    }

    /// Why it was not restored, once that was tried.
    pub(crate) fn not_restored(&self) -> PathBuf {
        self.0.join("not-restored")
    }

    /// Why there is none.
    pub(crate) fn not_saved(&self) -> PathBuf {
        self.0.join("not-saved")
    }

    /// Of which instance there is none.
    pub(crate) fn instance(&self) -> PathBuf {
        self.0.join("instance.json")
    }

    /// Of which instance it is, or would have been.
    pub(crate) fn of(&self) -> io::Result<InstanceRef> {
        match durable::read_json(&self.instance())? {
            Some(instance) => Ok(instance),
            None => Ok(self.read_manifest()?.instance),
        }
    }

    /// Since when it is known that it was not saved, or not restored.
    pub(crate) fn failed_at(&self) -> io::Result<SystemTime> {
        let marked = fs::metadata(self.not_restored()).or_else(|_| fs::metadata(self.not_saved()))?;
        marked.modified()
    }

    /// What a close look found wrong with it.
    fn damaged(&self) -> PathBuf {
        self.0.join("damaged")
    }

    /// What is wrong with what is kept, if anything is; with `deep`, all of it is read. Not being able to look is not
    /// damage.
    pub(crate) fn check(&self, deep: bool) -> io::Result<Option<String>> {
        let manifest = match self.read_manifest() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Some("what was dumped is missing".to_owned()));
            }
            read => read?,
        };
        if !self.images().is_dir() || !self.dump().exists() {
            return Ok(Some("a part of what was dumped is missing".to_owned()));
        }
        let noted = match fs::read_to_string(self.damaged()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            noted => Some(noted?),
        };
        // What only a close look has found is not put right by a quick one.
        if !deep {
            return Ok(noted);
        }
        let wrong = (!manifest.is_whole(self)?).then(|| DAMAGED.to_owned());
        match (&noted, &wrong) {
            (_, Some(wrong)) => fs::write(self.damaged(), wrong)?,
            // Somebody put right what was wrong.
            (Some(_), None) => fs::remove_file(self.damaged())?,
            (None, None) => {}
        }
        Ok(wrong)
    }

    /// Which operation has it made.
    pub(crate) fn operation(&self) -> PathBuf {
        self.0.join("operation")
    }

    pub(crate) fn write_dump(&self, dump: &Dump) -> io::Result<()> {
        durable::replace_json_within(&self.dump(), dump, DUMP_BYTES_MAX)
    }

    pub(crate) fn read_dump(&self) -> io::Result<Dump> {
        durable::read_json_within(&self.dump(), DUMP_BYTES_MAX)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(crate) fn read_manifest(&self) -> io::Result<Manifest> {
        durable::read_json(&self.manifest())?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(crate) fn write_manifest(&self, manifest: &Manifest) -> io::Result<()> {
        durable::replace_json(&self.manifest(), manifest)
    }
}

/// What the shim knows about what was dumped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dump {
    /// Mounts that CRIU finds made.
    pub(crate) mounts: Vec<External>,
    /// How CRIU calls the open files that were the shim's log.
    pub(crate) logs: Vec<String>,
    /// Who is in the cgroup of which execution, by pids inside.
    pub(crate) placed: BTreeMap<String, Vec<i32>>,
    /// What they had open or mapped, by name.
    pub(crate) files: BTreeMap<String, files::Used>,
}

/// What a memory is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    version: u32,
    /// Of which instance.
    pub(crate) instance: InstanceRef,
    /// What its ids were mapped to.
    pub(crate) ids: IdRange,
    /// The agent's file, by name: its code is mapped from there.
    pub(crate) agent: String,
    /// Who wrote the images.
    criu: String,
    machine: Machine,
    /// Of everything that is kept, what others have too among it.
    digest: Digest,
    /// What all of that takes on disk.
    pub(crate) bytes: u64,
}

/// What processes may have found out about the machine that they ran on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Machine {
    kernel: String,
    architecture: String,
    /// What the processors can do: programs choose their code by that once.
    cpu_flags: BTreeSet<String>,
}

impl Machine {
    fn this() -> io::Result<Self> {
        let uname = rustix::system::uname();
        let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
        let flags = cpuinfo.lines().find_map(|line| {
            let (name, flags) = line.split_once(':')?;
            matches!(name.trim(), "flags" | "Features").then_some(flags)
        });
        let cpu_flags = flags.unwrap_or_default().split_ascii_whitespace().map(str::to_owned).collect();
        Ok(Self { kernel: text(uname.release()), architecture: text(uname.machine()), cpu_flags })
    }

    /// Why what ran here cannot go on there.
    fn why_not_on(&self, other: &Self) -> Option<String> {
        if self.architecture != other.architecture {
            return Some(format!(
                "it is of a machine with {}, and this one has {}",
                self.architecture, other.architecture
            ));
        }
        let missing: Vec<_> = self.cpu_flags.difference(&other.cpu_flags).take(5).map(String::as_str).collect();
        if !missing.is_empty() {
            return Some(format!("it is of a machine whose processors can do more ({} …)", missing.join(", ")));
        }
        let release = |kernel: &str| -> Vec<u32> {
            kernel.split(['.', '-', '+']).map_while(|part| part.parse().ok()).take(2).collect()
        };
        (release(&other.kernel) < release(&self.kernel))
            .then(|| format!("it is of a machine with Linux {}, and this one has {}", self.kernel, other.kernel))
    }
}

impl Manifest {
    /// Describes what was dumped, once everything is in its folder. Reads all of it.
    pub(crate) fn of(
        dir: &MemoryDir,
        instance: &InstanceRef,
        ids: IdRange,
        agent: &Path,
        criu: &str,
    ) -> io::Result<Self> {
        let agent = agent.file_name().and_then(|name| name.to_str()).ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        Ok(Self {
            version: if dir.images().join(share::BASE).exists() { VERSION_SHARING } else { VERSION },
            instance: instance.clone(),
            ids,
            agent,
            criu: criu.to_owned(),
            machine: Machine::this()?,
            digest: viv_layer::content(&dir.kept())?,
            bytes: viv_layer::survey(&dir.kept())?.disk_bytes,
        })
    }

    /// Why it is not to be restored here. Reads all of it.
    pub(crate) fn why_not(&self, dir: &MemoryDir) -> io::Result<Option<String>> {
        if ![VERSION, VERSION_SHARING].contains(&self.version) {
            let knows = format!("this program knows {VERSION} and {VERSION_SHARING}");
            return Ok(Some(format!("it was kept in form {}, and {knows}", self.version)));
        }
        if let Some(why) = self.machine.why_not_on(&Machine::this()?) {
            return Ok(Some(why));
        }
        if self.is_whole(dir).is_ok_and(|whole| whole) {
            return Ok(None);
        }
        // Whoever cannot note it finds it again.
        let _ = fs::write(dir.damaged(), DAMAGED);
        Ok(Some(format!("it is damaged: {DAMAGED}")))
    }

    fn is_whole(&self, dir: &MemoryDir) -> io::Result<bool> {
        Ok(viv_layer::content(&dir.kept())? == self.digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(kernel: &str, flags: &str) -> Machine {
        let cpu_flags = flags.split(' ').map(str::to_owned).collect();
        Machine { kernel: kernel.to_owned(), architecture: "x86_64".to_owned(), cpu_flags }
    }

    #[test]
    fn l13_memory_goes_to_machines_that_can_do_as_much() {
        let here = machine("6.18.44-fc", "sse avx");
        assert_eq!(here.why_not_on(&here), None);
        assert_eq!(here.why_not_on(&machine("6.18.2", "sse avx avx512f")), None);
        assert_eq!(here.why_not_on(&machine("7.0-rc1", "sse avx")), None);
        assert!(here.why_not_on(&machine("6.18.44-fc", "sse")).unwrap().contains("avx"));
        assert!(here.why_not_on(&machine("6.12.9", "sse avx")).unwrap().contains("6.12.9"));
        assert!(Machine::this().is_ok_and(|this| !this.cpu_flags.is_empty()));
    }

    fn dump() -> Dump {
        Dump { mounts: Vec::new(), logs: Vec::new(), placed: BTreeMap::new(), files: BTreeMap::new() }
    }

    #[test]
    fn what_was_changed_on_disk_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let dir = MemoryDir::new(folder.path().to_owned());
        fs::create_dir_all(dir.images()).unwrap();
        fs::write(dir.images().join("pages-1.img"), "pages").unwrap();
        let instance =
            InstanceRef { sandbox: viv_core::SandboxId::from_bytes([1; 16]), generation: viv_core::Generation(1) };
        let ids = IdRange { base: 1 << 20, count: IdRange::COUNT };
        let manifest = Manifest::of(&dir, &instance, ids, Path::new("/a/viv-agent-1"), "4.2").unwrap();
        dir.write_manifest(&manifest).unwrap();
        assert_eq!(dir.read_manifest().unwrap(), manifest);
        assert_eq!(manifest.why_not(&dir).unwrap(), None);
        fs::write(dir.images().join("pages-1.img"), "Pages").unwrap();
        assert!(manifest.why_not(&dir).unwrap().unwrap().contains("damaged"));
        // Whoever looks afterwards is told so without reading all of it, until somebody puts it right and looks closely.
        dir.write_dump(&dump()).unwrap();
        let manifest = Manifest::of(&dir, &instance, ids, Path::new("/a/viv-agent-1"), "4.2").unwrap();
        dir.write_manifest(&manifest).unwrap();
        assert_eq!(dir.check(false).unwrap().as_deref(), Some(DAMAGED));
        assert_eq!((dir.check(true).unwrap(), dir.check(false).unwrap()), (None, None));
        fs::write(dir.images().join("pages-1.img"), "pageS").unwrap();
        assert_eq!(dir.check(false).unwrap(), None, "a quick look does not read it");
        assert_eq!(dir.check(true).unwrap().as_deref(), Some(DAMAGED));
        assert_eq!(dir.check(false).unwrap().as_deref(), Some(DAMAGED));
        fs::remove_file(dir.images().join("pages-1.img")).unwrap();
        assert!(manifest.why_not(&dir).unwrap().unwrap().contains("damaged"));
        // One that shares is of another form, which earlier programs refuse; both are known here.
        assert_eq!(manifest.version, VERSION);
        fs::create_dir(dir.images().join(share::BASE)).unwrap();
        let sharing = Manifest::of(&dir, &instance, ids, Path::new("/a/viv-agent-1"), "4.2").unwrap();
        assert_eq!((sharing.version, sharing.why_not(&dir).unwrap()), (VERSION_SHARING, None));
        let other = Manifest { version: VERSION_SHARING + 1, ..sharing };
        assert!(other.why_not(&dir).unwrap().unwrap().contains("form"));
    }
}
