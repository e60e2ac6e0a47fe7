//! What workloads ask for: heard, told outside, answered; and what they cannot do with it.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output as Ended, Stdio};

use common::*;
use viv_agent::frame::{self, Kind};
use viv_agent::proto::*;
use viv_core::{FencingToken, Generation, RequestId};

/// Longer than any test, so that only what is tested ends a wait.
const LONG: &str = "120s";

fn viv(agent: &TestAgent, wait: &str, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_viv-agent"));
    command.args(["viv", "--home"]).arg(agent.dir.path().join("home")).args(["--wait", wait]).args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn ask(agent: &TestAgent, wait: &str, body: &str) -> Child {
    viv(agent, wait, &[ASK_VERB, body])
}

fn ended(child: Child) -> (Option<i32>, String, String) {
    let Ended { status, stdout, stderr } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn listen(agent: &TestAgent) -> Client {
    let mut client = agent.connect();
    assert_eq!(client.call(&Request::Requests), Ok(Answer::Done));
    client
}

fn answer(agent: &TestAgent, id: &RequestId, body: &str) -> Result<Answer, AgentError> {
    agent.call(&Request::RequestAnswer { fence: fence(), id: id.clone(), body: body.to_owned() })
}

fn inside(agent: &TestAgent) -> UnixStream {
    let stream = UnixStream::connect(agent.dir.path().join("home").join(INSIDE_SOCKET)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// What the agent says to somebody inside before it hangs up.
fn reply(mut stream: UnixStream) -> Option<InsideReply> {
    let mut bytes = Vec::new();
    // Somebody whose words were not read to their end may find the connection reset.
    let _ = stream.read_to_end(&mut bytes);
    let (_, payload) = bytes.split_first_chunk::<{ frame::HEADER_BYTES }>()?;
    serde_json::from_slice(payload).ok()
}

fn call(wait_ms: u64, body: &str) -> Vec<u8> {
    let payload = serde_json::to_vec(&InsideCall { wait_ms, body: body.to_owned() }).unwrap();
    [&frame::encode_header(Kind::Json, payload.len())[..], &payload].concat()
}

#[test]
fn a_request_is_heard_and_answered() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut listener = listen(&agent);
    for body in ["{\"a\": 1}", "\u{1f331} \"two\""] {
        let asking = ask(&agent, LONG, body);
        let heard: InsideRequest = listener.json();
        assert_eq!((heard.body.as_str(), heard.again), (body, false));
        assert_eq!(answer(&agent, &heard.id, body), Ok(Answer::Done));
        assert_eq!(ended(asking), (Some(0), format!("{body}\n"), String::new()));
        assert_eq!(answer(&agent, &heard.id, "twice").unwrap_err().code, ErrorCode::NotFound);
    }
}

#[test]
fn an_answer_may_be_long() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut listener = listen(&agent);
    let long = "\u{e4}".repeat(ANSWER_BYTES_MAX / 2);
    let asking = ask(&agent, LONG, "much");
    let heard: InsideRequest = listener.json();
    assert_eq!(answer(&agent, &heard.id, &format!("{long}x")).unwrap_err().code, ErrorCode::Invalid);
    // Read while it is written: it is more than a socket holds.
    let reading = std::thread::spawn(move || ended(asking));
    assert_eq!(answer(&agent, &heard.id, &long), Ok(Answer::Done));
    let (code, said, _) = reading.join().unwrap();
    assert_eq!((code, said.len()), (Some(0), long.len() + 1));
}

#[test]
fn what_was_not_answered_is_told_to_the_next_listener() {
    let agent = TestAgent::start(Killing::Subreaper);
    let asking = ask(&agent, LONG, "early");
    let mut first = listen(&agent);
    let heard: InsideRequest = first.json();
    let mut second = listen(&agent);
    assert!(first.frame().is_err(), "there is one listener");
    let again: InsideRequest = second.json();
    assert_eq!(again, InsideRequest { again: true, ..heard });
    drop(second);
    let mut third = listen(&agent);
    assert_eq!(third.json::<InsideRequest>(), again);
    assert_eq!(answer(&agent, &again.id, "late"), Ok(Answer::Done));
    assert_eq!(ended(asking), (Some(0), "late\n".to_owned(), String::new()));
}

#[test]
fn one_is_told_at_a_time_and_none_is_lost() {
    let agent = TestAgent::start(Killing::Subreaper);
    // More than are taken at once: the others wait in the kernel.
    let asking: Vec<_> = (0..24).map(|number| ask(&agent, LONG, &number.to_string())).collect();
    let mut listener = listen(&agent);
    let mut heard = Vec::new();
    while heard.len() < asking.len() {
        let request: InsideRequest = listener.json();
        heard.push(request.body.clone());
        assert_eq!(answer(&agent, &request.id, &request.body), Ok(Answer::Done));
    }
    for (number, asking) in asking.into_iter().enumerate() {
        assert_eq!(ended(asking), (Some(0), format!("{number}\n"), String::new()));
    }
    heard.sort_unstable();
    heard.dedup();
    assert_eq!(heard.len(), 24);
}

#[test]
fn without_a_daemon_nothing_is_said_to_have_been_done() {
    let agent = TestAgent::start(Killing::Subreaper);
    let (code, said, wrong) = ended(ask(&agent, "200ms", "x"));
    assert_eq!((code, said.as_str()), (Some(7), ""));
    assert!(wrong.contains("nothing was done") && wrong.contains("hint:"), "{wrong}");
    // One that heard it and went away leaves it open.
    let mut listener = listen(&agent);
    let asking = ask(&agent, "3s", "x");
    let heard: InsideRequest = listener.json();
    drop(listener);
    let (code, said, wrong) = ended(asking);
    assert_eq!((code, said.as_str()), (Some(124), ""));
    assert!(wrong.contains("not known"), "{wrong}");
    assert_eq!(answer(&agent, &heard.id, "late").unwrap_err().code, ErrorCode::NotFound);
}

#[test]
fn whoever_does_not_wait_is_not_told_of() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut gone = inside(&agent);
    gone.write_all(&call(60_000, "gone")).unwrap();
    drop(gone);
    let asking = ask(&agent, LONG, "there");
    // Both were accepted in their order, so the first was seen to have gone when the second is told of.
    let mut listener = listen(&agent);
    let heard: InsideRequest = listener.json();
    assert_eq!(heard.body, "there");
    assert_eq!(answer(&agent, &heard.id, "yes"), Ok(Answer::Done));
    assert_eq!(ended(asking).0, Some(0));
}

#[test]
fn s5_garbage_is_turned_away_and_does_no_harm() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut listener = listen(&agent);
    let two = [call(1000, "a"), call(1000, "b")].concat();
    let long = frame::encode_header(Kind::Json, CALL_BYTES_MAX + 1).to_vec();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[0, 0, 0, 2, 1, b'{', b'}'], &two, &long] {
        let mut stream = inside(&agent);
        stream.write_all(garbage).unwrap();
        let said = reply(stream);
        assert!(matches!(said, None | Some(InsideReply::None(NoAnswer::Invalid))), "{garbage:?}: {said:?}");
    }
    // A request of the agent's own protocol is none of this one's.
    let mut stream = inside(&agent);
    let hello = br#"{"op":"hello"}"#;
    stream.write_all(&[&frame::encode_header(Kind::Json, hello.len())[..], hello].concat()).unwrap();
    assert_eq!(reply(stream), Some(InsideReply::None(NoAnswer::Invalid)));
    // Those who say nothing hold no place for long, and take none of the agent's own connections.
    let silent: Vec<_> = (0..20).map(|_| inside(&agent)).collect();
    assert!(matches!(agent.call(&Request::Health), Ok(Answer::Health(_))));
    let asking = ask(&agent, LONG, "in the crowd");
    let heard: InsideRequest = listener.json();
    assert_eq!(heard.body, "in the crowd");
    assert_eq!(answer(&agent, &heard.id, "heard"), Ok(Answer::Done));
    assert_eq!(ended(asking).0, Some(0));
    drop(silent);
}

