//! Images and snapshots on their way: registries, files for other machines, OCI images.
#![allow(missing_docs, reason = "tests")]

#[path = "support/making.rs"]
mod making;
#[path = "support/registry.rs"]
mod registry;
mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use making::{Tar, files_below, good, oci_image, on_both, refused, said};
use registry::{Way, noise};
use rustix::process::Signal;
use support::{Ground, eventually, kill};
use viv_image::{BlobDir, Options, Registry};
use viv_layer::corpus::{Size, corpus};
use viv_sandbox::DriverKind;

on_both!(
    l13_a_layer_that_was_corrupted_in_the_registry_is_refused,
    l13_a_broken_download_goes_on_where_it_was,
    l13_a_snapshot_becomes_an_oci_image_and_runs,
);

fn tiny(folder: &Path) -> PathBuf {
    let mut tar = Tar::with_shell();
    tar.file("marker", "here\n").file("a/gone", "").file_of(1000, "of-user", "x");
    tar.write(&folder.join("tiny.tar"))
}

#[test]
fn l13_images_and_snapshots_are_pushed_and_pulled_elsewhere() {
    let (registry, folder) = (registry::start(), tempfile::tempdir().unwrap());
    let way = Way::to(&registry);
    let (here, there) = (Ground::new(), Ground::on_btrfs());
    here.import(&tiny(folder.path()), "tiny");
    let sandbox = here.sandbox_of("tiny");
    here.sh(&sandbox, "echo saved > /marker; rm /a/gone; mkdir /b; echo b > /b/b; mv /of-user /b/");
    let snapshot = here.save_and_remove(&sandbox);

    let told = said(here.image("push").args(["tiny", &way.name("tiny:1")]));
    assert!(told.out.starts_with("sha256:") && told.err.contains("  done  "), "{told:?}");
    let digest = told.out;
    // The layer below is there already.
    let told = said(here.image("push").args([&snapshot, &way.name("saved:1")]));
    assert_eq!(told.code, Some(0), "{told:?}");

    let told = said(there.image("pull").args([&way.name("tiny:1"), "--name", "other"]));
    assert_eq!(told.out, "other", "{told:?}");
    assert!(told.err.contains("  done  ") && told.err.contains("layer 1 of 1  unpacking"), "{told:?}");
    let pulled = good(there.image("pull").arg(way.name("saved:1")));
    assert_eq!(pulled, way.name("saved:1"), "it is called as in the registry");
    assert_eq!(there.layers().len(), 2, "the layer of the image is fetched once");
    let look = "cat /marker; ls /a /b; stat -c '%u:%g' /b/*";
    assert_eq!(there.sh_in("other", "cat /marker; ls /a"), "here\ngone");
    assert_eq!(there.sh_in(&pulled, look), "saved\n/a:\n\n/b:\nb\nof-user\n0:0\n1000:1000");

    way.reset();
    let told = said(there.image("pull").args([&way.name(&format!("tiny@{digest}")), "--name", "again"]));
    assert_eq!((told.code, told.out.as_str()), (Some(0), "again"), "{told:?}");
    assert!(told.err.contains("layer 1 of 1  there already"), "{told:?}");
    assert!(way.down() < 8 << 10, "{} bytes were fetched again", way.down());
    assert!(!way.asked().contains("get /v2/tiny/blobs/") || way.asked().matches("get /v2/tiny/blobs/").count() == 1);

    for (ground, names) in [(&here, vec!["tiny"]), (&there, vec!["other", "again", &pulled])] {
        ground.assert_clean();
        good(ground.image("rm").arg("--force").args(names));
    }
    let missing = refused(there.image("pull").arg(way.name("nope:1")));
    assert!(missing.contains("nope"), "{missing}");
    good(here.viv().args(["drop", &snapshot]));
    here.finish();
    there.finish();
}

/// The file of the largest blob in a registry: the layer.
fn largest(registry: &registry::DockerRegistry) -> PathBuf {
    let blobs = registry.folder.path().join("storage/docker/registry/v2/blobs");
    files_below(&blobs).into_iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap()
}

fn push(image: &viv_image::OutgoingImage, to: &str) {
    let client = Registry::new(Options::default()).unwrap();
    client.push(&to.parse().unwrap(), image, &|_| std::ops::ControlFlow::Continue(())).unwrap();
}

