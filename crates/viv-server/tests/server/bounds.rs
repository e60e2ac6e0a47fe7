//! Bad input gets a clear error and changes nothing; nothing is unbounded (S5).

use std::time::Duration;

use axum::body::Body;
use axum::http::Method;
use futures_util::stream;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower::ServiceExt;
use viv_server::Bounds;

use crate::world::{PATIENCE, World, bare, request, until};

#[tokio::test]
async fn s5_bad_requests_are_told_what_is_wrong() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let before = world.get("/v1/events").await.json()["items"].as_array().unwrap().len();
    let post = |content_type: &str, body: &str| {
        let request = bare(Method::POST, "/v1/sandboxes", &world.admin).header("content-type", content_type);
        world.whole(request.body(body.to_owned().into()).unwrap())
    };
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    for body in ["", "{", "[]", "null", "{\"name\": 1}", "{\"nmae\": \"a\"}", "\u{0}", "{\"name\": \"A\"}", &deep] {
        let refused = post("application/json", body).await.is(400);
        assert_eq!(refused.code(), "invalid_request", "{body:.20}");
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        let is_json = serde_json::from_str::<serde_json::Value>(body).is_ok();
        assert!(is_json || (message.contains("line") && message.contains("column")), "{message}");
    }
    let invalid_utf8 = bare(Method::POST, "/v1/sandboxes", &world.admin)
        .header("content-type", "application/json")
        .body(Body::from(vec![b'{', b'"', 0xff, b'"', b'}']));
    assert_eq!(world.whole(invalid_utf8.unwrap()).await.is(400).code(), "invalid_request");
    for media in
        ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "application/json; charset=latin1"]
    {
        assert_eq!(post(media, "{}").await.is(415).code(), "unsupported_media", "{media}");
    }
    let no_type = bare(Method::POST, "/v1/sandboxes", &world.admin).body("{}".into()).unwrap();
    assert_eq!(world.whole(no_type).await.is(415).code(), "unsupported_media");
    let large = format!("{{\"name\": \"{}\"}}", "a".repeat(2 << 20));
    assert_eq!(post("application/json", &large).await.is(413).code(), "payload_too_large");

    for (path, code, status) in [
        ("/v1/sandboxes?verify=true".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes?limit=0".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes?limit=x".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes?limit=".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes?label=x".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes?label=%ff".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes?label=%zz".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes/%ff".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes/UPPER".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes/..%2f..%2fetc".to_owned(), "invalid_request", 400),
        ("/v1/sandboxes/a%00b".to_owned(), "invalid_request", 400),
        (format!("{path}/executions/x"), "invalid_request", 400),
        (format!("{path}/files"), "invalid_request", 400),
        (format!("{path}/files?path=relative"), "invalid_request", 400),
        (format!("{path}/files?path=/a&path=/b&odd=1"), "invalid_request", 400),
        ("/v1/nothing".to_owned(), "not_found", 404),
        ("/".to_owned(), "not_found", 404),
        ("/v1/sandboxes/".to_owned(), "not_found", 404),
    ] {
        assert_eq!(world.get(&path).await.is(status).code(), code, "{path}");
    }
    let wrong_method = world.whole(request(Method::PATCH, &path, &world.admin, None)).await.is(405);
    assert_eq!(wrong_method.code(), "method_not_allowed");
    let allowed = wrong_method.headers["allow"].to_str().unwrap();
    assert!(allowed.contains("GET") && allowed.contains("DELETE"), "{allowed}");
    for key in ["with space", "ü", &"x".repeat(256), ""] {
        let request = bare(Method::POST, "/v1/sandboxes", &world.admin)
            .header("content-type", "application/json")
            .header("idempotency-key", key);
        assert_eq!(world.whole(request.body("{}".into()).unwrap()).await.is(400).code(), "invalid_request", "{key}");
    }
    let after = world.get("/v1/events").await.json()["items"].as_array().unwrap().len();
    assert_eq!(before, after, "nothing was changed");
}

#[tokio::test]
async fn s5_a_store_that_fails_is_503_and_says_nothing_about_it() {
    let world = World::new().await;
    world.store.set_faults(Some(Box::new(|_| Some(viv_store::memory::Fault::Before))));
    let refused = world.get("/v1/sandboxes").await.is(503);
    assert_eq!(refused.code(), "store_unavailable");
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(world.post("/v1/sandboxes", json!({})).await.is(503).code(), "store_unavailable");
    world.get("/health").await.is(200);
    let ready = world.get("/ready").await.is(503).json();
    assert_eq!(ready["checks"][0]["message"], "it cannot be read", "what went wrong is for the log");
    world.store.set_faults(None);
    world.get("/ready").await.is(200);
}

