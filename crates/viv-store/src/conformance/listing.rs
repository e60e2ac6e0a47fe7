use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use viv_core::SandboxId;
use viv_core::lifecycle::{PhaseName, Sandbox};
use viv_core::spec::Project;

use super::Lab;
use super::lab::{change, everything, phase};
use crate::error::StoreError;
use crate::record::{ListQuery, PhaseCounts};
use crate::store::Store;

/// All pages.
async fn paged(store: &dyn Store, query: &ListQuery) -> Vec<Sandbox> {
    let (mut items, mut query) = (Vec::new(), query.clone());
    loop {
        let page = store.list(&query).await.unwrap();
        assert!(page.items.len() <= query.limit);
        items.extend(page.items);
        let Some(next) = page.next else { return items };
        query.after = Some(next);
    }
}

pub(super) async fn is_newest_first(lab: &Lab) {
    for created_at_ms in [5, 1, 3, 3, 3, 9] {
        lab.put(&lab.new_sandbox(created_at_ms)).await;
    }
    let listing = lab.store.list(&everything()).await.unwrap();
    let order: Vec<(u64, SandboxId)> =
        listing.items.iter().map(|found| (found.created_at_ms, found.id.clone())).collect();
    assert!(order.is_sorted_by(|a, b| a > b), "{order:?}");
    assert_eq!(order.len(), 6);
    assert_eq!(listing.next, None);
    for limit in 1..8 {
        assert_eq!(paged(lab.store.as_ref(), &ListQuery { limit, ..everything() }).await, listing.items);
    }
}

/// Records of all kinds.
async fn variety(lab: &Lab) -> Vec<Sandbox> {
    let mut all = Vec::new();
    for at in 0..66_usize {
        let mut sandbox = lab.new_sandbox(at as u64 / 3);
        sandbox.project = ["default", "p", "q"][at % 3].parse().unwrap();
        if at % 4 != 0 {
            sandbox.labels.insert("team".to_owned(), ["a", "b"][at / 4 % 2].to_owned());
        }
        if at % 5 == 0 {
            sandbox.labels.insert("rare".to_owned(), "yes".to_owned());
        }
        sandbox.phase = phase(PhaseName::ALL[at % 11]);
        sandbox.deleted = at % 7 == 0;
        // Those that live must not share their names.
        let over = sandbox.deleted || sandbox.phase.name() == PhaseName::Stopped;
        sandbox.name = Some(if over { "gone".to_owned() } else { format!("n{at}") }.parse().unwrap());
        if at % 6 == 5 {
            sandbox.name = None;
        }
        lab.put(&sandbox).await;
        all.push(sandbox);
    }
    all.sort_by(|a, b| (b.created_at_ms, &b.id).cmp(&(a.created_at_ms, &a.id)));
    all
}

fn queries() -> Vec<ListQuery> {
    let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let labels = [
        vec![],
        vec![label("team", "a")],
        vec![label("team", "a"), label("rare", "yes")],
        vec![label("team", "none")],
        vec![label("' OR 1=1 --", "%")],
    ];
    let phases = [vec![], vec![PhaseName::Ready], vec![PhaseName::Stopped, PhaseName::Lost, PhaseName::Lost]];
    let mut queries = Vec::new();
    for project in [None, Some("p"), Some("nowhere")] {
        for labels in &labels {
            for phases in &phases {
                for name in [None, Some("gone"), Some("n13")] {
                    for deleted in [false, true] {
                        queries.push(ListQuery {
                            project: project.map(|project| project.parse().unwrap()),
                            labels: labels.iter().cloned().collect(),
                            phases: phases.clone(),
                            name: name.map(|name| name.parse().unwrap()),
                            deleted,
                            after: None,
                            limit: 7,
                        });
                    }
                }
            }
        }
    }
    queries
}

pub(super) async fn equals_a_model_for_every_filter(lab: &Lab) {
    let all = variety(lab).await;
    for query in queries() {
        let fits = |found: &&Sandbox| {
            query.project.as_ref().is_none_or(|project| found.project == *project)
                && query.labels.iter().all(|(name, value)| found.labels.get(name) == Some(value))
                && (query.phases.is_empty() || query.phases.contains(&found.phase.name()))
                && query.name.as_ref().is_none_or(|name| found.name.as_ref() == Some(name))
                && (query.deleted || !found.deleted)
        };
        let wanted: Vec<Sandbox> = all.iter().filter(fits).cloned().collect();
        assert_eq!(paged(lab.store.as_ref(), &query).await, wanted, "{query:?}");
    }
}

