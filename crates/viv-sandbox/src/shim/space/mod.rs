//! One shim of a data folder watches the disk that all of its sandboxes share (S1).
//!
//! ```text
//!   every shim ── reads space.fifo: its end is the end of whoever watched ──► tries to be next
//!   the watcher ── holds the other end, locked
//!        look (one statvfs, as often as the room that is left demands)
//!          └── below the floor ──► a judge: a child that has everybody stand still, gives back
//!                                  the ballast, finds who took most lately, and has that one ended
//! ```
//!
//! Nobody has to be started or restarted, and it works while no daemon runs:
//! the kernel closes the pipe of a watcher that was killed, and the others
//! hear that by the poll they are in anyway. Whoever does not watch is not
//! woken by any of this.
//!
//! The judge is a process of its own so that deadline and requests of the
//! watcher's own sandbox are kept meanwhile, and so that this one is asked like
//! all others. It holds the pipe too: there is one judge at a time, even if its
//! watcher dies.

mod ballast;
mod judge;
mod level;
mod unlinked;

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, mknodat, open};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};
use serde::Serialize;

use super::deadline::now_wall_ms;
use crate::layout::{DataDir, InstanceDir};
use crate::sys::clone::{Forked, close_all_but, exit_now, fork};
use level::{Levels, Room};

/// A judge takes some seconds at the most; one that was stopped is killed after this.
const JUDGE_WITHIN: Duration = Duration::from_secs(40);

/// What a judge tells is a few numbers.
const WORD_BYTES_MAX: u64 = 4096;

/// When the disk cannot be looked at, that is tried again after this.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// What is kept free of the disk that all sandboxes share, and by what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DiskReserve {
    /// What is left now.
    pub free_bytes: u64,
    /// When less than this is left, the sandbox that took most lately is ended.
    pub bytes: u64,
    /// The same for files, where their number is bounded.
    pub files: Option<u64>,
    /// What is put aside for the others at this moment: some sandbox has to run for that, and there has to be room.
    pub put_aside_bytes: u64,
}

impl DiskReserve {
    pub(crate) fn of(data: &DataDir) -> io::Result<Self> {
        let room = Room::of(&data.layers())?;
        let (bytes, files) = room.reserves();
        Ok(Self { free_bytes: room.bytes.free, bytes, files, put_aside_bytes: ballast::bytes_in(&data.ballast()) })
    }
}

/// What a shim has to do with the disk that all share.
pub(super) struct SpaceWatch {
    data: DataDir,
    pipe: PathBuf,
    /// Ends when nobody watches; `None` where there can be no pipe.
    others: Option<OwnedFd>,
    seat: Option<Seat>,
}

/// What the watcher has.
struct Seat {
    /// Locked; its end is heard by all others.
    pipe: OwnedFd,
    look_at: Instant,
    /// `None` until there was a first look.
    levels: Option<Levels>,
    has_ballast: bool,
    judge: Option<Judge>,
}

struct Judge {
    pid: Pid,
    pidfd: OwnedFd,
    until: Instant,
    /// What was left when it was done, and nobody ran yet.
    word: PipeReader,
}

impl SpaceWatch {
    /// Takes part. The first one watches.
    pub(super) fn join(dir: &InstanceDir) -> Self {
        let root = dir.path().ancestors().nth(2).expect("an instance's folder lies in a data folder");
        let data = DataDir::new(root.to_owned());
        let pipe = data.space_pipe();
        let mut watch = Self { data, pipe, others: None, seat: None };
        match watch.open() {
            Ok(others) => {
                watch.others = Some(others);
                watch.try_to_watch();
            }
            Err(error) => note!("the disk is not watched by this shim: {error}"),
        }
        watch
    }

