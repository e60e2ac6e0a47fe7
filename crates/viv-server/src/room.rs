//! Who may have how many requests answered at once (S5).
//!
//! ```text
//!   all requests:  requests_max
//!     ├── keys of projects:  requests_max less what is kept for admins
//!     │     └── each of them:  its share
//!     └── admin keys:  the rest, so that whoever runs the daemon always gets in
//! ```
//!
//! A request without a good key is turned away before anything is waited for, and takes up no room.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use viv_api::error::{ApiError, ErrorCode};

use crate::auth::Caller;
use crate::config::Bounds;
use crate::refusal::Refusal;

/// What is being answered, by key.
#[derive(Debug, Default, Clone)]
pub(crate) struct Rooms {
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    /// By keys of projects, together.
    projects: usize,
    by_key: HashMap<String, usize>,
}

/// Room for one request, until it is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    rooms: Rooms,
    key: String,
}

impl Rooms {
    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes room for a request of this caller. Admins are bounded by what all are bounded by, and have no share.
    pub(crate) fn take(&self, caller: &Caller, bounds: &Bounds) -> Result<Option<Room>, Refusal> {
        if caller.is_admin() {
            return Ok(None);
        }
        let mut taken = self.lock();
        let own = taken.by_key.get(&caller.key.id).copied().unwrap_or_default();
        let all = bounds.requests_max.saturating_sub(bounds.admin_requests_kept);
        let max = bounds.key_requests_max;
        if own >= max {
            return Err(full(format!("{max} requests of this key are being answered already")));
        }
        if taken.projects >= all {
            return Err(full(format!("{all} requests are being answered already")));
        }
        taken.projects += 1;
        *taken.by_key.entry(caller.key.id.clone()).or_default() += 1;
        Ok(Some(Room { rooms: self.clone(), key: caller.key.id.clone() }))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = self.rooms.lock();
        taken.projects -= 1;
        if let Some(own) = taken.by_key.get_mut(&self.key) {
            *own -= 1;
            if *own == 0 {
                taken.by_key.remove(&self.key);
            }
        }
    }
}

fn full(what: String) -> Refusal {
    Refusal(ApiError::new(ErrorCode::TooManyRequests, what).hint("try again in a moment"))
}

#[cfg(test)]
mod tests {
    use viv_store::{ApiKey, KeyScope};

    use super::*;

    fn caller(id: &str, scope: KeyScope) -> Caller {
        let key = ApiKey {
            id: id.to_owned(),
            name: String::new(),
            scope,
            hash: [0; 32],
            created_at_ms: 0,
            expires_at_ms: None,
            revoked_at_ms: None,
        };
        Caller { key: Arc::new(key), peer: None }
    }

    #[test]
    fn s5_one_key_has_its_share_and_admins_always_get_in() {
        let bounds = Bounds { requests_max: 10, key_requests_max: 4, admin_requests_kept: 3, ..Bounds::default() };
        let rooms = Rooms::default();
        let project = || KeyScope::Project { project: "p".parse().unwrap() };
        let take = |id: &str, scope: KeyScope| rooms.take(&caller(id, scope), &bounds);
        let mut held: Vec<Room> = (0..4).map(|_| take("a", project()).unwrap().unwrap()).collect();
        let refused = take("a", project()).unwrap_err().0;
        assert_eq!(refused.code, ErrorCode::TooManyRequests);
        assert!(refused.message.contains("of this key"), "{}", refused.message);
        held.extend((0..3).map(|_| take("b", KeyScope::ReadOnly { project: "p".parse().unwrap() }).unwrap().unwrap()));
        let refused = take("c", project()).unwrap_err().0;
        assert!(refused.message.starts_with("7 requests"), "{}", refused.message);
        assert!(take("d", KeyScope::Admin).unwrap().is_none(), "what is kept is kept for them");
        held.clear();
        assert!(take("a", project()).is_ok());
        assert_eq!(rooms.lock().by_key.len(), 0, "who has none is not remembered");
        assert_eq!(rooms.lock().projects, 0);
    }
}
