//! Serves the API on the provider and the store in memory: `cargo run -p viv-server --example sim [ADDRESS]`.
//! Prints where it listens, and a key that may do everything. Nothing that it makes is real or kept.

#[expect(dead_code, reason = "tests use more of it")]
#[path = "../tests/server/world.rs"]
mod world;

use viv_server::serve;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    // Nobody who tries something out wants to wait for what does not come.
    let often = viv_server::Rate { per_second: 1e6, burst: 1e6 };
    let wait_max = std::time::Duration::from_secs(1);
    let bounds = viv_server::Bounds { wait_max, wrong_key_rate: often, ..Default::default() };
    let world = world::World::with(bounds, |_| {}).await;
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("VIV_URL=http://{} VIV_KEY={}", listener.local_addr()?, world.admin);
    serve(listener, world.router.clone(), async { drop(tokio::signal::ctrl_c().await) }).await
}
