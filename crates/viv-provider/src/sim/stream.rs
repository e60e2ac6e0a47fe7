//! What goes on after a call was answered: output and changes, heard as they come.

use std::task::Poll;

use async_trait::async_trait;
use viv_core::ExecutionId;
use viv_core::exec::OutputEvent;
use viv_core::file::{WatchEvent, WatchKind};

use super::SimProvider;
use super::state::State;
use super::tree::Change;
use crate::error::ProviderError;
use crate::instance::InstanceRef;
use crate::provider::{InsideRequest, OutputStream, RequestStream, WatchStream};

type Result<T> = std::result::Result<T, ProviderError>;

/// A reader of an execution's output.
pub(super) struct SimOutput {
    pub(super) provider: SimProvider,
    pub(super) instance: InstanceRef,
    pub(super) execution: ExecutionId,
    pub(super) offset: u64,
    pub(super) follow: bool,
    pub(super) is_over: bool,
}

impl SimOutput {
    /// What it hears next and where it stands then, or `None` when that is still to come.
    fn look(&self, state: &State) -> Result<Option<(OutputEvent, u64)>> {
        let instance = state.read(&self.instance)?;
        let execution = match instance.execution(&self.execution) {
            // A transient one goes with its instance.
            Err(_) if instance.ended().is_some() => return Err(ProviderError::NotRunning { state: instance.state() }),
            found => found?,
        };
        if let Some(told) = execution.output.read(self.offset) {
            return Ok(Some(told));
        }
        let is_over = !self.follow || execution.is_final();
        Ok(is_over.then(|| (OutputEvent::End(execution.status()), self.offset)))
    }
}

#[async_trait]
impl OutputStream for SimOutput {
    async fn next(&mut self) -> Result<Option<OutputEvent>> {
        if self.is_over {
            return Ok(None);
        }
        let provider = self.provider.clone();
        let (event, offset) = provider.wait(|state| self.look(state).transpose()).await?;
        self.offset = offset;
        if let OutputEvent::End(status) = &event {
            self.is_over = true;
            if status.state.is_final() {
                provider.change(|state| {
                    state.note_read(&self.instance, &self.execution);
                    Ok(())
                })?;
            }
        }
        Ok(Some(event))
    }
}

/// A listener to changes below a directory.
pub(super) struct SimWatch {
    pub(super) provider: SimProvider,
    pub(super) instance: InstanceRef,
    /// Resolved.
    pub(super) path: String,
    pub(super) recursive: bool,
    /// The number of the next change to look at.
    pub(super) next: u64,
}

impl SimWatch {
    /// The next event, `None` when there will be none, or pending when it is still to come.
    fn look(&mut self, state: &State) -> Poll<Option<WatchEvent>> {
        let Ok(instance) = state.read(&self.instance) else { return Poll::Ready(None) };
        while let Poll::Ready(change) = instance.tree.change(self.next) {
            let Some(change) = change else {
                self.next = instance.tree.changed();
                let event = WatchEvent { kind: WatchKind::Overflow, path: String::new(), is_dir: true };
                return Poll::Ready(Some(event));
            };
            self.next += 1;
            if let Some(event) = self.event(change) {
                return Poll::Ready(Some(event));
            }
        }
        if instance.ended().is_some() { Poll::Ready(None) } else { Poll::Pending }
    }

    fn event(&self, change: &Change) -> Option<WatchEvent> {
        let below = change.path.strip_prefix(self.path.trim_end_matches('/'))?;
        let name = match below.strip_prefix('/') {
            Some(name) => name,
            None if below.is_empty() => "",
            None => return None,
        };
        let is_heard = self.recursive || !name.contains('/');
        is_heard.then(|| WatchEvent { kind: change.kind, path: name.to_owned(), is_dir: change.is_dir })
    }
}

#[async_trait]
impl WatchStream for SimWatch {
    async fn next(&mut self) -> Result<Option<WatchEvent>> {
        let provider = self.provider.clone();
        let event = provider.wait(|state| match self.look(state) {
            Poll::Ready(event) => Some(event),
            Poll::Pending => None,
        });
        Ok(event.await)
    }
}

/// A listener to what those inside ask for.
pub(super) struct SimRequests {
    pub(super) provider: SimProvider,
    pub(super) instance: InstanceRef,
    /// Which of the instance's listeners.
    pub(super) listener: u64,
}

impl SimRequests {
    /// The next request, `None` when there will be none, or pending when it is still to come.
    fn look(&self, state: &mut State) -> Poll<Option<InsideRequest>> {
        if state.read(&self.instance).is_err() {
            return Poll::Ready(None);
        }
        match state.instances.get_mut(&self.instance.sandbox) {
            Some(instance) => instance.next_request(self.listener),
            None => Poll::Ready(None),
        }
    }
}

#[async_trait]
impl RequestStream for SimRequests {
    async fn next(&mut self) -> Result<Option<InsideRequest>> {
        let provider = self.provider.clone();
        let heard = provider.wait_changing(|state| match self.look(state) {
            Poll::Ready(heard) => Some(heard),
            Poll::Pending => None,
        });
        Ok(heard.await)
    }
}
