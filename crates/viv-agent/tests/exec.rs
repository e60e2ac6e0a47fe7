//! Executions, against the real agent, in both ways of killing.

mod common;

use std::time::{Duration, Instant};

use common::*;
use viv_agent::proto::*;
use viv_core::exec::{ExecSpec, ExecState, Stream, TtySize};

#[test]
fn a_command_runs_and_its_output_and_exit_are_kept() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let output = agent.shell("echo out; echo err >&2; echo $FROM_CONFIG; pwd; exit 7");
        assert_eq!(output.state(), ExecState::Exited { code: 7 });
        assert_eq!(output.stdout(), "out\nyes\n/tmp\n");
        assert_eq!(output.text(Stream::Stderr), "err\n");
        let end = output.end.unwrap();
        assert_eq!((end.output_bytes, end.pid), (17, None));
        assert!(end.ended_at_ms.unwrap() >= end.started_at_ms);
        let kept = viv_agent::output::read_status(&agent.exec_dir(&end.id)).unwrap().unwrap();
        assert_eq!(kept, end);
        let Answer::Health(health) = agent.call(&Request::Health).unwrap() else { panic!() };
        assert_eq!((health.running, health.known), (0, 1));
        assert_eq!(health.killing, if killing == Killing::Cgroup { "cgroup" } else { "subreaper" });
    }
}

#[test]
fn what_cannot_start_says_why() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let failed = |spec: ExecSpec| match agent.exec_start(&new_id(), &spec).unwrap().state {
            ExecState::Failed { what } => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(failed(spec(&["no-such-thing"])), "no such program: \"no-such-thing\"");
        assert_eq!(failed(spec(&["/etc/passwd"])), "program \"/etc/passwd\" may not be run");
        let elsewhere = ExecSpec { cwd: Some("/nowhere".to_owned()), ..spec(&["true"]) };
        assert_eq!(failed(elsewhere), "working directory \"/nowhere\" does not exist");
        let nobody = ExecSpec { user: Some("eve".to_owned()), ..spec(&["true"]) };
        assert_eq!(failed(nobody), "no such user: \"eve\"");
        let refused = |spec: ExecSpec| agent.exec_start(&new_id(), &spec).unwrap_err().code;
        assert_eq!(refused(spec(&[])), ErrorCode::Invalid);
        assert_eq!(refused(spec(&["a\0b"])), ErrorCode::Invalid);
        let relative = ExecSpec { cwd: Some("tmp".to_owned()), ..spec(&["true"]) };
        assert_eq!(refused(relative), ErrorCode::Invalid);
        eventually("no leftover", || agent.descendants().is_empty());
    }
}

#[test]
fn commands_have_no_privileges_and_no_descriptors() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let output = agent.shell("cat /proc/self/status; umask");
        let text = output.stdout();
        for line in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert!(text.contains(&format!("{line}\t0000000000000000")), "{line} in {text}");
        }
        assert!(text.contains("NoNewPrivs:\t1"));
        assert!(text.contains("SigBlk:\t0000000000000000") && text.contains("SigIgn:\t0000000000000000"), "{text}");
        assert!(text.ends_with("\n0022\n"), "{text}");
        // The fourth is the directory that is being listed.
        let output = agent.output(&agent.start_exec(&spec(&["ls", "/proc/self/fd"])));
        assert_eq!(output.stdout(), "0\n1\n2\n3\n");
    }
}

#[test]
fn a_command_runs_as_the_user_it_was_given() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let as_user = ExecSpec { user: Some("1234:4321".to_owned()), ..shell("id -u; id -g; id -G; echo $HOME $USER") };
        assert_eq!(agent.output(&agent.start_exec(&as_user)).stdout(), "1234\n4321\n4321\n/ 1234\n");
        let keeper = ExecSpec { user: Some(KEEPER_ID.to_string()), ..shell("true") };
        let status = agent.exec_start(&new_id(), &keeper).unwrap();
        assert!(matches!(status.state, ExecState::Failed { .. }), "{status:?}");
        // The directory must be entered with the user's rights.
        let locked = agent.dir.path().join("locked");
        std::fs::create_dir(&locked).unwrap();
        std::fs::set_permissions(&locked, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let cwd = Some(locked.to_string_lossy().into_owned());
        let status = agent.exec_start(&new_id(), &ExecSpec { cwd, ..as_user }).unwrap();
        let ExecState::Failed { what } = status.state else { panic!("{status:?}") };
        assert!(what.ends_with("permission denied"), "{what}");
    }
}

