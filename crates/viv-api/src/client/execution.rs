//! Executions: started, listed, fed, read, ended.

use viv_core::ExecutionId;

use super::http::{Call, Content};
use super::sandbox::pages;
use super::{Output, Result, SandboxHandle};
use crate::bound::{IdempotencyKey, Offset, Signal};
use crate::execution::{Execution, InputTaken, SendSignal, StartExecution, Terminal};
use crate::page::Page;
use crate::path::{self, fill};
use crate::query::{self, encode};

impl SandboxHandle<'_> {
    /// Starts a command. With a key, asking again starts no second one.
    pub fn start(&self, request: &StartExecution, key: Option<&IdempotencyKey>) -> Result<Execution> {
        // A sandbox that has to be woken takes as long as one that is ensured.
        let call = Call::post(self.path(path::EXECUTIONS)).json(request);
        let mut call = self.call(if request.wake { call.waits(None) } else { call });
        call.idempotency_key = key;
        self.client.http.ask(call)
    }

    /// One part of the list of its executions.
    pub fn executions(&self, query: &query::ListExecutions) -> Result<Page<Execution>> {
        self.client.http.ask(self.call(Call::get(self.path(path::EXECUTIONS) + &encode(query))))
    }

    /// All its executions, part by part.
    pub fn executions_all(&self) -> impl Iterator<Item = Result<Execution>> + '_ {
        pages(None, |cursor| self.executions(&query::ListExecutions { cursor, limit: None, generation: None }))
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
