//! Places of the host are for those who run it (S6).

use axum::http::Method;
use http_body_util::BodyExt;
use viv_store::{Change, NewLine, Store};

use crate::world::{PATIENCE, PRIVATE, World, bare, request};

/// A failure that names a place of the host, in the record and in the journal, as a provider's would.
async fn failed_somewhere(world: &World) -> String {
    let path = world.sandbox().await;
    let id = path.rsplit('/').next().unwrap().parse().unwrap();
    let mut sandbox = world.store.get(&id).await.unwrap().unwrap();
    let what = format!("cannot open {PRIVATE}/sandboxes/instances/{id}/shim.sock: refused");
    sandbox.version += 1;
    sandbox.cause.message = Some(what.clone());
    let line = NewLine {
        at_ms: sandbox.cause.at_ms,
        project: Some(sandbox.project.clone()),
        sandbox: Some(id),
        generation: Some(sandbox.generation),
        kind: "sandbox.retrying".to_owned(),
        from: None,
        to: None,
        cause: Some("failed".to_owned()),
        by: sandbox.cause.by.clone(),
        data: serde_json::json!({ "message": what }),
    };
    let (lines, snapshots) = (vec![line], Vec::new());
    let change = Change { sandbox, lines, idempotency: None, quota: None, unused_since_ms: None, snapshots };
    world.store.commit(world.engine.epoch(), change).await.unwrap();
    path
}

#[tokio::test]
async fn s6_places_of_the_host_are_told_to_admins_alone() {
    let world = World::new().await;
    let path = failed_somewhere(&world).await;
    let (theirs, looking) = (world.key("default", false).await, world.key("default", true).await);
    for what in [
        path.clone(),
        format!("{path}/timeline"),
        format!("{path}/diagnosis"),
        "/v1/events".to_owned(),
        "/v1/sandboxes".to_owned(),
    ] {
        let ask = async |key: &str| world.whole(request(Method::GET, &what, key, None)).await.is(200);
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let admin = said(&ask(&world.admin).await.bytes);
        assert!(admin.contains(PRIVATE) && admin.contains("shim.sock"), "{what}: who runs it is told: {admin}");
        for key in [&theirs, &looking] {
            let told = said(&ask(key).await.bytes);
            assert!(!told.contains(PRIVATE) && !told.contains("shim.sock"), "{what}: {told}");
            assert!(told.contains("refused"), "{what}: what went wrong is told: {told}");
        }
    }
}

#[tokio::test]
async fn s6_a_stream_of_events_tells_no_place_of_the_host() {
    let world = World::new().await;
    failed_somewhere(&world).await;
    let key = world.key("default", false).await;
    let stream = bare(Method::GET, "/v1/events", &key).header("accept", "text/event-stream");
    let mut body = world.send(stream.body(axum::body::Body::empty()).unwrap()).await.into_body();
    let mut told = String::new();
    while !told.contains("sandbox.retrying") || !told.ends_with("\n\n") {
        let frame = tokio::time::timeout(PATIENCE, body.frame()).await.expect("it is told").unwrap().unwrap();
        told.push_str(&String::from_utf8_lossy(frame.data_ref().map_or(&[], |data| data)));
    }
    assert!(told.contains("refused") && !told.contains(PRIVATE), "{told}");
}
