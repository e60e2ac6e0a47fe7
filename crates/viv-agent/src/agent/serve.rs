//! A connection's conversations, one after another.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Deserialize;
use viv_agent::proto::{Answer, DUMPING, ErrorCode, Fence, Health, Request};

use crate::agent::{Agent, FEATURES, supervise};
use crate::conn::Conn;
use crate::error::{Result, error, invalid};
use crate::{exec, files, ports};

/// How long the reserve waits for a client's request: it has others to serve.
const RESERVE_PATIENCE: Duration = Duration::from_secs(2);

/// How long other connections get to end when quiescing. They end at once, unless the disk hangs.
const QUIESCE_PATIENCE: Duration = Duration::from_secs(5);

/// For how long no connection is accepted after a quiesce, if its window is not shorter, and nobody says when the dump is
/// over: enough to freeze us.
const QUIESCE_PAUSE_MS: u64 = 1000;

/// Whether the connection can be used for another conversation.
pub(crate) enum Next {
    Request,
    Close,
}

/// Serves a connection to its end.
pub(crate) fn serve(agent: &'static Agent, stream: &Arc<UnixStream>) {
    let conn = Conn::new(Arc::clone(stream));
    // An error here is the connection's, and with it the conversation is over.
    while let Ok(Some((json, descriptors))) = conn.read_request() {
        match converse(agent, &conn, &json, descriptors) {
            Ok(Next::Request) => {}
            Ok(Next::Close) | Err(_) => break,
        }
    }
    drop(conn);
    agent.connections.leave(stream);
}

/// Serves one short request: for the reserve, which must not be kept.
pub(crate) fn serve_one(agent: &'static Agent, stream: &Arc<UnixStream>) {
    let conn = Conn::new(Arc::clone(stream));
    let patient = stream.set_read_timeout(Some(RESERVE_PATIENCE));
    if patient.and_then(|()| stream.set_write_timeout(Some(RESERVE_PATIENCE))).is_ok()
        && let Ok(Some((json, descriptors))) = conn.read_request()
    {
        // What comes of a connection that is closed in any case does not matter.
        let _ = match parse(&json) {
            Ok(request) if is_short(&request) => answer(agent, &conn, request, descriptors).map(drop),
            Ok(_) => conn.reply(Err(error(ErrorCode::Exhausted, "the sandbox has no process left to serve this"))),
            Err(refusal) => conn.reply(Err(refusal)),
        };
    }
    drop(conn);
    agent.connections.leave(stream);
}

fn is_short(request: &Request) -> bool {
    matches!(
        request,
        Request::Hello
            | Request::Health
            | Request::Control { .. }
            | Request::ExecStatus { .. }
            | Request::ExecList
            | Request::ExecSignal { .. }
            | Request::ExecCancel { .. }
            | Request::FileStat { .. }
            | Request::Requests
            | Request::RequestAnswer { .. }
    )
}

#[derive(Deserialize)]
struct Named {
    op: String,
}

fn parse(json: &[u8]) -> Result<Request> {
    serde_json::from_slice(json).map_err(|cause| match serde_json::from_slice::<Named>(json) {
        Ok(Named { op }) if !FEATURES.contains(&op.as_str()) => {
            let op: String = op.chars().take(64).collect();
            error(ErrorCode::Unsupported, format!("this agent does not know {op:?}"))
        }
        _ => invalid(format!("not a request: {cause}")),
    })
}

fn converse(agent: &'static Agent, conn: &Conn, json: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<Next> {
    match parse(json) {
        Ok(request) => answer(agent, conn, request, descriptors),
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            Ok(Next::Request)
        }
    }
}

