//! Saving an instance's memory, and beginning with one.
//!
//! The shim goes on serving while CRIU works: a helper process has the agent
//! close its connections and becomes CRIU. When that fails, the processes run
//! on as before, and the shim connects to the agent again.
//!
//! As long as pages are brought of the memory that it began with, nothing is
//! begun: it stands still or runs as it did, and whoever talks to it does.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, chown, lchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use viv_agent::proto::{AgentLimits, BOOT_ID, CONFIG, ControlMessage, DUMPING, Fence, Identity, LIMITS, SOCKET};
use viv_core::{EndCause, ExecutionId, OperationId};
use viv_provider::Mutation;

use super::agent::{ControlConnection, say_hello, tell_to_quiesce};
use super::chain;
use super::create::{CreateError, agent_config, at, descriptors, draw_boot_id, make_cgroups, wait_until};
use super::pages::Pages;
use super::proto::{ShimError, ShimReply};
use super::serve::{FREEZE_WITHIN, Handled, Init, Next, Shim};
use crate::bundle::{Staged, hostname};
use crate::cgroup::InstanceCgroups;
use crate::checkpoint::criu::{self, Call, DUMP_LOG, RESTORE_LOG};
use crate::checkpoint::{Dump, MemoryDir, files, lazy, mounts, pack, renumber};
use crate::durable;
use crate::layout::{InstanceDir, InstanceRecord, MemoryPlan};
use crate::rootfs::IdRange;
use crate::sys::clone::{Forked, die_with, exit_now, fork, leave_session_keyring};

/// How long the agent lives without us: for as long as a dump of much memory to a slow disk may take.
const AWAY_MS: u64 = 300_000;

/// An agent that runs on after a dump is back after a second, when it accepts connections again; on a crowded machine later.
const BACK_WITHIN: Duration = Duration::from_secs(30);

/// Who was about to connect when it began makes a dump fail; hardly ever three times.
const TRIES_MAX: u32 = 3;

/// Before it is tried again, and twice that before the last time: on a crowded machine, who was about to connect takes so
/// long to come in, or to give up.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// How long one attempt to kill what a restore left may take; there is another one after it.
const KILL_WITHIN: Duration = Duration::from_secs(2);

/// What the helper leaves when it did not come as far as CRIU.
const WHY: &str = "why";

/// A dump on its way.
pub(super) struct Checkpoint {
    order: Order,
    step: Step,
}

enum Step {
    /// The last page of the memory that it began with is waited for, until then: a dump of pages that are not there would
    /// write zeros.
    Pages(Instant),
    Dump {
        helper: Init,
        tries: u32,
    },
}

/// What was asked for.
#[derive(Clone)]
struct Order {
    criu: PathBuf,
    dir: MemoryDir,
    fence: Fence,
    dump: Dump,
    /// It runs on, after it stood still for so long at the most.
    held_for: Option<Duration>,
}

impl Checkpoint {
    /// To be polled.
    pub(super) fn helper(&self) -> Option<&OwnedFd> {
        match &self.step {
            Step::Pages(_) => None,
            Step::Dump { helper, .. } => Some(&helper.pidfd),
        }
    }

    /// When waiting for pages is over.
    pub(super) fn waits_until(&self) -> Option<Instant> {
        match self.step {
            Step::Pages(until) => Some(until),
            Step::Dump { .. } => None,
        }
    }

    /// Somebody who asks again has time for so long.
    pub(super) fn waits_for(&mut self, budget: Duration) {
        if let Step::Pages(until) = &mut self.step {
            *until = last_page_until(Instant::now(), budget);
        }
    }

    /// Whether this operation asked for it.
    pub(super) fn is_for(&self, operation: &OperationId) -> bool {
        self.order.fence.operation == *operation
    }

    /// Nobody waits for it any more.
    pub(super) fn abandon(&self) {
        if let Step::Dump { helper, .. } = &self.step {
            helper.kill();
            let _ = waitpid(Some(helper.pid), WaitOptions::empty());
        }
    }
}

/// How long a dump waits for pages, of what a save may take: a quarter is left for the dump, or for saying why there is none.
fn last_page_until(now: Instant, budget: Duration) -> Instant {
    now + budget / 4 * 3
}