#[test]
fn starting_again_finds_the_first_one() {
    let agent = TestAgent::start(Killing::Subreaper);
    let id = new_id();
    let first = agent.exec_start(&id, &shell("echo once; sleep 1000")).unwrap();
    let again = agent.exec_start(&id, &shell("echo once; sleep 1000")).unwrap();
    assert_eq!(first.pid, again.pid);
    let other = agent.exec_start(&id, &shell("echo twice")).unwrap_err();
    assert_eq!(other.code, ErrorCode::Conflict);
    let Answer::Execs(list) = agent.call(&Request::ExecList).unwrap() else { panic!() };
    assert_eq!(list.len(), 1);
    assert_eq!(agent.call(&Request::ExecStatus { id: new_id() }).unwrap_err().code, ErrorCode::NotFound);
}

/// Prints a line, and leaves a tree behind that does all it can to escape.
const ESCAPER: &str = r#"
trap '' TERM
( trap '' TERM; setsid sh -c 'trap "" TERM HUP INT; ( setsid sh -c "trap \"\" TERM; while :; do sleep 1000; done" & ) ; sleep 1000' & ) &
for n in 1 2 3; do ( setsid sleep 1000 & ) ; done
echo ready
while :; do sleep 1000; done
"#;

fn wait_for_text(agent: &TestAgent, id: &viv_core::ExecutionId, text: &str) {
    eventually(text, || agent.attach(id, 0, false).stdout().contains(text));
}

#[test]
fn cancel_takes_the_whole_tree() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let id = agent.start_exec(&shell(ESCAPER));
        wait_for_text(&agent, &id, "ready");
        eventually("a tree", || agent.descendants().len() >= 6);
        if let Some(cgroup) = &agent.cgroup {
            assert!(std::fs::exists(cgroup.join(id.as_str())).unwrap());
        }
        let other = agent.start_exec(&shell("echo other; sleep 1000"));
        let begin = Instant::now();
        assert_eq!(agent.cancel(&id).state, ExecState::Cancelled);
        assert!(begin.elapsed() < Duration::from_secs(3));
        // Only the other one is left.
        let left = if killing == Killing::Cgroup { 2 } else { 3 };
        eventually("the other one only", || agent.descendants().len() == left);
        assert_eq!(agent.status(&other).state, ExecState::Running);
        if let Some(cgroup) = &agent.cgroup {
            eventually("the cgroup to go", || !std::fs::exists(cgroup.join(id.as_str())).unwrap());
        }
        // It stays cancelled, and cancelling again changes nothing.
        assert_eq!(agent.cancel(&id).state, ExecState::Cancelled);
        assert_eq!(agent.output(&id).state(), ExecState::Cancelled);
    }
}

/// A tree that obeys is not kept waiting for the grace of 500 ms: shown by the quickest of some, since the machine is
/// shared.
#[test]
fn cancel_is_quick_when_term_is_obeyed() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let took = || {
            let id = agent.start_exec(&shell("sleep 1000 & sleep 1000"));
            eventually("a tree", || agent.descendants().len() >= 3);
            let begin = Instant::now();
            assert_eq!(agent.cancel(&id).state, ExecState::Cancelled);
            eventually("nothing left", || agent.descendants().is_empty());
            begin.elapsed()
        };
        let is_quick = (0..20).any(|_| took() < Duration::from_millis(400));
        assert!(is_quick, "each of twenty waited for the grace");
    }
}

#[test]
fn a_time_limit_takes_the_whole_tree() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let id = agent.start_exec(&ExecSpec { limit_ms: Some(300), ..shell(ESCAPER) });
        let output = agent.output(&id);
        assert_eq!(output.state(), ExecState::TimedOut);
        eventually("nothing left", || agent.descendants().is_empty());
    }
}

#[test]
fn a_thaw_moves_time_limits() {
    let mut agent = TestAgent::start(Killing::Subreaper);
    let begin = Instant::now();
    let id = agent.start_exec(&ExecSpec { limit_ms: Some(200), ..shell("sleep 1000") });
    agent.control.as_mut().unwrap().send(&ControlMessage::Thawing { frozen_ms: 600 });
    assert_eq!(agent.output(&id).state(), ExecState::TimedOut);
    assert!(begin.elapsed() >= Duration::from_millis(800), "{:?}", begin.elapsed());
}

