//! The suite that every store has to pass (P6).
//!
//! ```text
//!   conformance_tests!(world) ──► one #[test] per case ──► run_named ──► a case on a Lab ──► World::store()
//! ```
//!
//! An implementer writes a [`World`] and calls [`crate::conformance_tests!`] with an expression that makes one; every
//! case gets its own, with nothing in it. No case depends on how fast anything is.

mod backups;
mod executions;
mod idempotency;
mod journal;
mod keys;
mod lab;
mod leases;
mod listing;
mod names;
mod ownership;
mod quotas;
mod records;
mod retention;
mod schedules;
mod snapshots;
mod subscriptions;
mod tasks;
mod times;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::store::Store;

pub use lab::Lab;

/// Most real time that one case may take; what takes longer hangs.
const CASE_MS_MAX: u64 = 120_000;

/// Threads of a case's runtime: enough that calls are really made at once.
const CASE_THREADS: usize = 4;

/// What an implementer hands to the suite. Every case gets a world of its own.
#[async_trait]
pub trait World: Send + Sync {
    /// The store under test, empty at first.
    fn store(&self) -> Arc<dyn Store>;

    /// Another way to the same data, as a second process would have.
    async fn another(&self) -> Arc<dyn Store>;

    /// Where a backup can be made to.
    fn backup_path(&self) -> PathBuf;

    /// A store that holds what was copied there.
    async fn restored(&self, from: &Path) -> Arc<dyn Store>;
}

/// The future of one case.
pub type CaseFuture<'l> = Pin<Box<dyn Future<Output = ()> + 'l>>;

/// One promise of the trait, as a test.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The theme and the promise: `records::a_stale_version_conflicts`.
    pub name: &'static str,
    /// The test; it panics when the promise does not hold.
    pub run: for<'l> fn(&'l Lab) -> CaseFuture<'l>,
}

/// The list of all cases, told once: both the table and the tests are made from it.
#[doc(hidden)]
#[macro_export]
macro_rules! __store_cases {
    ($then:ident $args:tt) => {
        $crate::$then! { $args
            records {
                what_is_written_is_read_back,
                what_was_never_written_is_none,
                acknowledged_is_seen_at_once_by_others,
                a_stale_version_conflicts,
                a_new_one_that_is_there_conflicts,
                a_change_of_nothing_conflicts,
                version_zero_is_refused,
                of_many_at_once_one_wins_each_version,
                a_refused_commit_leaves_nothing,
                refusals_come_in_order,
            }
            names {
                belong_to_the_living,
                are_free_after_a_stop,
                are_free_after_a_delete,
                are_per_project,
                are_kept_through_changes,
                of_many_at_once_one_gets_it,
                are_found_living_first_then_newest,
            }
            quotas {
                l18_refuse_with_limit_and_use,
                l18_count_what_may_live,
                l18_hold_for_many_at_once,
                l18_do_not_hold_back_changes,
                l18_add_up_limits,
            }
            idempotency {
                l1_two_hundred_at_once_make_one,
                l1_a_repeat_tells_what_was_made,
                l1_keys_are_per_project_and_route,
                l1_a_refused_create_leaves_its_key_free,
                l1_what_was_made_beside_a_record_is_told_and_kept_for_its_time,
            }
            journal {
                o7_lines_are_read_back_whole,
                o7_cursors_grow_and_pages_go_on,
                o7_the_tail_is_read_backwards,
                o7_filters_hold_in_both_directions,
                o7_since_is_by_the_time_of_each_line,
                o7_pages_of_what_is_rare_end_and_miss_nothing,
                o7_the_bell_rings_with_the_newest,
                o7_a_follower_misses_nothing,
                appending_nothing_tells_where_it_stands,
            }
            leases {
                l15_are_held_by_one,
                l15_are_renewed_under_the_same_token,
                l15_expired_ones_are_taken_under_a_new_token,
                l15_kinds_and_sandboxes_are_apart,
                l15_tokens_grow_over_everything,
                l15_of_many_at_once_one_wins,
                l15_a_late_release_changes_nothing,
                l15_a_new_owner_takes_them_anew,
                incident_35_go_in_the_transaction_that_ends_their_sandbox,
                l15_tokens_are_raised_above_what_was_seen,
                l20_are_taken_only_on_what_is_not_over,
                l15_a_token_that_nobody_holds_is_greater_than_all_before,
            }
            ownership {
                j8_the_owner_is_told,
                j8_epochs_grow,
                j8_every_write_of_the_superseded_is_refused,
                j8_nobody_writes_without_owning,
                j8_after_a_takeover_nothing_late_gets_in,
            }
            listing {
                is_newest_first,
                equals_a_model_for_every_filter,
                shows_each_once_while_others_come,
                refuses_what_no_page_gave,
                counts_equal_what_is_there,
                labels_change_with_the_record,
            }
            times {
                due_is_soonest_first,
                due_follows_the_record,
                touch_only_grows,
                touch_is_no_change,
                l6_who_is_used_meanwhile_does_not_idle,
                a_commit_does_not_undo_a_touch,
            }
            snapshots {
                l11_are_written_with_the_record_or_not_at_all,
                l11_a_stale_version_conflicts,
                l11_what_is_in_use_does_not_go,
                l11_nothing_begins_with_what_is_not_ready,
                l11_of_a_use_and_a_removal_at_once_one_wins,
                l11_a_fork_makes_all_or_none,
                l18_a_fork_counts_all_of_its_own,
                are_listed_newest_first_by_every_filter,
                are_forgotten_with_a_line_once,
                l1_one_that_came_to_nothing_frees_its_keys,
            }
            keys {
                s3_are_kept_and_replaced_with_a_line,
                meta_is_set_once,
                meta_of_many_at_once_is_one,
                meta_is_put_and_taken_away_with_a_line,
            }
            schedules {
                l17_are_kept_changed_and_removed,
                l17_a_stale_version_conflicts,
                l17_are_bounded_per_sandbox,
                l17_are_listed_by_sandbox_and_project,
                l17_due_is_soonest_first,
                l17_who_is_gone_has_none,
            }
            tasks {
                k1_are_kept_and_changed_with_a_line,
                k5_of_two_changes_at_once_one_wins,
                k1_one_of_a_sandbox_is_at_work,
                k1_are_listed_newest_first_by_every_filter,
                k7_keep_the_end_of_their_output,
                j9_are_forgotten_when_they_are_long_over,
            }
            executions {
                x1_are_noted_and_an_end_stays,
                x5_end_in_the_transaction_that_ends_their_instance,
                x1_those_that_wait_are_bounded_and_go_with_their_sandbox,
                x1_of_many_changes_at_once_one_wins,
                are_listed_newest_first_by_every_filter,
                j9_the_oldest_that_ended_are_forgotten,
                x2_outputs_are_kept_bounded_until_their_sandbox_is_over,
            }
            subscriptions {
                o6_are_kept_and_changed_with_a_line,
                o6_a_stale_version_conflicts_and_there_is_a_bound,
                o6_a_place_moves_with_the_letters_or_not_at_all,
                o6_letters_are_settled_one_by_one,
                o6_what_is_dead_is_sent_again,
                o6_everything_after_a_place_is_sent_again,
                j9_letters_that_died_long_ago_are_forgotten,
            }
            retention {
                j9_old_lines_are_forgotten,
                j9_keys_stay_while_the_sandbox_lives,
                j9_tombstones_shrink,
                j9_is_done_in_pieces,
                j9_old_leases_are_forgotten,
            }
            backups {
                hold_everything,
                are_of_one_moment_while_it_is_written,
                replace_what_was_there,
            }
        }
    };
}

