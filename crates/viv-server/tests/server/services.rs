//! Services and hooks through the API, on a provider in memory (L14).

use serde_json::{Value, json};

use crate::world::{World, until};

fn service(argv: &[&str], more: &[(&str, Value)]) -> Value {
    let mut service = json!({"name": "main", "argv": argv, "ready": {"runs_ms": 20}});
    for (name, value) in more {
        service[*name] = value.clone();
    }
    service
}

#[tokio::test]
async fn t2_a_service_is_part_of_the_evidence_and_comes_back_when_it_ends() {
    let world = World::new().await;
    let body = json!({"services": [service(&["/bin/sleep", "1000"], &[])]});
    let made = world.post("/v1/sandboxes", body).await.is(201).json();
    assert_eq!(made["evidence"]["services"][0]["outcome"], "ok", "{made}");
    let first = made["services"][0]["execution"].as_str().expect("it was started").to_owned();
    let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    world.post(&format!("{path}/executions/{first}/cancel"), json!({})).await.is(200);
    let again = until("another execution is ready", async || {
        let now = world.get(&path).await.is(200).json();
        (now["status"] == "ready" && now["services"][0]["execution"] != first.as_str()).then_some(now)
    })
    .await;
    assert_eq!((&again["services"][0]["after"], &again["services"][0]["restarts"]), (&json!(first), &json!(1)));
    assert_eq!(again["generation"], made["generation"]);
    let shown = world.get(&format!("{path}/diagnosis")).await.is(200).json();
    assert_eq!(shown["sandbox"]["evidence"]["services"][0]["service"], "main", "T8: {shown}");
}

#[tokio::test]
async fn incident_1_what_ends_again_and_again_is_a_failure_that_names_it() {
    let world = World::new().await;
    let restart = json!({"policy": "always", "times_max": 2, "backoff_ms": 1});
    let body = json!({"name": "box", "services": [service(&["/bin/echo", "x"], &[("restart", restart)])]});
    world.post("/v1/sandboxes", body).await;
    let failed = until("it failed", async || {
        let now = world.get("/v1/sandboxes/box").await.is(200).json();
        (now["status"] == "failed").then_some(now)
    })
    .await;
    assert_eq!(failed["cause"]["code"], "service_failed", "{failed}");
    let said = failed["cause"]["message"].as_str().unwrap();
    assert!(said.starts_with("service main: ") && said.ends_with(", after 2 restarts"), "{said}");
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let world = World::new().await;
    let secret = "0123456789abcdef";
    let webhook = |url: &str| json!({"run": {"webhook": {"url": url, "secret": secret}}});
    let bad = [
        json!({"services": [service(&[], &[])]}),
        json!({"services": [service(&["x"], &[]), service(&["y"], &[])]}),
        json!({"services": [service(&["x"], &[("ready", json!({"port": 0}))])]}),
        json!({"services": [service(&["x"], &[("ready", json!({}))])]}),
        json!({"services": [service(&["x"], &[("nudge", json!({"signal": 65}))])]}),
        json!({"services": [service(&["x"], &[("misspelt", json!(1))])]}),
        json!({"hooks": {"before_stop": {"run": {"command": ["x"]}, "deadline_ms": 3_001}}}),
        json!({"hooks": {"after_start": webhook("file:///etc/passwd")}}),
        json!({"hooks": {"after_start": webhook("https://me:word@example.com/")}}),
    ];
    for body in bad {
        let refused = world.post("/v1/sandboxes", body.clone()).await.is(400);
        assert_eq!(refused.code(), "invalid_request", "{body}");
        assert!(!String::from_utf8_lossy(&refused.bytes).contains(secret), "S6");
    }
    assert_eq!(world.get("/v1/sandboxes?all=true").await.is(200).json()["items"], json!([]));
}
