//! The client against a server that says what it is told to, and breaks off where it is told to.
#![cfg(feature = "client")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use viv_api::client::{Change, Client, ClientError, Location};
use viv_api::execution::{OutputLine, StartExecution};
use viv_api::query::{ListEvents, ListSandboxes, ReadFile, WriteFile};
use viv_api::sandbox::{CreateSandbox, EnsureSandbox};
use viv_api::{ErrorCode, bound};
use viv_core::Generation;

/// A request as it arrived.
#[derive(Debug)]
struct Seen {
    line: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Seen {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// What to answer: a status, a type, and the bytes of the body as they are. Without an end, the connection is closed
/// where the body should go on.
struct Say {
    status: u16,
    kind: &'static str,
    body: Vec<u8>,
    whole: bool,
}

fn say(status: u16, body: &Value) -> Say {
    Say { status, kind: "application/json", body: body.to_string().into_bytes(), whole: true }
}

fn broken(kind: &'static str, body: impl Into<Vec<u8>>) -> Say {
    Say { status: 200, kind, body: body.into(), whole: false }
}

fn ended(kind: &'static str, body: impl Into<Vec<u8>>) -> Say {
    Say { status: 200, kind, body: body.into(), whole: true }
}

/// Answers one connection after the other, then stops listening.
fn serve(answers: Vec<Say>) -> (Location, mpsc::Receiver<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (seen, requests) = mpsc::channel();
    thread::spawn(move || {
        for answer in answers {
            let (stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let _ = seen.send(receive(&stream));
            reply(&stream, &answer);
        }
    });
    (Location::new(url).key("vk_secret").name("test"), requests)
}

fn receive(stream: &TcpStream) -> Seen {
    let mut reader = BufReader::new(stream);
    let mut line = || {
        let mut text = String::new();
        reader.read_line(&mut text).unwrap();
        text.trim_end().to_owned()
    };
    let first = line();
    let mut headers = Vec::new();
    loop {
        let text = line();
        let Some((name, value)) = text.split_once(": ") else { break };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let mut seen = Seen { line: first, headers, body: Vec::new() };
    if seen.header("expect").is_some() {
        (&*stream).write_all(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap();
    }
    if let Some(length) = seen.header("content-length").map(|length| length.parse().unwrap()) {
        seen.body = vec![0; length];
        reader.read_exact(&mut seen.body).unwrap();
    } else if seen.header("transfer-encoding").is_some() {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).unwrap();
            let mut chunk = vec![0; usize::from_str_radix(size.trim(), 16).unwrap() + 2];
            reader.read_exact(&mut chunk).unwrap();
            chunk.truncate(chunk.len() - 2);
            if chunk.is_empty() {
                break;
            }
            seen.body.extend(chunk);
        }
    }
    seen
}

fn reply(mut stream: &TcpStream, answer: &Say) {
    let Say { status, kind, body, whole } = answer;
    let head = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    stream.write_all(if *whole { b"\r\n0\r\n\r\n" } else { b"\r\n" }).unwrap();
}

fn sandbox() -> Value {
    json!({
        "id": "sbx_1", "project": "default", "name": "a", "status": "ready", "desired": "running", "phase": "ready",
        "generation": 2, "cause": null, "evidence": {"exec": null, "filesystem": null, "ports": []}, "observed": null,
        "observed_at": null, "labels": {},
        "spec": {"image": "host", "workdir": "/", "env_names": [], "limits": {}, "network": {"egress": "none"}, "ports": []},
        "policy": {"persistent": true, "lifetime_ms": 1, "idle_ms": null},
        "created_at_ms": 1, "last_activity_at_ms": null, "expires_at_ms": null, "version": 1,
    })
}

fn execution() -> Value {
    json!({
        "id": "exe_1", "sandbox": "sbx_1", "generation": 2, "state": "exited", "exit_code": 3, "signal": null,
        "message": null, "argv": ["x"], "cwd": null, "user": null, "tty": false, "detach": false, "limit_ms": null,
        "started_at_ms": 1, "ended_at_ms": 2, "output_bytes": 9, "stdin_bytes": 0, "pid": null,
    })
}

fn name(text: &str) -> bound::SandboxRef {
    text.parse().unwrap()
}

#[test]
fn a_request_carries_what_it_must() {
    let (location, seen) = serve(vec![say(201, &sandbox()), say(202, &sandbox()), say(201, &execution())]);
    let client = Client::locate(location).unwrap();
    let key = bound::IdempotencyKey::new("once").unwrap();
    assert!(matches!(client.create(&CreateSandbox::default(), Some(&key)).unwrap(), Change::Done(_)));
    let made = seen.recv().unwrap();
    assert_eq!(made.line, "POST /v1/sandboxes HTTP/1.1");
    assert_eq!(made.header("authorization"), Some("Bearer vk_secret"));
    assert_eq!(made.header("idempotency-key"), Some("once"));
    assert_eq!(made.header("viv-client"), Some("test"));
    assert_eq!(made.header("viv-generation"), None);
    assert_eq!(serde_json::from_slice::<CreateSandbox>(&made.body).unwrap(), CreateSandbox::default());

    let handle = client.sandbox(name("a")).at(Generation(2));
    assert!(matches!(handle.ensure(&EnsureSandbox::default()).unwrap(), Change::Underway(_)));
    let ensured = seen.recv().unwrap();
    assert_eq!(ensured.line, "POST /v1/sandboxes/a/ensure HTTP/1.1");
    assert_eq!(ensured.header("viv-generation"), Some("2"), "T5");
    let started = handle.start(&StartExecution::of(["x"]).unwrap(), None).unwrap();
    assert_eq!(started.exit_code, Some(3));
    assert_eq!(seen.recv().unwrap().body, br#"{"argv":["x"],"env":{},"stdin":false,"detach":false,"wake":false}"#);
}

#[test]
fn t5_an_error_is_typed_with_its_details() {
    let error = viv_api::ApiError::stale_handle(Generation(1), Generation(2), "it was lost").into_body();
    let (location, _seen) = serve(vec![say(410, &serde_json::to_value(error).unwrap())]);
    let client = Client::locate(location).unwrap();
    let error = client.sandbox(name("a")).at(Generation(1)).get().unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::StaleHandle));
    assert!(error.hint().is_some());
    let ClientError::Api { status: 410, error } = error else { panic!("{error:?}") };
    assert_eq!(error.details.unwrap().current_generation, Some(Generation(2)));
}

#[test]
fn who_is_not_our_server_is_told_as_such() {
    let (location, _seen) = serve(vec![ended("text/html", "<html>hello"), say(404, &json!({"no": "error"}))]);
    let client = Client::locate(location).unwrap();
    let error = client.version().unwrap_err();
    assert!(matches!(&error, ClientError::Unexpected { status: 200, .. }), "{error:?}");
    assert!(error.to_string().contains("<html>hello"), "{error}");
    assert!(matches!(client.version().unwrap_err(), ClientError::Unexpected { status: 404, .. }));
}

#[test]
fn a_server_that_is_not_there_is_told_with_a_hint() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let client = Client::locate(Location::new(format!("http://127.0.0.1:{port}"))).unwrap();
    let error = client.health().unwrap_err();
    assert!(matches!(error, ClientError::Transport { .. }), "{error:?}");
    assert!(error.hint().unwrap().contains("viv serve"));
}

#[test]
fn bad_addresses_are_refused_before_anything_is_sent() {
    for url in ["", "127.0.0.1:7711", "ftp://a", "http://", "http://a b"] {
        let error = Client::locate(Location::new(url)).unwrap_err();
        assert!(matches!(error, ClientError::Address { .. }), "{url}: {error:?}");
    }
    let error = Client::locate(Location::new("https://a")).unwrap_err();
    assert!(error.to_string().contains("certificates"), "{error}");
}

#[test]
fn s6_the_key_is_not_printed() {
    let location = Location::new("http://a").key("vk_secret");
    assert!(!format!("{location:?}").contains("secret"));
    assert!(!format!("{:?}", Client::locate(location).unwrap()).contains("secret"));
}

#[test]
fn not_being_ready_is_an_answer() {
    let said = json!({"ready": false, "checks": [{"name": "store", "ok": false, "message": "x".repeat(500)}]});
    let (location, _seen) = serve(vec![say(503, &said)]);
    assert!(!Client::locate(location).unwrap().ready().unwrap().ready);
}

#[test]
fn x2_output_goes_on_where_it_broke_off() {
    let chunk = |offset: u64, text: &str| json!({"offset": offset, "stream": "stdout", "at_ms": 1, "text": text});
    let lines = |lines: &[Value]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let ndjson = "application/x-ndjson";
    let cut_off = lines(&[chunk(0, "ab"), json!({"alive_at_ms": 1})]) + &chunk(2, "lost").to_string();
    let (location, seen) = serve(vec![
        broken(ndjson, cut_off),
        // Ended as if it were whole, but without the end: that is broken too.
        ended(ndjson, lines(&[json!({"cut": {"from": 2, "to": 5}})])),
        say(503, &serde_json::to_value(viv_api::ApiError::new(ErrorCode::ShuttingDown, "m").into_body()).unwrap()),
        // A server that begins too early.
        ended(ndjson, lines(&[chunk(3, "xxcde"), chunk(8, "f"), json!({"end": execution()})])),
    ]);
    let client = Client::locate(location).unwrap();
    let handle = client.sandbox(name("a")).at(Generation(2)).execution("exe_1".parse().unwrap());
    let mut text = String::new();
    let mut cuts = Vec::new();
    let mut end = None;
    let mut output = handle.follow(0);
    for line in &mut output {
        match line.unwrap() {
            OutputLine::Chunk(chunk) => text += &String::from_utf8(chunk.data().unwrap()).unwrap(),
            OutputLine::Cut(cut) => cuts.push((cut.cut.from, cut.cut.to)),
            OutputLine::End(last) => end = Some(last.end.exit_code),
            OutputLine::Alive(_) => panic!("signs of life are not told"),
        }
    }
    assert_eq!((text.as_str(), cuts.as_slice(), end), ("abcdef", &[(2, 5)][..], Some(Some(3))));
    assert_eq!(output.offset(), 9);
    let asked: Vec<String> = seen.iter().map(|seen| seen.line).collect();
    let at = |offset| format!("GET /v1/sandboxes/a/executions/exe_1/output?follow=true&offset={offset} HTTP/1.1");
    assert_eq!(asked, [at(0), at(2), at(5), at(5)]);
}

#[test]
fn x2_a_start_that_is_followed_goes_on_by_its_id_where_it_broke_off() {
    let chunk = |offset: u64, text: &str| json!({"offset": offset, "stream": "stdout", "at_ms": 1, "text": text});
    let lines = |lines: &[Value]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let ndjson = "application/x-ndjson";
    let (location, seen) = serve(vec![
        Say { status: 201, ..broken(ndjson, lines(&[json!({"started": execution()}), chunk(0, "ab")])) },
        ended(ndjson, lines(&[chunk(2, "c"), json!({"end": execution()})])),
        // It broke off before it said which: whoever asked does not know, and is told so.
        Say { status: 201, ..broken(ndjson, "") },
        say(404, &serde_json::to_value(viv_api::ApiError::new(ErrorCode::NotFound, "m").into_body()).unwrap()),
    ]);
    let client = Client::locate(location).unwrap();
    let handle = client.sandbox(name("a"));
    let (request, key) = (StartExecution::of(["x"]).unwrap(), "once".parse().unwrap());
    let (started, mut output) = handle.start_and_follow(&request, Some(&key)).unwrap();
    assert_eq!(started.id.to_string(), "exe_1");
    let told: Vec<_> = output.by_ref().map(Result::unwrap).collect();
    assert_eq!(output.offset(), 3);
    assert!(matches!(&told[..], [OutputLine::Chunk(_), OutputLine::Chunk(_), OutputLine::End(_)]), "{told:?}");
    assert!(matches!(handle.start_and_follow(&request, None), Err(ClientError::Transport { .. })));
    let refused = handle.start_and_follow(&request, None).map(|(started, _)| started);
    assert_eq!(refused.unwrap_err().code(), Some(ErrorCode::NotFound));
    let asked: Vec<Seen> = seen.iter().collect();
    assert_eq!(asked[0].line, "POST /v1/sandboxes/a/executions?follow=true HTTP/1.1");
    assert_eq!((asked[0].header("accept"), asked[0].header("idempotency-key")), (Some(ndjson), Some("once")));
    assert_eq!(asked[1].line, "GET /v1/sandboxes/a/executions/exe_1/output?follow=true&offset=2 HTTP/1.1");
}

#[test]
fn x2_what_will_not_pass_ends_the_output() {
    let gone = viv_api::ApiError::new(ErrorCode::Gone, "m").into_body();
    let (location, _seen) =
        serve(vec![broken("application/x-ndjson", ""), say(410, &serde_json::to_value(gone).unwrap())]);
    let client = Client::locate(location).unwrap();
    let mut output = client.sandbox(name("a")).execution("exe_1".parse().unwrap()).follow(0);
    assert_eq!(output.next().unwrap().unwrap_err().code(), Some(ErrorCode::Gone));
    assert!(output.next().is_none(), "an error is the last item");
}

#[test]
fn a_silent_stream_is_taken_for_broken() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = thread::spawn(move || {
        let (silent, _) = listener.accept().unwrap();
        receive(&silent);
        (&silent)
            .write_all(b"HTTP/1.1 200 X\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")
            .unwrap();
        let (second, _) = listener.accept().unwrap();
        receive(&second);
        reply(&second, &ended("application/x-ndjson", format!("{}\n", json!({"end": execution()}))));
        drop(silent);
    });
    let client = Client::locate(Location::new(url).silence_timeout(Duration::from_millis(200))).unwrap();
    let lines: Vec<_> = client.sandbox(name("a")).execution("exe_1".parse().unwrap()).follow(0).collect();
    assert!(matches!(&lines[..], [Ok(OutputLine::End(_))]), "{lines:?}");
    server.join().unwrap();
}

