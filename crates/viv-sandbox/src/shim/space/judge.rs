//! Who is to end, when the disk that all share has run out.
//!
//! Everybody stands still meanwhile, so nobody who wants to write is refused for what another did. Then the one that
//! took most lately is ended, with `disk_full`, if it was sandboxes at all that took it; and the others run on. Only
//! where next to nothing is left, those end with it that took about as much: there is no room for another round.
//!
//! What the ended one has written stays until it is destroyed: it is its user's, and may be what he wants to look at.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use viv_layer::{Weigher, Weight};
use viv_provider::InstanceRef;

use super::level::{Fallen, Room, Scarce};
use super::{ballast, unlinked};
use crate::cgroup::{InstanceCgroups, Layout};
use crate::layout::{DataDir, InstanceDir, InstanceRecord};
use crate::local::socket;
use crate::rootfs::Writable;
use crate::shim::proto::{LINE_BYTES_MAX, ShimReply, ShimRequest};

/// How long all shims together may take to have their sandboxes stand still. Who does not runs on.
const HOLD_WITHIN: Duration = Duration::from_secs(2);

/// How long may be looked for who took most. Those that were not looked at to their end by then count with what was
/// seen, which is as much for all of them.
const WEIGH_WITHIN: Duration = Duration::from_secs(5);

/// How long everybody stands still at the most, should the judge be stopped.
const HELD_FOR: Duration = Duration::from_secs(15);

/// How long the end of one may take.
const END_WITHIN: Duration = Duration::from_secs(10);

/// Entries that are looked at in one sandbox before the next has its turn.
const TURN_ENTRIES: u64 = 2048;

/// Who took this part of what the worst one took was at it as well, as a divisor.
const SIMILAR_SHARE: u64 = 2;

/// The clock of files is a tick behind the one that was asked.
const CLOCK_SLACK_S: i64 = 1;

/// What is looked at of one sandbox.
struct Suspect {
    instance: InstanceRef,
    /// Its shim; until this ends, it stands still.
    shim: BufReader<UnixStream>,
    cgroups: Option<InstanceCgroups>,
    places: Vec<Weigher>,
    taken: Weight,
}

/// Judges, and tells what is left before anybody runs again.
pub(super) fn judge(data: &DataDir, fallen: &Fallen, tell: impl FnOnce(&Room)) {
    let mut suspects = assemble(data, fallen.since_s - CLOCK_SLACK_S);
    have_them_stand_still(&mut suspects);
    let is_gone = Room::of(&data.layers()).is_ok_and(|room| room.is_gone(fallen.what));
    give_back(data);
    weigh(&mut suspects, fallen.since_s - CLOCK_SLACK_S);
    end_the_worst(&mut suspects, fallen, is_gone);
    match Room::of(&data.layers()) {
        Ok(left) => tell(&left),
        Err(error) => note!("the disk cannot be looked at: {error}"),
    }
}

/// Gives back as much of the ballast as it takes for the others to have a part: filesystems keep some for themselves.
fn give_back(data: &DataDir) {
    while let Ok(room) = Room::of(&data.layers())
        && ballast::give_back(&data.ballast(), &room)
    {}
}

fn end_the_worst(suspects: &mut Vec<Suspect>, fallen: &Fallen, is_gone: bool) {
    let what = match fallen.what {
        Scarce::Bytes => "bytes",
        Scarce::Inodes => "files",
    };
    let taken: Vec<u64> = suspects
        .iter()
        .map(|suspect| match fallen.what {
            Scarce::Bytes => suspect.taken.bytes,
            Scarce::Inodes => suspect.taken.entries,
        })
        .collect();
    let mut worst = worst(&taken, fallen.by, is_gone);
    if worst.is_empty() {
        let by_sandboxes = taken.iter().copied().fold(0, u64::saturating_add);
        note!("the disk has run out by {} {what}, of which sandboxes took {by_sandboxes}: nobody is ended", fallen.by);
    }
    // From the last on, so that the others keep their places.
    worst.sort_unstable();
    for index in worst.into_iter().rev() {
        let offender = suspects.remove(index);
        let what = format!("of {} {what} that were taken of what was left, it took {}", fallen.by, taken[index]);
        note!("the disk has run out: {} is ended: {what}", offender.instance);
        if let Err(error) = offender.end(what) {
            note!("it cannot be ended: {error}");
        }
    }
}

/// Who is to end: nobody, if others than sandboxes took most of it; else the one that took most, and where there is no
/// room for another round those that took about as much.
fn worst(taken: &[u64], fallen_by: u64, is_gone: bool) -> Vec<usize> {
    let by_sandboxes = taken.iter().copied().fold(0, u64::saturating_add);
    let Some(first) = (0..taken.len()).max_by_key(|&index| taken[index]).filter(|&index| taken[index] > 0) else {
        return Vec::new();
    };
    if by_sandboxes < fallen_by / 2 {
        return Vec::new();
    }
    let least = taken[first] / SIMILAR_SHARE;
    (0..taken.len()).filter(|&index| index == first || (is_gone && taken[index] >= least.max(1))).collect()
}

