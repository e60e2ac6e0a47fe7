//! From the list to programs for the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use super::{Call, Compare, Condition, GROUPS, Instruction, Kind};

/// The longest program that the kernel takes.
const INSTRUCTIONS_MAX: usize = 4096;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;

const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const JUMP_IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP_IF_ABOVE: u16 = (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K) as u16;

/// Where the number of the call is in what a filter looks at.
const NUMBER_AT: u32 = std::mem::offset_of!(libc::seccomp_data, nr) as u32;

/// Both filters.
pub(super) struct Filters {
    pub(super) agent: Vec<Instruction>,
    pub(super) workload: Vec<Instruction>,
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Compiles both; for workloads that ids do not keep from the agent, or do. Nobody becomes who is `reserved`.
pub(super) fn filters(is_guarded: bool, reserved: Option<u32>) -> io::Result<Filters> {
    let of = |wanted: &dyn Fn(Kind) -> bool| {
        GROUPS.iter().filter(|group| wanted(group.kind)).flat_map(|group| group.calls).collect::<Vec<_>>()
    };
    let mut agent = vec![unlisted()];
    let answers: BTreeSet<i32> = GROUPS.iter().filter_map(|group| answer(group.kind)).collect();
    for errno in answers {
        // What is refused with EPERM needs no instruction of its own: so is everything that is left over.
        if errno != libc::EPERM {
            agent.push(matching(rules(&of(&|kind| answer(kind) == Some(errno)))?, errno)?);
        }
    }
    let allowed = rules(&of(&|kind| matches!(kind, Kind::Allow | Kind::Agent(_))))?;
    agent.push(compile(allowed, errno_action(libc::EPERM), SeccompAction::Allow)?);

    let only_agents: BTreeSet<i32> = GROUPS.iter().filter_map(|group| agents(group.kind)).collect();
    let mut workload = Vec::new();
    for errno in only_agents {
        // Whatever the arguments.
        let calls = of(&|kind| agents(kind) == Some(errno));
        let whole = calls.iter().map(|call| (call.number, Vec::new())).collect();
        workload.push(matching(whole, errno)?);
    }
    let not_its_likes: BTreeSet<i32> = GROUPS.iter().filter_map(|group| shared(group.kind)).collect();
    for errno in not_its_likes.into_iter().filter(|_| is_guarded) {
        workload.push(matching(rules(&of(&|kind| shared(kind) == Some(errno)))?, errno)?);
    }
    if let Some(id) = reserved {
        workload.push(matching(becoming(id)?, libc::EPERM)?);
    }
    Ok(Filters { agent: link(agent)?, workload: link(workload)? })
}

/// All calls by which a process takes an id, for this one. Groups besides are behind a pointer; the keeper's opens nothing.
fn becoming(id: u32) -> io::Result<Rules> {
    let calls = [
        (libc::SYS_setuid, 1),
        (libc::SYS_setgid, 1),
        (libc::SYS_setreuid, 2),
        (libc::SYS_setregid, 2),
        (libc::SYS_setresuid, 3),
        (libc::SYS_setresgid, 3),
        (libc::SYS_setfsuid, 1),
        (libc::SYS_setfsgid, 1),
    ];
    let rule = |argument| -> io::Result<SeccompRule> {
        let is_it = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, id.into());
        SeccompRule::new(vec![is_it.map_err(io::Error::other)?]).map_err(io::Error::other)
    };
    calls
        .into_iter()
        .map(|(number, arguments)| Ok((number, (0..arguments).map(rule).collect::<io::Result<_>>()?)))
        .collect()
}

fn answer(kind: Kind) -> Option<i32> {
    match kind {
        Kind::Answer(errno) => Some(errno),
        Kind::Allow | Kind::Agent(_) | Kind::Shared(_) => None,
    }
}

fn agents(kind: Kind) -> Option<i32> {
    match kind {
        Kind::Agent(errno) => Some(errno),
        Kind::Allow | Kind::Answer(_) | Kind::Shared(_) => None,
    }
}

