//! Who may still change a sandbox at its provider (L15). One rule for all providers, and for the model that is checked
//! exhaustively (docs/proof.md).
//!
//! ```text
//!   (none) ──made──► Made(g) ──buried──► Buried(g) ──made──► Made(g' > g)
//!      └───────────buried (never was)───────▲
//! ```

use crate::id::{FencingToken, Generation};
use crate::planted::{Planted, is_planted};

/// What is remembered of a sandbox for ever, whatever becomes of its instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fence {
    /// The highest token seen.
    pub token: FencingToken,
    /// The last generation; `None` when there was none yet.
    pub last: Option<(Generation, Standing)>,
}

/// How the last generation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// It was made, and not destroyed.
    Made,
    /// It was destroyed, or may never be made.
    Buried,
}

/// What somebody is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Intent {
    /// Make an instance of the generation.
    Make,
    /// End it, and make sure that it is never made again.
    End,
    /// Change the one that is there.
    Change,
}

/// Why it is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Late {
    /// Somebody with a newer token was there.
    Fenced {
        /// The token that was shown.
        presented: FencingToken,
        /// The highest seen.
        highest: FencingToken,
    },
    /// It is about another generation.
    Stale {
        /// The one that was meant.
        asked: Generation,
        /// The last one.
        current: Generation,
    },
    /// There is none.
    Absent,
}

/// Whether it may be done, first by its token, then by its generation.
pub fn admit(fence: Option<&Fence>, intent: Intent, generation: Generation, token: FencingToken) -> Result<(), Late> {
    if let Some(fence) = fence {
        admit_token(fence, token)?;
    }
    let Some((current, standing)) = fence.and_then(|fence| fence.last) else {
        return match intent {
            Intent::Make | Intent::End => Ok(()),
            Intent::Change => Err(Late::Absent),
        };
    };
    let stale = Late::Stale { asked: generation, current };
    match (intent, standing) {
        _ if generation < current => Err(stale),
        (Intent::Make, Standing::Buried) if generation == current && is_planted(Planted::BuriedIsMade) => Ok(()),
        (Intent::Make, Standing::Buried) if generation == current => Err(stale),
        (Intent::Change, _) if generation != current => Err(stale),
        (Intent::Change, Standing::Buried) => Err(Late::Absent),
        (Intent::Make | Intent::End | Intent::Change, Standing::Made | Standing::Buried) => Ok(()),
    }
}

/// Whether what belongs to no generation may be changed: by its token alone.
pub fn admit_token(fence: &Fence, token: FencingToken) -> Result<(), Late> {
    if token < fence.token && !is_planted(Planted::NoTokenFence) {
        Err(Late::Fenced { presented: token, highest: fence.token })
    } else {
        Ok(())
    }
}

impl Fence {
    /// After a generation was made. Only for who was admitted.
    pub fn made(generation: Generation, token: FencingToken) -> Self {
        Self { token, last: Some((generation, Standing::Made)) }
    }

    /// After a generation was destroyed, or is never to be made. What came after it stays, and so does a token that was
    /// raised while it was on its way out.
    #[must_use]
    pub fn buried(before: Option<&Self>, generation: Generation, token: FencingToken) -> Self {
        let Some(before) = before else { return Self { token, last: Some((generation, Standing::Buried)) } };
        match before.last {
            Some((current, _)) if generation < current => *before,
            Some(_) | None => Self { token: before.token.max(token), last: Some((generation, Standing::Buried)) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Intent; 3] = [Intent::Make, Intent::End, Intent::Change];

    fn ask(fence: &Fence, intent: Intent, generation: u64, token: u64) -> Result<(), Late> {
        admit(Some(fence), intent, Generation(generation), FencingToken(token))
    }

    #[test]
    fn l15_who_is_late_is_refused_whatever_it_wants() {
        let fence = Fence::made(Generation(2), FencingToken(5));
        for intent in ALL {
            let refused = Late::Fenced { presented: FencingToken(4), highest: FencingToken(5) };
            assert_eq!(ask(&fence, intent, 2, 4), Err(refused));
            let refused = Late::Stale { asked: Generation(1), current: Generation(2) };
            assert_eq!(ask(&fence, intent, 1, 6), Err(refused));
            assert_eq!(ask(&fence, intent, 2, 5), Ok(()));
        }
        assert_eq!(admit_token(&fence, FencingToken(5)), Ok(()));
    }

    #[test]
    fn l15_what_is_not_there_yet_is_not_changed() {
        let refused = Late::Stale { asked: Generation(3), current: Generation(2) };
        for fence in [Fence::made(Generation(2), FencingToken(5)), Fence::buried(None, Generation(2), FencingToken(5))]
        {
            assert_eq!(ask(&fence, Intent::Change, 3, 5), Err(refused));
            assert_eq!((ask(&fence, Intent::Make, 3, 5), ask(&fence, Intent::End, 3, 5)), (Ok(()), Ok(())));
        }
    }

    #[test]
    fn l15_what_is_buried_is_never_made_again() {
        let never_was = Fence::buried(None, Generation(1), FencingToken(1));
        assert!(matches!(ask(&never_was, Intent::Make, 1, 9), Err(Late::Stale { .. })));
        assert_eq!(ask(&never_was, Intent::Change, 1, 9), Err(Late::Absent));
        assert_eq!(ask(&never_was, Intent::End, 1, 9), Ok(()));
        assert_eq!(ask(&never_was, Intent::Make, 2, 1), Ok(()));
    }

    #[test]
    fn l15_a_burial_lowers_nothing() {
        let raised = Fence { token: FencingToken(9), last: Some((Generation(2), Standing::Made)) };
        assert_eq!(Fence::buried(Some(&raised), Generation(1), FencingToken(3)), raised);
        let buried = Fence::buried(Some(&raised), Generation(2), FencingToken(3));
        assert_eq!(buried, Fence { token: FencingToken(9), last: Some((Generation(2), Standing::Buried)) });
    }

    #[test]
    fn l15_of_what_never_was_nothing_is_changed() {
        let admit = |intent| admit(None, intent, Generation(1), FencingToken(0));
        assert_eq!(ALL.map(admit), [Ok(()), Ok(()), Err(Late::Absent)]);
    }
}
