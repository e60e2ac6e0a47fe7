//! How often somebody may do something: a bucket of tokens for each.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::config::Rate;

/// Most that are remembered. Those whose bucket is full again need not be; when all are needed, the oldest goes.
const REMEMBERED_MAX: usize = 10_000;

/// Buckets by who.
#[derive(Debug)]
pub(crate) struct Buckets<K> {
    rate: Rate,
    buckets: Mutex<HashMap<K, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl<K: Hash + Eq + Clone> Buckets<K> {
    pub(crate) fn new(rate: Rate) -> Self {
        Self { rate, buckets: Mutex::default() }
    }

    /// Takes one, or says how long to wait for it.
    pub(crate) fn take(&self, who: &K) -> Result<(), Duration> {
        let now = Instant::now();
        let Rate { per_second, burst } = self.rate;
        let filled = |bucket: &Bucket| (bucket.tokens + (now - bucket.at).as_secs_f64() * per_second).min(burst);
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= REMEMBERED_MAX && !buckets.contains_key(who) {
            buckets.retain(|_, bucket| filled(bucket) < burst);
            if buckets.len() >= REMEMBERED_MAX {
                let oldest = buckets.iter().min_by_key(|(_, bucket)| bucket.at).map(|(who, _)| who.clone());
                oldest.and_then(|who| buckets.remove(&who));
            }
        }
        let bucket = buckets.entry(who.clone()).or_insert(Bucket { tokens: burst, at: now });
        (bucket.tokens, bucket.at) = (filled(bucket), now);
        if bucket.tokens < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - bucket.tokens) / per_second));
        }
        bucket.tokens -= 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_bucket_empties_and_fills_again_and_is_nobody_elses() {
        let buckets = Buckets::new(Rate { per_second: 2.0, burst: 3.0 });
        for _ in 0..3 {
            assert_eq!(buckets.take(&"a"), Ok(()));
        }
        assert_eq!(buckets.take(&"a"), Err(Duration::from_millis(500)));
        assert_eq!(buckets.take(&"b"), Ok(()));
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(buckets.take(&"a"), Ok(()));
        assert!(buckets.take(&"a").is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn s5_no_number_of_strangers_takes_more_memory() {
        let buckets = Buckets::new(Rate { per_second: 1.0, burst: 2.0 });
        for who in 0..REMEMBERED_MAX + 100 {
            assert_eq!(buckets.take(&who), Ok(()));
        }
        assert!(buckets.buckets.lock().unwrap().len() <= REMEMBERED_MAX);
    }
}
