//! One connection: frames in, frames out, descriptors beside a request.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde::Serialize;
use viv_agent::frame::{self, ChunkHeader, HEADER_BYTES, Kind};
use viv_agent::proto::{Answer, ErrorCode, Reply};

use crate::error::{Result, error};

/// More descriptors than any request brings; the kernel closes what does not fit.
const DESCRIPTORS_MAX: usize = 4;

/// A frame that came in.
pub(crate) enum Frame {
    /// A message where none was expected; what it says does not matter.
    Json,
    /// So many bytes were put into the caller's buffer.
    Data(usize),
    End,
}

/// A connection. Its peer is the supervisor or the daemon; workloads cannot reach the socket.
pub(crate) struct Conn {
    stream: Arc<UnixStream>,
}

impl Conn {
    pub(crate) fn new(stream: Arc<UnixStream>) -> Self {
        Self { stream }
    }

    pub(crate) fn stream(&self) -> &Arc<UnixStream> {
        &self.stream
    }

    /// The next request's JSON with the descriptors that came along; `None` when the peer is done.
    pub(crate) fn read_request(&self) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let mut descriptors = Vec::new();
        let mut header = [0; HEADER_BYTES];
        if !self.receive(&mut header, &mut descriptors)? {
            return Ok(None);
        }
        let (kind, length) = frame::decode_header(header).map_err(invalid_data)?;
        if kind != Kind::Json {
            return Err(invalid_data("a request is JSON"));
        }
        let mut payload = vec![0; length];
        if !self.receive(&mut payload, &mut descriptors)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Some((payload, descriptors)))
    }

    /// Fills `buf`; false when the peer closed before its first byte.
    fn receive(&self, buf: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<bool> {
        let mut done = 0;
        while done < buf.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let parts = &mut [IoSliceMut::new(&mut buf[done..])];
            let message = match rustix::net::recvmsg(&self.stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) => message,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for ancillary in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
                    descriptors.extend(rights.take(DESCRIPTORS_MAX.saturating_sub(descriptors.len())));
                }
            }
            match message.bytes {
                0 if done == 0 => return Ok(false),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                bytes => done += bytes,
            }
        }
        Ok(true)
    }

    /// The next frame of an upload; data goes into `buf`, which grows to at most one frame.
    pub(crate) fn read_frame(&self, buf: &mut Vec<u8>) -> io::Result<Frame> {
        let mut header = [0; HEADER_BYTES];
        (&*self.stream).read_exact(&mut header)?;
        let (kind, length) = frame::decode_header(header).map_err(invalid_data)?;
        match kind {
            Kind::Json => {
                io::copy(&mut (&*self.stream).take(length as u64), &mut io::sink())?;
                Ok(Frame::Json)
            }
            Kind::Data => {
                buf.resize(buf.len().max(length), 0);
                (&*self.stream).read_exact(&mut buf[..length])?;
                Ok(Frame::Data(length))
            }
            Kind::End => Ok(Frame::End),
        }
    }

    pub(crate) fn send<T: Serialize>(&self, message: &T) -> io::Result<()> {
        let payload = serde_json::to_vec(message)?;
        if payload.len() > frame::JSON_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "a message longer than a frame"));
        }
        self.send_parts(&[&frame::encode_header(Kind::Json, payload.len()), &payload])
    }

    /// Answers. An answer that no frame holds becomes an error: the connection has done nothing wrong.
    pub(crate) fn reply(&self, result: Result<Answer>) -> io::Result<()> {
        let reply = match result {
            Ok(answer) => Reply::Ok(answer),
            Err(error) => Reply::Error(error),
        };
        match self.send(&reply) {
            Err(cause) if cause.kind() == io::ErrorKind::FileTooLarge => {
                self.send(&Reply::Error(error(ErrorCode::Exhausted, "the answer is longer than a frame")))
            }
            sent => sent,
        }
    }

    pub(crate) fn send_data(&self, data: &[u8]) -> io::Result<()> {
        self.send_parts(&[&frame::encode_header(Kind::Data, data.len()), data])
    }

    pub(crate) fn send_chunk(&self, header: &ChunkHeader, data: &[u8]) -> io::Result<()> {
        let length = ChunkHeader::BYTES + data.len();
        self.send_parts(&[&frame::encode_header(Kind::Data, length), &header.encode(), data])
    }

    pub(crate) fn send_end(&self) -> io::Result<()> {
        self.send_parts(&[&frame::encode_header(Kind::End, 0)])
    }

    fn send_parts(&self, parts: &[&[u8]]) -> io::Result<()> {
        let mut slices: [IoSlice<'_>; 3] = [IoSlice::new(&[]); 3];
        for (slice, part) in slices.iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        let mut rest = &mut slices[..];
        // Empty slices go first, so that a write of nothing is not taken for a closed peer.
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            match (&*self.stream).write_vectored(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => IoSlice::advance_slices(&mut rest, count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn invalid_data(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use viv_core::file::{FileKind, FileStat};

    use super::*;

    #[test]
    fn an_answer_that_is_too_long_is_an_error_and_not_the_end() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let conn = Conn::new(Arc::new(ours));
        let stat = FileStat {
            kind: FileKind::Symlink,
            size_bytes: 0,
            mode: 0,
            uid: 0,
            gid: 0,
            modified_at_ms: 0,
            link_target: Some("x".repeat(frame::JSON_BYTES_MAX)),
        };
        conn.reply(Ok(Answer::Stat(stat))).unwrap();
        conn.reply(Ok(Answer::Done)).unwrap();
        let theirs = Conn::new(Arc::new(theirs));
        let next = || serde_json::from_slice(&theirs.read_request().unwrap().unwrap().0).unwrap();
        let Reply::Error(refusal) = next() else { panic!("no error") };
        assert_eq!(refusal.code, ErrorCode::Exhausted);
        assert!(matches!(next(), Reply::Ok(Answer::Done)));
    }
}
