//! What is ordered to go wrong on a real daemon: with the next call of a name, so many times.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::plan::Trouble;

/// Before or after a call has its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Nothing of it has happened.
    Before,
    /// It is done, and nobody was told.
    After,
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It goes wrong so.
    Trouble(Trouble),
    /// The daemon is killed at it.
    Killed(Moment),
}

impl Turn {
    /// Whether it is one of these troubles.
    pub(crate) fn is_among(self, of: &[Trouble]) -> bool {
        match self {
            Self::Trouble(trouble) => of.contains(&trouble),
            Self::Killed(_) => false,
        }
    }
}

/// One order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The name of the call, as the trait of provider or store has it.
    pub call: String,
    /// What happens to it.
    pub turn: Turn,
    /// To how many calls.
    pub times: u32,
}

/// Orders that were given and not carried out yet. Whoever makes the call takes its own.
#[derive(Debug)]
pub struct Orders {
    open: Mutex<Vec<Order>>,
    carried_out: Mutex<u64>,
    silence: Duration,
    die: fn(),
}

impl Orders {
    /// None so far. `silence` is how long a call takes that nobody answers, or that is slow; `die` kills the process.
    pub fn new(silence: Duration, die: fn()) -> Self {
        Self { open: Mutex::default(), carried_out: Mutex::default(), silence, die }
    }

    /// One more.
    pub fn give(&self, order: Order) {
        lock(&self.open).push(order);
    }

    /// How many calls went as it was ordered.
    pub fn carried_out(&self) -> u64 {
        *lock(&self.carried_out)
    }

    /// Those that are open are not carried out any more.
    pub fn forget(&self) {
        lock(&self.open).clear();
    }

    pub(crate) fn silence(&self) -> Duration {
        self.silence
    }

    pub(crate) fn late_ms_max(&self) -> u64 {
        2 * u64::try_from(self.silence.as_millis()).unwrap_or(u64::MAX / 2)
    }

    /// The order for this call, if there is one that fits.
    pub(crate) fn take(&self, call: &str, fits: impl Fn(Turn) -> bool) -> Option<Turn> {
        let mut open = lock(&self.open);
        let at = open.iter().position(|order| order.call == call && fits(order.turn))?;
        let turn = open[at].turn;
        open[at].times = open[at].times.saturating_sub(1);
        if open[at].times == 0 {
            open.remove(at);
        }
        *lock(&self.carried_out) += 1;
        Some(turn)
    }

    pub(crate) fn is_killed_at(&self, call: &str) -> Option<Moment> {
        match self.take(call, |turn| matches!(turn, Turn::Killed(_)))? {
            Turn::Killed(moment) => Some(moment),
            Turn::Trouble(_) => None,
        }
    }

    pub(crate) fn die(&self) {
        (self.die)();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p5_an_order_is_carried_out_as_often_as_it_says_and_by_its_own_call_only() {
        let orders = Orders::new(Duration::ZERO, || {});
        orders.give(Order { call: "create".to_owned(), turn: Turn::Trouble(Trouble::Lost), times: 2 });
        let lost = |turn: Turn| turn.is_among(&[Trouble::Lost]);
        assert_eq!(orders.take("destroy", lost), None);
        assert_eq!(orders.take("create", |turn| turn.is_among(&[Trouble::Late])), None);
        assert_eq!(orders.is_killed_at("create"), None);
        assert_eq!(orders.take("create", lost), Some(Turn::Trouble(Trouble::Lost)));
        assert_eq!(orders.take("create", lost), Some(Turn::Trouble(Trouble::Lost)));
        assert_eq!((orders.take("create", lost), orders.carried_out()), (None, 2));
        orders.give(Order { call: "commit".to_owned(), turn: Turn::Killed(Moment::After), times: 1 });
        assert_eq!(orders.is_killed_at("commit"), Some(Moment::After));
    }
}