/// The middle between now and then.
fn halfway(now: Instant, then: Instant) -> Instant {
    now + then.saturating_duration_since(now) / 2
}

impl Shim {
    pub(super) fn begin_checkpoint(
        &mut self,
        mutation: &Mutation,
        criu: PathBuf,
        folder: PathBuf,
        live: bool,
    ) -> Result<Handled, ShimError> {
        if self.clients.held_for().is_some() {
            return Err(ShimError::Conflict { what: "its files are being copied".to_owned() });
        }
        let failed = |what: String| ShimError::Failed { what };
        let dump = self.look_for_dump().map_err(failed)?;
        let fence =
            Fence { operation: mutation.operation.clone(), generation: mutation.generation, token: mutation.token };
        let budget = Duration::from_millis(mutation.budget_ms);
        let order = Order { criu, dir: MemoryDir::new(folder), fence, dump, held_for: live.then_some(budget) };
        if self.pages.is_some() {
            let step = Step::Pages(last_page_until(Instant::now(), budget));
            self.checkpoint = Some(Checkpoint { order, step });
        } else {
            self.begin_dump(order)?;
        }
        Ok(Handled::Checkpoint)
    }

    /// What waited for the last page goes on when it is there, or is given up in time.
    pub(super) fn tend_waiting(&mut self) {
        let waits_until = self.checkpoint.as_ref().and_then(Checkpoint::waits_until);
        let is_late = match waits_until {
            None => return,
            Some(until) => Instant::now() >= until,
        };
        if self.pages.is_some() && !is_late {
            return;
        }
        let Some(Checkpoint { order, .. }) = self.checkpoint.take() else { return };
        // Nothing is ended for nobody: who asks again begins anew.
        let Some(index) = self.clients.saving() else { return };
        let begun = if self.pages.is_some() {
            Err(ShimError::Failed { what: "its own memory is still being brought".to_owned() })
        } else {
            // Somebody may have mounted something since.
            let dump = self.look_for_dump().map_err(|what| ShimError::Failed { what });
            dump.and_then(|dump| self.begin_dump(Order { dump, ..order }))
        };
        if let (Err(error), Some(client)) = (begun, self.clients.get_mut(index)) {
            client.saves(false);
            client.say(&ShimReply::Error(error));
        }
    }

    /// All of its memory is there.
    fn begin_dump(&mut self, order: Order) -> Result<(), ShimError> {
        // The agent cannot close anything while it stands still. It does again if this fails.
        self.run_again()?;
        self.start_dump(order, 1).map_err(|error| {
            self.dump_is_over();
            if self.frozen {
                let _ = self.stop_running();
            }
            ShimError::Failed { what: format!("no memory is saved: {error}") }
        })
    }

    /// What CRIU has to be told.
    fn look_for_dump(&self) -> Result<Dump, String> {
        let pid = self.init.pid.as_raw_nonzero();
        let mountinfo = fs::read_to_string(format!("/proc/{pid}/mountinfo")).map_err(|error| error.to_string())?;
        let mounts = mounts::external(&mountinfo, &mounts::parts_of(&self.record))?;
        let logs = logs_of(&self.dir, self.init.pid).map_err(|error| error.to_string())?;
        Ok(Dump { mounts, logs, placed: BTreeMap::new(), files: BTreeMap::new() })
    }

    fn start_dump(&mut self, order: Order, tries: u32) -> io::Result<()> {
        // Nobody of ours knocks from here on: a connection at the wrong moment is what CRIU cannot save.
        File::create(self.dir.dumping())?;
        // Nor does the agent accept anybody until it is over.
        File::create(self.dir.run().join(DUMPING))?;
        let log = File::options().append(true).create(true).open(self.dir.log())?;
        let parent = rustix::process::getpid();
        let pid = match fork(None)? {
            Forked::Child => {
                if !die_with(parent) {
                    exit_now(1);
                }
                // This is another process: nobody waits for it.
                std::thread::sleep(AGAIN_AFTER * (tries - 1));
                let error = self.dump(&order, &log);
                let _ = fs::write(order.dir.path().join(WHY), error.to_string());
                exit_now(1);
            }
            Forked::Parent(pid) => pid,
        };
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        self.may_leave = true;
        self.checkpoint = Some(Checkpoint { order, step: Step::Dump { helper: Init { pid, pidfd }, tries } });
        Ok(())
    }

