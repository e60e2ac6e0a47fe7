//! `viv serve`: the daemon. It owns a data folder, and leaves its sandboxes running when it ends.
//!
//! ```text
//!   DATA/owner.*       who owns it
//!   DATA/viv.db        what is recorded
//!   DATA/sandboxes/    the local provider's
//!   DATA/key           the first key, for clients on this machine
//!   DATA/daemon.json   where it listens
//! ```

mod alerts;
pub(crate) mod chaos;
mod cleanup;
mod config;
mod failpoint;
mod gates;
mod owner;
mod spares;
mod traces;
mod webhooks;

use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::Metadata;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use viv_core::OwnerMark;
use viv_core::lifecycle::Actor;
use viv_core::limits::ResourceLimits;
use viv_engine::{Clock, Engine, EngineConfig, Gates};
use viv_sandbox::{DriverKind, KeepMemory, LocalConfig, LocalProvider, Runtime, StoreConfig, Tidier, TidyTurn};
use viv_server::{Build, LogRing, ServerConfig, ServerState};
use viv_store::{ApiKey, KeyScope, Owner, Quota, SqliteStore, Sums, Weights};

use crate::settings::{DAEMONS, Global};
use crate::{COMMIT, place};
use config::{FileConfig, LazyRestore, SaveMemory};
use owner::{Ownership, write_whole};
use traces::Otlp;

/// Where the daemon listens when nothing is said.
const LISTEN: &str = "127.0.0.1:7711";

/// How long work that is under way may hold up the end of the daemon.
const ENDED_WITHIN: Duration = Duration::from_secs(5);

/// Sandboxes wait more than they compute, and some calls block for a disk.
const BLOCKING_THREADS_MAX: usize = 256;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to listen [default: 127.0.0.1:7711]
    #[arg(long, env = "VIV_LISTEN")]
    listen: Option<SocketAddr>,
    /// Wait until the daemon that owns the data folder ends or hangs, and take over then
    #[arg(long)]
    standby: bool,
    /// How many sandboxes there may be
    #[arg(long, env = "VIV_SANDBOXES_MAX")]
    sandboxes_max: Option<u64>,
    /// OCI runtime to use instead of the embedded one, by name or path: runsc (gVisor), runc
    #[arg(long, env = "VIV_RUNTIME")]
    runtime: Option<PathBuf>,
    /// CRIU that saves the memory of sandboxes, instead of the machine's own
    #[arg(long, env = "VIV_CRIU")]
    criu: Option<PathBuf>,
    /// Whether memory is saved: auto (where it can be), off, or on (else the daemon does not start)
    #[arg(long, env = "VIV_SAVE_MEMORY")]
    save_memory: Option<SaveMemory>,
    /// Whether memory is brought back while it is used already: auto (where CRIU and the kernel can) or off
    #[arg(long, env = "VIV_LAZY_RESTORE")]
    lazy_restore: Option<LazyRestore>,
    /// How layers are kept: btrfs or plain
    #[arg(long, env = "VIV_LAYERS")]
    layers: Option<String>,
    /// Name of our cgroup
    #[arg(long, env = "VIV_CGROUP_PREFIX", hide = true)]
    cgroup_prefix: Option<String>,
    /// What is said on standard error: error, warn, info or debug
    #[arg(long, env = "VIV_LOG")]
    log: Option<LevelFilter>,
    #[command(flatten)]
    traces: traces::TracesArgs,
    #[command(flatten)]
    chaos: chaos::ChaosArgs,
}

pub(crate) fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let files = global.config_files();
    let file = config::read(&files)?;
    let data = match (global.data_named(), &file.server.data) {
        (None, Some(data)) => data.clone(),
        (Some(_) | None, _) => global.data()?,
    };
    make_folder(&data)?;
    let data = data.canonicalize().with_context(|| format!("cannot find {}", data.display()))?;
    let logs = LogRing::default();
    let traces = args.traces.begin(&file.traces)?;
    let level = args.log.or(file.server.log.map(LevelFilter::from)).unwrap_or(LevelFilter::WARN);
    install_log(&logs, level, traces.as_ref());
    raise_open_files();
    // Whoever waits as a standby waits here, before anything is opened.
    let ownership = Ownership::take(&data, args.standby)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8))
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .enable_all()
        .build()?;
    let ended = runtime.block_on(daemon(args, &file, files, &data, &ownership, logs, traces.as_ref()));
    // Work on a disk that hangs is not waited for: who comes next waits for our lock.
    runtime.shutdown_timeout(ENDED_WITHIN);
    if let Some(traces) = traces {
        traces.end();
    }
    ended
}

