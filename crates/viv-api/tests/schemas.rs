//! The schemas are whole and as strict as the parsers.
#![cfg(feature = "openapi")]

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use utoipa::IntoParams;
use viv_api::{openapi, query};

fn schemas() -> BTreeMap<String, Value> {
    openapi::schemas().into_iter().map(|(name, schema)| (name, serde_json::to_value(schema).unwrap())).collect()
}

fn references(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                found.insert(reference.trim_start_matches("#/components/schemas/").to_owned());
            }
            fields.values().for_each(|value| references(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn parameters() -> Value {
    macro_rules! all {
        ($($query:ident),+) => {
            [$(serde_json::to_value(query::$query::into_params(|| None)).unwrap()),+]
        };
    }
    Value::from_iter(all![
        ListSandboxes,
        GetSandbox,
        OfGeneration,
        DeleteSandbox,
        PageQuery,
        SandboxLogQuery,
        ListExecutions,
        OutputQuery,
        InputQuery,
        ReadFile,
        WriteFile,
        PathQuery,
        ListFiles,
        WatchFiles,
        ListEvents,
        StatsQuery,
        ListLogs
    ])
}

#[test]
fn every_reference_leads_somewhere() {
    let schemas = schemas();
    let mut found = BTreeSet::new();
    for schema in schemas.values() {
        references(schema, &mut found);
    }
    references(&parameters(), &mut found);
    assert!(found.contains("Sandbox") && found.contains("PageLimit"), "{found:?}");
    let missing: Vec<_> = found.iter().filter(|name| !schemas.contains_key(*name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Schemas of requests and all that they refer to.
fn asked(schemas: &BTreeMap<String, Value>) -> BTreeSet<String> {
    let requests = [
        "CreateSandbox",
        "EnsureSandbox",
        "StopSandbox",
        "ExtendSandbox",
        "ReportActivity",
        "TakeKeepAwake",
        "Limits",
        "StartExecution",
        "Terminal",
        "SendSignal",
        "MoveFile",
        "MakeDir",
        "CreateKey",
    ];
    let mut asked: BTreeSet<String> = requests.into_iter().map(str::to_owned).collect();
    loop {
        let mut found = asked.clone();
        for name in &asked {
            references(&schemas[name], &mut found);
        }
        if found.len() == asked.len() {
            return asked;
        }
        asked = found;
    }
}

#[test]
fn s5_everything_in_a_request_is_bounded() {
    let schemas = schemas();
    for name in asked(&schemas) {
        bounded(&name, &schemas[&name]);
    }
    bounded("parameters", &parameters());
}

fn bounded(at: &str, value: &Value) {
    let Value::Object(fields) = value else {
        if let Value::Array(values) = value {
            for value in values {
                bounded(at, value);
            }
        }
        return;
    };
    let is = |kind: &str| match fields.get("type") {
        Some(Value::String(one)) => one == kind,
        Some(Value::Array(many)) => many.iter().any(|one| one == kind),
        _ => false,
    };
    let has = |field: &str| fields.contains_key(field);
    if is("integer") {
        assert!(has("minimum") && has("maximum"), "{at}: a number without a range: {value}");
    }
    if is("string") && !has("enum") {
        assert!(has("maxLength") && has("pattern"), "{at}: a text without a shape: {value}");
    }
    if is("object") {
        let closed = fields.get("additionalProperties") == Some(&Value::Bool(false));
        assert!(closed || has("maxProperties"), "{at}: an object that takes anything: {value}");
    }
    for (name, field) in fields.iter().filter(|(name, _)| !["example", "examples"].contains(&name.as_str())) {
        bounded(&format!("{at}.{name}"), field);
    }
}

#[test]
fn everything_is_described() {
    for (name, schema) in schemas() {
        let described = schema.get("description").is_some() || name.contains('_');
        assert!(described, "{name} says nothing about itself: {schema}");
    }
}
