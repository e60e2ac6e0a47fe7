//! The example agents, run as their page says, on the real daemon with real git.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::daemon::Daemon;
use support::viv_binary;
use viv_api::query::{ListSandboxes, ListTasks};
use viv_api::task::{Task, TaskState};

/// Reads its prompt as an agent of the command line does, keeps a session, edits, and thinks aloud.
const STAND_IN: &str = r#"
    prompt=$(cat)
    test "$prompt" = "$(cat "$PROMPT_FILE")" || exit 9
    echo "thinking about: $prompt"
    viv step --session "session-of-$MODEL_KEY" editing
    case $prompt in
    *"The tests say:"*"NOTES is missing"*) printf '%s\n' "$prompt" | head -n 1 > NOTES ;;
    *) echo "not sure yet" ;;
    esac"#;

fn git(repository: &Path, arguments: &[&str]) -> String {
    let ran = Command::new("git").arg("-C").arg(repository).args(arguments).output().unwrap();
    assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap().trim().to_owned()
}

/// Runs it: its exit code, and what it said.
fn run(daemon: &Daemon, folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/coding-agent/run");
    // What the verbs find the daemon by, given to a script.
    let verb = daemon.viv();
    let env = verb.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let mut command = Command::new(script);
    command.args(arguments).current_dir(folder).envs(env).env("VIV", viv_binary()).env("MODEL_KEY", "k3y");
    let ran = command.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    (ran.status.code(), said)
}

fn tasks(daemon: &Daemon) -> Vec<Task> {
    daemon.client().tasks_all(ListTasks::default()).map(Result::unwrap).collect()
}

/// A repository whose test wants a file that is not there.
fn repository(folder: &Path) -> PathBuf {
    let at = folder.join("project");
    std::fs::create_dir(&at).unwrap();
    git(&at, &["init", "-q", "-b", "trunk"]);
    std::fs::write(at.join("test.sh"), "test -e NOTES || { echo NOTES is missing; exit 1; }\n").unwrap();
    git(&at, &["add", "."]);
    git(&at, &["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "one"]);
    at
}

fn assert_cleared_away(daemon: &Daemon) {
    assert_eq!(daemon.client().list_all(ListSandboxes::default()).count(), 0);
    daemon.assert_nothing_left();
}

#[test]
fn k1_the_scripted_agent_clones_edits_tests_commits_and_pushes() {
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let (code, said) = run(&daemon, folder.path(), &[]);
    assert_eq!(code, Some(0), "{said}\n{}", daemon.said());
    let demo = folder.path().join("coding-agent-demo");
    assert_eq!(git(&demo, &["log", "--format=%an: %s", "agent"]), "agent: Make the tests pass.\ndemo: A greeting");
    assert!(git(&demo, &["show", "agent:greet.sh"]).contains("Hello, $1!"));
    let task = tasks(&daemon).remove(0);
    assert_eq!((task.state, task.reported), (TaskState::Succeeded, 2), "two attempts: {task:#?}");
    let effects: Vec<_> = task.grants.iter().map(|grant| (grant.effect.as_str(), grant.outcome.as_str())).collect();
    assert_eq!(effects, [("push", "done")]);
    assert_cleared_away(&daemon);
}

#[test]
fn k1_an_agent_of_the_command_line_is_wired_in_by_its_command() {
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let project = repository(folder.path());
    let before = git(&project, &["rev-parse", "trunk"]);
    let more = ["--env", "MODEL_KEY", "--prompt", "Write the notes.", "--test", "sh test.sh"];
    let arguments = |agent: &'static str| [&["--agent", agent][..], &more, &["project"]].concat();
    // One that is of no help pushes nothing, and says so.
    let (code, said) = run(&daemon, folder.path(), &arguments("cat > /dev/null"));
    assert_eq!(code, Some(1), "{said}\n{}", daemon.said());
    assert!(said.contains("after 3 attempts: nothing is pushed"), "{said}");
    assert_eq!(git(&project, &["branch", "--list", "agent"]), "");
    let (code, said) = run(&daemon, folder.path(), &arguments(STAND_IN));
    assert_eq!(code, Some(0), "{said}\n{}", daemon.said());
    assert!(said.contains("thinking about: Write the notes."), "{said}");
    assert_eq!(git(&project, &["show", "agent:NOTES"]), "Write the notes.");
    assert_eq!(git(&project, &["rev-parse", "trunk"]), before, "what is there is not touched");
    let newest = tasks(&daemon).remove(0);
    assert_eq!((newest.state, newest.session.as_deref()), (TaskState::Succeeded, Some("session-of-k3y")));
    assert_cleared_away(&daemon);
}
