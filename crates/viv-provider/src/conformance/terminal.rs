//! Commands on a terminal (X4).

use viv_core::ExecutionId;
use viv_core::exec::{ExecSpec, ExecState, Stream, TtySize};

use super::lab::{Answer, Lab, assert_refused, assert_unsupported};
use super::program::{self, Program};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;

const SIZE: TtySize = TtySize { rows: 24, cols: 80 };

async fn resize(subject: &Subject<'_>, execution: &ExecutionId, size: TtySize) -> Result<(), ProviderError> {
    subject.lab.provider().resize(&subject.mutation(), &subject.sandbox, execution, size).await
}

/// Starts a command on a terminal, where there are terminals.
async fn start(subject: &Subject<'_>, program: Program) -> Option<ExecutionId> {
    let spec = ExecSpec { tty: Some(SIZE), ..program.spec() };
    let execution = subject.lab.fresh_execution();
    let started = subject.execute(&execution, &spec).await;
    if subject.lab.can(Capability::Tty) {
        started.must("execute on a terminal");
        return Some(execution);
    }
    assert_unsupported(started, Capability::Tty);
    None
}

pub(super) async fn size_is_seen_inside(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(execution) = start(&subject, Program::TerminalSize).await else { return };
    let heard = subject.hear(&execution, 0, true).await;
    assert_eq!(heard.stdout_text().trim(), "24 80");
    assert!(heard.bytes(Stream::Stderr).is_empty(), "a terminal has one stream");
    assert_eq!(heard.status.state, ExecState::Exited { code: 0 });
}

pub(super) async fn resize_is_seen_inside(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(execution) = start(&subject, Program::TerminalSizes).await else { return };
    subject.input_all(&execution, 0, b"a\n").await;
    subject.until_written(&execution, "24 80").await;
    resize(&subject, &execution, TtySize { rows: 40, cols: 100 }).await.must("resize");
    subject.input_all(&execution, 2, b"b\n").await;
    subject.until_written(&execution, "40 100").await;
    assert_eq!(subject.cancel(&execution).await.state, ExecState::Cancelled);
}

pub(super) async fn resize_without_a_terminal_conflicts(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::sleep()).await;
    let resized = resize(&subject, &execution, SIZE).await;
    if lab.can(Capability::Tty) {
        assert_refused!(resized, ProviderError::Conflict { .. });
    } else {
        assert_unsupported(resized, Capability::Tty);
    }
}
