//! The mounts of a container that CRIU neither saves nor makes: they are bound from outside.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viv_agent::proto::{AGENT, BOOT_ID, HOME, RUN_DIR};

use crate::bundle::Staged;
use crate::layout::InstanceRecord;
use crate::rootfs::ROOT;

/// Where the agent covers the machine's own boot id.
const KERNELS_BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What is made in the container by its runtime, and so by CRIU again.
const OWN: [&str; 5] = ["proc", "tmpfs", "devpts", "mqueue", "sysfs"];

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct External {
    /// Where it is inside. CRIU calls it so too.
    pub(crate) at: String,
    source: Source,
}

/// What is bound there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Source {
    Home,
    Run,
    BootId,
    Agent,
    /// An overlay beside the root.
    Part,
    /// A device of the machine, by its name there.
    Device(String),
}

impl External {
    /// How CRIU is told of it when it saves.
    pub(crate) fn to_save(&self) -> String {
        format!("mnt[{0}]:{0}", self.at)
    }

    /// How CRIU is told of it when it restores.
    pub(crate) fn to_restore(&self, staged: &Staged<'_>) -> Option<String> {
        let source = match &self.source {
            Source::Home => staged.root.home.clone(),
            Source::Run => staged.run.to_owned(),
            Source::BootId => staged.run.join(BOOT_ID),
            Source::Agent => staged.agent.to_owned(),
            Source::Part => staged.root.binds.iter().find(|(at, _)| at == Path::new(&self.at))?.1.clone(),
            Source::Device(name) => PathBuf::from(format!("/dev/{name}")),
        };
        Some(format!("mnt[{}]:{}", self.at, source.display()))
    }
}

/// The overlays beside the root of an instance.
pub(crate) fn parts_of(record: &InstanceRecord) -> Vec<&Path> {
    let plan = record.made.as_ref().map(|made| &made.plan);
    let parts = plan.into_iter().flat_map(|plan| &plan.parts).filter(|part| part.name != ROOT);
    parts.map(|part| part.at.as_path()).collect()
}

/// Finds them in a `mountinfo`; `parts` are the overlays beside the root. One that is none of ours is named: nobody
/// inside can mount anything, so it is something that was not thought of.
pub(crate) fn external(mountinfo: &str, parts: &[&Path]) -> Result<Vec<External>, String> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let fields = line.split_once(" - ").and_then(|(before, after)| {
            let mut before = before.split(' ').skip(3);
            Some((before.next()?, before.next()?, after.split(' ').next()?))
        });
        let Some((root, at, kind)) = fields else { return Err(format!("mountinfo has another form: {line}")) };
        let source = match at {
            "/" => continue,
            HOME => Source::Home,
            RUN_DIR => Source::Run,
            AGENT => Source::Agent,
            KERNELS_BOOT_ID => Source::BootId,
            at if parts.contains(&Path::new(at)) => Source::Part,
            // A device is a file in a filesystem that is the machine's.
            _ if matches!(kind, "devtmpfs" | "tmpfs") && root != "/" => {
                Source::Device(root.trim_start_matches('/').to_owned())
            }
            _ if OWN.contains(&kind) => continue,
            at => return Err(format!("{at} is a mount ({kind}) that cannot be kept")),
        };
        found.push(External { at: at.to_owned(), source });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_from_outside_are_told_from_the_containers_own() {
        let info = "102 75 0:40 / / rw,nodev - overlay none rw,lowerdir+=/\n\
            103 102 0:42 / /usr rw - overlay none rw\n\
            104 102 0:46 / /proc rw - proc proc rw\n\
            76 104 0:46 /bus /proc/bus ro - proc proc rw\n\
            105 102 0:47 / /dev rw - tmpfs tmpfs rw\n\
            114 105 0:6 /null /dev/null rw - devtmpfs devtmpfs rw\n\
            82 104 0:6 /null /proc/mtrr rw master:3 - devtmpfs devtmpfs rw\n\
            81 104 0:52 / /proc/acpi ro - tmpfs tmpfs ro\n\
            111 102 0:40 /.vivarium /.vivarium ro - overlay none rw\n\
            112 111 0:30 /viv/instances/x/run /.vivarium/run rw - tmpfs tmpfs rw\n\
            113 111 254:0 /viv/agent/a /.vivarium/agent ro - ext4 /dev/vda rw\n\
            73 80 254:0 /x/run/boot_id /proc/sys/kernel/random/boot_id ro - ext4 /dev/vda rw\n";
        let found = external(info, &[Path::new("/usr")]).unwrap();
        let at: Vec<_> = found.iter().map(|external| external.at.as_str()).collect();
        let expected = ["/usr", "/dev/null", "/proc/mtrr", HOME, RUN_DIR, AGENT, "/proc/sys/kernel/random/boot_id"];
        assert_eq!(at, expected);
        assert_eq!(found[2].source, Source::Device("null".to_owned()));
        assert_eq!(found[1].to_save(), "mnt[/dev/null]:/dev/null");
        let why = external("9 1 254:0 /x /mnt/x rw - ext4 /dev/vda rw\n", &[]).unwrap_err();
        assert!(why.contains("/mnt/x"), "{why}");
    }
}
