//! Prometheus itself, from its Debian package: it takes our rules, scrapes a real daemon, and fires (O4, O5).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE};
use support::kill;
use support::restart::House;
use viv_api::bound::LifetimeMs;
use viv_api::execution::StartExecution;
use viv_api::sandbox::ExtendSandbox;
use viv_engine::metrics::family::{ALL, Family, Kind};

/// How long an answer may take; who does not answer is asked again.
const WITHIN: Duration = Duration::from_secs(10);

/// A program of Prometheus: `scripts/prepare test` puts it there.
fn program(name: &str) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin").join(name);
    if here.exists() { here } else { name.into() }
}

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").canonicalize().unwrap()
}

/// Ended when the test is.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(url: &str, key: Option<&str>) -> Option<String> {
    let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).timeout_global(Some(WITHIN)).build().into();
    let mut request = agent.get(url);
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    request.call().ok()?.body_mut().read_to_string().ok()
}

/// Names of figures in a text of `PromQL`.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("viv_")).map(str::to_owned).collect()
}

/// What a dashboard asks for, and what its lines are called.
#[derive(Debug)]
struct Asked {
    expr: String,
    legend: String,
}

fn asked(value: &serde_json::Value, found: &mut Vec<Asked>) {
    match value {
        serde_json::Value::Object(fields) => {
            if let Some(expr) = fields.get("expr").and_then(|expr| expr.as_str()) {
                let legend = fields.get("legendFormat").and_then(|legend| legend.as_str()).unwrap_or_default();
                found.push(Asked { expr: expr.to_owned(), legend: legend.to_owned() });
            }
            fields.values().for_each(|field| asked(field, found));
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| asked(item, found)),
        _ => {}
    }
}

/// All dashboards, with what each asks for.
fn boards() -> Vec<(PathBuf, Vec<Asked>)> {
    let paths = fs::read_dir(deploy().join("grafana")).unwrap().map(|entry| entry.unwrap().path());
    let board = |path: PathBuf| {
        let mut found = Vec::new();
        asked(&serde_json::from_slice(&fs::read(&path).unwrap()).unwrap(), &mut found);
        (path, found)
    };
    paths.map(board).collect()
}

/// The words between each pair of these.
fn between<'t>(text: &'t str, open: &str, close: char) -> Vec<&'t str> {
    let inner = text.split(open).skip(1).filter_map(|rest| rest.split(close).next());
    inner.flat_map(|inner| inner.split(',')).map(str::trim).filter(|word| !word.is_empty()).collect()
}

/// What is wrong with the labels that it asks by, and that its lines are called by.
fn mislabelled(asked: &Asked) -> Option<String> {
    let mut known = BTreeSet::new();
    for name in names(&asked.expr) {
        let whole = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let is = |family: &Family| match family.kind {
            Kind::Histogram(_) => Some(family.name) == whole,
            Kind::Counter | Kind::Gauge => family.name == name,
        };
        let Some(family) = ALL.iter().find(|family| is(family)) else { return Some(format!("there is no {name}")) };
        known.extend(family.labels.iter().copied());
        known.extend(name.ends_with("_bucket").then_some("le"));
    }
    let by = between(&asked.expr, "by (", ')');
    let selected = between(&asked.expr, "{", '}').into_iter().map(|one| one.split(['=', '!']).next().unwrap());
    let called: BTreeSet<&str> = between(&asked.legend, "{{", '}').into_iter().collect();
    if let Some(unknown) = by.iter().copied().chain(selected).find(|label| !known.contains(label)) {
        return Some(format!("nothing has the label {unknown}"));
    }
    // Lines are told apart by their names: each label that is left is in the legend, and no other.
    let is_one = asked.expr.starts_with("sum(") || asked.expr.starts_with("max(");
    let mut left: BTreeSet<&str> = if by.is_empty() && !is_one { known } else { by.into_iter().collect() };
    left.remove("le");
    (left != called).then(|| format!("lines differ by {left:?} and are called by {called:?}"))
}

#[test]
fn o5_promtool_takes_our_rules_and_their_tests_hold() {
    for arguments in [["check", "rules", "viv.rules.yml"], ["test", "rules", "viv.rules.test.yml"]] {
        let done = Command::new(program("promtool")).args(arguments).current_dir(deploy().join("prometheus")).output();
        let done = done.expect("promtool: scripts/prepare test puts it there");
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    }
}

/// Figures of a daemon as Prometheus would read them, with the key of this machine.
fn scraped(daemon: &Daemon) -> String {
    let key = fs::read_to_string(daemon.data.join("key")).unwrap();
    get(&format!("{}/metrics", url(daemon)), Some(key.trim())).expect("figures")
}

fn url(daemon: &Daemon) -> String {
    let told: serde_json::Value = serde_json::from_slice(&fs::read(daemon.data.join("daemon.json")).unwrap()).unwrap();
    told["url"].as_str().unwrap().to_owned()
}