    fn dump_is_over(&self) {
        for file in [self.dir.dumping(), self.dir.run().join(DUMPING)] {
            let _ = fs::remove_file(file);
        }
    }

    /// In the helper. Comes back only when something fails before CRIU does.
    fn dump(&self, order: &Order, log: &File) -> io::Error {
        let prepare = || -> io::Result<Call> {
            tell_to_quiesce(Path::new("run").join(SOCKET).as_path(), &order.fence, AWAY_MS)?;
            let mut call = Call::new(&order.criu, "dump");
            call.args(["-t", &self.init.pid.as_raw_nonzero().to_string(), "-o", DUMP_LOG]);
            call.args(criu::COMMON);
            match (order.held_for, self.cgroups.v2()) {
                (Some(_), Some(cgroup)) => criu::dump_live(&mut call, &cgroup)?,
                (Some(_), None) => return Err(io::Error::other("it cannot be held still")),
                (None, _) => drop(call.args(criu::to_dump(criu::STOPPED))),
            }
            call.args([Path::new("--root"), &self.root]);
            for external in &order.dump.mounts {
                call.args(["--external".to_owned(), external.to_save()]);
            }
            for file in &order.dump.logs {
                call.args(["--external", file]);
            }
            call.file("-D", File::open(order.dir.images())?)?;
            call.file("-W", File::open(order.dir.path())?)?;
            criu::leave_for_own_run(UnshareFlags::empty())?;
            rustix::stdio::dup2_stdout(log)?;
            rustix::stdio::dup2_stderr(log)?;
            Ok(call)
        };
        match prepare() {
            Ok(call) => call.exec(),
            Err(error) => error,
        }
    }

    /// The helper has ended.
    pub(super) fn tend_checkpoint(&mut self) -> io::Result<Next> {
        // The agent left before the helper had its answer, so that is known here by now, whichever of the two was looked
        // at first.
        if let Next::End(cause, asked_by) = self.hear_agent()? {
            return Ok(Next::End(cause, asked_by));
        }
        let Some(Checkpoint { order, step: Step::Dump { helper, tries } }) = self.checkpoint.take() else {
            return Ok(Next::Go);
        };
        let (_, status) = waitpid(Some(helper.pid), WaitOptions::empty())?.ok_or(io::ErrorKind::NotFound)?;
        self.dump_is_over();
        let index = self.clients.saving();
        let why = if status.exit_status() == Some(0) {
            if let Some(held_for) = order.held_for {
                self.hold_dumped(&order, held_for, index);
                return Ok(Next::Go);
            }
            // All of them are stopped now, so this is how they were.
            match self.note_dumped(&order) {
                Ok(()) => return Ok(Next::End(EndCause::Saved, index)),
                Err(error) => {
                    self.continue_stopped();
                    format!("who is in which cgroup cannot be noted: {error}")
                }
            }
        } else {
            match fs::read_to_string(order.dir.path().join(WHY)) {
                Ok(why) => why,
                Err(_) => criu::why(status.as_raw(), &order.dir.path().join(DUMP_LOG)),
            }
        };
        eprintln!("its memory was not saved: {why}");
        if order.held_for.is_some() {
            // It may have been stopped for good just before.
            let _ = self.cgroups.set_frozen(false, FREEZE_WITHIN);
        }
        if tries < TRIES_MAX && why.contains("unix") && index.is_some() {
            self.start_dump(order, tries + 1)?;
            return Ok(Next::Go);
        }
        if self.control.is_absent() && !self.connect_again() {
            return Ok(Next::End(EndCause::AgentLost, index));
        }
        if self.frozen {
            // Whoever had it frozen has it so again.
            let _ = self.stop_running();
        }
        if let Some(client) = index.and_then(|index| self.clients.get_mut(index)) {
            client.saves(false);
            client.say(&ShimReply::Error(ShimError::Failed { what: format!("its memory cannot be saved: {why}") }));
        }
        Ok(Next::Go)
    }