fn shared(kind: Kind) -> Option<i32> {
    match kind {
        Kind::Shared(errno) => Some(errno),
        Kind::Allow | Kind::Agent(_) | Kind::Answer(_) => None,
    }
}

/// Several rules for one call are alternatives; none means: always.
fn rules(calls: &[&Call]) -> io::Result<Rules> {
    let mut rules = Rules::new();
    for call in calls {
        let chain = rules.entry(call.number).or_default();
        if !call.rule.is_empty() {
            let conditions = call.rule.iter().map(condition).collect::<Result<_, _>>().map_err(io::Error::other)?;
            chain.push(SeccompRule::new(conditions).map_err(io::Error::other)?);
        }
    }
    Ok(rules)
}

fn condition(condition: &Condition) -> Result<SeccompCondition, seccompiler::BackendError> {
    let length = if condition.wide { SeccompCmpArgLen::Qword } else { SeccompCmpArgLen::Dword };
    let compare = match condition.compare {
        Compare::Is => SeccompCmpOp::Eq,
        Compare::IsNot => SeccompCmpOp::Ne,
        Compare::Masked(mask) => SeccompCmpOp::MaskedEq(mask),
    };
    SeccompCondition::new(condition.argument, length, compare, condition.value)
}

fn errno_action(errno: i32) -> SeccompAction {
    SeccompAction::Errno(errno as u32)
}

/// Answers what matches, and says nothing about the rest.
fn matching(rules: Rules, errno: i32) -> io::Result<Vec<Instruction>> {
    compile(rules, SeccompAction::Allow, errno_action(errno))
}

fn compile(rules: Rules, otherwise: SeccompAction, matched: SeccompAction) -> io::Result<Vec<Instruction>> {
    let machine = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, otherwise, matched, machine).map_err(io::Error::other)?;
    let program: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    Ok(program.iter().map(|line| instruction(line.code, line.jt, line.jf, line.k)).collect())
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

/// The numbers that are listed, as ranges.
pub(super) fn listed() -> Vec<(u32, u32)> {
    let numbers: BTreeSet<u32> = GROUPS.iter().flat_map(|group| group.calls).map(|call| call.number as u32).collect();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges
}

/// Answers ENOSYS to every number that is not listed, so that programs which try out newer calls go on without. The
/// numbers of other ABIs are among these where they are not killed for being of another.
fn unlisted() -> Vec<Instruction> {
    let absent = u32::from(errno_action(libc::ENOSYS));
    let mut program = vec![instruction(LOAD, 0, 0, NUMBER_AT)];
    // In ascending order: below the range it is in none; up to its end it is in this one; else on to the next.
    for (first, last) in listed() {
        program.push(instruction(JUMP_IF_AT_LEAST, 1, 0, first));
        program.push(instruction(RETURN, 0, 0, absent));
        program.push(instruction(JUMP_IF_ABOVE, 1, 0, last));
        program.push(instruction(RETURN, 0, 0, ALLOW));
    }
    program.push(instruction(RETURN, 0, 0, absent));
    program
}

/// Makes one program of several: what the first allows is for the next to decide.
///
/// One program, because among several the kernel has no way to say which of their answers counts but their order, and
/// each costs something when it is installed.
fn link(programs: Vec<Vec<Instruction>>) -> io::Result<Vec<Instruction>> {
    let last = programs.len().saturating_sub(1);
    let mut linked = Vec::new();
    for (index, mut program) in programs.into_iter().enumerate() {
        let length = program.len();
        for (at, line) in program.iter_mut().enumerate() {
            if index < last && line.code == RETURN && line.k == ALLOW {
                *line = instruction(JUMP, 0, 0, (length - at - 1) as u32);
            }
        }
        linked.append(&mut program);
    }
    if linked.len() > INSTRUCTIONS_MAX {
        return Err(io::Error::other(format!("a filter has {} instructions, too many for the kernel", linked.len())));
    }
    Ok(linked)
}
