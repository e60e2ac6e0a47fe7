//! The terminal that we are on: its size, and raw mode, which is taken back on every way out.

use std::io::{self, IsTerminal};
use std::sync::Mutex;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use viv_api::bound::TerminalSide;
use viv_api::execution::Terminal;

/// When nobody says how large it is.
const ROWS: u16 = 24;
const COLUMNS: u16 = 80;

/// How the terminal was, while it is raw. It is outside of any guard because a signal ends the program beside them.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Whether somebody sits at both ends.
pub(super) fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// How large it is.
pub(super) fn size() -> Terminal {
    let size = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin()));
    let (rows, cols) = size.map_or((ROWS, COLUMNS), |size| (size.ws_row, size.ws_col));
    let bounded = |count: u16, otherwise: u16| TerminalSide::nearest(if count == 0 { otherwise } else { count }.into());
    Terminal { rows: bounded(rows, ROWS), cols: bounded(cols, COLUMNS) }
}

/// Every key goes to the command, until this is dropped.
pub(super) struct Raw(());

impl Raw {
    /// If there is a terminal.
    pub(super) fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        *BEFORE.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(before);
        tcsetattr(io::stdin(), OptionalActions::Drain, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// As it was; nothing when it is.
pub(super) fn restore() {
    let before = BEFORE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    if let Some(before) = before {
        // Not `Drain`: a terminal that is stopped would keep us here.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
    }
}
