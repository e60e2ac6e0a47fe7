//! What every benchmark needs.
#![allow(dead_code, unreachable_pub, reason = "every benchmark uses a part of this")]

use std::time::{Duration, Instant};

use viv_core::{FencingToken, Generation, OperationId};
use viv_provider::Mutation;

pub async fn timed<T, E: std::fmt::Debug>(work: impl Future<Output = Result<T, E>>) -> Duration {
    let started = Instant::now();
    work.await.unwrap();
    started.elapsed()
}

pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

pub fn show(time: Duration) -> String {
    format!("{:7.2} ms", time.as_secs_f64() * 1000.0)
}

pub fn ratio(ours: Duration, theirs: Duration) -> f64 {
    ours.as_secs_f64() / theirs.as_secs_f64()
}

pub fn mutation() -> Mutation {
    let operation = OperationId::from_bytes(fresh());
    Mutation { operation, generation: Generation::FIRST, token: FencingToken(1), budget_ms: 120_000 }
}

pub fn fresh() -> [u8; 16] {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty()).unwrap();
    bytes
}
