//! When a cron expression is due next, in a time zone (L17).
//!
//! ```text
//!   Expression::parse("30 2 * * mon-fri")   five fields, or a word like @daily
//!   Zone::named("Europe/Berlin")            the IANA database, carried along
//!   next_after(&expression, &zone, t)       the first moment after t, or that it never comes
//! ```
//!
//! Where clocks are set forward or back, it is done as the cron of Vixie does it, which is what people know:
//!
//! - An expression whose minute or hour begins with `*` follows the clock on the wall: what the clock skips is left out,
//!   what it shows twice happens twice. `*/5 * * * *` is due every five minutes, whatever the clock does.
//! - Any other one names a time of the day, and is due once on that day: when its time is skipped, at the moment at which
//!   the clock goes on; when its time comes twice, the first time.
//! - Day of month and day of week: when both are restricted, either is enough.
//!
//! No crate for cron is used: those that are kept up do not say which field is wrong, or take seconds and years beside
//! the five fields, and none keeps all of these rules. The time zones and the calendar, which are the hard part, are
//! jiff's.
//!
//! Architecture invariant: no I/O, no clock, no environment. The database of time zones is a part of the program.
#![forbid(unsafe_code)]

mod expression;
mod field;
mod next;
mod zone;

pub use expression::{CronError, Expression, TEXT_BYTES_MAX};
pub use field::FieldName;
pub use next::next_after;
pub use zone::{UnknownZone, Zone};