fn l13_a_layer_that_was_corrupted_in_the_registry_is_refused(ground: Ground) {
    let (registry, folder) = (registry::start(), tempfile::tempdir().unwrap());
    let name = format!("{}/image:1", registry.host());
    let blobs = BlobDir::open(folder.path()).unwrap();
    let mut layer = Tar::with_shell();
    layer.file("marker", "here\n");
    push(&oci_image(&blobs, &[layer.bytes()], &[], None), &name);
    let blob = fs::File::options().read(true).write(true).open(largest(&registry)).unwrap();
    let flip = || {
        let mut byte = [0];
        blob.read_exact_at(&mut byte, 100_000).unwrap();
        blob.write_all_at(&[byte[0] ^ 1], 100_000).unwrap();
    };
    flip();
    let error = refused(ground.image("pull").args([&name, "--name", "image"]));
    assert!(error.contains("sha256:"), "{error}");
    assert_eq!(good(&mut ground.image("ls")), "");
    assert!(ground.layers().is_empty());
    assert_eq!(files_below(&ground.data.join("downloads")), Vec::<PathBuf>::new());
    ground.assert_clean();
    // Put right, it is pulled: nothing of the wrong one was kept.
    flip();
    good(ground.image("pull").args([&name, "--name", "image"]));
    assert_eq!(ground.sh_in("image", "cat /marker"), "here");
    good(ground.image("rm").arg("image"));
    ground.finish();
}

fn l13_a_broken_download_goes_on_where_it_was(ground: Ground) {
    const LARGE: usize = 24 << 20;
    const HALF: u64 = (LARGE / 2) as u64;
    let (registry, folder) = (registry::start(), tempfile::tempdir().unwrap());
    let way = Way::to(&registry);
    let blobs = BlobDir::open(folder.path()).unwrap();
    let mut layer = Tar::with_shell();
    layer.file("large", noise(1, LARGE));
    push(&oci_image(&blobs, &[layer.bytes()], &[], None), &format!("{}/large:1", registry.host()));

    way.stop_at(HALF);
    let mut pull = ground.image("pull").arg(way.name("large:1")).stdout(Stdio::null()).spawn().unwrap();
    eventually("half of it has come", || way.down() >= HALF);
    let part = || files_below(&ground.data.join("downloads")).into_iter().next();
    eventually("it is on disk", || part().is_some_and(|part| fs::metadata(part).unwrap().len() > HALF / 2));
    kill(pull.id(), Signal::KILL);
    pull.wait().unwrap();
    let kept = fs::metadata(part().unwrap()).unwrap().len();
    assert_eq!(good(&mut ground.image("ls")), "");
    let (code, found) = ground.checked(true);
    assert_eq!((code, &found["damage"]), (Some(0), &serde_json::json!([])), "{found}");

    way.stop_at(u64::MAX);
    // What the first one had asked for is on its way still.
    std::thread::sleep(std::time::Duration::from_millis(200));
    way.reset();
    let told = said(ground.image("pull").args([&way.name("large:1"), "--name", "large"]));
    assert_eq!((told.code, told.out.as_str()), (Some(0), "large"), "{told:?}");
    assert!(told.err.contains("  done  "), "progress is told: {told:?}");
    assert!(way.asked().contains(&format!("range: bytes={kept}-")), "{}", way.asked());
    let whole = fs::metadata(largest(&registry)).unwrap().len();
    assert!(way.down() < whole - kept + (64 << 10), "{} bytes came, {kept} of {whole} were there", way.down());
    assert_eq!(ground.sh_in("large", "stat -c %s /large"), LARGE.to_string());
    good(ground.image("rm").arg("large"));
    ground.finish();
}

/// What a layer holds, for comparison: everything that can be seen of it, and all contents.
fn lines(layer: &Path) -> Vec<String> {
    viv_layer::lines(&layer.join("parts")).unwrap()
}

