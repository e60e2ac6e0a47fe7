//! Whatever an image brings is refused or contained: nothing of it is written outside, no create hangs (S1, S4).
#![allow(missing_docs, reason = "tests")]

#[path = "support/escape.rs"]
mod escape;
mod support;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags, XattrFlags, makedev, mkdirat, mknodat, openat, setxattr};
use support::{Ground, Sandbox, fresh_bytes, mutation};
use viv_core::SandboxId;
use viv_core::exec::{ExecSpec, ExecState};
use viv_provider::{Image, InstanceRef, InstanceSpec, Provider, ProviderError};

const LIFETIME: Duration = Duration::from_secs(600);

/// Longest that a command may take whose user was looked for in a hostile file.
const LOOK_LIMIT_MS: u64 = 30_000;

const SECRET: &str = "the host's secret";

/// A folder of the host's that images point at.
struct Outside(tempfile::TempDir);

impl Outside {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
        fs::write(folder.path().join("secret"), SECRET).unwrap();
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn assert_untouched(&self, what: &str) {
        let names: Vec<_> = fs::read_dir(self.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["secret"], "{what}: something was written outside");
        let secret = self.path().join("secret");
        assert_eq!(fs::read_to_string(&secret).unwrap(), SECRET, "{what}");
        assert_eq!(fs::metadata(secret).unwrap().uid(), 0, "{what}");
    }
}

/// A root filesystem with nothing but the program, which tells who runs it.
struct Tree(tempfile::TempDir);

const PROBE: &str = "/probe";

impl Tree {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
        // Folders made for temporary files are for their owner only, which a root is not.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let tree = Self(folder);
        fs::copy(escape::program(), tree.at(PROBE)).unwrap();
        tree
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path.trim_start_matches('/'))
    }

    fn spec(&self) -> InstanceSpec {
        let path = self.0.path().to_string_lossy().into_owned();
        InstanceSpec { image: Image::Directory { path }, ..InstanceSpec::host(LIFETIME.as_millis() as u64) }
    }

    /// What is in it, as far as anybody could have changed it.
    fn look(&self) -> BTreeMap<PathBuf, (u32, u32, u64, i64, Option<PathBuf>)> {
        let mut seen = BTreeMap::new();
        let mut pending = vec![self.0.path().to_owned()];
        while let Some(folder) = pending.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let found = fs::symlink_metadata(&path).unwrap();
                if found.is_dir() {
                    pending.push(path.clone());
                }
                let link = fs::read_link(&path).ok();
                seen.insert(path, (found.mode(), found.uid(), found.rdev(), found.mtime_nsec(), link));
            }
        }
        seen
    }
}

/// Makes a sandbox of a spec, or tells why not; that it hangs is neither.
async fn create<'g>(ground: &'g Ground, spec: &InstanceSpec, what: &str) -> Result<Sandbox<'g>, String> {
    let id = SandboxId::from_bytes(fresh_bytes());
    match ground.provider.create(&mutation(1, 1), &id, &ground.owner, spec).await {
        Ok(_) => Ok(Sandbox { ground, id }),
        Err(ProviderError::Failed { what: why } | ProviderError::Invalid { what: why, .. }) => {
            assert!(!why.is_empty(), "{what}: refused without a reason");
            Err(why)
        }
        Err(error) => panic!("{what}: {error:?}"),
    }
}

/// The probe as a user: who it found itself to be.
async fn who(sandbox: &Sandbox<'_>, program: &str, user: Option<&str>) -> Result<serde_json::Value, ExecState> {
    let spec = ExecSpec {
        argv: vec![program.to_owned(), "--who".to_owned()],
        user: user.map(str::to_owned),
        cwd: Some("/".to_owned()),
        limit_ms: Some(LOOK_LIMIT_MS),
        ..ExecSpec::default()
    };
    let execution = sandbox.start_spec(&spec).await;
    let (text, status) = sandbox.output(&execution).await;
    match status.state {
        ExecState::Exited { code: 0 } => Ok(serde_json::from_str(&text).unwrap()),
        state => Err(state),
    }
}

