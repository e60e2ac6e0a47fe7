//! Schedules.

use viv_core::ScheduleId;
use viv_core::schedule::Schedule;

use super::{Result, State};
use crate::error::StoreError;
use crate::journal::NewLine;
use crate::record::{ScheduleListing, ScheduleQuery};
use crate::rules::{self, is_living};

impl State {
    pub(super) fn put_schedule(&mut self, schedule: Schedule, lines: Vec<NewLine>, max: u64) -> Result<()> {
        let expected = rules::expected_schedule_version(&schedule)?;
        let found = self.schedules.get(&schedule.id).map_or(0, |found| found.version);
        let living = self.sandboxes.get(&schedule.sandbox).is_some_and(is_living);
        if found != expected || !living {
            return Err(StoreError::Conflict { sandbox: schedule.sandbox, expected, found });
        }
        if found == 0 {
            let used = self.schedules.values().filter(|other| other.sandbox == schedule.sandbox).count() as u64;
            rules::check_schedules(used, max)?;
        }
        self.schedules.insert(schedule.id.clone(), schedule);
        self.append(lines);
        Ok(())
    }

    pub(super) fn schedules_like(&self, query: &ScheduleQuery) -> ScheduleListing {
        let wanted = self.schedules.values().filter(|found| {
            query.sandbox.as_ref().is_none_or(|sandbox| found.sandbox == *sandbox)
                && query.project.as_ref().is_none_or(|project| found.project == *project)
                && query.after.as_ref().is_none_or(|after| found.id > *after)
        });
        rules::schedule_page(wanted.cloned(), query.limit)
    }

    pub(super) fn due_schedules(&self, until_ms: u64, limit: usize) -> Vec<ScheduleId> {
        let times = self.schedules.values().filter_map(|found| Some((found.due_at_ms()?, found.id.clone())));
        let mut due: Vec<_> = times.filter(|(at_ms, _)| *at_ms <= until_ms).collect();
        due.sort();
        due.into_iter().take(limit).map(|(_, id)| id).collect()
    }

    pub(super) fn remove_schedule(&mut self, id: &ScheduleId, line: NewLine) -> bool {
        let removed = self.schedules.remove(id).is_some();
        if removed {
            self.append(vec![line]);
        }
        removed
    }
}
