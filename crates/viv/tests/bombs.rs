//! What is meant to break a machine breaks nothing but itself (S1).
//!
//! Every bomb goes off in a sandbox with the limits that hold when nothing is said, beside a neighbour. While it
//! burns, the neighbour runs commands and the provider answers; then it is cancelled, the sandbox works again or has
//! ended for the right cause, and after the destroy nothing is left on the machine.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::future::Future;
use std::time::Duration;

use support::{Ground, Sandbox, eventually_within, fresh_bytes, is_alive, mutation, pids, sh};
use viv_core::ExecutionId;
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_provider::{InstanceSpec, InstanceState, Mutation, PageRequest, Provider, ProviderError, ResourceLimits};

/// Who has not answered after this hangs, on a machine that others load too. How long it takes is for `bench/bombs.rs`.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often the neighbour is asked while it burns.
const ROUNDS: usize = 4;

/// Stands for the default, half of the machine, which a test has no right to fill.
const MEMORY_BYTES: u64 = 512 << 20;

const LIFETIME_MS: u64 = 600_000;

/// A sandbox with what it is to survive, and one beside it.
struct Range<'g> {
    ground: &'g Ground,
    bombed: Sandbox<'g>,
    neighbour: Sandbox<'g>,
}

fn ground() -> Ground {
    Ground::with(|config| config.limits.memory_bytes = Some(MEMORY_BYTES))
}

impl<'g> Range<'g> {
    async fn new(ground: &'g Ground) -> Self {
        Self::with(ground, InstanceSpec::host(LIFETIME_MS)).await
    }

    async fn with(ground: &'g Ground, spec: InstanceSpec) -> Self {
        let neighbour = ground.create(Duration::from_millis(LIFETIME_MS)).await;
        let bombed = ground.create_from(spec).await;
        Self { ground, bombed, neighbour }
    }

    /// The neighbour and the provider answer, several times.
    async fn others_answer(&self) {
        for round in 0..ROUNDS {
            let (said, status) = soon("a command next door", self.neighbour.run("echo alive")).await;
            assert_eq!((said.as_str(), status.state), ("alive\n", ExecState::Exited { code: 0 }), "round {round}");
            let listed = soon("a listing", self.ground.provider.list(&self.ground.owner, PageRequest::default()));
            let listed = listed.await.unwrap();
            assert_eq!((listed.items.len(), listed.unreadable.len()), (2, 0), "round {round}");
            soon("a look", self.bombed.state()).await;
        }
    }

    /// The bomb is cancelled, and then the sandbox does what it did before.
    async fn defused(&self, bomb: &ExecutionId) {
        let cancel = async { self.ground.provider.cancel(&patient(), &self.bombed.id, bomb).await };
        let status = soon("a cancel", cancel).await.unwrap();
        assert!(status.state.is_final(), "{status:?}");
        self.works().await;
    }

    async fn works(&self) {
        assert_eq!(self.bombed.state().await, InstanceState::Running);
        let (said, status) = soon("a command after it", self.bombed.run("echo still here")).await;
        assert_eq!((said.as_str(), status.state), ("still here\n", ExecState::Exited { code: 0 }));
    }

    /// Both are destroyed, and nothing is left of them.
    async fn cleared(self) {
        let before = self.ground.processes();
        soon("a destroy", self.ground.provider.destroy(&patient(), &self.bombed.id)).await.unwrap();
        self.neighbour.destroy().await;
        eventually_within(PATIENCE, "every process is gone", || before.iter().all(|&pid| !is_alive(pid)));
        self.ground.assert_nothing_left();
    }
}

async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, work).await;
    done.unwrap_or_else(|_| panic!("{what} took longer than {PATIENCE:?}"))
}

/// A change with as much time as the test has.
fn patient() -> Mutation {
    Mutation { budget_ms: PATIENCE.as_millis() as u64, ..mutation(1, 1) }
}

fn perl(script: &str) -> ExecSpec {
    ExecSpec { argv: vec!["/usr/bin/perl".into(), "-e".into(), script.into()], ..ExecSpec::default() }
}

/// Waits until the kernel's count of processes in the sandbox is at least this.
async fn until_processes(sandbox: &Sandbox<'_>, least: u64) {
    until(&format!("{least} processes"), async || {
        let seen = sandbox.ground.provider.observe(&sandbox.instance()).await.unwrap();
        seen.usage.and_then(|usage| usage.processes).is_some_and(|count| count >= least)
    })
    .await;
}

