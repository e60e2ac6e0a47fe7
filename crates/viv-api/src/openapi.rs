//! Schemas that a derive cannot write, and the list of all of them.

use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, KnownFormat, ObjectBuilder, OneOfBuilder, Schema, SchemaFormat, SchemaType,
};
use utoipa::openapi::{Ref, RefOr, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::{
    alert, bound, checkpoint, cleanup, daemon, diagnosis, error, event, execution, file, key, limits, page, reconcile,
    resources, sandbox, schedule, service, snapshot, spare, stats, subscription, task,
};

/// A whole number with a range. The format is told so that clients pick a type that holds it.
pub(crate) fn number(doc: &str, min: u64, max: u64) -> RefOr<Schema> {
    let bound = |value: u64| Some(utoipa::Number::UInt(value as usize));
    let object = ObjectBuilder::new()
        .schema_type(SchemaType::Type(Type::Integer))
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)))
        .description(Some(doc.trim()))
        .minimum(bound(min))
        .maximum(bound(max));
    RefOr::T(object.into())
}

/// A text with a shape.
pub(crate) fn text(doc: &str, min: usize, max: usize, pattern: &str, example: &str) -> RefOr<Schema> {
    let object = ObjectBuilder::new()
        .schema_type(SchemaType::Type(Type::String))
        .description(Some(doc.trim()))
        .min_length(Some(min))
        .max_length(Some(max))
        .pattern(Some(pattern))
        .examples([serde_json::Value::from(example)]);
    RefOr::T(object.into())
}

/// A map with a length. Of its keys a schema can only say what they must be, so their rules stand here in full.
pub(crate) fn map<K: PartialSchema, V: ToSchema>(doc: &str, _min: usize, max: usize) -> RefOr<Schema> {
    let RefOr::T(keys) = K::schema() else { unreachable!("keys are texts of ours, which are no references") };
    let object = ObjectBuilder::new()
        .description(Some(doc.trim()))
        .property_names(Some(keys))
        .additional_properties(Some(AdditionalProperties::RefOr(V::schema())))
        .max_properties(Some(max));
    RefOr::T(object.into())
}

/// A list with a length.
pub(crate) fn list<T: ToSchema>(doc: &str, min: usize, max: usize) -> RefOr<Schema> {
    let array =
        ArrayBuilder::new().description(Some(doc.trim())).items(T::schema()).min_items(Some(min)).max_items(Some(max));
    RefOr::T(array.into())
}

/// A list with a length, of what has a schema by name.
pub(crate) fn list_of_named<T: ToSchema>(doc: &str, min: usize, max: usize) -> RefOr<Schema> {
    let items = Ref::from_schema_name(T::name());
    let array =
        ArrayBuilder::new().description(Some(doc.trim())).items(items).min_items(Some(min)).max_items(Some(max));
    RefOr::T(array.into())
}

/// An object with exactly one field, for enums where the field's name is the choice.
fn one_field(name: &str, doc: &str, field: RefOr<Schema>) -> Schema {
    let object = ObjectBuilder::new()
        .description(Some(doc))
        .property(name, field)
        .required(name)
        .additional_properties(Some(AdditionalProperties::FreeForm(false)));
    object.into()
}

impl PartialSchema for sandbox::ExtendSandbox {
    /// By hand, since a derive does not close the choices to other fields as the parser does.
    fn schema() -> RefOr<Schema> {
        let to = || Ref::from_schema_name(bound::LifetimeMs::name()).into();
        let choice = OneOfBuilder::new()
            .description(Some(
                "Move the hard deadline: exactly one of the two. Both count from now, at whoever keeps the deadline. \
                 Once it has passed the answer is `expired`.",
            ))
            .item(one_field("at_least_ms", "No earlier than this from now; a later one stays.", to()))
            .item(one_field("exactly_ms", "Exactly this from now, also when that is earlier.", to()))
            .examples([serde_json::json!({"at_least_ms": 600_000})]);
        RefOr::T(choice.into())
    }
}

impl ToSchema for sandbox::ExtendSandbox {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((bound::LifetimeMs::name().into_owned(), bound::LifetimeMs::schema()));
    }
}

impl PartialSchema for service::ReadyWhen {
    fn schema() -> RefOr<Schema> {
        let choice = OneOfBuilder::new()
            .description(Some("What shows that a service is ready: exactly one of these. Its execution has to run."))
            .item(one_field("port", "This TCP port accepts.", bound::Port::schema()))
            .item(one_field("command", "This command exits with 0; it is run again and again.", bound::Words::schema()))
            .item(one_field("runs_ms", "It has been running for this long.", bound::ReadyMs::schema()))
            .examples([serde_json::json!({"port": 8080})]);
        RefOr::T(choice.into())
    }
}

impl ToSchema for service::ReadyWhen {}

impl PartialSchema for service::HookRun {
    fn schema() -> RefOr<Schema> {
        let webhook = Ref::from_schema_name(service::Webhook::name()).into();
        let choice = OneOfBuilder::new()
            .description(Some("What a hook does: exactly one of these."))
            .item(one_field("command", "A command in the sandbox.", bound::Words::schema()))
            .item(one_field("webhook", "A signed request.", webhook))
            .examples([serde_json::json!({"command": ["./set-up.sh"]})]);
        RefOr::T(choice.into())
    }
}

