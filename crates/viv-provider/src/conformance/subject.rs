//! An instance under test, with the calls that cases make on it again and again.

use std::io::Cursor;

use tokio::io::AsyncReadExt;
use viv_core::exec::{ExecSpec, ExecState, ExecStatus, OutputEvent, Stream};
use viv_core::file::{DirListing, FileStat};
use viv_core::{ExecutionId, FencingToken, Generation, SandboxId};

use super::lab::{Answer, Lab, SOON_MS};
use super::program::{self, Program};
use crate::error::ProviderError;
use crate::instance::{Ended, InstanceRef, InstanceSpec, InstanceState, Mutation, Observation};
use crate::provider::{ByteReader, FileWrite, OutputStream};

/// Where an instance says which one it is (T2).
const IDENTITY: &str = "/.vivarium/identity.json";

/// An instance under test.
pub(super) struct Subject<'l> {
    pub(super) lab: &'l Lab,
    pub(super) sandbox: SandboxId,
    pub(super) generation: Generation,
    pub(super) token: FencingToken,
}

impl<'l> Subject<'l> {
    pub(super) fn new(lab: &'l Lab, sandbox: SandboxId, generation: Generation, token: FencingToken) -> Self {
        Self { lab, sandbox, generation, token }
    }

    pub(super) fn instance(&self) -> InstanceRef {
        InstanceRef { sandbox: self.sandbox.clone(), generation: self.generation }
    }

    /// A mutation of this instance by a fresh operation.
    pub(super) fn mutation(&self) -> Mutation {
        self.lab.mutation(self.generation, self.token)
    }

    /// The same sandbox's next incarnation, not made yet, with a newer token.
    pub(super) fn next(&self) -> Self {
        Self {
            lab: self.lab,
            sandbox: self.sandbox.clone(),
            generation: self.generation.next(),
            token: FencingToken(self.token.0 + 1),
        }
    }

    pub(super) async fn create(&self, spec: &InstanceSpec) -> Observation {
        let owner = self.lab.owner();
        self.lab.provider().create(&self.mutation(), &self.sandbox, &owner, spec).await.must("create")
    }

    pub(super) async fn destroy(&self) {
        let destroy = self.lab.provider().destroy(&self.mutation(), &self.sandbox).await;
        destroy.must("destroy");
    }

    pub(super) async fn observe(&self) -> Observation {
        self.lab.provider().observe(&self.instance()).await.must("observe")
    }

    pub(super) async fn state(&self) -> InstanceState {
        self.observe().await.state
    }

    /// Waits until it is seen as ended.
    pub(super) async fn until_ended(&self, limit_ms: u64) -> Ended {
        self.lab
            .until("the end of the instance", limit_ms, async || match self.state().await {
                InstanceState::Ended(ended) => Some(ended),
                InstanceState::Running | InstanceState::Frozen | InstanceState::Ending { .. } => None,
                other @ (InstanceState::Creating | InstanceState::Absent) => panic!("it is {other}, not ended"),
            })
            .await
    }

    /// Starts a command.
    pub(super) async fn start(&self, spec: &ExecSpec) -> ExecutionId {
        let execution = self.lab.fresh_execution();
        let status = self.execute(&execution, spec).await.must("execute");
        assert_eq!(status.id, execution);
        execution
    }

    pub(super) async fn execute(&self, execution: &ExecutionId, spec: &ExecSpec) -> Result<ExecStatus, ProviderError> {
        self.lab.provider().execute(&self.mutation(), &self.sandbox, execution, spec).await
    }

    pub(super) async fn status(&self, execution: &ExecutionId) -> ExecStatus {
        self.lab.provider().execution(&self.instance(), execution).await.must("execution")
    }

    /// Runs a command to its end.
    pub(super) async fn run(&self, spec: &ExecSpec) -> Heard {
        let execution = self.start(spec).await;
        self.hear(&execution, 0, true).await
    }

    /// Runs a command that has to succeed, and gives what it wrote to its standard output.
    pub(super) async fn run_ok(&self, spec: &ExecSpec) -> String {
        let heard = self.run(spec).await;
        assert_eq!(heard.status.state, ExecState::Exited { code: 0 }, "{:?} wrote {heard:?}", spec.argv);
        heard.stdout_text()
    }

    pub(super) async fn attach(&self, execution: &ExecutionId, offset: u64, follow: bool) -> Box<dyn OutputStream> {
        self.lab.provider().attach(&self.instance(), execution, offset, follow).await.must("attach")
    }

