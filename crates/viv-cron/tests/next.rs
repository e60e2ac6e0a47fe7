//! When an expression is due: by examples, and against a clock that is looked at every minute.
#![allow(missing_docs, reason = "tests")]

use jiff::civil::{DateTime, Weekday};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use proptest::prelude::*;
use viv_cron::{Expression, Zone, next_after};

const MINUTE_MS: u64 = 60_000;

fn ms(text: &str) -> u64 {
    text.parse::<Timestamp>().unwrap().as_millisecond() as u64
}

/// The first few, as UTC.
fn due(expression: &str, zone: &str, after: &str, count: usize) -> Vec<String> {
    let (expression, zone) = (Expression::parse(expression).unwrap(), Zone::named(zone).unwrap());
    let mut at_ms = ms(after);
    let mut all = Vec::new();
    for _ in 0..count {
        let Some(next_ms) = next_after(&expression, &zone, at_ms) else { break };
        assert!(next_ms > at_ms, "never in the past");
        at_ms = next_ms;
        all.push(Timestamp::from_millisecond(at_ms as i64).unwrap().to_string());
    }
    all
}

#[test]
fn l17_the_next_is_after_and_not_at() {
    let five = due("*/5 * * * *", "UTC", "2026-01-01T00:00:00Z", 2);
    assert_eq!(five, ["2026-01-01T00:05:00Z", "2026-01-01T00:10:00Z"]);
    assert_eq!(due("0 0 * * *", "UTC", "2025-12-31T23:59:59.999Z", 1), ["2026-01-01T00:00:00Z"]);
}

#[test]
fn l17_a_time_that_the_clock_skips_is_due_when_it_goes_on() {
    // Berlin, 29 March 2026: 02:00 becomes 03:00 at 01:00 UTC.
    let fixed = due("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", 2);
    assert_eq!(fixed, ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]);
    let at_its_edge = due("0 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", 2);
    assert_eq!(at_its_edge, ["2026-03-29T01:00:00Z", "2026-03-30T00:00:00Z"]);
    // Two that are skipped, and one that is there, are one.
    let several = due("0,30 2,3 * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", 3);
    assert_eq!(several, ["2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z", "2026-03-30T00:00:00Z"]);
    let by_the_clock = due("30 * * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", 3);
    assert_eq!(by_the_clock, ["2026-03-29T00:30:00Z", "2026-03-29T01:30:00Z", "2026-03-29T02:30:00Z"]);
}

#[test]
fn l17_a_time_that_the_clock_shows_twice_is_due_once_unless_it_follows_the_clock() {
    // Berlin, 25 October 2026: 03:00 becomes 02:00 at 01:00 UTC.
    let fixed = due("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", 2);
    assert_eq!(fixed, ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]);
    let by_the_clock = due("30 * * * *", "Europe/Berlin", "2026-10-25T00:00:00Z", 3);
    assert_eq!(by_the_clock, ["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z", "2026-10-25T02:30:00Z"]);
    // Half an hour, on Lord Howe Island: 5 April 2026, 02:00 becomes 01:30 at 15:00 UTC of the day before.
    let half = due("*/15 1 * * *", "Australia/Lord_Howe", "2026-04-04T13:59:00Z", 7);
    let of_the_day = half.iter().filter(|at| at.starts_with("2026-04-04")).count();
    assert_eq!(of_the_day, 6, "{half:?}");
}

#[test]
fn l17_rare_days_come_and_impossible_ones_never() {
    assert_eq!(due("0 0 29 2 *", "UTC", "2026-01-01T00:00:00Z", 2), ["2028-02-29T00:00:00Z", "2032-02-29T00:00:00Z"]);
    assert_eq!(due("0 0 29 2 *", "UTC", "2096-03-01T00:00:00Z", 1), ["2104-02-29T00:00:00Z"]);
    assert_eq!(due("0 0 31 * *", "UTC", "2026-01-31T00:00:00Z", 2), ["2026-03-31T00:00:00Z", "2026-05-31T00:00:00Z"]);
    assert!(due("0 0 30 2 *", "UTC", "2026-01-01T00:00:00Z", 1).is_empty());
    // Either of both when both are restricted.
    let either = due("0 0 13 * fri", "UTC", "2026-02-01T00:00:00Z", 3);
    assert_eq!(either, ["2026-02-06T00:00:00Z", "2026-02-13T00:00:00Z", "2026-02-20T00:00:00Z"]);
}

#[test]
fn zones_are_known_by_their_names_alone() {
    assert_eq!(Zone::named("europe/berlin").unwrap().name(), "Europe/Berlin");
    for name in ["", "Mars/Base", "../../etc/passwd", "/etc/localtime", "CET-1CEST", "+02:00"] {
        assert!(Zone::named(name).is_err(), "{name}");
    }
}

/// What the fields of an expression are made of.
#[derive(Debug, Clone)]
struct Asked {
    minute: String,
    hour: String,
    day: String,
    month: String,
    weekday: String,
}

impl Asked {
    fn text(&self) -> String {
        format!("{} {} {} {} {}", self.minute, self.hour, self.day, self.month, self.weekday)
    }
}

fn matches_field(text: &str, number: i8, (min, max): (i8, i8)) -> bool {
    text.split(',').any(|part| {
        let (range, step) = part.split_once('/').map_or((part, 1), |(range, step)| (range, step.parse().unwrap()));
        let (from, to) = match range.split_once('-') {
            _ if range == "*" => (min, max),
            Some((from, to)) => (from.parse().unwrap(), to.parse().unwrap()),
            None => (range.parse().unwrap(), if part.contains('/') { max } else { range.parse().unwrap() }),
        };
        (from..=to).contains(&number) && (number - from) % step == 0
    })
}

