//! The commands that the suite runs: plain Linux ones, and few.
//!
//! A real provider runs the argv; a simulated one parses it back into a
//! [`Program`] and plays it. Paths, texts and names that go into a shell
//! script are words of `[A-Za-z0-9/_.-]`, so nothing needs quoting.

use viv_core::exec::ExecSpec;

/// How often [`Program::Tick`] and [`Program::Stubborn`] do something, and a simulated [`Program::Ledger`].
pub const TICK_MS: u64 = 50;

/// The exit code of [`Program::Graceful`] when it is asked to end.
pub const GRACEFUL_CODE: i32 = 7;

/// How long [`Program::Ask`] waits for an answer.
pub const ASK_MS: u64 = 10_000;

/// The exit code of [`Program::Ask`] when nobody answered.
pub const UNHEARD_CODE: i32 = 7;

const READ_ENV: [&str; 2] = ["echo \"$", "\""];
const EXIT: [&str; 2] = ["exit ", ""];
const KILL_SELF: [&str; 2] = ["kill -", " $$"];
const WRITE_FILE: [&str; 3] = ["printf %s ", " > ", ""];
const APPEND: [&str; 2] = ["echo x >> ", ""];
const ECHO_THEN_SLEEP: [&str; 3] = ["echo ", "; sleep ", ""];
const LEDGER: [&str; 3] = ["i=0; while :; do echo $i >> ", "; echo $i >> ", "; i=$((i+1)); done"];
const TICK: [&str; 2] = ["i=0; while [ $i -lt ", " ]; do echo $i; i=$((i+1)); sleep 0.05; done"];
const STUBBORN: [&str; 2] = [
    "trap '' TERM; setsid sh -c \"trap '' TERM; while :; do echo x >> ",
    "; sleep 0.05; done\" & echo ready; while :; do sleep 1; done",
];
const GRACEFUL: &str = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done";
const BOTH_STREAMS: &str = "echo out; echo err >&2";
const OPEN_FILES: &str = "ulimit -n";
const HOLD_MEMORY: [&str; 2] = ["head -c ", "m /dev/zero > /dev/shm/held; echo held; sleep 30"];
const TERMINAL_SIZES: &str = "while read -r line; do stty size; done";

/// One command of the suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// Writes a text and a newline.
    Echo {
        /// The text.
        text: String,
    },
    /// Waits, then exits with 0.
    Sleep {
        /// How long.
        seconds: u64,
    },
    /// Writes its input back until the input ends.
    Cat,
    /// Writes a file's content.
    CatFile {
        /// Its path.
        path: String,
    },
    /// Exits with a code.
    Exit {
        /// The code.
        code: i32,
    },
    /// Ends itself by a signal.
    KillSelf {
        /// The signal's number.
        signal: i32,
    },
    /// Writes `out` to one stream and `err` to the other.
    BothStreams,
    /// Writes the value of an environment variable.
    ReadEnv {
        /// Its name.
        name: String,
    },
    /// Writes the directory it runs in.
    PrintDirectory,
    /// Writes the number of its user.
    PrintUser,
    /// Writes the numbers from 1 on, one in a line.
    Count {
        /// The last number.
        to: u64,
    },
    /// Writes a number every [`TICK_MS`], from 0 on.
    Tick {
        /// How many.
        count: u64,
    },
    /// Writes a text, then waits.
    EchoThenSleep {
        /// The text.
        text: String,
        /// How long.
        seconds: u64,
    },
    /// Writes a text to a file, replacing it.
    WriteFile {
        /// The text.
        text: String,
        /// Its path.
        path: String,
    },
    /// Appends a line of one `x` to a file.
    Append {
        /// Its path.
        path: String,
    },
    /// Appends the numbers from 0 on to two files, each to the first one first, and never rests.
    Ledger {
        /// The file that may be one line ahead.
        first: String,
        /// The file that never is.
        second: String,
    },
    /// Makes a symbolic link.
    Link {
        /// Where it points.
        target: String,
        /// Its path.
        path: String,
    },
    /// Writes `ready`, ignores TERM, and has a child in a session of its own
    /// that ignores it too and appends a line to a file every [`TICK_MS`].
    Stubborn {
        /// The file.
        path: String,
    },
    /// Writes `ready`, and exits with [`GRACEFUL_CODE`] on TERM.
    Graceful,
    /// Writes how many files it may have open.
    OpenFiles,
    /// Fills a file in memory, writes `held`, and waits.
    HoldMemory {
        /// How much.
        mib: u64,
    },
    /// Writes the size of its terminal.
    TerminalSize,
    /// Writes the size of its terminal after every line of input.
    TerminalSizes,
    /// Asks whoever keeps the sandbox, and writes the answer and a newline, or exits with [`UNHEARD_CODE`] when there is
    /// none within [`ASK_MS`]. Real providers have a command of their own for it ([`crate::Provider::ask_spec`]).
    Ask {
        /// What for.
        body: String,
    },
}

