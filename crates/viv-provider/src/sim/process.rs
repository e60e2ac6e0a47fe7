//! Playing the programs of [`crate::conformance::program`].
//!
//! A process is told what happens to it (it starts, its timer fires, input
//! comes, a signal comes) and answers whether it lives on.

use std::collections::BTreeMap;

use viv_core::exec::{ExecState, Stream, TtySize};

use super::output::Output;
use super::tree::{Body, Node, Tree};
use crate::conformance::program::{ASK_MS, GRACEFUL_CODE, Program, TICK_MS, UNHEARD_CODE};

/// The signal that asks.
pub(super) const TERM: i32 = 15;
/// The signal that does not ask.
pub(super) const KILL: i32 = 9;
/// The highest signal's number on Linux.
pub(super) const SIGNAL_MAX: i32 = 64;

/// CHLD, CONT, STOP, TSTP, TTIN, TTOU, URG and WINCH end nobody.
const HARMLESS_SIGNALS: [i32; 8] = [17, 18, 19, 20, 21, 22, 23, 28];

/// What becomes of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on.
    Lives,
    /// It is over.
    Ends(ExecState),
}

const DONE: Fate = Fate::Ends(ExecState::Exited { code: 0 });
const TROUBLE: Fate = Fate::Ends(ExecState::Exited { code: 1 });

/// A running program.
#[derive(Debug, Clone)]
pub(super) struct Process {
    program: Program,
    /// When it has something to do by itself.
    pub(super) wake_at_ms: Option<u64>,
    /// How often it woke.
    ticks: u64,
}

/// What a process can reach.
pub(super) struct Surroundings<'s> {
    pub(super) now_ms: u64,
    pub(super) output: &'s mut Output,
    pub(super) tree: &'s mut Tree,
    pub(super) env: &'s BTreeMap<String, String>,
    pub(super) cwd: &'s str,
    pub(super) uid: u32,
    pub(super) tty: Option<TtySize>,
    pub(super) has_input: bool,
    pub(super) open_files: Option<u64>,
}

impl Surroundings<'_> {
    fn say(&mut self, text: &str) {
        let data = if self.tty.is_some() { text.replace('\n', "\r\n") } else { text.to_owned() };
        self.output.write(Stream::Stdout, self.now_ms, data.as_bytes());
    }

    fn complain(&mut self, text: &str) {
        let stream = if self.tty.is_some() { Stream::Stdout } else { Stream::Stderr };
        self.output.write(stream, self.now_ms, text.as_bytes());
    }

    fn absolute(&self, path: &str) -> String {
        if path.starts_with('/') { path.to_owned() } else { format!("{}/{path}", self.cwd) }
    }

    fn content(&self, path: &str) -> Option<Vec<u8>> {
        let path = self.tree.resolve(&self.absolute(path), true).ok()?;
        match &self.tree.get(&path)?.body {
            Body::File(content) => Some(content.to_vec()),
            Body::Dir | Body::Link(_) => None,
        }
    }

    /// Replaces or makes a file, the directory of which has to be there.
    fn store(&mut self, path: &str, content: Vec<u8>) -> Fate {
        let stored = self.tree.resolve(&self.absolute(path), true).and_then(|path| {
            let mode = self.tree.get(&path).map_or(0o644, |node| node.mode);
            self.put(&path, Node::file(content, mode, self.now_ms))
        });
        self.outcome(stored)
    }

    fn link(&mut self, target: &str, path: &str) -> Fate {
        let linked = self.tree.resolve(&self.absolute(path), false).and_then(|path| {
            if self.tree.get(&path).is_some() {
                return Err(super::tree::conflict(&path, "is there"));
            }
            self.put(&path, Node::link(target, self.now_ms))
        });
        self.outcome(linked)
    }

    fn put(&mut self, path: &str, node: Node) -> Result<(), crate::ProviderError> {
        let parent = path.rsplit_once('/').map_or("/", |(parent, _)| if parent.is_empty() { "/" } else { parent });
        self.tree.need(parent)?;
        self.tree.put(path, node)
    }

    fn outcome(&mut self, result: Result<(), crate::ProviderError>) -> Fate {
        match result {
            Ok(()) => DONE,
            Err(error) => {
                self.complain(&format!("{error}\n"));
                TROUBLE
            }
        }
    }

    fn say_size(&mut self) -> Fate {
        let Some(TtySize { rows, cols }) = self.tty else {
            self.complain("stty: 'standard input': Inappropriate ioctl for device\n");
            return TROUBLE;
        };
        self.say(&format!("{rows} {cols}\n"));
        DONE
    }
}

impl Process {
    pub(super) fn new(program: Program) -> Self {
        Self { program, wake_at_ms: None, ticks: 0 }
    }

