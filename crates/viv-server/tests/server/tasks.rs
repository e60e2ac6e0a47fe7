//! Tasks over HTTP, where a sandbox costs nothing (K1 to K7).

use axum::http::Method;
use serde_json::json;

use crate::world::{World, request};

#[tokio::test]
async fn k1_a_task_is_run_listed_shown_and_over() {
    let world = World::new().await;
    let new = json!({"argv": ["/bin/echo", "hello"], "wait_ms": 60_000, "credentials": {"TOKEN": "s3cret"}});
    let task = world.post("/v1/tasks", new).await.is(201).json();
    assert_eq!((task["state"].as_str(), task["ending"]["cause"].as_str()), (Some("succeeded"), Some("done")), "{task}");
    assert!(!task.to_string().contains("s3cret"), "{task}");
    let path = format!("/v1/tasks/{}", task["id"].as_str().unwrap());
    assert_eq!(world.get(&path).await.is(200).json(), task);
    let page = world.get("/v1/tasks?state=succeeded&state=failed").await.is(200).json();
    assert_eq!(page["items"].as_array().unwrap().len(), 1, "{page}");
    assert!(world.get("/v1/tasks?state=queued").await.is(200).json()["items"].as_array().unwrap().is_empty());
    let timeline = world.get(&format!("{path}/timeline")).await.is(200).json();
    let moments: Vec<&str> =
        timeline["moments"].as_array().unwrap().iter().map(|one| one["what"].as_str().unwrap()).collect();
    assert_eq!((moments[0], *moments.last().unwrap()), ("requested", "confirmed"), "{timeline}");
    // Its sandbox is gone, and what it wrote is not.
    let logs = world.get(&format!("{path}/logs/0?follow=true")).await.is(200);
    let logs = String::from_utf8_lossy(&logs.bytes).into_owned();
    assert!(logs.contains("aGVsbG8K") || logs.contains("hello"), "{logs}");
    world.get(&format!("{path}/logs/1")).await.is(409);
    // What is over can be stopped, which changes nothing, and goes on only when it was kept.
    assert_eq!(world.post(&format!("{path}/stop"), json!({})).await.is(200).json(), task);
    let refused = world.post(&format!("{path}/continue"), json!({})).await.is(409).json();
    assert_eq!(refused["error"]["code"], "conflict", "{refused}");
}

#[tokio::test]
async fn k2_a_stop_is_answered_when_it_is_over() {
    let world = World::new().await;
    let task = world.post("/v1/tasks", json!({"argv": ["/bin/sleep", "1000"]})).await.is(201).json();
    let path = format!("/v1/tasks/{}", task["id"].as_str().unwrap());
    let asked = world.post(&format!("{path}/stop"), json!({"wait_ms": 0})).await.is(202).json();
    assert_eq!(asked["ending"]["outcome"], "stopped", "{asked}");
    let over = world.post(&format!("{path}/stop"), json!({"wait_ms": 60_000})).await.is(200).json();
    assert_eq!(over["state"], "stopped", "{over}");
    assert_eq!(over["stop"]["at_ms"], asked["stop"]["at_ms"]);
}

#[tokio::test]
async fn o2_a_mark_of_a_mistake_is_counted_and_can_be_taken_back() {
    let world = World::new().await;
    let of = async |name: &str| {
        let stats = world.get("/v1/stats?slo=true").await.is(200).json();
        let found = stats["slo"].as_array().unwrap().iter().find(|one| one["name"] == name).cloned().unwrap();
        (found["numerator"].as_u64().unwrap(), found["denominator"].as_u64().unwrap())
    };
    let silent = json!({"argv": ["/bin/sleep", "1000"], "limits": {"inactivity_ms": 50}, "wait_ms": 60_000});
    let silent = world.post("/v1/tasks", silent).await.is(201).json();
    assert_eq!(silent["state"], "inactive", "{silent}");
    let stopped = world.post("/v1/tasks", json!({"argv": ["/bin/sleep", "1000"]})).await.is(201).json();
    let path = |task: &serde_json::Value, verb: &str| format!("/v1/tasks/{}/{verb}", task["id"].as_str().unwrap());
    let refused = world.post(&path(&stopped, "mark"), json!({"mistaken": true})).await.is(409);
    assert_eq!(refused.code(), "conflict", "it is not over");
    world.post(&path(&stopped, "stop"), json!({"wait_ms": 60_000})).await.is(200);
    assert_eq!((of("inactivity_mistaken").await, of("cancel_mistaken").await), ((0, 1), (0, 1)));
    for _ in 0..2 {
        let marked = json!({"mistaken": true, "why": "it waited for a build"});
        let marked = world.post(&path(&silent, "mark"), marked).await.is(200).json();
        assert_eq!((&marked["state"], &marked["mark"]["why"]), (&json!("inactive"), &json!("it waited for a build")));
        world.post(&path(&stopped, "mark"), json!({"mistaken": true})).await.is(200);
        assert_eq!(
            (of("inactivity_mistaken").await, of("cancel_mistaken").await),
            ((1, 1), (1, 1)),
            "said twice is once"
        );
    }
    let lines = world.get("/v1/events?kind=task.marked").await.is(200).json();
    let lines = lines["items"].as_array().unwrap();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines.iter().all(|line| line["by"].as_str().is_some_and(|by| by.starts_with("key"))), "{lines:?}");
    let back = world.post(&path(&silent, "mark"), json!({"mistaken": false})).await.is(200).json();
    assert_eq!(back.get("mark"), None, "{back}");
    assert_eq!((of("inactivity_mistaken").await, of("cancel_mistaken").await), ((0, 1), (1, 1)));
    // What ended by itself, and what a reader wants, are refused.
    let done = world.post("/v1/tasks", json!({"argv": ["/bin/true"], "wait_ms": 60_000})).await.is(201).json();
    world.post(&path(&done, "mark"), json!({"mistaken": true})).await.is(409);
    world.post(&path(&done, "mark"), json!({})).await.is(400);
    let reader = world.key("default", true).await;
    let asked = request(Method::POST, &path(&silent, "mark"), &reader, Some(json!({"mistaken": true})));
    world.whole(asked).await.is(403);
}

#[tokio::test]
async fn s5_what_makes_no_sense_changes_nothing() {
    let world = World::new().await;
    for wrong in [
        json!({}),
        json!({"argv": []}),
        json!({"argv": ["a"], "steps": [{"argv": ["b"]}]}),
        json!({"argv": ["a"], "sandbox": "box", "create": {}}),
        json!({"argv": ["a"], "effects": [{"name": "no spaces"}]}),
        json!({"argv": ["a"], "source": {"git": "--upload-pack=x"}}),
        json!({"argv": ["a"], "limits": {"total_ms": -1}}),
        json!({"argv": ["a"], "nonsense": 1}),
    ] {
        let answer = world.post("/v1/tasks", wrong.clone()).await.is(400).json();
        assert_eq!(answer["error"]["code"], "invalid_request", "{wrong}: {answer}");
        assert!(answer["error"]["hint"].is_string(), "{wrong}: {answer}");
    }
    world.post("/v1/tasks", json!({"argv": ["a"], "sandbox": "nowhere"})).await.is(404);
    for path in ["/v1/tasks/tsk_none", "/v1/tasks/tsk_none/timeline", "/v1/tasks/tsk_none/logs/0"] {
        world.get(path).await.is(404);
    }
    assert!(world.get("/v1/tasks").await.is(200).json()["items"].as_array().unwrap().is_empty());
}
