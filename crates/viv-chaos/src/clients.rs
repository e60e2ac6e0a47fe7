//! What clients do, what they are told, and what must hold of that. They behave like agents: they ask again when no
//! answer comes, hold handles for long, and do not wait for each other.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use viv_core::exec::ExecSpec;
use viv_core::hook::{Hook, HookAction, HookPoint, OnFailure};
use viv_core::lifecycle::{Desired, EVIDENCE_MS_MAX, EntryKind, Finding, FreezeStep, Phase, Status};
use viv_core::service::{Readiness, Restart, RestartPolicy, ServiceSpec};
use viv_core::spec::{Hibernate, Policy, Project, SandboxSpec};
use viv_core::{EndCause, Generation, SandboxId, SnapshotId, TaskId};
use viv_engine::{Aim, CreateRequest, Engine, EngineError, Handle, KeyedBy, View, Which};
use viv_provider::{DeadlineChange, FileWrite, InstanceRef, InstanceState, Provider, ResourceLimits};
use viv_store::{ListQuery, Store};

use crate::at_once::at_once;
use crate::faulty::Damage;
use crate::invariants::{Found, holds};
use crate::plan::{Deed, Trouble};
use crate::rng::Rng;
use crate::world::{TICK_MS, World, holder, somebody};

/// Most sandboxes that a world has seen.
const KNOWN_MAX: usize = 16;

/// After this long a client gives up waiting; what it asked for goes on.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// What a client was told.
#[derive(Debug)]
pub(crate) enum Told {
    /// How a sandbox is.
    View(Box<View>),
    /// What there is now.
    All(Vec<SandboxId>),
    /// That its handle is good for this generation, and which one it had asked for.
    Handle(Option<Generation>, Generation),
    /// That it can be used, which rested when it was asked for, and nobody else could have woken.
    Woken,
    /// That this task is to stop, in this run.
    Stopping(TaskId, u32),
    /// That this file was written.
    Written(String, Option<Generation>, Generation),
    /// That it was done.
    Done,
}

/// An answer, and what was known when it was asked for.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) deed: Deed,
    pub(crate) id: Option<SandboxId>,
    pub(crate) was_ended: bool,
    pub(crate) was_draining: Option<bool>,
    pub(crate) drains: u64,
    /// It was to begin with this, which was damaged by then, in a world where nothing goes wrong.
    pub(crate) damaged: Option<SnapshotId>,
    /// Since when the daemon was there that was asked.
    pub(crate) began: Instant,
    pub(crate) told: Result<Told, EngineError>,
}

