//! Tools on sandboxes: create, ensure, list, diagnose, execute, read, write.

use std::fmt::Write as _;
use std::io::Read;

use anyhow::Context;
use rmcp::model::CallToolResult;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use viv_api::bound::{
    Argument, Argv, CommandEnv, ExecutionMs, ListDepth, Offset, PageLimit, Path, QueueMs, SandboxRef, UserName,
};
use viv_api::execution::{Execution, ExecutionState, OutputLine, StartExecution, TimeLimit};
use viv_api::query::{ListSandboxes, ReadFile, WriteFile};
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, Sandbox};

use super::result::{TEXT_BYTES_MAX, boundary_after, boundary_before, failed, said, shown};
use super::schema::{flag, map, number, object, sandbox, text, texts};
use super::{Call, Entry};

/// How long a command that waits for its sandbox may.
const QUEUE_MS: u64 = 120_000;

/// How many sandboxes are listed when nothing was said.
const LISTED: u64 = 50;

pub(super) const TOOLS: &[Entry] = &[
    Entry {
        name: "sandbox_create",
        about: "Make a sandbox and wait until it is ready. With a name it is persistent, and found by it later.",
        takes: || {
            object(
                &[
                    ("name", text("What it is called; without, it has only an id and leaves nothing")),
                    ("image", text("What it is made of: `host`, a directory, or an image's name")),
                    ("labels", map("Free labels")),
                    ("env", map("Environment of every command")),
                ],
                &[],
            )
        },
        run: create,
    },
    Entry {
        name: "sandbox_ensure",
        about: "Make a sandbox run: join it, wait for it, resume it or make it again.",
        takes: || object(&[sandbox()], &["sandbox"]),
        run: ensure,
    },
    Entry {
        name: "sandbox_list",
        about: "List sandboxes with their status.",
        takes: || object(&[("limit", number("How many at most; 50 when not said"))], &[]),
        run: list,
    },
    Entry {
        name: "sandbox_diagnose",
        about: "All that is known about a sandbox: what is wanted, where it stands, what was checked when, what helps.",
        takes: || object(&[sandbox()], &["sandbox"]),
        run: diagnose,
    },
    Entry {
        name: "execute",
        about: "Run a command in a sandbox to its end, and give its output and exit code. It waits for a sandbox that is \
                on its way. Cancelling this call ends the command with all that it started.",
        takes: || {
            object(
                &[
                    sandbox(),
                    ("argv", texts("Program and arguments")),
                    ("script", text("A shell script instead of argv")),
                    ("cwd", text("Where it starts")),
                    ("user", text("As whom")),
                    ("env", map("Added to its environment")),
                    ("limit_ms", number("End it after so many milliseconds; 5 minutes when not said")),
                    ("wake", flag("Resume the sandbox if it is frozen or hibernated")),
                ],
                &["sandbox"],
            )
        },
        run: execute,
    },
    Entry {
        name: "read_file",
        about: "Read a text file in a sandbox, from an offset on.",
        takes: || {
            object(
                &[sandbox(), ("path", text("The file")), ("offset", number("First byte")), ("length", number("Bytes"))],
                &["sandbox", "path"],
            )
        },
        run: read,
    },
    Entry {
        name: "write_file",
        about: "Write a text file in a sandbox, in one step; directories above it are made.",
        takes: || {
            object(
                &[
                    sandbox(),
                    ("path", text("The file")),
                    ("text", text("What is to be in it")),
                    ("mode", text("Permission bits in octal; 644 when not said")),
                ],
                &["sandbox", "path", "text"],
            )
        },
        run: write,
    },
    Entry {
        name: "list_files",
        about: "List a directory in a sandbox.",
        takes: || {
            object(
                &[sandbox(), ("path", text("The directory")), ("depth", number("How deep; 1 when not said"))],
                &["sandbox", "path"],
            )
        },
        run: files,
    },
];

/// What was given, read strictly.
pub(super) fn given<T: DeserializeOwned>(call: &Call) -> anyhow::Result<T> {
    serde_json::from_value(call.arguments.clone()).context("the arguments are wrong")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    sandbox: SandboxRef,
}

fn create(call: &Call) -> anyhow::Result<CallToolResult> {
    let request: CreateSandbox = given(call)?;
    call.tell("making it");
    let made = call.client.create(&request, None)?.into_sandbox();
    shown(&brief(&made), &format!("viv show {}", made.id))
}

fn ensure(call: &Call) -> anyhow::Result<CallToolResult> {
    let Which { sandbox } = given(call)?;
    call.tell("waiting for it");
    let ensured = call.client.sandbox(sandbox.clone()).ensure(&EnsureSandbox::default())?.into_sandbox();
    shown(&brief(&ensured), &format!("viv show {sandbox}"))
}

