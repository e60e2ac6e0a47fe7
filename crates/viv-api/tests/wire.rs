//! What goes over the wire: requests as people write them, unknown fields refused, answers read back as they were.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use viv_api::bound::{Argv, ExecutionMs, LifetimeMs, MemoryBytes, SandboxName};
use viv_api::execution::{OutputChunk, OutputLine, OutputStream, StartExecution, TimeLimit};
use viv_api::key::{CreateKey, CreatedKey};
use viv_api::limits::{Limit, Limits};
use viv_api::query::{self, GetSandbox, ListFiles, ListSandboxes, OutputQuery, ReadFile};
use viv_api::sandbox::{
    CreateSandbox, Egress, EnsureSandbox, ExtendSandbox, ReportActivity, Sandbox, Status, StopSandbox, TakeKeepAwake,
};

fn parse<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

/// Parses a request as it is, and not with one more field.
fn strict<T: DeserializeOwned>(value: Value) -> T {
    let parsed = parse(value.clone()).unwrap();
    let mut more = value;
    more.as_object_mut().unwrap().insert("no_such_field".to_owned(), json!(1));
    assert!(parse::<T>(more).is_err(), "{} takes a field that it does not know", std::any::type_name::<T>());
    parsed
}

#[test]
fn s5_unknown_fields_are_refused_in_every_request() {
    strict::<CreateSandbox>(json!({}));
    strict::<EnsureSandbox>(json!({}));
    strict::<StopSandbox>(json!({"wait_ms": 0}));
    strict::<ExtendSandbox>(json!({"at_least_ms": 1000}));
    strict::<ReportActivity>(json!({}));
    strict::<TakeKeepAwake>(json!({"ttl_ms": 1000}));
    strict::<Limits>(json!({}));
    strict::<StartExecution>(json!({"argv": ["true"]}));
    strict::<viv_api::execution::Terminal>(json!({"rows": 1, "cols": 1}));
    strict::<viv_api::execution::SendSignal>(json!({"signal": 9}));
    strict::<viv_api::file::MoveFile>(json!({"from": "/a", "to": "/b"}));
    strict::<viv_api::file::MakeDir>(json!({"path": "/a"}));
    strict::<CreateKey>(json!({"name": "ci", "scope": "read_only"}));
    for inner in ["limits", "network", "policy"] {
        assert!(parse::<CreateSandbox>(json!({inner: {"no_such_field": 1}})).is_err(), "{inner}");
    }
}

#[test]
fn a_sandbox_is_asked_for_in_a_few_words() {
    let asked: CreateSandbox = strict(json!({
        "name": "build-agent",
        "labels": {"agent": "coder"},
        "env": {"LANG": "C.UTF-8"},
        "workdir": "/src",
        "limits": {"cpu_millis": 500, "memory_bytes": "unlimited"},
        "network": {"egress": "all"},
        "ports": [8080],
        "policy": {"lifetime_ms": 60_000},
        "wait_ms": 0,
    }));
    assert!(asked.image.is_host());
    assert_eq!(asked.network.egress, Egress::All);
    assert_eq!(asked.limits.memory_bytes, Some(Limit::UNLIMITED));
    assert_eq!(asked.limits.processes, None);
    assert_eq!(asked.policy.lifetime_ms.map(LifetimeMs::get), Some(60_000));
    assert_eq!(parse::<CreateSandbox>(serde_json::to_value(&asked).unwrap()).unwrap(), asked);
}

