//! `viv doctor SANDBOX`

use std::process::ExitCode;

use viv_api::bound::SandboxRef;
use viv_api::daemon::Severity;
use viv_api::diagnosis::Diagnosis;

use super::table::clean;
use super::{Daemon, finding};
use crate::settings::Global;

/// How long what goes on inside is looked at: long enough to tell work from waiting.
const SAMPLE_MS: u64 = 2_000;

/// What is wrong with a sandbox, from which evidence, and what helps.
pub(crate) fn diagnose(sandbox: &SandboxRef, global: &Global) -> anyhow::Result<ExitCode> {
    let daemon = Daemon::connect(global)?;
    let found = daemon.sandbox(sandbox).diagnosis_over(SAMPLE_MS)?;
    daemon.answer(&found, || words(&found))
}

/// A diagnosis for people.
pub(super) fn words(found: &Diagnosis) -> String {
    let name = found.sandbox.name.as_ref().map_or_else(String::new, |name| format!(" ({})", clean(name)));
    let mut text = format!("{}{name} is {}\n", found.sandbox.id, found.sandbox.status);
    if found.findings.iter().all(|finding| finding.severity == Severity::Info) {
        text.push_str("nothing is wrong with it\n");
    }
    found.findings.iter().for_each(|one| text.push_str(&finding(one)));
    text
}