#[test]
fn background_children_live_on_and_are_still_heard() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let fifo = agent.dir.path().join("fifo");
        let script = format!("mkfifo {0}; (read line < {0}; echo late $line; sleep 1000) & echo early", fifo.display());
        let id = agent.start_exec(&shell(&script));
        let output = agent.output(&id);
        assert_eq!((output.state(), output.stdout().as_str()), (ExecState::Exited { code: 0 }, "early\n"));
        std::fs::write(&fifo, "word\n").unwrap();
        wait_for_text(&agent, &id, "late word");
        assert_eq!(agent.status(&id).state, ExecState::Exited { code: 0 });
        // Cancelling what has ended ends what it left behind.
        assert_eq!(agent.cancel(&id).state, ExecState::Exited { code: 0 });
        eventually("nothing left", || agent.descendants().is_empty());
        if let Some(cgroup) = &agent.cgroup {
            eventually("the cgroup to go", || !std::fs::exists(cgroup.join(id.as_str())).unwrap());
        }
    }
}

#[test]
fn empty_cgroups_go_by_themselves() {
    let Some(Killing::Cgroup) = killings().first().copied() else { return };
    let agent = TestAgent::start(Killing::Cgroup);
    let id = agent.start_exec(&shell("sleep 0.2 & echo x"));
    assert_eq!(agent.output(&id).state(), ExecState::Exited { code: 0 });
    let path = agent.cgroup.as_ref().unwrap().join(id.as_str());
    eventually("the cgroup to go", || !std::fs::exists(&path).unwrap());
}

#[test]
fn exits_by_signal_are_told_apart() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        assert_eq!(agent.shell("kill -9 $$").state(), ExecState::Signalled { signal: 9 });
        assert_eq!(agent.shell("sh -c 'kill -9 $$'; exit $?").state(), ExecState::Exited { code: 137 });
        let id = agent.start_exec(&shell("trap 'echo got; exit 3' USR1; echo ready; while :; do sleep 0.01; done"));
        wait_for_text(&agent, &id, "ready");
        let signal = Request::ExecSignal { fence: fence(), id: id.clone(), signal: 10 };
        assert_eq!(agent.call(&signal).unwrap(), Answer::Done);
        assert_eq!(agent.output(&id).state(), ExecState::Exited { code: 3 });
        // The same operation again has its answer; a new one finds it ended.
        assert_eq!(agent.call(&signal).unwrap(), Answer::Done);
        let late = agent.call(&Request::ExecSignal { fence: fence(), id: id.clone(), signal: 10 });
        assert_eq!(late.unwrap_err().code, ErrorCode::Conflict);
        let bad = agent.call(&Request::ExecSignal { fence: fence(), id, signal: 0 });
        assert_eq!(bad.unwrap_err().code, ErrorCode::Invalid);
    }
}

#[test]
fn an_oom_kill_is_told_from_another() {
    let mut agent = TestAgent::start_without_control(|_| ());
    let events = agent.dir.path().join("memory.events");
    std::fs::write(&events, "low 0\noom_kill 4\n").unwrap();
    agent.take_control(vec![(Descriptor::OomEvents, std::fs::File::open(&events).unwrap().into())]).unwrap();
    assert_eq!(agent.shell("kill -9 $$").state(), ExecState::Signalled { signal: 9 });
    let script = format!("printf 'oom_kill 5\\n' > {}; kill -9 $$", events.display());
    assert_eq!(agent.shell(&script).state(), ExecState::OomKilled);
}

fn write_stdin(
    agent: &TestAgent,
    id: &viv_core::ExecutionId,
    offset: u64,
    data: &[u8],
    close: bool,
) -> Result<u64, AgentError> {
    let request = Request::ExecStdin { fence: fence(), id: id.clone(), offset, close };
    match agent.connect().upload(&request, data)? {
        Answer::Stdin { taken_bytes } => Ok(taken_bytes),
        other => panic!("{other:?}"),
    }
}

