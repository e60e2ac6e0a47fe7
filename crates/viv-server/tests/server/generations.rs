//! Whoever names a generation that is not the current one is told so, by everything that takes one (T5).

use axum::body::Body;
use axum::http::Method;
use serde_json::{Value, json};

use crate::world::{World, bare};

/// What an operation has to be sent for its body to be read, where there has to be one.
fn body_of(operation: &str, snapshot: &Value) -> Value {
    match operation {
        "startExecution" => json!({ "argv": ["echo", "hello"] }),
        "resizeExecution" => json!({ "rows": 24, "cols": 80 }),
        "signalExecution" => json!({ "signal": 15 }),
        "extendSandbox" => json!({ "at_least_ms": 60_000 }),
        "makeDirectory" => json!({ "path": "/workspace/d" }),
        "moveFile" => json!({ "from": "/workspace/a", "to": "/workspace/b" }),
        "takeKeepAwake" => json!({ "ttl_ms": 60_000 }),
        "setLimits" => json!({ "processes": 777 }),
        "rollbackSandbox" => json!({ "snapshot": snapshot }),
        "createSchedule" => json!({ "cron": "@daily", "argv": ["true"] }),
        other => panic!("{other} takes a generation: say here what it has to be sent"),
    }
}

/// What else has to be in the query.
fn value_of(parameter: &str) -> &'static str {
    match parameter {
        "path" => "/workspace/file",
        "offset" => "0",
        other => panic!("what is {other}?"),
    }
}

fn names<'d>(operation: &'d Value, place: &'d str) -> impl Iterator<Item = (&'d str, bool)> {
    let all = operation["parameters"].as_array().map(Vec::as_slice).unwrap_or_default();
    let there = all.iter().filter(move |parameter| parameter["in"] == place);
    there.map(|parameter| (parameter["name"].as_str().unwrap(), parameter["required"] == true))
}

/// By the document: what is new is asked too.
#[tokio::test]
async fn t5_every_operation_that_takes_a_generation_refuses_another_one() {
    let world = World::new().await;
    let made = world.post("/v1/sandboxes", json!({ "name": "a" })).await.is(201).json();
    let snapshot = world.post("/v1/sandboxes/a/snapshots", json!({})).await.is(201).json()["id"].clone();
    let back = world.post("/v1/sandboxes/a/rollback", json!({ "snapshot": snapshot })).await.is(200).json();
    assert_eq!(back["generation"], 2);
    let before = world.get("/v1/sandboxes/a").await.is(200).json();
    let saved = world.get("/v1/sandboxes/a/snapshots").await.is(200).json();
    let running = world.start("/v1/sandboxes/a", &["/bin/sleep".to_owned(), "600".to_owned()], json!({})).await;
    let execution = running.rsplit('/').next().unwrap().to_owned();

    let document = world.get("/v1/openapi.json").await.json();
    let (mut by_query, mut by_header) = (0, 0);
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap().iter().filter(|_| path.contains("{sandbox}")) {
            let id = operation["operationId"].as_str().unwrap();
            let in_query = names(operation, "query").any(|(name, _)| name == "generation");
            let in_header = names(operation, "header").any(|(name, _)| name.eq_ignore_ascii_case("viv-generation"));
            assert!(in_header || !in_query, "{id}: what takes it in the query takes it in the header");
            let path = path.replace("{sandbox}", made["id"].as_str().unwrap()).replace("{execution}", &execution);
            let path = path.replace("{lease}", "model");
            let required = names(operation, "query").filter(|(_, required)| *required);
            let query: Vec<String> = required.map(|(name, _)| format!("{name}={}", value_of(name))).collect();
            let content = operation["requestBody"]["content"].as_object();
            let media = content.map(|content| content.keys().next().unwrap().clone());
            let ask = |query: String, header: Option<u64>| {
                let method: Method = method.to_uppercase().parse().unwrap();
                let mut request = bare(method, &format!("{path}?{query}"), &world.admin);
                if let Some(named) = header {
                    request = request.header("viv-generation", named);
                }
                let body = match media.as_deref() {
                    None => Body::empty(),
                    Some("application/json") if operation["requestBody"]["required"] != true => "{}".into(),
                    Some("application/json") => body_of(id, &snapshot).to_string().into(),
                    Some(_) => "bytes".into(),
                };
                if let Some(media) = &media {
                    request = request.header("content-type", media);
                }
                world.whole(request.body(body).unwrap())
            };
            // One that was, and one that is not yet.
            for other in [1, 3] {
                let mut refused = Vec::new();
                if in_query {
                    let query = query.iter().cloned().chain([format!("generation={other}")]);
                    refused.push(ask(query.collect::<Vec<_>>().join("&"), None).await);
                    by_query += 1;
                }
                if in_header {
                    refused.push(ask(query.join("&"), Some(other)).await);
                    by_header += 1;
                }
                for refused in refused {
                    assert_eq!(refused.status, 410, "{id}: {}", String::from_utf8_lossy(&refused.bytes));
                    assert_eq!(refused.code(), "stale_handle", "{id}");
                    let details = refused.json()["error"]["details"].clone();
                    assert_eq!(details["current_generation"], 2, "{id}: {details}");
                    assert!(details["what"].as_str().is_some_and(|what| !what.is_empty()), "{id}: {details}");
                }
            }
        }
    }
    assert!(by_query >= 2 * 40 && by_header > by_query, "{by_query} by the query, {by_header} by the header");
    let after = world.get("/v1/sandboxes/a").await.is(200).json();
    for field in ["generation", "phase", "status", "desired", "limits", "keep_awake", "expires_at_ms"] {
        assert_eq!(after[field], before[field], "{field}: nothing was done");
    }
    assert_eq!(world.get(&running).await.is(200).json()["state"], "running");
    assert_eq!(world.get("/v1/sandboxes").await.is(200).json()["items"].as_array().unwrap().len(), 1, "nor forked");
    assert_eq!(world.get("/v1/sandboxes/a/snapshots").await.is(200).json(), saved);
    assert_eq!(world.get("/v1/sandboxes/a/schedules").await.is(200).json()["items"], json!([]));
}
