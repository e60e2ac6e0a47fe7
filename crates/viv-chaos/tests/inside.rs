//! What is asked from inside, on simulated time: daemons that die at every point, crowds, and what it does not do.
#![allow(missing_docs, reason = "tests")]

mod daemons;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use daemons::{EPOCH_MS, MINUTE, Place, paused};
use viv_core::exec::{ExecSpec, ExecState, OutputEvent, Stream};
use viv_core::lifecycle::{Actor, Phase};
use viv_core::schedule::{MissedRuns, Schedule};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{ExecutionId, RequestId, SandboxId};
use viv_engine::{CreateRequest, Engine, EngineConfig, EngineError, Failpoint, FromInside, Inside, NewSchedule, Which};
use viv_provider::Provider;
use viv_store::{JournalFilter, ScheduleQuery, Store};

/// One that hears those inside, and dies where it is told to.
fn listening(failpoint: Option<Failpoint>) -> impl FnOnce(&mut EngineConfig) {
    |config| {
        config.failpoint = failpoint;
        config.inside = Some(Inside(Arc::new(|engine, asked| Box::pin(answer(engine, asked)))));
    }
}

/// `add`, or `rm ID`: the words do not matter here.
async fn answer(engine: Engine, asked: FromInside) -> String {
    let done = if let Some(id) = asked.body.strip_prefix("rm ") {
        engine.remove_schedule_inside(&asked, &id.parse().unwrap()).await.map(|()| id.to_owned())
    } else {
        let command = ExecSpec { argv: vec!["/bin/echo".into(), "x".into()], ..ExecSpec::default() };
        let (cron, zone) = ("@daily".to_owned(), "UTC".to_owned());
        let new = NewSchedule { cron, zone, command, missed: MissedRuns::Skip, enabled: true };
        engine.create_schedule_inside(&asked, new).await.map(|made| made.id.to_string())
    };
    match done {
        Ok(said) => said,
        Err(EngineError::NoSchedule { .. }) => "none".to_owned(),
        Err(error) => format!("error: {error}"),
    }
}

impl Place {
    async fn sandbox(&self, name: &str) -> SandboxId {
        let request = CreateRequest {
            project: Project::default(),
            name: Some(name.parse().unwrap()),
            spec: SandboxSpec::default(),
            policy: Policy { persistent: true, lifetime_ms: 3_600_000, ..Policy::default_for(None) },
            labels: BTreeMap::new(),
            snapshot: None,
            by: Actor::part("test"),
            key: None,
        };
        let id = self.engine.create(request).await.unwrap().view.sandbox.id;
        self.engine.wait_ready(&id, MINUTE).await.unwrap();
        id
    }

    async fn ask(&self, id: &SandboxId, body: &str) -> ExecutionId {
        let handle = self.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        let execution = handle.new_execution();
        handle.execute(&execution, &self.provider.ask_spec(body)).await.unwrap();
        execution
    }

