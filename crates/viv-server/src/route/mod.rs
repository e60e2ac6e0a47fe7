//! The routes: one file per group.

mod backup;
mod checkpoint;
mod cleanup;
mod daemon;
mod drain;
mod events;
mod executions;
mod files;
mod keys;
mod lifecycle;
mod looks;
mod metrics;
mod output;
mod reconcile;
mod rest;
mod sandboxes;
pub(crate) mod schedules;
mod select;
mod snapshots;
mod spares;
pub(crate) mod tasks;
mod webhooks;

use crate::api::{Api, Table};
use crate::state::ServerState;

/// Page size when nothing was said.
const PAGE_DEFAULT: usize = 100;

/// All of them, as a router.
pub(crate) fn all(state: &ServerState) -> Api<'_> {
    let mut api = Api::new(state);
    tell(&mut api);
    api
}

/// Tells a table about all of them.
pub(crate) fn tell(table: &mut impl Table) {
    daemon::tell(table);
    sandboxes::tell(table);
    lifecycle::tell(table);
    rest::tell(table);
    snapshots::tell(table);
    looks::tell(table);
    checkpoint::tell(table);
    executions::tell(table);
    output::tell(table);
    files::tell(table);
    events::tell(table);
    keys::tell(table);
    schedules::tell(table);
    tasks::tell(table);
    drain::tell(table);
    backup::tell(table);
    reconcile::tell(table);
    metrics::tell(table);
    cleanup::tell(table);
    spares::tell(table);
    webhooks::tell(table);
}

fn page_limit(limit: Option<viv_api::bound::PageLimit>) -> usize {
    limit.map_or(PAGE_DEFAULT, |limit| limit.get() as usize)
}
