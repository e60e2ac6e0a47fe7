//! `viv serve --chaos`: things go wrong on purpose (P5). Asked for on the command line only, and on a data folder that was
//! made for it: no file, no variable and no default leads here.
//!
//! ```text
//!   --chaos[=SEED]         as the seed draws: calls of provider and store go wrong, sandboxes' processes are hurt, old
//!                          handles are used, the clock is set when a daemon begins, and the daemon dies at a call
//!   --chaos-orders FOLDER  only what is ordered there does (`viv chaos`)
//!       order.json         one order; taken away when it was taken
//!       carried-out        how many calls went as it was ordered
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use viv_chaos::{FaultyProvider, FaultyStore, Moment, Order, Orders, Rng, Trouble, Turn};
use viv_core::{Generation, OwnerMark};
use viv_engine::{Engine, Which};
use viv_provider::{InstanceRef, PageRequest, Provider};
use viv_sandbox::LocalProvider;
use viv_store::{SqliteStore, Store};

use crate::chaos::harm::{Harm, Parts};

/// In the data folder: it was made for chaos. What is in it is how many daemons there were, so that each draws its own.
const MARKER: &str = "chaos";

/// Of how many calls of the provider in a hundred go wrong, where it is drawn.
const PROVIDER_PERCENT: u64 = 5;

/// And of the store.
const STORE_PERCENT: u64 = 2;

/// How long a call takes that nobody answers.
const SILENCE: Duration = Duration::from_millis(1_500);

/// How often orders are looked for.
const LOOK: Duration = Duration::from_millis(10);

/// Between two things that are done to sandboxes or to the daemon, where it is drawn: at least, and how much more at most.
const HARM_MS: (u64, u64) = (2_000, 6_000);

/// How far the clock of a daemon is set at most, either way: as in worlds.
const CLOCK_MS_MAX: u64 = 90_000;

/// At which calls a daemon dies, where it is drawn.
const DEADLY: [&str; 6] = ["commit", "create", "execute", "save", "restore", "destroy"];

#[derive(clap::Args)]
pub(super) struct ChaosArgs {
    /// Make things go wrong on purpose, as this seed draws them: for tests on a data folder of their own
    #[arg(long, value_name = "SEED", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    chaos: Option<u64>,
    /// Only what is ordered in this folder goes wrong
    #[arg(long, value_name = "DIR", requires = "chaos", hide = true)]
    chaos_orders: Option<PathBuf>,
    /// The clock shows so much more, or less
    #[arg(long, value_name = "MS", requires = "chaos", hide = true, allow_hyphen_values = true, default_value_t = 0)]
    chaos_clock_ms: i64,
}

/// An order as it is written.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OrderText {
    /// The call.
    pub(crate) call: String,
    /// What happens to it: the word of a trouble, `killed before` or `killed after`.
    pub(crate) turn: String,
    /// How many times.
    pub(crate) times: u32,
}

impl OrderText {
    fn order(&self) -> Option<Order> {
        let turn = match self.turn.as_str() {
            "killed before" => Turn::Killed(Moment::Before),
            "killed after" => Turn::Killed(Moment::After),
            word => Turn::Trouble(*Trouble::ALL.iter().find(|trouble| trouble.is_fault() && trouble.word() == word)?),
        };
        Some(Order { call: self.call.clone(), turn, times: self.times })
    }
}

/// What goes wrong in this daemon.
pub(super) struct Chaos {
    /// Of this daemon: each one on this folder has another.
    seed: u64,
    rng: Rng,
    /// Only what is ordered here.
    folder: Option<PathBuf>,
    orders: Arc<Orders>,
    clock_ms: i64,
}