/// What a model needs of a sandbox.
fn brief(sandbox: &Sandbox) -> Value {
    json!({
        "id": sandbox.id, "name": sandbox.name, "status": sandbox.status, "generation": sandbox.generation,
        "labels": sandbox.labels, "created_at_ms": sandbox.created_at_ms, "expires_at_ms": sandbox.expires_at_ms,
        "cause": sandbox.cause.as_ref().map(|cause| &cause.message),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    limit: Option<PageLimit>,
}

fn list(call: &Call) -> anyhow::Result<CallToolResult> {
    let Listed { limit } = given(call)?;
    let limit = limit.or(PageLimit::new(LISTED).ok());
    let page = call.client.list(&ListSandboxes { limit, ..ListSandboxes::default() })?;
    let sandboxes: Vec<Value> = page.items.iter().map(brief).collect();
    shown(&json!({ "sandboxes": sandboxes, "more": page.next.is_some() }), "viv ps")
}

fn diagnose(call: &Call) -> anyhow::Result<CallToolResult> {
    let Which { sandbox } = given(call)?;
    shown(&call.client.sandbox(sandbox.clone()).diagnosis()?, &format!("viv show {sandbox} --json"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Execute {
    sandbox: SandboxRef,
    argv: Option<Argv>,
    script: Option<Argument>,
    cwd: Option<Path>,
    user: Option<UserName>,
    #[serde(default)]
    env: CommandEnv,
    limit_ms: Option<ExecutionMs>,
    #[serde(default)]
    wake: bool,
}

fn execute(call: &Call) -> anyhow::Result<CallToolResult> {
    let Execute { sandbox, argv, script, cwd, user, env, limit_ms, wake } = given(call)?;
    let argv = match (argv, script) {
        (Some(argv), None) => argv,
        (None, Some(script)) => Argv::new(vec![Argument::new("/bin/sh")?, Argument::new("-c")?, script])?,
        (Some(_), Some(_)) | (None, None) => anyhow::bail!("give argv or script, and not both"),
    };
    let mut request = StartExecution::new(argv);
    (request.cwd, request.user, request.env, request.wake) = (cwd, user, env, wake);
    request.limit_ms = limit_ms.map(TimeLimit::Ms);
    request.queue_ms = Some(QueueMs::nearest(QUEUE_MS));
    let started = call.client.sandbox(sandbox).start(&request, None)?;
    let (client, execution) = (call.client.clone(), started.clone());
    call.on_cancel.set(move || {
        let handle = client.sandbox(SandboxRef::from(&execution.sandbox)).execution(execution.id.clone());
        // One that has ended is as good as cancelled.
        let _ = handle.cancel();
    });
    follow(call, &started)
}

/// Stays with a command to its end; what it says is news.
fn follow(call: &Call, started: &Execution) -> anyhow::Result<CallToolResult> {
    let handle = call.client.sandbox(SandboxRef::from(&started.sandbox)).execution(started.id.clone());
    let mut said = Kept::default();
    let mut cut = 0;
    for line in handle.follow(0) {
        match line? {
            OutputLine::Chunk(chunk) => {
                let text = String::from_utf8_lossy(&chunk.data().unwrap_or_default()).into_owned();
                call.tell(text.clone());
                said.push(&text);
            }
            OutputLine::Cut(range) => cut += range.cut.to - range.cut.from,
            OutputLine::End(end) => return Ok(ended(&end.end, &said.whole(), cut)),
            OutputLine::Alive(_) => {}
        }
        if call.is_cancelled() {
            return Ok(failed("it was cancelled"));
        }
    }
    anyhow::bail!("the output of {} ended without a word", started.id)
}

/// An output of which only as much is held as is shown.
#[derive(Default)]
pub(super) struct Kept {
    head: String,
    tail: String,
    left_out: usize,
}

impl Kept {
    pub(super) fn push(&mut self, text: &str) {
        let half = TEXT_BYTES_MAX / 2;
        let mut text = text;
        if self.tail.is_empty() && self.head.len() < half {
            let split = boundary_before(text, half - self.head.len());
            self.head.push_str(&text[..split]);
            text = &text[split..];
        }
        self.tail.push_str(text);
        // Now and then, so that it costs next to nothing.
        if self.tail.len() > 2 * TEXT_BYTES_MAX {
            let from = boundary_after(&self.tail, self.tail.len() - half);
            self.left_out += from;
            self.tail.drain(..from);
        }
    }

    /// What is shown of it, and how much is not.
    pub(super) fn whole(&self) -> (String, usize) {
        let half = TEXT_BYTES_MAX / 2;
        let from = boundary_after(&self.tail, self.tail.len().saturating_sub(half));
        let left_out = self.left_out + from;
        if left_out == 0 {
            return (format!("{}{}", self.head, self.tail), 0);
        }
        (format!("{}\n[… {left_out} bytes left out …]\n{}", self.head, &self.tail[from..]), left_out)
    }
}

fn ended(end: &Execution, (output, left_out): &(String, usize), cut: u64) -> CallToolResult {
    let how = match (end.exit_code, end.signal, &end.message) {
        (Some(code), ..) => format!("exit code {code}"),
        (None, Some(signal), _) => format!("ended by signal {signal}"),
        (None, None, Some(message)) => format!("{}: {message}", end.cause.as_deref().unwrap_or("ended")),
        (None, None, None) => end.cause.clone().unwrap_or_else(|| "ended".to_owned()),
    };
    let mut text = output.clone();
    if *left_out > 0 || cut > 0 {
        let _ = write!(text, "\n[all that is kept: viv attach {} {}]", end.sandbox, end.id);
    }
    let well = end.state == ExecutionState::Exited && end.exit_code == Some(0);
    let text = format!("{text}\n[{how}]");
    let mut result = if well { said(text) } else { failed(&text) };
    result.structured_content = Some(json!({
        "execution": end.id, "sandbox": end.sandbox, "generation": end.generation, "state": end.state,
        "exit_code": end.exit_code, "signal": end.signal, "cause": end.cause, "output_bytes": end.output_bytes,
    }));
    result
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadArguments {
    sandbox: SandboxRef,
    path: Path,
    offset: Option<Offset>,
    length: Option<Offset>,
}

fn read(call: &Call) -> anyhow::Result<CallToolResult> {
    let ReadArguments { sandbox, path, offset, length } = given(call)?;
    let from = offset.map_or(0, Offset::get);
    let most = length.map_or(TEXT_BYTES_MAX as u64, Offset::get).min(TEXT_BYTES_MAX as u64);
    let query = ReadFile { path: path.clone(), offset, length: Some(Offset::nearest(most)), generation: None };
    let handle = call.client.sandbox(sandbox.clone());
    let size = handle.stat_file(&path)?.size_bytes;
    let mut bytes = Vec::new();
    handle.read_file(&query)?.take(most).read_to_end(&mut bytes)?;
    let end = from + bytes.len() as u64;
    let mut content = String::from_utf8_lossy(&bytes).into_owned();
    if end < size {
        let _ = write!(content, "\n[… {} bytes more, from offset {end} on …]", size - end);
    }
    let mut result = said(content);
    result.structured_content = Some(json!({ "path": path, "offset": from, "next_offset": end, "size": size }));
    Ok(result)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WriteArguments {
    sandbox: SandboxRef,
    path: Path,
    text: String,
    mode: Option<viv_api::bound::FileMode>,
}

fn write(call: &Call) -> anyhow::Result<CallToolResult> {
    let WriteArguments { sandbox, path, text, mode } = given(call)?;
    let query = WriteFile { path: path.clone(), mode, user: None, generation: None };
    let stat = call.client.sandbox(sandbox).write_file(&query, &mut text.as_bytes())?;
    shown(&stat, &format!("{path}"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FilesArguments {
    sandbox: SandboxRef,
    path: Path,
    depth: Option<ListDepth>,
}

fn files(call: &Call) -> anyhow::Result<CallToolResult> {
    let FilesArguments { sandbox, path, depth } = given(call)?;
    let listing = call.client.sandbox(sandbox.clone()).list_files(&path, depth)?;
    shown(&listing, &format!("viv exec {sandbox} ls {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_output_as_much_is_held_as_is_shown() {
        let mut kept = Kept::default();
        kept.push("first\n");
        for _ in 0..100_000 {
            kept.push("some line of it\n");
        }
        kept.push("last\n");
        assert!(kept.head.len() + kept.tail.len() < 4 * TEXT_BYTES_MAX);
        let (shown, left_out) = kept.whole();
        assert!(shown.starts_with("first\n") && shown.ends_with("last\n") && left_out > 1_000_000);
        assert!(shown.len() < TEXT_BYTES_MAX + 200);
        let mut short = Kept::default();
        short.push("all");
        assert_eq!(short.whole(), ("all".to_owned(), 0));
    }

    #[test]
    fn every_tool_takes_an_object_and_has_a_name_of_its_own() {
        let mut names: Vec<_> = super::super::entries().map(|entry| entry.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        for entry in super::super::entries() {
            let schema = (entry.takes)();
            assert_eq!(schema["type"], "object", "{}", entry.name);
            for needed in schema["required"].as_array().unwrap() {
                assert!(schema["properties"].get(needed.as_str().unwrap()).is_some(), "{} {needed}", entry.name);
            }
        }
    }
}
