//! Who may still change things here, and what was already done.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};

use viv_agent::proto::{AgentError, Answer, ErrorCode, Fence};
use viv_core::{FencingToken, Generation, OperationId};

use crate::agent::lock;
use crate::error::Result;

/// How many operations are remembered: far more than a daemon has in flight.
const OPERATIONS_MAX: usize = 1024;

/// The only place where a fence is checked.
pub(crate) struct Fencing {
    state: Mutex<State>,
    answered: Condvar,
}

struct State {
    generation: Generation,
    token: FencingToken,
    /// Latest last; `None` while the first one is at it.
    operations: VecDeque<(OperationId, Option<Result<Answer>>)>,
}

impl Fencing {
    pub(crate) fn new(generation: Generation, token: FencingToken) -> Self {
        let state = State { generation, token, operations: VecDeque::new() };
        Self { state: Mutex::new(state), answered: Condvar::new() }
    }

    /// Another generation is meant from now on.
    pub(crate) fn serve(&self, generation: Generation, token: FencingToken) {
        let mut state = lock(&self.state);
        state.generation = generation;
        state.token = state.token.max(token);
    }

    /// Older tokens than this are refused from now on.
    pub(crate) fn raise(&self, token: FencingToken) {
        let mut state = lock(&self.state);
        state.token = state.token.max(token);
    }

    /// Whether the sender may change things.
    pub(crate) fn check(&self, fence: &Fence) -> Result<()> {
        check(&mut lock(&self.state), fence)
    }

    /// Does the last step of something that was checked when it began, unless a newer sender was
    /// heard of since. None can come between, as the lock is held: `work` must be short.
    pub(crate) fn still<T>(&self, fence: &Fence, work: impl FnOnce() -> T) -> Result<T> {
        let mut state = lock(&self.state);
        check(&mut state, fence)?;
        Ok(work())
    }

    /// Checks the fence and does the work, once for each operation: a
    /// repetition gets the first answer, and waits for it while it is being made.
    pub(crate) fn once(&self, fence: &Fence, work: impl FnOnce() -> Result<Answer>) -> Result<Answer> {
        let mut state = lock(&self.state);
        check(&mut state, fence)?;
        loop {
            match state.operations.iter().find(|(operation, _)| *operation == fence.operation) {
                Some((_, Some(answer))) => return answer.clone(),
                Some((_, None)) => state = self.answered.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner),
                None => break,
            }
        }
        // What is still being worked on is not forgotten: there are at most as many as connections.
        while state.operations.len() >= OPERATIONS_MAX
            && let Some(done) = state.operations.iter().position(|(_, answer)| answer.is_some())
        {
            state.operations.remove(done);
        }
        state.operations.push_back((fence.operation.clone(), None));
        drop(state);
        let answer = work();
        let mut state = lock(&self.state);
        if let Some(entry) = state.operations.iter_mut().find(|(operation, _)| *operation == fence.operation) {
            entry.1 = Some(answer.clone());
        }
        self.answered.notify_all();
        answer
    }
}

fn check(state: &mut State, fence: &Fence) -> Result<()> {
    if fence.generation != state.generation {
        return Err(AgentError {
            code: ErrorCode::StaleGeneration,
            message: format!("generation {} was meant, this is {}", fence.generation, state.generation),
            current: Some(state.generation.0),
        });
    }
    if fence.token < state.token {
        return Err(AgentError {
            code: ErrorCode::Fenced,
            message: format!("token {} is older than {}", fence.token, state.token),
            current: Some(state.token.0),
        });
    }
    state.token = fence.token;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(operation: &str, generation: u64, token: u64) -> Fence {
        Fence { operation: operation.parse().unwrap(), generation: Generation(generation), token: FencingToken(token) }
    }

    #[test]
    fn older_tokens_and_other_generations_are_refused() {
        let fencing = Fencing::new(Generation(3), FencingToken(5));
        assert_eq!(fencing.check(&fence("op_1", 2, 9)).unwrap_err().code, ErrorCode::StaleGeneration);
        assert_eq!(fencing.check(&fence("op_1", 4, 9)).unwrap_err().current, Some(3));
        assert_eq!(fencing.check(&fence("op_1", 3, 4)).unwrap_err().current, Some(5));
        fencing.check(&fence("op_1", 3, 7)).unwrap();
        assert_eq!(fencing.check(&fence("op_1", 3, 6)).unwrap_err().code, ErrorCode::Fenced);
        fencing.raise(FencingToken(8));
        fencing.raise(FencingToken(2));
        assert_eq!(fencing.check(&fence("op_1", 3, 7)).unwrap_err().current, Some(8));
        // Restored as the next generation.
        fencing.serve(Generation(4), FencingToken(1));
        assert_eq!(fencing.check(&fence("op_1", 3, 9)).unwrap_err().current, Some(4));
        assert_eq!(fencing.check(&fence("op_1", 4, 7)).unwrap_err().current, Some(8));
        fencing.check(&fence("op_1", 4, 8)).unwrap();
    }

    #[test]
    fn an_operation_is_done_once_and_the_table_stays_bounded() {
        let fencing = Fencing::new(Generation(1), FencingToken(0));
        let mut done = 0;
        for _ in 0..3 {
            let answer = fencing.once(&fence("op_a", 1, 0), || {
                done += 1;
                Err(crate::error::invalid("the first time"))
            });
            assert_eq!(answer.unwrap_err().message, "the first time");
        }
        assert_eq!(done, 1);
        for n in 0..3000 {
            fencing.once(&fence(&format!("op_{n}"), 1, 0), || Ok(Answer::Done)).unwrap();
        }
        assert_eq!(lock(&fencing.state).operations.len(), OPERATIONS_MAX);
    }
}