async fn daemon(
    args: Args,
    file: &FileConfig,
    files: Vec<PathBuf>,
    data: &Path,
    ownership: &Ownership,
    logs: LogRing,
    traces: Option<&Otlp>,
) -> anyhow::Result<ExitCode> {
    let now_ms = wall_ms();
    let file_of_store = data.join("viv.db");
    if ownership.from_undead {
        SqliteStore::renew(&file_of_store).context("cannot get the store out of the hands of its owner")?;
    }
    let chaos = args.chaos.begin(data)?;
    let opened = SqliteStore::open(&file_of_store).context("cannot open the store")?;
    let (store, faulty_store) = chaos::around_store(chaos.as_ref(), opened);
    let process = &ownership.who.process;
    let owner = Owner {
        name: ownership.who.name.clone(),
        boot_id: process.boot_id.clone(),
        pid: process.pid,
        start_ticks: process.start_ticks,
        epoch: 0,
        since_ms: now_ms,
    };
    let epoch = store.own(owner).await.context("cannot own the store")?;
    let fresh = format!("viv-{}", hex(&draw()[..6]));
    let mark: OwnerMark = store.set_meta_once(epoch, "owner_mark", &fresh).await?.parse()?;

    let mut config = EngineConfig::new(mark, ownership.who.name.clone());
    config.quota = Quota {
        total_max: args.sandboxes_max.or(file.sandboxes.max).unwrap_or(config.quota.total_max),
        project_max: file.sandboxes.max_per_project.unwrap_or(u64::MAX),
        total_sums_max: file.quota.total.into(),
        project_sums_max: file.quota.per_project.into(),
        weights: weights(&LocalConfig::new(data.join(DAEMONS), place::own_binary()?).limits, data),
    };
    config.periods.keep = file.retention.keep().unwrap_or(config.periods.keep);
    file.reconcile.apply(&mut config.periods);
    config.cleanup = Some(file.cleanup.config());
    config.spares = file.spares.config()?;
    config.alerts = Some(file.alerts.config()?);
    config.gates.replace(gates::settings(&file.gates, std::env::vars_os())?);
    config.failpoint = failpoint::from_environment();
    let guard = webhooks::guard(file.hooks.private_addresses, &file.hooks.private_ranges, authorities())?;
    config.webhooks = Some(viv_server::webhooks(&guard));
    let private_places = vec![data.display().to_string(), "/sys/fs/cgroup".to_owned(), "/proc".to_owned()];
    let (patience, within) = (file.webhooks.patience(), file.webhooks.timeout());
    config.subscriptions = Some(viv_server::events(&guard, &private_places, patience, within));
    config.inside = Some(viv_server::inside());
    config.traces = traces.map(Otlp::tracing);
    let gates = config.gates.clone();
    for gate in viv_engine::Gate::ALL.into_iter().filter(|gate| !gates.is_on_everywhere(*gate)) {
        let (name, setting) = (gate.name(), gates.setting(gate));
        say(format_args!("warning: the gate {name} is {setting}: what it protects from can happen"));
    }
    let provider = open_provider(&args, file, data, ownership.from_undead)?;
    tidy_regularly(Tidier::new(provider.clone(), file.reconcile.tidy_all()), file.reconcile.tidy())?;
    let mark = config.owner.clone();
    let shown_ms = chaos.as_ref().map_or_else(wall_ms, |chaos| chaos.clock_ms(wall_ms()));
    let (provider, faulty_provider) = chaos::around_provider(chaos.as_ref(), provider);
    let provider = if traces.is_some() { Otlp::around_provider(provider) } else { provider };
    let engine = Engine::start(config, store, provider, epoch, Clock::showing(shown_ms), draw).await?;

    let build = Build { commit: COMMIT.to_owned(), ..Build::default() };
    let mut setup = ServerConfig { build, ..ServerConfig::default() };
    setup.private_places = private_places;
    setup.copies = Some(data.to_owned());
    let rate = &mut setup.bounds.wrong_key_rate;
    rate.burst = file.server.wrong_keys_max.map_or(rate.burst, f64::from);
    rate.per_second = file.server.wrong_keys_per_s.map_or(rate.per_second, f64::from);
    let state = ServerState::new(engine.clone(), setup, logs).await?;
    make_local_key(&engine, &state, &data.join("key")).await?;
    // Also what was switched while no daemon ran is news.
    gates::tell(&engine, &gates).await;
    reload_on_hangup(engine.clone(), gates, files)?;

    let listen = args.listen.or(file.server.listen).map_or_else(|| LISTEN.parse(), Ok)?;
    let listener = bind(listen, args.standby).await?;
    let address = listener.local_addr()?;
    let url = format!("http://{address}");
    let daemon = serde_json::json!({ "url": url, "pid": std::process::id(), "version": env!("CARGO_PKG_VERSION") });
    let daemon_file = data.join("daemon.json");
    // Before anybody is told where it is: whoever ends it at once ends it in order.
    let asked = asked_to_end()?;
    write_whole(&daemon_file, &serde_json::to_vec_pretty(&daemon)?)?;
    say(format_args!("viv {} listens on {url}, with everything in {}", env!("CARGO_PKG_VERSION"), data.display()));

    if let (Some(chaos), Some(store), Some(provider)) = (chaos, &faulty_store, &faulty_provider) {
        chaos.unleash(&engine, store, provider, &mark)?;
    }
    let ended = engine.clone();
    let until = async move {
        tokio::select! {
            () = asked => {}
            () = ended.ended() => {
                say(format_args!("error: somebody took over the store; this daemon ends, its sandboxes live on"));
            }
        }
    };
    let served = viv_server::serve(listener, viv_server::router(state), until).await;
    engine.written().await;
    engine.shut_down();
    // Who took over from us has written its own.
    if ownership.is_ours(data) {
        let _ = fs::remove_file(&daemon_file);
    }
    served?;
    Ok(ExitCode::SUCCESS)
}