#[test]
fn answers_are_fenced_and_given_once() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut listener = listen(&agent);
    let asking = ask(&agent, LONG, "x");
    let heard: InsideRequest = listener.json();
    let good = fence();
    let give =
        |fence: Fence| agent.call(&Request::RequestAnswer { fence, id: heard.id.clone(), body: "it".to_owned() });
    let late = give(Fence { token: FencingToken(9), ..fence() }).unwrap_err();
    assert_eq!(late.code, ErrorCode::Fenced);
    let other = give(Fence { generation: Generation(2), ..fence() }).unwrap_err();
    assert_eq!(other.code, ErrorCode::StaleGeneration);
    for _ in 0..2 {
        assert_eq!(give(good.clone()), Ok(Answer::Done));
    }
    assert_eq!(ended(asking).1, "it\n");
}

#[test]
fn listening_costs_no_thread() {
    let agent = TestAgent::start(Killing::Subreaper);
    // The main one, and the reserve.
    let is_alone = || agent.memory_kib("Threads") == 2;
    eventually("the threads of the beginning to end", is_alone);
    let mut listener = listen(&agent);
    eventually("the connection's thread to end", is_alone);
    let asking = ask(&agent, LONG, "x");
    let heard: InsideRequest = listener.json();
    assert!(is_alone(), "a thread for who asks");
    answer(&agent, &heard.id, "y").unwrap();
    assert_eq!(ended(asking).0, Some(0));
}

