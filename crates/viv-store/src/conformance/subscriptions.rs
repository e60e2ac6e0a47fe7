use std::collections::BTreeMap;

use viv_core::WebhookId;
use viv_core::hook::Secret;
use viv_core::lifecycle::Actor;
use viv_core::subscription::{Letter, Subscription};

use super::Lab;
use super::lab::{MANY, note};
use crate::error::StoreError;
use crate::journal::Cursor;
use crate::subscription::{LETTERS_DEAD_MAX, LetterQuery, Replay, Settled, Standing, SubscriptionQuery};

const MAX: u64 = 3;

/// One whose id tells its place.
pub(super) fn subscription(at: u8) -> Subscription {
    Subscription {
        id: WebhookId::from_bytes([at; 16]),
        project: Some("p".parse().unwrap()),
        version: 1,
        url: "https://example.com/a".to_owned(),
        note: Some("for the suite".to_owned()),
        secret: Secret::new("a secret"),
        secret_before: Some((Secret::new("the one before"), 9)),
        kinds: vec!["sandbox".to_owned()],
        sandbox: None,
        labels: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
        enabled: true,
        made_by: Actor::part("suite"),
        made_at_ms: 1,
    }
}

fn letter(cursor: u64) -> Letter {
    Letter::new(cursor, Some("sbx_1".parse().unwrap()), 5)
}

fn dead(cursor: u64, at_ms: u64) -> Letter {
    Letter { dead_at_ms: Some(at_ms), attempts: 3, why: Some("down".to_owned()), ..letter(cursor) }
}

async fn put(lab: &Lab, row: &Subscription) -> Result<(), StoreError> {
    lab.store.put_subscription(lab.epoch, row.clone(), Cursor(10), vec![note(1, "subscription")], MAX).await
}

async fn standing(lab: &Lab, id: &WebhookId) -> Standing {
    lab.store.subscription(id).await.unwrap().expect("it is there").1
}

/// The places of letters that wait, or are dead.
async fn places(lab: &Lab, id: &WebhookId, dead: bool) -> Vec<u64> {
    let query = LetterQuery { of: id.clone(), dead, after: Cursor(0), limit: MANY };
    lab.store.letters(&query).await.unwrap().iter().map(|letter| letter.cursor).collect()
}

/// One with letters at 11, 12 and 13, of which the first is dead.
async fn with_letters(lab: &Lab, at: u8) -> WebhookId {
    let row = subscription(at);
    put(lab, &row).await.unwrap();
    let letters = vec![dead(11, 20), letter(12), letter(13)];
    assert!(lab.store.put_letters(lab.epoch, &row.id, (Cursor(10), Cursor(15)), letters).await.unwrap());
    row.id
}

pub(super) async fn o6_are_kept_and_changed_with_a_line(lab: &Lab) {
    let mut row = subscription(1);
    put(lab, &row).await.unwrap();
    let found = lab.store.subscription(&row.id).await.unwrap();
    assert_eq!(found, Some((row.clone(), Standing { cursor: Cursor(10), waiting: 0, dead: 0 })));
    row.version = 2;
    row.enabled = false;
    let changed = lab.store.put_subscription(lab.epoch, row.clone(), Cursor(99), vec![note(2, "changed")], MAX);
    changed.await.unwrap();
    let (found, stands) = lab.store.subscription(&row.id).await.unwrap().unwrap();
    assert_eq!((found, stands.cursor), (row.clone(), Cursor(10)), "a change does not move its place");
    let other = Subscription { project: None, ..subscription(2) };
    put(lab, &other).await.unwrap();
    let listed = async |query: SubscriptionQuery| lab.store.subscriptions(&query).await.unwrap();
    let all = SubscriptionQuery { limit: MANY, ..SubscriptionQuery::default() };
    let ids = |items: &[(Subscription, Standing)]| -> Vec<WebhookId> {
        items.iter().map(|(row, _)| row.id.clone()).collect()
    };
    assert_eq!(ids(&listed(all.clone()).await.items), [row.id.clone(), other.id.clone()]);
    let first = listed(SubscriptionQuery { limit: 1, ..all.clone() }).await;
    assert_eq!((ids(&first.items), first.next.clone()), (vec![row.id.clone()], Some(row.id.clone())));
    let second = listed(SubscriptionQuery { limit: 1, after: first.next, ..all.clone() }).await;
    assert_eq!((ids(&second.items), second.next), (vec![other.id.clone()], None));
    let of_project = SubscriptionQuery { project: row.project.clone(), ..all };
    assert_eq!(ids(&listed(of_project).await.items), [row.id.clone()], "those of all are nobody's");
    assert!(lab.store.remove_subscription(lab.epoch, &row.id, note(3, "removed")).await.unwrap());
    assert!(!lab.store.remove_subscription(lab.epoch, &row.id, note(3, "removed")).await.unwrap());
    assert_eq!(lab.store.subscription(&row.id).await.unwrap(), None);
    assert_eq!(lab.lines().await.len(), 4);
}

pub(super) async fn o6_a_stale_version_conflicts_and_there_is_a_bound(lab: &Lab) {
    for at in 0..MAX as u8 {
        put(lab, &subscription(at)).await.unwrap();
    }
    let conflict = put(lab, &subscription(0)).await;
    assert!(matches!(conflict, Err(StoreError::SubscriptionConflict { found: 1, .. })), "{conflict:?}");
    assert!(put(lab, &Subscription { version: 0, ..subscription(0) }).await.is_err());
    let refused = put(lab, &subscription(9)).await;
    let is_so = matches!(refused, Err(StoreError::Quota { limit: SubscriptionQuery::LIMIT, used: MAX, max: MAX }));
    assert!(is_so, "{refused:?}");
    put(lab, &Subscription { version: 2, ..subscription(0) }).await.unwrap();
}

