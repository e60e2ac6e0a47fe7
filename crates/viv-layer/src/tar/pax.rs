//! PAX records: what does not fit into a header, as `LENGTH KEY=VALUE` lines.

use crate::meta::Time;

/// The record of a kind that no header knows: only we read it.
pub(crate) const KIND: &[u8] = b"VIVARIUM.kind";
pub(crate) const SOCKET: &[u8] = b"socket";
pub(crate) const XATTR: &[u8] = b"SCHILY.xattr.";

/// Adds a record. Its length counts its own digits.
pub(crate) fn push(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} ").as_bytes());
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// Takes records apart, in their order. None if they are no such lines.
pub(crate) fn parse(mut records: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut pairs = Vec::new();
    while !records.is_empty() {
        let space = records.iter().position(|&byte| byte == b' ')?;
        let length = usize::try_from(decimal(&records[..space])?).ok()?;
        let record = records.get(space + 1..length)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|&byte| byte == b'=')?;
        pairs.push((&record[..equals], &record[equals + 1..]));
        records = &records[length..];
    }
    Some(pairs)
}

/// Digits only: neither sign nor space.
pub(crate) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |value, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// A time as PAX writes it: `-1.5` is half a second before -1.
pub(crate) fn write_time(time: Time) -> String {
    if time.nanos == 0 {
        return time.seconds.to_string();
    }
    let (sign, seconds, nanos) = if time.seconds < 0 {
        ("-", (time.seconds + 1).unsigned_abs(), 1_000_000_000 - time.nanos)
    } else {
        ("", time.seconds.unsigned_abs(), time.nanos)
    };
    format!("{sign}{seconds}.{nanos:09}").trim_end_matches('0').to_owned()
}

pub(crate) fn read_time(text: &[u8]) -> Option<Time> {
    let (negative, text) = text.strip_prefix(b"-").map_or((false, text), |text| (true, text));
    let dot = text.iter().position(|&byte| byte == b'.').unwrap_or(text.len());
    let fraction = text.get(dot + 1..).unwrap_or_default();
    let seconds = i64::try_from(decimal(&text[..dot])?).ok()?;
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    // Finer than nanoseconds is cut off.
    let nanos =
        (0..9).fold(0, |nanos, place| nanos * 10 + fraction.get(place).map_or(0, |digit| u32::from(digit - b'0')));
    Some(match (negative, nanos) {
        (false, nanos) => Time { seconds, nanos },
        (true, 0) => Time { seconds: -seconds, nanos },
        (true, nanos) => Time { seconds: -seconds - 1, nanos: 1_000_000_000 - nanos },
    })
}

/// The name of an extended attribute as a key, which cannot hold `=`: written as GNU tar does.
pub(crate) fn escape(name: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(name.len());
    for &byte in name {
        match byte {
            b'%' => escaped.extend_from_slice(b"%25"),
            b'=' => escaped.extend_from_slice(b"%3D"),
            byte => escaped.push(byte),
        }
    }
    escaped
}

pub(crate) fn unescape(mut key: &[u8]) -> Vec<u8> {
    let mut name = Vec::with_capacity(key.len());
    while let Some((&first, rest)) = key.split_first() {
        let (byte, rest) = match key {
            [b'%', b'2', b'5', rest @ ..] => (b'%', rest),
            [b'%', b'3', b'D', rest @ ..] => (b'=', rest),
            _ => (first, rest),
        };
        name.push(byte);
        key = rest;
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_were_written() {
        for length in [0, 1, 80, 90, 91, 92, 93, 94, 95, 96, 990, 991, 992, 993, 70_000] {
            let mut records = Vec::new();
            let value = vec![b'\n'; length];
            push(&mut records, b"a", &value);
            push(&mut records, b"SCHILY.xattr.user.b", b"=");
            assert_eq!(parse(&records).unwrap(), [(&b"a"[..], &value[..]), (b"SCHILY.xattr.user.b", b"=")]);
            assert_eq!(parse(&records[..records.len() - 1]), None);
        }
        for bad in [
            &b"6 a=\n"[..],
            b"4 a=\n",
            b"0 ",
            b" a=b\n",
            b"-1 a=b\n",
            b"8 abc=\n",
            b"99999999999999999999 a=b\n",
            b"3 \n",
        ] {
            assert!(parse(bad).is_none(), "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn times_before_1970_and_between_seconds_survive() {
        for (seconds, nanos) in
            [(0, 0), (0, 1), (-1, 999_999_999), (-1, 0), (-2, 500_000_000), (1 << 40, 120), (-77, 1)]
        {
            let time = Time { seconds, nanos };
            assert_eq!(read_time(write_time(time).as_bytes()), Some(time), "{}", write_time(time));
        }
        assert_eq!(write_time(Time { seconds: -2, nanos: 500_000_000 }), "-1.5");
        assert_eq!(read_time(b"1.1234567899"), Some(Time { seconds: 1, nanos: 123_456_789 }));
        for bad in [&b""[..], b"-", b".5", b"1.x", b"--1", b"9223372036854775808", b"1e9"] {
            assert_eq!(read_time(bad), None);
        }
    }

    #[test]
    fn keys_hold_any_name() {
        for name in [&b"user.a=b%c"[..], b"user.%3D", b"%", b"", b"user.%25=%"] {
            assert!(!escape(name).contains(&b'='));
            assert_eq!(unescape(&escape(name)), name);
        }
    }
}
