//! Schedules over HTTP.

use serde_json::json;

use crate::world::World;

#[tokio::test]
async fn l17_a_change_says_what_is_otherwise_and_is_checked_like_a_new_one() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let new = json!({
        "cron": "0 4 * * *", "argv": ["/bin/old", "a"], "env": {"TOKEN": "hidden-1"}, "cwd": "/tmp", "limit_ms": 60_000,
    });
    let made = world.post(&format!("{sandbox}/schedules"), new).await.is(201).json();
    let path = format!("/v1/schedules/{}", made["id"].as_str().unwrap());
    let changed = world.put(&path, json!({"argv": ["/bin/new"]})).await.is(200).json();
    assert_eq!(changed["argv"], json!(["/bin/new"]));
    for stays in ["cron", "zone", "env", "limit_ms", "missed", "enabled", "next_at_ms"] {
        assert_eq!(changed[stays], made[stays], "{stays}");
    }
    let changed = world.put(&path, json!({"env": {"OTHER": "hidden-2"}, "limit_ms": 1_000})).await.is(200).json();
    assert_eq!((&changed["env"], &changed["limit_ms"]), (&json!(["OTHER"]), &json!(1_000)));
    assert_eq!(changed["argv"], json!(["/bin/new"]));

    for bad in [
        json!({"argv": []}),
        json!({"argv": [""]}),
        json!({"argv": ["a\u{0}b"]}),
        json!({"cwd": ""}),
        json!({"limit_ms": 0}),
        json!({"command": ["/bin/new"]}),
        json!({"argv": ["/bin/newer"], "cron": "0 0 31 2 *"}),
    ] {
        assert_eq!(world.put(&path, bad.clone()).await.is(400).code(), "invalid_request", "{bad}");
    }
    let shown = world.get(&path).await.is(200).json();
    assert_eq!(shown, changed, "what is refused changes nothing");

    let journal = world.get("/v1/events?limit=1000").await.is(200).json();
    let lines = journal["items"].as_array().unwrap();
    let told: Vec<_> = lines.iter().filter(|line| line["kind"] == "schedule.changed").collect();
    assert_eq!(told.len(), 2, "{journal}");
    assert!(told.iter().all(|line| line["data"]["command_changed"] == true), "{told:?}");
    assert!(!journal.to_string().contains("hidden"), "S6");
}