impl ChaosArgs {
    /// What was asked for; nothing, on most days. Refused on a data folder that is of some use.
    pub(super) fn begin(&self, data: &Path) -> anyhow::Result<Option<Chaos>> {
        let Some(seed) = self.chaos else { return Ok(None) };
        let marker = data.join(MARKER);
        if data.join("viv.db").exists() && !marker.exists() {
            let hint =
                "hint: name an empty one with --data; chaos loses nothing that was acknowledged, and proves it there";
            bail!("{} was not made for chaos, and may hold somebody's work\n{hint}", data.display());
        }
        // There were none before the first one, and a file that cannot be read draws as the first one did.
        let before: u64 = fs::read_to_string(&marker).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        let number = before.wrapping_add(1);
        fs::write(&marker, number.to_string()).with_context(|| format!("cannot write {}", marker.display()))?;
        let own = seed.wrapping_add(before.wrapping_mul(DAEMONS_APART));
        let mut rng = Rng::new(own);
        let clock_ms = match self.chaos_orders {
            Some(_) => self.chaos_clock_ms,
            None => self.chaos_clock_ms.saturating_add(drawn_clock_ms(&mut rng)),
        };
        super::say(format_args!("{}", banner(seed, number, clock_ms, self.chaos_orders.as_deref(), data)));
        tracing::warn!(component = "serve", seed, number, clock_ms, "chaos is on");
        let orders = Arc::new(Orders::new(SILENCE, die));
        Ok(Some(Chaos { seed: own, rng, folder: self.chaos_orders.clone(), orders, clock_ms }))
    }
}

fn banner(seed: u64, number: u64, clock_ms: i64, orders: Option<&Path>, data: &Path) -> String {
    let how = match orders {
        Some(_) => "as it is ordered: calls of its provider and store, and itself at one of them".to_owned(),
        None => format!(
            "as seed {seed} draws it for the {number}. daemon here:\n!!  calls of its provider and store go wrong, \
             processes and mounts of sandboxes\n!!  are hurt, old handles are used, and it dies at a call, as by \
             kill -9:\n!!  whoever wants another one starts it"
        ),
    };
    let line = "!".repeat(78);
    format!(
        "{line}\n!!  CHAOS: this daemon breaks on purpose, {how}.\n!!  Its clock is set by {clock_ms} ms.\n!!  \
         Everything in {} is for tests. Never use it for work.\n{line}",
        data.display()
    )
}

/// What keeps the draws of one daemon apart from those of the next. Not the step of [`Rng`], or the next one would draw the
/// same, one number later.
const DAEMONS_APART: u64 = 0xd1b5_4a32_d192_ed03;

/// How far the clock of this daemon is set: in a third of them not at all.
fn drawn_clock_ms(rng: &mut Rng) -> i64 {
    let by = 1 + rng.below(CLOCK_MS_MAX).cast_signed();
    match rng.below(3) {
        0 => 0,
        1 => by,
        _ => -by,
    }
}

fn die() {
    let _ = kill_process(getpid(), Signal::KILL);
    // Nothing is done between the signal and the end.
    loop {
        thread::park();
    }
}

/// The store, in a layer in which it fails where that was asked for.
pub(super) fn around_store(chaos: Option<&Chaos>, store: SqliteStore) -> (Arc<dyn Store>, Option<Arc<FaultyStore>>) {
    match chaos {
        None => (Arc::new(store), None),
        Some(chaos) => {
            let faulty = Arc::new(FaultyStore::around(Arc::new(store), chaos.seed, 0, chaos.orders.clone()));
            (faulty.clone(), Some(faulty))
        }
    }
}

/// The same of the provider.
pub(super) fn around_provider(
    chaos: Option<&Chaos>,
    provider: LocalProvider,
) -> (Arc<dyn Provider>, Option<Arc<FaultyProvider<LocalProvider>>>) {
    match chaos {
        None => (Arc::new(provider), None),
        Some(chaos) => {
            let faulty = Arc::new(FaultyProvider::around(provider, chaos.seed, 0, chaos.orders.clone()));
            (faulty.clone(), Some(faulty))
        }
    }
}

impl Chaos {
    /// What the clock shows when it should show this.
    pub(super) fn clock_ms(&self, wall_ms: u64) -> u64 {
        wall_ms.saturating_add_signed(self.clock_ms)
    }

