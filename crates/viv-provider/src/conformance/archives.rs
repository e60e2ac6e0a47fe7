//! Whole trees in and out, within bounds (S4).

use tokio::io::AsyncReadExt;
use viv_core::file::{ArchiveBounds, FileKind, Unpacked};

use super::lab::{Answer, Lab, assert_refused};
use super::program::Program;
use super::subject::{Subject, reader};
use crate::error::ProviderError;

/// A tar archive in the making, also of the kinds that honest tools refuse to write.
struct Archive(tar::Builder<Vec<u8>>);

impl Archive {
    fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    /// The name is written as it is; the tar crate's own setters would refuse the bad ones.
    fn entry(mut self, kind: tar::EntryType, name: &str, link: &str, mode: u32, content: &[u8]) -> Self {
        let mut header = tar::Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        header.set_mtime(1_700_000_000);
        header.set_cksum();
        self.0.append(&header, content).expect("an entry in memory");
        self
    }

    fn dir(self, name: &str, mode: u32) -> Self {
        self.entry(tar::EntryType::Directory, name, "", mode, b"")
    }

    fn file(self, name: &str, mode: u32, content: &[u8]) -> Self {
        self.entry(tar::EntryType::Regular, name, "", mode, content)
    }

    fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(tar::EntryType::Symlink, name, target, 0o777, b"")
    }

    fn hard_link(self, name: &str, target: &str) -> Self {
        self.entry(tar::EntryType::Link, name, target, 0o644, b"")
    }

    /// A file that claims to be large and holds one block.
    fn sparse(mut self, name: &str, real_bytes: u64) -> Self {
        let content = [b'x'; 512];
        let mut header = tar::Header::new_gnu();
        header.set_path(name).expect("a short name");
        header.set_entry_type(tar::EntryType::GNUSparse);
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        let gnu = header.as_gnu_mut().expect("a GNU header");
        octal(&mut gnu.sparse[0].offset, real_bytes - content.len() as u64);
        octal(&mut gnu.sparse[0].numbytes, content.len() as u64);
        octal(&mut gnu.realsize, real_bytes);
        header.set_cksum();
        self.0.append(&header, &content[..]).expect("an entry in memory");
        self
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().expect("an archive in memory")
    }
}

/// Writes a number as tar does: octal digits that fill the field up to a final NUL.
fn octal(field: &mut [u8; 12], value: u64) {
    field.copy_from_slice(format!("{value:011o}\0").as_bytes());
}

async fn put(
    subject: &Subject<'_>,
    path: &str,
    bounds: ArchiveBounds,
    archive: &[u8],
) -> Result<Unpacked, ProviderError> {
    subject.lab.provider().archive_put(&subject.mutation(), &subject.sandbox, path, bounds, reader(archive)).await
}

async fn put_all(subject: &Subject<'_>, path: &str, archive: &[u8]) -> Result<Unpacked, ProviderError> {
    put(subject, path, ArchiveBounds::default(), archive).await
}

async fn get(subject: &Subject<'_>, path: &str) -> Result<Vec<u8>, ProviderError> {
    let mut reader = subject.lab.provider().archive_get(&subject.instance(), path).await?;
    let mut archive = Vec::new();
    reader.read_to_end(&mut archive).await.expect("the archive to its end");
    Ok(archive)
}

fn sample() -> Vec<u8> {
    Archive::new()
        .dir("dir/", 0o750)
        .file("dir/run.sh", 0o755, b"#!/bin/sh\n")
        .file("dir/\u{fc}ml\u{e4}ut \u{2713}.txt", 0o600, "gr\u{fc}n".as_bytes())
        .file("empty", 0o644, b"")
        .symlink("dir/link", "run.sh")
        .symlink("away", "/etc/hostname")
        .bytes()
}