impl Program {
    /// The command as it is given to a provider.
    pub fn argv(&self) -> Vec<String> {
        match self {
            Self::Echo { text } => words(&["/bin/echo", text]),
            Self::Sleep { seconds } => words(&["/bin/sleep", &seconds.to_string()]),
            Self::Cat => words(&["/bin/cat"]),
            Self::CatFile { path } => words(&["/bin/cat", path]),
            Self::Exit { code } => shell(&fill2(EXIT, &code.to_string())),
            Self::KillSelf { signal } => shell(&fill2(KILL_SELF, &signal.to_string())),
            Self::BothStreams => shell(BOTH_STREAMS),
            Self::ReadEnv { name } => shell(&fill2(READ_ENV, name)),
            Self::PrintDirectory => words(&["/bin/pwd"]),
            Self::PrintUser => words(&["/usr/bin/id", "-u"]),
            Self::Count { to } => words(&["/usr/bin/seq", "1", &to.to_string()]),
            Self::Tick { count } => shell(&fill2(TICK, &count.to_string())),
            Self::EchoThenSleep { text, seconds } => shell(&fill3(ECHO_THEN_SLEEP, text, &seconds.to_string())),
            Self::WriteFile { text, path } => shell(&fill3(WRITE_FILE, text, path)),
            Self::Append { path } => shell(&fill2(APPEND, path)),
            Self::Ledger { first, second } => shell(&fill3(LEDGER, first, second)),
            Self::Link { target, path } => words(&["/bin/ln", "-s", target, path]),
            Self::Stubborn { path } => shell(&fill2(STUBBORN, path)),
            Self::Graceful => shell(GRACEFUL),
            Self::OpenFiles => shell(OPEN_FILES),
            Self::HoldMemory { mib } => shell(&fill2(HOLD_MEMORY, &mib.to_string())),
            Self::TerminalSize => words(&["/usr/bin/stty", "size"]),
            Self::TerminalSizes => shell(TERMINAL_SIZES),
            Self::Ask { body } => words(&["viv-ask", body]),
        }
    }

    /// The command with everything else by default; those that read have their input open.
    pub fn spec(&self) -> ExecSpec {
        let stdin = matches!(self, Self::Cat | Self::TerminalSize | Self::TerminalSizes);
        ExecSpec { argv: self.argv(), stdin, ..ExecSpec::default() }
    }

    /// Which program an argv is, if it is one of these.
    pub fn parse(argv: &[String]) -> Option<Self> {
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        match argv.as_slice() {
            ["/bin/echo" | "echo", text] => Some(Self::Echo { text: (*text).to_owned() }),
            ["/bin/sleep", seconds] => Some(Self::Sleep { seconds: seconds.parse().ok()? }),
            ["/bin/cat"] => Some(Self::Cat),
            ["/bin/cat", path] => Some(Self::CatFile { path: (*path).to_owned() }),
            ["/bin/pwd"] => Some(Self::PrintDirectory),
            ["/usr/bin/id", "-u"] => Some(Self::PrintUser),
            ["/usr/bin/seq", "1", to] => Some(Self::Count { to: to.parse().ok()? }),
            ["/bin/ln", "-s", target, path] => {
                Some(Self::Link { target: (*target).to_owned(), path: (*path).to_owned() })
            }
            ["/usr/bin/stty", "size"] => Some(Self::TerminalSize),
            ["viv-ask", body] => Some(Self::Ask { body: (*body).to_owned() }),
            ["/bin/sh", "-c", script] => Self::parse_script(script),
            _ => None,
        }
    }

    fn parse_script(script: &str) -> Option<Self> {
        match script {
            BOTH_STREAMS => return Some(Self::BothStreams),
            GRACEFUL => return Some(Self::Graceful),
            OPEN_FILES => return Some(Self::OpenFiles),
            TERMINAL_SIZES => return Some(Self::TerminalSizes),
            _ => {}
        }
        if let Some(mib) = empty2(HOLD_MEMORY, script) {
            return Some(Self::HoldMemory { mib: mib.parse().ok()? });
        }
        if let Some(path) = empty2(STUBBORN, script) {
            return Some(Self::Stubborn { path });
        }
        if let Some((first, second)) = empty3(LEDGER, script) {
            return Some(Self::Ledger { first, second });
        }
        if let Some(count) = empty2(TICK, script) {
            return Some(Self::Tick { count: count.parse().ok()? });
        }
        if let Some(path) = empty2(APPEND, script) {
            return Some(Self::Append { path });
        }
        if let Some((text, path)) = empty3(WRITE_FILE, script) {
            return Some(Self::WriteFile { text, path });
        }
        if let Some((text, seconds)) = empty3(ECHO_THEN_SLEEP, script) {
            return Some(Self::EchoThenSleep { text, seconds: seconds.parse().ok()? });
        }
        if let Some(name) = empty2(READ_ENV, script) {
            return Some(Self::ReadEnv { name });
        }
        if let Some(code) = empty2(EXIT, script) {
            return Some(Self::Exit { code: code.parse().ok()? });
        }
        let signal = empty2(KILL_SELF, script)?;
        Some(Self::KillSelf { signal: signal.parse().ok()? })
    }
}

