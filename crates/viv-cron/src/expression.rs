//! A whole expression.

use std::fmt;
use std::str::FromStr;

use jiff::civil::{Date, Weekday};

use crate::field::{Field, FieldName};

/// Longest expression: every minute of an hour by name, and then some.
pub const TEXT_BYTES_MAX: usize = 256;

/// Why a text is no expression.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CronError {
    /// It is too long.
    #[error("a cron expression has at most {TEXT_BYTES_MAX} bytes")]
    TooLong,
    /// It is a word with an @ that is not known.
    #[error("there is no {text}: the words are @hourly, @daily, @midnight, @weekly, @monthly, @yearly and @annually")]
    Word {
        /// What was given.
        text: String,
    },
    /// It has more or fewer fields.
    #[error("a cron expression has five fields (minute hour day-of-month month day-of-week), and this has {found}")]
    Fields {
        /// How many.
        found: usize,
    },
    /// A field is wrong.
    #[error("the {name} ({text:?}) is wrong: {why}")]
    Field {
        /// Which.
        name: FieldName,
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Five fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expression {
    text: String,
    pub(crate) minute: Field,
    pub(crate) hour: Field,
    day: Field,
    pub(crate) month: Field,
    weekday: Field,
}

impl Expression {
    /// Reads one: five fields, or a word like `@daily`.
    pub fn parse(text: &str) -> Result<Self, CronError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(CronError::TooLong);
        }
        let text = text.trim();
        let fields = match text.to_ascii_lowercase().as_str() {
            "@hourly" => "0 * * * *",
            "@daily" | "@midnight" => "0 0 * * *",
            "@weekly" => "0 0 * * 0",
            "@monthly" => "0 0 1 * *",
            "@yearly" | "@annually" => "0 0 1 1 *",
            word if word.starts_with('@') => return Err(CronError::Word { text: text.to_owned() }),
            _ => text,
        };
        let parts: Vec<&str> = fields.split_ascii_whitespace().collect();
        let &[minute, hour, day, month, weekday] = parts.as_slice() else {
            return Err(CronError::Fields { found: parts.len() });
        };
        Ok(Self {
            text: text.to_owned(),
            minute: Field::parse(FieldName::Minute, minute)?,
            hour: Field::parse(FieldName::Hour, hour)?,
            day: Field::parse(FieldName::DayOfMonth, day)?,
            month: Field::parse(FieldName::Month, month)?,
            weekday: Field::parse(FieldName::DayOfWeek, weekday)?,
        })
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it follows the clock on the wall rather than naming a time of the day.
    pub(crate) fn follows_the_clock(&self) -> bool {
        self.minute.star || self.hour.star
    }

    /// Whether this day is one of its days; the month is looked at apart.
    pub(crate) fn has_day(&self, date: Date) -> bool {
        let day = self.day.has(date.day());
        let weekday = self.weekday.has(match date.weekday() {
            Weekday::Sunday => 0,
            Weekday::Monday => 1,
            Weekday::Tuesday => 2,
            Weekday::Wednesday => 3,
            Weekday::Thursday => 4,
            Weekday::Friday => 5,
            Weekday::Saturday => 6,
        });
        // A field that begins with a star restricts nothing by itself, so the other one alone decides.
        if self.day.star || self.weekday.star { day && weekday } else { day || weekday }
    }
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Expression {
    type Err = CronError;

    fn from_str(text: &str) -> Result<Self, CronError> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str) -> String {
        Expression::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn s5_an_error_says_which_field() {
        assert!(wrong("60 * * * *").starts_with("the minute (\"60\") is wrong"));
        assert!(wrong("* 24 * * *").starts_with("the hour (\"24\") is wrong"));
        assert!(wrong("* * 0 * *").starts_with("the day of month (\"0\") is wrong"));
        assert!(wrong("* * * foo *").contains("jan to dec"));
        assert!(wrong("* * * * 8").starts_with("the day of week (\"8\") is wrong"));
        assert!(wrong("5-1 * * * *").contains("backwards"));
        assert!(wrong("*/0 * * * *").contains("a step is a number from 1 to 59"));
        assert!(wrong("* * * *").contains("this has 4"));
        assert!(wrong("").contains("this has 0"));
        assert!(wrong("0 * * * * *").contains("this has 6"));
        assert!(wrong("@reboot").contains("@daily"));
        assert!(wrong(",, * * * *").contains("minute"));
        assert!(wrong("+5 * * * *").contains("minute"));
        assert!(wrong(&"1,".repeat(200)).contains("at most"));
    }

    #[test]
    fn names_steps_ranges_and_lists_are_read() {
        let same = |one: &str, other: &str| {
            let (one, other) = (Expression::parse(one).unwrap(), Expression::parse(other).unwrap());
            assert_eq!(Expression { text: String::new(), ..one }, Expression { text: String::new(), ..other });
        };
        same("0 0 * JAN-mar Mon,FRI", "0 0 * 1-3 1,5");
        same("0 0 * * fri-sun", "0 0 * * 0,5,6");
        same("0 0 * * 7", "0 0 * * 0");
        // The end of the week is Saturday, unless somebody writes 7.
        same("0 0 * * 1/2", "0 0 * * 1,3,5");
        same("0 0 * * 1-7/2", "0 0 * * 0,1,3,5");
        same("0 0 * * 7/2", "0 0 * * 0");
        same("5/15 8-18/5 * * *", "5,20,35,50 8,13,18 * * *");
        same("@Hourly", " 0  * * * * ");
    }
}
