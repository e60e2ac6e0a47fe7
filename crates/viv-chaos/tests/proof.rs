//! The tables of docs/proof.md are those of the code. `UPDATE=1` writes them.
#![allow(missing_docs, reason = "tests")]

mod page;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use viv_chaos::{BUGS, Deed, IN_WORLDS, INVARIANTS, TRIALS, Trouble};

/// For every rule a test beside the worlds, or instead of them; and why no invariant says it, where none does.
const RULES: &[(&str, &[&str], &str)] = &[
    ("T1", &["t1_who_comes_late_with_an_older_record_changes_nothing"], ""),
    ("T2", &["t2_an_image_without_any_program_can_be_probed"], ""),
    ("T3", &["t3_a_killed_shim_is_not_ready"], ""),
    ("T4", &["t4_what_broke_while_nobody_looked_is_not_used_in_the_dark"], ""),
    ("T5", &["t5_an_old_generation_is_refused_with_the_current_one"], ""),
    ("T6", &["t6_a_deadline_that_was_moved_behind_our_back_is_corrected"], ""),
    ("T7", &["t7_a_stopped_shim_is_silence_not_absence"], ""),
    (
        "T8",
        &["t8_what_is_wanted_what_is_and_what_was_checked_are_told_apart"],
        "it says what is shown, not what may happen",
    ),
    ("T9", &["t9_l6_reads_are_not_activity_and_an_exec_is"], ""),
    ("T10", &["j9_t10_tombstones_shrink_by_themselves_and_keep_why_and_when"], ""),
    ("L1", &["l1_keys_are_per_project_and_route"], ""),
    ("L2", &["l2_who_has_a_name_stays_unless_said_otherwise"], ""),
    ("L3", &["l3_many_ensures_of_a_lost_one_make_one_instance"], ""),
    ("L4", &["l4_a_day_of_polls_timers_reconnects_traffic_and_schedules_does_not_loop"], ""),
    ("L5", &["l5_the_deadline_holds_with_nobody_attached"], ""),
    ("L6", &["l6_what_runs_in_the_foreground_keeps_it_awake_and_a_service_does_not"], ""),
    ("L7", &["l7_a_lease_keeps_it_awake_until_it_ends"], ""),
    ("L8", &["l8_a_stop_of_what_does_not_answer_ends_it"], ""),
    ("L9", &["l9_hibernated_by_hand_is_woken_by_traffic_and_stopped_is_not"], ""),
    ("L10", &["l10_a_save_that_fails_its_check_keeps_everything"], ""),
    ("L11", &["l11_a_delete_at_each_step_of_a_save_leaves_no_row_and_no_layer"], ""),
    ("L12", &["l12_a_reset_begins_anew_under_the_same_name_and_keeps_what_others_need"], ""),
    ("L13", &["l13_a_dump_that_fails_is_followed_by_the_files"], ""),
    ("L14", &["l14_hooks_that_fail_are_ignored_or_not_as_it_was_said"], ""),
    ("L15", &["l15_a_late_create_and_a_late_destroy_are_refused_for_ever"], ""),
    ("L16", &["l16_no_verb_changes_the_policy"], ""),
    ("L17", &["l17_a_daemon_that_dies_at_any_point_neither_loses_nor_repeats_a_run"], ""),
    ("L18", &["l18_a_quota_is_told_with_limit_and_use"], ""),
    (
        "L19",
        &["l19_500_claims_by_50_clients_while_daemons_die_are_500_different_sandboxes_that_work"],
        "worlds have no spares; a day of claims over dying daemons is a test of its own",
    ),
    ("L20", &["l20_a_lease_that_was_left_on_what_is_over_is_found_and_given_back"], ""),
    ("L21", &["l21_a_drain_saves_or_finishes_all_also_over_a_restart"], ""),
    ("X1", &["x1_nothing_runs_past_its_deadline_with_an_agent_that_stands_still"], ""),
    (
        "X2",
        &["x2_an_execution_is_taken_up_at_an_offset_after_kill_9_of_the_daemon"],
        "simulated commands write next to nothing",
    ),
    (
        "X3",
        &["x3_a_child_that_changed_its_session_and_ignores_term_is_gone_after_a_cancel"],
        "there is no process tree but in a kernel",
    ),
    ("X4", &["x4_input_is_taken_once_and_closed"], "simulated commands take no input"),
    ("X5", &["x5_after_a_resume_services_are_new_executions_linked_to_the_old_and_nudged"], ""),
    ("X6", &["x6_exit_signal_memory_agent_and_sandbox_are_told_apart"], ""),
    ("J1", &["j1_nothing_alive_is_collected_by_listings_that_fail_are_partial_or_ten_steps_old"], ""),
    (
        "J2",
        &[
            "j2_emergency_takes_who_is_idle_by_least_harm_until_there_is_room",
            "j2_everything_is_compared_at_the_start_and_every_hour_and_that_is_shown",
        ],
        "worlds are shorter than what most layers of cleanup wait for",
    ),
    (
        "J3",
        &["j3_incident_39_cause_3_a_cleanup_that_does_not_work_is_an_alert"],
        "it is about alerts, which worlds do not have",
    ),
    (
        "J4",
        &["j4_a_daemon_killed_while_it_compares_loses_nothing"],
        "it is what every invariant says of worlds in which daemons die",
    ),
    ("J5", &["j5_a_create_that_fails_leaves_nothing_and_says_why"], ""),
    ("J6", &["j6_a_reused_pid_is_not_taken_for_the_process"], "there are no processes but in a kernel"),
    ("J7", &["j7_many_that_hang_hold_up_nobody_else"], ""),
    ("J8", &["j8_a_second_daemon_refuses_and_says_who_owns_the_folder"], ""),
    (
        "J9",
        &["j9_old_lines_are_forgotten", "j9_t10_tombstones_shrink_by_themselves_and_keep_why_and_when"],
        "worlds are shorter than any retention",
    ),
    ("K1", &["k1_a_task_completes_and_pushes"], ""),
    ("K2", &["k2_a_stop_is_carried_out_by_whoever_comes_next"], ""),
    ("K3", &["k2_a_stop_does_not_wait_for_an_agent_that_stands_still"], ""),
    ("K4", &["k4_each_limit_ends_it_in_its_own_way_also_over_a_restart"], ""),
    ("K5", &["k5_a_stop_that_finds_an_effect_in_flight_says_so_and_waits_for_it"], ""),
    (
        "K6",
        &["k6_kept_alive_and_continued_it_resumes_its_session", "k6_kept_alive_and_expired_meanwhile_it_is_recreated"],
        "a session is the agent's, and no simulated command has one",
    ),
    ("K7", &["k7_the_command_line_runs_follows_stops_and_shows"], "it says what is shown, not what may happen"),
    (
        "O1",
        &["o1_a_line_says_status_age_activity_evidence_agent_and_task"],
        "it says what is shown, not what may happen",
    ),
    ("O2", &["o2_figures_are_counted"], "it says what is shown, not what may happen"),
    (
        "O3",
        &["o3_a_dead_agent_that_nobody_told_of_is_seen_and_what_helps_leads_to_a_new_instance"],
        "it says what is shown, not what may happen",
    ),
    ("O4", &["o4_dashboards_and_rules_ask_for_what_a_daemon_tells"], "it says what is shown, not what may happen"),
    (
        "O5",
        &["o5_an_alert_is_pending_before_it_fires_and_does_not_flap"],
        "worlds have no alerts; each cause is staged by a test",
    ),
    (
        "O6",
        &["o6_an_outage_a_slow_receiver_redirects_and_crashes_lose_nothing_and_keep_the_order"],
        "worlds have no webhooks; outages and crashes are staged by a test",
    ),
    ("O7", &["o7_a_stream_goes_on_where_it_was_without_gaps"], "of the journal worlds say what T10 does"),
    ("O8", &["o8_a_report_says_how_it_was_before_and_is_after"], "it says what is shown, not what may happen"),
    ("O9", &["o9_without_its_gate_each_promise_is_broken"], "worlds have every gate on, or one or two off (above)"),
];

