//! The conformance suite on the provider in memory: with everything declared, with nothing, and with a part of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use viv_core::OwnerMark;
use viv_provider::conformance::World;
use viv_provider::sim::{SimClock, SimProvider};
use viv_provider::{Capabilities, InstanceSpec, Provider};

/// Long after any case is over.
const LIFETIME_MS: u64 = 600_000;

/// Some time in the past, so that times look like times.
const EPOCH_MS: u64 = 1_700_000_000_000;

struct SimWorld {
    clock: SimClock,
    provider: SimProvider,
    drawn: AtomicU64,
}

impl SimWorld {
    fn new(provider: impl FnOnce(SimClock) -> SimProvider) -> Self {
        let clock = SimClock::starting_at(EPOCH_MS);
        Self { provider: provider(clock.clone()), clock, drawn: AtomicU64::new(0) }
    }
}

#[async_trait]
impl World for SimWorld {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::new(self.provider.clone())
    }

    fn owner(&self) -> OwnerMark {
        "sim-conformance".parse().expect("a mark")
    }

    fn spec(&self) -> InstanceSpec {
        InstanceSpec::host(LIFETIME_MS)
    }

    fn fresh_bytes(&self) -> [u8; 16] {
        u128::from(self.drawn.fetch_add(1, Ordering::Relaxed)).to_be_bytes()
    }

    async fn pass(&self, ms: u64) {
        // Whoever is ready goes first, so that time passes only when everybody waits.
        tokio::task::yield_now().await;
        self.clock.advance(ms);
    }

    fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }
}

mod full {
    use super::*;
    viv_provider::conformance_tests!(SimWorld::new(SimProvider::new));
}

mod bare {
    use super::*;
    viv_provider::conformance_tests!(SimWorld::new(|clock| {
        SimProvider::with_capabilities(clock, Capabilities::default())
    }));
}

mod modest {
    use super::*;
    use viv_provider::Capability;
    viv_provider::conformance_tests!(SimWorld::new(|clock| {
        let some = [
            Capability::HardDeadline,
            Capability::SaveStopped,
            Capability::Restore,
            Capability::Usage,
            Capability::LimitMemory,
            Capability::LimitsLive,
        ];
        SimProvider::with_capabilities(clock, some.into_iter().fold(Capabilities::default(), Capabilities::with))
    }));
}

/// The suite does not wait for this, because real providers would have to.
#[tokio::test]
async fn a_transient_execution_that_nobody_reads_is_forgotten() {
    use viv_core::exec::TRANSIENT_KEPT_MS;
    use viv_core::{ExecutionId, FencingToken, Generation, OperationId, SandboxId};
    use viv_provider::{InstanceRef, Mutation, ProviderError};

    let world = SimWorld::new(SimProvider::new);
    let sandbox = SandboxId::from_bytes(world.fresh_bytes());
    let generation = Generation::FIRST;
    let mutation = || Mutation {
        operation: OperationId::from_bytes(world.fresh_bytes()),
        generation,
        token: FencingToken(1),
        budget_ms: 1_000,
    };
    let instance = InstanceRef { sandbox: sandbox.clone(), generation };
    world.provider.create(&mutation(), &sandbox, &world.owner(), &world.spec()).await.unwrap();
    let execution = ExecutionId::from_bytes(world.fresh_bytes());
    let spec = world.provider.probe_spec("nonce");
    world.provider.execute(&mutation(), &sandbox, &execution, &spec).await.unwrap();
    world.clock.advance(TRANSIENT_KEPT_MS - 1);
    assert!(world.provider.execution(&instance, &execution).await.unwrap().state.is_final());
    world.clock.advance(1);
    let told = world.provider.execution(&instance, &execution).await;
    assert!(matches!(told, Err(ProviderError::NotFound { .. })), "{told:?}");
}
