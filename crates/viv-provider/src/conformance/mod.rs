//! The suite that every provider has to pass (P6).
//!
//! ```text
//!   conformance_tests!(world) ──► one #[test] per case ──► run_named
//!                                                             │ Lab: ids, waiting, clean-up
//!                                                             ▼
//!                             a case ──► World::provider() ──► the provider under test
//! ```
//!
//! An implementer writes a [`World`] and calls [`crate::conformance_tests!`]
//! with an expression that makes one; every case gets its own.
//!
//! - A case that needs something the provider does not declare asserts instead
//!   that the call is refused as [`crate::ProviderError::Unsupported`]. No case
//!   passes in silence.
//! - Waiting is always "until this holds, or fail at that time"; time passes
//!   only through [`World::pass`].
//! - Commands come from [`program`] alone, so a simulated provider knows what
//!   it has to understand.
//! - After a case, also one that failed, everything it made is destroyed and
//!   everything it saved is removed, and the owner's listings have to be empty.
//! - What has to survive a save is written below `/workspace`, where work is
//!   done; nothing is promised of `/tmp`.

mod archives;
mod control;
mod deadline;
mod disk;
mod ended;
mod executions;
mod fencing;
mod files;
mod forks;
mod freeze;
mod keep;
mod lab;
mod lifecycle;
mod limits;
mod listing;
mod mutations;
mod network;
mod output;
mod ports;
mod probes;
pub mod program;
mod removal;
mod requests;
mod restores;
mod saves;
mod snapshots;
mod subject;
mod terminal;
mod transfers;
mod watches;

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use viv_core::OwnerMark;

use crate::instance::InstanceSpec;
use crate::provider::Provider;

pub use lab::Lab;

/// Most real time that one case may take. The slowest waits about ten seconds
/// on a real provider; what takes longer hangs.
const CASE_MS_MAX: u64 = 120_000;

/// Threads of a case's runtime: one for the case, one for what the provider does meanwhile.
const CASE_THREADS: usize = 2;

/// How long a finished case's runtime waits for what the provider left running.
const SHUTDOWN_MS_MAX: u64 = 2_000;

/// What an implementer hands to the suite. Every case gets a world of its own.
#[async_trait]
pub trait World: Send + Sync {
    /// The provider under test.
    fn provider(&self) -> Arc<dyn Provider>;

    /// The mark of what this case makes: the same on every call, and no other world's.
    /// At most 40 characters, because the suite derives a second owner from it.
    fn owner(&self) -> OwnerMark;

    /// What instances are made from, unless a case changes something about it.
    fn spec(&self) -> InstanceSpec;

    /// Bytes that no other call gave, to make ids of.
    fn fresh_bytes(&self) -> [u8; 16];

    /// Lets this much of the provider's time pass: real ones sleep, simulated ones advance their clock.
    async fn pass(&self, ms: u64);

    /// The provider's wall time, which [`World::pass`] moves.
    fn now_ms(&self) -> u64;

    /// Called when the case is over, its instances are destroyed and its snapshots removed, to assert
    /// what only the implementer can see: no process, mount, layer or directory left (L20).
    async fn finish(&self) {}
}

/// The future of one case; it need not leave its thread.
pub type CaseFuture<'l> = Pin<Box<dyn Future<Output = ()> + 'l>>;

/// One promise of the trait, as a test.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The theme and the promise: `lifecycle::create_answers_when_it_runs`.
    pub name: &'static str,
    /// The test; it panics when the promise does not hold.
    pub run: for<'l> fn(&'l Lab) -> CaseFuture<'l>,
}

