//! `viv mcp`: the daemon's sandboxes and tasks as tools of the Model Context Protocol, over standard input and output.
//!
//! ```text
//!   client ──stdio──► rmcp ──► Tools::call_tool ──► a thread that may wait ──► viv-api's client ──HTTP──► daemon
//!                       ▲                                  │
//!                       └──── progress, while it waits ────┘     a cancelled call cancels the command, or stops the task
//! ```
//!
//! Invariants: everything goes through `viv-api`'s client; results are bounded, and say where the rest is; what the tool
//! did and did not succeed in is an answer, and only what no tool could be found for an error of the protocol.

mod result;
mod sandbox;
mod schema;
mod task;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ErrorData, Implementation, InitializeResult,
    ListToolsResult, PaginatedRequestParams, ProgressNotificationParam, ServerCapabilities, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler, ServiceExt};
use serde_json::Value;
use tokio::sync::mpsc;
use viv_api::client::Client;

use crate::client::Daemon;
use crate::fail::{self, FAILED, Failure};
use crate::settings::Global;

/// News that wait to be told; a client that does not read loses the oldest, and nothing waits for it.
const NEWS_MAX: usize = 64;

/// Progress is told at most this often.
const NEWS_PAUSE: Duration = Duration::from_millis(250);

/// What those who connect are told about this.
const INSTRUCTIONS: &str = "Sandboxes in which commands run apart from this machine. Make one with sandbox_create, run \
    commands with execute, and move files with read_file and write_file. A call that is cancelled cancels its command. \
    Work that takes long, or that somebody may want to stop, is a task: task_run, task_show, task_stop, task_continue.";

/// Serves tools to a client that started this.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A variable of ours whose value tasks may be handed behind the gate; models know its name alone
    #[arg(long, value_name = "NAME")]
    credential: Vec<String>,
}

impl Args {
    fn credentials(&self) -> anyhow::Result<Credentials> {
        let value = |name: &String| match std::env::var(name) {
            Ok(value) => Ok((name.clone(), value)),
            Err(_) => Err(Failure::usage(format!("{name} is not set here, or is no text")).into()),
        };
        Ok(Arc::new(self.credential.iter().map(value).collect::<anyhow::Result<_>>()?))
    }
}

pub(crate) fn run(args: &Args, global: &Global) -> ExitCode {
    let connected = args.credentials().and_then(|credentials| Ok((Daemon::connect(global)?, credentials)));
    let served = connected.and_then(|(daemon, credentials)| serve(Arc::new(daemon.client), credentials));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(fail::report(&error, FAILED)),
    }
}

fn serve(client: Arc<Client>, credentials: Credentials) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let tools = Tools { client, credentials };
        let service = tools.serve(rmcp::transport::stdio()).await.context("the client did not say hello")?;
        service.waiting().await.context("the connection broke")?;
        anyhow::Ok(())
    })?;
    // What still waits in a thread is of nobody any more.
    runtime.shutdown_background();
    Ok(())
}

/// Values by their names; the names are all that is told (S6).
type Credentials = Arc<BTreeMap<String, String>>;

/// The tools.
#[derive(Clone)]
struct Tools {
    client: Arc<Client>,
    credentials: Credentials,
}

/// What a tool is handed, on a thread that may wait.
struct Call {
    client: Arc<Client>,
    credentials: Credentials,
    arguments: Value,
    /// Where what happens meanwhile is told.
    news: mpsc::Sender<String>,
    /// What is to be done when the call is cancelled.
    on_cancel: OnCancel,
}

/// Something that undoes what a call has begun.
type Undo = Box<dyn FnOnce() + Send>;

/// Filled in once there is something to be undone.
#[derive(Clone, Default)]
struct OnCancel(Arc<std::sync::Mutex<Cancel>>);

#[derive(Default)]
struct Cancel {
    undo: Option<Undo>,
    cancelled: bool,
}

