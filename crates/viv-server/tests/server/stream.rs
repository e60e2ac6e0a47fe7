//! Streams of the journal that leave out what nobody asked for (O7): each filter, from the beginning, from where a reader
//! was, and for what happens later.

use axum::body::Body;
use axum::http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use viv_core::lifecycle::Actor;
use viv_store::{NewLine, Store};

use crate::world::{PATIENCE, World, bare};

/// Lines of noise, more than are read at once for a stream.
const NOISE: usize = 250;

/// Somebody who follows, and what has come that nobody has taken yet.
struct Reader {
    body: Body,
    text: String,
}

impl Reader {
    /// Opens a stream as this one, from where it was.
    async fn open(world: &World, key: &str, query: &str, seen: Option<u64>) -> Self {
        let mut request = bare(Method::GET, &format!("/v1/events?{query}"), key).header("accept", "text/event-stream");
        if let Some(seen) = seen {
            request = request.header("last-event-id", seen.to_string());
        }
        let answer = world.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status().as_u16(), 200, "{query}");
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        Self { body: answer.into_body(), text: String::new() }
    }

    /// The next event, as soon as there is one. Signs of life are none.
    async fn next(&mut self) -> Value {
        tokio::time::timeout(PATIENCE, self.read()).await.expect("an event in time")
    }

    /// Its id is its place.
    async fn read(&mut self) -> Value {
        loop {
            if let Some((piece, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| piece.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
                let (id, kind, data) = (field("id: "), field("event: "), field("data: "));
                let rest = rest.to_owned();
                self.text = rest;
                let Some(data) = data else { continue };
                let event: Value = serde_json::from_str(&data).unwrap();
                assert_eq!((id, kind.as_deref()), (Some(event["seq"].to_string()), event["kind"].as_str()));
                return event;
            }
            let frame = self.body.frame().await.expect("the stream goes on").expect("no error");
            self.text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        }
    }

    async fn take(&mut self, count: usize) -> Vec<Value> {
        let mut events = Vec::new();
        while events.len() < count {
            events.push(self.next().await);
        }
        events
    }
}

fn line(at_ms: u64, kind: &str, cause: Option<&str>, by: &str) -> NewLine {
    NewLine {
        at_ms,
        project: Some("default".parse().unwrap()),
        sandbox: None,
        generation: None,
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: cause.map(str::to_owned),
        by: Actor::part(by),
        data: json!({}),
    }
}

async fn write(world: &World, lines: Vec<NewLine>) {
    world.store.append(world.engine.epoch(), lines).await.unwrap();
}

/// All that is in the journal, as it is told to who asks for everything.
async fn all(world: &World, key: &str) -> Vec<Value> {
    let (mut found, mut after) = (Vec::new(), 0);
    loop {
        let request = bare(Method::GET, &format!("/v1/events?limit=1000&after={after}"), key);
        let page = world.whole(request.body(Body::empty()).unwrap()).await.is(200).json();
        found.extend(page["items"].as_array().unwrap().clone());
        after = page["next_after"].as_u64().unwrap();
        if page["more"] == false {
            return found;
        }
    }
}

fn seq(event: &Value) -> u64 {
    event["seq"].as_u64().unwrap()
}

/// A filter of the stream: how it is asked for, what it means, and a line that it takes.
struct Filter<'a> {
    query: String,
    takes: Box<dyn Fn(&Value) -> bool + 'a>,
    one_more: NewLine,
}

fn filter<'a>(query: impl Into<String>, one_more: NewLine, takes: impl Fn(&Value) -> bool + 'a) -> Filter<'a> {
    Filter { query: query.into(), takes: Box::new(takes), one_more }
}

/// From the beginning, from the middle by either cursor, and on: exactly what the filter takes, each once, in order.
async fn assert_follows(world: &World, key: &str, filter: &Filter<'_>) {
    let query = &filter.query;
    let before = all(world, key).await;
    let wanted: Vec<Value> = before.iter().filter(|event| (filter.takes)(event)).cloned().collect();
    assert!(wanted.len() > 1 && wanted.len() < before.len(), "{query}: it takes some, and not all: {}", wanted.len());
    let mut whole = Reader::open(world, key, query, None).await;
    assert_eq!(whole.take(wanted.len()).await, wanted, "{query}");

    // Somewhere between two that it takes, and at one of them; what the reader says itself counts more than its query.
    let middle = seq(&wanted[wanted.len() / 2 - 1]);
    let rest: Vec<Value> = wanted.iter().filter(|event| seq(event) > middle).cloned().collect();
    let mut resumed = vec![
        Reader::open(world, key, query, Some(middle)).await,
        Reader::open(world, key, &format!("{query}&after={middle}"), None).await,
        Reader::open(world, key, &format!("{query}&after=0"), Some(middle)).await,
    ];
    for reader in &mut resumed {
        assert_eq!(reader.take(rest.len()).await, rest, "{query} after {middle}");
    }
    // One that has seen everything hears of what happens later, and only of that.
    let newest = seq(before.last().unwrap());
    let late = Reader::open(world, key, query, Some(newest)).await;

    let other = line(world.engine.now_ms(), "other.noise", Some("other_cause"), "somebody");
    write(world, vec![other.clone(), filter.one_more.clone(), other]).await;
    for reader in [whole, late].iter_mut().chain(&mut resumed) {
        let event = reader.next().await;
        assert!(seq(&event) > newest && (filter.takes)(&event), "{query}: {event}");
        assert_eq!(event["kind"], filter.one_more.kind, "{query}");
    }
}

