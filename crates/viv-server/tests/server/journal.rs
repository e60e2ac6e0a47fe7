//! The journal as pages and streams; figures; the daemon's own log.

use std::time::Duration;

use axum::http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use viv_core::lifecycle::Actor;
use viv_provider::conformance::program::Program;
use viv_server::Bounds;
use viv_store::NewLine;

use crate::world::{PATIENCE, World, bare, until};

/// Reads events until one is there.
async fn read_until(body: &mut axum::body::Body, wanted: impl Fn(&Value) -> bool) -> Vec<Value> {
    let mut text = String::new();
    loop {
        let events: Vec<Value> = text
            .split("\n\n")
            .filter_map(|event| event.lines().find_map(|line| line.strip_prefix("data: ")))
            .filter_map(|data| serde_json::from_str(data).ok())
            .collect();
        if events.last().is_some_and(&wanted) {
            return events;
        }
        let frame = tokio::time::timeout(PATIENCE, body.frame()).await.expect("an event in time");
        let frame = frame.expect("the stream goes on").expect("no error");
        text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
}

fn stream(world: &World, query: &str) -> axum::http::request::Builder {
    bare(Method::GET, &format!("/v1/events{query}"), &world.admin).header("accept", "text/event-stream")
}

#[tokio::test]
async fn o7_a_stream_goes_on_where_it_was_without_gaps() {
    let world = World::new().await;
    let mut body = world.send(stream(&world, "").body("".into()).unwrap()).await.into_body();
    let path = world.sandbox().await;
    let events = read_until(&mut body, |event| event["to"] == "ready").await;
    let last = events.last().unwrap()["seq"].as_u64().unwrap();
    assert_eq!(format!("/v1/sandboxes/{}", events.last().unwrap()["sandbox"].as_str().unwrap()), path);
    drop(body);
    world.delete(&path).await.is(200);

    // A browser says what it has seen; others say it in the query.
    for resumed in
        [stream(&world, "").header("last-event-id", last.to_string()), stream(&world, &format!("?after={last}"))]
    {
        let mut body = world.send(resumed.body("".into()).unwrap()).await.into_body();
        let rest = read_until(&mut body, |event| event["to"] == "stopped").await;
        assert!(rest[0]["seq"].as_u64().unwrap() > last);
        let page = world.get(&format!("/v1/events?after={last}")).await.is(200).json();
        assert_eq!(page["items"].as_array().unwrap()[..rest.len()], rest[..], "the same, as a page");
    }
    let odd = stream(&world, "").header("last-event-id", "x").body("".into()).unwrap();
    assert_eq!(world.whole(odd).await.is(400).code(), "invalid_request");
    let other = bare(Method::GET, "/v1/events", &world.admin).header("accept", "text/html").body("".into()).unwrap();
    assert_eq!(world.whole(other).await.is(406).code(), "not_acceptable");
}

#[tokio::test]
async fn pages_of_events_follow_each_other_and_can_be_of_one_sandbox() {
    let world = World::new().await;
    let path = world.sandbox().await;
    world.sandbox().await;
    let id = path.rsplit('/').next().unwrap();
    let whole = world.get(&format!("/v1/events?sandbox={id}")).await.is(200).json();
    let mut pieces = Vec::new();
    let mut after = 0;
    loop {
        let page = world.get(&format!("/v1/events?sandbox={id}&limit=1&after={after}")).await.is(200).json();
        after = page["next_after"].as_u64().unwrap();
        pieces.extend(page["items"].as_array().unwrap().clone());
        if page["more"] == false {
            break;
        }
    }
    assert_eq!(whole["items"], json!(pieces));
    assert!(pieces.iter().all(|event| event["sandbox"] == id));
    assert_eq!(whole["oldest_seq"], 1);

    let mut entries = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = world.get(&format!("{path}/timeline?limit=1{cursor}")).await.is(200).json();
        entries.extend(page["items"].as_array().unwrap().clone());
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    let whole = world.get(&format!("{path}/timeline")).await.is(200).json();
    assert_eq!(whole["items"], json!(entries), "times too");
    assert!(entries.iter().any(|entry| entry["to"] == "ready" && entry["took_ms"].is_u64()), "{entries:?}");
}

#[tokio::test]
async fn s5_a_reader_that_does_not_read_is_let_go() {
    let bounds = Bounds { write_idle: Duration::from_millis(200), ..Bounds::default() };
    let world = World::with(bounds, |_| {}).await;
    let (address, end, serving) = world.listen().await;
    let mut slow = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "GET /v1/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\naccept: text/event-stream\r\n\r\n",
        world.admin
    );
    slow.write_all(head.as_bytes()).await.unwrap();
    let line = NewLine {
        at_ms: 1,
        project: None,
        sandbox: None,
        generation: None,
        kind: "test.line".to_owned(),
        from: None,
        to: None,
        cause: None,
        by: Actor::part("test"),
        data: json!({"filler": "x".repeat(32 << 10)}),
    };
    // More than the kernel's buffers of both ends take.
    for _ in 0..600 {
        viv_store::Store::append(world.store.as_ref(), world.engine.epoch(), vec![line.clone()]).await.unwrap();
    }
    // It is let go while it does not read: nobody is there to hear it any more.
    until("the connection is closed", async || slow.write_all(b"x").await.err()).await;
    end.send(()).unwrap();
    tokio::time::timeout(PATIENCE, serving).await.unwrap().unwrap();
}

