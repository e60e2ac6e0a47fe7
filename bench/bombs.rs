//! How long a neighbour, a listing and a look take while a sandbox does its worst, beside the same when it is quiet.
//!
//! Each bomb goes off in a sandbox with the limits that hold when nothing is said, except for the memory, which is not
//! half of this machine's, and the disk, which would be all of it. Quiet and bombed are measured in turns, in one run:
//! machines differ, and so do hours.

use std::path::Path;
use std::time::{Duration, Instant};

use viv_core::exec::{ExecSpec, OutputEvent};
use viv_core::{ExecutionId, Generation, OwnerMark, SandboxId};
use viv_provider::{InstanceRef, InstanceSpec, PageRequest, Provider};
use viv_sandbox::{LocalConfig, LocalProvider};

mod common;

use common::{fresh, median, mutation, ratio, show};

/// How often each is asked, quiet and bombed.
const ROUNDS: usize = 40;

/// Between two questions, as somebody at work would ask.
const PAUSE: Duration = Duration::from_millis(20);

/// A bomb burns for so long before anybody is asked; a slow one is not to be measured before it is lit.
const LIT_AFTER: Duration = Duration::from_millis(500);

const MEMORY_BYTES: u64 = 512 << 20;
const DISK_BYTES: u64 = 64 << 20;

/// What is measured, and what it does. Perl, because a shell gives up when it cannot fork.
const BOMBS: [(&str, &str); 8] = [
    ("fork", "fork while 1"),
    (
        "fork and exit",
        "my $first = $$; while (1) { my $pid = fork; next if $$ == $first; \
         if (!defined $pid) { exit if rand() < 0.3 } elsif ($pid && rand() < 0.5) { exec '/bin/sh', '-c', 'exit 0' } }",
    ),
    ("memory", "while (1) { for (1..3) { fork or exec 'tail', '-n', '1', '/dev/zero' } 1 while wait > 0 }"),
    (
        "disk",
        "while (1) { for my $n (0..2) { open my $f, '>>', \"/workspace/fill$n\"; \
         1 while syswrite $f, 'x' x (1 << 20); close $f; } unlink '/workspace/fill0' }",
    ),
    (
        "files",
        "mkdir '/workspace/many'; while (1) { my $n = 0; \
         while (open my $f, '>', \"/workspace/many/\" . 'x' x 200 . $n) { $n++ } unlink glob('/workspace/many/*0') }",
    ),
    (
        "descriptors",
        "for (1..8) { fork or last } while (1) { my @held; while (1) { open(my $f, '<', '/dev/null') or last; \
         push @held, $f; pipe(my $r, my $w) or last; push @held, $r, $w } }",
    ),
    ("output", "fork; open STDERR, '>&', \\*STDOUT; 1 while syswrite STDOUT, \"flood\\n\" x 1000"),
    ("processors", "for (1..16) { fork or last } 1 while 1"),
];

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(bench());
}

struct Range {
    provider: LocalProvider,
    owner: OwnerMark,
    neighbour: SandboxId,
}

/// Times of one question.
#[derive(Default)]
struct Times {
    command: Vec<Duration>,
    list: Vec<Duration>,
    look: Vec<Duration>,
}

async fn bench() {
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir().unwrap();
    let range = Range::new(folder.path()).await;
    println!("{:14} {:8} quiet: median      worst | bombed: median      worst | ratio: median  worst", "bomb", "");
    for (name, script) in BOMBS {
        let bombed = SandboxId::from_bytes(fresh());
        let mut spec = InstanceSpec::host(600_000);
        spec.limits.disk_bytes = matches!(name, "disk" | "files").then_some(DISK_BYTES);
        range.provider.create(&mutation(), &bombed, &range.owner, &spec).await.unwrap();
        let quiet = range.asked(&bombed).await;
        let bomb = ExecutionId::from_bytes(fresh());
        let spec = ExecSpec {
            argv: vec!["/usr/bin/perl".into(), "-e".into(), script.into()],
            output_bytes_max: Some(1 << 20),
            ..ExecSpec::default()
        };
        range.provider.execute(&mutation(), &bombed, &bomb, &spec).await.unwrap();
        tokio::time::sleep(LIT_AFTER).await;
        let during = range.asked(&bombed).await;
        let state = range.provider.execution(&instance(&bombed), &bomb).await.unwrap().state;
        assert!(!state.is_final(), "the {name} bomb went out by itself: {state:?}");
        let started = Instant::now();
        range.provider.cancel(&mutation(), &bombed, &bomb).await.unwrap();
        let cancelled = started.elapsed();
        range.provider.destroy(&mutation(), &bombed).await.unwrap();
        compare(name, "command", quiet.command, during.command);
        compare("", "list", quiet.list, during.list);
        compare("", "look", quiet.look, during.look);
        println!("{:14} {:8} {}", "", "cancel", show(cancelled));
    }
    range.provider.destroy(&mutation(), &range.neighbour).await.unwrap();
}

impl Range {
    async fn new(folder: &Path) -> Self {
        let mut config = LocalConfig::new(folder.join("data"), env!("CARGO_BIN_EXE_viv").into());
        config.cgroup_prefix = format!("viv-bench-{}", std::process::id());
        config.limits.memory_bytes = Some(MEMORY_BYTES);
        let provider = LocalProvider::open(config).unwrap();
        let owner: OwnerMark = "bench".parse().unwrap();
        let neighbour = SandboxId::from_bytes(fresh());
        provider.create(&mutation(), &neighbour, &owner, &InstanceSpec::host(600_000)).await.unwrap();
        Self { provider, owner, neighbour }
    }

    /// All three questions, in turns.
    async fn asked(&self, bombed: &SandboxId) -> Times {
        let mut times = Times::default();
        for _ in 0..ROUNDS {
            let started = Instant::now();
            self.command().await;
            times.command.push(started.elapsed());
            let started = Instant::now();
            self.provider.list(&self.owner, PageRequest::default()).await.unwrap();
            times.list.push(started.elapsed());
            let started = Instant::now();
            self.provider.observe(&instance(bombed)).await.unwrap();
            times.look.push(started.elapsed());
            tokio::time::sleep(PAUSE).await;
        }
        times
    }

    /// A shell's word, from asking to the last of its output.
    async fn command(&self) {
        let execution = ExecutionId::from_bytes(fresh());
        let spec = ExecSpec { argv: ["/bin/sh", "-c", "echo alive"].map(str::to_owned).into(), ..ExecSpec::default() };
        self.provider.execute(&mutation(), &self.neighbour, &execution, &spec).await.unwrap();
        let mut output = self.provider.attach(&instance(&self.neighbour), &execution, 0, true).await.unwrap();
        while !matches!(output.next().await.unwrap().unwrap(), OutputEvent::End(_)) {}
    }
}

fn instance(sandbox: &SandboxId) -> InstanceRef {
    InstanceRef { sandbox: sandbox.clone(), generation: Generation::FIRST }
}

fn compare(bomb: &str, what: &str, quiet: Vec<Duration>, during: Vec<Duration>) {
    let worst = |times: &[Duration]| times.iter().copied().max().unwrap_or_default();
    let (quiet_worst, during_worst) = (worst(&quiet), worst(&during));
    let (quiet, during) = (median(quiet), median(during));
    println!(
        "{bomb:14} {what:8}    {} {} |     {} {} |        {:6.1} {:6.1}",
        show(quiet),
        show(quiet_worst),
        show(during),
        show(during_worst),
        ratio(during, quiet),
        ratio(during_worst, quiet_worst),
    );
}
