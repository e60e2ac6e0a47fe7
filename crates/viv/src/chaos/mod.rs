//! `viv chaos`: whole agent loops on daemons that break, one fault in a session, and what came of each (P5).
//!
//! ```text
//!   fault.rs     what goes wrong, and where in a session
//!   session.rs   what an agent does, what it was told is done, and that all of it is there
//!   lane.rs      a data folder with a daemon, and the next daemon when that is gone
//!   harm.rs      signals to processes, and unmounting
//!   caught.rs    which protection it was, by what is recorded
//!   left.rs      what is left on the machine at the end
//! ```

mod caught;
mod fault;
pub(crate) mod harm;
mod lane;
mod left;
mod session;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use self::fault::KINDS;
use self::lane::Lane;
use self::session::{Session, Told};
use crate::client::table::Table;
use crate::client::{Daemon, print, print_json};
use crate::fail::{FAILED, OK};
use crate::settings::Global;
use crate::text::span;

/// Run whole agent loops on daemons that break on purpose, and tell what came of each fault
///
/// Starts daemons with `--chaos` on data folders of their own. Every session is what an agent does: create, run commands,
/// write files, commit, hibernate, resume, a task that is stopped and continued and pushes through the gate, delete. One
/// fault in each. Ends with 1 when something that was acknowledged is lost, or something is left on the machine.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many sessions; with as many as there are kinds of faults, each is used
    #[arg(long, value_name = "N", default_value_t = KINDS.len() as u64)]
    sessions: u64,
    /// Where in the list of faults to begin
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// How many at once, each with a daemon of its own
    #[arg(long, value_name = "N", default_value = "2")]
    at_once: NonZeroU64,
    /// Begin no more sessions after so many minutes, but for the first; also a part of one: 0.5
    #[arg(long, value_name = "MINUTES", value_parser = minutes)]
    minutes: Option<Duration>,
    /// Leave the data folders, to be looked at
    #[arg(long)]
    keep: bool,
}

/// All of it.
#[derive(Debug, Serialize)]
struct Verdict {
    ok: bool,
    sessions: u64,
    /// How many sessions had a fault of which kind that was really done.
    faults: BTreeMap<&'static str, u64>,
    /// Kinds that were not used.
    unused: Vec<&'static str>,
    /// How much was acknowledged in all.
    acknowledged: u64,
    lost: u64,
    /// Sessions that did not come to their end.
    failed: u64,
    leaked: Vec<String>,
    took_ms: u64,
}

/// What the lanes share.
struct Run {
    next: AtomicU64,
    end: u64,
    seed: u64,
    until: Option<Instant>,
    json: bool,
    told: Mutex<Vec<Told>>,
    leaked: Mutex<Vec<String>>,
}

fn minutes(text: &str) -> Result<Duration, String> {
    let minutes: f64 = text.parse().map_err(|error| format!("{error}"))?;
    Duration::try_from_secs_f64(60.0 * minutes).map_err(|error| error.to_string())
}

pub(crate) fn run(args: &Args, global: &Global) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let folder = std::env::temp_dir().join(format!("viv-chaos-{}", std::process::id()));
    fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let folder = folder.canonicalize()?;
    let run = Run {
        next: AtomicU64::new(0),
        end: args.sessions,
        seed: args.seed,
        until: args.minutes.and_then(|so_long| began.checked_add(so_long)),
        json: global.json,
        told: Mutex::default(),
        leaked: Mutex::default(),
    };
    let lanes = args.at_once.get().min(args.sessions.max(1));
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes)
            .map(|lane| {
                scope.spawn({
                    let (run, folder) = (&run, &folder);
                    move || run.lane(&folder.join(format!("{lane}")))
                })
            })
            .collect();
        let joined =
            lanes.into_iter().map(|lane| lane.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a lane panicked"))));
        // All of them end before the first failure is told.
        joined.collect::<Vec<_>>().into_iter().try_for_each(|lane| lane)
    })?;
    let verdict = run.verdict(began);
    if global.json {
        print_json(&verdict)?;
    } else {
        print(&run.table())?;
        print(&shown(&verdict, args.seed))?;
    }
    if verdict.ok && !args.keep {
        remove(&folder);
    } else {
        eprintln!("hint: the daemons' logs and data are in {}", folder.display());
    }
    Ok(ExitCode::from(if verdict.ok { OK } else { FAILED }))
}

