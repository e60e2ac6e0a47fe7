//! What comes with a request, checked where it is read. What nobody knows is refused (S5).

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use serde::Serialize;
use serde::de::DeserializeOwned;
use viv_api::bound::{GenerationNumber, IdempotencyKey, SandboxRef};
use viv_api::error::{ApiError, ErrorCode};
use viv_core::lifecycle::Sandbox;
use viv_core::spec::Project;
use viv_core::{Generation, SandboxId};
use viv_engine::{Aim, EngineError, Gate, Which};

use crate::auth::Caller;
use crate::body::whole;
use crate::refusal::{Answer, Refusal, gone, invalid};
use crate::state::ServerState;

/// Who reads, when nothing was said.
const CLIENT_DEFAULT: &str = "api";

/// Longest name of a client that is kept.
const CLIENT_CHARS_MAX: usize = 64;

/// Query parameters.
#[derive(Debug)]
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<ServerState> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &ServerState) -> Answer<Self> {
        let text = parts.uri.query().unwrap_or_default();
        // A parser of forms takes an empty value for none; whoever writes one means something else.
        if let Some(pair) = text.split('&').find(|pair| pair.ends_with('=') && !pair.is_empty()) {
            let name = pair.trim_end_matches('=');
            return Err(invalid(format!("the parameter {name} has no value"), "leave it out, or give it one"));
        }
        serde_html_form::from_str(text).map(Self).map_err(|error| {
            invalid(format!("the query is wrong: {error}"), "/v1/openapi.json tells which parameters there are")
        })
    }
}

/// A JSON body.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

/// A JSON body that may be left out, which is all defaults.
#[derive(Debug)]
pub(crate) struct MaybeJson<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequest<ServerState> for Json<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &ServerState) -> Answer<Self> {
        let (headers, body) = split(request);
        if !is_json(&headers) {
            return Err(unsupported_media("application/json"));
        }
        let bytes = whole(body, &headers, state.bounds().json_bytes_max, state.bounds()).await?;
        parse(&bytes).map(Self)
    }
}

impl<T: DeserializeOwned + Default + Send> FromRequest<ServerState> for MaybeJson<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &ServerState) -> Answer<Self> {
        let (headers, body) = split(request);
        let bytes = whole(body, &headers, state.bounds().json_bytes_max, state.bounds()).await?;
        if bytes.is_empty() && !headers.contains_key(header::CONTENT_TYPE) {
            return Ok(Self(T::default()));
        }
        if !is_json(&headers) {
            return Err(unsupported_media("application/json"));
        }
        parse(&bytes).map(Self)
    }
}

fn split(request: Request) -> (HeaderMap, Body) {
    let (parts, body) = request.into_parts();
    (parts.headers, body)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Answer<T> {
    viv_api::request::parse(bytes).map_err(|error| {
        let hint = error.hint.clone().unwrap_or_else(|| "/v1/openapi.json tells what is taken".to_owned());
        Refusal(error.hint(hint))
    })
}

/// Whether the body says that it is of this type; parameters do not matter.
pub(crate) fn has_type(headers: &HeaderMap, wanted: &str) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    given.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(wanted)
}

fn is_json(headers: &HeaderMap) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let charset = given.to_ascii_lowercase();
    let charset = charset.split_once("charset=").map(|(_, charset)| charset.trim_matches('"').trim().to_owned());
    has_type(headers, "application/json") && charset.is_none_or(|charset| charset == "utf-8")
}

/// It comes in a form that is not taken.
pub(crate) fn unsupported_media(wanted: &str) -> Refusal {
    let error = ApiError::new(ErrorCode::UnsupportedMedia, format!("the body must be {wanted}"));
    Refusal(error.hint(format!("send Content-Type: {wanted}")))
}

/// Parameters in the path, by name.
#[derive(Debug)]
pub(crate) struct Params(Vec<(String, String)>);

impl FromRequestParts<ServerState> for Params {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &ServerState) -> Answer<Self> {
        let raw = RawPathParams::from_request_parts(parts, state).await;
        let raw = raw.map_err(|error| invalid(error.to_string(), "percent-encode the path as UTF-8"))?;
        Ok(Self(raw.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()))
    }
}

impl Params {
    /// One of them, parsed.
    pub(crate) fn get<T: std::str::FromStr<Err: std::fmt::Display>>(&self, name: &str) -> Answer<T> {
        let text = self.0.iter().find(|(given, _)| given == name).map_or("", |(_, value)| value.as_str());
        text.parse().map_err(|error: T::Err| {
            let error = ApiError::invalid(name, format!("in the path: {error}"));
            Refusal(error.hint("/v1/openapi.json tells what it looks like"))
        })
    }
}

/// The key under which a request can be repeated.
#[derive(Debug)]
pub(crate) struct Repeatable(pub(crate) Option<IdempotencyKey>);

impl FromRequestParts<ServerState> for Repeatable {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &ServerState) -> Answer<Self> {
        header_value(&parts.headers, viv_api::header::IDEMPOTENCY_KEY).map(Self)
    }
}

