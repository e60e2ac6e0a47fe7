//! Which protection it was that kept a fault from doing harm, by what the journal and the answers show.

use std::collections::BTreeSet;

use viv_api::event::Event;
use viv_api::sandbox::Phase;

/// By name: those of gates are the engine's own (O9), the others say what they are. The events are those between the
/// fault and the moment at which the sandbox was verified to be well; `heard` is whether ends are pushed in this session.
pub(super) fn caught(events: &[Event], met: &[String], refused: bool, heard: bool) -> Vec<String> {
    let mut by = BTreeSet::new();
    for event in events {
        let cause = event.cause.as_ref().map_or("", |cause| cause.code.as_str());
        if event.from == Some(Phase::Ready) && event.to == Some(Phase::Verifying) {
            by.insert("a probe that found it (evidence_ages)");
        }
        if event.from == Some(Phase::Verifying) && event.to == Some(Phase::Ready) {
            by.insert("probed before it is ready (probe_before_use)");
        }
        if event.to == Some(Phase::Lost) && event.from == Some(Phase::Ready) {
            // Who was told of it by the provider, or who found it gone when it was looked at.
            by.insert(if heard { "its end, pushed (pushed_ends)" } else { "looked at before it is used (T3)" });
        }
        if event.by.starts_with("reconciler:") {
            by.insert("a reconciler");
        }
        if cause == "save_failed" {
            by.insert("files kept until they are saved (L10)");
        }
    }
    for code in met {
        by.insert(match code.as_str() {
            "unreachable" | "store_unavailable" | "shutting_down" => "asked again under the same key (L1)",
            "provider_unavailable" => "refused at once while the provider fails (breaker)",
            "not_running" | "lifecycle_locked" => "not handed out before it is verified (T4)",
            _ => "asked again",
        });
    }
    if refused {
        by.insert("an old generation is refused (generation_check)");
    }
    by.into_iter().map(str::to_owned).collect()
}