/// It is who it was meant to be, and may nothing.
fn assert_powerless(told: &serde_json::Value, id: u32, what: &str) {
    // Without a /proc there is nothing to be told.
    if told["uid"].is_null() {
        return;
    }
    assert_eq!(told["uid"], format!("{id} {id} {id} {id}"), "{what}: {told}");
    for set in ["capabilities", "permitted"] {
        assert_eq!(told[set], "0000000000000000", "{what}: {told}");
    }
}

/// Puts something in the place of a folder that is ours or the kernel's.
type Shape = (&'static str, fn(&Path, &Path));

/// The first path is the place in the image, the second a folder of the host's.
const SHAPES: [Shape; 13] = [
    ("a link to the host", |at, outside| symlink(outside, at).unwrap()),
    ("a link that climbs", |at, outside| {
        let up = format!("../../../../../../../..{}", outside.display());
        symlink(up, at).unwrap();
    }),
    ("a link to a file of the host", |at, outside| symlink(outside.join("secret"), at).unwrap()),
    ("a link to the kernel's", |at, _| symlink("/proc/self/root", at).unwrap()),
    ("a link to PID 1", |at, _| symlink("/proc/1/root/tmp", at).unwrap()),
    ("a link to another", |at, _| {
        let others = ["dev", "proc", "sys", "etc", "run", "tmp"];
        let other = others.into_iter().find(|other| !at.ends_with(other)).unwrap();
        symlink(format!("/{other}"), at).unwrap();
    }),
    ("a link to the root", |at, _| symlink("/", at).unwrap()),
    ("a loop", |at, _| symlink(at.file_name().unwrap(), at).unwrap()),
    ("a link to nothing", |at, _| symlink("/nowhere/at/all", at).unwrap()),
    ("a file", |at, _| fs::write(at, "no folder").unwrap()),
    ("a device", |at, _| {
        mknodat(CWD, at, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(1, 5)).unwrap();
    }),
    ("a pipe", |at, _| mknodat(CWD, at, FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap()),
    ("closed", |at, _| {
        fs::create_dir(at).unwrap();
        fs::set_permissions(at, fs::Permissions::from_mode(0o000)).unwrap();
    }),
];

/// Tries every shape at a place.
async fn try_shapes(place: &str) {
    let (ground, outside) = (Ground::new(), Outside::new());
    let (mut made, mut refused) = (0, 0);
    for (shape, put) in SHAPES {
        let what = format!("/{place} is {shape}");
        let tree = Tree::new();
        let at = tree.at(place);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        put(&at, outside.path());
        let before = tree.look();
        match create(&ground, &tree.spec(), &what).await {
            Err(why) => {
                println!("{what}: {why}");
                refused += 1;
            }
            Ok(sandbox) => {
                made += 1;
                assert_works(&sandbox, &what).await;
                sandbox.destroy().await;
            }
        }
        assert_eq!(tree.look(), before, "{what}: the image was changed");
        outside.assert_untouched(&what);
    }
    println!("/{place}: {made} made, {refused} refused");
    ground.assert_nothing_left();
}

/// Commands run, as nobody special, and see what a sandbox should: its own root, processes and devices.
async fn assert_works(sandbox: &Sandbox<'_>, what: &str) {
    for (user, id) in [("0", 0), ("1000", 1000)] {
        let told = who(sandbox, PROBE, Some(user)).await.unwrap_or_else(|state| panic!("{what}: {state:?}"));
        assert_powerless(&told, id, what);
    }
    let listing = sandbox.ground.provider.file_list(&sandbox.instance(), "/", 1).await.unwrap();
    assert!(listing.entries.iter().any(|entry| entry.path == "probe"), "{what}: {listing:?}");
    let execution = sandbox.start_spec(&ExecSpec { cwd: Some("/".to_owned()), ..attempts() }).await;
    let (text, status) = sandbox.output(&execution).await;
    assert_eq!(status.state, ExecState::Exited { code: 0 }, "{what}: {text}");
    for line in text.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_ne!(line["outcome"], "opened", "{what}: {line}");
    }
}

/// Those that an image could open: what is mounted over it, and what lies in it.
fn attempts() -> ExecSpec {
    let names = [
        "agent-binary-write",
        "agent-config",
        "agent-environment",
        "agent-root",
        "agent-socket",
        "capabilities",
        "core-pattern",
        "descriptors",
        "home-make",
        "home-move",
        "host-in-mountinfo",
        "identity-write",
        "interrupts",
        "kcore",
        "mount-propagation",
        "proc-keys",
        "run-list",
        "seccomp-status",
        "sysctl-any",
        "sysfs-any",
    ];
    ExecSpec { argv: [PROBE, "--only", &names.join(",")].map(str::to_owned).to_vec(), ..ExecSpec::default() }
}

macro_rules! places {
    ($($name:ident = $place:literal),+ $(,)?) => {$(
        #[tokio::test]
        async fn $name() {
            try_shapes($place).await;
        }
    )+};
}

places!(
    s4_dev_may_be_anything = "dev",
    s4_proc_may_be_anything = "proc",
    s4_sys_may_be_anything = "sys",
    s4_etc_may_be_anything = "etc",
    s4_run_may_be_anything = "run",
    s4_tmp_may_be_anything = "tmp",
    s4_the_working_directory_may_be_anything = "workspace",
    s4_our_folder_may_be_anything = ".vivarium",
    s4_our_shared_folder_may_be_anything = ".vivarium/run",
    s4_the_agents_place_may_be_anything = ".vivarium/agent",
    s4_the_identitys_place_may_be_anything = ".vivarium/identity.json",
    s4_our_commands_folder_may_be_anything = ".vivarium/bin",
    s4_our_commands_place_may_be_anything = ".vivarium/bin/viv",
    s4_the_machine_ids_place_may_be_anything = "etc/machine-id",
);

#[tokio::test]
async fn s4_all_at_once_and_from_an_archive() {
    let (ground, outside) = (Ground::new(), Outside::new());
    let folder = tempfile::tempdir().unwrap();
    for (number, (shape, put)) in SHAPES.into_iter().enumerate() {
        let tree = Tree::new();
        for place in ["dev", "proc", "sys", "etc", "run", "tmp", "workspace"] {
            put(&tree.at(place), outside.path());
        }
        let made = create(&ground, &tree.spec(), shape).await;
        println!("{shape}: {:?}", made.as_ref().err());
        if let Ok(sandbox) = made {
            sandbox.destroy().await;
        }
        outside.assert_untouched(shape);

        // Packed, imported and made from the image.
        let archive = folder.path().join(format!("{number}.tar"));
        let mut builder = tar::Builder::new(File::create(&archive).unwrap());
        builder.follow_symlinks(false);
        builder.append_dir_all(".", tree.0.path()).unwrap();
        builder.into_inner().unwrap();
        let name = format!("tricks{number}");
        let imported = ground.viv_image().arg("import").arg(&archive).args(["--name", &name]).output().unwrap();
        assert!(imported.status.success(), "{shape}: {}", String::from_utf8_lossy(&imported.stderr));
        let spec = InstanceSpec { image: Image::Named { name }, ..tree.spec() };
        if let Ok(sandbox) = create(&ground, &spec, shape).await {
            sandbox.destroy().await;
        }
        outside.assert_untouched(shape);
    }
    ground.assert_nothing_left();
}

/// Writes a hostile user database.
type Database = (&'static str, fn(&Path));

const DATABASES: [Database; 15] = [
    ("missing", |_| {}),
    ("huge", |at| {
        let mut file = File::create(at).unwrap();
        let lines = "filler:x:77:77::/:/bin/sh\n".repeat(40_000);
        for _ in 0..32 {
            file.write_all(lines.as_bytes()).unwrap();
        }
    }),
    ("of a terabyte, all holes", |at| File::create(at).unwrap().set_len(1 << 40).unwrap()),
    ("one line", |at| fs::write(at, "x".repeat(8 << 20)).unwrap()),
    ("binary", |at| {
        let bytes: Vec<u8> = (0..1 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::write(at, bytes).unwrap();
    }),
    ("of colons", |at| fs::write(at, ":".repeat(1 << 20)).unwrap()),
    ("of ids that there are none of", |at| {
        let text = "root:x:65535:65535::/:/bin/sh\nroot:x:4294967295:4294967295::/:/bin/sh\n\
                    evil:x:65535:65535::/:/bin/sh\nevil:x:99999999999999999999:0::/:/bin/sh\nevil:x:-1:-1::/:\n\
                    1000:x:65535:65535::/:/bin/sh\n0:x:65535:65535::/:/bin/sh\n";
        fs::write(at, text).unwrap();
    }),
    ("of strange lines", |at| {
        fs::write(at, "user:x:1000:1000\r\n\0evil:x:0:0\n\u{2028}root:x:0:0::/\u{85}x:/bin/sh\n\n\n:::::::\n").unwrap();
    }),
    ("a folder", |at| fs::create_dir(at).unwrap()),
    ("a pipe", |at| mknodat(CWD, at, FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap()),
    ("a device", |at| {
        mknodat(CWD, at, FileType::CharacterDevice, Mode::from_raw_mode(0o644), makedev(1, 5)).unwrap();
    }),
    ("a link to endless zeroes", |at| symlink("/dev/zero", at).unwrap()),
    ("a link to memory", |at| symlink("/proc/self/mem", at).unwrap()),
    ("a link to itself", |at| symlink(at.file_name().unwrap(), at).unwrap()),
    ("a link to the host", |at| symlink("../../../../../../etc/passwd", at).unwrap()),
];

#[tokio::test]
async fn s4_user_databases_may_be_anything() {
    let ground = Ground::new();
    for (kind, put) in DATABASES {
        let tree = Tree::new();
        fs::create_dir(tree.at("etc")).unwrap();
        for name in ["etc/passwd", "etc/group"] {
            put(&tree.at(name));
        }
        let what = format!("users and groups are {kind}");
        let sandbox = create(&ground, &tree.spec(), &what).await.unwrap_or_else(|why| panic!("{what}: {why}"));
        for (user, id) in [(None, 0), (Some("0"), 0), (Some("1000"), 1000), (Some("0:0"), 0), (Some("1000:1000"), 1000)]
        {
            match who(&sandbox, PROBE, user).await {
                Ok(told) => assert_powerless(&told, id, &what),
                // Only a database that gives these numbers the keeper's ids keeps them from running.
                Err(ExecState::Failed { what: why }) => assert!(why.contains("reserved"), "{what}, {user:?}: {why}"),
                Err(state) => panic!("{what}, {user:?}: {state:?}"),
            }
        }
        for user in ["evil", "root", "filler", "user", "nobody:evil"] {
            if let Ok(told) = who(&sandbox, PROBE, Some(user)).await {
                let uid = told["uid"].as_str().unwrap();
                assert!(["0 0 0 0", "77 77 77 77", "1000 1000 1000 1000"].contains(&uid), "{what}, {user}: {told}");
            }
        }
        sandbox.destroy().await;
    }
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_programs_of_an_image_give_no_privileges() {
    let ground = Ground::new();
    let tree = Tree::new();
    // Who owns a program that asks to be run as its owner: root, a user, the keeper.
    for (name, id) in [("root", 0), ("user", 1000), ("keeper", 65_535)] {
        let path = tree.at(&format!("set-id-{name}"));
        fs::copy(escape::program(), &path).unwrap();
        chown(&path, Some(id), Some(id)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    }
    // Version 2 with the effective bit, and version 3, which names the root that it holds for.
    let all = u32::MAX.to_le_bytes();
    let revisions: [(&str, u32, &[u32]); 2] = [("capable-2", 0x0200_0001, &[]), ("capable-3", 0x0300_0001, &[0])];
    for (name, magic, root) in revisions {
        let path = tree.at(name);
        fs::copy(escape::program(), &path).unwrap();
        let mut data = magic.to_le_bytes().to_vec();
        for _ in 0..4 {
            data.extend(all);
        }
        data.extend(root.iter().flat_map(|id| id.to_le_bytes()));
        setxattr(&path, c"security.capability", &data, XattrFlags::empty()).unwrap();
    }
    let sandbox = create(&ground, &tree.spec(), "programs with privileges").await.unwrap();
    for program in ["/set-id-root", "/set-id-user", "/set-id-keeper", "/capable-2", "/capable-3"] {
        for (user, id) in [("0", 0), ("1000", 1000), ("77", 77)] {
            match who(&sandbox, program, Some(user)).await {
                Ok(told) => assert_powerless(&told, id, program),
                // The kernel does not even start one whose capabilities it cannot give.
                Err(state) => assert!(matches!(state, ExecState::Failed { .. }), "{program}: {state:?}"),
            }
        }
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_devices_of_an_image_cannot_be_opened() {
    let ground = Ground::new();
    let tree = Tree::new();
    let nodes = [
        ("disk", FileType::BlockDevice, 8, 0),
        ("loop", FileType::BlockDevice, 7, 0),
        ("memory", FileType::CharacterDevice, 1, 1),
        ("messages", FileType::CharacterDevice, 1, 11),
        ("null", FileType::CharacterDevice, 1, 3),
    ];
    fs::create_dir(tree.at("nodes")).unwrap();
    for (name, kind, major, minor) in nodes {
        let mode = Mode::from_raw_mode(0o666);
        mknodat(CWD, tree.at(&format!("nodes/{name}")), kind, mode, makedev(major, minor)).unwrap();
    }
    assert!(fs::metadata(tree.at("nodes/null")).unwrap().file_type().is_char_device());
    let sandbox = create(&ground, &tree.spec(), "devices").await.unwrap();
    for user in ["0", "1000"] {
        let argv = [PROBE, "--only", "device-elsewhere"].map(str::to_owned).to_vec();
        let execution =
            sandbox.start_spec(&ExecSpec { argv, user: Some(user.to_owned()), ..ExecSpec::default() }).await;
        let (text, _) = sandbox.output(&execution).await;
        let told: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(told["outcome"], "refused", "as {user}: {text}");
        assert_eq!(told["detail"], format!("none of {} can be opened", nodes.len()), "as {user}");
    }
    for (name, ..) in nodes {
        let read = ground.provider.file_read(&sandbox.instance(), &format!("/nodes/{name}"), 0, Some(16)).await;
        assert!(read.is_err(), "{name} was read through the API");
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s4_huge_and_deep_folders_and_strange_names_do_no_harm() {
    const ENTRIES: usize = 100_000;
    const DEPTH: usize = 3000;
    let ground = Ground::new();
    let tree = Tree::new();
    fs::create_dir_all(tree.at("huge")).unwrap();
    let one = tree.at("huge/0");
    File::create(&one).unwrap();
    // Links cost no inode each; a filesystem allows tens of thousands of them to one file.
    let mut source = one;
    for number in 1..ENTRIES {
        let path = tree.at(&format!("huge/{number}"));
        if fs::hard_link(&source, &path).is_err() {
            File::create(&path).unwrap();
            source = path;
        }
    }
    let mut folder = openat(CWD, tree.at(""), OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    for _ in 0..DEPTH {
        mkdirat(&folder, "deeper", Mode::from_raw_mode(0o755)).unwrap();
        folder = openat(&folder, "deeper", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    }
    drop(folder);
    let names: [&[u8]; 8] = [b"-rf", b"new\nline", b"\xff\xfe", b"\x1b[2J", b" ", b"...", b"a\\b", &[b'x'; 255]];
    for name in names {
        fs::write(tree.at("").join(std::ffi::OsStr::from_bytes(name)), "").unwrap();
    }

    let sandbox = create(&ground, &tree.spec(), "huge and deep").await.unwrap();
    let (provider, instance): (_, InstanceRef) = (&ground.provider, sandbox.instance());
    assert_powerless(&who(&sandbox, PROBE, None).await.unwrap(), 0, "huge and deep");
    let listing = provider.file_list(&instance, "/", 1).await.unwrap();
    assert!(listing.complete && listing.entries.iter().any(|entry| entry.lossy), "{listing:?}");
    assert_eq!(listing.entries.iter().filter(|entry| entry.path == "new\nline").count(), 1);
    // Told in full, cut short and said so, or refused: never nothing.
    if let Ok(listing) = provider.file_list(&instance, "/huge", 1).await {
        assert!(listing.entries.len() == ENTRIES || !listing.complete, "{} entries", listing.entries.len());
    }
    if let Ok(listing) = provider.file_list(&instance, "/deeper", u32::MAX).await {
        assert!(listing.entries.len() == DEPTH - 1 || !listing.complete, "{} entries", listing.entries.len());
    }
    drop(provider.archive_get(&instance, "/deeper").await);
    drop(provider.file_watch(&instance, "/", true).await);
    let _ = provider.file_remove(&mutation(1, 1), &sandbox.id, "/deeper").await;
    provider.file_remove(&mutation(1, 1), &sandbox.id, "/huge").await.unwrap();
    assert!(matches!(provider.file_stat(&instance, "/huge").await, Err(ProviderError::NotFound { .. })));
    // There is no shell, and that is said.
    let (_, status) = sandbox.run("true").await;
    let ExecState::Failed { what } = &status.state else { panic!("{status:?}") };
    assert!(what.contains("/bin/sh"), "{what}");
    assert_powerless(&who(&sandbox, PROBE, None).await.unwrap(), 0, "huge and deep");
    sandbox.destroy().await;
    ground.assert_nothing_left();
    assert_eq!(fs::read_dir(tree.at("huge")).unwrap().count(), ENTRIES, "the image was changed");
    // Deeper than a simple removal goes.
    viv_layer::remove(tree.0.path()).unwrap();
}

#[tokio::test]
async fn s4_working_directories_through_links_stay_inside() {
    let (ground, outside) = (Ground::new(), Outside::new());
    let tree = Tree::new();
    symlink(outside.path(), tree.at("out")).unwrap();
    symlink(format!("../../../../..{}", outside.path().display()), tree.at("up")).unwrap();
    symlink("/proc/1/root", tree.at("magic")).unwrap();
    symlink("loop", tree.at("loop")).unwrap();
    fs::write(tree.at("file"), "").unwrap();
    for workdir in ["/out/a/b", "/up/a", "/out", "/magic/tmp/a", "/loop/a", "/file/a", "/file", "/new/a/b", "/"] {
        let spec = InstanceSpec { workdir: workdir.to_owned(), ..tree.spec() };
        match create(&ground, &spec, workdir).await {
            Ok(sandbox) => {
                assert_powerless(&who(&sandbox, PROBE, None).await.unwrap(), 0, workdir);
                sandbox.destroy().await;
            }
            Err(why) => assert!(why.contains(workdir), "{workdir}: {why}"),
        }
        outside.assert_untouched(workdir);
    }
    for workdir in ["../a", "/a/../../b", "a", "", "/a\0b"] {
        let spec = InstanceSpec { workdir: workdir.to_owned(), ..tree.spec() };
        let id = SandboxId::from_bytes(fresh_bytes());
        let made = ground.provider.create(&mutation(1, 1), &id, &ground.owner, &spec).await;
        assert!(matches!(made, Err(ProviderError::Invalid { .. })), "{workdir:?}: {made:?}");
    }
    ground.assert_nothing_left();
}
