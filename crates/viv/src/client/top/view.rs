//! What is on the screen, and what keys mean: pure.

use std::cmp::Ordering;

use viv_core::SandboxId;

use super::super::table::{NONE, age, clean, cut};
use super::Sort;
use super::look::{Page, Seen};
use crate::text::bytes;

/// Lines above the first sandbox, and below the last.
const AROUND: usize = 3;

/// What stands above the columns, with the key that sorts by it.
const HEAD: [(&str, Sort); 8] = [
    ("NAME", Sort::Name),
    ("STATUS", Sort::Status),
    ("AGE", Sort::Age),
    ("CPU%", Sort::Cpu),
    ("MEMORY", Sort::Memory),
    ("PROBED", Sort::Probed),
    ("TASK", Sort::Task),
    ("CAUSE", Sort::Cause),
];

const KEYS: &str = "q quit  ↑↓ mark  s stop  l logs  d diagnosis  ? keys";

const HELP: &str = "\
q, Ctrl-C     leave
↑ ↓, k j      mark another sandbox
s             stop the one that is marked; persistent ones are saved
l             its logs
d             what is wrong with it
N S A C M P   sort by name, status, age, CPU, memory, how old the evidence is,
T W           task, or why it is as it is; again: the other way round
Esc           back";

/// A key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Up,
    Down,
    PageUp,
    PageDown,
    Escape,
    Interrupt,
}

/// What is to be done for a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ask {
    Nothing,
    Quit,
    Stop(SandboxId),
    Logs(SandboxId),
    Diagnosis(SandboxId),
}

#[derive(Debug)]
enum Shown {
    Table,
    Text { title: String, lines: Vec<String>, from: usize },
    Confirm { sandbox: SandboxId, name: String },
}

/// What is on the screen.
#[derive(Debug)]
pub(super) struct View {
    seen: Vec<Seen>,
    more: bool,
    asked: Option<(usize, usize)>,
    sort: Sort,
    reversed: bool,
    marked: Option<SandboxId>,
    shown: Shown,
    /// What came of what was asked for, or why nothing new is seen.
    notice: Option<String>,
}

/// Puts them in order: the greatest first where that is what one looks for.
pub(super) fn sort(seen: &mut [Seen], by: Sort, reversed: bool) {
    let usage = |one: &Seen| one.resources.as_ref().and_then(|resources| resources.usage.clone()).unwrap_or_default();
    let compare = |a: &Seen, b: &Seen| -> Ordering {
        match by {
            Sort::Name => name(a).cmp(&name(b)),
            Sort::Status => a.sandbox.status.cmp(&b.sandbox.status),
            Sort::Age => a.sandbox.created_at_ms.cmp(&b.sandbox.created_at_ms),
            Sort::Cpu => {
                let percent = |one: &Seen| usage(one).cpu_percent.unwrap_or(-1.0);
                percent(b).total_cmp(&percent(a))
            }
            Sort::Memory => usage(b).memory_bytes.cmp(&usage(a).memory_bytes),
            Sort::Probed => a.sandbox.evidence.latest_at_ms().cmp(&b.sandbox.evidence.latest_at_ms()),
            Sort::Task => some_first(task(a), task(b)),
            Sort::Cause => some_first(cause(a), cause(b)),
        }
    };
    seen.sort_by(|a, b| {
        let order = compare(a, b);
        let order = if reversed { order.reverse() } else { order };
        order.then_with(|| a.sandbox.id.as_str().cmp(b.sandbox.id.as_str()))
    });
}

/// Those that have one stand before those that have none.
fn some_first(a: Option<String>, b: Option<String>) -> Ordering {
    (a.is_none(), a).cmp(&(b.is_none(), b))
}

fn name(one: &Seen) -> String {
    one.sandbox.name.clone().unwrap_or_else(|| one.sandbox.id.to_string())
}

fn task(one: &Seen) -> Option<String> {
    one.task.as_ref().map(|task| format!("{} {}", task.state.as_str(), task.id))
}

fn cause(one: &Seen) -> Option<String> {
    one.sandbox.cause.as_ref().map(|cause| cause.code.clone())
}

