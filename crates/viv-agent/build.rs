//! Makes tables of the reviewed list of kernel calls in `seccomp/calls.txt`, for the machine that is built for.
//!
//! The list says how it is written. A mistake in it ends the build with its line.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

const LIST: &str = "seccomp/calls.txt";

/// Other machines have no list, and no agent.
const MACHINES: [&str; 2] = ["x86_64", "aarch64"];

fn main() {
    println!("cargo::rerun-if-changed={LIST}");
    let machine = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    assert!(MACHINES.contains(&machine.as_str()), "there is no list of kernel calls for {machine}");
    let list = fs::read_to_string(LIST).expect("the list is there");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("calls.rs");
    fs::write(out, tables(&list, &machine)).expect("the tables can be written");
}

/// Rust source of a slice of groups.
fn tables(list: &str, machine: &str) -> String {
    let mut tables = String::from("&[\n");
    let mut group: Option<Group<'_>> = None;
    let mut groups = BTreeSet::new();
    for (index, line) in list.lines().enumerate() {
        let at = Place { number: index + 1, line };
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(header) = line.strip_prefix("group ") {
            finish(&mut tables, group.take());
            let new = Group::new(header, &at);
            at.check(groups.insert(new.name), "a group of this name was there before");
            group = Some(new);
            continue;
        }
        let Some(group) = &mut group else { at.fail("belongs to no group") };
        if line.starts_with("why ") {
            at.check(group.seen.is_empty(), "the reason stands before the calls");
            group.has_reason = true;
        } else {
            at.check(group.has_reason, "a call without a reason");
            group.add(line, machine, &at);
        }
    }
    finish(&mut tables, group.take());
    tables.push_str("]\n");
    tables
}

fn finish(tables: &mut String, group: Option<Group<'_>>) {
    let Some(Group { name, kind, calls, .. }) = group else { return };
    let _ = write!(tables, "Group {{ name: {name:?}, kind: {kind}, calls: &[\n{calls}] }},\n");
}

/// A line, to complain about.
struct Place<'l> {
    number: usize,
    line: &'l str,
}

impl Place<'_> {
    fn check(&self, holds: bool, otherwise: &str) {
        if !holds {
            self.fail(otherwise);
        }
    }

    fn fail(&self, what: &str) -> ! {
        panic!("{LIST}:{}: {what}: {}", self.number, self.line)
    }
}

struct Group<'l> {
    name: &'l str,
    has_reason: bool,
    /// As Rust.
    kind: String,
    /// As Rust.
    calls: String,
    seen: BTreeSet<String>,
}

impl<'l> Group<'l> {
    fn new(header: &'l str, at: &Place<'_>) -> Self {
        let words: Vec<_> = header.split_whitespace().collect();
        let (name, kind) = match words.as_slice() {
            [name, "allow"] => (*name, "Kind::Allow".to_owned()),
            [name, "refuse"] => (*name, "Kind::Answer(libc::EPERM)".to_owned()),
            [name, "agent", errno] => (*name, format!("Kind::Agent({})", value(errno, "i32", at))),
            [name, "shared", errno] => (*name, format!("Kind::Shared({})", value(errno, "i32", at))),
            [name, "answer", errno] => (*name, format!("Kind::Answer({})", value(errno, "i32", at))),
            _ => at.fail("not: group NAME allow, agent ERRNO, shared ERRNO, answer ERRNO or refuse"),
        };
        Self { name, has_reason: false, kind, calls: String::new(), seen: BTreeSet::new() }
    }

    fn add(&mut self, line: &str, machine: &str, at: &Place<'_>) {
        if let Some((name, condition)) = line.split_once(" if ") {
            let rule: String = condition.split(" and ").map(|part| condition_of(part, at)).collect();
            self.call(name.trim(), &rule, machine, at);
        } else {
            for name in line.split_whitespace() {
                self.call(name, "", machine, at);
            }
        }
    }

    fn call(&mut self, call: &str, rule: &str, machine: &str, at: &Place<'_>) {
        let (name, number) = call.split_once('=').map_or((call, None), |(name, number)| (name, Some(number)));
        let (name, only) = name.split_once('@').map_or((name, None), |(name, only)| (name, Some(only)));
        let is_name = |text: &str| text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        at.check(!name.is_empty() && is_name(name), "not a call's name");
        at.check(only.is_none_or(|only| MACHINES.contains(&only)), "no such machine");
        at.check(number.is_none_or(|number| number.parse::<u32>().is_ok()), "not a call's number");
        at.check(self.seen.insert(format!("{call} {rule}")), "it was there before");
        if only.is_some_and(|only| only != machine) {
            return;
        }
        let number = number.map_or_else(|| format!("libc::SYS_{name}"), str::to_owned);
        let _ = writeln!(self.calls, "    Call {{ name: {name:?}, number: {number}, rule: &[{rule}] }},");
    }
}

/// `argN == VALUE` and its like, as Rust.
fn condition_of(part: &str, at: &Place<'_>) -> String {
    let words: Vec<_> = part.split_whitespace().collect();
    let (argument, compare, wanted) = match words.as_slice() {
        [argument, "==", wanted] => (argument, "Compare::Is".to_owned(), wanted),
        [argument, "!=", wanted] => (argument, "Compare::IsNot".to_owned(), wanted),
        [argument, "&", mask, "==", wanted] => {
            (argument, format!("Compare::Masked({})", value(mask, "u64", at)), wanted)
        }
        _ => at.fail("not a condition"),
    };
    let (wide, index) = match (argument.strip_prefix("arg"), argument.strip_prefix("ptr")) {
        (Some(index), _) => (false, index),
        (_, Some(index)) => (true, index),
        (None, None) => at.fail("neither argN nor ptrN"),
    };
    let index: u8 = index.parse().unwrap_or(u8::MAX);
    at.check(index < 6, "a call has the arguments 0 to 5");
    let wanted = value(wanted, "u64", at);
    format!("Condition {{ argument: {index}, wide: {wide}, compare: {compare}, value: {wanted} }}, ")
}

/// A number, or names of constants joined by `|`, as Rust of that type.
fn value(text: &str, kind: &str, at: &Place<'_>) -> String {
    let one = |word: &str| {
        let digits = word.strip_prefix("0x");
        let is_number = digits.map_or_else(|| word.parse::<u32>().is_ok(), |hex| u32::from_str_radix(hex, 16).is_ok());
        let is_name = word.starts_with(|c: char| c.is_ascii_uppercase())
            && word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        at.check(is_number || is_name, "neither a number nor a constant");
        match kind {
            _ if is_number => format!("{word}_{kind}"),
            "i32" => format!("libc::{word}"),
            kind => format!("libc::{word} as {kind}"),
        }
    };
    text.split('|').map(one).collect::<Vec<_>>().join(" | ")
}