    /// From now on things go wrong: a daemon that has begun to serve.
    pub(super) fn unleash(
        self,
        engine: &Engine,
        store: &FaultyStore,
        provider: &FaultyProvider<LocalProvider>,
        mark: &OwnerMark,
    ) -> anyhow::Result<()> {
        if let Some(folder) = self.folder {
            let orders = self.orders;
            thread::Builder::new().name("chaos".to_owned()).spawn(move || take_orders(&folder, &orders))?;
            return Ok(());
        }
        store.set_percent(STORE_PERCENT);
        provider.set_percent(PROVIDER_PERCENT);
        let hurts = Hurts { engine: engine.clone(), provider: provider.truth().clone(), mark: mark.clone() };
        tokio::spawn(hurts.go_on(self.orders, self.rng));
        Ok(())
    }
}

/// Takes what is ordered, one order after the other.
fn take_orders(folder: &Path, orders: &Orders) {
    let (file, count) = (folder.join("order.json"), folder.join("carried-out"));
    let mut told = None;
    loop {
        if let Ok(text) = fs::read(&file) {
            match serde_json::from_slice::<OrderText>(&text).ok().and_then(|text| text.order()) {
                Some(order) => orders.give(order),
                // An order that names nothing takes back those that are open.
                None => orders.forget(),
            }
            let _ = fs::remove_file(&file);
        }
        let done = orders.carried_out();
        if told != Some(done) && super::write_whole(&count, done.to_string().as_bytes()).is_ok() {
            told = Some(done);
        }
        thread::sleep(LOOK);
    }
}

/// What is done by itself, one thing after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Deed {
    /// A sandbox is hurt, by signals and by unmounting, as a machine would.
    Harm(Harm),
    /// Somebody uses a handle of an older generation.
    OldHandle,
    /// This daemon dies at its next call of that name.
    Death(&'static str, Moment),
}

/// All of them, in an order that is drawn: each comes up before any comes again.
fn deeds(rng: &mut Rng) -> Vec<Deed> {
    let moment = if rng.chance(50) { Moment::Before } else { Moment::After };
    let death = Deed::Death(DEADLY[rng.below(DEADLY.len() as u64) as usize], moment);
    let mut left: Vec<Deed> = Harm::ALL.into_iter().map(Deed::Harm).chain([Deed::OldHandle, death]).collect();
    let mut drawn = Vec::with_capacity(left.len());
    while !left.is_empty() {
        drawn.push(left.swap_remove(rng.below(left.len() as u64) as usize));
    }
    drawn
}

/// Whom things are done to.
struct Hurts {
    engine: Engine,
    provider: LocalProvider,
    mark: OwnerMark,
}

impl Hurts {
    async fn go_on(self, orders: Arc<Orders>, mut rng: Rng) {
        let mut next = Vec::new();
        loop {
            tokio::time::sleep(Duration::from_millis(HARM_MS.0 + rng.below(HARM_MS.1))).await;
            if next.is_empty() {
                next = deeds(&mut rng);
            }
            let Some(deed) = next.pop() else { continue };
            if let Deed::Death(call, moment) = deed {
                tracing::warn!(component = "serve", call, ?moment, "chaos: this daemon dies at a call");
                orders.give(Order { call: call.to_owned(), turn: Turn::Killed(moment), times: 1 });
                continue;
            }
            let listed = self.provider.list(&self.mark, PageRequest::default()).await.map(|page| page.items);
            let all: Vec<InstanceRef> = listed.into_iter().flatten().map(|item| item.instance).collect();
            if all.is_empty() {
                // It is done to whoever comes next.
                next.push(deed);
                continue;
            }
            let instance = &all[rng.below(all.len() as u64) as usize];
            match deed {
                Deed::Harm(harm) => self.harm(instance, harm).await,
                Deed::OldHandle => self.use_old_handle(instance).await,
                Deed::Death(..) => {}
            }
        }
    }

    async fn harm(&self, instance: &InstanceRef, harm: Harm) {
        let Ok(found) = self.provider.whereabouts(instance).await else { return };
        let parts =
            Parts { shim: found.supervisor_pid, agent: found.agent_pid, root: found.root, cgroups: found.cgroups };
        let sandbox = instance.sandbox.to_string();
        let done = tokio::task::spawn_blocking(move || harm.done_to(&parts)).await;
        tracing::warn!(component = "serve", sandbox, harm = harm.word(), done = ?done.ok().flatten(), "chaos");
    }

