//! What is looked at.

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

/// Sandboxes whose figures are asked for in one look, each with a call of its own.
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

    /// The newest page of them, with the figures of the first, and whether there are more.
    pub(super) fn at_a_page(&self) -> Result<(Vec<Seen>, bool), ClientError> {
        let query = ListSandboxes { limit: Some(PageLimit::nearest(SANDBOXES_MAX)), ..self.query() };
        let page = self.client.list(&query)?;
        let tasks = self.tasks()?;
        let (mut seen, mut asked) = (Vec::new(), 0);
        for sandbox in page.items {
            let runs =
                matches!(sandbox.status, Status::Ready | Status::Unverified | Status::Verifying | Status::Frozen);
            let is_there = runs && asked < FIGURES_MAX;
            asked += usize::from(is_there);
            // One that does not answer must not hide the others: it has no figures.
            let resources = if is_there { self.resources(&sandbox.id).ok().flatten() } else { None };
            let task = tasks.iter().find(|task| task.sandbox == sandbox.id).cloned();
            seen.push(Seen { sandbox, resources, task });
        }
        Ok((seen, page.next.is_some()))
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