    /// What is known about processes that stand still.
    fn note_dumped(&self, order: &Order) -> io::Result<()> {
        let files = files::used(&self.cgroups.v2().map_or_else(Vec::new, |path| all_pids(&path)));
        order.dir.write_dump(&Dump { placed: placed(&self.cgroups)?, files, ..order.dump.clone() })
    }

    /// It is dumped and runs on, once whoever asked has a copy of its files.
    fn hold_dumped(&mut self, order: &Order, held_for: Duration, index: Option<usize>) {
        let noted = self.stop_running().and_then(|()| {
            let failed = |error| ShimError::Failed { what: format!("what was dumped cannot be noted: {error}") };
            self.note_dumped(order).map_err(failed)
        });
        // Without anybody who waits for it, it runs again at the end of this turn.
        if let Some(client) = index.and_then(|index| self.clients.get_mut(index)) {
            client.saves(false);
            match noted {
                Ok(()) => {
                    client.hold(held_for);
                    client.say(&ShimReply::Held { writable: self.writable.clone() });
                }
                Err(error) => client.say(&ShimReply::Error(error)),
            }
        }
    }

    /// Connects again to an agent that was left alone for a dump, as soon as it runs. False when it does not come back.
    pub(super) fn rejoin_agent(&mut self) -> bool {
        let runs = self.checkpoint.is_none() && self.stopped_since_boot_ms.is_none();
        !runs || !self.control.is_absent() || self.connect_again()
    }

    /// What CRIU stopped runs on.
    fn continue_stopped(&self) {
        let Some(path) = self.cgroups.v2() else { return };
        for pid in all_pids(&path) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
        }
    }

    /// An agent that was left alone for a dump hears us again.
    fn connect_again(&mut self) -> bool {
        let until = Instant::now() + BACK_WITHIN;
        let opened = descriptors(&self.record, &self.cgroups).map_err(|error| error.to_string()).and_then(|given| {
            let alive = || Ok(!self.init.has_ended()?);
            ControlConnection::open(&format!("run/{SOCKET}"), &given, until, alive).map_err(|error| error.to_string())
        });
        match opened {
            Ok((control, _)) => {
                self.control = control;
                self.may_leave = false;
                let token = self.token;
                self.tell_agent(&ControlMessage::Token(token));
                true
            }
            Err(error) => {
                eprintln!("the agent does not come back: {error}");
                false
            }
        }
    }
}

/// How CRIU calls those of the first process's files that are a log of ours, which is outside: the shim's, or the one that
/// it was restored with.
fn logs_of(dir: &InstanceDir, init: Pid) -> io::Result<Vec<String>> {
    let logs = [dir.log(), dir.agent_log()].into_iter().filter_map(|path| fs::metadata(path).ok());
    let logs: Vec<_> = logs.map(|log| (log.dev(), log.ino())).collect();
    let pid = init.as_raw_nonzero();
    let mut found = Vec::new();
    for number in 0..=2 {
        let Ok(file) = fs::metadata(format!("/proc/{pid}/fd/{number}")) else { continue };
        if !logs.contains(&(file.dev(), file.ino())) {
            continue;
        }
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))?;
        let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse::<u32>().ok());
        let name = format!("file[{:x}:{:x}]", mount.ok_or(io::ErrorKind::InvalidData)?, file.ino());
        if !found.contains(&name) {
            found.push(name);
        }
    }
    Ok(found)
}

/// Who is in the cgroup of which execution, by pids inside.
fn placed(cgroups: &InstanceCgroups) -> io::Result<BTreeMap<String, Vec<i32>>> {
    let mut placed = BTreeMap::new();
    let Some(path) = cgroups.v2() else { return Ok(placed) };
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| name.starts_with(ExecutionId::PREFIX)) else { continue };
        let pids = pids(&entry.path())?.into_iter().filter_map(|pid| Some(Seen::of(pid)?.inside));
        let pids: Vec<i32> = pids.collect();
        if !pids.is_empty() {
            placed.insert(name.to_owned(), pids);
        }
    }
    Ok(placed)
}

