//! CRIU's images, read: two numbers that say what it is, and messages in the encoding of Protocol Buffers, each after
//! its length.

use std::io;

/// Before the messages: that it is an image, and of which kind.
pub(super) const HEADER_BYTES: usize = 8;

/// One field of a message.
pub(super) struct Field<'a> {
    pub(super) number: u64,
    pub(super) value: Value<'a>,
    /// All of it, as it stands in the message.
    pub(super) whole: &'a [u8],
}

pub(super) enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of a fixed size.
    Other,
}

pub(super) fn bad(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Shows the messages of an image, one after the other; answers with what stands before them.
pub(super) fn messages<'a>(image: &'a [u8], mut look: impl FnMut(&'a [u8]) -> io::Result<()>) -> io::Result<&'a [u8]> {
    let (header, mut rest) = image.split_at_checked(HEADER_BYTES).ok_or_else(|| bad("an image without a header"))?;
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk::<4>().ok_or_else(|| bad("a torn image"))?;
        let length = u32::from_le_bytes(*length) as usize;
        let (message, after) = after.split_at_checked(length).ok_or_else(|| bad("a torn image"))?;
        look(message)?;
        rest = after;
    }
    Ok(header)
}

/// Shows the fields of a message, one after the other.
pub(super) fn fields<'a>(message: &'a [u8], mut look: impl FnMut(Field<'a>) -> io::Result<()>) -> io::Result<()> {
    let mut rest = message;
    while !rest.is_empty() {
        let before = rest;
        let key = number(&mut rest)?;
        let value = match key & 7 {
            0 => Value::Number(number(&mut rest)?),
            1 => skip(&mut rest, 8)?,
            2 => {
                let length = usize::try_from(number(&mut rest)?).map_err(io::Error::other)?;
                let (bytes, after) = rest.split_at_checked(length).ok_or_else(|| bad("a torn message"))?;
                rest = after;
                Value::Bytes(bytes)
            }
            5 => skip(&mut rest, 4)?,
            _ => return Err(bad("a field of an unknown kind")),
        };
        look(Field { number: key >> 3, value, whole: &before[..before.len() - rest.len()] })?;
    }
    Ok(())
}

fn skip<'a>(rest: &mut &[u8], count: usize) -> io::Result<Value<'a>> {
    *rest = rest.get(count..).ok_or_else(|| bad("a torn message"))?;
    Ok(Value::Other)
}

/// Reads a number of seven bits a byte.
fn number(rest: &mut &[u8]) -> io::Result<u64> {
    let mut value = 0;
    for nth in 0..10 {
        let (&byte, after) = rest.split_first().ok_or_else(|| bad("a torn number"))?;
        *rest = after;
        value |= u64::from(byte & 0x7f).checked_shl(7 * nth).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(bad("a number without end"))
}

/// Writes a number of seven bits a byte.
pub(super) fn write_number(written: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        written.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    written.push(value as u8);
}
