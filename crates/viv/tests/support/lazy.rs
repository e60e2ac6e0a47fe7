//! Memory that is brought while it is used already, and who stands in its way.
//!
//! The kernel is told for as long as a test takes that sandboxes may have a `userfaultfd`. What it was told before is put
//! back by a process of its own, however the test ends.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use viv_core::ExecutionId;

use super::eventually_within;

pub const SETTING: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// Enough to be brought while it runs, and so much that a server who stands still for most of the time takes seconds.
pub const SOME_MIB: u32 = 96;
pub const MUCH_MIB: u32 = 384;

/// How long it may take until all of it was looked at that is there.
const PATIENCE: Duration = Duration::from_secs(60);

/// Such a server works for one of these and then stands still for twenty.
const WORKS_FOR: Duration = Duration::from_millis(1);

/// Looks at all of its memory again and again, itself and by a fork.
const HOLD: &str = "
import hashlib, os, time
held = [os.urandom(1 << 20) for _ in range(MIB)]
known = [hashlib.sha256(part).digest() for part in held]
def whole():
    return all(hashlib.sha256(part).digest() == digest for part, digest in zip(held, known))
n = 0
while True:
    child = os.fork()
    if child == 0:
        os._exit(0 if whole() else 1)
    well = whole()
    status = os.waitpid(child, 0)[1]
    n += 1
    print(f'{n} whole' if well and status == 0 else f'{n} BROKEN {well} {status}')
    time.sleep(0.02)
";

/// The program that holds so much.
pub fn holder(mib: u32) -> String {
    HOLD.replace("MIB", &mib.to_string())
}

/// The setting is another one until this goes.
pub struct Told {
    setting: File,
    before: String,
    puts_back: Child,
}

impl Told {
    pub fn allowed() -> Self {
        let setting = File::options().read(true).write(true).open(SETTING).unwrap();
        // Whoever changes it takes turns.
        flock(&setting, FlockOperation::LockExclusive).unwrap();
        let before = fs::read_to_string(SETTING).unwrap().trim().to_owned();
        let script = format!("read -r end; echo {before} > {SETTING}");
        let mut puts_back = Command::new("/bin/sh");
        puts_back.args(["-c", &script]).stdin(Stdio::piped());
        let told = Self { setting, before, puts_back: puts_back.spawn().unwrap() };
        told.tell("1");
        told
    }

    pub fn tell(&self, value: &str) {
        self.setting.write_all_at(value.as_bytes(), 0).unwrap();
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        drop(self.puts_back.stdin.take());
        let _ = self.puts_back.wait();
        assert_eq!(fs::read_to_string(SETTING).unwrap().trim(), self.before);
    }
}

/// Who has descriptors of `userfaultfd` open for an instance: `(holder, server)`.
pub fn servers(folder: &Path) -> Option<(Pid, Pid)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?)) else { continue };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let is_shim = line.split(|&byte| byte == 0).any(|word| word == folder.as_os_str().as_encoded_bytes());
        if is_shim && held_by(pid) > 0 {
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
            found.push((pid, parent.and_then(Pid::from_raw)));
        }
    }
    let server = found.iter().find(|(_, parent)| found.iter().any(|(pid, _)| Some(*pid) == *parent))?;
    Some((server.1?, server.0))
}

/// Waits until those of an execution come no further, because what they want to read next is nowhere, and nobody is there
/// who could bring it: each waits for a page, or for another one who does. Whoever got anything else instead would go on,
/// to the end of what it looks at, and say so.
pub fn until_all_wait_for_pages(cgroups: &[PathBuf], instance: &Path, execution: &ExecutionId) {
    let sandbox = instance.file_name().unwrap();
    let of_execution = cgroups.iter().map(|cgroup| cgroup.join(sandbox).join(execution.as_str()).join("cgroup.procs"));
    let files: Vec<PathBuf> = of_execution.collect();
    eventually_within(PATIENCE, "all of them wait for pages", || {
        assert!(!wrote(&instance.join("run"), "BROKEN"), "somebody has read something else");
        let pids = files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect::<String>();
        let asleep = |pid: &str| fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        let asleep: Vec<String> = pids.lines().map(asleep).collect();
        let for_a_page = |function: &String| function.contains("userfault");
        asleep.iter().any(for_a_page) && asleep.iter().all(|function| for_a_page(function) || function == "do_wait")
    });
    assert!(!wrote(&instance.join("run"), "BROKEN"), "somebody has read something else");
}

/// Waits until somebody who was killed has closed all that was open, which whoever is to wait for him does not yet.
pub fn until_ended(pid: Pid) {
    eventually_within(PATIENCE, "it has ended", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
    });
}

/// How many descriptors of `userfaultfd` a process has.
fn held_by(pid: Pid) -> usize {
    let links = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).into_iter().flatten().flatten();
    let links = links.filter_map(|link| fs::read_link(link.path()).ok());
    links.filter(|link| link.to_string_lossy().contains("userfaultfd")).count()
}

/// Has the server of an instance stand still for most of the time, and in the end for good.
pub struct Slowed {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Slowed {
    pub fn of(folder: PathBuf) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                let Some((_, server)) = servers(&folder) else {
                    std::thread::sleep(WORKS_FOR);
                    continue;
                };
                while kill_process(server, Signal::STOP).is_ok() && !until.load(Ordering::Relaxed) {
                    std::thread::sleep(20 * WORKS_FOR);
                    let _ = kill_process(server, Signal::CONT);
                    std::thread::sleep(WORKS_FOR);
                }
            }
        });
        Self { ends, thread: Some(thread) }
    }

    /// It stands still from here on, if it is there.
    pub fn stop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What was written, on the machine's own side: whoever has ended is not asked.
pub fn wrote(folder: &Path, what: &str) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    entries.flatten().any(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => wrote(&entry.path(), what),
        Ok(kind) if kind.is_file() => {
            fs::read(entry.path()).is_ok_and(|bytes| bytes.windows(what.len()).any(|part| part == what.as_bytes()))
        }
        Ok(_) | Err(_) => false,
    })
}
