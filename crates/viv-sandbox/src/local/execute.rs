//! Commands in an instance, and ports.

use viv_agent::output;
use viv_agent::proto::{Answer, EXECUTIONS, Request};
use viv_core::exec::{ExecSpec, ExecState, ExecStatus, TtySize};
use viv_core::{ExecutionId, SandboxId};
use viv_provider::{Dialled, InstanceRef, InstanceState, Mutation, ProviderError};

use super::agent_client::{ANSWER_WITHIN_MS, expected, fence};
use super::{LocalProvider, Result, unavailable, within};
use crate::layout::InstanceDir;

impl LocalProvider {
    pub(super) async fn start_execution(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        spec: &ExecSpec,
    ) -> Result<ExecStatus> {
        let request = Request::ExecStart { fence: fence(mutation), id: execution.clone(), spec: spec.clone() };
        expected!(self.change(mutation, sandbox, &request).await?, Answer::Exec(status) => status)
    }

    pub(super) async fn execution_status(&self, instance: &InstanceRef, execution: &ExecutionId) -> Result<ExecStatus> {
        match self.query(instance, &Request::ExecStatus { id: execution.clone() }).await {
            Ok(answer) => expected!(answer, Answer::Exec(status) => status),
            Err(error) => {
                let how = self.read_instead(error)?;
                self.kept_status(instance, execution, how).await
            }
        }
    }

    pub(super) async fn list_executions(&self, instance: &InstanceRef) -> Result<Vec<ExecStatus>> {
        let how = match self.query(instance, &Request::ExecList).await {
            Ok(answer) => return expected!(answer, Answer::Execs(all) => all),
            Err(error) => self.read_instead(error)?,
        };
        let dir = self.dir(&instance.sandbox);
        let names = self
            .blocking(move |_| {
                let folder = dir.run().join(EXECUTIONS);
                let read = || -> std::io::Result<Vec<ExecutionId>> {
                    let mut names = Vec::new();
                    for entry in std::fs::read_dir(&folder)? {
                        names.extend(entry?.file_name().to_str().and_then(|name| name.parse().ok()));
                    }
                    Ok(names)
                };
                read().map_err(unavailable(&folder))
            })
            .await?;
        let mut all = Vec::with_capacity(names.len());
        for name in names {
            match self.kept_status(instance, &name, how.clone()).await {
                Ok(status) => all.push(status),
                Err(ProviderError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        all.sort_by(|a, b| (a.started_at_ms, &a.id).cmp(&(b.started_at_ms, &b.id)));
        Ok(all)
    }

    /// When the agent cannot be asked because of how the instance is, what it kept on disk can still be read.
    #[expect(clippy::unused_self, reason = "reads as a step of the methods above")]
    pub(super) fn read_instead(&self, error: ProviderError) -> Result<InstanceState> {
        match error {
            ProviderError::NotRunning { state } => Ok(state),
            other => Err(other),
        }
    }

    /// The status that the agent wrote last, corrected by the end of the instance (X5, X6).
    pub(super) async fn kept_status(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        how: InstanceState,
    ) -> Result<ExecStatus> {
        let (dir, execution) = (self.dir(&instance.sandbox), execution.clone());
        self.blocking(move |_| read_status(&dir, &execution, &how)).await
    }

    pub(super) async fn give_stdin(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        offset: u64,
        data: &[u8],
        close: bool,
    ) -> Result<u64> {
        let request = Request::ExecStdin { fence: fence(mutation), id: execution.clone(), offset, close };
        let content = Box::new(std::io::Cursor::new(data.to_vec()));
        expected!(self.upload(mutation, sandbox, &request, content).await?, Answer::Stdin { taken_bytes } => taken_bytes)
    }

    pub(super) async fn signal_execution(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        signal: i32,
    ) -> Result<()> {
        let request = Request::ExecSignal { fence: fence(mutation), id: execution.clone(), signal };
        self.change(mutation, sandbox, &request).await.map(|_| ())
    }

    pub(super) async fn resize_terminal(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        size: TtySize,
    ) -> Result<()> {
        let request = Request::ExecResize { fence: fence(mutation), id: execution.clone(), size };
        self.change(mutation, sandbox, &request).await.map(|_| ())
    }

    pub(super) async fn cancel_execution(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
    ) -> Result<ExecStatus> {
        let request = Request::ExecCancel { fence: fence(mutation), id: execution.clone() };
        expected!(self.change(mutation, sandbox, &request).await?, Answer::Exec(status) => status)
    }

    pub(super) async fn dial_port(&self, instance: &InstanceRef, port: u16) -> Result<Box<dyn Dialled>> {
        within(ANSWER_WITHIN_MS, "the agent", async {
            let (conversation, answer) = self.converse(instance, &Request::Dial { port }).await?;
            expected!(answer, Answer::Done => Box::new(conversation.stream) as Box<dyn Dialled>)
        })
        .await
    }
}

fn read_status(dir: &InstanceDir, execution: &ExecutionId, how: &InstanceState) -> Result<ExecStatus> {
    let folder = dir.execution(execution);
    let kept = output::read_status(&folder).map_err(unavailable(&folder))?;
    let mut status = kept.ok_or_else(|| ProviderError::NotFound { what: format!("execution {execution}") })?;
    if let InstanceState::Ended(ended) = how
        && !status.state.is_final()
    {
        status.state = ExecState::Lost { cause: ended.cause.code().to_owned() };
        status.ended_at_ms = Some(ended.at_ms);
        status.pid = None;
    }
    Ok(status)
}
