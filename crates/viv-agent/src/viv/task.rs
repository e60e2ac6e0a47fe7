//! `viv step` and `viv gate`: what the agent of a task says, and asks for.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::words::{Words, split};
use super::{CONFLICT, FAILED, Failure, Options, request};

const STEP_HELP: &str = "\
Say how far this task is: a sign of life, counted against its limit of steps.

Usage: viv step [OPTIONS] [NOTE]

Options:
      --count <COUNT>      How many steps more; 1 when not said, 0 counts none
      --session <SESSION>  The agent's own session, kept with the task and given back as VIV_TASK_SESSION
      --wait <SPAN>        How long to wait for the daemon; 10s when not said
  -h, --help               Print help
";

const GATE_HELP: &str = "\
Run a command that does something to the world, if this task may: not once it is to end.

Usage: viv gate [OPTIONS] -- <COMMAND>...

The command is handed what the task keeps behind the gate. What came of it is recorded: done when it exits with 0, failed
otherwise, unknown when nobody could say.

Options:
      --effect <EFFECT>  Which, of those that the task declared; need not be said when there is one
      --wait <SPAN>      How long to wait for the daemon; 60s when not said
  -h, --help             Print help

Exit codes: the command's own; 4 when it may not begin, 7 and 124 when the daemon did not answer, and then it was not run.
";

/// How long the gate is waited for unless somebody says otherwise: a daemon may have to start again first.
const GATE_WAIT_MS: u64 = 60_000;

/// How long telling what came of an effect is tried: longer than a daemon takes to start again.
const TELL_WITHIN: Duration = Duration::from_secs(120);

/// Between two tries.
const TELL_PAUSE: Duration = Duration::from_millis(200);

/// Longest note that is passed on.
const NOTE_CHARS_MAX: usize = 256;

/// Which task this is, as its environment says.
fn task() -> Result<(String, u64), Failure> {
    let missing = || Failure::new(CONFLICT, "this is not a step of a task", "viv task run outside begins one");
    let id = std::env::var("VIV_TASK").map_err(|_| missing())?;
    let run = std::env::var("VIV_TASK_RUN").ok().and_then(|run| run.parse().ok()).ok_or_else(missing)?;
    Ok((id, run))
}

fn note(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(NOTE_CHARS_MAX).collect()
}

pub(super) fn step(mut words: Words, mut options: Options) -> Result<String, Failure> {
    let (mut count, mut session, mut said) = (1_u64, None, Vec::new());
    while let Some(word) = words.next() {
        match split(&word).0 {
            "-h" | "--help" => return Ok(STEP_HELP.to_owned()),
            "--count" => {
                let text = words.value(&word)?;
                count = text.parse().map_err(|_| Failure::usage(format!("{text:?} is no number of steps")))?;
            }
            "--session" => session = Some(words.value(&word)?),
            "--" => {
                said.extend(words.rest());
                break;
            }
            _ if options.take(&word, &mut words)? => {}
            flag if flag.starts_with('-') => return Err(Failure::usage(format!("there is no option {flag}"))),
            _ => said.push(word),
        }
    }
    let (task, run) = task()?;
    let mut report = json!({ "task": task, "run": run, "steps": count });
    if !said.is_empty() {
        report["note"] = note(&said.join(" ")).into();
    }
    if let Some(session) = session {
        report["session"] = session.into();
    }
    request(&options, &json!({ "task_step": report })).map(|_| String::new())
}

/// What is to be done behind the gate.
#[derive(Debug)]
struct Asked {
    /// Nothing is the only one that there is.
    effect: Option<String>,
    argv: Vec<String>,
}

