//! How events are sent, from the configuration file.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use anyhow::Context;
use serde::Deserialize;
use viv_core::subscription::Patience;
use viv_server::{AddressRange, WebhookConfig};

/// The part `[webhooks]`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct WebhooksPart {
    /// How long one try may take.
    timeout_ms: Option<NonZeroU64>,
    /// The pause after the first failure; it doubles.
    pause_ms: Option<NonZeroU64>,
    /// Up to this.
    pause_ms_max: Option<NonZeroU64>,
    /// How often an event is tried before it is a dead letter.
    attempts_max: Option<NonZeroU32>,
    /// For how long.
    age_s_max: Option<NonZeroU64>,
}

/// How long one try may take (J7).
const TIMEOUT_MS: u64 = 10_000;

impl WebhooksPart {
    /// Over what ships.
    pub(super) fn patience(&self) -> Patience {
        let ships = Patience::default();
        Patience {
            pause_ms_first: self.pause_ms.map_or(ships.pause_ms_first, NonZeroU64::get),
            pause_ms_max: self.pause_ms_max.map_or(ships.pause_ms_max, NonZeroU64::get),
            attempts_max: self.attempts_max.map_or(ships.attempts_max, NonZeroU32::get),
            age_ms_max: self.age_s_max.map_or(ships.age_ms_max, |seconds| seconds.get().saturating_mul(1000)),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.map_or(TIMEOUT_MS, NonZeroU64::get))
    }
}

/// Whom requests may go to.
pub(super) fn guard(
    private_addresses: bool,
    ranges: &[String],
    authorities_pem: Vec<u8>,
) -> anyhow::Result<WebhookConfig> {
    let parsed = ranges.iter().map(|range| range.parse::<AddressRange>()).collect::<Result<_, _>>();
    let private_ranges = parsed.context("private_ranges of [hooks] is not right")?;
    Ok(WebhookConfig { private_addresses, private_ranges, authorities_pem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_over_what_ships() {
        let part: WebhooksPart = toml::from_str("pause_ms = 10\nattempts_max = 2\ntimeout_ms = 5").unwrap();
        assert_eq!(part.timeout(), Duration::from_millis(5));
        let wanted = Patience { pause_ms_first: 10, attempts_max: 2, ..Patience::default() };
        assert_eq!(part.patience(), wanted);
        assert!(toml::from_str::<WebhooksPart>("attempts_max = 0").is_err());
        assert!(guard(false, &["10.0.0.0/8".to_owned()], Vec::new()).is_ok());
        assert!(guard(false, &["ten".to_owned()], Vec::new()).is_err());
    }
}
