//! Snapshots over HTTP: who sees them, what begins with them, and what is refused.

use axum::http::Method;
use serde_json::{Value, json};

use crate::world::{Answered, World, bare, request, until};

async fn key(world: &World, scope: &str, project: &str) -> String {
    let body = json!({"name": format!("{scope}-{project}"), "scope": scope, "project": project});
    let made = world.post("/v1/keys", body).await.is(201).json();
    made["secret"].as_str().unwrap().to_owned()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

#[tokio::test]
async fn s3_incident_9_a_key_sees_and_uses_only_the_snapshots_of_its_project() {
    let world = World::new().await;
    let (ours, theirs) = (key(&world, "project", "ours").await, key(&world, "project", "theirs").await);
    let look = key(&world, "read_only", "ours").await;
    let ask =
        |method: Method, path: &str, key: &str, body: Option<Value>| world.whole(request(method, path, key, body));
    ask(Method::POST, "/v1/sandboxes", &ours, Some(json!({"name": "mine"}))).await.is(201);
    ask(Method::POST, "/v1/sandboxes", &theirs, Some(json!({"name": "other"}))).await.is(201);
    let of_mine = "/v1/sandboxes/mine/snapshots";
    let made = ask(Method::POST, of_mine, &ours, Some(json!({"name": "first", "labels": {"a": "b"}}))).await;
    let made = made.is(201).json();
    assert_eq!((&made["kind"], &made["state"]), (&json!("manual"), &json!("ready")));
    assert_eq!((&made["name"], &made["labels"]["a"]), (&json!("first"), &json!("b")));
    let id = text(&made["id"]);
    let path = format!("/v1/snapshots/{id}");
    for (key, status) in [(&ours, 200), (&look, 200), (&world.admin, 200), (&theirs, 404)] {
        ask(Method::GET, &path, key, None).await.is(status);
    }
    let listed = |key: String| {
        let answer = world.whole(request(Method::GET, "/v1/snapshots", &key, None));
        async move { answer.await.is(200).json()["items"].as_array().unwrap().len() }
    };
    assert_eq!((listed(ours.clone()).await, listed(theirs.clone()).await), (1, 0));
    // Neither looked at, begun with, gone back to nor removed.
    let create = json!({"snapshot": id});
    let back = json!({"snapshot": id});
    ask(Method::POST, "/v1/sandboxes", &theirs, Some(create.clone())).await.is(404);
    ask(Method::POST, "/v1/sandboxes/other/rollback", &theirs, Some(back.clone())).await.is(404);
    ask(Method::POST, &format!("{path}/fork"), &theirs, None).await.is(404);
    ask(Method::GET, &format!("{path}/export"), &theirs, None).await.is(404);
    ask(Method::DELETE, &path, &theirs, None).await.is(404);
    for (method, path) in [(Method::POST, of_mine), (Method::POST, "/v1/sandboxes/mine/reset"), (Method::DELETE, &path)]
    {
        assert_eq!(ask(method, path, &look, None).await.is(403).code(), "forbidden");
    }
    // What the simulated provider cannot do is told as such.
    assert_eq!(ask(Method::GET, &format!("{path}/export"), &ours, None).await.is(422).code(), "unsupported");
    // What is in use stays.
    let begun = ask(Method::POST, "/v1/sandboxes", &ours, Some(create)).await.is(201).json();
    let refused = ask(Method::DELETE, &path, &ours, None).await.is(409);
    assert_eq!(refused.code(), "snapshot_in_use");
    assert_eq!(refused.json()["error"]["details"]["used_by"], json!([begun["id"]]));
    ask(Method::DELETE, &format!("/v1/sandboxes/{}", text(&begun["id"])), &ours, None).await.is(200);
    ask(Method::DELETE, &path, &ours, None).await.is(204);
    ask(Method::GET, &path, &ours, None).await.is(404);
    ask(Method::POST, "/v1/sandboxes/mine/rollback", &ours, Some(back)).await.is(404);
}

#[tokio::test]
async fn l11_going_back_and_forking_are_answered_when_they_are_ready() {
    let world = World::new().await;
    let sandbox = world.post("/v1/sandboxes", json!({"name": "a"})).await.is(201).json();
    let made = world.post("/v1/sandboxes/a/snapshots", json!({})).await.is(201).json();
    let back = world.post("/v1/sandboxes/a/rollback", json!({"snapshot": made["id"]})).await.is(200).json();
    assert_eq!((&back["status"], &back["generation"]), (&json!("ready"), &json!(2)));
    assert_eq!(back["policy"], sandbox["policy"], "L16");
    // Whoever holds the old generation is told (T5).
    let stale = world.post("/v1/sandboxes/a/snapshots?generation=1", json!({})).await.is(410);
    assert_eq!(stale.code(), "stale_handle");
    let forked = world.post("/v1/sandboxes/a/fork", json!({"count": 3, "name": "f"})).await.is(201).json();
    let names: Vec<&str> = forked["sandboxes"].as_array().unwrap().iter().map(|one| text(&one["name"])).collect();
    assert_eq!(names, ["f-1", "f-2", "f-3"]);
    let taken = world.post("/v1/sandboxes/a/fork", json!({"count": 3, "name": "f"})).await.is(409);
    assert_eq!(taken.code(), "name_taken");
    assert_eq!(world.get("/v1/sandboxes").await.is(200).json()["items"].as_array().unwrap().len(), 4, "all or none");
    for bad in [json!({"count": 0}), json!({"count": 101}), json!({"copies": 2})] {
        assert_eq!(world.post("/v1/sandboxes/a/fork", bad).await.is(400).code(), "invalid_request");
    }
    let reset = world.post("/v1/sandboxes/a/reset", json!({})).await.is(200).json();
    assert_eq!((&reset["status"], &reset["generation"], &reset["name"]), (&json!("ready"), &json!(3), &json!("a")));
    world.delete("/v1/sandboxes/a").await.is(200);
    assert_eq!(world.post("/v1/sandboxes/a/snapshots", json!({})).await.is(410).code(), "gone");
    assert_eq!(world.post("/v1/sandboxes/a/reset", json!({})).await.is(410).code(), "gone");
}

#[tokio::test]
async fn t8_the_diagnosis_tells_what_was_saved_and_who_holds_the_locks() {
    let world = World::new().await;
    let made = world.post("/v1/sandboxes", json!({"name": "a"})).await.is(201).json();
    let mut sizes = Vec::new();
    for at in 0..12 {
        let path = format!("/v1/sandboxes/a/files?path=/workspace/f{at}");
        world.put_bytes(&path, "application/octet-stream", vec![b'x'; 100]).await.is(200);
        let kept = world.post("/v1/sandboxes/a/snapshots", json!({"name": format!("s{at}")})).await.is(201).json();
        sizes.push(kept["size_bytes"].as_u64().unwrap());
        // Those of one moment have no order.
        let now_ms = world.engine.now_ms();
        until("a later moment", async || (world.engine.now_ms() > now_ms).then_some(())).await;
    }
    let shown = world.get("/v1/sandboxes/a/diagnosis").await.is(200).json();
    assert_eq!(shown["auto_saved"], json!(null), "nothing was saved by itself");
    let names: Vec<&str> = shown["snapshots"].as_array().unwrap().iter().map(|one| text(&one["name"])).collect();
    assert_eq!(names, ["s11", "s10", "s9", "s8", "s7", "s6", "s5", "s4", "s3", "s2"], "the newest, newest first");
    assert_eq!(shown["snapshots_count"], 12);
    assert_eq!(shown["snapshots_bytes"], sizes.iter().sum::<u64>());
    let lock = &shown["locks"]["lifecycle"];
    assert_eq!((&lock["holder"], &shown["locks"]["start"]), (&json!("test"), &json!(null)));
    let (since, expires) = (lock["since_at_ms"].as_u64().unwrap(), lock["expires_at_ms"].as_u64().unwrap());
    assert!(since >= made["created_at_ms"].as_u64().unwrap() && expires > since, "{lock}");
    assert!(lock["token"].as_u64().is_some_and(|token| token > 0), "{lock}");

    world.post("/v1/sandboxes/a/stop", json!({})).await.is(200);
    let shown = world.get("/v1/sandboxes/a/diagnosis").await.is(200).json();
    let saved = &shown["auto_saved"];
    assert_eq!((&saved["generation"], &shown["snapshots_count"]), (&json!(1), &json!(12)));
    assert!(saved["size_bytes"].as_u64().is_some_and(|bytes| bytes >= *sizes.last().unwrap()), "{saved}");
    let of_row = world.get(&format!("/v1/snapshots/{}", text(&saved["id"]))).await.is(200).json();
    assert_eq!((&of_row["kind"], &of_row["integrity"]), (&json!("auto"), &saved["integrity"]));
}

async fn keyed(world: &World, path: &str, key: &str, body: Value) -> Answered {
    let request = bare(Method::POST, path, &world.admin).header("content-type", "application/json");
    world.whole(request.header("idempotency-key", key).body(body.to_string().into()).unwrap()).await
}

async fn count(world: &World, path: &str) -> usize {
    world.get(path).await.is(200).json()["items"].as_array().unwrap().len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l1_a_snapshot_that_is_asked_for_again_with_its_key_is_the_same() {
    let world = World::new().await;
    for name in ["a", "b"] {
        world.post("/v1/sandboxes", json!({"name": name})).await.is(201);
    }
    let path = "/v1/sandboxes/a/snapshots";
    let many = (0..20).map(|_| keyed(&world, path, "one", json!({"name": "s"})));
    let answers = futures_util::future::join_all(many).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    let made = answers[0].json();
    for answer in &answers {
        assert!(matches!(answer.status.as_u16(), 200 | 201), "{answer:?}");
        let shown = answer.json();
        assert_eq!((&shown["id"], &shown["state"]), (&made["id"], &json!("ready")), "those that came later waited");
    }
    assert_eq!(count(&world, path).await, 1);
    assert_eq!(keyed(&world, path, "one", json!({"name": "t"})).await.is(409).code(), "idempotency_mismatch");
    let of_b = keyed(&world, "/v1/sandboxes/b/snapshots", "one", json!({"name": "s"})).await.is(409);
    assert_eq!(of_b.code(), "idempotency_mismatch", "of another sandbox it is another request");
    keyed(&world, path, "two", json!({"name": "s"})).await.is(201);
    // Of what is saved already.
    world.post("/v1/sandboxes/a/stop", json!({})).await.is(200);
    let kept = keyed(&world, path, "three", json!({})).await.is(201).json();
    assert_eq!(keyed(&world, path, "three", json!({})).await.is(200).json()["id"], kept["id"]);
    assert_eq!(keyed(&world, path, "one", json!({"name": "s"})).await.is(200).json()["id"], made["id"]);
    // What was refused leaves its key free, and what was removed is not made again.
    keyed(&world, path, "four", json!({"name": "UPPER CASE"})).await.is(400);
    world.delete(&format!("/v1/snapshots/{}", text(&made["id"]))).await.is(204);
    assert_eq!(keyed(&world, path, "one", json!({"name": "s"})).await.is(404).code(), "not_found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l1_a_fork_that_is_asked_for_again_with_its_key_makes_no_others() {
    let world = World::new().await;
    world.post("/v1/sandboxes", json!({"name": "a"})).await.is(201);
    let body = || json!({"count": 2, "name": "f"});
    let many = (0..10).map(|_| keyed(&world, "/v1/sandboxes/a/fork", "one", body()));
    let answers = futures_util::future::join_all(many).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    let ids = |answer: &Value| -> Vec<String> {
        answer["sandboxes"].as_array().unwrap().iter().map(|one| text(&one["id"]).to_owned()).collect()
    };
    let made = ids(&answers[0].json());
    for answer in &answers {
        assert!(matches!(answer.status.as_u16(), 200 | 201), "{answer:?}");
        let shown = answer.json();
        assert_eq!(ids(&shown), made);
        assert!(shown["sandboxes"].as_array().unwrap().iter().all(|one| one["status"] == "ready"), "{shown}");
    }
    assert_eq!(count(&world, "/v1/sandboxes").await, 3);
    let other = keyed(&world, "/v1/sandboxes/a/fork", "one", json!({"count": 1})).await.is(409);
    assert_eq!(other.code(), "idempotency_mismatch");
    // From a snapshot; and after one was deleted, its tombstone is told.
    let snapshot = world.post("/v1/sandboxes/a/snapshots", json!({})).await.is(201).json();
    let path = format!("/v1/snapshots/{}/fork", text(&snapshot["id"]));
    let first = ids(&keyed(&world, &path, "one", json!({})).await.is(201).json());
    assert_eq!(ids(&keyed(&world, &path, "one", json!({})).await.is(200).json()), first);
    world.delete(&format!("/v1/sandboxes/{}", first[0])).await.is(200);
    let after = keyed(&world, &path, "one", json!({})).await.is(200).json();
    assert_eq!((ids(&after), &after["sandboxes"][0]["deleted"]), (first, &json!(true)));
    assert_eq!(count(&world, "/v1/sandboxes").await, 3);
}
