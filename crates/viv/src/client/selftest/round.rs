//! One round: what is done, and what must be so then.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use viv_api::bound::{LabelFilter, LabelKey, LabelValue, Labels, LifetimeMs, Path, SandboxName};
use viv_api::execution::ExecutionState;
use viv_api::sandbox::{CreatePolicy, CreateSandbox, Hibernate, MemoryState, Phase, ProbeOutcome, Sandbox, Status};
use viv_api::snapshot::SnapshotState;
use viv_core::{ExecutionId, Generation, SandboxId, SnapshotId};

use super::Telling;
use super::left::Footprint;
use super::patient::Patient;
use crate::client::new::wrong;

/// Where the file is.
const FOLDER: &str = "/workspace/selftest";
const NAME: &str = "file";

/// Large enough that it takes several pieces on the way, small enough to be read back by a command's output.
const CONTENT_BYTES: usize = 64 << 10;

/// Counts in its memory.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done";

/// How long it may take for its next number, on a crowded machine.
const COUNTS_WITHIN: Duration = Duration::from_secs(60);

/// Between two looks at it.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a daemon calls it when it can save memory.
const SAVE_MEMORY: &str = "save_memory";

/// What is left of a round whose client was killed does not live longer than this.
const LIFETIME_MS: u64 = 15 * 60 * 1000;

/// The label by which the sandboxes of a round are found.
const LABEL: &str = "viv-selftest";

/// One round.
pub(super) struct Round<'a> {
    patient: &'a Patient<'a>,
    /// The value of the label.
    mark: String,
    folder: Path,
    file: Path,
    /// What the file is to hold.
    content: Vec<u8>,
    /// All that were made, the last one first.
    made: Vec<SandboxId>,
    footprint: Footprint,
}

/// What was saved by hand, and what the file held then.
struct Saved {
    id: SnapshotId,
    content: Vec<u8>,
}

/// What came of a step, and what is said about it.
type Step<T> = anyhow::Result<(T, String)>;

impl<'a> Round<'a> {
    pub(super) fn new(patient: &'a Patient<'a>) -> anyhow::Result<Self> {
        let random = random(CONTENT_BYTES / 2 + 8)?;
        let hex: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let (mark, content) = hex.split_at(16);
        Ok(Self {
            patient,
            mark: mark.to_owned(),
            folder: Path::new(FOLDER).map_err(wrong)?,
            file: Path::new(format!("{FOLDER}/{NAME}")).map_err(wrong)?,
            content: content.as_bytes().to_vec(),
            made: Vec::new(),
            footprint: Footprint::default(),
        })
    }

    /// All steps; the first that fails is the last.
    pub(super) fn run(&mut self, telling: &mut Telling) -> anyhow::Result<()> {
        let made = telling.step("create", || self.create())?;
        let id = &made.id;
        telling.step("copy in", || self.copy_in(id))?;
        self.look(telling, id)?;
        telling.step("freeze", || self.freeze(id))?;
        telling.step("thaw", || self.thaw(id, made.generation))?;
        let snapshot = telling.step("snapshot", || self.snapshot(id))?;
        telling.step("change", || self.change(id))?;
        let runs = self.patient.start(id, &["sh", "-c", COUNT])?;
        let stopped = telling.step("hibernate", || self.hibernate(id, &runs))?;
        telling.step("resume", || self.resume(id, &stopped, &runs))?;
        self.look(telling, id)?;
        if is_kept(&stopped) {
            telling.step("fork with memory", || self.fork_memory(id, &runs))?;
        }
        let (forked, fork_content) = telling.step("fork", || self.fork(id, &snapshot))?;
        telling.step("rollback", || self.rollback(id, &snapshot))?;
        self.look(telling, id)?;
        telling.step("fork stays", || self.fork_stays(&forked, &fork_content))?;
        telling.step("delete", || self.delete())?;
        telling.step("nothing left", || self.nothing_left())
    }

    /// The file is there, by every way there is.
    fn look(&self, telling: &mut Telling, id: &SandboxId) -> anyhow::Result<()> {
        telling.step("file", || self.file(id))?;
        telling.step("exec", || self.exec(id))?;
        telling.step("listing", || self.listing(id))
    }

