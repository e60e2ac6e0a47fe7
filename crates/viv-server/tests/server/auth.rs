//! Keys and what they allow (S3).

use axum::http::Method;
use serde_json::{Value, json};
use tracing_subscriber::layer::SubscriberExt;
use viv_server::{Bounds, Peer, Rate};

use crate::world::{World, bare, request, until};

#[tokio::test]
async fn s3_only_a_few_paths_are_open() {
    let world = World::new().await;
    for open in ["/health", "/ready", "/v1/version", "/v1/openapi.json"] {
        let request = axum::http::Request::get(open).body("".into()).unwrap();
        world.whole(request).await.is(200);
    }
    let document = world.get("/v1/openapi.json").await.json();
    let mut closed = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if operation["security"].as_array().is_none_or(Vec::is_empty) {
                continue;
            }
            let path = path.replace("{sandbox}", "x").replace("{execution}", "exe_1").replace("{lease}", "x");
            let path = path.replace("{key}", "key_1");
            let method: Method = method.to_uppercase().parse().unwrap();
            for secret in ["", "viv_", "viv_0000", "x"] {
                let refused = world.whole(request(method.clone(), &path, secret, Some(json!({})))).await.is(401);
                assert_eq!(refused.code(), "unauthenticated", "{method} {path}");
                assert_eq!(refused.headers["www-authenticate"], "Bearer");
            }
            closed += 1;
        }
    }
    assert!(closed > 30, "{closed}");
}

#[tokio::test]
async fn s3_what_each_scope_may_do() {
    let world = World::new().await;
    let (ours, look, theirs) =
        (world.key("ours", false).await, world.key("ours", true).await, world.key("theirs", false).await);
    let ask =
        |method: Method, path: &str, key: &str, body: Option<Value>| world.whole(request(method, path, key, body));
    let made = ask(Method::POST, "/v1/sandboxes", &ours, Some(json!({"name": "mine"}))).await.is(201).json();
    let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    assert_eq!(made["project"], "ours");

    // Looking: the project's own keys and the installation's; for others it is not there.
    for (key, by_id, by_name) in [(&ours, 200, 200), (&look, 200, 200), (&theirs, 404, 404), (&world.admin, 200, 404)] {
        ask(Method::GET, &path, key, None).await.is(by_id);
        ask(Method::GET, "/v1/sandboxes/mine", key, None).await.is(by_name);
        let listed = ask(Method::GET, "/v1/sandboxes", key, None).await.is(200).json();
        assert_eq!(listed["items"].as_array().unwrap().len(), usize::from(by_id == 200));
        let events = ask(Method::GET, "/v1/events", key, None).await.is(200).json();
        let seen = events["items"].as_array().unwrap().iter().any(|event| event["sandbox"] == made["id"]);
        assert_eq!(seen, by_id == 200);
        let stats = ask(Method::GET, "/v1/stats", key, None).await.is(200).json();
        assert_eq!(stats["active"], u64::from(by_id == 200));
    }
    // Changing.
    let stop = format!("{path}/stop");
    assert_eq!(ask(Method::POST, &stop, &look, Some(json!({}))).await.is(403).code(), "forbidden");
    assert_eq!(ask(Method::DELETE, &path, &look, None).await.is(403).code(), "forbidden");
    assert_eq!(ask(Method::POST, "/v1/sandboxes", &look, Some(json!({}))).await.is(403).code(), "forbidden");
    assert_eq!(ask(Method::POST, &stop, &theirs, Some(json!({}))).await.is(404).code(), "not_found");
    assert_eq!(ask(Method::DELETE, &path, &theirs, None).await.is(404).code(), "not_found");
    // What is the installation's.
    for (method, path) in [
        (Method::GET, "/v1/keys"),
        (Method::POST, "/v1/keys"),
        (Method::DELETE, "/v1/keys/key_1"),
        (Method::GET, "/v1/reconcilers"),
        (Method::GET, "/v1/logs"),
        (Method::GET, "/v1/spares"),
        (Method::POST, "/v1/cleanup"),
        (Method::POST, "/v1/reconcile"),
    ] {
        let body = match path {
            "/v1/keys" if method == Method::POST => Some(json!({"name": "x", "scope": "admin"})),
            // A dry run is as much the installation's.
            "/v1/cleanup" | "/v1/reconcile" => Some(json!({"dry_run": true})),
            _ => None,
        };
        assert_eq!(ask(method, path, &ours, body).await.is(403).code(), "forbidden", "{path}");
    }
    ask(Method::GET, "/v1/logs?sandbox=mine", &ours, None).await.is(200);
    // The sandbox's own files, and where it is on the host.
    for own in ["/.vivarium/identity.json", "/x/../.vivarium/identity.json"] {
        let files = format!("{path}/files?path={own}");
        assert_eq!(ask(Method::GET, &files, &ours, None).await.is(403).code(), "forbidden");
        assert_eq!(ask(Method::DELETE, &files, &ours, None).await.is(403).code(), "forbidden");
    }
    let into = json!({"from": "/workspace", "to": "/.vivarium/x"});
    let refused = ask(Method::POST, &format!("{path}/files/move"), &ours, Some(into)).await.is(403);
    assert_eq!(refused.code(), "forbidden");
    ask(Method::GET, &format!("{path}/files?path=/.vivarium/identity.json"), &world.admin, None).await.is(200);
    let diagnosis = ask(Method::GET, &format!("{path}/diagnosis"), &ours, None).await.is(200).json();
    assert_eq!(diagnosis["host"], Value::Null);
    // A key of another project may have the same name.
    ask(Method::POST, "/v1/sandboxes", &theirs, Some(json!({"name": "mine"}))).await.is(201);
    ask(Method::DELETE, &path, &ours, None).await.is(200);
}