#[tokio::test]
async fn o2_figures_are_counted() {
    let world = World::new().await;
    let path = world.sandbox().await;
    world.sandbox().await;
    world.post("/v1/sandboxes", json!({"name": "kept"})).await.is(201);
    world.post("/v1/sandboxes/kept/stop", json!({})).await.is(200);
    world.delete(&path).await.is(200);
    for _ in 0..2 {
        let stats = world.get("/v1/stats?slo=true").await.is(200).json();
        let figure = |name: &str| stats[name].as_u64().unwrap();
        assert_eq!((figure("active"), figure("hibernated"), figure("spare")), (1, 1, 0), "{stats}");
        assert_eq!((figure("created_total"), figure("destroyed_total")), (3, 1), "{stats}");
        let ages: u64 = stats["ages"].as_array().unwrap().iter().map(|bucket| bucket["count"].as_u64().unwrap()).sum();
        assert_eq!(ages, 1);
        assert_eq!(stats["slo"][0]["met"], true);
        let slo: Vec<_> = stats["slo"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
        let lives = ["stop_success", "stop_time", "recreate_success", "resume_success"];
        let works = ["cancel_time", "cancel_mistaken", "timeout_rate", "inactivity_rate", "inactivity_mistaken"];
        assert_eq!(slo, [&lives[..], &works[..]].concat());
        // One was saved, the other one ended.
        assert_eq!((&stats["slo"][1]["numerator"], &stats["slo"][2]["met"]), (&json!(2), &json!(null)), "{stats}");
        let quotas = stats["quotas"].as_array().unwrap();
        assert_eq!((&quotas[0]["name"], &quotas[0]["used"]), (&json!("sandboxes"), &json!(1)), "{stats}");
    }
}

#[tokio::test]
async fn o1_the_daemon_tells_about_itself() {
    let world = World::new().await;
    assert_eq!(world.get("/health").await.is(200).json(), json!({"status": "ok"}));
    assert_eq!(world.get("/ready").await.is(200).json()["ready"], true);
    let version = world.get("/v1/version").await.is(200).json();
    assert_eq!((&version["api"], &version["provider"]), (&json!("v1"), &json!("sim")));
    assert!(version["gates"].as_array().unwrap().iter().all(|gate| gate["on"] == true));
    let doctor = world.get("/v1/doctor").await.is(200).json();
    assert!(doctor["capabilities"].as_array().unwrap().len() > 10 && doctor["findings"] == json!([]), "{doctor}");
    until("reconcilers ran", async || {
        let all = world.get("/v1/reconcilers").await.is(200).json();
        all["items"].as_array().unwrap().iter().any(|one| one["name"] == "provider-sync").then_some(())
    })
    .await;
    let logs = world.get("/v1/logs?level=warn&component=driver").await.is(200).json();
    assert_eq!(logs["more"], false);
    let path = world.sandbox().await;
    let client = bare(Method::GET, &path, &world.admin).header("viv-client", "dashboard").body("".into()).unwrap();
    world.whole(client).await.is(200);
    let diagnosis = world.get(&format!("{path}/diagnosis")).await.is(200).json();
    assert_eq!(diagnosis["reads"][0]["client"], "dashboard");
    assert_eq!(diagnosis["sandbox"]["observed"]["provider_state"], "running");
    assert!(diagnosis["locks"]["lifecycle"]["holder"].is_string(), "{diagnosis}");
    world.get(&format!("{path}/logs?source=shim&bytes=100")).await.is(200);
    // A store that was taken over is not ours to serve.
    let owner = viv_store::Owner {
        name: "other".to_owned(),
        boot_id: "b".to_owned(),
        pid: 2,
        start_ticks: 2,
        epoch: 0,
        since_ms: 1,
    };
    viv_store::Store::own(world.store.as_ref(), owner).await.unwrap();
    let ready = world.get("/ready").await.is(503).json();
    assert_eq!((&ready["ready"], &ready["checks"][0]["ok"]), (&json!(false), &json!(false)));
}

/// Waits until so many lines of a kind are there, which are written in a moment and not before the answer.
async fn told(world: &World, query: &str, count: usize) -> Vec<Value> {
    until(query, async || {
        let page = world.get(&format!("/v1/events?limit=1000&{query}")).await.is(200).json();
        let items = page["items"].as_array().unwrap().clone();
        (items.len() >= count).then_some(items)
    })
    .await
}

#[tokio::test]
async fn o7_what_is_done_inside_is_in_the_journal_with_who_and_from_where() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let id = path.rsplit('/').next().unwrap();
    let active_ms = async || world.get(&path).await.is(200).json()["last_activity_at_ms"].clone();
    let argv = Program::Count { to: 3 }.argv();
    let counted = world.start(&path, &argv, json!({"env": {"TOKEN": "s3cret-value"}})).await;
    world.get(&format!("{counted}/output?follow=true")).await.is(200);
    let sleep = Program::Sleep { seconds: 3_600 }.argv();
    let long = world.start(&path, &sleep, json!({"detach": true, "limit_ms": "none"})).await;
    // It continues, which it did anyway.
    world.post(&format!("{long}/signal"), json!({"signal": 18})).await.is(204);
    world.post(&format!("{long}/cancel"), json!({})).await.is(200);
    world.put_bytes(&format!("{path}/files?path=/workspace/a"), "application/octet-stream", "four").await.is(200);
    world.post(&format!("{path}/files/move"), json!({"from": "/workspace/a", "to": "/workspace/b"})).await.is(204);
    world.post(&format!("{path}/files/mkdir"), json!({"path": "/workspace/c"})).await.is(204);
    world.delete(&format!("{path}/files?path=/workspace/b")).await.is(204);
    // What is refused was not done.
    world.delete(&format!("{path}/files?path=/workspace/no/such/thing/at/all")).await;

    let lines = told(&world, &format!("kind=execution&sandbox={id}"), 6).await;
    let kinds: Vec<&str> = lines.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    let of = |kind: &str| lines.iter().filter(|line| line["kind"] == kind).collect::<Vec<_>>();
    assert_eq!(kinds.len(), 6, "{kinds:?}");
    let started = of("execution.started");
    assert_eq!((started.len(), &started[0]["data"]["argv"]), (2, &json!(argv)));
    assert!(started.iter().all(|line| line["by"].as_str().unwrap().starts_with("key:")), "{started:?}");
    assert!(started.iter().all(|line| line["sandbox"] == id && line["generation"] == 1));
    let ended = of("execution.ended");
    assert_eq!((&ended[0]["cause"]["code"], &ended[0]["data"]["code"]), (&json!("exited"), &json!(0)));
    assert!(counted.ends_with(ended[0]["data"]["execution"].as_str().unwrap()));
    assert_eq!(of("execution.signalled")[0]["data"]["signal"], 18);
    let cancelled = of("execution.cancel_asked");
    assert!(long.ends_with(cancelled[0]["data"]["execution"].as_str().unwrap()));
    assert!(cancelled[0]["data"]["took_ms"].is_u64(), "{cancelled:?}");

    let files = told(&world, &format!("kind=file&sandbox={id}"), 4).await;
    let kinds: Vec<&str> = files.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds[..4], ["file.written", "file.moved", "file.folder_made", "file.removed"]);
    assert_eq!((&files[0]["data"]["path"], &files[0]["data"]["bytes"]), (&json!("/workspace/a"), &json!(4)));
    assert_eq!(files[1]["data"]["to"], "/workspace/b");
    let all = format!("{lines:?}{files:?}");
    assert!(!all.contains("s3cret-value") && !all.contains("TOKEN"), "neither environment nor content (S6)");
    let (before, seen) = (active_ms().await, told(&world, "kind=file.written", 1).await);
    assert_eq!((seen.len(), active_ms().await), (1, before), "a line is no activity");
    assert!(world.get("/v1/events?kind=nothing.of_it").await.is(200).json()["items"].as_array().unwrap().is_empty());
    world.get("/v1/events?kind=No%20Kind").await.is(400);

    // Whose, why and since when are asked of the journal, and not sorted out by whoever asks (O7).
    let by = started[0]["by"].as_str().unwrap();
    let ours = told(&world, &format!("by={by}&kind=execution&sandbox={id}"), 2).await;
    assert!(!ours.is_empty() && ours.iter().all(|line| line["by"] == by), "{ours:?}");
    assert!(lines.iter().filter(|line| line["by"] == by).count() == ours.len());
    let exited = told(&world, &format!("cause=exited&sandbox={id}"), 1).await;
    assert!(exited.iter().all(|line| line["cause"]["code"] == "exited"), "{exited:?}");
    let moment = files[1]["at_ms"].as_u64().unwrap();
    let since = told(&world, &format!("kind=file&since_ms={moment}&sandbox={id}"), 3).await;
    assert!(since.iter().all(|line| line["at_ms"].as_u64().unwrap() >= moment), "{since:?}");
    assert!(told(&world, &format!("since_ms={}", u64::from(u32::MAX) << 20), 0).await.is_empty());
    for wrong in ["cause=Not%20a%20code", "by=", "by=%0a", "since_ms=-1", "since_ms=yesterday", "since=1h"] {
        let refused = world.get(&format!("/v1/events?{wrong}")).await.is(400).json()["error"].clone();
        assert_eq!(refused["code"], "invalid_request", "{wrong}: {refused}");
        assert!(refused["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{wrong}: {refused}");
    }

    let timeline = world.get(&format!("{path}/timeline?limit=1000")).await.is(200).json();
    let items = timeline["items"].as_array().unwrap();
    let wrote = items.iter().find(|entry| entry["kind"] == "file.written").expect("it is told there too");
    assert!(wrote["by"].as_str().unwrap().starts_with("key:") && wrote["message"] == "wrote /workspace/a (4 bytes)");

    let stats = world.get("/v1/stats?slo=true").await.is(200).json();
    let target = |name: &str| {
        let slo = stats["slo"].as_array().unwrap();
        slo.iter().find(|one| one["name"] == name).expect("it is counted").clone()
    };
    let timeouts = target("timeout_rate");
    assert_eq!((&timeouts["numerator"], &timeouts["denominator"]), (&json!(0), &json!(2)), "{stats}");
    assert_eq!((&timeouts["met"], &target("inactivity_rate")["met"]), (&json!(true), &json!(null)), "{stats}");
    assert_eq!(target("cancel_time")["denominator"], 1, "{stats}");
}

