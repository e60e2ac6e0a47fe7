//! Tables and times for people. They need no colour and fit 80 columns where the data allows it.

use std::fmt::Write as _;

use crate::text::span;

/// Between two columns.
const GAP: usize = 2;
/// What is not there.
pub(super) const NONE: &str = "-";

/// Rows below a head.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|&word| word.to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| clean(&cell)).collect());
    }

    /// Leaves out the columns of this name in which there is nothing.
    pub(super) fn leave_out_empty(&mut self, names: &[&str]) {
        let Some((head, rows)) = self.rows.split_first() else { return };
        let has_some = |column: usize| rows.iter().any(|row| row.get(column).is_some_and(|cell| cell != NONE));
        let kept: Vec<bool> =
            head.iter().enumerate().map(|(at, name)| !names.contains(&name.as_str()) || has_some(at)).collect();
        for row in &mut self.rows {
            let mut kept = kept.iter();
            row.retain(|_| kept.next().copied().unwrap_or(true));
        }
    }

    /// As text. On a terminal the last column gives way.
    pub(crate) fn render(&self, width: Option<usize>) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widest = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(widest).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                let _ = write!(line, "{cell:<0$}", width + GAP);
            }
            let line = line.trim_end();
            text.push_str(&width.map_or_else(|| line.to_owned(), |width| cut(line, width)));
            text.push('\n');
        }
        text
    }
}

/// Names before values, one a line.
#[derive(Default)]
pub(super) struct Facts {
    facts: Vec<(String, String)>,
}

impl Facts {
    pub(super) fn add(&mut self, name: &str, value: impl Into<String>) {
        self.facts.push((name.to_owned(), clean(&value.into())));
    }

    pub(super) fn maybe(&mut self, name: &str, value: Option<String>) {
        if let Some(value) = value {
            self.add(name, value);
        }
    }

    pub(super) fn render(&self) -> String {
        let width = self.facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0) + GAP;
        let line = |(name, value): &(String, String)| format!("{name:<width$}{value}").trim_end().to_owned() + "\n";
        self.facts.iter().map(line).collect()
    }
}

/// What a sandbox says must not move the cursor here.
pub(super) fn clean(text: &str) -> String {
    if text.chars().any(char::is_control) { text.chars().map(visible).collect() } else { text.to_owned() }
}

fn visible(c: char) -> char {
    if c.is_control() { '\u{fffd}' } else { c }
}

/// At most this many characters.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// How long ago that was, without the word.
pub(super) fn age(now_ms: u64, at_ms: Option<u64>) -> String {
    at_ms.map_or_else(|| NONE.to_owned(), |at_ms| span(whole_seconds(now_ms.saturating_sub(at_ms))))
}

/// How long ago that was.
pub(super) fn ago(now_ms: u64, at_ms: u64) -> String {
    format!("{} ago", span(whole_seconds(now_ms.saturating_sub(at_ms))))
}

/// Clocks of two machines do not agree to the millisecond, and nobody reads it.
fn whole_seconds(ms: u64) -> u64 {
    ms / 1000 * 1000
}

/// How long until then, or since.
pub(super) fn until(now_ms: u64, at_ms: u64) -> String {
    if at_ms >= now_ms { format!("in {}", span(whole_seconds(at_ms - now_ms))) } else { ago(now_ms, at_ms) }
}

/// A time of day in UTC, for lines of logs.
pub(super) fn clock(at_ms: u64) -> String {
    let (days, seconds) = (at_ms / 86_400_000, at_ms / 1000 % 86_400);
    let (year, month, day) = date(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        at_ms % 1000
    )
}

/// Year, month and day of a day since 1970, in the calendar that is in use: years are counted from March, so that the
/// day that some have comes last, in eras of 400 years.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_below_each_other_and_the_last_gives_way() {
        let mut table = Table::new(&["ID", "STATUS", "LABELS"]);
        table.row(["sbx_1".to_owned(), "ready".to_owned(), "team=search".to_owned()]);
        table.row(["sbx_22".to_owned(), "lost".to_owned(), String::new()]);
        assert_eq!(table.render(None), "ID      STATUS  LABELS\nsbx_1   ready   team=search\nsbx_22  lost\n");
        assert_eq!(table.render(Some(20)), "ID      STATUS  LAB…\nsbx_1   ready   tea…\nsbx_22  lost\n");
    }

    #[test]
    fn s6_what_is_shown_does_not_move_the_cursor() {
        let mut table = Table::new(&["A"]);
        table.row(["x\x1b[2Jy\nz".to_owned()]);
        assert_eq!(table.render(None), "A\nx\u{fffd}[2Jy\u{fffd}z\n");
    }

    #[test]
    fn times_are_told_from_now() {
        assert_eq!([age(65_000, Some(5_500)), age(1, None), age(0, Some(9_000))], ["59s", "-", "0s"]);
        assert_eq!([until(1_000, 61_000), until(61_000, 1_000)], ["in 1m", "1m ago"]);
    }

    #[test]
    fn the_calendar_is_right_around_the_days_that_some_years_have() {
        for (at_ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_800_000, "2000-03-01T00:00:00.000Z"),
            (1_794_700_800_123, "2026-11-15T00:00:00.123Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(clock(at_ms), text);
        }
    }
}