async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !so().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_ok(), "not so after {PATIENCE:?}: {what}");
}

/// Waits until a command has written this.
async fn until_said(sandbox: &Sandbox<'_>, execution: &ExecutionId, word: &str) {
    let mut stream = sandbox.ground.provider.attach(&sandbox.instance(), execution, 0, true).await.unwrap();
    let mut text = String::new();
    let heard = tokio::time::timeout(PATIENCE, async {
        while !text.contains(word) {
            match stream.next().await.unwrap() {
                Some(OutputEvent::Chunk { data, .. }) => text.push_str(&String::from_utf8_lossy(&data)),
                Some(OutputEvent::Cut { .. }) => {}
                Some(OutputEvent::End(status)) => panic!("it ended as {status:?} and said {text:?}"),
                None => panic!("it ended without a word"),
            }
        }
    });
    assert!(heard.await.is_ok(), "it did not say {word:?} but {text:?}");
}

/// What never gives up; and what comes and goes, so that there is always room for one more. Both begin with one that
/// no refusal ends.
const FORK_BOMBS: [&str; 2] = [
    "fork while 1",
    "my $first = $$; while (1) { my $pid = fork; next if $$ == $first; \
     if (!defined $pid) { exit if rand() < 0.3 } elsif ($pid && rand() < 0.5) { exec '/bin/sh', '-c', 'exit 0' } }",
];

#[tokio::test]
async fn s1_a_fork_bomb_has_its_own_processes_only() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let allowed = ground.provider.observe(&range.bombed.instance()).await.unwrap();
    let allowed = allowed.limits.and_then(|limits| limits.processes).unwrap();
    for script in FORK_BOMBS {
        let on_the_machine = pids().count();
        let bomb = range.bombed.start_spec(&perl(script)).await;
        until_processes(&range.bombed, allowed * 3 / 4).await;
        range.others_answer().await;
        // There is room for somebody who looks, if not for what he starts; if there is none, that is said.
        let execution = ExecutionId::from_bytes(fresh_bytes());
        let started = async {
            range.ground.provider.execute(&patient(), &range.bombed.id, &execution, &sh("echo in between")).await
        };
        match soon("a command in the middle of it", started).await {
            Ok(_) | Err(ProviderError::Exhausted { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
        let most = range.ground.provider.observe(&range.bombed.instance()).await.unwrap();
        let most = most.usage.and_then(|usage| usage.processes).unwrap();
        assert!(most <= allowed, "{most} processes");
        range.defused(&bomb).await;
        until("the machine has its processes back", async || pids().count() < on_the_machine + 500).await;
    }
    range.cleared().await;
}

#[tokio::test]
async fn s1_a_memory_bomb_is_killed_and_named() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let bomb = range.bombed.start("while :; do for i in 1 2 3; do tail -n 1 /dev/zero & done; wait; done").await;
    until("somebody is killed", async || oom_kills(&range.bombed).await > 0).await;
    range.others_answer().await;
    let seen = range.ground.provider.observe(&range.bombed.instance()).await.unwrap().usage.unwrap();
    assert_eq!(seen.oom_last.and_then(|last| last.process).as_deref(), Some("tail"));
    range.defused(&bomb).await;
    // Of one that is the first of an execution, that is known too.
    let (_, status) = range.bombed.run("exec tail -n 1 /dev/zero").await;
    assert_eq!(status.state, ExecState::OomKilled);
    until("the execution is named", async || {
        let usage = range.ground.provider.observe(&range.bombed.instance()).await.unwrap().usage.unwrap();
        usage.oom_last.is_some_and(|last| last.execution.as_ref() == Some(&status.id) && last.pid.is_some())
    })
    .await;
    range.cleared().await;
}

async fn oom_kills(sandbox: &Sandbox<'_>) -> u64 {
    let seen = sandbox.ground.provider.observe(&sandbox.instance()).await.unwrap();
    seen.usage.and_then(|usage| usage.oom_kills).unwrap_or(0)
}

#[tokio::test]
async fn s1_files_in_memory_are_bounded() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let fill = "for at in /dev/shm /run /dev; do head -c 2G /dev/zero > $at/fill 2>/dev/null || true; done; df -k /dev/shm /run /dev | \
                awk 'NR > 1 && $2 > 270000 { print \"large:\", $0 }'; echo done";
    let (said, _) = range.bombed.run(fill).await;
    assert_eq!(said, "done\n");
    range.others_answer().await;
    let used = range.ground.provider.observe(&range.bombed.instance()).await.unwrap().usage.unwrap();
    assert!(used.memory_bytes.unwrap() <= MEMORY_BYTES, "{used:?}");
    range.works().await;
    range.cleared().await;
}

