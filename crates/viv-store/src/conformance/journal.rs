use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use viv_core::Generation;
use viv_core::lifecycle::{Actor, PhaseName};

use super::Lab;
use super::lab::{MANY, about, at_once, change, note};
use crate::journal::{Cursor, JournalFilter, JournalLine, JournalSearch, NewLine};
use crate::record::Change;

fn texts(lines: &[JournalLine]) -> Vec<&str> {
    lines.iter().map(|line| line.line.data["text"].as_str().unwrap()).collect()
}

pub(super) async fn o7_lines_are_read_back_whole(lab: &Lab) {
    let full = NewLine {
        at_ms: 1_700_000_000_000,
        project: Some("p".parse().unwrap()),
        sandbox: Some(lab.id()),
        generation: Some(Generation(3)),
        kind: "sandbox.moved".to_owned(),
        from: Some(PhaseName::Ready),
        to: Some(PhaseName::Lost),
        cause: Some("crashed".to_owned()),
        by: Actor { who: "key_1".to_owned(), from: Some("192.0.2.1".to_owned()) },
        data: serde_json::json!({ "n": [1, -2, null, true], "t": "ä\u{1}'\"" }),
    };
    lab.store.append(lab.epoch, vec![full.clone(), note(0, "x")]).await.unwrap();
    let lines: Vec<NewLine> = lab.lines().await.into_iter().map(|line| line.line).collect();
    assert_eq!(lines, [full, note(0, "x")]);
}

pub(super) async fn o7_cursors_grow_and_pages_go_on(lab: &Lab) {
    let mut last = Cursor(0);
    for at in 0..5 {
        let sandbox = lab.new_sandbox(at);
        let change = Change { lines: vec![about(&sandbox), about(&sandbox), about(&sandbox)], ..change(&sandbox) };
        let cursor = lab.store.commit(lab.epoch, change).await.unwrap();
        assert!(cursor > last);
        let newest = lab.store.journal_tail(None, &JournalFilter::default(), 1).await.unwrap();
        assert_eq!(newest[0].cursor, cursor, "the answer is where the journal stands");
        last = cursor;
    }
    let (mut paged, mut after) = (Vec::new(), Cursor(0));
    loop {
        let page = lab.store.journal(after, &JournalFilter::default(), 4).await.unwrap();
        let Some(last) = page.last() else { break };
        assert!(page.len() <= 4);
        after = last.cursor;
        paged.extend(page);
    }
    assert_eq!(paged, lab.lines().await);
    assert_eq!(paged.len(), 15);
    assert!(paged.is_sorted_by(|a, b| a.cursor < b.cursor));
}

pub(super) async fn o7_the_tail_is_read_backwards(lab: &Lab) {
    for text in ["a", "b", "c", "d", "e"] {
        lab.store.append(lab.epoch, vec![note(1, text)]).await.unwrap();
    }
    let any = JournalFilter::default();
    let first = lab.store.journal_tail(None, &any, 2).await.unwrap();
    assert_eq!(texts(&first), ["e", "d"]);
    let second = lab.store.journal_tail(Some(first[1].cursor), &any, 2).await.unwrap();
    assert_eq!(texts(&second), ["c", "b"]);
    let third = lab.store.journal_tail(Some(second[1].cursor), &any, 2).await.unwrap();
    assert_eq!(texts(&third), ["a"]);
    assert!(lab.store.journal_tail(Some(third[0].cursor), &any, 2).await.unwrap().is_empty());
}

pub(super) async fn o7_filters_hold_in_both_directions(lab: &Lab) {
    let ids = [lab.id(), lab.id()];
    let mut all = Vec::new();
    for at in 0..24_u64 {
        let mut line = note(at, "x");
        line.project = [None, Some("p"), Some("q")][at as usize % 3].map(|project| project.parse().unwrap());
        line.sandbox = [None, Some(&ids[0]), None, Some(&ids[1])][at as usize % 4].cloned();
        all.push(line);
    }
    lab.store.append(lab.epoch, all.clone()).await.unwrap();
    for project in [None, Some("p".parse().unwrap()), Some("none".parse().unwrap())] {
        for sandbox in [None, Some(ids[0].clone()), Some(ids[1].clone()), Some(lab.id())] {
            for since_ms in [None, Some(0), Some(13), Some(23), Some(24), Some(u64::MAX)] {
                let filter = JournalFilter { project: project.clone(), sandbox: sandbox.clone(), since_ms };
                let fits = |line: &&NewLine| {
                    (filter.project.is_none() || filter.project == line.project)
                        && (filter.sandbox.is_none() || filter.sandbox == line.sandbox)
                        && since_ms.is_none_or(|since_ms| line.at_ms >= since_ms)
                };
                let wanted: Vec<u64> = all.iter().filter(fits).map(|line| line.at_ms).collect();
                let found = lab.store.journal(Cursor(0), &filter, MANY).await.unwrap();
                assert_eq!(found.iter().map(|line| line.line.at_ms).collect::<Vec<_>>(), wanted, "{filter:?}");
                let found = lab.store.journal_tail(None, &filter, MANY).await.unwrap();
                assert_eq!(found.iter().rev().map(|line| line.line.at_ms).collect::<Vec<_>>(), wanted, "{filter:?}");
            }
        }
    }
}