fn answer(agent: &'static Agent, conn: &Conn, request: Request, descriptors: Vec<OwnedFd>) -> io::Result<Next> {
    let result = match request {
        Request::Hello => Ok(Answer::Hello(agent.hello())),
        Request::Health => Ok(Answer::Health(health(agent))),
        Request::Control { descriptors: kinds, hears } => {
            match agent.control.accept(agent, conn, &kinds, hears, descriptors) {
                // The main thread answers.
                Ok(()) => return Ok(Next::Close),
                Err(refusal) => Err(refusal),
            }
        }
        Request::Quiesce { fence, window_ms } => {
            conn.reply(quiesce(agent, conn, &fence, window_ms))?;
            return Ok(Next::Close);
        }
        Request::ExecStart { fence, id, spec } => exec::start::start(agent, &fence, id, &spec).map(Answer::Exec),
        Request::ExecStatus { id } => agent.executions.get(&id).map(|execution| Answer::Exec(execution.status())),
        Request::ExecList => Ok(Answer::Execs(agent.executions.list())),
        Request::ExecAttach { id, offset, follow } => return exec::attach::attach(agent, conn, &id, offset, follow),
        Request::ExecStdin { fence, id, offset, close } => {
            return exec::stdin::stdin(agent, conn, &fence, &id, offset, close);
        }
        Request::ExecSignal { fence, id, signal } => agent.fencing.once(&fence, || {
            agent.executions.get(&id)?.signal(signal)?;
            Ok(Answer::Done)
        }),
        Request::ExecResize { fence, id, size } => agent.fencing.check(&fence).and_then(|()| {
            agent.executions.get(&id)?.resize(size)?;
            Ok(Answer::Done)
        }),
        Request::ExecCancel { fence, id } => agent.fencing.check(&fence).and_then(|()| {
            let execution = agent.executions.get(&id)?;
            exec::end::end(agent, &execution, exec::end::Ending::Cancelled).map(Answer::Exec)
        }),
        Request::FileRead { path, offset, length } => return files::read::read(agent, conn, &path, offset, length),
        Request::FileWrite { fence, path, mode, user } => {
            return files::write::write(agent, conn, &fence, &path, mode, user.as_deref());
        }
        Request::FileStat { path } => files::list::stat(agent, &path).map(Answer::Stat),
        Request::FileList { path, depth } => files::list::list(agent, &path, depth).map(Answer::Listing),
        Request::FileMkdir { fence, path } => agent.fencing.once(&fence, || files::change::mkdir(agent, &path)),
        Request::FileMove { fence, from, to } => {
            agent.fencing.once(&fence, || files::change::rename(agent, &from, &to))
        }
        Request::FileRemove { fence, path } => agent.fencing.once(&fence, || files::change::remove(agent, &path)),
        Request::FileWatch { path, recursive } => return files::watch::watch(agent, conn, &path, recursive),
        Request::ArchiveGet { path } => return files::pack::get(agent, conn, &path),
        Request::ArchivePut { fence, path, bounds } => return files::unpack::put(agent, conn, &fence, &path, bounds),
        Request::Dial { port } => return ports::dial(conn, port),
        Request::Requests => {
            agent.inside.hear(agent, conn)?;
            return Ok(Next::Close);
        }
        Request::RequestAnswer { fence, id, body } => {
            agent.fencing.once(&fence, || agent.inside.answer(agent, &id, body))
        }
    };
    conn.reply(result)?;
    Ok(Next::Request)
}

fn health(agent: &Agent) -> Health {
    let (running, known) = agent.executions.count();
    Health {
        running,
        known,
        connections: agent.connections.count() as u64,
        killing: if agent.control.cgroup().is_some() { "cgroup" } else { "subreaper" }.to_owned(),
    }
}

fn quiesce(agent: &Agent, conn: &Conn, fence: &Fence, window_ms: u64) -> Result<Answer> {
    agent.fencing.check(fence)?;
    // Where it is said how long the dump takes, that is how long.
    let pause_ms_max = if agent.places.run.join(DUMPING).exists() { window_ms } else { QUIESCE_PAUSE_MS };
    supervise::PAUSE_MS.store(window_ms.clamp(1, pause_ms_max.max(1)), Ordering::Release);
    agent.wake.ring();
    let Some(connections_closed) = agent.connections.end_others(conn.stream(), QUIESCE_PATIENCE) else {
        return Err(error(ErrorCode::Failed, "connections did not end in time"));
    };
    agent.inside.hush();
    agent.control.go_away(window_ms);
    Ok(Answer::Quiesced { connections_closed })
}
