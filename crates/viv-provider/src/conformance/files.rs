//! Files through the API, and the same files as commands see them.

use viv_core::file::FileKind;

use super::lab::{Answer, Lab, assert_refused};
use super::program::Program;
use super::subject::reader;
use crate::error::ProviderError;
use crate::provider::FileWrite;

/// Enough for a listing to need more than one read of the directory.
const MANY_FILES: usize = 300;

pub(super) async fn written_is_read_back(lab: &Lab) {
    let subject = lab.subject().await;
    let content: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
    let stat = subject.write("/tmp/deep/er/file", &content).await;
    assert_eq!((stat.kind, stat.size_bytes), (FileKind::File, content.len() as u64));
    assert!(subject.read("/tmp/deep/er/file").await == content, "what was read differs from what was written");
    subject.write("/tmp/empty", b"").await;
    assert_eq!(subject.read("/tmp/empty").await, b"");
}

pub(super) async fn ranges_are_read(lab: &Lab) {
    let subject = lab.subject().await;
    subject.write("/tmp/range", b"0123456789").await;
    for (offset, length, expected) in [
        (0, Some(4), "0123"),
        (3, Some(4), "3456"),
        (3, None, "3456789"),
        (8, Some(10), "89"),
        (0, Some(0), ""),
        (10, None, ""),
        (50, Some(3), ""),
    ] {
        let read = subject.read_range("/tmp/range", offset, length).await.must("file_read");
        assert_eq!(String::from_utf8_lossy(&read), expected, "{length:?} from {offset} on");
    }
}

pub(super) async fn replacing_shortens(lab: &Lab) {
    let subject = lab.subject().await;
    subject.write("/tmp/file", b"a longer text").await;
    subject.write("/tmp/file", b"short").await;
    assert_eq!(subject.read("/tmp/file").await, b"short");
    let listing = subject.list("/tmp", 1).await.must("file_list");
    let names: Vec<_> = listing.entries.iter().map(|entry| entry.path.as_str()).collect();
    assert_eq!(names.iter().filter(|name| name.contains("file")).count(), 1, "something else was left: {names:?}");
}

pub(super) async fn modes_are_kept(lab: &Lab) {
    let subject = lab.subject().await;
    assert_eq!(subject.write("/tmp/plain", b"x").await.mode, 0o644);
    assert_eq!(subject.write_mode("/tmp/own", b"x", Some(0o600)).await.must("file_write").mode, 0o600);
    assert_eq!(subject.write("/tmp/own", b"y").await.mode, 0o600, "replacing keeps the mode");
    assert_eq!(subject.write_mode("/tmp/own", b"z", Some(0o755)).await.must("file_write").mode, 0o755);
    assert_eq!(subject.stat("/tmp/own").await.must("file_stat").mode, 0o755);
}

pub(super) async fn missing_is_not_found(lab: &Lab) {
    let subject = lab.subject().await;
    let missing = "/tmp/no/such/thing";
    assert_refused!(subject.read_range(missing, 0, None).await, ProviderError::NotFound { .. });
    assert_refused!(subject.stat(missing).await, ProviderError::NotFound { .. });
    assert_refused!(subject.list(missing, 1).await, ProviderError::NotFound { .. });
    assert_refused!(subject.remove(missing).await, ProviderError::NotFound { .. });
    assert_refused!(subject.rename(missing, "/tmp/elsewhere").await, ProviderError::NotFound { .. });
}

pub(super) async fn directories_are_not_files(lab: &Lab) {
    let subject = lab.subject().await;
    subject.mkdir("/tmp/dir").await.must("file_mkdir");
    assert_refused!(subject.read_range("/tmp/dir", 0, None).await, ProviderError::Conflict { .. });
    assert_refused!(subject.write_mode("/tmp/dir", b"x", None).await, ProviderError::Conflict { .. });
    assert_eq!(subject.stat("/tmp/dir").await.must("file_stat").kind, FileKind::Dir);
}