    /// Its first moment.
    pub(super) fn start(&mut self, around: &mut Surroundings<'_>) -> Fate {
        match &self.program {
            Program::Echo { text } => around.say(&format!("{text}\n")),
            Program::Sleep { seconds } => return self.sleep(around.now_ms, seconds * 1_000),
            Program::EchoThenSleep { text, seconds } => {
                let ms = seconds * 1_000;
                around.say(&format!("{text}\n"));
                return self.sleep(around.now_ms, ms);
            }
            Program::Cat | Program::TerminalSizes => {
                if around.has_input {
                    return Fate::Lives;
                }
            }
            Program::CatFile { path } => {
                let Some(content) = around.content(path) else {
                    around.complain(&format!("cat: {path}: No such file\n"));
                    return TROUBLE;
                };
                around.output.write(Stream::Stdout, around.now_ms, &content);
            }
            Program::Exit { code } => return Fate::Ends(ExecState::Exited { code: *code }),
            Program::KillSelf { signal } => return Fate::Ends(ExecState::Signalled { signal: *signal }),
            Program::BothStreams => {
                around.say("out\n");
                around.complain("err\n");
            }
            Program::ReadEnv { name } => {
                let value = around.env.get(name).cloned().unwrap_or_default();
                around.say(&format!("{value}\n"));
            }
            Program::PrintDirectory => around.say(&format!("{}\n", around.cwd.to_owned())),
            Program::PrintUser => around.say(&format!("{}\n", around.uid)),
            Program::OpenFiles => {
                let most = around.open_files.map_or_else(|| "unlimited".to_owned(), |most| most.to_string());
                around.say(&format!("{most}\n"));
            }
            Program::HoldMemory { .. } => {
                around.say("held\n");
                return Fate::Lives;
            }
            Program::Count { to } => {
                // In one piece, as a program writes that fills its buffer first.
                let lines: Vec<String> = (1..=*to).map(|number| number.to_string()).collect();
                around.say(&(lines.join("\n") + "\n"));
            }
            Program::Tick { .. } | Program::Stubborn { .. } | Program::Ledger { .. } => return self.wake(around),
            Program::WriteFile { text, path } => return around.store(path, text.clone().into_bytes()),
            Program::Append { path } => return append(around, path, "x"),
            Program::Link { target, path } => return around.link(target, path),
            Program::Graceful => {
                around.say("ready\n");
                return Fate::Lives;
            }
            Program::TerminalSize => return around.say_size(),
            Program::Ask { .. } => return self.sleep(around.now_ms, ASK_MS),
        }
        DONE
    }

    fn sleep(&mut self, now_ms: u64, ms: u64) -> Fate {
        self.wake_at_ms = Some(now_ms.saturating_add(ms));
        Fate::Lives
    }

    /// Its timer fired.
    pub(super) fn wake(&mut self, around: &mut Surroundings<'_>) -> Fate {
        self.wake_at_ms = None;
        let tick = self.ticks;
        self.ticks += 1;
        match &self.program {
            Program::Tick { count } if tick < *count => around.say(&format!("{tick}\n")),
            Program::Stubborn { path } => {
                if tick == 0 {
                    around.say("ready\n");
                }
                // The child's trouble is not its parent's.
                let _ = append(around, path, "x");
            }
            Program::Ledger { first, second } => {
                // A shell goes on when it cannot write.
                for path in [first, second] {
                    let _ = append(around, path, &tick.to_string());
                }
            }
            Program::Ask { .. } => return Fate::Ends(ExecState::Exited { code: UNHEARD_CODE }),
            _ => return DONE,
        }
        self.sleep(around.now_ms, TICK_MS)
    }

    /// What it asks for, and has no answer to.
    pub(super) fn asks(&self) -> Option<&str> {
        match &self.program {
            Program::Ask { body } => Some(body),
            _ => None,
        }
    }

    /// Its answer came.
    pub(super) fn answered(around: &mut Surroundings<'_>, answer: &str) -> Fate {
        around.say(&format!("{answer}\n"));
        DONE
    }

    /// Whether it reads its input at once.
    pub(super) fn reads(&self) -> bool {
        matches!(self.program, Program::Cat | Program::TerminalSizes)
    }

    /// Input came.
    pub(super) fn input(&mut self, around: &mut Surroundings<'_>, data: &[u8]) {
        match &self.program {
            Program::Cat => around.output.write(Stream::Stdout, around.now_ms, data),
            Program::TerminalSizes => {
                for line in String::from_utf8_lossy(data).split_inclusive('\n') {
                    if around.tty.is_some() {
                        around.say(line);
                    }
                    if line.ends_with('\n') {
                        let _ = around.say_size();
                    }
                }
            }
            _ => {}
        }
    }

    /// Its input ended.
    pub(super) fn input_closed(&mut self) -> Fate {
        if self.reads() { DONE } else { Fate::Lives }
    }

    /// A signal came.
    pub(super) fn signal(&mut self, signal: i32) -> Fate {
        match (&self.program, signal) {
            (Program::Stubborn { .. }, TERM) => Fate::Lives,
            (Program::Graceful, TERM) => Fate::Ends(ExecState::Exited { code: GRACEFUL_CODE }),
            (_, signal) if HARMLESS_SIGNALS.contains(&signal) => Fate::Lives,
            (_, signal) => Fate::Ends(ExecState::Signalled { signal }),
        }
    }
}

fn append(around: &mut Surroundings<'_>, path: &str, line: &str) -> Fate {
    let mut content = around.content(path).unwrap_or_default();
    content.extend_from_slice(line.as_bytes());
    content.push(b'\n');
    around.store(path, content)
}