#[tokio::test]
async fn s3_a_key_is_told_once_and_of_no_use_once_revoked() {
    let world = World::new().await;
    let body = json!({"name": "ci", "scope": "project", "project": "p", "lifetime_ms": 3_600_000});
    let made = world.post("/v1/keys", body).await.is(201).json();
    let secret = made["secret"].as_str().unwrap();
    assert!(secret.starts_with("viv_") && secret.len() >= 4 + 64, "256 bits");
    world.whole(request(Method::GET, "/v1/sandboxes", secret, None)).await.is(200);
    let listed = world.get("/v1/keys").await.is(200);
    let text = String::from_utf8_lossy(&listed.bytes).into_owned();
    assert!(!text.contains(secret) && text.contains("\"ci\""), "{text}");
    let keys = listed.json();
    assert!(keys["items"].as_array().unwrap().iter().any(|key| key["last_used_at_ms"].is_u64()));

    let id = made["key"]["id"].as_str().unwrap();
    let revoked = world.delete(&format!("/v1/keys/{id}")).await.is(200).json();
    assert!(revoked["revoked_at_ms"].is_u64());
    assert_eq!(world.delete(&format!("/v1/keys/{id}")).await.is(200).json(), revoked, "once is enough");
    world.whole(request(Method::GET, "/v1/sandboxes", secret, None)).await.is(401);
    assert_eq!(world.delete("/v1/keys/key_none").await.is(404).code(), "not_found");
    let own = keys["items"][0]["id"].as_str().unwrap();
    assert_eq!(world.delete(&format!("/v1/keys/{own}")).await.is(409).code(), "conflict");

    // The journal has who and what, and no secret (O7, S6).
    let events = world.get("/v1/events").await.is(200);
    let text = String::from_utf8_lossy(&events.bytes).into_owned();
    assert!(text.contains("key.created") && text.contains("key.revoked") && text.contains(id));
    assert!(!text.contains(secret) && !text.contains(&world.admin));
}

#[tokio::test]
async fn s5_wrong_keys_and_too_many_requests_are_held_back() {
    let wrong_key_rate = Rate { per_second: 0.001, burst: 3.0 };
    let bounds = Bounds { wrong_key_rate, key_rate: Rate { per_second: 0.001, burst: 5.0 }, ..Bounds::default() };
    let world = World::with(bounds, |_| {}).await;
    let ask = |key: &str, peer: &str| {
        let request = bare(Method::GET, "/v1/doctor", key).extension(Peer(peer.parse().unwrap()));
        world.whole(request.body("".into()).unwrap())
    };
    for _ in 0..3 {
        ask("viv_wrong", "192.0.2.1:1").await.is(401);
    }
    let refused = ask("viv_wrong", "192.0.2.1:2").await.is(429);
    assert_eq!(refused.code(), "too_many_requests");
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() > 0);
    ask("viv_wrong", "192.0.2.2:1").await.is(401);
    // Who has a good key is not shut out by a neighbour.
    for _ in 0..5 {
        ask(&world.admin, "192.0.2.1:3").await.is(200);
    }
    assert_eq!(ask(&world.admin, "192.0.2.1:3").await.is(429).code(), "too_many_requests");
    let other = world.state.make_key("o", viv_store::KeyScope::Admin, viv_core::lifecycle::Actor::part("t")).await;
    ask(&other.unwrap().secret, "192.0.2.1:3").await.is(200);
}

