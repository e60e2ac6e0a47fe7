//! Killing by what was opened, and not by name: the next generation of a sandbox has the same names (T5).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use super::{InstanceCgroups, gone, wait_for};

/// Longest `cgroup.events`: two short lines.
const EVENTS_BYTES_MAX: usize = 256;

/// The v2 cgroup of an instance, as it was when this was opened. When that is removed, nobody is in it, whoever has its name
/// by then.
#[derive(Debug)]
pub(crate) struct OpenedCgroup {
    kill: File,
    events: File,
    /// What somebody froze with v1 dies only when it is thawed.
    v1_freezer: Option<File>,
}

impl InstanceCgroups {
    /// Opens what it takes to end everything in it later. A kernel before 5.14 has no such thing.
    pub(crate) fn open_to_kill(&self) -> io::Result<OpenedCgroup> {
        let path = self.v2().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        let writable = |path: &Path| File::options().write(true).open(path);
        Ok(OpenedCgroup {
            kill: writable(&path.join("cgroup.kill"))?,
            events: File::open(path.join("cgroup.events"))?,
            v1_freezer: self.v1_freezer().and_then(|switch| writable(&switch).ok()),
        })
    }
}

impl OpenedCgroup {
    /// What is not to be closed.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        [Some(&self.kill), Some(&self.events), self.v1_freezer.as_ref()]
            .into_iter()
            .flatten()
            .map(File::as_fd)
            .collect()
    }

    /// Sends SIGKILL to everything, and answers when nothing is left in it.
    pub(crate) fn kill(&self, within: Duration) -> io::Result<()> {
        unless_gone(self.kill.write_at(b"1", 0))?;
        if let Some(switch) = &self.v1_freezer {
            unless_gone(switch.write_at(b"THAWED", 0))?;
        }
        wait_for(within, || {
            let mut events = [0; EVENTS_BYTES_MAX];
            let read = unless_gone(self.events.read_at(&mut events, 0))?;
            Ok(read
                .is_none_or(|length| events[..length].split(|&byte| byte == b'\n').any(|line| line == b"populated 0")))
        })
    }
}

/// Nothing, where the cgroup was removed.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::Layout;
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn t5_whoever_kills_late_spares_the_next_one_of_that_name() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout { v2: Some(folder.path().to_owned()), ..Layout::default() };
        let cgroups = InstanceCgroups::new(layout, "x".to_owned());
        assert!(cgroups.open_to_kill().is_err(), "there is nobody to kill");
        let path = cgroups.v2().unwrap();
        let make = |events: &str| {
            fs::create_dir(&path).unwrap();
            fs::write(path.join("cgroup.kill"), "").unwrap();
            fs::write(path.join("cgroup.events"), events).unwrap();
        };
        make("populated 0\nfrozen 0\n");
        let first = cgroups.open_to_kill().unwrap();
        assert_eq!(first.descriptors().len(), 2);
        first.kill(SOON).unwrap();
        assert_eq!(fs::read(path.join("cgroup.kill")).unwrap(), b"1");
        // Another one begins in its place.
        fs::remove_dir_all(&path).unwrap();
        make("populated 1\nfrozen 0\n");
        first.kill(SOON).unwrap();
        assert_eq!(fs::read(path.join("cgroup.kill")).unwrap(), b"", "nobody of it was killed, or waited for");
        // In which there is somebody, for whom is waited.
        let second = cgroups.open_to_kill().unwrap();
        assert_eq!(second.kill(Duration::ZERO).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    /// The same on a real one, where there is one to be had.
    #[test]
    fn t5_what_was_removed_holds_nobody() {
        let Ok(layout) = Layout::detect() else { return };
        let name = format!("viv-test-opened-{}", std::process::id());
        let cgroups = InstanceCgroups::new(Layout { v1: Vec::new(), ..layout }, name);
        let Some(path) = cgroups.v2().filter(|path| fs::create_dir(path).is_ok()) else { return };
        let opened = cgroups.open_to_kill();
        fs::remove_dir(&path).unwrap();
        opened.unwrap().kill(SOON).unwrap();
    }
}
