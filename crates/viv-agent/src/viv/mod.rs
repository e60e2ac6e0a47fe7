//! The command `viv` inside a sandbox: what a workload asks the control plane for.
//!
//! ```text
//!   arguments ──► request (JSON) ──► the agent ──► the daemon ──► answer (JSON) ──► lines, exit code
//! ```
//!
//! It is the agent's own program under another name, so that it is there whatever an image holds. Flags, texts of errors
//! and exit codes are those of the `viv` outside; what means something to this sandbox alone is left out.

mod schedule;
mod task;
mod words;

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use viv_agent::frame::{self, HEADER_BYTES, Kind};
use viv_agent::proto::{
    ANSWER_BYTES_MAX, ASK_VERB, CALL_BYTES_MAX, HOME, INSIDE_SOCKET, InsideCall, InsideReply, NoAnswer, VIV_VERB,
};
use viv_core::inside::InsideVerb;

use words::Words;

/// How long an answer is waited for unless somebody says otherwise.
const WAIT_MS: u64 = 10_000;

/// What the agent takes beyond that: it counts from when it heard.
const SLACK: Duration = Duration::from_secs(10);

/// As outside: see `viv help exit-codes` there.
const FAILED: i32 = 1;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 3;
const CONFLICT: i32 = 4;
const GONE: i32 = 5;
const REFUSED: i32 = 6;
const UNREACHABLE: i32 = 7;
const TIMEOUT: i32 = 124;

const HELP: &str = "\
What this sandbox asks of whoever keeps it.

Usage: viv [OPTIONS] <COMMAND>

Commands:
  step          Say how far this task is
  gate          Run a command that does something to the world, if this task may
  schedule add  Run a command in this sandbox at given times
  schedule ls   List the schedules of this sandbox
  schedule rm   Take schedules away

Options:
      --json         Print JSON
      --wait <SPAN>  How long to wait for the daemon; 10s when not said
  -h, --help         Print help
  -V, --version      Print version

Exit codes: 0 done, 1 failed, 2 the command line or the request makes no sense, 3 no such schedule or task,
4 something stands in the way, 6 refused, 7 the daemon cannot be reached and nothing was done,
124 no answer in time, and whether it was done is not known.
";

/// Why a command did not do what it was asked to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    exit: i32,
    message: String,
    hint: Option<String>,
    docs: Option<String>,
}

impl Failure {
    fn new(exit: i32, message: impl Into<String>, hint: &str) -> Self {
        Self { exit, message: message.into(), hint: Some(hint.to_owned()), docs: None }
    }

    /// Whether it may go otherwise when it is tried again.
    fn is_passing(&self) -> bool {
        matches!(self.exit, UNREACHABLE | TIMEOUT)
    }

    fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message, "viv --help says what can be asked for")
    }
}

/// What stands before every verb, or among its flags.
#[derive(Debug)]
struct Options {
    json: bool,
    wait_ms: u64,
    home: PathBuf,
}

/// Does what is asked for; `None` when this is not the command but the agent.
pub(crate) fn run(mut arguments: impl Iterator<Item = OsString>) -> Option<i32> {
    let called = arguments.next().unwrap_or_default();
    let mut arguments = arguments.peekable();
    let is_viv = Path::new(&called).file_name() == Some(OsStr::new(VIV_VERB));
    if !is_viv {
        match arguments.peek()?.to_str() {
            Some(VIV_VERB) => drop(arguments.next()),
            Some(ASK_VERB) => {}
            _ => return None,
        }
    }
    let said = perform(arguments.collect());
    let (text, code) = match said {
        Ok(said) => said,
        Err(failure) => {
            let lines = [
                Some(format!("error: {}", failure.message)),
                failure.hint.map(|hint| format!("hint: {hint}")),
                failure.docs.map(|docs| format!("see: {docs}")),
            ];
            for line in lines.into_iter().flatten() {
                // There is nobody to tell when this cannot be written.
                let _ = writeln!(io::stderr().lock(), "{}", words::clean(&line));
            }
            return Some(failure.exit);
        }
    };
    match io::stdout().lock().write_all(text.as_bytes()).and_then(|()| io::stdout().lock().flush()) {
        Err(cause) if cause.kind() != io::ErrorKind::BrokenPipe => Some(FAILED),
        _ => Some(code),
    }
}

/// Answers what is to be written, and the exit code.
fn perform(arguments: Vec<OsString>) -> Result<(String, i32), Failure> {
    let mut words = Words::new(arguments)?;
    let mut options = Options { json: false, wait_ms: WAIT_MS, home: PathBuf::from(HOME) };
    loop {
        let well = |text: String| (text, 0);
        let Some(word) = words.next() else { return Ok(well(HELP.to_owned())) };
        match InsideVerb::of(&word) {
            Some(InsideVerb::Schedule) => return schedule::perform(words, options).map(well),
            Some(InsideVerb::Step) => return task::step(words, options).map(well),
            Some(InsideVerb::Gate) => return task::gate(words, options),
            None => {}
        }
        match word.as_str() {
            "-h" | "--help" | "help" => return Ok(well(HELP.to_owned())),
            "-V" | "--version" => return Ok(well(format!("viv {}\n", env!("CARGO_PKG_VERSION")))),
            ASK_VERB => return ask(&options, &words.value(ASK_VERB)?).map(|answer| well(answer + "\n")),
            _ if options.take(&word, &mut words)? => {}
            flag if flag.starts_with('-') => return Err(Failure::usage(format!("there is no option {flag}"))),
            verb => {
                let message = format!("there is no command {verb} inside a sandbox");
                return Err(Failure::usage(message));
            }
        }
    }
}