/// Answers the exit code of the command, or what is to be written instead.
pub(super) fn gate(words: Words, mut options: Options) -> Result<(String, i32), Failure> {
    options.wait_ms = options.wait_ms.max(GATE_WAIT_MS);
    let Some(asked) = parse_gate(words, &mut options)? else { return Ok((GATE_HELP.to_owned(), 0)) };
    let (task, run) = task()?;
    let mut gate = json!({ "task": task, "run": run });
    if let Some(effect) = &asked.effect {
        gate["effect"] = effect.as_str().into();
    }
    let granted = request(&options, &json!({ "task_gate": gate }))?;
    let grant = granted["grant"].as_str().unwrap_or_default().to_owned();
    let handed = granted["env"].as_object().into_iter().flatten();
    let handed = handed.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
    let ended = Command::new(&asked.argv[0]).args(&asked.argv[1..]).envs(handed).status();
    let (code, failed) = match &ended {
        Ok(status) => outcome(*status),
        Err(cause) => (127, Some(format!("{} cannot be run: {cause}", asked.argv[0]))),
    };
    let mut report = json!({ "task": task, "run": run, "grant": grant });
    if let Some(failed) = &failed {
        report["failed"] = note(failed).into();
    }
    tell(&options, &json!({ "task_effect_ended": report }))?;
    if let Err(cause) = ended {
        return Err(Failure::new(FAILED, format!("{} cannot be run: {cause}", asked.argv[0]), "is it in the PATH?"));
    }
    Ok((String::new(), code))
}

fn parse_gate(mut words: Words, options: &mut Options) -> Result<Option<Asked>, Failure> {
    let mut effect = None;
    let argv: Vec<String> = loop {
        let Some(word) = words.next() else { break Vec::new() };
        match split(&word).0 {
            "-h" | "--help" => return Ok(None),
            "--effect" => effect = Some(words.value(&word)?),
            "--" => break words.rest(),
            _ if options.take(&word, &mut words)? => {}
            flag if flag.starts_with('-') => return Err(Failure::usage(format!("there is no option {flag}"))),
            _ => break std::iter::once(word).chain(words.rest()).collect(),
        }
    };
    if argv.is_empty() {
        return Err(Failure::usage("viv gate runs a command, and there is none"));
    }
    Ok(Some(Asked { effect, argv }))
}

/// The code that we end with, and why it failed, if it did.
fn outcome(status: ExitStatus) -> (i32, Option<String>) {
    match (status.code(), status.signal()) {
        (Some(0), _) => (0, None),
        (Some(code), _) => (code, Some(format!("exit {code}"))),
        (None, Some(signal)) => (128 + signal, Some(format!("signal {signal}"))),
        (None, None) => (FAILED, Some("it ended in no way that is known".to_owned())),
    }
}

/// Tells what came of an effect, also to a daemon that has to start again first.
fn tell(options: &Options, report: &Value) -> Result<(), Failure> {
    let until = Instant::now() + TELL_WITHIN;
    loop {
        match request(options, report) {
            Ok(_) => return Ok(()),
            Err(failure) if Instant::now() >= until || !failure.is_passing() => {
                let message = format!("the command ended, and that could not be told: {}", failure.message);
                return Err(Failure { message, ..failure });
            }
            Err(_) => std::thread::sleep(TELL_PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use super::*;

    fn parsed(line: &[&str]) -> Result<Option<Asked>, Failure> {
        let words = Words::new(line.iter().map(OsString::from).collect())?;
        let mut options = Options { json: false, wait_ms: 1, home: PathBuf::from("/none") };
        parse_gate(words, &mut options)
    }

    #[test]
    fn k5_what_runs_behind_the_gate_is_told_from_its_flags() {
        let asked = parsed(&["--effect", "push", "--wait=1s", "--", "git", "push", "--force"]).unwrap().unwrap();
        let argv = vec!["git".into(), "push".into(), "--force".into()];
        assert_eq!((asked.effect.as_deref(), asked.argv), (Some("push"), argv));
        let asked = parsed(&["--effect=push", "git", "push"]).unwrap().unwrap();
        assert_eq!(asked.argv, ["git", "push"]);
        for only in [&["--", "git", "push"][..], &["git", "push"]] {
            let asked = parsed(only).unwrap().unwrap();
            assert_eq!((asked.effect, asked.argv), (None, vec!["git".to_owned(), "push".to_owned()]));
        }
        assert!(parsed(&["--help"]).unwrap().is_none());
        for wrong in [&[][..], &["--"], &["--effect", "push"], &["--effect"], &["--effect", "push", "--"], &["--no"]] {
            assert!(parsed(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn k5_only_an_exit_of_0_is_done() {
        assert_eq!(outcome(ExitStatus::from_raw(0)), (0, None));
        assert_eq!(outcome(ExitStatus::from_raw(3 << 8)), (3, Some("exit 3".to_owned())));
        assert_eq!(outcome(ExitStatus::from_raw(9)), (137, Some("signal 9".to_owned())));
    }
}