/// A command whose program is nowhere.
pub fn missing() -> ExecSpec {
    ExecSpec { argv: words(&["/no/such/program"]), ..ExecSpec::default() }
}

/// Writes a text and a newline.
pub fn echo(text: &str) -> ExecSpec {
    Program::Echo { text: text.to_owned() }.spec()
}

/// Waits for longer than any case does.
pub fn sleep() -> ExecSpec {
    Program::Sleep { seconds: 30 }.spec()
}

/// Writes a text, then waits for longer than any case does.
pub fn echo_then_sleep(text: &str) -> ExecSpec {
    Program::EchoThenSleep { text: text.to_owned(), seconds: 30 }.spec()
}

/// Writes numbers for longer than any case waits.
pub fn tick() -> ExecSpec {
    Program::Tick { count: 600 }.spec()
}

/// Writes how many files it may have open.
pub fn open_files() -> ExecSpec {
    Program::OpenFiles.spec()
}

/// Fills a file in memory, writes `held`, then waits for longer than any case does.
pub fn hold_memory(mib: u64) -> ExecSpec {
    Program::HoldMemory { mib }.spec()
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn shell(script: &str) -> Vec<String> {
    words(&["/bin/sh", "-c", script])
}

/// Whether a text may stand in a script without quotes.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"/_.-".contains(&b))
}

fn fill2([before, after]: [&str; 2], value: &str) -> String {
    assert!(is_word(value), "{value:?} would need quotes");
    format!("{before}{value}{after}")
}

fn fill3([before, between, after]: [&str; 3], first: &str, second: &str) -> String {
    assert!(is_word(first) && is_word(second), "{first:?} or {second:?} would need quotes");
    format!("{before}{first}{between}{second}{after}")
}

fn empty2([before, after]: [&str; 2], script: &str) -> Option<String> {
    let value = script.strip_prefix(before)?.strip_suffix(after)?;
    is_word(value).then(|| value.to_owned())
}

fn empty3([before, between, after]: [&str; 3], script: &str) -> Option<(String, String)> {
    let (first, second) = script.strip_prefix(before)?.strip_suffix(after)?.split_once(between)?;
    (is_word(first) && is_word(second)).then(|| (first.to_owned(), second.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Program> {
        let (text, path) = ("a-b".to_owned(), "/tmp/x_1".to_owned());
        vec![
            Program::Echo { text: "a \"b\" $c".to_owned() },
            Program::Sleep { seconds: 3 },
            Program::Cat,
            Program::CatFile { path: path.clone() },
            Program::Exit { code: 3 },
            Program::KillSelf { signal: 9 },
            Program::BothStreams,
            Program::ReadEnv { name: "NAME".to_owned() },
            Program::PrintDirectory,
            Program::PrintUser,
            Program::Count { to: 5 },
            Program::Tick { count: 7 },
            Program::EchoThenSleep { text: text.clone(), seconds: 4 },
            Program::WriteFile { text, path: path.clone() },
            Program::Append { path: path.clone() },
            Program::Ledger { first: path.clone(), second: "/tmp/y".to_owned() },
            Program::Link { target: "../y".to_owned(), path: path.clone() },
            Program::Stubborn { path },
            Program::Graceful,
            Program::OpenFiles,
            Program::HoldMemory { mib: 3 },
            Program::Ask { body: "{\"a b\": 1}".to_owned() },
            Program::TerminalSize,
            Program::TerminalSizes,
        ]
    }

    #[test]
    fn every_program_is_understood_as_itself() {
        for program in all() {
            assert_eq!(Program::parse(&program.argv()), Some(program));
        }
    }

    #[test]
    fn anything_else_is_not_understood() {
        assert_eq!(Program::parse(&missing().argv), None);
        assert_eq!(Program::parse(&words(&["/bin/sh", "-c", "echo a; rm -rf /"])), None);
        assert_eq!(Program::parse(&[]), None);
    }
}
