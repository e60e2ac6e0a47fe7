//! Starting commands, and how they end (X1, X4, X6).

use viv_core::exec::{ExecSpec, ExecState};

use super::lab::{Answer, Lab, assert_refused};
use super::program::{self, Program};
use crate::error::ProviderError;
use crate::instance::InstanceSpec;

pub(super) async fn echoes_a_nonce_exactly(lab: &Lab) {
    let subject = lab.subject().await;
    let nonce = lab.nonce();
    let spec = program::echo(&nonce);
    let heard = subject.run(&spec).await;
    assert_eq!(heard.status.state, ExecState::Exited { code: 0 });
    assert_eq!(heard.status.argv, spec.told_argv(), "what it was told to run is kept with how it stands");
    assert_eq!(heard.stdout_text(), format!("{nonce}\n"));
    assert_eq!(heard.status.output_bytes, nonce.len() as u64 + 1);
    assert!(heard.cuts.is_empty());
}

pub(super) async fn exit_code_is_told(lab: &Lab) {
    let subject = lab.subject().await;
    for code in [0, 3, 255] {
        let heard = subject.run(&Program::Exit { code }.spec()).await;
        assert_eq!(heard.status.state, ExecState::Exited { code });
    }
}

pub(super) async fn death_by_signal_is_told(lab: &Lab) {
    let subject = lab.subject().await;
    for signal in [9, 15] {
        let heard = subject.run(&Program::KillSelf { signal }.spec()).await;
        assert_eq!(heard.status.state, ExecState::Signalled { signal });
    }
}

/// A command that cannot start is an execution that failed, so that it has an id, a status and an end.
async fn assert_fails(lab: &Lab, spec: &ExecSpec) {
    let subject = lab.subject().await;
    let heard = subject.run(spec).await;
    assert!(matches!(&heard.status.state, ExecState::Failed { what } if !what.is_empty()), "{:?}", heard.status);
    let nonce = lab.nonce();
    assert_eq!(subject.run_ok(&program::echo(&nonce)).await, format!("{nonce}\n"), "the instance was harmed");
}

pub(super) async fn missing_program_fails(lab: &Lab) {
    assert_fails(lab, &program::missing()).await;
}

pub(super) async fn missing_directory_fails(lab: &Lab) {
    assert_fails(lab, &ExecSpec { cwd: Some("/no/such/directory".to_owned()), ..program::echo("never") }).await;
}

pub(super) async fn missing_user_fails(lab: &Lab) {
    assert_fails(lab, &ExecSpec { user: Some("no-such-user".to_owned()), ..program::echo("never") }).await;
}

pub(super) async fn empty_command_is_invalid(lab: &Lab) {
    let subject = lab.subject().await;
    let started = subject.execute(&lab.fresh_execution(), &ExecSpec::default()).await;
    assert_refused!(started, ProviderError::Invalid { .. });
    assert!(lab.provider().executions(&subject.instance()).await.must("executions").is_empty());
}

pub(super) async fn environment_is_merged(lab: &Lab) {
    let mut spec = lab.spec();
    spec.env.insert("KEPT".to_owned(), "instance".to_owned());
    spec.env.insert("CHANGED".to_owned(), "instance".to_owned());
    let subject = lab.subject_of(&spec).await;
    for (name, expected) in [("KEPT", "instance"), ("CHANGED", "command"), ("ADDED", "a b\"c'$d"), ("UNSET", "")] {
        let mut command = Program::ReadEnv { name: name.to_owned() }.spec();
        command.env.insert("CHANGED".to_owned(), "command".to_owned());
        command.env.insert("ADDED".to_owned(), "a b\"c'$d".to_owned());
        assert_eq!(subject.run_ok(&command).await, format!("{expected}\n"), "{name}");
    }
}

pub(super) async fn starts_in_the_working_directory(lab: &Lab) {
    let spec = InstanceSpec { workdir: "/tmp/made/for-it".to_owned(), ..lab.spec() };
    let subject = lab.subject_of(&spec).await;
    assert_eq!(subject.run_ok(&Program::PrintDirectory.spec()).await, "/tmp/made/for-it\n");
}

