//! The table of all routes: what each takes and gives, and who may. Router and document are both made from it.

use axum::Router;
use axum::handler::Handler;
use axum::routing::{MethodFilter, on};
use utoipa::openapi::path::{OperationBuilder, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaType};
use utoipa::openapi::security::SecurityRequirement;
use utoipa::openapi::{
    Content, ContentBuilder, HeaderBuilder, HttpMethod, PathItem, Paths, PathsBuilder, Ref, RefOr, Required,
    ResponseBuilder, Type,
};
use utoipa::{IntoParams, PartialSchema, ToSchema};
use viv_api::bound::{
    GenerationNumber, IdempotencyKey, KeyId, LeaseName, SandboxRef, ScheduleRef, SnapshotRef, StepNumber,
};
use viv_api::bound::{TaskRef, WebhookRef};
use viv_api::error::{ErrorBody, ErrorCode};
use viv_api::page::Page;

use crate::auth::{Need, authenticate};
use crate::guard::{no_such_method, no_such_path};
use crate::state::ServerState;

/// The name under which the document knows keys.
pub(crate) const SECURITY: &str = "key";

/// A good answer: its status, what it means, and in which forms it comes.
type Good = (u16, &'static str, Vec<(&'static str, RefOr<Schema>)>);

/// One route, as the document tells it.
pub(crate) struct Op {
    id: &'static str,
    tag: &'static str,
    summary: &'static str,
    need: Need,
    params: Vec<Parameter>,
    body: Option<(Vec<&'static str>, RefOr<Schema>, bool)>,
    good: Vec<Good>,
    errors: Vec<ErrorCode>,
}

impl Op {
    /// A route that these may use.
    pub(crate) fn new(tag: &'static str, id: &'static str, need: Need, summary: &'static str) -> Self {
        let errors = match need {
            Need::Nothing => vec![ErrorCode::InvalidRequest, ErrorCode::TooManyRequests, ErrorCode::Internal],
            Need::Read | Need::Change | Need::Admin => vec![
                ErrorCode::InvalidRequest,
                ErrorCode::Unauthenticated,
                ErrorCode::Forbidden,
                ErrorCode::TooManyRequests,
                ErrorCode::Internal,
                ErrorCode::ProviderUnavailable,
                ErrorCode::StoreUnavailable,
                ErrorCode::ShuttingDown,
            ],
        };
        Self { id, tag, summary, need, params: Vec::new(), body: None, good: Vec::new(), errors }
    }

    /// With these query parameters.
    pub(crate) fn query<Q: IntoParams>(mut self) -> Self {
        self.params.extend(Q::into_params(|| Some(ParameterIn::Query)));
        self
    }

    /// A cursor of this list has this shape.
    pub(crate) fn cursor(mut self, pattern: &str) -> Self {
        let schema = ObjectBuilder::new().schema_type(SchemaType::Type(Type::String)).pattern(Some(pattern)).build();
        for param in self.params.iter_mut().filter(|param| param.name == "cursor") {
            param.schema = Some(RefOr::T(schema.clone().into()));
        }
        self
    }

    fn header<T: ToSchema>(mut self, name: &str, about: &str) -> Self {
        let schema = Ref::from_schema_name(T::name());
        let param = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Header)
            .required(Required::False)
            .description(Some(about))
            .schema(Some(schema));
        self.params.push(param.build());
        self
    }

    /// The request can be repeated.
    pub(crate) fn repeatable(self) -> Self {
        let op = self.header::<IdempotencyKey>("Idempotency-Key", "Says that two requests are one.");
        op.fails(&[ErrorCode::IdempotencyMismatch])
    }

    /// It is about one sandbox, whose generation may be named.
    pub(crate) fn of_sandbox(self) -> Self {
        let about = "The generation that is meant; another one is answered with 410 `stale_handle`.";
        let op = self.header::<GenerationNumber>("Viv-Generation", about);
        op.fails(&[ErrorCode::NotFound, ErrorCode::StaleHandle, ErrorCode::Gone, ErrorCode::Conflict])
    }

    /// It takes a JSON body.
    pub(crate) fn json<T: ToSchema>(self) -> Self {
        self.takes(vec!["application/json"], Ref::from_schema_name(T::name()).into(), true)
    }

    /// It takes a JSON body, or nothing.
    pub(crate) fn maybe_json<T: ToSchema>(self) -> Self {
        self.takes(vec!["application/json"], Ref::from_schema_name(T::name()).into(), false)
    }

