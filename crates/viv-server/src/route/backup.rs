//! A copy of what is recorded, for keys of the installation.

use axum::extract::State;
use tokio::fs;
use viv_api::error::{ApiError, ErrorCode};
use viv_api::header::BYTES;
use viv_api::path;

use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::refusal::{Answer, Refusal};
use crate::state::ServerState;
use crate::stream::bytes;

/// What a copy is called until it is open: after a crash the next one takes its place.
const NAME: &str = "copy.db";

pub(super) fn tell(table: &mut impl Table) {
    let op = Op::new("daemon", "getBackup", Need::Admin, "A copy of what is recorded, of one moment")
        .gives_stream("A file of SQLite.", BYTES)
        .fails(&[ErrorCode::Unsupported]);
    table.on(Method::Get, path::BACKUP, backup, op);
}

async fn backup(State(state): State<ServerState>, caller: Caller) -> Answer {
    let Some(folder) = state.copies() else {
        let refused = ApiError::new(ErrorCode::Unsupported, "this daemon keeps no file that could be copied");
        return Err(Refusal(refused.hint("ask one that was started by viv serve")));
    };
    let path = folder.join(NAME);
    // One after the other: they have the same name until they are open.
    let one = state.one_copy().await;
    state.engine().backup(&path, caller.actor()).await?;
    let opened = fs::File::open(&path).await;
    // Open, it needs no name: nothing is left of it, however this ends.
    let removed = fs::remove_file(&path).await;
    drop(one);
    match (opened, removed) {
        (Ok(file), Ok(())) => Ok(bytes(BYTES, Box::new(file))),
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(component = "server", %error, "a copy of the store cannot be read");
            let failed = ApiError::new(ErrorCode::StoreUnavailable, "the copy cannot be read");
            Err(Refusal(failed.hint("viv logs --daemon says why")))
        }
    }
}