#[test]
fn events_go_on_after_the_last_one() {
    let event = |seq: u64| {
        let data = json!({
            "seq": seq, "at_ms": 1, "kind": "sandbox.created", "project": "p", "sandbox": "sbx_1", "generation": 1,
            "from": null, "to": null, "cause": null, "by": "key:ci", "address": null, "message": "m", "data": {},
        });
        format!("id: {seq}\nevent: sandbox.created\ndata: {data}\n\n")
    };
    let (location, seen) = serve(vec![
        broken("text/event-stream", format!(": alive\n\n{}{}id: 6\ndata: {{\"cut", event(4), event(5))),
        broken("text/event-stream", event(5) + &event(6).replace('\n', "\r\n")),
    ]);
    let client = Client::locate(location).unwrap();
    let query = ListEvents {
        after: Some(bound::Sequence::nearest(3)),
        sandbox: Some(name("a")),
        by: Some("key:ci".parse().unwrap()),
        ..ListEvents::default()
    };
    let events: Vec<_> = client.follow_events(query).take(3).map(|event| event.unwrap().seq).collect();
    assert_eq!(events, [4, 5, 6]);
    let (first, second) = (seen.recv().unwrap(), seen.recv().unwrap());
    assert_eq!(first.line, "GET /v1/events?after=3&by=key%3Aci&sandbox=a HTTP/1.1");
    assert_eq!(first.header("accept"), Some("text/event-stream"));
    assert_eq!(second.header("last-event-id"), Some("5"));
}