impl Run {
    /// Sessions, one after the other, on one data folder.
    fn lane(&self, folder: &Path) -> anyhow::Result<()> {
        let mut lane = Lane::open(folder, self.seed, true)?;
        let global = lane.global();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let is_late = number > 0 && self.until.is_some_and(|until| Instant::now() >= until);
            if number >= self.end || is_late {
                break;
            }
            let (kind, fault) = fault::of_session(number, self.seed);
            let told = Session::new(&lane, &global, number, kind, fault)?.run();
            if self.json {
                print_json(&told)?;
            } else {
                eprintln!("session {number}: {} at {}, {}", told.fault, told.at, span(told.took_ms.max(1)));
            }
            self.told.lock().unwrap_or_else(PoisonError::into_inner).push(told);
        }
        lane.wait_until_served()?;
        let rows = left::while_it_serves(&lane, &Daemon::connect(&global)?.client);
        lane.close();
        let machine = left::on_the_machine(&lane);
        self.leaked.lock().unwrap_or_else(PoisonError::into_inner).extend(rows.into_iter().chain(machine));
        Ok(())
    }

    fn verdict(&self, began: Instant) -> Verdict {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let leaked = self.leaked.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut faults = BTreeMap::new();
        for one in told.iter().filter(|one| one.done) {
            *faults.entry(one.fault).or_default() += 1;
        }
        let unused: Vec<&str> = KINDS.iter().map(|kind| kind.word).filter(|word| !faults.contains_key(word)).collect();
        let (lost, failed) = (
            told.iter().map(|one| one.lost.len() as u64).sum(),
            told.iter().filter(|one| one.failed.is_some()).count() as u64,
        );
        let all_used = unused.is_empty() || (told.len() as u64) < KINDS.len() as u64;
        Verdict {
            ok: lost == 0 && failed == 0 && leaked.is_empty() && all_used && told.iter().all(|one| one.done),
            sessions: told.len() as u64,
            faults,
            unused,
            acknowledged: told.iter().map(|one| one.acknowledged as u64).sum(),
            lost,
            failed,
            leaked,
            took_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// A row for each kind and place, and for each session that did not go well.
    fn table(&self) -> String {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        told.sort_by_key(|one| (KINDS.iter().position(|kind| kind.word == one.fault), one.at, one.session));
        let mut table = Table::new(&["FAULT", "AT", "SESSIONS", "HEALTHY AFTER", "LOST", "CAUGHT BY", "WHAT HAPPENED"]);
        let mut rows: Vec<((&str, &str), Vec<&Told>)> = Vec::new();
        for one in &told {
            match rows.last_mut() {
                Some((of, all)) if *of == (one.fault, one.at) => all.push(one),
                _ => rows.push(((one.fault, one.at), vec![one])),
            }
        }
        for ((fault, at), all) in rows {
            let times: Vec<u64> = all.iter().filter_map(|one| one.healthy_after_ms).collect();
            let healthy = match (times.iter().min(), times.iter().max()) {
                (Some(min), Some(max)) if min != max => format!("{} to {}", span((*min).max(1)), span((*max).max(1))),
                (Some(one), _) => span((*one).max(1)),
                _ => "never".to_owned(),
            };
            let lost: usize = all.iter().map(|one| one.lost.len()).sum();
            let caught: BTreeSet<&str> = all.iter().flat_map(|one| &one.caught_by).map(String::as_str).collect();
            let happened: BTreeSet<&str> = all.iter().flat_map(|one| &one.happened).map(String::as_str).collect();
            let join = |set: BTreeSet<&str>| set.into_iter().collect::<Vec<_>>().join("; ");
            table.row([
                fault.to_owned(),
                at.to_owned(),
                all.len().to_string(),
                healthy,
                if lost == 0 { "nothing".to_owned() } else { lost.to_string() },
                join(caught),
                join(happened),
            ]);
        }
        let mut text = table.render(None);
        for one in told.iter().filter(|one| !one.done || one.failed.is_some() || !one.lost.is_empty()) {
            let _ = writeln!(
                text,
                "NOT WELL: session {}, {} at {}: done {}, lost {:?}, failed {:?}",
                one.session, one.fault, one.at, one.done, one.lost, one.failed
            );
        }
        text
    }
}

fn shown(verdict: &Verdict, seed: u64) -> String {
    let mut text = String::new();
    for leaked in &verdict.leaked {
        let _ = writeln!(text, "LEFT: {leaked}");
    }
    let used = format!("{} of {} kinds of faults", verdict.faults.len(), KINDS.len());
    let _ = writeln!(
        text,
        "{}: {} sessions, {used}, {} acknowledged, {} lost, {} not ended, {} left on the machine, {} (seed {seed})",
        if verdict.ok { "all is well" } else { "NOT WELL" },
        verdict.sessions,
        verdict.acknowledged,
        verdict.lost,
        verdict.failed,
        verdict.leaked.len(),
        span(verdict.took_ms.max(1)),
    );
    text
}

fn remove(folder: &PathBuf) {
    if let Err(error) = fs::remove_dir_all(folder) {
        eprintln!("viv: {} could not be removed: {error}", folder.display());
    }
}