#[test]
fn o4_dashboards_and_rules_ask_for_what_a_daemon_tells() {
    let mut daemon = Daemon::in_house(House::with_config(""));
    daemon.run(&[]);
    let text = scraped(&daemon);
    let mut told = BTreeSet::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        told.insert(name.to_owned());
        if kind == "histogram" {
            told.extend(["_bucket", "_sum", "_count"].map(|end| format!("{name}{end}")));
        }
    }
    let mut asked = names(&fs::read_to_string(deploy().join("prometheus/viv.rules.yml")).unwrap());
    let boards = boards();
    assert!(boards.len() >= 3, "{boards:?}");
    for (board, wanted) in boards {
        let before = asked.len();
        for one in &wanted {
            asked.extend(names(&one.expr));
            assert_eq!(mislabelled(one), None, "{}: {one:?}", board.display());
        }
        assert!(asked.len() > before, "{} asks for nothing of its own", board.display());
    }
    let missing: Vec<&String> = asked.difference(&told).collect();
    assert!(missing.is_empty(), "nobody tells {missing:?}");
    // promtool reads the text too, and knows what is usual.
    let mut lint = Command::new(program("promtool"))
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut lint.stdin.take().unwrap(), text.as_bytes()).unwrap();
    let lint = lint.wait_with_output().unwrap();
    assert!(lint.status.success(), "{}", String::from_utf8_lossy(&lint.stderr));
}

#[test]
fn o4_a_label_that_nothing_has_or_that_no_line_is_called_by_is_noticed() {
    let wrong =
        |expr: &str, legend: &str| mislabelled(&Asked { expr: expr.to_owned(), legend: legend.to_owned() }).is_some();
    assert!(!wrong("sum by (phase) (viv_sandboxes)", "{{phase}}"));
    assert!(!wrong("sum(rate(viv_termination_seconds_bucket{le=\"30\"}[5m]))", "in time"));
    assert!(wrong("sum by (fase) (viv_sandboxes)", "{{fase}}"));
    assert!(wrong("sum by (phase) (viv_sandboxes)", "{{state}}"));
    assert!(wrong("viv_sandboxes", "all"));
    assert!(wrong("viv_sandboxes_active{phase=\"ready\"}", "active"));
    assert!(wrong("viv_sandboxes_gone", "gone"));
}

/// A question to Prometheus; nothing when it does not answer.
fn query(base: &str, expr: &str) -> Option<serde_json::Value> {
    let config = ureq::Agent::config_builder().proxy(None).timeout_global(Some(WITHIN)).http_status_as_error(false);
    let agent: ureq::Agent = config.build().into();
    let mut answer = agent.get(format!("{base}/api/v1/query")).query("query", expr).call().ok()?;
    serde_json::from_str(&answer.body_mut().read_to_string().ok()?).ok()
}

