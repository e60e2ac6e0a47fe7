//! What the diagnosis of a real sandbox says, and the command that it names, as an operator would use them.

use std::process::Output;
use std::time::Instant;

use viv_api::diagnosis::Diagnosis;
use viv_api::execution::{Execution, StartExecution};
use viv_core::SandboxId;

use super::daemon::{Daemon, PATIENCE};

/// How long it is looked at.
const SAMPLE_MS: u64 = 1_000;

/// Waits until the diagnosis says this, and answers with what it says.
pub fn diagnosed(daemon: &Daemon, id: &SandboxId, code: &str) -> (Diagnosis, String) {
    let until = Instant::now() + PATIENCE;
    loop {
        let found = daemon.sandbox(id).diagnosis_over(SAMPLE_MS).unwrap();
        if let Some(finding) = found.findings.iter().find(|finding| finding.code == code) {
            let text = format!("{} {:?}", finding.message, finding.evidence);
            return (found, text);
        }
        assert!(Instant::now() < until, "{code} is not said: {:#?}", found.findings);
    }
}

/// Whether it is said now.
pub fn is_said(daemon: &Daemon, id: &SandboxId, code: &str) -> bool {
    daemon.sandbox(id).diagnosis_over(SAMPLE_MS).unwrap().findings.iter().any(|finding| finding.code == code)
}

/// The command that a finding names.
pub fn proposed(found: &Diagnosis, code: &str) -> String {
    let finding = found.findings.iter().find(|finding| finding.code == code).unwrap();
    finding.command.clone().expect("it names one")
}

/// The same, run as an operator would, whatever it ends with.
pub fn tried(daemon: &Daemon, found: &Diagnosis, code: &str) -> Output {
    let command = proposed(found, code);
    daemon.viv().args(command.split_whitespace().skip(1)).output().unwrap()
}

/// The same, which has to succeed: what it said.
pub fn remedy(daemon: &Daemon, found: &Diagnosis, code: &str) -> String {
    let done = tried(daemon, found, code);
    assert!(done.status.success(), "{}: {}", proposed(found, code), String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Starts what nobody waits for.
pub fn start(daemon: &Daemon, id: &SandboxId, argv: &[&str]) -> Execution {
    daemon.sandbox(id).start(&StartExecution::of(argv.iter().copied()).unwrap(), None).unwrap()
}
