//! Files, one and many.

use axum::body::Body;
use axum::http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::world::{PATIENCE, World, request, until};

const BYTES: &str = "application/octet-stream";

#[tokio::test]
async fn a_file_is_written_read_moved_and_removed() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let content: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let put = format!("{path}/files?path=/workspace/a%20b/%C3%BC.bin&mode=0600");
    let stat = world.put_bytes(&put, BYTES, content.clone()).await.is(200).json();
    assert_eq!((&stat["size_bytes"], &stat["mode"]), (&json!(content.len()), &json!("0600")));
    let read = world.get(&format!("{path}/files?path=/workspace/a%20b/%C3%BC.bin")).await.is(200);
    assert_eq!(read.headers["content-type"], BYTES);
    assert!(read.bytes == content);
    let part = world.get(&format!("{path}/files?path=/workspace/a%20b/%C3%BC.bin&offset=4&length=8")).await.is(200);
    assert_eq!(part.bytes, content[4..12]);
    let listed = world.get(&format!("{path}/files/list?path=/workspace&depth=3")).await.is(200).json();
    let names: Vec<&str> = listed["entries"].as_array().unwrap().iter().filter_map(|e| e["path"].as_str()).collect();
    assert_eq!(names, ["a b", "a b/ü.bin"]);
    world.post(&format!("{path}/files/mkdir"), json!({"path": "/workspace/new/deep"})).await.is(204);
    let moving = json!({"from": "/workspace/a b/ü.bin", "to": "/workspace/new/x"});
    world.post(&format!("{path}/files/move"), moving).await.is(204);
    let stat = world.get(&format!("{path}/files/stat?path=/workspace/new/x")).await.is(200).json();
    assert_eq!(stat["kind"], "file");
    world.delete(&format!("{path}/files?path=/workspace/new")).await.is(204);
    assert_eq!(world.get(&format!("{path}/files/stat?path=/workspace/new/x")).await.is(404).code(), "not_found");
    assert_eq!(world.delete(&format!("{path}/files?path=/")).await.is(400).code(), "invalid_request");
    let used = world.get(&format!("{path}/resources")).await.is(200).json();
    assert!(used["operations"]["file_calls"].as_u64() >= Some(8), "{used}");
}

#[tokio::test]
async fn many_files_go_up_and_down_as_an_archive() {
    let world = World::new().await;
    let path = world.sandbox().await;
    for (name, content) in [("a", "one"), ("b/c", "two")] {
        world.put_bytes(&format!("{path}/files?path=/workspace/from/{name}"), BYTES, content).await.is(200);
    }
    let archive = world.get(&format!("{path}/archive?path=/workspace/from")).await.is(200);
    assert_eq!(archive.headers["content-type"], "application/x-tar");
    let put = format!("{path}/archive?path=/workspace/to");
    let unpacked = world.put_bytes(&put, "application/x-tar", archive.bytes).await.is(200).json();
    assert_eq!(unpacked["bytes"], 6);
    let read = world.get(&format!("{path}/files?path=/workspace/to/b/c")).await.is(200);
    assert_eq!(read.bytes, b"two");
    let garbage = world.put_bytes(&put, "application/x-tar", "x".repeat(2048)).await.is(400);
    assert_eq!(garbage.code(), "invalid_request");
    assert_eq!(world.put_bytes(&put, BYTES, "").await.is(415).code(), "unsupported_media");
}

#[tokio::test]
async fn changes_are_told_as_they_happen() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let watching = request(Method::GET, &format!("{path}/files/watch?path=/workspace"), &world.admin, None);
    let response = world.send(watching).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut body = response.into_body();
    // The first word says that nothing is missed from now on.
    let first = tokio::time::timeout(PATIENCE, body.frame()).await.unwrap().unwrap().unwrap();
    assert!(first.data_ref().unwrap().starts_with(b":"));
    world.put_bytes(&format!("{path}/files?path=/workspace/seen"), BYTES, "x").await.is(200);
    let mut read = String::new();
    while !read.contains("\"seen\"") {
        let frame = tokio::time::timeout(PATIENCE, body.frame()).await.unwrap().unwrap().unwrap();
        read.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    assert!(read.contains("event: change"), "{read}");
}

#[tokio::test]
async fn s5_an_upload_that_is_too_large_or_stalls_leaves_what_was_there() {
    let bounds = viv_server::Bounds {
        file_bytes_max: 1_000,
        body_idle: std::time::Duration::from_millis(100),
        ..viv_server::Bounds::default()
    };
    let world = World::with(bounds, |_| {}).await;
    let path = world.sandbox().await;
    let put = format!("{path}/files?path=/workspace/f");
    world.put_bytes(&put, BYTES, "before").await.is(200);
    assert_eq!(world.put_bytes(&put, BYTES, "x".repeat(1_001)).await.is(413).code(), "payload_too_large");
    // Without saying how long it is.
    let pieces = (0..11).map(|_| Ok::<_, std::io::Error>("x".repeat(100)));
    let streamed = Body::from_stream(futures_util::stream::iter(pieces));
    assert_eq!(world.put_bytes(&put, BYTES, streamed).await.is(413).code(), "payload_too_large");
    let stalled = futures_util::StreamExt::chain(
        futures_util::stream::iter([Ok::<_, std::io::Error>("x")]),
        futures_util::stream::pending(),
    );
    let refused = world.put_bytes(&put, BYTES, Body::from_stream(stalled)).await.is(408);
    assert_eq!(refused.code(), "request_timeout");
    let kept = until("what was there", async || {
        let read = world.get(&put).await;
        (read.status == 200).then_some(read)
    })
    .await;
    assert_eq!(kept.bytes, b"before");
    let missing: Value = world.get(&format!("{path}/files?path=/workspace/none")).await.is(404).json();
    assert_eq!(missing["error"]["code"], "not_found");
}