    /// What somebody who asked was told, or how he ended without.
    async fn told(&self, id: &SandboxId, execution: &ExecutionId) -> Result<String, ExecState> {
        let handle = self.engine.look_into(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        let mut output = handle.attach(execution, 0, true).await.unwrap();
        let mut said = Vec::new();
        loop {
            match output.next().await.unwrap().expect("an end") {
                OutputEvent::Chunk { stream: Stream::Stdout, data, .. } => said.extend(data),
                OutputEvent::Chunk { .. } | OutputEvent::Cut { .. } => {}
                OutputEvent::End(status) if status.state == (ExecState::Exited { code: 0 }) => {
                    return Ok(String::from_utf8(said).unwrap().trim_end().to_owned());
                }
                OutputEvent::End(status) => return Err(status.state),
            }
        }
    }

    async fn schedules(&self, id: &SandboxId) -> Vec<Schedule> {
        let query = ScheduleQuery { sandbox: Some(id.clone()), limit: 100, ..ScheduleQuery::default() };
        self.store.schedules(&query).await.unwrap().items
    }

    async fn lines(&self, kind: &str) -> usize {
        let lines = self.store.journal_tail(None, &JournalFilter::default(), 100_000).await.unwrap();
        lines.iter().filter(|line| line.line.kind == kind).count()
    }
}

/// A daemon that dies at this point, the first time.
fn dying(point: &'static str) -> (Failpoint, Arc<AtomicBool>) {
    let reached = Arc::new(AtomicBool::new(false));
    let flag = reached.clone();
    let failpoint = Failpoint(Arc::new(move |now| {
        assert!(now != point || flag.swap(true, Ordering::SeqCst), "the daemon dies at {point}, as planned");
    }));
    (failpoint, reached)
}

/// Wherever it dies, one request makes one schedule, and whoever asked is told of that one.
#[test]
fn j4_a_daemon_that_dies_at_any_point_makes_one_schedule() {
    // Where only the work on a request dies, the same daemon hears it again.
    let points = [
        ("inside.heard", true),
        ("schedule.created", true),
        ("schedule.created", false),
        ("inside.done", true),
        ("inside.answered", true),
    ];
    for (point, restarts) in points {
        paused(async {
            let (failpoint, reached) = dying(point);
            let mut place = Place::beginning(50, listening(Some(failpoint))).await;
            let id = place.sandbox("box").await;
            let asking = place.ask(&id, "add").await;
            while !reached.load(Ordering::SeqCst) {
                assert!(place.engine.now_ms() < EPOCH_MS + 600_000, "{point} is never reached");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            if restarts {
                place.followed(Duration::from_secs(1), listening(None)).await;
            }
            let made = place.told(&id, &asking).await.unwrap();
            let schedules = place.schedules(&id).await;
            let ids: Vec<_> = schedules.iter().map(|schedule| schedule.id.to_string()).collect();
            assert_eq!(ids, [made.as_str()], "{point}");
            assert_eq!(schedules[0].made_by.who, format!("inside:{id}"));
            assert_eq!(place.lines("schedule.created").await, 1, "{point}");
            // The next one is another one.
            let asking = place.ask(&id, "add").await;
            assert_ne!(place.told(&id, &asking).await.unwrap(), made);
            assert_eq!(place.schedules(&id).await.len(), 2);
            let record = place.store.get(&id).await.unwrap().unwrap();
            assert!(place.engine.resources(&record).await.unwrap().requests >= 1, "it is counted (O2)");
        });
    }
}

#[test]
fn j4_a_daemon_that_dies_takes_a_schedule_away_once() {
    for point in ["inside.heard", "inside.done", "inside.answered"] {
        paused(async {
            let mut place = Place::beginning(50, listening(None)).await;
            let id = place.sandbox("box").await;
            let asking = place.ask(&id, "add").await;
            let made = place.told(&id, &asking).await.unwrap();
            let (failpoint, reached) = dying(point);
            place.followed(Duration::ZERO, listening(Some(failpoint))).await;
            let asking = place.ask(&id, &format!("rm {made}")).await;
            while !reached.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            place.followed(Duration::from_secs(1), listening(None)).await;
            assert_eq!(place.told(&id, &asking).await, Ok(made.clone()), "{point}");
            assert!(place.schedules(&id).await.is_empty());
            assert_eq!(place.lines("schedule.removed").await, 1, "{point}");
            let asking = place.ask(&id, &format!("rm {made}")).await;
            assert_eq!(place.told(&id, &asking).await, Ok("none".to_owned()), "somebody else's request finds none");
        });
    }
}

#[test]
fn l17_nobody_reaches_into_another_sandbox() {
    paused(async {
        let place = Place::beginning(50, listening(None)).await;
        let (one, other) = (place.sandbox("one").await, place.sandbox("other").await);
        let asking = place.ask(&other, "add").await;
        let made = place.told(&other, &asking).await.unwrap();
        let asking = place.ask(&one, &format!("rm {made}")).await;
        assert_eq!(place.told(&one, &asking).await, Ok("none".to_owned()));
        assert_eq!(place.schedules(&other).await.len(), 1);
        assert!(place.schedules(&one).await.is_empty());
    });
}

/// One sandbox asks without end; it is served, slowly, and the others are as if it were not there (J7).
#[test]
fn j7_a_crowd_inside_one_delays_no_other() {
    paused(async {
        let place = Place::beginning(50, listening(None)).await;
        let (loud, quiet) = (place.sandbox("loud").await, place.sandbox("quiet").await);
        let mut crowd = Vec::new();
        for _ in 0..50 {
            crowd.push(place.ask(&loud, "rm sch_none").await);
        }
        let began_ms = place.engine.now_ms();
        let asking = place.ask(&quiet, "add").await;
        assert!(place.told(&quiet, &asking).await.unwrap().starts_with("sch_"));
        assert!(place.engine.now_ms() - began_ms < 1_000, "it waited for the crowd");
        for asking in crowd {
            assert_eq!(place.told(&loud, &asking).await, Ok("none".to_owned()));
        }
        assert!(place.engine.now_ms() - began_ms >= 49 * 100, "the crowd was served faster than it may be");
    });
}

/// It is no use of the sandbox by anybody (L6).
#[test]
fn l6_asking_is_no_activity() {
    paused(async {
        let mut place = Place::beginning(50, listening(None)).await;
        let id = place.sandbox("box").await;
        place.followed(Duration::ZERO, |_| {}).await;
        let asking = place.ask(&id, "add").await;
        let before = place.store.get(&id).await.unwrap().unwrap();
        // Nobody listened; the next daemon does, and answers.
        place.followed(Duration::from_secs(5), listening(None)).await;
        assert!(place.told(&id, &asking).await.unwrap().starts_with("sch_"));
        let after = place.store.get(&id).await.unwrap().unwrap();
        assert_eq!((after.active_at_ms, after.entry), (before.active_at_ms, before.entry));
    });
}

#[test]
fn l21_what_is_drained_or_does_not_run_takes_nothing_new() {
    paused(async {
        let place = Place::beginning(50, listening(None)).await;
        let id = place.sandbox("box").await;
        let asked = async |number: u8| FromInside {
            sandbox: place.store.get(&id).await.unwrap().unwrap(),
            request: RequestId::from_bytes([number; 16]),
            body: "add".to_owned(),
        };
        let (early, late) = (asked(1).await, asked(2).await);
        let made = answer(place.engine.clone(), early.clone()).await;
        assert!(made.starts_with("sch_"), "{made}");
        place.engine.drain(Duration::from_secs(1), Actor::part("test")).await.unwrap();
        assert!(answer(place.engine.clone(), late.clone()).await.contains("drained"));
        assert!(
            answer(place.engine.clone(), FromInside { body: format!("rm {made}"), ..late }).await.contains("drained")
        );
        // What was done before is told again.
        assert_eq!(answer(place.engine.clone(), early).await, made);
        while !matches!(asked(3).await.sandbox.phase, Phase::Hibernated { .. }) {
            assert!(place.engine.now_ms() < EPOCH_MS + 600_000, "it is never saved");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        place.engine.undrain(Actor::part("test")).await.unwrap();
        assert!(answer(place.engine.clone(), asked(3).await).await.contains("not running"));
        assert_eq!(place.schedules(&id).await.len(), 1);
    });
}
