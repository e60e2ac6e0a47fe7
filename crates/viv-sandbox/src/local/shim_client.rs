//! Asking a shim.

use std::io::{self, BufRead, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use viv_provider::InstanceRef;

use super::socket;
use crate::layout::InstanceDir;
use crate::shim::proto::{LINE_BYTES_MAX, ShimError, ShimReply, ShimRequest};

/// How long a shim may take to stop everything, or to let it run and have the agent back.
const HOLD_WITHIN: Duration = Duration::from_secs(40);

/// One request, one reply. For `Wait`, the reply is the end.
pub(super) async fn ask(dir: &InstanceDir, request: &ShimRequest) -> io::Result<ShimReply> {
    let mut stream = socket::connect(&dir.socket()).await?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    let mut reply = Vec::new();
    BufReader::new(stream).take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut reply).await?;
    if reply.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&reply)?)
}

/// An instance that stands still until this is dropped.
pub(super) struct Held {
    stream: io::BufReader<UnixStream>,
    /// The folder that holds the parts of its writable layer.
    pub(super) writable: PathBuf,
}

impl Held {
    /// Has a shim hold its instance, for no longer than said.
    pub(super) fn take(dir: &InstanceDir, instance: &InstanceRef, for_ms: u64) -> io::Result<Result<Self, ShimError>> {
        Self::ask_for(dir, &ShimRequest::Hold { instance: instance.clone(), for_ms }, HOLD_WITHIN)
    }

    /// The same by a request that takes longer.
    pub(super) fn ask_for(
        dir: &InstanceDir,
        request: &ShimRequest,
        within: Duration,
    ) -> io::Result<Result<Self, ShimError>> {
        let stream = socket::connect_blocking(&dir.socket())?;
        stream.set_read_timeout(Some(within))?;
        let mut stream = io::BufReader::new(stream);
        let reply = exchange(&mut stream, request)?;
        stream.get_ref().set_read_timeout(Some(HOLD_WITHIN))?;
        match reply {
            ShimReply::Held { writable } => Ok(Ok(Self { stream, writable })),
            ShimReply::Error(error) => Ok(Err(error)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Lets it run on, and answers whether it stood still all the time.
    pub(super) fn release(mut self) -> io::Result<Result<(), ShimError>> {
        match exchange(&mut self.stream, &ShimRequest::Release)? {
            ShimReply::Done => Ok(Ok(())),
            ShimReply::Error(error) => Ok(Err(error)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn exchange(stream: &mut io::BufReader<UnixStream>, request: &ShimRequest) -> io::Result<ShimReply> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.get_mut().write_all(&line)?;
    let mut reply = Vec::new();
    stream.take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut reply)?;
    if reply.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&reply)?)
}
