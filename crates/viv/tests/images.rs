//! What sandboxes are made of: the machine's own userland, root filesystems, OCI images; and what keeps them.
#![allow(missing_docs, reason = "tests")]

#[path = "support/making.rs"]
mod making;
mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use making::{Tar, docker_archive, good, gzip, oci_image, on_both, refused, said};
use serde_json::{Value, json};
use support::{Ground, Sandbox, fresh_bytes, mutation, sh};
use viv_core::exec::{ExecSpec, ExecState, ExecStatus};
use viv_core::{SandboxId, SnapshotId};
use viv_image::BlobDir;
use viv_provider::{InstanceSpec, Provider, SaveRequest};
use viv_sandbox::{IdPool, IdRange, LocalConfig, LocalProvider};

on_both!(
    s4_the_host_image_has_tools_and_no_secrets,
    l20_what_is_installed_in_the_host_image_stays_there,
    l13_owners_are_those_inside_under_any_mapping,
    l13_a_root_filesystem_is_an_image_and_kept_while_in_use,
    l13_layers_of_oci_images_are_merged_and_shared,
    doctor_says_what_the_driver_can_do,
);

/// Runs a script to a good end, and answers what it said.
fn script(ground: &Ground, sandbox: &str, text: &str) -> String {
    ground.sh(sandbox, &format!("set -eu\n{text}"))
}

/// Where this machine has a program that a sandbox should have too.
fn on_host(program: &str) -> Option<String> {
    ["/usr/local/bin", "/usr/bin", "/bin"]
        .iter()
        .map(|folder| format!("{folder}/{program}"))
        .find(|path| Path::new(path).exists())
}

fn s4_the_host_image_has_tools_and_no_secrets(ground: Ground) {
    let sandbox = ground.sandbox_of("host");
    // Whatever of these this machine has, and some of it every machine has.
    let mut secrets: Vec<String> = [
        "/etc/shadow",
        "/etc/gshadow",
        "/etc/ssh",
        "/etc/ssl/private",
        "/etc/hostname",
        "/etc/fstab",
        "/etc/sudoers",
        "/var/lib/dpkg",
        "/var/log",
        "/var/cache",
        "/boot",
        "/opt",
        "/srv",
    ]
    .map(str::to_owned)
    .into();
    secrets.push(ground.data.to_string_lossy().into_owned());
    secrets.push(std::env::current_dir().unwrap().to_string_lossy().into_owned());
    for folder in ["/root", "/home"] {
        let found = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path().to_string_lossy().into_owned());
        secrets.extend(found.filter(|path| path != "/home/user"));
    }
    let here: Vec<_> = secrets.iter().filter(|path| Path::new(path).exists()).collect();
    assert!(here.len() > 5, "this machine has too few secrets to tell anything: {here:?}");
    let tests: String = here.iter().map(|path| format!("if [ -e '{path}' ]; then echo '{path}'; fi\n")).collect();
    assert_eq!(ground.sh(&sandbox, &tests), "", "these are the host's");
    let seen = script(&ground, &sandbox, "ls -A /root; echo home; ls -A /home; echo var; ls -A /var /var/lib /var/tmp");
    assert_eq!(seen, "home\nuser\nvar\n/var:\nlib\ntmp\n\n/var/lib:\n\n/var/tmp:");
    let (inside, outside) = (script(&ground, &sandbox, "cat /etc/hosts"), fs::read_to_string("/etc/hosts").unwrap());
    for name in outside.lines().filter(|line| !line.starts_with('#')).flat_map(|line| line.split_whitespace().skip(1)) {
        let known = name.contains("localhost") || name.starts_with("ip6-");
        assert!(known || !inside.contains(name), "the name {name} is the host's: {inside}");
    }
    let users = script(&ground, &sandbox, "cat /etc/passwd");
    assert_eq!(users.lines().count(), 3, "{users}");

    for program in ["git", "python3", "perl", "node", "gcc"] {
        if let Some(path) = on_host(program) {
            let said = script(&ground, &sandbox, &format!("{path} --version 2>&1 | head -n 2"));
            assert!(said.chars().any(|char| char.is_ascii_digit()), "{program}: {said}");
        }
    }
    if on_host("cc").is_some() {
        let source = "printf '#include <stdio.h>\\nint main(void) { puts(\"compiled\"); }\\n' > /tmp/a.c";
        assert_eq!(script(&ground, &sandbox, &format!("{source}; cc -o /tmp/a /tmp/a.c; /tmp/a")), "compiled");
    }
    if on_host("git").is_some() {
        let commit = "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first";
        let said = script(&ground, &sandbox, &format!("cd /tmp; git init -q r; cd r; {commit}; git log --format=%s"));
        assert_eq!(said.lines().last(), Some("first"));
    }
    good(ground.viv().args(["rm", &sandbox]));
    ground.finish();
}