#[tokio::test]
async fn o7_each_filter_of_a_stream_takes_what_it_says_from_any_place_and_later() {
    let world = World::new().await;
    let path = world.sandbox().await;
    let named = world.post("/v1/sandboxes", json!({"name": "kept"})).await.is(201).json()["id"].clone();
    let id = path.rsplit('/').next().unwrap().to_owned();
    let early = all(&world, &world.admin).await;
    let at_ms = early[0]["at_ms"].as_u64().unwrap();
    // What is rare lies among more than is read at once.
    let later_ms = at_ms + 1_000_000;
    let mut lines = vec![
        line(later_ms, "rare.first", Some("rare_cause"), "rare-part"),
        line(later_ms, "rare.second", Some("rare_cause"), "rare-part for somebody"),
        line(later_ms + 1, "rarer", Some("rare_cause_too"), "rare-part-too"),
    ];
    lines.splice(1..1, (0..NOISE).map(|_| line(at_ms, "noise.made", Some("noise"), "noisy")));
    lines.extend((0..NOISE).map(|_| line(at_ms, "noise.made", None, "noisy")));
    lines.push(line(later_ms + 2, "rare.first", None, "rare-part"));
    lines.push(line(later_ms, "rare", Some("rare_cause"), "rare"));
    write(&world, lines).await;
    world.delete(&path).await.is(200);

    let kept_id = named.as_str().unwrap();
    let about = |id: &str| NewLine { sandbox: Some(id.parse().unwrap()), ..line(at_ms, "rare.about", None, "x") };
    let is = |event: &Value, field: &str, value: &str| event[field] == value;
    let begins = |event: &Value, field: &str, value: &str, with: char| {
        let text = event[field].as_str().unwrap();
        text == value || text.starts_with(&format!("{value}{with}"))
    };
    let since = move |event: &Value| event["at_ms"].as_u64().unwrap() >= later_ms;
    let rare = line(later_ms, "rare.first", Some("rare_cause"), "rare-part");
    let filters = [
        filter("kind=rare.first", rare.clone(), |event| is(event, "kind", "rare.first")),
        filter("kind=rare", rare.clone(), |event| begins(event, "kind", "rare", '.')),
        filter("cause=rare_cause", rare.clone(), |event| event["cause"]["code"] == "rare_cause"),
        filter("by=rare-part", rare.clone(), |event| begins(event, "by", "rare-part", ' ')),
        filter(format!("since_ms={later_ms}"), rare.clone(), since),
        // It is over, and what happened to it can be asked for all the same.
        filter(format!("sandbox={id}"), about(&id), |event| is(event, "sandbox", &id)),
        filter("sandbox=kept", about(kept_id), |event| is(event, "sandbox", kept_id)),
        filter(format!("kind=rare&cause=rare_cause&by=rare-part&since_ms={later_ms}"), rare, |event| {
            begins(event, "kind", "rare", '.')
                && event["cause"]["code"] == "rare_cause"
                && begins(event, "by", "rare-part", ' ')
                && since(event)
        }),
    ];
    for filter in &filters {
        assert_follows(&world, &world.admin, filter).await;
    }
}

#[tokio::test]
async fn o7_a_stream_of_a_project_tells_of_no_other_whatever_is_asked_for() {
    let world = World::new().await;
    let theirs = world.key("theirs", true).await;
    // What is too old is forgotten (J9).
    let at_ms = world.engine.now_ms();
    let of = |project: &str, kind: &str| NewLine {
        project: Some(project.parse().unwrap()),
        ..line(at_ms, kind, Some("rare_cause"), "rare-part")
    };
    let lines = [("theirs", "rare.first"), ("default", "rare.first"), ("theirs", "rare.second"), ("theirs", "noise")];
    write(&world, lines.map(|(project, kind)| of(project, kind)).to_vec()).await;
    let taken = filter("kind=rare&cause=rare_cause&by=rare-part", of("theirs", "rare.third"), |event| {
        event["project"] == "theirs" && event["kind"].as_str().unwrap().starts_with("rare.")
    });
    assert_follows(&world, &theirs, &taken).await;
    // A sandbox of another project is not there.
    let path = world.sandbox().await;
    let id = path.rsplit('/').next().unwrap();
    let request = bare(Method::GET, &format!("/v1/events?sandbox={id}"), &theirs).header("accept", "text/event-stream");
    assert_eq!(world.whole(request.body(Body::empty()).unwrap()).await.is(404).code(), "not_found");
}

#[tokio::test]
async fn s5_a_stream_with_a_filter_that_makes_no_sense_is_refused_with_what_helps() {
    let world = World::new().await;
    for wrong in [
        "kind=No%20Kind",
        "kind=",
        "cause=Not%20a%20code",
        "cause=",
        "by=",
        "by=%0a",
        "since_ms=-1",
        "since_ms=yesterday",
        "since=1h",
        "after=x",
        "after=-1",
        "sandbox=no%20name",
        "limit=0",
        "label=a%3Db",
        "kind=a&kind=b",
    ] {
        let request = bare(Method::GET, &format!("/v1/events?{wrong}"), &world.admin);
        let request = request.header("accept", "text/event-stream").body(Body::empty()).unwrap();
        let refused = world.whole(request).await;
        assert_eq!(refused.headers["content-type"], "application/json", "{wrong}");
        assert_eq!(refused.is(400).code(), "invalid_request", "{wrong}");
    }
    for wrong in ["x", "-1", ""] {
        let request = bare(Method::GET, "/v1/events", &world.admin).header("last-event-id", wrong);
        let request = request.header("accept", "text/event-stream").body(Body::empty()).unwrap();
        assert_eq!(world.whole(request).await.is(400).code(), "invalid_request", "{wrong:?}");
    }
    let request = bare(Method::GET, "/v1/events?sandbox=nobody", &world.admin).header("accept", "text/event-stream");
    assert_eq!(world.whole(request.body(Body::empty()).unwrap()).await.is(404).code(), "not_found");
}
