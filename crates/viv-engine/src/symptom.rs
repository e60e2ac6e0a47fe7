//! What is wrong inside a sandbox, in words, from which evidence, and what helps (O3). Pure: evidence comes in, remarks go
//! out.

use viv_core::exec::{ExecState, ExecStatus};
use viv_core::limits::ResourceLimits;
use viv_core::{ExecutionId, SandboxId};
use viv_provider::{ProcessSeen, Usage};

use crate::diagnose::Remark;
use crate::room::Room;

/// Of one processor, or of what it may have if that is less: above this it computes all the time.
const SPINS_ABOVE: f64 = 0.85;

/// Looks that say that somebody always wants to run.
const LOOKS_MIN: usize = 4;

/// Below this it waits.
const WAITS_BELOW: f64 = 0.02;

/// How long a command may be silent.
const SILENT_MS: u64 = 60_000;

/// Growth of memory in a sample that is worth a word: so much, and this part of it.
const GROWS_BYTES: u64 = 4 << 20;
const GROWS_PART: f64 = 0.10;

/// Of what it may have, above this little memory is left.
const MEMORY_NEAR: f64 = 0.90;

/// As many commands that ran out of time are a pattern.
const TIMEOUTS_MIN: usize = 2;

/// Without anything running and anybody doing anything, this is long.
const UNUSED_MS: u64 = 600_000;

/// Processes that are told by name.
const TOLD: usize = 3;

/// One look.
#[derive(Debug, Clone, Default)]
pub(crate) struct Look {
    pub(crate) at_ms: u64,
    pub(crate) usage: Usage,
    pub(crate) executions: Vec<ExecStatus>,
    pub(crate) processes: Vec<ProcessSeen>,
}

/// Everything from which it is judged what goes on inside.
#[derive(Debug, Clone)]
pub(crate) struct Inside {
    pub(crate) sandbox: SandboxId,
    pub(crate) active_at_ms: u64,
    /// In the order of time; one alone says how it is, and not how it changes.
    pub(crate) looks: Vec<Look>,
    pub(crate) limits: ResourceLimits,
    /// When commands last wrote something, and their last words: the newest first, then those that run.
    pub(crate) outputs: Vec<Output>,
    /// Where there is no room, if one of them says that there is none.
    pub(crate) room: Room,
}

/// The end of what a command wrote.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    pub(crate) execution: ExecutionId,
    pub(crate) last_at_ms: Option<u64>,
    pub(crate) tail: String,
}

/// What goes on inside, in words.
pub(crate) fn symptoms(inside: &Inside) -> Vec<Remark> {
    let mut remarks = Vec::new();
    remarks.extend(memory(inside));
    remarks.extend(work(inside));
    remarks.extend(timeouts(inside));
    remarks.extend(said(inside));
    if !is_said(&inside.outputs, DISK_FULL) {
        remarks.extend(inside.room.seen(&inside.sandbox, inside.limits.disk_bytes));
    }
    remarks.extend(unused(inside));
    remarks
}

impl Inside {
    fn first(&self) -> Option<&Look> {
        self.looks.first()
    }

    fn last(&self) -> Option<&Look> {
        self.looks.last()
    }

    /// How much of one processor was used in the sample.
    fn cpu(&self) -> Option<f64> {
        let (first, last) = (self.first()?, self.last()?);
        let passed_ms = last.at_ms.checked_sub(first.at_ms).filter(|ms| *ms > 0)?;
        let used_us = last.usage.cpu_us?.checked_sub(first.usage.cpu_us?)?;
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        Some(used_us as f64 / (passed_ms as f64 * 1000.0))
    }

    /// Who wanted a processor whenever it was looked at: on a busy machine that says more than how much it got.
    fn always_runs(&self) -> Option<&ProcessSeen> {
        let is_enough = self.looks.len() >= LOOKS_MIN;
        let runs = |look: &Look, pid: u32| look.processes.iter().any(|one| one.pid == pid && one.state == 'R');
        let last = self.last().filter(|_| is_enough)?;
        last.processes.iter().find(|one| self.looks.iter().all(|look| runs(look, one.pid)))
    }