const WHEEL: &str = r#"
import zipfile
with zipfile.ZipFile("/tmp/tiny-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("tiny.py", "WORD = 'installed'\n")
    info = "tiny-1.0.dist-info/"
    wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(info + "RECORD", "tiny.py,,\n" + info + "METADATA,,\n" + info + "WHEEL,,\n" + info + "RECORD,,\n")
"#;

const PACKAGE: &str = "mkdir -p /tmp/deb/DEBIAN /tmp/deb/usr/bin /tmp/deb/etc
printf 'Package: tiny\\nVersion: 1\\nArchitecture: all\\nMaintainer: a <a@b>\\nDescription: t\\n' > /tmp/deb/DEBIAN/control
printf '#!/bin/sh\\necho packaged\\n' > /tmp/deb/usr/bin/viv-test-tiny
chmod 755 /tmp/deb/usr/bin/viv-test-tiny
echo set > /tmp/deb/etc/viv-test-tiny.conf
dpkg-deb --build /tmp/deb /tmp/tiny.deb > /dev/null
dpkg-deb -x /tmp/tiny.deb /
viv-test-tiny; cat /etc/viv-test-tiny.conf";

fn l20_what_is_installed_in_the_host_image_stays_there(ground: Ground) {
    let before = fs::metadata("/usr/bin/env").unwrap();
    let sandbox = ground.sandbox_of("host");
    let replace = "echo '#!/bin/sh' > /usr/bin/viv-test-new; chmod 755 /usr/bin/viv-test-new; viv-test-new
                   cp /bin/sh /tmp/sh; mv /tmp/sh /usr/bin/env; env -c 'echo replaced'
                   mv /etc/alternatives /etc/moved; test ! -e /etc/alternatives; mv /etc/moved /etc/alternatives
                   mkdir -p /opt/tool /srv; echo x > /opt/tool/x; echo 1.2.3.4 name >> /etc/hosts";
    assert_eq!(script(&ground, &sandbox, replace), "replaced");
    if on_host("python3").is_some() {
        script(&ground, &sandbox, &format!("/usr/bin/python3 - <<'END'{WHEEL}END"));
        let said = script(
            &ground,
            &sandbox,
            "/usr/bin/python3 -m venv --without-pip /tmp/venv; /tmp/venv/bin/python -c 'import sys; print(sys.prefix)'",
        );
        assert_eq!(said, "/tmp/venv");
        let has_pip = said_ok(&ground, &sandbox, "/usr/bin/python3 -m pip --version");
        if has_pip {
            let install = "/usr/bin/python3 -m pip install -q --no-index --break-system-packages \
                           --root-user-action=ignore /tmp/tiny-1.0-py3-none-any.whl
                           cd /; /usr/bin/python3 -c 'import tiny; print(tiny.WORD, tiny.__file__)'";
            let said = script(&ground, &sandbox, install);
            assert!(said.contains("installed /usr/"), "{said}");
        }
    }
    if on_host("dpkg-deb").is_some() {
        assert_eq!(script(&ground, &sandbox, PACKAGE), "packaged\nset");
    }
    // It is still there after a save and a restore, and nothing of it ever is on the host.
    let snapshot = ground.save_and_remove(&sandbox);
    let said = ground.sh_restored(&snapshot, "viv-test-new && env -c 'echo replaced' && cat /opt/tool/x");
    assert_eq!(said, "replaced\nx");
    for path in ["/usr/bin/viv-test-new", "/usr/bin/viv-test-tiny", "/etc/viv-test-tiny.conf", "/etc/moved"] {
        assert!(!Path::new(path).exists(), "{path} is on the host");
    }
    assert!(!fs::read_to_string("/etc/hosts").unwrap().contains("1.2.3.4 name"));
    let after = fs::metadata("/usr/bin/env").unwrap();
    assert_eq!((before.ino(), before.len(), before.mtime()), (after.ino(), after.len(), after.mtime()));
    good(ground.viv().args(["drop", &snapshot]));
    ground.finish();
}

fn said_ok(ground: &Ground, sandbox: &str, text: &str) -> bool {
    said(ground.viv().args(["exec", sandbox, "--", "/bin/sh", "-c", text])).code == Some(0)
}

/// Owner of something in a sandbox, as the host sees it through the sandbox's mounts.
fn owner_in(agent_pid: u32, path: &str) -> u32 {
    fs::symlink_metadata(format!("/proc/{agent_pid}/root{path}")).unwrap().uid()
}

async fn as_user(sandbox: &Sandbox<'_>, script: &str) -> (String, ExecStatus) {
    let execution = sandbox.start_spec(&ExecSpec { user: Some("user".to_owned()), ..sh(script) }).await;
    sandbox.output(&execution).await
}

/// The host's id of root inside.
fn first_id(pid: u32) -> u32 {
    let mapping = fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap();
    mapping.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

fn l13_owners_are_those_inside_under_any_mapping(ground: Ground) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        // Root inside has no capabilities, so what is a user's is made by the user.
        let make = "touch /of-root /usr/bin/of-root && chmod 4755 /of-root";
        assert_eq!(sandbox.run(make).await.1.state, ExecState::Exited { code: 0 });
        let make = "cd /home/user && mkdir own && touch of-user && ln -s x link";
        assert_eq!(as_user(&sandbox, make).await.1.state, ExecState::Exited { code: 0 });
        let base = first_id(sandbox.agent_pid());
        let owners =
            [("/of-root", 0), ("/usr/bin/of-root", 0), ("/home/user/of-user", 1000), ("/home/user/link", 1000)];
        for (path, owner) in owners {
            assert_eq!(owner_in(sandbox.agent_pid(), path), base + owner, "{path} through the mount");
        }
        let parts = ground.data.join("layers/active").join(format!("{}.1/parts", sandbox.id));
        for (path, owner) in owners {
            let on_disk = path.strip_prefix("/usr/").map_or(format!("root{path}"), |path| format!("usr/{path}"));
            assert_eq!(fs::symlink_metadata(parts.join(on_disk)).unwrap().uid(), owner, "{path} on disk");
        }
        let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: false, memory: false };
        ground.provider.save(&mutation(1, 1), &sandbox.id, &request).await.unwrap();
        sandbox.destroy().await;

        // The same folder under other ids, as after somebody has changed the configuration.
        let mut config = LocalConfig::new(ground.data.clone(), support::VIV.into());
        config.cgroup_prefix.clone_from(&ground.cgroup_prefix);
        config.ids = IdPool::Shared(IdRange { base: base ^ (5 << 16), count: IdRange::COUNT });
        let other = LocalProvider::open(config).unwrap();
        let restored = Sandbox { ground: &ground, id: SandboxId::from_bytes(fresh_bytes()) };
        let spec = InstanceSpec::host(600_000);
        other.restore(&mutation(1, 1), &restored.id, &ground.owner, &spec, &request.snapshot).await.unwrap();
        for (path, owner) in owners {
            assert_eq!(owner_in(restored.agent_pid(), path), (base ^ (5 << 16)) + owner, "{path} under other ids");
        }
        let look = "stat -c '%u:%g %a %n' /of-root /usr/bin/of-root /home/user/*
                    echo more >> /of-root && echo more >> /usr/bin/of-root && rm /usr/bin/of-root && echo written";
        let said = restored.run(look).await.0;
        let expected = "0:0 4755 /of-root\n0:0 644 /usr/bin/of-root\n1000:1000 777 /home/user/link\n\
                        1000:1000 644 /home/user/of-user\n1000:1000 755 /home/user/own\nwritten\n";
        assert_eq!(said, expected);
        let write = "cd /home/user && echo a >> of-user && touch own/x && rm link && echo fine";
        assert_eq!(as_user(&restored, write).await.0, "fine\n");
        restored.destroy().await;
        let source = SandboxId::clone(&sandbox.id);
        ground.provider.remove_snapshot(&mutation(2, 1), &source, &request.snapshot).await.unwrap();
    });
    ground.finish();
}