impl View {
    pub(super) fn new(sort: Sort) -> Self {
        let notice = Some("looking …".to_owned());
        Self {
            seen: Vec::new(),
            more: false,
            asked: None,
            sort,
            reversed: false,
            marked: None,
            shown: Shown::Table,
            notice,
        }
    }

    /// This is what there is now.
    pub(super) fn update(&mut self, page: Page) {
        if self.seen.is_empty() && self.notice.as_deref() == Some("looking …") {
            self.notice = None;
        }
        let Page { seen, more, asked } = page;
        (self.seen, self.more, self.asked) = (seen, more, asked);
        self.order();
    }

    fn order(&mut self) {
        sort(&mut self.seen, self.sort, self.reversed);
        let is_there = |id: &SandboxId| self.seen.iter().any(|one| one.sandbox.id == *id);
        if self.marked.as_ref().is_none_or(|marked| !is_there(marked)) {
            self.marked = self.seen.first().map(|one| one.sandbox.id.clone());
        }
    }

    pub(super) fn notice(&mut self, words: &str) {
        self.notice = Some(clean(words));
    }

    /// Shows a text instead, until somebody goes back.
    pub(super) fn text(&mut self, title: &str, text: &str) {
        let lines: Vec<String> = text.lines().map(clean).collect();
        self.notice = None;
        self.shown = Shown::Text { title: clean(title), lines, from: 0 };
    }

    fn marked_at(&self) -> usize {
        self.seen.iter().position(|one| Some(&one.sandbox.id) == self.marked.as_ref()).unwrap_or(0)
    }

    fn mark(&mut self, by: isize) {
        let last = self.seen.len().saturating_sub(1);
        let at = self.marked_at().saturating_add_signed(by).min(last);
        self.marked = self.seen.get(at).map(|one| one.sandbox.id.clone());
    }

    /// What a key means.
    pub(super) fn key(&mut self, key: Key, rows: usize) -> Ask {
        if key == Key::Interrupt {
            return Ask::Quit;
        }
        let page = rows.saturating_sub(AROUND).max(1);
        match &mut self.shown {
            Shown::Confirm { sandbox, .. } => {
                let sandbox = sandbox.clone();
                self.shown = Shown::Table;
                if key == Key::Char('y') {
                    self.notice = Some("stopping …".to_owned());
                    return Ask::Stop(sandbox);
                }
                self.notice = Some("not stopped".to_owned());
                Ask::Nothing
            }
            Shown::Text { lines, from, .. } => {
                let last = lines.len().saturating_sub(page);
                *from = match key {
                    Key::Char('q') | Key::Escape => {
                        self.shown = Shown::Table;
                        return Ask::Nothing;
                    }
                    Key::Up | Key::Char('k') => from.saturating_sub(1),
                    Key::Down | Key::Char('j') => (*from + 1).min(last),
                    Key::PageUp => from.saturating_sub(page),
                    Key::PageDown | Key::Char(' ') => (*from + page).min(last),
                    Key::Char(_) | Key::Interrupt => *from,
                };
                Ask::Nothing
            }
            Shown::Table => self.key_in_table(key, page),
        }
    }

    fn key_in_table(&mut self, key: Key, page: usize) -> Ask {
        self.notice = None;
        let page = isize::try_from(page).unwrap_or(isize::MAX);
        match key {
            Key::Char('q') => return Ask::Quit,
            Key::Up | Key::Char('k') => self.mark(-1),
            Key::Down | Key::Char('j') => self.mark(1),
            Key::PageUp => self.mark(-page),
            Key::PageDown | Key::Char(' ') => self.mark(page),
            Key::Char('?' | 'h') => self.text("keys", HELP),
            Key::Char('N') => self.sort_by(Sort::Name),
            Key::Char('S') => self.sort_by(Sort::Status),
            Key::Char('A') => self.sort_by(Sort::Age),
            Key::Char('C') => self.sort_by(Sort::Cpu),
            Key::Char('M') => self.sort_by(Sort::Memory),
            Key::Char('P') => self.sort_by(Sort::Probed),
            Key::Char('T') => self.sort_by(Sort::Task),
            Key::Char('W') => self.sort_by(Sort::Cause),
            Key::Char(asked @ ('s' | 'l' | 'd')) => {
                let Some(one) = self.seen.get(self.marked_at()) else { return Ask::Nothing };
                let sandbox = one.sandbox.id.clone();
                match asked {
                    's' => self.shown = Shown::Confirm { sandbox, name: clean(&name(one)) },
                    'l' => return self.wait_for(Ask::Logs(sandbox)),
                    _ => return self.wait_for(Ask::Diagnosis(sandbox)),
                }
            }
            Key::Char(_) | Key::Escape | Key::Interrupt => {}
        }
        Ask::Nothing
    }

