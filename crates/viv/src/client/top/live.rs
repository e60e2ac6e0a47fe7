//! The terminal: keys in, lines out, and everything as it was when this ends.

use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use viv_api::bound::{NUMBER_MAX, PageLimit, Sequence};
use viv_api::client::ClientError;
use viv_api::query::ListEvents;

use super::super::{now_ms, terminal};
use super::Sort;
use super::look::{Look, Page, Turns};
use super::view::{Ask, Key, View};
use crate::fail::SIGNAL_BASE;

/// Between two looks when nothing happens.
const EVERY: Duration = Duration::from_secs(2);

/// Between two looks when much happens.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Between two looks at the size of the terminal, and at the clock.
const TICK: Duration = Duration::from_millis(500);

/// How long the rest of what a key sends may take: an escape alone is a key too.
const REST_OF_KEY: Duration = Duration::from_millis(50);

/// How long to wait before events are followed again.
const FOLLOW_AGAIN: Duration = Duration::from_secs(2);

/// Another screen, and no cursor; and back.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";

/// What the loop hears.
enum Said {
    Key(Key),
    Seen(Result<Page, ClientError>),
    Text { title: String, text: Result<String, ClientError> },
    Stopped(Result<String, ClientError>),
    Signal(u8),
}

/// The screen, until this is dropped.
struct Screen {
    _raw: Option<terminal::Raw>,
}

impl Screen {
    fn enter() -> io::Result<Self> {
        let raw = terminal::Raw::enter()?;
        write(ENTER)?;
        Ok(Self { _raw: raw })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write(LEAVE);
    }
}

fn write(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

pub(super) fn run(look: &Look, sort: Sort) -> anyhow::Result<ExitCode> {
    // One that is waiting is enough: whoever looks sees everything.
    let (poke, poked) = mpsc::sync_channel(1);
    let (say, heard) = mpsc::channel();
    listen_to_signals(say.clone())?;
    let screen = Screen::enter()?;
    read_keys(say.clone());
    follow(look.clone(), poke.clone());
    look_again_and_again(look.clone(), poked, say.clone());
    let left = show(look, sort, &heard, &say, &poke);
    drop(screen);
    left
}

fn show(
    look: &Look,
    sort: Sort,
    heard: &Receiver<Said>,
    say: &Sender<Said>,
    poke: &SyncSender<()>,
) -> anyhow::Result<ExitCode> {
    let mut view = View::new(sort);
    let mut drawn = Vec::new();
    loop {
        let size = terminal::size();
        let (rows, columns) = (size.rows.get() as usize, size.cols.get() as usize);
        let frame = frame(&view.lines(rows, columns, now_ms()));
        if frame != drawn {
            write(&frame)?;
            drawn = frame;
        }
        match heard.recv_timeout(TICK) {
            Ok(Said::Key(key)) => match view.key(key, rows) {
                Ask::Nothing => {}
                Ask::Quit => return Ok(ExitCode::SUCCESS),
                ask => in_background(look.clone(), ask, say.clone()),
            },
            Ok(Said::Seen(Ok(page))) => view.update(page),
            Ok(Said::Seen(Err(error))) => view.notice(&format!("cannot look: {error}")),
            Ok(Said::Text { title, text: Ok(text) }) => view.text(&title, &text),
            Ok(Said::Stopped(Ok(words))) => {
                view.notice(&words);
                let _ = poke.try_send(());
            }
            Ok(Said::Text { text: Err(error), .. } | Said::Stopped(Err(error))) => view.notice(&error.to_string()),
            Ok(Said::Signal(signal)) => return Ok(ExitCode::from(SIGNAL_BASE + signal)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(ExitCode::SUCCESS),
        }
    }
}

/// All lines, from the upper left on, each to its end: nothing flickers, since nothing is cleared before.
fn frame((lines, marked): &(Vec<String>, Option<usize>)) -> Vec<u8> {
    let mut text = String::from("\x1b[H");
    for (at, line) in lines.iter().enumerate() {
        if at > 0 {
            text.push_str("\r\n");
        }
        let (before, after) = if Some(at) == *marked { ("\x1b[7m", "\x1b[0m") } else { ("", "") };
        for part in [before, line, after, "\x1b[K"] {
            text.push_str(part);
        }
    }
    text.push_str("\x1b[J");
    text.into_bytes()
}

fn in_background(look: Look, ask: Ask, say: Sender<Said>) {
    thread::spawn(move || {
        let said = match ask {
            Ask::Logs(sandbox) => Said::Text { title: format!("logs of {sandbox}"), text: look.logs(&sandbox) },
            Ask::Diagnosis(sandbox) => {
                Said::Text { title: format!("diagnosis of {sandbox}"), text: look.diagnosis(&sandbox) }
            }
            Ask::Stop(sandbox) => {
                Said::Stopped(look.stop(&sandbox).map(|after| format!("{sandbox} is {}", after.status)))
            }
            Ask::Nothing | Ask::Quit => return,
        };
        let _ = say.send(said);
    });
}

fn look_again_and_again(look: Look, poked: Receiver<()>, say: Sender<Said>) {
    thread::spawn(move || {
        let mut turns = Turns::default();
        loop {
            let began = Instant::now();
            if say.send(Said::Seen(look.at_a_page(&mut turns))).is_err() {
                return;
            }
            let _ = poked.recv_timeout(EVERY);
            thread::sleep(LOOK_AGAIN.saturating_sub(began.elapsed()));
        }
    });
}

/// Whatever happens is a reason to look.
fn follow(look: Look, poke: SyncSender<()>) {
    thread::spawn(move || {
        let is_any_after = |place: u64| {
            let (after, limit) = (Some(Sequence::nearest(place)), Some(PageLimit::nearest(1)));
            let page = look.client.events(&ListEvents { after, limit, ..ListEvents::default() });
            page.map(|page| !page.items.is_empty())
        };
        let mut after = newest(is_any_after).ok();
        loop {
            let query = ListEvents { after: after.map(Sequence::nearest), ..ListEvents::default() };
            for event in look.client.follow_events(query) {
                let Ok(event) = event else { break };
                after = Some(event.seq);
                let _ = poke.try_send(());
            }
            thread::sleep(FOLLOW_AGAIN);
        }
    });
}

/// Where the journal ends, found by asking whether there is anything after a place: what was before is history.
fn newest<E>(is_any_after: impl Fn(u64) -> Result<bool, E>) -> Result<u64, E> {
    let (mut before, mut end) = (0, 1);
    while end < NUMBER_MAX && is_any_after(end)? {
        (before, end) = (end, (end * 2).min(NUMBER_MAX));
    }
    while before < end {
        let middle = before + (end - before) / 2;
        if is_any_after(middle)? {
            before = middle + 1;
        } else {
            end = middle;
        }
    }
    Ok(before)
}

fn listen_to_signals(say: Sender<Said>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::spawn(move || {
        runtime.block_on(async {
            let all = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
            let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = all else { return };
            let signal = tokio::select! {
                _ = interrupt.recv() => SignalKind::interrupt(),
                _ = terminate.recv() => SignalKind::terminate(),
                _ = hangup.recv() => SignalKind::hangup(),
            };
            let _ = say.send(Said::Signal(signal.as_raw_value() as u8));
        });
    });
    Ok(())
}

/// Bytes in one thread and keys in another, since only time tells an escape from the beginning of an arrow.
fn read_keys(say: Sender<Said>) {
    let (give, bytes) = mpsc::channel();
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok(count @ 1..) = io::stdin().read(&mut buffer) {
            if buffer[..count].iter().any(|byte| give.send(*byte).is_err()) {
                return;
            }
        }
    });
    thread::spawn(move || {
        while let Ok(first) = bytes.recv() {
            let next = || bytes.recv_timeout(REST_OF_KEY).ok();
            if let Some(key) = key(first, next)
                && say.send(Said::Key(key)).is_err()
            {
                return;
            }
        }
        // Nobody is there any more.
        let _ = say.send(Said::Key(Key::Interrupt));
    });
}