/// A clock that was set back leaves older lines after newer ones, and none of the newer may be missed for it.
pub(super) async fn o7_since_is_by_the_time_of_each_line(lab: &Lab) {
    let times = [50, 10, 60, 20, 70, 5];
    lab.store.append(lab.epoch, times.map(|at| note(at, "x")).to_vec()).await.unwrap();
    for since_ms in [0, 5, 15, 50, 55, 70, 71] {
        let filter = JournalFilter { since_ms: Some(since_ms), ..JournalFilter::default() };
        let wanted: Vec<u64> = times.into_iter().filter(|at| *at >= since_ms).collect();
        let (mut paged, mut after) = (Vec::new(), Cursor(0));
        while let [line] = lab.store.journal(after, &filter, 1).await.unwrap().as_slice() {
            after = line.cursor;
            paged.push(line.line.at_ms);
        }
        assert_eq!(paged, wanted, "{since_ms}");
        let (mut paged, mut before) = (Vec::new(), None);
        while let [line] = lab.store.journal_tail(before, &filter, 1).await.unwrap().as_slice() {
            before = Some(line.cursor);
            paged.insert(0, line.line.at_ms);
        }
        assert_eq!(paged, wanted, "{since_ms}");
    }
}

/// What is looked for is rare: pages that found nothing say where to go on, and all of them together miss nothing.
pub(super) async fn o7_pages_of_what_is_rare_end_and_miss_nothing(lab: &Lab) {
    const LINES: u64 = 5_000;
    let lines = (0..LINES).map(|at| {
        let mut line = note(at, "x");
        ["execution.started", "execution.ended", "executions"][at as usize % 3].clone_into(&mut line.kind);
        line.cause = (at % 1_900 == 7).then(|| "expired".to_owned());
        line.by = Actor::part(["engine", "key:a", "key:a from the inside", "key:ab"][at as usize % 4]);
        line.by.from = (at % 4 == 1).then(|| ["10.0.0.1", "10.0.0.11"][at as usize / 4 % 2].to_owned());
        line
    });
    let all: Vec<NewLine> = lines.collect();
    lab.store.append(lab.epoch, all.clone()).await.unwrap();
    let text = |text: &str| Some(text.to_owned());
    let (none, mut empty) = (JournalSearch::default(), 0);
    let searches = [
        none.clone(),
        JournalSearch { cause: text("expired"), ..none.clone() },
        JournalSearch { cause: text("never"), ..none.clone() },
        JournalSearch { by: text("key:a"), kind: text("execution"), ..none.clone() },
        JournalSearch { by: text("engine"), cause: text("expired"), kind: text("execution.ended"), ..none.clone() },
        JournalSearch { from: text("10.0.0.1"), by: text("key:a"), ..none.clone() },
        JournalSearch { until_ms: Some(LINES - 1_200), cause: text("expired"), ..none.clone() },
    ];
    for search in searches {
        for since_ms in [None, Some(LINES - 1_500)] {
            let filter = JournalFilter { since_ms, ..JournalFilter::default() };
            for limit in [1, 100, 1_000] {
                // Whole walks by one line would be slow, and show nothing more.
                if limit == 1 && (search.is_any() || search.by.is_some()) {
                    continue;
                }
                let (mut found, mut after) = (Vec::new(), Cursor(0));
                loop {
                    let page = lab.store.journal_page(after, &filter, &search, limit).await.unwrap();
                    assert!(page.lines.len() <= limit);
                    assert!(page.until > after || !page.more, "it moves on");
                    empty += usize::from(page.lines.is_empty() && page.more);
                    after = page.until;
                    found.extend(page.lines.into_iter().map(|line| line.line));
                    if !page.more {
                        break;
                    }
                }
                let wanted = all.iter().filter(|line| filter.takes(line) && search.takes(line));
                assert!(found.iter().eq(wanted), "{search:?} since {since_ms:?} by {limit}: {}", found.len());
            }
        }
    }
    assert!(empty > 0, "some of them found nothing, though there were more");
    let looked = |search: JournalSearch| all.iter().filter(|line| search.takes(line)).count() as u64;
    assert_eq!(looked(JournalSearch { from: text("10.0.0.1"), ..none.clone() }), LINES / 8, "whole addresses");
    assert_eq!(looked(JournalSearch { until_ms: Some(9), ..none.clone() }), 10, "then, and before");
    let by = JournalSearch { by: text("key:a"), ..none };
    let taken: Vec<bool> = all[..4].iter().map(|line| by.takes(line)).collect();
    assert_eq!(taken, [false, true, true, false], "whole names");
}

