//! The faults that a simulation injects into the store without a file.

mod common;

use std::sync::{Arc, Mutex};

use common::{change, note, owner, sandbox};
use viv_store::memory::Fault;
use viv_store::{Cursor, JournalFilter, MemoryStore, Store, StoreError};

#[tokio::test]
async fn a_call_fails_before_or_after_it_had_its_effect() {
    let store = MemoryStore::new();
    let epoch = store.own(owner()).await.unwrap();
    for (fault, there) in [(Fault::Before, false), (Fault::After, true)] {
        let sandbox = sandbox(1);
        let mut next = Some(fault);
        store.set_faults(Some(Box::new(move |call| if call == "commit" { next.take() } else { None })));
        let answer = store.commit(epoch, change(&sandbox)).await;
        assert!(matches!(answer, Err(StoreError::Unavailable { .. })), "{answer:?}");
        assert_eq!(store.get(&sandbox.id).await.unwrap().is_some(), there);
        // Trying again finds out.
        let again = store.commit(epoch, change(&sandbox)).await;
        assert_eq!(matches!(again, Err(StoreError::Conflict { found: 1, .. })), there, "{again:?}");
    }
    let lines = store.journal(Cursor(0), &JournalFilter::default(), 10).await.unwrap();
    assert_eq!(lines.len(), 2);
}

#[tokio::test]
async fn every_call_is_asked_about_by_its_name() {
    let store = MemoryStore::new();
    let epoch = store.own(owner()).await.unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    store.set_faults(Some(Box::new(move |call| {
        log.lock().unwrap().push(call);
        Some(Fault::Before)
    })));
    // Through any handle.
    let handle = store.clone();
    assert!(handle.append(epoch, vec![note("x")]).await.is_err());
    assert!(handle.owner().await.is_err());
    assert!(handle.retain(epoch, 1, 1).await.is_err());
    assert_eq!(*asked.lock().unwrap(), ["append", "owner", "retain"]);
    store.set_faults(None);
    assert!(handle.owner().await.is_ok());
}
