//! `viv top`, driven in a terminal (O1).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use support::daemon::{Daemon, PATIENCE};
use support::{eventually_within, kill};
use viv_api::bound::{SandboxRef, TaskRef, TaskSteps};
use viv_api::query::StatsQuery;
use viv_api::resources::Resources;
use viv_api::sandbox::{CreateSandbox, Status};
use viv_api::stats::Stats;
use viv_api::task::{CreateTask, StopTask, TaskState, TaskStep};

const ROWS: u16 = 24;
const COLUMNS: u16 = 120;

fn side(count: u16) -> NonZeroU16 {
    NonZeroU16::new(count).unwrap()
}

/// A terminal in which a program runs.
struct Emulator {
    keys: File,
    /// Held, so that how it is set can be looked at when the program is gone.
    place: File,
    screen: Arc<Mutex<vt100::Parser>>,
    child: Child,
    before: Termios,
}

impl Emulator {
    fn run(mut command: std::process::Command) -> Self {
        let master: OwnedFd = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        tcsetwinsize(&master, Winsize { ws_row: ROWS, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let place = File::options().read(true).write(true).open(path).unwrap();
        let before = tcgetattr(&place).unwrap();
        let end = || place.try_clone().unwrap();
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let screen = Arc::new(Mutex::new(vt100::Parser::new(side(ROWS), side(COLUMNS), 0)));
        let keys = File::from(master);
        let (mut output, shared) = (keys.try_clone().unwrap(), screen.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut buffer) {
                shared.lock().unwrap_or_else(PoisonError::into_inner).process(&buffer[..count]);
            }
        });
        Self { keys, place, screen, child, before }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner).screen().contents()
    }

    fn line(&self, with: &str) -> Option<String> {
        self.text().lines().find(|line| line.contains(with)).map(str::to_owned)
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn shows(&self, what: &str, so: impl Fn(&str) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !so(&self.text()) {
            assert!(Instant::now() < until, "{what} is not shown:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn named(name: &str) -> CreateSandbox {
    CreateSandbox { name: Some(name.parse().unwrap()), ..CreateSandbox::default() }
}

#[test]
fn o1_top_is_live_sorted_diagnoses_and_stops_at_a_key_and_leaves_the_terminal_as_it_was() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let first = daemon.create_from(&named("aaa")).id;
    let used = daemon.sandbox(&first).get().unwrap().last_activity_at_ms;
    let mut command = daemon.viv();
    command.args(["top", "--sort", "name"]);
    let mut top = Emulator::run(command);
    top.shows("a sandbox with its figures", |text| {
        text.lines().any(|line| line.contains("aaa") && line.contains("ready") && line.contains("iB"))
    });
    assert!(top.text().contains("NAME↓") && top.text().contains("1 sandboxes"), "{}", top.text());
    println!("{}", top.text());

    // What is made meanwhile is seen.
    let second = daemon.create_from(&named("bbb")).id;
    top.shows("another one", |text| text.contains("2 sandboxes") && text.contains("bbb"));
    let before = |text: &str, a: &str, b: &str| text.find(a).zip(text.find(b)).is_some_and(|(a, b)| a < b);
    top.press("N");
    top.shows("the other way round", |text| text.contains("NAME↑") && before(text, "bbb", "aaa"));
    top.press("N");
    top.shows("as it was", |text| text.contains("NAME↓") && before(text, "aaa", "bbb"));

    for (key, head) in
        [("S", "STATUS↓"), ("A", "AGE↓"), ("C", "CPU%↓"), ("M", "MEMORY↓"), ("P", "PROBED↓"), ("N", "NAME↓")]
    {
        top.press(key);
        top.shows("sorted by another column", |text| text.contains(head) && text.contains("aaa"));
    }
    let all = top.text();
    for head in ["NAME", "STATUS", "AGE", "CPU%", "MEMORY", "PROBED", "TASK", "CAUSE"] {
        assert!(all.contains(head), "{head}: {all}");
    }

    top.press("d");
    top.shows("what is wrong with it", |text| {
        text.contains(&format!("diagnosis of {first}")) && text.contains("is ready")
    });
    println!("{}", top.text());
    top.press("\x1b");
    top.shows("the table", |text| text.contains("bbb"));
    top.press("l");
    top.shows("its logs", |text| {
        text.contains(&format!("logs of {first}")) && (text.contains("nothing was logged") || text.contains("== "))
    });
    top.press("q");
    top.shows("the table", |text| text.contains("bbb"));
    top.press("?");
    top.shows("its keys", |text| text.contains("stop the one that is marked"));
    top.press("q");

    // A stop is asked for twice: at a key, and for sure.
    top.press("\x1b[B");
    top.press("s");
    top.shows("a question", |text| text.contains("stop bbb? y/n"));
    println!("{}", top.text());
    top.press("n");
    top.shows("an answer", |text| text.contains("not stopped"));
    assert_eq!(daemon.sandbox(&second).get().unwrap().status, Status::Ready);
    top.press("s");
    top.shows("a question", |text| text.contains("stop bbb? y/n"));
    top.press("y");
    daemon.wait_for(&second, "it is stopped", |now| now.status == Status::Hibernated);
    top.shows("that it is", |_| top.line("bbb").is_some_and(|line| line.contains("hibernated")));
    assert_eq!(daemon.sandbox(&first).get().unwrap().status, Status::Ready, "and nobody else");
    let now = daemon.sandbox(&first).get().unwrap().last_activity_at_ms;
    assert_eq!(now, used, "looking is no activity (L6)");

    top.press("q");
    let mut status = None;
    eventually_within(PATIENCE, "it leaves", || {
        status = top.child.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success());
    eventually_within(PATIENCE, "the screen is as it was", || {
        let parser = top.screen.lock().unwrap_or_else(PoisonError::into_inner);
        !parser.screen().alternate_screen() && !parser.screen().hide_cursor()
    });
    let after = tcgetattr(&top.place).unwrap();
    let modes = |terminal: &Termios| {
        (terminal.input_modes, terminal.output_modes, terminal.local_modes, terminal.control_modes)
    };
    assert_eq!(modes(&after), modes(&top.before));
}

/// The names in the order in which they are shown.
fn shown_order(text: &str) -> Vec<String> {
    let first = |line: &str| line.split_whitespace().next().map(str::to_owned);
    text.lines().filter_map(first).filter(|word| ["aaa", "bbb", "ccc"].contains(&word.as_str())).collect()
}

#[test]
fn o1_top_shows_who_is_at_work_and_why_one_is_lost_and_sorts_by_it() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let [busy, idle, lost] = ["aaa", "bbb", "ccc"].map(|name| daemon.create_from(&named(name)).id);
    let step: TaskStep =
        serde_json::from_value(serde_json::json!({ "argv": ["/bin/sh", "-c", "while :; do :; done"] })).unwrap();
    let task = CreateTask {
        sandbox: Some(SandboxRef::from(&busy)),
        steps: TaskSteps::new(vec![step]).unwrap(),
        keep_alive: true,
        ..CreateTask::default()
    };
    let task = daemon.client().run_task(&task, None).unwrap();
    eventually_within(PATIENCE, "it works", || {
        daemon.client().task(&TaskRef::from(&task.id)).unwrap().state == TaskState::Running
    });
    kill(daemon.host(&lost).shim_pid.unwrap(), Signal::KILL);
    let over = daemon.wait_for(&lost, "it is lost", |sandbox| sandbox.status == Status::Lost);
    let why = over.cause.unwrap().code;

    let mut command = daemon.viv();
    command.args(["top", "--sort", "task"]);
    let mut top = Emulator::run(command);
    let working = format!("running {}", task.id);
    top.shows("the task, and why one is lost", |text| {
        let has = |name: &str, what: &str| text.lines().any(|line| line.starts_with(name) && line.contains(what));
        has("aaa", &working) && has("bbb", "ready") && has("ccc", "lost") && has("ccc", &why) && text.contains("TASK↓")
    });
    println!("{}", top.text());
    // What has one stands first, and last the other way round; nobody is at work in the two others.
    assert_eq!(shown_order(&top.text())[0], "aaa", "{}", top.text());
    for name in ["bbb", "ccc"] {
        assert!(!top.line(name).unwrap().contains("tsk_"), "{}", top.text());
    }
    top.press("T");
    top.shows("the other way round", |text| text.contains("TASK↑") && shown_order(text).last().unwrap() == "aaa");
    // Of each, why it is as it is, in that order.
    let sandboxes = || [&busy, &idle, &lost].map(|id| daemon.sandbox(id).get().unwrap());
    top.press("W");
    top.shows("sorted by cause", |text| {
        let mut all = sandboxes().map(|one| (one.cause.map(|cause| cause.code), one.id, one.name.unwrap()));
        all.sort_by_key(|(cause, id, _)| (cause.is_none(), cause.clone(), id.to_string()));
        let names: Vec<String> = all.iter().map(|(_, _, name)| name.clone()).collect();
        let has = |name: &str, cause: &str| text.lines().any(|line| line.starts_with(name) && line.ends_with(cause));
        text.contains("CAUSE↓")
            && shown_order(text) == names
            && all.iter().all(|(cause, _, name)| has(name, cause.as_deref().unwrap_or("-")))
    });
    top.press("S");
    top.shows("sorted by status", |text| {
        let mut all = sandboxes().map(|one| (one.status, one.id.to_string(), one.name.unwrap()));
        all.sort();
        text.contains("STATUS↓") && shown_order(text) == all.map(|(_, _, name)| name)
    });
    // Who works harder than who does nothing.
    top.press("C");
    top.shows("sorted by processor", |text| text.contains("CPU%↓") && shown_order(text) == ["aaa", "bbb", "ccc"]);
    top.press("C");
    top.shows("the other way round", |text| text.contains("CPU%↑") && shown_order(text) == ["ccc", "bbb", "aaa"]);
    drop(top);

    let viv = |words: &[&str]| {
        let said = daemon.viv().args(words).output().unwrap();
        assert!(said.status.success(), "{words:?}: {}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8(said.stdout).unwrap()
    };
    // As JSON, one line of each; who does not run uses nothing.
    let said = viv(&["--json", "top", "--sort", "task"]);
    let used: Vec<Resources> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((used.len(), &used[0].sandbox), (3, &busy), "{said}");
    for one in &used {
        let memory_bytes = one.usage.as_ref().and_then(|usage| usage.memory_bytes);
        assert_eq!(memory_bytes.is_some_and(|bytes| bytes > 0), one.sandbox != lost, "{said}");
    }
    let table = viv(&["top", "--once", "--sort", "task"]);
    let mut rows: Vec<&str> = table.lines().skip(1).map(|line| line.split_whitespace().nth(1).unwrap()).collect();
    assert_eq!(rows[0], "aaa", "{table}");
    rows.sort_unstable();
    assert_eq!(rows, ["aaa", "bbb", "ccc"], "{table}");

    // How the targets are met, in words and as JSON: the same.
    let told = daemon.client().stats(&StatsQuery { slo: true }).unwrap();
    let said: Stats = serde_json::from_str(&viv(&["--json", "stats", "--slo"])).unwrap();
    assert!(!told.slo.is_empty());
    assert_eq!(said.slo, told.slo);
    let words = viv(&["stats", "--slo"]);
    let (_, table) = words.split_once("\n\n").unwrap_or_else(|| panic!("{words}"));
    let mut rows = table.lines();
    let cells =
        |line: &str| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect();
    let head: Vec<String> = cells(rows.next().unwrap());
    assert_eq!(head, ["TARGET", "WANTED", "COUNTED", "MET"], "{words}");
    for target in &told.slo {
        let row: Vec<String> = cells(rows.next().unwrap_or_else(|| panic!("{} is missing: {words}", target.name)));
        let counted = format!("{} of {}", target.numerator, target.denominator);
        let met = target.met.map_or("no data", |met| if met { "yes" } else { "NO" });
        assert_eq!(row, [target.name.clone(), target.target.clone(), counted, met.to_owned()], "{words}");
    }
    assert_eq!(rows.next(), None, "{words}");
    assert!(!viv(&["stats"]).contains("TARGET"), "only when it is asked for");
    daemon.client().stop_task(&TaskRef::from(&task.id), &StopTask::default()).unwrap();
}

#[test]
fn o1_top_without_a_terminal_is_a_table_and_a_signal_gives_the_terminal_back() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    daemon.create_from(&named("aaa"));
    let said = daemon.viv().arg("top").output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.starts_with("ID ") && said.contains("aaa") && !said.contains('\x1b'), "{said}");

    let mut command = daemon.viv();
    command.arg("top");
    let mut top = Emulator::run(command);
    top.shows("a sandbox", |text| text.contains("aaa"));
    let pid = rustix::process::Pid::from_child(&top.child);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(top.child.wait().unwrap().code(), Some(128 + 15));
    assert_eq!(tcgetattr(&top.place).unwrap().local_modes, top.before.local_modes);
}