    fn label(&self) -> String {
        format!("{LABEL}={}", self.mark)
    }

    fn create(&mut self) -> Step<Sandbox> {
        let label = (LabelKey::new(LABEL).map_err(wrong)?, LabelValue::new(self.mark.clone()).map_err(wrong)?);
        let policy = CreatePolicy {
            persistent: Some(true),
            lifetime_ms: Some(LifetimeMs::new(LIFETIME_MS).map_err(wrong)?),
            // Where that cannot be, its files are, and it is said.
            hibernate: Some(Hibernate::Memory),
            ..CreatePolicy::default()
        };
        let labels = Labels::new(BTreeMap::from([label])).map_err(wrong)?;
        let made = self.patient.create(&CreateSandbox { labels, policy, ..CreateSandbox::default() })?;
        self.made.insert(0, made.id.clone());
        let made = self.ready(&made.id, Generation::FIRST)?;
        let said = made.id.to_string();
        Ok((made, said))
    }

    /// It is ready, as this generation, and says so because it was just probed (T2).
    fn ready(&mut self, id: &SandboxId, generation: Generation) -> anyhow::Result<Sandbox> {
        let sandbox = self.patient.verify(id)?;
        let exec = sandbox.evidence.exec.as_ref().map(|probe| probe.outcome);
        let filesystem = sandbox.evidence.filesystem.as_ref().map(|probe| probe.outcome);
        ensure!(sandbox.status == Status::Ready, "{id} is {}", sandbox.status);
        ensure!(
            (exec, filesystem) == (Some(ProbeOutcome::Ok), Some(ProbeOutcome::Ok)),
            "{id} is called ready, and its probes say {exec:?} and {filesystem:?}"
        );
        ensure!(sandbox.generation == generation, "{id} is generation {}, not {generation}", sandbox.generation);
        if let Some(host) = self.patient.diagnosis(id)?.host {
            self.footprint.add(&host);
        }
        Ok(sandbox)
    }

    fn copy_in(&self, id: &SandboxId) -> Step<()> {
        self.patient.make_dir(id, &self.folder)?;
        self.patient.write(id, &self.file, &self.content)?;
        Ok(((), format!("{} bytes", self.content.len())))
    }

    fn file(&self, id: &SandboxId) -> Step<()> {
        ensure!(self.patient.read(id, &self.file)? == self.content, "{} holds something else", self.file);
        Ok(((), String::new()))
    }

    fn exec(&self, id: &SandboxId) -> Step<()> {
        let said = self.patient.run(id, &["cat", self.file.as_str()])?;
        ensure!(said == self.content, "a command reads {} other bytes in {}", said.len(), self.file);
        Ok(((), String::new()))
    }

    fn listing(&self, id: &SandboxId) -> Step<()> {
        let listing = self.patient.list(id, &self.folder)?;
        let [entry] = &listing.entries[..] else {
            anyhow::bail!("{} lists {} entries instead of one", self.folder, listing.entries.len())
        };
        let size_bytes = entry.stat.size_bytes;
        ensure!(
            entry.path == NAME && size_bytes == self.content.len() as u64,
            "{} lists {} with {size_bytes} bytes",
            self.folder,
            entry.path
        );
        Ok(((), String::new()))
    }

    fn freeze(&self, id: &SandboxId) -> Step<()> {
        let frozen = self.patient.freeze(id)?;
        ensure!(frozen.phase == Phase::Frozen, "{id} is {}", frozen.status);
        ensure!(self.patient.is_refused(id)?, "a command runs in what is frozen");
        Ok(((), String::new()))
    }

    /// The same instance goes on (T5), and is probed before it is called ready (T4).
    fn thaw(&mut self, id: &SandboxId, before: Generation) -> Step<()> {
        self.patient.thaw(id)?;
        self.ready(id, before)?;
        self.exec(id)
    }