/// Memory that belongs to no process is not given back by killing any: there the sandbox is stuck until it gets more.
#[tokio::test]
async fn s1_memory_that_no_kill_frees_is_helped_by_more() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let hoard = "for (1..64) { defined(my $id = shmget(0, 64 << 20, 0600 | 01000)) or die; \
                 for my $at (0..63) { shmwrite($id, 'x' x (1 << 20), $at << 20, 1 << 20) or die } } sleep 1000";
    let bomb = range.bombed.start_spec(&perl(hoard)).await;
    let (_, status) = soon("the kill", range.bombed.output(&bomb)).await;
    assert_eq!(status.state, ExecState::OomKilled);
    range.others_answer().await;
    let used = range.ground.provider.observe(&range.bombed.instance()).await.unwrap().usage.unwrap();
    assert!(used.memory_bytes.unwrap() > MEMORY_BYTES / 2, "what it took is still taken: {used:?}");
    let more = ResourceLimits { memory_bytes: Some(2 * MEMORY_BYTES), ..ResourceLimits::default() };
    let raised = async { range.ground.provider.set_limits(&mutation(1, 1), &range.bombed.id, &more).await };
    assert_eq!(soon("more memory", raised).await.unwrap().memory_bytes, more.memory_bytes);
    range.works().await;
    // And less than is taken is refused.
    let less = ResourceLimits { memory_bytes: Some(MEMORY_BYTES / 4), ..ResourceLimits::default() };
    let refused = range.ground.provider.set_limits(&mutation(1, 1), &range.bombed.id, &less).await;
    assert!(matches!(refused, Err(ProviderError::Conflict { .. })), "{refused:?}");
    range.cleared().await;
}

#[tokio::test]
async fn s1_a_disk_is_filled_up_to_its_limit() {
    for ground in [ground(), Ground::on_btrfs()] {
        let mut spec = InstanceSpec::host(LIFETIME_MS);
        spec.limits.disk_bytes = Some(64 << 20);
        let range = Range::with(&ground, spec).await;
        let bomb = range
            .bombed
            .start("while :; do head -c 1M /dev/zero >> /workspace/fill$((n % 3)) || echo full; done")
            .await;
        until_said(&range.bombed, &bomb, "full").await;
        range.others_answer().await;
        range.works().await;
        range.defused(&bomb).await;
        let used = range.ground.provider.disk_usage(&range.bombed.instance()).await.unwrap();
        assert!(used.own_bytes <= 80 << 20, "{used:?}");
        // What is full can be emptied again.
        let (said, _) =
            range.bombed.run("rm /workspace/fill* && sync && echo 1 > /workspace/new && cat /workspace/new").await;
        assert_eq!(said, "1\n");
        range.cleared().await;
    }
}

#[tokio::test]
async fn s1_files_without_content_are_bounded_too() {
    for ground in [ground(), Ground::on_btrfs()] {
        let mut spec = InstanceSpec::host(LIFETIME_MS);
        spec.limits.disk_bytes = Some(24 << 20);
        let range = Range::with(&ground, spec).await;
        let fill = "mkdir '/workspace/many' or die; my ($n, $long) = (0, 'x' x 200); \
                    while (open my $f, '>', \"/workspace/many/$long$n\") { $n++; $n < 2e6 or die } \
                    $| = 1; print \"full $!\\n\"; sleep 1000";
        let bomb = range.bombed.start_spec(&perl(fill)).await;
        until_said(&range.bombed, &bomb, "full").await;
        range.others_answer().await;
        range.defused(&bomb).await;
        range.cleared().await;
    }
}

