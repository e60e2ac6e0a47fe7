//! What writes do.

use viv_core::lifecycle::Sandbox;
use viv_core::planted::{Planted, is_planted};
use viv_core::{FencingToken, SandboxId};

use super::{Held, Result, State};
use crate::error::StoreError;
use crate::journal::{Cursor, NewLine};
use crate::record::{Change, Idempotency, Lease, LeaseKind, Owner, Quota, Remembered};
use crate::rules::{Grant, expected_version, grant, is_living, may_live, shrunk};
use crate::store::Epoch;

impl State {
    pub(super) fn own(&mut self, owner: Owner) -> Epoch {
        self.epoch += 1;
        self.owner = Some(Owner { epoch: self.epoch, ..owner });
        Epoch(self.epoch)
    }

    pub(super) fn commit(&mut self, change: Change) -> Result<Cursor> {
        let Change { mut sandbox, lines, idempotency, quota, unused_since_ms, snapshots } = change;
        if let Some(known) = idempotency.as_ref().and_then(|key| self.remembered(key)) {
            return Err(StoreError::Repeated(Box::new(known)));
        }
        let expected = expected_version(&sandbox)?;
        let found = self.sandboxes.get(&sandbox.id);
        let version = found.map_or(0, |found| found.version);
        let used = found.zip(unused_since_ms).is_some_and(|(found, since_ms)| found.active_at_ms > since_ms);
        if (version != expected && !is_planted(Planted::NoCompare)) || used {
            return Err(StoreError::Conflict { sandbox: sandbox.id, expected, found: version });
        }
        if let Some(by) = self.name_taken(&sandbox) {
            return Err(StoreError::NameTaken { by });
        }
        if let Some(quota) = quota {
            self.check_quota(&sandbox, quota)?;
        }
        for row in &snapshots {
            self.check_row(row)?;
        }
        self.check_uses(&sandbox, &snapshots)?;
        self.snapshots.extend(snapshots.into_iter().map(|row| (row.id.clone(), row)));
        // A touch since the record was read is not undone.
        let known_ms = self.sandboxes.get(&sandbox.id).map_or(0, |found| found.active_at_ms);
        sandbox.active_at_ms = sandbox.active_at_ms.max(known_ms);
        if let Some(Idempotency { project, route, key, body_hash, at_ms, made }) = idempotency {
            let known = Remembered { body_hash, sandbox: sandbox.id.clone(), at_ms, made };
            self.idempotency.insert((project, route, key), known);
        }
        if sandbox.is_over() && !is_planted(Planted::LeaseOutlivesDelete) {
            self.leases.retain(|(of, _), _| *of != sandbox.id);
        }
        if !is_living(&sandbox) && !is_planted(Planted::ScheduleOutlivesDelete) {
            self.schedules.retain(|_, schedule| schedule.sandbox != sandbox.id);
        }
        self.settle_executions(&sandbox);
        self.sandboxes.insert(sandbox.id.clone(), sandbox);
        Ok(self.append(lines))
    }

    fn name_taken(&self, sandbox: &Sandbox) -> Option<SandboxId> {
        let name = sandbox.name.as_ref().filter(|_| is_living(sandbox))?;
        let other = self.find(&sandbox.project, name)?;
        (is_living(&other) && other.id != sandbox.id).then_some(other.id)
    }

    fn check_quota(&self, sandbox: &Sandbox, quota: Quota) -> Result<()> {
        if !may_live(sandbox) {
            return Ok(());
        }
        let others = || self.sandboxes.values().filter(|other| may_live(other) && other.id != sandbox.id);
        let total = others().count() as u64;
        let project = others().filter(|other| other.project == sandbox.project).count() as u64;
        quota.check(total, project)?;
        if !quota.has_sums() {
            return Ok(());
        }
        quota.check_sums(sandbox, others().map(|other| (other.project.as_str(), other.spec.limits.clone())))
    }