    fn snapshot(&mut self, id: &SandboxId) -> Step<Saved> {
        let name = SandboxName::new(format!("selftest-{}", self.mark)).map_err(wrong)?;
        let snapshot = self.patient.snapshot(id, &name)?;
        ensure!(snapshot.state == SnapshotState::Ready, "{} is {:?}", snapshot.id, snapshot.state);
        let stood = snapshot.paused_ms.map_or_else(String::new, |ms| format!(", stood still for {ms}ms"));
        let said = format!("{}{stood}", snapshot.id);
        Ok((Saved { id: snapshot.id, content: self.content.clone() }, said))
    }

    /// Something else from now on, so that going back can be seen.
    fn change(&mut self, id: &SandboxId) -> Step<()> {
        self.content.reverse();
        self.copy_in(id)
    }

    /// Another sandbox, with what was in the snapshot; what is written in it is nobody else's.
    fn fork(&mut self, id: &SandboxId, saved: &Saved) -> Step<(SandboxId, Vec<u8>)> {
        let label: LabelFilter = format!("{LABEL}-fork={}", self.mark).parse()?;
        let forked = self.patient.fork(&saved.id, &label)?.id;
        ensure!(forked != *id, "a fork is the same sandbox");
        self.made.insert(0, forked.clone());
        self.ready(&forked, Generation::FIRST)?;
        ensure!(self.patient.read(&forked, &self.file)? == saved.content, "the fork holds something else");
        let content = b"what the fork wrote".to_vec();
        self.patient.write(&forked, &self.file, &content)?;
        self.file(id).context("what the fork wrote is seen where it came from")?;
        let said = forked.to_string();
        Ok(((forked, content), said))
    }

    /// The same sandbox as it was, as another generation (T5).
    fn rollback(&mut self, id: &SandboxId, saved: &Saved) -> Step<()> {
        let before = self.patient.get(id)?;
        let now = self.patient.rollback(id, &saved.id)?;
        ensure!(now.generation > before.generation, "{id} is still generation {}", now.generation);
        ensure!(now.policy == before.policy, "its policy is another (L16)");
        self.content.clone_from(&saved.content);
        let now = self.ready(id, now.generation)?;
        Ok(((), format!("generation {}", now.generation)))
    }

    fn fork_stays(&self, forked: &SandboxId, content: &[u8]) -> Step<()> {
        ensure!(self.patient.read(forked, &self.file)? == content, "the fork holds something else");
        Ok(((), String::new()))
    }

    /// What runs is suspended if its memory was saved, and lost if not (X5).
    fn hibernate(&self, id: &SandboxId, runs: &ExecutionId) -> Step<Sandbox> {
        // Something has to be in its memory.
        self.goes_on(id, runs, "")?;
        let stopped = self.patient.hibernate(id)?;
        ensure!(stopped.phase == Phase::Hibernated, "{id} is {}", stopped.status);
        ensure!(self.patient.is_refused(id)?, "a command runs in what is hibernated");
        let saved = self.patient.diagnosis(id)?.auto_saved.context("nothing was saved")?;
        let memory = stopped.memory.as_ref().context("nothing is said about its memory")?;
        let (wanted, said) = match (memory.state, &memory.why) {
            (MemoryState::Kept, _) => (ExecutionState::Suspended, "with its memory".to_owned()),
            (state, why) => {
                let why = why.as_deref().unwrap_or("nobody says why");
                ensure!(state == MemoryState::NotSaved, "its memory is {state:?}");
                // What is declared is kept, or is not to be declared (P6).
                ensure!(!self.patient.can(SAVE_MEMORY)?, "the daemon says that it saves memory, and did not: {why}");
                (ExecutionState::Lost, format!("without its memory: {why}"))
            }
        };
        let is = self.patient.execution(id, runs)?.state;
        ensure!(is == wanted, "what ran is {is:?}, not {wanted:?}");
        Ok((stopped, format!("saved as {}, {said}", saved.id)))
    }

