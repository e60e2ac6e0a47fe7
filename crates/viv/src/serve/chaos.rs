//! `viv serve --chaos`: things go wrong on purpose (P5). Asked for on the command line only, and on a data folder that was
//! made for it: no file, no variable and no default leads here.
//!
//! ```text
//!   --chaos[=SEED]         calls of provider and store go wrong as the seed draws, processes of sandboxes are hurt
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
use viv_core::OwnerMark;
use viv_provider::{PageRequest, Provider};
use viv_sandbox::LocalProvider;
use viv_store::{SqliteStore, Store};

use crate::chaos::harm::{Harm, Parts};

/// In the data folder: it was made for chaos.
const MARKER: &str = "chaos";

/// Of how many calls of the provider in a hundred go wrong, where it is drawn.
const PROVIDER_PERCENT: u64 = 5;

/// And of the store.
const STORE_PERCENT: u64 = 2;

/// How long a call takes that nobody answers.
const SILENCE: Duration = Duration::from_millis(1_500);

/// How often orders are looked for.
const LOOK: Duration = Duration::from_millis(10);

/// Between two processes that are hurt, where it is drawn: at least, and how much more at most.
const HARM_MS: (u64, u64) = (2_000, 6_000);

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
    seed: u64,
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
        fs::write(&marker, "").with_context(|| format!("cannot write {}", marker.display()))?;
        super::say(format_args!("{}", banner(seed, self.chaos_orders.as_deref(), data)));
        tracing::warn!(component = "serve", seed, "chaos is on");
        let orders = Arc::new(Orders::new(SILENCE, die));
        Ok(Some(Chaos { seed, folder: self.chaos_orders.clone(), orders, clock_ms: self.chaos_clock_ms }))
    }
}

fn banner(seed: u64, orders: Option<&Path>, data: &Path) -> String {
    let how = match orders {
        Some(_) => "as it is ordered".to_owned(),
        None => format!("as seed {seed} draws it; `--chaos={seed}` draws the same again"),
    };
    let line = "!".repeat(78);
    format!(
        "{line}\n!!  CHAOS: this daemon breaks its own sandboxes, provider, store and clock on\n!!  purpose, {how}.\n!!  \
         Everything in {} is for tests. Never use it for work.\n{line}",
        data.display()
    )
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
        tokio::spawn(hurt(provider.truth().clone(), mark.clone(), Rng::new(self.seed)));
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

/// Hurts one sandbox after the other, by signals and by unmounting, as a machine would.
async fn hurt(provider: LocalProvider, mark: OwnerMark, mut rng: Rng) {
    loop {
        tokio::time::sleep(Duration::from_millis(HARM_MS.0 + rng.below(HARM_MS.1))).await;
        let Ok(page) = provider.list(&mark, PageRequest::default()).await else { continue };
        if page.items.is_empty() {
            continue;
        }
        let at = rng.below(page.items.len() as u64) as usize;
        let harm = Harm::ALL[rng.below(Harm::ALL.len() as u64) as usize];
        let Ok(found) = provider.whereabouts(&page.items[at].instance).await else { continue };
        let parts =
            Parts { shim: found.supervisor_pid, agent: found.agent_pid, root: found.root, cgroups: found.cgroups };
        let sandbox = page.items[at].instance.sandbox.to_string();
        let done = tokio::task::spawn_blocking(move || harm.done_to(&parts)).await;
        tracing::warn!(component = "serve", sandbox, harm = harm.word(), done = ?done.ok().flatten(), "chaos");
    }
}

#[cfg(test)]
mod tests {
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
}
