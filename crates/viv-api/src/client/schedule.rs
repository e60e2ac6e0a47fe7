//! Schedules, and drain.

use ureq::http::Method;

use super::http::Call;
use super::sandbox::pages;
use super::{Client, Result, SandboxHandle};
use crate::bound::ScheduleRef;
use crate::daemon::{BeginDrain, Drain};
use crate::page::Page;
use crate::path::{self, fill};
use crate::query::{self, encode};
use crate::schedule::{ChangeSchedule, CreateSchedule, Schedule};

impl SandboxHandle<'_> {
    /// Makes a schedule (L17).
    pub fn create_schedule(&self, request: &CreateSchedule) -> Result<Schedule> {
        self.client.http.ask(self.call(Call::post(self.path(path::SANDBOX_SCHEDULES)).json(request)))
    }

    /// All of its schedules, part by part.
    pub fn schedules_all(&self) -> impl Iterator<Item = Result<Schedule>> + '_ {
        pages(None, |cursor| {
            let query = query::PageQuery { cursor, limit: None };
            self.client.http.ask(self.call(Call::get(self.path(path::SANDBOX_SCHEDULES) + &encode(&query))))
        })
    }
}

impl Client {
    /// All schedules, part by part.
    pub fn schedules_all(&self) -> impl Iterator<Item = Result<Schedule>> + '_ {
        pages(None, |cursor| -> Result<Page<Schedule>> {
            let query = query::PageQuery { cursor, limit: None };
            self.http.ask(Call::get(path::SCHEDULES.to_owned() + &encode(&query)))
        })
    }

    /// A schedule.
    pub fn schedule(&self, schedule: &ScheduleRef) -> Result<Schedule> {
        self.http.ask(Call::get(fill(path::SCHEDULE, &[schedule.as_str()])))
    }

    /// Changes a schedule; what is not said stays.
    pub fn change_schedule(&self, schedule: &ScheduleRef, change: &ChangeSchedule) -> Result<Schedule> {
        self.http.ask(Call::new(Method::PUT, fill(path::SCHEDULE, &[schedule.as_str()])).json(change))
    }

    /// Takes a schedule away.
    pub fn remove_schedule(&self, schedule: &ScheduleRef) -> Result<()> {
        self.http.tell(Call::new(Method::DELETE, fill(path::SCHEDULE, &[schedule.as_str()])))
    }

    /// Runs a schedule now.
    pub fn run_schedule(&self, schedule: &ScheduleRef) -> Result<Schedule> {
        self.http.ask(Call::post(fill(path::SCHEDULE_RUN, &[schedule.as_str()])))
    }

    /// Takes no new work, and saves or finishes every sandbox (L21).
    pub fn drain(&self, request: &BeginDrain) -> Result<Drain> {
        self.http.ask(Call::post(path::DRAIN).json(request))
    }

    /// How a drain stands.
    pub fn drain_status(&self) -> Result<Drain> {
        self.http.ask(Call::get(path::DRAIN))
    }

    /// Takes new work again.
    pub fn undrain(&self) -> Result<Drain> {
        self.http.ask(Call::new(Method::DELETE, path::DRAIN))
    }
}
