//! What was left on this machine and belongs to nobody, found and cleared away (J1).
//!
//! What is ours is told by where it is and by the sandbox that it names: folders, layers, sockets and leases lie in the
//! data folder; a cgroup or a process is ours when it names a sandbox that has a fence here, since ids are never used
//! twice. Everything else is not looked at, let alone touched: cgroups of other data folders, mounts elsewhere,
//! processes that happen to be called like ours.
//!
//! Nothing in flight is taken for left: whoever makes or removes an instance holds its fence while its folder and what
//! belongs to it do not go together, and each finding is looked at once more, under that fence, before it is cleared.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Signal, pidfd_send_signal};
use viv_core::SandboxId;
use viv_provider::{Finding, FindingKind, Swept, SweptAs};

use super::create::NEW;
use super::destroy::{discard, is_torn};
use super::{LocalProvider, Result, unavailable};
use crate::durable;
use crate::process::ProcessIdentity;
use crate::shim::{self, ShimIdentity, first};
use crate::trash::take_apart;

/// How long a shim whose agent is gone may take to say so before it is called stuck. It takes milliseconds.
const NOTICE_WITHIN: Duration = Duration::from_secs(2);

/// How long killed processes may take to be gone.
const KILL_WITHIN: Duration = Duration::from_secs(3);

/// A shim of ours, by its command line.
struct ShimProcess {
    identity: ProcessIdentity,
    sandbox: SandboxId,
}

impl LocalProvider {
    pub(super) async fn find_left(&self) -> Result<Vec<Finding>> {
        self.blocking(|this| this.look_for_left().map_err(unavailable(Path::new("the data folder")))).await
    }

    pub(super) async fn sweep_left(&self, findings: &[Finding]) -> Result<Vec<Swept>> {
        let findings = findings.to_vec();
        self.blocking(move |this| {
            // What was told a while ago may be somebody's by now.
            let now = this.look_for_left().map_err(unavailable(Path::new("the data folder")))?;
            let mut swept = Vec::new();
            for finding in findings {
                let is_there = now.iter().any(|one| one.kind == finding.kind && one.what == finding.what);
                let outcome = if is_there { this.clear(&finding) } else { Ok(SweptAs::NotLeftOver) };
                let outcome = outcome.unwrap_or_else(|error| SweptAs::Failed(shim::chain(&error)));
                swept.push(Swept { finding, outcome });
            }
            Ok(swept)
        })
        .await
    }

    fn look_for_left(&self) -> io::Result<Vec<Finding>> {
        let mut found = Vec::new();
        self.find_folders(&mut found)?;
        self.find_shims(&mut found)?;
        self.find_mounts(&mut found)?;
        self.find_cgroups(&mut found)?;
        self.find_layers(&mut found)?;
        self.find_sockets(&mut found)?;
        self.find_leases(&mut found)?;
        self.find_fences(&mut found)?;
        found.sort();
        Ok(found)
    }

    fn has_fence(&self, sandbox: &SandboxId) -> bool {
        self.fence_file(sandbox).exists()
    }

    fn fence_file(&self, sandbox: &SandboxId) -> PathBuf {
        self.shared.data.fences().join(format!("{sandbox}.json"))
    }

