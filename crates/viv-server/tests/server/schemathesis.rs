//! Whatever a program can make of the document, the server stands it: no 5xx, nothing that the document does not say.

use std::path::Path;
use std::process::Command;

use crate::world::World;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s5_schemathesis_finds_nothing() {
    // Whoever makes up a request may make one up that waits, and for the ends of what never ends.
    let often = viv_server::Rate { per_second: 1e6, burst: 1e6 };
    let wait_max = std::time::Duration::from_secs(1);
    let world = World::with(viv_server::Bounds { wait_max, wrong_key_rate: often, ..Default::default() }, |_| {}).await;
    let (address, _end, _serving) = world.listen().await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/schemathesis");
    let (url, key) = (format!("http://{address}"), world.admin.clone());
    let ran =
        tokio::task::spawn_blocking(move || Command::new(script).env("VIV_URL", url).env("VIV_KEY", key).output());
    let output = ran.await.unwrap().expect("scripts/schemathesis");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_is_stateful(&said);
}

/// Requests are made up in sequence too, along links that schemathesis infers from the document: what one answers is what
/// the next one is about. A phase that is passed over is no failure to it.
fn assert_is_stateful(said: &str) {
    let line = |name: &str| said.lines().find_map(|line| line.trim().strip_prefix(name));
    let scenarios = line("Scenarios:").and_then(|told| told.trim().parse::<u64>().ok());
    let selected = line("API Links:").and_then(|told| told.split('/').nth(1)?.trim().strip_suffix(" selected"));
    let links = selected.and_then(|count| count.parse::<u64>().ok());
    assert!(scenarios > Some(0) && links > Some(0), "nothing was done in sequence: {scenarios:?}, {links:?}\n{said}");
}
