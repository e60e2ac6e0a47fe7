//! Commands: started, fed, read, ended.

use axum::http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use viv_provider::conformance::program::Program;

use crate::world::{Answered, World, bare, request, until};

fn lines(answer: &Answered) -> Vec<Value> {
    let text = std::str::from_utf8(&answer.bytes).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn text(lines: &[Value]) -> String {
    lines.iter().filter_map(|line| line["text"].as_str()).collect()
}

#[tokio::test]
async fn x2_output_is_read_from_any_offset_and_ends_with_its_end() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let argv = Program::Count { to: 100 }.argv();
    let execution = world.start(&path, &argv, json!({})).await;
    let all = world.get(&format!("{execution}/output?follow=true")).await.is(200);
    assert_eq!(all.headers["content-type"], "application/x-ndjson");
    let all = lines(&all);
    let whole: String = (1..=100).map(|number| format!("{number}\n")).collect();
    assert_eq!(text(&all), whole);
    let end = &all.last().unwrap()["end"];
    assert_eq!((&end["state"], &end["exit_code"]), (&json!("exited"), &json!(0)));
    assert_eq!(end["argv"], json!(argv));
    let rest = lines(&world.get(&format!("{execution}/output?offset=10")).await.is(200));
    assert_eq!(text(&rest), whole[10..]);
    let shown = world.get(&execution).await.is(200).json();
    assert_eq!(shown["output_bytes"], whole.len());
    let listed = world.get(&format!("{path}/executions")).await.is(200).json();
    assert_eq!(listed["items"], json!([shown]), "probes are not among them");
}

#[tokio::test]
async fn x4_input_is_taken_once_and_closed() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let execution = world.start(&path, &Program::Cat.argv(), json!({"stdin": true})).await;
    let give = |offset: usize, bytes: &'static [u8]| {
        let request = bare(Method::POST, &format!("{execution}/input?offset={offset}"), &world.admin)
            .header("content-type", "application/octet-stream");
        world.whole(request.body(bytes.into()).unwrap())
    };
    assert_eq!(give(0, b"one ").await.is(200).json()["stdin_bytes"], 4);
    assert_eq!(give(0, b"one two").await.is(200).json()["stdin_bytes"], 7, "what was taken is not taken again");
    assert_eq!(give(100, b"gap").await.is(409).code(), "conflict");
    let empty = || request(Method::POST, &format!("{execution}/input/close"), &world.admin, None);
    world.whole(empty()).await.is(204);
    world.whole(empty()).await.is(204);
    let output = lines(&world.get(&format!("{execution}/output?follow=true")).await.is(200));
    assert_eq!(text(&output), "one two");
    let wrong = bare(Method::POST, &format!("{execution}/input?offset=0"), &world.admin)
        .header("content-type", "text/plain")
        .body("x".into());
    assert_eq!(world.whole(wrong.unwrap()).await.is(415).code(), "unsupported_media");
}

#[tokio::test]
async fn x3_signal_resize_and_cancel() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let execution = world.start(&path, &Program::Graceful.argv(), json!({"detach": true, "limit_ms": "none"})).await;
    until("it is ready", async || {
        let shown = world.get(&execution).await.is(200).json();
        (shown["output_bytes"].as_u64() > Some(0)).then_some(())
    })
    .await;
    world.post(&format!("{execution}/signal"), json!({"signal": 15})).await.is(204);
    let ended = until("ended", async || {
        let shown = world.get(&execution).await.is(200).json();
        (shown["state"] != "running").then_some(shown)
    })
    .await;
    assert_eq!((&ended["state"], &ended["detach"]), (&json!("exited"), &json!(true)));
    assert_eq!(world.post(&format!("{execution}/signal"), json!({"signal": 15})).await.is(409).code(), "conflict");

    let sleeping = world.start(&path, &Program::Sleep { seconds: 600 }.argv(), json!({})).await;
    let no_tty = world.post(&format!("{sleeping}/resize"), json!({"rows": 5, "cols": 5})).await.is(409);
    assert_eq!(no_tty.code(), "conflict");
    let cancel = request(Method::POST, &format!("{sleeping}/cancel"), &world.admin, None);
    assert_eq!(world.whole(cancel).await.is(200).json()["state"], "cancelled");
    let terminal = json!({"tty": {"rows": 24, "cols": 80}});
    let on_tty = world.start(&path, &Program::TerminalSizes.argv(), terminal).await;
    world.post(&format!("{on_tty}/resize"), json!({"rows": 5, "cols": 5})).await.is(204);
    assert_eq!(world.get(&format!("{path}/executions/exe_none")).await.is(404).code(), "not_found");
}

