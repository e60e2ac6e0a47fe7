//! Words and numbers for people.

use std::io::{self, Write};
use std::process::ExitCode;

/// One line on standard output.
pub(crate) fn say(what: impl std::fmt::Display) -> anyhow::Result<ExitCode> {
    writeln!(io::stdout(), "{what}")?;
    Ok(ExitCode::SUCCESS)
}

/// A number of bytes, short.
#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Microseconds, short.
#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
pub(crate) fn micros(us: u64) -> String {
    if us < 10_000 { format!("{:.1} ms", us as f64 / 1e3) } else { format!("{} ms", us / 1000) }
}

/// A capability in words.
pub(crate) fn word(capability: viv_provider::Capability) -> String {
    let name = serde_json::to_value(capability).unwrap_or_default();
    name.as_str().unwrap_or_default().replace('_', " ")
}

/// A span of time in at most two units, as it is written on a command line: `45s`, `3m10s`, `2h`, `4d`.
pub(crate) fn span(ms: u64) -> String {
    let seconds = ms / 1000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |large: u64, unit: char, small: u64, small_unit: char| {
        if small == 0 { format!("{large}{unit}") } else { format!("{large}{unit}{small}{small_unit}") }
    };
    match () {
        () if seconds == 0 && ms > 0 => format!("{ms}ms"),
        () if minutes == 0 => format!("{seconds}s"),
        () if minutes < 10 => two(minutes, 'm', seconds % 60, 's'),
        () if hours == 0 => format!("{minutes}m"),
        () if hours < 10 => two(hours, 'h', minutes % 60, 'm'),
        () if days < 2 => format!("{hours}h"),
        () => format!("{days}d"),
    }
}

/// Reads a span of time: `90s`, `1h30m`, `500ms`; a number alone is seconds.
pub(crate) fn parse_span(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is no span of time: write it like 90s, 5m, 1h30m or 500ms");
    viv_core::span::parse_span(text).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_written_short_and_read_back() {
        for (ms, text) in [
            (0, "0s"),
            (250, "250ms"),
            (59_999, "59s"),
            (190_000, "3m10s"),
            (600_000, "10m"),
            (5_400_000, "1h30m"),
            (7_200_000, "2h"),
            (90_000_000, "25h"),
            (345_600_000, "4d"),
        ] {
            assert_eq!(span(ms), text);
        }
        for (text, ms) in [("90", 90_000), ("1h30m", 5_400_000), ("500ms", 500), ("2d", 172_800_000)] {
            assert_eq!(parse_span(text), Ok(ms), "{text}");
        }
        assert_eq!(
            parse_span("5x"),
            Err("\"5x\" is no span of time: write it like 90s, 5m, 1h30m or 500ms".to_owned())
        );
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([bytes(0), bytes(1023), bytes(1536), bytes(5 << 30)], ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]);
        assert_eq!([micros(1234), micros(570_000)], ["1.2 ms", "570 ms"]);
    }
}
