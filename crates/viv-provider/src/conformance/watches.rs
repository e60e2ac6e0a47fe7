//! Hearing of changes of files.

use viv_core::file::{WatchEvent, WatchKind};

use super::lab::{Answer, Lab, SOON_MS, assert_refused, assert_unsupported};
use super::program::Program;
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::provider::WatchStream;

/// Most events that one change may cause.
const EVENTS_MAX: usize = 1_000;

/// Starts a watch, where there are watches.
async fn watch(subject: &Subject<'_>, path: &str, recursive: bool) -> Option<Box<dyn WatchStream>> {
    let watched = subject.lab.provider().file_watch(&subject.instance(), path, recursive).await;
    if subject.lab.can(Capability::FileWatch) {
        return Some(watched.must("file_watch"));
    }
    assert_unsupported(watched, Capability::FileWatch);
    None
}

/// Waits for an event of one of these kinds at a path; others may come before.
async fn expect(lab: &Lab, stream: &mut Box<dyn WatchStream>, path: &str, kinds: &[WatchKind]) -> WatchEvent {
    let heard = async {
        for _ in 0..EVENTS_MAX {
            let event = stream.next().await.must("next").expect("the instance lives");
            if event.path == path && kinds.contains(&event.kind) {
                return event;
            }
        }
        panic!("{EVENTS_MAX} events, and none of {kinds:?} at {path}");
    };
    lab.drive("a change", SOON_MS, heard).await
}

/// Writing may show as any of these, depending on how it is done.
const APPEARED: &[WatchKind] = &[WatchKind::Created, WatchKind::Modified, WatchKind::MovedTo];

pub(super) async fn changes_are_told(lab: &Lab) {
    let subject = lab.subject().await;
    subject.mkdir("/tmp/watched").await.must("file_mkdir");
    let Some(mut stream) = watch(&subject, "/tmp/watched", false).await else { return };
    subject.run_ok(&Program::Append { path: "/tmp/watched/by-command".to_owned() }.spec()).await;
    let created = expect(lab, &mut stream, "by-command", &[WatchKind::Created]).await;
    assert!(!created.is_dir);
    expect(lab, &mut stream, "by-command", &[WatchKind::Modified]).await;
    subject.write("/tmp/watched/by-api", b"x").await;
    expect(lab, &mut stream, "by-api", APPEARED).await;
    subject.mkdir("/tmp/watched/dir").await.must("file_mkdir");
    assert!(expect(lab, &mut stream, "dir", &[WatchKind::Created]).await.is_dir);
    subject.rename("/tmp/watched/by-api", "/tmp/watched/renamed").await.must("file_move");
    expect(lab, &mut stream, "by-api", &[WatchKind::MovedFrom]).await;
    expect(lab, &mut stream, "renamed", &[WatchKind::MovedTo]).await;
    subject.remove("/tmp/watched/renamed").await.must("file_remove");
    expect(lab, &mut stream, "renamed", &[WatchKind::Removed]).await;
}

pub(super) async fn changes_far_below_are_told_when_asked(lab: &Lab) {
    let subject = lab.subject().await;
    subject.mkdir("/tmp/watched/below").await.must("file_mkdir");
    let Some(mut deep) = watch(&subject, "/tmp/watched", true).await else { return };
    let mut flat = watch(&subject, "/tmp/watched", false).await.expect("declared a moment ago");
    subject.write("/tmp/watched/below/file", b"x").await;
    subject.write("/tmp/watched/last", b"x").await;
    expect(lab, &mut deep, "below/file", APPEARED).await;
    expect(lab, &mut deep, "last", APPEARED).await;
    // A watch of the directory itself hears of the later change without having heard of the one below.
    let heard = async {
        loop {
            let event = flat.next().await.must("next").expect("the instance lives");
            assert!(!event.path.contains('/'), "heard of {} without asking", event.path);
            if event.path == "last" {
                return;
            }
        }
    };
    lab.drive("the later change", SOON_MS, heard).await;
}

pub(super) async fn watching_nothing_is_not_found(lab: &Lab) {
    let subject = lab.subject().await;
    let watched = lab.provider().file_watch(&subject.instance(), "/tmp/no-such-directory", false).await;
    if lab.can(Capability::FileWatch) {
        assert_refused!(watched, ProviderError::NotFound { .. });
    } else {
        assert_unsupported(watched, Capability::FileWatch);
    }
}

pub(super) async fn the_end_is_told(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(mut stream) = watch(&subject, "/tmp", false).await else { return };
    subject.destroy().await;
    let ended = async {
        for _ in 0..EVENTS_MAX {
            if stream.next().await.must("next").is_none() {
                return;
            }
        }
        panic!("{EVENTS_MAX} events, and no end");
    };
    lab.drive("the end of the watch", SOON_MS, ended).await;
}
