//! Nothing that a workload leaves lying about leads those astray who come from outside: working directories, users,
//! programs and paths of the file API (S1, S4). The rest of the escape suite is in `escapes`.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::Cursor;
use std::path::Path;
use std::time::Duration;

use support::{Ground, Sandbox, mutation, sh};
use tokio::io::AsyncReadExt;
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::file::ArchiveBounds;
use viv_provider::{FileWrite, Provider, ProviderError};

const LIFETIME: Duration = Duration::from_secs(600);

/// The id that no workload ever gets, as it is inside.
const KEEPER: u32 = 65_535;

const SECRET: &str = "the host's secret";

/// The sandbox's own, which tells that a path was resolved inside.
const INSIDE: &str = "the sandbox's own";

/// A folder of the host's with a secret in it.
fn host_folder() -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
    fs::write(folder.path().join("secret"), SECRET).unwrap();
    folder
}

fn assert_untouched(folder: &Path) {
    let names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["secret"]);
    assert_eq!(fs::read_to_string(folder.join("secret")).unwrap(), SECRET);
}

/// What the agent and the host share; executions aside, whose names are ids.
fn run_folder(sandbox: &Sandbox<'_>) -> BTreeSet<String> {
    let run = sandbox.folder().join("run");
    let names = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    };
    let executions = names(&run.join("exec")).into_iter().filter(|name| !name.starts_with("exe_"));
    let names: BTreeSet<_> = names(&run).into_iter().chain(executions).collect();
    assert!(names.contains("agent.sock") && names.contains("exec"), "{names:?}");
    names
}

/// Runs a command that must end well, as root.
async fn prepare(sandbox: &Sandbox<'_>, script: &str) {
    let (text, status) = sandbox.run(script).await;
    assert_eq!(status.state, ExecState::Exited { code: 0 }, "{text}");
}

async fn read(sandbox: &Sandbox<'_>, path: &str) -> Result<String, ProviderError> {
    let mut reader = sandbox.ground.provider.file_read(&sandbox.instance(), path, 0, Some(4096)).await?;
    let mut content = Vec::new();
    reader.read_to_end(&mut content).await.map_err(|error| ProviderError::Failed { what: error.to_string() })?;
    Ok(String::from_utf8_lossy(&content).into_owned())
}

async fn write(sandbox: &Sandbox<'_>, path: &str) -> Result<(), ProviderError> {
    let file = FileWrite { path: path.to_owned(), ..FileWrite::default() };
    let content = Box::new(Cursor::new(b"planted".to_vec()));
    sandbox.ground.provider.file_write(&mutation(1, 1), &sandbox.id, &file, content).await.map(drop)
}

async fn put_archive(sandbox: &Sandbox<'_>, path: &str, archive: Vec<u8>) -> Result<(), ProviderError> {
    let (provider, bounds) = (&sandbox.ground.provider, ArchiveBounds::default());
    provider.archive_put(&mutation(1, 1), &sandbox.id, path, bounds, Box::new(Cursor::new(archive))).await.map(drop)
}

/// An archive with one file.
fn archive(name: &str) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    // Set by hand, since the library refuses what climbs.
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_size(7);
    header.set_mode(0o644);
    header.set_cksum();
    builder.append(&header, &b"planted"[..]).unwrap();
    builder.into_inner().unwrap()
}

/// Paths by which the kernel itself leads elsewhere: to what a process has open, its root, its directory.
fn magic_folders() -> Vec<String> {
    let fixed = ["/proc/1/root", "/proc/1/cwd", "/proc/self/root", "/proc/self/cwd", "/proc/thread-self/root"];
    let descriptors = (0..40).map(|number| format!("/proc/self/fd/{number}"));
    let of_agent = (0..40).map(|number| format!("/proc/1/fd/{number}"));
    fixed.map(str::to_owned).into_iter().chain(descriptors).chain(of_agent).collect()
}

