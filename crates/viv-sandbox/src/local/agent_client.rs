//! Talking to an agent.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::net::UnixStream;
use viv_agent::frame::{DATA_BYTES_MAX, HEADER_BYTES, Kind, decode_header, encode_header};
use viv_agent::proto::{AgentError, Answer, ErrorCode, Fence, Reply, Request, SOCKET};
use viv_core::{FencingToken, Generation};
use viv_provider::{ByteReader, InstanceRef, InstanceState, Mutation, ProviderError};

use super::look::{LOOK_EVERY, LOOK_EVERY_MAX};
use super::{LocalProvider, Result, shim_client, socket, within};
use crate::layout::InstanceRecord;
use crate::shim::proto::{ShimReply, ShimRequest};

/// How long an agent may take for what it does in microseconds.
pub(super) const ANSWER_WITHIN_MS: u64 = 10_000;

/// How long somebody waits at once for an agent whose memory is being dumped: shorter than whoever waits for him.
const DUMP_WITHIN: Duration = Duration::from_secs(5);

/// A conversation.
pub(super) struct Conversation {
    pub(super) stream: UnixStream,
}

/// A frame from the agent.
pub(super) enum Frame {
    Json(Vec<u8>),
    Data(Vec<u8>),
    End,
}

/// What goes with a change.
pub(super) fn fence(mutation: &Mutation) -> Fence {
    Fence { operation: mutation.operation.clone(), generation: mutation.generation, token: mutation.token }
}

impl LocalProvider {
    /// Asks without changing anything: one request, one answer.
    pub(super) async fn query(&self, instance: &InstanceRef, request: &Request) -> Result<Answer> {
        within(ANSWER_WITHIN_MS, "the agent", async {
            let (_, answer) = self.converse(instance, request).await?;
            Ok(answer)
        })
        .await
    }

    /// Changes something: admitted at the fence, one request, one answer.
    pub(super) async fn change(
        &self,
        mutation: &Mutation,
        sandbox: &viv_core::SandboxId,
        request: &Request,
    ) -> Result<Answer> {
        within(mutation.budget_ms, "the agent", async {
            self.admit_for_agent(mutation, sandbox).await?;
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
            let (_, answer) = self.converse(&instance, request).await?;
            Ok(answer)
        })
        .await
    }

    /// Changes something with bytes that follow the request.
    pub(super) async fn upload(
        &self,
        mutation: &Mutation,
        sandbox: &viv_core::SandboxId,
        request: &Request,
        content: ByteReader,
    ) -> Result<Answer> {
        within(mutation.budget_ms, "the agent", async {
            self.admit_for_agent(mutation, sandbox).await?;
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
            let mut conversation = self.start_conversation(&instance, request).await?;
            let sent = conversation.send_all(content).await;
            if let Err(Upload::Source(error)) = &sent {
                return Err(ProviderError::Failed { what: format!("the content could not be read: {error}") });
            }
            // An agent that refuses says so and hangs up; then the refusal is the news, not the broken pipe.
            match conversation.reply().await {
                Ok(reply) => answered(reply, request),
                Err(error) => Err(self.why_unreachable(&instance, error).await),
            }
        })
        .await
    }

    /// Starts a conversation and reads the first reply.
    pub(super) async fn converse(&self, instance: &InstanceRef, request: &Request) -> Result<(Conversation, Answer)> {
        let mut conversation = self.start_conversation(instance, request).await?;
        match conversation.reply().await {
            Ok(reply) => Ok((conversation, answered(reply, request)?)),
            Err(error) => Err(self.why_unreachable(instance, error).await),
        }
    }

    async fn start_conversation(&self, instance: &InstanceRef, request: &Request) -> Result<Conversation> {
        self.check_awake(instance).await?;
        let path = self.dir(&instance.sandbox).run().join(SOCKET);
        let opened = async {
            let mut conversation = Conversation { stream: socket::connect(&path).await? };
            conversation.send_json(&serde_json::to_vec(request)?).await?;
            Ok(conversation)
        };
        match opened.await {
            Ok(conversation) => Ok(conversation),
            Err(error) => Err(self.why_unreachable(instance, error).await),
        }
    }