/// The key that these bytes are. What is no key of ours is none.
fn key(first: u8, mut next: impl FnMut() -> Option<u8>) -> Option<Key> {
    match first {
        3 => Some(Key::Interrupt),
        0x1b => match next() {
            None => Some(Key::Escape),
            Some(b'[' | b'O') => match next()? {
                b'A' => Some(Key::Up),
                b'B' => Some(Key::Down),
                digit @ (b'5' | b'6') if next() == Some(b'~') => {
                    Some(if digit == b'5' { Key::PageUp } else { Key::PageDown })
                }
                _ => None,
            },
            Some(_) => None,
        },
        b' '..=b'~' => Some(Key::Char(char::from(first))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_from_each_other() {
        for (bytes, wanted) in [
            (&b"q"[..], Some(Key::Char('q'))),
            (b"\x1b", Some(Key::Escape)),
            (b"\x1b[A", Some(Key::Up)),
            (b"\x1bOB", Some(Key::Down)),
            (b"\x1b[6~", Some(Key::PageDown)),
            (b"\x1b[Z", None),
            (b"\x03", Some(Key::Interrupt)),
            (b"\xc3", None),
        ] {
            let mut rest = bytes[1..].iter().copied();
            assert_eq!(key(bytes[0], || rest.next()), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn the_end_of_the_journal_is_found() {
        for last in [0, 1, 2, 3, 1_000, 65_537] {
            assert_eq!(newest(|place| Ok::<_, ()>(place < last)), Ok(last));
        }
    }

    #[test]
    fn a_frame_covers_what_was_there() {
        let lines = (vec!["a".to_owned(), "b".to_owned()], Some(1));
        assert_eq!(frame(&lines), b"\x1b[Ha\x1b[K\r\n\x1b[7mb\x1b[0m\x1b[K\x1b[J");
    }
}
