//! stub
use crate::agent::serve::Next;
use crate::conn::Conn;
use crate::error::error;
use viv_agent::proto::ErrorCode;
pub(crate) fn dial(conn: &Conn, _port: u16) -> std::io::Result<Next> {
    conn.reply(Err(error(ErrorCode::Unsupported, "not yet")))?;
    Ok(Next::Request)
}