#[tokio::test]
async fn o7_what_somebody_did_from_an_address_and_until_when_is_asked_for() {
    let world = World::new().await;
    let store = world.engine.store();
    let line = |at_ms: u64, from: Option<&str>| NewLine {
        at_ms,
        project: None,
        sandbox: None,
        generation: None,
        kind: "test.did".to_owned(),
        from: None,
        to: None,
        cause: None,
        by: Actor { who: "key:key_1".to_owned(), from: from.map(str::to_owned) },
        data: json!({}),
    };
    let lines =
        vec![line(1, Some("192.0.2.7")), line(2, None), line(3, Some("192.0.2.70")), line(4, Some("192.0.2.7"))];
    store.append(world.engine.epoch(), lines).await.unwrap();
    let times = async |query: &str| {
        let page = world.get(&format!("/v1/events?kind=test&{query}")).await.is(200).json();
        let items = page["items"].as_array().unwrap().clone();
        items.iter().map(|line| line["at_ms"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(times("address=192.0.2.7").await, [1, 4]);
    assert_eq!(times("until_ms=3").await, [1, 2, 3]);
    assert_eq!(times("address=192.0.2.7&since_ms=2&until_ms=4").await, [4]);
    assert_eq!(times("address=192.0.2").await, [0; 0]);
}