pub(super) async fn o7_the_bell_rings_with_the_newest(lab: &Lab) {
    let mut tail = lab.store.tail();
    assert_eq!(*tail.borrow_and_update(), Cursor(0));
    let cursor = lab.put(&lab.new_sandbox(1)).await;
    tail.wait_for(|newest| *newest == cursor).await.unwrap();
    // What was refused does not ring.
    assert!(lab.commit(&viv_core::lifecycle::Sandbox { version: 9, ..lab.new_sandbox(1) }).await.is_err());
    let next = lab.store.append(lab.epoch, vec![note(1, "x"), note(1, "y")]).await.unwrap();
    assert_eq!(*lab.store.tail().borrow(), next);
    tail.wait_for(|newest| *newest >= next).await.unwrap();
    assert_eq!(*tail.borrow(), next);
}

/// Whoever reads on from the last line that it saw gets every line, though many write at once.
pub(super) async fn o7_a_follower_misses_nothing(lab: &Lab) {
    const WRITERS: usize = 8;
    const LINES: usize = 40;
    let (store, epoch) = (Arc::clone(&lab.store), lab.epoch);
    let over = Arc::new(AtomicBool::new(false));
    let (read, flag) = (Arc::clone(&store), Arc::clone(&over));
    let follower = tokio::spawn(async move {
        let mut seen: Vec<JournalLine> = Vec::new();
        loop {
            let last_look = flag.load(Ordering::SeqCst);
            let after = seen.last().map_or(Cursor(0), |line| line.cursor);
            let page = read.journal(after, &JournalFilter::default(), 7).await.unwrap();
            if page.is_empty() && last_look {
                return seen;
            }
            seen.extend(page);
            tokio::task::yield_now().await;
        }
    });
    at_once(WRITERS, |writer| {
        let store = Arc::clone(&store);
        async move {
            for at in 0..LINES {
                let lines = vec![note(1, &format!("{writer}/{at}/a")), note(1, &format!("{writer}/{at}/b"))];
                store.append(epoch, lines).await.unwrap();
            }
        }
    })
    .await;
    over.store(true, Ordering::SeqCst);
    let seen = follower.await.unwrap();
    assert_eq!(seen.len(), WRITERS * LINES * 2);
    assert_eq!(seen, lab.lines().await);
    // The lines of one call stand together, and those of one writer in its order.
    for pair in texts(&seen).chunks(2) {
        assert_eq!(pair[0].strip_suffix('a'), pair[1].strip_suffix('b'));
    }
    for writer in 0..WRITERS {
        let prefix = format!("{writer}/");
        let ours: Vec<&str> = texts(&seen).into_iter().filter(|text| text.starts_with(&prefix)).collect();
        let wanted = (0..LINES).flat_map(|at| [format!("{writer}/{at}/a"), format!("{writer}/{at}/b")]);
        assert_eq!(ours, wanted.collect::<Vec<_>>());
    }
}

pub(super) async fn appending_nothing_tells_where_it_stands(lab: &Lab) {
    assert_eq!(lab.store.append(lab.epoch, Vec::new()).await.unwrap(), Cursor(0));
    let cursor = lab.store.append(lab.epoch, vec![note(1, "x")]).await.unwrap();
    assert_eq!(lab.store.append(lab.epoch, Vec::new()).await.unwrap(), cursor);
}
