//! One session: what an agent does with a sandbox from its beginning to its end, with one fault on the way. Whatever was
//! acknowledged is remembered, and has to be there whenever the sandbox is well again.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use viv_api::ErrorCode;
use viv_api::bound::{
    Argument, Argv, EffectName, LabelKey, LabelValue, Labels, LifetimeMs, Path, SandboxRef, Sequence, TaskEffects,
    TaskFiles, TaskRef, WaitMs,
};
use viv_api::event::Event;
use viv_api::execution::StartExecution;
use viv_api::limits::{Limit, Limits};
use viv_api::query::ListEvents;
use viv_api::sandbox::{CreatePolicy, CreateSandbox, FailedSave, Phase, ProbeOutcome, Sandbox, Status, StopSandbox};
use viv_api::task::{ContinueTask, CreateTask, StopTask, Task, TaskEffect, TaskFile, TaskSource, TaskState};
use viv_core::SandboxId;

use super::caught::caught;
use super::fault::{Fault, How, Kind, Step};
use super::harm::{Harm, Parts};
use super::lane::{Lane, wait};
use crate::client::new::{fresh_key, wrong};
use crate::client::selftest::Patient;

/// How long a sandbox may take to be well again.
const HEALTHY_WITHIN: Duration = Duration::from_secs(180);

/// How often something is tried again that ended with its sandbox.
const TRIES: u32 = 8;

/// What is left of a session whose driver was killed does not live longer than this.
const LIFETIME_MS: u64 = 30 * 60 * 1000;

/// Little, so that it can be filled.
const MEMORY_BYTES: u64 = 256 << 20;
const DISK_BYTES: u64 = 192 << 20;

const NOTES: &str = "/workspace/notes";

/// A bare repository with one commit, and a clone to work in: where no network is needed to reach it.
const SETUP: &str = "
    set -e
    export HOME=/root GIT_CONFIG_NOSYSTEM=1
    rm -rf /srv/origin.git /workspace/repo
    git init -q --bare -b main /srv/origin.git
    git init -q -b main /workspace/repo && cd /workspace/repo
    git config user.name agent && git config user.email agent@agent
    echo begin > file && git add file && git commit -q -m begin
    git push -q /srv/origin.git main
    git rev-parse HEAD";

