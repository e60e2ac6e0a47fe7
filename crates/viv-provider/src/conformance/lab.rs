//! What every case needs: fresh ids, waiting with a deadline, clean-up.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use viv_core::{ExecutionId, FencingToken, Generation, OperationId, OwnerMark, SandboxId, SnapshotId};

use super::World;
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{InstanceSpec, Listed, Mutation, Page, PageRequest, SnapshotSeen};
use crate::provider::Provider;

/// How often a condition is looked at again.
pub(super) const POLL_MS: u64 = 10;

/// How long something that should happen soon may take: far more than it
/// needs on a busy machine, far less than a case may take.
pub(super) const SOON_MS: u64 = 10_000;

/// How long a provider may take for one mutation.
pub(super) const BUDGET_MS: u64 = 30_000;

/// The token that cases start with, so that there are older ones.
pub(super) const TOKEN: FencingToken = FencingToken(10);

/// Newer than any token that a case uses.
const CLEAN_UP_TOKEN: FencingToken = FencingToken(1 << 40);

/// Most pages that a listing of what one case made may have.
const PAGES_MAX: usize = 64;

/// One case's view of the world.
pub struct Lab {
    world: Box<dyn World>,
    provider: Arc<dyn Provider>,
    made: Mutex<Vec<SandboxId>>,
}

impl std::fmt::Debug for Lab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lab").field("provider", &self.provider.name()).finish_non_exhaustive()
    }
}

impl Lab {
    pub(super) fn new(world: Box<dyn World>) -> Self {
        let provider = world.provider();
        Self { world, provider, made: Mutex::default() }
    }

    pub(super) fn provider(&self) -> &dyn Provider {
        self.provider.as_ref()
    }

    pub(super) fn can(&self, capability: Capability) -> bool {
        self.provider.capabilities().can(capability)
    }

    /// Whether there is any way to make a snapshot; without one there is nothing to look at or to remove.
    pub(super) fn can_keep(&self) -> bool {
        [Capability::SaveStopped, Capability::SaveLive, Capability::SaveMemory].into_iter().any(|save| self.can(save))
    }

    pub(super) fn owner(&self) -> OwnerMark {
        self.world.owner()
    }

    /// An owner who has nothing to do with [`Lab::owner`].
    pub(super) fn other_owner(&self) -> OwnerMark {
        format!("{}-other", self.owner()).parse().expect("an owner mark of at most 40 characters")
    }

    pub(super) fn spec(&self) -> InstanceSpec {
        self.world.spec()
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.world.now_ms()
    }

    pub(super) async fn pass(&self, ms: u64) {
        self.world.pass(ms).await;
    }

    /// A sandbox that will be destroyed when the case is over.
    pub(super) fn fresh_sandbox(&self) -> SandboxId {
        let sandbox = SandboxId::from_bytes(self.world.fresh_bytes());
        self.made.lock().unwrap_or_else(PoisonError::into_inner).push(sandbox.clone());
        sandbox
    }

    pub(super) fn fresh_execution(&self) -> ExecutionId {
        ExecutionId::from_bytes(self.world.fresh_bytes())
    }

    pub(super) fn fresh_snapshot(&self) -> SnapshotId {
        SnapshotId::from_bytes(self.world.fresh_bytes())
    }

    /// A word that was not used before.
    pub(super) fn nonce(&self) -> String {
        SnapshotId::from_bytes(self.world.fresh_bytes()).as_str().trim_start_matches(SnapshotId::PREFIX).to_owned()
    }

    /// A mutation by a fresh operation.
    pub(super) fn mutation(&self, generation: Generation, token: FencingToken) -> Mutation {
        Mutation {
            operation: OperationId::from_bytes(self.world.fresh_bytes()),
            generation,
            token,
            budget_ms: BUDGET_MS,
        }
    }

