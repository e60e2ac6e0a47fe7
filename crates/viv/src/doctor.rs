//! `viv doctor`: what this machine can do, and why it cannot do the rest; or what is wrong with one sandbox.

use std::io::{self, Write};
use std::process::ExitCode;

use viv_api::bound::SandboxRef;
use viv_api::daemon::Doctor;
use viv_provider::{Capability, Provider};
use viv_sandbox::machine::{self, State};
use viv_sandbox::{DiskReserve, Found, Kernel, LocalProvider};

use crate::client;
use crate::fail::Failure;
use crate::place::{self, Place};
use crate::settings::Global;
use crate::text::word;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A sandbox, by id or name: what is wrong with it, from which evidence, and what helps
    sandbox: Option<SandboxRef>,
    #[command(flatten)]
    place: Place,
}

pub(crate) fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    if let Some(sandbox) = &args.sandbox {
        return client::diagnose(sandbox, global);
    }
    let data = global.by_hand()?;
    let entered = place::enter();
    let findings = machine::findings(entered.as_ref().copied());
    // What was found is worth saying also where there can be no provider.
    let provider = entered.map_err(anyhow::Error::from).and_then(|_| args.place.open(data));
    // After the namespace was entered, which takes a process with one thread; asking may start others.
    let daemon = asked(global);
    let mut out = io::stdout().lock();
    if global.json {
        let mut all = serde_json::json!({ "version": env!("CARGO_PKG_VERSION"), "findings": findings });
        match &daemon {
            Ok(said) => all["daemon"] = serde_json::to_value(said)?,
            Err(why) => all["daemon_unreachable"] = why.clone().into(),
        }
        if let Ok(provider) = &provider {
            all["layers"] = provider.driver().to_string().into();
            let runtime = runtime(provider)?;
            all["runtime"] = runtime.version.clone().into();
            all["kernel"] = serde_json::to_value(runtime.kernel)?;
            all["limit_disk_by"] = serde_json::to_value(provider.limited_by())?;
            all["disk_reserve"] = serde_json::to_value(provider.disk_reserve())?;
            if let Ok(criu) = provider.criu() {
                all["criu"] = serde_json::to_value(criu)?;
            }
            all["capabilities"] = serde_json::to_value(provider.capabilities())?;
        }
        if let Err(why) = &provider {
            all["data_unusable"] = format!("{why:#}").into();
        }
        writeln!(out, "{all:#}")?;
        return if daemon.is_ok() { Ok(ExitCode::SUCCESS) } else { provider.map(|_| ExitCode::SUCCESS) };
    }
    writeln!(out, "viv {}", env!("CARGO_PKG_VERSION"))?;
    say_machine(&mut out, &findings)?;
    match &daemon {
        Ok(said) => {
            writeln!(out, "the daemon, on the {} provider", said.provider)?;
            for finding in &said.findings {
                write!(out, "{}", indented(&client::finding(finding)))?;
            }
            if said.findings.is_empty() {
                writeln!(out, "  ok   nothing is wrong")?;
            }
            if !said.reconcilers.is_empty() {
                writeln!(out, "  what it looks after by itself")?;
                write!(out, "{}", indented(&indented(&client::reconcilers(&said.reconcilers))))?;
            }
            // What the daemon found with its own settings, which need not be ours.
            let mut capabilities = said.capabilities.iter();
            let save_memory = capabilities.find(|one| one.name.replace('_', " ") == word(Capability::SaveMemory));
            match (&said.saves_memory_by, save_memory.and_then(|one| one.reason.as_ref())) {
                (Some(by), _) => writeln!(out, "  ok   it saves memory by {by}")?,
                (None, Some(why)) => writeln!(out, "  no   it does not save memory: {why}")?,
                (None, None) => {}
            }
            if let Some(traces) = &said.traces {
                match &traces.silent {
                    None => writeln!(out, "  ok   traces go to {}, which answers", traces.endpoint)?,
                    Some(why) => {
                        writeln!(out, "  no   traces go to {}, which does not answer: {why}", traces.endpoint)?;
                    }
                }
            }
        }
        Err(why) => writeln!(out, "the daemon was not asked: {why}")?,
    }
    let provider = match provider {
        // The daemon has told what there is to tell; that nothing can be made by hand is no reason to fail.
        Err(why) if daemon.is_ok() => {
            writeln!(out, "sandboxes made by hand (`viv local`): {why:#}")?;
            return Ok(ExitCode::SUCCESS);
        }
        provider => provider?,
    };
    let runtime = runtime(&provider)?;
    let kernel = match runtime.kernel {
        Kernel::Host => "the host's kernel",
        Kernel::Gvisor => "a kernel of their own (gVisor)",
    };
    writeln!(out, "containers by: {}; workloads talk to {kernel}", runtime.version)?;
    let (capabilities, limited_by) = (provider.capabilities(), provider.limited_by());
    if let Ok(criu) = provider.criu() {
        writeln!(out, "memory is saved by: {criu}")?;
    }
    if let Some(reserve) = provider.disk_reserve() {
        writeln!(out, "{}", full_disk(&reserve))?;
    }
    writeln!(out, "what sandboxes can do, their layers kept by the {} driver", provider.driver())?;
    for capability in &capabilities.has {
        let by = limited_by.filter(|_| *capability == Capability::LimitDisk).map(|by| format!(", by {by}"));
        writeln!(out, "  yes  {}{}", word(*capability), by.unwrap_or_default())?;
    }
    for (capability, why) in &capabilities.missing {
        writeln!(out, "  no   {}: {why}", word(*capability))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What the machine has and lacks.
fn say_machine(out: &mut impl Write, findings: &[machine::Finding]) -> io::Result<()> {
    for finding in findings {
        let state = match finding.state {
            State::Ok => "ok  ",
            State::Degraded => "less",
            State::Missing => "no  ",
        };
        writeln!(out, "  {state} {}: {}", finding.what, finding.meaning)?;
        if let Some(remedy) = &finding.remedy {
            writeln!(out, "       to have it: {remedy}")?;
        }
    }
    Ok(())
}

/// What happens when the disk that all share runs out.
fn full_disk(reserve: &DiskReserve) -> String {
    let files = reserve.files.map(|files| format!(" or {files} files")).unwrap_or_default();
    let aside = match reserve.put_aside_bytes >> 20 {
        0 => "nothing is put aside now (it is while sandboxes run, where the disk allows it)".to_owned(),
        mib => format!("{mib} MiB are put aside for the others"),
    };
    let (mib, free_mib) = (reserve.bytes >> 20, reserve.free_bytes >> 20);
    format!(
        "a full disk: {free_mib} MiB are left; below {mib} MiB{files} the sandbox that took most lately is ended (disk_full); {aside}"
    )
}

/// What the daemon says, or why it says nothing. That none runs is no finding about the machine.
fn asked(global: &Global) -> Result<Doctor, String> {
    let first_line = |error: String| error.lines().next().unwrap_or_default().to_owned();
    let daemon = client::Daemon::connect(global).map_err(|error| first_line(error.to_string()))?;
    daemon.client.doctor().map_err(|error| first_line(Failure::from(&error).to_string()))
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

fn runtime(provider: &LocalProvider) -> anyhow::Result<&Found> {
    provider.runtime().map_err(|error| anyhow::anyhow!("{error}\nhint: {}", error.hint()))
}