    /// As a client that heard nothing of what became of its sandbox: it is refused, or leaves a folder behind (T5).
    async fn use_old_handle(&self, instance: &InstanceRef) {
        let (sandbox, Some(old)) = (&instance.sandbox, instance.generation.0.checked_sub(1)) else { return };
        let Ok(view) = self.engine.activity(sandbox).await else { return };
        let which = Which::Id(sandbox.clone());
        let answer = match self.engine.work_in(&view.sandbox.project, &which, Some(Generation(old))).await {
            Ok(handle) => format!("{LET_IN}: {:?}", handle.file_mkdir("/workspace/by-an-old-handle").await),
            Err(refused) => format!("refused: {refused}"),
        };
        tracing::warn!(component = "serve", %sandbox, old, answer, "chaos: an old handle was used");
    }
}

/// What is told of an old handle that should have been refused.
const LET_IN: &str = "LET IN";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn p5_chaos_is_refused_where_there_may_be_work() {
        let folder = std::env::temp_dir().join(format!("viv-chaos-refused-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let asked = |chaos| ChaosArgs { chaos, chaos_orders: None, chaos_clock_ms: 0 };
        assert!(asked(None).begin(&folder).unwrap().is_none());
        assert!(!folder.join(MARKER).exists());
        fs::write(folder.join("viv.db"), "").unwrap();
        let Err(refused) = asked(Some(1)).begin(&folder) else { panic!("it was taken") };
        assert!(refused.to_string().contains("was not made for chaos"), "{refused}");
        fs::remove_file(folder.join("viv.db")).unwrap();
        assert!(asked(Some(1)).begin(&folder).unwrap().is_some());
        fs::write(folder.join("viv.db"), "").unwrap();
        assert!(asked(Some(1)).begin(&folder).unwrap().is_some(), "the next one on the same folder");
        assert_eq!(fs::read_to_string(folder.join(MARKER)).unwrap(), "2", "and it draws as the second one");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn p5_an_order_is_a_call_and_what_happens_to_it() {
        let text = |turn: &str| OrderText { call: "save".to_owned(), turn: turn.to_owned(), times: 1 }.order();
        assert_eq!(text("lost").unwrap().turn, Turn::Trouble(Trouble::Lost));
        assert_eq!(text("killed after").unwrap().turn, Turn::Killed(Moment::After));
        assert_eq!(text("services"), None, "no fault");
        assert_eq!(text(""), None);
    }

    #[test]
    fn p5_each_thing_that_is_drawn_comes_up_before_any_comes_again() {
        let mut orders = BTreeSet::new();
        for seed in 0..50 {
            let drawn = deeds(&mut Rng::new(seed));
            let harms = drawn.iter().filter(|deed| matches!(deed, Deed::Harm(_))).count();
            let deaths = drawn.iter().filter(|deed| matches!(deed, Deed::Death(..))).count();
            let old = drawn.iter().filter(|deed| **deed == Deed::OldHandle).count();
            assert_eq!((harms, old, deaths), (Harm::ALL.len(), 1, 1), "{drawn:?}");
            assert_eq!(drawn, deeds(&mut Rng::new(seed)), "the same again");
            orders.insert(format!("{drawn:?}"));
        }
        assert!(orders.len() > 40, "in one order or another");
    }

    #[test]
    fn p5_each_daemon_on_a_folder_draws_its_clock_and_one_that_is_ordered_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let clock = |chaos, orders: Option<&Path>| {
            let asked = ChaosArgs { chaos: Some(chaos), chaos_orders: orders.map(Path::to_owned), chaos_clock_ms: 5 };
            asked.begin(folder.path()).unwrap().unwrap().clock_ms
        };
        let all: BTreeSet<i64> = (0..30).map(|_| clock(7, None)).collect();
        assert!(all.contains(&5) && all.iter().any(|ms| *ms > 5) && all.iter().any(|ms| *ms < 0), "{all:?}");
        assert!(all.iter().all(|ms| ms.abs_diff(5) <= CLOCK_MS_MAX), "{all:?}");
        assert_eq!(clock(7, Some(Path::new("orders"))), 5);
    }
}