    /// An instance as the world makes them.
    pub(super) async fn subject(&self) -> Subject<'_> {
        self.subject_of(&self.spec()).await
    }

    /// An instance that lives for this long.
    pub(super) async fn subject_for(&self, lifetime_ms: u64) -> Subject<'_> {
        let mut spec = self.spec();
        spec.lifetime_ms = lifetime_ms;
        self.subject_of(&spec).await
    }

    /// An instance from a spec.
    pub(super) async fn subject_of(&self, spec: &InstanceSpec) -> Subject<'_> {
        let subject = Subject::new(self, self.fresh_sandbox(), Generation::FIRST, TOKEN);
        subject.create(spec).await;
        subject
    }

    /// Awaits a future while time passes; fails the case when it takes too long.
    #[track_caller]
    pub(super) fn drive<T>(
        &self,
        what: &str,
        limit_ms: u64,
        future: impl Future<Output = T>,
    ) -> impl Future<Output = T> {
        let caller = std::panic::Location::caller();
        async move {
            let mut future = pin!(future);
            let end_ms = self.now_ms() + limit_ms;
            loop {
                // The future is pinned outside, so losing a round does not lose what it did.
                tokio::select! {
                    biased;
                    value = &mut future => return value,
                    () = self.world.pass(POLL_MS) => {}
                }
                assert!(self.now_ms() < end_ms, "{what} took longer than {limit_ms} ms, at {caller}");
            }
        }
    }

    /// Asks again and again while time passes, until there is an answer; fails the case when there is none in time.
    #[track_caller]
    pub(super) fn until<T>(
        &self,
        what: &str,
        limit_ms: u64,
        mut ask: impl AsyncFnMut() -> Option<T>,
    ) -> impl Future<Output = T> {
        let caller = std::panic::Location::caller();
        async move {
            let end_ms = self.now_ms() + limit_ms;
            loop {
                if let Some(answer) = ask().await {
                    return answer;
                }
                assert!(self.now_ms() < end_ms, "{what} did not come within {limit_ms} ms, at {caller}");
                self.world.pass(POLL_MS).await;
            }
        }
    }

    /// Whether instances expire; where they do not, no deadline may be shown.
    pub(super) async fn can_expire(&self) -> bool {
        if self.can(Capability::HardDeadline) {
            return true;
        }
        assert_eq!(self.subject().await.observe().await.deadline, None, "a deadline that nobody keeps is shown");
        false
    }

    /// All pages of an owner's listing.
    pub(super) async fn list_all(&self, owner: &OwnerMark, limit: Option<usize>) -> Vec<Listed> {
        all_pages(limit, async |request| self.provider.list(owner, request).await.must("list")).await
    }

    /// All pages of an owner's snapshots.
    pub(super) async fn snapshots_all(&self, owner: &OwnerMark, limit: Option<usize>) -> Vec<SnapshotSeen> {
        all_pages(limit, async |request| self.provider.snapshots(owner, request).await.must("snapshots")).await
    }

    /// Destroys what the case made, then removes what it saved. Does not panic, because it also runs after a case
    /// that did.
    pub(super) async fn clean_up(&self) {
        self.destroy_made().await;
        if self.can_keep() {
            for owner in [self.owner(), self.other_owner()] {
                self.remove_saved(&owner).await;
            }
        }
    }

    async fn destroy_made(&self) {
        let made = std::mem::take(&mut *self.made.lock().unwrap_or_else(PoisonError::into_inner));
        for sandbox in made {
            let mut generation = Generation::FIRST;
            // The second round has the generation that the first one was told.
            for _ in 0..2 {
                let mutation = self.mutation(generation, CLEAN_UP_TOKEN);
                match self.provider.destroy(&mutation, &sandbox).await {
                    Err(ProviderError::StaleGeneration { current, .. }) => generation = current,
                    Ok(()) => break,
                    Err(error) => {
                        eprintln!("clean-up of {sandbox}: {error}");
                        break;
                    }
                }
            }
        }
    }

    async fn remove_saved(&self, owner: &OwnerMark) {
        // What was removed is not listed any more, so the first page is always the next one.
        for _ in 0..PAGES_MAX {
            let items = match self.provider.snapshots(owner, PageRequest::default()).await {
                Ok(page) if page.items.is_empty() => return,
                Ok(page) => page.items,
                Err(error) => return eprintln!("clean-up of {owner}'s snapshots: {error}"),
            };
            let mut all_removed = true;
            for SnapshotSeen { snapshot, .. } in items {
                let mutation = self.mutation(snapshot.source.generation, CLEAN_UP_TOKEN);
                let removed = self.provider.remove_snapshot(&mutation, &snapshot.source.sandbox, &snapshot.id).await;
                if let Err(error) = removed {
                    eprintln!("clean-up of {}: {error}", snapshot.id);
                    all_removed = false;
                }
            }
            if !all_removed {
                return;
            }
        }
    }

    pub(super) async fn assert_nothing_left(&self) {
        for owner in [self.owner(), self.other_owner()] {
            let left = self.list_all(&owner, None).await;
            assert!(left.is_empty(), "left behind: {left:?}");
            if self.can_keep() {
                let left = self.snapshots_all(&owner, None).await;
                assert!(left.is_empty(), "left behind: {left:?}");
            }
        }
    }

    pub(super) async fn finish(&self) {
        self.world.finish().await;
    }
}

/// Goes through a listing page by page.
async fn all_pages<T>(limit: Option<usize>, mut ask: impl AsyncFnMut(PageRequest) -> Page<T>) -> Vec<T> {
    let mut all = Vec::new();
    let mut cursor = None;
    for _ in 0..PAGES_MAX {
        let page = ask(PageRequest { cursor, limit }).await;
        assert!(!page.is_partial(), "something could not be looked at: {:?}", page.unreadable);
        if let Some(limit) = limit {
            assert!(page.items.len() <= limit, "a page has {} items, asked were {limit}", page.items.len());
        }
        all.extend(page.items);
        cursor = page.next;
        if cursor.is_none() {
            return all;
        }
    }
    panic!("a listing has more than {PAGES_MAX} pages");
}

/// What a case expects of an answer.
pub(super) trait Answer<T> {
    /// It has to succeed.
    fn must(self, what: &str) -> T;

    /// It has to be refused.
    fn refused(self, what: &str) -> ProviderError;
}

impl<T> Answer<T> for Result<T, ProviderError> {
    #[track_caller]
    fn must(self, what: &str) -> T {
        match self {
            Ok(value) => value,
            Err(error) => panic!("{what} failed: {error:?}"),
        }
    }

    #[track_caller]
    fn refused(self, what: &str) -> ProviderError {
        match self {
            Ok(_) => panic!("{what} was not refused"),
            Err(error) => error,
        }
    }
}

/// A capability that is not declared has to be refused as that, whatever else is wrong with the call.
#[track_caller]
pub(super) fn assert_unsupported<T>(result: Result<T, ProviderError>, expected: Capability) {
    match result.refused("what is not declared") {
        ProviderError::Unsupported { capability, .. } if capability == expected => {}
        other => panic!("not declared is {expected:?}, the refusal is {other:?}"),
    }
}

/// The refusal has to be this one.
macro_rules! assert_refused {
    ($result:expr, $pattern:pat $(if $guard:expr)? $(,)?) => {
        match $crate::conformance::lab::Answer::refused($result, stringify!($result)) {
            $pattern $(if $guard)? => {}
            other => panic!("expected {}, the refusal is {other:?}", stringify!($pattern)),
        }
    };
}
pub(super) use assert_refused;
