//! Webhooks over HTTP: who may, what is told, and what is not (O6).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::Method;
use serde_json::{Value, json};
use viv_core::subscription::Patience;
use viv_engine::{Delivery, Undelivered, Webhooks};
use viv_server::{Bounds, WebhookConfig, events};

use crate::world::{PRIVATE, World, request, until};

type Sent = Arc<Mutex<Vec<Delivery>>>;

/// A world in which everything that is sent is taken, or nothing is.
async fn world(taken: bool) -> (World, Sent) {
    let sent = Sent::default();
    let all = sent.clone();
    let deliver = Webhooks(Arc::new(move |delivery: Delivery| {
        all.lock().unwrap().push(delivery);
        let why = "did not answer in time".to_owned();
        Box::pin(async move { if taken { Ok(()) } else { Err(Undelivered { why, is_down: false }) } })
    }));
    let patience = Patience { pause_ms_first: 1, attempts_max: 2, ..Patience::default() };
    let config = events(&WebhookConfig::default(), &[PRIVATE.to_owned()], patience, Duration::from_secs(1));
    let world = World::with(Bounds::default(), |engine| {
        engine.subscriptions = Some(viv_engine::SubscriptionConfig { send: deliver, ..config });
    });
    (world.await, sent)
}

fn bodies(sent: &Sent) -> Vec<Value> {
    sent.lock().unwrap().iter().map(|delivery| serde_json::from_slice(&delivery.body).unwrap()).collect()
}

#[tokio::test]
async fn o6_a_webhook_is_of_a_project_and_its_secret_is_told_once() {
    let (world, sent) = world(true).await;
    let (key, reader, other) = (world.key("a", false).await, world.key("a", true).await, world.key("b", false).await);
    let ask = async |method, path: &str, key: &str, body| world.whole(request(method, path, key, body)).await;
    let new = json!({"url": "https://example.com/x?token=hidden", "kinds": ["sandbox"], "note": "for tests"});
    let made = ask(Method::POST, "/v1/webhooks", &key, Some(new.clone())).await.is(201).json();
    let path = format!("/v1/webhooks/{}", made["webhook"]["id"].as_str().unwrap());
    assert!(made["secret"].as_str().unwrap().starts_with("whsec_"), "{made}");
    assert_eq!((&made["webhook"]["project"], &made["webhook"]["note"]), (&json!("a"), &json!("for tests")));
    assert_eq!(made["webhook"]["destination"], "https://example.com:443");
    let shown = ask(Method::GET, &path, &reader, None).await.is(200).json();
    assert_eq!(shown["kinds"], json!(["sandbox"]));
    assert!(!shown.to_string().contains("hidden") && shown.get("secret").is_none(), "S6: {shown}");
    ask(Method::GET, &path, &other, None).await.is(404);
    ask(Method::DELETE, &path, &other, None).await.is(404);
    ask(Method::POST, "/v1/webhooks", &reader, Some(new.clone())).await.is(403);
    for (more, status) in [
        (json!({"all_projects": true}), 403),
        (json!({"project": "b"}), 403),
        (json!({"url": "ftp://example.com"}), 400),
        (json!({"url": "https://"}), 400),
        (json!({"url": "http://?x"}), 400),
        (json!({"kinds": ["Sandbox"]}), 400),
        (json!({"secret": "mine"}), 400),
    ] {
        let mut body = new.clone();
        more.as_object().unwrap().iter().for_each(|(name, value)| body[name.as_str()] = value.clone());
        ask(Method::POST, "/v1/webhooks", &key, Some(body.clone())).await.is(status);
    }

    // What happens in its project is sent, and nothing else.
    for key in [&other, &key] {
        ask(Method::POST, "/v1/sandboxes", key, Some(json!({}))).await.is(201);
    }
    let created = |body: &Value| body["event"]["kind"] == "sandbox.created";
    until("it is sent", async || bodies(&sent).iter().any(created).then_some(())).await;
    assert!(bodies(&sent).iter().all(|body| body["event"]["project"] == "a"), "{:#?}", bodies(&sent));
    let rotated = ask(Method::POST, &format!("{path}/rotate"), &key, None).await.is(200).json();
    assert_ne!(rotated["secret"], made["secret"]);
    let tried = ask(Method::POST, &format!("{path}/test"), &key, None).await.is(200).json();
    assert_eq!(tried, json!({"taken": true, "why": null}));
    let both = sent.lock().unwrap().last().map(|delivery| (delivery.secret.clone(), delivery.also.clone())).unwrap();
    assert_eq!(both.0.reveal(), rotated["secret"].as_str().unwrap());
    assert_eq!(
        both.1.iter().map(viv_core::hook::Secret::reveal).collect::<Vec<_>>(),
        [made["secret"].as_str().unwrap()]
    );
    ask(Method::DELETE, &path, &key, None).await.is(204);
    ask(Method::GET, &path, &key, None).await.is(404);
    let journal = world.get("/v1/events?limit=1000").await.is(200).json();
    let kinds: Vec<&str> =
        journal["items"].as_array().unwrap().iter().map(|line| line["kind"].as_str().unwrap()).collect();
    for kind in ["webhook.created", "webhook.rotated", "webhook.removed"] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    let text = journal.to_string();
    assert!(!text.contains("hidden") && !text.contains("whsec_"), "S6");
    assert!(bodies(&sent).iter().all(|body| !body["event"]["kind"].as_str().unwrap().starts_with("webhook.")
        || body["event"]["kind"] == "webhook.test"));
}

#[tokio::test]
async fn o6_dead_letters_are_listed_in_pages_and_sent_again_over_http() {
    let (world, sent) = world(false).await;
    let new = json!({"url": "https://example.com/", "kinds": ["sandbox.created"]});
    let made = world.post("/v1/webhooks", new).await.is(201).json();
    let path = format!("/v1/webhooks/{}", made["webhook"]["id"].as_str().unwrap());
    for _ in 0..3 {
        world.sandbox().await;
    }
    until("they are given up", async || (world.get(&path).await.json()["dead"] == 3).then_some(())).await;
    let first = world.get(&format!("{path}/deliveries?dead=true&limit=2")).await.is(200).json();
    let second = format!("{path}/deliveries?dead=true&cursor={}", first["next"].as_str().unwrap());
    let second = world.get(&second).await.is(200).json();
    let items = |page: &Value| page["items"].as_array().unwrap().clone();
    assert_eq!((items(&first).len(), items(&second).len(), &second["next"]), (2, 1, &Value::Null));
    let one = &items(&first)[0];
    assert_eq!((&one["attempts"], &one["last_error"]), (&json!(2), &json!("did not answer in time")));
    let count = sent.lock().unwrap().len();
    let again = world.post(&format!("{path}/replay"), json!({"seq": one["seq"]})).await.is(202).json();
    assert_eq!(again["revived"], 1);
    until("it is sent", async || (sent.lock().unwrap().len() > count).then_some(())).await;
    world.post(&format!("{path}/replay"), json!({"seq": 1, "after": 1})).await.is(400);
    // One that is off waits, and misses nothing.
    world.put(&path, json!({"enabled": false})).await.is(200);
    let before = sent.lock().unwrap().len();
    world.sandbox().await;
    world.put(&path, json!({"enabled": true, "url": "https://example.org/"})).await.is(200);
    until("it goes on where it was", async || {
        let sent = sent.lock().unwrap();
        sent[before..].iter().any(|delivery| delivery.url == "https://example.org/").then_some(())
    })
    .await;
}