impl ToSchema for service::HookRun {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((service::Webhook::name().into_owned(), service::Webhook::schema()));
        <service::Webhook as ToSchema>::schemas(schemas);
    }
}

macro_rules! all {
    ($($type:ty),+ $(,)?) => {{
        let mut schemas = Vec::new();
        $(
            schemas.push((<$type as ToSchema>::name().into_owned(), <$type as PartialSchema>::schema()));
            <$type as ToSchema>::schemas(&mut schemas);
        )+
        schemas.sort_by(|a, b| a.0.cmp(&b.0));
        schemas.dedup_by(|a, b| a.0 == b.0);
        schemas
    }};
}

/// Every schema of the API by name, for `components/schemas`. References in query parameters are not collected by
/// themselves, so a document adds all of these.
#[expect(clippy::too_many_lines, reason = "a list")]
pub fn schemas() -> Vec<(String, RefOr<Schema>)> {
    use bound::{
        ActorName, CauseCode, ComponentName, Cursor, EventKind, FileMode, FromAddress, GenerationNumber,
        IdempotencyKey, KeyId, LabelFilter, LeaseName, ListDepth, LogBytes, MomentMs, Offset, PageLimit, Path,
        SandboxName, SandboxRef, ScheduleRef, SearchText, Sequence, SnapshotRef, StepNumber, TailLines, TaskRef,
        UserName, WaitMs, WebhookRef,
    };
    all![
        ActorName,
        CauseCode,
        ComponentName,
        Cursor,
        EventKind,
        FileMode,
        FromAddress,
        GenerationNumber,
        IdempotencyKey,
        KeyId,
        LabelFilter,
        LeaseName,
        ListDepth,
        LogBytes,
        MomentMs,
        Offset,
        PageLimit,
        Path,
        SandboxName,
        SandboxRef,
        ScheduleRef,
        SearchText,
        Sequence,
        SnapshotRef,
        StepNumber,
        TailLines,
        TaskRef,
        UserName,
        WaitMs,
        WebhookRef,
        checkpoint::CheckpointCheck,
        daemon::Doctor,
        daemon::Health,
        daemon::LogLevel,
        daemon::LogPage,
        daemon::Ready,
        daemon::Reconciler,
        daemon::Version,
        diagnosis::Diagnosis,
        error::ErrorBody,
        event::Event,
        event::EventPage,
        execution::Execution,
        execution::ExecutionStarted,
        execution::ExecutionState,
        execution::InputTaken,
        execution::OutputLine,
        execution::SendSignal,
        execution::StartExecution,
        execution::Terminal,
        file::FileChange,
        file::FileListing,
        file::FileStat,
        file::MakeDir,
        file::MoveFile,
        file::Unpacked,
        key::CreateKey,
        key::CreatedKey,
        key::Key,
        limits::Limits,
        limits::LimitsInForce,
        alert::Alert,
        cleanup::BeginCleanup,
        cleanup::Cleanup,
        cleanup::CleanupLayer,
        page::Page<alert::Alert>,
        page::Page<daemon::Reconciler>,
        page::Page<execution::Execution>,
        page::Page<key::Key>,
        page::Page<sandbox::Sandbox>,
        page::Page<schedule::Schedule>,
        page::Page<sandbox::TimelineEntry>,
        page::Page<snapshot::Snapshot>,
        page::Page<spare::SpareClass>,
        page::Page<subscription::EventDelivery>,
        page::Page<subscription::Subscription>,
        page::Page<task::Task>,
        reconcile::Reconcile,
        reconcile::Reconciled,
        resources::Resources,
        sandbox::Activity,
        sandbox::CreateSandbox,
        sandbox::Deadline,
        sandbox::EnsureSandbox,
        sandbox::ExtendSandbox,
        service::Service,
        sandbox::KeepAwake,
        sandbox::LogSource,
        sandbox::ReportActivity,
        sandbox::RestSandbox,
        sandbox::Sandbox,
        sandbox::SandboxLogs,
        sandbox::Status,
        sandbox::StopSandbox,
        sandbox::TakeKeepAwake,
        sandbox::TimelineEntry,
        schedule::ChangeSchedule,
        schedule::CreateSchedule,
        schedule::Schedule,
        daemon::BeginDrain,
        daemon::Drain,
        snapshot::CreateSnapshot,
        snapshot::Fork,
        snapshot::Forked,
        snapshot::ResetSandbox,
        snapshot::RollbackSandbox,
        snapshot::Snapshot,
        spare::SpareClass,
        stats::Stats,
        subscription::ChangeSubscription,
        subscription::CreateSubscription,
        subscription::CreatedSubscription,
        subscription::EventDelivery,
        subscription::ReplayEvents,
        subscription::Replayed,
        subscription::RotateSecret,
        subscription::SentEvent,
        subscription::Subscription,
        subscription::TriedSubscription,
        task::ContinueTask,
        task::CreateTask,
        task::MarkTask,
        task::StopTask,
        task::Task,
        task::TaskFile,
        task::TaskState,
        task::TaskStep,
        task::TaskTimeline,
    ]
}
