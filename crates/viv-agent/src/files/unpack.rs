//! stub
use crate::agent::Agent;
use crate::agent::serve::Next;
use crate::conn::Conn;
use crate::error::error;
use viv_agent::proto::{ErrorCode, Fence};
pub(crate) fn put(
    _a: &Agent,
    conn: &Conn,
    _f: &Fence,
    _p: &str,
    _b: viv_core::file::ArchiveBounds,
) -> std::io::Result<Next> {
    conn.reply(Err(error(ErrorCode::Unsupported, "not yet")))?;
    Ok(Next::Request)
}
