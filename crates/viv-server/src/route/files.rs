//! Files: read, write, list, stat, move, make, remove, watch, and many at once as an archive. Contents are streamed.

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use viv_api::bound::{FileMode, GenerationNumber, Offset, Path};
use viv_api::error::ErrorCode;
use viv_api::file::{FileChange, FileListing, FileStat, MakeDir, MoveFile, Unpacked};
use viv_api::header::{BYTES, EVENT_STREAM, TAR};
use viv_api::path;
use viv_api::query::{ListFiles, OfGeneration, PathQuery, ReadFile, WatchFiles, WriteFile};
use viv_core::file::ArchiveBounds;
use viv_engine::Handle;
use viv_provider::FileWrite;

use super::executions::USUAL;
use crate::api::{Method, Op, Table};
use crate::auth::Need;
use crate::body::Upload;
use crate::extract::{Json, Query, Target, has_type, unsupported_media};
use crate::refusal::{Answer, forbidden};
use crate::show;
use crate::state::ServerState;
use crate::stream::{UntilEnd, bytes, comment, event, pieces, regardless};

/// What is the sandbox's own: its identity, the agent and what that keeps (S3).
const OWN: &str = ".vivarium";

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, need, summary| Op::new("files", id, need, summary).of_sandbox().fails(&USUAL);
    let look = |id, summary| op(id, Need::Read, summary);
    let change = |id, summary| op(id, Need::Change, summary).fails(&[ErrorCode::QuotaExceeded]);
    let read_op = look("readFile", "Read a file").query::<ReadFile>().gives_stream("Its content.", BYTES);
    table.on(Method::Get, path::FILES, read, read_op);
    let write_op = change("writeFile", "Replace a file")
        .query::<WriteFile>()
        .bytes(BYTES)
        .gives::<FileStat>(200, "What stands there now.");
    table.on(Method::Put, path::FILES, write, write_op);
    let remove_op =
        change("removeFile", "Remove a path with all below it").query::<PathQuery>().gives_nothing("It is not there.");
    table.on(Method::Delete, path::FILES, remove, remove_op);
    let list_op =
        look("listFiles", "List a directory").query::<ListFiles>().gives::<FileListing>(200, "What is in it.");
    table.on(Method::Get, path::FILES_LIST, list, list_op);
    let stat_op =
        look("statFile", "What stands at a path").query::<PathQuery>().gives::<FileStat>(200, "What stands there.");
    table.on(Method::Get, path::FILES_STAT, stat, stat_op);
    let move_op = change("moveFile", "Move a path, replacing what is there")
        .query::<OfGeneration>()
        .json::<MoveFile>()
        .gives_nothing("It is there.");
    table.on(Method::Post, path::FILES_MOVE, rename, move_op);
    let mkdir_op = change("makeDirectory", "Make a directory and those above it")
        .query::<OfGeneration>()
        .json::<MakeDir>()
        .gives_nothing("It is there.");
    table.on(Method::Post, path::FILES_MKDIR, mkdir, mkdir_op);
    let watch_op = look("watchFiles", "Changes below a directory, as they happen")
        .query::<WatchFiles>()
        .gives_stream("One FileChange in each event.", EVENT_STREAM)
        .fails(&[ErrorCode::Unsupported, ErrorCode::QuotaExceeded]);
    table.on(Method::Get, path::FILES_WATCH, watch, watch_op);
    let pack_op = look("getArchive", "Many files at once").query::<PathQuery>().gives_stream("A tar archive.", TAR);
    table.on(Method::Get, path::ARCHIVE, pack, pack_op);
    let unpack_op = change("putArchive", "Unpack a tar archive into a directory")
        .query::<PathQuery>()
        .bytes(TAR)
        .gives::<Unpacked>(200, "What was made.");
    table.on(Method::Put, path::ARCHIVE, unpack, unpack_op);
}

/// Whether a path names what is the sandbox's own. Links are not seen here: that nothing of it is changed through one,
/// the agent sees to.
fn is_own(path: &str) -> bool {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.first() == Some(&OWN)
}

/// Refuses paths that are not for everybody.
fn check(target: &Target, paths: &[&Path]) -> Answer<()> {
    match paths.iter().find(|path| is_own(path.as_str())) {
        Some(_) if !target.caller.is_admin() => {
            Err(forbidden("this belongs to the sandbox itself", "keep files elsewhere, below /workspace for instance"))
        }
        Some(_) | None => Ok(()),
    }
}

async fn to_look(
    state: &ServerState,
    target: &Target,
    generation: Option<GenerationNumber>,
    path: &Path,
) -> Answer<Handle> {
    check(target, &[path])?;
    let generation = target.generation(state, generation).await?;
    let handle = state.engine().look_into(&target.project, &target.which, generation).await?;
    state.tally().filed(handle.sandbox());
    Ok(handle)
}

