//! What must hold of parsers and decoders for any bytes, beside that they do not panic, hang or take all memory.
//!
//! One function for each target: libFuzzer calls it with what it makes up (`make fuzz`, in `fuzz/`, which is no part of the
//! workspace), and an ordinary test calls it with the corpus that is kept there. What is broken is told by a panic.
//!
//! Architecture invariant: for tests only. Nothing of ours depends on this crate.
#![forbid(unsafe_code)]

use std::fmt::{Debug, Display};
use std::fs;
use std::io::Cursor;
use std::path::Path;
use std::str::FromStr;

use serde::Serialize;
use serde::de::DeserializeOwned;
use viv_agent::frame::{ChunkHeader, HEADER_BYTES, decode_header, encode_header};
use viv_agent::proto;
use viv_core::lifecycle::Sandbox;
use viv_core::{ExecutionId, OperationId, OwnerMark, SandboxId, ScheduleId, SnapshotId, TaskId};
use viv_cron::{Expression, Zone, next_after};
use viv_image::{Archive, ImageConfig, Platform, Reference};
use viv_layer::{Bounds, Form, unpack};
use viv_store::{ListQuery, MemoryStore, SnapshotQuery, Store};

/// A target, by its name.
pub type Target = (&'static str, fn(&[u8]));

/// All of them; `fuzz/fuzz_targets` has a file for each, and `fuzz/corpus` a folder.
pub const TARGETS: &[Target] = &[
    ("frame", frame),
    ("proto", proto),
    ("cron", cron),
    ("reference", reference),
    ("image_config", image_config),
    ("image_archive", image_archive),
    ("untar", untar),
    ("ids", ids),
    ("requests", requests),
    ("record", record),
    ("spans", spans),
    ("cursors", cursors),
    ("challenges", challenges),
    ("snapshot_file", snapshot_file),
    ("page_list", page_list),
];

/// Headers of the agent's frames, and of chunks of output.
pub fn frame(data: &[u8]) {
    if let Some((header, _)) = data.split_first_chunk::<HEADER_BYTES>()
        && let Ok((kind, length)) = decode_header(*header)
    {
        assert_eq!(encode_header(kind, length), *header);
    }
    if let Some((header, rest)) = ChunkHeader::decode(data) {
        assert_eq!(header.encode()[..], data[..ChunkHeader::BYTES]);
        assert_eq!(rest.len() + ChunkHeader::BYTES, data.len());
    }
}

/// Messages of the agent's protocol, of both sides.
pub fn proto(data: &[u8]) {
    same::<proto::Request>(data);
    same::<proto::Reply>(data);
    same::<proto::ControlMessage>(data);
    same::<proto::AgentMessage>(data);
    same::<proto::StreamEvent>(data);
    same::<proto::InsideCall>(data);
    same::<proto::InsideReply>(data);
    same::<proto::AgentConfig>(data);
}

/// Cron expressions, and the moments at which they are due.
pub fn cron(data: &[u8]) {
    // Around the two changes of clocks in a year, and at both ends of time.
    const TIMES_MS: [u64; 5] = [0, 1_743_292_800_000, 1_761_440_400_000, 4_102_444_800_000, 253_402_300_799_000];
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(expression) = Expression::parse(text) else { return };
    assert!(Expression::parse(expression.as_str()).is_ok());
    for zone in ["UTC", "Europe/Berlin", "Australia/Lord_Howe"] {
        let Ok(zone) = Zone::named(zone) else { panic!("{zone} is not carried along") };
        for after_ms in TIMES_MS {
            if let Some(first) = next_after(&expression, &zone, after_ms) {
                assert!(first > after_ms, "{text:?}: {first} is not after {after_ms}");
                let between = after_ms + (first - after_ms) / 2;
                let again = next_after(&expression, &zone, between.min(first - 1));
                assert_eq!(again, Some(first), "{text:?}: what is next does not depend on when it is asked");
            }
        }
    }
}

/// Names of images.
pub fn reference(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(parsed) = text.parse::<Reference>() else { return };
    for shown in [parsed.to_string(), parsed.familiar()] {
        let again = shown.parse::<Reference>();
        assert_eq!(again.as_ref().ok(), Some(&parsed), "{text:?} is shown as {shown:?}");
    }
}

/// Configurations of images.
pub fn image_config(data: &[u8]) {
    let Ok(config) = ImageConfig::from_json(data) else { return };
    let again = ImageConfig::from_json(&config.to_json());
    let Ok(again) = again else { panic!("what was written cannot be read: {again:?}") };
    assert_eq!((again.workdir, again.env), (config.workdir, config.env));
}

/// Archives of images: tar, manifests, indexes.
pub fn image_archive(data: &[u8]) {
    let folder = scratch();
    let file = folder.path().join("image.tar");
    if fs::write(&file, data).is_err() {
        return;
    }
    let work = folder.path().join("work");
    let made = fs::create_dir(&work);
    assert!(made.is_ok(), "{made:?}");
    let bounds = viv_image::Bounds::default();
    let Ok(archive) = Archive::open(&file, &work, bounds) else { return };
    let names = archive.names();
    for name in names.iter().map(|name| Some(name.as_str())).chain([None]) {
        let Ok(image) = archive.image(name, &Platform::linux("amd64")) else { continue };
        for layer in &image.layers {
            if let Ok(mut reader) = archive.layer(layer) {
                let _ = std::io::copy(&mut reader, &mut std::io::sink());
            }
        }
    }
}

/// Archives that are unpacked: nothing is made, changed or removed anywhere else.
pub fn untar(data: &[u8]) {
    const SENTINEL: &str = "sentinel";
    let bounds = Bounds { entries_max: 200, bytes_max: 1 << 20, file_bytes_max: 1 << 20, depth_max: 20 };
    for form in [Form::Oci, Form::Native] {
        let folder = scratch();
        let inside = folder.path().join("inside");
        let made = fs::create_dir(&inside).and_then(|()| fs::write(folder.path().join(SENTINEL), SENTINEL));
        assert!(made.is_ok(), "{made:?}");
        let _ = unpack(Cursor::new(data), &inside, form, &bounds);
        let mut beside: Vec<_> = entries(folder.path());
        beside.sort();
        assert_eq!(beside, ["inside", SENTINEL], "something was made outside");
        let kept = fs::read(folder.path().join(SENTINEL));
        assert_eq!(kept.ok().as_deref(), Some(SENTINEL.as_bytes()), "something was written outside");
    }
}

/// Ids and marks.
pub fn ids(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    shown_again::<SandboxId>(text);
    shown_again::<SnapshotId>(text);
    shown_again::<ScheduleId>(text);
    shown_again::<TaskId>(text);
    shown_again::<ExecutionId>(text);
    shown_again::<OperationId>(text);
    shown_again::<OwnerMark>(text);
}

/// Bodies of requests.
pub fn requests(data: &[u8]) {
    same::<viv_api::sandbox::CreateSandbox>(data);
    same::<viv_api::task::CreateTask>(data);
    same::<viv_api::schedule::CreateSchedule>(data);
    same::<viv_api::execution::StartExecution>(data);
    same::<viv_api::limits::Limits>(data);
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = text.parse::<viv_api::bound::LabelFilter>();
    let _ = text.parse::<viv_api::bound::SandboxRef>();
    let _ = text.parse::<viv_api::bound::Cursor>();
    let _ = text.parse::<viv_api::bound::Path>();
}

/// Records as a store keeps them.
pub fn record(data: &[u8]) {
    same::<Sandbox>(data);
    same::<viv_core::task::Task>(data);
    same::<viv_core::schedule::Schedule>(data);
    same::<viv_core::snapshot::Snapshot>(data);
    same::<viv_core::execution::Execution>(data);
}

/// Spans of time.
pub fn spans(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(ms) = viv_core::span::parse_span(text) {
        let again = viv_core::span::parse_span(&format!("{ms}ms"));
        assert_eq!(again, Some(ms), "{text:?}");
    }
}

/// Where lists go on: what no page gave is refused, and never an answer.
pub fn cursors(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let after = Some(text.to_owned());
    let store = MemoryStore::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let Ok(runtime) = runtime else { panic!("no runtime") };
    runtime.block_on(async {
        let _ = store.list(&ListQuery { after: after.clone(), limit: 10, ..ListQuery::default() }).await;
        let _ = store.snapshots(&SnapshotQuery { after, limit: 10, ..SnapshotQuery::default() }).await;
    });
}

/// How registries ask who somebody is (`WWW-Authenticate`): what was read, written with quotes, is read as the same.
pub fn challenges(data: &[u8]) {
    let Ok(header) = std::str::from_utf8(data) else { return };
    let read = viv_image::challenges(header);
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
    let written: Vec<String> = read
        .iter()
        .map(|(scheme, parameters)| {
            let all = parameters.iter().map(|(name, value)| format!("{name}=\"{}\"", quoted(value)));
            format!("{scheme} {}", all.collect::<Vec<_>>().join(","))
        })
        .collect();
    assert_eq!(viv_image::challenges(&written.join(", ")), read, "{header:?}");
}

/// Exported snapshots, which users bring along: packed, and what is packed. Nothing is made or changed anywhere else, and
/// what is taken has its layers in folders.
pub fn snapshot_file(data: &[u8]) {
    const SENTINEL: &str = "sentinel";
    // A fuzzer does not learn how to pack.
    let packed = zstd::encode_all(data, 1);
    let Ok(packed) = packed else { panic!("it cannot be packed") };
    let bounds = Bounds { entries_max: 200, bytes_max: 1 << 20, file_bytes_max: 1 << 20, depth_max: 20 };
    for content in [data, packed.as_slice()] {
        let folder = scratch();
        let (file, place) = (folder.path().join("file"), folder.path().join("place"));
        let made = fs::create_dir(&place).and_then(|()| fs::write(&file, content));
        assert!(made.and_then(|()| fs::write(folder.path().join(SENTINEL), SENTINEL)).is_ok(), "no folder to work in");
        let taken = viv_sandbox::fuzzing::exported_snapshot(&file, &place, &bounds);
        assert!(taken.is_none() || place.join("layers").is_dir(), "{taken:?} layers, and no folder of them");
        let mut beside: Vec<_> = entries(folder.path());
        beside.sort();
        assert_eq!(beside, ["file", "place", SENTINEL], "something was made outside");
        let kept = fs::read(folder.path().join(SENTINEL));
        assert_eq!(kept.ok().as_deref(), Some(SENTINEL.as_bytes()), "something was written outside");
        assert_eq!(fs::read(&file).ok().as_deref(), Some(content), "the file itself was written");
    }
}

/// Lists of pages, as CRIU writes them: in order, without overlap, and one after the other in their file.
pub fn page_list(data: &[u8]) {
    let Some(rows) = viv_sandbox::fuzzing::page_list(data) else { return };
    let (mut address, mut at) = (0, 0);
    for (begins, place, count) in rows {
        assert!(begins >= address, "pages at {begins} overlap those before {address}");
        assert_eq!(place, at, "where the pages of {begins} are");
        let (Some(ends), Some(next)) = (begins.checked_add(count), place.checked_add(count)) else {
            panic!("{count} pages at {begins} end nowhere")
        };
        (address, at) = (ends, next);
    }
}

/// What was read is written so that it is read as the same.
fn same<T: DeserializeOwned + Serialize + Debug>(data: &[u8]) {
    let Ok(value) = serde_json::from_slice::<T>(data) else { return };
    let Ok(text) = serde_json::to_vec(&value) else { panic!("it cannot be written: {value:?}") };
    let again = match serde_json::from_slice::<T>(&text) {
        Ok(again) => again,
        Err(error) => panic!("{error}: {}", String::from_utf8_lossy(&text)),
    };
    assert_eq!(format!("{again:?}"), format!("{value:?}"));
}

fn shown_again<T: FromStr + Display>(text: &str) {
    if let Ok(id) = text.parse::<T>() {
        let shown = id.to_string();
        assert_eq!(shown, text, "an id is shown as it is written");
    }
}

fn scratch() -> tempfile::TempDir {
    match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => panic!("no folder: {error}"),
    }
}

fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