/// The list of all cases, told once: both the table and the tests are made from it.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_cases {
    ($then:ident $args:tt) => {
        $crate::$then! { $args
            lifecycle {
                create_answers_when_it_runs,
                create_repeated_makes_one,
                create_repeated_at_once_makes_one,
                create_by_two_operations_at_once_makes_one,
                create_by_another_operation_conflicts,
                create_of_the_next_generation_waits_for_the_destroy,
                create_with_a_bad_spec_leaves_nothing,
                limits_are_honoured_or_refused,
                what_an_instance_lacks_is_told,
                usage_is_reported_or_absent,
                observe_after_destroy_is_absent,
                observe_of_what_never_was_is_absent,
                observe_of_an_old_generation_is_absent,
                destroy_is_safe_to_repeat,
                destroy_of_what_never_was_answers,
                destroy_ends_a_busy_instance,
                destroy_lets_followers_go,
                wait_end_hears_of_a_destroy,
                wait_end_of_what_never_was_is_absent,
                reads_change_nothing,
            }
            fencing {
                an_older_token_is_refused_for_every_mutation,
                a_newer_token_is_taken,
                an_old_generation_is_refused_for_every_mutation,
                an_old_generation_is_refused_for_every_read,
                mutations_of_what_never_was_are_absent,
                mutations_after_destroy_are_absent,
                a_late_create_is_refused_after_a_newer_one,
                a_late_destroy_is_refused_after_a_newer_create,
                a_destroyed_generation_is_not_made_again,
                a_destroy_of_what_never_was_fences_its_create,
            }
            listing {
                shows_what_lives_with_its_labels,
                pages_show_each_instance_once,
                hides_other_owners,
                shows_the_ended_with_its_cause,
                forgets_the_destroyed,
            }
            deadline {
                expiry_comes_on_time_with_its_cause,
                wait_end_hears_of_an_expiry,
                extend_after_expiry_is_refused,
                an_expired_instance_takes_no_work,
                at_least_never_shortens,
                exactly_may_shorten,
                revision_grows_with_every_change,
                extend_repeated_moves_once,
                an_extended_instance_outlives_its_first_deadline,
            }
            executions {
                echoes_a_nonce_exactly,
                exit_code_is_told,
                death_by_signal_is_told,
                missing_program_fails,
                missing_directory_fails,
                missing_user_fails,
                empty_command_is_invalid,
                environment_is_merged,
                starts_in_the_working_directory,
                starts_in_the_directory_asked_for,
                runs_as_root_of_the_sandbox,
                repeated_starts_once,
                same_id_with_another_command_conflicts,
                unknown_execution_is_not_found,
                are_listed_oldest_first,
                without_input_reads_end_of_file,
            }
            probes {
                transient_leaves_nothing,
                many_transient_in_a_row_leave_nothing,
                transient_runs_like_any_other,
                transient_can_be_cancelled,
                transient_that_cannot_start_leaves_nothing,
                transient_goes_with_its_instance,
                the_probe_writes_its_nonce_and_nothing_else,
                identity_is_this_instance,
                identity_is_of_the_latest_generation,
                identity_needs_a_running_instance,
                whereabouts_are_told,
                logs_are_bounded,
            }
            control {
                input_reaches_the_command,
                input_repeated_is_taken_once,
                input_with_a_gap_is_refused,
                input_after_close_is_refused,
                close_is_safe_to_repeat,
                much_input_arrives_whole,
                signal_ends_a_command,
                signal_reaches_a_handler,
                signal_after_the_end_is_refused,
                cancel_ends_a_command,
                cancel_ends_a_tree_that_ignores_term,
                cancel_repeated_answers_the_same,
                cancel_after_the_end_keeps_the_outcome,
                limit_ends_a_command,
                limit_ends_a_tree_that_ignores_term,
            }
            output {
                streams_are_told_apart,
                attach_starts_in_the_middle,
                attach_past_the_end_only_ends,
                attach_follows_to_the_end,
                attach_without_follow_ends_at_once,
                attach_twice_hears_the_same,
                attach_to_nothing_is_not_found,
                a_bound_cuts_the_middle,
                attach_inside_a_cut_says_so,
            }
            terminal {
                size_is_seen_inside,
                resize_is_seen_inside,
                resize_without_a_terminal_conflicts,
            }
            ended {
                executions_are_told_after_expiry,
                output_is_kept_after_expiry,
                a_follower_hears_of_the_expiry,
                nothing_is_told_after_destroy,
            }
            freeze {
                freeze_shows_and_thaw_runs,
                both_are_safe_to_repeat,
                nothing_progresses_while_frozen,
                execution_limits_stand_still,
                execute_while_frozen_is_refused,
                the_hard_deadline_goes_on,
                destroy_ends_the_frozen,
            }
            files {
                written_is_read_back,
                ranges_are_read,
                replacing_shortens,
                modes_are_kept,
                missing_is_not_found,
                directories_are_not_files,
                files_are_not_directories,
                relative_paths_are_invalid,
                stat_tells_kinds,
                list_goes_to_a_depth,
                list_is_complete,
                mkdir_makes_the_way,
                move_replaces,
                remove_takes_all_below,
                changes_repeated_answer_the_same,
                written_is_seen_by_commands,
                commands_writing_is_seen,
                sandboxes_share_nothing,
            }
            watches {
                changes_are_told,
                changes_far_below_are_told_when_asked,
                watching_nothing_is_not_found,
                the_end_is_told,
            }
            archives {
                unpacks_what_is_packed,
                goes_round_and_comes_back,
                a_file_is_packed_by_its_name,
                too_many_entries_are_refused,
                too_many_bytes_are_refused,
                too_swollen_is_refused,
                climbing_paths_are_refused,
                absolute_paths_are_refused,
                writing_through_a_link_is_refused,
                writing_through_a_link_of_before_is_refused,
                a_hard_link_out_is_refused,
                what_is_no_archive_is_invalid,
                packing_nothing_is_not_found,
            }
            ports {
                a_closed_port_is_not_found,
            }
            requests {
                what_is_asked_inside_is_heard_and_answered,
                what_was_not_answered_is_heard_by_the_next,
                one_is_heard_at_a_time,
                the_last_to_listen_is_the_one_who_hears,
                an_answer_to_nothing_is_not_found,
                an_answer_repeated_is_given_once,
                the_end_is_told,
            }
            network {
                without_egress_there_is_only_loopback,
                egress_is_given_or_refused,
                egress_is_as_the_restored_spec_says,
            }
            saves {
                live_save_runs_on,
                live_save_is_of_one_moment,
                live_save_of_the_ended_is_refused,
                stopped_save_ends_the_instance,
                what_was_saved_takes_no_work,
                what_was_saved_can_be_saved_again,
                an_ended_instance_can_still_be_saved,
                the_frozen_can_be_saved,
                memory_save_brings_executions_back,
                memory_goes_to_others_as_copies,
                memory_is_recalled_only_if_wanted,
                save_repeated_saves_once,
                saves_at_once_under_one_id_make_one,
                save_under_a_used_id_conflicts,
                late_saves_are_refused_and_leave_nothing,
                a_destroy_in_the_middle_leaves_all_or_nothing,
            }
            restores {
                restored_is_independent,
                restored_survives_its_source,
                restore_of_nothing_is_not_found,
                restored_is_as_its_own_spec_says,
                several_are_restored_at_once,
                a_snapshot_outlives_its_sandbox,
                nothing_is_lost_over_many_rounds,
                rollback_brings_back_what_was_saved,
                kinds_and_times_survive,
            }
            forks {
                fork_leaves_the_source_alone,
                fork_of_nothing_is_absent,
                fork_of_the_ended_is_refused,
                fork_repeated_makes_one,
                fork_shares_nothing_writable,
                a_fork_of_a_fork_stands_alone,
                a_fork_of_the_restored_is_made_from_its_snapshot,
            }
            snapshots {
                show_what_they_are,
                pages_show_each_once,
                unknown_is_not_found,
            }
            removal {
                what_is_used_stays,
                what_ended_still_uses_it,
                is_for_ever_and_safe_to_repeat,
                of_what_never_was_keeps_a_late_save_out,
                by_an_older_token_is_refused,
                asks_for_no_generation,
                of_another_sandboxs_conflicts,
                leaves_its_source_alone,
                of_a_parent_leaves_its_children_alone,
            }
            transfers {
                imported_is_what_was_exported,
                one_file_is_imported_under_several_ids,
                a_used_id_conflicts,
                what_was_changed_on_its_way_is_refused_and_leaves_nothing,
                what_was_cut_short_is_refused_and_leaves_nothing,
                export_of_nothing_is_not_found,
                import_by_an_older_token_is_refused,
            }
            disk {
                usage_grows_by_what_is_written,
                what_was_restored_is_shared,
                a_full_disk_takes_no_more,
                a_restored_disk_is_as_full_as_it_was,
            }
            limits {
                what_was_asked_for_shows,
                no_limit_can_be_asked_for,
                a_change_shows_and_leaves_the_rest,
                a_change_by_nothing_changes_nothing,
                a_change_repeated_changes_once,
                a_limit_can_be_lifted,
                what_makes_no_sense_changes_nothing,
                what_is_not_declared_is_refused,
                the_frozen_can_be_changed,
                the_ended_is_not_changed,
                fewer_processes_hold_from_then_on,
                less_disk_holds_from_then_on,
                less_memory_than_is_used_is_refused,
            }
        }
    };
}

