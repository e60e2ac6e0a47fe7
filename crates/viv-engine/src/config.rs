//! How an engine is set up. Defaults are what ships.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use viv_core::OwnerMark;
use viv_core::lifecycle::Timings;
use viv_store::Quota;

use crate::alert::AlertConfig;
use crate::cleanup::CleanupConfig;
use crate::gate::Gates;
use crate::hook::Webhooks;
use crate::inside::Inside;
use crate::spare::SparesConfig;
use crate::subscription::SubscriptionConfig;
use crate::trace::Tracing;

/// Called with the name of a point that was reached: crash tests end the process there.
#[derive(Clone)]
pub struct Failpoint(pub Arc<dyn Fn(&str) + Send + Sync>);

impl fmt::Debug for Failpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Failpoint")
    }
}

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// What everything that it makes carries (J1).
    pub owner: OwnerMark,
    /// Who holds its leases, for people to read.
    pub holder: String,
    /// How long phases may take.
    pub timings: Timings,
    /// How long single calls may take.
    pub budgets: Budgets,
    /// How often reconcilers look without being asked.
    pub periods: Periods,
    /// How many sandboxes there may be (L18).
    pub quota: Quota,
    /// Which protections are on (O9).
    pub gates: Gates,
    /// For crash tests.
    pub failpoint: Option<Failpoint>,
    /// Who makes requests of hooks; without, those fail.
    pub webhooks: Option<Webhooks>,
    /// How lines of the journal are sent to who asked for them; without, none are (O6).
    pub subscriptions: Option<SubscriptionConfig>,
    /// Who answers those inside sandboxes; without, nobody listens to them.
    pub inside: Option<Inside>,
    /// How alerts are judged; without, none are (O5).
    pub alerts: Option<AlertConfig>,
    /// How cleanups are made by themselves; without, none are (J2).
    pub cleanup: Option<CleanupConfig>,
    /// Which sandboxes are made ahead (L19).
    pub spares: SparesConfig,
    /// Who makes spans of what is done; without, nobody does (O4).
    pub traces: Option<Tracing>,
}

impl EngineConfig {
    /// What ships.
    pub fn new(owner: OwnerMark, holder: impl Into<String>) -> Self {
        Self {
            owner,
            holder: holder.into(),
            timings: Timings::default(),
            budgets: Budgets::default(),
            periods: Periods::default(),
            quota: Quota::of(1_000, 1_000),
            gates: Gates::default(),
            failpoint: None,
            webhooks: None,
            subscriptions: None,
            inside: None,
            alerts: None,
            cleanup: None,
            spares: SparesConfig::default(),
            traces: None,
        }
    }
}

/// How long a single call to the provider may take (J7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budgets {
    /// Making an instance.
    pub make: Duration,
    /// Each probe (T2).
    pub probe: Duration,
    /// Ending an instance, with thousands of processes.
    pub clear: Duration,
    /// Saving one: in proportion to what was not written out.
    pub save: Duration,
    /// Looking for what was left on the machine, and clearing it away, and listing what was saved: in proportion to what is
    /// there.
    pub sweep: Duration,
    /// Everything else.
    pub call: Duration,
}

impl Default for Budgets {
    fn default() -> Self {
        Self {
            make: Duration::from_secs(60),
            probe: Duration::from_secs(2),
            clear: Duration::from_secs(20),
            save: Duration::from_secs(300),
            sweep: Duration::from_secs(60),
            call: Duration::from_secs(10),
        }
    }
}

/// How often reconcilers look without being asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Periods {
    /// Provider against records.
    pub provider_sync: Duration,
    /// Hard deadlines whose end was not pushed.
    pub expiry: Duration,
    /// Transient phases past their deadline.
    pub stuck: Duration,
    /// Snapshots that something happened to, or that were left in the middle.
    pub snapshots: Duration,
    /// All snapshots against what the provider has: what is too old, damaged or nobody's, whom nothing happened to.
    pub snapshots_all: Duration,
    /// Old lines, keys and tombstones.
    pub retention: Duration,
    /// How long an instance without a record is left alone (J1).
    pub orphan_grace: Duration,
    /// How long journal, keys and tombstones are kept (J9).
    pub keep: Duration,
}

impl Default for Periods {
    fn default() -> Self {
        Self {
            provider_sync: Duration::from_secs(60),
            expiry: Duration::from_secs(60),
            stuck: Duration::from_secs(30),
            snapshots: Duration::from_secs(60),
            snapshots_all: Duration::from_secs(3600),
            retention: Duration::from_secs(3600),
            orphan_grace: Duration::from_secs(60),
            keep: Duration::from_secs(14 * 24 * 3600),
        }
    }
}