    /// Commands that somebody waits for, and that run.
    fn running(&self) -> Vec<&ExecStatus> {
        let all = self.last().map(|look| look.executions.as_slice()).unwrap_or_default();
        all.iter().filter(|one| one.state == ExecState::Running && !one.detached).collect()
    }

    /// Whether any of those wrote something in the sample.
    fn wrote(&self) -> bool {
        let before = self.first().map(|look| look.executions.as_slice()).unwrap_or_default();
        let bytes = |id: &ExecutionId| before.iter().find(|one| one.id == *id).map_or(0, |one| one.output_bytes);
        self.running().iter().any(|one| one.output_bytes > bytes(&one.id))
    }

    /// The command that gives it twice the memory; without a limit, the one that shows what it uses.
    fn more_memory(&self) -> String {
        match self.limits.memory_bytes.filter(|bytes| *bytes > 0) {
            Some(bytes) => format!("viv limits {} --memory {}", self.sandbox, twice(bytes)),
            None => format!("viv limits {}", self.sandbox),
        }
    }

    /// The command that ends what runs.
    fn cancel(&self) -> String {
        match self.running().as_slice() {
            [one] => format!("viv cancel {} {}", self.sandbox, one.id),
            _ => format!("viv executions {}", self.sandbox),
        }
    }
}

/// Twice as much, as it is said to `viv limits`.
pub(crate) fn twice(bytes: u64) -> String {
    format!("{}M", (bytes.saturating_mul(2) >> 20).max(1))
}

pub(crate) fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

/// Spinning, waiting, silent: of what runs and says nothing, one of the three is told.
fn work(inside: &Inside) -> Vec<Remark> {
    let (running, now_ms) = (inside.running(), inside.last().map_or(0, |look| look.at_ms));
    if running.is_empty() || inside.wrote() {
        return Vec::new();
    }
    let sampled_ms = inside.first().map_or(0, |first| now_ms.saturating_sub(first.at_ms));
    let said_nothing = format!("no output in {sampled_ms} ms from {} running command(s)", running.len());
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let may_have =
        inside.limits.cpu_millis.filter(|millis| *millis > 0).map_or(1.0, |millis| (millis as f64 / 1000.0).min(1.0));
    let always = inside.always_runs();
    match inside.cpu() {
        Some(cpu) if cpu >= SPINS_ABOVE * may_have || (always.is_some() && cpu > WAITS_BELOW) => {
            let mut evidence = vec![format!("CPU {} of one processor", percent(cpu)), said_nothing];
            evidence.extend(always.map(|one| {
                format!("process {} ({}) wanted a processor in each of {} looks", one.pid, one.name, inside.looks.len())
            }));
            evidence.extend(busiest(inside));
            let what = "it is spinning: it computes all the time and says nothing, like an endless loop".to_owned();
            vec![Remark::of("spinning", what, inside.cancel()).from(evidence)]
        }
        Some(cpu) if cpu <= WAITS_BELOW => {
            let mut evidence = vec![format!("CPU {} of one processor", percent(cpu)), said_nothing];
            let waiting = waiting(inside);
            let on = waiting.first().map_or_else(String::new, |first| format!(": {first}"));
            evidence.extend(waiting);
            vec![Remark::of("waiting", format!("it is waiting for something{on}"), inside.cancel()).from(evidence)]
        }
        Some(_) | None => silent(inside, now_ms),
    }
}

/// A command that has said nothing for long.
fn silent(inside: &Inside, now_ms: u64) -> Vec<Remark> {
    let since = |one: &&ExecStatus| {
        let heard =
            inside.outputs.iter().find(|output| output.execution == one.id).and_then(|output| output.last_at_ms);
        now_ms.saturating_sub(heard.unwrap_or(one.started_at_ms).max(one.started_at_ms))
    };
    let quiet = inside.running().into_iter().map(|one| (since(&one), one)).filter(|(ms, _)| *ms > SILENT_MS);
    let worst = quiet.max_by_key(|(ms, _)| *ms);
    let told = worst.map(|(ms, one)| {
        let evidence = vec![format!("{} wrote {} bytes in all", one.id, one.output_bytes)];
        let what = format!("a command has said nothing for {} s", ms / 1000);
        Remark::of("silent", what, format!("viv attach {} {}", inside.sandbox, one.id)).from(evidence)
    });
    told.into_iter().collect()
}