#[tokio::test]
async fn a_key_starts_a_command_once() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let start = |argv: Value| {
        let request = bare(Method::POST, &format!("{path}/executions"), &world.admin)
            .header("content-type", "application/json")
            .header("idempotency-key", "once");
        world.whole(request.body(json!({"argv": argv}).to_string().into()).unwrap())
    };
    let first = start(json!(["/bin/pwd"])).await.is(201).json();
    let again = start(json!(["/bin/pwd"])).await.is(201).json();
    assert_eq!(first["id"], again["id"]);
    assert_eq!(start(json!(["/bin/cat"])).await.is(409).code(), "idempotency_mismatch");
    assert_eq!(world.get(&format!("{path}/executions")).await.json()["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn x2_output_that_is_followed_says_that_it_lives_and_a_reader_may_leave() {
    let bounds = viv_server::Bounds { heartbeat: std::time::Duration::from_millis(20), ..Default::default() };
    let world = World::with(bounds, |_| {}).await;
    let path = world.sandbox().await;
    let argv = Program::EchoThenSleep { text: "hello".to_owned(), seconds: 600 }.argv();
    let execution = world.start(&path, &argv, json!({})).await;
    let following = request(Method::GET, &format!("{execution}/output?follow=true"), &world.admin, None);
    let mut body = world.send(following).await.into_body();
    let mut read = String::new();
    while !read.contains("alive_at_ms") {
        let frame = tokio::time::timeout(crate::world::PATIENCE, body.frame()).await.unwrap().unwrap().unwrap();
        read.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    assert!(read.contains("hello"), "{read}");
    drop(body);
    // It runs on without its reader.
    assert_eq!(world.get(&execution).await.is(200).json()["state"], "running");
}

/// Starts a command by one request that is followed to its end: what was started, and the lines after that.
async fn followed(world: &World, path: &str, body: Value, key: Option<&str>) -> (Value, Vec<Value>) {
    let mut request = bare(Method::POST, &format!("{path}/executions?follow=true"), &world.admin)
        .header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let answer = world.whole(request.body(body.to_string().into()).unwrap()).await.is(201);
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    let mut all = lines(&answer);
    let first = all.remove(0);
    assert_eq!(first.as_object().unwrap().len(), 1, "it begins with what was started: {first}");
    (first["started"].clone(), all)
}

#[tokio::test]
async fn x2_a_start_that_is_followed_begins_with_the_execution_and_ends_with_its_end() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let argv = Program::Count { to: 100 }.argv();
    let (started, told) = followed(&world, &path, json!({"argv": argv}), None).await;
    let execution = format!("{path}/executions/{}", started["id"].as_str().unwrap());
    let shown = world.get(&execution).await.is(200).json();
    for field in ["id", "sandbox", "generation", "argv", "by"] {
        assert!(!started[field].is_null() && started[field] == shown[field], "{field}: {started} {shown}");
    }
    let whole: String = (1..=100).map(|number| format!("{number}\n")).collect();
    assert_eq!(text(&told), whole);
    let end = &told.last().unwrap()["end"];
    assert_eq!((&end["id"], &end["state"], &end["exit_code"]), (&started["id"], &json!("exited"), &json!(0)));
    // As whoever asks for the output alone is told it.
    let output = lines(&world.get(&format!("{execution}/output?follow=true")).await.is(200));
    let chunks = |lines: &[Value]| lines.iter().filter(|line| line["text"].is_string()).cloned().collect::<Vec<_>>();
    assert_eq!(chunks(&told), chunks(&output));
    // What waits for its place is one answer too: it says that it waits, and goes on when it runs.
    let (waiting, told) = followed(&world, &path, json!({"argv": argv, "queue_ms": 60_000}), None).await;
    assert!(waiting["id"].is_string() && waiting["id"] != started["id"], "{waiting}");
    assert_eq!((text(&told).as_str(), &told.last().unwrap()["end"]["exit_code"]), (whole.as_str(), &json!(0)));
}

#[tokio::test]
async fn a_start_that_is_followed_is_refused_and_repeated_as_any_other() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let refused = async |path: &str, body: Value, status: u16| {
        let answer = world.post(&format!("{path}/executions?follow=true"), body).await.is(status);
        assert_eq!(answer.headers["content-type"], "application/json");
        answer.code()
    };
    assert_eq!(refused("/v1/sandboxes/nowhere", json!({"argv": ["/bin/pwd"]}), 404).await, "not_found");
    assert_eq!(refused(&path, json!({"argv": []}), 400).await, "invalid_request");
    let other = format!("{path}/executions?follow=true&generation=7");
    let stale = world.post(&other, json!({"argv": ["/bin/pwd"]})).await.is(410);
    assert_eq!(stale.code(), "stale_handle");

    let argv = Program::Echo { text: "once".to_owned() }.argv();
    let (first, told) = followed(&world, &path, json!({"argv": argv}), Some("once")).await;
    let (again, told_again) = followed(&world, &path, json!({"argv": argv}), Some("once")).await;
    assert_eq!((&first["id"], text(&told).as_str()), (&again["id"], "once\n"));
    assert_eq!(text(&told_again), "once\n", "from the first byte, as the first time");
    let mismatch = bare(Method::POST, &format!("{path}/executions?follow=true"), &world.admin)
        .header("content-type", "application/json")
        .header("idempotency-key", "once")
        .body(json!({"argv": ["/bin/cat"]}).to_string().into());
    assert_eq!(world.whole(mismatch.unwrap()).await.is(409).code(), "idempotency_mismatch");
    assert_eq!(world.get(&format!("{path}/executions")).await.json()["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn x2_who_leaves_a_start_that_is_followed_ends_nothing() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let argv = Program::EchoThenSleep { text: "hello".to_owned(), seconds: 600 }.argv();
    let start =
        request(Method::POST, &format!("{path}/executions?follow=true"), &world.admin, Some(json!({"argv": argv})));
    let mut body = world.send(start).await.into_body();
    let mut read = String::new();
    while !read.contains("hello\\n") {
        let frame = tokio::time::timeout(crate::world::PATIENCE, body.frame()).await.unwrap().unwrap().unwrap();
        read.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    drop(body);
    let first: Value = serde_json::from_str(read.lines().next().unwrap()).unwrap();
    let execution = format!("{path}/executions/{}", first["started"]["id"].as_str().unwrap());
    assert_eq!(world.get(&execution).await.is(200).json()["state"], "running");
    let rest = lines(&world.get(&format!("{execution}/output?offset=2")).await.is(200));
    assert_eq!(text(&rest), "llo\n", "it goes on where the reader was");
}