pub(super) async fn files_are_not_directories(lab: &Lab) {
    let subject = lab.subject().await;
    subject.write("/tmp/file", b"x").await;
    assert_refused!(subject.list("/tmp/file", 1).await, ProviderError::Conflict { .. });
    assert_refused!(subject.mkdir("/tmp/file").await, ProviderError::Conflict { .. });
    assert_refused!(subject.mkdir("/tmp/file/below").await, ProviderError::Conflict { .. });
    assert_refused!(subject.write_mode("/tmp/file/below", b"x", None).await, ProviderError::Conflict { .. });
    assert_eq!(subject.read("/tmp/file").await, b"x");
}

pub(super) async fn relative_paths_are_invalid(lab: &Lab) {
    let subject = lab.subject().await;
    for path in ["relative", "", "./here", "/tmp/nul\0byte"] {
        assert_refused!(subject.stat(path).await, ProviderError::Invalid { .. });
        assert_refused!(subject.write_mode(path, b"x", None).await, ProviderError::Invalid { .. });
        assert_refused!(subject.remove(path).await, ProviderError::Invalid { .. });
    }
    assert_refused!(subject.list("/tmp", 0).await, ProviderError::Invalid { .. });
}

pub(super) async fn stat_tells_kinds(lab: &Lab) {
    let subject = lab.subject().await;
    subject.write("/tmp/file", b"four").await;
    let link = Program::Link { target: "file".to_owned(), path: "/tmp/link".to_owned() };
    subject.run_ok(&link.spec()).await;
    let file = subject.stat("/tmp/file").await.must("file_stat");
    assert_eq!((file.kind, file.size_bytes, file.link_target), (FileKind::File, 4, None));
    assert_eq!((file.uid, file.gid), (0, 0));
    let link = subject.stat("/tmp/link").await.must("file_stat");
    assert_eq!((link.kind, link.link_target.as_deref()), (FileKind::Symlink, Some("file")));
    assert_eq!(subject.read("/tmp/link").await, b"four", "reading follows a link");
}

pub(super) async fn list_goes_to_a_depth(lab: &Lab) {
    let subject = lab.subject().await;
    for path in ["/tmp/top/a/b/c", "/tmp/top/d", "/tmp/top/a/e"] {
        subject.write(path, b"x").await;
    }
    for (depth, expected) in
        [(1, vec!["a", "d"]), (2, vec!["a", "a/b", "a/e", "d"]), (9, vec!["a", "a/b", "a/b/c", "a/e", "d"])]
    {
        let listing = subject.list("/tmp/top", depth).await.must("file_list");
        assert!(listing.complete);
        assert_eq!(listing.entries.iter().map(|entry| entry.path.as_str()).collect::<Vec<_>>(), expected);
        for entry in &listing.entries {
            let is_dir = ["a", "a/b"].contains(&entry.path.as_str());
            assert_eq!(entry.stat.kind == FileKind::Dir, is_dir, "{}", entry.path);
            assert!(!entry.lossy);
        }
    }
}

pub(super) async fn list_is_complete(lab: &Lab) {
    let subject = lab.subject().await;
    for number in 0..MANY_FILES {
        subject.write(&format!("/tmp/many/file-{number:03}"), b"").await;
    }
    let listing = subject.list("/tmp/many", 1).await.must("file_list");
    assert!(listing.complete);
    let expected: Vec<_> = (0..MANY_FILES).map(|number| format!("file-{number:03}")).collect();
    assert_eq!(listing.entries.into_iter().map(|entry| entry.path).collect::<Vec<_>>(), expected);
}

pub(super) async fn mkdir_makes_the_way(lab: &Lab) {
    let subject = lab.subject().await;
    for round in ["file_mkdir", "file_mkdir of what is there"] {
        subject.mkdir("/tmp/one/two/three").await.must(round);
        assert_eq!(subject.stat("/tmp/one/two/three").await.must("file_stat").kind, FileKind::Dir);
    }
}

