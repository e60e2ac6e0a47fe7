//! Making, finding and ending sandboxes.

use std::collections::BTreeSet;

use axum::http::Method;
use serde_json::{Value, json};
use viv_core::SandboxId;
use viv_engine::Gate;
use viv_store::{LeaseKind, Store};

use crate::world::{World, bare, request, until};

#[tokio::test]
async fn l1_a_fresh_one_is_201_a_repeated_one_200_and_after_a_delete_its_tombstone() {
    let world = World::new().await;
    let create = |body: &str| {
        let request = bare(Method::POST, "/v1/sandboxes", &world.admin)
            .header("content-type", "application/json")
            .header("idempotency-key", "once");
        world.whole(request.body(body.to_owned().into()).unwrap())
    };
    let first = create(r#"{"name": "a", "labels": {"team": "x"}}"#).await.is(201).json();
    assert_eq!((&first["status"], &first["generation"]), (&json!("ready"), &json!(1)));
    assert_eq!(first["evidence"]["exec"]["outcome"], "ok");
    let again = create(r#"{"labels":{"team":"x"},"name":"a"}"#).await.is(200).json();
    assert_eq!(again["id"], first["id"], "order and space do not matter");
    let other = create(r#"{"name": "b"}"#).await.is(409);
    assert_eq!(other.code(), "idempotency_mismatch");

    let path = format!("/v1/sandboxes/{}", first["id"].as_str().unwrap());
    let deleted = world.delete(&path).await.is(200).json();
    assert_eq!((&deleted["status"], &deleted["deleted"]), (&json!("stopped"), &json!(true)));
    let tombstone = create(r#"{"name": "a", "labels": {"team": "x"}}"#).await.is(200).json();
    assert_eq!((&tombstone["id"], &tombstone["deleted"]), (&first["id"], &json!(true)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l1_two_hundred_creates_with_one_key_make_one_sandbox() {
    let world = World::new().await;
    let creates = (0..200).map(|_| {
        let request = bare(Method::POST, "/v1/sandboxes", &world.admin)
            .header("content-type", "application/json")
            .header("idempotency-key", "storm");
        world.whole(request.body("{}".into()).unwrap())
    });
    let answers = futures_util::future::join_all(creates).await;
    let fresh = answers.iter().filter(|answer| answer.status == 201).count();
    assert_eq!(fresh, 1);
    let ids: BTreeSet<String> = answers
        .into_iter()
        .map(|answer| {
            assert!(matches!(answer.status.as_u16(), 200 | 201), "{answer:?}");
            let shown = answer.json();
            assert_eq!(shown["status"], "ready", "those that came later waited for it");
            shown["id"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(ids.len(), 1);
    let listed = world.get("/v1/sandboxes?all=true").await.is(200).json();
    assert_eq!(listed["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn l1_who_does_not_wait_is_answered_at_once_and_who_goes_away_loses_nothing() {
    let world = World::new().await;
    let made = world.post("/v1/sandboxes", json!({"name": "patient", "wait_ms": 0})).await.is(202).json();
    assert_eq!(made["status"], "provisioning");
    until("ready", async || {
        let shown = world.get("/v1/sandboxes/patient").await.is(200).json();
        (shown["status"] == "ready").then_some(())
    })
    .await;

    // The client of this one is gone before it is answered.
    let leaving = world.send(request(Method::POST, "/v1/sandboxes", &world.admin, Some(json!({"name": "left"}))));
    drop(futures_util::FutureExt::now_or_never(leaving));
    until("made all the same", async || {
        let shown = world.get("/v1/sandboxes/left").await;
        (shown.status == 200 && shown.json()["status"] == "ready").then_some(())
    })
    .await;
}

#[tokio::test]
async fn l3_l8_stop_and_ensure_answer_when_it_is_so() {
    let world = World::new().await;
    world.post("/v1/sandboxes", json!({"name": "kept"})).await.is(201);
    let stopped = world.post("/v1/sandboxes/kept/stop", json!({})).await.is(200).json();
    assert_eq!(stopped["status"], "hibernated");
    let exec = world.post("/v1/sandboxes/kept/executions", json!({"argv": ["/bin/pwd"]})).await.is(409);
    assert_eq!(exec.code(), "not_running");
    let ready = world.post("/v1/sandboxes/kept/ensure", json!({})).await.is(200).json();
    assert_eq!((&ready["status"], &ready["generation"]), (&json!("ready"), &json!(2)));
    // What wakes says so (L4).
    world.post("/v1/sandboxes/kept/stop", json!({"wait_ms": 60_000})).await.is(200);
    let body = json!({"argv": ["/bin/pwd"], "wake": true});
    let woken = world.post("/v1/sandboxes/kept/executions", body).await.is(201).json();
    assert_eq!(woken["generation"], 3);

    // Without a body, defaults; not waiting is 202.
    let path = world.sandbox().await;
    let stopping = world.post(&format!("{path}/stop"), json!({"wait_ms": 0})).await.is(202).json();
    assert_eq!(stopping["desired"], "gone");
    let request = bare(Method::POST, &format!("{path}/stop"), &world.admin).body("".into()).unwrap();
    let stopped = world.whole(request).await.is(200).json();
    assert_eq!((&stopped["status"], &stopped["deleted"]), (&json!("stopped"), &json!(false)));
    assert_eq!(world.post(&format!("{path}/ensure"), json!({})).await.is(410).code(), "gone");
}

#[tokio::test]
async fn l9_what_was_deleted_is_shown_and_does_nothing_any_more() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let first = world.delete(&path).await.is(200).json();
    let again = world.delete(&path).await.is(200).json();
    assert_eq!(first, again, "the same answer");
    let shown = world.get(&path).await.is(200).json();
    assert_eq!((&shown["status"], &shown["deleted"]), (&json!("stopped"), &json!(true)));
    let tries = [
        world.post(&format!("{path}/ensure"), json!({})).await,
        world.post(&format!("{path}/stop"), json!({})).await,
        world.post(&format!("{path}/extend"), json!({"at_least_ms": 1000})).await,
        world.post(&format!("{path}/executions"), json!({"argv": ["/bin/pwd"]})).await,
        world.post(&format!("{path}/activity"), json!({})).await,
        world.put(&format!("{path}/keep-awake/x"), json!({"ttl_ms": 1000})).await,
        world.put(&format!("{path}/limits"), json!({})).await,
        world.get(&format!("{path}/files?path=/a")).await,
        world.get(&format!("{path}/executions")).await,
    ];
    for answer in tries {
        assert_eq!(answer.is(410).code(), "gone");
    }
    // What is known of it is still told.
    world.get(&format!("{path}/timeline")).await.is(200);
    world.get(&format!("{path}/diagnosis")).await.is(200);
    assert_eq!(world.get("/v1/sandboxes/sbx_nothing").await.is(404).code(), "not_found");
}

#[tokio::test]
async fn t5_an_old_generation_is_refused_with_the_current_one() {
    let world = World::with(viv_server::Bounds::default(), |config| {
        assert!(config.gates.is_on_everywhere(Gate::GenerationCheck));
    })
    .await;
    let path = world.sandbox().await;
    let stale = |suffix: String, method: Method| {
        let body = (method == Method::POST).then(|| json!({}));
        world.whole(request(method, &format!("{path}{suffix}"), &world.admin, body))
    };
    for (suffix, method) in [
        ("?generation=2", Method::GET),
        ("/diagnosis?generation=2", Method::GET),
        ("/resources?generation=2", Method::GET),
        ("/executions?generation=2", Method::GET),
        ("/files/list?path=/&generation=2", Method::GET),
        ("/ensure?generation=2", Method::POST),
        ("/stop?generation=2", Method::POST),
        ("/activity?generation=2", Method::POST),
        ("?generation=2", Method::DELETE),
    ] {
        let refused = stale(suffix.to_owned(), method).await.is(410);
        assert_eq!(refused.code(), "stale_handle");
        assert_eq!(refused.json()["error"]["details"]["current_generation"], 1);
    }
    world.get(&format!("{path}?generation=1")).await.is(200);
    let header = |generation: &str, suffix: &str| {
        let request = bare(Method::GET, &format!("{path}{suffix}"), &world.admin).header("viv-generation", generation);
        world.whole(request.body("".into()).unwrap())
    };
    header("1", "").await.is(200);
    assert_eq!(header("7", "").await.is(410).code(), "stale_handle");
    assert_eq!(header("1", "?generation=2").await.is(410).code(), "stale_handle");
    assert_eq!(header("x", "").await.is(400).code(), "invalid_request");
}

#[tokio::test]
async fn lists_are_pages_and_find_by_label_status_and_name() {
    let world = World::new().await;
    for at in 0..5 {
        let labels = json!({"at": at.to_string(), "odd": (at % 2 == 1).to_string()});
        world.post("/v1/sandboxes", json!({"name": format!("n{at}"), "labels": labels})).await.is(201);
    }
    let names = |answer: &Value| -> Vec<String> {
        answer["items"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    let mut all = Vec::new();
    let mut path = "/v1/sandboxes?limit=2".to_owned();
    loop {
        let page = world.get(&path).await.is(200).json();
        all.extend(names(&page));
        match page["next"].as_str() {
            Some(next) => path = format!("/v1/sandboxes?limit=2&cursor={next}"),
            None => break,
        }
    }
    all.sort();
    assert_eq!(all, ["n0", "n1", "n2", "n3", "n4"]);
    let odd = world.get("/v1/sandboxes?label=odd%3Dtrue&label=at%3D3").await.is(200).json();
    assert_eq!(names(&odd), ["n3"]);
    world.delete("/v1/sandboxes/n1").await.is(200);
    let stopped = world.get("/v1/sandboxes?status=stopped").await.is(200).json();
    assert_eq!(names(&stopped), ["n1"]);
    assert_eq!(names(&world.get("/v1/sandboxes?name=n2").await.is(200).json()), ["n2"]);
    assert_eq!(world.get("/v1/sandboxes").await.is(200).json()["items"].as_array().unwrap().len(), 4);
    assert_eq!(world.get("/v1/sandboxes?all=true").await.is(200).json()["items"].as_array().unwrap().len(), 5);
    assert_eq!(world.get("/v1/sandboxes?cursor=nonsense").await.is(400).code(), "invalid_request");
    let taken = world.post("/v1/sandboxes", json!({"name": "n2"})).await.is(409);
    assert_eq!(taken.code(), "name_taken");
}

#[tokio::test]
async fn a_deadline_moves_limits_change_and_leases_hold() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let moved = world.post(&format!("{path}/extend"), json!({"exactly_ms": 7_200_000})).await.is(200).json();
    assert!(moved["remaining_ms"].as_u64().unwrap() > 7_000_000, "{moved}");
    let limits = world.put(&format!("{path}/limits"), json!({"memory_bytes": 1 << 30})).await.is(200).json();
    assert_eq!(limits["memory_bytes"], 1 << 30);
    let lease = world.put(&format!("{path}/keep-awake/model"), json!({"ttl_ms": 60_000, "reason": "thinks"})).await;
    assert_eq!(lease.is(200).json()["reason"], "thinks");
    let shown = world.get(&path).await.is(200).json();
    assert_eq!(shown["keep_awake"][0]["lease"], "model");
    assert_eq!(shown["executions_running"], 0);
    world.delete(&format!("{path}/keep-awake/model")).await.is(204);
    world.delete(&format!("{path}/keep-awake/model")).await.is(204);
    assert_eq!(world.get(&path).await.is(200).json()["keep_awake"], json!([]));
    world.post(&format!("{path}/activity"), json!({"reason": "a user wrote"})).await.is(200);
    let used = world.get(&format!("{path}/resources")).await.is(200).json();
    assert_eq!((&used["generation"], &used["limits"]["memory_bytes"]), (&json!(1), &json!(1 << 30)));
    let verified = world.get(&format!("{path}?verify=true")).await.is(200).json();
    assert_eq!(verified["status"], "ready");
}

#[tokio::test]
async fn l18_a_quota_is_named_with_its_use() {
    let world = World::with(viv_server::Bounds::default(), |config| {
        config.quota = viv_store::Quota::of(1, 1);
    })
    .await;
    world.sandbox().await;
    let refused = world.post("/v1/sandboxes", json!({})).await.is(429);
    assert_eq!(refused.code(), "quota_exceeded");
    let details = &refused.json()["error"]["details"];
    assert_eq!((&details["limit"], &details["used"]), (&json!(1), &json!(1)), "{details}");
}

/// The same of each that there is, in all projects and in one: who is refused is told which, and `stats` has it too.
#[tokio::test]
async fn l18_each_quota_is_named_with_its_use_in_errors_and_figures_of_all_and_of_each_project() {
    let limits = |times: u64| json!({"cpu_millis": 100 * times, "memory_bytes": times << 25, "disk_bytes": times << 20, "processes": 50 * times});
    let sums = |name: &str, max: u64| {
        let of = |this: &str| (this == name).then_some(max);
        viv_store::SumsMax {
            cpu_millis: of("cpu_millis"),
            memory_bytes: of("memory_bytes"),
            disk_bytes: of("disk_bytes"),
            processes: of("processes"),
        }
    };
    for name in ["sandboxes", "cpu_millis", "memory_bytes", "disk_bytes", "processes"] {
        for per_project in [false, true] {
            // One of these fits, and a second one does not, by so much as its half.
            let (one, max) = match limits(2)[name].as_u64() {
                Some(one) => (one, one / 2 * 3),
                None => (1, 1),
            };
            let world = World::with(viv_server::Bounds::default(), |config| {
                let count = |here: bool| if here && name == "sandboxes" { max } else { 100 };
                config.quota = viv_store::Quota::of(count(!per_project), count(per_project));
                let which =
                    if per_project { &mut config.quota.project_sums_max } else { &mut config.quota.total_sums_max };
                *which = sums(name, max);
            })
            .await;
            let key = world.key("theirs", false).await;
            let ask = async |key: &str| {
                world.whole(request(Method::POST, "/v1/sandboxes", key, Some(json!({"limits": limits(2)})))).await
            };
            ask(&key).await.is(201);
            let refused = ask(&key).await.is(429);
            assert_eq!(refused.code(), "quota_exceeded");
            let error = refused.json()["error"].clone();
            let quota = if per_project { format!("{name}_per_project") } else { name.to_owned() };
            let told = json!([quota, max, one]);
            let details = &error["details"];
            assert_eq!(json!([details["quota"], details["limit"], details["used"]]), told, "{error}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(&quota) && message.contains(&format!("{one} of {max}")), "{error}");

            // Live, to who sees all, for each project, and to whose project it is.
            let stats =
                async |key: &str| world.whole(request(Method::GET, "/v1/stats", key, None)).await.is(200).json();
            let of = |quotas: &Value| {
                let found = quotas.as_array().unwrap().iter().find(|quota| quota["name"] == name);
                found.map_or_else(|| panic!("{name}: {quotas}"), |quota| json!([quota["used"], quota["max"]]))
            };
            let all = stats(&world.admin).await;
            let elsewhere = if name == "sandboxes" { json!(100) } else { json!(null) };
            let (in_all, in_one) = if per_project { (elsewhere, json!(max)) } else { (json!(max), elsewhere) };
            assert_eq!(of(&all["quotas"]), json!([one, in_all]), "{all}");
            assert_eq!(
                (&all["projects"][0]["project"], of(&all["projects"][0]["quotas"])),
                (&json!("theirs"), json!([one, in_one]))
            );
            assert_eq!(of(&stats(&key).await["quotas"]), json!([one, in_one]));
            // Another project has room of its own, and of all no more.
            let other = world.key("others", false).await;
            ask(&other).await.is(if per_project { 201 } else { 429 });
        }
    }
}

#[tokio::test]
async fn l15_who_would_cross_somebody_elses_work_is_told_whose() {
    let world = World::new().await;
    let made = world.post("/v1/sandboxes", json!({"name": "a"})).await.is(201).json();
    let id: SandboxId = made["id"].as_str().unwrap().parse().unwrap();
    world.post("/v1/sandboxes/a/stop", json!({})).await.is(200);
    let (epoch, now_ms) = (world.engine.epoch(), world.engine.now_ms());
    for lease in world.store.leases(&id).await.unwrap() {
        world.store.release(epoch, &id, lease.kind, lease.token).await.unwrap();
    }
    let kind = LeaseKind::Lifecycle;
    let theirs = world.store.lease(epoch, &id, kind, "replica-b", now_ms, 3_600_000).await.unwrap();
    for (method, verb) in [
        (Method::POST, "/ensure"),
        (Method::POST, "/stop"),
        (Method::POST, "/hibernate"),
        (Method::POST, "/reset"),
        (Method::DELETE, ""),
    ] {
        let body = (method == Method::POST).then(|| json!({}));
        let refused = world.whole(request(method, &format!("/v1/sandboxes/a{verb}"), &world.admin, body)).await.is(409);
        assert_eq!(refused.code(), "lifecycle_locked");
        assert!(refused.headers.contains_key("retry-after"));
        let details = &refused.json()["error"]["details"];
        assert_eq!(details["holder"], "replica-b");
        assert_eq!(details["since_at_ms"], theirs.since_ms);
        assert_eq!(details["expires_at_ms"], theirs.expires_at_ms);
    }
    assert_eq!(world.get("/v1/sandboxes/a").await.is(200).json()["status"], "hibernated");
    let shown = world.get("/v1/sandboxes/a/diagnosis").await.is(200).json();
    assert_eq!(shown["locks"]["lifecycle"]["holder"], "replica-b");
    world.store.release(epoch, &id, kind, theirs.token).await.unwrap();
    world.post("/v1/sandboxes/a/ensure", json!({})).await.is(200);
}
