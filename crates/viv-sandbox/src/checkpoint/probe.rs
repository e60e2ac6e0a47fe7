//! `viv criu-probe`: whether a CRIU works here, shown by saving a small process and bringing it back.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, set_parent_process_death_signal, waitpid,
};
use rustix::thread::UnshareFlags;

use super::criu::{self, Call, DUMP_LOG, RESTORE_LOG};
use super::lazy;
use crate::sys::clone::{Forked, close_all_but, exit_now, fork, fork_as_init, try_userfaultfd};
use crate::sys::namespace::leave_for_new;
use crate::wait::readable_within;

/// The verb of the binary that runs [`main`].
pub const VERB: &str = "criu-probe";

/// How long the process may take to say something, on a crowded machine.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// How long it may take to bring it back page by page: its answer, and a little. Where CRIU, or the kernel, does not come to
/// an end with that, it works otherwise all the same.
pub(crate) const LAZY_WITHIN: Duration = Duration::from_secs(15);

/// The process ends by itself after this, whoever has forgotten it.
const HELD_FOR: Duration = Duration::from_secs(60);

/// Longest reason that is passed on.
const WHY_BYTES_MAX: usize = 1024;

/// How often either of them looks for the other's file.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// What it says when it starts, and what when it is asked again: the same, from its memory.
const FIRST: &str = "first";
const AGAIN: &str = "again";
const ASK: &str = "ask";

/// What tells it that it has mounts and processes of its own.
pub const ENTERED: &str = "--entered";