#[test]
fn input_is_taken_once_and_closed() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let id = agent.start_exec(&ExecSpec { stdin: true, ..spec(&["cat"]) });
        assert_eq!(write_stdin(&agent, &id, 0, b"hello ", false), Ok(6));
        // A repetition that overlaps adds only what is new.
        assert_eq!(write_stdin(&agent, &id, 0, b"hello world", false), Ok(11));
        let gap = write_stdin(&agent, &id, 20, b"x", false).unwrap_err();
        assert_eq!((gap.code, gap.current), (ErrorCode::Conflict, Some(11)));
        assert_eq!(write_stdin(&agent, &id, 11, b"!", true), Ok(12));
        let output = agent.output(&id);
        assert_eq!((output.stdout().as_str(), output.state()), ("hello world!", ExecState::Exited { code: 0 }));
        assert_eq!(output.end.unwrap().stdin_bytes, 12);
        assert_eq!(write_stdin(&agent, &id, 12, b"late", false).unwrap_err().code, ErrorCode::Conflict);
        // Without input it reads the end at once.
        assert_eq!(agent.output(&agent.start_exec(&spec(&["cat"]))).state(), ExecState::Exited { code: 0 });
        let none = agent.start_exec(&shell("sleep 1000"));
        assert_eq!(write_stdin(&agent, &none, 0, b"x", false).unwrap_err().code, ErrorCode::Conflict);
    }
}

#[test]
fn much_input_goes_through() {
    let agent = TestAgent::start(Killing::Subreaper);
    let id = agent.start_exec(&ExecSpec { stdin: true, ..shell("wc -c") });
    let data = vec![b'x'; 3_000_000];
    assert_eq!(write_stdin(&agent, &id, 0, &data, true), Ok(3_000_000));
    assert_eq!(agent.output(&id).stdout().trim(), "3000000");
}

#[test]
fn a_terminal_is_one() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let size = TtySize { rows: 33, cols: 99 };
        let script = "test -t 0 && test -t 1 && test -t 2 && echo tty; stty size; echo $TERM; read line; echo \"<$line>\"; \
                      trap 'stty size; exit 5' WINCH; echo waiting; while :; do sleep 0.01; done";
        let id = agent.start_exec(&ExecSpec { tty: Some(size), stdin: true, ..shell(script) });
        wait_for_text(&agent, &id, "xterm-256color");
        write_stdin(&agent, &id, 0, b"typed\n", false).unwrap();
        wait_for_text(&agent, &id, "waiting");
        let size = TtySize { rows: 44, cols: 111 };
        assert_eq!(agent.call(&Request::ExecResize { fence: fence(), id: id.clone(), size }), Ok(Answer::Done));
        let output = agent.output(&id);
        let text = output.stdout();
        for part in ["tty\r\n", "33 99", "<typed>", "44 111"] {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
        assert_eq!(output.state(), ExecState::Exited { code: 5 });
        // End of input on a terminal, and a terminal without input.
        let id = agent.start_exec(&ExecSpec { tty: Some(size), stdin: true, ..spec(&["cat"]) });
        write_stdin(&agent, &id, 0, b"abc\n", true).unwrap();
        assert_eq!(agent.output(&id).state(), ExecState::Exited { code: 0 });
        let id = agent.start_exec(&ExecSpec { tty: Some(size), ..spec(&["cat"]) });
        assert_eq!(agent.output(&id).state(), ExecState::Exited { code: 0 });
        let pipe = agent.start_exec(&shell("sleep 1000"));
        let refused = agent.call(&Request::ExecResize { fence: fence(), id: pipe, size }).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Conflict);
    }
}

#[test]
fn output_is_read_from_any_offset_by_any_client() {
    let agent = TestAgent::start(Killing::Subreaper);
    let id = agent.start_exec(&shell("printf abcdef; sleep 1000"));
    wait_for_text(&agent, &id, "abcdef");
    let late = agent.attach(&id, 4, false);
    assert_eq!((late.stdout().as_str(), late.chunks[0].0.offset), ("ef", 4));
    assert_eq!(late.state(), ExecState::Running);
    // A client that goes away leaves the command alone, and its thread goes too.
    let mut follower = agent.connect();
    follower.call(&Request::ExecAttach { id: id.clone(), offset: 0, follow: true }).unwrap();
    let connections = || match agent.call(&Request::Health).unwrap() {
        Answer::Health(health) => health.connections,
        other => panic!("{other:?}"),
    };
    eventually("two connections", || connections() == 2);
    drop(follower);
    eventually("the follower to go", || connections() == 1);
    assert_eq!(agent.status(&id).state, ExecState::Running);
}