#[tokio::test]
async fn s4_no_magic_link_is_a_working_directory() {
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    let mut folders = magic_folders();
    // The same behind links that anybody can make.
    let links: String = folders.iter().enumerate().map(|(n, to)| format!("ln -s {to} /tmp/link{n}\n")).collect();
    prepare(&sandbox, &format!("set -e\nln -s /tmp/link0 /tmp/twice\n{links}")).await;
    folders.extend((0..folders.len()).map(|n| format!("/tmp/link{n}")));
    folders.push("/tmp/twice".to_owned());
    folders.extend(["/proc/1/root/..", "/proc/self/fd/7/../..", "/proc/self/cwd/tmp"].map(str::to_owned));
    for folder in folders {
        let spec = ExecSpec { cwd: Some(folder.clone()), ..sh("ls -la; readlink /proc/self/cwd") };
        let execution = sandbox.start_spec(&spec).await;
        let (text, status) = sandbox.output(&execution).await;
        let ExecState::Failed { what } = &status.state else { panic!("{folder}: {status:?}\n{text}") };
        assert!(what.starts_with("working directory"), "{folder}: {what}");
    }
    // What climbs above the root stays in it.
    let spec = ExecSpec { cwd: Some("/../../../../tmp".to_owned()), ..sh("pwd") };
    let execution = sandbox.start_spec(&spec).await;
    assert_eq!(sandbox.output(&execution).await.0, "/tmp\n");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s4_no_path_of_the_file_api_leads_out() {
    let host = host_folder();
    let outside = host.path().display().to_string();
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    let (provider, instance, ours) = (&ground.provider, sandbox.instance(), run_folder(&sandbox));

    // Through magic links: nothing at all.
    prepare(&sandbox, "ln -s /proc/1/root /tmp/root && ln -s /proc/self/fd /tmp/fds && ln -s /proc/1/cwd /tmp/cwd")
        .await;
    let mut folders = magic_folders();
    folders
        .extend(["/tmp/root", "/tmp/cwd", "/tmp/fds/3", "/tmp/fds/4", "/tmp/fds/5", "/tmp/fds/6"].map(str::to_owned));
    for folder in &folders {
        let path = format!("{folder}/etc/passwd");
        let read = read(&sandbox, &path).await;
        assert!(read.is_err(), "{path} was read: {read:?}");
        assert!(provider.file_stat(&instance, &path).await.is_err(), "{path}");
        assert!(provider.file_list(&instance, &format!("{folder}/"), 1).await.is_err(), "{folder}");
        assert!(provider.file_watch(&instance, &format!("{folder}/"), false).await.is_err(), "{folder}");
        assert!(provider.archive_get(&instance, &format!("{folder}/etc")).await.is_err(), "{folder}");
        let path = format!("{folder}/tmp/planted");
        assert!(write(&sandbox, &path).await.is_err(), "{path}");
        assert!(provider.file_mkdir(&mutation(1, 1), &sandbox.id, &path).await.is_err(), "{path}");
        assert!(provider.file_remove(&mutation(1, 1), &sandbox.id, &path).await.is_err(), "{path}");
        assert!(provider.file_move(&mutation(1, 1), &sandbox.id, "/etc/hosts", &path).await.is_err(), "{path}");
        assert!(put_archive(&sandbox, &path, archive("planted")).await.is_err(), "{path}");
    }

    // Through links and `..`: to the same path inside.
    let links = format!(
        "mkdir -p {outside} && echo -n \"{INSIDE}\" > {outside}/secret && ln -s {outside} /tmp/out && \
         ln -s ../../../../../..{outside} /tmp/up"
    );
    prepare(&sandbox, &links).await;
    for folder in [&outside, "/tmp/out", "/tmp/up", &format!("/../../..{outside}"), &format!("/tmp/../../..{outside}")]
    {
        let path = format!("{folder}/secret");
        assert_eq!(read(&sandbox, &path).await.unwrap(), INSIDE, "{path}");
        write(&sandbox, &format!("{folder}/planted")).await.unwrap();
        provider.file_mkdir(&mutation(1, 1), &sandbox.id, &format!("{folder}/made")).await.unwrap();
        put_archive(&sandbox, folder, archive("unpacked")).await.unwrap();
        provider.file_remove(&mutation(1, 1), &sandbox.id, &format!("{folder}/planted")).await.unwrap();
        assert_untouched(host.path());
    }

    // Archives that climb.
    for name in ["../climbed", "/tmp/absolute", "a/../../climbed", "out/through", "root/through"] {
        let put = put_archive(&sandbox, "/tmp", archive(name)).await;
        assert!(matches!(put, Err(ProviderError::Invalid { .. })), "{name}: {put:?}");
    }

    // Our own folder, by whatever name.
    prepare(&sandbox, "ln -s /.vivarium /tmp/ours && ln -s /.vivarium/run /tmp/run").await;
    for folder in
        ["/.vivarium", "/.vivarium/run", "/tmp/ours", "/tmp/run", "/tmp/../.vivarium/run/exec", "/tmp/ours/run"]
    {
        let path = format!("{folder}/planted");
        assert!(write(&sandbox, &path).await.is_err(), "{path}");
        assert!(provider.file_mkdir(&mutation(1, 1), &sandbox.id, &path).await.is_err(), "{path}");
        assert!(provider.file_move(&mutation(1, 1), &sandbox.id, "/etc/hosts", &path).await.is_err(), "{path}");
        assert!(put_archive(&sandbox, folder, archive("planted")).await.is_err(), "{folder}");
        for name in ["identity.json", "agent", "run", "agent.sock", "agent.json", "exec"] {
            let path = format!("{folder}/{name}");
            assert!(provider.file_remove(&mutation(1, 1), &sandbox.id, &path).await.is_err(), "{path}");
            assert!(provider.file_move(&mutation(1, 1), &sandbox.id, &path, "/tmp/stolen").await.is_err(), "{path}");
        }
    }
    assert_eq!(run_folder(&sandbox), ours);
    // Nor is it read, but by its own name, by which a server decides who may (S3).
    assert!(read(&sandbox, "/.vivarium/identity.json").await.is_ok());
    for path in ["/tmp/ours/identity.json", "/tmp/run/agent.json", "/tmp/ours/run/agent.json"] {
        let read = read(&sandbox, path).await;
        assert!(matches!(read, Err(ProviderError::Invalid { .. })), "{path}: {read:?}");
    }
    for folder in ["/tmp/ours", "/tmp/run", "/tmp/ours/run"] {
        assert!(provider.file_list(&sandbox.instance(), folder, 1).await.is_err(), "{folder}");
        assert!(provider.archive_get(&sandbox.instance(), folder).await.is_err(), "{folder}");
        assert!(provider.file_watch(&sandbox.instance(), folder, true).await.is_err(), "{folder}");
    }
    assert_untouched(host.path());
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// For as long as it runs, one name is a folder, a link to each of these, and nothing, in turn.
const SWAPPER: &str = r#"
    $| = 1; my @targets = @ARGV; mkdir "/tmp/race"; mkdir "/tmp/race/x"; print "ready\n";
    while (1) { for my $target (@targets) {
        symlink($target, "/tmp/race/new"); rename("/tmp/race/x", "/tmp/race/old"); rename("/tmp/race/new", "/tmp/race/x");
        rename("/tmp/race/x", "/tmp/race/new"); rename("/tmp/race/old", "/tmp/race/x"); unlink "/tmp/race/new";
    } }
"#;

/// Enough for each of the calls to meet every state of the name many times.
const ROUNDS: usize = 120;

#[tokio::test]
async fn s4_no_race_leads_out() {
    let host = host_folder();
    let outside = host.path().display().to_string();
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    let (provider, ours) = (&ground.provider, run_folder(&sandbox));
    let targets = ["/.vivarium/run", "/.vivarium", "/.vivarium/run/exec", "/proc/1/root", "/proc/self/fd/4", &outside];
    let argv = ["perl", "-e", SWAPPER].into_iter().chain(targets).map(str::to_owned).collect();
    let swapper = sandbox.start_spec(&ExecSpec { argv, ..ExecSpec::default() }).await;
    let mut output = provider.attach(&sandbox.instance(), &swapper, 0, true).await.unwrap();
    output.next().await.unwrap().unwrap();

    let (mut went_through, mut refused) = (0, 0);
    for round in 0..ROUNDS {
        let path = |name: &str| format!("/tmp/race/x/{name}{round}");
        let id = &sandbox.id;
        let mut results = vec![
            write(&sandbox, &path("written")).await,
            provider.file_mkdir(&mutation(1, 1), id, &path("deep/made")).await,
            put_archive(&sandbox, "/tmp/race/x", archive(&format!("unpacked{round}"))).await,
            put_archive(&sandbox, "/tmp/race", archive(&format!("x/below{round}"))).await,
            write(&sandbox, &format!("/tmp/race/moved{round}")).await,
            provider.file_move(&mutation(1, 1), id, &format!("/tmp/race/moved{round}"), &path("moved")).await,
        ];
        for name in ["agent.sock", "agent.json", "identity.json", "secret", "exec"] {
            results.push(provider.file_remove(&mutation(1, 1), id, &format!("/tmp/race/x/{name}")).await);
        }
        // Nothing of the host's or of ours is ever read, either.
        if let Ok(text) = read(&sandbox, "/tmp/race/x/secret").await {
            panic!("it was read: {text}");
        }
        let spec = ExecSpec { cwd: Some("/tmp/race/x".to_owned()), ..sh("ls") };
        let execution = sandbox.start_spec(&spec).await;
        let (text, _) = sandbox.output(&execution).await;
        assert!(!text.contains("secret") && !text.contains("agent.sock"), "{text}");
        let failed = results.iter().filter(|result| result.is_err()).count();
        (went_through, refused) = (went_through + results.len() - failed, refused + failed);
    }
    println!("{went_through} calls went through, {refused} were refused");
    // Otherwise there was no race.
    assert!(went_through > 0 && refused > 0);
    provider.cancel(&mutation(1, 1), &sandbox.id, &swapper).await.unwrap();
    assert_eq!(run_folder(&sandbox), ours);
    assert_untouched(host.path());
    let (text, _) = sandbox.run("cat /.vivarium/identity.json").await;
    assert!(text.contains(sandbox.id.as_str()), "{text}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_nobody_runs_with_the_keepers_id() {
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    prepare(
        &sandbox,
        "printf 'keeper:x:65535:0::/:/bin/sh\\nkgroup:x:7:65535::/:/bin/sh\\nkmember:x:8:8::/:/bin/sh\\n\
         beyond:x:65536:65536::/:/bin/sh\\nminus:x:4294967295:0::/:/bin/sh\\nmgroup:x:9:4294967295::/:/bin/sh\\n\
         huge:x:99999999999:0::/:/bin/sh\\nneg:x:-1:-1::/:/bin/sh\\n:x:0:0::/:/bin/sh\\n65535:x:5:5::/:/bin/sh\\n' \
         >> /etc/passwd && printf 'keepers:x:65535:kmember\\nbeyond:x:65536:beyond\\nminus:x:4294967295:kmember\\n' \
         >> /etc/group",
    )
    .await;
    let users = [
        "keeper",
        "kgroup",
        "kmember",
        "beyond",
        "minus",
        "mgroup",
        "huge",
        "neg",
        "",
        ":",
        ":0",
        "0:",
        "65535",
        "0:65535",
        "1000:keepers",
        "user:65535",
        "65536",
        "0:65536",
        "0:beyond",
        "4294967295",
        "0:4294967295",
        "4294967296",
        "-1",
        "+65535",
        "065535",
        " 65535",
        "65535 ",
        "0x0ffff",
        "root\n",
        "root:x:0",
        "../root",
    ];
    for user in users {
        let spec = ExecSpec { user: Some(user.to_owned()), ..sh("cat /proc/self/status; ls /.vivarium/run") };
        let execution = viv_core::ExecutionId::from_bytes(support::fresh_bytes());
        let started = ground.provider.execute(&mutation(1, 1), &sandbox.id, &execution, &spec).await;
        if started.is_err() {
            continue;
        }
        let (text, status) = sandbox.output(&execution).await;
        if let ExecState::Failed { .. } = status.state {
            continue;
        }
        let ids: Vec<u32> = text
            .lines()
            .filter(|line| ["Uid:", "Gid:", "Groups:"].iter().any(|name| line.starts_with(name)))
            .flat_map(|line| line.split_ascii_whitespace().skip(1).map(|id| id.parse().unwrap()).collect::<Vec<_>>())
            .collect();
        // Eight are told; an id that is not mapped is told as the overflow id.
        assert!(ids.len() >= 8 && ids.iter().all(|&id| id < KEEPER - 1), "{user:?}: {ids:?}\n{text}");
        assert!(!text.contains("agent.sock"), "{user:?}: {text}");
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Tries to open every running program for writing, for as long as it runs.
const OVERWRITER: &str = r#"
    $| = 1; print "ready\n";
    while (1) { for my $exe (glob "/proc/[0-9]*/exe") { my $to = readlink($exe) // "";
        if ($to =~ /vivarium|agent/ && open(my $f, '+<', $exe)) { print "opened $exe -> $to\n"; exit 1; } } }
"#;

#[tokio::test]
async fn s1_the_agent_is_not_overwritten_by_being_run() {
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    let agents = || -> Vec<(std::path::PathBuf, Vec<u8>)> {
        let files = fs::read_dir(ground.data.join("agent")).unwrap().map(|entry| entry.unwrap().path());
        files.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
    };
    let before = agents();
    assert!(!before.is_empty());
    prepare(
        &sandbox,
        "ln -s /proc/self/exe /tmp/link && printf '#!/proc/self/exe\\n' > /tmp/script && chmod 755 /tmp/script",
    )
    .await;
    for user in ["0", "1000"] {
        let argv = ["perl", "-e", OVERWRITER].map(str::to_owned).to_vec();
        let spec = ExecSpec { argv, user: Some(user.to_owned()), ..ExecSpec::default() };
        let overwriter = sandbox.start_spec(&spec).await;
        let mut output = ground.provider.attach(&sandbox.instance(), &overwriter, 0, true).await.unwrap();
        output.next().await.unwrap().unwrap();
        for program in ["/proc/self/exe", "/proc/1/exe", "/.vivarium/agent", "/tmp/link", "/tmp/script"] {
            for _ in 0..20 {
                let argv = vec![program.to_owned()];
                let spec =
                    ExecSpec { argv, user: Some(user.to_owned()), limit_ms: Some(20_000), ..ExecSpec::default() };
                let execution = sandbox.start_spec(&spec).await;
                let (text, status) = sandbox.output(&execution).await;
                let ran = status.state == ExecState::Exited { code: 0 } || status.state == ExecState::TimedOut;
                assert!(!ran, "{program} as {user}: {status:?} {text}");
            }
        }
        let status = ground.provider.cancel(&mutation(1, 1), &sandbox.id, &overwriter).await.unwrap();
        assert_eq!(status.state, ExecState::Cancelled, "{:?}", sandbox.output(&overwriter).await);
    }
    assert!(agents() == before, "the agent's binary on the host was changed");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_who_kills_everybody_kills_only_his_own() {
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    let neighbour = ground.create(LIFETIME).await;
    let bystander = sandbox.start("exec sleep 1000").await;
    let beside = neighbour.start("exec sleep 1000").await;
    for signal in ["STOP", "KILL"] {
        let spec = ExecSpec { user: Some("1000".to_owned()), ..sh(&format!("kill -{signal} -1; kill -{signal} 1")) };
        let execution = sandbox.start_spec(&spec).await;
        sandbox.output(&execution).await;
    }
    // Root's processes are not an ordinary user's to end.
    let seen = ground.provider.execution(&sandbox.instance(), &bystander).await.unwrap();
    assert_eq!(seen.state, ExecState::Running);
    sandbox.run("kill -KILL -1; kill -KILL 1").await;
    sandbox.output(&bystander).await;
    // The agent lives, and so does everything in the other one.
    assert_eq!(sandbox.run("echo here").await.0, "here\n");
    let seen = ground.provider.execution(&neighbour.instance(), &beside).await.unwrap();
    assert_eq!(seen.state, ExecState::Running);
    sandbox.destroy().await;
    neighbour.destroy().await;
    ground.assert_nothing_left();
}
