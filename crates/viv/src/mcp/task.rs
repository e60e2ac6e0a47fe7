//! Tools on tasks: run, show, list, read, stop, continue.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::thread;
use std::time::Duration;

use rmcp::model::CallToolResult;
use serde::Deserialize;
use serde_json::{Value, json};
use viv_api::ErrorCode;
use viv_api::bound::{
    Argument, Argv, CommandEnv, CommandEnvValue, EffectName, EnvName, FileText, GitReference, GitUrl, ImageName,
    PageLimit, Path, SandboxName, SandboxRef, SearchText, StepNumber, TailLines, TaskEffects, TaskFiles, TaskMs,
    TaskRef, TaskSteps, UserName, WaitMs,
};
use viv_api::client::Output;
use viv_api::execution::OutputLine;
use viv_api::query::ListTasks;
use viv_api::sandbox::CreateSandbox;
use viv_api::task::{
    ContinueTask, CreateTask, StopTask, Task, TaskEffect, TaskFile, TaskLimits, TaskSource, TaskState, TaskStep,
};

use super::result::{failed, said, shown};
use super::sandbox::{Kept, given};
use super::schema::{flag, map, number, object, text, texts};
use super::{Call, Entry};

/// How many tasks are listed when nothing was said.
const LISTED: u64 = 50;

/// How long a stop is waited for when nothing was said: its answer is that everything is gone (K2).
const STOP_WAIT_MS: u64 = 30_000;

/// Between two looks whether a step has begun.
const EVERY: Duration = Duration::from_millis(100);

pub(super) const TOOLS: &[Entry] = &[
    Entry {
        name: "task_run",
        about: "Run a command, or steps one after the other, as a task: it ends in exactly one way, and can be stopped \
                from anywhere. This call stays with it to its end, and cancelling the call stops the task; with \
                `detach` it answers at once with the task's id. What it does to the world goes through `viv gate \
                --effect NAME -- COMMAND` inside, for each of `effects`.",
        takes: || {
            let mut takes = command();
            takes.extend([
                ("sandbox", text("Id or name of a sandbox to run in; without, one is made")),
                ("image", text("What the sandbox that is made is made of: `host`, a directory, or an image's name")),
                ("name", text("What the sandbox that is made is called")),
                ("source", text("A repository that is cloned first, as seen from inside; steps start in it")),
                ("reference", text("What is checked out of it")),
                ("files", map("Texts that are written first, by their paths")),
                ("effects", texts("What it may do to the world, by names; with `:again` more than once")),
                ("credentials", texts("Variables, by names that `viv mcp` was told, handed out behind the gate only")),
            ]);
            object(&takes, &[])
        },
        run,
    },
    Entry {
        name: "task_continue",
        about: "Go on with a task that is over and was kept alive, with another command or the same. Its sandbox is \
                probed and used again, or made again, which is said (`came`).",
        takes: || {
            let mut takes = command();
            takes.push(task());
            object(&takes, &["task"])
        },
        run: go_on,
    },
    Entry {
        name: "task_stop",
        about: "Stop a task, whoever runs it. Answers when everything of it was seen to be gone.",
        takes: || {
            object(&[task(), ("wait_ms", number("How long to wait for that; 30 s when not said, 0 not"))], &["task"])
        },
        run: stop,
    },
    Entry {
        name: "task_show",
        about: "How a task stands: its state and cause, its steps, what it did to the world, and what happened when.",
        takes: || object(&[task()], &["task"]),
        run: show,
    },
    Entry {
        name: "task_list",
        about: "List tasks, newest first.",
        takes: || {
            object(
                &[
                    ("sandbox", text("Only those of this sandbox")),
                    (
                        "states",
                        texts("Only those in these states: queued, preparing, running, committing, succeeded, …"),
                    ),
                    ("limit", number("How many at most; 50 when not said")),
                ],
                &[],
            )
        },
        run: list,
    },
    Entry {
        name: "task_logs",
        about: "What a step of a task wrote so far, also after its sandbox is gone.",
        takes: || {
            object(
                &[
                    task(),
                    ("step", number("Which step: the first one is 0, and is meant when not said")),
                    ("tail", number("Only the last so many lines")),
                    ("search", text("Only lines with this text in them, at most 1,000")),
                ],
                &["task"],
            )
        },
        run: logs,
    },
];

