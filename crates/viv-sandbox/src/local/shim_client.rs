//! Asking a shim.

use std::io;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

use super::socket;
use crate::layout::InstanceDir;
use crate::shim::proto::{LINE_BYTES_MAX, ShimReply, ShimRequest};

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
