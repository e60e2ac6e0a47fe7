//! `[cleanup]` in the configuration (J2).

use std::num::NonZeroU64;
use std::time::Duration;

use serde::Deserialize;
use viv_engine::CleanupConfig;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct CleanupPart {
    /// How often leftovers are looked for, and whether there is room.
    period_s: Option<NonZeroU64>,
    /// How often ages are looked at.
    age_period_s: Option<NonZeroU64>,
    /// How often everything is compared with everything.
    full_period_s: Option<NonZeroU64>,
    /// How long what is lost or has failed, and is not persistent, is left for somebody to look at.
    leftover_after_s: Option<u64>,
    /// How long what is unwell is left to come back.
    unhealthy_after_s: Option<u64>,
    /// How old it has to be before it is ended for that.
    unhealthy_age_s: Option<u64>,
    /// How old a sandbox may become; as old as its deadline allows when not said.
    age_max_s: Option<NonZeroU64>,
    /// Above this part of a quota, in percent, what is idle has to go.
    emergency_above_percent: Option<u8>,
    /// Who was used in this time is not idle.
    emergency_idle_s: Option<u64>,
    /// Below this part of the machine's memory, in percent, what is frozen and kept with its memory goes to disk.
    memory_below_percent: Option<u8>,
    /// How often that is looked at.
    memory_period_s: Option<NonZeroU64>,
}

impl CleanupPart {
    /// Over what ships.
    pub(super) fn config(&self) -> CleanupConfig {
        let ships = CleanupConfig::default();
        let seconds = |said: Option<u64>, ships: Duration| said.map_or(ships, Duration::from_secs);
        CleanupConfig {
            period: seconds(self.period_s.map(NonZeroU64::get), ships.period),
            age_period: seconds(self.age_period_s.map(NonZeroU64::get), ships.age_period),
            full_period: seconds(self.full_period_s.map(NonZeroU64::get), ships.full_period),
            leftover_after: seconds(self.leftover_after_s, ships.leftover_after),
            unhealthy_after: seconds(self.unhealthy_after_s, ships.unhealthy_after),
            unhealthy_age: seconds(self.unhealthy_age_s, ships.unhealthy_age),
            age_max: self.age_max_s.map(|seconds| Duration::from_secs(seconds.get())),
            emergency_above: self.emergency_above_percent.map_or(ships.emergency_above, |part| f64::from(part) / 100.0),
            emergency_idle: seconds(self.emergency_idle_s, ships.emergency_idle),
            memory_below: self.memory_below_percent.map_or(ships.memory_below, |part| f64::from(part) / 100.0),
            memory_period: seconds(self.memory_period_s.map(NonZeroU64::get), ships.memory_period),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn j2_what_is_said_lies_over_what_ships() {
        let config = toml::from_str::<CleanupPart>("period_s = 7\nemergency_above_percent = 50").unwrap().config();
        assert_eq!(config.period, Duration::from_secs(7));
        assert!((config.emergency_above - 0.5).abs() < f64::EPSILON);
        assert_eq!((config.age_max, config.age_period), (None, CleanupConfig::default().age_period));
        assert!(toml::from_str::<CleanupPart>("period_s = 0").is_err());
    }
}
