//! Files have numbers of their own, whatever a sandbox is made of: programs that walk a tree tell folders apart by them.
#![allow(missing_docs, reason = "tests")]

#[path = "support/making.rs"]
mod making;
mod support;

use std::collections::BTreeMap;
use std::fs;

use making::{Tar, good, oci_image, on_both};
use support::Ground;
use support::disk::Disk;
use viv_image::BlobDir;
use viv_sandbox::DriverKind;

on_both!(l10_every_file_has_a_number_of_its_own, l10_numbers_stay_apart_when_chains_are_merged);

/// Folders and files in each layer of an image, and then in each layer that is saved.
const FOLDERS: usize = 12;

/// An image of three layers, of which each has folders of its own and adds to those of the others.
fn layered(ground: &Ground) -> String {
    let folder = tempfile::tempdir().unwrap();
    let layers: Vec<_> = (0..3)
        .map(|number| {
            let mut tar = if number == 0 { Tar::with_shell() } else { Tar::new() };
            tar.folder("all/");
            for index in 0..FOLDERS {
                tar.folder(&format!("own{number}-{index}/")).folder(&format!("own{number}-{index}/below/"));
                tar.file(&format!("own{number}-{index}/below/file"), "");
                tar.folder(&format!("all/{index}/")).file(&format!("all/{index}/of{number}"), "");
            }
            tar.bytes()
        })
        .collect();
    let image =
        oci_image(&BlobDir::open(&folder.path().join("blobs")).unwrap(), &layers, &[], Some("example/layered:1"));
    let archive = folder.path().join("image.tar");
    viv_image::write_archive(&image, &mut fs::File::create(&archive).unwrap()).unwrap();
    good(ground.image("import").arg(&archive))
}

/// New files and folders, files that are copied up, and hard links.
fn change(ground: &Ground, sandbox: &str, word: &str) {
    let script = format!(
        "set -e; mkdir -p /{word}; cd /{word}; n=0
         while [ $n -lt {FOLDERS} ]; do mkdir -p $n/a/b; echo x > $n/a/file; ln $n/a/file $n/a/b/link; n=$((n+1)); done
         echo {word} >> /own1-1/below/file; echo {word} >> /all/3/of2; mkdir /all/5/{word}; rm -rf /own2-2; mkdir /own2-2"
    );
    ground.sh(sandbox, &script);
}