/// Who used most of the processor in the sample.
fn busiest(inside: &Inside) -> Vec<String> {
    let (Some(first), Some(last)) = (inside.first(), inside.last()) else { return Vec::new() };
    let passed_ms = last.at_ms.saturating_sub(first.at_ms).max(1);
    let before = |pid: u32| first.processes.iter().find(|one| one.pid == pid).map_or(0, |one| one.cpu_us);
    let mut by_use: Vec<(u64, &ProcessSeen)> =
        last.processes.iter().map(|one| (one.cpu_us.saturating_sub(before(one.pid)), one)).collect();
    by_use.sort_by_key(|(used_us, _)| std::cmp::Reverse(*used_us));
    let told = by_use.into_iter().take(TOLD).filter(|(used_us, _)| *used_us > 0);
    told.map(|(used_us, one)| {
        format!("process {} ({}) used {} ms in {passed_ms} ms", one.pid, one.name, used_us / 1000)
    })
    .collect()
}

/// Who waits, in which call and on what; who waits for others of them is told last.
fn waiting(inside: &Inside) -> Vec<String> {
    let Some(last) = inside.last() else { return Vec::new() };
    let is_parent = |one: &ProcessSeen| matches!(one.call.as_deref(), Some("wait4" | "waitid" | "rt_sigsuspend"));
    let mut waiting: Vec<&ProcessSeen> = last.processes.iter().filter(|one| matches!(one.state, 'S' | 'D')).collect();
    waiting.sort_by_key(|one| (is_parent(one), one.on.is_none(), std::cmp::Reverse(one.pid)));
    let told = waiting.into_iter().take(TOLD).map(|one| {
        let call = one.call.as_ref().map_or_else(String::new, |call| format!(" in {call}"));
        let on = one.on.as_ref().map_or_else(String::new, |on| format!(" on {on}"));
        let place = one.waits_in.as_ref().map_or_else(String::new, |place| format!(", in the kernel's {place}"));
        format!("process {} ({}) waits{call}{on}{place}", one.pid, one.name)
    });
    told.collect()
}

/// Growing, nearly used up, or killed for it.
fn memory(inside: &Inside) -> Vec<Remark> {
    let Some(last) = inside.last() else { return Vec::new() };
    let mut remarks = Vec::new();
    let killed: Vec<&ExecStatus> = last.executions.iter().filter(|one| one.state == ExecState::OomKilled).collect();
    let kills = last.usage.oom_kills.unwrap_or(0);
    if kills > 0 || !killed.is_empty() {
        let mut evidence = vec![format!("the kernel killed {kills} time(s) for memory")];
        evidence.extend(killed.iter().take(TOLD).map(|one| format!("{} was killed for memory", one.id)));
        let what = "it ran out of memory".to_owned();
        let helps = inside.more_memory();
        remarks.push(Remark::of("out_of_memory", what, helps).from(evidence));
    }
    let used: Vec<u64> = inside.looks.iter().filter_map(|look| look.usage.memory_bytes).collect();
    if let (Some(first), Some(now)) = (used.first().copied(), used.last().copied()) {
        let only_up = used.len() > 2 && used.windows(2).all(|two| two[0] <= two[1]);
        let grew = now.saturating_sub(first);
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let part = grew as f64 / first.max(1) as f64;
        if only_up && grew >= GROWS_BYTES && part >= GROWS_PART {
            let what = "its memory grows and grows".to_owned();
            let evidence = vec![format!("from {} to {} in {} looks, never less", mib(first), mib(now), used.len())];
            remarks.push(Remark::of("memory_growing", what, inside.cancel()).from(evidence));
        }
        if let Some(max) = inside.limits.memory_bytes.filter(|max| *max > 0) {
            #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
            let part = now as f64 / max as f64;
            if part >= MEMORY_NEAR {
                let what = format!("little memory is left: {} of {}", mib(now), mib(max));
                let helps = inside.more_memory();
                remarks.push(Remark::of("memory_short", what, helps).from(vec![format!("{} in use", percent(part))]));
            }
        }
    }
    remarks
}