/// Whether the clock shows what is asked for: written without a look at how the crate does it.
fn shows(asked: &Asked, shown: DateTime) -> bool {
    let weekday = match shown.weekday() {
        Weekday::Sunday => 0,
        other => other.to_monday_one_offset(),
    };
    let day = matches_field(&asked.day, shown.day(), (1, 31));
    let week = matches_field(&asked.weekday, weekday, (0, 6));
    let open = asked.day.starts_with('*') || asked.weekday.starts_with('*');
    matches_field(&asked.minute, shown.minute(), (0, 59))
        && matches_field(&asked.hour, shown.hour(), (0, 23))
        && matches_field(&asked.month, shown.month(), (1, 12))
        && if open { day && week } else { day || week }
}

/// Every moment in a span of minutes at which it is due, by looking at the clock each minute.
fn looked_at(asked: &Asked, zone: &TimeZone, from_ms: u64, minutes: u64) -> Vec<u64> {
    let follows = asked.minute.starts_with('*') || asked.hour.starts_with('*');
    let at = |ms: u64| Timestamp::from_millisecond(ms as i64).unwrap();
    let mut all = Vec::new();
    for count in 1..=minutes {
        let now_ms = from_ms + count * MINUTE_MS;
        let (shown, before) = (zone.to_datetime(at(now_ms)), zone.to_datetime(at(now_ms - MINUTE_MS)));
        let step = before.until(shown).unwrap().total(jiff::Unit::Minute).unwrap() as i64;
        let seen_before = || {
            // The same time was shown within the last hours.
            (1..=240).any(|back| zone.to_datetime(at(now_ms - back * MINUTE_MS)) == shown)
        };
        let skipped = || (1..step).any(|more| shows(asked, before + more.minutes()));
        let due = if follows {
            shows(asked, shown)
        } else {
            (shows(asked, shown) && !seen_before()) || (step > 1 && skipped())
        };
        if due {
            all.push(now_ms);
        }
    }
    all
}

fn field(min: u8, max: u8) -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("*".to_owned()),
        2 => (min..=max).prop_map(|n| n.to_string()),
        2 => (min..=max, min..=max).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b))),
        1 => (2..=max).prop_map(|n| format!("*/{n}")),
        1 => (min..=max, min..=max).prop_map(|(a, b)| format!("{a},{b}")),
        1 => (min..=max, 2..=max).prop_map(|(a, n)| format!("{a}/{n}")),
    ]
}

fn asked() -> impl Strategy<Value = Asked> {
    (field(0, 59), field(0, 23), field(1, 31), field(1, 12), field(0, 6))
        .prop_map(|(minute, hour, day, month, weekday)| Asked { minute, hour, day, month, weekday })
}

/// Moments around which clocks are set, and some others.
const EDGES: &[(&str, &str)] = &[
    ("Europe/Berlin", "2026-03-29T01:00:00Z"),
    ("Europe/Berlin", "2026-10-25T01:00:00Z"),
    ("America/New_York", "2026-03-08T07:00:00Z"),
    ("America/New_York", "2026-11-01T06:00:00Z"),
    ("Australia/Lord_Howe", "2026-04-04T15:00:00Z"),
    ("Australia/Lord_Howe", "2026-10-03T15:30:00Z"),
    ("America/Sao_Paulo", "2018-11-04T03:00:00Z"),
    ("America/Sao_Paulo", "2018-02-18T02:00:00Z"),
    ("Africa/Cairo", "2026-04-23T22:00:00Z"),
    ("Asia/Kathmandu", "2024-02-29T00:00:00Z"),
    ("UTC", "2026-12-31T23:00:00Z"),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn l17_every_occurrence_comes_once_around_the_edges(asked in asked(), edge in 0..EDGES.len(), back in 0_u64..300) {
        let (zone, at) = EDGES[edge];
        let from_ms = ms(at) - back * MINUTE_MS;
        let (expression, named) = (Expression::parse(&asked.text()).unwrap(), Zone::named(zone).unwrap());
        let minutes = 600;
        let expected = looked_at(&asked, &TimeZone::get(zone).unwrap(), from_ms, minutes);
        let mut found = Vec::new();
        let mut now_ms = from_ms;
        while let Some(next_ms) = next_after(&expression, &named, now_ms) {
            prop_assert!(next_ms > now_ms);
            if next_ms > from_ms + minutes * MINUTE_MS {
                break;
            }
            found.push(next_ms);
            now_ms = next_ms;
        }
        prop_assert_eq!(found, expected, "{} in {} from {}", asked.text(), zone, from_ms);
    }

    #[test]
    fn l17_whenever_it_is_asked_the_answer_is_the_same(asked in asked(), start_s in 1_600_000_000_u64..2_000_000_000, part in 0_u64..100) {
        let (expression, zone) = (Expression::parse(&asked.text()).unwrap(), Zone::named("Europe/Berlin").unwrap());
        let start_ms = start_s * 1000;
        if let Some(next_ms) = next_after(&expression, &zone, start_ms) {
            let between_ms = start_ms + (next_ms - 1 - start_ms) / 100 * part;
            prop_assert_eq!(next_after(&expression, &zone, between_ms), Some(next_ms));
        }
    }

    #[test]
    fn s5_no_text_breaks_the_parser(text in ".{0,80}") {
        let _ = Expression::parse(&text);
    }
}
