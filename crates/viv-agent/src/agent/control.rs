//! The supervisor's connection: what comes with it, and what its loss means.
//!
//! ```text
//!   never had ──control──► present ──lost──► the end of everything
//!                             │ ▲
//!                     quiesce │ │ control
//!                             ▼ │
//!      PID 1 begins ──► allowed to be away ──window passed──► the end of everything
//! ```
//!
//! While it is away, the clocks of executions stand still.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use viv_agent::frame::{self, HEADER_BYTES, Kind};
use viv_agent::proto::{AgentMessage, Answer, ControlMessage, Descriptor, ErrorCode};
use viv_core::ExecutionId;

use crate::agent::{Agent, lock};
use crate::conn::Conn;
use crate::error::{Result, error, invalid, say};
use crate::exec::cgroup::Cgroup;
use crate::sys;

/// Longest control message; they hold a number.
const MESSAGE_BYTES_MAX: usize = 4096;

/// How long PID 1 waits for its first control connection. A supervisor makes
/// it at once; one that died before would leave us behind for good.
const FIRST_WINDOW_MS: u64 = 60_000;

/// While away, how often the main thread looks at the clock: often enough to tell a standstill.
const LOOK_EVERY_MS: u64 = 1000;

/// Looks this much later than asked for were not late, but we did not run: we
/// were checkpointed or stopped. Even a crowded machine is not that slow.
const STANDSTILL_MS: u64 = 2000;

/// What the supervisor gets to come back after a standstill, however long that was.
const GRACE_MS: u64 = 5000;

/// The supervisor's connection, as far as other threads know it.
pub(crate) struct Control {
    slot: Mutex<Slot>,
}

struct Slot {
    link: Link,
    cgroup: Option<Arc<Cgroup>>,
    oom_events: Option<Arc<OwnedFd>>,
    /// What the supervisor understands beside what every one does.
    hears: Vec<String>,
}

enum Link {
    /// Not needed either: somebody else ends us.
    Never,
    /// Accepted; the main thread has yet to take it over, and to set the clocks if there was none for a while.
    Coming(Arc<UnixStream>, Option<Away>),
    Present(Arc<UnixStream>),
    /// Lost on purpose, or not there yet: it may come until the window ends.
    Away(Away),
}

/// Being without supervisor, in milliseconds of the boot clock.
///
/// That clock may be set back, when we are restored from a checkpoint.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "units come last in every name")]
struct Away {
    since_ms: u64,
    window_ms: u64,
    until_ms: u64,
    looked_at_ms: u64,
}

impl Away {
    fn new(now_ms: u64, window_ms: u64) -> Self {
        Self { since_ms: now_ms, window_ms, until_ms: now_ms.saturating_add(window_ms), looked_at_ms: now_ms }
    }

    /// What is left of the window.
    fn look(&mut self, now_ms: u64) -> std::time::Duration {
        let passed_ms = now_ms.checked_sub(self.looked_at_ms);
        if passed_ms.is_none() {
            self.until_ms = self.until_ms.min(now_ms.saturating_add(self.window_ms));
        }
        if passed_ms.is_none_or(|passed_ms| passed_ms > LOOK_EVERY_MS + STANDSTILL_MS) {
            self.until_ms = self.until_ms.max(now_ms.saturating_add(GRACE_MS));
        }
        self.looked_at_ms = now_ms;
        std::time::Duration::from_millis(self.until_ms.saturating_sub(now_ms))
    }
}

impl Control {
    /// PID 1 cannot be without for long: nobody else would end it.
    pub(crate) fn new(is_init: bool) -> Self {
        let link = if is_init { Link::Away(Away::new(sys::boot_ms(), FIRST_WINDOW_MS)) } else { Link::Never };
        Self { slot: Mutex::new(Slot { link, cgroup: None, oom_events: None, hears: Vec::new() }) }
    }

