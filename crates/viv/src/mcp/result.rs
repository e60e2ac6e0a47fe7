//! Answers, bounded: a model reads all of them.

use rmcp::model::{CallToolResult, ContentBlock};
use serde::Serialize;

/// Most of one text in an answer.
pub(super) const TEXT_BYTES_MAX: usize = 64 << 10;

/// Most of one piece of news.
const LINE_CHARS_MAX: usize = 400;

/// It is so.
pub(super) fn said(text: impl Into<String>) -> CallToolResult {
    CallToolResult::success(vec![ContentBlock::text(text.into())])
}

/// It did not succeed, in words for whoever asked.
pub(super) fn failed(text: &str) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(text.to_owned())])
}

/// Something of the API, as text and as data. What is too long says where all of it is.
pub(super) fn shown(what: &impl Serialize, rest: &str) -> anyhow::Result<CallToolResult> {
    let text = serde_json::to_string_pretty(what)?;
    if text.len() > TEXT_BYTES_MAX {
        return Ok(said(bounded(&text, rest)));
    }
    let mut result = said(text);
    result.structured_content = Some(serde_json::to_value(what)?).filter(serde_json::Value::is_object);
    Ok(result)
}

/// Where a character begins, here or before.
pub(super) fn boundary_before(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// Where a character begins, here or after.
pub(super) fn boundary_after(text: &str, at: usize) -> usize {
    (at..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len())
}

/// Its beginning and its end, and between how much is missing and where that is.
pub(super) fn bounded(text: &str, rest: &str) -> String {
    if text.len() <= TEXT_BYTES_MAX {
        return text.to_owned();
    }
    let half = TEXT_BYTES_MAX / 2;
    let head = boundary_before(text, half);
    let tail = boundary_after(text, text.len() - half);
    format!("{}\n[… {} bytes left out; all of it: {rest} …]\n{}", &text[..head], tail - head, &text[tail..])
}

/// The last line of some output, for somebody to see that it goes on.
pub(super) fn line(news: &str) -> String {
    let last = news.trim_end().rsplit('\n').next().unwrap_or_default();
    last.chars().filter(|letter| !letter.is_control()).take(LINE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_says_where_the_rest_is() {
        assert_eq!(bounded("short", "there"), "short");
        let long = "ü".repeat(TEXT_BYTES_MAX);
        let kept = bounded(&long, "viv attach a b");
        assert!(kept.len() < TEXT_BYTES_MAX + 200 && kept.contains("viv attach a b"), "{}", kept.len());
        assert!(kept.starts_with('ü') && kept.ends_with('ü'));
    }

    #[test]
    fn news_are_one_line_without_anything_that_moves_a_cursor() {
        assert_eq!(line("one\ntwo\x1b[2J three\n\n"), "two[2J three");
        assert_eq!(line(""), "");
    }
}