    fn open(&self) -> io::Result<OwnedFd> {
        match mknodat(CWD, &self.pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(open(&self.pipe, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Opened before it is locked: if the one who holds it ends in between, this end is the last to be closed, and
    /// everybody hears that.
    fn try_to_watch(&mut self) {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let seat = open(&self.pipe, flags, Mode::empty()).and_then(|pipe| {
            flock(&pipe, FlockOperation::NonBlockingLockExclusive)?;
            Ok(Seat { pipe, look_at: Instant::now(), levels: None, has_ballast: false, judge: None })
        });
        match seat {
            Ok(seat) => self.seat = Some(seat),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(error) => {
                // One that cannot take part is not to be woken for ever.
                note!("the disk is not watched by this shim: {error}");
                self.others = None;
            }
        }
    }

    /// What it waits for.
    pub(super) fn waits_for(&self) -> Option<BorrowedFd<'_>> {
        match &self.seat {
            Some(seat) => seat.judge.as_ref().map(|judge| judge.pidfd.as_fd()),
            None => self.others.as_ref().map(AsFd::as_fd),
        }
    }

    /// How long it can wait.
    pub(super) fn waits_at_most(&self) -> Option<Duration> {
        let seat = self.seat.as_ref()?;
        let next = seat.judge.as_ref().map_or(seat.look_at, |judge| judge.until);
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Does what is due. `is_ready` is whether what it waits for has come.
    pub(super) fn tend(&mut self, is_ready: bool) {
        match &mut self.seat {
            None if is_ready => self.try_to_watch(),
            None => {}
            Some(seat) => {
                if is_ready && let Some(judge) = seat.judge.take() {
                    let _ = waitpid(Some(judge.pid), WaitOptions::empty());
                    seat.take_in(judge);
                }
                if let Some(judge) = seat.judge.as_mut().filter(|judge| judge.until <= Instant::now()) {
                    let _ = pidfd_send_signal(&judge.pidfd, Signal::KILL);
                    judge.until = Instant::now() + JUDGE_WITHIN;
                }
                if seat.judge.is_none() && seat.look_at <= Instant::now() {
                    seat.look(&self.data);
                }
            }
        }
    }

    /// Lets somebody else watch; a judge that is at work goes on.
    pub(super) fn leave(&mut self) {
        self.seat = None;
        self.others = None;
    }
}

impl Seat {
    fn look(&mut self, data: &DataDir) {
        let now_s = now_s();
        let room = match Room::of(&data.layers()) {
            Ok(room) => room,
            Err(error) => {
                note!("the disk cannot be looked at: {error}");
                self.look_at = Instant::now() + TRY_AGAIN_AFTER;
                return;
            }
        };
        let levels = self.levels.get_or_insert_with(|| Levels::new(&room, now_s));
        let fallen = levels.look(&room, now_s);
        if levels.is_roomy(&room) && !self.has_ballast {
            // Tried once in a while at the most: where there can be none, that does not change.
            self.has_ballast = true;
            if let Err(error) = ballast::keep(&data.ballast(), &room) {
                note!("there is no ballast: {error}");
            }
        }
        // Who has been judged is no reason to keep it from the others, when nothing is left only now.
        if fallen.is_none()
            && ballast::give_back(&data.ballast(), &room)
            && let Ok(room) = Room::of(&data.layers())
        {
            levels.judged(&room, now_s);
        }
        self.look_at = Instant::now() + levels.patience(&room);
        if let Some(fallen) = fallen {
            match self.call_judge(data, &fallen) {
                Ok(judge) => self.judge = Some(judge),
                Err(error) => {
                    note!("nobody can be judged: {error}");
                    self.look_at = Instant::now() + TRY_AGAIN_AFTER;
                }
            }
        }
    }

    fn call_judge(&self, data: &DataDir, fallen: &level::Fallen) -> io::Result<Judge> {
        let (word, mut told) = io::pipe()?;
        match fork(None)? {
            Forked::Child => {
                close_all_but(&[self.pipe.as_fd(), told.as_fd()]);
                judge::judge(data, fallen, |left| {
                    // Its watcher may be gone; then it matters to nobody.
                    let _ = told.write_all(&serde_json::to_vec(left).unwrap_or_default());
                });
                exit_now(0);
            }
            Forked::Parent(pid) => {
                let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
                Ok(Judge { pid, pidfd, until: Instant::now() + JUDGE_WITHIN, word })
            }
        }
    }

    /// A judge is done, or was killed.
    fn take_in(&mut self, judge: Judge) {
        // It may have given some back.
        self.has_ballast = false;
        let mut word = Vec::new();
        let left = judge.word.take(WORD_BYTES_MAX).read_to_end(&mut word).ok();
        match (&mut self.levels, left.and_then(|_| serde_json::from_slice::<Room>(&word).ok())) {
            (Some(levels), Some(left)) => {
                levels.judged(&left, now_s());
                self.look_at = Instant::now();
            }
            (Some(_) | None, _) => self.look_at = Instant::now() + TRY_AGAIN_AFTER,
        }
    }
}

/// As the kernel notes changes of files.
fn now_s() -> i64 {
    (now_wall_ms() / 1000).cast_signed()
}
