//! Which protection it was that kept a fault from doing harm, by what the journal and the answers show.

use std::collections::BTreeSet;

use viv_api::event::Event;
use viv_api::sandbox::Phase;

/// A step of a phase did not come to its end, and is tried again.
const RETRYING: &str = "sandbox.retrying";

/// The first time that a save did not come to its end.
const SAVE_FAILED: &str = "sandbox.save_failed";

/// Why what does not show that it works is given up.
const GIVEN_UP: [&str; 4] = ["probe_failed", "provider_lost", "unresponsive", "memory_not_restored"];

const PROBED: &str = "probed before it is ready (probe_before_use)";

/// By name: those of gates are the engine's own (O9), the others say what they are. The events are those between the
/// fault and the moment at which the sandbox was verified to be well; `heard` is whether ends are pushed in this session.
pub(super) fn caught(events: &[Event], met: &[String], refused: bool, heard: bool) -> Vec<String> {
    let mut by = BTreeSet::new();
    // Where it is, as far as these events tell, and whether a look has found something since it was last well.
    let (mut phase, mut found) = (None, false);
    for event in events {
        let cause = event.cause.as_ref().map_or("", |cause| cause.code.as_str());
        if event.from == Some(Phase::Ready) && event.to == Some(Phase::Verifying) {
            by.insert("a probe that found it (evidence_ages)");
            found = true;
        }
        if event.kind == RETRYING {
            match phase {
                // A probe was not well, so it is not ready.
                Some(Phase::Verifying) => found = true,
                Some(_) => drop(by.insert("tried again as the same operation (L1)")),
                None => {}
            }
        }
        if event.from == Some(Phase::Verifying) && GIVEN_UP.contains(&cause) {
            found = true;
        }
        // Everything that runs was verified before: that alone has caught nothing.
        if event.from == Some(Phase::Verifying) && event.to.is_some() && found {
            by.insert(PROBED);
        }
        if event.to == Some(Phase::Ready) {
            found = false;
        }
        phase = event.to.or(phase);
        if event.to == Some(Phase::Lost) && event.from == Some(Phase::Ready) {
            // Who was told of it by the provider, or who found it gone when it was looked at.
            by.insert(if heard { "its end, pushed (pushed_ends)" } else { "looked at before it is used (T3)" });
        }
        if event.by.starts_with("reconciler:") {
            by.insert("a reconciler");
        }
        if event.kind == SAVE_FAILED || cause == "save_failed" {
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

#[cfg(test)]
mod tests {
    use viv_api::sandbox::Cause;

    use super::*;

    const FOUND: &str = "a probe that found it (evidence_ages)";

    fn event(kind: &str, moved: Option<(Phase, Phase)>, cause: &str) -> Event {
        let cause = Cause { code: cause.to_owned(), message: String::new(), at_ms: 1, by: "engine".to_owned() };
        Event {
            seq: 1,
            at_ms: 1,
            kind: kind.to_owned(),
            project: None,
            sandbox: None,
            generation: None,
            from: moved.map(|(from, _)| from),
            to: moved.map(|(_, to)| to),
            cause: Some(cause),
            by: "engine".to_owned(),
            address: None,
            message: String::new(),
            data: serde_json::Map::new(),
        }
    }

    fn moved(from: Phase, to: Phase, cause: &str) -> Event {
        event("sandbox.moved", Some((from, to)), cause)
    }

    fn retrying() -> Event {
        event(RETRYING, None, "made")
    }

    fn of(events: &[Event]) -> Vec<String> {
        caught(events, &[], false, true)
    }

    #[test]
    fn p5_what_is_made_as_ever_has_caught_nothing() {
        let made = [
            moved(Phase::Provisioning, Phase::Verifying, "made"),
            moved(Phase::Verifying, Phase::Ready, "verified"),
            moved(Phase::Ready, Phase::Hibernating, "user_hibernate"),
            moved(Phase::Hibernating, Phase::Hibernated, "saved"),
            moved(Phase::Hibernated, Phase::Resuming, "requested"),
            moved(Phase::Resuming, Phase::Verifying, "made"),
            moved(Phase::Verifying, Phase::Ready, "verified"),
        ];
        assert_eq!(of(&made), Vec::<String>::new());
    }

    #[test]
    fn p5_what_was_not_ready_before_a_probe_was_well_is_caught_by_the_probe() {
        let verifying = moved(Phase::Provisioning, Phase::Verifying, "made");
        let ready = moved(Phase::Verifying, Phase::Ready, "verified");
        assert_eq!(of(&[verifying.clone(), retrying(), ready.clone()]), [PROBED]);
        assert_eq!(of(&[verifying.clone(), moved(Phase::Verifying, Phase::Resuming, "probe_failed")]), [PROBED]);
        // Somebody stopped it meanwhile.
        assert_eq!(of(&[verifying, moved(Phase::Verifying, Phase::Stopping, "user_stop")]), Vec::<String>::new());
        // What was found before does not count for what is made later.
        let found = moved(Phase::Ready, Phase::Verifying, "probe_finding");
        assert_eq!(of(&[found.clone(), ready.clone()]), [FOUND, PROBED]);
        assert_eq!(of(&[found]), [FOUND]);
    }

    #[test]
    fn p5_an_effect_that_was_tried_again_is_told_as_that_and_not_as_a_probe() {
        let made = [
            moved(Phase::Hibernated, Phase::Resuming, "requested"),
            retrying(),
            moved(Phase::Resuming, Phase::Verifying, "made"),
            moved(Phase::Verifying, Phase::Ready, "verified"),
        ];
        assert_eq!(of(&made), ["tried again as the same operation (L1)"]);
    }

    #[test]
    fn p5_a_save_that_failed_kept_the_files_and_is_tried_again() {
        let failed = [
            moved(Phase::Ready, Phase::Hibernating, "user_hibernate"),
            event(SAVE_FAILED, None, "user_hibernate"),
            retrying(),
            moved(Phase::Hibernating, Phase::Hibernated, "saved"),
        ];
        let kept = "files kept until they are saved (L10)";
        assert_eq!(of(&failed), [kept, "tried again as the same operation (L1)"]);
        assert_eq!(of(&failed[..2]), [kept]);
    }

    #[test]
    fn p5_an_end_was_heard_or_seen() {
        let ended = [
            moved(Phase::Ready, Phase::Lost, "crashed"),
            moved(Phase::Lost, Phase::Provisioning, "requested"),
            moved(Phase::Provisioning, Phase::Verifying, "made"),
            moved(Phase::Verifying, Phase::Ready, "verified"),
        ];
        assert_eq!(of(&ended), ["its end, pushed (pushed_ends)"]);
        assert_eq!(caught(&ended, &[], false, false), ["looked at before it is used (T3)"]);
    }

    #[test]
    fn p5_what_was_answered_counts_beside_what_was_recorded() {
        let met = ["unreachable".to_owned(), "store_unavailable".to_owned()];
        let all = caught(&[], &met, true, true);
        assert_eq!(all, ["an old generation is refused (generation_check)", "asked again under the same key (L1)"]);
    }
}
