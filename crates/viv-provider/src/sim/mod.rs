//! A provider in memory, for simulation (P1): the same calls at the same
//! times give the same answers.
//!
//! ```text
//!   SimProvider ──► State (one lock) ──┬── Fences      who may change what, for ever
//!        │                             ├── Instance ──┬── Execution ── Process, Output
//!        ▼                             │              └── Tree
//!     SimClock                         └── Saved       snapshots
//! ```
//!
//! Time is the [`SimClock`]'s. Before a call is answered, everything that is
//! due by then happens in its order (`State::settle`); nothing happens
//! between calls. Whoever waits looks again when the clock rings.
//!
//! Commands are those of [`crate::conformance::program`]; any other one ends
//! as `Failed`.
//!
//! Architecture invariants: no real time, no randomness, no timers, no tasks.

mod archive;
mod clock;
mod execution;
mod fence;
mod files;
mod instance;
mod lifecycle;
mod output;
mod process;
mod provider;
mod snapshot;
mod state;
mod stream;
mod tree;

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use clock::SimClock;

use crate::capability::{Capabilities, Capability};
use crate::error::ProviderError;
use state::State;
use viv_core::{EndCause, SandboxId, SnapshotId};

/// Everything that can be simulated, which is everything but files of snapshots.
const CAPABILITIES: [Capability; 26] = [
    Capability::Freeze,
    Capability::Extend,
    Capability::HardDeadline,
    Capability::SaveStopped,
    Capability::SaveLive,
    Capability::SaveMemory,
    Capability::Restore,
    Capability::Fork,
    Capability::Tty,
    Capability::FileWatch,
    Capability::Ports,
    Capability::Requests,
    Capability::EndPushed,
    Capability::LimitCpu,
    Capability::LimitCpuBurst,
    Capability::LimitMemory,
    Capability::LimitProcesses,
    Capability::LimitDisk,
    Capability::EgressAll,
    Capability::LimitIoRead,
    Capability::LimitIoWrite,
    Capability::LimitOpenFiles,
    Capability::LimitsLive,
    Capability::LimitDiskLive,
    Capability::Usage,
    Capability::ProvenKill,
];

/// A provider in memory. Clones share their state.
#[derive(Debug, Clone)]
pub struct SimProvider {
    clock: SimClock,
    state: Arc<Mutex<State>>,
}

impl SimProvider {
    /// One that can do everything, on this clock.
    pub fn new(clock: SimClock) -> Self {
        let all = CAPABILITIES.into_iter().fold(Capabilities::default(), Capabilities::with);
        Self::with_capabilities(clock, all)
    }

    /// One that can do only this, to see how callers cope.
    pub fn with_capabilities(clock: SimClock, capabilities: Capabilities) -> Self {
        let state = State::new(capabilities, clock.now_ms());
        Self { clock, state: Arc::new(Mutex::new(state)) }
    }

    /// Ends what lives of a sandbox, as if it had ended by itself. Whether there was something.
    pub fn crash(&self, sandbox: &SandboxId, cause: EndCause) -> bool {
        let now_ms = self.clock.now_ms();
        let mut state = self.settled();
        let lives = state.instances.get_mut(sandbox).filter(|instance| instance.ended().is_none());
        let ended = lives.map(|instance| instance.end(now_ms, cause)).is_some();
        drop(state);
        self.clock.ring();
        ended
    }

    /// Whether what lives of a sandbox has no way out, because somebody cut it.
    pub fn is_cut(&self, sandbox: &SandboxId) -> bool {
        self.settled().instances.get(sandbox).is_some_and(|instance| instance.is_cut)
    }

    /// So often from now on, what was cut cannot be connected again.
    pub fn fail_connects(&self, times: u32) {
        self.settled().connects_fail = times;
    }

    /// A snapshot is not what was saved any more: it says so, and is not restored. Whether there was one.
    pub fn damage_snapshot(&self, snapshot: &SnapshotId) -> bool {
        self.settled().damage_snapshot(snapshot)
    }

    /// Which part of the memory that sandboxes share is left from now on.
    pub fn set_memory_left(&self, left: Option<f64>) {
        self.settled().memory_left = left;
    }

    /// From now on no memory can be saved, for a reason that nobody is told before; or it can again.
    pub fn fail_dumps(&self, why: Option<&str>) {
        self.settled().dumps_fail = why.map(str::to_owned);
    }

    /// What it can do may change, and is worth another look after this time; to be said before anybody asks.
    pub fn look_again_after(&self, after: Duration) {
        self.settled().looks_again_after = Some(after);
    }

    /// From now on it declares that memory cannot be saved, for this reason; or that it can.
    pub fn declare_no_memory(&self, why: Option<&str>) {
        let mut state = self.settled();
        let all = std::mem::take(&mut state.capabilities);
        state.capabilities = match why {
            Some(why) => all.without(Capability::SaveMemory, why),
            None => all.with(Capability::SaveMemory),
        };
    }

    /// The state as it is now.
    fn settled(&self) -> MutexGuard<'_, State> {
        // A panic inside a call is a bug there; the state is still the best one there is.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.settle(self.clock.now_ms());
        state
    }

    /// Looks at the state.
    fn look<T>(&self, look: impl FnOnce(&State) -> Result<T, ProviderError>) -> Result<T, ProviderError> {
        look(&self.settled())
    }

    /// Changes the state, and lets whoever waits look at it.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T, ProviderError>) -> Result<T, ProviderError> {
        let result = change(&mut self.settled());
        self.clock.ring();
        result
    }

    /// Waits until there is something to see.
    async fn wait<T>(&self, mut look: impl FnMut(&State) -> Option<T>) -> T {
        self.wait_changing(|state| look(state)).await
    }

    /// The same for who takes what he sees.
    async fn wait_changing<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            // Listening begins before the look, so a ring between look and wait is heard.
            let mut ring = pin!(self.clock.next_ring());
            ring.as_mut().enable();
            if let Some(seen) = look(&mut self.settled()) {
                return seen;
            }
            ring.await;
        }
    }
}