    fn wait_for(&mut self, ask: Ask) -> Ask {
        self.notice = Some("asking …".to_owned());
        ask
    }

    fn sort_by(&mut self, by: Sort) {
        self.reversed = self.sort == by && !self.reversed;
        self.sort = by;
        self.order();
    }

    /// All lines of the screen; the one that is to stand out, if one is.
    pub(super) fn lines(&self, rows: usize, columns: usize, now_ms: u64) -> (Vec<String>, Option<usize>) {
        let page = rows.saturating_sub(AROUND).max(1);
        let (mut lines, marked, foot) = match &self.shown {
            Shown::Text { title, lines, from } => {
                let mut shown = vec![title.clone(), String::new()];
                shown.extend(lines.iter().skip(*from).take(page).cloned());
                (shown, None, "Esc back  ↑↓ move".to_owned())
            }
            Shown::Table | Shown::Confirm { .. } => {
                let from = (self.marked_at() + 1).saturating_sub(page);
                let mut shown = vec![self.summary()];
                shown.extend(self.table(from, page, now_ms));
                let marked = (!self.seen.is_empty()).then(|| self.marked_at() - from + 2);
                let foot = match &self.shown {
                    Shown::Confirm { name, .. } => format!("stop {name}? y/n"),
                    Shown::Table | Shown::Text { .. } => KEYS.to_owned(),
                };
                (shown, marked, foot)
            }
        };
        lines.resize(rows.saturating_sub(1), String::new());
        lines.push(self.notice.as_ref().map_or(foot.clone(), |notice| format!("{notice}  ({foot})")));
        (lines.into_iter().map(|line| cut(&line, columns)).collect(), marked)
    }

    fn summary(&self) -> String {
        let mut counts = std::collections::BTreeMap::new();
        for one in &self.seen {
            *counts.entry(one.sandbox.status.to_string()).or_insert(0) += 1;
        }
        let counts: Vec<String> = counts.iter().map(|(status, count)| format!("{count} {status}")).collect();
        let more = if self.more { ", the newest of more" } else { "" };
        // Of the others they are those of looks before.
        let asked = self.asked.map_or(String::new(), |(asked, of)| format!(", figures of {asked} of {of}"));
        format!("viv top: {} sandboxes{more}{asked}  {}", self.seen.len(), counts.join(", "))
    }

    /// The head, and those that fit.
    fn table(&self, from: usize, page: usize, now_ms: u64) -> Vec<String> {
        let head = HEAD.map(|(word, sort)| {
            let mark = match (sort == self.sort, self.reversed) {
                (true, true) => "↑",
                (true, false) => "↓",
                (false, true | false) => "",
            };
            format!("{word}{mark}")
        });
        let mut rows = vec![head.to_vec()];
        rows.extend(self.seen.iter().skip(from).take(page).map(|one| row(one, now_ms)));
        let widest = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..HEAD.len()).map(widest).collect();
        let line = |row: &Vec<String>| -> String {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}  "));
            cells.collect::<String>().trim_end().to_owned()
        };
        rows.iter().map(line).collect()
    }
}

