//! What the agent is kept from, and what it keeps from others.

mod common;

use std::process::Command;
use std::time::{Duration, Instant};

use common::*;
use rustix::process::{Pid, Resource, Rlimit, Signal};
use viv_agent::proto::*;
use viv_core::exec::{ExecSpec, ExecState};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn pid_of(agent: &TestAgent) -> Pid {
    Pid::from_raw(agent.child.id() as i32).unwrap()
}

fn descriptors(agent: &TestAgent) -> Vec<String> {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", agent.child.id())).unwrap();
    let targets = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    targets.map(|target| target.to_string_lossy().into_owned()).collect()
}

/// Processor time that it used up.
fn ticks(agent: &TestAgent) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", agent.child.id())).unwrap();
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 1..].split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn as_pid_1_it_is_nobody_that_a_workload_can_be() {
    for killing in killings().into_iter().filter(|_| is_root()) {
        let agent = TestAgent::start_as_init(killing);
        let ids = format!("{KEEPER_ID}\t{KEEPER_ID}\t{KEEPER_ID}\t0");
        let text = agent.shell("grep -E '^(Uid|Gid|Groups):' /proc/1/status").stdout();
        assert_eq!(text, format!("Uid:\t{ids}\nGid:\t{ids}\nGroups:\t \n"));
        let Answer::Health(health) = agent.call(&Request::Health).unwrap() else { panic!() };
        let mut processes = vec!["1"];
        if killing == Killing::Cgroup {
            assert_eq!(health.killing, "cgroup");
        } else {
            // The monitor.
            processes.push("$PPID");
        }
        for process in processes {
            let attacks = [
                "prlimit --fsize=0 --pid",
                "prlimit --nofile=3 --pid",
                "renice -n 19 -p",
                "f() { ls /proc/$1/fd; }; f",
                "f() { head -c 1 /proc/$1/environ; }; f",
                "f() { head -c 1 /proc/$1/maps; }; f",
                // It would be the first to be killed for memory.
                "f() { echo 900 | tee /proc/$1/oom_score_adj; }; f",
            ];
            for attack in attacks {
                let output = agent.shell(&format!("{attack} {process}"));
                assert!(matches!(output.state(), ExecState::Exited { code: 1.. }), "{attack} {process}: {output:?}");
            }
        }
    }
}

#[test]
fn as_pid_1_it_still_does_what_it_must() {
    for killing in killings().into_iter().filter(|_| is_root()) {
        let agent = TestAgent::start_as_init(killing);
        // A workload is whom it should be, and has nothing else.
        let text = agent.shell("cat /proc/self/status; touch /tmp/$$; stat -c %u:%g /tmp/$$; rm /tmp/$$").stdout();
        assert!(text.contains("Uid:\t0\t0\t0\t0\n") && text.contains("Gid:\t0\t0\t0\t0\n"), "{text}");
        for line in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert!(text.contains(&format!("{line}\t0000000000000000")), "{line} in {text}");
        }
        assert!(text.ends_with("\n0:0\n"), "{text}");
        let as_user = ExecSpec { user: Some("1234:4321".to_owned()), ..shell("id -u; id -g; id -G") };
        assert_eq!(agent.output(&agent.start_exec(&as_user)).stdout(), "1234\n4321\n4321\n");
        // Anybody can be ended, and files are made as root.
        let other = ExecSpec { user: Some("1234".to_owned()), ..shell("trap '' TERM; sleep 1000") };
        assert_eq!(agent.cancel(&agent.start_exec(&other)).state, ExecState::Cancelled);
        agent.call(&Request::FileMkdir { fence: fence(), path: "/made".to_owned() }).unwrap();
        let made = std::fs::metadata(agent.root().join("made")).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&made), 0);
    }
}

#[test]
fn its_memory_and_that_of_its_copies_is_closed() {
    // With a single id, nothing but this keeps a workload from its monitor.
    let agent = TestAgent::start_with(Killing::Subreaper, |config| config.keeper_id = 0);
    let output = agent.shell("cat /proc/$PPID/environ >/dev/null 2>&1 && echo open; exit 4");
    assert_eq!((output.stdout().as_str(), output.state()), ("", ExecState::Exited { code: 4 }));
    // Of the command itself that does not hold.
    assert!(agent.shell("tr '\\0' '\\n' < /proc/self/environ").stdout().contains("FROM_CONFIG=yes\n"));
}

#[test]
fn no_two_commands_share_a_session_keyring() {
    // 0 asks for the id of a keyring, -3 is the session's.
    let script = format!("print syscall({}, 0, -3, 0)", libc::SYS_keyctl);
    let Ok(mine) = Command::new("perl").args(["-e", &script]).output() else { return };
    let mine = String::from_utf8(mine.stdout).unwrap();
    if mine.starts_with('-') {
        // No keyrings here.
        return;
    }
    let run = |agent: &TestAgent| agent.output(&agent.start_exec(&spec(&["perl", "-e", &script]))).stdout();
    assert_eq!(run(&TestAgent::start(Killing::Subreaper)), "-1", "who is confined cannot even ask");
    let agent = TestAgent::start_with(Killing::Subreaper, |config| config.confine = false);
    let (first, second) = (run(&agent), run(&agent));
    assert!(first.parse::<u32>().is_ok() && second.parse::<u32>().is_ok(), "{first} {second}");
    assert!(mine != first && mine != second && first != second, "{mine} {first} {second}");
}

