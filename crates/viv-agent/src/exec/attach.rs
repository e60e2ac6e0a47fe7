//! Telling a client what a command writes, from any offset on.

use std::io;

use rustix::event::{PollFd, PollFlags, poll};
use viv_agent::output::{Item, Reader};
use viv_agent::proto::{Answer, StreamEvent};
use viv_core::ExecutionId;

use crate::agent::Agent;
use crate::agent::serve::Next;
use crate::conn::Conn;
use crate::error::refused_io;

/// Streams output from disk. A slow client slows only itself: what was dropped meanwhile reads as a cut.
pub(crate) fn attach(agent: &Agent, conn: &Conn, id: &ExecutionId, offset: u64, follow: bool) -> io::Result<Next> {
    let opened = agent.executions.get(id).and_then(|execution| {
        let open = || Ok((execution.follow()?, Reader::open(&execution.dir(), offset)?));
        let (follower, reader) = open().map_err(|cause: io::Error| refused_io("output", &cause))?;
        Ok((execution, follower, reader))
    });
    let (execution, follower, mut reader) = match opened {
        Ok(opened) => opened,
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            return Ok(Next::Request);
        }
    };
    let first = execution.status();
    let stop_at = if follow { u64::MAX } else { first.output_bytes };
    conn.reply(Ok(Answer::Attached(first)))?;
    let mut buf = Vec::new();
    loop {
        // Before the look, so that nothing that comes after it goes unnoticed.
        follower.arm();
        let status = execution.status();
        while reader.offset() < stop_at
            && let Some(item) = reader.next(&mut buf)?
        {
            tell(conn, &item)?;
        }
        if status.state.is_final() || !follow {
            if let Some(item) = reader.finish(status.output_bytes.min(stop_at)) {
                tell(conn, &item)?;
            }
            let is_final = status.state.is_final();
            conn.send(&StreamEvent::End(status))?;
            if is_final {
                drop(follower);
                agent.executions.note_read(&execution);
            }
            return Ok(Next::Request);
        }
        wait(conn, &follower)?;
    }
}

fn tell(conn: &Conn, item: &Item<'_>) -> io::Result<()> {
    match item {
        Item::Chunk { header, data } => conn.send_chunk(header, data),
        Item::Cut { from, to } => conn.send(&StreamEvent::Cut { from: *from, to: *to }),
    }
}

/// Waits for more output or for the end; fails when the client went.
fn wait(conn: &Conn, follower: &super::Follower) -> io::Result<()> {
    let mut fds = [PollFd::new(&follower.wake.0, PollFlags::IN), PollFd::new(conn.stream(), PollFlags::RDHUP)];
    match poll(&mut fds, None) {
        Ok(_) if fds[1].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR) => {
            Err(io::ErrorKind::ConnectionAborted.into())
        }
        Ok(_) | Err(rustix::io::Errno::INTR) => {
            follower.wake.clear();
            Ok(())
        }
        Err(errno) => Err(errno.into()),
    }
}