/// Says something on a connection of its own and reads all that comes.
async fn say(address: std::net::SocketAddr, text: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // Whoever is refused early closes while we still talk.
    let _ = stream.write_all(text).await;
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("an end in time");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn s5_garbage_and_slow_and_large_heads_are_refused_and_the_server_serves_on() {
    let bounds = Bounds { header_within: Duration::from_millis(200), ..Bounds::default() };
    let world = World::with(bounds, |_| {}).await;
    let (address, _end, _serving) = world.listen().await;
    for garbage in [&b"\x16\x03\x01\x02\x00"[..], b"GET\r\n\r\n", b"\0\0\0\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"] {
        let answer = say(address, garbage).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    let slow = say(address, b"GET /health HTTP/1.1\r\nhost:").await;
    assert!(slow.is_empty() || slow.starts_with("HTTP/1.1 408"), "{slow}");
    let long = format!("GET /health HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n", "x".repeat(200 << 10));
    let refused = say(address, long.as_bytes()).await;
    assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 431"), "{refused}");
    let many: String = (0..500).map(|at| format!("h{at}: x\r\n")).collect();
    let refused = say(address, format!("GET /health HTTP/1.1\r\nhost: x\r\n{many}\r\n").as_bytes()).await;
    assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 4"), "{refused}");
    let fine = say(address, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(fine.starts_with("HTTP/1.1 200"), "{fine}");
}

/// A byte now and then is no pause, and yet not for ever.
#[tokio::test]
async fn s5_a_body_that_comes_in_drops_is_cut_off() {
    let bounds = Bounds { body_within: Duration::from_millis(300), ..Bounds::default() };
    let world = World::with(bounds, |_| {}).await;
    let drops = stream::unfold((), |()| async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        Some((Ok::<_, std::io::Error>(" "), ()))
    });
    let request = bare(Method::POST, "/v1/sandboxes", &world.admin).header("content-type", "application/json");
    let refused = world.whole(request.body(Body::from_stream(drops)).unwrap()).await.is(408);
    assert_eq!(refused.code(), "request_timeout");
}

#[tokio::test]
async fn s5_connections_and_requests_are_bounded() {
    let bounds = Bounds { connections_max: 2, ..Bounds::default() };
    let world = World::with(bounds, |_| {}).await;
    let (address, _end, _serving) = world.listen().await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        held.push(stream);
    }
    let refused = say(address, b"").await;
    assert!(refused.starts_with("HTTP/1.1 429") && refused.contains("too_many_requests"), "{refused}");

    let narrow = World::with(Bounds { requests_max: 0, ..Bounds::default() }, |_| {}).await;
    assert_eq!(narrow.get("/health").await.is(429).code(), "too_many_requests");
}

#[tokio::test]
async fn a_server_that_ends_ends_streams_finishes_requests_and_leaves_sandboxes() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let (address, end, serving) = world.listen().await;
    let ask = |path: &str, more: &str| {
        format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n{more}\r\n", world.admin)
    };
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(ask("/v1/events", "accept: text/event-stream\r\n").as_bytes()).await.unwrap();
    let mut first = [0; 12];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    end.send(()).unwrap();
    let mut rest = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("the stream ends").unwrap();
    assert!(rest.ends_with(b"0\r\n\r\n"), "properly");
    tokio::time::timeout(PATIENCE, serving).await.expect("the server ends").unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens");
    assert_eq!(world.get(&path).await.is(200).json()["status"], "ready");
}

#[tokio::test]
async fn s5_a_panic_is_our_mistake_with_a_word_for_the_log_and_the_server_serves_on() {
    let world = World::new().await;
    // No route is known to panic, so what they all use does.
    world.store.set_faults(Some(Box::new(|_| panic!("a mistake, on purpose"))));
    for answer in [world.get("/v1/sandboxes").await, world.post("/v1/sandboxes", json!({})).await] {
        let answer = answer.is(500);
        assert_eq!(answer.code(), "internal");
        assert!(answer.json()["error"]["details"]["request"].as_str().is_some_and(|word| word.len() == 16));
        assert!(!String::from_utf8_lossy(&answer.bytes).contains("on purpose"), "that is for the log");
    }
    world.store.set_faults(None);
    world.get("/v1/sandboxes").await.is(200);
}

#[tokio::test]
async fn s5_one_key_takes_its_share_and_an_operator_always_gets_in() {
    let bounds = Bounds { requests_max: 6, key_requests_max: 3, admin_requests_kept: 2, ..Bounds::default() };
    let world = World::with(bounds, |_| {}).await;
    let (greedy, other) = (world.key("default", false).await, world.key("default", true).await);
    // A body that never comes is a request that is being answered.
    let upload = || {
        let body = Body::from_stream(stream::pending::<Result<axum::body::Bytes, std::io::Error>>());
        let request = bare(Method::POST, "/v1/sandboxes", &greedy).header("content-type", "application/json");
        tokio::spawn(world.router.clone().oneshot(request.body(body).unwrap()))
    };
    let held: Vec<_> = (0..3).map(|_| upload()).collect();
    let ask = |key: &str| request(Method::GET, "/v1/sandboxes", key, None);
    let refused = until("its share is taken", async || {
        let answer = world.whole(ask(&greedy)).await;
        (answer.status == 429).then_some(answer)
    })
    .await;
    assert_eq!(refused.code(), "too_many_requests");
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("of this key"));
    world.whole(ask(&other)).await.is(200);
    world.get("/v1/sandboxes").await.is(200);
    for one in held {
        one.abort();
        let _ = one.await;
    }
    world.whole(ask(&greedy)).await.is(200);
}