#[test]
fn the_command_line_is_read_before_anybody_is_asked() {
    let agent = TestAgent::start(Killing::Subreaper);
    for wrong in [&["schedule"][..], &["schedule", "add"], &["schedule", "nonsense"], &["create"], &["--nonsense"]] {
        let (code, said, complaint) = ended(viv(&agent, LONG, wrong));
        assert_eq!((code, said.as_str()), (Some(2), ""), "{wrong:?}");
        assert!(complaint.starts_with("error: ") && complaint.contains("hint: "), "{complaint}");
    }
    let (code, said, _) = ended(viv(&agent, LONG, &["schedule", "--help"]));
    assert!(code == Some(0) && said.contains("--cron"), "{said}");
    // What is asked is what was said, and what comes back is shown.
    let mut listener = listen(&agent);
    let asking = viv(&agent, LONG, &["schedule", "add", "--cron", "@daily", "--missed=once", "--", "echo", "a b"]);
    let heard: InsideRequest = listener.json();
    let body: serde_json::Value = serde_json::from_str(&heard.body).unwrap();
    let expected = serde_json::json!({"cron": "@daily", "missed": "once", "argv": ["echo", "a b"], "env": {}});
    assert_eq!(body, serde_json::json!({ "schedule_add": expected }));
    answer(&agent, &heard.id, r#"{"ok": {"id": "sch_x"}}"#).unwrap();
    assert_eq!(ended(asking), (Some(0), "sch_x\n".to_owned(), String::new()));
    let asking = viv(&agent, LONG, &["schedule", "rm", "sch_y"]);
    let heard: InsideRequest = listener.json();
    let refusal = r#"{"error": {"code": "not_found", "message": "no", "hint": "look", "docs": "docs/errors/x.md"}}"#;
    answer(&agent, &heard.id, refusal).unwrap();
    let complaint = "error: no\nhint: look\nsee: docs/errors/x.md\n".to_owned();
    assert_eq!(ended(asking), (Some(3), String::new(), complaint));
    let asking = viv(&agent, LONG, &["schedule", "ls"]);
    let heard: InsideRequest = listener.json();
    answer(&agent, &heard.id, r#"{"ok": [{"id": "sch_x", "cron": "@daily", "zone": "UTC", "argv": ["a\u001b[2J"]}]}"#)
        .unwrap();
    let (code, said, _) = ended(asking);
    assert!(code == Some(0) && said.contains("sch_x") && !said.contains('\u{1b}'), "{said}");
}
