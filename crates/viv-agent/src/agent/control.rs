//! The supervisor's connection: what comes with it, and what its loss means.
//!
//! ```text
//!   never had ──control──► present ──lost──► the end of everything
//!                             │ ▲
//!                     quiesce │ │ control
//!                             ▼ │
//!                          allowed to be away ──window passed──► the end of everything
//! ```

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use viv_agent::frame::{self, HEADER_BYTES, Kind};
use viv_agent::proto::{AgentMessage, Answer, ControlMessage, Descriptor, ErrorCode};

use crate::agent::{Agent, Deadline, lock};
use crate::conn::Conn;
use crate::error::{Result, error, invalid, say};
use crate::exec::cgroup::Cgroup;

/// Longest control message; they hold a number.
const MESSAGE_BYTES_MAX: usize = 4096;

/// The supervisor's connection, as far as other threads know it.
#[derive(Default)]
pub(crate) struct Control {
    slot: Mutex<Slot>,
}

#[derive(Default)]
struct Slot {
    link: Link,
    cgroup: Option<Arc<Cgroup>>,
    oom_events: Option<Arc<OwnedFd>>,
}

#[derive(Default)]
enum Link {
    #[default]
    Never,
    /// Accepted; the main thread has yet to take it over.
    Coming(Arc<UnixStream>),
    Present(Arc<UnixStream>),
    /// Lost on purpose: it may come again until then.
    Away(Deadline),
}

impl Control {
    /// A control connection came. From here on the main thread has it.
    pub(crate) fn accept(
        &self,
        agent: &Agent,
        conn: &Conn,
        kinds: &[Descriptor],
        descriptors: Vec<OwnedFd>,
    ) -> Result<()> {
        if kinds.len() != descriptors.len() {
            return Err(invalid(format!("{} descriptors were named and {} came", kinds.len(), descriptors.len())));
        }
        let mut slot = lock(&self.slot);
        if matches!(slot.link, Link::Coming(_) | Link::Present(_)) {
            return Err(error(ErrorCode::Conflict, "there is a control connection already"));
        }
        (slot.cgroup, slot.oom_events) = (None, None);
        for (kind, descriptor) in kinds.iter().zip(descriptors) {
            match kind {
                Descriptor::Cgroup => match Cgroup::adopt(descriptor, agent.config.keeper_id) {
                    Ok(cgroup) => slot.cgroup = Some(Arc::new(cgroup)),
                    Err(cause) => say(&format!("the cgroup is of no use, killing by subreaper: {cause}")),
                },
                Descriptor::OomEvents => slot.oom_events = Some(Arc::new(descriptor)),
            }
        }
        // It is none of the connections that a quiesce ends as a matter of course: its end must be allowed first.
        agent.connections.leave(conn.stream());
        slot.link = Link::Coming(Arc::clone(conn.stream()));
        agent.wake.ring();
        Ok(())
    }

    /// The cgroup in which executions get their own.
    pub(crate) fn cgroup(&self) -> Option<Arc<Cgroup>> {
        lock(&self.slot).cgroup.clone()
    }

    /// How often the kernel killed for memory, where that can be known.
    pub(crate) fn oom_kills(&self) -> Option<u64> {
        let file = lock(&self.slot).oom_events.clone()?;
        let mut text = [0; 1024];
        let length = rustix::io::pread(&file, &mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..length]).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    /// Lets the connection be lost for a while, and closes what a checkpoint could not keep.
    pub(crate) fn go_away(&self, window_ms: u64) {
        let mut slot = lock(&self.slot);
        (slot.cgroup, slot.oom_events) = (None, None);
        if let Link::Present(stream) | Link::Coming(stream) = &slot.link {
            // The main thread sees it closed, and finds that this was allowed.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            slot.link = Link::Away(Deadline::after(window_ms));
        }
    }

    /// Tells the supervisor that something could not be shown to have ended. Without one to tell,
    /// there is nobody who could end the sandbox but us.
    pub(crate) fn report_unverifiable(&self, agent: &Agent, what: &str) {
        let link = match &lock(&self.slot).link {
            Link::Present(stream) | Link::Coming(stream) => Some(Arc::clone(stream)),
            Link::Away(_) => None,
            Link::Never => return,
        };
        let message = AgentMessage::Unverifiable { what: what.to_owned() };
        let sent = link.map(|stream| Conn::new(stream).send(&message));
        if !matches!(sent, Some(Ok(()))) {
            agent.end_everything(&format!("{what} could not be shown to have ended, and nobody is there to be told"));
        }
    }
}

/// The main thread's end of the control connection.
#[derive(Default)]
pub(crate) struct MainEnd {
    link: Option<Arc<UnixStream>>,
    inbox: Vec<u8>,
}

/// What reading the control connection came to.
enum Inbox {
    Dry,
    Closed,
}