#[test]
fn l1_the_same_request_has_one_spelling() {
    // What is kept with an idempotency key is the parsed request: order and what is left out must not matter.
    let one: CreateSandbox = serde_json::from_str(r#"{"name":"a","labels":{"x":"1","a":"2"}}"#).unwrap();
    let two: CreateSandbox =
        serde_json::from_str(r#"{"labels":{"a":"2","x":"1"},"wait_ms":null,"image":"host","name":"a"}"#).unwrap();
    assert_eq!(serde_json::to_string(&one).unwrap(), serde_json::to_string(&two).unwrap());
}

#[test]
fn s5_bad_requests_say_what_is_wrong_and_not_what_was_sent() {
    let refused = |value: Value| parse::<CreateSandbox>(value).unwrap_err();
    assert!(refused(json!({"name": "Big"})).contains("small letters"));
    assert!(refused(json!({"name": "x".repeat(9_000)})).len() < 200);
    assert!(refused(json!({"policy": {"lifetime_ms": 5}})).contains("from 1000 to 2592000000"));
    assert!(!refused(json!({"env": {"KEY": "secret\u{0}"}})).contains("secret"), "S6");
    let _ = refused(json!({"limits": {"memory_bytes": 1}}));
    let _ = refused(json!({"limits": {"memory_bytes": "much"}}));
    let _ = refused(json!({"image": "/etc"}));
    let _ = refused(json!({"workdir": "relative"}));
}

#[test]
fn a_deadline_is_moved_one_way_or_the_other() {
    assert_eq!(
        parse::<ExtendSandbox>(json!({"exactly_ms": 1_000})).unwrap(),
        ExtendSandbox::ExactlyMs(LifetimeMs::nearest(1_000))
    );
    assert!(parse::<ExtendSandbox>(json!({"exactly_ms": 1_000, "at_least_ms": 1_000})).is_err());
    assert!(parse::<ExtendSandbox>(json!({})).is_err());
}

#[test]
fn x1_a_time_limit_is_five_minutes_a_number_or_none() {
    let spec = |value: Value| strict::<StartExecution>(value).to_spec(300_000).limit_ms;
    assert_eq!(spec(json!({"argv": ["true"]})), Some(300_000));
    assert_eq!(spec(json!({"argv": ["true"], "limit_ms": 5})), Some(5));
    assert_eq!(spec(json!({"argv": ["true"], "limit_ms": "none"})), None);
    assert!(parse::<StartExecution>(json!({"argv": ["true"], "limit_ms": 0})).is_err());
    assert!(parse::<StartExecution>(json!({"argv": []})).is_err());
    assert_eq!(serde_json::to_value(TimeLimit::NONE).unwrap(), "none");
    assert_eq!(serde_json::to_value(TimeLimit::Ms(ExecutionMs::nearest(7))).unwrap(), 7);
}

#[test]
fn x2_output_is_text_where_it_can_be_and_exact_always() {
    for bytes in [b"hello\n".to_vec(), Vec::new(), vec![0xff, 0x00, 0xc3], "ü".as_bytes()[..1].to_vec()] {
        let line = OutputLine::Chunk(OutputChunk::new(7, OutputStream::Stderr, 1, bytes.clone()));
        let read: OutputLine = serde_json::from_str(&serde_json::to_string(&line).unwrap()).unwrap();
        assert_eq!(read, line);
        let OutputLine::Chunk(chunk) = read else { panic!("{read:?}") };
        assert_eq!(chunk.data().unwrap(), bytes);
    }
    let lines = [
        json!({"cut": {"from": 1, "to": 9}}),
        json!({"alive_at_ms": 5}),
        json!({"end": execution()}),
        json!({"offset": 0, "stream": "stdout", "at_ms": 1, "data_base64": "/wA="}),
    ];
    for line in lines {
        let read: OutputLine = parse(line.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), line);
    }
}

fn execution() -> Value {
    json!({
        "id": "exe_1", "sandbox": "sbx_1", "generation": 1, "state": "exited", "exit_code": 3, "signal": null,
        "message": null, "argv": ["false"], "cwd": null, "user": null, "tty": false, "detach": false,
        "limit_ms": 300_000, "started_at_ms": 1, "ended_at_ms": 2, "output_bytes": 0, "stdin_bytes": 0, "pid": null,
    })
}

#[test]
fn a_sandbox_shows_what_scripts_rely_on() {
    let shown = json!({
        "id": "sbx_1", "project": "default", "name": null, "status": "ready", "desired": "running", "phase": "ready",
        "generation": 2, "cause": null,
        "evidence": {
            "exec": {"outcome": "ok", "checked_at_ms": 5, "took_ms": 3, "message": null, "path": "provider:local"},
            "filesystem": null,
            "ports": [{"port": 80, "outcome": "timeout", "checked_at_ms": 9, "took_ms": 3, "message": null, "path": "p"}],
            "services": [],
        },
        "observed": {"provider_state": "running", "end_cause": null, "via": "supervisor", "at_ms": 6},
        "observed_at": 9, "labels": {},
        "spec": {
            "image": "host", "workdir": "/workspace", "env_names": ["A"], "limits": {}, "network": {"egress": "none"},
            "ports": [80], "hooks": [],
        },
        "policy": {"persistent": false, "lifetime_ms": 1, "idle_ms": null, "hibernate_ms": null, "hibernate": "filesystem"}, "services": [],
        "keep_awake": [], "created_at_ms": 1, "last_activity_at_ms": null, "expires_at_ms": null,
        "task": null, "executions_running": 0, "deleted": false, "version": 1,
    });
    let sandbox: Sandbox = parse(shown.clone()).unwrap();
    assert_eq!(sandbox.evidence.latest_at_ms(), Some(9));
    let written = serde_json::to_value(&sandbox).unwrap();
    assert_eq!(written, shown);
    for field in ["id", "name", "status", "desired", "phase", "generation", "cause", "evidence", "observed_at"] {
        assert!(written.as_object().unwrap().contains_key(field), "{field} is there, also when it is nothing");
    }
    let mut newer = shown;
    newer["one_more"] = json!(1);
    assert_eq!(parse::<Sandbox>(newer).unwrap(), sandbox, "an older client reads a newer server's answer");
}

#[test]
fn every_status_is_one_word_both_ways() {
    for &status in Status::ALL {
        assert_eq!(serde_json::to_value(status).unwrap(), status.as_str());
        assert_eq!(status.as_str().parse::<Status>().unwrap(), status);
    }
    assert_eq!(Status::ALL.len(), 13);
    assert!("Ready".parse::<Status>().is_err());
}

#[test]
fn s6_a_secret_is_not_printed() {
    let key: CreatedKey = parse(json!({
        "key": {"id": "key_1", "name": "ci", "scope": "admin", "project": "default", "created_at_ms": 1,
                "last_used_at_ms": null, "expires_at_ms": null, "revoked_at_ms": null},
        "secret": "vk_very_secret",
    }))
    .unwrap();
    assert!(!format!("{key:?}").contains("very_secret"));
}

#[test]
fn queries_are_read_as_they_are_written() {
    let asked = ListSandboxes {
        label: vec!["team=a b".parse().unwrap(), "x=1&y".parse().unwrap()],
        status: Some(Status::Ready),
        name: Some(SandboxName::new("a").unwrap()),
        ..ListSandboxes::default()
    };
    let text = query::encode(&asked);
    assert_eq!(text, "?label=team%3Da%20b&label=x%3D1%26y&name=a&status=ready");
    assert_eq!(serde_html_form::from_str::<ListSandboxes>(&text[1..]).unwrap(), asked);
    assert_eq!(serde_html_form::from_str::<ListSandboxes>("").unwrap(), ListSandboxes::default());
    assert_eq!(query::encode(&GetSandbox::default()), "");

    let asked = OutputQuery {
        offset: Some("7".parse().unwrap()),
        follow: true,
        tail: None,
        search: None,
        since_ms: None,
        generation: None,
    };
    assert_eq!(serde_html_form::from_str::<OutputQuery>(&query::encode(&asked)[1..]).unwrap(), asked);
    let read = serde_html_form::from_str::<ReadFile>("path=/a%20b&length=3").unwrap();
    assert_eq!((read.path.as_str(), read.length.map(u64::from)), ("/a b", Some(3)));
}

#[test]
fn s5_bad_queries_are_refused() {
    assert!(serde_html_form::from_str::<ListSandboxes>("lable=a%3Db").is_err());
    assert!(serde_html_form::from_str::<ListSandboxes>("limit=0").is_err());
    assert!(serde_html_form::from_str::<ListSandboxes>("status=fine").is_err());
    assert!(serde_html_form::from_str::<ListSandboxes>("all=maybe").is_err());
    assert!(serde_html_form::from_str::<GetSandbox>("generation=0").is_err());
    assert!(serde_html_form::from_str::<ListFiles>("depth=1").is_err(), "a path is needed");
    assert!(serde_html_form::from_str::<ReadFile>("path=a").is_err());
}

#[test]
fn a_command_is_handed_on_as_it_is() {
    let argv = Argv::new(vec!["echo".parse().unwrap(), "".parse().unwrap()]).unwrap();
    let spec = StartExecution::new(argv).to_spec(1);
    assert_eq!(spec.argv, ["echo", ""]);
    assert!(MemoryBytes::new(1).is_err());
}
