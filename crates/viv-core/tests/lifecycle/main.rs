//! The life of a sandbox, proven on [`viv_core::lifecycle::step`] alone.
//!
//! - `explore`: every record that can be reached, by breadth-first search over a finite abstraction; `laws` is checked
//!   on each step of it.
//! - `edges`: what was reached equals the design's table. `diagram`: `docs/lifecycle.md` is made of it.
//! - `model`: random lives beside a provider that loses, repeats and delays, against a small model of what must hold.
//! - `incidents`: failures that happened elsewhere, one test each. `golden`: records are read as they were written.
//! - `memory`: what is saved and restored with its memory, and what follows when it is not.
//! - `spares`: what was made ahead, claimed, and found broken by whom it was given to.
//! - `words`: what others rely on, and read from a record.
//! - `services`: what is started, started again and given up, and what hooks hold up.
//!
//! `UPDATE=1` writes the committed files anew instead of comparing them.

mod diagram;
mod edges;
mod explore;
mod golden;
mod incidents;
mod laws;
mod memory;
mod model;
mod provider;
mod rest;
mod services;
mod setup;
mod spares;
mod status;
mod words;

/// All that looks at every record that can be reached, in one process: the search is most of the work.
#[test]
fn what_holds_of_every_record_that_can_be_reached() {
    edges::the_edges_are_those_of_the_design();
    edges::every_phase_is_reached_and_every_event_has_an_answer_in_it();
    edges::l20_delete_ends_every_record_that_can_be_reached();
    edges::transient_phases_are_left_by_time_alone();
    edges::records_of_every_kind_survive_json();
    diagram::the_page_says_what_the_code_does();
    incidents::incident_32_another_instance_is_another_generation_and_never_behind_ready();
    status::t1_no_evidence_makes_another_phase_ready();
}