impl MainEnd {
    /// To be polled.
    pub(crate) fn link(&self) -> Option<&Arc<UnixStream>> {
        self.link.as_ref()
    }

    /// Takes over a connection that came, hears what was said, and notices a loss.
    ///
    /// Runs before deadlines are looked at, so that a thaw moves them first (L13).
    pub(crate) fn attend(&mut self, agent: &Agent) {
        self.take_over(agent);
        let Some(stream) = self.link.clone() else { return };
        match self.read(agent, &stream) {
            Ok(Inbox::Dry) => {}
            Ok(Inbox::Closed) | Err(_) => self.lost(agent),
        }
    }

    fn take_over(&mut self, agent: &Agent) {
        let mut slot = lock(&agent.control.slot);
        if let Link::Coming(stream) = &slot.link {
            let stream = Arc::clone(stream);
            // From now on the death of the supervisor is ours even if the socket should survive it.
            if let Err(cause) = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)) {
                say(&format!("no parent-death signal: {cause}"));
            }
            let greeted = Conn::new(Arc::clone(&stream)).reply(Ok(Answer::Hello(agent.hello())));
            if let Err(cause) = greeted.and_then(|()| stream.set_nonblocking(true)) {
                say(&format!("the control connection broke at once: {cause}"));
            }
            slot.link = Link::Present(Arc::clone(&stream));
            self.inbox.clear();
            self.link = Some(stream);
        }
    }

    fn read(&mut self, agent: &Agent, stream: &UnixStream) -> std::io::Result<Inbox> {
        let mut buf = [0; 1024];
        loop {
            match (&*stream).read(&mut buf) {
                Ok(0) => return Ok(Inbox::Closed),
                Ok(count) => self.inbox.extend_from_slice(&buf[..count]),
                Err(cause) if cause.kind() == std::io::ErrorKind::WouldBlock => return Ok(Inbox::Dry),
                Err(cause) if cause.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(cause) => return Err(cause),
            }
            while let Some((message, length)) = first_message(&self.inbox)? {
                if let Some(message) = message {
                    obey(agent, &message);
                }
                self.inbox.drain(..length);
            }
        }
    }

    fn lost(&mut self, agent: &Agent) {
        self.link = None;
        let slot = lock(&agent.control.slot);
        match slot.link {
            Link::Away(_) | Link::Coming(_) => {
                // The parent may change while we are away.
                let _ = rustix::process::set_parent_process_death_signal(None);
            }
            Link::Never | Link::Present(_) => agent.end_everything("the supervisor is gone"),
        }
    }

    /// What is left of being away; ends everything when nothing is.
    pub(crate) fn check_away(agent: &Agent) -> Option<std::time::Duration> {
        let mut slot = lock(&agent.control.slot);
        let Link::Away(deadline) = &mut slot.link else { return None };
        let left = deadline.left();
        if left.is_zero() {
            agent.end_everything("the supervisor did not come back");
        }
        Some(left)
    }
}

/// The first whole frame of the inbox with its length: its message, or `None` if that is not known here.
fn first_message(inbox: &[u8]) -> std::io::Result<Option<(Option<ControlMessage>, usize)>> {
    let Some((header, rest)) = inbox.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let bad = |what: String| std::io::Error::new(std::io::ErrorKind::InvalidData, what);
    let (kind, length) = frame::decode_header(*header).map_err(|cause| bad(cause.to_string()))?;
    if kind != Kind::Json || length > MESSAGE_BYTES_MAX {
        return Err(bad("not a control message".to_owned()));
    }
    Ok(rest.get(..length).map(|payload| {
        let message = serde_json::from_slice(payload);
        if let Err(cause) = &message {
            say(&format!("skipped a control message: {cause}"));
        }
        (message.ok(), HEADER_BYTES + length)
    }))
}

fn obey(agent: &Agent, message: &ControlMessage) {
    match message {
        ControlMessage::Token(token) => agent.fencing.raise(*token),
        ControlMessage::Thawing { frozen_ms } => agent.executions.postpone_deadlines(*frozen_ms),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_come_in_pieces() {
        let payload = br#"{"thawing":{"frozen_ms":5,"later":1}}"#;
        let whole = [frame::encode_header(Kind::Json, payload.len()).as_slice(), payload].concat();
        for cut in 0..whole.len() {
            assert!(first_message(&whole[..cut]).unwrap().is_none());
        }
        let (message, length) = first_message(&whole).unwrap().unwrap();
        assert_eq!((message, length), (Some(ControlMessage::Thawing { frozen_ms: 5 }), whole.len()));
        let unknown = [frame::encode_header(Kind::Json, 7).as_slice(), b"\"dance\""].concat();
        assert!(matches!(first_message(&unknown), Ok(Some((None, 12)))));
        assert!(first_message(&frame::encode_header(Kind::Data, 1)).is_err());
    }
}