    /// Nothing is said to an agent that cannot hear it: it would do it when it wakes, with nobody waiting any more.
    /// One that stands still only while its files are copied is waited for; one that somebody else stopped is damaged.
    /// While its memory is dumped nobody knocks, because that would make the dump fail.
    async fn check_awake(&self, instance: &InstanceRef) -> Result<()> {
        let mut pause = LOOK_EVERY;
        let mut stopped_by_others = false;
        let begun = Instant::now();
        loop {
            let dumped = match self.stillness(instance).await? {
                Stillness::None => return Ok(()),
                Stillness::ByOthers => return Err(frozen_by_others()),
                Stillness::Any => false,
                Stillness::Dumped => true,
            };
            if dumped && begun.elapsed() > DUMP_WITHIN {
                return Err(dumped_still());
            }
            match shim_client::ask(&self.dir(&instance.sandbox), &ShimRequest::Status).await {
                Ok(ShimReply::Status(status)) if status.state == InstanceState::Frozen => {
                    return Err(ProviderError::NotRunning { state: InstanceState::Frozen });
                }
                // Seen twice, because what was held may have been let go and held again in between.
                Ok(ShimReply::Status(status)) if status.stopped == Some(false) && !dumped => {
                    if std::mem::replace(&mut stopped_by_others, true) {
                        return Err(frozen_by_others());
                    }
                }
                Ok(_) => stopped_by_others = false,
                Err(error) => return Err(self.why_unreachable(instance, error).await),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK_EVERY_MAX);
        }
    }

    async fn stillness(&self, instance: &InstanceRef) -> Result<Stillness> {
        let instance = instance.clone();
        self.blocking(move |this| {
            let record = this.need_record(&instance)?;
            let cgroups = this.cgroups(&record);
            Ok(match () {
                () if this.dir(&instance.sandbox).dumping().exists() => Stillness::Dumped,
                () if cgroups.is_stopped_by_v1() => Stillness::ByOthers,
                () if cgroups.is_stopped() => Stillness::Any,
                () => Stillness::None,
            })
        })
        .await
    }

    /// The record of an instance that has to be there, alive or ended.
    pub(super) fn need_record(&self, instance: &InstanceRef) -> Result<InstanceRecord> {
        match self.read_record(&instance.sandbox)? {
            None => Err(self.why_absent(instance)),
            Some(record) if record.instance != *instance => {
                Err(ProviderError::StaleGeneration { asked: instance.generation, current: record.generation() })
            }
            Some(record) => Ok(record),
        }
    }

    /// No instance now; was there a later one than is meant?
    pub(super) fn why_absent(&self, instance: &InstanceRef) -> ProviderError {
        match self.fence(&instance.sandbox) {
            Ok(locked) => match locked.fence() {
                Some(fence) if fence.generation > instance.generation => {
                    ProviderError::StaleGeneration { asked: instance.generation, current: fence.generation }
                }
                Some(_) | None => ProviderError::Absent,
            },
            Err(error) => error,
        }
    }
}

/// Whether an instance stands still, as its cgroups say.
enum Stillness {
    None,
    /// The shim knows whether it was the one.
    Any,
    /// In a way that is never ours.
    ByOthers,
    /// Or is about to, for as long as its memory is dumped.
    Dumped,
}

fn dumped_still() -> ProviderError {
    let source = io::Error::new(io::ErrorKind::WouldBlock, "its memory is being saved");
    ProviderError::Unavailable { what: "the agent".to_owned(), source }
}

fn frozen_by_others() -> ProviderError {
    ProviderError::Failed { what: "its processes were frozen by somebody else".to_owned() }
}

enum Upload {
    Source(io::Error),
    Agent,
}

impl Conversation {
    async fn send_json(&mut self, payload: &[u8]) -> io::Result<()> {
        let mut frame = encode_header(Kind::Json, payload.len()).to_vec();
        frame.extend_from_slice(payload);
        self.stream.write_all(&frame).await
    }

    async fn send_all(&mut self, mut content: ByteReader) -> std::result::Result<(), Upload> {
        let mut buffer = vec![0; DATA_BYTES_MAX];
        loop {
            let length = content.read(&mut buffer).await.map_err(Upload::Source)?;
            let kind = if length == 0 { Kind::End } else { Kind::Data };
            let header = encode_header(kind, length);
            self.stream.write_all(&header).await.map_err(|_| Upload::Agent)?;
            if length == 0 {
                return Ok(());
            }
            self.stream.write_all(&buffer[..length]).await.map_err(|_| Upload::Agent)?;
        }
    }