async fn assert_sample(subject: &Subject<'_>, root: &str) {
    let dir = subject.stat(&format!("{root}/dir")).await.must("stat of the directory");
    assert_eq!((dir.kind, dir.mode), (FileKind::Dir, 0o750));
    let script = subject.stat(&format!("{root}/dir/run.sh")).await.must("stat of the script");
    assert_eq!((script.kind, script.mode, script.size_bytes), (FileKind::File, 0o755, 10));
    let name = format!("{root}/dir/\u{fc}ml\u{e4}ut \u{2713}.txt");
    assert_eq!(subject.read(&name).await, "gr\u{fc}n".as_bytes());
    assert_eq!(subject.stat(&name).await.must("stat of the umlaut").mode, 0o600);
    assert_eq!(subject.read(&format!("{root}/empty")).await, b"");
    for (name, target) in [("dir/link", "run.sh"), ("away", "/etc/hostname")] {
        let link = subject.stat(&format!("{root}/{name}")).await.must("stat of a link");
        assert_eq!((link.kind, link.link_target.as_deref()), (FileKind::Symlink, Some(target)));
    }
}

pub(super) async fn unpacks_what_is_packed(lab: &Lab) {
    let subject = lab.subject().await;
    let unpacked = put_all(&subject, "/tmp/made/for-it", &sample()).await.must("archive_put");
    assert_eq!(unpacked, Unpacked { entries: 6, bytes: 15 });
    assert_sample(&subject, "/tmp/made/for-it").await;
    // Again, over what is there.
    put_all(&subject, "/tmp/made/for-it", &sample()).await.must("archive_put, repeated");
    assert_sample(&subject, "/tmp/made/for-it").await;
}

pub(super) async fn goes_round_and_comes_back(lab: &Lab) {
    let subject = lab.subject().await;
    put_all(&subject, "/tmp/one", &sample()).await.must("archive_put");
    let archive = get(&subject, "/tmp/one").await.must("archive_get");
    put_all(&subject, "/tmp/other", &archive).await.must("archive_put of what was got");
    assert_sample(&subject, "/tmp/other").await;
    let names = async |path| {
        let listing = subject.list(path, 9).await.must("file_list");
        listing.entries.into_iter().map(|entry| entry.path).collect::<Vec<_>>()
    };
    assert_eq!(names("/tmp/one").await, names("/tmp/other").await);
}

pub(super) async fn a_file_is_packed_by_its_name(lab: &Lab) {
    let subject = lab.subject().await;
    subject.write("/tmp/one/file", b"content").await;
    let archive = get(&subject, "/tmp/one/file").await.must("archive_get of a file");
    put_all(&subject, "/tmp/other", &archive).await.must("archive_put");
    assert_eq!(subject.read("/tmp/other/file").await, b"content");
}

pub(super) async fn too_many_entries_are_refused(lab: &Lab) {
    let subject = lab.subject().await;
    let archive = Archive::new().file("a", 0o644, b"").file("b", 0o644, b"").file("c", 0o644, b"").bytes();
    let bounds = ArchiveBounds { entries_max: 2, ..ArchiveBounds::default() };
    assert_refused!(put(&subject, "/tmp/in", bounds, &archive).await, ProviderError::Exhausted { .. });
    assert!(!subject.is_there("/tmp/in/c").await);
    let bounds = ArchiveBounds { entries_max: 3, ..ArchiveBounds::default() };
    put(&subject, "/tmp/in", bounds, &archive).await.must("as many as are allowed");
}

pub(super) async fn too_many_bytes_are_refused(lab: &Lab) {
    let subject = lab.subject().await;
    let archive = Archive::new().file("a", 0o644, &[b'a'; 600]).file("b", 0o644, &[b'b'; 600]).bytes();
    let bounds = ArchiveBounds { bytes_max: 1_199, ..ArchiveBounds::default() };
    assert_refused!(put(&subject, "/tmp/in", bounds, &archive).await, ProviderError::Exhausted { .. });
    let bounds = ArchiveBounds { bytes_max: 1_200, ..ArchiveBounds::default() };
    put(&subject, "/tmp/in", bounds, &archive).await.must("as much as is allowed");
}

pub(super) async fn too_swollen_is_refused(lab: &Lab) {
    let subject = lab.subject().await;
    let archive = Archive::new().sparse("bomb", 1 << 30).bytes();
    assert_refused!(put_all(&subject, "/tmp/in", &archive).await, ProviderError::Exhausted { .. });
    assert!(!subject.is_there("/tmp/in/bomb").await);
}