    pub(super) fn append(&mut self, lines: Vec<NewLine>) -> Cursor {
        for line in lines {
            self.cursor = Cursor(self.cursor.0 + 1);
            self.journal.insert(self.cursor, line);
        }
        self.cursor
    }

    pub(super) fn lease(
        &mut self,
        sandbox: &SandboxId,
        kind: LeaseKind,
        holder: &str,
        now_ms: u64,
        ttl_ms: u64,
    ) -> Result<Lease> {
        if self.sandboxes.get(sandbox).is_none_or(Sandbox::is_over) {
            return Err(StoreError::Over { sandbox: sandbox.clone() });
        }
        let place = (sandbox.clone(), kind);
        let wanted = Lease {
            sandbox: sandbox.clone(),
            kind,
            holder: holder.to_owned(),
            since_ms: now_ms,
            expires_at_ms: now_ms.saturating_add(ttl_ms),
            token: FencingToken(0),
        };
        let epoch = self.epoch;
        let held = self.leases.get(&place).map(|held| (&held.lease, Epoch(held.epoch)));
        let lease = match grant(held, Epoch(epoch), &wanted)? {
            Grant::Renewed(lease) => lease,
            Grant::Anew => Lease { token: self.draw_token(), ..wanted },
        };
        self.leases.insert(place, Held { lease: lease.clone(), epoch });
        Ok(lease)
    }

    pub(super) fn draw_token(&mut self) -> FencingToken {
        self.token += u64::from(self.token == 0 || !is_planted(Planted::TokenReused));
        FencingToken(self.token)
    }

    pub(super) fn release(&mut self, sandbox: &SandboxId, kind: LeaseKind, token: FencingToken) {
        let place = (sandbox.clone(), kind);
        if self.leases.get(&place).is_some_and(|held| held.lease.token == token) {
            self.leases.remove(&place);
        }
    }

    pub(super) fn touch(&mut self, sandbox: &SandboxId, active_at_ms: u64) {
        if let Some(sandbox) = self.sandboxes.get_mut(sandbox) {
            sandbox.active_at_ms = sandbox.active_at_ms.max(active_at_ms);
        }
    }

    pub(super) fn retain(&mut self, before_ms: u64, limit: usize) -> u64 {
        let mut touched = 0;
        let lines: Vec<Cursor> =
            self.journal.iter().filter(|(_, line)| line.at_ms < before_ms).map(|(at, _)| *at).collect();
        for cursor in lines.into_iter().take(limit) {
            self.journal.remove(&cursor);
            touched += 1;
        }
        let is_over = |known: &Remembered| {
            known.made.is_some() || self.sandboxes.get(&known.sandbox).is_none_or(Sandbox::is_over)
        };
        let old = self.idempotency.iter().filter(|(_, known)| known.at_ms < before_ms && is_over(known));
        let keys: Vec<_> = old.map(|(key, _)| key.clone()).collect();
        for key in keys.into_iter().take(limit - touched) {
            self.idempotency.remove(&key);
            touched += 1;
        }
        let expired = self.leases.iter().filter(|(_, held)| held.lease.expires_at_ms < before_ms);
        let leases: Vec<_> = expired.map(|(place, _)| place.clone()).collect();
        for place in leases.into_iter().take(limit - touched) {
            self.leases.remove(&place);
            touched += 1;
        }
        touched += self.retain_tasks(before_ms, limit - touched);
        touched += self.retain_executions(before_ms, limit - touched);
        touched += self.retain_letters(before_ms, limit - touched);
        let over =
            self.sandboxes.values_mut().filter(|sandbox| sandbox.is_over() && sandbox.phase_since_ms < before_ms);
        for sandbox in over {
            let small = shrunk(sandbox);
            if touched < limit && small != *sandbox {
                *sandbox = small;
                touched += 1;
            }
        }
        touched as u64
    }
}
