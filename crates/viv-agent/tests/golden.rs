//! Conversations of old, word for word: what a daemon of protocol 1 says, this agent understands.
//!
//! Files in `tests/golden/v1` are never changed, only added. Each is a list of
//! steps on one connection: `send` is a request; `data` is uploaded after it;
//! `expect` is the reply; `then` are the frames that follow it. In what is
//! expected, `"*"` is anything, and an object may have more fields than are named.

mod common;

use std::io::Write;

use common::*;
use serde_json::Value;
use viv_agent::frame::{self, ChunkHeader, Kind};

fn matches(expected: &Value, found: &Value) -> bool {
    match (expected, found) {
        (Value::String(any), _) if any == "*" => true,
        (Value::Object(expected), Value::Object(found)) => {
            expected.iter().all(|(key, value)| found.get(key).is_some_and(|found| matches(value, found)))
        }
        (Value::Array(expected), Value::Array(found)) => {
            expected.len() == found.len() && expected.iter().zip(found).all(|(a, b)| matches(a, b))
        }
        _ => expected == found,
    }
}

/// A frame as the files have it.
fn shown((kind, payload): (Kind, Vec<u8>)) -> Value {
    match kind {
        Kind::Json => serde_json::from_slice(&payload).unwrap(),
        Kind::End => Value::String("end".to_owned()),
        Kind::Data => match ChunkHeader::decode(&payload) {
            Some((header, data)) => serde_json::json!({
                "chunk": String::from_utf8_lossy(data), "offset": header.offset, "stream": header.stream,
            }),
            None => serde_json::json!({ "data": String::from_utf8_lossy(&payload) }),
        },
    }
}

fn play(name: &str, steps: &[Value]) {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut client = agent.connect();
    for (number, step) in steps.iter().enumerate() {
        let place = format!("{name}, step {number}");
        client.send_json(step["send"].to_string().as_bytes());
        if let Some(data) = step.get("data") {
            client.send_data(data.as_str().unwrap().as_bytes()).unwrap();
            client.stream.write_all(&frame::encode_header(Kind::End, 0)).unwrap();
        }
        let reply: Value = client.json();
        assert!(matches(&step["expect"], &reply), "{place}: expected {}, found {reply}", step["expect"]);
        for expected in step.get("then").and_then(Value::as_array).into_iter().flatten() {
            let found = shown(client.frame().unwrap());
            assert!(matches(expected, &found), "{place}: expected {expected}, found {found}");
        }
    }
}

#[test]
fn protocol_1_is_still_spoken() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.retain(|file| !file.ends_with(REPLIES));
    assert!(files.len() >= 6, "the golden conversations are there");
    for file in files {
        let steps: Vec<Value> = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        play(&file.file_name().unwrap().to_string_lossy(), &steps);
    }
}

/// What an agent of protocol 1 answers, with no more fields than it had at first.
const REPLIES: &str = "replies.json";

#[test]
fn the_answers_of_old_agents_are_still_understood() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1/replies.json");
    let replies: Vec<Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert!(replies.len() >= 20);
    for reply in replies {
        let understood = serde_json::from_value::<viv_agent::proto::Reply>(reply.clone());
        let understood = understood.unwrap_or_else(|error| panic!("{reply}: {error}"));
        // And nothing of it was lost on the way.
        assert!(matches(&reply, &serde_json::to_value(&understood).unwrap()), "{reply} became {understood:?}");
    }
}

#[test]
fn a_pattern_can_fail() {
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    assert!(matches(&json(r#"{"a":"*","b":[1]}"#), &json(r#"{"a":5,"b":[1],"c":0}"#)));
    assert!(!matches(&json(r#"{"a":1}"#), &json(r#"{"a":2}"#)));
    assert!(!matches(&json(r#"{"a":"*"}"#), &json("{}")));
    assert!(!matches(&json("[1]"), &json("[1,2]")));
}
