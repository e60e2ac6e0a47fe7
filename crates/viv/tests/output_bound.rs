//! A command that writes 200 MB: kept within its bound, followed live, read again from the middle, in bounded memory (X2).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::time::Duration;

use support::{Ground, Sandbox, sh};
use viv_core::ExecutionId;
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_provider::Provider;

const WRITTEN: u64 = 200 << 20;
const BOUND: u64 = 32 << 20;

/// Sixteen bytes over and over, so that every byte's place can be checked.
const LINE: &[u8; 16] = b"0123456789abcde\n";

/// Most that the agent may ever have in memory meanwhile.
const AGENT_MEMORY_KIB_MAX: u64 = 16 << 10;

#[tokio::test]
async fn x2_two_hundred_megabytes() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let script = format!("yes 0123456789abcde | head -c {WRITTEN}");
    let spec = ExecSpec { output_bytes_max: Some(BOUND), ..sh(&script) };
    let execution = sandbox.start_spec(&spec).await;

    let live = read(&sandbox, &execution, 0).await;
    assert_eq!(live.end, WRITTEN, "a follower hears of every byte or of its loss");
    assert!(live.bytes > 0);

    let again = read(&sandbox, &execution, 0).await;
    assert_eq!(again.end, WRITTEN);
    assert!(again.bytes <= BOUND && again.bytes > BOUND / 2, "{} bytes were kept", again.bytes);
    assert_eq!(again.cuts, 1, "head and tail with one gap");

    let middle = WRITTEN - BOUND / 4 + 7;
    let from_the_middle = read(&sandbox, &execution, middle).await;
    assert_eq!((from_the_middle.bytes, from_the_middle.cuts), (WRITTEN - middle, 0));

    let folder = sandbox.folder().join("run/exec").join(execution.as_str());
    let on_disk: u64 = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(on_disk <= BOUND + 4096, "{on_disk} bytes on disk");
    let peak = peak_kib(sandbox.agent_pid());
    assert!(peak <= AGENT_MEMORY_KIB_MAX, "the agent had {peak} KiB in memory");
    let own = peak_kib(std::process::id());
    assert!(own <= 4 * AGENT_MEMORY_KIB_MAX, "the reader had {own} KiB in memory");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[derive(Default)]
struct Read {
    bytes: u64,
    cuts: u64,
    end: u64,
}

/// Reads to the end and checks every byte.
async fn read(sandbox: &Sandbox<'_>, execution: &ExecutionId, offset: u64) -> Read {
    let mut stream = sandbox.ground.provider.attach(&sandbox.instance(), execution, offset, true).await.unwrap();
    let mut read = Read { end: offset, ..Read::default() };
    loop {
        match stream.next().await.unwrap().expect("an end comes before nothing") {
            OutputEvent::Chunk { offset, data, .. } => {
                assert_eq!(offset, read.end, "a gap without a word");
                let wrong = data.iter().zip(offset..).find(|&(&byte, at)| byte != LINE[(at % 16) as usize]);
                assert_eq!(wrong, None);
                read.bytes += data.len() as u64;
                read.end += data.len() as u64;
            }
            OutputEvent::Cut { from, to } => {
                assert!(from == read.end && to > from);
                read.cuts += 1;
                read.end = to;
            }
            OutputEvent::End(status) => {
                assert_eq!(status.state, ExecState::Exited { code: 0 });
                assert_eq!(status.output_bytes, read.end);
                return read;
            }
        }
    }
}

fn peak_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