/// Commands that ran out of time again and again.
fn timeouts(inside: &Inside) -> Vec<Remark> {
    let all = inside.last().map(|look| look.executions.as_slice()).unwrap_or_default();
    let late: Vec<&ExecStatus> = all.iter().filter(|one| one.state == ExecState::TimedOut).collect();
    if late.len() < TIMEOUTS_MIN {
        return Vec::new();
    }
    let evidence = late.iter().rev().take(TOLD).map(|one| format!("{} ran out of time", one.id)).collect();
    let what = format!("commands run out of time again and again: {} of {}", late.len(), all.len());
    vec![Remark::of("repeated_timeouts", what, format!("viv executions {}", inside.sandbox)).from(evidence)]
}

/// What is said of a command that says that the disk is full.
pub(crate) const DISK_FULL: &str = "said_disk_full";

/// Known patterns in what commands said last: the code, what it means, and how it reads.
const PATTERNS: [(&str, &str, &[&str]); 5] = [
    (
        "said_stack_overflow",
        "a command says that its stack overflowed: a recursion without an end",
        &["maximum call stack", "stack overflow", "recursionerror", "maximum recursion depth", "stack level too deep"],
    ),
    (
        "said_timeout",
        "a command says that something did not answer in time",
        &[
            "operation timed out",
            "connection timed out",
            "etimedout",
            "deadline exceeded",
            "request timeout",
            "timeouterror",
        ],
    ),
    (
        "said_out_of_memory",
        "a command says that it ran out of memory",
        &["out of memory", "cannot allocate memory", "memoryerror", "std::bad_alloc", "outofmemoryerror"],
    ),
    (DISK_FULL, "a command says that the disk is full", &["no space left on device", "disk quota exceeded"]),
    (
        "said_too_many",
        "a command says that it may not have more processes or open files",
        &["too many open files", "resource temporarily unavailable", "can't start new thread"],
    ),
];

/// Who said one of these words last, and the line.
fn last_said<'a>(outputs: &'a [Output], words: &[&str]) -> Option<(&'a Output, &'a str)> {
    outputs.iter().find_map(|output| {
        let line = output.tail.lines().rev().find(|line| {
            let line = line.to_lowercase();
            words.iter().any(|words| line.contains(words))
        })?;
        Some((output, line))
    })
}

/// Whether one of them says this.
pub(crate) fn is_said(outputs: &[Output], code: &str) -> bool {
    PATTERNS.iter().any(|(known, _, words)| *known == code && last_said(outputs, words).is_some())
}

fn said(inside: &Inside) -> Vec<Remark> {
    let mut remarks = Vec::new();
    for (code, what, words) in PATTERNS {
        let Some((output, line)) = last_said(&inside.outputs, words) else { continue };
        let line: String = line.chars().filter(|letter| !letter.is_control()).take(160).collect();
        let mut evidence = vec![format!("{} wrote: {line}", output.execution)];
        let (what, helps) = match code {
            "said_out_of_memory" => (what.to_owned(), inside.more_memory()),
            DISK_FULL => {
                evidence.extend(inside.room.evidence());
                let (why, helps) = inside.room.remedy(&inside.sandbox, inside.limits.disk_bytes);
                (format!("{what}; {why}"), helps)
            }
            _ => (what.to_owned(), format!("viv attach {} {}", inside.sandbox, output.execution)),
        };
        remarks.push(Remark::of(code, what, helps).from(evidence));
    }
    remarks
}