#[tokio::test]
async fn o7_the_journal_says_who_from_where() {
    let world = World::new().await;
    let create = bare(Method::POST, "/v1/sandboxes", &world.admin)
        .header("content-type", "application/json")
        .extension(Peer("192.0.2.7:4".parse().unwrap()));
    let made = world.whole(create.body("{}".into()).unwrap()).await.is(201).json();
    let events = world.get("/v1/events").await.is(200).json();
    let created = events["items"].as_array().unwrap().iter().find(|event| event["kind"] == "sandbox.created").unwrap();
    assert_eq!(created["sandbox"], made["id"]);
    assert!(created["by"].as_str().unwrap().starts_with("key:key_"));
    assert_eq!(created["address"], "192.0.2.7");

    // And so of everything else that somebody does, each time from where that was asked.
    let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    let stop = format!("{path}/stop");
    let argv = json!({ "argv": ["echo", "hello"] });
    let asked = [
        (Method::POST, format!("{path}/executions"), Some(argv), "192.0.2.8", "execution.started", json!(null)),
        (Method::POST, stop, Some(json!({})), "192.0.2.9", "sandbox.moved", json!("user_stop")),
        (Method::DELETE, path.clone(), None, "192.0.2.10", "sandbox.delete_asked", json!("user_stop")),
    ];
    for (method, path, body, from, kind, cause) in asked {
        let mut asked = request(method.clone(), &path, &world.admin, body);
        asked.extensions_mut().insert(Peer(format!("{from}:5").parse().unwrap()));
        let answer = world.whole(asked).await;
        assert!(answer.status.is_success(), "{method} {path}: {}", String::from_utf8_lossy(&answer.bytes));
        // What is done inside is written in a moment, and not before the answer.
        let line = until(kind, async || {
            let events = world.get("/v1/events?limit=1000").await.is(200).json();
            let mut lines = events["items"].as_array().unwrap().clone().into_iter();
            lines.find(|line| line["kind"] == kind && line["address"] == from)
        });
        let line = line.await;
        assert_eq!((&line["sandbox"], &line["cause"]["code"]), (&made["id"], &cause), "{line}");
        assert_eq!(line["by"], created["by"], "{line}");
    }
}

#[tokio::test]
async fn s3_o1_a_key_of_a_project_is_told_the_lines_of_its_own_sandboxes_alone() {
    let world = World::new().await;
    let (ours, theirs) = (world.key("ours", true).await, world.key("theirs", false).await);
    let make = async |project: &str| {
        let key = world.key(project, false).await;
        let made = world.whole(request(Method::POST, "/v1/sandboxes", &key, Some(json!({})))).await.is(201).json();
        made["id"].as_str().unwrap().to_owned()
    };
    let (mine, beside, other) = (make("ours").await, make("ours").await, make("theirs").await);
    tracing::subscriber::with_default(tracing_subscriber::registry().with(world.logs.clone()), || {
        tracing::warn!(component = "driver", sandbox = %mine, "of mine");
        tracing::warn!(component = "driver", sandbox = %beside, "of the one beside it");
        tracing::warn!(component = "driver", sandbox = %other, "of theirs");
        tracing::warn!(component = "driver", "of nobody's");
        tracing::warn!(component = "watch", sandbox = %mine, "more of mine");
    });
    let ask = |key: &str, query: &str| world.whole(request(Method::GET, &format!("/v1/logs?{query}"), key, None));
    let messages = |answer: crate::world::Answered| -> Vec<String> {
        let page = answer.is(200).json();
        let items = page["items"].as_array().unwrap();
        items.iter().map(|line| line["message"].as_str().unwrap().to_owned()).collect()
    };
    for after in ["", "&after=0"] {
        assert_eq!(messages(ask(&ours, &format!("sandbox={mine}{after}")).await), ["of mine", "more of mine"]);
        assert_eq!(messages(ask(&ours, &format!("sandbox={beside}{after}")).await), ["of the one beside it"]);
        assert_eq!(messages(ask(&theirs, &format!("sandbox={other}{after}")).await), ["of theirs"]);
    }
    assert_eq!(messages(ask(&ours, &format!("sandbox={mine}&component=watch")).await), ["more of mine"]);
    // Another project's sandbox is none, and all of it, or that of a component, is the installation's.
    assert_eq!(ask(&ours, &format!("sandbox={other}")).await.is(404).code(), "not_found");
    assert_eq!(ask(&theirs, &format!("sandbox={mine}&component=driver")).await.is(404).code(), "not_found");
    for query in ["limit=10", "component=driver", "level=warn&after=0"] {
        assert_eq!(ask(&ours, query).await.is(403).code(), "forbidden", "{query}");
    }
    assert_eq!(messages(ask(&world.admin, "level=warn").await).len(), 5);
}