pub(super) async fn o6_a_place_moves_with_the_letters_or_not_at_all(lab: &Lab) {
    let id = with_letters(lab, 1).await;
    assert_eq!(standing(lab, &id).await, Standing { cursor: Cursor(15), waiting: 2, dead: 1 });
    let late = lab.store.put_letters(lab.epoch, &id, (Cursor(10), Cursor(16)), vec![letter(16)]).await.unwrap();
    assert!(!late, "its place is another");
    let nobody = WebhookId::from_bytes([9; 16]);
    assert!(!lab.store.put_letters(lab.epoch, &nobody, (Cursor(0), Cursor(1)), vec![letter(1)]).await.unwrap());
    assert_eq!(places(lab, &id, false).await, [12, 13]);
    let lines = lab.lines().await.len();
    assert!(lab.store.put_letters(lab.epoch, &id, (Cursor(15), Cursor(20)), vec![letter(11)]).await.unwrap());
    assert_eq!(lab.lines().await.len(), lines, "a place is no line");
    assert_eq!(places(lab, &id, false).await, [11, 12, 13], "what was dead begins anew");
    lab.store.remove_subscription(lab.epoch, &id, note(1, "removed")).await.unwrap();
    assert!(places(lab, &id, false).await.is_empty(), "letters go with it");
}

pub(super) async fn o6_letters_are_settled_one_by_one(lab: &Lab) {
    let (id, other) = (with_letters(lab, 1).await, with_letters(lab, 2).await);
    let later = Letter { attempts: 1, next_at_ms: 99, why: Some("slow".to_owned()), ..letter(13) };
    let settled = vec![Settled::Taken(Cursor(12)), Settled::Kept(later.clone()), Settled::Kept(letter(77))];
    lab.store.settle_letters(lab.epoch, &id, settled, vec![note(1, "settled")]).await.unwrap();
    let query = LetterQuery { of: id.clone(), dead: false, after: Cursor(0), limit: MANY };
    assert_eq!(lab.store.letters(&query).await.unwrap(), [later], "and what was gone is not made");
    assert_eq!(places(lab, &other, false).await, [12, 13], "of another one");
    let page = LetterQuery { of: other.clone(), dead: false, after: Cursor(12), limit: 1 };
    assert_eq!(lab.store.letters(&page).await.unwrap(), [letter(13)]);
    // Of those that are dead the latest are kept.
    let many: Vec<Letter> = (100..=100 + LETTERS_DEAD_MAX).map(letter).collect();
    let died = many.iter().map(|letter| Settled::Kept(dead(letter.cursor, 30))).collect();
    lab.store.put_letters(lab.epoch, &id, (Cursor(15), Cursor(9_999)), many).await.unwrap();
    lab.store.settle_letters(lab.epoch, &id, died, Vec::new()).await.unwrap();
    let kept = places(lab, &id, true).await;
    assert_eq!((kept.len() as u64, kept.first().copied()), (LETTERS_DEAD_MAX, Some(101)));
}

pub(super) async fn o6_what_is_dead_is_sent_again(lab: &Lab) {
    let id = with_letters(lab, 1).await;
    let replay = async |what| lab.store.replay(lab.epoch, &id, what, 50, note(1, "replay")).await.unwrap();
    assert_eq!(replay(Replay::One(Cursor(10))).await, Some(0));
    assert_eq!(replay(Replay::One(Cursor(12))).await, Some(0), "it is not dead");
    assert_eq!(replay(Replay::One(Cursor(11))).await, Some(1));
    assert_eq!((places(lab, &id, false).await, places(lab, &id, true).await), (vec![11, 12, 13], vec![]));
    let query = LetterQuery { of: id.clone(), dead: false, after: Cursor(0), limit: 1 };
    let again = Letter { since_ms: 50, next_at_ms: 50, ..letter(11) };
    assert_eq!(lab.store.letters(&query).await.unwrap(), [again], "as if it were new");
    lab.store.settle_letters(lab.epoch, &id, vec![Settled::Kept(dead(12, 60))], Vec::new()).await.unwrap();
    assert_eq!(replay(Replay::Dead).await, Some(1));
    assert_eq!(places(lab, &id, false).await, [11, 12, 13]);
    let nobody = WebhookId::from_bytes([9; 16]);
    assert_eq!(lab.store.replay(lab.epoch, &nobody, Replay::Dead, 1, note(1, "replay")).await.unwrap(), None);
}

pub(super) async fn o6_everything_after_a_place_is_sent_again(lab: &Lab) {
    let id = with_letters(lab, 1).await;
    let lines = lab.lines().await.len();
    lab.store.replay(lab.epoch, &id, Replay::After(Cursor(12)), 50, note(1, "replay")).await.unwrap();
    assert_eq!(standing(lab, &id).await, Standing { cursor: Cursor(12), waiting: 1, dead: 1 });
    assert_eq!(places(lab, &id, false).await, [12], "what is found again does not wait meanwhile");
    assert_eq!(lab.lines().await.len(), lines + 1);
}

pub(super) async fn j9_letters_that_died_long_ago_are_forgotten(lab: &Lab) {
    let id = with_letters(lab, 1).await;
    assert_eq!(places(lab, &id, true).await, [11]);
    while lab.store.retain(lab.epoch, 20, 100).await.unwrap() > 0 {}
    assert_eq!(places(lab, &id, true).await, [11]);
    while lab.store.retain(lab.epoch, 21, 100).await.unwrap() > 0 {}
    assert!(places(lab, &id, true).await.is_empty());
    assert_eq!(places(lab, &id, false).await, [12, 13], "what waits is not forgotten");
}
