//! One field of an expression: which numbers it names.

use std::fmt;

use crate::expression::CronError;

/// Which field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldName {
    /// 0 to 59.
    Minute,
    /// 0 to 23.
    Hour,
    /// 1 to 31.
    DayOfMonth,
    /// 1 to 12, or jan to dec.
    Month,
    /// 0 to 7, or sun to sat; 0 and 7 are both Sunday.
    DayOfWeek,
}

impl FieldName {
    /// In the order in which they are written.
    pub const ALL: [Self; 5] = [Self::Minute, Self::Hour, Self::DayOfMonth, Self::Month, Self::DayOfWeek];

    fn range(self) -> (u8, u8) {
        match self {
            Self::Minute => (0, 59),
            Self::Hour => (0, 23),
            Self::DayOfMonth => (1, 31),
            Self::Month => (1, 12),
            Self::DayOfWeek => (0, 7),
        }
    }

    /// The last one when nothing else is said: the week ends on Saturday, though 7 may be written.
    fn last(self) -> u8 {
        match self {
            Self::DayOfWeek => 6,
            other => other.range().1,
        }
    }

    /// Words that stand for numbers; the first one for the number that is told with them.
    fn words(self) -> (&'static [&'static str], u8) {
        match self {
            Self::Month => (&["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1),
            Self::DayOfWeek => (&["sun", "mon", "tue", "wed", "thu", "fri", "sat"], 0),
            Self::Minute | Self::Hour | Self::DayOfMonth => (&[], 0),
        }
    }
}

impl fmt::Display for FieldName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::DayOfMonth => "day of month",
            Self::Month => "month",
            Self::DayOfWeek => "day of week",
        })
    }
}

/// The numbers that a field names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field {
    /// A bit for each number.
    bits: u64,
    /// Whether it begins with a star: then it restricts nothing by itself, and follows the clock.
    pub(crate) star: bool,
}

impl Field {
    /// Reads a list of numbers, ranges and steps.
    pub(crate) fn parse(name: FieldName, text: &str) -> Result<Self, CronError> {
        let mut bits = 0;
        for part in text.split(',') {
            bits |= part_bits(name, part).map_err(|why| CronError::Field { name, text: text.to_owned(), why })?;
        }
        if name == FieldName::DayOfWeek && bits & (1 << 7) != 0 {
            bits = (bits & !(1 << 7)) | 1;
        }
        Ok(Self { bits, star: text.starts_with('*') })
    }

    pub(crate) fn has(self, number: i8) -> bool {
        u32::try_from(number).is_ok_and(|number| self.bits & (1 << number) != 0)
    }
}

/// `*`, `7`, `1-5`, `*/10`, `8-18/2`, `5/15` (from 5 to the end).
fn part_bits(name: FieldName, part: &str) -> Result<u64, String> {
    let (min, max) = name.range();
    let (range, step) = match part.split_once('/') {
        None => (part, None),
        Some((range, step)) => {
            let step = number(step).filter(|step| (1..=max).contains(step));
            (range, Some(step.ok_or_else(|| format!("a step is a number from 1 to {max}"))?))
        }
    };
    let (from, to) = if range == "*" {
        (min, name.last())
    } else if let Some((from, to)) = range.split_once('-') {
        (value(name, from)?, value(name, to)?)
    } else {
        let from = value(name, range)?;
        (from, if step.is_some() { from.max(name.last()) } else { from })
    };
    // From Friday to Sunday is what people write, and 0 is also 7.
    let to = if name == FieldName::DayOfWeek && to == 0 && from > 0 { 7 } else { to };
    if from > to {
        return Err(format!("the range {range} goes backwards"));
    }
    Ok((from..=to).step_by(usize::from(step.unwrap_or(1))).fold(0, |bits, number| bits | 1 << number))
}

fn value(name: FieldName, text: &str) -> Result<u8, String> {
    let (min, max) = name.range();
    let (words, first) = name.words();
    let lower = text.to_ascii_lowercase();
    let word = words.iter().position(|word| *word == lower).map(|at| first + at as u8);
    let found = word.or_else(|| number(text)).filter(|number| (min..=max).contains(number));
    found.ok_or_else(|| match words {
        [] => format!("it takes numbers from {min} to {max}, ranges (a-b), lists (a,b) and steps (*/n)"),
        [first, .., last] => format!("it takes numbers from {min} to {max}, or {first} to {last}"),
        [only] => format!("it takes numbers from {min} to {max}, or {only}"),
    })
}

fn number(text: &str) -> Option<u8> {
    (text.len() <= 2 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}