/// Nothing runs, and nobody does anything.
fn unused(inside: &Inside) -> Vec<Remark> {
    let Some(last) = inside.last() else { return Vec::new() };
    let unused_ms = last.at_ms.saturating_sub(inside.active_at_ms);
    if unused_ms <= UNUSED_MS || last.executions.iter().any(|one| one.state == ExecState::Running) {
        return Vec::new();
    }
    let evidence = vec![format!("last activity {} min ago", unused_ms / 60_000), "no command runs".to_owned()];
    let what = "nobody uses it: nothing runs in it, and nobody asked it for anything".to_owned();
    vec![Remark::of("no_task", what, format!("viv stop {}", inside.sandbox)).from(evidence)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(id: u8, state: ExecState, output_bytes: u64) -> ExecStatus {
        ExecStatus {
            id: ExecutionId::from_bytes([id; 16]),
            state,
            started_at_ms: 0,
            ended_at_ms: None,
            output_bytes,
            stdin_bytes: 0,
            pid: None,
            argv: Vec::new(),
            detached: false,
        }
    }

    /// Looks a second apart, with so much processor time and memory each, while one command runs.
    fn sampled(cpu_us: &[u64], memory: &[u64], output: &[u64]) -> Inside {
        let looks = cpu_us.iter().zip(memory).zip(output).zip(100_u64..).map(|(((cpu, memory), output), at_s)| Look {
            at_ms: at_s * 1000,
            usage: Usage { cpu_us: Some(*cpu), memory_bytes: Some(*memory), ..Usage::default() },
            executions: vec![command(1, ExecState::Running, *output)],
            processes: Vec::new(),
        });
        Inside {
            sandbox: SandboxId::from_bytes([9; 16]),
            active_at_ms: 99_000,
            looks: looks.collect(),
            limits: ResourceLimits::default(),
            outputs: Vec::new(),
            room: Room::default(),
        }
    }

    fn codes(inside: &Inside) -> Vec<&'static str> {
        symptoms(inside).into_iter().map(|remark| remark.code).collect()
    }

    #[test]
    fn o3_who_computes_and_says_nothing_is_spinning() {
        let mut inside = sampled(&[0, 990_000, 1_990_000], &[8 << 20; 3], &[7; 3]);
        let process =
            |cpu_us| ProcessSeen { pid: 5, name: "loop".to_owned(), state: 'R', cpu_us, ..ProcessSeen::default() };
        inside.looks[0].processes = vec![process(10_000)];
        inside.looks[2].processes = vec![process(1_900_000)];
        let remarks = symptoms(&inside);
        assert_eq!(remarks.iter().map(|remark| remark.code).collect::<Vec<_>>(), ["spinning"]);
        assert!(remarks[0].evidence.iter().any(|line| line.contains("process 5 (loop) used 1890 ms")), "{remarks:?}");
        assert!(remarks[0].helps.starts_with("viv cancel sbx_"), "{remarks:?}");
        let talks = sampled(&[0, 990_000, 1_990_000], &[8 << 20; 3], &[7, 8, 9]);
        assert_eq!(codes(&talks), [""; 0], "who says something works");
        let mut half = sampled(&[0, 480_000, 970_000], &[8 << 20; 3], &[7; 3]);
        assert!(!codes(&half).contains(&"spinning"));
        half.limits.cpu_millis = Some(500);
        assert_eq!(codes(&half), ["spinning"], "all that it may have");
    }

    #[test]
    fn o3_who_always_wants_a_processor_is_spinning_also_on_a_busy_machine() {
        let process = |state| ProcessSeen { pid: 5, name: "loop".to_owned(), state, ..ProcessSeen::default() };
        let mut inside = sampled(&[0, 100_000, 200_000, 300_000], &[8 << 20; 4], &[7; 4]);
        for look in &mut inside.looks {
            look.processes = vec![process('R')];
        }
        assert_eq!(codes(&inside), ["spinning"]);
        inside.looks[1].processes = vec![process('S')];
        assert!(!codes(&inside).contains(&"spinning"), "who waits now and then does not");
    }

    #[test]
    fn o3_who_waits_is_told_with_the_call_and_the_descriptor() {
        let mut inside = sampled(&[0, 100, 200], &[8 << 20; 3], &[7; 3]);
        let process = |pid, call: &str, on: Option<&str>| ProcessSeen {
            pid,
            name: "p".to_owned(),
            state: 'S',
            call: Some(call.to_owned()),
            on: on.map(str::to_owned),
            ..ProcessSeen::default()
        };
        inside.looks[2].processes =
            vec![process(2, "wait4", None), process(3, "recvfrom", Some("descriptor 4, a connection to 10.0.0.1:80"))];
        let remarks = symptoms(&inside);
        assert_eq!(remarks.len(), 1, "{remarks:?}");
        assert_eq!(remarks[0].code, "waiting");
        let what =
            "it is waiting for something: process 3 (p) waits in recvfrom on descriptor 4, a connection to 10.0.0.1:80";
        assert_eq!(remarks[0].what, what);
    }

    #[test]
    fn o3_who_neither_spins_nor_waits_and_says_nothing_for_long_is_silent() {
        let inside = sampled(&[0, 300_000, 600_000], &[8 << 20; 3], &[7; 3]);
        assert_eq!(codes(&inside), ["silent"]);
        let mut heard = inside;
        heard.outputs = vec![Output {
            execution: ExecutionId::from_bytes([1; 16]),
            last_at_ms: Some(100_000),
            tail: String::new(),
        }];
        assert_eq!(codes(&heard), [""; 0]);
    }

    #[test]
    fn o3_memory_that_grows_is_short_or_ran_out_is_told() {
        let mib = |count: u64| count << 20;
        let grows = sampled(&[0, 300_000, 600_000], &[mib(50), mib(60), mib(70)], &[7, 8, 9]);
        assert_eq!(codes(&grows), ["memory_growing"]);
        let mut short = sampled(&[0, 300_000, 600_000], &[mib(95), mib(90), mib(95)], &[7, 8, 9]);
        short.limits.memory_bytes = Some(mib(100));
        assert_eq!(codes(&short), ["memory_short"]);
        let mut out = sampled(&[0, 300_000, 600_000], &[mib(9); 3], &[7, 8, 9]);
        out.looks[2].usage.oom_kills = Some(1);
        out.looks[2].executions.push(command(2, ExecState::OomKilled, 0));
        assert_eq!(codes(&out), ["out_of_memory"]);
    }

    #[test]
    fn o3_what_commands_said_last_is_understood() {
        for (words, code) in [
            ("RangeError: Maximum call stack size exceeded", "said_stack_overflow"),
            ("curl: (28) Operation timed out after 5000 ms", "said_timeout"),
            ("FATAL ERROR: JavaScript heap out of memory", "said_out_of_memory"),
            ("cp: error writing 'x': No space left on device", "said_disk_full"),
            ("OSError: [Errno 24] Too many open files", "said_too_many"),
        ] {
            let mut inside = sampled(&[0, 300_000, 600_000], &[8 << 20; 3], &[7, 8, 9]);
            let tail = format!("hello\n{words}\nbye\n");
            inside.outputs = vec![Output { execution: ExecutionId::from_bytes([1; 16]), last_at_ms: None, tail }];
            let remarks = symptoms(&inside);
            assert_eq!(remarks.iter().map(|remark| remark.code).collect::<Vec<_>>(), [code]);
            assert!(remarks[0].evidence[0].contains(words), "{remarks:?}");
        }
    }

    #[test]
    fn o3_repeated_timeouts_and_nobody_who_uses_it() {
        let mut inside = sampled(&[0, 0, 0], &[8 << 20; 3], &[7; 3]);
        for look in &mut inside.looks {
            look.executions = vec![command(1, ExecState::TimedOut, 0), command(2, ExecState::TimedOut, 0)];
        }
        assert_eq!(codes(&inside), ["repeated_timeouts"]);
        inside.active_at_ms = 0;
        for look in &mut inside.looks {
            look.at_ms += 700_000;
            look.executions.clear();
        }
        assert_eq!(codes(&inside), ["no_task"]);
    }
}
