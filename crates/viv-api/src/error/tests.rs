use std::collections::BTreeSet;

use super::*;
use crate::catalogue;

#[test]
fn s5_the_catalogue_is_complete() {
    let words: BTreeSet<&str> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(words.len(), ErrorCode::ALL.len(), "each once");
    for &code in ErrorCode::ALL {
        let written = serde_json::to_value(code).unwrap();
        assert_eq!(written, code.as_str(), "one spelling");
        assert_eq!(serde_json::from_value::<ErrorCode>(written).unwrap(), code);
        let entry = catalogue::entry(code);
        assert_eq!(entry.example.code, code, "an example of itself");
        assert!((400..600).contains(&code.status()));
    }
    // A code that is left out of the list would have no page. Serde's own list is the complete one.
    let unknown = serde_json::from_str::<ErrorCode>("\"no_such_code\"").unwrap_err().to_string();
    for word in unknown.split('`').skip(3).step_by(2) {
        assert!(words.contains(word), "{word} is not in ErrorCode::ALL");
    }
    assert_eq!(unknown.matches('`').count() / 2 - 1, words.len());
}

#[test]
fn s5_nothing_that_a_request_says_is_above_499() {
    let above: Vec<_> = ErrorCode::ALL.iter().copied().filter(|code| code.status() >= 500).collect();
    let ours = [
        ErrorCode::Internal,
        ErrorCode::ProviderUnavailable,
        ErrorCode::StoreUnavailable,
        ErrorCode::ShuttingDown,
        ErrorCode::Draining,
    ];
    assert_eq!(above, ours);
    for code in above {
        assert_eq!(code.status() == 503, code.retry_after_s().is_some(), "{code}");
    }
}

#[test]
fn t5_a_stale_handle_names_the_current_generation() {
    let body = ApiError::stale_handle(Generation(1), Generation(4), "it was lost").into_body();
    let json = serde_json::to_value(&body).unwrap();
    assert_eq!(body.error.status(), 410);
    assert_eq!(json["error"]["details"]["current_generation"], 4);
    assert_eq!(json["error"]["details"]["what"], "it was lost");
    assert_eq!(json["error"]["docs"], "docs/errors/stale_handle.md");
    assert_eq!(serde_json::from_value::<ErrorBody>(json).unwrap(), body);
}

#[test]
fn an_error_of_a_newer_server_is_still_read() {
    let text = r#"{"error":{"code":"gone","message":"m","docs":"d","new":1,"details":{"newer":2,"what":"w"}}}"#;
    let body: ErrorBody = serde_json::from_str(text).unwrap();
    assert_eq!(body.error.details.unwrap().what.as_deref(), Some("w"));
}
