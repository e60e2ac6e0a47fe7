//! What the tests of layers share.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use viv_layer::corpus::{Size, corpus};

#[allow(dead_code, reason = "not every test file needs it")]
/// Owners, devices and overlay's marks need root. Without it there is nothing to test.
pub(crate) fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    root
}

/// A place for a test, gone afterwards however deep it was filled.
pub(crate) struct Place(Option<TempDir>);

impl Place {
    pub(crate) fn new() -> Self {
        Self(Some(tempfile::tempdir().unwrap()))
    }

    /// In memory if that can hold a layer, for tests with many entries: disks vary, and slow down while much is removed.
    #[allow(dead_code, reason = "not every test file needs one")]
    pub(crate) fn large() -> Self {
        let probe = |place: &TempDir| {
            let value = rustix::fs::setxattr(place.path(), "user.probe", b"", rustix::fs::XattrFlags::empty());
            value.and_then(|()| rustix::fs::removexattr(place.path(), "user.probe")).is_ok()
        };
        let memory = tempfile::tempdir_in("/dev/shm").ok().filter(probe);
        memory.map_or_else(Self::new, |place| Self(Some(place)))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.as_ref().unwrap().path().join(name)
    }

    /// A folder in it.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir(&path).unwrap();
        path
    }

    /// A folder in it with a corpus.
    #[allow(dead_code, reason = "not every test file needs one")]
    pub(crate) fn corpus(&self, name: &str, size: Size) -> PathBuf {
        let path = self.folder(name);
        corpus(&path, 7, size).unwrap();
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(place) = self.0.take() {
            viv_layer::remove(&place.keep()).unwrap();
        }
    }
}

/// Two layers are the same, or the first difference is told.
#[allow(dead_code, reason = "not every test file needs it")]
pub(crate) fn assert_same(left: &Path, right: &Path) {
    let (a, b) = (viv_layer::lines(left).unwrap(), viv_layer::lines(right).unwrap());
    let only = |these: &[String], those: &[String]| -> Vec<String> {
        let those: std::collections::HashSet<_> = those.iter().collect();
        these.iter().filter(|line| !those.contains(line)).take(5).cloned().collect()
    };
    assert!(a == b, "only left: {:#?}\nonly right: {:#?}", only(&a, &b), only(&b, &a));
    assert!(viv_layer::survey(left).unwrap().same_structure(&viv_layer::survey(right).unwrap()));
    assert_eq!(viv_layer::content(left).unwrap(), viv_layer::content(right).unwrap(), "contents differ");
}
