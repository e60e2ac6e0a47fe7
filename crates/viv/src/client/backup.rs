//! `viv backup`

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use super::Daemon;
use super::progress::Waiting;
use crate::text::bytes;

/// Copy what the daemon has recorded, of one moment, while it works
///
/// The file holds all records, the journal and the hashes of keys; what sandboxes and snapshots are made of is not in
/// it. docs/store.md says how it is put back.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to; what is there is replaced when all of the copy is written
    file: PathBuf,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut name = args.file.clone().into_os_string();
    name.push(".partial");
    let partial = PathBuf::from(name);
    let size_bytes = {
        let _waiting = Waiting::on("copying what is recorded");
        let copied = copy(daemon, &partial).and_then(|size_bytes| {
            fs::rename(&partial, &args.file)?;
            Ok(size_bytes)
        });
        if copied.is_err() {
            // Half a copy is of no use.
            let _ = fs::remove_file(&partial);
        }
        copied.with_context(|| format!("cannot write {}", args.file.display()))?
    };
    let file = args.file.display().to_string();
    daemon.answer(&serde_json::json!({ "file": file, "size_bytes": size_bytes }), || {
        format!("{} in {file}", bytes(size_bytes))
    })
}

fn copy(daemon: &Daemon, partial: &PathBuf) -> anyhow::Result<u64> {
    let mut download = daemon.client.backup()?;
    // Environments of sandboxes are in it: it is nobody else's to read.
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(partial)?;
    let size_bytes = io::copy(&mut download, &mut file)?;
    file.sync_all()?;
    Ok(size_bytes)
}
