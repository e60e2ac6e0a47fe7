//! Every way to change something, so that rules about all of them are tested on all of them.

use viv_core::exec::TtySize;
use viv_core::file::ArchiveBounds;
use viv_core::{ExecutionId, RequestId, SnapshotId};

use super::program;
use super::subject::{Subject, reader};
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{DeadlineChange, InstanceRef, Mutation, SaveRequest};
use crate::limits::ResourceLimits;
use crate::provider::FileWrite;

/// What kind of change it is, because making and ending differ from the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// It makes an instance.
    Make,
    /// It ends an instance.
    End,
    /// It changes one that is there.
    Change,
    /// It changes what belongs to no generation, so only its token counts.
    Aside,
}

/// What came of one mutation.
#[derive(Debug)]
pub(super) struct Tried {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// What it takes; when that is not declared, `Unsupported` is the only right answer.
    pub(super) needs: Option<Capability>,
    pub(super) result: Result<(), ProviderError>,
}

/// What the mutations work on, beside their subject.
pub(super) struct Material {
    /// An execution of the subject.
    pub(super) execution: ExecutionId,
    /// A snapshot, if one could be made.
    pub(super) snapshot: SnapshotId,
    /// Something to fork.
    pub(super) source: InstanceRef,
}

/// Tries every mutation that there is, with the token and generation of `mutation` and operations of their own.
pub(super) async fn try_all(subject: &Subject<'_>, material: &Material, fresh: impl Fn() -> Mutation) -> Vec<Tried> {
    let (provider, sandbox) = (subject.lab.provider(), &subject.sandbox);
    let (owner, spec) = (subject.lab.owner(), subject.lab.spec());
    let Material { execution, snapshot, source } = material;
    let mut tried = Vec::new();
    let mut note = |name, kind, needs, result| tried.push(Tried { name, kind, needs, result });

    let created = provider.create(&fresh(), sandbox, &owner, &spec).await;
    note("create", Kind::Make, None, created.map(drop));
    let restored = provider.restore(&fresh(), sandbox, &owner, &spec, snapshot).await;
    note("restore", Kind::Make, Some(Capability::Restore), restored.map(drop));
    let forked = provider.fork(&fresh(), sandbox, &owner, &spec, source).await;
    note("fork", Kind::Make, Some(Capability::Fork), forked.map(drop));

    let extended = provider.extend(&fresh(), sandbox, DeadlineChange::AtLeastMs(1_000)).await;
    note("extend", Kind::Change, Some(Capability::Extend), extended.map(drop));
    let limited = provider.set_limits(&fresh(), sandbox, &ResourceLimits::default()).await;
    note("set_limits", Kind::Change, Some(Capability::LimitsLive), limited.map(drop));
    let frozen = provider.freeze(&fresh(), sandbox).await;
    note("freeze", Kind::Change, Some(Capability::Freeze), frozen);
    let thawed = provider.thaw(&fresh(), sandbox).await;
    note("thaw", Kind::Change, Some(Capability::Freeze), thawed);
    let request = SaveRequest { snapshot: subject.lab.fresh_snapshot(), live: true, memory: false };
    let saved = provider.save(&fresh(), sandbox, &request).await;
    note("save", Kind::Change, Some(Capability::SaveLive), saved.map(drop));

    let executed = provider.execute(&fresh(), sandbox, &subject.lab.fresh_execution(), &program::echo("late")).await;
    note("execute", Kind::Change, None, executed.map(drop));
    let given = provider.write_stdin(&fresh(), sandbox, execution, 0, b"late").await;
    note("write_stdin", Kind::Change, None, given.map(drop));
    let closed = provider.close_stdin(&fresh(), sandbox, execution).await;
    note("close_stdin", Kind::Change, None, closed);
    let signalled = provider.signal(&fresh(), sandbox, execution, 15).await;
    note("signal", Kind::Change, None, signalled);
    let resized = provider.resize(&fresh(), sandbox, execution, TtySize { rows: 1, cols: 1 }).await;
    note("resize", Kind::Change, Some(Capability::Tty), resized);
    let cancelled = provider.cancel(&fresh(), sandbox, execution).await;
    note("cancel", Kind::Change, None, cancelled.map(drop));

    let answered = provider.answer_request(&fresh(), sandbox, &RequestId::from_bytes([0; 16]), "late").await;
    note("answer_request", Kind::Change, Some(Capability::Requests), answered);

    let file = FileWrite { path: "/tmp/late".to_owned(), mode: None, user: None };
    let wrote = provider.file_write(&fresh(), sandbox, &file, reader(b"late")).await;
    note("file_write", Kind::Change, None, wrote.map(drop));
    let made = provider.file_mkdir(&fresh(), sandbox, "/tmp/late-dir").await;
    note("file_mkdir", Kind::Change, None, made);
    let moved = provider.file_move(&fresh(), sandbox, "/tmp", "/late").await;
    note("file_move", Kind::Change, None, moved);
    let removed = provider.file_remove(&fresh(), sandbox, "/tmp").await;
    note("file_remove", Kind::Change, None, removed);
    let bounds = ArchiveBounds::default();
    let unpacked = provider.archive_put(&fresh(), sandbox, "/tmp", bounds, reader(&[0; 1024])).await;
    note("archive_put", Kind::Change, None, unpacked.map(drop));

    // Removing what never was is harmless, and checked like any other.
    let needs = (!subject.lab.can_keep()).then_some(Capability::SaveStopped);
    let removed = provider.remove_snapshot(&fresh(), sandbox, &subject.lab.fresh_snapshot()).await;
    note("remove_snapshot", Kind::Aside, needs, removed);

    let destroyed = provider.destroy(&fresh(), sandbox).await;
    note("destroy", Kind::End, None, destroyed);
    tried
}

/// Checks each result with `right`; what is not declared has to be refused as that.
pub(super) fn assert_each(subject: &Subject<'_>, tried: Vec<Tried>, right: impl Fn(&Tried) -> bool) {
    for one in tried {
        let declared = one.needs.is_none_or(|capability| subject.lab.can(capability));
        let fine = if declared {
            right(&one)
        } else {
            matches!(&one.result, Err(ProviderError::Unsupported { capability, .. }) if Some(*capability) == one.needs)
        };
        assert!(fine, "{} answered {:?}", one.name, one.result);
    }
}