/// The alerts that fire, or that fired within this span.
fn alerts(base: &str, span: &str) -> BTreeSet<String> {
    let expr = format!("max_over_time(ALERTS{{alertstate=\"firing\"}}[{span}])");
    let answer = query(base, &expr).unwrap_or_default();
    let all = answer["data"]["result"].as_array().cloned().unwrap_or_default();
    all.iter().map(|one| one["metric"]["alertname"].as_str().unwrap().to_owned()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// What of this is more than nothing on the daemon, and has no answer on the dashboards; and how many have one.
fn unanswered(daemon: &Daemon, base: &str) -> (Vec<String>, usize) {
    let text = scraped(daemon);
    let mut alive = BTreeSet::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        if value.parse::<f64>().unwrap() > 0.0 {
            alive.insert(series.split('{').next().unwrap().to_owned());
        }
    }
    let (mut missing, mut answered) = (Vec::new(), 0);
    for (board, wanted) in boards() {
        for Asked { expr, .. } in wanted {
            let answer = query(base, &expr).expect("Prometheus answers");
            assert_eq!(answer["status"], "success", "{}: {expr}: {answer}", board.display());
            let has_any = answer["data"]["result"].as_array().is_some_and(|all| !all.is_empty());
            answered += usize::from(has_any);
            if !has_any && names(&expr).is_subset(&alive) {
                missing.push(expr);
            }
        }
    }
    (missing, answered)
}

/// An incident, staged for real: each rule that holds fires with no other, and what is put right resolves.
#[test]
fn o5_prometheus_scrapes_a_daemon_fires_what_is_staged_and_nothing_else_and_resolves() {
    let mut daemon = Daemon::in_house(House::with_config(
        "[sandboxes]\nmax = 5\n[alerts]\nperiod_s = 1\nstuck_after_s = 2\n[webhooks]\npause_ms = 1\nattempts_max = 2\n",
    ));
    daemon.run(&[]);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A key that may only look is enough.
    let viv = |words: &[&str]| {
        let said = daemon.viv().arg("--json").args(words).output().unwrap();
        assert!(said.status.success(), "{words:?}: {}", String::from_utf8_lossy(&said.stderr));
        serde_json::from_slice::<serde_json::Value>(&said.stdout).unwrap()
    };
    let made = viv(&["key", "create", "prometheus", "--scope", "read-only"]);
    fs::write(at("key"), made["secret"].as_str().unwrap()).unwrap();
    // Our rules as they are, but for how long they wait and go on.
    let rules = fs::read_to_string(deploy().join("prometheus/viv.rules.yml")).unwrap();
    let mut name = "";
    let rules: Vec<String> = rules
        .lines()
        .map(|line| match line.trim_start().split_once(": ") {
            // Before the first scrape there is no daemon either.
            Some(("for", _)) if name == "daemon_down" => "        for: 15s".to_owned(),
            Some((word @ ("for" | "keep_firing_for"), _)) => format!("        {word}: 1s"),
            Some(("- alert", alert)) => {
                name = alert;
                line.to_owned()
            }
            Some(_) | None => line.to_owned(),
        })
        .collect();
    fs::write(at("viv.rules.yml"), rules.join("\n")).unwrap();
    let target = url(&daemon).trim_start_matches("http://").to_owned();
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [viv.rules.yml]\nscrape_configs:\n  - \
         job_name: vivarium\n    authorization: {{credentials_file: {}}}\n    static_configs: [{{targets: ['{target}']}}]\n",
        at("key").display()
    );
    fs::write(at("prometheus.yml"), config).unwrap();
    let (mut server, base) = start(folder.path());
    let mut wait = |what: &str, so: &dyn Fn() -> bool| {
        let until = Instant::now() + PATIENCE;
        while !so() {
            let log = fs::read_to_string(at("log")).unwrap_or_default();
            assert!(server.0.try_wait().unwrap().is_none(), "Prometheus ended\n{log}");
            let ever = alerts(&base, "1h");
            assert!(Instant::now() < until, "not so: {what}; it fired: {ever:?}\n{log}");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let has = |expr: &str| query(&base, expr).is_some_and(|answer| answer["data"]["result"][0].is_object());
    // Counters are there from 0 on, so that the first of each is seen as growth.
    wait("the daemon is scraped", &|| has("up == 1") && has("viv_sandboxes_corrupted_total == 0"));
    assert_eq!(alerts(&base, "1h"), set(&[]));

    // Nobody may be asked there, so what happens is told to nobody.
    viv(&["webhook", "add", "--kind", "sandbox.created", "http://127.0.0.1:1/"]);
    let sandboxes: Vec<_> = (0..5).map(|_| daemon.create().id).collect();
    wait("a quota that is used up fires", &|| set(&["quota_exhausted", "quota_high"]).is_subset(&alerts(&base, "1h")));
    let (busy, brief, broken) = (&sandboxes[0], &sandboxes[1], &sandboxes[2..]);
    let spins = StartExecution::of(["/bin/sh", "-c", "while :; do :; done"]).unwrap();
    daemon.sandbox(busy).start(&spins, None).unwrap();
    daemon.sandbox(brief).extend(ExtendSandbox::ExactlyMs(LifetimeMs::new(1_000).unwrap())).unwrap();
    for id in broken {
        kill(daemon.host(id).shim_pid.unwrap(), Signal::KILL);
    }
    let staged = set(&[
        "quota_exhausted",
        "quota_high",
        "sandbox_stuck",
        "sandbox_timeout_high",
        "several_corrupted",
        "webhook_dead_letters",
    ]);
    wait("all that was staged fires", &|| staged.is_subset(&alerts(&base, "1h")));
    // Every question of every dashboard is one, and what happened is on them.
    wait("the dashboards answer", &|| unanswered(&daemon, &base).0.is_empty());
    let (_, answered) = unanswered(&daemon, &base);
    assert!(answered >= 25, "{answered} have an answer");

    for id in &sandboxes {
        daemon.remove(id);
    }
    // What is measured now is over; what is measured over a while is so for that while.
    let lasting = set(&["sandbox_timeout_high", "several_corrupted", "webhook_dead_letters"]);
    wait("the rest resolves", &|| alerts(&base, "2s") == lasting);
    assert_eq!(alerts(&base, "1h"), staged, "and nothing else ever fired");

    // What is dead says nothing, and that is heard.
    daemon.kill();
    wait("a daemon that is dead fires", &|| alerts(&base, "2s").contains("daemon_down"));
}

/// Starts it on a port that was free a moment ago, and elsewhere if somebody was quicker.
fn start(folder: &Path) -> (Running, String) {
    for _ in 0..5 {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = fs::File::create(folder.join("log")).unwrap();
        let child = Command::new(program("prometheus"))
            .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus: scripts/prepare test puts it there");
        let (mut running, base) = (Running(child), format!("http://127.0.0.1:{port}"));
        let until = Instant::now() + PATIENCE;
        while running.0.try_wait().unwrap().is_none() && Instant::now() < until {
            if get(&format!("{base}/-/ready"), None).is_some() {
                return (running, base);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    panic!("it does not start: {}", fs::read_to_string(folder.join("log")).unwrap_or_default());
}
