//! Normal work is not hurt by how a sandbox is confined (S1): programs that people use, in a default sandbox of the
//! machine's own userland. What they come from is in `scripts/prepare`, what comes of it in `docs/programs.md`.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::time::Duration;

use support::{Ground, sh};
use viv_core::exec::{ExecSpec, ExecState};

/// Who a script runs as.
#[derive(Clone, Copy)]
enum Who {
    Root,
    User,
}

/// Runs a script in a sandbox of its own; every command of it has to succeed. What it writes.
async fn run(who: Who, script: &str) -> String {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let user = match who {
        Who::Root => None,
        Who::User => Some("user".to_owned()),
    };
    let script = format!("exec 2>&1\nset -e\ncd \"$(mktemp -d)\"\n{script}");
    // A program that hangs is one that does not run.
    let spec = ExecSpec { user, limit_ms: Some(300_000), ..sh(&script) };
    let execution = sandbox.start_spec(&spec).await;
    let (text, status) = sandbox.output(&execution).await;
    assert_eq!(status.state, ExecState::Exited { code: 0 }, "{text}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
    text
}

/// As root and as a user: the same.
async fn run_as_both(script: &str, expected: &str) {
    for who in [Who::Root, Who::User] {
        assert_eq!(run(who, script).await, expected);
    }
}

#[tokio::test]
async fn c_is_compiled_and_run() {
    let script = r#"
        printf '#include <pthread.h>\n#include <stdio.h>\n
            static void *work(void *x) { return x; }\n
            int main(void) { pthread_t t; void *r; int x = 42;\n
              pthread_create(&t, 0, work, &x); pthread_join(t, &r); printf("%%d\\n", *(int *)r); return 0; }\n' > a.c
        printf 'a: a.c\n\tgcc -O2 -pthread a.c -o a\n' > Makefile
        make --silent && ./a"#;
    run_as_both(script, "42\n").await;
}

#[tokio::test]
async fn sanitizers_work() {
    // They turn core dumps off first, and give up if they cannot.
    let script = "echo 'int main(int n, char **v) { int a[2] = {0}; return a[n + 1]; }' > a.c\n\
                  gcc -fsanitize=address,undefined a.c -o a\n\
                  ./a > out 2>&1 && exit 1\n\
                  grep -o -m 1 stack-buffer-overflow out || { cat out; exit 1; }";
    assert_eq!(run(Who::Root, script).await, "stack-buffer-overflow\n");
}

#[tokio::test]
async fn git_keeps_history() {
    let script = "git init -q a && cd a && git config user.name a && git config user.email a@b\n\
                  echo one > file && git add file && git commit -qm first\n\
                  echo two > file && git commit -qam second && git gc -q && cd ..\n\
                  git clone -q a b && git -C b log --format=%s && git -C b fsck --no-progress";
    run_as_both(script, "second\nfirst\n").await;
}

#[tokio::test]
async fn python_with_processes_and_threads() {
    let script = r#"cat > a.py <<'END'
import asyncio, multiprocessing, sqlite3, subprocess, threading, socket, tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory

def add(name, gate, lock, counter):
    with gate:
        memory = shared_memory.SharedMemory(name=name)
        with lock:
            memory.buf[0] += 1
            counter.value += 1
        memory.close()

async def both():
    server = await asyncio.start_server(lambda r, w: (w.write(b"hello\n"), w.close()), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    line = await reader.readline()
    process = await asyncio.create_subprocess_exec("echo", "child", stdout=subprocess.PIPE)
    return line, (await process.communicate())[0]

if __name__ == "__main__":
    for method in ["fork", "spawn", "forkserver"]:
        context = multiprocessing.get_context(method)
        memory = shared_memory.SharedMemory(create=True, size=4096)
        memory.buf[0] = 0
        gate, lock, counter = context.Semaphore(2), context.Lock(), context.Value("i", 0)
        work = [context.Process(target=add, args=(memory.name, gate, lock, counter)) for _ in range(4)]
        [p.start() for p in work]
        [p.join() for p in work]
        print(method, memory.buf[0], counter.value)
        memory.close()
        memory.unlink()
    with ProcessPoolExecutor(2) as pool:
        print(sum(pool.map(abs, range(-10, 0))))
    seen = []
    threads = [threading.Thread(target=seen.append, args=(n,)) for n in range(20)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print(len(seen), subprocess.check_output(["sh", "-c", "echo sub"]), asyncio.run(both()))
    with sqlite3.connect("a.db") as db:
        db.execute("pragma journal_mode=wal")
        db.execute("create table t (n)")
        db.executemany("insert into t values (?)", [(n,) for n in range(100)])
        print(db.execute("select sum(n) from t").fetchone())
END
python3 a.py"#;
    let expected = "fork 4 4\nspawn 4 4\nforkserver 4 4\n55\n20 b'sub\\n' (b'hello\\n', b'child\\n')\n(4950,)\n";
    run_as_both(script, expected).await;
}

#[tokio::test]
async fn python_makes_environments() {
    let script = "python3 -m venv v && v/bin/pip --version | cut -d ' ' -f 1 && v/bin/python -c 'import ssl; print(1)'";
    run_as_both(script, "pip\n1\n").await;
}

#[tokio::test]
async fn node_with_workers_and_a_server() {
    let script = r#"cat > a.js <<'END'
const { Worker } = require('worker_threads'), { execFileSync, fork } = require('child_process');
const http = require('http'), fs = require('fs');
if (process.argv[2]) { process.send('forked'); return; }
(async () => {
  console.log(await new Promise(done => new Worker(
    'require("worker_threads").parentPort.postMessage("worker")', { eval: true }).on('message', done)));
  console.log(await new Promise(done => fork(__filename, ['child']).on('message', done)));
  console.log(execFileSync('echo', ['child']).toString().trim());
  const server = http.createServer((_, reply) => reply.end('served')).listen(0, '127.0.0.1');
  await new Promise(done => server.on('listening', done));
  console.log(await (await fetch(`http://127.0.0.1:${server.address().port}`)).text());
  server.close();
  await fs.promises.writeFile('f', 'file');
  console.log(await fs.promises.readFile('f', 'utf8'));
  console.log(require('os').networkInterfaces().lo[0].address);
})();
END
node a.js"#;
    run_as_both(script, "worker\nforked\nchild\nserved\nfile\n127.0.0.1\n").await;
}

#[tokio::test]
async fn java_with_threads() {
    let script = r#"cat > A.java <<'END'
import java.util.stream.*;
public class A { public static void main(String[] a) throws Exception {
  System.out.println(IntStream.range(0, 1000).parallel().sum());
  System.out.println(new String(new ProcessBuilder("echo", "child").start().getInputStream().readAllBytes()).trim());
} }
END
java A.java"#;
    run_as_both(script, "499500\nchild\n").await;
}

#[tokio::test]
async fn a_go_program_serves() {
    // Its runtime makes threads without libc.
    let script = r"mkdir data && printf 'version: 0.1\nstorage: {filesystem: {rootdirectory: %s}}\nhttp: {addr: 127.0.0.1:5000}\n' $PWD/data > c.yml
docker-registry serve c.yml > log 2>&1 &
perl -MIO::Socket::INET -e 'for (1..2000) {
    if (my $s = IO::Socket::INET->new(q(127.0.0.1:5000))) { print $s qq(GET /v2/ HTTP/1.0\r\n\r\n); print scalar <$s>; exit }
    select undef, undef, undef, 0.01 } exit 1' || { cat log; exit 1; }
kill $!";
    run_as_both(script, "HTTP/1.0 200 OK\r\n").await;
}

#[tokio::test]
async fn perl_forks_and_talks() {
    let script = r#"perl -e 'use Socket; socketpair(A, B, AF_UNIX, SOCK_STREAM, 0) or die;
        if (!fork) { syswrite(B, "child"); exit } sysread(A, $x, 9); wait; print "$x $?\n";
        print `echo sub`; mkdir "d"; symlink "d", "l" or die; print -d "l" ? "link\n" : "no\n"'"#;
    run_as_both(script, "child 0\nsub\nlink\n").await;
}

#[tokio::test]
async fn archives_and_pipes() {
    let script = "mkdir in && seq 100000 > in/numbers && ln in/numbers in/again\n\
                  for how in gzip xz bzip2; do tar -c --$how -f a in && mkdir $how && tar -x -f a -C $how && diff -r in $how/in; done\n\
                  mkfifo p && (cat in/numbers > p &) && tail -n 1 < p";
    run_as_both(script, "100000\n").await;
}

#[tokio::test]
async fn openssl_and_gpg_sign() {
    let script = "echo text > f\n\
                  openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -subj /CN=x 2> /dev/null\n\
                  openssl dgst -sha256 -sign key -out sig f && openssl x509 -in cert -pubkey -noout > pub\n\
                  openssl dgst -sha256 -verify pub -signature sig f\n\
                  export GNUPGHOME=$PWD/g && mkdir -m 700 g\n\
                  gpg --batch -q --passphrase '' --quick-gen-key a@b > /dev/null 2>&1\n\
                  gpg --batch -q --sign f && gpg -q --verify f.gpg 2>&1 | grep -o 'Good signature'\n\
                  gpgconf --kill all";
    run_as_both(script, "Verified OK\nGood signature\n").await;
}

#[tokio::test]
async fn a_browser_shows_a_page() {
    let script = r#"cat > a.html <<'END'
<canvas id=c></canvas><p id=p></p><script>
c.getContext('2d').fillText('text', 5, 5);
const worker = new Worker(URL.createObjectURL(new Blob(['postMessage(6 * 7)'])));
worker.onmessage = message => { p.textContent = 'the answer is ' + message.data };
</script>
END
chromium --no-sandbox --headless --virtual-time-budget=5000 --dump-dom "file://$PWD/a.html" > out 2> err || { cat err; exit 1; }
grep -o 'the answer is 42' out || { cat out err; exit 1; }"#;
    run_as_both(script, "the answer is 42\n").await;
}

#[tokio::test]
async fn a_database_server_answers() {
    let script = r#"bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
$bin/initdb -D data -A trust > log 2>&1 || { cat log; exit 1; }
$bin/pg_ctl -D data -w -l log -o "-k $PWD -c shared_buffers=64MB" start > /dev/null || { cat log; exit 1; }
ask() { $bin/psql -X -At -h "$1" -d postgres -c "$2"; }
ask "$PWD" 'create table t as select generate_series(1, 200000) n'
ask 127.0.0.1 'set max_parallel_workers_per_gather = 4; set parallel_setup_cost = 0; set parallel_tuple_cost = 0;
    set min_parallel_table_scan_size = 0; select sum(n) from t'
$bin/pg_ctl -D data -w -m fast stop > /dev/null"#;
    // As root it does not want to be started, anywhere.
    let text = run(Who::User, script).await;
    assert!(text.starts_with("SELECT 200000\n") && text.ends_with("\n20000100000\n"), "{text}");
}

#[tokio::test]
async fn an_embedded_database_keeps_data() {
    let script = "sqlite3 a.db 'pragma journal_mode=wal; create table t (n); insert into t values (1), (2)'\n\
                  sqlite3 a.db 'select sum(n) from t'";
    run_as_both(script, "wal\n3\n").await;
}

#[tokio::test]
async fn tracers_and_debuggers_look_inside() {
    let script = "strace -f -o trace sh -c 'true; /bin/true' && grep -c -m 1 execve trace\n\
                  printf 'int twice(int n) { return 2 * n; }\\nint main(void) { return twice(21) - 42; }\\n' > a.c\n\
                  gcc -g a.c -o a && gdb -batch -nx -ex 'break twice' -ex run -ex bt -ex finish ./a > out 2>&1\n\
                  grep -o 'Value returned is .* = 42' out || { cat out; exit 1; }";
    run_as_both(script, "1\nValue returned is $1 = 42\n").await;
}

#[tokio::test]
async fn users_can_be_added() {
    // It asks for the kernel's audit first, and gives up if that is refused in the wrong way.
    let script = "useradd -M ann && getent passwd ann | cut -d : -f 1";
    assert_eq!(run(Who::Root, script).await, "ann\n");
}

#[tokio::test]
async fn what_does_not_run_says_so() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    for (script, said) in [
        ("unshare --user --map-root-user true", "Operation not permitted"),
        ("mount -t tmpfs none /tmp", "permission denied"),
        ("chroot / true", "Operation not permitted"),
        ("touch /tmp/f && chown user /tmp/f", "Operation not permitted"),
        ("su user -c true", "su: "),
        ("chromium --headless --dump-dom about:blank", "sandbox"),
    ] {
        let (text, status) = sandbox.run(&format!("exec 2>&1; {script}")).await;
        assert_ne!(status.state, ExecState::Exited { code: 0 }, "{script} works: change docs/programs.md");
        assert!(text.contains(said), "{script}: {text}");
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}
