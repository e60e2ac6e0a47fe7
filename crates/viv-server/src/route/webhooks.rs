//! Webhooks: subscriptions to the journal (O6).

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use viv_api::bound::{EventKinds, Labels, Note, SandboxRef, SecretOverlapMs, Sequence, WebhookRef, WebhookUrl};
use viv_api::error::ErrorCode;
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::{ListDeliveries, PageQuery};
use viv_api::subscription::{
    ChangeSubscription, CreateSubscription, CreatedSubscription, EventDelivery, ReplayEvents, Replayed, RotateSecret,
    Subscription, TriedSubscription,
};
use viv_core::WebhookId;
use viv_core::spec::Project;
use viv_core::subscription::{self as core, ROTATION_MS_DEFAULT};
use viv_engine::{NewSubscription, SubscriptionChange, destination};
use viv_store::{Cursor, LetterQuery, Replay, Standing, SubscriptionQuery};

use super::page_limit;
use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::{Json, MaybeJson, Params, Query};
use crate::refusal::{Answer, forbidden, invalid};
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, need, summary| Op::new("webhooks", id, need, summary);
    let create_op = op("createWebhook", Need::Change, "Have events sent to a URL")
        .json::<CreateSubscription>()
        .gives::<CreatedSubscription>(201, "The webhook, with its secret this once.")
        .fails(&[ErrorCode::NotFound, ErrorCode::QuotaExceeded, ErrorCode::Gone]);
    table.on(Method::Post, path::WEBHOOKS, create, create_op);
    let list_op = op("listWebhooks", Need::Read, "List webhooks, oldest first")
        .query::<PageQuery>()
        .cursor("^whk_[a-z0-9]{1,48}$")
        .gives_page::<Subscription>("A page of them.");
    table.on(Method::Get, path::WEBHOOKS, list, list_op);
    let one = |id, need, summary| op(id, need, summary).fails(&[ErrorCode::NotFound]);
    let get_op = one("getWebhook", Need::Read, "Look at a webhook").gives::<Subscription>(200, "The webhook.");
    table.on(Method::Get, path::WEBHOOK, get, get_op);
    let change_op = one("changeWebhook", Need::Change, "Change a webhook, switch it on or off")
        .json::<ChangeSubscription>()
        .gives::<Subscription>(200, "The webhook as it is now.");
    table.on(Method::Put, path::WEBHOOK, change, change_op);
    let remove_op = one("removeWebhook", Need::Change, "Take a webhook away, with what it has not sent")
        .gives_nothing("It is gone.");
    table.on(Method::Delete, path::WEBHOOK, remove, remove_op);
    let rotate_op = one("rotateWebhook", Need::Change, "Give a webhook another secret")
        .maybe_json::<RotateSecret>()
        .gives::<CreatedSubscription>(200, "The webhook, with its new secret this once.");
    table.on(Method::Post, path::WEBHOOK_ROTATE, rotate, rotate_op);
    let replay_op = one("replayWebhook", Need::Change, "Send dead letters, or everything after a place, once more")
        .maybe_json::<ReplayEvents>()
        .gives::<Replayed>(202, "They are on their way.");
    table.on(Method::Post, path::WEBHOOK_REPLAY, replay, replay_op);
    let test_op = one("testWebhook", Need::Change, "Send a test, once and now")
        .gives::<TriedSubscription>(200, "What came of it.");
    table.on(Method::Post, path::WEBHOOK_TEST, test, test_op);
    let deliveries_op =
        one("listWebhookDeliveries", Need::Read, "List events that wait, or dead letters, oldest first")
            .query::<ListDeliveries>()
            .cursor("^[0-9]{1,15}$")
            .gives_page::<EventDelivery>("A page of them.");
    table.on(Method::Get, path::WEBHOOK_DELIVERIES, deliveries, deliveries_op);
}