#[tokio::test]
async fn s1_descriptors_of_every_kind_run_out_for_who_takes_them_only() {
    let ground = ground();
    let range = Range::new(&ground).await;
    // Files, pipes and sockets, in many processes at once, as many as each may have.
    let take = "use Socket; $| = 1; for (1..8) { fork or last } my @held; while (1) { \
                open(my $f, '<', '/dev/null') or last; push @held, $f; \
                pipe(my $r, my $w) or last; push @held, $r, $w; \
                socketpair(my $a, my $b, AF_UNIX, SOCK_STREAM, 0) or last; push @held, $a, $b; } \
                print \"no more: $!\\n\"; sleep 1000";
    let bomb = range.bombed.start_spec(&perl(take)).await;
    until_said(&range.bombed, &bomb, "no more").await;
    range.others_answer().await;
    range.works().await;
    range.defused(&bomb).await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_a_limit_of_open_files_is_kept() {
    let ground = ground();
    let mut spec = InstanceSpec::host(LIFETIME_MS);
    spec.limits.open_files = Some(64);
    let range = Range::with(&ground, spec).await;
    let count = "my @held; while (open my $f, '<', '/dev/null') { push @held, $f } print scalar(@held), qq( $!\\n)";
    let execution = range.bombed.start_spec(&perl(count)).await;
    assert_eq!(range.bombed.output(&execution).await.0, "61 Too many open files\n");
    let (said, _) = range.bombed.run("ulimit -n 65 2>/dev/null || echo refused").await;
    assert_eq!(said, "refused\n", "a command cannot raise it");
    range.cleared().await;
}

/// Watches of files are counted for the machine's user that all sandboxes are mapped from, so one could take them all.
#[tokio::test]
async fn s1_watches_run_out_for_who_takes_them_only() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let take = "touch /tmp/watched; i=0; while [ $i -lt 200 ]; do tail -f /tmp/watched > /dev/null 2>&1 & i=$((i+1)); done; \
                echo taken; wait; sleep 1000";
    let bomb = range.bombed.start(take).await;
    until_said(&range.bombed, &bomb, "taken").await;
    until_processes(&range.bombed, 200).await;
    for _ in 0..ROUNDS {
        let watch = async { range.ground.provider.file_watch(&range.neighbour.instance(), "/tmp", false).await };
        soon("a watch next door", watch).await.unwrap();
    }
    range.others_answer().await;
    range.defused(&bomb).await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_an_output_flood_is_cut_and_hurts_nobody() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let spec = ExecSpec { output_bytes_max: Some(1 << 20), ..sh("yes flood & yes flood >&2 & wait") };
    let bomb = range.bombed.start_spec(&spec).await;
    until("much was written", async || {
        let status = range.ground.provider.execution(&range.bombed.instance(), &bomb).await.unwrap();
        status.output_bytes > 64 << 20
    })
    .await;
    range.others_answer().await;
    range.works().await;
    range.defused(&bomb).await;
    let kept: u64 = std::fs::read_dir(range.bombed.folder().join("run/exec").join(bomb.as_str()))
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(kept <= (1 << 20) + 8192, "{kept} bytes were kept");
    range.cleared().await;
}

