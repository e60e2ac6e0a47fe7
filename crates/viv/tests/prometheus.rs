//! Prometheus itself, from its Debian package: it takes our rules, scrapes a real daemon, and fires (O4, O5).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::daemon::{Daemon, PATIENCE};
use support::restart::House;

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

fn exprs(value: &serde_json::Value, found: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            if let Some(expr) = fields.get("expr").and_then(|expr| expr.as_str()) {
                found.extend(names(expr));
            }
            fields.values().for_each(|field| exprs(field, found));
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| exprs(item, found)),
        _ => {}
    }
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
    let boards: Vec<PathBuf> =
        fs::read_dir(deploy().join("grafana")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(boards.len() >= 3, "{boards:?}");
    for board in boards {
        let before = asked.len();
        exprs(&serde_json::from_slice(&fs::read(&board).unwrap()).unwrap(), &mut asked);
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
fn o5_prometheus_scrapes_a_daemon_fires_and_resolves() {
    let mut daemon = Daemon::in_house(House::with_config("[sandboxes]\nmax = 2\n"));
    daemon.run(&[]);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A key that may only look is enough.
    let made = daemon.viv().args(["--json", "key", "create", "prometheus", "--scope", "read-only"]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let made: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
    fs::write(at("key"), made["secret"].as_str().unwrap()).unwrap();
    // Our rules as they are, but for how long they wait and go on.
    let rules = fs::read_to_string(deploy().join("prometheus/viv.rules.yml")).unwrap();
    let rules: Vec<String> = rules
        .lines()
        .map(|line| match line.trim_start().split_once(": ") {
            Some((word @ ("for" | "keep_firing_for"), _)) => format!("        {word}: 1s"),
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
    let firing = |name: &str| {
        let alerts = get(&format!("{base}/api/v1/alerts"), None).unwrap_or_default();
        let alerts: serde_json::Value = serde_json::from_str(&alerts).unwrap_or_default();
        let all = alerts["data"]["alerts"].as_array().cloned().unwrap_or_default();
        all.iter().any(|alert| alert["labels"]["alertname"] == name && alert["state"] == "firing")
    };
    let mut wait = |what: &str, so: &dyn Fn() -> bool| {
        let until = Instant::now() + PATIENCE;
        while !so() {
            let log = fs::read_to_string(at("log")).unwrap_or_default();
            assert!(server.0.try_wait().unwrap().is_none(), "Prometheus ended\n{log}");
            assert!(Instant::now() < until, "not so: {what}\n{log}");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let up =
        || get(&format!("{base}/api/v1/query?query=up%3D%3D1"), None).is_some_and(|text| text.contains("vivarium"));
    wait("the daemon is scraped", &up);
    assert!(!firing("quota_exhausted"));
    let sandboxes = [daemon.create().id, daemon.create().id];
    wait("it fires", &|| firing("quota_exhausted") && firing("quota_high"));
    assert!(!firing("kill_failed"), "and nothing else");
    for id in &sandboxes {
        daemon.remove(id);
    }
    wait("it resolves", &|| !firing("quota_exhausted") && !firing("quota_high"));
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