fn task() -> (&'static str, Value) {
    ("task", text("Id of the task"))
}

/// What is run, and for how long.
fn command() -> Vec<(&'static str, Value)> {
    vec![
        ("argv", texts("Program and arguments")),
        ("script", text("A shell script instead of argv")),
        ("steps", texts("Several shell scripts instead, one after the other")),
        ("cwd", text("Where they start")),
        ("user", text("As whom")),
        ("env", map("Added to their environment")),
        ("inactivity_ms", number("End it when nothing was heard of it for so long; 60 s when not said, 0 never")),
        ("total_ms", number("End it after so long in all; 5 minutes when not said, 0 never")),
        ("keep_alive", flag("Keep its sandbox, so that it can be continued")),
        ("detach", flag("Answer at once with its id")),
    ]
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    sandbox: Option<SandboxRef>,
    image: Option<ImageName>,
    name: Option<SandboxName>,
    source: Option<GitUrl>,
    reference: Option<GitReference>,
    #[serde(default)]
    files: BTreeMap<Path, FileText>,
    #[serde(default)]
    effects: Vec<String>,
    #[serde(default)]
    credentials: Vec<String>,
    argv: Option<Argv>,
    script: Option<Argument>,
    #[serde(default)]
    steps: Vec<Argument>,
    cwd: Option<Path>,
    user: Option<UserName>,
    #[serde(default)]
    env: CommandEnv,
    inactivity_ms: Option<TaskMs>,
    total_ms: Option<TaskMs>,
    #[serde(default)]
    keep_alive: bool,
    #[serde(default)]
    detach: bool,
}

/// One command, or steps.
fn commands(
    argv: Option<Argv>,
    script: Option<Argument>,
    steps: Vec<Argument>,
) -> anyhow::Result<(Option<Argv>, TaskSteps)> {
    let shell = |line: Argument| Argv::new(vec![Argument::new("/bin/sh")?, Argument::new("-c")?, line]);
    let (argv, steps) = match (argv, script, steps) {
        (argv, None, steps) if steps.is_empty() => (argv, steps),
        (None, Some(script), steps) if steps.is_empty() => (Some(shell(script)?), steps),
        (None, None, steps) => (None, steps),
        (Some(_) | None, Some(_) | None, _) => anyhow::bail!("give one of argv, script and steps"),
    };
    let step = |line| -> anyhow::Result<TaskStep> {
        Ok(TaskStep { argv: shell(line)?, env: CommandEnv::default(), cwd: None, limit_ms: None })
    };
    let steps = steps.into_iter().map(step).collect::<anyhow::Result<Vec<_>>>()?;
    Ok((argv, TaskSteps::new(steps)?))
}

/// What a model names, it is never told: the values are ours.
fn credentials(call: &Call, names: &[String]) -> anyhow::Result<CommandEnv> {
    let value = |name: &String| -> anyhow::Result<(EnvName, CommandEnvValue)> {
        let Some(value) = call.credentials.get(name) else {
            anyhow::bail!("{name} is not among the credentials that `viv mcp --credential` was told");
        };
        Ok((name.parse()?, value.parse()?))
    };
    Ok(CommandEnv::new(names.iter().map(value).collect::<anyhow::Result<_>>()?)?)
}