    /// Another generation (T5), with all that was there.
    fn resume(&mut self, id: &SandboxId, before: &Sandbox, runs: &ExecutionId) -> Step<()> {
        self.patient.resume(id)?;
        let now = self.ready(id, before.generation.next())?;
        if is_kept(before) {
            let is = self.patient.execution(id, runs)?.state;
            ensure!(is == ExecutionState::Running, "what was suspended is {is:?}");
            let said = self.patient.said(id, runs)?;
            self.goes_on(id, runs, &said)?;
        }
        Ok(((), format!("generation {}", now.generation)))
    }

    /// Another sandbox in which what runs goes on from here.
    fn fork_memory(&mut self, id: &SandboxId, runs: &ExecutionId) -> Step<()> {
        let label: LabelFilter = format!("{LABEL}-memory={}", self.mark).parse()?;
        let said = self.patient.said(id, runs)?;
        let forked = self.patient.fork_memory(id, &label)?.id;
        self.made.insert(0, forked.clone());
        self.ready(&forked, Generation::FIRST)?;
        self.goes_on(&forked, &runs.copied_into(&forked), &said)?;
        self.goes_on(id, runs, &said)?;
        let said = forked.to_string();
        Ok(((), said))
    }

    /// What counts says the next numbers after what it has said, and leaves none out.
    fn goes_on(&self, id: &SandboxId, counter: &ExecutionId, before: &str) -> anyhow::Result<()> {
        let until = Instant::now() + COUNTS_WITHIN;
        loop {
            let said = self.patient.said(id, counter)?;
            let whole = said.rfind('\n').map_or("", |end| &said[..end]);
            let wrong = whole.lines().zip(1_u64..).find(|(line, number)| *line != number.to_string());
            ensure!(wrong.is_none(), "{counter} counts wrong: {wrong:?}");
            ensure!(said.starts_with(before), "{counter} does not say any more what it said");
            if said.len() > before.len() {
                return Ok(());
            }
            ensure!(Instant::now() < until, "{counter} says nothing more within {COUNTS_WITHIN:?}");
            thread::sleep(LOOK_EVERY);
        }
    }

    fn delete(&self) -> Step<()> {
        for id in &self.made {
            let over = self.patient.delete(id)?;
            ensure!(over.deleted && over.status == Status::Stopped, "{id} is {}", over.status);
        }
        Ok(((), String::new()))
    }

    /// No record lives, nothing answers, and nothing is on the machine of what was (L20).
    fn nothing_left(&self) -> Step<()> {
        let live = self.patient.labelled(&self.label())?;
        ensure!(live.is_empty(), "{} are still listed", live.len());
        for id in &self.made {
            let tombstone = self.patient.get(id)?;
            ensure!(tombstone.deleted && tombstone.phase == Phase::Stopped, "{id} is {}", tombstone.status);
            let kept = self.patient.snapshots(id)?;
            ensure!(kept.is_empty(), "{} snapshots of {id} are still there", kept.len());
        }
        let left = self.footprint.left();
        ensure!(left.is_empty(), "still there: {}", left.join(", "));
        Ok((
            (),
            match self.footprint.len() {
                0 => "as the daemon says; this machine was not looked at".to_owned(),
                count => format!("none of {count} processes, cgroups and folders"),
            },
        ))
    }

    /// What becomes of a round that failed: a word on where to look, or it is cleared away.
    pub(super) fn leave(&self, keep: bool) {
        // One that did not become ready was made all the same, and nobody was told its id.
        let listed = self.patient.labelled(&self.label()).unwrap_or_default().into_iter().map(|sandbox| sandbox.id);
        let all: BTreeSet<SandboxId> = listed.chain(self.made.iter().cloned()).collect();
        for id in &all {
            if keep {
                eprintln!("hint: `viv show --diagnosis {id}` says more, `viv rm {id}` removes it");
            } else if let Err(error) = self.patient.delete(id) {
                eprintln!("viv: {id} could not be deleted: {error:#}");
            }
        }
    }
}

fn random(count: usize) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    let mut filled = 0;
    while filled < count {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

fn is_kept(sandbox: &Sandbox) -> bool {
    sandbox.memory.as_ref().is_some_and(|memory| memory.state == MemoryState::Kept)
}