    /// Folders that were never finished, and instances that nobody supervises although something of them runs.
    fn find_folders(&self, found: &mut Vec<Finding>) -> io::Result<()> {
        for entry in fs::read_dir(self.shared.data.instances())? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if let Some(sandbox) = name.strip_prefix(NEW).and_then(|name| name.parse::<SandboxId>().ok()) {
                let _fence = self.shared.fences.lock(&sandbox)?;
                if entry.path().exists() {
                    found.push(left(FindingKind::HalfMade, &entry.path(), sandbox, "whoever began it is gone"));
                }
            } else if let Ok(sandbox) = name.parse::<SandboxId>() {
                self.find_folder(&sandbox, found)?;
            }
        }
        Ok(())
    }

    fn find_folder(&self, sandbox: &SandboxId, found: &mut Vec<Finding>) -> io::Result<()> {
        let dir = self.dir(sandbox);
        if is_held(&dir.lock()) {
            return Ok(());
        }
        let _fence = self.shared.fences.lock(sandbox)?;
        // Whoever was about to leave has left by now, or holds it still.
        if !dir.path().is_dir() || is_held(&dir.lock()) {
            return Ok(());
        }
        let cgroups = self.cgroups_of(sandbox);
        let runs = cgroups.exist() && !cgroups.is_empty()? || first::lives(&dir)?;
        if runs {
            let why = "something of it runs, and no shim holds it";
            found.push(left(FindingKind::Unsupervised, dir.path(), sandbox.clone(), why));
        } else if is_torn(&dir) {
            found.push(left(FindingKind::HalfMade, dir.path(), sandbox.clone(), "it has no record, and nothing runs"));
        }
        Ok(())
    }

    /// Shims whose folder is not there, and those that did not notice that their agent is gone.
    fn find_shims(&self, found: &mut Vec<Finding>) -> io::Result<()> {
        for shim in self.shims()? {
            let dir = self.dir(&shim.sandbox);
            let what = format!("process {} (shim of {})", shim.identity.pid, shim.sandbox);
            let finding = |why: &str| Finding {
                kind: FindingKind::Supervisor,
                what: what.clone(),
                sandbox: Some(shim.sandbox.clone()),
                why: why.to_owned(),
                changed_at_ms: None,
            };
            if !dir.path().exists() {
                if shim.identity.open()?.is_some() {
                    found.push(finding("the folder of its instance is not there"));
                }
                continue;
            }
            // The guard of each looks like it; the one that is recorded as the shim is meant.
            let recorded = durable::read_json::<ShimIdentity>(&dir.identity())?;
            let is_it = recorded.is_some_and(|recorded| recorded.shim == shim.identity);
            let lost_agent = || -> io::Result<bool> {
                Ok(dir.first().exists() && !dir.exit().exists() && dir.path().exists() && !first::lives(&dir)?)
            };
            if is_it && lost_agent()? {
                std::thread::sleep(NOTICE_WITHIN);
                if lost_agent()? && shim.identity.open()?.is_some() {
                    found.push(finding("its agent is gone, and it did not notice"));
                }
            }
        }
        Ok(())
    }

    fn shims(&self) -> io::Result<Vec<ShimProcess>> {
        let (instances, own) = (self.shared.data.instances(), rustix::process::geteuid().as_raw());
        let mut shims = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let Ok(entry) = entry else { continue };
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            // Who ends meanwhile is none.
            let Ok(line) = fs::read(entry.path().join("cmdline")) else { continue };
            let mut words = line.split(|&byte| byte == 0).skip(1);
            let (Some(verb), Some(folder)) = (words.next(), words.next()) else { continue };
            if verb != shim::VERB.as_bytes() || entry.metadata().is_ok_and(|found| found.uid() != own) {
                continue;
            }
            let folder = Path::new(OsStr::from_bytes(folder));
            if folder.parent() != Some(&*instances) {
                continue;
            }
            let sandbox = folder.file_name().and_then(|name| name.to_str()?.parse::<SandboxId>().ok());
            if let (Some(sandbox), Ok(identity)) = (sandbox, ProcessIdentity::of(pid))
                && self.has_fence(&sandbox)
            {
                shims.push(ShimProcess { identity, sandbox });
            }
        }
        Ok(shims)
    }

    /// Mounts on what only we make. All of ours are in mount namespaces of shims.
    fn find_mounts(&self, found: &mut Vec<Finding>) -> io::Result<()> {
        let data = &self.shared.data;
        let layers = data.layers();
        let below = ["active", "sealed", "tmp", "trash"].map(|name| layers.join(name));
        let ours = [data.instances(), data.trash()].into_iter().chain(below).collect::<Vec<_>>();
        for at in mount_points(&fs::read_to_string("/proc/self/mountinfo")?) {
            if ours.iter().any(|folder| at.starts_with(folder) && at != *folder) {
                let why = "nothing is mounted there for all to see".to_owned();
                let what = at.display().to_string();
                found.push(Finding { kind: FindingKind::Mount, what, sandbox: None, why, changed_at_ms: None });
            }
        }
        Ok(())
    }

    /// Cgroups of sandboxes of ours that have no instance.
    fn find_cgroups(&self, found: &mut Vec<Finding>) -> io::Result<()> {
        for mount in self.shared.layout.mounts() {
            let prefix = mount.join(&self.shared.config.cgroup_prefix);
            let entries = match fs::read_dir(&prefix) {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            for entry in entries {
                let entry = entry?;
                let Some(sandbox) = entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok()) else {
                    continue;
                };
                // Another data folder's, if there is no fence here.
                if !entry.file_type()?.is_dir() || !self.has_fence(&sandbox) || self.dir(&sandbox).path().exists() {
                    continue;
                }
                let _fence = self.shared.fences.lock(&sandbox)?;
                if !self.dir(&sandbox).path().exists() && entry.path().exists() {
                    found.push(left(FindingKind::Cgroup, &entry.path(), sandbox, "its sandbox has no instance"));
                }
            }
        }
        Ok(())
    }

    fn find_layers(&self, found: &mut Vec<Finding>) -> io::Result<()> {
        // While somebody builds, nobody can tell what is left over.
        for what in self.shared.store.leftovers()?.unwrap_or_default() {
            let why = "nothing refers to it".to_owned();
            found.push(Finding { kind: FindingKind::Layer, what, sandbox: None, why, changed_at_ms: None });
        }
        Ok(())
    }

    /// Sockets beside the folders of instances. Those in them go with them.
    fn find_sockets(&self, found: &mut Vec<Finding>) -> io::Result<()> {
        let data = &self.shared.data;
        for folder in [data.instances(), data.trash()] {
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                if entry.file_type()?.is_socket() && is_deaf(&entry.path()) {
                    let (what, why) = (entry.path().display().to_string(), "nobody listens on it".to_owned());
                    found.push(Finding { kind: FindingKind::Socket, what, sandbox: None, why, changed_at_ms: None });
                }
            }
        }
        Ok(())
    }

    fn find_leases(&self, found: &mut Vec<Finding>) -> io::Result<()> {
        for (link, sandbox) in self.shared.ids.lent()? {
            if self.dir(&sandbox).path().exists() {
                continue;
            }
            let _fence = self.shared.fences.lock(&sandbox)?;
            if !self.dir(&sandbox).path().exists() && fs::symlink_metadata(&link).is_ok() {
                found.push(left(FindingKind::Lease, &link, sandbox, "its sandbox has no instance"));
            }
        }
        Ok(())
    }

    /// Fences of sandboxes without an instance: most are what they are for. Whoever has the records can tell.
    fn find_fences(&self, found: &mut Vec<Finding>) -> io::Result<()> {
        for entry in fs::read_dir(self.shared.data.fences())? {
            let name = entry?.file_name();
            let sandbox = name.to_str().and_then(|name| name.strip_suffix(".json")?.parse::<SandboxId>().ok());
            let Some(sandbox) = sandbox.filter(|sandbox| !self.dir(sandbox).path().exists()) else { continue };
            let path = self.fence_file(&sandbox);
            found.push(left(FindingKind::Fence, &path, sandbox, "its sandbox has no instance"));
        }
        Ok(())
    }

    /// Clears one away, as it was just found.
    fn clear(&self, finding: &Finding) -> Result<SweptAs> {
        let path = Path::new(&finding.what);
        let failed = unavailable(path);
        match (finding.kind, &finding.sandbox) {
            (FindingKind::HalfMade, Some(sandbox)) => self.clear_half_made(sandbox, path),
            (FindingKind::Unsupervised, Some(sandbox)) => self.clear_unsupervised(sandbox),
            (FindingKind::Supervisor, Some(sandbox)) => self.clear_supervisor(sandbox),
            (FindingKind::Cgroup, Some(sandbox)) => self.clear_cgroups(sandbox),
            (FindingKind::Fence, Some(sandbox)) => self.clear_fence(sandbox),
            (FindingKind::Lease, _) => {
                self.shared.ids.sweep(&self.shared.data, &self.shared.fences).map_err(failed)?;
                Ok(gone_or_not(path))
            }
            (FindingKind::Layer, _) => {
                self.shared.store.collect().map_err(failed)?;
                let left = self.shared.store.leftovers().map_err(unavailable(path))?;
                match left {
                    Some(left) if !left.contains(&finding.what) => Ok(SweptAs::Gone),
                    Some(_) => Ok(SweptAs::Failed("it is still there".to_owned())),
                    None => Ok(SweptAs::Failed("somebody builds a layer: try again".to_owned())),
                }
            }
            (FindingKind::Mount, _) => {
                unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
                    .map_err(io::Error::from)
                    .map_err(failed)?;
                Ok(SweptAs::Gone)
            }
            (FindingKind::Socket, _) => fs::remove_file(path).map_err(failed).map(|()| SweptAs::Gone),
            (
                FindingKind::HalfMade
                | FindingKind::Unsupervised
                | FindingKind::Supervisor
                | FindingKind::Cgroup
                | FindingKind::Fence,
                None,
            ) => Ok(SweptAs::NotLeftOver),
        }
    }

    fn clear_half_made(&self, sandbox: &SandboxId, path: &Path) -> Result<SweptAs> {
        let fence = self.fence(sandbox)?;
        let dir = self.dir(sandbox);
        if path != dir.path() {
            // Nobody has the fence, so nobody is about to give it its name.
            fs::remove_dir_all(path).map_err(unavailable(path))?;
            return Ok(SweptAs::Gone);
        }
        if is_held(&dir.lock()) || !is_torn(&dir) {
            return Ok(SweptAs::NotLeftOver);
        }
        let trash = discard(&self.shared.data, &dir)?;
        drop(fence);
        if let Some(trash) = trash {
            take_apart(&trash, viv_layer::remove).map_err(unavailable(&trash))?;
        }
        Ok(SweptAs::Gone)
    }

    /// Ends what runs; the instance is then one that has ended, and whoever has its record goes on from there.
    fn clear_unsupervised(&self, sandbox: &SandboxId) -> Result<SweptAs> {
        if let Some(record) = self.read_record(sandbox).ok().flatten() {
            return self.prove_ended(&record.instance).map(|_| SweptAs::Gone);
        }
        let _fence = self.fence(sandbox)?;
        if is_held(&self.dir(sandbox).lock()) {
            return Ok(SweptAs::NotLeftOver);
        }
        self.end_cgroups(sandbox)?;
        first::end(&self.dir(sandbox), KILL_WITHIN).map_err(unavailable(self.dir(sandbox).path()))?;
        Ok(SweptAs::Gone)
    }

    fn clear_supervisor(&self, sandbox: &SandboxId) -> Result<SweptAs> {
        if let Some(record) = self.read_record(sandbox).ok().flatten() {
            return self.prove_ended(&record.instance).map(|_| SweptAs::Gone);
        }
        let _fence = self.fence(sandbox)?;
        if self.dir(sandbox).path().exists() {
            return Ok(SweptAs::NotLeftOver);
        }
        for shim in self.shims().map_err(unavailable(Path::new("/proc")))? {
            if shim.sandbox == *sandbox
                && let Some(pidfd) = shim.identity.open().map_err(unavailable(Path::new("/proc")))?
            {
                match pidfd_send_signal(&pidfd, Signal::KILL) {
                    Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                    Err(error) => return Err(unavailable(Path::new("its shim"))(error.into())),
                }
                // With it the kernel ends its agent.
                crate::wait::readable_within(&pidfd, KILL_WITHIN).map_err(unavailable(Path::new("its shim")))?;
            }
        }
        self.end_cgroups(sandbox)?;
        Ok(SweptAs::Gone)
    }

    fn clear_cgroups(&self, sandbox: &SandboxId) -> Result<SweptAs> {
        let _fence = self.fence(sandbox)?;
        if self.dir(sandbox).path().exists() {
            return Ok(SweptAs::NotLeftOver);
        }
        self.end_cgroups(sandbox)?;
        Ok(SweptAs::Gone)
    }

    fn end_cgroups(&self, sandbox: &SandboxId) -> Result<()> {
        let cgroups = self.cgroups_of(sandbox);
        if !cgroups.exist() {
            return Ok(());
        }
        let failed = || unavailable(Path::new("its cgroup"));
        cgroups.kill(KILL_WITHIN).map_err(failed())?;
        cgroups.remove().map_err(failed())
    }

    fn clear_fence(&self, sandbox: &SandboxId) -> Result<SweptAs> {
        let _fence = self.fence(sandbox)?;
        // With snapshots of it there is still something to be fenced.
        let snapshots = self.shared.store.all_snapshots().map_err(unavailable(Path::new("the snapshots")))?;
        let snapshots: Vec<_> = snapshots.collect();
        let is_of_it = |file: &io::Result<crate::store::snapshot::SnapshotFile>| match file {
            Ok(crate::store::snapshot::SnapshotFile::Kept(record)) => record.snapshot.source.sandbox == *sandbox,
            Ok(crate::store::snapshot::SnapshotFile::Removed { .. }) => false,
            Err(_) => true,
        };
        if self.dir(sandbox).path().exists()
            || self.cgroups_of(sandbox).exist()
            || snapshots.iter().any(|(_, file)| is_of_it(file))
        {
            return Ok(SweptAs::NotLeftOver);
        }
        let path = self.fence_file(sandbox);
        fs::remove_file(&path).map_err(unavailable(&path))?;
        Ok(SweptAs::Gone)
    }
}

