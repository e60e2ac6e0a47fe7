//! `viv schedule`

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::words::{self, Words, clean, parse_span, span, table};
use super::{Failure, Options, request};

const HELP: &str = "\
Run commands in this sandbox at given times. They live outside of it: it is woken for them.

Usage: viv schedule add --cron <CRON> [OPTIONS] -- <COMMAND>...
       viv schedule ls [--json]
       viv schedule rm <ID>...

Options of add:
      --cron <CRON>      When: 'minute hour day-of-month month day-of-week', or @hourly, @daily, @weekly, @monthly, @yearly
      --zone <ZONE>      By which clock, such as Europe/Berlin; UTC when not said
      --missed <MISSED>  What becomes of times at which no daemon was there: skip (as when not said), once, all
      --timeout <SPAN>   End a run after this long; 5 minutes when not said
  -e, --env <NAME=VALUE> Added to the sandbox's environment: NAME=VALUE, or NAME for the value that it has here
      --cwd <PATH>       Where it starts; the sandbox's working directory when not said
  -u, --user <USER[:GROUP]>
                         As whom; root of the sandbox when not said
      --disabled         Make it, and keep it from coming due

Options:
      --json         Print JSON
      --wait <SPAN>  How long to wait for the daemon; 10s when not said
  -h, --help         Print help
";

pub(super) fn perform(mut words: Words, mut options: Options) -> Result<String, Failure> {
    loop {
        let Some(word) = words.next() else {
            return Err(Failure::usage("viv schedule wants a command: add, ls or rm"));
        };
        match word.as_str() {
            "add" => return add(words, options),
            "ls" => return list(words, options),
            "rm" => return remove(words, options),
            "-h" | "--help" | "help" => return Ok(HELP.to_owned()),
            _ if options.take(&word, &mut words)? => {}
            other => return Err(Failure::usage(format!("there is no viv schedule {other} inside a sandbox"))),
        }
    }
}

/// A line of JSON.
fn line(value: &Value) -> String {
    format!("{value}\n")
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or_default()
}

fn add(words: Words, mut options: Options) -> Result<String, Failure> {
    let Some(schedule) = parse_add(words, &mut options)? else { return Ok(HELP.to_owned()) };
    let made = request(&options, &json!({ "schedule_add": schedule }))?;
    Ok(if options.json { line(&made) } else { format!("{}\n", clean(text(&made, "id"))) })
}

/// The schedule that is asked for; `None` when it is help.
fn parse_add(mut words: Words, options: &mut Options) -> Result<Option<Value>, Failure> {
    let mut schedule = Map::new();
    let mut env = Map::new();
    let argv = loop {
        let Some(word) = words.next() else { break Vec::new() };
        let flag = words::split(&word).0;
        match flag {
            "--cron" | "--zone" | "--missed" | "--cwd" => {
                let key = flag.trim_start_matches('-').to_owned();
                schedule.insert(key, words.value(&word)?.into());
            }
            "-u" | "--user" => drop(schedule.insert("user".to_owned(), words.value(&word)?.into())),
            "--timeout" => drop(schedule.insert("limit_ms".to_owned(), parse_span(&words.value(&word)?)?.into())),
            "-e" | "--env" => {
                let (name, value) = variable(&words.value(&word)?)?;
                env.insert(name, value.into());
            }
            "--disabled" => drop(schedule.insert("enabled".to_owned(), false.into())),
            "-h" | "--help" => return Ok(None),
            "--" => break words.rest(),
            _ if options.take(&word, &mut words)? => {}
            _ if word.starts_with('-') => return Err(Failure::usage(format!("there is no option {flag}"))),
            _ => break std::iter::once(word).chain(words.rest()).collect(),
        }
    };
    if !schedule.contains_key("cron") {
        return Err(Failure::usage("--cron says when, and is missing"));
    }
    if argv.is_empty() {
        return Err(Failure::usage("a schedule runs a command, and there is none"));
    }
    schedule.insert("argv".to_owned(), argv.into());
    schedule.insert("env".to_owned(), env.into());
    Ok(Some(schedule.into()))
}

/// `NAME=VALUE`, or `NAME` for the value that it has here.
fn variable(word: &str) -> Result<(String, String), Failure> {
    if let Some((name, value)) = word.split_once('=') {
        return Ok((name.to_owned(), value.to_owned()));
    }
    let missing = |_| Failure::usage(format!("there is no variable {word} here that could be passed on"));
    Ok((word.to_owned(), std::env::var(word).map_err(missing)?))
}

