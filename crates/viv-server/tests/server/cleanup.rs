//! Cleanups by hand, layer by layer (J2).

use std::time::Duration;

use serde_json::{Value, json};
use viv_engine::CleanupConfig;
use viv_server::Bounds;

use crate::world::World;

/// Whom each layer finds, when these are asked for.
async fn layers(world: &World, body: Value) -> Vec<Value> {
    let lines = || async {
        let page = world.get("/v1/events?kind=cleanup.started&limit=1000").await.is(200).json();
        page["items"].as_array().unwrap().clone()
    };
    let before = lines().await.len();
    world.post("/v1/cleanup", body).await.is(200);
    let told = lines().await;
    assert_eq!(told.len(), before + 1, "{told:?}");
    told[before]["data"]["layers"].as_array().unwrap().clone()
}

#[tokio::test]
async fn j2_each_layer_is_chosen_by_name_and_they_run_in_their_order() {
    let world = World::new().await;
    assert_eq!(layers(&world, json!({})).await, ["unhealthy", "leftovers", "age"], "what nobody wants");
    assert_eq!(layers(&world, json!({"emergency": true})).await, ["unhealthy", "leftovers", "age", "emergency"]);
    for layer in ["unhealthy", "leftovers", "age", "emergency"] {
        assert_eq!(layers(&world, json!({"layers": [layer]})).await, [layer], "and nothing else");
    }
    let mixed = json!({"layers": ["emergency", "leftovers", "emergency"], "emergency": true, "dry_run": true});
    assert_eq!(layers(&world, mixed).await, ["leftovers", "emergency"]);
    let aged = json!({"layers": ["leftovers"], "age_max_ms": 600_000});
    assert_eq!(layers(&world, aged).await, ["leftovers", "age"], "who names an age asks for its layer");
}

#[tokio::test]
async fn j2_what_no_layer_is_called_is_refused_with_the_words_that_there_are() {
    let world = World::new().await;
    let refused = async |body: Value| {
        let answer = world.post("/v1/cleanup", body).await.is(400);
        assert_eq!(answer.code(), "invalid_request");
        answer.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let message = refused(json!({"layers": ["age", "Emergency"]})).await;
    assert_eq!(message, "layers.1: must be one of unhealthy, leftovers, age, emergency");
    refused(json!({"age_max_ms": 0})).await;
    refused(json!({"age_max_ms": 1_u64 << 63})).await;
    let told = world.get("/v1/events?kind=cleanup").await.is(200).json();
    assert_eq!(told["items"], json!([]), "nothing was begun");
}

#[tokio::test]
async fn j2_an_age_that_is_named_is_the_one_for_this_cleanup() {
    let far = |config: &mut viv_engine::EngineConfig| {
        config.cleanup = Some(CleanupConfig { period: Duration::from_secs(86_400), ..CleanupConfig::default() });
    };
    let world = World::with(Bounds::default(), far).await;
    let path = world.sandbox().await;
    let made = world.get(&path).await.is(200).json();
    let found = async |age_max_ms: u64| {
        let body = json!({"layers": ["age"], "age_max_ms": age_max_ms, "dry_run": true});
        world.post("/v1/cleanup", body).await.is(200).json()
    };
    assert_eq!(found(86_400_000).await["found"], 0);
    crate::world::until("it is old enough", async || {
        let planned = found(1).await;
        (planned["found"] == 1).then(|| {
            let item = &planned["items"][0];
            assert_eq!((&item["sandbox"], &item["layer"]), (&made["id"], &json!("age")), "{planned}");
        })
    })
    .await;
    assert_eq!(world.post("/v1/cleanup", json!({"layers": ["age"]})).await.is(200).json()["found"], 0, "as it is set");
}