/// One more commit, durable before it is told.
const COMMIT: &str = "
    set -e
    export HOME=/root GIT_CONFIG_NOSYSTEM=1
    cd /workspace/repo && rm -f .git/*.lock
    date +%s%N >> work && git add work && git commit -q -m work
    git rev-parse HEAD";

/// The agent of a task: works for as long as it is told, commits, and pushes through the gate.
const AGENT: &str = r#"#!/bin/sh
set -e
export HOME=/root GIT_CONFIG_NOSYSTEM=1
rm -f .git/*.lock
git config user.name agent && git config user.email agent@agent
for count in $(seq "$1"); do viv step; sleep 0.1; done
echo "$VIV_TASK_RUN" >> file
git commit -q -a -m "run $VIV_TASK_RUN"
viv gate --effect push -- git push -q origin HEAD:main
"#;

/// What came of a session.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Told {
    pub(super) session: u64,
    pub(super) fault: &'static str,
    pub(super) at: &'static str,
    /// Whether the fault was really done.
    pub(super) done: bool,
    /// What was recorded and answered.
    pub(super) happened: Vec<String>,
    pub(super) caught_by: Vec<String>,
    /// From the fault until it was verified to be well.
    pub(super) healthy_after_ms: Option<u64>,
    /// What was acknowledged, and how much of it.
    pub(super) acknowledged: usize,
    /// What of it is not there.
    pub(super) lost: Vec<String>,
    /// What kept the session from its end.
    pub(super) failed: Option<String>,
    pub(super) took_ms: u64,
}

pub(super) struct Session<'a> {
    lane: &'a Lane,
    patient: Patient<'a>,
    number: u64,
    kind: &'static Kind,
    fault: Fault,
    id: Option<SandboxId>,
    /// Where the journal stood before the fault.
    before: u64,
    hurt_at: Option<Instant>,
    done: bool,
    healthy_after: Option<Duration>,
    happened: Vec<String>,
    /// Commits that a command told, in the clone.
    commits: BTreeSet<String>,
    notes: Option<Vec<u8>>,
    /// Pushes that were granted and told to be done.
    pushes: u64,
    lost: Vec<String>,
    starts_before: u32,
    carried_before: u64,
    /// Where the journal stood when it was well again, and what had to be asked again until then.
    until: Option<u64>,
    met: Vec<String>,
    /// Whether a handle that was too old was refused.
    refused: bool,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        lane: &'a Lane,
        global: &'a crate::settings::Global,
        number: u64,
        kind: &'static Kind,
        fault: Fault,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            lane,
            patient: Patient::new(global, true)?,
            number,
            kind,
            fault,
            id: None,
            before: 0,
            hurt_at: None,
            done: false,
            healthy_after: None,
            happened: Vec::new(),
            commits: BTreeSet::new(),
            notes: None,
            pushes: 0,
            lost: Vec::new(),
            starts_before: 0,
            carried_before: 0,
            until: None,
            met: Vec::new(),
            refused: false,
        })
    }

    pub(super) fn run(mut self) -> Told {
        let began = Instant::now();
        let failed = self.whole().err().map(|error| format!("{error:#}"));
        if failed.is_some() {
            self.clear_away();
        }
        let events = self.events();
        let mut happened = std::mem::take(&mut self.happened);
        happened.extend(summary(&events));
        let mut caught_by = caught(&events, &self.met, self.refused, self.fault.how != How::Unheard);
        if caught_by.is_empty() && self.done {
            caught_by.push(self.fault.how.absorbed_by().to_owned());
        }
        Told {
            session: self.number,
            fault: self.kind.word,
            at: self.fault.at.word(),
            done: self.done,
            caught_by,
            happened,
            healthy_after_ms: self.healthy_after.map(ms),
            acknowledged: self.commits.len() + usize::from(self.notes.is_some()) + self.pushes as usize,
            lost: self.lost,
            failed,
            took_ms: ms(began.elapsed()),
        }
    }

    /// The whole life of a sandbox.
    fn whole(&mut self) -> anyhow::Result<()> {
        let unheard = self.fault.how == How::Unheard;
        if unheard {
            // The wait for an end is asked once, when it becomes ready.
            self.carried_before = self.lane.carried_out();
            self.lane.order("wait_end", "unheard end", 1)?;
        }
        self.reach(Step::Create)?;
        let made = self.patient.create(&self.request()?)?;
        let id = made.id.clone();
        self.id = Some(id.clone());
        self.well_again(Step::Create)?;

        let notes = format!("session {} of {}", self.number, self.kind.word).into_bytes();
        self.patient.write(&id, &Path::new(NOTES).map_err(wrong)?, &notes)?;
        self.notes = Some(notes);
        let head = self.command(&id, SETUP)?;
        self.commits.insert(head);

        self.work(&id)?;
        self.well_again(Step::Work)?;
        let head = self.command(&id, COMMIT)?;
        self.commits.insert(head);

        self.reach(Step::Rest)?;
        self.hibernate(&id)?;
        self.well_again(Step::Rest)?;
        self.hibernate(&id)?;
        let old = self.patient.get(&id)?.generation;
        self.reach(Step::Resume)?;
        self.patient.resume(&id)?;
        if self.fault.how == How::StaleHandle {
            self.stale_handle(&id, old)?;
        }
        self.well_again(Step::Resume)?;
        self.check(&id)?;

        self.task(&id)?;
        self.check(&id)?;

        self.reach(Step::Delete)?;
        let over = self.patient.delete(&id)?;
        ensure!(over.deleted && over.status == Status::Stopped, "{id} was deleted, and is {}", over.status);
        if self.fault.at == Step::Delete {
            self.settle()?;
            self.recovered();
        }
        Ok(())
    }

    fn request(&self) -> anyhow::Result<CreateSandbox> {
        let label =
            (LabelKey::new("viv-chaos").map_err(wrong)?, LabelValue::new(self.number.to_string()).map_err(wrong)?);
        let policy = CreatePolicy {
            persistent: Some(true),
            lifetime_ms: Some(LifetimeMs::new(LIFETIME_MS).map_err(wrong)?),
            ..CreatePolicy::default()
        };
        // An image of that size is made for it, which takes its time: only for who fills it.
        let disk_bytes =
            (self.fault.how == How::DiskFull).then(|| DISK_BYTES.try_into().map(Limit::Number)).transpose();
        let limits = Limits {
            memory_bytes: Some(Limit::Number(MEMORY_BYTES.try_into().map_err(wrong)?)),
            disk_bytes: disk_bytes.map_err(wrong)?,
            ..Limits::default()
        };
        let labels = Labels::new([label].into()).map_err(wrong)?;
        Ok(CreateSandbox { labels, limits, policy, ..CreateSandbox::default() })
    }

    /// A command runs, something happens to it, and it is well again.
    fn work(&mut self, id: &SandboxId) -> anyhow::Result<()> {
        if self.fault.at == Step::Work && matches!(self.fault.how, How::Order { call: "execute", .. }) {
            self.reach(Step::Work)?;
        }
        let started = self.patient.start(id, &["sh", "-c", "while :; do date >> /tmp/ticks; sleep 0.05; done"]);
        if let Err(error) = &started {
            self.happened.push(format!("a command was refused: {error:#}"));
        }
        if self.hurt_at.is_none() {
            self.reach(Step::Work)?;
        }
        Ok(())
    }

    /// A task is stopped in the middle, and continued until it has pushed.
    fn task(&mut self, id: &SandboxId) -> anyhow::Result<()> {
        let key = fresh_key()?;
        let request = agent(id)?;
        let task = self.patient.ask(|client| client.run_task(&request, Some(&key)))?;
        let task = TaskRef::from(&task.id);
        self.until(&task, |now| now.reported > 0 || now.state.is_final())?;
        self.reach(Step::Task)?;
        let stop = StopTask { wait_ms: Some(WaitMs::nearest(30_000)) };
        let stopped = self.patient.ask(|client| client.stop_task(&task, &stop))?;
        let stopped = if stopped.state.is_final() { stopped } else { self.until(&task, |now| now.state.is_final())? };
        ensure!(stopped.grants.is_empty(), "it was stopped before it asked for anything: {:?}", stopped.grants);
        self.well_again(Step::Task)?;
        for _ in 0..TRIES {
            let run = self.patient.ask(|client| client.task(&task))?.run;
            let request = ContinueTask { argv: Some(words(&["/opt/agent.sh", "1"])?), ..ContinueTask::default() };
            // Asked again after an answer that was lost, it is refused: it runs already.
            let asked = self.patient.once(|client| client.continue_task(&task, &request));
            if let Err(error) = &asked {
                self.happened.push(format!("a task could not be continued: {error}"));
                self.healthy(id)?;
            }
            let now = self.until(&task, |now| now.state.is_final() && (now.run > run || asked.is_err()))?;
            self.pushes = now.grants.iter().filter(|grant| grant.outcome == "done").count() as u64;
            if now.state == TaskState::Succeeded {
                return Ok(());
            }
            self.happened.push(format!("a task ended as {:?}", now.state));
        }
        bail!("a task does not come to its end")
    }

    fn until(&self, task: &TaskRef, so: impl Fn(&Task) -> bool) -> anyhow::Result<Task> {
        let until = Instant::now() + HEALTHY_WITHIN;
        loop {
            let now = self.patient.ask(|client| client.task(task))?;
            if so(&now) {
                return Ok(now);
            }
            ensure!(Instant::now() < until, "the task is {:?} for too long", now.state);
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The fault, when this is where it belongs.
    fn reach(&mut self, step: Step) -> anyhow::Result<()> {
        if self.fault.at != step || self.hurt_at.is_some() {
            return Ok(());
        }
        self.before = self.newest()?;
        self.starts_before = self.lane.starts();
        if self.fault.how != How::Unheard {
            self.carried_before = self.lane.carried_out();
        }
        self.hurt_at = Some(Instant::now());
        match self.fault.how {
            How::Order { call, turn, times } => self.lane.order(call, turn, times),
            How::Harm(harm) => self.harm(harm),
            How::Unheard => self.harm(Harm::KillAgent),
            How::Clock { ms } => {
                self.lane.kill(ms);
                self.done = true;
                self.lane.wait_until_served()
            }
            // Where its sandbox runs again.
            How::StaleHandle => Ok(()),
            How::OutOfMemory => self.exhaust("head -c 600M /dev/zero | tail -c 600M > /dev/null"),
            How::DiskFull => {
                self.exhaust("cat /dev/zero > /workspace/full; code=$?; rm -f /workspace/full; exit $code")
            }
            How::DaemonKilled => {
                self.lane.kill(0);
                self.done = true;
                Ok(())
            }
            How::DaemonReplaced => {
                self.lane.replace()?;
                self.done = true;
                Ok(())
            }
        }
    }

    fn sandbox(&self) -> anyhow::Result<&SandboxId> {
        self.id.as_ref().context("there is no sandbox yet")
    }

    fn harm(&mut self, harm: Harm) -> anyhow::Result<()> {
        let host = self.patient.diagnosis(self.sandbox()?)?.host.context("the daemon does not tell where it is")?;
        harm.done_to(&Parts::from(host)).with_context(|| format!("there was nothing to be hurt: {}", harm.word()))?;
        self.done = true;
        Ok(())
    }

    /// A command takes more than there is.
    fn exhaust(&mut self, script: &str) -> anyhow::Result<()> {
        let id = self.sandbox()?.clone();
        match self.patient.run(&id, &["sh", "-c", script]) {
            Ok(_) => bail!("it had all that it wanted: {script}"),
            Err(error) => self.happened.push(format!("{error:#}")),
        }
        self.done = true;
        Ok(())
    }

    fn stale_handle(&mut self, id: &SandboxId, old: viv_core::Generation) -> anyhow::Result<()> {
        let command = StartExecution::of(["touch", "/workspace/by-an-old-handle"])?;
        match self.patient.once(|client| client.sandbox(SandboxRef::from(id)).at(old).start(&command, None)) {
            Ok(_) => self.lost.push("an old handle was taken for a new one".to_owned()),
            Err(error) => {
                ensure!(error.code() == Some(ErrorCode::StaleHandle), "refused, but not as stale: {error}");
                self.happened.push(format!("refused: {error}"));
                self.refused = true;
            }
        }
        self.done = true;
        Ok(())
    }

    /// What was ordered and has not come up by now is brought up, and then it is over.
    fn settle(&mut self) -> anyhow::Result<()> {
        if self.fault.how == How::Unheard {
            self.done &= wait_a_moment(|| self.lane.carried_out() > self.carried_before);
            self.lane.take_back()?;
        }
        if let How::Order { call, turn, .. } = self.fault.how {
            let is_death = turn.starts_with("killed");
            let happened = || {
                if is_death {
                    self.lane.starts() > self.starts_before
                } else {
                    self.lane.carried_out() > self.carried_before
                }
            };
            // Listings come by themselves; everything else was called for.
            self.done = if call == "list" { wait(happened) } else { happened() || wait_a_moment(happened) };
            if is_death {
                self.lane.wait_until_served()?;
            }
            self.lane.take_back()?;
        }
        Ok(())
    }

    /// After the fault: until it is verified that it is well, and that nothing is lost.
    fn well_again(&mut self, step: Step) -> anyhow::Result<()> {
        if self.fault.at != step {
            return Ok(());
        }
        self.settle()?;
        let id = self.sandbox()?.clone();
        self.healthy(&id)?;
        self.recovered();
        if self.notes.is_some() {
            self.check(&id)?;
        }
        Ok(())
    }

    fn recovered(&mut self) {
        self.healthy_after = self.hurt_at.map(|at| at.elapsed());
        self.met = self.patient.met();
        self.until = self.newest().ok();
    }

    /// Runs, and was just probed along the path that users use.
    fn healthy(&self, id: &SandboxId) -> anyhow::Result<Sandbox> {
        let until = Instant::now() + HEALTHY_WITHIN;
        let mut last = String::new();
        while Instant::now() < until {
            match self.patient.resume(id).and_then(|_| Ok(self.patient.verify(id)?)) {
                Ok(now) if is_well(&now) => return Ok(now),
                Ok(now) => last = now.status.to_string(),
                Err(error) => last = format!("{error:#}"),
            }
            thread::sleep(Duration::from_millis(100));
        }
        bail!("not well within {HEALTHY_WITHIN:?}: {last}")
    }

    /// Saved, however often it has to be asked for.
    fn hibernate(&mut self, id: &SandboxId) -> anyhow::Result<()> {
        let until = Instant::now() + HEALTHY_WITHIN;
        loop {
            match self.patient.hibernate(id) {
                Ok(now) if now.phase == Phase::Hibernated => return Ok(()),
                Ok(now) => self.happened.push(format!("hibernated, and it is {}", now.status)),
                Err(error) => self.happened.push(format!("hibernating: {error:#}")),
            }
            if self.patient.get(id)?.status == Status::SaveFailed {
                let retry =
                    StopSandbox { wait_ms: Some(WaitMs::nearest(30_000)), failed_save: Some(FailedSave::Retry) };
                let again = self.patient.once(|client| client.sandbox(SandboxRef::from(id)).stop(&retry));
                self.happened
                    .push(format!("the save was tried again: {}", if again.is_ok() { "done" } else { "refused" }));
            }
            ensure!(Instant::now() < until, "it is not saved within {HEALTHY_WITHIN:?}");
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// A command to its good end: one that ended with its sandbox is begun again, as an agent would.
    fn command(&mut self, id: &SandboxId, script: &str) -> anyhow::Result<String> {
        let mut last = None;
        for _ in 0..TRIES {
            match self.patient.run(id, &["sh", "-c", script]) {
                Ok(said) => return Ok(String::from_utf8_lossy(&said).trim().to_owned()),
                Err(error) => {
                    self.happened.push(format!("a command was begun again: {error:#}"));
                    last = Some(error);
                    self.healthy(id)?;
                }
            }
        }
        Err(last.context("it was never tried")?)
    }

    /// All that was acknowledged is there.
    fn check(&mut self, id: &SandboxId) -> anyhow::Result<()> {
        if let Some(notes) = &self.notes
            && self.patient.read(id, &Path::new(NOTES).map_err(wrong)?).ok().as_ref() != Some(notes)
        {
            self.lost.push(format!("the file {NOTES}"));
        }
        let known = self.command(id, "git -C /workspace/repo log --format=%H 2>&1 || true")?;
        for commit in &self.commits {
            if !known.contains(commit) {
                self.lost.push(format!("commit {commit}: git says {known:?}"));
            }
        }
        if self.commits.is_empty() {
            return Ok(());
        }
        let pushed = self.command(id, "git -C /srv/origin.git rev-list --count main 2>&1 || true")?;
        let pushed: u64 = pushed.parse().with_context(|| format!("the repository says {pushed:?}"))?;
        // The first commit was there before any task.
        let granted = 1 + self.pushes;
        if pushed < granted {
            self.lost.push(format!("{} of {granted} pushes", granted - pushed));
        }
        ensure!(pushed <= granted, "{pushed} commits were pushed, and {granted} were granted");
        Ok(())
    }

    fn newest(&self) -> anyhow::Result<u64> {
        let mut after = self.before;
        loop {
            let page = self.patient.ask(|client| client.events(&after_events(after, None)))?;
            if page.next_after == after || !page.more {
                return Ok(page.next_after);
            }
            after = page.next_after;
        }
    }

    /// What was recorded about it since.
    fn events(&self) -> Vec<Event> {
        let (Some(id), true) = (&self.id, self.hurt_at.is_some()) else { return Vec::new() };
        let (mut all, mut after) = (Vec::new(), self.before);
        // A session has some hundred lines at most.
        for _ in 0..20 {
            let query = after_events(after, Some(SandboxRef::from(id)));
            let Ok(page) = self.patient.ask(|client| client.events(&query)) else { break };
            let more = page.more && page.next_after > after;
            after = page.next_after;
            all.extend(page.items);
            if !more {
                break;
            }
        }
        all.retain(|event| self.until.is_none_or(|until| event.seq <= until));
        all
    }

    /// A session that failed leaves nothing to the next one.
    fn clear_away(&self) {
        let _ = self.lane.take_back();
        if let Some(id) = &self.id {
            let _ = self.patient.delete(id);
        } else if let Ok(all) = self.patient.labelled(&format!("viv-chaos={}", self.number)) {
            for sandbox in all {
                let _ = self.patient.delete(&sandbox.id);
            }
        }
    }
}

fn after_events(after: u64, sandbox: Option<SandboxRef>) -> ListEvents {
    ListEvents { after: Sequence::new(after).ok(), sandbox, ..ListEvents::default() }
}

fn wait_a_moment(so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + Duration::from_secs(2);
    while !so() && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
    so()
}

fn is_well(sandbox: &Sandbox) -> bool {
    let ok = |probe: Option<ProbeOutcome>| probe == Some(ProbeOutcome::Ok);
    sandbox.status == Status::Ready
        && ok(sandbox.evidence.exec.as_ref().map(|probe| probe.outcome))
        && ok(sandbox.evidence.filesystem.as_ref().map(|probe| probe.outcome))
}

/// Where it went unasked, with why.
fn summary(events: &[Event]) -> Vec<String> {
    let moved = events.iter().filter_map(|event| Some((event.from?, event.to?, event.cause.as_ref()?.code.as_str())));
    let unasked =
        moved.filter(|(_, _, why)| !matches!(*why, "made" | "verified" | "saved") && !why.starts_with("user_"));
    unasked.map(|(from, to, why)| format!("{from} to {to} ({why})")).collect()
}

fn words(words: &[&str]) -> anyhow::Result<Argv> {
    let words: Result<Vec<Argument>, _> = words.iter().map(|word| Argument::new(*word)).collect();
    Ok(Argv::new(words.map_err(wrong)?).map_err(wrong)?)
}

/// The agent as a task.
fn agent(id: &SandboxId) -> anyhow::Result<CreateTask> {
    let source = TaskSource {
        git: "/srv/origin.git".parse().map_err(wrong)?,
        reference: None,
        path: Some(Path::new("/work").map_err(wrong)?),
    };
    let file = TaskFile {
        path: "/opt/agent.sh".parse().map_err(wrong)?,
        text: AGENT.parse().map_err(wrong)?,
        mode: Some("0755".parse().map_err(wrong)?),
    };
    let push = TaskEffect { name: EffectName::new("push").map_err(wrong)?, repeatable: true };
    Ok(CreateTask {
        sandbox: Some(SandboxRef::from(id)),
        argv: Some(words(&["/opt/agent.sh", "100000"])?),
        source: Some(source),
        files: TaskFiles::new(vec![file]).map_err(wrong)?,
        effects: TaskEffects::new(vec![push]).map_err(wrong)?,
        keep_alive: true,
        ..CreateTask::default()
    })
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
