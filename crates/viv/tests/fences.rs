//! Who is late is refused, wherever he was held up (L15, T5, incident 10).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use support::{Ground, eventually, kill, mutation, sh};
use viv_core::{ExecutionId, Generation, OwnerMark};
use viv_provider::{DeadlineChange, InstanceRef, InstanceSpec, InstanceState, PageRequest, Provider, ProviderError};

/// A process is stopped while it creates generation 1; meanwhile that is destroyed and generation 2 made.
#[tokio::test]
async fn l15_a_create_that_was_away_does_not_touch_the_next_generation() {
    let ground = Ground::new();
    let runtime = ground.data.join("hanging-runtime");
    std::fs::write(&runtime, "#!/bin/sh\n[ \"$1\" = --version ] && exec echo hanging\nexec sleep 1000\n").unwrap();
    std::fs::set_permissions(&runtime, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut late = ground.viv().env("VIV_RUNTIME", &runtime).arg("create").stderr(Stdio::null()).spawn().unwrap();
    let by_hand: OwnerMark = "by-hand".parse().unwrap();
    let folder = ground.data.join("instances");
    let mut name = None;
    eventually("it is being made", || {
        let entries = std::fs::read_dir(&folder).unwrap().flatten().map(|entry| entry.path());
        name = entries
            .filter(|path| path.join("shim.json").exists())
            .find_map(|path| path.file_name()?.to_str()?.parse::<viv_core::SandboxId>().ok());
        name.is_some()
    });
    let sandbox = name.unwrap();
    kill(late.id(), Signal::STOP);

    ground.provider.destroy(&mutation(1, 1), &sandbox).await.unwrap();
    let spec = InstanceSpec::host(600_000);
    ground.provider.create(&mutation(2, 2), &sandbox, &by_hand, &spec).await.unwrap();
    kill(late.id(), Signal::CONT);
    assert!(!late.wait().unwrap().success(), "the late create said that it had worked");

    let second = InstanceRef { sandbox: sandbox.clone(), generation: Generation(2) };
    assert_eq!(ground.provider.observe(&second).await.unwrap().state, InstanceState::Running);
    let execution = ExecutionId::from_bytes(support::fresh_bytes());
    ground.provider.execute(&mutation(2, 2), &sandbox, &execution, &sh("true")).await.unwrap();
    ground.provider.destroy(&mutation(2, 2), &sandbox).await.unwrap();
    ground.assert_nothing_left();
}

/// A destroy of generation 1 is stopped half way; meanwhile another finishes it and makes generation 2.
#[tokio::test]
async fn l15_a_destroy_that_was_away_does_not_touch_the_next_generation() {
    let ground = Ground::new();
    let sandbox = support::stdout(&ground.viv().arg("create").output().unwrap());
    let id: viv_core::SandboxId = sandbox.parse().unwrap();
    let folder = ground.data.join("instances").join(&sandbox);
    let identity: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("shim.json")).unwrap()).unwrap();
    let shim = identity["shim"]["pid"].as_u64().unwrap() as u32;
    // The shim does not answer, so the destroy waits for it, and is stopped while it waits.
    kill(shim, Signal::STOP);
    let mut late = ground.viv().args(["rm", &sandbox]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("the destroy has begun", || {
        std::fs::read_dir(format!("/proc/{}/fd", late.id())).is_ok_and(|fds| {
            fds.flatten()
                .any(|fd| std::fs::read_link(fd.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:")))
        })
    });
    kill(late.id(), Signal::STOP);
    ground.provider.destroy(&mutation(1, 2), &id).await.unwrap();
    let by_hand: OwnerMark = "by-hand".parse().unwrap();
    ground.provider.create(&mutation(2, 3), &id, &by_hand, &InstanceSpec::host(600_000)).await.unwrap();
    kill(late.id(), Signal::CONT);
    late.wait().unwrap();
    let second = InstanceRef { sandbox: id.clone(), generation: Generation(2) };
    assert_eq!(ground.provider.observe(&second).await.unwrap().state, InstanceState::Running);
    ground.provider.destroy(&mutation(2, 3), &id).await.unwrap();
    ground.assert_nothing_left();
}

/// Somebody was admitted at the fence, was held up, and comes to the shim after a newer token was seen.
#[tokio::test]
async fn l15_the_shim_hears_of_tokens_that_others_brought() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let execution = ExecutionId::from_bytes(support::fresh_bytes());
    ground.provider.execute(&mutation(1, 7), &sandbox.id, &execution, &sh("true")).await.unwrap();

    let mut late = UnixStream::connect(sandbox.folder().join("shim.sock")).unwrap();
    let request = serde_json::json!({ "op": "extend", "mutation": mutation(1, 1), "change": { "at_least_ms": 1 } });
    writeln!(late, "{request}").unwrap();
    let mut answer = String::new();
    BufReader::new(late).read_line(&mut answer).unwrap();
    assert!(answer.contains("fenced"), "{answer}");
    sandbox.ground.provider.destroy(&mutation(1, 7), &sandbox.id).await.unwrap();
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l15_a_repeated_create_raises_the_token() {
    let ground = Ground::new();
    let id = viv_core::SandboxId::from_bytes(support::fresh_bytes());
    let spec = InstanceSpec::host(600_000);
    let first = mutation(1, 1);
    ground.provider.create(&first, &id, &ground.owner, &spec).await.unwrap();
    let again = viv_provider::Mutation { token: viv_core::FencingToken(5), ..first };
    ground.provider.create(&again, &id, &ground.owner, &spec).await.unwrap();
    let late = ground.provider.extend(&mutation(1, 1), &id, DeadlineChange::AtLeastMs(1)).await;
    assert!(matches!(late, Err(ProviderError::Fenced { .. })), "{late:?}");
    ground.provider.destroy(&mutation(1, 5), &id).await.unwrap();
    ground.assert_nothing_left();
}

#[tokio::test]
async fn t7_a_record_that_cannot_be_read_is_neither_hidden_nor_immortal() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    std::fs::write(sandbox.folder().join("record.json"), "").unwrap();
    let page = ground.provider.list(&ground.owner, PageRequest::default()).await.unwrap();
    assert!(page.is_partial() && page.items.is_empty(), "{page:?}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l20_a_full_disk_can_be_emptied_by_destroying() {
    if !support::is_in_namespace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        let small = format!("mount -t tmpfs -o size=48m none {path}\nexport TMPDIR={path}");
        return support::again_in_namespace("l20_a_full_disk_can_be_emptied_by_destroying", &small);
    }
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    // Not even what it says about that can be kept.
    let execution = sandbox.start("cat /dev/zero > /workspace/full; echo x > /workspace/more").await;
    let mut output = ground.provider.attach(&sandbox.instance(), &execution, 0, true).await.unwrap();
    while let Some(event) = output.next().await.unwrap() {
        if let viv_core::exec::OutputEvent::End(status) = event {
            assert_ne!(status.state, viv_core::exec::ExecState::Exited { code: 0 }, "the disk is not full");
        }
    }
    ground.provider.destroy(&mutation(1, 9), &sandbox.id).await.unwrap();
    ground.assert_nothing_left();
}