/// Where distributions keep the authorities that the machine trusts: Debian and Alpine, Fedora, SUSE.
const AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The machine's authorities; without any, only plain webhooks are delivered.
fn authorities() -> Vec<u8> {
    AUTHORITIES.iter().find_map(|path| fs::read(path).ok()).unwrap_or_default()
}

fn open_provider(args: &Args, file: &FileConfig, data: &Path, from_undead: bool) -> anyhow::Result<LocalProvider> {
    let mut config = LocalConfig::new(data.join(DAEMONS), place::own_binary()?);
    config.renew_locks = from_undead;
    let sandboxes = &file.sandboxes;
    if let Some(prefix) = args.cgroup_prefix.as_ref().or(sandboxes.cgroup_prefix.as_ref()) {
        config.cgroup_prefix.clone_from(prefix);
    } else {
        "viv".clone_into(&mut config.cgroup_prefix);
    }
    if let Some(binary) = args.runtime.as_ref().or(sandboxes.runtime.as_ref()) {
        config.runtime = Runtime::Binary(binary.clone());
    }
    let driver = match args.layers.as_deref().or(sandboxes.layers.as_deref()) {
        None => None,
        Some("btrfs") => Some(DriverKind::Btrfs),
        Some("plain") => Some(DriverKind::Plain),
        Some(other) => bail!("layers cannot be kept by {other:?}\nhint: btrfs or plain"),
    };
    config.store = StoreConfig { driver, pool_bytes: sandboxes.pool_mib.map(|mib| mib << 20) };
    config.criu = args.criu.clone().or_else(|| sandboxes.criu.clone());
    let save_memory = args.save_memory.or(sandboxes.save_memory).unwrap_or_default();
    let lazy_restore = args.lazy_restore.or(sandboxes.lazy_restore).unwrap_or_default();
    config.keep_memory = match (save_memory, lazy_restore) {
        (SaveMemory::Off, _) => KeepMemory::Off,
        (SaveMemory::On | SaveMemory::Auto, LazyRestore::Off) => KeepMemory::Eager,
        (SaveMemory::On | SaveMemory::Auto, LazyRestore::Auto) => KeepMemory::Lazy,
    };
    let provider = LocalProvider::open(config)?;
    if let (SaveMemory::On, Err(why)) = (save_memory, provider.criu()) {
        bail!("memory of sandboxes is to be saved, and cannot be: {why}\nhint: `--save-memory auto` goes without");
    }
    Ok(provider)
}

/// What a sandbox counts for that says nothing about a limit, or that there is none: what the provider gives it then,
/// and all that the machine has (L18).
fn weights(defaults: &ResourceLimits, data: &Path) -> Weights {
    let number = |file: &str| fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok());
    let disk = rustix::fs::statvfs(data).map_or(u64::MAX, |disk| disk.f_blocks.saturating_mul(disk.f_frsize));
    let machine = Sums {
        cpu_millis: std::thread::available_parallelism().map_or(1, |count| count.get() as u64) * 1000,
        memory_bytes: rustix::system::sysinfo().totalram.saturating_mul(rustix::system::sysinfo().mem_unit.into()),
        disk_bytes: disk,
        processes: number("/proc/sys/kernel/pid_max").unwrap_or(1 << 22),
    };
    Weights { unsaid: Sums::of(defaults, &Weights { unsaid: machine, unlimited: machine }), unlimited: machine }
}