pub(super) async fn move_replaces(lab: &Lab) {
    let subject = lab.subject().await;
    subject.write("/tmp/from", b"new").await;
    subject.write("/tmp/to", b"old").await;
    subject.rename("/tmp/from", "/tmp/to").await.must("file_move");
    assert_eq!(subject.read("/tmp/to").await, b"new");
    assert!(!subject.is_there("/tmp/from").await);

    subject.write("/tmp/dir/inside/file", b"kept").await;
    subject.rename("/tmp/dir", "/tmp/moved").await.must("file_move of a directory");
    assert_eq!(subject.read("/tmp/moved/inside/file").await, b"kept");
    assert!(!subject.is_there("/tmp/dir").await);

    subject.write("/tmp/full/file", b"x").await;
    assert_refused!(subject.rename("/tmp/moved", "/tmp/full").await, ProviderError::Conflict { .. });
    assert!(subject.is_there("/tmp/full/file").await && subject.is_there("/tmp/moved/inside/file").await);
}

pub(super) async fn remove_takes_all_below(lab: &Lab) {
    let subject = lab.subject().await;
    subject.write("/tmp/tree/a/b", b"x").await;
    subject.write("/tmp/tree-too", b"x").await;
    subject.write("/tmp/target", b"kept").await;
    let link = Program::Link { target: "/tmp/target".to_owned(), path: "/tmp/tree/link".to_owned() };
    subject.run_ok(&link.spec()).await;
    subject.remove("/tmp/tree").await.must("file_remove");
    assert!(!subject.is_there("/tmp/tree").await);
    assert!(subject.is_there("/tmp/tree-too").await, "a name that only begins alike is gone");
    assert_eq!(subject.read("/tmp/target").await, b"kept", "what a link pointed at is gone");
    assert_refused!(subject.remove("/").await, ProviderError::Invalid { .. });
}

pub(super) async fn changes_repeated_answer_the_same(lab: &Lab) {
    let subject = lab.subject().await;
    let (provider, sandbox) = (lab.provider(), &subject.sandbox);
    subject.write("/tmp/a", b"a").await;
    let (moving, removing, writing) = (subject.mutation(), subject.mutation(), subject.mutation());
    let file = FileWrite { path: "/tmp/w".to_owned(), ..FileWrite::default() };
    for round in ["the first time", "repeated"] {
        provider.file_move(&moving, sandbox, "/tmp/a", "/tmp/b").await.must(round);
        assert_eq!(subject.read("/tmp/b").await, b"a");
    }
    for round in ["the first time", "repeated"] {
        provider.file_remove(&removing, sandbox, "/tmp/b").await.must(round);
        assert!(!subject.is_there("/tmp/b").await);
    }
    for round in ["the first time", "repeated"] {
        provider.file_write(&writing, sandbox, &file, reader(b"w")).await.must(round);
        assert_eq!(subject.read("/tmp/w").await, b"w");
    }
}

pub(super) async fn written_is_seen_by_commands(lab: &Lab) {
    let subject = lab.subject().await;
    let nonce = lab.nonce();
    subject.write("/tmp/given", nonce.as_bytes()).await;
    assert_eq!(subject.run_ok(&Program::CatFile { path: "/tmp/given".to_owned() }.spec()).await, nonce);
}

pub(super) async fn commands_writing_is_seen(lab: &Lab) {
    let subject = lab.subject().await;
    let nonce = lab.nonce();
    let write = Program::WriteFile { text: nonce.clone(), path: "/tmp/made".to_owned() };
    subject.run_ok(&write.spec()).await;
    assert_eq!(subject.read("/tmp/made").await, nonce.as_bytes());
    subject.run_ok(&Program::Append { path: "/tmp/made".to_owned() }.spec()).await;
    assert_eq!(subject.read("/tmp/made").await, format!("{nonce}x\n").as_bytes());
}

pub(super) async fn sandboxes_share_nothing(lab: &Lab) {
    let (one, other) = (lab.subject().await, lab.subject().await);
    one.write("/tmp/secret", b"one's").await;
    assert!(!other.is_there("/tmp/secret").await);
}
