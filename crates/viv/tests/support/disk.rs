//! Filesystems of other kinds than the machine's own.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};

use super::daemon::PATIENCE;
use super::eventually_within;

/// Who watches the disk has given back all that it will by then.
const STAYS_FULL: Duration = Duration::from_secs(1);

/// One that is mounted for as long as this lives.
pub struct Disk {
    folder: tempfile::TempDir,
}

impl Disk {
    /// Makes one, and mounts it with these options. What `mount` complains about is the caller's to judge.
    pub fn make(mkfs: &[&str], options: &str, mib: u64) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("viv-disk-").tempdir().unwrap();
        let (file, on) = (folder.path().join("disk.img"), folder.path().join("on"));
        File::create(&file).unwrap().set_len(mib << 20).unwrap();
        let made = Command::new(mkfs[0]).args(&mkfs[1..]).arg(&file).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        fs::create_dir(&on).unwrap();
        let mounted = Command::new("mount").args(["-o", options]).arg(&file).arg(&on).output().unwrap();
        if mounted.status.success() {
            Ok(Self { folder })
        } else {
            Err(String::from_utf8_lossy(&mounted.stderr).trim().to_owned())
        }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("on")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}

/// Somebody who takes all the room that a disk has, and goes on taking what is given back.
pub struct Flood {
    file: PathBuf,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// Comes back when nothing is left, and nothing more is given back.
    pub fn of(disk: &Disk) -> Self {
        let (file, is_over) = (disk.path().join("flood"), Arc::new(AtomicBool::new(false)));
        let mut filler = File::create(&file).unwrap();
        let over = is_over.clone();
        let thread = thread::spawn(move || {
            while !over.load(Ordering::SeqCst) {
                for piece_bytes in [1 << 20, 4096] {
                    while filler.write_all(&vec![7; piece_bytes]).is_ok() {}
                }
                thread::sleep(Duration::from_millis(2));
            }
        });
        let flood = Self { file, is_over, thread: Some(thread) };
        let mut full_since = None;
        eventually_within(PATIENCE, "nothing is left", || {
            full_since = if free_bytes(disk) < 4096 { full_since.or_else(|| Some(Instant::now())) } else { None };
            full_since.is_some_and(|since| since.elapsed() >= STAYS_FULL)
        });
        flood
    }

    /// The disk stays as full as it is, and takes no more.
    pub fn rest(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub fn make_room(mut self) {
        self.rest();
        fs::remove_file(&self.file).unwrap();
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.file);
    }
}

fn free_bytes(disk: &Disk) -> u64 {
    let found = rustix::fs::statvfs(disk.path()).unwrap();
    found.f_bavail * found.f_frsize
}
