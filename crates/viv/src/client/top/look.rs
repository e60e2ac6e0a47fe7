//! What is looked at.

use std::collections::BTreeMap;

use viv_api::ErrorCode;
use viv_api::bound::{LabelFilter, LogBytes, PageLimit, SandboxRef, WaitMs};
use viv_api::client::{Client, ClientError};
use viv_api::query::{ListSandboxes, ListTasks, SandboxLogQuery};
use viv_api::resources::Resources;
use viv_api::sandbox::{LogSource, Sandbox, Status, StopSandbox};
use viv_api::task::{Task, TaskState};
use viv_core::SandboxId;

use super::super::diagnose::words;
use super::super::table::clean;

/// Sandboxes that are shown live at most.
const SANDBOXES_MAX: u64 = 200;

/// Sandboxes whose figures are asked for in one look, each with a call of its own: of more, in turn.
const FIGURES_MAX: usize = 50;

/// Tasks that are looked at.
const TASKS_MAX: u64 = 200;

/// How much of each log is shown.
const LOG_BYTES: u64 = 64 << 10;

/// How long what goes on inside is looked at for a diagnosis.
const SAMPLE_MS: u64 = 1_000;

/// A sandbox, what it uses, and who is at work in it.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) sandbox: Sandbox,
    pub(super) resources: Option<Resources>,
    pub(super) task: Option<Task>,
}

/// What one look saw.
#[derive(Debug, Clone, Default)]
pub(super) struct Page {
    /// The newest of them.
    pub(super) seen: Vec<Seen>,
    /// Whether there are more.
    pub(super) more: bool,
    /// Of how many of those that run figures were asked for in this look, where not of all.
    pub(super) asked: Option<(usize, usize)>,
}

/// Figures of looks before: who is not asked in this one has those.
#[derive(Debug, Default)]
pub(super) struct Turns {
    look: u64,
    /// In which look it was asked last, and what it answered.
    known: BTreeMap<SandboxId, (u64, Option<Resources>)>,
}

impl Turns {
    /// Who is asked in this look: those that were not for longest, and of those the newest.
    fn next(&mut self, running: &[SandboxId]) -> Vec<SandboxId> {
        self.look += 1;
        self.known.retain(|id, _| running.contains(id));
        let mut turn: Vec<&SandboxId> = running.iter().collect();
        turn.sort_by_key(|id| self.known.get(*id).map_or(0, |(look, _)| *look));
        turn.into_iter().take(FIGURES_MAX).cloned().collect()
    }

    fn answered(&mut self, sandbox: &SandboxId, resources: Option<Resources>) {
        self.known.insert(sandbox.clone(), (self.look, resources));
    }

    /// What is known of it; nothing of a generation that is gone.
    fn of(&self, sandbox: &Sandbox) -> Option<Resources> {
        let known = self.known.get(&sandbox.id).and_then(|(_, resources)| resources.clone());
        known.filter(|resources| resources.generation == sandbox.generation)
    }
}

/// Whom to ask, and about what.
#[derive(Clone)]
pub(super) struct Look {
    pub(super) client: Client,
    pub(super) labels: Vec<LabelFilter>,
}

impl Look {
    fn query(&self) -> ListSandboxes {
        ListSandboxes { label: self.labels.clone(), ..ListSandboxes::default() }
    }

    fn resources(&self, sandbox: &SandboxId) -> Result<Option<Resources>, ClientError> {
        match self.client.sandbox(SandboxRef::from(sandbox)).resources() {
            Ok(resources) => Ok(Some(resources)),
            Err(error) => match error.code() {
                // It does not run, or not any more: it uses nothing.
                Some(ErrorCode::NotRunning | ErrorCode::NotFound | ErrorCode::Gone | ErrorCode::StaleHandle) => {
                    Ok(None)
                }
                Some(_) | None => Err(error),
            },
        }
    }

    /// Who is at work.
    fn tasks(&self) -> Result<Vec<Task>, ClientError> {
        let state = vec![TaskState::Preparing, TaskState::Running, TaskState::Committing];
        let limit = Some(PageLimit::nearest(TASKS_MAX));
        Ok(self.client.tasks(&ListTasks { limit, state, ..ListTasks::default() })?.items)
    }