fn records(ground: &Ground) -> Vec<Value> {
    good(ground.image("ls").arg("--json")).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn l13_a_root_filesystem_is_an_image_and_kept_while_in_use(ground: Ground) {
    let folder = tempfile::tempdir().unwrap();
    let mut tar = Tar::with_shell();
    tar.file("marker", "here\n").file("later", "untouched\n");
    let plain = tar.write(&folder.path().join("tiny.tar"));
    let (gz, zst) = (folder.path().join("tiny.tar.gz"), folder.path().join("tiny.tar.zst"));
    fs::write(&gz, gzip(&tar.bytes())).unwrap();
    fs::write(&zst, zstd::encode_all(&*tar.bytes(), 1).unwrap()).unwrap();

    assert_eq!(good(ground.image("import").arg(&plain)), "tiny", "it is called after its file");
    ground.import(&gz, "again");
    ground.import(&zst, "registry.example/third:1");
    assert_eq!(ground.layers().len(), 1, "the same content is one layer");
    let listed = records(&ground);
    let names: Vec<_> = listed.iter().map(|record| record["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["again", "registry.example/third:1", "tiny"]);
    assert!(
        listed.iter().all(|record| record["layers"] == listed[0]["layers"] && record["digest"] == listed[0]["digest"])
    );
    assert!(listed[0]["size_bytes"].as_u64().unwrap() > 1 << 20, "{}", listed[0]);
    let inspected: Value = serde_json::from_str(&good(ground.image("inspect").args(["tiny", "--json"]))).unwrap();
    assert_eq!(inspected, listed[2]);
    assert!(good(&mut ground.image("ls")).contains("tiny "));

    assert_eq!(
        ground.sh_in("tiny", "cat /marker; id -u; echo x > /marker; ls -d /usr/bin/perl || echo alone"),
        "here\n0\nalone"
    );
    assert_eq!(ground.sh_in("registry.example/third:1", "cat /marker"), "here", "the image is as it was");
    assert!(refused(ground.viv().args(["create", "--image", "nope"])).contains("\"nope\" was not found"));
    assert!(refused(ground.image("inspect").arg("nope")).contains("hint: `viv local image ls`"));

    let sandbox = ground.sandbox_of("tiny");
    let error = refused(ground.image("rm").arg("tiny"));
    assert!(error.contains(&format!("in use by {sandbox}")) && error.contains("hint: "), "{error}");
    assert_eq!(records(&ground).len(), 3);
    good(ground.image("rm").args(["--force", "tiny", "again", "registry.example/third:1"]));
    assert_eq!(records(&ground), Vec::<Value>::new());
    ground.collect_to(1);
    assert_eq!(ground.sh(&sandbox, "cat /later; echo changed > /marker"), "untouched");
    assert!(refused(ground.viv().args(["create", "--image", "tiny"])).contains("was not found"));

    // A snapshot needs the image's layer as much as the sandbox did.
    let snapshot = ground.save_and_remove(&sandbox);
    ground.collect_to(2);
    ground.import(&plain, "tiny");
    let error = refused(ground.image("rm").arg("tiny"));
    assert!(error.contains(&format!("in use by {snapshot}")), "{error}");
    good(ground.image("rm").args(["--force", "tiny"]));
    ground.collect_to(2);
    assert_eq!(ground.sh_restored(&snapshot, "cat /marker /later"), "changed\nuntouched");
    good(ground.viv().args(["drop", &snapshot]));
    ground.collect_to(0);

    ground.import(&plain, "tiny");
    let sandbox = ground.sandbox_of("tiny");
    refused(ground.image("rm").arg("tiny"));
    good(ground.viv().args(["rm", &sandbox]));
    good(ground.image("rm").arg("tiny"));
    ground.finish();
}

fn l13_layers_of_oci_images_are_merged_and_shared(ground: Ground) {
    let folder = tempfile::tempdir().unwrap();
    let blobs = BlobDir::open(&folder.path().join("blobs")).unwrap();
    let mut lower = Tar::with_shell();
    lower.file("a/keep", "kept\n").file("a/gone", "").file("b/old", "").file("c", "old\n").file("d/x/y", "");
    let mut upper = Tar::new();
    upper.file("a/.wh.gone", "").file("b/.wh..wh..opq", "").file("b/new", "new\n").file("c", "new\n");
    upper.file(".wh.d", "").file("e/.wh.never", "");
    let mut other = Tar::new();
    other.file("other", "other\n").file("d/x/z", "");
    let (lower, upper, other) = (lower.bytes(), upper.bytes(), other.bytes());
    let env = [("GREETING", "hello = you"), ("PATH", "/bin:/opt/bin")];
    let first = oci_image(&blobs, &[lower.clone(), upper.clone()], &env, Some("example/first:1"));
    let second = oci_image(&blobs, &[lower.clone(), other.clone()], &[], Some("example/second:1"));

    let archive = folder.path().join("first.tar");
    viv_image::write_archive(&first, &mut fs::File::create(&archive).unwrap()).unwrap();
    let packed = folder.path().join("first.tar.gz");
    fs::write(&packed, gzip(&fs::read(&archive).unwrap())).unwrap();
    let layout = folder.path().join("second");
    viv_image::write_layout(&second, &layout).unwrap();
    let docker = docker_archive(&[lower, upper], &["GREETING=hello = you"], "example/docker:1");
    let docker = docker.write(&folder.path().join("docker.tar"));

    let told = said(ground.image("import").arg(&archive));
    assert_eq!(told.out, "example/first:1", "{told:?}");
    assert!(told.err.contains("layer 2 of 2  unpacking"), "{told:?}");
    let told = said(ground.image("import").arg(&layout));
    assert_eq!(told.out, "example/second:1", "{told:?}");
    assert!(told.err.contains("layer 1 of 2  there already"), "{told:?}");
    assert_eq!(ground.layers().len(), 3, "two images share the lower layer");
    assert_eq!(good(ground.image("import").arg(&docker)), "example/docker:1");
    ground.import(&packed, "packed");
    assert_eq!(ground.layers().len(), 3, "whoever wrote the archive, the layers are the same");

    let look = "ls /a /b; cat /a/keep /c /b/new; ls -d /d /e/never 2>/dev/null; echo \"$GREETING\" \"$PATH\"";
    let merged = "/a:\nkeep\n\n/b:\nnew\nkept\nnew\nnew\nhello = you /bin:/opt/bin:/.vivarium/bin";
    assert_eq!(ground.sh_in("example/first:1", look), merged);
    assert_eq!(ground.sh_in("packed", look), merged);
    let of_docker = ground.sh_in("docker.io/example/docker:1", look);
    assert_eq!(of_docker.rsplit_once(" /").unwrap().0, merged.rsplit_once(" /").unwrap().0);
    let look = "ls /a /b /d/x; cat /c /other; echo \"$GREETING\"";
    assert_eq!(ground.sh_in("example/second:1", look), "/a:\ngone\nkeep\n\n/b:\nold\n\n/d/x:\ny\nz\nold\nother");

    // Environment and what was hidden survive a save.
    let sandbox = ground.sandbox_of("example/first:1");
    ground.sh(&sandbox, "rm /a/keep; mkdir /d");
    let snapshot = ground.save_and_remove(&sandbox);
    assert_eq!(ground.sh_restored(&snapshot, "ls /a /d; echo \"$GREETING\""), "/a:\n\n/d:\nhello = you");
    good(ground.viv().args(["drop", &snapshot]));

    good(ground.image("rm").args(["example/first:1", "packed"]));
    ground.collect_to(3);
    good(ground.image("rm").arg("example/docker:1"));
    ground.collect_to(2);
    good(ground.image("rm").arg("example/second:1"));
    ground.finish();
}

fn doctor_says_what_the_driver_can_do(ground: Ground) {
    let driver = ground.provider.driver().to_string();
    let text = good(&mut ground.verb("doctor"));
    assert!(text.contains(&format!("layers kept by the {driver} driver")), "{text}");
    for line in ["  yes  save live", "  yes  restore", "  yes  fork", "  yes  limit disk, by "] {
        assert!(text.contains(line), "{text}");
    }
    let told: Value = serde_json::from_str(&good(ground.verb("doctor").arg("--json"))).unwrap();
    assert_eq!(told["layers"], json!(driver));
    assert!(told["limit_disk_by"].is_string(), "{told}");
    assert!(told["capabilities"]["has"].as_array().unwrap().contains(&json!("save_live")), "{told}");
    assert!(told["capabilities"]["missing"]["save_memory"].as_str().is_some_and(|why| !why.is_empty()), "{told}");

    // Layers are where they are: another driver would not find them, and is not let near.
    let other = if driver == "plain" { "btrfs" } else { "plain" };
    for verb in [&["local", "image", "ls"][..], &["local", "ls"], &["doctor", "--json"]] {
        let error = refused(ground.verb(verb[0]).args(&verb[1..]).args(["--layers", other]));
        assert!(error.contains(&format!("kept by the {driver} driver")), "{error}");
        assert!(error.contains("use another data folder"), "{error}");
    }
    good(ground.verb("doctor").args(["--layers", &driver]));
    ground.finish();
}