/// An image with a layer of difficult files, as an archive.
fn difficult(folder: &Path) -> PathBuf {
    let tree = folder.join("tree");
    fs::create_dir(&tree).unwrap();
    corpus(&tree, 7, Size::Small).unwrap();
    let blobs = BlobDir::open(&folder.join("blobs")).unwrap();
    let mut packer = viv_layer::Packer::new(Vec::new(), viv_layer::Form::Oci);
    packer.tree("corpus", &tree).unwrap();
    let mut shell = Tar::with_shell();
    shell.file("own/gone", "x").file("own/folder/old", "x").file("own/again/old", "x").file("own/appended", "first\n");
    shell.file_of(1000, "own/of-user", "x").file("own/moved", "x");
    let layers = [shell.bytes(), packer.finish().unwrap()];
    let archive = folder.join("difficult.tar");
    let image = oci_image(&blobs, &layers, &[("WORD", "of the image")], Some("example/difficult:1"));
    viv_image::write_archive(&image, &mut fs::File::create(&archive).unwrap()).unwrap();
    archive
}

/// Things that only a sandbox makes: whiteouts, opaque folders, links and holes in its own layer.
const CHANGES: &str = "set -e; cd /own; rm gone; rm -r folder; rm -r again; mkdir again; echo new > again/new; mv moved to
echo second >> appended; ln appended hard; ln hard /tmp/hard; ln -s /nowhere soft; rm of-user
for n in 1 2 3; do printf $n > \"$(printf 'odd \\377\\n%s' $n)\"; done; printf x > -rf; mkdir -p deep/er/and/deeper; chmod 3777 deep
touch -d '1969-12-31 23:59:58.123456789 UTC' /tmp/old; head -c 300000 /dev/urandom > /tmp/noise";

