//! A copy that is complete or not there.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rusqlite::Connection;
use rusqlite::backup::{Backup, StepResult};
use tokio::sync::oneshot;

use super::{Result, connect, failure, sync_folder};
use crate::error::StoreError;

/// Copies to a name beside the target, which it gets when all of it is on disk.
pub(super) async fn backup(from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (from.to_owned(), to.to_owned());
    let (sender, answer) = oneshot::channel();
    // A thread of its own: it takes as long as the file is large, and readers are not to wait for it.
    let work = move || drop(sender.send(copy_and_name(&from, &to)));
    let spawned = std::thread::Builder::new().name("viv-store-copy".to_owned()).spawn(work);
    spawned.map_err(|error| StoreError::Unavailable { what: format!("there is no thread to be had: {error}") })?;
    answer.await.map_err(|_| StoreError::Unavailable { what: "the copy was given up".to_owned() })?
}

fn copy_and_name(from: &Path, to: &Path) -> Result<()> {
    let mut partial = to.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let done = copy(from, &partial).and_then(|()| {
        std::fs::rename(&partial, to).map_err(|error| failure::io("the copy cannot be named", to, &error))
    });
    if done.is_err() {
        // What could not be finished is of no use; that it cannot be removed either changes nothing about that.
        let _ = std::fs::remove_file(&partial);
    }
    done.and_then(|()| sync_folder(to))
}

fn copy(from: &Path, partial: &Path) -> Result<()> {
    let failed = |error: std::io::Error| failure::io("the copy cannot be written:", partial, &error);
    match std::fs::remove_file(partial) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        Ok(()) | Err(_) => {}
    }
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(partial).map_err(failed)?;
    let source = connect(from)?;
    let mut target = Connection::open(partial)?;
    // It is synced once, below.
    target.pragma_update(None, "synchronous", "OFF")?;
    // All in one step: it reads one snapshot, so it neither stops the writer nor begins again whenever that writes.
    match Backup::new(&source, &mut target)?.step(-1)? {
        StepResult::Done => {}
        other => return Err(StoreError::Unavailable { what: format!("the copy ended as {other:?}") }),
    }
    drop(target);
    file.sync_all().map_err(failed)
}
