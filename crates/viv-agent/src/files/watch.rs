//! stub
use crate::agent::Agent;
use crate::agent::serve::Next;
use crate::conn::Conn;
use crate::error::error;
use viv_agent::proto::ErrorCode;
pub(crate) fn watch(_a: &Agent, conn: &Conn, _p: &str, _r: bool) -> std::io::Result<Next> {
    conn.reply(Err(error(ErrorCode::Unsupported, "not yet")))?;
    Ok(Next::Request)
}