    /// All of them with their figures.
    pub(super) fn at_all(&self) -> anyhow::Result<Vec<Seen>> {
        let tasks = self.tasks()?;
        let mut seen = Vec::new();
        for sandbox in self.client.list_all(self.query()) {
            let sandbox = sandbox?;
            let resources = match self.resources(&sandbox.id) {
                Ok(resources) => resources,
                // One that does not answer must not hide the others.
                Err(error) if matches!(error.code(), Some(ErrorCode::Timeout | ErrorCode::ProviderUnavailable)) => {
                    eprintln!("viv: {}: {error}", sandbox.id);
                    None
                }
                Err(error) => return Err(error.into()),
            };
            let task = tasks.iter().find(|task| task.sandbox == sandbox.id).cloned();
            seen.push(Seen { sandbox, resources, task });
        }
        Ok(seen)
    }

    /// The newest page of them, with the figures of those whose turn it is, and of the others those of before.
    pub(super) fn at_a_page(&self, turns: &mut Turns) -> Result<Page, ClientError> {
        let query = ListSandboxes { limit: Some(PageLimit::nearest(SANDBOXES_MAX)), ..self.query() };
        let page = self.client.list(&query)?;
        let tasks = self.tasks()?;
        let runs = |sandbox: &&Sandbox| {
            matches!(sandbox.status, Status::Ready | Status::Unverified | Status::Verifying | Status::Frozen)
        };
        let running: Vec<SandboxId> = page.items.iter().filter(runs).map(|sandbox| sandbox.id.clone()).collect();
        let turn = turns.next(&running);
        for sandbox in &turn {
            // One that does not answer must not hide the others: it has no figures.
            turns.answered(sandbox, self.resources(sandbox).ok().flatten());
        }
        let asked = (turn.len() < running.len()).then_some((turn.len(), running.len()));
        let seen = page.items.into_iter().map(|sandbox| {
            let task = tasks.iter().find(|task| task.sandbox == sandbox.id).cloned();
            Seen { resources: turns.of(&sandbox), task, sandbox }
        });
        Ok(Page { seen: seen.collect(), more: page.next.is_some(), asked })
    }

    /// The ends of its logs.
    pub(super) fn logs(&self, sandbox: &SandboxId) -> Result<String, ClientError> {
        let query = SandboxLogQuery { source: None, bytes: Some(LogBytes::nearest(LOG_BYTES)), generation: None };
        let logs = self.client.sandbox(SandboxRef::from(sandbox)).logs(&query)?;
        let mut text = String::new();
        for tail in logs.logs.iter().filter(|tail| !tail.text.is_empty()) {
            let name = match tail.source {
                LogSource::Shim => "shim",
                LogSource::Agent => "agent",
                LogSource::Console => "console",
            };
            let lines: Vec<String> = tail.text.lines().map(clean).collect();
            let part = format!("== {name}\n{}\n", lines.join("\n"));
            text.push_str(&part);
        }
        Ok(if text.is_empty() { "nothing was logged".to_owned() } else { text })
    }

    /// What is wrong with it, in words.
    pub(super) fn diagnosis(&self, sandbox: &SandboxId) -> Result<String, ClientError> {
        Ok(words(&self.client.sandbox(SandboxRef::from(sandbox)).diagnosis_over(SAMPLE_MS)?))
    }

    /// Stops it, without waiting for that.
    pub(super) fn stop(&self, sandbox: &SandboxId) -> Result<Sandbox, ClientError> {
        let request = StopSandbox { wait_ms: Some(WaitMs::nearest(0)), failed_save: None };
        Ok(self.client.sandbox(SandboxRef::from(sandbox)).stop(&request)?.into_sandbox())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o1_all_are_asked_in_turn_and_keep_their_figures_until_then() {
        let all: Vec<SandboxId> = (0..120).map(|at| format!("sbx_{at:03}").parse().unwrap()).collect();
        let mut turns = Turns::default();
        let mut look = |all: &[SandboxId]| {
            let turn = turns.next(all);
            for sandbox in &turn {
                turns.answered(sandbox, None);
            }
            turn
        };
        assert_eq!(look(&all), all[..FIGURES_MAX], "the newest first");
        assert_eq!(look(&all), all[FIGURES_MAX..2 * FIGURES_MAX]);
        // Then the oldest, and those that were asked first again.
        let third = look(&all);
        assert_eq!(third[..20], all[2 * FIGURES_MAX..]);
        assert_eq!(third[20..], all[..FIGURES_MAX - 20]);
        // Who is new is asked at once, and few are asked at each look.
        let new: SandboxId = "sbx_new".parse().unwrap();
        let more: Vec<SandboxId> = [&new].into_iter().chain(&all).cloned().collect();
        assert_eq!(look(&more)[0], new);
        let few = &all[..3];
        assert_eq!((look(few).len(), look(few).len()), (3, 3));
        assert_eq!(turns.known.len(), 3, "who is gone is forgotten");
    }
}