/// Tries a CRIU in an empty folder. Must be called from a process with one thread; what fails is said on standard
/// output, and when nothing does, why restores cannot be lazy, if so.
pub fn main(criu: &Path, folder: &Path, entered: bool) -> ExitCode {
    let outcome = if entered {
        probe(criu, folder)
    } else {
        match enter(criu, folder) {
            // The other one has said it.
            Ok(code) => return ExitCode::from(code),
            Err(error) => Err(format!("no namespace of its own: {error}")),
        }
    };
    match outcome {
        Ok(process) => {
            // The one that was brought back has said everything. It is ours, and its pid is to be free.
            let _ = waitpid(Some(process), WaitOptions::empty());
            if let Err(why) = within(LAZY_WITHIN, || lazy_turn(criu, folder)) {
                println!("{why}");
            }
            // What is left of that ends with this process, the first one of its namespace.
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Has it done by another process, with mounts of its own (what was mapped before is of others, and cannot be saved) and
/// as the first of its own processes: elsewhere the pid that is brought back may be taken by somebody else meanwhile, and
/// whoever is ended by his pid may be somebody else. What is left ends with it. Answers how it ended.
fn enter(criu: &Path, folder: &Path) -> io::Result<u8> {
    criu::leave_for_own_run(UnshareFlags::empty())?;
    let mut again = Command::new(std::env::current_exe()?);
    again.arg(VERB).arg(ENTERED).args([criu, folder]);
    match fork_as_init()? {
        Forked::Child => {
            let begin = || -> io::Result<()> {
                // Whoever gives up waiting ends this one; its parent is not to be seen from here.
                set_parent_process_death_signal(Some(Signal::KILL))?;
                let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
                Ok(mount("proc", "/proc", "proc", flags, None)?)
            };
            let error = match begin() {
                Ok(()) => again.exec(),
                Err(error) => error,
            };
            println!("no namespace of its own: {error}");
            exit_now(1);
        }
        Forked::Parent(pid) => {
            let (_, status) = waitpid(Some(pid), WaitOptions::empty())?.ok_or(io::ErrorKind::NotFound)?;
            Ok(u8::from(status.exit_status() != Some(0)))
        }
    }
}

fn probe(criu: &Path, folder: &Path) -> Result<Pid, String> {
    let process = hold(folder).map_err(|error| format!("no process: {error}"))?;
    turn(criu, folder, process)?;
    Ok(process)
}

/// Saves the process, ends it, and has it say from its restored memory what it said before.
fn turn(criu: &Path, folder: &Path, process: Pid) -> Result<(), String> {
    let failed = |error: io::Error| format!("the probe failed: {error}");
    keep_files(folder)?;
    let first = await_file(&folder.join(FIRST)).map_err(failed)?;
    let images = || File::open(folder);
    let mut dump = Call::new(criu, "dump");
    dump.args(["-t", &process.as_raw_nonzero().to_string(), "-o", DUMP_LOG])
        .args(criu::COMMON)
        .args(criu::to_dump(criu::STOPPED));
    dump.file("-D", images().map_err(failed)?).map_err(failed)?;
    let status = dump.run().map_err(|error| format!("it cannot be run: {error}"))?;
    if status != 0 {
        return Err(format!("a small process cannot be saved: {}", criu::why(status, &folder.join(DUMP_LOG))));
    }
    // Its pid is free once it was waited for, and taken again by itself: nobody else is here.
    let _ = kill_process(process, Signal::KILL);
    let _ = waitpid(Some(process), WaitOptions::empty());
    bring_back(criu, folder, None)?;
    remembers(folder, &first)
}

fn bring_back(criu: &Path, folder: &Path, option: Option<&str>) -> Result<(), String> {
    let failed = |error: io::Error| format!("the probe failed: {error}");
    let mut restore = Call::new(criu, "restore");
    restore.args(["-d", "-o", RESTORE_LOG]).args(criu::COMMON).args(option);
    restore.file("-D", File::open(folder).map_err(failed)?).map_err(failed)?;
    match restore.run().map_err(failed)? {
        0 => Ok(()),
        status => {
            let why = criu::why(status, &folder.join(RESTORE_LOG));
            Err(format!("a small process cannot be brought back: {why}"))
        }
    }
}

/// Asks what was brought back.
fn remembers(folder: &Path, first: &[u8]) -> Result<(), String> {
    let failed = |error: io::Error| format!("the probe failed: {error}");
    fs::write(folder.join(ASK), "").map_err(failed)?;
    let again = await_file(&folder.join(AGAIN)).map_err(failed)?;
    if again == first { Ok(()) } else { Err("a process that was brought back has other memory than before".to_owned()) }
}

/// Has another process do it, and gives it up after so long.
fn within(limit: Duration, work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let failed = |error: io::Error| format!("the probe of pages failed: {error}");
    let (mut says, mut said) = io::pipe().map_err(failed)?;
    match fork(None).map_err(failed)? {
        Forked::Child => {
            let done = work();
            if let Err(why) = &done {
                let _ = said.write_all(why.as_bytes());
            }
            exit_now(i32::from(done.is_err()));
        }
        Forked::Parent(worker) => {
            drop(said);
            let pidfd = pidfd_open(worker, PidfdFlags::empty()).map_err(io::Error::from).map_err(failed)?;
            if !readable_within(&pidfd, limit).map_err(failed)? {
                let _ = kill_process(worker, Signal::KILL);
                let _ = waitpid(Some(worker), WaitOptions::empty());
                return Err(format!("page by page it takes longer than {} s", limit.as_secs()));
            }
            let ended = waitpid(Some(worker), WaitOptions::empty()).map_err(io::Error::from).map_err(failed)?;
            if ended.is_some_and(|(_, status)| status.exit_status() == Some(0)) {
                return Ok(());
            }
            // Written before it ended: whoever it left behind may have this open for longer.
            let mut why = vec![0; WHY_BYTES_MAX];
            let length =
                if readable_within(&says, Duration::ZERO).map_err(failed)? { says.read(&mut why) } else { Ok(0) };
            why.truncate(length.map_err(failed)?);
            Err(if why.is_empty() {
                "the probe of pages was killed".to_owned()
            } else {
                String::from_utf8_lossy(&why).into()
            })
        }
    }
}

/// Brings it back once more, with its pages one by one: it has none when it begins, so it can do nothing before one was
/// brought. Says why that cannot be done for a sandbox.
fn lazy_turn(criu: &Path, folder: &Path) -> Result<(), String> {
    may_be_lazy().map_err(|error| format!("in a sandbox the kernel gives no userfaultfd: {error}"))?;
    let failed = |error: io::Error| format!("the probe of pages failed: {error}");
    let first = fs::read(folder.join(FIRST)).map_err(failed)?;
    for name in [ASK, AGAIN] {
        fs::remove_file(folder.join(name)).map_err(failed)?;
    }
    // A relative name: a socket's path has 108 bytes at the most.
    std::env::set_current_dir(folder).map_err(failed)?;
    let listener = UnixListener::bind(lazy::SOCKET).map_err(failed)?;
    let (cancelled, restoring) = io::pipe().map_err(failed)?;
    let server = match fork(None).map_err(failed)? {
        Forked::Child => {
            drop(restoring);
            exit_now(i32::from(lazy::serve(&listener, cancelled.as_fd(), folder).is_err()));
        }
        Forked::Parent(server) => server,
    };
    let brought = bring_back(criu, folder, Some(lazy::OPTION));
    drop(restoring);
    let brought = brought.and_then(|()| remembers(folder, &first));
    let ended = waitpid(Some(server), WaitOptions::empty()).map_err(io::Error::from).map_err(failed)?;
    brought.map_err(|why| format!("page by page it fails: {why}"))?;
    match ended {
        Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
        Some(_) | None => Err("the pages of a small process cannot be brought one by one".to_owned()),
    }
}

/// Whether a process in a user namespace gets what it takes to have its memory brought page by page. CRIU asks for it in
/// the process that it restores, which has no rights outside of its sandbox.
fn may_be_lazy() -> io::Result<()> {
    match fork(None)? {
        Forked::Child => {
            let asked = leave_for_new(UnshareFlags::NEWUSER).map_err(io::Error::from).and_then(|()| try_userfaultfd());
            exit_now(asked.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO)));
        }
        Forked::Parent(pid) => {
            let (_, status) = waitpid(Some(pid), WaitOptions::empty())?.ok_or(io::ErrorKind::NotFound)?;
            match status.exit_status() {
                Some(0) => Ok(()),
                Some(errno) => Err(io::Error::from_raw_os_error(errno)),
                None => Err(io::ErrorKind::Interrupted.into()),
            }
        }
    }
}

/// Has `tar` do what CRIU calls it for when it finds files in memory, in words that only GNU's knows.
fn keep_files(folder: &Path) -> Result<(), String> {
    let empty = folder.join("empty");
    fs::create_dir(&empty).map_err(|error| format!("the probe failed: {error}"))?;
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--no-unquote", "--no-wildcards", "--one-file-system", "--check-links"]);
    tar.args(["--preserve-permissions", "--sparse", "--numeric-owner", "--file"]).arg(folder.join("files.tar.gz"));
    let ended = tar.arg("--directory").arg(empty).arg(".").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if ended.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    Err("there is no GNU tar, or no gzip, by which CRIU keeps files that are in memory".to_owned())
}

/// A process that has something in its memory, and says it when it is asked. Like those of sandboxes it has a network of
/// its own, which takes more of the kernel, and `ip` of iproute2.
fn hold(folder: &Path) -> io::Result<Pid> {
    match fork(None)? {
        Forked::Parent(pid) => Ok(pid),
        Forked::Child => exit_now(i32::from(hold_on(folder).is_err())),
    }
}

fn hold_on(folder: &Path) -> io::Result<()> {
    rustix::process::setsid()?;
    leave_for_new(UnshareFlags::NEWNET)?;
    close_all_but(&[]);
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    drop(null);
    std::env::set_current_dir("/")?;
    let mut kept = [0; 16];
    rustix::rand::getrandom(&mut kept[..], rustix::rand::GetRandomFlags::empty())?;
    let say = |name: &str| {
        let beside = folder.join(format!(".{name}"));
        fs::write(&beside, kept)?;
        fs::rename(beside, folder.join(name))
    };
    say(FIRST)?;
    let rounds = HELD_FOR.as_millis() / LOOK_EVERY.as_millis();
    for _ in 0..rounds {
        if folder.join(ASK).exists() {
            return say(AGAIN);
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

fn await_file(path: &Path) -> io::Result<Vec<u8>> {
    let until = Instant::now() + ANSWER_WITHIN;
    loop {
        match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < until => {}
            result => return result,
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
