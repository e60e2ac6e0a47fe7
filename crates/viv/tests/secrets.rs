//! S6: what was given to a sandbox in confidence is where it is needed, and nowhere else.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use support::{Ground, eventually, fresh_bytes, mutation, sh};
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::{SandboxId, SnapshotId};
use viv_provider::{InstanceSpec, Provider, SaveRequest};

/// Nothing else on the machine holds these.
fn secret(what: &str) -> String {
    format!("{what}-{:032x}", u128::from_ne_bytes(fresh_bytes()))
}

/// Files below a folder that hold any of the secrets.
fn holding(folder: &Path, secrets: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() {
            found.extend(holding(&path, secrets));
        } else if kind.is_file() && holds(&fs::read(&path).unwrap_or_default(), secrets) {
            found.push(path);
        }
    }
    found
}

fn holds(bytes: &[u8], secrets: &[&str]) -> bool {
    secrets.iter().any(|secret| bytes.windows(secret.len()).any(|window| window == secret.as_bytes()))
}

/// Command lines and environments of all processes but this one, and of those inside.
fn processes_holding(secrets: &[&str], inside: &[u32]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if pid == std::process::id() || inside.contains(&pid) {
            continue;
        }
        for file in ["cmdline", "environ", "comm"] {
            if holds(&fs::read(entry.path().join(file)).unwrap_or_default(), secrets) {
                found.push(format!("{pid}/{file}"));
            }
        }
    }
    found
}

/// Those whose environment is the point: what runs inside.
fn workloads(ground: &Ground, sandbox: &SandboxId) -> Vec<u32> {
    let agent = fs::read_to_string(ground.data.join("instances").join(sandbox.as_str()).join("init.pid")).unwrap();
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let own = namespace(agent.trim());
    let all = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    all.filter(|pid| pid != agent.trim() && namespace(pid) == own).filter_map(|pid| pid.parse().ok()).collect()
}

#[tokio::test]
async fn s6_secrets_are_nowhere_but_where_they_are_needed() {
    let ground = Ground::new();
    let (of_spec, of_exec, of_stdin) = (secret("spec"), secret("exec"), secret("stdin"));
    let secrets = [of_spec.as_str(), of_exec.as_str(), of_stdin.as_str()];
    let mut spec = InstanceSpec::host(600_000);
    spec.env.insert("API_KEY".to_owned(), of_spec.clone());
    let sandbox = ground.create_from(spec.clone()).await;

    let mut command =
        ExecSpec { stdin: true, ..sh("read line; echo \"$API_KEY $TOKEN $line\" | wc -c; exec sleep 600") };
    command.env.insert("TOKEN".to_owned(), of_exec.clone());
    let execution = sandbox.start_spec(&command).await;
    let line = format!("{of_stdin}\n");
    ground.provider.write_stdin(&mutation(1, 1), &sandbox.id, &execution, 0, line.as_bytes()).await.unwrap();
    let length = (of_spec.len() + of_exec.len() + of_stdin.len() + 3).to_string();
    eventually("the command has all of them", || {
        let output = sandbox.folder().join("run/exec").join(execution.as_str());
        !holding(&output, &[length.as_str()]).is_empty()
    });

    // The agent and the shim need the first one; nobody else may read it there.
    for path in holding(&ground.data, &secrets) {
        let allowed = ["record.json", "run/agent.json"].map(|name| sandbox.folder().join(name));
        assert!(allowed.contains(&path), "{} holds a secret", path.display());
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{} can be read by others", path.display());
    }
    let inside = workloads(&ground, &sandbox.id);
    assert!(!inside.is_empty());
    assert_eq!(processes_holding(&secrets, &inside), Vec::<String>::new());

    // Not in what is saved or exported, nor told by errors.
    let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: false, memory: false };
    let refused = ground.provider.create(&mutation(1, 1), &sandbox.id, &ground.owner, &spec).await.unwrap_err();
    assert!(!holds(format!("{refused} {refused:?}").as_bytes(), &secrets), "{refused:?}");
    ground.provider.save(&mutation(1, 1), &sandbox.id, &request).await.unwrap();
    sandbox.destroy().await;
    let file = ground.data.join("exported");
    ground.provider.export_snapshot(&request.snapshot, &file).unwrap();
    eventually("nothing of it is left", || holding(&ground.data, &secrets).is_empty());
    assert_eq!(processes_holding(&secrets, &[]), Vec::<String>::new());
    let seen = ground.provider.snapshot(&request.snapshot).await.unwrap();
    assert!(!holds(format!("{seen:?}").as_bytes(), &secrets));
    fs::remove_file(file).unwrap();

    // What is restored does not bring them back by itself.
    let restored = SandboxId::from_bytes(fresh_bytes());
    let bare = InstanceSpec::host(600_000);
    ground.provider.restore(&mutation(1, 1), &restored, &ground.owner, &bare, &request.snapshot).await.unwrap();
    let again = viv_provider::InstanceRef { sandbox: restored.clone(), generation: viv_core::Generation(1) };
    let (said, status) = ground.run(&again, 1, "echo \"[$API_KEY]\"").await;
    assert_eq!((said.as_str(), status.state), ("[]\n", ExecState::Exited { code: 0 }));
    ground.provider.destroy(&mutation(1, 1), &restored).await.unwrap();
    ground.provider.remove_snapshot(&mutation(1, 1), &sandbox.id, &request.snapshot).await.unwrap();
    ground.assert_nothing_left();
    ground.assert_no_layer_left();
}