async fn to_change(
    state: &ServerState,
    target: &Target,
    generation: Option<GenerationNumber>,
    paths: &[&Path],
) -> Answer<Handle> {
    check(target, paths)?;
    let generation = target.generation(state, generation).await?;
    let handle = state.engine().work_in(&target.project, &target.which, generation).await?;
    state.tally().filed(handle.sandbox());
    Ok(handle.used_by(target.caller.actor()))
}

async fn read(State(state): State<ServerState>, target: Target, Query(query): Query<ReadFile>) -> Answer {
    let handle = to_look(&state, &target, query.generation, &query.path).await?;
    let offset = query.offset.map_or(0, Offset::get);
    let content = handle.file_read(query.path.as_str(), offset, query.length.map(Offset::get)).await?;
    Ok(bytes(BYTES, content))
}

async fn write(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<WriteFile>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    if !has_type(&headers, BYTES) {
        return Err(unsupported_media(BYTES));
    }
    let bounds = state.bounds();
    let (upload, content) = Upload::new(body, &headers, bounds.file_bytes_max, bounds.body_idle)?;
    let handle = to_change(&state, &target, query.generation, &[&query.path]).await?;
    let file = FileWrite {
        path: query.path.to_string(),
        mode: query.mode.as_ref().map(FileMode::bits),
        user: query.user.map(|user| user.to_string()),
    };
    let stat = upload.explain(handle.file_write(&file, content).await)?;
    Ok(show::ok(&FileStat::from(stat)))
}

async fn remove(State(state): State<ServerState>, target: Target, Query(query): Query<PathQuery>) -> Answer {
    let handle = to_change(&state, &target, query.generation, &[&query.path]).await?;
    regardless(async move { handle.file_remove(query.path.as_str()).await }).await?;
    Ok(show::nothing())
}

async fn list(State(state): State<ServerState>, target: Target, Query(query): Query<ListFiles>) -> Answer {
    let handle = to_look(&state, &target, query.generation, &query.path).await?;
    let depth = query.depth.map_or(1, |depth| depth.get() as u32);
    let listing = handle.file_list(query.path.as_str(), depth).await?;
    Ok(show::ok(&FileListing::from(listing)))
}

async fn stat(State(state): State<ServerState>, target: Target, Query(query): Query<PathQuery>) -> Answer {
    let handle = to_look(&state, &target, query.generation, &query.path).await?;
    let stat = handle.file_stat(query.path.as_str()).await?;
    Ok(show::ok(&FileStat::from(stat)))
}

async fn rename(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    Json(body): Json<MoveFile>,
) -> Answer {
    let handle = to_change(&state, &target, query.generation, &[&body.from, &body.to]).await?;
    regardless(async move { handle.file_move(body.from.as_str(), body.to.as_str()).await }).await?;
    Ok(show::nothing())
}

async fn mkdir(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    Json(body): Json<MakeDir>,
) -> Answer {
    let handle = to_change(&state, &target, query.generation, &[&body.path]).await?;
    regardless(async move { handle.file_mkdir(body.path.as_str()).await }).await?;
    Ok(show::nothing())
}

async fn watch(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<WatchFiles>,
    until_end: UntilEnd,
) -> Answer {
    let handle = to_look(&state, &target, query.generation, &query.path).await?;
    let mut source = handle.file_watch(query.path.as_str(), query.recursive).await?;
    let alive = (state.bounds().heartbeat, comment);
    Ok(pieces(EVENT_STREAM, alive, until_end, |out| async move {
        // The reader knows from this that nothing that happens from now on is missed.
        let mut given = out.give(comment()).await;
        while given.is_ok()
            && let Ok(Some(change)) = source.next().await
        {
            given = out.give(event(None, "change", &FileChange::from(change))).await;
        }
    }))
}

async fn pack(State(state): State<ServerState>, target: Target, Query(query): Query<PathQuery>) -> Answer {
    let handle = to_look(&state, &target, query.generation, &query.path).await?;
    Ok(bytes(TAR, handle.archive_get(query.path.as_str()).await?))
}

async fn unpack(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<PathQuery>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    if !has_type(&headers, TAR) {
        return Err(unsupported_media(TAR));
    }
    let bounds = state.bounds();
    let (upload, archive) = Upload::new(body, &headers, bounds.archive_bytes_max, bounds.body_idle)?;
    let handle = to_change(&state, &target, query.generation, &[&query.path]).await?;
    let unpacked = handle.archive_put(query.path.as_str(), ArchiveBounds::default(), archive).await;
    Ok(show::ok(&Unpacked::from(upload.explain(unpacked)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s3_what_is_the_sandboxs_own_is_seen_by_whatever_name() {
        for own in
            ["/.vivarium", "/.vivarium/", "//.vivarium/run", "/./.vivarium", "/a/../.vivarium/x", "/../.vivarium"]
        {
            assert!(is_own(own), "{own}");
        }
        for other in ["/", "/workspace", "/.vivarium2", "/a/.vivarium", "/.vivarium/../etc"] {
            assert!(!is_own(other), "{other}");
        }
    }
}