#[test]
fn two_hundred_megabytes_pass_in_bounded_memory() {
    let agent = TestAgent::start(Killing::Subreaper);
    let total = 200_u64 << 20;
    let bound = 8 << 20;
    let script = format!("yes 0123456789abcde | head -c {total}; echo end >&2");
    let begin = Instant::now();
    let id = agent.start_exec(&ExecSpec { output_bytes_max: Some(bound), ..shell(&script) });
    // A follower that does not read must not slow the command.
    let mut stuck = agent.connect();
    stuck.call(&Request::ExecAttach { id: id.clone(), offset: 0, follow: true }).unwrap();
    let output = agent.output(&id);
    eprintln!("200 MB in {:?}, peak {} KiB", begin.elapsed(), agent.memory_kib("VmHWM"));
    let end = output.end.clone().unwrap();
    assert_eq!((end.state, end.output_bytes), (ExecState::Exited { code: 0 }, total + 4));
    assert!(agent.memory_kib("VmHWM") < 16 << 10, "{} KiB", agent.memory_kib("VmHWM"));
    let disk: u64 = std::fs::read_dir(agent.exec_dir(&id)).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert!(disk <= bound + 4096, "{disk}");
    // What came covers everything once, in order.
    let mut at = 0;
    let mut pieces: Vec<(u64, u64)> = output.cuts.clone();
    pieces.extend(output.chunks.iter().map(|(header, data)| (header.offset, header.offset + data.len() as u64)));
    pieces.sort_unstable();
    for (from, to) in pieces {
        assert_eq!(from, at);
        at = to;
    }
    assert_eq!(at, total + 4);
    assert!(
        output
            .chunks
            .iter()
            .flat_map(|(h, d)| d.iter().zip(h.offset..))
            .take(1 << 20)
            .all(|(&byte, at)| { byte == b"0123456789abcde\n"[(at % 16) as usize] })
    );
}

#[test]
fn the_oldest_ended_ones_are_forgotten() {
    let agent = TestAgent::start_with(Killing::Subreaper, |config| config.ended_executions_max = 2);
    let ids: Vec<_> = (0..4)
        .map(|_| {
            let id = agent.start_exec(&shell("true"));
            agent.output(&id);
            id
        })
        .collect();
    eventually("two known", || matches!(agent.call(&Request::ExecList), Ok(Answer::Execs(list)) if list.len() == 2));
    assert!(!std::fs::exists(agent.exec_dir(&ids[0])).unwrap());
    assert!(std::fs::exists(agent.exec_dir(&ids[3])).unwrap());
}

#[test]
fn t2_a_transient_one_leaves_nothing() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let folder = |name: &str| std::fs::read_dir(agent.exec_dir(&new_id()).parent().unwrap().with_file_name(name));
        let is_listed = || matches!(agent.call(&Request::ExecList), Ok(Answer::Execs(list)) if !list.is_empty());
        let id = agent.start_exec(&ExecSpec { transient: true, ..shell("sleep 1000") });
        assert!(!is_listed());
        agent.cancel(&id);
        assert_eq!(agent.output(&id).state(), ExecState::Cancelled);
        let is_known = || agent.call(&Request::ExecStatus { id: id.clone() }).is_ok();
        eventually("it is forgotten", || !is_known());
        eventually("its output is removed", || folder("transient").unwrap().count() == 0);
        assert_eq!(folder("exec").unwrap().count(), 0);
        assert!(!is_listed());
    }
}

#[test]
fn t2_a_transient_one_that_nobody_reads_is_forgotten_after_a_while() {
    let agent = TestAgent::start_with(Killing::Subreaper, |config| config.transient_kept_ms = 200);
    let id = agent.start_exec(&ExecSpec { transient: true, ..shell("true") });
    eventually("it is forgotten", || agent.call(&Request::ExecStatus { id: id.clone() }).is_err());
    // Those that nobody reads are not all kept, however long each may be (on a busy machine they are started for longer
    // than one is kept by default); the newest are.
    let agent = TestAgent::start_with(Killing::Subreaper, |config| config.transient_kept_ms = 3_600_000);
    let ids: Vec<_> =
        (0..1044).map(|n| agent.start_exec(&ExecSpec { transient: true, ..shell(&format!("echo {n}")) })).collect();
    let known = || match agent.call(&Request::Health) {
        Ok(Answer::Health(health)) => (health.running, health.known),
        other => panic!("{other:?}"),
    };
    eventually("the oldest are forgotten", || known() == (0, 1024));
    // A look is no loss for others: as many as may run at once can all be read whole after they ended together.
    for (n, id) in ids.iter().enumerate().skip(1044 - 300) {
        assert_eq!(agent.output(id).text(Stream::Stdout), format!("{n}\n"));
    }
}