fn left(kind: FindingKind, path: &Path, sandbox: SandboxId, why: &str) -> Finding {
    let changed = fs::symlink_metadata(path).and_then(|found| found.modified()).ok();
    let since = changed.and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
    Finding {
        kind,
        what: path.display().to_string(),
        sandbox: Some(sandbox),
        why: why.to_owned(),
        changed_at_ms: since.map(|since| since.as_millis() as u64),
    }
}

fn gone_or_not(path: &Path) -> SweptAs {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => SweptAs::Gone,
        Ok(_) | Err(_) => SweptAs::Failed("it is still there".to_owned()),
    }
}

/// Whether a shim, or whoever makes or removes an instance, holds its lock.
fn is_held(lock: &Path) -> bool {
    match File::open(lock) {
        Ok(lock) => flock(lock, FlockOperation::NonBlockingLockShared).is_err(),
        // What is not there is held by nobody; what cannot be looked at may be.
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Whether nobody listens on a socket.
fn is_deaf(path: &Path) -> bool {
    UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Where something is mounted; the kernel writes spaces and their like as `\040`.
fn mount_points(mountinfo: &str) -> Vec<PathBuf> {
    let decode = |text: &str| {
        let mut pieces = text.split('\\');
        let mut plain = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            match piece.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
                Some(byte) => {
                    plain.push(char::from(byte));
                    plain.push_str(&piece[3..]);
                }
                None => plain.push_str(piece),
            }
        }
        PathBuf::from(plain)
    };
    mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(decode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_with_spaces_are_found() {
        let info = "22 1 254:0 / / rw - ext4 /dev/vda rw\n30 22 0:5 / /a\\040b/c rw - tmpfs tmpfs rw\n";
        assert_eq!(mount_points(info), [PathBuf::from("/"), PathBuf::from("/a b/c")]);
    }
}