/// What programs see that go by numbers, against a walk by names.
fn check(ground: &Ground, sandbox: &str, what: &str) {
    const LISTED: &str = "find / -path /proc -prune -o -path /sys -prune -o -path /dev -prune -o -path /.vivarium -prune -o -printf '%D:%i %n %y %p\\n'";
    const WALKED: &str =
        "walk() { for it in \"$1\"/* \"$1\"/.[!.]*; do case \"$it\" in /proc|/sys|/dev) continue;; esac
        if [ -e \"$it\" ] || [ -L \"$it\" ]; then echo \"$it\"; fi
        if [ -d \"$it\" ] && ! [ -L \"$it\" ]; then walk \"$it\"; fi; done; }; walk ''";
    let listed = ground.sh(sandbox, LISTED);
    let mut by_number: BTreeMap<&str, Vec<(&str, &str, &str)>> = BTreeMap::new();
    let mut names = Vec::new();
    for line in listed.lines() {
        let mut words = line.splitn(4, ' ');
        let mut word = || words.next().unwrap_or_else(|| panic!("{what}: {line:?}"));
        let (number, links, kind, path) = (word(), word(), word(), word());
        by_number.entry(number).or_default().push((links, kind, path));
        names.push(path);
    }
    for (number, files) in &by_number {
        let (links, kind, _) = files[0];
        let is_linked = kind != "d" && files.len() <= links.parse::<usize>().unwrap();
        assert!(files.len() == 1 || is_linked, "{what}: {number} is the number of {files:?}");
    }
    // What is ours is not to be looked into.
    let ours = |path: &&str| !path.starts_with("/.vivarium") && *path != "/";
    let walked = ground.sh(sandbox, WALKED);
    let (mut walked, mut found): (Vec<_>, Vec<_>) = (
        walked.lines().filter(ours).collect(),
        names.into_iter().filter(ours).filter(|path| !is_kernels(path)).collect(),
    );
    walked.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, walked, "{what}: find passes over something");
    // So do the others: each line of `ls -R` that names a folder, and what is copied and removed.
    let script = "set -e; mkdir /tmp/copy; cp -r /all /own* /tmp/copy/; rm -rf /tmp/seen; mkdir /tmp/seen
        find /all /own* | while read it; do test -e \"/tmp/copy$it\" || echo \"not copied: $it\"; done
        ls -R /all /own* | while read it; do case \"$it\" in */*:) echo \"${it%:}\";; esac; done > /tmp/seen/listed
        find /all /own* -type d | while read it; do echo \"$it\"; done > /tmp/seen/found
        rm -r /tmp/copy; test ! -e /tmp/copy; cat /tmp/seen/listed; echo --; cat /tmp/seen/found; rm -r /tmp/seen";
    let said = ground.sh(sandbox, script);
    assert!(!said.contains("not copied"), "{what}: {said}");
    let (listed, found) = said.split_once("\n--\n").unwrap();
    let (mut listed, mut found): (Vec<_>, Vec<_>) = (listed.lines().collect(), found.lines().collect());
    listed.sort_unstable();
    found.sort_unstable();
    assert!(listed.len() > 3 * FOLDERS, "{what}: {said}");
    assert_eq!(listed, found, "{what}: `ls -R` passes over something");
}

fn is_kernels(path: &str) -> bool {
    ["/proc", "/sys", "/dev"].iter().any(|folder| path.starts_with(folder))
}

fn l10_every_file_has_a_number_of_its_own(ground: Ground) {
    let image = layered(&ground);
    let first = ground.sandbox_of(&image);
    check(&ground, &first, "an image");
    change(&ground, &first, "one");
    check(&ground, &first, "image and changes");
    let live = good(ground.viv().args(["save", "--live", &first]));
    let fork = good(ground.viv().args(["fork", &first]));
    change(&ground, &fork, "two");
    check(&ground, &fork, "a fork");
    change(&ground, &first, "three");
    check(&ground, &first, "what was forked");
    good(ground.viv().args(["rollback", &first, &live]));
    change(&ground, &first, "four");
    check(&ground, &first, "rolled back");
    let saved = ground.save_and_remove(&first);
    // An image that came later has higher numbers than what was saved.
    let folder = tempfile::tempdir().unwrap();
    let mut later = Tar::new();
    (0..FOLDERS).for_each(|index| {
        later.file(&format!("later/{index}"), "");
    });
    ground.import(&later.write(&folder.path().join("later.tar")), "later");
    let restored = good(ground.viv().args(["restore", &saved]));
    change(&ground, &restored, "five");
    check(&ground, &restored, "restored");

    // To another store, and changed and saved there.
    let file = folder.path().join("file");
    good(ground.viv().args(["export", &saved]).arg(&file));
    let there = Ground::on(ground.provider.driver());
    let imported = good(there.viv().arg("import").arg(&file));
    let mut sandbox = good(there.viv().args(["restore", &imported]));
    let mut snapshots = vec![imported];
    for word in ["six", "seven"] {
        change(&there, &sandbox, word);
        check(&there, &sandbox, "imported");
        snapshots.push(there.save_and_remove(&sandbox));
        sandbox = good(there.viv().args(["restore", &snapshots[snapshots.len() - 1]]));
    }
    check(&there, &sandbox, "imported, changed and saved twice");
    good(there.viv().args(["rm", &sandbox]));
    good(there.viv().arg("drop").args(&snapshots));
    there.finish();
    good(ground.viv().args(["rm", &fork, &restored]));
    good(ground.viv().args(["drop", &live, &saved]));
    good(ground.image("rm").args([&image, "later"]));
    ground.finish();
}

fn l10_numbers_stay_apart_when_chains_are_merged(ground: Ground) {
    let image = layered(&ground);
    let mut sandbox = ground.sandbox_of(&image);
    let mut snapshots = Vec::new();
    for number in 0..9 {
        change(&ground, &sandbox, &format!("round{number}"));
        snapshots.push(ground.save_and_remove(&sandbox));
        sandbox = good(ground.viv().args(["restore", &snapshots[snapshots.len() - 1]]));
    }
    good(&mut ground.image("gc"));
    good(ground.viv().args(["rm", &sandbox]));
    let last = &snapshots[snapshots.len() - 1];
    let record = fs::read_to_string(ground.data.join("snapshots").join(format!("{last}.json"))).unwrap();
    let merged = record.contains("\"merged-");
    assert_eq!(merged, ground.provider.driver() == DriverKind::Plain, "on btrfs chains do not grow: {record}");
    let sandbox = good(ground.viv().args(["restore", last]));
    change(&ground, &sandbox, "after");
    check(&ground, &sandbox, "merged");
    good(ground.viv().args(["rm", &sandbox]));
    good(ground.viv().arg("drop").args(&snapshots));
    good(ground.image("rm").arg(&image));
    ground.finish();
}

/// Folders of the machine that are on the filesystem of the layers: their numbers are nobody's to choose.
#[test]
fn l10_folders_are_told_apart_above_another_subvolume_of_the_same_btrfs() {
    let disk = Disk::make(&["mkfs.btrfs", "-q"], "loop", 512).unwrap();
    let base = disk.path().join("base");
    let made = std::process::Command::new("btrfs").args(["subvolume", "create"]).arg(&base).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let tar = tempfile::tempdir().unwrap();
    let mut image = Tar::with_shell();
    image.folder("all/");
    for index in 0..FOLDERS {
        for number in 0..3 {
            image.folder(&format!("own{number}-{index}/")).folder(&format!("own{number}-{index}/below/"));
            image.file(&format!("own{number}-{index}/below/file"), "");
        }
        image.folder(&format!("all/{index}/")).file(&format!("all/{index}/of2"), "");
    }
    let tar = image.write(&tar.path().join("base.tar"));
    let unpacked = std::process::Command::new("tar").arg("-C").arg(&base).arg("-xf").arg(&tar).status().unwrap();
    assert!(unpacked.success());
    let ground = Ground::at(&disk.path(), |_| {});
    let sandbox = ground.sandbox_of(base.to_str().unwrap());
    change(&ground, &sandbox, "one");
    check(&ground, &sandbox, "a folder beside");
    let saved = ground.save_and_remove(&sandbox);
    let sandbox = good(ground.viv().args(["restore", &saved]));
    change(&ground, &sandbox, "two");
    check(&ground, &sandbox, "a folder beside, restored");
    good(ground.viv().args(["rm", &sandbox]));
    good(ground.viv().args(["drop", &saved]));
    ground.finish();
}