/// Turns the list into the entries of a table.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_table {
    (() $($theme:ident { $($case:ident),* $(,)? })*) => {
        vec![$($(
            Case { name: concat!(stringify!($theme), "::", stringify!($case)), run: |lab| Box::pin($theme::$case(lab)) },
        )*)*]
    };
}

/// Turns the list into test functions.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_test_modules {
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

/// Makes one test per case, in a module per theme.
///
/// The expression makes a fresh [`World`]; it may await, and sees what is in
/// scope where the macro is called. Call it in a module of its own when one
/// file tests several providers.
///
/// ```text
/// viv_provider::conformance_tests!(MyWorld::start().await);
/// ```
#[macro_export]
macro_rules! conformance_tests {
    ($world:expr) => {
        $crate::__conformance_cases! { __conformance_test_modules ($world) }
    };
}

/// All cases.
pub fn cases() -> Vec<Case> {
    crate::__conformance_cases! { __conformance_table () }
}

/// Runs one case by its name on a runtime of its own; what the macro's tests call.
pub fn run_named<W: World + 'static>(name: &str, world: impl Future<Output = W>) {
    let case = cases().into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case is called {name}"));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CASE_THREADS)
        .enable_all()
        .build()
        .expect("a runtime for the case");
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(async {
            let world = world.await;
            run(case, Box::new(world)).await;
        });
    }));
    runtime.shutdown_timeout(Duration::from_millis(SHUTDOWN_MS_MAX));
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

/// Runs one case, then destroys what it made. Panics when the case fails, hangs or leaves something.
pub async fn run(case: Case, world: Box<dyn World>) {
    let lab = Lab::new(world);
    let outcome = caught(tokio::time::timeout(Duration::from_millis(CASE_MS_MAX), (case.run)(&lab))).await;
    match outcome {
        Ok(Ok(())) => {
            lab.clean_up().await;
            lab.assert_nothing_left().await;
            lab.finish().await;
        }
        Ok(Err(_)) => {
            lab.clean_up().await;
            panic!("{} was not done within {CASE_MS_MAX} ms", case.name);
        }
        Err(panic) => {
            lab.clean_up().await;
            resume_unwind(panic);
        }
    }
}

/// Awaits a future and catches its panic, so that a failed case can still be cleaned up.
async fn caught<T>(future: impl Future<Output = T>) -> std::thread::Result<T> {
    let mut future = pin!(future);
    std::future::poll_fn(move |context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(std::task::Poll::Pending) => std::task::Poll::Pending,
        Ok(std::task::Poll::Ready(value)) => std::task::Poll::Ready(Ok(value)),
        Err(panic) => std::task::Poll::Ready(Err(panic)),
    })
    .await
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