fn export_and_import(from: DriverKind, to: DriverKind) {
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (Ground::on(from), Ground::on(to));
    let image = good(here.image("import").arg(difficult(folder.path())));
    let sandbox = here.sandbox_of(&image);
    here.sh(&sandbox, CHANGES);
    let first = here.save_and_remove(&sandbox);
    let again = good(here.viv().args(["restore", &first]));
    here.sh(&again, "echo second > /second; rm /own/hard");
    let second = here.save_and_remove(&again);

    let file = folder.path().join("file");
    let told = said(here.viv().args(["export", &second]).arg(&file));
    assert_eq!(told.code, Some(0), "{told:?}");
    let imported = good(there.viv().arg("import").arg(&file));
    assert_ne!(imported, second, "it has an id of its own here");

    // The same layers, to the last byte, in the same order.
    let of = |ground: &Ground, snapshot: &str| -> Vec<PathBuf> {
        let path = ground.data.join("snapshots").join(format!("{snapshot}.json"));
        let record: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let layers = |kind: &str| record["kept"]["of"][kind].as_array().unwrap().clone();
        let names = layers("saved").into_iter().chain(layers("image"));
        names.map(|name| ground.data.join("layers/sealed").join(name.as_str().unwrap())).collect()
    };
    let (mine, theirs) = (of(&here, &second), of(&there, &imported));
    assert_eq!(mine.len(), theirs.len());
    for (mine, theirs) in mine.iter().zip(&theirs) {
        assert_eq!(lines(mine), lines(theirs), "{} and {}", mine.display(), theirs.display());
        let content = |layer: &Path| viv_layer::content(&layer.join("parts")).unwrap();
        assert_eq!(content(mine), content(theirs), "{} and {}", mine.display(), theirs.display());
    }
    let look = "ls -R / 2>/dev/null --ignore=proc --ignore=sys --ignore=dev | head -c 200000; cat /second /own/appended
                cd /corpus; stat -c '%F %u:%g %a %Y %n' many/* many/1/* links/* links/*/* attributes/* nodes/* marks/*
                stat -c '%s %h %n' many/1/* links/a/* links/b/* sparse/* /tmp/* /own/appended
                stat -c '%F %u:%g %a %y %n' /own/* /own/*/* /tmp/*; ls /own/hard 2>/dev/null; echo $WORD";
    let (mine, theirs) = (here.sh_restored(&second, look), there.sh_restored(&imported, look));
    assert!(mine.lines().count() > 500 && mine.ends_with("\nof the image"), "{mine}");
    for (mine, theirs) in mine.lines().zip(theirs.lines()) {
        assert_eq!(mine, theirs);
    }
    assert_eq!(mine.lines().count(), theirs.lines().count());

    // Again is the same layers, under one more id.
    let count = there.layers().len();
    let twice = good(there.viv().arg("import").arg(&file));
    assert_eq!(there.layers().len(), count);
    let listed = good(there.viv().arg("snapshots"));
    assert!(listed.contains(&imported) && listed.contains(&twice) && !listed.contains("DAMAGED"), "{listed}");
    there.assert_clean();
    good(there.viv().args(["drop", &imported, &twice]));
    good(here.viv().args(["drop", &first, &second]));
    good(here.image("rm").arg(&image));
    here.finish();
    there.finish();
}

#[test]
fn l13_a_snapshot_goes_from_plain_to_btrfs() {
    export_and_import(DriverKind::Plain, DriverKind::Btrfs);
}

#[test]
fn l13_a_snapshot_goes_from_btrfs_to_plain() {
    export_and_import(DriverKind::Btrfs, DriverKind::Plain);
}

/// Of the host's userland only the changes travel.
#[test]
fn l13_a_snapshot_of_the_host_image_carries_its_changes_only() {
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (Ground::new(), Ground::on_btrfs());
    let sandbox = here.sandbox_of("host");
    here.sh(&sandbox, "echo mine > /usr/bin/mine; rm /usr/bin/env; echo x > /workspace/x; setfattr -n user.a -v b /workspace/x || true");
    let snapshot = here.save_and_remove(&sandbox);
    let file = folder.path().join("file");
    good(here.viv().args(["export", &snapshot]).arg(&file));
    assert!(fs::metadata(&file).unwrap().len() < 64 << 10, "the userland went along");
    let imported = good(there.viv().arg("import").arg(&file));
    assert_eq!(
        there.sh_restored(&imported, "cat /usr/bin/mine /workspace/x; ls /usr/bin/env || ls /usr/bin/cat"),
        "mine\nx\n/usr/bin/cat"
    );
    good(here.viv().args(["drop", &snapshot]));
    good(there.viv().args(["drop", &imported]));
    here.finish();
    there.finish();
}

fn l13_a_snapshot_becomes_an_oci_image_and_runs(ground: Ground) {
    let folder = tempfile::tempdir().unwrap();
    let mut tar = Tar::with_shell();
    tar.file("marker", "here\n").file("a/gone", "").file("b/old", "");
    let image = oci_image(
        &BlobDir::open(&folder.path().join("blobs")).unwrap(),
        &[tar.bytes()],
        &[("WORD", "kept")],
        Some("example/base:1"),
    );
    let archive = folder.path().join("base.tar");
    viv_image::write_archive(&image, &mut fs::File::create(&archive).unwrap()).unwrap();
    good(ground.image("import").arg(&archive));
    let sandbox = ground.sandbox_of("example/base:1");
    ground.sh(&sandbox, "rm /a/gone; rm -r /b; mkdir /b; echo n > /b/new; ln /b/new /b/too; printf x > \"$(printf '/odd \\377\\nname')\"");
    let snapshot = ground.save_and_remove(&sandbox);

    let (file, layout) = (folder.path().join("out.tar"), folder.path().join("layout"));
    let digest = good(ground.image("export").arg(&snapshot).arg(&file).args(["--name", "example/out:2"]));
    assert_eq!(good(ground.image("export").arg(&snapshot).arg(&layout).arg("--layout")), digest);
    assert_eq!(good(ground.image("import").arg(&file)), "example/out:2");
    ground.import(&layout, "layout");
    let look = "cat /marker; ls /a /b; stat -c %h /b/new; echo $WORD; ls / | head -n 100";
    let as_image = ground.sh_in("example/out:2", look);
    assert_eq!(as_image, ground.sh_in("layout", look));
    assert!(as_image.starts_with("here\n/a:\n\n/b:\nnew\ntoo\n2\nkept\n"), "{as_image}");
    assert!(as_image.contains("odd "), "{as_image}");
    // What is in a sandbox because it is one is in no image.
    assert!(!files_below(&layout).is_empty());
    let inspected = good(ground.image("inspect").arg("example/out:2"));
    assert!(inspected.contains(&digest) && inspected.contains("\"WORD\": \"kept\""), "{inspected}");
    good(ground.image("rm").args(["--force", "example/base:1", "example/out:2", "layout"]));
    good(ground.viv().args(["drop", &snapshot]));
    ground.finish();
}