fn list(mut words: Words, mut options: Options) -> Result<String, Failure> {
    while let Some(word) = words.next() {
        match word.as_str() {
            "-h" | "--help" => return Ok(HELP.to_owned()),
            _ if options.take(&word, &mut words)? => {}
            _ => {
                return Err(Failure::usage(format!("viv schedule ls takes no {word}: it lists those of this sandbox")));
            }
        }
    }
    let listed = request(&options, &json!({ "schedule_list": {} }))?;
    let all = listed.as_array().map(Vec::as_slice).unwrap_or_default();
    if options.json {
        return Ok(all.iter().map(line).collect());
    }
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let rows = all.iter().map(|schedule| row(schedule, now_ms)).collect();
    Ok(table(["ID", "CRON", "ZONE", "NEXT", "LAST", "COMMAND"], rows))
}

fn row(schedule: &Value, now_ms: u64) -> [String; 6] {
    let next = match schedule["next_at_ms"].as_u64() {
        _ if schedule["running"].is_object() => "running".to_owned(),
        Some(at_ms) => format!("in {}", span(at_ms.saturating_sub(now_ms))),
        None => "disabled".to_owned(),
    };
    let last = &schedule["last"];
    let last = match (last["outcome"].as_str(), last["exit_code"].as_i64(), last["why"].as_str()) {
        (Some(outcome), Some(code), _) => format!("{outcome} {code}"),
        (Some(outcome), None, Some(why)) => format!("{outcome} ({why})"),
        (Some(outcome), None, None) => outcome.to_owned(),
        (None, ..) => "-".to_owned(),
    };
    let argv: Vec<&str> = schedule["argv"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    [text(schedule, "id"), text(schedule, "cron"), text(schedule, "zone"), &next, &last, &argv.join(" ")].map(clean)
}

fn remove(mut words: Words, mut options: Options) -> Result<String, Failure> {
    let mut schedules = Vec::new();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-h" | "--help" => return Ok(HELP.to_owned()),
            _ if options.take(&word, &mut words)? => {}
            _ if word.starts_with('-') => return Err(Failure::usage(format!("there is no option {word}"))),
            _ => schedules.push(word),
        }
    }
    if schedules.is_empty() {
        return Err(Failure::usage("viv schedule rm wants an id"));
    }
    let mut said = String::new();
    for schedule in schedules {
        request(&options, &json!({ "schedule_remove": { "schedule": schedule } })).map_err(|failure| {
            let done = said.trim_end().replace('\n', ", ");
            let before = if done.is_empty() { done } else { format!(" (removed before: {done})") };
            Failure { message: format!("{}{before}", failure.message), ..failure }
        })?;
        if options.json {
            said.push_str(&line(&json!({ "removed": schedule })));
        } else {
            said.push_str(&schedule);
            said.push('\n');
        }
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use super::*;

    fn parsed(line: &[&str]) -> Result<Option<Value>, Failure> {
        let words = Words::new(line.iter().map(OsString::from).collect())?;
        let mut options = Options { json: false, wait_ms: 1, home: PathBuf::from("/none") };
        parse_add(words, &mut options)
    }

    #[test]
    fn flags_are_those_of_outside() {
        let line = [
            "--cron",
            "@daily",
            "--zone=Europe/Berlin",
            "--missed",
            "once",
            "--timeout",
            "1h30m",
            "-e",
            "A=b=c",
            "--cwd",
            "/x",
            "-u",
            "ann",
            "--disabled",
            "--json",
            "--",
            "sh",
            "-c",
            "--cron",
        ];
        let expected = json!({
            "cron": "@daily", "zone": "Europe/Berlin", "missed": "once", "limit_ms": 5_400_000, "env": {"A": "b=c"},
            "cwd": "/x", "user": "ann", "enabled": false, "argv": ["sh", "-c", "--cron"],
        });
        assert_eq!(parsed(&line), Ok(Some(expected)));
        let plain = json!({ "cron": "0 4 * * *", "env": {}, "argv": ["echo", "--zone"] });
        assert_eq!(parsed(&["--cron=0 4 * * *", "echo", "--zone"]), Ok(Some(plain)));
        assert_eq!(parsed(&["--help"]), Ok(None));
    }

    #[test]
    fn what_makes_no_sense_is_refused_before_anybody_is_asked() {
        for line in [
            &["--cron"][..],
            &["echo"],
            &["--cron", "@daily"],
            &["--cron", "@daily", "--"],
            &["--cron", "@daily", "--nonsense", "echo"],
            &["--cron", "@daily", "--timeout", "soon", "echo"],
            &["--cron", "@daily", "--env", "NO_SUCH_VARIABLE_HERE", "echo"],
        ] {
            let refused = parsed(line).unwrap_err();
            assert!(refused.exit == super::super::USAGE && refused.hint.is_some(), "{line:?}: {refused:?}");
        }
    }
}