fn run(call: &Call) -> anyhow::Result<CallToolResult> {
    let given: Run = given(call)?;
    let (argv, steps) = commands(given.argv, given.script, given.steps)?;
    if argv.is_none() && steps.get().is_empty() {
        anyhow::bail!("a task runs a command: give argv, script or steps");
    }
    if given.sandbox.is_some() && (given.image.is_some() || given.name.is_some()) {
        anyhow::bail!(
            "a task runs in a sandbox that is there, or in one that is made: give sandbox, or image and name"
        );
    }
    let create = given.sandbox.is_none().then(|| {
        let image = given.image.unwrap_or(CreateSandbox::default().image);
        Box::new(CreateSandbox { name: given.name, image, ..CreateSandbox::default() })
    });
    let effect = |word: &String| -> anyhow::Result<TaskEffect> {
        let (name, repeatable) = word.strip_suffix(":again").map_or((word.as_str(), false), |name| (name, true));
        Ok(TaskEffect { name: EffectName::new(name)?, repeatable })
    };
    let effects = given.effects.iter().map(effect).collect::<anyhow::Result<Vec<_>>>()?;
    let files = given.files.into_iter().map(|(path, text)| TaskFile { path, text, mode: None });
    let request = CreateTask {
        sandbox: given.sandbox,
        create,
        argv,
        steps,
        env: given.env,
        cwd: given.cwd,
        user: given.user,
        source: given.source.map(|git| TaskSource { git, reference: given.reference, path: None }),
        files: TaskFiles::new(files.collect())?,
        limits: TaskLimits { inactivity_ms: given.inactivity_ms, total_ms: given.total_ms, ..TaskLimits::default() },
        effects: TaskEffects::new(effects)?,
        credentials: credentials(call, &given.credentials)?,
        keep_alive: given.keep_alive,
        wait_ms: None,
    };
    let task = call.client.run_task(&request, None)?;
    attend(call, &task, given.detach)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Continue {
    task: TaskRef,
    argv: Option<Argv>,
    script: Option<Argument>,
    #[serde(default)]
    steps: Vec<Argument>,
    cwd: Option<Path>,
    user: Option<UserName>,
    #[serde(default)]
    env: CommandEnv,
    inactivity_ms: Option<TaskMs>,
    total_ms: Option<TaskMs>,
    keep_alive: Option<bool>,
    #[serde(default)]
    detach: bool,
}

fn go_on(call: &Call) -> anyhow::Result<CallToolResult> {
    let given: Continue = given(call)?;
    let (argv, steps) = commands(given.argv, given.script, given.steps)?;
    let limits = TaskLimits { inactivity_ms: given.inactivity_ms, total_ms: given.total_ms, ..TaskLimits::default() };
    let request = ContinueTask {
        argv,
        steps,
        env: given.env,
        cwd: given.cwd,
        user: given.user,
        limits: (limits != TaskLimits::default()).then_some(limits),
        keep_alive: given.keep_alive,
        wait_ms: None,
    };
    let task = call.client.continue_task(&given.task, &request)?;
    attend(call, &task, given.detach)
}

/// Says its id, or stays with it to its end.
fn attend(call: &Call, task: &Task, detach: bool) -> anyhow::Result<CallToolResult> {
    if detach {
        return shown(&brief(task), &format!("viv task show {}", task.id));
    }
    let (client, id) = (call.client.clone(), TaskRef::from(&task.id));
    call.on_cancel.set(move || {
        // Durable when it is answered, and carried out by the daemon; one that is over is as good as stopped.
        let _ = client.stop_task(&id, &StopTask { wait_ms: Some(WaitMs::nearest(0)) });
    });
    follow(call, task)
}

/// What it says is news, and so is where it is.
fn follow(call: &Call, begun: &Task) -> anyhow::Result<CallToolResult> {
    let id = TaskRef::from(&begun.id);
    let mut kept = Kept::default();
    let (mut step, mut told) = (0_u32, None);
    loop {
        let task = call.client.task(&id)?;
        if told != Some(task.state) {
            call.tell(format!("{} {}\n", task.id, task.state));
            told = Some(task.state);
        }
        let is_over = task.state.is_final() || task.run != begun.run;
        match task.steps.get(step as usize) {
            Some(shown) if task.run == begun.run && shown.started_at_ms.is_some() => {
                read(call, call.client.task_logs(&id, step, 0, true), &mut kept)?;
                step += 1;
            }
            _ if is_over => return Ok(over(&task, begun.run, &kept)),
            Some(_) | None => thread::sleep(EVERY),
        }
        if call.is_cancelled() {
            return Ok(failed("it was cancelled"));
        }
    }
}

/// Takes in what a step wrote.
fn read(call: &Call, output: Output<'_>, kept: &mut Kept) -> anyhow::Result<()> {
    for line in output {
        match line {
            Ok(OutputLine::Chunk(chunk)) => {
                let text = String::from_utf8_lossy(&chunk.data().unwrap_or_default()).into_owned();
                call.tell(text.clone());
                kept.push(&text);
            }
            Ok(OutputLine::Cut(range)) => {
                kept.push(&format!("\n[{} bytes were not kept]\n", range.cut.to - range.cut.from));
            }
            Ok(OutputLine::End(_) | OutputLine::Alive(_)) => {}
            // It was never started.
            Err(error) if error.code() == Some(ErrorCode::NotRunning) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        if call.is_cancelled() {
            return Ok(());
        }
    }
    Ok(())
}

fn over(task: &Task, run: u32, kept: &Kept) -> CallToolResult {
    let (mut text, left_out) = kept.whole();
    if left_out > 0 {
        let _ = write!(text, "\n[all that is kept: viv task logs {}]", task.id);
    }
    if task.run != run {
        return failed(&format!("{text}\n[{} was continued by somebody else]", task.id));
    }
    let why = task.ending.as_ref().and_then(|ending| ending.message.as_ref());
    let why = why.map_or_else(String::new, |why| format!(": {why}"));
    let text = format!("{text}\n[{} {}{why}]", task.id, task.state);
    let mut result = if task.state == TaskState::Succeeded { said(text) } else { failed(&text) };
    result.structured_content = Some(brief(task));
    result
}

/// What a model needs of a task.
fn brief(task: &Task) -> Value {
    let steps: Vec<Value> =
        task.steps.iter().map(|step| json!({ "ended": step.ended, "exit_code": step.exit_code })).collect();
    json!({
        "task": task.id, "state": task.state, "run": task.run, "sandbox": task.sandbox, "generation": task.generation,
        "came": task.came, "keep_alive": task.keep_alive, "session": task.session, "reported": task.reported,
        "note": task.note, "cause": task.ending.as_ref().map(|ending| &ending.cause),
        "message": task.ending.as_ref().and_then(|ending| ending.message.as_ref()), "step": task.step, "steps": steps,
        "effects": task.grants.iter().filter(|grant| grant.run == task.run)
            .map(|grant| json!({ "effect": grant.effect, "outcome": grant.outcome })).collect::<Vec<_>>(),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stop {
    task: TaskRef,
    wait_ms: Option<WaitMs>,
}

fn stop(call: &Call) -> anyhow::Result<CallToolResult> {
    let Stop { task, wait_ms } = given(call)?;
    call.tell("stopping it");
    let wait_ms = Some(wait_ms.unwrap_or(WaitMs::nearest(STOP_WAIT_MS)));
    let stopped = call.client.stop_task(&task, &StopTask { wait_ms })?;
    let mut brief = brief(&stopped);
    brief["over"] = json!(stopped.state.is_final());
    brief["effect_in_flight"] = json!(stopped.stop.as_ref().and_then(|stop| stop.effect_in_flight.as_ref()));
    brief["stop_requested_at_ms"] = json!(stopped.stop.as_ref().map(|stop| stop.at_ms));
    brief["seen_gone_at_ms"] = json!(stopped.times.killed_at_ms);
    shown(&brief, &format!("viv task show {task}"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    task: TaskRef,
}

fn show(call: &Call) -> anyhow::Result<CallToolResult> {
    let Which { task } = given(call)?;
    let found = call.client.task(&task)?;
    shown(&json!({ "task": found, "timeline": found.timeline().moments }), &format!("viv task show {task} --json"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    sandbox: Option<SandboxRef>,
    #[serde(default)]
    states: Vec<TaskState>,
    limit: Option<PageLimit>,
}

fn list(call: &Call) -> anyhow::Result<CallToolResult> {
    let List { sandbox, states, limit } = given(call)?;
    let limit = limit.or(PageLimit::new(LISTED).ok());
    let page = call.client.tasks(&ListTasks { sandbox, state: states, limit, ..ListTasks::default() })?;
    let tasks: Vec<Value> = page.items.iter().map(brief).collect();
    shown(&json!({ "tasks": tasks, "more": page.next.is_some() }), "viv task ls")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Logs {
    task: TaskRef,
    step: Option<StepNumber>,
    tail: Option<TailLines>,
    search: Option<SearchText>,
}

fn logs(call: &Call) -> anyhow::Result<CallToolResult> {
    let Logs { task, step, tail, search } = given(call)?;
    let step = step.map_or(0, StepNumber::get);
    let mut output = call.client.task_logs(&task, u32::try_from(step)?, 0, false);
    if let Some(lines) = tail {
        output = output.tail(lines);
    }
    if let Some(text) = search {
        output = output.search(text);
    }
    let mut kept = Kept::default();
    read(call, output, &mut kept)?;
    let (mut text, left_out) = kept.whole();
    if left_out > 0 {
        let _ = write!(text, "\n[all that is kept: viv task logs --step {step} {task}]");
    }
    Ok(said(text))
}
