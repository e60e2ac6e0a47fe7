//! Places on the host are for those who run it (S6).
//!
//! What went wrong is told in words that name files of the host: in the cause of a phase, in the journal, in the log, in
//! errors. The words are kept as they are, since an operator needs them. For a key of a project those places are taken
//! out of every answer, here and nowhere else: out of the words that are ours, never out of what came from a sandbox.

use axum::body::Body;
use axum::http::{HeaderValue, Response, header};
use http_body_util::BodyExt;
use serde_json::Value;
use viv_api::event::Event;

/// Stands for a place on the host.
const SOMEWHERE: &str = "[a place on the host]";

/// Names of fields in which our own words are.
const OURS: [&str; 5] = ["message", "last_error", "what", "why", "fields"];

/// What stands between a path and what comes after it.
const ENDS: [char; 12] = [' ', '\t', '\n', '"', '\'', '`', ',', ';', ')', ']', '}', ':'];

/// Where the host's own files are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Private {
    places: Vec<String>,
}

impl Private {
    /// These folders, and what is below them.
    pub(crate) fn new(folders: &[String]) -> Self {
        let places = folders.iter().map(|folder| folder.trim_end_matches('/').to_owned());
        Self { places: places.filter(|place| place.len() > 1).collect() }
    }

    /// The words without places of the host.
    pub(crate) fn without(&self, words: &str) -> String {
        let mut said = words.to_owned();
        for place in &self.places {
            let mut from = 0;
            while let Some(at) = said[from..].find(place.as_str()).map(|at| at + from) {
                let after = at + place.len();
                let rest = &said[after..];
                // Another folder whose name begins like this one is none of ours.
                if rest.starts_with(|next: char| next != '/' && !ENDS.contains(&next)) {
                    from = after;
                    continue;
                }
                let end = rest.find(|next| ENDS.contains(&next)).map_or(said.len(), |end| after + end);
                said.replace_range(at..end, SOMEWHERE);
                from = at + SOMEWHERE.len();
            }
        }
        said
    }

    fn is_in(&self, bytes: &[u8]) -> bool {
        self.places.iter().any(|place| bytes.windows(place.len()).any(|window| window == place.as_bytes()))
    }

    /// Takes places out of our own words, however deep they are.
    fn clean(&self, value: &mut Value, is_ours: bool) {
        match value {
            Value::String(words) if is_ours => *words = self.without(words),
            Value::Array(items) => items.iter_mut().for_each(|item| self.clean(item, is_ours)),
            Value::Object(fields) => {
                for (name, field) in fields {
                    self.clean(field, is_ours || OURS.contains(&name.as_str()));
                }
            }
            Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// A document of ours for somebody who does not run the host.
    pub(crate) fn json(&self, bytes: Vec<u8>) -> Vec<u8> {
        if !self.is_in(&bytes) {
            return bytes;
        }
        let Ok(mut document) = serde_json::from_slice(&bytes) else { return bytes };
        self.clean(&mut document, false);
        serde_json::to_vec(&document).unwrap_or(bytes)
    }

    /// A line of the journal for somebody who does not run the host.
    pub(crate) fn event(&self, event: &mut Event) {
        event.message = self.without(&event.message);
        if let Some(cause) = &mut event.cause {
            cause.message = self.without(&cause.message);
        }
        event.data.values_mut().for_each(|value| self.clean(value, true));
    }

    /// An answer for somebody who does not run the host. Streams tell what is in a sandbox, and are left alone.
    pub(crate) async fn answer(&self, answer: Response<Body>) -> Response<Body> {
        let is_json = answer.headers().get(header::CONTENT_TYPE) == Some(&HeaderValue::from_static("application/json"));
        let is_whole = axum::body::HttpBody::size_hint(answer.body()).exact().is_some();
        if self.places.is_empty() || !is_json || !is_whole {
            return answer;
        }
        let (mut parts, body) = answer.into_parts();
        // It is whole and in memory, so nothing is waited for and nothing fails.
        let Ok(body) = body.collect().await else { return Response::from_parts(parts, Body::empty()) };
        let cleaned = self.json(body.to_bytes().to_vec());
        parts.headers.remove(header::CONTENT_LENGTH);
        Response::from_parts(parts, Body::from(cleaned))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn private() -> Private {
        Private::new(&["/var/lib/viv/".to_owned(), "/sys/fs/cgroup".to_owned()])
    }

    #[test]
    fn s6_places_of_the_host_are_taken_out_of_words() {
        let cases = [
            ("cannot open /var/lib/viv/sandboxes/x/shim.sock: refused", "cannot open [a place on the host]: refused"),
            ("\"/var/lib/viv\" and (/sys/fs/cgroup/cpu/viv)", "\"[a place on the host]\" and ([a place on the host])"),
            ("/var/lib/viv2 and /var/lib/vivarium are others", "/var/lib/viv2 and /var/lib/vivarium are others"),
            ("nothing", "nothing"),
        ];
        for (words, without) in cases {
            assert_eq!(private().without(words), without);
        }
        assert_eq!(Private::new(&["/".to_owned(), String::new()]).without("/a b"), "/a b");
    }

    #[test]
    fn s6_only_our_own_words_are_touched() {
        let place = "/var/lib/viv/x";
        let document = json!({
            "cause": { "code": "failed", "message": format!("no {place}") },
            "items": [{ "data": { "message": place }, "argv": ["cat", place], "fields": { "path": place } }],
            "path": place,
        });
        let cleaned: Value = serde_json::from_slice(&private().json(document.to_string().into_bytes())).unwrap();
        assert_eq!(cleaned["cause"]["message"], format!("no {SOMEWHERE}"));
        assert_eq!(cleaned["items"][0]["data"]["message"], SOMEWHERE);
        assert_eq!(cleaned["items"][0]["fields"]["path"], SOMEWHERE);
        assert_eq!(cleaned["items"][0]["argv"][1], place);
        assert_eq!(cleaned["path"], place);
    }
}