fn pids(cgroup: &Path) -> io::Result<Vec<Pid>> {
    let text = fs::read_to_string(cgroup.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|line| Pid::from_raw(line.trim().parse().ok()?)).collect())
}

/// Those of a cgroup and of the ones right below it.
fn all_pids(cgroup: &Path) -> Vec<Pid> {
    let below = fs::read_dir(cgroup).into_iter().flatten().flatten().map(|entry| entry.path());
    below.chain([cgroup.to_owned()]).filter_map(|path| pids(&path).ok()).flatten().collect()
}

/// A process as its status tells of it.
struct Seen {
    inside: i32,
    parent: Option<Pid>,
}

impl Seen {
    fn of(pid: Pid) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.split_ascii_whitespace().next_back());
        Some(Self {
            inside: field("NSpid:")?.parse().ok()?,
            parent: field("PPid:").and_then(|pid| Pid::from_raw(pid.parse().ok()?)),
        })
    }
}

/// Brings the processes back where they can run: the root is mounted, the cgroups are made, and nothing runs yet.
pub(super) fn restore(
    dir: &InstanceDir,
    record: &InstanceRecord,
    cgroups: &InstanceCgroups,
    staged: &Staged<'_>,
    (memory, plan): (&MemoryDir, &MemoryPlan),
    until: Instant,
) -> Result<(Init, Option<Pages>), CreateError> {
    let mut dump = memory.read_dump().map_err(at("reading what was dumped"))?;
    if let Some(why) = files::why_not(&dump.files, staged.root).map_err(at("looking at files that were open"))? {
        return Err(CreateError::Memory { why });
    }
    if plan.of.sandbox != *record.sandbox() {
        // The agent calls them so too, once it knows who it is.
        let renamed = std::mem::take(&mut dump.placed).into_iter().map(|(name, pids)| {
            let copy = name.parse::<ExecutionId>().map(|execution| execution.copied_into(record.sandbox()));
            (copy.map_or(name, |copy| copy.as_str().to_owned()), pids)
        });
        dump.placed = renamed.collect();
    }
    let images = dir.unpacked();
    let begun = Instant::now();
    unpack(memory, &images, (plan.ids, record.ids), until)?;
    let unpacked = begun.elapsed();
    let restore = Restore { dir, record, cgroups, staged, criu: &plan.criu, dump: &dump, images: &images, until };
    let is_worth_it = || lazy::bytes(&images).is_ok_and(|bytes| bytes >= lazy::BYTES_MIN);
    let mut lazily = None;
    if plan.lazy && is_worth_it() {
        // What takes longer than half of the time is given up, so that there is as much for the other way.
        match restore.lazily(halfway(Instant::now(), until)) {
            Ok(restored) => lazily = Some(restored),
            Err(error) => {
                note!("its memory is brought at once, because it cannot be brought while it runs: {}", chain(&error));
                restore.undo()?;
            }
        }
    }
    let (pid, pages) = match lazily {
        Some((pid, pages)) => (pid, Some(pages)),
        None => (restore.criu(false, until)?, None),
    };
    let by_criu = begun.elapsed().saturating_sub(unpacked);
    note!("its memory was unpacked in {} ms, and restored by CRIU in {} ms", unpacked.as_millis(), by_criu.as_millis());
    // It is our child (we are the subreaper) and not waited for, so the pid is still its own.
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from).map_err(at("holding the agent"))?;
    super::first::record(dir, pid).map_err(at("writing down who the agent is"))?;
    place(cgroups, record, &dump).map_err(at("placing processes into cgroups"))?;
    name(pid, &hostname(record)).map_err(at("naming it"))?;
    if pages.is_none() {
        // All of it is in memory.
        let _ = fs::remove_dir_all(&images);
    }
    Ok((Init { pid, pidfd }, pages))
}

/// What a restore by CRIU takes.
struct Restore<'a> {
    dir: &'a InstanceDir,
    record: &'a InstanceRecord,
    cgroups: &'a InstanceCgroups,
    staged: &'a Staged<'a>,
    criu: &'a Path,
    dump: &'a Dump,
    images: &'a Path,
    until: Instant,
}