fn header_value<T: std::str::FromStr<Err: std::fmt::Display>>(headers: &HeaderMap, name: &str) -> Answer<Option<T>> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let wrong = |error: String| {
        let error = ApiError::invalid(name, format!("the header {name}: {error}"));
        Refusal(error.hint("/v1/openapi.json tells what it looks like"))
    };
    let text = value.to_str().map_err(|_| wrong("visible ASCII characters only".to_owned()))?;
    text.parse().map(Some).map_err(|error: T::Err| wrong(error.to_string()))
}

/// A hash of a body, whatever the order of its fields and the space between them.
pub(crate) fn body_hash(body: &impl Serialize) -> [u8; 32] {
    // A map in a JSON value is ordered by its keys.
    let value = serde_json::to_value(body).unwrap_or_default();
    *blake3::hash(value.to_string().as_bytes()).as_bytes()
}

/// The sandbox that a request is about.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) caller: Caller,
    /// In which project it is looked for.
    pub(crate) project: Project,
    /// Which is meant.
    pub(crate) which: Which,
    /// Who reads (T8).
    pub(crate) client: String,
    /// The generation in the header.
    generation: Option<GenerationNumber>,
}

impl FromRequestParts<ServerState> for Target {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &ServerState) -> Answer<Self> {
        let caller = Caller::from_request_parts(parts, state).await?;
        let named: SandboxRef = Params::from_request_parts(parts, state).await?.get("sandbox")?;
        let generation = header_value(&parts.headers, viv_api::header::GENERATION)?;
        let client = parts.headers.get(viv_api::header::CLIENT).and_then(|value| value.to_str().ok());
        let client = client.unwrap_or(CLIENT_DEFAULT).chars().take(CLIENT_CHARS_MAX).collect();
        let (project, which) = found(state, &caller, &named).await?;
        Ok(Self { caller, project, which, client, generation })
    }
}

/// Where a sandbox is looked for, and by what. Who sees all projects finds an id in every one, a name in the default.
pub(crate) async fn found(state: &ServerState, caller: &Caller, named: &SandboxRef) -> Answer<(Project, Which)> {
    match named.named() {
        viv_api::bound::Named::Name(name) => Ok((caller.project(), Which::Name(name.into()))),
        viv_api::bound::Named::Id(id) if caller.is_admin() => {
            let record = state.engine().store().get(&id).await?;
            Ok((record.map_or_else(Project::default, |record| record.project), Which::Id(id)))
        }
        viv_api::bound::Named::Id(id) => Ok((caller.project(), Which::Id(id))),
    }
}

impl Target {
    /// The same caller, about this sandbox by its id: whichever generation of it there is.
    pub(crate) fn of(self, sandbox: SandboxId) -> Self {
        Self { which: Which::Id(sandbox), generation: None, ..self }
    }

    /// The generation that is meant, by the query or the header. When the two differ, one of them is stale.
    pub(crate) async fn generation(
        &self,
        state: &ServerState,
        query: Option<GenerationNumber>,
    ) -> Answer<Option<Generation>> {
        if let (Some(query), Some(header)) = (query, self.generation)
            && query != header
        {
            let record = self.find(state).await?;
            for asked in [query, header] {
                check_generation(state, &record, Some(asked.into()))?;
            }
        }
        Ok(query.or(self.generation).map(Into::into))
    }

    async fn find(&self, state: &ServerState) -> Answer<Sandbox> {
        let store = state.engine().store();
        let (found, which) = match &self.which {
            Which::Id(id) => (store.get(id).await?, id.to_string()),
            Which::Name(name) => (store.find(&self.project, name).await?, name.to_string()),
        };
        let found = found.filter(|found| found.project == self.project);
        Ok(found.ok_or(EngineError::NotFound { which })?)
    }

    /// The record, of the generation that is meant: to be looked at. What is to be done about it takes an aim.
    pub(crate) async fn record(&self, state: &ServerState, query: Option<GenerationNumber>) -> Answer<Sandbox> {
        self.aimed(state, query).await.map(|(record, _)| record)
    }

    /// The record as it is now, and what a verb about it is aimed at. Another generation may be there when the verb is
    /// carried out, so the one that was named goes with it, and is compared once more where it is (T5).
    pub(crate) async fn aimed(&self, state: &ServerState, query: Option<GenerationNumber>) -> Answer<(Sandbox, Aim)> {
        let generation = self.generation(state, query).await?;
        let record = self.find(state).await?;
        check_generation(state, &record, generation)?;
        let aim = Aim::at(record.id.clone(), generation);
        Ok((record, aim))
    }

    /// The same of a sandbox that is not over.
    pub(crate) async fn living(&self, state: &ServerState, query: Option<GenerationNumber>) -> Answer<Aim> {
        let (record, aim) = self.aimed(state, query).await?;
        if record.deleted || record.is_over() {
            return Err(gone(&record.id, &record.cause));
        }
        Ok(aim)
    }
}

fn check_generation(state: &ServerState, record: &Sandbox, asked: Option<Generation>) -> Answer<()> {
    let gates = &state.engine().config().gates;
    match asked {
        Some(asked)
            if asked != record.generation && gates.is_on(Gate::GenerationCheck, &record.project, &record.id) =>
        {
            Err(ApiError::stale_handle(asked, record.generation, record.cause.cause.code()).into())
        }
        Some(_) | None => Ok(()),
    }
}
