//! Sandboxes at rest, as a long life leaves them: copies of one that a daemon hibernated, with all that is recorded of it
//! and all that its provider keeps of it, but for the files in its layer, which nobody reads before it is resumed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use viv_api::sandbox::{CreatePolicy, CreateSandbox, StopSandbox};
use viv_api::snapshot::SnapshotIntegrity;
use viv_core::lifecycle::Sandbox;
use viv_core::snapshot::Snapshot;
use viv_store::{SnapshotQuery, SqliteStore, Store};

use crate::daemon::{client_of, serve};

/// One that is hibernated, to be copied.
pub(crate) struct Pattern {
    /// The part of its ids that makes them its own.
    word: String,
    record: String,
    row: String,
    /// Files of the provider: where they lie in its folder, and what they say.
    files: Vec<(PathBuf, String)>,
    /// Its layer.
    folder: PathBuf,
}

/// Makes one in this data folder.
pub(crate) fn hibernated(data: &Path) -> Pattern {
    let mut daemon = serve(data);
    let client = client_of(data);
    let policy = CreatePolicy { persistent: Some(true), ..CreatePolicy::default() };
    let made = client.create(&CreateSandbox { policy, ..CreateSandbox::default() }, None).unwrap().into_sandbox();
    client.sandbox(&made.id).stop(&StopSandbox::default()).unwrap();
    // Until its content is hashed there is work to do.
    let until = Instant::now() + Duration::from_secs(60);
    let is_hashed = || {
        let saved = client.sandbox(&made.id).snapshots_all().next().unwrap().unwrap();
        client.snapshot(&saved.id).unwrap().integrity == Some(SnapshotIntegrity::Verified)
    };
    while !is_hashed() {
        assert!(Instant::now() < until, "it is not hashed");
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon.kill().unwrap();
    daemon.wait().unwrap();

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (record, row) = runtime.block_on(async {
        let store = SqliteStore::open(&data.join("viv.db")).unwrap();
        let query = SnapshotQuery { sandbox: Some(made.id.clone()), limit: 1, ..SnapshotQuery::default() };
        let row = store.snapshots(&query).await.unwrap().items.remove(0);
        (store.get(&made.id).await.unwrap().unwrap(), row)
    });
    let root = data.join("sandboxes");
    let sealed = fs::read_dir(root.join("layers/sealed")).unwrap().map(|entry| entry.unwrap().path());
    let folder = sealed.filter(|path| path.is_dir()).find(|path| path.to_string_lossy().contains(row.id.as_str()));
    let folder = folder.expect("its layer").strip_prefix(&root).unwrap().to_owned();
    let places = [
        PathBuf::from(format!("snapshots/{}.json", row.id)),
        PathBuf::from(format!("fences/{}.json", made.id)),
        PathBuf::from(format!("{}.json", folder.display())),
    ];
    let read = |place: PathBuf| {
        let text = fs::read_to_string(root.join(&place)).unwrap();
        (place, text)
    };
    let files = places.into_iter().map(read).collect();
    let word = made.id.as_str().strip_prefix("sbx_").unwrap().to_owned();
    let text = |value| serde_json::to_string(&value).unwrap();
    Pattern {
        word,
        record: text(serde_json::to_value(record).unwrap()),
        row: text(serde_json::to_value(row).unwrap()),
        files,
        folder,
    }
}

impl Pattern {
    /// Another one like it: what the provider keeps is written, what is to be recorded is answered.
    pub(crate) fn copy(&self, data: &Path, like: &Sandbox) -> (Sandbox, Snapshot) {
        let word = like.id.as_str().strip_prefix("sbx_").unwrap();
        let own = |text: &str| text.replace(&self.word, word);
        let root = data.join("sandboxes");
        let place = |path: &Path| root.join(own(path.to_str().unwrap()));
        for (path, text) in &self.files {
            fs::write(place(path), own(text)).unwrap();
        }
        fs::create_dir_all(place(&self.folder).join("parts")).unwrap();
        let record: Sandbox = serde_json::from_str(&own(&self.record)).unwrap();
        let row: Snapshot = serde_json::from_str(&own(&self.row)).unwrap();
        let record = Sandbox {
            version: 1,
            labels: like.labels.clone(),
            created_at_ms: like.created_at_ms,
            phase_since_ms: like.phase_since_ms,
            ..record
        };
        (record, Snapshot { version: 1, ..row })
    }
}