impl Restore<'_> {
    /// Has everything run, with somebody who brings its pages.
    fn lazily(&self, until: Instant) -> Result<(Pid, Pages), CreateError> {
        let mut pages = Pages::start(self.dir, self.cgroups).map_err(at("starting who brings its pages"))?;
        let restored = self.criu(true, until);
        pages.restored();
        match restored {
            Ok(pid) => Ok((pid, pages)),
            Err(error) => {
                // Nobody of it is to read anything.
                while let Err(left) = self.cgroups.kill(KILL_WITHIN) {
                    note!("a restore that failed left processes: {left}");
                    if Instant::now() >= self.until {
                        // Whoever undoes it all ends them, and their pages are held for as long as they are there.
                        return Err(error);
                    }
                }
                pages.dismiss();
                Err(error)
            }
        }
    }

    /// Leaves nothing of a restore that failed, so that there can be another one.
    fn undo(&self) -> Result<(), CreateError> {
        // What CRIU left came to us and has ended. The guard is none of them: it does not end before we do.
        while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {}
        // Whoever is born where somebody was killed so is killed too, by some kernels.
        self.cgroups.remove().map_err(at("restoring once more"))?;
        make_cgroups(self.dir, self.record, self.cgroups)?;
        for file in [self.dir.first_pid(), self.dir.path().join(RESTORE_LOG), self.dir.path().join(lazy::SOCKET)] {
            match fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(at("restoring once more")(error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Runs CRIU, and answers with the first process.
    fn criu(&self, lazily: bool, until: Instant) -> Result<Pid, CreateError> {
        let Self { dir, record, cgroups, staged, criu, dump, images, .. } = *self;
        let birthplace = cgroups.open_v2().map_err(at("opening the cgroup"))?;
        let pid_file = dir.first_pid();
        let call = || -> io::Result<Call> {
            let mut call = Call::new(criu, "restore");
            call.args(["-d", "-o", RESTORE_LOG]).args(criu::COMMON).args(lazily.then_some(lazy::OPTION));
            call.args([Path::new("--pidfile"), &pid_file]).args([Path::new("--root"), &staged.root.root]);
            for external in &dump.mounts {
                let told =
                    external.to_restore(staged).ok_or_else(|| io::Error::other(format!("no {}", external.at)))?;
                call.args(["--external".to_owned(), told]);
            }
            for name in &dump.logs {
                let number = call.give(agent_log(dir, record)?)?;
                call.args(["--inherit-fd".to_owned(), format!("fd[{number}]:{name}")]);
            }
            call.file("-D", File::open(images)?)?;
            call.file("-W", File::open(dir.path())?)?;
            Ok(call)
        };
        let call = call().map_err(at("preparing the restore"))?;
        let log = File::options().append(true).create(true).open(dir.log()).map_err(at("opening the log"))?;
        let parent = rustix::process::getpid();
        let helper = match fork(birthplace.as_ref().map(AsFd::as_fd)).map_err(at("starting CRIU"))? {
            Forked::Child => {
                // What is restored is born where this is: in the sandbox's cgroups, and in a namespace that shows no others.
                let enter = || -> io::Result<()> {
                    if !die_with(parent) {
                        return Err(io::Error::other("the shim is gone"));
                    }
                    leave_session_keyring();
                    cgroups.join_v1()?;
                    criu::leave_for_own_run(UnshareFlags::NEWCGROUP)?;
                    rustix::stdio::dup2_stdout(&log)?;
                    Ok(rustix::stdio::dup2_stderr(&log)?)
                };
                let error = match enter() {
                    Ok(()) => call.exec(),
                    Err(error) => error,
                };
                eprintln!("CRIU: {error}");
                exit_now(127);
            }
            Forked::Parent(helper) => helper,
        };
        drop(call);
        match wait_until(helper, until).map_err(at("waiting for CRIU"))? {
            Some(0) => {}
            Some(status) => return Err(CreateError::Memory { why: criu::why(status, &dir.path().join(RESTORE_LOG)) }),
            None => {
                let _ = rustix::process::kill_process(helper, rustix::process::Signal::KILL);
                let _ = waitpid(Some(helper), WaitOptions::empty());
                return Err(CreateError::Memory { why: "it takes too long".to_owned() });
            }
        }
        let pid = fs::read_to_string(&pid_file).map_err(at("reading the container's pid"))?;
        let pid = pid.trim().parse().ok().and_then(Pid::from_raw);
        pid.ok_or(io::ErrorKind::InvalidData.into()).map_err(at("reading the container's pid"))
    }
}

/// Has what was dumped in plain files, for the ids that this instance has. Another process does it: this one has one thread.
fn unpack(memory: &MemoryDir, to: &Path, (then, now): (IdRange, IdRange), until: Instant) -> Result<(), CreateError> {
    let parent = rustix::process::getpid();
    let helper = match fork(None).map_err(at("unpacking its memory"))? {
        Forked::Child => {
            let unpacked = || -> io::Result<()> {
                if !die_with(parent) {
                    return Err(io::Error::other("the shim is gone"));
                }
                fs::create_dir(to)?;
                pack::unpack(&memory.images(), to)?;
                renumber::renumber(to, then, now)
            };
            let unpacked = unpacked();
            if let Err(error) = &unpacked {
                // The files need the room, and so does the reason.
                let _ = fs::remove_dir_all(to);
                let _ = fs::write(to.with_file_name(WHY), error.to_string());
            }
            exit_now(i32::from(unpacked.is_err()));
        }
        Forked::Parent(helper) => helper,
    };
    match wait_until(helper, until).map_err(at("waiting for its memory to be unpacked"))? {
        Some(0) => Ok(()),
        Some(_) => {
            let why = fs::read_to_string(to.with_file_name(WHY)).unwrap_or_else(|_| "its helper was killed".to_owned());
            Err(CreateError::Memory { why: format!("what was dumped cannot be unpacked: {why}") })
        }
        None => {
            let _ = rustix::process::kill_process(helper, rustix::process::Signal::KILL);
            let _ = waitpid(Some(helper), WaitOptions::empty());
            Err(CreateError::Memory { why: "it takes too long to unpack what was dumped".to_owned() })
        }
    }
}

/// Where what the agent says goes. CRIU opens it again with the rights of the sandbox's own ids.
fn agent_log(dir: &InstanceDir, record: &InstanceRecord) -> io::Result<File> {
    let keeper = record.ids.keeper_on_host();
    let file = File::options().append(true).create(true).open(dir.agent_log())?;
    chown(dir.agent_log(), Some(keeper), Some(keeper))?;
    Ok(file)
}

/// Has every process in the cgroup of its execution again. They stand still meanwhile: whoever was started since then
/// belongs where its parent does.
fn place(cgroups: &InstanceCgroups, record: &InstanceRecord, dump: &Dump) -> io::Result<()> {
    let Some(path) = cgroups.v2() else { return Ok(()) };
    cgroups.set_frozen(true, FREEZE_WITHIN)?;
    let placed = (|| {
        let owner: HashMap<i32, &str> =
            dump.placed.iter().flat_map(|(name, pids)| pids.iter().map(|pid| (*pid, name.as_str()))).collect();
        let seen: HashMap<Pid, Seen> = pids(&path)?.into_iter().filter_map(|pid| Some((pid, Seen::of(pid)?))).collect();
        for &pid in seen.keys() {
            let mut at = Some(pid);
            let mut named = None;
            // A chain of parents is as long as there are processes, at the most.
            for _ in 0..seen.len() {
                let Some(process) = at.and_then(|at| seen.get(&at)) else { break };
                named = owner.get(&process.inside).copied();
                if named.is_some() {
                    break;
                }
                at = process.parent;
            }
            if let Some(name) = named {
                let cgroup = path.join(name);
                make_for_keeper(&cgroup, record.ids.keeper_on_host())?;
                fs::write(cgroup.join("cgroup.procs"), pid.as_raw_nonzero().to_string())?;
            }
        }
        Ok(())
    })();
    cgroups.set_frozen(false, FREEZE_WITHIN)?;
    placed
}

/// As if the agent had made it.
fn make_for_keeper(cgroup: &Path, keeper: u32) -> io::Result<()> {
    match fs::create_dir(cgroup) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        made => made?,
    }
    chown(cgroup, Some(keeper), Some(keeper))?;
    for entry in fs::read_dir(cgroup)? {
        chown(entry?.path(), Some(keeper), Some(keeper))?;
    }
    Ok(())
}

/// Gives what was restored the name of the sandbox that it is now.
fn name(init: Pid, hostname: &str) -> io::Result<()> {
    let namespace = File::open(format!("/proc/{}/ns/uts", init.as_raw_nonzero()))?;
    // A namespace is entered for good, so somebody else does it.
    match fork(None)? {
        Forked::Child => {
            let entered =
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::HostNameAndNISDomainName));
            let named = entered.is_ok() && rustix::system::sethostname(hostname.as_bytes()).is_ok();
            exit_now(i32::from(!named));
        }
        Forked::Parent(child) => match waitpid(Some(child), WaitOptions::empty())? {
            Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
            _ => Err(io::Error::other("its name cannot be set")),
        },
    }
}