impl OnCancel {
    fn lock(&self) -> std::sync::MutexGuard<'_, Cancel> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// From now on this undoes it; at once, when it was cancelled before.
    fn set(&self, undo: impl FnOnce() + Send + 'static) {
        let mut cancel = self.lock();
        if cancel.cancelled {
            drop(cancel);
            return undo();
        }
        cancel.undo = Some(Box::new(undo));
    }

    fn cancel(&self) {
        let mut cancel = self.lock();
        cancel.cancelled = true;
        let undo = cancel.undo.take();
        drop(cancel);
        if let Some(undo) = undo {
            undo();
        }
    }

    fn is_cancelled(&self) -> bool {
        self.lock().cancelled
    }
}

impl Call {
    /// Tells what happens, to who reads.
    fn tell(&self, news: impl Into<String>) {
        let _ = self.news.try_send(news.into());
    }

    fn is_cancelled(&self) -> bool {
        self.on_cancel.is_cancelled()
    }
}

/// One tool: what it is called, what it takes, and what it does.
struct Entry {
    name: &'static str,
    about: &'static str,
    takes: fn() -> Value,
    run: fn(&Call) -> anyhow::Result<CallToolResult>,
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    sandbox::TOOLS.iter().chain(task::TOOLS)
}

impl ServerHandler for Tools {
    fn get_info(&self) -> InitializeResult {
        let capabilities = ServerCapabilities::builder().enable_tools().build();
        let mut info = InitializeResult::new(capabilities).with_instructions(INSTRUCTIONS);
        info.server_info = Implementation::new("viv", env!("CARGO_PKG_VERSION"));
        info
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tools = entries().map(|entry| {
            let schema = match (entry.takes)() {
                Value::Object(schema) => schema,
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                    serde_json::Map::new()
                }
            };
            Tool::new(entry.name, entry.about, Arc::new(schema))
        });
        Ok(ListToolsResult::with_all_items(tools.collect()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(entry) = entries().find(|entry| entry.name == request.name) else {
            return Err(ErrorData::invalid_params(format!("there is no tool {}", request.name), None));
        };
        let (news, heard) = mpsc::channel(NEWS_MAX);
        let on_cancel = OnCancel::default();
        let arguments = Value::Object(request.arguments.unwrap_or_default());
        let (client, credentials) = (self.client.clone(), self.credentials.clone());
        let call = Call { client, credentials, arguments, news, on_cancel: on_cancel.clone() };
        let told = tokio::spawn(tell(context.meta.get_progress_token(), context.peer.clone(), heard));
        let work = tokio::task::spawn_blocking(move || (entry.run)(&call));
        let done = tokio::select! {
            done = work => done,
            () = context.ct.cancelled() => {
                // Whoever asked does not wait for the answer any more, and what was begun ends all the same.
                let undone = tokio::task::spawn_blocking(move || on_cancel.cancel()).await;
                let words = if undone.is_ok() { "it was cancelled" } else { "it could not be cancelled" };
                return Ok(result::failed(words).into());
            }
        };
        // It ends when nobody has news any more.
        let _ = told.await;
        let result = match done {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => result::failed(&format!("{error:#}")),
            Err(error) => return Err(ErrorData::internal_error(format!("the tool broke: {error}"), None)),
        };
        Ok(result.into())
    }
}

/// Tells a client what happens, if it asked for that.
async fn tell(
    token: Option<rmcp::model::ProgressToken>,
    peer: rmcp::Peer<RoleServer>,
    mut heard: mpsc::Receiver<String>,
) {
    let mut count = 0.0;
    while let Some(mut news) = heard.recv().await {
        let Some(token) = &token else { continue };
        // What came meanwhile is told as one.
        while let Ok(more) = heard.try_recv() {
            news.push_str(&more);
        }
        count += 1.0;
        let mut progress = ProgressNotificationParam::new(token.clone(), count);
        progress.message = Some(result::line(&news));
        if peer.notify_progress(progress).await.is_err() {
            return;
        }
        tokio::time::sleep(NEWS_PAUSE).await;
    }
}
