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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([bytes(0), bytes(1023), bytes(1536), bytes(5 << 30)], ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]);
        assert_eq!([micros(1234), micros(570_000)], ["1.2 ms", "570 ms"]);
    }
}
