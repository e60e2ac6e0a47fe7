//! Figures for Prometheus.

use std::collections::BTreeSet;

use axum::http::Method;
use viv_engine::metrics::family;

use crate::world::{World, bare, request, until};

#[tokio::test]
async fn o4_every_key_reads_the_figures_and_nobody_else() {
    let world = World::new().await;
    let path = world.sandbox().await;
    world.delete(&path).await.is(200);
    let only_look = world.key("somebody", true).await;
    let ask = |key: &str| world.whole(request(Method::GET, "/metrics", key, None));
    let read = || async {
        let answer = ask(&only_look).await.is(200);
        assert_eq!(answer.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
        String::from_utf8(answer.bytes).unwrap()
    };
    let mut text = read().await;
    for line in [
        "viv_sandboxes_created_total 1",
        "viv_terminations_asked_total 1",
        "viv_terminations_succeeded_total 1",
        "viv_termination_seconds_count 1",
        "viv_provisions_total 1",
        "viv_provisions_failed_total 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.contains(r#"viv_transitions_total{from="stopping",to="stopped","#), "{text}");
    assert!(text.contains(r#"viv_http_requests_total{method="DELETE",route="/v1/sandboxes/{sandbox}",code="200"} 1"#));
    assert!(!text.contains("sbx_") && !text.contains("somebody"), "no figure names anybody");
    let told: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert_eq!(told, family::ALL.iter().map(|family| family.name).collect());
    // Each line of the journal counts once.
    text = read().await;
    assert!(text.contains("\nviv_sandboxes_created_total 1\n"), "{text}");
    assert_eq!(ask("viv_wrong").await.is(401).code(), "unauthenticated");
}

#[tokio::test]
async fn o4_who_follows_is_counted_while_he_does() {
    let world = World::new().await;
    let following = |wanted: &'static str| {
        let world = &world;
        async move { world.engine.gather().await.unwrap().text().contains(wanted).then_some(()) }
    };
    following("\nviv_event_followers 0\n").await.expect("nobody follows");
    let request = bare(Method::GET, "/v1/events", &world.admin);
    let body = world.send(request.header("accept", "text/event-stream").body("".into()).unwrap()).await.into_body();
    until("he is counted", || following("\nviv_event_followers 1\n")).await;
    drop(body);
    until("and is not", || following("\nviv_event_followers 0\n")).await;
}
