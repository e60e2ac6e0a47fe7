//! Who asks the daemon: once, or, if that was wished, again when it went away in the middle.
//!
//! What is asked again may have been done already: every request here can be repeated, by its nature or by its key.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use viv_api::ErrorCode;
use viv_api::client::{Client, ClientError};

use crate::client::Daemon;
use crate::settings::Global;

/// How long the same thing is asked for: longer than a daemon needs to come again and to verify what it finds.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long before it is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// Somebody who asks.
pub(crate) struct Patient<'a> {
    global: &'a Global,
    again: bool,
    client: RefCell<Client>,
    /// Why something was asked again, each reason once.
    met: RefCell<BTreeSet<String>>,
}

impl<'a> Patient<'a> {
    pub(crate) fn new(global: &'a Global, again: bool) -> anyhow::Result<Self> {
        Ok(Self { global, again, client: RefCell::new(Daemon::connect(global)?.client), met: RefCell::default() })
    }

    /// Why something had to be asked again: codes of errors, or `unreachable`.
    pub(crate) fn met(&self) -> Vec<String> {
        self.met.borrow().iter().cloned().collect()
    }

    /// Asks, and asks again only when the daemon was not there to hear it: for what is wanted to be refused.
    pub(crate) fn once<T>(&self, ask: impl Fn(&Client) -> Result<T, ClientError>) -> Result<T, ClientError> {
        self.until(ask, ClientError::passes)
    }

    /// Asks, and answers with what came of it.
    pub(crate) fn ask<T>(&self, ask: impl Fn(&Client) -> Result<T, ClientError>) -> Result<T, ClientError> {
        self.until(ask, passes)
    }

    fn until<T>(
        &self,
        ask: impl Fn(&Client) -> Result<T, ClientError>,
        passes: impl Fn(&ClientError) -> bool,
    ) -> Result<T, ClientError> {
        let until = Instant::now() + PATIENCE;
        loop {
            let client = self.client.borrow().clone();
            match ask(&client) {
                Err(error) if self.again && passes(&error) && Instant::now() < until => {
                    let code = error.code().map_or("unreachable", ErrorCode::as_str);
                    self.met.borrow_mut().insert(code.to_owned());
                }
                answer => return answer,
            }
            thread::sleep(PAUSE);
            // The next daemon may listen somewhere else; while there is none, the last place is as good as any.
            if let Ok(daemon) = Daemon::connect(self.global) {
                self.client.replace(daemon.client);
            }
        }
    }
}

/// Whether it may be otherwise in a moment: the daemon is away, or has just come and verifies what it found (T4).
fn passes(error: &ClientError) -> bool {
    error.passes()
        || match error.code() {
            Some(
                ErrorCode::NotRunning
                | ErrorCode::Timeout
                | ErrorCode::LifecycleLocked
                | ErrorCode::ProviderUnavailable
                | ErrorCode::StoreUnavailable
                | ErrorCode::ShuttingDown,
            ) => true,
            Some(_) | None => false,
        }
}