/// A webhook as it is shown.
fn shown((row, standing): &(core::Subscription, Standing)) -> Subscription {
    Subscription {
        id: row.id.clone(),
        project: row.project.as_ref().map(ToString::to_string),
        destination: destination(&row.url),
        note: row.note.clone(),
        kinds: row.kinds.clone(),
        sandbox: row.sandbox.clone(),
        labels: row.labels.clone(),
        enabled: row.enabled,
        created_at_ms: row.made_at_ms,
        created_by: row.made_by.to_string(),
        secret_before_until_ms: row.secret_before.as_ref().map(|(_, until_ms)| *until_ms),
        after: standing.cursor.0,
        waiting: standing.waiting,
        dead: standing.dead,
    }
}

fn with_secret(found: &(core::Subscription, Standing)) -> CreatedSubscription {
    CreatedSubscription { webhook: shown(found), secret: found.0.secret.reveal().to_owned() }
}

/// Refuses what leads nowhere.
fn checked(url: &WebhookUrl) -> Answer<String> {
    let uri = url.as_str().parse::<Uri>().ok().filter(|uri| uri.host().is_some_and(|host| !host.is_empty()));
    let wrong = || invalid("that is no URL of the web", "https://example.com/hook is one");
    uri.map(|_| url.to_string()).ok_or_else(wrong)
}

fn kinds(kinds: &EventKinds) -> Vec<String> {
    kinds.get().iter().map(ToString::to_string).collect()
}

fn project_of(caller: &Caller, body: &CreateSubscription) -> Answer<Option<Project>> {
    let wanted: Option<Project> = body.project.clone().map(Into::into);
    let of_another = caller.sees().is_some_and(|own| wanted.as_ref().is_some_and(|wanted| wanted != own));
    if (body.all_projects || of_another) && !caller.is_admin() {
        return Err(forbidden("this key sees one project", "leave project and all_projects out"));
    }
    if body.all_projects && wanted.is_some() {
        return Err(invalid("of one project, or of all", "leave project or all_projects out"));
    }
    Ok(if body.all_projects { None } else { Some(wanted.unwrap_or_else(|| caller.project())) })
}

async fn create(State(state): State<ServerState>, caller: Caller, Json(body): Json<CreateSubscription>) -> Answer {
    let project = project_of(&caller, &body)?;
    let sandbox = match &body.sandbox {
        None => None,
        Some(named) => Some(sandbox_of(&state, &caller, named).await?),
    };
    let new = NewSubscription {
        project,
        url: checked(&body.url)?,
        note: body.note.as_ref().map(Note::to_string),
        kinds: kinds(&body.kinds),
        sandbox,
        labels: body.labels.to_map(),
        after: body.after.map(Sequence::get),
    };
    let (engine, by) = (state.engine().clone(), caller.actor());
    let made = regardless(async move { engine.create_subscription(new, by).await }).await?;
    Ok(show::json(StatusCode::CREATED, &with_secret(&made)))
}

async fn sandbox_of(state: &ServerState, caller: &Caller, named: &SandboxRef) -> Answer<viv_core::SandboxId> {
    let (project, which) = crate::extract::found(state, caller, named).await?;
    Ok(state.engine().get(&project, &which, "webhooks").await?.sandbox.id)
}

async fn list(State(state): State<ServerState>, caller: Caller, Query(query): Query<PageQuery>) -> Answer {
    let wrong = || invalid("there is no page after that", "give what the page before gave as next");
    let after = query.cursor.map(|cursor| cursor.as_str().parse::<WebhookId>().map_err(|_| wrong())).transpose()?;
    let asked = SubscriptionQuery { project: caller.sees().cloned(), after, limit: page_limit(query.limit) };
    let found = state.engine().subscriptions(&asked).await?;
    let items = found.items.iter().map(shown).collect();
    Ok(show::ok(&Page { items, next: found.next.map(|next| next.to_string()) }))
}

/// The webhook that is meant, if the caller may see it.
async fn found(state: &ServerState, caller: &Caller, params: &Params) -> Answer<(core::Subscription, Standing)> {
    let id: WebhookRef = params.get("webhook")?;
    Ok(state.engine().subscription(caller.sees(), &id.id()).await?)
}

