//! What shows that an instance is whole, and where its parts are (T2, T3, T8).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use tokio::io::AsyncReadExt;
use viv_agent::proto::{AGENT, AGENT_LOG, ECHO_VERB, IDENTITY, Identity};
use viv_core::exec::ExecSpec;
use viv_provider::{InstanceRef, LogPart, ProviderError, Whereabouts};

use super::agent_client::ANSWER_WITHIN_MS;
use super::{LocalProvider, Result, unavailable, within};
use crate::durable;
use crate::layout::InstanceDir;
use crate::process::ProcessIdentity;
use crate::rootfs;
use crate::shim::ShimIdentity;
use crate::wait::readable_within;

/// An identity is two short words.
const IDENTITY_BYTES_MAX: u64 = 4096;

/// Most that is read of one log at a time, whatever is asked for.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// The agent's own program is in every sandbox, also in one whose image holds no other.
pub(super) fn spec(nonce: &str) -> ExecSpec {
    viv_provider::probe([AGENT, ECHO_VERB, nonce].map(str::to_owned).to_vec())
}

impl LocalProvider {
    pub(super) async fn read_identity(&self, instance: &InstanceRef) -> Result<Identity> {
        let found = match self.read_file(instance, IDENTITY, 0, Some(IDENTITY_BYTES_MAX)).await {
            Err(ProviderError::NotFound { what } | ProviderError::Conflict { what }) => {
                return Err(ProviderError::Failed { what: format!("the identity file cannot be read: {what}") });
            }
            found => found?,
        };
        let mut text = Vec::new();
        let read = async {
            found.take(IDENTITY_BYTES_MAX).read_to_end(&mut text).await.map_err(|source| ProviderError::Failed {
                what: format!("the identity file cannot be read to its end: {source}"),
            })
        };
        within(ANSWER_WITHIN_MS, "the agent", read).await?;
        let identity = serde_json::from_slice(&text)
            .map_err(|error| ProviderError::Failed { what: format!("the identity file holds no identity: {error}") })?;
        let instance = instance.clone();
        self.blocking(move |this| this.need_root(&instance)).await?;
        Ok(identity)
    }

    /// The container has a mount of its own, on which nothing shows when the shim's is taken away: files are copied
    /// and saved through that one.
    fn need_root(&self, instance: &InstanceRef) -> Result<()> {
        let dir = self.dir(&instance.sandbox);
        let Some(shim) = living_shim(&dir).map_err(unavailable(&dir.identity()))? else {
            // It ended just now; that is for others to tell.
            return Ok(());
        };
        match rootfs::mounted_root(shim) {
            Ok(Some(root)) if root.is_mounted => Ok(()),
            Ok(_) => Err(ProviderError::Failed { what: "its root filesystem is not mounted any more".to_owned() }),
            // Not being allowed to look shows nothing (T7).
            Err(_) => Ok(()),
        }
    }

    pub(super) async fn find_parts(&self, instance: &InstanceRef) -> Result<Whereabouts> {
        let instance = instance.clone();
        self.blocking(move |this| {
            let record = this.need_record(&instance)?;
            let dir = this.dir(&instance.sandbox);
            let shim = living_shim(&dir).map_err(unavailable(&dir.identity()))?;
            let first = durable::read_json(&dir.first()).map_err(unavailable(&dir.first()))?;
            let agent = living(first.as_ref()).map_err(unavailable(&dir.first()))?;
            let root = shim.and_then(|shim| rootfs::mounted_root(shim).ok().flatten());
            let cgroups = this.cgroups(&record);
            Ok(Whereabouts {
                supervisor_pid: shim,
                agent_pid: agent,
                root: root.map(|root| shown(&root.at)),
                root_view: agent.map(|pid| format!("/proc/{pid}/root")),
                cgroups: cgroups.folders().filter(|folder| folder.exists()).map(|folder| shown(&folder)).collect(),
                folder: Some(shown(dir.path())),
            })
        })
        .await
    }

    pub(super) async fn read_logs(&self, instance: &InstanceRef, bytes_max: u64) -> Result<Vec<LogPart>> {
        let instance = instance.clone();
        self.blocking(move |this| {
            this.need_record(&instance)?;
            let dir = this.dir(&instance.sandbox);
            let mut parts = Vec::new();
            for (name, path) in [("shim", dir.log()), ("agent", dir.run().join(AGENT_LOG))] {
                let text = tail(&path, bytes_max.min(LOG_BYTES_MAX)).map_err(unavailable(&path))?;
                if !text.is_empty() {
                    parts.push(LogPart { name: name.to_owned(), text });
                }
            }
            Ok(parts)
        })
        .await
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn living_shim(dir: &InstanceDir) -> io::Result<Option<u32>> {
    let identity = durable::read_json::<ShimIdentity>(&dir.identity())?;
    living(identity.map(|identity| identity.shim).as_ref())
}

/// The pid of a process, if it is still that one's and it has not ended.
fn living(identity: Option<&ProcessIdentity>) -> io::Result<Option<u32>> {
    let Some(identity) = identity else { return Ok(None) };
    let Some(pidfd) = identity.open()? else { return Ok(None) };
    Ok((!readable_within(&pidfd, Duration::ZERO)?).then_some(identity.pid))
}

/// The last whole lines of a log, which those inside may have written; nothing when there is none.
fn tail(path: &Path, bytes_max: u64) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let mut file = match open(path, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(String::new()),
        opened => File::from(opened?),
    };
    let found = fstat(&file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a regular file"));
    }
    // One more than wanted, to know whether a line begins there.
    let start = found.st_size.cast_unsigned().saturating_sub(bytes_max.saturating_add(1));
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok(whole_lines(&bytes, bytes_max as usize))
}

/// The end of a text from the first line on that fits whole; a line that is too long by itself is cut.
fn whole_lines(bytes: &[u8], bytes_max: usize) -> String {
    let text = String::from_utf8_lossy(bytes);
    if text.len() <= bytes_max {
        return text.into_owned();
    }
    let mut from = text.len() - bytes_max;
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let begins_line = text.as_bytes()[from - 1] == b'\n';
    let rest = &text[from..];
    match rest.find('\n') {
        Some(end) if !begins_line && end + 1 < rest.len() => rest[end + 1..].to_owned(),
        Some(_) | None => rest.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_is_of_whole_lines_and_never_longer_than_asked() {
        assert_eq!(whole_lines(b"one\ntwo\n", 8), "one\ntwo\n");
        assert_eq!(whole_lines(b"one\ntwo\n", 7), "two\n");
        assert_eq!(whole_lines(b"one\ntwo\n", 4), "two\n");
        assert_eq!(whole_lines(b"one\ntwo\n", 3), "wo\n", "a line that is too long is cut");
        assert_eq!(whole_lines(b"one\n", 0), "");
        assert!(whole_lines(&[0xff; 9], 8).len() <= 8);
    }

    #[test]
    fn a_tail_follows_no_links() {
        let folder = tempfile::tempdir().unwrap();
        let (log, link) = (folder.path().join("log"), folder.path().join("link"));
        assert_eq!(tail(&log, 10).unwrap(), "");
        std::fs::write(&log, "first\nsecond\n").unwrap();
        assert_eq!(tail(&log, 10).unwrap(), "second\n");
        assert_eq!(tail(&log, 100).unwrap(), "first\nsecond\n");
        std::os::unix::fs::symlink(&log, &link).unwrap();
        assert!(tail(&link, 10).is_err());
    }
}
