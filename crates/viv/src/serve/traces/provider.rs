//! Every call to the provider, in a span of its own. Streams and waits are told of when they begin: what is waited for, the
//! end of an instance, lasts as long as it does.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tracing::field::{Empty, display};
use tracing::{Instrument, Span, info_span};
use viv_core::exec::{ExecSpec, ExecStatus, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::{ExecutionId, Identity, OwnerMark, RequestId, SandboxId, SnapshotId};
use viv_provider::{
    ByteReader, Capabilities, Deadline, DeadlineChange, Dialled, DiskUsage, Ended, FileWrite, Finding, FullPlace,
    InstanceRef, InstanceSpec, LogPart, Mutation, Observation, Obstacle, OutputStream, Page, PageRequest, ProcessSeen,
    Provider, ProviderError, RequestStream, ResourceLimits, SaveRequest, Snapshot, SnapshotSeen, Swept, WatchStream,
    Whereabouts,
};

type Result<T> = std::result::Result<T, ProviderError>;

/// The provider, with spans around it.
pub(super) struct TracedProvider(pub(super) Arc<dyn Provider>);

/// Whose a call is; nobody's, when it is about all of them.
trait Of {
    fn sandbox(&self) -> Option<&SandboxId>;
}

impl Of for SandboxId {
    fn sandbox(&self) -> Option<&SandboxId> {
        Some(self)
    }
}

impl Of for InstanceRef {
    fn sandbox(&self) -> Option<&SandboxId> {
        Some(&self.sandbox)
    }
}

impl Of for OwnerMark {
    fn sandbox(&self) -> Option<&SandboxId> {
        None
    }
}

impl Of for SnapshotId {
    fn sandbox(&self) -> Option<&SandboxId> {
        None
    }
}

impl Of for [Finding] {
    fn sandbox(&self) -> Option<&SandboxId> {
        None
    }
}

impl Of for TracedProvider {
    fn sandbox(&self) -> Option<&SandboxId> {
        None
    }
}

fn span(verb: &'static str, of: &(impl Of + ?Sized)) -> Span {
    let span = info_span!(
        "provider",
        otel.name = format!("provider {verb}"),
        otel.kind = "client",
        viv.verb = verb,
        viv.sandbox = Empty,
        viv.outcome = Empty,
        otel.status_code = Empty,
    );
    if let Some(sandbox) = of.sandbox() {
        span.record("viv.sandbox", display(sandbox));
    }
    span
}

async fn traced<T>(span: Span, call: impl Future<Output = Result<T>>) -> Result<T> {
    let answer = call.instrument(span.clone()).await;
    match &answer {
        Ok(_) => span.record("viv.outcome", "ok"),
        // The word for it: what it says may be about what somebody wrote (S6).
        Err(error) => span.record("viv.outcome", error.code()).record("otel.status_code", "ERROR"),
    };
    answer
}

macro_rules! calls {
    ($($verb:ident($of:ident; $($argument:ident: $kind:ty),*) -> $answer:ty;)*) => {
        #[async_trait]
        #[deny(clippy::missing_trait_methods, reason = "a call that is not forwarded would be answered by the default, and nobody would notice")]
        impl Provider for TracedProvider {
            $(async fn $verb(&self, $($argument: $kind),*) -> Result<$answer> {
                traced(span(stringify!($verb), calls!(@of self $of)), self.0.$verb($($argument),*)).await
            })*

            async fn wait_end(&self, instance: &InstanceRef) -> Result<Ended> {
                self.0.wait_end(instance).await
            }

            fn name(&self) -> &str {
                self.0.name()
            }

            fn capabilities(&self) -> Capabilities {
                self.0.capabilities()
            }

            async fn look_again(&self) -> Capabilities {
                self.0.look_again().await
            }

            fn looks_again_after(&self) -> Option<Duration> {
                self.0.looks_again_after()
            }

            fn probe_spec(&self, nonce: &str) -> ExecSpec {
                self.0.probe_spec(nonce)
            }

            fn ask_spec(&self, body: &str) -> ExecSpec {
                self.0.ask_spec(body)
            }

            fn memory_left(&self) -> Option<f64> {
                self.0.memory_left()
            }

            fn saves_memory_by(&self) -> Option<String> {
                self.0.saves_memory_by()
            }

            fn short_of_room(&self) -> Option<String> {
                self.0.short_of_room()
            }
        }
    };
    (@of $this:ident nobody) => { $this };
    (@of $this:ident $of:ident) => { $of };
}

calls! {
    create(sandbox; mutation: &Mutation, sandbox: &SandboxId, owner: &OwnerMark, spec: &InstanceSpec) -> Observation;
    observe(instance; instance: &InstanceRef) -> Observation;
    list(owner; owner: &OwnerMark, page: PageRequest) -> Page;
    destroy(sandbox; mutation: &Mutation, sandbox: &SandboxId) -> ();
    extend(sandbox; mutation: &Mutation, sandbox: &SandboxId, change: DeadlineChange) -> Deadline;
    set_limits(sandbox; mutation: &Mutation, sandbox: &SandboxId, change: &ResourceLimits) -> ResourceLimits;
    freeze(sandbox; mutation: &Mutation, sandbox: &SandboxId) -> ();
    thaw(sandbox; mutation: &Mutation, sandbox: &SandboxId) -> ();
    save(sandbox; mutation: &Mutation, sandbox: &SandboxId, request: &SaveRequest) -> Snapshot;
    snapshot(snapshot; snapshot: &SnapshotId) -> SnapshotSeen;
    snapshots(owner; owner: &OwnerMark, page: PageRequest) -> Page<SnapshotSeen>;
    remove_snapshot(sandbox; mutation: &Mutation, sandbox: &SandboxId, snapshot: &SnapshotId) -> ();
    export_snapshot(snapshot; snapshot: &SnapshotId) -> ByteReader;
    import_snapshot(
        sandbox;
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        snapshot: &SnapshotId,
        file: ByteReader
    ) -> Snapshot;
    disk_usage(instance; instance: &InstanceRef) -> DiskUsage;
    restore(
        sandbox;
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        snapshot: &SnapshotId
    ) -> Observation;
    fork(
        sandbox;
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        source: &InstanceRef
    ) -> Observation;
    execute(sandbox; mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId, spec: &ExecSpec) -> ExecStatus;
    identity(instance; instance: &InstanceRef) -> Identity;
    whereabouts(instance; instance: &InstanceRef) -> Whereabouts;
    processes(instance; instance: &InstanceRef) -> Vec<ProcessSeen>;
    full_places(instance; instance: &InstanceRef) -> Vec<FullPlace>;
    log_tail(instance; instance: &InstanceRef, bytes_max: u64) -> Vec<LogPart>;
    execution(instance; instance: &InstanceRef, execution: &ExecutionId) -> ExecStatus;
    executions(instance; instance: &InstanceRef) -> Vec<ExecStatus>;
    attach(
        instance;
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        follow: bool
    ) -> Box<dyn OutputStream>;
    write_stdin(
        sandbox;
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        offset: u64,
        data: &[u8]
    ) -> u64;
    close_stdin(sandbox; mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> ();
    signal(sandbox; mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId, signal: i32) -> ();
    resize(sandbox; mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId, size: TtySize) -> ();
    cancel(sandbox; mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> ExecStatus;
    file_read(instance; instance: &InstanceRef, path: &str, offset: u64, length: Option<u64>) -> ByteReader;
    file_write(
        sandbox;
        mutation: &Mutation,
        sandbox: &SandboxId,
        file: &FileWrite,
        content: ByteReader
    ) -> FileStat;
    file_stat(instance; instance: &InstanceRef, path: &str) -> FileStat;
    file_list(instance; instance: &InstanceRef, path: &str, depth: u32) -> DirListing;
    file_mkdir(sandbox; mutation: &Mutation, sandbox: &SandboxId, path: &str) -> ();
    file_move(sandbox; mutation: &Mutation, sandbox: &SandboxId, from: &str, to: &str) -> ();
    file_remove(sandbox; mutation: &Mutation, sandbox: &SandboxId, path: &str) -> ();
    file_watch(instance; instance: &InstanceRef, path: &str, recursive: bool) -> Box<dyn WatchStream>;
    archive_get(instance; instance: &InstanceRef, path: &str) -> ByteReader;
    archive_put(
        sandbox;
        mutation: &Mutation,
        sandbox: &SandboxId,
        path: &str,
        bounds: ArchiveBounds,
        archive: ByteReader
    ) -> Unpacked;
    dial(instance; instance: &InstanceRef, port: u16) -> Box<dyn Dialled>;
    audit(nobody;) -> Vec<Finding>;
    sweep(findings; findings: &[Finding]) -> Vec<Swept>;
    set_network(sandbox; mutation: &Mutation, sandbox: &SandboxId, connected: bool) -> ();
    memory_obstacles(instance; instance: &InstanceRef) -> Vec<Obstacle>;
    requests(instance; instance: &InstanceRef) -> Box<dyn RequestStream>;
    answer_request(
        sandbox;
        mutation: &Mutation,
        sandbox: &SandboxId,
        request: &RequestId,
        answer: &str
    ) -> ();
}