    async fn reply(&mut self) -> io::Result<Reply> {
        self.message().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// The next message; `None` when the agent hung up.
    pub(super) async fn message<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        match self.frame().await? {
            Some(Frame::Json(payload)) => Ok(Some(serde_json::from_slice(&payload)?)),
            Some(Frame::Data(_) | Frame::End) => Err(io::ErrorKind::InvalidData.into()),
            None => Ok(None),
        }
    }

    /// The next frame; `None` when the agent hung up.
    pub(super) async fn frame(&mut self) -> io::Result<Option<Frame>> {
        let mut header = [0; HEADER_BYTES];
        if self.stream.read(&mut header[..1]).await? == 0 {
            return Ok(None);
        }
        self.stream.read_exact(&mut header[1..]).await?;
        let (kind, length) = decode_header(header).map_err(io::Error::other)?;
        let mut payload = vec![0; length];
        self.stream.read_exact(&mut payload).await?;
        Ok(Some(match kind {
            Kind::Json => Frame::Json(payload),
            Kind::Data => Frame::Data(payload),
            Kind::End => Frame::End,
        }))
    }

    /// The bytes that follow an answer.
    pub(super) fn into_body(self) -> ByteReader {
        Box::new(Body { stream: self.stream, header: [0; HEADER_BYTES], header_bytes: 0, left: 0, done: false })
    }
}

/// Data frames as a stream of bytes.
struct Body {
    stream: UnixStream,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    left: usize,
    done: bool,
}

impl AsyncRead for Body {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.done {
                return Poll::Ready(Ok(()));
            }
            if this.left > 0 {
                let before = out.filled().len();
                let wanted = this.left.min(out.remaining());
                let mut part = ReadBuf::new(out.initialize_unfilled_to(wanted));
                ready!(Pin::new(&mut this.stream).poll_read(cx, &mut part))?;
                let length = part.filled().len();
                if length == 0 && wanted > 0 {
                    return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                }
                out.set_filled(before + length);
                this.left -= length;
                return Poll::Ready(Ok(()));
            }
            let mut header = ReadBuf::new(&mut this.header[this.header_bytes..]);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut header))?;
            let length = header.filled().len();
            if length == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            this.header_bytes += length;
            if this.header_bytes == HEADER_BYTES {
                this.header_bytes = 0;
                match decode_header(this.header).map_err(io::Error::other)? {
                    (Kind::Data, length) => this.left = length,
                    (Kind::End, _) => this.done = true,
                    // What went wrong stands in the message; that it went wrong is all a reader of bytes can use.
                    (Kind::Json, _) => {
                        return Poll::Ready(Err(io::Error::other("the file could not be read to its end")));
                    }
                }
            }
        }
    }
}

/// The answer in a reply.
fn answered(reply: Reply, request: &Request) -> Result<Answer> {
    match reply {
        Reply::Ok(answer) => Ok(answer),
        Reply::Error(error) => Err(refusal(error, request)),
    }
}

fn refusal(error: AgentError, request: &Request) -> ProviderError {
    let AgentError { code, message, current } = error;
    match (code, current, request.fence()) {
        (ErrorCode::Fenced, Some(current), Some(fence)) => {
            ProviderError::Fenced { presented: fence.token, highest: FencingToken(current) }
        }
        (ErrorCode::StaleGeneration, Some(current), Some(fence)) => {
            ProviderError::StaleGeneration { asked: fence.generation, current: Generation(current) }
        }
        (ErrorCode::NotFound, ..) => {
            // That it was not found is what this error says anyway.
            let what = message.strip_suffix(": no such file or directory").unwrap_or(&message).to_owned();
            ProviderError::NotFound { what }
        }
        (ErrorCode::Conflict, ..) => ProviderError::Conflict { what: message },
        (ErrorCode::Invalid, ..) => {
            ProviderError::Invalid { what: message, hint: "nothing was changed; correct the request".to_owned() }
        }
        (ErrorCode::Exhausted, ..) => ProviderError::Exhausted { limit: "the sandbox", what: message },
        (ErrorCode::Unsupported, ..) => ProviderError::Outdated { what: message },
        (ErrorCode::Failed | ErrorCode::Fenced | ErrorCode::StaleGeneration, ..) => {
            ProviderError::Failed { what: message }
        }
    }
}

/// The one answer that was expected.
macro_rules! expected {
    ($answer:expr, $pattern:pat => $value:expr) => {
        match $answer {
            $pattern => Ok($value),
            _ => Err($crate::local::unexpected("the agent")),
        }
    };
}
pub(super) use expected;
