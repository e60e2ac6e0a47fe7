//! Signals to us, while a command runs in a sandbox.
//!
//! The first request to stop is passed on: to the command, or as a cancel. The second ends us, with the terminal as it
//! was. A change of the window's size goes to the command's terminal.

use std::process;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use tokio::signal::unix::{SignalKind, signal};
use viv_api::bound::Signal;
use viv_api::client::Client;
use viv_api::execution::Execution;

use super::{session, terminal};
use crate::fail::SIGNAL_BASE;

/// What a request to stop means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Policy {
    /// The command with all that it started is cancelled.
    Cancel,
    /// The command gets the signal.
    Pass,
    /// We go, the command stays.
    Leave,
}

/// Signals to us, and what becomes of them.
#[derive(Clone)]
pub(super) struct Interrupts {
    shared: Arc<Shared>,
}

struct Shared {
    client: Client,
    policy: Policy,
    /// The first signal; 0 before it.
    first: AtomicU8,
    /// What runs.
    command: Mutex<Option<Command>>,
}

#[derive(Clone)]
struct Command {
    execution: Execution,
    tty: bool,
}

impl Interrupts {
    /// From here on, signals do not end us by themselves.
    pub(super) fn catch(client: &Client, policy: Policy) -> anyhow::Result<Self> {
        let shared = Shared { client: client.clone(), policy, first: AtomicU8::new(0), command: Mutex::new(None) };
        let caught = Self { shared: Arc::new(shared) };
        let (ready, is_ready) = mpsc::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let of_thread = caught.clone();
        thread::spawn(move || runtime.block_on(of_thread.listen(&ready)));
        is_ready.recv()??;
        Ok(caught)
    }

    /// The signal that asked us to stop, if one did.
    pub(super) fn signal(&self) -> Option<u8> {
        Some(self.shared.first.load(Ordering::SeqCst)).filter(|&signal| signal > 0)
    }

    /// This is what runs now.
    pub(super) fn runs(&self, execution: &Execution, tty: bool) {
        *self.command() = Some(Command { execution: execution.clone(), tty });
        // A signal that came before there was anything to pass it on to.
        if let Some(signal) = self.signal() {
            self.pass_on(signal);
        }
    }

    fn command(&self) -> std::sync::MutexGuard<'_, Option<Command>> {
        self.shared.command.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn listen(&self, ready: &mpsc::Sender<std::io::Result<()>>) {
        let kinds =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup(), SignalKind::window_change()];
        let mut signals = Vec::new();
        for kind in kinds {
            match signal(kind) {
                Ok(signal) => signals.push(signal),
                Err(error) => {
                    let _ = ready.send(Err(error));
                    return;
                }
            }
        }
        let _ = ready.send(Ok(()));
        let [interrupt, terminate, hangup, window] = &mut signals[..] else { return };
        loop {
            let kind = tokio::select! {
                _ = interrupt.recv() => kinds[0],
                _ = terminate.recv() => kinds[1],
                _ = hangup.recv() => kinds[2],
                _ = window.recv() => kinds[3],
            };
            if kind == SignalKind::window_change() {
                self.in_background(Self::resize);
                continue;
            }
            let number = kind.as_raw_value() as u8;
            let is_first = self.shared.first.compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst).is_ok();
            if !is_first || self.shared.policy == Policy::Leave {
                leave(number);
            }
            let is_alone = kind == SignalKind::hangup() && self.shared.policy == Policy::Pass;
            self.in_background(move |caught| {
                caught.pass_on(number);
                // Whoever sat here is gone, and the command may not care.
                if is_alone {
                    leave(number);
                }
            });
        }
    }

    /// So that the next signal is heard also while this one is dealt with.
    fn in_background(&self, what: impl FnOnce(&Self) + Send + 'static) {
        let caught = self.clone();
        thread::spawn(move || what(&caught));
    }

    fn pass_on(&self, signal: u8) {
        let Some(Command { execution, .. }) = self.command().clone() else { return };
        let handle = session::of(&self.shared.client, &execution);
        let told = match self.shared.policy {
            Policy::Pass => handle.signal(Signal::nearest(signal.into())),
            Policy::Cancel => handle.cancel().map(drop),
            Policy::Leave => Ok(()),
        };
        if let Err(error) = told {
            eprintln!("viv: the signal could not be passed on: {error}\r");
        }
    }

    fn resize(&self) {
        let Some(Command { execution, tty: true }) = self.command().clone() else { return };
        // The next change of size tries again; a wrong size is no reason to end anything.
        let _ = session::of(&self.shared.client, &execution).resize(terminal::size());
    }
}

/// Ends us, with the terminal as it was.
fn leave(signal: u8) -> ! {
    terminal::restore();
    process::exit(i32::from(SIGNAL_BASE + signal))
}