async fn get(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    Ok(show::ok(&shown(&found(&state, &caller, &params).await?)))
}

async fn change(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    Json(body): Json<ChangeSubscription>,
) -> Answer {
    let id = found(&state, &caller, &params).await?.0.id;
    let change = SubscriptionChange {
        url: body.url.as_ref().map(checked).transpose()?,
        note: body.note.as_ref().map(Note::to_string),
        kinds: body.kinds.as_ref().map(kinds),
        labels: body.labels.as_ref().map(Labels::to_map),
        enabled: body.enabled,
    };
    let (engine, by) = (state.engine().clone(), caller.actor());
    let changed = regardless(async move { engine.change_subscription(&id, &change, by).await }).await?;
    Ok(show::ok(&shown(&changed)))
}

async fn remove(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    let id = found(&state, &caller, &params).await?.0.id;
    let (engine, by) = (state.engine().clone(), caller.actor());
    regardless(async move { engine.remove_subscription(&id, by).await }).await?;
    Ok(show::nothing())
}

async fn rotate(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    MaybeJson(body): MaybeJson<RotateSecret>,
) -> Answer {
    let id = found(&state, &caller, &params).await?.0.id;
    let overlap_ms = body.overlap_ms.map_or(ROTATION_MS_DEFAULT, SecretOverlapMs::get);
    let (engine, by) = (state.engine().clone(), caller.actor());
    let rotated = regardless(async move { engine.rotate_subscription(&id, overlap_ms, by).await }).await?;
    Ok(show::ok(&with_secret(&rotated)))
}

async fn replay(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    MaybeJson(body): MaybeJson<ReplayEvents>,
) -> Answer {
    let id = found(&state, &caller, &params).await?.0.id;
    let what = match (body.after, body.seq) {
        (Some(_), Some(_)) => {
            return Err(invalid("one dead letter, or everything after a place", "leave after or seq out"));
        }
        (Some(after), None) => Replay::After(Cursor(after.get())),
        (None, Some(seq)) => Replay::One(Cursor(seq.get())),
        (None, None) => Replay::Dead,
    };
    let (engine, by, of) = (state.engine().clone(), caller.actor(), id.clone());
    let revived = regardless(async move { engine.replay(&of, what, by).await }).await?;
    let webhook = shown(&state.engine().subscription(None, &id).await?);
    Ok(show::json(StatusCode::ACCEPTED, &Replayed { webhook, revived }))
}

async fn test(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    let id = found(&state, &caller, &params).await?.0.id;
    let why = state.engine().try_subscription(&id, caller.actor()).await?;
    Ok(show::ok(&TriedSubscription { taken: why.is_none(), why }))
}

async fn deliveries(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    Query(query): Query<ListDeliveries>,
) -> Answer {
    let of = found(&state, &caller, &params).await?.0.id;
    let wrong = || invalid("there is no page after that", "give what the page before gave as next");
    let after = query.cursor.map(|cursor| cursor.as_str().parse().map_err(|_| wrong())).transpose()?.unwrap_or(0);
    let limit = page_limit(query.limit);
    // One more than is asked for tells whether there is more.
    let asked = LetterQuery { of: of.clone(), dead: query.dead, after: Cursor(after), limit: limit + 1 };
    let letters = state.engine().letters(&asked).await?;
    let more = letters.len() > limit;
    let items: Vec<EventDelivery> = letters.iter().take(limit).map(|letter| delivery(&of, letter)).collect();
    let next = items.last().filter(|_| more).map(|last| last.seq.to_string());
    Ok(show::ok(&Page { items, next }))
}

fn delivery(of: &WebhookId, letter: &core::Letter) -> EventDelivery {
    EventDelivery {
        seq: letter.cursor,
        delivery: letter.id(of),
        sandbox: letter.sandbox.clone(),
        since_at_ms: letter.since_ms,
        attempts: letter.attempts,
        next_at_ms: letter.dead_at_ms.is_none().then_some(letter.next_at_ms),
        last_error: letter.why.clone(),
        dead_at_ms: letter.dead_at_ms,
    }
}