/// Finishes what others had begun to take apart, also when they still held it at the start, and looks at the whole store
/// where something came or went (J2).
fn tidy_regularly(mut tidier: Tidier, period: Duration) -> anyhow::Result<()> {
    // A thread that nobody waits for: it may take as long as a disk is slow, and what it does can be given up.
    let work = move || {
        loop {
            std::thread::sleep(period);
            match tidier.turn() {
                TidyTurn::Trash => {}
                TidyTurn::Everything(done) => {
                    for failed in done.failed {
                        tracing::warn!(component = "serve", "tidying up: {failed}");
                    }
                }
            }
        }
    };
    std::thread::Builder::new().name("tidy".to_owned()).spawn(work)?;
    Ok(())
}

/// A standby may be quicker than the kernel, which gives the address free when the last of the old owner is gone.
async fn bind(address: SocketAddr, patient: bool) -> anyhow::Result<TcpListener> {
    let until = tokio::time::Instant::now() + Duration::from_secs(if patient { 30 } else { 0 });
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && tokio::time::Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => {
                let hint = "hint: is another daemon there? name another address with --listen, such as 127.0.0.1:0";
                return Err(error).with_context(|| format!("cannot listen on {address}\n{hint}"));
            }
        }
    }
}

/// A key for clients on this machine, who may read the data folder: made when there is none, or it is of no use.
async fn make_local_key(engine: &Engine, state: &ServerState, path: &Path) -> anyhow::Result<()> {
    let known = fs::read_to_string(path).ok().map(|secret| *blake3::hash(secret.trim().as_bytes()).as_bytes());
    let keys = engine.store().keys().await?;
    let usable = |key: &ApiKey| key.scope == KeyScope::Admin && key.revoked_at_ms.is_none();
    if keys.iter().any(|key| usable(key) && Some(key.hash) == known) {
        return Ok(());
    }
    let made = state.make_key("local", KeyScope::Admin, Actor::part("serve")).await?;
    write_whole(path, format!("{}\n", made.secret).as_bytes())
}

/// Gates are read again on SIGHUP; what changed is journaled and said.
fn reload_on_hangup(engine: Engine, gates: Gates, files: Vec<PathBuf>) -> anyhow::Result<()> {
    let mut hangups = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            let settings = config::read(&files).and_then(|file| gates::settings(&file.gates, std::env::vars_os()));
            match settings {
                Ok(settings) => gates.replace(settings),
                Err(error) => {
                    tracing::error!(component = "serve", "the configuration is not taken: {error:#}");
                    continue;
                }
            };
            gates::tell(&engine, &gates).await;
        }
    });
    Ok(())
}

/// Listens from when it is called, and answers when somebody asked.
fn asked_to_end() -> anyhow::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Tells whoever started it. No daemon ends because its log lies on a full disk.
fn say(words: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{words}");
}

/// What is said goes to standard error, and the last of it is kept for who asks.
fn install_log(ring: &LogRing, level: LevelFilter, traces: Option<&Otlp>) {
    let said = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    // What cannot be written is not complained about where it cannot be written.
    let said = said.log_internal_errors(false).with_filter(level.and(filter_fn(is_said)));
    let kept = ring.clone().with_filter(LevelFilter::DEBUG.and(filter_fn(is_said)));
    // Spans are for traces alone: without, they are not even made.
    tracing_subscriber::registry().with(traces.map(Otlp::layer)).with(said).with(kept).init();
}

fn is_said(metadata: &Metadata<'_>) -> bool {
    metadata.is_event()
}

/// Every living instance has a connection of its own, over which its end is told.
fn raise_open_files() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    // Where it cannot be raised, there is room for fewer; who finds none is told so.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
}

fn make_folder(data: &Path) -> anyhow::Result<()> {
    if data.is_dir() {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o711).create(data);
    made.with_context(|| format!("cannot make {}\nhint: name another folder with --data", data.display()))?;
    // Whatever the mask is: sandboxes' own ids have to reach what is theirs below it; nobody lists it.
    let _ = fs::set_permissions(data, fs::Permissions::from_mode(0o711));
    Ok(())
}

fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// 16 random bytes.
fn draw() -> [u8; 16] {
    let mut bytes = [0; 16];
    // The kernel's own answers whatever happens once it was seeded, which is long before anybody starts us.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