    /// It takes bytes.
    pub(crate) fn bytes(self, media: &'static str) -> Self {
        self.takes(vec![media], binary(), true)
    }

    fn takes(mut self, media: Vec<&'static str>, schema: RefOr<Schema>, required: bool) -> Self {
        self.body = Some((media, schema, required));
        self.fails(&[ErrorCode::RequestTimeout, ErrorCode::PayloadTooLarge, ErrorCode::UnsupportedMedia])
    }

    /// It answers so.
    pub(crate) fn gives<T: ToSchema>(mut self, status: u16, about: &'static str) -> Self {
        self.good.push((status, about, vec![("application/json", Ref::from_schema_name(T::name()).into())]));
        self
    }

    /// It answers with a page of these. Pages are told in full, since all of them have the same name.
    pub(crate) fn gives_page<T: ToSchema>(mut self, about: &'static str) -> Self
    where
        Page<T>: PartialSchema,
    {
        self.good.push((200, about, vec![("application/json", Page::<T>::schema())]));
        self
    }

    /// It answers with nothing but that it is so.
    pub(crate) fn gives_nothing(mut self, about: &'static str) -> Self {
        self.good.push((204, about, Vec::new()));
        self
    }

    /// It answers with bytes, or a stream of lines or events.
    pub(crate) fn gives_stream(mut self, about: &'static str, media: &'static str) -> Self {
        let schema = streamed(media);
        match self.good.iter_mut().find(|(status, ..)| *status == 200) {
            Some((_, _, contents)) => contents.push((media, schema)),
            None => self.good.push((200, about, vec![(media, schema)])),
        }
        self
    }

    /// It answers with the same status by a stream, for who asks for one.
    pub(crate) fn or_streams(mut self, media: &'static str) -> Self {
        let (.., contents) = self.good.last_mut().expect("it answers somehow without a stream");
        contents.push((media, streamed(media)));
        self
    }

    /// It can go wrong so.
    pub(crate) fn fails(mut self, codes: &[ErrorCode]) -> Self {
        self.errors.extend(codes);
        self
    }

    fn operation(self, path: &str) -> OperationBuilder {
        let mut operation = OperationBuilder::new()
            .tag(self.tag)
            .operation_id(Some(self.id))
            .summary(Some(self.summary))
            .parameters(Some(path_params(path).into_iter().chain(self.params)));
        if self.need != Need::Nothing {
            operation = operation.security(SecurityRequirement::new::<_, _, &str>(SECURITY, []));
        }
        if let Some((media, schema, required)) = self.body {
            let required = if required { Required::True } else { Required::False };
            let body = media.into_iter().fold(RequestBodyBuilder::new().required(Some(required)), |body, media| {
                body.content(media, Content::new(Some(schema.clone())))
            });
            operation = operation.request_body(Some(body.build()));
        }
        for (status, about, contents) in self.good {
            let response =
                contents.into_iter().fold(ResponseBuilder::new().description(about), |response, (media, schema)| {
                    response.content(media, ContentBuilder::new().schema(Some(schema)).build())
                });
            operation = operation.response(status.to_string(), response.build());
        }
        let mut codes = self.errors;
        codes.sort();
        codes.dedup();
        let mut statuses: Vec<u16> = codes.iter().map(|code| code.status()).collect();
        statuses.sort_unstable();
        statuses.dedup();
        for status in statuses {
            let of_it = codes.iter().filter(|code| code.status() == status);
            let names: Vec<String> = of_it.clone().map(|code| format!("`{code}`")).collect();
            let body = Content::new(Some(Ref::from_schema_name(ErrorBody::name())));
            let mut response = ResponseBuilder::new().description(names.join(", ")).content("application/json", body);
            if of_it.clone().any(|code| code.retry_after_s().is_some()) {
                let seconds = ObjectBuilder::new().schema_type(SchemaType::Type(Type::Integer));
                let header = HeaderBuilder::new().schema(Some(RefOr::T(Schema::from(seconds.build()))));
                response = response.header("Retry-After", header.description(Some("Seconds to wait.")).build());
            }
            operation = operation.response(status.to_string(), response.build());
        }
        operation
    }
}

/// Lines and events are text, and everything else is bytes.
fn streamed(media: &str) -> RefOr<Schema> {
    if matches!(media, viv_api::header::EVENT_STREAM | viv_api::header::NDJSON) {
        RefOr::T(ObjectBuilder::new().schema_type(SchemaType::Type(Type::String)).into())
    } else {
        binary()
    }
}

fn binary() -> RefOr<Schema> {
    let bytes = ObjectBuilder::new()
        .schema_type(SchemaType::Type(Type::String))
        .format(Some(utoipa::openapi::SchemaFormat::KnownFormat(utoipa::openapi::KnownFormat::Binary)));
    RefOr::T(bytes.into())
}

/// The parameters in the braces of a path.
fn path_params(path: &str) -> Vec<Parameter> {
    let names = path.split('/').filter_map(|segment| segment.strip_prefix('{')?.strip_suffix('}'));
    names
        .map(|name| {
            let (about, schema): (_, RefOr<Schema>) = match name {
                "sandbox" => ("Its id or its name.", Ref::from_schema_name(SandboxRef::name()).into()),
                "snapshot" => ("The snapshot's id.", Ref::from_schema_name(SnapshotRef::name()).into()),
                "lease" => ("The lease's name.", Ref::from_schema_name(LeaseName::name()).into()),
                "schedule" => ("The schedule's id.", Ref::from_schema_name(ScheduleRef::name()).into()),
                "task" => ("The task's id.", Ref::from_schema_name(TaskRef::name()).into()),
                "step" => ("Which step: the first one is 0.", Ref::from_schema_name(StepNumber::name()).into()),
                "webhook" => ("The webhook's id.", Ref::from_schema_name(WebhookRef::name()).into()),
                "key" => ("The key's id.", Ref::from_schema_name(KeyId::name()).into()),
                "execution" => {
                    let id = ObjectBuilder::new()
                        .schema_type(SchemaType::Type(Type::String))
                        .pattern(Some("^exe_[a-z0-9]{1,48}$"))
                        .examples(["exe_01h2xcejqtf2nbrexx3vqjhp41"]);
                    ("The execution's id.", RefOr::T(id.into()))
                }
                other => unreachable!("{other} is in no path of ours"),
            };
            let param = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Path).required(Required::True);
            param.description(Some(about)).schema(Some(schema)).build()
        })
        .collect()
}

