//! The output of an execution: from the agent while it lives, from its files afterwards.

use async_trait::async_trait;
use viv_agent::frame::ChunkHeader;
use viv_agent::output::{Item, Reader};
use viv_agent::proto::{Answer, Request, StreamEvent};
use viv_core::ExecutionId;
use viv_core::exec::{ExecStatus, OutputEvent};
use viv_provider::{InstanceRef, InstanceState, OutputStream, ProviderError};

use super::agent_client::{Conversation, Frame, expected};
use super::{LocalProvider, Result, unavailable};

impl LocalProvider {
    pub(super) async fn attach_output(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        follow: bool,
    ) -> Result<Box<dyn OutputStream>> {
        let request = Request::ExecAttach { id: execution.clone(), offset, follow };
        let source = match self.streaming(instance, &request).await {
            Ok((conversation, answer)) => {
                expected!(answer, Answer::Attached(_) => ())?;
                Source::Agent(conversation)
            }
            Err(error) => {
                let how = self.read_instead(error)?;
                self.open_files(instance, execution, offset, how).await?
            }
        };
        let (provider, instance, execution) = (self.clone(), instance.clone(), execution.clone());
        Ok(Box::new(Output { provider, instance, execution, offset, follow, source }))
    }

    async fn open_files(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        how: InstanceState,
    ) -> Result<Source> {
        let status = self.kept_status(instance, execution, how).await?;
        let folder = self.dir(&instance.sandbox).execution(execution);
        self.blocking(move |_| {
            let reader = Reader::open(&folder, offset).map_err(unavailable(&folder))?;
            Ok(Source::Files(Box::new(Kept { reader, status })))
        })
        .await
    }
}

struct Output {
    provider: LocalProvider,
    instance: InstanceRef,
    execution: ExecutionId,
    /// Where the next byte stands, so that reading can go on elsewhere.
    offset: u64,
    /// Whether whoever reads stays until it ends.
    follow: bool,
    source: Source,
}

enum Source {
    Agent(Conversation),
    Files(Box<Kept>),
    Done,
}

/// What is left on disk.
struct Kept {
    reader: Reader,
    status: ExecStatus,
}

#[async_trait]
impl OutputStream for Output {
    async fn next(&mut self) -> Result<Option<OutputEvent>> {
        loop {
            // Put back unless this was the last.
            let event = match std::mem::replace(&mut self.source, Source::Done) {
                Source::Done => return Ok(None),
                Source::Agent(mut conversation) => match from_agent(&mut conversation).await {
                    Ok(Some(event)) => {
                        self.source = Source::Agent(conversation);
                        event
                    }
                    Ok(None) => {
                        self.source = self.go_on_in_files().await?;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                Source::Files(kept) => {
                    let (kept, event) = self.provider.blocking(move |_| from_files(kept)).await?;
                    self.source = Source::Files(kept);
                    event
                }
            };
            match &event {
                OutputEvent::Chunk { offset, data, .. } => self.offset = offset + data.len() as u64,
                OutputEvent::Cut { to, .. } => self.offset = *to,
                OutputEvent::End(_) => self.source = Source::Done,
            }
            return Ok(Some(event));
        }
    }
}

impl Output {
    /// The agent hung up: what it kept is read on from where it stopped, once it is known how the instance is.
    async fn go_on_in_files(&self) -> Result<Source> {
        let how = self.provider.look(&self.instance).await?.state;
        if let InstanceState::Absent = how {
            return Err(ProviderError::Absent);
        }
        if self.follow && how == InstanceState::Running {
            // Connections are closed before a dump, and what runs goes on: that is no end. Whoever follows attaches again.
            return Err(hung_up());
        }
        match self.provider.open_files(&self.instance, &self.execution, self.offset, how.clone()).await {
            // A transient one is kept nowhere else.
            Err(ProviderError::NotFound { .. }) if how != InstanceState::Running => {
                Err(ProviderError::NotRunning { state: how })
            }
            opened => opened,
        }
    }
}

fn hung_up() -> ProviderError {
    let source = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "it hung up");
    ProviderError::Unavailable { what: "the agent".to_owned(), source }
}

/// The next event; `None` when the agent hung up before the end.
async fn from_agent(conversation: &mut Conversation) -> Result<Option<OutputEvent>> {
    let lost = |source| ProviderError::Unavailable { what: "the agent".to_owned(), source };
    let malformed = || ProviderError::Failed { what: "the agent sent something that is no output".to_owned() };
    match conversation.frame().await {
        Ok(Some(Frame::Data(payload))) => {
            let (header, data) = ChunkHeader::decode(&payload).ok_or_else(malformed)?;
            let ChunkHeader { stream, offset, at_ms } = header;
            Ok(Some(OutputEvent::Chunk { offset, stream, at_ms, data: data.to_vec() }))
        }
        Ok(Some(Frame::Json(payload))) => match serde_json::from_slice(&payload).map_err(|_| malformed())? {
            StreamEvent::Cut { from, to } => Ok(Some(OutputEvent::Cut { from, to })),
            StreamEvent::End(status) => Ok(Some(OutputEvent::End(status))),
        },
        Ok(Some(Frame::End)) => Err(malformed()),
        Ok(None) => Ok(None),
        Err(error) if super::socket::is_refused(&error) => Ok(None),
        Err(error) => Err(lost(error)),
    }
}

fn from_files(mut kept: Box<Kept>) -> Result<(Box<Kept>, OutputEvent)> {
    let mut buffer = Vec::new();
    let failed =
        |error: std::io::Error| ProviderError::Failed { what: format!("the kept output cannot be read: {error}") };
    let item = match kept.reader.next(&mut buffer).map_err(failed)? {
        Some(item) => Some(item),
        None => kept.reader.finish(kept.status.output_bytes),
    };
    let event = match item {
        Some(Item::Chunk { header, data }) => {
            let ChunkHeader { stream, offset, at_ms } = header;
            OutputEvent::Chunk { offset, stream, at_ms, data: data.to_vec() }
        }
        Some(Item::Cut { from, to }) => OutputEvent::Cut { from, to },
        None => {
            // Bytes may have come after the last status was written.
            kept.status.output_bytes = kept.status.output_bytes.max(kept.reader.offset());
            OutputEvent::End(kept.status.clone())
        }
    };
    Ok((kept, event))
}