#[tokio::test]
async fn s1_who_spins_on_every_processor_leaves_room_for_others() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let bomb = range
        .bombed
        .start("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do (while :; do :; done) & done; wait")
        .await;
    until_processes(&range.bombed, 16).await;
    range.others_answer().await;
    range.works().await;
    range.defused(&bomb).await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_a_directory_of_very_many_files_is_listed_in_part_and_removed_whole() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let fill = "mkdir '/workspace/many' or die; my $long = 'x' x 200; \
                for (1..20000) { open my $f, '>', \"/workspace/many/$long$_\" or die } print 'made'";
    let execution = range.bombed.start_spec(&perl(fill)).await;
    assert_eq!(range.bombed.output(&execution).await.0, "made");
    let listing = async { range.ground.provider.file_list(&range.bombed.instance(), "/workspace/many", 1).await };
    let listing = soon("a listing of it", listing).await.unwrap();
    assert!(!listing.complete && listing.entries.len() < 20_000, "{} entries", listing.entries.len());
    range.others_answer().await;
    range.works().await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_a_huge_sparse_file_is_as_large_as_what_is_in_it() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let (said, _) = range.bombed.run("truncate -s 15T /workspace/huge && stat -c %s /workspace/huge").await;
    assert_eq!(said.trim().parse::<u64>().unwrap(), 15 << 40);
    let used = soon("counting it", range.ground.provider.disk_usage(&range.bombed.instance())).await.unwrap();
    assert!(used.own_bytes < 1 << 20, "{used:?}");
    let end = async {
        range.ground.provider.file_read(&range.bombed.instance(), "/workspace/huge", (15 << 40) - 4, None).await
    };
    let mut end = soon("reading its end", end).await.unwrap();
    let mut read = Vec::new();
    soon("its end", tokio::io::AsyncReadExt::read_to_end(&mut end, &mut read)).await.unwrap();
    assert_eq!(read, [0; 4]);
    range.works().await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_a_deep_directory_is_removed_like_any_other() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let dig = "chdir '/workspace' or die; for (1..2000) { mkdir 'deep' or die $!; chdir 'deep' or die $! } print 'dug'";
    let execution = range.bombed.start_spec(&perl(dig)).await;
    assert_eq!(range.bombed.output(&execution).await.0, "dug");
    let listed = async { range.ground.provider.file_list(&range.bombed.instance(), "/workspace", u32::MAX).await };
    // All of it, a part of it or a refusal; but an answer.
    let _ = soon("a listing of it", listed).await;
    soon("counting it", range.ground.provider.disk_usage(&range.bombed.instance())).await.unwrap();
    range.others_answer().await;
    range.works().await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_zombies_count_as_processes_and_go_with_their_parent() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let breed = "$| = 1; my $n = 0; while (defined(my $pid = fork)) { $pid or exit; $n++ } print \"no more after $n\\n\"; sleep 1000";
    let bomb = range.bombed.start_spec(&perl(breed)).await;
    until_said(&range.bombed, &bomb, "no more").await;
    range.others_answer().await;
    range.defused(&bomb).await;
    // Orphans are reaped, too: none of these has a parent that waits.
    let (said, _) =
        range.bombed.run("i=0; while [ $i -lt 200 ]; do (sleep 0.01 &) ; i=$((i+1)); done; echo left").await;
    assert_eq!(said, "left\n");
    until("no zombie is left", async || {
        let (count, _) = range.bombed.run("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true").await;
        count.trim() == "0"
    })
    .await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_signals_do_not_reach_pid_1() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let flood = "$| = 1; my $sent = 0; for my $round (1..2000) { for my $signal (1..64) { $sent += kill $signal, 1 } } \
                 print \"sent $sent\\n\"; $sent += kill 'KILL', -1; sleep 1000";
    let bomb = range.bombed.start_spec(&perl(flood)).await;
    until_said(&range.bombed, &bomb, "sent 0").await;
    range.others_answer().await;
    range.works().await;
    range.defused(&bomb).await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_the_agents_folder_is_out_of_reach() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let knock = "ls /.vivarium/run 2>&1 | grep -c denied; \
                 perl -e 'use Socket; my $in = 0; for (1..500) { socket(my $s, AF_UNIX, SOCK_STREAM, 0) or die; \
                 $in += connect($s, pack_sockaddr_un(q(/.vivarium/run/agent.sock))) ? 1 : 0 } print qq($in\\n)'";
    let (said, _) = range.bombed.run(knock).await;
    assert_eq!(said, "1\n0\n");
    range.works().await;
    range.cleared().await;
}

#[tokio::test]
async fn s1_input_that_nobody_reads_is_not_taken_for_ever() {
    let ground = ground();
    let range = Range::new(&ground).await;
    let spec = ExecSpec { stdin: true, ..sh("sleep 1000") };
    let bomb = range.bombed.start_spec(&spec).await;
    // Givers who have more patience than their budget, many at a time.
    let mut givers = Vec::new();
    for _ in 0..16 {
        let (provider, sandbox, bomb) = (range.ground.provider.clone(), range.bombed.id.clone(), bomb.clone());
        givers.push(tokio::spawn(async move {
            let mutation = Mutation { budget_ms: 3_000, ..mutation(1, 1) };
            provider.write_stdin(&mutation, &sandbox, &bomb, 0, &vec![b'x'; 4 << 20]).await
        }));
    }
    range.others_answer().await;
    range.works().await;
    for giver in givers {
        let given = soon("giving up", giver).await.unwrap();
        assert!(matches!(given, Err(ProviderError::TimedOut { .. })), "{given:?}");
    }
    let status = range.ground.provider.execution(&range.bombed.instance(), &bomb).await.unwrap();
    assert!(status.stdin_bytes < 1 << 20, "{} bytes were taken", status.stdin_bytes);
    range.others_answer().await;
    range.works().await;
    range.defused(&bomb).await;
    range.cleared().await;
}