#[test]
fn without_descriptors_it_waits_instead_of_spinning() {
    let agent = TestAgent::start(Killing::Subreaper);
    agent.call(&Request::Health).unwrap();
    let open = |count: u64| Rlimit { current: Some(count), maximum: Some(4096) };
    let before = rustix::process::prlimit(Some(pid_of(&agent)), Resource::Nofile, open(3)).unwrap();
    let mut waiting = agent.connect();
    std::thread::sleep(Duration::from_millis(200));
    let used = ticks(&agent);
    std::thread::sleep(Duration::from_secs(1));
    let used = ticks(&agent) - used;
    assert!(used < 25, "{used} of 100 ticks");
    let maximum = before.maximum.map_or(4096, |maximum| maximum.min(4096));
    rustix::process::prlimit(Some(pid_of(&agent)), Resource::Nofile, open(maximum)).unwrap();
    assert!(matches!(waiting.call(&Request::Health), Ok(Answer::Health(_))));
}

#[test]
fn an_ended_execution_holds_no_descriptor() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let before = descriptors(&agent).len();
        for n in 0..20 {
            let quick = if n % 2 == 0 { "true" } else { "sleep 0.02" };
            agent.shell(quick);
        }
        // The pump and the last connections go by themselves.
        eventually("none left", || descriptors(&agent).len() <= before);
        assert!(!descriptors(&agent).iter().any(|target| target.contains("pidfd")));
    }
}

#[test]
fn the_clocks_of_executions_stand_while_the_supervisor_is_away() {
    let mut agent = TestAgent::start(Killing::Subreaper);
    let begin = Instant::now();
    let id = agent.start_exec(&ExecSpec { limit_ms: Some(800), ..shell("sleep 1000") });
    agent.call(&Request::Quiesce { fence: fence(), window_ms: 10_000 }).unwrap();
    let away = Instant::now();
    drop(agent.control.take());
    std::thread::sleep(Duration::from_millis(1500));
    agent.take_control(Vec::new()).unwrap();
    let away = away.elapsed();
    assert_eq!(agent.status(&id).state, ExecState::Running);
    assert_eq!(agent.output(&id).state(), ExecState::TimedOut);
    // Its limit is what it was, without the time away.
    let took = begin.elapsed().checked_sub(away).unwrap();
    assert!(took >= Duration::from_millis(750) && took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn a_cgroup_that_is_missing_proves_nothing() {
    if !killings().contains(&Killing::Cgroup) {
        return;
    }
    let mut agent = TestAgent::start(Killing::Cgroup);
    let id = agent.start_exec(&shell("sleep 1000 >/dev/null 2>&1 </dev/null &"));
    assert_eq!(agent.output(&id).state(), ExecState::Exited { code: 0 });
    let gone = agent.start_exec(&shell("true"));
    agent.output(&gone);
    let path = agent.cgroup.clone().unwrap();
    eventually("its cgroup to be removed", || !path.join(gone.as_str()).exists());
    agent.call(&Request::Quiesce { fence: fence(), window_ms: 10_000 }).unwrap();
    drop(agent.control.take());
    // The supervisor comes back with another cgroup, in which nothing of the execution is.
    let other = agent.make_cgroup();
    agent.take_control(vec![(Descriptor::Cgroup, open_dir(&other))]).unwrap();
    let refused = agent.call(&Request::ExecCancel { fence: fence(), id });
    // One whose cgroup the agent itself removed is known to have ended.
    assert_eq!(agent.cancel(&gone).state, ExecState::Exited { code: 0 });
    drop(agent);
    remove_cgroup(&other);
    assert_eq!(refused.unwrap_err().code, ErrorCode::Failed);
}

#[test]
fn a_murdered_monitor_does_not_take_others_along() {
    if !killings().contains(&Killing::Cgroup) {
        return;
    }
    let mut agent = TestAgent::start(Killing::Subreaper);
    let below_monitor = agent.start_exec(&shell("setsid sleep 1000 & sleep 1000"));
    let monitor = descendants(agent.child.id())[0];
    agent.call(&Request::Quiesce { fence: fence(), window_ms: 10_000 }).unwrap();
    drop(agent.control.take());
    agent.cgroup = Some(agent.make_cgroup());
    let descriptors = vec![(Descriptor::Cgroup, open_dir(agent.cgroup.as_ref().unwrap()))];
    agent.take_control(descriptors).unwrap();
    let in_cgroup = agent.start_exec(&shell("setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!"));
    let background: u32 = agent.output(&in_cgroup).stdout().trim().parse().unwrap();
    assert!(agent.descendants().contains(&background));
    rustix::process::kill_process(Pid::from_raw(monitor as i32).unwrap(), Signal::KILL).unwrap();
    assert_eq!(agent.output(&below_monitor).state(), ExecState::Signalled { signal: 9 });
    eventually("only the other one's process", || agent.descendants() == [background]);
    // Killing goes on until nothing unowned is found, so it would be hit by now or soon.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(agent.descendants(), [background]);
}
