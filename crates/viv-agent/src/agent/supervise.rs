//! The main thread: accepts, reaps, listens to the supervisor, watches deadlines.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use viv_agent::proto::{DUMPING, ErrorCode};

use crate::agent::control::MainEnd;
use crate::agent::reserve::Work;
use crate::agent::{Agent, Deadline, connections, serve, spawn, timeout};
use crate::conn::Conn;
use crate::error::{error, say};
use crate::sys::{self, Keeper};

/// Connections accepted in one go, so that a storm of them delays nothing else for long.
const ACCEPTED_AT_ONCE_MAX: usize = 32;

/// How long to wait when a connection cannot be accepted for want of descriptors or memory: the listener stays
/// ready all the while, so without this the main thread would do nothing else.
const EXHAUSTED_PAUSE_MS: u64 = 100;

/// For how long nothing is accepted after a quiesce, in milliseconds; 0 when no quiesce is new.
///
/// Set by the quiescing thread, taken by the main one.
pub(crate) static PAUSE_MS: AtomicU64 = AtomicU64::new(0);

/// How often it is looked whether the dump is over: whoever is brought back waits for so long at the most, and no longer for
/// what was left of the pause when it was dumped.
const DUMP_LOOK: Duration = Duration::from_millis(10);

/// Never returns.
pub(crate) fn supervise(agent: &'static Agent, listener: &UnixListener, children: &OwnedFd) -> ! {
    let mut control = MainEnd::default();
    let mut pause: Option<Deadline> = None;
    let mut ends_with_dump = false;
    let is_dumped = || agent.places.run.join(DUMPING).exists();
    loop {
        // Everything is looked at each round, whatever poll said: a wake-up
        // from a freeze may report only the timeout.
        // The time is looked at before the supervisor is heard: a freeze may fall between any two of these lines, and what he
        // said of it stands in a socket that was read already, while the clock has gone on (L13).
        let seen_ms = sys::boot_ms();
        control.attend(agent);
        reap(agent, children);
        let clocks_run = agent.control.clocks_run();
        let execution_left = if clocks_run { agent.executions.check_deadlines(agent, seen_ms) } else { None };
        let away_left = MainEnd::check_away(agent);
        let sweep_left = agent.executions.sweep_cgroups(agent);
        let forget_left = agent.executions.forget_transient(agent);
        let inside_left = agent.inside.attend();
        let pause_ms = PAUSE_MS.swap(0, Ordering::AcqRel);
        if pause_ms > 0 {
            pause = Some(Deadline::after(pause_ms));
            ends_with_dump = is_dumped();
        }
        if ends_with_dump && !is_dumped() {
            (pause, ends_with_dump) = (None, false);
        }
        let pause_left = pause.as_mut().map(Deadline::left).filter(|left| !left.is_zero());
        if pause_left.is_none() {
            ends_with_dump = false;
            pause = match accept(agent, listener) {
                Accepted::All => None,
                Accepted::Exhausted => Some(Deadline::after(EXHAUSTED_PAUSE_MS)),
            };
        }
        let pause_left = pause.as_mut().map(Deadline::left);
        let dump_look = ends_with_dump.then_some(DUMP_LOOK);
        let deadlines = [execution_left, away_left, sweep_left, forget_left, inside_left, pause_left, dump_look];
        let nearest = deadlines.into_iter().flatten().min();
        wait(agent, (pause.is_none()).then_some(listener), children, &control, nearest);
    }
}

fn wait(
    agent: &Agent,
    listener: Option<&UnixListener>,
    children: &OwnedFd,
    control: &MainEnd,
    nearest: Option<Duration>,
) {
    let mut fds = vec![PollFd::new(&agent.wake.0, PollFlags::IN), PollFd::new(children, PollFlags::IN)];
    fds.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
    fds.extend(control.link().map(|link| PollFd::new(link, PollFlags::IN)));
    let (socket, asking) = agent.inside.awaited();
    fds.extend(socket.map(|socket| PollFd::new(socket, PollFlags::IN)));
    fds.extend(asking.iter().map(|(stream, flags)| PollFd::from_borrowed_fd(stream.as_fd(), *flags)));
    // A millisecond more than left, so that the deadline has passed when poll says so.
    let nearest = nearest.map(|left| timeout(left + Duration::from_millis(1)));
    match poll(&mut fds, nearest.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(cause) => agent.end_everything(&format!("poll failed: {cause}")),
    }
    agent.wake.clear();
}

fn reap(agent: &'static Agent, children: &OwnedFd) {
    // The descriptor only wakes us; several deaths may share one signal.
    let mut info = [0_u8; 128];
    while rustix::io::read(children, &mut info).is_ok_and(|count| count > 0) {}
    if agent.executions.reap(agent) {
        agent.wake.ring();
    }
}

/// What came of accepting.
enum Accepted {
    /// None waits, or the rest is for the next round.
    All,
    /// Some wait, and there is nothing left to accept them with.
    Exhausted,
}

fn accept(agent: &'static Agent, listener: &UnixListener) -> Accepted {
    for _ in 0..ACCEPTED_AT_ONCE_MAX {
        match listener.accept() {
            Ok((stream, _)) => welcome(agent, stream),
            Err(cause) if cause.kind() == std::io::ErrorKind::WouldBlock => return Accepted::All,
            Err(cause) => {
                say(&format!("accept failed: {cause}"));
                let exhausted = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS];
                let is_exhausted = cause.raw_os_error().is_some_and(|errno| exhausted.contains(&errno));
                return if is_exhausted { Accepted::Exhausted } else { Accepted::All };
            }
        }
    }
    agent.wake.ring();
    Accepted::All
}

fn welcome(agent: &'static Agent, stream: UnixStream) {
    // Nobody inside gets this far, as the socket is covered. Without ids there is no second wall but this one.
    if (agent.origin.keeper == Keeper::Alike || agent.config.packages) && sys::is_peer_inside(&stream) {
        say("turned somebody away who is inside the sandbox");
        return;
    }
    // Accepted sockets do not inherit the listener's mode.
    let stream = Arc::new(stream);
    if !agent.connections.enter(&stream) {
        let message = format!("more than {} connections", connections::CONNECTIONS_MAX);
        // A fresh socket has room for this, so it does not block.
        let _ = Conn::new(stream).reply(Err(error(ErrorCode::Exhausted, message)));
        return;
    }
    let theirs = Arc::clone(&stream);
    if spawn("connection", move || serve::serve(agent, &theirs)).is_err() {
        agent.reserve.push(agent, Work::Serve(stream));
    }
}