pub(super) async fn starts_in_the_directory_asked_for(lab: &Lab) {
    let subject = lab.subject().await;
    let spec = ExecSpec { cwd: Some("/tmp".to_owned()), ..Program::PrintDirectory.spec() };
    assert_eq!(subject.run_ok(&spec).await, "/tmp\n");
}

pub(super) async fn runs_as_root_of_the_sandbox(lab: &Lab) {
    let subject = lab.subject().await;
    assert_eq!(subject.run_ok(&Program::PrintUser.spec()).await, "0\n");
}

pub(super) async fn repeated_starts_once(lab: &Lab) {
    let subject = lab.subject().await;
    let spec = Program::Append { path: "/tmp/starts".to_owned() }.spec();
    let execution = lab.fresh_execution();
    let mutation = subject.mutation();
    let (one, other) = tokio::join!(
        lab.provider().execute(&mutation, &subject.sandbox, &execution, &spec),
        lab.provider().execute(&mutation, &subject.sandbox, &execution, &spec),
    );
    assert_eq!(one.must("execute").id, other.must("execute, repeated").id);
    assert_eq!(subject.until_final(&execution).await.state, ExecState::Exited { code: 0 });
    // Also by another operation and after its end: the id decides.
    let late = subject.execute(&execution, &spec).await.must("execute, repeated late");
    assert_eq!(late.state, ExecState::Exited { code: 0 });
    assert_eq!(subject.read("/tmp/starts").await, b"x\n", "it was started more than once");
    assert_eq!(lab.provider().executions(&subject.instance()).await.must("executions").len(), 1);
}

pub(super) async fn same_id_with_another_command_conflicts(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::echo("one")).await;
    let other = subject.execute(&execution, &program::echo("another")).await;
    assert_refused!(other, ProviderError::Conflict { .. });
    assert_eq!(subject.hear(&execution, 0, true).await.stdout_text(), "one\n");
}

pub(super) async fn unknown_execution_is_not_found(lab: &Lab) {
    let subject = lab.subject().await;
    let unknown = lab.fresh_execution();
    let (provider, sandbox) = (lab.provider(), &subject.sandbox);
    assert_refused!(provider.execution(&subject.instance(), &unknown).await, ProviderError::NotFound { .. });
    assert_refused!(subject.signal(&unknown, 15).await, ProviderError::NotFound { .. });
    assert_refused!(subject.input(&unknown, 0, b"x").await, ProviderError::NotFound { .. });
    let closed = provider.close_stdin(&subject.mutation(), sandbox, &unknown).await;
    assert_refused!(closed, ProviderError::NotFound { .. });
    let cancelled = provider.cancel(&subject.mutation(), sandbox, &unknown).await;
    assert_refused!(cancelled, ProviderError::NotFound { .. });
}

pub(super) async fn are_listed_oldest_first(lab: &Lab) {
    let subject = lab.subject().await;
    assert!(lab.provider().executions(&subject.instance()).await.must("executions").is_empty());
    let mut started = Vec::new();
    for spec in [program::echo("a"), program::sleep(), program::missing(), program::echo("b")] {
        started.push(subject.start(&spec).await);
    }
    for done in [0, 2, 3] {
        subject.until_final(&started[done]).await;
    }
    let listed = lab.provider().executions(&subject.instance()).await.must("executions");
    assert_eq!(listed.iter().map(|status| status.id.clone()).collect::<Vec<_>>(), started);
    assert_eq!(listed[0].state, ExecState::Exited { code: 0 });
    assert_eq!(listed[1].state, ExecState::Running);
    assert!(listed[1].pid.is_some(), "what runs has a pid");
    assert!(matches!(listed[2].state, ExecState::Failed { .. }));
    assert_eq!(listed[3].state, ExecState::Exited { code: 0 });
}

pub(super) async fn without_input_reads_end_of_file(lab: &Lab) {
    let subject = lab.subject().await;
    let spec = ExecSpec { stdin: false, ..Program::Cat.spec() };
    let execution = subject.start(&spec).await;
    assert_eq!(subject.until_final(&execution).await.state, ExecState::Exited { code: 0 });
    assert_refused!(subject.input(&execution, 0, b"x").await, ProviderError::Conflict { .. });
}