    /// Attaches and listens to the end.
    pub(super) async fn hear(&self, execution: &ExecutionId, offset: u64, follow: bool) -> Heard {
        let stream = self.attach(execution, offset, follow).await;
        self.lab.drive("the end of the output", SOON_MS, Heard::from_stream(stream, offset)).await
    }

    /// What an execution has written so far.
    pub(super) async fn written(&self, execution: &ExecutionId) -> String {
        let heard = self.hear(execution, 0, false).await;
        heard.stdout_text()
    }

    /// Waits until an execution has written something.
    pub(super) async fn until_written(&self, execution: &ExecutionId, text: &str) {
        self.lab
            .until(&format!("the output {text:?}"), SOON_MS, async || {
                self.written(execution).await.contains(text).then_some(())
            })
            .await;
    }

    /// Waits until an execution is over.
    pub(super) async fn until_final(&self, execution: &ExecutionId) -> ExecStatus {
        self.lab
            .until("the end of the execution", SOON_MS, async || {
                let status = self.status(execution).await;
                status.state.is_final().then_some(status)
            })
            .await
    }

    pub(super) async fn cancel(&self, execution: &ExecutionId) -> ExecStatus {
        let mutation = self.mutation();
        let cancel = self.lab.provider().cancel(&mutation, &self.sandbox, execution);
        self.lab.drive("cancel", SOON_MS, cancel).await.must("cancel")
    }

    pub(super) async fn signal(&self, execution: &ExecutionId, signal: i32) -> Result<(), ProviderError> {
        self.lab.provider().signal(&self.mutation(), &self.sandbox, execution, signal).await
    }

    /// One call of input.
    pub(super) async fn input(&self, execution: &ExecutionId, offset: u64, data: &[u8]) -> Result<u64, ProviderError> {
        self.lab.provider().write_stdin(&self.mutation(), &self.sandbox, execution, offset, data).await
    }

    /// Gives all of the input, in as many calls as it takes.
    pub(super) async fn input_all(&self, execution: &ExecutionId, start: u64, data: &[u8]) {
        let end = start + data.len() as u64;
        let mut taken = start;
        self.lab
            .until("the input to be taken", SOON_MS, async || {
                let rest = &data[(taken - start) as usize..];
                taken = self.input(execution, taken, rest).await.must("write_stdin");
                assert!((start..=end).contains(&taken), "{taken} bytes of {end} were taken");
                (taken == end).then_some(())
            })
            .await;
    }

    pub(super) async fn close_input(&self, execution: &ExecutionId) {
        let close = self.lab.provider().close_stdin(&self.mutation(), &self.sandbox, execution).await;
        close.must("close_stdin");
    }

    pub(super) async fn write(&self, path: &str, content: &[u8]) -> FileStat {
        self.write_mode(path, content, None).await.must("file_write")
    }

    pub(super) async fn write_mode(
        &self,
        path: &str,
        content: &[u8],
        mode: Option<u32>,
    ) -> Result<FileStat, ProviderError> {
        let file = FileWrite { path: path.to_owned(), mode, user: None };
        self.lab.provider().file_write(&self.mutation(), &self.sandbox, &file, reader(content)).await
    }

    /// Writes a file of this many bytes, none of which is zero.
    pub(super) async fn fill(&self, path: &str, bytes: u64) -> Result<FileStat, ProviderError> {
        let file = FileWrite { path: path.to_owned(), ..FileWrite::default() };
        let content: ByteReader = Box::new(tokio::io::repeat(0x5a).take(bytes));
        self.lab.provider().file_write(&self.mutation(), &self.sandbox, &file, content).await
    }

    pub(super) async fn read(&self, path: &str) -> Vec<u8> {
        self.read_range(path, 0, None).await.must("file_read")
    }

