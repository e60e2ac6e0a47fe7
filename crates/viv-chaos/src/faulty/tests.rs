//! What is remembered of calls, and where nothing may be.

use std::sync::Arc;
use std::time::Duration;

use viv_core::exec::ExecSpec;
use viv_core::{ExecutionId, FencingToken, Generation, OperationId, SandboxId};
use viv_provider::sim::{SimClock, SimProvider};
use viv_provider::{InstanceSpec, Mutation, PageRequest, Provider};

use super::{FaultyProvider, lock};
use crate::orders::Orders;

/// How many things are remembered after some sandboxes have lived and gone: by tokens, probes, listings and starts.
fn remembered(provider: &FaultyProvider) -> [usize; 4] {
    let live = async {
        for number in 1..=5_u8 {
            let id = SandboxId::from_bytes([number; 16]);
            let operation = |byte| OperationId::from_bytes([byte; 16]);
            let by = |byte| Mutation {
                operation: operation(byte),
                generation: Generation::FIRST,
                token: FencingToken(u64::from(number)),
                budget_ms: 1_000,
            };
            let owner = "sim".parse().unwrap();
            provider.create(&by(2 * number), &id, &owner, &InstanceSpec::host(60_000)).await.unwrap();
            provider.list(&owner, PageRequest::default()).await.unwrap();
            let probe = ExecSpec { transient: true, ..provider.probe_spec("nonce") };
            provider.execute(&by(100), &id, &ExecutionId::from_bytes([number; 16]), &probe).await.unwrap();
            provider.destroy(&by(2 * number + 1), &id).await.unwrap();
        }
    };
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(live);
    let chance = lock(&provider.chance);
    [chance.tokens.len(), chance.probed.len(), chance.listed.len(), chance.starts.len()]
}

#[test]
fn p5_on_a_daemon_nothing_is_remembered_of_what_is_gone() {
    let sim = || SimProvider::new(SimClock::starting_at(1));
    assert_eq!(remembered(&FaultyProvider::new(sim(), 1, 0)), [5; 4], "a world has an end");
    let orders = Arc::new(Orders::new(Duration::ZERO, || {}));
    assert_eq!(remembered(&FaultyProvider::around(sim(), 1, 0, orders)), [0; 4]);
}
