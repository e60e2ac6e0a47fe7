//! The next moment at which an expression is due.

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::AmbiguousOffset;
use jiff::{SignedDuration, Span, Timestamp};

use crate::expression::Expression;
use crate::zone::Zone;

/// How far is looked ahead: from one 29 February to the next are eight years, over the turn of most centuries.
const DAYS_AHEAD_MAX: i32 = 9 * 366;

/// More than any clock is set back by.
const SHIFT: SignedDuration = SignedDuration::from_hours(4);

/// The first moment after this one at which the expression is due; `None` when it never is (30 February), or not in
/// any time that can be told.
///
/// Both are milliseconds since 1970. Every answer is a whole minute of the clock in that zone, and is later than what
/// was given, so that asking again with the answer gives every occurrence once.
pub fn next_after(expression: &Expression, zone: &Zone, after_ms: u64) -> Option<u64> {
    let after = Timestamp::from_millisecond(i64::try_from(after_ms).ok()?).ok()?;
    let local = zone.0.to_datetime(after);
    // What the clock shows is not in the order of time where it is set back, so it is begun a little before, and gone on
    // for a little after something was found.
    let begin = local.checked_sub(SHIFT).ok()?;
    let mut best: Option<(Timestamp, DateTime)> = None;
    let mut date = begin.date();
    for _ in 0..DAYS_AHEAD_MAX {
        if best.is_some_and(|(_, shown)| date > (shown + SHIFT).date()) {
            break;
        }
        if expression.month.has(date.month()) && expression.has_day(date) {
            on_day(expression, zone, date, after, &mut best);
        }
        date = date.checked_add(Span::new().days(1)).ok()?;
    }
    best.and_then(|(at, _)| u64::try_from(at.as_millisecond()).ok())
}

/// Looks at all times of a day.
fn on_day(
    expression: &Expression,
    zone: &Zone,
    date: Date,
    after: Timestamp,
    best: &mut Option<(Timestamp, DateTime)>,
) {
    for hour in (0..24).filter(|hour| expression.hour.has(*hour)) {
        for minute in (0..60).filter(|minute| expression.minute.has(*minute)) {
            let shown = date.to_datetime(Time::constant(hour, minute, 0, 0));
            if best.is_some_and(|(_, found)| shown > found + SHIFT) {
                return;
            }
            for at in moments(expression, zone, shown).into_iter().flatten() {
                if at > after && best.is_none_or(|(found, _)| at < found) {
                    *best = Some((at, shown));
                }
            }
        }
    }
}

/// The moments at which this is due that the clock shows so: none, one, or two.
fn moments(expression: &Expression, zone: &Zone, shown: DateTime) -> [Option<Timestamp>; 2] {
    match zone.0.to_ambiguous_timestamp(shown).offset() {
        AmbiguousOffset::Unambiguous { offset } => [offset.to_timestamp(shown).ok(), None],
        AmbiguousOffset::Gap { .. } if expression.follows_the_clock() => [None, None],
        AmbiguousOffset::Gap { before, .. } => {
            [before.to_timestamp(shown).ok().and_then(|at| end_of_gap(zone, at)), None]
        }
        AmbiguousOffset::Fold { before, after } => {
            let second = if expression.follows_the_clock() { after.to_timestamp(shown).ok() } else { None };
            [before.to_timestamp(shown).ok(), second]
        }
    }
}

/// The moment at which the clock goes on, of the gap in which this one would be by the clock of before.
fn end_of_gap(zone: &Zone, at: Timestamp) -> Option<Timestamp> {
    let later = at.checked_add(SignedDuration::from_secs(1)).ok()?;
    zone.0.preceding(later).next().map(|transition| transition.timestamp())
}
