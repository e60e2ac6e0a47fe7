//! What tools take, as JSON Schema. Their bodies are those of the API, so what is said here is what models need of it; the
//! API checks all of it.

use serde_json::{Map, Value, json};

/// An object with these properties, of which these have to be there.
pub(super) fn object(properties: &[(&str, Value)], required: &[&str]) -> Value {
    let properties: Map<String, Value> =
        properties.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

/// A text.
pub(super) fn text(about: &str) -> Value {
    json!({ "type": "string", "description": about })
}

/// A whole number.
pub(super) fn number(about: &str) -> Value {
    json!({ "type": "integer", "minimum": 0, "description": about })
}

/// Yes or no.
pub(super) fn flag(about: &str) -> Value {
    json!({ "type": "boolean", "description": about })
}

/// Several texts.
pub(super) fn texts(about: &str) -> Value {
    json!({ "type": "array", "items": { "type": "string" }, "minItems": 1, "description": about })
}

/// Texts by name.
pub(super) fn map(about: &str) -> Value {
    json!({ "type": "object", "additionalProperties": { "type": "string" }, "description": about })
}

/// Which sandbox.
pub(super) fn sandbox() -> (&'static str, Value) {
    ("sandbox", text("Id or name of the sandbox"))
}
