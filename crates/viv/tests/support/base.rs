//! What sandboxes of the machine's own userland stand on, handed on from test to test.
//!
//! It is some hundreds of links, which nobody changes. ext4 looks through all that was removed within the last minute
//! for each file that it makes, so with each test making and removing its own, that was most of what tests did.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::{fresh_bytes, hex};

/// Names the folder for those that nobody has, where it is another one: ordinary users have their own.
pub const SHELF: &str = "VIV_TEST_BASES";

fn shelf() -> PathBuf {
    let named = std::env::var_os(SHELF).map(PathBuf::from);
    named.unwrap_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("bases"))
}

fn named_alike(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("host-")))
}

/// Puts one into the folder of a provider that is still to be opened. Without one, or on another disk, the provider makes
/// its own; and so it does if this one is not of the machine as it is now.
pub fn lend(provider: &Path) {
    let host = provider.join("host");
    for base in named_alike(&shelf()) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&host);
        if made.is_err() || fs::rename(&base, host.join(base.file_stem().unwrap())).is_ok() {
            return;
        }
    }
}

/// Takes it from a provider that is not used any more: of several, the one that was made last.
pub fn take_back(provider: &Path) {
    let made = |base: &PathBuf| fs::metadata(base).and_then(|found| found.modified()).ok();
    let Some(base) = named_alike(&provider.join("host")).max_by_key(made) else { return };
    let name = format!("{}.{}", base.file_name().unwrap().to_string_lossy(), hex(&fresh_bytes()));
    let _on_another_disk = fs::create_dir_all(shelf()).and_then(|()| fs::rename(&base, shelf().join(name)));
}
