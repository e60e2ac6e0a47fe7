//! Keys: make, list, revoke. For keys of the installation.

use axum::extract::State;
use axum::http::StatusCode;
use viv_api::bound::KeyId;
use viv_api::error::{ApiError, ErrorCode};
use viv_api::key::{CreateKey, CreatedKey, Key, Scope};
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::PageQuery;
use viv_core::spec::Project;
use viv_store::{ApiKey, KeyScope};

use super::page_limit;

use crate::api::{Method, Op, Table};
use crate::auth::{Caller, KeyError, Need};
use crate::extract::{Json, Params, Query};
use crate::refusal::{Answer, Refusal, internal, invalid};
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, summary| Op::new("keys", id, Need::Admin, summary);
    let create_op = op("createKey", "Make a key")
        .json::<CreateKey>()
        .gives::<CreatedKey>(201, "The key, with its secret this once.")
        .fails(&[ErrorCode::QuotaExceeded]);
    table.on(Method::Post, path::KEYS, create, create_op);
    let list_op = op("listKeys", "List keys, oldest first")
        .query::<PageQuery>()
        .cursor("^[0-9]{1,15}\\.key_[a-z0-9]{1,48}$")
        .gives_page::<Key>("A page of them.");
    table.on(Method::Get, path::KEYS, list, list_op);
    let revoke_op = op("revokeKey", "Make a key of no use, for ever")
        .gives::<Key>(200, "The key.")
        .fails(&[ErrorCode::NotFound, ErrorCode::Conflict]);
    table.on(Method::Delete, path::KEY, revoke, revoke_op);
}

impl From<KeyError> for Refusal {
    fn from(error: KeyError) -> Self {
        match error {
            KeyError::Store(error) => error.into(),
            KeyError::Random(error) => internal(&error.to_string()),
            KeyError::TooMany => {
                let message = error.to_string();
                Self(ApiError::new(ErrorCode::QuotaExceeded, message).hint("revoke what is not used: viv key ls"))
            }
        }
    }
}

async fn create(State(state): State<ServerState>, caller: Caller, Json(body): Json<CreateKey>) -> Answer {
    let project: Project = body.project.map_or_else(|| caller.project(), Into::into);
    let scope = match body.scope {
        Scope::Admin => KeyScope::Admin,
        Scope::Project => KeyScope::Project { project },
        Scope::ReadOnly => KeyScope::ReadOnly { project },
    };
    let lifetime_ms = body.lifetime_ms.map(viv_api::bound::KeyLifetimeMs::get);
    let (making, name, by) = (state.clone(), body.name, caller.actor());
    let made = regardless(async move {
        let engine = making.engine();
        let place = (engine.store().as_ref(), engine.epoch());
        making.keys().make(place, (name.as_str(), scope, lifetime_ms), by, engine.now_ms()).await
    });
    let made = made.await?;
    let created = CreatedKey { key: show::key(&state, &made.key), secret: made.secret };
    Ok(show::json(StatusCode::CREATED, &created))
}

async fn list(State(state): State<ServerState>, Query(query): Query<PageQuery>) -> Answer {
    let mut keys = state.engine().store().keys().await?;
    let place = |key: &ApiKey| (key.created_at_ms, key.id.clone());
    keys.sort_by_key(place);
    let after = match &query.cursor {
        None => None,
        Some(cursor) => {
            let parts = cursor.as_str().split_once('.');
            let parsed = parts.and_then(|(at_ms, id)| Some((at_ms.parse().ok()?, KeyId::new(id).ok()?.to_string())));
            let wrong = || invalid("there is no page after that", "give what the page before gave as next");
            Some(parsed.ok_or_else(wrong)?)
        }
    };
    let mut rest = keys.iter().filter(|key| after.as_ref().is_none_or(|after| place(key) > *after));
    let part: Vec<&ApiKey> = rest.by_ref().take(page_limit(query.limit)).collect();
    let more = rest.next().is_some();
    let next = part.last().filter(|_| more).map(|last| format!("{}.{}", last.created_at_ms, last.id));
    Ok(show::ok(&Page { items: part.into_iter().map(|key| show::key(&state, key)).collect(), next }))
}

async fn revoke(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    let id: KeyId = params.get("key")?;
    if caller.key.id == id.as_str() {
        let error = ApiError::new(ErrorCode::Conflict, "a key cannot revoke itself");
        return Err(Refusal(error.hint("use another key, so that one is left that works")));
    }
    let (revoking, by, name) = (state.clone(), caller.actor(), id.to_string());
    let revoked = regardless(async move {
        let engine = revoking.engine();
        revoking.keys().revoke((engine.store().as_ref(), engine.epoch()), &name, by, engine.now_ms()).await
    });
    let key = revoked.await?.ok_or_else(|| {
        Refusal(ApiError::not_found(format!("the key {id}")).hint("viv key ls lists those that there are"))
    })?;
    Ok(show::ok(&show::key(&state, &key)))
}