/// All that answer. Each is asked to stand still; that they do is heard later, so that nobody waits for another.
fn assemble(data: &DataDir, since_s: i64) -> Vec<Suspect> {
    let mut suspects = Vec::new();
    let entries = std::fs::read_dir(data.instances()).into_iter().flatten().flatten();
    for dir in entries.map(|entry| InstanceDir::new(entry.path())) {
        match Suspect::summon(&dir, since_s) {
            Ok(suspect) => suspects.extend(suspect),
            // It is ending, or has ended: then it takes nothing more.
            Err(error) if socket::is_refused(&error) => {}
            Err(error) => note!("{} is not judged: {error}", dir.path().display()),
        }
    }
    suspects
}

fn have_them_stand_still(suspects: &mut [Suspect]) {
    let until = Instant::now() + HOLD_WITHIN;
    for suspect in suspects {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match suspect.hear(left) {
            Ok(ShimReply::Held { .. }) => {}
            Ok(other) => note!("{} is judged while it runs: {other:?}", suspect.instance),
            Err(error) => note!("{} is judged while it runs: {error}", suspect.instance),
        }
    }
}

fn weigh(suspects: &mut [Suspect], since_s: i64) {
    let until = Instant::now() + WEIGH_WITHIN;
    for suspect in &mut *suspects {
        let held = suspect.cgroups.as_ref().map(|cgroups| unlinked::held_by(cgroups, since_s, until));
        let (bytes, entries) = held.unwrap_or_default();
        suspect.taken = Weight { bytes, entries };
    }
    let mut going = true;
    while going && Instant::now() < until {
        going = false;
        for suspect in &mut *suspects {
            going |= suspect.weigh_some();
        }
    }
    for suspect in suspects {
        for place in std::mem::take(&mut suspect.places) {
            suspect.count(place.weight());
        }
    }
}

impl Suspect {
    /// `None` when it is none of ours.
    fn summon(dir: &InstanceDir, since_s: i64) -> io::Result<Option<Self>> {
        let Some(record) = dir.read_record()? else { return Ok(None) };
        let stream = socket::connect_blocking(&dir.socket())?;
        let mut shim = BufReader::new(stream);
        let hold = ShimRequest::Hold { instance: record.instance.clone(), for_ms: HELD_FOR.as_millis() as u64 };
        say(&mut shim, &hold)?;
        let places = places_of(dir, &record).filter_map(|place| Weigher::new(&place, since_s).ok()).collect();
        let layout = record.cgroup_layout.clone().or_else(|| Layout::detect().ok());
        let cgroups = layout.map(|layout| InstanceCgroups::new(layout, record.cgroup()));
        Ok(Some(Self { instance: record.instance, shim, cgroups, places, taken: Weight::default() }))
    }

    fn hear(&mut self, within: Duration) -> io::Result<ShimReply> {
        self.shim.get_ref().set_read_timeout(Some(within))?;
        let mut reply = Vec::new();
        (&mut self.shim).take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut reply)?;
        if reply.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&reply)?)
    }

    /// Looks at some more of it; false when all was seen.
    fn weigh_some(&mut self) -> bool {
        let Some(place) = self.places.last_mut() else { return false };
        match place.weigh(TURN_ENTRIES) {
            Ok(false) => return true,
            Ok(true) => {}
            // What cannot be looked at to its end counts with what was seen.
            Err(error) => note!("{}: {error}", self.instance),
        }
        let weight = place.weight();
        self.places.pop();
        self.count(weight);
        !self.places.is_empty()
    }

    fn count(&mut self, weight: Weight) {
        self.taken.bytes = self.taken.bytes.saturating_add(weight.bytes);
        self.taken.entries = self.taken.entries.saturating_add(weight.entries);
    }

    fn end(mut self, what: String) -> io::Result<()> {
        let end = ShimRequest::EndForSpace { instance: self.instance.clone(), what };
        say(&mut self.shim, &end)?;
        match self.hear(END_WITHIN)? {
            ShimReply::Done => Ok(()),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }
}

/// Where those inside can take room: in the writable layer, and by output that is kept.
fn places_of<'a>(dir: &'a InstanceDir, record: &'a InstanceRecord) -> impl Iterator<Item = PathBuf> + 'a {
    let layer = record.made.as_ref().and_then(|made| match &made.plan.writable {
        Writable::Folder(folder) => Some(folder.as_path()),
        Writable::Disk(file) => file.parent(),
    });
    layer.map(Path::to_owned).into_iter().chain([dir.run()])
}

fn say(shim: &mut BufReader<UnixStream>, request: &ShimRequest) -> io::Result<()> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    shim.get_mut().write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s1_the_worst_is_ended_and_nobody_for_what_others_did() {
        assert_eq!(worst(&[10, 900, 200], 1000, false), [1]);
        assert_eq!(worst(&[10, 900, 200], 3000, false), [0; 0], "most of it was taken by somebody else");
        assert_eq!(worst(&[0, 0], 0, true), [0; 0], "nobody took anything");
        assert_eq!(worst(&[], 1000, true), [0; 0]);
        assert_eq!(worst(&[500, 500, 500], 1500, false).len(), 1, "one at a time, while there is room");
        assert_eq!(worst(&[500, 10, 900, 400], 1500, true), [0, 2], "who did about as much ends with it");
    }
}