/// How many rules the specification has under each of these letters.
const COUNTS: [(char, usize); 6] = [('T', 10), ('L', 21), ('X', 6), ('J', 9), ('K', 7), ('O', 9)];

fn rules() -> String {
    let mut table =
        "| rule | invariants | also, or instead, a test | why not in worlds |\n|---|---|---|---|\n".to_owned();
    let quoted = |names: Vec<&str>| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    for (rule, tests, why) in RULES {
        let of_it = INVARIANTS.iter().filter(|invariant| invariant.rule == *rule).map(|invariant| invariant.name);
        writeln!(table, "| {rule} | {} | {} | {why} |", quoted(of_it.collect()), quoted(tests.to_vec())).unwrap();
    }
    table
}

/// The names of all functions in a folder.
fn functions(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let begun = text.split("fn ").skip(1).filter_map(|rest| rest.split_once('('));
            found.extend(begun.map(|(name, _)| name.to_owned()));
        }
    }
}

/// No rule is forgotten: each is said by an invariant, or by a test and a reason.
#[test]
fn p1_every_rule_has_an_invariant_or_a_test_and_a_reason() {
    let all: Vec<String> =
        COUNTS.iter().flat_map(|(letter, count)| (1..=*count).map(move |at| format!("{letter}{at}"))).collect();
    let told: Vec<&str> = RULES.iter().map(|(rule, ..)| *rule).collect();
    assert_eq!(told, all, "each rule is there once, in its order");
    let mut known = BTreeSet::new();
    functions(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut known);
    for (rule, tests, why) in RULES {
        let said = INVARIANTS.iter().any(|invariant| invariant.rule == *rule);
        assert!(!tests.is_empty(), "no test is named for {rule}");
        assert_eq!(said, why.is_empty(), "{rule} is said by an invariant, or there is a reason why not");
        for test in *tests {
            assert!(known.contains(*test), "{rule} is to be shown by {test}, which is nowhere");
        }
    }
    let last = INVARIANTS.iter().filter(|known| COUNTS.iter().any(|(letter, _)| known.rule.starts_with(*letter)));
    let unknown: Vec<&str> = last.map(|known| known.rule).filter(|rule| !told.contains(rule)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

fn invariants() -> String {
    let mut table = "| invariant | rule | looked at | what it says |\n|---|---|---|---|\n".to_owned();
    for invariant in INVARIANTS {
        let (name, rule, when) = (invariant.name, invariant.rule, invariant.when.word());
        writeln!(table, "| `{name}` | {rule} | {when} | {} |", invariant.says).unwrap();
    }
    table
}

fn happenings() -> String {
    let words = |deeds: Vec<&'static str>| deeds.join(", ");
    let clients = Deed::ALL.iter().filter(|deed| !deed.is_fault()).map(|deed| deed.word()).collect();
    let faults = Deed::ALL.iter().filter(|deed| deed.is_fault()).map(|deed| deed.word()).collect();
    let calls = Trouble::ALL.iter().filter(|trouble| trouble.is_fault()).map(|trouble| trouble.word()).collect();
    let traits = Trouble::ALL.iter().filter(|trouble| !trouble.is_fault()).map(|trouble| trouble.word()).collect();
    format!(
        "| what | which |\n|---|---|\n| done by clients | {} |\n| done to instances, daemons, store and provider | {} |\n\
         | that goes wrong with single calls, or with clocks | {} |\n| that some worlds have and others have not | {} |\n",
        words(clients),
        words(faults),
        words(calls),
        words(traits),
    )
}

fn gates() -> String {
    let mut table =
        "| gate | rule | what happens, and has to come out | found by worlds as |\n|---|---|---|---|\n".to_owned();
    for trial in TRIALS {
        let found = IN_WORLDS.iter().find(|(gate, ..)| *gate == trial.gate).map(|(.., names)| names.to_vec());
        let found: Vec<String> = found.unwrap_or_default().iter().map(|name| format!("`{name}`")).collect();
        writeln!(table, "| `{}` | {} | {} | {} |", trial.gate.name(), trial.rule, trial.says, found.join(", "))
            .unwrap();
    }
    table
}

fn planted() -> String {
    let mut table = "| bug | caught as |\n|---|---|\n".to_owned();
    for bug in BUGS {
        let names: Vec<String> = bug.breaks.iter().map(|name| format!("`{name}`")).collect();
        writeln!(table, "| {} | {} |", bug.planted.says(), names.join(", ")).unwrap();
    }
    table
}

#[test]
fn p1_the_page_has_the_tables_of_the_code() {
    page::has("happenings", &happenings());
    page::has("invariants", &invariants());
    page::has("rules", &rules());
    page::has("gates", &gates());
    page::has("planted", &planted());
}

/// What the first page says in figures is so.
#[test]
fn p2_the_readme_counts_gates_and_planted_bugs() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    let (gates, bugs) = (TRIALS.len(), BUGS.len());
    let told = format!("Each of {gates} gates, and each pair of them, is needed; {bugs} planted bugs are caught");
    assert!(page.contains(&told), "README.md does not say: {told}");
}
