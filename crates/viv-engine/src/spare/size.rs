//! How many spares there should be.

use std::collections::VecDeque;

/// As many as were asked for in the window, so that the same again finds them; never fewer or more than the bounds.
pub(super) fn target(min: u32, max: u32, asked_at_ms: &VecDeque<u64>, window_ms: u64, now_ms: u64) -> u32 {
    let lately = asked_at_ms.iter().filter(|at_ms| now_ms.saturating_sub(**at_ms) < window_ms).count();
    u32::try_from(lately).unwrap_or(u32::MAX).max(min).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l19_it_grows_with_who_asks_and_shrinks_when_nobody_does() {
        let asked: VecDeque<u64> = [1_000, 2_000, 30_000, 31_000, 32_000].into();
        assert_eq!(target(1, 4, &asked, 60_000, 33_000), 4, "no more than there may be");
        assert_eq!(target(1, 8, &asked, 60_000, 33_000), 5);
        assert_eq!(target(1, 8, &asked, 60_000, 70_000), 3, "what is long ago counts no more");
        assert_eq!(target(1, 8, &asked, 60_000, 100_000), 1);
        assert_eq!(target(0, 8, &VecDeque::new(), 60_000, 100_000), 0);
    }
}