pub(super) async fn shows_each_once_while_others_come(lab: &Lab) {
    let labelled = |at: u64| {
        let mut sandbox = lab.new_sandbox(at);
        sandbox.labels.insert("k".to_owned(), "v".to_owned());
        sandbox
    };
    let mut old = BTreeSet::new();
    for at in 0..60 {
        let sandbox = labelled(at);
        lab.put(&sandbox).await;
        old.insert(sandbox.id);
    }
    let come: Vec<Sandbox> = (0..500).map(|at| labelled(at % 120)).collect();
    let over = Arc::new(AtomicBool::new(false));
    let (store, epoch, flag) = (Arc::clone(&lab.store), lab.epoch, Arc::clone(&over));
    let first = Arc::new(tokio::sync::Notify::new());
    let bell = Arc::clone(&first);
    let writer = tokio::spawn(async move {
        for sandbox in come {
            if flag.load(Ordering::SeqCst) {
                break;
            }
            store.commit(epoch, change(&sandbox)).await.unwrap();
            bell.notify_one();
            // Also those that were there change while they are listed.
            let next = Sandbox { version: 2, phase: phase(PhaseName::Ready), ..sandbox };
            store.commit(epoch, change(&next)).await.unwrap();
        }
    });
    first.notified().await;
    for labels in [vec![], vec![("k".to_owned(), "v".to_owned())]] {
        let query = ListQuery { labels: labels.into_iter().collect(), limit: 7, ..ListQuery::default() };
        for _ in 0..3 {
            let found: Vec<SandboxId> =
                paged(lab.store.as_ref(), &query).await.into_iter().map(|found| found.id).collect();
            let once: BTreeSet<SandboxId> = found.iter().cloned().collect();
            assert_eq!(once.len(), found.len(), "one was listed twice");
            assert!(old.is_subset(&once), "one that was there was not listed");
        }
    }
    over.store(true, Ordering::SeqCst);
    writer.await.unwrap();
}

pub(super) async fn refuses_what_no_page_gave(lab: &Lab) {
    lab.put(&lab.new_sandbox(1)).await;
    for after in ["", ".", "1", "1.", "x.sbx_1", "1.exe_1", "-1.sbx_1", "1.sbx_1/..", "99999999999999999999.sbx_1"] {
        let query = ListQuery { after: Some(after.to_owned()), ..everything() };
        let answer = lab.store.list(&query).await;
        assert!(matches!(answer, Err(StoreError::BadCursor)), "{after:?}: {answer:?}");
    }
}

pub(super) async fn counts_equal_what_is_there(lab: &Lab) {
    let mut all = variety(lab).await;
    for round in 0..3 {
        for project in [None, Some("p"), Some("nowhere")].map(|project| project.map(|p| p.parse::<Project>().unwrap()))
        {
            let mut wanted = PhaseCounts::new();
            let ours = |found: &&Sandbox| project.as_ref().is_none_or(|project| found.project == *project);
            for found in all.iter().filter(ours).filter(|found| !found.deleted) {
                *wanted.entry(found.phase.name()).or_default() += 1;
            }
            assert_eq!(lab.store.count(project.as_ref()).await.unwrap(), wanted);
        }
        for (at, sandbox) in all.iter_mut().enumerate() {
            let (name, deleted) = (PhaseName::ALL[(at + round) % 11], at % 5 == round);
            lab.put_next(sandbox, |sandbox| {
                sandbox.name = None;
                sandbox.phase = phase(name);
                sandbox.deleted = deleted;
            })
            .await;
        }
    }
}

pub(super) async fn labels_change_with_the_record(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    sandbox.labels.insert("k".to_owned(), "old".to_owned());
    lab.put(&sandbox).await;
    lab.put_next(&mut sandbox, |sandbox| drop(sandbox.labels.insert("k".to_owned(), "new".to_owned()))).await;
    let found = async |value: &str, deleted: bool| {
        let labels = [("k".to_owned(), value.to_owned())].into();
        lab.store.list(&ListQuery { labels, deleted, limit: 10, ..ListQuery::default() }).await.unwrap().items.len()
    };
    assert_eq!((found("old", true).await, found("new", false).await), (0, 1));
    lab.put_next(&mut sandbox, |sandbox| sandbox.deleted = true).await;
    assert_eq!((found("new", false).await, found("new", true).await), (0, 1));
    lab.put_next(&mut sandbox, |sandbox| sandbox.labels.clear()).await;
    assert_eq!(found("new", true).await, 0);
}
