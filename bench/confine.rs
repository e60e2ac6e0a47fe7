//! What confinement costs: for each command, and for each kernel call of one.
//!
//! The agent runs as an ordinary process here, as in its tests. Times are medians; compare within one run.

use std::time::Instant;

use viv_core::exec::ExecState;

#[allow(clippy::wildcard_imports, reason = "written as a part of tests")]
#[path = "../crates/viv-agent/tests/common/mod.rs"]
mod common;

use common::{TestAgent, killings, spec};

/// Commands of each kind.
const ROUNDS: usize = 300;

/// Commands that make many kernel calls.
const LONG_ROUNDS: usize = 31;

/// Kernel calls that such a one makes.
const CALLS: u32 = 300_000;

fn main() {
    println!("{:<40}{:>14}{:>14}", "", "not confined", "confined");
    let agents = [false, true]
        .map(|confine| TestAgent::start_with(*killings().first().unwrap(), |config| config.confine = confine));
    row("a command, from request to end", ROUNDS, 1, |confine| run(&agents[usize::from(confine)], &["/bin/true"]));
    // A loop in C: an interpreter's own work would hide what is to be seen.
    let folder = tempfile::tempdir().unwrap();
    let (program, source) = (folder.path().join("calls"), folder.path().join("calls.c"));
    let code = "#include <stdlib.h>\n#include <unistd.h>\n#include <sys/syscall.h>\n\
                int main(int n, char **v) { for (int i = atoi(v[1]); i > 0; i--) \
                syscall(*v[2] == 'p' ? SYS_getppid : SYS_ioctl, -1, 0x5413, 0); return 0; }";
    std::fs::write(&source, code).unwrap();
    let compiled = std::process::Command::new("cc").arg("-O2").arg(&source).arg("-o").arg(&program).status();
    assert!(compiled.is_ok_and(|status| status.success()), "there is no C compiler");
    let program = program.to_string_lossy().into_owned();
    for (what, kind) in [("a call that is always allowed", "p"), ("a call with arguments to look at", "i")] {
        let argv = [program.as_str(), &CALLS.to_string(), kind];
        row(what, LONG_ROUNDS, CALLS, |confine| run(&agents[usize::from(confine)], &argv));
    }
}

fn run(agent: &TestAgent, argv: &[&str]) {
    let output = agent.output(&agent.start_exec(&spec(argv)));
    assert_eq!(output.state(), ExecState::Exited { code: 0 });
}

/// By turns, so that whatever else the machine does comes to both.
fn row(what: &str, rounds: usize, parts: u32, work: impl Fn(bool)) {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for confine in [false, true] {
            let start = Instant::now();
            work(confine);
            times[usize::from(confine)].push(start.elapsed() / parts);
        }
    }
    let [without, with] = times.map(|mut times| {
        times.sort();
        format!("{:.1?}", times[rounds / 2])
    });
    println!("{what:<40}{without:>14}{with:>14}");
}