#[test]
fn many_at_once() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let ids: Vec<_> = (0..40).map(|n| agent.start_exec(&shell(&format!("echo {n}; exit {}", n % 3)))).collect();
        for (n, id) in ids.iter().enumerate() {
            let output = agent.output(id);
            assert_eq!((output.stdout(), output.state()), (format!("{n}\n"), ExecState::Exited { code: n as i32 % 3 }));
        }
        eventually("nothing left", || agent.descendants().is_empty());
    }
}

#[test]
fn a_murdered_monitor_takes_its_tree_along() {
    // With a single id, a workload can kill the monitor.
    let agent = TestAgent::start_with(Killing::Subreaper, |config| config.keeper_id = 0);
    let id = agent.start_exec(&shell("( setsid sleep 1000 & ); setsid sleep 1000 & kill -9 $PPID; sleep 1000"));
    let output = agent.output(&id);
    assert_eq!(output.state(), ExecState::Signalled { signal: 9 });
    eventually("nothing left", || agent.descendants().is_empty());
}

#[test]
fn a_workload_may_not_signal_its_monitor() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let agent = TestAgent::start(Killing::Subreaper);
    let output = agent.shell("kill -9 $PPID && echo killed; exit 4");
    assert_eq!((output.stdout().as_str(), output.state()), ("", ExecState::Exited { code: 4 }));
}

/// A limit on processes, on an agent that it owns, so that both go in the right order.
struct Limited {
    agent: Option<TestAgent>,
    path: std::path::PathBuf,
}

impl Limited {
    /// `None` where this machine has no such cgroups.
    fn new(killing: Killing) -> Option<Self> {
        let agent = TestAgent::start(killing);
        let path = std::path::Path::new("/sys/fs/cgroup/pids").join(format!("viv-test-agent-{}", agent.child.id()));
        std::fs::create_dir(&path).ok()?;
        std::fs::write(path.join("cgroup.procs"), agent.child.id().to_string()).unwrap();
        Some(Self { agent: Some(agent), path })
    }

    fn agent(&self) -> &TestAgent {
        self.agent.as_ref().unwrap()
    }

    /// From now on there is not one process more than now, once the agent's threads for connections are gone.
    fn close(&self) {
        eventually("main thread, reserve and pump only", || self.agent().memory_kib("Threads") == 3);
        let current = std::fs::read_to_string(self.path.join("pids.current")).unwrap();
        std::fs::write(self.path.join("pids.max"), current.trim()).unwrap();
    }

    fn open(&self) {
        std::fs::write(self.path.join("pids.max"), "max").unwrap();
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        drop(self.agent.take());
        let deadline = Instant::now() + PATIENCE;
        while std::fs::remove_dir(&self.path).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn a_sandbox_without_a_process_left_can_still_be_helped() {
    for killing in killings() {
        let Some(limited) = Limited::new(killing) else { return };
        let agent = limited.agent();
        let id = agent.start_exec(&shell("trap '' TERM; sleep 1000 & echo ready; wait; exec sleep 1000"));
        wait_for_text(agent, &id, "ready");
        limited.close();
        // No thread can be started for this connection, so the reserve serves it, and only what is short.
        let refused = agent.exec_start(&new_id(), &shell("true")).unwrap_err();
        assert_eq!((refused.code, refused.message.contains("no process left")), (ErrorCode::Exhausted, true));
        assert_eq!(agent.status(&id).state, ExecState::Running);
        assert_eq!(agent.cancel(&id).state, ExecState::Cancelled);
        limited.open();
        assert_eq!(agent.shell("exit 6").state(), ExecState::Exited { code: 6 });
    }
}

#[test]
fn a_time_limit_holds_without_a_process_left() {
    for killing in killings() {
        let Some(limited) = Limited::new(killing) else { return };
        let agent = limited.agent();
        let script = "trap '' TERM; sleep 1000 & echo ready; wait; exec sleep 1000";
        let id = agent.start_exec(&ExecSpec { limit_ms: Some(1000), ..shell(script) });
        wait_for_text(agent, &id, "ready");
        limited.close();
        eventually("the time limit", || agent.status(&id).state == ExecState::TimedOut);
    }
}