/// The folder that is shared with the agent, as it was left, with what is new for this instance.
pub(super) fn bring_run(
    dir: &InstanceDir,
    record: &InstanceRecord,
    identity: &Identity,
    memory: &MemoryDir,
) -> io::Result<()> {
    let (run, keeper) = (dir.run(), record.ids.keeper_on_host());
    viv_layer::copy(&memory.run(), &run)?;
    // Of a shim that did not come as far as saying that it was over.
    let _ = fs::remove_file(run.join(DUMPING));
    if let Some(plan) = &record.memory {
        hand_over(&run, plan.ids, record.ids)?;
        if plan.of.sandbox != *record.sandbox() {
            draw_boot_id(&run)?;
        }
    }
    durable::replace_json_unsynced(&run.join(CONFIG), &agent_config(record, identity))?;
    // What is running has read its configuration; this it looks at before every command.
    let limits = &record.spec.limits;
    let limits = AgentLimits { open_files: limits.open_files, processes: limits.processes };
    durable::replace_json_unsynced(&run.join(LIMITS), &limits)?;
    for file in [CONFIG, LIMITS, BOOT_ID] {
        chown(run.join(file), Some(keeper), Some(keeper))?;
    }
    Ok(())
}

/// What belonged to one range of ids belongs to another.
fn hand_over(folder: &Path, from: IdRange, to: IdRange) -> io::Result<()> {
    if from == to {
        return Ok(());
    }
    let moved = |id: u32| {
        let offset = id.checked_sub(from.base).filter(|offset| *offset < from.count);
        offset.map(|offset| to.base + offset)
    };
    let found = fs::symlink_metadata(folder)?;
    lchown(folder, moved(found.uid()), moved(found.gid()))?;
    if found.is_dir() {
        for entry in fs::read_dir(folder)? {
            hand_over(&entry?.path(), from, to)?;
        }
    }
    Ok(())
}

/// Has a restored agent serve this instance, and shows that it does.
pub(super) fn become_new(
    control: &mut ControlConnection,
    record: &InstanceRecord,
    identity: &Identity,
    until: Instant,
) -> io::Result<()> {
    control.tell(&ControlMessage::Become { identity: identity.clone(), token: record.token })?;
    let socket = Path::new("run").join(SOCKET);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if say_hello(&socket, left.max(Duration::from_millis(1)))?.identity == *identity {
            return Ok(());
        }
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the agent does not become the new instance"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l13_whoever_tries_something_else_first_has_half_of_the_time_left() {
        let now = Instant::now();
        let then = now + Duration::from_secs(30);
        assert_eq!(then - halfway(now, then), Duration::from_secs(15));
        assert_eq!(halfway(then, now), then, "there is none left");
    }

    #[test]
    fn l13_a_dump_waits_for_its_pages_for_as_long_as_the_save_may_take() {
        let now = Instant::now();
        let budget = Duration::from_secs(300);
        let waits = last_page_until(now, budget) - now;
        // No less than half of it, and not so long that nobody would hear why there is no dump.
        assert!(waits >= budget / 2 && waits < budget, "{waits:?}");
    }
}