fn argv(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

async fn hold(engine: &Engine, id: &SandboxId, asked: Option<Generation>) -> Result<Handle, EngineError> {
    engine.work_in(&Project::default(), &Which::Id(id.clone()), asked).await
}

impl World<'_> {
    /// Asks, and waits for the answer, or does not.
    pub(crate) async fn ask<F>(&mut self, deed: Deed, id: Option<&SandboxId>, asked: F) -> Found
    where
        F: Future<Output = Result<Told, EngineError>> + Send + 'static,
    {
        let was_ended = id.and_then(|id| self.known.get(id)).is_some_and(|known| known.ended);
        let (id, was_draining, drains) = (id.cloned(), self.draining, self.drains);
        let slow = matches!(deed, Deed::Snapshot | Deed::Fork | Deed::RemoveSnapshot | Deed::ExecuteWaking);
        let waits = !(slow || self.swarm.has(Trouble::Races) && self.rng.chance(50));
        self.tell(&format!("{} {}", deed.word(), id.as_ref().map(ToString::to_string).unwrap_or_default()));
        let (answers, pending, began) = (self.answers.clone(), self.pending.clone(), self.began);
        let damaged = self.begins_with.take().filter(|snapshot| self.is_calm() && self.provider.is_damaged(snapshot));
        pending.fetch_add(1, Ordering::SeqCst);
        // In a task of its own, as a server has it: whoever asked may go away.
        let task = tokio::spawn(async move {
            let told = asked.await;
            pending.fetch_sub(1, Ordering::SeqCst);
            let answer = Answer { deed, id, was_ended, was_draining, drains, damaged, began, told };
            answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        });
        if waits {
            let line = self.line.clone();
            tokio::select! {
                biased;
                _ = task => {}
                () = line.has_been_cut() => {}
                () = tokio::time::sleep(PATIENCE) => {}
            }
        }
        let heard = std::mem::take(&mut *self.answers.lock().unwrap_or_else(PoisonError::into_inner));
        for answer in heard {
            self.hear(answer).await?;
        }
        Ok(())
    }

    /// Somebody still speaks to a daemon that was away, and does not know that another took over: whatever it answers
    /// has to be so.
    pub(crate) fn ask_who_was_away(&mut self, engine: Engine) {
        let Some(id) = self.someone() else { return };
        let deed = if self.rng.chance(50) { Deed::Stop } else { Deed::Read };
        self.tell(&format!("{} {id}, by who was away", deed.word()));
        let (answers, drains, began) = (self.answers.clone(), self.drains, self.began);
        tokio::spawn(async move {
            let told = match deed {
                Deed::Stop => engine.stop(&id, somebody()).await,
                _ => engine.get(&Project::default(), &Which::Id(id.clone()), "a client").await,
            };
            let told = told.map(|view| Told::View(Box::new(view)));
            let (id, was_ended, was_draining, damaged) = (Some(id), false, None, None);
            let answer = Answer { deed, id, was_ended, was_draining, drains, damaged, began, told };
            answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        });
    }

    /// Something is done to, or asked about, somebody.
    pub(crate) async fn act(&mut self, deed: Deed) -> Found {
        match deed {
            Deed::Create => return self.create(None).await,
            Deed::CreateFrom => {
                let Some(snapshot) = self.some_snapshot().await else { return Ok(()) };
                return self.create(Some(snapshot)).await;
            }
            Deed::List => {
                let engine = self.engine();
                let listed = async move { engine.list(&ListQuery { limit: 100, ..ListQuery::default() }).await };
                return self.ask(deed, None, async move { listed.await.map(|_| Told::Done) }).await;
            }
            Deed::Reconcile => {
                self.engine().reconcile();
                return Ok(());
            }
            Deed::Drain | Deed::Undrain => return self.drain(deed).await,
            Deed::Task => return self.run_task().await,
            Deed::StopTask | Deed::ContinueTask => return self.turn_task(deed).await,
            Deed::RunSchedule | Deed::RemoveSchedule => return self.schedules(deed).await,
            Deed::RemoveSnapshot => return self.remove_snapshot().await,
            Deed::DamageSnapshot => {
                let Some(snapshot) = self.some_snapshot().await else { return Ok(()) };
                self.tell(&format!("{}: {snapshot}", deed.word()));
                if self.provider.damage_snapshot(&snapshot) {
                    self.did(deed);
                }
                return Ok(());
            }
            _ => {}
        }
        let Some(id) = self.someone() else { return Ok(()) };
        if matches!(deed, Deed::Rollback | Deed::Reset | Deed::Discard) {
            self.known.entry(id.clone()).or_default().went_back = true;
        }
        if deed == Deed::Schedule {
            self.known.entry(id.clone()).or_default().wakes_itself = true;
        }
        match deed {
            Deed::Read => Box::pin(self.read(&id)).await,
            Deed::Snapshot | Deed::Rollback | Deed::Fork => self.snapshots(deed, &id).await,
            Deed::Schedule => self.schedule(&id).await,
            Deed::Execute | Deed::ExecuteWaking | Deed::Work => self.execute(deed, &id).await,
            Deed::KillService => self.kill_service(&id).await,
            Deed::Crash | Deed::Hang | Deed::LoseRoot | Deed::Deny | Deed::Pose | Deed::Mend => {
                self.damage(deed, &id).await;
                Ok(())
            }
            _ => self.verb(deed, id).await,
        }
    }

    /// A verb that answers with how the sandbox is then.
    pub(crate) async fn verb(&mut self, deed: Deed, id: SandboxId) -> Found {
        let engine = self.engine();
        let waits = self.rng.chance(50);
        let ms = 1_000 + self.rng.below(60_000);
        let path = format!("/workspace/{}", self.step);
        // Who asks for something may have held its handle for long, too, and says so.
        let held = self.known.get(&id).and_then(|known| known.handle).filter(|_| self.rng.chance(50));
        let by = held.map_or_else(somebody, |held| holder(&id, held, deed, self.step));
        let asked = {
            let id = id.clone();
            async move {
                let aim = || Aim::at(id.clone(), held);
                let view = match deed {
                    Deed::Ensure => {
                        let view = engine.ensure(aim(), EntryKind::Ensure, by).await?;
                        if waits { engine.wait_ready(&id, Duration::from_secs(60)).await? } else { view }
                    }
                    Deed::Thaw => engine.thaw(aim(), by).await?,
                    Deed::Freeze => engine.freeze(aim(), by).await?,
                    Deed::Hibernate => engine.hibernate(aim(), by).await?,
                    Deed::Stop => engine.stop(aim(), by).await?,
                    Deed::RetrySave => engine.retry_save(aim(), by).await?,
                    Deed::Discard => engine.discard(aim(), by).await?,
                    Deed::Delete => engine.delete(aim(), by).await?,
                    Deed::Reset => engine.reset(aim(), by).await?,
                    Deed::Verify => engine.verify(&id).await?,
                    Deed::KeepAwake => engine.keep_awake(aim(), "model", ms, "it thinks", by).await?,
                    Deed::Extend => {
                        let handle = hold(&engine, &id, held).await?;
                        engine.extend(&handle, DeadlineChange::AtLeastMs(600_000), &by).await?;
                        return Ok(Told::Done);
                    }
                    Deed::Write => {
                        let handle = hold(&engine, &id, held).await?;
                        let file = FileWrite { path: path.clone(), ..FileWrite::default() };
                        handle.file_write(&file, Box::new(std::io::Cursor::new(b"work".to_vec()))).await?;
                        return Ok(Told::Written(path, held, handle.generation()));
                    }
                    Deed::Limit => {
                        let handle = hold(&engine, &id, held).await?;
                        let change = ResourceLimits { memory_bytes: Some(ms << 20), ..ResourceLimits::default() };
                        engine.set_limits(&handle, &change, &by).await?;
                        return Ok(Told::Done);
                    }
                    _ => return Ok(Told::Done),
                };
                Ok(Told::View(Box::new(view)))
            }
        };
        self.ask(deed, Some(&id), asked).await
    }

    async fn create(&mut self, snapshot: Option<SnapshotId>) -> Found {
        let living = self.known.values().filter(|known| !known.ended).count();
        if living >= self.living_max || self.known.len() >= KNOWN_MAX {
            return Ok(());
        }
        self.asked += 1;
        let key = format!("key-{}", self.asked);
        let name = (self.swarm.has(Trouble::Names) && self.rng.chance(50)).then(|| {
            let name = format!("name-{}", self.rng.below(4));
            name.parse().expect("a name")
        });
        let policy = self.policy();
        self.begins_with.clone_from(&snapshot);
        let deed = if snapshot.is_some() { Deed::CreateFrom } else { Deed::Create };
        let request = CreateRequest {
            project: Project::default(),
            name,
            spec: self.spec(),
            policy,
            labels: BTreeMap::new(),
            snapshot,
            by: somebody(),
            key: Some(KeyedBy { key, body_hash: [7; 32] }),
        };
        // A client that got no answer asks again with the same key, as clients do.
        let (engine, times) = (self.engine(), 1 + self.rng.below(3));
        let asked = async move {
            let mut made = Vec::new();
            let mut failed = None;
            for _ in 0..times {
                match engine.create(request.clone()).await {
                    Ok(created) => made.push(created.view.sandbox.id),
                    Err(error) => failed = Some(error),
                }
            }
            match failed {
                Some(error) if made.is_empty() => Err(error),
                _ => Ok(Told::All(made)),
            }
        };
        self.ask(deed, None, asked).await
    }

    pub(crate) fn policy(&mut self) -> Policy {
        let short = self.swarm.has(Trouble::ShortLives) && self.rng.chance(30);
        let lifetime_ms = if short { 60_000 + self.rng.below(120_000) } else { 12 * 3_600_000 };
        let persistent = self.rng.chance(50);
        // Those that idle at all do so soon enough to be seen, and are done with it when everything has to rest.
        let idles = self.swarm.has(Trouble::Idling);
        let window_ms =
            |rng: &mut Rng| if idles && rng.chance(50) { 5_000 + rng.below(80_000) } else { 24 * 3_600_000 };
        let (idle_ms, hibernate_ms) = (window_ms(&mut self.rng), window_ms(&mut self.rng));
        let memory = self.swarm.has(Trouble::Memory) && self.rng.chance(50);
        let hibernate = if memory { Hibernate::Memory } else { Hibernate::Filesystem };
        Policy { persistent, lifetime_ms, idle_ms, hibernate_ms, hibernate, ..Policy::default_for(None) }
    }

    pub(crate) fn spec(&mut self) -> SandboxSpec {
        let mut spec = SandboxSpec::default();
        if self.swarm.has(Trouble::Services) && self.rng.chance(50) {
            for name in ["web", "db"].iter().take(1 + self.rng.below(2) as usize) {
                // Most run for ever, some for a while.
                let runs_s = if self.rng.chance(80) { 1_000_000 } else { 1 + self.rng.below(60) };
                let ready = match self.rng.below(3) {
                    0 => Readiness::Runs { ms: self.rng.below(2_000) },
                    1 => Readiness::Command { argv: argv(&["echo", "ok"]) },
                    _ => Readiness::Runs { ms: 0 },
                };
                let policy = match self.rng.below(3) {
                    0 => RestartPolicy::Never,
                    1 => RestartPolicy::OnFailure,
                    _ => RestartPolicy::Always,
                };
                spec.services.push(ServiceSpec {
                    name: name.parse().expect("a name"),
                    argv: argv(&["/bin/sleep", &runs_s.to_string()]),
                    env: BTreeMap::new(),
                    cwd: None,
                    user: None,
                    ready,
                    ready_within_ms: 20_000,
                    restart: Restart { policy, ..Restart::default() },
                    nudge: None,
                });
            }
        }
        if self.swarm.has(Trouble::Hooks) && self.rng.chance(50) {
            for point in HookPoint::ALL {
                if self.rng.chance(50) {
                    continue;
                }
                let words: &[&str] = match self.rng.below(4) {
                    0 => &["/bin/sleep", "1"],
                    1 if point == HookPoint::BeforeStop => &["/bin/sleep", "10"],
                    1 if self.rng.chance(20) => &["/bin/sh", "-c", "exit 1"],
                    _ => &["echo", "done"],
                };
                let on_failure = if self.rng.chance(30) { OnFailure::Abort } else { OnFailure::Ignore };
                let action = HookAction::Command { argv: argv(words) };
                spec.hooks.insert(point, Hook { action, deadline_ms: 3_000, on_failure });
            }
        }
        spec
    }

    /// What is read is checked as a client would, and that it was only read.
    async fn read(&mut self, id: &SandboxId) -> Found {
        let engine = self.engine();
        let before = (at_once(self.store.truth.get(id)).await.ok().flatten(), *self.store.tail().borrow());
        let mutations = self.provider.mutations();
        // The store in memory does not wait, so nothing happens between, unless the daemon is dead.
        let (project, which) = (Project::default(), Which::Id(id.clone()));
        let read = engine.get(&project, &which, "a client");
        let line = self.line.clone();
        let view = tokio::select! {
            biased;
            view = read => view,
            () = line.has_been_cut() => return Ok(()),
        };
        let after = (at_once(self.store.truth.get(id)).await.ok().flatten(), *self.store.tail().borrow());
        let same = before == after && mutations == self.provider.mutations();
        holds("reads-change-nothing", same, || format!("{id} was read, and {before:?} became {after:?}"))?;
        let Ok(view) = view else { return Ok(()) };
        self.shown(&view).await
    }

    /// Something is shown to somebody.
    async fn shown(&mut self, view: &View) -> Found {
        let id = &view.sandbox.id;
        let now = at_once(self.store.truth.get(id)).await.ok().flatten();
        let version = now.as_ref().map(|record| record.version);
        holds("durable-before-answer", version >= Some(view.sandbox.version), || {
            format!("{id} was shown at version {}, and is at {version:?}", view.sandbox.version)
        })?;
        let generation = now.map(|record| record.generation);
        holds("shown-generations-stay", generation >= Some(view.sandbox.generation), || {
            format!("{id} was shown as {}, and is {generation:?}", view.sandbox.generation)
        })?;
        let known = self.known.entry(id.clone()).or_default();
        known.shown = known.shown.max(Some(view.sandbox.generation));
        if view.status != Status::Ready {
            return Ok(());
        }
        self.report.ready += 1;
        let age_ms = view.evidence.age_ms(view.now_ms);
        let well = view.evidence.finding_for(&view.sandbox.spec) == Some(Finding::Ok);
        holds("ready-is-shown-on-evidence", well && age_ms.is_some_and(|age_ms| age_ms <= EVIDENCE_MS_MAX), || {
            format!("{id} is called ready on {:?} at {}", view.evidence, view.now_ms)
        })?;
        // The end of an instance is pushed: a tick later nobody is told that it is ready.
        let instance = InstanceRef { sandbox: id.clone(), generation: view.sandbox.generation };
        if self.is_calm()
            && self.provider.damage_of(id) != Some(Damage::Poses)
            && let Ok(seen) = self.provider.truth().observe(&instance).await
            && let InstanceState::Ended(ended) = &seen.state
        {
            let since_ms = view.now_ms.saturating_sub(ended.at_ms);
            holds("ends-are-shown", since_ms <= 1_000 + 2 * TICK_MS, || {
                format!("{id} is called ready and has {} for {since_ms} ms", seen.state)
            })?;
        }
        Ok(())
    }

    async fn execute(&mut self, deed: Deed, id: &SandboxId) -> Found {
        let engine = self.engine();
        // A handle may be generations behind: a client renews it now and then.
        let asked = self.known.get(id).and_then(|known| known.handle).filter(|_| self.rng.chance(70));
        let seconds = (1 + self.rng.below(40)).to_string();
        let words = if deed == Deed::Work { argv(&["/bin/sleep", &seconds]) } else { argv(&["echo", "hello"]) };
        let spec = ExecSpec { argv: words, limit_ms: Some(300_000), ..ExecSpec::default() };
        let sandbox = id.clone();
        let rests = deed != Deed::ExecuteWaking && self.rests(id).await;
        let asked = async move {
            if deed == Deed::ExecuteWaking {
                engine.ensure(&sandbox, EntryKind::Ensure, somebody()).await?;
                engine.wait_ready(&sandbox, Duration::from_secs(60)).await?;
            }
            let handle = hold(&engine, &sandbox, asked).await?;
            // That it does not run after all is for the client to find out; the handle was good.
            let _ = handle.execute(&handle.new_execution(), &spec).await;
            if rests {
                return Ok(Told::Woken);
            }
            Ok(Told::Handle(asked, handle.generation()))
        };
        self.ask(deed, Some(id), asked).await
    }

    /// Whether it rests, and nobody is there who could wake it but who asks now.
    async fn rests(&self, id: &SandboxId) -> bool {
        let Ok(Some(record)) = at_once(self.store.truth.get(id)).await else { return false };
        let rests = matches!(record.phase, Phase::Hibernated { .. } | Phase::Frozen { step: FreezeStep::Done });
        let alone = self.pending.load(Ordering::SeqCst) == 0 && !self.known.get(id).is_some_and(|it| it.wakes_itself);
        rests && alone && record.entry.is_none() && !self.swarm.has(Trouble::Races)
    }

    async fn kill_service(&mut self, id: &SandboxId) -> Found {
        let Ok(Some(record)) = at_once(self.store.truth.get(id)).await else { return Ok(()) };
        let Some(run) = record.services.values().next().cloned() else { return Ok(()) };
        self.known.entry(id.clone()).or_default().service_killed = Some(run.execution.clone());
        let (engine, sandbox) = (self.engine(), id.clone());
        let asked = async move {
            let handle = hold(&engine, &sandbox, None).await?;
            handle.signal(&run.execution, 9).await?;
            Ok(Told::Done)
        };
        self.ask(Deed::KillService, Some(id), asked).await
    }

    /// Somebody is damaged. It counts where something lives that was not so before.
    async fn damage(&mut self, deed: Deed, id: &SandboxId) {
        self.tell(&format!("{}: {id}", deed.word()));
        let damage = match deed {
            Deed::Hang => Damage::Hangs,
            Deed::LoseRoot => Damage::Rootless,
            Deed::Deny => Damage::Denied,
            Deed::Pose => Damage::Poses,
            Deed::Mend => return self.provider.damage(id, None),
            _ => {
                let causes = [
                    EndCause::OomKilled,
                    EndCause::DiskFull { what: "all of it".to_owned() },
                    EndCause::Signalled { signal: 9 },
                    EndCause::SupervisorLost,
                    EndCause::AgentLost,
                    EndCause::MemoryLost { what: "its pages".to_owned() },
                    EndCause::Exited { code: 1 },
                ];
                let cause = causes[self.rng.below(causes.len() as u64) as usize].clone();
                if self.provider.crash(id, cause) {
                    self.did(deed);
                }
                return;
            }
        };
        let new = self.provider.damage_of(id) != Some(damage);
        if new && self.picture().await.living().any(|(living, _)| living == id) {
            self.did(deed);
        }
        self.provider.damage(id, Some(damage));
    }

    fn was_probed(&self, id: &SandboxId, generation: Generation, began: Instant) -> Found {
        let instance = InstanceRef { sandbox: id.clone(), generation };
        let probed = self.provider.probed_at(&instance);
        holds("probed-before-use", probed >= Some(began), || {
            format!("{instance} was handed out, and not probed since the daemon began: {probed:?}")
        })
    }

    /// What was done by this answer, or come to.
    fn keep_in_mind(&mut self, deed: Deed, told: &Result<Told, EngineError>) {
        match told {
            Ok(Told::Done) if deed == Deed::KillService => self.did(deed),
            Ok(_) => {}
            Err(error) => {
                if let Some(refusal) = refusal(deed, error) {
                    self.reached(refusal);
                }
            }
        }
    }

    /// An answer is heard.
    pub(crate) async fn hear(&mut self, answer: Answer) -> Found {
        let Answer { deed, id, was_ended, was_draining, drains, damaged, began, told } = answer;
        self.keep_in_mind(deed, &told);
        let name = id.as_ref().map(ToString::to_string).unwrap_or_default();
        if let Ok(Told::View(view)) = &told {
            self.shown(view).await?;
        }
        // Unless that has changed since, when nobody waited for this.
        let was_draining = was_draining.filter(|_| drains == self.drains);
        heard_of_drains(deed, &name, was_draining, &told)?;
        let begun = damaged.filter(|_| told.is_ok() && self.is_calm());
        holds("damaged-is-refused", begun.is_none(), || format!("{} {name} begins with {begun:?}", deed.word()))?;
        match (deed, &told) {
            (Deed::Create | Deed::CreateFrom, Ok(Told::All(made))) => {
                holds("one-key-one-sandbox", made.windows(2).all(|two| two[0] == two[1]), || format!("{made:?}"))?;
                for id in made {
                    self.known.entry(id.clone()).or_default();
                }
            }
            (Deed::Create | Deed::CreateFrom, Err(error)) => {
                let expected = match error {
                    EngineError::Store(_)
                    | EngineError::ShuttingDown
                    | EngineError::NameTaken { .. }
                    | EngineError::Draining => true,
                    EngineError::Quota { .. } => self.quota_max.is_some(),
                    EngineError::NoSnapshot { .. } | EngineError::SnapshotDamaged { .. } => deed == Deed::CreateFrom,
                    _ => false,
                };
                holds("refusals-are-known", expected, || format!("a create was refused: {error}"))?;
            }
            (Deed::Ensure, Ok(_)) => {
                holds("nothing-enters-what-is-gone", !was_ended, || format!("{name} is gone, and was entered"))?;
            }
            (Deed::Stop, Ok(Told::View(view))) => {
                // A task that waited for its turn, and has it now, is somebody else who wants it.
                let at_work = at_once(self.store.truth.tasks_at_work(std::slice::from_ref(&view.sandbox.id))).await;
                let calm = !self.swarm.has(Trouble::Races) && at_work.is_ok_and(|at_work| at_work.is_empty());
                holds("stop-is-taken", !calm || view.sandbox.desired != Desired::Running, || {
                    format!("{name} was stopped and is wanted to run")
                })?;
                if view.sandbox.desired == Desired::Gone {
                    self.known.entry(view.sandbox.id.clone()).or_default().ended = true;
                }
            }
            (Deed::Hibernate, Ok(Told::View(view))) => {
                holds("ephemeral-is-not-saved", view.sandbox.policy.persistent, || {
                    format!("{name} is not persistent, and is to be saved")
                })?;
            }
            (Deed::Delete, Ok(Told::View(view))) => {
                self.known.entry(view.sandbox.id.clone()).or_default().ended = true;
            }
            // Who names no generation is never refused.
            (Deed::Delete, Err(error)) if !matches!(error, EngineError::StaleHandle { .. }) => {
                let expected = matches!(error, EngineError::Store(_) | EngineError::ShuttingDown);
                holds("delete-is-legal", expected, || format!("a delete of {name} was refused: {error}"))?;
            }
            (_, Ok(Told::Woken)) => {
                holds("a-reconnect-joins", false, || {
                    format!("{name} rested, and was woken by who came with a handle")
                })?;
            }
            (_, Ok(Told::Stopping(task, run))) => self.heard_stop(task, *run).await?,
            (_, Ok(Told::Written(path, held, got))) => {
                holds("old-handles-are-refused", held.is_none_or(|held| held == *got), || {
                    format!("{name}: who held {held:?} wrote into {got}")
                })?;
                if let Some(id) = id {
                    self.known.entry(id).or_default().written.push(path.clone());
                }
            }
            (_, Ok(Told::Handle(asked, got))) => {
                holds("old-handles-are-refused", asked.is_none_or(|asked| asked == *got), || {
                    format!("{name}: a handle to {asked:?} was given {got}")
                })?;
                if let Some(id) = id {
                    self.was_probed(&id, *got, began)?;
                    self.known.entry(id).or_default().handle = Some(*got);
                }
            }
            (_, Err(EngineError::StaleHandle { asked, current, .. })) => {
                holds("shown-generations-stay", asked <= current, || {
                    format!("{name}: generation {asked} was shown, and is {current} now")
                })?;
                if let Some(known) = id.and_then(|id| self.known.get_mut(&id)) {
                    known.handle = None;
                }
            }
            (Deed::Fork, Ok(Told::All(made))) => {
                for id in made {
                    let there = at_once(self.store.truth.get(id)).await.ok().flatten().is_some();
                    holds("forks-are-all-there", there, || format!("{id} of {made:?} is not there"))?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// What is worth to be told of a refusal, where worlds are to have it.
fn refusal(deed: Deed, error: &EngineError) -> Option<&'static str> {
    match error {
        EngineError::Quota { .. } => Some("refused: quota"),
        EngineError::NameTaken { .. } => Some("refused: name"),
        EngineError::Draining => Some("refused: drain"),
        EngineError::StaleHandle { .. } if deed.is_written() => Some("refused: verb on another generation"),
        EngineError::StaleHandle { .. } => Some("refused: old handle"),
        EngineError::SnapshotDamaged { .. } => Some("refused: damaged snapshot"),
        EngineError::NotRunning { .. } => Some("refused: not running"),
        EngineError::SnapshotInUse { .. } => Some("refused: snapshot in use"),
        _ => None,
    }
}

/// While it is known whether a daemon drains, work is taken or refused by that.
fn heard_of_drains(deed: Deed, name: &str, draining: Option<bool>, told: &Result<Told, EngineError>) -> Found {
    let takes = matches!(deed, Deed::Create | Deed::CreateFrom | Deed::Ensure);
    holds("draining-takes-nothing", !(takes && told.is_ok() && draining == Some(true)), || {
        format!("{} {name} was taken while the daemon is drained", deed.word())
    })?;
    let refused = matches!(told, Err(EngineError::Draining)) && draining == Some(false);
    holds("undrained-takes-work", !refused, || format!("{} {name} was refused, and nobody drains", deed.word()))
}
