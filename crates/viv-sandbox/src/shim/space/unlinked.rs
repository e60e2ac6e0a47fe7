//! Files that have no name any more and are held open or mapped: no walk finds them, and they take room all the same.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use crate::cgroup::InstanceCgroups;

/// Most descriptors and mappings of one sandbox that are looked at.
const LOOKED_AT_MAX: usize = 200_000;

/// What a sandbox's files are on, as seen from inside. Files without a name in memory are another matter.
const OVERLAY_MAGIC: i64 = 0x794c_7630;

/// What such files of a sandbox take, if they were changed since, as bytes and as their number.
pub(super) fn held_by(cgroups: &InstanceCgroups, changed_since_s: i64, until: Instant) -> (u64, u64) {
    let mut found = HashSet::new();
    let mut bytes = 0_u64;
    let mut looked_at = 0;
    let Some(top) = cgroups.v2() else { return (0, 0) };
    for pid in processes(&top) {
        for place in ["fd", "map_files"] {
            // Mappings are root's to look at; who may not sees descriptors.
            for entry in fs::read_dir(format!("/proc/{pid}/{place}")).into_iter().flatten().flatten() {
                looked_at += 1;
                if looked_at > LOOKED_AT_MAX || Instant::now() >= until {
                    return (bytes, found.len() as u64);
                }
                let path = entry.path();
                let Ok(file) = fs::metadata(&path) else { continue };
                if file.is_file()
                    && file.nlink() == 0
                    && file.ctime() >= changed_since_s
                    && is_on_overlay(&path).unwrap_or(false)
                    && found.insert((file.dev(), file.ino()))
                {
                    bytes = bytes.saturating_add(file.blocks().saturating_mul(512));
                }
            }
        }
    }
    (bytes, found.len() as u64)
}

fn is_on_overlay(path: &Path) -> io::Result<bool> {
    Ok(rustix::fs::statfs(path)?.f_type as i64 == OVERLAY_MAGIC)
}

/// Everybody in a cgroup and in those right below it, where the agent puts executions.
fn processes(cgroup: &Path) -> impl Iterator<Item = u32> {
    let below = fs::read_dir(cgroup).into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = below.filter(|path| path.is_dir()).chain([cgroup.to_owned()]);
    let lists = folders.filter_map(|folder| fs::read_to_string(folder.join("cgroup.procs")).ok());
    lists.flat_map(|list| list.lines().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
}