impl Options {
    /// Whether it was one of these.
    fn take(&mut self, word: &str, words: &mut Words) -> Result<bool, Failure> {
        let (flag, _) = words::split(word);
        match flag {
            "--json" => self.json = true,
            "--wait" => self.wait_ms = words::parse_span(&words.value(word)?)?,
            "--home" => self.home = words.value(word)?.into(),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// What the daemon says.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Told {
    Ok(Value),
    Error(Refusal),
}

#[derive(Deserialize)]
struct Refusal {
    code: String,
    message: String,
    hint: Option<String>,
    docs: Option<String>,
}

/// Asks the daemon, and answers what it said.
fn request(options: &Options, request: &Value) -> Result<Value, Failure> {
    let answer = ask(options, &request.to_string())?;
    let misunderstood = |_| Failure::new(FAILED, "the daemon's answer cannot be read", "is it of this version?");
    match serde_json::from_str(&answer).map_err(misunderstood)? {
        Told::Ok(value) => Ok(value),
        Told::Error(Refusal { code, message, hint, docs }) => {
            Err(Failure { exit: exit_code(&code), message, hint, docs })
        }
    }
}

/// The exit code that goes with a code of the API, as outside.
fn exit_code(code: &str) -> i32 {
    match code {
        "invalid_request" => USAGE,
        "not_found" => NOT_FOUND,
        "conflict" | "not_running" | "lifecycle_locked" => CONFLICT,
        "expired" | "stale_handle" | "gone" => GONE,
        "forbidden" | "quota_exceeded" | "too_many_requests" => REFUSED,
        "shutting_down" | "draining" => UNREACHABLE,
        "timeout" => TIMEOUT,
        _ => FAILED,
    }
}

/// Sends a text to whoever keeps the sandbox, and waits for what that says.
fn ask(options: &Options, body: &str) -> Result<String, Failure> {
    let call = InsideCall { wait_ms: options.wait_ms, body: body.to_owned() };
    match exchange(options, &call) {
        Ok(InsideReply::Answer(answer)) => Ok(answer),
        Ok(InsideReply::None(why)) => Err(no_answer(why)),
        Err(cause) if cause.kind() == io::ErrorKind::FileTooLarge => {
            let message = format!("the request is longer than {CALL_BYTES_MAX} bytes");
            Err(Failure::new(USAGE, message, "put what is long into a file of the sandbox"))
        }
        Err(cause) if matches!(cause.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            Err(no_answer(NoAnswer::Unknown))
        }
        Err(cause) => Err(Failure::new(
            UNREACHABLE,
            format!("the sandbox's agent cannot be reached: {cause}"),
            "is this a sandbox?",
        )),
    }
}

fn no_answer(why: NoAnswer) -> Failure {
    match why {
        NoAnswer::Nobody => Failure::new(
            UNREACHABLE,
            "the daemon cannot be reached: nobody heard this, and nothing was done",
            "try again later, or wait longer with --wait",
        ),
        NoAnswer::Unknown => Failure::new(
            TIMEOUT,
            "the daemon did not answer in time: whether it was done is not known",
            "viv schedule ls, or viv task show outside, tells how it stands, once the daemon can be reached",
        ),
        NoAnswer::Invalid => {
            Failure::new(FAILED, "the sandbox's agent did not understand this", "is it of this version?")
        }
    }
}

fn exchange(options: &Options, call: &InsideCall) -> io::Result<InsideReply> {
    let payload = serde_json::to_vec(call)?;
    if payload.len() > CALL_BYTES_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut stream = connect(&options.home)?;
    let patience = Duration::from_millis(options.wait_ms).saturating_add(SLACK);
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    let frame = [&frame::encode_header(Kind::Json, payload.len())[..], &payload].concat();
    stream.write_all(&frame)?;
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidData);
    let (_, length) = frame::decode_header(header).map_err(invalid)?;
    // An answer may be escaped as JSON once more.
    if length > 2 * ANSWER_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload)?;
    Ok(serde_json::from_slice(&payload)?)
}

fn connect(home: &Path) -> io::Result<UnixStream> {
    if home == Path::new(HOME) {
        UnixStream::connect_addr(&SocketAddr::from_abstract_name(INSIDE_SOCKET)?)
    } else {
        UnixStream::connect(home.join(INSIDE_SOCKET))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<OsString> {
        line.iter().map(OsString::from).collect()
    }

    #[test]
    fn it_is_the_command_only_when_it_is_called_so() {
        for line in [&["/.vivarium/agent"][..], &["/.vivarium/agent", "--home", "/x"], &["vivx", "schedule"]] {
            assert_eq!(run(words(line).into_iter()), None, "{line:?}");
        }
        for line in [&["/.vivarium/bin/viv", "--help"][..], &["viv", "-V"], &["/.vivarium/agent", "viv", "--help"]] {
            assert_eq!(run(words(line).into_iter()), Some(0), "{line:?}");
        }
        assert_eq!(run(words(&["viv", "create"]).into_iter()), Some(USAGE));
    }

    #[test]
    fn without_an_agent_it_says_so() {
        let nowhere = ["--home", "/no/such/folder", "schedule", "ls"];
        assert_eq!(perform(words(&nowhere)).unwrap_err().exit, UNREACHABLE);
        let long = "x".repeat(CALL_BYTES_MAX);
        assert_eq!(perform(words(&["--home", "/no", ASK_VERB, &long])).unwrap_err().exit, USAGE);
    }
}