/// Turns the list into the entries of a table.
#[doc(hidden)]
#[macro_export]
macro_rules! __store_table {
    (() $($theme:ident { $($case:ident),* $(,)? })*) => {
        vec![$($(
            Case { name: concat!(stringify!($theme), "::", stringify!($case)), run: |lab| Box::pin($theme::$case(lab)) },
        )*)*]
    };
}

/// Turns the list into test functions.
#[doc(hidden)]
#[macro_export]
macro_rules! __store_test_modules {
    (($world:expr) $($theme:ident { $($case:ident),* $(,)? })*) => {
        $(
            mod $theme {
                #[allow(unused_imports)]
                use super::*;
                $(
                    #[test]
                    fn $case() {
                        $crate::conformance::run_named(
                            concat!(stringify!($theme), "::", stringify!($case)),
                            async { $world },
                        );
                    }
                )*
            }
        )*
    };
}

/// Makes one test per case, in a module per theme. The expression makes a fresh [`World`]; it may await.
///
/// ```text
/// viv_store::conformance_tests!(MyWorld::start().await);
/// ```
#[macro_export]
macro_rules! conformance_tests {
    ($world:expr) => {
        $crate::__store_cases! { __store_test_modules ($world) }
    };
}

/// All cases.
pub fn cases() -> Vec<Case> {
    crate::__store_cases! { __store_table () }
}

/// Runs one case by its name on a runtime of its own; what the macro's tests call.
pub fn run_named<W: World + 'static>(name: &str, world: impl Future<Output = W>) {
    let case = cases().into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case is called {name}"));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(CASE_THREADS).enable_all().build();
    runtime.expect("a runtime for the case").block_on(async {
        let lab = Lab::new(Box::new(world.await)).await;
        let limit = Duration::from_millis(CASE_MS_MAX);
        let done = tokio::time::timeout(limit, (case.run)(&lab)).await;
        assert!(done.is_ok(), "{name} was not done within {CASE_MS_MAX} ms");
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_cases_share_a_name() {
        let mut names: Vec<_> = cases().into_iter().map(|case| case.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
