//! `docs/lifecycle.md` is made of what was explored, so that it cannot say what the code does not do.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use viv_core::lifecycle::PhaseName;

use crate::edges::MORE;
use crate::explore::{Explored, explored};
use crate::setup::{compare, read};

const PAGE: &str = "docs/lifecycle.md";
const BEGIN: &str = "<!-- generated from the code: UPDATE=1 cargo test -p viv-core --test lifecycle -->\n";
const END: &str = "<!-- end of what is generated -->\n";

pub(crate) fn the_page_says_what_the_code_does() {
    let page = read(PAGE);
    let (above, rest) = page.split_once(BEGIN).expect("the page has a generated part");
    let (_, below) = rest.split_once(END).expect("the generated part ends");
    compare(PAGE, &format!("{above}{BEGIN}{}{END}{below}", generated(explored())));
}

fn generated(found: &Explored) -> String {
    let mut page =
        String::from("\n## The diagram\n\nFrom every phase but the last there is also a way to `stopping`.\n\n");
    page += "```mermaid\nstateDiagram-v2\n    [*] --> provisioning\n";
    for &(from, to) in found.edges.keys() {
        if to != PhaseName::Stopping {
            let _ = writeln!(page, "    {} --> {}", from.as_str(), to.as_str());
        }
    }
    page += "    hibernating --> hibernating: save failed\n    stopped --> [*]\n```\n";
    page += "\n## The edges\n\n`+` marks what is more than the design's table.\n\n| from | to | on: with cause |\n|---|---|---|\n";
    for (&(from, to), by) in &found.edges {
        let mut causes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (event, cause) in by {
            causes.entry(event).or_default().push(cause);
        }
        let by: Vec<String> = causes.into_iter().map(|(event, causes)| format!("{event}: {}", code(&causes))).collect();
        let more = if MORE.contains(&(from, to)) { " +" } else { "" };
        let _ = writeln!(page, "| {} | {}{more} | {} |", from.as_str(), to.as_str(), by.join(" · "));
    }
    let again: Vec<&str> = found.saved_again.iter().copied().collect();
    let _ = writeln!(page, "| hibernating | hibernating, quiesced and kept | {} |", again.join(" · "));
    page += "\n## Every event in every phase\n\nWhere there are several answers, it depends on what the record holds besides its phase.\n\n";
    page += "| phase | event | answer |\n|---|---|---|\n";
    for phase in PhaseName::ALL {
        let mut same: BTreeMap<&BTreeSet<String>, Vec<&str>> = BTreeMap::new();
        for ((_, event), answers) in found.answers.iter().filter(|((of, _), _)| *of == phase) {
            same.entry(answers).or_default().push(event);
        }
        for (answers, events) in same {
            let answers: Vec<&str> = answers.iter().map(String::as_str).collect();
            let _ = writeln!(page, "| {} | {} | {} |", phase.as_str(), events.join(", "), answers.join(" · "));
        }
    }
    page.push('\n');
    page
}

fn code(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(" ")
}
