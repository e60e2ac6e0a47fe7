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
