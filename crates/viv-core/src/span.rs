//! Spans of time as people write them.

/// Reads a span of time in milliseconds: `90s`, `1h30m`, `500ms`; a number alone is seconds. `None` when it is none.
pub fn parse_span(text: &str) -> Option<u64> {
    if let Ok(seconds) = text.parse::<u64>() {
        return seconds.checked_mul(1000);
    }
    let (mut rest, mut total_ms) = (text, 0_u64);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, after) = rest.split_at(digits);
        let unit = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, after) = after.split_at(unit);
        let unit_ms = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return None,
        };
        total_ms = total_ms.checked_add(number.parse::<u64>().ok()?.checked_mul(unit_ms)?)?;
        rest = after;
    }
    (!text.is_empty()).then_some(total_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read() {
        for (text, ms) in [("90", 90_000), ("1h30m", 5_400_000), ("500ms", 500), ("2d", 172_800_000), ("0", 0)] {
            assert_eq!(parse_span(text), Some(ms), "{text}");
        }
        let none =
            ["", "h", "m", "x", "5x", "-1", "1.5h", "5m 3s", "1h-5m", "99999999999999999999", "99999999999999999d"];
        for text in none {
            assert_eq!(parse_span(text), None, "{text:?}");
        }
    }
}
