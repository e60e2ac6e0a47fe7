//! What it is like inside: any root filesystem, ports without a network, isolation, identity (S1, T2).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use support::{Ground, eventually, kill, mutation, sh};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use viv_core::exec::{ExecSpec, ExecState};
use viv_provider::{FileWrite, Image, InstanceSpec, Provider, ProviderError};

fn directory(path: &std::path::Path) -> InstanceSpec {
    InstanceSpec {
        image: Image::Directory { path: path.to_string_lossy().into_owned() },
        ..InstanceSpec::host(600_000)
    }
}

#[tokio::test]
async fn the_agent_runs_in_an_empty_root() {
    let ground = Ground::new();
    let image = tempfile::tempdir().unwrap();
    let sandbox = ground.create_from(directory(image.path())).await;
    let file = FileWrite { path: "/a/file".to_owned(), ..FileWrite::default() };
    let content = Box::new(std::io::Cursor::new(b"content".to_vec()));
    ground.provider.file_write(&mutation(1, 1), &sandbox.id, &file, content).await.unwrap();
    let mut back = String::new();
    let mut reader = ground.provider.file_read(&sandbox.instance(), "/a/file", 0, None).await.unwrap();
    reader.read_to_string(&mut back).await.unwrap();
    assert_eq!(back, "content");
    let (_, status) = sandbox.run("true").await;
    assert!(matches!(status.state, ExecState::Failed { .. }), "there is no shell: {status:?}");
    sandbox.destroy().await;
    assert_eq!(fs::read_dir(image.path()).unwrap().count(), 0, "the image was changed");
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s4_links_of_an_image_lead_nowhere_outside() {
    let ground = Ground::new();
    // What the shim and the runtime make in a new root must not land on the host.
    for name in [".vivarium", "workspace", "proc", "dev", "run"] {
        let (image, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        symlink(outside.path(), image.path().join(name)).unwrap();
        let id = viv_core::SandboxId::from_bytes(support::fresh_bytes());
        let made = ground.provider.create(&mutation(1, 1), &id, &ground.owner, &directory(image.path())).await;
        if name == ".vivarium" {
            assert!(matches!(made, Err(ProviderError::Failed { .. })), "a link in our own place is refused: {made:?}");
        }
        if made.is_ok() {
            ground.provider.destroy(&mutation(1, 1), &id).await.unwrap();
        }
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "{name}: something was written outside");
    }
    ground.assert_nothing_left();
}

#[tokio::test]
async fn ports_are_reached_without_a_network() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let server = "use Socket; socket(S, PF_INET, SOCK_STREAM, 0) or die; \
                  bind(S, sockaddr_in(8080, INADDR_ANY)) or die; listen(S, 5) or die; \
                  $| = 1; print \"listening\\n\"; \
                  while (accept(C, S)) { my $l = <C>; print C \"you said $l\"; close C }";
    let spec = ExecSpec { argv: vec!["/usr/bin/perl".into(), "-e".into(), server.into()], ..ExecSpec::default() };
    let execution = sandbox.start_spec(&spec).await;
    let mut output = ground.provider.attach(&sandbox.instance(), &execution, 0, true).await.unwrap();
    output.next().await.unwrap().unwrap();

    for word in ["one", "two"] {
        let mut connection = ground.provider.dial(&sandbox.instance(), 8080).await.unwrap();
        connection.write_all(format!("{word}\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, format!("you said {word}\n"));
    }
    let closed = ground.provider.dial(&sandbox.instance(), 8081).await.err();
    assert!(matches!(closed, Some(ProviderError::NotFound { .. })), "{closed:?}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_a_sandbox_has_nothing_of_the_host() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    for kind in ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"] {
        let inside = sandbox.run(&format!("readlink /proc/self/ns/{kind}")).await.0;
        let outside = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        assert_ne!(inside.trim(), outside.to_string_lossy(), "the {kind} namespace is the host's");
    }
    let (text, _) = sandbox.run("grep -E '^(Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs)' /proc/self/status").await;
    for line in text.lines() {
        let value = line.split_ascii_whitespace().nth(1).unwrap();
        assert!(value == "1" || value.chars().all(|digit| digit == '0'), "{line}");
    }
    // Root inside is nobody outside, and can neither see nor signal the agent's things.
    let agent = fs::metadata(format!("/proc/{}", sandbox.agent_pid())).unwrap();
    assert_ne!(agent.uid(), 0);
    for denied in [
        "ls /.vivarium/run",
        "echo x > /.vivarium/identity.json",
        "mv /.vivarium /elsewhere",
        "rm -rf /.vivarium/identity.json",
        "mkdir /.vivarium/forged",
        "cat /proc/1/environ",
        "ls -l /proc/1/fd/0",
        "mount -t tmpfs none /mnt",
        "mknod /tmp/device b 8 0",
        "cat /root/.bashrc",
        "chroot /tmp /bin/true",
        "cat /etc/shadow",
        "ls /var/lib/dpkg",
    ] {
        let (text, status) = sandbox.run(&format!("{denied} 2>&1")).await;
        assert_ne!(status.state, ExecState::Exited { code: 0 }, "{denied} worked: {text}");
    }
    let (text, _) =
        sandbox.run("kill -9 1 2>/dev/null; kill -STOP 1 2>/dev/null; echo still; ls /proc/self/fd | wc -l").await;
    assert_eq!(text.split_ascii_whitespace().collect::<Vec<_>>(), ["still", "4"], "no inherited descriptors");
    let (text, _) = sandbox.run("ls /sys/class/net; cat /.vivarium/identity.json").await;
    assert_eq!(text.lines().next(), Some("lo"));
    assert!(text.contains(sandbox.id.as_str()) && text.contains("\"generation\":1"), "{text}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l20_changes_of_the_userland_stay_inside() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let name = format!("viv-test-{}", sandbox.id);
    let (_, status) = sandbox.run(&format!("touch /usr/bin/{name} /etc/{name} && rm /usr/bin/env")).await;
    assert_eq!(status.state, ExecState::Exited { code: 0 });
    assert!(!support::exists(format!("/usr/bin/{name}")) && !support::exists(format!("/etc/{name}")));
    assert!(support::exists("/usr/bin/env"));
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn a_user_of_the_image_can_be_named() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let spec =
        ExecSpec { user: Some("user".to_owned()), ..sh("id -u; id -g; echo $HOME; touch /etc/x 2>&1 || echo refused") };
    let execution = sandbox.start_spec(&spec).await;
    let (text, _) = sandbox.output(&execution).await;
    assert!(text.starts_with("1000\n1000\n/home/user\n") && text.ends_with("refused\n"), "{text}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let ground = Ground::new();
    let mut run = ground.viv().args(["run", "--", "/bin/sleep", "1000"]).stdout(Stdio::null()).spawn().unwrap();
    let sleeps = |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"/bin/sleep"));
    eventually("it runs", || ground.processes().iter().any(sleeps));
    kill(run.id(), Signal::INT);
    assert_eq!(run.wait().unwrap().code(), Some(130));
    ground.assert_nothing_left();
}

#[test]
fn bad_input_is_told_and_changes_nothing() {
    let ground = Ground::new();
    for (args, said) in [
        (vec!["exec", "sbx_nope", "--", "true"], "there is no sandbox sbx_nope"),
        (vec!["exec", "../../etc", "--", "true"], "does not start with"),
        (vec!["create", "--lifetime", "0"], "is over before it begins"),
        (vec!["create", "--image", "no/such/image"], "image \"no/such/image\" was not found"),
        (vec!["create", "--image", "./no/such/folder"], "was not found"),
        (vec!["create", "--image", "no such name"], "is not a name for an image"),
        (vec!["create", "--image", "/no/such/folder"], "was not found"),
        (vec!["create", "--memory", "0"], "must be at least"),
    ] {
        let output = ground.viv().args(&args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(said), "{args:?}: {text}");
    }
    ground.assert_nothing_left();
}

/// S1: every sandbox has ids, a name, a machine id and a boot id that no other one has.
#[tokio::test]
async fn s1_no_two_sandboxes_have_the_same_ids() {
    let ground = Ground::new();
    let (one, other) = (ground.create(Duration::from_secs(600)).await, ground.create(Duration::from_secs(600)).await);
    let mut seen = Vec::new();
    for sandbox in [&one, &other] {
        let owner = fs::metadata(format!("/proc/{}/root", sandbox.agent_pid())).unwrap().uid();
        assert!(owner >= 0x2000_0000, "{owner} is an id of the machine's own");
        let look = "cat /etc/machine-id /proc/sys/kernel/random/boot_id; hostname";
        seen.push((owner, sandbox.run(look).await.0));
    }
    assert_ne!(seen[0].0.abs_diff(seen[1].0) >> 16, 0, "the ranges overlap: {seen:?}");
    for (this, that) in seen[0].1.lines().zip(seen[1].1.lines()) {
        assert_ne!(this, that);
    }
    let lines: Vec<_> = seen[0].1.lines().collect();
    assert_eq!((lines.len(), lines[0].len(), lines[1].len()), (3, 32, 36), "{lines:?}");
    for (line, own) in [(0, "/etc/machine-id"), (1, "/proc/sys/kernel/random/boot_id")] {
        // Not every machine has the first one.
        assert_ne!(lines[line], fs::read_to_string(own).unwrap_or_default().trim(), "{own} is the machine's");
    }
    let (refused, _) = one.run("echo x > /proc/sys/kernel/random/boot_id || echo refused").await;
    assert!(refused.contains("refused"), "{refused}");

    // The next instance of the same sandbox is the same machine, started anew.
    one.destroy().await;
    let spec = InstanceSpec::host(600_000);
    ground.provider.create(&mutation(2, 2), &one.id, &ground.owner, &spec).await.unwrap();
    let again = viv_provider::InstanceRef { sandbox: one.id.clone(), generation: viv_core::Generation(2) };
    let (said, _) = ground.run(&again, 2, "cat /etc/machine-id /proc/sys/kernel/random/boot_id").await;
    let now: Vec<_> = said.lines().collect();
    assert_eq!(now[0], lines[0]);
    assert_ne!(now[1], lines[1]);
    ground.provider.destroy(&mutation(2, 2), &one.id).await.unwrap();
    other.destroy().await;
    assert_eq!(fs::read_dir(ground.data.join("ids")).unwrap().count(), 0, "ids are not given back");
    ground.assert_nothing_left();
}
