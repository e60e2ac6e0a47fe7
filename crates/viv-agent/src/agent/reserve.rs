//! A thread that is always there.
//!
//! A workload can use up every process of the sandbox, and threads count as
//! processes. Then no thread can be started for a connection or for a kill,
//! although a kill is just what is needed. The reserve does such work, one
//! piece after another; it serves only short requests.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};

use crate::agent::{Agent, lock, serve, spawn};
use crate::exec::end::Ending;
use crate::exec::{Execution, end};

/// Connections and kills that wait; beyond it the oldest client is turned away.
const WAITING_MAX: usize = 64;

/// What the reserve can do.
pub(crate) enum Work {
    Serve(Arc<UnixStream>),
    End(Arc<Execution>, Ending),
}

/// Its queue.
#[derive(Default)]
pub(crate) struct Reserve {
    waiting: Mutex<VecDeque<Work>>,
    came: Condvar,
}

impl Reserve {
    /// Starts the thread; called once, before any workload exists.
    pub(crate) fn start(agent: &'static Agent) -> std::io::Result<()> {
        spawn("reserve", move || {
            loop {
                match agent.reserve.next() {
                    Work::Serve(stream) => serve::serve_one(agent, &stream),
                    Work::End(execution, ending) => drop(end::end(agent, &execution, ending)),
                }
            }
        })
    }

    fn next(&self) -> Work {
        let mut waiting = lock(&self.waiting);
        loop {
            if let Some(work) = waiting.pop_front() {
                return work;
            }
            waiting = self.came.wait(waiting).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// Hands over work. Kills are never refused: there are at most as many as executions.
    pub(crate) fn push(&self, agent: &Agent, work: Work) {
        let mut waiting = lock(&self.waiting);
        let oldest_client = waiting.iter().position(|work| matches!(work, Work::Serve(_)));
        let turned_away =
            oldest_client.filter(|_| waiting.len() >= WAITING_MAX).and_then(|client| waiting.remove(client));
        waiting.push_back(work);
        drop(waiting);
        self.came.notify_one();
        if let Some(Work::Serve(stream)) = turned_away {
            agent.connections.leave(&stream);
        }
    }
}
