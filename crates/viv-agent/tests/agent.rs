//! The agent as a whole: who may talk to it, and what its losses mean.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::time::{Duration, Instant};

use common::*;
use viv_agent::frame;
use viv_agent::proto::*;
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::{FencingToken, Generation};

#[test]
fn it_says_who_it_is() {
    let mut agent = TestAgent::start_without_control(|_| ());
    let Answer::Hello(hello) = agent.call(&Request::Hello).unwrap() else { panic!() };
    assert_eq!((hello.protocol, hello.identity.generation), (PROTOCOL, Generation(3)));
    assert!(hello.features.iter().any(|feature| feature == "exec_start"));
    assert_eq!(agent.take_control(Vec::new()).unwrap(), hello);
    assert_eq!(
        agent.connect().call(&Request::Control { descriptors: vec![], hears: vec![] }).unwrap_err().code,
        ErrorCode::Conflict
    );
    assert_eq!(
        agent.call(&Request::Control { descriptors: vec![Descriptor::Cgroup], hears: vec![] }).unwrap_err().code,
        ErrorCode::Invalid
    );
}

#[test]
fn what_it_does_not_know_it_says() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut client = agent.connect();
    let mut ask = |json: &str| {
        client.send_json(json.as_bytes());
        client.reply()
    };
    assert_eq!(ask(r#"{"op":"dance","fence":1}"#).unwrap_err().code, ErrorCode::Unsupported);
    assert_eq!(ask(r#"{"op":"exec_status"}"#).unwrap_err().code, ErrorCode::Invalid);
    assert_eq!(ask(r#"{"op":"exec_status","id":"exe_../../x"}"#).unwrap_err().code, ErrorCode::Invalid);
    assert_eq!(ask("not json").unwrap_err().code, ErrorCode::Invalid);
    assert!(matches!(ask(r#"{"op":"health","since":"tomorrow"}"#), Ok(Answer::Health(_))));
    // What is no frame ends the connection, and nothing else.
    client.stream.write_all(&[0xff; 64]).unwrap();
    assert_eq!(client.stream.read(&mut [0; 16]).unwrap_or(0), 0);
    assert!(agent.call(&Request::Health).is_ok());
}

#[test]
fn older_tokens_are_refused() {
    let mut agent = TestAgent::start(Killing::Subreaper);
    let start = |agent: &TestAgent, generation: u64, token: u64| {
        let fence = Fence { generation: Generation(generation), token: FencingToken(token), ..fence() };
        agent.call(&Request::ExecStart { fence, id: new_id(), spec: shell("true") })
    };
    assert!(start(&agent, 3, 10).is_ok());
    let stale = start(&agent, 2, 99).unwrap_err();
    assert_eq!((stale.code, stale.current), (ErrorCode::StaleGeneration, Some(3)));
    assert!(start(&agent, 3, 12).is_ok());
    let fenced = start(&agent, 3, 11).unwrap_err();
    assert_eq!((fenced.code, fenced.current), (ErrorCode::Fenced, Some(12)));
    agent.control.as_mut().unwrap().send(&ControlMessage::Token(FencingToken(20)));
    eventually("the token", || start(&agent, 3, 19).is_err_and(|error| error.code == ErrorCode::Fenced));
}

#[test]
fn without_its_supervisor_everything_ends() {
    for killing in killings() {
        let mut agent = TestAgent::start(killing);
        let escaped = "( setsid sh -c 'trap \"\" TERM HUP; sleep 1000' & ) ; sleep 1000";
        agent.start_exec(&shell(escaped));
        agent.start_exec(&shell(escaped));
        eventually("processes", || agent.descendants().len() >= 5);
        let processes = agent.descendants();
        drop(agent.control.take());
        eventually("the agent to end", || agent.child.try_wait().unwrap().is_some());
        let alive =
            |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
        eventually("the processes to end", || !processes.iter().any(alive));
    }
}

/// Whoever is dumped accepts nobody until that is over, however long it takes, and everybody from then on: what is brought
/// back does not sit out a pause of before.
#[test]
fn a_quiesce_for_a_dump_lasts_as_long_as_the_dump() {
    let agent = TestAgent::start(killings()[0]);
    let dumping = agent.dir.path().join("home/run").join(DUMPING);
    std::fs::write(&dumping, "").unwrap();
    let mut last = agent.connect();
    let quiesced = last.call(&Request::Quiesce { fence: fence(), window_ms: 600_000 });
    assert!(matches!(quiesced, Ok(Answer::Quiesced { .. })), "{quiesced:?}");
    let mut waits = agent.connect();
    // Longer than a pause of which nobody says when it is over.
    waits.stream.set_read_timeout(Some(Duration::from_millis(1_500))).unwrap();
    waits.send(&Request::Health);
    assert!(waits.stream.read(&mut [0; 1]).is_err(), "it is accepted in the middle of a dump");
    waits.stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    std::fs::remove_file(dumping).unwrap();
    assert!(waits.stream.read(&mut [0; 1]).is_ok_and(|read| read == 1), "it is not accepted afterwards");
}

#[test]
fn a_quiesce_ends_connections_and_lets_processes_live() {
    for killing in killings() {
        let mut agent = TestAgent::start(killing);
        let id = agent.start_exec(&shell("echo before; sleep 1000"));
        let mut follower = agent.connect();
        follower.call(&Request::ExecAttach { id: id.clone(), offset: 0, follow: true }).unwrap();
        let idle = agent.connect();
        let mut last = agent.connect();
        eventually(
            "three connections",
            || matches!(last.call(&Request::Health), Ok(Answer::Health(health)) if health.connections == 3),
        );
        let quiesced = last.call(&Request::Quiesce { fence: fence(), window_ms: 10_000 });
        assert_eq!(quiesced, Ok(Answer::Quiesced { connections_closed: 2 }));
        let mut rest = Vec::new();
        follower.stream.read_to_end(&mut rest).unwrap();
        assert_eq!((&idle.stream).read(&mut [0; 1]).unwrap(), 0);
        assert_eq!(agent.control.take().unwrap().stream.read(&mut [0; 1]).unwrap(), 0);
        assert!(agent.child.try_wait().unwrap().is_none());
        // Nothing is open that a checkpoint could not keep: no connection, no cgroup.
        let fds = std::fs::read_dir(format!("/proc/{}/fd", agent.child.id())).unwrap();
        let targets: Vec<_> = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok()).collect();
        assert!(!targets.iter().any(|target| target.starts_with("/sys/fs/cgroup")), "{targets:?}");
        // It comes back, with a new supervisor, and the execution was never gone.
        let descriptors: Vec<_> = agent.cgroup.iter().map(|path| (Descriptor::Cgroup, open_dir(path))).collect();
        agent.take_control(descriptors).unwrap();
        assert_eq!(agent.status(&id).state, ExecState::Running);
        // As what it was restored as, when it was.
        let next = Identity { sandbox: "sbx_test".parse().unwrap(), generation: Generation(4) };
        let turned = ControlMessage::Become { identity: next.clone(), token: FencingToken(0) };
        agent.control.as_mut().unwrap().send(&turned);
        eventually(
            "another identity",
            || matches!(agent.call(&Request::Hello), Ok(Answer::Hello(hello)) if hello.identity == next),
        );
        let stale = agent.call(&Request::ExecCancel { fence: fence(), id: id.clone() }).unwrap_err();
        assert_eq!((stale.code, stale.current), (ErrorCode::StaleGeneration, Some(4)));
        let fence = Fence { generation: Generation(4), ..fence() };
        let Answer::Exec(ended) = agent.call(&Request::ExecCancel { fence, id }).unwrap() else { panic!("no status") };
        assert_eq!(ended.state, ExecState::Cancelled);
        eventually("nothing left", || agent.descendants().is_empty());
    }
}

#[test]
fn a_supervisor_that_does_not_come_back_is_lost() {
    let mut agent = TestAgent::start(Killing::Subreaper);
    let begin = Instant::now();
    agent.call(&Request::Quiesce { fence: fence(), window_ms: 400 }).unwrap();
    eventually("the agent to end", || agent.child.try_wait().unwrap().is_some());
    assert!(begin.elapsed() >= Duration::from_millis(400));
}

#[test]
fn connections_are_bounded() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut clients: Vec<Client> = (0..256).map(|_| agent.connect()).collect();
    eventually(
        "all of them",
        || matches!(clients[0].call(&Request::Health), Ok(Answer::Health(health)) if health.connections == 256),
    );
    assert_eq!(agent.connect().reply().unwrap_err().code, ErrorCode::Exhausted);
    drop(clients);
    // A connection that is refused is closed at once, so even sending may fail.
    let health = br#"{"op":"health"}"#;
    let request = [frame::encode_header(frame::Kind::Json, health.len()).as_slice(), health].concat();
    eventually("room again", || {
        let mut client = agent.connect();
        client.stream.write_all(&request).is_ok() && matches!(client.reply(), Ok(Answer::Health(_)))
    });
}

#[test]
fn a_port_is_reached() {
    let agent = TestAgent::start(Killing::Subreaper);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        all.reverse();
        stream.write_all(&all).unwrap();
    });
    let mut client = agent.connect();
    assert_eq!(client.call(&Request::Dial { port }), Ok(Answer::Done));
    let data: Vec<u8> = (0..1_000_000_u32).map(|n| n as u8).collect();
    client.stream.write_all(&data).unwrap();
    client.stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    client.stream.read_to_end(&mut answer).unwrap();
    assert!(answer.iter().rev().eq(&data));
    echo.join().unwrap();
    // Now nobody is there.
    assert_eq!(agent.call(&Request::Dial { port }).unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(agent.call(&Request::Dial { port: 0 }).unwrap_err().code, ErrorCode::Invalid);
}

#[test]
fn a_client_that_leaves_a_port_is_noticed() {
    let agent = TestAgent::start(Killing::Subreaper);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = agent.connect();
    client.call(&Request::Dial { port: listener.local_addr().unwrap().port() }).unwrap();
    let (mut inside, _) = listener.accept().unwrap();
    drop(client);
    assert_eq!(inside.read(&mut [0; 1]).unwrap(), 0);
    eventually(
        "the relay to end",
        || matches!(agent.call(&Request::Health), Ok(Answer::Health(health)) if health.connections == 1),
    );
}

#[test]
fn it_is_small() {
    let agent = TestAgent::start(Killing::Subreaper);
    assert!(matches!(agent.shell("echo x").state(), ExecState::Exited { code: 0 }));
    let limit = ExecSpec { limit_ms: Some(1), ..shell("sleep 1000") };
    assert_eq!(agent.output(&agent.start_exec(&limit)).state(), ExecState::TimedOut);
    // The debug build is larger than the real one; what counts is that threads and buffers go again.
    let threads = || agent.memory_kib("Threads");
    eventually("only the main thread and the reserve", || threads() == 2);
    assert!(agent.memory_kib("RssAnon") < 2048, "{} KiB", agent.memory_kib("RssAnon"));
}
