//! Trying again, with pauses, and not for ever.

use std::time::{Duration, Instant};

use super::{Options, RegistryError};

/// How long a pause goes on before the caller is asked again whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// What is left of the patience for one thing.
pub(super) struct Patience<'a> {
    options: &'a Options,
    tried: u32,
}

impl<'a> Patience<'a> {
    pub(super) fn new(options: &'a Options) -> Self {
        Self { options, tried: 0 }
    }

    /// Something was gained: the count begins anew.
    pub(super) fn renew(&mut self) {
        self.tried = 0;
    }

    /// Waits before the next attempt, or gives the error back if there is to be none.
    pub(super) fn wait(&mut self, error: RegistryError, go_on: &dyn Fn() -> bool) -> Result<(), RegistryError> {
        if !error.is_passing() || self.tried >= self.options.retries {
            return Err(error);
        }
        let own = self.options.backoff.saturating_mul(1 << self.tried.min(16));
        let asked = match error {
            RegistryError::Throttled { retry_after: Some(after), .. } => after,
            _ => Duration::ZERO,
        };
        self.tried += 1;
        let until = Instant::now() + own.max(asked).min(self.options.backoff_max);
        loop {
            if !go_on() {
                return Err(RegistryError::Cancelled);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(ASK_EVERY));
        }
    }
}

/// Does something small until it succeeds, fails for good, or patience ends.
pub(super) fn retrying<T>(
    options: &Options,
    mut attempt: impl FnMut() -> Result<T, RegistryError>,
) -> Result<T, RegistryError> {
    let mut patience = Patience::new(options);
    loop {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(error) => patience.wait(error, &|| true)?,
        }
    }
}
