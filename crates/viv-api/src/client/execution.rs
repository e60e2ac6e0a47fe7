//! Executions: started, listed, fed, read, ended.

use viv_core::ExecutionId;

use super::http::{Call, Content, clip};
use super::sandbox::pages;
use super::stream::Lines;
use super::{Client, ClientError, Output, Result, SandboxHandle};
use crate::bound::{IdempotencyKey, Offset, SearchText, Signal, TailLines};
use crate::execution::{Execution, ExecutionStarted, InputTaken, SendSignal, StartExecution, Terminal};
use crate::header;
use crate::page::Page;
use crate::path::{self, fill};
use crate::query::{self, encode};

impl Client {
    /// One part of the list of executions of all sandboxes.
    pub fn executions(&self, query: &query::ListAllExecutions) -> Result<Page<Execution>> {
        self.http.ask(Call::get(path::ALL_EXECUTIONS.to_owned() + &encode(query)))
    }

    /// All of them from there on, part by part.
    pub fn executions_all(&self, query: query::ListAllExecutions) -> impl Iterator<Item = Result<Execution>> + '_ {
        pages(query.cursor.clone(), move |cursor| {
            self.executions(&query::ListAllExecutions { cursor, ..query.clone() })
        })
    }
}

impl<'a> SandboxHandle<'a> {
    /// Starts a command. With a key, asking again starts no second one.
    pub fn start(&self, request: &StartExecution, key: Option<&IdempotencyKey>) -> Result<Execution> {
        // A sandbox that has to be woken takes as long as one that is ensured.
        let call = Call::post(self.path(path::EXECUTIONS)).json(request);
        let mut call = self.call(if request.wake { call.waits(None) } else { call });
        call.idempotency_key = key;
        self.client.http.ask(call)
    }

    /// Starts a command and follows its output from the first byte, by one request: what was started, and an output that
    /// takes itself up again where a connection breaks, as every other does. With a key, asking again starts no second one.
    pub fn start_and_follow(
        &self,
        request: &StartExecution,
        key: Option<&IdempotencyKey>,
    ) -> Result<(Execution, Output<'a>)> {
        let query = query::StartQuery { follow: true, generation: None };
        let call = Call::post(self.path(path::EXECUTIONS) + &encode(&query)).json(request);
        let call = self.call(if request.wake { call.waits(None) } else { call });
        let mut call = call.streams(header::NDJSON);
        call.idempotency_key = key;
        let url = self.client.http.url(&call.path);
        let mut lines = Lines::new(url.clone(), self.client.http.send(call)?);
        let eof = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        let text = lines.next()?.ok_or_else(|| lines.broken(eof()))?;
        let first = serde_json::from_str::<ExecutionStarted>(&text);
        let first = first.map_err(|_| ClientError::Unexpected { url, status: 201, found: clip(text.as_bytes()) })?;
        let started = *first.started;
        // What has to be woken is another generation by now; the execution is in the one that it says.
        let generation = self.generation.map(|_| started.generation);
        Ok((started.clone(), Output::started(self.client, &self.sandbox, generation, &started.id, lines)))
    }

    /// One part of the list of its executions.
    pub fn executions(&self, query: &query::ListExecutions) -> Result<Page<Execution>> {
        self.client.http.ask(self.call(Call::get(self.path(path::EXECUTIONS) + &encode(query))))
    }

    /// All its executions, part by part.
    pub fn executions_all(&self) -> impl Iterator<Item = Result<Execution>> + '_ {
        pages(None, |cursor| self.executions(&query::ListExecutions { cursor, ..query::ListExecutions::default() }))
    }
}

/// A handle on an execution.
#[derive(Debug, Clone)]
pub struct ExecutionHandle<'a> {
    pub(super) sandbox: SandboxHandle<'a>,
    pub(super) execution: ExecutionId,
}

impl<'a> ExecutionHandle<'a> {
    fn path(&self, path: &str) -> String {
        fill(path, &[self.sandbox.sandbox.as_str(), self.execution.as_str()])
    }

    fn post(&self, path: &str) -> Call<'_> {
        self.sandbox.call(Call::post(self.path(path)))
    }

    /// How it stands.
    pub fn get(&self) -> Result<Execution> {
        self.sandbox.client.http.ask(self.sandbox.call(Call::get(self.path(path::EXECUTION))))
    }

    /// Its output from an offset on, as far as it is there.
    pub fn output(&self, offset: u64) -> Output<'a> {
        self.read(offset, false)
    }

    /// Its output from an offset on, until it ends.
    pub fn follow(&self, offset: u64) -> Output<'a> {
        self.read(offset, true)
    }

    /// Its output from the last so many lines on.
    pub fn tail(&self, lines: TailLines, follow: bool) -> Output<'a> {
        self.read(0, follow).tail(lines)
    }

    /// The lines of its output that have this in them.
    pub fn search(&self, text: SearchText, offset: u64) -> Output<'a> {
        self.read(offset, false).search(text)
    }

    fn read(&self, offset: u64, follow: bool) -> Output<'a> {
        let SandboxHandle { client, sandbox, generation } = &self.sandbox;
        Output::new(client, sandbox, *generation, &self.execution, offset, follow)
    }

    /// Gives input; the first byte stands at `offset` in all of it. Bytes that were taken before are not taken again,
    /// so this may be repeated. Fewer may be taken than were given.
    pub fn input(&self, offset: u64, data: &[u8]) -> Result<InputTaken> {
        let query = query::InputQuery { offset: Offset::nearest(offset), generation: None };
        let mut call = self.sandbox.call(Call::post(self.path(path::INPUT) + &encode(&query)));
        call.body = Content::Bytes(data);
        self.sandbox.client.http.ask(call)
    }

    /// Says that there is no more input.
    pub fn close_input(&self) -> Result<()> {
        self.sandbox.client.http.tell(self.post(path::INPUT_CLOSE))
    }

    /// Changes the size of its terminal.
    pub fn resize(&self, size: Terminal) -> Result<()> {
        self.sandbox.client.http.tell(self.post(path::RESIZE).json(&size))
    }

    /// Sends a signal to its first process.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.sandbox.client.http.tell(self.post(path::SIGNAL).json(&SendSignal { signal }))
    }

    /// Ends its whole tree, and answers when it is gone (X3).
    pub fn cancel(&self) -> Result<Execution> {
        self.sandbox.client.http.ask(self.post(path::CANCEL))
    }
}