/// The table.
pub(crate) struct Api<'s> {
    state: &'s ServerState,
    router: Router<ServerState>,
}

/// What the document is made of.
#[derive(Default)]
pub(crate) struct Documented {
    pub(crate) paths: PathsBuilder,
}

/// Whatever routes are told to.
pub(crate) trait Table {
    /// One more.
    fn on<H, T>(&mut self, method: Method, path: &str, handler: H, op: Op)
    where
        H: Handler<T, ServerState>,
        T: 'static;
}

/// The methods that there are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Method {
    Get,
    Post,
    Put,
    Delete,
}

impl<'s> Api<'s> {
    pub(crate) fn new(state: &'s ServerState) -> Self {
        Self { state, router: Router::new() }
    }

    pub(crate) fn into_router(self) -> Router<ServerState> {
        self.router.fallback(no_such_path).method_not_allowed_fallback(no_such_method)
    }
}

impl Table for Api<'_> {
    fn on<H, T>(&mut self, method: Method, path: &str, handler: H, op: Op)
    where
        H: Handler<T, ServerState>,
        T: 'static,
    {
        let filter = match method {
            Method::Get => MethodFilter::GET,
            Method::Post => MethodFilter::POST,
            Method::Put => MethodFilter::PUT,
            Method::Delete => MethodFilter::DELETE,
        };
        let admit = axum::middleware::from_fn_with_state((self.state.clone(), op.need), authenticate);
        let router = std::mem::take(&mut self.router);
        self.router = router.route(path, on(filter, handler).route_layer(admit));
    }
}

impl Table for Documented {
    fn on<H, T>(&mut self, method: Method, path: &str, _: H, op: Op)
    where
        H: Handler<T, ServerState>,
        T: 'static,
    {
        let method = match method {
            Method::Get => HttpMethod::Get,
            Method::Post => HttpMethod::Post,
            Method::Put => HttpMethod::Put,
            Method::Delete => HttpMethod::Delete,
        };
        let item = PathItem::new(method, op.operation(path));
        let paths = std::mem::take(&mut self.paths);
        self.paths = paths.path(path, item);
    }
}

impl Documented {
    pub(crate) fn into_paths(self) -> Paths {
        self.paths.build()
    }
}
