//! Where nothing more can be written inside, for a diagnosis (O3). Mounts are read from `/proc` and asked how much they
//! have left, which changes nothing.

use std::fs;

use rustix::fs::{StatVfs, statvfs};
use viv_provider::{FullPlace, InstanceRef};

use super::{LocalProvider, Result};
use crate::runtime::Kernel;

/// With less left than this part of what it can hold a place is full: filesystems keep a little for themselves, and who was
/// refused may have wanted more than a block.
const FULL_PART: u64 = 32;

/// And of what is large, with less than this.
const FULL_BYTES: u64 = 16 << 20;

/// Mounts that are looked at; there are about ten.
const MOUNTS_MAX: usize = 64;

impl LocalProvider {
    pub(super) async fn see_full_places(&self, instance: &InstanceRef) -> Result<Vec<FullPlace>> {
        let agent = self.find_parts(instance).await?.agent_pid;
        let instance = instance.clone();
        self.blocking(move |this| {
            // A kernel of its own has mounts of its own, which nobody sees from here.
            let is_seen = this.need_record(&instance)?.kernel == Kernel::Host;
            let Some(agent) = agent.filter(|_| is_seen) else { return Ok(Vec::new()) };
            let mounts = fs::read_to_string(format!("/proc/{agent}/mountinfo")).unwrap_or_default();
            let places = mounts.lines().filter_map(place).take(MOUNTS_MAX);
            let full = places.filter_map(|(path, in_memory)| {
                let found = statvfs(format!("/proc/{agent}/root{path}")).ok()?;
                full(&found).then(|| FullPlace {
                    path: path.to_owned(),
                    in_memory,
                    bytes: found.f_blocks.saturating_mul(found.f_frsize),
                    free_bytes: found.f_bavail.saturating_mul(found.f_frsize),
                })
            });
            Ok(full.collect())
        })
        .await
    }
}

/// Where somebody inside can write: its root, and what lies in memory. What is ours inside is not theirs to fill.
fn place(mount: &str) -> Option<(&str, bool)> {
    let (about, kind) = mount.split_once(" - ")?;
    let mut words = about.split(' ').skip(3);
    let (root, path, options) = (words.next()?, words.next()?, words.next()?);
    let in_memory = kind.split(' ').next()? == "tmpfs";
    let is_writable = options.split(',').any(|option| option == "rw");
    let is_theirs = path == "/" || (in_memory && root == "/");
    // Names with odd letters are written otherwise there.
    (is_theirs && is_writable && !path.contains('\\')).then_some((path, in_memory))
}

fn full(found: &StatVfs) -> bool {
    let has_files = found.f_files == 0 || found.f_favail > 0;
    let enough = (found.f_blocks / FULL_PART).min(FULL_BYTES / found.f_frsize.max(1));
    found.f_blocks > 0 && (found.f_bavail < enough.max(1) || !has_files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o3_the_root_and_what_is_in_memory_can_be_full_and_what_is_ours_cannot() {
        for (mount, expected) in [
            ("100 99 0:50 / / rw,relatime - overlay none rw,lowerdir=a", Some(("/", false))),
            ("105 100 0:52 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=64k", Some(("/dev/shm", true))),
            ("106 100 0:53 / /sys/firmware ro - tmpfs tmpfs ro", None),
            ("107 100 0:22 /data/run /.viv/run rw - ext4 /dev/vda rw", None),
            ("108 100 0:22 /data/run /.viv/run rw - tmpfs tmpfs rw", None),
            ("109 100 0:4 / /proc rw - proc proc rw", None),
            ("nonsense", None),
        ] {
            assert_eq!(place(mount), expected, "{mount}");
        }
    }
}