fn row(one: &Seen, now_ms: u64) -> Vec<String> {
    let none = || NONE.to_owned();
    let sandbox = &one.sandbox;
    let usage = one.resources.as_ref().and_then(|resources| resources.usage.clone()).unwrap_or_default();
    let cells = [
        name(one),
        sandbox.status.to_string(),
        age(now_ms, Some(sandbox.created_at_ms)),
        usage.cpu_percent.map_or_else(none, |percent| format!("{percent:.1}")),
        usage.memory_bytes.map_or_else(none, bytes),
        age(now_ms, sandbox.evidence.latest_at_ms()),
        task(one).unwrap_or_else(none),
        cause(one).unwrap_or_else(none),
    ];
    cells.iter().map(|cell| clean(cell)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::show::tests::sandbox;
    use super::*;
    use viv_api::sandbox::Status;
    use viv_api::task::Task;

    fn seen(name: &str, memory_bytes: u64, created_at_ms: u64) -> Seen {
        let mut one = sandbox();
        one.id = format!("sbx_{name}").parse().unwrap();
        one.name = Some(name.to_owned());
        one.created_at_ms = created_at_ms;
        let resources = serde_json::from_value(serde_json::json!({
            "sandbox": one.id, "generation": 1, "observed_at_ms": 1, "via": "supervisor", "limits": {}, "disk": null,
            "usage": {"memory_bytes": memory_bytes, "cpu_percent": 1.5}, "running_since_at_ms": 1,
            "operations": {"executions": 1, "file_calls": 1},
        }));
        Seen { sandbox: one, resources: Some(resources.unwrap()), task: None }
    }

    fn page(seen: Vec<Seen>) -> Page {
        Page { seen, ..Page::default() }
    }

    fn view() -> View {
        let mut view = View::new(Sort::Cpu);
        view.update(page(vec![seen("a", 10, 5), seen("b", 30, 1), seen("c", 20, 9)]));
        view
    }

    fn order(view: &View) -> String {
        view.seen.iter().map(name).collect()
    }

    #[test]
    fn it_is_sorted_at_a_key_and_the_other_way_round_at_the_same() {
        let mut view = view();
        assert_eq!(order(&view), "abc", "the same use: by id");
        for (key, wanted) in [('M', "bca"), ('M', "acb"), ('A', "bac"), ('A', "cab"), ('N', "abc"), ('N', "cba")] {
            assert_eq!(view.key(Key::Char(key), 24), Ask::Nothing);
            assert_eq!(order(&view), wanted, "{key}");
        }
        assert!(view.lines(24, 80, 100_000).0[1].starts_with("NAME↑"));
    }

    fn at_work(sandbox: &SandboxId, state: &str) -> Task {
        serde_json::from_value(serde_json::json!({
            "id": format!("tsk_{state}"), "project": "default", "sandbox": sandbox, "state": state, "run": 1, "steps": [],
            "step": 0, "keep_alive": false, "reported": 0, "effects": [], "grants": [], "credentials": [],
            "created_at_ms": 1, "created_by": "key", "times": {"requested_at_ms": 1},
        }))
        .unwrap()
    }

    #[test]
    fn o1_every_column_has_what_is_so_and_sorts_by_it() {
        let mut all = vec![seen("a", 10, 5), seen("b", 30, 1), seen("c", 20, 9)];
        let set = |one: &mut Seen, status, cpu: f64, probed_at_ms, cause: Option<&str>| {
            one.sandbox.status = status;
            one.resources.as_mut().unwrap().usage.as_mut().unwrap().cpu_percent = Some(cpu);
            one.sandbox.evidence.exec.as_mut().unwrap().checked_at_ms = probed_at_ms;
            one.sandbox.evidence.filesystem.as_mut().unwrap().checked_at_ms = probed_at_ms;
            one.sandbox.cause = one.sandbox.cause.take().zip(cause).map(|(mut before, code)| {
                before.code = code.to_owned();
                before
            });
        };
        set(&mut all[0], Status::Lost, 0.0, 90_000, Some("supervisor_lost"));
        set(&mut all[1], Status::Ready, 99.5, 98_000, None);
        set(&mut all[2], Status::Frozen, 3.0, 40_000, Some("asked"));
        all[1].task = Some(at_work(&all[1].sandbox.id, "running"));
        all[2].task = Some(at_work(&all[2].sandbox.id, "preparing"));
        let mut view = View::new(Sort::Name);
        view.update(page(all));
        let lines = view.lines(24, 120, 100_000).0;
        let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(cells(&lines[1]), ["NAME↓", "STATUS", "AGE", "CPU%", "MEMORY", "PROBED", "TASK", "CAUSE"]);
        assert_eq!(cells(&lines[2]), ["a", "lost", "1m39s", "0.0", "10", "B", "10s", "-", "supervisor_lost"]);
        assert_eq!(cells(&lines[3]), ["b", "ready", "1m39s", "99.5", "30", "B", "2s", "running", "tsk_running", "-"]);
        assert_eq!(
            cells(&lines[4]),
            ["c", "frozen", "1m39s", "3.0", "20", "B", "1m", "preparing", "tsk_preparing", "asked"]
        );
        let statuses = [Status::Lost, Status::Ready, Status::Frozen];
        let mut by_status: Vec<(Status, &str)> = statuses.into_iter().zip(["a", "b", "c"]).collect();
        by_status.sort_unstable();
        let by_status: String = by_status.into_iter().map(|(_, name)| name).collect();
        for (key, wanted) in [('S', by_status.as_str()), ('C', "bca"), ('P', "cab"), ('T', "cba"), ('W', "cab")] {
            view.key(Key::Char(key), 24);
            assert_eq!(order(&view), wanted, "{key}");
            view.key(Key::Char(key), 24);
            assert_eq!(order(&view), wanted.chars().rev().collect::<String>(), "{key}, the other way round");
        }
    }

    #[test]
    fn a_stop_is_confirmed_and_is_of_the_one_that_is_marked() {
        let mut view = view();
        view.key(Key::Down, 24);
        view.key(Key::Char('s'), 24);
        assert_eq!(view.lines(24, 80, 100_000).0[23], "stop b? y/n");
        assert_eq!(view.key(Key::Char('n'), 24), Ask::Nothing);
        view.key(Key::Char('s'), 24);
        // Whoever comes first meanwhile, what was asked about is what is stopped.
        view.update(page(vec![seen("0", 99, 1), seen("b", 30, 1)]));
        assert_eq!(view.key(Key::Char('y'), 24), Ask::Stop("sbx_b".parse().unwrap()));
        assert_eq!(view.key(Key::Char('d'), 24), Ask::Diagnosis("sbx_b".parse().unwrap()));
        assert_eq!(view.key(Key::Char('l'), 24), Ask::Logs("sbx_b".parse().unwrap()));
        view.text("logs of b", "one\x1b[2J\ntwo");
        assert_eq!(view.lines(24, 80, 0).0[2], "one\u{fffd}[2J", "what it says does not move the cursor");
        assert_eq!((view.key(Key::Char('q'), 24), view.key(Key::Char('q'), 24)), (Ask::Nothing, Ask::Quit));
        assert_eq!(view.key(Key::Interrupt, 24), Ask::Quit);
    }

    #[test]
    fn the_one_that_is_marked_is_on_the_screen_and_lines_fit() {
        let mut view = View::new(Sort::Name);
        let all: Vec<Seen> = (0..30).map(|at| seen(&format!("box{at:02}"), 1, 1)).collect();
        view.update(Page { seen: all, more: true, asked: Some((50, 73)) });
        for _ in 0..40 {
            view.key(Key::Down, 10);
        }
        let (lines, marked) = view.lines(10, 40, 100_000);
        assert_eq!((lines.len(), marked), (10, Some(8)));
        assert!(lines[8].starts_with("box29") && lines[2].starts_with("box23"), "{lines:#?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 40), "{lines:#?}");
        assert!(lines[0].starts_with("viv top: 30 sandboxes, the newest of"));
        let wide = view.lines(10, 200, 100_000).0;
        assert!(wide[0].starts_with("viv top: 30 sandboxes, the newest of more, figures of 50 of 73  "), "{}", wide[0]);
        view.seen[0].sandbox.status = Status::Ready;
        assert_eq!(view.lines(1, 5, 0).0.len(), 1, "a terminal of one line");
    }
}
