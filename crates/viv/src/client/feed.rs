//! Our standard input, given to a command.

use std::io::{self, Read};
use std::thread;
use std::time::Duration;

use viv_api::ErrorCode;
use viv_api::client::{Client, ClientError, ExecutionHandle};
use viv_api::execution::Execution;

use super::session;

/// As much as is given at once.
const PIECE_BYTES: usize = 64 << 10;
/// Between two tries, when a command does not read or the daemon is away.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two looks at one that stands still, for however long that is.
const REST_PAUSE: Duration = Duration::from_millis(500);
/// How often an unreachable daemon is tried: half a minute, in which it can have started again.
const TRIES_MAX: u32 = 600;

/// Gives all there is, in a thread that ends with the input, with the command or with us.
pub(super) fn start(client: &Client, execution: &Execution) {
    let (client, execution) = (client.clone(), execution.clone());
    thread::spawn(move || {
        if let Err(error) = feed(&session::of(&client, &execution), execution.stdin_bytes, &mut io::stdin()) {
            eprintln!("viv: input could not be passed on: {error}\r");
        }
    });
}

fn feed(handle: &ExecutionHandle<'_>, mut offset: u64, from: &mut impl Read) -> anyhow::Result<()> {
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return match patiently(handle, || handle.close_input()) {
                Ok(()) => Ok(()),
                Err(error) if is_over(&error) => Ok(()),
                Err(error) => Err(error.into()),
            };
        }
        let mut piece = &buffer[..count];
        while !piece.is_empty() {
            // Bytes that were taken before are not taken again, so this may be repeated.
            let taken = match patiently(handle, || handle.input(offset, piece)) {
                Ok(taken) => taken.stdin_bytes.saturating_sub(offset).min(piece.len() as u64),
                Err(error) if is_over(&error) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            if taken == 0 {
                thread::sleep(PAUSE);
            }
            offset += taken;
            piece = &piece[taken as usize..];
        }
    }
}

/// Tries again while the daemon is away, and for as long as the command stands still with its sandbox.
fn patiently<T>(
    handle: &ExecutionHandle<'_>,
    mut ask: impl FnMut() -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    let mut tries = 0;
    loop {
        match ask() {
            // It is away, or asks to be asked again.
            Err(error) if error.passes() && tries < TRIES_MAX => {
                tries += 1;
                thread::sleep(PAUSE);
            }
            Err(error) if error.code() == Some(ErrorCode::NotRunning) && stands_still(handle) => {
                tries = 0;
                thread::sleep(REST_PAUSE);
            }
            answer => return answer,
        }
    }
}

/// Whether it goes on some day: saved with its memory, or frozen.
fn stands_still(handle: &ExecutionHandle<'_>) -> bool {
    match handle.get() {
        Ok(execution) => !execution.state.is_final(),
        // Nothing is known of it yet.
        Err(error) => error.passes(),
    }
}

/// Whether nobody reads any more; that is told by the output.
fn is_over(error: &ClientError) -> bool {
    match error.code() {
        Some(
            ErrorCode::Conflict
            | ErrorCode::NotRunning
            | ErrorCode::NotFound
            | ErrorCode::Gone
            | ErrorCode::StaleHandle,
        ) => true,
        Some(_) | None => false,
    }
}