#[test]
fn files_go_both_ways() {
    let stat = json!({"kind": "file", "size_bytes": 3, "mode": "0600", "uid": 0, "gid": 0, "modified_at_ms": 1, "link_target": null});
    let (location, seen) = serve(vec![
        say(200, &stat),
        ended("application/octet-stream", [0xff, 0, 1]),
        broken("application/octet-stream", [0xff]),
        broken("text/event-stream", "data: {\"kind\":\"created\",\"path\":\"a\",\"is_dir\":false}\n\n"),
    ]);
    let client = Client::locate(location).unwrap();
    let handle = client.sandbox(name("a"));
    let path: bound::Path = "/a b&c".parse().unwrap();
    let mode = Some("0600".parse().unwrap());
    let write = WriteFile { path: path.clone(), mode, user: None, generation: None };
    handle.write_file(&write, &mut &[0xff, 0, 1][..]).unwrap();
    let written = seen.recv().unwrap();
    assert_eq!(written.line, "PUT /v1/sandboxes/a/files?mode=0600&path=%2Fa%20b%26c HTTP/1.1");
    assert_eq!(
        (written.body.as_slice(), written.header("content-type")),
        (&[0xff, 0, 1][..], Some("application/octet-stream"))
    );
    let read = ReadFile { path: path.clone(), offset: None, length: None, generation: None };
    let mut bytes = Vec::new();
    handle.read_file(&read).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, [0xff, 0, 1]);
    assert!(handle.read_file(&read).unwrap().read_to_end(&mut bytes).is_err(), "half a file is not a file");
    let mut changes = handle.watch(&path, true).unwrap();
    assert_eq!(changes.next().unwrap().unwrap().path, "a");
    assert!(changes.next().unwrap().is_err(), "what was missed is not passed over in silence");
    assert!(changes.next().is_none());
}

#[test]
fn lists_are_read_to_their_end() {
    let (location, seen) = serve(vec![
        say(200, &json!({"items": [sandbox()], "next": "abc"})),
        say(200, &json!({"items": [sandbox(), sandbox()], "next": null})),
    ]);
    let client = Client::locate(location).unwrap();
    let query = ListSandboxes { all: true, ..ListSandboxes::default() };
    assert_eq!(client.list_all(query).map(Result::unwrap).count(), 3);
    let asked: Vec<_> = seen.iter().map(|seen| seen.line).collect();
    assert_eq!(asked, ["GET /v1/sandboxes?all=true HTTP/1.1", "GET /v1/sandboxes?all=true&cursor=abc HTTP/1.1"]);
}
