//! Both stores, and the one suite (P6).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use viv_store::conformance::World;
use viv_store::{MemoryStore, SqliteStore, Store};

struct InMemory(MemoryStore);

#[async_trait]
impl World for InMemory {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }

    async fn another(&self) -> Arc<dyn Store> {
        self.store()
    }

    fn backup_path(&self) -> PathBuf {
        PathBuf::from("copy")
    }

    async fn restored(&self, from: &Path) -> Arc<dyn Store> {
        Arc::new(self.0.restored(from).expect("it was copied there"))
    }
}

struct InFile {
    folder: tempfile::TempDir,
    store: Arc<SqliteStore>,
    copies: AtomicU32,
}

impl InFile {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(&folder.path().join("store.db")).unwrap());
        Self { folder, store, copies: AtomicU32::new(0) }
    }
}

#[async_trait]
impl World for InFile {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    async fn another(&self) -> Arc<dyn Store> {
        Arc::new(SqliteStore::open(&self.folder.path().join("store.db")).unwrap())
    }

    fn backup_path(&self) -> PathBuf {
        self.folder.path().join("copy.db")
    }

    /// As one does it: the copy is put where it is to be used.
    async fn restored(&self, from: &Path) -> Arc<dyn Store> {
        let to = self.folder.path().join(format!("restored-{}.db", self.copies.fetch_add(1, Ordering::Relaxed)));
        std::fs::copy(from, &to).unwrap();
        Arc::new(SqliteStore::open(&to).unwrap())
    }
}

mod memory {
    use super::*;
    viv_store::conformance_tests!(InMemory(MemoryStore::new()));
}

mod sqlite {
    use super::*;
    viv_store::conformance_tests!(InFile::start());
}