    /// A control connection came. From here on the main thread has it.
    pub(crate) fn accept(
        &self,
        agent: &Agent,
        conn: &Conn,
        kinds: &[Descriptor],
        hears: Vec<String>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<()> {
        if kinds.len() != descriptors.len() {
            return Err(invalid(format!("{} descriptors were named and {} came", kinds.len(), descriptors.len())));
        }
        let mut slot = lock(&self.slot);
        let away = match slot.link {
            Link::Never => None,
            Link::Away(away) => Some(away),
            Link::Coming(..) | Link::Present(_) => {
                return Err(error(ErrorCode::Conflict, "there is a control connection already"));
            }
        };
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
        slot.hears = hears;
        // It is none of the connections that a quiesce ends as a matter of course: its end must be allowed first.
        agent.connections.leave(conn.stream());
        slot.link = Link::Coming(Arc::clone(conn.stream()), away);
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
        let (stream, since) = match &slot.link {
            Link::Present(stream) => (stream, None),
            // It was away before, and the clocks were not set since.
            Link::Coming(stream, away) => (stream, *away),
            Link::Never | Link::Away(_) => return,
        };
        // The main thread sees it closed, and finds that this was allowed.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        let away = Away::new(sys::boot_ms(), window_ms);
        slot.link = Link::Away(Away { since_ms: since.map_or(away.since_ms, |since| since.since_ms), ..away });
    }

    /// Whether the clocks of executions run. Not while the supervisor is away, nor before the main
    /// thread has set them after that.
    pub(crate) fn clocks_run(&self) -> bool {
        match lock(&self.slot).link {
            Link::Never | Link::Present(_) | Link::Coming(_, None) => true,
            Link::Away(_) | Link::Coming(_, Some(_)) => false,
        }
    }

    /// Tells a supervisor who wants to know it that an execution was killed for memory. It is no loss if he does not
    /// hear it: the execution's own status says so too.
    pub(crate) fn report_oom_kill(&self, execution: &ExecutionId, pid: Option<u32>) {
        let slot = lock(&self.slot);
        let Link::Present(stream) = &slot.link else { return };
        if slot.hears.iter().any(|heard| heard == AgentMessage::OOM_KILLED) {
            let message = AgentMessage::OomKilled { execution: execution.clone(), pid };
            let _ = Conn::new(Arc::clone(stream)).send(&message);
        }
    }

    /// Tells the supervisor that something could not be shown to have ended. Without one to tell,
    /// there is nobody who could end the sandbox but us.
    pub(crate) fn report_unverifiable(&self, agent: &Agent, what: &str) {
        let link = match &lock(&self.slot).link {
            Link::Present(stream) | Link::Coming(stream, _) => Some(Arc::clone(stream)),
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
        if let Link::Coming(stream, away) = &slot.link {
            let (stream, away) = (Arc::clone(stream), *away);
            // From now on the death of the supervisor is ours even if the socket should survive it.
            if let Err(cause) = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)) {
                say(&format!("no parent-death signal: {cause}"));
            }
            let greeted = Conn::new(Arc::clone(&stream)).reply(Ok(Answer::Hello(agent.hello())));
            if let Err(cause) = greeted.and_then(|()| stream.set_nonblocking(true)) {
                say(&format!("the control connection broke at once: {cause}"));
            }
            slot.link = Link::Present(Arc::clone(&stream));
            drop(slot);
            if let Some(away) = away {
                agent.executions.postpone_deadlines_away(sys::boot_ms().saturating_sub(away.since_ms));
            }
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
            Link::Away(_) | Link::Coming(..) => {
                // The parent may change while we are away.
                let _ = rustix::process::set_parent_process_death_signal(None);
            }
            Link::Never | Link::Present(_) => agent.end_everything("the supervisor is gone"),
        }
    }

    /// When to look again while away; ends everything when the window is over.
    pub(crate) fn check_away(agent: &Agent) -> Option<std::time::Duration> {
        let mut slot = lock(&agent.control.slot);
        let Link::Away(away) = &mut slot.link else { return None };
        let left = away.look(sys::boot_ms());
        if left.is_zero() {
            agent.end_everything("the supervisor did not come back");
        }
        Some(left.min(std::time::Duration::from_millis(LOOK_EVERY_MS)))
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
        ControlMessage::Become { identity, token } => {
            // Before it is said who this is now: nobody asks for anything until then.
            let is_copy = lock(&agent.identity).sandbox != identity.sandbox;
            if is_copy {
                agent.executions.copied_into(&identity.sandbox);
            }
            agent.fencing.serve(identity.generation, *token);
            identity.clone_into(&mut lock(&agent.identity));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pid_1_begins_without_clocks_and_with_a_window() {
        assert!(matches!(lock(&Control::new(false).slot).link, Link::Never));
        let init = Control::new(true);
        assert!(!init.clocks_run());
        let Link::Away(mut away) = lock(&init.slot).link else { panic!("it would wait for ever") };
        let mut now_ms = away.since_ms;
        while !away.look(now_ms).is_zero() {
            now_ms += LOOK_EVERY_MS;
        }
        assert_eq!(now_ms, away.since_ms + FIRST_WINDOW_MS);
    }

    #[test]
    fn after_a_standstill_there_is_some_grace() {
        let left_ms = |away: &mut Away, now_ms| away.look(now_ms).as_millis() as u64;
        let mut away = Away::new(10_000, 1500);
        assert_eq!(left_ms(&mut away, 11_000), 500);
        // A day later: the window is long over, and nobody could have come.
        assert_eq!(left_ms(&mut away, 86_400_000), GRACE_MS);
        assert_eq!(left_ms(&mut away, 86_401_000), GRACE_MS - 1000);
        assert_eq!(left_ms(&mut away, 86_402_000), GRACE_MS - 2000);
        // The clock was set back: neither over at once nor in a day.
        assert_eq!(left_ms(&mut away, 500), GRACE_MS);
        // What is merely late gets nothing.
        let mut away = Away::new(10_000, 1500);
        assert_eq!(left_ms(&mut away, 10_000 + LOOK_EVERY_MS + STANDSTILL_MS), 0);
        // The rest of a long window is not cut by the grace.
        let mut away = Away::new(10_000, 100_000);
        assert_eq!(left_ms(&mut away, 20_000), 90_000);
    }

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