    pub(super) async fn read_range(
        &self,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Vec<u8>, ProviderError> {
        let mut reader = self.lab.provider().file_read(&self.instance(), path, offset, length).await?;
        let mut content = Vec::new();
        reader.read_to_end(&mut content).await.expect("the content to its end");
        Ok(content)
    }

    pub(super) async fn stat(&self, path: &str) -> Result<FileStat, ProviderError> {
        self.lab.provider().file_stat(&self.instance(), path).await
    }

    /// Whether there is something at a path.
    pub(super) async fn is_there(&self, path: &str) -> bool {
        match self.stat(path).await {
            Ok(_) => true,
            Err(ProviderError::NotFound { .. }) => false,
            Err(other) => panic!("stat of {path} failed: {other:?}"),
        }
    }

    /// Makes a symbolic link, by a command.
    pub(super) async fn link(&self, target: &str, path: &str) {
        let link = Program::Link { target: target.to_owned(), path: path.to_owned() };
        self.run_ok(&link.spec()).await;
    }

    /// A command runs in it, and its identity file names it and no other one (T2).
    pub(super) async fn assert_ready(&self) {
        let nonce = self.lab.nonce();
        assert_eq!(self.run_ok(&program::echo(&nonce)).await, format!("{nonce}\n"));
        let identity = String::from_utf8(self.read(IDENTITY).await).expect("an identity in UTF-8");
        let plain: String = identity.split_whitespace().collect();
        let named = |field: String| [',', '}'].into_iter().any(|end| plain.contains(&format!("{field}{end}")));
        assert!(named(format!("\"sandbox\":\"{}\"", self.sandbox)), "{} says that it is {identity}", self.instance());
        assert!(named(format!("\"generation\":{}", self.generation)), "{} says that it is {identity}", self.instance());
    }

    pub(super) async fn list(&self, path: &str, depth: u32) -> Result<DirListing, ProviderError> {
        self.lab.provider().file_list(&self.instance(), path, depth).await
    }

    pub(super) async fn mkdir(&self, path: &str) -> Result<(), ProviderError> {
        self.lab.provider().file_mkdir(&self.mutation(), &self.sandbox, path).await
    }

    pub(super) async fn rename(&self, from: &str, to: &str) -> Result<(), ProviderError> {
        self.lab.provider().file_move(&self.mutation(), &self.sandbox, from, to).await
    }

    pub(super) async fn remove(&self, path: &str) -> Result<(), ProviderError> {
        self.lab.provider().file_remove(&self.mutation(), &self.sandbox, path).await
    }
}

/// Bytes as a provider takes them.
pub(super) fn reader(content: &[u8]) -> ByteReader {
    Box::new(Cursor::new(content.to_vec()))
}

/// What an attached reader was told, checked for gaps.
#[derive(Debug)]
pub(super) struct Heard {
    /// Where each piece stands, who wrote it, and what.
    pub(super) pieces: Vec<(u64, Stream, Vec<u8>)>,
    /// What was not kept.
    pub(super) cuts: Vec<(u64, u64)>,
    /// What the end said.
    pub(super) status: ExecStatus,
}

impl Heard {
    /// Reads a stream to its end, and checks that every byte from the offset on is either there or cut.
    async fn from_stream(mut stream: Box<dyn OutputStream>, offset: u64) -> Self {
        let (mut pieces, mut cuts) = (Vec::new(), Vec::new());
        let mut at = offset;
        loop {
            match stream.next().await.must("next") {
                Some(OutputEvent::Chunk { offset, stream, data, .. }) => {
                    assert_eq!(offset, at, "a chunk has to start where the one before ended");
                    assert!(!data.is_empty(), "a chunk without bytes");
                    at += data.len() as u64;
                    pieces.push((offset, stream, data));
                }
                Some(OutputEvent::Cut { from, to }) => {
                    assert_eq!(from, at, "a cut has to start where the chunk before ended");
                    assert!(to > from, "a cut of nothing");
                    at = to;
                    cuts.push((from, to));
                }
                Some(OutputEvent::End(status)) => {
                    assert!(status.output_bytes >= at || offset > status.output_bytes, "the end comes before {at}");
                    let more = stream.next().await.must("next after the end");
                    assert!(more.is_none(), "after the end came {more:?}");
                    if status.state.is_final() {
                        assert!(at >= status.output_bytes, "told up to {at}, written were {}", status.output_bytes);
                        assert!(status.ended_at_ms.is_some_and(|end| end >= status.started_at_ms), "{status:?}");
                        assert_eq!(status.pid, None, "what ended has no pid");
                    }
                    return Self { pieces, cuts, status };
                }
                None => panic!("the stream ended without an end"),
            }
        }
    }

    /// All bytes of one stream.
    pub(super) fn bytes(&self, stream: Stream) -> Vec<u8> {
        self.pieces.iter().filter(|(_, from, _)| *from == stream).flat_map(|(_, _, data)| data.clone()).collect()
    }

    /// All bytes of standard output, as text.
    pub(super) fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.bytes(Stream::Stdout)).into_owned()
    }
}
