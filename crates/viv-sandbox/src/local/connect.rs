//! Whether sandboxes can be connected here.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use viv_provider::{Capability, Egress, InstanceSpec, ProviderError};

use super::{LocalProvider, Result};
use crate::network::probe;
use crate::process;
use crate::runtime::PATH;
use crate::wait::readable_within;

/// How long a probe may take before it is given up: its own limit, and a little.
const PROBE_WITHIN: Duration = Duration::from_secs(12);

/// What does not work is tried again after this: somebody may have installed what was missing.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Longest reason that is passed on.
const REASON_BYTES_MAX: u64 = 1024;

/// Whose the probe's processes are: nobody's.
const NOBODY: u32 = 65_534;

/// What the last probe showed.
#[derive(Default)]
pub(super) struct Cache(Mutex<Option<Probed>>);

struct Probed {
    at: Instant,
    why_not: Option<String>,
}

impl LocalProvider {
    /// Why no sandbox can be connected; `None` when it works, which was tried once since the machine started. Blocks,
    /// the first time for a tenth of a second.
    pub(super) fn why_no_egress(&self) -> Option<String> {
        // Held while probing, so that many who ask at once probe once.
        let mut cached = self.shared.egress.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = cached.as_ref().filter(|probed| probed.why_not.is_none() || probed.at.elapsed() < TRY_AGAIN_AFTER);
        if let Some(known) = known {
            return known.why_not.clone();
        }
        let shown = self.shared.data.host().join("egress");
        let boot = process::boot_id().unwrap_or_default();
        let why_not = if fs::read_to_string(&shown).is_ok_and(|at| !boot.is_empty() && at == boot) {
            None
        } else {
            self.probe().err()
        };
        if why_not.is_none() {
            // Whoever cannot note it tries again.
            let _ = fs::write(&shown, boot);
        }
        *cached = Some(Probed { at: Instant::now(), why_not: why_not.clone() });
        why_not
    }

    /// Refuses a spec that asks for more than there is here.
    pub(super) async fn check_network(&self, spec: &InstanceSpec) -> Result<()> {
        match spec.network.egress {
            Egress::None => Ok(()),
            Egress::All => {
                let capability = Capability::EgressAll;
                // What the runtime cannot do counts as well as what the machine cannot.
                match self.blocking(|this| Ok(this.capabilities_with_egress())).await? {
                    all if all.can(capability) => Ok(()),
                    all => {
                        let why = all.missing.get(&capability).cloned().unwrap_or_default();
                        Err(ProviderError::Unsupported { capability, why })
                    }
                }
            }
        }
    }

    fn probe(&self) -> std::result::Result<(), String> {
        // A name that nobody has: the probe makes a file for what pasta says.
        let log = self.shared.data.host().join(format!(".net-probe-{}", crate::store::unique()));
        let outcome = self.run_probe(&log);
        let _ = fs::remove_file(&log);
        outcome
    }

    fn run_probe(&self, log: &Path) -> std::result::Result<(), String> {
        let said = |error: io::Error| format!("the probe could not be run: {error}");
        let mut child = Command::new(&self.shared.config.shim_exe)
            .arg(probe::VERB)
            .arg(NOBODY.to_string())
            .arg(log)
            .env_clear()
            .env("PATH", PATH)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(said)?;
        let mut stdout = child.stdout.take().expect("piped");
        let answers = readable_within(&stdout, PROBE_WITHIN);
        if !matches!(answers, Ok(true)) {
            let _ = child.kill();
        }
        let status = child.wait().map_err(said)?;
        if status.success() {
            return Ok(());
        }
        let mut reason = String::new();
        let _ = stdout.by_ref().take(REASON_BYTES_MAX).read_to_string(&mut reason);
        Err(if reason.is_empty() { format!("the probe ended with {status}") } else { reason.trim().to_owned() })
    }
}
