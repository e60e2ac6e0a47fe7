//! Panics of a world. Tokio swallows those of tasks that nobody waits for, and one of the world itself would end the run
//! without saying which seed it was: both are heard here, and are violations.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether a world runs in this thread: it has one.
    static LISTENS: Cell<bool> = const { Cell::new(false) };
    static HEARD: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// How far the world is, to be told if it does not come back.
    static STEP: Cell<u64> = const { Cell::new(0) };
}

fn hook(info: &PanicHookInfo<'_>) {
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    let payload = info.payload();
    let what = payload.downcast_ref::<&str>().copied();
    let what = what.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without words");
    HEARD.with_borrow_mut(|heard| heard.push(format!("{what} at {place}")));
}

/// Runs a world. Without an answer it did not come back.
pub(crate) fn listening<T>(world: impl FnOnce() -> T) -> Option<T> {
    static ONCE: Once = Once::new();
    // Whoever else panics, in threads that have no world, is told about as ever.
    ONCE.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |info| if LISTENS.get() { hook(info) } else { others(info) }));
    });
    HEARD.take();
    STEP.set(0);
    LISTENS.set(true);
    let lived = catch_unwind(AssertUnwindSafe(world));
    LISTENS.set(false);
    lived.ok()
}

/// What was heard since this was asked last.
pub(crate) fn heard() -> Vec<String> {
    HEARD.take()
}

/// The world is so far.
pub(crate) fn at(step: u64) {
    STEP.set(step);
}

/// How far it came.
pub(crate) fn came_to() -> u64 {
    STEP.get()
}