/// Refused, with nothing outside of the directory touched.
async fn assert_kept_inside(subject: &Subject<'_>, archive: &[u8]) {
    subject.write("/tmp/outside/kept", b"kept").await;
    assert_refused!(put_all(subject, "/tmp/in", archive).await, ProviderError::Invalid { .. });
    assert_eq!(subject.read("/tmp/outside/kept").await, b"kept", "something outside was changed");
    let outside = subject.list("/tmp/outside", 9).await.must("file_list");
    assert_eq!(outside.entries.len(), 1, "something was written outside: {outside:?}");
    assert!(!subject.is_there("/tmp/escaped").await, "something was written outside");
    assert!(!subject.is_there("/escaped").await, "something was written outside");
}

pub(super) async fn climbing_paths_are_refused(lab: &Lab) {
    let subject = lab.subject().await;
    for name in ["../escaped", "a/../../escaped", "../outside/kept", ".."] {
        let archive = Archive::new().file("fine", 0o644, b"fine").file(name, 0o644, b"bad").bytes();
        assert_kept_inside(&subject, &archive).await;
    }
}

pub(super) async fn absolute_paths_are_refused(lab: &Lab) {
    let subject = lab.subject().await;
    for name in ["/tmp/escaped", "/escaped", "//tmp/outside/kept"] {
        assert_kept_inside(&subject, &Archive::new().file(name, 0o644, b"bad").bytes()).await;
    }
}

pub(super) async fn writing_through_a_link_is_refused(lab: &Lab) {
    let subject = lab.subject().await;
    for target in ["/tmp/outside", "../outside"] {
        let archive = Archive::new().symlink("link", target).file("link/kept", 0o644, b"bad").bytes();
        assert_kept_inside(&subject, &archive).await;
        let archive = Archive::new().symlink("link", target).dir("link/made", 0o755).bytes();
        assert_kept_inside(&subject, &archive).await;
    }
}

pub(super) async fn writing_through_a_link_of_before_is_refused(lab: &Lab) {
    let subject = lab.subject().await;
    subject.mkdir("/tmp/in").await.must("file_mkdir");
    for (target, path) in [("/tmp/outside", "/tmp/in/dir"), ("/tmp/outside/kept", "/tmp/in/file")] {
        subject.run_ok(&Program::Link { target: target.to_owned(), path: path.to_owned() }.spec()).await;
    }
    assert_kept_inside(&subject, &Archive::new().file("dir/kept", 0o644, b"bad").bytes()).await;
    // A link at the very end is not gone through, but replaced.
    put_all(&subject, "/tmp/in", &Archive::new().file("file", 0o644, b"new").bytes()).await.must("replacing a link");
    assert_eq!(subject.read("/tmp/in/file").await, b"new");
    assert_eq!(subject.stat("/tmp/in/file").await.must("file_stat").kind, FileKind::File);
    assert_eq!(subject.read("/tmp/outside/kept").await, b"kept", "it was written through the link");
}

pub(super) async fn a_hard_link_out_is_refused(lab: &Lab) {
    let subject = lab.subject().await;
    for target in ["/tmp/outside/kept", "../outside/kept"] {
        assert_kept_inside(&subject, &Archive::new().hard_link("link", target).bytes()).await;
        assert!(!subject.is_there("/tmp/in/link").await);
    }
    let archive = Archive::new().file("a", 0o644, b"same").hard_link("b", "a").bytes();
    put_all(&subject, "/tmp/in", &archive).await.must("a hard link inside");
    assert_eq!(subject.read("/tmp/in/b").await, b"same");
}

pub(super) async fn what_is_no_archive_is_invalid(lab: &Lab) {
    let subject = lab.subject().await;
    assert_refused!(put_all(&subject, "/tmp/in", &[b'x'; 2_000]).await, ProviderError::Invalid { .. });
    // Cut off in the middle of a file.
    let archive = Archive::new().file("a", 0o644, &[b'a'; 5_000]).bytes();
    assert_refused!(put_all(&subject, "/tmp/in", &archive[..2_000]).await, ProviderError::Invalid { .. });
}

pub(super) async fn packing_nothing_is_not_found(lab: &Lab) {
    let subject = lab.subject().await;
    assert_refused!(get(&subject, "/tmp/no/such/thing").await, ProviderError::NotFound { .. });
}
